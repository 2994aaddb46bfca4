"""`PoliteQueue` over a real scheduler and a gate whose decisions the test sets."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gatekeeper.clock import VirtualClock
from gatekeeper.decision import Decision
from gatekeeper.errors import GateClosed, InvalidURL
from gatekeeper.queue.polite import PoliteQueue, Turn
from tests.queue_support import DEFER, DENY, Crawl, FakeGate, page


async def test_each_url_comes_when_its_host_is_due(
    queue: PoliteQueue, crawl: Crawl, clock: VirtualClock
) -> None:
    for number in range(3):
        await queue.put(page("a", number))
        await queue.put(page("b", number))
    crawl.start()
    await clock.elapse(10.0)
    assert sorted(crawl.got, key=lambda item: (item[1], item[0])) == [
        (page("a", 0), 0.0),
        (page("b", 0), 0.0),
        (page("a", 1), 1.0),
        (page("b", 1), 1.0),
        (page("a", 2), 2.0),
        (page("b", 2), 2.0),
    ]


async def test_more_urls_than_fit_in_memory_come_in_order(
    queue: PoliteQueue, crawl: Crawl, clock: VirtualClock
) -> None:
    for number in range(100):
        queue.put_nowait(page("a", number))
    assert queue.stats().overflowed > 90
    crawl.start(3)
    await clock.elapse(120.0)
    assert crawl.urls == [page("a", number) for number in range(100)]


async def test_payloads_come_with_their_urls_from_memory_and_from_the_file(
    queue: PoliteQueue, clock: VirtualClock
) -> None:
    for number in range(100):
        queue.put_nowait(page("a", number), data={"n": number} if number % 2 else (number,))
    assert queue.stats().overflowed > 90
    for number in range(100):
        getting = asyncio.create_task(queue.get())
        await clock.elapse(1.0)
        turn = await getting
        if number % 3 == 0:  # given back unused, and not lost
            await turn.give_back()
            getting = asyncio.create_task(queue.get())
            await clock.elapse(1.0)
            turn = await getting
        expected = {"n": number} if number % 2 else (number,)
        assert turn.data == expected
        async with turn as lease:
            assert lease.data == expected


async def test_priority_goes_first_within_and_across_hosts(
    queue: PoliteQueue, crawl: Crawl, clock: VirtualClock
) -> None:
    await queue.put(page("a", "low"))
    await queue.put(page("b", "low"))
    await queue.put(page("b", "high"), priority=5)
    crawl.start()
    await clock.elapse(5.0)
    assert crawl.urls == [page("b", "high"), page("a", "low"), page("b", "low")]


async def test_a_denied_url_calls_on_denied_and_is_done(
    gate: FakeGate, clock: VirtualClock
) -> None:
    told: list[str] = []

    async def on_denied(decision: Decision) -> None:
        await asyncio.sleep(0)
        told.append(decision.url)

    async with PoliteQueue(gate, on_denied=on_denied) as queue:
        crawl = Crawl(queue, clock)
        for number in range(200):
            gate.said[page("a", number)] = DENY
            await queue.put(page("a", number))
        await queue.put(page("a", "good"))
        crawl.start()
        await clock.elapse(1.0, turns=1000)
        assert len(told) == 200
        assert crawl.got == [(page("a", "good"), 0.0)]  # Refused URLs cost no lease.
        await queue.join()
        await crawl.stop()


async def test_a_url_denied_at_the_grant_is_done(
    gate: FakeGate,
    queue: PoliteQueue,
    crawl: Crawl,
    clock: VirtualClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate.said[page("a", 1)] = DENY
    known = gate.peek
    seen: list[str] = []

    def late(url: str, **how: Any) -> Decision | None:
        seen.append(url)
        return known(url.replace("/1", "/0") if len(seen) == 1 else url, **how)

    monkeypatch.setattr(gate, "peek", late)
    await queue.put(page("a", 1))
    crawl.start()
    await clock.elapse(1.0)
    assert crawl.urls == []
    assert queue.stats().denied == 1


async def test_a_deferred_origin_comes_back_by_itself_and_delays_no_other(
    gate: FakeGate, queue: PoliteQueue, crawl: Crawl, clock: VirtualClock
) -> None:
    gate.said["https://a.example"] = DEFER
    gate.retry_at = clock.wall() + 50.0
    await queue.put(page("a", 0))
    await queue.put(page("a", 1))
    await queue.put(page("b", 0))
    crawl.start()
    await clock.elapse(100.0)
    assert crawl.got == [(page("b", 0), 0.0), (page("a", 0), 50.0), (page("a", 1), 51.0)]


async def test_a_deferral_calls_on_deferred(gate: FakeGate, clock: VirtualClock) -> None:
    gate.said["https://a.example"] = DEFER
    gate.retry_at = clock.wall() + 50.0
    told: list[Decision] = []
    async with PoliteQueue(gate, on_deferred=told.append) as queue:
        await queue.put(page("a", 0))
        await queue.put(page("b", 0))
        crawl = Crawl(queue, clock)
        crawl.start()
        await clock.elapse(40.0)
        assert [one.origin for one in told] == ["https://a.example"]
        assert crawl.urls == [page("b", 0)]
        await crawl.stop()


async def test_a_slow_origin_delays_no_other_host(
    gate: FakeGate, queue: PoliteQueue, crawl: Crawl, clock: VirtualClock
) -> None:
    gate.cold = {"https://slow.example": 30.0, "https://quick.example": 0.1}
    for host in ("slow", "quick", "warm"):
        await queue.put(page(host, 0))
    crawl.start()  # a single worker
    await clock.elapse(40.0)
    assert crawl.got == [
        (page("warm", 0), 0.0),
        (page("quick", 0), 0.1),
        (page("slow", 0), 30.0),
    ]


async def test_a_bounded_number_of_origins_is_asked_for_robots_txt_at_once(
    gate: FakeGate,
    queue: PoliteQueue,
    crawl: Crawl,
    clock: VirtualClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gatekeeper.queue.waits.MAX_ASKING", 100)
    gate.cold = {f"https://h{number}.example": 1.0 for number in range(500)}
    for number in range(500):
        await queue.put(page(f"h{number}", 0))
    crawl.start()
    await clock.elapse(30.0)
    assert gate.most_asking <= 100
    assert len(crawl.got) == 500


async def test_put_waits_for_room(gate: FakeGate, clock: VirtualClock) -> None:
    async with PoliteQueue(gate, maxsize=2) as queue:
        await queue.put(page("a", 0))
        await queue.put(page("a", 1))
        assert queue.full()
        with pytest.raises(asyncio.QueueFull):
            queue.put_nowait(page("a", 2))
        waiting = asyncio.create_task(queue.put(page("a", 2)))
        await clock.settle()
        assert not waiting.done()
        async with await queue.get():
            await clock.settle()
            assert waiting.done()
        assert queue.qsize() == 2


async def test_a_cancelled_put_passes_its_wake_up_on(gate: FakeGate, clock: VirtualClock) -> None:
    async with PoliteQueue(gate, maxsize=1) as queue:
        await queue.put(page("a", 0))
        first = asyncio.create_task(queue.put(page("b", 1)))
        second = asyncio.create_task(queue.put(page("c", 2)))
        await clock.settle()
        turn = await queue.get()  # wakes the first
        first.cancel()
        await clock.settle()
        assert second.done()
        async with turn:
            pass


async def test_join_waits_until_every_lease_is_ended(
    queue: PoliteQueue, crawl: Crawl, clock: VirtualClock
) -> None:
    await queue.put(page("a", 0))
    await queue.put(page("a", 1))
    joined = asyncio.create_task(queue.join())
    crawl.start(hold=5.0)
    await clock.elapse(10.0)
    assert not joined.done()
    await clock.elapse(3.0)
    assert joined.done()


async def test_a_cancelled_get_loses_neither_the_url_nor_the_lease(
    queue: PoliteQueue, crawl: Crawl, clock: VirtualClock
) -> None:
    await queue.put(page("a", 0))
    async with await queue.get():
        pass
    await queue.put(page("a", 1))
    getting = asyncio.create_task(queue.get())
    await clock.settle()
    getting.cancel()
    await asyncio.gather(getting, return_exceptions=True)
    assert queue.qsize() == 1
    crawl.start()
    await clock.elapse(5.0)
    assert crawl.got == [(page("a", 1), 1.0)]


async def test_a_url_given_back_comes_first_again(
    queue: PoliteQueue, crawl: Crawl, clock: VirtualClock
) -> None:
    for number in range(3):
        await queue.put(page("a", number))
    turn: Turn = await queue.get()
    await turn.give_back()
    crawl.start()
    await clock.elapse(10.0)
    assert crawl.urls == [page("a", number) for number in range(3)]
    await queue.join()


async def test_every_slot_of_a_host_is_used(make: Any, clock: VirtualClock) -> None:
    gate = FakeGate(await make(concurrency=3), clock)
    gate.interval = 0.0
    async with PoliteQueue(gate) as queue:
        crawl = Crawl(queue, clock)
        for number in range(6):
            await queue.put(page("a", number))
        crawl.start(10, hold=2.0)
        await clock.elapse(5.0)
        assert [at for _, at in crawl.got] == [0.0, 0.0, 0.0, 2.0, 2.0, 2.0]
        await crawl.stop()


async def test_a_queue_gets_its_share_of_a_host_that_other_tasks_use(
    gate: FakeGate, queue: PoliteQueue, crawl: Crawl, clock: VirtualClock
) -> None:
    async def other() -> None:
        while True:
            lease = await gate.acquire(page("a", "other"))
            lease.leave()

    others = [asyncio.create_task(other()) for _ in range(3)]
    for number in range(5):
        await queue.put(page("a", number))
    crawl.start()
    await clock.elapse(60.0)
    assert len(crawl.got) == 5
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


async def test_two_origins_of_a_host_share_its_clock(
    queue: PoliteQueue, crawl: Crawl, clock: VirtualClock
) -> None:
    await queue.put("https://a.example/s")
    await queue.put("http://a.example/p")
    crawl.start(2)
    await clock.elapse(5.0)
    assert crawl.got == [("https://a.example/s", 0.0), ("http://a.example/p", 1.0)]


async def test_text_that_is_no_url_is_refused_at_once(queue: PoliteQueue) -> None:
    with pytest.raises(InvalidURL):
        await queue.put("mailto:a@example.org")
    assert queue.empty()


async def test_close_ends_every_waiting_get_put_and_join(
    gate: FakeGate, clock: VirtualClock
) -> None:
    queue = PoliteQueue(gate, maxsize=1)
    gate.cold = {"https://a.example": 1000.0}
    await queue.put(page("a", 0))
    getting = asyncio.create_task(queue.get())
    putting = asyncio.create_task(queue.put(page("b", 0)))
    joining = asyncio.create_task(queue.join())
    await clock.settle()
    await queue.close()
    await queue.close()
    for task in (getting, putting):
        with pytest.raises(GateClosed):
            await task
    await joining


async def test_a_hundred_hosts_and_many_workers_take_each_url_once(
    gate: FakeGate, queue: PoliteQueue, crawl: Crawl, clock: VirtualClock
) -> None:
    wanted = {page(f"h{host}", number) for host in range(100) for number in range(10)}
    for url in sorted(wanted):
        await queue.put(url)
    crawl.start(30, hold=0.2)
    await clock.elapse(60.0)
    assert sorted(crawl.urls) == sorted(wanted)
    await queue.join()
    assert queue.stats().origins == 0
