"""Reading the configuration again: all of what can change is swapped at once, or nothing."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec

from gatekeeper.config import Config
from gatekeeper.errors import ConfigError
from gatekeeper.sidecar.auth import read_tokens
from gatekeeper.sidecar.checks import check_server

if TYPE_CHECKING:
    from gatekeeper.sidecar.app import Service

__all__ = ["Reloaded", "reload"]

logger = logging.getLogger(__name__)

_FIXED = frozenset(
    {
        "server.host",
        "server.port",
        "server.socket",
        "server.tls_cert",
        "server.tls_key",
        "server.tls_client_ca",
        "server.allowed_hosts",
        "server.max_header",
    }
)
"""Settings of [server] that belong to the open sockets."""


class Reloaded(msgspec.Struct, frozen=True, kw_only=True):
    """What a reload came to: dotted names of the settings that differ."""

    applied: list[str]
    needs_restart: list[str]
    """Changed in the file, but in force only after a restart."""


def reload(service: Service) -> Reloaded:
    """Take over what may change while running. Raises ConfigError, having changed nothing."""
    if service.reread is None:
        raise ConfigError("there is no configuration to read again")
    try:
        config = service.reread()
        check_server(config)
        tokens = read_tokens(config.server.token_file)
        _refuse_new_groups(service.config, config)
        applied, left = _compare(service.config, config)
        merged = _merge(service.config, config)
        service.take_over(merged, tokens)
    except ConfigError as error:
        service.metrics.reloaded(ok=False)
        logger.error("the configuration was not taken over: %s", error)
        raise
    _say_hosts(service, config)
    service.metrics.reloaded(ok=True)
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
    for field in msgspec.structs.fields(old):
        before, after = getattr(old, field.name), getattr(new, field.name)
        if before == after:
            continue
        if not isinstance(before, msgspec.Struct):
            (applied if field.name == "host" else left).append(field.name)
            continue
        for inner in msgspec.structs.fields(before):
            if getattr(before, inner.name) != getattr(after, inner.name):
                name = f"{field.name}.{inner.name}"
                now = field.name == "server" and name not in _FIXED
                (applied if now else left).append(name)
    return applied, left


def _merge(old: Config, new: Config) -> Config:
    """The old configuration with everything from the new one that can change now."""
    kept = {name.partition(".")[2]: None for name in _FIXED}
    fixed = {name: getattr(old.server, name) for name in kept}
    server = msgspec.structs.replace(new.server, **fixed)
    return msgspec.structs.replace(old, server=server, host=new.host)


def _say_hosts(service: Service, config: Config) -> None:
    """Put the `[[host]]` tables in force: words no longer said are lifted."""
    gate = service.gate
    for match in {rule.match for rule in service.spoken} - {rule.match for rule in config.host}:
        gate.lift_override(match)
    for rule in reversed(config.host):
        gate.override(rule)
    service.spoken = config.host
