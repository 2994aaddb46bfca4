"""The operator's hand on the scheduler, and what is to be seen of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from gatekeeper.errors import ConfigError, LeaseTimeout
from gatekeeper.pacing.scheduler import Scheduler
from gatekeeper.pacing.scopes import RobotsInterval

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
    assert said["next"].source == "RateLimit field: one in 3.6e+03 s"
    assert said["next"].seconds == pytest.approx(3600.0)


async def test_who_can_not_wait_for_a_slot_is_counted(scheduler: Scheduler) -> None:
    grant = await scheduler.acquire("u", A, admit=lambda: RobotsInterval(0.0))
    with pytest.raises(LeaseTimeout):
        await scheduler.acquire("u", A, admit=lambda: RobotsInterval(0.0), timeout=0)
    grant.release()
    assert scheduler.stats().timeouts == 1


async def test_a_block_until_no_moment_is_refused(scheduler: Scheduler) -> None:
    with pytest.raises(ConfigError, match=r"block of a\.example: until=nan"):
        scheduler.block(A, float("nan"))
    assert scheduler.hosts() == ()
