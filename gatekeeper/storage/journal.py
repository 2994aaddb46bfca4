"""The journal of promises: appended before a grant is answered, absorbed in batches.

    <database>.promises-<n>     generation n, ascending
        "gatekeeper promises 1\n"
        frame*                  magic, length, CRC-32, MessagePack of [sequence, clock]

A frame goes out with one plain pwrite(2): from then on it is the kernel's and survives
kill -9. A power cut may cost the last second, the time between two fsyncs. What a killed
process leaves half written fails its checksum and is passed over.

Room is taken ahead of the frames, where the file system can do that, and the last of it is
spared for what can't be refused: a host's block must find a place on a disk that is full.

The database remembers the highest sequence that it absorbed, in the same transaction as
the clocks themselves. So a generation may be read any number of times, and a frame is
never applied over a later `put_clock`. A generation is deleted only after the transaction
that absorbed all of it is committed.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import struct
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from gatekeeper.errors import StorageError
from gatekeeper.storage.base import NO_SPACE, ClockRecord, DiskFull

HEADER = b"gatekeeper promises 1\n"
_MAGIC = b"\xa5\x9c\xc3\x0a"
_FRAME = struct.Struct("<4sII")
_MAX_FRAME = 1 << 20
_OVERRUN = 4
"""While the database refuses to absorb it, it grows to this many times its limit."""
_AHEAD = 131_072
"""Octets of room that are taken at once."""
_SPARED = 32_768
"""Octets of it that only `append(spare=True)` may use: more than a hundred blocks."""
_LEAST_SPARED = 4096
"""With less of it left, the next block may find no place."""
_MAX_RETIRED = 16
"""Generations that may wait to be absorbed, beyond which none is begun."""
_NO_ROOM_AHEAD = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV}
"""What a file system says that can't take room ahead."""

NOBODYS = 0
"""The sequence of a frame that is written only to see whether one can be: `replay`, in which
the first sequence is 1, passes over it."""
NOTHING = ClockRecord(scope="", next_at=0.0)
"""What such a frame holds."""

_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)

_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(tuple[int, ClockRecord])


class Journal:
    """The generations beside one database; the newest is open for appending.

    Not thread-safe: its owner holds a lock around every call but `sync`.
    """

    def __init__(self, database: Path, *, limit: int) -> None:
        self._path = database
        self._limit = limit
        self._fd = -1
        self._generation = 0
        self._ahead = 0.0
        """Up to here there is room for sure; inf: that can't be known."""
        self._retired: list[Path] = []
        self._sick = False
        """The latest frame did not go in, though there seemed to be room."""
        self.size: int = 0
        self.damaged: int = 0
        self._stalled = False

    def replay(self, absorbed: int) -> Iterator[tuple[int, ClockRecord]]:
        """Promises that the database has not absorbed, in the order they were given.

        The generations read are retired: `discard` deletes them. Raises StorageError for a
        file in a generation's place that is none.
        """
        for generation, path in self._generations():
            self._generation = max(self._generation, generation)
            self._retired.append(path)
            frames, damaged = read_generation(path)
            self.damaged += damaged
            for sequence, record in frames:
                if sequence > absorbed:
                    yield sequence, record

    def begin(self) -> None:
        """Start the next generation. Raises OSError; the one before goes on then."""
        if len(self._retired) >= _MAX_RETIRED:
            raise OSError(errno.EFBIG, "too many journals wait to be absorbed")
        generation = self._generation + 1
        path = self._name(generation)
        try:
            fd = os.open(path, _FLAGS, 0o600)
        except FileExistsError:
            self._generation = generation  # left by an attempt that could not be undone
            raise
        try:
            if os.write(fd, HEADER) != len(HEADER):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            ahead = _take_room(fd, 0)
        except OSError:
            os.close(fd)
            with contextlib.suppress(OSError):
                path.unlink()
            raise
        self.abandon()
        self._fd = fd
        self._generation = generation
        self._sick = False
        self._ahead = ahead
        self.size = len(HEADER)

    def stall(self, stalled: bool) -> None:
        """Whether the database refuses everything: growth has a bound then."""
        self._stalled = stalled

    def append(self, sequence: int, record: ClockRecord, *, spare: bool = False) -> None:
        """Hand one promise to the kernel. Raises OSError: it is not there then.

        `spare`: the room that is held back may be used.
        """
        if self._fd < 0:
            raise OSError(errno.EBADF, "no journal is open")
        if self._stalled and self.size >= self._limit * _OVERRUN:
            raise OSError(errno.EFBIG, "the database takes nothing, and the journal is full")
        payload = _payload(sequence, record)
        frame = _FRAME.pack(_MAGIC, len(payload), zlib.crc32(payload)) + payload
        end = self.size + len(frame)
        if end > self._ahead - _SPARED:
            try:
                self._ahead = _take_room(self._fd, self._ahead)
            except OSError:
                if not spare or end > self._ahead:
                    raise
        self._sick = True
        try:
            written = os.pwrite(self._fd, frame, self.size)
        except OSError as error:
            if error.errno == errno.EBADF:
                self._forsake()  # its number may be another file's by now
            raise
        if written != len(frame):
            # The reader passes over a torn frame, and the next one is put over it.
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._sick = False
        self.size = end

    @property
    def spared(self) -> bool:
        """Is there room for sure for some more of what can't be refused?"""
        ready = self._fd >= 0 and not self._sick
        return ready and self.size + _LEAST_SPARED <= self._ahead < math.inf

    @property
    def short(self) -> bool:
        """Is the room in use that is held back, because there is no other?"""
        return self._fd >= 0 and self.size > self._ahead - _SPARED

    @property
    def full(self) -> bool:
        """Due to be begun anew; not while an older generation waits to be absorbed."""
        return self.size >= self._limit and not self._retired

    @property
    def idle(self) -> bool:
        """No generation is open: `begin` failed, and may be tried again."""
        return self._fd < 0

    def retired(self) -> list[Path]:
        """Generations that no promise goes to any more; absorbed, they may be discarded."""
        return list(self._retired)

    def discard(self, paths: list[Path]) -> None:
        """Delete generations whose every frame is committed in the database."""
        for path in paths:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            self._retired.remove(path)

    def sync(self) -> None:
        """fsync the open generation; called from the writer thread, which alone closes it.

        Raises OSError: what of it is on the disk nobody knows then, nor by a later fsync; and
        where it was removed.
        """
        if self._fd >= 0:
            os.fsync(self._fd)
            if _removed(self._fd):
                raise OSError(errno.ENOENT, "the journal was removed while it was in use")

    def abandon(self) -> None:
        """Nothing more goes to the open generation, if there is one; it waits to be absorbed."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self.size)  # the room ahead
            with contextlib.suppress(OSError):  # it is closed all the same
                os.close(self._fd)
            empty = self.size <= len(HEADER)
            self._forsake()
            if empty:  # there is nothing in it to wait for, and only so many may wait
                self.discard(self._retired[-1:])

    def _forsake(self) -> None:
        self._fd = -1
        self._retired.append(self._name(self._generation))

    def discard_all(self) -> None:
        """Close and delete: the database holds every promise."""
        self.abandon()
        self.discard(self.retired())

    def _name(self, generation: int) -> Path:
        return self._path.with_name(f"{self._path.name}.promises-{generation}")

    def _generations(self) -> list[tuple[int, Path]]:
        prefix = f"{self._path.name}.promises-"
        found = [
            (int(path.name[len(prefix) :]), path)
            for path in self._path.parent.iterdir()
            if path.name.startswith(prefix) and path.name[len(prefix) :].isdecimal()
        ]
        return sorted(found)


def _take_room(fd: int, ahead: float) -> float:
    """Take the next piece of room behind that offset; up to where there is some then.
    Raises OSError where the disk is full."""
    if not hasattr(os, "posix_fallocate"):
        return math.inf
    try:
        os.posix_fallocate(fd, int(ahead), _AHEAD)
    except OSError as error:
        if error.errno in _NO_ROOM_AHEAD:
            return math.inf
        raise
    return ahead + _AHEAD


def read_generation(path: Path) -> tuple[list[tuple[int, ClockRecord]], int]:
    """Every whole frame of a generation, and the number of bytes that belong to none.

    Raises StorageError for a file that is no journal.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StorageError(
            f"{path}: the journal can't be read ({error.strerror}); make it readable, "
            "or move it away to start without its promises"
        ) from error
    if not data.startswith(HEADER):
        # Killed between creating the file and writing its first line.
        if HEADER.startswith(data):
            return [], len(data)
        raise StorageError(
            f"{path}: in the place of the journal, but no journal of gatekeeper; "
            "move it away and start again"
        )
    return _frames(data)


def _frames(data: bytes) -> tuple[list[tuple[int, ClockRecord]], int]:
    frames: list[tuple[int, ClockRecord]] = []
    position, damaged = len(HEADER), 0
    while position < len(data):
        start = data.find(_MAGIC, position)
        if start < 0:
            # Room that was taken ahead and not used is no damage.
            return frames, damaged + len(data[position:].rstrip(b"\0"))
        damaged += start - position
        frame, length = _frame_at(data, start)
        if frame is None:
            damaged += 1
            position = start + 1
        else:
            frames.append(frame)
            position = start + length
    return frames, damaged


def _frame_at(data: bytes, start: int) -> tuple[tuple[int, ClockRecord] | None, int]:
    """The frame that starts here, if it is whole, and its length."""
    body = start + _FRAME.size
    if body > len(data):
        return None, 0
    _, length, checksum = _FRAME.unpack_from(data, start)
    payload = data[body : body + length] if length <= _MAX_FRAME else b""
    if not payload or len(payload) != length or zlib.crc32(payload) != checksum:
        return None, 0
    try:
        return _decoder.decode(payload), _FRAME.size + length
    except msgspec.DecodeError:
        return None, 0


def _payload(sequence: int, record: ClockRecord) -> bytes:
    try:
        return _encode((sequence, record))
    except UnicodeEncodeError:
        # A lone surrogate from a header must not cost the promise its place on disk.
        reason = record.block_reason.encode("utf-8", "backslashreplace").decode()
        return _encode((sequence, msgspec.structs.replace(record, block_reason=reason)))


# --- The lock: one process at a time.
#
# A file of its own names the holder, and needs nothing of SQLite. But it may be deleted while it
# is held, and then it keeps nobody out: so the database's own inode carries a lock as well, on an
# octet far beyond any that SQLite locks or writes.


_OCTET = 1 << 62
"""What `DatabaseLock` locks; SQLite's own lie at 1 GiB, and its files end at 256 TiB."""

if sys.platform == "win32":
    import msvcrt

    def _take(fd: int) -> None:
        msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)

    def _take_octet(fd: int) -> None:
        """A file that is open can't be deleted there: `FileLock` is enough."""

    def _sign(fd: int) -> None:
        """A locked byte can't be read by others there: nothing to leave."""

    def _holder(fd: int) -> str:
        return ""
else:
    import fcntl

    def _take(fd: int) -> None:
        # flock belongs to the open file: it also keeps two storages of one process apart.
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _take_octet(fd: int) -> None:
        # Not flock: some systems, and NFS, hold it against the locks that SQLite takes.
        if (command := getattr(fcntl, "F_OFD_SETLK", None)) is not None:
            wanted = struct.pack("@hhqqi", fcntl.F_WRLCK, os.SEEK_SET, _OCTET, 1, 0)
            try:
                fcntl.fcntl(fd, command, wanted)
            except OSError as error:
                if error.errno != errno.EINVAL:  # a kernel older than these locks
                    raise
            else:
                return
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _OCTET)

    def _sign(fd: int) -> None:
        """Leave the process id, which the error of a second process names."""
        # On a full disk the lock holds all the same, only that error is less helpful.
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)
            os.pwrite(fd, str(os.getpid()).encode(), 0)

    def _holder(fd: int) -> str:
        text = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
        return f" (process {text})" if text.isdigit() else ""


def _in_use(path: Path, who: str = "") -> StorageError:
    return StorageError(
        f"{path}: in use by another gatekeeper{who}; stop that one, "
        "or give this one a file of its own"
    )


class FileLock:
    """Held from construction to `release`, or to the end of the process, however it ends.

    Raises StorageError when another holder lives, naming its process, and when the file
    can't be created.
    """

    __slots__ = ("_fd",)

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
            _take(self._fd)
        except OSError as error:
            who = _holder(self._fd)
            os.close(self._fd)
            raise _in_use(guarded, who) from error
        _sign(self._fd)

    def release(self) -> None:
        """Let the next one in. The file stays: removing it would race with its opener."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class DatabaseLock:
    """A lock on the database itself, whatever becomes of the file beside it.

    Made before anything opens the database, held before SQLite does, released after: to
    close any descriptor of a file drops every POSIX lock that the process holds on it,
    SQLite's among them. Readers of other processes are not kept out.
    """

    __slots__ = ("_fd", "_inode", "_path")

    _held: set[tuple[int, int]] = set()  # noqa: RUF012 - one for the whole process
    """Databases that this process has locked: to open one of them here, even only to find
    out, would end in the close that drops SQLite's locks."""

    def __init__(self, path: Path) -> None:
        """Raises StorageError where this process holds it already."""
        self._path = path
        self._fd = -1
        self._inode = (0, 0)
        with contextlib.suppress(OSError):
            if _inode_of(path) in self._held:
                raise _in_use(path, f" (process {os.getpid()})")

    def hold(self) -> None:
        """Lock it. Raises StorageError where another process holds it.

        A file that can't be opened, and a file system without locks, are left for SQLite to
        speak of.
        """
        with contextlib.suppress(OSError):
            self._fd = os.open(self._path, os.O_RDWR)
        if self._fd < 0:
            return
        try:
            _take_octet(self._fd)
        except OSError as error:
            os.close(self._fd)
            self._fd = -1
            if error.errno in (errno.EAGAIN, errno.EACCES):
                raise _in_use(self._path) from error
            return
        self._inode = _inode_of(self._path)
        self._held.add(self._inode)

    def check(self) -> None:
        """Raises OSError where the database was removed, or put elsewhere, while it is open: what
        is written to it then, nobody will ever read."""
        if self._fd >= 0 and (_removed(self._fd) or not self._path.exists()):
            raise OSError(
                errno.ENOENT, "it was removed while it was in use: put it back, or start again"
            )

    def release(self) -> None:
        """Let the next one in. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._held.discard(self._inode)


def _removed(fd: int) -> bool:
    """Has the open file no name any more?"""
    return os.fstat(fd).st_nlink == 0


def _inode_of(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino
