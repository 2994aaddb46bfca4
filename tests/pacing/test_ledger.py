"""The scheduler over a `Ledger`: one in memory, and one behind an unreliable network."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import pytest

from gatekeeper.clock import VirtualClock
from gatekeeper.config import Config, GroupRule, HostRule, PacingConfig
from gatekeeper.pacing.grants import Grant
from gatekeeper.pacing.ledger import (
    MAX_FLIGHTS,
    SPACING,
    End,
    Granted,
    LedgerListener,
    NotBefore,
    Report,
    ScopeRequest,
    TakeRequest,
)
from gatekeeper.pacing.scheduler import Scheduler
from gatekeeper.robots.timing import RobotsInterval
from gatekeeper.testing.memory_ledger import MemoryLedger
from gatekeeper.testing.simulation import Account, Judge
from tests.pacing.leases_together import LeasesTogether, Member, VirtualTime
from tests.pacing.ledger_rules import LedgerRules
from tests.pacing_support import due_at, scheduler_on

HOSTS = ("a.example", "b.example", "c.example")


class TestMemoryLedger(LedgerRules):
    """The rules of every ledger."""

    @pytest.fixture
    def ledger(self, clock: VirtualClock) -> MemoryLedger:
        return MemoryLedger(clock)

    @pytest.fixture
    def time(self, clock: VirtualClock) -> VirtualTime:
        return VirtualTime(clock)


class TestLeasesTogether(LeasesTogether):
    """Several schedulers over one ledger in memory."""

    @pytest.fixture
    def time(self, clock: VirtualClock) -> VirtualTime:
        return VirtualTime(clock)

    @pytest.fixture
    def member(self, make: Make, clock: VirtualClock) -> Member:
        return partial(make, ledger=MemoryLedger(clock))


async def test_records_of_scopes_that_are_free_are_dropped(clock: VirtualClock) -> None:
    ledger = MemoryLedger(clock)
    for number in range(5000):
        token = f"a:{number}"
        ledger.take_nowait([TakeRequest(token, (ScopeRequest(f"h{number}", 1.0),))])
        await ledger.end([End(token)])
        clock.advance(1.0)
    assert len(ledger._records) < 2500


class FarLedger:
    """A shared ledger behind a network: each call and reply takes time, replies come out of order,
    calls fail, and replies are lost although the call has taken effect."""

    def __init__(self, clock: VirtualClock, seed: int, failing: float = 0.2) -> None:
        self.clock = clock
        self.rng = random.Random(seed)
        self.book = MemoryLedger(clock)
        self.failing = failing
        self.calls = self.asked = 0
        self.listeners: list[LedgerListener] = []

    def listen(self, owner: str, listener: LedgerListener) -> None:
        self.listeners.append(listener)
        self.book.listen(owner, listener)

    async def wire(self) -> None:
        await self.clock.sleep(self.rng.choice((0.001, 0.02, 0.3)))
        if self.rng.random() < self.failing:
            raise ConnectionError("the wire is down")

    async def carry(
        self, kind: str, names: list[str], call: Callable[..., Awaitable[Any]], given: Any
    ) -> Any:
        """Make a call of some tokens or scopes, whose answer comes back."""
        await self.wire()
        found = await call(given)
        await self.wire()
        return found

    async def take(self, requests: Sequence[TakeRequest]) -> list[Granted | NotBefore]:
        self.calls += 1
        self.asked += len(requests)
        tokens = [one.token for one in requests]
        found: list[Granted | NotBefore]
        found = await self.carry("take", tokens, self.book.take, requests)
        return found

    async def head(self, tokens: Sequence[str]) -> None:
        await self.carry("head", [*tokens], self.book.head, tokens)

    async def end(self, ends: Sequence[End]) -> None:
        await self.carry("end", [one.token for one in ends], self.book.end, ends)

    async def renew(self, tokens: Sequence[str]) -> None:
        await self.carry("renew", [*tokens], self.book.renew, tokens)

    async def block(self, reports: Sequence[Report]) -> None:
        await self.carry("block", [one.scope for one in reports], self.book.block, reports)

    async def pause(self, scopes: Sequence[str]) -> None:
        await self.wire()
        await self.book.pause(scopes)

    async def resume(self, scopes: Sequence[str]) -> None:
        await self.wire()
        await self.book.resume(scopes)


class Crawl:
    """Visitors of a few hosts, with a judge."""

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
        assert not grant.stale
        for one in accounts:
            self.judge.start(one, self.clock.monotonic())
        try:
            await self.clock.sleep(self.rng.choice((0.0, 0.1, 1.5, 7.0)))
        finally:  # Also if cancelled, since the request may have been sent.
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


async def crawl_with(
    clock: VirtualClock, schedulers: list[Scheduler], seed: int, visits: int = 60
) -> Crawl:
    """Let all of them visit hosts; cancel some."""
    crawl = Crawl(clock, seed)
    tasks = []
    for number in range(visits):
        scheduler = schedulers[number % len(schedulers)]
        tasks.append(asyncio.create_task(crawl.visit(scheduler, HOSTS[number % 3])))
        if number % 7 == 3:
            await clock.elapse(crawl.rng.random() * 5)
            crawl.rng.choice(tasks).cancel()
    for _ in range(800):
        await clock.elapse(5.0)
        if all(task.done() for task in tasks):
            break
    assert all(task.done() for task in tasks)
    return crawl


@pytest.mark.parametrize("seed", range(8))
async def test_the_scheduler_keeps_intervals_over_an_unreliable_connection(
    clock: VirtualClock, seed: int
) -> None:
    ledger = FarLedger(clock, seed)
    scheduler = scheduler_on(clock, CONFIG, seed=seed, ledger=ledger)
    await scheduler.open()
    crawl = await crawl_with(clock, [scheduler], seed)
    assert not crawl.judge.violations
    assert crawl.served > 30
    assert scheduler.stats().ledger_failures > 0
    ledger.failing = 0.0
    closing = asyncio.create_task(scheduler.close())
    await clock.elapse(20.0)
    await closing


@pytest.mark.parametrize("seed", range(6))
async def test_three_crawlers_over_one_ledger_keep_the_pace_together(
    clock: VirtualClock, seed: int
) -> None:
    """Slow responses, refusals and cancelled visits: no overlap, nothing early or in a block.

    The network delays but loses nothing: if the report of a 429 is lost, only one member knows of
    it, and the requests that others start before it is sent again can't be prevented.
    """
    ledger = FarLedger(clock, seed, failing=0.0)
    ledger.rng = random.Random(seed)
    schedulers = [scheduler_on(clock, CONFIG, seed=n, ledger=ledger) for n in range(3)]
    for scheduler in schedulers:
        await scheduler.open()
    crawl = Crawl(clock, seed)
    # A request that was sent before the block was reported does not count.
    crawl.judge = Together()
    tasks = [
        asyncio.create_task(crawl.visit(schedulers[n % 3], HOSTS[n % 3 if n % 2 else 0]))
        for n in range(60)
    ]
    for _ in range(800):
        await clock.elapse(5.0)
        if all(task.done() for task in tasks):
            break
    assert crawl.served == 60
    assert not crawl.judge.violations
    for scheduler in schedulers:
        closing = asyncio.create_task(scheduler.close())
        await clock.elapse(5.0)
        await closing


class Together(Judge):
    """A block counts once every member can know of it, one network delay later."""

    def start(self, account: Account, now: float) -> None:
        blocked = account.blocked_until
        if blocked - 20.0 > now - 1.0:
            account.blocked_until = float("-inf")
        super().start(account, now)
        account.blocked_until = blocked


async def test_a_ledger_that_is_down_grants_nothing(clock: VirtualClock) -> None:
    ledger = FarLedger(clock, 1, failing=1.0)
    scheduler = scheduler_on(clock, ledger=ledger)
    await scheduler.open()
    task = asyncio.create_task(scheduler.acquire("u", HOSTS[0], admit=RobotsInterval))
    await clock.elapse(120.0)
    assert not task.done()
    assert 20 < ledger.calls < 60  # It asks again, after a longer wait each time.
    ledger.failing = 0.0
    await clock.elapse(10.0)
    assert task.done()
    (await task).release()
    await clock.elapse(1.0)
    await scheduler.close()


Make = Callable[..., Awaitable[Scheduler]]


async def start(scheduler: Scheduler, host: str = HOSTS[0], interval: float = 1.0) -> Grant:
    return await scheduler.acquire("u", host, admit=lambda: RobotsInterval(interval, "x"))


async def test_a_remote_ledger_is_asked_once_though_its_clock_began_later(
    clock: VirtualClock, make: Make
) -> None:
    """The ledger learns of a head with a delay. A member that asks by its own clock, which started
    earlier, would ask in vain and have to ask again."""

    class Far(FarLedger):
        async def wire(self) -> None:
            await self.clock.sleep(0.04)

    ledger = Far(clock, 1, failing=0.0)
    scheduler = await make(ledger=ledger)
    gaps = []

    async def visits(host: str, offset: float) -> None:
        await clock.sleep(offset)
        head = None
        for _ in range(5):
            grant = await start(scheduler, host)
            if head is not None:
                gaps.append(clock.monotonic() - head)
            await clock.sleep(0.01)
            grant.head()
            head = clock.monotonic()
            await clock.sleep(0.05)
            grant.report(200)
            grant.release()

    # Heads wait for the calls in flight for other hosts.
    crawls = [asyncio.create_task(visits(host, n * 0.03)) for n, host in enumerate(HOSTS)]
    await clock.elapse(20.0)
    await asyncio.gather(*crawls)
    assert ledger.asked == 5 * len(HOSTS)
    # A round trip takes 0.08 s: at most two until the ledger knows the head, and two for the grant.
    assert max(gaps) < 1.0 + 3 * 0.08 + 0.01, gaps


class StrictLedger(FarLedger):
    """A network of 0.1 s each way that preserves the order. It records when each call was sent, and
    fails if the same request is in flight twice."""

    ONE_WAY = 0.1

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(clock, 1, failing=0.0)
        self.left: list[tuple[float, str, tuple[str, ...]]] = []
        self.under_way: list[tuple[str, str]] = []
        self.most = 0

    async def carry(
        self, kind: str, names: list[str], call: Callable[..., Awaitable[Any]], given: Any
    ) -> Any:
        self.left.append((self.clock.monotonic(), kind, tuple(names)))
        mine = [(kind, name) for name in names]
        assert not set(mine) & set(self.under_way)
        self.under_way += mine
        self.most = max(self.most, sum(kind == "take" for kind, _ in self.under_way))
        await self.clock.sleep(self.ONE_WAY)
        found = await call(given)
        await self.clock.sleep(self.ONE_WAY)
        for one in mine:
            self.under_way.remove(one)
        return found

    def moments(self, kind: str) -> list[float]:
        return [moment for moment, name, _ in self.left if name == kind]


async def test_no_call_waits_for_the_answer_of_another_flight(
    clock: VirtualClock, make: Make
) -> None:
    """Questions, heads and ends are sent as they come up, or shortly after the previous call."""
    ledger = StrictLedger(clock)
    scheduler = await make(ledger=ledger)
    begun = clock.monotonic()
    first = asyncio.create_task(start(scheduler, HOSTS[0], 5.0))
    await clock.elapse(0.05)
    others = [asyncio.create_task(start(scheduler, host, 5.0)) for host in HOSTS[1:]]
    await clock.elapse(0.2)
    grant = await first
    assert [moment - begun for moment in ledger.moments("take")] == pytest.approx([0.0, 0.05])
    grant.head()
    await clock.elapse(0.002)
    grant.report(429, retry_after=30.0)
    grant.release()
    await clock.elapse(0.1)
    next_one = 0.25 + 0.2 / MAX_FLIGHTS
    for kind, moment in (("head", 0.25), ("block", next_one), ("end", next_one)):
        assert [one - begun for one in ledger.moments(kind)] == pytest.approx([moment]), kind
    for task in others:
        (await task).release()
    await clock.elapse(1.0)
    assert not ledger.under_way


async def test_flights_are_bounded_and_a_few_milliseconds_apart(
    clock: VirtualClock, make: Make
) -> None:
    """While the ledger is slow, new questions travel together."""
    ledger = StrictLedger(clock)
    scheduler = await make(Config(pacing=PacingConfig(max_in_flight=1000)), ledger=ledger)
    tasks = []
    for number in range(300):
        tasks.append(asyncio.create_task(start(scheduler, f"h{number}.example")))
        await clock.elapse(0.0007)
    await clock.elapse(1.0)
    assert all(task.done() for task in tasks)
    moments = ledger.moments("take")
    assert all(after - before > SPACING - 1e-9 for before, after in itertools.pairwise(moments))
    # 0.21 s of asking, a round trip of 0.2 s: eight calls leave, the rest when those are back.
    assert MAX_FLIGHTS < len(moments) <= 2 * MAX_FLIGHTS
    for task in tasks:
        (await task).release()
    await clock.elapse(1.0)


async def test_a_near_ledger_is_asked_for_one_half_while_the_other_half_is_handled(
    clock: VirtualClock, make: Make
) -> None:
    """Otherwise the ledger would be idle while this process handles answers, and vice versa."""
    ledger = StrictLedger(clock)
    ledger.ONE_WAY = 0.001
    scheduler = await make(Config(pacing=PacingConfig(max_in_flight=1000)), ledger=ledger)
    task = asyncio.create_task(start(scheduler))
    await clock.elapse(0.01)
    (await task).release()
    await clock.elapse(0.01)
    tasks = [asyncio.create_task(start(scheduler, f"h{number}.example")) for number in range(100)]
    await clock.elapse(0.01)
    for task in tasks:
        (await task).release()
    takes = [(moment, len(names)) for moment, kind, names in ledger.left if kind == "take"]
    assert [size for _, size in takes] == [1, 50, 50]
    assert takes[2][0] == takes[1][0]
    await clock.elapse(0.01)


async def test_an_end_in_the_same_flight_implies_the_head(clock: VirtualClock, make: Make) -> None:
    """The ledger's clock counts from it, and so does the one here."""
    ledger = StrictLedger(clock)
    scheduler = await make(ledger=ledger)
    task = asyncio.create_task(start(scheduler))
    await clock.elapse(0.3)
    grant = await task
    grant.report(200)
    grant.release()
    await clock.elapse(0.3)
    assert [kind for _, kind, _ in ledger.left] == ["take", "end"]
    (view,) = await ledger.book.look(HOSTS[:1])
    assert view.clock.age == pytest.approx(0.2)
    assert due_at(scheduler, HOSTS[0]) == pytest.approx(clock.monotonic() - 0.3 + 1.0)


async def test_a_waiter_cancelled_while_its_call_is_in_flight_ends_the_grant(
    clock: VirtualClock, make: Make
) -> None:
    """An end that overtook the question would leave a hold or ticket without an owner."""
    ledger = StrictLedger(clock)
    one, other = await make(ledger=ledger), await make(ledger=ledger)
    grant = asyncio.create_task(start(one))
    await clock.elapse(0.3)
    for host in HOSTS[:2]:  # The ledger denies the first and grants the second.
        waiting = asyncio.create_task(start(other, host))
        await clock.elapse(0.05)
        waiting.cancel()
        await clock.elapse(0.05)
        assert {kind for kind, _ in ledger.under_way} == {"take"}
        await clock.elapse(0.5)
        assert ledger.left[-1][1] == "end"
    (await grant).release()
    await clock.elapse(1.0)
    for view in await ledger.book.look(HOSTS):
        assert not view.holds
        assert not view.waiting


async def test_hosts_that_no_other_member_uses_start_one_way_late(
    clock: VirtualClock, make: Make
) -> None:
    """Their clocks in the ledger start when it learns of the head, and the question arrives just
    when they are due, so only the answer is late."""
    ledger = StrictLedger(clock)
    scheduler = await make(ledger=ledger)
    late = []

    async def visits(number: int) -> None:
        host, due = f"h{number}.example", 0.0
        await clock.sleep(number * 0.0137)
        for _ in range(6):
            grant = await start(scheduler, host)
            if due:
                late.append(clock.monotonic() - due)
            await clock.sleep(0.003)
            grant.head()
            due = clock.monotonic() + 1.0
            await clock.sleep(0.004)
            grant.report(200)
            grant.release()

    crawls = [asyncio.create_task(visits(number)) for number in range(60)]
    await clock.elapse(20.0)
    await asyncio.gather(*crawls)
    assert len(late) == 300
    assert min(late) >= 0.2
    # The head and the question may each wait to be sent, and one question came a little early.
    assert sorted(late)[-4] < 0.2 + 2 * 0.2 / MAX_FLIGHTS + SPACING
    assert max(late) < 3 * 0.2
    assert ledger.asked < 1.05 * 360


async def test_a_cancelled_waiter_returns_its_grant_to_the_ledger(
    clock: VirtualClock, make: Make
) -> None:
    """After a waiter is cancelled while its answer is in flight, the next waits no interval."""
    ledger = FarLedger(clock, 3, failing=0.0)
    one = await make(ledger=ledger)
    waiting = asyncio.create_task(start(one, interval=3600.0))
    await clock.elapse(0.0)
    waiting.cancel()
    await clock.elapse(2.0)
    other = asyncio.create_task(start(one, interval=3600.0))
    await clock.elapse(2.0)
    assert other.done()
    (await other).release()
    await clock.elapse(2.0)


async def test_a_lost_ledger_refuses_every_waiter(clock: VirtualClock, make: Make) -> None:
    from gatekeeper.errors import LedgerLost

    ledger = FarLedger(clock, 1, failing=1.0)
    scheduler = await make(ledger=ledger)
    waiting = asyncio.create_task(start(scheduler))
    await clock.elapse(1.0)
    (listener,) = ledger.listeners
    listener.lost(True)
    await clock.elapse(0.0)
    with pytest.raises(LedgerLost):
        await waiting
    with pytest.raises(LedgerLost):
        await start(scheduler)
    ledger.failing = 0.0
    listener.lost(False)
    waiting = asyncio.create_task(start(scheduler))
    await clock.elapse(10.0)
    (await waiting).release()
    await clock.elapse(1.0)
