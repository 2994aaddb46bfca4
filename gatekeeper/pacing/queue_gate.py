"""The bounds of a `PoliteQueue`, what it asks of a gate, and what it tells of itself."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import msgspec

from gatekeeper.clock import Clock
from gatekeeper.decision import Decision

__all__ = ["MAX_ASKING", "PATIENCE", "RETRY", "QueueGate", "QueueStats"]

MAX_ASKING = 100
"""Lanes whose robots.txt is asked for at once."""
PATIENCE = 5.0
"""Seconds to stand in line for a host whose turns others get."""
RETRY = 60.0
"""Seconds to wait where a deferral says no moment, or asking failed."""


class QueueGate(Protocol):
    """What the queue asks of a gate."""

    @property
    def clock(self) -> Clock:
        """Where the gate reads the time."""

    def peek(self, url: str, *, user_agent: str | None = None) -> Decision | None:
        """The decision if it is known; never waits."""

    async def check(self, url: str, *, user_agent: str | None = None) -> Decision:
        """The decision, asking for robots.txt if need be."""

    def lease(
        self,
        url: str,
        *,
        priority: int = 0,
        timeout: float | None = None,
        user_agent: str | None = None,
    ) -> AbstractAsyncContextManager[Any]:
        """The turn; raises Denied, Deferred or LeaseTimeout on entering.

        `enter_here()`, where what is returned has it, lets requests of the calling
        context use the lease, whichever task entered it.
        """

    def when_due(
        self, host: str, callback: Callable[[], object], *, priority: float = 0
    ) -> Callable[[], None]:
        """Call back once when the host is due; returns what undoes it."""


class QueueStats(msgspec.Struct, frozen=True):
    """What a queue holds, and what it did."""

    size: int
    """URLs that wait."""
    overflowed: int
    """Of these, in the file."""
    origins: int
    unfinished: int
    """URLs put and not done."""
    got: int
    denied: int
    deferred: int
    missed: int
    """Turns that somebody else got first."""
