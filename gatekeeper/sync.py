"""`SyncGatekeeper`: the questions and leases of a gate, for code that blocks.

The gate lives in an event loop of its own, in a thread of its own. Each thread that asks has a
task there, and asks through it: so the gate knows which leases belong together, and a thread that
would wait for what it holds itself is told at once, as a task is.

    fork     a child process has the object, not the thread: every method raises GateClosed there
    exit     a gate that nobody closed is closed when the interpreter ends, and when it is dropped
    Ctrl-C   a thread that is interrupted while it waits leaves nothing behind
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from datetime import datetime
from functools import partial
from typing import Any, Generic, Self, TypeVar, cast

from gatekeeper.config import Config, agent_named, as_config
from gatekeeper.decision import Decision, NotYet
from gatekeeper.errors import GateClosed
from gatekeeper.gate import Gatekeeper, GateStats
from gatekeeper.gate.leases import Lease
from gatekeeper.middleware import ConnectionInUse, open_leases
from gatekeeper.pacing.waiting import ClockView
from gatekeeper.remote.client import RemoteGatekeeper, RemoteStats
from gatekeeper.remote.leases import RemoteLease
from gatekeeper.robots import Policy, RobotsTxt

__all__ = ["SyncGatekeeper", "SyncLease"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_Asked = Gatekeeper | RemoteGatekeeper

_FAREWELL = 15.0
"""Seconds that closing waits for the thread: a sidecar's last reports take five at most."""


class _Call(Generic[_T]):
    """One question of a thread. All but `future` is touched in the loop's thread alone."""

    __slots__ = ("_done", "_left", "_task", "_undo", "_work", "future")

    def __init__(
        self, work: Callable[[], Coroutine[Any, Any, _T]], undo: Callable[[_T], object] | None
    ) -> None:
        self.future: Future[_T] = Future()
        self._work = work
        self._undo = undo
        self._task: asyncio.Task[Any] | None = None
        self._left = self._done = False

    async def run(self) -> None:
        """Put the question, in the task of the thread that asks."""
        if self._left:
            return
        self._task = task = asyncio.current_task()
        try:
            result = await self._work()
        except asyncio.CancelledError:
            self._done = True
            if not self._left or task is None:
                _settle(self.future, error=_gone())
                raise
            task.uncancel()  # it was this call that was cancelled; the task goes on
        except BaseException as error:  # noqa: BLE001 - it belongs to the thread that asks
            self._done = True
            _settle(self.future, error=error)
        else:
            self._done = True
            if self._left and self._undo is not None:
                self._undo(result)
            _settle(self.future, result)

    def leave(self) -> None:
        """The thread waits no more."""
        self._left = True
        if not self._done:
            if self._task is not None:
                self._task.cancel()
        elif self._undo is not None and self.future.exception() is None:
            self._undo(self.future.result())


class _Asker:
    """The task in the loop through which one thread asks. Dropped with the thread."""

    def __init__(self, life: _Life) -> None:
        self._life = life
        self.calls: asyncio.Queue[_Call[Any] | None] = asyncio.Queue()
        life.loop.call_soon_threadsafe(life.serve, self.calls)

    def __del__(self) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._life.loop.call_soon_threadsafe(self.calls.put_nowait, None)


class _Life:
    """The thread, its loop and the gate in it; knows nothing of the object that is asked."""

    def __init__(self, make: Callable[[], AbstractAsyncContextManager[Any]]) -> None:
        self.pid = os.getpid()
        self.loop: asyncio.AbstractEventLoop
        self.gate: Any = None
        self.closed = False
        self.pending: set[Future[Any]] = set()
        """What threads wait for."""
        self._over = False
        self._askers: set[asyncio.Task[None]] = set()
        opened: Future[None] = Future()
        # A daemon: the interpreter would wait for any other before it closes the gate.
        self._thread = threading.Thread(
            target=self._run, args=(make, opened), name="gatekeeper", daemon=True
        )
        self._thread.start()
        opened.result()

    def _run(
        self, make: Callable[[], AbstractAsyncContextManager[Any]], opened: Future[None]
    ) -> None:
        try:
            asyncio.run(self._live(make, opened))
        finally:
            self._over = True
            for future in list(self.pending):
                _settle(future, error=_gone())

    def expect(self, future: Future[Any]) -> None:
        """A thread is about to wait for that: it shall be told, should the gate end before."""
        self.pending.add(future)
        if self._over:  # the last look may have been before
            _settle(future, error=_gone())

    async def _live(
        self, make: Callable[[], AbstractAsyncContextManager[Any]], opened: Future[None]
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        try:
            async with make() as self.gate:
                opened.set_result(None)
                await self._stop.wait()
        except BaseException as error:  # noqa: BLE001 - it belongs to the thread that opens it
            if opened.done():
                _log.exception("closing the gate failed")
            else:
                opened.set_exception(error)
        finally:
            self.closed = True
            for task in self._askers:
                task.cancel()
            await asyncio.gather(*self._askers, return_exceptions=True)

    @property
    def inside(self) -> bool:
        """Is this the loop's own thread?"""
        return threading.current_thread() is self._thread

    @property
    def usable(self) -> bool:
        """Can anything be asked: neither closed, nor in a forked child?"""
        return not self.closed and os.getpid() == self.pid

    def serve(self, calls: asyncio.Queue[_Call[Any] | None]) -> None:
        """Begin the task of another thread."""
        task = self.loop.create_task(self._serve(calls))
        self._askers.add(task)
        task.add_done_callback(self._askers.discard)

    async def _serve(self, calls: asyncio.Queue[_Call[Any] | None]) -> None:
        while not self.closed and (call := await calls.get()) is not None:
            await call.run()
            call = None  # it would be kept until the next one

    def close(self) -> None:
        """Close the gate and wait for it. Idempotent; in a forked child it does nothing."""
        if os.getpid() != self.pid:
            return
        with suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(self._stop.set)
        if not self.inside:
            self._thread.join(_FAREWELL)


class SyncGatekeeper:
    """A gate for code that blocks: `Gatekeeper`'s questions and leases, without `await`.

    It opens with its `with`, or with the first question; `close` or leaving the block ends it.
    Safe to use from many threads, which share its clocks: each waits for its turn by itself.
    In a child process that was forked it raises GateClosed: make another one there.

    `user_agent` and the other arguments are those of `Gatekeeper`. `SyncGatekeeper.remote(...)`
    asks a sidecar instead. Raises ConfigError as they do.

    >>> with SyncGatekeeper("examplebot/1.0 (+https://example.org/bot)") as gate:
    ...     with gate.lease("https://example.org/page") as lease:  # doctest: +SKIP
    ...         lease.report(status=200)
    """

    def __init__(self, user_agent: str, *, config: Config | None = None, **options: Any) -> None:
        """`options`: `storage`, `resolver`, `clock`, `rng` and `ledger`, as of `Gatekeeper`."""
        agent_named(user_agent)
        self._begin(
            partial(Gatekeeper, user_agent, config=config, **options), user_agent, as_config(config)
        )

    @classmethod
    def remote(
        cls, where: str | os.PathLike[str], user_agent: str | None = None, **options: Any
    ) -> Self:
        """One over a sidecar; the arguments are those of `RemoteGatekeeper`.

        >>> gate = SyncGatekeeper.remote("http://127.0.0.1:8750", "examplebot/1.0")
        """
        self = cls.__new__(cls)
        config = as_config(options.get("config"))
        self._begin(partial(RemoteGatekeeper, where, user_agent, **options), user_agent, config)
        return self

    def _begin(
        self,
        make: Callable[[], Gatekeeper | RemoteGatekeeper],
        user_agent: str | None,
        config: Config,
    ) -> None:
        self.config = config
        """The settings, by which a gate of one's own guards its requests as well."""
        self._make = make
        self._name = user_agent
        self._life: _Life | None = None
        self._closed = False
        self._opening, self._pid = threading.Lock(), os.getpid()
        self._threads = threading.local()

    def __enter__(self) -> Self:
        self._opened()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End it: who waits gets GateClosed, and open leases end. Idempotent."""
        life = self._life
        self._closed = True
        if life is not None:
            self._finalize()

    @property
    def user_agent(self) -> str | None:
        """The name whose rules apply where a question names no other. Of a sidecar that was given
        none, its own, once the gate is open; None where it could not be asked."""
        if self._name is None and self._life is not None:
            return cast("str | None", self._life.gate.user_agent)
        return self._name

    # -- questions -------------------------------------------------------------------

    def allowed(self, url: str, *, user_agent: str | None = None) -> bool:
        """Whether the URL may be fetched now. Raises InvalidURL."""
        return self.wait(lambda gate: gate.allowed(url, user_agent=user_agent))

    def check(self, url: str, *, user_agent: str | None = None) -> Decision:
        """Whether the URL may be fetched now, and why. Raises InvalidURL."""
        return self.wait(lambda gate: gate.check(url, user_agent=user_agent))

    def check_many(
        self, urls: Iterable[str], *, user_agent: str | None = None
    ) -> Iterator[Decision]:
        """Decisions in the order of the URLs; origins are asked in parallel.

        Text that is no URL gives DENY with reason invalid_url, so that nothing is lost.
        """
        found: AsyncIterator[Decision] = self.do(
            lambda gate: gate.check_many(urls, user_agent=user_agent)
        )

        def decisions() -> Iterator[Decision]:
            try:
                while True:
                    try:
                        decision = self.wait(lambda _: _next(found))
                    except _Over:
                        return
                    yield decision
            finally:
                with suppress(GateClosed):
                    self.wait(lambda _: _close(found))

        return decisions()

    def peek(self, url: str, *, user_agent: str | None = None) -> Decision | None:
        """The decision as far as it is known: never fetches. Raises InvalidURL."""
        return self.do(lambda gate: gate.peek(url, user_agent=user_agent))

    def robots(self, url: str) -> RobotsTxt | None:
        """The robots.txt that speaks for the URL's origin; None where there is none to read."""
        return self.wait(lambda gate: gate.robots(url))

    def policy(self, url: str, *, user_agent: str | None = None) -> Policy:
        """The file as it reads for the agent. See `Gatekeeper.policy`."""
        return self.wait(lambda gate: gate.policy(url, user_agent=user_agent))

    # -- turns -----------------------------------------------------------------------

    @contextmanager
    def lease(
        self,
        url: str,
        *,
        priority: int = 0,
        timeout: float | None = None,
        user_agent: str | None = None,
    ) -> Iterator[SyncLease]:
        """The right to send one request, once the host's turn has come.

        `with gate.lease(url) as lease:`. Entering raises InvalidURL, Denied, Deferred, or
        LeaseTimeout: also where this thread holds what it would wait for. A request that is
        sent inside, through an adapter or transport of this package, uses this lease.
        """
        lease = self.acquire(url, priority=priority, timeout=timeout, user_agent=user_agent)
        token = open_leases.set((*open_leases.get(), lease))
        try:
            yield lease
        finally:
            open_leases.reset(token)
            lease.leave()

    def acquire(
        self,
        url: str,
        *,
        priority: int = 0,
        timeout: float | None = None,
        user_agent: str | None = None,
        owned: bool = True,
    ) -> SyncLease:
        """A lease that ends by `lease.end()`. `owned=False`: another thread will use it."""
        found = self.wait(
            lambda gate: gate.acquire(
                url, priority=priority, timeout=timeout, user_agent=user_agent, owned=owned
            ),
            undo=_give_back,
        )
        return SyncLease(found, self)

    def try_acquire(
        self,
        url: str,
        *,
        priority: int = 0,
        user_agent: str | None = None,
        owned: bool = True,
    ) -> SyncLease | NotYet:
        """The lease if it can be had now, else when to ask. See `Gatekeeper.try_acquire`."""
        found = self.wait(
            lambda gate: gate.try_acquire(
                url, priority=priority, user_agent=user_agent, owned=owned
            ),
            undo=_give_back,
        )
        return found if isinstance(found, NotYet) else SyncLease(found, self)

    # -- operating -------------------------------------------------------------------

    def why(self, host: str) -> tuple[ClockView, ...]:
        """Every clock of the host, each with where it came from. Raises ConfigError."""
        return self.wait(lambda gate: gate.why(host))

    def refresh(self, origin: str) -> None:
        """Ask the origin again now. See `Gatekeeper.refresh`."""
        self.wait(lambda gate: gate.refresh(origin))

    def block(self, host: str, until: datetime | float, reason: str = "operator") -> None:
        """No request to the host before `until` (aware datetime, or wall seconds)."""
        self.wait(lambda gate: gate.block(host, until, reason))

    def pause(self, host: str) -> None:
        """No turns for the host until `resume`."""
        self.wait(lambda gate: gate.pause(host))

    def resume(self, host: str) -> None:
        """Turns again; lifts a pause, not a block."""
        self.wait(lambda gate: gate.resume(host))

    def stats(self) -> GateStats | RemoteStats:
        """Counters and gauges at this moment."""
        return self.do(lambda gate: gate.stats())

    # -- for adapters ------------------------------------------------------------------

    def wait(
        self,
        ask: Callable[[_Asked], Coroutine[Any, Any, _T]],
        *,
        undo: Callable[[_T], object] | None = None,
    ) -> _T:
        """Await `ask(gate)` in the gate's loop, for adapters: `gate` is the asynchronous one.

        `undo(result)` is called there where the thread was interrupted and nobody has the
        result. Raises what it raises, and GateClosed.
        """
        life = self._opened()
        if life.inside:
            raise RuntimeError("a callback of the gate can't wait for it: ask in another thread")
        asker = getattr(self._threads, "asker", None)
        if asker is None:
            asker = self._threads.asker = _Asker(life)
        call = _Call(partial(ask, life.gate), undo)
        life.expect(call.future)
        _post(life, asker.calls.put_nowait, call)
        try:
            return call.future.result()
        except BaseException:  # its own error, or this thread was interrupted
            _post(life, call.leave, quietly=True)
            raise
        finally:
            life.pending.discard(call.future)

    def do(self, work: Callable[[_Asked], _T]) -> _T:
        """Call `work(gate)` in the gate's loop, for what is not awaited. Raises what it raises."""
        life = self._opened()
        if life.inside:
            return work(life.gate)
        done: Future[_T] = Future()

        def run() -> None:
            try:
                _settle(done, work(life.gate))
            except BaseException as error:  # noqa: BLE001 - it belongs to the thread that asks
                _settle(done, error=error)

        life.expect(done)
        _post(life, run)
        try:
            return done.result()
        finally:
            life.pending.discard(done)

    def post(self, work: Callable[[], object]) -> None:
        """Have the gate's loop call that soon; from any thread, at any time. What comes after the
        gate's end is not called."""
        life = self._life
        if life is not None and os.getpid() == life.pid:
            _post(life, work, quietly=True)

    def _opened(self) -> _Life:
        life = self._life
        if life is not None and life.usable:
            return life
        if life is not None and os.getpid() != life.pid:
            raise GateClosed("this gate belongs to the process that was forked: make another one")
        if self._closed or life is not None:
            raise GateClosed("the gate was closed; make another one")
        if self._pid != os.getpid():  # the lock may have been held when the process was forked
            self._opening, self._pid = threading.Lock(), os.getpid()
        with self._opening:
            if self._life is None:
                self._life = _Life(self._make)
                # At the interpreter's end as well: `finalize` sees to that.
                self._finalize = weakref.finalize(self, self._life.close)
            return self._life


class SyncLease:
    """The right to send one request to `url`: a lease of the gate, for a thread.

    `end`, `leave`, `give_back` and what the end of a connection does return at once, whichever
    thread calls them; the others return when the gate has taken note.
    """

    def __init__(self, lease: Lease | RemoteLease, gate: SyncGatekeeper) -> None:
        self.inner: Lease | RemoteLease = lease
        """The lease in the gate's loop, to be used there alone (see `SyncGatekeeper.do`)."""
        self._gate = gate

    def __repr__(self) -> str:
        return f"<SyncLease of {self.inner!r}>"

    @property
    def url(self) -> str:
        """The URL the lease was granted for, in its normal form."""
        return self.inner.url

    @property
    def host(self) -> str:
        """Whose turn it is."""
        return self.inner.host

    @property
    def user_agent(self) -> str | None:
        """The name that it was asked for under, as it was given; None: the gate's own."""
        return self.inner.user_agent

    @property
    def expires_at(self) -> datetime:
        """When the lease ends by itself and counts as used (aware, UTC)."""
        return self.inner.expires_at

    @property
    def ended(self) -> bool:
        """Whether the slot was given back, or the time is over."""
        return self.inner.ended

    @property
    def decision(self) -> Decision:
        """The answer at the moment of the grant."""
        return self._do(lambda: self.inner.decision)

    def claim(self, url: str) -> bool:
        """Take the lease for a request to `url`; true for the first matching claim."""
        return self._do(lambda: self.inner.claim(url))

    def head(self) -> None:
        """The head of the response is here: the interval counts from now."""
        self._do(self.inner.head)

    def answered(
        self, status: int, *, retry_after: str | None = None, rate_limit: str | None = None
    ) -> None:
        """`head` and `report` in one: the head is here, and says so much."""
        self._do(
            lambda: self.inner.answered(status, retry_after=retry_after, rate_limit=rate_limit)
        )

    def report(
        self,
        *,
        status: int | None = None,
        elapsed: float | None = None,
        retry_after: float | str | None = None,
        size: int | None = None,
        rate_limit: str | None = None,
    ) -> None:
        """Say what came of the request; the first report is final. See `Lease.report`."""
        self._do(
            lambda: self.inner.report(
                status=status,
                elapsed=elapsed,
                retry_after=retry_after,
                size=size,
                rate_limit=rate_limit,
            )
        )

    @property
    def counts_bytes(self) -> bool:
        """Has its host a budget for which the bytes of the response count?"""
        return bool(self.inner.counts_bytes)

    def received(self, size: int) -> None:
        """So many bytes of the response came; for those that no report tells of."""
        self._do(lambda: self.inner.received(size))

    def renew(self, seconds: float) -> None:
        """Put the end `seconds` from now."""
        self._do(lambda: self.inner.renew(seconds))

    def ends_with(
        self, connection: ConnectionInUse | None, then: Callable[[], None] | None = None
    ) -> None:
        """The slot is held until that connection is free, however long it takes; None: it is."""
        self._do(lambda: self.inner.ends_with(connection, then))

    def lasts_with(
        self, connection: ConnectionInUse | None, then: Callable[[], None] | None = None
    ) -> None:
        """The slot is held until that connection is free, even if the block of the lease is left
        before; a block that is left later ends it then."""
        self._do(lambda: self.inner.lasts_with(connection, then))

    def leave(self) -> None:
        """End it, or let it end with the body of its response. Without a report it counts as sent
        and unanswered."""
        self._gate.post(self.inner.leave)

    def give_back(self) -> None:
        """End it unused: nothing was sent."""
        self._gate.post(self.inner.give_back)

    def end(self) -> None:
        """The connection is free again: the slot goes to the next who waits."""
        self._gate.post(self.inner.end)

    def _do(self, work: Callable[[], _T]) -> _T:
        return self._gate.do(lambda _: work())


class _Over(Exception):
    """A generator has come to its end (StopAsyncIteration can't leave a coroutine)."""


async def _next(found: AsyncIterator[Decision]) -> Decision:
    try:
        return await anext(found)
    except StopAsyncIteration:
        raise _Over from None


async def _close(found: AsyncIterator[Decision]) -> None:
    if isinstance(found, AsyncGenerator):
        await found.aclose()


def _gone() -> GateClosed:
    return GateClosed("the gate was closed meanwhile")


def _settle(future: Future[Any], result: Any = None, *, error: BaseException | None = None) -> None:
    with suppress(InvalidStateError):  # it was told that the gate ended
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)


def _give_back(lease: Any) -> None:
    if not isinstance(lease, NotYet):
        lease.give_back()


def _post(life: _Life, work: Callable[..., object], *given: Any, quietly: bool = False) -> None:
    try:
        life.loop.call_soon_threadsafe(work, *given)
    except RuntimeError:
        if not quietly:
            raise GateClosed("the gate was closed; make another one") from None
