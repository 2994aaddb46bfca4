"""What only the service can judge about its configuration, before it listens."""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import Iterable

import msgspec

from gatekeeper.config import Config, ServerConfig
from gatekeeper.errors import ConfigError
from gatekeeper.gate import Gatekeeper
from gatekeeper.sidecar.auth import ANY_LITERAL, Networks, Tokens, is_loopback, read_tokens
from gatekeeper.sidecar.listening import UNIX

__all__ = [
    "accepted_hosts",
    "check_config",
    "check_server",
    "demand_credentials",
    "exposed",
    "tls_context",
]


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
    tokens = read_tokens(server.token_file)
    tls_context(server)
    Networks(server.trusted_peers, setting="server.trusted_peers")
    if server.socket is None and not is_loopback(server.host):
        demand_credentials(server, tokens, where=f"server.host = {server.host!r}")


def demand_credentials(server: ServerConfig, tokens: Tokens, *, where: str) -> None:
    """T5: who listens where other machines, or other users, can reach it asks who they are.

    Raises ConfigError that begins with `where`.
    """
    if tokens or server.tls_client_ca is not None:
        return
    if where.startswith(UNIX):
        raise ConfigError(
            f"{where} can be written to by other users: set SocketMode=0600 in its unit, or "
            "server.token_file"
        )
    raise ConfigError(
        f"{where} can be reached from other machines: set server.token_file or "
        "server.tls_client_ca, or listen on 127.0.0.1 or a socket"
    )


def exposed(names: Iterable[tuple[str, int]]) -> str | None:
    """Of addresses and ports really listened on, one that other machines can reach."""
    for address, port in names:
        if not is_loopback(address):
            return f"{address} port {port}"
    return None


def tls_context(server: ServerConfig) -> ssl.SSLContext | None:
    """The TLS that is configured, or None. Raises ConfigError."""
    if server.tls_cert is None or server.tls_key is None:
        if (server.tls_cert, server.tls_key, server.tls_client_ca) != (None, None, None):
            raise ConfigError("server.tls_cert and server.tls_key must be set together")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(server.tls_cert, server.tls_key)
        if server.tls_client_ca is not None:
            context.load_verify_locations(server.tls_client_ca)
            # Optional here and demanded at the door, so that probes need no certificate.
            context.verify_mode = ssl.CERT_OPTIONAL
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"server.tls_*: {error}") from error
    return context


def accepted_hosts(server: ServerConfig, names: list[tuple[str, int]]) -> frozenset[str]:
    """The Host headers to accept, exact, for the addresses listened on (T4)."""
    default = 443 if server.tls_cert is not None else 80
    found: set[str] = {host.lower() for host in server.allowed_hosts}
    for address, port in names:
        if ipaddress.ip_address(address).is_unspecified:
            found.add(ANY_LITERAL)
        hosts = {address, server.host}
        if address in ("127.0.0.1", "::1"):
            hosts.add("localhost")
        for host in hosts:
            shown = f"[{host}]" if ":" in host else host.lower()
            found.add(f"{shown}:{port}")
            if port == default:
                found.add(shown)
    return frozenset(found)
