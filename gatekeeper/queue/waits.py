"""`QueueWaits`: what the origins of a `PoliteQueue` that are not ready wait for."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextvars import Context
from datetime import datetime
from functools import partial

import msgspec

from gatekeeper.clock import Clock, OwnedTasks
from gatekeeper.decision import Decision, Verdict
from gatekeeper.errors import Deferred, GateClosed, LeaseTimeout, StorageError
from gatekeeper.queue.files import Entry
from gatekeeper.queue.origin_queues import (
    GrantingGate,
    OriginQueue,
    OriginQueues,
    QueueGatekeeper,
    QueueLease,
    QueueState,
    ReadyLease,
)

_log = logging.getLogger(__name__)

MAX_ASKING = 4_000
"""Most origins whose robots.txt is asked for at once: more would wait behind silent hosts."""
MAX_WAITING = 100
"""Most origins that wait for a lease in the scheduler, because others get their hosts' leases."""
PATIENCE = 600.0
"""Seconds to wait for a lease in the scheduler before the origin is tried again."""
FAR_PATIENCE = 30.0
"""`PATIENCE` at a distant gate, whose answer by then says how far off the lease is."""
LEASES_BY_WAITING = 16
"""Leases for which an origin waits in the scheduler after another request took its lease."""
HOLD = 5.0
"""Seconds for which a lease that was acquired by waiting is held for a `get`."""
FIRST_PAUSE = 0.02
"""First back-off in seconds of an origin that was tried in vain. It doubles each time in a row."""
LAST_PAUSE = 10.0
"""The longest such back-off."""
NEAR = 2.0
"""An origin waits at a distant gate for a lease that is at most this many seconds away. That gate
rounds the time up to whole seconds, so one second less is certain."""
RETRY = 60.0
"""Seconds to wait if a deferral has no time, or asking failed."""
_DOUBLINGS = 16


class QueueWaits(msgspec.Struct, eq=False):
    """What the origins that are not ready wait for. No entry is lost: its origin becomes ready or
    waits for something else. Without a change, no origin is tried again without a pause."""

    _gate: GrantingGate
    _local: QueueGatekeeper | None
    """The gate, if it is of this process."""
    _is_due: Callable[[str], bool] | None
    """Whether a host is due; None if the gate can't say."""
    _clock: Clock
    _queues: OriginQueues
    _on_deferred: Callable[[Decision], object] | None
    _on_closed: Callable[[GateClosed], object]
    _cold: deque[OriginQueue] = msgspec.field(default_factory=deque)
    _asking: OwnedTasks = msgspec.field(default_factory=OwnedTasks)
    _waiting: OwnedTasks = msgspec.field(default_factory=OwnedTasks)
    _ready_leases: int = 0
    _closed: bool = False
    deferred: int = 0
    """How often a decision deferred an origin."""

    async def close(self) -> None:
        """Stop all waits. Idempotent."""
        self._closed = True
        for queued in self._queues:
            if (held := queued.ready_lease) is not None:
                self.take_ready_lease(queued, held)[1].give_back()
        self._cold.clear()
        await self._asking.close()
        await self._waiting.close()

    # --- the host's lease ---------------------------------------------------------------

    def place(self, queued: OriginQueue, *, unused: bool = False) -> None:
        """Decide what an origin waits for next, after its first URL was given out, or was done
        without using a lease (`unused`)."""
        queued.setbacks, queued.asked, queued.missed = 0, False, False
        if not len(queued.backlog):
            self._queues.forget(queued)
        elif unused:
            self._queues.ready(queued, announced=queued.announced)
        elif queued.leases_by_waiting > 0 and self._may_wait:
            queued.leases_by_waiting -= 1
            try:
                entry = queued.backlog.pop()
            except StorageError:
                self.back_off(queued)  # The next `get` raises it.
            else:
                self._wait_for_lease(queued, entry)
        elif self._is_due is not None and self._is_due(queued.host):
            self._queues.ready(queued, announced=True)  # cheaper than an immediate callback
        else:
            self.watch(queued)

    def watch(self, queued: OriginQueue) -> None:
        """Let the scheduler call back when the host is due."""
        if self._closed:
            return
        if self._local is None:  # A distant gate can't call back.
            self._queues.ready(queued)
            return
        queued.state = QueueState.WATCHED

        def due() -> None:
            queued.watched(None)
            if queued.state is QueueState.WATCHED and not self._closed:
                self._queues.ready(queued, announced=True)

        try:
            unwatch = self._local.when_due(queued.host, due, priority=-queued.rank())
        except (GateClosed, LeaseTimeout, StorageError):  # No room, or the storage failed.
            self.back_off(queued)
            return
        if queued.state is QueueState.WATCHED:
            queued.watched(unwatch)

    # --- waiting in the scheduler -------------------------------------------------------

    @property
    def _may_wait(self) -> bool:
        return len(self._waiting) + self._ready_leases < MAX_WAITING

    def missed(self, queued: OriginQueue, entry: Entry, retry_at: datetime | None = None) -> None:
        """Handle a URL whose host was not due. `retry_at`: when it is, if the gate knows."""
        queued.missed = True
        if self._closed or self._far_off(queued, entry, retry_at):
            return
        if self._local is not None and not queued.announced:
            queued.backlog.put_back(entry)
            self.watch(queued)  # It may not have been due.
        elif self._may_wait:
            queued.leases_by_waiting = LEASES_BY_WAITING
            self._wait_for_lease(queued, entry)
        else:
            queued.backlog.put_back(entry)
            self.back_off(queued)

    def _far_off(self, queued: OriginQueue, entry: Entry, retry_at: datetime | None) -> bool:
        """Return True if a distant gate says that the host is due later. The origin then waits
        here, not in the sidecar's queue."""
        left = 0.0 if retry_at is None else retry_at.timestamp() - self._clock.wall()
        if self._local is not None or left <= NEAR:
            return False
        queued.backlog.put_back(entry)
        self._queues.defer(queued, self._clock.monotonic() + left - NEAR / 2)
        return True

    def overtaken(self, queued: OriginQueue) -> None:
        """Replace the URL that waits in the scheduler if one with a higher priority was put."""
        if queued.waiting is not None and queued.backlog.rank() < queued.waiting[0][0]:
            queued.leases_by_waiting += 1
            queued.waiting[1].cancel()

    def _wait_for_lease(self, queued: OriginQueue, entry: Entry) -> None:
        queued.state = QueueState.WAITING
        patience = PATIENCE if self._local is not None else FAR_PATIENCE
        acquiring = self._gate.acquire(
            entry[2], priority=round(-entry[0]), timeout=patience, owned=False
        )
        task = self._waiting.start(acquiring)
        queued.waiting = entry, task
        # A callback, not code after an await: a task may be cancelled before it starts.
        began = self._clock.monotonic()
        task.add_done_callback(partial(self._wait_ended, queued, entry, began))

    def _wait_ended(
        self, queued: OriginQueue, entry: Entry, began: float, task: asyncio.Task[QueueLease]
    ) -> None:
        queued.waiting = None
        if self._local is None and self._clock.monotonic() - began > NEAR:
            queued.leases_by_waiting = 0  # Its next lease is as far off; it will be deferred.
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
            elif isinstance(error, Deferred):
                self.defer(queued, error.decision)
            else:  # The next `get` meets the same obstacle.
                self.back_off(queued)

    def _hold(self, queued: OriginQueue, entry: Entry, lease: QueueLease) -> None:
        """Hold an acquired lease for the next `get`, if one comes soon."""
        left = lease.expires_at.timestamp() - self._clock.wall()
        end = self._clock.monotonic() + min(HOLD, left / 2)
        queued.ready_lease = ReadyLease(
            entry, lease, self._clock.call_at(end, self.hold_over, queued)
        )
        self._ready_leases += 1
        self._queues.ready(queued)

    def take_ready_lease(self, queued: OriginQueue, held: ReadyLease) -> tuple[Entry, QueueLease]:
        """Take out the lease that is held for an origin."""
        held.end.cancel()
        queued.ready_lease = None
        self._ready_leases -= 1
        return held.entry, held.lease

    def hold_over(self, queued: OriginQueue) -> None:
        """Give a held lease back: no `get` came for it, or it must not be used any more."""
        if (held := queued.ready_lease) is not None:
            entry, lease = self.take_ready_lease(queued, held)
            queued.backlog.put_back(entry)
            queued.leases_by_waiting = 0
            try:
                lease.give_back()
            finally:
                self.watch(queued)

    # --- robots.txt ---------------------------------------------------------------------

    def ask(self, queued: OriginQueue) -> None:
        """Ask for the origin's robots.txt in the background, since it is not cached."""
        if queued.asked:
            queued.asked = False  # It was fetched, and evicted again already.
            self.back_off(queued)
            return
        queued.state = QueueState.COLD
        self._cold.append(queued)
        self._ask_more()

    def _ask_more(self) -> None:
        near = self._local
        while near and self._cold and len(self._asking) < MAX_ASKING and not self._closed:
            asking = self._ask_for(self._cold.popleft(), near)
            # In an empty context: the task in `get` may hold leases, and does not wait for this.
            task = self._asking.start(asking, context=Context())
            task.add_done_callback(lambda _: self._ask_more())

    async def _ask_for(self, queued: OriginQueue, gate: QueueGatekeeper) -> None:
        try:
            decision = await gate.check(f"{queued.origin}/")
        except GateClosed as error:
            self.back_off(queued)
            self._on_closed(error)
            return
        except Exception as error:  # noqa: BLE001 - the origin is tried again after any error
            _log.warning("asking %s for its robots.txt failed: %r", queued.origin, error)
            self.back_off(queued, RETRY)
            return
        if decision.verdict is Verdict.DEFER:
            self.defer(queued, decision)  # It could not be reached, for example.
        else:
            queued.asked = True
            self.watch(queued)

    # --- deferrals ----------------------------------------------------------------------

    def defer(self, queued: OriginQueue, decision: Decision) -> None:
        """Try an origin again at the decision's `retry_at`."""
        self.deferred += 1
        queued.missed = False
        at = decision.retry_at
        self.back_off(queued, at.timestamp() - self._clock.wall() if at else RETRY)
        if self._on_deferred is not None:
            self._on_deferred(decision)

    def back_off(self, queued: OriginQueue, least: float = 0.0) -> None:
        """Let an origin that was tried in vain pause, `least` seconds or more, longer each time."""
        queued.leases_by_waiting = 0
        pause = min(LAST_PAUSE, FIRST_PAUSE * 2 ** min(queued.setbacks, _DOUBLINGS))
        if least < LAST_PAUSE:
            queued.setbacks += 1
        self._queues.defer(queued, self._clock.monotonic() + max(pause, least))
