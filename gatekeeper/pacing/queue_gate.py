"""The bounds of a `PoliteQueue`, what it asks of a gate, and what it tells of itself."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from datetime import datetime
from typing import Any, Protocol

import msgspec

from gatekeeper.clock import Clock
from gatekeeper.decision import Decision

__all__ = [
    "FIRST_PAUSE",
    "HOLD",
    "LAST_PAUSE",
    "MAX_ASKING",
    "MAX_STANDING",
    "PATIENCE",
    "RETRY",
    "STANDS",
    "QueueGate",
    "QueueLease",
    "QueueStats",
    "must_be_gate",
]

MAX_ASKING = 100
"""Lanes whose robots.txt is asked for at once."""
MAX_STANDING = 100
"""Lanes that stand in line at once for hosts whose turns others get."""
PATIENCE = 600.0
"""Seconds to stand in line for a turn before the lane is looked at anew."""
STANDS = 16
"""Turns for which a lane that lost one stands in line at once."""
HOLD = 5.0
"""Seconds that a turn had by standing in line waits for a `get`."""
FIRST_PAUSE = 0.02
"""Seconds that a lane rests which was tried for nothing; twice as long each time in a row."""
LAST_PAUSE = 10.0
"""The longest such rest."""
RETRY = 60.0
"""Seconds to wait where a deferral says no moment, or asking failed."""


class QueueLease(Protocol):
    """What the queue does with a lease."""

    @property
    def expires_at(self) -> datetime:
        """When it ends by itself."""

    def enter(self) -> None:
        """Let requests of this context adopt it."""

    def leave(self) -> None:
        """Undo `enter`, and end it."""

    def give_back(self) -> None:
        """End it unused."""


class QueueGate(Protocol):
    """What the queue asks of a gate."""

    @property
    def clock(self) -> Clock:
        """Where the gate reads the time."""

    def peek(self, url: str, *, user_agent: str | None = None) -> Decision | None:
        """The decision if it is known; never waits."""

    async def check(self, url: str, *, user_agent: str | None = None) -> Decision:
        """The decision, asking for robots.txt if need be."""

    def take(self, url: str) -> QueueLease | None:
        """The turn, if it can be had at once and that is known at a glance."""

    def acquire(
        self,
        url: str,
        *,
        priority: int = 0,
        timeout: float | None = None,
        user_agent: str | None = None,
        owned: bool = True,
    ) -> Coroutine[Any, Any, QueueLease]:
        """The turn; raises Denied, Deferred or LeaseTimeout.

        `owned` False: it belongs to no task and stands in no context, before it is entered.
        """

    def when_due(
        self, host: str, callback: Callable[[], object], *, priority: float = 0
    ) -> Callable[[], None]:
        """Call back once when the host is due; returns what undoes it."""


def must_be_gate(gate: object) -> None:
    """Raise TypeError for what can't tell whose turn it is: a client of a sidecar, say."""
    wanted = ("clock", "peek", "check", "take", "acquire", "when_due")
    missing = [name for name in wanted if not hasattr(gate, name)]
    if missing:
        raise TypeError(
            f"a PoliteQueue needs a Gatekeeper: {type(gate).__name__} has no {', '.join(missing)}. "
            "Through a sidecar, wait with `async with gate.lease(url)` in several tasks: "
            "the sidecar keeps their line"
        )


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
