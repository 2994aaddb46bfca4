"""`SqliteStorage`: one SQLite file with a journal beside it, for one process at a time.

    <path>                  the database (WAL mode), with -wal and -shm while open
    <path>.promises-<n>     the journal: see journal.py
    <path>.lock             held while open: see journal.py

Durability: a promise survives kill -9 immediately and a power cut after one second; everything
else survives both after `flush_interval`.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from gatekeeper.clock import Clock, SystemClock
from gatekeeper.config import MEMORY, StorageConfig
from gatekeeper.errors import StorageError
from gatekeeper.storage import schema
from gatekeeper.storage.base import ClockRecord, HistoryEntry, OriginRecord
from gatekeeper.storage.writer import Writer

T = TypeVar("T")


class SqliteStorage:
    """A `Storage` in one SQLite file.

    `path` is created with its directory, `config` sets the bounds, and `clock` determines which
    rows are old. `open` raises StorageError, naming the file and the remedy, if the file is
    damaged, foreign, of a newer gatekeeper, in use by another process, or read-only, and leaves
    it unchanged. On a full disk, with `on_failure` "refuse", it starts without the file: until
    there is space, promises are refused, and reads raise StorageError.

    >>> async def remember(record):
    ...     async with SqliteStorage("state.db") as storage:
    ...         storage.put_origin(record)
    ...         return await storage.load_origin(record.origin)
    """

    def __init__(
        self, path: str | Path, *, config: StorageConfig | None = None, clock: Clock | None = None
    ) -> None:
        self._path = Path(path)
        self._config = config or StorageConfig()
        self._clock = clock or SystemClock()
        self._writer = Writer(self._path, self._config, self._clock)
        self._readers: ThreadPoolExecutor | None = None
        self._connections: dict[int, sqlite3.Connection] = {}
        """For reads, by thread: one of the readers, and the loop's, which can't wait for them."""
        self._closing: asyncio.Future[None] | None = None

    async def __aenter__(self) -> SqliteStorage:
        await self.open()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    @classmethod
    def configured(cls, config: StorageConfig, clock: Clock) -> SqliteStorage | None:
        """Return the storage that the settings name, or None if they name none."""
        if config.path is None or config.path == MEMORY:
            return None
        return cls(config.path, config=config, clock=clock)

    async def open(self) -> None:
        """Open or create the file. Raises StorageError."""
        if self._readers is not None:
            raise StorageError(f"{self._path}: already opened; a storage is opened once")
        opened = asyncio.wrap_future(self._writer.start())
        try:
            await asyncio.shield(opened)
        except BaseException:
            # Failed or cancelled: the thread must not outlive this call.
            await asyncio.shield(asyncio.wrap_future(self._writer.stop()))
            self._writer.join()
            self._writer = Writer(self._path, self._config, self._clock)
            raise
        # One thread with one connection: WAL lets it read while the writer writes.
        self._readers = ThreadPoolExecutor(1, thread_name_prefix="gatekeeper-storage-read")

    async def close(self) -> None:
        """Write what is pending and close. Idempotent; a failed last write is logged."""
        if self._readers is None:
            return
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close(self._readers))
        # Shielded, so that a cancelled caller leaves neither the thread nor the lock behind.
        await asyncio.shield(self._closing)

    async def _close(self, readers: ThreadPoolExecutor) -> None:
        with contextlib.suppress(RuntimeError):  # when the interpreter exits, it ends the thread
            await asyncio.get_running_loop().run_in_executor(readers, self._close_connections)
        self._close_connections()
        readers.shutdown()
        await asyncio.wrap_future(self._writer.stop())
        self._writer.join()

    async def load_origin(self, origin: str) -> OriginRecord | None:
        """Return the latest record of an origin, pending writes included, or None."""
        pending = self._writer.pending_origin(origin)
        if pending is not None:
            return pending
        return await self._read(lambda connection: schema.read_origin(connection, origin))

    def put_origin(self, record: OriginRecord) -> None:
        """Store a record with the next batch. Its body is added to the origin's history."""
        self._writer.put_origin(record)

    async def load_clocks(self) -> list[ClockRecord]:
        """Return every stored clock, the journal's included."""
        # Taken before the file is read: a commit in between would otherwise be missed.
        pending = self._writer.pending_clocks()
        kept = await self._read(schema.read_clocks)
        clocks = [record for record in kept if record.scope not in pending]
        clocks.extend(record for record in pending.values() if record is not None)
        return clocks

    async def load_clock(self, scope: str) -> ClockRecord | None:
        """Return the clock of a scope, pending writes included, or None."""
        known, pending = self._writer.pending_clock(scope)
        if known:
            return pending
        return await self._read(lambda connection: schema.read_clock(connection, scope))

    def load_clock_nowait(self, scope: str) -> ClockRecord | None:
        """`load_clock` without awaiting: reads a row by its key, undelayed by the writer (WAL)."""
        known, pending = self._writer.pending_clock(scope)
        if known:
            return pending
        self._check_open()
        return self._query(lambda connection: schema.read_clock(connection, scope))

    def put_clock(self, record: ClockRecord) -> None:
        """Store a clock with the next batch."""
        self._writer.put_clock(record.scope, record)

    def promise(self, record: ClockRecord) -> None:
        """Store a clock, durable against kill -9 before this returns. Raises StorageError."""
        self._writer.promise(record)

    def owe(self, record: ClockRecord) -> None:
        """`promise` for a clock that follows from a response; it may use the reserved space.
        Raises StorageError."""
        self._writer.promise(record, use_reserved=True)

    @property
    def failing(self) -> str | None:
        """Why promises can't be stored now; None if they can, or `on_failure` is "continue"."""
        return self._writer.failing

    @property
    def exhausted(self) -> bool:
        """True if `owe` fails as well as `promise`."""
        return self._writer.exhausted

    def watch(self, callback: Callable[[], None]) -> None:
        """Set the callback that is called, in the running loop, when promises can no longer be
        stored. It replaces an earlier one."""
        loop = asyncio.get_running_loop()

        def tell() -> None:
            with contextlib.suppress(RuntimeError):  # the loop may be closed
                loop.call_soon_threadsafe(callback)

        self._writer.watch(tell)

    def forget_clock(self, scope: str) -> None:
        """Delete the clock of a scope, to which nothing is owed any more."""
        self._writer.put_clock(scope, None)

    async def history(self, origin: str) -> list[HistoryEntry]:
        """Write pending entries, if that is possible, and return the history of an origin, oldest
        first."""
        with contextlib.suppress(StorageError):  # on a full disk the file is still readable
            await self.flush()
        return await self._read(lambda connection: schema.history_of(connection, origin))

    async def body(self, body_hash: bytes) -> bytes | None:
        """Return the decompressed text with a hash from `history`, or None if it was dropped."""
        return await self._read(lambda connection: schema.text_of(connection, body_hash))

    async def flush(self) -> None:
        """Return when everything put so far is written. Raises StorageError if that fails."""
        await asyncio.wrap_future(self._writer.flush())

    async def _read(self, query: Callable[[sqlite3.Connection], T]) -> T:
        readers = self._check_open()
        return await asyncio.get_running_loop().run_in_executor(readers, self._query, query)

    def _check_open(self) -> ThreadPoolExecutor:
        if self._readers is None or self._closing is not None:
            raise StorageError(f"{self._path}: not open; records can be read only while it is")
        if not self._writer.opened:
            raise StorageError(f"{self._path}: can't be read yet ({self._writer.failing})")
        return self._readers

    def _query(self, query: Callable[[sqlite3.Connection], T]) -> T:
        thread = threading.get_ident()
        if (connection := self._connections.get(thread)) is None:
            connection = self._connections[thread] = schema.connect_readonly(self._path)
        with schema.explained(self._path):
            return query(connection)

    def _close_connections(self) -> None:
        while self._connections:
            self._connections.popitem()[1].close()
