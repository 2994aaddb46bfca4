"""Clocks that outlive the process."""

from __future__ import annotations

import contextlib
import logging
import re
from collections import Counter
from collections.abc import Callable

import msgspec

from gatekeeper.clock import Clock, Stamp, boot_of
from gatekeeper.errors import LeaseTimeout, StorageError
from gatekeeper.pacing.engine import Engine
from gatekeeper.pacing.scopes import DURABLE, INF, BackOff, Scope
from gatekeeper.storage.base import ClockRecord, Storage

__all__ = ["Memory", "Promises"]

RUNNING = "gatekeeper:running"
"""A record that is there while a scheduler runs; found at the start, it tells of a crash."""
_CLOCK = re.compile(r"(in flight, )?interval ([0-9.e+-]+)(?:; (.*))?\Z", re.DOTALL)
"""How a record's reason begins: what `next_at` is made of, and whether a lease was open."""
_JUMP = 1.0
"""Seconds by which the wall clock must have moved against the monotonic one to be a jump."""
_RECENT = 10.0
"""At a clean end, hosts asked within so many seconds are kept whatever their pace: the next
run may learn that they ask for a slower one, which counts from that very request."""
_SHARED = ("domain:", "address:", "group:")
_MOMENTS = ("next_at", "blocked_until", "last_failure_at", "said_until", "refused_at")
"""The fields of a record that are wall seconds; 0: there is none."""

_log = logging.getLogger(__name__)


class Promises:
    """Keeps clocks and blocks in a `Storage`."""

    def __init__(self, storage: Storage, clock: Clock, books: Engine) -> None:
        self._storage = storage
        self._clock = clock
        self._books = books
        self._offset = clock.wall() - clock.monotonic()
        self._boot_id, counted = boot_of(clock)
        self._asleep = counted - clock.monotonic()
        """What the machine counts as seconds and `monotonic` does not: no clock has to be read
        for it, since whenever it grows the wall clock goes on as well (`check_wall`)."""
        self._unkept: set[str] = set()
        """Scopes whose latest promise could not be written when it was made."""
        self.made = 0
        """Records made durable since the start."""

    async def load(self) -> int:
        """Read the clocks kept; after a crash, count what was in flight as just used.

        Returns how many hosts were left in the storage, since there is no room for them.
        """
        records = await self._storage.load_clocks()
        if (watch := getattr(self._storage, "watch", None)) is not None:
            watch(self._look)
        now = self._clock.monotonic()
        if any(record.scope == RUNNING for record in records):
            self._books.floor_until = now + DURABLE
        moved = self._wall_moved(records)
        left = 0
        for record in records:
            if record.scope == RUNNING:
                continue
            if len(self._books.scopes) < self._books.pacing.max_hosts or _is_shared(record):
                scope = self.restore(record, now)
                if moved and (scope.history is not None or self._owed(scope, now)):
                    # What counts as old is judged by the wall clock: upkeep.forget.
                    self.keep(scope, now)
            else:
                left += 1
                if moved:
                    self._storage.put_clock(self._restated(record))
        with contextlib.suppress(StorageError):
            self.mark()
        return left

    def mark(self) -> None:
        """Let the next run know of a crash. Raises StorageError: until it is written no turn
        may be granted, since clocks of up to a second are kept by nothing else."""
        self._write(self._stamped(ClockRecord(scope=RUNNING, next_at=0.0, paused=True)))

    @property
    def marked(self) -> bool:
        """Would the next run know of a crash, and of the blocks that turns draw until then?"""
        return RUNNING not in self._unkept

    @property
    def failing(self) -> str | None:
        """Why promises can't be made durable now; None: they can, or need not be."""
        why: str | None = getattr(self._storage, "failing", None)
        return why

    @property
    def exhausted(self) -> bool:
        """Would what an answer brings be forgotten by kill -9?"""
        return bool(getattr(self._storage, "exhausted", False))

    def unkept(self, scope: Scope) -> bool:
        """Is a promise to it still unwritten, as far as is known here?"""
        if not self._unkept:
            return False
        if self.marked and hasattr(self._storage, "failing") and self.failing is None:
            self._unkept.clear()  # the storage has made up for all of them
        return scope.name in self._unkept

    def _wall_moved(self, records: list[ClockRecord]) -> bool:
        """Was the wall clock set since the latest of them was made? It is logged."""
        stamps = [one for record in records if (one := _stamp_of(record)) is not None]
        boot = boot_of(self._clock).id
        latest = max(
            stamps, key=lambda one: (one.boot_id == boot, one.boot_at, one.wall), default=None
        )
        moved = None if latest is None else latest.moved(self._clock)
        if moved is None or abs(moved) <= _JUMP:
            return False
        _tell_of_jump(moved, "while no gatekeeper ran here, ")
        return True

    def _stamped(self, record: ClockRecord) -> ClockRecord:
        boot = boot_of(self._clock)
        return msgspec.structs.replace(
            record, made_at=self._clock.wall(), boot_id=boot.id, boot_at=boot.seconds
        )

    def _restated(self, record: ClockRecord) -> ClockRecord:
        """The same promise by the wall clock as it stands now."""
        shift = self._shift(record, self._clock.wall())
        moments = {name: getattr(record, name) for name in _MOMENTS}
        return self._stamped(
            msgspec.structs.replace(
                record, **{name: then + shift for name, then in moments.items() if then}
            )
        )

    def _shift(self, record: ClockRecord, now: float) -> float:
        """What makes a moment of the record one of the clock that shows `now`."""
        made = _stamp_of(record)
        if made is None:
            return now - self._clock.wall()
        return now - made.age(self._clock) - made.wall

    def restore(self, record: ClockRecord, now: float) -> Scope:
        """The scope that a record describes."""
        books = self._books
        scope = books.scopes.get(record.scope)
        if scope is None:
            begin = books.begin_shared if _is_shared(record) else books.begin
            scope = begin(record.scope)
        self.check_wall(now)
        shift = self._shift(record, now)
        ahead = max(0.0, record.next_at + shift - now)
        reason = record.block_reason
        if (found := _CLOCK.match(reason)) is None:
            scope.not_before(now + ahead)
        else:
            gap, reason = float(found[2]), found[3] or ""
            if found[1]:
                # Open at a crash: the request may have left at the last moment.
                # What was written is not asked when: the wall clock may have jumped since.
                scope.basis, scope.gap = now, gap
            else:
                # No request lies ahead, whatever the wall clock did since it was written.
                scope.basis, scope.gap = min(record.next_at + shift - gap, now), gap
                if gap <= DURABLE:
                    # After a crash: it was kept for a block; later requests were not.
                    scope.basis = max(scope.basis, books.floor_until - DURABLE)
        blocked = record.blocked_until + shift
        said_until = record.said_until + shift
        if (
            blocked > now
            or said_until > now
            or record.failures
            or record.safe_interval
            or record.paused
            or record.errors
            or record.latency is not None
        ):
            history = scope.past()
            if blocked > now:
                history.block(blocked, reason)
            history.failures = record.failures
            history.probing = record.failures > 0
            history.failed_at = record.last_failure_at + shift if record.failures else -INF
            if record.safe_interval:
                history.back_off = self._back_off(record, now, shift)
            history.paused = record.paused
            history.errors, history.latency = record.errors, record.latency
            if said_until > now:
                history.said, history.said_until = record.said_interval, said_until
        return scope

    def _back_off(self, record: ClockRecord, now: float, shift: float) -> BackOff:
        """What refusals have taught. Without their moment they count as those of now."""
        back_off = BackOff()
        when = record.refused_at or record.last_failure_at
        back_off.restore(
            record.refused_interval or record.safe_interval / 2.0,
            record.refused_status,
            min(when + shift, now) if when else now,
            record.retry_wait,
            record.blocked_until + shift,
            self._books.pacing,
        )
        return back_off

    def record(self, scope: Scope, now: float) -> ClockRecord:
        """The scope as it is kept."""
        wall = self._clock.wall()
        shift = wall - now
        gap = self._gap(scope)
        clock = scope.basis + gap
        next_at = clock + shift if clock > -INF else 0.0
        history = scope.history
        made_of = f"{'in flight, ' if scope.unheaded else ''}interval {gap!r}"
        if history is None:
            return ClockRecord(
                scope=scope.name,
                next_at=next_at,
                block_reason=made_of,
                made_at=wall,
                boot_id=self._boot_id,
                boot_at=now + self._asleep,
            )
        blocked = history.blocked_until > now
        said = history.said_until > now
        reason = history.reason if blocked else ""
        taught = history.back_off
        return ClockRecord(
            scope=scope.name,
            next_at=next_at,
            blocked_until=history.blocked_until + shift if blocked else 0.0,
            block_reason=f"{made_of}; {reason}" if reason else made_of,
            failures=history.failures,
            last_failure_at=history.failed_at + shift if history.failures else 0.0,
            safe_interval=taught.slowed or taught.refused if taught else 0.0,
            refused_interval=taught.refused if taught else 0.0,
            refused_at=taught.when + shift if taught else 0.0,
            refused_status=taught.status if taught else 0,
            retry_wait=taught.wait if taught else 0.0,
            paused=history.paused,
            errors=history.errors,
            latency=history.latency,
            said_interval=history.said if said else 0.0,
            said_until=history.said_until + shift if said else 0.0,
            made_at=wall,
            boot_id=self._boot_id,
            boot_at=now + self._asleep,
        )

    def promise(self, scope: Scope, now: float) -> None:
        """Durable before this returns. Raises StorageError where that can't be: what was
        promised is not to be relied upon by anybody who could be told so."""
        self.check_wall(now)
        self._write(self.record(scope, now))

    def remember(self, scope: Scope, now: float) -> None:
        """The same of what is in force already, come of an answer: it can't be taken back.
        Where it can't be written it is as soon as that is possible, and until then the scope
        gets no further turn."""
        self.check_wall(now)
        self._write_anyhow(self.record(scope, now))

    def _write_anyhow(self, record: ClockRecord) -> None:
        with contextlib.suppress(StorageError):
            self._write(record, getattr(self._storage, "owe", self._storage.promise))
        self._look()

    def _look(self) -> None:
        """No turn at all while nothing can be written: the block that it drew could not be."""
        if self.exhausted:
            self._unkept.add(RUNNING)
            self._books.survey()

    def _write(
        self, record: ClockRecord, write: Callable[[ClockRecord], None] | None = None
    ) -> None:
        try:
            (write or self._storage.promise)(record)
        except (StorageError, OSError) as error:
            self._unkept.add(record.scope)
            self._look()
            if isinstance(error, StorageError):
                raise
            raise StorageError(f"a clock can't be kept: {error}") from error
        self.made += 1
        if self._unkept:
            self._unkept.discard(record.scope)

    def keep(self, scope: Scope, now: float) -> None:
        """Kept in the storage's next batch."""
        self.check_wall(now)
        self._storage.put_clock(self.record(scope, now))

    def check_wall(self, now: float) -> None:
        """If the wall clock jumped, say so, and write what is owed anew: that is what counts
        should the machine be started anew."""
        offset = self._clock.wall() - now
        if abs(offset - self._offset) <= _JUMP:
            return
        asleep = boot_of(self._clock).seconds - now
        moved = offset - self._offset - (asleep - self._asleep)
        self._offset, self._asleep = offset, asleep
        if abs(moved) > _JUMP:
            _tell_of_jump(moved)
        for scope in self._books.scopes.values():
            # Also blocks that are past: after a jump back they would lie ahead again.
            if scope.history is not None or self._owed(scope, now):
                self._write_anyhow(self.record(scope, now))

    def _gap(self, scope: Scope) -> float:
        return max(scope.gap, self._books.mixed.get(scope.name, 0.0))

    def _owed(self, scope: Scope, now: float) -> bool:
        history = scope.history
        return (
            (bool(scope.unheaded) and self._gap(scope) > DURABLE)
            or scope.basis + self._gap(scope) > now + DURABLE
            or (history is not None and history.owes(now, self._books.pacing))
        )

    async def close(self) -> None:
        """Keep whatever is owed to anybody, and say that this was no crash."""
        now = self._clock.monotonic()
        for scope in self._books.scopes.values():
            recent = max(scope.clock_at(), scope.basis + _RECENT) > now
            if recent or scope.unheaded or self._owed(scope, now):
                self.keep(scope, now)
        if self._books.floor_until <= now:
            self._storage.forget_clock(RUNNING)
        # Else the last second of a crashed run is not over yet: what was asked then is still
        # unknown, and the next run must wait for it as well.
        await self._storage.flush()


def _stamp_of(record: ClockRecord) -> Stamp | None:
    if record.made_at is None:
        return None
    return Stamp(record.made_at, record.boot_id, record.boot_at)


def _tell_of_jump(seconds: float, when: str = "") -> None:
    _log.warning(
        "%sthe wall clock was set %s by %.0f s: clocks and blocks go on as they were promised",
        when,
        "forward" if seconds > 0 else "back",
        abs(seconds),
    )


def _is_shared(record: ClockRecord) -> bool:
    return record.scope.startswith(_SHARED)


_SHARE = 16
"""When the bound is met, one in so many scopes has to go, so that it is not met each time."""
_REST = 1e-5
"""Seconds a scope, of all that there are, before those are gone through again in vain."""


class Memory:
    """Finds and begins scopes; makes room when there are too many."""

    def __init__(self, books: Engine, promises: Promises | None, storage: Storage | None) -> None:
        self._books = books
        self._promises = promises
        self._storage = storage
        self._max = books.pacing.max_hosts
        self._loading: Counter[str] = Counter()
        """Scopes whose records are on the way from the storage: they are not spilled
        meanwhile, so that no record is older than the scope."""
        self._in_vain_until = -INF
        self.left = 0
        """Clocks of earlier runs for which there was no room at the start."""
        self.evicted = 0
        self.spilled = 0

    async def host(self, name: str, extra: tuple[str, ...]) -> Scope:
        """The scope of a host, loaded if it was spilled, with its shared ones.

        Raises LeaseTimeout where there is no room for one more.
        """
        books = self._books
        if name not in books.scopes:
            found = await self._load((name, *extra, *books.rules.shared_names(name)))
            # No await from here on.
            found = [record for record in found if record.scope not in books.scopes]
            self.admit(name)
            if self._promises is not None:
                now = books.clock.monotonic()
                for record in found:
                    self._promises.restore(record, now)
            if name not in books.scopes:
                books.begin(name)
        return books.host(name, extra)

    def adjust(self) -> None:
        """Follow other settings of the books."""
        self._max = self._books.pacing.max_hosts

    def admit(self, name: str) -> None:
        """Raises LeaseTimeout where there is no room for this host."""
        if name not in self._books.scopes and not self.make_room():
            raise LeaseTimeout(
                name,
                f"{name}: {len(self._books.scopes)} hosts are owed something already "
                "(pacing.max_hosts)",
            )

    # --- those elsewhere ----------------------------------------------------------------

    async def _load(self, names: tuple[str, ...]) -> list[ClockRecord]:
        """The records of those that may have been spilled, without holding up the loop."""
        if self._storage is None or not (self.spilled or self.left):
            return []
        self._loading.update(names)
        try:
            found = [
                await self._storage.load_clock(name)
                for name in names
                if name not in self._books.scopes
            ]
        finally:
            self._loading.subtract(names)
            for name in names:
                if not self._loading[name]:
                    del self._loading[name]
        return [record for record in found if record is not None]

    def back(self, name: str) -> Scope | None:
        """A spilled scope, back in the books, for those who can't wait; None: it was not
        spilled. Raises StorageError.
        """
        if self._storage is None or self._promises is None or not (self.spilled or self.left):
            return None
        record = self._storage.load_clock_nowait(name)
        if record is None:
            return None
        return self._promises.restore(record, self._books.clock.monotonic())

    # --- room ---------------------------------------------------------------------------

    def make_room(self) -> bool:
        """Forget or spill where there are too many; False: there is no room for one more."""
        scopes = self._books.scopes
        if len(scopes) < self._max:
            return True
        now = self._books.clock.monotonic()
        if now < self._in_vain_until:
            return False
        goal = self._max - max(1, self._max // _SHARE)
        shared = {other for scope in scopes.values() for other in scope.shared}
        idle = [
            scope
            for scope in scopes.values()
            if scope.line is None
            and not scope.in_flight
            and scope not in shared
            and scope.name not in self._loading
        ]
        owed = []
        for scope in idle:
            if self._owed(scope, now):
                owed.append(scope)
            else:
                self._drop(scope)
                self.evicted += 1
        if self._promises is not None:
            for scope in owed[: max(0, len(scopes) - goal)]:
                self._promises.keep(scope, now)
                self._drop(scope)
                self.spilled += 1
        if len(scopes) > goal:
            self._in_vain_until = now + len(scopes) * _REST
        return len(scopes) < self._max

    def _drop(self, scope: Scope) -> None:
        del self._books.scopes[scope.name]
        self._books.mixed.pop(scope.name, None)

    def _owed(self, scope: Scope, now: float) -> bool:
        if scope.clock_at() > now or self._books.rules.overridden(scope.name):
            return True
        if scope.basis + self._books.mixed.get(scope.name, 0.0) > now:
            return True
        return scope.history is not None and scope.history.owes(now, self._books.pacing)
