"""One request of a retrieval: sent, watched by the clock, its body read within bounds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Final

import aiohttp
import msgspec
from aiohttp.typedefs import LooseHeaders
from yarl import URL

from gatekeeper.clock import Clock, Deadline, Timer, deadline
from gatekeeper.config import FetchConfig
from gatekeeper.errors import GateClosed
from gatekeeper.fetching.content import is_binary, judge
from gatekeeper.fetching.decoding import BadEncoding, Decoder
from gatekeeper.fetching.outcomes import Outcome, classify

__all__ = ["Ask", "Reply", "Watch", "ask", "robots_session", "trace_of_phases"]

_NO_LIMITS: Final = aiohttp.ClientTimeout(total=None, sock_connect=None)


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


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One request to send."""

    url: str
    headers: LooseHeaders
    first_hop: bool
    ssl: bool = True


class Watch:
    """The network time of one retrieval: a limit for each phase, and one for the whole.

    Waiting for turns, for slots and for a place in the connection pool is not network time
    and is not counted.
    """

    def __init__(self, clock: Clock, config: FetchConfig) -> None:
        self._clock = clock
        self._config = config
        self._left = config.total_timeout
        self._running_since: float | None = None
        self._limit: Deadline | None = None
        self._tick: Timer | None = None
        self._window_bytes = 0
        self._asked_at = 0.0
        self.connected = False
        self.dripping = False
        """The body came slower than `fetch.min_rate`."""

    @property
    def used(self) -> float:
        """Network seconds so far."""
        return self._config.total_timeout - self._left

    @contextmanager
    def over(self, limit: Deadline) -> Iterator[None]:
        """Watch one request; `limit` is moved from phase to phase."""
        self._limit = limit
        self.connected = False
        self.connecting()
        try:
            yield
        finally:
            self._stop()
            self._limit = None

    def connecting(self) -> None:
        """Name service, TCP and TLS."""
        self._phase(self._config.connect_timeout)

    def queued(self) -> None:
        """Our own pool is full: nobody's fault out there."""
        self._stop()

    def sending(self) -> None:
        """Connected: now for the first octet of the head."""
        self.connected = True
        self._phase(self._config.first_byte_timeout)
        self._asked_at = self._clock.monotonic()

    def reading(self) -> float | None:
        """The head has come; the seconds it took, None where the sending was not seen."""
        took = self._clock.monotonic() - self._asked_at if self.connected else None
        self.connected = True
        self._phase(None)
        self._next_window()
        return took

    def received(self, octets: int) -> None:
        """So many octets of the body have come."""
        self._window_bytes += octets

    def _phase(self, seconds: float | None) -> None:
        self._stop()
        if self._limit is None:
            return
        self._running_since = self._clock.monotonic()
        self._limit.move(self._left if seconds is None else min(seconds, self._left))

    def _stop(self) -> None:
        if self._tick is not None:
            self._tick.cancel()
            self._tick = None
        if self._running_since is not None:
            self._left = max(0.0, self._left - (self._clock.monotonic() - self._running_since))
            self._running_since = None
        if self._limit is not None:
            self._limit.move(None)

    def _next_window(self) -> None:
        self._window_bytes = 0
        end = self._clock.monotonic() + self._config.min_rate_window
        self._tick = self._clock.call_at(end, self._judge_rate)

    def _judge_rate(self) -> None:
        # A drip must not hold a slot: sock_read alone never fires on one (fetching.md 2.4).
        if self._window_bytes < self._config.min_rate * self._config.min_rate_window:
            self.dripping = True
            if self._limit is not None:
                self._limit.move(0.0)
        else:
            self._next_window()


def trace_of_phases() -> aiohttp.TraceConfig:
    """Tells the `Watch` given as `trace_request_ctx` what the connection is doing."""
    trace = aiohttp.TraceConfig()

    async def queued(_: aiohttp.ClientSession, context: SimpleNamespace, __: object) -> None:
        context.trace_request_ctx.queued()

    async def connecting(_: aiohttp.ClientSession, context: SimpleNamespace, __: object) -> None:
        context.trace_request_ctx.connecting()

    async def sending(_: aiohttp.ClientSession, context: SimpleNamespace, __: object) -> None:
        context.trace_request_ctx.sending()

    trace.on_connection_queued_start.append(queued)
    trace.on_connection_queued_end.append(connecting)
    trace.on_connection_create_end.append(sending)
    trace.on_connection_reuseconn.append(sending)
    return trace


def robots_session(
    base: aiohttp.ClientSession, trace: aiohttp.TraceConfig
) -> aiohttp.ClientSession:
    """A session on the same connections that has no cookies, headers or middlewares.

    The caller's own may carry all three, and a robots.txt is asked for without (2.1). Its
    connector stays its own. Raises GateClosed where it is closed: a session made without a
    connector would get one that no guard knows.
    """
    connector = base.connector
    if connector is None or base.closed:
        raise GateClosed("the session that robots.txt is fetched with is closed")
    return aiohttp.ClientSession(
        connector=connector,
        connector_owner=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        trace_configs=[trace],
        trust_env=base.trust_env,
        auto_decompress=False,
        timeout=_NO_LIMITS,
        # aiohttp has no public name for the proxy a session was made with.
        proxy=getattr(base, "_default_proxy", None),
        proxy_auth=getattr(base, "_default_proxy_auth", None),
    )


class _Lost(aiohttp.ClientConnectionError):
    """The connection broke before the head."""


async def _ask_once(
    request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
) -> aiohttp.ClientResponse:
    """Keep aiohttp from sending a GET again by itself: each request has a turn of its own."""
    try:
        return await handler(request)
    except aiohttp.ClientConnectorError:
        raise
    except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as error:
        raise _Lost(str(error)) from error


async def ask(
    session: aiohttp.ClientSession, request: Ask, *, watch: Watch, clock: Clock, config: FetchConfig
) -> Reply:
    """Send one GET and read its answer. Whatever goes wrong out there is an outcome."""
    in_body = False
    head: aiohttp.ClientResponse | None = None
    try:
        async with deadline(clock, None) as limit:
            with watch.over(limit):
                async with session.get(
                    URL(request.url, encoded=True),
                    headers=request.headers,
                    allow_redirects=False,
                    middlewares=(_ask_once,),
                    ssl=request.ssl,
                    trace_request_ctx=watch,
                ) as head:
                    elapsed = watch.reading()
                    in_body = True
                    return await _read(head, watch, config, elapsed)
    except (aiohttp.ClientError, OSError, TimeoutError, BadEncoding) as error:
        outcome = _outcome_of(error, request, watch, config, in_body=in_body)
        return Reply(
            outcome=outcome,
            status=None if head is None else head.status,
            headers={} if head is None else head.headers,
            detail=f"{type(error).__name__}: {error}"[:300],
        )


def _outcome_of(
    error: Exception, request: Ask, watch: Watch, config: FetchConfig, *, in_body: bool
) -> Outcome:
    if isinstance(error, BadEncoding):
        return Outcome.BAD_ENCODING
    if isinstance(error, TimeoutError) and in_body:
        return Outcome.TOO_SLOW  # row 23: the drip, and the deadline inside the body
    return classify(
        error=error,
        config=config,
        first_hop=request.first_hop,
        connected=watch.connected,
        in_body=in_body,
    )


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
    kind = head.headers.get("Content-Type", "")
    if is_binary(b"", kind):
        head.close()
        return b"", 0, True
    decoder = Decoder(head.headers.get("Content-Encoding", ""))
    body = bytearray()
    received = 0
    sniffed = False
    while chunk := await head.content.readany():
        received += len(chunk)
        watch.received(len(chunk))
        body += decoder.feed(chunk, config.max_body + 1 - len(body))
        if not sniffed and len(body) >= 1024:
            sniffed = True
            if is_binary(bytes(body[:1024]), kind):
                head.close()
                return b"", received, True
        if len(body) > config.max_body:
            head.close()
            return bytes(body), received, False
        if received > config.max_wire:
            raise BadEncoding(f"{received} octets on the wire for {len(body)} of text")
    decoder.finish()
    return bytes(body), received, is_binary(bytes(body[:1024]), kind)
