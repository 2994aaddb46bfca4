"""The output directory of a crawl, below which no symbolic link is followed.

Who else may write there, or once unpacked an archive there, could leave a link in the place of
a host's folder or of a file, and have pages written wherever it leads. Each component below
the directory is opened by itself, from the one above, with O_NOFOLLOW (open(2)); the directory
itself may be reached by a link, as its owner named it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Final

from gatekeeper.errors import StorageError

__all__ = ["NO_LINK", "Folder", "refuse_links"]

NO_LINK: Final = getattr(os, "O_NOFOLLOW", 0)
"""For os.open: fail at a symbolic link. 0 where the system has no such thing (Windows)."""
_DIRECTORY: Final = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0)
_FROM_ABOVE: Final = {os.open, os.mkdir, os.rename, os.unlink} <= os.supports_dir_fd


class Folder:
    """A directory, and the files in the directories that it holds.

    Each method raises StorageError that names the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def create(self, directory: str, name: str) -> IO[bytes]:
        """A new, empty file, whatever had its name before; the directory is made as needed."""
        with self._inside(directory) as (prefix, above):
            with suppress(FileNotFoundError):
                os.unlink(prefix + name, dir_fd=above)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | NO_LINK | getattr(os, "O_BINARY", 0)
            return os.fdopen(os.open(prefix + name, flags, 0o644, dir_fd=above), "w+b")

    def move(self, place: tuple[str, str], to: tuple[str, str]) -> None:
        """Move a file (its directory, its name), over another one or a link of that name."""
        with self._inside(place[0]) as (prefix, above), self._inside(to[0]) as (other, below):
            os.replace(prefix + place[1], other + to[1], src_dir_fd=above, dst_dir_fd=below)

    def remove(self, directory: str, name: str) -> None:
        """Remove a file; one that is not there is no error."""
        with self._inside(directory) as (prefix, above), suppress(FileNotFoundError):
            os.unlink(prefix + name, dir_fd=above)

    @contextmanager
    def _inside(self, directory: str) -> Iterator[tuple[str, int | None]]:
        """What a name in the directory begins with, and the descriptor that it starts from."""
        path = self.path / directory
        try:
            if not _FROM_ABOVE:
                path.mkdir(exist_ok=True)
                if path.is_symlink():
                    raise _link(path)
                yield f"{path}{os.sep}", None
                return
            above = os.open(self.path, _DIRECTORY)
            try:
                with suppress(FileExistsError):
                    os.mkdir(directory, dir_fd=above)
                inside = os.open(directory, _DIRECTORY | NO_LINK, dir_fd=above)
            finally:
                os.close(above)
            try:
                yield "", inside
            finally:
                os.close(inside)
        except OSError as error:
            if path.is_symlink():
                raise _link(path) from error
            raise StorageError(f"{path}: {error.strerror}") from error


def refuse_links(folder: Path, *names: str) -> None:
    """Raise StorageError for a symbolic link in the folder whose name begins so."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(names) and entry.is_symlink():
                raise _link(folder / entry.name)


def _link(path: Path) -> StorageError:
    return StorageError(
        f"{path}: is a symbolic link, and none is followed in a crawl's output; take it away"
    )
