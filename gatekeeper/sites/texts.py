"""Input of the commands for site owners: robots.txt files from files, directories, standard input
and URLs, and sitemaps."""

from __future__ import annotations

import os
import zlib
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from xml.parsers import expat

import msgspec

from gatekeeper.errors import GatekeeperError
from gatekeeper.robots import RobotsTxt, Rule
from gatekeeper.terminal import (
    BOM,
    CallSettings,
    open_gate,
    standard_input,
    url_hint,
    url_of_line,
    warn_if_anonymous,
)
from gatekeeper.urls import parse, printable

if TYPE_CHECKING:
    from aiohttp import ClientSession


class Text(msgspec.Struct, frozen=True, kw_only=True):
    """A robots.txt that was read."""

    name: str
    """The path as it was given, `-`, or the URL that was fetched."""
    body: bytes
    robots: RobotsTxt | None
    """None: the site has no such file, and everything is allowed."""
    is_page: bool = False
    """The site serves an HTML page in place of the file, which counts as no file."""
    coding: str = ""
    """A token of its Content-Encoding that names no registered coding; empty if there is none."""


def is_url(source: str) -> bool:
    """Return True if the source is a URL to fetch, and not a file."""
    return source.startswith(("http://", "https://"))


def place_of(rule: Rule | None) -> str:
    """Describe the deciding line for a terminal: a site's text is escaped and cut."""
    return f"line {rule.line}: {printable(rule.text.strip(), 200)}" if rule else "no rule"


_MAX_BYTES = 64 << 20
"""Maximum bytes read from a file or from standard input, which may have no end."""


def read_all(settings: CallSettings, sources: Iterable[str]) -> Iterator[Text]:
    """Yield the text of each source in turn; for a directory, every robots.txt in it.

    Raises GatekeeperError for a source that does not exist, OSError for one that can't be read.
    """
    for source in sources:
        if source == "-" or is_url(source) or not Path(source).is_dir():
            yield read_text(settings, source)
            continue
        paths = sorted(_files_in(source))
        if not paths:
            raise GatekeeperError(
                f"{source}: no file in it has a name that ends with robots.txt "
                "(give other files by name)"
            )
        for path in paths:
            yield read_text(settings, path)


def _files_in(directory: str) -> Iterator[str]:
    for folder, folders, names in os.walk(directory):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (os.path.join(folder, name) for name in names if name.endswith("robots.txt"))


def read_text(settings: CallSettings, source: str) -> Text:
    """Read a file, standard input (`-`), or the robots.txt of the origin of a URL."""
    if is_url(source):
        import asyncio  # noqa: PLC0415 - reading a file does not need it

        warn_if_anonymous(settings)
        origin = parse(source).origin
        return asyncio.run(_fetch_robots(settings, origin))
    try:
        body = read_bounded(source)
    except FileNotFoundError as error:
        raise GatekeeperError(f"{source}: {error.strerror}{url_hint(source)}") from error
    return parse_text(settings, source, body)


def read_bounded(source: str) -> bytes:
    """Return the content of a file or of standard input (`-`).

    Raises OSError if it can't be read, GatekeeperError if it is longer than `_MAX_BYTES`.
    """
    if source == "-":
        body = standard_input().read(_MAX_BYTES + 1)
    else:
        with open(source, "rb") as file:
            body = file.read(_MAX_BYTES + 1)
    if len(body) > _MAX_BYTES:
        raise GatekeeperError(f"{source}: longer than {_MAX_BYTES >> 20} MiB, the limit for input")
    return body


def urls_in(body: bytes) -> list[str]:
    """Return the URLs in a text, one per line, without blank lines and comments."""
    lines = body.removeprefix(BOM).splitlines()
    return [url for line in lines if (url := url_of_line(line)) is not None]


def parse_text(settings: CallSettings, name: str, body: bytes) -> Text:
    """Parse the body of a robots.txt with the configured dialect and size limit."""
    robots = RobotsTxt.parse(
        body, dialect=settings.config.robots.dialect, limit=settings.config.fetch.max_body
    )
    return Text(name=name, body=body, robots=robots)


async def _fetch_robots(settings: CallSettings, origin: str) -> Text:
    """Fetch the file of an origin."""
    from gatekeeper.decision import Reason, State  # noqa: PLC0415

    name = f"{origin}/robots.txt"
    async with open_gate(settings.without_overrides()) as gate:
        robots = await gate.robots(name)
        if robots is not None:
            body, coding = robots.octets.encode("latin-1"), gate.parts.directory.coding(origin)
            return Text(name=name, body=body, robots=robots, coding=coding)
        # Another path than /robots.txt, which may always be requested (RFC 9309 section 2.2.2,
        # RFC-20).
        decision = await gate.check(f"{origin}/")
        if decision.state is not State.UNAVAILABLE:
            raise GatekeeperError(f"{name}: can't be fetched ({decision.reason})")
        is_page = decision.reason is Reason.SOFT_404
        return Text(name=name, body=b"", robots=None, is_page=is_page)


def replace_file(path: Path, body: bytes) -> None:
    """Write a file atomically; an existing one keeps its mode.

    Raises OSError, which names the path that was given.
    """
    target = path.resolve()
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        temporary.write_bytes(body)
        with suppress(FileNotFoundError):
            temporary.chmod(target.stat().st_mode & 0o7777)
        temporary.replace(target)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError):
            error.filename, error.filename2 = str(path), None
        raise


# --- sitemaps (sitemaps.org): XML, an index of other sitemaps, or plain text; gzipped or not.


MAX_SITEMAP_BYTES = 52_428_800
"""Maximum bytes of one sitemap after decompression, as sitemaps.org allows."""
MAX_SITEMAPS = 1_000
MAX_URLS = 1_000_000


class SitemapText:
    """The URLs in one sitemap."""

    __slots__ = ("pages", "sitemaps")

    def __init__(self, name: str, body: bytes) -> None:
        self.pages: list[str] = []
        self.sitemaps: list[str] = []
        """The URLs of other sitemaps, if this is an index."""
        body = _decompressed(name, body)
        if body.removeprefix(BOM).lstrip().startswith(b"<"):
            self._read_xml(name, body)
        else:
            self.pages = urls_in(body)

    def _read_xml(self, name: str, body: bytes) -> None:
        path: list[str] = []
        text: list[str] = []

        def start(tag: str, _: object) -> None:
            path.append(tag.rpartition(" ")[2])
            text.clear()

        def end(_: str) -> None:
            into = {("url", "loc"): self.pages, ("sitemap", "loc"): self.sitemaps}
            found = into.get((path[-2], path[-1])) if len(path) > 1 else None
            if found is not None:
                found.append("".join(text).strip())
            path.pop()

        def entity(*_: object) -> None:
            raise GatekeeperError(f"{name}: a sitemap must not declare entities")

        parser = expat.ParserCreate(namespace_separator=" ")
        parser.StartElementHandler, parser.EndElementHandler = start, end
        parser.CharacterDataHandler = text.append
        parser.EntityDeclHandler = entity  # the expansion of entities has no bound
        try:
            parser.Parse(body, True)
        except expat.ExpatError as error:
            raise GatekeeperError(f"{name}: not a sitemap: {error}") from error


def _decompressed(name: str, body: bytes) -> bytes:
    if body.startswith(b"\x1f\x8b"):
        reader = zlib.decompressobj(wbits=31)
        try:
            body = reader.decompress(body, MAX_SITEMAP_BYTES + 1)
        except zlib.error as error:
            raise GatekeeperError(f"{name}: invalid gzip data: {error}") from error
    if len(body) > MAX_SITEMAP_BYTES:
        raise GatekeeperError(f"{name}: longer than the 50 MiB that a sitemap may have")
    return body


def read_sitemap(settings: CallSettings, source: str) -> list[str]:
    """Return the URLs of a sitemap and, if it is an index, of the sitemaps that it lists.

    Sitemaps at URLs are fetched politely: robots.txt is obeyed, and each host is paced. Raises
    GatekeeperError for one that can't be fetched or is not a sitemap, OSError for a file that can't
    be read.
    """
    body = None if is_url(source) else read_bounded(source)
    if body is not None:
        text = SitemapText(source, body)
        if not text.sitemaps:
            return text.pages
    warn_if_anonymous(settings)
    import asyncio  # noqa: PLC0415 - reading a file does not need it

    return asyncio.run(_read_remote(settings, source, body))


async def _read_remote(settings: CallSettings, source: str, body: bytes | None) -> list[str]:
    from gatekeeper.session.polite import polite_session  # noqa: PLC0415

    async with polite_session(settings.identity(), config=settings.config) as session:
        fetch = partial(_fetch_body, session)
        return await sitemap_urls(source, await fetch(source) if body is None else body, fetch)


async def _fetch_body(session: ClientSession, url: str) -> bytes:
    from aiohttp import ClientError  # noqa: PLC0415

    body = bytearray()
    try:
        async with session.get(url) as response:
            if response.status != 200:
                raise GatekeeperError(f"{url}: status {response.status} instead of a sitemap")
            async for chunk in response.content.iter_chunked(65_536):
                body += chunk
                if len(body) > MAX_SITEMAP_BYTES:
                    break  # SitemapText refuses it for its length
    except (ClientError, TimeoutError) as error:
        if isinstance(error, GatekeeperError):
            raise
        raise GatekeeperError(f"{url}: not fetched: {error or type(error).__name__}") from error
    return bytes(body)


async def sitemap_urls(
    source: str, body: bytes, fetch: Callable[[str], Awaitable[bytes]]
) -> list[str]:
    """Return the pages listed in a sitemap with this body and in the sitemaps that it lists.

    `fetch` returns the body of another sitemap. An index may list sitemaps, but no other index
    (sitemaps.org).
    """
    first = SitemapText(source, body)
    pages = first.pages
    if len(first.sitemaps) > MAX_SITEMAPS:
        raise GatekeeperError(f"{source}: an index of more than {MAX_SITEMAPS} sitemaps")
    for url in first.sitemaps:
        if not is_url(url):
            raise GatekeeperError(f"{source}: {url!r} is not the URL of a sitemap")
        text = SitemapText(url, await fetch(url))
        if text.sitemaps:
            raise GatekeeperError(f"{url}: an index within an index (sitemaps.org forbids it)")
        pages += text.pages
        if len(pages) > MAX_URLS:
            raise GatekeeperError(f"{source}: more than {MAX_URLS} URLs; test them in parts")
    return pages
