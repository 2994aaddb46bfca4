"""Telling somebody of each refused URL: once, to the end, and beside everything else."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import deque
from collections.abc import Awaitable, Callable

from gatekeeper.decision import Decision

__all__ = ["Telling"]

_log = logging.getLogger(__name__)

_MAX = 100
"""Asynchronous calls under way; with so many, `busy` says to wait."""


class Telling:
    """Calls `listener` with decisions, and `done` as each call has come to its end.

    An asynchronous call runs in a task of its own, so that nobody who is cancelled cuts it
    short. What a call raises is raised where it is told, or kept in `errors` by `failed`.
    """

    def __init__(
        self,
        listener: Callable[[Decision], object] | None,
        *,
        done: Callable[[], None],
        failed: Callable[[], None],
    ) -> None:
        self._listener = listener
        self._done = done
        self._failed = failed
        self._tasks: set[asyncio.Task[None]] = set()
        self.errors: deque[BaseException] = deque()
        """What asynchronous calls raised, for whoever takes it out."""

    @property
    def busy(self) -> bool:
        """Are there so many calls under way that another one should wait?"""
        return len(self._tasks) >= _MAX

    async def wait(self) -> None:
        """Return when one of the calls under way has come to its end."""
        if self._tasks:
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)

    def tell(self, decision: Decision) -> None:
        """Call the listener. Raises what it raises."""
        told: object = None
        try:
            if self._listener is not None:
                told = self._listener(decision)
        except BaseException:
            self._done()
            raise
        if inspect.isawaitable(told):
            task = asyncio.get_running_loop().create_task(_finish(told))
            self._tasks.add(task)
            task.add_done_callback(self._told)
        else:
            self._done()

    def _told(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.errors.append(error)
            self._failed()
        self._done()

    async def close(self) -> None:
        """Wait for the calls under way; cancelled itself, it cancels them."""
        tasks = self._tasks - {asyncio.current_task()}
        await asyncio.gather(*tasks, return_exceptions=True)
        while self.errors:
            _log.error("on_denied failed", exc_info=self.errors.popleft())


async def _finish(told: Awaitable[object]) -> None:
    await told
