"""The Gate protocol, and aiohttp's client middleware written against it.

`Gatekeeper` (embedded) and `RemoteGatekeeper` (a sidecar's client) both satisfy `Gate`;
whatever is written against it runs over either.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar
from functools import lru_cache, partial
from typing import Any, Protocol, Self
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
from gatekeeper.decision import Decision, NotYet, refuse
from gatekeeper.errors import Denied, HoldLapsed
from gatekeeper.fetching.guard import before_send
from gatekeeper.http_fields import REDIRECTS, rate_limit_of
from gatekeeper.identity import Signer
from gatekeeper.robots import PageSignals, page_signals, product_token
from gatekeeper.urls import UrlCache, sendable, url_of


class ConnectionInUse(Protocol):
    """What a request travels on, as long as somebody holds it: aiohttp's Connection, for one."""

    @property
    def closed(self) -> bool:
        """Nothing travels on it any more."""

    def add_callback(self, callback: Callable[[], None], /) -> None:
        """Have that called once it is free, or dropped."""


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

    @property
    def counts_bytes(self) -> bool:
        """Has its host a budget for which the bytes of the response count?"""

    def received(self, size: int) -> None:
        """So many bytes of the response came; for those that no report tells of."""

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
        self, connection: ConnectionInUse | None, then: Callable[[], None] | None = None
    ) -> None:
        """The slot is held until that connection is free, however long it takes; None: it is.

        `then` is called at that moment, before the slot is given on.
        """

    def lasts_with(
        self, connection: ConnectionInUse | None, then: Callable[[], None] | None = None
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
        """Whether the URL may be fetched now, and why."""

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

    async def try_acquire(
        self,
        url: str,
        *,
        priority: int = 0,
        user_agent: str | None = None,
        owned: bool = True,
    ) -> HeldLease | NotYet:
        """The lease if it can be had now; it ends by `end`."""


# --- the time a request may take ------------------------------------------------------------
#
# aiohttp's own total timeout runs from the call to the last byte, and so counts the wait for a
# turn as well. A `RequestDeadline` runs while a hop is under way or its body is read, and stands
# still between hops. One timer serves all requests of a session.


class RequestDeadline(msgspec.Struct, eq=False):
    """How many seconds one request, with its redirects, may still spend on the network."""

    among: SharedTimer
    left: float | None
    """None: no limit; over, where not above zero."""
    ends: float = math.inf
    """While they run: the moment at which they are over."""
    _under_way: int = 0
    """Hops that were sent and whose connection is not free; more than one where somebody
    tries again while the first answer's body still comes."""
    _task: asyncio.Task[object] | None = None
    _before: int = 0
    _deadline: Deadline | None = None
    _response: Callable[[], ClientResponse | None] | None = None
    """The response whose body is read, weakly: one that is dropped frees its connection."""

    def begin(self, task: asyncio.Task[object] | None) -> None:
        """A hop goes out, from the task: the seconds run."""
        left = self.left
        if left is None or task is None:
            return
        self._task = task
        self._before = task.cancelling()
        self._under_way += 1
        if self._under_way > 1:
            return  # they run
        among = self.among
        among.set(self, among.clock.monotonic() + left)

    def watch(self, response: ClientResponse) -> None:
        """The head is here: they run on until `stop`, when the connection is free."""
        self._response = ref(response)
        if self._deadline is not None and self._fired():
            self.due(self.ends)  # whoever caught our cancellation and went on

    def let_go(self) -> None:
        """Free the connection of an earlier attempt, of which nobody reads on: the next one
        would wait for its slot."""
        held, self._response = self._response, None
        if held is not None and (response := held()) is not None:
            response.release()

    def stop(self) -> None:
        """A hop is over; with the last one they stand still."""
        self._response = None
        if self._under_way > 1:
            self._under_way -= 1
            return
        self._under_way = 0
        among = self.among
        if among.drop(self):
            self.left = self.ends - among.clock.monotonic()

    def ran_out(self, error: BaseException) -> bool:
        """The hop failed with that error; whether it did because the time was over.

        A cancellation that came from elsewhere in the same moment is not swallowed.
        """
        self.stop()
        task = self._task
        return (
            task is not None
            and self._fired()
            and task.cancelling() <= self._before
            and isinstance(error, asyncio.CancelledError)
        )

    def _fired(self) -> bool:
        """Whether the task was cancelled by us, which is taken back."""
        limit, self._deadline = self._deadline, None
        if limit is None or self._task is None:
            return False
        limit.end()
        if not limit.fired:
            return False
        self._task.uncancel()
        return True

    def due(self, now: float) -> None:
        """The time is over: end what is under way, the hop or the body."""
        self.among.drop(self)
        self.left = 0.0
        if self._response is not None:
            response = self._response()
            if response is not None:
                response.content.set_exception(TimeoutError())
                response.close()
        elif self._task is not None:
            self._deadline = Deadline(self.among.clock, self._task)
            self._deadline.fire()


class Unlimited:
    """What stands for a `RequestDeadline` where nobody but aiohttp counts a request's time."""

    def begin(self, task: asyncio.Task[object] | None) -> None:
        """A hop goes out."""

    def watch(self, response: ClientResponse) -> None:
        """The head is here."""

    def let_go(self) -> None:
        """Another attempt begins: who made the last one looks after its connection."""

    def stop(self) -> None:
        """A hop is over."""

    def ran_out(self, error: BaseException) -> bool:
        """Never."""
        return False


UNLIMITED = Unlimited()


# --- the middleware -------------------------------------------------------------------------

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


TakeLease = Callable[[str, "asyncio.Task[object] | None"], HeldLease | None]
"""The URL's lease for the task, if it can be had at once; None says nothing."""


class WaitForLease(Protocol):
    """How a lease is had once its turn has come."""

    def __call__(
        self, url: str, owner: asyncio.Task[object] | None, /, *, user_agent: str | None = None
    ) -> Coroutine[Any, Any, HeldLease]:
        """The URL's lease for the task, under that name (None: the gate's own). Raises as
        `Gate.lease`."""


DeadlineMiddleware = Callable[
    [RequestDeadline | Unlimited, ClientRequest, ClientHandlerType],
    Coroutine[Any, Any, ClientResponse],
]


def _nothing_at_once(_url: str, _owner: asyncio.Task[object] | None) -> None:
    """No lease of a gate that can't see at a glance whether one is to be had."""


def _unheard(_lease: HeldLease, _error: BaseException) -> None:
    """Nobody wants to know why a request failed."""


def gate_middleware(gate: Gate) -> ClientMiddlewareType:
    """A client middleware: every hop is decided, paced and reported.

    aiohttp calls it once a redirect hop, so a hop to another host is decided by that
    host's file and takes that host's turn. The slot is held
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
        return enter_detached(gate.lease(url, user_agent=user_agent))

    return partial(gate_middleware_with(gate, wait), UNLIMITED)


def gate_middleware_with(
    gate: Gate,
    wait: WaitForLease,
    take: TakeLease = _nothing_at_once,
    url_cache: UrlCache | None = None,
    unreached: Callable[[HeldLease, BaseException], object] = _unheard,
    lapsed: Callable[[HeldLease], bool] | None = None,
    signer: Signer | None = None,
) -> DeadlineMiddleware:
    """`gate_middleware` for requests that have a deadline of their own, given how leases are had.

    No context lists their leases. `url_cache` reads the URLs, if anything of ours does, `unreached`
    is told what failed, `lapsed` gives back what may not be used any more, `signer` signs.
    """
    offered, spelt, current_task = _Offered(), url_cache or UrlCache(), asyncio.current_task

    async def pass_gate(
        own: RequestDeadline | Unlimited, request: ClientRequest, handler: ClientHandlerType
    ) -> ClientResponse:
        loop, url = request.loop, request.url  # asyncio would ask for the process's number first
        task = current_task(loop)
        sent = request.headers.get(USER_AGENT)
        ours = sent is not None and sent == gate.user_agent
        agent = None if ours else other_agent(sent, gate.user_agent)
        read_before = url is spelt.last and not offered
        text = spelt.text if read_before else offered.taken_by(request) or sendable(url)
        lease = adopted = adopt(text) if open_leases.get() else None
        if lease is not None:
            if not (ours and lease.user_agent is None):
                await judge_adopted(lease, sent, gate, text)
        elif agent is None:
            lease = take(text, task)
        if lease is None:
            own.let_go()
            lease = await wait(text, task, user_agent=agent)
        if not ours or signer is not None:
            _identify(request, lease, None if ours else gate, signer)
        started = loop.time()
        try:
            own.begin(task)
            send = handler if lapsed is None else partial(_in_time, handler, lapsed, lease)
            response = await send(request)
            _tell(lease, response)
        except HoldLapsed:  # nothing was sent, and the lease has ended
            return await pass_gate(own, request, handler)
        except BaseException as error:
            unreached(lease, error)
            if _failed(error, lease, own, started):
                raise TimeoutError from None
            raise
        redirected = response.status in REDIRECTS
        # The next hop takes a turn of its own, and could wait for this one for ever. Else an
        # adopted lease lasts until both its block and its connection are done with.
        _until_free(response, own, lease, in_block=adopted is not None and not redirected)
        if redirected:
            offered.note(response)
        return response

    return pass_gate


def _tell(lease: HeldLease, response: ClientResponse) -> None:
    """The head of the answer is here."""
    headers = response.headers
    lease.answered(
        response.status,
        retry_after=headers.get(RETRY_AFTER),
        rate_limit=rate_limit_of(headers, _RATE_LIMIT),
    )


async def _in_time(
    handler: ClientHandlerType,
    lapsed: Callable[[HeldLease], bool],
    lease: HeldLease,
    request: ClientRequest,
) -> ClientResponse:
    """Send it while the hold of its lease lasts. Raises HoldLapsed, before a byte is sent, where it
    had to wait or was stopped for longer between grant and connection, or a block came."""
    look = before_send.set(partial(lapsed, lease))
    try:
        return await handler(request)
    finally:
        before_send.reset(look)


# What libraries send where nobody said who asks.
_LIBRARY = re.compile(
    r"Python/[0-9.]+ aiohttp/\S+|python-(?:httpx2?|requests|urllib3)/\S+|Python-urllib/\S+"
    r"|Scrapy/\S+ \(\+https?://scrapy\.org\)"
)


def unnamed(sent: str | None) -> bool:
    """Whether a User-Agent is none, or a library's default, which says nobody's name."""
    return sent is None or _LIBRARY.fullmatch(sent) is not None


@lru_cache(maxsize=1024)
def other_agent(sent: str | None, own: str | None) -> str | None:
    """The User-Agent of a request, if rules of its own may be meant for it; None: the gate's."""
    if sent is None or unnamed(sent) or (own is not None and _same_agent(sent, own)):
        return None
    return sent


def _same_agent(one: str, other: str) -> bool:
    return product_token(one).lower() == product_token(other).lower()


async def judge_adopted(lease: HeldLease, sent: str | None, gate: Gate, url: str) -> None:
    """See that a request under another name than the lease that it adopts is welcome, too.

    The turn is the same for all. Raises Denied or Deferred.
    """
    if sent is None or unnamed(sent):
        return  # it is sent under the lease's
    if not _same_agent(sent, lease.user_agent or gate.user_agent or lease.decision.user_agent):
        refuse(await gate.check(url, user_agent=sent))


def _identify(
    request: ClientRequest, lease: HeldLease, gate: Gate | None, signer: Signer | None
) -> None:
    """Say who sends a request, now that it leaves; `gate` is None where it is under its name.

    One without a name of its own is sent under the one whose rules allow it.
    """
    if gate is not None and unnamed(request.headers.get(USER_AGENT)):
        name = lease.user_agent or gate.user_agent or lease.decision.user_agent
        request.headers[USER_AGENT] = name
    if signer is not None:
        signer.sign(request)


def _until_free(
    response: ClientResponse, own: RequestDeadline | Unlimited, lease: HeldLease, *, in_block: bool
) -> None:
    """Let the deadline run, and the lease last, until the response's connection is free.

    `in_block`: the lease belongs to a block, which may be left later.
    """
    connection = response.connection
    counted = connection is not None and response.status != _SWITCHING
    stop = own.stop if counted else None
    if lease.counts_bytes:
        stop = counting_bytes(lease, response, stop)
    if in_block:
        lease.lasts_with(connection, stop)
    else:
        lease.ends_with(connection, stop)
    if counted:
        own.watch(response)  # it may close the connection, so it comes last
    else:
        own.stop()


def counting_bytes(
    lease: HeldLease, response: ClientResponse, then: Callable[[], None] | None = None
) -> Callable[[], None]:
    """What counts the bytes of the body, as they were decoded, once the connection is free, and
    calls `then`."""
    content = response.content  # not the response: that ends its connection when it is dropped

    def count() -> None:
        if then is not None:
            then()
        lease.received(content.total_bytes)

    return count


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
    error: BaseException, lease: HeldLease, own: RequestDeadline | Unlimited, started: float
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


async def enter_detached(turn: AbstractAsyncContextManager[HeldLease]) -> HeldLease:
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

    X-Robots-Tag, Robots-Tag, Content-Usage, TDM fields, licence links, and whether a licence or a
    payment is asked for (SIG-03, SIG-15, SIG-16, SIG-18 to SIG-21), for `user_agent`, or else for
    the agent that the request named. They speak of what may be done with the page; they never
    change whether it may be fetched.

    >>> async def main(session) -> None:
    ...     async with session.get("https://example.org/") as response:
    ...         if not signals(response).rules.index:
    ...             ...
    """
    named = user_agent or response.request_info.headers.get(USER_AGENT) or ""
    agent, url = product_token(named) or "*", str(response.url)
    return page_signals(response.headers, agent, url=url, status=response.status)


# --- mistakes of a caller that no type checker looked at ------------------------------------


def refuse_one_text(urls: Iterable[str]) -> None:
    """Raise TypeError for a text, of which each character would be a URL, and what can't be read
    one by one.

    >>> refuse_one_text("https://example.org/")
    Traceback (most recent call last):
    TypeError: urls must be a list of URLs, not one str: give [url], or ask check(url)
    """
    if isinstance(urls, str | bytes | bytearray):
        kind = type(urls).__name__
        raise TypeError(
            f"urls must be a list of URLs, not one {kind}: give [url], or ask check(url)"
        )
    if not isinstance(urls, Iterable):
        raise TypeError(
            f"urls must be a list of URLs, or another iterable, not {type(urls).__name__}"
        )


_WHOLE = frozenset({type(None), int})
_NUMBER = _WHOLE | {float}
_FIELD = _NUMBER | {str}


def wrong_report(
    status: object, elapsed: object, retry_after: object, size: object
) -> TypeError | None:
    """What is wrong with the types of a report; None: nothing is.

    >>> wrong_report("200", None, None, None)
    TypeError("status must be an int such as 200, not the str '200': give int(status)")
    """
    # By class first: each request has a report, and nearly all are right.
    if (
        status.__class__ in _WHOLE
        and elapsed.__class__ in _NUMBER
        and size.__class__ in _WHOLE
        and retry_after.__class__ in _FIELD
    ):
        return None
    if not (status is None or _is(status, int)):
        return _wrong("status", status, "an int such as 200", "int")
    if not (elapsed is None or _is(elapsed, int, float)):
        return _wrong("elapsed", elapsed, "seconds such as 0.25", "float")
    if not (size is None or _is(size, int)):
        return _wrong("size", size, "bytes such as 1024", "int")
    if not (retry_after is None or _is(retry_after, int, float, str)):
        return _wrong(
            "retry_after", retry_after, "seconds such as 120, or the Retry-After field", "str"
        )
    return None


def _is(value: object, *kinds: type) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


def _wrong(name: str, value: object, wanted: str, kind: str) -> TypeError:
    shown = f"{value!r}"[:40]
    text = f"{name} must be {wanted}, not the {type(value).__name__} {shown}"
    return TypeError(f"{text}: give {kind}({name})" if isinstance(value, str | bytes) else text)


class Unentered:
    """A name of the lease on the class of its request: looked at there it tells the remedy.

    A descriptor for the usual names, as `__getattr__` would slow every other one down. It stands
    behind `if not TYPE_CHECKING`: a type checker finds the mistake by itself.
    """

    __slots__ = ()

    def __get__(self, request: object, owner: type) -> Self:
        """Itself for the class; else raises AttributeError, as for any name that is missing."""
        if request is None:
            return self
        raise AttributeError(
            "this is the request for a lease; enter it first: async with gate.lease(...) as lease"
        )
