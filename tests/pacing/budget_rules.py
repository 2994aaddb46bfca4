"""Rules of daily budgets, for any ledger that keeps the counts. Each test takes the fixtures
`member`, which makes a scheduler, and `time`."""

from __future__ import annotations

import asyncio

import pytest

from gatekeeper.config import Config, GroupRule, HostRule, PacingConfig
from gatekeeper.errors import LeaseTimeout
from gatekeeper.pacing.grants import Grant
from gatekeeper.pacing.host_settings import DAY, BudgetSpent
from gatekeeper.pacing.scheduler import Scheduler
from gatekeeper.robots.timing import RobotsInterval
from tests.pacing.leases_together import PATIENCE, Member, Time
from tests.pacing_support import add_rule

HOST = "a.example"
AT_ONCE = RobotsInterval(0.0, "request-rate")


async def page(scheduler: Scheduler, host: str = HOST, seconds: float | None = 0.0) -> Grant:
    asked = RobotsInterval(seconds, "crawl-delay")
    async with asyncio.timeout(PATIENCE):
        return await scheduler.acquire(f"https://{host}/", host, admit=lambda: asked)


async def sent(scheduler: Scheduler, host: str = HOST, size: int = 0) -> Grant:
    grant = await page(scheduler, host)
    if size:
        grant.received(size)
    grant.report(200, 0.1)
    grant.release()
    return grant


async def spent(scheduler: Scheduler, host: str = HOST) -> float:
    """Return the seconds until the next page is allowed."""
    with pytest.raises(BudgetSpent) as caught:
        await page(scheduler, host)
    return caught.value.seconds


def near(seconds: float, wanted: float, time: Time) -> bool:
    return wanted - time.slack - 1e-3 <= seconds <= wanted + 1e-3


class DailyBudgets:
    """To be inherited by a class with the fixtures `member` and `time`."""

    async def test_the_day_of_a_budget_begins_with_its_first_page(
        self, member: Member, time: Time
    ) -> None:
        one = await member(max_pages_per_day=3)
        await time.tick(5000.0)
        for _ in range(3):
            await sent(one)
            await time.tick(100.0)
        assert near(await spent(one), DAY - 300.0, time)
        await sent(one, "b.example")  # each host has its own
        left = time.slack + 0.001
        await time.tick(DAY - 300.0 - left)
        assert near(await spent(one), left, time)
        await time.tick(left + 0.001)
        for _ in range(3):
            await sent(one)
        assert near(await spent(one), DAY, time)

    async def test_a_robots_txt_request_neither_counts_for_a_budget_nor_waits_for_it(
        self, member: Member
    ) -> None:
        one = await member(max_pages_per_day=1)
        for _ in range(3):
            grant = await one.acquire_robots(f"https://{HOST}/robots.txt", HOST, asked=AT_ONCE)
            grant.report(200)
            grant.release()
        await sent(one)
        grant = await one.acquire_robots(f"https://{HOST}/robots.txt", HOST, asked=AT_ONCE)
        grant.release()
        await spent(one)

    async def test_a_request_that_was_not_sent_does_not_count_for_the_budget(
        self, member: Member
    ) -> None:
        one = await member(max_pages_per_day=1)
        for _ in range(3):
            (await page(one)).give_back()
            await asyncio.sleep(0)
        grant = await page(one)
        grant.release()  # Without a report it may have been sent.
        await spent(one)

    async def test_reported_bytes_beyond_the_budget_defer_the_next_page(
        self, member: Member
    ) -> None:
        one = await member(max_bytes_per_day=1000, concurrency=3)
        grants = [await page(one) for _ in range(3)]
        for grant in grants:  # Requests in flight may exceed it.
            grant.received(700)
            grant.report(200)
            grant.release()
        await spent(one)

    async def test_no_reported_size_lowers_the_bytes_that_count(self, member: Member) -> None:
        one = await member(max_bytes_per_day=1000, concurrency=2)
        first, second = await page(one), await page(one)
        for grant, size in ((first, 1000), (second, -1000)):
            grant.received(size)
            grant.report(200)
            grant.release()
        await spent(one)

    async def test_concurrent_requests_do_not_exceed_a_budget(
        self, member: Member, time: Time
    ) -> None:
        one = await member(max_pages_per_day=7, concurrency=3, default_interval=0.0)

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
        await time.tick(10.0)
        found = await asyncio.gather(*tasks)
        assert (found.count("sent"), found.count("deferred")) == (7, 43)

    async def test_hosts_of_a_group_wait_for_each_other_and_not_for_a_budget(
        self, member: Member, time: Time
    ) -> None:
        one = await member(
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
        await time.tick(150.0)
        assert sum(await asyncio.gather(*tasks)) == 40
        assert one.stats().waiting == 0

    async def test_an_override_of_a_budget_holds_at_once(self, member: Member, time: Time) -> None:
        one = await member(max_pages_per_day=2)
        await sent(one)
        await sent(one)
        await spent(one)
        add_rule(one, HostRule(match=HOST, max_pages_per_day=3))
        await sent(one)
        await spent(one)
        add_rule(one, HostRule(match="*.example", max_bytes_per_day=5))  # a less specific match
        await spent(one)
        one.replace_rules(())  # of the configuration: those set at run time stay
        await spent(one)
        for match in (HOST, "*.example"):
            one.put_rules(match, ())
        one.adjust(PacingConfig())
        await sent(one)
        add_rule(one, HostRule(match=HOST, max_pages_per_day=1))
        assert await spent(one) > 0

    async def test_a_waiting_request_is_deferred_once_the_budget_is_spent(
        self, member: Member, time: Time
    ) -> None:
        one = await member(max_pages_per_day=1, concurrency=1)
        first = await page(one, seconds=5.0)
        waiting = asyncio.create_task(spent(one))
        await asyncio.sleep(0)
        first.report(200)
        first.release()
        await time.tick(6.0)
        assert await waiting == pytest.approx(DAY - 5.0, abs=6.0)

    async def test_a_request_without_a_timeout_is_deferred_by_a_spent_budget(
        self, member: Member
    ) -> None:
        one = await member(max_pages_per_day=1)
        await sent(one)
        with pytest.raises((BudgetSpent, LeaseTimeout)) as caught:
            await one.acquire("u", HOST, timeout=0, admit=lambda: AT_ONCE)
        assert isinstance(caught.value, BudgetSpent)

    async def test_a_budget_is_listed_by_why(self, member: Member, time: Time) -> None:
        one = await member(max_pages_per_day=2, max_bytes_per_day=10_000)
        await sent(one, size=12)
        (view,) = [view for view in one.why(HOST) if view.kind == "budget"]
        assert "1 of 2 pages, 12 of 10000 bytes in 24 hours" in str(view)
        assert view.until is None  # No lease waits for it.
        await sent(one)
        (view,) = [view for view in one.why(HOST) if view.kind == "budget"]
        assert view.until is not None
        assert not view.decides  # It is not an interval.
        assert view.seconds is not None
        assert near(view.seconds, DAY, time)
