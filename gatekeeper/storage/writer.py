"""The writer thread, which commits records in batches, and the transactions that it runs.

The loop's thread adds records under a lock that is held for microseconds; everything that can
wait (opening, committing, fsync, deleting) happens in the writer thread. It sleeps until a
record is put, then gathers records for `flush_interval` and commits them together. A failed
batch is returned to the buffer, where newer records take precedence, and is retried.

A promise that the journal can't store is refused (or, with `on_failure = "continue"`, only
counted). From then on the thread tries to repair the journal every second; it first appends the
promises that were missed and are in force.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from enum import Enum, auto
from pathlib import Path

from gatekeeper.clock import Clock
from gatekeeper.config import StorageConfig
from gatekeeper.errors import StorageError
from gatekeeper.storage import schema
from gatekeeper.storage.base import (
    ClockRecord,
    DiskFull,
    OriginRecord,
    Pending,
    StorageStats,
    WriteBatch,
    with_hash,
)
from gatekeeper.storage.journal import TEST_RECORD, TEST_SEQUENCE, DatabaseLock, FileLock, Journal
from gatekeeper.storage.schema import (
    delete_old,
    get_meta,
    record_sightings,
    set_meta,
    shrink_history,
    write_clocks,
    write_origins,
)

_log = logging.getLogger("gatekeeper.storage")

MAX_PENDING_ORIGINS = 200_000
MAX_PENDING_BYTES = 128 * 1024 * 1024
EARLY_COMMIT_RECORDS = 10_000
"""With so many pending records the batch is committed without waiting for the interval's end."""
MAX_RETRY_SECONDS = 30.0
"""The longest wait in seconds before a failed batch is retried."""
SYNC_SECONDS = 1.0
"""Seconds between two fsyncs of the journal, and so the most that a power cut may cost."""
REPAIR_SECONDS = 1.0
"""Seconds between two attempts to repair the journal."""
_APPENDED_PER_LOCK = 500
"""Missed promises that are appended in one go, during which the loop's thread is locked out."""


class _Task(Enum):
    """The next task of the thread."""

    COMMIT = auto()
    SYNC = auto()
    REPAIR = auto()


class Writer:
    """Owns the locks, the journal, the writing connection and the thread.

    It uses the machine's monotonic time, not the injected clock's: a virtual clock can't wake a
    thread. Tests and callers that need certainty use `flush`.
    """

    def __init__(self, path: Path, config: StorageConfig, clock: Clock) -> None:
        self._path = path
        self._config = config
        self._clock = clock
        self._on_failure: Callable[[], None] = lambda: None
        self._condition = threading.Condition(threading.Lock())
        # Guarded by _condition:
        self._pending = Pending(
            max_origins=MAX_PENDING_ORIGINS,
            max_bytes=MAX_PENDING_BYTES,
            versions=config.history_versions,
        )
        self._writing = WriteBatch()
        """The batch that is being committed."""
        self._flushes: list[Future[None]] = []
        self._running = False
        self._stopping = False
        self._commit_at: float | None = None
        self._unsynced_since: float | None = None
        self._unjournaled = 0
        self._journal_error: str | None = None
        """Why the journal can't store promises; None if it can."""
        self._repair_at = 0.0
        self._sync_failed = False
        """An fsync failed, and none has succeeded since."""
        self._missed: dict[str, None] = {}
        """Scopes whose latest promise is only in memory."""
        # Used by the thread alone, except `append`, which is called under _condition:
        self._journal = Journal(path, limit=config.journal_bytes)
        self._committer: Committer | None = None
        self._database: DatabaseLock | None = None
        self._batch_seconds = config.flush_interval
        self._failures = 0
        self._failed_batches = 0
        self._last_error: str | None = None
        self._replayed = 0

    # Called from the loop's thread.

    def start(self) -> Future[None]:
        """Start the thread. The future is done when the file is open, or holds the StorageError."""
        opened: Future[None] = Future()
        self._ended: Future[None] = Future()
        # A loop that is closed cancels what it awaits, but the end of a thread can't be cancelled.
        self._ended.set_running_or_notify_cancel()
        # A daemon thread: a program that forgets to close the storage still ends, as if killed.
        self._thread = threading.Thread(
            target=self._run, args=(opened,), name="gatekeeper-storage", daemon=True
        )
        self._thread.start()
        return opened

    def stop(self) -> Future[None]:
        """Accept no more records, write the pending ones and close. The future is done when the
        thread has finished."""
        with self._condition:
            self._running = False
            self._stopping = True
            self._condition.notify()
        return self._ended

    def join(self) -> None:
        """Wait for the thread to end; immediate once `stop`'s future is done."""
        self._thread.join()

    def put_origin(self, record: OriginRecord) -> None:
        """Store a record with the next batch."""
        record = with_hash(record)
        with self._condition:
            self._check_running()
            self._pending.put_origin(record)
            self._schedule_commit()

    def put_clock(self, scope: str, record: ClockRecord | None) -> None:
        """Store a scope's clock, or delete it (None), with the next batch."""
        with self._condition:
            self._check_running()
            self._pending.put_clock(scope, record)
            self._schedule_commit()

    def promise(self, record: ClockRecord, *, use_reserved: bool = False) -> None:
        """Append a clock to the journal now, and store it with the next batch.

        `use_reserved`: the clock follows from a response, so it may use the journal's reserved
        space. Raises StorageError if the journal can't store it and `on_failure` is "refuse"; even
        then it stays in memory and is appended later.
        """
        with self._condition:
            self._check_running()
            sequence = self._pending.put_clock(record.scope, record)
            kept = True
            try:
                if self._sync_failed:
                    raise OSError(errno.EIO, self._journal_error)
                self._journal.append(sequence, record, use_reserved=use_reserved)
            except OSError as error:
                kept = False
                self._unjournaled += 1
                self._missed[record.scope] = None
                self._journal_failed(error)
            else:
                if self._missed:
                    self._missed.pop(record.scope, None)
                if use_reserved and self._journal.in_reserved:
                    self._journal_failed(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
            if self._unsynced_since is None:
                self._unsynced_since = time.monotonic()
                self._condition.notify()
            self._schedule_commit()
        if not kept and self._refuses:
            raise StorageError(
                f"{self._path}: promises can't be kept ({self._journal_error}); "
                "make room there or make it writable, or go on without it with "
                'storage.on_failure = "continue"'
            )

    @property
    def _refuses(self) -> bool:
        return self._config.on_failure == "refuse"

    @property
    def failing(self) -> str | None:
        """Why promises are refused now; None if they are not."""
        return self._journal_error if self._refuses else None

    @property
    def exhausted(self) -> bool:
        """True if promises are refused, including those with `use_reserved`."""
        return self.failing is not None and (self._sync_failed or not self._journal.has_reserved)

    def watch(self, callback: Callable[[], None]) -> None:
        """Set the callback that is called when promises can no longer be stored. It is called in
        either thread, must return quickly and must not call this object."""
        self._on_failure = callback

    def _journal_failed(self, error: OSError) -> None:
        """Record, report and log that the journal can't store promises. Called under the lock."""
        before = self._journal_error
        # With no journal open, the reason stays why none could be begun.
        if before is None or not self._journal.closed:
            self._journal_error = error.strerror or str(error)
        if before is None:
            self._on_failure()
            _log.error(
                "%s: promises can't be kept (%s): %s",
                self._path,
                error,
                "leases whose clocks must be kept are refused until they can"
                if self._refuses
                else 'going on without (storage.on_failure = "continue"): kill -9 loses them',
            )
            self._repair_at = time.monotonic()
            self._condition.notify()

    def flush(self) -> Future[None]:
        """Request a commit. The future is done when everything put so far is committed, or holds
        the StorageError."""
        flushed: Future[None] = Future()
        with self._condition:
            self._check_running()
            self._flushes.append(flushed)
            self._condition.notify()
        return flushed

    @property
    def _unwritten(self) -> tuple[WriteBatch, WriteBatch]:
        """The batches that are not in the file yet, newer first."""
        return self._pending, self._writing

    def pending_origin(self, origin: str) -> OriginRecord | None:
        """Return an origin's record that is not in the file yet, or None."""
        with self._condition:
            found = (batch.origins.get(origin) for batch in self._unwritten)
            return next(filter(None, found), None)

    def pending_clocks(self) -> dict[str, ClockRecord | None]:
        """Return the clocks that are not in the file yet; the value None means deleted."""
        with self._condition:
            return self._writing.clocks | self._pending.clocks

    def pending_clock(self, scope: str) -> tuple[bool, ClockRecord | None]:
        """Return whether a change is pending for the scope, and its clock (None: deleted)."""
        with self._condition:
            return self._unwritten_clock(scope)

    def _unwritten_clock(self, scope: str) -> tuple[bool, ClockRecord | None]:
        for batch in self._unwritten:
            if scope in batch.clocks:
                return True, batch.clocks[scope]
        return False, None

    def stats(self) -> StorageStats:
        """Return the counters; those of the thread may lag behind by a batch."""
        committer = self._committer
        with self._condition:
            return StorageStats(
                pending=len(self._pending) + len(self._writing),
                written=committer.written if committer else 0,
                failed_batches=self._failed_batches,
                last_error=self._last_error,
                failing=self._journal_error,
                dropped=self._pending.dropped,
                rejected=committer.rejected if committer else 0,
                unjournaled=self._unjournaled,
                journal_bytes=self._journal.size,
                replayed=self._replayed,
                damaged=self._journal.damaged,
                history_bytes=committer.history_bytes if committer else 0,
            )

    def _check_running(self) -> None:
        if not self._running:
            raise StorageError(f"{self._path}: not open; records can be stored only while it is")

    def _schedule_commit(self) -> None:
        if self._commit_at is None:
            self._commit_at = time.monotonic() + self._batch_seconds
            self._condition.notify()
        elif len(self._pending) == EARLY_COMMIT_RECORDS and not self._failures:
            self._commit_at = time.monotonic()
            self._condition.notify()

    # The thread.

    def _run(self, opened: Future[None]) -> None:
        try:
            with contextlib.ExitStack() as stack:
                try:
                    committer = self._open(stack)
                except DiskFull as error:
                    if not self._refuses:
                        opened.set_exception(error)
                        return
                    if (later := self._retry_open(stack, error, opened)) is None:
                        return
                    committer = later
                except BaseException as error:  # noqa: BLE001 - raised to the caller of `open`
                    opened.set_exception(error)
                    return
                else:
                    opened.set_result(None)
                self._run_tasks(committer)
        finally:
            with self._condition:
                self._running = False
                waiting = self._take_flushes()
            for flush in waiting:
                flush.set_exception(StorageError(f"{self._path}: the writer has ended"))
            self._ended.set_result(None)

    def _retry_open(
        self, stack: contextlib.ExitStack, error: Exception, opened: Future[None]
    ) -> Committer | None:
        """Run without the file, refusing every promise, and retry opening it until there is space.

        Return None if the writer was stopped before that.
        """
        with self._condition:
            self._running = not self._stopping
            self._sync_failed = True
            self._journal_failed(OSError(str(error)))
        opened.set_result(None)
        stack.close()
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._stopping or self._flushes, REPAIR_SECONDS)
                flushes = self._take_flushes()
                stopping = self._stopping
            for flush in flushes:
                flush.set_exception(error)
            if stopping:
                return None
            try:
                return self._open(stack)
            except (StorageError, *schema.FAULTS, OSError) as again:
                stack.close()
                error = again
                self._journal_error = str(again)

    @property
    def opened(self) -> bool:
        """True if the file is open; False while a start on a full disk waits for space."""
        return self._committer is not None

    def _open(self, stack: contextlib.ExitStack) -> Committer:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(
                f"{self._path}: its directory can't be created ({error.strerror}); "
                "give another path"
            ) from error
        lock = FileLock(self._path.with_name(self._path.name + ".lock"), guarded=self._path)
        stack.callback(lock.release)
        database = DatabaseLock(self._path)
        schema.prepare(self._path)
        database.hold()
        stack.callback(database.release)
        self._database = database
        connection = schema.connect(self._path)
        stack.callback(connection.close)
        committer = Committer(connection, self._config, self._clock)
        stack.callback(self._journal.abandon)
        latest = committer.absorbed
        kept = list(self._journal.replay(committer.absorbed))
        with self._condition:
            early = self._pending.drain()  # put before the file could be opened: newer
            for sequence, record in kept:
                self._pending.put_clock(record.scope, record)
                latest = max(latest, sequence)
                self._replayed += 1
            self._pending.sequence = latest + len(early.clocks)
            self._pending.put_newer(early)
        if not len(self._pending):
            self._journal.discard(self._journal.retired())
        with self._condition:
            self._begin_journal()
            self._committer = committer
            self._running = not self._stopping
            if len(self._pending):
                self._schedule_commit()
        return committer

    def _run_tasks(self, committer: Committer) -> None:
        while True:
            with self._condition:
                task = self.await_task()
                stopping = self._stopping
                if task is not _Task.REPAIR:
                    self._unsynced_since = None
                if task is _Task.COMMIT:
                    batch, flushes = self._take_batch()
            if task is _Task.SYNC:
                self._sync()
                continue
            if task is _Task.REPAIR:
                self._repair()
                continue
            error = self._commit_batch(committer, batch)
            if self._journal_error is not None:
                self._repair()
            for flush in flushes:
                if error is None:
                    flush.set_result(None)
                else:
                    flush.set_exception(schema.unusable(self._path, error))
            if stopping:
                if error is None:
                    self._journal.discard_all()
                return

    def await_task(self) -> _Task:
        """Sleep until there is a task, and return it. Called under the lock."""
        while not (self._stopping or self._flushes):
            now = time.monotonic()
            if self._commit_at is not None and now >= self._commit_at:
                return _Task.COMMIT
            ends = [] if self._commit_at is None else [self._commit_at]
            if self._journal_error is not None:
                if now >= self._repair_at:
                    return _Task.REPAIR
                ends.append(self._repair_at)
            if self._unsynced_since is not None:
                ends.append(self._unsynced_since + SYNC_SECONDS)
                if now >= ends[-1]:
                    return _Task.SYNC
            self._condition.wait(min(ends) - now if ends else None)
        return _Task.COMMIT

    def _sync(self) -> bool:
        """Sync the journal to disk; return False if that fails.

        It is then unknown what is on the disk, so everything that is not committed has to be
        appended to another generation.
        """
        try:
            self._journal.sync()
            self._check_database()
        except OSError as error:
            with self._condition:
                self._journal.abandon()
                for batch in (self._writing, self._pending):
                    self._missed.update(dict.fromkeys(batch.clocks))
                self._sync_failed = True
                self._journal_failed(error)
            return False
        return True

    def _check_database(self) -> None:
        """Raise OSError if the database was removed: what is written to it would be lost."""
        if self._database is not None:
            self._database.check()

    def _repair(self) -> None:
        """Try to repair the journal, and append the promises that it missed.

        It counts as repaired once a frame was written and an fsync succeeded.
        """
        with self._condition:
            self._repair_at = time.monotonic() + REPAIR_SECONDS
        try:
            with self._condition:
                if self._journal.closed:
                    self._journal.begin()
            try:
                self._append_missed()
            except OSError:
                with self._condition:
                    self._journal.begin()  # the disk may be fine, and only the open file broken
                self._append_missed()
        except OSError as error:
            with self._condition:
                self._journal_failed(error)
            return
        if not self._sync():
            return
        with self._condition:
            if self._missed:  # another promise was missed meanwhile
                return
            self._journal_error = None
            self._sync_failed = False
        _log.warning("%s: promises can be kept again", self._path)

    def _append_missed(self) -> None:
        """Append the promises that the journal missed. Raises OSError.

        If it missed none, append a test frame, because an open file need not be writable.
        """
        if not self._missed:
            with self._condition:
                self._journal.append(TEST_SEQUENCE, TEST_RECORD)
        while self._missed:
            with self._condition:
                for scope in list(itertools.islice(self._missed, _APPENDED_PER_LOCK)):
                    _, record = self._unwritten_clock(scope)
                    if record is not None:
                        self._journal.append(self._pending.sequence, record)
                    del self._missed[scope]

    def _take_batch(self) -> tuple[WriteBatch, list[Future[None]]]:
        """Take the next batch and the futures of its flushes; start a new journal if one is due."""
        if self._journal.is_full or self._journal.closed:
            self._begin_journal()
        self._writing = batch = self._pending.drain()
        self._commit_at = None
        return batch, self._take_flushes()

    def _take_flushes(self) -> list[Future[None]]:
        """Take the requested flushes, except cancelled ones. Called under the lock."""
        taken, self._flushes = self._flushes, []
        return [flush for flush in taken if flush.set_running_or_notify_cancel()]

    def _begin_journal(self) -> None:
        """Start a new generation of the journal. Called under the lock."""
        try:
            self._journal.begin()
        except OSError as error:
            # Probably a full disk: the current generation stays in use, if there is one.
            if self._journal.closed:
                self._journal_failed(error)
            else:
                _log.warning("%s: no new journal can be created: %s", self._path, error)

    def _commit_batch(self, committer: Committer, batch: WriteBatch) -> Exception | None:
        began = time.monotonic()
        retired = self._journal.retired()
        try:
            if len(batch):
                committer.commit(batch)
            self._check_database()
        except (*schema.FAULTS, OSError) as error:
            self._failed(batch, error)
            return error
        self._journal.discard(retired)
        if self._failures:
            _log.warning("%s: it can be written again", self._path)
        took = time.monotonic() - began
        with self._condition:
            self._writing = WriteBatch()
            # The database now holds what the journal missed, except for newer records.
            self._missed = {name: None for name in self._missed if name in self._pending.clocks}
            self._failures = 0
            self._last_error = None
            self._journal.growth_bounded = False
            # A record is to be on disk within `flush_interval`, including the commit itself.
            interval = self._config.flush_interval
            self._batch_seconds = max(interval - took, interval / 4)
        try:
            committer.upkeep()
        except schema.FAULTS as error:
            why = schema.unusable(self._path, error)
            _log.warning("upkeep failed and is retried later: %s", why)
        return None

    def _failed(self, batch: WriteBatch, error: Exception) -> None:
        """Put back a batch that could not be written, and schedule a retry with back-off."""
        if self._failures == 0:
            why = schema.unusable(self._path, error)
            _log.error("nothing can be written, retried later: %s", why)
        with self._condition:
            self._pending.put_back(batch)
            self._writing = WriteBatch()
            self._failures += 1
            self._failed_batches += 1
            self._last_error = schema.told(error)
            self._journal.growth_bounded = True
            wait = self._config.flush_interval * 2.0 ** min(self._failures, 16)
            retry_at = time.monotonic() + min(wait, MAX_RETRY_SECONDS)
            self._commit_at = retry_at if len(self._pending) else None
            try:  # the database's error may affect the journal as well
                self._journal.append(TEST_SEQUENCE, TEST_RECORD)
            except OSError as refused:
                self._journal_failed(refused)
        self._sync()


# --- transactions ----------------------------------------------------------------------------

DELETE_SECONDS = 3600.0
"""Seconds between two deletions of old rows, unless many records are put."""

# Errors of SQLite that a single record can cause, and that a retry can't resolve.
_FAULT_OF_RECORD = (
    sqlite3.IntegrityError,
    sqlite3.DataError,
    sqlite3.InterfaceError,
    sqlite3.ProgrammingError,
)


def _fault_of_file(error: Exception) -> bool:
    faults = sqlite3.Error | UnicodeDecodeError | MemoryError
    return isinstance(error, faults) and not isinstance(error, _FAULT_OF_RECORD)


class Committer:
    """Commits batches through one connection, and keeps the tables within their bounds."""

    def __init__(self, connection: sqlite3.Connection, config: StorageConfig, clock: Clock) -> None:
        self._connection = connection
        self._config = config
        self._clock = clock
        self._delete_at = clock.monotonic()
        self._put_since_deletion = 0
        self._shrink_above = 0
        self._newest_moment = 0.0
        self.absorbed: int = get_meta(connection, "absorbed") or 0
        self.history_bytes: int = get_meta(connection, "history_bytes") or 0
        self.written: int = 0
        self.rejected: int = 0

    def commit(self, batch: WriteBatch) -> None:
        """Commit a batch atomically, without records that the database refuses individually.

        Raises sqlite3.Error, after which the batch may be retried.
        """
        try:
            self._commit(batch, self._write)
        except Exception as error:
            if _fault_of_file(error):
                raise
            self._commit(batch, self._write_singly)
        self.written += len(batch)
        self._put_since_deletion += len(batch.origins)
        for record in batch.origins.values():
            self._newest_moment = max(self._newest_moment, record.fetched_at)
        for clock in batch.clocks.values():
            if clock is not None:
                self._newest_moment = max(self._newest_moment, clock.next_at)

    def _commit(self, batch: WriteBatch, write: Callable[[WriteBatch], int]) -> None:
        with self._transaction():
            grown = self.history_bytes + write(batch)
            set_meta(self._connection, "absorbed", batch.sequence)
            set_meta(self._connection, "history_bytes", grown)
        self.history_bytes = grown
        self.absorbed = batch.sequence

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._connection:  # commits, or rolls back what an error has not rolled back already
            self._connection.execute("BEGIN IMMEDIATE")
            yield

    def _write(self, batch: WriteBatch) -> int:
        write_origins(self._connection, batch.origins.values())
        write_clocks(self._connection, batch.clocks)
        return sum(
            record_sightings(self._connection, origin, seen, versions=self._config.history_versions)
            for origin, seen in batch.sightings.items()
        )

    def _write_singly(self, batch: WriteBatch) -> int:
        """Write each record in its own savepoint, so that an invalid one affects no other."""
        grown = 0
        for origin, record in batch.origins.items():
            seen = batch.sightings.get(origin)
            one = WriteBatch({origin: record}, {origin: seen} if seen else {}, {}, batch.sequence)
            grown += self._try_one(one)
        for scope, clock in batch.clocks.items():
            self._try_one(WriteBatch({}, {}, {scope: clock}, batch.sequence))
        return grown

    def _try_one(self, one: WriteBatch) -> int:
        self._connection.execute("SAVEPOINT one")
        try:
            grown = self._write(one)
        except Exception as error:
            if _fault_of_file(error):
                raise
            self._connection.execute("ROLLBACK TO one")
            self.rejected += 1
            _log.error("a record was refused by the database and is not stored: %s", error)
            grown = 0
        self._connection.execute("RELEASE one")
        return grown

    def upkeep(self) -> None:
        """Reduce the history and the tables to their bounds. Raises sqlite3.Error."""
        excess = self.history_bytes - self._config.history_bytes
        if excess > 0 and self.history_bytes > self._shrink_above:
            self._shrink(excess + self._config.history_bytes // 20)
        many = self._put_since_deletion * 20 > self._config.max_origins
        if many or self._clock.monotonic() >= self._delete_at:
            self._delete_at = self._clock.monotonic() + DELETE_SECONDS
            self._put_since_deletion = 0
            with self._transaction():
                delete_old(
                    self._connection,
                    # Age is relative to the newest record: a wall clock set years ahead, with
                    # nothing fetched since, makes nothing old.
                    now=min(self._clock.wall(), self._newest_moment),
                    forget_after=self._config.forget_after,
                    max_origins=self._config.max_origins,
                )

    def _shrink(self, excess: int) -> None:
        with self._transaction():
            freed = shrink_history(self._connection, excess=excess)
            set_meta(self._connection, "history_bytes", self.history_bytes - freed)
        self.history_bytes -= freed
        # If nothing was freed, all that is left belongs to stored origins: don't search again
        # until the history has grown.
        self._shrink_above = 0 if freed else self.history_bytes + self._config.history_bytes // 20
