"""The scopes in memory, and how their clocks outlive the process.

`ScopeMemory` creates, finds and forgets scopes within `pacing.max_hosts`. `Promises` stores their
clocks and blocks in a `Storage`, as `ClockRecord`s.

In memory all times are monotonic; on disk they are wall times, with the time at which the record
was made. Only this module converts them, when it makes or reads a record. While the machine runs,
nothing depends on what the wall clock is set to. After a reboot the wall clock tells how much time
has passed, and no block lasts longer than its own length.

A change that can't be written is in force all the same, and its scope gets no lease until it is
written.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

from gatekeeper.clock import Clock, Stamp, boot_of, stamp
from gatekeeper.errors import LeaseTimeout, StorageError
from gatekeeper.pacing.grants import PacingAudit
from gatekeeper.pacing.host_settings import DAY, SHARED_PREFIXES, Rules, Usage
from gatekeeper.pacing.ledger import Report, ScopeClock
from gatekeeper.pacing.scopes import DURABLE, INF, LONGEST, ROUNDING, BackOff, Scope, ScopeHistory
from gatekeeper.split_dict import SplitDict
from gatekeeper.storage.base import ClockRecord, Storage

RUNNING = "gatekeeper:running"
"""Name of a record that exists while a scheduler runs. Found at the start, it shows a crash."""
_JUMP_SECONDS = 1.0
"""Seconds by which the wall clock must have moved against the monotonic one to be a jump."""
_RECENT_SECONDS = 10.0
"""At a clean end, hosts asked within this many seconds are stored whatever their interval: the next
run may learn that they ask for a longer one, which counts from that last request."""

_log = logging.getLogger(__name__)


class Promises:
    """Stores clocks and blocks in a `Storage`."""

    def __init__(self, storage: Storage, clock: Clock, memory: ScopeMemory) -> None:
        self.storage: Storage = storage
        self._clock = clock
        self._memory = memory
        self._offset = clock.wall() - clock.monotonic()
        self._boot_id, counted = boot_of(clock)
        self._suspended = counted - clock.monotonic()
        """Seconds since boot that `monotonic` does not count, such as suspend. It is not read each
        time: whenever it grows, the wall clock moves on as well, which `check_wall` notices."""
        self.unwritten: set[str] = set()
        """Scopes whose latest record could not be written when it was made."""
        self._unread = False
        """The storage could not be read at the start."""
        self.made: int = 0
        """Records made durable since the start."""

    async def load(self) -> int:
        """Read the stored clocks; after a crash, count what was in flight as just used.

        Returns how many hosts were left in the storage because there is no room for them; not 0
        if it can't be read yet.
        """
        self.storage.watch(self._check_exhausted)
        try:
            records = await self.storage.load_clocks()
        except StorageError:
            if self.storage.failing is None:
                raise
            # Continue: each host is looked up there before its first lease.
            records, self._unread = [], True
        now = self._clock.monotonic()
        if self._unread or any(record.scope == RUNNING for record in records):
            # What an earlier process did in its last second counts as just done.
            self._memory.floor_until = now + DURABLE
        moved = self._wall_moved(records)
        left = 0
        for record in records:
            if record.scope == RUNNING:
                continue
            most = self._memory.rules.pacing.max_hosts
            room = len(self._memory.scopes) < most or record.scope.startswith(SHARED_PREFIXES)
            left += not room
            if room or moved:
                scope = self.restore(record, now)
                if moved and (scope.history is not None or self._matters(scope, now)):
                    # The storage's upkeep forgets old records, by the wall clock.
                    self.keep(scope, now)
                if not room:
                    self._memory.drop(scope)
        with contextlib.suppress(StorageError):
            self.mark()
        return left + self._unread

    def mark(self) -> None:
        """Store the record that shows the next run a crash. Raises StorageError. No lease may be
        granted before it is written, since nothing else covers clocks of up to a second."""
        wall, boot, at = stamp(self._clock)
        record = ClockRecord(
            scope=RUNNING, next_at=0.0, paused=True, made_at=wall, boot_id=boot, boot_at=at
        )
        self._write(self.storage.promise, record)

    @property
    def marked(self) -> bool:
        """True if the next run would notice a crash, and the blocks that leases cause until then
        can be stored."""
        return RUNNING not in self.unwritten

    def is_unwritten(self, scope: Scope) -> bool:
        """Return True if a record of the scope is still unwritten, as far as is known here."""
        if not self.unwritten:
            return False
        if self.marked and self.storage.failing is None:
            self.unwritten.clear()  # The storage has written all of them by now.
            self._unread = False
        return scope.name in self.unwritten

    def _wall_moved(self, records: list[ClockRecord]) -> bool:
        """Return True, and log it, if the wall clock was set since the latest record was made."""
        stamps = [one for record in records if (one := _stamp_of(record)) is not None]
        boot = boot_of(self._clock).id
        latest = max(
            stamps, key=lambda one: (one.boot_id == boot, one.boot_at, one.wall), default=None
        )
        moved = None if latest is None else latest.wall_shift(self._clock)
        if moved is None or abs(moved) <= _JUMP_SECONDS:
            return False
        _log_jump(moved, "while no gatekeeper ran here, ")
        return True

    def _shift(self, record: ClockRecord, now: float) -> float:
        """Return what to add to a time of the record to get one of the clock that shows `now`."""
        made = _stamp_of(record)
        if made is None:
            return now - self._clock.wall()
        return now - made.age(self._clock) - made.wall

    def restore(self, record: ClockRecord, now: float) -> Scope:
        """Set the scope that a record describes, creating it if needed, and return it."""
        memory = self._memory
        scope = memory.scopes.get(record.scope) or memory.create(record.scope)
        self.check_wall(now)
        shift = self._shift(record, now)
        ahead = max(0.0, record.next_at + shift - now)
        if (interval := record.interval) is None or not 0.0 <= interval < INF:
            # With the longest possible interval, no other is counted from this basis.
            scope.basis, scope.interval = now + ahead - LONGEST, LONGEST
        elif record.in_flight:
            # Open at a crash: the request may have been sent at the last moment. The stored time
            # does not matter: the wall clock may have jumped since.
            scope.basis, scope.interval = now, interval
        else:
            # The last request is not in the future, whatever the wall clock did since.
            scope.basis = min(record.next_at + shift - interval, now)
            scope.interval = interval
            # After a crash: later requests, by a short interval, were not stored.
            scope.basis = max(scope.basis, memory.floor_until - max(interval, DURABLE))
        history = ScopeHistory(
            failures=record.failures,
            probing=record.failures > 0,
            failed_at=record.last_failure_at + shift if record.failures else -INF,
            back_off=self._back_off(record, now, shift) if record.safe_interval else None,
            errors=record.errors,
            latency=record.latency,
            paused=record.paused,
            rate_limit=record.said_interval,
            rate_limit_until=record.said_until + shift if record.said_until else -INF,
        )
        if (blocked := record.blocked_until + shift) > now:
            history.block(blocked, record.block_reason)
        if record.day_at:
            began = min(record.day_at + shift, now)
            history.usage = Usage(began, record.day_pages, record.day_bytes)
        if history.latency is not None or history.matters(now, memory.rules.pacing):
            scope.history = history
        if memory.audit is not None and blocked > now:
            memory.audit.blocked(scope, "state")
        if memory.audit is not None and record.paused:
            memory.audit.paused(scope.name, "state", ended=False)
        return scope

    def _back_off(self, record: ClockRecord, now: float, shift: float) -> BackOff:
        """Return the back-off of a record. A refusal without a stored time counts as one of now."""
        back_off = BackOff()
        when = record.refused_at or record.last_failure_at
        back_off.restore(
            record.refused_interval or record.safe_interval / 2.0,
            record.refused_status,
            min(when + shift, now) if when else now,
            record.retry_wait,
            record.blocked_until + shift,
            self._memory.rules.pacing,
            record.safe_interval,
        )
        return back_off

    def record(self, scope: Scope, now: float) -> ClockRecord:
        """Return the record to store for the scope."""
        self.check_wall(now)
        wall = self._clock.wall()
        shift = wall - now
        interval = self._memory.longest_of(scope)
        clock = scope.clock_at(interval)
        next_at = clock + shift if clock > -INF else 0.0
        history = scope.past
        blocked = history.blocked_until > now
        said = history.rate_limit_until > now
        taught, used = history.back_off, history.usage
        return ClockRecord(
            scope=scope.name,
            next_at=next_at,
            blocked_until=history.blocked_until + shift if blocked else 0.0,
            block_reason=history.reason if blocked else "",
            failures=history.failures,
            last_failure_at=history.failed_at + shift if history.failures else 0.0,
            safe_interval=taught.slowed or taught.refused if taught else 0.0,
            refused_interval=taught.refused if taught else 0.0,
            refused_at=taught.refused_at + shift if taught else 0.0,
            refused_status=taught.status if taught else 0,
            retry_wait=taught.wait if taught else 0.0,
            paused=history.paused,
            errors=history.errors,
            latency=history.latency,
            said_interval=history.rate_limit if said else 0.0,
            said_until=history.rate_limit_until + shift if said else 0.0,
            made_at=wall,
            boot_id=self._boot_id,
            boot_at=now + self._suspended,
            day_at=used.began + shift if used is not None and used.began > -INF else 0.0,
            day_pages=used.pages if used is not None else 0,
            day_bytes=used.bytes if used is not None else 0,
            interval=interval,
            in_flight=scope.unheaded > 0,
        )

    def promise(self, scope: Scope, now: float) -> None:
        """Make the scope's record durable before returning. Raises StorageError if that fails: then
        the caller must not act as if it were stored."""
        self._write(self.storage.promise, self.record(scope, now))

    def remember(self, scope: Scope, now: float) -> None:
        """Make durable what is in force already because of a response, and can't be undone. If it
        can't be written now it will be as soon as possible; until then the scope gets no lease."""
        self._write_or_owe(self.record(scope, now))

    def _write_or_owe(self, record: ClockRecord) -> None:
        with contextlib.suppress(StorageError):
            self._write(self.storage.owe, record)
        self._check_exhausted()

    def _check_exhausted(self) -> None:
        """Stop all leases while nothing can be written, as a block that they cause could not be."""
        if self.storage.exhausted:
            self.unwritten.add(RUNNING)

    def _write(self, write: Callable[[ClockRecord], None], record: ClockRecord) -> None:
        try:
            write(record)
        except StorageError:
            self.unwritten.add(record.scope)
            self._check_exhausted()
            raise
        self.made += 1
        if self.unwritten:
            self.unwritten.discard(record.scope)

    def keep(self, scope: Scope, now: float) -> None:
        """Store the scope's record with the storage's next batch."""
        self.storage.put_clock(self.record(scope, now))

    def check_wall(self, now: float) -> None:
        """If the wall clock jumped, log it and write all records again that still matter: after a
        reboot they are read by the wall clock."""
        offset = self._clock.wall() - now
        if abs(offset - self._offset) <= _JUMP_SECONDS:
            return
        suspended = boot_of(self._clock).seconds - now
        moved = offset - self._offset - (suspended - self._suspended)
        self._offset, self._suspended = offset, suspended
        if abs(moved) > _JUMP_SECONDS:
            _log_jump(moved)
        for scope in self._memory.scopes.values():
            # Also blocks that are over: after a jump back they would lie ahead again.
            if scope.history is not None or self._matters(scope, now):
                self._write_or_owe(self.record(scope, now))

    def _matters(self, scope: Scope, now: float) -> bool:
        awaited = bool(scope.unheaded) and self._memory.longest_of(scope) > DURABLE
        return awaited or self._memory.matters(scope, now, DURABLE)

    async def close(self) -> None:
        """Store everything that still matters, and note that this is not a crash."""
        now = self._clock.monotonic()
        for scope in self._memory.scopes.values():
            recent = max(scope.due_at(events=False), scope.basis + _RECENT_SECONDS) > now
            if recent or scope.unheaded or self._matters(scope, now):
                self.keep(scope, now)
        if self._memory.floor_until <= now:
            self.storage.forget_clock(RUNNING)
        # Otherwise the last second of a crashed run is not over yet: its requests are still
        # unknown, and the next run has to wait for it as well.
        try:
            await self.storage.flush()
        except StorageError:
            if not self._unread or self.storage.failing is None:
                raise  # Otherwise the storage was never open, and nothing was promised.


def _stamp_of(record: ClockRecord) -> Stamp | None:
    if record.made_at is None:
        return None
    return Stamp(record.made_at, record.boot_id, record.boot_at)


def _log_jump(seconds: float, when: str = "") -> None:
    _log.warning(
        "%sthe wall clock was set %s by %.0f s: clocks and blocks keep their lengths",
        when,
        "forward" if seconds > 0 else "back",
        abs(seconds),
    )


def _clock_of(scope: Scope, now: float) -> ScopeClock:
    """Return the state of a scope, for a ledger that has lost its data."""
    age = None if scope.basis == -INF else now - scope.basis
    history = scope.past
    blocked = max(0.0, history.blocked_until - now)
    clock = ScopeClock(scope.name, age, scope.interval, blocked, history.reason, history.paused)
    if (used := history.usage) is None or now >= used.began + DAY:
        return clock
    return clock._replace(day=now - used.began, pages=used.pages, bytes=used.bytes)


_EVICTED_SHARE = 16
"""At the limit, one in this many scopes is removed, so that the limit is not met each time."""
_SEARCH_PAUSE = 1e-5
"""After a search without success, the next one waits this many seconds per scope in memory."""


class ScopeMemory:
    """The scopes in memory by name: creates and finds them, and evicts some if there are too many.

    A scope may be evicted if it has no waiters, nothing is in flight, its clock is past and its
    history does not matter any longer. If that is not enough, the scopes that were created first
    are moved to the storage. They come back before their host's next lease: every lookup of a
    scope tries the storage before a new scope is created.
    """

    def __init__(
        self,
        rules: Rules,
        clock: Clock,
        storage: Storage | None = None,
        audit: PacingAudit | None = None,
    ) -> None:
        self.rules = rules
        self.audit = audit
        self.scopes: SplitDict[str, Scope] = SplitDict()
        self.promises: Promises | None = None if storage is None else Promises(storage, clock, self)
        self.floor_until: float = -INF
        """After a crash: no unknown host is asked before this monotonic time."""
        self.longer_intervals: dict[str, float] = {}
        """For hosts whose origins ask for different intervals: the longer one in seconds. The next
        process has to observe it if it asks that origin first."""
        self.evicted: int = 0
        self.spilled: int = 0
        """Scopes moved to the storage since the start."""
        self.changes: list[Scope] | None = None
        """Scopes added or removed since the reader emptied it; None: there is no reader."""
        self._clock = clock
        self._open = False
        self._left_in_storage = 0
        """Clocks of earlier processes for which there was no room at the start."""
        self._in_vain_until = -INF
        """No search for removable scopes before this monotonic time."""

    async def open(self) -> None:
        """Read what earlier processes stored."""
        if self.promises is not None:
            self._left_in_storage = await self.promises.load()
        self._open = True

    async def close(self) -> None:
        """Store everything that still matters. Closed even if it raises StorageError."""
        self._open = False
        if self.promises is not None:
            await self.promises.close()

    def clocks(self, now: float) -> list[ScopeClock]:
        """Return the clocks that lie ahead, pauses and usages, for a ledger that has lost its data.
        A clock without a name represents the scopes that were moved to the storage."""
        rest = [ScopeClock("")] if self.spilled else []
        return rest + [
            _clock_of(scope, now)
            for scope in list(self.scopes.values())
            if scope.due_at(events=False) > now or scope.past.paused or scope.past.usage is not None
        ]

    def apply_clock(self, clock: ScopeClock) -> Scope | None:
        """Apply another member's clock here as well, and store it, since the ledger may lose it.
        Return the scope if it is blocked, otherwise None."""
        if (scope := self.find(clock.scope)) is None:
            return None
        now = self._clock.monotonic()
        if clock.age is not None and now - clock.age > scope.basis:
            scope.basis = now - clock.age
            scope.interval = max(scope.interval, min(clock.interval, LONGEST))
        if blocked := clock.blocked > 0:
            scope.ensure_history().block(now + clock.blocked, clock.reason)
        if clock.day is not None:
            scope.ensure_history().usage = Usage(now - clock.day, clock.pages, clock.bytes)
        if self.promises is not None and (blocked or scope.clock_at() > now + DURABLE):
            self.promises.remember(scope, now)
        return scope if blocked else None

    def apply_report(self, report: Report, now: float) -> Scope | None:
        """Apply another process's report about a scope as if the response had come to this one.
        Return the scope; None if there is none. A block gets a scope if there is room: the member
        that was refused may be gone when the ledger loses its data."""
        name, seconds = report.scope, report.seconds
        scope = self.find(name)
        if scope is None and seconds > 0 and self.make_room():
            scope = self.create(name)
        if scope is None:
            return None
        if seconds > 0:
            history = scope.ensure_history()
            history.block(now + seconds, report.reason)
            history.probing = True
            known = 0.0 if history.back_off is None else history.back_off.slowed
            if report.interval > known * ROUNDING:
                taught = history.back_off = BackOff()
                wait, until = report.interval_for, history.blocked_until
                taught.restore(report.interval / 2.0, 0, now, wait, until, self.rules.pacing)
        elif report.interval > 0:
            scope.interval = max(scope.interval, report.interval)
        elif scope.history is not None:
            scope.history.unblock()
        if self.promises is not None:
            self.promises.remember(scope, now)
        return scope

    def names(self, host: str, scope: Scope | None) -> tuple[str, ...]:
        """Return the names of the host's scope, which may not exist yet, and of those it shares."""
        if scope is None:
            return (host, *self.rules.shared_names(host))
        return (host, *(one.name for one in scope.shared))

    # --- finding and creating -----------------------------------------------------------

    def admitted(self, name: str, extra: tuple[str, ...] = ()) -> Scope:
        """Like `host`, but raises LeaseTimeout if there is no room for one more host."""
        if name not in self.scopes and not self.make_room():
            raise LeaseTimeout(
                name,
                f"{name}: {len(self.scopes)} other hosts have clocks to keep (pacing.max_hosts)",
            )
        return self.host(name, extra)

    def host(self, name: str, extra: tuple[str, ...] = ()) -> Scope:
        """Return the scope of a host, with the scopes that it shares: from memory, or else from the
        storage, or else a new one. It is not limited: see `admitted`.
        """
        scope = self.find(name)
        if scope is None:
            self.make_room()
            scope = self.create(name)
        if extra:
            self.share(scope, extra)
        return scope

    def find(self, name: str) -> Scope | None:
        """Return the scope of this name from memory or storage, or None."""
        scope = self.scopes.get(name)
        if scope is None and self._is_any_stored:
            self.make_room()
            scope = self._restore_nowait(name)
        return scope

    @property
    def _is_any_stored(self) -> bool:
        """True if some scopes are only in the storage."""
        return self._open and self.spilled + self._left_in_storage > 0

    def count_from(self, name: str, moment: float) -> None:
        """Note that a ledger counts the scope's clock from this moment, or a later one."""
        scope = self.scopes.get(name)
        if scope is not None and moment > scope.basis:
            scope.basis = moment

    def share(self, scope: Scope, extra: tuple[str, ...]) -> None:
        """Set the scopes that a host shares: those of the configuration, and `extra`."""
        names = tuple(dict.fromkeys((*self.rules.shared_names(scope.name), *extra)))
        if names != tuple(other.name for other in scope.shared):
            scope.shared = tuple(map(self._shared, names))

    def _shared(self, name: str) -> Scope:
        known = self.scopes.get(name) or self._restore_nowait(name)
        return known or self.create(name)

    def create(self, name: str) -> Scope:
        """Create the scope of a host, or one that several hosts share, which is unknown or about to
        be restored from a record."""
        shared = name.startswith(SHARED_PREFIXES)
        settings = self.rules.for_shared(name) if shared else self.rules.for_host(name)
        scope = self.scopes[name] = Scope(name, settings)
        if self.changes is not None:
            self.changes.append(scope)
        if self.floor_until > -INF:
            # Shorter clocks were not stored, so the scope counts as just used.
            scope.basis, scope.interval = self.floor_until - DURABLE, DURABLE
        if not (shared or self.rules.plain):
            self.share(scope, ())
        return scope

    def must_keep(self, scope: Scope) -> bool:
        """Return True if a lease of this scope, or its head, has to be made durable."""
        promises = self.promises
        return (
            scope.interval > DURABLE
            or scope.name in self.longer_intervals
            or scope.past.usage is not None
            or (promises is not None and bool(promises.unwritten) and promises.is_unwritten(scope))
        )

    def longest_of(self, scope: Scope) -> float:
        """Return its interval in seconds, or the longer one of another origin of the host."""
        return max(scope.interval, self.longer_intervals.get(scope.name, 0.0))

    def _restore_nowait(self, name: str) -> Scope | None:
        """Restore a scope from the storage without awaiting. Return None if it is not only there.
        Raises StorageError.
        """
        if self.promises is None or not self._is_any_stored:
            return None
        record = self.promises.storage.load_clock_nowait(name)
        return None if record is None else self.promises.restore(record, self._clock.monotonic())

    # --- room ---------------------------------------------------------------------------

    def make_room(self) -> bool:
        """Evict scopes, or move them to the storage, if there are too many. Return False if there
        is no room for one more."""
        scopes, most = self.scopes, self.rules.pacing.max_hosts
        if len(scopes) < most:
            return True
        now = self._clock.monotonic()
        if now < self._in_vain_until:
            return False
        goal = most - max(1, most // _EVICTED_SHARE)
        shared = {other for scope in scopes.values() for other in scope.shared}
        owed = []
        for scope in list(scopes.values()):
            if scope.queue is not None or scope.in_flight or scope in shared:
                continue
            if self.matters(scope, now) or self.rules.set_for(scope.name):
                owed.append(scope)
            else:
                self.drop(scope)
                self.evicted += 1
        if self.promises is not None:
            for scope in owed[: max(0, len(scopes) - goal)]:
                self.promises.keep(scope, now)
                self.drop(scope)
                self.spilled += 1
        if len(scopes) > goal:
            self._in_vain_until = now + len(scopes) * _SEARCH_PAUSE
        return len(scopes) < most

    def drop(self, scope: Scope) -> None:
        """Remove a scope from memory."""
        del self.scopes[scope.name]
        if self.changes is not None:
            self.changes.append(scope)
        self.longer_intervals.pop(scope.name, None)

    def matters(self, scope: Scope, now: float, ahead: float = 0.0) -> bool:
        """Return True if the scope's clock lies more than `ahead` seconds in the future, or its
        history must not be forgotten yet."""
        history = scope.history
        return scope.clock_at(self.longest_of(scope)) > now + ahead or (
            history is not None and history.matters(now, self.rules.pacing)
        )
