"""The scheduler without I/O: scopes, their clocks, and the leases. Nothing here awaits.

What holds between any two calls:

* A request starts no earlier than `basis + gap` of each of its scopes, where basis is the
  scope's latest start or response head, and not inside a block; while a scope's gap is
  above zero at most one of its leases has not seen its head.
* A lease took all of its scopes or none; `in_flight` of a scope is its open leases.

Most turns are plain: one clock, a host that answers well, nobody in line. They take the
short roads, `Books.take`, `Grant.report` and `Grant.release`, which do what the long ones do.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Set

from gatekeeper import http_fields
from gatekeeper.clock import Clock
from gatekeeper.errors import GatekeeperError
from gatekeeper.pacing.accounts import DURABLE, Accounts
from gatekeeper.pacing.blocks import REFUSALS, Report
from gatekeeper.pacing.explain import slowed
from gatekeeper.pacing.intervals import Wish, jittered
from gatekeeper.pacing.leases import Grant
from gatekeeper.pacing.ledger import INF, MemoryLedger, Scope
from gatekeeper.pacing.rules import Rules
from gatekeeper.pacing.turns import Turns

__all__ = ["DURABLE", "Books"]

_log = logging.getLogger(__name__)


class Books(Accounts):
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
        super().__init__(clock, rules, ledger, rng)
        self.frozen = False
        """The fault is ours: nothing is recorded against hosts, and those in `unanswered`,
        whose last attempt failed, get no turn but that of a robots.txt."""
        self.unanswered: Set[str] = frozenset()
        self.turns = Turns(self, rearm)
        self.on_idle: Callable[[], None] | None = None
        """Told when the last open lease ends."""
        self.granted = 0
        """Leases granted since the start ..."""
        self.turnstile = 0
        """... and how many may have been by now: it goes up by one with each that ends."""
        self._room = 0
        self._learns = self.pacing.latency_factor > 0
        self.survey()

    def adjust(self) -> None:
        """Follow other settings of the rules."""
        super().adjust()
        self._learns = self.pacing.latency_factor > 0
        self.survey()

    def survey(self) -> None:
        """Follow a change of `keeper`, `frozen`, or of the turns' `halted` and `remote`."""
        turns = self.turns
        room = 0 if turns.halted else self.pacing.max_in_flight
        self.turnstile += room - self._room
        self._room = room
        self.plain_to = INF if self.keeper is None else DURABLE
        """The longest interval of a plain turn, of which nothing has to be kept or told;
        below zero where none is plain now."""
        if (
            turns.halted
            or turns.remote is not None
            or self.frozen
            or self._learns
            or self._jitter > 0
            or self.pacing.dry_run
            or (self.keeper is not None and not self.keeper.marked)
        ):
            self.plain_to = -1.0

    @property
    def in_flight(self) -> int:
        """Leases that are open."""
        return self.granted - self.turnstile + self._room

    # --- granting -----------------------------------------------------------------------

    def take(self, url: str, host: str, wish: Wish, now: float | None = None) -> Grant | None:
        """The turn, if it can be had at once and the host is known; None says nothing.

        The caller has decided at this moment, and `wish` is what the text asks for now.
        """
        scope = self.scopes.get(host)
        if scope is None:
            return None
        if now is None:
            now = self.now()
        kept = scope.interval
        gap = scope.gap
        if (
            scope.in_flight
            or wish is not scope.wish
            or scope.line is not None
            or scope.history is not None
            or scope.shared
            or kept is None
            or kept.seconds != gap
            or gap > self.plain_to
            or self.granted >= self.turnstile
            or (self.mixed and host in self.mixed)
        ):
            if self.pacing.dry_run or not self.free_now(scope, now):
                return None
            return self.try_take(scope, wish, now, url, None)
        before = scope.basis
        if before + gap > now:
            return None
        expires = now + self._ttl
        grant = Grant(self, scope, url, now, expires, before, ())
        scope.basis = now
        scope.in_flight = scope.unheaded = 1
        self.granted += 1
        self.usual[grant] = None
        if expires < self.turns.armed:
            self.turns.arm(expires)
        return grant

    def free_now(self, scope: Scope, now: float) -> bool:
        """May somebody take a turn of this host without standing in line?"""
        if scope.line is not None or self.granted >= self.turnstile:
            return False
        if scope.in_flight or scope.history is not None:
            due = scope.due_at()
        else:
            due = scope.basis + scope.gap  # the same, without a call
        if due > now:
            return False
        if self.plain_to < 0 and (
            self.turns.remote is not None or (self.frozen and scope.name in self.unanswered)
        ):
            return False
        return not scope.shared or all(
            other.line is None and other.due_at() <= now for other in scope.shared
        )

    def try_take(
        self, scope: Scope, wish: Wish, now: float, url: str, ttl: float | None
    ) -> Grant | None:
        """All scopes or none, in one step; None if it may not start now after all.

        No await stands between the admission that brought the wish and the books. Raises
        StorageError where its clocks can't be kept: nothing is granted then.
        """
        if self.plain_to < 0 and self.keeper is not None and not self.keeper.marked:
            self.keeper.mark()
            self.survey()
        kept, before = scope.interval, scope.wish
        if kept is not None and wish is before and scope.history is None:
            gap = kept.seconds
        else:
            gap = self.interval(scope, wish, now)
        if gap != scope.gap and not self.change_gap(scope, gap, now, wish == before):
            return None
        expires = now + (self._ttl if ttl is None else ttl)
        grant = Grant(self, scope, url, now, expires, scope.basis, scope.shared)
        grant.refusals = 0 if scope.history is None else scope.history.refusals
        scope.basis = now
        if scope.in_flight:
            scope.in_flight += 1
            scope.unheaded += 1
        else:
            scope.in_flight = scope.unheaded = 1
        if scope.shared:
            self._take_shared(grant, now)
        self.granted += 1
        if ttl is None:
            self.usual[grant] = None
        else:
            self.leases.add_alone(grant)
        if expires < self.turns.armed:
            self.turns.arm(expires)
        if self.keeper is not None:
            try:
                self._keep(grant, now, self.keeper.promise)
            except BaseException:
                self._ungrant(grant)  # not durable, so not granted
                raise
        return grant

    def _ungrant(self, grant: Grant) -> None:
        """It was never told of: as if it had not been."""
        self._withdraw(grant)
        grant.scope.basis = grant.undo
        for other, basis in zip(grant.others, grant.undone, strict=True):
            other.basis = basis
        self.granted -= 1
        self.turnstile -= 1

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
        if scope.history is not None:
            grant.refusals = scope.history.refusals
        scope.basis, scope.gap = start, gap
        scope.in_flight += 1
        scope.unheaded += 1
        self._take_shared(grant, start)
        self.granted += 1
        self.leases.add_alone(grant)
        self.turns.arm(grant.expires_at)
        return grant, start - now

    def _keep(self, grant: Grant, now: float, keep: Callable[[Scope, float], None]) -> None:
        """Make the clocks of a lease durable where they lie more than a second ahead, or
        something else about them is not kept yet."""
        scope = grant.scope
        if scope.gap > DURABLE or scope.name in self.mixed or self._unkept(scope):
            keep(scope, now)
        for other in grant.others:
            if other.gap > DURABLE or self._unkept(other):
                keep(other, now)

    def _unkept(self, scope: Scope) -> bool:
        return self.keeper is not None and self.keeper.unkept(scope)

    # --- the life of a lease ------------------------------------------------------------

    def renew(self, grant: Grant, seconds: float) -> None:
        """A new end, that many seconds from now."""
        self.leases.remove(grant)
        grant.expires_at = self.now() + max(0.0, seconds)
        self.leases.add_alone(grant)
        self.turns.arm(grant.expires_at)

    def expire(self, now: float) -> None:
        """End every lease whose time is over; it counts as used until now. One whose request
        is known to be under way goes on: its slot is taken.
        """
        for grant in self.leases.over(now):
            if grant.in_use:
                self.renew(grant, self.pacing.lease_ttl)
                continue
            self.counters.expired += 1
            try:
                self.release(grant)
            except GatekeeperError:
                _log.exception("the end of a lease of %s was not kept", grant.host)

    def head(self, grant: Grant) -> None:
        """The response began: the clock counts from here."""
        if grant.open and not grant.headed:
            now = self.now()
            self._head(grant, now)
            try:
                if self.keeper is not None:
                    self._keep(grant, now, self.keeper.remember)
            finally:
                self._after(grant, now)

    def _head(self, grant: Grant, now: float) -> None:
        grant.told = True
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
        now: float | None = None,
    ) -> None:
        """What came of it; a report is the head as well, if none was told of."""
        if now is None:
            now = self.now()
        began = grant.open and not grant.told
        if grant.told and status is None:
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
                wait = http_fields.parse_retry_after(retry_after, self.clock.wall())
                spread = http_fields.spread_of(rate_limit) or http_fields.NO_SPREAD
                past = scope.history
                # Sent before the last refusal came: a burst that is turned away is one refusal.
                under_way = past is not None and grant.refusals < past.refusals
                report = Report(
                    status, elapsed, wait, size, spread.seconds, spread.lasting, under_way
                )
                self._observe(grant, report, now)
            if began and self.keeper is not None:
                self._keep(grant, now, self.keeper.remember)
        finally:
            self._after(grant, now)

    def _observe(self, grant: Grant, report: Report, now: float) -> None:
        if self.frozen and report.status is None:
            return  # our own fault says nothing about the host (fetching.md section 6)
        scope = grant.scope
        if not self.learn(scope, report, now):
            return
        history = scope.past()
        if report.status in REFUSALS and not report.under_way:
            _log.info("%s: %s", scope.name, slowed(scope, self.clock, self.pacing))
        self.counters.blocks += 1
        self._blocked(scope, now)
        for other in grant.others:
            # Two hosts of one address complain: it is the machine that is tired.
            if other.name.startswith("address:") and other.past().accused_by(scope.name):
                other.past().block(history.blocked_until, f"{scope.name}: {history.reason}")
                self._blocked(other, now)

    def _blocked(self, scope: Scope, now: float) -> None:
        history = scope.past()
        if self.turns.remote is not None:
            self.turns.remote.push(scope, history.blocked_until, history.reason)
        if self.keeper is not None:
            self.keeper.remember(scope, now)

    def release(self, grant: Grant) -> None:
        """The slot is free; a request whose head was never told of counts until now."""
        now = self.now()
        began = not grant.headed
        if began:
            self._head(grant, now)
        self._close(grant)
        try:
            if began and self.keeper is not None:
                self._keep(grant, now, self.keeper.remember)
        finally:
            self._freed(grant, now)

    def give_back(self, grant: Grant) -> None:
        """The request never left: the slot is free, the clock stays as it was booked."""
        if grant.headed:
            self.release(grant)
            return
        self.counters.given_back += 1
        self._withdraw(grant)
        self._freed(grant, self.now())

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
        self._freed(grant, self.now())

    def _withdraw(self, grant: Grant) -> None:
        grant.told = grant.reported = True
        for scope in (grant.scope, *grant.others):
            scope.unheaded -= 1
        self._close(grant)

    def _close(self, grant: Grant) -> None:
        grant.open = False
        self.leases.remove(grant)
        self.turnstile += 1
        grant.scope.in_flight -= 1
        if grant.others:
            for other in grant.others:
                other.in_flight -= 1
        if self.on_idle is not None and self.in_flight == 0:
            self.on_idle()

    def _after(self, grant: Grant, now: float) -> None:
        """A clock moved, and the slot stays taken: others of the host's slots, or of the
        scopes that it shares, may be waited for."""
        scope = grant.scope
        if grant.others or (scope.line and scope.in_flight < scope.settings.limit):
            self._freed(grant, now)

    def _freed(self, grant: Grant, now: float) -> None:
        """Let those who wait for the scopes of a lease have a look, and give what is due."""
        turns = self.turns
        turns.requeue(grant.scope, now)
        for other in grant.others:
            turns.requeue(other, now)
        if turns.ready or turns.behind:
            turns.run(now)
