"""Fixtures on the fake internet; tests/conftest.py makes them known everywhere."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from gatekeeper.clock import VirtualClock
from tests.internet.net import FakeInternet

__all__ = ["internet", "virtual_internet"]


@pytest.fixture
async def internet() -> AsyncIterator[FakeInternet]:
    """A fake internet on the system's clock."""
    async with FakeInternet() as net:
        yield net


@pytest.fixture
async def virtual_internet() -> AsyncIterator[FakeInternet]:
    """A fake internet whose `.clock` is a VirtualClock; await through `.drive(...)`."""
    async with FakeInternet(clock=VirtualClock()) as net:
        yield net
