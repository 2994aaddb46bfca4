"""The scheduler without I/O: scopes, their clocks, and the leases. Nothing here awaits.

What holds between any two calls:

* A request starts no earlier than `basis + gap` of each of its scopes, where basis is the
  scope's latest start or response head, and not inside a block; while a scope's gap is
  above zero at most one of its leases has not seen its head.
* A lease took all of its scopes or none; `in_flight` of a scope is its open leases.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable

from gatekeeper import fields
from gatekeeper.clock import Clock
from gatekeeper.errors import GatekeeperError
from gatekeeper.pacing.blocks import Report
from gatekeeper.pacing.counters import Counters, Keeper
from gatekeeper.pacing.expiry import OpenLeases
from gatekeeper.pacing.intervals import LONGEST, Interval, Settings, Wish, interval_for, jittered
from gatekeeper.pacing.leases import Grant
from gatekeeper.pacing.ledger import INF, MemoryLedger, Scope
from gatekeeper.pacing.rules import Rules
from gatekeeper.pacing.turns import Turns

__all__ = ["DURABLE", "Books"]

_log = logging.getLogger(__name__)

DURABLE = 1.0
"""Clocks further ahead than this many seconds outlive the process (promise 8)."""
_MAX_INTERVALS = 10_000


class Books:
    """Every scope and every lease of one scheduler."""

    def __init__(
        self,
        clock: Clock,
        rules: Rules,
        ledger: MemoryLedger,
        rng: random.Random,
        *,
        rearm: Callable[[float], None] = lambda _when: None,
    ) -> None:
        self.clock = clock
        self.rules = rules
        self.pacing = rules.pacing
        self.ledger = ledger
        self.scopes = ledger.scopes
        self.rng = rng
        self.keeper: Keeper | None = None
        self.floor_until = -INF
        """After a crash: no unknown host is asked before that moment."""
        self.frozen = False
        """The fault is ours: nothing is recorded against hosts."""
        self.mixed: dict[str, float] = {}
        """Hosts whose origins ask for different paces: the longer one, which must be kept to
        should the next run begin with that origin."""
        self.turns = Turns(self, rearm)
        self.counters = Counters()
        self.on_idle: Callable[[], None] | None = None
        """Told when the last open lease ends."""
        self.in_flight = 0
        self.max_in_flight = self.pacing.max_in_flight
        self._plain = rules.plain
        self._learns = self.pacing.latency_factor > 0
        self._jitter = self.pacing.jitter
        self._ttl = self.pacing.lease_ttl
        self._intervals: dict[tuple[Settings, Wish], tuple[Wish, Interval]] = {}
        self.leases = OpenLeases()
        self._usual = self.leases.usual

    # --- scopes -------------------------------------------------------------------------

    def host(self, name: str, extra: tuple[str, ...] = ()) -> Scope:
        """The scope of a host, begun if unknown, with the scopes it shares."""
        scope = self.scopes.get(name)
        if scope is None:
            scope = self.scopes[name] = Scope(name, self.rules.for_host(name))
            self._begin(scope)
            if not self._plain:
                self.share(scope, ())
        if extra:
            self.share(scope, extra)
        return scope

    def shared(self, name: str) -> Scope:
        """A shared scope by its name, begun if unknown."""
        scope = self.scopes.get(name)
        if scope is None:
            scope = self.scopes[name] = Scope(name, self.rules.for_shared(name))
            self._begin(scope)
        return scope

    def _begin(self, scope: Scope) -> None:
        if self.floor_until > -INF:
            # Clocks up to a second ahead were not kept: such a scope counts as just used.
            scope.basis = self.floor_until - DURABLE
            scope.gap = DURABLE

    def share(self, scope: Scope, extra: tuple[str, ...]) -> None:
        """Learn which scopes a host shares now: those configured, and the caller's."""
        names = tuple(dict.fromkeys((*self.rules.shared_names(scope.name), *extra)))
        if names != tuple(other.name for other in scope.shared):
            scope.shared = tuple(map(self.shared, names))

    def interval(self, scope: Scope, wish: Wish, now: float) -> float:
        """The seconds in force for a host now; what they are made of is kept for `why`."""
        if scope.history is not None:
            found = interval_for(wish, scope.settings, scope.history, self.pacing, now)
            scope.wish, scope.interval = wish, found
            return found.seconds
        if wish is not scope.wish or scope.interval is None:
            # One object for all hosts that are asked for the same: they are many.
            kept = self._intervals.get((scope.settings, wish))
            if kept is None:
                if len(self._intervals) >= _MAX_INTERVALS:
                    self._intervals.clear()
                kept = (wish, interval_for(wish, scope.settings))
                self._intervals[scope.settings, wish] = kept
            scope.wish, scope.interval = kept
        return scope.interval.seconds

    # --- granting -----------------------------------------------------------------------

    def free_now(self, scope: Scope, now: float) -> bool:
        """May somebody take a turn of this host without standing in line?"""
        quiet = not scope.in_flight and scope.history is None
        if (scope.basis + scope.gap if quiet else scope.due_at()) > now:
            return False
        turns = self.turns
        if scope.line is not None or turns.halted or turns.behind or turns.remote is not None:
            return False
        if self.frozen or self.in_flight >= self.max_in_flight:
            return False
        return not scope.shared or all(
            other.line is None and other.due_at() <= now for other in scope.shared
        )

    def try_take(
        self, scope: Scope, wish: Wish, now: float, url: str, ttl: float | None
    ) -> Grant | None:
        """All scopes or none, in one step; None if it may not start now after all.

        No await stands between the admission that brought the wish and the books.
        """
        if wish is scope.wish and scope.history is None and scope.interval is not None:
            gap = scope.interval.seconds
        else:
            gap = self.interval(scope, wish, now)
        if gap > scope.gap and (scope.basis + gap > now or scope.unheaded):
            self.lengthen(scope, gap, now)
            return None
        if gap <= DURABLE < scope.gap < LONGEST:
            self.mixed[scope.name] = scope.gap
        expires = now + (self._ttl if ttl is None else ttl)
        grant = Grant(self, scope, url, now, expires, scope.basis, scope.shared)
        scope.basis = now
        scope.gap = gap if self._jitter <= 0 else jittered(gap, self._jitter, self.rng)
        scope.in_flight += 1
        scope.unheaded += 1
        if scope.shared:
            self._take_shared(grant, now)
        self.in_flight += 1
        if ttl is None:
            self._usual[grant] = None
        else:
            self.leases.add_alone(grant)
        if expires < self.turns.armed:
            self.turns.arm(expires)
        if self.keeper is not None:
            try:
                self._keep(grant, now)
            except BaseException:
                self._withdraw(grant)  # not durable, so not granted; the clocks stay
                raise
        self.counters.granted += 1
        return grant

    def lengthen(self, scope: Scope, gap: float, now: float) -> None:
        """The text asks for more than was known when the last request began."""
        scope.gap = gap
        if self.keeper is not None and gap > DURABLE:
            self.keeper.promise(scope, now)

    def _take_shared(self, grant: Grant, now: float) -> None:
        grant.undone = tuple(other.basis for other in grant.others)
        for other in grant.others:
            other.basis = now
            other.gap = jittered(other.settings.default, self._jitter, self.rng)
            other.in_flight += 1
            other.unheaded += 1

    def take_dry(
        self, scope: Scope, wish: Wish, now: float, url: str, ttl: float | None
    ) -> tuple[Grant, float]:
        """A grant at once, and the seconds it would have waited: decide, and count."""
        gap = self.interval(scope, wish, now)
        clocks = [scope.basis + max(gap, scope.gap), *(o.clock_at() for o in scope.shared)]
        start = max(now, scope.clock_at(), *clocks)
        expires = now + (self._ttl if ttl is None else ttl)
        grant = Grant(self, scope, url, start, expires, start, scope.shared)
        scope.basis, scope.gap = start, gap
        scope.in_flight += 1
        scope.unheaded += 1
        self._take_shared(grant, start)
        self.in_flight += 1
        self.leases.add_alone(grant)
        self.turns.arm(grant.expires_at)
        self.counters.granted += 1
        return grant, start - now

    def _keep(self, grant: Grant, now: float) -> None:
        """Make the clocks of a lease durable where they lie more than a second ahead."""
        if self.keeper is None:
            return
        if grant.scope.gap > DURABLE or grant.scope.name in self.mixed:
            self.keeper.promise(grant.scope, now)
        for other in grant.others:
            if other.gap > DURABLE:
                self.keeper.promise(other, now)

    # --- the life of a lease ------------------------------------------------------------

    def renew(self, grant: Grant, seconds: float) -> None:
        """A new end, that many seconds from now."""
        if self._usual.pop(grant, self) is self:
            self.leases.remove_alone()
        grant.expires_at = self.clock.monotonic() + max(0.0, seconds)
        self.leases.add_alone(grant)
        self.turns.arm(grant.expires_at)

    def expire(self, now: float) -> None:
        """End every lease whose time is over; it counts as used until now."""
        for grant in self.leases.over(now):
            self.counters.expired += 1
            try:
                self.release(grant)
            except GatekeeperError:
                _log.exception("the end of a lease of %s was not kept", grant.host)

    def head(self, grant: Grant) -> None:
        """The response began: the clock counts from here."""
        if grant.open and not grant.headed:
            now = self.clock.monotonic()
            self._head(grant, now)
            try:
                self._keep(grant, now)
            finally:
                self._after(grant, now)

    def _head(self, grant: Grant, now: float) -> None:
        grant.headed = True
        scope = grant.scope
        scope.unheaded -= 1
        if now > scope.basis:  # noqa: PLR1730 - the hot path: no call
            scope.basis = now
        if grant.others:
            for other in grant.others:
                other.unheaded -= 1
                other.basis = max(other.basis, now)
        if (remote := self.turns.remote) is not None:
            for one in (scope, *grant.others):
                remote.push(one, one.basis + one.gap, "")

    def report(
        self,
        grant: Grant,
        status: int | None,
        elapsed: float | None,
        retry_after: float | str | None,
        size: int | None,
        rate_limit: str | None,
    ) -> None:
        """What came of it; a report is the head as well, if none was told of."""
        now = self.clock.monotonic()
        began = grant.open and not grant.headed
        if grant.headed and status is None:
            elapsed = None  # an answer began: whatever ended it is no failure of the host
        if began:
            self._head(grant, now)
        scope = grant.scope
        try:
            if (
                status is None
                or status >= 400
                or scope.history is not None
                or self._learns
                or retry_after is not None
                or rate_limit is not None
            ):
                wait = fields.parse_retry_after(retry_after, self.clock.wall())
                spread = fields.spread_of(rate_limit) or fields.NO_SPREAD
                report = Report(status, elapsed, wait, size, spread.seconds, spread.lasting)
                self._observe(grant, report, now)
            if began and self.keeper is not None:
                self._keep(grant, now)
        finally:
            # The slot stays taken: only others of the host's slots can be waited for.
            if grant.others or (scope.line and scope.in_flight < scope.settings.limit):
                self._after(grant, now)

    def _observe(self, grant: Grant, report: Report, now: float) -> None:
        if self.frozen and report.status is None:
            return  # our own fault says nothing about the host (fetching.md section 6)
        scope = grant.scope
        history = scope.past()
        if history.observe(report, now, scope.gap, self.pacing, self.rng):
            self.counters.blocks += 1
            self._blocked(scope, now)
            for other in grant.others:
                # Two hosts of one address complain: it is the machine that is tired.
                if other.name.startswith("address:") and other.past().accused_by(scope.name):
                    other.past().block(history.blocked_until, f"{scope.name}: {history.reason}")
                    self._blocked(other, now)
        elif not history.owes(now, self.pacing) and history.latency is None:
            scope.history = scope.interval = None

    def _blocked(self, scope: Scope, now: float) -> None:
        history = scope.past()
        if self.turns.remote is not None:
            self.turns.remote.push(scope, history.blocked_until, history.reason)
        if self.keeper is not None:
            self.keeper.promise(scope, now)

    def release(self, grant: Grant) -> None:
        """The slot is free; a request whose head was never told of counts until now."""
        now = self.clock.monotonic()
        began = not grant.headed
        if began:
            self._head(grant, now)
        self._close(grant)
        try:
            if began and self.keeper is not None:
                self._keep(grant, now)
        finally:
            turns = self.turns
            if grant.scope.line is not None or grant.others or turns.ready or turns.behind:
                self._after(grant, now)

    def give_back(self, grant: Grant) -> None:
        """The request never left: the slot is free, the clock stays as it was booked."""
        if grant.headed:
            self.release(grant)
            return
        self.counters.given_back += 1
        self._withdraw(grant)
        self._after(grant, self.clock.monotonic())

    def pass_on(self, grant: Grant) -> None:
        """A turn that never reached its owner goes to the next who waits for the host."""
        line = grant.scope.line
        if grant.headed or line is None or line.first() is None:
            self.give_back(grant)
            return
        self.counters.passed_on += 1
        self._withdraw(grant)
        # Nothing was sent since: the next one starts where this one would have.
        if grant.scope.basis == grant.start_at:
            grant.scope.basis = grant.undo
        for number, other in enumerate(grant.others):
            if other.basis == grant.start_at:
                other.basis = grant.undone[number]
        self._after(grant, self.clock.monotonic())

    def _withdraw(self, grant: Grant) -> None:
        grant.headed = True
        grant.reported = True
        for scope in (grant.scope, *grant.others):
            scope.unheaded -= 1
        self._close(grant)

    def _close(self, grant: Grant) -> None:
        grant.open = False
        if self._usual.pop(grant, self) is self:
            self.leases.remove_alone()
        self.in_flight -= 1
        grant.scope.in_flight -= 1
        if grant.others:
            for other in grant.others:
                other.in_flight -= 1
        if self.on_idle is not None and self.in_flight == 0:
            self.on_idle()

    def _after(self, grant: Grant, now: float) -> None:
        """A lease changed: let those who wait for its scopes have a look."""
        turns, scope = self.turns, grant.scope
        if scope.line is not None and scope.in_flight < scope.settings.limit:
            turns.requeue(scope, now)
        if grant.others:
            for other in grant.others:
                turns.requeue(other, now)
        if turns.ready or turns.behind:
            turns.run(now)
