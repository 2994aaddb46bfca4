"""What one crawl is given: where its URLs come from, how far it goes, what its files are called."""

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
"""Bytes: a character of UTF-8 takes four at most, so what is cut here is no URL anyway."""
_LONGEST_LINE = 16 * 1024 * 1024


class Given(NamedTuple):
    """One URL as it was given, or what was meant to be one."""

    text: str
    file: str | None = None
    """None: an argument."""
    line: int = 0

    @property
    def where(self) -> str | None:
        """The file and the line, as editors and compilers write them."""
        return f"{self.file}:{self.line}" if self.file is not None else None


@dataclass(frozen=True, slots=True)
class Listed:
    """A list of URLs that can be read: the file is open, so that nothing else is begun for one
    that isn't there."""

    name: str
    descriptor: int


@contextmanager
def opened(file: str | None) -> Iterator[Listed | None]:
    """The list that -i names; `-` is standard input, None none.

    Raises OSError for a file that can't be read, ConfigError for a standard input that is
    closed.
    """
    if file is None:
        yield None
    elif file == "-":
        yield _stdin()
    else:
        with Path(file).open("rb", buffering=0) as stream:
            yield Listed(file, stream.fileno())


async def given(arguments: Iterable[str], listed: Listed | None) -> AsyncIterator[Given]:
    """Every URL: the arguments, then the lines of the list; `-` is standard input.

    Blank lines and lines that begin with `#` are left out. Raises OSError for a file that
    can't be read, ConfigError for one that holds no lines, or a standard input that is closed.
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
    """What is read, as it comes, without a thread that would outlive a Ctrl-C.

    A read that was announced never blocks, so the descriptor needn't be made non-blocking:
    the shell shares it, and on a terminal our own output does.
    """
    wait = _announced if _can_be_watched(descriptor) else _at_once
    while True:
        await wait(descriptor)
        try:
            block = os.read(descriptor, _BLOCK)
        except BlockingIOError:  # somebody else who shares it was quicker
            continue
        if not block:
            return
        yield block


def _can_be_watched(descriptor: int) -> bool:
    """Whether the loop can say when it is readable: pipes, sockets, terminals.

    Regular files and devices as /dev/null never make anyone wait, and epoll refuses them.
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
    await asyncio.sleep(0)  # a long file must not keep the crawl from its turns, or Ctrl-C out


def _nothing() -> None: ...


class _Lines:
    """Lines out of blocks. Of one that is too long for a URL only the beginning comes."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._begun = b""
        self._skipped = 0
        self._first = True

    def feed(self, block: bytes) -> Iterator[bytes]:
        """Every line that ends in this block. Raises ConfigError where none ever does."""
        *ended, rest = block.split(b"\n")
        for piece in ended:
            self._add(piece)
            yield self.rest()
        self._add(rest)

    def rest(self) -> bytes:
        """The line that has begun; the next one begins after it."""
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
    """How far one crawl goes."""

    concurrency: int = 100
    """Requests in flight, over all hosts."""
    max_body: int = 10 * 1024 * 1024
    """Bytes of a body that are read."""
    redirects: int = 10
    tries: int = 3
    """Requests for one URL, where it fails or the host asks to wait."""
    grace: float = 10.0
    """Seconds that running requests have to end once the crawl is stopped."""
