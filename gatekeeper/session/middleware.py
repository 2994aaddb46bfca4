"""The aiohttp client middleware for any gate, and the time that a request may take."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any
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

from gatekeeper.clock import Deadline, SharedTimer
from gatekeeper.descriptors import is_shortage
from gatekeeper.errors import Denied, HoldLapsed
from gatekeeper.fetching.guard import before_send
from gatekeeper.fetching.outcomes import RequestSigner
from gatekeeper.gate.lease_base import (
    adopt,
    enter_detached,
    judge_adopted,
    note_refusal,
    open_leases,
    other_agent,
    unnamed,
)
from gatekeeper.gate.protocols import DeadlineMiddleware, Gate, HeldLease
from gatekeeper.http_fields import REDIRECTS, rate_limit_of
from gatekeeper.robots import PageSignals, page_signals, product_token
from gatekeeper.urls import UrlCache, sendable, url_of

# --- the time a request may take ------------------------------------------------------------
#
# aiohttp's own total timeout runs from the call to the last byte, so it includes the wait for a
# lease. A `RequestDeadline` runs only while a hop is under way or its body is read, and stops
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
    _task: asyncio.Task[object] | None = None
    """The task that sends the latest hop, until its head has arrived."""
    _cancelling_before: int = 0
    _deadline: Deadline | None = None
    """Has cancelled that task. It is not made before, since few requests need it."""
    _response: Callable[[], ClientResponse | None] | None = None
    """Weak reference to the response whose body is read: a dropped one frees its connection."""

    def begin(self, task: asyncio.Task[object] | None) -> None:
        """Start counting: the task sends a hop."""
        seconds_left = self.seconds_left
        if seconds_left is None or task is None:
            return
        self._task, self._cancelling_before = task, task.cancelling()
        self._hops_under_way += 1
        if self._hops_under_way == 1:  # else it is running already
            self.timer.set(self, self.timer.clock.monotonic() + seconds_left)

    def watch(self, response: ClientResponse) -> None:
        """Watch the body of a response: the deadline runs until `stop`, when its connection is
        free."""
        self._response, self._task = ref(response), None
        limit, self._deadline = self._deadline, None
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
        if self.timer.drop(self):
            self.seconds_left = self.ends - self.timer.clock.monotonic()

    def ran_out(self, error: BaseException | None = None) -> bool:
        """End a hop that has no body, or failed with the error. Return True if the deadline caused
        the error.

        A cancellation from elsewhere at the same moment is not swallowed.
        """
        self.stop()
        # Another hop may still be under way: its end must not cancel this task any more.
        limit, self._deadline, self._task = self._deadline, None, None
        return limit is not None and limit.end() and isinstance(error, asyncio.CancelledError)

    def due(self, now: float) -> None:
        """Called by the timer when the time is over: end the hop, and the reading of a body."""
        self.timer.drop(self)
        self.seconds_left = 0.0
        response = None if self._response is None else self._response()
        if response is not None:
            response.content.set_exception(TimeoutError())
            response.close()
        if self._task is not None:
            self._deadline = Deadline(self.timer.clock, self._task, self._cancelling_before)
            self._deadline.fire()


# --- the middleware -------------------------------------------------------------------------

_SWITCHING_PROTOCOLS = 101  # a websocket stays open for as long as it likes, without a deadline
_MAX_CREDENTIALS = 256
_RATE_LIMIT = type(RETRY_AFTER)("RateLimit")  # an istr: its case is folded once, not per look-up


TakeLease = Callable[[str, "asyncio.Task[object] | None"], HeldLease | None]
"""Grants a lease for the URL to the task if that needs no waiting. None: wait for it instead."""


NoteAnswer = Callable[[HeldLease, int, Mapping[str, str]], object]
"""Takes note of a response's status and header fields."""


WaitForLease = Callable[..., Coroutine[Any, Any, HeldLease]]
"""Called as `wait(url, task, user_agent=...)`: waits for the URL's lease, for the task and the name
(None: the gate's own). Raises as entering `Gate.lease` does."""


def gate_middleware(gate: Gate) -> ClientMiddlewareType:
    """Make an aiohttp client middleware that decides, paces and reports every hop.

    aiohttp calls it once per redirect hop, so a hop to another host is decided by that host's file
    and takes a lease of that host. The slot is held until the connection is released. The `total`
    timeout of a plain session includes the wait for a lease; that of `polite_session` does not.

    A request without a User-Agent of its own is sent with the gate's (aiohttp's default counts as
    none). A request with one is decided by the rules for that one.

    The request raises Denied or Deferred before a byte is sent, LeaseTimeout if waiting could never
    end, and InvalidURL for a URL that is not http or https, or that would be sent to another host
    than its text names (`yarl.URL(..., encoded=True)`).
    """

    made = gate_middleware_with(
        gate, lambda url, _, user_agent: enter_detached(gate.lease(url, user_agent=user_agent))
    )
    return partial(made, None)


def gate_middleware_with(
    gate: Gate,
    wait: WaitForLease,
    take: TakeLease | None = None,
    url_cache: UrlCache | None = None,
    unreached: Callable[[HeldLease, BaseException], object] | None = None,
    lapsed: Callable[[HeldLease], bool] | None = None,
    signer: RequestSigner | None = None,
    answered: NoteAnswer | None = None,
) -> DeadlineMiddleware:
    """Make the middleware of `gate_middleware` for requests with deadlines of their own.

    `take` and `wait` grant its leases, listed in no context; `url_cache` parsed the URLs; `signer`
    signs. `unreached` is told of a failure, `answered` of a response; `lapsed` ends a lapsed lease.
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
        elif agent is None and take is not None:
            lease = take(text, task)
        if lease is None:
            if limit is not None:
                limit.release_previous()
            lease = await wait(text, task, user_agent=agent)
        if not own_name or signer is not None:
            _identify(request, lease, gate, signer)
        started = loop.time()
        try:
            if limit is not None:
                limit.begin(task)
            send = handler if lapsed is None else partial(_send_held, handler, lapsed, lease, limit)
            response = await send(request)
            redirected = _take_head(response, limit, lease, adopted, answered)
        except HoldLapsed:  # nothing was sent, and the lease has ended
            return await pass_gate(limit, request, handler)
        except BaseException as error:
            if unreached is not None:
                unreached(lease, error)
            if _report_failure(gate, error, lease, limit, started):
                raise TimeoutError from None
            raise
        if redirected:
            credentials.note(response)
        return response

    return pass_gate


async def _send_held(
    handler: ClientHandlerType,
    lapsed: Callable[[HeldLease], bool],
    lease: HeldLease,
    limit: RequestDeadline | None,
    request: ClientRequest,
) -> ClientResponse:
    """Send the request if the hold of its lease lasts until the connection is made.

    Raises HoldLapsed before a byte is sent if connecting took longer than the hold lasts, or if a
    block began meanwhile.
    """
    look = before_send.set(partial(lapsed, lease))
    try:
        return await handler(request)
    except HoldLapsed:
        if limit is not None:
            limit.ran_out()
        raise
    finally:
        before_send.reset(look)


def _identify(
    request: ClientRequest, lease: HeldLease, gate: Gate, signer: RequestSigner | None
) -> None:
    """Set the request's User-Agent and sign it, just before it is sent.

    A request without a name is sent under the name whose rules allowed it.
    """
    if unnamed(request.headers.get(USER_AGENT)):
        name = lease.user_agent or gate.user_agent or lease.decision.user_agent
        request.headers[USER_AGENT] = name
    if signer is not None:
        signer.sign(request)


def _take_head(
    response: ClientResponse,
    limit: RequestDeadline | None,
    lease: HeldLease,
    adopted: HeldLease | None,
    noted: NoteAnswer | None,
) -> bool:
    """Report the head of a response. Keep the deadline running and the lease open until its
    connection is free. Return True for a redirect.

    An adopted lease belongs to a block, which may be left later than that. It ends all the same at
    a redirect: the next hop takes a lease of its own, which would wait for this one.
    """
    status, headers = response.status, response.headers
    if noted is not None:
        noted(lease, status, headers)
    limit_field = rate_limit_of(headers, _RATE_LIMIT)
    lease.answered(status, retry_after=headers.get(RETRY_AFTER), rate_limit=limit_field)
    connection = response.connection
    if limit is not None and (connection is None or status == _SWITCHING_PROTOCOLS):
        limit.ran_out()
        limit = None
    free = None if limit is None else limit.stop
    if lease.counts_bytes:
        free = counting_bytes(lease, response, free)
    redirected = status in REDIRECTS
    if adopted is not None and not redirected:
        lease.lasts_with(connection, free)
    elif connection is None and free is None:  # the whole body came with the head
        lease.end()
    else:
        lease.ends_with(connection, free)
    if limit is not None:
        limit.watch(response)  # last, as it may close the connection
    return redirected


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
    gate: Gate,
    error: BaseException,
    lease: HeldLease,
    limit: RequestDeadline | None,
    started: float,
) -> bool:
    """Report the failure and end the lease. Return True if its deadline caused the failure."""
    if isinstance(error, Denied):  # by the guard, at the socket
        note_refusal(gate, error.decision)
    late = limit is not None and limit.ran_out(error)
    # The request may have been sent, so the clock runs from the failure. A refusal of the guard, a
    # cancellation by the caller or a shortage of our own proves nothing about the host.
    failed = late or (
        isinstance(error, ClientError | OSError)
        and not isinstance(error, Denied)
        and not is_shortage(error)
    )
    try:
        elapsed = asyncio.get_running_loop().time() - started
        lease.report(elapsed=elapsed if failed else None)
    finally:
        # An adopted lease too: a second attempt (aiohttp makes one by itself if a reused connection
        # broke) takes a lease of its own, and would wait for this one.
        lease.end()
    return late


def signals(
    response: ClientResponse, *, user_agent: str | None = None, html: bytes = b""
) -> PageSignals:
    """Read what a response says about use, indexing and licences.

    Its header fields: X-Robots-Tag, Robots-Tag, Content-Usage, TDM fields, licence links, and
    whether a licence or a payment is required (SIG-03, SIG-15, SIG-16, SIG-18 to SIG-21); and its
    meta robots, if `html` is the beginning of the page, of which 64 KiB are read. They are read for
    `user_agent`; the default is the request's User-Agent. They restrict what may be done with the
    page, never whether it may be fetched.

    >>> async def main(session) -> None:
    ...     async with session.get("https://example.org/") as response:
    ...         if not signals(response).rules.index:
    ...             ...
    """
    named = user_agent or response.request_info.headers.get(USER_AGENT) or ""
    agent, url = product_token(named) or "*", str(response.url)
    return page_signals(response.headers, agent, html, url=url, status=response.status)
