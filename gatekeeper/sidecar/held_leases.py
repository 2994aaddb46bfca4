"""The leases that clients hold, and the journal that preserves them for the next process.

Invariants
    * every lease in the table is at its `due` in one heap with one timer;
    * a client that hangs up while it waits gets no lease: its place in the queue goes with
      its cancelled handler. If it hangs up at the grant, the lease is given back unused;
    * a lease that is neither reported nor renewed expires and counts as used;
    * `held + waiting` never exceeds `max_leases`, `waiting` never `max_waiting`, and what one
      client holds never `client_leases` (T15);
    * what the journal can't store was not granted, and not reported: the grant is given back, the
      report can be repeated.

A client outlives a sidecar that dies: its request may be in flight, and its report will
still come. So each grant and each end is a line, written before the response (kill -9 loses no
write that the system has accepted). On start the leases without an end are held
again: their hosts' slots stay occupied until the report, or until they expire. An expired lease
stays in the journal for another TTL, since its report may be in flight.

    + ID EXPIRES URL AGENT CLIENT TTL BOOT_ID BOOT_AT     granted, or renewed
    - ID                                                  ended

EXPIRES is in wall seconds; the line was written TTL seconds before. BOOT_ID and BOOT_AT give that
moment by the machine's boot clock (`clock.Stamp`). AGENT is empty for the service's own, CLIENT
(the holder) where it is unknown. Earlier versions wrote neither TTL nor the fields after it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote, unquote

import msgspec

from gatekeeper import urls
from gatekeeper.client.wire import LeaseReport, LeaseRequestBody
from gatekeeper.clock import Clock, DueHeap, SingleTimer, Stamp, boot_of, utc
from gatekeeper.config import ServerConfig
from gatekeeper.errors import GatekeeperError, StorageError
from gatekeeper.gate import Gatekeeper
from gatekeeper.gate.lease import Lease
from gatekeeper.sidecar.lease_requests import LeaseWaiters, draining, full
from gatekeeper.sidecar.metrics import Samples
from gatekeeper.sidecar.routing import Problem
from gatekeeper.storage.base import NO_SPACE

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


_STORAGE = "storage"
_RETRY_SECONDS = 0.5
"""Seconds between two attempts to hold the leases of an earlier process again."""
_ID_OCTETS = 12
"""Random octets in the id of a lease."""
EARLIER = "earlier"
"""The client of a lease that an earlier process granted, if the journal does not name it."""
MAX_REMEMBERED = 10_000
"""Ended leases whose late or repeated report is still accepted; at times a 64th fewer."""
_MAX_ID = 64
"""Characters that an id chosen by a client may have (`wire.LeaseId`)."""


class ClientLease(msgspec.Struct, eq=False):
    """A lease that a client holds."""

    id: str
    lease: Lease
    client: str
    granted_at: datetime
    expires_at: datetime
    ttl: float
    due: float
    """Monotonic moment at which the lease expires."""
    user_agent: str | None = None


class LeaseTable:
    """All leases that clients hold, by id."""

    def __init__(
        self,
        server: ServerConfig,
        clock: Clock,
        journal: LeaseJournal | None = None,
        *,
        keep_going: bool = False,
        on_report: Callable[[str, int], object] = lambda _host, _status: None,
    ) -> None:
        """`keep_going`: grant leases even if the journal can't be written. `on_report` is called
        with the host and the status of each report."""
        self._clock = clock
        self._keep_going = keep_going
        self._journal = journal or LeaseJournal(None, clock=clock)
        self._left_over = {lease.id: lease for lease in self._journal.left_over}
        self.waiters: LeaseWaiters = LeaseWaiters(server, clock)
        self.adjust(server)
        self._held: dict[str, ClientLease] = {}
        self._by_host: dict[str, list[ClientLease]] = {}
        self._by_client: Counter[str] = Counter()
        self._ended: dict[str, Lease | None] = {}
        """Leases that ended: a report may still come, and counts. None if a report ended it."""
        self._given_back_early: dict[str, None] = {}
        """Ids that a client chose and gave back before a lease with that id was granted."""
        self._due = DueHeap[str](self._is_due, self._held.__len__)  # by id, as it keeps ended ones
        self._timer = SingleTimer(clock, self._sweep)
        self._journal_failed = not self._journal.writable
        """Whether the latest attempt to write to the journal failed."""
        self._restoring: asyncio.Task[None] | None = None
        self._on_report = on_report
        self.ended: dict[str, int] = {"reported": 0, "given_back": 0, "expired": 0, "dropped": 0}
        self.refused: dict[str, int] = {"leases": 0, "journal": 0, "client": 0}

    def adjust(self, server: ServerConfig) -> None:
        """Apply changed limits, for leases granted from now on."""
        self._max_leases = server.max_leases
        half = (server.max_leases + 1) // 2
        self._client_leases = half if server.client_leases is None else server.client_leases
        self.waiters.adjust(server)

    @property
    def writable(self) -> bool:
        """Whether the journal can be written, as far as is known, or is not needed."""
        if self._journal_failed:
            self._journal_failed = not self._journal.writable
        return not self._journal_failed

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, lease_id: str) -> bool:
        return lease_id in self._held

    async def acquire(
        self, gate: Gatekeeper, wanted: LeaseRequestBody, client: str, hung_up: Callable[[], bool]
    ) -> ClientLease:
        """Wait until the host is due and grant the lease.

        `hung_up` returns whether the client hung up meanwhile. Raises what `gate.lease` raises,
        Problem 429 if the client holds as many leases as it may, or Problem 503 if another limit
        is reached, the service drains, or the disk is full.
        """
        try:
            self._admit(client)
            lease = await self.waiters.acquire(gate, wanted, client)
            # No await between the grant and the table, so every granted lease has an owner.
            if hung_up():
                lease.give_back()
                raise ConnectionResetError("the client hung up while its lease was granted")
            return self._grant(lease, wanted.ttl, client, wanted.user_agent, wanted.id)
        except Problem as problem:
            if problem.kind == _STORAGE:
                # The decision is the one for a state file that can't be written.
                target, why = urls.parse(wanted.url), "the journal of leases can't be written"
                no_lease = gate.parts.questions.no_lease
                problem.decision = no_lease(wanted.url, target, wanted.user_agent, why)
            raise

    def acquire_nowait(
        self, gate: Gatekeeper, url: str, ttl: float, client: str, lease_id: str | None = None
    ) -> ClientLease | None:
        """Grant a lease without waiting. Return None if that may take waiting: use `acquire`."""
        if self.waiters.closed or self._journal_failed or self._is_full or self._has_most(client):
            return None
        lease = gate.parts.leases.acquire_nowait(url, None)
        return None if lease is None else self._grant(lease, ttl, client, None, lease_id)

    async def restore(self, gate: Gatekeeper) -> None:
        """Hold the leases again that an earlier process left open, so that their hosts stay busy.

        A lease that can't be held (no room for the host) is remembered: its report is
        accepted, once, and takes effect on the host.
        """
        async with asyncio.TaskGroup() as tasks:
            for earlier in list(self._left_over.values()):
                tasks.create_task(self._restore_one(gate, earlier))
        if self._left_over and gate.parts.storage_failing is not None:
            self._restoring = asyncio.create_task(self._restore_later(gate))

    async def _restore_later(self, gate: Gatekeeper) -> None:
        """Call `restore` again once the state file can be read."""
        while gate.parts.storage_failing is not None:
            await self._clock.sleep(_RETRY_SECONDS)
        await self.restore(gate)
        _log.info("%d leases of an earlier process are held again", len(self._held))

    async def _restore_one(self, gate: Gatekeeper, earlier: OpenLease) -> None:
        seconds = earlier.remaining(self._clock)
        try:
            lease = await gate.parts.leases.hold(earlier.url, seconds, earlier.agent)
        except (GatekeeperError, OSError):
            return
        self._left_over.pop(earlier.id, None)
        if seconds > 0:
            self._add(earlier.id, lease, seconds, earlier.client or EARLIER, earlier.agent)
        else:  # it has expired: its slot is free, but its report still counts
            urls.make_room(self._ended, MAX_REMEMBERED)
            self._ended[earlier.id] = lease

    def renew(self, lease_id: str, ttl: float | None) -> ClientLease:
        """Make the lease end `ttl` seconds from now. Raises Problem 404 or 503.

        None: the `ttl` that it was granted or last renewed with.
        """
        held = self._held_as(lease_id)
        ttl = held.ttl if ttl is None else ttl
        self._record_grant(lease_id, held.lease, ttl, held.user_agent, held.client)
        held.ttl = ttl
        held.lease.renew(ttl)
        held.expires_at = utc(self._clock.wall() + ttl)
        held.due = self._clock.monotonic() + ttl
        self._due.add(held.due, lease_id)
        self._timer.set_no_later(held.due)
        return held

    def report(self, lease_id: str, reported: LeaseReport) -> OpenLease | None:
        """Report how the site answered, and end the lease. A repeated report changes nothing.

        A report that comes after the lease expired still reaches the scheduler. Return None,
        except for a lease of an earlier process that could not be held again: that one is
        returned, once, since only the caller can act on it. Raises Problem 404 for an id
        that was never granted, or long ago, and Problem 503 if the journal can't be
        written: then the lease is still held, and the report can be repeated.
        """
        held = self._held.get(lease_id)
        earlier = self._left_over.get(lease_id)
        lease = held.lease if held is not None else self._ended.get(lease_id)
        if lease is None and not self._knows(lease_id):
            raise _unknown(lease_id)
        if lease is not None:  # the site's answer counts even if the journal can't be written
            repeated = lease.reported
            lease.report(**msgspec.structs.asdict(reported))
            if reported.status is not None and not repeated:
                self._on_report(lease.host, reported.status)
        self._record_end(lease_id, held, "reported")
        return earlier

    def give_back(self, lease_id: str) -> None:
        """End a lease unused: no request was sent.

        Raises Problem 404 for an unknown id, and 503 if the journal can't be written. A client
        that chose the id may give it back on another connection before its request for the lease
        is read. Then no lease is granted under that id.
        """
        if not self._knows(lease_id):
            if len(lease_id) <= _MAX_ID:
                urls.make_room(self._given_back_early, MAX_REMEMBERED)
                self._given_back_early[lease_id] = None
            raise _unknown(lease_id)
        self._record_end(lease_id, self._held.get(lease_id), "given_back")

    def drop(self, lease_id: str) -> None:
        """End a lease for the operator, who takes its client for gone. Raises Problem 404 or 503.

        It counts as used, and a late report is still accepted.
        """
        self._record_end(lease_id, self._held_as(lease_id), "dropped")

    def _held_as(self, lease_id: str) -> ClientLease:
        if (held := self._held.get(lease_id)) is None:
            raise _unknown(lease_id)
        return held

    def drain(self) -> None:
        """Grant no more leases; waiting clients get a 503 immediately (T16)."""
        self.waiters.close()

    def close(self) -> None:
        """End the leases still held, as used. They stay in the journal for the next process."""
        self.drain()
        if self._restoring is not None:
            self._restoring.cancel()
        self._journal.close()
        self._timer.cancel()
        for held in self:
            self._end(held, "expired")

    def __iter__(self) -> Iterator[ClientLease]:
        return iter(list(self._held.values()))

    def samples(self) -> Samples:
        """Return the samples for /metrics."""
        return {
            "gatekeeper_leases": {"held": len(self._held), "waiting": len(self.waiters)},
            "gatekeeper_leases_ended": self.ended,
            "gatekeeper_leases_refused": {**self.refused, "waiting": self.waiters.refused},
        }

    def _admit(self, client: str) -> None:
        if self.waiters.closed:
            raise draining()
        if not self.writable:
            # Wait for no host whose lease could not be stored.
            self.refused["journal"] += 1
            raise _journal_problem("the journal of leases can't be written")
        too_many = self._has_most(client)
        if self._is_full:
            self.refused["leases"] += 1
            why = full("leases are held or waited for already", self._max_leases)
            if too_many or not self.waiters.displace_waiter(client, why):
                raise why
        if too_many:
            raise self._client_limit_reached()

    @property
    def _is_full(self) -> bool:
        return len(self._held) + len(self.waiters) >= self._max_leases

    def _has_most(self, client: str) -> bool:
        """Return whether the client holds as many leases as it may."""
        return self._by_client[client] >= self._client_leases

    def _client_limit_reached(self) -> Problem:
        self.refused["client"] += 1
        most = self._client_leases
        detail = f"server.client_leases allows {most} to one client: report those that are finished"
        return Problem(429, "too-many-leases", detail, wait=1, most=most)

    def _grant(
        self, lease: Lease, ttl: float, client: str, agent: str | None, lease_id: str | None
    ) -> ClientLease:
        try:
            if self._has_most(client):  # it got others meanwhile
                raise self._client_limit_reached()
            if lease_id in self._given_back_early:
                raise Problem(410, "given-back", "the lease with that id was given back already")
            if lease_id is None or self._knows(lease_id):
                lease_id = os.urandom(_ID_OCTETS).hex()  # so that nobody can guess it
            self._record_grant(lease_id, lease, ttl, agent, client)
        except Problem:
            lease.give_back()
            raise
        return self._add(lease_id, lease, ttl, client, agent)

    def _knows(self, lease_id: str) -> bool:
        return lease_id in self._held or lease_id in self._left_over or lease_id in self._ended

    def _record_grant(
        self, lease_id: str, lease: Lease, ttl: float, agent: str | None, client: str
    ) -> None:
        """Write a grant or a renewal to the journal. Raises Problem 503."""
        if self._journal.path is not None:
            expires_at, boot = self._clock.wall() + ttl, boot_of(self._clock)
            written = OpenLease(lease_id, expires_at, lease.url, agent, client, ttl, *boot)
            self._record(self._journal.granted, written)

    def _record_end(self, lease_id: str, held: ClientLease | None, how: str) -> None:
        """Write an end to the journal, and end the lease if it is held. Raises Problem 503."""
        if self._journal.path is not None:
            self._record(self._journal.ended, lease_id)
        self._left_over.pop(lease_id, None)
        if held is not None:
            self._end(held, how)

    def _record(self, write: Callable[[_T], object], what: _T) -> None:
        """Call `write(what)`. Raises Problem 503 if that fails, unless `keep_going` was given."""
        try:
            write(what)
        except OSError as error:
            _log.warning("a lease can't be stored for the next process: %s", error)
            if self._keep_going:
                return
            self._journal_failed = True
            self.refused["journal"] += 1
            raise _journal_problem(error.strerror or str(error)) from error

    def _add(
        self, lease_id: str, lease: Lease, ttl: float, client: str, agent: str | None
    ) -> ClientLease:
        lease.renew(ttl)
        wall, due = self._clock.wall(), self._clock.monotonic() + ttl
        # Positional arguments, which are faster: one of these is made for each lease.
        held = ClientLease(lease_id, lease, client, utc(wall), utc(wall + ttl), ttl, due, agent)
        self._held[lease_id] = held
        self._by_client[client] += 1
        self._by_host.setdefault(lease.host, []).append(held)
        self._due.add(due, lease_id)
        self._timer.set_no_later(due)
        return held

    def holding(self, host: str) -> ClientLease | None:
        """Return the lease of a host that ends first, or None if there is none."""
        held = self._by_host.get(host, ())
        return min(held, key=lambda one: one.due, default=None)

    def _end(self, held: ClientLease, how: str) -> None:
        """Remove a lease from the tables, count why it ended, and free its host's slot."""
        lease, client = held.lease, held.client
        del self._held[held.id]
        self._by_client[client] -= 1
        if not self._by_client[client]:
            del self._by_client[client]
        of_host = self._by_host[lease.host]
        of_host.remove(held)
        if not of_host:
            del self._by_host[lease.host]
        self.ended[how] += 1
        urls.make_room(self._ended, MAX_REMEMBERED)
        self._ended[held.id] = None if how == "reported" else lease
        if how == "given_back":
            lease.give_back()
            return
        try:
            lease.end()  # without a report it counts as used
        except (OSError, StorageError):
            _log.exception("the end of a lease was not stored")

    def _is_due(self, when: float, lease_id: str) -> bool:
        return lease_id in self._held and self._held[lease_id].due == when

    def _sweep(self) -> None:
        """End every lease that has expired."""
        for lease_id in self._due.pop(self._clock.monotonic()):
            # Its line in the journal says when it expires, so a full disk does not stop the sweep.
            self._end(self._held[lease_id], "expired")
        self._timer.set(self._due.next())


def _unknown(lease_id: str) -> Problem:
    return Problem(404, "no-lease", f"there is no lease {lease_id[:40]!r}; it may have expired")


def _journal_problem(why: str) -> Problem:
    remedy = 'free some space for storage.path, or store nothing by storage.path = "memory"'
    return Problem(503, _STORAGE, f"leases can't be stored: {why}; {remedy}", wait=5)


# --- The journal of open leases, a small file beside the state file.


MAX_BYTES = 4_194_304
_MAX_OPEN = 100_000
_UNQUOTED = "!#$%&'()*+,/:;=?@[]~"


class OpenLease(msgspec.Struct, frozen=True, gc=False):
    """A lease without an end in the journal: the fields of its line, in their order."""

    id: str
    expires_at: float
    """Wall seconds."""
    url: str
    agent: str | None = None
    """None for the service's own."""
    client: str | None = None
    """The client that holds the lease. None if unknown."""
    ttl: float = 60.0
    """Seconds from its grant or renewal to its end; in a line without it, those of a request that
    named none."""
    boot_id: str = ""
    boot_at: float = 0.0
    """Moment of its grant or renewal by the machine's boot clock; see `clock.Stamp`."""

    def remaining(self, clock: Clock) -> float:
        """Return the seconds until its end, at most `ttl`. Negative if it has ended."""
        if not self.boot_id:  # written by an earlier version: only the wall clock is known
            return self.expires_at - clock.wall()
        return self.ttl - Stamp(self.expires_at - self.ttl, self.boot_id, self.boot_at).age(clock)

    def reportable(self, clock: Clock) -> bool:
        """Return whether its report may still come: until `ttl` seconds after its end."""
        return self.remaining(clock) > -self.ttl


class LeaseJournal:
    """The journal, open for appending. Without a path nothing is stored.

    `left_over` are the leases that an earlier process left open and whose report may still
    come. Raises OSError if the file can't be read or written. With `wait`, a full disk does not
    raise: then `writable` creates the file as soon as there is space.
    """

    def __init__(self, path: Path | None, *, clock: Clock, wait: bool = False) -> None:
        self.path: Path | None = path
        self._clock = clock
        self._open: dict[str, OpenLease] = {}
        """Leases without an end in the file. It forgets at each `_rewrite` those that expired and
        whose report can't come any more, so the size of the file bounds their number."""
        self._fd = -1
        self._size = 0
        self._incomplete = False
        """Whether the file ends with part of a line, after which nothing may be appended."""
        self._rewrite_at = MAX_BYTES
        if path is not None:
            self._open = _read(path)
            try:
                self._rewrite()
            except OSError as error:
                if not wait or error.errno not in NO_SPACE:
                    raise
        self.left_over: tuple[OpenLease, ...] = tuple(self._open.values())

    def granted(self, lease: OpenLease) -> None:
        """Write a grant or a renewal; the later line counts. Raises OSError: nothing was stored."""
        self._append(_line(lease))
        self._open[lease.id] = lease

    def ended(self, lease_id: str) -> None:
        """Write the end of a lease. An unknown id is not an error.

        Raises OSError if nothing was stored: then the lease is still open here, and the call can
        be repeated.
        """
        if lease_id not in self._open:
            return
        self._append(f"- {lease_id}\n")
        self._open.pop(lease_id, None)  # the file may have been written anew without it

    @property
    def writable(self) -> bool:
        """Whether a line can be written now. Tries it: writes an empty line, or the file anew."""
        if self.path is None:
            return True
        with contextlib.suppress(OSError):
            if self._fd == -1:
                self._rewrite()  # the descriptor was lost, but the disk may be fine
            else:
                self._append("\n")
            return True
        return False

    def close(self) -> None:
        """Close the file, leaving open leases in it. Later calls write nothing. Idempotent."""
        self.path = None
        self._open.clear()
        self._close_file()

    def _close_file(self) -> None:
        if self._fd != -1:
            os.close(self._fd)
            self._fd = -1

    def _append(self, line: str) -> None:
        data = line.encode()
        if self._size > self._rewrite_at:
            # Without success the old file holds the same leases, at greater length.
            self._rewrite_at = self._size + MAX_BYTES
            with contextlib.suppress(OSError):
                self._rewrite()
        try:
            # If the file was removed, nobody would ever read the line.
            if self._incomplete or os.fstat(self._fd).st_nlink == 0:
                self._rewrite()
            # One write, so that a line is whole or, after a power cut, incomplete and ignored.
            written = os.write(self._fd, data)
        except OSError as error:
            if error.errno == errno.EBADF:
                self._fd = -1  # closed elsewhere: its number may be another file's by now
            raise
        if written < len(data):
            # A full disk stores part of a line: with a later line appended, it would name
            # another URL.
            self._incomplete = True
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._size += len(data)

    def _rewrite(self) -> None:
        """Write a new file with the open leases and put it in place atomically."""
        if self.path is None:
            return
        fresh = self.path.with_name(self.path.name + ".new")
        self._open = {one.id: one for one in self._open.values() if one.reportable(self._clock)}
        data = "".join(map(_line, self._open.values())).encode()
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_NONBLOCK
        fd = os.open(fresh, flags, 0o600)
        try:
            if os.write(fd, data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            fresh.replace(self.path)
        except BaseException:
            os.close(fd)
            with contextlib.suppress(OSError):
                fresh.unlink(missing_ok=True)
            raise
        self._close_file()
        self._incomplete = False
        self._fd, self._size = fd, len(data)
        self._rewrite_at = max(MAX_BYTES, 2 * self._size)


def _line(lease: OpenLease) -> str:
    url = lease.url
    if not url.isprintable() or " " in url:
        url = quote(url, safe=_UNQUOTED)  # a space or a line end would break the line's format
    agent, client = quote(lease.agent or "", safe=""), quote(lease.client or "", safe="")
    return (
        f"+ {lease.id} {lease.expires_at:.3f} {url} {agent} {client} "
        f"{lease.ttl:.3f} {lease.boot_id} {lease.boot_at:.3f}\n"
    )


def _read(path: Path) -> dict[str, OpenLease]:
    """Read the open leases from the journal, by id. Malformed lines are skipped."""
    leases: dict[str, OpenLease] = {}
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    for line in text.split("\n")[:-1]:
        parts = line.split(" ")
        if parts[0] == "-" and len(parts) == 2:
            leases.pop(parts[1], None)
        elif parts[0] == "+" and len(parts) in (4, 5, 6, 9) and len(leases) < _MAX_OPEN:
            fields = dict(zip(OpenLease.__struct_fields__, parts[1:], strict=False))
            names = {name: unquote(fields.get(name, "")) or None for name in ("agent", "client")}
            with contextlib.suppress(msgspec.ValidationError):
                leases[parts[1]] = msgspec.convert({**fields, **names}, OpenLease, strict=False)
    return leases
