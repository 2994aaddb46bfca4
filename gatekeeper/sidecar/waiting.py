"""Requests that wait for a host's turn: bounded, and fair between clients.

Invariants
    * each client has at most one request in a host's queue; its other requests wait here,
      by priority, then in order of arrival. So the host's queue holds one request of
      each client, and serves the clients in rotation (T15): a client that asks for a hundred
      turns of a host gets its second one after every other client got one;
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
from gatekeeper.clock import Clock, deadline
from gatekeeper.config import ServerConfig
from gatekeeper.decision import refuse
from gatekeeper.errors import LeaseTimeout
from gatekeeper.gate import internals
from gatekeeper.gate.leases import Lease
from gatekeeper.sidecar.exchange import Problem
from gatekeeper.wire import LeaseRequestBody

if TYPE_CHECKING:
    from gatekeeper.gate import Gatekeeper


class LeaseWaiter(msgspec.Struct, eq=False):
    """One request that waits for a lease."""

    client: str
    wanted: LeaseRequestBody
    since: float
    """Monotonic moment at which it began to wait."""
    host: str
    scope: asyncio.Timeout | None = None
    """Timeout of the whole wait; `end` lets it expire, for the reason `why`."""
    why: Problem | None = None
    go: asyncio.Future[None] | None = None
    """Completed when the request may enter the host's queue."""
    standing: asyncio.Timeout | None = None
    """Timeout of its stay in the host's queue; `step_back` lets it expire. None outside."""
    stepping_back: bool = False

    @property
    def priority(self) -> int:
        """Orders the requests of one client, highest first."""
        return self.wanted.priority

    def end(self, why: Problem) -> None:
        """End the wait with this response."""
        if self.scope is not None and self.why is None:
            self.why = why
            self.scope.reschedule(asyncio.get_running_loop().time())

    def step_back(self) -> None:
        """Leave the host's queue for a request of the same client with a higher priority."""
        if self.standing is not None and not self.stepping_back:
            self.stepping_back = True
            self.standing.reschedule(asyncio.get_running_loop().time())


class _ClientQueue:
    """The requests of one client for one host: `first` is in the host's queue, `behind` wait."""

    __slots__ = ("behind", "first")

    def __init__(self, first: LeaseWaiter) -> None:
        self.first = first
        self.behind: dict[int, OrderedDict[LeaseWaiter, None]] = {}

    def add(self, waiter: LeaseWaiter, *, ahead: bool = False) -> None:
        same = self.behind.setdefault(waiter.priority, OrderedDict())
        same[waiter] = None
        if ahead:
            same.move_to_end(waiter, last=False)

    def remove(self, waiter: LeaseWaiter) -> None:
        same = self.behind.get(waiter.priority)
        if same is not None:
            same.pop(waiter, None)
            if not same:
                del self.behind[waiter.priority]

    def next(self) -> LeaseWaiter | None:
        """Remove and return the next waiter, which becomes `first`. Return None if none waits."""
        if not self.behind:
            return None
        waiter = next(iter(self.behind[max(self.behind)]))
        self.remove(waiter)
        self.first = waiter
        return waiter


class LeaseWaiters:
    """All requests that wait for a turn, by client."""

    def __init__(self, server: ServerConfig, clock: Clock) -> None:
        self._clock = clock
        self._by_client: dict[str, OrderedDict[LeaseWaiter, None]] = {}
        self._with: dict[int, dict[str, None]] = {}
        """Clients by their number of waiting requests."""
        self._greatest = 0
        """The greatest number of waiting requests that a client has."""
        self._queues: dict[tuple[str, str], _ClientQueue] = {}
        self._size = 0
        self.closed: bool = False
        """Whether the service drains, so that no request may wait."""
        self.refused: int = 0
        self.adjust(server)

    def adjust(self, server: ServerConfig) -> None:
        """Apply a changed limit, for requests from now on."""
        self._most = server.max_waiting

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

    def make_way(self, client: str, why: Problem) -> bool:
        """End the newest wait of the client that has most, if it has more than `client` will have.

        Return whether there was such a client.
        """
        if not self._by_client:
            return False
        greatest = next(iter(self._with[self._greatest]))
        mine = len(self._by_client.get(client, ()))
        if self._greatest <= mine + 1:
            return False
        waiter = next(reversed(self._by_client[greatest]))
        waiter.end(why)
        self._leave(waiter)
        return True

    async def turn(self, gate: Gatekeeper, wanted: LeaseRequestBody, client: str) -> Lease:
        """Wait for the client's turn and return the lease.

        Raises what `gate.acquire` raises, or Problem 503 if too many requests wait or the service
        drains.
        """
        async with self._inside(client, wanted) as waiter:
            end = waiter.since + wanted.wait
            await self._learn(gate, wanted)
            lease = await self._stand(gate, wanted, waiter, end)
        # The turn may have come at the same moment as the end of the wait.
        if self.closed:
            lease.give_back()
            raise draining()
        return lease

    @asynccontextmanager
    async def _inside(self, client: str, wanted: LeaseRequestBody) -> AsyncIterator[LeaseWaiter]:
        """Count a request as waiting inside the context. Raises the Problem that ended the wait."""
        if self.closed:
            raise draining()
        if self._size >= self._most:
            self.refused += 1
            why = full("requests wait for a turn already", self._most)
            if not self.make_way(client, why):
                raise why
        waiter = LeaseWaiter(client, wanted, self._clock.monotonic(), urls.parse(wanted.url).host)
        waiters = self._by_client.setdefault(client, OrderedDict())
        waiters[waiter] = None
        self._counted(client, len(waiters) - 1, len(waiters))
        self._size += 1
        try:
            async with asyncio.timeout(None) as scope:
                waiter.scope = scope
                yield waiter
        except TimeoutError:
            if waiter.why is None or not scope.expired():
                raise
            raise waiter.why from None
        finally:
            self._leave(waiter)

    def _leave(self, waiter: LeaseWaiter) -> None:
        waiters = self._by_client.get(waiter.client)
        if waiters is not None and waiter in waiters:
            del waiters[waiter]
            self._counted(waiter.client, len(waiters) + 1, len(waiters))
            self._size -= 1
            if not waiters:
                del self._by_client[waiter.client]

    def _counted(self, client: str, before: int, now: int) -> None:
        """Note that the number of a client's waiting requests changed by one."""
        if before:
            those = self._with[before]
            del those[client]
            if not those:
                del self._with[before]
        if now:
            self._with.setdefault(now, {})[client] = None
        if now > self._greatest or self._greatest not in self._with:
            self._greatest = now  # it was the last client with that many, and now has one less

    async def _learn(self, gate: Gatekeeper, wanted: LeaseRequestBody) -> None:
        """Wait for the robots.txt before entering any queue: a slow origin delays no other.

        Raises Denied or Deferred by its rules, and LeaseTimeout if it does not come in time.
        """
        decision = gate.peek(wanted.url, user_agent=wanted.user_agent)
        try:
            if decision is None:
                async with deadline(self._clock, wanted.wait):
                    decision = await gate.check(wanted.url, user_agent=wanted.user_agent)
            refuse(decision)
        except LeaseTimeout:
            raise
        except TimeoutError:
            within, target = internals(gate), urls.parse(wanted.url)
            if (why := within.storage_failing) is not None:
                refuse(within.unkept(wanted.url, target, wanted.user_agent, why))
            late = within.lateness(target.host)[1]
            text = f"{wanted.url}: its robots.txt did not come within {wanted.wait:g} s{late}"
            raise LeaseTimeout(wanted.url, text) from None

    async def _stand(
        self, gate: Gatekeeper, wanted: LeaseRequestBody, waiter: LeaseWaiter, end: float
    ) -> Lease:
        """Enter the host's queue when it holds no other request of the client; wait for the turn.

        `end` is monotonic. All clients are equal: `priority` orders the requests of one client.
        """
        key = (waiter.client, waiter.host)
        again = False
        while True:
            left = end - self._clock.monotonic()
            # A request that does not wait delays no other, so it need not be the only one.
            first = (left > 0 or again) and await self._come_first(key, waiter, left)
            again = False
            try:
                async with asyncio.timeout(None) as standing:
                    waiter.standing = standing if first else None
                    return await gate.acquire(
                        wanted.url,
                        timeout=max(0.0, end - self._clock.monotonic()),
                        user_agent=wanted.user_agent,
                        owned=False,
                    )
            except TimeoutError:
                if not standing.expired():
                    raise
                again = True
            finally:
                waiter.standing = None
                if again:
                    self._queues[key].add(waiter, ahead=True)
                if first:
                    self._next(key)

    async def _come_first(self, key: tuple[str, str], waiter: LeaseWaiter, left: float) -> bool:
        """Wait to become the client's request in the host's queue. Return False after `left`
        seconds."""
        queue = self._queues.get(key)
        if queue is None:
            self._queues[key] = _ClientQueue(waiter)
            return True
        in_queue, waiter.stepping_back = waiter.stepping_back, False
        if queue.first is waiter:  # it stepped back, and the other request was gone
            return True
        if not in_queue:
            queue.add(waiter)
            if waiter.priority > queue.first.priority:
                queue.first.step_back()
        waiter.go = asyncio.get_running_loop().create_future()
        try:
            async with deadline(self._clock, left):
                await waiter.go
        except BaseException as error:
            if isinstance(error, TimeoutError):
                if queue.first is not waiter:
                    queue.remove(waiter)
                return queue.first is waiter
            if queue.first is waiter:
                self._next(key)
            else:
                queue.remove(waiter)
            raise
        return True

    def _next(self, key: tuple[str, str]) -> None:
        """Let the next request of a client into the host's queue, which its first one left."""
        waiter = self._queues[key].next()
        if waiter is None:
            del self._queues[key]
        elif waiter.go is not None and not waiter.go.done():
            waiter.go.set_result(None)


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
    return Problem(
        503,
        "draining",
        "the service is shutting down and grants no more leases",
        headers={"Retry-After": "5"},
    )


def full(what: str, bound: int) -> Problem:
    """Return the response to a request that exceeds a limit."""
    return Problem(503, "full", f"{bound} {what}", headers={"Retry-After": "1"})
