"""The input of a crawl: the sources of its URLs, its limits, and the names of its files."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from gatekeeper.cli import BOM, standard_input, url_of_line
from gatekeeper.errors import ConfigError
from gatekeeper.urls import MAX_URL

_BLOCK = 65_536
_LONGEST_URL = 4 * MAX_URL
"""Bytes. A UTF-8 character has four at most, so a line that is cut here is too long for a URL."""
_LONGEST_LINE = 16 * 1024 * 1024


class Given(NamedTuple):
    """One URL as it was given; its text may not be a valid URL."""

    text: str
    file: str | None = None
    """The file that it was read from; None for an argument."""
    line: int = 0

    @property
    def where(self) -> str | None:
        """The file and the line, as editors and compilers write them; None for an argument."""
        return f"{self.file}:{self.line}" if self.file is not None else None


@dataclass(frozen=True, slots=True)
class Listed:
    """A list of URLs that is open for reading.

    It is opened first, so that a crawl whose list does not exist creates nothing.
    """

    name: str
    descriptor: int


@contextmanager
def opened(file: str | None) -> Iterator[Listed | None]:
    """Open the list that -i names; `-` is standard input, None is no list.

    Raises OSError for a file that can't be read, ConfigError if standard input is closed.
    """
    if file is None:
        yield None
    elif file == "-":
        yield _stdin()
    else:
        with Path(file).open("rb", buffering=0) as stream:
            yield Listed(file, stream.fileno())


async def given(arguments: Iterable[str], listed: Listed | None) -> AsyncIterator[Given]:
    """Yield every URL: the arguments, where `-` is standard input, then the lines of the list.

    Blank lines and lines that start with `#` are skipped. Raises OSError for a file that can't be
    read, ConfigError for one with an endless line, or if standard input is closed.
    """
    for argument in arguments:
        if argument == "-":
            async for found in _urls(_stdin()):
                yield found
        else:
            yield Given(argument)
    if listed is not None:
        async for found in _urls(listed):
            yield found


def _stdin() -> Listed:
    return Listed("standard input", standard_input().fileno())


async def _urls(listed: Listed) -> AsyncIterator[Given]:
    lines, number, name = _Lines(listed.name), 0, listed.name
    async for block in _blocks(listed.descriptor):
        for line in lines.feed(block):
            number += 1
            if url := url_of_line(line):
                yield Given(url, name, number)
    if url := url_of_line(lines.rest()):
        yield Given(url, name, number + 1)


async def _blocks(descriptor: int) -> AsyncIterator[bytes]:
    """Yield blocks as they arrive, without a thread that would outlive a Ctrl-C.

    A read that the loop has announced never blocks. So the descriptor need not be made
    non-blocking, which would affect the shell and, on a terminal, our own output.
    """
    wait = _announced if _can_be_watched(descriptor) else _at_once
    while True:
        await wait(descriptor)
        try:
            block = os.read(descriptor, _BLOCK)
        except BlockingIOError:  # another process that shares the descriptor has read the data
            continue
        if not block:
            return
        yield block


def _can_be_watched(descriptor: int) -> bool:
    """Return True if the loop can watch the descriptor: a pipe, a socket or a terminal.

    Reading regular files and devices such as /dev/null never blocks, and epoll refuses them.
    """
    loop = asyncio.get_running_loop()
    try:
        loop.add_reader(descriptor, _nothing)
    except (OSError, NotImplementedError):
        return False
    loop.remove_reader(descriptor)
    return True


async def _announced(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(descriptor)


async def _at_once(_: int) -> None:
    await asyncio.sleep(0)  # reading a long file must not hold up the crawl or a Ctrl-C


def _nothing() -> None: ...


class _Lines:
    """Splits blocks into lines. A line that is too long for a URL is cut."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._begun = b""
        self._skipped = 0
        self._first = True

    def feed(self, block: bytes) -> Iterator[bytes]:
        """Yield every line that ends in this block. Raises ConfigError if a line has no end."""
        *ended, rest = block.split(b"\n")
        for piece in ended:
            self._add(piece)
            yield self.rest()
        self._add(rest)

    def rest(self) -> bytes:
        """Return the line read so far, and start the next one."""
        line, self._begun, self._skipped = self._begun, b"", 0
        if self._first:
            self._first, line = False, line.removeprefix(BOM)
        return line

    def _add(self, piece: bytes) -> None:
        room = _LONGEST_URL - len(self._begun)
        self._begun += piece[:room]
        self._skipped += len(piece[room:])
        if self._skipped > _LONGEST_LINE:
            raise ConfigError(f"{self._name}: a line without an end; one URL a line is read")


# --- limits ----------------------------------------------------------------------------------


MANIFEST = "manifest.jsonl"
STATE = "gatekeeper.db"


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one crawl."""

    concurrency: int = 100
    """Requests in flight, over all hosts."""
    max_body: int = 10 * 1024 * 1024
    """Bytes read of one body."""
    redirects: int = 10
    tries: int = 3
    """Requests for one URL, if they fail or the host asks to wait."""
    grace: float = 10.0
    """Seconds that running requests have to finish once the crawl is stopped."""
