"""Work beside the answers: calls that may block for ever, and robots.txt for later questions."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from concurrent import futures
from typing import Any, TypeVar

from gatekeeper.clock import Clock, OwnedTasks, deadline
from gatekeeper.errors import ConfigError, GateClosed
from gatekeeper.gate import Gatekeeper

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


def in_thread(work: Callable[[], _T], *, name: str) -> futures.Future[_T]:
    """Call `work` in a daemon thread and return a future of its result.

    For calls that may block for ever: a pipe that nobody reads, a mount that is gone. The process
    exits without waiting for the thread, unlike for the threads of an executor.
    """
    done: futures.Future[_T] = futures.Future()
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 - it is raised by `result`
            done.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return done


READ_SECONDS = 10.0
"""Seconds that a reload may take to read the files of the configuration."""
_REMEDY = "see whether the disk or the network mount that holds them answers"


class FileReader:
    """Reads files in a thread, for one reload at a time, within `READ_SECONDS`.

    At most one thread ever hangs, as at a mount that is gone: until it ends, `run` raises.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.lock: asyncio.Lock = asyncio.Lock()
        """Held by the reload that reads files."""
        self._reading: futures.Future[Any] | None = None

    async def run(self, read: Callable[[], _T]) -> _T:
        """Return what `read` returns, in a thread. Raises ConfigError if it takes too long."""
        if self._reading is not None and not self._reading.done():
            raise ConfigError(f"an earlier reload has not read its files yet: {_REMEDY}")
        self._reading = reading = in_thread(read, name="reload")
        try:
            async with deadline(self._clock, READ_SECONDS):
                return await asyncio.wrap_future(reading)
        except TimeoutError as error:
            problem = f"its files were not read within {READ_SECONDS:g} s"
            raise ConfigError(f"{problem}: {_REMEDY}") from error


_LEARN_SECONDS = 10.0
"""Seconds that a task waits for an origin's file. The gate's own fetch goes on without it."""
MAX_ORIGINS = 1000
"""Origins fetched at a time; a further one has to wait until it is asked about again."""


class OriginLearner:
    """Makes the gate fetch the robots.txt of origins in the background."""

    def __init__(self, gate: Gatekeeper, clock: Clock) -> None:
        self._gate = gate
        self._clock = clock
        self._tasks = OwnedTasks()
        self.put_off: int = 0
        """How often an origin was not fetched because too many were."""

    def __len__(self) -> int:
        return len(self._tasks)

    def learn(self, origin: str) -> asyncio.Task[None] | None:
        """Start fetching the origin's file, unless a task does so already, and return the task.

        Return None if too many are running. The task ends when the file is known or took too
        long. It never fails, and the caller must not cancel it.
        """
        task = self._tasks.find(origin)
        if task is not None:
            return task
        if len(self._tasks) >= MAX_ORIGINS:
            self.put_off += 1
            return None
        return self._tasks.start(self._learn(origin), origin)

    async def _learn(self, origin: str) -> None:
        try:
            with contextlib.suppress(TimeoutError, GateClosed):
                async with deadline(self._clock, _LEARN_SECONDS):
                    await self._gate.parts.directory.get(origin)
        except Exception as error:  # noqa: BLE001 - nobody awaits it; the next question tries again
            _log.warning("%s could not be learnt: %s", origin, error)

    async def close(self) -> None:
        """Cancel all tasks. Idempotent."""
        await self._tasks.close()
