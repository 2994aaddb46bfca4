"""A ledger in memory, for tests: the model in plain Python for the script of a fleet's ledger.

Times and durations are whole microseconds, as in the script.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from gatekeeper.clock import NEVER, Clock, micros
from gatekeeper.pacing.host_settings import DAY, ScopeSettings
from gatekeeper.pacing.ledger import (
    HOLD,
    LAPSE,
    MAX_TICKETS,
    End,
    Granted,
    HoldView,
    LedgerListener,
    NotBefore,
    Report,
    ScopeClock,
    ScopeRequest,
    ScopeView,
    TakeRequest,
)
from gatekeeper.pacing.scopes import INF, Scope, ScopeHistory


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

    need: ScopeRequest
    due: int = NEVER
    """When it was notified to ask again; from then on the scope is reserved for `LAPSE`."""


class ScopeRecord(msgspec.Struct, eq=False):
    """The ledger's state of one scope. Times are microseconds of the ledger's clock."""

    name: str
    basis: int | None = None
    """The latest start, head or failure."""
    interval: int = 0
    guess: bool = False
    blocked_until: int = 0
    reason: str = ""
    paused: bool = False
    learned: int = 0
    learned_until: int = 0
    day: int | None = None
    """The time of the first page of the day, if there is a budget."""
    pages: int = 0
    bytes: int = 0
    holds: dict[str, _Hold] = {}
    tickets: dict[str, _Ticket] = {}
    """By token, the first in the queue first."""

    def expire(self, now: int) -> None:
        """Remove holds and tickets that have expired, and start a new day if it is due."""
        for token, hold in list(self.holds.items()):
            if hold.end <= now:
                del self.holds[token]
                if not hold.headed:  # its request may have been sent at the last moment
                    self.advance(hold.end)
        tickets = self.tickets.items()
        self.tickets = {token: one for token, one in tickets if one.due + micros(LAPSE) > now}
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

    def in_force(self, need: ScopeRequest, now: int) -> int:
        """Return the interval that applies to a request that asks now."""
        longest = micros(need.interval)
        if need.guess or not self.guess:
            longest = max(longest, self.interval)
        return max(longest, self.learned) if now < self.learned_until else longest

    def free_at(self, need: ScopeRequest, now: int) -> tuple[int, bool]:
        """Return when a request may start, and whether it may prove to be earlier because of a
        head, an end or a resume. It is `Scope.due_at`, except that a hold also ends by itself."""
        interval = self.in_force(need, now)
        scope = Scope(
            self.name,
            ScopeSettings(limit=need.slots),
            basis=-INF if self.basis is None else self.basis,
            interval=max(interval, self.interval),  # of the requests in flight, too
            in_flight=len(self.holds),
            unheaded=sum(not hold.headed for hold in self.holds.values()),
            history=ScopeHistory(blocked_until=self.blocked_until, paused=self.paused),
        )
        open_ended = scope.due_at() == INF
        scope.interval = interval
        free = int(scope.due_at(events=False))
        if self.paused:
            return NEVER, True
        if open_ended:
            free = max(free, min(hold.end for hold in self.holds.values()))
        return free, open_ended

    def clock(self, need: ScopeRequest, now: int) -> ScopeClock:
        """Return the clock as it is reported to a request that may not start now."""
        return ScopeClock(
            self.name,
            None if self.basis is None else (now - self.basis) / 1e6,
            self.in_force(need, now) / 1e6,
            max(0, self.blocked_until - now) / 1e6,
            self.reason if self.blocked_until > now else "",
            self.paused,
        )


class MemoryLedger:
    """A `Ledger` that several gates of one process can share.

    >>> import asyncio
    >>> from gatekeeper import VirtualClock
    >>> clock = VirtualClock()
    >>> ledger = MemoryLedger(clock)
    >>> page = (ScopeRequest("a.example", interval=2.0),)
    >>> ledger.take_nowait([TakeRequest("me:1", page), TakeRequest("me:2", page)])[0]
    Granted(token='me:1', seconds=20.0, clocks=())
    >>> asyncio.run(ledger.end([End("me:1")]))
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
        now = self._now()
        for end in ends:
            self._report(end.reports, now)
        for end in ends:
            self._end(end, now)

    async def renew(self, tokens: Sequence[str]) -> None:
        """Extend the holds by a full time to live from now."""
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
        clock = record.clock(ScopeRequest(record.name), now)
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
        asked = [(self._record(one.scope, now), one) for one in scopes]
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
                record.basis, record.interval, record.guess = now, micros(need.interval), need.guess
                if need.budget is not None:
                    record.count(now, 1, 0)
                    record.holds[token].counted = True
                record.tickets.pop(token, None)
                self._notify_first(record, now)
            return Granted(token, self._hold, tuple(record.used(now) for record in told))
        return self._queue(token, found, now)

    def _spent(
        self, token: str, asked: list[tuple[ScopeRecord, ScopeRequest]], now: int
    ) -> NotBefore | None:
        """Return the answer for a page of a host whose budget is used up, or None if it is not.
        Such a request does not queue in any scope."""
        for record, need in asked:
            if need.budget is None or record.day is None:
                continue
            if not need.budget.spent(record.pages, record.bytes):
                continue
            for other, _ in asked:
                if other.tickets.pop(token, None) is not None:
                    self._notify_first(other, now)
            left = min(record.day + micros(DAY) - now, micros(3600.0))
            return NotBefore(left / 1e6, (record.used(now),))
        return None

    def _due(
        self, token: str, record: ScopeRecord, need: ScopeRequest, now: int
    ) -> tuple[int, bool]:
        """Return when a request may start as far as this scope is concerned, and whether that time
        may change."""
        free, open_ended = record.free_at(need, now)
        if free > now:
            return free, open_ended
        for waiting, ticket in record.tickets.items():
            if waiting == token:
                break
            # The scope is reserved for a request that was notified, or that waits for this very
            # scope, for a longer interval.
            if ticket.due < NEVER and ticket.due <= max(now, record.free_at(ticket.need, now)[0]):
                return ticket.due + micros(LAPSE), True
        return now, False

    def _queue(
        self, token: str, found: list[tuple[ScopeRecord, ScopeRequest, int, bool]], now: int
    ) -> NotBefore:
        """Queue a request in the scopes that are closed, without reserving the open ones."""
        ask_at = max(due for _, _, due, _ in found)
        certain = not any(open_ended for _, _, _, open_ended in found)
        clocks = []
        for record, need, due, _ in found:
            if due <= now:
                if record.tickets.pop(token, None) is not None:
                    self._notify_first(record, now)
                continue
            clocks.append(record.clock(need, now))
            if token not in record.tickets:
                if len(record.tickets) >= MAX_TICKETS:
                    ask_at = max(ask_at, due + len(record.tickets) * record.in_force(need, now))
                    continue
                record.tickets[token] = _Ticket(need)
            place = list(record.tickets).index(token)
            first = next(iter(record.tickets.values()))
            if place and not due < first.due < NEVER:
                # Only the first request is notified of its time; the next one follows then.
                certain = False
                behind = first.due if first.due < NEVER else now + micros(self._hold)
                ask_at = max(ask_at, behind + place * micros(LAPSE))
                if place > 1:
                    ask_at = max(ask_at, now + micros(self._hold))
        for record, _, _, _ in found:
            if (mine := record.tickets.get(token)) is not None:
                mine.due = ask_at if certain else NEVER
        return NotBefore(min(ask_at - now, micros(3600.0)) / 1e6, tuple(clocks))

    def _notify_first(self, record: ScopeRecord, now: int) -> None:
        """Notify the first waiting request of when to ask, since the scope has changed."""
        if not record.tickets:
            return
        token, first = next(iter(record.tickets.items()))
        free, open_ended = record.free_at(first.need, now)
        moment = NEVER if open_ended else max(free, now)
        if moment == first.due:
            return
        first.due = moment
        listener = self._listeners.get(token.partition(":")[0])
        if listener is not None:
            seconds = min(free - now, micros(3600.0)) / 1e6
            _call_soon(listener.opened, token, max(0.0, seconds))

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
            record.tickets.pop(token, None)
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
            free, _ = record.free_at(ScopeRequest(name, guess=True), now)
            if record.day is None and max(free, record.learned_until) < old:
                del self._records[name]
        self._sweep_at = 2 * len(self._records) + 1024


def _call_soon(call: Any, *args: Any) -> None:
    """Call in the next iteration of the loop, since the callback may call the ledger again."""
    with contextlib.suppress(RuntimeError):  # without a loop there are no waiters
        asyncio.get_running_loop().call_soon(call, *args)
