"""WARC 1.1 (ISO 28500:2017) through warcio: a request and a response record for each answer.

Bodies are asked for unencoded and stored as they came, so that the octets in the file are
the octets of the answer; only the transfer coding is taken off, and its header renamed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import IO, Any, Self

import aiohttp
from aiohttp.connector import Connection

from gatekeeper.cli.crawl.manifest import WarcPlace
from gatekeeper.cli.crawl.records import Damaged, is_compressed, record_ends
from gatekeeper.errors import ConfigError

__all__ = ["Response", "Warc", "WarcHead", "warc_writer"]

_RENAMED = "X-Archive-Orig-Transfer-Encoding"


class WarcHead:
    """What a record needs of a response, taken before its connection is given back."""

    def __init__(self, response: aiohttp.ClientResponse, at: datetime) -> None:
        request = response.request_info
        self.at = at
        self.url = str(response.url)
        self.request_line = f"{response.method} {response.url.raw_path_qs} HTTP/1.1"
        self.request_headers = list(request.headers.items())
        version = response.version
        self.protocol = f"HTTP/{version.major}.{version.minor}" if version else "HTTP/1.1"
        self.status_line = f"{response.status} {response.reason or ''}".rstrip()
        # Latin-1 gives back the very octets, whatever was meant by them.
        raw = (
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in response.raw_headers
        )
        self.headers = [
            (_RENAMED if name.lower() == "transfer-encoding" else name, value)
            for name, value in raw
        ]
        self.address = getattr(response, "peer", None)


class Response(aiohttp.ClientResponse):
    """A response that knows the address it came from, even after its connection was freed."""

    peer: str | None = None

    async def start(self, connection: Connection) -> Self:
        """Note the address, before a short body frees the connection."""
        transport = connection.transport
        found = transport.get_extra_info("peername") if transport is not None else None
        self.peer = found[0] if isinstance(found, tuple) else None
        await super().start(connection)
        return self


def warc_writer() -> Any:
    """warcio's writer, which comes with an extra. Raises ConfigError where it is not there."""
    try:
        from warcio.warcwriter import WARCWriter  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ConfigError(
            "--warc needs warcio: pip install 'robots-gatekeeper[warc]' "
            "(in a checkout: pip install '.[warc]')"
        ) from error
    return WARCWriter


class Warc:
    """One WARC file, appended to. Open it with `with`, and under a lock.

    `name` is what its places are called; `last` is the last one of them that a manifest knows.
    Nothing whole is ever cut off: only the beginning of a record that its writer was killed
    over. A file that somebody else began, one that is damaged, and one that is not what the
    manifest speaks of raise ConfigError, and stay as they are. Writing is synchronous; call it
    from a thread, one record at a time.
    """

    def __init__(
        self, path: Path, *, software: str, name: str | None = None, last: WarcPlace | None = None
    ) -> None:
        self._make = warc_writer()
        self._software = software
        self._path = path
        self._name = name or path.name
        self._last = last
        self._writer: Any = None
        self._file: IO[bytes] | None = None

    def __enter__(self) -> Warc:
        end, compressed = 0, self._path.suffix == ".gz"
        if self._path.exists() and self._path.stat().st_size:
            with self._path.open("rb") as begun:
                end, compressed = self._checked_end(begun), is_compressed(begun)
        self._file = file = self._path.open("ab")
        file.truncate(end)
        file.seek(end)
        self._writer = self._make(file, gzip=compressed, warc_version="1.1")
        if end == 0:
            about = {
                "software": self._software,
                "format": "WARC File Format 1.1",
                "robots": "obey",
            }
            with self._whole(file):
                self._writer.write_record(
                    self._writer.create_warcinfo_record(self._path.name, about)
                )
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _checked_end(self, file: IO[bytes]) -> int:
        """The end of its last whole record."""
        if not self._begun_by_us(file):
            raise self._unusable("is not of this crawl")
        last = self._last
        start, wanted = (0, None) if last is None else (last.offset, last.end)
        found, known = 0, wanted is None
        try:
            for found in record_ends(file, start):
                known = known or found == wanted
        except Damaged as error:
            raise self._unusable(f"is {error}") from error
        if not found or not known:
            raise self._unusable("is not as the manifest of this crawl knows it")
        return found

    def _unusable(self, problem: str) -> ConfigError:
        return ConfigError(
            f"{self._path}: {problem}; name another file for --warc, or take this one away"
        )

    def _begun_by_us(self, file: IO[bytes]) -> bool:
        """Whether it begins with a warcinfo of this program, of whatever version."""
        from warcio.archiveiterator import ArchiveIterator  # noqa: PLC0415 - an extra
        from warcio.exceptions import ArchiveLoadFailed  # noqa: PLC0415

        program = self._software.partition("/")[0]
        file.seek(0)
        try:
            first = next(iter(ArchiveIterator(file)), None)
            return (
                first is not None
                and first.rec_type == "warcinfo"
                and f"software: {program}/".encode() in first.content_stream().read(65_536)
            )
        except (ArchiveLoadFailed, EOFError, OSError, ValueError):
            return False

    @contextmanager
    def _whole(self, file: IO[bytes]) -> Iterator[None]:
        """Half a record would spoil all that follow."""
        offset = file.tell()
        try:
            yield
            file.flush()
        except BaseException:
            file.truncate(offset)
            file.seek(offset)
            raise

    def write(
        self, head: WarcHead, body: IO[bytes], *, size: int, cut: str | None = None
    ) -> WarcPlace:
        """Append the request and the response; where they stand. `cut`: why the body ends
        before its end, as WARC-Truncated names it."""
        file = self._file
        if file is None:
            raise ValueError("the WARC file is not open")
        offset = file.tell()
        with self._whole(file):
            self._writer.write_request_response_pair(
                self._request(head), self._response(head, body, size, cut)
            )
        return WarcPlace(self._name, offset, file.tell())

    def _request(self, head: WarcHead) -> Any:
        from warcio.statusandheaders import StatusAndHeaders  # noqa: PLC0415 - an extra

        http = StatusAndHeaders(head.request_line, head.request_headers, is_http_request=True)
        return self._writer.create_warc_record(
            head.url, "request", http_headers=http, warc_headers_dict=_headers(head)
        )

    def _response(self, head: WarcHead, body: IO[bytes], size: int, cut: str | None) -> Any:
        from warcio.statusandheaders import StatusAndHeaders  # noqa: PLC0415 - an extra

        http = StatusAndHeaders(head.status_line, head.headers, protocol=head.protocol)
        return self._writer.create_warc_record(
            head.url,
            "response",
            payload=body,
            length=size,
            http_headers=http,
            warc_headers_dict=_headers(head) | ({"WARC-Truncated": cut} if cut else {}),
        )


def _headers(head: WarcHead) -> dict[str, str]:
    headers = {"WARC-Date": f"{head.at:%Y-%m-%dT%H:%M:%S.%f}Z"}
    return headers if head.address is None else headers | {"WARC-IP-Address": head.address}
