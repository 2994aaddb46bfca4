"""Every setting, its default and its unit. `config.example.toml` is the documentation.

`Config()` is all defaults; `Config.load(path)` reads a TOML file and refuses what it
does not know. Durations are seconds, sizes are bytes.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from gatekeeper.errors import ConfigError
from gatekeeper.mistakes import first_mistake
from gatekeeper.names import agent_named, match_named

__all__ = [
    "CacheConfig",
    "Config",
    "FetchConfig",
    "GroupRule",
    "GuardConfig",
    "HostRule",
    "PacingConfig",
    "RobotsConfig",
    "ServerConfig",
    "StorageConfig",
    "as_config",
]

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
    """The From header (HTTP-12): an address where the operator can be reached."""
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
    max_bytes: Size = 268_435_456
    hot_records: Count = 50_000
    """Origins whose compiled policy is kept ready."""
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
    """Good answers after which it halves, once the refused interval is tried again ..."""
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
    dry_run: bool = False


class StorageConfig(_Section, frozen=True):
    """What outlives the process (`[storage]`)."""

    path: Place | None = None
    """The SQLite file; None: nothing is kept (the sidecar has a default place), nor with
    the word "memory", which is for the sidecar."""
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
    fetch_max_body: Size = 104_857_600
    fetch_timeout: Positive = 300.0
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


class HostRule(_Section, frozen=True):
    """The operator's word about hosts (`[[host]]`)."""

    match: str
    """A host name, `*.example.org` for every name below it, or `*`."""
    robots: Literal["obey", "allow", "deny"] = "obey"
    interval: Seconds | None = None
    concurrency: Count | None = None
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
    host: tuple[HostRule, ...] = ()
    group: tuple[GroupRule, ...] = ()

    @classmethod
    def load(cls, path: str | Path) -> Config:
        """Read a TOML file. Raises ConfigError that names the file and the setting."""
        try:
            with Path(path).open("rb") as file:
                raw = tomllib.load(file)
        except OSError as error:
            raise ConfigError(
                f"{path}: can't be read ({error.strerror}); give --config a readable TOML file"
            ) from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:  # TOML is UTF-8
            raise ConfigError(f"{path}: not valid TOML: {error}") from error
        return cls.from_dict(raw, source=str(path))

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
        cache = config.cache
        if cache.min_ttl > cache.max_ttl:
            raise ConfigError(
                f"cache.min_ttl = {cache.min_ttl:g} is above cache.max_ttl = {cache.max_ttl:g}"
            )
        return config


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
