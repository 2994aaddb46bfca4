"""Waiting tasks of `Scheduler.acquire`, and explanations of what keeps a host from being asked.

A hundred thousand tasks that start in one iteration of the loop would delay all other tasks until
each of them has joined. `Entrance` admits a bounded number in each iteration. `HostHoldups` lists
what keeps a host from being asked, `ClockView` is what `why()` shows of that, `Need` what the
deadlock check needs to know about the slots of a lease.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from operator import attrgetter, itemgetter
from typing import Final, Literal, NamedTuple, get_args

import msgspec
from msgspec.structs import replace

from gatekeeper.clock import Clock, UtcTime, number, refuse_unless_open, utc
from gatekeeper.config import PacingConfig
from gatekeeper.errors import GateClosed, LedgerLost, StorageError
from gatekeeper.pacing.engine import Engine
from gatekeeper.pacing.grants import Grant
from gatekeeper.pacing.host_settings import (
    DAY,
    BudgetSpent,
    DailyBudget,
    Usage,
    described,
    end_of,
)
from gatekeeper.pacing.ledger import ScopeView
from gatekeeper.pacing.persistence import ScopeMemory
from gatekeeper.pacing.queues import PASSED, Offer, Waiter
from gatekeeper.pacing.scopes import (
    EARLIER,
    INF,
    REFUSED,
    UNDERIVED,
    Scope,
    interval_for,
)
from gatekeeper.urls import mask

_MAX_ADMITTED = 50
"""Tasks that an `Entrance` admits in one iteration of the loop."""
_MAX_SEARCHED = 1000
"""Open leases among which `explain` looks for those of a host."""
MAX_PER_ITERATION = 1000
"""Waiters that are timed out in one iteration of the loop."""

_log = logging.getLogger(__name__)

Admit = Callable[[], Offer]
"""Called at the moment of the grant. Returns the interval that robots.txt asks for, to go ahead, or
REFETCH; or raises."""
Refetch = Callable[[], Awaitable[object]]


class TaskWaiter(Waiter):
    """A task in `Scheduler.acquire`. It stores the grant or error until the task runs again."""

    __slots__ = ("end", "error", "future", "grant", "no_wait", "offer", "scope")

    def __init__(self, scope: Scope, url: str, priority: float, admit: Admit) -> None:
        super().__init__(url, priority)
        self.no_wait: bool = False
        """It does not wait for a lease, only for the ledger's answer."""
        self.end: float = INF
        """When it gives up, in monotonic seconds."""
        self.scope: Scope = scope
        self.offer: Admit = admit
        self.grant: Grant | None = None
        self.error: Exception | None = None
        self.future: asyncio.Future[None] | None = None
        """The future that the task awaits."""

    def deliver(self, grant: Grant) -> None:
        """Store the grant and wake the task. If that was cancelled already, it passes it on."""
        self.grant = grant
        self._wake()

    def refuse(self, error: Exception) -> None:
        """Store the error and wake the task."""
        self.error = error
        self._wake()

    def outlasted(self, until: float, now: float) -> bool:
        """Return True if it gives up before `until`."""
        return self.end < until

    def fetch_robots(self) -> None:
        """Wake the task, which fetches robots.txt and then waits again."""
        self._wake()

    def _wake(self) -> None:
        if self.future is not None and not self.future.done():
            self.future.set_result(None)


class DueWatch(Waiter):
    """Calls a callback when a host is due. It takes no lease and needs no robots.txt, so nothing is
    delivered to it and it is never sent away."""

    __slots__ = ("callback", "longest", "scope")

    def __init__(
        self, scope: Scope, callback: Callable[[], object], priority: float, longest: float
    ) -> None:
        super().__init__("", priority)
        self.scope: Scope = scope
        self.callback: Callable[[], object] = callback
        self.longest: float = longest
        """A block that lasts longer than this is reported as well, in seconds."""

    def offer(self) -> Offer:
        """Call the callback, and leave the lease to the next waiter."""
        self.callback()
        return PASSED

    def outlasted(self, until: float, now: float) -> bool:
        """Return True if `until` is more than `longest` seconds away."""
        return until - now > self.longest

    def refuse(self, error: Exception) -> None:
        """Log the error. If the scheduler is closing, call the callback instead."""
        if isinstance(error, GateClosed):
            self.offer()
        else:
            _log.error("a callback of when_due failed", exc_info=error)


class Entrance:
    """Admits a bounded number of tasks in each iteration of the loop, first come, first served."""

    def __init__(self, limit: int = _MAX_ADMITTED) -> None:
        """`limit`: tasks that are admitted in one iteration."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._limit = limit
        self._admitted = 0
        """Tasks admitted in this iteration."""
        self._waiting: deque[asyncio.Future[None]] = deque()
        """The futures of the tasks that wait for admission. One that is cancelled stays there."""
        self._expected = 0
        """Tasks that were admitted from the queue for this iteration and have not run yet."""
        self.crowded: bool = False
        """Tasks wait for admission, or were admitted and have not run: no task may overtake."""
        self._armed = False

    def enter(self) -> asyncio.Future[None] | None:
        """Return None if the task is admitted immediately. Otherwise return a future to await,
        after which the task has to call `entered`. Raises GateClosed in another event loop.

        Not a coroutine: each costs memory, and there may be very many.
        """
        if not self._armed:
            if self._loop is None:  # A system call before Python 3.12.
                self._loop = asyncio.get_running_loop()
            refuse_unless_open(self._loop)
            self._armed = True
            self._loop.call_soon(self._next_iteration)
        if not self.crowded and self._admitted < self._limit:
            self._admitted += 1
            return None
        self.crowded = True
        future: asyncio.Future[None] = asyncio.Future(loop=self._loop)
        self._waiting.append(future)
        return future

    def entered(self) -> None:
        """Note that a task runs that awaited its future. A task that is cancelled after its
        admission never calls this."""
        self._expected -= 1
        self.crowded = self._expected > 0 or bool(self._waiting)

    def _next_iteration(self) -> None:
        # The tasks that were admitted in the last iteration have run by now.
        self._admitted = 0
        while self._waiting and self._admitted < self._limit:
            future = self._waiting.popleft()
            if not future.done():
                future.set_result(None)
                self._admitted += 1
        self._expected = self._admitted
        self.crowded = self._armed = self._admitted > 0
        if self._armed and self._loop is not None:
            self._loop.call_soon(self._next_iteration)


_ANSWER = re.compile(r"\A(?:[0-9]{3}|no status)\b")
"""How the reason of a block starts if a response of the host caused the block."""


class ClockView(msgspec.Struct, frozen=True):
    """One reason why a scope has to wait, or could have to.

    `kind`: interval, next, block, pause, budget, probe, back-off or in_flight; override, the
    operator's rule (`scope` is its match); or, where every lease of the host is deferred: file
    (robots.txt could not be fetched; `scope` is the origin), visit-time (the same), storage or
    fleet. `str(view)` is a line for people.
    """

    scope: str
    """The host, address, domain, group or origin concerned."""
    kind: str
    """One word: see above."""
    source: str
    """Where it comes from, such as "crawl-delay 10 s from robots.txt line 7"."""
    seconds: float | None = None
    """For an interval: its length. For a running clock: the time left."""
    until: UtcTime | None = None
    """When it ends (aware, UTC). None if an event ends it, or for a budget that is not spent."""
    decides: bool = False
    """True for the interval in force among several; and for the one that ends last of file,
    visit-time, storage and fleet, if for it every lease of the host is deferred."""
    clamped: bool = False
    """The operator's cap made it shorter than the site asks."""
    since: UtcTime | None = None
    """When the response came that caused this block or interval (aware, UTC), if one did."""

    @property
    def cause(self) -> str:
        """`source`, for a block with the time of the response: "429 at 12:03, Retry-After 120"."""
        if self.since is None or self.kind != "block":
            return self.source
        return _ANSWER.sub(rf"\g<0> at {self.since:%H:%M}", self.source)

    def __str__(self) -> str:
        text = f"{self.scope}: {self.kind}: {self.cause}"
        if self.until is not None:
            text += f" (until {self.until:%Y-%m-%dT%H:%M:%SZ})"
        return text


class HostHoldup(msgspec.Struct, gc=False):
    """One thing that keeps a host from being asked now."""

    kind: str
    """That of its `ClockView`: file, visit-time, storage, fleet, budget, pause, block, in_flight or
    next."""
    scope: str
    until: float
    """When it ends (monotonic); inf: an event ends it."""
    source: str = ""
    """The cause, as far as it is known before the `ClockView` is made."""
    partly: bool = False
    """It concerns one origin of the host, and another origin of it may be asked."""


_end = attrgetter("until")
_OF_GATE = frozenset({"file", "visit-time", "storage", "fleet"})
"""Kinds of hold-ups that belong to no clock of the host."""
HostState = Literal["free", "waiting", "busy", "deferred", "blocked", "paused"]
STATES: Final[tuple[HostState, ...]] = get_args(HostState)
"""The states of a host, in their sort order."""
HELD_UP: Final[tuple[HostState, ...]] = ("blocked", "paused", "deferred")
"""The states that operators see first: of a host that is not asked though its clock would allow
it."""
_RANKS: Final = {"next": 1, "in_flight": 2, "block": 4, "pause": 5}
"""The state, as its place in `STATES`, that a kind of hold-up leads to; any other: "deferred"."""
_DEFERRED: Final = 3


def clock_holdups(scope: Scope, now: float) -> list[HostHoldup]:
    """Return what keeps a host from being asked by its own clock and by those that it shares."""
    found: list[HostHoldup] = []
    for one in (scope, *scope.shared):
        history, name = one.history, one.name
        if now < (due := one.clock_at()) < INF:
            found.append(HostHoldup("next", name, due))
        if one.in_flight:
            found.append(HostHoldup("in_flight", name, INF, "an open lease or response holds it"))
        if history is None:
            continue
        found += _spent_budget(name, one.settings.budget, history.usage, now)
        if history.blocked_until > now:
            found.append(HostHoldup("block", name, history.blocked_until, history.reason))
        if history.paused:
            found.append(HostHoldup("pause", name, INF, "operator"))
    return found


def _spent_budget(
    name: str, budget: DailyBudget | None, used: Usage | None, now: float
) -> Iterator[HostHoldup]:
    if budget and used and (left := used.allows_after(budget, now)):
        source = f"{budget.sentence(used)}; no more until then"
        yield HostHoldup("budget", name, now + left, source)


def state_by(found: Iterable[HostHoldup]) -> HostState:
    """Return the state of a host by all of its hold-ups."""
    rank = 0
    for one in found:
        if not one.partly:
            rank = max(rank, _RANKS.get(one.kind, _DEFERRED))
    return STATES[rank]


EVERYTHING = ""
"""The name under which all leases count together (pacing.max_in_flight)."""


class Need(NamedTuple):
    """A scope of which a lease takes a slot."""

    scope: str
    slots: int
    """Number of slots of the scope."""
    paced: bool
    """An interval is in force: a lease whose head is awaited excludes all others."""


class HostStatus(NamedTuple):
    """What `/v1/hosts` says of a host."""

    state: HostState
    due: float | None
    """When its hold-ups are over (monotonic); None if there are none, or an event ends one."""
    clocks: tuple[ClockView, ...]
    """The result of `why`."""
    why: str | None
    """The hold-up that the state shows, as a line for people; None if there is none."""


class HostHoldups:
    """What keeps hosts from being asked: the one list that `why`, refusals, the states of hosts,
    the pages and the metrics are made from."""

    def __init__(
        self, memory: ScopeMemory, engine: Engine, files: Callable[[str], Sequence[HostHoldup]]
    ) -> None:
        """`files`: see `Scheduler`."""
        self._audit = memory.audit
        self._memory = memory
        self._engine = engine
        self._clock = engine.clock
        self._remote = engine.remote
        self._files = files

    def of(self, host: str, scope: Scope | None, now: float) -> list[HostHoldup]:
        """Return everything that keeps the host from being asked at the monotonic time `now`.
        `scope` is that of the host, or None if there is none."""
        found = [*self._files(host)]
        if (unkept := self.unkept(host)) is not None:
            found.append(HostHoldup("storage", host, INF, unkept))
        if self._remote is not None:
            interval = 0.0 if scope is None else scope.interval
            why, seconds, _ = self._remote.withheld(self._memory.names(host, scope), interval)
            if why:
                found.append(HostHoldup("fleet", host, now + seconds, why))
        return found if scope is None else found + clock_holdups(scope, now)

    def state(self, scope: Scope, now: float) -> HostState:
        """Return the state of the host with that scope."""
        return state_by(self.of(scope.name, scope, now))

    def due(self, scope: Scope, now: float) -> float:
        """Return when the host with that scope may be asked, as far as is known before its open
        leases end: `now`, or later; inf if an event ends one of its hold-ups."""
        return _due(self.of(scope.name, scope, now), now)

    def why(self, host: str, *, urls: bool = True) -> tuple[ClockView, ...]:
        """Return every hold-up and clock of the host with its source; empty if nothing is known.

        `urls`: name the URL of the oldest open lease, unless there are too many to look for it.
        """
        return self.status(host, urls=urls).clocks

    def status(
        self, host: str, *, urls: bool = False, fleet: Iterable[ScopeView] = ()
    ) -> HostStatus:
        """Return state and clocks of the host. `urls` is that of `why`, `fleet` the answer of the
        fleet's ledger about the host."""
        clock, engine = self._clock, self._engine
        scope, now, wall = self._memory.find(host), clock.monotonic(), clock.wall()
        mine = self.of(host, scope, now)
        known = {(one.scope, one.kind) for one in mine}
        others = [one for one in self._of_others(fleet, now) if (one.scope, one.kind) not in known]
        found = [one for one in (*mine, *others) if not one.partly]
        last = max((one for one in found if one.kind in _OF_GATE), key=_end, default=None)
        views = [
            replace(_view(one, now, wall), decides=one is last)
            for one in (*mine, *others)
            if one.kind in _OF_GATE or one in others
        ]
        views.extend(self._rule_views(host))
        leases = engine.leases if urls and len(engine.leases) <= _MAX_SEARCHED else ()
        for each in () if scope is None else (scope, *scope.shared):
            held = {one.kind: one for one in mine if one.scope == each.name}
            views.extend(_clock_views(each, held, clock, engine.pacing, leases))
        shown, due = max(found, key=_rank, default=None), _due(found, now)
        why = [str(v) for v in views if shown and (v.scope, v.kind) == (shown.scope, shown.kind)]
        in_time = due if now < due < INF else None
        return HostStatus(state_by(found), in_time, tuple(views), why[0] if why else None)

    def _rule_views(self, host: str) -> Iterator[ClockView]:
        """Yield the operator's rule for the host, if it decides, or says by whom or until when."""
        rule = self._memory.rules.find(host)
        if rule is None or not (rule.robots != "obey" or rule.by or rule.until):
            return
        left = None if rule.until is None else end_of(rule) - self._clock.wall()
        text = described(rule, end=False)
        yield ClockView(rule.match, "override", text, left, rule.until)

    def held(self, host: str) -> tuple[float, str] | None:
        """Return for how many seconds a block of the host, or of a scope that it shares, allows
        no lease, and why; None if nothing does. (inf, "paused"): until the operator resumes it.
        """
        if (scope := self._memory.find(host)) is None:
            return None
        found = clock_holdups(scope, now := self._clock.monotonic())
        if any(one.kind == "pause" for one in found):
            return INF, "paused"
        blocks = [(one.until - now, one.source) for one in found if one.kind == "block"]
        return max(blocks, key=itemgetter(0), default=None)

    def late(self, host: str) -> tuple[float, str]:
        """Return the least time in seconds until the host is due, not above 0 if it may be
        now, and the end of an error message about that."""
        scope, now = self._memory.find(host), self._clock.monotonic()
        found = [one for one in self.of(host, scope, now) if not one.partly]
        last = max((one for one in found if one.until < INF), key=_end, default=None)
        left = 0.0 if last is None else last.until - now
        if any(one.kind == "pause" for one in found):
            return left, "; the operator paused it"
        endless = [one.source for one in found if one.until == INF and one.kind in _OF_GATE]
        if last is not None and not endless:
            why = f" ({last.source})" if last.source else ""
            return left, f"; the host is due in {number(left)} s{why}"
        why = endless[0] if endless else found[0].source if found else ""
        return left, f"; {why}" if why else ""

    def served_elsewhere(self, host: str) -> LedgerLost | None:
        """Return the error for a lease of a host that another member of the fleet serves while the
        store is lost. None if this one does."""
        if self._remote is None:
            return None
        scope = self._memory.scopes.get(host)
        if scope is None and self._memory.rules.pacing.address_interval is not None:
            return None  # the address decides, which is looked up later
        why, _, elsewhere = self._remote.withheld(self._memory.names(host, scope))
        return LedgerLost(why) if elsewhere else None

    def budget_spent(self, host: str) -> BudgetSpent | None:
        """Return why the host gets no lease for a page today, as far as this process knows."""
        scope = self._memory.find(host) if self._engine.budgeted else None
        return None if scope is None else scope.budget_spent(self._clock.monotonic())

    @property
    def unavailable(self) -> str:
        """Why the fleet's ledger grants nothing at the moment; empty if it does, or without one."""
        return "" if self._remote is None else self._remote.unavailable

    def refuse_lost(self, host: str) -> None:
        """Raise LedgerLost while the fleet's store is lost, unless this member serves the host."""
        if self._remote is not None and self._remote.away:
            raise LedgerLost(self.unavailable)
        if (elsewhere := self.served_elsewhere(host)) is not None:
            raise elsewhere

    def refuse_unknown(self, host: str) -> None:
        """Raise LedgerLost while the fleet's store is lost, unless this member serves the host, and
        StorageError while no clock can be stored: a host with an unknown interval must not be asked
        for its robots.txt then, since the response would start a clock.
        """
        self.refuse_lost(host)
        if self._audit is not None and (why := self._audit.failing) is not None:
            raise StorageError(f"{host} can't be asked: {why}")
        promises = self._memory.promises
        if promises is not None and promises.storage.exhausted:
            raise StorageError(f"the clock of {host} could not be kept: {promises.storage.failing}")

    def unkept(self, host: str) -> str | None:
        """Return why no lease of the host can be granted because its clock could not be stored;
        None if it could, as far as is known before the grant itself. The line of the grant in the
        audit record counts as well.
        """
        if self._audit is not None and (why := self._audit.failing) is not None:
            return why
        promises = self._memory.promises
        if promises is None or (why := promises.storage.failing) is None:
            return None
        if not promises.marked:
            return why
        scope = self._memory.scopes.get(host)
        known = () if scope is None else (scope, *scope.shared)
        return why if any(map(self._memory.must_keep, known)) else None

    def source(self, host: str, kind: str) -> str | None:
        """Return the source of the host's hold-up of that kind; None if there is none."""
        found = self.of(host, self._memory.scopes.get(host), self._clock.monotonic())
        return next((one.source for one in found if one.kind == kind), None)

    def _of_others(self, fleet: Iterable[ScopeView], now: float) -> Iterator[HostHoldup]:
        """Yield the hold-ups that the fleet's ledger knows of."""
        for clock, holds, _ in fleet:
            name = clock.scope
            if holds:
                yield HostHoldup("in_flight", name, INF, f"{len(holds)} of the fleet's members")
            if clock.blocked:
                yield HostHoldup("block", name, now + clock.blocked, clock.reason)
            if clock.paused:
                yield HostHoldup("pause", name, INF, "operator")
            if clock.day is not None:
                used = Usage(now - clock.day, clock.pages, clock.bytes)
                yield from _spent_budget(name, self._memory.rules.for_host(name).budget, used, now)

    def needs(self, host: str, near: Iterable[str] = ()) -> list[Need]:
        """Return the scopes of which a lease of the host takes a slot.

        `near` names further scopes that the host shares: its addresses, before its first lease.
        The list is empty in a dry run, in which nothing waits.
        """
        memory, pacing = self._memory, self._memory.rules.pacing
        if pacing.dry_run:
            return []
        scope = memory.scopes.get(host)
        known: tuple[Scope, ...]
        if scope is None:
            known, near = (), (*memory.rules.shared_names(host), *near)
        else:
            known = (scope, *scope.shared)
        names = {one.name for one in known}
        beside = (memory.scopes[n] for n in near if n in memory.scopes and n not in names)
        found = [Need(one.name, one.slots(), one.interval > 0) for one in (*known, *beside)]
        found.append(Need(EVERYTHING, pacing.max_in_flight, False))
        return found

    def count(self) -> Counter[str]:
        """Count the scopes that are paused, blocked or deferred, and of the others those that are
        "waiting" (they have waiters) or "idle". It reads every scope and changes nothing, so it may
        be called from another thread."""
        now, counts = self._clock.monotonic(), Counter[str]()
        for scope in list(self._memory.scopes.values()):
            state: str = self.state(scope, now)
            if state not in ("deferred", "blocked", "paused"):
                state = "idle" if scope.queue is None else "waiting"
            counts[state] += 1
        return counts


def _due(found: Iterable[HostHoldup], now: float) -> float:
    whole = (one for one in found if not one.partly and one.kind != "in_flight")
    return max((one.until for one in whole), default=now)


def _rank(holdup: HostHoldup) -> tuple[int, float]:
    return _RANKS.get(holdup.kind, _DEFERRED), holdup.until


def _view(
    one: HostHoldup, now: float, wall: float, source: str = "", since: UtcTime | None = None
) -> ClockView:
    """Return the view of a hold-up. `source` replaces its own."""
    left = None if one.until == INF else one.until - now
    until = None if left is None else utc(wall + left)
    return ClockView(one.scope, one.kind, source or one.source, left, until, since=since)


def _clock_views(
    scope: Scope,
    held: dict[str, HostHoldup],
    clock: Clock,
    pacing: PacingConfig,
    leases: Iterable[Grant],
) -> Iterator[ClockView]:
    """Yield the clocks of one scope. `held`: its hold-ups by kind."""
    now, wall, name, past = clock.monotonic(), clock.wall(), scope.name, scope.past
    found, why, back_off = UNDERIVED, EARLIER, past.back_off
    refused_at = None if back_off is None else utc(wall + back_off.refused_at - now)
    refused = ("" if back_off is None else back_off.describe(now, wall, pacing)) or REFUSED
    if scope.derived is not UNDERIVED:
        # The interval that was in force at the last request may have changed since.
        found = interval_for(scope.asked, scope.settings, past, pacing, now)
        why = found.source
    elif scope.settings.default_source.endswith(" interval"):
        why = f"{scope.settings.default_source} {scope.interval:g} s"
    if "next" in held:
        since = refused_at if why == REFUSED else None
        yield _view(held["next"], now, wall, refused if why == REFUSED else why, since)
    for seconds, source in found.parts:
        view = ClockView(
            name, "interval", source, seconds, decides=source == why, clamped=found.clamped
        )
        yield replace(view, source=refused, since=refused_at) if source == REFUSED else view
    if "in_flight" in held:
        waits = f", {scope.unheaded} before the head of the response" if scope.unheaded else ""
        its = [one for one in leases if one.scope is scope or scope in one.others]
        for grant in sorted(its, key=lambda one: one.start_at)[:1]:
            began = utc(wall + grant.start_at - now)
            waits += f"; by {mask(grant.url)} since {began:%H:%M:%S}"
        yield _view(held["in_flight"], now, wall, f"busy x{scope.in_flight}{waits}")
    budget, used = scope.settings.budget, past.usage
    if "budget" in held:
        yield _view(held["budget"], now, wall)
    elif budget is not None and used is not None and (left := used.began + DAY - now) > 0:
        yield ClockView(name, "budget", budget.sentence(used), left)  # No lease waits for its end.
    failed_at = utc(wall + past.failed_at - now) if past.failures else None
    if (block := held.get("block")) is not None:
        since = failed_at if _ANSWER.match(block.source) else None
        yield _view(block, now, wall, since=since)
    if "pause" in held:
        yield _view(held["pause"], now, wall)
    if failed_at is not None:
        one = past.failures == 1
        often = "blocked" if one else f"{past.failures} blocks in a row, the last"
        yield ClockView(name, "back-off", f"{often} at {failed_at:%H:%M:%S}")
    if past.probing:
        yield ClockView(name, "probe", "one request at a time after a block, until one succeeds")
