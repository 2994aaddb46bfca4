"""The Gate protocol, and aiohttp's client middleware written against it.

`Gatekeeper` (embedded) and `RemoteGatekeeper` (a sidecar's client) both satisfy `Gate`;
whatever is written against it runs over either.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar
from functools import lru_cache, partial
from typing import Any, Protocol

from aiohttp import (
    ClientError,
    ClientHandlerType,
    ClientMiddlewareType,
    ClientRequest,
    ClientResponse,
    encode_basic_auth,
)
from aiohttp.connector import Connection
from aiohttp.hdrs import AUTHORIZATION, LOCATION, RETRY_AFTER, URI, USER_AGENT

from gatekeeper.allowance import UNLIMITED, Allowance, Unlimited
from gatekeeper.decision import Decision, Verdict
from gatekeeper.errors import Deferred, Denied
from gatekeeper.robots import PageSignals, page_signals, product_token
from gatekeeper.url_cache import UrlCache, url_of
from gatekeeper.urls import sendable

__all__ = [
    "Gate",
    "HeldLease",
    "Passage",
    "adopt",
    "gate_middleware",
    "gate_passage",
    "held_leases",
    "hold_in_context",
    "inherited",
    "open_leases",
    "signals",
]


class HeldLease(Protocol):
    """The right to send one request, while it is held.

    Three moments matter to a host's clock: the head of the response, what came of the
    request, and the end of the connection. Each call is idempotent and never waits.
    """

    @property
    def url(self) -> str:
        """The URL the lease was granted for, in its normal form."""

    @property
    def decision(self) -> Decision:
        """The answer at the moment of the grant."""

    @property
    def user_agent(self) -> str | None:
        """The name that it was asked for under, as it was given; None: the gate's own."""

    def claim(self, url: str) -> bool:
        """Take the lease for a request to `url`; true for the first matching claim."""

    def head(self) -> None:
        """The head of the response is here: the interval counts from now."""

    def answered(
        self, status: int, *, retry_after: str | None = None, rate_limit: str | None = None
    ) -> None:
        """`head` and `report` in one: the head is here, and says so much."""

    def report(
        self,
        *,
        status: int | None = None,
        elapsed: float | None = None,
        retry_after: float | str | None = None,
        size: int | None = None,
        rate_limit: str | None = None,
    ) -> None:
        """Say what came of the request; the first report is final.

        `elapsed` is seconds to the response head, `retry_after` the header as it came
        or seconds, `size` the body's bytes, `rate_limit` the RateLimit header as it came.
        """

    def ends_with(
        self, connection: Connection | None, then: Callable[[], None] | None = None
    ) -> None:
        """The slot is held until that connection is free, however long it takes; None: it is.

        `then` is called at that moment, before the slot is given on.
        """

    def lasts_with(
        self, connection: Connection | None, then: Callable[[], None] | None = None
    ) -> None:
        """The slot is held until that connection is free, even if the block of the lease is
        left before; a block that is left later ends it then.

        `then` is called when the connection is free, at once if it is None.
        """

    def end(self) -> None:
        """The connection is free again: the slot goes to the next in line."""


class Gate(Protocol):
    """What a crawler asks, wherever the gate runs."""

    @property
    def user_agent(self) -> str | None:
        """The name whose rules apply where a question names no other; None: not known."""

    async def allowed(self, url: str, *, user_agent: str | None = None) -> bool:
        """Whether the URL may be fetched now."""

    async def check(self, url: str, *, user_agent: str | None = None) -> Decision:
        """The same, explained."""

    def check_many(
        self, urls: Iterable[str], *, user_agent: str | None = None
    ) -> AsyncIterator[Decision]:
        """Decisions in the order of the URLs; origins are asked in parallel."""

    def lease(
        self,
        url: str,
        *,
        priority: int = 0,
        timeout: float | None = None,
        user_agent: str | None = None,
    ) -> AbstractAsyncContextManager[HeldLease]:
        """The right to send one request, once the host's turn has come."""


_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_SWITCHING = 101  # a websocket lives on for as long as it likes
_MAX_OFFERED = 256
_RATE_LIMIT = type(RETRY_AFTER)("RateLimit")  # looked up without folding its case each time

open_leases: ContextVar[tuple[HeldLease, ...]] = ContextVar("gatekeeper_open_leases", default=())
"""The leases that `async with gate.lease(...)` holds open in this context, oldest first."""


held_leases: ContextVar[tuple[Any, ...]] = ContextVar("gatekeeper_held_leases", default=())
"""The leases that belong to tasks of this context without a block, oldest first."""


def hold_in_context(lease: Any) -> None:
    """Let tasks that are started from here know of a lease that no block surrounds."""
    before = held_leases.get()
    if before:  # most have one at a time
        before = tuple(one for one in before if not one.ended) if len(before) > 1 else before
        if len(before) == 1 and before[0].ended:
            before = ()
    held_leases.set((*before, lease))


def inherited(task: asyncio.Task[object] | None) -> list[Any]:
    """The open leases of other tasks under which this one was started: a task's context is a
    copy, made when it is started, of that of the task which starts it.
    """
    blocks, others = open_leases.get(), held_leases.get()
    if not blocks and not others:
        return []
    found = dict.fromkeys((*blocks, *others))
    return [one for one in found if one.owner is not task and one.owner and not one.ended]


def adopt(url: str) -> HeldLease | None:
    """The open lease of this context that was taken for this URL, if any; once."""
    for lease in reversed(open_leases.get()):
        if lease.claim(url):
            return lease
    return None


class Take(Protocol):
    """How a lease is had at once."""

    def __call__(
        self, url: str, owner: asyncio.Task[object] | None, place: str = "", path: str = "", /
    ) -> HeldLease | None:
        """The URL's lease for the task, if it can be had at once; None says nothing.

        `place` and `path`: its two parts, where the latter is known to be plain.
        """


class Wait(Protocol):
    """How a lease is had once its turn has come."""

    def __call__(
        self, url: str, owner: asyncio.Task[object] | None, /, *, user_agent: str | None = None
    ) -> Coroutine[Any, Any, HeldLease]:
        """The URL's lease for the task, under that name (None: the gate's own). Raises as
        `Gate.lease`."""


Passage = Callable[
    [Allowance | Unlimited, ClientRequest, ClientHandlerType], Coroutine[Any, Any, ClientResponse]
]


def _nothing_at_once(*_: object) -> None:
    """No lease of a gate that can't see at a glance whether one is to be had."""


def _unheard(_lease: HeldLease, _error: BaseException) -> None:
    """Nobody wants to know why a request failed."""


def gate_middleware(gate: Gate) -> ClientMiddlewareType:
    """A client middleware: every hop is decided, paced and reported.

    aiohttp calls it once a redirect hop, so a hop to another host is decided by that
    host's file and takes that host's turn (fetching.md section 7). The slot is held
    until the connection is released. A plain session's `total` timeout covers the
    waiting; `polite_session` leaves it out.

    A request that has no User-Agent of its own is sent with the gate's (aiohttp's default
    counts as none); one that has is judged by that one, whatever the gate is called.

    Raises Denied or Deferred before a byte is sent, LeaseTimeout where waiting could
    never end, InvalidURL for a URL that is not http or https, or that would be sent to
    another host than its text names (`yarl.URL(..., encoded=True)`).
    """

    def wait(
        url: str, _: asyncio.Task[object] | None, *, user_agent: str | None = None
    ) -> Coroutine[Any, Any, HeldLease]:
        return _enter_detached(gate.lease(url, user_agent=user_agent))

    return partial(gate_passage(gate, wait), UNLIMITED)


def gate_passage(
    gate: Gate,
    wait: Wait,
    take: Take = _nothing_at_once,
    url_cache: UrlCache | None = None,
    unreached: Callable[[HeldLease, BaseException], object] = _unheard,
) -> Passage:
    """The same for requests that have an allowance of their own, over a gate's own roads.

    Their leases stand in no context's list. `url_cache` is what reads the requests' URLs, if
    anything of ours does. `unreached` is told of each request that failed, and with what.
    """

    offered = _Offered()
    spelt = url_cache or UrlCache()
    current_task = asyncio.current_task

    async def pass_gate(
        own: Allowance | Unlimited, request: ClientRequest, handler: ClientHandlerType
    ) -> ClientResponse:
        loop = request.loop  # asyncio would ask the system for the process's number first
        task = current_task(loop)
        url = request.url
        adopted = agent = None
        sent = request.headers.get(USER_AGENT)
        ours = sent is not None and sent == gate.user_agent
        if not ours:
            agent = _other_agent(sent, gate.user_agent)
        if agent is None and url is spelt.last and not offered and not open_leases.get():
            text = spelt.text
            lease = take(text, task, spelt.authority.origin, spelt.path)
        else:
            text = offered.taken_by(request) or sendable(url)
            adopted = lease = adopt(text)
            if adopted is not None and not (ours and adopted.user_agent is None):
                await _judge_adopted(adopted, sent, gate, text)
            elif adopted is None and agent is None:
                lease = take(text, task)
        if lease is None:
            own.let_go()
            lease = await wait(text, task, user_agent=agent)
        if not ours:
            _sign(request, lease, gate)
        started = loop.time()
        try:
            own.begin(task)
            response = await handler(request)
            headers, status = response.headers, response.status
            lease.answered(
                status,
                retry_after=headers.get(RETRY_AFTER),
                rate_limit=headers.get(_RATE_LIMIT),
            )
        except BaseException as error:
            unreached(lease, error)
            if _failed(error, lease, own, started):
                raise TimeoutError from None
            raise
        redirected = status in _REDIRECTS
        # The next hop takes a turn of its own; to hold this one meanwhile could wait for ever.
        # Else an adopted lease lasts until both its block and its connection are done with.
        _until_free(response, own, lease, in_block=adopted is not None and not redirected)
        if redirected:
            offered.note(response)
        return response

    return pass_gate


# What aiohttp sends where nobody said who asks.
_AIOHTTP = re.compile(r"Python/[0-9.]+ aiohttp/\S+")


def _unnamed(sent: str | None) -> bool:
    return sent is None or _AIOHTTP.fullmatch(sent) is not None


@lru_cache(maxsize=1024)
def _other_agent(sent: str | None, own: str | None) -> str | None:
    """The User-Agent of a request, if rules of its own may be meant for it; None: the gate's."""
    if sent is None or _unnamed(sent) or (own is not None and _same_agent(sent, own)):
        return None
    return sent


def _same_agent(one: str, other: str) -> bool:
    return product_token(one).lower() == product_token(other).lower()


async def _judge_adopted(lease: HeldLease, sent: str | None, gate: Gate, url: str) -> None:
    """See that a request under another name than the lease that it adopts is welcome, too.

    The turn is the same for all. Raises Denied or Deferred.
    """
    if sent is None or _unnamed(sent):
        return  # it is sent under the lease's
    if not _same_agent(sent, lease.user_agent or gate.user_agent or lease.decision.user_agent):
        decision = await gate.check(url, user_agent=sent)
        if decision.verdict is not Verdict.ALLOW:
            raise (Deferred if decision.verdict is Verdict.DEFER else Denied)(decision)


def _sign(request: ClientRequest, lease: HeldLease, gate: Gate) -> None:
    """A request without a name of its own is sent under the one whose rules allow it."""
    if _unnamed(request.headers.get(USER_AGENT)):
        name = lease.user_agent or gate.user_agent or lease.decision.user_agent
        request.headers[USER_AGENT] = name


def _until_free(
    response: ClientResponse, own: Allowance | Unlimited, lease: HeldLease, *, in_block: bool
) -> None:
    """Let the allowance run, and the lease last, until the response's connection is free.

    `in_block`: the lease belongs to a block, which may be left later.
    """
    connection = response.connection
    counted = connection is not None and response.status != _SWITCHING
    stop = own.stop if counted else None
    if in_block:
        lease.lasts_with(connection, stop)
    else:
        lease.ends_with(connection, stop)
    if counted:
        own.watch(response)  # it may close the connection, so it comes last
    else:
        own.stop()


class _Offered(dict[tuple[str | None, str], str]):
    """Credentials that redirects named, for whom, and the URL that held them.

    aiohttp takes them out of a Location and sends them as Authorization: neither a middleware
    nor a connector sees them in the URL. So the next hop is known by its header, and the gate
    is asked about the URL as the site wrote it, which the guard refuses (T1: each hop). Who
    follows no redirects leaves them here: they are few, and the oldest go first.
    """

    def note(self, response: ClientResponse) -> None:
        """Look where a redirect leads; no await lies between it and the next hop."""
        location = response.headers.get(LOCATION) or response.headers.get(URI)
        if location is None or "@" not in location:
            return
        try:
            url = response.url.join(url_of(location))
            if url.raw_user is None and url.raw_password is None:
                return
            for encoding in ("latin1", "utf-8"):  # aiohttp's for a URL, and for anything else
                sent = encode_basic_auth(url.user or "", url.password or "", encoding)
                self[url.raw_host, sent] = str(url)
        except ValueError:
            pass  # aiohttp can send no such thing either
        while len(self) > _MAX_OFFERED:
            del self[next(iter(self))]

    def taken_by(self, request: ClientRequest) -> str | None:
        """The URL that the request has its credentials from, if a redirect gave them."""
        sent = request.headers.get(AUTHORIZATION)
        return None if sent is None else self.pop((request.url.raw_host, sent), None)


def _failed(
    error: BaseException, lease: HeldLease, own: Allowance | Unlimited, started: float
) -> bool:
    """Report the failure and end the lease; whether it failed because its time was over."""
    late = own.ran_out(error)
    # It may have left, so it counts as sent; the clock runs from the failure. What the
    # guard refused or the caller cancelled says nothing about the host.
    failed = late or (isinstance(error, ClientError | OSError) and not isinstance(error, Denied))
    try:
        elapsed = asyncio.get_running_loop().time() - started
        lease.report(elapsed=elapsed if failed else None)
    finally:
        # One that was adopted too: a second attempt (aiohttp makes one by itself where a kept
        # connection broke) takes a turn of its own, and would wait for this one.
        lease.end()
    return late


async def _enter_detached(turn: AbstractAsyncContextManager[HeldLease]) -> HeldLease:
    """Take a lease that ends with its connection, not with a block.

    Entering puts it among the context's open leases; a request sent for it must not be
    adopted by another, so it is claimed at once and taken off the list again.
    """
    before = open_leases.get()
    lease = await turn.__aenter__()
    lease.claim(lease.url)
    open_leases.set(before)
    return lease


def signals(response: ClientResponse, *, user_agent: str | None = None) -> PageSignals:
    """What a response's header says about use, indexing and licences.

    X-Robots-Tag, Robots-Tag, Content-Usage, TDM fields and licence links (SIG-03, SIG-15,
    SIG-18 to SIG-21), for `user_agent`, or else for the agent that the request named. They
    speak of what may be done with the page; they never change whether it may be fetched.

    >>> async def main(session) -> None:
    ...     async with session.get("https://example.org/") as response:
    ...         if not signals(response).rules.index:
    ...             ...
    """
    named = user_agent or response.request_info.headers.get(USER_AGENT) or ""
    return page_signals(response.headers, product_token(named) or "*", url=str(response.url))
