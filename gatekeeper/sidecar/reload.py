"""Reload of the configuration: all settings that can change take effect together, or none."""

from __future__ import annotations

import logging
from collections.abc import Callable, Set
from typing import TYPE_CHECKING, Any, Final

import msgspec

from gatekeeper.config import Config, values_of
from gatekeeper.errors import ConfigError
from gatekeeper.fetching.allowed_addresses import Guard
from gatekeeper.gate import Gatekeeper
from gatekeeper.sidecar import security
from gatekeeper.sidecar.listening import diagnostics_address
from gatekeeper.sidecar.workers import check_workers

if TYPE_CHECKING:
    from gatekeeper.sidecar.service import Service

_log = logging.getLogger(__name__)

LIVE_TABLES: Final = frozenset({"guard", "pacing", "server", "host"})
"""Tables whose settings a reload applies, apart from those in `RESTART`. All other tables affect
the cached files, the storage, or the name that requests are sent under."""
RESTART: Final = frozenset(
    {
        # Scopes are made with these clocks, and leases are sorted by their ends.
        "pacing.address_interval",
        "pacing.domain_interval",
        "pacing.lease_ttl",
        # These belong to the open sockets, or to the log of the process.
        "server.diagnostics",
        "server.host",
        "server.port",
        "server.socket",
        "server.tls_cert",
        "server.tls_key",
        "server.tls_client_ca",
        "server.max_header",
        "server.log_format",
        "server.workers",
    }
)
"""Settings of `LIVE_TABLES` that need a restart. config.example.toml marks them."""


def check_config(config: Config, identity: str) -> None:
    """Check everything that a start checks before it listens. Raises ConfigError.

    `serve`, `config check` and a reload share this function, so that they accept the same
    configurations (T17).
    """
    # The gate is made, but not opened: its parts only read their settings.
    storage = msgspec.structs.replace(config.storage, path=None)
    Gatekeeper(identity, config=msgspec.structs.replace(config, storage=storage))
    check_server(config)


def check_server(config: Config) -> None:
    """Check the settings of the service itself. Raises ConfigError."""
    server = config.server
    check_workers(server)
    tokens = security.read_tokens(server.token_file)
    security.Certificates(server)
    security.Networks(server.trusted_peers, setting="server.trusted_peers")
    diagnostics_address(server)
    if server.socket is None and not security.is_loopback(server.host):
        security.demand_credentials(server, tokens, where=f"server.host = {server.host!r}")


def needs_restart(name: str) -> bool:
    """Return whether a change of the setting, given by its dotted name, needs a restart.

    >>> needs_restart("guard.allow"), needs_restart("server.port"), needs_restart("cache.min_ttl")
    (False, True, True)
    """
    return name.partition(".")[0] not in LIVE_TABLES or name in RESTART


class Reloaded(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a reload: the dotted names of the settings that changed."""

    applied: list[str]
    needs_restart: list[str]
    """Settings that changed in the file, but take effect only after a restart."""


async def reload(service: Service) -> Reloaded:
    """Read the configuration and apply what can change while running.

    Raises ConfigError if anything fails: then nothing has changed, and the failure is counted,
    shown by a metric, and logged as one line (T17). Files are read in a thread, so the loop
    goes on answering however long that takes.
    """
    reread = service.reread
    if reread is None:
        raise ConfigError("there is no configuration to read again")
    try:
        async with service.file_reader.lock:
            put_in_force = await service.file_reader.run(lambda: _prepare(service, reread))
            done = put_in_force()
    except Exception as error:
        service.metrics.count_reload(ok=False)
        _log.error("the configuration was not applied: %s", " ".join(str(error).split()))
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"it could not be read again: {error}") from error
    service.metrics.count_reload(ok=True)
    _log.info("the configuration was read again; changed: %s", ", ".join(done.applied) or "nothing")
    if done.needs_restart:
        _log.warning("these settings need a restart: %s", ", ".join(done.needs_restart))
    return done


def _prepare(service: Service, reread: Callable[[], Config]) -> Callable[[], Reloaded]:
    """Read and check the configuration: as it is, and merged with the settings that stay.

    Return what puts it in force, without awaiting or reading files, so that nothing sees half of it
    (T17).
    """
    config, old = reread(), service.config
    check_config(config, config.user_agent or service.gate.user_agent)
    refuse_new_groups(old, config)
    merged = _merge(old, config)
    check_workers(merged.server)  # their number stays, whatever the new file says
    tokens = security.read_tokens(merged.server.token_file, warn=True)
    if service.exposed is not None:
        # T5: the sockets stay where they are, whatever the new `server.host`.
        security.demand_credentials(merged.server, tokens, where=service.exposed)
    renewed = service.certificates.renewal(config.server)
    files = {"server.token_file"} if tokens.tokens != service.admission.tokens.tokens else set()
    applied, restart = _compare(old, config, files)

    def put_in_force() -> Reloaded:
        for name in () if renewed is None else service.certificates.apply(renewed):
            (restart if name == "server.tls_client_ca" else applied).append(name)
        _adjust(service.gate, merged)
        service.apply_config(merged, tokens, restart_required=restart)
        return Reloaded(applied=applied, needs_restart=restart)

    return put_in_force


def _adjust(gate: Gatekeeper, config: Config) -> None:
    """Apply the `[guard]`, `[pacing]` and `[[host]]` tables of another configuration together.

    Its other settings must equal the gate's, and so must `pacing.lease_ttl`, `address_interval` and
    `domain_interval`. Raises ConfigError, and changes nothing, for an invalid setting.
    """
    old, parts, opened = gate.config, gate.parts, gate.parts.opened()
    guard = parts.guard if config.guard != old.guard else None
    if guard is not None:
        Guard(config)  # validates, so that nothing below can raise
    if config.host != old.host:
        parts.scheduler.replace_rules(config.host)
    if config.pacing != old.pacing:
        parts.scheduler.adjust(config.pacing)
        parts.waits.adjust(config.pacing.own_wait)
        opened.fetcher.adjust(config.pacing)
    if guard is not None:
        guard.adjust(config.guard)
        opened.directory.void_refusals()
    gate.config = config
    parts.decider.adjust(config)


def refuse_new_groups(old: Config, new: Config) -> None:
    """Raise ConfigError for a rule with a new [[group]], whose clock needs a restart."""
    known = {group.name for group in old.group}
    for rule in new.host:
        if rule.group is not None and rule.group not in known:
            setting = f"[[host]] match={rule.match!r}: the [[group]] {rule.group!r}"
            raise ConfigError(f"{setting} takes effect only after a restart")


def _compare(old: Config, new: Config, files: Set[str]) -> tuple[list[str], list[str]]:
    """Return the names of changed settings: those that apply now, those that need a restart.

    `files`: settings whose files have other contents now.
    """
    settings = zip(values_of(old), values_of(new), strict=True)
    changed = [name for (name, before), (_, after) in settings if before != after or name in files]
    restart = [name for name in changed if needs_restart(name)]
    return [name for name in changed if name not in restart], restart


def _merge(old: Config, new: Config) -> Config:
    """Return the old configuration with every new setting that can change without a restart."""
    merged: dict[str, Any] = {name: getattr(new, name) for name in LIVE_TABLES}
    for setting in RESTART:
        table, _, name = setting.partition(".")
        stays = {name: getattr(getattr(old, table), name)}
        merged[table] = msgspec.structs.replace(merged[table], **stays)
    return msgspec.structs.replace(old, **merged)
