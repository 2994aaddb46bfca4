"""`PoliteQueue` over every kind of gate: the same URLs, in the same order, at the same times."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from gatekeeper import Decision, LeaseTimeout, PoliteQueue
from tests.internet import FakeInternet, Page

DENYING = "User-agent: *\nDisallow: /no\nCrawl-delay: 5\n"


class Crawl:
    """Workers of one queue, and a log of which URLs they got at which time."""

    def __init__(self, queue: PoliteQueue, clock: Any) -> None:
        self.queue = queue
        self.clock = clock
        self.got: list[tuple[str, float]] = []
        self.data: list[Any] = []

    async def work(self) -> None:
        while True:
            async with await self.queue.get() as lease:
                self.got.append((lease.url, self.clock.monotonic()))
                self.data.append(lease.data)
                lease.report(status=200)

    async def run(self, workers: int = 1) -> None:
        tasks = [asyncio.create_task(self.work()) for _ in range(workers)]
        await self.queue.join()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_urls_of_a_queue_come_in_order_at_the_pace_of_their_host(
    net: FakeInternet, open_gate: Any
) -> None:
    net.site("slow.test").robots("User-agent: *\nCrawl-delay: 30\n")
    net.site("quick.test").robots("User-agent: *\nCrawl-delay: 1\n")
    gate = await open_gate(net)

    async def crawl() -> list[tuple[str, float]]:
        async with PoliteQueue(gate) as queue:
            for n in range(4):
                await queue.put(f"http://slow.test/{n}")
                await queue.put(f"http://quick.test/{n}")
            run = Crawl(queue, net.clock)
            await run.run(2)
            return run.got

    got = await net.drive(crawl(), limit=1e4)
    for host, interval in (("slow", 30.0), ("quick", 1.0)):
        starts = [at for url, at in got if host in url]
        assert [url for url, _ in got if host in url] == [
            f"http://{host}.test/{n}" for n in range(4)
        ]
        gaps = [after - before for before, after in itertools.pairwise(starts)]
        assert min(gaps) >= interval - 1e-9
        assert max(gaps) < interval + 2.5  # a remote gate receives the end, and is polled
    assert [url for url, _ in got if "quick" in url] == [url for url, _ in got][1:5] or (
        got[-1][0] == "http://slow.test/3"
    )


async def test_a_higher_priority_goes_first(net: FakeInternet, open_gate: Any) -> None:
    net.site("a.test").robots("User-agent: *\nCrawl-delay: 5\n")
    gate = await open_gate(net)

    async def crawl() -> list[str]:
        await gate.check("http://a.test/")
        async with PoliteQueue(gate) as queue:
            await queue.put("http://a.test/low", priority=-1)
            await queue.put("http://a.test/mid")
            await queue.put("http://a.test/high", priority=7)
            run = Crawl(queue, net.clock)
            await run.run()
            return [url.rpartition("/")[2] for url, _ in run.got]

    assert await net.drive(crawl(), limit=1e4) == ["high", "mid", "low"]


async def test_a_denied_url_goes_to_on_denied_and_is_done(
    net: FakeInternet, open_gate: Any
) -> None:
    net.site("a.test").robots(DENYING)
    gate = await open_gate(net)
    denied: list[Decision] = []

    async def crawl() -> list[str]:
        async with PoliteQueue(gate, on_denied=denied.append) as queue:
            for path in ("no/1", "yes", "no/2"):
                await queue.put(f"http://a.test/{path}")
            run = Crawl(queue, net.clock)
            await run.run()
            assert queue.stats().denied == 2
            return [url for url, _ in run.got]

    assert await net.drive(crawl(), limit=1e4) == ["http://a.test/yes"]
    assert [decision.url for decision in denied] == ["http://a.test/no/1", "http://a.test/no/2"]
    assert all(decision.rule is not None and decision.rule.line == 2 for decision in denied)


async def test_a_deferred_url_comes_back_at_its_retry_at(net: FakeInternet, open_gate: Any) -> None:
    net.site("down.test").on("/robots.txt", Page("", status=503), Page("User-agent: *\nAllow: /\n"))
    net.site("up.test").robots("")
    gate = await open_gate(net)

    async def crawl() -> tuple[Decision, list[tuple[str, float]], list[Any]]:
        decision = await gate.check("http://down.test/x")
        async with PoliteQueue(gate) as queue:
            await queue.put("http://down.test/x", data={"depth": 3})
            await queue.put("http://up.test/y", data="second")
            run = Crawl(queue, net.clock)
            await run.run()
            return decision, run.got, run.data

    decision, got, data = await net.drive(crawl(), limit=1e5)
    assert [url for url, _ in got] == ["http://up.test/y", "http://down.test/x"]
    assert data == ["second", {"depth": 3}]
    assert decision.retry_at is not None
    offset = net.clock.wall() - net.clock.monotonic()
    late = got[1][1] + offset - decision.retry_at.timestamp()
    assert 0.0 <= late < 15.0


async def test_a_cancelled_get_loses_neither_the_url_nor_its_data_nor_the_lease(
    net: FakeInternet, open_gate: Any
) -> None:
    net.site("a.test").robots("User-agent: *\nCrawl-delay: 20\n")
    gate = await open_gate(net)

    async def crawl() -> list[Any]:
        async with PoliteQueue(gate) as queue:
            for n in range(3):
                await queue.put(f"http://a.test/{n}", data=n)
            for _ in range(8):  # during the look-up, in the queue, and just before the grant
                waiting = asyncio.create_task(queue.get())
                await net.clock.sleep(3.0)
                if waiting.done():
                    await waiting.result().give_back()
                waiting.cancel()
                await asyncio.wait([waiting])
            assert queue.qsize() == 3
            run = Crawl(queue, net.clock)
            await run.run()
            return [*run.data, *(url for url, _ in run.got)]

    urls = [f"http://a.test/{n}" for n in range(3)]
    assert await net.drive(crawl(), limit=1e5) == [0, 1, 2, *urls]


async def test_join_returns_when_every_url_is_done_or_denied(
    net: FakeInternet, open_gate: Any
) -> None:
    net.site("a.test").robots(DENYING)
    gate = await open_gate(net)

    async def crawl() -> None:
        async with PoliteQueue(gate) as queue:
            await queue.put("http://a.test/x")
            await queue.put("http://a.test/no")
            joining = asyncio.create_task(queue.join())
            turn = await queue.get()
            assert not joining.done()
            async with turn:
                await net.clock.sleep(1.0)
                assert not joining.done()
            waiting = asyncio.create_task(queue.get())
            await (
                joining
            )  # the other URL is denied: the `get` that finds out returns nothing for it
            assert not waiting.done()
            waiting.cancel()
            await asyncio.wait([waiting])

    await net.drive(crawl(), limit=1e4)


async def test_many_hosts_keep_their_own_pace(net: FakeInternet, open_gate: Any) -> None:
    """Slow hosts, more than may wait at the same time, delay no fast one."""
    for n in range(110):
        net.site(f"s{n}.test").robots("User-agent: *\nCrawl-delay: 600\n")
    net.site("quick.test").robots("User-agent: *\nCrawl-delay: 1\n")
    gate = await open_gate(net)

    async def crawl() -> list[tuple[str, float]]:
        async with PoliteQueue(gate) as queue:
            for n in range(110):
                await queue.put(f"http://s{n}.test/1")
                await queue.put(f"http://s{n}.test/2")
            for n in range(60):
                await queue.put(f"http://quick.test/{n}")
            run = Crawl(queue, net.clock)
            await run.run(8)
            await net.clock.sleep(60.0)  # the last reports travel
            return run.got

    got = await net.drive(crawl(), limit=1e5)
    began = min(at for _, at in got)
    assert len(got) == 280
    assert max(at for url, at in got if "quick" in url) - began < 200.0
    assert max(at for _, at in got) - began < 1_220.0  # a robots.txt and two pages


async def test_a_get_of_a_task_that_holds_the_only_host_is_refused_at_once(
    net: FakeInternet, open_gate: Any
) -> None:
    """Nothing else would end the wait: the message names the wanted URL and the held one."""
    net.site("a.test").robots("User-agent: *\nCrawl-delay: 2\n")
    gate = await open_gate(net)

    async def crawl() -> tuple[str, float]:
        async with PoliteQueue(gate) as queue:
            for name in ("first", "second"):
                await queue.put(f"http://a.test/{name}")
            async with await queue.get() as lease:
                lease.report(status=200)
                before = net.clock.monotonic()
                with pytest.raises(LeaseTimeout) as caught:
                    await queue.get()
                after = net.clock.monotonic() - before
            async with await queue.get() as lease:
                assert lease.url == "http://a.test/second"
            return str(caught.value), after

    text, after = await net.drive(crawl(), limit=60.0)
    assert text.startswith("http://a.test/second would wait for http://a.test/first, which this")
    assert after < 1.0


async def test_a_get_of_a_child_of_the_task_that_holds_the_host_ends_by_own_wait(
    net: FakeInternet, open_gate: Any
) -> None:
    net.site("a.test").robots("")
    gate = await open_gate(net)

    async def crawl() -> float:
        async with PoliteQueue(gate) as queue:
            for name in ("first", "second"):
                await queue.put(f"http://a.test/{name}")
            async with await queue.get():
                before = net.clock.monotonic()
                with pytest.raises(LeaseTimeout, match=r"own_wait.*http://a\.test/first"):
                    await asyncio.create_task(queue.get())
                return net.clock.monotonic() - before

    assert 25.0 <= await net.drive(crawl(), limit=200.0) <= 60.0
