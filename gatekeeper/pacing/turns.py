"""Whose turn it is: lines, the heap of due moments, and those ready to go. No I/O.

A line with a live waiter is in exactly one place: READY (in the deque), TIMED (one live
entry in the heap), PARKED (in the deque of one shared scope), SERVING (in `_serve`), or
HELD, and then the event it waits for requeues it: a head or end of a lease, a resume, a
finished robots fetch, an answer of the ledger.

A heap entry is only a hint, a packed integer of microseconds and a line's number: when it
comes up the clocks are read anew. So a new delay or block never touches the heap.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from math import floor
from typing import TYPE_CHECKING

from gatekeeper.pacing.intervals import Wish
from gatekeeper.pacing.ledger import INF, Reservation, Scope
from gatekeeper.pacing.waiters import REFETCH, ROBOTS, Line, LineState, Offer, Remote, Waiter

if TYPE_CHECKING:
    from gatekeeper.pacing.books import Books

__all__ = ["Turns"]

_ID_BITS = 24
_ID_MASK = (1 << _ID_BITS) - 1
_NEAR = -2
"""A line's `due` while its exact moment stands in `_near`."""
_MAX_SPARE = 4096
"""Lines kept for those who come next: a host that somebody waits for now and then needs none
of its own."""
_FEW_PARKED = 64
_HELD, _TIMED, _READY, _PARKED, _SERVING = LineState


class Turns:
    """Lines and the order in which they are served."""

    def __init__(self, books: Books, rearm: Callable[[float], None]) -> None:
        self.books = books
        self.armed = INF
        """The moment for which the shell's one timer is set."""
        self.halted = False
        """Nobody gets a turn: not open yet, or closing."""
        self.waiting = 0
        self.remote: Remote | None = None
        self._rearm = rearm
        self._heap: list[int] = []
        self._lines: list[Line | None] = []
        self._free: list[int] = []
        self._spare: list[Line] = []
        self.ready: deque[Line] = deque()
        self._running = False
        self.behind = False
        """Turns are due that could not be given: too many in flight, or halted."""
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

    def _left_parked(self, theirs: Line) -> None:
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

    def _new_line(self, scope: Scope) -> Line:
        if self._spare:
            line = self._spare.pop()
            line.scope = scope
        elif self._free:
            number = self._free.pop()
            line = self._lines[number] = Line(scope, number)
        else:
            line = Line(scope, len(self._lines))
            self._lines.append(line)
        scope.line = line
        return line

    def _retire(self, line: Line) -> None:
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

    def _place(self, line: Line, due: float, now: float) -> None:
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

    def _serve(self, line: Line, now: float) -> None:
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

    def _hindered(self, line: Line, waiter: Waiter, now: float) -> bool:
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

    def _offer(self, line: Line, scope: Scope, waiter: Waiter, now: float) -> bool:
        """Offer the turn to one waiter; True if it was taken."""
        try:
            wish = waiter.offer()
            if not isinstance(wish, Wish):
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

    def _declined(self, line: Line, waiter: Waiter, answer: Offer) -> None:
        """No wish: the waiter goes to fetch robots.txt, or only wanted to know."""
        if answer == REFETCH:
            waiter.away = True
            line.away += 1
            line.special = True
            self.books.counters.refetches += 1
            waiter.send_away()
        else:
            self._served(line, waiter)

    def _served(self, line: Line, waiter: Waiter) -> None:
        if not waiter.gone:
            waiter.gone = True
            self.waiting -= 1
            line.alive -= 1
        line.drop(waiter)

    def refuse_all(self, error: Exception) -> None:
        """Nobody will get a turn any more."""
        for line in self._lines:
            for waiter in line.everybody() if line is not None else ():
                if line is not None and not waiter.gone:
                    self._served(line, waiter)
                    waiter.refuse(error)

    # --- shared scopes ------------------------------------------------------------------

    def _park(self, line: Line, other: Scope, now: float) -> None:
        """Stand in the shared scope's own line, which wakes one at a time."""
        theirs = other.line or self._new_line(other)
        if theirs.parked is None:
            theirs.parked = deque()
        theirs.parked.append(line)
        line.parked_in = theirs
        line.state = _PARKED
        self.requeue(other, now)

    def _serve_shared(self, line: Line, now: float) -> None:
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

    def _reserved(self, line: Line, wish: Wish, now: float, remote: Remote) -> bool:
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
        self, line: Line, reservation: Reservation | None, good_until: float, now: float
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
