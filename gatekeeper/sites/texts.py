"""Input of the commands for site owners: robots.txt files from files, directories, standard input
and URLs, and sitemaps."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from gatekeeper.errors import GatekeeperError
from gatekeeper.robots import RobotsTxt, Rule
from gatekeeper.terminal import open_gate, standard_input, url_hint, warn_if_anonymous
from gatekeeper.urls import parse, printable

if TYPE_CHECKING:
    from gatekeeper.config import Config
    from gatekeeper.sitemaps import SitemapFinding


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

    @property
    def rules(self) -> RobotsTxt:
        """The file, or an empty one if the site has none."""
        return RobotsTxt.parse(b"") if self.robots is None else self.robots


def is_url(source: str) -> bool:
    """Return True if the source is a URL to fetch, and not a file."""
    return source.startswith(("http://", "https://"))


def place_of(rule: Rule | None) -> str:
    """Describe the deciding line for a terminal: a site's text is escaped and cut."""
    return f"line {rule.line}: {printable(rule.text.strip(), 200)}" if rule else "no rule"


MAX_BYTES = 64 << 20
"""Maximum bytes read from a file or from standard input, which may have no end."""


def read_all(config: Config, sources: Iterable[str]) -> Iterator[Text]:
    """Yield the text of each source in order; for a directory, every robots.txt in it.

    Raises GatekeeperError for a source that does not exist, OSError for one that can't be read.
    """
    for source in sources:
        if source == "-" or is_url(source) or not Path(source).is_dir():
            yield read_text(config, source)
            continue
        paths = sorted(_files_in(source))
        if not paths:
            raise GatekeeperError(
                f"{source}: no file in it has a name that ends with robots.txt "
                "(give other files by name)"
            )
        for path in paths:
            yield read_text(config, path)


def _files_in(directory: str) -> Iterator[str]:
    for folder, folders, names in os.walk(directory):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (os.path.join(folder, name) for name in names if name.endswith("robots.txt"))


def read_text(config: Config, source: str) -> Text:
    """Read a file, standard input (`-`), or the robots.txt of the origin of a URL."""
    if is_url(source):
        import asyncio  # noqa: PLC0415 - reading a file does not need it

        warn_if_anonymous(config)
        origin = parse(source).origin
        return asyncio.run(_fetch_robots(config, origin))
    try:
        body = read_bounded(source)
    except FileNotFoundError as error:
        raise GatekeeperError(f"{source}: {error.strerror}{url_hint(source)}") from error
    return parse_text(config, source, body)


def read_bounded(source: str) -> bytes:
    """Return the content of a file or of standard input (`-`).

    Raises OSError if it can't be read, GatekeeperError if it is longer than `MAX_BYTES`.
    """
    if source == "-":
        body = standard_input().read(MAX_BYTES + 1)
    else:
        with open(source, "rb") as file:
            body = file.read(MAX_BYTES + 1)
    if len(body) > MAX_BYTES:
        raise GatekeeperError(f"{source}: longer than {MAX_BYTES >> 20} MiB, the limit for input")
    return body


def parse_text(config: Config, name: str, body: bytes) -> Text:
    """Parse the body of a robots.txt with the configured dialect and size limit."""
    robots = RobotsTxt.parse(body, dialect=config.robots.dialect, limit=config.fetch.max_body)
    return Text(name=name, body=body, robots=robots)


async def _fetch_robots(config: Config, origin: str) -> Text:
    """Fetch the file of an origin."""
    from gatekeeper.decision import Reason, State  # noqa: PLC0415

    name = f"{origin}/robots.txt"
    async with open_gate(config, overrides=False) as gate:
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


def write_output(path: str | None, text: str) -> None:
    """Write a text, in UTF-8, to a file or to standard output."""
    body = text.encode(errors="backslashreplace")
    if path is not None:
        replace_file(Path(path), body)
    else:
        sys.stdout.buffer.write(body)


def replace_file(path: Path, body: bytes) -> None:
    """Write a file atomically; an existing one keeps its mode. A device or a pipe stays one.

    Raises OSError, which names the path that was given.
    """
    if path.exists() and not path.is_file():  # /dev/null, which root could replace; /dev/stdout
        path.write_bytes(body)
        return
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


# --- sitemaps


MAX_URLS = 1_000_000


def read_sitemap(config: Config, source: str) -> list[str]:
    """Return the URLs of a sitemap and, if it is an index, of the sitemaps that it lists.

    Sitemaps at URLs are fetched politely: robots.txt is obeyed, and each host is paced. Raises
    GatekeeperError for one that can't be fetched or is not valid, OSError for a file that can't be
    read.
    """
    import asyncio  # noqa: PLC0415 - `lint` and `diff` do not need it

    from gatekeeper import sitemaps  # noqa: PLC0415 - it loads an HTTP client

    pages: list[str] = []
    files, level = [source], 1
    if not is_url(source):
        findings: list[sitemaps.SitemapFinding] = []
        body, report = read_bounded(source), sitemaps.Reporter(findings, source)
        found = list(chain.from_iterable(sitemaps.read_sitemap(iter([body]), report)))
        _refuse_findings(findings)
        pages = [one.url for one in found if not one.is_file]
        files, level = [one.url for one in found if one.is_file], 2
    if files:
        warn_if_anonymous(config)
        pages += asyncio.run(_read_remote(config, files, level))
    if len(pages) > MAX_URLS:
        raise GatekeeperError(f"{source}: more than {MAX_URLS} URLs; test them in parts")
    return pages


async def _read_remote(config: Config, files: list[str], level: int) -> list[str]:
    from gatekeeper.sitemaps import sitemaps_at  # noqa: PLC0415

    async with open_gate(config) as gate:
        found = sitemaps_at(gate, files, level=level, max_entries=MAX_URLS + 1)
        pages = []
        async for entry in found:
            pages.append(entry.url)
            _refuse_findings(found.findings)
        _refuse_findings(found.findings)
        return pages


def _refuse_findings(findings: Iterable[SitemapFinding]) -> None:
    """Raise GatekeeperError if an entry is missing, or its URL is none."""
    for finding in findings:
        if finding.code != "invalid-lastmod":
            where = f"{finding.source}:{finding.line}" if finding.line else finding.source
            raise GatekeeperError(f"{where}: {finding.message}")
