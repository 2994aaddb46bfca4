"""The bounds of a `PoliteQueue`, what it asks of a gate, and what it tells of itself."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from datetime import datetime
from typing import Any, Protocol

import msgspec

from gatekeeper.clock import Clock
from gatekeeper.decision import Decision

__all__ = [
    "FAR_PATIENCE",
    "FIRST_PAUSE",
    "HOLD",
    "LAST_PAUSE",
    "MAX_ASKING",
    "MAX_STANDING",
    "NEAR",
    "PATIENCE",
    "RETRY",
    "STANDS",
    "DistantGate",
    "QueueGate",
    "QueueLease",
    "QueueStats",
    "is_distant",
]

MAX_ASKING = 4_000
"""Lanes whose robots.txt is asked for at once: as many as the gate has room for, or silent hosts
would stand before those that answer."""
MAX_STANDING = 100
"""Lanes that stand in line at once for hosts whose turns others get."""
PATIENCE = 600.0
"""Seconds to stand in line for a turn before the lane is looked at anew."""
FAR_PATIENCE = 30.0
"""The same at a distant gate, whose origin may not be known yet: an answer that comes by then
says how far off the turn is."""
STANDS = 16
"""Turns for which a lane that lost one stands in line at once."""
HOLD = 5.0
"""Seconds that a turn had by standing in line waits for a `get`."""
FIRST_PAUSE = 0.02
"""Seconds that a lane rests which was tried for nothing; twice as long each time in a row."""
LAST_PAUSE = 10.0
"""The longest such rest."""
NEAR = 2.0
"""Seconds to a turn for which a lane of a distant gate stands in line. It hears in whole
seconds when the turn comes, rounded up: one less is certain."""
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

    data: Any
    """The payload of the URL."""


class DistantGate(Protocol):
    """What the queue asks of a gate in another process: it answers in a round trip, and can't
    call back. `at_a_glance` is False."""

    @property
    def at_a_glance(self) -> bool:
        """Whether it says without waiting what is known and whose turn it is."""

    @property
    def clock(self) -> Clock:
        """Where the gate reads the time."""

    def look(self, url: str, *, priority: int = 0) -> Coroutine[Any, Any, QueueLease]:
        """The turn, if it is now; raises Denied, Deferred, or LeaseTimeout, which says in
        `retry_at` when it comes."""

    def acquire(
        self,
        url: str,
        *,
        priority: int = 0,
        timeout: float | None = None,
        user_agent: str | None = None,
        owned: bool = True,
    ) -> Coroutine[Any, Any, QueueLease]:
        """See `QueueGate.acquire`; LeaseTimeout as from `look`."""


class QueueGate(Protocol):
    """What the queue asks of a gate of this process."""

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


def is_distant(gate: object) -> bool:
    """Whether the gate is another process's. Raises TypeError for what is no gate at all."""
    distant = not getattr(gate, "at_a_glance", True)
    wanted = ("clock", "look", "acquire") if distant else _WANTED
    missing = [name for name in wanted if not hasattr(gate, name)]
    if missing:
        raise TypeError(
            f"a PoliteQueue needs a Gatekeeper or a RemoteGatekeeper: {type(gate).__name__} has "
            f"no {', '.join(missing)}"
        )
    return distant


_WANTED = ("clock", "peek", "check", "take", "acquire", "when_due")


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
