"""The input of a crawl: the sources of its URLs, its arguments, and the names of its files."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from gatekeeper.errors import ConfigError
from gatekeeper.terminal import BOM, standard_input, url_of_line
from gatekeeper.urls import MAX_URL

if TYPE_CHECKING:
    from gatekeeper.config import Config

_BLOCK = 65_536
_MAX_URL_BYTES = 4 * MAX_URL
"""Bytes. A UTF-8 character has four at most, so a line that is cut here is too long for a URL."""
_MAX_LINE_BYTES = 16 * 1024 * 1024


class GivenURL(NamedTuple):
    """One URL as it was given; its text may not be a valid URL."""

    text: str
    where: str | None = None
    """Its file and line, as editors and compilers write them; None if it was not read from one."""


class URLList(NamedTuple):
    """A list of URLs that is open for reading.

    It is opened first, so that a crawl whose list does not exist creates nothing.
    """

    name: str
    descriptor: int


@contextmanager
def open_list(file: str | None) -> Iterator[URLList | None]:
    """Open the list that -i names; `-` is standard input, None is no list.

    Raises ConfigError for a file that can't be opened, and if standard input is closed.
    """
    if file is None:
        yield None
    elif file == "-":
        yield _stdin()
    else:
        try:
            stream = Path(file).open("rb", buffering=0)  # noqa: SIM115 - closed below
        except OSError as error:
            remedy = "give a file with one URL per line, or `-` for standard input"
            raise ConfigError(f"-i {file}: {error.strerror}; {remedy}") from error
        with stream:
            yield URLList(file, stream.fileno())


async def read_urls(arguments: Iterable[str], listed: URLList | None) -> AsyncIterator[GivenURL]:
    """Yield every URL: the arguments, where `-` is standard input, then the lines of the list.

    Blank lines and lines that start with `#` are skipped. Raises OSError for a file that can't be
    read, ConfigError for one with an endless line, or if standard input is closed.
    """
    for source in (*arguments, listed):
        given = _stdin() if source == "-" else source
        if isinstance(given, URLList):
            async for found in _urls_in(given):
                yield found
        elif given is not None:
            yield GivenURL(given)


def _stdin() -> URLList:
    return URLList("standard input", standard_input().fileno())


async def _urls_in(listed: URLList) -> AsyncIterator[GivenURL]:
    """Yield the URL of every line that has one. A line that is too long for a URL is cut.

    Raises ConfigError if a line has no end.
    """
    number, line, cut = 0, b"", 0
    async for block in _blocks(listed.descriptor):
        *ended, line = (line + block).split(b"\n")
        for each in ended:
            number, cut = number + 1, 0
            text = each[:_MAX_URL_BYTES]
            if url := url_of_line(text if number > 1 else text.removeprefix(BOM)):
                yield GivenURL(url, f"{listed.name}:{number}")
        cut += len(line[_MAX_URL_BYTES:])
        line = line[:_MAX_URL_BYTES]
        if cut > _MAX_LINE_BYTES:
            raise ConfigError(f"{listed.name}: a line is too long; one URL per line is expected")


async def _blocks(descriptor: int) -> AsyncIterator[bytes]:
    """Yield blocks as they arrive, without a thread that would outlive a Ctrl-C. The last one ends
    the last line.

    A read that the loop has announced never blocks. So the descriptor need not be made
    non-blocking, which would affect the shell and, on a terminal, our own output.
    """
    while True:
        await _readable(descriptor)
        try:
            block = os.read(descriptor, _BLOCK)
        except BlockingIOError:  # another process that shares the descriptor has read the data
            continue
        yield block or b"\n"
        if not block:
            return


async def _readable(descriptor: int) -> None:
    """Return when a pipe, a socket or a terminal can be read without blocking.

    Regular files and devices such as /dev/null always can, and the loop can't watch them.
    """
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    try:
        loop.add_reader(descriptor, ready.set)
    except (OSError, NotImplementedError):
        await asyncio.sleep(0)  # a long file must not hold up the crawl or a Ctrl-C
        return
    try:
        await ready.wait()
    finally:
        loop.remove_reader(descriptor)


# --- the job ----------------------------------------------------------------------------------


MANIFEST = "manifest.jsonl"
STATE = "gatekeeper.db"


@dataclass(frozen=True, slots=True)
class Job:
    """The arguments of one crawl. Times are seconds."""

    identity: str
    config: Config
    urls: tuple[str, ...] = ()
    input: str | None = None
    sitemaps: tuple[str, ...] = ()
    """Origins whose sitemaps list further URLs."""
    since: datetime | None = None
    """Leave out pages of sitemaps that were not modified since."""
    output: Path | None = None
    warc: Path | None = None
    concurrency: int = 100
    """Requests in flight, over all hosts."""
    max_body: int = 10 * 1024 * 1024
    """Bytes read of one body."""
    redirects: int = 10
    tries: int = 3
    """Requests for one URL, if they fail or the host asks to wait."""
    grace: float = 10.0
    """Seconds that running requests have to finish once the crawl is stopped."""
    timeout: float = 300.0
    max_wait: float = 3600.0
    as_json: bool = False
    retry_denied: bool = False
    """Ask again about URLs that an earlier run was denied."""
    denied_ok: bool = False
    """A denied URL is no failure."""

    @property
    def manifest(self) -> Path | None:
        """The path of the manifest: in the output folder, or next to the WARC file."""
        if self.output is not None:
            return self.output / MANIFEST
        return self.warc.with_name(f"{self.warc.name}.{MANIFEST}") if self.warc else None

    @property
    def kept_config(self) -> Config:
        """The configuration, with a storage path next to the manifest unless one is set.

        It stores the hosts' clocks, so that a resumed crawl still waits for them (promise 8).
        """
        if self.manifest is None or self.config.storage.path is not None:
            return self.config
        name = self.manifest.name.removesuffix(MANIFEST) + STATE
        path = str(self.manifest.with_name(name))
        storage = replace(self.config.storage, path=path)
        return replace(self.config, storage=storage)

    @property
    def archive(self) -> str | None:
        """The path of the WARC file in the manifest, which tells apart files of the same name."""
        if self.warc is None or self.manifest is None:
            return None
        warc, folder = self.warc.resolve(), self.manifest.parent.resolve()
        try:
            return Path(os.path.relpath(warc, folder)).as_posix()
        except ValueError:  # another drive
            return warc.as_posix()
