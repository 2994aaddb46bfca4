"""Calls of the scheduler to a ledger outside this process, sent in batches.

The engine decides first, then the ledger is asked, then the engine checks again and grants, with
the ledger's hold. All calls of one iteration of the loop are one batch, called a flight. While
flights are under way the next one leaves `SPACING` after them. A distant ledger therefore has
several flights under way, none of which waits for the answer to another, and a near and busy ledger
gets dozens of requests per flight.

Nothing is in flight twice: a question, a head or an end is sent once, and again only after its
flight has failed; each scope has at most one report and one pause in flight. A ledger may raise any
error: notifications are then repeated, a question is asked again with the same token, and nothing
is granted without an answer.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import secrets
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec

from gatekeeper.clock import Clock, SingleTimer
from gatekeeper.errors import LedgerLost
from gatekeeper.pacing.ledger import (
    HOLD,
    End,
    Granted,
    Ledger,
    NotBefore,
    Outcome,
    Report,
    ScopeClock,
    ScopeRequest,
    ScopeView,
    TakeRequest,
    Withheld,
)
from gatekeeper.pacing.queues import ScopeQueue
from gatekeeper.pacing.rules import DailyBudget

MAX_BATCH = 256
"""Maximum number of questions in one flight; a ledger may split them further. More of them would
keep the ledger busy for so long that it does not count as near, see `SPACING`."""
MAX_FLIGHTS = 8
"""Maximum number of flights under way at the same time."""
SPACING = 0.005
"""Minimum number of seconds between two departures while a flight is under way. If a round trip is
long, they are spaced evenly: by the round trip divided by `MAX_FLIGHTS`. If it is short, a second
flight leaves immediately, so that the ledger executes it while this process handles the answers to
the first."""
MIN_SPLIT = 16
"""Minimum number of questions in the first of two such flights; it has half of them if there are
more."""
RETRY_INITIAL = 0.1
"""Seconds until the first retry after a flight has failed; the delay doubles with each failure."""
RETRY_MAX = 5.0
"""Maximum number of seconds until a retry."""

_LOST = "the fleet's store can't be reached"

_schedulers = itertools.count(1)

_log = logging.getLogger(__name__)


_Call = tuple[Coroutine[Any, Any, Any], Callable[[bool, Any], None]]
"""A call of the ledger, and its callback, which gets whether the call succeeded and its result."""


class Hold(msgspec.Struct, eq=False, gc=False):
    """The ledger's grant for one request."""

    token: str
    scopes: tuple[ScopeRequest, ...]
    seconds: float
    """The time to live."""
    expires_at: float
    """When the hold may expire (monotonic), counted from when it was requested."""
    renew_at: float
    """When to renew the hold (monotonic)."""
    headed: bool = False
    """Whether the head of the response has arrived, or the request has failed."""
    revoked: bool = False
    """Whether a scope was blocked or paused since: a request must not be sent any more."""
    size: int = 0
    """Bytes of the response, if they are counted."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the scopes."""
        return tuple([one.scope for one in self.scopes])

    def covers(self, scopes: tuple[ScopeRequest, ...]) -> bool:
        """Return True if the hold is for the same scopes and budgets, and for intervals that are
        not shorter."""
        return len(scopes) == len(self.scopes) and all(
            mine.scope == other.scope
            and mine.interval >= other.interval
            and mine.budget == other.budget
            for mine, other in zip(self.scopes, scopes, strict=True)
        )

    def stale(self, now: float) -> bool:
        """Return True if a request that has not been sent must not be sent any more."""
        return not self.headed and (self.revoked or now >= self.expires_at)


class LedgerCallbacks(NamedTuple):
    """The scheduler's callbacks for answers and events of the ledger. None of them may raise."""

    deliver: Callable[[ScopeQueue, Hold | None, float], None]
    """A queue got its hold, or None and the time at which to ask again."""
    run: Callable[[], None]
    """Several queues have changed: grant those that are due."""
    told: Callable[[str, float], None]
    """The ledger has received a head: its clock of that scope counts from the given time or later.
    """
    heard: Callable[[ScopeClock], None]
    """The ledger returned the state of a scope."""
    reported: Callable[[Report], None]
    """See `LedgerListener.blocked`."""
    paused: Callable[[str, bool], None]
    """See `LedgerListener.paused`."""
    clocks: Callable[[], list[ScopeClock]]
    """See `LedgerListener.clocks`."""
    lost: Callable[[bool], None]
    """See `LedgerListener.lost`."""


class LedgerCalls:
    """The engine's `Remote` for a ledger outside this process. It stays correct if calls fail."""

    def __init__(self, ledger: Ledger, clock: Clock, callbacks: LedgerCallbacks) -> None:
        self._ledger = ledger
        self._clock = clock
        self._callbacks = callbacks
        name = getattr(ledger, "member", None)
        self.owner: str = f"{name}.{next(_schedulers)}" if name else secrets.token_hex(4)
        """The prefix of this scheduler's tokens."""
        self._numbers = itertools.count()
        self._waiting_queues: dict[str, ScopeQueue] = {}
        """Queues that wait for an answer or a notification of the ledger, by their token."""
        self._ask_again_at: dict[str, float] = {}
        """By token, when a request should ask again that was notified while an answer was due."""
        self._takes: dict[str, TakeRequest] = {}
        """Questions to be sent, by token."""
        self._heads: dict[str, tuple[str, ...]] = {}
        """Heads to be sent: the names of the scopes, by token."""
        self._ends: dict[str, End] = {}
        """Ends to be sent, by token."""
        self._reports: dict[str, Report] = {}
        """Reports that the ledger has not confirmed, by scope."""
        self._pauses: dict[str, bool] = {}
        """Pauses (True) and resumes that the ledger has not confirmed, by scope."""
        self._holds: dict[str, Hold] = {}
        """Holds of open leases, by token."""
        self._renewal_timer = SingleTimer(clock, self._renew_due)
        self._to_renew: dict[str, None] = {}
        """Tokens of holds to be renewed (a dictionary as ordered set)."""
        self._sent_reports: set[str] = set()
        """Scopes with a report in flight."""
        self._sent_pauses: set[str] = set()
        """Scopes with a pause or resume in flight."""
        self._flights: set[asyncio.Task[None]] = set()
        self._departure_timer = SingleTimer(clock, self._schedule)
        self._departing = False
        """Whether `_depart` is scheduled for the next iteration of the loop."""
        self._departed_at = -math.inf
        """When the latest flight left (monotonic)."""
        self._spacing = SPACING
        self._near = False
        """Whether the latest round trip was short, see `SPACING`."""
        self._back_off_until = -math.inf
        """No flight leaves before this time (monotonic), since one has failed."""
        self._retry_delay = RETRY_INITIAL
        self._closed = False
        self.away: bool = False
        """Whether the ledger reported that it can't be reached: nothing is granted."""
        self._delivered: list[tuple[ScopeQueue, Hold]] = []
        """Holds that the flight delivered and that may not have been used."""
        self.failures: int = 0
        """Number of calls that failed."""
        ledger.listen(self.owner, self)

    async def open(self) -> None:
        """Open the ledger, if it has a method `open`. Raises ConfigError."""
        if (opens := getattr(self._ledger, "open", None)) is not None:
            await opens()

    # --- called by the engine ---------------------------------------------------------------

    def holds(
        self,
        queue: ScopeQueue,
        interval: float,
        guess: bool,
        now: float,
        budget: DailyBudget | None = None,
    ) -> bool:
        """Return True if the ledger has granted this start. Otherwise ask with the next flight."""
        scope, hold = queue.scope, queue.hold
        scopes = (
            ScopeRequest(scope.name, interval, scope.slots(), guess, budget),
            *(ScopeRequest(one.name, one.settings.default, one.slots()) for one in scope.shared),
        )
        if hold is not None:
            if hold.covers(scopes) and not hold.stale(now):
                return True
            queue.hold = None
            self.end(hold, "undone")
        token = queue.token
        if not token:
            token = queue.token = f"{self.owner}:{next(self._numbers):x}"
        self._waiting_queues[token] = queue
        queue.asking = queue.has_conditions = True
        self._takes[token] = TakeRequest(token, scopes)
        self._schedule()
        return False

    def granted(self, queue: ScopeQueue) -> Hold:
        """Return the queue's hold, which belongs to a lease from now on and is renewed until the
        lease ends."""
        hold: Hold = queue.hold
        queue.hold = None
        self._keep(hold)
        return hold

    def _keep(self, hold: Hold) -> None:
        self._holds[hold.token] = hold
        self._renewal_timer.set_no_later(hold.renew_at)

    def adopt(self, scopes: tuple[str, ...]) -> Hold:
        """Hold the scopes of a request that an earlier process left in flight."""
        now = self._clock.monotonic()
        asked = tuple(map(ScopeRequest, scopes))
        token = f"{self.owner}:{next(self._numbers):x}"
        hold = Hold(token, asked, HOLD, now + HOLD, now + HOLD / 4)
        hold.headed = True  # the request was sent long ago
        self._takes[hold.token] = TakeRequest(hold.token, asked)
        self._keep(hold)
        self._schedule()
        return hold

    def head(self, hold: Hold) -> None:
        """Note that the head of the response has arrived, or that the request has failed."""
        hold.headed = True
        self._heads[hold.token] = hold.names
        self._schedule()

    def end(self, hold: Hold, outcome: Outcome) -> None:
        """End a hold. Reports that the ledger has not confirmed are sent with the end."""
        self._holds.pop(hold.token, None)
        reports = tuple(self._reports[name] for name in hold.names if name in self._reports)
        self._ends[hold.token] = End(hold.token, outcome, reports, hold.size)
        self._schedule()

    def report(self, report: Report) -> None:
        """Send a report to every process, merged with an unconfirmed one of the same scope: the
        longer block and the longer interval apply."""
        if report.seconds > 0:
            self._revoke(report.scope)
        known = self._reports.get(report.scope)
        if known is None or not (report.seconds or report.interval):
            self._reports[report.scope] = report
        else:
            later = report if report.seconds >= known.seconds else known
            self._reports[report.scope] = later._replace(
                interval=max(report.interval, known.interval),
                interval_for=max(report.interval_for, known.interval_for),
            )
        self._schedule()

    async def look(self, scopes: Sequence[str]) -> list[ScopeView]:
        """Return what the ledger knows of each scope, after all earlier pauses and reports of this
        process have reached it. Return an empty list if the ledger has no method `look`."""
        if (look := getattr(self._ledger, "look", None)) is None:
            return []
        await asyncio.sleep(0)  # notifications leave in this iteration of the loop
        failures = self.failures
        while self._flights and self.failures == failures and self._unconfirmed(scopes):
            await asyncio.wait(self._flights, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.sleep(0)
        return list(await look(scopes))

    def _unconfirmed(self, scopes: Sequence[str]) -> bool:
        """Return True if a pause or report of one of the scopes is still unconfirmed."""
        return any(name in self._pauses or name in self._reports for name in scopes)

    def pause(self, scope: str, paused: bool) -> None:
        """Pause or resume a scope for every process, on behalf of the operator."""
        self._pauses[scope] = paused
        self._schedule()

    def forget(self, queue: ScopeQueue) -> None:
        """Withdraw the question of a queue that has no waiters any more."""
        token, queue.token = queue.token, ""
        if self._waiting_queues.pop(token, None) is None:
            return
        self._ask_again_at.pop(token, None)
        waits = self._takes.pop(token, None) is not None
        if queue.asking and not waits:
            return  # the question is in flight: `_answered` ends the hold if it is granted
        if queue.asked:
            self._ends[token] = End(token, "undone")
            self._schedule()

    # --- the LedgerListener protocol --------------------------------------------------------

    def opened(self, token: str, seconds: float) -> None:
        """Have the queue of that token ask again after `seconds`."""
        queue = self._waiting_queues.get(token)
        if queue is None:
            return
        moment = self._clock.monotonic() + seconds
        if queue.asking:
            self._ask_again_at[token] = moment  # the answer in flight may be older than this
            return
        self._callbacks.deliver(queue, None, moment)
        self._callbacks.run()

    def blocked(self, report: Report) -> None:
        """Apply a report of any process. Holds of blocked scopes must not be used any more."""
        if report.seconds > 0:
            self._revoke(report.scope)
        self._callbacks.reported(report)

    def paused(self, scope: str, paused: bool) -> None:
        """Apply a pause or resume by an operator on any process."""
        if paused:
            self._revoke(scope)
        self._callbacks.paused(scope, paused)

    def lost(self, lost: bool) -> None:
        """Note that the ledger can't be reached any more, or can be reached again."""
        self.away = lost
        if not lost:
            self._back_off_until = -math.inf
            self._schedule()
        self._callbacks.lost(lost)

    @property
    def unavailable(self) -> str:
        """Why the ledger grants nothing to this process at the moment; empty if it does."""
        if self.away:
            return _LOST
        recovers = getattr(self._ledger, "state", None) == "recovering"
        back = "the fleet's store does not answer, or is back and its data is being restored"
        return back if recovers else ""

    def withheld(self, scopes: Sequence[str], interval: float) -> tuple[str, float]:
        """Return why the ledger grants this process no request of these scopes at the moment, and
        for how many seconds; inf: until the store is back. The reason is empty if it does."""
        ask = getattr(self._ledger, "withheld", None)
        if (why := self.unavailable) or ask is None or (found := ask(scopes, interval)) is None:
            return why, math.inf
        return f"{_LOST}, and {_served_by(found)}", found.seconds

    def served_elsewhere(self, scopes: Sequence[str]) -> LedgerLost | None:
        """Return the error for a request of scopes that another member serves while the store is
        lost. None if this one does."""
        ask = getattr(self._ledger, "withheld", None)
        found: Withheld | None = None if ask is None else ask(scopes, 0.0)
        if found is None or not found.owner:
            return None
        return LedgerLost(f"{_LOST}, and {_served_by(found)}")

    def clocks(self) -> list[ScopeClock]:
        """Return every clock and block that this process knows and that lies in the future."""
        return self._callbacks.clocks()

    def _revoke(self, scope: str) -> None:
        for hold in self._holds.values():
            if not hold.headed and scope in hold.names:
                hold.revoked = True

    # --- flights ----------------------------------------------------------------------------

    def _schedule(self) -> None:
        if not (self._departing or self._closed):
            self._departing = True
            asyncio.get_running_loop().call_soon(self._depart)

    def _depart(self) -> None:
        """Send a flight with all pending calls, unless there are none or it is too early."""
        self._departing = False
        if self._closed or len(self._flights) >= MAX_FLIGHTS or not self._anything_pending:
            return  # called again when a flight has ended
        moment, now = self._back_off_until, self._clock.monotonic()
        if len(self._flights) >= (2 if self._near else 1):
            moment = max(moment, self._departed_at + self._spacing)
        if now < moment:
            self._departure_timer.set_no_later(moment)
            return
        self._departed_at = now
        task = asyncio.get_running_loop().create_task(self._flight())
        self._flights.add(task)
        task.add_done_callback(self._arrived)

    @property
    def _anything_pending(self) -> bool:
        """Whether any call is pending that is not in flight."""
        return bool(
            self._takes
            or self._heads
            or self._ends
            or self._to_renew
            or len(self._reports) > len(self._sent_reports)
            or len(self._pauses) > len(self._sent_pauses)
        )

    def _arrived(self, task: asyncio.Task[None]) -> None:
        self._flights.discard(task)
        self._schedule()

    async def _flight(self) -> None:
        """Send all pending calls, in the order in which they have to take effect."""
        left = self._clock.monotonic()
        calls = [*self._notifications(), *self._questions()]
        results: list[Any] = [asyncio.CancelledError()] * len(calls)
        try:
            results = await asyncio.gather(*(call for call, _ in calls), return_exceptions=True)
        finally:
            failures = self.failures
            for result, (_, then) in zip(results, calls, strict=True):
                failed = isinstance(result, BaseException)
                if failed and not self._closed:
                    self._failed(result)
                then(not failed, result)
            self._note_end(left, self.failures > failures)
        self._callbacks.run()
        # Return holds that were not used immediately, so that others can use the scopes.
        delivered, self._delivered = self._delivered, []
        for queue, hold in delivered:
            if queue.hold is hold:
                queue.hold = None
                self.end(hold, "undone")

    def _note_end(self, left: float, failed: bool) -> None:
        """Back off after a flight that failed, for longer each time."""
        now = self._clock.monotonic()
        if not failed:
            self._retry_delay = RETRY_INITIAL
            self._spacing = max(SPACING, (now - left) / MAX_FLIGHTS)
            self._near = self._spacing == SPACING
        elif now >= self._back_off_until:  # count flights that fail together only once
            self._back_off_until = now + self._retry_delay
            self._retry_delay = min(2 * self._retry_delay, RETRY_MAX)

    def _notifications(self) -> list[_Call]:
        """Return the calls that must take effect before any request is granted."""
        ledger, calls = self._ledger, list[_Call]()
        changed = [name for name in self._pauses if name not in self._sent_pauses]
        self._sent_pauses.update(changed)
        for paused in (True, False):
            if names := [name for name in changed if self._pauses[name] is paused]:
                call = ledger.pause(names) if paused else ledger.resume(names)
                calls.append((call, partial(self._paused, names, paused)))
        names = [name for name in self._reports if name not in self._sent_reports]
        if reports := {name: self._reports[name] for name in names}:
            self._sent_reports.update(reports)
            calls.append((ledger.block(list(reports.values())), partial(self._reported, reports)))
        heads, self._heads = self._heads, {}
        ends, self._ends = self._ends, {}
        now = self._clock.monotonic()
        for scopes in heads.values():
            for name in scopes:
                # The ledger's clocks count from this time or later, so asking earlier is useless.
                self._callbacks.told(name, now)
        for token in ends:  # an end implies the head
            heads.pop(token, None)
        if heads:
            calls.append((ledger.head(list(heads)), partial(self._headed, heads)))
        if ends:
            calls.append((ledger.end(list(ends.values())), partial(self._ended, ends)))
        return calls

    def _questions(self) -> list[_Call]:
        sent, ledger, calls = self._clock.monotonic(), self._ledger, list[_Call]()
        renew, self._to_renew = list(self._to_renew), {}
        if renew:
            calls.append((ledger.renew(renew), partial(self._renewed, renew, sent)))
        most = MAX_BATCH
        if self._near and len(self._flights) == 1:
            most = min(most, max(MIN_SPLIT, (len(self._takes) + 1) // 2))
        if takes := list(itertools.islice(self._takes.values(), most)):
            for token, _ in takes:
                del self._takes[token]
                if token in self._waiting_queues:
                    self._waiting_queues[token].asked = True
            calls.append((ledger.take(takes), partial(self._taken, takes, sent)))
            if self._takes:
                self._schedule()
        return calls

    def _failed(self, error: object) -> None:
        self.failures += 1
        level = logging.DEBUG if isinstance(error, LedgerLost) else logging.WARNING
        _log.log(level, "the ledger failed, it is asked again: %s", error)

    def _headed(self, heads: dict[str, tuple[str, ...]], ok: bool, _: object) -> None:
        if not ok:  # an end that is in flight replaces the head
            open_or_ending = self._holds.keys() | self._ends.keys()
            waiting = {token: one for token, one in heads.items() if token in open_or_ending}
            self._heads = waiting | self._heads

    def _ended(self, ends: dict[str, End], ok: bool, _: object) -> None:
        if not ok:
            self._ends = ends | self._ends
            return
        for token in ends:  # a head after the end has no effect
            self._heads.pop(token, None)

    def _paused(self, names: list[str], paused: bool, ok: bool, _: object) -> None:
        self._sent_pauses.difference_update(names)
        for name in names:
            if ok and self._pauses.get(name) is paused:
                del self._pauses[name]

    def _reported(self, reports: dict[str, Report], ok: bool, _: object) -> None:
        self._sent_reports.difference_update(reports)
        for name, report in reports.items():
            if ok and self._reports.get(name) is report:
                del self._reports[name]

    def _renewed(self, tokens: list[str], sent: float, ok: bool, _: object) -> None:
        for token in tokens:
            hold = self._holds.get(token)
            if hold is None:
                continue
            if not ok:
                self._to_renew[token] = None
                continue
            if not hold.headed and self._clock.monotonic() >= hold.expires_at:
                hold.revoked = True  # it had expired: the scope may have been granted to another
            hold.expires_at = max(hold.expires_at, sent + hold.seconds)

    def _renew_due(self) -> None:
        now, following = self._clock.monotonic(), math.inf
        for token, hold in self._holds.items():
            if hold.renew_at <= now:
                self._to_renew[token] = None
                hold.renew_at = now + hold.seconds / 4
            following = min(following, hold.renew_at)
        self._renewal_timer.set_no_later(following)
        if self._to_renew:
            self._schedule()

    def _taken(self, takes: list[TakeRequest], sent: float, ok: bool, found: Any) -> None:
        if ok and len(found) != len(takes):
            self._failed(ValueError(f"{len(takes)} asked, {len(found)} answered"))
            ok = False
        now = self._clock.monotonic()
        if not ok:
            for request in takes:
                if request.token in self._waiting_queues or request.token in self._holds:
                    self._takes.setdefault(request.token, request)
                else:
                    self._ends.setdefault(request.token, End(request.token, "undone"))
            return
        # Grants first: the clocks of refused requests may already include these grants, and would
        # prevent their use.
        granted = [one for one in zip(takes, found, strict=True) if isinstance(one[1], Granted)]
        for request, answer in granted:
            self._answered(request, answer, sent, now)
        if 0 < len(granted) < len(takes):
            self._callbacks.run()
        for request, answer in zip(takes, found, strict=True):
            if not isinstance(answer, Granted):
                self._answered(request, answer, sent, now)

    def _answered(
        self, request: TakeRequest, answer: Granted | NotBefore, sent: float, now: float
    ) -> None:
        token = request.token
        opened = self._ask_again_at.pop(token, None)
        if isinstance(answer, NotBefore):
            for clock in answer.clocks:
                self._callbacks.heard(clock)
            queue = self._waiting_queues.get(token)
            if queue is not None:
                ask_at = now + answer.seconds
                queue.asking = False
                self._callbacks.deliver(
                    queue, None, ask_at if opened is None else min(ask_at, opened)
                )
            elif token in self._holds:
                self._to_renew[token] = None  # adopted: hold it regardless of other holds
            else:
                self._ends.setdefault(token, End(token, "undone"))
            return
        queue = self._waiting_queues.pop(token, None)
        ttl = answer.seconds
        hold = Hold(token, request.scopes, ttl, sent + ttl, sent + ttl / 4)
        if (queue is None or now >= hold.expires_at) and token not in self._holds:
            self._ends.setdefault(token, End(token, "undone"))
        if queue is None:
            return
        for clock in answer.clocks:  # this page is counted again when the lease is granted
            self._callbacks.heard(clock._replace(pages=clock.pages - 1))
        queue.asking, queue.token, queue.asked = False, "", False
        if now >= hold.expires_at:
            self._callbacks.deliver(queue, None, now)
            return
        self._delivered.append((queue, hold))
        self._callbacks.deliver(queue, hold, now)

    async def close(self) -> None:
        """Stop asking, send pending notifications in a last flight, and close the ledger."""
        self._renewal_timer.hold()
        for token in self._waiting_queues:
            self._ends.setdefault(token, End(token, "undone"))
        self._waiting_queues.clear()
        self._departure_timer.hold()
        flights, self._closed = list(self._flights), True
        for flight in flights:
            flight.cancel()
        await asyncio.gather(*flights, return_exceptions=True)
        self._takes.clear()
        self._to_renew.clear()
        if self._heads or self._ends or self._reports or self._pauses:
            await self._flight()
        if (closes := getattr(self._ledger, "close", None)) is not None:
            await closes()


def _served_by(withheld: Withheld) -> str:
    owner = withheld.owner
    return f"the member {owner} serves this host" if owner else "this member serves the host soon"
