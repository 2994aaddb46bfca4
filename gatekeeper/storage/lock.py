"""One process at a time: an advisory lock on a file of its own beside the database.

The database itself can't carry the lock: closing any descriptor of a file drops every
POSIX lock that the process holds on it, SQLite's among them.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from gatekeeper.errors import StorageError

__all__ = ["FileLock"]

if sys.platform == "win32":
    import msvcrt

    def _take(fd: int) -> None:
        msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)

    def _sign(fd: int) -> None:
        """A locked byte can't be read by others there: nothing to leave."""

    def _holder(fd: int) -> str:
        return ""
else:
    import fcntl

    def _take(fd: int) -> None:
        # flock belongs to the open file: it also keeps two storages of one process apart.
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _sign(fd: int) -> None:
        """Leave the process id for the error of whoever comes second."""
        # On a full disk the lock holds all the same, only that error is less helpful.
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)
            os.pwrite(fd, str(os.getpid()).encode(), 0)

    def _holder(fd: int) -> str:
        text = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
        return f" (process {text})" if text.isdigit() else ""


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
            raise StorageError(
                f"{guarded}: can't be used: {path.name} can't be created beside it "
                f"({error.strerror}); give a path in a directory that this user may write to"
            ) from error
        try:
            _take(self._fd)
        except OSError as error:
            who = _holder(self._fd)
            os.close(self._fd)
            raise StorageError(
                f"{guarded}: in use by another gatekeeper{who}; stop that one, "
                "or give this one a file of its own"
            ) from error
        _sign(self._fd)

    def release(self) -> None:
        """Let the next one in. The file stays: removing it would race with its opener."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
