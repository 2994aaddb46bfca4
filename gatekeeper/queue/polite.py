"""`PoliteQueue`: put many URLs, get the next one whose host is due, with its lease.

The URLs of one origin form an `OriginQueue`, which has a callback in the scheduler of its host,
but no task, future or timer of its own. A `get` takes the ready origin with the highest priority,
and that origin's first URL. `QueueWaits` handles what the other origins wait for, so no `get`
ever waits for one origin while another is ready.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, Unpack, cast

import msgspec

from gatekeeper import urls
from gatekeeper.decision import Decision, Verdict, refuse
from gatekeeper.errors import Denied, GateClosed, LeaseTimeout, refusing
from gatekeeper.gate import Gatekeeper
from gatekeeper.gate.lease_base import inherited, note_refusal
from gatekeeper.pacing.deadlock import ANY_FILE, TaskWait, WaitGraph
from gatekeeper.pacing.waiters import MAX_PER_ITERATION, Entrance
from gatekeeper.queue.files import Entry, KeptEntries
from gatekeeper.queue.origin_queues import (
    IN_MEMORY,
    DenialCallbacks,
    GrantingGate,
    Joiners,
    OriginQueue,
    OriginQueues,
    QueueGatekeeper,
    QueueLease,
    QueueState,
    QueueStats,
    WaitingTasks,
)
from gatekeeper.queue.waits import QueueWaits
from gatekeeper.sitemaps import SitemapOptions, Sitemaps

_MAX_REFUSED_IN_ROW = 64
"""URLs refused in a row after which a `get` yields to the event loop."""
_CLOSED = "the queue is closed"
_OF_THIS_PROCESS = ("peek", "check", "acquire_nowait", "when_due")
"""What a gate of this process has besides."""

_Listener = Callable[[Decision], object]


class Turn(msgspec.Struct, eq=False, weakref=True):
    """A URL with its lease, as returned by `get`. Leaving `async with` is task_done.

    `url` is the text that was put. Enter it soon, in the task that sends the request: the
    lease is open already, and `lease.expires_at` is its end.
    """

    _queue: PoliteQueue
    origin: str
    """Scheme, host and port of the URL, like `Decision.origin`."""
    url: str
    """The URL as it was put."""
    data: Any
    """The payload that was put with the URL, or None."""
    _entry: Entry
    lease: Any
    _over: bool = False

    def __repr__(self) -> str:
        return f"<Turn of {self.lease!r}>"  # without the payload

    async def __aenter__(self) -> Any:
        # Here, not in `get`: a task that only passes them on must not collect their leases.
        self.lease.enter()
        return self.lease

    async def __aexit__(self, *error: object) -> None:
        self.done()

    def done(self) -> None:
        """End the lease, for code that can't use `async with`. Idempotent."""
        if not self._over:
            self._over = True
            self._queue._joiners.leases_out -= 1
            try:
                self.lease.leave()
            finally:
                self._queue._done(self._entry)

    async def give_back(self) -> None:
        """Return it unused: the URL goes back to its place, the lease to the next request."""
        if not self._over:
            self._over = True
            try:
                self.lease.give_back()
                self.lease.leave()
            finally:
                if self._queue._kept is not None:
                    self._queue._kept.give_back(self._entry)
                self._queue._joiners.leases_out -= 1
                self._queue._put_back(self.origin, self._entry)
                self._queue._joiners.wake()


class PoliteQueue:
    """An asyncio queue of URLs that gives each one out when its host is due.

    `maxsize` limits the URLs that wait (0: no limit): `put` waits for room. `on_denied`
    is called once with the decision about each URL that may not be fetched, which is then
    done; if it is asynchronous, it runs beside the gets. What it raises is raised by a `get`.
    A deferred origin is tried again at its `retry_at`; `on_deferred`, which must not raise, is
    called with each such decision. `path` is the scratch file of long backlogs; None: one in the
    system's temporary folder. Close the queue, or use it as an async context manager.

    The `data` given to `put` is returned as `lease.data` with its URL. If an origin has too many
    URLs for memory, plain values (None, bool, int, float, str, bytes, lists, and dicts with text
    keys) wait in the scratch file and come back as equal copies. Any other object stays in memory,
    at most 100,000 of them; beyond that `put` raises StorageError.

    `keep` is a file in which URLs, priorities and data outlive the process. A queue that is created
    with the file again starts with the URLs that were put and not done, in order. Those with leases
    out are repeated after the others of their priority. `data` has to be plain (TypeError).

    The gate may be a RemoteGatekeeper: the sidecar then decides who may start, and up to 100
    origins wait there at the same time. Like asyncio.Queue, it belongs to one event loop.

    >>> async def main(gate) -> None:
    ...     async with PoliteQueue(gate) as queue:
    ...         await queue.put("https://example.org/page")
    ...         async with await queue.get() as lease:
    ...             ...  # fetch lease.url now
    ...             lease.report(status=200)
    """

    def __init__(
        self,
        gate: Gatekeeper | GrantingGate,
        *,
        maxsize: int = 0,
        on_denied: _Listener | None = None,
        on_deferred: _Listener | None = None,
        path: str | Path | None = None,
        in_memory: int = IN_MEMORY,
        keep: str | Path | None = None,
    ) -> None:
        self._gate: Any = gate
        gate = QueueGatekeeper(gate) if isinstance(gate, Gatekeeper) else gate
        distant = not getattr(gate, "at_a_glance", True)
        wanted = ("clock", "acquire", *(() if distant else _OF_THIS_PROCESS))
        if missing := [name for name in wanted if not hasattr(gate, name)]:
            raise TypeError(
                f"a PoliteQueue needs a Gatekeeper or a RemoteGatekeeper: {type(gate).__name__} "
                f"has no {', '.join(missing)}"
            )
        self._local = None if distant else cast("QueueGatekeeper", gate)
        """The gate, if it is in this process and can answer without a round trip."""
        self._distant_check = getattr(gate, "check", None) if distant else None
        self._acquire_if_due: Callable[..., Coroutine[Any, Any, QueueLease]] = getattr(
            gate, "acquire_if_due", partial(gate.acquire, timeout=0.0, owned=False)
        )
        self._is_held: Callable[[str], object] = getattr(gate, "held", lambda _host: None)
        self._graph: WaitGraph[Any] | None = getattr(gate, "waits", None)
        self.maxsize: int = maxsize
        """Most URLs that may wait; 0 or less: any number."""
        self._getters = WaitingTasks(self._nothing_to_get)
        self._entrance = Entrance(MAX_PER_ITERATION)
        self._putters = WaitingTasks(self.full)
        self._joiners = Joiners(self._putters, self._getters.wake)
        self._queues = OriginQueues(gate.clock, path, max(1, in_memory), self._joiners)
        is_due = getattr(gate, "is_due", None)
        self._waits = QueueWaits(
            gate, self._local, is_due, gate.clock, self._queues, on_deferred, self._gate_closed
        )
        denied = (lambda _: None) if on_denied is None else on_denied
        self._callbacks = DenialCallbacks(denied, self._done, self._getters.wake)
        self._closed = False
        self._size = 0
        self._unfinished = 0
        self._got = self._denied = self._missed = self._task_done_calls = 0
        self._kept = None if keep is None else KeptEntries(keep)
        if self._kept is not None:
            kept = self._kept.load()
            self._queues.arrivals = itertools.count(kept[-1][1] + 1 if kept else 0)
            self._unfinished = len(kept)
            for entry in kept:
                self._put_back(urls.split(entry[2])[0], entry)

    if not TYPE_CHECKING:
        __enter__ = __exit__ = __await__ = refusing("a PoliteQueue is opened by `async with`")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Drop the waiting URLs and stop asking for them. Tasks in `get` and `put` get GateClosed,
        and `join` returns. Open leases may still be left. Returns when the last asynchronous
        `on_denied` has returned. Idempotent."""
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

    def qsize(self) -> int:
        """Return the number of waiting URLs, whether their hosts are due or not."""
        return self._size

    def empty(self) -> bool:
        """Return True if no URL waits."""
        return self._size == 0

    def full(self) -> bool:
        """Return True if `put` would wait."""
        return 0 < self.maxsize <= self._size

    async def put(self, url: str, priority: int = 0, data: Any = None) -> None:
        """Add a URL; a higher priority goes first. `data` comes back as `lease.data`.

        Raises InvalidURL, GateClosed, or StorageError if its origin has too many URLs for memory
        and the scratch file can't be written, or can't hold `data`. Then it was not added."""
        origin = urls.split(url)[0]
        while 0 < self.maxsize <= self._size and not self._closed:  # as `full`
            await self._putters.wait(self._joiners.wake)
        self._add(origin, url, priority, data)

    async def put_sitemap(
        self, origin: str, *, priority: int = 0, data: Any = None, **options: Unpack[SitemapOptions]
    ) -> Sitemaps:
        """Add each page that the origin's sitemaps list; `priority` and `data` are those of each.

        `options` are those of `Gatekeeper.sitemaps`: `since`, `guess` and `max_entries`. Return the
        iterator at its end: its `findings` say which sitemaps could not be read. Raises as it and
        `put` do; what was put before stays.
        """
        found: Sitemaps = self._gate.sitemaps(origin, **options)
        async with aclosing(found):
            async for entry in found:
                await self.put(entry.url, priority, data)
        return found

    def put_nowait(self, url: str, priority: int = 0, data: Any = None) -> None:
        """Add a URL like `put`, without waiting. Raises asyncio.QueueFull if there is no room."""
        origin = urls.split(url)[0]
        if self.full() and not self._closed:
            raise asyncio.QueueFull
        self._add(origin, url, priority, data)

    def _add(self, origin: str, url: str, priority: float, data: Any) -> None:
        if self._closed:
            raise GateClosed(_CLOSED)
        queued, new = self._queues.get(origin)
        before = queued.rank() if queued.state is QueueState.READY else 0.0
        try:  # Before anything changes, since it may fail.
            queued.backlog.put(url, priority, data, self._kept)
        except BaseException:
            if new:
                self._queues.forget(queued)
            raise
        self._size += 1
        self._unfinished += 1
        self._url_added(queued, before, -priority, new=new)

    def _put_back(self, origin: str, entry: Entry) -> None:
        if self._closed:
            self._done()
            return
        queued, new = self._queues.get(origin)
        before = queued.rank()
        queued.backlog.put_back(entry)
        self._size += 1
        self._url_added(queued, before, entry[0], new=new)

    def _url_added(self, queued: OriginQueue, before: float, rank: float, *, new: bool) -> None:
        if new:
            self._queues.ready(queued)  # The first try shows what is cached and due.
        elif queued.state is QueueState.READY and rank < before:
            self._queues.raise_rank(queued)
        elif queued.waiting is not None:
            self._waits.overtaken(queued)

    # --- getting ------------------------------------------------------------------------

    async def get(self) -> Turn:
        """Wait for the next URL whose host is due, and take its lease.

        If it is cancelled, URL and lease stay as they were. Raises GateClosed, StorageError if the
        scratch file can't be read (the URLs are kept, and tried again later), what `on_denied`
        raised, or LeaseTimeout if it could never end: the calling task holds a lease or response
        of each host that has URLs. The URLs stay; see `pacing.own_wait` for child tasks.
        """
        waiting: TaskWait[Any] | None = None
        late, before = False, self._entrance.enter()
        if before is not None:
            await before
            self._entrance.entered()
            late, before = True, None  # drop the future: many waiters below would keep theirs
        try:
            while True:
                if self._closed or self._callbacks.errors or self._callbacks.busy:
                    self._raise_pending()
                    await self._callbacks.wait()
                    continue
                # A late task goes after the waiting ones, one of which was woken for what is ready.
                queued = None if late and self._getters.futures else self._queues.next_ready()
                if queued is None:
                    late = False
                    waiting = self._begin_wait(waiting)
                    await self._getters.wait()
                    continue
                denied = self._denied
                entry, lease = self._try(queued)
                if lease is None and queued.state is QueueState.TRIED:
                    lease = await self._ask_scheduler(queued, entry)
                if lease is not None:
                    return self._taken(queued, entry, lease)
                if self._denied > denied and self._denied % _MAX_REFUSED_IN_ROW == 0:
                    await asyncio.sleep(0)  # Many refused URLs must not block the loop.
        except GateClosed as error:
            self._gate_closed(error)
            raise
        except asyncio.CancelledError:
            if waiting is not None:
                waiting.cancelled()
            raise
        finally:
            if waiting is not None and self._graph is not None:
                self._graph.end(waiting)

    def _gate_closed(self, error: GateClosed) -> None:
        """Raise the error in every waiting `get`: no lease can come."""
        self._callbacks.errors.extend(GateClosed(*error.args) for _ in self._getters.futures)
        self._getters.wake_all()

    def _begin_wait(self, waiting: TaskWait[Any] | None) -> TaskWait[Any] | None:
        """Record the wait of a task with leases. Raises LeaseTimeout if it could never end."""
        task = asyncio.current_task()
        if self._graph is None or task is None:
            return None
        if waiting is None:
            return self._graph.begin(task, self._queues.leases_wanted, inherited(task), ANY_FILE)
        self._graph.check(waiting)
        return waiting

    def get_nowait(self) -> Turn:
        """Return a URL whose host is due now. Raises asyncio.QueueEmpty, and what `get` raises.

        What can't be decided without waiting is looked up in the background, so calling it again
        later may succeed as long as `empty()` is false.
        """
        refusals = self._denied + _MAX_REFUSED_IN_ROW
        while True:
            self._raise_pending()
            busy = self._callbacks.busy or self._denied >= refusals
            queued = None if busy else self._queues.next_ready()
            if queued is None:
                raise asyncio.QueueEmpty
            entry, lease = self._try(queued)
            if lease is not None:
                return self._taken(queued, entry, lease)
            if queued.state is QueueState.TRIED:
                self._waits.missed(queued, entry)

    async def wait_due(self) -> None:
        """Return once `get_nowait` may find a URL: a host is due as far as is known.

        For code that can't hold a lease until it is used. Call `get_nowait` next. Raises GateClosed
        if the queue is closed.
        """
        while self._nothing_to_get():
            await self._getters.wait()
        if self._closed:
            raise GateClosed(_CLOSED)
        self._getters.wake()  # this task took nothing, and may never

    def _nothing_to_get(self) -> bool:
        return not (self._callbacks.errors or self._closed or self._queues.any_ready())

    def _raise_pending(self) -> None:
        if self._closed:
            raise GateClosed(_CLOSED)
        if self._callbacks.errors:
            raise self._callbacks.errors.popleft()

    def _try(self, queued: OriginQueue, *, take: bool = True) -> tuple[Entry, QueueLease | None]:
        """Pop the origin's first URL, and take its lease if `take` and that needs no waiting.

        Without a lease, the origin now waits for something. Or it is still TRIED: the URL is
        allowed, but only the scheduler knows whether its host is due.
        """
        if (ready_lease := queued.ready_lease) is not None:
            if self._is_held(queued.host) is None:
                return self._waits.take_ready_lease(queued, ready_lease)
            self._waits.hold_over(queued)  # Blocked or paused since.
            return ready_lease.entry, None
        try:
            entry = queued.backlog.pop()
        except BaseException:
            self._waits.back_off(queued)
            raise
        near = self._local
        if near is None:
            return entry, None
        try:
            lease = near.acquire_nowait(entry[2]) if take else None
            decision = None if lease is not None else near.peek(entry[2])
        except BaseException:
            queued.backlog.put_back(entry)
            self._waits.back_off(queued)
            raise
        if lease is None and decision is None:
            queued.backlog.put_back(entry)
            self._waits.ask(queued)
        elif decision is not None and decision.verdict is not Verdict.ALLOW:
            note_refusal(self._gate, decision)
            self._refused(queued, entry, decision)
        return entry, lease

    async def _ask_scheduler(
        self, queued: OriginQueue, entry: Entry, check: Any = None
    ) -> QueueLease | None:
        """Ask the scheduler for a lease without waiting for it, or only `check` the URL."""
        lease = None
        try:
            if check is not None:
                refuse(await check(entry[2]))
            else:
                lease = await self._acquire_if_due(entry[2], priority=round(-entry[0]))
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
        # No await since the lease was granted, so a cancelled `get` never has one.
        self._got += 1
        self._joiners.leases_out += 1
        self._size -= 1
        if self._kept is not None:
            self._kept.begin(entry)
        self._waits.place(queued)
        self._putters.wake()
        _, _, url, lease.data = entry
        return Turn(self, queued.origin, url, lease.data, entry, lease)

    # --- refusing -----------------------------------------------------------------------

    def _refused(self, queued: OriginQueue, entry: Entry, decision: Decision) -> None:
        """Handle a refusal: a denied URL is done, a deferred origin is tried again later."""
        if decision.verdict is Verdict.DEFER:
            queued.backlog.put_back(entry)
            self._waits.defer(queued, decision)
            return
        self._denied += 1
        self._size -= 1
        self._waits.place(queued, unused=True)
        self._putters.wake()
        # All counters are updated before the call, which is made once whatever it raises.
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
        elif not self._joiners.leases_out:
            self._joiners.wake()
        if entry is not None and self._kept is not None and not self._closed:
            self._kept.remove(entry)

    def task_done(self) -> None:
        """Do nothing, for code written for asyncio.Queue: leaving `async with` is task_done.

        Raises ValueError if called more often than `get` returned.
        """
        if self._task_done_calls >= self._got:
            raise ValueError("task_done() called more often than get() returned")
        self._task_done_calls += 1

    async def join(self) -> None:
        """Wait until every URL that was put is done: left, denied, or dropped by `close`.

        As with asyncio.Queue, other tasks have to get the allowed URLs. Denied ones need no `get`:
        while no lease is out or a `put` waits, `join` checks the next URLs as `get` would.
        """
        if self._unfinished > 0 and not self._closed:
            await self._joiners.wait(self._queues, self._refuse_if_denied)

    async def _refuse_if_denied(self, queued: OriginQueue) -> bool:
        """For `join`: check the next URL of a ready origin. Return False if it needs a `get`."""
        while self._callbacks.busy:
            await self._callbacks.wait()
        check = self._distant_check
        if queued.state is not QueueState.READY or queued.ready_lease or not (self._local or check):
            return False
        queued.state = QueueState.TRIED
        entry, _ = self._try(queued, take=False)
        if check is not None:
            await self._ask_scheduler(queued, entry, check)
        if queued.state is not QueueState.TRIED:
            return True
        queued.backlog.put_back(entry)
        self._queues.ready(queued, announced=queued.announced)
        return False

    def stats(self) -> QueueStats:
        """Return counters and sizes."""
        return QueueStats(
            size=self._size,
            overflowed=self._queues.overflow.rows,
            origins=len(self._queues),
            unfinished=self._unfinished,
            got=self._got,
            denied=self._denied,
            deferred=self._waits.deferred,
            missed=self._missed,
        )
