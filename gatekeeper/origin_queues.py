"""The URLs of each origin of a `PoliteQueue`, and what the queue asks of a gate.

A few URLs of an origin are in memory, the most important first; the others wait in a scratch
file of SQLite, in the same order.
"""

from __future__ import annotations

import asyncio
import heapq
import inspect
import itertools
import logging
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from enum import Enum, auto
from pathlib import Path
from typing import Any, Protocol

import msgspec

from gatekeeper.clock import Clock, SingleTimer, Timer
from gatekeeper.deadlock import Choice
from gatekeeper.decision import Decision
from gatekeeper.pacing.queues import Counters
from gatekeeper.pacing.waiting import AT_ONCE, CrowdFuture, Departures
from gatekeeper.storage.sqlite import Entry, KeptEntries, OverflowFile
from gatekeeper.urls import host_of

_log = logging.getLogger("gatekeeper.queue")

_LOOKS = 64
"""Origins looked at by `join` after which others of the loop have a go."""
IN_MEMORY = 32
"""URLs of one origin that are kept in memory; further ones wait in a file."""

_arrivals = itertools.count()


class Backlog:
    """The URLs of one origin, the most important first, then first come first served.

    The first of them are in memory: whatever is put away comes after all that is here.
    """

    __slots__ = ("_arrivals", "_away", "_here", "_limit", "_number", "_overflow", "_worst")

    def __init__(
        self,
        number: int,
        overflow: OverflowFile,
        limit: int,
        arrivals: Iterator[int] | None = None,
    ) -> None:
        """`arrivals` counts the URLs of all backlogs of a queue."""
        self._number = number
        self._arrivals = _arrivals if arrivals is None else arrivals
        self._overflow = overflow
        self._limit = limit
        self._here: list[Entry] = []
        self._away = 0
        self._worst: tuple[float, int] | None = None
        """Nothing that is put away comes before this; None while nothing is."""

    def __len__(self) -> int:
        return len(self._here) + self._away

    def put(
        self, url: str, priority: float, data: Any = None, keep: KeptEntries | None = None
    ) -> None:
        """Add at the end of its priority. Raises what `keep.add` does, and StorageError; then it
        is not added."""
        entry = (-priority, next(self._arrivals), url, data)
        late = self._is_late(entry)
        if late or len(self._here) >= 2 * self._limit:
            self._overflow.make_room(data)
        if keep is not None:
            keep.add(entry)
        self._add(entry, late=late)

    def put_back(self, entry: Entry) -> None:
        """Add where it belongs: an entry that was popped is the first again. Can't fail."""
        self._add(entry, late=self._is_late(entry))

    def _is_late(self, entry: Entry) -> bool:
        """Does it come after all that is here, and have others to wait with?"""
        if self._worst is not None:
            return entry[:2] > self._worst
        return len(self._here) >= self._limit and entry >= max(self._here)

    def _add(self, entry: Entry, *, late: bool) -> None:
        if late:
            self._put_away(entry)
            return
        heapq.heappush(self._here, entry)
        if len(self._here) > 2 * self._limit:
            self._here.sort()
            for other in self._here[self._limit :]:
                self._put_away(other)
            del self._here[self._limit :]

    def _put_away(self, entry: Entry) -> None:
        self._overflow.add(self._number, entry)
        self._away += 1
        if self._worst is None or entry[:2] < self._worst:
            self._worst = entry[:2]

    def pop(self) -> Entry:
        """The first. Raises IndexError if there is none, or StorageError; it is there then."""
        if not self._here and self._away:
            self._here = self._overflow.take(self._number, self._limit)
            self._away -= len(self._here)
            self._worst = None if not self._away else self._here[-1][:2]
        return heapq.heappop(self._here)

    def rank(self) -> float:
        """The rank of the first, 0 if there is none."""
        if self._here:
            return self._here[0][0]
        return 0.0 if self._worst is None else self._worst[0]

    def first(self) -> str | None:
        """The URL of the first; None if there is none, or it is in the file."""
        return self._here[0][2] if self._here else None


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


class GrantingGate(Protocol):
    """What the queue asks of every gate."""

    @property
    def clock(self) -> Clock:
        """Where the gate reads the time."""

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

        `owned` False: it belongs to no task and is in no context before it is entered.
        """


class DistantGate(GrantingGate, Protocol):
    """What the queue asks of a gate in another process: it answers in a round trip, and can't
    call back. `at_a_glance` is False; a LeaseTimeout says in `retry_at` when the turn comes."""

    @property
    def at_a_glance(self) -> bool:
        """Whether it says without waiting what is known and whose turn it is."""

    def look(self, url: str, *, priority: int = 0) -> Coroutine[Any, Any, QueueLease]:
        """The turn, if it is now; raises Denied, Deferred, or LeaseTimeout."""


class QueueGate(GrantingGate, Protocol):
    """What the queue asks of a gate of this process."""

    def peek(self, url: str, *, user_agent: str | None = None) -> Decision | None:
        """The decision if it is known; never waits."""

    async def check(self, url: str, *, user_agent: str | None = None) -> Decision:
        """The decision, asking for robots.txt if need be."""

    def take(self, url: str) -> QueueLease | None:
        """The turn, if it can be had at once and that is known at a glance."""

    def when_due(
        self, host: str, callback: Callable[[], object], *, priority: float = 0
    ) -> Callable[[], None]:
        """Call back once when the host is due; returns what undoes it."""


def is_distant(gate: object) -> bool:
    """Whether the gate is another process's. Raises TypeError for an object that is no gate."""
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


_ALL = 1 << 62
"""More than there will ever be."""


class QueueState(Enum):
    """What an origin waits for."""

    READY = auto()
    """Nothing: its host is due, as far as is known, or its turn was had; the next `get` has it."""
    TRIED = auto()
    """A `get` is about it."""
    WATCHED = auto()
    """Its host is not due; the scheduler will say when."""
    WAITING = auto()
    """Others ask its host too: its first URL waits in the scheduler with theirs."""
    COLD = auto()
    """Its robots.txt is being asked for, or will be."""
    DEFERRED = auto()
    """Not before a moment: the policy can't decide until then, or it needs a rest."""
    EMPTY = auto()
    """It has no more URLs, and is forgotten."""


_FOR_A_TURN = (QueueState.WATCHED, QueueState.WAITING, QueueState.COLD)


@dataclass(frozen=True, slots=True)
class HeldTurn:
    """A turn that was had before a `get` came for it."""

    entry: Entry
    lease: QueueLease
    end: Timer
    """When it is given back, should none come."""


class OriginQueue(msgspec.Struct, eq=False):
    """The URLs of one origin."""

    origin: str
    host: str
    backlog: Backlog
    state: QueueState = QueueState.TRIED
    announced: bool = False
    """It is the scheduler that says that the host is due."""
    asked: bool = False
    """Its robots.txt was asked for since its last turn."""
    missed: bool = False
    """When it was tried last, it was not the turn of its host."""
    setbacks: int = 0
    """Times in a row that it was tried for nothing."""
    turns_by_waiting: int = 0
    """Turns that are had by waiting in the scheduler, before it is tried again without."""
    waiting: tuple[Entry, asyncio.Task[QueueLease]] | None = None
    """The URL that waits in the scheduler, and the task that does so."""
    turn_held: HeldTurn | None = None
    """A turn that was had, for the next `get`."""
    _unwatch: Callable[[], None] | None = None

    def watched(self, unwatch: Callable[[], None] | None) -> None:
        """The scheduler says when its host is due, until `unwatch` is called; None: it has."""
        self._unwatch = unwatch

    def unwatch(self) -> None:
        """Be told no more."""
        if self._unwatch is not None:
            self._unwatch()
            self._unwatch = None

    def rank(self) -> float:
        """That of the URL which is next."""
        return self.backlog.rank() if self.turn_held is None else self.turn_held.entry[0]

    def turn_wanted(self) -> Choice | None:
        """The turn without which no `get` has a URL of it; None where it may need none."""
        missed = self.state is QueueState.DEFERRED and self.missed
        if not missed and self.state not in _FOR_A_TURN:
            return None
        url = self.backlog.first() if self.waiting is None else self.waiting[0][2]
        file = self.origin if self.state is QueueState.COLD else None
        return Choice(url or self.origin, self.host, origin=file)


class OriginQueues:
    """Every origin that has URLs: those ready, by priority and then first come, and those
    deferred, by time, with one timer for all of them.
    """

    def __init__(
        self,
        clock: Clock,
        path: str | Path | None,
        in_memory: int,
        joiners: Joiners,
    ) -> None:
        """`path` and `in_memory` are those of `PoliteQueue`; `joiners` are told of each origin
        that becomes ready, or is empty."""
        self._clock = clock
        self._joiners = joiners
        self._in_memory = in_memory
        self._overflow = OverflowFile(path)
        self._queues: dict[str, OriginQueue] = {}
        self._numbers = itertools.count()
        self.arrivals: itertools.count[int] = itertools.count()
        """Counts the URLs that are put."""
        self._order = itertools.count()
        self._ready: list[tuple[float, int, OriginQueue]] = []
        self._deferred: list[tuple[float, int, OriginQueue]] = []
        self._timer = SingleTimer(clock, self._wake)

    def __len__(self) -> int:
        return len(self._queues)

    def __iter__(self) -> Iterator[OriginQueue]:
        return iter(self._queues.values())

    @property
    def overflowed(self) -> int:
        """URLs in the file."""
        return self._overflow.rows

    def get(self, origin: str) -> tuple[OriginQueue, bool]:
        """The queue of an origin, and whether it is a new one."""
        queued = self._queues.get(origin)
        if queued is not None:
            return queued, False
        backlog = Backlog(next(self._numbers), self._overflow, self._in_memory, self.arrivals)
        queued = self._queues[origin] = OriginQueue(origin, host_of(origin), backlog)
        return queued, True

    def forget(self, queued: OriginQueue) -> None:
        """It is empty."""
        queued.unwatch()
        queued.state = QueueState.EMPTY
        self._queues.pop(queued.origin, None)
        self._joiners.emptied(queued)

    def ready(self, queued: OriginQueue, *, announced: bool = False) -> None:
        """Its turn may be tried; `announced`: the scheduler says so."""
        queued.state = QueueState.READY
        queued.announced = announced
        held = queued.turn_held  # a turn that was had does not keep: it goes before its like
        rank = queued.backlog.rank() if held is None else held.entry[0]
        order = next(self._order) - (0 if held is None else _ALL)
        heapq.heappush(self._ready, (rank, order, queued))
        self._joiners.readied(queued)

    def raise_rank(self, queued: OriginQueue) -> None:
        """A URL was added before all others of an origin that is ready: it moves forward."""
        heapq.heappush(self._ready, (queued.rank(), next(self._order), queued))

    def next_ready(self) -> OriginQueue | None:
        """Take out the most important origin that is ready; None if there is none."""
        while self._ready:
            queued = heapq.heappop(self._ready)[2]
            if queued.state is QueueState.READY:
                queued.state = QueueState.TRIED
                return queued
        return None

    def turns_wanted(self) -> Iterator[Choice | None]:
        """The turns of which a `get` needs one, for each origin as `turn_wanted` says."""
        return (queued.turn_wanted() for queued in self._queues.values())

    def any_ready(self) -> bool:
        """Would `next_ready` find one?"""
        while self._ready and self._ready[0][2].state is not QueueState.READY:
            heapq.heappop(self._ready)
        return bool(self._ready)

    def defer(self, queued: OriginQueue, until: float) -> None:
        """Not before that monotonic moment."""
        queued.state = QueueState.DEFERRED
        heapq.heappush(self._deferred, (until, next(self._order), queued))
        self._timer.set_no_later(until)

    def _wake(self) -> None:
        now = self._clock.monotonic()
        while self._deferred and self._deferred[0][0] <= now:
            queued = heapq.heappop(self._deferred)[2]
            if queued.state is QueueState.DEFERRED:
                self.ready(queued)
        if self._deferred:
            self._timer.set_no_later(self._deferred[0][0])

    def close(self) -> None:
        """Forget everything."""
        self._timer.cancel()
        for queued in list(self._queues.values()):
            self.forget(queued)
        self._ready.clear()
        self._deferred.clear()
        self._overflow.close()


class WaitingTasks:
    """Tasks that wait to be woken, first come, first served.

    `nothing_to_do()` says whether waking one would be for nothing. To join, to be woken and to
    leave cost the same however many wait.
    """

    def __init__(self, nothing_to_do: Callable[[], bool]) -> None:
        self._in_vain = nothing_to_do
        self.futures: OrderedDict[asyncio.Future[None], None] = OrderedDict()
        """What they wait for. Read it only."""
        self._departures = Departures(Counters())

    def __len__(self) -> int:
        return len(self.futures)

    async def wait(self, begun: Callable[[], object] | None = None) -> None:
        """Return when woken. A wake-up that a cancelled one got is passed on. `begun` is called
        once it is among those who wait."""
        future: asyncio.Future[None]
        loop = asyncio.get_running_loop()
        if len(self.futures) < AT_ONCE:
            future = loop.create_future()
        else:
            future = CrowdFuture(loop, self, self._departures)
        self.futures[future] = None
        if begun is not None:
            begun()
        try:
            await future
        except BaseException as error:
            error.__traceback__ = None  # the task keeps the error, and that all that stood here
            self.futures.pop(future, None)
            self.wake()
            raise

    def left(self, future: asyncio.Future[None]) -> None:
        """It was cancelled, and its task learns of it later: nobody wakes it."""
        self.futures.pop(future, None)

    def wake(self) -> None:
        """Wake the first, if there is something to wake it for."""
        if self.futures and not self._in_vain():
            while self.futures:
                future, _ = self.futures.popitem(last=False)
                if not future.done():
                    future.set_result(None)
                    return

    def wake_all(self) -> None:
        """Wake everybody, whatever for."""
        for future in self.futures:
            if not future.done():
                future.set_result(None)
        self.futures.clear()


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


class Joiners:
    """Tasks in `join`: they wait for the end, and look at the origins that are ready while no turn
    is out: whoever has one comes back with another `get`, which decides by itself; or waits among
    the `putters` for room, which may have to be made.
    """

    def __init__(self, putters: WaitingTasks, wake: Callable[[], object]) -> None:
        self._wake = wake
        self._putters = putters
        self.turns_out = 0
        """Turns that were had and not left."""
        self._tasks = self._ends = 0
        self._news = asyncio.Event()
        """The end, or an origin that is ready."""
        self._unseen: dict[OriginQueue, None] = {}

    def finish(self) -> None:
        """Every URL is done."""
        self._ends += 1
        self._news.set()

    def readied(self, queued: OriginQueue) -> None:
        """The origin is ready: it is for a `get` that waits, first of all."""
        if self._tasks:
            self._unseen[queued] = None
            if not self.turns_out or self._putters.futures:
                self._news.set()
        self._wake()

    def emptied(self, queued: OriginQueue) -> None:
        """The origin has no more URLs."""
        self._unseen.pop(queued, None)

    def look(self) -> None:
        """No turn is out now, or somebody waits for room: look at what came meanwhile."""
        if self._unseen:
            self._news.set()

    async def wait(
        self, queues: Iterable[OriginQueue], look: Callable[[OriginQueue], Awaitable[bool]]
    ) -> None:
        """Return at the next end. `look` is called with each origin that is ready without a turn;
        False: not again until it becomes ready anew. Raises what `look` does."""
        ends, looked = self._ends, 0
        self._tasks += 1
        self._unseen.update((one, None) for one in queues if one.state is QueueState.READY)
        try:
            while self._ends == ends:
                self._news.clear()
                await asyncio.sleep(0)  # a `get` that was woken goes first
                while self._unseen and (not self.turns_out or self._putters.futures):
                    queued = self._unseen.popitem()[0]
                    if queued.state is not QueueState.READY:
                        continue
                    if not queued.turn_held and not await look(queued):
                        self._unseen.pop(queued, None)
                    looked += 1
                    if looked % _LOOKS == 0:
                        await asyncio.sleep(0)
                if self._ends == ends:
                    await self._news.wait()
        finally:
            self._tasks -= 1
            if not self._tasks:
                self._unseen.clear()
            elif self._unseen:  # what this one met with an error is for the others
                self._news.set()


_MAX_CALLS = 100
"""Asynchronous calls under way; with so many, `busy` says to wait."""


class DenialCallbacks:
    """Calls `listener` with decisions, and `done` as each call has come to its end.

    An asynchronous call runs in a task of its own, so that nobody who is cancelled cuts it
    short. What a call raises is raised where it is told, or kept in `errors` by `failed`.
    """

    def __init__(
        self,
        listener: Callable[[Decision], object] | None,
        *,
        done: Callable[[], None],
        failed: Callable[[], None],
    ) -> None:
        self._listener = listener
        self._done = done
        self._failed = failed
        self._tasks: set[asyncio.Task[None]] = set()
        self.errors: deque[BaseException] = deque()
        """What asynchronous calls raised, for whoever takes it out."""

    @property
    def busy(self) -> bool:
        """Are there so many calls under way that another one should wait?"""
        return len(self._tasks) >= _MAX_CALLS

    async def wait(self) -> None:
        """Return when one of the calls under way has come to its end."""
        if self._tasks:
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)

    def tell(self, decision: Decision) -> None:
        """Call the listener. Raises what it raises."""
        told: object = None
        try:
            if self._listener is not None:
                told = self._listener(decision)
        except BaseException:
            self._done()
            raise
        if inspect.isawaitable(told):
            task = asyncio.get_running_loop().create_task(_finish(told))
            self._tasks.add(task)
            task.add_done_callback(self._told)
        else:
            self._done()

    def _told(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.errors.append(error)
            self._failed()
        self._done()

    async def close(self) -> None:
        """Wait for the calls under way; cancelled itself, it cancels them."""
        tasks = self._tasks - {asyncio.current_task()}
        await asyncio.gather(*tasks, return_exceptions=True)
        while self.errors:
            _log.error("on_denied failed", exc_info=self.errors.popleft())


async def _finish(told: Awaitable[object]) -> None:
    await told
