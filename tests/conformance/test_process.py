"""A client and a sidecar in another process, which is killed and restarted."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from gatekeeper import RemoteGatekeeper, Verdict
from tests.internet import FakeInternet
from tests.sidecar.conftest import Sidecar, Start, start

__all__ = ["start"]

ROBOTS = "User-agent: *\nCrawl-delay: 0.2\nDisallow: /private\n"


class Process:
    """`gatekeeper serve` as a process that can be restarted with the same state file."""

    def __init__(self, start: Start, *listen: str) -> None:
        self._start, self._listen = start, listen
        self._sidecar: Sidecar
        self.package: Path | None = None
        """Where the package is imported from; None: it is the tree's own."""
        self.where = ""

    async def start(self) -> None:
        env = {} if self.package is None else {"PYTHONPATH": str(self.package)}
        words = (*self._listen, "--user-agent", "examplebot/1.0")
        self._sidecar = await self._start(*words, env=env, cwd=self.package)
        self.where = self._sidecar.where

    async def end(self, number: signal.Signals) -> None:
        self._sidecar.tell(number)
        await self._sidecar.stopped()


@pytest.fixture
async def process(request: pytest.FixtureRequest, start: Start, socket_folder: Path) -> Process:
    tcp = getattr(request, "param", "unix") == "tcp"
    process = Process(start, *(() if tcp else ("--socket", str(socket_folder / "gate.sock"))))
    await process.start()
    return process


@pytest.fixture
async def crawl(internet: FakeInternet) -> AsyncIterator[Callable[..., Awaitable[None]]]:
    """`await crawl(gate, url)`: fetch one page under a lease."""
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(internet.session())

        async def one(gate: RemoteGatekeeper, url: str) -> None:
            async with gate.lease(url, timeout=20) as lease, session.get(url) as page:
                lease.report(status=page.status)

        yield one


def origin(internet: FakeInternet) -> str:
    internet.site("127.0.0.1").robots(ROBOTS).page("/page")
    return f"http://127.0.0.1:{internet.listener().port()}"


@pytest.mark.parametrize("process", ["tcp", "unix"], indirect=True)
async def test_a_sidecar_process_answers_questions_and_grants_leases(
    internet: FakeInternet, process: Process, crawl: Callable[..., Awaitable[None]]
) -> None:
    base = origin(internet)
    async with RemoteGatekeeper(process.where) as gate:
        decisions = await gate.check_all([f"{base}/private/x", f"{base}/page"])
        assert [d.verdict for d in decisions] == [Verdict.DENY, Verdict.ALLOW]
        await asyncio.gather(*(crawl(gate, f"{base}/page") for _ in range(4)))
    site = internet.sites["127.0.0.1"]
    assert site.paths == ["/robots.txt", *["/page"] * 4]
    assert min(site.gaps()) >= 0.2


async def test_a_lease_outlives_its_sidecar_and_its_report_is_taken_once(
    internet: FakeInternet, process: Process, crawl: Callable[..., Awaitable[None]]
) -> None:
    base = origin(internet)
    async with RemoteGatekeeper(process.where, patience=30.0) as gate:
        lease = await gate.acquire(f"{base}/page", owned=False)
        waiting = asyncio.create_task(crawl(gate, f"{base}/page"))
        await process.end(signal.SIGKILL)
        await process.start()
        # The new process holds the slot of the old lease: no other lease is granted yet.
        assert not waiting.done()
        assert internet.sites["127.0.0.1"].paths == ["/robots.txt"]
        lease.report(status=200)
        lease.end()
        await waiting
    stats = gate.stats()
    assert (stats.dropped, stats.untold) == (0, 0)
    assert internet.sites["127.0.0.1"].paths.count("/page") == 1


async def test_a_sidecar_told_to_end_still_takes_the_report(
    internet: FakeInternet, process: Process
) -> None:
    base = origin(internet)
    async with RemoteGatekeeper(process.where) as gate:
        lease = await gate.acquire(f"{base}/page", owned=False)
        ending = asyncio.create_task(process.end(signal.SIGTERM))
        lease.report(status=200)
        lease.end()
        await ending
    assert gate.stats().told == 1
