"""Leases: a decision and a turn joined, held, reported and ended."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from gatekeeper import urls
from gatekeeper.clock import Clock, deadline
from gatekeeper.deadlock import Wait, WaitGraph
from gatekeeper.decision import Decision, Reason, Verdict
from gatekeeper.errors import Deferred, Denied, LeaseTimeout, StorageError
from gatekeeper.fetching.faults import LocalFaults
from gatekeeper.fetching.guard import Whereabouts
from gatekeeper.lease import Lease, Origin
from gatekeeper.middleware import Unentered, held_leases, hold_in_context, inherited, open_leases
from gatekeeper.pacing.queues import REFETCH, Offer
from gatekeeper.pacing.scheduler import Entrance, Scheduler
from gatekeeper.uplink import Uplink
from gatekeeper.urls import Target

__all__ = ["Lease", "LeaseRequest", "Lessor", "refuse"]

Known = TypeVar("Known")

_LOOK_UP = 0.5
"""Seconds that the address of a host may take whose lease of an earlier run is held again."""


def refuse(decision: Decision) -> None:
    """Raise Denied or Deferred unless the decision is ALLOW."""
    if decision.verdict is Verdict.DENY:
        raise Denied(decision)
    if decision.verdict is Verdict.DEFER:
        raise Deferred(decision)


_HELD = frozenset({Reason.HOST_BLOCKED, Reason.HOST_PAUSED})


class LeaseRequest:
    """What `gate.lease()` returns: entering waits for the turn, leaving ends the lease."""

    __slots__ = ("_agent", "_lease", "_lessor", "_priority", "_timeout", "_url")

    if not TYPE_CHECKING:
        report = renew = give_back = end = decision = expires_at = Unentered()

    def __init__(
        self, lessor: Lessor, url: str, priority: int, timeout: float | None, agent: str | None
    ) -> None:
        self._lessor = lessor
        self._url = url
        self._priority = priority
        self._timeout = timeout
        self._agent = agent
        self._lease: Lease | None = None

    def at_once(self) -> Lease | None:
        """Enter without waiting, if that can be seen at a glance; None says nothing."""
        if self._agent is not None:
            return None
        lessor = self._lessor
        lease = lessor.take(self._url, asyncio.current_task(lessor.loop))
        if lease is not None:
            self._lease = lease
            lease._by_hand = True
            open_leases.set((*open_leases.get(), lease))
        return lease

    async def __aenter__(self) -> Lease:
        lessor = self._lessor
        entered = False
        if lessor.entrance.outside and self._timeout != 0:
            entered = True  # behind those who came first
            if (before := lessor.entrance.enter()) is not None:
                await before
            before = None  # many may wait below, and would keep it
        lease = None if entered else self.at_once()
        if lease is None:
            lease = self._lease = await lessor.wait(
                self._url,
                asyncio.current_task(lessor.loop),
                priority=self._priority,
                timeout=self._timeout,
                user_agent=self._agent,
                entered=entered,
            )
            open_leases.set((*open_leases.get(), lease))
        return lease

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._lease is not None:
            self._lease.leave()


AtOnce = Callable[[str], Origin | None]
"""Whose URL it is, where it is known at a glance that it is welcome."""
AtPlace = Callable[[str, str], Origin | None]
"""The same of an origin and a path that is known to be plain."""


class Answers(Protocol):
    """What a lessor asks of its gate."""

    def recall(self, url: str, *, user_agent: str | None = None) -> Decision | None:
        """The decision, where it was prepared; never waits."""

    async def check(self, url: str, *, user_agent: str | None = None) -> Decision:
        """The decision, waiting for the file if need be."""

    def offer(self, url: str, target: Target, user_agent: str | None) -> tuple[Decision, Offer]:
        """The decision at this moment and the pace that the text asks for."""

    def unkept(self, url: str, target: Target, user_agent: str | None, why: str) -> Decision:
        """DEFER, since the clock of the turn can't be kept."""

    async def learn(self, origin: str) -> None:
        """Ask the origin for its file if need be."""

    def note_page(self, origin: str, *, ok: bool) -> None:
        """A page of the origin answered."""


class _Asked:
    """What a caller wants of the scheduler. No closures: there may be many, and each is seven
    objects."""

    __slots__ = ("agent", "decision", "lessor", "owner", "target", "url")

    def __init__(
        self,
        lessor: Lessor,
        url: str,
        target: Target,
        agent: str | None,
        owner: asyncio.Task[object] | None,
        decision: Decision,
    ) -> None:
        self.lessor = lessor
        self.url = url
        self.target = target
        self.agent = agent
        self.owner = owner
        self.decision = decision
        """The one of the grant, once that was made."""

    def admit(self) -> Offer:
        """Called at the moment of the grant; no await lies between it and the books."""
        self.decision, offer = self.lessor.answers.offer(self.url, self.target, self.agent)
        if offer is not REFETCH:
            refuse(self.decision)
        return offer

    def refetch(self) -> Coroutine[Any, Any, None]:
        """Ask for the file, to which the turn belongs."""
        return self.lessor.ask(self.lessor.answers.learn, self.target, self.owner)


class Lessor:
    """Joins the answer and the turn into leases."""

    def __init__(
        self,
        answers: Answers,
        at_once: AtOnce,
        at_place: AtPlace,
        scheduler: Scheduler,
        clock: Clock,
        serial: Iterator[int],
        faults: LocalFaults,
        waits: WaitGraph[Lease],
        whereabouts: Whereabouts | None = None,
    ) -> None:
        """`serial` numbers the decisions; `faults` hears who answers; `waits` finds circles
        among those who wait; `whereabouts`, if any, knows hosts' addresses."""
        self.answers = answers
        self.clock = clock
        self.now = clock.monotonic
        self.entrance = Entrance()
        self.waits = waits
        self.holdings = waits.holdings
        self.faults = faults
        self.uplink = Uplink(faults, scheduler, clock, self.holdings)
        # A host that shares the clock of its address has no turn before that is looked up.
        self._at_once = at_once if whereabouts is None else _nobody
        self._at_place = at_place if whereabouts is None else _nobody
        self._whereabouts = whereabouts
        self._scheduler = scheduler
        self._take = scheduler.take
        self._serial = serial
        self.loop: asyncio.AbstractEventLoop | None = None
        """The one that the gate belongs to; to ask for the running one is a system call before
        Python 3.12."""

    def take(
        self, url: str, owner: asyncio.Task[object] | None, place: str = "", path: str = ""
    ) -> Lease | None:
        """The lease that can be had at once, where it is known at a glance; else None.

        `place` and `path`: the URL's origin as it is spelt, and what follows, where that is
        known to be plain. The check before and the one at the grant are the same moment here.
        """
        if self.entrance.outside:
            return None  # behind those who came first
        origin = self._at_place(place, path) if path else self._at_once(url)
        if origin is None or (wish := origin.wish) is None:
            return None
        host = origin.host
        take = self._take  # an attribute that is called is slow before Python 3.12
        try:
            grant = take(url, host, wish)
        except StorageError:
            return None  # `wait` says why
        if grant is None:
            return None
        lease = Lease(self, grant, url, host, owner, origin, next(self._serial))
        if owner is not None and self.holdings.first.setdefault(owner, lease) is not lease:
            self.holdings.add(lease)
        return lease

    async def acquire(
        self,
        url: str,
        *,
        priority: int,
        timeout: float | None,
        user_agent: str | None,
        owned: bool = True,
    ) -> Lease:
        """The lease as soon as it can be had. See `Gatekeeper.acquire`."""
        owner = asyncio.current_task(self.loop) if owned else None
        entered = False
        if self.entrance.outside and timeout != 0:
            entered = True  # behind those who came first
            if (before := self.entrance.enter()) is not None:
                await before
            before = None  # many may wait below, and would keep it
        lease = self.take(url, owner) if user_agent is None and not entered else None
        if lease is None:
            lease = await self.wait(
                url,
                owner,
                priority=priority,
                timeout=timeout,
                user_agent=user_agent,
                entered=entered,
            )
        lease._by_hand = True
        if owner is not None:
            held = held_leases.get()
            if held and not (len(held) == 1 and held[0].ended):
                hold_in_context(lease)
            else:  # most have one at a time
                held_leases.set((lease,))
        return lease

    async def wait(
        self,
        url: str,
        owner: asyncio.Task[object] | None,
        *,
        priority: int = 0,
        timeout: float | None = None,
        user_agent: str | None = None,
        entered: bool = False,
    ) -> Lease:
        """Decide, wait for the turn, decide again at the grant: what `take` could not give.

        `entered`: the caller came through the entrance.
        """
        end = None if timeout is None else self.clock.monotonic() + timeout
        if not entered and timeout != 0 and (before := self.entrance.enter()) is not None:
            await before
            before = None  # many may wait below, and would keep it
        target = urls.parse(url)
        waiting = None if owner is None else await self._begin_wait(target, owner)
        try:
            decision = await self._decide_within(url, target, timeout, user_agent)
            if decision.reason is Reason.OWN_LEASE:
                raise LeaseTimeout(target.url, f"{urls.mask(target.url)}: {decision.note}")
            if decision.reason not in _HELD or self._scheduler.held(target.host) is None:
                refuse(decision)
            # Else the file waits for the end of the host's block, as this lease will.
            if (why := self._scheduler.unkept(target.host)) is not None:
                refuse(self.answers.unkept(url, target, user_agent, why))
            scopes = () if self._whereabouts is None else await self._locate(target, end)
            if waiting is not None:
                self.waits.check(waiting)  # others may have joined in the meantime

            asked = _Asked(self, url, target, user_agent, owner, decision)
            grant = await self._scheduler.acquire(
                target.url,
                target.host,
                priority=priority,
                timeout=None if end is None else max(0.0, end - self.clock.monotonic()),
                admit=asked.admit,
                refetch=asked.refetch,
                scopes=scopes,
            )
        except StorageError as error:
            why = self._scheduler.unkept(target.host) or "the state can't be read or written"
            raise Deferred(self.answers.unkept(url, target, user_agent, why)) from error
        except asyncio.CancelledError as error:
            error.__traceback__ = None  # the task keeps the error, and that what stood here
            if waiting is not None:
                waiting.cancelled()
            raise
        finally:
            if waiting is not None:
                self.waits.end(waiting)
        lease = Lease(
            self, grant, target.url, target.host, owner, asked.decision, user_agent=user_agent
        )
        self.uplink.wake()
        if owner is not None:
            self.holdings.add(lease)
        return lease

    async def hold(self, url: str, seconds: float, user_agent: str | None) -> Lease:
        """A lease that an earlier run gave out and that has not ended. See `Scheduler.hold`.

        Its decision is the one that can be given now without asking anybody: DEFER, where the
        file is not known any more.
        """
        target = urls.parse(url)
        scopes: tuple[str, ...] = ()
        with contextlib.suppress(LeaseTimeout):  # the host's own slot is held all the same
            scopes = await self._locate(target, self.clock.monotonic() + _LOOK_UP)
        grant = await self._scheduler.hold(target.url, target.host, seconds, scopes=scopes)
        decision, _ = self.answers.offer(url, target, user_agent)
        return Lease(self, grant, target.url, target.host, None, decision, user_agent=user_agent)

    async def _begin_wait(self, target: Target, task: asyncio.Task[object]) -> Wait[Lease] | None:
        """Say that the task waits for the target's host; None where that is in nobody's way.

        Raises WaitsForItself where it could never end.
        """
        # Another gate's leases are no business of this one's hosts.
        under = [one for one in inherited(task) if getattr(one, "_lessor", None) is self]
        mine = bool(self.holdings.first) and bool(self.holdings.of(task))
        if not mine and not under:
            return None
        near: tuple[str, ...] = ()
        if mine and self._whereabouts is not None:
            near = await self._whereabouts.scopes(target.host, target.port)
        return self.waits.begin(task, target.url, target.host, near, under)

    async def ask(
        self,
        get: Callable[[str], Coroutine[Any, Any, Known]],
        target: Target,
        task: asyncio.Task[object] | None,
    ) -> Known:
        """`await get(target.origin)`, which waits for the origin's robots.txt, for the task.

        Raises WaitsForItself where the file could not come before a lease of the task ends,
        or has not come for so long because of one that the task was started under.
        """
        outer = self.waits.current(asyncio.current_task(self.loop))
        if task is None:
            return await get(target.origin)
        waiting = outer or await self._begin_wait(target, task)
        if waiting is None:
            return await get(target.origin)
        try:
            self.waits.for_file(waiting, target.origin)
            return await get(target.origin)
        except asyncio.CancelledError:
            if outer is None:
                waiting.cancelled()
            raise
        finally:
            if outer is None:
                self.waits.end(waiting)
            else:
                self.waits.for_turn(waiting)

    async def _locate(self, target: Target, end: float | None) -> tuple[str, ...]:
        """The scopes of the target's addresses; none where no clock belongs to an address."""
        if self._whereabouts is None:
            return ()
        seconds = None if end is None else max(0.0, end - self.clock.monotonic())
        try:
            async with deadline(self.clock, seconds):
                return await self._whereabouts.scopes(target.host, target.port)
        except TimeoutError:
            raise LeaseTimeout(
                target.url, f"{target.url}: the address of {target.host} did not come in time"
            ) from None

    async def _decide_within(
        self, url: str, target: Target, timeout: float | None, user_agent: str | None
    ) -> Decision:
        decision = self.answers.recall(url, user_agent=user_agent)
        if decision is not None:
            return decision
        if timeout is None:
            return await self.answers.check(url, user_agent=user_agent)
        try:
            async with deadline(self.clock, timeout):
                return await self.answers.check(url, user_agent=user_agent)
        except TimeoutError:
            raise LeaseTimeout(
                target.url, f"{target.url}: its robots.txt did not come within {timeout:g} s"
            ) from None


def _nobody(*url: str) -> Origin | None:
    """Of no URL is anything known at a glance."""
    return None
