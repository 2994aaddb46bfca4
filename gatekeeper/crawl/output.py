"""The pages of a crawl on disk: one file per page, or records of a WARC file.

WARC: ISO 28500, "WARC file format" 1.1, with one gzip member per record (its annex D).
"""

from __future__ import annotations

import hashlib
import inspect
import io
import logging
import re
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, Self

import aiohttp
from aiohttp.connector import Connection

import gatekeeper.config  # noqa: F401 - the package's loggers have a null handler by it
from gatekeeper import urls
from gatekeeper.clock import Clock, SystemClock, utc
from gatekeeper.crawl.manifest import Folder, WarcPlace, not_stored
from gatekeeper.decision import Decision, State
from gatekeeper.descriptors import describe_shortage, is_shortage, with_descriptor
from gatekeeper.errors import ConfigError, StorageError, needs_extra
from gatekeeper.page_rules import MAX_HTML

if TYPE_CHECKING:
    from gatekeeper.fetching.records import Record

_log = logging.getLogger(__name__)

# --- waiting for a file descriptor -----------------------------------------------------------

DESCRIPTOR_WAIT = 300.0
"""Seconds for which a crawl waits for a file descriptor, as it does for room on the disk."""
DESCRIPTOR_PAUSE = 1.0
"""Seconds between two attempts to get one."""


def tell_shortage() -> None:
    """Log that the crawl waits for a file descriptor."""
    _log.warning("the crawl waits: %s", describe_shortage())


async def patiently(clock: Clock, action: Callable[[], Any]) -> Any:
    """Return the result of `action`, awaited if need be; repeat it while it finds no file
    descriptor. After 300 s the error is raised."""

    async def attempt() -> Any:
        result = action()
        return await result if inspect.isawaitable(result) else result

    began, told = clock.monotonic(), False
    while True:
        try:
            return await with_descriptor(attempt)
        except (OSError, StorageError) as error:
            if not is_shortage(error) or clock.monotonic() - began >= DESCRIPTOR_WAIT:
                raise
        if not told:
            tell_shortage()
            told = True
        await clock.sleep(DESCRIPTOR_PAUSE)


# --- one file per page -----------------------------------------------------------------------

_PARTS = ".parts"
MAX_IN_MEMORY = 1 << 16
"""Bytes of a body that stay in memory; for a hundred workers 6 MiB at most."""
_UNSAFE = re.compile(r"[^A-Za-z0-9.\-]+")
_MAX_STEM = 60
_EXTENSIONS = {
    "application/javascript": ".js",
    "application/json": ".json",
    "application/pdf": ".pdf",
    "application/rss+xml": ".xml",
    "application/xhtml+xml": ".xhtml",
    "application/xml": ".xml",
    "image/gif": ".gif",
    "image/jpeg": ".jpg",
    "image/png": ".png",
    "image/svg+xml": ".svg",
    "image/webp": ".webp",
    "text/css": ".css",
    "text/html": ".html",
    "text/javascript": ".js",
    "text/plain": ".txt",
    "text/xml": ".xml",
}


def name_for(url: str, content_type: str) -> str:
    """Return the path for the body of a URL: a folder per host, and a safe file name.

    Only letters, digits, dots and hyphens of the URL are used, up to a limit, and no dot comes
    first. A digest makes the name unique, and the same for the same URL in every run.

    >>> name_for("https://example.com/a/..%2f../r%20v.php?x=1", "text/html")
    'example.com/r-20v.php-2cbe126bda0dc37a.html'
    """
    origin, path = urls.split(url)
    last = path.partition("?")[0].rstrip("/").rpartition("/")[2]
    stem = _UNSAFE.sub("-", last).strip(".-")[:_MAX_STEM].rstrip(".-") or "index"
    folder = _UNSAFE.sub("_", urls.host_of(origin)).strip(".")
    return f"{folder}/{stem}-{_digest(url)[:16]}{_EXTENSIONS.get(content_type, '.bin')}"


def _digest(url: str) -> str:
    return hashlib.sha256(url.encode()).hexdigest()


class Body:
    """A body that is being received.

    It is in memory while it is small. Then it is in a file: with a `folder` in its `.parts`, with
    `spool` alone in a temporary one. With neither it is only counted. Use it as a context manager:
    a body that was not kept leaves nothing behind. Writes are synchronous, to the page cache.
    """

    def __init__(
        self,
        url: str,
        folder: Folder | None,
        *,
        limit: int,
        spool: bool,
        clock: Clock | None = None,
    ) -> None:
        """`limit`: bytes to receive at most."""
        self._clock = clock or SystemClock()
        self.size: int = 0
        self.cut: str | None = None
        """Why the body is incomplete, as a value of WARC-Truncated; None if it is complete."""
        self.start: bytearray = bytearray()
        """The first 64 KiB of the body, for its signals."""
        self._url = url
        self._folder = folder
        self._name = "" if folder is None else _digest(url)
        self._limit = limit
        self._counts_only = folder is None and not spool
        self._hash = hashlib.sha256()
        self._memory = io.BytesIO()
        self._file: IO[bytes] = self._memory

    def __enter__(self) -> Body:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # the body is discarded anyway
            self._file.close()
        if self._folder is not None and self._file is not self._memory:
            with suppress(StorageError):  # the next try for the URL replaces it
                self._folder.remove(_PARTS, self._name)

    @property
    def sha256(self) -> str:
        """The digest of the bytes received so far, in hexadecimal."""
        return self._hash.hexdigest()

    async def receive(self, content: aiohttp.StreamReader) -> None:
        """Receive the body; stop reading at the limit."""
        while piece := await content.readany():
            room = self._limit - self.size
            self._write(piece[:room])
            if self.size > MAX_IN_MEMORY and not self._counts_only:
                await patiently(self._clock, self._create_file)
            if len(piece) > room:
                self.cut = "length"
                return

    def _write(self, piece: bytes) -> None:
        self.size += len(piece)
        self._hash.update(piece)
        self.start += piece[: MAX_HTML - len(self.start)]
        if not self._counts_only:
            with self._storing():
                self._file.write(piece)

    def _create_file(self) -> None:
        """Create the file, unless it exists, and write everything received so far."""
        if self._file is self._memory:
            with self._storing():
                if self._folder is None:
                    self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed in __exit__
                else:
                    self._file = self._folder.create(_PARTS, self._name)
                self._file.write(self._memory.getbuffer())
            self._memory.seek(0)
            self._memory.truncate()

    @contextmanager
    def _storing(self) -> Iterator[None]:
        """Raise StorageError for a local error, which must not look like a failed request."""
        try:
            yield
        except OSError as error:
            where = "temporary file" if self._folder is None else self._folder.path / _PARTS
            raise not_stored(where, error) from error

    def open(self) -> IO[bytes]:
        """Return the bytes received, as a file at its beginning."""
        self._file.flush()
        self._file.seek(0)
        return self._file

    def keep(self, content_type: str) -> str | None:
        """Move the body to its final place, replacing an earlier one; return its path there.

        Return None if there is no folder.
        """
        if self._folder is None:
            return None
        path = name_for(self._url, content_type)
        directory, _, name = path.partition("/")
        self._create_file()
        with self._storing():
            self._file.close()
        self._folder.move((_PARTS, self._name), (directory, name))
        self._file = self._memory
        return path


# --- reading WARC records --------------------------------------------------------------------

_MAGIC = b"WARC/1."
_GZIP = b"\x1f\x8b"
_BLANK_LINE = b"\r\n\r\n"
"""Ends the head of a record, and the record."""
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]{1,18})[ \t]*(?:\r\n|\Z)", re.IGNORECASE)
_BLOCK = 16 * 1024
"""Bytes read in one call; they decompress to at most a thousand times as much."""
_MAX_HEAD = 128 * 1024
"""Bytes of the head of a record, which has the URL."""


class DamagedArchive(ValueError):
    """Raised if the bytes at `offset` are neither a record nor the beginning of one."""

    def __init__(self, offset: int) -> None:
        super().__init__(f"damaged at byte {offset:,}")


def is_compressed(file: IO[bytes]) -> bool:
    """Return True if every record of the file is a gzip member."""
    file.seek(0)
    return file.read(len(_GZIP)) == _GZIP


# Both yield the end of each complete record from `offset` on, where a record must begin. Any bytes
# after the last one are the beginning of an incomplete record. They raise DamagedArchive if they
# are something else.
def _member_ends(file: IO[bytes], offset: int) -> Iterator[int]:
    file.seek(offset)
    end, member = offset, zlib.decompressobj(31)
    unused = b""
    while block := unused or file.read(_BLOCK):
        try:
            member.decompress(block)
        except zlib.error:
            raise DamagedArchive(end) from None
        unused = member.unused_data
        if member.eof:
            end, member = file.tell() - len(unused), zlib.decompressobj(31)
            yield end
            file.seek(end + len(unused))  # the caller may have read elsewhere


def _plain_ends(file: IO[bytes], offset: int) -> Iterator[int]:
    while True:
        file.seek(offset)
        start = file.read(_MAX_HEAD)
        head, blank, _ = start.partition(_BLANK_LINE)
        length = _LENGTH.search(head)
        is_cut = not blank and len(start) < _MAX_HEAD
        if not head.startswith(_MAGIC[: len(head)]) or not (is_cut or (blank and length)):
            raise DamagedArchive(offset)
        if is_cut or length is None:
            return
        file.seek(offset + len(head) + len(blank) + int(length[1]))
        end = file.read(len(_BLANK_LINE))
        if end != _BLANK_LINE:
            if _BLANK_LINE.startswith(end):
                return
            raise DamagedArchive(offset)
        offset = file.tell()
        yield offset


# --- writing WARC records --------------------------------------------------------------------

_TRANSFER_ENCODING = "X-Archive-Orig-Transfer-Encoding"


class PeerResponse(aiohttp.ClientResponse):
    """A response that knows its peer's address even after its connection was released."""

    peer: str | None = None

    async def start(self, connection: Connection) -> Self:
        """Record the address before a short body releases the connection."""
        transport = connection.transport
        peer = transport.get_extra_info("peername") if transport is not None else None
        self.peer = peer[0] if isinstance(peer, tuple) else None
        await super().start(connection)
        return self


def warc_writer() -> Any:
    """Return the writer class of warcio, an extra. Raises ConfigError if it is not installed."""
    with needs_extra("warc", "--warc"):
        from warcio.warcwriter import WARCWriter  # noqa: PLC0415 - an extra
    return WARCWriter


_MAX_ORIGINS = 100_000
_MANY = 64
_FIELDS = "application/warc-fields"


class RobotsText(NamedTuple):
    """What a WARC file gets of one robots.txt."""

    url: str
    """Where the text was read: the last hop, if it was redirected."""
    at: datetime
    about: Mapping[str, object]
    """How it was retrieved."""
    body: bytes | None
    """None: there is no text."""


class RobotsTexts:
    """The files that a crawl obeys, as they come, for its WARC file. A listener of its gate."""

    def __init__(self, many: Callable[[], object]) -> None:
        """`many()` is called when many are to be written."""
        self._many = many
        self.unwritten: list[RobotsText] = []
        self._seen: dict[str, tuple[float, str, str | None]] = {}
        """By origin: when its file was retrieved, the outcome, and the digest of the text."""

    def rules_changed(self) -> None:
        """Do nothing: a decision says which rule of the operator made it."""

    def learnt(self, record: Record) -> str | None:
        """Return the digest of the text of a record, None if there is none. It is to be written if
        it is new."""
        current, known = record.current, self._seen.get(record.origin)
        if known is not None and known[0] == current.wall:
            return known[2]
        body = None if record.text is None else record.text.body()
        digest = None if body is None else hashlib.sha256(body).hexdigest()
        outcome = current.outcome.row.name
        if known is None or known[1:] != (outcome, digest):
            url = [f"{record.origin}/robots.txt", *current.hops][-1]
            read = current if body is None or record.good is None else record.good
            about = {"outcome": outcome, "status": current.status, "sha256": digest}
            self.unwritten.append(RobotsText(url, utc(read.wall), about, body))
            if len(self.unwritten) % _MANY == 0:
                self._many()
        urls.make_room(self._seen, _MAX_ORIGINS)
        self._seen[record.origin] = current.wall, outcome, digest
        return digest

    def take(self) -> list[RobotsText]:
        """Return what is to be written, and forget it."""
        taken, self.unwritten = self.unwritten, []
        return taken


def about_page(
    decision: Decision, robots: str | None, audit: tuple[str, int] | None
) -> dict[str, object]:
    """Return what the metadata record of a page says about why it could be requested.

    `robots` is the digest of the robots.txt, `audit` the place of the grant in the audit record.
    """
    return {
        "decision": decision.id,
        "reason": decision.reason.value,
        "user-agent": decision.user_agent,
        "robots-line": None if decision.rule is None else decision.rule.line,
        "robots-sha256": None if decision.state is State.OVERRIDE else robots,
        "note": decision.note,
        "audit-chain": None if audit is None else audit[0],
        "audit-line": None if audit is None else audit[1],
    }


class Warc:
    """One WARC file, opened for appending. Make it while holding the lock, as a context manager.

    `name` is the file's name in the manifest, `last` the position of the last page that the
    manifest has for it. Only the incomplete record of a writer that was killed is ever cut off. A
    file of another program, a damaged file, and one that does not match the manifest raise
    ConfigError and stay unchanged. Writing is synchronous: call it from a thread, one record at a
    time.
    """

    def __init__(
        self, path: Path, *, software: str, name: str | None = None, last: WarcPlace | None = None
    ) -> None:
        make = warc_writer()
        self._software = software
        self._path = path
        self._name = name or path.name
        end, compressed = 0, path.suffix == ".gz"
        if path.exists() and path.stat().st_size:
            with path.open("rb") as existing:
                end, compressed = self._checked_end(existing, last), is_compressed(existing)
        self._file: IO[bytes] = path.open("ab")
        self._file.truncate(end)
        self._file.seek(end)
        self._writer: Any = make(self._file, gzip=compressed, warc_version="1.1")
        if end == 0:
            about = {"software": software, "format": "WARC File Format 1.1", "robots": "obey"}
            with self._rollback():
                self._writer.write_record(self._writer.create_warcinfo_record(path.name, about))

    def __enter__(self) -> Warc:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # every whole record was flushed
            self._file.close()

    def _checked_end(self, file: IO[bytes], last: WarcPlace | None) -> int:
        """Return the end of the last complete record. Raises ConfigError for an unusable file."""
        if not self._is_ours(file):
            raise self._unusable("does not belong to this crawl")
        start, known_end = (0, None) if last is None else (last.offset, last.end)
        end, matches = 0, known_end is None
        try:
            for end in (_member_ends if is_compressed(file) else _plain_ends)(file, start):
                matches = matches or end == known_end
        except DamagedArchive as error:
            raise self._unusable(f"is {error}") from error
        if not end or not matches:
            raise self._unusable("does not match the manifest of this crawl")
        return end

    def _unusable(self, problem: str) -> ConfigError:
        return ConfigError(
            f"{self._path}: {problem}; name another file for --warc, or remove this one"
        )

    def _is_ours(self, file: IO[bytes]) -> bool:
        """Return True if the file starts with a warcinfo record of any version of this program."""
        file.seek(0)
        start, program = file.read(_BLOCK), self._software.partition("/")[0]
        with suppress(zlib.error):  # not compressed, or no archive
            start = zlib.decompressobj(31).decompress(start, _BLOCK)
        head, _, rest = start.partition(_BLANK_LINE)
        about, _, _ = rest.partition(_BLANK_LINE)
        is_info = head.startswith(_MAGIC) and b"\r\nWARC-Type: warcinfo" in head
        return is_info and f"software: {program}/".encode() in about

    @contextmanager
    def _rollback(self) -> Iterator[None]:
        """Undo an incomplete write, which would make all later records unreadable."""
        offset = self._file.tell()
        try:
            yield
            self._file.flush()
        except BaseException as error:
            with suppress(OSError):  # on a full disk: then the next run cuts the record off
                self._file.truncate(offset)
                self._file.seek(offset)
            if isinstance(error, OSError):
                raise not_stored(self._path, error) from error
            raise

    def write(
        self, answer: aiohttp.ClientResponse, at: datetime, body: Body, about: Mapping[str, object]
    ) -> WarcPlace:
        """Append a request that was sent at that time, its response, and a metadata record with
        `about` (ISO 28500:2017 section 6.5), and return their position."""
        from warcio.statusandheaders import StatusAndHeaders  # noqa: PLC0415 - an extra

        offset, create, url = self._file.tell(), self._writer.create_warc_record, str(answer.url)
        common = {"WARC-Date": _date(at)}
        if (peer := getattr(answer, "peer", None)) is not None:
            common["WARC-IP-Address"] = peer
        line = f"{answer.method} {answer.url.raw_path_qs} HTTP/1.1"
        sent = StatusAndHeaders(
            line, list(answer.request_info.headers.items()), is_http_request=True
        )
        version = answer.version
        response = create(
            url,
            "response",
            payload=body.open(),
            length=body.size,
            http_headers=StatusAndHeaders(
                f"{answer.status} {answer.reason or ''}".rstrip(),
                _stored_fields(answer.raw_headers),
                protocol=f"HTTP/{version.major}.{version.minor}" if version else "HTTP/1.1",
            ),
            warc_headers_dict=common | ({"WARC-Truncated": body.cut} if body.cut else {}),
        )
        request = create(url, "request", http_headers=sent, warc_headers_dict=dict(common))
        with self._rollback():
            self._writer.write_request_response_pair(request, response)
            self._write_metadata(url, common["WARC-Date"], about, response)
        return WarcPlace(self._name, offset, self._file.tell())

    def write_robots(self, texts: Iterable[RobotsText]) -> None:
        """Append each text as a `resource` (ISO 28500:2017 section 6.4: there is no response to
        keep, as a text may come from an earlier run), and how it was retrieved as metadata."""
        for one in texts:
            date, resource = _date(one.at), None
            with self._rollback():
                if one.body is not None:
                    resource = self._append(one.url, "resource", date, one.body, "text/plain")
                self._write_metadata(one.url, date, one.about, resource)

    def _write_metadata(
        self, url: str, date: str, about: Mapping[str, object], record: Any | None
    ) -> None:
        """Append a metadata record about another record of the same moment, if there is one."""
        lines = (f"{name}: {value}" for name, value in about.items() if value is not None)
        text = "".join(f"{' '.join(line.split())}\r\n" for line in lines).encode(errors="replace")
        named = {}
        if record is not None:
            its_id = record.rec_headers.get_header("WARC-Record-ID")
            named = {"WARC-Concurrent-To": its_id, "WARC-Refers-To": its_id}
        self._append(url, "metadata", date, text, _FIELDS, **named)

    def _append(
        self, url: str, kind: str, date: str, content: bytes, content_type: str, **more: str
    ) -> Any:
        """Append a record of a text, and return it. `more`: further fields of its head."""
        record = self._writer.create_warc_record(
            url,
            kind,
            payload=io.BytesIO(content),
            length=len(content),
            warc_content_type=content_type,
            warc_headers_dict={"WARC-Date": date, **more},
        )
        self._writer.write_record(record)
        return record


def _date(at: datetime) -> str:
    return f"{at:%Y-%m-%dT%H:%M:%S.%f}Z"


def _stored_fields(raw: Iterable[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
    """Return the fields of a head. Latin-1 preserves the bytes, whatever their encoding is."""
    fields = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in raw]
    return [
        (_TRANSFER_ENCODING if name.lower() == "transfer-encoding" else name, value)
        for name, value in fields
    ]
