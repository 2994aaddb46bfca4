"""One gate, three ways to it: embedded, over TCP, over a unix socket."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from gatekeeper import Config, Gatekeeper, RemoteGatekeeper
from gatekeeper.clock import VirtualClock
from gatekeeper.sidecar.app import Service
from gatekeeper.sidecar.auth import ANY_LITERAL, Tokens
from gatekeeper.sidecar.server import Server
from tests.internet import FakeInternet

AGENT = "examplebot/1.0 (+https://example.org/bot)"
AnyGate = Gatekeeper | RemoteGatekeeper
Open = Callable[..., Awaitable[AnyGate]]


def settings(**tables: Any) -> Config:
    return Config.from_dict(
        {
            "guard": {"allow": ["127.0.0.0/8", "::1/128", "*.test"]},
            "pacing": {"default_interval": 0.0},
            "server": {"log_decisions": "none"},
        }
        | tables
    )


class Sidecar:
    """The service in this process; it can be stopped and started in the same place."""

    def __init__(self, internet: FakeInternet, config: Config, socket: Path | None) -> None:
        self.internet = internet
        self.config = config
        self.socket = socket
        self.port = 0
        self.gate: Gatekeeper
        self.service: Service
        self.seen: list[tuple[str, str]] = []
        """Method and path of every request."""
        self.tokens = Tokens()
        self._stack = AsyncExitStack()

    @property
    def where(self) -> str:
        return f"unix:{self.socket}" if self.socket else f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        clock = self.internet.clock
        given = {"clock": clock} if isinstance(clock, VirtualClock) else {}
        self.gate = await self._stack.enter_async_context(
            Gatekeeper(AGENT, config=self.config, resolver=self.internet.resolver, **given)
        )
        hosts = None if self.socket else frozenset([ANY_LITERAL])
        self.service = Service(self.gate, self.config, hosts=hosts, tokens=self.tokens, clock=clock)
        self.service.phase = "serving"
        self._stack.push_async_callback(self.service.close)
        runner = web.ServerRunner(Server(self._handle, header=16_384), shutdown_timeout=0.0)
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        if self.socket:
            await web.UnixSite(runner, str(self.socket)).start()
        else:
            await web.TCPSite(runner, "127.0.0.1", self.port).start()
            self.port = runner.addresses[0][1]

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self.seen.append((request.method, request.path))
        return await self.service.handle(request)

    async def stop(self) -> None:
        await self._stack.aclose()

    def count(self, path: str) -> int:
        return sum(1 for _, seen in self.seen if seen.endswith(path))


@pytest.fixture
def short() -> Iterator[Path]:
    # A unix socket's name may have a hundred characters: tmp_path can be longer.
    with tempfile.TemporaryDirectory(prefix="gk") as directory:
        yield Path(directory)


@pytest.fixture
async def sidecar_on(short: Path) -> AsyncIterator[Callable[..., Awaitable[Sidecar]]]:
    """`await sidecar_on(internet, unix=True, pacing={...})`."""
    async with AsyncExitStack() as stack:

        async def begin(internet: FakeInternet, *, unix: bool = False, **tables: Any) -> Sidecar:
            socket = short / "gate.sock" if unix else None
            sidecar = Sidecar(internet, settings(**tables), socket)
            await sidecar.start()
            stack.push_async_callback(sidecar.stop)
            return sidecar

        yield begin


@pytest.fixture(params=["embedded", "tcp", "unix"])
async def open_gate(
    request: pytest.FixtureRequest, sidecar_on: Callable[..., Awaitable[Sidecar]]
) -> AsyncIterator[Open]:
    """`await open_gate(internet, pacing={...})`: a gate, whichever way it is asked."""
    async with AsyncExitStack() as stack:

        async def begin(internet: FakeInternet, **tables: Any) -> AnyGate:
            given: dict[str, Any] = {}
            if isinstance(internet.clock, VirtualClock):
                given["clock"] = internet.clock
            if request.param == "embedded":
                config = settings(**tables)
                gate: AnyGate = Gatekeeper(
                    AGENT, config=config, resolver=internet.resolver, **given
                )
            else:
                sidecar = await sidecar_on(internet, unix=request.param == "unix", **tables)
                gate = RemoteGatekeeper(sidecar.where, **given)
            return await stack.enter_async_context(gate)

        yield begin


async def until(condition: Callable[[], object]) -> None:
    """Let the loop run until it holds; the test's own timeout is the limit."""
    while not condition():
        await asyncio.sleep(0)
