"""Where URLs come from: the command line, a file, standard input."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import IO

from gatekeeper.urls import MAX_URL

__all__ = ["given"]

_LONGEST_LINE = 4 * MAX_URL


async def given(arguments: Iterable[str], file: str | None) -> AsyncIterator[str]:
    """Every URL: the arguments, then the lines of the file; `-` is standard input.

    Blank lines and lines that begin with `#` are left out. Raises OSError for a file that
    can't be read.
    """
    for argument in arguments:
        if argument == "-":
            async for url in _stdin():
                yield url
        else:
            yield argument
    if file == "-":
        async for url in _stdin():
            yield url
    elif file is not None:
        with Path(file).open("rb") as lines:  # noqa: ASYNC230 - one open, before the first URL
            async for url in _lines(lines):
                yield url


async def _stdin() -> AsyncIterator[str]:
    """Lines of standard input, without a thread that would outlive a Ctrl-C."""
    descriptor = sys.stdin.fileno()
    with os.fdopen(os.dup(descriptor), "rb") as file:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=_LONGEST_LINE)
        try:
            transport, _ = await loop.connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(reader), file
            )
        except ValueError:  # a regular file, which never makes anyone wait
            async for url in _lines(file):
                yield url
            return
        try:
            while line := await _line(reader):
                text = _url(line)
                if text is not None:
                    yield text
        finally:
            transport.close()
            # The shell shares this descriptor, and did not ask for it to be changed.
            os.set_blocking(descriptor, True)


async def _line(reader: asyncio.StreamReader) -> bytes:
    """The next line; empty at the end. What is too long for a URL comes cut off."""
    try:
        return await reader.readline()
    except ValueError:
        return b"#"


async def _lines(file: IO[bytes]) -> AsyncIterator[str]:
    while line := file.readline(_LONGEST_LINE):
        if url := _url(line):
            yield url


def _url(line: bytes) -> str | None:
    text = line.decode("utf-8", "replace").strip()
    return text if text and not text.startswith("#") else None
