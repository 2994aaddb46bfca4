"""Requests that wait for a lease of a host: bounded, and fair between clients.

Invariants
    * each client has at most one request in a host's queue; its other requests wait here,
      by priority, then in order of arrival. So the host's queue holds one request of
      each client, and serves the clients in rotation (T15): a client that asks for a hundred
      leases of a host gets its second one after every other client got one;
    * when the limit of waiters is reached, the newest request of the client that has most makes
      way for a client that has fewer (T15);
    * each waiter gets a 503 as soon as the service begins to drain (T16).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec

from gatekeeper import urls
from gatekeeper.client.wire import LeaseRequestBody
from gatekeeper.clock import Clock, deadline
from gatekeeper.config import ServerConfig
from gatekeeper.decision import Reason
from gatekeeper.errors import LeaseTimeout, LedgerLost, StorageError
from gatekeeper.gate.lease import Lease
from gatekeeper.gate.lease_base import refuse_page
from gatekeeper.sidecar.routing import Problem

if TYPE_CHECKING:
    from gatekeeper.gate import Gatekeeper


class LeaseWaiter(msgspec.Struct, eq=False):
    """One request that waits for a lease."""

    client: str
    wanted: LeaseRequestBody
    since: float
    """Monotonic moment at which it began to wait."""
    host: str
    wait_timeout: asyncio.Timeout | None = None
    """Timeout of the whole wait; `end` lets it expire, with `problem`."""
    problem: Problem | None = None
    may_enter: asyncio.Future[None] | None = None
    """Completed when the request may enter the host's queue."""
    queue_timeout: asyncio.Timeout | None = None
    """Timeout of its stay in the host's queue; `step_back` lets it expire. None outside."""
    stepping_back: bool = False

    def end(self, problem: Problem) -> None:
        """End the wait with this response."""
        if self.wait_timeout is not None and self.problem is None:
            self.problem = problem
            self.wait_timeout.reschedule(asyncio.get_running_loop().time())

    def step_back(self) -> None:
        """Leave the host's queue for a request of the same client with a higher priority."""
        if self.queue_timeout is not None and not self.stepping_back:
            self.stepping_back = True
            self.queue_timeout.reschedule(asyncio.get_running_loop().time())


class _ClientQueue(msgspec.Struct, eq=False):
    """The requests of one client for one host."""

    first: LeaseWaiter
    """The request in the host's queue."""
    waiting: dict[int, OrderedDict[LeaseWaiter, None]] = {}
    """The other requests, by priority."""

    def add(self, waiter: LeaseWaiter, *, ahead: bool = False) -> None:
        waiters = self.waiting.setdefault(waiter.wanted.priority, OrderedDict())
        waiters[waiter] = None
        if ahead:
            waiters.move_to_end(waiter, last=False)

    def remove(self, waiter: LeaseWaiter) -> None:
        waiters = self.waiting.get(waiter.wanted.priority)
        if waiters is not None:
            waiters.pop(waiter, None)
            if not waiters:
                del self.waiting[waiter.wanted.priority]

    def next(self) -> LeaseWaiter | None:
        """Remove and return the next waiter, which becomes `first`. Return None if none waits."""
        if not self.waiting:
            return None
        waiter = next(iter(self.waiting[max(self.waiting)]))
        self.remove(waiter)
        self.first = waiter
        return waiter


class LeaseWaiters:
    """All requests that wait for a lease, by client."""

    def __init__(self, server: ServerConfig, clock: Clock) -> None:
        self._clock = clock
        self._by_client: dict[str, OrderedDict[LeaseWaiter, None]] = {}
        self._queues: dict[tuple[str, str], _ClientQueue] = {}
        self._size = 0
        self.closed: bool = False
        """Whether the service drains, so that no request may wait."""
        self.refused: int = 0
        self.adjust(server)

    def adjust(self, server: ServerConfig) -> None:
        """Apply a changed limit, for requests from now on."""
        self._max_waiting = server.max_waiting

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[LeaseWaiter]:
        """Iterate over all waiters, in no particular order."""
        return (waiter for waiters in self._by_client.values() for waiter in waiters)

    def close(self) -> None:
        """End all waits with a 503 and accept no further ones."""
        self.closed = True
        for waiters in list(self._by_client.values()):
            for waiter in list(waiters):
                waiter.end(draining())

    def displace_waiter(self, client: str, problem: Problem) -> bool:
        """End the newest wait of the client that has most, if it has more than `client` will have.

        Return whether there was such a client.
        """
        if not self._by_client:
            return False
        # A scan of the clients: as many as there are tokens, certificates or local addresses.
        most = max(self._by_client.values(), key=len)
        if len(most) <= len(self._by_client.get(client, ())) + 1:
            return False
        waiter = next(reversed(most))
        waiter.end(problem)
        self._unregister(waiter)
        return True

    async def acquire(self, gate: Gatekeeper, wanted: LeaseRequestBody, client: str) -> Lease:
        """Wait until it is the client's request that may start, and return its lease.

        Raises what `gate.acquire` raises, or Problem 503 if too many requests wait or the service
        drains.
        """
        async with self._registered(client, wanted) as waiter:
            end = waiter.since + wanted.wait
            await self._wait_for_file(gate, wanted)
            lease = await self._wait_in_queue(gate, wanted, waiter, end)
        # The lease may have come at the same moment as the end of the wait.
        if self.closed:
            lease.give_back()
            raise draining()
        return lease

    @asynccontextmanager
    async def _registered(
        self, client: str, wanted: LeaseRequestBody
    ) -> AsyncIterator[LeaseWaiter]:
        """Count a request as waiting inside the context. Raises the Problem that ended the wait."""
        if self.closed:
            raise draining()
        if self._size >= self._max_waiting:
            self.refused += 1
            problem = full("requests wait for a lease already", self._max_waiting)
            if not self.displace_waiter(client, problem):
                raise problem
        waiter = LeaseWaiter(client, wanted, self._clock.monotonic(), urls.parse(wanted.url).host)
        self._by_client.setdefault(client, OrderedDict())[waiter] = None
        self._size += 1
        try:
            async with asyncio.timeout(None) as wait_timeout:
                waiter.wait_timeout = wait_timeout
                yield waiter
        except TimeoutError:
            if waiter.problem is None or not wait_timeout.expired():
                raise
            raise waiter.problem from None
        finally:
            self._unregister(waiter)

    def _unregister(self, waiter: LeaseWaiter) -> None:
        waiters = self._by_client.get(waiter.client)
        if waiters is not None and waiter in waiters:
            del waiters[waiter]
            self._size -= 1
            if not waiters:
                del self._by_client[waiter.client]

    async def _wait_for_file(self, gate: Gatekeeper, wanted: LeaseRequestBody) -> None:
        """Wait for the robots.txt before entering any queue: a slow origin delays no other.

        Raises Denied or Deferred by its rules, and LeaseTimeout if it does not come in time.
        """
        decision = gate.peek(wanted.url, user_agent=wanted.user_agent)
        try:
            if decision is None:
                gate.parts.scheduler.holdups.refuse_unknown(urls.parse(wanted.url).host)
                async with deadline(self._clock, wanted.wait):
                    decision = await gate.check(wanted.url, user_agent=wanted.user_agent)
            if decision.reason is not Reason.FLEET or not gate.ready:
                refuse_page(gate, decision)
            # Otherwise `acquire` waits until the data of the fleet's store is restored.
        except (LedgerLost, StorageError):
            return  # `acquire` refuses it, with the decision
        except LeaseTimeout:
            raise
        except TimeoutError:
            parts, target = gate.parts, urls.parse(wanted.url)
            elsewhere = parts.scheduler.holdups.served_elsewhere(target.host)
            if (why := parts.storage_failing or elsewhere) is not None:
                no_lease = parts.questions.no_lease
                refuse_page(gate, no_lease(wanted.url, target, wanted.user_agent, why))
            text = f"its robots.txt was not fetched within {wanted.wait:g} s"
            raise parts.scheduler.timeout_error(wanted.url, target.host, text) from None

    async def _wait_in_queue(
        self, gate: Gatekeeper, wanted: LeaseRequestBody, waiter: LeaseWaiter, end: float
    ) -> Lease:
        """Enter the host's queue when it holds no other request of the client; wait for the lease.

        `end` is monotonic. All clients are equal: `priority` orders the requests of one client.
        """
        key = (waiter.client, waiter.host)
        stepped_back = False
        while True:
            seconds = end - self._clock.monotonic()
            # A request that does not wait delays no other, so it need not be the only one.
            first = (seconds > 0 or stepped_back) and await self._become_first(key, waiter, seconds)
            stepped_back = False
            try:
                async with asyncio.timeout(None) as queue_timeout:
                    waiter.queue_timeout = queue_timeout if first else None
                    return await gate.acquire(
                        wanted.url,
                        timeout=max(0.0, end - self._clock.monotonic()),
                        user_agent=wanted.user_agent,
                        owned=False,
                    )
            except TimeoutError:
                if not queue_timeout.expired():
                    raise
                stepped_back = True
            finally:
                waiter.queue_timeout = None
                if stepped_back:
                    self._queues[key].add(waiter, ahead=True)
                if first:
                    self._admit_next(key)

    async def _become_first(
        self, key: tuple[str, str], waiter: LeaseWaiter, seconds: float
    ) -> bool:
        """Wait up to `seconds` to become the client's request in the host's queue.

        Return whether it did.
        """
        queue = self._queues.get(key)
        if queue is None:
            self._queues[key] = _ClientQueue(waiter)
            return True
        in_queue, waiter.stepping_back = waiter.stepping_back, False
        if queue.first is waiter:  # it stepped back, and the other request was gone
            return True
        if not in_queue:
            queue.add(waiter)
            if waiter.wanted.priority > queue.first.wanted.priority:
                queue.first.step_back()
        waiter.may_enter = asyncio.get_running_loop().create_future()
        try:
            async with deadline(self._clock, seconds):
                await waiter.may_enter
        except TimeoutError:
            if queue.first is not waiter:  # else it became the first one at this very moment
                queue.remove(waiter)
                return False
        except BaseException:
            if queue.first is waiter:
                self._admit_next(key)
            else:
                queue.remove(waiter)
            raise
        return True

    def _admit_next(self, key: tuple[str, str]) -> None:
        """Let the client's next request into the host's queue, which its first one has left."""
        waiter = self._queues[key].next()
        if waiter is None:
            del self._queues[key]
        elif waiter.may_enter is not None and not waiter.may_enter.done():
            waiter.may_enter.set_result(None)


class OpenStreams:
    """Counts the streams in flight, and lets `drained` wait until there are none.

    >>> streams = OpenStreams()
    >>> with streams:
    ...     len(streams)
    1
    """

    def __init__(self) -> None:
        self._count = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return self._count

    def __enter__(self) -> None:
        self._count += 1
        self._idle.clear()

    def __exit__(self, *error: object) -> None:
        self._count -= 1
        if not self._count:
            self._idle.set()

    async def drained(self) -> None:
        """Return when no stream is in flight."""
        await self._idle.wait()


def draining() -> Problem:
    """Return the response to a request for a lease while the service shuts down."""
    detail = "the service is shutting down and grants no more leases"
    return Problem(503, "draining", detail, wait=5)


def full(what: str, bound: int) -> Problem:
    """Return the response to a request that exceeds a limit."""
    return Problem(503, "full", f"{bound} {what}", wait=1)
