"""A fleet in virtual time: up to 1,000 schedulers over one ledger behind a network."""

from __future__ import annotations

import asyncio
import random

import pytest

from gatekeeper.clock import VirtualClock
from gatekeeper.pacing.scheduler import Scheduler
from gatekeeper.robots.timing import RobotsInterval
from gatekeeper.testing.simulation import Account, Judge
from tests.effort import LONG
from tests.pacing.test_ledger import FarLedger
from tests.pacing_support import scheduler_on

MANY = 1000 if LONG else 200
WISH = RobotsInterval(1.0, "crawl-delay 1 s")


class Wire(FarLedger):
    """A network of 1 to 20 ms each way that loses a share of the calls and replies."""

    async def wire(self) -> None:
        await self.clock.sleep(self.rng.choice((0.001, 0.002, 0.005, 0.02)))
        if self.rng.random() < self.failing:
            raise ConnectionError("lost")


@pytest.mark.parametrize(
    ("members", "hosts", "lost", "most"),
    [
        (50, 25, 0.0, 2.0),
        (50, 25, 0.05, 2.5),
        (MANY, MANY, 0.02, 2.0),
        (MANY, MANY // 20, 0.02, 3.5),  # Each of a host's members repeats lost calls.
    ],
)
async def test_a_fleet_keeps_one_pace_and_asks_twice_a_lease(
    clock: VirtualClock, members: int, hosts: int, lost: float, most: float
) -> None:
    wire, rng, judge = Wire(clock, 1, lost), random.Random(3), Judge()
    accounts = {f"h{number}": Account(1.0) for number in range(hosts)}
    fleet = [scheduler_on(clock, seed=n, ledger=wire) for n in range(members)]
    for scheduler in fleet:
        await scheduler.open()

    async def visit(scheduler: Scheduler) -> None:
        for _ in range(3):
            host = f"h{rng.randrange(hosts)}"
            grant = await scheduler.acquire("u", host, admit=lambda: WISH)
            judge.start(accounts[host], clock.monotonic())
            await clock.sleep(rng.choice((0.05, 0.3, 1.5)))
            judge.end(accounts[host], clock.monotonic(), headed=False)
            grant.report(200, 0.1)
            grant.release()

    tasks = [asyncio.create_task(visit(scheduler)) for scheduler in fleet]
    for _ in range(100):
        await clock.elapse(5.0, turns=6)
        if all(task.done() for task in tasks):
            break
    assert all(task.done() for task in tasks)
    assert not judge.violations
    assert wire.asked <= most * 3 * members
    wire.failing = 0.0
    closing = [asyncio.create_task(scheduler.close()) for scheduler in fleet]
    await clock.elapse(10.0)
    await asyncio.gather(*closing)
