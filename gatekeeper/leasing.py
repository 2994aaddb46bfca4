"""Leases: a decision and a turn joined, held, reported and ended."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import datetime
from types import TracebackType
from typing import Protocol

from yarl import URL

from gatekeeper import urls
from gatekeeper.clock import Clock, deadline, utc
from gatekeeper.decision import Decision, Verdict
from gatekeeper.errors import Deferred, Denied, LeaseTimeout
from gatekeeper.middleware import open_leases
from gatekeeper.pacing.intervals import Wish
from gatekeeper.pacing.leases import Grant
from gatekeeper.pacing.scheduler import Scheduler
from gatekeeper.pacing.waiters import REFETCH, Offer
from gatekeeper.urls import Target

__all__ = ["Holdings", "Lease", "LeaseRequest", "Lessor", "refuse"]


def refuse(decision: Decision) -> None:
    """Raise Denied or Deferred unless the decision is ALLOW."""
    if decision.verdict is Verdict.DENY:
        raise Denied(decision)
    if decision.verdict is Verdict.DEFER:
        raise Deferred(decision)


class Lease:
    """The right to send one request to `url`, until `expires_at`.

    Report what came of it, so that the host's clock, back-off and latency are right; the
    first report is final, and leaving `async with gate.lease(...)` ends the lease.
    """

    __slots__ = (
        "_answer",
        "_asked",
        "_claimed",
        "_decision",
        "_ended",
        "_grant",
        "_head_at",
        "_lessor",
        "_number",
        "host",
        "origin",
        "owner",
        "url",
    )

    def __init__(self, lessor: Lessor, asked: str, origin: str, host: str, path: str) -> None:
        self.url = origin + path
        self.origin = origin
        self.host = host
        self.owner: asyncio.Task[object] | None = None
        self._asked = asked
        self._lessor = lessor
        self._head_at: float | None = None
        self._claimed = False
        self._ended = False
        self._decision: Decision | None = None

    _grant: Grant
    _answer: Answer
    _number: int

    @property
    def decision(self) -> Decision:
        """The answer at the moment of the grant."""
        # Few look at it, so it is written out when somebody does.
        if self._decision is None:
            self._decision = self._answer.again(self._asked, self._number)
        return self._decision

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
            self._grant.head()

    def answered(
        self, status: int, *, retry_after: str | None = None, rate_limit: str | None = None
    ) -> None:
        """`head` and `report` in one: the head is here, and says so much."""
        if self._head_at is None:
            self._head_at = self._lessor.clock.monotonic()
        self.report(status=status, retry_after=retry_after, rate_limit=rate_limit)

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
            self._lessor.answers.note_page(self.origin, ok=200 <= status < 400)
        grant.report(status, elapsed, retry_after, size, rate_limit=rate_limit)

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
            self._grant.release()
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

    async def __aenter__(self) -> Lease:
        # A coroutine less where the turn can be had at once.
        lease = self._lessor.take(self._url, self._agent)
        if lease is None:
            lease = await self._lessor.acquire(
                self._url, priority=self._priority, timeout=self._timeout, user_agent=self._agent
            )
        self._lease = lease
        open_leases.set((*open_leases.get(), lease))
        return lease

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


class Holdings:
    """Which open leases belong to which task, so that none waits for itself."""

    def __init__(self) -> None:
        self._by_host: dict[str, list[Lease]] = {}

    def add(self, lease: Lease) -> None:
        """Remember the current task as the lease's owner."""
        lease.owner = asyncio.current_task()
        self._by_host.setdefault(lease.host, []).append(lease)

    def drop(self, lease: Lease) -> None:
        """Forget an ended lease; unknown ones are no error."""
        held = self._by_host.get(lease.host)
        if held is None or lease not in held:
            return
        held.remove(lease)
        if not held:
            del self._by_host[lease.host]

    def refuse_waiting_for_itself(self, host: str, url: str, limit: int) -> None:
        """Raise LeaseTimeout if the current task holds every slot of the host."""
        held = self._by_host.get(host)
        if held is None:
            return
        task = asyncio.current_task()
        mine = [lease for lease in held if lease.owner is task]
        if len(mine) >= limit:
            raise LeaseTimeout(
                url,
                f"{urls.mask(url)} would wait for {mine[0].url}, which this task still "
                f"holds: read or close that response first (host {host}, {limit} at a time)",
            )


class Answer(Protocol):
    """An answer that is given again and again."""

    tally: list[int]
    """One number: how often."""

    @property
    def welcome(self) -> bool:
        """It is ALLOW."""

    def again(self, url: str, number: int) -> Decision:
        """The same about another URL; `number` makes its id."""


class Origin(Protocol):
    """What a prepared answer's origin is, and asks for."""

    origin: str
    host: str
    wish: Wish | None


class Answers(Protocol):
    """What a lessor asks of its gate."""

    def find(self, url: str, user_agent: str | None) -> tuple[Origin, Answer, str] | None:
        """What was prepared for the URL, and its path; never waits."""

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
        self, answers: Answers, scheduler: Scheduler, clock: Clock, serial: Iterator[int]
    ) -> None:
        """`serial` numbers the decisions."""
        self.answers = answers
        self._serial = serial
        self.clock = clock
        self.holdings = Holdings()
        self._scheduler = scheduler

    def take(self, url: str, user_agent: str | None = None, *, owned: bool = True) -> Lease | None:
        """The lease that can be had at once, where its answer is prepared; else None.

        The check before and the check at the grant are the same moment here.
        """
        found = self.answers.find(url, user_agent)
        if found is None:
            return None
        origin, answer, path = found
        if origin.wish is None or not answer.welcome:
            return None
        grant = self._scheduler.take(url, origin.host, origin.wish)
        if grant is None:
            return None
        answer.tally[0] += 1
        lease = Lease(self, url, origin.origin, origin.host, path)
        lease._grant = grant
        lease._answer = answer
        lease._number = next(self._serial)
        if owned:
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
        """Decide, wait for the turn, decide again at the grant. See `Gatekeeper.acquire`."""
        lease = self.take(url, user_agent, owned=owned)
        if lease is not None:
            return lease
        target = urls.parse(url)
        if owned:
            limit = self._scheduler.limit_of(target.host)
            self.holdings.refuse_waiting_for_itself(target.host, target.url, limit)
        end = None if timeout is None else self.clock.monotonic() + timeout
        found = self.answers.find(url, user_agent)
        if found is None or not found[1].welcome:
            refuse(await self._decide_within(url, target, timeout, user_agent))
        decision: Decision | None = None

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
        lease = Lease(self, url, target.origin, target.host, target.path)
        lease._grant = grant
        lease._decision = decision
        if owned:
            self.holdings.add(lease)
        return lease

    async def _decide_within(
        self, url: str, target: Target, timeout: float | None, user_agent: str | None
    ) -> Decision:
        if timeout is None:
            return await self.answers.check(url, user_agent=user_agent)
        try:
            async with deadline(self.clock, timeout):
                return await self.answers.check(url, user_agent=user_agent)
        except TimeoutError:
            raise LeaseTimeout(
                target.url, f"{target.url}: its robots.txt did not come within {timeout:g} s"
            ) from None
