"""The `Gate` and `HeldLease` protocols, and the aiohttp client middleware for any gate.

`Gatekeeper` (embedded) and `RemoteGatekeeper` (a sidecar's client) both satisfy `Gate`; code that
is written against it works with either.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Protocol, Self
from weakref import ref

import msgspec
from aiohttp import (
    ClientError,
    ClientHandlerType,
    ClientMiddlewareType,
    ClientRequest,
    ClientResponse,
    encode_basic_auth,
)
from aiohttp.hdrs import AUTHORIZATION, LOCATION, RETRY_AFTER, URI, USER_AGENT
from yarl import URL

from gatekeeper.clock import Deadline, SharedTimer
from gatekeeper.config import Config
from gatekeeper.decision import Decision, NotYet, refuse
from gatekeeper.errors import Denied, HoldLapsed
from gatekeeper.fetching.guard import before_send
from gatekeeper.http_fields import REDIRECTS, rate_limit_of
from gatekeeper.robots import PageSignals, page_signals, product_token
from gatekeeper.signing import Signer
from gatekeeper.urls import UrlCache, sendable, url_of


class ConnectionInUse(Protocol):
    """A connection in use by a request, such as aiohttp's `Connection`."""

    @property
    def closed(self) -> bool:
        """Whether the connection is no longer in use."""

    def add_callback(self, callback: Callable[[], None], /) -> None:
        """Call `callback` once the connection is released or dropped."""


class HeldLease(Protocol):
    """The right to send one request, while it is held.

    Three events matter to a host's clock: the head of the response, the outcome of the request,
    and the end of the connection. Each call is idempotent and never waits.
    """

    @property
    def url(self) -> str:
        """The URL that the lease was granted for, in its normal form."""

    @property
    def decision(self) -> Decision:
        """The decision at the moment of the grant."""

    @property
    def user_agent(self) -> str | None:
        """The name that the lease was requested for, as given; None: the gate's own."""

    @property
    def counts_bytes(self) -> bool:
        """Whether its host has a budget that the bytes of the response count for."""

    def received(self, size: int) -> None:
        """Count bytes of the response for the host's budget, if no report has a `size`."""

    def claim(self, url: str) -> bool:
        """Use the lease for a request to `url`. Return True for the first claim that matches."""

    def head(self) -> None:
        """Note that the head of the response has arrived: the interval counts from now."""

    def answered(
        self, status: int, *, retry_after: str | None = None, rate_limit: str | None = None
    ) -> None:
        """Call `head` and `report` in one: the head has arrived, with this status and fields."""

    def report(
        self,
        *,
        status: int | None = None,
        elapsed: float | None = None,
        retry_after: float | str | None = None,
        size: int | None = None,
        rate_limit: str | None = None,
    ) -> None:
        """Report the outcome of the request; the first report is final.

        `status` is the HTTP status, None if there was no response; `elapsed` the seconds to the
        response's head; `retry_after` the Retry-After header, unparsed, or seconds; `size` the
        body's bytes; `rate_limit` the RateLimit header, unparsed.
        """

    def ends_with(
        self, connection: ConnectionInUse | None, then: Callable[[], None] | None = None
    ) -> None:
        """Hold the slot until the connection is free, then end the lease; None: end it now.

        `then` is called at that moment, before the slot is passed on.
        """

    def lasts_with(
        self, connection: ConnectionInUse | None, then: Callable[[], None] | None = None
    ) -> None:
        """Hold the slot until both the connection is free and the lease's block is left.

        `then` is called when the connection is free; immediately if `connection` is None.
        """

    def end(self) -> None:
        """End the lease: its slot goes to the next waiter."""


class Gate(Protocol):
    """The methods of a gate that crawlers and integrations use, wherever the gate runs."""

    @property
    def user_agent(self) -> str | None:
        """The name whose rules apply if a question has no other; None: not known."""

    async def allowed(self, url: str, *, user_agent: str | None = None) -> bool:
        """Return True if the URL may be fetched now."""

    async def check(self, url: str, *, user_agent: str | None = None) -> Decision:
        """Decide whether the URL may be fetched now, and why."""

    def check_many(
        self, urls: Iterable[str], *, user_agent: str | None = None
    ) -> AsyncIterator[Decision]:
        """Yield a decision about each URL, in order; robots.txt files are fetched in parallel."""

    def lease(
        self,
        url: str,
        *,
        priority: int = 0,
        timeout: float | None = None,
        user_agent: str | None = None,
    ) -> AbstractAsyncContextManager[HeldLease]:
        """Wait for the host's turn; the lease is the right to send one request to the URL."""

    async def try_acquire(
        self, url: str, *, priority: int = 0, user_agent: str | None = None, owned: bool = True
    ) -> HeldLease | NotYet:
        """Grant a lease if the host's turn is now; end it with `end`. Else return NotYet."""


# --- the time a request may take ------------------------------------------------------------
#
# aiohttp's own total timeout runs from the call to the last byte, so it includes the wait for a
# turn. A `RequestDeadline` runs only while a hop is under way or its body is read, and stops
# between hops. One timer serves all requests of a session.


class RequestDeadline(msgspec.Struct, eq=False):
    """The seconds that one request, with its redirects, may still spend on the network."""

    timer: SharedTimer
    """The timer of all requests of the session."""
    seconds_left: float | None
    """Seconds left while the deadline is stopped; None: no limit; zero or less: the time is over.
    """
    ends: float = math.inf
    """While the deadline runs: the monotonic time at which it fires."""
    _hops_under_way: int = 0
    """Hops that were sent and whose connection is not free; more than one if the request is
    retried while the body of the first response is still being read."""
    _deadline: Deadline | None = None
    """Cancels the task that sends the latest hop."""
    _response: Callable[[], ClientResponse | None] | None = None
    """Weak reference to the response whose body is read: a dropped one frees its connection."""

    def begin(self, task: asyncio.Task[object] | None) -> None:
        """Start counting: the task sends a hop."""
        seconds_left = self.seconds_left
        if seconds_left is None or task is None:
            return
        timer = self.timer
        self._deadline = Deadline(timer.clock, task)
        self._hops_under_way += 1
        if self._hops_under_way > 1:
            return  # it is running already
        timer.set(self, timer.clock.monotonic() + seconds_left)

    def watch(self, response: ClientResponse) -> None:
        """Watch the body of a response: the deadline runs until `stop`, when its connection is
        free."""
        self._response = ref(response)
        limit = self._deadline
        if limit is not None:
            limit.end()
            if limit.fired:  # the handler caught our cancellation and went on
                self.due(self.ends)

    def release_previous(self) -> None:
        """Release the connection of an earlier attempt, whose response is read no further: the
        next attempt would wait for its slot."""
        held, self._response = self._response, None
        if held is not None and (response := held()) is not None:
            response.release()

    def stop(self) -> None:
        """End a hop; with the last one the deadline stops."""
        self._response = None
        if self._hops_under_way > 1:
            self._hops_under_way -= 1
            return
        self._hops_under_way = 0
        timer = self.timer
        if timer.drop(self):
            self.seconds_left = self.ends - timer.clock.monotonic()

    def ran_out(self, error: BaseException) -> bool:
        """End a hop that failed with the error. Return True if the deadline caused the error.

        A cancellation from elsewhere at the same moment is not swallowed.
        """
        self.stop()
        ours = self._deadline is not None and self._deadline.end()
        return ours and isinstance(error, asyncio.CancelledError)

    def due(self, now: float) -> None:
        """Called by the timer when the time is over: end the hop, or the reading of its body."""
        self.timer.drop(self)
        self.seconds_left = 0.0
        if self._response is not None:
            response = self._response()
            if response is not None:
                response.content.set_exception(TimeoutError())
                response.close()
        elif self._deadline is not None:
            self._deadline.fire()


# --- the middleware -------------------------------------------------------------------------

_SWITCHING_PROTOCOLS = 101  # a websocket stays open for as long as it likes, without a deadline
_MAX_CREDENTIALS = 256
_RATE_LIMIT = type(RETRY_AFTER)("RateLimit")  # an istr: its case is folded once, not per look-up

# The references are weak: each task, timer and connection keeps the context in which it was made,
# and a lease leads to its gate.
open_leases: ContextVar[tuple[ref[Any], ...]] = ContextVar("gatekeeper_open_leases", default=())
"""The leases that `async with gate.lease(...)` holds open in this context, oldest first."""


held_leases: ContextVar[tuple[ref[Any], ...]] = ContextVar("gatekeeper_held_leases", default=())
"""The leases without a block that belong to tasks of this context, oldest first."""


def bind(lease: Any) -> None:
    """Let requests of this context adopt a lease whose block is entered."""
    open_leases.set((*open_leases.get(), ref(lease)))


def unbind(lease: Any) -> None:
    """Undo `bind`, as the block is left."""
    open_leases.set(tuple(other for other in open_leases.get() if other() is not lease))


def hold_in_context(lease: Any) -> None:
    """Make a lease without a block visible to tasks that are started from this context."""
    known = held_leases.get()
    still = (one for one in known if (held := one()) is not None and not held.ended)
    held_leases.set((*still, ref(lease)))


def inherited(task: asyncio.Task[object] | None) -> list[Any]:
    """Return the open leases of other tasks that this task was started under.

    A task's context is a copy of the context that started it.
    """
    blocks, others = open_leases.get(), held_leases.get()
    if not blocks and not others:
        return []
    found = dict.fromkeys(one() for one in (*blocks, *others))
    return [one for one in found if one and one.owner and one.owner is not task and not one.ended]


def adopt(url: str) -> HeldLease | None:
    """Claim and return the open lease of this context for the URL. None if there is none."""
    for one in reversed(open_leases.get()):
        lease: HeldLease | None = one()
        if lease is not None and lease.claim(url):
            return lease
    return None


class _LeaseState(msgspec.Struct, eq=False, kw_only=True):
    """Attributes of a lease with defaults; in a class of their own, as they are keyword-only."""

    data: Any = None
    """The payload of a URL from a `PoliteQueue`; otherwise free for the caller's use."""
    user_agent: str | None = None
    """The name that the lease was requested for, as given; None: the gate's own."""
    _head_at: float | None = None
    """Monotonic time at which the head of the response arrived."""
    _claimed: bool = False
    _block_left: bool = False
    """Whether its block was left while the connection was in use."""
    _on_free: Callable[[], None] | None = None
    """Called when the connection is free."""


class LeaseBase(_LeaseState, eq=False, weakref=True):
    """The part that the leases of both gates share: entering, and ending with a connection."""

    url: str
    host: str
    owner: asyncio.Task[object] | None
    """The task that holds the lease, which would wait for itself if it asked for another one of
    the host; None if no task does."""

    if TYPE_CHECKING:  # each kind of lease defines these

        @property
        def expires_at(self) -> datetime:
            """When the lease expires."""

        @property
        def ended(self) -> bool:
            """Whether the slot was given back, or the lease expired."""

        @property
        def holdings(self) -> Any:
            """The open leases of its gate, by owner."""

        def _hold_while(self, connection: ConnectionInUse | None) -> None: ...

        def end(self) -> None:
            """End the lease."""

        def leave(self) -> None:
            """Undo `enter` and end the lease. Without a report it counts as sent and unanswered."""

    async def __aenter__(self) -> Self:
        """Enter a lease from `acquire`, as a block of `gate.lease` does."""
        self.enter()
        return self

    async def __aexit__(self, *error: object) -> None:
        self.leave()

    def __repr__(self) -> str:
        state = "ended" if self.ended else f"until {self.expires_at:%H:%M:%SZ}"
        return f"<{type(self).__name__} {self.url} {state}>"

    def enter(self) -> None:
        """Let requests of this context adopt the lease, and make the current task its owner.

        For a lease that one task requested and another one uses; the context of the first task is
        left unchanged.
        """
        if self.ended:
            return
        self.holdings.own(self, asyncio.current_task())
        if ref(self) not in open_leases.get():
            bind(self)

    def ends_with(
        self, connection: ConnectionInUse | None, then: Callable[[], None] | None = None
    ) -> None:
        """Hold the slot until the connection is free, then end the lease; None: end it now.

        `then` is called at that moment, before the slot is passed on.
        """
        self._on_free = then
        if connection is None:
            self._end_when_free()
            return
        self._hold_while(connection)
        connection.add_callback(self.end if then is None else self._end_when_free)
        if self.owner is not None:
            hold_in_context(self)

    def lasts_with(
        self, connection: ConnectionInUse | None, then: Callable[[], None] | None = None
    ) -> None:
        """Hold the slot until both the connection is free and the lease's block is left.

        `then` is called when the connection is free; immediately if `connection` is None.
        """
        if connection is not None:
            self._on_free = then
            self._hold_while(connection)
            connection.add_callback(self._free_in_block)
        elif then is not None:
            then()

    def claim(self, url: str) -> bool:
        """Use the lease for a request to `url`. Return True for the first claim that matches."""
        if self._claimed or self.ended:
            return False
        # aiohttp sends the URL that yarl parses, and yarl unescapes parts of it: both URLs are
        # brought into that form before they are compared.
        self._claimed = url == self.url or _as_sent(url) == _as_sent(self.url)
        return self._claimed

    def _free_in_block(self) -> None:
        """Connection callback of `lasts_with`: the block may still be open."""
        self._hold_while(None)
        if self._block_left:
            self._end_when_free()
            return
        then, self._on_free = self._on_free, None
        if then is not None:
            then()

    def _end_when_free(self) -> None:
        """Connection callback of `ends_with`: call `then`, and end the lease."""
        then, self._on_free = self._on_free, None
        try:
            if then is not None:
                then()
        finally:
            self.end()


def _as_sent(url: str) -> URL | None:
    try:
        return url_of(url).with_fragment(None)
    except ValueError:
        return None


TakeLease = Callable[[str, "asyncio.Task[object] | None"], HeldLease | None]
"""Grants a lease for the URL to the task if that needs no waiting. None: wait for it instead."""


class WaitForLease(Protocol):
    """Waits for a lease."""

    def __call__(
        self, url: str, owner: asyncio.Task[object] | None, /, *, user_agent: str | None = None
    ) -> Coroutine[Any, Any, HeldLease]:
        """Wait for the URL's lease, for the task and the name (None: the gate's own).

        Raises as entering `Gate.lease` does.
        """


DeadlineMiddleware = Callable[
    [RequestDeadline | None, ClientRequest, ClientHandlerType],
    Coroutine[Any, Any, ClientResponse],
]


def _take_nothing(_url: str, _owner: asyncio.Task[object] | None) -> None:
    """Grant no lease without waiting: the default `take`, for a gate that has to be asked."""


def _ignore_failure(_lease: HeldLease, _error: BaseException) -> None:
    """Ignore a failed request: the default `unreached`."""


def gate_middleware(gate: Gate) -> ClientMiddlewareType:
    """Make an aiohttp client middleware that decides, paces and reports every hop.

    aiohttp calls it once per redirect hop, so a hop to another host is decided by that host's file
    and takes that host's turn. The slot is held until the connection is released. The `total`
    timeout of a plain session includes the wait for a turn; that of `polite_session` does not.

    A request without a User-Agent of its own is sent with the gate's (aiohttp's default counts as
    none). A request with one is decided by the rules for that one.

    The request raises Denied or Deferred before a byte is sent, LeaseTimeout if waiting could never
    end, and InvalidURL for a URL that is not http or https, or that would be sent to another host
    than its text names (`yarl.URL(..., encoded=True)`).
    """

    def wait(
        url: str, _: asyncio.Task[object] | None, *, user_agent: str | None = None
    ) -> Coroutine[Any, Any, HeldLease]:
        return enter_detached(gate.lease(url, user_agent=user_agent))

    return partial(gate_middleware_with(gate, wait), None)


def gate_middleware_with(
    gate: Gate,
    wait: WaitForLease,
    take: TakeLease = _take_nothing,
    url_cache: UrlCache | None = None,
    unreached: Callable[[HeldLease, BaseException], object] = _ignore_failure,
    lapsed: Callable[[HeldLease], bool] | None = None,
    signer: Signer | None = None,
) -> DeadlineMiddleware:
    """Make the middleware of `gate_middleware` for requests with deadlines of their own.

    `take` and `wait` grant its leases, which are not listed in any context. `url_cache` is the one
    that parsed the requests' URLs, if any did. `unreached` is called with a lease and the error of
    its failed request; `lapsed` gives back a lease whose hold ended; `signer` signs requests.
    """
    credentials, known_urls = _RedirectCredentials(), url_cache or UrlCache()

    async def pass_gate(
        limit: RequestDeadline | None, request: ClientRequest, handler: ClientHandlerType
    ) -> ClientResponse:
        loop, url = request.loop, request.url  # `get_running_loop` is a system call before 3.12
        task = asyncio.current_task(loop)
        sent = request.headers.get(USER_AGENT)
        own_name = sent is not None and sent == gate.user_agent
        agent = None if own_name else other_agent(sent, gate.user_agent)
        read_before = url is known_urls.last and not credentials
        text = known_urls.text if read_before else credentials.pop_for(request) or sendable(url)
        lease = adopted = adopt(text) if open_leases.get() else None
        if lease is not None:
            if not (own_name and lease.user_agent is None):
                await judge_adopted(lease, sent, gate, text)
        elif agent is None:
            lease = take(text, task)
        if lease is None:
            if limit is not None:
                limit.release_previous()
            lease = await wait(text, task, user_agent=agent)
        if not own_name or signer is not None:
            _identify(request, lease, None if own_name else gate, signer)
        started = loop.time()
        try:
            if limit is not None:
                limit.begin(task)
            send = handler if lapsed is None else partial(_send_while_held, handler, lapsed, lease)
            response = await send(request)
            _report_head(lease, response)
        except HoldLapsed:  # nothing was sent, and the lease has ended
            return await pass_gate(limit, request, handler)
        except BaseException as error:
            unreached(lease, error)
            if _report_failure(error, lease, limit, started):
                raise TimeoutError from None
            raise
        redirected = response.status in REDIRECTS
        _hold_until_free(response, limit, lease, in_block=adopted is not None and not redirected)
        if redirected:
            credentials.note(response)
        return response

    return pass_gate


def _report_head(lease: HeldLease, response: ClientResponse) -> None:
    """Report the head of the response."""
    headers = response.headers
    lease.answered(
        response.status,
        retry_after=headers.get(RETRY_AFTER),
        rate_limit=rate_limit_of(headers, _RATE_LIMIT),
    )


async def _send_while_held(
    handler: ClientHandlerType,
    lapsed: Callable[[HeldLease], bool],
    lease: HeldLease,
    request: ClientRequest,
) -> ClientResponse:
    """Send the request if the hold of its lease lasts until the connection is made.

    Raises HoldLapsed before a byte is sent if connecting took longer than the hold lasts, or if a
    block began meanwhile.
    """
    look = before_send.set(partial(lapsed, lease))
    try:
        return await handler(request)
    finally:
        before_send.reset(look)


# Default User-Agents of libraries, sent if the caller set none.
_LIBRARY_DEFAULT = re.compile(
    r"Python/[0-9.]+ aiohttp/\S+|python-(?:httpx2?|requests|urllib3)/\S+|Python-urllib/\S+"
    r"|Scrapy/\S+ \(\+https?://scrapy\.org\)"
)


def unnamed(sent: str | None) -> bool:
    """Return True if a User-Agent is missing or a library's default, which names no crawler."""
    return sent is None or _LIBRARY_DEFAULT.fullmatch(sent) is not None


@lru_cache(maxsize=1024)
def other_agent(sent: str | None, own: str | None) -> str | None:
    """Return the User-Agent of a request if it names another agent than the gate's; else None."""
    if sent is None or unnamed(sent) or (own is not None and _same_agent(sent, own)):
        return None
    return sent


def _same_agent(one: str, other: str) -> bool:
    return product_token(one).lower() == product_token(other).lower()


async def judge_adopted(lease: HeldLease, sent: str | None, gate: Gate, url: str) -> None:
    """Check that a request with another User-Agent than that of its adopted lease is allowed.

    The host's turn is the same for every agent. Raises Denied or Deferred.
    """
    if sent is None or unnamed(sent):
        return  # it is sent with the lease's name
    if not _same_agent(sent, lease.user_agent or gate.user_agent or lease.decision.user_agent):
        refuse(await gate.check(url, user_agent=sent))


def _identify(
    request: ClientRequest, lease: HeldLease, gate: Gate | None, signer: Signer | None
) -> None:
    """Set the request's User-Agent and sign it, just before it is sent.

    A request without a name is sent under the name whose rules allowed it. `gate` is None if the
    request has the gate's own name already.
    """
    if gate is not None and unnamed(request.headers.get(USER_AGENT)):
        name = lease.user_agent or gate.user_agent or lease.decision.user_agent
        request.headers[USER_AGENT] = name
    if signer is not None:
        signer.sign(request)


def _hold_until_free(
    response: ClientResponse, limit: RequestDeadline | None, lease: HeldLease, *, in_block: bool
) -> None:
    """Keep the deadline running and the lease open until the response's connection is free.

    `in_block`: the lease belongs to a block, which may be left later than that. For a redirect it
    must be False: the next hop takes a turn of its own, which would wait for the lease.
    """
    connection = response.connection
    timed = None if connection is None or response.status == _SWITCHING_PROTOCOLS else limit
    stop = None if timed is None else timed.stop
    if lease.counts_bytes:
        stop = counting_bytes(lease, response, stop)
    if in_block:
        lease.lasts_with(connection, stop)
    else:
        lease.ends_with(connection, stop)
    if timed is not None:
        timed.watch(response)  # last, as it may close the connection
    elif limit is not None:
        limit.stop()


def counting_bytes(
    lease: HeldLease, response: ClientResponse, then: Callable[[], None] | None = None
) -> Callable[[], None]:
    """Return a callback for when the connection is free: it calls `then`, and counts the decoded
    bytes of the body for the lease."""
    content = response.content  # not the response: dropping that releases its connection

    def count() -> None:
        if then is not None:
            then()
        lease.received(content.total_bytes)

    return count


class _RedirectCredentials(dict[tuple[str | None, str], str]):
    """URLs with credentials that redirects led to, by host and Authorization header.

    aiohttp removes the credentials from a Location and sends them as Authorization, so neither a
    middleware nor a connector sees them in the URL. The next hop is recognised by its header, and
    the gate is asked about the URL as the site wrote it, which the guard refuses (T1: each hop). A
    caller that does not follow redirects leaves entries here: at most 256, the oldest are evicted.
    """

    def note(self, response: ClientResponse) -> None:
        """Remember where a redirect leads; there is no await between this and the next hop."""
        location = response.headers.get(LOCATION) or response.headers.get(URI)
        if location is None or "@" not in location:
            return
        try:
            url = response.url.join(url_of(location))
            if url.raw_user is None and url.raw_password is None:
                return
            for encoding in ("latin1", "utf-8"):  # aiohttp's for a URL's and for other credentials
                sent = encode_basic_auth(url.user or "", url.password or "", encoding)
                self[url.raw_host, sent] = str(url)
        except ValueError:
            pass  # aiohttp can't follow such a redirect either
        while len(self) > _MAX_CREDENTIALS:
            del self[next(iter(self))]

    def pop_for(self, request: ClientRequest) -> str | None:
        """Return the URL whose credentials the request carries, if a redirect gave them."""
        sent = request.headers.get(AUTHORIZATION)
        return None if sent is None else self.pop((request.url.raw_host, sent), None)


def _report_failure(
    error: BaseException, lease: HeldLease, limit: RequestDeadline | None, started: float
) -> bool:
    """Report the failure and end the lease. Return True if its deadline caused the failure."""
    late = limit is not None and limit.ran_out(error)
    # The request may have been sent, so the clock runs from the failure. A refusal of the guard or
    # a cancellation by the caller proves nothing about the host.
    failed = late or (isinstance(error, ClientError | OSError) and not isinstance(error, Denied))
    try:
        elapsed = asyncio.get_running_loop().time() - started
        lease.report(elapsed=elapsed if failed else None)
    finally:
        # An adopted lease too: a second attempt (aiohttp makes one by itself if a reused connection
        # broke) takes a turn of its own, and would wait for this lease.
        lease.end()
    return late


async def enter_detached(turn: AbstractAsyncContextManager[HeldLease]) -> HeldLease:
    """Enter a lease that ends with its connection, not with a block.

    Entering adds it to the context's open leases. No other request may adopt it, so it is claimed
    immediately and removed from them again.
    """
    before = open_leases.get()
    lease = await turn.__aenter__()
    lease.claim(lease.url)
    open_leases.set(before)
    return lease


def signals(response: ClientResponse, *, user_agent: str | None = None) -> PageSignals:
    """Read a response's header fields about use, indexing and licences.

    X-Robots-Tag, Robots-Tag, Content-Usage, TDM fields, licence links, and whether a licence or a
    payment is required (SIG-03, SIG-15, SIG-16, SIG-18 to SIG-21). They are read for `user_agent`;
    the default is the request's User-Agent. They restrict what may be done with the page, never
    whether it may be fetched.

    >>> async def main(session) -> None:
    ...     async with session.get("https://example.org/") as response:
    ...         if not signals(response).rules.index:
    ...             ...
    """
    named = user_agent or response.request_info.headers.get(USER_AGENT) or ""
    agent, url = product_token(named) or "*", str(response.url)
    return page_signals(response.headers, agent, url=url, status=response.status)


def config_of(gate: object, *, blocking: bool = False) -> Config:
    """Return a gate's settings, by which its requests are guarded, or else the defaults.

    Raises TypeError for what is no gate, or not one for the caller's kind of code.
    """
    check, config = getattr(gate, "check", None), getattr(gate, "config", None)
    if check is None or inspect.iscoroutinefunction(check) is blocking:
        wanted = "a SyncGatekeeper" if blocking else "a Gatekeeper or a RemoteGatekeeper"
        raise TypeError(f"gate must be {wanted}, not {type(gate).__name__}")
    return config if isinstance(config, Config) else Config()


class Unentered:
    """Descriptor for an attribute of a lease on the class of its request, which was not entered:
    reading it raises an AttributeError with the remedy.

    A descriptor for the common names, as `__getattr__` would slow every other attribute down. It is
    used inside `if not TYPE_CHECKING`, as a type checker finds the mistake by itself.
    """

    __slots__ = ()

    def __get__(self, request: object, owner: type) -> Self:
        """Return the descriptor for the class; raise AttributeError for an instance."""
        if request is None:
            return self
        raise AttributeError(
            "this is the request for a lease; enter it first: async with gate.lease(...) as lease"
        )
