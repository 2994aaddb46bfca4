"""Fixtures: each rig, with a gate in this process and with a sidecar."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from tests.conformance.conftest import sidecar_on
from tests.conformance.ways import settings
from tests.integrations.rigs import MITMPROXY_TESTS, RIGS, Rig, Scrapy
from tests.internet import FakeInternet

__all__ = ["sidecar_on"]

collect_ignore = [] if MITMPROXY_TESTS else ["test_mitmproxy.py"]
"""The summary says so (tests/conftest.py)."""


@pytest.fixture(params=["embedded", "sidecar"])
def where(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=RIGS, ids=lambda rig: rig.__name__)
async def rig_on(
    request: pytest.FixtureRequest, where: str, sidecar_on: Any
) -> AsyncIterator[Callable[..., Awaitable[Rig]]]:
    """`rig = await rig_on(internet, pacing={...})` opens a rig, which is closed after the test."""
    pytest.importorskip(request.param.library)
    async with AsyncExitStack() as stack:

        async def begin(
            internet: FakeInternet, *, max_wait: float | None = None, **tables: Any
        ) -> Rig:
            sidecar = await sidecar_on(internet, **tables) if where == "sidecar" else None
            rig = request.param(internet, settings(**tables), sidecar)
            if max_wait is not None and rig.gives_up:
                rig.max_wait = max_wait
            await rig.start()
            stack.push_async_callback(rig.stop)
            return rig

        yield begin


@pytest.fixture(scope="session", autouse=True)
def scrapy_worker() -> Iterator[None]:
    """End the process of Scrapy's crawls after the run; the first crawl starts it."""
    yield
    if Scrapy.worker is not None:
        worker, Scrapy.worker = Scrapy.worker, None
        worker.close()
