"""One process at a time: a lock on a file beside the database, and one on the database itself.

The file of its own is what names the holder, and needs nothing of SQLite. But it may be
deleted while it is held, and then it keeps nobody out: so the database's own inode carries a
lock as well, on an octet far beyond any that SQLite locks or writes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import sys
from pathlib import Path

from gatekeeper.errors import StorageError
from gatekeeper.storage.base import NO_SPACE, DiskFull

__all__ = ["DatabaseLock", "FileLock"]

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
        """Leave the process id for the error of whoever comes second."""
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
    """The same on the database, whatever becomes of the file beside it.

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

    def release(self) -> None:
        """Let the next one in. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._held.discard(self._inode)


def _inode_of(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino
