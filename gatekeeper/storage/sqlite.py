"""`SqliteStorage`: one SQLite file with a journal beside it, for one process at a time. Also the
two files of a `PoliteQueue`: URLs that outlive the process, and URLs that exceed its memory.

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
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from gatekeeper import urls
from gatekeeper.clock import Clock, SystemClock
from gatekeeper.config import MEMORY, StorageConfig
from gatekeeper.errors import InvalidURL, StorageError
from gatekeeper.storage import schema
from gatekeeper.storage.base import ClockRecord, HistoryEntry, OriginRecord, StorageStats
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
        self._connection: sqlite3.Connection | None = None
        self._loop_connection: sqlite3.Connection | None = None
        """For reads in the loop's thread, which can't wait for another thread."""
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
        if self._loop_connection is not None:
            self._loop_connection.close()
            self._loop_connection = None
        with contextlib.suppress(RuntimeError):  # when the interpreter exits, it ends the thread
            await asyncio.get_running_loop().run_in_executor(readers, self._close_connection)
        self._close_connection()
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
        try:
            if self._loop_connection is None:
                self._loop_connection = schema.connect_readonly(self._path)
            return schema.read_clock(self._loop_connection, scope)
        except schema.FAULTS as error:
            raise schema.unusable(self._path, error) from error

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

    def stats(self) -> StorageStats:
        """Return the counters of writes, pending records and failures."""
        return self._writer.stats()

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
        if self._connection is None:
            self._connection = schema.connect_readonly(self._path)
        try:
            return query(self._connection)
        except schema.FAULTS as error:
            raise schema.unusable(self._path, error) from error

    def _close_connection(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


# --- the files of a PoliteQueue -----------------------------------------------------------------


Entry = tuple[float, int, str, Any]
"""Rank (the negated priority), arrival number, URL, payload. Entries sort in the order in which
they are served; arrival numbers are unique."""

MAX_OBJECTS = 100_000
"""The maximum number of payloads that can't be written to the file and stay in memory."""

_BATCH_ROWS = 500


class OverflowFile:
    """A scratch SQLite file with the URLs of origins that have too many for memory.

    It is created empty on first use and deleted when closed. Writes are batched; reads use the
    primary key and take some dozens of microseconds for a chunk. An operation that fails raises
    StorageError, has changed nothing, and may be retried.

    A payload of plain values is written as MessagePack and read back equal. Any other object
    stays in memory, `max_objects` at most: writing it would need pickle, and then anybody who
    can write to the folder of scratch files could run code in this process.
    """

    def __init__(self, path: str | Path | None = None, max_objects: int = MAX_OBJECTS) -> None:
        self._path = path
        self._connection: sqlite3.Connection | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._pending: list[tuple[int, float, int, str, bytes | None]] = []
        self._objects: dict[int, Any] = {}
        """Arrival number -> payload that can't be written to the file."""
        self._max_objects = max_objects
        self.rows: int = 0

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            if self._path is None:
                self._folder = tempfile.TemporaryDirectory(
                    prefix="gatekeeper-queue-", ignore_cleanup_errors=True
                )
                self._path = Path(self._folder.name) / "queue.sqlite"
            connection = sqlite3.connect(self._path, isolation_level=None)
            try:
                _create_table(connection)
            except BaseException:
                connection.close()
                raise
            self._connection = connection
        return self._connection

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Provide the connection inside one transaction. Raises StorageError and rolls back."""
        try:
            with self._open() as connection:  # commits or rolls back
                connection.execute("BEGIN")
                yield connection
        except (*schema.FAULTS, OSError) as error:
            raise StorageError(
                f"the queue's scratch file {self._path or tempfile.gettempdir()} can't be used "
                f"({schema.told(error)}): make room there, or give PoliteQueue another `path`; no "
                "URL is lost"
            ) from error

    def make_room(self, data: Any) -> None:
        """Prepare for one `add`: write pending rows if there are many, and check that the payload
        has a place. Raises StorageError."""
        if len(self._objects) >= self._max_objects and _encode_payload(data) is None:
            raise StorageError(
                f"the queue already holds {self._max_objects:,} payloads in memory that can't be "
                f"written to its scratch file, nor can this {type(data).__name__}: use plain "
                "values (None, bool, int, float, str, bytes, lists and dicts of them), or fewer "
                "URLs at a time (maxsize)"
            )
        if len(self._pending) >= _BATCH_ROWS:
            self._flush()

    def add(self, queue: int, entry: Entry) -> None:
        """Add a URL to a queue. It is buffered in memory, so this can't fail."""
        rank, arrival, url, data = entry
        packed = _encode_payload(data)
        if packed is None:
            self._objects[arrival] = data
        self._pending.append((queue, rank, arrival, url, packed))
        self.rows += 1

    def _flush(self) -> None:
        if self._pending:
            with self._transaction() as connection:
                connection.executemany("INSERT INTO waiting VALUES (?, ?, ?, ?, ?)", self._pending)
            self._pending.clear()

    def take(self, queue: int, count: int) -> list[Entry]:
        """Remove and return the first `count` entries of a queue. Raises StorageError."""
        self._flush()
        with self._transaction() as connection:
            found: list[tuple[float, int, str, bytes | None]] = connection.execute(
                "SELECT rank, arrival, url, data FROM waiting WHERE queue = ?"
                " ORDER BY rank, arrival LIMIT ?",
                (queue, count),
            ).fetchall()
            if found:
                connection.execute(
                    "DELETE FROM waiting WHERE queue = ? AND (rank, arrival) <= (?, ?)",
                    (queue, *found[-1][:2]),
                )
        self.rows -= len(found)
        return [
            (rank, arrival, url, _decode(data) if data else self._objects.pop(arrival))
            for rank, arrival, url, data in found
        ]

    def close(self) -> None:
        """Delete the file. Idempotent."""
        self._pending.clear()
        self._objects.clear()
        # Failing to delete a scratch file is not worth an error.
        with contextlib.suppress(sqlite3.Error, OSError):
            if self._connection is not None:
                self._connection.close()
                self._connection = None
                if self._folder is None and self._path is not None:
                    Path(self._path).unlink(missing_ok=True)
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = self._path = None


class KeptEntries:
    """The file in which a queue's URLs outlive the process, one row per URL until it is done.

    The kernel has each change before the call returns, so kill -9 loses nothing; a power cut may
    cost the last changes. The file is locked: one process at a time.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = path
        with self._translated_errors():
            self._file = sqlite3.connect(path, isolation_level=None, timeout=0.0)
            try:
                self._file.executescript(
                    "PRAGMA locking_mode = EXCLUSIVE; PRAGMA journal_mode = WAL;"
                    "PRAGMA synchronous = OFF;"
                    "CREATE TABLE IF NOT EXISTS kept"
                    " (arrival INTEGER PRIMARY KEY, rank REAL, url TEXT, data BLOB);"
                    "CREATE TABLE IF NOT EXISTS out (arrival INTEGER PRIMARY KEY);"
                    "BEGIN IMMEDIATE; COMMIT;"  # takes the lock, or raises
                )
            except BaseException:
                self._file.close()
                raise

    @contextlib.contextmanager
    def _translated_errors(self) -> Iterator[None]:
        try:
            yield
        except (*schema.FAULTS, OSError, InvalidURL) as error:
            raise StorageError(
                f"the kept queue {self._path} can't be used ({schema.told(error)}): only one "
                "process at a time may use it; make room there, or give PoliteQueue another `keep`"
            ) from error

    def load(self, check: Callable[[str], object] = urls.split) -> list[Entry]:
        """Return every entry in order of arrival. Raises StorageError, also for a damaged one, and
        unlocks the file then. `check` raises InvalidURL for a URL that can't have been put.

        The entries that were given out come last, as newly arrived: what they led to may have ended
        the process, and would end it again before any other is given out.
        """
        with self._translated_errors(), contextlib.ExitStack() as stack:
            stack.callback(self.close)
            last = self._file.execute("SELECT MAX(arrival) FROM kept").fetchone()[0] or 0
            out = self._file.execute("SELECT arrival FROM out ORDER BY arrival").fetchall()
            with self._file:
                self._file.execute("BEGIN")
                self._file.executemany(
                    "UPDATE kept SET arrival = ? WHERE arrival = ?",
                    [(last + number, one) for number, (one,) in enumerate(out, 1)],
                )
                self._file.execute("DELETE FROM out")
            rows = self._file.execute(
                "SELECT rank, arrival, url, data FROM kept ORDER BY arrival"
            ).fetchall()
            kept = msgspec.convert(rows, list[tuple[float, int, str, bytes | None]])
            for one in kept:
                check(one[2])
            entries = [(*one[:3], None if one[3] is None else _decode(one[3])) for one in kept]
            stack.pop_all()
            return entries

    def add(self, entry: Entry) -> None:
        """Store an entry. Raises TypeError if its payload is not plain values, and StorageError."""
        rank, arrival, url, data = entry
        packed = _encode_payload(data)
        if packed is None:
            raise TypeError(
                f"a queue with `keep` takes plain values as data, not this {type(data).__name__}: "
                "None, bool, int, float, str, bytes, lists, and dicts with text as keys"
            )
        with self._translated_errors():
            self._file.execute("INSERT INTO kept VALUES (?, ?, ?, ?)", (arrival, rank, url, packed))

    def remove(self, entry: Entry) -> None:
        """Delete an entry that is done. Raises StorageError."""
        with self._translated_errors():
            self._file.execute("DELETE FROM kept WHERE arrival = ?", (entry[1],))
        self.give_back(entry)

    def begin(self, entry: Entry) -> None:
        """Note that an entry was given out. Never raises: only an order depends on it."""
        self._note("INSERT OR IGNORE INTO out VALUES (?)", entry)

    def give_back(self, entry: Entry) -> None:
        """Undo `begin`, as the entry was not used. Never raises."""
        self._note("DELETE FROM out WHERE arrival = ?", entry)

    def _note(self, statement: str, entry: Entry) -> None:
        with contextlib.suppress(*schema.FAULTS, OSError):
            self._file.execute(statement, (entry[1],))

    def close(self) -> None:
        """Close and unlock the file. Idempotent."""
        with contextlib.suppress(sqlite3.Error):
            self._file.close()


def _create_table(connection: sqlite3.Connection) -> None:
    # After a crash the scratch file has no value, so nothing is synced. After a full disk it
    # does, so a rollback journal is needed, in memory.
    connection.execute("PRAGMA journal_mode = MEMORY")
    connection.execute("PRAGMA synchronous = OFF")
    connection.execute("DROP TABLE IF EXISTS waiting")
    connection.execute(
        "CREATE TABLE waiting (queue INTEGER, rank REAL, arrival INTEGER, url TEXT, data BLOB,"
        " PRIMARY KEY (queue, rank, arrival)) WITHOUT ROWID"
    )


_decode = msgspec.msgpack.Decoder().decode
_encode = msgspec.msgpack.Encoder().encode
_PLAIN_TYPES = (type(None), bool, int, float, str, bytes)


def _encode_payload(data: Any) -> bytes | None:
    """Return the payload as MessagePack, or None if it would not be read back equal."""
    try:
        return _encode(data) if _is_plain(data) else None
    except (OverflowError, UnicodeError, RecursionError, msgspec.MsgspecError):
        return None  # an integer of more than 64 bits, a lone surrogate, a list within itself


def _is_plain(data: Any) -> bool:
    kind = type(data)  # not isinstance: a subclass would be read back as its base class
    if kind is list:
        return all(map(_is_plain, data))
    if kind is dict:
        return all(type(key) is str for key in data) and all(map(_is_plain, data.values()))
    return kind in _PLAIN_TYPES
