"""Waiters that are asyncio tasks, and the deadlines of those that won't wait for ever."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
from collections.abc import Awaitable, Callable

from gatekeeper.errors import GateClosed
from gatekeeper.pacing.leases import Grant
from gatekeeper.pacing.ledger import INF, Scope
from gatekeeper.pacing.waiters import PASSED, Offer, Waiter

__all__ = ["Admit", "Deadlines", "Refetch", "TaskWaiter", "Watch"]

_log = logging.getLogger(__name__)

Admit = Callable[[], Offer]
"""Asked at the moment of the grant: a Wish to go ahead, REFETCH, or it raises."""
Refetch = Callable[[], Awaitable[object]]


class TaskWaiter(Waiter):
    """A task in `Scheduler.acquire`. What it learns is kept until the task runs again."""

    __slots__ = ("admit", "error", "future", "grant", "scope")

    def __init__(
        self, scope: Scope, url: str, priority: float, ttl: float | None, admit: Admit
    ) -> None:
        # `Waiter.__init__`, without a call: there may be many.
        self.url, self.priority, self.ttl = url, priority, ttl
        self.gone = self.away = self.stays = False
        self.scope = scope
        self.admit = admit
        self.grant: Grant | None = None
        self.error: Exception | None = None
        self.future: asyncio.Future[None] | None = None
        """What the task waits for."""

    def offer(self) -> Offer:
        """Ask the policy."""
        return self.admit()

    def deliver(self, grant: Grant) -> None:
        """Keep the turn; should the task be cancelled already, it passes it on."""
        self.grant = grant
        if (future := self.future) is not None and not future.done():
            future.set_result(None)

    def refuse(self, error: Exception) -> None:
        """Keep the error for the task."""
        self.error = error
        self._wake()

    def send_away(self) -> None:
        """Wake the task; it fetches and comes back."""
        self._wake()

    def _wake(self) -> None:
        if self.future is not None and not self.future.done():
            self.future.set_result(None)


class Watch(Waiter):
    """Somebody who wants to know when a host is due, and takes no turn."""

    __slots__ = ("callback",)

    def __init__(self, callback: Callable[[], object], priority: float = 0.0) -> None:
        super().__init__("", priority)
        self.callback = callback

    def offer(self) -> Offer:
        """Tell, and let the turn go on to the next."""
        self.callback()
        return PASSED

    def deliver(self, grant: Grant) -> None:  # pragma: no cover - it never takes a turn
        """Never called."""
        raise AssertionError(grant)

    def refuse(self, error: Exception) -> None:
        """The scheduler closes, or the callback failed although it has no right to."""
        if not isinstance(error, GateClosed):
            _log.error("a callback of when_due failed", exc_info=error)

    def send_away(self) -> None:  # pragma: no cover - it never asks for that
        """Never called."""
        raise AssertionError


class Deadlines:
    """Moments at which waiters give up: one heap, swept of those who left."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, TaskWaiter]] = []
        self._order = itertools.count()

    def add(self, when: float, waiter: TaskWaiter, alive: int) -> None:
        """Remember; `alive` is how many wait at all, against which the heap is bounded."""
        heapq.heappush(self._heap, (when, next(self._order), waiter))
        if len(self._heap) > 2 * alive + 256:
            self._heap = [entry for entry in self._heap if not entry[2].gone]
            heapq.heapify(self._heap)

    def over(self, now: float, most: int) -> list[TaskWaiter]:
        """Those whose time is over, earliest first; the rest of too many at the next look."""
        found: list[TaskWaiter] = []
        while self._heap and self._heap[0][0] <= now and len(found) < most:
            waiter = heapq.heappop(self._heap)[2]
            if not waiter.gone:
                found.append(waiter)
        return found

    def next(self) -> float:
        """The moment of the next, inf if there is none."""
        return self._heap[0][0] if self._heap else INF
