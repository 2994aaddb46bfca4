"""The seam beneath the scheduler: the book in memory, and one at the end of a bad wire."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest

from gatekeeper.clock import VirtualClock
from gatekeeper.config import Config, GroupRule, HostRule
from gatekeeper.pacing.ledger import ClockState, MemoryLedger, Request, Reservation
from gatekeeper.pacing.scheduler import Scheduler
from gatekeeper.pacing.scopes import RobotsInterval
from gatekeeper.pacing.simulation import Account, Judge

HOSTS = ("a.example", "b.example", "c.example")


def test_starts_are_booked_one_after_another(clock: VirtualClock) -> None:
    book = MemoryLedger(clock)
    asked: list[Request] = [(("a",), 2.0), (("a",), 2.0), (("b",), 5.0)]
    assert [r.start_at - 1000.0 for r in book.reserve_nowait(asked)] == [0.0, 2.0, 0.0]


def test_all_scopes_in_one_step(clock: VirtualClock) -> None:
    book = MemoryLedger(clock)
    book.reserve_nowait([(("a", "group"), (10.0, 1.0))])
    assert book.reserve_nowait([(("b", "group"), (10.0, 1.0))])[0].start_at == 1001.0
    assert book.reserve_nowait([(("a",), 10.0)])[0].start_at == 1010.0


async def test_a_block_holds_and_the_later_one_counts(clock: VirtualClock) -> None:
    book = MemoryLedger(clock)
    await book.block(["a"], 1050.0, "429")
    await book.block(["a"], 1020.0, "earlier")
    assert (await book.reserve([(("a",), 1.0)]))[0].start_at == 1050.0


async def test_a_snapshot_shows_what_lies_ahead(clock: VirtualClock) -> None:
    book = MemoryLedger(clock)
    book.reserve_nowait([(("a",), 2.0)])
    book.reserve_nowait([(("b",), 0.0)])
    (state,) = await book.snapshot()
    assert (state.scope, state.next_at) == ("a", 1002.0)


class FarLedger:
    """A shared book: a round trip before each answer, answers out of order, failures."""

    def __init__(self, clock: VirtualClock, seed: int, failing: float = 0.2) -> None:
        self.clock = clock
        self.rng = random.Random(seed)
        self.book = MemoryLedger(clock)
        self.failing = failing
        self.epoch = 3
        self.calls = 0

    async def wire(self) -> None:
        await self.clock.sleep(self.rng.choice((0.001, 0.02, 0.3)))
        if self.rng.random() < self.failing:
            raise ConnectionError("the wire is down")

    async def reserve(self, requests: Sequence[Request]) -> list[Reservation]:
        self.calls += 1
        await self.wire()
        booked = self.book.reserve_nowait(requests)  # spent, even if the answer is lost
        await self.wire()
        return [Reservation(one.start_at, self.epoch) for one in booked]

    async def block(self, scopes: Sequence[str], until: float, reason: str = "") -> None:
        await self.wire()
        self.book.block_nowait(scopes, until, reason)
        await self.wire()

    async def snapshot(self) -> list[ClockState]:
        return await self.book.snapshot()


class Crawl:
    """Visitors of a few hosts before the judge."""

    def __init__(self, clock: VirtualClock, seed: int) -> None:
        self.clock = clock
        self.rng = random.Random(seed)
        self.judge = Judge()
        self.accounts = {host: Account(1.0 + number) for number, host in enumerate(HOSTS)}
        self.accounts["group"] = Account(0.7, 1 << 30)
        self.served = 0

    async def visit(self, scheduler: Scheduler, host: str) -> None:
        account = self.accounts[host]
        accounts = [account, self.accounts["group"]]
        wish = RobotsInterval(account.interval, "x")
        grant = await scheduler.acquire("u", host, admit=lambda: wish)
        for one in accounts:
            self.judge.start(one, self.clock.monotonic())
        try:
            await self.clock.sleep(self.rng.choice((0.0, 0.1, 1.5)))
        finally:  # cancelled as well: it may have been sent
            for one in accounts:
                self.judge.end(one, self.clock.monotonic(), headed=False)
            if self.rng.random() < 0.05:
                self.judge.block(account, self.clock.monotonic() + 20.0)
                grant.report(429, retry_after=20.0)
            grant.release()
        self.served += 1


CONFIG = Config(
    host=(HostRule(match="*.example", group="g"),), group=(GroupRule(name="g", interval=0.7),)
)


@pytest.mark.parametrize("seed", range(8))
async def test_the_scheduler_stays_right_over_a_bad_wire(clock: VirtualClock, seed: int) -> None:
    ledger = FarLedger(clock, seed)
    scheduler = Scheduler(CONFIG, clock=clock, rng=random.Random(seed), ledger=ledger)
    await scheduler.open()
    crawl = Crawl(clock, seed)
    tasks = []
    for number in range(60):
        tasks.append(asyncio.create_task(crawl.visit(scheduler, HOSTS[number % 3])))
        if number % 7 == 3:
            await clock.elapse(crawl.rng.random() * 5)
            crawl.rng.choice(tasks).cancel()
    for _ in range(400):
        await clock.elapse(5.0)
        if all(task.done() for task in tasks):
            break
    assert all(task.done() for task in tasks)
    assert not crawl.judge.violations
    assert crawl.served > 30
    assert scheduler.stats().ledger_failures > 0
    await scheduler.close()


@pytest.mark.parametrize("seed", range(3))
async def test_two_crawlers_over_one_book_keep_the_pace_together(
    clock: VirtualClock, seed: int
) -> None:
    ledger = FarLedger(clock, seed, failing=0.0)
    judge = Judge()
    account = Account(2.0, 1 << 30)
    schedulers = [
        Scheduler(Config(), clock=clock, rng=random.Random(n), ledger=ledger) for n in range(2)
    ]
    starts: list[float] = []

    async def visit(scheduler: Scheduler) -> None:
        grant = await scheduler.acquire("u", HOSTS[0], admit=lambda: RobotsInterval(2.0, "x"))
        starts.append(clock.monotonic())
        judge.start(account, clock.monotonic())
        judge.end(account, clock.monotonic(), headed=False)
        grant.release()

    for scheduler in schedulers:
        await scheduler.open()
    tasks = [asyncio.create_task(visit(schedulers[n % 2])) for n in range(20)]
    for _ in range(100):
        await clock.elapse(2.0)
    assert all(task.done() for task in tasks)
    assert judge.violations["early"] == 0
    for scheduler in schedulers:
        await scheduler.close()


async def test_a_ledger_that_is_down_grants_nothing(clock: VirtualClock) -> None:
    ledger = FarLedger(clock, 1, failing=1.0)
    scheduler = Scheduler(Config(), clock=clock, rng=random.Random(1), ledger=ledger)
    await scheduler.open()
    task = asyncio.create_task(scheduler.acquire("u", HOSTS[0], admit=RobotsInterval))
    await clock.elapse(120.0)
    assert not task.done()
    assert 20 < ledger.calls < 60  # asked again, later each time
    ledger.failing = 0.0
    await clock.elapse(10.0)
    assert task.done()
    (await task).release()
    await scheduler.close()


async def test_a_start_of_a_lost_book_is_void(clock: VirtualClock) -> None:
    ledger = FarLedger(clock, 1, failing=0.0)
    ledger.book.reserve_nowait([((HOSTS[0],), 5.0)])
    scheduler = Scheduler(Config(), clock=clock, rng=random.Random(1), ledger=ledger)
    await scheduler.open()
    first = asyncio.create_task(scheduler.acquire("u", HOSTS[0], admit=RobotsInterval))
    await clock.elapse(2.0)  # a start five seconds from now is in hand
    ledger.book, ledger.epoch = MemoryLedger(clock), 4
    ledger.book.reserve_nowait([((HOSTS[0],), 30.0)])
    second = asyncio.create_task(scheduler.acquire("u", HOSTS[1], admit=RobotsInterval))
    await clock.elapse(10.0)
    assert second.done()
    assert not first.done()  # the new book says otherwise
    await clock.elapse(30.0)
    (await first).release()
    (await second).release()
    await scheduler.close()


async def test_a_memory_ledger_can_be_handed_in(clock: VirtualClock) -> None:
    book = MemoryLedger(clock)
    book.reserve_nowait([((HOSTS[0],), 5.0)])
    scheduler = Scheduler(Config(), clock=clock, rng=random.Random(1), ledger=book)
    await scheduler.open()
    task = asyncio.create_task(scheduler.acquire("u", HOSTS[0], admit=RobotsInterval))
    await clock.elapse(4.9)
    assert not task.done()
    await clock.elapse(0.2)
    (await task).release()
    await scheduler.close()
