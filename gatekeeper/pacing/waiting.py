"""Tasks that wait: what the asyncio shell keeps of each, and how many move in one iteration.

A hundred thousand tasks that begin, or are cancelled, in one iteration of the loop would hold
up everybody else for as long as it takes to look at each of them: `Entrance` and `Departures`
let a bounded number through, and the loop goes round in between.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
from collections import deque
from collections.abc import Awaitable, Callable

from gatekeeper.errors import GateClosed
from gatekeeper.pacing.engine import Grant
from gatekeeper.pacing.queues import PASSED, Offer, Waiter
from gatekeeper.pacing.scopes import INF, Scope

__all__ = [
    "AT_ONCE",
    "Admit",
    "Deadlines",
    "Departures",
    "DueWatch",
    "Entrance",
    "Refetch",
    "TaskWaiter",
]

_LET_IN = 50
"""Tasks let in, or taken out at once, during one iteration of the loop."""
AT_ONCE = 1000
"""Waiters told in one iteration of the loop that their time is over, or taken out later."""

_log = logging.getLogger(__name__)

Admit = Callable[[], Offer]
"""Asked at the moment of the grant: the interval that the text asks for, to go ahead; or REFETCH;
or it raises."""
Refetch = Callable[[], Awaitable[object]]


class TaskWaiter(Waiter):
    """A task in `Scheduler.acquire`. What it learns is kept until the task runs again."""

    __slots__ = ("admit", "error", "future", "grant", "scope")

    def __init__(
        self, scope: Scope, url: str, priority: float, ttl: float | None, admit: Admit
    ) -> None:
        # `Waiter.__init__`, without a call: there may be many.
        self.url = url
        self.priority = priority
        self.ttl = ttl
        self.gone = self.away = self.stays = False
        self.scope: Scope = scope
        self.admit: Admit = admit
        self.grant: Grant | None = None
        self.error: Exception | None = None
        self.future: asyncio.Future[None] | None = None
        """What the task waits for."""

    def offer(self) -> Offer:
        """Ask the policy."""
        return self.admit()

    def deliver(self, grant: Grant) -> None:
        """Keep it; should the task be cancelled already, it passes it on."""
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


class DueWatch(Waiter):
    """Somebody who wants to know when a host is due, and takes no lease."""

    __slots__ = ("callback", "told")

    def __init__(self, callback: Callable[[], object], priority: float = 0.0) -> None:
        super().__init__("", priority)
        self.callback: Callable[[], object] = callback
        self.told = False

    def offer(self) -> Offer:
        """Tell, and let the next waiter have the lease."""
        self.told = True
        self.callback()
        return PASSED

    def deliver(self, grant: Grant) -> None:  # pragma: no cover - it never takes a lease
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


class Entrance:
    """Lets tasks in, first come first served, a bounded number in each iteration of the loop."""

    def __init__(self) -> None:
        self._let_in = 0
        """In this iteration."""
        self.outside: deque[asyncio.Future[None]] = deque()
        """Who waits outside: nobody may go in before them."""
        self._armed = False

    def enter(self) -> asyncio.Future[None] | None:
        """What to await before coming in; None, mostly: come in.

        Not a coroutine: each costs memory, and there may be many.
        """
        loop = asyncio.get_running_loop()
        if not self._armed:
            self._armed = True
            loop.call_soon(self._next_iteration)
        if not self.outside and self._let_in < _LET_IN:
            self._let_in += 1
            return None
        future: asyncio.Future[None] = loop.create_future()
        self.outside.append(future)
        return future  # one that is cancelled stays in the line, done, and is passed over

    def _next_iteration(self) -> None:
        self._let_in = 0
        outside = self.outside
        while outside and self._let_in < _LET_IN:
            future = outside.popleft()
            if not future.done():
                future.set_result(None)
                self._let_in += 1
        self._armed = bool(self._let_in)
        if self._armed:
            asyncio.get_running_loop().call_soon(self._next_iteration)


class Departures:
    """Cancelled waiters who are taken out of their queues in later iterations of the loop.

    Most are taken out at once. A hundred thousand who are cancelled in one iteration hold it up
    for long enough as it is, so that the others wait here; a lease that one of them is granted in
    the meantime is passed on when it is taken out.
    """

    def __init__(self, take_out: Callable[[TaskWaiter], object]) -> None:
        self._take_out = take_out
        self._at_once = 0
        """Taken out in this iteration of the loop."""
        self._later: deque[TaskWaiter] = deque()
        self._armed = False

    def __len__(self) -> int:
        return len(self._later)

    def postpone(self, waiter: TaskWaiter) -> bool:
        """Take it out in a later iteration of the loop; False: it is to be taken out now."""
        if not self._armed:
            self._armed = True
            asyncio.get_running_loop().call_soon(self._next_iteration)
        if not self._later and self._at_once < _LET_IN:
            self._at_once += 1
            return False
        self._later.append(waiter)
        return True

    def _next_iteration(self) -> None:
        self._at_once = 0
        self._armed = bool(self._later)
        if self._armed:
            asyncio.get_running_loop().call_soon(self._next_iteration)
            self.take_out(AT_ONCE)

    def take_out(self, most: int) -> None:
        """Take out so many, first come first served."""
        for _ in range(min(most, len(self._later))):
            self._take_out(self._later.popleft())
