"""A client and a sidecar in another process, which is killed and restarted."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from gatekeeper import RemoteGatekeeper, Verdict
from tests.internet import FakeInternet
from tests.processes import PYTHON

ROBOTS = "User-agent: *\nCrawl-delay: 0.2\nDisallow: /private\n"


class Process:
    """`gatekeeper serve` as a process that can be restarted with the same state file."""

    def __init__(self, directory: Path, way: str) -> None:
        self.package: Path | None = None
        """Where the package is imported from; None: it is the tree's own."""
        socket = str(directory / "gate.sock")
        self._listen = ("--socket", socket) if way == "unix" else ("--port", "0")
        self._directory = directory
        self._process: asyncio.subprocess.Process | None = None
        self.where = ""

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            PYTHON,
            *("-m", "gatekeeper", "serve", *self._listen),
            *("--user-agent", "examplebot/1.0", "--allow-address", "127.0.0.0/8"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={
                **os.environ,
                "GATEKEEPER_SERVER_DRAIN_GRACE": "0",
                "XDG_STATE_HOME": str(self._directory),
                **({} if self.package is None else {"PYTHONPATH": str(self.package)}),
            },
            cwd=self.package,
        )
        assert self._process.stdout is not None
        said = (await self._process.stdout.readline()).decode().strip()
        self.where = said.removeprefix("gatekeeper: listening on ")

    async def end(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)
        await self._process.wait()

    async def close(self) -> None:
        if self._process is not None and self._process.returncode is None:
            await self.end(signal.SIGKILL)


@pytest.fixture
async def process(request: pytest.FixtureRequest, socket_folder: Path) -> AsyncIterator[Process]:
    process = Process(socket_folder, getattr(request, "param", "unix"))
    await process.start()
    yield process
    await process.close()


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
