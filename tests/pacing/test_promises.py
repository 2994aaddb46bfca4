"""What outlives a process: clocks, blocks, back-off, pauses, and the effects of a crash."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from gatekeeper.clock import VirtualClock
from gatekeeper.errors import StorageError
from gatekeeper.pacing.grants import Grant
from gatekeeper.pacing.scopes import UNKNOWN
from gatekeeper.robots.timing import RobotsInterval
from gatekeeper.storage.base import ClockRecord
from tests.pacing_support import FakeStorage, due_at, is_paused, scheduler_on

HOST = "a.example"
DAY = 86_400.0


class Runs:
    """Successive schedulers over the same storage, and how long a lease takes."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.storage = FakeStorage()

    async def start(self, **pacing: object) -> None:
        self.scheduler = scheduler_on(self.clock, storage=self.storage, **pacing)
        await self.scheduler.open()

    async def take(self, seconds: float | None = 10.0, host: str = HOST) -> Grant:
        wish = RobotsInterval(seconds, "crawl-delay")
        return await self.scheduler.acquire("u", host, admit=lambda: wish)

    async def wait_for_lease(self, seconds: float | None = 10.0, host: str = HOST) -> float:
        begun = self.clock.monotonic()
        grant: list[Grant] = []

        async def ask() -> None:
            grant.append(await self.take(seconds, host))

        task = asyncio.create_task(ask())
        await self.clock.elapse(4000.0)
        await task
        return grant[0].start_at - begun

    async def crash(self, down: float = 0.0, jump: float = 0.0, **pacing: object) -> None:
        self.storage = self.storage.crash()
        await self.scheduler.close()
        await self.clock.elapse(down)
        self.clock.jump_wall(jump)
        await self.start(**pacing)

    async def restart(self, down: float = 0.0, jump: float = 0.0) -> None:
        await self.scheduler.close()
        await self.clock.elapse(down)
        self.clock.jump_wall(jump)
        await self.start()


@pytest.fixture
async def runs(clock: VirtualClock) -> Runs:
    return Runs(clock)


Again = Callable[..., Awaitable[None]]
AGAIN: list[Again] = [Runs.crash, Runs.restart]


@pytest.mark.parametrize("again", AGAIN, ids=["crash", "restart"])
async def test_an_interval_holds_across_a_restart(runs: Runs, again: Again) -> None:
    await runs.start()
    grant = await runs.take(10.0)
    grant.report(200)
    grant.release()
    await again(runs, 4.0)
    assert await runs.wait_for_lease(10.0) == pytest.approx(6.0)
    await runs.scheduler.close()


async def test_a_longer_crawl_delay_after_a_restart_counts_from_the_last_request(
    runs: Runs,
) -> None:
    await runs.start()
    grant = await runs.take(10.0)
    grant.release()
    await runs.crash(4.0)
    assert await runs.wait_for_lease(30.0) == pytest.approx(26.0)
    await runs.scheduler.close()


async def test_a_longer_crawl_delay_after_a_restart_holds_where_no_clock_ran(runs: Runs) -> None:
    await runs.start()
    (await runs.take(0.0)).release()
    await runs.restart(4.0)
    assert await runs.wait_for_lease(30.0) == pytest.approx(26.0)
    await runs.scheduler.close()


async def test_a_lease_open_at_a_crash_counts_as_just_used(runs: Runs) -> None:
    await runs.start()
    await runs.take(10.0)
    await runs.crash(25.0)  # The request may have been sent just before.
    assert await runs.wait_for_lease(10.0) == pytest.approx(10.0)
    await runs.scheduler.close()


async def test_a_stored_clock_without_its_interval_holds_whatever_robots_txt_asks(
    runs: Runs,
) -> None:
    """A storage of another's making may hold nothing but the time."""
    runs.storage.promise(ClockRecord(scope=HOST, next_at=runs.clock.wall() + 20.0))
    await runs.start()
    for wish in (UNKNOWN, RobotsInterval(2.0, "crawl-delay")):  # It was unreachable at first.
        runs.scheduler.robots_read(HOST, lambda wish=wish: wish)  # type: ignore[misc]
    assert await runs.wait_for_lease(2.0) == pytest.approx(20.0)
    await runs.scheduler.close()


async def test_clocks_too_short_to_be_kept_count_as_just_used_after_a_crash(runs: Runs) -> None:
    await runs.start()
    grant = await runs.take(0.8)
    grant.release()
    assert HOST not in runs.storage.durable
    await runs.crash()
    assert await runs.wait_for_lease(0.8) >= 0.8
    await runs.scheduler.close()


async def test_clocks_too_short_to_be_kept_count_as_just_used_beside_an_older_record(
    runs: Runs,
) -> None:
    """Once a cause of slowing is over, the host's clock is short again, and its record is old."""
    await runs.start()
    grant = await runs.take(0.5)
    grant.report(200, rate_limit='"day";r=1;t=5')
    grant.release()
    await runs.clock.elapse(100.0)
    (await runs.take(0.5)).release()
    await runs.crash()
    assert await runs.wait_for_lease(0.5) == pytest.approx(1.0)


async def test_a_clean_restart_within_a_second_of_a_crash_forgets_no_clock(runs: Runs) -> None:
    await runs.start()
    (await runs.take(1.0)).release()
    await runs.crash()
    await runs.restart()
    assert await runs.wait_for_lease(1.0) >= 1.0
    await runs.scheduler.close()


async def test_a_clean_restart_does_not_delay_an_unknown_host(runs: Runs) -> None:
    await runs.start()
    (await runs.take(10.0)).release()
    await runs.restart()
    assert await runs.wait_for_lease(10.0, "never.seen.example") == 0.0
    await runs.scheduler.close()


@pytest.mark.parametrize("again", AGAIN, ids=["crash", "restart"])
async def test_a_block_and_its_reason_survive(runs: Runs, again: Again) -> None:
    await runs.start()
    grant = await runs.take(1.0)
    grant.report(429, retry_after=600.0)
    grant.release()
    await again(runs, 100.0)
    blocked = runs.scheduler.blocked(HOST)
    assert blocked is not None
    assert blocked[1] == "429, Retry-After 600"
    assert await runs.wait_for_lease(1.0) == pytest.approx(500.0)
    await runs.scheduler.close()


async def test_back_off_doubles_across_a_restart(runs: Runs) -> None:
    await runs.start(backoff_jitter=0.0)
    grant = await runs.take(0.0)
    grant.report(503)
    grant.release()
    await runs.crash(60.0, backoff_jitter=0.0)
    await runs.clock.elapse(1.0)
    grant = await runs.take(0.0)
    grant.report(503)
    blocked = runs.scheduler.blocked(HOST)
    assert blocked is not None
    assert blocked[0] - runs.clock.wall() == pytest.approx(120.0)
    await runs.scheduler.close()


async def test_the_safe_rate_survives(runs: Runs) -> None:
    await runs.start()
    grant = await runs.take(2.0)
    grant.report(429, retry_after=0)
    grant.release()
    await runs.crash(10.0)
    await runs.clock.elapse(1.0)
    grant = await runs.take(2.0)
    grant.report(200)
    grant.release()
    assert await runs.wait_for_lease(2.0) == pytest.approx(4.0)
    await runs.scheduler.close()


Learn = Callable[[Grant], object]
LEARNT: dict[str, tuple[Learn, float]] = {
    "errors": (lambda grant: grant.report(500), 8.0),
    "latency": (lambda grant: grant.report(200, elapsed=30.0), 60.0),
    "RateLimit": (lambda grant: grant.report(200, rate_limit='"d";r=0;t=3600'), 3600.0),
}


async def _learn(runs: Runs, report: Learn) -> None:
    await runs.start(latency_factor=10.0)
    for _ in range(6):
        await runs.clock.elapse(4000.0)
        grant = await runs.take(None)
        report(grant)
        grant.release()


@pytest.mark.parametrize("what", LEARNT)
@pytest.mark.parametrize("crash", [True, False])
async def test_a_slowed_host_is_slowed_in_the_next_run(runs: Runs, what: str, crash: bool) -> None:
    report, seconds = LEARNT[what]
    await _learn(runs, report)
    if crash:
        await runs.crash(latency_factor=10.0)
    else:
        await runs.scheduler.close()
        await runs.start(latency_factor=10.0)
    assert await runs.wait_for_lease(None) == pytest.approx(seconds)
    await runs.scheduler.close()


@pytest.mark.parametrize("what", ["errors", "latency"])
async def test_a_slowed_host_is_slowed_until_a_shorter_interval_is_learnt(
    runs: Runs, what: str
) -> None:
    report, seconds = LEARNT[what]
    await _learn(runs, report)
    await runs.crash(4000.0, latency_factor=10.0)
    await runs.clock.elapse(1.0)
    (await runs.take(None)).release()
    assert await runs.wait_for_lease(None) == pytest.approx(seconds)
    await runs.scheduler.close()


async def test_a_rate_limit_of_a_response_holds_until_its_end_across_a_restart(runs: Runs) -> None:
    await runs.start()
    grant = await runs.take(None)
    grant.report(200, rate_limit='"d";r=10;t=600')
    grant.release()
    await runs.crash(100.0)
    await runs.clock.elapse(1.0)
    (await runs.take(None)).release()
    assert await runs.wait_for_lease(None) == pytest.approx(60.0)
    await runs.clock.elapse(600.0)
    (await runs.take(None)).release()
    assert await runs.wait_for_lease(None) == pytest.approx(1.0)
    await runs.scheduler.close()


async def test_errors_reset_by_a_success_do_not_return_after_a_crash(runs: Runs) -> None:
    await _learn(runs, LEARNT["errors"][0])
    await runs.clock.elapse(10.0)
    grant = await runs.take(None)
    grant.report(200)
    grant.release()
    await runs.crash(100.0)
    await runs.clock.elapse(1.0)
    (await runs.take(None)).release()
    assert await runs.wait_for_lease(None) == pytest.approx(1.0)
    await runs.scheduler.close()


async def test_a_pause_survives(runs: Runs) -> None:
    await runs.start()
    runs.scheduler.pause(HOST)
    await runs.crash()
    assert is_paused(runs.scheduler, HOST)
    await runs.scheduler.close()


@pytest.mark.parametrize("days", [-1, 1])
async def test_a_jump_of_the_wall_clock_breaks_no_block(runs: Runs, days: int) -> None:
    await runs.start()
    grant = await runs.take(1.0)
    grant.report(429, retry_after=600.0)
    grant.release()
    runs.clock.jump_wall(days * DAY)
    await runs.clock.elapse(40.0)
    await runs.crash(60.0)
    assert await runs.wait_for_lease(1.0) == pytest.approx(500.0, abs=0.1)
    await runs.scheduler.close()


@pytest.mark.parametrize("days", [-1, 1])
async def test_a_jump_of_the_wall_clock_moves_no_clock(runs: Runs, days: int) -> None:
    await runs.start()
    (await runs.take(10.0)).release()
    await runs.clock.elapse(2.0)
    runs.clock.jump_wall(days * DAY)
    assert await runs.wait_for_lease(10.0) == pytest.approx(8.0)
    await runs.scheduler.close()


async def test_a_stored_clock_a_day_ahead_after_a_jump_is_ignored(runs: Runs) -> None:
    await runs.start()
    (await runs.take(10.0)).release()
    await runs.scheduler.close()
    runs.clock.jump_wall(-DAY)
    await runs.start()
    assert await runs.wait_for_lease(10.0) <= 10.0
    await runs.scheduler.close()


JUMPS = [-30 * DAY, -DAY, -7200.0, -5.0, 5.0, 7200.0, DAY, 400 * DAY]


@pytest.mark.parametrize("again", AGAIN, ids=["crash", "restart"])
@pytest.mark.parametrize("jump", JUMPS)
async def test_a_wall_clock_set_while_down_changes_nothing(
    runs: Runs, again: Again, jump: float, caplog: pytest.LogCaptureFixture
) -> None:
    await runs.start()
    (await runs.take(20.0)).release()
    blocked = await runs.take(1.0, "blocked.example")
    blocked.report(429, retry_after=600.0)
    blocked.release()
    slowed = await runs.take(1.0, "slowed.example")
    slowed.report(200, rate_limit='"d";r=10;t=600')
    slowed.release()
    runs.scheduler.block("closed.example", runs.clock.wall() + 300.0)
    runs.scheduler.pause("paused.example")
    await again(runs, 4.0, jump)
    direction = "forward" if jump > 0 else "back"
    assert (
        f"while no gatekeeper ran here, the wall clock was set {direction} by {abs(jump):.0f} s"
        in caplog.text
    )
    assert is_paused(runs.scheduler, "paused.example")
    now = runs.clock.monotonic()
    due = {name: due_at(runs.scheduler, f"{name}.example") - now for name in ("blocked", "closed")}
    assert due == pytest.approx({"blocked": 596.0, "closed": 296.0})
    assert await runs.wait_for_lease(20.0) == pytest.approx(16.0)
    await runs.scheduler.close()


@pytest.mark.parametrize("jump", [-DAY, DAY])
async def test_stored_times_are_written_again_after_a_jump_of_the_wall_clock(
    runs: Runs, jump: float
) -> None:
    """The wall clock decides which records are old, and what holds after a reboot."""
    await runs.start()
    for host in (HOST, "left.example"):
        grant = await runs.take(1.0, host)
        grant.report(429, retry_after=600.0)
        grant.release()
    await runs.scheduler.close()
    runs.clock.jump_wall(jump)
    await runs.start(max_hosts=1)
    await runs.scheduler.close()
    for host in (HOST, "left.example"):
        until = runs.storage.durable[host].blocked_until
        assert until - runs.clock.wall() == pytest.approx(600.0)


@pytest.mark.parametrize("set_by", [0.0, -2.0, -60.0, -DAY, -400 * DAY])
async def test_after_a_reboot_no_block_outlasts_its_own_length(runs: Runs, set_by: float) -> None:
    await runs.start()
    grant = await runs.take(5.0)
    grant.report(429, retry_after=600.0)
    grant.release()
    await runs.scheduler.close()
    await runs.clock.elapse(30.0)
    runs.clock.reboot()
    runs.clock.jump_wall(set_by)
    await runs.start()
    left = due_at(runs.scheduler, HOST) - runs.clock.monotonic()
    assert left == pytest.approx(min(600.0, 570.0 - set_by))
    await runs.scheduler.close()


async def test_after_a_reboot_the_wall_clock_decides_the_age_of_a_clock(
    runs: Runs, caplog: pytest.LogCaptureFixture
) -> None:
    await runs.start()
    (await runs.take(100.0)).release()
    await runs.scheduler.close()
    await runs.clock.elapse(30.0)
    runs.clock.reboot()
    await runs.start()
    assert await runs.wait_for_lease(100.0) == pytest.approx(70.0)
    assert "the wall clock was set" not in caplog.text
    await runs.scheduler.close()


async def test_a_jump_of_the_wall_clock_is_logged_once(
    runs: Runs, caplog: pytest.LogCaptureFixture
) -> None:
    await runs.start()
    (await runs.take(10.0)).release()
    runs.clock.jump_wall(-7200.0)
    await runs.clock.elapse(100.0)
    assert caplog.text.count("the wall clock was set back by 7200 s") == 1
    await runs.scheduler.close()


async def test_a_lease_open_at_a_crash_is_waited_for_once_however_the_wall_clock_jumps(
    runs: Runs,
) -> None:
    await runs.start()
    await runs.take(10.0)
    runs.clock.jump_wall(-DAY)
    await runs.crash()
    assert await runs.wait_for_lease(10.0) == pytest.approx(10.0)
    await runs.scheduler.close()


async def test_a_lease_that_can_not_be_made_durable_is_not_granted(runs: Runs) -> None:
    await runs.start()
    runs.storage.fails = True
    for _ in range(3):
        with pytest.raises(StorageError, match="disk full"):
            await runs.take(10.0)
    stats = runs.scheduler.stats()
    assert (stats.in_flight, stats.granted) == (0, 0)
    runs.storage.fails = False
    assert await runs.wait_for_lease(10.0) == 0.0, "nothing was sent: no clock runs"
    await runs.scheduler.close()


async def test_a_block_that_can_not_be_made_durable_is_in_force_all_the_same(runs: Runs) -> None:
    await runs.start()
    grant = await runs.take(0.0)
    runs.storage.fails = True
    grant.report(429, retry_after=60.0)
    grant.release()
    assert runs.scheduler.blocked(HOST) is not None
    await runs.clock.elapse(61.0)
    for _ in range(2):
        with pytest.raises(StorageError, match="disk full"):
            await runs.take(0.0)  # The change in force is not written yet.
    (await runs.take(0.0, "other.example")).release()
    runs.storage.fails = False
    (await runs.take(0.0)).release()
    assert runs.storage.durable[HOST].failures == 1
    await runs.scheduler.close()


async def test_nothing_is_granted_before_the_next_run_would_know_of_a_crash(runs: Runs) -> None:
    """Only this record covers clocks of up to a second."""
    runs.storage.fails = True
    await runs.start()
    for _ in range(2):
        with pytest.raises(StorageError, match="disk full"):
            await runs.take(0.5)
    runs.storage.fails = False
    (await runs.take(0.5)).release()
    await runs.crash()
    assert await runs.wait_for_lease(0.5) >= 0.5
    await runs.scheduler.close()


async def test_a_waiter_is_refused_when_its_grant_can_not_be_stored(runs: Runs) -> None:
    await runs.start()
    (await runs.take(10.0)).release()
    waiting = [asyncio.create_task(runs.take(10.0)) for _ in range(3)]
    await runs.clock.elapse(5.0)
    runs.storage.fails = True
    await runs.clock.elapse(6.0)
    assert all(isinstance(task.exception(), StorageError) for task in waiting)
    runs.storage.fails = False
    assert await runs.wait_for_lease(10.0) == 0.0
    await runs.scheduler.close()


async def test_the_clock_of_a_grant_is_durable_before_the_grant(runs: Runs) -> None:
    await runs.start()
    await runs.take(10.0)
    record = runs.storage.durable[HOST]
    assert record.next_at == pytest.approx(runs.clock.wall() + 10.0)
    await runs.scheduler.close()


@pytest.mark.parametrize("interval", [None, -1.0, float("inf")])
async def test_a_record_without_a_usable_interval_still_keeps_its_clock(
    runs: Runs, clock: VirtualClock, interval: float | None
) -> None:
    runs.storage.durable[HOST] = ClockRecord(
        scope=HOST, next_at=clock.wall() + 7.0, interval=interval
    )
    await runs.start()
    assert await runs.wait_for_lease(1.0) == pytest.approx(7.0)
    await runs.scheduler.close()
