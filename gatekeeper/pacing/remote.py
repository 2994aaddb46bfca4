"""Asking a ledger beyond this process, and staying right whatever it answers.

The books of this process agree first, then the ledger books a start, then the turn waits
for that start. A ledger that fails is asked again, later each time: nobody goes without
its word. What it booked for a turn that then can't be used is spent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine

from gatekeeper.clock import Clock
from gatekeeper.pacing.books import Books
from gatekeeper.pacing.ledger import Ledger, Request, Reservation, Scope
from gatekeeper.pacing.waiters import Line

__all__ = ["RemoteLedger"]

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

    def __init__(self, ledger: Ledger, clock: Clock, books: Books) -> None:
        self._ledger = ledger
        self._clock = clock
        self._books = books
        self._wanted: list[tuple[Line, Request]] = []
        self._pushes: dict[str, tuple[float, str]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._calls = 0
        self._pushing = False
        self._scheduled = False
        self._epoch: int | None = None
        self._slack = SLACK
        self._closed = False
        self.failures = 0

    def request(self, line: Line, gaps: tuple[float, ...]) -> None:
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

    async def _reserve(self, batch: list[tuple[Line, Request]]) -> None:
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
