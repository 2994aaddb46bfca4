"""Many questions at once: answers in order, cold origins asked in parallel."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from typing import Any, TypeVar

from gatekeeper.decision import Decision

__all__ = ["WINDOW", "in_order"]

WINDOW = 1000
"""How many questions are looked at ahead of the one being answered."""

Known = TypeVar("Known")


async def in_order(
    raws: Iterable[str],
    answer: Callable[[str], Decision | str],
    ask: Callable[[str], Coroutine[Any, Any, Known]],
    settle: Callable[[str, Known], Decision],
) -> AsyncIterator[Decision]:
    """Decisions in the order of `raws`; a slow origin holds up only what comes after it.

    `answer(raw)` gives the decision, or the origin that has to be asked first;
    `ask(origin)` brings what is known then, and `settle(raw, known)` decides by it. Each
    origin of the window is asked by one task, owned here: a consumer that stops early
    leaves none behind.
    """
    waiting = iter(raws)
    window: deque[tuple[str, Decision | str]] = deque()
    asking: dict[str, asyncio.Task[Known]] = {}
    users: dict[str, int] = {}
    try:
        while True:
            for raw in waiting:
                found = answer(raw)
                if isinstance(found, str):
                    if found not in asking:
                        asking[found] = asyncio.create_task(ask(found))
                    users[found] = users.get(found, 0) + 1
                window.append((raw, found))
                if len(window) >= WINDOW:
                    break
            if not window:
                return
            raw, found = window.popleft()
            if isinstance(found, str):
                known = await asking[found]
                users[found] -= 1
                if not users[found]:
                    del users[found], asking[found]
                found = settle(raw, known)
            yield found
    finally:
        for task in asking.values():
            task.cancel()
        await asyncio.gather(*asking.values(), return_exceptions=True)
