"""What only the service can judge about its configuration, before it listens."""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import Iterable
from pathlib import Path

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
    "load_pair",
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
    load_pair(context, server.tls_cert, server.tls_key)
    if server.tls_client_ca is not None:
        _read_pem("tls_client_ca", server.tls_client_ca, _CERTIFICATE)
        try:
            context.load_verify_locations(server.tls_client_ca)
        except OSError as error:
            raise _unusable("tls_client_ca", server.tls_client_ca, error) from error
        # Optional here and demanded at the door, so that probes need no certificate.
        context.verify_mode = ssl.CERT_OPTIONAL
    return context


def load_pair(context: ssl.SSLContext, cert: str, key: str) -> None:
    """Have the context show a certificate. Raises ConfigError that says which file is wrong."""
    shown, secret = _read_pem("tls_cert", cert), _read_pem("tls_key", key)
    if _CERTIFICATE not in shown and _CERTIFICATE in secret and _KEY in shown:
        raise ConfigError(
            f"server.tls_*: tls_cert {cert} holds the key and tls_key {key} the certificate: "
            "change them about"
        )
    _demand_pem("tls_cert", cert, shown, _CERTIFICATE)
    _demand_pem("tls_key", key, secret, _KEY)
    encrypted: list[bool] = []

    def passphrase() -> str:
        encrypted.append(True)  # asked of nobody: a service has no terminal
        return ""

    try:
        context.load_cert_chain(cert, key, passphrase)
    except OSError as error:  # ssl.SSLError is one
        if encrypted:
            raise ConfigError(
                f"server.tls_*: tls_key {key} is encrypted; give a key without a passphrase "
                "(openssl pkey -in KEY -out PLAIN), readable for the service alone"
            ) from error
        if isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(
                f"server.tls_*: tls_key {key} is not the key of the certificate in tls_cert "
                f"{cert}; give the two that were made together (the certificate itself first in "
                "its file, before those of its issuers)"
            ) from error
        raise _unusable("tls_cert, tls_key", f"{cert}, {key}", error) from error


_CERTIFICATE, _KEY = "CERTIFICATE-----", "PRIVATE KEY-----"


def _read_pem(setting: str, path: str, mark: str = "") -> str:
    try:
        text = Path(path).read_text("latin-1")
    except OSError as error:
        problem = f"server.tls_*: {setting} {path}: {error.strerror}"
        raise ConfigError(problem) from error
    _demand_pem(setting, path, text, mark)
    return text


def _demand_pem(setting: str, path: str, text: str, mark: str) -> None:
    if mark not in text:
        what = "certificate" if mark == _CERTIFICATE else "private key"
        raise ConfigError(
            f"server.tls_*: {setting} {path} holds no {what} in PEM, which has a line "
            f'"-----BEGIN {mark}"'
        )


def _unusable(setting: str, path: str, error: OSError) -> ConfigError:
    why = getattr(error, "reason", None) or error.strerror or str(error)
    return ConfigError(
        f"server.tls_*: {setting} {path} can't be read ({why.replace('_', ' ').lower()}): it may "
        "be damaged or cut short"
    )


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
