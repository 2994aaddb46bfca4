"""Leases of a sidecar: waited for, held, renewed in time, told of when they end.

Invariants
    * a lease that is held is in `_held` and in the row of renewals, and leaves both at once;
    * what came of it is told exactly once, and after that nothing more is;
    * a caller who is cancelled while it waits hangs up, and the sidecar gives its place
      back; a lease that had arrived already is given back unused.
"""

from __future__ import annotations

import asyncio
import math
import random
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import msgspec

from gatekeeper import urls
from gatekeeper.clock import Clock, SingleTimer, deadline, utc
from gatekeeper.deadlock import Holdings, TurnWait, WaitGraph, WaitsForItself
from gatekeeper.decision import Decision, NotYet, not_yet
from gatekeeper.errors import (
    Deferred,
    GateClosed,
    GatekeeperError,
    InvalidURL,
    LeaseTimeout,
    SidecarError,
)
from gatekeeper.middleware import (
    ConnectionInUse,
    Unentered,
    hold_in_context,
    inherited,
    open_leases,
    wrong_report,
)
from gatekeeper.pacing.waiting import Need
from gatekeeper.remote.connection import (
    Outbox,
    OutboxMessage,
    OwnedTasks,
    SidecarConnection,
    SidecarResponse,
    SidecarUnreachable,
    backoff,
    bound_in,
    problem,
    read,
    why_in,
)
from gatekeeper.urls import Target
from gatekeeper.wire import LeaseBody, LeaseReport, LeaseRequestBody, Renewal, encode

TTL = 60.0
"""Seconds after which the sidecar ends a lease of which it hears no more: how long a host
waits for a client that died."""
_LONGEST = 600.0
"""Seconds for which a lease is renewed unless its owner renews it: as in the embedded gate."""
_REPORTABLE = 600.0
"""Seconds for which a report is tried: a sidecar that starts again still takes it."""
_COMPLAINTS = (429, 503)


class RemoteLease(msgspec.Struct, eq=False):
    """The right to send one request to `url`: `gatekeeper.Lease`, held through a sidecar.

    The slot is the sidecar's, so what is told here travels: a 429 or 503 at once, as the
    host is blocked from then on; anything else when the lease ends, as the slot is
    taken until then. No method waits for the sidecar.
    """

    _held: HeldRemoteLeases
    _clock: Clock
    _granted_at: float
    lasts_until: float
    """Monotonic: it is renewed until then."""
    id: str
    url: str
    host: str
    decision: Decision
    user_agent: str | None
    """The name that it was asked for under, as it was given; None: the sidecar's own."""
    owner: asyncio.Task[object] | None
    data: Any = None
    """The payload of a URL that came out of a `PoliteQueue`; yours to use otherwise."""
    _settled: bool = False
    _head_at: float | None = None
    _told: LeaseReport | None = None
    _held_by: Callable[[], ConnectionInUse | None] | None = None
    _claimed: bool = False
    _ended: bool = False
    _left: bool = False
    """Its block was left while the connection was in use."""

    def settle(self) -> bool:
        """True once: the sidecar is to be told what came of it."""
        before, self._settled = self._settled, True
        return not before

    def __repr__(self) -> str:
        state = "ended" if self.ended else f"until {self.expires_at:%H:%M:%SZ}"
        return f"<RemoteLease {self.url} {state}>"

    @property
    def expires_at(self) -> datetime:
        """When the lease ends by itself and counts as used (aware, UTC)."""
        return utc(self._clock.wall() + self.lasts_until - self._clock.monotonic())

    @property
    def holdings(self) -> Holdings[RemoteLease]:
        """Where the open leases of its gate are known by their owners."""
        return self._held.holdings

    @property
    def scopes(self) -> tuple[str, ...]:
        """What it holds a slot of, as far as this client knows: its host."""
        return (self.host,)

    @property
    def headed(self) -> bool:
        """The head of its response is here."""
        return self._head_at is not None

    @property
    def ended(self) -> bool:
        """Whether the slot was given back, or the time is over."""
        return self._ended or self._clock.monotonic() >= self.lasts_until

    def goes_on(self, now: float) -> bool:
        """Whether the sidecar is to be told so at that monotonic moment."""
        if self._in_use:
            self.lasts_until = max(self.lasts_until, now + _LONGEST)
        return now < self.lasts_until

    @property
    def _in_use(self) -> bool:
        """The request is known to be under way."""
        connection = None if self._held_by is None else self._held_by()
        return connection is not None and not connection.closed

    def claim(self, url: str) -> bool:
        """Take the lease for a request to `url`; true for the first matching claim."""
        if self._claimed or self.ended:
            return False
        try:
            matches = "".join(urls.split(url)) == self.url
        except InvalidURL:
            return False
        self._claimed = matches
        return matches

    def enter(self) -> None:
        """Let requests of this context adopt it; the current task is its owner from now on."""
        if self.ended:
            return
        self.holdings.own(self, asyncio.current_task())
        held = open_leases.get()
        if self not in held:
            open_leases.set((*held, self))

    def leave(self) -> None:
        """Undo `enter`, and end it: now, or as soon as the connection is free. Without a report
        it counts as sent and unanswered."""
        open_leases.set(tuple(held for held in open_leases.get() if held is not self))
        self.report()
        self._left = self._in_use
        if not self._left:
            self.end()

    def head(self) -> None:
        """The head of the response is here; `elapsed` is measured to this moment."""
        if self._head_at is None:
            self._head_at = self._clock.monotonic()

    def answered(
        self, status: int, *, retry_after: str | None = None, rate_limit: str | None = None
    ) -> None:
        """`head` and `report` in one: the head is here, and says so much."""
        self.head()
        self.report(status=status, retry_after=retry_after, rate_limit=rate_limit)

    def report(
        self,
        *,
        status: int | None = None,
        elapsed: float | None = None,
        retry_after: float | str | None = None,
        size: int | None = None,
        rate_limit: str | None = None,
    ) -> None:
        """Say what came of the request; the first report is final. See `Lease.report`."""
        wrong = wrong_report(status, elapsed, retry_after, size)
        if wrong is not None:
            raise wrong
        if self._told is not None or self._ended:
            return
        if self._head_at is not None:
            # An answer began: without a status, what ended it is no failure of the host.
            measured = self._head_at - self._granted_at
            elapsed = None if status is None else measured if elapsed is None else elapsed
        self._told = LeaseReport(
            status=status if status is not None and 100 <= status <= 999 else None,
            elapsed=_within(elapsed, 86_400.0),
            retry_after=_header(retry_after),
            size=size if size is not None and size >= 0 else None,
            rate_limit=rate_limit if rate_limit is None or len(rate_limit) <= 200 else None,
        )
        if status in _COMPLAINTS:
            self._held.tell(self, self._told)

    @property
    def counts_bytes(self) -> bool:
        """Its host may have a budget: the sidecar knows."""
        return True

    def received(self, size: int) -> None:
        """So many bytes of the response came: its report says so, if that was not sent yet."""
        if self._told is not None and self._told.size is None:
            self._told = msgspec.structs.replace(self._told, size=size)

    def renew(self, seconds: float) -> None:
        """Put the end `seconds` from now; the sidecar is told in time."""
        if not self._ended:
            self.lasts_until = self._clock.monotonic() + seconds
            self._held.prolong(self)

    def give_back(self) -> None:
        """End it unused: nothing was sent. The slot is free at once, the clock stays."""
        if not self._ended:
            self._ended = True
            self._held.give_back(self)

    def ends_with(
        self, connection: ConnectionInUse | None, then: Callable[[], None] | None = None
    ) -> None:
        """The slot is held until that connection is free, however long it takes; None: it is.

        `then` is called at that moment, before the slot is given on.
        """
        if connection is not None:
            self._held_by = ref(connection)
            if then is not None:
                connection.add_callback(then)
            connection.add_callback(self.end)
            if self.owner is not None:
                hold_in_context(self)
            return
        try:
            if then is not None:
                then()
        finally:
            self.end()

    def lasts_with(
        self, connection: ConnectionInUse | None, then: Callable[[], None] | None = None
    ) -> None:
        """The slot is held until that connection is free, even if the block of the lease is
        left before; a block that is left later ends it then.

        `then` is called when the connection is free, at once if it is None.
        """
        if connection is not None:
            self._held_by = ref(connection)
            if then is not None:
                connection.add_callback(then)
            connection.add_callback(self._unused)
        elif then is not None:
            then()

    def _unused(self) -> None:
        """The connection is free: the block may still be open."""
        self._held_by = None
        if self._left:
            self.end()

    def end(self) -> None:
        """The connection is free again: the slot goes to the next in line."""
        if not self._ended:
            self._ended = True
            # Without a report it counts as sent and unanswered: fail closed.
            self._held.tell(self, self._told or LeaseReport())


class RemoteLeaseRequest:
    """What `gate.lease()` returns: entering waits for the turn, leaving ends the lease."""

    __slots__ = ("_acquire", "_lease")

    if not TYPE_CHECKING:
        report = renew = give_back = end = decision = expires_at = Unentered()

    def __init__(self, acquire: Callable[[], Awaitable[RemoteLease]]) -> None:
        self._acquire = acquire
        self._lease: RemoteLease | None = None

    async def __aenter__(self) -> RemoteLease:
        lease = self._lease = await self._acquire()
        lease.enter()
        return lease

    async def __aexit__(self, *error: object) -> None:
        if self._lease is not None:
            self._lease.leave()


class HeldRemoteLeases:
    """Every lease in this client's hands, and one timer for all their renewals."""

    def __init__(self, outbox: Outbox, holdings: Holdings[RemoteLease], clock: Clock) -> None:
        self._outbox = outbox
        self.holdings = holdings
        self._clock = clock
        self._held: dict[str, RemoteLease] = {}
        self._renewals: OrderedDict[str, float] = OrderedDict()
        """Id -> moment of the next renewal. Each is put in half a TTL ahead, at the end: so
        the first is the earliest."""
        self._timer = SingleTimer(clock, self._due)

    def __len__(self) -> int:
        return len(self._held)

    def take(
        self, given: LeaseBody, host: str, user_agent: str | None, *, owned: bool
    ) -> RemoteLease:
        """A lease that just arrived, and was asked for under that name."""
        now = self._clock.monotonic()
        lease = RemoteLease(
            *(self, self._clock, now, now + _LONGEST),
            id=given.id,
            url=given.url,
            host=host,
            decision=given.decision,
            user_agent=user_agent,
            owner=asyncio.current_task() if owned else None,
        )
        self._held[lease.id] = lease
        self.holdings.add(lease)
        self._renew_later(lease.id)
        return lease

    def tell(self, lease: RemoteLease, told: LeaseReport) -> None:
        """Report it, once; that ends it in the sidecar."""
        self._drop(lease)
        if lease.settle():
            self._send("POST", f"/v1/leases/{lease.id}/report", encode(told))

    def give_back(self, lease: RemoteLease) -> None:
        """End it unused."""
        self._drop(lease)
        if lease.settle():
            self.give_back_id(lease.id)

    def give_back_id(self, lease_id: str) -> None:
        """End a lease unused that no caller took."""
        self._send("DELETE", f"/v1/leases/{lease_id}", None)

    def prolong(self, lease: RemoteLease) -> None:
        """Its end was moved."""
        if lease.id in self._held:
            self._renew(lease, self._clock.monotonic())

    def end_all(self) -> None:
        """The client closes: end what is still held, as used."""
        for lease in list(self._held.values()):
            lease.end()
        self._timer.cancel()

    def _drop(self, lease: RemoteLease) -> None:
        if self._held.pop(lease.id, None) is None:
            return
        self._renewals.pop(lease.id, None)
        self.holdings.own(lease, None)

    def _renew_later(self, lease_id: str) -> None:
        self._renewals[lease_id] = when = self._clock.monotonic() + TTL / 2
        self._renewals.move_to_end(lease_id)
        self._timer.set_no_later(when)

    def _due(self) -> None:
        now = self._clock.monotonic()
        while self._renewals and next(iter(self._renewals.values())) <= now:
            lease = self._held[next(iter(self._renewals))]
            if lease.goes_on(now):
                self._renew(lease, now)
            else:  # forgotten by its owner: the sidecar ends it; a report may still come
                self._drop(lease)
        self._timer.set(next(iter(self._renewals.values()), math.inf))

    def _renew(self, lease: RemoteLease, now: float) -> None:
        seconds = min(max(1.0, lease.lasts_until - now), TTL)
        self._send("POST", f"/v1/leases/{lease.id}/renew", encode(Renewal(seconds)), TTL / 2)
        self._renew_later(lease.id)

    def _send(self, method: str, path: str, body: bytes | None, lasts: float = _REPORTABLE) -> None:
        self._outbox.send(OutboxMessage(method, path, body, self._clock.monotonic() + lasts))


def _within(seconds: float | None, most: float) -> float | None:
    """What the sidecar would take; a measurement that is none is left out."""
    if seconds is None or not math.isfinite(seconds):
        return None
    return min(max(0.0, seconds), most)


def _header(retry_after: float | str | None) -> float | str | None:
    if isinstance(retry_after, str):
        return retry_after if len(retry_after) <= 200 else None
    return _within(retry_after, math.inf)


# --- `RemoteLeases`: how a client waits for a turn that a sidecar hands out.


_GRACE = 15.0
"""Seconds beyond `wait` in which the answer to a long poll must come."""
_LAST = 0.5
"""... and beyond the moment at which its caller wants to have given up, whatever comes."""
_INFINITE = float("inf")
_ID = 12
"""Octets of randomness in the id of a lease."""


class RemoteLeases:
    """Long polls, at most `most_polls` at once, each of `poll` seconds at most.

    A turn that was asked for and whose answer got lost is asked for again: at the worst a
    turn is wasted, as the sidecar ends the lease by itself; none is ever taken twice.
    """

    def __init__(
        self,
        connection: SidecarConnection,
        outbox: Outbox,
        tasks: OwnedTasks,
        unanswered: Callable[[str, str, str | None, str], Decision],
        *,
        poll: float,
        most_polls: int,
        patience: float,
        own_wait: float,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        self._connection = connection
        self._tasks = tasks
        self._unanswered = unanswered
        self._poll = poll
        self._most_polls = most_polls
        self._slots = asyncio.Semaphore(most_polls)
        self._patience = patience
        self._clock = clock
        self._rng = rng
        self.waits: WaitGraph[RemoteLease] = WaitGraph(clock, own_wait, _needs)
        self.held: HeldRemoteLeases = HeldRemoteLeases(outbox, self.waits.holdings, clock)
        self.granted: int = 0

    async def acquire(
        self, url: str, *, priority: int, timeout: float | None, user_agent: str | None, owned: bool
    ) -> RemoteLease:
        """See `RemoteGatekeeper.acquire`."""
        target = urls.parse(url)
        end = _INFINITE if timeout is None else self._clock.monotonic() + max(0.0, timeout)
        asked = _WantedLease(url, target, priority, user_agent, end)
        stuck: WaitsForItself | None = None
        waiting: TurnWait[RemoteLease] | None = None
        try:
            waiting = self._begin_wait(target) if owned else None
        except WaitsForItself as error:
            stuck = error
        try:
            await self._slot(asked)
            try:
                given = await (self._given(asked) if stuck is None else self._beside(asked, stuck))
            finally:
                self._slots.release()
        except asyncio.CancelledError:
            if waiting is not None:
                waiting.cancelled()
            raise
        finally:
            if waiting is not None:
                self.waits.end(waiting)
        self.granted += 1
        # No await between the arrival and the table: every lease granted has an owner.
        lease = self.held.take(given, target.host, user_agent, owned=owned)
        if owned:
            hold_in_context(lease)
        return lease

    def _begin_wait(self, target: Target) -> TurnWait[RemoteLease] | None:
        """Note that this task waits for the host; None where that can block no other task.

        Raises WaitsForItself where, as far as this client can see, it could never end.
        """
        task = asyncio.current_task()
        if task is None:  # pragma: no cover - a lease is awaited inside a task
            return None
        # Another gate's leases are no business of this one's hosts.
        under = [one for one in inherited(task) if getattr(one, "_held", None) is self.held]
        return self.waits.begin(task, target.url, target.host, (), under)

    async def look(self, url: str, *, priority: int, user_agent: str | None) -> RemoteLease:
        """The lease, if its turn is now: one round trip, which may take its time.

        `acquire` with a timeout of 0 would hang up where the answer takes longer, and waste
        the turn that it brings.
        """
        asked = _WantedLease(url, urls.parse(url), priority, user_agent, _INFINITE)
        given = await self._at_once(asked)
        self.granted += 1
        return self.held.take(given, asked.target.host, user_agent, owned=False)

    async def _at_once(self, asked: _WantedLease) -> LeaseBody:
        """The lease, in one round trip. Raises what refuses it, or its turn that is not now."""
        try:
            answer = await self._asking(asked, 0.0)
        except SidecarUnreachable as error:
            raise self._deferred(asked, str(error)) from None
        if answer.status == 201:
            return read(answer, LeaseBody)
        refusal = self._refusal(asked, answer)
        if answer.busy and not isinstance(refusal, Deferred):  # as for one who waits
            refusal = self._deferred(asked, answer.detail)
        raise refusal

    async def attempt(
        self, url: str, *, priority: int, user_agent: str | None, owned: bool
    ) -> RemoteLease | NotYet:
        """See `RemoteGatekeeper.try_acquire`."""
        try:
            lease = await self.look(url, priority=priority, user_agent=user_agent)
        except Deferred as error:
            said = error.decision
            return not_yet(self._clock.wall(), said.reason, said.retry_at, said)
        except LeaseTimeout as error:
            return not_yet(self._clock.wall(), error.why, error.retry_at)
        if owned:
            self.held.holdings.own(lease, asyncio.current_task())
            hold_in_context(lease)
        return lease

    async def _slot(self, asked: _WantedLease) -> None:
        left = None if asked.end == _INFINITE else asked.end - self._clock.monotonic()
        try:
            async with deadline(self._clock, left):
                await self._slots.acquire()
        except TimeoutError:
            raise LeaseTimeout(
                asked.target.url,
                f"{asked.target.url}: {self._most_polls} others of this client wait already",
            ) from None

    async def _beside(self, asked: _WantedLease, stuck: WaitsForItself) -> LeaseBody:
        """A lease for a host of which this task holds one, or those who wait for it.

        The sidecar hears of a lease's head only when it ends, so what is not granted at once
        would wait for a task that waits.
        """
        try:
            return await self._at_once(asked)
        except LeaseTimeout:
            raise stuck from None

    async def _given(self, asked: _WantedLease) -> LeaseBody:
        """Poll until the turn comes, it is refused, or the time is over."""
        give_up = self._clock.monotonic() + (0.0 if self._connection.down else self._patience)
        attempt = 0
        while True:
            now = self._clock.monotonic()
            wait = max(0.0, min(self._poll, asked.end - now))
            pause = backoff(attempt, self._rng)
            try:
                answer = await self._asking(asked, wait)
            except SidecarUnreachable as error:
                self._persist(asked, str(error), pause, give_up)
            else:
                if answer.status == 201:
                    return read(answer, LeaseBody)
                if self._shortened(answer, wait):
                    continue
                pause = max(pause, answer.retry_after or 0.0)
                refusal = self._refusal(asked, answer)
                if answer.busy and not isinstance(refusal, Deferred):
                    self._persist(asked, answer.detail, pause, give_up)
                else:
                    # Rounded up to whole seconds: one less is certain.
                    soonest = now + max(wait, (answer.retry_after or 0.0) - 1.0)
                    if not isinstance(refusal, LeaseTimeout) or soonest >= asked.end:
                        raise refusal
                    pause = self._until_next_poll(now, wait, pause)
                    give_up = self._clock.monotonic() + self._patience
            attempt += 1
            self._connection.asked_again()
            left = asked.end - self._clock.monotonic()
            await self._clock.sleep(max(0.0, min(pause, left)))

    def _shortened(self, answer: SidecarResponse, wait: float) -> bool:
        """The sidecar lets nobody wait so long (server.max_wait): polls are shorter now."""
        most = bound_in(answer) if answer.status == 400 else None
        if most is None or not 0 < most < wait:
            return False
        self._poll = min(self._poll, most)
        return True

    def _until_next_poll(self, began: float, wait: float, named: float) -> float:
        """Seconds to sleep: none after a whole poll; after one that was cut short, as the
        turn lies further off than a poll lasts, until a poll can reach it."""
        if self._clock.monotonic() - began >= wait:
            return 0.0
        return max(1.0, named - self._poll)

    def _persist(self, asked: _WantedLease, why: str, pause: float, give_up: float) -> None:
        """Raise Deferred once there is no time left to try again."""
        if self._clock.monotonic() + pause > min(give_up, asked.end):
            raise self._deferred(asked, why)

    def _deferred(self, asked: _WantedLease, why: str) -> Deferred:
        self._connection.lost()
        return Deferred(self._unanswered(asked.url, asked.target.origin, asked.user_agent, why))

    def _refusal(self, asked: _WantedLease, answer: SidecarResponse) -> GatekeeperError:
        error = problem(answer, asked.url)
        if isinstance(error, SidecarError) and answer.status in (429, 503):
            moment = self._moment(answer.retry_after)
            why = why_in(answer)
            return LeaseTimeout(asked.target.url, error.detail, retry_at=moment, why=why)
        return error

    def _moment(self, seconds: float | None) -> datetime | None:
        return None if seconds is None else utc(self._clock.wall() + seconds)

    async def _asking(self, asked: _WantedLease, wait: float) -> SidecarResponse:
        """One long poll, in a task of its own: a caller who is cancelled leaves at once, and
        what the sidecar may have answered meanwhile is given back by the name we gave it."""
        lease_id = secrets.token_urlsafe(_ID)
        body = LeaseRequestBody(
            url=asked.url,  # as it came: the sidecar's guard must see all of it
            wait=wait,
            ttl=TTL,
            priority=min(max(asked.priority, -1000), 1000),
            user_agent=asked.user_agent,
            id=lease_id,
        )
        left = max(0.0, asked.end - self._clock.monotonic())
        timeout = min(wait + _GRACE, left + _LAST)
        poll = self._tasks.start(
            self._connection.request("POST", "/v1/leases", encode(body), timeout=timeout)
        )
        try:
            return await asyncio.shield(poll)
        except SidecarUnreachable as error:
            if error.late:
                self.held.give_back_id(lease_id)  # that we hung up it may hear too late
            raise
        except asyncio.CancelledError:
            if poll.cancelled():
                self.held.give_back_id(lease_id)
                raise GateClosed("the gate was closed before the turn came") from None
            poll.add_done_callback(partial(self._give_back, lease_id))
            # In the next turn of the loop: an answer that was read in this one arrives yet.
            asyncio.get_running_loop().call_soon(poll.cancel)
            raise

    def _give_back(self, lease_id: str, poll: asyncio.Task[SidecarResponse]) -> None:
        if poll.cancelled() or poll.exception() is not None:
            self.held.give_back_id(lease_id)  # it may be on its way to us
        elif poll.result().status == 201:
            self.held.give_back_id(read(poll.result(), LeaseBody).id)


def _needs(host: str, _near: tuple[str, ...]) -> tuple[Need, ...]:
    """What a client knows of a host's slots: that there is one."""
    return (Need(host, 1, False),)


class _WantedLease(NamedTuple):
    """What one caller wants."""

    url: str
    target: Target
    priority: int
    user_agent: str | None
    end: float
    """Monotonic: nobody waits any more then."""
