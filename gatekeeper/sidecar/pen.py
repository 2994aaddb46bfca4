"""A thread that writes a log: who reads it, or does not, holds up no answer."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import IO, Final

__all__ = ["Pen", "put"]

_ATOMIC: Final = 4096
"""Octets that a pipe takes in one piece (PIPE_BUF): other writers' lines go between pieces."""


class Pen:
    """Calls `write(page)` for one page at a time, in a daemon thread of its own.

    A pipe that nobody empties blocks its writer for as long as it likes. Here that is this
    thread, which does not keep the process from ending either.
    """

    def __init__(self, write: Callable[[list[str]], object]) -> None:
        self._write = write
        self._pages: SimpleQueue[list[str] | None] = SimpleQueue()
        self._free = threading.Event()
        self._free.set()
        self._thread = threading.Thread(target=self._run, name="decision-log", daemon=True)
        self._thread.start()

    @property
    def free(self) -> bool:
        """The page before has been written."""
        return self._free.is_set()

    def give(self, page: list[str]) -> None:
        """Have a page written: only when `free`, or as the last one."""
        self._free.clear()
        self._pages.put(page)

    def finish(self, patience: float) -> bool:
        """End after what was given; False if that is not done within `patience` seconds."""
        self._pages.put(None)
        self._thread.join(patience)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (page := self._pages.get()) is not None:
            self._write(page)
            self._free.set()


def put(stream: IO[str], lines: list[str]) -> None:
    """Write lines past the stream's own buffer, whose lock the end of the process waits for.

    Pieces end with a line. Raises OSError or ValueError.
    """
    try:
        fd = stream.fileno()
    except OSError:  # a stream in memory
        stream.write("".join(lines))
        stream.flush()
        return
    piece = b""
    for line in lines:
        data = line.encode("utf-8", "replace")
        if piece and len(piece) + len(data) > _ATOMIC:
            _put_all(fd, piece)
            piece = b""
        piece += data
    _put_all(fd, piece)


def _put_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]
