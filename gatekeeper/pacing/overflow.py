"""URLs that wait: a few in memory for each lane, the rest in a SQLite file, in order."""

from __future__ import annotations

import heapq
import itertools
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from gatekeeper.errors import StorageError

__all__ = ["IN_MEMORY", "MAX_OBJECTS", "Backlog", "Entry", "Overflow"]

Entry = tuple[float, int, str, Any]
"""Rank (the negated priority), order of arrival, URL, payload: sorts as it is to be served, as
no two have one order of arrival."""

MAX_OBJECTS = 100_000
"""Payloads that can't go to the file, of URLs that do: they stay in memory, and no more of them."""

IN_MEMORY = 32
"""URLs of one lane in memory; from the next on they wait in a file."""
_BATCH = 500


class Overflow:
    """The rows of every lane that has too many URLs for memory.

    The file is scratch: made empty at the first need, deleted when closed. Writing is
    batched; reading is by primary key, some dozens of microseconds for a chunk. An
    operation that fails raises StorageError and has changed nothing: it may be tried again.

    A payload of plain values goes to the file as MessagePack, and an equal one comes back.
    Any other object stays in memory, `max_objects` at most: to write it would take pickle, and
    then whoever can write to the folder of scratch files could run code here.
    """

    def __init__(self, path: str | Path | None = None, max_objects: int = MAX_OBJECTS) -> None:
        self._path = path
        self._connection: sqlite3.Connection | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._pending: list[tuple[int, float, int, str, bytes | None]] = []
        self._objects: dict[int, Any] = {}
        """Order of arrival -> payload."""
        self._max_objects = max_objects
        self.rows = 0

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            if self._path is None:
                self._folder = tempfile.TemporaryDirectory(
                    prefix="gatekeeper-queue-", ignore_cleanup_errors=True
                )
                self._path = Path(self._folder.name) / "queue.sqlite"
            connection = sqlite3.connect(self._path, isolation_level=None)
            try:
                _prepare(connection)
            except BaseException:
                connection.close()
                raise
            self._connection = connection
        return self._connection

    @contextmanager
    def _usable(self) -> Iterator[sqlite3.Connection]:
        """The file, inside one transaction: all of it or nothing."""
        connection = None
        try:
            connection = self._open()
            connection.execute("BEGIN")
            yield connection
            connection.execute("COMMIT")
        except (sqlite3.Error, OSError) as error:
            raise StorageError(
                f"the queue's scratch file {self._path or tempfile.gettempdir()} can't be used "
                f"({error}): make room there, or give PoliteQueue another `path`; no URL is lost"
            ) from error
        finally:
            # A full disk, for one, has ended the transaction already.
            if connection is not None and connection.in_transaction:
                with suppress(sqlite3.Error):
                    connection.execute("ROLLBACK")

    def make_room(self, data: Any) -> None:
        """Write what is to be written, if that is much; see that one more payload has a place.

        Raises StorageError.
        """
        if len(self._objects) >= self._max_objects and _packed(data) is None:
            raise StorageError(
                f"the queue keeps {self._max_objects:,} payloads in memory already that can't go "
                f"to its scratch file, as this {type(data).__name__} can't: give plain values "
                "(None, bool, int, float, str, bytes, lists and dicts of them), or fewer URLs at "
                "a time (maxsize)"
            )
        if len(self._pending) >= _BATCH:
            self._flush()

    def add(self, lane: int, entry: Entry) -> None:
        """Put one URL of a lane away, at first in memory: this can't fail."""
        rank, arrival, url, data = entry
        packed = None if data is None else _packed(data)
        if data is not None and packed is None:
            self._objects[arrival] = data
        self._pending.append((lane, rank, arrival, url, packed))
        self.rows += 1

    def _flush(self) -> None:
        if self._pending:
            with self._usable() as connection:
                connection.executemany("INSERT INTO waiting VALUES (?, ?, ?, ?, ?)", self._pending)
            self._pending.clear()

    def take(self, lane: int, count: int) -> list[Entry]:
        """The first URLs of a lane, which are gone from here then. Raises StorageError."""
        self._flush()
        with self._usable() as connection:
            found: list[tuple[float, int, str, bytes | None]] = connection.execute(
                "SELECT rank, arrival, url, data FROM waiting WHERE lane = ?"
                " ORDER BY rank, arrival LIMIT ?",
                (lane, count),
            ).fetchall()
            if found:
                connection.execute(
                    "DELETE FROM waiting WHERE lane = ? AND (rank, arrival) <= (?, ?)",
                    (lane, *found[-1][:2]),
                )
        self.rows -= len(found)
        return [
            (rank, arrival, url, self._objects.pop(arrival, None) if data is None else _read(data))
            for rank, arrival, url, data in found
        ]

    def close(self) -> None:
        """Delete the file. Idempotent."""
        self._pending.clear()
        self._objects.clear()
        # What can't be deleted now is not worth an error to anybody.
        with suppress(sqlite3.Error, OSError):
            if self._connection is not None:
                self._connection.close()
                self._connection = None
                if self._folder is None and self._path is not None:
                    Path(self._path).unlink(missing_ok=True)
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = self._path = None


def _prepare(connection: sqlite3.Connection) -> None:
    # Scratch: what a crash leaves of it is worth nothing. Not so what a full disk leaves,
    # so that there is a journal, in memory.
    connection.execute("PRAGMA journal_mode = MEMORY")
    connection.execute("PRAGMA synchronous = OFF")
    connection.execute("DROP TABLE IF EXISTS waiting")
    connection.execute(
        "CREATE TABLE waiting (lane INTEGER, rank REAL, arrival INTEGER, url TEXT, data BLOB,"
        " PRIMARY KEY (lane, rank, arrival)) WITHOUT ROWID"
    )


_read = msgspec.msgpack.Decoder().decode
_write = msgspec.msgpack.Encoder().encode
_PLAIN = (type(None), bool, int, float, str, bytes)


def _packed(data: Any) -> bytes | None:
    """The payload as MessagePack; None where what is read back would not be the same."""
    try:
        return _write(data) if _is_plain(data) else None
    except (OverflowError, UnicodeError, RecursionError, msgspec.MsgspecError):
        return None  # an integer of more than 64 bits, half a character, a list in itself


def _is_plain(data: Any) -> bool:
    kind = type(data)  # not isinstance: a subclass would come back as what it is made of
    if kind is list:
        return all(map(_is_plain, data))
    if kind is dict:
        return all(type(key) is str for key in data) and all(map(_is_plain, data.values()))
    return kind in _PLAIN


class Backlog:
    """The URLs of one lane, the most important first, then first come first served.

    In memory stand the first of them: whatever is put away comes after all that is here.
    """

    __slots__ = ("_away", "_here", "_lane", "_limit", "_overflow", "_worst")

    _arrivals = itertools.count()

    def __init__(self, lane: int, overflow: Overflow, limit: int) -> None:
        self._lane = lane
        self._overflow = overflow
        self._limit = limit
        self._here: list[Entry] = []
        self._away = 0
        self._worst: tuple[float, int] | None = None
        """Nothing that is put away comes before this; None while nothing is."""

    def __len__(self) -> int:
        return len(self._here) + self._away

    def put(self, url: str, priority: float, data: Any = None) -> None:
        """Add at the end of its priority. Raises StorageError; then it is not added."""
        entry = (-priority, next(self._arrivals), url, data)
        late = self._is_late(entry)
        if late or len(self._here) >= 2 * self._limit:
            self._overflow.make_room(data)
        self._add(entry, late=late)

    def put_back(self, entry: Entry) -> None:
        """Add where it belongs: an entry that was popped stands first again. Can't fail."""
        self._add(entry, late=self._is_late(entry))

    def _is_late(self, entry: Entry) -> bool:
        """Does it come after all that is here, and have others to wait with?"""
        if self._worst is not None:
            return entry[:2] > self._worst
        return len(self._here) >= self._limit and entry >= max(self._here)

    def _add(self, entry: Entry, *, late: bool) -> None:
        if late:
            self._put_away(entry)
            return
        heapq.heappush(self._here, entry)
        if len(self._here) > 2 * self._limit:
            self._here.sort()
            for other in self._here[self._limit :]:
                self._put_away(other)
            del self._here[self._limit :]

    def _put_away(self, entry: Entry) -> None:
        self._overflow.add(self._lane, entry)
        self._away += 1
        if self._worst is None or entry[:2] < self._worst:
            self._worst = entry[:2]

    def pop(self) -> Entry:
        """The first. Raises IndexError if there is none, or StorageError; it is there then."""
        if not self._here and self._away:
            self._here = self._overflow.take(self._lane, self._limit)
            self._away -= len(self._here)
            self._worst = None if not self._away else self._here[-1][:2]
        return heapq.heappop(self._here)

    def rank(self) -> float:
        """The rank of the first, 0 if there is none."""
        if self._here:
            return self._here[0][0]
        return 0.0 if self._worst is None else self._worst[0]
