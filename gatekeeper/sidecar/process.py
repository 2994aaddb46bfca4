"""The process of the service: start, signals, draining.

start      listen, open the gate, accept connections, READY=1
SIGTERM    unready immediately, no new leases, and each answer ends its connection; wait up to
           `drain_timeout` for reports of open leases and the end of streams, then `drain_grace`
           for clients to notice; then no new connections; answer what was asked; exit
SIGINT     as SIGTERM, without `drain_grace`; a second one ends the wait
SIGHUP     read the configuration again
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gatekeeper.clock import SystemClock
from gatekeeper.config import MEMORY, Config
from gatekeeper.errors import ConfigError, StorageError
from gatekeeper.gate import Gatekeeper
from gatekeeper.sidecar import listening, security
from gatekeeper.sidecar.held_leases import LeaseJournal
from gatekeeper.sidecar.listening import notify
from gatekeeper.sidecar.logs import set_up_logging
from gatekeeper.sidecar.reload import check_config, reload
from gatekeeper.sidecar.routes.table import ROUTES
from gatekeeper.sidecar.service import Service
from gatekeeper.sidecar.workers import Workers

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What the command passes to the service."""

    identity: str
    config: Config
    reread: Callable[[], Config]
    """Reads the configuration again. Raises ConfigError."""
    announce: Callable[[str, str], None]
    """Called with the service's address and a curl command."""
    sources: Callable[[], Mapping[str, str]] = dict
    """Returns where each setting that was last read came from, by its dotted name."""


def serve(options: ServeOptions) -> None:
    """Run the service until SIGTERM or SIGINT, on uvloop if that is installed.

    Raises ConfigError before it listens, and StorageError if the state file is in use.
    """
    if not hasattr(signal, "SIGHUP"):
        raise ConfigError("`gatekeeper serve` needs Linux or macOS: on Windows run it in WSL")
    check_config(options.config, options.identity)
    set_up_logging(options.config.server)
    factory = listening.loop_factory()
    with listening.rare_collections(), asyncio.Runner(loop_factory=factory) as runner:
        runner.run(_serve_until_signal(options))


async def _serve_until_signal(options: ServeOptions) -> None:
    loop = asyncio.get_running_loop()
    stopped: asyncio.Future[signal.Signals] = loop.create_future()

    def stop(number: signal.Signals) -> None:
        if not stopped.done():
            stopped.set_result(number)

    # Before anything else: without a handler SIGHUP would end the process. One that arrives
    # during the start counts as well, since the file may have changed after it was read.
    hangup = asyncio.Event()
    loop.add_signal_handler(signal.SIGHUP, hangup.set)
    loop.add_signal_handler(signal.SIGTERM, stop, signal.SIGTERM)
    foreground = signal.getsignal(signal.SIGINT) is not signal.SIG_IGN  # not `gatekeeper serve &`
    if foreground:
        loop.add_signal_handler(signal.SIGINT, stop, signal.SIGINT)
    async with running(options) as service:
        reloads = loop.create_task(_reload_on_hangup(service, hangup))
        again = ""
        if await stopped is signal.SIGINT:
            service.grace = False  # Ctrl-C at a terminal: there is no load balancer to wait for
            again = "; press Ctrl-C again to stop now"
        if foreground:
            loop.add_signal_handler(signal.SIGINT, service.end_drain)
        _log.info("stopping: draining at most %g s%s", service.drain_seconds, again)
        notify("STOPPING=1", os.environ)
    reloads.cancel()


async def _reload_on_hangup(service: Service, hangup: asyncio.Event) -> None:
    while True:
        await hangup.wait()
        hangup.clear()
        await reload_and_notify(service)


async def reload_and_notify(service: Service) -> None:
    """Reload, and return when every worker follows.

    A bad file is logged and counted, and changes nothing (T17).
    """
    stamp = int(service.clock.monotonic() * 1e6)
    notify(f"RELOADING=1\nMONOTONIC_USEC={stamp}", os.environ)
    with contextlib.suppress(ConfigError):
        await reload(service)
    await service.settle()
    # The service manager waits for this, whether the reload succeeded or not.
    notify("READY=1", os.environ)


@contextlib.asynccontextmanager
async def running(options: ServeOptions) -> AsyncIterator[Service]:
    """Run the service inside the context; leaving it drains."""
    config = with_state(options.config)
    sockets = listening.activated_sockets(os.environ) or listening.open_sockets(config.server)
    diagnostics: list[socket.socket] = []
    try:
        diagnostics += listening.open_diagnostics_sockets(config.server)
        async with Gatekeeper(options.identity, config=config) as gate:
            service = _make_service(gate, config, sockets, diagnostics, options)
            async with asyncio.TaskGroup() as tasks:
                writer = tasks.create_task(service.log.run())
                try:
                    async with _listening(service, sockets, diagnostics):
                        options.announce(*listening.describe(sockets[0], config.server))
                        for one in diagnostics:
                            url = listening.url_of(one, config.server)
                            _log.info("health and metrics: %s", url)
                        notify("READY=1", os.environ)
                        yield service
                finally:
                    await service.close()
                    writer.cancel()
    finally:
        for sock in sockets + diagnostics:
            sock.close()


def _make_service(
    gate: Gatekeeper,
    config: Config,
    sockets: list[socket.socket],
    diagnostics: list[socket.socket],
    options: ServeOptions,
) -> Service:
    names, probed = listening.addresses(sockets), listening.addresses(diagnostics)
    tokens = security.read_tokens(config.server.token_file, warn=True)
    exposed = security.exposed_address(names) or listening.open_to_others(sockets)
    if exposed is not None:
        # T5: a socket from the service manager listens wherever that put it.
        security.demand_credentials(config.server, tokens, where=exposed)
    # The listener of health and metrics alone needs no credentials: it has nothing else to give.
    return Service(
        gate,
        config,
        ROUTES,
        tokens=tokens,
        addresses=names,
        diagnostics=probed,
        reread=lambda: with_state(options.reread()),
        lease_journal=_open_journal(config),
        exposed=exposed,
        sources=options.sources,
        workers=Workers(config.server.workers) if config.server.workers else None,
    )


def _open_journal(config: Config) -> LeaseJournal:
    """Open the journal of leases beside the state file; it has no file if state is in memory."""
    state = config.storage.path
    path = None if state is None else Path(state + "-leases")
    try:
        wait = config.storage.on_failure == "refuse"
        return LeaseJournal(path, clock=SystemClock(), wait=wait)
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror or error}") from error


MAX_PROBES = 64
"""Connections that the listener of health and metrics may have open; they never take the API's."""


@contextlib.asynccontextmanager
async def _listening(
    service: Service, sockets: list[socket.socket], diagnostics: list[socket.socket]
) -> AsyncIterator[None]:
    """Accept connections inside the context; on leaving it, drain for a limited time (T16)."""
    files = listening.raise_file_limit()
    header = service.config.server.max_header
    workers = service.workers
    for_probes = min(MAX_PROBES, files.clients // 4) if diagnostics else 0
    server = listening.Server(
        service.handle,
        header=header,
        connections=files.clients - for_probes,
        inline=service.inline,
        pass_on=None if workers is None else workers.pass_on,
        certificates=service.certificates,
    )
    service.metrics.add_source(
        lambda: {
            "gatekeeper_connections": len(server.accepted),
            "gatekeeper_connections_refused": server.refused,
        }
    )
    probed = listening.Server(
        service.handle_diagnostics,
        header=header,
        connections=for_probes,
        certificates=service.certificates,
    )
    servers = (server, probed)
    take = server.serve if workers is None else workers.dispatch
    sites = [listening.Acceptor(one, probed.serve, backlog=files.backlog) for one in diagnostics]
    sites += [listening.Acceptor(one, take, backlog=files.backlog) for one in sockets]
    async with contextlib.AsyncExitStack() as stack:
        for one in servers:
            stack.push_async_callback(one.shutdown, 1.0)
        # Before any site starts, so no lease is granted until the old ones are held again.
        # Requests wait in the backlog meanwhile.
        await service.leases.restore(service.gate)
        if workers is not None:
            await stack.enter_async_context(workers.serving(server))
        for site in sites:
            await site.start()
        service.serve()
        try:
            yield
        finally:
            await service.drain(sites, servers)


def with_state(config: Config) -> Config:
    """Return the configuration with `storage.path` filled in, and make its directory."""
    path = config.storage.path
    if path == MEMORY:
        path = None
    elif path is None:
        path = str(state_path())
        try:
            Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            problem = f"its directory can't be made ({error.strerror})"
            remedy = "give --storage PATH, or --storage memory"
            raise ConfigError(f"{path}: {problem}; {remedy}") from error
    storage = msgspec.structs.replace(config.storage, path=path)
    return msgspec.structs.replace(config, storage=storage)


def state_path() -> Path:
    """Return the default state file, in $STATE_DIRECTORY (systemd) or the user's own directory."""
    inherited = os.environ.get("STATE_DIRECTORY", "").partition(":")[0]
    if inherited:
        return Path(inherited) / "state.sqlite"
    try:
        home = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    except RuntimeError as error:  # a user without a home, as in many containers
        raise ConfigError(f"there is no place for state ({error}): set storage.path") from error
    return Path(home) / "gatekeeper" / "state.sqlite"
