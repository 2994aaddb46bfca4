"""Every setting with its default and its unit. `config.example.toml` documents them.

`Config()` has all defaults. `Config.load(path)` reads a TOML file and refuses unknown
settings. Durations are seconds, sizes are bytes.
"""

from __future__ import annotations

import difflib
import errno
import logging
import os
import stat
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from datetime import date, time
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import inspect
from msgspec.structs import FieldInfo

from gatekeeper import urls
from gatekeeper.errors import ConfigError, InvalidURL
from gatekeeper.http_fields import UtcTime
from gatekeeper.robots import product_token
from gatekeeper.urls import not_text, printable, without_credentials

if TYPE_CHECKING:
    from gatekeeper.robots import Policy, RobotsTxt

# A library leaves it to the application to handle its log records. The line is here because every
# module that logs imports the settings; the parser and the start of the command need no logging.
logging.getLogger("gatekeeper").addHandler(logging.NullHandler())

MAX_FILE = 4 * 1024 * 1024
"""Maximum size in bytes of a file that a setting names."""
MEMORY = "memory"
"""The `storage.path` that stands for no file."""
_TEN_YEARS = 10 * 366 * 86_400.0
"""Ten years: dates so far ahead can still be computed. The bound also excludes `inf` and `nan`."""
_IN_SECONDS = {"unit": "seconds"}
"""The unit that error messages name for such a setting."""
Seconds = Annotated[float, msgspec.Meta(ge=0, le=_TEN_YEARS, extra=_IN_SECONDS)]
PositiveSeconds = Annotated[float, msgspec.Meta(gt=0, le=_TEN_YEARS, extra=_IN_SECONDS)]
NonNegative = Annotated[float, msgspec.Meta(ge=0, le=_TEN_YEARS)]
PositiveNumber = Annotated[float, msgspec.Meta(gt=0, le=_TEN_YEARS)]
FilePath = Annotated[str, msgspec.Meta(min_length=1)]
"""The path of a file. Empty text is refused; None means that there is no file."""
Count = Annotated[int, msgspec.Meta(ge=1)]
Size = Annotated[int, msgspec.Meta(ge=1, extra={"unit": "bytes"})]


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the configuration."""


class RobotsConfig(_Section, frozen=True):
    """How the text of a robots.txt is read (`[robots]`)."""

    dialect: Literal["auto", "rfc9309", "1994", "1996", "2.0"] = "auto"
    conflicts: Literal["strict", "declared"] = "strict"
    v2_semantics: Literal["order", "precedence"] = "order"
    inherit_crawl_delay: bool = False
    """VND-09: an agent with a group of its own still inherits Crawl-delay from `*`."""

    def policy(self, robots: RobotsTxt, agent: str) -> Policy:
        """Return the policy of a file for one agent, by these settings."""
        return robots.policy(
            agent,
            conflicts=self.conflicts,
            v2_semantics=self.v2_semantics,
            inherit_crawl_delay=self.inherit_crawl_delay,
        )


class FetchConfig(_Section, frozen=True):
    """How robots.txt is fetched, and what each outcome means (`[fetch]`)."""

    profile: Literal["strict", "google", "archival"] = "strict"
    on_401: Literal["allow", "deny"] = "allow"
    on_403: Literal["allow", "deny"] = "allow"
    challenge: Literal["defer", "status"] = "defer"
    too_many_redirects: Literal["absent", "unreachable"] = "absent"
    tls_errors: Literal["deny", "accept"] = "deny"
    ca_file: FilePath | None = None
    """Certificates of authorities (PEM) that are trusted in addition to the system's."""
    ca_dir: FilePath | None = None
    """A directory of such files."""
    stale_if_unreachable: bool = False
    """In an outage, use the last good copy immediately instead of after 12 hours."""
    unseen_unreachable: Literal["defer", "allow_after_12h"] = "defer"
    from_address: str | None = None
    """The From header (RFC 9110 section 10.1.5, HTTP-12): an address at which the operator can be
    reached."""
    max_redirects: Annotated[int, msgspec.Meta(ge=5, le=20)] = 5
    max_body: Annotated[int, msgspec.Meta(ge=512_000)] = 512_000
    max_wire: Size = 1_048_576
    connect_timeout: PositiveSeconds = 10.0
    first_byte_timeout: PositiveSeconds = 15.0
    total_timeout: PositiveSeconds = 30.0
    min_rate: NonNegative = 256.0
    """Bytes per second, over `min_rate_window`, below which a transfer is given up as too slow."""
    min_rate_window: PositiveSeconds = 10.0
    max_concurrent: Count = 200
    max_idle_connections: Count | None = None
    """Connections that each pool keeps open for reuse, over all hosts; the oldest are closed first.
    None: a quarter of the files that the process may have open."""
    conditional: bool = True


class CacheConfig(_Section, frozen=True):
    """How long files are cached, and how many (`[cache]`)."""

    default_ttl: PositiveSeconds = 86_400.0
    min_ttl: PositiveSeconds = 600.0
    max_ttl: PositiveSeconds = 86_400.0
    max_bytes: Size = 1_073_741_824
    hot_records: Count = 500_000
    """Origins whose records are kept in memory."""
    max_waiters: Count = 100_000
    """Questions that may wait for fetches at the same time, over all origins."""
    max_agents: Count = 64
    """Compiled policies (one per agent) cached for one origin."""


class GuardConfig(_Section, frozen=True):
    """Which URLs and addresses may be requested (`[guard]`)."""

    mode: Literal["full", "url-only"] = "full"
    allow: tuple[str, ...] = ()
    """CIDR ranges and host names that may be reached although the guard would refuse them."""
    deny: tuple[str, ...] = ()
    nat64: Literal["unwrap", "deny"] = "unwrap"
    ports: tuple[Annotated[int, msgspec.Meta(ge=1, le=65535)], ...] | None = None
    """Ports that may be requested. None: every port except those on the WHATWG bad-port list."""


class PacingConfig(_Section, frozen=True):
    """The pace of each host, and the limits over all hosts (`[pacing]`)."""

    default_interval: Seconds = 1.0
    """The interval of a host whose file gives no rate."""
    min_interval: Seconds = 0.0
    max_interval: PositiveSeconds | None = None
    """A cap on the interval that a site asks for; decisions it affects say so. None: no cap."""
    jitter: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    """Share of the interval that is added at random; never subtracted."""
    latency_factor: NonNegative = 0.0
    """Interval = this times the smoothed time to the response head; 0 switches this off."""
    latency_floor: Seconds = 0.0
    latency_cap: PositiveSeconds = 60.0
    concurrency: Count = 1
    """Requests in flight for one host."""
    max_in_flight: Count = 10_000
    max_waiters: Count = 1_000_000
    max_hosts: Count = 2_000_000
    lease_ttl: PositiveSeconds = 600.0
    """Seconds after which a lease that was never reported ends by itself."""
    own_wait: PositiveSeconds = 30.0
    """Seconds that a task which holds a lease, or was started under one, waits for a host whose
    lease its parent or another waiting task holds."""
    backoff_initial: PositiveSeconds = 60.0
    backoff_max: PositiveSeconds = 86_400.0
    backoff_jitter: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.2
    forgive_after: PositiveSeconds = 1800.0
    """Seconds without a refusal after which blocks start at `backoff_initial` again."""
    backoff_floor: PositiveSeconds = 0.1
    """A 429 or 503 doubles the interval of a host, starting from this value if it has none."""
    backoff_answers: Count = 100
    """Good answers that halve it, down to twice the refused interval or, in a trial, further."""
    backoff_quiet: PositiveSeconds = 300.0
    """Seconds without a refusal that also halve it; whichever comes first."""
    backoff_retry: PositiveSeconds = 3_600.0
    """Seconds after which a refused interval is tried again. Each new refusal doubles this ..."""
    backoff_retry_max: PositiveSeconds = 86_400.0
    """... up to this."""
    address_interval: Seconds | None = None
    """Minimum time between two requests to one IP address; None: no such scope."""
    domain_interval: Seconds | None = None
    """Minimum time between two requests to one registered domain; None: no such scope."""
    max_pages_per_day: Count | None = None
    """Leases for pages of one host in the 24 hours from the first one; None: no limit."""
    max_bytes_per_day: Size | None = None
    """Bytes of the responses of one host in that time; None: no limit."""
    dry_run: bool = False


class StorageConfig(_Section, frozen=True):
    """What outlives the process (`[storage]`)."""

    path: FilePath | None = None
    """The SQLite file. None: nothing is stored, except by the sidecar and `fetch -o`, which have a
    default path of their own. `MEMORY`: they store nothing either."""
    on_failure: Literal["refuse", "continue"] = "refuse"
    """While nothing can be written: refuse leases of hosts whose clock or block would have to
    outlive the process, or continue without storage and log a warning."""
    flush_interval: PositiveSeconds = 1.0
    history_versions: Count = 20
    """Distinct bodies stored for one origin."""
    history_bytes: Size = 268_435_456
    journal_bytes: Size = 16_777_216
    """Size at which the journal is merged into SQLite and started anew."""
    max_origins: Count = 2_000_000
    """Origins stored; beyond that, the least recently used are deleted, but none with a promise."""
    forget_after: PositiveSeconds = 7_776_000.0
    """Seconds without use after which an origin, or a clock that has run out, is deleted."""


class ServerConfig(_Section, frozen=True):
    """The sidecar (`[server]`)."""

    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 8750
    socket: FilePath | None = None
    """A unix socket to listen on instead of `host` and `port`."""
    diagnostics: FilePath | None = None
    """`ADDRESS:PORT` that serves health and metrics alone, without credentials of its own."""
    workers: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    """Processes that answer questions in addition to the one that owns the leases; 0: none."""
    token_file: FilePath | None = None
    """Bearer tokens, one per line, or `name:role:token`; at most two per client, so that one
    can be replaced (T6)."""
    tls_cert: FilePath | None = None
    tls_key: FilePath | None = None
    tls_client_ca: FilePath | None = None
    """Certificate authorities; clients must present a certificate signed by one of them."""
    allowed_hosts: tuple[str, ...] = ()
    """Host headers accepted in addition to the listening address (T4)."""
    max_batch: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 1000
    max_body: Size = 1_048_576
    max_header: Annotated[int, msgspec.Meta(ge=1024, le=65536)] = 16_384
    max_leases: Count = 10_000
    client_leases: Count | None = None
    """Leases that one client (token, or address) may hold; None: half of max_leases."""
    max_waiting: Count = 10_000
    """Requests that may wait for a lease at the same time; further ones get 503."""
    max_wait: PositiveSeconds = 300.0
    client_concurrency: Count = 6_000
    """Concurrent requests from one client (token, or address)."""
    client_rate: PositiveNumber | None = None
    """Requests per second from one client; None: no limit."""
    max_streams: Count = 64
    """Streams of `/v1/events` (each open Live page has one) and `/v1/sitemaps` that may be open."""
    client_streams: Count | None = None
    """Streams that one client (token, or address) may have open; None: half of max_streams."""
    fetch_max_body: Size = 104_857_600
    fetch_timeout: PositiveSeconds = 300.0
    forward_auth: bool = False
    forward_auth_wait: Annotated[float, msgspec.Meta(ge=0, le=0.15)] = 0.0
    forward_auth_hosts: tuple[str, ...] = ()
    """Host headers that /v1/forward-auth accepts; empty: any (Envoy sends the visitor's)."""
    trusted_peers: tuple[str, ...] = ("127.0.0.1/32", "::1/128")
    """Address ranges that may use /v1/forward-auth (T7)."""
    drain_grace: Seconds = 1.0
    """Seconds, after `drain_timeout`, that clients and load balancers have to notice SIGTERM; no
    connection is accepted after that."""
    drain_timeout: Seconds = 20.0
    """Seconds that open leases and streams have to end on SIGTERM."""
    log_format: Literal["auto", "json", "text"] = "auto"
    log_decisions: Literal["all", "refused", "none"] = "all"
    log_queries: bool = False
    """Write query strings to the log; they are masked otherwise (T11)."""
    log_rate: Count = 10_000
    """Decisions logged per second; further ones are counted as dropped."""


class FleetConfig(_Section, frozen=True):
    """Several gates that share one pace (`[fleet]`)."""

    url: FilePath | None = None
    """The URL of a Valkey or Redis server; None: this gate is alone."""
    namespace: Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9._-]{1,64}\Z")] = "gatekeeper"
    when_lost: Literal["wait", "divide"] = "wait"
    """While the store is lost: grant nothing, or let each member go on with hosts of its own."""
    sharded: bool = False
    """Spread scopes over the servers of a Valkey Cluster, and acquire them one after the other."""
    hold: Annotated[float, msgspec.Meta(ge=1, le=300, extra=_IN_SECONDS)] = 20.0
    """Seconds for which the leases of a member outlive its last heartbeat."""
    allow_lost_writes: bool = False
    """Start although a failover of the store may lose the latest grants."""

    def __repr__(self) -> str:
        shown = None if self.url is None else without_credentials(self.url)
        return f"FleetConfig(url={shown!r}, namespace={self.namespace!r}, hold={self.hold:g})"


class IdentityConfig(_Section, frozen=True):
    """How requests prove who sends them (`[identity]`)."""

    key: str | None = None
    """The file of the key that signs requests (PEM, Ed25519); None: requests are not signed."""
    also: tuple[str, ...] = ()
    """Files of keys that are published but do not sign: the next key, or the previous one."""
    directory: str | None = None
    """Where the keys are published: an https origin, or the URL of a JWK Set."""
    signature_agent: Literal["dictionary", "string"] = "dictionary"
    components: tuple[Literal["@authority", "@target-uri", "@method", "@path", "@query"], ...] = (
        "@authority",
        "@method",
        "@path",
    )
    """What a signature covers in addition to Signature-Agent."""
    lifetime: Annotated[float, msgspec.Meta(ge=5, le=86_400)] = 60.0
    """Seconds for which a signature is valid."""
    about: str | None = None
    """What the bot does, for its page."""
    addresses: tuple[str, ...] = ()
    """The addresses that the bot sends requests from, for its page."""


class AuditConfig(_Section, frozen=True):
    """The audit record (`[audit]`)."""

    folder: FilePath | None = None
    """Where it is written; None: there is none."""
    what: Literal["requests", "decisions"] = "requests"
    """Requests and refusals; or also every decision of every question."""
    max_rate: Count = 10_000
    """Refusals and decisions that are written in a second; the others are counted."""
    urls: Literal["full", "path", "digest"] = "full"
    """How URLs are written: whole, without query, or as SHA-256 with a salt of the chain."""
    rotate: Annotated[int, msgspec.Meta(ge=4096, extra={"unit": "bytes"})] = 67_108_864
    """The size at which a segment is closed; one is also closed after a day."""
    keep: PositiveSeconds | None = None
    """Seconds after which a closed segment is removed, except for its seal; None: never."""
    on_failure: Literal["refuse", "continue"] = "refuse"
    """While nothing can be written: refuse leases, or grant them and record the gap later."""


class HostRule(_Section, frozen=True):
    """An operator's rule for hosts (`[[host]]`)."""

    match: str
    """A host name, `*.example.org` for every name below it, or `*`."""
    robots: Literal["obey", "allow", "deny"] = "obey"
    interval: Seconds | None = None
    concurrency: Count | None = None
    max_pages_per_day: Count | None = None
    max_bytes_per_day: Size | None = None
    reason: str | None = None
    group: str | None = None
    """The group whose clock these hosts share, in addition to their own clocks."""
    by: Annotated[str, msgspec.Meta(min_length=1, max_length=200)] | None = None
    """Who set the rule."""
    until: UtcTime | None = None
    """When it ends; after that, the rule that it replaced is in force again."""


class GroupRule(_Section, frozen=True):
    """A clock that several hosts share (`[[group]]`)."""

    name: str
    interval: Seconds = 0.0
    concurrency: Count | None = None


class Config(_Section, frozen=True):
    """All settings. `Config()` is all defaults.

    >>> Config().cache.default_ttl
    86400.0
    """

    user_agent: str | None = None
    robots: RobotsConfig = RobotsConfig()
    fetch: FetchConfig = FetchConfig()
    cache: CacheConfig = CacheConfig()
    guard: GuardConfig = GuardConfig()
    pacing: PacingConfig = PacingConfig()
    storage: StorageConfig = StorageConfig()
    server: ServerConfig = ServerConfig()
    fleet: FleetConfig = FleetConfig()
    identity: IdentityConfig = IdentityConfig()
    audit: AuditConfig = AuditConfig()
    host: tuple[HostRule, ...] = ()
    group: tuple[GroupRule, ...] = ()

    @classmethod
    def load(cls, path: str | Path) -> Config:
        """Read a TOML file. Raises ConfigError, which names the file and the setting."""
        return cls.from_dict(read_toml(path), source=str(path))

    @classmethod
    def from_dict(cls, raw: dict[str, Any], *, source: str = "configuration") -> Config:
        """Check a mapping shaped like the TOML file. Raises ConfigError.

        The message starts with `source`, unless that is empty, and the setting's name.
        """
        try:
            return cls._checked(raw)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}" if source else str(error)) from error

    @classmethod
    def _checked(cls, raw: dict[str, Any]) -> Config:
        if not isinstance(raw, dict):
            example = '{"pacing": {"default_interval": 2.0}}'
            raise ConfigError(f"a dict such as {example}, not {printable(repr(raw), 40)}")
        try:
            config = msgspec.convert(raw, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(first_mistake(cls, raw) or str(error)) from error
        for name, value in values_of(config):
            texts = value if isinstance(value, tuple) else (value,)
            if any(isinstance(one, str) and "\0" in one for one in texts):
                raise ConfigError(f"{name}: has a NUL character, which no system accepts")
        for rule in config.host:
            try:
                match_named(rule.match)
            except ConfigError as error:
                raise ConfigError(f"[[host]] match: {error}") from error
        if config.user_agent is not None:
            agent_named(config.user_agent)
        sender = config.fetch.from_address
        # The address is sent as a header field, where a line break would start another field.
        if sender is not None and not sender.isprintable():
            raise ConfigError(f"fetch.from_address: {sender!r} contains an unprintable character")
        if not {"@authority", "@target-uri"} & set(config.identity.components):
            raise ConfigError('identity.components must include "@authority" or "@target-uri"')
        cache = config.cache
        if cache.min_ttl > cache.max_ttl:
            raise ConfigError(
                f"cache.min_ttl = {cache.min_ttl:g} is above cache.max_ttl = {cache.max_ttl:g}"
            )
        return config


def values_of(config: Config) -> Iterator[tuple[str, Any]]:
    """Yield every effective setting as its dotted name and value, in the order of the sections."""
    for name in config.__struct_fields__:
        value = getattr(config, name)
        if isinstance(value, msgspec.Struct):
            for inner in value.__struct_fields__:
                yield f"{name}.{inner}", getattr(value, inner)
        else:
            yield name, value


def as_config(value: object) -> Config:
    """Return `value` if it is a Config, or all defaults for None. Raises ConfigError otherwise.

    A struct made in Python checks nothing. Without this check, a mapping in place of a Config
    or of one of its sections would fail in the middle of a request.
    """
    if value is None:
        return Config()
    remedy = "use Config.load(path) or Config.from_dict(mapping)"
    if not isinstance(value, Config):
        raise ConfigError(f"config must be a Config, not a {type(value).__name__}: {remedy}")
    for field in msgspec.structs.fields(Config):
        section = getattr(value, field.name)
        if isinstance(field.type, type) and not isinstance(section, field.type):
            raise ConfigError(
                f"config.{field.name} must be a {field.type.__name__}, "
                f"not a {type(section).__name__}: {remedy}"
            )
    for name, kind, tables in (("host", HostRule, value.host), ("group", GroupRule, value.group)):
        if not isinstance(tables, tuple) or not all(isinstance(table, kind) for table in tables):
            raise ConfigError(f"config.{name} must be a tuple of {kind.__name__}: {remedy}")
    return value


# --- the files ------------------------------------------------------------------------------


def read_file(path: str | Path) -> tuple[bytes, int]:
    """Return the content and the mode of a file that a setting names. Raises OSError.

    It must be a regular file or the null device: a reload reads the file again, and opening a pipe
    would wait for a writer.
    """

    def open_nonblocking(name: str, flags: int) -> int:
        return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))

    with open(path, "rb", opener=open_nonblocking) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) and str(path) != os.devnull:
            raise OSError(errno.EINVAL, "it is a pipe or a device, not a file", str(path))
        body = file.read(MAX_FILE + 1)
    if len(body) > MAX_FILE:
        raise OSError(errno.EFBIG, f"it is longer than {MAX_FILE >> 20} MiB", str(path))
    return body, stat.S_IMODE(status.st_mode)


def read_toml(path: str | Path) -> dict[str, Any]:
    """Read the configuration file without checking its settings. Raises ConfigError."""
    try:
        return tomllib.loads(read_file(path)[0].decode("utf-8-sig"))
    except OSError as error:
        raise ConfigError(
            f"{path}: can't be read ({error.strerror}); give --config a readable TOML file"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: not UTF-8; save it in UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error


# --- hosts and agents as an operator writes them --------------------------------------------

_IDENTITY_HINT = 'say who you are, such as "examplebot/1.0 (+https://example.org/bot)"'
_HOST_HINT = "write it as a.example, 192.0.2.1 or 2001:db8::1, or give a URL of it"


def host_named(text: str) -> str:
    """Return the normal form of a host, given as a name, an address or a URL. Raises ConfigError.

    >>> host_named("MÜNCHEN.example."), host_named("https://[2001:DB8::1]:8443/x")
    ('xn--mnchen-3ya.example', '2001:db8::1')
    """
    if not isinstance(text, str):
        raise not_text(text, "host")
    if "://" in text:
        url = text
    elif any(mark in text for mark in "/?#@\\"):
        raise _invalid_host(text, "it is more than a host")
    elif text.count(":") > 1 and "[" not in text:
        url = f"http://[{text}]/"
    else:
        url = f"http://{text}/"
    try:
        host = urls.parse(url).host
    except InvalidURL as error:
        raise _invalid_host(text, error.problem) from error
    if "*" in host:
        raise _invalid_host(text, "it is a pattern, but one host is needed")
    return host


def match_named(text: str) -> str:
    """Return the normal form of `[[host]] match`, which may also be `*` or start with `*.`.

    Raises ConfigError.

    >>> match_named("*.Example.ORG.")
    '*.example.org'
    """
    if text == "*":
        return text
    if text.startswith("*."):
        return f"*.{host_named(text[2:])}"
    if "*" in text:
        raise _invalid_host(text, "`*` must be alone, or in front as in *.example.org")
    return host_named(text)


def agent_named(text: str) -> str:
    """Return the product token of our own user agent. Raises ConfigError if it can't be sent.

    >>> agent_named("examplebot/1.0 (+https://example.org/bot)")
    'examplebot'
    """
    if not isinstance(text, str):
        raise not_text(text, "user_agent")
    # The name is sent as a header field, where a line break would start another field, and where
    # only ASCII is sure to arrive unchanged.
    if not text.isascii() or not text.isprintable():
        raise _invalid_agent(text, "contains a character that is not printable ASCII")
    refuse_wildcard_agent(text)
    return token_of(text)


def token_of(user_agent: str) -> str:
    """Return the product token that selects the group in robots.txt. Raises ConfigError if none."""
    if not isinstance(user_agent, str):
        raise not_text(user_agent, "user_agent")
    return _token_of(user_agent)


@lru_cache(maxsize=4096)  # a process asks for few agents
def _token_of(user_agent: str) -> str:
    token = product_token(user_agent)
    if user_agent.encode(errors="replace").decode() != user_agent:
        raise _invalid_agent(user_agent, "contains half of a character")
    if not token:
        raise _invalid_agent(user_agent, "contains no product token")
    return token


def refuse_wildcard_agent(user_agent: str | None) -> None:
    """Raise ConfigError for `*`, which no request can be sent as. Questions may ask about it."""
    if user_agent is not None and "*" in token_of(user_agent):
        raise _invalid_agent(user_agent, "contains `*`, which means everybody in robots.txt")


def _invalid_agent(user_agent: str, problem: str) -> ConfigError:
    return ConfigError(f"user_agent: {printable(user_agent, 120)!r} {problem}; {_IDENTITY_HINT}")


def _invalid_host(text: str, problem: str) -> ConfigError:
    return ConfigError(f"{printable(text, 120)!r} is not a host: {problem}; {_HOST_HINT}")


# --- messages about wrong settings ----------------------------------------------------------
#
# msgspec validates. What follows explains its refusals to an operator, with the setting's name and
# the values it accepts. Both come from the same types, so that each bound is written down once.

_LIST_HINT = "`gatekeeper config show` lists all of them"
_DATE = "a date with its zone (a duration would start again at each reload) as 2026-12-31T18:00:00Z"
_Fields = Mapping[str, FieldInfo]


def first_mistake(struct: type[msgspec.Struct], settings: Mapping[str, Any]) -> str | None:
    """Return a message about the first invalid setting of a mapping, or None if all are valid.

    >>> from gatekeeper.config import Config
    >>> first_mistake(Config, {"pacing": {"default_intervall": 2}})
    'pacing.default_intervall: no such setting; did you mean default_interval?'
    """
    return next(_mistakes(settings_of(struct), settings), None)


def explain_value(field: FieldInfo, value: object) -> str | None:
    """Return what a field accepts and what was given, or None if the value is valid.

    `field` is one of `settings_of`.
    """
    try:
        msgspec.convert(value, field.type)
    except msgspec.ValidationError:
        return f"{_expected(field, value)}, not {_format(value)}"
    return None


def settings_of(struct: type[msgspec.Struct]) -> dict[str, FieldInfo]:
    """Return the fields of a table by name."""
    return {field.name: field for field in msgspec.structs.fields(struct)}


def takes_list(field: FieldInfo) -> bool:
    """Return True if the value of a setting is a list."""
    return isinstance(_type_of(field), inspect.VarTupleType)


def _mistakes(fields: _Fields, settings: Mapping[str, Any]) -> Iterator[str]:
    for name, value in settings.items():
        field = fields.get(name)
        known = {} if field is None else _settings_in(field)
        if field is None:
            yield _unknown_at_top(fields, name, value)
        elif not known:
            if (problem := explain_value(field, value)) is not None:
                yield f"{name}: {problem}"
        elif not takes_list(field):
            if isinstance(value, Mapping):
                yield from _mistakes_in(value, known, f"{name}.", fields)
            else:
                yield f"{name}: a table, written as [{name}], not {_format(value)}"
        elif not isinstance(value, list | tuple):
            yield f"{name}: any number of tables, each written as [[{name}]], not {_format(value)}"
        else:
            for number, entry in enumerate(value, start=1):
                place = f"[[{name}]] number {number}: "
                if isinstance(entry, Mapping):
                    yield from _mistakes_in(entry, known, place, {})
                else:
                    yield f"{place}a table, not {_format(entry)}"


def _mistakes_in(
    table: Mapping[str, Any], known: _Fields, place: str, top: _Fields
) -> Iterator[str]:
    """Yield the mistakes in a table with the `known` settings; `top` are those above it."""
    for name, given in table.items():
        if name not in known:
            yield f"{place}{_safe_name(name)}: {_suggest(top, known, name)}"
        elif (problem := explain_value(known[name], given)) is not None:
            yield f"{place}{name}: {problem}"
    missing = [name for name, field in known.items() if field.required and name not in table]
    yield from (f"{place}{name} is missing" for name in missing)


def _unknown_at_top(fields: _Fields, name: str, value: object) -> str:
    shown = _safe_name(name)
    if isinstance(value, Mapping) or (value and isinstance(value, list)):
        if (close := _closest(name, fields)) is None:
            return f"[{shown}]: no such section; {_LIST_HINT}"
        meant = f"[[{close}]]" if takes_list(fields[close]) else f"[{close}]"
        return f"[{shown}]: no such section; did you mean {meant}?"
    return f"{shown}: {_suggest(fields, fields, name)}"


_OF_REMOVED_PROXY = frozenset(
    {"proxy_port", "proxy_connect", "proxy_tunnels", "proxy_idle", "proxy_tunnel_bytes"}
)
"""Settings of `[server]` in version 0.9."""
PROXY_REMOVED = "the sidecar has no proxy of its own any more; use `gatekeeper proxy`"


def _suggest(fields: _Fields, known: _Fields, name: str) -> str:
    """Return what may have been meant by a name that is not one of `known`, the valid names here.

    `fields` are the top-level fields, whose sections may have a setting of this name.
    """
    if name in _OF_REMOVED_PROXY:
        return PROXY_REMOVED
    settings = [(one, top) for top, field in fields.items() for one in _settings_in(field)]
    if sections := [f"[{top}]" for one, top in settings if one == name]:
        return f"belongs in {' or '.join(sections)}"
    if name in fields:
        return "belongs at the top, before the first [section]"
    for names in ({one: one for one in known}, {one: f"{one} in [{top}]" for one, top in settings}):
        if (close := _closest(name, names)) is not None:
            return f"no such setting; did you mean {names[close]}?"
    return f"no such setting; {_LIST_HINT}"


def _settings_in(field: FieldInfo) -> dict[str, FieldInfo]:
    """Return the fields of a section, or of a repeated table such as [[host]]; else none."""
    kind = _type_of(field)
    table = kind.item_type if isinstance(kind, inspect.VarTupleType) else kind
    return settings_of(table.cls) if isinstance(table, inspect.StructType) else {}


def _type_of(field: FieldInfo) -> inspect.Type:
    """Return the type of a setting without the None of one that may be left unset."""
    kind = inspect.type_info(field.type)
    if isinstance(kind, inspect.UnionType):
        return next(one for one in kind.types if not isinstance(one, inspect.NoneType))
    return kind


def _expected(field: FieldInfo, value: object) -> str:
    """Return what a setting accepts, of which the value is not one."""
    kind, unit = _type_of(field), ""
    if isinstance(kind, inspect.Metadata):
        unit = f" of {(kind.extra or {}).get('unit', '')}"
        kind = kind.type
    if isinstance(kind, inspect.FloatType | inspect.IntType):
        return _expected_number(kind, value, field.default, unit)
    if isinstance(kind, inspect.BoolType):
        return "true or false"
    if isinstance(kind, inspect.LiteralType):
        ordered = sorted(kind.values, key=lambda one: (one != field.default, str(one)))
        return "one of " + ", ".join(f'"{one}"' for one in ordered)
    if isinstance(kind, inspect.VarTupleType):
        return _expected_list(field, kind.item_type, value)
    if isinstance(kind, inspect.DateTimeType):
        return _DATE
    if not isinstance(kind, inspect.StrType) or not isinstance(value, str):
        return "a string in quotes"
    if kind.max_length and len(value) > kind.max_length:
        return f"a string of at most {kind.max_length} characters"
    return f"a string of the form {kind.pattern}" if kind.pattern else "a string that is not empty"


def _expected_number(
    kind: inspect.FloatType | inspect.IntType, value: object, default: object, unit: str
) -> str:
    is_whole = isinstance(kind, inspect.IntType)
    if isinstance(value, int if is_whole else int | float) and not isinstance(value, bool):
        if kind.gt is not None and not value > kind.gt:
            return f"more than {kind.gt:.15g}"
        if kind.ge is not None and not value >= kind.ge:
            return f"at least {kind.ge:.15g}"
        if kind.le is not None and not value <= kind.le:
            return f"at most {kind.le:.15g}"
    example = default if isinstance(default, int | float) else 1 if is_whole else 2.0
    return f"{'a whole number' if is_whole else 'a number'}{unit} such as {example}"


def _expected_list(field: FieldInfo, item: inspect.Type, value: object) -> str:
    example, items = '"127.0.0.1"', "strings in quotes"
    if isinstance(item, inspect.IntType):
        example, items = "80", f"whole numbers from {item.ge} to {item.le}"
    if isinstance(value, list | tuple):
        return f"a list of {items}, such as [{example}]"
    if explain_value(field, [value]) is None:
        example = f'"{printable(value, 60)}"' if isinstance(value, str) else str(value)
    return f"a list, such as [{example}]"


def _closest(name: str, known: Iterable[str]) -> str | None:
    matches = difflib.get_close_matches(name.lower().replace("-", "_"), list(known), n=1)
    return matches[0] if matches else None


def _safe_name(name: object) -> str:
    return printable(str(name), 60)


def _format(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()  # as TOML and JSON write it
    return value.isoformat() if isinstance(value, date | time) else printable(repr(value), 60)
