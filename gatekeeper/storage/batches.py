"""One transaction a batch, and the upkeep after it. All in the writer's thread."""

from __future__ import annotations

import contextlib
import logging
import sqlite3
from collections.abc import Callable, Iterator

from gatekeeper.clock import Clock
from gatekeeper.config import StorageConfig
from gatekeeper.storage import history, tables
from gatekeeper.storage.pending import Batch
from gatekeeper.storage.upkeep import forget

__all__ = ["Committer"]

_log = logging.getLogger("gatekeeper.storage")

FORGET_EVERY = 3600.0

# Errors of SQLite that one record can be at fault for, and trying again can't mend.
_FAULT_OF_RECORD = (
    sqlite3.IntegrityError,
    sqlite3.DataError,
    sqlite3.InterfaceError,
    sqlite3.ProgrammingError,
)


def _fault_of_file(error: Exception) -> bool:
    return isinstance(error, sqlite3.Error) and not isinstance(error, _FAULT_OF_RECORD)


class Committer:
    """Writes batches through one connection, and keeps the tables within their bounds."""

    def __init__(self, connection: sqlite3.Connection, config: StorageConfig, clock: Clock) -> None:
        self._connection = connection
        self._config = config
        self._clock = clock
        self._forget_at = clock.monotonic()
        self._put_since_forget = 0
        self._hopeless = 0
        self._newest = 0.0
        self.absorbed = tables.get_meta(connection, "absorbed") or 0
        self.history_bytes = tables.get_meta(connection, "history_bytes") or 0
        self.batches = 0
        self.written = 0
        self.rejected = 0

    def commit(self, batch: Batch) -> None:
        """All of it or nothing, but for records that the database refuses by themselves.

        Raises sqlite3.Error; the batch may be tried again then.
        """
        try:
            self._commit(batch, self._write)
        except Exception as error:
            if _fault_of_file(error):
                raise
            self._commit(batch, self._write_singly)
        self.batches += 1
        self.written += len(batch)
        self._put_since_forget += len(batch.origins)
        for record in batch.origins.values():
            self._newest = max(self._newest, record.fetched_at)
        for clock in batch.clocks.values():
            if clock is not None:
                self._newest = max(self._newest, clock.next_at)

    def _commit(self, batch: Batch, write: Callable[[Batch], int]) -> None:
        with self._transaction():
            grown = self.history_bytes + write(batch)
            tables.set_meta(self._connection, "absorbed", batch.sequence)
            tables.set_meta(self._connection, "history_bytes", grown)
        self.history_bytes = grown
        self.absorbed = batch.sequence

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            # A full disk has rolled back already.
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise

    def _write(self, batch: Batch) -> int:
        tables.write_origins(self._connection, batch.origins.values())
        tables.write_clocks(self._connection, batch.clocks)
        return sum(
            history.record(self._connection, origin, seen, versions=self._config.history_versions)
            for origin, seen in batch.sightings.items()
        )

    def _write_singly(self, batch: Batch) -> int:
        """Record by record, so that the one at fault spoils no other."""
        grown = 0
        for origin, record in batch.origins.items():
            seen = batch.sightings.get(origin)
            one = Batch({origin: record}, {origin: seen} if seen else {}, {}, batch.sequence)
            grown += self._try_one(one)
        for scope, clock in batch.clocks.items():
            self._try_one(Batch({}, {}, {scope: clock}, batch.sequence))
        return grown

    def _try_one(self, one: Batch) -> int:
        self._connection.execute("SAVEPOINT one")
        try:
            grown = self._write(one)
        except Exception as error:
            if _fault_of_file(error):
                raise
            self._connection.execute("ROLLBACK TO one")
            self.rejected += 1
            _log.error("a record was refused and is not kept: %s", error)
            grown = 0
        self._connection.execute("RELEASE one")
        return grown

    def upkeep(self) -> None:
        """Bring history and tables back within their bounds. Raises sqlite3.Error."""
        excess = self.history_bytes - self._config.history_bytes
        if excess > 0 and self.history_bytes > self._hopeless:
            self._shrink(excess + self._config.history_bytes // 20)
        many = self._put_since_forget * 20 > self._config.max_origins
        if many or self._clock.monotonic() >= self._forget_at:
            self._forget_at = self._clock.monotonic() + FORGET_EVERY
            self._put_since_forget = 0
            with self._transaction():
                forget(
                    self._connection,
                    # Old is what is older than the news: a clock set years ahead, with
                    # nothing fetched since, makes nothing old.
                    now=min(self._clock.wall(), self._newest),
                    forget_after=self._config.forget_after,
                    max_origins=self._config.max_origins,
                )

    def _shrink(self, excess: int) -> None:
        with self._transaction():
            freed = history.shrink(self._connection, excess=excess)
            tables.set_meta(self._connection, "history_bytes", self.history_bytes - freed)
        self.history_bytes -= freed
        # All that is left belongs to kept origins: looking again is vain until it has grown.
        self._hopeless = 0 if freed else self.history_bytes + self._config.history_bytes // 20
