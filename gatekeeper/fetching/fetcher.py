"""`Fetcher`: one retrieval of a robots.txt, through turns, redirects and failures.

Redirects are followed by hand, so that each hop is judged before it is sent and takes the turn
of its own host. A turn is given back before the next one is asked for: holding one while waiting
for another could wait for ever. A body is decoded here and not by the HTTP client, because the
cap stands on decoded octets, and a bomb is known by what it grew to for what it cost
(docs/threat-model.md, T9).
"""

from __future__ import annotations

import asyncio
import random
import re
import weakref
import zlib
from collections.abc import Coroutine, Mapping
from types import SimpleNamespace
from typing import Any, Final

import aiohttp
import msgspec
from aiohttp.connector import Connection
from aiohttp.hdrs import CONTENT_ENCODING, CONTENT_TYPE, ETAG, LAST_MODIFIED, LOCATION, RETRY_AFTER
from msgspec.structs import replace
from yarl import URL

from gatekeeper.clock import Clock, SharedTimer
from gatekeeper.config import Config, FetchConfig, PacingConfig
from gatekeeper.errors import (
    GateClosed,
    HoldLapsed,
    InvalidURL,
    LeaseTimeout,
    LedgerLost,
    StorageError,
)
from gatekeeper.fetching.guard import FirstDial, GuardedConnector, connecting, dialling
from gatekeeper.fetching.limits import RetrievalDeadline, Slots, watching
from gatekeeper.fetching.outcomes import (
    ANSWERED,
    Known,
    Outcome,
    Refuse,
    Retrieval,
    TakeTurn,
    Validators,
    classify,
    hurried,
    is_binary,
    is_media,
    judge,
    lifetime,
    precedence,
)
from gatekeeper.http_fields import wait_of
from gatekeeper.identity import Signer
from gatekeeper.library_internals import default_proxy, limit_interim
from gatekeeper.robots.patterns import is_robots_txt
from gatekeeper.urls import Target, join, parse

_BOMB_FROM: Final = 65_536
_BOMB_RATIO: Final = 100
_GZIP_MAGIC: Final = 0x1F
_FIRST_STEP: Final = 64
"""Octets of a further member that zlib is given at first; an empty one has 20."""
_KNOWN: Final = frozenset({"", "identity", "gzip", "x-gzip", "deflate"})


class BadEncoding(Exception):
    """The body is not what its Content-Encoding says, or is a bomb (row 27)."""


class Decoder:
    """Decodes one body piece by piece; `identity`, `gzip` and `deflate`.

    >>> decoder = Decoder("identity")
    >>> decoder.feed(b"User-agent: *", 4)
    b'User'
    """

    __slots__ = (
        *("_consumed", "_ended", "_gzip", "_padding"),
        *("_plain", "_produced", "_step", "_unpacker"),
    )

    def __init__(self, encoding: str) -> None:
        """Raises BadEncoding for an encoding that we never asked for."""
        name = encoding.strip().lower()
        if name not in _KNOWN:
            raise BadEncoding(f"unknown Content-Encoding {encoding[:40]!r}")
        self._gzip = name.endswith("gzip")
        self._plain = not name or name == "identity"
        self._unpacker: zlib._Decompress | None = None
        self._ended = False
        self._padding = False
        self._step = _FIRST_STEP
        self._consumed = 0
        self._produced = 0

    def feed(self, data: bytes, room: int) -> bytes:
        """The next octets decoded, no more than `room` of them (at least 1).

        Beyond `room` nothing is kept: the caller stops there. Raises BadEncoding.
        """
        if self._plain:
            return data[:room]
        out = []
        view = memoryview(data)
        at, size = 0, len(data)
        while at < size and room > 0 and not self._padding:
            step = size - at if not self._ended else min(size - at, self._step)
            piece, taken = self._unpack(view[at : at + step], room)
            out.append(piece)
            room -= len(piece)
            at += taken
        return b"".join(out)

    def _unpack(self, data: memoryview, room: int) -> tuple[bytes, int]:
        """The octets that come of the beginning of `data`, and how much of it that was.

        zlib copies what it does not use, so of a further member it is given little at first,
        and twice as much each time that was not its end: many small members cost no more than
        one that is as long as all of them.
        """
        if self._unpacker is None:
            # gzip may go on with another member; what else follows an end is padding.
            if self._ended and not (self._gzip and data[0] == _GZIP_MAGIC):
                self._padding = True
                return b"", len(data)
            self._unpacker = zlib.decompressobj(self._window(data))
        unpacker = self._unpacker
        try:
            piece = unpacker.decompress(data, room)
        except zlib.error as error:
            raise BadEncoding(str(error)) from error
        rest = unpacker.unused_data if unpacker.eof else unpacker.unconsumed_tail
        taken = len(data) - len(rest)
        self._consumed += taken
        self._produced += len(piece)
        if self._produced > _BOMB_FROM and self._produced > _BOMB_RATIO * self._consumed:
            raise BadEncoding(f"{self._produced} octets out of {self._consumed}: a bomb")
        if unpacker.eof:
            self._unpacker = None
            self._ended = True
            self._step = _FIRST_STEP
        else:
            self._step *= 2
        return piece, taken

    def _window(self, data: memoryview) -> int:
        if self._gzip:
            return 16 + zlib.MAX_WBITS
        # "deflate" is zlib's format by the text and a bare stream by old custom.
        return zlib.MAX_WBITS if data[0] & 0x0F == 8 else -zlib.MAX_WBITS

    def finish(self) -> None:
        """The body has ended. Raises BadEncoding if the encoding had not."""
        if self._unpacker is not None:
            raise BadEncoding("the encoded stream ends in the middle")


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


class RequestSender:
    """Sends requests over the connections of a session, and nothing else of it.

    The caller's session may carry cookies, headers and middlewares, and a robots.txt is asked
    for without: so one of our own is laid over its connector, which stays its own.
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
        self._alarm = SharedTimer(clock)
        self._ssl = config.tls_errors != "accept" and config.profile != "archival"
        self._own: aiohttp.ClientSession | None = None
        self._dials_first: GuardedConnector | None = None
        """Connects to origins that were not asked before, ahead of the request."""
        self._reaching: aiohttp.ClientSession | None = None

    def watch(self) -> RetrievalDeadline:
        """For one retrieval: all its requests share the time that it has. Raises GateClosed."""
        self._session()
        config, hurry = self._config, hurried.get()
        if hurry is not None:
            config = replace(
                config,
                connect_timeout=min(config.connect_timeout, hurry.seconds),
                first_byte_timeout=min(config.first_byte_timeout, hurry.seconds),
            )
        return RetrievalDeadline(self._alarm, config, self._loop)

    def _session(self) -> aiohttp.ClientSession:
        """Our own session, made when it is first asked for.

        Raises GateClosed where the lent one is closed: a session made without a connector
        would get one that no guard knows.
        """
        own = self._own
        if own is None or self._lent.closed:
            connector = self._connector()
            self._loop = asyncio.get_running_loop()  # kept: to ask for it is a system call
            own = self._own = _laid_over(self._lent, connector, self._headers)
            # It holds nothing to be closed; but aiohttp warns of a session that is not.
            weakref.finalize(self, own.detach)
            if isinstance(connector, GuardedConnector) and not self._proxied:
                self._dials_first = connector
        return own

    @property
    def _proxied(self) -> bool:
        """There may be a proxy between us and the sites."""
        return self._lent.trust_env or any(default_proxy(self._lent).values())

    def _connector(self) -> aiohttp.BaseConnector:
        """That of the lent session. Raises GateClosed where that is closed."""
        connector = self._lent.connector
        if connector is None or self._lent.closed:
            raise GateClosed("the session that robots.txt is fetched with is closed")
        return connector

    async def ask(
        self,
        target: Target,
        headers: Mapping[str, str] | None,
        watch: RetrievalDeadline,
        *,
        first_hop: bool,
    ) -> Reply:
        """Send one GET and read its answer. Whatever goes wrong out there is an outcome.

        `headers` are those of this request alone. Raises GateClosed.
        """
        session = self._session()
        in_body = False
        head: aiohttp.ClientResponse | None = None
        first: FirstDial | None = None
        dialled: list[str] = []
        dialling.set(dialled)
        connecting.set(None)  # whoever was the first to ask is told of its own alone
        watching.set(watch)
        if (hurry := hurried.get()) is not None:
            hurry.on_request()
        try:
            with watch:
                if self._dials_first is not None and precedence.get() != ANSWERED:
                    first = await self._dials_first.dial(target)
                async with session.get(
                    URL(target.url, encoded=True),
                    headers=headers,
                    allow_redirects=False,
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
                outcome = Outcome.TOO_SLOW  # the drip, and the deadline inside the body
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
        finally:
            if first is not None:
                first.close()

    async def reach(self, target: Target, watch: RetrievalDeadline) -> bool | None:
        """Whether a connection to the target's origin comes about; no request is sent over it.

        Connections that are kept alive prove nothing and are not used. False: it failed as a
        lost uplink would make it fail. None: it can't be told, as where it was refused, or where
        a proxy stands in between. Raises GateClosed.
        """
        connector = self._connector()
        if self._proxied:
            return None
        session = self._reaching
        if session is None:
            session = self._reaching = _laid_over(
                self._lent, connector, self._headers, _trace_of_connections()
            )
            weakref.finalize(self, session.detach)
        watching.set(watch)
        for _ in range(_MOST_KEPT_ALIVE):
            attempt = _NewConnection()
            try:
                with watch:
                    async with session.get(
                        URL(target.url, encoded=True),
                        allow_redirects=False,
                        middlewares=(_connect_only,),
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


class _NewConnection:
    """One attempt to connect."""

    made = False
    """A new connection came about."""


class _ConnectedError(Exception):
    """Raised in place of sending a request: there is a connection, which aiohttp closes now."""


def _laid_over(
    lent: aiohttp.ClientSession,
    connector: aiohttp.BaseConnector,
    headers: Mapping[str, str],
    trace: aiohttp.TraceConfig | None = None,
) -> aiohttp.ClientSession:
    proxy = default_proxy(lent)
    # Only in a bounded pool is there a queue to hear of.
    if trace is None and (connector.limit or connector.limit_per_host):
        trace = _trace_of_queue()
    return aiohttp.ClientSession(
        connector=connector,
        connector_owner=False,
        headers=headers,
        cookie_jar=aiohttp.DummyCookieJar(),
        request_class=_Request,
        response_class=FirstAnswer,
        trace_configs=None if trace is None else [trace],
        trust_env=lent.trust_env,
        auto_decompress=False,
        timeout=_NO_LIMITS,
        # `FirstAnswer` does not see what a proxy says before it passes anything on.
        middlewares=(send_once,) if lent.trust_env or any(proxy.values()) else (),
        **proxy,
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
    """Tells the _NewConnection given as `trace_request_ctx` of a new connection."""
    trace = aiohttp.TraceConfig()

    async def made(_: aiohttp.ClientSession, context: SimpleNamespace, __: object) -> None:
        context.trace_request_ctx.made = True

    trace.on_connection_create_end.append(made)
    return trace


class _Request(aiohttp.ClientRequest):
    """A request that tells the deadline of its context when it has a connection."""

    connect_only = False

    def send(self, conn: Connection) -> Coroutine[Any, Any, aiohttp.ClientResponse]:
        """Called by aiohttp with the connection, a new one or one from the pool."""
        if self.connect_only:
            raise _ConnectedError
        limit_interim(conn.protocol)  # of a connector that is not ours, too
        if (watch := watching.get()) is not None:
            watch.sending()
        return super().send(conn)


class FirstAnswer(aiohttp.ClientResponse):
    """What `send_once` does for the requests of a session, for less: no second one is sent."""

    async def start(self, connection: Connection) -> aiohttp.ClientResponse:
        """Read the head."""
        try:
            return await super().start(connection)
        except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as error:
            raise aiohttp.ClientConnectionError(str(error)) from error


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


async def _connect_only(
    request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
) -> aiohttp.ClientResponse:
    """Nothing is sent."""
    if not isinstance(request, _Request):
        raise aiohttp.ClientConnectionError("not a request of ours")
    request.connect_only = True
    return await handler(request)


async def _read(
    head: aiohttp.ClientResponse,
    watch: RetrievalDeadline,
    config: FetchConfig,
    elapsed: float | None,
) -> Reply:
    outcome = classify(status=head.status, headers=head.headers, config=config)
    if not outcome.has_text or outcome is Outcome.EMPTY:
        # The body of an error is never read, let alone parsed.
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
    head: aiohttp.ClientResponse, watch: RetrievalDeadline, config: FetchConfig
) -> tuple[bytes, int, bool]:
    """(the decoded body, octets on the wire, whether it is no text).

    One octet beyond the cap is kept as the sign that the text goes on. Raises BadEncoding
    where the wire's cap is reached before that: so much padding is an attack.
    """
    if is_media(head.headers.get(CONTENT_TYPE, "")):
        head.close()
        return b"", 0, True
    encoding = head.headers.get(CONTENT_ENCODING)
    decoder = Decoder(encoding) if encoding else None
    content = head.content
    body = bytearray()
    received = 0
    sniffed = False
    while not content.at_eof():
        chunk = await content.readany()
        received += len(chunk)
        watch.received(len(chunk))
        room = config.max_body + 1 - len(body)
        body += chunk[:room] if decoder is None else decoder.feed(chunk, room)
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
    if decoder is not None:
        decoder.finish()
    whole = bytes(body)
    return whole, received, not sniffed and is_binary(whole)


_ACCEPT: Final = "text/plain, text/*;q=0.9, */*;q=0.1"
_ENCODING: Final = "gzip, deflate"  # no other: the cap stands on decoded octets
_RATE_LIMIT: Final = type(ETAG)("RateLimit")
_MOST_LAPSED = 3
_PATH: Final = "/robots.txt"
_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_MAX_VALIDATOR: Final = 1_024
"""Octets of an ETag or a date that are kept: they come back with every refresh."""


class Fetcher:
    """Retrieves robots.txt files; keeps nothing of them.

    `session` lends its connections alone: no cookies, default headers or middlewares.
    `take_turn(target)` gives the turn of its host. `refuse(url)` is the guard's word about a
    redirect: None, or what is wrong. `known(origin)` is what is fresh about another origin to whose
    /robots.txt a redirect leads.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        *,
        user_agent: str,
        config: Config,
        clock: Clock,
        rng: random.Random,
        take_turn: TakeTurn,
        refuse: Refuse | None = None,
        known: Known | None = None,
        signer: Signer | None = None,
    ) -> None:
        self._session, self._signer = session, signer
        self._config, self._clock, self._rng = config.fetch, clock, rng
        self._take_turn = take_turn
        self._refuse, self._known = refuse, known
        self._slots = Slots(
            clock, config.fetch.max_concurrent, max_in_flight=config.pacing.max_in_flight
        )
        self._longest_wait = config.pacing.backoff_max
        self._sender = RequestSender(
            session, headers=_headers(user_agent, config.fetch), config=config.fetch, clock=clock
        )

    def adjust(self, pacing: PacingConfig) -> None:
        """Follow other settings of `[pacing]`."""
        self._longest_wait = pacing.backoff_max
        self._slots.adjust(pacing.max_in_flight)

    async def fetch(self, origin: str, validators: Validators | None = None) -> Retrieval:
        """Ask for the origin's robots.txt. Whatever goes wrong out there is an outcome.

        With `validators` the request is conditional (RFC 9110 section 13.1, HTTP-01).
        """
        try:
            retrieval = await _Redirects(self, origin, validators).run()
        except LeaseTimeout as error:  # too many wait for turns
            return Retrieval(outcome=Outcome.OVERLOADED, detail=str(error))
        except StorageError as error:
            return Retrieval(outcome=Outcome.STORAGE, detail=str(error))
        except LedgerLost as error:
            return Retrieval(outcome=Outcome.FLEET, detail=str(error))
        except GateClosed as error:
            return Retrieval(outcome=Outcome.OURS, detail=str(error))
        if self._session.closed and not retrieval.outcome.good:
            return Retrieval(outcome=Outcome.OURS, detail="the session was closed meanwhile")
        return retrieval

    async def reach(self, origin: str) -> bool | None:
        """Whether a new connection to the origin comes about; nothing is requested over it.

        It takes no turn and starts no clock. False: it failed as a lost uplink would make it
        fail. None: it can't be told, as where it was refused, or where a proxy stands in
        between.
        """
        try:
            return await self._sender.reach(parse(origin + _PATH), self._sender.watch())
        except GateClosed:
            return None

    def _wait_of(self, headers: Mapping[str, str]) -> float | None:
        """Seconds that an answer asks to wait, `pacing.backoff_max` at the most.

        A page's Retry-After is obeyed as it stands (RFC 9110 section 10.2.3, HTTP-08). That of a
        robots.txt would keep the whole host closed, the file that could say otherwise included:
        one mistaken year must not outlast its repair.
        """
        seconds = wait_of(headers, self._clock.wall())
        return None if seconds is None else min(seconds, self._longest_wait)


class _Redirects:
    """One retrieval on its way."""

    __slots__ = (
        *("_encoding", "_fetcher", "_hops", "_origin", "_retried"),
        *("_start", "_target", "_validators", "_wait", "_watch"),
    )

    def __init__(self, fetcher: Fetcher, origin: str, validators: Validators | None) -> None:
        self._fetcher, self._origin, self._validators = fetcher, origin, validators
        self._target: Target = parse(origin + _PATH)
        self._hops: list[str] = []
        self._start = self._target.url
        self._watch = fetcher._sender.watch()
        self._encoding = _ENCODING
        self._retried = False
        self._wait: float | None = None
        """Seconds that the latest reply asks to wait."""

    async def run(self) -> Retrieval:
        lapsed = 0
        while True:
            try:
                reply = self._not_modified(await self._ask())
            except HoldLapsed:  # nothing was sent: in another turn, but not for ever
                if (lapsed := lapsed + 1) > _MOST_LAPSED:
                    raise
                continue
            if reply.outcome.row.retry and not self._retried:
                self._retried = True
                if reply.outcome is Outcome.BAD_ENCODING:
                    self._encoding = "identity"
                self._validators = None
                continue
            if reply.outcome is not Outcome.REDIRECT:
                return self._arrived(reply)
            if (ended := self._follow(reply)) is not None:
                return ended

    async def _ask(self) -> Reply:
        """Take the turn of the hop's host, send the request, give the turn back."""
        fetcher = self._fetcher
        target, url = self._target, self._target.url
        async with fetcher._slots.with_turn(fetcher._take_turn(target)) as turn:
            reply = await fetcher._sender.ask(
                target, self._own_headers(url), self._watch, first_hop=not self._hops
            )
            fetcher._slots.ended(answered=reply.status is not None)
            headers = reply.headers
            told = RETRY_AFTER in headers or _RATE_LIMIT in headers
            self._wait = fetcher._wait_of(headers) if told else None
            turn.report(status=reply.status, elapsed=reply.elapsed, retry_after=self._wait)
        return reply

    def _own_headers(self, url: str) -> dict[str, str] | None:
        """Those that this request has beside, or instead of, the usual ones."""
        signer = self._fetcher._signer
        headers = {} if signer is None else signer.headers("GET", url)  # now, as it leaves
        if self._encoding is not _ENCODING:
            headers["Accept-Encoding"] = self._encoding
        validators = self._validators
        if validators is not None and validators.url == url:
            if validators.etag:
                headers["If-None-Match"] = validators.etag
            if validators.last_modified:
                headers["If-Modified-Since"] = validators.last_modified
        return headers or None

    def _not_modified(self, reply: Reply) -> Reply:
        """Row 9: a 304 means something only in answer to a condition of ours."""
        if reply.outcome is not Outcome.NOT_MODIFIED:
            return reply
        validators = self._validators
        if validators is not None and validators.url == self._target.url:
            return reply
        return msgspec.structs.replace(reply, outcome=Outcome.NOT_MODIFIED_NOTHING)

    def _follow(self, reply: Reply) -> Retrieval | None:
        """Take the redirect; a retrieval if the journey ends with it."""
        try:
            target = self._location(reply.headers.get(LOCATION, ""))
        except InvalidURL:
            return self._ended(Outcome.BAD_REDIRECT, reply)
        if target is None:
            return self._ended(Outcome.EGRESS_POLICY, reply)
        been_there = target.url == self._start or target.url in self._hops
        if been_there or len(self._hops) >= self._fetcher._config.max_redirects:
            if self._fetcher._config.too_many_redirects == "absent":
                return self._ended(Outcome.TOO_MANY_REDIRECTS, reply)
            return self._ended(Outcome.REDIRECTED_AWAY, reply)
        self._hops.append(target.url)
        self._target = target
        return self._consult(target)

    def _location(self, reference: str) -> Target | None:
        """Where a Location leads; None where we don't go. Raises InvalidURL."""
        reference = reference.strip(" \t")
        if not reference:
            raise InvalidURL("", "no Location")
        scheme = _SCHEME.match(reference)
        if scheme is not None and scheme[0].lower() not in {"http:", "https:"}:
            return None
        # An absolute one must stand by itself: `http:` without a host is no URL.
        target = join(self._target, reference) if scheme is None else parse(reference)
        if target.userinfo:  # refused as the guard would, and never sent
            return None
        if self._fetcher._refuse is not None and self._fetcher._refuse(target.url) is not None:
            return None
        return target

    def _consult(self, target: Target) -> Retrieval | None:
        """Another origin's own robots.txt: what is fresh of it need not be asked for again."""
        known = self._fetcher._known
        if known is None or not is_robots_txt(target.path) or target.origin == self._origin:
            return None
        fresh = known(target.origin)
        if fresh is None:
            return None
        return msgspec.structs.replace(
            fresh, hops=(*self._hops, *fresh.hops), url=target.url, took=self._watch.used
        )

    def _arrived(self, reply: Reply) -> Retrieval:
        now = self._fetcher._clock.wall()
        headers = reply.headers
        etag, last_modified = headers.get(ETAG), headers.get(LAST_MODIFIED)
        return Retrieval(
            outcome=reply.outcome,
            status=reply.status,
            hops=tuple(self._hops),
            url=self._target.url,
            body=reply.body,
            etag=_sendable(etag) if etag else None,
            last_modified=_sendable(last_modified) if last_modified else None,
            lifetime=lifetime(headers, now),
            retry_after=self._wait,
            took=self._watch.used,
            truncated=reply.truncated,
            received=reply.received,
            detail=reply.detail,
            addresses=reply.addresses,
        )

    def _ended(self, outcome: Outcome, reply: Reply) -> Retrieval:
        """The journey ends with a redirect that is not taken."""
        return msgspec.structs.replace(
            self._arrived(reply), outcome=outcome, body=None, etag=None, last_modified=None
        )


def _headers(user_agent: str, config: FetchConfig) -> dict[str, str]:
    """The header fields of every request."""
    headers = {"User-Agent": user_agent, "Accept": _ACCEPT, "Accept-Encoding": _ENCODING}
    if config.from_address:
        headers["From"] = config.from_address  # RFC 9110 section 10.1.5 (HTTP-12)
    return headers


def _sendable(value: str) -> str | None:
    """A validator that can be kept and sent back: octets that are no text can't."""
    if len(value) <= _MAX_VALIDATOR and value.isascii() and value.isprintable():
        return value
    return None
