"""Promises that outlive the process: scopes to `ClockRecord`s and back.

Inside, every moment is monotonic; on disk it is wall time. The two meet here alone: when
a record is made, and when it is read at the start. Should the wall clock jump in between,
what was written is written anew.
"""

from __future__ import annotations

import re
from collections import deque

from gatekeeper.clock import Clock
from gatekeeper.pacing.books import DURABLE, Books
from gatekeeper.pacing.ledger import INF, Scope
from gatekeeper.storage.base import ClockRecord, Storage

__all__ = ["Promises"]

RUNNING = "gatekeeper:running"
"""A record that is there while a scheduler runs; found at the start, it tells of a crash."""
_CLOCK = re.compile(r"(in flight, )?interval ([0-9.e+-]+)(?:; (.*))?\Z", re.DOTALL)
"""How a record's reason begins: what `next_at` is made of, and whether a lease was open."""
_JUMP = 1.0
"""Seconds by which the wall clock must have moved against the monotonic one to be a jump."""
_RECENT = 10.0
"""At a clean end, hosts asked within so many seconds are kept whatever their pace: the next
run may learn that they ask for a slower one, which counts from that very request."""
_MAX_JUMPS = 1000
_SHARED = ("domain:", "address:", "group:")


class Promises:
    """Keeps clocks and blocks in a `Storage`."""

    def __init__(self, storage: Storage, clock: Clock, books: Books) -> None:
        self._storage = storage
        self._clock = clock
        self._books = books
        self._offset = clock.wall() - clock.monotonic()
        self._eras = deque([self._offset], _MAX_JUMPS)
        """What that offset was between the jumps of the wall clock."""
        self.made = 0
        """Records made durable since the start."""

    async def load(self) -> int:
        """Read the clocks kept; after a crash, count what was in flight as just used.

        Returns how many hosts were left in the storage, since there is no room for them.
        """
        records = await self._storage.load_clocks()
        now = self._clock.monotonic()
        if any(record.scope == RUNNING for record in records):
            self._books.floor_until = now + DURABLE
        left = 0
        for record in records:
            if record.scope == RUNNING:
                continue
            if len(self._books.scopes) < self._books.pacing.max_hosts or _is_shared(record):
                self.restore(record, now)
            else:
                left += 1
        self._storage.promise(ClockRecord(scope=RUNNING, next_at=self._clock.wall(), paused=True))
        return left

    def restore(self, record: ClockRecord, now: float) -> Scope:
        """The scope that a record describes."""
        books = self._books
        scope = books.scopes.get(record.scope)
        if scope is None:
            begin = books.begin_shared if _is_shared(record) else books.begin
            scope = begin(record.scope)
        self.check_wall(now)
        shift = now - self._clock.wall()
        if record.era is not None and record.era in self._eras:
            # It was spilled by this very run, perhaps before the wall clock jumped.
            shift += self._offset - record.era
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
            history.safe = history.drew = record.safe_interval
            history.paused = record.paused
            history.errors, history.latency = record.errors, record.latency
            if said_until > now:
                history.said, history.said_until = record.said_interval, said_until
        return scope

    def record(self, scope: Scope, now: float) -> ClockRecord:
        """The scope as it is kept."""
        shift = self._clock.wall() - now
        gap = self._gap(scope)
        clock = scope.basis + gap
        next_at = clock + shift if clock > -INF else 0.0
        history = scope.history
        made_of = f"{'in flight, ' if scope.unheaded else ''}interval {gap!r}"
        if history is None:
            return ClockRecord(
                scope=scope.name, next_at=next_at, block_reason=made_of, era=self._offset
            )
        blocked = history.blocked_until > now
        said = history.said_until > now
        reason = history.reason if blocked else ""
        return ClockRecord(
            scope=scope.name,
            next_at=next_at,
            blocked_until=history.blocked_until + shift if blocked else 0.0,
            block_reason=f"{made_of}; {reason}" if reason else made_of,
            failures=history.failures,
            last_failure_at=history.failed_at + shift if history.failures else 0.0,
            safe_interval=history.safe,
            paused=history.paused,
            errors=history.errors,
            latency=history.latency,
            said_interval=history.said if said else 0.0,
            said_until=history.said_until + shift if said else 0.0,
            era=self._offset,
        )

    def promise(self, scope: Scope, now: float) -> None:
        """Durable before this returns."""
        self.check_wall(now)
        self.made += 1
        self._storage.promise(self.record(scope, now))

    def keep(self, scope: Scope, now: float) -> None:
        """Kept in the storage's next batch."""
        self.check_wall(now)
        self._storage.put_clock(self.record(scope, now))

    def check_wall(self, now: float) -> None:
        """If the wall clock jumped, what was written means something else: write it anew."""
        offset = self._clock.wall() - now
        if abs(offset - self._offset) <= _JUMP:
            return
        self._offset = offset
        self._eras.append(offset)
        for scope in self._books.scopes.values():
            # Also blocks that are past: after a jump back they would lie ahead again.
            if scope.history is not None or self._owed(scope, now):
                self.made += 1
                self._storage.promise(self.record(scope, now))

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


def _is_shared(record: ClockRecord) -> bool:
    return record.scope.startswith(_SHARED)
