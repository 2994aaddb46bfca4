"""`Errands`: what a client tells its sidecar without waiting for the answer.

Reports, ends and renewals of leases. Each is told again until it is heard or its time is
over; telling one twice changes nothing, and the sidecar ends a lease of which it hears
nothing by itself, as used.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from dataclasses import dataclass

from gatekeeper.clock import Clock
from gatekeeper.remote.line import Answer, Line, Unreached, backoff
from gatekeeper.remote.tasks import Tasks

__all__ = ["Errand", "Errands"]

_log = logging.getLogger(__name__)
_SENDERS = 8
_MOST = 100_000
"""Errands that wait; beyond, the oldest is given up."""
_ANSWER = 10.0
"""Seconds in which one attempt must be answered."""


@dataclass(frozen=True, slots=True)
class Errand:
    """A request whose answer nobody waits for, until the monotonic moment `give_up`."""

    method: str
    path: str
    body: bytes | None
    give_up: float


class Errands:
    """A queue and at most eight senders, which end when it is empty."""

    def __init__(self, line: Line, clock: Clock, rng: random.Random) -> None:
        self._line = line
        self._clock = clock
        self._rng = rng
        self._queue: deque[Errand] = deque()
        self._tasks = Tasks()
        self._senders = 0
        self.told = 0
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._queue) + self._senders

    def send(self, errand: Errand) -> None:
        """Have it told; returns at once."""
        if len(self._queue) >= _MOST:
            self._queue.popleft()
            self.dropped += 1
        self._queue.append(errand)
        if self._senders < _SENDERS:
            self._senders += 1
            self._tasks.start(self._go())

    async def close(self, seconds: float) -> None:
        """Tell what is left, for so long at most, then drop the rest."""
        await self._tasks.finish(self._clock, seconds)
        left = len(self)
        await self._tasks.close()
        self._queue.clear()
        if left:
            self.dropped += left
            _log.warning("%d reports did not reach the sidecar before the client closed", left)

    async def _go(self) -> None:
        try:
            while self._queue:
                await self._tell(self._queue.popleft())
        finally:
            # No await since the queue was found empty: whoever sends next starts another.
            self._senders -= 1

    async def _tell(self, errand: Errand) -> None:
        attempt = 0
        while True:
            pause = backoff(attempt, self._rng)
            try:
                answer = await self._line.request(
                    errand.method, errand.path, errand.body, timeout=_ANSWER
                )
                if not answer.busy and answer.status != 429:
                    self._heard(errand, answer)
                    return
                why, pause = answer.detail, answer.retry_after or pause
            except Unreached as error:
                why = str(error)
            if self._clock.monotonic() + pause > errand.give_up:
                self.dropped += 1
                _log.warning("%s %s was given up: %s", errand.method, errand.path, why)
                return
            attempt += 1
            await self._clock.sleep(pause)

    def _heard(self, errand: Errand, answer: Answer) -> None:
        self.told += 1
        if answer.status >= 400:
            # A lease that ran out meanwhile, for the most part: it counts as used.
            _log.info("%s %s: %s", errand.method, errand.path, answer.detail)
