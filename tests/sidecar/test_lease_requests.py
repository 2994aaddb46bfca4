"""Requests that wait for a lease: their order between clients, their number, their end."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from gatekeeper.client.wire import LeaseReport, LeaseRequestBody
from gatekeeper.errors import LeaseTimeout
from gatekeeper.sidecar import service as sidecar_service
from gatekeeper.sidecar.routing import Problem
from tests.internet import FakeInternet, NeverAnswer

URL = "http://a.test/page"
REPORT = LeaseReport(status=200)


class Clients:
    """Polls of several clients; each lease is reported as soon as it is granted."""

    def __init__(self, service: Any) -> None:
        self.service = service
        self.leases = service.leases
        self.order: list[str] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def take(self, client: str = "first", url: str = URL) -> str:
        wanted = LeaseRequestBody(url=url)
        return (await self.leases.acquire(self.service.gate, wanted, client, lambda: False)).id

    async def poll(
        self, client: str, *, priority: int = 0, url: str = URL, wait: float = 60.0
    ) -> None:
        """Start a poll, and return when it waits or is over."""
        wanted = LeaseRequestBody(url=url, wait=wait, priority=priority)
        self.tasks.append(asyncio.create_task(self._poll(wanted, client)))
        await settled()

    async def _poll(self, wanted: LeaseRequestBody, client: str) -> None:
        gate = self.service.gate
        held = await self.leases.acquire(gate, wanted, client, lambda: False)
        self.order.append(f"{client}{wanted.priority or ''}")
        self.report(held.id)

    def report(self, lease_id: str) -> None:
        self.leases.report(lease_id, REPORT)

    async def finish(self) -> list[BaseException | None]:
        return await asyncio.gather(*self.tasks, return_exceptions=True)


async def settled() -> None:
    """Let every task run as far as it can without waiting."""
    for _ in range(12):
        await asyncio.sleep(0)


@pytest.fixture
async def clients(serve: Any, internet: FakeInternet) -> AsyncIterator[Any]:
    """`await clients(max_waiting=3, ...)`; a.test is cached, and its only slot is free."""
    made = []

    async def begin(**settings: Any) -> Clients:
        internet.site("a.test").robots("User-agent: *\nDisallow: /private\n")
        service = (await serve(**settings)).service
        await service.gate.check(URL)
        made.append(Clients(service))
        return made[-1]

    yield begin
    for one in made:
        for task in one.tasks:
            task.cancel()
        await one.finish()


async def test_t15_clients_get_leases_of_a_host_evenly_however_much_each_asks(
    clients: Any,
) -> None:
    asking = await clients()
    first = await asking.take()
    for _ in range(12):
        await asking.poll("A")
    for client in ("B", "C", "B"):
        await asking.poll(client)
    asking.report(first)
    await asking.finish()

    assert "".join(asking.order) == "ABCAB" + 10 * "A"


async def test_t15_a_client_that_waits_for_one_host_delays_no_client_at_another(
    clients: Any, internet: FakeInternet
) -> None:
    internet.site("b.test").robots("")
    asking = await clients()
    first = await asking.take()
    for _ in range(3):
        await asking.poll("A")
    await asking.service.gate.check("http://b.test/")
    await asking.poll("A", url="http://b.test/")

    assert asking.order == ["A"]
    asking.report(first)
    await asking.finish()


async def test_a_long_block_ends_the_polls_that_it_outlasts_at_once(clients: Any) -> None:
    asking = await clients()
    first = await asking.take()
    for client in ("A", "A", "B"):
        await asking.poll(client, wait=60.0)
    asking.leases.report(first, LeaseReport(status=503, retry_after=7200.0))
    while not all(task.done() for task in asking.tasks):  # the virtual clock does not advance
        await settled()

    for error in await asking.finish():
        assert isinstance(error, LeaseTimeout)
        assert error.retry_at is not None
        left = error.retry_at.timestamp() - asking.service.clock.wall()
        assert left == pytest.approx(7200.0, abs=30.0)
    assert asking.order == []


async def test_the_priority_orders_the_polls_of_one_client_and_not_those_of_others(
    clients: Any,
) -> None:
    asking = await clients()
    first = await asking.take()
    await asking.poll("B")
    for priority in (0, 1, 5, 1):
        await asking.poll("A", priority=priority)
    asking.report(first)
    await asking.finish()

    assert asking.order == ["B", "A5", "A1", "A1", "A"]


async def test_a_poll_that_hangs_up_leaves_its_place_to_the_next_of_its_client(
    clients: Any,
) -> None:
    asking = await clients()
    first = await asking.take()
    for priority in (9, 3, 1):
        await asking.poll("A", priority=priority)
    asking.tasks[0].cancel()
    await settled()
    asking.report(first)
    await asking.finish()

    assert asking.order == ["A3", "A1"]
    assert len(asking.leases.waiters) == 0
    assert not asking.leases.waiters._queues


async def test_a_poll_behind_others_of_its_client_ends_at_its_own_wait(
    clients: Any,
) -> None:
    asking = await clients()
    first = await asking.take()
    await asking.poll("A")
    await asking.poll("A", wait=0.01)
    await asyncio.wait(asking.tasks[1:])

    assert isinstance(asking.tasks[1].exception(), LeaseTimeout)
    asking.report(first)
    await asking.tasks[0]


async def test_a_slow_origin_delays_no_other_of_its_host(
    clients: Any, internet: FakeInternet
) -> None:
    internet.site("a.test:81").on("/robots.txt", NeverAnswer())
    asking = await clients(pacing={"concurrency": 2})
    await asking.poll("A", url="http://a.test:81/")
    await asking.poll("A")

    assert asking.order == ["A"]


async def test_t15_at_max_waiting_the_client_with_most_polls_is_refused(
    clients: Any,
) -> None:
    asking = await clients(max_waiting=4)
    first = await asking.take()
    for _ in range(4):
        await asking.poll("A")
    await asking.poll("B")
    await asking.poll("B")
    await asking.poll("B")
    asking.report(first)
    done = await asking.finish()
    refused = [number for number, one in enumerate(done) if isinstance(one, Problem)]

    # The newest two of A made way for two of B; a third would have left A fewer than B.
    assert refused == [2, 3, 6]
    assert {done[number].kind for number in refused} == {"full"}
    assert asking.order == ["A", "B", "A", "B"]


async def test_t15_at_max_leases_a_waiting_poll_is_refused_for_another_client(clients: Any) -> None:
    asking = await clients(max_leases=3)
    first = await asking.take()
    await asking.poll("A")
    await asking.poll("A")
    await asking.poll("B")
    asking.report(first)
    done = await asking.finish()

    assert [getattr(one, "status", None) for one in done] == [None, 503, None]
    assert asking.order == ["A", "B"]


async def test_t16_every_waiting_poll_is_refused_when_the_service_drains(clients: Any) -> None:
    asking = await clients()
    first = await asking.take()
    for client in "AAB":
        await asking.poll(client)
    asking.leases.drain()
    asking.report(first)  # at the same moment, so no lease is granted
    done = await asking.finish()

    assert [getattr(one, "kind", one) for one in done] == ["draining"] * 3
    assert asking.order == []
    assert len(asking.leases) == 0
    assert asking.service.gate.stats().pacing.in_flight == 0


async def test_t16_a_lease_granted_just_before_draining_is_given_back(
    clients: Any,
) -> None:
    asking = await clients()
    first = await asking.take()
    await asking.poll("A")
    asking.report(first)  # the lease is A's, but its task has not run yet
    asking.leases.drain()
    [done] = await asking.finish()

    assert getattr(done, "kind", done) == "draining"
    assert len(asking.leases) == 0
    assert asking.service.gate.stats().pacing.in_flight == 0


async def test_of_a_great_many_requests_a_few_begin_in_one_iteration_of_the_loop(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that sends thousands of requests must block neither other clients nor the loop."""
    monkeypatch.setattr(sidecar_service, "MAX_PER_ITERATION", 7)
    running = await serve()
    begun: Counter[int] = Counter()
    iteration = itertools.count()
    now = next(iteration)
    loop = asyncio.get_running_loop()
    over = False

    def tick() -> None:
        nonlocal now
        now = next(iteration)
        if not over:
            loop.call_soon(tick)

    find = running.service.router.find

    class Route:
        """A route that counts when its handler begins."""

        def __init__(self, route: Any) -> None:
            self.path, self.probe, self.needs = route.path, route.probe, route.needs

        async def handler(self, _service: Any, _call: Any) -> web.Response:
            begun[now] += 1
            return web.json_response({})

    def counted(method: str, path: str) -> Any:
        route, params = find(method, path)
        return Route(route), params

    monkeypatch.setattr(running.service.router, "find", counted)
    loop.call_soon(tick)
    tasks = [running.post("/v1/leases", {"url": "http://a.test/"}) for _ in range(90)]
    assert [status for status, _ in await asyncio.gather(*tasks)] == [200] * 90
    over = True
    assert begun.total() == 90
    assert max(begun.values()) <= 14  # those of this iteration, and those that entered just before
