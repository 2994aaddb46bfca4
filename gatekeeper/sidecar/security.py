"""Authentication, per-client limits and TLS."""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import logging
import os
import re
import secrets
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from aiohttp import web
from cachetools import LRUCache

from gatekeeper import urls
from gatekeeper.clock import Clock
from gatekeeper.config import ServerConfig, read_file
from gatekeeper.errors import ConfigError
from gatekeeper.sidecar.metrics import Samples
from gatekeeper.sidecar.routing import ANY_ROLE, Problem, Role

_log = logging.getLogger(__name__)


UNIX = "unix:"
"""Prefix of the path of a unix socket in messages."""
MIN_TOKEN = 32
_MAKE_ONE = "make one with `openssl rand -hex 32`"
_MAX_TOKENS_OF_CLIENT = 2
_MAX_TOKENS = 1000
_CLIENT_NAME = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,63}")
_RESERVED_NAME = re.compile(r"token-[0-9]+|local|earlier|certificate")
"""Names that the service gives to clients without a name of their own."""
ANY_LITERAL = "*"
"""Accepts every IP address as a Host header: only names can be rebound."""
_SAME_SITE = (None, "same-origin", "none")


class Networks:
    """A set of CIDR ranges. Raises ConfigError, with the name of the setting, for a bad one."""

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
        ip = getattr(ip, "ipv4_mapped", None) or ip
        return any(ip in network for network in self._ranges)


@dataclass(frozen=True, slots=True)
class Token:
    """A bearer token, its client's name, and its roles."""

    value: bytes = field(repr=False)
    name: str
    roles: frozenset[Role] = ANY_ROLE


class Tokens:
    """Bearer tokens: at most two for each client, one in use and its successor (T6).

    A token given as bytes alone is a client called `token-1`, `token-2`, with every role.

    >>> tokens = Tokens((b"t" * 32,))
    >>> token = tokens.match("Bearer " + "t" * 32)
    >>> token.name, len(token.roles)
    ('token-1', 3)
    """

    def __init__(self, tokens: Iterable[bytes | Token] = ()) -> None:
        self.tokens: tuple[Token, ...] = tuple(
            one if isinstance(one, Token) else Token(one, f"token-{number}")
            for number, one in enumerate(tokens, 1)
        )
        self._key = secrets.token_bytes(32)
        self._by_digest = {self._digest(token.value): token for token in self.tokens}

    def __bool__(self) -> bool:
        return bool(self.tokens)

    def of(self, name: str) -> tuple[Token, ...]:
        """Return the tokens of a client, at most two."""
        return tuple(token for token in self.tokens if token.name == name)

    def match(self, header: str) -> Token | None:
        """Return the token in an Authorization header, or None if there is no valid one.

        Tokens are looked up by a digest with a secret key. The time that takes depends neither on
        how much of a token was right (T6) nor on the number of tokens.
        """
        scheme, _, given = header.partition(" ")
        if scheme.lower() != "bearer":
            return None
        text = given.strip().encode("utf-8", "surrogateescape")
        return self._by_digest.get(self._digest(text))

    def _digest(self, text: bytes) -> bytes:
        return hashlib.blake2b(text, key=self._key, digest_size=32).digest()


def read_tokens(path: str | None, *, warn: bool = False) -> Tokens:
    """Read the tokens in a file, one per line; `#` begins a comment. Raises ConfigError.

    A line is a token, or `name:role:token`; several roles are joined by commas. A file that
    users other than its owner may write is refused. With `warn`, a warning is logged if others
    may read it, as is often the case for mounted secrets.
    """
    if path is None:
        return Tokens()
    where = f"server.token_file: {path}"
    try:
        text, mode = read_file(path)
        if os.name == "posix" and mode & 0o022:
            raise ConfigError(f"others may write to it (mode {mode:04o}): `chmod go-w` it")
        found = _tokens_of([line.strip() for line in text.splitlines()])
    except OSError as error:
        remedy = "give a file that holds bearer tokens, one a line"
        raise ConfigError(f"{where}: {error.strerror}; {remedy}") from error
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    if warn and os.name == "posix" and mode & 0o044:
        _log.warning("%s: others may read it (mode %04o): `chmod go-r` it", where, mode)
    return found


def _tokens_of(lines: list[bytes]) -> Tokens:
    """Read the tokens in the lines of a file. Raises ConfigError, whose text holds no token."""
    found: list[bytes | Token] = []
    first: dict[bytes, int] = {}
    """The line of each token."""
    names: Counter[str] = Counter()
    for number, line in enumerate(lines, 1):
        if not line or line.startswith(b"#"):
            continue
        token = _token_of(line, number) if b":" in line else line
        name, value = (token.name, token.value) if isinstance(token, Token) else ("", token)
        if len(value) < MIN_TOKEN:
            raise ConfigError(
                f"line {number}: the token is shorter than {MIN_TOKEN} characters; {_MAKE_ONE}"
            )
        if value in first:
            raise ConfigError(f"line {number}: a token that occurs twice, first in {first[value]}")
        if names[name] == _MAX_TOKENS_OF_CLIENT:
            given = f"{names[name] + 1} tokens" + (f" of {name!r}" if name else "")
            raise ConfigError(f"line {number}: {given}; each client has one or two")
        if len(found) == _MAX_TOKENS:
            raise ConfigError(f"line {number}: more than {_MAX_TOKENS} tokens")
        first[value] = number
        names[name] += 1
        found.append(token)
    if not found:
        raise ConfigError(f"no token; {_MAKE_ONE}")
    return Tokens(found)


def _token_of(line: bytes, number: int) -> Token:
    """Read a line `name:role:token`. Bearer tokens hold no colon (RFC 6750 section 2.1)."""
    name, _, rest = line.decode("utf-8", "replace").partition(":")
    roles, _, value = rest.partition(":")
    given = {role.strip() for role in roles.split(",")}
    if ":" in value or not value or not given <= set(Role):
        form = f"`name:role:token` with the roles {', '.join(Role)} (several with commas)"
        raise ConfigError(f"line {number}: write `token`, or {form}")
    if not _CLIENT_NAME.fullmatch(name) or _RESERVED_NAME.fullmatch(name):
        raise ConfigError(
            f"line {number}: a client's name begins with a letter, holds letters, digits, `.`, "
            "`_` and `-`, at most 64, and is none of `token-N`, `local`, `earlier`, `certificate`"
        )
    return Token(value.strip().encode(), name, frozenset({*map(Role, given), Role.CHECK}))


class Admission:
    """Authenticates requests: returns the client's name, or raises a Problem.

    `hosts` are the accepted Host headers. None on a unix socket, which pages in a
    browser can't reach (T4).
    """

    def __init__(
        self, server: ServerConfig, *, tokens: Tokens, hosts: frozenset[str] | None
    ) -> None:
        self.tokens: Tokens = tokens
        """The accepted tokens; empty if none are required."""
        self._certificates = server.tls_client_ca is not None
        self._hosts = hosts

    def admit(self, request: web.BaseRequest, needs: frozenset[Role] = ANY_ROLE) -> str:
        """Return the client's name, for its limits and the log. Raises Problem 401 or 403.

        `needs`: the roles of which the token must have one. Without tokens every client has all.
        """
        return self.admit_by(request.headers, request.remote, request.transport, needs)

    def admit_by(
        self,
        headers: Mapping[str, str],
        remote: str | None,
        transport: asyncio.Transport | None,
        needs: frozenset[Role] = ANY_ROLE,
    ) -> str:
        """`admit`, by the headers, the peer's address and the transport of a request.

        The name is that of the token, that of the certificate, or else the peer's address.
        """
        self.check_browser(headers)
        if self.tokens:
            token = self.tokens.match(headers.get("Authorization", ""))
            if token is not None:
                if token.roles.isdisjoint(needs):
                    raise _no_role(token, needs)
                return token.name
            if not self._certificates:
                raise _no_token(headers)
        return self._by_certificate(transport) if self._certificates else remote or "local"

    def check_browser(self, headers: Mapping[str, str]) -> None:
        """Raise Problem 403 for a request that a page of another site sent (T4).

        If the site's name was rebound to our address, Host and Origin hold that name.
        """
        hosts = self._hosts
        if hosts is None:
            return
        host = headers.get("Host", "").lower()
        if host not in hosts and not (ANY_LITERAL in hosts and _is_literal(host)):
            raise Problem(403, "host", "server.allowed_hosts does not list this Host header")
        origin = headers.get("Origin")
        if origin is not None and origin.lower() not in (f"http://{host}", f"https://{host}"):
            raise Problem(403, "origin", "requests from other origins are refused")
        if headers.get("Sec-Fetch-Site") not in _SAME_SITE:
            raise Problem(403, "origin", "requests from other sites are refused")

    def roles(self, headers: Mapping[str, str]) -> frozenset[Role]:
        """Return the roles of a client that was admitted with these headers."""
        token = self.tokens.match(headers.get("Authorization", "")) if self.tokens else None
        return ANY_ROLE if token is None else token.roles

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
    """Return the 401 for a missing or a wrong token. It tells no more about a wrong one (T6)."""
    detail, challenge = "a bearer token is needed", 'Bearer realm="gatekeeper"'
    if headers.get("Authorization", "").lower().startswith("bearer "):
        detail = "the bearer token is not in server.token_file"
        challenge += ', error="invalid_token"'  # RFC 6750 section 3.1
    return Problem(401, "unauthorized", detail, headers={"WWW-Authenticate": challenge})


def _no_role(token: Token, needs: frozenset[Role]) -> Problem:
    given, wanted = ", ".join(sorted(token.roles)), " or ".join(sorted(needs))
    detail = f"the token of {token.name} is for {given}; this needs {wanted}"
    challenge = 'Bearer realm="gatekeeper", error="insufficient_scope", '  # RFC 6750 section 3.1
    challenge += f'scope="{" ".join(sorted(needs))}"'
    return Problem(403, "role", detail, headers={"WWW-Authenticate": challenge})


def _is_literal(host: str) -> bool:
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Return whether every address of a host name or literal is a loopback address."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # UnicodeError: no name of a host, as a..b
        why = getattr(error, "strerror", error)
        raise ConfigError(f"server.host: {host}: {why}; give a name or an address") from error
    return all(ipaddress.ip_address(str(entry[4][0])).is_loopback for entry in found)


# --- Limits on the concurrent requests and the request rate of a client (T8, T15).


_MAX_BUCKETS = 4096


class ClientLimits:
    """Limits the concurrent requests of each client and, if configured, their rate.

    Counts are held only for clients with a request under way. Rate limits are held for at most
    4096 clients, those with the latest requests.
    """

    def __init__(
        self,
        server: ServerConfig,
        clock: Clock,
        on_limit: Callable[[str, bool], object] | None = None,
    ) -> None:
        """`on_limit(client, at_limit)` is called when a client reaches its limit of concurrent
        requests, and when it falls below it again."""
        self._clock = clock
        self._on_limit = on_limit or (lambda client, at_limit: None)
        self._under_way: dict[str, int] = {}
        """Requests under way, by client."""
        self.adjust(server)
        # The bucket unused for the longest time is the fullest: full is as good as absent.
        self._buckets: LRUCache[str, tuple[float, float]] = LRUCache(_MAX_BUCKETS)
        """Token buckets by client: level, and the monotonic moment of the level."""
        self.refused: dict[str, int] = {"concurrency": 0, "rate": 0, "streams": 0}

    def adjust(self, server: ServerConfig) -> None:
        """Apply changed limits, for requests from now on.

        In a worker the owner tells afterwards which clients are at the new limit.
        """
        most = self._max_concurrent = server.client_concurrency
        self._rate = server.client_rate
        self.at_limit: set[str] = {one for one, n in self._under_way.items() if n >= most}
        """The clients at their limit of concurrent requests; in a worker as the owner counts."""

    def samples(self) -> Samples:
        """Return the samples for /metrics: sums, since client addresses are unbounded (T10)."""
        return {
            "gatekeeper_requests_under_way": sum(self._under_way.values()),
            "gatekeeper_clients_refused": self.refused,
        }

    def enter(self, client: str) -> None:
        """Count a request that begins. Raises Problem 429 with Retry-After. Pair with `leave`."""
        under_way = self._under_way.get(client, 0)
        if under_way >= self._max_concurrent:
            self.refused["concurrency"] += 1
            detail = f"{self._max_concurrent} requests at once are allowed to one client"
            raise Problem(429, "too-many-requests", detail, wait=1)
        if self._rate is not None:
            self._take_token(client, self._rate)
        self._under_way[client] = under_way + 1
        if under_way + 1 == self._max_concurrent:
            self.at_limit.add(client)
            self._on_limit(client, True)

    def may_skip(self, client: str) -> bool:
        """Return whether a request answered inline may skip `enter`: no limit can affect it."""
        return self._rate is None and client not in self.at_limit

    def leave(self, client: str) -> None:
        """Count a request that ends."""
        under_way = self._under_way[client] - 1
        if under_way + 1 == self._max_concurrent:
            self.at_limit.discard(client)
            self._on_limit(client, False)
        if under_way:
            self._under_way[client] = under_way
        else:
            del self._under_way[client]

    def _take_token(self, client: str, rate: float) -> None:
        """Take a token from the client's bucket. Raises Problem 429 if it is empty.

        A bucket holds one second's worth of requests, at least one, and fills at `rate`.
        """
        now = self._clock.monotonic()
        depth = max(1.0, rate)
        level, at = self._buckets.get(client, (depth, now))
        level = min(depth, level + (now - at) * rate)
        if level < 1.0:
            self.refused["rate"] += 1
            detail = f"{rate:g} requests a second are allowed to one client"
            raise Problem(429, "too-many-requests", detail, wait=(1.0 - level) / rate)
        self._buckets[client] = (level - 1.0, now)


# --- The certificate of the listeners, whose files are replaced every few weeks.


_PAIR = ("tls_cert", "tls_key")
_TLS_SETTINGS = (*_PAIR, "tls_client_ca")
_CERTIFICATE, _KEY = "CERTIFICATE-----", "PRIVATE KEY-----"


class Certificates:
    """The TLS context of the listeners, and the files it was made from.

    `context` is None without TLS. `authorities`: the CA certificates for clients in PEM, if not
    those in the file. Raises ConfigError.
    """

    def __init__(self, server: ServerConfig, authorities: str | None = None) -> None:
        self._paths = _tls_paths(server)
        self._files = _read_pems(self._paths)
        self._authorities = authorities or self._files.get("tls_client_ca")
        self.context: ssl.SSLContext | None = self._make_context()
        """The context of the next connection."""

    def renewal(self, server: ServerConfig) -> Certificates | None:
        """Load the files again if they changed, and return the result. Return None otherwise.

        The authorities stay the old ones: a context in use can't replace them. If `server` names
        other paths, nothing is loaded, since that needs a restart. Raises ConfigError.
        """
        if _tls_paths(server) != self._paths:
            return None
        new = Certificates(server, self._authorities)
        return None if new._files == self._files else new

    def apply(self, new: Certificates) -> list[str]:
        """Present the new certificate from the next connection on. Reads no files and can't fail.

        Return the settings whose files have changed. Certificate and key are in force now. The
        authorities need a restart: a client admitted by one that was removed could resume its TLS
        session.
        """
        changed = [name for name, text in new._files.items() if text != self._files[name]]
        if not set(changed).isdisjoint(_PAIR):
            self.context = new.context
            self._files |= {name: new._files[name] for name in _PAIR}
        return [f"server.{name}" for name in changed]

    def _make_context(self) -> ssl.SSLContext | None:
        if not self._paths:
            return None
        if not set(_PAIR) <= self._paths.keys():
            raise ConfigError("server.tls_cert and server.tls_key must be set together")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._load_pair(context, self._paths["tls_cert"], self._paths["tls_key"])
        if self._authorities is not None:
            plain = self._authorities.encode("ascii", "replace")  # comments may hold anything
            try:
                context.load_verify_locations(cadata=plain.decode())
            except OSError as error:
                problem = f"tls_client_ca {self._paths['tls_client_ca']} {_damage(error)}"
                raise ConfigError(f"server.tls_*: {problem}") from error
            # Optional here and required for each request, so that probes need no certificate.
            context.verify_mode = ssl.CERT_OPTIONAL
        return context

    def _load_pair(self, context: ssl.SSLContext, cert: str, key: str) -> None:
        """Load certificate and key into a context. Raises ConfigError that names the wrong file."""
        asked: list[bool] = []

        def passphrase() -> str:
            asked.append(True)  # nobody is asked: a service has no terminal
            return ""

        try:
            context.load_cert_chain(cert, key, passphrase)
        except OSError as error:  # ssl.SSLError is one
            problem = f"tls_cert, tls_key {cert}, {key} {_damage(error)}"
            if asked:
                problem = f"tls_key {key} is encrypted; give a key without a passphrase"
            elif getattr(error, "reason", "") == "KEY_VALUES_MISMATCH":
                problem = f"tls_key {key} is not the key of the certificate in tls_cert {cert}; "
                problem += "give the two that were made together (their certificate comes first)"
            raise ConfigError(f"server.tls_*: {problem}") from error


def _tls_paths(server: ServerConfig) -> dict[str, str]:
    """Return the files that the settings of TLS name, by setting."""
    return {name: path for name in _TLS_SETTINGS if (path := getattr(server, name)) is not None}


def _read_pems(paths: Mapping[str, str]) -> dict[str, str]:
    """Read the files of TLS, by setting. Raises ConfigError for one that holds something else."""
    found: dict[str, str] = {}
    for name, path in paths.items():
        try:
            found[name] = read_file(path)[0].decode("latin-1")
        except OSError as error:
            raise ConfigError(f"server.tls_*: {name} {path}: {error.strerror}") from error
    cert, key = found.get("tls_cert", ""), found.get("tls_key", "")
    swapped = _CERTIFICATE not in cert and _CERTIFICATE in key and _KEY in cert
    for name, text in found.items():
        mark, what = (_KEY, "private key") if name == "tls_key" else (_CERTIFICATE, "certificate")
        if mark not in text:
            hint = f'which has a line "-----BEGIN {mark}"'
            hint = "but tls_key does: swap them" if swapped else hint
            raise ConfigError(f"server.tls_*: {name} {paths[name]} holds no {what} in PEM, {hint}")
    return found


def _damage(error: OSError) -> str:
    why = str(getattr(error, "reason", None) or error.strerror or error)
    return f"may be damaged or cut short ({why.replace('_', ' ').lower()})"


# --- Checks of the configuration that need the file system or the open sockets.


def demand_credentials(server: ServerConfig, tokens: Tokens, *, where: str) -> None:
    """Require tokens or client certificates, for a listener that others can reach (T5).

    Raises ConfigError, whose text begins with `where`.
    """
    if tokens or server.tls_client_ca is not None:
        return
    problem = "can be reached from other machines: listen on 127.0.0.1 or a socket, or set"
    if where.startswith(UNIX):
        problem = "can be written to by other users: set SocketMode=0600 in its unit, or"
    raise ConfigError(f"{where} {problem} server.token_file or server.tls_client_ca")


def exposed_address(names: Iterable[tuple[str, int]]) -> str | None:
    """Describe the first address that other machines can reach. Return None if there is none."""
    return next((f"{host} port {port}" for host, port in names if not is_loopback(host)), None)


def accepted_hosts(server: ServerConfig, names: Iterable[tuple[str, int]]) -> frozenset[str]:
    """Return the exact Host headers to accept, for the addresses listened on (T4)."""
    default = 443 if server.tls_cert is not None else 80
    found: set[str] = {host.lower() for host in server.allowed_hosts}
    for address, port in names:
        if ipaddress.ip_address(address).is_unspecified:
            found.add(ANY_LITERAL)
        hosts = {address, server.host}
        if address in ("127.0.0.1", "::1"):
            hosts.add("localhost")
        for host in hosts:
            shown = urls.bracketed(host.lower())
            found.add(f"{shown}:{port}")
            if port == default:
                found.add(shown)
    return frozenset(found)
