"""Rules for schedulers that share a ledger, wherever it stores its records. Each test takes the
fixtures `member`, which makes one more scheduler of the fleet, and `time`."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Protocol

import pytest

from gatekeeper.clock import Clock, VirtualClock
from gatekeeper.config import Config, GroupRule, HostRule
from gatekeeper.pacing.grants import Grant
from gatekeeper.pacing.host_settings import DAY, BudgetSpent
from gatekeeper.pacing.scheduler import Scheduler
from gatekeeper.robots.timing import RobotsInterval
from tests.pacing_support import due_at, is_paused, stall
from tests.waiting_support import until

HOST = "a.example"
PATIENCE = 20.0
"""Most seconds that a test waits for anything."""

Member = Callable[..., Awaitable[Scheduler]]
"""Makes a scheduler: `await member(config)`, or with pacing settings as keywords:
`await member(max_pages_per_day=3)`."""


class Time(Protocol):
    """The time of all members and of their ledger."""

    clock: Clock
    slack: float
    """Seconds that may pass in addition."""

    async def tick(self, seconds: float) -> None:
        """Advance the time, calling each timer at its moment, until nothing more happens."""

    def stall(self, seconds: float) -> None:
        """Advance the time without calling timers, as if the members' processes were stopped."""


class VirtualTime:
    """The virtual time of schedulers and a ledger in one process."""

    slack = 0.0

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock

    async def tick(self, seconds: float) -> None:
        await self.clock.elapse(seconds)

    def stall(self, seconds: float) -> None:
        stall(self.clock, seconds)


async def start(scheduler: Scheduler, interval: float = 1.0) -> Grant:
    async with asyncio.timeout(PATIENCE):
        return await scheduler.acquire("u", HOST, admit=lambda: RobotsInterval(interval, "x"))


def starting(scheduler: Scheduler) -> asyncio.Task[Grant]:
    return asyncio.create_task(start(scheduler))


def is_stale(grant: Grant) -> bool:
    return grant.stale


class LeasesTogether:
    """To be inherited by a class with the fixtures `member` and `time`."""

    async def test_a_429_holds_for_every_request_that_others_have_not_sent(
        self, member: Member, time: Time
    ) -> None:
        one, other = await member(), await member()
        grant = await start(one)
        waiting = starting(other)
        await time.tick(0.5)
        grant.report(429, retry_after=60.0)
        grant.release()
        await time.tick(59.0)
        assert not waiting.done()
        assert other.blocked(HOST) is not None  # It was notified.
        await time.tick(3.0)
        await until(waiting.done)
        (await waiting).release()

    async def test_a_slow_host_is_asked_by_one_at_a_time(self, member: Member, time: Time) -> None:
        one, other = await member(), await member()
        grant = await start(one)
        waiting = starting(other)
        await time.tick(70.0)  # Much longer than a hold, which is renewed.
        assert not waiting.done()
        grant.head()
        headed = time.clock.monotonic()
        await time.tick(0.5)
        assert not waiting.done()
        grant.release()
        await time.tick(0.6)
        await until(waiting.done)
        following = await waiting
        assert following.start_at >= headed + 1.0 - 1e-3
        following.release()

    async def test_a_grant_that_was_not_sent_is_stale_after_a_block(
        self, member: Member, time: Time
    ) -> None:
        """There are two slots, and a block comes between grant and send."""
        config = Config(host=(HostRule(match="*", concurrency=2, interval=0.0),))
        one, other = await member(config), await member(config)
        first, second = await start(one, interval=0.0), await start(other, interval=0.0)
        assert not is_stale(second)
        first.report(429, retry_after=60.0)
        await until(lambda: is_stale(second))
        assert not first.stale  # Its response has arrived.
        second.undo()
        first.release()
        await time.tick(0.0)

    async def test_a_grant_that_was_not_sent_within_its_hold_is_stale(
        self, member: Member, time: Time
    ) -> None:
        """A process was stopped: its clock advanced, but its timers did not fire."""
        one, other = await member(), await member()
        grant = await start(one)
        assert not is_stale(grant)
        time.stall(20.5)
        assert is_stale(grant)
        await time.tick(0.1)  # The process continues and renews it; it is still in flight.
        waiting = starting(other)
        await time.tick(30.0)
        assert not waiting.done()
        assert is_stale(grant)
        grant.release()
        await time.tick(1.1)
        await until(waiting.done)
        (await waiting).release()

    async def test_why_tells_the_requests_of_another_process(
        self, member: Member, time: Time
    ) -> None:
        one, other = await member(), await member()
        grant = await start(one, interval=30.0)
        earliest = time.clock.monotonic()
        grant.release()
        await time.tick(0.0)
        latest = time.clock.monotonic()
        await time.tick(1.0)
        waiting = starting(other)
        await time.tick(1.0)
        due = due_at(other, HOST) - 30.0
        # A question may be sent one round trip early.
        assert earliest - 0.05 <= due <= latest + 0.1
        assert "a.example" in " ".join(map(str, other.why(HOST)))
        waiting.cancel()
        await time.tick(0.1)

    async def test_a_pause_by_one_holds_for_all(self, member: Member, time: Time) -> None:
        one, other = await member(), await member()
        one.pause(HOST)
        await time.tick(0.0)
        waiting = starting(other)
        await time.tick(100.0)
        assert not waiting.done()
        assert is_paused(other, HOST)
        other.pause(HOST, paused=False)
        await time.tick(0.1)
        await until(waiting.done)
        (await waiting).release()
        await until(lambda: not is_paused(one, HOST))

    @pytest.mark.parametrize("how", ["pause", "block"])
    async def test_a_block_lifted_by_one_ends_for_members_that_missed_the_block(
        self, member: Member, time: Time, how: str
    ) -> None:
        one = await member()
        if how == "pause":
            one.pause(HOST)
        else:
            one.block(HOST, time.clock.wall() + 7200.0)
        await time.tick(0.1)
        others = [await member() for _ in range(4)]
        waiting = [starting(other) for other in others]
        await time.tick(100.0)
        assert not any(task.done() for task in waiting)
        if how == "pause":
            one.pause(HOST, paused=False)
        else:
            one.block(HOST, 0.0)
        starts: dict[asyncio.Task[Grant], float] = {}
        for _ in range(12):
            await time.tick(0.5)
            for task in waiting:
                if task.done() and task not in starts:
                    starts[task] = task.result().start_at
                    task.result().release()
        assert len(starts) == len(waiting)
        pairs = itertools.pairwise(sorted(starts.values()))
        assert all(later - start >= 1.0 - 1e-3 for start, later in pairs)

    async def test_a_lease_of_an_earlier_run_holds_its_host_for_all(
        self, member: Member, time: Time
    ) -> None:
        one, other = await member(), await member()
        grant = await one.hold("u", HOST, 300.0)
        await time.tick(0.1)
        waiting = starting(other)
        await time.tick(100.0)
        assert not waiting.done()
        grant.release()
        await time.tick(5.0)
        await until(waiting.done)
        (await waiting).release()

    @pytest.mark.parametrize("members", [1, 2])
    async def test_hosts_of_one_group_that_ask_at_once_all_get_leases(
        self, member: Member, time: Time, members: int
    ) -> None:
        """The denials of a call report the group's clock, which the grant of the same call has just
        set. They must not keep that grant from being used."""
        config = Config(
            host=(HostRule(match="*.example", group="all"),),
            group=(GroupRule(name="all", interval=1.0),),
        )
        made = [await member(config) for _ in range(members)]

        async def ask(number: int) -> float:
            scheduler, host = made[number % members], f"h{number // members % 20}.example"
            grant = await scheduler.acquire("u", host, admit=lambda: RobotsInterval(0.0))
            grant.report(200)
            grant.release()
            return grant.start_at

        tasks = [asyncio.create_task(ask(number)) for number in range(60)]
        for _ in range(12):
            await time.tick(10.0)
            if all(task.done() for task in tasks):
                break
        assert all(task.done() for task in tasks)
        starts = sorted(await asyncio.gather(*tasks))
        pairs = itertools.pairwise(starts)
        assert all(later - start >= 1.0 - 1e-3 for start, later in pairs)

    async def test_two_schedulers_share_a_budget(self, member: Member, time: Time) -> None:
        both = [await member(max_pages_per_day=11, concurrency=4) for _ in range(2)]

        async def crawl(one: Scheduler) -> int:
            for count in range(20):
                try:
                    grant = await start(one, interval=0.0)
                except BudgetSpent:
                    return count
                grant.report(200, 0.1)
                grant.release()
            return 20

        tasks = [asyncio.create_task(crawl(one)) for one in both for _ in range(3)]
        await time.tick(30.0)
        assert all(task.done() for task in tasks)
        assert sum(await asyncio.gather(*tasks)) == 11
        for one in both:
            with pytest.raises(BudgetSpent) as caught:
                await start(one, interval=0.0)
            assert DAY - 61.0 <= caught.value.seconds <= DAY
