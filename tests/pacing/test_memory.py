"""`ScopeMemory`: the limit on hosts in memory, and that no host with a promise is forgotten."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from gatekeeper.clock import VirtualClock
from gatekeeper.config import HostRule
from gatekeeper.errors import LeaseTimeout, StorageError
from gatekeeper.pacing.scheduler import Scheduler
from gatekeeper.queue.polite import PoliteQueue
from gatekeeper.robots.timing import RobotsInterval
from tests.pacing_support import FakeStorage, add_rule, due_at, hosts_of
from tests.queue_support import Crawl, FakeGate

Make = Callable[..., Awaitable[Scheduler]]
VICTIM = "v.example"


async def turned_away(scheduler: Scheduler, host: str) -> None:
    """Let the host refuse for an hour."""
    grant = await scheduler.acquire("u", host, admit=RobotsInterval)
    grant.report(429, retry_after=3600.0)
    grant.release()


async def refused(scheduler: Scheduler, host: str = VICTIM) -> str:
    """Return why the host grants no lease now; empty if it does."""
    try:
        grant = await scheduler.acquire("u", host, admit=RobotsInterval, timeout=0)
    except LeaseTimeout as error:
        return str(error)
    grant.release()
    return ""


@pytest.fixture
async def full(make: Make, storage: FakeStorage) -> Scheduler:
    """A scheduler with more blocked hosts than fit in memory, so that one is in the storage."""
    scheduler = await make(storage=storage, max_hosts=4)
    await turned_away(scheduler, VICTIM)
    for number in range(6):
        await turned_away(scheduler, f"h{number}.example")
    assert VICTIM not in hosts_of(scheduler)
    return scheduler


def _pause_and_resume(scheduler: Scheduler) -> None:
    scheduler.pause(VICTIM)
    scheduler.pause(VICTIM, paused=False)


ROADS: dict[str, Callable[[Scheduler], object]] = {
    "none": lambda scheduler: None,
    "when_due": lambda scheduler: scheduler.when_due(VICTIM, lambda: None),
    "pause": _pause_and_resume,
    "override": lambda scheduler: add_rule(scheduler, HostRule(match=VICTIM, interval=0.5)),
    "block": lambda scheduler: scheduler.block(VICTIM, VirtualClock(start=1000.0).wall() + 0.001),
    "robots_read": lambda scheduler: scheduler.robots_read(
        VICTIM, lambda: RobotsInterval(0.1, "crawl-delay")
    ),
    "why": lambda scheduler: scheduler.why(VICTIM),
}


@pytest.mark.parametrize("road", ROADS)
async def test_a_spilled_block_holds_whoever_touches_the_host(full: Scheduler, road: str) -> None:
    ROADS[road](full)
    assert "due in 3600 s" in await refused(full)


@pytest.mark.parametrize("road", ["pause", "override", "block"])
async def test_the_stored_record_of_a_spilled_host_is_not_overwritten(
    full: Scheduler, storage: FakeStorage, clock: VirtualClock, road: str
) -> None:
    ROADS[road](full)
    assert storage.durable[VICTIM].blocked_until == clock.wall() + 3600.0


async def test_why_explains_a_spilled_host(full: Scheduler, clock: VirtualClock) -> None:
    assert full.blocked(VICTIM) == (clock.wall() + 3600.0, "429, Retry-After 3600")
    assert "429, Retry-After 3600" in {view.source for view in full.why(VICTIM)}


async def test_a_spilled_host_is_due_when_it_was(full: Scheduler, clock: VirtualClock) -> None:
    assert due_at(full, VICTIM) == clock.monotonic() + 3600.0


async def test_why_does_not_load_more_hosts_than_max_hosts(full: Scheduler) -> None:
    for number in range(6):
        full.why(f"h{number}.example")
    assert full.stats().scopes <= 4


async def test_why_of_an_unknown_host_creates_no_record(full: Scheduler) -> None:
    before = hosts_of(full)
    assert full.why("never.seen.example") == ()
    assert set(hosts_of(full)) <= set(before)


async def test_a_pause_of_a_spilled_host_is_lifted(full: Scheduler, clock: VirtualClock) -> None:
    full.block(VICTIM, 0.0)
    full.pause(VICTIM)
    for number in range(6):
        full.why(f"h{number}.example")
    assert VICTIM not in hosts_of(full)
    full.pause(VICTIM, paused=False)
    await clock.elapse(10.0)  # the interval to which it was slowed
    assert await refused(full) == ""


@pytest.mark.parametrize("days", [-1, 1])
async def test_a_jump_of_the_wall_clock_moves_no_spilled_block(
    full: Scheduler, clock: VirtualClock, days: int
) -> None:
    clock.jump_wall(days * 86_400.0)
    await clock.elapse(40.0)
    clock.jump_wall(-300.0)
    assert "due in 3560 s" in await refused(full)


@pytest.mark.parametrize("days", [-1, 1])
async def test_a_host_spilled_right_after_a_clock_jump_comes_back_unchanged(
    full: Scheduler, clock: VirtualClock, days: int
) -> None:
    clock.jump_wall(days * 86_400.0)
    for number in range(6):
        full.why(f"h{number}.example")
    for number in range(6):
        assert "due in 3600 s" in await refused(full, f"h{number}.example")


async def test_a_shared_clock_that_was_spilled_comes_back(
    make: Make, storage: FakeStorage, clock: VirtualClock
) -> None:
    scheduler = await make(storage=storage, max_hosts=4, address_interval=600.0)
    address = "address:203.0.113.9"
    grant = await scheduler.acquire("u", VICTIM, admit=RobotsInterval, scopes=(address,))
    grant.report(200)
    grant.release()
    for number in range(6):
        await turned_away(scheduler, f"h{number}.example")
    assert address not in hosts_of(scheduler)
    known = hosts_of(scheduler)[0]
    scheduler.block(known, 0.0)
    with pytest.raises(LeaseTimeout):
        await scheduler.acquire("u", known, admit=RobotsInterval, timeout=0, scopes=(address,))
    assert due_at(scheduler, known) > clock.monotonic() + 500.0


async def test_a_storage_that_can_not_be_read_grants_no_lease(
    full: Scheduler, storage: FakeStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(_scope: str) -> None:
        raise StorageError("state.db: damaged")

    monkeypatch.setattr(storage, "load_clock_nowait", damaged)
    with pytest.raises(StorageError, match="damaged"):
        full.when_due(VICTIM, lambda: None)
    assert VICTIM not in hosts_of(full)


async def test_more_clocks_than_there_is_room_for_stay_in_the_storage_at_the_start(
    make: Make, storage: FakeStorage, full: Scheduler
) -> None:
    await full.close()
    again = await make(storage=storage, max_hosts=4)
    assert again.stats().scopes <= 4
    for number in range(6):
        assert "due in 3600 s" in await refused(again, f"h{number}.example")
    assert "due in 3600 s" in await refused(again)


async def test_idle_hosts_are_forgotten_when_there_are_too_many(
    make: Make, storage: FakeStorage
) -> None:
    scheduler = await make(storage=storage, max_hosts=100)
    for number in range(500):
        grant = await scheduler.acquire(
            "u", f"h{number}.example", admit=lambda: RobotsInterval(0.0)
        )
        grant.release()
    stats = scheduler.stats()
    assert stats.scopes <= 100
    assert stats.evicted >= 400
    assert stats.spilled == 0


async def test_hosts_with_a_running_clock_are_spilled_and_come_back(
    make: Make, storage: FakeStorage
) -> None:
    scheduler = await make(storage=storage, max_hosts=100)
    wish = RobotsInterval(1000.0, "crawl-delay")
    for number in range(300):
        (await scheduler.acquire("u", f"h{number}.example", admit=lambda: wish)).release()
    stats = scheduler.stats()
    assert stats.scopes <= 100
    assert stats.spilled >= 200
    assert "h0.example" not in hosts_of(scheduler)
    assert "due in 1000 s" in await refused(scheduler, "h0.example")


async def test_without_storage_no_blocked_host_is_forgotten(make: Make) -> None:
    scheduler = await make(max_hosts=10)
    for number in range(10):
        await turned_away(scheduler, f"h{number}")
    with pytest.raises(LeaseTimeout, match="max_hosts"):
        await scheduler.acquire("u", "one too many", admit=RobotsInterval)
    with pytest.raises(LeaseTimeout, match="max_hosts"):
        scheduler.when_due("one too many", lambda: None)
    assert scheduler.stats().scopes == 10


async def test_a_queue_asks_no_spilled_host_inside_its_block(
    full: Scheduler, clock: VirtualClock
) -> None:
    gate = FakeGate(full, clock)
    gate.cold[f"http://{VICTIM}"] = 1.0
    async with PoliteQueue(gate) as queue:
        crawl = Crawl(queue, clock)
        await queue.put(f"http://{VICTIM}/x")
        crawl.start(1)
        await clock.elapse(3599.0)
        assert crawl.got == []
        await clock.elapse(20.0)
        assert [at for _, at in crawl.got] == [pytest.approx(3600.0, abs=10.0)]
        await crawl.stop()


@pytest.mark.parametrize("kept", [True, False])
async def test_a_queue_holds_no_more_hosts_than_there_may_be(
    make: Make, clock: VirtualClock, kept: bool
) -> None:
    scheduler = await make(storage=FakeStorage() if kept else None, max_hosts=5)
    gate = FakeGate(scheduler, clock)
    gate.interval = 1000.0
    async with PoliteQueue(gate) as queue:
        for number in range(20):
            for page in range(2):
                await queue.put(f"http://h{number}.example/{page}")
        crawl = Crawl(queue, clock)
        crawl.start(3)
        for _ in range(30):
            await clock.elapse(10.0)
            assert scheduler.stats().scopes <= 5
        await clock.elapse(20_000.0)
        assert queue.stats().unfinished == 0
        await crawl.stop()


async def test_a_fleet_is_told_that_more_clocks_lie_in_the_storage(
    full: Scheduler, clock: VirtualClock
) -> None:
    told = [one.scope for one in full._memory.clocks(clock.monotonic())]
    assert VICTIM not in told
    assert "" in told
