"""A disk that fills up under a running sidecar, and kill -9, judged by the site's own log."""

from __future__ import annotations

import itertools
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import aiohttp
import pytest

from gatekeeper import Deferred, RemoteGatekeeper
from tests.internet import FakeInternet

resource = pytest.importorskip("resource")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits of another process")

DELAY = 1.5
PROBLEM = "urn:gatekeeper:problem:storage"


@pytest.fixture
async def origin(internet: FakeInternet) -> str:
    site = internet.site("127.0.0.1").robots(f"User-agent: *\nCrawl-delay: {DELAY}\n")
    site.page("/page", "the page")
    return f"http://127.0.0.1:{internet.listener().port()}"


@contextmanager
def full_disk(sidecar: Any) -> Iterator[None]:
    """Let no file of the process grow or be written to."""
    unlimited = resource.RLIM_INFINITY
    resource.prlimit(sidecar.process.pid, resource.RLIMIT_FSIZE, (0, unlimited))
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            resource.prlimit(sidecar.process.pid, resource.RLIMIT_FSIZE, (unlimited, unlimited))


async def fetch(sidecar: Any, url: str) -> tuple[int, Any, aiohttp.ClientResponse]:
    async with sidecar.session.get(f"{sidecar.base}/v1/fetch", params={"url": url}) as response:
        known = response.content_type.endswith("json")
        return response.status, await response.json(content_type=None) if known else None, response


async def ready(sidecar: Any, status: int) -> str:
    """Check that `/readyz` answers with `status`; for 200 wait for the log. Return its body."""
    if status == 200:
        again = "promises can be kept again"
        assert await sidecar.said(again)
        sidecar.errors[:] = [line for line in sidecar.errors if again not in line]
    async with sidecar.session.get(f"{sidecar.base}/readyz") as response:
        assert response.status == status
        return await response.text()


async def refused_everywhere(sidecar: Any, url: str) -> None:
    status, problem, response = await fetch(sidecar, url)
    assert (status, problem["type"]) == (503, PROBLEM)
    assert problem["decision"]["reason"] == "storage"
    assert int(response.headers["Retry-After"]) >= 1
    for body in ({"url": url}, {"url": url, "wait": 20}):
        async with sidecar.session.post(f"{sidecar.base}/v1/leases", json=body) as response:
            problem = await response.json(content_type=None)
            assert (response.status, problem["type"]) == (503, PROBLEM)
            assert problem["decision"]["reason"] == "storage"
            assert int(response.headers["Retry-After"]) >= 1
    async with RemoteGatekeeper(sidecar.base) as remote:
        with pytest.raises(Deferred) as caught:
            await remote.acquire(url)
    assert caught.value.decision.reason == "storage"
    assert caught.value.retry_at is not None


async def test_a_full_disk_and_kill_9_violate_no_interval(
    start: Any, internet: FakeInternet, origin: str
) -> None:
    page = f"{origin}/page"
    first = await start()
    assert (await fetch(first, page))[0] == 200
    with full_disk(first):
        # The first request still waits for the host's lease, and is refused when that comes.
        assert (await fetch(first, page))[0] == 503
        assert "promises can't be kept" in await ready(first, 503)
        await refused_everywhere(first, page)
        asked = len(internet.requests)
    await ready(first, 200)
    assert (await fetch(first, page))[0] == 200
    assert len(internet.requests) == asked + 1
    with full_disk(first):
        assert (await fetch(first, page))[0] == 503
        first.process.kill()
        await first.stopped()
        second = await start()
        assert (await fetch(second, page))[0] == 200
        second.tell(signal.SIGINT)
        await second.stopped()

    times = [one.at for one in internet.requests]
    assert len(times) >= 4
    assert min(b - a for a, b in itertools.pairwise(times[1:])) > DELAY - 0.05


async def test_with_on_failure_continue_a_full_disk_refuses_nothing(
    start: Any, internet: FakeInternet, origin: str
) -> None:
    page = f"{origin}/page"
    sidecar = await start(env={"GATEKEEPER_STORAGE_ON_FAILURE": "continue"})
    with full_disk(sidecar):
        for _ in range(2):
            assert (await fetch(sidecar, page))[0] == 200
        async with sidecar.session.get(f"{sidecar.base}/readyz") as response:
            assert response.status == 200
        body = {"url": page, "wait": 20}
        async with sidecar.session.post(f"{sidecar.base}/v1/leases", json=body) as response:
            assert response.status == 201
    assert await sidecar.said("going on without (storage.on_failure")


async def clocks(sidecar: Any) -> Any:
    async with sidecar.session.get(f"{sidecar.base}/v1/hosts/127.0.0.1") as response:
        return (await response.json())["clocks"]


def no_file_may_grow() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))


@pytest.mark.parametrize("earlier", [True, False])
async def test_a_start_on_a_full_disk_defers_and_recovers_by_itself(
    start: Any, internet: FakeInternet, origin: str, earlier: bool
) -> None:
    """With the state of an earlier process that was killed, and without one."""
    page = f"{origin}/page"
    if earlier:
        first = await start()
        async with first.session.post(
            f"{first.base}/v1/leases", json={"url": page, "wait": 20}
        ) as got:
            assert got.status == 201
        first.process.kill()
        await first.stopped()
    asked = len(internet.requests)
    second = await start(first=no_file_may_grow)
    assert "promises can't be kept" in await ready(second, 503)
    await refused_everywhere(second, page)
    assert len(internet.requests) == asked
    with full_disk(second):
        pass  # there is space again
    await ready(second, 200)
    if earlier:  # the earlier lease is held again, so the slot is taken
        assert await second.said("1 leases of an earlier process are held again")
        assert "in_flight" in [one["kind"] for one in await clocks(second)]
    if not earlier:
        assert (await fetch(second, page))[0] == 200
        assert len(internet.requests) == 2
