"""The writer thread, which commits records in batches, and the transactions that it runs.

The loop's thread adds records under a lock that is held for microseconds; everything that can
wait (opening, committing, fsync, deleting) happens in the writer thread. It sleeps until a
record is put, then gathers records for `flush_interval` and commits them together. A failed
batch is returned to the buffer, where newer records take precedence, and is retried.

A promise that the journal can't store is refused (or, with `on_failure = "continue"`, only
logged). From then on the thread tries to repair the journal every second; it first appends the
promises that were missed and are in force.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import math
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
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
    WriteBatch,
)
from gatekeeper.storage.journal import DatabaseLock, FileLock, Journal
from gatekeeper.storage.schema import (
    delete_old,
    get_meta,
    record_history,
    set_meta,
    shrink_history,
    write_clocks,
    write_origins,
)

_log = logging.getLogger("gatekeeper.storage")

MAX_PENDING_ORIGINS = 200_000
MAX_PENDING_BYTES = 128 * 1024 * 1024
MAX_RETRY_SECONDS = 30.0
"""The longest wait in seconds before a failed batch is retried."""
SYNC_SECONDS = 1.0
"""Seconds between two fsyncs of the journal, and so the most that a power cut may cost."""
REPAIR_SECONDS = 1.0
"""Seconds between two attempts to repair the journal."""
_APPENDED_PER_LOCK = 500
"""Missed promises that are appended in one go, during which the loop's thread is locked out."""


class Writer:
    """Owns the locks, the journal, the writing connection and the thread.

    It uses the machine's monotonic time, not the injected clock's: a virtual clock can't wake a
    thread. Tests and callers that need certainty use `flush`.
    """

    def __init__(self, path: Path, config: StorageConfig, clock: Clock) -> None:
        self._path = path
        self._config = config
        self._clock = clock
        self._refuses = config.on_failure == "refuse"
        self._on_failure: Callable[[], None] = lambda: None
        self._condition = threading.Condition()
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
        self._commit_at = math.inf
        """When to commit; inf: nothing is pending."""
        self._tend_at = math.inf
        """When to sync the journal, or to repair it; inf: everything in it is synced."""
        self._journal_error: str | None = None
        """Why the journal can't store promises; None if it can."""
        self._sync_failed = False
        """An fsync failed, and none has succeeded since."""
        self._missed: set[str] = set()
        """Scopes whose latest promise is only in memory."""
        # Used by the thread alone, except `append`, which is called under _condition:
        self._journal = Journal(path, limit=config.journal_bytes)
        self._committer: Committer | None = None
        self._database = DatabaseLock(path)
        self._batch_seconds = config.flush_interval
        self._failures = 0

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
                self._missed.add(record.scope)
                self._journal_failed(error)
            else:
                self._missed.discard(record.scope)
                if use_reserved and self._journal.in_reserved:
                    self._journal_failed(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
            if self._tend_at == math.inf:
                self._tend_at = time.monotonic() + SYNC_SECONDS
                self._condition.notify()
            self._schedule_commit()
        if not kept and self._refuses:
            raise StorageError(
                f"{self._path}: promises can't be kept ({self._journal_error}); "
                "make room there or make it writable, or go on without it with "
                'storage.on_failure = "continue"'
            )

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
            self._tend_at = time.monotonic()
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
            found = self._pending.origins.get(origin) or self._writing.origins.get(origin)
            return found[-1] if found else None

    def pending_clocks(self) -> dict[str, ClockRecord | None]:
        """Return the clocks that are not in the file yet; the value None means deleted."""
        with self._condition:
            return self._writing.clocks | self._pending.clocks

    def pending_clock(self, scope: str) -> tuple[bool, ClockRecord | None]:
        """Return whether a change is pending for the scope, and its clock (None: deleted)."""
        with self._condition:
            for batch in self._unwritten:
                if scope in batch.clocks:
                    return True, batch.clocks[scope]
        return False, None

    def _check_running(self) -> None:
        if not self._running:
            raise StorageError(f"{self._path}: not open; records can be stored only while it is")

    def _schedule_commit(self) -> None:
        if self._commit_at == math.inf:
            self._commit_at = time.monotonic() + self._batch_seconds
            self._condition.notify()

    # The thread.

    def _run(self, opened: Future[None]) -> None:
        try:
            with contextlib.ExitStack() as stack:
                if (committer := self._open_when_possible(stack, opened)) is None:
                    return
                if not opened.done():
                    opened.set_result(None)
                self._run_tasks(committer)
        except BaseException as error:
            if opened.done():
                raise
            opened.set_exception(error)  # raised to the caller of `open`
        finally:
            with self._condition:
                self._running = False
                waiting = self._take_flushes()
            for flush in waiting:
                flush.set_exception(StorageError(f"{self._path}: the writer has ended"))
            self._ended.set_result(None)

    def _open_when_possible(
        self, stack: contextlib.ExitStack, opened: Future[None]
    ) -> Committer | None:
        """Open the file. On a full disk run without it, refusing every promise, and retry until
        there is space. Return None if the writer was stopped before that."""
        while True:
            try:
                return self._open(stack)
            except (StorageError, *schema.FAULTS, OSError) as error:
                stack.close()
                if not (opened.done() or (isinstance(error, DiskFull) and self._refuses)):
                    raise
                with self._condition:
                    self._running = not self._stopping
                    self._sync_failed = True
                    self._journal_failed(OSError(str(error)))
                    self._journal_error = str(error)
                    if not opened.done():
                        opened.set_result(None)
                    self._condition.wait_for(self._is_called, REPAIR_SECONDS)
                    for flush in self._take_flushes():
                        flush.set_exception(error)
                    if self._stopping:
                        return None

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
        lock = FileLock(Path(f"{self._path.absolute()}.lock"), guarded=self._path)
        stack.callback(lock.release)
        self._database.refuse_own()
        schema.prepare(self._path)
        self._database.hold()
        stack.callback(self._database.release)
        connection = schema.connect(self._path)
        stack.callback(connection.close)
        committer = Committer(connection, self._config, self._clock)
        stack.callback(self._journal.abandon)
        absorbed = get_meta(connection, "absorbed") or 0
        replayed: dict[str, ClockRecord | None] = {}
        latest = absorbed
        for sequence, record in self._journal.replay(absorbed):
            replayed[record.scope] = record
            latest = max(latest, sequence)
        with self._condition:
            # What was put before the file could be opened is newer.
            self._pending.clocks = replayed | self._pending.clocks
            self._pending.sequence += latest
            self._begin_journal()
            self._committer = committer
            self._running = not self._stopping
            self._schedule_commit()
        return committer

    def _run_tasks(self, committer: Committer) -> None:
        stopping = False
        while not stopping:
            with self._condition:
                commits = self.await_task()
                stopping = self._stopping
            if commits:
                self._commit_pending(committer, last=stopping)
            elif self._journal_error is None:
                with self._condition:
                    self._tend_at = math.inf
                self._sync()
            else:
                self._repair()

    def _is_called(self) -> bool:
        return self._stopping or bool(self._flushes)

    def await_task(self) -> bool:
        """Sleep until there is a task. Return True for a commit, and False if the journal has to
        be synced or repaired. Called under the lock."""
        while not self._is_called():
            now = time.monotonic()
            if now >= self._commit_at:
                break
            if now >= self._tend_at:
                return False
            wait = min(self._commit_at, self._tend_at) - now
            self._condition.wait(None if wait == math.inf else wait)
        return True

    def _sync(self) -> bool:
        """Sync the journal to disk; return False if that fails.

        It is then unknown what is on the disk, so everything that is not committed has to be
        appended to another generation.
        """
        try:
            self._journal.sync()
            self._database.check()
        except OSError as error:
            with self._condition:
                self._journal.abandon()
                for batch in self._unwritten:
                    self._missed.update(batch.clocks)
                self._sync_failed = True
                self._journal_failed(error)
            return False
        return True

    def _repair(self) -> None:
        """Try to repair the journal: begin another generation, and append the promises that were
        missed. It counts as repaired once an fsync of that has succeeded."""
        with self._condition:
            self._tend_at = time.monotonic() + REPAIR_SECONDS
        self._sync()  # nobody syncs the generation once another one has replaced it
        try:
            with self._condition:
                self._journal.begin()
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
        """Append the promises that the journal missed. Raises OSError."""
        while self._missed:
            with self._condition:
                for scope in list(itertools.islice(self._missed, _APPENDED_PER_LOCK)):
                    _, record = self.pending_clock(scope)
                    if record is not None:
                        self._journal.append(self._pending.sequence, record)
                    self._missed.remove(scope)

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

    def _commit_pending(self, committer: Committer, *, last: bool) -> None:
        """Commit what is pending and answer the flushes; start a new journal if one is due."""
        with self._condition:
            if self._journal.is_full:
                self._begin_journal()
            self._writing = batch = self._pending.drain()
            retired = self._journal.retired()
            flushes = self._take_flushes()
            self._commit_at = math.inf
            if self._journal_error is None:
                self._tend_at = math.inf  # the commit is synced
        error = self._commit_batch(committer, batch, retired)
        if self._journal_error is not None:
            self._repair()
        for flush in flushes:
            if error is None:
                flush.set_result(None)
            else:
                flush.set_exception(schema.unusable(self._path, error))
        if last and error is None:
            self._journal.discard_all()

    def _commit_batch(
        self, committer: Committer, batch: WriteBatch, retired: list[Path]
    ) -> Exception | None:
        began = time.monotonic()
        try:
            if len(batch):
                committer.commit(batch)
            self._database.check()
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
            self._missed &= self._pending.clocks.keys()
            self._failures = 0
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
            self._journal.growth_bounded = True
            wait = self._config.flush_interval * 2.0 ** min(self._failures, 16)
            retry_at = time.monotonic() + min(wait, MAX_RETRY_SECONDS)
            self._commit_at = retry_at if len(self._pending) else math.inf
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
        self.history_bytes: int = get_meta(connection, "history_bytes") or 0

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
        self._put_since_deletion += len(batch.origins)

    def _commit(self, batch: WriteBatch, write: Callable[[WriteBatch], int]) -> None:
        with self._transaction():
            grown = self.history_bytes + write(batch)
            set_meta(self._connection, "absorbed", batch.sequence)
            set_meta(self._connection, "history_bytes", grown)
        self.history_bytes = grown

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._connection:  # commits, or rolls back what an error has not rolled back already
            self._connection.execute("BEGIN IMMEDIATE")
            yield

    def _write(self, batch: WriteBatch) -> int:
        write_origins(self._connection, (records[-1] for records in batch.origins.values()))
        write_clocks(self._connection, batch.clocks)
        every = itertools.chain.from_iterable(batch.origins.values())
        return record_history(self._connection, every, versions=self._config.history_versions)

    def _write_singly(self, batch: WriteBatch) -> int:
        """Write each record in its own savepoint, so that an invalid one affects no other."""
        grown = 0
        for origin, records in batch.origins.items():
            grown += self._try_one(WriteBatch({origin: records}))
        for scope, clock in batch.clocks.items():
            self._try_one(WriteBatch(clocks={scope: clock}))
        return grown

    def _try_one(self, one: WriteBatch) -> int:
        self._connection.execute("SAVEPOINT one")
        try:
            grown = self._write(one)
        except Exception as error:
            if _fault_of_file(error):
                raise
            self._connection.execute("ROLLBACK TO one")
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
                    now=self._clock.wall(),
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
