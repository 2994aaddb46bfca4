"""One origin being asked about, and everybody who waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import ContextVar

from gatekeeper.fetching.outcomes import Outcome
from gatekeeper.fetching.records import Record

__all__ = ["Flight", "HeldUp", "flying"]

HeldUp = Callable[[], tuple[Outcome, float] | None]
"""What keeps a flight from its turn for long, and for how many seconds; None: nothing now."""


class Flight:
    """One origin being asked about, and everybody who waits for it."""

    __slots__ = ("asked", "force", "held_up", "origin", "task", "waiters")

    def __init__(self, origin: str, *, force: bool) -> None:
        self.origin = origin
        self.task: asyncio.Task[None] | None = None
        self.waiters: dict[asyncio.Future[Record | None], None] = {}
        """Each has a future of its own, so that a cancelled one cancels nobody. It gets the
        record, or None when the directory closes; never an exception."""
        self.force = force
        self.asked = False
        """It came to asking the origin (or would have, but for a local fault), and not only
        to looking it up in the storage."""
        self.held_up: HeldUp | None = None
        """Set while it waits for a turn that may be far off."""

    def answer(self, record: Record | None) -> None:
        """Wake everybody who waits; who comes from now on gets what is learnt after it."""
        waiters, self.waiters = self.waiters, {}
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(record)


flying: ContextVar[Flight | None] = ContextVar("gatekeeper_flying", default=None)
"""Whose errand this task is on."""
