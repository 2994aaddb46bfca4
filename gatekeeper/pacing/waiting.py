"""Who waits, and why: the tasks in `Scheduler.acquire`, and what keeps a host from being asked.

A hundred thousand tasks that begin, or are cancelled, in one iteration of the loop would hold
up everybody else for as long as it takes to look at each of them: `Entrance` and `Departures`
let a bounded number through, and the loop goes round in between. `ClockView` is what `why()` shows
of a host's clocks, `Need` what the deadlock check asks of the slots of a lease.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import re
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from datetime import datetime
from typing import Any, NamedTuple, Protocol

import msgspec
from msgspec.structs import replace

from gatekeeper.clock import Clock, number, utc
from gatekeeper.config import PacingConfig
from gatekeeper.errors import GateClosed
from gatekeeper.pacing.engine import Engine
from gatekeeper.pacing.grants import Grant
from gatekeeper.pacing.persistence import ScopeMemory
from gatekeeper.pacing.queues import PASSED, Counters, Offer, Waiter
from gatekeeper.pacing.rules import DAY
from gatekeeper.pacing.scopes import (
    DURABLE,
    INF,
    LONGEST,
    NO_RATE,
    REFUSED,
    UNDERIVED,
    UNKNOWN,
    Interval,
    Scope,
    ScopeHistory,
    interval_for,
)
from gatekeeper.robots.timing import RobotsInterval

_EARLIER = "the clock of an earlier run"

_LET_IN = 50
"""Tasks let in during one iteration of the loop."""
AT_ONCE = 1000
"""Waiters told in one iteration of the loop that their time is over, or of their cancellation."""

_log = logging.getLogger(__name__)

Admit = Callable[[], Offer]
"""Asked at the moment of the grant: the interval that the text asks for, to go ahead; or REFETCH;
or it raises."""
Refetch = Callable[[], Awaitable[object]]


class TaskWaiter(Waiter):
    """A task in `Scheduler.acquire`. What it learns is kept until the task runs again."""

    __slots__ = ("at_once", "end", "error", "future", "grant", "leaving", "offer", "scope")

    def __init__(
        self, scope: Scope, url: str, priority: float, ttl: float | None, admit: Admit
    ) -> None:
        # `Waiter.__init__`, without a call: there may be many.
        self.url = url
        self.priority = priority
        self.ttl = ttl
        self.gone = self.away = self.stays = False
        self.at_once: bool = False
        self.leaving: bool = False
        """Its task was cancelled, and learns of that in a later iteration of the loop."""
        self.end: float = INF
        """The moment at which it gives up."""
        self.scope: Scope = scope
        self.offer: Admit = admit
        self.grant: Grant | None = None
        self.error: Exception | None = None
        self.future: asyncio.Future[None] | None = None
        """What the task waits for."""

    def left(self, _future: CrowdFuture) -> None:
        """Its task was cancelled, and learns of it later: no lease is offered to it."""
        self.leaving = True
        self.future = None
        self.offer = _leaves

    def deliver(self, grant: Grant) -> None:
        """Keep it; should the task be cancelled already, it passes it on."""
        self.grant = grant
        if (future := self.future) is not None and not future.done():
            future.set_result(None)

    def refuse(self, error: Exception) -> None:
        """Keep the error for the task."""
        self.error = error
        self._wake()

    def outlasted(self, until: float, now: float) -> bool:
        """Does it give up before then?"""
        return self.end < until

    def send_away(self) -> None:
        """Wake the task; it fetches and comes back."""
        self._wake()

    def _wake(self) -> None:
        if self.future is not None and not self.future.done():
            self.future.set_result(None)


class DueWatch(Waiter):
    """Somebody who wants to know when a host is due. It takes no lease and asks for no file, so
    that nothing is delivered to it, nor is it sent away."""

    __slots__ = ("callback", "longest", "scope", "told")

    def __init__(
        self, scope: Scope, callback: Callable[[], object], priority: float, longest: float
    ) -> None:
        super().__init__("", priority)
        self.scope: Scope = scope
        self.callback: Callable[[], object] = callback
        self.longest: float = longest
        """Seconds: a block that lasts longer is told as well."""
        self.told: bool = False

    def offer(self) -> Offer:
        """Tell, and let the next waiter have the lease."""
        self.told = True
        self.callback()
        return PASSED

    def outlasted(self, until: float, now: float) -> bool:
        """Is that further off than it cares to wait?"""
        return until - now > self.longest

    def refuse(self, error: Exception) -> None:
        """The scheduler closes, or the callback failed although it has no right to."""
        if not isinstance(error, GateClosed):
            _log.error("a callback of when_due failed", exc_info=error)


class Deadlines:
    """Moments at which waiters give up: one heap, swept of those who left."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, TaskWaiter]] = []
        self._order = itertools.count()

    def add(self, when: float, waiter: TaskWaiter, alive: int) -> None:
        """Remember; `alive` is how many wait at all, against which the heap is bounded."""
        heapq.heappush(self._heap, (when, next(self._order), waiter))
        if len(self._heap) > 2 * alive + 256:
            self._heap = [entry for entry in self._heap if not entry[2].gone]
            heapq.heapify(self._heap)

    def over(self, now: float, most: int) -> list[TaskWaiter]:
        """Those whose time is over, earliest first; the rest of too many at the next look."""
        found: list[TaskWaiter] = []
        while self._heap and self._heap[0][0] <= now and len(found) < most:
            waiter = heapq.heappop(self._heap)[2]
            if not waiter.gone:
                found.append(waiter)
        return found

    def next(self) -> float:
        """The moment of the next, inf if there is none."""
        return self._heap[0][0] if self._heap else INF


class Entrance:
    """Lets tasks in, first come first served, a bounded number in each iteration of the loop."""

    def __init__(self, most: int = _LET_IN) -> None:
        """`most` are let in during one iteration."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._most = most
        self._let_in = 0
        """In this iteration."""
        self._outside: deque[asyncio.Future[None]] = deque()
        self._called = 0
        """Who was let in by the last iteration, and did not come in yet."""
        self.crowded: bool = False
        """Somebody waits outside, or was let in and has not come in: nobody may go before them."""
        self._armed = False

    def enter(self) -> asyncio.Future[None] | None:
        """What to await before coming in, by `come_in`; None, mostly: be in.

        Not a coroutine: each costs memory, and there may be many.
        """
        if not self._armed:
            self._armed = True
            if self._loop is None:  # to ask for it is a system call before 3.12
                self._loop = asyncio.get_running_loop()
            self._loop.call_soon(self._next_iteration)
        if not self.crowded and self._let_in < self._most:
            self._let_in += 1
            return None
        return self.line_up()

    def line_up(self) -> asyncio.Future[None]:
        """What to await before coming in, where it is `crowded` already."""
        self.crowded = True
        future: asyncio.Future[None] = asyncio.Future(loop=self._loop)
        self._outside.append(future)
        return future  # one that is cancelled stays in the line, done, and is passed over

    def come_in(self, late: bool = True) -> None:
        """Whoever awaited that is in; `late` False: had no need to. One who was let in and is
        cancelled never comes."""
        self._called -= late
        self.crowded = self._called > 0 or bool(self._outside)

    def _next_iteration(self) -> None:
        # Those whom the last iteration let in have run by now.
        self._let_in = 0
        outside = self._outside
        while outside and self._let_in < self._most:
            future = outside.popleft()
            if not future.done():
                future.set_result(None)
                self._let_in += 1
        self._called = self._let_in
        self.crowded = self._armed = self._let_in > 0
        if self._armed and self._loop is not None:
            self._loop.call_soon(self._next_iteration)


class Departures:
    """Waiters whose tasks were cancelled and end in later iterations of the loop.

    A hundred thousand tasks that are cancelled in one iteration would hold up everybody else in
    the next one. So the cancellation of a `CrowdFuture` waits here, and a bounded number of them
    takes effect in each iteration. Who is here counts as gone, and is offered no lease.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._later: deque[tuple[CrowdFuture, Any]] = deque()
        self.count: int = 0
        """Waiters who are here, or were and have not left their queue yet."""

    def postpone(self, future: CrowdFuture, message: Any) -> None:
        """Cancel the future in a later iteration of the loop."""
        if not self._later:
            future.get_loop().call_soon(self._next_iteration)
        self._later.append((future, message))
        self.count += 1
        self._counters.cancelled += 1

    def _next_iteration(self) -> None:
        self.cancel(AT_ONCE)
        if self._later:
            self._later[0][0].get_loop().call_soon(self._next_iteration)

    def cancel(self, most: int) -> None:
        """Cancel so many of them now, first come first served."""
        for _ in range(min(most, len(self._later))):
            future, message = self._later.popleft()
            future.cancel_now(message)


class CrowdPlace(Protocol):
    """Where a `CrowdFuture` is waited for."""

    def left(self, future: CrowdFuture) -> None:
        """It is cancelled in a later iteration of the loop: pass it over from now on."""


class CrowdFuture(asyncio.Future[None]):
    """What a task waits for where very many do: cancelled, it ends when `Departures` lets it."""

    __slots__ = ("_departures", "_leaving", "_place")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, place: CrowdPlace, departures: Departures
    ) -> None:
        super().__init__(loop=loop)
        self._place = place
        self._departures = departures
        self._leaving = False

    def cancel(self, msg: Any = None) -> bool:
        """Cancel it in a later iteration of the loop; nothing else ends it from now on."""
        if self.done() or self._leaving:
            return not self.done()
        self._leaving = True
        self._place.left(self)
        self._departures.postpone(self, msg)
        return True

    def cancel_now(self, message: Any) -> None:
        """Cancel it."""
        super().cancel(message)


def _leaves() -> Offer:
    return PASSED


def hold_again(engine: Engine, scope: Scope, url: str, now: float, seconds: float) -> Grant:
    """A lease that an earlier process granted, open again: the clocks stay as they are."""
    if seconds <= 0:
        return Grant(engine, scope, url, now, now, scope.basis, (), told=True, open=False)
    clocks = [(one, one.basis, one.interval) for one in (scope, *scope.shared)]
    grant = engine.grant_at_any_time(scope, now, url, seconds)
    for one, basis, interval in clocks:
        one.basis, one.interval = basis, interval
    if engine.remote is not None:
        grant.book(engine.remote.adopt(tuple(one.name for one, _, _ in clocks)))
    return grant


def received(grant: Grant, size: int) -> None:
    """So many bytes came in answer to it: they count for the day of a host that has a budget."""
    scope, engine = grant.scope, grant.engine
    if scope.settings.budget is None:
        return
    scope.count(grant.start_at, size=size)
    if grant.hold is not None:
        grant.hold.size += size
    if engine.keeper is not None:
        engine.keeper.remember(scope, engine.now())


_ANSWER = re.compile(r"\A(?:[0-9]{3}|no status)\b")
"""How the reason of a block begins that an answer of the host drew."""


class ClockView(msgspec.Struct, frozen=True):
    """One reason why a scope has to wait, or would.

    `kind`: interval, next, block, pause, budget, probe, back-off or in_flight. `str(view)` is
    a line for people.
    """

    scope: str
    kind: str
    source: str
    """Where it comes from, such as "crawl-delay 10 s from robots.txt line 7"."""
    seconds: float | None = None
    """Of an interval: its length. Of a clock that runs: what is left of it."""
    until: datetime | None = None
    """When it ends (aware, UTC); None where an event ends it, and of a budget that is not spent."""
    decides: bool = False
    """Among the intervals: the one in force."""
    clamped: bool = False
    """The operator's cap made it shorter than the site asks."""
    since: datetime | None = None
    """Of a block, or an interval, that an answer drew: when that came (aware, UTC)."""

    def __str__(self) -> str:
        source = self.source
        if self.since is not None and self.kind == "block":  # "429 at 12:03, Retry-After 120"
            source = _ANSWER.sub(rf"\g<0> at {self.since:%H:%M}", source)
        text = f"{self.scope}: {self.kind}: {source}"
        if self.until is not None:
            text += f" (until {self.until:%Y-%m-%dT%H:%M:%SZ})"
        return text


def explain(scope: Scope, clock: Clock, pacing: PacingConfig) -> tuple[ClockView, ...]:
    """What holds a host's scope and those it shares, and what would."""
    views: list[ClockView] = []
    for one in (scope, *scope.shared):
        views.extend(_clocks(one, clock, pacing))
    return tuple(views)


def _clocks(scope: Scope, clock: Clock, pacing: PacingConfig) -> list[ClockView]:
    now, wall = clock.monotonic(), clock.wall()
    views: list[ClockView] = []
    found, history = None if scope.derived is UNDERIVED else scope.derived, scope.history
    if found is not None and history is not None:
        # What was in force at the last request need not be any more.
        found = interval_for(scope.asked, scope.settings, history, pacing, now)
    refused = (history.slowed(now, wall, pacing) if history is not None else "") or REFUSED

    due = scope.clock_at()
    if now < due < INF:
        why = found.source if found is not None else "clock of an earlier run"
        why = refused if why == REFUSED else why
        if found is None and scope.settings.default_source.endswith(" interval"):
            why = f"{scope.settings.default_source} {scope.interval:g} s"
        views.append(ClockView(scope.name, "next", why, due - now, utc(wall + due - now)))
    if found is not None:
        views.extend(_intervals(scope, found, refused))
        if history is not None and history.back_off is not None:
            drawn = utc(wall + history.back_off.when - now)
            views = [replace(v, since=drawn) if v.source == refused else v for v in views]
    if scope.in_flight:
        waits = f", {scope.unheaded} before the head of the response" if scope.unheaded else ""
        views.append(ClockView(scope.name, "in_flight", f"busy x{scope.in_flight}{waits}"))
    if history is not None:
        budget, used = scope.settings.budget, history.usage
        if budget is not None and used is not None and (left := used.began + DAY - now) > 0:
            spent = budget.spent(used.pages, used.bytes)
            text = f"{budget.sentence(used)}{'; no more until then' if spent else ''}"
            until = utc(wall + left) if spent else None  # before that nothing waits for it
            views.append(ClockView(scope.name, "budget", text, left, until))
        views.extend(_held_against(scope.name, history, now, wall))
    return views


def _held_against(name: str, history: ScopeHistory, now: float, wall: float) -> Iterator[ClockView]:
    failed_at = utc(wall + history.failed_at - now) if history.failures else None
    if (left := history.blocked_until - now) > 0:
        drawn = failed_at if _ANSWER.match(history.reason) else None
        yield ClockView(name, "block", history.reason, left, utc(wall + left), since=drawn)
    if history.paused:
        yield ClockView(name, "pause", "operator")
    if failed_at is not None:
        one = history.failures == 1
        often = "blocked" if one else f"{history.failures} blocks in a row, the last"
        yield ClockView(name, "back-off", f"{often} at {failed_at:%H:%M:%S}")
    if history.probing:
        yield ClockView(name, "probe", "after a block: one request at a time until one succeeds")


def _intervals(scope: Scope, found: Interval, refused: str) -> list[ClockView]:
    """One for each part; `refused` is the whole sentence for `REFUSED`."""
    return [
        ClockView(
            scope.name,
            "interval",
            refused if source == REFUSED else source,
            seconds,
            decides=source == found.source,
            clamped=found.clamped,
        )
        for seconds, source in found.parts
    ]


EVERYTHING = ""
"""The name under which all leases count together (pacing.max_in_flight)."""


class Need(NamedTuple):
    """A slot that a lease takes."""

    scope: str
    slots: int
    """How many there are."""
    paced: bool
    """An interval is in force: a lease whose head is awaited keeps everybody else out."""


def needs(memory: ScopeMemory, host: str, near: Iterable[str] = ()) -> list[Need]:
    """Of which scopes a lease of the host takes a slot.

    `near` names scopes that the host shares beside those that are known: its addresses,
    before its first lease. None in a dry run, in which nobody waits.
    """
    pacing = memory.rules.pacing
    if pacing.dry_run:
        return []
    scope = memory.scopes.get(host)
    known: tuple[Scope, ...]
    if scope is None:
        known, near = (), (*memory.rules.shared_names(host), *near)
    else:
        known = (scope, *scope.shared)
    names = {one.name for one in known}
    beside = (memory.scopes[name] for name in near if name in memory.scopes and name not in names)
    found = [Need(one.name, one.slots(), one.interval > 0) for one in (*known, *beside)]
    found.append(Need(EVERYTHING, pacing.max_in_flight, False))
    return found


def asked_for_robots(scope: Scope, asked: RobotsInterval | None) -> RobotsInterval:
    """The interval of a robots.txt. Where nothing is known of the text, that of an earlier run's
    clock: its text was read, and not on disk yet when the run was killed."""
    if asked is None or asked is NO_RATE or asked is UNKNOWN:
        if scope.asked.source == _EARLIER:
            return scope.asked
        if scope.derived is UNDERIVED and DURABLE < scope.interval < LONGEST:
            return RobotsInterval(scope.interval, _EARLIER)
    return scope.asked if asked is None else asked


def take_robots(
    engine: Engine, memory: ScopeMemory, url: str, host: str, asked: RobotsInterval
) -> Grant | None:
    """A lease for robots.txt that can be had at once and for which nothing has to be read; else
    None. Raises LeaseTimeout where there is no room for the host."""
    scope = memory.scopes.get(host)
    if scope is None:
        if memory.may_know:
            return None
        memory.admit(host)
        scope = memory.new_host(host)
    grant = engine.take(url, host, asked_for_robots(scope, asked), scope=scope)
    if grant is not None:
        engine.counters.robots += 1
        engine.count_out(grant, grant.start_at)
    return grant


def state_of(scope: Scope, now: float) -> str:
    """In one word: "paused", "blocked", "waiting" (somebody waits for it) or "idle"."""
    history = scope.history
    if history is not None and history.paused:
        return "paused"
    if history is not None and history.blocked_until > now:
        return "blocked"
    return "idle" if scope.queue is None else "waiting"


def late(scope: Scope, now: float, recovers: bool) -> tuple[float, str]:
    """For how long at least the scope gets no turn, and how an error about that ends. `recovers`:
    the ledger of a fleet has forgotten, and nobody gets one before its members told it."""
    scopes = (scope, *scope.shared)
    latest = max(scopes, key=Scope.promised_at)
    due, history = latest.promised_at(), latest.history
    if any(one.history is not None and one.history.paused for one in scopes):
        return due - now, "; the operator paused it"
    if due > now:
        blocked = history is not None and history.blocked_until == due
        why = f" ({history.reason})" if history is not None and blocked and history.reason else ""
        return due - now, f"; the next turn is due in {number(due - now)} s{why}"
    why = "; the fleet's store has just come back, and its members tell it what they know"
    return due - now, why if recovers else ""
