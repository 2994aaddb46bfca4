"""Leases of a sidecar: waited for, held, renewed in time, and reported when they end.

Invariants
    * a lease that is held is in `_held` and in `_renewals`, and is removed from both together;
    * its outcome is sent exactly once, and nothing about it is sent after that;
    * a caller that is cancelled while it waits closes its request, and the sidecar removes it from
      the queue; a lease that was granted meanwhile is given back unused.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, NamedTuple
from weakref import ref

import msgspec

from gatekeeper import urls
from gatekeeper.client.connection import (
    Outbox,
    OutboxMessage,
    SidecarConnection,
    SidecarResponse,
    SidecarUnreachable,
    limit_in,
    problem,
    read,
)
from gatekeeper.client.wire import LeaseBody, LeaseReport, LeaseRequestBody, Renewal, encode
from gatekeeper.clock import Clock, OwnedTasks, SingleTimer, deadline, utc
from gatekeeper.decision import Decision, NotYet, not_yet
from gatekeeper.errors import (
    Deferred,
    GateClosed,
    GatekeeperError,
    LeaseTimeout,
    SidecarError,
    refuse_wrong_report,
    refuse_wrong_wait,
)
from gatekeeper.gate.lease_base import (
    LeaseBase,
    Unentered,
    await_request,
    hold_in_context,
    inherited,
    unbind,
)
from gatekeeper.gate.protocols import ConnectionInUse
from gatekeeper.http_fields import parse_retry_after
from gatekeeper.pacing.deadlock import Choice, Holdings, TaskWait, WaitGraph, WaitsForItself
from gatekeeper.pacing.waiters import Need
from gatekeeper.urls import Target

TTL = 60.0
"""Seconds after which the sidecar lets a lease expire that is not renewed: how long a host waits
for a client that died."""
_MAX_HOLD_SECONDS = 600.0
"""Seconds for which a lease is renewed unless its owner renews it, as in the embedded gate."""
_REPORT_SECONDS = 600.0
"""Seconds for which sending a report is retried: a restarted sidecar still accepts it."""
_BLOCKING_STATUSES = (429, 503)


class RemoteLease(LeaseBase, eq=False):
    """The right to send one request to `url`: `gatekeeper.Lease`, held through a sidecar.

    The sidecar holds the slot, so reports are sent to it: a 429 or 503 immediately, as it blocks
    the host; any other when the lease ends, as the slot is taken until then. No method waits for
    the sidecar.
    """

    _held: HeldRemoteLeases
    _clock: Clock
    _granted_at: float
    lasts_until: float
    """The monotonic time until which it is renewed."""
    id: str
    decision: Decision
    _settled: bool = False
    _report: LeaseReport | None = None
    _held_by: Callable[[], ConnectionInUse | None] | None = None
    _ended: bool = False

    def settle(self) -> bool:
        """Return True the first time: the outcome has to be sent to the sidecar."""
        before, self._settled = self._settled, True
        return not before

    @property
    def expires_at(self) -> datetime:
        """When the lease expires and counts as used (aware, UTC)."""
        return utc(self._clock.wall() + self.lasts_until - self._clock.monotonic())

    @property
    def holdings(self) -> Holdings[RemoteLease]:
        """The open leases of its gate, by owner."""
        return self._held.holdings

    @property
    def scopes(self) -> tuple[str, ...]:
        """Scopes of which it holds a slot, as far as this client knows: its host."""
        return (self.host,)

    @property
    def headed(self) -> bool:
        """Whether the head of its response has arrived."""
        return self._head_at is not None

    @property
    def ended(self) -> bool:
        """Whether the slot was given back, or the lease expired."""
        return self._ended or self._clock.monotonic() >= self.lasts_until

    def needs_renewal(self, now: float) -> bool:
        """Return True if the lease has to be renewed at the monotonic time `now`."""
        if self._in_use:
            self.lasts_until = max(self.lasts_until, now + _MAX_HOLD_SECONDS)
        return now < self.lasts_until

    @property
    def _in_use(self) -> bool:
        """Whether its request is known to be under way."""
        connection = None if self._held_by is None else self._held_by()
        return connection is not None and not connection.closed

    def leave(self) -> None:
        """Undo `enter` and end the lease, now or when the connection is free. Without a report it
        counts as sent and unanswered."""
        unbind(self)
        self.report()
        self._block_left = self._in_use
        if not self._block_left:
            self.end()

    def _hold_while(self, connection: ConnectionInUse | None) -> None:
        self._held_by = None if connection is None else ref(connection)

    def head(self) -> None:
        """Note that the head of the response has arrived: `elapsed` is measured to this moment."""
        if self._head_at is None:
            self._head_at = self._clock.monotonic()

    def answered(
        self, status: int, *, retry_after: str | None = None, rate_limit: str | None = None
    ) -> None:
        """Call `head` and `report` in one: the head has arrived, with this status and fields."""
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
        """Report the outcome of the request; the first report is final. See `Lease.report`."""
        refuse_wrong_report(status, elapsed, retry_after, size)
        if self._report is not None or self._ended:
            return
        if self._head_at is not None:
            # A response began: without a status, what ended it is not a failure of the host.
            measured = self._head_at - self._granted_at
            elapsed = None if status is None else measured if elapsed is None else elapsed
        self._report = LeaseReport(
            status=status if status is not None and 100 <= status <= 999 else None,
            elapsed=None if elapsed is None else min(max(0.0, elapsed), 86_400.0),
            retry_after=_retry_after(retry_after),
            size=size if size is not None and size >= 0 else None,
            rate_limit=rate_limit if rate_limit is None or len(rate_limit) <= 200 else None,
        )
        if status in _BLOCKING_STATUSES:
            self._held.send_report(self, self._report)

    @property
    def counts_bytes(self) -> bool:
        """Always True: only the sidecar knows whether the host has a budget."""
        return True

    def received(self, size: int) -> None:
        """Add the bytes of the response to the report, if that has no `size` and was not sent."""
        if self._report is not None and self._report.size is None:
            self._report = msgspec.structs.replace(self._report, size=size)

    def renew(self, seconds: float) -> None:
        """Move the end of the lease to `seconds` from now."""
        if not self._ended:
            self.lasts_until = self._clock.monotonic() + seconds
            self._held.prolong(self)

    def give_back(self) -> None:
        """End the lease unused: nothing was sent. The slot is freed, the host's clock stays."""
        if not self._ended:
            self._ended = True
            self._held.give_back(self)

    def end(self) -> None:
        """End the lease: its slot goes to the next waiter. Idempotent."""
        if not self._ended:
            self._ended = True
            # Without a report the request counts as sent and unanswered: fail closed.
            self._held.send_report(self, self._report or LeaseReport())


class RemoteLeaseRequest:
    """The result of `gate.lease()`: entering waits for the lease, leaving ends the lease."""

    __slots__ = ("_acquire", "_lease")

    if not TYPE_CHECKING:
        report = renew = give_back = end = decision = expires_at = __enter__ = Unentered()
        __await__ = await_request

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
    """The leases that this client holds, and one timer for their renewals."""

    def __init__(self, outbox: Outbox, holdings: Holdings[RemoteLease], clock: Clock) -> None:
        self._outbox = outbox
        self.holdings = holdings
        self._clock = clock
        self._held: dict[str, RemoteLease] = {}
        self._renewals: OrderedDict[str, float] = OrderedDict()
        """Monotonic time of the next renewal, by lease id. Each is set half a TTL ahead, at the
        end: so the first is the earliest."""
        self._timer = SingleTimer(clock, self._due)

    def __len__(self) -> int:
        return len(self._held)

    def add(
        self, granted: LeaseBody, host: str, user_agent: str | None, *, owned: bool
    ) -> RemoteLease:
        """Hold a lease that was just granted, and requested for the name `user_agent`."""
        now = self._clock.monotonic()
        lease = RemoteLease(
            granted.url,
            host,
            asyncio.current_task() if owned else None,
            self,
            self._clock,
            now,
            now + _MAX_HOLD_SECONDS,
            granted.id,
            granted.decision,
            user_agent=user_agent,
        )
        self._held[lease.id] = lease
        self.holdings.add(lease)
        self._renew_later(lease.id)
        return lease

    def send_report(self, lease: RemoteLease, report: LeaseReport) -> None:
        """Send the report of a lease, once; that ends it in the sidecar."""
        self._drop(lease)
        if lease.settle():
            self._send("POST", f"/v1/leases/{lease.id}/report", encode(report))

    def give_back(self, lease: RemoteLease) -> None:
        """End a lease unused."""
        self._drop(lease)
        if lease.settle():
            self.give_back_id(lease.id)

    def give_back_id(self, lease_id: str) -> None:
        """End a lease unused that no caller received."""
        self._send("DELETE", f"/v1/leases/{lease_id}", None)

    def prolong(self, lease: RemoteLease) -> None:
        """Renew a lease in the sidecar, as its end was moved."""
        if lease.id in self._held:
            self._renew(lease, self._clock.monotonic())

    def end_all(self) -> None:
        """End the leases that are still held, as used: the client closes."""
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
            if lease.needs_renewal(now):
                self._renew(lease, now)
            else:  # its owner never ended it: it expires in the sidecar; a report may still come
                self._drop(lease)
        self._timer.set(next(iter(self._renewals.values()), math.inf))

    def _renew(self, lease: RemoteLease, now: float) -> None:
        seconds = min(max(1.0, lease.lasts_until - now), TTL)
        self._send("POST", f"/v1/leases/{lease.id}/renew", encode(Renewal(seconds)), TTL / 2)
        self._renew_later(lease.id)

    def _send(
        self, method: str, path: str, body: bytes | None, lasts: float = _REPORT_SECONDS
    ) -> None:
        self._outbox.send(OutboxMessage(method, path, body, self._clock.monotonic() + lasts))


def _retry_after(retry_after: float | str | None) -> float | str | None:
    if isinstance(retry_after, str):
        return retry_after if len(retry_after) <= 200 else None
    return parse_retry_after(retry_after, 0.0)


# --- waiting for a lease --------------------------------------------------------------------


_GRACE_SECONDS = 15.0
"""Seconds that the response to a long poll may take beyond the `wait` that it asks for."""
_LAST_SECONDS = 0.5
"""Seconds that the response may take beyond the caller's timeout."""
_ID_BYTES = 12
"""Random bytes in the id of a lease."""


class RemoteLeases:
    """Waits for leases with long polls: at most `most_polls` at a time, each of `poll` seconds.

    A request whose response got lost is repeated. At worst a lease is wasted, as the sidecar lets
    the lease expire; no lease is used twice.
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
        own_wait: float,
        clock: Clock,
    ) -> None:
        self._connection = connection
        self._tasks = tasks
        self._unanswered = unanswered
        self._poll = poll
        self._most_polls = most_polls
        self._slots = asyncio.Semaphore(most_polls)
        self._clock = clock
        self.waits: WaitGraph[RemoteLease] = WaitGraph(clock, own_wait, _needs)
        self.held: HeldRemoteLeases = HeldRemoteLeases(outbox, self.waits.holdings, clock)
        self.granted: int = 0

    async def acquire(
        self, url: str, *, priority: int, timeout: float | None, user_agent: str | None, owned: bool
    ) -> RemoteLease:
        """See `RemoteGatekeeper.acquire`."""
        refuse_wrong_wait(priority, timeout)
        target = urls.parse(url)
        end = math.inf if timeout is None else self._clock.monotonic() + max(0.0, timeout)
        query = _LeaseQuery(url, target, priority, user_agent, end)
        choices = (Choice(target.url, target.host),)
        task = asyncio.current_task() if owned else None
        endless: WaitsForItself | None = None
        waiting: TaskWait[RemoteLease] | None = None
        try:
            if task is not None:
                waiting = self.waits.begin(task, lambda: choices, inherited(task))
        except WaitsForItself as error:
            # The sidecar learns of a lease's head only when the lease ends, so a lease that is not
            # granted immediately would wait for a task that waits itself.
            endless = error
        try:
            await self._slot(query)
            try:
                granted = await self._poll_until_granted(query, once=endless is not None)
            finally:
                self._slots.release()
        except LeaseTimeout:
            if endless is not None:
                raise endless from None
            raise
        except asyncio.CancelledError:
            if waiting is not None:
                waiting.cancelled()
            raise
        finally:
            if waiting is not None:
                self.waits.end(waiting)
        self.granted += 1
        # There is no await between the response and this: every granted lease is held.
        lease = self.held.add(granted, target.host, user_agent, owned=owned)
        if owned:
            hold_in_context(lease)
        return lease

    async def acquire_if_due(
        self, url: str, *, priority: int, user_agent: str | None
    ) -> RemoteLease:
        """Grant a lease if the host is due now: one round trip, however long that takes.

        `acquire` with a timeout of 0 would close a slow request, and waste the lease it grants.
        """
        query = _LeaseQuery(url, urls.parse(url), priority, user_agent, math.inf)
        granted = await self._poll_until_granted(query, once=True)
        self.granted += 1
        return self.held.add(granted, query.target.host, user_agent, owned=False)

    async def try_acquire(
        self, url: str, *, priority: int, user_agent: str | None, owned: bool
    ) -> RemoteLease | NotYet:
        """See `RemoteGatekeeper.try_acquire`."""
        try:
            lease = await self.acquire_if_due(url, priority=priority, user_agent=user_agent)
        except Deferred as error:
            said = error.decision
            return not_yet(self._clock.wall(), said.reason, said.retry_at, said)
        except LeaseTimeout as error:
            return not_yet(self._clock.wall(), error.why, error.retry_at)
        if owned:
            self.held.holdings.own(lease, asyncio.current_task())
            hold_in_context(lease)
        return lease

    async def _slot(self, query: _LeaseQuery) -> None:
        left = None if query.end == math.inf else query.end - self._clock.monotonic()
        try:
            async with deadline(self._clock, left):
                await self._slots.acquire()
        except TimeoutError:
            raise LeaseTimeout(
                query.target.url,
                f"{query.target.url}: {self._most_polls} others of this client are waiting",
            ) from None

    async def _poll_until_granted(self, query: _LeaseQuery, *, once: bool = False) -> LeaseBody:
        """Poll until the lease is granted or refused, or the caller's timeout passes.

        `once`: in one round trip. Raises LeaseTimeout if the lease is not granted immediately.
        """
        connection = self._connection
        began = self._clock.monotonic()
        give_up = -math.inf if once else began + (0.0 if connection.down else connection.patience)
        attempt = 0
        while True:
            now = self._clock.monotonic()
            wait = 0.0 if once else max(0.0, min(self._poll, query.end - now))
            pause = connection.backoff(attempt)
            try:
                answer = await self._send_poll(query, wait)
            except SidecarUnreachable as error:
                last = connection.last_retry(began, give_up)
                self._defer_if_late(query, str(error), pause, last)
            else:
                if answer.status == 201:
                    return read(answer, LeaseBody)
                if self._shortened(answer, wait):
                    continue
                pause = max(pause, answer.retry_after or 0.0)
                refusal = self._refusal(query, answer)
                if answer.busy and not isinstance(refusal, Deferred):
                    self._defer_if_late(query, answer.detail, pause, give_up)
                else:
                    # Retry-After is rounded up to whole seconds: one less is certain.
                    soonest = now + max(wait, (answer.retry_after or 0.0) - 1.0)
                    if once or not isinstance(refusal, LeaseTimeout) or soonest >= query.end:
                        raise refusal
                    pause = self._until_next_poll(now, wait, pause)
                    give_up = self._clock.monotonic() + connection.patience
            attempt += 1
            connection.repeated += 1
            left = query.end - self._clock.monotonic()
            await self._clock.sleep(max(0.0, min(pause, left)))

    def _shortened(self, answer: SidecarResponse, wait: float) -> bool:
        """Return True, and shorten polls, if the sidecar refused `wait` (server.max_wait)."""
        most = limit_in(answer) if answer.status == 400 else None
        if most is None or not 0 < most < wait:
            return False
        self._poll = min(self._poll, most)
        return True

    def _until_next_poll(self, began: float, wait: float, named: float) -> float:
        """Return the seconds to sleep before the next poll.

        0 after a complete poll. A poll that returned early, as the lease comes later than a poll
        lasts, is repeated when a poll can reach the lease; `named` is the response's Retry-After.
        """
        if self._clock.monotonic() - began >= wait:
            return 0.0
        return max(1.0, named - self._poll)

    def _defer_if_late(self, query: _LeaseQuery, why: str, pause: float, give_up: float) -> None:
        """Raise Deferred if no time is left for another attempt."""
        if self._clock.monotonic() + pause > min(give_up, query.end):
            self._connection.give_up(why)
            origin, agent = query.target.origin, query.user_agent
            raise Deferred(self._unanswered(query.url, origin, agent, why))

    def _refusal(self, query: _LeaseQuery, answer: SidecarResponse) -> GatekeeperError:
        error = problem(answer, query.url)
        if isinstance(error, SidecarError) and answer.status in (429, 503):
            wait = answer.retry_after
            moment = None if wait is None else utc(self._clock.wall() + wait)
            why = getattr(answer.document, "why", None) or "turn"
            return LeaseTimeout(query.target.url, error.detail, retry_at=moment, why=why)
        return error

    async def _send_poll(self, query: _LeaseQuery, wait: float) -> SidecarResponse:
        """Send one long poll, in a task of its own.

        A cancelled caller returns immediately, and the lease that the sidecar may have granted
        meanwhile is given back by the id that the client chose for it.
        """
        lease_id = secrets.token_urlsafe(_ID_BYTES)
        body = LeaseRequestBody(
            url=query.url,  # as given: the sidecar's guard must see the whole URL
            wait=wait,
            ttl=TTL,
            priority=min(max(query.priority, -1000), 1000),
            user_agent=query.user_agent,
            id=lease_id,
        )
        left = max(0.0, query.end - self._clock.monotonic())
        timeout = min(wait + _GRACE_SECONDS, left + _LAST_SECONDS)
        poll = self._tasks.start(
            self._connection.request("POST", "/v1/leases", encode(body), timeout=timeout)
        )
        try:
            return await asyncio.shield(poll)
        except SidecarUnreachable as error:
            if error.late:
                self.held.give_back_id(lease_id)  # the sidecar may notice the disconnect too late
            raise
        except asyncio.CancelledError:
            if poll.cancelled():
                self.held.give_back_id(lease_id)
                raise GateClosed("the gate was closed before the lease was granted") from None
            poll.add_done_callback(partial(self._give_back, lease_id))
            # In the next iteration: a response that was read in this one can still arrive.
            asyncio.get_running_loop().call_soon(poll.cancel)
            raise

    def _give_back(self, lease_id: str, poll: asyncio.Task[SidecarResponse]) -> None:
        if poll.cancelled() or poll.exception() is not None:
            self.held.give_back_id(lease_id)  # the response may be on its way
        elif poll.result().status == 201:
            self.held.give_back_id(read(poll.result(), LeaseBody).id)


def _needs(host: str, _near: tuple[str, ...]) -> tuple[Need, ...]:
    """Return the needs of a lease as far as a client knows them: one slot of its host."""
    return (Need(host, 1, False),)


class _LeaseQuery(NamedTuple):
    """Arguments of one request for a lease."""

    url: str
    target: Target
    priority: int
    user_agent: str | None
    end: float
    """Monotonic time at which the caller's timeout passes."""
