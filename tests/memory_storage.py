"""`MemoryStorage`: a `Storage` whose contents end with the process."""

from __future__ import annotations

from collections.abc import Callable
from weakref import finalize

from gatekeeper.clock import SystemClock
from gatekeeper.config import StorageConfig
from gatekeeper.storage import schema
from gatekeeper.storage.base import (
    ClockRecord,
    HistoryEntry,
    OriginRecord,
    WriteBatch,
)
from gatekeeper.storage.writer import Committer


class MemoryStorage:
    """A storage in memory, with the tables of the file and their bounds."""

    def __init__(self, *, config: StorageConfig | None = None) -> None:
        self._connection = schema.connect_in_memory()
        finalize(self, self._connection.close)
        self._committer = Committer(self._connection, config or StorageConfig(), SystemClock())

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
        return schema.read_origin(self._connection, origin)

    def put_origin(self, record: OriginRecord) -> None:
        """Store a record. Its body is added to the origin's history."""
        self._committer.commit(WriteBatch({record.origin: [record]}))
        self._committer.upkeep()

    async def load_clocks(self) -> list[ClockRecord]:
        """Return every stored clock."""
        return schema.read_clocks(self._connection)

    async def load_clock(self, scope: str) -> ClockRecord | None:
        """Return the clock of a scope, or None."""
        return self.load_clock_nowait(scope)

    def load_clock_nowait(self, scope: str) -> ClockRecord | None:
        """Return the clock of a scope, or None, without awaiting."""
        return schema.read_clock(self._connection, scope)

    def put_clock(self, record: ClockRecord) -> None:
        """Store a clock."""
        self._committer.commit(WriteBatch(clocks={record.scope: record}))

    promise = owe = put_clock  # there is no journal

    failing: None = None
    """Nothing can fail."""
    exhausted: bool = False
    """No space can run out."""

    def watch(self, callback: Callable[[], None]) -> None:
        """Do nothing: `failing` never changes."""

    def forget_clock(self, scope: str) -> None:
        """Delete the clock of a scope, to which nothing is owed any more."""
        self._committer.commit(WriteBatch(clocks={scope: None}))

    async def history(self, origin: str) -> list[HistoryEntry]:
        """Return the history of an origin, oldest first."""
        return schema.history_of(self._connection, origin)

    async def body(self, body_hash: bytes) -> bytes | None:
        """Return the decompressed text with that hash, or None if it was dropped."""
        return schema.text_of(self._connection, body_hash)
