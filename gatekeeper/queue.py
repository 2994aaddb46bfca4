"""`PoliteQueue`: put many URLs, get the next one whose host is due, with its lease.

The URLs of one origin form an `OriginQueue`, which has a callback in the scheduler of its host:
no task, no future and no timer of its own. A `get` takes the most important origin that is
ready and that origin's first URL. What the others wait for is the business of `QueueWaits`, so
that no `get` ever waits for one origin while another is ready.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable
from contextvars import Context
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Self, cast

from gatekeeper import urls
from gatekeeper.deadlock import TurnWait, WaitGraph
from gatekeeper.decision import Decision, Verdict
from gatekeeper.errors import Denied, GateClosed, LeaseTimeout, StorageError
from gatekeeper.gate import Gatekeeper, internals
from gatekeeper.middleware import inherited
from gatekeeper.origin_queues import (
    IN_MEMORY,
    DenialCallbacks,
    DistantGate,
    HeldTurn,
    Joiners,
    OriginQueue,
    OriginQueues,
    QueueGate,
    QueueLease,
    QueueState,
    QueueStats,
    WaitingTasks,
    is_distant,
)
from gatekeeper.pacing.waiting import AT_ONCE, Entrance
from gatekeeper.storage.sqlite import Entry, KeptEntries

__all__ = ["PoliteQueue", "QueueGate", "QueueStats", "Turn"]

_log = logging.getLogger(__name__)

_MANY = 64
"""URLs refused in a row after which others of the loop have a go."""
MAX_ASKING = 4_000
"""Origins whose robots.txt is asked for at once: as many as the gate has room for, or silent hosts
would delay those that answer."""
MAX_WAITING = 100
"""Origins that wait for a turn in the scheduler at once: others get the turns of their hosts."""
PATIENCE = 600.0
"""Seconds to wait for a turn in the scheduler before the origin is looked at anew."""
FAR_PATIENCE = 30.0
"""`PATIENCE` at a distant gate: an answer that comes by then says how far off the turn is."""
TURNS_BY_WAITING = 16
"""Turns for which an origin that lost one waits in the scheduler at once."""
HOLD = 5.0
"""Seconds for which a turn that was had by waiting is kept for a `get`."""
FIRST_PAUSE = 0.02
"""Seconds that an origin rests which was tried for nothing; twice as long each time in a row."""
LAST_PAUSE = 10.0
"""The longest such rest."""
NEAR = 2.0
"""Seconds to a turn from which on an origin waits for it at a distant gate. That gate tells the
moment in whole seconds, rounded up: one less is certain."""
RETRY = 60.0
"""Seconds to wait where a deferral says no moment, or asking failed."""
_DOUBLINGS = 16


_Told = Callable[[Decision], object]


class Turn:
    """What `get` returns: a URL whose turn it is. Leaving `async with` is task_done.

    `url` is the text that was put. Enter it soon, in the task that sends the request: the
    lease is open already, and `lease.expires_at` says for how long.
    """

    __slots__ = ("_entry", "_over", "_queue", "_queued", "lease")

    lease: Any

    def __init__(
        self, queue: PoliteQueue, queued: OriginQueue, entry: Entry, lease: QueueLease
    ) -> None:
        self._queue = queue
        self._queued = queued
        self._entry = entry
        self._over = False
        lease.data = entry[3]
        self.lease = lease

    @property
    def url(self) -> str:
        """As it was put."""
        return self._entry[2]

    @property
    def origin(self) -> str:
        """Scheme, host and port of the URL, as `Decision.origin` has them."""
        return self._queued.origin

    @property
    def data(self) -> Any:
        """The payload that was put with it, or None."""
        return self._entry[3]

    async def __aenter__(self) -> Any:
        # Here, not in `get`: whoever only hands turns on does not collect their leases.
        self.lease.enter()
        return self.lease

    async def __aexit__(self, *error: object) -> None:
        self.done()

    def done(self) -> None:
        """Leave it, for those to whom a block does not fit. Idempotent."""
        if not self._over:
            self._over = True
            self._queue._joiners.turns_out -= 1
            try:
                self.lease.leave()
            finally:
                self._queue._done(self._entry)

    async def give_back(self) -> None:
        """Not used after all: the URL is put back where it was, the turn goes to the next."""
        if not self._over:
            self._over = True
            try:
                self.lease.give_back()
                self.lease.leave()
            finally:
                self._queue._joiners.turns_out -= 1
                self._queue._put_back(self._queued.origin, self._entry)
                self._queue._joiners.look()


class PoliteQueue:
    """An asyncio queue of URLs that gives each one out when its host is due.

    `maxsize` bounds the URLs that wait (0: no bound): `put` waits for room. `on_denied`
    is called once with the decision about each URL that may not be fetched, and that URL
    is done then; if it is asynchronous, it runs beside the gets. What it raises, a `get`
    raises. A deferred origin comes back by itself at its `retry_at`; `on_deferred`, which must not
    raise, is called with each such decision. `path` is where the scratch file of long backlogs
    goes; None: the system's temporary folder. Close the queue, or use it as an async context
    manager.

    `data` given to `put` comes back as `lease.data` with its URL, whatever it had to wait for.
    Of an origin with too many URLs for memory, plain values (None, bool, int, float, str, bytes,
    lists, and dicts with text as keys) wait in the scratch file and come back as equal copies;
    any other object stays in memory, 100,000 of them at most: `put` raises StorageError then.

    `keep` is a file in which URLs, priorities and data outlive the process: a queue that is made
    with it again begins with all that was put and not done, in order; kill -9 repeats what was in
    hand. `data` has to be plain then (TypeError).

    The gate may be a RemoteGatekeeper: the sidecar then says whose turn it is, and up to 100
    origins wait there at once.

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
        gate: Gatekeeper | QueueGate | DistantGate,
        *,
        maxsize: int = 0,
        on_denied: _Told | None = None,
        on_deferred: _Told | None = None,
        path: str | Path | None = None,
        in_memory: int = IN_MEMORY,
        keep: str | Path | None = None,
    ) -> None:
        if isinstance(gate, Gatekeeper):
            gate = internals(gate)
        distant = is_distant(gate)
        self._near = None if distant else cast("QueueGate", gate)
        """The gate, if it is in this process and answers without a round trip."""
        self._far = cast("DistantGate", gate) if distant else None
        self._graph: WaitGraph[Any] | None = getattr(gate, "waits", None)
        self._maxsize = maxsize
        self._getters = WaitingTasks(nothing_to_do=self._nothing_to_get)
        self._entrance = Entrance(AT_ONCE)
        self._putters = WaitingTasks(nothing_to_do=self.full)
        self._joiners = Joiners(self._putters, self._getters.wake)
        self._queues = OriginQueues(gate.clock, path, max(1, in_memory), self._joiners)
        self._waits = QueueWaits(gate, self._queues, on_deferred)
        self._callbacks = DenialCallbacks(on_denied, done=self._done, failed=self._getters.wake)
        self._closed = False
        self._size = 0
        self._unfinished = 0
        self._got = self._denied = self._missed = self._told_done = 0
        self._kept = None if keep is None else KeptEntries(keep)
        if self._kept is not None:
            kept = self._kept.load()
            self._queues.arrivals = itertools.count(kept[-1][1] + 1 if kept else 0)
            self._unfinished = len(kept)
            for entry in kept:
                self._put_back(urls.split(entry[2])[0], entry)

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
        self._joiners.finish()
        self._getters.wake_all()
        self._putters.wake_all()
        await self._waits.close()
        self._queues.close()
        await self._callbacks.close()
        if self._kept is not None:
            self._kept.close()

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

        Raises InvalidURL, GateClosed, or StorageError where its origin has too many URLs for memory
        and the scratch file can't be written, or has no place for `data`. Then it was not added.
        """
        origin = urls.split(url)[0]
        while 0 < self._maxsize <= self._size and not self._closed:  # as `full`
            await self._putters.wait(self._joiners.look)
        self._add(origin, url, priority, data)

    def put_nowait(self, url: str, priority: int = 0, data: Any = None) -> None:
        """`put` without waiting. Raises asyncio.QueueFull as well."""
        origin = urls.split(url)[0]
        if self.full() and not self._closed:
            raise asyncio.QueueFull
        self._add(origin, url, priority, data)

    def _add(self, origin: str, url: str, priority: float, data: Any) -> None:
        if self._closed:
            self._refuse_if_closed()
        queued, new = self._queues.get(origin)
        before = queued.rank() if queued.state is QueueState.READY else 0.0
        try:  # first of all: it may fail
            queued.backlog.put(url, priority, data, self._kept)
        except BaseException:
            if new:
                self._queues.forget(queued)
            raise
        self._size += 1
        self._unfinished += 1
        self._joined(queued, before, -priority, new=new)

    def _put_back(self, origin: str, entry: Entry) -> None:
        if self._closed:
            self._done()
            return
        queued, new = self._queues.get(origin)
        before = queued.rank()
        queued.backlog.put_back(entry)
        self._size += 1
        self._joined(queued, before, entry[0], new=new)

    def _joined(self, queued: OriginQueue, before: float, rank: float, *, new: bool) -> None:
        if new:
            # Tried at once: whether the file is known and the host due shows then.
            self._queues.ready(queued)
        elif queued.state is QueueState.READY and rank < before:
            self._queues.raise_rank(queued)
        elif queued.waiting is not None:
            self._waits.overtaken(queued)

    # --- getting ------------------------------------------------------------------------

    async def get(self) -> Turn:
        """Wait for the next URL whose host is due, and take its turn.

        Cancelled, it leaves URL and turn as they were. Raises GateClosed, StorageError where the
        scratch file can't be read (the URLs are kept, and tried again later), what `on_denied`
        raised, or LeaseTimeout where it could never end: the calling task holds a lease or
        response of each host that waits. The URLs stay; see `pacing.own_wait` for child tasks.
        """
        waiting: TurnWait[Any] | None = None
        entrance, getters = self._entrance, self._getters
        entered = late = entrance.crowded
        if entered:  # first of all: many may begin in one iteration of the loop
            await entrance.line_up()
            entrance.come_in()
        try:
            while True:
                if self._closed or self._callbacks.errors or self._callbacks.busy:
                    self._raise_what_there_is()
                    await self._callbacks.wait()
                    continue
                # Who was let in late goes behind those who wait; what is ready woke one of them.
                queued = None if late and getters else self._queues.next_ready()
                if queued is None:
                    free = entered or len(getters) < AT_ONCE
                    before = None if free else entrance.enter()
                    entered, late = True, before is not None
                    if before is None:
                        waiting = self._begin_wait(waiting)
                    await (before or getters.wait())
                    entrance.come_in(late)
                    continue
                denied = self._denied
                entry, lease = self._try(queued)
                if lease is None and queued.state is QueueState.TRIED:
                    lease = await self._insist(queued, entry)
                if lease is not None:
                    return self._taken(queued, entry, lease)
                if self._denied > denied and self._denied % _MANY == 0:
                    await asyncio.sleep(0)  # a backlog of refused URLs must not hold up the loop
        except asyncio.CancelledError:
            if waiting is not None:
                waiting.cancelled()
            raise
        finally:
            if waiting is not None and self._graph is not None:
                self._graph.end(waiting)

    def _begin_wait(self, waiting: TurnWait[Any] | None) -> TurnWait[Any] | None:
        """Raises LeaseTimeout where the wait could never end."""
        if self._graph is None:
            return None
        held = inherited(asyncio.current_task())
        return self._graph.begin_any(waiting, held, self._queues.turns_wanted)

    def get_nowait(self) -> Turn:
        """The next URL whose turn can be had now. Raises asyncio.QueueEmpty, and what `get` raises.

        What can't be told at a glance is looked into in the background: to call it again
        later is worth while as long as `empty()` is false.
        """
        refusals = self._denied + _MANY
        while True:
            self._raise_what_there_is()
            busy = self._callbacks.busy or self._denied >= refusals
            queued = None if busy else self._queues.next_ready()
            if queued is None:
                raise asyncio.QueueEmpty
            entry, lease = self._try(queued)
            if lease is not None:
                return self._taken(queued, entry, lease)
            if queued.state is QueueState.TRIED:
                self._waits.missed(queued, entry)

    def _nothing_to_get(self) -> bool:
        return not (self._callbacks.errors or self._closed or self._queues.any_ready())

    def _raise_what_there_is(self) -> None:
        self._refuse_if_closed()
        if self._callbacks.errors:
            raise self._callbacks.errors.popleft()

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise GateClosed("the queue is closed")

    def _try(self, queued: OriginQueue, *, turn: bool = True) -> tuple[Entry, QueueLease | None]:
        """The first URL of the origin, and its turn if that is wanted and had without waiting.

        Without one the origin waits for something; or it is TRIED still: the URL is welcome, but
        only the scheduler knows whether it is its turn.
        """
        if queued.turn_held is not None and (had := self._waits.take_held_turn(queued)) is not None:
            return had
        try:
            entry = queued.backlog.pop()
        except BaseException:
            self._waits.back_off(queued)
            raise
        near = self._near
        if near is None:
            return entry, None
        try:
            lease = near.take(entry[2]) if turn else None
            decision = None if lease is not None else near.peek(entry[2])
        except BaseException:
            queued.backlog.put_back(entry)
            self._waits.back_off(queued)
            raise
        if lease is None and decision is None:
            queued.backlog.put_back(entry)
            self._waits.ask(queued)
        elif decision is not None and decision.verdict is not Verdict.ALLOW:
            self._refused(queued, entry, decision)
        return entry, lease

    async def _insist(
        self, queued: OriginQueue, entry: Entry, check: Any = None
    ) -> QueueLease | None:
        """Ask the scheduler, which answers without waiting for the turn; or `check` alone."""
        lease = None
        try:
            if check is not None:
                decision = await check(entry[2])
                if decision.verdict is not Verdict.ALLOW:
                    raise Denied(decision)
            elif self._far is not None:
                lease = await self._far.look(entry[2], priority=round(-entry[0]))
            elif self._near is not None:
                lease = await self._near.acquire(
                    entry[2], priority=round(-entry[0]), timeout=0.0, owned=False
                )
        except Denied as error:
            if not self._closed:
                self._refused(queued, entry, error.decision)
        except LeaseTimeout as error:
            self._missed += 1
            self._waits.missed(queued, entry, error.retry_at)
        except BaseException as error:
            if not self._closed:
                queued.backlog.put_back(entry)
                if isinstance(error, Exception):
                    self._waits.back_off(queued)
                else:
                    self._waits.watch(queued)
            raise
        if lease is not None and self._closed:
            lease.give_back()
            lease = None
        return lease

    def _taken(self, queued: OriginQueue, entry: Entry, lease: QueueLease) -> Turn:
        # No await since the lease was had: whoever is cancelled now has not got it.
        self._got += 1
        self._joiners.turns_out += 1
        self._size -= 1
        self._waits.place(queued)
        if self._putters.futures:
            self._putters.wake()
        return Turn(self, queued, entry, lease)

    # --- refusing -----------------------------------------------------------------------

    def _refused(self, queued: OriginQueue, entry: Entry, decision: Decision) -> None:
        """Denied: the URL is done. Deferred: the origin comes back."""
        if decision.verdict is Verdict.DEFER:
            queued.backlog.put_back(entry)
            self._waits.defer(queued, decision)
            return
        self._denied += 1
        self._size -= 1
        self._waits.go_on(queued)
        self._putters.wake()
        # All counts are right by now: whatever comes of the call, it is made once.
        try:
            if self._kept is not None:
                self._kept.remove(entry)
        finally:
            self._callbacks.tell(decision)

    # --- finishing ----------------------------------------------------------------------

    def _done(self, entry: Entry | None = None) -> None:
        self._unfinished -= 1
        if self._unfinished <= 0:
            self._joiners.finish()
        elif not self._joiners.turns_out:
            self._joiners.look()
        if entry is not None and self._kept is not None and not self._closed:
            self._kept.remove(entry)

    def task_done(self) -> None:
        """For code that was written for asyncio.Queue: leaving the turn has said it already.

        Raises ValueError if called more often than turns were had.
        """
        if self._told_done >= self._got:
            raise ValueError("task_done() called more often than turns were had")
        self._told_done += 1

    async def join(self) -> None:
        """Wait until every URL that was put is done: left, denied, or dropped by `close`.

        As with asyncio.Queue somebody has to get what may be fetched. What is denied needs no
        `get`: while no turn is out or a `put` waits, `join` looks at the next URLs as `get` would.
        """
        if self._unfinished > 0 and not self._closed:
            await self._joiners.wait(self._queues, self._refuse_if_denied)

    async def _refuse_if_denied(self, queued: OriginQueue) -> bool:
        """For `join`: the next URL of an origin that is ready. False: it waits for a `get`."""
        while self._callbacks.busy:
            await self._callbacks.wait()
        check = getattr(self._far, "check", None)
        if queued.state is not QueueState.READY or not (self._near or check):
            return False
        queued.state = QueueState.TRIED
        entry, _ = self._try(queued, turn=False)
        if check is not None:
            await self._insist(queued, entry, check)
        if queued.state is not QueueState.TRIED:
            return True
        queued.backlog.put_back(entry)
        self._queues.ready(queued, announced=queued.announced)
        return False

    def stats(self) -> QueueStats:
        """Counters and sizes."""
        return QueueStats(
            size=self._size,
            overflowed=self._queues.overflowed,
            origins=len(self._queues),
            unfinished=self._unfinished,
            got=self._got,
            denied=self._denied,
            deferred=self._waits.deferred,
            missed=self._missed,
        )


class QueueWaits:
    """What the origins that are not ready wait for. An entry handed over is kept, whatever happens,
    and its origin is ready then or waits for the next thing; none is tried again without a pause
    when nothing has changed."""

    def __init__(
        self, gate: QueueGate | DistantGate, queues: OriginQueues, on_deferred: _Told | None
    ) -> None:
        self._gate = gate
        self._near = None if is_distant(gate) else cast("QueueGate", gate)
        self._is_due: Callable[[str], bool] | None = getattr(gate, "is_due", None)
        self._clock = gate.clock
        self._queues = queues
        self._on_deferred = on_deferred
        self._cold: deque[OriginQueue] = deque()
        self._asking: set[asyncio.Task[None]] = set()
        self._waiting: set[asyncio.Task[QueueLease]] = set()
        self._held_turns = 0
        self._closed = False
        self.deferred: int = 0
        """Times that a decision deferred an origin."""

    async def close(self) -> None:
        """Wait for nothing more. Idempotent."""
        self._closed = True
        tasks = (*self._asking, *self._waiting)
        for task in tasks:
            task.cancel()
        for queued in self._queues:
            if queued.turn_held is not None:
                queued.turn_held.end.cancel()
                queued.turn_held.lease.give_back()
                queued.turn_held = None
        self._cold.clear()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- the host's turn ----------------------------------------------------------------

    def place(self, queued: OriginQueue) -> None:
        """Its first URL was given out: what does it wait for now?"""
        queued.setbacks, queued.asked, queued.missed = 0, False, False
        if not len(queued.backlog):
            self._queues.forget(queued)
        elif queued.turns_by_waiting > 0 and self._room:
            queued.turns_by_waiting -= 1
            try:
                entry = queued.backlog.pop()
            except StorageError:
                self.back_off(queued)  # the next get meets it itself
            else:
                self._wait_for_turn(queued, entry)
        elif self._is_due is not None and self._is_due(queued.host):
            self._queues.ready(queued, announced=True)  # as it would be told, for less
        else:
            self.watch(queued)

    def go_on(self, queued: OriginQueue) -> None:
        """Its first URL is done without a turn: the next may be tried at once."""
        queued.setbacks, queued.asked, queued.missed = 0, False, False
        if len(queued.backlog):
            self._queues.ready(queued, announced=queued.announced)
        else:
            self._queues.forget(queued)

    def watch(self, queued: OriginQueue) -> None:
        """Have the scheduler say when its host is due."""
        if self._closed:
            return
        if self._near is None:  # it can only be asked
            self._queues.ready(queued)
            return
        queued.state = QueueState.WATCHED

        def due() -> None:
            queued.watched(None)
            if queued.state is QueueState.WATCHED and not self._closed:
                self._queues.ready(queued, announced=True)

        try:
            unwatch = self._near.when_due(queued.host, due, priority=-queued.rank())
        except (LeaseTimeout, StorageError):  # no room for the host, or not to be read now
            self.back_off(queued)
            return
        if queued.state is QueueState.WATCHED:
            queued.watched(unwatch)

    # --- waiting in the scheduler -------------------------------------------------------

    @property
    def _room(self) -> bool:
        return len(self._waiting) + self._held_turns < MAX_WAITING

    def missed(self, queued: OriginQueue, entry: Entry, retry_at: datetime | None = None) -> None:
        """It could not have its turn, which comes at `retry_at` as far as the gate knows."""
        if self._closed:
            return
        queued.missed = True
        if self._far_off(queued, entry, retry_at):
            return
        if self._near is not None and not queued.announced:
            queued.backlog.put_back(entry)
            self.watch(queued)  # it may not have been due
        elif self._room:
            queued.turns_by_waiting = TURNS_BY_WAITING
            self._wait_for_turn(queued, entry)
        else:
            queued.backlog.put_back(entry)
            self.back_off(queued)

    def _far_off(self, queued: OriginQueue, entry: Entry, retry_at: datetime | None) -> bool:
        """Whether a distant gate says that its turn does not come soon: the origin then waits here,
        and not in the sidecar's queue."""
        left = 0.0 if retry_at is None else retry_at.timestamp() - self._clock.wall()
        if self._near is not None or left <= NEAR:
            return False
        queued.backlog.put_back(entry)
        self._queues.defer(queued, self._clock.monotonic() + left - NEAR / 2)
        return True

    def overtaken(self, queued: OriginQueue) -> None:
        """A URL was put that goes before the one that waits in the scheduler: it waits instead."""
        if queued.waiting is not None and queued.backlog.rank() < queued.waiting[0][0]:
            queued.turns_by_waiting += 1
            queued.waiting[1].cancel()

    def _wait_for_turn(self, queued: OriginQueue, entry: Entry) -> None:
        queued.state = QueueState.WAITING
        patience = PATIENCE if self._near is not None else FAR_PATIENCE
        turn = self._gate.acquire(
            entry[2], priority=round(-entry[0]), timeout=patience, owned=False
        )
        task = asyncio.ensure_future(turn)
        queued.waiting = entry, task
        self._waiting.add(task)
        # A callback, not code behind an await: a task may be cancelled before it begins.
        began = self._clock.monotonic()
        task.add_done_callback(partial(self._waited, queued, entry, began))

    def _waited(
        self, queued: OriginQueue, entry: Entry, began: float, task: asyncio.Task[QueueLease]
    ) -> None:
        self._waiting.discard(task)
        queued.waiting = None
        if self._near is None and self._clock.monotonic() - began > NEAR:
            queued.turns_by_waiting = 0  # its next turn is as far off: then it is asked when
        error = None if task.cancelled() else task.exception()
        lease = None if task.cancelled() or error is not None else task.result()
        if self._closed:
            if lease is not None:
                lease.give_back()
        elif lease is not None:
            self._hold(queued, entry, lease)
        elif not (isinstance(error, LeaseTimeout) and self._far_off(queued, entry, error.retry_at)):
            overtaken = task.cancelled() and queued.backlog.rank() < entry[0]
            queued.backlog.put_back(entry)
            if overtaken:
                self.place(queued)
            else:  # the next get meets the obstacle by itself
                _log.debug("no turn for %s by waiting for it: %r", queued.origin, error)
                queued.turns_by_waiting = 0
                self.back_off(queued)

    def _hold(self, queued: OriginQueue, entry: Entry, lease: QueueLease) -> None:
        """The turn is had: it is for the next get, if one comes soon."""
        left = lease.expires_at.timestamp() - self._clock.wall()
        end = self._clock.monotonic() + min(HOLD, left / 2)
        queued.turn_held = HeldTurn(entry, lease, self._clock.call_at(end, self._unused, queued))
        self._held_turns += 1
        self._queues.ready(queued)

    def take_held_turn(self, queued: OriginQueue) -> tuple[Entry, QueueLease] | None:
        """The turn that was had for it, which is the caller's then."""
        turn_held, queued.turn_held = queued.turn_held, None
        if turn_held is None:
            return None
        turn_held.end.cancel()
        self._held_turns -= 1
        return turn_held.entry, turn_held.lease

    def _unused(self, queued: OriginQueue) -> None:
        """Everybody is busy elsewhere: others shall have the turn."""
        had = self.take_held_turn(queued)
        if had is not None:
            queued.backlog.put_back(had[0])
            queued.turns_by_waiting = 0
            try:
                had[1].give_back()
            finally:
                self.watch(queued)

    # --- robots.txt ---------------------------------------------------------------------

    def ask(self, queued: OriginQueue) -> None:
        """Its robots.txt is unknown: ask for it in the background."""
        if queued.asked:
            queued.asked = False  # it was told, and is forgotten again already
            self.back_off(queued)
            return
        queued.state = QueueState.COLD
        self._cold.append(queued)
        self._ask_more()

    def _ask_more(self) -> None:
        near = self._near
        while near and self._cold and len(self._asking) < MAX_ASKING and not self._closed:
            asking = self._ask_for(self._cold.popleft(), near)
            # Nobody's child: whoever is in `get` now may hold leases, and does not wait for it.
            task = asyncio.get_running_loop().create_task(asking, context=Context())
            self._asking.add(task)
            task.add_done_callback(self._asked)

    def _asked(self, task: asyncio.Task[None]) -> None:
        self._asking.discard(task)
        self._ask_more()

    async def _ask_for(self, queued: OriginQueue, gate: QueueGate) -> None:
        try:
            decision = await gate.check(f"{queued.origin}/")
        except Exception as error:  # noqa: BLE001 - whatever it is, the origin comes back
            _log.warning("asking %s for its robots.txt failed: %r", queued.origin, error)
            self._queues.defer(queued, self._clock.monotonic() + RETRY)
            return
        if decision.verdict is Verdict.DEFER:
            self.defer(queued, decision)  # nobody could ask it now, for one
        else:
            queued.asked = True
            self.watch(queued)

    # --- a moment -----------------------------------------------------------------------

    def defer(self, queued: OriginQueue, decision: Decision) -> None:
        """Not before the decision's `retry_at`."""
        self.deferred += 1
        queued.missed = False
        wait = RETRY
        if decision.retry_at is not None:
            wait = decision.retry_at.timestamp() - self._clock.wall()
        self.back_off(queued, wait)
        if self._on_deferred is not None:
            self._on_deferred(decision)

    def back_off(self, queued: OriginQueue, least: float = 0.0) -> None:
        """It was tried for nothing: not at once again, and later each time in a row."""
        pause = min(LAST_PAUSE, FIRST_PAUSE * 2 ** min(queued.setbacks, _DOUBLINGS))
        if least < LAST_PAUSE:
            queued.setbacks += 1
        self._queues.defer(queued, self._clock.monotonic() + max(pause, least))
