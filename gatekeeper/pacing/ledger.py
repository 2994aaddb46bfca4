"""The ledger decides which requests may start, for all scopes and all processes that share it.

A ledger decides about the present only: `take` grants a request now, or returns when to ask again.
Nothing is reserved for the future, so a 429 that one process receives applies to every request that
has not started yet. A granted request has a hold, with an owner, a token and a time to live. The
hold occupies a slot of each of its scopes, and their clocks until the head of the response.

A scheduler without a ledger decides everything by itself. With one (`LedgerCalls`), the engine
decides first, then the ledger is asked, then the engine checks again and grants, with the ledger's
hold. All calls of one iteration of the loop are one batch, called a flight. Several flights may be
under way to a distant ledger, and a near and busy one gets dozens of requests per flight.

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
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import msgspec

from gatekeeper.clock import Clock, SingleTimer
from gatekeeper.errors import LedgerLost
from gatekeeper.pacing.host_settings import DailyBudget
from gatekeeper.pacing.queues import ScopeQueue

HOLD = 20.0
"""The time to live of a hold in seconds; renewing it starts the time anew."""
LAPSE = 0.1
"""Seconds for which a free scope is reserved for the first request that waits for it."""
MAX_TICKETS = 64
"""Waiting requests per scope that are notified one by one when it becomes free; any others poll."""

Outcome = Literal["sent", "given back", "undone"]
"""How a hold ended. "sent": its request was sent. "given back": it was not sent, and the clock
stays as the hold set it. "undone": it was not sent, and the clock is restored to its state before
the hold."""


class ScopeRequest(NamedTuple):
    """What a request requires of one scope."""

    scope: str
    interval: float = 0.0
    """Minimum number of seconds between two requests."""
    slots: int = 1
    """Maximum number of requests in flight."""
    guess: bool = False
    """Whether the interval is a default because the robots.txt is not known yet. A known interval
    takes precedence, even a shorter one."""
    budget: DailyBudget | None = None
    """The scope's daily budget, if the request is for a page that counts against it."""


class TakeRequest(NamedTuple):
    """A request that wants to start now: all of its scopes or none."""

    token: str
    """The caller's identifier, "owner:number". Repeating a request with its token is idempotent."""
    scopes: tuple[ScopeRequest, ...]


class Granted(NamedTuple):
    """The request may start now."""

    token: str
    seconds: float = HOLD
    """The time to live of the hold, counted from when `take` was called."""
    clocks: tuple[ScopeClock, ...] = ()
    """Usage of the scopes' budgets, including this request. The other fields are not set."""


class ScopeClock(NamedTuple):
    """The state of one scope, in seconds relative to now."""

    scope: str
    age: float | None = None
    """Seconds since the latest start, head or failure; None if there was no request."""
    interval: float = 0.0
    """The interval in force since then."""
    blocked: float = 0.0
    """Seconds until the end of a block; 0 if there is none."""
    reason: str = ""
    """The reason of the block."""
    paused: bool = False
    day: float | None = None
    """Seconds since the first page of the budget's day; None if nothing was counted."""
    pages: int = 0
    """Pages since then."""
    bytes: int = 0
    """Bytes of those pages."""


class NotBefore(NamedTuple):
    """The request may not start now."""

    seconds: float
    """When to ask again at the latest; `LedgerListener.opened` may be called earlier."""
    clocks: tuple[ScopeClock, ...] = ()
    """The scopes whose clock, block or pause is the reason."""


class Withheld(NamedTuple):
    """Why a ledger that has lost its store grants this process no request of some scopes."""

    seconds: float
    """Until this process is granted them; inf: not before the store is back."""
    owner: str = ""
    """The member that is granted them instead, if there is one."""


class Report(NamedTuple):
    """Consequences of a response that apply to every process."""

    scope: str
    seconds: float = 0.0
    """The length of a block of the scope; 0 for no block."""
    reason: str = ""
    interval: float = 0.0
    """An interval that was learned from the response; 0 for none."""
    interval_for: float = 0.0
    """Seconds for which the learned interval applies."""


class End(NamedTuple):
    """The end of a hold."""

    token: str
    outcome: Outcome = "sent"
    reports: tuple[Report, ...] = ()
    """Reports that take effect before the slots are freed."""
    size: int = 0
    """Bytes of the response, if the scope has a budget for them."""


class HoldView(NamedTuple):
    """A hold, whose request may be in flight."""

    owner: str
    """The owner: the part of its token before the colon."""
    age: float
    """Seconds since it was granted."""
    seconds: float
    """Seconds until it expires unless it is renewed."""
    headed: bool
    """Whether the head of its response has arrived."""


class ScopeView(NamedTuple):
    """Everything that is known of one scope."""

    clock: ScopeClock
    holds: tuple[HoldView, ...]
    waiting: int
    """Number of requests with a ticket: each member asks for one request of a host at a time."""


class LedgerListener(Protocol):
    """Callbacks for events of the ledger. They run in the event loop and must return quickly."""

    def opened(self, token: str, seconds: float) -> None:
        """The request of that token should ask again after `seconds`."""

    def blocked(self, report: Report) -> None:
        """A process made this report, perhaps this one. A report without seconds and interval
        lifts a block."""

    def paused(self, scope: str, paused: bool) -> None:
        """The scope was paused or resumed."""

    def lost(self, lost: bool) -> None:
        """The ledger can't be reached any more, or can be reached again."""

    def clocks(self) -> list[ScopeClock]:
        """Return every clock and block that this process knows and that still lies in the future.
        Called when the ledger has lost its data. A clock without a name indicates that there are
        more, which are not in memory."""


class Ledger(Protocol):
    """Decides which requests may start. Methods may raise any error; the scheduler then retries.

    Each call is repeated until it succeeds, so each must be idempotent. Calls made in one iteration
    of the loop take effect in the order block, head, end, take. Optional are `look(scopes)`: what
    it knows of scopes and who holds them, a list of `ScopeView`; `withheld(scopes, interval)`: what
    keeps a request with that interval from this process while the store is lost, a `Withheld` or
    None; and a text `recovery`: for what it waits, and how long, since the store lost its data.
    """

    def listen(self, owner: str, listener: LedgerListener) -> None:
        """Notify `listener` of events about the tokens of `owner`, and of those about everyone."""

    async def take(self, requests: Sequence[TakeRequest]) -> list[Granted | NotBefore]:
        """Grant each request all of its scopes, or return when to ask again."""

    async def head(self, tokens: Sequence[str]) -> None:
        """Note that the response heads have arrived: the clocks count from now."""

    async def end(self, ends: Sequence[End]) -> None:
        """Free the slots. If no head arrived before, the clocks count from now."""

    async def renew(self, tokens: Sequence[str]) -> None:
        """Extend the holds, whose requests are in flight, by a full time to live from now."""

    async def block(self, reports: Sequence[Report]) -> None:
        """Apply reports. A report without seconds and interval lifts a block."""

    async def pause(self, scopes: Sequence[str]) -> None:
        """Grant no request of these scopes until `resume`."""

    async def resume(self, scopes: Sequence[str]) -> None:
        """Grant requests of these scopes again."""


class FleetStats(msgspec.Struct, frozen=True):
    """The state of a fleet's ledger, as this member sees it."""

    state: str
    """`connected`, `lost`, or `recovering`: the store is back, and members push what they know."""
    members: int
    """Number of members with a recent heartbeat, including this one."""
    member: str
    """The name of this member."""
    calls: int
    """Number of script calls since the start."""
    requests: int
    """Number of requests, heads and ends in those calls."""
    failures: int
    """Number of flights that failed."""
    epochs: int
    """How often this member declared a new epoch, since the store had lost its contents."""
    dividing: bool
    """Whether the store is lost and this member continues with its own share of the hosts."""
    recovery: str = ""
    """Why the store grants no leases, since it may have lost its data; empty if it does."""


MAX_BATCH = 256
"""Maximum number of questions in one flight. More would make a near ledger look distant."""
MAX_FLIGHTS = 8
"""Maximum number of flights under way at the same time."""
SPACING = 0.005
"""Minimum seconds between departures while a flight is under way; of long round trips, an eighth.
If they are short, a second one leaves at once, to be executed while we handle the first answers."""
MIN_SPLIT = 16
"""Minimum number of questions in the first of two such flights; it has half of those above it."""
RETRY_INITIAL, RETRY_MAX = 0.1, 5.0
"""Seconds until a retry after a flight has failed: they double with each failure."""

_LOST = "the fleet's store can't be reached"
_RECOVERS = "the fleet's store does not answer, or is back and its data is being restored"

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
    """The scheduler's callbacks for answers and events of the ledger; those without a text are of
    `LedgerListener`. None of them may raise."""

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
    paused: Callable[[str, bool], None]
    clocks: Callable[[], list[ScopeClock]]
    lost: Callable[[bool], None]


_V = TypeVar("_V")


class _Unconfirmed(dict[str, _V]):
    """What the ledger has not confirmed, by scope. Of each scope one value is in flight at most."""

    def __init__(self) -> None:
        super().__init__()
        self._sent: set[str] = set()

    @property
    def unsent(self) -> dict[str, _V]:
        """What is not in flight."""
        return {name: value for name, value in self.items() if name not in self._sent}

    def send(self) -> dict[str, _V]:
        """Return what is not in flight, and is from now on."""
        self._sent.update(values := self.unsent)
        return values

    def arrived(self, values: dict[str, _V], ok: bool, _: object = None) -> None:
        """Note that a call with these values ended."""
        self._sent.difference_update(values)
        for name, value in values.items():
            if ok and self.get(name) is value:
                del self[name]


class LedgerCalls:
    """The calls to a ledger outside this process. It stays correct if calls fail."""

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
        self._takes: dict[str, TakeRequest] = {}
        """Questions to be sent, by token."""
        self._heads: dict[str, tuple[str, ...]] = {}
        """Heads to be sent: the names of the scopes, by token."""
        self._ends: dict[str, End] = {}
        """Ends to be sent, by token."""
        self._reports: _Unconfirmed[Report] = _Unconfirmed()
        self._pauses: _Unconfirmed[bool] = _Unconfirmed()
        """Pauses (True) and resumes."""
        self._holds: dict[str, Hold] = {}
        """Holds of open leases, by token."""
        self._renewal_timer = SingleTimer(clock, self._renew_due)
        self._to_renew: dict[str, None] = {}
        """Tokens of holds to be renewed (a dictionary as ordered set)."""
        self._flights: set[asyncio.Task[None]] = set()
        self._departure_timer = SingleTimer(clock, self._schedule)
        self._departing = False
        """Whether `_depart` is scheduled for the next iteration of the loop."""
        self._departed_at = -math.inf
        """When the latest flight left (monotonic)."""
        self._spacing = 2 * SPACING
        """Seconds between two departures; `SPACING` if the latest round trip was short."""
        self._back_off_until = -math.inf
        """No flight leaves before this time (monotonic), since one has failed."""
        self._retry_delay = RETRY_INITIAL
        self._closed = False
        self.away: bool = False
        """Whether the ledger reported that it can't be reached: nothing is granted."""
        self._delivered: list[tuple[ScopeQueue, Hold]] = []  # not used as far as is known
        self.failures: int = 0  # calls that failed
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
        queue.ask_at = math.inf
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
        if known is not None and (report.seconds or report.interval):
            later = report if report.seconds >= known.seconds else known
            report = later._replace(
                interval=max(report.interval, known.interval),
                interval_for=max(report.interval_for, known.interval_for),
            )
        self._reports[report.scope] = report
        self._schedule()

    async def look(self, scopes: Sequence[str]) -> list[ScopeView]:
        """Return what the ledger knows of each scope, after all earlier pauses and reports of this
        process have reached it. Return an empty list if the ledger has no method `look`."""
        if (look := getattr(self._ledger, "look", None)) is None:
            return []
        await asyncio.sleep(0)  # notifications leave in this iteration of the loop
        while self._flights and any(n in self._pauses or n in self._reports for n in scopes):
            await asyncio.wait(self._flights, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.sleep(0)
        return list(await look(scopes))

    def pause(self, scope: str, paused: bool) -> None:
        """Pause or resume a scope for every process, on behalf of the operator."""
        self._pauses[scope] = paused
        self._schedule()

    def forget(self, queue: ScopeQueue) -> None:
        """Withdraw the question of a queue that has no waiters any more."""
        token, queue.token = queue.token, ""
        if self._waiting_queues.pop(token, None) is None:
            return
        waits = self._takes.pop(token, None) is not None
        if queue.asking and not waits:
            return  # the question is in flight: `_answered` ends the hold if it is granted
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
            queue.ask_at = moment  # the answer in flight may be older than this
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
        if self.away or getattr(self._ledger, "state", None) != "recovering":
            return _LOST if self.away else ""
        return str(getattr(self._ledger, "recovery", "") or _RECOVERS)

    def withheld(self, scopes: Sequence[str], interval: float = 0.0) -> tuple[str, float, bool]:
        """Return why the ledger grants this process no request of these scopes at the moment, for
        how many seconds (inf: until the store is back), and whether another member serves them
        while the store is lost. The reason is empty if it does."""
        ask = getattr(self._ledger, "withheld", None)
        found: Withheld | None = None if ask is None else ask(scopes, interval)
        elsewhere = found is not None and bool(found.owner)
        if found is None or (self.unavailable and not elsewhere):
            return self.unavailable, math.inf, False
        serves = f"the member {found.owner} serves" if elsewhere else "this member soon serves"
        return f"{_LOST}, and {serves} this host", found.seconds, elsewhere

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
        if self._closed or len(self._flights) >= MAX_FLIGHTS:
            return  # called again when a flight has ended
        pending = (self._takes, self._heads, self._ends, self._to_renew)
        if not any((*pending, self._reports.unsent, self._pauses.unsent)):
            return
        moment, now = self._back_off_until, self._clock.monotonic()
        if len(self._flights) >= (2 if self._spacing == SPACING else 1):
            moment = max(moment, self._departed_at + self._spacing)
        if now < moment:
            self._departure_timer.set_no_later(moment)
            return
        self._departed_at = now
        task = asyncio.get_running_loop().create_task(self._flight())
        self._flights.add(task)
        task.add_done_callback(self._flights.discard)
        task.add_done_callback(lambda _: self._schedule())

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
        elif now >= self._back_off_until:  # count flights that fail together only once
            self._back_off_until = now + self._retry_delay
            self._retry_delay = min(2 * self._retry_delay, RETRY_MAX)

    def _notifications(self) -> list[_Call]:
        """Return the calls that must take effect before any request is granted."""
        ledger, calls = self._ledger, list[_Call]()
        changed = self._pauses.send()
        for tell, paused in ((ledger.pause, True), (ledger.resume, False)):
            if of_kind := {name: one for name, one in changed.items() if one is paused}:
                calls.append((tell(list(of_kind)), partial(self._pauses.arrived, of_kind)))
        if reports := self._reports.send():
            call = ledger.block(list(reports.values()))
            calls.append((call, partial(self._reports.arrived, reports)))
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
        if self._spacing == SPACING and len(self._flights) == 1:
            most = min(most, max(MIN_SPLIT, (len(self._takes) + 1) // 2))
        if takes := list(itertools.islice(self._takes.values(), most)):
            for token, _ in takes:
                del self._takes[token]
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
        for kind in (Granted, NotBefore):
            for request, answer in zip(takes, found, strict=True):
                if isinstance(answer, kind):
                    self._answered(request, answer, sent, now)
            self._callbacks.run()

    def _answered(
        self, request: TakeRequest, answer: Granted | NotBefore, sent: float, now: float
    ) -> None:
        token = request.token
        if isinstance(answer, NotBefore):
            for clock in answer.clocks:
                self._callbacks.heard(clock)
            queue = self._waiting_queues.get(token)
            if queue is not None:
                queue.asking = False
                self._callbacks.deliver(queue, None, min(now + answer.seconds, queue.ask_at))
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
        queue.asking, queue.token = False, ""
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
