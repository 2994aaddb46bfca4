"""The ledger: who may start when, over all scopes, and over all processes that share it.

The scheduler asks a ledger for the next start of a set of scopes. What is booked is spent:
nobody gives a reservation back, so that a lost answer or a dead client can only slow a crawl.
`MemoryLedger` is the one of this process; one that a fleet shares fits behind the same `Ledger`
protocol, and is asked through `RemoteLedger`, the only part of the scheduler that knows it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import NamedTuple, Protocol

from gatekeeper.clock import Clock
from gatekeeper.pacing.queues import ScopeQueue
from gatekeeper.pacing.rules import Rules
from gatekeeper.pacing.scopes import (
    INF,
    Scope,
    ScopeSettings,
)

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
    """The ledger of this process. It lends its scopes to one scheduler, which uses them directly.

    >>> from gatekeeper.clock import VirtualClock
    >>> ledger = MemoryLedger(VirtualClock())
    >>> ledger.reserve_nowait([(("a.example",), 2.0), (("a.example",), 2.0)])
    [Reservation(start_at=0.0, epoch=0), Reservation(start_at=2.0, epoch=0)]
    """

    epoch = 0

    def __init__(self, clock: Clock, rules: Rules | None = None) -> None:
        self._clock = clock
        self._rules = rules
        self._scopes: dict[str, Scope] = {}

    def lend(self, rules: Rules) -> dict[str, Scope]:
        """Every scope by its name, for a scheduler; those made here follow its rules from now."""
        self._rules = rules
        return self._scopes

    def scope(self, name: str) -> Scope:
        """The scope of that name, made if unknown."""
        scope = self._scopes.get(name)
        if scope is None:
            settings = self._rules.for_host(name) if self._rules is not None else _PLAIN
            scope = self._scopes[name] = Scope(name, settings)
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
        each = interval if isinstance(interval, tuple) else (interval,) * len(scopes)
        # The interval asked for now counts from the latest start, as in the scheduler.
        start = now
        for scope, seconds in zip(scopes, each, strict=True):
            start = max(start, scope.promised_at(), scope.clock_at(seconds))
        for scope, seconds in zip(scopes, each, strict=True):
            scope.basis, scope.interval = start, seconds
        return Reservation(start, self.epoch)

    async def block(self, scopes: Sequence[str], until: float, reason: str = "") -> None:
        """No start before `until` (monotonic)."""
        self.block_nowait(scopes, until, reason)

    def block_nowait(self, scopes: Iterable[str], until: float, reason: str = "") -> None:
        """Block without waiting; see `block`."""
        for name in scopes:
            self.scope(name).past().block(until, reason)

    async def snapshot(self) -> list[ClockState]:
        """Every clock that lies ahead."""
        now = self._clock.monotonic()
        return [
            ClockState(
                scope.name,
                scope.clock_at(),
                scope.history.blocked_until if scope.history is not None else -INF,
            )
            for scope in self._scopes.values()
            if scope.promised_at() > now
        ]


_log = logging.getLogger(__name__)

MAX_BATCH = 128
MAX_CALLS = 16
"""Calls of the ledger under way at once; what comes meanwhile goes with the next."""
SLACK = 0.05
"""Seconds by which a start may be used late at first. Starts are booked that much longer."""
MAX_SLACK = 10.0
RETRY_INITIAL = 0.1
RETRY_MAX = 5.0


Start = tuple[ScopeQueue, float | None, float]
"""A queue, the start that was booked for it (None: it has to ask again), and until when that may
be used (monotonic seconds)."""
Deliver = Callable[[Sequence[Start], bool, float], None]
"""Takes starts, whether all those delivered before are void, and the moment."""


class RemoteLedger:
    """Asks a ledger beyond this process, and stays right whatever it answers: a `Remote`.

    The engine agrees first, then the ledger books a start, then the host's queue waits for that
    start. A ledger that fails is asked again, later each time: nothing is granted without its
    answer. What it booked for a request that then can't be sent is spent. It owns the tasks
    that wait for answers, and hands each batch of those to `deliver`.
    """

    def __init__(self, ledger: Ledger, clock: Clock, deliver: Deliver) -> None:
        self._ledger = ledger
        self._clock = clock
        self._deliver = deliver
        self._wanted: list[tuple[ScopeQueue, Request]] = []
        self._pushes: dict[str, tuple[float, str]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._calls = 0
        self._pushing = False
        self._scheduled = False
        self._epoch: int | None = None
        self._slack = SLACK
        self._closed = False
        self.failures: int = 0

    def request(self, queue: ScopeQueue, intervals: tuple[float, ...]) -> None:
        """Ask for a start of this queue, together with others that ask at the moment."""
        names = (queue.scope.name, *(other.name for other in queue.scope.shared))
        self._wanted.append((queue, (names, intervals)))
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
                    asked = [(names, _padded(intervals, slack)) for _, (names, intervals) in batch]
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
        self._answered(batch, answers, slack)
        self._schedule()

    def _answered(
        self, batch: list[tuple[ScopeQueue, Request]], answers: list[Reservation], slack: float
    ) -> None:
        """Pass on what may be used: not what was booked in a book that was lost since, nor what
        came too late."""
        now, known = self._clock.monotonic(), self._epoch
        epoch = max(answer.epoch for answer in answers)
        if known is not None:
            epoch = max(epoch, known)
        self._epoch = epoch
        starts: list[Start] = []
        for (queue, _), answer in zip(batch, answers, strict=True):
            good_until = answer.start_at + slack
            if now > good_until:
                # The way there takes long. What is booked next allows for that.
                self._slack = min(MAX_SLACK, max(self._slack, 2 * (now - answer.start_at)))
            usable = now <= good_until and answer.epoch == epoch
            starts.append((queue, answer.start_at if usable else None, good_until))
        self._deliver(starts, known is not None and epoch > known, now)

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


def _padded(intervals: float | tuple[float, ...], slack: float) -> tuple[float, ...]:
    """Booked a little longer than needed, since a start may be used a little late."""
    each = intervals if isinstance(intervals, tuple) else (intervals,)
    return tuple(seconds + slack if seconds > 0 else 0.0 for seconds in each)


_PLAIN = ScopeSettings(default=0.0)
