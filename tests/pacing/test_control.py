"""What operators do to the scheduler, and what they see of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from gatekeeper.clock import VirtualClock
from gatekeeper.errors import ConfigError, LeaseTimeout
from gatekeeper.pacing.scheduler import Scheduler
from gatekeeper.pacing.scopes import INF
from gatekeeper.robots.timing import RobotsInterval
from tests.pacing_support import hosts_of, scope_of

A = "a.example"
DELAY = RobotsInterval(10.0, "crawl-delay 10 s from robots.txt line 2")


@pytest.fixture
async def scheduler(make: Callable[..., Awaitable[Scheduler]]) -> Scheduler:
    return await make()


@pytest.mark.parametrize("status", [404, None], ids=["404", "no report"])
async def test_why_names_the_source_after_a_report_of_which_nothing_is_kept(
    scheduler: Scheduler, status: int | None
) -> None:
    grant = await scheduler.acquire("u", A, admit=lambda: DELAY)
    grant.report(status)
    grant.release()
    said = {view.kind: view for view in scheduler.why(A)}
    assert (said["next"].source, said["interval"].source) == (DELAY.source, DELAY.source)
    assert said["interval"].decides


async def test_why_names_the_source_of_what_a_report_just_slowed(scheduler: Scheduler) -> None:
    grant = await scheduler.acquire("u", A, admit=lambda: DELAY)
    grant.report(200, rate_limit='"day";r=0;t=3600')
    grant.release()
    said = {view.kind: view for view in scheduler.why(A)}
    assert said["next"].source == "RateLimit field: one in 3600 s"
    assert said["next"].seconds == pytest.approx(3600.0)


async def test_a_lease_timeout_is_counted(scheduler: Scheduler) -> None:
    grant = await scheduler.acquire("u", A, admit=lambda: RobotsInterval(0.0))
    with pytest.raises(LeaseTimeout):
        await scheduler.acquire("u", A, admit=lambda: RobotsInterval(0.0), timeout=0)
    grant.release()
    assert scheduler.stats().timeouts == 1


async def test_a_lease_timeout_says_what_holds_the_host_up(
    scheduler: Scheduler, clock: VirtualClock
) -> None:
    async def told() -> str:
        with pytest.raises(LeaseTimeout) as caught:
            await scheduler.acquire("u", A, admit=lambda: DELAY, timeout=0)
        return str(caught.value).partition("; ")[2]

    wall = clock.wall()
    scheduler.block(A, wall + 2_000_000.0, "a visitor complained")
    assert await told() == "the host is due in 2000000 s (a visitor complained)"
    scheduler.pause(A)
    assert await told() == "the operator paused it"
    scheduler.block(A, wall - 1.0)
    assert await told() == "the operator paused it"
    scheduler.pause(A, paused=False)
    grant = await scheduler.acquire("u", A, admit=lambda: DELAY)
    grant.report(503, retry_after=86_400.0)
    grant.release()
    assert await told() == "the host is due in 86400 s (503, Retry-After 86400)"


async def test_a_lease_timeout_by_the_interval_says_when_the_host_is_due(
    scheduler: Scheduler,
) -> None:
    (await scheduler.acquire("u", A, admit=lambda: DELAY)).release()
    with pytest.raises(
        LeaseTimeout, match=r"no lease of a\.example in time; the host is due in 10 s$"
    ):
        await scheduler.acquire("u", A, admit=lambda: DELAY, timeout=0)


async def test_a_block_until_no_moment_is_refused(scheduler: Scheduler) -> None:
    with pytest.raises(ConfigError, match=r"block of a\.example: until=nan"):
        scheduler.block(A, float("nan"))
    assert hosts_of(scheduler) == ()


async def test_a_lost_fleet_store_is_named_where_nothing_else_holds_the_host_up(
    scheduler: Scheduler,
) -> None:
    scope_of(scheduler, A)
    assert scheduler.holdups.late(A) == (0.0, "")

    class Away:
        def withheld(self, scopes: tuple[str, ...], interval: float) -> tuple[str, float, bool]:
            return "the fleet's store is away", INF, False

    scheduler.holdups._remote = Away()  # type: ignore[assignment]
    assert scheduler.holdups.late(A) == (0.0, "; the fleet's store is away")
    scheduler.pause(A)
    assert scheduler.holdups.late(A) == (0.0, "; the operator paused it")
