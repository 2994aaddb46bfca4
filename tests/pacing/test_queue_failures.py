"""Failures of a gate, a callback or the file: the queue loses no URL, lease or error."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from gatekeeper.clock import VirtualClock, utc
from gatekeeper.decision import Decision, Reason
from gatekeeper.errors import GateClosed, StorageError
from gatekeeper.queue.polite import PoliteQueue
from tests.queue_support import DEFER, DENY, Crawl, FakeGate, FakeLease, page

# --- the scratch file ---------------------------------------------------------------------


async def test_a_scratch_file_that_fails_once_costs_no_url(
    queue: PoliteQueue, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(20):
        await queue.put(page("a", number))
    failures: list[StorageError] = []
    got: list[str] = []
    connect = sqlite3.connect

    def once(*how: Any, **options: Any) -> sqlite3.Connection:
        if failures:
            return connect(*how, **options)
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(sqlite3, "connect", once)

    async def work() -> None:
        while True:
            try:
                async with await queue.get() as lease:
                    got.append(lease.grant.url)
            except StorageError as error:
                failures.append(error)

    worker = asyncio.create_task(work())
    await clock.elapse(60.0)
    worker.cancel()
    await asyncio.gather(worker, return_exceptions=True)
    assert got == [page("a", number) for number in range(20)]
    assert [str(error).count("disk I/O error") for error in failures] == [1]
    await queue.join()


async def test_a_put_that_can_not_be_stored_is_refused_and_not_counted(
    gate: FakeGate, clock: VirtualClock, tmp_path: Path
) -> None:
    path = tmp_path / "missing" / "scratch.sqlite"
    async with PoliteQueue(gate, path=path, in_memory=1) as queue:
        kept: list[str] = []

        async def fill() -> None:
            for number in range(1500):
                await queue.put(page("a", number))
                kept.append(page("a", number))

        with pytest.raises(StorageError, match=str(path)):
            await fill()
        assert kept
        stats = queue.stats()
        assert (stats.size, stats.unfinished) == (len(kept), len(kept))
        await queue.put(page("b", 0))  # In memory, so it needs no file.
        path.parent.mkdir()
        gate.interval = 0.0
        crawl = Crawl(queue, clock)
        crawl.start()
        await clock.elapse(60.0, turns=5000)
        assert [url for url in crawl.urls if "a.example" in url] == kept
        await queue.join()
        await crawl.stop()


# --- a gate that fails --------------------------------------------------------------------


async def test_an_error_of_the_gate_reaches_the_getter_and_costs_no_url(
    gate: FakeGate, queue: PoliteQueue, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(gate, "peek", _raising(OSError("what is this")))
        await queue.put(page("a", 0))
        with pytest.raises(OSError, match="what is this"):
            await queue.get()
    getting = asyncio.create_task(queue.get())
    await clock.elapse(1.0)
    async with getting.result():
        pass
    await queue.join()


async def test_an_error_while_asking_for_robots_txt_only_delays_its_origin(
    make: Any, clock: VirtualClock
) -> None:
    class Broken(FakeGate):
        errors = 0

        async def check(self, url: str, **how: Any) -> Decision:
            if not self.errors:
                self.errors += 1
                raise RuntimeError("a bug")
            return await super().check(url, **how)

    gate = Broken(await make(), clock)
    gate.cold = {"https://a.example": 1.0}
    async with PoliteQueue(gate) as queue:
        await queue.put(page("a", 0))
        crawl = Crawl(queue, clock)
        crawl.start()
        await clock.elapse(120.0)
        assert gate.errors == 1
        assert crawl.urls == [page("a", 0)]
        await crawl.stop()


def _raising(error: Exception) -> Any:
    def call(*_args: object, **_how: object) -> None:
        raise error

    return call


async def test_a_deferring_gate_is_asked_again_at_its_retry_at(
    make: Any, clock: VirtualClock
) -> None:
    class Overloaded(FakeGate):
        checks = 0
        until = 0.0

        async def check(self, url: str, **how: Any) -> Decision:
            self.checks += 1
            assert self.checks < 5000, "asked again and again at once"
            if clock.wall() >= self.until:
                return await super().check(url, **how)
            return Decision(
                verdict=DEFER,
                reason=Reason.OVERLOADED,
                url=url,
                origin=url,
                user_agent="bot",
                retry_at=utc(clock.wall() + 1.0),
            )

    gate = Overloaded(await make(), clock)
    gate.until = clock.wall() + 30.0
    gate.cold = {f"https://h{number}.example": 0.1 for number in range(20)}
    async with PoliteQueue(gate) as queue:
        for number in range(20):
            await queue.put(page(f"h{number}", 0))
        crawl = Crawl(queue, clock)
        crawl.start()
        await clock.elapse(30.0)
        assert gate.checks <= 20 * 30
        await clock.elapse(30.0)
        assert len(crawl.urls) == 20
        await crawl.stop()


async def test_an_origin_forgotten_as_soon_as_it_is_learnt_is_not_asked_in_a_loop(
    gate: FakeGate, queue: PoliteQueue, crawl: Crawl, clock: VirtualClock
) -> None:
    checks = 0

    def unknown(url: str, **how: Any) -> None:
        nonlocal checks
        checks += 1
        assert checks < 1000, "asked again and again at once"

    gate.peek = unknown  # type: ignore[assignment]
    gate.answer = lambda url: Decision(  # type: ignore[method-assign]
        verdict=DENY, reason=Reason.RULE, url=url, origin=url, user_agent="bot"
    )
    await queue.put(page("a", 0))
    crawl.start()
    await clock.elapse(60.0)
    assert 2 < checks < 100


# --- who is told of denied URLs -----------------------------------------------------------


@pytest.fixture
def denying(gate: FakeGate) -> FakeGate:
    gate.said["https://no.example"] = DENY
    return gate


async def test_an_error_of_on_denied_is_raised_once_and_the_url_is_done(
    denying: FakeGate, clock: VirtualClock
) -> None:
    told: list[str] = []

    def on_denied(decision: Decision) -> None:
        told.append(decision.url)
        raise OSError("disk full")

    async with PoliteQueue(denying, on_denied=on_denied) as queue:
        await queue.put(page("no", 0))
        with pytest.raises(OSError, match="disk full"):
            await queue.get()
        assert told == [page("no", 0)]
        assert queue.stats().unfinished == 0
        await queue.put(page("a", 0))
        turn = await queue.get()
        joining = asyncio.create_task(queue.join())
        await clock.settle()
        assert not joining.done()
        async with turn:
            pass
        await joining


async def test_a_cancelled_get_does_not_cut_on_denied_short(
    denying: FakeGate, clock: VirtualClock
) -> None:
    told: list[str] = []

    async def on_denied(decision: Decision) -> None:
        await clock.sleep(5.0)
        told.append(decision.url)

    async with PoliteQueue(denying, on_denied=on_denied) as queue:
        await queue.put(page("no", 0))
        getting = asyncio.create_task(queue.get())
        await clock.elapse(1.0)
        getting.cancel()
        await asyncio.gather(getting, return_exceptions=True)
        joining = asyncio.create_task(queue.join())
        await clock.elapse(1.0)
        assert not joining.done(), "it is done when it was told"
        await clock.elapse(5.0)
        assert told == [page("no", 0)]
        assert joining.done()
        assert queue.stats().unfinished == 0


async def test_an_error_of_an_asynchronous_on_denied_is_raised_by_the_next_get(
    denying: FakeGate, clock: VirtualClock
) -> None:
    async def on_denied(decision: Decision) -> None:
        await clock.sleep(5.0)
        raise OSError("disk full")

    async with PoliteQueue(denying, on_denied=on_denied) as queue:
        await queue.put(page("no", 0))
        getting = asyncio.create_task(queue.get())
        await clock.elapse(6.0)
        with pytest.raises(OSError, match="disk full"):
            await getting
        await queue.join()


async def test_a_slow_on_denied_delays_no_lease_and_is_bounded(
    denying: FakeGate, clock: VirtualClock
) -> None:
    telling = most = told = 0

    async def on_denied(decision: Decision) -> None:
        nonlocal telling, most, told
        telling += 1
        most = max(most, telling)
        await clock.sleep(10.0)
        telling -= 1
        told += 1

    async with PoliteQueue(denying, on_denied=on_denied) as queue:
        for number in range(250):
            await queue.put(page("no", number))
            if number == 50:
                await queue.put(page("a", 0), priority=-1)
        crawl = Crawl(queue, clock)
        crawl.start(3)
        await clock.elapse(60.0, turns=2000)
        assert most <= 100
        assert told == 250
        assert crawl.urls == [page("a", 0)]
        await queue.join()
        await crawl.stop()


async def test_close_waits_for_on_denied(denying: FakeGate, clock: VirtualClock) -> None:
    told: list[str] = []

    async def on_denied(decision: Decision) -> None:
        await clock.sleep(5.0)
        told.append(decision.url)

    queue = PoliteQueue(denying, on_denied=on_denied)
    await queue.put(page("no", 0))
    getting = asyncio.create_task(queue.get())
    await clock.settle()
    closing = asyncio.create_task(queue.close())
    await clock.elapse(6.0)
    assert closing.done()
    assert told == [page("no", 0)]
    with pytest.raises(GateClosed):
        await getting


async def test_a_get_under_way_when_the_queue_closes_gives_its_lease_back(
    make: Any, clock: VirtualClock
) -> None:
    class Slow(FakeGate):
        async def acquire(self, url: str, **how: Any) -> FakeLease:
            await clock.sleep(1.0)
            return await super().acquire(url, **how)

    gate = Slow(await make(), clock)
    queue = PoliteQueue(gate)
    await queue.put(page("a", 0))
    getting = asyncio.create_task(queue.get())
    await clock.settle()
    await queue.close()
    await clock.elapse(2.0)
    with pytest.raises(GateClosed):
        await getting
    assert gate.scheduler.stats().in_flight == 0
    assert (queue.qsize(), queue.stats().unfinished) == (0, 0)


# --- everything at once -------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
async def test_every_url_is_done_once_whatever_is_cancelled_or_given_back(
    make: Any, clock: VirtualClock, seed: int
) -> None:
    rng = random.Random(seed)
    gate = FakeGate(await make(concurrency=rng.choice((1, 2))), clock)
    gate.interval = rng.choice((0.0, 0.3))
    gate.glances = rng.random() < 0.5
    gate.cold = {f"https://h{number}.example": rng.random() for number in range(0, 8, 2)}
    pages = [page(f"h{number % 8}", number) for number in range(120)]
    gate.said = {url: DENY for url in pages if rng.random() < 0.2}
    seen: list[str] = []

    async def on_denied(decision: Decision) -> None:
        await clock.sleep(rng.random())
        seen.append(decision.url)

    async def work(queue: PoliteQueue) -> None:
        while True:
            turn = await queue.get()
            if rng.random() < 0.2:
                await turn.give_back()
                continue
            async with turn:
                seen.append(turn.url)
                await clock.sleep(rng.random())

    async def other() -> None:
        while True:
            lease = await gate.acquire(page(f"h{rng.randrange(8)}", "other"))
            try:
                await clock.sleep(rng.random())
            finally:
                lease.leave()

    async with PoliteQueue(gate, on_denied=on_denied, in_memory=2, maxsize=30) as queue:

        async def fill() -> None:
            for url in pages:
                await queue.put(url, priority=rng.choice((0, 0, 1)))

        filling = asyncio.create_task(fill())
        others = [asyncio.create_task(other()) for _ in range(4)]
        for _ in range(150):
            tasks = [asyncio.create_task(work(queue)) for _ in range(3)]
            await clock.elapse(rng.random() * 3)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        assert filling.done()
        assert sorted(seen) == sorted(pages)
        assert (queue.qsize(), queue.stats().unfinished, queue.stats().origins) == (0, 0, 0)
        await queue.join()
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
    assert gate.scheduler.stats().in_flight == 0
    assert gate.scheduler.stats().waiting == 0
