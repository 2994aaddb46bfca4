"""Network time: what runs while a hop is under way or its body read, and stands still between."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, TypeVar

import aiohttp
import pytest
from yarl import URL

from gatekeeper import VirtualClock, polite_session
from gatekeeper.clock import SharedTimer
from gatekeeper.errors import HoldLapsed
from gatekeeper.session.middleware import RequestDeadline, gate_middleware_with
from tests.gate_support import QUICK, open_config
from tests.internet import Drip, FakeInternet, NeverAnswer, Page, Stall, redirect

T = TypeVar("T")
FIVE = aiohttp.ClientTimeout(total=5)


@asynccontextmanager
async def polite(
    net: FakeInternet, concurrency: int = 1, **arguments: object
) -> AsyncIterator[aiohttp.ClientSession]:
    config = open_config(pacing={**QUICK, "concurrency": concurrency})
    async with polite_session(
        user_agent="testbot/1.0",
        config=config,
        resolver=net.resolver,
        clock=net.clock,
        **arguments,
    ) as session:
        yield session


def running(clock: VirtualClock) -> tuple[SharedTimer, list[RequestDeadline]]:
    among = SharedTimer(clock)
    return among, [RequestDeadline(among, seconds) for seconds in (3.0, 1.0, 2.0)]


async def test_one_timer_ends_each_request_at_its_own_deadline() -> None:
    clock = VirtualClock()
    _, allowances = running(clock)
    ended: list[tuple[float, bool]] = []

    async def hop(one: RequestDeadline) -> None:
        one.begin(asyncio.current_task())
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError as error:
            ended.append((clock.monotonic(), one.ran_out(error)))

    hops = [asyncio.create_task(hop(one)) for one in allowances]
    await clock.elapse(10.0)
    await asyncio.gather(*hops)
    assert ended == [(1.0, True), (2.0, True), (3.0, True)]


async def test_the_seconds_of_a_deadline_are_shared_by_all_hops() -> None:
    clock = VirtualClock()
    one = RequestDeadline(SharedTimer(clock), 5.0)
    for _ in range(2):
        one.begin(asyncio.current_task())
        await clock.elapse(2.0)
        one.stop()
        await clock.elapse(100.0)  # waiting for a turn
    assert one.seconds_left == 1.0


async def test_a_cancellation_by_the_caller_is_not_taken_for_the_deadline() -> None:
    clock = VirtualClock()
    _, (one, *_) = running(clock)

    async def hop() -> bool:
        one.begin(asyncio.current_task())
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError as error:
            return one.ran_out(error)
        return False

    task = asyncio.create_task(hop())
    await asyncio.sleep(0)
    task.cancel()
    assert not await task


async def test_no_timer_is_left_when_all_requests_are_done() -> None:
    clock = VirtualClock()
    among, allowances = running(clock)
    for one in allowances:
        one.begin(asyncio.current_task())
        one.stop()
    clock.advance(10.0)
    assert (among.running, clock.next_timer()) == ({}, None)


async def timed_out(net: FakeInternet, work: Awaitable[object]) -> float:
    """The virtual seconds until it was timed out."""
    with pytest.raises(TimeoutError):
        await net.drive(work)
    return net.clock.monotonic()


@pytest.mark.parametrize(
    "behaviour", [NeverAnswer(), Stall("begun"), Drip("x" * 99, size=1, every=1.0)]
)
async def test_head_and_body_end_with_the_total(net: FakeInternet, behaviour: object) -> None:
    net.site("a.test").robots("").on("/", behaviour)

    async def crawl() -> None:
        async with (
            polite(net, timeout=FIVE) as session,
            session.get("http://a.test/") as response,
        ):
            await response.read()

    assert 5.0 <= await timed_out(net, crawl()) < 6.0


async def test_hops_share_the_total(net: FakeInternet) -> None:
    site = net.site("a.test").robots("")
    for number in range(9):
        site.on(f"/{number}", Page("", 302, {"Location": f"/{number + 1}"}, delay=2.0))

    async def crawl() -> None:
        async with polite(net, timeout=FIVE) as session:
            await session.get("http://a.test/0")

    await timed_out(net, crawl())
    assert site.paths[1:] == ["/0", "/1", "/2"]


@pytest.mark.parametrize("total", [0, None])
async def test_a_request_without_a_total_has_no_deadline(
    net: FakeInternet, total: int | None
) -> None:
    net.site("a.test").robots("").on("/go", redirect("/slow"))
    net.sites["a.test"].on("/slow", Page("at last", delay=4_000.0))

    async def crawl() -> str:
        async with (
            polite(net) as session,
            session.get("http://a.test/go", timeout=aiohttp.ClientTimeout(total=total)) as response,
        ):
            return await response.text()

    assert await net.drive(crawl()) == "at last"


async def test_attempts_that_overlap_share_one_deadline() -> None:
    clock = VirtualClock()
    among = SharedTimer(clock)
    one = RequestDeadline(among, 5.0)
    one.begin(asyncio.current_task())
    await clock.elapse(2.0)
    one.begin(asyncio.current_task())  # the first answer's body still comes
    await clock.elapse(1.0)
    one.stop()
    await clock.elapse(1.0)
    one.stop()
    assert (one.seconds_left, among.running) == (1.0, {})


async def test_the_deadline_cancels_no_task_whose_attempt_has_failed() -> None:
    clock = VirtualClock()
    one = RequestDeadline(SharedTimer(clock), 5.0)
    one.begin(asyncio.current_task())  # its body is still being read
    one.begin(asyncio.current_task())
    assert not one.ran_out(OSError())
    await clock.elapse(10.0)  # raises CancelledError if the deadline cancels this task
    await asyncio.sleep(0)
    assert one.seconds_left == 0.0


@pytest.mark.parametrize(
    ("second", "ends"), [(Page("", 204), 20.0), (NeverAnswer(), 5.0), (Stall("begun"), 5.0)]
)
async def test_an_unread_first_attempt_leaves_the_deadline_to_the_second(
    net: FakeInternet, second: object, ends: float
) -> None:
    net.site("a.test").robots("").on("/", Stall("begun")).on("/again", second)
    kept: list[aiohttp.ClientResponse] = []

    async def attempts(
        request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        kept.append(await handler(request))
        request.url = request.url.with_path("/again")
        return await handler(request)

    async def crawl() -> None:
        async with (
            polite(net, 2, timeout=FIVE, middlewares=(attempts,)) as session,
            session.get("http://a.test/") as response,
        ):
            await response.read()
            await net.clock.sleep(20.0)  # the request is over: nothing may cancel what follows

    with contextlib.suppress(TimeoutError):
        await net.drive(crawl())
    kept[0].close()
    assert ends <= net.clock.monotonic() < ends + 1.0


async def test_the_deadline_stands_still_while_another_lease_replaces_a_lapsed_one() -> None:
    clock = VirtualClock()
    limit = RequestDeadline(SharedTimer(clock), 5.0)
    gate: Any = SimpleNamespace(user_agent="testbot/1.0")
    lease: Any = SimpleNamespace(user_agent=None, report=lambda **_: None, end=lambda: None)
    failures = [HoldLapsed("the hold ran out"), aiohttp.ClientConnectionError()]

    async def wait(*_: object, **__: object) -> Any:
        await clock.sleep(10.0)
        return lease

    async def send(_: aiohttp.ClientRequest) -> aiohttp.ClientResponse:
        await clock.sleep(1.0)
        raise failures.pop(0)

    request: Any = SimpleNamespace(
        loop=asyncio.get_running_loop(),
        url=URL("http://a.test/"),
        headers={"User-Agent": "testbot/1.0"},
    )
    ask = gate_middleware_with(gate, wait, lapsed=lambda _: False)
    task = asyncio.ensure_future(ask(limit, request, send))
    await clock.elapse(30.0)
    with pytest.raises(aiohttp.ClientConnectionError):
        await task
    assert limit.seconds_left == 3.0
