"""Memory that many clients took goes back to the system once they are gone.

A crawler that is killed with 5,000 requests waiting leaves some 60 MiB behind: handlers and
requests refer to each other, so that only a full run of the garbage collector finds them, and
what the C library has free in the middle of its heap it gives back when it is told to
(malloc_trim(3)). Both cost milliseconds, so they are done once after so many connections were
lost, when no more are being lost.

What stays is bounded by the most that ever waited: Python's small objects live in arenas of a
mebibyte, and one that lives on keeps its arena. A next crowd finds that room again.
"""

from __future__ import annotations

import ctypes
import gc
import logging
from collections.abc import Callable

from gatekeeper.clock import Clock, Timer

__all__ = ["MANY", "QUIET", "MemoryReturn", "give_back"]

logger = logging.getLogger(__name__)

MANY = 1000
"""Connections lost, after which it is worth the while."""
QUIET = 2.0
"""Seconds in which no more than a few were lost since."""


def give_back() -> None:
    """Collect garbage, and have the C library return what is free. Some ten milliseconds."""
    gc.collect()
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return  # not glibc
    trim(0)


class MemoryReturn:
    """Counts the connections that are lost, and acts after many."""

    def __init__(self, clock: Clock, act: Callable[[], object] = give_back) -> None:
        self._clock = clock
        self._act = act
        self._lost = 0
        self._seen = 0
        """Of those, when it was last looked."""
        self._timer: Timer | None = None

    def lost(self) -> None:
        """A connection is gone."""
        self._lost += 1
        if self._lost >= MANY and self._timer is None:
            self._look_later()

    def close(self) -> None:
        """Do nothing more. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_later(self) -> None:
        self._seen = self._lost
        self._timer = self._clock.call_at(self._clock.monotonic() + QUIET, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._lost - self._seen >= MANY // 10:
            self._look_later()  # it goes on: clients that come and go are no reason
            return
        self._lost = 0
        self._act()
