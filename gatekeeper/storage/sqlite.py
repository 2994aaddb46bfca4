"""`SqliteStorage`: one SQLite file, one journal beside it, one process at a time.

    <path>                  the database (WAL mode), with -wal and -shm while open
    <path>.promises-<n>     the journal: see journal.py
    <path>.lock             held while open: see lock.py

What survives what: a promise, kill -9 at once and a power cut after a second; the rest,
either of them after `flush_interval`.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from gatekeeper.clock import Clock, SystemClock
from gatekeeper.config import MEMORY, StorageConfig
from gatekeeper.errors import StorageError
from gatekeeper.storage import schema
from gatekeeper.storage.base import (
    ClockRecord,
    HistoryEntry,
    OriginRecord,
    StorageStats,
    overlay,
    unpack_body,
)
from gatekeeper.storage.writer import Writer

__all__ = ["SqliteStorage"]

T = TypeVar("T")


class SqliteStorage:
    """Keeps policies, clocks and history in one SQLite file.

    `path` is created with its directory; `config` bounds it; `clock` tells what is old.
    `open` raises StorageError, naming the file and the remedy, for a file that is
    damaged, foreign, of a newer gatekeeper, in use by another process, or read-only, and
    leaves such a file as it was. On a full disk, with `on_failure` "refuse", it begins without
    the file: promises are refused, and what would have to be read raises StorageError, until
    there is room.

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
        self._connection: sqlite3.Connection | None = None
        self._here: sqlite3.Connection | None = None
        """For the thread of the loop: what can't wait for another one."""
        self._closing: asyncio.Future[None] | None = None

    async def __aenter__(self) -> SqliteStorage:
        await self.open()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    @classmethod
    def configured(cls, config: StorageConfig, clock: Clock) -> SqliteStorage | None:
        """The one that the settings name; None where they name none."""
        if config.path is None or config.path == MEMORY:
            return None
        return cls(config.path, config=config, clock=clock)

    async def open(self) -> None:
        """Open or create. Raises StorageError."""
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
        # One thread, one connection: WAL lets it read while the writer writes.
        self._readers = ThreadPoolExecutor(1, thread_name_prefix="gatekeeper-storage-read")

    async def close(self) -> None:
        """Write what is pending and close. Idempotent; a failed last write is logged."""
        if self._readers is None:
            return
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close(self._readers))
        # Shielded: a cancelled caller leaves neither thread nor lock behind.
        await asyncio.shield(self._closing)

    async def _close(self, readers: ThreadPoolExecutor) -> None:
        if self._here is not None:
            self._here.close()
            self._here = None
        await asyncio.get_running_loop().run_in_executor(readers, self._close_reader)
        readers.shutdown()
        await asyncio.wrap_future(self._writer.stop())
        self._writer.join()

    async def load_origin(self, origin: str) -> OriginRecord | None:
        """What was last put for that origin, pending writes included."""
        pending = self._writer.pending_origin(origin)
        if pending is not None:
            return pending
        return await self._read(lambda connection: schema.read_origin(connection, origin))

    def put_origin(self, record: OriginRecord) -> None:
        """Keep it, in the next batch. A body joins the origin's history."""
        self._writer.put_origin(record)

    async def load_clocks(self) -> list[ClockRecord]:
        """Every clock kept, journal included."""
        # Before the file is read: what is committed meanwhile would be missed afterwards.
        pending = self._writer.pending_clocks()
        kept = await self._read(schema.read_clocks)
        clocks = [record for record in kept if record.scope not in pending]
        clocks.extend(record for record in pending.values() if record is not None)
        return clocks

    async def load_clock(self, scope: str) -> ClockRecord | None:
        """One scope's clock, pending writes included."""
        known, pending = self._writer.pending_clock(scope)
        if known:
            return pending
        return await self._read(lambda connection: schema.read_clock(connection, scope))

    def load_clock_nowait(self, scope: str) -> ClockRecord | None:
        """`load_clock` without waiting: a row is read by its key, and no writer delays it (WAL)."""
        known, pending = self._writer.pending_clock(scope)
        if known:
            return pending
        self._check_open()
        try:
            if self._here is None:
                self._here = schema.connect_readonly(self._path)
            return schema.read_clock(self._here, scope)
        except sqlite3.Error as error:
            raise schema.unusable(self._path, error) from error

    def put_clock(self, record: ClockRecord) -> None:
        """Keep it, in the next batch."""
        self._writer.put_clock(record.scope, record)

    def promise(self, record: ClockRecord) -> None:
        """Keep it, durable against kill -9 before this returns. Raises StorageError."""
        self._writer.promise(record)

    def owe(self, record: ClockRecord) -> None:
        """`promise` what came of an answer, with the room held back for it. Raises StorageError."""
        self._writer.promise(record, spare=True)

    @property
    def failing(self) -> str | None:
        """Why promises can't be kept now; None: they can, or `on_failure` is "continue"."""
        return self._writer.failing

    @property
    def exhausted(self) -> bool:
        """Whether not even `owe` finds room while promises can't be kept."""
        return self._writer.exhausted

    def watch(self, told: Callable[[], None]) -> None:
        """Have `told` called, in the running loop, when promises begin not to be kept."""
        loop = asyncio.get_running_loop()

        def tell() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(told)

        self._writer.watch(tell)

    def forget_clock(self, scope: str) -> None:
        """Nothing is owed to that scope any more."""
        self._writer.put_clock(scope, None)

    async def history(self, origin: str) -> list[HistoryEntry]:
        """The bodies of an origin, oldest first, pending ones included."""
        while True:
            batches, seen = self._writer.pending_history(origin)
            kept = await self._read(lambda connection: schema.history_of(connection, origin))
            # Committed in between, the same sightings would be told twice.
            if batches == self._writer.batches():
                return overlay(kept, origin, seen)

    async def body(self, body_hash: bytes) -> bytes | None:
        """The text behind a hash, decompressed; None if it was dropped."""
        pending = self._writer.pending_body(body_hash)
        if pending is not None:
            return unpack_body(pending)
        return await self._read(lambda connection: schema.text_of(connection, body_hash))

    async def flush(self) -> None:
        """Return when everything put so far is written. Raises StorageError if it can't be."""
        await asyncio.wrap_future(self._writer.flush())

    def stats(self) -> StorageStats:
        """What was written, what is pending, what failed."""
        return self._writer.stats()

    async def _read(self, query: Callable[[sqlite3.Connection], T]) -> T:
        readers = self._check_open()
        return await asyncio.get_running_loop().run_in_executor(readers, self._query, query)

    def _check_open(self) -> ThreadPoolExecutor:
        if self._readers is None or self._closing is not None:
            raise StorageError(f"{self._path}: not open; nothing can be read before or after")
        if not self._writer.opened:
            raise StorageError(f"{self._path}: can't be read yet ({self._writer.failing})")
        return self._readers

    def _query(self, query: Callable[[sqlite3.Connection], T]) -> T:
        if self._connection is None:
            self._connection = schema.connect_readonly(self._path)
        try:
            return query(self._connection)
        except sqlite3.Error as error:
            raise schema.unusable(self._path, error) from error

    def _close_reader(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
