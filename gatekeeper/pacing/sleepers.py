"""Tasks that wait to be woken, first come first served, and tasks let in a few at a time."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable

__all__ = ["Entrance", "Sleepers"]

_AT_ONCE = 250
"""Tasks let in during one turn of the loop."""


class Sleepers:
    """A line of sleeping tasks. `in_vain`: is there nothing to wake anybody for?

    To join, to be woken and to leave cost the same however many sleep.
    """

    def __init__(self, in_vain: Callable[[], bool]) -> None:
        self._in_vain = in_vain
        self._line: OrderedDict[asyncio.Future[None], None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._line)

    async def sleep(self) -> None:
        """Return when woken. A wake-up that a cancelled one got is passed on."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line[future] = None
        try:
            await future
        except BaseException:
            future.cancel()
            self._line.pop(future, None)
            self.wake()
            raise

    def wake(self) -> None:
        """Wake the first, if there is something to wake it for."""
        if self._line and not self._in_vain():
            while self._line:
                future, _ = self._line.popitem(last=False)
                if not future.done():
                    future.set_result(None)
                    return

    def wake_all(self) -> None:
        """Wake everybody, whatever for."""
        for future in self._line:
            if not future.done():
                future.set_result(None)
        self._line.clear()


class Entrance:
    """Lets tasks in, first come first served, a bounded number in each turn of the loop.

    A hundred thousand tasks that begin in one turn would hold up everybody else for as long as
    it takes to look at each of them; here the loop goes round in between.
    """

    def __init__(self) -> None:
        self._let_in = 0
        """Of this turn."""
        self.outside: deque[asyncio.Future[None]] = deque()
        """Who comes now, and finds somebody here, has to `enter` behind them."""
        self._armed = False

    def enter(self) -> asyncio.Future[None] | None:
        """What to await before coming in; None, mostly: come in.

        Not a coroutine: each costs memory, and there may be many.
        """
        loop = asyncio.get_running_loop()
        if not self._armed:
            self._armed = True
            loop.call_soon(self._next_turn)
        if not self.outside and self._let_in < _AT_ONCE:
            self._let_in += 1
            return None
        future: asyncio.Future[None] = loop.create_future()
        self.outside.append(future)
        return future  # one that is cancelled stays in the line, done, and is passed over

    def _next_turn(self) -> None:
        self._let_in = 0
        outside = self.outside
        while outside and self._let_in < _AT_ONCE:
            future = outside.popleft()
            if not future.done():
                future.set_result(None)
                self._let_in += 1
        self._armed = bool(self._let_in)
        if self._armed:
            asyncio.get_running_loop().call_soon(self._next_turn)
