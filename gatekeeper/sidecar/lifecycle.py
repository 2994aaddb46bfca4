"""From start to exit: sockets, signals, draining.

start      bind, open the gate, listen, READY=1
SIGTERM    unready at once; no new leases; after `drain_grace` no new connections;
           open leases may still be reported for `drain_timeout`; then exit
SIGHUP     read the configuration again
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from gatekeeper.config import Config
from gatekeeper.gate import Gatekeeper
from gatekeeper.sidecar import listening
from gatekeeper.sidecar.app import Service
from gatekeeper.sidecar.auth import read_tokens
from gatekeeper.sidecar.checks import accepted_hosts, check_server, tls_context
from gatekeeper.sidecar.server import Server

if TYPE_CHECKING:
    import ssl

__all__ = ["Wiring", "running", "serve", "state_path"]

MEMORY = "memory"


@dataclass(frozen=True, slots=True)
class Wiring:
    """What the command knows and the service needs."""

    identity: str
    config: Config
    reread: Callable[[], Config]
    """Read the configuration again; raises ConfigError."""
    announce: Callable[[str, str], None]
    """Told where the service listens, and a curl line."""


def serve(wiring: Wiring) -> None:
    """Run the service until SIGTERM or SIGINT, on uvloop where it is installed.

    Raises ConfigError before it listens, StorageError for a state file that is in use.
    """
    check_server(wiring.config)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_until_told(wiring))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop  # noqa: PLC0415 - an extra
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


async def _until_told(wiring: Wiring) -> None:
    loop = asyncio.get_running_loop()
    told = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told.set)
    async with running(wiring):
        await told.wait()
        listening.notify("STOPPING=1", os.environ)


@contextlib.asynccontextmanager
async def running(wiring: Wiring) -> AsyncIterator[Service]:
    """The service, listening; leaving it drains."""
    config = with_state(wiring.config)
    sockets = listening.activated_sockets(os.environ) or listening.open_sockets(config.server)
    try:
        context = tls_context(config.server)
        async with Gatekeeper(wiring.identity, config=config) as gate:
            service = _service(gate, config, sockets)
            async with asyncio.TaskGroup() as tasks:
                writer = tasks.create_task(service.log.run())
                async with _listening(service, sockets, context):
                    where, curl = listening.describe(sockets[0], tls=context is not None)
                    wiring.announce(where, curl)
                    listening.notify("READY=1", os.environ)
                    yield service
                writer.cancel()
    finally:
        for sock in sockets:
            _close(sock)


def _service(gate: Gatekeeper, config: Config, sockets: list[socket.socket]) -> Service:
    names = listening.addresses(sockets)
    return Service(
        gate,
        config,
        tokens=read_tokens(config.server.token_file),
        hosts=accepted_hosts(config.server, names) if names else None,
        version=importlib.metadata.version("gatekeeper"),
    )


@contextlib.asynccontextmanager
async def _listening(
    service: Service, sockets: list[socket.socket], context: ssl.SSLContext | None
) -> AsyncIterator[None]:
    """Accept connections while inside; on the way out, drain within bounds (T16)."""
    server = Server(service.handle, header=service.config.server.max_header)
    runner = web.ServerRunner(server, shutdown_timeout=1.0)
    await runner.setup()
    try:
        sites = [web.SockSite(runner, sock, ssl_context=context) for sock in sockets]
        for site in sites:
            await site.start()
        service.phase = "serving"
        try:
            yield
        finally:
            await service.drain(sites)
    finally:
        await runner.cleanup()


def with_state(config: Config) -> Config:
    """The configuration with the place of the sidecar's state filled in."""
    path = config.storage.path
    if path == MEMORY:
        path = None
    elif path is None:
        path = str(state_path())
        Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    storage = msgspec.structs.replace(config.storage, path=path)
    return msgspec.structs.replace(config, storage=storage)


def state_path() -> Path:
    """$STATE_DIRECTORY (systemd's), or the user's own place for state."""
    given = os.environ.get("STATE_DIRECTORY", "").partition(":")[0]
    if given:
        return Path(given) / "state.sqlite"
    home = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(home) / "gatekeeper" / "state.sqlite"


def _close(sock: socket.socket) -> None:
    """Close a listening socket, and take a unix one's name away."""
    if sock.family == socket.AF_UNIX and sock.fileno() != -1:
        with contextlib.suppress(OSError):
            os.unlink(sock.getsockname())
    sock.close()
