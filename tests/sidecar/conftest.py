"""Fixtures: the sidecar as a process, and the service within the test's process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from msgspec.structs import replace

from gatekeeper.config import ServerConfig
from gatekeeper.sidecar.process import ServeOptions, running
from gatekeeper.sidecar.service import Service
from tests.conformance.ways import Sidecar as InProcess
from tests.gate_support import QUICK, open_config
from tests.internet import FakeInternet
from tests.processes import PYTHON
from tests.waiting_support import until

TABLES = ("audit", "fleet", "host", "identity", "pacing")
START = 45.0
"""Seconds that a process may take to start or answer on a busy machine; usually far less."""


@asynccontextmanager
async def connected(base: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to a sidecar, for what no client library sends."""
    host, _, port = base.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def sent(base: str, *parts: bytes) -> bytes:
    """Send octets, and return all that comes back until the connection is closed."""
    async with connected(base) as (reader, writer):
        for part in parts:
            writer.write(part)
            await writer.drain()
        return await reader.read()


class Requests:
    """Requests for a sidecar, whose answers are JSON."""

    base: str
    session: aiohttp.ClientSession

    async def get(self, path: str, **options: Any) -> tuple[int, Any]:
        async with self.session.get(self.base + path, **options) as response:
            return response.status, await response.json(content_type=None)

    async def post(self, path: str, body: object, **options: Any) -> tuple[int, Any]:
        async with self.session.post(self.base + path, json=body, **options) as response:
            text = await response.text()
            return response.status, json.loads(text) if text else None


@dataclass
class Sidecar(Requests):
    """A running `gatekeeper serve`."""

    process: asyncio.subprocess.Process
    where: str
    """Where it listens, as it printed: a URL, or unix:PATH."""
    curl: str
    session: aiohttp.ClientSession
    errors: list[str] = field(default_factory=list)
    told: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def base(self) -> str:
        return "http://localhost" if self.where.startswith("unix:") else self.where

    async def said(self, text: str) -> bool:
        """Wait until stderr holds `text`. Return False if the process ends before."""
        async with asyncio.timeout(START):
            while not any(text in line for line in self.errors):
                if self.process.stderr is None or self.process.stderr.at_eof():
                    return False
                self.told.clear()
                await self.told.wait()
        return True

    def tell(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def stopped(self) -> int:
        async with asyncio.timeout(START):
            return await self.process.wait()


Start = Callable[..., Awaitable[Sidecar]]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """`await start("--option", ..., env={...})` starts a process, which ends with the test.

    `first` is called in the new process before anything else.
    """
    async with AsyncExitStack() as stack:

        async def begin(
            *arguments: str,
            env: dict[str, str] | None = None,
            first: Callable[[], None] | None = None,
            cwd: Path | None = None,
        ) -> Sidecar:
            socket = next(
                (arguments[n + 1] for n, a in enumerate(arguments) if a == "--socket"), None
            )
            where = () if socket else ("--port", "0")
            settings = {"GATEKEEPER_SERVER_DRAIN_GRACE": "0", "XDG_STATE_HOME": str(tmp_path)}
            process = await asyncio.create_subprocess_exec(
                *(PYTHON, "-m", "gatekeeper", "serve", "--allow-address", "127.0.0.0/8"),
                *where,
                *arguments,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env={**os.environ, **settings, **(env or {})},
                preexec_fn=first,
                cwd=cwd,
            )
            stack.push_async_callback(_end, process)
            connector = aiohttp.UnixConnector(socket) if socket else aiohttp.TCPConnector()
            session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
            assert process.stdout is not None
            async with asyncio.timeout(START):
                first = (await process.stdout.readline()).decode().strip()
                second = (await process.stdout.readline()).decode().strip()
            if not first:
                assert process.stderr is not None
                raise AssertionError((await process.stderr.read()).decode())
            sidecar = Sidecar(
                process,
                first.removeprefix("gatekeeper: listening on "),
                second.removeprefix("try: "),
                session,
            )
            assert process.stderr is not None
            reader = asyncio.create_task(collect(process.stderr, sidecar))
            stack.push_async_callback(_settle, reader)
            return sidecar

        yield begin


async def collect(stream: asyncio.StreamReader, sidecar: Sidecar) -> None:
    while line := await stream.readline():
        sidecar.errors.append(line.decode(errors="replace").rstrip("\n"))
        sidecar.told.set()
    sidecar.told.set()


async def _settle(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()


@asynccontextmanager
async def as_served(**server: Any) -> AsyncIterator[tuple[Service, str]]:
    """The service as `gatekeeper serve` runs it, but in this process, and where it listens."""
    given = {"port": 0, "log_decisions": "none", "drain_grace": 0.0}
    config = open_config(pacing=QUICK, storage={"path": "memory"})
    config = replace(config, server=ServerConfig(**given | server))
    heard: list[str] = []
    options = ServeOptions(
        identity="testbot/1.0",
        config=config,
        reread=lambda: config,
        announce=lambda where, _curl: heard.append(where),
    )
    async with running(options) as service:
        if (workers := service.workers) is not None:
            await until(lambda: len(workers.accepting()) == config.server.workers)
        yield service, heard[0]


@dataclass
class RunningService(Requests):
    """A service in this process, whose gate fetches from the fake internet."""

    service: Service
    base: str
    session: aiohttp.ClientSession


@pytest.fixture
async def serve(internet: FakeInternet) -> AsyncIterator[Callable[..., Awaitable[RunningService]]]:
    """`await serve(max_leases=3, pacing={...})` takes settings of [server], and other tables."""
    async with AsyncExitStack() as stack:

        async def begin(**given: Any) -> RunningService:
            tables = {name: given.pop(name) for name in TABLES if name in given}
            server = ServerConfig(**{"log_decisions": "none"} | given)  # beyond its bounds, too
            config = open_config(**tables | {"pacing": QUICK | tables.get("pacing", {})})
            config = replace(config, server=server)
            sidecar = InProcess(internet, config, None, "testbot/1.0")
            await sidecar.start()
            stack.push_async_callback(sidecar.stop)
            session = await stack.enter_async_context(aiohttp.ClientSession(auto_decompress=False))
            return RunningService(sidecar.service, sidecar.where, session)

        yield begin
