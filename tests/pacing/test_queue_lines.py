"""Hosts that other tasks ask too: no `get` waits for them while another host is due."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from gatekeeper.clock import VirtualClock
from gatekeeper.errors import LeaseTimeout
from gatekeeper.queue.polite import PoliteQueue
from gatekeeper.queue.waits import HOLD, LAST_PAUSE
from tests.queue_support import Crawl, FakeGate, FakeLease, page

Others = Callable[..., None]


@pytest.fixture
async def others(gate: FakeGate, clock: VirtualClock) -> AsyncIterator[Others]:
    """Start tasks that ask a host as often as they can, holding each lease for `hold` seconds."""
    tasks: list[asyncio.Task[None]] = []

    async def ask(host: str, hold: float, times: int | None) -> None:
        for number in itertools.count() if times is None else range(times):
            lease = await gate.acquire(page(host, f"other-{number}"))
            try:
                await clock.sleep(hold)
            finally:
                lease.leave()

    def start(host: str, count: int, hold: float, times: int | None = None) -> None:
        tasks.extend(asyncio.create_task(ask(host, hold, times)) for _ in range(count))

    yield start
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_getter_takes_whichever_host_is_ready_first(
    queue: PoliteQueue, crawl: Crawl, clock: VirtualClock, others: Others
) -> None:
    others("busy", 3, hold=4.0)
    await clock.settle()
    for number in range(5):
        await queue.put(page("busy", number))
    crawl.start()  # a single worker
    for number in range(40):
        await clock.elapse(1.0)
        await queue.put(page("quiet", number))
        await clock.settle()
        assert crawl.urls[-1] == page("quiet", number)
    assert any("busy" in url for url in crawl.urls), "nor is the busy host forgotten"


async def test_a_single_worker_that_is_never_idle_gets_a_lease_of_a_busy_host(
    gate: FakeGate, queue: PoliteQueue, crawl: Crawl, clock: VirtualClock, others: Others
) -> None:
    gate.interval = 0.0
    others("busy", 3, hold=0.5)
    await clock.settle()
    for number in range(3):
        await queue.put(page("busy", number))
    for number in range(200):
        await queue.put(page(f"quiet{number % 8}", number))
    crawl.start(hold=1.0)
    await clock.elapse(100.0)
    assert len(crawl.urls) > 95
    assert len([url for url in crawl.urls if "busy" in url]) == 3


async def test_a_lease_that_no_getter_takes_goes_to_others_that_wait_for_the_host(
    queue: PoliteQueue, clock: VirtualClock, others: Others, gate: FakeGate
) -> None:
    others("busy", 1, hold=0.5, times=3)
    await clock.settle()
    await queue.put(page("busy", 0))
    with pytest.raises(asyncio.QueueEmpty):
        queue.get_nowait()
    await clock.elapse(2.0)
    with pytest.raises(asyncio.QueueEmpty):
        queue.get_nowait()  # Due, but taken by another: it waits in the scheduler from now on.
    await clock.elapse(1.0 + HOLD)
    before = gate.scheduler.stats().granted
    await clock.elapse(10.0)
    assert gate.scheduler.stats().in_flight == 0
    assert gate.scheduler.stats().granted >= before
    async with await queue.get() as lease:
        assert isinstance(lease, FakeLease)
    await queue.join()


@pytest.mark.parametrize("how", ["block", "pause"])
async def test_a_reserved_lease_is_not_used_once_its_host_is_blocked(
    queue: PoliteQueue, clock: VirtualClock, others: Others, gate: FakeGate, how: str
) -> None:
    others("busy", 1, hold=0.5, times=3)
    await clock.settle()
    await queue.put(page("busy", 0))
    scheduler, host = gate.scheduler, "busy.example"
    while not queue._waits._ready_leases:
        with pytest.raises(asyncio.QueueEmpty):
            queue.get_nowait()
        await clock.elapse(0.5)
    if how == "block":
        scheduler.block(host, clock.wall() + 60.0)
    else:
        scheduler.pause(host)
    with pytest.raises(asyncio.QueueEmpty):
        queue.get_nowait()
    await clock.elapse(59.0)
    assert scheduler.stats().in_flight == 0
    getting = asyncio.create_task(queue.get())
    await clock.elapse(0.5)
    assert not getting.done()
    scheduler.pause(host, paused=False)
    for _ in range(20):
        await clock.elapse(0.5)
    assert getting.done()
    async with await getting as lease:
        assert lease.grant.url == page("busy", 0)
    await queue.join()


async def test_the_more_important_url_goes_first_though_another_stands_in_line(
    queue: PoliteQueue, crawl: Crawl, clock: VirtualClock, others: Others
) -> None:
    others("busy", 1, hold=3.0)
    await clock.settle()
    await queue.put(page("busy", "low"))
    crawl.start()
    await clock.elapse(5.0)
    assert crawl.got == []
    await queue.put(page("busy", "high"), priority=1)
    await clock.elapse(30.0)
    assert crawl.urls == [page("busy", "high"), page("busy", "low")]


async def test_closing_gives_back_leases_that_the_queue_reserved(
    gate: FakeGate, clock: VirtualClock, others: Others
) -> None:
    others("busy", 1, hold=1.0, times=3)
    await clock.settle()
    async with PoliteQueue(gate) as queue:
        for number in range(3):
            await queue.put(page("busy", number))
        for _ in range(10):
            with pytest.raises(asyncio.QueueEmpty):
                queue.get_nowait()
            await clock.elapse(0.25)
    await clock.elapse(20.0)
    assert gate.scheduler.stats().in_flight == 0
    assert gate.scheduler.stats().waiting == 0


class StubbornGate(FakeGate):
    """Reports that a host is due, but refuses its lease until `relents`."""

    relents = False
    refused = 0

    async def acquire(self, url: str, **how: Any) -> FakeLease:
        if self.relents:
            return await super().acquire(url, **how)
        self.refused += 1
        # A loop without an await would never end.
        assert self.refused < 1000, "tried again and again at once"
        raise LeaseTimeout(url, "no")

    def when_due(
        self, host: str, callback: Callable[[], object], *, priority: float = 0
    ) -> Callable[[], None]:
        callback()
        return lambda: None


async def test_a_lease_refused_for_a_host_that_seems_free_is_not_asked_for_again_at_once(
    make: Any, clock: VirtualClock
) -> None:
    gate = StubbornGate(await make(), clock)
    async with PoliteQueue(gate) as queue:
        await queue.put(page("a", 0))
        await queue.put(page("b", 0))
        crawl = Crawl(queue, clock)
        crawl.start(2)
        await clock.elapse(60.0)
        assert gate.refused < 100
        gate.relents = True
        await clock.elapse(LAST_PAUSE)
        assert sorted(crawl.urls) == [page("a", 0), page("b", 0)]
        await crawl.stop()


async def test_more_origins_than_may_wait_at_once_are_all_served(
    queue: PoliteQueue,
    crawl: Crawl,
    clock: VirtualClock,
    others: Others,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gatekeeper.queue.waits.MAX_WAITING", 2)
    for number in range(6):
        others(f"h{number}", 1, hold=1.0, times=20)
    await clock.settle()
    for number in range(6):
        await queue.put(page(f"h{number}", 0))
    crawl.start(2)
    await clock.elapse(120.0)
    assert len(crawl.urls) == 6
