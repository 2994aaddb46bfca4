"""`SyncGatekeeper`: the questions and leases of a gate, for blocking code.

The gate runs in an event loop of its own, in a thread of its own. Each calling thread has a task in
that loop, which makes its calls: so the gate knows which leases belong to one thread, and a thread
that would wait for a lease that it holds itself gets an error immediately, as a task does.

    fork     a child process has the object but not the thread: every method raises GateClosed there
    exit     a gate that was not closed is closed when the interpreter exits, or when it is dropped
    Ctrl-C   a thread that is interrupted while it waits leaves no lease or question behind
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Self, TypedDict, TypeVar, Unpack, cast

import msgspec

from gatekeeper.client.client import RemoteGatekeeper, RemoteStats
from gatekeeper.client.remote_leases import RemoteLease
from gatekeeper.clock import OwnedTasks
from gatekeeper.config import Config, HostRule, agent_named, as_config
from gatekeeper.decision import Decision, NotYet
from gatekeeper.errors import GateClosed, refusing
from gatekeeper.gate import Gatekeeper, GateStats
from gatekeeper.gate.lease import Lease
from gatekeeper.gate.lease_base import Unentered, bind, unbind
from gatekeeper.gate.protocols import ConnectionInUse
from gatekeeper.pacing.waiters import ClockView
from gatekeeper.robots import Policy, RobotsTxt
from gatekeeper.sitemaps import SitemapEntry, SitemapFinding, SitemapOptions, Sitemaps

__all__ = ["SyncGatekeeper", "SyncLease", "SyncSitemaps"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_AnyGate = Gatekeeper | RemoteGatekeeper
_Make = Callable[[], _AnyGate]

_BLOCKING = (
    "a SyncGatekeeper is for blocking code: use `with`, without async and await; in asynchronous "
    "code use a Gatekeeper"
)
_CLOSED = "the gate was closed meanwhile"
_CLOSE_SECONDS = 15.0
"""Seconds that closing waits for the thread; the last reports to a sidecar take at most five."""


class LeaseOptions(TypedDict, total=False):
    """The options of `Gatekeeper.lease`."""

    priority: int
    timeout: float | None
    user_agent: str | None


class AcquireOptions(LeaseOptions, total=False):
    """The options of `Gatekeeper.acquire`."""

    owned: bool


class ReportFields(TypedDict, total=False):
    """What `Lease.report` tells of a request."""

    status: int | None
    elapsed: float | None
    retry_after: float | str | None
    size: int | None
    rate_limit: str | None


class _Call(msgspec.Struct, Generic[_T], eq=False):
    """One call of a thread. Only the loop's thread uses it, except for `future`."""

    _work: Callable[[], Awaitable[_T]]
    _undo: Callable[[_T], object] | None
    future: Future[_T] = msgspec.field(default_factory=Future)
    _task: asyncio.Task[Any] | None = None
    _abandoned: bool = False

    async def run(self) -> None:
        """Make the call, in the task of the calling thread."""
        if self._abandoned:
            return
        self._task = task = asyncio.current_task()
        try:
            result = await self._work()
        except asyncio.CancelledError:
            if not self._abandoned or task is None:
                _settle(self.future, error=GateClosed(_CLOSED))
                raise
            task.uncancel()  # this call was cancelled, not the thread's task
        except BaseException as error:  # noqa: BLE001 - raised in the calling thread
            _settle(self.future, error=error)
        else:
            if self._abandoned and self._undo is not None:
                self._undo(result)
            _settle(self.future, result)

    def abandon(self) -> None:
        """Cancel the call, or undo its result: the thread does not wait any more."""
        self._abandoned = True
        if not self.future.done():
            if self._task is not None:
                self._task.cancel()
        elif self._undo is not None and self.future.exception() is None:
            self._undo(self.future.result())


class _Caller:
    """The task in the loop that makes the calls of one thread. Dropped with the thread."""

    def __init__(self, gate_thread: _GateThread) -> None:
        self._gate_thread = gate_thread
        self.calls: asyncio.Queue[_Call[Any] | None] = asyncio.Queue()
        gate_thread.loop.call_soon_threadsafe(gate_thread.serve, self.calls)

    def __del__(self) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._gate_thread.loop.call_soon_threadsafe(self.calls.put_nowait, None)


class _GateThread:
    """The thread, its loop and the gate in it. It has no reference to the SyncGatekeeper, which can
    therefore be garbage collected."""

    def __init__(self, make: _Make) -> None:
        self.pid = os.getpid()
        self.loop: asyncio.AbstractEventLoop
        self.gate: Any = None
        self.closed = False
        self.pending: set[Future[Any]] = set()
        """Futures that threads wait for."""
        self._ended = False
        self._callers = OwnedTasks()
        opened: Future[None] = Future()
        # A daemon, as the interpreter joins other threads before it closes the gate.
        self._thread = threading.Thread(
            target=self._run, args=(make, opened), name="gatekeeper", daemon=True
        )
        self._thread.start()
        opened.result()

    def _run(self, make: _Make, opened: Future[None]) -> None:
        try:
            asyncio.run(self._live(make, opened))
        finally:
            self._ended = True
            for future in list(self.pending):
                _settle(future, error=GateClosed(_CLOSED))

    def result_of(self, future: Future[_T], work: Callable[..., object], *given: Any) -> _T:
        """Call `work` in the loop, and wait for the future, which fails if the gate ends."""
        try:
            self.pending.add(future)
            if self._ended:  # the thread may have failed its pending futures before the `add`
                _settle(future, error=GateClosed(_CLOSED))
            _post(self, work, *given)
            return future.result()
        finally:
            self.pending.discard(future)

    async def _live(self, make: _Make, opened: Future[None]) -> None:
        self.loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        try:
            async with make() as self.gate:
                opened.set_result(None)
                await self._stop.wait()
        except BaseException as error:  # noqa: BLE001 - raised in the thread that opens the gate
            if opened.done():
                _log.exception("closing the gate failed")
            else:
                opened.set_exception(error)
        finally:
            self.closed = True
            await self._callers.close()

    @property
    def inside(self) -> bool:
        """Whether the current thread is the loop's."""
        return threading.current_thread() is self._thread

    def serve(self, calls: asyncio.Queue[_Call[Any] | None]) -> None:
        """Start the task of another thread."""
        self._callers.start(self._serve(calls))

    async def _serve(self, calls: asyncio.Queue[_Call[Any] | None]) -> None:
        while not self.closed and (call := await calls.get()) is not None:
            await call.run()
            call = None  # drop it and its result now, not with the next call

    def close(self) -> None:
        """Close the gate and wait for its thread. Idempotent; does nothing in a forked child."""
        if os.getpid() != self.pid:
            return
        with suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(self._stop.set)
        if not self.inside:
            self._thread.join(_CLOSE_SECONDS)


class SyncGatekeeper:
    """A gate for blocking code: the questions and leases of `Gatekeeper`, without `await`.

    It opens on entering its `with` block, or with the first call; leaving the block or `close` ends
    it. It is thread-safe: the threads share its clocks, and each waits for its own leases. In a
    forked child process every method raises GateClosed: make another gate there.

    `user_agent` and the other arguments are those of `Gatekeeper`. `SyncGatekeeper.remote(...)`
    asks a sidecar instead. Raises ConfigError as they do.

    >>> with SyncGatekeeper("examplebot/1.0 (+https://example.org/bot)") as gate:
    ...     with gate.lease("https://example.org/page") as lease:  # doctest: +SKIP
    ...         lease.report(status=200)
    """

    if not TYPE_CHECKING:
        __await__ = __aenter__ = __aexit__ = refusing(_BLOCKING)

    def __init__(self, user_agent: str, *, config: Config | None = None, **options: Any) -> None:
        """`options`: `storage`, `resolver`, `clock`, `rng` and `ledger`, as for `Gatekeeper`."""
        agent_named(user_agent)
        self._set_up(partial(Gatekeeper, user_agent, config=config, **options), user_agent, config)

    @classmethod
    def remote(
        cls, where: str | os.PathLike[str], user_agent: str | None = None, **options: Any
    ) -> Self:
        """Make one that asks a sidecar; the arguments are those of `RemoteGatekeeper`.

        >>> gate = SyncGatekeeper.remote("http://127.0.0.1:8750", "examplebot/1.0")
        """
        self = cls.__new__(cls)
        make = partial(RemoteGatekeeper, where, user_agent, **options)
        self._set_up(make, user_agent, options.get("config"))
        return self

    def _set_up(self, make: _Make, user_agent: str | None, config: Config | None) -> None:
        self.config: Config = as_config(config)
        """The settings; adapters guard their requests by them as well."""
        self._make = make
        self._name = user_agent
        self._gate_thread: _GateThread | None = None
        self._closed = False
        self._opening, self._pid = threading.Lock(), os.getpid()
        self._threads = threading.local()

    def __enter__(self) -> Self:
        self._running()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the gate: waiting calls raise GateClosed, and open leases end. Idempotent."""
        self._closed = True
        if self._gate_thread is not None:
            self._finalize()

    @property
    def user_agent(self) -> str | None:
        """The name whose rules apply if a question has no other.

        Without one, for a sidecar, the sidecar's own, once the gate is open; None before that, and
        if the sidecar was unreachable then.
        """
        if self._name is None and self._gate_thread is not None:
            return cast("str | None", self._gate_thread.gate.user_agent)
        return self._name

    # -- questions -------------------------------------------------------------------

    def allowed(self, url: str, *, user_agent: str | None = None) -> bool:
        """Return True if the URL may be fetched now. Raises InvalidURL."""
        return self.wait(lambda gate: gate.allowed(url, user_agent=user_agent))

    def check(self, url: str, *, user_agent: str | None = None) -> Decision:
        """Decide whether the URL may be fetched now, and why. Raises InvalidURL."""
        return self.wait(lambda gate: gate.check(url, user_agent=user_agent))

    def check_many(
        self, urls: Iterable[str], *, user_agent: str | None = None
    ) -> Iterator[Decision]:
        """Yield a decision about each URL, in order; robots.txt files are fetched in parallel.

        A malformed URL yields DENY with reason `invalid_url`, so there is one decision per input.
        """
        return self._iterate(self.do(lambda gate: gate.check_many(urls, user_agent=user_agent)))

    def _iterate(self, found: Any) -> Iterator[Any]:
        """Iterate in this thread over what an asynchronous iterator yields in the gate's loop."""
        try:
            while (one := self.wait(lambda _: anext(found, None))) is not None:
                yield one
        finally:
            with suppress(GateClosed):
                self.wait(lambda _: found.aclose())

    def sitemaps(self, origin: str, **options: Unpack[SitemapOptions]) -> SyncSitemaps:
        """Iterate over the pages that the origin's sitemaps list. See `Gatekeeper.sitemaps`."""
        found: Sitemaps = self.do(lambda gate: gate.sitemaps(origin, **options))
        return SyncSitemaps(found, self._iterate(found))

    def peek(self, url: str, *, user_agent: str | None = None) -> Decision | None:
        """Decide from cached data, without fetching. None if it does not suffice.

        Raises InvalidURL.
        """
        return self.do(lambda gate: gate.peek(url, user_agent=user_agent))

    def robots(self, url: str) -> RobotsTxt | None:
        """Return the robots.txt of the URL's origin; None if there is no text."""
        return self.wait(lambda gate: gate.robots(url))

    def policy(self, url: str, *, user_agent: str | None = None) -> Policy:
        """Return the rules of the URL's origin for the agent. See `Gatekeeper.policy`."""
        return self.wait(lambda gate: gate.policy(url, user_agent=user_agent))

    # -- leases ----------------------------------------------------------------------

    def lease(self, url: str, **options: Unpack[LeaseOptions]) -> SyncLeaseRequest:
        """Wait until the host is due; the lease is the right to send one request to the URL.

        Use it as `with gate.lease(url) as lease:`. `options` are those of `Gatekeeper.lease`:
        `priority`, `timeout` in seconds, and `user_agent`. Entering raises InvalidURL, Denied,
        Deferred, or LeaseTimeout, also if this thread holds the lease that it would wait for. A
        request for the URL that is sent inside the block, through an adapter or transport of this
        package, uses this lease.
        """
        return SyncLeaseRequest(partial(self.acquire, url, **options))

    def acquire(self, url: str, **options: Unpack[AcquireOptions]) -> SyncLease:
        """Wait for a lease that `lease.end()` ends; `options` are those of `Gatekeeper.acquire`.
        `owned=False`: another thread will use it."""
        return cast("SyncLease", self._acquired(lambda gate: gate.acquire(url, **options)))

    def try_acquire(
        self, url: str, *, priority: int = 0, user_agent: str | None = None, owned: bool = True
    ) -> SyncLease | NotYet:
        """Grant a lease if the host is due now; else return `NotYet` with the time to ask again.

        See `Gatekeeper.try_acquire`.
        """
        found: SyncLease | NotYet = self._acquired(
            lambda gate: gate.try_acquire(
                url, priority=priority, user_agent=user_agent, owned=owned
            )
        )
        return found

    def _acquired(self, ask: Callable[[_AnyGate], Awaitable[Any]]) -> Any:
        """Return the lease, which is made in the gate's loop, as its decision is read there."""

        async def acquired(gate: _AnyGate) -> SyncLease | NotYet:
            found = await ask(gate)
            return found if isinstance(found, NotYet) else SyncLease(found, self)

        return self.wait(acquired, undo=_give_back)

    # -- operating -------------------------------------------------------------------

    def why(self, host: str) -> tuple[ClockView, ...]:
        """Return every clock of the host, each with its source. Raises ConfigError."""
        return self.wait(lambda gate: gate.why(host))

    def refresh(self, origin: str) -> None:
        """Fetch the robots.txt of an origin, or of a URL's origin, again now.

        See `Gatekeeper.refresh`.
        """
        self.wait(lambda gate: gate.refresh(origin))

    def block(self, host: str, until: datetime | float, reason: str = "operator") -> None:
        """Send no request to the host before `until`, an aware datetime or POSIX seconds."""
        self.wait(lambda gate: gate.block(host, until, reason))

    def pause(self, host: str) -> None:
        """Grant no lease for the host until `resume`."""
        self.wait(lambda gate: gate.pause(host))

    def resume(self, host: str) -> None:
        """Grant leases for the host again. It lifts a pause, not a block."""
        self.wait(lambda gate: gate.resume(host))

    def override(self, rule: HostRule, *, seconds: float | None = None) -> None:
        """Set a `[[host]]` rule at run time; see `Gatekeeper.override`."""

        async def ask(gate: _AnyGate) -> None:
            if (asked := gate.override(rule, seconds=seconds)) is not None:
                await asked

        self.wait(ask)

    def stats(self) -> GateStats | RemoteStats:
        """Return the current counters and gauges."""
        return self.do(lambda gate: gate.stats())

    # -- for adapters ------------------------------------------------------------------

    def wait(
        self,
        ask: Callable[[_AnyGate], Awaitable[_T]],
        *,
        undo: Callable[[_T], object] | None = None,
    ) -> _T:
        """Await `ask(gate)` in the gate's loop, for adapters; `gate` is the asynchronous one.

        `undo(result)` is called in the loop if the thread was interrupted, so that it never gets
        the result. Raises the errors of `ask`, and GateClosed.
        """
        gate_thread = self._running()
        if gate_thread.inside:
            raise RuntimeError("a callback of the gate can't wait for it: ask in another thread")
        caller = getattr(self._threads, "caller", None)
        if caller is None:
            caller = self._threads.caller = _Caller(gate_thread)
        call = _Call(partial(ask, gate_thread.gate), undo)
        try:  # An interruption may come as soon as the call is posted.
            return gate_thread.result_of(call.future, caller.calls.put_nowait, call)
        except BaseException:  # the call's own error, or an interruption of this thread
            _post(gate_thread, call.abandon, quietly=True)
            raise

    def do(self, work: Callable[[_AnyGate], _T]) -> _T:
        """Call `work(gate)`, which is not awaited, in the gate's loop. Raises its errors.

        It does not wait for what this thread awaits: a signal handler may call it meanwhile.
        """
        gate_thread = self._running()
        if gate_thread.inside:
            return work(gate_thread.gate)
        done: Future[_T] = Future()

        def run() -> None:
            try:
                _settle(done, work(gate_thread.gate))
            except BaseException as error:  # noqa: BLE001 - raised in the calling thread
                _settle(done, error=error)

        return gate_thread.result_of(done, run)

    def post(self, work: Callable[[], object]) -> None:
        """Call `work` in the gate's loop soon, without waiting, from any thread.

        It is not called after the gate's end.
        """
        gate_thread = self._gate_thread
        if gate_thread is not None and os.getpid() == gate_thread.pid:
            _post(gate_thread, work, quietly=True)

    def _running(self) -> _GateThread:
        gate_thread, pid = self._gate_thread, os.getpid()
        if gate_thread is not None and gate_thread.pid != pid:
            raise GateClosed("this gate belongs to the process that was forked: make another one")
        if self._closed or (gate_thread is not None and gate_thread.closed):
            raise GateClosed("the gate was closed; make another one")
        if gate_thread is not None:
            return gate_thread
        if self._pid != pid:  # forked, perhaps while a thread held the lock
            self._opening, self._pid = threading.Lock(), pid
        with self._opening:
            if self._gate_thread is None:
                self._gate_thread = _GateThread(self._make)
                # `finalize` also runs when the interpreter exits.
                self._finalize = weakref.finalize(self, self._gate_thread.close)
            return self._gate_thread


class SyncSitemaps(Iterator[SitemapEntry]):
    """The entries of a site's sitemaps, for blocking code: see `Sitemaps`."""

    def __init__(self, found: Sitemaps, entries: Iterator[SitemapEntry]) -> None:
        self._found = found
        self._entries = entries
        self.findings: list[SitemapFinding] = found.findings
        """What is wrong with the files read so far."""

    def __next__(self) -> SitemapEntry:
        return next(self._entries)

    @property
    def complete(self) -> bool:
        """Whether no finding so far says that entries are missing."""
        return self._found.complete


class SyncLeaseRequest(msgspec.Struct, eq=False):
    """The result of `gate.lease()`: entering waits for the lease, leaving ends the lease."""

    _acquire: Callable[[], SyncLease]
    _lease: SyncLease | None = None

    if not TYPE_CHECKING:
        report = renew = give_back = end = decision = expires_at = Unentered("with")
        __await__ = __aenter__ = __aexit__ = refusing(_BLOCKING)

    def __enter__(self) -> SyncLease:
        self._lease = self._acquire()
        return self._lease.__enter__()

    def __exit__(self, *error: object) -> None:
        if self._lease is not None:
            self._lease.__exit__(*error)


class SyncLease:
    """The right to send one request to `url`: a lease of the gate, for blocking code.

    `end`, `leave`, `give_back` and the callbacks of a connection return without waiting, in any
    thread; the other methods return when the gate's loop has run them.
    """

    if not TYPE_CHECKING:
        __await__ = __aenter__ = __aexit__ = refusing(_BLOCKING)

    def __init__(self, lease: Lease | RemoteLease, gate: SyncGatekeeper) -> None:
        self.inner: Lease | RemoteLease = lease
        """The lease in the gate's loop; use it only there (see `SyncGatekeeper.do`)."""
        self._gate = gate
        self.url: str = lease.url
        """The URL that the lease was granted for, in its normal form."""
        self.host: str = lease.host
        """The host that is asked."""
        self.user_agent: str | None = lease.user_agent
        """The name that the lease was requested for, as given; None: the gate's own."""
        self.decision: Decision = lease.decision
        """The decision at the moment of the grant."""

    def __enter__(self) -> Self:
        bind(self)
        return self

    def __exit__(self, *error: object) -> None:
        unbind(self)
        self.leave()

    def __repr__(self) -> str:
        return f"<SyncLease of {self.inner!r}>"

    @property
    def expires_at(self) -> datetime:
        """When the lease expires and counts as used (aware, UTC)."""
        return self.inner.expires_at

    @property
    def ended(self) -> bool:
        """Whether the slot was given back, or the lease expired."""
        return self.inner.ended

    def claim(self, url: str) -> bool:
        """Use the lease for a request to `url`. Return True for the first claim that matches."""
        return self._do(lambda: self.inner.claim(url))

    def head(self) -> None:
        """Note that the head of the response has arrived: the interval counts from now."""
        self._do(self.inner.head)

    def answered(
        self, status: int, *, retry_after: str | None = None, rate_limit: str | None = None
    ) -> None:
        """Call `head` and `report` in one: the head has arrived, with this status and fields."""
        self._do(
            lambda: self.inner.answered(status, retry_after=retry_after, rate_limit=rate_limit)
        )

    def report(self, **outcome: Unpack[ReportFields]) -> None:
        """Report the outcome of the request; the first report is final. See `Lease.report`."""
        self._do(partial(self.inner.report, **outcome))

    @property
    def counts_bytes(self) -> bool:
        """Whether its host has a budget that the bytes of the response count for."""
        return bool(self.inner.counts_bytes)

    def received(self, size: int) -> None:
        """Count bytes of the response for the host's budget, if no report has a `size`."""
        self._do(lambda: self.inner.received(size))

    def renew(self, seconds: float) -> None:
        """Move the end of the lease to `seconds` from now."""
        self._do(lambda: self.inner.renew(seconds))

    def ends_with(
        self, connection: ConnectionInUse | None, then: Callable[[], None] | None = None
    ) -> None:
        """Hold the slot until the connection is free, then end the lease; None: end it now."""
        self._do(lambda: self.inner.ends_with(connection, then))

    def lasts_with(
        self, connection: ConnectionInUse | None, then: Callable[[], None] | None = None
    ) -> None:
        """Hold the slot until both the connection is free and the lease's block is left."""
        self._do(lambda: self.inner.lasts_with(connection, then))

    def leave(self) -> None:
        """End the lease, now or when the connection is free. Without a report it counts as sent and
        unanswered."""
        self._gate.post(self.inner.leave)

    def give_back(self) -> None:
        """End the lease unused: nothing was sent."""
        self._gate.post(self.inner.give_back)

    def end(self) -> None:
        """End the lease: its slot goes to the next waiter."""
        self._gate.post(self.inner.end)

    def _do(self, work: Callable[[], _T]) -> _T:
        return self._gate.do(lambda _: work())


def _settle(future: Future[Any], result: Any = None, *, error: BaseException | None = None) -> None:
    with suppress(InvalidStateError):  # it failed already, as the gate ended
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)


def _give_back(lease: Any) -> None:
    if not isinstance(lease, NotYet):
        lease.give_back()


def _post(to: _GateThread, work: Callable[..., object], *given: Any, quietly: bool = False) -> None:
    try:
        to.loop.call_soon_threadsafe(work, *given)
    except RuntimeError:
        if not quietly:
            raise GateClosed("the gate was closed; make another one") from None
