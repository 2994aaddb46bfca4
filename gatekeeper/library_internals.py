"""Every private name of asyncio, aiohttp, httpx, redis-py and Scrapy that the package uses.

No library guarantees these names. Each function documents what happens if a name is missing.
`loop_state`, `idle_transport` and `plain_head` exist for speed alone: the public way remains, with
the same answers. The others provide what no public name does.

===================  ========================================  =====================================
function             purpose                                   if its names are missing
===================  ========================================  =====================================
loop_state           a warm question tells whose event loop    that takes a system call before
                     it is asked in, in 60 ns                  Python 3.12: 10 % of the question
idle_transport,      a warm check of the sidecar costs a       aiohttp's usual way: a task, a
plain_head           third of the CPU time: 24 us, not 70      request and a writer per request;
                                                               workers pass all to the owner
DialConnector        bounds the heads of each connection, and   nothing is bounded but by aiohttp's
                     idle connections; reports which           keep-alive (15 s); the guard still
                     connection was refused                    judges addresses
limit_heads          bounds the octets of a head, and the      no such bounds
                     number of interim answers
close_pooled         connections judged by old settings are    idle connections stay until their
                     not used again                            keep-alive ends (15 s)
default_proxy        robots.txt is fetched through the         no proxy: the requests fail where one
                     session's proxy, as the pages are         is needed
wrap_requests        reads a request's own `timeout` and       ConfigError: use the middleware
                     `middlewares`
fail_broken_body     400 immediately for a malformed body      408 when the body's timeout ends
is_answering,        a stop ends a connection after the last   answers under way have a second
has_queued_request   of the requests that it has brought
connect_through      httpx sends over a pool whose             ConfigError
                     addresses the guard judges
is_scrapy_closing    a stopped crawl waits for no lease        it waits GATEKEEPER_MAX_WAIT at most
wake_scrapy          a request is sent when its host is due    up to 5 s later, by its heartbeat
send_once_by_scrapy  Twisted sends each request once           it repeats a GET without a lease if a
                                                               kept connection broke
bounded_parser       bounds the memory of a store's reply      no bound
===================  ========================================  =====================================
"""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from functools import partial
from threading import get_ident
from typing import Any, Final

import aiohttp
from aiohttp import web
from aiohttp.base_protocol import BaseProtocol
from aiohttp.client_proto import ResponseHandler
from aiohttp.http_exceptions import HttpProcessingError

from gatekeeper import descriptors
from gatekeeper.errors import ConfigError

# --- asyncio --------------------------------------------------------------------------------

THREAD: Final = "_thread_id"
"""The key in a `loop_state`."""


def loop_state(loop: asyncio.AbstractEventLoop) -> dict[str, Any]:
    """Return a dictionary that has at `THREAD` the thread in which the loop runs now, and None
    while it does not run. In a thread that runs one loop, it equals `threading.get_ident()` only
    if that is the loop."""
    state = getattr(loop, "__dict__", {})
    return state if THREAD in state else _LoopState(loop)


class _LoopState(dict[str, Any]):
    """The state of a loop that is not asyncio's own, such as uvloop's."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._loop = loop

    def __missing__(self, key: str) -> int | None:
        try:
            return get_ident() if asyncio.get_running_loop() is self._loop else None
        except RuntimeError:
            return None


# --- aiohttp's client -----------------------------------------------------------------------

_Request = Callable[..., Any]


def wrap_requests(session: aiohttp.ClientSession, wrap: Callable[[_Request], _Request]) -> None:
    """Wrap the coroutine function that all request methods of a session call; the session's class
    stays aiohttp's.

    aiohttp has no public way to read a request's own `timeout` and `middlewares`: it starts the
    total timeout before the middlewares run, and a request's middlewares replace the session's.
    Raises ConfigError if this aiohttp has no such function.
    """
    request = getattr(session, "_request", None)
    if request is None:
        raise ConfigError(
            f"polite_session does not fit aiohttp {aiohttp.__version__}: use "
            "aiohttp.ClientSession(middlewares=(gate.middleware,))"
        )
    # object.__setattr__, because ClientSession's own warns about attributes in debug mode.
    object.__setattr__(session, "_request", wrap(request))


def default_proxy(session: aiohttp.ClientSession) -> dict[str, Any]:
    """Return a session's proxy settings as arguments for another `ClientSession`."""
    return {
        "proxy": getattr(session, "_default_proxy", None),
        "proxy_auth": getattr(session, "_default_proxy_auth", None),
    }


def close_pooled(connector: aiohttp.BaseConnector) -> None:
    """Close a connector's idle connections now, and those in use after their response."""
    for idle in getattr(connector, "_conns", {}).values():
        for protocol, _ in idle:
            protocol.close()
    for busy in getattr(connector, "_acquired", ()):
        busy.force_close()


class DialConnector(aiohttp.TCPConnector):
    """A connector with an overridable method, `dialled`, around each new connection, and with a
    bound on its idle connections, of which the oldest are closed first."""

    def __init__(self, *, max_idle: int, **options: Any) -> None:
        super().__init__(**options)
        self._max_idle = max_idle
        self._most_idle = 0
        """An upper bound of the number of idle connections."""
        descriptors.register(self)

    def _release(self, key: Any, protocol: Any, *, should_close: bool = False) -> None:
        super()._release(key, protocol, should_close=should_close)
        self._most_idle += 1
        if self._most_idle > self._max_idle:  # counted only now and then
            self._most_idle = self._drop_idle(self._max_idle - self._max_idle // 8)

    def _drop_idle(self, keep: int) -> int:
        """Close the oldest idle connections, all but `keep`. Return how many are left."""
        pools = getattr(self, "_conns", {})
        idle = [(since, key, one) for key, pool in pools.items() for one, since in pool]
        idle.sort(key=operator.itemgetter(0))
        for _, key, protocol in idle[: max(0, len(idle) - keep)]:
            pools[key].popleft()  # the oldest of its host
            if not pools[key]:
                del pools[key]
            protocol.abort()  # not `close`, which for TLS waits for the other side
        return min(keep, len(idle))

    def close_idle(self) -> bool:
        """Begin to close half of the idle connections; see `descriptors.IdlePool`."""
        idle = sum(map(len, tuple(getattr(self, "_conns", {}).values())))
        with suppress(RuntimeError):  # its loop is closed, and so are its connections
            self._loop.call_soon_threadsafe(self._drop_idle, idle // 2)
        return idle > 0

    def _create_connection(
        self, req: Any, traces: Any, timeout: Any
    ) -> Coroutine[Any, Any, ResponseHandler]:
        return self.dialled(req, partial(super()._create_connection, req, traces, timeout))

    async def dialled(
        self,
        req: aiohttp.ClientRequest,
        dial: Callable[[], Coroutine[Any, Any, ResponseHandler]],
    ) -> ResponseHandler:
        """Return the new connection for a request. To be overridden; `dial` may be repeated."""
        return await dial()


# --- the heads of responses -----------------------------------------------------------------
#
# RFC 9110 section 5.4 sets no limit to a field or to a head, so ours are generous: browsers accept
# 256 KiB. aiohttp's own (8,190 octets a field, 128 fields) refuse real sites.
#
# A server may send any number of responses with a status of 1xx before the final one, and a client
# must read them all (RFC 9110 section 15.2). aiohttp parses all received data in one call and puts
# each response on an unbounded queue, so a server that keeps sending `HTTP/1.1 100 Continue` could
# occupy the event loop. aiohttp has no setting for it.

MAX_HEAD_OCTETS: Final = 262_144
"""The maximum number of octets until the final head has arrived, those of interim answers included;
some thousand more if they arrive together with its end."""
HEAD_LIMITS: Final[dict[str, Any]] = {
    "max_line_size": 65_536,
    "max_field_size": 65_536,
    "max_headers": 8_192,  # of 32 octets on average; parsing them takes about 5 ms
}
"""Arguments for every `aiohttp.ClientSession` of this package; `limit_heads` bounds a site's whole
head."""
MAX_INTERIM_ANSWERS: Final = 16
"""The maximum number of interim answers to one request."""
_PIECE_OCTETS: Final = 4_096
"""Octets parsed at a time while a head is awaited: at most about 250 heads."""
_MAX_WHOLE_OCTETS: Final = 16_384
"""Octets parsed at a time if they start with a final head, as most do."""
_SWITCHING_PROTOCOLS: Final = 101  # final for HTTP/1.1: another protocol follows
_FINAL_DIGITS: Final = frozenset({b"2", b"3", b"4", b"5"})
"""The first digits of a final status."""
_parse_data: Final = ResponseHandler.data_received
_queue_head: Final = ResponseHandler.feed_data


def limit_heads(protocol: object) -> None:
    """Apply the bounds to a connection's protocol from now on. Idempotent.

    A protocol that is not aiohttp's own is left alone. A connection that exceeds a bound is
    closed, and its request fails as for malformed HTTP (aiohttp.ClientResponseError).
    """
    if type(protocol) is not ResponseHandler:
        return
    protocol.__class__ = _BoundedProtocol
    transport = protocol.transport
    if transport is not None:
        transport.set_protocol(protocol)  # uvloop has cached the old class's bound method


class _BoundedProtocol(ResponseHandler):
    """aiohttp's connection protocol with the bounds. Created by `limit_heads` alone."""

    _head_arrived: bool = False
    """The final head of the current (or last) request has arrived."""
    _parser_id: int = 0
    """The `id` of that request's parser. Each request has its own parser, created while the
    connection still holds the previous one, so ids differ. A reference to the parser would keep it
    alive for one more request, and the garbage collector would traverse it again and again."""
    _interim_answers: int = 0
    """Interim answers to the current request."""
    _head_octets: int = 0
    """Octets received since the request was sent, until the final head has arrived."""

    def data_received(self, data: bytes) -> None:
        """Parse received data; in small pieces until the final head has arrived."""
        parser = self._parser
        if id(parser) != self._parser_id:  # the first data since the request was sent
            self._parser_id = id(parser)
            self._head_arrived, self._interim_answers, self._head_octets = False, 0, 0
            if data[9:10] in _FINAL_DIGITS and len(data) <= _MAX_WHOLE_OCTETS:  # after `HTTP/1.1 `
                self._head_octets = len(data)
                _parse_data(self, data)
                return
        if self._head_arrived or parser is None or not data:
            _parse_data(self, data)
            return
        for start in range(0, len(data), _PIECE_OCTETS):
            if self._exception is not None:
                return  # refused, or malformed HTTP: the connection is closed already
            if self._head_arrived:
                _parse_data(self, data[start:])
                return
            if self._head_octets >= MAX_HEAD_OCTETS:
                self._refuse(f"a head of more than {MAX_HEAD_OCTETS} octets")
                return
            piece = data[start : start + _PIECE_OCTETS]
            self._head_octets += len(piece)
            _parse_data(self, piece)

    def feed_data(self, data: Any, size: int = 0) -> None:
        """Count a parsed head before it is queued."""
        if self._exception is not None:
            return
        code = data[0].code
        if self._head_arrived:
            self._refuse("an answer without a request")
            return
        if 100 <= code < 200 and code != _SWITCHING_PROTOCOLS:
            self._interim_answers += 1
            if self._interim_answers > MAX_INTERIM_ANSWERS:
                self._refuse(f"more than {MAX_INTERIM_ANSWERS} interim answers")
                return
        else:
            self._head_arrived = True
        _queue_head(self, data, size)

    def _refuse(self, why: str) -> None:
        if self.transport is not None:
            self.transport.close()
        if self._exception is None:
            self.set_exception(HttpProcessingError(code=400, message=why))


# --- aiohttp's server -----------------------------------------------------------------------


def plain_head(head: bytes) -> tuple[Mapping[str, str], int] | None:
    """Return the header that aiohttp's server parses from the head of a request, and the length of
    the body in octets.

    None if the head is malformed, if the connection does not stay open, if the body is not plain,
    or if this aiohttp has no such parser.
    """
    parser = getattr(aiohttp.http, "HttpRequestParser", None)
    if parser is None:
        return None
    loop = asyncio.get_running_loop()
    try:
        messages, _, _ = parser(BaseProtocol(loop), loop, 1 << 16).feed_data(head)
    except HttpProcessingError:
        return None
    if len(messages) != 1:
        return None
    message = messages[0][0]
    if message.version != aiohttp.HttpVersion11 or "Transfer-Encoding" in message.headers:
        return None
    if message.should_close or message.upgrade or message.compression or message.chunked:
        return None
    return message.headers, int(message.headers.get("Content-Length", 0))


def idle_transport(connection: web.RequestHandler, *, keepalive: float) -> asyncio.Transport | None:
    """Return the transport of a connection that a response may be written to now, after which it
    may idle for `keepalive` seconds.

    None if an earlier request is not answered yet, if the client does not read, if the connection
    is closing, or if this aiohttp lacks the names.
    """
    if not hasattr(connection, "_waiter") or not hasattr(connection, "_next_keepalive_close_time"):
        return None
    waiter, transport = connection._waiter, connection.transport
    if waiter is None or waiter.done() or connection.writing_paused:
        return None
    if transport is None or transport.is_closing():
        return None
    connection._next_keepalive_close_time = connection._loop.time() + keepalive
    return transport


def fail_broken_body(connection: web.RequestHandler) -> None:
    """After data arrived: if it is malformed HTTP, raise the error in the reader of the body.

    aiohttp's parser never ends such a body, so its reader would wait until its timeout. If the
    names are missing, it does.
    """
    messages = getattr(connection, "_messages", None)
    request = getattr(connection, "_current_request", None)
    if not messages or request is None or request.content.is_eof():
        return
    error = getattr(messages[-1][0], "exc", None)  # set if the message represents an error
    if error is not None:
        request.content.set_exception(web.RequestPayloadError(str(error)))


def is_answering(connection: web.RequestHandler) -> bool:
    """Return whether a request of the connection is handled, or its response written."""
    return bool(getattr(connection, "_request_in_progress", False))


def has_queued_request(connection: web.RequestHandler) -> bool:
    """Return whether a request of the connection waits until an earlier one is answered."""
    return bool(getattr(connection, "_messages", ()))


# --- httpx ----------------------------------------------------------------------------------


def connect_through(transport: Any, pool: Any) -> Any:
    """Replace the connection pool of a transport of httpx, which has no option for it.

    Raises ConfigError if this httpx has no such name.
    """
    if not hasattr(transport, "_pool"):
        raise ConfigError("PoliteTransport does not fit this httpx: give it a transport of yours")
    transport._pool = pool
    return transport


# --- Scrapy's engine ------------------------------------------------------------------------


def is_scrapy_closing(crawler: Any) -> bool:
    """Return True if a crawl is closing its spider. Scrapy sends no signal before all downloads
    have ended."""
    try:
        engine = crawler.engine
    except RuntimeError:  # the crawl has no engine yet
        return False
    return getattr(getattr(engine, "_slot", None), "closing", None) is not None


def wake_scrapy(engine: object) -> None:
    """Make a crawl's engine ask its scheduler for a request now.

    Scrapy has no public way for a scheduler to announce a request. If the names are missing, the
    engine asks when a response arrives, and at each heartbeat.
    """
    nextcall = getattr(getattr(engine, "_slot", None), "nextcall", None)
    if nextcall is not None:
        nextcall.schedule()


def send_once_by_scrapy(crawler: Any) -> None:
    """Let Twisted send each request of a crawl once. It would repeat a GET immediately, without a
    lease, if a kept connection broke before the response; Scrapy's own retries take leases."""
    downloader = getattr(crawler.engine, "downloader", None)
    handlers = getattr(getattr(downloader, "handlers", None), "_handlers", {})
    for handler in handlers.values():
        pool: Any = getattr(handler, "_pool", None)
        if hasattr(pool, "retryAutomatically"):
            pool.retryAutomatically = False


# --- redis-py -------------------------------------------------------------------------------


_LINE_COST: Final = 64
"""Octets of memory that each element of a reply takes, at most."""


def bounded_parser(limit: int) -> dict[str, Any]:
    """Return options of redis-py's connections (RESP2) with which they read at most `limit` octets
    of one reply. A longer one raises its InvalidResponse. hiredis, if it is installed, is not used
    for reading: its lists of empty lists take thirty times their octets."""
    try:  # an optional extra
        from redis._parsers import _AsyncRESP2Parser as kind  # noqa: PLC0415
        from redis.exceptions import InvalidResponse  # noqa: PLC0415
    except ImportError:
        return {}

    class Stream:
        """The part of a StreamReader that parsers read replies with."""

        def __init__(self, stream: asyncio.StreamReader) -> None:
            self.left = limit
            self._stream = stream

        def __getattr__(self, name: str) -> Any:
            return getattr(self._stream, name)

        def _count(self, octets: int) -> None:
            self.left -= octets
            if self.left < 0:
                raise InvalidResponse(f"a reply of more than {limit} octets")

        async def readexactly(self, octets: int) -> bytes:
            self._count(octets)
            return await self._stream.readexactly(octets)

        async def readline(self) -> bytes:
            line = await self._stream.readline()
            self._count(len(line) + _LINE_COST)
            return line

    class Parser(kind):
        def on_connect(self, connection: Any) -> None:
            super().on_connect(connection)  # type: ignore[no-untyped-call]
            stream: Any = getattr(self, "_stream", None)
            self._stream: Any = stream if stream is None else Stream(stream)

        async def read_response(self, *args: Any, **options: Any) -> Any:
            if isinstance(stream := getattr(self, "_stream", None), Stream):
                stream.left = limit
            return await super().read_response(*args, **options)

    return {"parser_class": Parser}
