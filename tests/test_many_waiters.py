"""A great many who wait: what each costs does not grow with their number, and the loop goes on."""

from __future__ import annotations

import asyncio
import itertools
import random
import sys
import time
from collections.abc import AsyncIterator, Callable
from types import FrameType
from typing import Any

import pytest

from gatekeeper import Config, Gatekeeper, LeaseTimeout
from gatekeeper.clock import VirtualClock
from gatekeeper.config import GroupRule, HostRule, PacingConfig
from gatekeeper.origin_queues import WaitingTasks
from gatekeeper.pacing.scheduler import Scheduler
from gatekeeper.pacing.scopes import RobotsInterval
from tests.internet import FakeInternet

FEW, MANY = 1_500, 6_000


@pytest.fixture
async def gate(virtual_internet: FakeInternet) -> AsyncIterator[Gatekeeper]:
    net = virtual_internet
    config = Config.from_dict({"host": [{"match": "*", "robots": "allow", "interval": 1000.0}]})
    async with Gatekeeper("bot", config=config, resolver=net.resolver, clock=net.clock) as gate:
        yield gate


def steps_of(work: Callable[[], object]) -> int:
    """Calls, of Python and of C, that the work takes."""
    count = 0

    def profile(_frame: FrameType, event: str, _: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


async def waiters(gate: Gatekeeper, count: int) -> list[asyncio.Task[None]]:
    async def wait(number: int) -> None:
        async with gate.lease(f"http://a.test/{number}"):
            pass

    tasks = [asyncio.create_task(wait(number)) for number in range(count)]
    while gate.stats().pacing.waiting < count:
        await asyncio.sleep(0)
    return tasks


async def test_tasks_that_join_in_one_turn_of_the_loop_let_others_in_between(
    gate: Gatekeeper,
) -> None:
    async with gate.lease("http://a.test/"):
        joined = [0]
        tasks = asyncio.create_task(waiters(gate, 3_000))
        while not tasks.done():
            await asyncio.sleep(0)
            joined.append(gate.stats().pacing.waiting)
        most = max(after - before for before, after in itertools.pairwise(joined))
        assert most <= 250
        for task in await tasks:
            task.cancel()
        await asyncio.wait(await tasks)
        assert gate.stats().pacing.waiting == 0


async def test_they_have_their_turns_in_the_order_in_which_they_came(
    virtual_internet: FakeInternet,
) -> None:
    net = virtual_internet
    config = Config.from_dict({"host": [{"match": "*", "robots": "allow", "interval": 0.0}]})
    got: list[int] = []

    async def run() -> None:
        async with Gatekeeper("bot", config=config, resolver=net.resolver, clock=net.clock) as gate:

            async def visit(number: int) -> None:
                if number % 3:
                    async with gate.lease(f"http://a.test/{number}"):
                        got.append(number)
                else:
                    lease = await gate.acquire(f"http://a.test/{number}")
                    got.append(number)
                    lease.end()

            async with asyncio.TaskGroup() as group, gate.lease("http://a.test/"):
                for number in range(1_000):
                    group.create_task(visit(number))
                await asyncio.sleep(0)
                for number in range(1_000, 1_200):  # while the others are let in
                    group.create_task(visit(number))
                await asyncio.sleep(0)

    await net.drive(run())
    assert got == list(range(1_200))


@pytest.mark.parametrize("order", ["first", "last", "any"])
async def test_what_it_costs_to_leave_does_not_grow_with_those_who_stay(order: str) -> None:
    async def cost(count: int) -> float:
        scheduler = Scheduler(
            Config(pacing=PacingConfig(default_interval=1000.0)),
            clock=VirtualClock(),
            rng=random.Random(1),
        )
        await scheduler.open()
        await scheduler.acquire("https://a.example/", "a.example", admit=RobotsInterval)
        tasks = [
            asyncio.create_task(
                scheduler.acquire("https://a.example/", "a.example", admit=RobotsInterval)
            )
            for _ in range(count)
        ]
        await asyncio.sleep(0)
        assert scheduler.stats().waiting == count
        leaving = list(tasks)
        if order == "last":
            leaving.reverse()
        elif order == "any":
            random.Random(2).shuffle(leaving)
        for task in leaving:
            task.cancel()
        began = time.process_time()
        await asyncio.wait(tasks)
        took = time.process_time() - began
        assert scheduler.stats().waiting == 0
        assert scheduler._books.scopes["a.example"].line is None
        await scheduler.close()
        return took

    few = min([await cost(FEW) for _ in range(3)])
    many = min([await cost(MANY) for _ in range(3)])
    assert many < 3.0 * few * MANY / FEW  # a quadratic part would make it 4 times that


async def test_whoever_leaves_frees_what_was_kept_for_him() -> None:
    """Nobody's place lies about until the host's turn, which may be days off."""
    scheduler = Scheduler(
        Config(pacing=PacingConfig(default_interval=1000.0)),
        clock=VirtualClock(),
        rng=random.Random(1),
    )
    await scheduler.open()
    await scheduler.acquire("https://a.example/", "a.example", admit=RobotsInterval)
    ask = lambda: scheduler.acquire("https://a.example/", "a.example", admit=RobotsInterval)  # noqa: E731
    stays = asyncio.create_task(ask())
    for _ in range(20):
        tasks = [asyncio.create_task(ask()) for _ in range(100)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    line = scheduler._books.scopes["a.example"].line
    assert line is not None
    assert len(line.queue or ()) < 200
    stays.cancel()
    await asyncio.wait([stays])
    await scheduler.close()


@pytest.mark.parametrize("again", [False, True])
async def test_hosts_behind_one_clock_leave_as_cheaply(again: bool) -> None:
    """Many hosts of one group: those whose waiters left don't stand in the others' way."""
    clock = VirtualClock()
    scheduler = Scheduler(
        Config(
            group=(GroupRule(name="g", interval=1.0, concurrency=1),),
            host=(HostRule(match="*.example", group="g", interval=0.0),),
        ),
        clock=clock,
        rng=random.Random(1),
    )
    await scheduler.open()
    first = await scheduler.acquire("https://a.example/", "a.example", admit=RobotsInterval)

    def ask(number: int) -> asyncio.Task[Any]:
        host = f"h{number}.example"
        return asyncio.create_task(
            scheduler.acquire(f"https://{host}/", host, admit=RobotsInterval)
        )

    tasks = [ask(number) for number in range(2_000)]
    await asyncio.sleep(0)
    theirs = scheduler._books.scopes["group:g"].line
    assert theirs is not None
    for task in tasks[:-2]:
        task.cancel()
    await asyncio.sleep(0)
    if again:  # some come back to places that are empty
        tasks[:50] = [ask(number) for number in range(50)]
    await asyncio.sleep(0)
    assert len(theirs.parked or ()) < 250
    first.report(200)
    first.release()
    served = []
    waiting = {task for task in tasks if not task.done()}
    while waiting:
        steps = steps_of(lambda: clock.advance(1.0))
        assert steps < 3_000
        await asyncio.sleep(0)
        done, waiting = (
            {one for one in waiting if one.done()},
            {one for one in waiting if not one.done()},
        )
        assert len(done) <= 1  # one clock for all
        for task in done:
            grant = task.result()
            served.append(grant.host)
            grant.report(200)
            grant.release()
    assert len(served) == (52 if again else 2)
    assert scheduler.stats().waiting == 0
    await scheduler.close()


async def test_many_whose_time_is_over_at_once_are_told_a_few_at_a_time(
    gate: Gatekeeper, virtual_internet: FakeInternet
) -> None:
    clock = virtual_internet.clock
    assert isinstance(clock, VirtualClock)
    scheduler = gate._scheduler
    async with gate.lease("http://a.test/"):

        async def wait() -> None:
            with pytest.raises(LeaseTimeout):
                await scheduler.acquire(
                    "http://a.test/x", "a.test", timeout=5000, admit=RobotsInterval
                )

        tasks = [asyncio.create_task(wait()) for _ in range(2_500)]
        await asyncio.sleep(0)
        clock._now += 5_000.5  # a timer comes late, and finds them all
        left = [scheduler.stats().waiting]
        while left[-1]:
            scheduler._fire()  # each time in a turn of its own: a virtual clock knows none
            left.append(scheduler.stats().waiting)
        assert [before - after for before, after in itertools.pairwise(left)] == [1000, 1000, 500]
        await asyncio.gather(*tasks)


async def test_waiting_tasks_leave_as_cheaply_however_many_they_are() -> None:
    async def cost(count: int) -> float:
        waiting = WaitingTasks(nothing_to_do=lambda: False)
        tasks = [asyncio.create_task(waiting.wait()) for _ in range(count)]
        await asyncio.sleep(0)
        for task in reversed(tasks):
            task.cancel()
        began = time.process_time()
        await asyncio.wait(tasks)
        took = time.process_time() - began
        assert len(waiting) == 0
        return took

    few = min([await cost(FEW) for _ in range(3)])
    many = min([await cost(4 * MANY) for _ in range(2)])
    assert many < 4.0 * few * 4 * MANY / FEW  # searched through, it would be sixteen times
