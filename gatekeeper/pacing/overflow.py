"""URLs that wait: a few in memory for each lane, the rest in a SQLite file, in order."""

from __future__ import annotations

import heapq
import itertools
import sqlite3
import tempfile
from pathlib import Path

__all__ = ["IN_MEMORY", "Backlog", "Entry", "Overflow"]

Entry = tuple[float, int, str]
"""Rank (the negated priority), order of arrival, URL: sorts as it is to be served."""

IN_MEMORY = 32
"""URLs of one lane in memory; from the next on they wait in a file."""
_BATCH = 500


class Overflow:
    """The rows of every lane that has too many URLs for memory.

    The file is scratch: made empty at the first need, deleted when closed. Writing is
    batched; reading is by primary key, some dozens of microseconds for a chunk.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self._path = path
        self._connection: sqlite3.Connection | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._pending: list[tuple[int, float, int, str]] = []
        self.rows = 0

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            if self._path is None:
                self._folder = tempfile.TemporaryDirectory(prefix="gatekeeper-queue-")
                self._path = Path(self._folder.name) / "queue.sqlite"
            self._connection = connection = sqlite3.connect(self._path, isolation_level=None)
            # Scratch: what a crash leaves of it is worth nothing.
            connection.execute("PRAGMA journal_mode = OFF")
            connection.execute("PRAGMA synchronous = OFF")
            connection.execute("DROP TABLE IF EXISTS waiting")
            connection.execute(
                "CREATE TABLE waiting (lane INTEGER, rank REAL, arrival INTEGER, url TEXT,"
                " PRIMARY KEY (lane, rank, arrival)) WITHOUT ROWID"
            )
        return self._connection

    def add(self, lane: int, entry: Entry) -> None:
        """Put one URL of a lane away."""
        self._pending.append((lane, *entry))
        self.rows += 1
        if len(self._pending) >= _BATCH:
            self._flush()

    def _flush(self) -> None:
        if self._pending:
            connection = self._open()
            connection.execute("BEGIN")
            connection.executemany("INSERT INTO waiting VALUES (?, ?, ?, ?)", self._pending)
            connection.execute("COMMIT")
            self._pending.clear()

    def take(self, lane: int, count: int) -> list[Entry]:
        """The first URLs of a lane, which are gone from here then."""
        self._flush()
        connection = self._open()
        found: list[Entry] = connection.execute(
            "SELECT rank, arrival, url FROM waiting WHERE lane = ? ORDER BY rank, arrival LIMIT ?",
            (lane, count),
        ).fetchall()
        if found:
            last = found[-1]
            connection.execute(
                "DELETE FROM waiting WHERE lane = ? AND (rank, arrival) <= (?, ?)",
                (lane, last[0], last[1]),
            )
            self.rows -= len(found)
        return found

    def close(self) -> None:
        """Delete the file. Idempotent."""
        self._pending.clear()
        if self._connection is not None:
            self._connection.close()
            self._connection = None
            if self._folder is None and self._path is not None:
                Path(self._path).unlink(missing_ok=True)
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = self._path = None


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
        """The best rank among those put away; None while there are none."""

    def __len__(self) -> int:
        return len(self._here) + self._away

    def put(self, url: str, priority: float) -> None:
        """Add at the end of its priority."""
        self.put_back((-priority, next(self._arrivals), url))

    def put_back(self, entry: Entry) -> None:
        """Add where it belongs: an entry that was popped stands first again."""
        if self._worst is not None:
            if entry[:2] >= self._worst:
                self._put_away(entry)
                return
        elif len(self._here) >= self._limit and entry >= max(self._here):
            self._put_away(entry)
            return
        heapq.heappush(self._here, entry)
        if len(self._here) > 2 * self._limit:
            self._here.sort()
            for late in self._here[self._limit :]:
                self._put_away(late)
            del self._here[self._limit :]

    def _put_away(self, entry: Entry) -> None:
        self._overflow.add(self._lane, entry)
        self._away += 1
        if self._worst is None or entry[:2] < self._worst:
            self._worst = entry[:2]

    def pop(self) -> Entry:
        """The first. Raises IndexError if there is none."""
        if not self._here and self._away:
            self._here = self._overflow.take(self._lane, self._limit)
            self._away -= len(self._here)
            # Those still away come after the last one that was fetched.
            self._worst = None if not self._away else self._here[-1][:2]
        return heapq.heappop(self._here)

    def rank(self) -> float:
        """The rank of the first, 0 if there is none."""
        if self._here:
            return self._here[0][0]
        return 0.0 if self._worst is None else self._worst[0]
