"""The `Gate` and `HeldLease` protocols.

`Gatekeeper` (embedded) and `RemoteGatekeeper` (a sidecar's client) both satisfy `Gate`; code that
is written against it works with either.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, runtime_checkable

from aiohttp import ClientHandlerType, ClientRequest, ClientResponse

from gatekeeper.config import CacheConfig, HostRule
from gatekeeper.decision import Decision, NotYet
from gatekeeper.fetching.directory import Directory
from gatekeeper.fetching.outcomes import RobotsSource
from gatekeeper.pacing.ledger import FleetStats, Ledger


class ConnectionInUse(Protocol):
    """A connection in use by a request, such as aiohttp's `Connection`."""

    @property
    def closed(self) -> bool:
        """Whether the connection is no longer in use."""

    def add_callback(self, callback: Callable[[], None], /) -> None:
        """Call `callback` once the connection is released or dropped."""


class HeldLease(Protocol):
    """The right to send one request, while it is held.

    Three events matter to a host's clock: the head of the response, the outcome of the request,
    and the end of the connection. Each call is idempotent and never waits.
    """

    @property
    def url(self) -> str:
        """The URL that the lease was granted for, in its normal form."""

    @property
    def decision(self) -> Decision:
        """The decision at the moment of the grant."""

    @property
    def user_agent(self) -> str | None:
        """The name that the lease was requested for, as given; None: the gate's own."""

    @property
    def counts_bytes(self) -> bool:
        """Whether its host has a budget that the bytes of the response count for."""

    def received(self, size: int) -> None:
        """Count bytes of the response for the host's budget, if no report has a `size`."""

    def claim(self, url: str) -> bool:
        """Use the lease for a request to `url`. Return True for the first claim that matches."""

    def head(self) -> None:
        """Note that the head of the response has arrived: the interval counts from now."""

    def answered(
        self, status: int, *, retry_after: str | None = None, rate_limit: str | None = None
    ) -> None:
        """Call `head` and `report` in one: the head has arrived, with this status and fields."""

    def report(
        self,
        *,
        status: int | None = None,
        elapsed: float | None = None,
        retry_after: float | str | None = None,
        size: int | None = None,
        rate_limit: str | None = None,
    ) -> None:
        """Report the outcome of the request; the first report is final.

        `status` is the HTTP status, None if there was no response; `elapsed` the seconds to the
        response's head; `retry_after` the Retry-After header, unparsed, or seconds; `size` the
        body's bytes; `rate_limit` the RateLimit header, unparsed.
        """

    def ends_with(
        self, connection: ConnectionInUse | None, then: Callable[[], None] | None = None
    ) -> None:
        """Hold the slot until the connection is free, then end the lease; None: end it now.

        `then` is called at that moment, before the slot is passed on.
        """

    def lasts_with(
        self, connection: ConnectionInUse | None, then: Callable[[], None] | None = None
    ) -> None:
        """Hold the slot until both the connection is free and the lease's block is left.

        `then` is called when the connection is free; immediately if `connection` is None.
        """

    def end(self) -> None:
        """End the lease: its slot goes to the next waiter."""


class Gate(Protocol):
    """The methods of a gate that crawlers and integrations use, wherever the gate runs."""

    @property
    def user_agent(self) -> str | None:
        """The name whose rules apply if a question has no other; None: not known."""

    async def allowed(self, url: str, *, user_agent: str | None = None) -> bool:
        """Return True if the URL may be fetched now."""

    async def check(self, url: str, *, user_agent: str | None = None) -> Decision:
        """Decide whether the URL may be fetched now, and why."""

    def check_many(
        self, urls: Iterable[str], *, user_agent: str | None = None
    ) -> AsyncIterator[Decision]:
        """Yield a decision about each URL, in order; robots.txt files are fetched in parallel."""

    def lease(
        self,
        url: str,
        *,
        priority: int = 0,
        timeout: float | None = None,
        user_agent: str | None = None,
    ) -> AbstractAsyncContextManager[HeldLease]:
        """Wait until the host is due; the lease is the right to send one request to the URL."""

    async def try_acquire(
        self, url: str, *, priority: int = 0, user_agent: str | None = None, owned: bool = True
    ) -> HeldLease | NotYet:
        """Grant a lease if the host is due now; end it with `end`. Else return NotYet."""


class SharedOverrides(Protocol):
    """Overrides that operators set at run time, on any member of a fleet."""

    def follow(self, follower: Callable[[str, tuple[HostRule, ...]], object]) -> None:
        """Call `follower` with each match and its overrides, the one in force last, now and each
        time that another member sets them."""

    def say(self, match: str, rules: tuple[HostRule, ...], in_force: HostRule) -> None:
        """Set the overrides of a match for every member, present and future. `in_force` is the rule
        for members whose version knows no end of an override."""

    def ended(self, match: str, in_force: HostRule) -> None:
        """Tell those members which rule is in force, now that an override has ended."""


@runtime_checkable
class SharingLedger(Ledger, Protocol):
    """A ledger whose members also share robots.txt files and overrides."""

    @property
    def overrides(self) -> SharedOverrides:
        """The overrides, as this member follows and sets them."""

    def sharing(
        self, fetcher: RobotsSource, cache: CacheConfig, files: Callable[[], Directory | None]
    ) -> RobotsSource:
        """Return a source of robots.txt files that the fleet fetches once. `files()` returns the
        files that this member has, None: not yet."""

    def stats(self) -> FleetStats:
        """Return the current state and the counters."""


DeadlineMiddleware = Callable[
    [Any, ClientRequest, ClientHandlerType],
    Coroutine[Any, Any, ClientResponse],
]
"""An aiohttp client middleware whose first argument is the deadline of a request of the session's
own, or None."""
