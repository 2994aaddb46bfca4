"""`PoliteHttpClient`, the HTTP client that `gatekeeper.integrations.crawlee` passes to crawlers."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import KW_ONLY, InitVar, dataclass, field
from datetime import timedelta
from typing import Any, Final

import aiohttp
import msgspec
from aiohttp.abc import AbstractResolver
from crawlee import HttpHeaders, Request, RequestState
from crawlee.errors import (
    ContextPipelineInterruptedError,
    HttpClientStatusCodeError,
    ProxyError,
    RequestThrottledError,
)
from crawlee.http_clients import HttpClient, HttpCrawlingResult, HttpResponse

from gatekeeper import urls
from gatekeeper.client.client import RemoteGatekeeper
from gatekeeper.errors import (
    ConfigError,
    Deferred,
    Denied,
    GatekeeperError,
    InvalidURL,
    LeaseTimeout,
)
from gatekeeper.fetching.fetcher import send_once
from gatekeeper.gate import Gatekeeper
from gatekeeper.http_fields import REDIRECTS
from gatekeeper.integrations.hops import (
    BodyInUse,
    Hop,
    HopErrors,
    Hops,
    accept_unguarded,
    usual_names,
)
from gatekeeper.library_internals import HEAD_LIMITS
from gatekeeper.page_rules import html_in, page_signals
from gatekeeper.robots import product_token
from gatekeeper.session.polite import guarded_connector
from gatekeeper.urls import url_of

_log = logging.getLogger(__name__)

OnSkipped = Callable[[str, Any], Awaitable[None]]
"""A callback as for `crawler.on_skipped_request`, called with the URL and "robots_txt"."""

_PIECE_SIZE: Final = 65_536
_BODY_FIELDS = frozenset(
    {"content-encoding", "content-language", "content-length", "content-location", "content-type"}
)
_CONNECT_ERRORS = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
_ORIGIN_FIELDS = frozenset({"authorization", "cookie", "proxy-authorization"})


_ERRORS = HopErrors(__name__, ContextPipelineInterruptedError, later=RequestThrottledError)
"""Crawlee drops the request without processing it, or retries it later."""
RequestDenied: type[Denied] = _ERRORS.denied
RequestDeferred: type[Deferred] = _ERRORS.deferred
RequestLeaseTimeout: type[LeaseTimeout] = _ERRORS.late
RequestInvalidURL: type[InvalidURL] = _ERRORS.invalid


class PoliteHttpClient(HttpClient):
    """A crawler's `http_client` that decides, paces and reports each request and redirect hop.

    A lease lasts until the body has been read or the stream is closed. Time spent waiting for a
    lease does not count towards `timeout`. A request without a User-Agent of its own is sent with
    the gate's. If the gate has a signing key, each hop is signed.

    By default the client has its own connections, and the guard checks each address that it
    connects to (`guarded` is True). `verify` is an SSLContext, or False to disable verification.
    `resolver` resolves names; by default that of the gate is used. With an HTTP `client` of crawlee
    (`ImpitHttpClient(follow_redirects=False)`: it must not follow redirects itself), or with a
    proxy, no addresses are checked: that raises ConfigError unless you pass `guarded=False`.

    Requests raise `gatekeeper.Denied`, `Deferred`, `LeaseTimeout` and `InvalidURL`, which are
    errors of crawlee as well. More than `max_redirects` redirects raise crawlee's
    HttpClientStatusCodeError.
    """

    def __init__(
        self,
        gate: Gatekeeper | RemoteGatekeeper,
        client: HttpClient | None = None,
        *,
        guarded: bool | None = None,
        resolver: AbstractResolver | None = None,
        verify: ssl.SSLContext | bool = True,
        max_redirects: int = 20,
        persist_cookies_per_session: bool = True,
        on_skipped_request: OnSkipped | None = None,
    ) -> None:
        super().__init__(persist_cookies_per_session=persist_cookies_per_session)
        self._hops = Hops(gate, _ERRORS, resolver=resolver)
        self.guarded: bool = client is None
        """Whether the guard checks each address that is connected to; otherwise URLs only."""
        self._hops.guarded = self.guarded
        if client is not None:
            accept_unguarded(self._hops.config, guarded, "an HTTP client of your own")
            # The client of httpx follows redirects unless its options say otherwise.
            options = getattr(client, "_async_client_kwargs", {"follow_redirects": False})
            if getattr(client, "_follow_redirects", options.get("follow_redirects", True)):
                raise ConfigError(
                    "make the HTTP client with follow_redirects=False: each hop is decided here"
                )
        self._gate = gate
        self._client = client
        self._accepted = guarded
        self._resolver = resolver
        self._verify = verify
        self._max_redirects = max_redirects
        self._on_skipped = on_skipped_request
        self._on_cleanup: Callable[[], Awaitable[None]] | None = None
        self._session: aiohttp.ClientSession | None = None

    def tell(
        self,
        *,
        skipped: OnSkipped | None = None,
        cleanup: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Set callbacks: `skipped` for each request that is denied, such as by a redirect, and
        `cleanup` for when the client is closed at the end of each run."""
        self._on_skipped = skipped or self._on_skipped
        self._on_cleanup = cleanup or self._on_cleanup

    async def crawl(
        self, request: Request, *, statistics: Any = None, **options: Any
    ) -> HttpCrawlingResult:
        """Fetch a page, following redirects. Called by crawlee; `options` are `session`,
        `proxy_info` and `timeout`."""
        options |= {"method": request.method, "payload": request.payload}
        wanted = _PendingRequest(request.url, headers=request.headers, **options)
        try:
            response, _ = await self._fetch(wanted)
        except (RequestDenied, RequestInvalidURL) as error:
            if isinstance(error, RequestDenied):
                _log.info("%s is skipped: %s", request.url, error)
            request.state = RequestState.SKIPPED
            if self._on_skipped is not None:
                await self._on_skipped(request.url, "robots_txt")
            raise
        if statistics is not None:
            statistics.register_status_code(response.status_code)
        request.loaded_url = wanted.url
        named = wanted.sent or self._gate.user_agent or ""
        signals = page_signals(
            response.fields if isinstance(response, _Response) else response.headers,
            product_token(named) or "*",
            html_in(response.headers.get("content-type"), await response.read()),
            url=wanted.url,
            status=response.status_code,
        )
        # A stored request holds nothing but JSON.
        plain = msgspec.json.decode(msgspec.json.encode(signals))
        request.user_data["gatekeeper_signals"] = plain
        return HttpCrawlingResult(http_response=response)

    async def send_request(self, url: str, **options: Any) -> HttpResponse:
        """Fetch a URL, following redirects. `options` are those of crawlee's HttpClient: `method`,
        `headers`, `payload`, `session`, `proxy_info` and `timeout`."""
        response, _ = await self._fetch(_PendingRequest(url, **options))
        return response

    @asynccontextmanager
    async def stream(self, url: str, **options: Any) -> AsyncIterator[HttpResponse]:
        """Fetch a URL like `send_request`, to read its body in pieces. The lease is held until the
        context is left."""
        response, stack = await self._fetch(_PendingRequest(url, stream=True, **options))
        async with stack:
            yield response

    async def cleanup(self) -> None:
        """Close the connections and end open leases. The client can be used again."""
        self._hops.free()
        session, self._session = self._session, None
        if session is not None:
            await session.close()
        if self._client is not None:
            await self._client.cleanup()
        if self._on_cleanup is not None:
            await self._on_cleanup()

    # -- hop by hop ----------------------------------------------------------------------

    async def _fetch(self, wanted: _PendingRequest) -> _Page:
        """Return the page at the end of the redirects."""
        if wanted.proxy_info is not None:
            accept_unguarded(self._hops.config, self._accepted, "a proxy")
            if self._client is None:
                raise ConfigError(
                    "a proxy needs an HTTP client of crawlee's: PoliteHttpClient(gate, "
                    "ImpitHttpClient(follow_redirects=False), guarded=False)"
                )
        loop = asyncio.get_running_loop()
        for _ in range(1 + self._max_redirects):
            hop = await self._hops.begin(wanted.url, wanted.sent, wanted.url)
            began = loop.time()
            response, stack = await self._send(hop, wanted)
            if wanted.left is not None:
                wanted.left = max(0.001, wanted.left - (loop.time() - began))
            location = response.headers.get("location")
            if response.status_code not in REDIRECTS or not location:
                return response, stack
            try:
                target = urls.redirected(wanted.url, location)
            except InvalidURL as error:
                if not location.strip().lower().startswith(("http:", "https:", "/")):
                    return response, stack  # a redirect to another scheme is not followed
                await stack.aclose()
                raise _ERRORS.of(error, wanted.url) from error
            await stack.aclose()
            wanted.redirected(response.status_code, target)
        status = response.status_code
        raise HttpClientStatusCodeError(f"more than {self._max_redirects} redirects", status)

    async def _send(self, hop: Hop, wanted: _PendingRequest) -> _Page:
        """Send one request under its lease."""
        stack = AsyncExitStack()
        open_request = self._own if self._client is None else self._through_client
        headers = wanted.headers | {
            name.lower(): value for name, value in hop.headers(wanted.method, wanted.url).items()
        }
        try:
            async with asyncio.timeout(wanted.left):
                response = await stack.enter_async_context(open_request(wanted, headers))
        except BaseException as error:
            refused = isinstance(error, GatekeeperError | ProxyError)
            hop.end(
                by_network=isinstance(error, Exception) and not refused,
                unconnected=error if isinstance(error, _CONNECT_ERRORS) else None,
            )
            if isinstance(error, Denied):  # the guard refused the address
                raise self._hops.refused(wanted.url, wanted.sent, wanted.url) from error
            raise
        headers = usual_names(response.headers)
        body = self._hops.answered(hop, response.status_code, headers)
        stack.callback(body.free)
        if wanted.stream:
            return _Counted(response, body), stack
        async with stack, asyncio.timeout(wanted.left):
            if isinstance(response, _Response):
                await response.load()
            body.came(len(await response.read()))
        return response, stack

    @asynccontextmanager
    async def _through_client(
        self, wanted: _PendingRequest, headers: dict[str, str]
    ) -> AsyncIterator[HttpResponse]:
        client: Any = self._client
        left = None if wanted.left is None else timedelta(seconds=wanted.left)
        options: dict[str, Any] = {"headers": headers, "timeout": left}
        for name in ("method", "payload", "session", "proxy_info"):
            options[name] = getattr(wanted, name)
        if wanted.stream:
            async with client.stream(wanted.url, **options) as response:
                yield response
        else:
            yield await client.send_request(wanted.url, **options)

    @asynccontextmanager
    async def _own(
        self, wanted: _PendingRequest, headers: dict[str, str]
    ) -> AsyncIterator[_Response]:
        session = wanted.session
        if session is not None and "cookie" not in headers:
            cookies = session.cookies.get_cookie_string(wanted.url)
            headers = headers | ({"cookie": cookies} if cookies else {})
        async with self._connections().request(
            wanted.method,
            url_of(wanted.url),
            headers=headers,
            data=wanted.payload,
            allow_redirects=False,
            ssl=self._verify,
        ) as answer:
            if session is not None and self._persist_cookies_per_session:
                found = answer.headers.getall("Set-Cookie", [])
                session.cookies.extract_cookies_from_headers(wanted.url, found)
            yield _Response(answer)

    def _connections(self) -> aiohttp.ClientSession:
        if self._session is None:
            gate = self._gate
            if isinstance(gate, Gatekeeper) and self._resolver is None:
                connector = gate.parts.make_connector()
            else:
                connector = guarded_connector(self._hops.config, resolver=self._resolver)
            self._session = aiohttp.ClientSession(
                connector=connector,
                middlewares=(send_once,),  # a repetition would need a lease of its own
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,  # T19
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=30.0, sock_read=60.0),
                **HEAD_LIMITS,
            )
        return self._session


@dataclass(eq=False)
class _PendingRequest:
    """A request to be sent; each redirect changes it."""

    url: str
    _: KW_ONLY
    method: str = "GET"
    headers: Any = None
    """The header fields, by names in lower case."""
    payload: bytes | None = None
    session: Any = None
    proxy_info: Any = None
    timeout: InitVar[timedelta | None] = None
    left: float | None = field(init=False)
    """Seconds that it may still take, without those of waiting for leases."""
    stream: bool = False
    """Whether the body is read in pieces, by the caller."""

    sent: str | None = field(init=False)
    """Its own User-Agent, if it has one."""

    def __post_init__(self, timeout: timedelta | None) -> None:
        self.headers = {name.lower(): value for name, value in dict(self.headers or {}).items()}
        self.left = None if timeout is None else timeout.total_seconds()
        self.sent = self.headers.get("user-agent")

    def redirected(self, status: int, url: str) -> None:
        """Change the request as the Fetch standard specifies (section 4.4, HTTP-redirect fetch)."""
        gone: frozenset[str] = frozenset()
        if (status in (301, 302) and self.method == "POST") or (
            status == 303 and self.method not in ("GET", "HEAD")
        ):
            self.method, self.payload, gone = "GET", None, _BODY_FIELDS
        if urls.parse(url).origin != urls.parse(self.url).origin:
            gone |= _ORIGIN_FIELDS
        self.url = url
        self.headers = {k: v for k, v in self.headers.items() if k not in gone}


_Page = tuple[Any, AsyncExitStack]
"""A response, and what releases its connection and lease when it is closed."""


@dataclass(frozen=True)
class _Counted:
    """A response that counts the bytes of its body as they are read."""

    response: Any
    body: BodyInUse

    def __getattr__(self, name: str) -> Any:
        return getattr(self.response, name)

    async def read_stream(self) -> AsyncIterator[bytes]:
        """Yield the body in pieces."""
        async for piece in self.response.read_stream():
            self.body.came(len(piece))
            yield piece


class _Response:
    """A response of aiohttp as crawlee's HttpResponse."""

    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self._answer = answer
        self._data: bytes | None = None
        self._is_read = False
        version = answer.version or aiohttp.HttpVersion11
        self.http_version = f"HTTP/{version.major}.{version.minor}"
        self.status_code = answer.status
        self.headers = HttpHeaders(dict(answer.headers))
        self.fields: Mapping[str, str] = answer.headers
        """The header fields with each of their lines, which `headers` can't hold."""

    async def load(self) -> None:
        """Read the body, for `read`."""
        self._data, self._is_read = await self._answer.read(), True

    async def read(self) -> bytes:
        """Return the body. Raises RuntimeError if it is streamed."""
        if self._data is None:
            raise RuntimeError("use read_stream for the body of a response from stream")
        return self._data

    async def read_stream(self) -> AsyncIterator[bytes]:
        """Yield the body in pieces. Raises RuntimeError if it has been read already."""
        if self._is_read:
            raise RuntimeError("the body was read already")
        self._is_read = True
        async for piece in self._answer.content.iter_chunked(_PIECE_SIZE):
            yield piece
