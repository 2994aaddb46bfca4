"""`Grant`: the right to send one request, with an end."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from gatekeeper.pacing.ledger import Scope

if TYPE_CHECKING:
    from gatekeeper.pacing.books import Books
else:
    Books = Any  # it imports this module; `help` looks the name up

__all__ = ["Grant", "InUse"]


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

    books: Books
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
