"""The scopes of one scheduler: what they share, which interval is in force, what is kept."""

from __future__ import annotations

import random
from collections.abc import Callable

from gatekeeper.clock import Clock
from gatekeeper.pacing.blocks import REFUSALS, Report
from gatekeeper.pacing.counters import Away, Counters, Keeper
from gatekeeper.pacing.expiry import OpenLeases
from gatekeeper.pacing.intervals import (
    LONGEST,
    UNKNOWN,
    Interval,
    Settings,
    Wish,
    interval_for,
    jittered,
)
from gatekeeper.pacing.ledger import INF, MemoryLedger, Scope
from gatekeeper.pacing.rules import Rules

__all__ = ["DURABLE", "Accounts"]

DURABLE = 1.0
"""Clocks further ahead than this many seconds outlive the process (promise 8)."""
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
        self._intervals: dict[tuple[Settings, Wish], tuple[Wish, Interval]] = {}

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

    def _begin(self, name: str, settings: Settings) -> Scope:
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

    def lengthen(self, scope: Scope, gap: float, now: float) -> None:
        """The text asks for more than was known when the last request began."""
        scope.gap = gap
        if self.keeper is not None and gap > DURABLE:
            self.keeper.remember(scope, now)

    def found(self, scope: Scope, wish: Wish, now: float) -> float:
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

    def learn(self, scope: Scope, report: Report, now: float) -> bool:
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
