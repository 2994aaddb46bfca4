"""Every setting, its default and its unit. `config.example.toml` is the documentation.

`Config()` is all defaults; `Config.load(path)` reads a TOML file and refuses what it
does not know. Durations are seconds, sizes are bytes.
"""

from __future__ import annotations

import difflib
import errno
import logging
import os
import stat
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import msgspec
from msgspec import inspect

from gatekeeper import urls
from gatekeeper.errors import ConfigError, InvalidURL
from gatekeeper.robots import product_token
from gatekeeper.urls import not_text, printable, without_credentials

__all__ = [
    "CacheConfig",
    "Config",
    "FetchConfig",
    "FleetConfig",
    "GroupRule",
    "GuardConfig",
    "HostRule",
    "IdentityConfig",
    "PacingConfig",
    "RobotsConfig",
    "ServerConfig",
    "StorageConfig",
    "agent_named",
    "as_config",
    "explain",
    "first_mistake",
    "host_named",
    "match_named",
    "read_file",
    "read_toml",
    "refuse_everybody",
    "settings_of",
    "takes_list",
    "token_of",
    "values_of",
]

# A library says where it logs; whether anybody listens is the application's choice. It stands here,
# since all who log read settings: without it a parser, and the command's start, need no logging.
logging.getLogger("gatekeeper").addHandler(logging.NullHandler())

MEMORY = "memory"
"""The `storage.path` that is none."""
_LONGEST = 10 * 366 * 86_400.0
"""Ten years: a calendar can still say what lies so far ahead. It keeps `inf` and `nan` out, too."""
_SECONDS = {"unit": "seconds"}
"""What an error about such a setting says it takes."""
Seconds = Annotated[float, msgspec.Meta(ge=0, le=_LONGEST, extra=_SECONDS)]
Positive = Annotated[float, msgspec.Meta(gt=0, le=_LONGEST, extra=_SECONDS)]
Number = Annotated[float, msgspec.Meta(ge=0, le=_LONGEST)]
Rate = Annotated[float, msgspec.Meta(gt=0, le=_LONGEST)]
Place = Annotated[str, msgspec.Meta(min_length=1)]
"""A file's path: empty text is none, and None says that there is none."""
Count = Annotated[int, msgspec.Meta(ge=1)]
Size = Annotated[int, msgspec.Meta(ge=1, extra={"unit": "bytes"})]


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the configuration."""


class RobotsConfig(_Section, frozen=True):
    """How the text is read (`[robots]`)."""

    dialect: Literal["auto", "rfc9309", "1994", "1996", "2.0"] = "auto"
    conflicts: Literal["strict", "declared"] = "strict"
    v2_semantics: Literal["order", "precedence"] = "order"
    inherit_crawl_delay: bool = False
    """VND-09: an agent with a group of its own still takes Crawl-delay from `*`."""


class FetchConfig(_Section, frozen=True):
    """How robots.txt is fetched, and what each outcome means (`[fetch]`)."""

    profile: Literal["strict", "google", "archival"] = "strict"
    on_401: Literal["allow", "deny"] = "allow"
    on_403: Literal["allow", "deny"] = "allow"
    challenge: Literal["defer", "status"] = "defer"
    too_many_redirects: Literal["absent", "unreachable"] = "absent"
    tls_errors: Literal["deny", "accept"] = "deny"
    stale_if_unreachable: bool = False
    """Use the last good copy at once in an outage, instead of after 12 hours."""
    unseen_unreachable: Literal["defer", "allow_after_12h"] = "defer"
    from_address: str | None = None
    """The From header (RFC 9110 section 10.1.5, HTTP-12): an address where the operator can be
    reached."""
    max_redirects: Annotated[int, msgspec.Meta(ge=5, le=20)] = 5
    max_body: Annotated[int, msgspec.Meta(ge=512_000)] = 512_000
    max_wire: Size = 1_048_576
    connect_timeout: Positive = 10.0
    first_byte_timeout: Positive = 15.0
    total_timeout: Positive = 30.0
    min_rate: Number = 256.0
    """Bytes a second, over `min_rate_window`, below which a body is a drip."""
    min_rate_window: Positive = 10.0
    max_concurrent: Count = 200
    conditional: bool = True


class CacheConfig(_Section, frozen=True):
    """How long and how much is kept (`[cache]`)."""

    default_ttl: Positive = 86_400.0
    min_ttl: Positive = 600.0
    max_ttl: Positive = 86_400.0
    max_bytes: Size = 1_073_741_824
    hot_records: Count = 500_000
    """Origins that are kept ready to answer."""
    max_waiters: Count = 100_000
    """Questions that may wait for fetches at once, over all origins."""
    max_agents: Count = 64
    """Compiled policies (one an agent) kept for one origin."""


class GuardConfig(_Section, frozen=True):
    """Which URLs and addresses may be dialled (`[guard]`)."""

    mode: Literal["full", "url-only"] = "full"
    allow: tuple[str, ...] = ()
    """CIDR ranges and host names that may be reached although the guard would refuse."""
    deny: tuple[str, ...] = ()
    nat64: Literal["unwrap", "deny"] = "unwrap"
    ports: tuple[int, ...] | None = None
    """None: every port but those on the WHATWG bad-port list."""


class PacingConfig(_Section, frozen=True):
    """Whose turn it is, and when (`[pacing]`)."""

    default_interval: Seconds = 1.0
    """Where the file gives no rate."""
    min_interval: Seconds = 0.0
    max_interval: Positive | None = None
    """A cap on what a site asks; flagged wherever it bites. None: obeyed whatever it is."""
    jitter: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    """Share of the interval that is added at random; never subtracted."""
    latency_factor: Number = 0.0
    """Interval = this times the smoothed time to the response head; 0 switches it off."""
    latency_floor: Seconds = 0.0
    latency_cap: Positive = 60.0
    concurrency: Count = 1
    """Requests in flight for one host."""
    max_in_flight: Count = 10_000
    max_waiters: Count = 1_000_000
    max_hosts: Count = 2_000_000
    lease_ttl: Positive = 600.0
    """A lease never reported ends by itself after this long."""
    own_wait: Positive = 30.0
    """How long a task waits behind one lease that the task which started it holds."""
    backoff_initial: Positive = 60.0
    backoff_max: Positive = 86_400.0
    backoff_jitter: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.2
    forgive_after: Positive = 1800.0
    """Seconds without a refusal after which blocks begin at `backoff_initial` again."""
    backoff_floor: Positive = 0.1
    """After a 429 or 503 the interval of a host doubles: from this where it has none."""
    backoff_answers: Count = 100
    """Good answers after which it halves: to twice the refused one, in a trial further ..."""
    backoff_quiet: Positive = 300.0
    """... or seconds without a refusal, whichever comes first."""
    backoff_retry: Positive = 3_600.0
    """Seconds after which a refused interval is tried again; twice as long each time ..."""
    backoff_retry_max: Positive = 86_400.0
    """... that it is refused anew, up to this."""
    address_interval: Seconds | None = None
    """Least time between two requests to one IP address; None: no such scope."""
    domain_interval: Seconds | None = None
    """Least time between two requests to one registered domain; None: no such scope."""
    max_pages_per_day: Count | None = None
    """Leases for pages of one host in 24 hours from the first one; None: no bound."""
    max_bytes_per_day: Size | None = None
    """Bytes of its responses in that time; None: no bound."""
    dry_run: bool = False


class StorageConfig(_Section, frozen=True):
    """What outlives the process (`[storage]`)."""

    path: Place | None = None
    """The SQLite file; None: nothing is kept, but by the sidecar and `fetch -o`, which have a
    place of their own; `MEMORY`: nothing is kept by them either."""
    on_failure: Literal["refuse", "continue"] = "refuse"
    """While nothing can be written: no turn of a host whose clock or block would have to
    outlive the process, or on without that, with a warning."""
    flush_interval: Positive = 1.0
    history_versions: Count = 20
    """Distinct bodies kept of one origin."""
    history_bytes: Size = 268_435_456
    journal_bytes: Size = 16_777_216
    """Size at which the journal is absorbed into SQLite and begun anew."""
    max_origins: Count = 2_000_000
    """Origins kept; beyond, the least recently asked go first. Never one with a promise."""
    forget_after: Positive = 7_776_000.0
    """An origin, or a clock to which nothing is owed, goes after so long without use."""


class ServerConfig(_Section, frozen=True):
    """The sidecar (`[server]`)."""

    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 8750
    socket: Place | None = None
    """A unix socket to listen on instead of `host` and `port`."""
    workers: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    """Processes that answer questions beside the one that owns the turns; 0: it answers all."""
    token_file: Place | None = None
    """Bearer tokens, one a line, or `name:role:token`; at most two of a client, so that one
    can be replaced (T6)."""
    tls_cert: Place | None = None
    tls_key: Place | None = None
    tls_client_ca: Place | None = None
    """Clients must show a certificate signed by one of these."""
    allowed_hosts: tuple[str, ...] = ()
    """Host headers accepted beside the address listened on (T4)."""
    max_batch: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 1000
    max_body: Size = 1_048_576
    max_header: Annotated[int, msgspec.Meta(ge=1024, le=65536)] = 16_384
    max_leases: Count = 10_000
    client_leases: Count | None = None
    """Leases out at once to one client (token, or address); None: half of max_leases."""
    max_waiting: Count = 10_000
    """Long polls at once; further ones get 503."""
    max_wait: Positive = 300.0
    client_concurrency: Count = 6_000
    """Requests at once from one client (token, or address)."""
    client_rate: Rate | None = None
    """Requests a second from one client; None: no bound."""
    max_streams: Count = 64
    """Streams of `/v1/events` open at once: an open Live page has one."""
    client_streams: Count | None = None
    """Of those to one client (token, or address); None: half of max_streams."""
    fetch_max_body: Size = 104_857_600
    fetch_timeout: Positive = 300.0
    proxy_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] | None = None
    """The port of a forward proxy for plain http, beside the API; None: there is none."""
    proxy_connect: Literal["refuse", "host"] = "refuse"
    """What becomes of CONNECT, in which nobody sees a path."""
    proxy_tunnels: Count = 100
    """Tunnels open at once; further ones get 503."""
    proxy_idle: Positive = 60.0
    """Seconds without an octet after which a tunnel is closed."""
    proxy_tunnel_bytes: Size = 104_857_600
    """Octets, of both ways, after which a tunnel is closed."""
    forward_auth: bool = False
    forward_auth_wait: Annotated[float, msgspec.Meta(ge=0, le=0.15)] = 0.0
    forward_auth_hosts: tuple[str, ...] = ()
    """Host headers that /v1/forward-auth answers to; empty: any (Envoy sends the visitor's)."""
    trusted_peers: tuple[str, ...] = ("127.0.0.1/32", "::1/128")
    """Who may ask /v1/forward-auth (T7)."""
    drain_grace: Seconds = 1.0
    """Seconds to be unready on SIGTERM before anything ends: load balancers notice."""
    drain_timeout: Seconds = 20.0
    """Seconds that open leases and streams are given to end; no connections after that."""
    log_format: Literal["auto", "json", "text"] = "auto"
    log_decisions: Literal["all", "refused", "none"] = "all"
    log_queries: bool = False
    """Write query strings to the log; masked otherwise (T11)."""
    log_rate: Count = 10_000
    """Decisions logged a second at most; the rest are counted as dropped."""


class FleetConfig(_Section, frozen=True):
    """Several gates that keep one pace together (`[fleet]`)."""

    url: Place | None = None
    """A Valkey or Redis server; None: this gate is alone."""
    namespace: Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9._-]{1,64}\Z")] = "gatekeeper"
    when_lost: Literal["wait", "divide"] = "wait"
    """Without the store: grant nothing, or each member goes on with hosts of its own."""
    sharded: bool = False
    """Scopes spread over the servers of a Valkey Cluster, and taken one after the other."""
    hold: Annotated[float, msgspec.Meta(ge=1, le=300, extra=_SECONDS)] = 20.0
    """Seconds that what a member holds outlives its last sign of life."""
    allow_lost_writes: bool = False
    """Start although a failover of the store may forget what was granted last."""

    def __repr__(self) -> str:
        shown = None if self.url is None else without_credentials(self.url)
        return f"FleetConfig(url={shown!r}, namespace={self.namespace!r}, hold={self.hold:g})"


class IdentityConfig(_Section, frozen=True):
    """How requests show who sends them (`[identity]`)."""

    key: str | None = None
    """The file of the key that signs requests (PEM, Ed25519); None: none is signed."""
    also: tuple[str, ...] = ()
    """Files of further keys that are published, but do not sign: the next one, the last one."""
    directory: str | None = None
    """Where the keys are published: an https origin, or the URL of a JWK Set."""
    signature_agent: Literal["dictionary", "string"] = "dictionary"
    components: tuple[Literal["@authority", "@target-uri", "@method", "@path", "@query"], ...] = (
        "@authority",
        "@method",
        "@path",
    )
    """What a signature covers beside Signature-Agent."""
    lifetime: Annotated[float, msgspec.Meta(ge=5, le=86_400)] = 60.0
    """Seconds that a signature holds."""
    about: str | None = None
    """What the bot does, for its page."""
    addresses: tuple[str, ...] = ()
    """The addresses that it comes from, for its page."""


class HostRule(_Section, frozen=True):
    """The operator's word about hosts (`[[host]]`)."""

    match: str
    """A host name, `*.example.org` for every name below it, or `*`."""
    robots: Literal["obey", "allow", "deny"] = "obey"
    interval: Seconds | None = None
    concurrency: Count | None = None
    max_pages_per_day: Count | None = None
    max_bytes_per_day: Size | None = None
    reason: str | None = None
    group: str | None = None
    """Hosts with the same group share one clock, beside their own."""


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
    host: tuple[HostRule, ...] = ()
    group: tuple[GroupRule, ...] = ()

    @classmethod
    def load(cls, path: str | Path) -> Config:
        """Read a TOML file. Raises ConfigError that names the file and the setting."""
        return cls.from_dict(read_toml(path), source=str(path))

    @classmethod
    def from_dict(cls, raw: dict[str, Any], *, source: str = "configuration") -> Config:
        """Check a mapping shaped like the TOML file. Raises ConfigError.

        The message begins with `source`, unless that is empty, and the setting's name.
        """
        try:
            return cls._checked(raw)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}" if source else str(error)) from error

    @classmethod
    def _checked(cls, raw: dict[str, Any]) -> Config:
        try:
            config = msgspec.convert(raw, cls)
        except msgspec.ValidationError as error:
            known = isinstance(raw, dict) and first_mistake(cls, raw)
            raise ConfigError(known or str(error)) from error
        for rule in config.host:
            try:
                match_named(rule.match)
            except ConfigError as error:
                raise ConfigError(f"[[host]] match: {error}") from error
        if config.user_agent is not None:
            agent_named(config.user_agent)
        sender = config.fetch.from_address
        # It is sent as a header, where a line's end begins another one.
        if sender is not None and not sender.isprintable():
            raise ConfigError(f"fetch.from_address: {sender!r} holds what can't be printed")
        if not {"@authority", "@target-uri"} & set(config.identity.components):
            raise ConfigError('identity.components: "@authority" or "@target-uri" has to be there')
        cache = config.cache
        if cache.min_ttl > cache.max_ttl:
            raise ConfigError(
                f"cache.min_ttl = {cache.min_ttl:g} is above cache.max_ttl = {cache.max_ttl:g}"
            )
        return config


def values_of(config: Config) -> Iterator[tuple[str, Any]]:
    """Every setting in force by its dotted name, in the order of the sections."""
    for name in config.__struct_fields__:
        value = getattr(config, name)
        if isinstance(value, msgspec.Struct):
            for inner in value.__struct_fields__:
                yield f"{name}.{inner}", getattr(value, inner)
        else:
            yield name, value


MAX_FILE = 4 * 1024 * 1024
"""Octets of a file that a setting names."""


def read_file(path: str | Path) -> tuple[bytes, int]:
    """What a file that a setting names holds, and its mode. Raises OSError.

    It must be a regular file, or the null device: a reload reads it again, and opening a pipe waits
    for whoever may write to it.
    """

    def at_once(name: str, flags: int) -> int:
        return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))

    with open(path, "rb", opener=at_once) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) and str(path) != os.devnull:
            raise OSError(errno.EINVAL, "it is no regular file but a pipe or a device", str(path))
        body = file.read(MAX_FILE + 1)
    if len(body) > MAX_FILE:
        raise OSError(errno.EFBIG, f"it is longer than {MAX_FILE >> 20} MiB", str(path))
    return body, stat.S_IMODE(found.st_mode)


def read_toml(path: str | Path) -> dict[str, Any]:
    """The configuration in a file, unchecked. Raises ConfigError."""
    try:
        return tomllib.loads(read_file(path)[0].decode("utf-8-sig"))
    except OSError as error:
        raise ConfigError(
            f"{path}: can't be read ({error.strerror}); give --config a readable TOML file"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: not UTF-8; save it as that") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error


def as_config(value: object) -> Config:
    """The Config that was given, or all defaults for None: for whoever takes one.

    A struct made in Python checks nothing, so a mapping in place of a Config, or of one of
    its sections, would be found out in the middle of a request. Raises ConfigError.
    """
    if value is None:
        return Config()
    remedy = "use Config.load(path) or Config.from_dict(mapping)"
    if not isinstance(value, Config):
        raise ConfigError(f"config must be a Config, not {_kind(value)}: {remedy}")
    for field in msgspec.structs.fields(Config):
        held = getattr(value, field.name)
        if isinstance(field.type, type) and not isinstance(held, field.type):
            wanted = field.type.__name__
            raise ConfigError(
                f"config.{field.name} must be a {wanted}, not {_kind(held)}: {remedy}"
            )
    for name, kind, tables in (("host", HostRule, value.host), ("group", GroupRule, value.group)):
        if not isinstance(tables, tuple) or not all(isinstance(one, kind) for one in tables):
            raise ConfigError(f"config.{name} must be a tuple of {kind.__name__}: {remedy}")
    return value


def _kind(value: object) -> str:
    return f"a {type(value).__name__}"


# --- names as an operator gives them --------------------------------------------------------

_SAY_WHO = 'say who you are, such as "examplebot/1.0 (+https://example.org/bot)"'
_EVERYBODY = "holds `*`, which means everybody in robots.txt"
_REMEDY = "name it as in a.example, 192.0.2.1 or 2001:db8::1, or give a URL of it"


def host_named(text: str) -> str:
    """The host that is meant: a name, an address, or any URL of it. Raises ConfigError.

    >>> host_named("MÜNCHEN.example."), host_named("https://[2001:DB8::1]:8443/x")
    ('xn--mnchen-3ya.example', '2001:db8::1')
    """
    if not isinstance(text, str):
        raise not_text(text, "host")
    if "://" in text:
        url = text
    elif any(mark in text for mark in "/?#@\\"):
        raise _no_host(text, "more than a host")
    elif text.count(":") > 1 and "[" not in text:
        url = f"http://[{text}]/"
    else:
        url = f"http://{text}/"
    try:
        host = urls.parse(url).host
    except InvalidURL as error:
        raise _no_host(text, error.problem) from error
    if "*" in host:
        raise _no_host(text, "a pattern, where one host is needed")
    return host


def match_named(text: str) -> str:
    """The host of `[[host]] match`, which may also be `*` or begin with `*.`.

    Raises ConfigError.

    >>> match_named("*.Example.ORG.")
    '*.example.org'
    """
    if text == "*":
        return text
    if text.startswith("*."):
        return f"*.{host_named(text[2:])}"
    if "*" in text:
        raise _no_host(text, "a `*` that is neither alone nor in front, as in *.example.org")
    return host_named(text)


def agent_named(text: str) -> str:
    """The product token of who we say we are. Raises ConfigError for what can't be one.

    >>> agent_named("examplebot/1.0 (+https://example.org/bot)")
    'examplebot'
    """
    if not isinstance(text, str):
        raise not_text(text, "user_agent")
    # It is sent as a header, where a line's end begins another one, and only ASCII is sure
    # to arrive as it was meant.
    if not text.isascii() or not text.isprintable():
        problem = "holds a character that is no printable ASCII"
    elif "*" in (token := product_token(text)):
        problem = _EVERYBODY
    elif not token:
        problem = "holds no product token"
    else:
        return token
    raise ConfigError(f"user_agent: {printable(text, 120)!r} {problem}; {_SAY_WHO}")


def token_of(user_agent: str) -> str:
    """The product token that chooses the group in robots.txt. Raises ConfigError for none."""
    try:
        return _token_of(user_agent)
    except (AttributeError, TypeError):
        if isinstance(user_agent, str):
            raise
        raise not_text(user_agent, "user_agent") from None


@lru_cache(maxsize=4096)  # a process speaks for few agents
def _token_of(user_agent: str) -> str:
    token = product_token(user_agent)
    problem = "" if token else "holds no product token"
    if user_agent.encode(errors="replace").decode() != user_agent:
        problem = "holds half of a character"
    if problem:
        raise ConfigError(f"user agent {user_agent!r} {problem}; {_SAY_WHO}")
    return token


def refuse_everybody(user_agent: str | None) -> None:
    """Raises ConfigError for a name under which no request can be sent: `*`. A question may ask
    about it."""
    if user_agent is not None and "*" in token_of(user_agent):
        raise ConfigError(f"user_agent: {printable(user_agent, 120)!r} {_EVERYBODY}; {_SAY_WHO}")


def _no_host(text: str, problem: str) -> ConfigError:
    return ConfigError(f"{printable(text, 120)!r} is no host: {problem}; {_REMEDY}")


# --- what is wrong with settings ------------------------------------------------------------
#
# msgspec judges; what follows explains its refusals in the operator's words, the name and what
# it takes, from the same types, so that no bound or choice is written down twice.

_LISTED = "`gatekeeper config show` lists every one"


def first_mistake(whole: type[msgspec.Struct], raw: Mapping[str, Any]) -> str | None:
    """The first setting of a mapping that can't be used, by its name; None: all can.

    >>> from gatekeeper.config import Config
    >>> first_mistake(Config, {"pacing": {"default_intervall": 2}})
    'pacing.default_intervall: no such setting; did you mean default_interval?'
    """
    return next(_mistakes(whole, raw), None)


def explain(field: inspect.Field, value: object) -> str | None:
    """Why a value can't be that of a field: what it takes, and what was given; None: it can.

    `field` is one of `settings_of`.
    """
    kind = _without_none(field.type)
    if value is None and kind is not field.type:
        return None
    wanted = _wanted(kind, value, field.default)
    return None if wanted is None else f"{wanted}, not {_shown(value)}"


def settings_of(struct: type[msgspec.Struct]) -> dict[str, inspect.Field]:
    """The fields of a table by name, with their types as msgspec sees them."""
    table = cast("inspect.StructType", inspect.type_info(struct))
    return {field.name: field for field in table.fields}


def takes_list(field: inspect.Field) -> bool:
    """Whether a setting's value is a list."""
    return isinstance(_without_none(field.type), inspect.VarTupleType)


def _mistakes(whole: type[msgspec.Struct], raw: Mapping[str, Any]) -> Iterator[str]:
    fields = settings_of(whole)
    for name, value in raw.items():
        field = fields.get(name)
        if field is None:
            yield _unknown_at_top(fields, name, value)
        elif isinstance(field.type, inspect.StructType):
            yield from _in_section(fields, name, value)
        elif (inner := _table_of(field.type)) is not None:
            yield from _in_tables(inner, name, value)
        elif (problem := explain(field, value)) is not None:
            yield f"{name}: {problem}"


def _in_section(fields: Mapping[str, inspect.Field], section: str, value: object) -> Iterator[str]:
    if not isinstance(value, Mapping):
        yield f"{section}: a table, written as [{section}], not {_shown(value)}"
        return
    own = _inner(fields[section])
    for name, given in value.items():
        place = f"{section}.{_name(name)}"
        if name not in own:
            yield f"{place}: {_unknown(fields, own, name)}"
        elif (problem := explain(own[name], given)) is not None:
            yield f"{place}: {problem}"


def _in_tables(struct: inspect.StructType, table: str, value: object) -> Iterator[str]:
    if not isinstance(value, list | tuple):
        yield f"{table}: any number of tables, each written as [[{table}]], not {_shown(value)}"
        return
    fields = {field.name: field for field in struct.fields}
    for number, one in enumerate(value, start=1):
        place = f"[[{table}]] number {number}"
        if not isinstance(one, Mapping):
            yield f"{place}: a table, not {_shown(one)}"
            continue
        for name, given in one.items():
            if name not in fields:
                yield f"{place}: {_name(name)}: {_unknown({}, fields, name)}"
            elif (problem := explain(fields[name], given)) is not None:
                yield f"{place}: {name}: {problem}"
        for name, field in fields.items():
            if field.required and name not in one:
                yield f"{place}: {name} is missing"


def _unknown_at_top(fields: Mapping[str, inspect.Field], name: str, value: object) -> str:
    shown = _name(name)
    if isinstance(value, Mapping) or (value and isinstance(value, list)):
        if (close := _closest(name, fields)) is None:
            return f"[{shown}]: no such section; {_LISTED}"
        tables = _table_of(fields[close].type) is not None
        meant = f"[[{close}]]" if tables else f"[{close}]"
        return f"[{shown}]: no such section; did you mean {meant}?"
    return f"{shown}: {_unknown(fields, fields, name)}"


def _unknown(
    fields: Mapping[str, inspect.Field], own: Mapping[str, inspect.Field], name: str
) -> str:
    """What may have been meant by a name that is none in this place, among `own`.

    `fields` are those of the top, whose sections may know it.
    """
    sections = [top for top, field in fields.items() if name in _inner(field)]
    if sections:
        return f"belongs in {' or '.join(f'[{section}]' for section in sections)}"
    if name in fields:
        return "belongs at the top, before the first [section]"
    if (close := _closest(name, own)) is not None:
        return f"no such setting; did you mean {close}?"
    everywhere = {
        inner: f"{inner} in [{top}]" for top, field in fields.items() for inner in _inner(field)
    }
    if (close := _closest(name, everywhere)) is not None:
        return f"no such setting; did you mean {everywhere[close]}?"
    return f"no such setting; {_LISTED}"


def _inner(field: inspect.Field) -> dict[str, inspect.Field]:
    if not isinstance(field.type, inspect.StructType):
        return {}
    return {inner.name: inner for inner in field.type.fields}


def _table_of(kind: inspect.Type) -> inspect.StructType | None:
    """The table that a repeated one ([[host]]) repeats."""
    if isinstance(kind, inspect.VarTupleType) and isinstance(kind.item_type, inspect.StructType):
        return kind.item_type
    return None


def _without_none(kind: inspect.Type) -> inspect.Type:
    """The type of a setting that may also be left unset."""
    if isinstance(kind, inspect.UnionType):
        return next(one for one in kind.types if not isinstance(one, inspect.NoneType))
    return kind


def _wanted(kind: inspect.Type, value: object, default: object) -> str | None:
    """What a setting of this type takes; None where the value is such a one."""
    unit = ""
    if isinstance(kind, inspect.Metadata):
        unit = f" of {(kind.extra or {}).get('unit', '')}"
        kind = kind.type
    if isinstance(kind, inspect.FloatType | inspect.IntType):
        return _wanted_number(kind, value, default, unit)
    if isinstance(kind, inspect.BoolType):
        return None if isinstance(value, bool) else "true or false"
    if isinstance(kind, inspect.LiteralType):
        return None if value in kind.values else _choice(kind.values, default)
    if isinstance(kind, inspect.VarTupleType):
        return _wanted_list(kind, value)
    if not isinstance(value, str):
        return "text in quotes"
    empty = isinstance(kind, inspect.StrType) and kind.min_length and not value
    return "text that is not empty" if empty else None


def _wanted_number(
    kind: inspect.FloatType | inspect.IntType, value: object, default: object, unit: str
) -> str | None:
    whole = isinstance(kind, inspect.IntType)
    fits = isinstance(value, int) if whole else isinstance(value, int | float)
    if not fits or isinstance(value, bool) or not isinstance(value, int | float):
        example = default if isinstance(default, int | float) else 1 if whole else 2.0
        return f"{'a whole number' if whole else 'a number'}{unit} such as {example}"
    if kind.gt is not None and not value > kind.gt:
        return f"more than {kind.gt:.15g}"
    if kind.ge is not None and not value >= kind.ge:
        return f"at least {kind.ge:.15g}"
    if kind.le is not None and not value <= kind.le:
        return f"at most {kind.le:.15g}"
    return None


def _wanted_list(kind: inspect.VarTupleType, value: object) -> str | None:
    one, many = ("80", "whole numbers")
    if not isinstance(kind.item_type, inspect.IntType):
        one, many = ('"127.0.0.1"', "texts in quotes")
    if not isinstance(value, list | tuple):
        if _wanted(kind.item_type, value, ...) is None:
            one = f'"{printable(value, 60)}"' if isinstance(value, str) else str(value)
        return f"a list, such as [{one}]"
    if all(_wanted(kind.item_type, item, ...) is None for item in value):
        return None
    return f"a list of {many}, such as [{one}]"


def _choice(values: Iterable[object], default: object) -> str:
    usual_first = sorted(values, key=lambda one: (one != default, str(one)))
    named = ", ".join(f'"{one}"' for one in usual_first)
    return f"one of {named}"


def _closest(name: str, known: Iterable[str]) -> str | None:
    found = difflib.get_close_matches(name.lower().replace("-", "_"), list(known), n=1)
    return found[0] if found else None


def _name(name: object) -> str:
    return printable(str(name), 60)


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()  # as TOML and JSON write it
    return printable(repr(value), 60)
