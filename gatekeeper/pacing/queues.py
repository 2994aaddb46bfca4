"""Who waits for which scope, and the order in which the scopes fall due. No I/O, no clock.

`Waiter` waits for a lease of one host. The waiters of a host form its `ScopeQueue`, which
exists only while somebody waits. `Queues` holds them all, and gives them out as they fall due;
who gets what then is for the engine to say.

What holds between any two calls: a queue with a waiter is in exactly one place, READY (in the
deque), TIMED (one live entry among the moments), PARKED (in the deque of one shared scope's
queue), SERVING (taken out by the engine), or HELD, and then the event it waits for puts it back:
the head or the end of a lease, a resume, the end of a robots fetch, an answer of the ledger.

The moment at which a queue falls due is only a hint: when it comes the clocks are read anew. So a
new delay or block moves no entry. Queues that fall due at one moment share one.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from heapq import heapify, heappop, heappush
from typing import Any, Final, Literal, Protocol

import msgspec

from gatekeeper.clock import SingleTimer
from gatekeeper.pacing.ledger import Outcome, Report
from gatekeeper.pacing.rules import DailyBudget
from gatekeeper.pacing.scopes import INF, Scope
from gatekeeper.robots.timing import RobotsInterval

REFETCH: Final = "refetch"
"""A waiter's answer: the policy is too old to decide; let robots.txt be fetched first."""
PASSED: Final = "passed"
"""A waiter's answer: it only wanted to know; offer it to the next."""

Offer = RobotsInterval | Literal["refetch", "passed"]

ROBOTS = INF
"""The priority of robots.txt: before every page of its host."""

_FEW = 64
_order = itertools.count()


class Waiter:
    """Somebody who waits for a lease of one host. The engine calls the five methods."""

    __slots__ = ("away", "gone", "priority", "stays", "ttl", "url")

    def __init__(self, url: str, priority: float = 0.0, ttl: float | None = None) -> None:
        self.url: str = url
        self.priority: float = priority
        """Higher goes first; of equals, who came first."""
        self.ttl: float | None = ttl
        """Seconds that the lease is to last; None: as configured."""
        self.gone: bool = False
        """Served, refused, cancelled or timed out: passed over when it comes up."""
        self.away: bool = False
        """Off to fetch robots.txt, its place kept."""
        self.stays: bool = False
        """It wants another lease after this one, behind the others; `deliver` may end that."""

    def offer(self) -> Offer:
        """The host is due: which interval does the policy ask for now? May raise a refusal.

        Called more than once if the lease then can't be had after all; the last call counts.
        """
        raise NotImplementedError

    def deliver(self, grant: Any) -> None:
        """Take the `Grant`."""
        raise NotImplementedError

    def outlasted(self, until: float, now: float) -> bool:
        """Does a block that lasts until then leave it nothing to wait for?"""
        return False

    def refuse(self, error: Exception) -> None:
        """There will be no lease."""
        raise NotImplementedError

    def send_away(self) -> None:
        """Fetch robots.txt; the place is kept until `Queues.back`."""
        raise NotImplementedError


class QueuePlace(IntEnum):
    """Where a queue is; see the module."""

    HELD = 0
    TIMED = 1
    READY = 2
    PARKED = 3
    SERVING = 4


_HELD, _TIMED, _READY, _PARKED, _SERVING = QueuePlace


@dataclass(slots=True, eq=False, repr=False)
class ScopeQueue:
    """Those who wait for one scope: the highest priority first, then first come first served.

    The queue of a host holds waiters; that of a shared scope holds parked queues of hosts.
    Most hold one waiter: `only` is that one, and `heap` is for when there are more.
    """

    scope: Scope
    id: int
    """Its place in the list of all queues."""
    place: QueuePlace = _HELD
    due: float = -INF
    """The one moment that counts while it is TIMED; other entries are stale."""
    only: Waiter | None = None
    heap: list[tuple[float, int, Waiter]] | None = None
    alive: int = 0
    """Waiters; the heap holds some who left, beside them."""
    parked: deque[ScopeQueue] | None = None
    dead: int = 0
    """Parked queues in which nobody waits any more."""
    parked_in: ScopeQueue | None = None
    special: bool = False
    """It waits for more than its scope, or once did: `due_at` has to look."""
    away: int = 0
    """Waiters off to fetch robots.txt. No page goes before they are back."""
    asking: bool = False
    """An answer of the ledger is awaited."""
    asked: bool = False
    """The ledger was asked under `token`, and may remember it."""
    token: str = ""
    """Under which the ledger is asked for the first waiter."""
    ask_at: float = -INF
    """When the ledger may be asked again."""
    hold: Any = None
    """What the ledger granted for the first waiter; used at once, or given up."""

    def add(self, waiter: Waiter) -> None:
        """Join, behind those of the same priority."""
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
        """Who is next; those who left are dropped on the way."""
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
        """Drop those who left, each time that they are a fifth of the heap."""
        heap = self.heap
        if heap is not None and len(heap) > self.alive + self.alive // 4 + _FEW:
            self.heap = [entry for entry in heap if not entry[2].gone]
            heapify(self.heap)

    def everybody(self) -> list[Waiter]:
        """All waiters, in no order."""
        if self.heap is not None:
            return [entry[2] for entry in self.heap]
        return [] if self.only is None else [self.only]

    def to_the_end(self, waiter: Waiter) -> None:
        """The first was served, and stays for another lease."""
        if self.heap and self.heap[0][2] is waiter:
            heapq.heapreplace(self.heap, (-waiter.priority, next(_order), waiter))

    def due_at(self) -> float:
        """When its first waiter may go: the scope's `due_at`, and what else it waits for."""
        due = self.scope.due_at()
        if not self.special:
            return due
        if self.asking:
            return INF
        if self.away:
            first = self.first()
            if first is None or first.priority != ROBOTS:
                return INF  # the next lease is that of the robots fetch
        return max(due, self.ask_at)


class Remote(Protocol):
    """A ledger beyond this process, asked after the engine has agreed to a start."""

    def holds(
        self,
        queue: ScopeQueue,
        interval: float,
        guess: bool,
        now: float,
        budget: DailyBudget | None = None,
    ) -> bool:
        """Did the ledger grant this start, with that interval in seconds? Otherwise it is asked,
        and the answer comes back through `Queues.answered`. `guess`, `budget`: see
        `ScopeRequest`."""

    def granted(self, queue: ScopeQueue) -> Any:
        """The queue's hold, which belongs to a lease now."""

    def adopt(self, scopes: tuple[str, ...]) -> Any:
        """A hold for a request that an earlier process sent."""

    def head(self, hold: Any) -> None:
        """The head of its response is here, or the request has failed."""

    def end(self, hold: Any, outcome: Outcome) -> None:
        """The lease is over."""

    def report(self, report: Report) -> None:
        """Tell everybody what an answer means."""

    def forget(self, queue: ScopeQueue) -> None:
        """Nobody waits in the queue any more."""


_ALL_UNPROVEN = 16
"""Where `pacing.max_in_flight` is no more, unproven hosts may have all of it."""
_MAX_SPARE = 4096
"""Queues kept for those who come next: a host that somebody waits for now and then needs none
of its own."""


class Queues:
    """Every queue, in the order in which they fall due. `timer` is set for the next one."""

    __slots__ = (
        *("_at", "_crowded", "_free", "_outlasted", "_queues", "_spare", "_stale", "moments"),
        *("ready", "remote", "timer", "waiting"),
    )

    def __init__(self, timer: SingleTimer) -> None:
        self.timer = timer
        self.waiting: int = 0
        """Waiters, in all queues."""
        self.remote: Remote | None = None
        self.ready: deque[ScopeQueue] = deque()
        """Due by now, in the order in which they became so."""
        self.moments: list[float] = []
        """A heap: when queues fall due; see `fall_due`."""
        self._at: dict[float, ScopeQueue | list[ScopeQueue]] = {}
        """Who falls due at a moment; mostly it is one."""
        self._stale = 0
        """Entries in there that count no more ..."""
        self._crowded = 1024
        """... and how many of them are swept out."""
        self._queues: list[ScopeQueue | None] = []
        self._free: list[int] = []
        self._spare: list[ScopeQueue] = []
        self._outlasted: dict[Waiter, None] = {}

    # --- waiters ------------------------------------------------------------------------

    def join(self, scope: Scope, waiter: Waiter, now: float) -> bool:
        """Wait for the host. True: somebody is ready, so that `Engine.run` must follow before
        anything is awaited."""
        self.waiting += 1
        queue: ScopeQueue | None = scope.queue
        if queue is None:
            queue = self._new(scope)
            queue.only, queue.alive = waiter, 1
        else:
            if queue.parked_in is not None and not queue.alive:
                queue.parked_in.dead -= 1
            queue.add(waiter)
        if queue.place is _HELD:
            self.look_again(scope, now)
        return bool(self.ready)

    def leave(self, scope: Scope, waiter: Waiter, now: float) -> bool:
        """Cancelled or timed out: its place goes to the next. True: `Engine.run` must follow.

        It costs the same however many wait: when a queue comes up does not depend on who
        is first, so that nothing moves as long as somebody waits.
        """
        if waiter.gone:
            return False
        waiter.gone = True
        self.waiting -= 1
        queue: ScopeQueue | None = scope.queue
        if queue is None:
            return False
        queue.alive -= 1
        waits = queue.place is _HELD or queue.place is _TIMED
        if not queue.alive:
            if waits:
                if waiter.away:
                    queue.away -= 1
                self.retire(queue)
            elif queue.parked_in is not None:
                self._left_parked(queue.parked_in)
        queue.sweep()
        if waiter.away:
            waiter.away = False
            if queue.alive or not waits:
                queue.away -= 1
        if not (queue.special and queue.alive and waits):
            return False  # elsewhere, whoever takes the queue out sees who is left
        self.look_again(scope, now)
        return True

    def blocked(self, scope: Scope, now: float) -> None:
        """A block of the scope has begun: whom it outlasts need not wait for its end to know."""
        queue: ScopeQueue | None = scope.queue
        if queue is not None:
            for one in (queue, *(queue.parked or ())):
                self._outlast(one, scope, now)

    def _outlast(self, queue: ScopeQueue, blocked: Scope, now: float) -> None:
        until = -INF if blocked.history is None else blocked.history.blocked_until
        for waiter in queue.everybody() if until > now else ():
            if not (waiter.gone or waiter.away) and waiter.outlasted(until, now):
                self._outlasted[waiter] = None
        if self._outlasted:
            self.timer.set_no_later(now)

    @property
    def any_outlasted(self) -> bool:
        """Would `pop_outlasted` find somebody?"""
        return bool(self._outlasted)

    def pop_outlasted(self, most: int) -> list[Waiter]:
        """Whom a block leaves nothing to wait for, at most so many at once; some have left."""
        told = self._outlasted
        return [told.popitem()[0] for _ in range(min(most, len(told)))]

    def away(self, queue: ScopeQueue, waiter: Waiter) -> None:
        """The waiter goes to fetch robots.txt and keeps its place."""
        waiter.away = True
        queue.away += 1
        queue.special = True
        waiter.send_away()

    def back(self, scope: Scope, waiter: Waiter, now: float) -> None:
        """A waiter's robots.txt is here. `Engine.run` must follow."""
        if waiter.away and scope.queue is not None:
            waiter.away = False
            scope.queue.away -= 1
            self.look_again(scope, now)

    def served(self, queue: ScopeQueue, waiter: Waiter) -> None:
        """It got what it waited for, or will never get it."""
        if not waiter.gone:
            waiter.gone = True
            self.waiting -= 1
            queue.alive -= 1
        if queue.only is waiter:
            queue.only = None
        elif (heap := queue.heap) and heap[0][2] is waiter:
            heappop(heap)  # one that is not the first any more is dropped when it comes up

    def refuse_all(self, error: Callable[[], Exception]) -> None:
        """Nobody will get a lease any more. Each is told with an error of its own: one that many
        tasks raise would keep a traceback of all of them.
        """
        for queue in self._queues:
            for waiter in queue.everybody() if queue is not None else ():
                if queue is not None and not waiter.gone:
                    self.served(queue, waiter)
                    waiter.refuse(error())

    def ask_again(self, now: float) -> None:
        """The ledger may answer otherwise now, to whomever. `Engine.run` must follow."""
        for queue in self._queues:
            if queue is not None and queue.token:
                queue.ask_at = now
                self.look_again(queue.scope, now)

    def everybody(self) -> list[Waiter]:
        """All who wait, in no order."""
        queues = [queue for queue in self._queues if queue is not None]
        return [one for queue in queues for one in queue.everybody() if not one.gone]

    # --- places -------------------------------------------------------------------------

    def look_again(self, scope: Scope, now: float) -> None:
        """Put the queue of a scope where its due time says, if it is HELD or TIMED."""
        queue: ScopeQueue | None = scope.queue
        if queue is None:
            return
        place = queue.place
        if place is not _HELD and place is not _TIMED:
            return
        due = queue.due_at() if queue.special else scope.due_at()
        if due <= now:
            self._make_ready(queue, now)
            return
        if place is _TIMED:
            if due == queue.due:
                return
            self._left_behind()
        if due == INF:
            queue.place = _HELD
            return
        queue.place = _TIMED
        queue.due = due
        others = self._at.setdefault(due, queue)
        if others is queue:
            heappush(self.moments, due)
            if due < self.timer.when:
                self.timer.set(due)
        elif isinstance(others, list):
            others.append(queue)
        else:
            self._at[due] = [others, queue]

    def _make_ready(self, queue: ScopeQueue, now: float) -> None:
        if self.moments and self.moments[0] <= now:
            self.fall_due(now)  # they go first, and it may be one of them
            if queue.place is _READY:
                return
        if queue.place is _TIMED:
            self._left_behind()
        queue.place = _READY
        self.ready.append(queue)

    def look_at_all(self, now: float) -> None:
        """Something about every scope changed. `Engine.run` must follow."""
        for queue in self._queues:
            if queue is not None:
                self.look_again(queue.scope, now)

    def fall_due(self, now: float) -> None:
        """Whose moment has come is ready, in that order.

        It may turn out not to be due, where something changed since: it is HELD and looked at
        again then.
        """
        moments = self.moments
        while moments and moments[0] <= now:
            moment = heappop(moments)
            found = self._at.pop(moment, ())
            for queue in (found,) if isinstance(found, ScopeQueue) else found:
                if queue.place is _TIMED and queue.due == moment:
                    queue.place = _READY
                    self.ready.append(queue)
                else:
                    self._stale -= 1

    def next_due(self) -> float:
        """The moment of the next hint, inf if there is none."""
        return self.moments[0] if self.moments else INF

    def retire(self, queue: ScopeQueue) -> None:
        """Nobody waits in it, and no place holds it (a stale heap entry is harmless)."""
        queue.scope.queue = None
        queue.only = None
        queue.alive = 0
        if queue.place is _TIMED:
            self._left_behind()
        queue.place = _HELD
        # One that an answer may still come for is not given to another host.
        if queue.special or queue.parked is not None or len(self._spare) >= _MAX_SPARE:
            if queue.token and self.remote is not None:
                self.remote.forget(queue)
            self._queues[queue.id] = None
            self._free.append(queue.id)
        else:
            queue.heap = None
            self._spare.append(queue)

    def _new(self, scope: Scope) -> ScopeQueue:
        if self._spare:
            queue = self._spare.pop()
            queue.scope = scope
        elif self._free:
            number = self._free.pop()
            queue = self._queues[number] = ScopeQueue(scope, number)
        else:
            queue = ScopeQueue(scope, len(self._queues))
            self._queues.append(queue)
        scope.queue = queue
        return queue

    def _left_behind(self) -> None:
        """A hint became stale: its queue moved before its moment. Too many are swept out."""
        self._stale += 1
        if self._stale <= self._crowded:
            return
        before, self._at = self._at, {}
        for moment, found in before.items():
            queues = found if isinstance(found, list) else [found]
            left = [one for one in queues if one.place is _TIMED and one.due == moment]
            if left:
                self._at[moment] = left[0] if len(left) == 1 else left
        self.moments = list(self._at)
        heapify(self.moments)
        self._stale, self._crowded = 0, len(self._at) + 1024

    # --- shared scopes ------------------------------------------------------------------

    def park(self, queue: ScopeQueue, other: Scope, now: float) -> None:
        """Wait in the queue of a shared scope, which lets one at a time have a look."""
        theirs: ScopeQueue = other.queue or self._new(other)
        if theirs.parked is None:
            theirs.parked = deque()
        theirs.parked.append(queue)
        queue.parked_in = theirs
        queue.place = _PARKED
        self._outlast(queue, other, now)
        self.look_again(other, now)

    def unpark(self, queue: ScopeQueue) -> ScopeQueue | None:
        """The first queue that is parked there, now SERVING; None if there is none."""
        if not queue.parked:
            return None
        first = queue.parked.popleft()
        first.parked_in = None
        first.place = _SERVING
        if not first.alive:
            queue.dead -= 1
        return first

    def _left_parked(self, theirs: ScopeQueue) -> None:
        """One more of the queues that are parked there is empty: too many are swept out."""
        theirs.dead += 1
        parked = theirs.parked
        if parked is None or theirs.dead <= len(parked) // 4 + _FEW:
            return
        theirs.dead = 0
        for queue in [queue for queue in parked if not queue.alive]:
            queue.parked_in = None
            self.retire(queue)
        theirs.parked = deque(queue for queue in parked if queue.alive)

    # --- what a ledger answers ----------------------------------------------------------

    def answered(self, queue: ScopeQueue, hold: Any, ask_at: float, now: float) -> bool:
        """The ledger's answer: a hold, or None and when to ask again. `Engine.run` must follow.
        False: everybody has left."""
        queue.asking = False
        if queue.scope.queue is not queue:
            return False
        queue.hold, queue.ask_at = hold, ask_at
        self.look_again(queue.scope, now)
        return True


class Counters(msgspec.Struct):
    """What `stats()` counts since the start."""

    robots: int = 0
    refused: int = 0
    refetches: int = 0
    cancelled: int = 0
    timeouts: int = 0
    expired: int = 0
    given_back: int = 0
    passed_on: int = 0
    blocks: int = 0


class UnprovenLeases:
    """Leases of hosts that have not answered twice in a row, until their heads are here.

    A page of a host that died holds its lease until it times out. Thousands that are asked at
    once (their robots.txt was known) would leave none to hosts that answer: so they have half
    of `pacing.max_in_flight`, and the others wait here. Robots.txt has bounds of its own.
    """

    __slots__ = ("_most", "held", "room")

    def __init__(self) -> None:
        self._most = 0
        self.room: int = 0
        """How many more there may be; none where it is not above zero."""
        self.held: OrderedDict[ScopeQueue, None] = OrderedDict()
        """Queues for whose next lease there was no room."""

    def adjust(self, max_in_flight: int) -> None:
        """Follow another `pacing.max_in_flight`."""
        most = max(max_in_flight // 2, min(max_in_flight, _ALL_UNPROVEN))
        self.room += most - self._most
        self._most = most

    def hold(self, queue: ScopeQueue) -> None:
        """There is no room for its next lease."""
        queue.place = _HELD
        self.held[queue] = None

    def next_held(self) -> ScopeQueue | None:
        """There is room: the first queue that is held, SERVING from then on; None: none is."""
        while self.held:
            queue, _ = self.held.popitem(last=False)
            if queue.place is _HELD and queue.alive:
                queue.place = _SERVING
                return queue
        return None
