"""The book of every scope's clock: the `Ledger` protocol and the one in memory.

The scheduler asks a ledger for the next start of a set of scopes. What is booked is
spent: nobody gives a reservation back, so that a lost answer or a dead client can only
slow a crawl. A ledger that is shared by a fleet fits behind the same protocol.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from gatekeeper.clock import Clock
from gatekeeper.pacing.blocks import History
from gatekeeper.pacing.intervals import LONGEST, NO_RATE, Interval, Settings, Wish
from gatekeeper.pacing.rules import Rules

if TYPE_CHECKING:
    from gatekeeper.pacing.waiters import Line

__all__ = ["INF", "ClockState", "Ledger", "MemoryLedger", "Request", "Reservation", "Scope"]

INF = float("inf")

Request = tuple[tuple[str, ...], float | tuple[float, ...]]
"""Scopes, and the seconds between starts: one number for all, or one for each."""


class Reservation(NamedTuple):
    """A start that belongs to the asker alone.

    `start_at` is on the asker's monotonic clock; a remote ledger converts. The answer may
    arrive a little after it: starts are booked for a little longer than the interval, and
    one that arrives or is used later than that is thrown away.
    `epoch` grows when a ledger lost or moved its book; older reservations are void then.
    """

    start_at: float
    epoch: int


class ClockState(NamedTuple):
    """One scope's clock in a snapshot (monotonic seconds)."""

    scope: str
    next_at: float
    blocked_until: float


class Ledger(Protocol):
    """Who may start when. May raise anything: the scheduler then waits and asks again."""

    async def reserve(self, requests: Sequence[Request]) -> list[Reservation]:
        """Book the next start for each request: all of its scopes in one step."""

    async def block(self, scopes: Sequence[str], until: float, reason: str = "") -> None:
        """No start before `until` (monotonic): merged by the later one."""

    async def snapshot(self) -> list[ClockState]:
        """Every clock that lies ahead."""


class Scope:
    """What a clock belongs to: a host, an address, a registered domain, a named group.

    A request may start when `basis + gap` has passed, where `basis` is the latest start
    or response head. The interval is kept beside the clock and not folded into it, so
    that a rate learnt later (a robots.txt that was just read) counts from the same basis.
    """

    __slots__ = (
        "basis",
        "gap",
        "history",
        "in_flight",
        "interval",
        "line",
        "name",
        "settings",
        "shared",
        "unheaded",
        "wish",
    )

    def __init__(self, name: str, settings: Settings, shared: tuple[Scope, ...] = ()) -> None:
        self.name = name
        self.settings = settings
        self.shared = shared
        """Scopes of others that a lease of this host takes as well."""
        self.basis = -INF
        self.gap = 0.0
        self.interval: Interval | None = None
        self.wish: Wish = NO_RATE
        self.in_flight = 0
        self.unheaded = 0
        """Leases whose response head is still awaited."""
        self.history: History | None = None
        self.line: Line | None = None
        """Who waits; None where nobody does."""

    def due_at(self) -> float:
        """When a request may start, by clock, block and slots; inf: not before an event."""
        history = self.history
        if history is None:
            if self.in_flight >= self.settings.limit or (self.unheaded and self.gap > 0):
                return INF
            return self.basis + self.gap
        if history.paused:
            return INF
        # Half open: one probe at a time, whatever the limit.
        limit = 1 if history.probing else self.settings.limit
        if self.in_flight >= limit or (self.unheaded and self.gap > 0):
            return INF
        return max(self.basis + self.gap, history.blocked_until)

    def clock_at(self) -> float:
        """The same without the slots: what is promised whoever is in flight."""
        clock = self.basis + self.gap
        return clock if self.history is None else max(clock, self.history.blocked_until)

    def not_before(self, moment: float) -> None:
        """No start before that moment, whatever the interval turns out to be.

        The gap is longer than any interval: none is counted from this basis once more.
        """
        self.gap = LONGEST
        self.basis = moment - LONGEST

    def past(self) -> History:
        """The history, begun if there is none."""
        if self.history is None:
            self.history = History()
        return self.history


class MemoryLedger:
    """The book in this process. It lends its scopes to one scheduler, which books directly.

    >>> from gatekeeper.clock import VirtualClock
    >>> book = MemoryLedger(VirtualClock())
    >>> book.reserve_nowait([(("a.example",), 2.0), (("a.example",), 2.0)])
    [Reservation(start_at=0.0, epoch=0), Reservation(start_at=2.0, epoch=0)]
    """

    epoch = 0

    def __init__(self, clock: Clock, rules: Rules | None = None) -> None:
        self._clock = clock
        self.rules = rules
        self.scopes: dict[str, Scope] = {}

    def scope(self, name: str) -> Scope:
        """The scope of that name, begun if unknown."""
        scope = self.scopes.get(name)
        if scope is None:
            settings = self.rules.for_host(name) if self.rules is not None else _PLAIN
            scope = self.scopes[name] = Scope(name, settings)
        return scope

    def reserve_nowait(self, requests: Sequence[Request]) -> list[Reservation]:
        """Book at once; see `Ledger.reserve`."""
        now = self._clock.monotonic()
        return [self._book(now, scopes, interval) for scopes, interval in requests]

    async def reserve(self, requests: Sequence[Request]) -> list[Reservation]:
        """Book; never waits."""
        return self.reserve_nowait(requests)

    def _book(
        self, now: float, names: tuple[str, ...], interval: float | tuple[float, ...]
    ) -> Reservation:
        scopes = [self.scope(name) for name in names]
        gaps = interval if isinstance(interval, tuple) else (interval,) * len(scopes)
        # The interval asked for now counts from the latest start, as in the scheduler.
        start = now
        for scope, gap in zip(scopes, gaps, strict=True):
            start = max(start, scope.clock_at(), scope.basis + gap)
        for scope, gap in zip(scopes, gaps, strict=True):
            scope.basis = start
            scope.gap = gap
        return Reservation(start, self.epoch)

    async def block(self, scopes: Sequence[str], until: float, reason: str = "") -> None:
        """No start before `until` (monotonic)."""
        self.block_nowait(scopes, until, reason)

    def block_nowait(self, scopes: Iterable[str], until: float, reason: str = "") -> None:
        """The same at once."""
        for name in scopes:
            self.scope(name).past().block(until, reason)

    async def snapshot(self) -> list[ClockState]:
        """Every clock that lies ahead."""
        now = self._clock.monotonic()
        return [
            ClockState(
                scope.name,
                scope.basis + scope.gap,
                scope.history.blocked_until if scope.history is not None else -INF,
            )
            for scope in self.scopes.values()
            if scope.clock_at() > now
        ]


_PLAIN = Settings(default=0.0)
