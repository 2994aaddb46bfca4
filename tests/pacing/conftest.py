"""A scheduler under virtual time, and a storage that can lose its last second."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from gatekeeper.clock import VirtualClock
from gatekeeper.config import Config
from gatekeeper.pacing.scheduler import Scheduler
from gatekeeper.queue.polite import PoliteQueue
from tests.pacing_support import FakeStorage, scheduler_on
from tests.queue_support import Crawl, FakeGate


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(start=1000.0)


@pytest.fixture
def storage() -> FakeStorage:
    return FakeStorage()


@pytest.fixture
async def make(clock: VirtualClock) -> AsyncIterator[Callable[..., Scheduler]]:
    """Return a factory of opened schedulers, which are closed after the test."""
    made: list[Scheduler] = []

    async def build(config: Config | None = None, **given: Any) -> Scheduler:
        scheduler = scheduler_on(clock, config, seed=7, **given)
        made.append(scheduler)
        await scheduler.open()
        return scheduler

    yield build
    for scheduler in made:
        await scheduler.close()


@pytest.fixture
async def gate(make: Callable[..., Awaitable[Scheduler]], clock: VirtualClock) -> FakeGate:
    return FakeGate(await make(), clock)


@pytest.fixture
async def queue(gate: FakeGate) -> AsyncIterator[PoliteQueue]:
    async with PoliteQueue(gate, in_memory=4) as made:
        yield made


@pytest.fixture
async def crawl(queue: PoliteQueue, clock: VirtualClock) -> AsyncIterator[Crawl]:
    made = Crawl(queue, clock)
    yield made
    await made.stop()
