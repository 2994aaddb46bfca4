"""aiohttp sessions with a gate and a guard.

`polite_session` decides and paces every request by itself; `plain_session` is for requests under
leases that the caller acquires. `guarded_connector` and `Guard` are the guard for other sessions.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, ParamSpec

import aiohttp
import msgspec
from aiohttp import ClientResponse
from aiohttp.abc import AbstractResolver
from yarl import URL

from gatekeeper import urls
from gatekeeper.clock import Clock, SharedTimer, SystemClock
from gatekeeper.config import Config, as_config
from gatekeeper.errors import ConfigError, Denied, InvalidURL, refusing
from gatekeeper.fetching.allowed_addresses import Guard
from gatekeeper.fetching.fetcher import FirstAnswer, send_once
from gatekeeper.fetching.guard import GuardedConnector, refuse_proxy
from gatekeeper.fetching.tls import trusted_by
from gatekeeper.gate import Gatekeeper
from gatekeeper.gate.decider import refused_request
from gatekeeper.gate.lease_base import note_refusal
from gatekeeper.gate.parts import configured_signer
from gatekeeper.library_internals import HEAD_LIMITS, wrap_requests
from gatekeeper.session.middleware import RequestDeadline
from gatekeeper.storage.base import Storage
from gatekeeper.urls import url_of

_GATE: Final = "gatekeeper"
"""Where a session has its gate, among its attributes: a session may be what its gate leads back to,
and a dictionary with weak keys would never drop it then."""


_OPENED_FIRST: Final = "open it first: `async with polite_session(...) as session`"


def session_gate(session: aiohttp.ClientSession) -> Gatekeeper:
    """Return the gate of a session that `polite_session` made.

    Raises LookupError for any other session.
    """
    gate: Gatekeeper | None = vars(session).get(_GATE)
    if gate is None:
        raise LookupError(
            "this session was not made by polite_session(); keep the gate you gave it"
        )
    return gate


_P = ParamSpec("_P")


class SessionRequest(msgspec.Struct, eq=False):
    """The result of `polite_session()`: entering opens the session, leaving closes it."""

    _manager: AbstractAsyncContextManager[aiohttp.ClientSession]

    async def __aenter__(self) -> aiohttp.ClientSession:
        return await self._manager.__aenter__()

    async def __aexit__(self, *error: Any) -> bool | None:
        return await self._manager.__aexit__(*error)

    if not TYPE_CHECKING:
        __enter__ = __exit__ = __await__ = refusing(f"{_OPENED_FIRST}, and then use the session")

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(f"{_OPENED_FIRST}, and then use session.{name}")


def _entered_first(
    make: Callable[_P, AbstractAsyncContextManager[aiohttp.ClientSession]],
) -> Callable[_P, SessionRequest]:
    @functools.wraps(make)
    def request(*args: _P.args, **options: _P.kwargs) -> SessionRequest:
        return SessionRequest(make(*args, **options))

    return request


@_entered_first
@asynccontextmanager
async def polite_session(
    user_agent: str,
    *,
    config: Config | None = None,
    storage: Storage | None = None,
    clock: Clock | None = None,
    resolver: AbstractResolver | None = None,
    session_factory: Callable[..., aiohttp.ClientSession] | None = None,
    **session_arguments: Any,
) -> AsyncIterator[aiohttp.ClientSession]:
    """Open an `aiohttp.ClientSession` whose every request and redirect hop is gated and guarded.

    Each hop waits until the host is due, and raises Denied or Deferred if it may not be sent.
    `user_agent` is the whole User-Agent header; its product token selects the group in robots.txt.
    Further arguments go to ClientSession. Waiting for a lease does not count against `timeout`: its
    `total` is the time on the network, over all hops and the body. `middlewares` given here or with
    a request run outside the gate's, never instead: each attempt of a retrying one takes a lease.

    `session_factory` makes the session instead of `aiohttp.ClientSession`: a subclass, or a
    function that passes its arguments on to one. Responses from the cache of a caching session
    (`CachedSession` of aiohttp-client-cache) take no lease and are not decided.

    Raises ConfigError for arguments that would bypass the guard (`connector`, `trust_env`, or a
    proxy without guard.mode = "url-only").

    >>> async def main() -> None:
    ...     async with polite_session(user_agent="examplebot/1.0 (+https://example.org)") as s:
    ...         async with s.get("https://example.org/") as response:
    ...             print(response.status)
    """
    config = as_config(config)
    clock = clock or SystemClock()
    _refuse_bypass(config, session_arguments)
    base = _parsed_base_url(session_arguments.get("base_url"))
    headers = _session_headers(user_agent, session_arguments.pop("headers", None))
    outer = tuple(session_arguments.pop("middlewares", ()))
    gate = Gatekeeper(user_agent, config=config, storage=storage, clock=clock, resolver=resolver)
    async with gate:
        session = (session_factory or aiohttp.ClientSession)(
            # Shared, so that the connection that fetched robots.txt also fetches pages.
            connector=gate.parts.connector,
            connector_owner=False,
            headers=headers,
            middlewares=(*outer, gate.middleware),
            **{**HEAD_LIMITS, **session_arguments},
        )
        await _refuse_other_session(session, gate.parts.connector)
        timer = SharedTimer(clock)
        _gate_requests(session, gate, timer, outer, base)
        vars(session)[_GATE] = gate
        try:
            async with session:
                yield session
        finally:
            timer.cancel()


async def _refuse_other_session(session: object, connector: aiohttp.BaseConnector) -> None:
    """Raise ConfigError for what a `session_factory` made, if it is no session with the connector
    of the gate."""
    if not isinstance(session, aiohttp.ClientSession):
        raise ConfigError(
            f"session_factory made a {type(session).__name__}, not a ClientSession: wrap "
            "the session of polite_session in it instead"
        )
    if session.connector is not connector or session.trust_env:
        await session.close()
        raise ConfigError(
            "session_factory made a session with another connector or with trust_env, past the "
            "guard: it has to pass its arguments on"
        )


def plain_session(
    user_agent: str,
    *,
    config: Config | None = None,
    resolver: AbstractResolver | None = None,
    gate: Gatekeeper | None = None,
    **session_arguments: Any,
) -> aiohttp.ClientSession:
    """Make a guarded session for requests under leases that you acquire: one lease, one request.

    aiohttp itself sends a GET a second time if its connection breaks before the response's head,
    which happens with reused connections that the server just closed; inside `async with
    gate.lease(url)` that would be two requests under one lease. This session raises
    `aiohttp.ClientConnectionError` instead: acquire another lease and try again. Neither a
    connector's `force_close` nor any other public setting prevents the second request: aiohttp
    repeats after a break of a new connection as well.

    Each redirect hop is a request, too: pass `allow_redirects=False`, and acquire a lease for the
    URL that `Location` names. With guard.mode = "url-only" (a proxy), or with a `response_class`
    of your own, the middleware `send_once` raises the error: a request's own `middlewares` replace
    the session's, so add it to them. `user_agent` is the whole User-Agent header, that of the gate;
    further arguments go to ClientSession. Call it in a running loop, and close it, or use it as a
    context manager. Raises ConfigError as `polite_session` does.

    With a `gate`, which must be open and have made its own session, requests use its connections,
    its guard and its configuration: the connection that fetched a robots.txt also fetches pages,
    which saves one connection per host. Raises GateClosed if it is not open.

    >>> async def main(gate) -> None:
    ...     agent = "examplebot/1.0 (+https://example.org)"
    ...     async with plain_session(agent, gate=gate) as session:
    ...         async with gate.lease("https://example.org/") as lease:
    ...             async with session.get(lease.url, allow_redirects=False) as response:
    ...                 lease.report(status=response.status)
    """
    config = as_config(config) if gate is None else gate.config
    _refuse_bypass(config, session_arguments)
    headers = _session_headers(user_agent, session_arguments.pop("headers", None))
    outer = tuple(session_arguments.pop("middlewares", ()))
    signer = configured_signer(config.identity, SystemClock())
    signing = () if signer is None else (signer.middleware,)
    if gate is not None and resolver is not None:
        raise ConfigError("a gate's connections have its own resolver: give that to the gate")
    own = guarded_connector(config, resolver=resolver) if gate is None else None
    if config.guard.mode == "url-only" or "response_class" in session_arguments:
        outer = (*outer, *signing, send_once)
    else:  # cheaper, and equivalent unless a proxy answers first
        outer, session_arguments["response_class"] = (*outer, *signing), FirstAnswer
    return aiohttp.ClientSession(
        connector=gate.parts.connector if gate else own,
        connector_owner=gate is None,
        headers=headers,
        middlewares=outer,
        **{**HEAD_LIMITS, **session_arguments},
    )


def guarded_connector(
    config: Config | None = None,
    *,
    resolver: AbstractResolver | None = None,
    guard: Guard | None = None,
    **options: Any,
) -> GuardedConnector:
    """Make a connector with the guard, for any aiohttp session.

    It needs a running loop, as every connector does. `guard` is a guard to share between
    connectors, instead of one made from `config`, which also bounds the idle connections
    (`fetch.max_idle_connections`) and names authorities to trust (`fetch.ca_file`, `fetch.ca_dir`);
    `options` go to aiohttp.TCPConnector. The session
    needs `trust_env=False` (aiohttp's default): a proxy raises ConfigError unless guard.mode is
    "url-only". Raises ConfigError for options that would bypass the guard.

    >>> async def main() -> None:
    ...     async with aiohttp.ClientSession(connector=guarded_connector()) as session:
    ...         await session.get("http://169.254.169.254/")   # raises Denied
    """
    if "socket_factory" in options:
        raise ConfigError("socket_factory is the guard's; leave it out of the connector's options")
    fetch = as_config(config).fetch
    return GuardedConnector(
        guard or Guard(config),
        resolver,
        deny=refused_request,
        max_idle=fetch.max_idle_connections,
        **{"ssl": trusted_by(fetch), **options},
    )


def _session_headers(user_agent: str, headers: Any) -> list[tuple[str, str]]:
    """Return the session's headers with the User-Agent. Raises ConfigError if they differ in it."""
    given = list(headers.items() if hasattr(headers, "items") else headers or ())
    for name, value in given:
        if name.lower() == "user-agent" and value != user_agent:
            raise ConfigError(
                f"headers name {value!r} and user_agent {user_agent!r}; robots.txt is read for "
                "one agent, so say it once, as user_agent"
            )
    return [
        ("User-Agent", user_agent),
        *((name, value) for name, value in given if name.lower() != "user-agent"),
    ]


def _refuse_bypass(config: Config, arguments: dict[str, Any]) -> None:
    """Raise ConfigError for arguments that would bypass the guard (T1, T19)."""
    if "connector" in arguments:
        raise ConfigError(
            "polite_session makes its own guarded connector; for one of your own use "
            "aiohttp.ClientSession(connector=..., middlewares=(gate.middleware,))"
        )
    if arguments.get("trust_env"):
        raise ConfigError("trust_env would send requests past the guard; leave it False")
    refuse_proxy(config.guard.mode, arguments.get("proxy"))


def _gate_requests(
    session: aiohttp.ClientSession,
    gate: Gatekeeper,
    timer: SharedTimer,
    outer: tuple[Any, ...],
    base: URL | None,
) -> None:
    """Wrap the session's requests, to handle their timeout, proxy and middlewares before aiohttp.

    aiohttp starts the total timeout before the middlewares run and has no public way to pass it to
    them, and a request's own `middlewares` replace the session's. Both are handled here, on this
    one session object; its class stays aiohttp's.
    """
    default, default_without_total = session.timeout, _without_total(session.timeout)
    default_total = default.total or None  # 0 means no limit, too
    read, decide = gate.parts.url_cache.read, gate.parts.middleware

    def gated(send: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(send)
        def request(
            method: str,
            url: Any,
            *,
            timeout: Any = default,
            middlewares: Any = None,
            proxy: Any = None,
            **arguments: Any,
        ) -> Coroutine[Any, Any, ClientResponse]:
            if proxy is not None:
                refuse_proxy(gate.config.guard.mode, proxy)
                arguments["proxy"] = proxy
            total, without_total = default_total, default_without_total
            if timeout is not default:
                wanted = _as_timeout(timeout, default)
                total, without_total = wanted.total or None, _without_total(wanted)
            if url.__class__ is not str or base is not None or "@" in url:
                text = _text_with_credentials(url, base)
                if text is not None:
                    return _raise_denied(gate, text)
            if url.__class__ is str:
                try:  # noqa: SIM105 - each request comes this way
                    url = read(url)
                except ValueError:
                    pass  # aiohttp raises its own error
            ours = partial(decide, RequestDeadline(timer, total))
            around = outer if middlewares is None else middlewares
            done: Coroutine[Any, Any, ClientResponse] = send(
                method,
                url,
                timeout=without_total,
                middlewares=(*around, ours) if around else (ours,),
                **arguments,
            )
            return done

        return request

    wrap_requests(session, gated)


async def _raise_denied(gate: Gatekeeper, url: str) -> ClientResponse:
    """Raise Denied for a URL with credentials, decided by its whole text.

    aiohttp removes credentials from a URL before a middleware sees it. Raises InvalidURL for a
    malformed URL.
    """
    decision = await gate.check(url)
    note_refusal(gate, decision)
    raise Denied(decision)


def _text_with_credentials(given: Any, base: URL | None) -> str | None:
    """Return the whole text of a URL that holds credentials, or may hold them and can't be parsed
    by yarl. None: aiohttp and the middlewares see the whole URL.

    `base` is the session's `base_url`, which aiohttp joins with a relative URL.
    """
    try:
        url = given if isinstance(given, URL) else url_of(given)
        text = str(given)
        if base is not None and not url.absolute:
            text = str(base.join(url))
    except ValueError:
        if isinstance(given, URL):  # its port is not a number, which yarl left unparsed
            return f"{given.scheme}://{given.raw_authority}/"
        return given if "@" in given else None  # aiohttp raises its own error for the others
    except TypeError:
        return None  # neither text nor URL: aiohttp raises its own error
    if "@" not in text:
        return None
    try:
        return text if urls.parse(text).userinfo else None
    except InvalidURL:
        return text if url.absolute else None


def _parsed_base_url(given: str | URL | None) -> URL | None:
    """Parse a `base_url` exactly as written, as yarl drops the `@` of empty credentials.

    Raises InvalidURL.
    """
    if given is None:
        return None
    urls.parse(str(given))
    return URL(str(given), encoded=True)


def _as_timeout(given: Any, inherited: aiohttp.ClientTimeout) -> aiohttp.ClientTimeout:
    if isinstance(given, aiohttp.ClientTimeout):
        return given
    if given is None or isinstance(given, int | float):
        return aiohttp.ClientTimeout(total=given)
    return inherited  # aiohttp's own mark for "not given"


def _without_total(wanted: aiohttp.ClientTimeout) -> aiohttp.ClientTimeout:
    """Return the timeout without its total, which a RequestDeadline enforces instead."""
    return aiohttp.ClientTimeout(
        total=None,
        connect=wanted.connect,
        sock_connect=wanted.sock_connect,
        sock_read=wanted.sock_read,
        ceil_threshold=wanted.ceil_threshold,
    )
