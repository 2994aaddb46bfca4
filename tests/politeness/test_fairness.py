"""One host with very many URLs delays none of hundreds of others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from gatekeeper import Gatekeeper, PoliteQueue
from gatekeeper.clock import VirtualClock
from tests.effort import LONG
from tests.internet import FakeInternet
from tests.politeness.conftest import MakeGate

OTHERS = 1000 if LONG else 300
MANY = 100_000 if LONG else 30_000
"""More URLs than fit in memory."""
SOON = 2.5
"""Virtual seconds: robots.txt, and one interval after it."""


@pytest.fixture
async def internet(clock: VirtualClock) -> AsyncIterator[FakeInternet]:
    """An internet in which only pacing takes time."""
    async with FakeInternet(clock=clock) as net:
        yield net


def fill(internet: FakeInternet) -> list[str]:
    internet.site("many.test").robots("")
    for number in range(OTHERS):
        internet.site(f"o{number}.test").robots("")
    return [f"http://o{number}.test/" for number in range(OTHERS)]


async def test_a_queue_gives_a_lease_of_every_host_when_it_is_due(
    internet: FakeInternet, clock: VirtualClock, make_gate: MakeGate
) -> None:
    others = fill(internet)
    got: dict[str, float] = {}
    done = asyncio.Event()

    async def work(queue: PoliteQueue) -> None:
        while True:
            async with await queue.get() as lease:
                got[lease.url] = clock.monotonic()
                lease.report(status=200)
            if got.keys() >= set(others) and not done.is_set():
                done.set()

    async def run() -> None:
        async with make_gate() as gate, PoliteQueue(gate) as queue:
            for number in range(MANY):
                queue.put_nowait(f"http://many.test/{number}")
            for url in others:
                queue.put_nowait(url)
            workers = [asyncio.create_task(work(queue)) for _ in range(4)]
            await done.wait()
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    await internet.drive(run(), limit=60.0)
    assert max(got[url] for url in others) < SOON
    assert any("many" in url for url in got), "nor is the host itself forgotten"


async def test_many_waiters_at_one_host_delay_no_other_host(
    internet: FakeInternet, clock: VirtualClock, make_gate: MakeGate
) -> None:
    others = fill(internet)

    async def visit(gate: Gatekeeper, url: str) -> float:
        async with gate.lease(url) as lease:
            lease.report(status=200)
            return clock.monotonic()

    async def run() -> list[float]:
        async with make_gate() as gate:
            line = [asyncio.create_task(visit(gate, "http://many.test/")) for _ in range(2000)]
            times = await asyncio.gather(*(visit(gate, url) for url in others))
            for task in line:
                task.cancel()
            await asyncio.gather(*line, return_exceptions=True)
            assert gate.stats().pacing.waiting == 0
            return times

    assert max(await internet.drive(run(), limit=60.0)) < SOON
