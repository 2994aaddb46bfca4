"""Leases: a decision and a turn joined, held, reported and ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from datetime import datetime
from types import TracebackType
from typing import Protocol

import msgspec
from yarl import URL

from gatekeeper import urls
from gatekeeper.clock import Clock, deadline, utc
from gatekeeper.decision import Decision, Verdict
from gatekeeper.errors import Deferred, Denied, LeaseTimeout
from gatekeeper.holdings import Holdings
from gatekeeper.middleware import open_leases
from gatekeeper.pacing.intervals import Wish
from gatekeeper.pacing.leases import Grant
from gatekeeper.pacing.scheduler import Scheduler
from gatekeeper.pacing.waiters import REFETCH, Offer
from gatekeeper.urls import Target

__all__ = ["Lease", "LeaseRequest", "Lessor", "refuse"]


def refuse(decision: Decision) -> None:
    """Raise Denied or Deferred unless the decision is ALLOW."""
    if decision.verdict is Verdict.DENY:
        raise Denied(decision)
    if decision.verdict is Verdict.DEFER:
        raise Deferred(decision)


class Lease(msgspec.Struct, eq=False):
    """The right to send one request to `url`, until `expires_at`.

    Report what came of it, so that the host's clock, back-off and latency are right; the
    first report is final, and leaving `async with gate.lease(...)` ends the lease.
    """

    _lessor: Lessor
    _grant: Grant
    url: str
    host: str
    owner: asyncio.Task[object] | None
    """The task that would wait for itself if it asked for another one."""
    _answer: Decision | Origin
    """The decision, or who knows it: few look at it, so it is written out when one does."""
    _number: int = 0
    _head_at: float | None = None
    _claimed: bool = False
    _ended: bool = False

    @property
    def decision(self) -> Decision:
        """The answer at the moment of the grant."""
        answer = self._answer
        if not isinstance(answer, Decision):
            path = self.url[len(answer.origin) :]
            answer = self._answer = answer.tell(self.url, path, self._number)
        return answer

    def __repr__(self) -> str:
        state = "ended" if self._ended else f"until {self.expires_at:%H:%M:%SZ}"
        return f"<Lease {self.url} {state}>"

    @property
    def expires_at(self) -> datetime:
        """When the lease ends by itself and counts as used (aware, UTC)."""
        clock = self._lessor.clock
        return utc(clock.wall() + self._grant.expires_at - clock.monotonic())

    @property
    def ended(self) -> bool:
        """Whether the slot was given back."""
        return self._ended

    def claim(self, url: str) -> bool:
        """Take the lease for a request to `url`; true for the first matching claim."""
        if self._claimed or self._ended:
            return False
        # aiohttp sends what yarl makes of a text, and yarl unescapes some of it: both sides
        # are put into that form before they are compared.
        self._claimed = url == self.url or _as_sent(url) == _as_sent(self.url)
        return self._claimed

    def head(self) -> None:
        """The head of the response is here: the interval counts from now."""
        if self._head_at is None:
            self._head_at = self._lessor.clock.monotonic()
            self._grant.books.head(self._grant)

    def answered(
        self, status: int, *, retry_after: str | None = None, rate_limit: str | None = None
    ) -> None:
        """`head` and `report` in one: the head is here, and says so much."""
        grant = self._grant
        if grant.reported or self._ended:
            return
        if self._head_at is None:
            self._head_at = self._lessor.clock.monotonic()
        if isinstance(self._answer, Decision):
            self._note(status)
        grant.reported = True
        elapsed = self._head_at - grant.start_at
        grant.books.report(grant, status, elapsed, retry_after, None, rate_limit)

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

        `status` is the HTTP status (None: no answer), `elapsed` seconds to the response
        head, `retry_after` the Retry-After header as it came, or seconds, `size` bytes,
        `rate_limit` the RateLimit header as it came (HTTP-11; Retry-After goes first).
        """
        grant = self._grant
        if grant.reported or self._ended:
            return
        if elapsed is None and self._head_at is not None:
            elapsed = self._head_at - grant.start_at
        if status is not None:
            self._note(status)
        grant.report(status, elapsed, retry_after, size, rate_limit=rate_limit)

    def _note(self, status: int) -> None:
        # A lease had at once is of an origin whose file is fresh: nothing to be learnt there.
        answer = self._answer
        if isinstance(answer, Decision):
            self._lessor.answers.note_page(answer.origin, ok=200 <= status < 400)

    def renew(self, seconds: float) -> None:
        """Put the end `seconds` from now."""
        self._grant.renew(seconds)

    def give_back(self) -> None:
        """End it unused: nothing was sent. The slot is free at once, the clock stays."""
        if not self._ended:
            self._ended = True
            self._grant.give_back()
            self._lessor.holdings.drop(self)

    def end(self) -> None:
        """The connection is free again: the slot goes to the next in line."""
        if not self._ended:
            self._ended = True
            grant = self._grant
            if grant.open:
                grant.books.release(grant)
            self._lessor.holdings.drop(self)


def _as_sent(url: str) -> URL | None:
    try:
        return URL(url).with_fragment(None)
    except ValueError:
        return None


class LeaseRequest:
    """What `gate.lease()` returns: entering waits for the turn, leaving ends the lease."""

    __slots__ = ("_agent", "_lease", "_lessor", "_priority", "_timeout", "_url")

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
            open_leases.set((*open_leases.get(), lease))
        return lease

    async def __aenter__(self) -> Lease:
        lease = self.at_once()
        if lease is None:
            lessor = self._lessor
            lease = self._lease = await lessor.wait(
                self._url,
                asyncio.current_task(lessor.loop),
                priority=self._priority,
                timeout=self._timeout,
                user_agent=self._agent,
            )
            open_leases.set((*open_leases.get(), lease))
        return lease

    def enter_here(self) -> None:
        """Let requests of this context adopt the lease, whichever task entered it."""
        lease = self._lease
        if lease is not None and not lease.ended and lease not in open_leases.get():
            lease.owner = asyncio.current_task()
            open_leases.set((*open_leases.get(), lease))

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        lease = self._lease
        if lease is None:
            return
        held = open_leases.get()
        if held[-1:] == (lease,):
            open_leases.set(held[:-1])
        else:
            open_leases.set(tuple(other for other in held if other is not lease))
        # Without a report it counts as sent and unanswered: fail closed.
        lease.report()
        lease.end()


class Origin(Protocol):
    """The prepared answers of one origin."""

    origin: str
    host: str
    wish: Wish | None
    """The pace it asks for; None where that has to be looked up."""

    def tell(self, url: str, path: str, number: int) -> Decision:
        """The decision about a URL; `number` makes its id."""


AtOnce = Callable[[str], Origin | None]
"""Whose URL it is, where it is known at a glance that it is welcome."""


class Answers(Protocol):
    """What a lessor asks of its gate."""

    def recall(self, url: str, *, user_agent: str | None = None) -> Decision | None:
        """The decision, where it was prepared; never waits."""

    async def check(self, url: str, *, user_agent: str | None = None) -> Decision:
        """The decision, waiting for the file if need be."""

    def offer(self, url: str, target: Target, user_agent: str | None) -> tuple[Decision, Offer]:
        """The decision at this moment and the pace that the text asks for."""

    async def learn(self, origin: str) -> None:
        """Ask the origin for its file if need be."""

    def note_page(self, origin: str, *, ok: bool) -> None:
        """A page of the origin answered."""


class Lessor:
    """Joins the answer and the turn into leases."""

    def __init__(
        self,
        answers: Answers,
        at_once: AtOnce,
        scheduler: Scheduler,
        clock: Clock,
        serial: Iterator[int],
    ) -> None:
        """`serial` numbers the decisions."""
        self.answers = answers
        self.clock = clock
        self.holdings: Holdings[Lease] = Holdings()
        self._at_once = at_once
        self._scheduler = scheduler
        self._serial = serial
        self.loop: asyncio.AbstractEventLoop | None = None
        """The one that the gate belongs to; to ask for the running one is a system call before
        Python 3.12."""

    def take(self, url: str, owner: asyncio.Task[object] | None) -> Lease | None:
        """The lease that can be had at once, where it is known at a glance; else None.

        The check before and the check at the grant are the same moment here.
        """
        origin = self._at_once(url)
        if origin is None or (wish := origin.wish) is None:
            return None
        host = origin.host
        grant = self._scheduler.take(url, host, wish)
        if grant is None:
            return None
        lease = Lease(self, grant, url, host, owner, origin, next(self._serial))
        if owner is not None and self.holdings.first.setdefault(host, lease) is not lease:
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
        lease = self.take(url, owner) if user_agent is None else None
        if lease is not None:
            return lease
        return await self.wait(
            url, owner, priority=priority, timeout=timeout, user_agent=user_agent
        )

    async def wait(
        self,
        url: str,
        owner: asyncio.Task[object] | None,
        *,
        priority: int = 0,
        timeout: float | None = None,
        user_agent: str | None = None,
    ) -> Lease:
        """Decide, wait for the turn, decide again at the grant: what `take` could not give."""
        target = urls.parse(url)
        if owner is not None:
            limit = self._scheduler.limit_of(target.host)
            self.holdings.refuse_waiting_for_itself(target.host, target.url, owner, limit)
        end = None if timeout is None else self.clock.monotonic() + timeout
        decision = await self._decide_within(url, target, timeout, user_agent)
        refuse(decision)

        def admit() -> Offer:
            # Called at the moment of the grant; no await lies between it and the books.
            nonlocal decision
            decision, offer = self.answers.offer(url, target, user_agent)
            if offer is not REFETCH:
                refuse(decision)
            return offer

        grant = await self._scheduler.acquire(
            target.url,
            target.host,
            priority=priority,
            timeout=None if end is None else max(0.0, end - self.clock.monotonic()),
            admit=admit,
            refetch=lambda: self.answers.learn(target.origin),
        )
        lease = Lease(self, grant, target.url, target.host, owner, decision)
        if owner is not None:
            self.holdings.add(lease)
        return lease

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
