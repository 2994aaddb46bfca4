"""The ledger: who may start when, over all scopes, and over all processes that share it.

A ledger speaks of now, not of the future: `take` grants a request now, or says when to ask again.
Nothing is booked ahead, so that a 429 which one process draws holds for every request that has
not started yet. What is granted is a hold: it has an owner, a token and a time to live, and it
occupies a slot of each of its scopes, and their clocks until the head of the response.

`MemoryLedger` is for the gates of one process, and says in plain Python what the ledger of a fleet
does in its script. A scheduler without a ledger keeps everything to itself and asks nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from math import ceil
from typing import Any, Literal, NamedTuple, Protocol

from gatekeeper.clock import Clock
from gatekeeper.pacing.rules import DAY, DailyBudget

HOLD = 20.0
"""Seconds that a hold lasts without being renewed."""
LAPSE = 0.1
"""Seconds for which a scope that came free waits for who asked for it first."""
MAX_TICKETS = 64
"""Requests that are told one by one when a scope comes free; further ones ask again by time."""

Outcome = Literal["sent", "given back", "undone"]
"""What became of a hold: its request was sent; it never was, and the clock stays as the hold set
it; it never was, and the clock is as before the hold."""


class ScopeRequest(NamedTuple):
    """What a request asks of one scope."""

    scope: str
    interval: float = 0.0
    """Seconds that have to lie between two requests."""
    slots: int = 1
    """How many may be under way at once."""
    guess: bool = False
    """The interval is a default, since the robots.txt is not known yet: one that is known goes
    before it, also a shorter one."""
    budget: DailyBudget | None = None
    """The request is one for a page, of which the scope has so many a day."""


class TakeRequest(NamedTuple):
    """A request that wants to start now: all of its scopes or none."""

    token: str
    """The asker's own name of it, "member:number": repeated, it gets the same answer."""
    scopes: tuple[ScopeRequest, ...]


class Granted(NamedTuple):
    """The request may start now."""

    token: str
    seconds: float = HOLD
    """How long the hold lasts, counted from the moment at which `take` was sent."""
    clocks: tuple[ScopeClock, ...] = ()
    """What was used of the scopes' budgets, this request included; nothing else is told in them."""


class ScopeClock(NamedTuple):
    """What is known of one scope, in seconds from now on."""

    scope: str
    age: float | None = None
    """Seconds since the latest start, head or failure; None: it was never asked."""
    interval: float = 0.0
    """The interval in force since then."""
    blocked: float = 0.0
    """Seconds until the end of a block, 0 without one."""
    reason: str = ""
    """Of the block."""
    paused: bool = False
    day: float | None = None
    """Seconds since the first page of the day; None: nothing is counted ..."""
    pages: int = 0
    """... and the pages since ..."""
    bytes: int = 0
    """... and their bytes."""


class NotBefore(NamedTuple):
    """The request may not start now."""

    seconds: float
    """When asking again can help, at the latest; `LedgerListener.opened` may say so before."""
    clocks: tuple[ScopeClock, ...] = ()
    """The scopes whose clock, block or pause is why."""


class Report(NamedTuple):
    """What the answer to a request means for everybody."""

    scope: str
    seconds: float = 0.0
    """No request of the scope for so long: 0 asks for no block."""
    reason: str = ""
    interval: float = 0.0
    """The interval that the answer has taught, 0: none."""
    interval_for: float = 0.0
    """Seconds for which that is kept to."""


class End(NamedTuple):
    """The end of a hold."""

    token: str
    outcome: Outcome = "sent"
    reports: tuple[Report, ...] = ()
    """Take effect before the slots are free."""
    size: int = 0
    """Bytes of the response, where the scope has a budget for them."""


class HoldView(NamedTuple):
    """One request that may be under way."""

    owner: str
    """Whose: how its token begins."""
    age: float
    """Seconds since it was granted."""
    seconds: float
    """Until it runs out, unless it is renewed."""
    headed: bool


class ScopeView(NamedTuple):
    """Everything that is known of one scope."""

    clock: ScopeClock
    holds: tuple[HoldView, ...]
    waiting: int
    """Requests that wait for it by name: a member asks for one of a host at a time."""


class LedgerListener(Protocol):
    """Told of what others did. The calls come between two turns of the loop; they must be short."""

    def opened(self, token: str, seconds: float) -> None:
        """Asking again for that token can help after so many seconds."""

    def blocked(self, report: Report) -> None:
        """Somebody reported this; also the asker's own reports come back. Without seconds and
        interval: a block was lifted."""

    def paused(self, scope: str, paused: bool) -> None:
        """The scope was paused, or resumed."""

    def lost(self, lost: bool) -> None:
        """The ledger can't be reached any more, or can be again."""

    def clocks(self) -> list[ScopeClock]:
        """Every clock and block that this process knows of and that still lies ahead: asked for
        where the ledger has lost what it knew. One without a name: there are more, not at hand."""


class Ledger(Protocol):
    """Who may start when. May raise anything: the scheduler then asks again.

    Each call is repeated until it succeeds, so each must be idempotent. Calls that are made in
    one turn of the loop take effect in the order block, head, end, take. One that can say what it
    knows of scopes, and who holds them, has `look(scopes)`, as `MemoryLedger` has.
    """

    def listen(self, owner: str, listener: LedgerListener) -> None:
        """Tell what concerns the tokens of that owner, and everybody."""

    async def take(self, requests: Sequence[TakeRequest]) -> list[Granted | NotBefore]:
        """Grant each request all of its scopes, or say when asking again can help."""

    async def head(self, tokens: Sequence[str]) -> None:
        """The heads of their responses are here: the clocks count from now."""

    async def end(self, ends: Sequence[End]) -> None:
        """Free the slots. Where no head came before, the clocks count from now."""

    async def renew(self, tokens: Sequence[str]) -> None:
        """Their requests are under way: the holds last for a whole time to live from now."""

    async def block(self, reports: Sequence[Report]) -> None:
        """Take reports into account; one without seconds and interval lifts a block."""

    async def pause(self, scopes: Sequence[str]) -> None:
        """No request of these scopes until `resume`."""

    async def resume(self, scopes: Sequence[str]) -> None:
        """Requests again."""


# Inside, moments and durations are whole microseconds: what is added up stays exact, and the
# script of a fleet's ledger can be compared to this number by number.

NEVER = 1 << 53


def micros(seconds: float) -> int:
    """Seconds as microseconds, rounded up: an error slows.

    >>> micros(1.0000001)
    1000001
    """
    return min(NEVER, ceil(seconds * 1e6))


class _Hold:
    __slots__ = ("before", "counted", "end", "headed", "start")

    def __init__(self, start: int, end: int, before: tuple[int | None, int, bool]) -> None:
        self.start, self.end, self.before = start, end, before
        self.headed = self.counted = False


class _Ticket:
    """A request that waits for a scope."""

    __slots__ = ("due", "guess", "interval", "owner", "slots", "token")

    def __init__(self, token: str, need: _Need) -> None:
        self.token: str = token
        self.interval: int = need.interval
        self.slots: int = need.slots
        self.guess: bool = need.guess
        self.due: int = NEVER
        """When it was told to ask again; the scope is kept for it from then on for `LAPSE`."""


class _Need(NamedTuple):
    """A `ScopeRequest` in microseconds."""

    interval: int
    slots: int
    guess: bool
    budget: DailyBudget | None


class ScopeRecord:
    """One scope, as the ledger knows it. Moments are microseconds of the ledger's clock."""

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
        """The first page of the day, where there is a budget."""
        self.pages: int = 0
        self.bytes: int = 0
        self.holds: dict[str, _Hold] = {}
        self.tickets: list[_Ticket] = []

    def settle(self, now: int) -> None:
        """Let happen what time alone has brought since: holds and tickets that ran out."""
        for token, hold in list(self.holds.items()):
            if hold.end <= now:
                del self.holds[token]
                if not hold.headed:  # it may have been sent at the last moment
                    self.moved(hold.end)
        self.tickets = [one for one in self.tickets if one.due + micros(LAPSE) > now]
        if self.day is not None and now >= self.day + micros(DAY):
            self.day, self.pages, self.bytes = None, 0, 0

    def count(self, now: int, pages: int, size: int) -> None:
        """So many more of the day, which begins now if none has."""
        self.day = now if self.day is None else self.day
        self.pages += pages
        self.bytes += size

    def used(self, now: int) -> ScopeClock:
        """What was used of the budget."""
        day = None if self.day is None else (now - self.day) / 1e6
        return ScopeClock(self.name, day=day, pages=self.pages, bytes=self.bytes)

    def moved(self, moment: int) -> None:
        """The clock counts from that moment, if from no later one."""
        self.basis = moment if self.basis is None else max(self.basis, moment)

    def in_force(self, need: _Need | _Ticket, now: int) -> int:
        """The interval for a request that asks now."""
        longest = need.interval
        if need.guess or not self.guess:
            longest = max(longest, self.interval)
        return max(longest, self.learned) if now < self.learned_until else longest

    def free_at(self, need: _Need | _Ticket, now: int) -> tuple[int, bool]:
        """When a request may start, and whether that is only the latest moment: a head or an end
        may come before."""
        interval = self.in_force(need, now)
        free = max(0 if self.basis is None else self.basis + interval, self.blocked_until)
        if self.paused:
            return NEVER, True
        unheaded = any(not hold.headed for hold in self.holds.values())
        if len(self.holds) >= need.slots or (unheaded and max(interval, self.interval) > 0):
            return max(free, min(hold.end for hold in self.holds.values())), True
        return free, False

    def clock(self, need: _Need, now: int) -> ScopeClock:
        """What a request that may not start now is told."""
        return ScopeClock(
            self.name,
            None if self.basis is None else (now - self.basis) / 1e6,
            self.in_force(need, now) / 1e6,
            max(0, self.blocked_until - now) / 1e6,
            self.reason if self.blocked_until > now else "",
            self.paused,
        )


class MemoryLedger:
    """A ledger for the gates of one process.

    >>> from gatekeeper.clock import VirtualClock
    >>> clock = VirtualClock()
    >>> ledger = MemoryLedger(clock)
    >>> page = (ScopeRequest("a.example", interval=2.0),)
    >>> ledger.take_nowait([TakeRequest("me:1", page), TakeRequest("me:2", page)])[0]
    Granted(token='me:1', seconds=20.0)
    >>> ledger.end_nowait([End("me:1")])
    >>> ledger.take_nowait([TakeRequest("me:2", page)])[0].seconds
    2.0
    """

    def __init__(self, clock: Clock, *, hold: float = HOLD) -> None:
        """`hold`: seconds that a hold lasts without being renewed."""
        self._clock = clock
        self._hold = hold
        self._records: dict[str, ScopeRecord] = {}
        self._scopes_of: dict[str, tuple[str, ...]] = {}
        self._headed: set[str] = set()
        self._listeners: dict[str, LedgerListener] = {}
        self._crowded = 1024
        """Records at which those that say nothing any more are swept out."""

    def listen(self, owner: str, listener: LedgerListener) -> None:
        """Tell what concerns the tokens of that owner, and everybody."""
        self._listeners[owner] = listener

    # --- what a ledger does -----------------------------------------------------------------

    async def take(self, requests: Sequence[TakeRequest]) -> list[Granted | NotBefore]:
        """Grant, or say when to ask again; see `Ledger`. So do the others; none waits."""
        return self.take_nowait(requests)

    def take_nowait(self, requests: Sequence[TakeRequest]) -> list[Granted | NotBefore]:
        """What `take` does, at once."""
        now = self._now()
        return [self._take(token, scopes, now) for token, scopes in requests]

    async def head(self, tokens: Sequence[str]) -> None:
        """The heads of their responses are here."""
        self.head_nowait(tokens)

    def head_nowait(self, tokens: Sequence[str]) -> None:
        """What `head` does, at once."""
        now = self._now()
        for token in tokens:
            self._headed.add(token)
            for record in self._of(token, now):
                hold = record.holds.get(token)
                if hold is None or not hold.headed:
                    record.moved(now)
                if hold is not None:
                    hold.headed = True
                self._tell_first(record, now)

    async def end(self, ends: Sequence[End]) -> None:
        """Free the slots."""
        self.end_nowait(ends)

    def end_nowait(self, ends: Sequence[End]) -> None:
        """What `end` does, at once."""
        now = self._now()
        for end in ends:
            self._report(end.reports, now)
        for end in ends:
            self._end(end, now)

    async def renew(self, tokens: Sequence[str]) -> None:
        """The holds last for a whole time to live from now."""
        self.renew_nowait(tokens)

    def renew_nowait(self, tokens: Sequence[str]) -> None:
        """What `renew` does, at once."""
        now = self._now()
        for token in tokens:
            for record in self._of(token, now):
                hold = record.holds.get(token)
                if hold is None:
                    # It ran out, and its request is under way all the same.
                    before = (record.basis, record.interval, record.guess)
                    hold = record.holds[token] = _Hold(now, now, before)
                    hold.headed = token in self._headed
                    if not hold.headed:
                        record.moved(now)
                hold.end = now + micros(self._hold)

    async def block(self, reports: Sequence[Report]) -> None:
        """Take reports into account."""
        self._report(reports, self._now())

    async def pause(self, scopes: Sequence[str]) -> None:
        """No request of these scopes until `resume`."""
        self._pause(scopes, True)

    async def resume(self, scopes: Sequence[str]) -> None:
        """Requests again."""
        self._pause(scopes, False)

    async def look(self, scopes: Sequence[str]) -> list[ScopeView]:
        """What is known of each, and who holds it."""
        now = self._now()
        return [self._view(self._record(name, now), now) for name in scopes]

    # --- how --------------------------------------------------------------------------------

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
            if len(self._records) >= self._crowded:
                self._sweep(now)
            record = self._records[name] = ScopeRecord(name)
        record.settle(now)
        return record

    def _of(self, token: str, now: int) -> list[ScopeRecord]:
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
                self._tell_first(record, now)
            return Granted(token, self._hold, tuple(record.used(now) for record in told))
        return self._queue(token, found, now)

    def _spent(
        self, token: str, asked: list[tuple[ScopeRecord, _Need]], now: int
    ) -> NotBefore | None:
        """The answer to a page of a host whose budget is spent: it waits in no scope."""
        for record, need in asked:
            if need.budget is None or record.day is None:
                continue
            if not need.budget.spent(record.pages, record.bytes):
                continue
            for other, _ in asked:
                if any(one.token == token for one in other.tickets):
                    other.tickets = [one for one in other.tickets if one.token != token]
                    self._tell_first(other, now)
            left = min(record.day + micros(DAY) - now, micros(3600.0))
            return NotBefore(left / 1e6, (record.used(now),))
        return None

    def _due(self, token: str, record: ScopeRecord, need: _Need, now: int) -> tuple[int, bool]:
        """When it may start as far as this scope goes, and whether that may change."""
        free, open_ended = record.free_at(need, now)
        if free > now:
            return free, open_ended
        for ticket in record.tickets:
            if ticket.token == token:
                break
            if ticket.due <= now:  # who was told to come now has a moment to do so
                return ticket.due + micros(LAPSE), True
        return now, False

    def _queue(
        self, token: str, found: list[tuple[ScopeRecord, _Need, int, bool]], now: int
    ) -> NotBefore:
        """Wait in the closed scopes, and keep no open one meanwhile."""
        ask_at = max(due for _, _, due, _ in found)
        certain = not any(open_ended for _, _, _, open_ended in found)
        clocks = []
        for record, need, due, _ in found:
            mine = next((one for one in record.tickets if one.token == token), None)
            if due <= now:
                if mine is not None:
                    record.tickets.remove(mine)
                    self._tell_first(record, now)
                continue
            clocks.append(record.clock(need, now))
            if mine is None:
                if len(record.tickets) >= MAX_TICKETS:
                    ask_at = max(ask_at, due + len(record.tickets) * record.in_force(need, now))
                    continue
                mine = _Ticket(token, need)
                record.tickets.append(mine)
            first = record.tickets[0]
            if mine is not first and not due < first.due < NEVER:
                # Who is first is told of its moment, and so is the next then.
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

    def _tell_first(self, record: ScopeRecord, now: int) -> None:
        """The scope changed: whoever waits first is told when to ask."""
        if not record.tickets:
            return
        first = record.tickets[0]
        free, open_ended = record.free_at(first, now)
        moment = NEVER if open_ended else max(free, now)
        if moment == first.due:
            return
        first.due = moment
        listener = self._listeners.get(first.token.partition(":")[0])
        if listener is not None:
            seconds = min(free - now, micros(3600.0)) / 1e6
            _soon(listener.opened, first.token, max(0.0, seconds))

    def _end(self, end: End, now: int) -> None:
        token = end.token
        for place, record in enumerate(self._of(token, now)):
            hold = record.holds.pop(token, None)
            if end.outcome == "sent" and (hold is None or not hold.headed):
                record.moved(now)
            elif end.outcome == "undone" and hold is not None and record.basis == hold.start:
                record.basis, record.interval, record.guess = hold.before
            if end.outcome != "sent":
                record.pages -= int(hold is not None and hold.counted and record.pages > 0)
            elif end.size and not place:  # the host's own scope
                record.count(now, 0, end.size)
            record.tickets = [one for one in record.tickets if one.token != token]
            self._tell_first(record, now)
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
                _soon(listener.blocked, report)
            self._tell_first(record, now)

    def _pause(self, scopes: Iterable[str], paused: bool) -> None:
        now = self._now()
        for name in scopes:
            record = self._record(name, now)
            record.paused = paused
            for listener in self._listeners.values():
                _soon(listener.paused, name, paused)
            self._tell_first(record, now)

    def _sweep(self, now: int) -> None:
        """Forget what says nothing any more: as long as a process runs, an interval that is asked
        for later counts from the latest request, so a record stays for ten minutes at least."""
        old = now - micros(600.0)
        for name, record in list(self._records.items()):
            record.settle(now)
            if record.holds or record.tickets or record.paused:
                continue
            basis = -1 if record.basis is None else record.basis + record.interval
            if record.day is None and max(basis, record.blocked_until, record.learned_until) < old:
                del self._records[name]
        self._crowded = 2 * len(self._records) + 1024


def _soon(call: Any, *args: Any) -> None:
    """Call in the next turn of the loop: who is told may ask again, and it is not done here."""
    try:
        asyncio.get_running_loop().call_soon(call, *args)
    except RuntimeError:  # without a loop nobody waits
        return
