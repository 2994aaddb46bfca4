"""Lanes of a `PoliteQueue`: the URLs of one origin, and where the lane stands."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

from gatekeeper.clock import Clock, Timer
from gatekeeper.pacing.overflow import Backlog, Entry, Overflow
from gatekeeper.pacing.queue_gate import QueueLease

__all__ = ["Hand", "Lane", "LaneState", "Lanes"]


_ALL = 1 << 62
"""More than there will ever be."""


class LaneState(Enum):
    """Where a lane stands."""

    READY = auto()
    """Its host is due, as far as is known, or its turn was had: the next `get` takes it."""
    TRIED = auto()
    """A `get` is about it."""
    WATCHED = auto()
    """Its host is not due; the scheduler will say when."""
    STANDING = auto()
    """Others ask its host too: its first URL stands in line with them."""
    COLD = auto()
    """Its robots.txt is being asked for, or stands in line for that."""
    DEFERRED = auto()
    """Not before a moment: the policy can't decide until then, or it needs a rest."""
    EMPTY = auto()
    """It has no more URLs, and is forgotten."""


@dataclass(frozen=True, slots=True)
class Hand:
    """A turn that was had before a `get` came for it."""

    entry: Entry
    lease: QueueLease
    end: Timer
    """When it is given back, should none come."""


class Lane:
    """The URLs of one origin."""

    __slots__ = (
        "announced",
        "asked",
        "backlog",
        "hand",
        "host",
        "origin",
        "setbacks",
        "stand",
        "stands",
        "state",
        "unwatch",
    )

    def __init__(self, origin: str, host: str, backlog: Backlog) -> None:
        self.origin = origin
        self.host = host
        self.backlog = backlog
        self.state = LaneState.TRIED
        self.announced = False
        """It is the scheduler that says that the host is due."""
        self.asked = False
        """Its robots.txt was asked for since its last turn."""
        self.setbacks = 0
        """Times in a row that it was tried for nothing."""
        self.stands = 0
        """Turns for which it stands in line before it is tried again without."""
        self.stand: tuple[Entry, asyncio.Task[QueueLease]] | None = None
        """Who stands in line for it, and with which URL."""
        self.hand: Hand | None = None
        """A turn that was had, for the next `get`."""
        self.unwatch: Callable[[], None] | None = None

    def rank(self) -> float:
        """That of the URL which is next."""
        return self.backlog.rank() if self.hand is None else self.hand.entry[0]


class Lanes:
    """Every lane that has URLs: those ready, by priority and then first come, and those
    deferred, by time, with one timer for all of them.
    """

    def __init__(self, clock: Clock, path: str | Path | None, in_memory: int) -> None:
        self._clock = clock
        self._in_memory = in_memory
        self._overflow = Overflow(path)
        self._lanes: dict[str, Lane] = {}
        self._numbers = itertools.count()
        self._order = itertools.count()
        self._ready: list[tuple[float, int, Lane]] = []
        self._deferred: list[tuple[float, int, Lane]] = []
        self._timer: Timer | None = None
        self.on_ready: Callable[[], None] = lambda: None
        """Told when a lane becomes ready."""

    def __len__(self) -> int:
        return len(self._lanes)

    def __iter__(self) -> Iterator[Lane]:
        return iter(self._lanes.values())

    @property
    def overflowed(self) -> int:
        """URLs in the file."""
        return self._overflow.rows

    def get(self, origin: str, host: str) -> tuple[Lane, bool]:
        """The lane of an origin, and whether it is a new one."""
        lane = self._lanes.get(origin)
        if lane is not None:
            return lane, False
        backlog = Backlog(next(self._numbers), self._overflow, self._in_memory)
        lane = self._lanes[origin] = Lane(origin, host, backlog)
        return lane, True

    def forget(self, lane: Lane) -> None:
        """It is empty."""
        if lane.unwatch is not None:
            lane.unwatch()
            lane.unwatch = None
        lane.state = LaneState.EMPTY
        self._lanes.pop(lane.origin, None)

    def ready(self, lane: Lane, *, announced: bool = False) -> None:
        """Its turn may be tried; `announced`: the scheduler says so."""
        lane.state = LaneState.READY
        lane.announced = announced
        order = next(self._order)
        if lane.hand is not None:
            order -= _ALL  # a turn that was had does not keep: it goes before its like
        heapq.heappush(self._ready, (lane.rank(), order, lane))
        self.on_ready()

    def raise_rank(self, lane: Lane) -> None:
        """A URL was added before all others of a ready lane: the lane moves forward."""
        heapq.heappush(self._ready, (lane.rank(), next(self._order), lane))

    def next_ready(self) -> Lane | None:
        """Take the most important ready lane out, or None."""
        while self._ready:
            lane = heapq.heappop(self._ready)[2]
            if lane.state is LaneState.READY:
                lane.state = LaneState.TRIED
                return lane
        return None

    def any_ready(self) -> bool:
        """Would `next_ready` find one?"""
        while self._ready and self._ready[0][2].state is not LaneState.READY:
            heapq.heappop(self._ready)
        return bool(self._ready)

    def defer(self, lane: Lane, until: float) -> None:
        """Not before that monotonic moment."""
        lane.state = LaneState.DEFERRED
        heapq.heappush(self._deferred, (until, next(self._order), lane))
        if self._deferred[0][2] is lane:
            self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = (
            self._clock.call_at(self._deferred[0][0], self._wake) if self._deferred else None
        )

    def _wake(self) -> None:
        now = self._clock.monotonic()
        while self._deferred and self._deferred[0][0] <= now:
            lane = heapq.heappop(self._deferred)[2]
            if lane.state is LaneState.DEFERRED:
                self.ready(lane)
        self._set_timer()

    def close(self) -> None:
        """Forget everything."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for lane in list(self._lanes.values()):
            self.forget(lane)
        self._ready.clear()
        self._deferred.clear()
        self._overflow.close()
