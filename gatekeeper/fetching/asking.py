"""One request of a retrieval: sent, watched by the clock, its body read within bounds."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Coroutine, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any, Final

import aiohttp
import msgspec
from aiohttp.connector import Connection
from aiohttp.hdrs import CONTENT_ENCODING, CONTENT_TYPE
from msgspec.structs import replace
from yarl import URL

from gatekeeper.clock import Clock
from gatekeeper.config import FetchConfig
from gatekeeper.errors import GateClosed
from gatekeeper.fetching.content import is_binary, is_media, judge
from gatekeeper.fetching.decoding import BadEncoding, Decoder
from gatekeeper.fetching.guard import connecting, dialling
from gatekeeper.fetching.outcomes import Outcome, classify
from gatekeeper.fetching.retrieval import hurried
from gatekeeper.fetching.watching import Alarm, Watch, watching
from gatekeeper.library_internals import default_proxy, limit_interim
from gatekeeper.urls import Target

__all__ = ["Asker", "Reply", "send_once"]

_NO_LIMITS: Final = aiohttp.ClientTimeout(total=None, sock_connect=None)
_MOST_KEPT_ALIVE: Final = 8
"""Kept-alive connections of one origin that are given up for a new one."""


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """What one request came to."""

    outcome: Outcome
    status: int | None = None
    headers: Mapping[str, str] = {}
    body: bytes | None = None
    truncated: bool = False
    received: int = 0
    elapsed: float | None = None
    """Seconds from the sending to the head."""
    detail: str = ""
    addresses: tuple[str, ...] = ()


class Asker:
    """Sends requests over the connections of a session, and nothing else of it.

    The caller's session may carry cookies, headers and middlewares, and a robots.txt is asked
    for without (2.1): so one of our own is laid over its connector, which stays its own.
    """

    def __init__(
        self,
        lent: aiohttp.ClientSession,
        *,
        headers: Mapping[str, str],
        config: FetchConfig,
        clock: Clock,
    ) -> None:
        self._lent = lent
        self._headers = headers
        self._config = config
        self._alarm = Alarm(clock)
        self._ssl = config.tls_errors != "accept" and config.profile != "archival"
        self._own: aiohttp.ClientSession | None = None
        self._reaching: aiohttp.ClientSession | None = None

    def watch(self) -> Watch:
        """For one retrieval: all its requests share the time that it has. Raises GateClosed."""
        self._session()
        config, hurry = self._config, hurried.get()
        if hurry is not None:
            config = replace(
                config,
                connect_timeout=min(config.connect_timeout, hurry.seconds),
                first_byte_timeout=min(config.first_byte_timeout, hurry.seconds),
            )
        return Watch(self._alarm, config, self._loop)

    def _session(self) -> aiohttp.ClientSession:
        """Our own session, made when it is first asked for.

        Raises GateClosed where the lent one is closed: a session made without a connector
        would get one that no guard knows.
        """
        connector = self._connector()
        own = self._own
        if own is None:
            self._loop = asyncio.get_running_loop()  # kept: to ask for it is a system call
            own = self._own = _laid_over(self._lent, connector, self._headers)
            # It holds nothing to be closed; but aiohttp warns of a session that is not.
            weakref.finalize(self, own.detach)
        return own

    def _connector(self) -> aiohttp.BaseConnector:
        """That of the lent session. Raises GateClosed where that is closed."""
        connector = self._lent.connector
        if connector is None or self._lent.closed:
            raise GateClosed("the session that robots.txt is fetched with is closed")
        return connector

    async def ask(
        self, target: Target, headers: Mapping[str, str] | None, watch: Watch, *, first_hop: bool
    ) -> Reply:
        """Send one GET and read its answer. Whatever goes wrong out there is an outcome.

        `headers` are those of this request alone. Raises GateClosed.
        """
        session = self._session()
        in_body = False
        head: aiohttp.ClientResponse | None = None
        dialled: list[str] = []
        dialling.set(dialled)
        connecting.set(None)  # whoever was the first to ask is told of its own alone
        watching.set(watch)
        if (hurry := hurried.get()) is not None:
            hurry.on_request()
        try:
            with watch:
                async with session.get(
                    _url_of(target),
                    headers=headers,
                    allow_redirects=False,
                    middlewares=(partial(_ask_once, watch),),
                    ssl=self._ssl,
                    trace_request_ctx=watch,
                ) as head:
                    elapsed = watch.reading()
                    in_body = True
                    return await _read(head, watch, self._config, elapsed)
        except (aiohttp.ClientError, OSError, TimeoutError, BadEncoding) as error:
            if isinstance(error, BadEncoding):
                outcome = Outcome.BAD_ENCODING
            elif isinstance(error, TimeoutError) and in_body:
                outcome = Outcome.TOO_SLOW  # row 23: the drip, and the deadline inside the body
            else:
                outcome = classify(
                    error=error,
                    config=self._config,
                    first_hop=first_hop,
                    connected=watch.connected,
                    in_body=in_body,
                )
            return Reply(
                outcome=outcome,
                status=None if head is None else head.status,
                headers={} if head is None else head.headers,
                detail=f"{type(error).__name__}: {error}"[:300],
                addresses=tuple(dialled),
            )

    async def reach(self, target: Target, watch: Watch) -> bool | None:
        """Whether a connection to the target's origin comes about; no request is sent over it.

        Connections that are kept alive prove nothing and are not used. False: it failed as a
        lost uplink would make it fail. None: it can't be told, as where it was refused, or where
        a proxy stands in between. Raises GateClosed.
        """
        connector = self._connector()
        if self._lent.trust_env or any(default_proxy(self._lent).values()):
            return None
        session = self._reaching
        if session is None:
            session = self._reaching = _laid_over(
                self._lent, connector, self._headers, _trace_of_connections()
            )
            weakref.finalize(self, session.detach)
        watching.set(watch)
        for _ in range(_MOST_KEPT_ALIVE):
            attempt = _Attempt()
            try:
                with watch:
                    async with session.get(
                        _url_of(target),
                        allow_redirects=False,
                        middlewares=(partial(_connect_only, watch),),
                        ssl=self._ssl,
                        trace_request_ctx=attempt,
                    ):
                        return None  # pragma: no cover - `send` raises
            except _ConnectedError:
                if attempt.made:
                    return True
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                outcome = classify(error=error, config=self._config, connected=False)
                return False if outcome.row.local else None
        return None


class _Attempt:
    """One attempt to connect."""

    made = False
    """A new connection came about."""


class _ConnectedError(Exception):
    """Raised in place of sending a request: there is a connection, which aiohttp closes now."""


def _url_of(target: Target) -> URL:
    """`URL(target.url, encoded=True)`, of parts that need not be told apart again."""
    path, _, query = target.path.partition("?")
    return URL.build(
        scheme=target.scheme,
        authority=target.origin.partition("//")[2],
        path=path,
        query_string=query,
        encoded=True,
    )


def _laid_over(
    lent: aiohttp.ClientSession,
    connector: aiohttp.BaseConnector,
    headers: Mapping[str, str],
    trace: aiohttp.TraceConfig | None = None,
) -> aiohttp.ClientSession:
    # Only in a bounded pool is there a queue to hear of.
    if trace is None and (connector.limit or connector.limit_per_host):
        trace = _trace_of_queue()
    return aiohttp.ClientSession(
        connector=connector,
        connector_owner=False,
        headers=headers,
        cookie_jar=aiohttp.DummyCookieJar(),
        request_class=_Request,
        trace_configs=None if trace is None else [trace],
        trust_env=lent.trust_env,
        auto_decompress=False,
        timeout=_NO_LIMITS,
        **default_proxy(lent),
    )


def _trace_of_queue() -> aiohttp.TraceConfig:
    """Tells the Watch given as `trace_request_ctx` of waiting for a place in the pool."""
    trace = aiohttp.TraceConfig()

    async def queued(_: aiohttp.ClientSession, context: SimpleNamespace, __: object) -> None:
        context.trace_request_ctx.queued()

    async def connecting(_: aiohttp.ClientSession, context: SimpleNamespace, __: object) -> None:
        context.trace_request_ctx.connecting()

    trace.on_connection_queued_start.append(queued)
    trace.on_connection_queued_end.append(connecting)
    return trace


def _trace_of_connections() -> aiohttp.TraceConfig:
    """Tells the _Attempt given as `trace_request_ctx` of a new connection."""
    trace = aiohttp.TraceConfig()

    async def made(_: aiohttp.ClientSession, context: SimpleNamespace, __: object) -> None:
        context.trace_request_ctx.made = True

    trace.on_connection_create_end.append(made)
    return trace


class _Request(aiohttp.ClientRequest):
    """A request that tells its Watch when it has a connection."""

    watch: Watch | None = None
    connect_only = False

    def send(self, conn: Connection) -> Coroutine[Any, Any, aiohttp.ClientResponse]:
        """Called by aiohttp with the connection, a new one or one from the pool."""
        if self.connect_only:
            raise _ConnectedError
        limit_interim(conn.protocol)  # of a connector that is not ours, too
        if self.watch is not None:
            self.watch.sending()
        return super().send(conn)


async def send_once(
    request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
) -> aiohttp.ClientResponse:
    """A client middleware: aiohttp never sends a request of this session a second time by itself.

    It does so otherwise with GET, HEAD, OPTIONS, TRACE, PUT and DELETE where the connection
    breaks before the head (RFC 9112 section 9.3.1 allows it), a millisecond later and in the
    same turn. Here that raises `aiohttp.ClientConnectionError`; the error as it was is its cause.

    >>> async def main() -> None:
    ...     async with aiohttp.ClientSession(middlewares=(send_once,)) as session:
    ...         ...
    """
    try:
        return await handler(request)
    except aiohttp.ClientConnectorError:
        raise  # no connection came about: aiohttp does not try again
    except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as error:
        # aiohttp knows those two by their classes, and repeats after no other.
        raise aiohttp.ClientConnectionError(str(error)) from error


async def _ask_once(
    watch: Watch, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
) -> aiohttp.ClientResponse:
    """Each request for a robots.txt has a turn of its own, and time of its own."""
    if isinstance(request, _Request):
        request.watch = watch
    return await send_once(request, handler)


async def _connect_only(
    watch: Watch, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
) -> aiohttp.ClientResponse:
    """Nothing is sent."""
    if not isinstance(request, _Request):
        raise aiohttp.ClientConnectionError("not a request of ours")
    request.watch, request.connect_only = watch, True
    return await handler(request)


async def _read(
    head: aiohttp.ClientResponse, watch: Watch, config: FetchConfig, elapsed: float | None
) -> Reply:
    outcome = classify(status=head.status, headers=head.headers, config=config)
    if not outcome.has_text or outcome is Outcome.EMPTY:
        # Row 14: the body of an error is never read, let alone parsed.
        return Reply(outcome=outcome, status=head.status, headers=head.headers, elapsed=elapsed)
    body, received, binary = await _body_of(head, watch, config)
    truncated = len(body) > config.max_body
    outcome = Outcome.NOT_TEXT if binary else judge(outcome, body, truncated=truncated)
    return Reply(
        outcome=outcome,
        status=head.status,
        headers=head.headers,
        body=body if outcome.has_text else None,
        truncated=truncated,
        received=received,
        elapsed=elapsed,
    )


async def _body_of(
    head: aiohttp.ClientResponse, watch: Watch, config: FetchConfig
) -> tuple[bytes, int, bool]:
    """(the decoded body, octets on the wire, whether it is no text).

    One octet beyond the cap is kept as the sign that the text goes on. Raises BadEncoding
    where the wire's cap is reached before that: so much padding is an attack.
    """
    if is_media(head.headers.get(CONTENT_TYPE, "")):
        head.close()
        return b"", 0, True
    decoder = Decoder(head.headers.get(CONTENT_ENCODING, ""))
    content = head.content
    body = bytearray()
    received = 0
    sniffed = False
    while not content.at_eof():
        chunk = await content.readany()
        received += len(chunk)
        watch.received(len(chunk))
        body += decoder.feed(chunk, config.max_body + 1 - len(body))
        if not sniffed and len(body) >= 1024:
            sniffed = True
            if is_binary(bytes(body[:1024])):
                head.close()
                return b"", received, True
        if len(body) > config.max_body:
            head.close()
            return bytes(body), received, False
        if received > config.max_wire:
            raise BadEncoding(f"{received} octets on the wire for {len(body)} of text")
    decoder.finish()
    whole = bytes(body)
    return whole, received, not sniffed and is_binary(whole)
