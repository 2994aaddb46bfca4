"""The leases that clients hold: granted, renewed, reported, given back, or run out.

Invariants
    * every lease in the table has an entry at its `due` in one heap with one timer; an
      entry is only a hint, for a lease may be gone or renewed by the time it comes up;
    * a client that hangs up while it waits has no lease: its place in the queue goes with
      its cancelled handler; one that hangs up at the grant gives the lease back unused;
    * a lease that is neither reported nor renewed ends by itself and counts as used;
    * `held + waiting` never exceeds `max_leases`, `waiting` never `max_waiting`, and what one
      client holds never `client_leases` (T15);
    * what the journal can't take was not granted, and not reported: the turn goes back, the
      report can be said again.
"""

from __future__ import annotations

import asyncio
import base64
import heapq
import logging
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import TYPE_CHECKING

import msgspec

from gatekeeper import urls
from gatekeeper.clock import Clock, Timer, utc
from gatekeeper.config import ServerConfig
from gatekeeper.errors import GatekeeperError, StorageError
from gatekeeper.leasing import Lease
from gatekeeper.sidecar.leasebook import LeaseBook, OpenLease
from gatekeeper.sidecar.problems import Problem
from gatekeeper.sidecar.waiting import WaitingRoom, Wanted, draining, full

if TYPE_CHECKING:
    from gatekeeper.gate import Gatekeeper
    from gatekeeper.sidecar.metrics import Sample

__all__ = ["EARLIER", "Held", "LeaseTable"]

logger = logging.getLogger(__name__)

_STORAGE = "storage"
_SLACK = 1000
_IDS = 256
"""Ids made at once: to ask the system costs more than all the rest of one."""
EARLIER = "earlier"
"""The client of a lease that an earlier process gave out, where the journal does not name it."""
_REMEMBERED = 10_000
"""Ended leases whose late or repeated report is still understood."""


class Held(msgspec.Struct, eq=False):
    """A lease in a client's hands."""

    id: str
    lease: Lease
    client: str
    granted_at: datetime
    expires_at: datetime
    ttl: float
    due: float
    """Monotonic moment at which it ends by itself."""
    user_agent: str | None = None


class LeaseTable:
    """All leases that clients hold, by id."""

    def __init__(
        self,
        server: ServerConfig,
        clock: Clock,
        book: LeaseBook | None = None,
        *,
        keep_going: bool = False,
    ) -> None:
        """`keep_going`: leases are given out though the journal takes none."""
        self._clock = clock
        self._keep_going = keep_going
        self._book = book or LeaseBook(None, clock=clock)
        self._left_over = {lease.id: lease for lease in self._book.left_over}
        self.room = WaitingRoom(server, clock)
        self.adjust(server)
        self._held: dict[str, Held] = {}
        self._by_host: dict[str, list[Held]] = {}
        self._by_client: dict[str, int] = {}
        self._ended: OrderedDict[str, Lease] = OrderedDict()
        self._ids: list[str] = []
        self._due: list[tuple[float, str]] = []
        self._timer: Timer | None = None
        self._armed = 0.0
        self._idle = asyncio.Event()
        self._idle.set()
        self._unwritten = False
        """The journal took no line when it was last tried."""
        self.ended = {"reported": 0, "given_back": 0, "expired": 0}
        self.refused = {"leases": 0, "journal": 0, "client": 0}

    def adjust(self, server: ServerConfig) -> None:
        """Put other bounds in force, for the leases to come."""
        self._max_leases = server.max_leases
        half = (server.max_leases + 1) // 2
        self._client_leases = half if server.client_leases is None else server.client_leases
        self.room.adjust(server)

    @property
    def writable(self) -> bool:
        """Does the journal take lines, as far as was seen, or need it not?"""
        if self._unwritten:
            self._unwritten = not self._book.writable
        return not self._unwritten

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, lease_id: str) -> bool:
        return lease_id in self._held

    async def acquire(
        self, gate: Gatekeeper, wanted: Wanted, client: str, gone: Callable[[], bool]
    ) -> Held:
        """Wait for the turn and hand out the lease.

        `gone` says whether the client hung up meanwhile. Raises what `gate.lease` raises,
        Problem 429 where the client holds as many as it may, or Problem 503 when another
        bound is reached, the service drains, or the disk is full.
        """
        try:
            return await self._acquire(gate, wanted, client, gone)
        except Problem as problem:
            if problem.kind == _STORAGE:  # the same word as where the state file is at fault
                target = urls.parse(wanted.url)
                problem.decision = gate.unkept(
                    wanted.url, target, wanted.user_agent, "the journal of leases takes no line"
                )
            raise

    async def _acquire(
        self, gate: Gatekeeper, wanted: Wanted, client: str, gone: Callable[[], bool]
    ) -> Held:
        self._admit(client)
        lease = await self.room.turn(gate, wanted, client)
        if self._by_client.get(client, 0) >= self._client_leases:  # others of its came meanwhile
            lease.give_back()
            raise self._too_many_of_one()
        # No await between the grant and the table: the lease is never nobody's.
        if gone():
            lease.give_back()
            raise ConnectionResetError("the client hung up while its turn came")
        return self._hold(lease, wanted.ttl, client, wanted.user_agent)

    def take(self, gate: Gatekeeper, url: str, ttl: float, client: str) -> Held | None:
        """The lease that can be had without waiting; None says nothing: `acquire` knows."""
        room = self.room
        if room.closed or self._unwritten or len(self._held) + len(room) >= self._max_leases:
            return None
        if self._by_client.get(client, 0) >= self._client_leases:
            return None
        lease = gate.take(url)
        return None if lease is None else self._hold(lease, ttl, client, None)

    async def take_up(self, gate: Gatekeeper) -> None:
        """Hold again what an earlier process left open, so that its hosts stay busy.

        Where that can't be done (no room for the host) it is remembered: its report is
        accepted, once, and what it says of the host counts.
        """
        async with asyncio.TaskGroup() as tasks:
            for left in self._book.left_over:
                tasks.create_task(self._take_up(gate, left))

    async def _take_up(self, gate: Gatekeeper, left: OpenLease) -> None:
        seconds = left.left(self._clock)
        try:
            lease = await gate.hold(left.url, seconds, user_agent=left.agent)
        except (GatekeeperError, OSError):
            return
        self._left_over.pop(left.id, None)
        if seconds > 0:
            self._enter(left.id, lease, seconds, left.client or EARLIER, left.agent)
        else:  # it ran out meanwhile: nothing is held, and its report counts all the same
            self._book.ran_out(left.id)
            self._remember(left.id, lease)

    def renew(self, lease_id: str, ttl: float | None) -> Held:
        """Put the end `ttl` seconds from now (as at first if None). Raises Problem 404, 503."""
        held = self._held.get(lease_id)
        if held is None:
            raise _unknown(lease_id)
        ttl = held.ttl if ttl is None else ttl
        self._write(lease_id, held.lease, ttl, held.user_agent, held.client)
        held.ttl = ttl
        held.lease.renew(ttl)
        held.expires_at = self._moment(ttl)
        held.due = self._remind(lease_id, held.ttl)
        return held

    def report(
        self,
        lease_id: str,
        *,
        status: int | None,
        elapsed: float | None,
        retry_after: float | str | None,
        size: int | None,
        rate_limit: str | None = None,
    ) -> OpenLease | None:
        """Say what came of it; that ends it. A repeated report changes nothing.

        A report that comes after the lease ran out still teaches the scheduler what the
        site said. For a lease of an earlier process that could not be held again it is
        returned, once: nobody but the caller can act on it. Raises Problem 404 for an id
        that was never given out, or long ago, and Problem 503 where the journal can't take
        it: then the lease is still held, and the report can be made again.
        """
        held = self._held.get(lease_id)
        left = self._left_over.get(lease_id)
        lease = held.lease if held is not None else self._ended.get(lease_id)
        if lease is None and left is None:
            raise _unknown(lease_id)
        if lease is not None:  # what the site said is in force, written down or not
            lease.report(
                status=status,
                elapsed=elapsed,
                retry_after=retry_after,
                size=size,
                rate_limit=rate_limit,
            )
        try:
            self._book.ended(lease_id)
        except OSError as error:
            self._unwritable(error)
        self._left_over.pop(lease_id, None)
        if held is not None:
            self._end(held, "reported")
        return left

    def give_back(self, lease_id: str) -> None:
        """End it unused: nothing was sent. Raises Problem 404 for an unknown one, and 503
        where the journal can't take it."""
        held = self._held.get(lease_id)
        if held is None and lease_id not in self._left_over and lease_id not in self._ended:
            raise _unknown(lease_id)
        try:
            self._book.ended(lease_id)
        except OSError as error:
            self._unwritable(error)
        self._left_over.pop(lease_id, None)
        if held is not None:
            self._end(held, "given_back")

    def drain(self) -> None:
        """Grant nothing from now on: who waits is told so at once (T16)."""
        self.room.close()

    async def drained(self) -> None:
        """Return when no client holds a lease any more."""
        await self._idle.wait()

    def close(self) -> None:
        """End what is still held, as used. The journal keeps it for the next process."""
        self.drain()
        self._book.close()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for held in self:
            self._end(held, "expired")

    def __iter__(self) -> Iterator[Held]:
        return iter(list(self._held.values()))

    def samples(self) -> Iterable[Sample]:
        """For /metrics."""
        yield (
            "gauge",
            "gatekeeper_leases",
            "Leases that clients hold or wait for.",
            ("state",),
            [(("held",), len(self._held)), (("waiting",), len(self.room))],
        )
        yield (
            "counter",
            "gatekeeper_leases_ended",
            "Leases ended, by how.",
            ("how",),
            [((how,), n) for how, n in self.ended.items()],
        )
        yield (
            "counter",
            "gatekeeper_leases_refused",
            "Requests for a lease that met a bound.",
            ("bound",),
            [
                *(((bound,), n) for bound, n in self.refused.items()),
                (("waiting",), self.room.refused),
            ],
        )

    def _admit(self, client: str) -> None:
        if self.room.closed:
            raise draining()
        if not self.writable:
            # No turn is taken that could not be kept.
            self.refused["journal"] += 1
            raise _no_room_on_disk("the journal of leases takes no line")
        too_many = self._by_client.get(client, 0) >= self._client_leases
        if len(self._held) + len(self.room) >= self._max_leases:
            self.refused["leases"] += 1
            why = full("leases are out or waited for already", self._max_leases)
            if too_many or not self.room.make_way(client, why):
                raise why
        if too_many:
            raise self._too_many_of_one()

    def _too_many_of_one(self) -> Problem:
        self.refused["client"] += 1
        return Problem(
            429,
            "too-many-leases",
            f"{self._client_leases} leases are allowed to one client (server.client_leases): "
            "report those that are done with",
            headers={"Retry-After": "1"},
            most=self._client_leases,
        )

    def _hold(self, lease: Lease, ttl: float, client: str, agent: str | None) -> Held:
        lease_id = self._new_id()
        try:
            self._write(lease_id, lease, ttl, agent, client)
        except Problem:
            lease.give_back()
            raise
        return self._enter(lease_id, lease, ttl, client, agent)

    def _write(
        self, lease_id: str, lease: Lease, ttl: float, agent: str | None, client: str
    ) -> None:
        """A grant or a renewal, for a process that comes after this one. Raises Problem 503."""
        if not self._book.kept:
            return
        try:
            self._book.granted(
                OpenLease.lasting(lease_id, lease.url, ttl, self._clock, agent, client)
            )
        except OSError as error:
            self._unwritable(error)

    def _unwritable(self, error: OSError) -> None:
        """The journal took no line. Raises Problem 503, unless leases go on without it."""
        if self._keep_going:
            logger.warning("a lease is not kept for a process after this one: %s", error)
            return
        self._unwritten = True
        self.refused["journal"] += 1
        raise _no_room_on_disk(error.strerror or str(error)) from error

    def _enter(
        self, lease_id: str, lease: Lease, ttl: float, client: str, agent: str | None
    ) -> Held:
        lease.renew(ttl)
        wall = self._clock.wall()
        # In the order of the fields: this is made for each lease.
        due = self._remind(lease_id, ttl)
        held = Held(lease_id, lease, client, utc(wall), utc(wall + ttl), ttl, due, agent)
        if not self._held:
            self._idle.clear()
        self._held[lease_id] = held
        self._by_client[client] = self._by_client.get(client, 0) + 1
        of_host = self._by_host.get(lease.host)
        if of_host is None:
            self._by_host[lease.host] = [held]
        else:
            of_host.append(held)
        return held

    def holding(self, host: str) -> Held | None:
        """Of the leases that hold a host, the one that ends first; None where none does."""
        held = self._by_host.get(host, ())
        return min(held, key=lambda one: one.due, default=None)

    def _drop(self, held: Held) -> None:
        """Out of the tables."""
        del self._held[held.id]
        left = self._by_client[held.client] - 1
        if left:
            self._by_client[held.client] = left
        else:
            del self._by_client[held.client]
        host = held.lease.host
        of_host = self._by_host[host]
        if len(of_host) == 1:
            del self._by_host[host]
        else:
            of_host.remove(held)

    def _new_id(self) -> str:
        """Nobody can guess it: 96 bits of the system's randomness, drawn for many at a time."""
        if not self._ids:
            text = base64.urlsafe_b64encode(secrets.token_bytes(_IDS * 12)).decode()
            self._ids = [text[n : n + 16] for n in range(0, len(text), 16)]
        return self._ids.pop()

    def _end(self, held: Held, how: str) -> None:
        """Out of the table, and the slot is the next one's; what is to be kept is written."""
        self._drop(held)
        if not self._held:
            self._idle.set()
        self.ended[how] += 1
        self._remember(held.id, held.lease)
        if how == "given_back":
            held.lease.give_back()
            return
        try:
            held.lease.end()  # without a report it counts as used
        except (OSError, StorageError):
            logger.exception("the end of a lease was not kept")

    def _remember(self, lease_id: str, lease: Lease) -> None:
        """It ended: its report may still come, and counts."""
        self._ended[lease_id] = lease
        if len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)

    def _remind(self, lease_id: str, seconds: float) -> float:
        """Have the lease looked at when it is due; returns that moment."""
        due = self._clock.monotonic() + seconds
        heapq.heappush(self._due, (due, lease_id))
        if len(self._due) > 2 * len(self._held) + _SLACK:
            # Mostly leases that were reported long before their end: let their hints go.
            self._due = [(held.due, held.id) for held in self._held.values()]
            heapq.heappush(self._due, (due, lease_id))
            heapq.heapify(self._due)
        if self._timer is None or due < self._armed:
            self._arm(due)
        return due

    def _arm(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._armed = when
        self._timer = self._clock.call_at(when, self._sweep)

    def _sweep(self) -> None:
        """End every lease whose moment has come."""
        self._timer = None
        now = self._clock.monotonic()
        while self._due and self._due[0][0] <= now:
            _, lease_id = heapq.heappop(self._due)
            held = self._held.get(lease_id)
            if held is not None and held.due <= now:
                # The journal knows when it runs out; one that is full stops no sweep.
                self._book.ran_out(lease_id)
                self._end(held, "expired")
        if self._due:
            self._arm(self._due[0][0])

    def _moment(self, seconds: float) -> datetime:
        return utc(self._clock.wall() + seconds)


def _unknown(lease_id: str) -> Problem:
    return Problem(404, "no-lease", f"there is no lease {lease_id[:40]!r}; it may have run out")


def _no_room_on_disk(why: str) -> Problem:
    return Problem(
        503,
        _STORAGE,
        f"leases can't be kept: {why}; make room where the state file lies (storage.path), "
        'or keep nothing with storage.path = "memory"',
        headers={"Retry-After": "5"},
    )
