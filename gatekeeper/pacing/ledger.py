"""The ledger decides which requests may start, for all scopes and all processes that share it.

A ledger decides about the present only: `take` grants a request now, or returns when to ask again.
Nothing is reserved for the future, so a 429 that one process receives applies to every request that
has not started yet. A granted request has a hold, with an owner, a token and a time to live. The
hold occupies a slot of each of its scopes, and their clocks until the head of the response.

A scheduler without a ledger decides everything by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Literal, NamedTuple, Protocol

import msgspec

from gatekeeper.pacing.rules import DailyBudget

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
    iteration of the loop take effect in the order block, head, end, take. One that can tell what
    it knows of scopes and who holds them has a method `look(scopes)`, which returns a list of
    `ScopeView`. One that goes on without its store has a method `withheld(scopes, interval)`: what
    keeps a request with that interval from being granted to this process, a `Withheld` or None.
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
