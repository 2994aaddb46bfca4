"""Parts of a `PoliteQueue`: the URLs of each origin, its waiting tasks, and the gate protocols.

A few URLs of an origin are in memory, the highest priority first. The others wait in an SQLite
scratch file, in the same order.
"""

from __future__ import annotations

import asyncio
import heapq
import inspect
import itertools
import logging
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from datetime import datetime
from enum import Enum, auto
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from gatekeeper.clock import Clock, DueHeap, SingleTimer, Timer
from gatekeeper.decision import Decision
from gatekeeper.errors import refuse_wrong_wait
from gatekeeper.gate import Gatekeeper
from gatekeeper.gate.lease import Lease
from gatekeeper.pacing.deadlock import Choice, WaitGraph
from gatekeeper.queue.files import Entry, KeptEntries, OverflowFile
from gatekeeper.urls import host_of

_log = logging.getLogger("gatekeeper.queue")

_LOOKS_PER_ITERATION = 64
"""Origins that `join` examines before it yields to the event loop."""
IN_MEMORY = 32
"""URLs of one origin that stay in memory, for a time twice as many; others wait in a file."""


class Backlog(msgspec.Struct, eq=False):
    """The URLs of one origin, the highest priority first, then first come, first served.

    The first of them are in memory: every entry in the file comes after all entries in memory.
    """

    _number: int
    _file: OverflowFile
    _limit: int
    _arrivals: Iterator[int]
    """Numbers the URLs of all backlogs of a queue."""
    _entries: list[Entry] = []
    _in_file: int = 0
    _first_in_file: tuple[float, int] | None = None
    """No entry in the file comes before this; None while the file has none."""

    def __len__(self) -> int:
        return len(self._entries) + self._in_file

    def put(
        self, url: str, priority: float, data: Any = None, keep: KeptEntries | None = None
    ) -> None:
        """Add a URL after those of the same priority. If it raises StorageError, or what `keep.add`
        raises, the URL was not added."""
        refuse_wrong_wait(priority)
        entry = (-priority, next(self._arrivals), url, data)
        if self._belongs_in_file(entry) or len(self._entries) >= 2 * self._limit:
            self._file.make_room(data)
        if keep is not None:
            keep.add(entry)
        self.put_back(entry)

    def put_back(self, entry: Entry) -> None:
        """Put an entry in its place, such as one that was popped. Can't fail."""
        if self._belongs_in_file(entry):
            self._spill(entry)
            return
        heapq.heappush(self._entries, entry)
        if len(self._entries) > 2 * self._limit:
            self._entries.sort()
            for other in self._entries[self._limit :]:
                self._spill(other)
            del self._entries[self._limit :]

    def _belongs_in_file(self, entry: Entry) -> bool:
        return self._first_in_file is not None and entry[:2] > self._first_in_file

    def _spill(self, entry: Entry) -> None:
        self._file.add(self._number, entry)
        self._in_file += 1
        if self._first_in_file is None or entry[:2] < self._first_in_file:
            self._first_in_file = entry[:2]

    def pop(self) -> Entry:
        """Remove and return the first entry. Raises IndexError if there is none, or StorageError,
        which removes nothing."""
        if not self._entries and self._in_file:
            self._entries = self._file.read_out(self._number, self._limit)
            self._in_file -= len(self._entries)
            self._first_in_file = None if not self._in_file else self._entries[-1][:2]
        return heapq.heappop(self._entries)

    def rank(self) -> float:
        """Return the rank of the first entry, its negative priority; 0 if there is none."""
        if self._entries:
            return self._entries[0][0]
        return 0.0 if self._first_in_file is None else self._first_in_file[0]

    def first(self) -> str | None:
        """Return the first entry's URL; None if there is none, or it is in the file."""
        return self._entries[0][2] if self._entries else None


class QueueLease(Protocol):
    """A lease as the queue uses it."""

    @property
    def expires_at(self) -> datetime:
        """When the lease expires."""

    def enter(self) -> None:
        """Let requests of this context adopt the lease."""

    def leave(self) -> None:
        """Undo `enter`, and end the lease."""

    def give_back(self) -> None:
        """End the lease unused."""

    data: Any
    """The payload of the URL."""


class GrantingGate(Protocol):
    """The part of a gate that the queue needs of every gate.

    One of this process has the methods of `QueueGatekeeper`, too. A gate in another process answers
    in a round trip, and can't call back. Its `at_a_glance` is False, and `acquire_if_due(url,
    priority=...)` takes a lease if the host is due now. It raises what `acquire` does; a
    LeaseTimeout has in `retry_at` when the host is due.
    """

    @property
    def clock(self) -> Clock:
        """The clock of the gate."""

    @property
    def acquire(self) -> Callable[..., Coroutine[Any, Any, QueueLease]]:
        """Wait for a lease, as `Gatekeeper.acquire` does. Raises Denied, Deferred or LeaseTimeout.

        `owned` False: the lease belongs to no task and is in no context until it is entered.
        """


class QueueGatekeeper:
    """A gate of this process, as the queue asks it; others may have the same methods."""

    def __init__(self, gate: Gatekeeper) -> None:
        parts = gate.parts
        self.clock: Clock = parts.clock
        self.waits: WaitGraph[Lease] = parts.waits
        # Methods of the gate and its scheduler, unchanged.
        self.peek: Final = gate.peek
        self.check: Final = gate.check
        self.acquire: Final = gate.acquire
        self.held: Final = parts.scheduler.held
        self.when_due: Final = parts.scheduler.when_due
        self._opened = parts.opened
        self._take_now = parts.scheduler.acquire_nowait

    def is_due(self, host: str) -> bool:
        """Return True if `when_due` would call back immediately, as far as local data can tell."""
        # `admit` is called only if a lease could be granted; that it returns None refuses it.
        offered: list[None] = []
        self._take_now("", host, None, admit=partial(offered.append, None))
        return bool(offered)

    def acquire_nowait(self, url: str) -> Lease | None:
        """Grant the lease of `acquire(owned=False)` if that needs no waiting; else return None."""
        return self._opened().leases.acquire_nowait(url, None)


_BEFORE_ALL = 1 << 62
"""More than the number of URLs that will ever be put."""


class QueueState(Enum):
    """What an origin waits for."""

    READY = auto()
    """Nothing: its host is due as far as is known, or its lease is held. For the next `get`."""
    TRIED = auto()
    """A `get` is trying it."""
    WATCHED = auto()
    """Its host is not due; the scheduler calls back when it is."""
    WAITING = auto()
    """Its first URL waits in the scheduler, since others ask for the same host."""
    COLD = auto()
    """Its robots.txt is being fetched, or will be."""
    DEFERRED = auto()
    """Not before some time: the policy can't decide earlier, or the origin backs off."""
    EMPTY = auto()
    """It has no more URLs, and is forgotten."""


_FOR_A_LEASE = (QueueState.WATCHED, QueueState.WAITING, QueueState.COLD)


class ReadyLease(NamedTuple):
    """A lease that was acquired before a `get` asked for it."""

    entry: Entry
    lease: QueueLease
    end: Timer
    """Gives the lease back if no `get` comes."""


class OriginQueue(msgspec.Struct, eq=False):
    """The URLs of one origin, with its state in the queue."""

    origin: str
    host: str
    backlog: Backlog
    state: QueueState = QueueState.TRIED
    announced: bool = False
    """The scheduler has called back that the host is due."""
    asked: bool = False
    """Its robots.txt was asked for since its last lease."""
    missed: bool = False
    """At the last try, its host was not due."""
    setbacks: int = 0
    """Tries in a row that did not get a URL out."""
    leases_by_waiting: int = 0
    """Further leases to be acquired by waiting in the scheduler, before it is tried without."""
    waiting: tuple[Entry, asyncio.Task[QueueLease]] | None = None
    """The URL that waits in the scheduler, and the task that waits."""
    ready_lease: ReadyLease | None = None
    """An acquired lease, for the next `get`."""
    _unwatch: Callable[[], None] | None = None

    def watched(self, unwatch: Callable[[], None] | None) -> None:
        """Store the function that cancels the scheduler's watch; None: the watch has ended."""
        self._unwatch = unwatch

    def unwatch(self) -> None:
        """Cancel the watch, if there is one."""
        if self._unwatch is not None:
            self._unwatch()

    def rank(self) -> float:
        """Return the rank of the next URL."""
        return self.backlog.rank() if self.ready_lease is None else self.ready_lease.entry[0]

    def lease_wanted(self) -> Choice | None:
        """Return the lease without which no `get` gets a URL of this origin; None if it may need
        none."""
        missed = self.state is QueueState.DEFERRED and self.missed
        if not missed and self.state not in _FOR_A_LEASE:
            return None
        url = self.backlog.first() if self.waiting is None else self.waiting[0][2]
        file = self.origin if self.state is QueueState.COLD else None
        return Choice(url or self.origin, self.host, origin=file)


class OriginQueues:
    """All origins that have URLs: ready ones by priority, then first come, first served, and
    deferred ones by time, with one timer for all.
    """

    def __init__(
        self, clock: Clock, path: str | Path | None, in_memory: int, joiners: Joiners
    ) -> None:
        """`path` and `in_memory` are those of `PoliteQueue`. `joiners` is notified of each origin
        that becomes ready or empty."""
        self._clock = clock
        self._joiners = joiners
        self._in_memory = in_memory
        self.overflow: OverflowFile = OverflowFile(path)
        self._queues: dict[str, OriginQueue] = {}
        self._numbers = itertools.count()
        self.arrivals: itertools.count[int] = itertools.count()
        """Numbers the URLs that are put."""
        self._order = itertools.count()
        self._ready: list[tuple[float, int, OriginQueue]] = []
        self._deferred = DueHeap[OriginQueue](
            lambda _, queued: queued.state is QueueState.DEFERRED, self.__len__
        )
        self._timer = SingleTimer(clock, self._wake)

    def __len__(self) -> int:
        return len(self._queues)

    def __iter__(self) -> Iterator[OriginQueue]:
        return iter(self._queues.values())

    def get(self, origin: str) -> tuple[OriginQueue, bool]:
        """Return the queue of an origin, and True if it was created now."""
        queued = self._queues.get(origin)
        if queued is not None:
            return queued, False
        backlog = Backlog(next(self._numbers), self.overflow, self._in_memory, self.arrivals)
        queued = self._queues[origin] = OriginQueue(origin, host_of(origin), backlog)
        return queued, True

    def forget(self, queued: OriginQueue) -> None:
        """Remove an origin that has no more URLs."""
        queued.unwatch()
        queued.state = QueueState.EMPTY
        self._queues.pop(queued.origin, None)
        self._joiners.emptied(queued)

    def ready(self, queued: OriginQueue, *, announced: bool = False) -> None:
        """Make an origin ready to be tried. `announced`: the scheduler called back for it."""
        queued.state = QueueState.READY
        queued.announced = announced
        # An acquired lease expires: it goes before others of its rank.
        order = next(self._order) - (0 if queued.ready_lease is None else _BEFORE_ALL)
        heapq.heappush(self._ready, (queued.rank(), order, queued))
        self._joiners.readied(queued)

    def raise_rank(self, queued: OriginQueue) -> None:
        """Move a ready origin forward, since a URL was added before all its others."""
        heapq.heappush(self._ready, (queued.rank(), next(self._order), queued))

    def next_ready(self) -> OriginQueue | None:
        """Take out the ready origin with the highest priority; None if none is ready."""
        if not self.any_ready():
            return None
        queued = heapq.heappop(self._ready)[2]
        queued.state = QueueState.TRIED
        return queued

    def leases_wanted(self) -> Iterator[Choice | None]:
        """Return `lease_wanted` of each origin: a `get` needs one of these leases."""
        return (queued.lease_wanted() for queued in self._queues.values())

    def any_ready(self) -> bool:
        """Return True if `next_ready` would return an origin."""
        while self._ready and self._ready[0][2].state is not QueueState.READY:
            heapq.heappop(self._ready)
        return bool(self._ready)

    def defer(self, queued: OriginQueue, until: float) -> None:
        """Do not try an origin before this monotonic time."""
        queued.state = QueueState.DEFERRED
        self._deferred.add(until, queued)
        self._timer.set_no_later(until)

    def _wake(self) -> None:
        for queued in self._deferred.pop(self._clock.monotonic()):
            self.ready(queued)
        self._timer.set_no_later(self._deferred.next())

    def close(self) -> None:
        """Remove all origins."""
        self._timer.cancel()
        for queued in list(self._queues.values()):
            self.forget(queued)
        self._ready.clear()
        self.overflow.close()


class WaitingTasks(msgspec.Struct, eq=False):
    """Tasks that wait to be woken, first come, first served.

    `_nothing_to_do()` returns True if waking one would be in vain. The cost of joining, waking and
    leaving does not depend on the number of tasks.
    """

    _nothing_to_do: Callable[[], bool]
    futures: OrderedDict[asyncio.Future[None], None] = msgspec.field(default_factory=OrderedDict)
    """The futures that the tasks await. Read-only for others."""

    async def wait(self, begun: Callable[[], object] | None = None) -> None:
        """Return when woken. A task that is woken and cancelled passes the wake-up on. `begun` is
        called once the task is among the waiting ones."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.futures[future] = None
        if begun is not None:
            begun()
        try:
            await future
        except BaseException as error:
            error.__traceback__ = None  # It would keep the local variables alive with the task.
            self.futures.pop(future, None)
            self.wake()
            raise

    def wake(self) -> None:
        """Wake the first task, unless that would be in vain."""
        while self.futures and not self._nothing_to_do():
            future, _ = self.futures.popitem(last=False)
            if not future.done():
                future.set_result(None)
                return

    def wake_all(self) -> None:
        """Wake all tasks unconditionally."""
        for future in self.futures:
            if not future.done():
                future.set_result(None)
        self.futures.clear()


class QueueStats(msgspec.Struct, frozen=True):
    """Sizes of a queue now, and counters since its start."""

    size: int
    """URLs that wait."""
    overflowed: int
    """URLs of `size` that are in the file."""
    origins: int
    unfinished: int
    """URLs put and not done."""
    got: int
    denied: int
    deferred: int
    missed: int
    """Tries at which another request had taken the host's lease first."""


class Joiners:
    """Tasks in `join`. They wait for the end, and examine ready origins for denied URLs.

    They do so only while no lease is out, because a task that has one is expected to call `get`
    again, which examines them itself; or while `putters` wait, for whom room may have to be made.
    """

    def __init__(self, putters: WaitingTasks, wake: Callable[[], object]) -> None:
        self._wake = wake
        self._putters = putters
        self.leases_out = 0
        """Leases that were given out and not left."""
        self._tasks = self._ends = 0
        self._event = asyncio.Event()
        """Set at the end, or when an origin is ready."""
        self._unseen: dict[OriginQueue, None] = {}

    def finish(self) -> None:
        """Note that every URL is done."""
        self._ends += 1
        self._event.set()

    def readied(self, queued: OriginQueue) -> None:
        """Note that an origin is ready. A waiting `get` has precedence over `join`."""
        if self._tasks:
            self._unseen[queued] = None
            if not self.leases_out or self._putters.futures:
                self._event.set()
        self._wake()

    def emptied(self, queued: OriginQueue) -> None:
        """Note that an origin has no more URLs."""
        self._unseen.pop(queued, None)

    def wake(self) -> None:
        """Let `join` examine the origins that became ready, now that no lease is out or a `put`
        waits for room."""
        if self._unseen:
            self._event.set()

    async def wait(
        self, queues: Iterable[OriginQueue], look: Callable[[OriginQueue], Awaitable[bool]]
    ) -> None:
        """Return when every URL is done. `look` is called with each origin that became ready; if it
        returns False, not again until the origin becomes ready again. Raises what `look` raises."""
        ends, looked = self._ends, 0
        self._tasks += 1
        self._unseen.update((one, None) for one in queues if one.state is QueueState.READY)
        try:
            while self._ends == ends:
                self._event.clear()
                await asyncio.sleep(0)  # A `get` that was woken goes first.
                while self._unseen and (not self.leases_out or self._putters.futures):
                    queued = self._unseen.popitem()[0]
                    if not await look(queued):
                        self._unseen.pop(queued, None)
                    looked += 1
                    if looked % _LOOKS_PER_ITERATION == 0:
                        await asyncio.sleep(0)
                if self._ends == ends:
                    await self._event.wait()
        finally:
            self._tasks -= 1
            if not self._tasks:
                self._unseen.clear()
            elif self._unseen:  # The remaining origins are for the other tasks in `join`.
                self._event.set()


_MAX_CALLS = 100
"""Most asynchronous calls in flight. With so many, `busy` is True."""


class DenialCallbacks(msgspec.Struct, eq=False):
    """Calls `_listener` with decisions, and `_done` after each call.

    An asynchronous call runs in a task of its own, so that the cancellation of a `get` does not
    interrupt it. Errors of a synchronous call are raised by `tell`. Errors of an asynchronous one
    are stored in `errors`, and `_failed` is called.
    """

    _listener: Callable[[Decision], object]
    _done: Callable[[], None]
    _failed: Callable[[], None]
    _tasks: set[asyncio.Future[object]] = set()
    errors: deque[BaseException] = msgspec.field(default_factory=deque)
    """Errors of asynchronous calls; a `get` takes them out."""

    @property
    def busy(self) -> bool:
        """True if so many calls are in flight that another one should wait."""
        return len(self._tasks) >= _MAX_CALLS

    async def wait(self) -> None:
        """Return when one of the calls in flight, of which there are some, has ended."""
        await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)

    def tell(self, decision: Decision) -> None:
        """Call the listener. Raises what it raises."""
        told: object = None
        try:
            told = self._listener(decision)
        finally:
            if inspect.isawaitable(told):
                task = asyncio.ensure_future(told)
                self._tasks.add(task)
                task.add_done_callback(self._call_ended)
            else:
                self._done()

    def _call_ended(self, task: asyncio.Future[object]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.errors.append(error)
            self._failed()
        self._done()

    async def close(self) -> None:
        """Wait for the calls in flight. If this is cancelled, they are cancelled too."""
        tasks = self._tasks - {asyncio.current_task()}
        await asyncio.gather(*tasks, return_exceptions=True)
        while self.errors:
            _log.error("on_denied failed", exc_info=self.errors.popleft())
