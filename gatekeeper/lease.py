"""`Lease`: the right to send one request, with the decision that allowed it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Any, Protocol
from weakref import ref

import msgspec
from aiohttp.connector import Connection
from yarl import URL

from gatekeeper.clock import utc
from gatekeeper.decision import Decision
from gatekeeper.middleware import hold_in_context, open_leases, wrong_report
from gatekeeper.pacing.engine import EVERYTHING
from gatekeeper.pacing.queues import Grant
from gatekeeper.pacing.scopes import RobotsInterval
from gatekeeper.url_cache import url_of

if TYPE_CHECKING:
    from gatekeeper.leasing import Lessor
else:
    Lessor = Any  # it imports this module; `help` and `inspect.signature` look the name up

__all__ = ["Lease", "Origin"]


class Origin(Protocol):
    """The prepared answers of one origin."""

    origin: str
    host: str
    wish: RobotsInterval | None
    """The pace it asks for; None where that has to be looked up."""

    def tell(self, url: str, path: str, number: int) -> Decision:
        """The decision about a URL; `number` makes its id."""


class Lease(msgspec.Struct, eq=False):
    """The right to send one request to `url`, until `expires_at`.

    Report what came of it, so that the host's clock, back-off and latency are right; the
    first report is final, and leaving `async with gate.lease(...)` ends the lease.
    """

    _lessor: Lessor
    _grant: Grant
    url: str
    host: str
    owner: asyncio.Task[object] | None
    """The task that would wait for itself if it asked for another one."""
    _answer: Decision | Origin
    """The decision, or who knows it: few look at it, so it is written out when one does."""
    _number: int = 0
    _head_at: float | None = None
    _claimed: bool = False
    _left: bool = False
    """Its block was left while the connection was in use."""
    _then: Callable[[], None] | None = None
    """Called when the connection is free."""
    data: Any = None
    """The payload of a URL that came out of a `PoliteQueue`; yours to use otherwise."""
    _by_hand: bool = False
    """Whether and when its request is sent is its holder's affair, unless it is claimed."""
    user_agent: str | None = None
    """The name that it was asked for under, as it was given; None: the gate's own."""

    @property
    def decision(self) -> Decision:
        """The answer at the moment of the grant."""
        answer = self._answer
        if not isinstance(answer, Decision):
            path = self.url[len(answer.origin) :]
            answer = self._answer = answer.tell(self.url, path, self._number)
        return answer

    def __repr__(self) -> str:
        state = "ended" if self.ended else f"until {self.expires_at:%H:%M:%SZ}"
        return f"<Lease {self.url} {state}>"

    @property
    def origin(self) -> str:
        """Whose robots.txt decided."""
        return self._answer.origin

    @property
    def started_at(self) -> float:
        """Monotonic seconds of the grant."""
        return self._grant.start_at

    @property
    def awaits_head(self) -> bool:
        """Its request is known to have been sent, and nothing was heard of it."""
        grant = self._grant
        return grant.open and not grant.headed and (self._claimed or not self._by_hand)

    @property
    def expires_at(self) -> datetime:
        """When the lease ends by itself and counts as used (aware, UTC)."""
        clock = self._lessor.clock
        return utc(clock.wall() + self._grant.expires_at - clock.monotonic())

    @property
    def scopes(self) -> tuple[str, ...]:
        """What it holds a slot of: its host, and the clocks that the host shares."""
        grant = self._grant
        return (grant.scope.name, *(other.name for other in grant.others), EVERYTHING)

    @property
    def headed(self) -> bool:
        """The head of its response is here, as far as is known: no interval waits for it."""
        return self._grant.headed

    @property
    def ended(self) -> bool:
        """Whether the slot was given back, or the time is over."""
        return not self._grant.open

    def claim(self, url: str) -> bool:
        """Take the lease for a request to `url`; true for the first matching claim."""
        if self._claimed or not self._grant.open:
            return False
        # aiohttp sends what yarl makes of a text, and yarl unescapes some of it: both sides
        # are put into that form before they are compared.
        self._claimed = url == self.url or _as_sent(url) == _as_sent(self.url)
        return self._claimed

    def enter(self) -> None:
        """Let requests of this context adopt it; the current task is its owner from now on.

        For a lease that one task asked for and another one uses: it leaves no trace in the
        context of the first.
        """
        if self.ended:
            return
        task = asyncio.current_task(self._lessor.loop)
        if self.owner is not task:
            self._lessor.holdings.drop(self)
            self.owner = task
            self._lessor.holdings.add(self)
        held = open_leases.get()
        if self not in held:
            open_leases.set((*held, self))

    def leave(self) -> None:
        """Undo `enter`, and end it. Without a report it counts as sent and unanswered.

        Where the body of its response still comes, the slot is held until the connection is free.
        """
        held = open_leases.get()
        if held[-1:] == (self,):
            open_leases.set(held[:-1])
        else:
            open_leases.set(tuple(other for other in held if other is not self))
        try:
            if not self._grant.reported:
                self.report()  # fail closed
        finally:
            self._left = self._grant.in_use
            if not self._left:
                self.end()

    def head(self) -> None:
        """The head of the response is here: the interval counts from now."""
        if self._head_at is None:
            self._head_at = now = self._lessor.now()
            self._lessor.faults.answered(self.origin, now)
            self._grant.head(now)

    def answered(
        self, status: int, *, retry_after: str | None = None, rate_limit: str | None = None
    ) -> None:
        """`head` and `report` in one: the head is here, and says so much."""
        grant, lessor = self._grant, self._lessor
        read = lessor.now  # an attribute that is called is slow before Python 3.12
        now = read()
        faults = lessor.faults
        if faults.doubtful:
            faults.answered(self._answer.origin, now)
        else:  # in place: each page comes this way
            faults.heard[self._answer.origin] = faults.last_answer = now
        if self._answer.__class__ is Decision and not grant.reported:
            self._note(status)
        elapsed = (now if self._head_at is None else self._head_at) - grant.start_at
        grant.report(status, elapsed, retry_after, None, rate_limit=rate_limit, now=now)

    def report(
        self,
        *,
        status: int | None = None,
        elapsed: float | None = None,
        retry_after: float | str | None = None,
        size: int | None = None,
        rate_limit: str | None = None,
    ) -> None:
        """Say what came of the request; the first report is final.

        `status` is the HTTP status (None: no answer), `elapsed` seconds to the response
        head, `retry_after` the Retry-After header as it came, or seconds, `size` bytes,
        `rate_limit` the RateLimit header as it came (HTTP-11; Retry-After goes first). Raises
        TypeError for anything else, such as a status that is text.
        """
        # Few reports need a second look, and each request has one.
        if status.__class__ is not int or not elapsed is retry_after is size is None:
            wrong = wrong_report(status, elapsed, retry_after, size)
            if wrong is not None:
                raise wrong
        grant = self._grant
        if grant.reported:
            return
        if elapsed is None and self._head_at is not None:
            elapsed = self._head_at - grant.start_at
        now = None
        if status is not None:
            self._note(status)
            lessor = self._lessor
            now = lessor.now()
            faults = lessor.faults
            if faults.doubtful:
                faults.answered(self._answer.origin, now)
            else:
                faults.heard[self._answer.origin] = faults.last_answer = now
        grant.report(status, elapsed, retry_after, size, rate_limit=rate_limit, now=now)
        if status is None and elapsed is not None and self._head_at is None:
            self._lessor.uplink.unanswered(self)

    def _note(self, status: int) -> None:
        # A lease had at once is of an origin whose file is fresh: nothing to be learnt there.
        answer = self._answer
        if isinstance(answer, Decision):
            self._lessor.answers.note_page(answer.origin, ok=200 <= status < 400)

    def renew(self, seconds: float) -> None:
        """Put the end `seconds` from now."""
        self._grant.renew(seconds)

    def give_back(self) -> None:
        """End it unused: nothing was sent. The slot is free at once, the clock stays."""
        try:
            self._grant.give_back()
        finally:
            self._drop()

    def ends_with(
        self, connection: Connection | None, then: Callable[[], None] | None = None
    ) -> None:
        """The slot is held until that connection is free, however long it takes; None: it is.

        `then` is called at that moment, before the slot is given on.
        """
        self._then = then
        if connection is None:
            self._freed()
        else:
            # Weakly: to drop a response without a word frees its connection as well.
            self._grant.held_by = ref(connection)
            connection.add_callback(self._freed if then is not None else self.end)
            if self.owner is not None:
                hold_in_context(self)

    def lasts_with(
        self, connection: Connection | None, then: Callable[[], None] | None = None
    ) -> None:
        """The slot is held until that connection is free, even if the block of the lease is
        left before; a block that is left later ends it then.

        `then` is called when the connection is free, at once if it is None.
        """
        if connection is None:
            if then is not None:
                then()
            return
        self._then = then
        self._grant.held_by = ref(connection)
        connection.add_callback(self._unused)

    def _unused(self) -> None:
        """The connection is free: the block may still be open."""
        self._grant.held_by = None
        if self._left:
            self._freed()
            return
        then, self._then = self._then, None
        if then is not None:
            then()

    def _freed(self) -> None:
        """The connection is free: one callback for both, since each request has it."""
        then, self._then = self._then, None
        try:
            if then is not None:
                then()
        finally:
            self.end()

    def end(self) -> None:
        """The connection is free again: the slot goes to the next in line."""
        try:
            self._grant.release()
        finally:
            if self.owner is not None:
                self._drop()

    def _drop(self) -> None:
        self._lessor.holdings.drop(self)
        self.owner = None


def _as_sent(url: str) -> URL | None:
    try:
        return url_of(url).with_fragment(None)
    except ValueError:
        return None
