"""`Grant`: the right to send one request, with an end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from gatekeeper.pacing.books import Books
    from gatekeeper.pacing.ledger import Scope

__all__ = ["Grant"]


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
    headed: bool = False
    reported: bool = False
    open: bool = True
    """The slot is held."""

    def __repr__(self) -> str:
        state = "open" if self.open else "ended"
        return f"<Grant {self.scope.name} {state}, started at {self.start_at:.6f}>"

    @property
    def host(self) -> str:
        """Whose turn it is."""
        return self.scope.name

    def head(self) -> None:
        """The head of the response arrived: the clock counts from here."""
        if not self.headed:
            self.books.head(self)

    def report(
        self,
        status: int | None = None,
        elapsed: float | None = None,
        retry_after: float | str | None = None,
        size: int | None = None,
        *,
        rate_limit: str | None = None,
    ) -> None:
        """How it went; final, the first wins. The slot stays taken until `release`.

        `status` None with `elapsed` set says that no response came. `elapsed` is seconds
        to the head of the response; `retry_after` the field as it came, or seconds;
        `rate_limit` the RateLimit field as it came. A report counts even after the lease
        expired. Raises StorageError where a block can't be made durable; it is in force
        all the same.
        """
        if not self.reported:
            self.reported = True
            self.books.report(self, status, elapsed, retry_after, size, rate_limit)

    def release(self) -> None:
        """End it and free the slot. Without `head` or `report` the clock counts from here:
        the request may have left at any moment.
        """
        if self.open:
            self.books.release(self)

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
