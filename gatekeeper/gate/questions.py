"""`GateQuestions`: decisions about URLs, after the files that they need were fetched.

It joins the directory of files and the decider. A file that is not cached is fetched on behalf of
the asking task, so that no task waits for a lease that it holds itself (`deadlock`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from gatekeeper import urls
from gatekeeper.clock import Clock, refuse_unless_open, utc
from gatekeeper.decision import Decision, Reason, State, Verdict
from gatekeeper.errors import GatekeeperError, InvalidURL, LeaseTimeout, refuse_single_text
from gatekeeper.fetching.allowed_addresses import GuardStats
from gatekeeper.fetching.directory import Directory, DirectoryStats
from gatekeeper.fetching.guard import HostAddresses
from gatekeeper.fetching.outcomes import Outcome
from gatekeeper.fetching.records import Moment, Record
from gatekeeper.gate.decider import DENY_ALL, TRANSIT_SECONDS, Decider, NoLeaseError
from gatekeeper.gate.lease_base import inherited
from gatekeeper.pacing.deadlock import Choice, TaskWait, WaitGraph, WaitsForItself
from gatekeeper.pacing.ledger import FleetStats
from gatekeeper.pacing.queues import REFETCH, Offer
from gatekeeper.pacing.scheduler import PacingStats
from gatekeeper.pacing.scopes import NO_RATE
from gatekeeper.robots import Policy, RobotsTxt
from gatekeeper.urls import Target

_log = logging.getLogger(__name__)

WINDOW = 1000
"""URLs that `check_many` reads ahead of the one being answered."""
_PAUSE_EVERY = 128
"""URLs after which `check_many` lets the event loop do other work."""

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class GateStats:
    """Counters and gauges of a gate. The counters run since it was made."""

    guarded: bool
    """Whether robots.txt requests go through the guard; False with a session from the caller."""
    warm_allowed: int
    """True answers of `allowed` for which no Decision was built."""
    warm_denied: int
    """False answers of `allowed` for which no Decision was built."""
    decisions: dict[tuple[Verdict, Reason], int]
    """Decisions built, by verdict and reason. That of a lease may be built once it is read."""
    directory: DirectoryStats
    """Counters of the robots.txt files."""
    pacing: PacingStats
    """Counters of leases, waiters and hosts."""
    guard: GuardStats | None
    """Counters of the guard; None with a session from the caller."""
    fleet: FleetStats | None = None
    """None without a fleet."""


class GateQuestions:
    """Answers questions: gets files from the directory and decisions from the decider."""

    def __init__(
        self,
        decider: Decider,
        directory: Directory,
        clock: Clock,
        *,
        waits: WaitGraph[Any],
        dns: HostAddresses | None,
    ) -> None:
        """`waits` ends a task's wait for its own lease; `dns`, if any, looks up the addresses whose
        clocks hosts share."""
        self.decider = decider
        self.directory: Directory = directory
        self.clock = clock
        self._monotonic = clock.monotonic
        self.waits = waits
        self.dns = dns
        # Stored, as `get_running_loop` makes a system call before Python 3.12.
        self._loop = asyncio.get_running_loop()

    def moment(self, transit: float = 0.0) -> Moment:
        """Return the current time, by both clocks. `transit` is that of the moment."""
        return Moment(self._monotonic(), self.clock.wall(), transit)

    # --- one URL ------------------------------------------------------------------------

    async def check(self, url: str, target: Target, agent: str) -> Decision:
        """Decide about a URL, after fetching its origin's file if need be.

        Call it if `Decider.recall` returned None.
        """
        resolved = await self.resolve(url, target, agent)
        return self.decide(url, target, resolved, agent)

    def decide(self, url: str, target: Target, resolved: Decision | Record, agent: str) -> Decision:
        """Decide now, by the result of `resolve`."""
        if isinstance(resolved, Decision):
            return resolved
        return self.decider.decide_by(resolved, url, target, agent, self.moment())

    async def resolve(self, url: str, target: Target, agent: str) -> Decision | Record:
        """Return the record of the URL's origin, fetched if need be.

        Return a decision instead if the guard or the operator decides, or if the file could never
        come, as it would wait for the asking task.
        """
        directory = self.directory
        record = directory.recall(target.origin)
        if record is not None and self._is_ready(record, agent):
            return record
        decision = self.decider.decide_without_file(url, target, agent)
        if decision is not None:
            return decision
        try:
            return await self.record(target, asyncio.current_task(self._loop), agent)
        except WaitsForItself as error:
            held, whose = error.held, error.whose
            return self.decider.own_lease(url, target, agent, held, whose, self.moment())

    def peek(self, url: str, target: Target, agent: str) -> Decision | None:
        """Decide from cached data. None if the file is needed first."""
        record = self.directory.peek(target.origin)
        return self.decider.decide(url, target, agent, record, self.moment())

    def offer(
        self, url: str, target: Target, user_agent: str | None
    ) -> tuple[Decision, Offer, Record | None]:
        """Return the decision at the moment of a grant, the file's interval at that moment, and the
        record that decided.

        REFETCH in place of the interval: the file has hard-expired and gets the grant. Never waits.
        """
        decider = self.decider
        agent = decider.token(user_agent)
        moment = self.moment(TRANSIT_SECONDS)
        record = self.directory.peek(target.origin)
        decision = decider.recall(url, agent, moment)
        if decision is None:
            decision = decider.decide(url, target, agent, record, moment)
        if decision is None:
            return decider.unknown(url, target, agent, moment), REFETCH, None
        if record is None or decision.state in (None, State.OVERRIDE):
            return decision, NO_RATE, None
        return decision, decider.interval(record, agent, moment), record

    def no_lease(
        self, url: str, target: Target, user_agent: str | None, why: str | NoLeaseError
    ) -> Decision:
        """Return DEFER, as the host grants no lease; see `Decider.no_lease`."""
        decider = self.decider
        return decider.no_lease(url, target, decider.token(user_agent), why, self.moment())

    # --- many URLs ----------------------------------------------------------------------

    async def check_many(self, raws: Iterable[str], agent: str) -> AsyncGenerator[Decision, None]:
        """Yield a decision about each URL, in order; robots.txt files are fetched in parallel.

        A slow origin delays only the URLs after it. An origin is asked once for all its URLs among
        the `WINDOW` that are read ahead.
        """
        refuse_single_text(raws)
        refuse_unless_open(self._loop)
        asker = asyncio.current_task(self._loop)
        waiting = enumerate(raws, 1)
        window: deque[tuple[str, Decision | str]] = deque()
        asking: dict[str, asyncio.Task[Record | WaitsForItself]] = {}
        users: Counter[str] = Counter()
        try:
            while True:
                for number, url in waiting:
                    if number % _PAUSE_EVERY == 0:
                        await asyncio.sleep(0)
                    found = self._answer(url, agent)
                    if isinstance(found, str):
                        if found not in asking:
                            ask = self._ask_for(found, asker, agent)
                            asking[found] = self._loop.create_task(ask)
                        users[found] += 1
                    window.append((url, found))
                    if len(window) >= WINDOW:
                        break
                if not window:
                    return
                url, found = window.popleft()
                if isinstance(found, str):
                    result = await asking[found]
                    users[found] -= 1
                    if not users[found]:
                        del users[found], asking[found]
                    found = self._answer(url, agent, result)
                yield cast("Decision", found)
        finally:  # a caller that stops early leaves no task behind
            for task in asking.values():
                task.cancel()
            await asyncio.gather(*asking.values(), return_exceptions=True)

    async def _ask_for(
        self, origin: str, asker: asyncio.Task[object] | None, agent: str
    ) -> Record | WaitsForItself:
        """Get the record of an origin, in a task of its own, on behalf of the task `asker`: the
        leases of `asker` are those that it must not wait for."""
        try:
            return await self.record(urls.parse(f"{origin}/"), asker, agent)
        except WaitsForItself as error:
            return error

    def _answer(
        self, url: str, agent: str, resolved: Record | WaitsForItself | None = None
    ) -> Decision | str:
        """Return the decision, or the origin whose file is needed first. `resolved`: the record of
        that origin, or why it can't be fetched.

        A question that fails becomes a decision, to keep the other URLs of the batch. Errors that
        do not concern the URL are raised: the gate is closed, or the caller passed something other
        than text.
        """
        decider = self.decider
        try:
            decision = decider.recall(url, agent, self.clock) if resolved is None else None
            if decision is not None:
                return decision
            target, moment = urls.parse(url), self.moment()
            if isinstance(resolved, WaitsForItself):
                held, whose = resolved.held, resolved.whose
                return decider.own_lease(url, target, agent, held, whose, moment)
            record = resolved or self.fresh(target.origin, agent)
            decision = decider.decide(url, target, agent, record, moment)
            return target.origin if decision is None else decision
        except InvalidURL as error:
            return decider.invalid(url, error.problem, agent)
        except Exception as error:
            if isinstance(error, GatekeeperError) or not isinstance(url, str):
                raise
            return decider.internal_error(url, agent, error, self.moment())

    # --- files --------------------------------------------------------------------------

    async def robots(self, url: str) -> RobotsTxt | None:
        """See `Gatekeeper.robots`."""
        record = await self._record_of(url)
        return record.standing(self.clock).robots if record.text is not None else None

    async def policy(self, url: str, agent: str) -> Policy:
        """See `Gatekeeper.policy`."""
        record = await self._record_of(url)
        await self.directory.prepare(record, agent)
        standing = record.standing(self.clock)
        if not standing.applies:
            return DENY_ALL.policy(agent)
        return self.decider.policy(standing.text, agent)

    async def source(self, url: str) -> bytes | None:
        """Return the bytes that `robots` parses; None if there is no text. Raises InvalidURL."""
        record = await self._record_of(url)
        return None if record.text is None else record.text.body()

    async def refresh(self, url: str) -> None:
        """See `Gatekeeper.refresh`."""
        target = urls.parse(url)
        task = asyncio.current_task(self._loop)
        self._unless_host_held(target, await self.ask(self.directory.refresh, target, task))

    async def record(
        self, target: Target, task: asyncio.Task[object] | None, agent: str | None = None
    ) -> Record:
        """Return the record of the target's origin, ready for decisions about the agent.

        It is fetched on behalf of the task if need be. Raises WaitsForItself if it could never
        come, as the task holds the lease that it waits for.
        """
        directory = self.directory
        record = directory.get_nowait(target.origin)
        if record is None:
            record = await self.ask(directory.await_flight, target, task)
        if agent is not None and not directory.is_prepared(record, agent):
            await directory.prepare(record, agent)
        return record

    async def ask(
        self,
        get: Callable[[str], Coroutine[Any, Any, _Result]],
        target: Target,
        task: asyncio.Task[object] | None,
    ) -> _Result:
        """Await `get(target.origin)`, which waits for the origin's robots.txt, for the task.

        Raises WaitsForItself if the file can't come before a lease of the task ends, or if a lease
        that the task was started under has delayed it for too long.
        """
        waiting = None if task is None else await self.begin_wait(target, task, target.origin)
        if waiting is None:
            return await get(target.origin)
        try:
            return await get(target.origin)
        except asyncio.CancelledError:
            waiting.cancelled()
            raise
        finally:
            self.waits.end(waiting)

    async def begin_wait(
        self, target: Target, task: asyncio.Task[object], file: str | None = None
    ) -> TaskWait[Any] | None:
        """Note that the task waits for the target's host, or for the robots.txt of the origin
        `file`. None if it holds no lease and was started under none.

        Raises WaitsForItself if the wait could never end.
        """
        holds_lease, outer_leases = bool(self.waits.holdings.of(task)), inherited(task)
        if not holds_lease and not outer_leases:
            return None
        scopes: tuple[str, ...] = ()
        if holds_lease and self.dns is not None:
            scopes = await self.dns.scopes(target.host, target.port)
        choice = Choice(target.url, target.host, scopes, file)
        return self.waits.begin(task, lambda: (choice,), outer_leases, file)

    def fresh(self, origin: str, agent: str) -> Record | None:
        """Return the record if it is fresh and answers about the agent without waiting."""
        record = self.directory.recall(origin)
        return record if record is not None and self._is_ready(record, agent) else None

    def _is_ready(self, record: Record, agent: str) -> bool:
        """Return True if the record is usable, fresh and prepared for the agent."""
        return (
            record.usable(now := self._monotonic())
            and now < record.fresh_until
            and self.directory.is_prepared(record, agent)
        )

    async def _record_of(self, url: str) -> Record:
        """Return the record of the URL's origin, fetched if need be.

        Raises LeaseTimeout if it would have to wait for a lease of the calling task, or for the end
        of a host's block or pause.
        """
        target = urls.parse(url)
        return self._unless_host_held(
            target, await self.record(target, asyncio.current_task(self._loop))
        )

    def _unless_host_held(self, target: Target, record: Record) -> Record:
        if record.current.outcome not in (Outcome.HOST_BLOCKED, Outcome.HOST_PAUSED):
            return record
        retry_at = utc(self.clock.wall() + record.expires - self._monotonic())
        raise LeaseTimeout(
            target.url,
            f"{target.url}: its robots.txt can't be asked for, a host is "
            f"{record.current.outcome.row.name.removeprefix('host_')}; "
            f"ask again at {retry_at:%Y-%m-%dT%H:%M:%SZ}",
            retry_at=retry_at,
        )
