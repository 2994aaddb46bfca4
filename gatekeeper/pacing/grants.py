"""`Grant`: the life of a granted lease; and what an audit record is told (`PacingAudit`).

A `Grant` moves the clocks of its scopes and frees their slots. What follows for the waiters, and
what a report teaches about the host, is decided by the `Engine` that granted the lease.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Protocol
from weakref import ref

import msgspec

from gatekeeper.config import PacingConfig
from gatekeeper.pacing.ledger import Outcome
from gatekeeper.pacing.scopes import PROVEN, Scope

_MAX_BODY = 1 << 50
"""Maximum bytes that one response counts for, so that a day's sum fits into any storage."""


class InUse(Protocol):
    """A connection."""

    @property
    def closed(self) -> bool:
        """True once the connection is closed or was released."""


class Grant(msgspec.Struct, eq=False):
    """The right to send one request now, as a `Lease` holds it. Times are monotonic seconds.

    `head` says that the response started, `report` how the request went, and `release` ends the
    grant and frees the slots. `give_back` ends a grant whose request was never sent. A grant that
    is not ended expires at `expires_at`, and counts as used.
    """

    engine: Any
    """The `Engine` that granted it."""
    scope: Scope
    """The host's scope."""
    url: str
    start_at: float
    expires_at: float
    bases_before: tuple[float, ...]
    """The `basis` of the host and of each of `others` before this grant; `undo` restores them."""
    others: tuple[Scope, ...]
    """Shared scopes taken together with the host's own."""
    unproven: int = 0
    """If not 0, the grant counts among the engine's `unproven` leases until its head arrives."""
    head_reported: bool = False
    """The head was reported separately by `head`, or no longer can be: the grant has ended."""
    reported: bool = False
    open: bool = True
    """The grant still holds its slots."""
    refusals: int = 0
    """How often the host had refused requests when this was granted."""
    held_by: Callable[[], InUse | None] | None = None
    """A weak reference to the connection of `hold_while`."""
    hold: Any = None  # the `Hold` of the remote ledger that granted this, if any
    counts_as_page: bool = False  # of the host's budget
    counts_bytes: ClassVar[bool] = False
    """Whether the bytes of the response count even without a budget of the host."""

    def __repr__(self) -> str:
        state = "open" if self.open else "ended"
        return f"<Grant {self.scope.name} {state}, started at {self.start_at:.6f}>"

    @property
    def headed(self) -> bool:
        """True once the head has arrived, or nothing waits for it any longer."""
        return self.head_reported or self.reported

    @property
    def in_use(self) -> bool:
        """True if the request is known to be in flight."""
        connection = None if self.held_by is None else self.held_by()
        return connection is not None and not connection.closed

    def received(self, size: int) -> None:
        """Count the bytes of the response against the budget of the host, if it has one."""
        scope, engine = self.scope, self.engine
        if scope.settings.budget is None:
            return
        size = min(max(0, size), _MAX_BODY)  # a caller may report any number
        scope.count_usage(self.start_at, size=size)
        if self.hold is not None:
            self.hold.size += size
        if engine.promises is not None:
            engine.promises.remember(scope, engine.now())

    def hold_while(self, connection: InUse | None) -> None:
        """Do not expire while this connection is in use, open and referenced. None: no longer."""
        self.held_by = None if connection is None else ref(connection)

    @property
    def stale(self) -> bool:
        """True if a request that was not sent yet must not be sent any more. See `Hold.stale`."""
        return self.hold is not None and bool(self.hold.stale(self.engine.now()))

    def head(self, now: float | None = None) -> None:
        """Note that the response head arrived: the clocks count from here. `now`: see `report`."""
        if self.head_reported or self.reported or not self.open:
            return
        if now is None:
            now = self.engine.now()
        self.head_reported = True
        self._start_clocks(now)
        if self.scope.to_prove:
            self.scope.to_prove -= 1
        self.engine.freed(self, now)

    def report(
        self,
        status: int | None = None,
        elapsed: float | None = None,
        retry_after: float | str | None = None,
        rate_limit: str | None = None,
        now: float | None = None,
    ) -> None:
        """Report how the request went. The first report is final; the slots stay taken until
        `release`, and a report counts even after the lease expired.

        `status` None with `elapsed` set means that no response came. `elapsed` is seconds until
        the response head, `retry_after` the field as received or seconds, `rate_limit` the
        RateLimit field as received, and `now` the monotonic time if the caller has read it.
        """
        if self.reported:
            return
        self.reported = True
        engine, scope = self.engine, self.scope
        if now is None:
            now = engine.now()
        if not self.head_reported:
            self._start_clocks(now)
            if status is None and elapsed is not None:
                scope.to_prove = PROVEN
            elif scope.to_prove:
                scope.to_prove -= 1
        elif status is None:
            elapsed = None  # A response had started: its end is not counted as a failed request.
        try:
            if (
                status is None
                or status >= 400
                or retry_after is not None
                or rate_limit is not None
                or scope.history is not None
                or engine.pacing.latency_factor > 0
            ):
                engine.observe(self, status, elapsed, retry_after, rate_limit, now)
        finally:
            if self.others or (scope.queue is not None and scope.in_flight < scope.settings.limit):
                engine.freed(self, now)

    def release(self, now: float | None = None) -> None:
        """End the grant and free its slots. Without `head` or `report` the clocks count from here,
        since the request may have been sent at any moment. `now`: see `report`."""
        if not self.open:
            return
        engine, scope = self.engine, self.scope
        if not (self.reported or self.head_reported):
            now = engine.now() if now is None else now
            self.head_reported = True
            self._start_clocks(now)
        self.open = False
        del engine.leases[self]
        scope.in_flight -= 1
        for other in self.others:
            other.in_flight -= 1
        if self.hold is not None:
            self._end_hold("sent")
        if self.others or scope.queue is not None or engine.overdue:
            engine.freed(self, engine.now() if now is None else now)

    def give_back(self) -> None:
        """End a grant whose request was never sent: free the slots, leave the clocks as set."""
        if self.open and not self.headed:
            self.engine.counters.given_back += 1
            self._withdraw("given back")
        self.release()

    def pass_on(self) -> None:
        """Let the host's next waiter start instead: the owner was gone before the delivery."""
        queue = self.scope.queue
        if not self.open or self.headed or queue is None or queue.first() is None:
            self.give_back()
            return
        self.engine.counters.passed_on += 1
        # Nothing was sent, so the next request may start when this one would have.
        self.undo()

    def undo(self) -> None:
        """End the grant and restore the clocks, as if it had never been granted."""
        self._withdraw("undone")
        for one, basis in zip((self.scope, *self.others), self.bases_before, strict=True):
            if one.basis == self.start_at:  # No other lease has started since.
                one.basis = basis
        self.release()

    def renew(self, seconds: float) -> None:
        """Let the lease expire this many seconds from now."""
        if self.open:
            self.expires_at = self.engine.now() + max(0.0, seconds)
            self.engine.expire_by(self.expires_at)

    def _withdraw(self, outcome: Outcome) -> None:
        """Note that no request was or will be sent, so that no head is awaited."""
        self.head_reported = self.reported = True
        self._end_hold(outcome)
        if self.counts_as_page:
            self.scope.count_usage(self.start_at, pages=-1)
        for scope in (self.scope, *self.others):
            scope.unheaded -= 1
        self.engine.release_unproven(self, self.engine.now())

    def _end_hold(self, outcome: Outcome) -> None:
        hold, self.hold = self.hold, None
        if hold is not None and self.engine.remote is not None:
            self.engine.remote.end(hold, outcome)

    def _start_clocks(self, now: float) -> None:
        """Start the clocks, durably: the head arrived, or the request is over."""
        engine, scope = self.engine, self.scope
        scope.unheaded -= 1
        scope.basis = max(scope.basis, now)
        for other in self.others:
            other.unheaded -= 1
            other.basis = max(other.basis, now)
        if self.hold is not None and engine.remote is not None:
            engine.remote.head(self.hold)
        if engine.promises is not None:
            engine.make_durable(self, now, engine.promises.remember)
        if self.unproven:
            engine.release_unproven(self, now)


class PacingAudit(Protocol):
    """The audit record, as far as the scheduler knows it. No method waits or raises."""

    grants: type[Grant]
    """The class of its grants."""

    @property
    def failing(self) -> str | None:
        """Why no lease can be granted, as its line can't be written; None if it can."""

    def left_open(self, grant: Grant) -> None:
        """Note that a grant is still open as the scheduler closes."""

    def blocked(self, scope: Scope, by: str) -> None:
        """Note a block, or its end: by the operator, a response, a member of the fleet ("fleet"),
        or an earlier process ("state")."""

    def paused(self, host: str, by: str, ended: bool) -> None:
        """Note a pause, or its end; `by` is as for `blocked`."""

    def settings_changed(self, pacing: PacingConfig) -> None:
        """Note settings that take the place of those before, before a grant by them."""

    def overrides_changed(self, source: str) -> None:
        """Note that rules about hosts changed: by the configuration, a call or the fleet."""
