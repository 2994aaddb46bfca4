"""Pages and bytes of a host in a day: what counts, when it ends, and what outlives the process."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from gatekeeper.clock import VirtualClock
from gatekeeper.config import Config, GroupRule, HostRule, PacingConfig, StorageConfig
from gatekeeper.errors import LeaseTimeout, StorageError
from gatekeeper.pacing.grants import Grant
from gatekeeper.pacing.ledger import MemoryLedger
from gatekeeper.pacing.rules import DAY, BudgetSpent
from gatekeeper.pacing.scheduler import Scheduler
from gatekeeper.pacing.scopes import RobotsInterval
from gatekeeper.pacing.waiting import received
from gatekeeper.storage import SqliteStorage
from tests.pacing_support import FakeStorage

HOST = "a.example"
Make = Callable[..., Awaitable[Scheduler]]
AT_ONCE = RobotsInterval(0.0, "request-rate")


async def page(scheduler: Scheduler, host: str = HOST, seconds: float | None = 0.0) -> Grant:
    asked = RobotsInterval(seconds, "crawl-delay")
    return await scheduler.acquire(f"https://{host}/", host, admit=lambda: asked)


async def sent(scheduler: Scheduler, host: str = HOST, size: int = 0) -> Grant:
    grant = await page(scheduler, host)
    if size:
        received(grant, size)
    grant.report(200, 0.1)
    grant.release()
    return grant


async def spent(scheduler: Scheduler, host: str = HOST) -> float:
    """Seconds until the next page."""
    with pytest.raises(BudgetSpent) as caught:
        await page(scheduler, host)
    return caught.value.seconds


@pytest.fixture(params=["alone", "with a ledger"])
async def scheduler(
    request: pytest.FixtureRequest, make: Make, clock: VirtualClock
) -> Callable[..., Awaitable[Scheduler]]:
    async def build(config: Config | None = None, **pacing: object) -> Scheduler:
        ledger = None if request.param == "alone" else MemoryLedger(clock)
        return await make(config, ledger=ledger, **pacing)

    return build


async def test_a_day_begins_with_its_first_page(scheduler: Make, clock: VirtualClock) -> None:
    one = await scheduler(max_pages_per_day=3)
    await clock.elapse(5000.0)
    for _ in range(3):
        await sent(one)
        await clock.elapse(100.0)
    assert await spent(one) == pytest.approx(DAY - 300.0)
    await sent(one, "b.example")  # each host has its own
    await clock.elapse(DAY - 300.001)
    assert await spent(one) < 0.01
    await clock.elapse(0.002)
    for _ in range(3):
        await sent(one)
    assert await spent(one) == pytest.approx(DAY)


async def test_robots_txt_neither_counts_nor_waits(scheduler: Make) -> None:
    one = await scheduler(max_pages_per_day=1)
    for _ in range(3):
        grant = await one.acquire_robots(f"https://{HOST}/robots.txt", HOST, asked=AT_ONCE)
        grant.report(200)
        grant.release()
    await sent(one)
    grant = await one.acquire_robots(f"https://{HOST}/robots.txt", HOST, asked=AT_ONCE)
    grant.release()
    await spent(one)


async def test_what_was_not_sent_does_not_count(scheduler: Make) -> None:
    one = await scheduler(max_pages_per_day=1)
    for _ in range(3):
        (await page(one)).give_back()
        await asyncio.sleep(0)
    grant = await page(one)
    grant.release()  # without a report it may have been sent
    await spent(one)


async def test_bytes_defer_once_they_are_known(scheduler: Make) -> None:
    one = await scheduler(max_bytes_per_day=1000, concurrency=3)
    grants = [await page(one) for _ in range(3)]
    for grant in grants:  # what is under way may exceed it
        received(grant, 700)
        grant.report(200)
        grant.release()
    await spent(one)


async def test_many_at_once_do_not_exceed_it(scheduler: Make, clock: VirtualClock) -> None:
    one = await scheduler(max_pages_per_day=7, concurrency=3, default_interval=0.0)

    async def ask() -> str:
        try:
            grant = await page(one)
        except BudgetSpent:
            return "deferred"
        await asyncio.sleep(0)
        grant.report(200)
        grant.release()
        return "sent"

    tasks = [asyncio.create_task(ask()) for _ in range(50)]
    await clock.elapse(10.0)
    found = await asyncio.gather(*tasks)
    assert (found.count("sent"), found.count("deferred")) == (7, 43)


async def test_hosts_of_a_group_wait_for_each_other_and_not_for_a_budget(
    scheduler: Make, clock: VirtualClock
) -> None:
    one = await scheduler(
        Config(
            host=(HostRule(match="*.example", group="all", max_pages_per_day=2),),
            group=(GroupRule(name="all", interval=1.0),),
        )
    )
    hosts = [f"h{number}.example" for number in range(20)]

    async def ask(host: str) -> bool:
        try:
            await sent(one, host)
        except BudgetSpent:
            return False
        return True

    tasks = [asyncio.create_task(ask(host)) for host in hosts for _ in range(5)]
    await clock.elapse(150.0)
    assert sum(await asyncio.gather(*tasks)) == 40
    assert one.stats().waiting == 0


async def test_an_override_is_followed_at_once(scheduler: Make, clock: VirtualClock) -> None:
    one = await scheduler(max_pages_per_day=2)
    await sent(one)
    await sent(one)
    await spent(one)
    one.say(HostRule(match=HOST, max_pages_per_day=3))
    await sent(one)
    await spent(one)
    one.say(HostRule(match="*.example", max_bytes_per_day=5))  # less exact
    await spent(one)
    one.unsay(HOST)
    one.unsay("*.example")
    one.adjust(PacingConfig())
    await sent(one)
    one.say(HostRule(match=HOST, max_pages_per_day=1))
    assert await spent(one) > 0


async def test_what_waits_is_deferred_when_its_turn_comes(
    scheduler: Make, clock: VirtualClock
) -> None:
    one = await scheduler(max_pages_per_day=1, concurrency=1)
    first = await page(one, seconds=5.0)
    waiting = asyncio.create_task(spent(one))
    await asyncio.sleep(0)
    first.report(200)
    first.release()
    await clock.elapse(6.0)
    assert await waiting == pytest.approx(DAY - 5.0, abs=6.0)


async def test_who_does_not_wait_learns_it_too(scheduler: Make) -> None:
    one = await scheduler(max_pages_per_day=1)
    await sent(one)
    with pytest.raises((BudgetSpent, LeaseTimeout)) as caught:
        await one.acquire("u", HOST, timeout=0, admit=lambda: AT_ONCE)
    assert isinstance(caught.value, BudgetSpent)


async def test_it_stands_in_why(scheduler: Make) -> None:
    one = await scheduler(max_pages_per_day=2, max_bytes_per_day=10_000)
    await sent(one, size=12)
    (view,) = [view for view in one.why(HOST) if view.kind == "budget"]
    assert "1 of 2 pages, 12 of 10000 bytes in 24 hours" in str(view)
    assert view.until is None  # nothing waits for it
    await sent(one)
    (view,) = [view for view in one.why(HOST) if view.kind == "budget"]
    assert view.until is not None
    assert not view.decides  # no interval
    assert view.seconds == pytest.approx(DAY, abs=1.0)


# --- a restart ------------------------------------------------------------------------------


def scheduler_on(storage: object, clock: VirtualClock, **pacing: object) -> Scheduler:
    return Scheduler(
        Config(pacing=PacingConfig(**pacing)),  # type: ignore[arg-type]
        clock=clock,
        rng=random.Random(1),
        storage=storage,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("jump", [0.0, 3 * DAY, -3 * DAY])
async def test_it_outlives_kill_9(clock: VirtualClock, jump: float) -> None:
    """Not one page is forgotten, also where no clock lies more than a second ahead."""
    storage = FakeStorage()
    one = scheduler_on(storage, clock, max_pages_per_day=3)
    await one.open()
    await sent(one, size=10)
    await page(one)
    storage = storage.crash()
    await one.close()
    await clock.elapse(1000.0)
    clock.jump_wall(jump)
    other = scheduler_on(storage, clock, max_pages_per_day=3)
    await other.open()
    assert "2 of 3 pages" in " ".join(map(str, other.why(HOST)))
    await clock.elapse(10.0)
    await sent(other)
    assert await spent(other) == pytest.approx(DAY - 1010.0)
    await clock.elapse(DAY)
    await sent(other)
    await other.close()


async def test_it_lies_in_the_file(clock: VirtualClock, tmp_path: Path) -> None:
    """Through the journal (nothing was flushed) and, after a clean end, through SQLite."""
    never = StorageConfig(flush_interval=3600.0)
    path = tmp_path / "state.db"
    for pages in (1, 2, 3):
        async with SqliteStorage(path, config=never) as storage:
            one = scheduler_on(storage, clock, max_pages_per_day=3)
            await one.open()
            await clock.elapse(2.0)
            await sent(one, size=100)
            record = storage.load_clock_nowait(HOST)
            assert record is not None
            assert (record.day_pages, record.day_bytes) == (pages, 100 * pages)
            await one.close()
    async with SqliteStorage(path, config=never) as storage:
        one = scheduler_on(storage, clock, max_pages_per_day=3)
        await one.open()
        await clock.elapse(2.0)
        await spent(one)
        await one.close()


async def test_where_it_cannot_be_kept_no_page_is_granted(clock: VirtualClock) -> None:
    storage = FakeStorage()
    one = scheduler_on(storage, clock, max_pages_per_day=2)
    await one.open()
    storage.fails = True
    for _ in range(3):
        with pytest.raises(StorageError):
            await page(one)
    storage.fails = False
    await sent(one)
    await sent(one)
    await spent(one)
    await one.close()


async def test_a_host_without_a_budget_has_nothing_of_it(make: Make, clock: VirtualClock) -> None:
    one = await make(Config(host=(HostRule(match=HOST, max_pages_per_day=1),)))
    await sent(one, "b.example")
    (scope,) = [scope for scope in one.watch()[0].values() if scope.name == "b.example"]
    assert scope.history is None
