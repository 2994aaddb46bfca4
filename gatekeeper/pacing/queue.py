"""`PoliteQueue`: put many URLs, get the next one whose host is due, with its lease.

A host with waiting URLs has one lane an origin and stands in the scheduler's line with a
callback: no task, no future, no timer of its own. A `get` takes the most important ready
lane and its first URL; what a lane has to wait for is the business of `LaneWaits`, so that
no `get` ever waits for one lane while another is ready.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

from gatekeeper import urls
from gatekeeper.decision import Decision, Verdict
from gatekeeper.errors import Denied, GateClosed, LeaseTimeout
from gatekeeper.pacing.lane_waits import LaneWaits
from gatekeeper.pacing.lanes import Lane, Lanes, LaneState
from gatekeeper.pacing.overflow import IN_MEMORY, Entry
from gatekeeper.pacing.queue_gate import DistantGate, QueueGate, QueueLease, QueueStats, is_distant
from gatekeeper.pacing.sleepers import Sleepers
from gatekeeper.pacing.telling import Telling

__all__ = ["PoliteQueue", "QueueGate", "QueueStats", "Turn"]

_MANY = 64
"""URLs refused in a row after which others of the loop have a go."""


class Turn:
    """What `get` returns: a URL whose turn it is. Leaving `async with` is task_done.

    `url` is the text that was put. Enter it soon, in the task that sends the request: the
    lease is open already, and `lease.expires_at` says for how long.
    """

    __slots__ = ("_entry", "_lane", "_over", "_queue", "lease")

    lease: Any

    def __init__(self, queue: PoliteQueue, lane: Lane, entry: Entry, lease: QueueLease) -> None:
        self._queue = queue
        self._lane = lane
        self._entry = entry
        self._over = False
        lease.data = entry[3]
        self.lease = lease

    @property
    def url(self) -> str:
        """As it was put."""
        return self._entry[2]

    @property
    def data(self) -> Any:
        """The payload that was put with it, or None."""
        return self._entry[3]

    async def __aenter__(self) -> Any:
        # Here, not in `get`: whoever only hands turns on does not collect their leases.
        self.lease.enter()
        return self.lease

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._over:
            self._over = True
            try:
                self.lease.leave()
            finally:
                self._queue._done()

    async def give_back(self) -> None:
        """Not used after all: the URL stands where it stood, the turn goes to the next."""
        if not self._over:
            self._over = True
            try:
                self.lease.give_back()
                self.lease.leave()
            finally:
                self._queue._put_back(self._lane.origin, self._lane.host, self._entry)


class PoliteQueue:
    """An asyncio queue of URLs that gives each one out when its host is due.

    `maxsize` bounds the URLs that wait (0: no bound): `put` waits for room. `on_denied`
    is called once with the decision about each URL that may not be fetched, and that URL
    is done then; if it is asynchronous, it runs beside the gets. What it raises, a `get`
    raises. A deferred origin comes back by itself at its `retry_at`. `path` is where the
    scratch file of long lanes goes; None: the system's temporary folder. Close the queue,
    or use it as an async context manager.

    `data` given to `put` comes back as `lease.data` with its URL, whatever it had to wait for.
    In a lane that is too long for memory, plain values (None, bool, int, float, str, bytes,
    lists, and dicts with text as keys) wait in the scratch file and come back as equal copies;
    any other object stays in memory, 100,000 of them at most: `put` raises StorageError then.

    The gate may be a RemoteGatekeeper: the sidecar then says whose turn it is, and up to 100
    origins wait in its line at once.

    Not safe to use from several event loops, like asyncio.Queue.

    >>> async def main(gate) -> None:
    ...     async with PoliteQueue(gate) as queue:
    ...         await queue.put("https://example.org/page")
    ...         async with await queue.get() as lease:
    ...             ...  # fetch lease.url now
    ...             lease.report(status=200)
    """

    def __init__(
        self,
        gate: QueueGate | DistantGate,
        *,
        maxsize: int = 0,
        on_denied: Callable[[Decision], object] | None = None,
        path: str | Path | None = None,
        in_memory: int = IN_MEMORY,
    ) -> None:
        distant = is_distant(gate)
        self._near = None if distant else cast("QueueGate", gate)
        """The gate, where it tells at a glance what is known."""
        self._far = cast("DistantGate", gate) if distant else None
        self._maxsize = maxsize
        self._lanes = Lanes(gate.clock, path, max(1, in_memory))
        self._waits = LaneWaits(gate, self._near, self._lanes)
        self._getters = Sleepers(in_vain=self._nothing_to_get)
        self._putters = Sleepers(in_vain=self.full)
        self._lanes.on_ready = self._getters.wake
        self._telling = Telling(on_denied, done=self._done, failed=self._getters.wake)
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed = False
        self._size = 0
        self._unfinished = 0
        self._got = self._denied = self._missed = self._told_done = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Drop what waits and end what asks. Those in `get`, `put` and `join` are let go:
        GateClosed for the first two. Open turns may still be left. Returns when the last
        asynchronous `on_denied` has. Idempotent.
        """
        if not self._closed:
            self._closed = True
            self._unfinished -= self._size
            self._size = 0
        self._idle.set()
        self._getters.wake_all()
        self._putters.wake_all()
        await self._waits.close()
        self._lanes.close()
        await self._telling.close()

    # --- putting ------------------------------------------------------------------------

    @property
    def maxsize(self) -> int:
        """The most URLs that may wait; 0 or less: any number."""
        return self._maxsize

    def qsize(self) -> int:
        """URLs that wait, whether their hosts are due or not."""
        return self._size

    def empty(self) -> bool:
        """Does none wait?"""
        return self._size == 0

    def full(self) -> bool:
        """Would `put` wait?"""
        return 0 < self._maxsize <= self._size

    async def put(self, url: str, priority: int = 0, data: Any = None) -> None:
        """Add a URL; a higher priority goes first. `data` comes back as `lease.data`.

        Raises InvalidURL, GateClosed, or StorageError where its lane is too long for memory
        and the scratch file can't be written, or has no place for `data`. Then it was not added.
        """
        target = urls.parse(url)
        while self.full() and not self._closed:
            await self._putters.sleep()
        self._add(target, url, priority, data)

    def put_nowait(self, url: str, priority: int = 0, data: Any = None) -> None:
        """The same without waiting. Raises asyncio.QueueFull as well."""
        target = urls.parse(url)
        if self.full() and not self._closed:
            raise asyncio.QueueFull
        self._add(target, url, priority, data)

    def _add(self, target: urls.Target, url: str, priority: float, data: Any) -> None:
        self._refuse_if_closed()
        lane, new = self._lanes.get(target.origin, target.host)
        before = lane.rank()
        lane.backlog.put(url, priority, data)  # first of all: it may fail, though not in a new lane
        self._size += 1
        self._unfinished += 1
        self._idle.clear()
        self._joined(lane, before, new=new)

    def _put_back(self, origin: str, host: str, entry: Entry) -> None:
        if self._closed:
            self._done()
            return
        lane, new = self._lanes.get(origin, host)
        before = lane.rank()
        lane.backlog.put_back(entry)
        self._size += 1
        self._joined(lane, before, new=new)

    def _joined(self, lane: Lane, before: float, *, new: bool) -> None:
        if new:
            # Tried at once: whether the file is known and the host due shows then.
            self._lanes.ready(lane)
        elif lane.state is LaneState.READY and lane.rank() < before:
            self._lanes.raise_rank(lane)
        else:
            self._waits.overtaken(lane)

    # --- getting ------------------------------------------------------------------------

    async def get(self) -> Turn:
        """Wait for the next URL whose host is due, and take its turn.

        Cancelled, it leaves URL and turn as they were. Raises GateClosed, StorageError
        where the scratch file can't be read (the URLs are kept, and tried again later), or
        what `on_denied` raised.
        """
        while True:
            self._raise_what_there_is()
            if self._telling.busy:
                await self._telling.wait()
                continue
            lane = self._lanes.next_ready()
            if lane is None:
                await self._getters.sleep()
                continue
            denied = self._denied
            entry, lease = self._try(lane)
            if lease is None and lane.state is LaneState.TRIED:
                lease = await self._insist(lane, entry)
            if lease is not None:
                return self._taken(lane, entry, lease)
            if self._denied > denied and self._denied % _MANY == 0:
                await asyncio.sleep(0)  # a lane of refused URLs is no reason to stop the loop

    def get_nowait(self) -> Turn:
        """The next URL whose turn can be had now. Raises asyncio.QueueEmpty if there is
        none, and what `get` raises.

        What can't be told at a glance is looked into in the background: to call it again
        later is worth while as long as `empty()` is false.
        """
        refusals = self._denied + _MANY
        while True:
            self._raise_what_there_is()
            busy = self._telling.busy or self._denied >= refusals
            lane = None if busy else self._lanes.next_ready()
            if lane is None:
                raise asyncio.QueueEmpty
            entry, lease = self._try(lane)
            if lease is not None:
                return self._taken(lane, entry, lease)
            if lane.state is LaneState.TRIED:
                self._waits.missed(lane, entry)

    def _nothing_to_get(self) -> bool:
        return not (self._telling.errors or self._closed or self._lanes.any_ready())

    def _raise_what_there_is(self) -> None:
        self._refuse_if_closed()
        if self._telling.errors:
            raise self._telling.errors.popleft()

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise GateClosed("the queue is closed")

    def _try(self, lane: Lane) -> tuple[Entry, QueueLease | None]:
        """The lane's first URL, and its turn if that can be had at a glance.

        Without one the lane waits elsewhere; or it is TRIED still: the URL is welcome, but
        only the scheduler knows whether it is its turn.
        """
        had = self._waits.in_hand(lane)
        if had is not None:
            return had
        try:
            entry = lane.backlog.pop()
        except BaseException:
            self._waits.back_off(lane)
            raise
        near = self._near
        if near is None:
            return entry, None
        try:
            lease = near.take(entry[2])
            decision = None if lease is not None else near.peek(entry[2])
        except BaseException:
            lane.backlog.put_back(entry)
            self._waits.back_off(lane)
            raise
        if lease is None and decision is None:
            lane.backlog.put_back(entry)
            self._waits.ask(lane)
        elif decision is not None and decision.verdict is not Verdict.ALLOW:
            self._refused(lane, entry, decision)
        return entry, lease

    async def _insist(self, lane: Lane, entry: Entry) -> QueueLease | None:
        """Ask the scheduler, which answers without waiting for the turn."""
        lease = None
        try:
            if self._far is not None:
                lease = await self._far.look(entry[2], priority=round(-entry[0]))
            elif self._near is not None:
                lease = await self._near.acquire(
                    entry[2], priority=round(-entry[0]), timeout=0.0, owned=False
                )
        except Denied as error:
            if not self._closed:
                self._refused(lane, entry, error.decision)
        except LeaseTimeout as error:
            self._missed += 1
            self._waits.missed(lane, entry, error.retry_at)
        except BaseException as error:
            if not self._closed:
                lane.backlog.put_back(entry)
                if isinstance(error, Exception):
                    self._waits.back_off(lane)
                else:
                    self._waits.watch(lane)
            raise
        if lease is not None and self._closed:
            lease.give_back()
            lease = None
        return lease

    def _taken(self, lane: Lane, entry: Entry, lease: QueueLease) -> Turn:
        # No await since the lease was had: whoever is cancelled now has not got it.
        self._got += 1
        self._size -= 1
        self._waits.place(lane)
        self._putters.wake()
        return Turn(self, lane, entry, lease)

    # --- refusing -----------------------------------------------------------------------

    def _refused(self, lane: Lane, entry: Entry, decision: Decision) -> None:
        """Denied: it is done. Deferred: the lane comes back."""
        if decision.verdict is Verdict.DEFER:
            lane.backlog.put_back(entry)
            self._waits.defer(lane, decision)
            return
        self._denied += 1
        self._size -= 1
        self._waits.go_on(lane)
        self._putters.wake()
        # The lane and the books are right by now: whatever comes of telling, it is told once.
        self._telling.tell(decision)

    # --- finishing ----------------------------------------------------------------------

    def _done(self) -> None:
        self._unfinished -= 1
        if self._unfinished <= 0:
            self._idle.set()

    def task_done(self) -> None:
        """For code that was written for asyncio.Queue: leaving the turn has said it already.

        Raises ValueError if called more often than turns were had.
        """
        if self._told_done >= self._got:
            raise ValueError("task_done() called more often than turns were had")
        self._told_done += 1

    async def join(self) -> None:
        """Wait until every URL that was put is done: left, denied, or dropped by close."""
        await self._idle.wait()

    def stats(self) -> QueueStats:
        """Counters and sizes."""
        return QueueStats(
            size=self._size,
            overflowed=self._lanes.overflowed,
            origins=len(self._lanes),
            unfinished=self._unfinished,
            got=self._got,
            denied=self._denied,
            deferred=self._waits.deferred,
            missed=self._missed,
        )
