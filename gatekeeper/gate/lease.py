"""`Lease`, the right to send one request, and `LeaseManager`, which grants leases.

A lease joins a decision and a grant of the host: it is held, reported and ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from contextvars import Context
from datetime import datetime
from threading import get_ident
from typing import TYPE_CHECKING, Final
from weakref import ref

import msgspec

from gatekeeper import urls
from gatekeeper.clock import Clock, OwnedTasks, deadline, number, refuse_unless_open, utc
from gatekeeper.config import refuse_wildcard_agent
from gatekeeper.decision import Decision, NotYet, Reason, State, not_yet, refuse
from gatekeeper.errors import (
    Deferred,
    GatekeeperError,
    LeaseTimeout,
    LedgerLost,
    StorageError,
    refuse_wrong_report,
    refuse_wrong_wait,
)
from gatekeeper.fetching.faults import LocalFaults, Uplink
from gatekeeper.fetching.records import Record
from gatekeeper.gate.decider import Decider
from gatekeeper.gate.lease_base import (
    LeaseBase,
    Unentered,
    await_request,
    hold_in_context,
    open_leases,
    unbind,
)
from gatekeeper.gate.protocols import ConnectionInUse
from gatekeeper.gate.questions import GateQuestions
from gatekeeper.gate.robots_pacing import PARKED
from gatekeeper.library_internals import THREAD, loop_state
from gatekeeper.pacing.deadlock import Holdings
from gatekeeper.pacing.grants import Grant
from gatekeeper.pacing.host_settings import BudgetSpent
from gatekeeper.pacing.queues import REFETCH, Offer
from gatekeeper.pacing.scheduler import Scheduler
from gatekeeper.pacing.waiters import EVERYTHING, Entrance
from gatekeeper.robots import Policy
from gatekeeper.urls import Target

_DNS_SECONDS = 0.5
"""Seconds that a DNS look-up may take when a lease of an earlier process is restored."""

_MAX_FETCHES: Final = 4_000
"""Origins whose files are fetched in the background at the same time: as many as a gate admits."""
_MAX_KEPT_OCTETS: Final = 16_384
"""Octets of a text whose rules a lease may keep for its decision; nearly all have fewer."""
_log = logging.getLogger(__name__)
_PARSED: Final = State.PARSED
"""The state of a file that was reached: a page of its origin proves nothing new then."""
_HOST_HELD = frozenset({Reason.HOST_BLOCKED, Reason.HOST_PAUSED})


class Lease(LeaseBase, eq=False):
    """The right to send one request to `url`, until `expires_at`.

    Report the outcome with `report`, so that the host's clock, back-off and latency are right; the
    first report is final. Leaving `async with gate.lease(...)` ends the lease; one from `acquire`
    or `try_acquire` ends with `end`. A lease that is left without a report counts as sent and
    unanswered.

    >>> async def main(gate, session) -> None:
    ...     async with gate.lease("https://example.org/page") as lease:
    ...         async with session.get(lease.url) as response:
    ...             lease.report(
    ...                 status=response.status,
    ...                 retry_after=response.headers.get("Retry-After"),
    ...             )
    """

    if TYPE_CHECKING:
        owner: asyncio.Task[object] | None

    _manager: LeaseManager
    grant: Grant
    """The scheduler's grant behind it, for the audit record."""
    _told: Decision
    """The decision; until it is read perhaps the frame of one, with its origin and state."""
    _policy: Policy | None = None
    """Makes the decision when it is first read, which few callers do. None: it is made."""
    _sent_by_caller: bool = False
    """Whether the caller decides when the request is sent; False if the middleware sends it."""

    @property
    def decision(self) -> Decision:
        """The decision at the moment of the grant."""
        if (policy := self._policy) is not None:
            told = self._manager.decider.tell_by(policy, self._told, self.url)
            self._told, self._policy = told, None
        return self._told

    @property
    def origin(self) -> str:
        """The origin whose robots.txt decided."""
        return self._told.origin

    @property
    def is_ours(self) -> bool:
        """Whether the gate itself sends its request, and not code of the caller."""
        return self._claimed or not self._sent_by_caller

    @property
    def started_at(self) -> float:
        """Monotonic time of the grant, in seconds."""
        return self.grant.start_at

    @property
    def awaits_head(self) -> bool:
        """Whether its request is known to have been sent, and has no response yet."""
        grant = self.grant
        return grant.open and not grant.headed and self.is_ours

    @property
    def expires_at(self) -> datetime:
        """When the lease expires and counts as used (aware, UTC)."""
        clock = self._manager.clock
        return utc(clock.wall() + self.grant.expires_at - clock.monotonic())

    @property
    def holdings(self) -> Holdings[Lease]:
        """The open leases of its gate, by owner."""
        return self._manager.holdings

    @property
    def scopes(self) -> tuple[str, ...]:
        """Scopes of which it holds a slot: its host, and the clocks that the host shares."""
        grant = self.grant
        return (grant.scope.name, *(other.name for other in grant.others), EVERYTHING)

    @property
    def headed(self) -> bool:
        """Whether the head of its response has arrived, so that no interval waits for it."""
        return self.grant.headed

    @property
    def ended(self) -> bool:
        """Whether the slot was given back, or the lease expired."""
        return not self.grant.open

    def leave(self) -> None:
        """Undo `enter` and end the lease. Without a report it counts as sent and unanswered.

        If its response is still being read, the slot is held until the connection is free.
        """
        held = open_leases.get()
        if held and held[-1]() is self:
            open_leases.set(held[:-1])
        else:
            unbind(self)
        try:
            if not self.grant.reported:
                self.report()  # fail closed
        finally:
            grant = self.grant
            if grant.held_by is not None and grant.in_use:
                self._block_left = True
            else:
                self.end()

    def _hold_while(self, connection: ConnectionInUse | None) -> None:
        self.grant.hold_while(connection)

    def head(self) -> None:
        """Note that the head of the response has arrived: the interval counts from now."""
        if self._head_at is None:
            manager = self._manager
            self._head_at = now = manager.now()
            manager.faults.answered(self._told.origin, now)
            self.grant.head(now)

    def answered(
        self, status: int, *, retry_after: str | None = None, rate_limit: str | None = None
    ) -> None:
        """Call `head` and `report` in one: the head has arrived, with this status and fields."""
        grant, manager = self.grant, self._manager
        now = manager.now()
        told = self._told
        manager.faults.answered(told.origin, now)
        if told.state is not _PARSED and not grant.reported:
            manager.questions.directory.note_page(told.origin, 200 <= status < 400)
        elapsed = (now if self._head_at is None else self._head_at) - grant.start_at
        grant.report(status, elapsed, retry_after, rate_limit, now)

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
        body's bytes; `rate_limit` the RateLimit header, unparsed (HTTP-11; Retry-After takes
        precedence). Raises TypeError for an argument of another type, such as a status that is
        text. A number that no response has, such as a negative size, counts as the nearest
        possible one or as none, since sites can cause it.
        """
        # Only unusual arguments are validated: every request has a report, so it has to be fast.
        if (
            status.__class__ is not int
            or elapsed is not None
            or retry_after is not None
            or size is not None
        ):
            refuse_wrong_report(status, elapsed, retry_after, size)
            if size and not self.grant.reported:
                self.grant.received(size)
        grant = self.grant
        if grant.reported:
            return
        if elapsed is None and self._head_at is not None:
            elapsed = self._head_at - grant.start_at
        now = None
        if status is not None:
            told, manager = self._told, self._manager
            if told.state is not _PARSED:
                manager.questions.directory.note_page(told.origin, 200 <= status < 400)
            if self._head_at is None:  # else `head` reported the answer
                now = manager.now()
                manager.faults.answered(told.origin, now)
        grant.report(status, elapsed, retry_after, rate_limit, now)
        if status is None and elapsed is not None and self._head_at is None:
            self._manager.uplink.unanswered(self.origin, self.host, grant.url, grant.start_at)

    @property
    def reported(self) -> bool:
        """True once a report was made, or none can count because the lease was given back."""
        return self.grant.reported

    @property
    def counts_bytes(self) -> bool:
        """Whether the bytes of the response count: for a budget, or for the audit record."""
        grant = self.grant
        return grant.counts_bytes or grant.scope.settings.budget is not None

    def received(self, size: int) -> None:
        """Count bytes of the response for the host's budget, if no report has a `size`."""
        self.grant.received(size)

    def renew(self, seconds: float) -> None:
        """Move the end of the lease to `seconds` from now."""
        self.grant.renew(seconds)

    def lapsed(self) -> bool:
        """Return True, and end the lease unused, if the ledger's grant expired or a block began
        before the request was sent."""
        if not self.grant.stale:
            return False
        self.give_back()
        return True

    def give_back(self) -> None:
        """End the lease unused: nothing was sent. The slot is freed, the host's clock stays."""
        try:
            self.grant.give_back()
        finally:
            self.end()

    def end(self) -> None:
        """End the lease: its slot goes to the next waiter. Idempotent."""
        try:
            self.grant.release()
        finally:
            if self.owner is not None:
                self._manager.holdings.drop(self)
                self.owner = None


class LeaseRequest(msgspec.Struct, eq=False):
    """The result of `gate.lease()`: entering waits for the lease, leaving ends the lease.

    With `_bound` False, the lease that `__aenter__` returns is not bound to a block.
    """

    _manager: LeaseManager
    _url: str
    _priority: int
    _timeout: float | None
    _agent: str | None
    _owned: bool = True
    _bound: bool = True
    _lease: Lease | None = None

    if not TYPE_CHECKING:
        report = renew = give_back = end = decision = expires_at = __enter__ = Unentered()
        __await__ = await_request

    async def __aenter__(self) -> Lease:
        manager, timeout = self._manager, self._timeout
        if timeout is not None or self._priority:
            refuse_wrong_wait(self._priority, timeout)  # even if it does not come to a wait
        owner = asyncio.current_task(manager.loop) if self._owned else None
        lease = None if self._agent is not None else manager.acquire_nowait(self._url, owner)
        if lease is None:
            # In this frame, since many tasks may start in one iteration of the loop.
            if timeout != 0 and (before := manager.entrance.enter()) is not None:
                end = None if timeout is None else manager.now() + timeout
                await before
                manager.entrance.entered()
                timeout = None if end is None else max(0.0, end - manager.now())
                before = None  # drop the future: many waiters below would keep theirs
            lease = await manager.acquire(
                self._url,
                owner,
                priority=self._priority,
                timeout=timeout,
                user_agent=self._agent,
            )
        lease._sent_by_caller = True
        if self._bound:
            self._lease = lease
            open_leases.set((*open_leases.get(), ref(lease)))  # `bind`, without a call
        elif self._owned:
            hold_in_context(lease)
        return lease

    async def __aexit__(self, *error: object) -> None:
        if self._lease is not None:
            self._lease.leave()


class _GrantRequest(msgspec.Struct, eq=False):
    """A caller's request to the scheduler: three objects per waiter; closures would be ten."""

    questions: GateQuestions
    url: str
    target: Target
    agent: str | None
    owner: asyncio.Task[object] | None
    decision: Decision
    """The decision before the grant; once the lease is granted, the one at the grant."""
    record: Record | None = None
    """The record that decided at the grant, if one did."""

    def admit(self) -> Offer:
        """Decide again at the moment of the grant; there is no await between this and the engine.

        Raises Denied or Deferred.
        """
        self.decision, offer, record = self.questions.offer(self.url, self.target, self.agent)
        if offer is not REFETCH:
            refuse(self.decision)
            self.record = record
        return offer

    async def refetch(self) -> None:
        """Fetch the origin's expired file, for which the grant is used first."""
        await self.questions.ask(self.questions.directory.get, self.target, self.owner)


class LeaseManager:
    """Grants leases: joins a decision about a URL and a grant of its host."""

    def __init__(self, questions: GateQuestions, scheduler: Scheduler, faults: LocalFaults) -> None:
        """`faults` is notified of responses. Create it in the gate's loop."""
        self.questions = questions
        self.decider: Decider = questions.decider
        self.clock: Clock = questions.clock
        self.now: Callable[[], float] = self.clock.monotonic
        self.faults = faults
        self.holdings: Holdings[Lease] = questions.waits.holdings
        self.uplink: Uplink = Uplink(
            faults,
            self.clock,
            self._awaiting_head,
            busy=lambda: scheduler.busy,
            forgive=scheduler.forgive,
        )
        self.entrance: Entrance = Entrance()
        # Stored, as `get_running_loop` makes a system call before Python 3.12.
        self.loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        self._loop_state = loop_state(self.loop)
        self._dns = questions.dns
        self._scheduler = scheduler
        self._holdups = scheduler.holdups
        self._grant_nowait = scheduler.acquire_nowait
        self._fetches = OwnedTasks()
        """The background fetches of `try_acquire`, by origin."""

    def acquire_nowait(self, url: str, owner: asyncio.Task[object] | None) -> Lease | None:
        """Grant a lease without waiting, if cached data is enough to decide. Return None otherwise.

        The decision before the wait and the one at the grant are the same here. Raises GateClosed
        in another event loop: its thread, or forked process, must not change the clocks.
        """
        # Earlier waiters go first, and a host that shares the clock of its address gets none
        # before the address is looked up.
        if self.entrance.crowded or self._dns is not None:
            return None
        if self._loop_state[THREAD] != get_ident():
            refuse_unless_open(self.loop)
        decider = self.decider
        record = decider.find(url, now := self.now())
        if record is None or (frame := record.frame) is None or frame.interval is None:
            return None
        policy = decider.allows(record, url)
        if policy is None:
            return None
        try:
            grant = self._grant_nowait(url, frame.host, frame.interval, now)
        except StorageError:
            return None  # `acquire` raises the deferral
        if grant is None:
            return None
        lease = Lease(url, frame.host, owner, self, grant, frame.decision, policy)
        self.holdings.add(lease)
        if policy.robots.size > _MAX_KEPT_OCTETS:
            lease.decision  # noqa: B018 - made now, as the lease would keep the text
        return lease

    def _lease(
        self,
        grant: Grant,
        target: Target,
        owner: asyncio.Task[object] | None,
        decision: Decision,
        record: Record | None,
        agent: str | None = None,
        *,
        restored: bool = False,
    ) -> Lease:
        """Make the lease of a grant. `record` is the one that decided, if one did; `restored`: an
        earlier process granted it. A gate with an audit record writes the line of the grant first,
        and raises Deferred if it can't."""
        lease = Lease(target.url, target.host, owner, self, grant, decision, user_agent=agent)
        self.holdings.add(lease)
        return lease

    async def acquire(
        self,
        url: str,
        owner: asyncio.Task[object] | None,
        *,
        priority: int = 0,
        timeout: float | None = None,
        user_agent: str | None = None,
    ) -> Lease:
        """Decide, wait for the grant, and decide again at it, if `acquire_nowait` returned None.

        Raises as entering `Gatekeeper.lease` does.
        """
        refuse_wildcard_agent(user_agent)
        end = None if timeout is None else self.clock.monotonic() + timeout
        target = urls.parse(url)
        waiting = None if owner is None else await self.questions.begin_wait(target, owner)
        try:
            resolved = await self._resolve_within(url, target, end, user_agent)
            decision = self._decide_before_grant(url, target, resolved, user_agent)
            scopes = () if self._dns is None else await self._locate(target, end)
            request = _GrantRequest(self.questions, url, target, user_agent, owner, decision)
            grant = await self._scheduler.acquire(
                target.url,
                target.host,
                priority=priority,
                timeout=None if end is None else max(0.0, end - self.clock.monotonic()),
                admit=request.admit,
                refetch=request.refetch,
                scopes=scopes,
            )
        except (StorageError, LedgerLost, BudgetSpent) as error:
            unkept = self._holdups.unkept(target.host) or "the state can't be read or written"
            why = unkept if isinstance(error, StorageError) else error
            raise Deferred(self.questions.no_lease(url, target, user_agent, why)) from error
        except asyncio.CancelledError as error:
            error.__traceback__ = None  # the task keeps the error, and it would keep this frame
            if waiting is not None:
                waiting.cancelled()
            raise
        finally:
            if waiting is not None:
                self.questions.waits.end(waiting)
        self.uplink.wake()
        return self._lease(grant, target, owner, request.decision, request.record, user_agent)

    async def try_acquire(
        self, url: str, *, priority: int, user_agent: str | None, owned: bool
    ) -> Lease | NotYet:
        """See `Gatekeeper.try_acquire`."""
        refuse_wrong_wait(priority)
        owner = asyncio.current_task(self.loop) if owned else None
        lease = self.acquire_nowait(url, owner) if user_agent is None else None
        if lease is None:
            refuse_wildcard_agent(user_agent)
            target, agent = urls.parse(url), self.decider.token(user_agent)
            decision = self.questions.peek(url, target, agent)
            if decision is None or (self._dns is not None and not self._dns.knows(target)):
                return self._fetch_in_background(url, target, agent)
            try:
                # File and address are cached: this waits for nothing but a fleet's store.
                lease = await self.acquire(
                    url, owner, priority=priority, timeout=0, user_agent=user_agent
                )
            except Deferred as error:
                return not_yet(
                    self.clock.wall(), error.decision.reason, error.retry_at, error.decision
                )
            except LeaseTimeout as error:
                return not_yet(self.clock.wall(), error.why, error.retry_at)
        lease._sent_by_caller = True
        if owner is not None:
            hold_in_context(lease)
        return lease

    def _fetch_in_background(self, url: str, target: Target, agent: str) -> NotYet:
        """Fetch the origin's file and its address in the background; return when to ask again."""
        refuse_unless_open(self.loop)
        if self._fetches.find(target.origin) is None and len(self._fetches) < _MAX_FETCHES:
            # In an empty context: the caller may hold leases, and does not wait for the task.
            self._fetches.start(self._learn(target), target.origin, Context())
        held = self._scheduler.held(target.host)
        if held is not None and held[1] != PARKED:  # the file can't be fetched earlier, either
            why, until = self._scheduler.held_up(target.host)
            return not_yet(self.clock.wall(), why, utc(until) if until else None)
        decision = self.decider.unknown(url, target, agent, self.questions.moment())
        return not_yet(self.clock.wall(), decision.reason, decision.retry_at, decision)

    async def _learn(self, target: Target) -> None:
        try:
            if self._dns is not None:
                await self._dns.scopes(target.host, target.port)
            await self.questions.directory.get(target.origin)
        except GatekeeperError as error:
            _log.debug("robots.txt of %s could not be fetched in advance: %r", target.origin, error)

    def _awaiting_head(self) -> list[tuple[str, float]]:
        everybody = self.holdings.everybody()
        return [(one.origin, one.started_at) for one in everybody if one.awaits_head]

    async def close(self) -> None:
        """Cancel the background fetches."""
        self.uplink.close()
        await self._fetches.close()

    async def hold(self, url: str, seconds: float, user_agent: str | None) -> Lease:
        """Restore a lease that an earlier process granted and that is open. See `Scheduler.hold`.

        Its decision is the one from cached data: DEFER, if the file is not cached any more.
        """
        target = urls.parse(url)
        scopes: tuple[str, ...] = ()
        with contextlib.suppress(LeaseTimeout):  # then only the host's own slot is held
            scopes = await self._locate(target, self.clock.monotonic() + _DNS_SECONDS)
        grant = await self._scheduler.hold(target.url, target.host, seconds, scopes=scopes)
        decision, _, record = self.questions.offer(url, target, user_agent)
        return self._lease(grant, target, None, decision, record, user_agent, restored=True)

    async def _locate(self, target: Target, end: float | None) -> tuple[str, ...]:
        """Return the scopes of the target's addresses; empty if no clock belongs to an address.

        Raises LeaseTimeout at the monotonic time `end`.
        """
        if self._dns is None:
            return ()
        seconds = None if end is None else max(0.0, end - self.clock.monotonic())
        try:
            async with deadline(self.clock, seconds):
                return await self._dns.scopes(target.host, target.port)
        except TimeoutError:
            raise LeaseTimeout(
                target.url, f"{target.url}: {target.host} was not resolved in time"
            ) from None

    def _decide_before_grant(
        self, url: str, target: Target, resolved: Decision | Record, user_agent: str | None
    ) -> Decision:
        """Return the decision before the grant.

        Raises Denied, Deferred, LeaseTimeout, BudgetSpent or LedgerLost if it rules out a lease.
        """
        agent = self.decider.token(user_agent)
        decision = self.questions.decide(url, target, resolved, agent)
        if decision.reason is Reason.OWN_LEASE:
            raise LeaseTimeout(target.url, f"{urls.mask(target.url)}: {decision.note}")
        held = decision.reason in _HOST_HELD and self._scheduler.held(target.host) is not None
        if not held and not (decision.reason is Reason.FLEET and self._holdups.unavailable):
            refuse(decision)
        # Otherwise the file waits for the host's block to end or the fleet's store, as this lease.
        if (why := self._holdups.unkept(target.host)) is not None:
            refuse(self.questions.no_lease(url, target, user_agent, why))
        if (spent := self._holdups.budget_spent(target.host)) is not None:
            raise spent
        return decision

    async def _resolve_within(
        self, url: str, target: Target, end: float | None, user_agent: str | None
    ) -> Decision | Record:
        """Return the decision or the record for the URL, fetched if need be.

        Raises LeaseTimeout at the monotonic time `end`.
        """
        agent = self.decider.token(user_agent)
        decision = self.decider.recall(url, agent, self.clock)
        if decision is not None:
            return decision
        try:
            self._holdups.refuse_unknown(target.host)
        except (LedgerLost, StorageError):  # no file can be fetched: what is cached decides
            if (decision := self.questions.peek(url, target, agent)) is None:
                raise
            return decision
        left = None if end is None else max(0.0, end - self.now())
        try:
            async with deadline(self.clock, left):
                return await self.questions.resolve(url, target, agent)
        except TimeoutError:
            self._holdups.refuse_unknown(target.host)  # raises if our side is the cause
            text = f"its robots.txt was not fetched within {number(left or 0.0)} s"
            raise self._scheduler.timeout_error(target.url, target.host, text) from None
