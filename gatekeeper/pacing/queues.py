"""The waiters of each scope, and the order in which scopes fall due. No I/O, no clock.

A `Waiter` waits for a lease of one host. The waiters of a host form its `ScopeQueue`, which
exists only while there are waiters. `Queues` holds all queues and makes them ready as they fall
due. The engine decides which waiter gets a lease.

Between any two calls, a queue with a waiter is in exactly one place: READY (in the deque), TIMED
(one valid entry among the moments), PARKED (among those of one shared scope's queue), SERVING
(taken out by the engine), or HELD. A HELD queue is put back by the event that it waits for: the
head or the end of a lease, a resume, the end of a robots fetch, or an answer of the ledger.

The moment at which a queue falls due is only a hint: the clocks are read again when it comes. So a
new delay or block moves no entry.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from heapq import heapify, heappop, heappush
from typing import Any, Final, Literal

import msgspec

from gatekeeper.clock import DueHeap, SingleTimer
from gatekeeper.pacing.scopes import INF, Scope
from gatekeeper.robots.timing import RobotsInterval

REFETCH: Final = "refetch"
"""A waiter's answer to `offer`: the policy is too old to decide; fetch robots.txt first."""
PASSED: Final = "passed"
"""A waiter's answer to `offer`: it takes no lease; offer the lease to the next waiter."""

Offer = RobotsInterval | Literal["refetch", "passed"]

ROBOTS = INF
"""The priority of a robots.txt fetch: before every page of its host."""

_SWEEP_SLACK = 64
_SPARE_ENTRIES = 1024
_order = itertools.count()


class Waiter:
    """A waiter for a lease of one host: an interface whose methods the engine calls."""

    __slots__ = ("fetching", "gone", "priority", "stays", "url")

    def __init__(self, url: str, priority: float = 0.0) -> None:
        self.url: str = url
        self.priority: float = priority
        """The highest priority goes first; equal ones first come, first served."""
        self.gone: bool = False
        """Served, refused, cancelled or timed out: the queue passes it over."""
        self.fetching: bool = False
        """It is fetching robots.txt and keeps its place."""
        self.stays: bool = False
        """The only waiter of its host, which wants another lease after this one. `deliver` may
        reset it."""

    def offer(self) -> Offer:
        """Return the interval that the policy asks for now that the host is due, or REFETCH or
        PASSED. May raise a refusal.

        Called again if the lease can't be granted after all; the last call counts.
        """
        raise NotImplementedError

    def deliver(self, grant: Any) -> None:
        """Take the `Grant` of the lease."""
        raise NotImplementedError

    def outlasted(self, until: float, now: float) -> bool:
        """Return True if waiting is pointless when the host is blocked until `until`."""
        return False

    def refuse(self, error: Exception) -> None:
        """Take the error: there will be no lease."""
        raise NotImplementedError

    def fetch_robots(self) -> None:
        """Fetch robots.txt. The waiter keeps its place until `Queues.end_fetching`."""
        raise NotImplementedError


class QueuePlace(IntEnum):
    """Where a queue is; see the module docstring."""

    HELD = 0
    TIMED = 1
    READY = 2
    PARKED = 3
    SERVING = 4


_HELD, _TIMED, _READY, _PARKED, _SERVING = QueuePlace


@dataclass(slots=True, eq=False, repr=False)
class ScopeQueue:
    """The waiters for one scope: the highest priority first, then first come, first served.

    The queue of a host holds waiters, that of a shared scope holds parked queues of hosts.
    Most queues hold one waiter, in `only`; `heap` is used when there are more.
    """

    scope: Scope
    place: QueuePlace = _HELD
    due: float = -INF
    """Its valid moment while it is TIMED; other entries are stale."""
    only: Waiter | None = None
    heap: list[tuple[float, int, Waiter]] | None = None
    alive: int = 0
    """Number of waiters. The heap may also hold waiters that left."""
    parked: OrderedDict[ScopeQueue, None] | None = None
    """For a shared scope: queues of hosts that wait for it."""
    parked_in: OrderedDict[ScopeQueue, None] | None = None
    """`parked` of the shared scope's queue in which this one is."""
    has_conditions: bool = False
    """It waits for more than its scope, or once did, so `due_at` must be called."""
    fetching: int = 0
    """Waiters that are fetching robots.txt. No page goes before they are back."""
    asking: bool = False
    """An answer of the ledger is awaited."""
    token: str = ""
    """Identifies the first waiter's request to the ledger."""
    ask_at: float = -INF
    """When the ledger may be asked again."""
    hold: Any = None
    """The ledger's grant for the first waiter. It is used immediately, or given up."""

    def add(self, waiter: Waiter) -> None:
        """Add a waiter after those of the same priority."""
        self.alive += 1
        if self.heap is None:
            first = self.only
            if first is None:
                self.only = waiter
                return
            self.heap = [(-first.priority, next(_order), first)]
            self.only = None
        heappush(self.heap, (-waiter.priority, next(_order), waiter))

    def first(self) -> Waiter | None:
        """Return the next waiter, dropping those that left; None if there is none."""
        if self.heap is None:
            if self.only is not None and self.only.gone:
                self.only = None
            return self.only
        while self.heap:
            waiter = self.heap[0][2]
            if not waiter.gone:
                return waiter
            heappop(self.heap)
        self.heap = None
        return None

    def sweep(self) -> None:
        """Drop waiters that left, once they are a fifth of the heap."""
        heap = self.heap
        if heap is not None and len(heap) > self.alive + self.alive // 4 + _SWEEP_SLACK:
            self.heap = [entry for entry in heap if not entry[2].gone]
            heapify(self.heap)

    def waiters(self) -> list[Waiter]:
        """Return all waiters, in no particular order. Some may have left."""
        if self.heap is not None:
            return [entry[2] for entry in self.heap]
        return [] if self.only is None else [self.only]

    def due_at(self) -> float:
        """Return when the first waiter may start: `due_at` of the scope, and what else it waits
        for."""
        due = self.scope.due_at()
        if not self.has_conditions:
            return due
        if self.asking:
            return INF
        if self.fetching:
            first = self.first()
            if first is None or first.priority != ROBOTS:
                return INF  # The next lease is for the robots fetch.
        return max(due, self.ask_at)


_MIN_UNPROVEN = 16
"""If `pacing.max_in_flight` is no more than this, unproven hosts may use all of it."""


class Queues:
    """All queues, in the order in which they fall due. `timer` is set for the next one."""

    def __init__(
        self, timer: SingleTimer, forget: Callable[[ScopeQueue], None] | None = None
    ) -> None:
        """`forget` is notified of a queue without waiters for which the ledger was asked."""
        self.timer = timer
        self._forget = forget
        self.waiting: int = 0
        """Number of waiters in all queues."""
        self.ready: deque[ScopeQueue] = deque()
        """Queues that are due, in the order in which they became so."""
        self._all: dict[ScopeQueue, None] = {}
        """An ordered set."""
        self.moments: list[float] = []
        """A heap of the moments at which queues fall due."""
        self._by_moment: dict[float, list[ScopeQueue]] = {}
        """The queues of each moment. Some may have moved since."""
        self._entries = 0
        """Queues in all lists of `_by_moment`."""
        self._max_entries = _SPARE_ENTRIES
        self.deadlines: DueHeap[Waiter] = DueHeap(
            lambda _, waiter: not waiter.gone, lambda: self.waiting
        )
        """When waiters give up. The scheduler tells them."""

    # --- waiters ------------------------------------------------------------------------

    def join(self, scope: Scope, waiter: Waiter, now: float) -> None:
        """Add a waiter for the host. `Engine.run` must follow before anything is awaited."""
        self.waiting += 1
        queue: ScopeQueue = scope.queue or self._new(scope)
        queue.add(waiter)
        if queue.place is _HELD:
            self.reposition(scope, now)

    def leave(self, scope: Scope, waiter: Waiter, now: float) -> None:
        """Remove a waiter that was cancelled or timed out. `Engine.run` must follow.

        The cost does not depend on the number of waiters: when a queue falls due does not depend
        on which waiter is first, so nothing moves while there is another waiter.
        """
        if waiter.gone:
            return
        waiter.gone = True
        self.waiting -= 1
        queue: ScopeQueue | None = scope.queue
        if queue is None:
            return
        queue.alive -= 1
        if waiter.fetching:
            waiter.fetching = False
            queue.fetching -= 1
        waits = queue.place is _HELD or queue.place is _TIMED
        if not queue.alive:
            if queue.parked_in is not None:
                del queue.parked_in[queue]
                self.retire(queue)
            elif waits:
                self.retire(queue)
        queue.sweep()
        if queue.has_conditions and queue.alive and waits:
            self.reposition(scope, now)  # In other places it is examined when it is taken out.

    def blocked(self, scope: Scope, now: float) -> None:
        """Note that a block of the scope started: find the waiters that will not outlast it."""
        queue: ScopeQueue | None = scope.queue
        if queue is not None:
            for one in (queue, *(queue.parked or ())):
                self._find_outlasted(one, scope, now)

    def _find_outlasted(self, queue: ScopeQueue, blocked: Scope, now: float) -> None:
        until = -INF if blocked.history is None else blocked.history.blocked_until
        for waiter in queue.waiters() if until > now else ():
            if not (waiter.gone or waiter.fetching) and waiter.outlasted(until, now):
                self.deadlines.add(now, waiter)
                self.timer.set_no_later(now)

    def start_fetching(self, queue: ScopeQueue, waiter: Waiter) -> None:
        """Send a waiter to fetch robots.txt. It keeps its place."""
        waiter.fetching = True
        queue.fetching += 1
        queue.has_conditions = True
        waiter.fetch_robots()

    def end_fetching(self, scope: Scope, waiter: Waiter, now: float) -> None:
        """Note that a waiter has fetched robots.txt. `Engine.run` must follow."""
        if waiter.fetching and scope.queue is not None:
            waiter.fetching = False
            scope.queue.fetching -= 1
            self.reposition(scope, now)

    def served(self, queue: ScopeQueue, waiter: Waiter) -> None:
        """Remove a waiter that got its lease, or will never get one. `first` drops it."""
        if not waiter.gone:
            waiter.gone = True
            self.waiting -= 1
            queue.alive -= 1

    def refuse_all(self, error: Callable[[], Exception]) -> None:
        """Refuse every waiter. Each gets an error of its own: an error that many tasks raise would
        keep the tracebacks of all of them.
        """
        for queue in list(self._all):  # a callback of a waiter may add or remove one
            for waiter in queue.waiters():
                if not waiter.gone:
                    self.served(queue, waiter)
                    waiter.refuse(error())

    def waiters(self) -> list[Waiter]:
        """Return all waiters that have not left, in no particular order."""
        return [one for queue in self._all for one in queue.waiters() if not one.gone]

    # --- places -------------------------------------------------------------------------

    def reposition(self, scope: Scope, now: float) -> None:
        """Move the queue of a scope to the place for its due time, if it is HELD or TIMED."""
        queue: ScopeQueue | None = scope.queue
        if queue is None:
            return
        place = queue.place
        if place is not _HELD and place is not _TIMED:
            return
        due = queue.due_at() if queue.has_conditions else scope.due_at()
        if due <= now:
            if self.moments and self.moments[0] <= now:
                self.fall_due(now)  # Those go first, and this queue may be one of them.
            if queue.place is not _READY:
                queue.place = _READY
                self.ready.append(queue)
            return
        if due == INF:
            queue.place = _HELD
        elif place is _HELD or due != queue.due:
            queue.place = _TIMED
            queue.due = due
            if (others := self._by_moment.get(due)) is not None:
                others.append(queue)
            else:
                self._by_moment[due] = [queue]
                heappush(self.moments, due)
                if due < self.timer.when:
                    self.timer.set(due)
            self._entries += 1
            if self._entries > self._max_entries:
                self._drop_outdated()

    def reposition_all(self, now: float) -> None:
        """Reconsider every queue after a change to all scopes, or to what a ledger may answer.
        `Engine.run` must follow."""
        for queue in self._all:
            queue.ask_at = min(queue.ask_at, now)
            self.reposition(queue.scope, now)

    def fall_due(self, now: float) -> None:
        """Make the queues ready whose moment has come, in the order of their moments.

        A queue may prove not to be due, if something changed since. The engine then makes it
        HELD, and it is looked at again.
        """
        moments = self.moments
        while moments and moments[0] <= now:
            moment = heappop(moments)
            found = self._by_moment.pop(moment)
            self._entries -= len(found)
            for queue in found:
                if queue.place is _TIMED and queue.due == moment:
                    queue.place = _READY
                    self.ready.append(queue)

    def next_due(self) -> float:
        """Return a moment before which no queue falls due; inf if none is TIMED."""
        return self.moments[0] if self.moments else INF

    def _drop_outdated(self) -> None:
        timed = [queue for queue in self._all if queue.place is _TIMED]
        self._by_moment = {}
        for queue in timed:
            self._by_moment.setdefault(queue.due, []).append(queue)
        self.moments[:] = sorted(self._by_moment)
        self._entries, self._max_entries = len(timed), 2 * len(timed) + _SPARE_ENTRIES

    def retire(self, queue: ScopeQueue) -> None:
        """Remove a queue that has no waiters and is in no place. A stale heap entry is harmless."""
        queue.scope.queue = None
        queue.place = _HELD
        if queue.token and self._forget is not None:
            self._forget(queue)
        del self._all[queue]

    def _new(self, scope: Scope) -> ScopeQueue:
        queue = scope.queue = ScopeQueue(scope)
        self._all[queue] = None
        return queue

    # --- shared scopes ------------------------------------------------------------------

    def park(self, queue: ScopeQueue, other: Scope, now: float) -> None:
        """Park a queue in that of a shared scope, which lets one parked queue at a time try."""
        theirs: ScopeQueue = other.queue or self._new(other)
        if theirs.parked is None:
            theirs.parked = OrderedDict()
        theirs.parked[queue] = None
        queue.parked_in = theirs.parked
        queue.place = _PARKED
        self._find_outlasted(queue, other, now)
        self.reposition(other, now)

    # --- answers of a ledger ------------------------------------------------------------

    def answered(self, queue: ScopeQueue, hold: Any, ask_at: float, now: float) -> bool:
        """Note the ledger's answer: a hold, or None and when to ask again. `Engine.run` must
        follow. Return False if no waiter is left."""
        queue.asking = False
        if queue.scope.queue is not queue:
            return False
        queue.hold, queue.ask_at = hold, ask_at
        self.reposition(queue.scope, now)
        return True


class Counters(msgspec.Struct):
    """Counters since the start, for `stats()`."""

    robots: int = 0
    refused: int = 0
    refetches: int = 0
    cancelled: int = 0
    timeouts: int = 0
    expired: int = 0
    given_back: int = 0
    passed_on: int = 0
    blocks: int = 0
    dry_waits: int = 0
    """Dry run: leases that would have waited."""
    dry_seconds: float = 0.0
    """Dry run: how long those leases would have waited in all."""


class UnprovenLeases:
    """Limits the leases of unproven hosts: those that have not answered twice in a row.

    A page of a dead host holds its lease until it times out. Thousands of such hosts asked
    together (their robots.txt was cached) would leave no lease for hosts that answer. So unproven
    hosts get half of `pacing.max_in_flight`, and further queues are held here. A lease counts
    until its response head arrives; leases for robots.txt have limits of their own.
    """

    def __init__(self) -> None:
        self._limit = 0
        self.room: int = 0
        """How many more such leases there may be; none if it is not above zero."""
        self.held: OrderedDict[ScopeQueue, None] = OrderedDict()
        """Queues for whose next lease there was no room."""

    def adjust(self, max_in_flight: int) -> None:
        """Apply a changed `pacing.max_in_flight`."""
        most = max(max_in_flight // 2, min(max_in_flight, _MIN_UNPROVEN))
        self.room += most - self._limit
        self._limit = most

    def next_held(self) -> ScopeQueue | None:
        """Take out the first held queue, as SERVING, once there is room; None if none is held."""
        while self.held:
            queue, _ = self.held.popitem(last=False)
            if queue.place is _HELD and queue.alive:
                queue.place = _SERVING
                return queue
        return None
