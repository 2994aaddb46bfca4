"""A fake internet in virtual time, a sidecar on it, and clients of the sidecar."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from tests.conformance.ways import World
from tests.internet import FakeInternet


@pytest.fixture
async def world(virtual_internet: FakeInternet) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        yield World(virtual_internet, stack)
