"""Every use that the package makes of private names of aiohttp, and of Scrapy's engine.

They don't promise these names. Each function says what holds where a name is missing. What exists
for speed alone, `read_inline` and `start_connection`, is also off where `speedups` are: what is
left then is the public way, which gives the same answers. The others serve a promise that has no
public way.

===================  ========================================  =====================================
function             what it buys                              without its names
===================  ========================================  =====================================
read_inline          a warm check of the sidecar costs half    the usual way: a task, a request and
                     the CPU time: 34 us instead of 70         a writer for each request
DialConnector        the interim bound on each connection;     neither; the guard judges addresses
                     which connection the guard refused        all the same
start_connection     an origin that is dead costs half the     a request is built for each before
                     CPU time: it is dialled first             it is dialled
limit_interim        a bound on interim answers                no bound
close_pooled         no connection that was judged by old      idle connections stay for as long as
                     settings is used again                    they are kept alive (15 s)
default_proxy        robots.txt goes the way of the pages,     no proxy: the requests fail where one
                     where a session has a proxy               is needed
wrap_requests        a request's own `timeout` and             ConfigError: use the middleware
                     `middlewares` are seen
request_parser       a worker reads requests as the sidecar    workers answer nothing: they pass
                     does, and can still pass one on           each connection on to the owner
fail_broken_body     400 at once for a body that is no HTTP    408 when the time for bodies is over
octets_after         what a client sends into a tunnel         ConfigError: no tunnels
scrapy_stops         a stopped crawl waits for no turn         it waits GATEKEEPER_MAX_WAIT at most
wake_scrapy          a request is sent when its turn comes     up to 5 s later, by its heartbeat
===================  ========================================  =====================================
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from typing import Any, Final, Protocol, cast

import aiohttp
from aiohttp import web
from aiohttp.client_proto import ResponseHandler
from aiohttp.http_exceptions import HttpProcessingError

from gatekeeper import speedups
from gatekeeper.errors import ConfigError

# --- aiohttp's client -----------------------------------------------------------------------

_Request = Callable[..., Any]


def wrap_requests(session: aiohttp.ClientSession, wrap: Callable[[_Request], _Request]) -> None:
    """Put `wrap(request)` in the place of the coroutine function behind all of a session's
    methods; its class stays aiohttp's.

    aiohttp has no public way to see each request's own `timeout` and `middlewares`: it starts
    the total timeout before the middlewares run, and a request's own replace the session's.
    Raises ConfigError where this aiohttp is built otherwise.
    """
    request = getattr(session, "_request", None)
    if request is None:
        raise ConfigError(
            f"polite_session does not fit aiohttp {aiohttp.__version__}: use "
            "aiohttp.ClientSession(middlewares=(gate.middleware,))"
        )
    # object's own: in asyncio's debug mode ClientSession warns of foreign attributes.
    object.__setattr__(session, "_request", wrap(request))


def default_proxy(session: aiohttp.ClientSession) -> dict[str, Any]:
    """The proxy that a session was made with, as arguments for another `ClientSession`."""
    return {
        "proxy": getattr(session, "_default_proxy", None),
        "proxy_auth": getattr(session, "_default_proxy_auth", None),
    }


def close_pooled(connector: aiohttp.BaseConnector) -> None:
    """Close a connector's idle connections at once, and those in use after their response."""
    for idle in getattr(connector, "_conns", {}).values():
        for protocol, _ in idle:
            protocol.close()
    for busy in getattr(connector, "_acquired", ()):
        busy.force_close()


class DialConnector(aiohttp.TCPConnector):
    """A connector that lets `dialled` wrap the making of each connection that is not pooled."""

    def _create_connection(
        self, req: Any, traces: Any, timeout: Any
    ) -> Coroutine[Any, Any, ResponseHandler]:
        return self.dialled(req, super()._create_connection(req, traces, timeout))

    async def dialled(
        self, req: aiohttp.ClientRequest, dial: Coroutine[Any, Any, ResponseHandler]
    ) -> ResponseHandler:
        """The connection that `dial` makes for a request. Override it, and await `dial` once."""
        return await dial


Dial = Callable[..., Coroutine[Any, Any, socket.socket]]


def start_connection() -> Dial | None:
    """What aiohttp connects a socket with (several addresses of a name as RFC 8305 has it); None
    where it is not found."""
    if not speedups.ON:
        return None
    found: Dial | None = getattr(
        getattr(aiohttp.connector, "aiohappyeyeballs", None), "start_connection", None
    )
    return found


# --- interim answers ------------------------------------------------------------------------
#
# A server may send any number of answers with a status of 1xx before the final one, and a client
# has to read them all (RFC 9110 section 15.2). aiohttp reads whatever came in one go and puts
# each on a queue without a bound, so a server that sends nothing else (`HTTP/1.1 100 Continue`,
# again and again) would have the event loop for itself. aiohttp has no setting for it.

MOST_INTERIM: Final = 16
"""Interim answers to one request."""
MOST_OCTETS: Final = 65_536
"""Octets that may come before the final head, where interim answers are among them."""
_PIECE: Final = 4_096
"""Octets that are read in one go while a head is awaited: at most some 250 heads."""
_WHOLE: Final = 16_384
"""Octets that are read in one go where they begin with a final head, as most do."""
_SWITCHING: Final = 101  # final for this protocol: what follows is another one
_FINAL: Final = frozenset({b"2", b"3", b"4", b"5"})
"""How the status of a final answer begins."""
_received: Final = ResponseHandler.data_received
_queued: Final = ResponseHandler.feed_data


def limit_interim(protocol: object) -> None:
    """Have a connection's protocol keep to the bounds, from here on. Idempotent.

    One that is not aiohttp's own stays as it is. A connection that goes beyond is closed, and
    its request fails as with any answer that is no HTTP (aiohttp.ClientResponseError).
    """
    if type(protocol) is not ResponseHandler:
        return
    protocol.__class__ = _Limited
    transport = protocol.transport
    if transport is not None:
        transport.set_protocol(protocol)  # uvloop keeps the bound method of the class before


class _Limited(ResponseHandler):
    """aiohttp's protocol of a connection, with the bounds. Made by `limit_interim` alone."""

    _answered: bool = False
    """The final head of the request under way, or of the last one, is here."""
    _answer_of: int = 0
    """The identity of that request's parser. Each has one of its own, made while the connection
    still has the one before, so that they differ. To hold the parser itself would keep it, and what
    it holds, for one request more: the collector would look through all of them again and again."""
    _interim: int = 0
    _octets: int = 0
    """Read since the request was sent, as long as the final head is not here."""

    def data_received(self, data: bytes) -> None:
        """Read what came; in small pieces until the final head is among it."""
        parser = self._parser
        if id(parser) != self._answer_of:  # nothing came since the request was sent
            self._answer_of = id(parser)
            self._answered, self._interim, self._octets = False, 0, 0
            if data[9:10] in _FINAL and len(data) <= _WHOLE:  # behind `HTTP/1.1 `
                self._octets = len(data)
                _received(self, data)
                return
        if self._answered or parser is None or not data:
            _received(self, data)
            return
        for start in range(0, len(data), _PIECE):
            if self._exception is not None:
                return  # refused, or no HTTP: the connection is closed already
            if self._answered:
                _received(self, data[start:])
                return
            if self._interim and self._octets >= MOST_OCTETS:
                self._refuse(f"more than {MOST_OCTETS} octets before the final answer")
                return
            piece = data[start : start + _PIECE]
            self._octets += len(piece)
            _received(self, piece)

    def feed_data(self, data: Any, size: int = 0) -> None:
        """A head was read: count it before it is put on the queue."""
        if self._exception is not None:
            return
        code = data[0].code
        if self._answered:
            self._refuse("another answer than the one that was asked for")
            return
        if 100 <= code < 200 and code != _SWITCHING:
            self._interim += 1
            if self._interim > MOST_INTERIM:
                self._refuse(f"more than {MOST_INTERIM} interim answers")
                return
        else:
            self._answered = True
        _queued(self, data, size)

    def _refuse(self, why: str) -> None:
        if self.transport is not None:
            self.transport.close()
        if self._exception is None:
            self.set_exception(HttpProcessingError(code=400, message=why))


# --- aiohttp's server -----------------------------------------------------------------------


Octets = bytes | list[bytes]
"""An answer: in pieces where it is a large one."""


def write_octets(transport: asyncio.WriteTransport, answer: Octets) -> None:
    """Write an answer."""
    if isinstance(answer, bytes):
        transport.write(answer)
    else:  # not by `writelines`, which makes one piece of them before Python 3.12
        for piece in answer:
            transport.write(piece)


class InlineReader(Protocol):
    """What answers the requests of a connection where they are read."""

    def answer(self, message: Any, payload: Any, transport: asyncio.Transport) -> Octets | None:
        """The response to a request that aiohttp has read; None sends it the usual way."""

    def answer_octets(self, data: bytes, transport: asyncio.Transport) -> Octets | None:
        """The response to octets that are a whole request, if they are told to be one without
        aiohttp's parser; None: it has to read them."""

    def learn(self, data: bytes, message: Any, length: int) -> None:
        """aiohttp has read this of the octets `data`, one whole request and nothing else, with
        `length` octets of a body."""


def read_inline(connection: web.RequestHandler, reader: InlineReader, *, keepalive: float) -> bool:
    """Have `reader` see each request of a connection where it is read; what it answers is written
    at once.

    aiohttp makes a future, a task, a writer and a request for each one, which is half of what a
    warm check costs. `keepalive`: seconds that the connection may idle after an answer. False
    where this aiohttp is built otherwise, or `speedups` are off: nothing is answered here.
    """
    names = ("_parser", "_waiter", "_paused", "_request_count", "_next_keepalive_close_time")
    if not speedups.ON or not all(hasattr(connection, name) for name in names):
        return False
    parser = _InlineParser(connection, reader, keepalive)
    connection._parser = cast("Any", parser)
    return True


class _InlineParser:
    """Stands in for the parser of one connection: what `reader` takes is not passed on."""

    __slots__ = (
        *("_between", "_connection", "_feed", "_keepalive", "_parser", "_reader"),
        "message_consumed",
    )

    def __init__(
        self, connection: web.RequestHandler, reader: InlineReader, keepalive: float
    ) -> None:
        parser: Any = connection._parser
        self._connection = connection
        self._reader = reader
        self._keepalive = keepalive
        self._parser = parser
        self._feed = parser.feed_data
        self._between = True
        """aiohttp's parser has read whole requests, and nothing of the next one."""
        self.message_consumed: Callable[[], None] = parser.message_consumed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)

    def feed_data(self, data: bytes) -> Any:
        """The requests that `data` completes, but for one that is answered already."""
        if self._between and (transport := self._free()) is not None:
            answer = self._reader.answer_octets(data, transport)
            if answer is not None:
                self._write(transport, answer)
                return _NO_MESSAGES
        self._between = False
        found = self._feed(data)
        messages, upgraded, _ = found
        # Several at once are pipelined: their answers go out in their order, by the queue.
        if len(messages) == 1 and not upgraded:
            message, payload = messages[0]
            length = whole_request(data, payload)
            if length >= 0:
                self._between = True
                self._reader.learn(data, message, length)
            transport = self._free()
            answer = None if transport is None else self._reader.answer(message, payload, transport)
            if transport is not None and answer is not None:
                self._write(transport, answer)
                self.message_consumed()
                return _NO_MESSAGES
        return found

    def _free(self) -> asyncio.Transport | None:
        """The transport, if no request stands before this one and the client reads its answers."""
        connection = self._connection
        waiter, transport = connection._waiter, connection.transport
        if waiter is None or waiter.done() or connection._paused:
            return None
        return None if transport is None or transport.is_closing() else transport

    def _write(self, transport: asyncio.Transport, answer: Octets) -> None:
        write_octets(transport, answer)
        # The rest is what aiohttp's own loop does after an answer.
        connection = self._connection
        connection._request_count += 1
        connection._next_keepalive_close_time = connection._loop.time() + self._keepalive


_NO_MESSAGES: Final[tuple[tuple[()], bool, bytes]] = ((), False, b"")


def body_read(payload: Any) -> bytes | None:
    """The body of a request as far as it was read, left where it is: the usual way may have to
    read it yet. None where this aiohttp keeps it in another way."""
    if type(payload) is not aiohttp.StreamReader:
        return b""  # aiohttp's own sign for none
    parts = getattr(payload, "_buffer", None)
    if parts is None:
        return None
    return parts[0] if len(parts) == 1 else b"".join(parts)


def whole_request(data: bytes, payload: Any) -> int:
    """Octets of the body, where `data` is one whole request whose payload that is, and nothing
    else; -1 where it is not."""
    body = body_read(payload) if payload.is_eof() else None
    if body is None or len(data) != data.find(b"\r\n\r\n") + 4 + len(body):
        return -1
    return len(body)


def request_parser(protocol: object, loop: asyncio.AbstractEventLoop, *, header: int) -> Any:
    """What aiohttp's server reads the requests of a connection with: its `feed_data(octets)` gives
    the messages that are whole, each with its payload, and raises for what is no HTTP.

    `protocol` is asked to pause and resume reading; `header` bounds a line in octets. None where
    this aiohttp has none of that name.
    """
    parser = getattr(aiohttp.http, "HttpRequestParser", None)
    if parser is None:
        return None
    return parser(
        protocol,
        loop,
        1 << 20,
        max_line_size=header,
        max_field_size=header,
        payload_exception=web.RequestPayloadError,
        auto_decompress=False,
    )


def fail_broken_body(connection: web.RequestHandler) -> None:
    """After data came: where it is no HTTP, whoever reads the body before it learns that.

    aiohttp's parser leaves such a body without an end, so that its reader waits for as long as
    it is ready to. Without the names it does.
    """
    messages = getattr(connection, "_messages", None)
    request = getattr(connection, "_current_request", None)
    if not messages or request is None or request.content.is_eof():
        return
    error = getattr(messages[-1][0], "exc", None)  # of a message that stands for an error
    if error is not None:
        request.content.set_exception(web.RequestPayloadError(str(error)))


# --- Scrapy's engine ------------------------------------------------------------------------


def scrapy_stops(crawler: Any) -> bool:
    """Is a crawl closing its spider? Scrapy says so to nobody before all downloads have ended."""
    try:
        engine = crawler.engine
    except RuntimeError:  # it has none yet
        return False
    return getattr(getattr(engine, "_slot", None), "closing", None) is not None


def wake_scrapy(engine: object) -> None:
    """Have a crawl's engine ask its scheduler for a request now.

    Scrapy has no public way for a scheduler to say that it has one. Without the names the engine
    asks when a response comes, and by its heartbeat.
    """
    nextcall = getattr(getattr(engine, "_slot", None), "nextcall", None)
    if nextcall is not None:
        nextcall.schedule()


def octets_after(request: web.BaseRequest) -> asyncio.StreamReader:
    """All that the client of a CONNECT sends behind its head.

    aiohttp keeps it for whoever sets a parser, as its WebSockets do. Raises ConfigError where this
    aiohttp is built otherwise.
    """
    set_parser: Any = getattr(request.protocol, "set_parser", None)
    if set_parser is None or request.transport is None:
        raise ConfigError(f"aiohttp {aiohttp.__version__} has no tunnels: leave proxy_connect out")
    reader = asyncio.StreamReader()
    reader.set_transport(request.transport)
    set_parser(_Octets(reader))
    return reader


class _Octets:
    """Stands for a parser of aiohttp's, and passes everything on."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        self._reader.feed_data(data)
        return False, b""

    def feed_eof(self) -> None:
        self._reader.feed_eof()
