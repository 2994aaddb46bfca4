"""For tests of several folders: wait until a condition holds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable


async def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Run the loop until the condition, which may be asynchronous, holds.

    It is checked in each iteration at first, so that a state that lasts for a few is seen, and
    every 2 ms later, so that a server or a thread has the processor.
    """
    checks = 0
    async with asyncio.timeout(seconds):
        while True:
            found = condition()
            if await found if isinstance(found, Awaitable) else found:
                return
            checks += 1
            await asyncio.sleep(0 if checks < 500 else 0.002)


async def seen_in_time(
    begin: Callable[[float], Awaitable[object]],
    holds: Callable[[], Awaitable[bool]],
    first: float = 1.0,
) -> None:
    """Begin something that lasts for `first` seconds, and return once it is seen to hold.

    A machine that is too busy to see it gets a second try, which lasts longer.
    """
    loop = asyncio.get_running_loop()
    for seconds in (first, 5.0, 25.0):
        await begin(seconds)
        end = loop.time() + seconds
        while loop.time() < end:
            if await holds():
                return
            await asyncio.sleep(0.002)
    raise AssertionError("it was never seen to hold")
