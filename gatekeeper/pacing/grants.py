"""Leases that were granted: the life of each, and those that are open in the order of their ends.

A `Grant` moves the clocks of its scopes and frees their slots; what follows for those who wait, and
what a report teaches, is for the `Engine` that granted it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Any, Protocol
from weakref import ref

import msgspec

from gatekeeper.pacing.ledger import Outcome
from gatekeeper.pacing.scopes import INF, PROVEN, Scope

_order = itertools.count()


class InUse(Protocol):
    """A connection."""

    @property
    def closed(self) -> bool:
        """Nothing travels on it any more."""


class Grant(msgspec.Struct, eq=False):
    """The right to send one request now: what a `Lease` holds. Moments are monotonic seconds.

    `head` says that the response began, `report` what came of it, and `release` ends it
    and frees the slots; `give_back` ends one whose request never left. A grant that nobody
    ends does so by itself at `expires_at`, and counts as used.
    """

    engine: Any
    """The `Engine` that granted it."""
    scope: Scope
    """The host's scope."""
    url: str
    start_at: float
    expires_at: float
    basis_before: float
    """The host's `basis` before this grant: what `pass_on` restores."""
    others: tuple[Scope, ...]
    """The scopes taken beside the host's; `others_before` has their basis before this grant."""
    unproven: int = 0
    """Not 0: it counts among the engine's `unproven` until its head is here."""
    more: bool = False
    """It took more than the host's own slot: `others`, or a `hold`."""
    others_before: tuple[float, ...] = ()
    told: bool = False
    """The head was told of by itself, or can't be any more: the grant ended first."""
    reported: bool = False
    open: bool = True
    """The slots are held."""
    refusals: int = 0
    """How often the host had turned us away when this was granted."""
    held_by: Callable[[], InUse | None] | None = None
    """A weak reference, see `hold_while`."""
    hold: Any = None  # a `Hold`, where a ledger beyond this process granted it
    counted: bool = False  # a page of the host's budget

    def __repr__(self) -> str:
        state = "open" if self.open else "ended"
        return f"<Grant {self.scope.name} {state}, started at {self.start_at:.6f}>"

    @property
    def headed(self) -> bool:
        """The head arrived, as far as is known: nothing waits for it any more."""
        return self.told or self.reported

    @property
    def in_use(self) -> bool:
        """The request is known to be under way."""
        connection = None if self.held_by is None else self.held_by()
        return connection is not None and not connection.closed

    def hold_while(self, connection: InUse | None) -> None:
        """While that connection is in use no end comes by itself; to drop it frees it, too."""
        self.held_by = None if connection is None else ref(connection)

    def book(self, hold: Any) -> None:
        """It is granted by that `Hold` of a ledger beyond this process."""
        self.hold = hold
        self.more = True

    @property
    def stale(self) -> bool:
        """Must a request that was not sent yet not be sent any more? See `Hold.stale`."""
        return self.hold is not None and bool(self.hold.stale(self.engine.now()))

    def head(self, now: float | None = None) -> None:
        """The head of the response arrived: the clocks count from here. `now`: see `report`."""
        if self.told or self.reported or not self.open:
            return
        if now is None:
            now = self.engine.now()
        self.told = True
        self._begin(now)
        if self.scope.to_prove:
            self.scope.to_prove -= 1
        self._moved(now)

    def report(
        self,
        status: int | None = None,
        elapsed: float | None = None,
        retry_after: float | str | None = None,
        size: int | None = None,
        rate_limit: str | None = None,
        now: float | None = None,
    ) -> None:
        """How it went; final, the first wins. The slots stay taken until `release`.

        `status` None with `elapsed` set says that no response came. `elapsed` is seconds
        to the head of the response; `retry_after` the field as it came, or seconds;
        `rate_limit` the RateLimit field as it came; `now` the monotonic moment, for those
        who know it. A report counts even after the lease expired.
        """
        if self.reported:
            return
        self.reported = True
        engine, scope = self.engine, self.scope
        if (
            status is None
            or status >= 400
            or retry_after is not None
            or rate_limit is not None
            or scope.history is not None
            or engine.learns_latency
        ):
            now = engine.now() if now is None else now
            self._teach(status, elapsed, retry_after, size, rate_limit, now)
        elif not self.told:  # what most reports say: the head is here, and nothing else
            if now is None:
                now = engine.now()
            if self.more:
                self._begin(now)
            else:  # `_begin`, without a call: each request comes this way
                scope.unheaded -= 1
                if now > scope.basis:  # noqa: PLR1730
                    scope.basis = now
                if self.unproven:
                    engine.count_out(self, now)
            if scope.to_prove:
                scope.to_prove -= 1
            if (
                self.more
                or engine.keeper is not None
                or (scope.queue is not None and scope.in_flight < scope.settings.limit)
            ):
                self._moved(now)

    def _teach(
        self,
        status: int | None,
        elapsed: float | None,
        retry_after: float | str | None,
        size: int | None,
        rate_limit: str | None,
        now: float,
    ) -> None:
        """Its report may teach something about the host."""
        began = not self.told
        if began:
            self._begin(now)
            if status is None and elapsed is not None:
                self.scope.to_prove = PROVEN
            elif self.scope.to_prove:
                self.scope.to_prove -= 1
        elif status is None:
            elapsed = None  # an answer began: what ended it is no failure of the host
        try:
            self.engine.observe(self, status, elapsed, retry_after, size, rate_limit, now)
        finally:
            self._moved(now, began)

    def _moved(self, now: float, began: bool = True) -> None:
        """Its clocks count from now, if it `began`: they are kept, and whoever waits for another
        slot of the host, or for a scope that it shares, looks again."""
        engine, scope = self.engine, self.scope
        try:
            if began and engine.keeper is not None:
                engine.keep(self, now, engine.keeper.remember)
        finally:
            if self.others or (scope.queue is not None and scope.in_flight < scope.settings.limit):
                engine.freed(self, now)

    def release(self, now: float | None = None) -> None:
        """End it and free the slots. Without `head` or `report` the clocks count from here:
        the request may have left at any moment. `now`: see `report`."""
        if not self.open:
            return
        engine, scope = self.engine, self.scope
        began = None  # the moment, if its clocks begin to count now
        if not (self.reported or self.told):
            began = now = engine.now() if now is None else now
            self.told = True
            self._begin(began)
        self.open = False
        try:
            del engine.usual[self]
        except KeyError:
            engine.leases.remove(self)
        engine.grant_limit += 1
        scope.in_flight -= 1
        if self.more:
            self._end_hold("sent")
            for other in self.others:
                other.in_flight -= 1
        try:
            if began is not None and engine.keeper is not None:
                engine.keep(self, began, engine.keeper.remember)
        finally:
            if self.more or scope.queue is not None or engine.behind:
                engine.freed(self, engine.now() if now is None else now)

    def give_back(self) -> None:
        """The request never left: the slots are free again, the clocks stay as they were set."""
        if self.open and not self.headed:
            self.engine.counters.given_back += 1
            self._withdraw("given back")
        self.release()

    def pass_on(self) -> None:
        """Its owner was gone before it learnt of it: the next waiter of the host may start."""
        queue = self.scope.queue
        if not self.open or self.headed or queue is None or queue.first() is None:
            self.give_back()
            return
        self.engine.counters.passed_on += 1
        # Nothing was sent since: the next one starts where this one would have.
        self.undo()

    def undo(self) -> None:
        """End it as if it had not been."""
        self._withdraw("undone")
        for one, basis in (
            (self.scope, self.basis_before),
            *zip(self.others, self.others_before, strict=True),
        ):
            if one.basis == self.start_at:  # no other lease started since
                one.basis = basis
        self.release()

    def renew(self, seconds: float) -> None:
        """Set a new end, that many seconds from now."""
        if self.open:
            self.engine.leases.remove(self)
            self.expires_at = self.engine.now() + max(0.0, seconds)
            self.engine.leases.add_alone(self)
            self.engine.timer.set_no_later(self.expires_at)

    def _withdraw(self, outcome: Outcome) -> None:
        """No request was sent, and none will be: no head is awaited."""
        self.told = self.reported = True
        self._end_hold(outcome)
        if self.counted:
            self.scope.count(self.start_at, pages=-1)
        for scope in (self.scope, *self.others):
            scope.unheaded -= 1
        self.engine.count_out(self, self.engine.now())

    def _end_hold(self, outcome: Outcome) -> None:
        hold, self.hold = self.hold, None
        if hold is not None and self.engine.remote is not None:
            self.engine.remote.end(hold, outcome)

    def _begin(self, now: float) -> None:
        """The head is here, or the request is over: the clocks count from now."""
        scope = self.scope
        scope.unheaded -= 1
        scope.basis = max(scope.basis, now)
        if self.more:
            for other in self.others:
                other.unheaded -= 1
                other.basis = max(other.basis, now)
            if self.hold is not None and self.engine.remote is not None:
                self.engine.remote.head(self.hold)
        if self.unproven:
            self.engine.count_out(self, now)


class OpenLeases:
    """The open leases, in the order of their ends.

    Leases of the usual lifetime end in the order of their grants, and a dictionary keeps that;
    those with a lifetime of their own stand in a heap, swept of ended ones.
    """

    __slots__ = ("_alone", "_alone_open", "_hint", "usual")

    def __init__(self) -> None:
        self.usual: dict[Grant, None] = {}
        """Leases of the usual lifetime are put in here."""
        # No usual lease ends before this; inf: nobody has looked. It is looked for only when
        # it has come: the first key of a dictionary from whose head much was taken is slow to
        # find.
        self._hint = INF
        self._alone: list[tuple[float, int, Grant]] = []
        self._alone_open = 0

    def __len__(self) -> int:
        return len(self.usual) + self._alone_open

    def add_alone(self, grant: Grant) -> None:
        """A lease with a lifetime of its own."""
        self._alone_open += 1
        heappush(self._alone, (grant.expires_at, next(_order), grant))
        if len(self._alone) > 2 * self._alone_open + 64:
            self._alone = [entry for entry in self._alone if self._counts(entry)]
            heapify(self._alone)

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
            entry = heappop(self._alone)
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
