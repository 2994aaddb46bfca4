"""The two files of a `PoliteQueue`: URLs that exceed its memory, and URLs that outlive the
process."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from gatekeeper import urls
from gatekeeper.errors import InvalidURL, StorageError
from gatekeeper.storage import schema

Entry = tuple[float, int, str, Any]
"""Rank (the negated priority), arrival number, URL, payload. Entries sort in the order in which
they are served; arrival numbers are unique."""

MAX_OBJECTS = 100_000
"""The maximum number of payloads that can't be written to the file and stay in memory."""

_BATCH_ROWS = 500


@contextlib.contextmanager
def _told(name: str, remedy: str) -> Iterator[None]:
    """Raise StorageError, with the remedy, for what goes wrong with a file."""
    try:
        yield
    except (*schema.FAULTS, OSError, InvalidURL) as error:
        text = f"{name} can't be used ({schema.told(error)}): {remedy}"
        raise StorageError(text) from error


class OverflowFile(msgspec.Struct, eq=False):
    """A scratch SQLite file with the URLs of origins that have too many for memory.

    It is created empty on first use and deleted when closed; without a path, SQLite creates it in
    the system's temporary folder, and the system deletes it with the process. Writes are batched;
    reads use the primary key and take some dozens of microseconds for a chunk. An operation that
    fails raises StorageError, has changed nothing, and may be retried.

    A payload of plain values is written as MessagePack and read back equal. Any other object
    stays in memory, `max_objects` at most: writing it would need pickle, and then anybody who
    can write to the folder of scratch files could run code in this process.
    """

    _path: str | Path | None = None
    max_objects: int = MAX_OBJECTS
    _connection: sqlite3.Connection | None = None
    _pending: list[tuple[int, float, int, str, bytes | None]] = []
    _objects: dict[int, Any] = {}
    """Arrival number -> payload that can't be written to the file."""
    rows: int = 0

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            self._connection = _opened(self._path or "", _SCRATCH, timeout=5.0)
        return self._connection

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Provide the connection inside one transaction. Raises StorageError and rolls back."""
        name = f"the queue's scratch file {self._path or 'in the temporary folder'}"
        remedy = "make room there, or give PoliteQueue another `path`; no URL is lost"
        with _told(name, remedy), self._open() as connection:  # commits or rolls back
            connection.execute("BEGIN")
            yield connection

    def make_room(self, data: Any) -> None:
        """Prepare for one `add`: write pending rows if there are many, and check that the payload
        has a place. Raises StorageError."""
        if len(self._objects) >= self.max_objects and _encode_payload(data) is None:
            raise StorageError(
                f"the queue already holds {self.max_objects:,} payloads in memory that can't be "
                f"written to its scratch file, nor can this {type(data).__name__}: use plain "
                f"values ({_PLAIN}), or fewer URLs at a time (maxsize)"
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

    def read_out(self, queue: int, count: int) -> list[Entry]:
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
                if self._path is not None:
                    Path(self._path).unlink(missing_ok=True)


class KeptEntries:
    """The file in which a queue's URLs outlive the process, one row per URL until it is done.

    The kernel has each change before the call returns, so kill -9 loses nothing; a power cut may
    cost the last changes. The file is locked: one process at a time.
    """

    def __init__(self, path: str | Path) -> None:
        self._translated_errors = partial(
            _told,
            f"the kept queue {path}",
            "only one process at a time may use it; make room there, or give PoliteQueue another "
            "`keep`",
        )
        with self._translated_errors():
            self._file = _opened(path, _KEPT, timeout=0.0)

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
                f"`keep` takes plain values as data, not this {type(data).__name__}: {_PLAIN}"
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


# After a crash the scratch file has no value, so nothing is synced. After a full disk it does, so a
# rollback journal is needed, in memory.
_SCRATCH = """
    PRAGMA journal_mode = MEMORY; PRAGMA synchronous = OFF; DROP TABLE IF EXISTS waiting;
    CREATE TABLE waiting (queue INTEGER, rank REAL, arrival INTEGER, url TEXT, data BLOB,
        PRIMARY KEY (queue, rank, arrival)) WITHOUT ROWID;
"""
# The last line takes the lock, or raises.
_KEPT = """
    PRAGMA locking_mode = EXCLUSIVE; PRAGMA journal_mode = WAL; PRAGMA synchronous = OFF;
    CREATE TABLE IF NOT EXISTS kept
        (arrival INTEGER PRIMARY KEY, rank REAL, url TEXT, data BLOB);
    CREATE TABLE IF NOT EXISTS out (arrival INTEGER PRIMARY KEY);
    BEGIN IMMEDIATE; COMMIT;
"""


def _opened(path: str | Path, script: str, timeout: float) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, timeout=timeout)
    try:
        connection.executescript(script)
    except BaseException:
        connection.close()
        raise
    return connection


_decode = msgspec.msgpack.Decoder().decode
_encode = msgspec.msgpack.Encoder().encode
_PLAIN_TYPES = (type(None), bool, int, float, str, bytes)
_PLAIN = "None, bool, int, float, str, bytes, lists, and dicts with text as keys"


def _encode_payload(data: Any) -> bytes | None:
    """Return the payload as MessagePack, or None if it would not be read back equal."""
    # An integer of more than 64 bits, a lone surrogate, a list within itself.
    with contextlib.suppress(OverflowError, UnicodeError, RecursionError, msgspec.MsgspecError):
        return _encode(data) if _is_plain(data) else None
    return None


def _is_plain(data: Any) -> bool:
    kind = type(data)  # not isinstance: a subclass would be read back as its base class
    if kind is list:
        return all(map(_is_plain, data))
    if kind is dict:
        return all(type(key) is str for key in data) and all(map(_is_plain, data.values()))
    return kind in _PLAIN_TYPES
