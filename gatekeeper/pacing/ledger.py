"""The ledger decides which requests may start, for all scopes and all processes that share it.

A ledger decides about the present only: `take` grants a request now, or returns when to ask again.
Nothing is reserved for the future, so a 429 that one process receives applies to every request that
has not started yet. A granted request has a hold, with an owner, a token and a time to live. The
hold occupies a slot of each of its scopes, and their clocks until the head of the response.

`MemoryLedger` serves the gates of one process, and is the reference in plain Python for the script
of a fleet's ledger. A scheduler without a ledger decides everything by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from math import ceil
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from gatekeeper.clock import Clock
from gatekeeper.pacing.rules import DAY, DailyBudget

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

    Each call is repeated until it succeeds, so each must be idempotent. Calls that are made in one
    turn of the loop take effect in the order block, head, end, take. A ledger that can return what
    it knows of scopes and who holds them has a method `look(scopes)` like that of `MemoryLedger`.
    One that goes on without its store has a method `withheld(scopes, interval)`: what keeps a
    request with that interval from being granted to this process, a `Withheld` or None.
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


# Internally, times and durations are whole microseconds, so that sums are exact and results can be
# compared with those of a fleet's script number by number.

NEVER = 1 << 53
"""A time later than any other, and still exact as a double in Lua."""


def micros(seconds: float) -> int:
    """Convert seconds to microseconds. Rounds up, since a longer wait is safe.

    >>> micros(1.0000001)
    1000001
    """
    return min(NEVER, ceil(seconds * 1e6))


class _Need(NamedTuple):
    """A `ScopeRequest` in microseconds."""

    interval: int
    slots: int
    guess: bool
    budget: DailyBudget | None


class _Hold(msgspec.Struct, eq=False):
    start: int
    end: int
    before: tuple[int | None, int, bool]
    """Basis, interval and guess of the scope before the hold."""
    headed: bool = False
    counted: bool = False
    """Whether it counts as a page of the budget."""


class _Ticket(msgspec.Struct, eq=False):
    """A request that waits for a scope and is notified when the scope becomes free."""

    token: str
    need: _Need
    due: int = NEVER
    """When it was notified to ask again; from then on the scope is reserved for `LAPSE`."""


class ScopeRecord:
    """The ledger's state of one scope. Times are microseconds of the ledger's clock."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.basis: int | None = None
        """The latest start, head or failure."""
        self.interval = 0
        self.guess = False
        self.blocked_until = 0
        self.reason = ""
        self.paused = False
        self.learned = 0
        self.learned_until = 0
        self.day: int | None = None
        """The time of the first page of the day, if there is a budget."""
        self.pages: int = 0
        self.bytes: int = 0
        self.holds: dict[str, _Hold] = {}
        self.tickets: list[_Ticket] = []

    def expire(self, now: int) -> None:
        """Remove holds and tickets that have expired, and start a new day if it is due."""
        for token, hold in list(self.holds.items()):
            if hold.end <= now:
                del self.holds[token]
                if not hold.headed:  # its request may have been sent at the last moment
                    self.advance(hold.end)
        self.tickets = [one for one in self.tickets if one.due + micros(LAPSE) > now]
        if self.day is not None and now >= self.day + micros(DAY):
            self.day, self.pages, self.bytes = None, 0, 0

    def count(self, now: int, pages: int, size: int) -> None:
        """Add to the day's usage. The day begins now if nothing was counted yet."""
        self.day = now if self.day is None else self.day
        self.pages += pages
        self.bytes += size

    def used(self, now: int) -> ScopeClock:
        """Return the usage of the budget."""
        day = None if self.day is None else (now - self.day) / 1e6
        return ScopeClock(self.name, day=day, pages=self.pages, bytes=self.bytes)

    def advance(self, moment: int) -> None:
        """Count the clock from `moment`, unless it already counts from a later time."""
        self.basis = moment if self.basis is None else max(self.basis, moment)

    def interval_for(self, need: _Need, now: int) -> int:
        """Return the interval that applies to a request that asks now."""
        longest = need.interval
        if need.guess or not self.guess:
            longest = max(longest, self.interval)
        return max(longest, self.learned) if now < self.learned_until else longest

    def free_at(self, need: _Need, now: int) -> tuple[int, bool]:
        """Return when a request may start, and whether it may turn out to be earlier because of a
        head, an end or a resume."""
        interval = self.interval_for(need, now)
        free = max(0 if self.basis is None else self.basis + interval, self.blocked_until)
        if self.paused:
            return NEVER, True
        unheaded = any(not hold.headed for hold in self.holds.values())
        if len(self.holds) >= need.slots or (unheaded and max(interval, self.interval) > 0):
            return max(free, min(hold.end for hold in self.holds.values())), True
        return free, False

    def clock(self, need: _Need, now: int) -> ScopeClock:
        """Return the clock as it is reported to a request that may not start now."""
        return ScopeClock(
            self.name,
            None if self.basis is None else (now - self.basis) / 1e6,
            self.interval_for(need, now) / 1e6,
            max(0, self.blocked_until - now) / 1e6,
            self.reason if self.blocked_until > now else "",
            self.paused,
        )


class MemoryLedger:
    """A `Ledger` for the gates of one process.

    >>> from gatekeeper.clock import VirtualClock
    >>> clock = VirtualClock()
    >>> ledger = MemoryLedger(clock)
    >>> page = (ScopeRequest("a.example", interval=2.0),)
    >>> ledger.take_nowait([TakeRequest("me:1", page), TakeRequest("me:2", page)])[0]
    Granted(token='me:1', seconds=20.0, clocks=())
    >>> ledger.end_nowait([End("me:1")])
    >>> ledger.take_nowait([TakeRequest("me:2", page)])[0].seconds
    2.0
    """

    def __init__(self, clock: Clock, *, hold: float = HOLD) -> None:
        """`hold`: the time to live of a hold in seconds."""
        self._clock = clock
        self._hold = hold
        self._records: dict[str, ScopeRecord] = {}
        self._scopes_of: dict[str, tuple[str, ...]] = {}
        self._headed: set[str] = set()
        self._listeners: dict[str, LedgerListener] = {}
        self._sweep_at = 1024
        """Number of records at which obsolete ones are removed."""

    def listen(self, owner: str, listener: LedgerListener) -> None:
        """Notify `listener` of events about the tokens of `owner`, and of those about everyone."""
        self._listeners[owner] = listener

    # --- the Ledger protocol (none of these methods waits) ----------------------------------

    async def take(self, requests: Sequence[TakeRequest]) -> list[Granted | NotBefore]:
        """Grant each request all of its scopes, or return when to ask again."""
        return self.take_nowait(requests)

    def take_nowait(self, requests: Sequence[TakeRequest]) -> list[Granted | NotBefore]:
        """Do what `take` does, synchronously."""
        now = self._now()
        return [self._take(token, scopes, now) for token, scopes in requests]

    async def head(self, tokens: Sequence[str]) -> None:
        """Note that the response heads have arrived: the clocks count from now."""
        self.head_nowait(tokens)

    def head_nowait(self, tokens: Sequence[str]) -> None:
        """Do what `head` does, synchronously."""
        now = self._now()
        for token in tokens:
            self._headed.add(token)
            for record in self._records_of(token, now):
                hold = record.holds.get(token)
                if hold is None or not hold.headed:
                    record.advance(now)
                if hold is not None:
                    hold.headed = True
                self._notify_first(record, now)

    async def end(self, ends: Sequence[End]) -> None:
        """Free the slots. If no head arrived before, the clocks count from now."""
        self.end_nowait(ends)

    def end_nowait(self, ends: Sequence[End]) -> None:
        """Do what `end` does, synchronously."""
        now = self._now()
        for end in ends:
            self._report(end.reports, now)
        for end in ends:
            self._end(end, now)

    async def renew(self, tokens: Sequence[str]) -> None:
        """Extend the holds by a full time to live from now."""
        self.renew_nowait(tokens)

    def renew_nowait(self, tokens: Sequence[str]) -> None:
        """Do what `renew` does, synchronously."""
        now = self._now()
        for token in tokens:
            for record in self._records_of(token, now):
                hold = record.holds.get(token)
                if hold is None:
                    # The hold expired although its request is still in flight.
                    before = (record.basis, record.interval, record.guess)
                    hold = record.holds[token] = _Hold(now, now, before)
                    hold.headed = token in self._headed
                    if not hold.headed:
                        record.advance(now)
                hold.end = now + micros(self._hold)

    async def block(self, reports: Sequence[Report]) -> None:
        """Apply reports. A report without seconds and interval lifts a block."""
        self._report(reports, self._now())

    async def pause(self, scopes: Sequence[str]) -> None:
        """Grant no request of these scopes until `resume`."""
        self._pause(scopes, True)

    async def resume(self, scopes: Sequence[str]) -> None:
        """Grant requests of these scopes again."""
        self._pause(scopes, False)

    async def look(self, scopes: Sequence[str]) -> list[ScopeView]:
        """Return what is known of each scope and who holds it."""
        now = self._now()
        return [self._view(self._record(name, now), now) for name in scopes]

    # --- internals --------------------------------------------------------------------------

    def _view(self, record: ScopeRecord, now: int) -> ScopeView:
        used = record.used(now)
        clock = record.clock(_Need(0, 1, False, None), now)
        return ScopeView(
            clock._replace(day=used.day, pages=used.pages, bytes=used.bytes),
            tuple(
                HoldView(
                    token.partition(":")[0],
                    *((now - hold.start) / 1e6, (hold.end - now) / 1e6, hold.headed),
                )
                for token, hold in record.holds.items()
            ),
            len(record.tickets),
        )

    def _now(self) -> int:
        return round(self._clock.monotonic() * 1e6)

    def _record(self, name: str, now: int) -> ScopeRecord:
        record = self._records.get(name)
        if record is None:
            if len(self._records) >= self._sweep_at:
                self._sweep(now)
            record = self._records[name] = ScopeRecord(name)
        record.expire(now)
        return record

    def _records_of(self, token: str, now: int) -> list[ScopeRecord]:
        return [self._record(name, now) for name in self._scopes_of.get(token, ())]

    def _take(self, token: str, scopes: tuple[ScopeRequest, ...], now: int) -> Granted | NotBefore:
        self._scopes_of[token] = tuple(one.scope for one in scopes)
        asked = [
            (self._record(scope, now), _Need(micros(interval), slots, guess, budget))
            for scope, interval, slots, guess, budget in scopes
        ]
        told = [record for record, need in asked if need.budget is not None]
        ttl = micros(self._hold)
        if all(token in record.holds for record, _ in asked):
            for record, _ in asked:
                record.holds[token].end = now + ttl
            return Granted(token, self._hold, tuple(record.used(now) for record in told))
        if (spent := self._spent(token, asked, now)) is not None:
            return spent
        found = [(record, need, *self._due(token, record, need, now)) for record, need in asked]
        if all(due <= now for _, _, due, _ in found):
            for record, need in asked:
                before = (record.basis, record.interval, record.guess)
                record.holds[token] = _Hold(now, now + ttl, before)
                record.basis, record.interval, record.guess = now, need.interval, need.guess
                if need.budget is not None:
                    record.count(now, 1, 0)
                    record.holds[token].counted = True
                record.tickets = [one for one in record.tickets if one.token != token]
                self._notify_first(record, now)
            return Granted(token, self._hold, tuple(record.used(now) for record in told))
        return self._queue(token, found, now)

    def _spent(
        self, token: str, asked: list[tuple[ScopeRecord, _Need]], now: int
    ) -> NotBefore | None:
        """Return the answer for a page of a host whose budget is used up, or None if it is not.
        Such a request does not queue in any scope."""
        for record, need in asked:
            if need.budget is None or record.day is None:
                continue
            if not need.budget.spent(record.pages, record.bytes):
                continue
            for other, _ in asked:
                if any(one.token == token for one in other.tickets):
                    other.tickets = [one for one in other.tickets if one.token != token]
                    self._notify_first(other, now)
            left = min(record.day + micros(DAY) - now, micros(3600.0))
            return NotBefore(left / 1e6, (record.used(now),))
        return None

    def _due(self, token: str, record: ScopeRecord, need: _Need, now: int) -> tuple[int, bool]:
        """Return when a request may start as far as this scope is concerned, and whether that time
        may change."""
        free, open_ended = record.free_at(need, now)
        if free > now:
            return free, open_ended
        for ticket in record.tickets:
            if ticket.token == token:
                break
            # The scope is reserved for a request that was notified, or that waits for this very
            # scope, for a longer interval.
            if ticket.due < NEVER and ticket.due <= max(now, record.free_at(ticket.need, now)[0]):
                return ticket.due + micros(LAPSE), True
        return now, False

    def _queue(
        self, token: str, found: list[tuple[ScopeRecord, _Need, int, bool]], now: int
    ) -> NotBefore:
        """Queue a request in the scopes that are closed, without reserving the open ones."""
        ask_at = max(due for _, _, due, _ in found)
        certain = not any(open_ended for _, _, _, open_ended in found)
        clocks = []
        for record, need, due, _ in found:
            mine = next((one for one in record.tickets if one.token == token), None)
            if due <= now:
                if mine is not None:
                    record.tickets.remove(mine)
                    self._notify_first(record, now)
                continue
            clocks.append(record.clock(need, now))
            if mine is None:
                if len(record.tickets) >= MAX_TICKETS:
                    ask_at = max(ask_at, due + len(record.tickets) * record.interval_for(need, now))
                    continue
                mine = _Ticket(token, need)
                record.tickets.append(mine)
            first = record.tickets[0]
            if mine is not first and not due < first.due < NEVER:
                # Only the first request is notified of its time; the next one follows then.
                certain = False
                behind = first.due if first.due < NEVER else now + micros(self._hold)
                place = record.tickets.index(mine)
                ask_at = max(ask_at, behind + place * micros(LAPSE))
                if place > 1:
                    ask_at = max(ask_at, now + micros(self._hold))
        for record, _, _, _ in found:
            for ticket in record.tickets:
                if ticket.token == token:
                    ticket.due = ask_at if certain else NEVER
        return NotBefore(min(ask_at - now, micros(3600.0)) / 1e6, tuple(clocks))

    def _notify_first(self, record: ScopeRecord, now: int) -> None:
        """Notify the first waiting request of when to ask, since the scope has changed."""
        if not record.tickets:
            return
        first = record.tickets[0]
        free, open_ended = record.free_at(first.need, now)
        moment = NEVER if open_ended else max(free, now)
        if moment == first.due:
            return
        first.due = moment
        listener = self._listeners.get(first.token.partition(":")[0])
        if listener is not None:
            seconds = min(free - now, micros(3600.0)) / 1e6
            _call_soon(listener.opened, first.token, max(0.0, seconds))

    def _end(self, end: End, now: int) -> None:
        token = end.token
        for place, record in enumerate(self._records_of(token, now)):
            hold = record.holds.pop(token, None)
            if end.outcome == "sent" and (hold is None or not hold.headed):
                record.advance(now)
            elif end.outcome == "undone" and hold is not None and record.basis == hold.start:
                record.basis, record.interval, record.guess = hold.before
            if end.outcome != "sent":
                record.pages -= int(hold is not None and hold.counted and record.pages > 0)
            elif end.size and not place:  # the first scope is that of the host
                record.count(now, 0, end.size)
            record.tickets = [one for one in record.tickets if one.token != token]
            self._notify_first(record, now)
        self._scopes_of.pop(token, None)
        self._headed.discard(token)

    def _report(self, reports: Iterable[Report], now: int) -> None:
        for report in reports:
            record = self._record(report.scope, now)
            until = now + micros(report.seconds)
            if report.seconds <= 0 and report.interval <= 0:
                record.blocked_until, record.reason = 0, ""
            elif until > record.blocked_until:
                record.blocked_until, record.reason = until, report.reason
            if report.interval > 0:
                if now >= record.learned_until:
                    record.learned = 0
                record.learned = max(record.learned, micros(report.interval))
                until = now + micros(report.interval_for)
                record.learned_until = max(record.learned_until, until)
            for listener in self._listeners.values():
                _call_soon(listener.blocked, report)
            self._notify_first(record, now)

    def _pause(self, scopes: Iterable[str], paused: bool) -> None:
        now = self._now()
        for name in scopes:
            record = self._record(name, now)
            record.paused = paused
            for listener in self._listeners.values():
                _call_soon(listener.paused, name, paused)
            self._notify_first(record, now)

    def _sweep(self, now: int) -> None:
        """Remove obsolete records. A record stays for at least ten minutes, since an interval that
        is requested later counts from the latest request."""
        old = now - micros(600.0)
        for name, record in list(self._records.items()):
            record.expire(now)
            if record.holds or record.tickets or record.paused:
                continue
            basis = -1 if record.basis is None else record.basis + record.interval
            if record.day is None and max(basis, record.blocked_until, record.learned_until) < old:
                del self._records[name]
        self._sweep_at = 2 * len(self._records) + 1024


def _call_soon(call: Any, *args: Any) -> None:
    """Call in the next turn of the loop, since the callback may call the ledger again."""
    try:
        asyncio.get_running_loop().call_soon(call, *args)
    except RuntimeError:  # without a loop there are no waiters
        return
