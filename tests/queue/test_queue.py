"""`PoliteQueue` over a real gate and real servers."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from gatekeeper import (
    Decision,
    GateClosed,
    Gatekeeper,
    PoliteQueue,
    VirtualClock,
    polite_session,
    session_gate,
)
from gatekeeper.gate.lease_base import open_leases
from gatekeeper.queue.polite import Turn
from tests.gate_support import QUICK, gate_on, open_config
from tests.internet import FakeInternet

AGENT = "examplebot/1.0 (+https://example.org/bot)"
CONFIG = open_config()


async def test_urls_come_back_when_their_host_is_due(virtual_internet: FakeInternet) -> None:
    internet, clock = virtual_internet, virtual_internet.clock
    assert isinstance(clock, VirtualClock)
    internet.site("slow.test").robots("User-agent: *\nCrawl-delay: 10\n")
    internet.site("quick.test").robots("User-agent: *\nDisallow: /no\nCrawl-delay: 1\n")
    got: list[tuple[str, float]] = []
    denied: list[Decision] = []

    async def crawl() -> None:
        async with gate_on(internet, CONFIG, agent=AGENT, clock=clock) as gate:
            queue = PoliteQueue(gate, maxsize=100, on_denied=denied.append)
            for n in range(3):
                await queue.put(f"http://slow.test/{n}")
                await queue.put(f"http://quick.test/{n}")
            await queue.put("http://quick.test/no")

            async def work() -> None:
                while True:
                    async with await queue.get() as lease:
                        got.append((lease.url, clock.monotonic()))
                        lease.report(status=200)

            worker = asyncio.create_task(work())
            await queue.join()
            worker.cancel()
            with pytest.raises(asyncio.CancelledError):
                await worker

    await internet.drive(crawl())
    assert [url for url, _ in got if "slow" in url] == [f"http://slow.test/{n}" for n in range(3)]
    starts = [at for url, at in got if "slow" in url]
    assert all(after - before >= 10 for before, after in itertools.pairwise(starts))
    assert {url for url, _ in got if "quick" in url} == {f"http://quick.test/{n}" for n in range(3)}
    assert [decision.url for decision in denied] == ["http://quick.test/no"]


async def test_a_lease_got_in_another_task_is_adopted_where_it_is_used(
    internet: FakeInternet,
) -> None:
    site = internet.site("a.test").robots("").page("/x", "mine")
    config = open_config(pacing=QUICK)
    async with polite_session(AGENT, config=config, resolver=internet.resolver) as session:
        queue = PoliteQueue(session_gate(session))
        await queue.put("http://a.test/x")
        # asyncio.wait_for runs it in a task of its own on Python 3.11.
        turn = await asyncio.create_task(queue.get())
        async with turn as lease, session.get(lease.url) as response:
            assert await response.text() == "mine"
        await queue.join()
    assert site.paths == ["/robots.txt", "/x"]


async def test_a_task_that_hands_leases_on_keeps_no_reference_to_them(
    internet: FakeInternet,
) -> None:
    site = internet.site("a.test").robots("")
    config = open_config(pacing=QUICK)
    paths = [f"/{number}" for number in range(20)]
    for path in paths:
        site.page(path, path)
    async with polite_session(AGENT, config=config, resolver=internet.resolver) as session:
        gate = session_gate(session)
        queue = PoliteQueue(gate)
        for path in paths:
            await queue.put(f"http://a.test{path}")

        async def handle(turn: Turn) -> None:
            async with turn as lease, session.get(lease.url) as response:
                assert await response.text() == response.url.path
                assert [one() for one in open_leases.get()] == [lease]
            assert open_leases.get() == ()

        for _ in paths:
            turn = await queue.get()
            assert open_leases.get() == ()
            await asyncio.create_task(handle(turn))
        await queue.join()
        assert isinstance(gate, Gatekeeper)
        assert gate.stats().pacing.in_flight == 0
    assert site.paths == ["/robots.txt", *paths]


async def test_a_lease_that_expired_before_its_use_delays_nobody(
    virtual_internet: FakeInternet,
) -> None:
    internet, clock = virtual_internet, virtual_internet.clock
    internet.site("a.test").robots("User-agent: *\nRequest-rate: 1/2\n")
    config = open_config(pacing={"lease_ttl": 5.0})

    async def run() -> list[str]:
        async with (
            gate_on(internet, config, agent=AGENT, clock=clock) as gate,
            PoliteQueue(gate) as queue,
        ):
            for number in range(2):
                await queue.put(f"http://a.test/{number}")
            turn = await queue.get()
            async with turn:
                await clock.sleep(6.0)  # Its lease expires.
                async with await queue.get() as lease:
                    return [turn.url, lease.url]

    assert await internet.drive(run()) == ["http://a.test/0", "http://a.test/1"]


@pytest.mark.parametrize("known", [False, True])
async def test_a_get_ends_when_the_gate_closes(
    virtual_internet: FakeInternet, *, known: bool
) -> None:
    internet, clock = virtual_internet, virtual_internet.clock
    assert isinstance(clock, VirtualClock)
    internet.site("slow.test").robots("User-agent: *\nCrawl-delay: 10\n")

    async def crawl() -> None:
        gate = gate_on(internet, CONFIG, agent=AGENT, clock=clock)
        async with gate:
            queue = PoliteQueue(gate)
            if known:
                await gate.check("http://slow.test/")
            await queue.put("http://slow.test/1")
            waits = (queue.get(), queue.get(), queue.get(), queue.join())
            waiting = asyncio.gather(*waits, return_exceptions=True)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        closed = clock.monotonic()
        assert [type(result) for result in await waiting] == [GateClosed] * 4
        assert clock.monotonic() - closed < 5
        with pytest.raises(GateClosed):
            await queue.get()
        await queue.close()

    await internet.drive(crawl())
