"""Shared by the conformance tests: settings, and a sidecar in this process."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from gatekeeper import Config, Gatekeeper, RemoteGatekeeper
from gatekeeper.clock import VirtualClock
from gatekeeper.session.middleware import gate_middleware
from gatekeeper.sidecar.inline import Request
from gatekeeper.sidecar.listening import Server
from gatekeeper.sidecar.routes.table import ROUTES
from gatekeeper.sidecar.security import Tokens
from gatekeeper.sidecar.service import Service
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


async def listen(
    stack: AsyncExitStack, server: web.Server[Any], socket: Path | None = None, port: int = 0
) -> int:
    """Serve in this process, at a unix socket or a port, until the stack is closed; return the
    port."""
    runner = web.ServerRunner(server, shutdown_timeout=0.1)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    if socket is not None:
        await web.UnixSite(runner, str(socket)).start()
        return 0
    await web.TCPSite(runner, "127.0.0.1", port).start()
    return int(runner.addresses[0][1])


class Sidecar:
    """The sidecar's service in this process; it can be restarted at the same address."""

    def __init__(
        self, internet: FakeInternet, config: Config, socket: Path | None, agent: str = AGENT
    ) -> None:
        self.agent = agent
        self.internet = internet
        self.config = config
        self.socket = socket
        self.port = 0
        self.gate: Gatekeeper
        self.service: Service
        self.seen: list[tuple[str, str]] = []
        """Method and path of every request."""
        self.tokens = Tokens()
        self.options: dict[str, Any] = {"config": config, "resolver": internet.resolver}
        """Options of its gate."""
        self._stack = AsyncExitStack()

    @property
    def where(self) -> str:
        return f"unix:{self.socket}" if self.socket else f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        clock = self.internet.clock
        given = {"clock": clock} if isinstance(clock, VirtualClock) else {}
        self.gate = await self._stack.enter_async_context(
            Gatekeeper(self.agent, **self.options, **given)
        )
        self.service = Service(
            self.gate,
            self.config,
            ROUTES,
            addresses=() if self.socket else [("0.0.0.0", 0)],
            tokens=self.tokens,
            clock=clock,
        )
        self.service.serve()
        self._stack.push_async_callback(self.service.close)
        server = Server(self._handle, header=16_384, inline=self._at_once)
        self.port = await listen(self._stack, server, self.socket, self.port)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self.seen.append((request.method, request.path))
        return await self.service.handle(request)

    def _at_once(self, request: Request, *more: Any) -> bytes | None:
        inline = self.service.inline
        answer = None if inline is None else inline(request, *more)
        if answer is not None:
            self.seen.append((request.method, request.target.partition("?")[0]))
        return answer

    async def stop(self) -> None:
        await self._stack.aclose()

    def count(self, path: str) -> int:
        return sum(1 for _, seen in self.seen if seen.endswith(path))


class World:
    """A fake internet in virtual time, a sidecar on it, and clients of the sidecar."""

    def __init__(self, internet: FakeInternet, stack: AsyncExitStack) -> None:
        self.internet = internet
        self.stack = stack
        self.clock: Any = internet.clock
        self.drive = internet.drive

    async def sidecar(self, *, tokens: Tokens | None = None, **tables: Any) -> Sidecar:
        sidecar = Sidecar(self.internet, settings(**tables), None)
        sidecar.tokens = tokens or Tokens()
        await sidecar.start()
        self.stack.push_async_callback(sidecar.stop)
        return sidecar

    async def client(self, where: str, **options: Any) -> RemoteGatekeeper:
        gate = RemoteGatekeeper(where, clock=self.clock, **options)
        return await self.stack.enter_async_context(gate)

    def scripted(self, path: str, *acts: Any) -> str:
        """A server that is not a sidecar, with a fixed answer for one path."""
        self.internet.site("127.0.0.1").on(path, *acts)
        return f"http://127.0.0.1:{self.internet.listener().port()}"


def session_on(internet: FakeInternet, gate: Any) -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(resolver=internet.resolver, ssl=internet.client_ssl)
    return aiohttp.ClientSession(connector=connector, middlewares=(gate_middleware(gate),))
