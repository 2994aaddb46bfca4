"""The journal of promises, appended before a grant is answered; and the locks of the database.

    <database>.promises-<n>     generation n, ascending
        "gatekeeper promises 1\n"
        frame*                  magic, length, CRC-32, MessagePack of [sequence, clock]

A frame is written with one plain pwrite(2): from then on the kernel has it, and it survives
kill -9. A power cut may cost the last second, the time between two fsyncs. A frame that a
killed process left half written fails its checksum and is skipped.

Space is preallocated ahead of the frames, if the file system supports that, and the last part
of it is reserved for promises that can't be refused: a host's block must fit on a full disk.

The database stores the highest sequence that it absorbed, in the same transaction as the
clocks. So a generation may be replayed any number of times, and a frame never overwrites a
later `put_clock`. A generation is deleted only after the transaction that absorbed all of it
was committed.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import struct
import sys
import weakref
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from gatekeeper.errors import StorageError
from gatekeeper.storage.base import NO_SPACE, ClockRecord, DiskFull, from_earlier

HEADER = b"gatekeeper promises 1\n"
_MAGIC = b"\xa5\x9c\xc3\x0a"
_FRAME = struct.Struct("<4sII")
_MAX_FRAME_OCTETS = 1 << 20
_MAX_GROWTH_FACTOR = 4
"""The journal grows to this many times its limit while the database can't absorb it."""
_PREALLOCATED_OCTETS = 131_072
"""Octets that are preallocated at a time."""
RESERVED_OCTETS = 32_768
"""Preallocated octets that only `append(use_reserved=True)` may use: more than a hundred blocks."""
_MIN_RESERVED_OCTETS = 4096
"""With fewer reserved octets left, the next block may not fit."""
_MAX_RETIRED = 16
"""The maximum number of generations that wait to be absorbed; beyond it no new one is created."""
_CANNOT_PREALLOCATE = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV}
"""Errors of a file system that can't preallocate."""

_OPEN_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0)


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(tuple[int, ClockRecord])


class Journal:
    """The journal files (generations) beside one database; the newest is open for appending.

    Not thread-safe: the owner holds a lock around every call except `sync`.
    """

    def __init__(self, database: Path, *, limit: int) -> None:
        self._path = database
        self._limit = limit
        self._fd = -1
        self._generation = 0
        self._allocated_end = 0.0
        """The offset up to which space is preallocated; inf: preallocation is not supported."""
        self._retired: list[Path] = []
        self._write_failed = False
        """The latest frame could not be written, although there seemed to be space."""
        self.size: int = 0
        self.growth_bounded: bool = False
        """Whether the database refuses all writes, so that the journal's growth is bounded."""

    def replay(self, absorbed: int) -> Iterator[tuple[int, ClockRecord]]:
        """Yield the promises that the database has not absorbed, in order of their sequence.

        The generations read become retired: `discard` deletes them. Raises StorageError if a
        file with a generation's name is not a journal.
        """
        prefix = f"{self._path.name}.promises-"
        beside = [path for path in self._path.parent.iterdir() if path.name.startswith(prefix)]
        numbers = ((path.name.removeprefix(prefix), path) for path in beside)
        for generation, path in sorted((int(no), path) for no, path in numbers if no.isdecimal()):
            self._generation = max(self._generation, generation)
            self._retired.append(path)
            for sequence, record in read_generation(path):
                if sequence > absorbed:
                    yield sequence, record

    def begin(self) -> None:
        """Start the next generation. Raises OSError, and then the current one stays in use."""
        if len(self._retired) >= _MAX_RETIRED:
            raise OSError(errno.EFBIG, "too many journals wait to be absorbed")
        generation = self._generation + 1
        path = self._name(generation)
        # A file of that name is left by an attempt whose clean-up failed.
        fd = os.open(path, _OPEN_FLAGS, 0o600)
        try:
            if os.write(fd, HEADER) != len(HEADER):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            ahead = preallocate(fd, 0)
        except OSError:
            os.close(fd)
            with contextlib.suppress(OSError):
                path.unlink()
            raise
        self.abandon()
        self._fd = fd
        self._generation = generation
        self._write_failed = False
        self._allocated_end = ahead
        self.size = len(HEADER)

    def append(self, sequence: int, record: ClockRecord, *, use_reserved: bool = False) -> None:
        """Write one promise to the open generation. Raises OSError if it was not written.

        `use_reserved`: the reserved space may be used.
        """
        if self._fd < 0:
            raise OSError(errno.EBADF, "no journal is open")
        if self.growth_bounded and self.size >= self._limit * _MAX_GROWTH_FACTOR:
            raise OSError(errno.EFBIG, "the database can't be written, and the journal is full")
        payload = _payload(sequence, record)
        frame = _FRAME.pack(_MAGIC, len(payload), zlib.crc32(payload)) + payload
        end = self.size + len(frame)
        if end > self._allocated_end - RESERVED_OCTETS:
            try:
                self._allocated_end = preallocate(self._fd, self._allocated_end)
            except OSError:
                if not use_reserved or end > self._allocated_end:
                    raise
        self._write_failed = True
        try:
            written = _write_at(self._fd, frame, self.size)
        except OSError as error:
            if error.errno == errno.EBADF:
                self._retire_open()  # the descriptor's number may be reused for another file
            raise
        if written != len(frame):
            # The reader skips a torn frame, and the next frame overwrites it.
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._write_failed = False
        self.size = end

    @property
    def has_reserved(self) -> bool:
        """True if reserved space is certainly left for promises that can't be refused."""
        ready = self._fd >= 0 and not self._write_failed
        return ready and self.size + _MIN_RESERVED_OCTETS <= self._allocated_end < math.inf

    @property
    def in_reserved(self) -> bool:
        """True if the reserved space is in use, because no other is left."""
        return self._fd >= 0 and self.size > self._allocated_end - RESERVED_OCTETS

    @property
    def is_full(self) -> bool:
        """True if a new generation is due; never while an older one waits to be absorbed."""
        return self.size >= self._limit and not self._retired

    @property
    def closed(self) -> bool:
        """True if no generation is open, because `begin` failed; it may be tried again."""
        return self._fd < 0

    def retired(self) -> list[Path]:
        """Return the closed generations, which may be discarded once they are absorbed."""
        return list(self._retired)

    def discard(self, paths: list[Path]) -> None:
        """Delete generations whose every frame is committed in the database."""
        for path in paths:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            self._retired.remove(path)

    def sync(self) -> None:
        """fsync the open generation. Called from the writer thread, which alone closes it.

        Raises OSError if fsync fails, after which even a later fsync can't tell what is on the
        disk; and if the file was removed.
        """
        if self._fd >= 0:
            os.fsync(self._fd)
            if _is_unlinked(self._fd):
                raise OSError(errno.ENOENT, "the journal was removed while it was in use")

    def abandon(self) -> None:
        """Close the open generation, if there is one, and retire it until it is absorbed."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self.size)  # release the preallocated space
            with contextlib.suppress(OSError):  # the descriptor is closed even on an error
                os.close(self._fd)
            empty = self.size <= len(HEADER)
            self._retire_open()
            if empty:  # nothing in it to absorb, and the number of retired ones is limited
                self.discard(self._retired[-1:])

    def _retire_open(self) -> None:
        self._fd = -1
        self._retired.append(self._name(self._generation))

    def discard_all(self) -> None:
        """Close and delete every generation, as the database has absorbed every promise."""
        self.abandon()
        self.discard(self.retired())

    def _name(self, generation: int) -> Path:
        return self._path.with_name(f"{self._path.name}.promises-{generation}")


def _write_at(fd: int, data: bytes, offset: int) -> int:
    if sys.platform != "win32":
        return os.pwrite(fd, data, offset)
    os.lseek(fd, offset, os.SEEK_SET)
    return os.write(fd, data)


def preallocate(fd: int, ahead: float) -> float:
    """Preallocate the next piece after an offset and return its end, or inf if the file system
    can't preallocate. Raises OSError if the disk is full."""
    if not hasattr(os, "posix_fallocate"):
        return math.inf
    try:
        os.posix_fallocate(fd, int(ahead), _PREALLOCATED_OCTETS)
    except OSError as error:
        if error.errno in _CANNOT_PREALLOCATE:
            return math.inf
        raise
    return ahead + _PREALLOCATED_OCTETS


def read_generation(path: Path) -> list[tuple[int, ClockRecord]]:
    """Return a generation's intact frames.

    Raises StorageError if the file is not a journal.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StorageError(
            f"{path}: the journal can't be read ({error.strerror}); make it readable, "
            "or move it away to start without its promises"
        ) from error
    if not data.startswith(HEADER):
        # The process was killed between creating the file and writing its first line.
        if HEADER.startswith(data):
            return []
        raise StorageError(
            f"{path}: has the name of a journal, but is not one of gatekeeper; "
            "move it away and start again"
        )
    return _frames(data)


def _frames(data: bytes) -> list[tuple[int, ClockRecord]]:
    frames: list[tuple[int, ClockRecord]] = []
    position = len(HEADER)
    while (start := data.find(_MAGIC, position)) >= 0:
        position = start + _FRAME.size
        try:
            _, length, checksum = _FRAME.unpack_from(data, start)
            payload = data[position : position + length] if length <= _MAX_FRAME_OCTETS else b""
            if len(payload) != length or zlib.crc32(payload) != checksum:
                raise ValueError
            sequence, record = _decoder.decode(payload)
        except (struct.error, ValueError, msgspec.DecodeError):
            position = start + 1
        else:
            frames.append((sequence, from_earlier(record)))
            position += length
    return frames


def _payload(sequence: int, record: ClockRecord) -> bytes:
    try:
        return _encode((sequence, record))
    except UnicodeEncodeError:
        # A lone surrogate from a header must not prevent the promise from being written.
        reason = record.block_reason.encode("utf-8", "backslashreplace").decode()
        return _encode((sequence, msgspec.structs.replace(record, block_reason=reason)))


# --- The locks: one process at a time.
#
# A lock file beside the database names its holder, and is independent of SQLite. But it may be
# deleted while it is held, and then it excludes nobody: so the database's own inode is locked as
# well, on an octet far beyond any that SQLite locks or writes.


_LOCKED_OFFSET = 1 << 62
"""The offset that `DatabaseLock` locks. SQLite locks octets at 1 GiB, and its files end at
256 TiB."""

if sys.platform == "win32":
    import msvcrt

    def _lock_file(fd: int) -> None:
        msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)

    def _lock_octet(fd: int) -> None:
        """Do nothing: Windows does not delete open files, so `FileLock` is enough."""

else:
    import fcntl

    def _lock_file(fd: int) -> None:
        # flock belongs to the open file, so it also excludes a second storage of this process.
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _lock_octet(fd: int) -> None:
        # Not flock: on some systems, and NFS, it conflicts with the locks that SQLite takes.
        if (command := getattr(fcntl, "F_OFD_SETLK", None)) is not None:
            wanted = struct.pack("@hhqqi", fcntl.F_WRLCK, os.SEEK_SET, _LOCKED_OFFSET, 1, 0)
            try:
                fcntl.fcntl(fd, command, wanted)
            except OSError as error:
                if error.errno != errno.EINVAL:  # a system that emulates Linux without these locks
                    raise
            else:
                return
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _LOCKED_OFFSET)


def _in_use_error(path: Path, process: str = "") -> StorageError:
    who = f" (process {process})" if process.isdigit() else ""
    return StorageError(
        f"{path}: in use by another gatekeeper{who}; stop that one, "
        "or give this one a file of its own"
    )


_held_locks: weakref.WeakSet[FileLock | DatabaseLock] = weakref.WeakSet()


def _leave_locks_to_parent() -> None:
    """Close the copies of the descriptors in a forked child, which would keep the parent's locks
    after its end."""
    for lock in list(_held_locks):
        lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_locks_to_parent)


class FileLock:
    """A lock file, held from construction to `release` or the end of the process.

    Raises StorageError if another process holds it (the message names that process), or if
    the file can't be created.
    """

    __slots__ = ("__weakref__", "_fd")

    def __init__(self, path: Path, *, guarded: Path) -> None:
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            kind = DiskFull if error.errno in NO_SPACE else StorageError
            raise kind(
                f"{guarded}: can't be used: {path.name} can't be created beside it "
                f"({error.strerror}); give a path in a directory that this user may write to"
            ) from error
        try:
            _lock_file(self._fd)
        except OSError as error:
            who = b""
            with contextlib.suppress(OSError):  # Windows lets nobody read what is locked
                who = os.read(self._fd, 32)
            os.close(self._fd)
            raise _in_use_error(guarded, who.decode("ascii", "replace").strip()) from error
        # For that message. On a full disk the lock holds without it.
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, 0)
            os.write(self._fd, b"%d" % os.getpid())
        _held_locks.add(self)

    def release(self) -> None:
        """Release the lock. The file stays: removing it would race with its next opener."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class DatabaseLock:
    """A lock on the database file itself, effective even if the lock file is deleted.

    Call `refuse_own` before anything opens the database, `hold` before SQLite opens it, and
    `release` after SQLite closed it: closing any descriptor of a file drops every POSIX lock
    that the process holds on it, including SQLite's. Readers in other processes are not excluded.
    """

    __slots__ = ("__weakref__", "_fd", "_inode", "_path")

    _held: set[tuple[int, int]] = set()  # noqa: RUF012 - one for the whole process
    """Inodes of the databases that this process has locked. Opening one of them again, even just
    to try its lock, would end with a close that drops SQLite's locks."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1
        self._inode = (0, 0)

    def refuse_own(self) -> None:
        """Raise StorageError if this process holds the lock already."""
        with contextlib.suppress(OSError):
            if _inode_of(self._path) in self._held:
                raise _in_use_error(self._path, str(os.getpid()))

    def hold(self) -> None:
        """Lock the database. Raises StorageError if another process holds the lock.

        A file that can't be opened, or a file system without locks, is no error here: SQLite
        reports the former.
        """
        with contextlib.suppress(OSError):
            self._fd = os.open(self._path, os.O_RDWR)
        if self._fd < 0:
            return
        try:
            _lock_octet(self._fd)
        except OSError as error:
            os.close(self._fd)
            self._fd = -1
            if error.errno in (errno.EAGAIN, errno.EACCES):
                raise _in_use_error(self._path) from error
            return
        self._inode = _inode_of(self._path)
        self._held.add(self._inode)
        _held_locks.add(self)

    def check(self) -> None:
        """Raise OSError if the database was removed or moved while open, as nobody would ever
        read what is written to it."""
        if self._fd >= 0 and (_is_unlinked(self._fd) or not self._path.exists()):
            raise OSError(
                errno.ENOENT, "it was removed while it was in use: put it back, or start again"
            )

    def release(self) -> None:
        """Release the lock. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._held.discard(self._inode)


def _is_unlinked(fd: int) -> bool:
    """Return True if the open file has no name any more."""
    return os.fstat(fd).st_nlink == 0


def _inode_of(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino
