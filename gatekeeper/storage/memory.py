"""`MemoryStorage`: a `Storage` whose contents end with the process."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from gatekeeper.config import StorageConfig
from gatekeeper.storage.base import (
    ClockRecord,
    HistoryEntry,
    OriginRecord,
    StorageStats,
    oldest_to_drop,
    sighting,
    unpack_body,
    with_hash,
)
from gatekeeper.storage.schema import HISTORY_ROW_BYTES


class MemoryStorage:
    """A `Storage` in memory, for gates without persistence and for tests of code that uses one.

    It has the bounds of the file: `config.max_origins` origins, `config.history_versions`
    versions per origin, and `config.history_bytes` bytes of history in total. The ledger that
    puts clocks bounds their number.

    >>> import asyncio
    >>> async def remember():
    ...     storage = MemoryStorage()
    ...     storage.promise(ClockRecord(scope="a.example", next_at=5.0))
    ...     return await storage.load_clock("a.example")
    >>> asyncio.run(remember()).next_at
    5.0
    """

    def __init__(self, *, config: StorageConfig | None = None) -> None:
        self._config = config or StorageConfig()
        self._origins: dict[str, OriginRecord] = {}
        self._clocks: dict[str, ClockRecord] = {}
        self._history: dict[str, list[HistoryEntry]] = {}
        self._bodies: dict[bytes, tuple[bytes, int]] = {}
        """Hash -> packed text, and the number of history entries that refer to it."""
        self._history_bytes = 0
        self._written = 0
        self._promises = 0

    async def __aenter__(self) -> MemoryStorage:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def open(self) -> None:
        """Do nothing: there is no file to open."""

    async def close(self) -> None:
        """Do nothing: the records stay readable."""

    async def flush(self) -> None:
        """Do nothing: no write is ever pending."""

    async def load_origin(self, origin: str) -> OriginRecord | None:
        """Return the latest record of an origin, or None."""
        return self._origins.get(origin)

    def put_origin(self, record: OriginRecord) -> None:
        """Store a record. Its body is added to the origin's history."""
        record = with_hash(record)
        self._origins.pop(record.origin, None)
        self._origins[record.origin] = record
        self._written += 1
        self._add_sighting(record)
        if len(self._origins) > self._config.max_origins:
            del self._origins[oldest_to_drop(self._origins)]

    async def load_clocks(self) -> list[ClockRecord]:
        """Return every stored clock."""
        return list(self._clocks.values())

    async def load_clock(self, scope: str) -> ClockRecord | None:
        """Return the clock of a scope, or None."""
        return self.load_clock_nowait(scope)

    def load_clock_nowait(self, scope: str) -> ClockRecord | None:
        """Return the clock of a scope, or None, without awaiting."""
        return self._clocks.get(scope)

    def put_clock(self, record: ClockRecord) -> None:
        """Store a clock."""
        self._clocks[record.scope] = record
        self._written += 1

    def promise(self, record: ClockRecord) -> None:
        """Store a clock; there is no journal."""
        self._promises += 1
        self.put_clock(record)

    def owe(self, record: ClockRecord) -> None:
        """Store a clock, as `promise` does."""
        self.promise(record)

    @property
    def failing(self) -> None:
        """Always None: nothing can fail."""

    @property
    def exhausted(self) -> bool:
        """Always False: no space can run out."""
        return False

    def watch(self, callback: Callable[[], None]) -> None:
        """Do nothing: `failing` never changes."""

    def forget_clock(self, scope: str) -> None:
        """Delete the clock of a scope, to which nothing is owed any more."""
        self._clocks.pop(scope, None)

    async def history(self, origin: str) -> list[HistoryEntry]:
        """Return the history of an origin, oldest first."""
        return list(self._history.get(origin, ()))

    async def body(self, body_hash: bytes) -> bytes | None:
        """Return the decompressed text with that hash, or None if it was dropped."""
        found = self._bodies.get(body_hash)
        return None if found is None else unpack_body(found[0])

    def stats(self) -> StorageStats:
        """Return the counters of writes, and the size of the history."""
        return StorageStats(
            written=self._written, promises=self._promises, history_bytes=self._history_bytes
        )

    def _add_sighting(self, record: OriginRecord) -> None:
        seen = sighting(record)
        if seen is None:
            return
        # Popped and put again: the least recently seen history is first, and is shrunk first.
        entries = self._history[record.origin] = self._history.pop(record.origin, [])
        if entries and entries[-1].body_hash == seen.body_hash:
            last_seen = max(entries[-1].last_seen, seen.last_seen)
            entries[-1] = msgspec.structs.replace(entries[-1], last_seen=last_seen)
        else:
            entry = HistoryEntry(
                origin=record.origin,
                body_hash=seen.body_hash,
                first_seen=seen.first_seen,
                last_seen=seen.last_seen,
                outcome=seen.outcome,
                status=seen.status,
                size=0 if seen.body is None else len(unpack_body(seen.body)),
            )
            entries.append(entry)
            self._keep_body(seen.body_hash, seen.body)
        while len(entries) > self._config.history_versions:
            self._drop_body(entries.pop(0).body_hash)
        if self._history_bytes > self._config.history_bytes:
            self._shrink()

    def _keep_body(self, body_hash: bytes, body: bytes | None) -> None:
        self._history_bytes += HISTORY_ROW_BYTES
        if not body_hash or body is None:
            return
        packed, count = self._bodies.get(body_hash, (body, 0))
        self._bodies[body_hash] = (packed, count + 1)
        if count == 0:
            self._history_bytes += len(packed)

    def _drop_body(self, body_hash: bytes) -> None:
        self._history_bytes -= HISTORY_ROW_BYTES
        found = self._bodies.get(body_hash)
        if found is None:
            return
        packed, count = found
        if count > 1:
            self._bodies[body_hash] = (packed, count - 1)
        else:
            del self._bodies[body_hash]
            self._history_bytes -= len(packed)

    def _shrink(self) -> None:
        """Drop old versions until the history fits: all but the newest of stored origins, and all
        of the others."""
        goal = self._config.history_bytes - self._config.history_bytes // 20
        for origin, entries in list(self._history.items()):
            keep = 1 if origin in self._origins else 0
            while len(entries) > keep and self._history_bytes > goal:
                self._drop_body(entries.pop(0).body_hash)
            if not entries:
                del self._history[origin]
            if self._history_bytes <= goal:
                return
