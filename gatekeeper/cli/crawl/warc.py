"""WARC 1.1 (ISO 28500:2017) through warcio: a request and a response record for each page.

Bodies are asked for unencoded and stored as they came, so that the octets in the file are
the octets of the answer; only the transfer coding is taken off, and its header renamed.
"""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path
from typing import IO, Any, Self

import aiohttp
from aiohttp.connector import Connection

from gatekeeper.cli.crawl.manifest import WarcPlace
from gatekeeper.errors import ConfigError

__all__ = ["Response", "Warc", "WarcHead"]

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


class Warc:
    """One WARC file, appended to. Open it with `with`.

    `vouched` is how far the manifest of an earlier run vouches for it: what stands behind
    that was being written when the process died, and is cut off. A file that no manifest
    knows is somebody else's and raises ConfigError. Writing is synchronous; call it from a
    thread, one record at a time.
    """

    def __init__(self, path: Path, *, software: str, vouched: int | None) -> None:
        try:
            from warcio.warcwriter import WARCWriter  # noqa: PLC0415 - an extra
        except ImportError as error:
            raise ConfigError("--warc needs warcio: pip install 'gatekeeper[warc]'") from error
        self._make = WARCWriter
        self._software = software
        self._vouched = vouched
        self._path = path
        self._writer: Any = None
        self._file: IO[bytes] | None = None

    def __enter__(self) -> Warc:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        size = self._path.stat().st_size if self._path.exists() else 0
        if size and self._vouched is None and not self._begun_by_us():
            raise ConfigError(
                f"{self._path}: is not of this crawl; name another file for --warc, "
                "or take this one away"
            )
        self._file = file = self._path.open("ab")
        if size:
            file.truncate(min(size, self._vouched or 0))
            file.seek(0, os.SEEK_END)
        self._writer = self._make(file, gzip=self._path.suffix == ".gz", warc_version="1.1")
        if file.tell() == 0:
            self._writer.write_record(
                self._writer.create_warcinfo_record(
                    self._path.name,
                    {
                        "software": self._software,
                        "format": "WARC File Format 1.1",
                        "robots": "obey",
                    },
                )
            )
            file.flush()
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _begun_by_us(self) -> bool:
        """Whether it begins with our own warcinfo: killed before the first page was noted."""
        from warcio.archiveiterator import ArchiveIterator  # noqa: PLC0415 - an extra
        from warcio.exceptions import ArchiveLoadFailed  # noqa: PLC0415

        with self._path.open("rb") as file:
            try:
                first = next(iter(ArchiveIterator(file)), None)
                return (
                    first is not None
                    and first.rec_type == "warcinfo"
                    and self._software.encode() in first.content_stream().read(65_536)
                )
            except (ArchiveLoadFailed, EOFError, OSError):
                return False

    def write(self, head: WarcHead, body: IO[bytes], *, size: int, truncated: bool) -> WarcPlace:
        """Append the request and the response; where they stand."""
        if self._file is None:
            raise ValueError("the WARC file is not open")
        offset = self._file.tell()
        try:
            self._writer.write_request_response_pair(
                self._request(head), self._response(head, body, size, truncated)
            )
            self._file.flush()
        except BaseException:
            self._file.truncate(offset)  # half a record would spoil all that follow
            self._file.seek(offset)
            raise
        return WarcPlace(self._path.name, offset, self._file.tell())

    def _request(self, head: WarcHead) -> Any:
        from warcio.statusandheaders import StatusAndHeaders  # noqa: PLC0415 - an extra

        http = StatusAndHeaders(head.request_line, head.request_headers, is_http_request=True)
        return self._writer.create_warc_record(
            head.url, "request", http_headers=http, warc_headers_dict=_headers(head)
        )

    def _response(self, head: WarcHead, body: IO[bytes], size: int, truncated: bool) -> Any:
        from warcio.statusandheaders import StatusAndHeaders  # noqa: PLC0415 - an extra

        http = StatusAndHeaders(head.status_line, head.headers, protocol=head.protocol)
        return self._writer.create_warc_record(
            head.url,
            "response",
            payload=body,
            length=size,
            http_headers=http,
            warc_headers_dict=_headers(head) | ({"WARC-Truncated": "length"} if truncated else {}),
        )


def _headers(head: WarcHead) -> dict[str, str]:
    headers = {"WARC-Date": f"{head.at:%Y-%m-%dT%H:%M:%S.%f}Z"}
    return headers if head.address is None else headers | {"WARC-IP-Address": head.address}
