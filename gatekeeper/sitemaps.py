"""What a site lists: the URLs in its sitemaps and feeds, fetched politely, in bounded memory.

`Gatekeeper.sitemaps` returns `Sitemaps`. Each file takes a lease of its host, by the rules of
the origin that it is on, through the guard. It is written to a temporary file first and read from
there: nobody who takes its entries slowly keeps a server, or the host's slot, waiting.

The formats are those of sitemaps.org: `urlset`, `sitemapindex`, a list of URLs as plain text, RSS
and Atom; each may be gzipped. Elements of extensions (images, videos, news, alternates) are
skipped. XML is read by expat, event by event. What a file may contain is limited where expat or
Python would need memory or time for it: see the constants.
"""

from __future__ import annotations

import asyncio
import codecs
import io
import logging
import re
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from datetime import UTC, date, datetime, time, timedelta
from email.utils import parsedate_to_datetime
from functools import partial
from itertools import chain
from tempfile import SpooledTemporaryFile
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple, NoReturn, Self, TypedDict
from xml.parsers import expat

import aiohttp
import msgspec
from aiohttp.hdrs import LOCATION
from yarl import URL

from gatekeeper import urls
from gatekeeper.clock import SharedTimer
from gatekeeper.errors import ConfigError, Deferred, Denied, InvalidURL, LeaseTimeout, refusing
from gatekeeper.gate import Gatekeeper
from gatekeeper.gate.lease import Lease
from gatekeeper.gate.lease_base import refuse_page
from gatekeeper.http_fields import REDIRECTS, unreadable
from gatekeeper.robots.model import Severity
from gatekeeper.session.middleware import RequestDeadline

_log = logging.getLogger(__name__)

MAX_OCTETS: Final = 52_428_800
"""Octets read of one file, decoded (sitemaps.org: 50 MB, uncompressed)."""
MAX_ENTRIES: Final = 50_000
"""Entries read of one file (sitemaps.org)."""
MAX_LEVELS: Final = 3
"""A file that robots.txt names is on level 1; an index on this level is not followed."""
MAX_FILES: Final = 50_000
"""Files read for one call."""
MAX_NAMED: Final = 16_777_216
"""Characters of the URLs of all these files, which are kept so that none is read twice."""
_MAX_FINDINGS: Final = 1_000
_MAX_REDIRECTS: Final = 5  # T9
_SECONDS: Final = 300.0
"""Network time for one file, its redirects included."""
_READ_SECONDS: Final = 60.0
"""Network time without a single octet."""
_IN_MEMORY: Final = 1_048_576
"""Octets of a file as it was sent that are kept in memory; of a longer one all are on disk."""
_PIECE: Final = 16_384
"""Octets parsed at a time. The event loop runs others after each."""
_MAX_TOKEN: Final = 262_144
"""Octets of one tag, comment or instruction, which expat collects until it has all of it."""
_MAX_DEPTH: Final = 256
_MAX_NAMES: Final = 262_144
"""Characters of all different names of elements and attributes, which expat keeps."""
_MAX_ELEMENTS: Final = 2_000_000
_MAX_DATE: Final = 64


class SitemapOptions(TypedDict, total=False):
    """The options of `Gatekeeper.sitemaps`."""

    since: datetime | date | None
    guess: bool
    max_entries: int | None


class SitemapEntry(msgspec.Struct, frozen=True):
    """One page that a site lists."""

    url: str
    """An absolute URL as it was written, not necessarily of the same site."""
    lastmod: datetime | None
    """When the page was last modified (aware, UTC): the beginning of the year, month or day if no
    more was written. None: not known."""
    source: str
    """The URL of the sitemap or feed that lists it."""


class SitemapFinding(msgspec.Struct, frozen=True):
    """Something that is wrong with a sitemap. With severity `error`, some entries are missing."""

    source: str
    """The URL of the file, or the origin."""
    code: str
    """One word for the kind of mistake (docs/sitemaps.md)."""
    severity: Severity
    """How serious it is."""
    message: str
    """A sentence for people."""
    line: int = 0
    """The line of the file, counting from 1; 0 for the file as a whole."""
    retry_at: datetime | None = None
    """When a deferred file may be asked for again."""


Walk = Callable[[list[SitemapFinding]], AsyncGenerator[SitemapEntry]]
Take = Callable[[str], Coroutine[Any, Any, Lease]]


class Sitemaps(AsyncIterator[SitemapEntry]):
    """The entries of a site's sitemaps, in order, as `Gatekeeper.sitemaps` returns them.

    An asynchronous iterator. It requests one file after another, each when its first entry is asked
    for, and holds no lease in between. `findings` grows meanwhile.
    """

    def __init__(self, walk: Walk) -> None:
        self.findings: list[SitemapFinding] = []
        """What is wrong with the files read so far, at most 1,000 findings."""
        self._entries = walk(self.findings)

    if not TYPE_CHECKING:
        __await__ = refusing("sitemaps are iterated: `async for entry in gate.sitemaps(...)`")
        __iter__ = __await__

    def __aiter__(self) -> Self:
        return self

    def __anext__(self) -> Coroutine[Any, Any, SitemapEntry]:
        return anext(self._entries)

    async def aclose(self) -> None:
        """Read no further. Idempotent."""
        await self._entries.aclose()

    @property
    def complete(self) -> bool:
        """Whether no finding so far says that entries are missing."""
        return all(finding.severity is not Severity.ERROR for finding in self.findings)


def sitemaps_of(
    gate: Gatekeeper,
    origin: str,
    *,
    since: datetime | date | None = None,
    guess: bool = False,
    max_entries: int | None = None,
    take: Take | None = None,
) -> Sitemaps:
    """Return the entries of an origin's sitemaps: see `Gatekeeper.sitemaps`.

    `take` acquires a lease in place of `gate.acquire`, for a sidecar; a LeaseTimeout of it is a
    finding.
    """
    origin = urls.parse(origin).origin
    timer = SharedTimer(gate.parts.clock)
    walker = _Walker(gate, timer, since_when(since), limit_of(max_entries), take)
    return Sitemaps(partial(walker.walk, origin=origin, guess=guess))


def sitemaps_at(
    gate: Gatekeeper, files: Sequence[str], *, level: int = 1, max_entries: int | None = None
) -> Sitemaps:
    """Return the entries of the sitemaps at these URLs, which are on `level`."""
    walker = _Walker(gate, SharedTimer(gate.parts.clock), None, limit_of(max_entries))
    return Sitemaps(partial(walker.walk, files=files, level=level))


def since_when(since: object) -> datetime | None:
    """Return the moment that `since` means. Raises ConfigError unless it is an aware datetime, a
    date (UTC), or None."""
    if isinstance(since, date) and not isinstance(since, datetime):
        return datetime.combine(since, time(), UTC)
    if since is None or (isinstance(since, datetime) and since.tzinfo is not None):
        return since and since.astimezone(UTC)
    raise ConfigError(f"since={since!r}: give a date, or a datetime with a time zone")


def parse_since(text: str) -> datetime:
    """Return the moment that a text means, such as 2026-11-01. Raises ConfigError."""
    found = parse_modified(text)
    if found is None:
        raise ConfigError(f"since {text[:_MAX_DATE]!r}: give 2026-11-01 or 2026-11-01T12:00:00Z")
    return found.start


def limit_of(max_entries: int | None) -> int | None:
    """Return `max_entries`. Raises ConfigError unless it is a number from 0, or None."""
    if max_entries is None or (isinstance(max_entries, int) and max_entries >= 0):
        return max_entries
    raise ConfigError(f"max_entries={max_entries!r}: give a number from 0, or None for no limit")


# --- from file to file ----------------------------------------------------------------------


class _Walker(msgspec.Struct, eq=False):
    """Fetches and reads one file after another, each once."""

    _gate: Gatekeeper
    _timer: SharedTimer
    _since: datetime | None
    _most: int | None
    _take: Take | None = None
    """Acquires a lease in place of the gate, for a sidecar."""
    _named: set[str] = set()
    _named_size: int = 0

    async def walk(
        self,
        findings: list[SitemapFinding],
        files: Sequence[str] = (),
        *,
        level: int = 1,
        origin: str | None = None,
        guess: bool = False,
    ) -> AsyncGenerator[SitemapEntry]:
        """Yield the entries of the files, or else of those of the origin, and of the files that
        they name, in order."""
        guessed = f"{origin}/sitemap.xml" if guess else None
        if origin is not None:
            files = await self._named_by(origin, guessed, Reporter(findings, origin))
        files = [url for url in files if self._is_new(url, Reporter(findings, url))]
        waiting, given = [(url, level) for url in reversed(files)], 0
        try:
            while waiting and given != self._most:
                url, level = waiting.pop()
                report, inner = Reporter(findings, url), list[str]()
                with SpooledTemporaryFile(_IN_MEMORY) as body:
                    base = await self._fetch(url, body, report, guessed=url == guessed)
                    body.seek(0)
                    for found in read_sitemap(iter(partial(body.read, _PIECE), b""), report, base):
                        for listed in found:
                            modified = listed.modified
                            if self._since and modified and modified.end < self._since:
                                continue
                            if listed.is_file:
                                if level >= MAX_LEVELS:
                                    report("too-deep", f"an index on level {level}: not followed")
                                elif self._is_new(listed.url, report):
                                    inner.append(listed.url)
                                continue
                            yield SitemapEntry(listed.url, modified and modified.start, url)
                            given += 1
                            if given == self._most:
                                return
                        await asyncio.sleep(0)
                waiting += [(one, level + 1) for one in reversed(inner)]
        finally:
            self._timer.cancel()

    async def _named_by(self, origin: str, guessed: str | None, report: Reporter) -> list[str]:
        """Return the files that the origin's robots.txt names, and the guessed one."""
        robots = await self._gate.robots(origin)
        if robots is None:  # no file, or it can't be fetched, or the operator decides
            refuse_page(self._gate, await self._gate.check(origin + "/"))
        files = [] if robots is None else list(robots.sitemaps)
        if guessed is not None:
            files.append(guessed)
        if not files:
            report("no-sitemap", "robots.txt names no sitemap (guess=True tries /sitemap.xml)")
        return files

    def _is_new(self, url: str, report: Reporter) -> bool:
        """Return True if the file was not named before, and there is room for its name."""
        if url in self._named:
            return False
        if len(self._named) >= MAX_FILES or self._named_size + len(url) > MAX_NAMED:
            report("too-many-files", f"more than {MAX_FILES} files are named")
            return False
        self._named.add(url)
        self._named_size += len(url)
        return True

    async def _fetch(self, url: str, body: IO[bytes], report: Reporter, *, guessed: bool) -> str:
        """Write what the URL leads to into `body`, and return the URL of the response.

        Each hop is decided, and sent under a lease. A body that breaks off is read as far as it
        came.
        """
        deadline, answered = RequestDeadline(self._timer, _SECONDS), False
        try:
            for _ in range(1 + _MAX_REDIRECTS):
                async with (
                    await (self._take or self._gate.acquire)(url) as lease,
                    self._request(lease.url, deadline) as response,
                ):
                    location = response.headers.get(LOCATION)
                    if response.status not in REDIRECTS or location is None:
                        if response.status == 200:
                            answered = True
                            await _receive(response, body)
                        elif guessed and response.status in {404, 410}:
                            report("no-sitemap", "robots.txt names none, and there is none here")
                        else:
                            report("not-fetched", f"status {response.status} instead of a sitemap")
                        return url
                url = urls.redirected(url, location)
            report("not-fetched", f"more than {_MAX_REDIRECTS} redirects")
        except LeaseTimeout as error:
            if self._take is None:
                raise  # by a mistake of its caller, who holds a lease of the host
            report("deferred", str(error), retry_at=error.retry_at)
        except Denied as error:
            code = "deferred" if isinstance(error, Deferred) else "denied"
            report(code, error.decision.explain(), retry_at=error.decision.retry_at)
        except aiohttp.ClientResponseError as error:
            report("not-fetched", unreadable(error.message))
        except (aiohttp.ClientError, OSError, InvalidURL) as error:
            code = "incomplete" if answered else "not-fetched"
            report(code, f"{type(error).__name__}: {error}".rstrip(": "))
        return url

    def _request(
        self, url: str, deadline: RequestDeadline
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """Send the request of one hop; the middleware finds its lease, and reports to it."""
        gate = self._gate
        return gate.parts.opened().requests.get(
            URL(url, encoded=True),
            headers={"User-Agent": gate.user_agent, "Accept-Encoding": "gzip, deflate"},
            allow_redirects=False,
            middlewares=(partial(gate.parts.middleware, deadline),),
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=gate.config.fetch.connect_timeout, sock_read=_READ_SECONDS
            ),
        )


async def _receive(response: aiohttp.ClientResponse, body: IO[bytes]) -> None:
    """Write the decoded body, as far as `read_sitemap` would read it and a piece more."""
    size = 0
    async for piece in response.content.iter_chunked(65_536):
        body.write(piece)
        size += len(piece)
        if size > MAX_OCTETS:
            response.close()
            return


# --- one file -------------------------------------------------------------------------------


class Reporter(msgspec.Struct, eq=False):
    """Adds findings about one file: of each kind the first."""

    _findings: list[SitemapFinding]
    _source: str
    told: set[str] = set()
    """The codes of its findings."""

    def __call__(
        self, code: str, message: str, *, line: int = 0, retry_at: datetime | None = None
    ) -> None:
        """Add a finding, unless the file has one with this code."""
        if code in self.told or len(self._findings) >= _MAX_FINDINGS:
            return
        self.told.add(code)
        severity = _SEVERITIES.get(code, Severity.ERROR)
        finding = SitemapFinding(self._source, code, severity, message, line, retry_at)
        self._findings.append(finding)
        _log.info("%s: %s", urls.mask(self._source), message)


_SEVERITIES = {
    "no-sitemap": Severity.INFO,
    "invalid-lastmod": Severity.WARNING,
    "invalid-url": Severity.WARNING,
}


class Modified(NamedTuple):
    """When something was modified, as precisely as it was written (aware, UTC)."""

    start: datetime
    end: datetime
    """The end of the year, month or day; without a time zone, of that in the last zone."""


class Listed(NamedTuple):
    """What a sitemap lists: a page, or another sitemap."""

    url: str
    modified: Modified | None
    is_file: bool


class _Enough(Exception):
    """The file is read no further: code, message and line of the finding."""


def read_sitemap(
    pieces: Iterator[bytes], report: Reporter, base: str | None = None
) -> Iterator[list[Listed]]:
    """Read a sitemap or feed of any format, and yield what each piece of it lists.

    Reading ends where a file is broken or exceeds a limit, with a finding. Relative URLs in XML are
    resolved by `base`, if it is given.
    """
    listing = _Listing(report, base)
    parser: _Xml | _Lines | None = None
    try:
        for text in _texts(_inflated(pieces, report)):
            start = text.lstrip("\ufeff \t\r\n") if parser is None else text
            if parser is None and start:
                parser = _Xml(listing) if start.startswith("<") else _Lines(listing)
            if parser is not None:
                parser.feed(start)
            yield listing.drain()
        if parser is not None and report.told.isdisjoint(_CUT):
            parser.close()
    except _Enough as end:
        code, message, line = end.args
        report(code, message, line=line)
    yield listing.drain()
    if parser is None and not report.told:
        report("not-a-sitemap", "it is empty")


_CUT = frozenset({"broken-gzip", "incomplete", "too-large"})
"""Findings after which the end of the text is not that of the file."""


def _inflated(pieces: Iterator[bytes], report: Reporter) -> Iterator[bytes]:
    """Yield the decoded file, at most `MAX_OCTETS`, in pieces of at most `_PIECE` octets."""
    octets = 0
    unpacker, gzipped = None, False
    for number, piece in enumerate(chain(pieces, [b""])):  # at the end, for what zlib still has
        gzipped = gzipped or (number == 0 and piece.startswith(b"\x1f\x8b"))
        out, rest, more = piece, b"", True
        while more:
            if gzipped:
                rest = rest or piece
                if unpacker is None and not rest.startswith(b"\x1f"):
                    return  # what follows the last member is padding
                try:
                    unpacker = unpacker or zlib.decompressobj(wbits=31)
                    out = unpacker.decompress(rest, _PIECE)
                except zlib.error as error:
                    report("broken-gzip", f"its gzip data is broken: {error}")
                    return
                rest = unpacker.unused_data if unpacker.eof else unpacker.unconsumed_tail
                unpacker = None if unpacker.eof else unpacker
            octets += len(out)
            if octets > MAX_OCTETS:
                report("too-large", f"longer than {MAX_OCTETS} octets")
                return
            yield out
            more = bool(rest)
    if unpacker is not None:
        report("broken-gzip", "its gzip data is incomplete")


_SNIFFED = 1_024
"""Octets after which the encoding of a file is known."""
_DECLARED = re.compile(rb"\s*<\?xml[^>]*?encoding\s*=\s*[\"']([A-Za-z0-9._:-]{1,40})")
_ENCODINGS = re.compile(
    r"iso8859-\d+|cp125\d|koi8-[ru]|gb2312|gbk|gb18030|big5|big5hkscs|euc_jp|euc_kr|shift_jis|cp949"
)
"""The encodings that a declaration may name. Others of Python's are slow, or no encodings."""


def _texts(pieces: Iterator[bytes]) -> Iterator[str]:
    """Yield the text. What can't be decoded is U+FFFD."""
    first = b""
    for piece in pieces:
        first += piece
        if len(first) >= _SNIFFED:
            break
        yield ""
    decoder = codecs.getincrementaldecoder(_encoding(first))("replace")
    for piece in chain([first], pieces):
        yield decoder.decode(piece)
    yield decoder.decode(b"", True)


def _encoding(first: bytes) -> str:
    """Return the encoding of a file that starts like this (XML 1.0, appendix F)."""
    if first.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    if first.startswith((b"<\0", b"\0<")):
        return "utf-16-le" if first[1] == 0 else "utf-16-be"
    if declared := _DECLARED.match(first):
        with suppress(LookupError):
            name = codecs.lookup(declared[1].decode()).name
            if _ENCODINGS.fullmatch(name):
                return name
    return "utf-8"


_RELATIVE = re.compile(r"\.{0,2}/\S*|[^\s.:/?#]+/\S*|(?!www\.)[^\s:/?#]+(?:[?#]\S*)?")
"""A reference that is no URL without its scheme, such as www.example.org/page."""


class _Listing:
    """Collects what one file lists."""

    def __init__(self, report: Reporter, base: str | None) -> None:
        self.report = report
        self.count: int = 0
        """Entries, those with an invalid URL included."""
        self.empty: bool = True
        """Whether there was no entry with a valid URL."""
        self.base: urls.Target | None = None
        """What a URL may be relative to, against sitemaps.org; in a list of URLs nothing."""
        with suppress(InvalidURL):  # what aiohttp can request, `urls` may refuse
            self.base = None if base is None else urls.parse(base)
        self._found: list[Listed] = []

    def drain(self) -> list[Listed]:
        """Return what was added since the last call."""
        found, self._found = self._found, []
        return found

    def add(self, url: str, lastmod: str = "", *, is_file: bool = False, line: int) -> None:
        """Add an entry, if its URL is one. Raises _Enough if there are too many."""
        if self.count >= MAX_ENTRIES:
            raise _Enough("too-many-entries", f"it has more than {MAX_ENTRIES} entries", line)
        self.count += 1
        url, lastmod = url.strip(), lastmod.strip()
        try:
            if self.base is not None and _RELATIVE.fullmatch(url):
                url = urls.join(self.base, url).url
            else:
                urls.split(url)
        except InvalidURL as error:
            self.report("invalid-url", f"not the URL of a page: {error}", line=line)
            return
        modified = parse_modified(lastmod) if lastmod else None
        if lastmod and modified is None:
            shown = urls.printable(lastmod, _MAX_DATE)
            self.report("invalid-lastmod", f"not a date of W3C or RFC 822: {shown}", line=line)
        self._found.append(Listed(url, modified, is_file))
        self.empty = False


class _Lines:
    """Reads a list of URLs, one a line. Lines that start with `#` are comments."""

    def __init__(self, listing: _Listing) -> None:
        self._listing = listing
        listing.base = None
        self._rest = ""
        self._line = 0
        self._newlines = io.IncrementalNewlineDecoder(None, translate=True)

    def feed(self, text: str) -> None:
        """Read the next piece."""
        *lines, rest = (self._rest + self._newlines.decode(text)).split("\n")
        self._rest = rest[: urls.MAX_URL + 1]  # one that is cut is too long for a URL
        for line in lines:
            self._line += 1
            url = line.strip()
            if url and not url.startswith("#"):
                self._listing.add(url, line=self._line)

    def close(self) -> None:
        """Read the last line."""
        self.feed("\n")
        if self._listing.empty:
            raise _Enough("not-a-sitemap", "neither XML nor a list of URLs", 0)


_ROOTS = frozenset({"urlset", "sitemapindex", "rss", "RDF", "feed"})
_ITEMS = {"url": False, "sitemap": True, "item": False, "entry": False}
"""The elements that stand for a page, or (True) for another sitemap."""
_PARENTS = frozenset({"urlset", "sitemapindex", "channel", "RDF", "feed"})
"""The elements that these stand in; an `image` of RSS, for example, has a `url` of its own."""
_URLS = frozenset({("url", "loc"), ("sitemap", "loc"), ("item", "link")})
_DATES = {
    ("url", "lastmod"): 1,
    ("sitemap", "lastmod"): 1,
    ("item", "pubDate"): 1,
    ("entry", "updated"): 3,
    ("entry", "modified"): 2,  # Atom 0.3
    ("entry", "published"): 1,
}
"""The elements that hold a date; of several in one item the one with the highest number counts."""


class _Xml:
    """Reads XML, of which only a few elements matter.

    Names with another prefix than the root's are those of extensions, so none of them is in the
    tables above. Namespaces are not resolved: a prefix that nobody declared is no reason to stop.
    """

    def __init__(self, listing: _Listing) -> None:
        self._listing = listing
        self._parser = parser = expat.ParserCreate("utf-8")
        parser.buffer_text = True
        parser.ordered_attributes = True
        parser.StartElementHandler = self._start
        parser.EndElementHandler = self._end
        parser.StartDoctypeDeclHandler = self._doctype
        self._prefix = ""
        self._path: list[str] = []
        self._octets = self._elements = self._names_size = 0
        self._names: set[str] = set()
        self._field = 0
        """The depth of the element whose text is collected; 0: none."""
        self._text = ""
        self._url = self._date = ""
        self._rank = 0

    def feed(self, text: str) -> None:
        """Read the next piece. Raises _Enough."""
        octets = text.encode()
        self._parse(octets, False)
        self._octets += len(octets)
        if self._octets - self._parser.CurrentByteIndex > _MAX_TOKEN:
            self._stop("too-large", f"a tag or comment of more than {_MAX_TOKEN} octets")

    def close(self) -> None:
        """Read to the end. Raises _Enough if the file is not complete."""
        self._parse(b"", True)

    def _parse(self, octets: bytes, final: bool) -> None:
        try:
            self._parser.Parse(octets, final)
        except expat.ExpatError as error:
            problem = expat.ErrorString(error.code)
            raise _Enough("broken-xml", f"broken XML: {problem}", error.lineno) from None

    def _stop(self, code: str, message: str) -> NoReturn:
        raise _Enough(code, message, self._parser.CurrentLineNumber)

    def _doctype(self, _name: str, _system: object, _public: object, internal: int) -> None:
        # Declared entities and attributes would be expanded, without any bound.
        if internal:
            self._stop("entities", "its DOCTYPE declares entities or attributes, which are refused")

    def _start(self, name: str, attributes: list[str]) -> None:
        path = self._path
        self._elements += 1
        if self._elements > _MAX_ELEMENTS or len(path) >= _MAX_DEPTH:
            self._stop("too-large", "too many elements, or too many inside each other")
        self._count_names(name, attributes)
        if not path:
            self._prefix, colon, name = name.rpartition(":")
            self._prefix += colon
            if name not in _ROOTS:
                shown = urls.printable(name, 40)
                self._stop("not-a-sitemap", f"not a sitemap: its root element is {shown}")
        name = name.removeprefix(self._prefix)
        parent = path[-1] if path else ""
        field = (parent, name)
        path.append(name)
        if name in _ITEMS and parent in _PARENTS:
            self._url, self._date, self._rank = "", "", 0
        elif field == ("entry", "link"):
            link = dict(zip(attributes[::2], attributes[1::2], strict=True))
            if link.get("rel", "alternate") == "alternate" and not self._url:
                self._url = link.get("href", "")
        elif field in _URLS or field in _DATES:
            self._field, self._text = len(path), ""
            self._parser.CharacterDataHandler = self._characters

    def _count_names(self, name: str, attributes: list[str]) -> None:
        for one in (name, *attributes[::2]):
            if one not in self._names:
                self._names.add(one)
                self._names_size += len(one)
                if self._names_size > _MAX_NAMES:
                    self._stop("too-large", "too many names of elements and attributes")

    def _characters(self, text: str) -> None:
        if len(self._text) <= urls.MAX_URL:  # longer than that it is no URL
            self._text += text

    def _end(self, _name: str) -> None:
        path = self._path
        depth, name = len(path), path.pop()
        if depth == self._field:
            self._field = 0
            self._parser.CharacterDataHandler = None
            field = path[-1], name
            if field in _URLS:
                self._url = self._text
            elif _DATES[field] > self._rank:
                self._date, self._rank = self._text, _DATES[field]
        elif name in _ITEMS and path and path[-1] in _PARENTS:
            line = self._parser.CurrentLineNumber
            self._listing.add(self._url, self._date, is_file=_ITEMS[name], line=line)


_W3C = re.compile(
    r"(\d{4})(?:(-\d\d)(?:(-\d\d)(?:[Tt ]+(\d\d:\d\d)(?:(:\d\d)([.,]\d{1,12})?)?"
    r" ?([Zz]|[+-]\d\d:?\d\d)?)?)?)?",
    re.ASCII,
)
_ZONES = timedelta(hours=12)
"""How much later than in UTC a day ends in the last zone."""


def parse_modified(text: str) -> Modified | None:
    """Parse a date of W3C's profile of ISO 8601, or of RFC 822. None: it is neither.

    >>> str(parse_modified("2026-11").end), parse_modified("yesterday")
    ('2026-12-01 12:00:00+00:00', None)
    """
    with suppress(ValueError, TypeError, IndexError, OverflowError):
        if (found := _W3C.fullmatch(text)) is not None:
            return _w3c_date(found)
        if len(text) <= _MAX_DATE:
            moment = parsedate_to_datetime(text)
            moment = moment.replace(tzinfo=moment.tzinfo or UTC).astimezone(UTC)
            return Modified(moment, moment)
    return None


def _w3c_date(found: re.Match[str]) -> Modified:
    """Raises ValueError or OverflowError for a date that no calendar has."""
    year, month, day, minute, second, fraction, zone = found.groups()
    written = f"{year}{month or '-01'}{day or '-01'}T{minute or '00:00'}"
    written += (second or ":00").replace(":60", ":59") + (fraction or "")  # a leap second
    start = datetime.fromisoformat(written + (zone or "Z").upper()).astimezone(UTC)
    if month is None:
        end = start.replace(year=start.year + 1)
    elif day is None:
        end = (start + timedelta(days=31)).replace(day=1)
    else:
        end = start + (timedelta(days=1) if minute is None else timedelta(minutes=second is None))
    return Modified(start, end if zone else end + _ZONES)
