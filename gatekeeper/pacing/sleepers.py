"""Tasks let in a few at a time."""

from __future__ import annotations

import asyncio
from collections import deque

__all__ = ["Entrance"]

_AT_ONCE = 250
"""Tasks let in during one turn of the loop."""


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
