"""Queues."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from enum import IntEnum
from heapq import heapify, heappop, heappush
from math import floor
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

import msgspec

from gatekeeper.pacing.scopes import INF, RobotsInterval, Scope

if TYPE_CHECKING:
    from gatekeeper.pacing.engine import Engine
    from gatekeeper.pacing.ledger import Reservation
else:
    Engine = Any  # it imports this module; `help` looks the name up

__all__ = [
    "PASSED",
    "REFETCH",
    "ROBOTS",
    "Grant",
    "InUse",
    "Offer",
    "OpenLeases",
    "QueuePlace",
    "Queues",
    "Remote",
    "ScopeQueue",
    "Waiter",
]


class InUse(Protocol):
    """A connection."""

    @property
    def closed(self) -> bool:
        """Nothing travels on it any more."""


class Grant(msgspec.Struct, eq=False):
    """The right to send one request now. All moments are monotonic seconds.

    `head` says that the response began, `report` what came of it, and `release` ends it
    and frees the slot; `give_back` ends one whose request never left. A grant that nobody
    ends does so by itself at `expires_at`, and counts as used.
    """

    books: Engine
    scope: Scope
    """The host's scope."""
    url: str
    start_at: float
    expires_at: float
    undo: float
    """The host's clock before this grant: what `pass_on` restores."""
    others: tuple[Scope, ...]
    """The scopes taken beside the host's; `undone` has their clocks before this grant."""
    undone: tuple[float, ...] = ()
    told: bool = False
    """The head was told of by itself, or can't be any more: the grant ended first."""
    reported: bool = False
    open: bool = True
    """The slot is held."""

    refusals: int = 0
    """How often the host had turned us away when this was granted."""
    held_by: Callable[[], InUse | None] | None = None
    """Weakly, what the request travels on: while that is in use, no end comes by itself."""

    def __repr__(self) -> str:
        state = "open" if self.open else "ended"
        return f"<Grant {self.scope.name} {state}, started at {self.start_at:.6f}>"

    @property
    def headed(self) -> bool:
        """The head arrived, as far as is known: nothing waits for it any more."""
        return self.told or self.reported

    @property
    def host(self) -> str:
        """Whose turn it is."""
        return self.scope.name

    @property
    def in_use(self) -> bool:
        """The request is known to be under way."""
        connection = None if self.held_by is None else self.held_by()
        return connection is not None and not connection.closed

    def head(self, now: float | None = None) -> None:
        """The head of the response arrived: the clock counts from here. `now`: see `report`."""
        if self.told or self.reported or not self.open:
            return
        books, scope = self.books, self.scope
        if self.others or scope.gap > books.plain_to or (books.mixed and scope.name in books.mixed):
            books.head(self)
            return
        self.told = True
        self._begun(books.now() if now is None else now)

    def _begun(self, now: float) -> None:
        """The short road: nothing has to be kept or told of it."""
        scope = self.scope
        scope.unheaded -= 1
        if now > scope.basis:  # noqa: PLR1730 - no call here
            scope.basis = now
        if scope.line is not None and scope.in_flight < scope.settings.limit:
            self.books.turns.freed(scope, now)

    def report(
        self,
        status: int | None = None,
        elapsed: float | None = None,
        retry_after: float | str | None = None,
        size: int | None = None,
        *,
        rate_limit: str | None = None,
        now: float | None = None,
    ) -> None:
        """How it went; final, the first wins. The slot stays taken until `release`.

        `status` None with `elapsed` set says that no response came. `elapsed` is seconds
        to the head of the response; `retry_after` the field as it came, or seconds;
        `rate_limit` the RateLimit field as it came; `now` the monotonic moment, for those
        who know it. A report counts even after the lease expired.
        """
        if self.reported:
            return
        self.reported = True
        books, scope = self.books, self.scope
        if (
            status is None
            or status >= 400
            or retry_after is not None
            or rate_limit is not None
            or self.others
            or scope.history is not None
            or scope.gap > books.plain_to
            or (books.mixed and scope.name in books.mixed)
        ):
            books.report(self, status, elapsed, retry_after, size, rate_limit, now)
            return
        # The short road: a page, of which nothing is to be learnt but that its head is here.
        if not self.told:
            if now is None:
                read = books.now  # an attribute that is called is slower to find
                now = read()
            self._begun(now)

    def release(self, now: float | None = None) -> None:
        """End it and free the slot. Without `head` or `report` the clock counts from here:
        the request may have left at any moment. `now`: as in `report`.
        """
        if not self.open:
            return
        books, scope = self.books, self.scope
        if not (self.reported or self.told) or self.others or books.on_idle is not None:
            books.release(self)
            return
        # The short road, where no clock moves.
        self.open = False
        try:
            del books.usual[self]
        except KeyError:
            books.leases.remove(self)
        books.turnstile += 1
        scope.in_flight -= 1
        if scope.line is not None or books.turns.behind:
            if now is None:
                read = books.now
                now = read()
            books.turns.freed(scope, now)

    def give_back(self) -> None:
        """The request never left: the slot is free again, the clock stays as booked."""
        if self.open:
            self.books.give_back(self)

    def pass_on(self) -> None:
        """Its owner was gone before it learnt of it: the turn goes to the next waiter."""
        if self.open:
            self.books.pass_on(self)

    def renew(self, seconds: float) -> None:
        """Set a new end, that many seconds from now."""
        if self.open:
            self.books.renew(self, seconds)


class OpenLeases:
    """Leases with the usual lifetime end in the order of their grants, and a dictionary
    keeps that; those with a lifetime of their own stand in a heap, swept of ended ones.
    """

    __slots__ = ("_alone", "_alone_open", "_hint", "_order", "usual")

    def __init__(self) -> None:
        self.usual: dict[Grant, None] = {}
        """Leases with the usual lifetime are put in here."""
        # No usual lease ends before this; inf: nobody has looked. It is looked for only when
        # it has come: the first key of a dictionary from whose head much was taken is slow to
        # find.
        self._hint = INF
        self._alone: list[tuple[float, int, Grant]] = []
        self._alone_open = 0
        self._order = 0

    def __len__(self) -> int:
        return len(self.usual) + self._alone_open

    def add_alone(self, grant: Grant) -> None:
        """A lease with a lifetime of its own."""
        self._order += 1
        self._alone_open += 1
        heapq.heappush(self._alone, (grant.expires_at, self._order, grant))
        if len(self._alone) > 2 * self._alone_open + 64:
            self._alone = [entry for entry in self._alone if self._counts(entry)]
            heapq.heapify(self._alone)

    def remove(self, grant: Grant) -> None:
        """It ended, or gets a new end."""
        try:
            del self.usual[grant]
        except KeyError:
            self._alone_open -= 1  # one with a lifetime of its own

    def over(self, now: float) -> list[Grant]:
        """Those whose time is over, each once: a lease that was renewed twice to the very same
        end stands in the heap twice."""
        found: dict[Grant, None] = {}
        if self.next() <= now:
            self._hint = INF
            for grant in self.usual:
                if grant.expires_at > now:
                    self._hint = grant.expires_at
                    break
                found[grant] = None
        while self._alone and (self._alone[0][0] <= now or not self._counts(self._alone[0])):
            entry = heapq.heappop(self._alone)
            if self._counts(entry):
                found[entry[2]] = None
        return list(found)

    def next(self) -> float:
        """No lease ends before that moment; inf if none is open."""
        if self._hint == INF and self.usual:
            self._hint = next(iter(self.usual)).expires_at
        return min(self._hint, self._alone[0][0]) if self._alone else self._hint

    @staticmethod
    def _counts(entry: tuple[float, int, Grant]) -> bool:
        return entry[2].open and entry[0] == entry[2].expires_at


REFETCH: Final = "refetch"
"""An admission's answer: the policy is too old to decide; give the turn to robots.txt."""
PASSED: Final = "passed"
"""A waiter's answer: it only wanted to know; the turn goes on to the next."""

Offer = RobotsInterval | Literal["refetch", "passed"]

ROBOTS = float("inf")
"""The priority of robots.txt: before every page of its host."""

_INF = float("inf")
_FEW = 64
_order = itertools.count()


class Waiter:
    """Somebody who waits for a turn of one host. The books call the four methods."""

    __slots__ = ("away", "gone", "priority", "stays", "ttl", "url")

    def __init__(self, url: str, priority: float = 0.0, ttl: float | None = None) -> None:
        self.url = url
        self.priority = priority
        self.ttl = ttl
        self.gone = False
        """Served, refused, cancelled or timed out: passed over when its turn comes."""
        self.away = False
        """Off to fetch robots.txt, its place kept."""
        self.stays = False
        """It wants another turn after this one, behind the others; `deliver` may end that."""

    def offer(self) -> Offer:
        """It is your turn: what does the policy ask for now? May raise a refusal.

        Called more than once if the turn then can't be had after all; the last call counts.
        """
        raise NotImplementedError

    def deliver(self, grant: Grant) -> None:
        """The turn is yours."""
        raise NotImplementedError

    def refuse(self, error: Exception) -> None:
        """There will be no turn."""
        raise NotImplementedError

    def send_away(self) -> None:
        """Fetch robots.txt; your place is kept until you are back."""
        raise NotImplementedError


class QueuePlace(IntEnum):
    """Where a line stands."""

    HELD = 0
    """Not before an event: a lease ends, a host is resumed, an answer comes."""
    TIMED = 1
    """In the heap, at a moment."""
    READY = 2
    """Among those that may go now, first come first served."""
    PARKED = 3
    """In the line of a shared scope that is not free."""
    SERVING = 4
    """Being offered a turn; whoever does that will place it."""


class ScopeQueue:
    """Those who wait for one scope, the most important first, then first come first served.

    The line of a host holds waiters; that of a shared scope holds parked lines of hosts.
    Most lines are one long: `only` is that one, and `queue` a heap for when there are more.
    """

    __slots__ = (
        "alive",
        "away",
        "dead",
        "due",
        "good_until",
        "id",
        "only",
        "parked",
        "parked_in",
        "queue",
        "reservation",
        "reserving",
        "scope",
        "special",
        "state",
    )

    def __init__(self, scope: Scope, number: int) -> None:
        self.scope = scope
        self.id = number
        """The low bits of its entries in the heap."""
        self.state = QueuePlace.HELD
        self.due = -1
        """Microseconds of the one entry in the heap that counts; others are stale."""
        self.only: Waiter | None = None
        self.queue: list[tuple[float, int, Waiter]] | None = None
        self.alive = 0
        """Waiters who stand here; the queue holds some who left, beside them."""
        self.parked: deque[ScopeQueue] | None = None
        self.dead = 0
        """Parked lines in which nobody stands any more."""
        self.parked_in: ScopeQueue | None = None
        self.special = False
        """It waits for more than its scope's clock, or once did: `due_at` has to look."""
        self.away = 0
        """Waiters off to fetch robots.txt. No page goes before they are back."""
        self.reserving = False
        """An answer of the ledger is awaited."""
        self.reservation: Reservation | None = None
        self.good_until = _INF
        """Others count from the reserved start: used later, it would be too close to theirs."""

    def add(self, waiter: Waiter) -> None:
        """Join, behind those of the same priority."""
        self.alive += 1
        if self.queue is None:
            first = self.only
            if first is None:
                self.only = waiter
                return
            self.queue = [(-first.priority, next(_order), first)]
            self.only = None
        heapq.heappush(self.queue, (-waiter.priority, next(_order), waiter))

    def first(self) -> Waiter | None:
        """Who is next; those who left are dropped on the way."""
        if self.queue is None:
            if self.only is not None and self.only.gone:
                self.only = None
            return self.only
        while self.queue:
            waiter = self.queue[0][2]
            if not waiter.gone:
                return waiter
            heapq.heappop(self.queue)
        self.queue = None
        return None

    def sweep(self) -> None:
        """Drop those who left, now and then: each time that they are a fifth of the queue."""
        queue = self.queue
        if queue is not None and len(queue) > self.alive + self.alive // 4 + _FEW:
            self.queue = [entry for entry in queue if not entry[2].gone]
            heapq.heapify(self.queue)

    def everybody(self) -> list[Waiter]:
        """All who stand here, in no order."""
        if self.queue is not None:
            return [entry[2] for entry in self.queue]
        return [] if self.only is None else [self.only]

    def to_the_end(self, waiter: Waiter) -> None:
        """The first had its turn, and stays for another."""
        if self.queue and self.queue[0][2] is waiter:
            heapq.heapreplace(self.queue, (-waiter.priority, next(_order), waiter))

    def drop(self, waiter: Waiter) -> None:
        """It was served. If it is not the first any more, it is dropped when it comes up."""
        if self.only is waiter:
            self.only = None
        elif self.queue and self.queue[0][2] is waiter:
            heapq.heappop(self.queue)

    def due_at(self) -> float:
        """When its first may go, as far as this scope alone can tell; inf: after an event."""
        if not self.special:
            return self.scope.due_at()
        if self.reserving:
            return _INF
        if self.away:
            first = self.first()
            if first is None or first.priority != ROBOTS:
                return _INF  # the turn belongs to the robots fetch
        due = self.scope.due_at()
        if self.reservation is not None and self.reservation.start_at > due:
            return self.reservation.start_at
        return due


class Remote(Protocol):
    """A ledger beyond this process, asked after the books have agreed."""

    def request(self, line: ScopeQueue, gaps: tuple[float, ...]) -> None:
        """Ask for a start; the answer comes back through `Queues.answered`."""

    def push(self, scope: Scope, until: float, reason: str) -> None:
        """Tell the others: no start of this scope before that moment."""


_ID_BITS = 24
_ID_MASK = (1 << _ID_BITS) - 1
_NEAR = -2
"""A line's `due` while its exact moment stands in `_near`."""
_MAX_SPARE = 4096
"""Lines kept for those who come next: a host that somebody waits for now and then needs none
of its own."""
_FEW_PARKED = 64
_HELD, _TIMED, _READY, _PARKED, _SERVING = QueuePlace


class Queues:
    """Lines and the order in which they are served."""

    def __init__(self, books: Engine, rearm: Callable[[float], None]) -> None:
        self.books = books
        self.armed = INF
        """The moment for which the shell's one timer is set."""
        self.halted = False
        """Nobody gets a turn: not open yet, or closing."""
        self.waiting = 0
        self.remote: Remote | None = None
        self._rearm = rearm
        self._heap: list[int] = []
        self._lines: list[ScopeQueue | None] = []
        self._free: list[int] = []
        self._spare: list[ScopeQueue] = []
        self.ready: deque[ScopeQueue] = deque()
        self._running = False
        self.behind = False
        """Queues are due that could not be given: too many in flight, or halted."""
        self._limit, self._limit_of = 0, -INF
        self._crowded = 1024
        """Entries at which stale ones are swept out."""
        self._near: list[tuple[float, int]] = []
        """Exact moments of lines whose hint came up, less than a microsecond early."""

    # --- lines --------------------------------------------------------------------------

    def join(self, scope: Scope, waiter: Waiter, now: float) -> None:
        """Stand in the host's line. `run` must follow before anything is awaited."""
        line = scope.line or self._new_line(scope)
        if line.parked_in is not None and not line.alive:
            line.parked_in.dead -= 1
        line.add(waiter)
        self.waiting += 1
        if line.state is _HELD:
            self._place(line, line.due_at(), now)

    def leave(self, scope: Scope, waiter: Waiter, now: float) -> bool:
        """Cancelled or timed out: its place goes to the next. True: `run` must follow.

        It costs the same however many wait: when the line's turn comes does not depend on who
        stands first, so that nothing moves as long as somebody does.
        """
        if waiter.gone:
            return False
        waiter.gone = True
        self.waiting -= 1
        line = scope.line
        if line is None:
            return False
        line.alive -= 1
        waits = line.state is _HELD or line.state is _TIMED
        if not line.alive:
            if waits:
                if waiter.away:
                    line.away -= 1
                self._retire(line)
            elif line.parked_in is not None:
                self._left_parked(line.parked_in)
        line.sweep()
        if waiter.away:
            waiter.away = False
            if line.alive or not waits:
                line.away -= 1
        if not (line.special and line.alive and waits):
            return False  # of a line in another queue, whoever takes it out sees who is left
        self._place(line, line.due_at(), now)
        return True

    def _left_parked(self, theirs: ScopeQueue) -> None:
        """One more of the lines that are parked there is empty: too many are swept out."""
        theirs.dead += 1
        parked = theirs.parked
        if parked is None or theirs.dead <= len(parked) // 4 + _FEW_PARKED:
            return
        theirs.dead = 0
        for line in [line for line in parked if not line.alive]:
            line.parked_in = None
            self._retire(line)
        theirs.parked = deque(line for line in parked if line.alive)

    def back(self, scope: Scope, waiter: Waiter, now: float) -> None:
        """A waiter's robots.txt is here: it stands at its old place. `run` must follow."""
        if waiter.away and scope.line is not None:
            waiter.away = False
            scope.line.away -= 1
            self.requeue(scope, now)

    def requeue(self, scope: Scope, now: float) -> None:
        """Something about this scope changed: look again at who waits for it."""
        line = scope.line
        if line is not None and (line.state is _HELD or line.state is _TIMED):
            due = line.due_at() if line.special else scope.due_at()
            self._place(line, due, now)

    def freed(self, scope: Scope, now: float) -> None:
        """A host may have its next turn sooner: whoever waits for it, or for any, has a look."""
        line = scope.line
        if line is not None:
            if scope.in_flight or line.special or line.state is not _HELD or scope.history:
                if scope.in_flight < scope.settings.limit:
                    self.requeue(scope, now)
            else:
                self._place(line, scope.basis + scope.gap, now)  # the same, without a call
        if self.ready or self.behind:
            self.run(now)

    def look_again(self, now: float) -> None:
        """Something about every scope changed. `run` must follow."""
        for line in self._lines:
            if line is not None:
                self.requeue(line.scope, now)

    def _new_line(self, scope: Scope) -> ScopeQueue:
        if self._spare:
            line = self._spare.pop()
            line.scope = scope
        elif self._free:
            number = self._free.pop()
            line = self._lines[number] = ScopeQueue(scope, number)
        else:
            line = ScopeQueue(scope, len(self._lines))
            self._lines.append(line)
        scope.line = line
        return line

    def _retire(self, line: ScopeQueue) -> None:
        """Nobody stands there; no queue holds it (a stale heap entry is harmless)."""
        line.scope.line = None
        line.only = None
        line.alive = 0
        if line.state is _TIMED:
            self._left_behind()
        line.state = _HELD
        # One that an answer may still come for is not given to another host.
        if line.special or line.parked is not None or len(self._spare) >= _MAX_SPARE:
            self._lines[line.id] = None
            self._free.append(line.id)
        else:
            line.queue = None
            self._spare.append(line)

    def _place(self, line: ScopeQueue, due: float, now: float) -> None:
        """Put a line that no queue holds where its clock says: TIMED, READY or HELD."""
        if due > now and due != INF:
            entry = floor(due * 1e6) << _ID_BITS | line.id
            if line.state is _TIMED:
                if line.due == entry:
                    return
                self._left_behind()
            line.state = _TIMED
            if due - now < 2e-6 and entry < self._limit_at(now):
                # A hint is rounded down, a clock is not: wait for its exact moment.
                line.due = _NEAR
                heappush(self._near, (due, line.id))
            else:
                line.due = entry
                heappush(self._heap, entry)
            if due < self.armed:
                self.arm(due)
            return
        if line.state is _TIMED:
            self._left_behind()
        if due > now:
            line.state = _HELD
        else:
            line.state = _READY
            line.due = floor(now * 1e6) << _ID_BITS
            self.ready.append(line)

    def arm(self, due: float) -> None:
        """Something is due then: make sure the timer is not later."""
        if due < self.armed:
            self.armed = due
            self._rearm(due)

    def _left_behind(self) -> None:
        """A hint became stale: its line moved before its moment. Too many are swept out."""
        if len(self._heap) > self._crowded:
            self._heap[:] = [
                line.due
                for line in self._lines
                if line is not None and line.state is _TIMED and line.due != _NEAR
            ]
            heapify(self._heap)
            self._crowded = 2 * len(self._heap) + 1024

    def next_due(self) -> float:
        """The moment of the next hint, inf if there is none."""
        if self.behind:
            return INF  # there is no room: the end of a lease is what it takes
        first = INF
        if self._heap:
            # A hint is rounded down: the line itself knows the exact moment.
            entry = self._heap[0]
            hint = (entry >> _ID_BITS) / 1_000_000
            line = self._lines[entry & _ID_MASK]
            exact = hint if line is None else line.due_at()
            first = min(max(hint, exact), hint + 1e-6)
        return min(first, self._near[0][0]) if self._near else first

    # --- the turn -----------------------------------------------------------------------

    def run(self, now: float) -> None:
        """Give every turn that can be had now, in the order in which they fell due.

        Callbacks may join, leave and report meanwhile.
        """
        if self._running:
            return  # the loop below sees what they did
        self._running = True
        self.behind = False
        books, ready, heap = self.books, self.ready, self._heap
        limit = self._limit if self._limit_of <= now else self._limit_at(now)
        try:
            while True:
                if books.granted >= books.turnstile:
                    self.behind = True
                    return
                if ready and (not heap or ready[0].due <= heap[0]):
                    self._serve(ready.popleft(), now)
                elif heap and (heap[0] < limit or heap[0] < (limit := self._limit_at(now))):
                    entry = heappop(heap)
                    line = self._lines[entry & _ID_MASK]
                    if line is not None and line.due == entry and line.state is _TIMED:
                        self._serve(line, now)
                elif self._near and self._near[0][0] <= now:
                    line = self._lines[heappop(self._near)[1]]
                    if line is not None and line.due == _NEAR and line.state is _TIMED:
                        self._serve(line, now)
                else:
                    return
        finally:
            self._running = False

    def _limit_at(self, now: float) -> int:
        """Hints below this have come up by then; an older one will do where it is enough."""
        self._limit_of = now
        self._limit = floor(now * 1e6 + 1.5) << _ID_BITS
        return self._limit

    def _serve(self, line: ScopeQueue, now: float) -> None:
        """Offer one turn; whatever comes of it, the line is then in its next place."""
        line.state = _SERVING
        if line.parked is not None:
            self._serve_shared(line, now)
            return
        scope, shared = line.scope, line.scope.shared
        while True:
            waiter = line.only
            if (waiter is None or waiter.gone) and (waiter := line.first()) is None:
                self._retire(line)
                break
            if line.special or scope.in_flight or scope.history is not None:
                due = line.due_at()
            else:
                due = scope.basis + scope.gap  # the same, without a call
            if due > now:
                self._place(line, due, now)
                break
            if (shared or self.books.frozen) and self._hindered(line, waiter, now):
                break
            if self._offer(line, scope, waiter, now) and line.alive:
                # One turn at a time: other hosts are ready as well.
                if scope.in_flight < scope.settings.limit:
                    self._place(line, line.due_at(), now)
                else:
                    line.state = _HELD
                break
        if shared:
            for other in shared:
                self.requeue(other, now)

    def _hindered(self, line: ScopeQueue, waiter: Waiter, now: float) -> bool:
        """Does something other than the host's own clock forbid it? Then the line waits there."""
        books = self.books
        if books.frozen and waiter.priority != ROBOTS and line.scope.name in books.unanswered:
            line.state = _HELD  # until the thaw; a robots.txt that joins is placed anew
            return True
        for other in line.scope.shared:
            if other.due_at() > now:
                self._park(line, other, now)
                return True
        return False

    def _offer(self, line: ScopeQueue, scope: Scope, waiter: Waiter, now: float) -> bool:
        """Offer the turn to one waiter; True if it was taken."""
        try:
            wish = waiter.offer()
            if not isinstance(wish, RobotsInterval):
                self._declined(line, waiter, wish)
                return False
            if self.remote is not None and not self._reserved(line, wish, now, self.remote):
                return False
            grant = self.books.try_take(scope, wish, now, waiter.url, waiter.ttl)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the waiter's
            self.books.counters.refused += 1
            self._served(line, waiter)
            waiter.refuse(error)
            return False
        if grant is None:
            return False
        line.reservation = None
        if not waiter.stays:
            self._served(line, waiter)
        elif line.queue is not None:
            line.to_the_end(waiter)
        waiter.deliver(grant)
        return True

    def _declined(self, line: ScopeQueue, waiter: Waiter, answer: Offer) -> None:
        """No wish: the waiter goes to fetch robots.txt, or only wanted to know."""
        if answer == REFETCH:
            waiter.away = True
            line.away += 1
            line.special = True
            self.books.counters.refetches += 1
            waiter.send_away()
        else:
            self._served(line, waiter)

    def _served(self, line: ScopeQueue, waiter: Waiter) -> None:
        if not waiter.gone:
            waiter.gone = True
            self.waiting -= 1
            line.alive -= 1
        line.drop(waiter)

    def refuse_all(self, error: Callable[[], Exception]) -> None:
        """Nobody will get a turn any more. Each is told with an error of its own: one that many
        tasks raise would keep a traceback of all of them.
        """
        for line in self._lines:
            for waiter in line.everybody() if line is not None else ():
                if line is not None and not waiter.gone:
                    self._served(line, waiter)
                    waiter.refuse(error())

    # --- shared scopes ------------------------------------------------------------------

    def _park(self, line: ScopeQueue, other: Scope, now: float) -> None:
        """Stand in the shared scope's own line, which wakes one at a time."""
        theirs = other.line or self._new_line(other)
        if theirs.parked is None:
            theirs.parked = deque()
        theirs.parked.append(line)
        line.parked_in = theirs
        line.state = _PARKED
        self.requeue(other, now)

    def _serve_shared(self, line: ScopeQueue, now: float) -> None:
        """A shared scope came free: the first parked line gets its chance."""
        parked = line.parked
        if parked and line.scope.due_at() <= now:
            first = parked.popleft()
            first.parked_in = None
            if not first.alive:
                line.dead -= 1
            self._serve(first, now)
        parked = line.parked
        if parked:
            self._place(line, line.due_at(), now)
        else:
            self._retire(line)

    # --- a ledger beyond ----------------------------------------------------------------

    def _reserved(self, line: ScopeQueue, wish: RobotsInterval, now: float, remote: Remote) -> bool:
        """Is there a start of the ledger to be used now? Otherwise one is asked for."""
        held = line.reservation
        if held is not None and held.start_at <= now <= line.good_until:
            return True
        # Others count from its start: used late, it would come too close to theirs.
        line.reservation = None
        line.reserving = line.special = True
        own = self.books.interval(line.scope, wish, now)
        others = (other.settings.default for other in line.scope.shared)
        remote.request(line, (own, *others))
        return False

    def answered(
        self, line: ScopeQueue, reservation: Reservation | None, good_until: float, now: float
    ) -> None:
        """The ledger's answer, good until a moment, or None to ask again. `run` must follow."""
        line.reserving = False
        if line.scope.line is line:  # otherwise everybody left: the reservation is spent
            line.reservation, line.good_until = reservation, good_until
            self.requeue(line.scope, now)

    def void_reservations(self) -> None:
        """The ledger lost its book: what it promised before is worth nothing."""
        for line in self._lines:
            if line is not None:
                line.reservation = None
