"""Leases: a decision and a turn joined, held, reported and ended."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import datetime
from types import TracebackType
from typing import Protocol

from yarl import URL

from gatekeeper import urls
from gatekeeper.clock import Clock, deadline, utc
from gatekeeper.decision import Decision, Verdict
from gatekeeper.errors import Deferred, Denied, LeaseTimeout
from gatekeeper.middleware import open_leases
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
        "_claimed",
        "_clock",
        "_ended",
        "_grant",
        "_head_at",
        "_on_end",
        "_on_report",
        "_reported",
        "decision",
        "host",
        "owner",
        "url",
    )

    def __init__(
        self,
        target: Target,
        decision: Decision,
        grant: Grant,
        *,
        clock: Clock,
        on_report: Callable[[Lease, int | None], None],
        on_end: Callable[[Lease], None],
    ) -> None:
        self.url = target.url
        self.host = target.host
        self.decision = decision
        self.owner: asyncio.Task[object] | None = None
        self._grant = grant
        self._clock = clock
        self._on_report = on_report
        self._on_end = on_end
        self._head_at: float | None = None
        self._claimed = False
        self._reported = False
        self._ended = False

    def __repr__(self) -> str:
        state = "ended" if self._ended else f"until {self.expires_at:%H:%M:%SZ}"
        return f"<Lease {self.url} {state}>"

    @property
    def expires_at(self) -> datetime:
        """When the lease ends by itself and counts as used (aware, UTC)."""
        left = self._grant.expires_at - self._clock.monotonic()
        return utc(self._clock.wall() + left)

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
            self._head_at = self._clock.monotonic()
            self._grant.head()

    def answered(
        self, status: int, *, retry_after: str | None = None, rate_limit: str | None = None
    ) -> None:
        """`head` and `report` in one: the head is here, and says so much."""
        self.head()
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
        if self._reported or self._ended:
            return
        self._reported = True
        if elapsed is None and self._head_at is not None:
            elapsed = self._head_at - self._grant.start_at
        self._on_report(self, status)
        self._grant.report(status, elapsed, retry_after, size, rate_limit=rate_limit)

    def renew(self, seconds: float) -> None:
        """Put the end `seconds` from now."""
        self._grant.renew(seconds)

    def give_back(self) -> None:
        """End it unused: nothing was sent. The slot is free at once, the clock stays."""
        if not self._ended:
            self._ended = True
            self._grant.give_back()
            self._on_end(self)

    def end(self) -> None:
        """The connection is free again: the slot goes to the next in line."""
        if not self._ended:
            self._ended = True
            self._grant.release()
            self._on_end(self)


def _as_sent(url: str) -> URL | None:
    try:
        return URL(url).with_fragment(None)
    except ValueError:
        return None


class LeaseRequest:
    """What `gate.lease()` returns: entering waits for the turn, leaving ends the lease."""

    __slots__ = ("_acquire", "_lease")

    def __init__(self, acquire: Callable[[], Awaitable[Lease]]) -> None:
        self._acquire = acquire
        self._lease: Lease | None = None

    async def __aenter__(self) -> Lease:
        lease = await self._acquire()
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
        open_leases.set(tuple(held for held in open_leases.get() if held is not lease))
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

    def __init__(self, answers: Answers, scheduler: Scheduler, clock: Clock) -> None:
        self._answers = answers
        self._scheduler = scheduler
        self._clock = clock
        self._holdings = Holdings()

    async def acquire(
        self,
        url: str,
        *,
        priority: int,
        timeout: float | None,
        user_agent: str | None,
        owned: bool,
    ) -> Lease:
        """Decide, wait for the turn, decide again at the grant. See `Gatekeeper.acquire`."""
        target = urls.parse(url)
        if owned:
            limit = self._scheduler.limit_of(target.host)
            self._holdings.refuse_waiting_for_itself(target.host, target.url, limit)
        end = None if timeout is None else self._clock.monotonic() + timeout
        decision = await self._decide_within(url, target, timeout, user_agent)
        refuse(decision)

        def admit() -> Offer:
            # Called at the moment of the grant; no await lies between it and the books.
            nonlocal decision
            decision, offer = self._answers.offer(url, target, user_agent)
            if offer is not REFETCH:
                refuse(decision)
            return offer

        grant = await self._scheduler.acquire(
            target.url,
            target.host,
            priority=priority,
            timeout=None if end is None else max(0.0, end - self._clock.monotonic()),
            admit=admit,
            refetch=lambda: self._answers.learn(target.origin),
        )
        lease = Lease(
            target,
            decision,
            grant,
            clock=self._clock,
            on_report=self._reported,
            on_end=self._holdings.drop,
        )
        if owned:
            self._holdings.add(lease)
        return lease

    async def _decide_within(
        self, url: str, target: Target, timeout: float | None, user_agent: str | None
    ) -> Decision:
        decision = self._answers.recall(url, user_agent=user_agent)
        if decision is not None:
            return decision
        if timeout is None:
            return await self._answers.check(url, user_agent=user_agent)
        try:
            async with deadline(self._clock, timeout):
                return await self._answers.check(url, user_agent=user_agent)
        except TimeoutError:
            raise LeaseTimeout(
                target.url, f"{target.url}: its robots.txt did not come within {timeout:g} s"
            ) from None

    def _reported(self, lease: Lease, status: int | None) -> None:
        if status is not None:
            self._answers.note_page(lease.decision.origin, ok=200 <= status < 400)
