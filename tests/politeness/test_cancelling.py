"""A lease or request that is cancelled at any iteration of the loop leaves consistent state."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import aiohttp
import pytest

from gatekeeper import Gatekeeper, GateStats, PoliteQueue
from gatekeeper.clock import VirtualClock
from gatekeeper.testing import Manners, judge
from tests.internet import Drip, FakeInternet, Page, redirect
from tests.politeness.conftest import MakeGate
from tests.politeness.world import WALL

MANNERS = Manners(delay=2.0)
FIRST, SECOND = "http://a.test/first", "http://a.test/second"
TURNS = [*range(60), *range(60, 400, 7)]
"""Iterations of the loop after which the first of two is cancelled: from its start to its end."""


@pytest.fixture
def site(internet: FakeInternet) -> None:
    site = internet.site("a.test").on("/robots.txt", Page(MANNERS.text(), delay=0.5))
    site.on("/first", redirect("/drip")).on("/drip", Drip("drop", size=2, every=0.7))
    site.page("/second", "second")


async def cancelled(
    gate: Gatekeeper,
    first: Coroutine[Any, Any, None],
    second: Coroutine[Any, Any, None],
    turns: int,
) -> GateStats:
    """Run both, cancel the first after `turns` iterations, and wait for the other."""
    unlucky, lucky = asyncio.create_task(first), asyncio.create_task(second)
    for _ in range(turns):
        if unlucky.done():
            break
        await asyncio.sleep(0)
    unlucky.cancel()
    await asyncio.gather(unlucky, return_exceptions=True)
    await lucky
    return gate.stats()


def is_right(stats: GateStats, internet: FakeInternet) -> None:
    assert (stats.pacing.in_flight, stats.pacing.waiting) == (0, 0)
    assert (stats.directory.in_flight, stats.directory.waiting) == (0, 0)
    assert judge(internet.requests, {"http://a.test": MANNERS}, wall=WALL) == []


@pytest.mark.usefixtures("site")
@pytest.mark.parametrize("turns", TURNS)
async def test_a_cancelled_lease_is_granted_to_the_next(
    internet: FakeInternet, clock: VirtualClock, make_gate: MakeGate, turns: int
) -> None:
    async def hold(gate: Gatekeeper, url: str) -> None:
        async with gate.lease(url) as lease:
            await clock.sleep(0.5)
            lease.report(status=200)

    async def run() -> GateStats:
        async with make_gate() as gate:
            return await cancelled(gate, hold(gate, FIRST), hold(gate, SECOND), turns)

    is_right(await internet.drive(run(), limit=60.0), internet)


@pytest.mark.usefixtures("site")
@pytest.mark.parametrize("turns", TURNS)
async def test_a_cancelled_request_frees_its_lease_for_the_next(
    internet: FakeInternet, make_gate: MakeGate, turns: int
) -> None:
    async def get(session: aiohttp.ClientSession, url: str) -> None:
        async with session.get(url) as response:
            await response.read()

    async def run() -> GateStats:
        async with (
            make_gate() as gate,
            aiohttp.ClientSession(
                connector=gate.parts.make_connector(), middlewares=(gate.middleware,)
            ) as session,
        ):
            return await cancelled(gate, get(session, FIRST), get(session, SECOND), turns)

    is_right(await internet.drive(run(), limit=60.0), internet)
    assert internet.requests[-1].path in ("/second", "/drip")


@pytest.mark.usefixtures("site")
@pytest.mark.parametrize("turns", TURNS)
async def test_a_cancelled_get_leaves_url_and_lease_to_the_next(
    internet: FakeInternet, clock: VirtualClock, make_gate: MakeGate, turns: int
) -> None:
    got: list[str] = []

    async def work(queue: PoliteQueue, count: int) -> None:
        for _ in range(count):
            async with await queue.get() as lease:
                got.append(lease.url)
                lease.report(status=200)

    async def run() -> GateStats:
        async with make_gate() as gate, PoliteQueue(gate) as queue:
            for url in (FIRST, SECOND):
                await queue.put(url)

            async def rest() -> None:
                await clock.sleep(5.0)
                await work(queue, 2 - len(got))
                await queue.join()

            return await cancelled(gate, work(queue, 1), rest(), turns)

    is_right(await internet.drive(run(), limit=60.0), internet)
    assert sorted(got) == [FIRST, SECOND]
