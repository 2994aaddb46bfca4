"""Fixtures on the fake internet; tests/conftest.py makes them known everywhere."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from gatekeeper.clock import VirtualClock
from tests.internet.net import FakeInternet

__all__ = ["clock", "internet", "net", "virtual_internet"]


@pytest.fixture
def clock() -> VirtualClock:
    """A clock that moves only when it is advanced."""
    return VirtualClock()


@pytest.fixture
async def internet() -> AsyncIterator[FakeInternet]:
    """A fake internet on the system's clock."""
    async with FakeInternet() as net:
        yield net


@pytest.fixture
async def virtual_internet(clock: VirtualClock) -> AsyncIterator[FakeInternet]:
    """A fake internet whose `.clock` is the virtual one; await through `.drive(...)`."""
    async with FakeInternet(clock=clock) as net:
        yield net


@pytest.fixture
def net(virtual_internet: FakeInternet) -> FakeInternet:
    """The virtual internet, by a short name."""
    return virtual_internet
