"""Schedulers that share a real server, each with a ledger of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from gatekeeper.clock import Timer
from gatekeeper.config import Config, PacingConfig
from gatekeeper.fleet import RedisLedger
from gatekeeper.pacing.scheduler import Scheduler
from tests.fleet.conftest import FleetTime, Join, ShiftedClock, flights_of, unsent
from tests.fleet.server import Server
from tests.pacing.budget_rules import DailyBudgets
from tests.pacing.leases_together import PATIENCE, LeasesTogether, Member
from tests.pacing_support import scheduler_on

AT_REST = 20
"""Turns of the loop without calls in flight, after which earlier messages have been received."""


class MovedTimer:
    """A timer of the loop that is set again when the time is advanced."""

    def __init__(self, clock: SteppedClock, when: float, callback: Callable[[], object]) -> None:
        self.clock, self.when, self.callback = clock, when, callback
        self.clock.timers.add(self)
        self.timer = clock.in_loop(when, self.fire)

    def fire(self) -> None:
        self.clock.timers.discard(self)
        self.callback()

    def cancel(self) -> None:
        self.clock.timers.discard(self)
        self.timer.cancel()

    def set_anew(self) -> None:
        self.timer.cancel()
        self.timer = self.clock.in_loop(self.when, self.fire)


class SteppedClock(ShiftedClock):
    """A clock whose timers follow when it is advanced."""

    __slots__ = ("timers",)

    def __init__(self) -> None:
        super().__init__()
        self.timers: set[MovedTimer] = set()

    def in_loop(self, when: float, callback: Callable[[], object]) -> Timer:
        return super().call_at(when, callback)

    def call_at(self, when: float, callback: Callable[..., object], *args: Any) -> Timer:
        return MovedTimer(self, when, lambda: callback(*args))


class SteppedTime(FleetTime):
    """Advances from timer to timer, and waits at each until no calls are in flight."""

    clock: SteppedClock
    slack = PATIENCE

    def __init__(self, server: Server) -> None:
        super().__init__(server, SteppedClock())
        self.members: list[tuple[Scheduler, RedisLedger]] = []

    async def tick(self, seconds: float) -> None:
        end = self.clock.monotonic() + seconds
        await self.rest()
        while (left := end - self.clock.monotonic()) > 0:
            due = min((one.when for one in self.clock.timers), default=end)
            self.stall(min(left, max(0.0, due - self.clock.monotonic())))
            for timer in list(self.clock.timers):
                timer.set_anew()
            await self.rest()

    def stall(self, seconds: float) -> None:
        self.server_alone(seconds)
        self.clock.by += seconds

    async def rest(self) -> None:
        calm = 0
        async with asyncio.timeout(PATIENCE):
            while calm < AT_REST:
                await asyncio.sleep(0)
                calm = 0 if any(map(under_way, self.members)) else calm + 1


def under_way(member: tuple[Scheduler, RedisLedger]) -> bool:
    """Return True if the scheduler has pending calls or calls in flight."""
    scheduler, ledger = member
    calls = scheduler._remote
    assert calls is not None
    return bool(calls._flights or calls._departing or unsent(ledger) or flights_of(ledger))


@pytest.fixture
def time(time: FleetTime) -> SteppedTime:
    return SteppedTime(time.server)


@pytest.fixture
async def member(join: Join, time: SteppedTime) -> AsyncIterator[Member]:
    async def build(config: Config | None = None, **pacing: Any) -> Scheduler:
        config = config or Config(pacing=PacingConfig(**pacing))
        number, made = len(time.members), list[Scheduler]()

        def user(ledger: RedisLedger) -> None:
            made.append(scheduler_on(time.clock, config, seed=number, ledger=ledger))

        ledger = await join(user=user)
        await made[0].open()
        time.members.append((made[0], ledger))
        return made[0]

    yield build
    for scheduler, _ in time.members:
        await scheduler.close()


class TestLeasesTogetherOverAServer(LeasesTogether):
    """The same tests as over a ledger in memory."""


class TestDailyBudgetsOverAServer(DailyBudgets):
    """The same tests as without a ledger and over a ledger in memory."""
