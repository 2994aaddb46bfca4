"""The first page of a host waits for the interval of its robots.txt, not for our default."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from gatekeeper import Gatekeeper, PoliteQueue, polite_session
from gatekeeper.clock import VirtualClock
from tests.crawl.crawling import fetch
from tests.gate_support import gate_on, open_config
from tests.internet import FakeInternet, Page
from tests.politeness.conftest import MakeGate
from tests.politeness.world import AGENT

DEFAULT = 30.0
URL = "http://a.test/x"
EPSILON = 1e-6
Way = Callable[[FakeInternet, dict[str, Any]], Awaitable[float | None]]


def _gate(net: FakeInternet, settings: dict[str, Any]) -> Gatekeeper:
    return gate_on(net, open_config(**settings), agent=AGENT)


async def _embedded(net: FakeInternet, settings: dict[str, Any]) -> float:
    async with _gate(net, settings) as gate, gate.lease(URL) as lease:
        lease.report(status=200)
        return net.clock.monotonic()


async def _queue(net: FakeInternet, settings: dict[str, Any]) -> float:
    async with _gate(net, settings) as gate, PoliteQueue(gate) as queue:
        await queue.put(URL)
        async with await queue.get() as lease:
            lease.report(status=200)
            return net.clock.monotonic()


async def _session(net: FakeInternet, settings: dict[str, Any]) -> None:
    made = polite_session(
        AGENT, config=open_config(**settings), resolver=net.resolver, clock=net.clock
    )
    async with made as session, session.get(URL) as response:
        await response.read()


async def _command(net: FakeInternet, settings: dict[str, Any]) -> None:
    await fetch(net, URL, config=open_config(**settings))


WAYS: dict[str, Way] = {
    "embedded": _embedded,
    "queue": _queue,
    "session": _session,
    "fetch": _command,
}


async def waited(net: FakeInternet, way: Way, text: str | Page, **settings: Any) -> float:
    """Return the seconds between the request for robots.txt and that for the page."""
    net.site("a.test").robots(text).page("/x")
    settings = {"pacing": {"default_interval": DEFAULT}, **settings}
    at = await net.drive(way(net, settings))
    first = net.requests[0].at
    return (net.requests[1].at if at is None else at) - first


@pytest.mark.parametrize("way", WAYS)
async def test_the_first_page_waits_for_what_the_file_asks_for(
    internet: FakeInternet, way: str
) -> None:
    found = await waited(internet, WAYS[way], "User-agent: *\nCrawl-delay: 2\n")
    assert 2.0 - EPSILON <= found < 4.0


@pytest.mark.parametrize("way", WAYS)
async def test_the_first_page_waits_the_default_where_the_file_asks_for_nothing(
    internet: FakeInternet, way: str
) -> None:
    found = await waited(internet, WAYS[way], "User-agent: *\nDisallow: /no\n")
    assert found >= DEFAULT - EPSILON


async def test_the_first_page_waits_the_default_where_there_is_no_file(
    internet: FakeInternet,
) -> None:
    found = await waited(internet, _embedded, Page("gone", status=404))
    assert found >= DEFAULT - EPSILON


@pytest.mark.parametrize(
    "settings",
    [
        {"pacing": {"default_interval": DEFAULT, "min_interval": 7.0}},
        {"host": [{"match": "a.test", "interval": 7.0}]},
        {"pacing": {"default_interval": DEFAULT, "latency_factor": 1.0, "latency_floor": 7.0}},
    ],
)
async def test_the_first_page_waits_at_least_the_interval_of_the_operator(
    internet: FakeInternet, settings: dict[str, Any]
) -> None:
    text = "User-agent: *\nCrawl-delay: 2\n"
    assert await waited(internet, _session, text, **settings) >= 7.0 - EPSILON


async def test_another_origin_of_the_host_keeps_what_its_own_file_asks_for(
    internet: FakeInternet, clock: VirtualClock, make_gate: MakeGate
) -> None:
    internet.site("a.test").robots("User-agent: *\nCrawl-delay: 20\n")
    internet.site("a.test:8080").robots("User-agent: *\nCrawl-delay: 2\n")
    at: list[float] = []

    async def run() -> None:
        async with make_gate(pacing={"default_interval": DEFAULT}) as gate:
            for url in (URL, "http://a.test:8080/x", URL):
                async with gate.lease(url) as lease:
                    at.append(clock.monotonic())
                    lease.report(status=200)

    await internet.drive(run())
    robots = [request.at for request in internet.requests]
    assert at[1] - robots[1] >= 2.0 - EPSILON
    assert at[2] - at[1] >= 20.0 - EPSILON


async def test_a_file_that_is_refused_and_then_asks_for_little_costs_a_factor_of_two(
    internet: FakeInternet, clock: VirtualClock, make_gate: MakeGate
) -> None:
    site = internet.site("a.test").robots(Page("", status=429, headers={"Retry-After": "5"}))
    at: list[float] = []

    async def run() -> None:
        async with make_gate(pacing={"default_interval": DEFAULT}) as gate:
            await gate.check(URL)
            site.robots("User-agent: *\nCrawl-delay: 0.5\n")
            await clock.sleep(600.0)
            for _ in range(5):
                async with gate.lease(URL) as lease:
                    at.append(clock.monotonic())
                    lease.report(status=200)

    await internet.drive(run())
    assert at[-1] - at[0] == pytest.approx(4 * 1.0, abs=0.01)
