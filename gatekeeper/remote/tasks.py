"""`Tasks`: everything that goes on beside the callers, and who ends it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from gatekeeper.clock import Clock, deadline

__all__ = ["Tasks"]

_T = TypeVar("_T")


class Tasks:
    """Tasks with one owner, who calls `close` and then has none left."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        """Begin; the task forgets itself when it is done."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def finish(self, clock: Clock, seconds: float) -> None:
        """Let them come to their end, for so long at most."""
        try:
            async with deadline(clock, seconds):
                while self._tasks:
                    await asyncio.wait(list(self._tasks))
        except TimeoutError:
            return

    async def close(self) -> None:
        """Cancel what is left, and wait until it has ended."""
        while self._tasks:
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
