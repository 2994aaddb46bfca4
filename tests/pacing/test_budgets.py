"""Daily budgets: which pages and bytes count, when the day ends, and what outlives the process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest

from gatekeeper.clock import VirtualClock
from gatekeeper.config import Config, HostRule, StorageConfig
from gatekeeper.errors import StorageError
from gatekeeper.pacing.host_settings import DAY
from gatekeeper.pacing.scheduler import Scheduler
from gatekeeper.robots.timing import RobotsInterval
from gatekeeper.storage import SqliteStorage
from gatekeeper.testing.memory_ledger import MemoryLedger
from tests.pacing.budget_rules import HOST, DailyBudgets, page, sent, spent
from tests.pacing.leases_together import Member, VirtualTime
from tests.pacing_support import CountingLedger, FakeStorage, scheduler_on

Make = Callable[..., Awaitable[Scheduler]]


class TestDailyBudgets(DailyBudgets):
    """Without a ledger, and with a ledger in memory."""

    @pytest.fixture
    def time(self, clock: VirtualClock) -> VirtualTime:
        return VirtualTime(clock)

    @pytest.fixture(params=["alone", "with a ledger"])
    def member(self, request: pytest.FixtureRequest, make: Make, clock: VirtualClock) -> Member:
        return make if request.param == "alone" else partial(make, ledger=MemoryLedger(clock))


async def test_a_robots_txt_request_of_a_spent_host_waits_without_asking_the_ledger_again(
    make: Make, clock: VirtualClock
) -> None:
    """Only pages are refused when the budget is spent: the ledger is not asked again at once."""
    ledger = CountingLedger(clock)
    one = await make(max_pages_per_day=1, ledger=ledger)
    await sent(one)
    before, asked = len(ledger.asked), RobotsInterval(5.0, "crawl-delay")
    waiting = asyncio.create_task(
        one.acquire_robots(f"https://{HOST}/robots.txt", HOST, asked=asked)
    )
    await clock.elapse(4.9)
    assert not waiting.done()
    assert len(ledger.asked) <= before + 2
    await clock.elapse(0.2)
    assert waiting.done()
    (await waiting).release()


# --- a restart ------------------------------------------------------------------------------


@pytest.mark.parametrize("jump", [0.0, 3 * DAY, -3 * DAY])
async def test_a_budget_survives_kill_9(clock: VirtualClock, jump: float) -> None:
    """No page is forgotten, even if no clock lies more than a second ahead."""
    storage = FakeStorage()
    one = scheduler_on(clock, storage=storage, max_pages_per_day=3)
    await one.open()
    await sent(one, size=10)
    await page(one)
    storage = storage.crash()
    await one.close()
    await clock.elapse(1000.0)
    clock.jump_wall(jump)
    other = scheduler_on(clock, storage=storage, max_pages_per_day=3)
    await other.open()
    assert "2 of 3 pages" in " ".join(map(str, other.why(HOST)))
    await clock.elapse(10.0)
    await sent(other)
    assert await spent(other) == pytest.approx(DAY - 1010.0)
    await clock.elapse(DAY)
    await sent(other)
    await other.close()


async def test_a_budget_is_stored_in_the_journal_and_in_sqlite(
    clock: VirtualClock, tmp_path: Path
) -> None:
    """By the journal (nothing was flushed) and, after a clean end, by SQLite."""
    never = StorageConfig(flush_interval=3600.0)
    path = tmp_path / "state.db"
    for pages in (1, 2, 3):
        async with SqliteStorage(path, config=never) as storage:
            one = scheduler_on(clock, storage=storage, max_pages_per_day=3)
            await one.open()
            await clock.elapse(2.0)
            await sent(one, size=100)
            record = storage.load_clock_nowait(HOST)
            assert record is not None
            assert (record.day_pages, record.day_bytes) == (pages, 100 * pages)
            await one.close()
    async with SqliteStorage(path, config=never) as storage:
        one = scheduler_on(clock, storage=storage, max_pages_per_day=3)
        await one.open()
        await clock.elapse(2.0)
        await spent(one)
        await one.close()


async def test_a_size_that_no_body_has_can_be_stored(clock: VirtualClock, tmp_path: Path) -> None:
    async with SqliteStorage(tmp_path / "state.db") as storage:
        one = scheduler_on(clock, storage=storage, max_bytes_per_day=1000)
        await one.open()
        await sent(one, size=10**40)
        await one.close()
    async with SqliteStorage(tmp_path / "state.db") as storage:
        one = scheduler_on(clock, storage=storage, max_bytes_per_day=1000)
        await one.open()
        await spent(one)
        await one.close()


async def test_a_budget_that_cannot_be_stored_grants_no_page(clock: VirtualClock) -> None:
    storage = FakeStorage()
    one = scheduler_on(clock, storage=storage, max_pages_per_day=2)
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


async def test_a_host_without_a_budget_keeps_no_history(make: Make, clock: VirtualClock) -> None:
    one = await make(Config(host=(HostRule(match=HOST, max_pages_per_day=1),)))
    await sent(one, "b.example")
    (scope,) = [scope for scope in one.watch()[0].values() if scope.name == "b.example"]
    assert scope.history is None
