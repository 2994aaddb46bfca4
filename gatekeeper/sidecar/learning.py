"""Origins that are learnt beside the answers to questions that can't wait for them.

Invariants
    * an origin has one task, however many ask: visitors choose how often one is asked about;
    * no task outlives its time, and there is a most of them (T8): a thousand origins that
      answer slowly, or whose turn is far off, hold nobody else up for long.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable
from functools import partial
from typing import Any, Protocol

from gatekeeper.clock import Clock, deadline
from gatekeeper.errors import GateClosed
from gatekeeper.sidecar.metrics import Sample

__all__ = ["Learning"]

logger = logging.getLogger(__name__)

_LONGEST = 10.0
"""Seconds for which a task follows an origin. The gate goes on asking without it."""
MOST = 1000
"""Origins at once; a further one is learnt when somebody asks about it later."""


class Learner(Protocol):
    """A gate, as far as it matters here."""

    async def learn(self, origin: str) -> object:
        """Ask the origin for its file if need be."""


class Learning:
    """Has the gate learn origins in the background."""

    def __init__(self, gate: Learner, clock: Clock) -> None:
        self._gate = gate
        self._clock = clock
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.put_off = 0
        """Times that there was no room."""

    def __len__(self) -> int:
        return len(self._tasks)

    def samples(self) -> Iterable[Sample]:
        """For /metrics."""
        yield (
            "counter",
            "gatekeeper_learning_put_off",
            "Unknown origins of forward-auth that were not asked at once: too many were.",
            (),
            [((), self.put_off)],
        )

    def begin(self, origin: str) -> asyncio.Task[None] | None:
        """Learn it, or go on; the task ends when it is known or took too long. None: no room.

        The task never fails, and is not the caller's to cancel.
        """
        task = self._tasks.get(origin)
        if task is not None:
            return task
        if len(self._tasks) >= MOST:
            self.put_off += 1
            return None
        task = self._tasks[origin] = asyncio.get_running_loop().create_task(self._follow(origin))
        task.add_done_callback(partial(self._done, origin))
        return task

    def _done(self, origin: str, task: asyncio.Task[Any]) -> None:
        # A callback: a task that is cancelled before its first step runs no `finally`.
        del self._tasks[origin]

    async def _follow(self, origin: str) -> None:
        try:
            with contextlib.suppress(TimeoutError, GateClosed):
                async with deadline(self._clock, _LONGEST):
                    await self._gate.learn(origin)
        except Exception as error:  # noqa: BLE001 - nobody awaits it; the next question may
            logger.warning("%s could not be learnt: %s", origin, error)

    async def close(self) -> None:
        """End them all. Idempotent."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
