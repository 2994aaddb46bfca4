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
from gatekeeper.pacing.turns import LATE
from gatekeeper.pacing.waiters import Line

__all__ = ["RemoteLedger"]

_log = logging.getLogger(__name__)

MAX_BATCH = 128
MAX_CALLS = 16
"""Calls of the ledger under way at once; what comes meanwhile goes with the next."""
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
        self._closed = False
        self.failures = 0

    def request(self, line: Line, gaps: tuple[float, ...]) -> None:
        """Ask for a start of this line, together with others that ask at the moment."""
        names = (line.scope.name, *(other.name for other in line.scope.shared))
        # Booked a little longer than needed: a start may be used that much late.
        padded = tuple(gap + LATE if gap > 0 else 0.0 for gap in gaps)
        self._wanted.append((line, (names, padded)))
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
        answers: list[Reservation | None] = [None] * len(batch)
        delay = RETRY_INITIAL
        try:
            while True:
                try:
                    found = await self._ledger.reserve([request for _, request in batch])
                    answers = [self._accept(Reservation(*one)) for one in found]
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
        for (line, _), answer in zip(batch, answers, strict=True):
            self._books.turns.answered(line, answer, now)
        self._books.turns.run(now)
        self._schedule()

    def _accept(self, answer: Reservation) -> Reservation | None:
        """None for a start booked in a book that was lost since."""
        if self._epoch is None or answer.epoch > self._epoch:
            if self._epoch is not None:
                self._books.turns.void_reservations()
            self._epoch = answer.epoch
        return answer if answer.epoch == self._epoch else None

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
