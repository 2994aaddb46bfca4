"""Reading the configuration again: all of what can change is swapped at once, or nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

import msgspec

from gatekeeper.clock import Clock, deadline
from gatekeeper.config import Config, values_of
from gatekeeper.errors import ConfigError
from gatekeeper.gate import Gatekeeper
from gatekeeper.sidecar.logs import in_thread
from gatekeeper.sidecar.security import (
    Certificates,
    Networks,
    Tokens,
    demand_credentials,
    is_loopback,
    read_tokens,
    tls_context,
)
from gatekeeper.sidecar.workers import check_workers

if TYPE_CHECKING:
    from gatekeeper.sidecar.service import Service

_log = logging.getLogger(__name__)

LIVE_TABLES: Final = frozenset({"guard", "pacing", "server", "host"})
"""Tables of which a reload puts in force what `RESTART` does not name. What stands in any other
is built into the files that are known, the storage, or the name under which we ask."""
RESTART: Final = frozenset(
    {
        # Scopes are made with these clocks, and leases stand in the order of their ends.
        "pacing.address_interval",
        "pacing.domain_interval",
        "pacing.lease_ttl",
        # They belong to the open sockets, or to the log of the process.
        "server.host",
        "server.port",
        "server.proxy_port",
        "server.socket",
        "server.tls_cert",
        "server.tls_key",
        "server.tls_client_ca",
        "server.max_header",
        "server.log_format",
        "server.workers",
    }
)
"""Settings of those tables that need a restart. config.example.toml marks them."""


def check_config(config: Config, identity: str) -> None:
    """All that a start judges before it listens. Raises ConfigError.

    One function for `serve`, `config check` and a reload: what one of them took, another
    would refuse otherwise (T17).
    """
    # The gate is only made, not opened: its parts read their settings and do nothing.
    storage = msgspec.structs.replace(config.storage, path=None)
    Gatekeeper(identity, config=msgspec.structs.replace(config, storage=storage))
    check_server(config)


def check_server(config: Config) -> None:
    """Raises ConfigError for settings that would make the service unsafe or unable."""
    server = config.server
    check_workers(server)
    tokens = read_tokens(server.token_file)
    tls_context(server)
    Networks(server.trusted_peers, setting="server.trusted_peers")
    if server.socket is None and not is_loopback(server.host):
        demand_credentials(server, tokens, where=f"server.host = {server.host!r}")


def needs_restart(name: str) -> bool:
    """Whether a change of the setting of that dotted name is in force after a restart only.

    >>> needs_restart("guard.allow"), needs_restart("server.port"), needs_restart("cache.min_ttl")
    (False, True, True)
    """
    return name.partition(".")[0] not in LIVE_TABLES or name in RESTART


T = TypeVar("T")

READ_DEADLINE = 10.0
"""Seconds in which a reload reads the files of the configuration."""
_REMEDY = "see whether the disk or the network mount that holds them answers"


class Reloaded(msgspec.Struct, frozen=True, kw_only=True):
    """What a reload came to: dotted names of the settings that differ."""

    applied: list[str]
    needs_restart: list[str]
    """Changed in the file, but in force only after a restart."""


class FileReader:
    """Reads files beside the loop, for one reload at a time, which waits `READ_DEADLINE` at most.

    Of threads that do not come to an end, as at a mount that is gone, there is one at most.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._turn = asyncio.Lock()
        self._reading: futures.Future[Any] | None = None

    async def __aenter__(self) -> Self:
        await self._turn.acquire()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._turn.release()

    async def run(self, read: Callable[[], T]) -> T:
        """What `read` returns or raises; ConfigError where it takes too long."""
        if self._reading is not None and not self._reading.done():
            raise ConfigError(f"an earlier reload has not read its files yet: {_REMEDY}")
        self._reading = reading = in_thread(read, name="reload")
        try:
            async with deadline(self._clock, READ_DEADLINE):
                return await asyncio.wrap_future(reading)
        except TimeoutError as error:
            raise ConfigError(
                f"its files were not read within {READ_DEADLINE:g} s: {_REMEDY}"
            ) from error


async def reload(service: Service) -> Reloaded:
    """Take over what may change while running. Raises ConfigError, having changed nothing.

    Whatever goes wrong is counted, turns the metric red, and is one line in the log (T17). Files
    are read beside the loop, which goes on to answer however long that takes.
    """
    reread = service.reread
    if reread is None:
        raise ConfigError("there is no configuration to read again")
    try:
        async with service.file_reader as reader:
            plan = await reader.run(lambda: _prepare(service, reread))
            done = _put_in_force(service, plan)
    except Exception as error:
        service.metrics.reloaded(ok=False)
        _log.error("the configuration was not taken over: %s", " ".join(str(error).split()))
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"it could not be read again: {error}") from error
    service.metrics.reloaded(ok=True)
    _log.info("the configuration was read again; changed: %s", _listed(done.applied))
    if done.needs_restart:
        _log.warning("these settings need a restart: %s", _listed(done.needs_restart))
    return done


def _listed(names: list[str]) -> str:
    return ", ".join(names) or "nothing"


@dataclass(frozen=True, slots=True)
class _Plan:
    """A configuration that was judged whole, before anything of it is in force."""

    merged: Config
    """What will be in force: the new settings, and the old ones where a restart is needed."""
    tokens: Tokens
    certificates: Certificates | None
    """None: as they were."""
    applied: list[str]
    left: list[str]


def _prepare(service: Service, reread: Callable[[], Config]) -> _Plan:
    """Read and judge everything: alone, as a start would, and merged with what stays."""
    config, old = reread(), service.config
    check_config(config, config.user_agent or service.gate.user_agent)
    _refuse_new_groups(old, config)
    merged = _merge(old, config)
    check_workers(merged.server)  # how many there are stays, whatever the new file says
    tokens = read_tokens(merged.server.token_file, warn=True)
    if service.exposed is not None:
        # T5: the sockets stay where they are, whatever the new file says about `host`.
        demand_credentials(merged.server, tokens, where=service.exposed)
    certificates = None
    if service.certificates is not None:
        certificates = service.certificates.renewal(config.server)
    applied, left = _compare(old, config)
    return _Plan(merged, tokens, certificates, applied, left)


def _put_in_force(service: Service, plan: _Plan) -> Reloaded:
    """No await, no grant and no file in between: nothing sees half of it (T17)."""
    applied, left = plan.applied, plan.left
    if service.certificates is not None and plan.certificates is not None:
        own, rest = service.certificates.take_over(plan.certificates)
        applied, left = [*applied, *own], [*left, *rest]
    service.internals.adjust(plan.merged)
    service.take_over(plan.merged, plan.tokens, restart_required=left)
    return Reloaded(applied=applied, needs_restart=left)


def _refuse_new_groups(old: Config, new: Config) -> None:
    """A clock that hosts share begins with the process: no word may need one that is new."""
    known = {group.name for group in old.group}
    for rule in new.host:
        if rule.group is not None and rule.group not in known:
            raise ConfigError(
                f"[[host]] match={rule.match!r}: the [[group]] {rule.group!r} is there after a "
                "restart only"
            )


def _compare(old: Config, new: Config) -> tuple[list[str], list[str]]:
    """The names that differ: those that can change now, and those that can't."""
    applied: list[str] = []
    left: list[str] = []
    for (name, before), (_, after) in zip(values_of(old), values_of(new), strict=True):
        if before != after:
            (left if needs_restart(name) else applied).append(name)
    return applied, left


def _merge(old: Config, new: Config) -> Config:
    """The old configuration with everything from the new one that can change now."""
    merged: dict[str, Any] = {}
    for field in msgspec.structs.fields(old):
        before, after = getattr(old, field.name), getattr(new, field.name)
        if field.name not in LIVE_TABLES:
            continue
        if isinstance(before, msgspec.Struct):
            names = [f"{field.name}.{inner}" for inner in before.__struct_fields__]
            kept = [name.partition(".")[2] for name in names if needs_restart(name)]
            fixed = {name: getattr(before, name) for name in kept}
            after = msgspec.structs.replace(after, **fixed)
        merged[field.name] = after
    return msgspec.structs.replace(old, **merged)
