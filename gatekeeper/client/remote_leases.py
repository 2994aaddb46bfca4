"""Leases of a sidecar: waited for, held, renewed in time, and reported when they end.

Invariants
    * leases that are held are in `_held`, in the order in which they are renewed next;
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
    SidecarConnection,
    SidecarResponse,
    SidecarUnreachable,
    limit_in,
    problem,
    read,
)
from gatekeeper.client.questions import Key
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
from gatekeeper.pacing.deadlock import (
    Choice,
    Holdings,
    Task,
    TaskWait,
    WaitGraph,
    WaitsForItself,
)
from gatekeeper.pacing.waiters import Need
from gatekeeper.urls import Target

TTL = 60.0
"""Seconds after which the sidecar lets a lease expire that is not renewed: how long a host waits
for a client that died."""
_MAX_HOLD_SECONDS = 600.0
"""Seconds for which a lease is renewed unless its owner renews it, as in the embedded gate."""
_BLOCKING_STATUSES = (429, 503)


class RemoteLease(LeaseBase, eq=False):
    """The right to send one request to `url`: `gatekeeper.Lease`, held through a sidecar.

    The sidecar holds the slot, so reports are sent to it: a 429 or 503 immediately, as it blocks
    the host; any other when the lease ends, as the slot is taken until then. No method waits for
    the sidecar.
    """

    _held: HeldRemoteLeases
    _granted_at: float
    lasts_until: float
    """The monotonic time until which it is renewed."""
    id: str
    decision: Decision
    renews_at: float = 0.0
    """The monotonic time of its next renewal."""
    settled: bool = False
    """Whether its outcome was sent to the sidecar."""
    _report: LeaseReport | None = None
    _held_by: Callable[[], ConnectionInUse | None] | None = None
    _ended: bool = False

    @property
    def counts_bytes(self) -> bool:
        """Always True: only the sidecar knows whether the host has a budget."""
        return True

    @property
    def expires_at(self) -> datetime:
        """When the lease expires and counts as used (aware, UTC)."""
        clock = self._held.clock
        return utc(clock.wall() + self.lasts_until - clock.monotonic())

    @property
    def holdings(self) -> Holdings[RemoteLease]:
        """The open leases of its gate, by owner."""
        return self._held.waits.holdings

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
        return self._ended or self._held.clock.monotonic() >= self.lasts_until

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
            self._head_at = self._held.clock.monotonic()

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
            self._held.finish(self, self._report)

    def received(self, size: int) -> None:
        """Add the bytes of the response to the report, if that has no `size` and was not sent."""
        if self._report is not None and self._report.size is None:
            self._report = msgspec.structs.replace(self._report, size=size)

    def renew(self, seconds: float) -> None:
        """Move the end of the lease to `seconds` from now."""
        if not self._ended:
            self.lasts_until = self._held.clock.monotonic() + seconds
            self._held.renew(self)

    def give_back(self) -> None:
        """End the lease unused: nothing was sent. The slot is freed, the host's clock stays."""
        if not self._ended:
            self._ended = True
            self._held.finish(self, None)

    def end(self) -> None:
        """End the lease: its slot goes to the next waiter. Idempotent."""
        if not self._ended:
            self._ended = True
            # Without a report the request counts as sent and unanswered: fail closed.
            self._held.finish(self, self._report or LeaseReport())


class RemoteLeaseRequest(msgspec.Struct, eq=False):
    """The result of `gate.lease()`: entering waits for the lease, leaving ends the lease."""

    _acquire: Callable[[], Awaitable[RemoteLease]]
    _lease: RemoteLease | None = None

    if not TYPE_CHECKING:
        report = renew = give_back = end = decision = expires_at = __enter__ = Unentered()
        __await__ = await_request

    async def __aenter__(self) -> RemoteLease:
        lease = self._lease = await self._acquire()
        lease.enter()
        return lease

    async def __aexit__(self, *error: object) -> None:
        if self._lease is not None:
            self._lease.leave()


class HeldRemoteLeases:
    """The leases that this client holds, and one timer for their renewals."""

    def __init__(self, outbox: Outbox, own_wait: float, clock: Clock) -> None:
        self._outbox = outbox
        self.waits: WaitGraph[RemoteLease] = WaitGraph(clock, own_wait, _needs)
        self.clock = clock
        self.granted: int = 0
        self._held: OrderedDict[str, RemoteLease] = OrderedDict()
        """By lease id. A renewal is set half a TTL ahead, and moves the lease to the end: so that
        of the first is the earliest."""
        self._timer = SingleTimer(clock, self._due)

    def __len__(self) -> int:
        return len(self._held)

    def add(self, granted: LeaseBody, query: _LeaseQuery, task: Task | None) -> RemoteLease:
        """Hold a lease that was just granted, as the task's own; None: as nobody's yet."""
        now = self.clock.monotonic()
        lease = RemoteLease(
            granted.url,
            query.target.host,
            task,
            self,
            now,
            now + _MAX_HOLD_SECONDS,
            granted.id,
            granted.decision,
            user_agent=query.user_agent,
        )
        self.granted += 1
        self.waits.holdings.add(lease)
        self._renew_later(lease)
        if task is not None:
            hold_in_context(lease)
        return lease

    def finish(self, lease: RemoteLease, report: LeaseReport | None) -> None:
        """Tell the sidecar, once, how a lease ended: by this report, or (None) unused."""
        self._drop(lease)
        if lease.settled:
            return
        lease.settled = True
        if report is None:
            self.give_back_id(lease.id)
        else:
            self._outbox.send("POST", f"/v1/leases/{lease.id}/report", encode(report))

    def give_back_id(self, lease_id: str) -> None:
        """End a lease unused that no caller received."""
        self._outbox.send("DELETE", f"/v1/leases/{lease_id}", None)

    def renew(self, lease: RemoteLease) -> None:
        """Renew a lease in the sidecar if it is held: to its end, or for as long as that allows."""
        if lease.id in self._held:
            seconds = min(max(1.0, lease.lasts_until - self.clock.monotonic()), TTL)
            path, body = f"/v1/leases/{lease.id}/renew", encode(Renewal(seconds))
            self._outbox.send("POST", path, body, TTL / 2)
            self._renew_later(lease)

    def end_all(self) -> None:
        """End the leases that are still held, as used: the client closes."""
        for lease in list(self._held.values()):
            lease.end()
        self._timer.cancel()

    def _drop(self, lease: RemoteLease) -> None:
        if self._held.pop(lease.id, None) is not None:
            self.waits.holdings.own(lease, None)

    def _renew_later(self, lease: RemoteLease) -> None:
        lease.renews_at = self.clock.monotonic() + TTL / 2
        self._held[lease.id] = lease
        self._held.move_to_end(lease.id)
        self._timer.set_no_later(lease.renews_at)

    def _due(self) -> None:
        now = self.clock.monotonic()
        while self._held and (lease := next(iter(self._held.values()))).renews_at <= now:
            if lease.needs_renewal(now):
                self.renew(lease)
            else:  # its owner never ended it: it expires in the sidecar; a report may still come
                self._drop(lease)
        if self._held:
            self._timer.set(lease.renews_at)


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


class RemoteLeases(msgspec.Struct, eq=False):
    """Waits for leases with long polls: at most `most_polls` at a time, each of `poll` seconds.

    A request whose response got lost is repeated. At worst a lease is wasted, as the sidecar lets
    the lease expire; no lease is used twice.
    """

    _connection: SidecarConnection
    _tasks: OwnedTasks
    _unanswered: Callable[[Key, str, str], Decision]
    _held: HeldRemoteLeases
    _poll: float
    _slots: asyncio.Semaphore

    async def acquire(
        self, url: str, *, priority: int, timeout: float | None, user_agent: str | None, owned: bool
    ) -> RemoteLease:
        """See `RemoteGatekeeper.acquire`."""
        refuse_wrong_wait(priority, timeout)
        end = math.inf if timeout is None else self._held.clock.monotonic() + max(0.0, timeout)
        query = _LeaseQuery(url, urls.parse(url), priority, user_agent, end)
        task = asyncio.current_task() if owned else None
        waiting: TaskWait[RemoteLease] | None = None
        try:
            if task is not None:
                choice = Choice(query.target.url, query.target.host)
                waiting = self._held.waits.begin(task, lambda: (choice,), inherited(task))
            await self._slot(query)
            try:
                granted = await self._poll_until_granted(query)
            finally:
                self._slots.release()
        except WaitsForItself as error:
            # The sidecar learns of a lease's head only when the lease ends, so a lease that is not
            # granted immediately would wait for a task that waits itself.
            try:
                granted = await self._poll_until_granted(query, once=True)
            except LeaseTimeout:
                raise error from None
        except asyncio.CancelledError:
            if waiting is not None:
                waiting.cancelled()
            raise
        finally:
            if waiting is not None:
                self._held.waits.end(waiting)
        # There is no await between the response and this: every granted lease is held.
        return self._held.add(granted, query, task)

    async def acquire_if_due(
        self, url: str, *, priority: int, user_agent: str | None, owned: bool = False
    ) -> RemoteLease:
        """Grant a lease if the host is due now: one round trip, however long that takes.

        `acquire` with a timeout of 0 would close a slow request, and waste the lease it grants.
        """
        query = _LeaseQuery(url, urls.parse(url), priority, user_agent, math.inf)
        granted = await self._poll_until_granted(query, once=True)
        return self._held.add(granted, query, asyncio.current_task() if owned else None)

    async def try_acquire(
        self, url: str, *, priority: int, user_agent: str | None, owned: bool
    ) -> RemoteLease | NotYet:
        """See `RemoteGatekeeper.try_acquire`."""
        try:
            return await self.acquire_if_due(
                url, priority=priority, user_agent=user_agent, owned=owned
            )
        except Deferred as error:
            said = error.decision
            return not_yet(self._held.clock.wall(), said.reason, said.retry_at, said)
        except LeaseTimeout as error:
            return not_yet(self._held.clock.wall(), error.why, error.retry_at)

    async def _slot(self, query: _LeaseQuery) -> None:
        left = None if query.end == math.inf else query.end - self._held.clock.monotonic()
        try:
            async with deadline(self._held.clock, left):
                await self._slots.acquire()
        except TimeoutError:
            raise LeaseTimeout(
                query.target.url,
                f"{query.target.url}: too many others of this client are waiting (most_polls)",
            ) from None

    async def _poll_until_granted(self, query: _LeaseQuery, *, once: bool = False) -> LeaseBody:
        """Poll until the lease is granted or refused, or the caller's timeout passes.

        `once`: in one round trip. Raises LeaseTimeout if the lease is not granted immediately.
        """
        connection = self._connection
        began = self._held.clock.monotonic()
        give_up = -math.inf if once else began + (0.0 if connection.down else connection.patience)
        attempt = 0
        while True:
            now = self._held.clock.monotonic()
            wait = 0.0 if once else max(0.0, min(self._poll, query.end - now))
            pause = connection.backoff(attempt)
            try:
                answer = await self._send_poll(query, wait)
            except SidecarUnreachable as error:
                self._defer_if_late(query, str(error), pause, connection.last_retry(began, give_up))
            else:
                if answer.status == 201:
                    return read(answer, LeaseBody)
                if self._shortened(answer, wait):
                    continue
                pause = max(pause, answer.retry_after or 0.0)
                refusal = self._refusal(query, answer)
                if answer.status >= 500 and not isinstance(refusal, Deferred):
                    self._defer_if_late(query, f"it answers {answer.status}", pause, give_up)
                else:
                    # Retry-After is rounded up to whole seconds: one less is certain.
                    soonest = now + max(wait, (answer.retry_after or 0.0) - 1.0)
                    if once or not isinstance(refusal, LeaseTimeout) or soonest >= query.end:
                        raise refusal
                    # A poll that returned early, as the lease comes later than a poll lasts, is
                    # repeated when a poll can reach the lease.
                    whole = self._held.clock.monotonic() - now >= wait
                    pause = 0.0 if whole else max(1.0, pause - self._poll)
                    give_up = self._held.clock.monotonic() + connection.patience
            attempt += 1
            connection.repeated += 1
            left = query.end - self._held.clock.monotonic()
            await self._held.clock.sleep(max(0.0, min(pause, left)))

    def _shortened(self, answer: SidecarResponse, wait: float) -> bool:
        """Return True, and shorten polls, if the sidecar refused `wait` (server.max_wait)."""
        most = limit_in(answer) if answer.status == 400 else None
        if most is None or not 0 < most < wait:
            return False
        self._poll = min(self._poll, most)
        return True

    def _defer_if_late(self, query: _LeaseQuery, why: str, pause: float, give_up: float) -> None:
        """Raise Deferred if no time is left for another attempt."""
        if self._held.clock.monotonic() + pause > min(give_up, query.end):
            self._connection.give_up(why)
            key, origin = (query.url, query.user_agent), query.target.origin
            raise Deferred(self._unanswered(key, origin, why))

    def _refusal(self, query: _LeaseQuery, answer: SidecarResponse) -> GatekeeperError:
        error = problem(answer, query.url)
        if isinstance(error, SidecarError) and answer.status in (429, 503):
            wait = answer.retry_after
            moment = None if wait is None else utc(self._held.clock.wall() + wait)
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
        left = max(0.0, query.end - self._held.clock.monotonic())
        timeout = min(wait + _GRACE_SECONDS, left + _LAST_SECONDS)
        poll = self._tasks.start(
            self._connection.request("POST", "/v1/leases", encode(body), timeout=timeout)
        )
        try:
            return await asyncio.shield(poll)
        except SidecarUnreachable as error:
            if error.late:
                self._held.give_back_id(lease_id)  # the sidecar may notice the disconnect too late
            raise
        except asyncio.CancelledError:
            if poll.cancelled():
                self._held.give_back_id(lease_id)
                raise GateClosed("the gate was closed before the lease was granted") from None
            poll.add_done_callback(partial(self._give_back, lease_id))
            # In the next iteration: a response that was read in this one can still arrive.
            asyncio.get_running_loop().call_soon(poll.cancel)
            raise

    def _give_back(self, lease_id: str, poll: asyncio.Task[SidecarResponse]) -> None:
        if poll.cancelled() or poll.exception() is not None:
            self._held.give_back_id(lease_id)  # the response may be on its way
        elif poll.result().status == 201:
            self._held.give_back_id(read(poll.result(), LeaseBody).id)


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
