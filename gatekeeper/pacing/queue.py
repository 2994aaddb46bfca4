"""`PoliteQueue`: put many URLs, get the next one whose host is due, with its lease.

A host with waiting URLs has one lane an origin and stands in the scheduler's line with a
callback: no task, no future, no timer of its own. A `get` takes the most important ready
lane and its first URL. Lanes whose robots.txt is unknown are asked for it in the
background, a bounded number at a time, so that a slow origin holds nobody up.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from gatekeeper import urls
from gatekeeper.decision import Decision, Verdict
from gatekeeper.errors import Deferred, Denied, GateClosed, GatekeeperError, LeaseTimeout
from gatekeeper.pacing.lanes import Lane, Lanes, LaneState
from gatekeeper.pacing.overflow import IN_MEMORY, Entry
from gatekeeper.pacing.queue_gate import MAX_ASKING, PATIENCE, RETRY, QueueGate, QueueStats

__all__ = ["PoliteQueue", "QueueGate", "QueueStats", "Turn"]

_log = logging.getLogger(__name__)


class Turn:
    """What `get` returns: a URL whose turn it is. Leaving `async with` is task_done.

    `url` is the text that was put. Enter it soon: the lease is open already.
    """

    __slots__ = ("_entry", "_held", "_lane", "_over", "_queue", "lease")

    def __init__(self, queue: PoliteQueue, lane: Lane, entry: Entry, held: Any, lease: Any) -> None:
        self._queue = queue
        self._lane = lane
        self._entry = entry
        self._held = held
        self._over = False
        self.lease = lease

    @property
    def url(self) -> str:
        """As it was put."""
        return self._entry[2]

    async def __aenter__(self) -> Any:
        # On Python 3.11 asyncio.wait_for runs `get` in a task, and a context, of its own.
        enter_here = getattr(self._held, "enter_here", None)
        if enter_here is not None:
            enter_here()
        return self.lease

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._over:
            return
        self._over = True
        try:
            await self._held.__aexit__(kind, error, trace)
        finally:
            self._queue._task_done()

    async def give_back(self) -> None:
        """Not used after all: the URL stands where it stood, the turn goes to the next."""
        if not self._over:
            self._over = True
            self.lease.give_back()
            try:
                await self._held.__aexit__(None, None, None)
            finally:
                self._queue._put_back(self._lane.origin, self._lane.host, self._entry)


class PoliteQueue:
    """An asyncio queue of URLs that gives each one out when its host is due.

    `maxsize` bounds the URLs that wait (0: no bound): `put` waits for room. `on_denied`
    is called, and awaited if it is asynchronous, with the decision about each URL that
    may not be fetched; that URL is done then. A deferred origin comes back by itself at
    its `retry_at`. `path` is where the scratch file of long lanes goes; None: the
    system's temporary folder. Close it, or use it as an async context manager.

    Not safe to use from several event loops, like asyncio.Queue.
    """

    def __init__(
        self,
        gate: QueueGate,
        *,
        maxsize: int = 0,
        on_denied: Callable[[Decision], object] | None = None,
        path: str | Path | None = None,
        in_memory: int = IN_MEMORY,
    ) -> None:
        self._gate = gate
        self._maxsize = maxsize
        self._on_denied = on_denied
        self._lanes = Lanes(gate.clock, path, max(1, in_memory))
        self._lanes.on_ready = self._wake_getter
        self._getters: deque[asyncio.Future[None]] = deque()
        self._putters: deque[asyncio.Future[None]] = deque()
        self._cold: deque[Lane] = deque()
        self._asking: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed = False
        self._size = 0
        self._unfinished = 0
        self._got = self._denied = self._deferred = self._missed = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Drop what waits and end what asks. Those in `get`, `put` and `join` are let go:
        GateClosed for the first two. Open turns may still be left. Idempotent.
        """
        self._closed = True
        tasks = tuple(self._asking)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._cold.clear()
        self._lanes.close()
        self._unfinished -= self._size
        self._size = 0
        self._idle.set()
        for waiting in (*self._getters, *self._putters):
            if not waiting.done():
                waiting.set_result(None)

    # --- putting ------------------------------------------------------------------------

    def qsize(self) -> int:
        """URLs that wait."""
        return self._size

    def empty(self) -> bool:
        """Does none wait?"""
        return self._size == 0

    def full(self) -> bool:
        """Would `put` wait?"""
        return 0 < self._maxsize <= self._size

    async def put(self, url: str, priority: int = 0) -> None:
        """Add a URL; a higher priority goes first. Raises InvalidURL or GateClosed."""
        target = urls.parse(url)
        while self.full() and not self._closed:
            await self._wait_in(self._putters, self._wake_putter, self.full)
        self._add(target, url, priority)

    def put_nowait(self, url: str, priority: int = 0) -> None:
        """Add a URL. Raises asyncio.QueueFull, InvalidURL or GateClosed."""
        target = urls.parse(url)
        if self.full():
            raise asyncio.QueueFull
        self._add(target, url, priority)

    def _add(self, target: urls.Target, url: str, priority: float) -> None:
        if self._closed:
            raise GateClosed("the queue is closed")
        lane, new = self._lanes.get(target.origin, target.host)
        before = lane.backlog.rank()
        lane.backlog.put(url, priority)
        self._size += 1
        self._unfinished += 1
        self._idle.clear()
        if new:
            # Tried at once: whether the file is known and the host due shows then.
            self._lanes.ready(lane)
        elif lane.state is LaneState.READY and lane.backlog.rank() < before:
            self._lanes.raise_rank(lane)

    def _put_back(self, origin: str, host: str, entry: Entry) -> None:
        if self._closed:
            self._task_done()
            return
        lane, new = self._lanes.get(origin, host)
        lane.backlog.put_back(entry)
        self._size += 1
        if new:
            self._watch(lane)

    # --- getting ------------------------------------------------------------------------

    async def get(self) -> Turn:
        """Wait for the next URL whose host is due, and take its turn.

        Cancelled, it leaves URL and turn as they were. Raises GateClosed.
        """
        while True:
            if self._closed:
                raise GateClosed("the queue is closed")
            lane = self._lanes.next_ready()
            if lane is None:
                await self._wait_in(self._getters, self._wake_getter, self._nothing_ready)
                continue
            turn = await self._try(lane)
            if turn is not None:
                return turn

    def _nothing_ready(self) -> bool:
        return not self._lanes.any_ready()

    async def _try(self, lane: Lane) -> Turn | None:
        """The lane's first URL, if it may be fetched now. The lane is placed anew."""
        entry = lane.backlog.pop()
        self._size -= 1
        url = entry[2]
        # Others ask this host too: whoever misses its turn stands in line the next time.
        patience = PATIENCE if lane.misses else 0.0
        held = self._gate.lease(url, priority=round(-entry[0]), timeout=patience)
        try:
            lease = held.at_once() if hasattr(held, "at_once") else None
            if lease is not None:
                return self._taken(lane, entry, held, lease)
            decision = self._gate.peek(url)
            if decision is None:
                self._keep(lane, entry)
                self._ask(lane)
                return None
            if decision.verdict is Verdict.ALLOW:
                return self._taken(lane, entry, held, await held.__aenter__())
            await self._refused(lane, entry, decision)
        except Deferred as error:
            await self._refused(lane, entry, error.decision)
        except Denied as error:
            await self._refused(lane, entry, error.decision)
        except LeaseTimeout:
            self._missed += 1
            lane.misses += 1
            self._keep(lane, entry)
            self._watch(lane)
        except BaseException:
            if lane.state is LaneState.TRIED and not self._closed:
                self._keep(lane, entry)
                self._watch(lane)
            raise
        return None

    def _taken(self, lane: Lane, entry: Entry, held: Any, lease: Any) -> Turn:
        # No await since the lease was had: whoever is cancelled now has not got it.
        lane.misses = 0
        self._got += 1
        self._place(lane)
        self._wake_putter()
        return Turn(self, lane, entry, held, lease)

    async def _refused(self, lane: Lane, entry: Entry, decision: Decision) -> None:
        """Denied: it is done. Deferred: the lane comes back."""
        if decision.verdict is Verdict.DEFER:
            self._deferred += 1
            self._keep(lane, entry)
            wall = self._gate.clock.wall()
            wait = RETRY if decision.retry_at is None else decision.retry_at.timestamp() - wall
            self._lanes.defer(lane, self._gate.clock.monotonic() + max(0.0, wait))
            return
        self._denied += 1
        if len(lane.backlog):
            self._lanes.ready(lane)  # no turn was taken: the next may be tried at once
        else:
            self._lanes.forget(lane)
        self._wake_putter()
        try:
            if self._on_denied is not None:
                told = self._on_denied(decision)
                if inspect.isawaitable(told):
                    await told
        finally:
            self._task_done()
        if self._denied % 64 == 0:
            await asyncio.sleep(0)  # a lane of refused URLs is no reason to stop the loop

    def _keep(self, lane: Lane, entry: Entry) -> None:
        lane.backlog.put_back(entry)
        self._size += 1

    # --- placing lanes ------------------------------------------------------------------

    def _place(self, lane: Lane) -> None:
        if len(lane.backlog):
            self._watch(lane)
        else:
            self._lanes.forget(lane)

    def _watch(self, lane: Lane) -> None:
        """Have the scheduler say when its host is due."""
        if self._closed:
            return
        lane.state = LaneState.WATCHED

        def due() -> None:
            lane.unwatch = None
            if lane.state is LaneState.WATCHED and not self._closed:
                self._lanes.ready(lane)

        unwatch = self._gate.when_due(lane.host, due, priority=-lane.backlog.rank())
        if lane.state is LaneState.WATCHED:
            lane.unwatch = unwatch

    def _ask(self, lane: Lane) -> None:
        """Its robots.txt is unknown: ask for it in the background."""
        lane.state = LaneState.COLD
        self._cold.append(lane)
        self._ask_more()

    def _ask_more(self) -> None:
        while self._cold and len(self._asking) < MAX_ASKING and not self._closed:
            task = asyncio.get_running_loop().create_task(self._ask_for(self._cold.popleft()))
            self._asking.add(task)
            task.add_done_callback(self._asked)

    def _asked(self, task: asyncio.Task[None]) -> None:
        self._asking.discard(task)
        self._ask_more()

    async def _ask_for(self, lane: Lane) -> None:
        try:
            await self._gate.check(f"{lane.origin}/")
        except GatekeeperError as error:
            _log.warning("asking %s for its robots.txt failed: %s", lane.origin, error)
            self._lanes.defer(lane, self._gate.clock.monotonic() + RETRY)
        else:
            self._watch(lane)

    # --- waiting ------------------------------------------------------------------------

    async def _wait_in(
        self,
        line: deque[asyncio.Future[None]],
        wake_next: Callable[[], None],
        still: Callable[[], bool],
    ) -> None:
        """Stand in line until woken; a wake-up that a cancelled one got is passed on."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        line.append(future)
        try:
            await future
        except BaseException:
            future.cancel()
            if future in line:
                line.remove(future)
            if not still():
                wake_next()
            raise

    @staticmethod
    def _wake(line: deque[asyncio.Future[None]]) -> None:
        while line:
            future = line.popleft()
            if not future.done():
                future.set_result(None)
                return

    def _wake_getter(self) -> None:
        self._wake(self._getters)

    def _wake_putter(self) -> None:
        if not self.full():
            self._wake(self._putters)

    # --- finishing ----------------------------------------------------------------------

    def _task_done(self) -> None:
        self._unfinished -= 1
        if self._unfinished <= 0:
            self._idle.set()

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
            deferred=self._deferred,
            missed=self._missed,
        )
