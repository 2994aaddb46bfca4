"""Who waits for a host's turn: `Waiter`, and the `Line` they stand in.

A line exists only while somebody stands in it: a host nobody waits for has none.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from enum import IntEnum
from typing import TYPE_CHECKING, Final, Literal, Protocol

from gatekeeper.pacing.intervals import Wish

if TYPE_CHECKING:
    from gatekeeper.pacing.leases import Grant
    from gatekeeper.pacing.ledger import Reservation, Scope

__all__ = ["PASSED", "REFETCH", "ROBOTS", "Line", "LineState", "Offer", "Remote", "Waiter"]

REFETCH: Final = "refetch"
"""An admission's answer: the policy is too old to decide; give the turn to robots.txt."""
PASSED: Final = "passed"
"""A waiter's answer: it only wanted to know; the turn goes on to the next."""

Offer = Wish | Literal["refetch", "passed"]

ROBOTS = float("inf")
"""The priority of robots.txt: before every page of its host."""

_INF = float("inf")
_FEW = 64
_order = itertools.count()


class Waiter:
    """Somebody who waits for a turn of one host. The books call the four methods."""

    __slots__ = ("away", "gone", "priority", "stays", "ttl", "url")

    def __init__(self, url: str, priority: float = 0.0, ttl: float | None = None) -> None:
        self.url = url
        self.priority = priority
        self.ttl = ttl
        self.gone = False
        """Served, refused, cancelled or timed out: passed over when its turn comes."""
        self.away = False
        """Off to fetch robots.txt, its place kept."""
        self.stays = False
        """It wants another turn after this one, behind the others; `deliver` may end that."""

    def offer(self) -> Offer:
        """It is your turn: what does the policy ask for now? May raise a refusal.

        Called more than once if the turn then can't be had after all; the last call counts.
        """
        raise NotImplementedError

    def deliver(self, grant: Grant) -> None:
        """The turn is yours."""
        raise NotImplementedError

    def refuse(self, error: Exception) -> None:
        """There will be no turn."""
        raise NotImplementedError

    def send_away(self) -> None:
        """Fetch robots.txt; your place is kept until you are back."""
        raise NotImplementedError


class LineState(IntEnum):
    """Where a line stands."""

    HELD = 0
    """Not before an event: a lease ends, a host is resumed, an answer comes."""
    TIMED = 1
    """In the heap, at a moment."""
    READY = 2
    """Among those that may go now, first come first served."""
    PARKED = 3
    """In the line of a shared scope that is not free."""
    SERVING = 4
    """Being offered a turn; whoever does that will place it."""


class Line:
    """Those who wait for one scope, the most important first, then first come first served.

    The line of a host holds waiters; that of a shared scope holds parked lines of hosts.
    Most lines are one long: `only` is that one, and `queue` a heap for when there are more.
    """

    __slots__ = (
        "alive",
        "away",
        "dead",
        "due",
        "good_until",
        "id",
        "only",
        "parked",
        "parked_in",
        "queue",
        "reservation",
        "reserving",
        "scope",
        "special",
        "state",
    )

    def __init__(self, scope: Scope, number: int) -> None:
        self.scope = scope
        self.id = number
        """The low bits of its entries in the heap."""
        self.state = LineState.HELD
        self.due = -1
        """Microseconds of the one entry in the heap that counts; others are stale."""
        self.only: Waiter | None = None
        self.queue: list[tuple[float, int, Waiter]] | None = None
        self.alive = 0
        """Waiters who stand here; the queue holds some who left, beside them."""
        self.parked: deque[Line] | None = None
        self.dead = 0
        """Parked lines in which nobody stands any more."""
        self.parked_in: Line | None = None
        self.special = False
        """It waits for more than its scope's clock, or once did: `due_at` has to look."""
        self.away = 0
        """Waiters off to fetch robots.txt. No page goes before they are back."""
        self.reserving = False
        """An answer of the ledger is awaited."""
        self.reservation: Reservation | None = None
        self.good_until = _INF
        """Others count from the reserved start: used later, it would be too close to theirs."""

    def add(self, waiter: Waiter) -> None:
        """Join, behind those of the same priority."""
        self.alive += 1
        if self.queue is None:
            first = self.only
            if first is None:
                self.only = waiter
                return
            self.queue = [(-first.priority, next(_order), first)]
            self.only = None
        heapq.heappush(self.queue, (-waiter.priority, next(_order), waiter))

    def first(self) -> Waiter | None:
        """Who is next; those who left are dropped on the way."""
        if self.queue is None:
            if self.only is not None and self.only.gone:
                self.only = None
            return self.only
        while self.queue:
            waiter = self.queue[0][2]
            if not waiter.gone:
                return waiter
            heapq.heappop(self.queue)
        self.queue = None
        return None

    def sweep(self) -> None:
        """Drop those who left, now and then: each time that they are a fifth of the queue."""
        queue = self.queue
        if queue is not None and len(queue) > self.alive + self.alive // 4 + _FEW:
            self.queue = [entry for entry in queue if not entry[2].gone]
            heapq.heapify(self.queue)

    def everybody(self) -> list[Waiter]:
        """All who stand here, in no order."""
        if self.queue is not None:
            return [entry[2] for entry in self.queue]
        return [] if self.only is None else [self.only]

    def to_the_end(self, waiter: Waiter) -> None:
        """The first had its turn, and stays for another."""
        if self.queue and self.queue[0][2] is waiter:
            heapq.heapreplace(self.queue, (-waiter.priority, next(_order), waiter))

    def drop(self, waiter: Waiter) -> None:
        """It was served. If it is not the first any more, it is dropped when it comes up."""
        if self.only is waiter:
            self.only = None
        elif self.queue and self.queue[0][2] is waiter:
            heapq.heappop(self.queue)

    def due_at(self) -> float:
        """When its first may go, as far as this scope alone can tell; inf: after an event."""
        if not self.special:
            return self.scope.due_at()
        if self.reserving:
            return _INF
        if self.away:
            first = self.first()
            if first is None or first.priority != ROBOTS:
                return _INF  # the turn belongs to the robots fetch
        due = self.scope.due_at()
        if self.reservation is not None and self.reservation.start_at > due:
            return self.reservation.start_at
        return due


class Remote(Protocol):
    """A ledger beyond this process, asked after the books have agreed."""

    def request(self, line: Line, gaps: tuple[float, ...]) -> None:
        """Ask for a start; the answer comes back through `Turns.answered`."""

    def push(self, scope: Scope, until: float, reason: str) -> None:
        """Tell the others: no start of this scope before that moment."""
