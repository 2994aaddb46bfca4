"""Engine."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Set
from typing import NamedTuple, Protocol

from gatekeeper import http_fields
from gatekeeper.clock import Clock
from gatekeeper.errors import GatekeeperError
from gatekeeper.pacing.explain import slowed
from gatekeeper.pacing.ledger import MemoryLedger
from gatekeeper.pacing.queues import Grant, OpenLeases, Queues
from gatekeeper.pacing.rules import Rules
from gatekeeper.pacing.scopes import (
    DURABLE,
    INF,
    LONGEST,
    REFUSALS,
    UNKNOWN,
    Interval,
    RequestReport,
    RobotsInterval,
    Scope,
    ScopeSettings,
    interval_for,
    jittered,
)

__all__ = ["EVERYTHING", "Accounts", "Away", "Counters", "Engine", "Keeper", "Need", "needs"]


class Keeper(Protocol):
    """Where promises are made durable."""

    @property
    def marked(self) -> bool:
        """Would the next run know of a crash? If not, nothing may be granted."""

    def mark(self) -> None:
        """Let it know. Raises StorageError."""

    def promise(self, scope: Scope, now: float) -> None:
        """Keep this scope's clock before the grant returns. Raises StorageError: then there is
        to be none."""

    def remember(self, scope: Scope, now: float) -> None:
        """Keep what came of an answer, now or as soon as can be: it is in force already."""

    def unkept(self, scope: Scope) -> bool:
        """Is something in force that could not be kept yet?"""


class Away(Protocol):
    """What is not in memory: asked before any scope is begun, so that none is begun anew
    that was sent away."""

    def back(self, name: str) -> Scope | None:
        """The scope of that name, back in the books if it was sent away; None if it was not."""

    def make_room(self) -> bool:
        """Have others forgotten or sent away; False: there is no room for a host more."""


class Counters:
    """What `stats()` counts since the start."""

    def __init__(self) -> None:
        self.robots = 0
        self.refused = 0
        self.refetches = 0
        self.cancelled = 0
        self.timeouts = 0
        self.expired = 0
        self.given_back = 0
        self.passed_on = 0
        self.blocks = 0


EVERYTHING = ""
"""The name under which all leases count together (pacing.max_in_flight)."""


class Need(NamedTuple):
    """A slot that a turn takes."""

    scope: str
    slots: int
    """How many there are."""
    paced: bool
    """An interval is in force: a lease whose head is awaited keeps everybody else out."""


def needs(books: Engine, host: str, near: Iterable[str] = ()) -> list[Need]:
    """Of which scopes a turn of the host takes a slot.

    `near` names scopes that the host shares beside those the books know of: its addresses,
    before its first turn. None in a dry run, in which nobody waits.
    """
    if books.pacing.dry_run:
        return []
    scope = books.scopes.get(host)
    known: tuple[Scope, ...]
    if scope is None:
        known, near = (), (*books.rules.shared_names(host), *near)
    else:
        known = (scope, *scope.shared)
    names = {one.name for one in known}
    beside = (books.scopes[name] for name in near if name in books.scopes and name not in names)
    found = [Need(one.name, _slots(one), one.gap > 0) for one in (*known, *beside)]
    found.append(Need(EVERYTHING, books.pacing.max_in_flight, False))
    return found


def _slots(one: Scope) -> int:
    """Half open, after a block, one probe is all there may be."""
    probing = one.history is not None and one.history.probing
    return 1 if probing else one.settings.limit


_MAX_INTERVALS = 10_000


class Accounts:
    """Every scope, and the seconds that lie between its requests."""

    def __init__(
        self, clock: Clock, rules: Rules, ledger: MemoryLedger, rng: random.Random
    ) -> None:
        self.clock = clock
        self.now: Callable[[], float] = clock.monotonic
        """The same, without looking it up for each turn."""
        self.rules = rules
        self.pacing = rules.pacing
        self.ledger = ledger
        self.scopes = ledger.scopes
        self.rng = rng
        self.keeper: Keeper | None = None
        self.away: Away | None = None
        self.floor_until = -INF
        """After a crash: no unknown host is asked before that moment."""
        self.mixed: dict[str, float] = {}
        """Hosts whose origins ask for different paces: the longer one, which must be kept to
        should the next run begin with that origin."""
        self.counters = Counters()
        self.leases = OpenLeases()
        self.usual = self.leases.usual
        self._plain = rules.plain
        self._jitter = self.pacing.jitter
        self._ttl = self.pacing.lease_ttl
        self._intervals: dict[
            tuple[ScopeSettings, RobotsInterval], tuple[RobotsInterval, Interval]
        ] = {}

    def adjust(self) -> None:
        """Follow other settings of the rules."""
        self.pacing = self.rules.pacing
        self._jitter = self.pacing.jitter
        self._intervals.clear()

    # --- scopes -------------------------------------------------------------------------

    def host(self, name: str, extra: tuple[str, ...] = ()) -> Scope:
        """The scope of a host with the scopes it shares: the one in memory, or else the one
        that was sent away, or else a new one. It never refuses: see `Memory.admit`.
        """
        scope = self.scopes.get(name)
        if scope is None:
            if self.away is not None:
                self.away.make_room()
                scope = self.away.back(name)
            if scope is None:
                scope = self.begin(name)
        if extra:
            self.share(scope, extra)
        return scope

    def shared(self, name: str) -> Scope:
        """A shared scope by its name, from where it is, or a new one."""
        scope = self.scopes.get(name)
        if scope is None and self.away is not None:
            scope = self.away.back(name)
        return self.begin_shared(name) if scope is None else scope

    def known(self, name: str) -> Scope | None:
        """The scope of that name, in memory or sent away; None if there is nothing of it."""
        scope = self.scopes.get(name)
        if scope is None and self.away is not None:
            self.away.make_room()
            scope = self.away.back(name)
        return scope

    def begin(self, name: str) -> Scope:
        """A new scope of a host of which nothing is known, or is about to be told."""
        scope = self._begin(name, self.rules.for_host(name))
        if not self._plain:
            self.share(scope, ())
        return scope

    def begin_shared(self, name: str) -> Scope:
        """The same for a shared scope."""
        return self._begin(name, self.rules.for_shared(name))

    def _begin(self, name: str, settings: ScopeSettings) -> Scope:
        scope = self.scopes[name] = Scope(name, settings)
        if self.floor_until > -INF:
            # Clocks up to a second ahead were not kept: such a scope counts as just used.
            scope.basis = self.floor_until - DURABLE
            scope.gap = DURABLE
        return scope

    def share(self, scope: Scope, extra: tuple[str, ...]) -> None:
        """Learn which scopes a host shares now: those configured, and the caller's."""
        names = tuple(dict.fromkeys((*self.rules.shared_names(scope.name), *extra)))
        if names != tuple(other.name for other in scope.shared):
            scope.shared = tuple(map(self.shared, names))

    # --- intervals ----------------------------------------------------------------------

    def interval(self, scope: Scope, wish: RobotsInterval, now: float) -> float:
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

    def lengthen(self, scope: Scope, gap: float, now: float) -> None:
        """The text asks for more than was known when the last request began."""
        scope.gap = gap
        if self.keeper is not None and gap > DURABLE:
            self.keeper.remember(scope, now)

    def found(self, scope: Scope, wish: RobotsInterval, now: float) -> float:
        """A robots.txt was asked for and `wish` is what it says: the seconds in force from now on.

        They count from the last request. Where the file was not known before, that request's
        clock was started by a guess: it runs by what the file asks for now, more or less.
        """
        known, guessed = wish is not UNKNOWN, scope.wish is UNKNOWN
        gap = self.interval(scope, wish, now)
        taught = None if scope.history is None else scope.history.back_off
        if known and taught is not None and taught.guessed and scope.interval is not None:
            taught.found(scope.interval.usual, self.pacing)
            gap = self.interval(scope, wish, now)
        if gap > scope.gap:
            self.lengthen(scope, gap, now)
        elif known and guessed and scope.gap < LONGEST:
            scope.gap = jittered(gap, self._jitter, self.rng)
        return gap

    def change_gap(self, scope: Scope, gap: float, now: float, same: bool = False) -> bool:
        """Put another interval in force for a turn that starts now; False if it may not then.

        `same`: the text asks for what it asked for before. Then something else that slowed the
        host is over, and nobody's pace is to be kept beside this one.
        """
        if gap > scope.gap and (scope.basis + gap > now or scope.unheaded):
            self.lengthen(scope, gap, now)
            return False
        if gap <= DURABLE < scope.gap < LONGEST and not same:
            self.mixed[scope.name] = scope.gap
        scope.gap = jittered(gap, self._jitter, self.rng)
        return True

    def learn(self, scope: Scope, report: RequestReport, now: float) -> bool:
        """Take a report into account; True if it blocks the scope.

        What it slows counts from this very request, and not from the next one on: the clock
        says so at once, and outlives the process (promises 8 and 9).
        """
        history = scope.past()
        pause, slowed = history.error_pause(), history.back_off is not None
        usual, guessed = 0.0, scope.wish is UNKNOWN
        if slowed or report.status in REFUSALS:
            self.interval(scope, scope.wish, now)
            usual = scope.interval.usual if scope.interval is not None else 0.0
        blocks = history.observe(report, now, usual, self.pacing, self.rng, guessed=guessed)
        changed = history.error_pause() != pause or (slowed and history.back_off is None)
        if not blocks and history.latency is None and not history.owes(now, self.pacing):
            scope.history = scope.interval = None
        gap = self.interval(scope, scope.wish, now)
        slower = gap > scope.gap
        if slower:
            scope.gap = gap
        slower = slower and gap > DURABLE
        if self.keeper is not None and not blocks and (slower or changed):
            self.keeper.remember(scope, now)
        return blocks


_log = logging.getLogger(__name__)


class Engine(Accounts):
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
        self.turns = Queues(self, rearm)
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

    def take(
        self, url: str, host: str, wish: RobotsInterval, now: float | None = None
    ) -> Grant | None:
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
        self, scope: Scope, wish: RobotsInterval, now: float, url: str, ttl: float | None
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
        self, scope: Scope, wish: RobotsInterval, now: float, url: str, ttl: float | None
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
                report = RequestReport(
                    status, elapsed, wait, size, spread.seconds, spread.lasting, under_way
                )
                self._observe(grant, report, now)
            if began and self.keeper is not None:
                self._keep(grant, now, self.keeper.remember)
        finally:
            self._after(grant, now)

    def _observe(self, grant: Grant, report: RequestReport, now: float) -> None:
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
