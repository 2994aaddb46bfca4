"""Tasks that wait to be woken, first come first served."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

__all__ = ["Sleepers"]


class Sleepers:
    """A line of sleeping tasks. `in_vain`: is there nothing to wake anybody for?"""

    def __init__(self, in_vain: Callable[[], bool]) -> None:
        self._in_vain = in_vain
        self._line: deque[asyncio.Future[None]] = deque()

    def __len__(self) -> int:
        return len(self._line)

    async def sleep(self) -> None:
        """Return when woken. A wake-up that a cancelled one got is passed on."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.append(future)
        try:
            await future
        except BaseException:
            future.cancel()
            if future in self._line:
                self._line.remove(future)
            self.wake()
            raise

    def wake(self) -> None:
        """Wake the first, if there is something to wake it for."""
        if self._line and not self._in_vain():
            while self._line:
                future = self._line.popleft()
                if not future.done():
                    future.set_result(None)
                    return

    def wake_all(self) -> None:
        """Wake everybody, whatever for."""
        for future in self._line:
            if not future.done():
                future.set_result(None)
        self._line.clear()
