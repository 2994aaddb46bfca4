"""The ledger."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from gatekeeper.clock import Clock
from gatekeeper.pacing.queues import ScopeQueue
from gatekeeper.pacing.rules import Rules
from gatekeeper.pacing.scopes import (
    INF,
    Scope,
    ScopeSettings,
)

if TYPE_CHECKING:
    from gatekeeper.pacing.engine import Engine

__all__ = ["ClockState", "Ledger", "MemoryLedger", "RemoteLedger", "Request", "Reservation"]

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


_PLAIN = ScopeSettings(default=0.0)


_log = logging.getLogger(__name__)

MAX_BATCH = 128
MAX_CALLS = 16
"""Calls of the ledger under way at once; what comes meanwhile goes with the next."""
SLACK = 0.05
"""Seconds by which a start may be used late at first. Starts are booked that much longer."""
MAX_SLACK = 10.0
RETRY_INITIAL = 0.1
RETRY_MAX = 5.0


class RemoteLedger:
    """The `Remote` that the turns ask; owns the tasks that wait for answers."""

    def __init__(self, ledger: Ledger, clock: Clock, books: Engine) -> None:
        self._ledger = ledger
        self._clock = clock
        self._books = books
        self._wanted: list[tuple[ScopeQueue, Request]] = []
        self._pushes: dict[str, tuple[float, str]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._calls = 0
        self._pushing = False
        self._scheduled = False
        self._epoch: int | None = None
        self._slack = SLACK
        self._closed = False
        self.failures = 0

    def request(self, line: ScopeQueue, gaps: tuple[float, ...]) -> None:
        """Ask for a start of this line, together with others that ask at the moment."""
        names = (line.scope.name, *(other.name for other in line.scope.shared))
        self._wanted.append((line, (names, gaps)))
        self._schedule()

    def push(self, scope: Scope, until: float, reason: str) -> None:
        """Tell the ledger that a clock moved on; merged by the later moment."""
        known = self._pushes.get(scope.name)
        if until > self._clock.monotonic() and (known is None or until > known[0]):
            self._pushes[scope.name] = (until, reason)
            self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled and not self._closed:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._start_calls)

    def _start_calls(self) -> None:
        self._scheduled = False
        if self._closed:
            return
        # What moved is told before anything is asked.
        if self._pushes and not self._pushing:
            self._pushing = True
            self._spawn(self._push_all())
        while self._wanted and self._calls < MAX_CALLS:
            batch, self._wanted = self._wanted[:MAX_BATCH], self._wanted[MAX_BATCH:]
            self._calls += 1
            self._spawn(self._reserve(batch))

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reserve(self, batch: list[tuple[ScopeQueue, Request]]) -> None:
        delay = RETRY_INITIAL
        try:
            while True:
                slack = self._slack
                try:
                    asked = [(names, _padded(gaps, slack)) for _, (names, gaps) in batch]
                    answers = [Reservation(*one) for one in await self._ledger.reserve(asked)]
                    if len(answers) != len(batch):
                        raise ValueError(f"{len(batch)} asked, {len(answers)} answered")
                    break
                except Exception as error:  # noqa: BLE001 - a ledger may raise anything
                    self._failed("reserve", error)
                    await self._clock.sleep(delay)
                    delay = min(2 * delay, RETRY_MAX)
        finally:
            self._calls -= 1
        now = self._clock.monotonic()
        turns = self._books.turns
        for (line, _), answer in zip(batch, answers, strict=True):
            good_until = answer.start_at + slack
            accepted = self._accepts(answer, good_until, now)
            turns.answered(line, answer if accepted else None, good_until, now)
        turns.run(now)
        self._schedule()

    def _accepts(self, answer: Reservation, good_until: float, now: float) -> bool:
        """Not a start booked in a book that was lost since, nor one that came too late."""
        if self._epoch is None or answer.epoch > self._epoch:
            if self._epoch is not None:
                self._books.turns.void_reservations()
            self._epoch = answer.epoch
        if now > good_until:
            # The wire is slower than thought. What is booked next allows for that.
            self._slack = min(MAX_SLACK, max(self._slack, 2 * (now - answer.start_at)))
            return False
        return answer.epoch == self._epoch

    async def _push_all(self) -> None:
        delay = RETRY_INITIAL
        try:
            while self._pushes:
                name, (until, reason) = next(iter(self._pushes.items()))
                del self._pushes[name]
                try:
                    await self._ledger.block((name,), until, reason)
                    delay = RETRY_INITIAL
                except Exception as error:  # noqa: BLE001 - a ledger may raise anything
                    self._failed("block", error)
                    later = self._pushes.get(name, (until, reason))
                    self._pushes[name] = max(later, (until, reason))
                    await self._clock.sleep(delay)
                    delay = min(2 * delay, RETRY_MAX)
        finally:
            self._pushing = False

    def _failed(self, what: str, error: Exception) -> None:
        self.failures += 1
        _log.warning("the ledger failed to %s, asking again: %s", what, error)

    async def close(self) -> None:
        """Ask nothing more; end the calls under way. What they booked is spent."""
        self._closed = True
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _padded(gaps: float | tuple[float, ...], slack: float) -> tuple[float, ...]:
    """Booked a little longer than needed, since a start may be used a little late."""
    each = gaps if isinstance(gaps, tuple) else (gaps,)
    return tuple(gap + slack if gap > 0 else 0.0 for gap in each)
