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
import itertools
from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

import msgspec

from gatekeeper import urls
from gatekeeper.client.wire import LeaseRequestBody
from gatekeeper.clock import Clock, deadline
from gatekeeper.config import ServerConfig
from gatekeeper.decision import Reason
from gatekeeper.errors import LeaseTimeout, LedgerLost, StorageError
from gatekeeper.gate import Gatekeeper
from gatekeeper.gate.lease import Lease
from gatekeeper.gate.lease_base import refuse_page
from gatekeeper.sidecar.routing import Problem


class LeaseWaiter(msgspec.Struct, eq=False):
    """One request that waits for a lease."""

    client: str
    wanted: LeaseRequestBody
    since: float
    """Monotonic moment at which it began to wait."""
    host: str
    wait_timeout: asyncio.Timeout
    """Timeout of the whole wait; `end` lets it expire, with `problem`."""
    problem: Problem | None = None
    rank: tuple[int, int] = (0, 0)
    """Its place among the client's requests for the host: by priority, then by arrival."""
    may_enter: asyncio.Event = msgspec.field(default_factory=asyncio.Event)
    """Set when the request may enter the host's queue."""
    queue_timeout: asyncio.Timeout | None = None
    """Timeout of its stay in the host's queue; `step_back` lets it expire. None before."""

    def end(self, problem: Problem) -> None:
        """End the wait with this response."""
        if self.problem is None:
            self.problem = problem
            self.wait_timeout.reschedule(asyncio.get_running_loop().time())

    def step_back(self) -> None:
        """Leave the host's queue for a request of the same client with a higher priority."""
        if self.queue_timeout is not None and not self.queue_timeout.expired():
            self.queue_timeout.reschedule(asyncio.get_running_loop().time())


class _ClientQueue(msgspec.Struct, eq=False):
    """The requests of one client for one host, of which one at most is in the host's queue."""

    waiters: list[LeaseWaiter] = []
    """All of them, by rank."""
    inside: LeaseWaiter | None = None
    """The one in the host's queue."""

    def add(self, waiter: LeaseWaiter) -> None:
        insort(self.waiters, waiter, key=_rank)
        self.advance()

    def remove(self, waiter: LeaseWaiter) -> None:
        del self.waiters[bisect_left(self.waiters, waiter.rank, key=_rank)]
        self.leave(waiter)

    def leave(self, waiter: LeaseWaiter) -> None:
        """Note that the request is not in the host's queue any more."""
        if self.inside is waiter:
            self.inside = None
            waiter.may_enter.clear()
            self.advance()

    def advance(self) -> None:
        """Let the first request into the host's queue, once no other one is there."""
        if self.waiters and self.inside is None:
            self.inside = self.waiters[0]
            self.inside.may_enter.set()
        elif self.inside is not None and self.inside is not self.waiters[0]:
            self.inside.step_back()


_rank = attrgetter("rank")


class LeaseWaiters:
    """All requests that wait for a lease, by client."""

    def __init__(self, server: ServerConfig, clock: Clock) -> None:
        self._clock = clock
        self._by_client: dict[str, dict[LeaseWaiter, None]] = {}
        self._queues: dict[tuple[str, str], _ClientQueue] = {}
        """By client and host."""
        self._arrivals = itertools.count()
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
        for waiter in list(self):
            waiter.end(draining())

    def displace_waiter(self, client: str, problem: Problem) -> bool:
        """End the newest wait of the client that has most, if it has more than `client` will have.

        Return whether there was such a client.
        """
        # A scan of the clients: as many as there are tokens, certificates or local addresses.
        most = max(self._by_client.values(), key=len, default={})
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
        if self.closed:
            raise draining()
        if self._size >= self._max_waiting:
            self.refused += 1
            problem = full("requests wait for a lease already", self._max_waiting)
            if not self.displace_waiter(client, problem):
                raise problem
        host, wait_timeout = urls.parse(wanted.url).host, asyncio.timeout(None)
        waiter = LeaseWaiter(client, wanted, self._clock.monotonic(), host, wait_timeout)
        self._by_client.setdefault(client, {})[waiter] = None
        self._size += 1
        try:
            async with wait_timeout:
                await self._wait_for_file(gate, wanted)
                lease = await self._wait_in_queue(gate, waiter)
        except TimeoutError:
            if waiter.problem is None or not wait_timeout.expired():
                raise
            raise waiter.problem from None
        finally:
            self._unregister(waiter)
        # The lease may have come at the same moment as the end of the wait.
        if self.closed:
            lease.give_back()
            raise draining()
        return lease

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

    async def _wait_in_queue(self, gate: Gatekeeper, waiter: LeaseWaiter) -> Lease:
        """Enter the host's queue when it holds no other request of the client; wait for the lease.

        All clients are equal: `priority` orders the requests of one client.
        """
        if self._seconds_left(waiter) > 0:
            lease = await self._wait_as_first(gate, waiter)
            if lease is not None:
                return lease
        # A request that does not wait delays no other, so it need not be the only one.
        return await self._acquire(gate, waiter)

    async def _wait_as_first(self, gate: Gatekeeper, waiter: LeaseWaiter) -> Lease | None:
        """Wait for the lease as the client's only request in the host's queue.

        Return None if other requests of the client were there until its time was over.
        """
        key = (waiter.client, waiter.host)
        waiter.rank = -waiter.wanted.priority, next(self._arrivals)
        queue = self._queues.setdefault(key, _ClientQueue())
        queue.add(waiter)
        try:
            while True:
                try:
                    async with deadline(self._clock, self._seconds_left(waiter)):
                        await waiter.may_enter.wait()
                except TimeoutError:
                    return None
                try:
                    async with asyncio.timeout(None) as queue_timeout:
                        waiter.queue_timeout = queue_timeout
                        queue.advance()  # one with a higher priority may have come since
                        return await self._acquire(gate, waiter)
                except TimeoutError:
                    if not queue_timeout.expired():
                        raise
                    queue.leave(waiter)
        finally:
            queue.remove(waiter)
            if not queue.waiters:
                del self._queues[key]

    def _seconds_left(self, waiter: LeaseWaiter) -> float:
        return max(0.0, waiter.since + waiter.wanted.wait - self._clock.monotonic())

    async def _acquire(self, gate: Gatekeeper, waiter: LeaseWaiter) -> Lease:
        url, agent, left = waiter.wanted.url, waiter.wanted.user_agent, self._seconds_left(waiter)
        return await gate.acquire(url, timeout=left, user_agent=agent, owned=False)


def draining() -> Problem:
    """Return the response to a request for a lease while the service shuts down."""
    detail = "the service is shutting down and grants no more leases"
    return Problem(503, "draining", detail, wait=5)


def full(what: str, bound: int) -> Problem:
    """Return the response to a request that exceeds a limit."""
    return Problem(503, "full", f"{bound} {what}", wait=1)
