"""Files of the audit record: folders, locks, compression, and the texts of robots.txt.

Everything is readable by its owner alone. A file appears whole: it is written under another name
and then renamed.
"""

from __future__ import annotations

import contextlib
import gzip
import itertools
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Final, cast

from gatekeeper.audit.chain import CLOSED, OPEN, SEAL, SegmentName, digest_of, text_path

LARGE: Final = 65_536
"""A text of so many octets is not compressed, as that would delay the loop."""
_MAX_KNOWN: Final = 100_000
"""Digests of stored texts that are remembered."""
MEMBER: Final = 1 << 18
"""Octets of a segment that are compressed together."""
_LEVEL: Final = 2
"""Of the compression of segments: 6 takes twice the time, and saves a tenth of the space."""
_TEXT: Final = re.compile(rb'"text":"([0-9a-f]{64})"')
_UNFINISHED: Final = re.compile(
    r"\.(.+\.(jsonl|jsonl\.gz|seal\.json|ids)|[0-9a-f]{64}\.gz)\.\d+-\d+", re.ASCII
)

if sys.platform == "win32":
    LOCKS = False
    """Whether open files have locks. Here they can't be removed instead."""

    def lock_file(fd: int) -> None:
        """Do nothing."""

    def is_written(path: Path) -> bool:
        """Return True if a process may write to a segment."""
        return path.name.endswith(OPEN)
else:
    import fcntl

    LOCKS = True

    def lock_file(fd: int) -> None:
        """Lock an open file for as long as it is open, so that no other process takes it for one
        that was left behind."""
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(fd, fcntl.LOCK_EX)  # `is_written` may have it for a moment

    def is_written(path: Path) -> bool:
        """Return True if a process has locked a file, because it writes or compresses it. One that
        is gone since it was listed was compressed: that process may write the next one."""
        try:
            if path.exists() and not path.is_file():  # a pipe would wait for who writes to it
                return False
            with path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except (BlockingIOError, FileNotFoundError):
            return True
        except OSError:
            return False
        return False


def make_folder(folder: Path) -> None:
    """Create a folder that only its owner can read, if it is missing. Raises OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def close_file(fd: int) -> None:
    """Close a file. What some file systems then say they could not write is found by `verify`."""
    with contextlib.suppress(OSError):
        os.close(fd)


_numbers = itertools.count(1)


@contextlib.contextmanager
def whole_file(path: Path, *, only_copy: bool = False) -> Iterator[BinaryIO]:
    """Write a file under another name, and rename it at the end. Raises OSError.

    `only_copy`: what it replaces is lost, so it has to be on the disk first.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{next(_numbers)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    try:
        with open(os.open(temporary, flags, 0o600), "wb") as file:
            lock_file(file.fileno())
            yield file
            if only_copy:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def remove_unfinished(paths: Iterable[Path]) -> None:
    """Remove those files that `whole_file` of a killed process did not rename. For a thread."""
    for path in paths:
        if _UNFINISHED.fullmatch(path.name) and not is_written(path):
            with contextlib.suppress(OSError):
                path.unlink()


def open_segment(path: Path) -> BinaryIO:
    """Open a segment to read its lines. Raises OSError."""
    if path.exists() and not path.is_file():  # a pipe would never end
        raise OSError(0, "not a file", str(path))
    if path.name.endswith(CLOSED):
        return cast("BinaryIO", gzip.open(path))
    return path.open("rb", buffering=262_144)


def open_either(path: Path) -> BinaryIO:
    """Open a segment in the form that is there: it may have been compressed since it was listed.
    Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        return open_segment(path)
    plain = path.name.removesuffix(CLOSED).removesuffix(OPEN)
    other = OPEN if path.name.endswith(CLOSED) else CLOSED
    return open_segment(path.with_name(plain + other))


def write_segment(path: Path, lines: Iterable[bytes]) -> None:
    """Write a segment, compressed if its name says so. One in its place is replaced, and its time
    is kept: `audit.keep` goes by the time at which it was closed. Raises OSError."""
    times = None
    with contextlib.suppress(FileNotFoundError):
        times = path.stat()
    with whole_file(path, only_copy=True) as file:
        if path.name.endswith(CLOSED):
            with gzip.GzipFile("", "wb", 6, file, mtime=0) as packed:
                packed.writelines(lines)
        else:
            file.writelines(lines)
    if times is not None:
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def compress(path: Path, wall: float, save: Callable[[Path, list[tuple[int, int]]], None]) -> None:
    """Replace a segment, closed at a wall time, by its compressed form. For a thread. Raises
    OSError. The caller has its lock, so that nobody else replaces it meanwhile.

    It is compressed in members of whole lines, so that it need not be read from its begin. `save`
    is given the place of each, and the octets of the plain segment up to its end. It is called
    before the new form appears: `erase` may replace that, and removes what was saved.
    """
    target = path.with_name(path.name.removesuffix(OPEN) + CLOSED)
    members: list[tuple[int, int]] = []
    with path.open("rb") as plain, whole_file(target, only_copy=True) as file:
        while block := plain.read(MEMBER) + plain.readline():
            members.append((file.tell(), plain.tell()))
            file.write(gzip.compress(block, _LEVEL, mtime=0))
        with contextlib.suppress(OSError):
            save(path, members)
    os.utime(target, (wall, wall))
    path.unlink()


def count_segments(folder: Path) -> tuple[int, int]:
    """Return how many segments a folder has, and their octets. For a thread. Raises OSError."""
    sizes: list[int] = []
    for one in os.scandir(folder):
        if SegmentName.parse(one.name) is not None and not one.name.endswith(SEAL):
            with contextlib.suppress(FileNotFoundError):  # it is compressed meanwhile
                sizes.append(one.stat().st_size)
    return len(sizes), sum(sizes)


def stored_texts(folder: Path) -> set[str]:
    """Return the digests of the texts in a folder. For a thread."""
    return {path.name.removesuffix(".gz") for path in folder.glob(f"texts/??/{'?' * 64}.gz")}


def texts_named(lines: bytes) -> set[str]:
    """Return the digests of the texts that lines name, of any version and whole or not."""
    return {digest.decode() for digest in _TEXT.findall(lines)}


class TextStore:
    """The texts of robots.txt files, each once by its digest."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.known: dict[str, None] = {}
        """Digests of texts that are stored, as far as this process knows."""

    def keep(self, body: bytes) -> str:
        """Store a text, and return its digest. Raises OSError."""
        digest = digest_of(body)
        if digest in self.known:
            return digest
        path = self._folder / text_path(digest)
        if not path.exists():
            make_folder(path.parent.parent)
            make_folder(path.parent)
            with whole_file(path) as file:
                file.write(gzip.compress(body, 0 if len(body) >= LARGE else 6, mtime=0))
        if len(self.known) >= _MAX_KNOWN:
            self.known.clear()
        self.known[digest] = None
        return digest

    def remove(self, digests: Iterable[str]) -> None:
        """Remove texts, except those that were kept since `known` was emptied."""
        for digest in digests:
            if digest not in self.known:
                with contextlib.suppress(OSError):
                    (self._folder / text_path(digest)).unlink()
