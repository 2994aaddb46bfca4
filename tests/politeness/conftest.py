"""Fixtures: a fake internet with virtual time and a slow name service, and gates over it."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from gatekeeper import Gatekeeper
from gatekeeper.clock import VirtualClock
from gatekeeper.storage.base import Storage
from tests.gate_support import gate_on, open_config
from tests.internet import FakeInternet
from tests.politeness.world import AGENT, WALL

MakeGate = Callable[..., Gatekeeper]


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(wall=WALL)


@pytest.fixture
async def internet(clock: VirtualClock) -> AsyncIterator[FakeInternet]:
    async with FakeInternet(clock=clock, rng=random.Random(20261120), dns_delay=(0.0, 0.3)) as net:
        yield net


@pytest.fixture
def make_gate(internet: FakeInternet, clock: VirtualClock) -> MakeGate:
    """Return a gate on the internet, not yet open. Keywords are sections of its configuration."""

    def make(*, storage: Storage | None = None, seed: int = 7, **settings: Any) -> Gatekeeper:
        return gate_on(
            internet,
            open_config(**settings),
            agent=AGENT,
            clock=clock,
            storage=storage,
            rng=random.Random(seed),
        )

    return make
