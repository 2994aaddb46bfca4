"""Who may ask: addresses, Host and Origin, bearer tokens, client certificates."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from gatekeeper.config import ServerConfig
from gatekeeper.errors import ConfigError
from gatekeeper.sidecar.problems import Problem

__all__ = ["ANY_LITERAL", "Door", "Networks", "Tokens", "is_loopback", "read_tokens"]

MIN_TOKEN = 32
ANY_LITERAL = "*"
"""Among the accepted hosts: any IP address is, as it is no name that could be rebound."""
_SAME_SITE = (None, "same-origin", "none")


class Networks:
    """A set of CIDR ranges. Raises ConfigError naming the setting of a bad one."""

    __slots__ = ("_ranges",)

    def __init__(self, ranges: tuple[str, ...], *, setting: str) -> None:
        try:
            self._ranges = [ipaddress.ip_network(text, strict=False) for text in ranges]
        except ValueError as error:
            raise ConfigError(f"{setting}: {error}; give ranges like 10.0.0.0/8") from None

    def __contains__(self, address: object) -> bool:
        try:
            ip = ipaddress.ip_address(str(address).partition("%")[0])
        except ValueError:
            return False
        if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
            ip = ip.ipv4_mapped
        return any(ip.version == net.version and ip in net for net in self._ranges)


@dataclass(frozen=True, slots=True)
class Tokens:
    """Bearer tokens, at most two: one in use and the one that replaces it (T6)."""

    tokens: tuple[bytes, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.tokens)

    def match(self, header: str) -> int | None:
        """Which token an Authorization header carries; compared in constant time."""
        scheme, _, given = header.partition(" ")
        if scheme.lower() != "bearer":
            return None
        text = given.strip().encode("utf-8", "surrogateescape")
        found = None
        for number, token in enumerate(self.tokens):
            # No early end: the time must not tell which token was nearly right.
            if hmac.compare_digest(text, token):
                found = number
        return found

    def __repr__(self) -> str:
        return f"Tokens({len(self.tokens)} of them)"


def read_tokens(path: str | None) -> Tokens:
    """The tokens in a file, one a line, `#` begins a comment. Raises ConfigError."""
    if path is None:
        return Tokens()
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"server.token_file: {path}: {error.strerror}") from error
    found = tuple(line.strip() for line in lines if line.strip() and not line.startswith(b"#"))
    if not 1 <= len(found) <= 2:
        raise ConfigError(f"server.token_file: {path}: {len(found)} tokens; one or two may stand")
    if any(len(token) < MIN_TOKEN for token in found):
        raise ConfigError(
            f"server.token_file: {path}: a token is shorter than {MIN_TOKEN} characters; "
            "make one with `openssl rand -hex 32`"
        )
    return Tokens(found)


class Door:
    """Lets requests in, or raises the Problem that says why not.

    `hosts` are the Host headers accepted; None on a unix socket, where no page of a
    browser can knock (T4).
    """

    def __init__(
        self, server: ServerConfig, *, tokens: Tokens, hosts: frozenset[str] | None
    ) -> None:
        self._tokens = tokens
        self._certificates = server.tls_client_ca is not None
        self._hosts = hosts

    def admit(self, request: web.BaseRequest) -> str:
        """The client's name, for its bounds and the log. Raises Problem 401 or 403."""
        return self.admit_by(request.headers, request.remote, request.transport)

    def admit_by(
        self, headers: Mapping[str, str], remote: str | None, transport: asyncio.Transport | None
    ) -> str:
        """The same by a request's headers, where it came from, and its connection."""
        if self._hosts is not None:
            self._judge_browser(headers, self._hosts)
        if self._certificates and not self._tokens:
            return self._by_certificate(transport)
        if not self._tokens:
            return remote or "local"
        number = self._tokens.match(headers.get("Authorization", ""))
        if number is not None:
            return f"token-{number + 1}"
        if self._certificates:
            return self._by_certificate(transport)
        raise _no_token(headers)

    def _judge_browser(self, headers: Mapping[str, str], hosts: frozenset[str]) -> None:
        """T4: a page whose name was rebound to us has its own name in Host and Origin."""
        host = headers.get("Host", "").lower()
        if host not in hosts and not (ANY_LITERAL in hosts and _is_literal(host)):
            raise Problem(
                403, "host", "this Host header is not ours; server.allowed_hosts lists others"
            )
        origin = headers.get("Origin")
        if origin is not None and origin.lower() not in (f"http://{host}", f"https://{host}"):
            raise Problem(403, "origin", "requests from other origins are refused")
        if headers.get("Sec-Fetch-Site") not in _SAME_SITE:
            raise Problem(403, "origin", "requests from other sites are refused")

    @staticmethod
    def _by_certificate(transport: asyncio.Transport | None) -> str:
        peer = transport.get_extra_info("peercert") if transport is not None else None
        if not peer:
            raise Problem(401, "unauthorized", "a client certificate is needed")
        names = [
            value for part in peer.get("subject", ()) for key, value in part if key == "commonName"
        ]
        return f"certificate {names[0]}" if names else "certificate"


def _no_token(headers: Mapping[str, str]) -> Problem:
    """Says whether one came: a wrong one is wrong, whatever is wrong with it (T6)."""
    detail, challenge = "a bearer token is needed", 'Bearer realm="gatekeeper"'
    if headers.get("Authorization", "").lower().startswith("bearer "):
        detail = "the bearer token is none of server.token_file's"
        challenge += ', error="invalid_token"'  # RFC 6750 section 3.1
    return Problem(401, "unauthorized", detail, headers={"WWW-Authenticate": challenge})


def _is_literal(host: str) -> bool:
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether every address of a name or literal is this machine's own loopback."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"server.host: {host}: {error.strerror}") from error
    return all(ipaddress.ip_address(str(entry[4][0])).is_loopback for entry in found)
