"""`Fetcher`: retrieves a robots.txt through leases, redirects and failures.

Redirects are followed here, not by aiohttp, so that each hop is judged before it is sent and takes
a lease of its own host. A lease is released before the next one is acquired: holding one while
waiting for another could deadlock. Bodies are decoded here too, because the limit applies to
decoded octets, and a decompression bomb is detected by its ratio (docs/threat-model.md, T9).
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Coroutine, Mapping
from contextlib import AbstractAsyncContextManager
from types import SimpleNamespace
from typing import Any, Final

import aiohttp
import msgspec
from aiohttp.connector import Connection
from aiohttp.hdrs import CONTENT_ENCODING, CONTENT_TYPE, ETAG, LAST_MODIFIED, LOCATION
from yarl import URL

from gatekeeper.clock import Clock
from gatekeeper.config import Config, PacingConfig
from gatekeeper.errors import (
    GateClosed,
    HoldLapsed,
    InvalidURL,
    LeaseTimeout,
    LedgerLost,
    StorageError,
)
from gatekeeper.fetching.guard import connecting
from gatekeeper.fetching.limits import RetrievalDeadline, Slots, current_deadline
from gatekeeper.fetching.outcomes import (
    NO_METADATA,
    AcquireLease,
    Known,
    Outcome,
    Refuse,
    RequestSigner,
    Retrieval,
    Validators,
    age_of,
    classify_body,
    classify_error,
    classify_head,
    is_binary,
    is_media,
    is_plain_text,
    metadata_of,
    probe_limits,
)
from gatekeeper.fetching.tls import failure_text
from gatekeeper.http_fields import wait_of
from gatekeeper.library_internals import HEAD_LIMITS, default_proxy, limit_heads
from gatekeeper.robots.patterns import is_robots_txt
from gatekeeper.robots.signals import field_values
from gatekeeper.urls import Target, parse, printable, redirected

_MIN_BOMB_OCTETS: Final = 65_536
_BOMB_RATIO: Final = 100
_GZIP_MAGIC: Final = 0x1F
_PIECE: Final = 96
"""Octets that zlib gets at a time. It copies those behind the end of a gzip member, so with longer
pieces many small members would take quadratic time."""
_MAX_CODINGS: Final = 4
"""Codings of one body that are undone; no real site applies more than two."""
_DECODED: Final = frozenset({"gzip", "x-gzip", "deflate"})
_REGISTERED: Final = _DECODED | {
    *("identity", "aes128gcm", "br", "compress", "dcb", "dcz", "exi", "pack200-gzip"),
    *("x-compress", "zstd"),
}
"""The HTTP Content Coding Registry of IANA."""


class BadEncoding(Exception):
    """The body does not match its Content-Encoding, or is a decompression bomb (row 27)."""


class Decoder:
    """An incremental decoder of one body by the list of its Content-Encoding.

    >>> decoder = Decoder("identity, utf-8")
    >>> decoder.feed(b"User-agent: *", 4), decoder.unregistered
    (b'User', 'utf-8')
    """

    def __init__(self, encoding: str, max_octets: int = 1_048_576) -> None:
        """`max_octets`: the limit of what each coding but the innermost may produce. Raises
        BadEncoding for a coding that was not requested."""
        names = [name for part in encoding.split(",") if (name := part.strip(" \t").lower())]
        # The last one was applied last (RFC 9110 section 8.4), so it is undone first.
        codings = [name for name in reversed(names) if name in _REGISTERED if name != "identity"]
        if not _DECODED.issuperset(codings) or len(codings) > _MAX_CODINGS:
            raise BadEncoding(f"unknown Content-Encoding {encoding[:40]!r}")
        self.unregistered: str = next((name for name in names if name not in _REGISTERED), "")
        """A token that is no coding: the body is the text itself, or of an unknown format."""
        self._max_octets = max_octets
        self._steps = [_Unpacking(name.endswith("gzip")) for name in codings]

    def feed(self, data: bytes, room: int) -> bytes:
        """Decode the next octets and return at most `room` (at least 1) of the result.

        Further octets are discarded: the caller stops there. Raises BadEncoding.
        """
        for step in self._steps[:-1]:
            data = step.feed(data, self._max_octets + 1)
            if step.produced > self._max_octets:
                raise BadEncoding(f"more than {self._max_octets} octets of compressed data")
        return self._steps[-1].feed(data, room) if self._steps else data[:room]

    def finish(self) -> None:
        """Call at the end of the body. Raises BadEncoding if the encoded stream is incomplete."""
        if any(step.unpacker is not None for step in self._steps):
            raise BadEncoding("the encoded stream is incomplete")


class _Unpacking:
    """Undoes one coding: gzip, or deflate."""

    def __init__(self, gzip: bool) -> None:
        self._gzip = gzip
        self.unpacker: zlib._Decompress | None = None
        """None before the first octet, and after the end of a gzip member."""
        self._padding = False
        self._consumed = 0
        self.produced = 0

    def feed(self, data: bytes, room: int) -> bytes:
        """See `Decoder.feed`."""
        out = []
        view = memoryview(data)
        at = 0
        while at < len(data) and room > 0 and not self._padding:
            piece, taken = self._unpack(view[at : at + _PIECE], room)
            out.append(piece)
            room -= len(piece)
            at += taken
        # Not for each piece: a text may repeat itself at its start, and a chunk is short.
        if self.produced > _MIN_BOMB_OCTETS and self.produced > _BOMB_RATIO * self._consumed:
            raise BadEncoding(f"decompression bomb: {self.produced} octets from {self._consumed}")
        return b"".join(out)

    def _unpack(self, data: memoryview, room: int) -> tuple[bytes, int]:
        """Decode the start of `data`. Return the decoded octets, and how many were consumed."""
        if self.unpacker is None:
            # gzip may continue with another member; anything else after the end is padding.
            if self._consumed and not (self._gzip and data[0] == _GZIP_MAGIC):
                self._padding = True
                return b"", len(data)
            self.unpacker = zlib.decompressobj(self._window(data))
        unpacker = self.unpacker
        try:
            piece = unpacker.decompress(data, room)
        except zlib.error as error:
            raise BadEncoding(str(error)) from error
        rest = unpacker.unused_data if unpacker.eof else unpacker.unconsumed_tail
        taken = len(data) - len(rest)
        self._consumed += taken
        self.produced += len(piece)
        if unpacker.eof:
            self.unpacker = None
        return piece, taken

    def _window(self, data: memoryview) -> int:
        if self._gzip:
            return 16 + zlib.MAX_WBITS
        # "deflate" is zlib's format by the standard, and a raw stream from some old servers.
        return zlib.MAX_WBITS if data[0] & 0x0F == 8 else -zlib.MAX_WBITS


_NO_TIMEOUTS: Final = aiohttp.ClientTimeout(total=None, sock_connect=None)
_MAX_KEPT_ALIVE: Final = 8
"""Kept-alive connections that `reach` closes at most, one after another, to get a new one."""


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one request."""

    outcome: Outcome
    status: int | None = None
    headers: Mapping[str, str] = {}
    body: bytes | None = None
    elapsed: float | None = None
    """Seconds from sending the request to the response head."""
    coding: str = ""
    """`Metadata.coding` of the response."""
    detail: str = ""
    addresses: tuple[str, ...] = ()


class _ConnectedError(Exception):
    """Raised instead of sending a request on a connection, which aiohttp then closes."""


def _trace() -> aiohttp.TraceConfig:
    """Reports waiting for a place in the pool, and a new connection, to the deadline given as
    `trace_request_ctx`."""
    trace = aiohttp.TraceConfig()

    async def queued(_: aiohttp.ClientSession, context: SimpleNamespace, __: object) -> None:
        context.trace_request_ctx.queued()

    async def connecting(_: aiohttp.ClientSession, context: SimpleNamespace, __: object) -> None:
        context.trace_request_ctx.connecting()

    async def made(_: aiohttp.ClientSession, context: SimpleNamespace, __: object) -> None:
        context.trace_request_ctx.connected = True

    trace.on_connection_queued_start.append(queued)
    trace.on_connection_queued_end.append(connecting)
    trace.on_connection_create_end.append(made)
    return trace


class _Request(aiohttp.ClientRequest):
    """A request that notifies the deadline of its context when it has a connection."""

    def send(self, conn: Connection) -> Coroutine[Any, Any, aiohttp.ClientResponse]:
        """Called by aiohttp with a connection, new or from the pool."""
        limit_heads(conn.protocol)  # the connector may be the caller's, not a guarded one
        if (deadline := current_deadline.get()) is not None:
            if deadline.connect_only:
                raise _ConnectedError
            deadline.sending()
        return super().send(conn)


class FirstAnswer(aiohttp.ClientResponse):
    """A response class that does what `send_once` does, at less cost: no request is repeated."""

    async def start(self, connection: Connection) -> aiohttp.ClientResponse:
        """Read the response head."""
        try:
            return await super().start(connection)
        except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as error:
            raise aiohttp.ClientConnectionError(str(error)) from error


async def send_once(
    request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
) -> aiohttp.ClientResponse:
    """A client middleware that prevents aiohttp from repeating requests by itself.

    aiohttp repeats GET, HEAD, OPTIONS, TRACE, PUT and DELETE if the connection breaks before the
    head (RFC 9112 section 9.3.1 allows it), a millisecond later and under the same lease. With this
    middleware it raises `aiohttp.ClientConnectionError` instead, caused by the original error.

    >>> async def main() -> None:
    ...     async with aiohttp.ClientSession(middlewares=(send_once,)) as session:
    ...         ...
    """
    try:
        return await handler(request)
    except aiohttp.ClientConnectorError:
        raise  # no connection was made: aiohttp does not repeat the request
    except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as error:
        # aiohttp repeats a request after errors of these two classes only.
        raise aiohttp.ClientConnectionError(str(error)) from error


_ACCEPT: Final = "text/plain, text/*;q=0.9, */*;q=0.1"
_ACCEPT_ENCODING: Final = "gzip, deflate"  # those that `Decoder` knows
_MAX_LAPSED_HOLDS: Final = 3
"""Retries of a hop whose hold lapsed before the request was sent."""
_PATH: Final = "/robots.txt"
_MAX_VALIDATOR: Final = 1_024
"""The maximum length of an ETag or a date to store, as it is sent with every refresh."""


_NOT_ASKED: Final = {
    LeaseTimeout: Outcome.OVERLOADED,  # too many waiters for leases
    StorageError: Outcome.STORAGE,
    LedgerLost: Outcome.FLEET,
    GateClosed: Outcome.OURS,
}
"""What keeps a request from being sent."""


class Fetcher:
    """Retrieves robots.txt files; caches nothing.

    Of `session` only the connections are used: its cookies, headers and middlewares must not apply
    to a robots.txt. So a second session is made that borrows its connector.
    `acquire(target)` acquires a lease of its host. `refuse(url)` is the guard's judgement of a
    redirect: None, or what is wrong. `known(origin)` returns the fresh retrieval of another origin
    to whose /robots.txt a redirect leads, or None.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        *,
        user_agent: str,
        config: Config,
        clock: Clock,
        acquire: AcquireLease,
        refuse: Refuse | None = None,
        known: Known | None = None,
        signer: RequestSigner | None = None,
    ) -> None:
        self._lent = session
        self._headers = {
            "User-Agent": user_agent,
            "Accept": _ACCEPT,
            "Accept-Encoding": _ACCEPT_ENCODING,
        }
        if config.fetch.from_address:  # RFC 9110 section 10.1.5 (HTTP-12)
            self._headers["From"] = config.fetch.from_address
        self._config = config.fetch
        self._clock = clock
        self._acquire = acquire
        self._refuse = refuse
        self._known = known
        self._signer = signer
        self._slots = Slots(
            clock, config.fetch.max_concurrent, max_in_flight=config.pacing.max_in_flight
        )
        self._max_wait = config.pacing.backoff_max
        self._ssl = self._config.tls_errors != "accept" and self._config.profile != "archival"
        self._own_session: aiohttp.ClientSession | None = None

    def adjust(self, pacing: PacingConfig) -> None:
        """Apply changed settings of `[pacing]`."""
        self._max_wait = pacing.backoff_max
        self._slots.adjust(pacing.max_in_flight)

    def close(self) -> None:
        """Cancel the timer, once every retrieval has ended."""
        self._slots.timer.cancel()

    async def fetch(self, origin: str, validators: Validators | None = None) -> Retrieval:
        """Retrieve the origin's robots.txt. Every failure becomes an outcome.

        With `validators` the request is conditional (RFC 9110 section 13.1, HTTP-01).
        """
        try:
            retrieval = await _Redirects(self, origin, validators).run()
        except (LeaseTimeout, StorageError, LedgerLost, GateClosed) as error:
            outcome = next(of for kind, of in _NOT_ASKED.items() if isinstance(error, kind))
            return Retrieval(outcome=outcome, detail=str(error))
        if self._lent.closed and not retrieval.outcome.good:
            return Retrieval(outcome=Outcome.OURS, detail="the session was closed meanwhile")
        return retrieval

    async def reach(self, origin: str) -> bool | None:
        """Test whether a new connection to the origin can be made, without a request.

        It takes no lease and starts no clock. Return False if it failed as it would with a lost
        uplink, and None if that is unknown: the connection was refused, or goes through a proxy.
        Kept-alive connections prove nothing and are not used.
        """
        if self._proxied:
            return None
        try:
            deadline = self.new_deadline()
        except GateClosed:
            return None
        deadline.connect_only = True
        for _ in range(_MAX_KEPT_ALIVE):
            try:
                with deadline:
                    async with self._get(origin + _PATH, deadline):
                        return None  # pragma: no cover - `send` raises
            except _ConnectedError:
                if deadline.connected:
                    return True
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                return False if classify_error(error, connected=False).row.local else None
        return None

    def new_deadline(self) -> RetrievalDeadline:
        """Return the deadline that all requests of one retrieval share. Raises GateClosed."""
        self._session()
        deadline = RetrievalDeadline(self._slots.timer, self._config)
        if (limits := probe_limits.get()) is not None:
            deadline.most = limits.seconds
        return deadline

    def _session(self) -> aiohttp.ClientSession:
        """Return the second session, which is created on first use.

        Raises GateClosed if the given session is closed: a session without that connector would
        create an unguarded one.
        """
        lent = self._lent
        if lent.connector is None or lent.closed:
            raise GateClosed("the session that robots.txt is fetched with is closed")
        if self._own_session is None:
            self._own_session = session = aiohttp.ClientSession(
                connector=lent.connector,
                connector_owner=False,
                headers=self._headers,
                cookie_jar=aiohttp.DummyCookieJar(),
                request_class=_Request,
                trace_configs=[_trace()],
                trust_env=lent.trust_env,
                auto_decompress=False,
                timeout=_NO_TIMEOUTS,
                middlewares=(send_once,),
                **default_proxy(lent),
                **HEAD_LIMITS,
            )
            # It owns nothing that needs closing, but aiohttp warns about unclosed sessions.
            weakref.finalize(self, session.detach)
        return self._own_session

    def _get(
        self, url: str, deadline: RetrievalDeadline, headers: Mapping[str, str] | None = None
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """Send one GET. Raises GateClosed."""
        current_deadline.set(deadline)
        return self._session().get(
            URL(url, encoded=True),
            headers=headers,
            allow_redirects=False,
            ssl=self._ssl,
            trace_request_ctx=deadline,
        )

    @property
    def _proxied(self) -> bool:
        """True if requests may go through a proxy."""
        return self._lent.trust_env or any(default_proxy(self._lent).values())

    async def ask(
        self,
        target: Target,
        headers: Mapping[str, str] | None,
        deadline: RetrievalDeadline,
        *,
        first_hop: bool,
    ) -> Reply:
        """Send one GET and read its response. Failures outside this process become an outcome.

        `headers` are added for this request only. Raises GateClosed.
        """
        head: aiohttp.ClientResponse | None = None
        connecting.set(None)  # inherited from the first caller, who expects its own dials only
        if (limits := probe_limits.get()) is not None:
            limits.on_request()
        try:
            with deadline:
                async with self._get(target.url, deadline, headers) as head:
                    return await self._read_reply(head, deadline)
        except (aiohttp.ClientError, OSError, TimeoutError, BadEncoding) as error:
            if isinstance(error, BadEncoding):
                outcome = Outcome.BAD_ENCODING
            elif isinstance(error, TimeoutError) and head is not None:
                outcome = Outcome.TOO_SLOW  # too low a rate, or the deadline inside the body
            else:
                outcome = classify_error(error, first_hop=first_hop, connected=deadline.connected)
            return Reply(
                outcome=outcome,
                status=None if head is None else head.status,
                headers={} if head is None else head.headers,
                detail=failure_text(error),
                addresses=tuple(deadline.addresses),
            )

    async def _read_reply(self, head: aiohttp.ClientResponse, deadline: RetrievalDeadline) -> Reply:
        elapsed, config = deadline.reading(), self._config
        outcome = classify_head(head.status, head.headers, config=config)
        if not outcome.has_text or outcome is Outcome.EMPTY:
            # The body of an error is never read.
            return Reply(outcome=outcome, status=head.status, headers=head.headers, elapsed=elapsed)
        body, binary, coding = await self._read_body(head, deadline)
        truncated = len(body) > config.max_body
        outcome = Outcome.NOT_TEXT if binary else classify_body(outcome, body, truncated=truncated)
        return Reply(
            outcome=outcome,
            status=head.status,
            headers=head.headers,
            body=body if outcome.has_text else None,
            elapsed=elapsed,
            coding=coding,
        )

    async def _read_body(
        self, head: aiohttp.ClientResponse, deadline: RetrievalDeadline
    ) -> tuple[bytes, bool, str]:
        """Return the decoded body, whether it is not a text, and its `Metadata.coding`.

        The body has one octet more than the limit if the text is longer. Raises BadEncoding if the
        limit of received octets is reached before that: so much padding is an attack.
        """
        if is_media(head.headers.get(CONTENT_TYPE, "")):
            head.close()
            return b"", True, ""
        config, content = self._config, head.content
        encoding = ",".join(field_values(head.headers, CONTENT_ENCODING))
        decoder = Decoder(encoding, config.max_wire)
        unregistered = decoder.unregistered
        body = bytearray()
        received = 0
        sniffed = bool(unregistered)  # such a body is never just binary data: see below
        while not content.at_eof():
            chunk = await content.readany()
            received += len(chunk)
            deadline.received(len(chunk))
            room = config.max_body + 1 - len(body)
            body += decoder.feed(chunk, room)
            if not sniffed and len(body) >= 1024:
                sniffed = True
                if is_binary(bytes(body[:1024])):
                    head.close()
                    return b"", True, ""
            if len(body) > config.max_body:
                head.close()
                break
            if received > config.max_wire:
                raise BadEncoding(f"{received} octets received for {len(body)} of text")
        else:
            decoder.finish()
        whole = bytes(body)
        # HTTP-14: without its coding anything else than a text could hide rules, and open the site.
        if unregistered and not is_plain_text(whole, config.max_body):
            raise BadEncoding(f"no text under the unknown Content-Encoding {encoding[:40]!r}")
        return whole, not sniffed and is_binary(whole), printable(unregistered, 40)

    def _wait_of(self, headers: Mapping[str, str]) -> float | None:
        """Return the seconds that a response asks to wait, at most `pacing.backoff_max`, or None.

        A page's Retry-After is obeyed without that limit (RFC 9110 section 10.2.3, HTTP-08). A
        robots.txt's would block the whole host, including the file that could correct it: a
        Retry-After of a year, by mistake, must not outlast its repair.
        """
        seconds = wait_of(headers, self._clock.wall())
        return None if seconds is None else min(seconds, self._max_wait)


class _Redirects:
    """One retrieval and its redirects."""

    def __init__(self, fetcher: Fetcher, origin: str, validators: Validators | None) -> None:
        self._fetcher = fetcher
        self._origin = origin
        self._validators = validators
        self._target: Target = parse(origin + _PATH)
        self._hops: list[str] = []
        self._start = self._target.url
        self._deadline = fetcher.new_deadline()
        self._encoding = _ACCEPT_ENCODING
        self._retried = False
        self._wait: float | None = None
        """Seconds that the latest reply asks to wait; None: it does not ask."""

    async def run(self) -> Retrieval:
        lapsed = 0
        while True:
            try:
                reply = self._check_not_modified(await self._ask())
            except HoldLapsed:  # nothing was sent: retry under another lease, a few times
                if (lapsed := lapsed + 1) > _MAX_LAPSED_HOLDS:
                    raise
                continue
            if reply.outcome.row.retry and not self._retried:
                self._retried = True
                if reply.outcome is Outcome.BAD_ENCODING:
                    self._encoding = "identity"
                self._validators = None
                continue
            if reply.outcome is not Outcome.REDIRECT:
                return self._result(reply)
            if (ended := self._follow(reply)) is not None:
                return ended

    async def _ask(self) -> Reply:
        """Acquire a lease of the hop's host, send the request and release the lease."""
        fetcher = self._fetcher
        target, url = self._target, self._target.url
        async with fetcher._slots.with_lease(fetcher._acquire(target)) as lease:
            reply = await fetcher.ask(
                target, self._request_headers(url), self._deadline, first_hop=not self._hops
            )
            fetcher._slots.ended(answered=reply.status is not None)
            self._wait = fetcher._wait_of(reply.headers)
            lease.report(status=reply.status, elapsed=reply.elapsed, retry_after=self._wait)
        return reply

    def _request_headers(self, url: str) -> dict[str, str] | None:
        """Return the headers that this request has in addition to the session's, or None."""
        signer = self._fetcher._signer
        # Signed as late as possible, as a signature has a time.
        headers = {} if signer is None else signer.headers("GET", url)
        if self._encoding is not _ACCEPT_ENCODING:
            headers["Accept-Encoding"] = self._encoding
        validators = self._validators
        if validators is not None and validators.url == url:
            if validators.etag:
                headers["If-None-Match"] = validators.etag
            if validators.last_modified:
                headers["If-Modified-Since"] = validators.last_modified
        return headers or None

    def _check_not_modified(self, reply: Reply) -> Reply:
        """Apply row 9: a 304 is valid only as the response to a conditional request.

        One with another ETag, or without one and with another Last-Modified, is about another text
        than the cached one, and must not renew that (RFC 9111 section 4.3.4, HTTP-01).
        """
        if reply.outcome is not Outcome.NOT_MODIFIED:
            return reply
        sent = self._validators
        if sent is not None and sent.url == self._target.url:
            cached, validator = sent.etag or "", reply.headers.get(ETAG, "")
            if not (cached and validator):
                cached, validator = sent.last_modified or "", reply.headers.get(LAST_MODIFIED, "")
            if not (cached and validator) or _weak(cached) == _weak(validator):
                return reply
        return msgspec.structs.replace(reply, outcome=Outcome.NOT_MODIFIED_NOTHING)

    def _follow(self, reply: Reply) -> Retrieval | None:
        """Follow a redirect. Return the retrieval if it ends here, else None."""
        try:
            target = self._location(reply.headers.get(LOCATION, ""))
        except InvalidURL:
            return self._end_at_redirect(Outcome.BAD_REDIRECT, reply)
        if target is None:
            return self._end_at_redirect(Outcome.EGRESS_POLICY, reply)
        visited = target.url == self._start or target.url in self._hops
        if visited or len(self._hops) >= self._fetcher._config.max_redirects:
            if self._fetcher._config.too_many_redirects == "absent":
                return self._end_at_redirect(Outcome.TOO_MANY_REDIRECTS, reply)
            return self._end_at_redirect(Outcome.REDIRECTED_AWAY, reply)
        self._hops.append(target.url)
        self._target = target
        return self._cached_retrieval(target)

    def _location(self, reference: str) -> Target | None:
        """Return the target of a Location, or None if it is refused. Raises InvalidURL."""
        if not reference.strip(" \t"):
            raise InvalidURL("", "no Location")
        target = parse(redirected(self._target.url, reference))
        if target.userinfo:  # refused as the guard does
            return None
        if self._fetcher._refuse is not None and self._fetcher._refuse(target.url) is not None:
            return None
        return target

    def _cached_retrieval(self, target: Target) -> Retrieval | None:
        """Return the fresh retrieval if the redirect leads to another origin's /robots.txt that is
        cached, else None."""
        known = self._fetcher._known
        if known is None or not is_robots_txt(target.path) or target.origin == self._origin:
            return None
        fresh = known(target.origin)
        if fresh is None:
            return None
        return msgspec.structs.replace(
            fresh, hops=(*self._hops, *fresh.hops), url=target.url, took=self._deadline.used
        )

    def _result(self, reply: Reply) -> Retrieval:
        headers, stored = reply.headers, NO_METADATA
        if reply.outcome is Outcome.NOT_MODIFIED and self._validators is not None:
            stored = self._validators.metadata
        now = self._fetcher._clock.wall()
        cause = reply.detail if reply.outcome is Outcome.TLS else ""
        metadata = stored.renewed_by(metadata_of(headers, now, reply.coding, cause))
        return Retrieval(
            outcome=reply.outcome,
            status=reply.status,
            hops=tuple(self._hops),
            url=self._target.url,
            body=reply.body,
            etag=_sendable(headers.get(ETAG, "")),
            last_modified=_sendable(headers.get(LAST_MODIFIED, "")),
            lifetime=metadata.lifetime(age_of(headers)),
            metadata=metadata,
            retry_after=self._wait,
            took=self._deadline.used,
            detail=reply.detail,
            addresses=reply.addresses,
        )

    def _end_at_redirect(self, outcome: Outcome, reply: Reply) -> Retrieval:
        """Return the retrieval that ends with a redirect that is not followed."""
        return self._result(msgspec.structs.replace(reply, outcome=outcome))


def _weak(validator: str) -> str:
    """Return a validator for the weak comparison (RFC 9110 section 8.8.3.2)."""
    return validator.strip(" \t").removeprefix("W/")


def _sendable(value: str) -> str | None:
    """Return a validator if it can be stored and sent back as text, else None."""
    sendable = len(value) <= _MAX_VALIDATOR and value.isascii() and value.isprintable()
    return value if value and sendable else None
