"""Bodies on disk: safe names, a bound on the size, whole files only."""

from __future__ import annotations

import contextlib
import hashlib
import re
import tempfile
from pathlib import Path
from typing import IO

import aiohttp

from gatekeeper import urls
from gatekeeper.cli.crawl.folder import Folder
from gatekeeper.errors import StorageError

__all__ = ["Body", "name_for", "parts"]

_PARTS = ".parts"
_SPOOLED = 1 << 20
_UNSAFE = re.compile(r"[^A-Za-z0-9.\-]+")
_LONGEST = 60
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
    """Where the body of a URL goes: a folder a host, a name that nothing in it can break.

    Only letters, digits, dots and hyphens of the URL are used, cut to a bound, never first
    a dot; the digest makes it unique, and the same for the same URL in every run.

    >>> name_for("https://example.com/a/..%2f../r%20v.php?x=1", "text/html")
    'example.com/r-20v.php-fc8ed5d2b6e1d8cd.html'
    """
    target = urls.parse(url)
    host = _UNSAFE.sub("_", target.host).strip(".")
    last = target.path.partition("?")[0].rstrip("/").rpartition("/")[2]
    stem = _UNSAFE.sub("-", last).strip(".-")[:_LONGEST].rstrip(".-") or "index"
    digest = hashlib.sha256(url.encode()).hexdigest()[:16]
    return f"{host}/{stem}-{digest}{_EXTENSIONS.get(content_type, '.bin')}"


class Body:
    """A body while it arrives: a file in `folder`'s `.parts`, a spooled one, or none at all.

    Use it as a context: a body that was not kept leaves nothing behind. Writing is to the
    page cache, in the pieces the network brings; a thread for each would cost more.
    """

    def __init__(self, url: str, folder: Path | None, *, limit: int, spool: bool) -> None:
        self.size = 0
        self.cut: str | None = None
        """Why the end of it is missing, if it is, in the words of WARC-Truncated."""
        self._url = url
        self._folder = None if folder is None else Folder(folder)
        self._part = hashlib.sha256(url.encode()).hexdigest()
        self._limit = limit
        self._spool = spool
        self._hash = hashlib.sha256()
        self._kept = False
        self._file: IO[bytes] | None = None

    def __enter__(self) -> Body:
        if self._folder is not None:
            self._file = self._folder.create(_PARTS, self._part)
        elif self._spool:
            self._file = tempfile.SpooledTemporaryFile(max_size=_SPOOLED)
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # of a body that nobody keeps
                self._file.close()
        if self._folder is not None and not self._kept:
            self._folder.remove(_PARTS, self._part)

    @property
    def sha256(self) -> str:
        """Of what was taken so far, in hexadecimal."""
        return self._hash.hexdigest()

    async def receive(self, content: aiohttp.StreamReader) -> None:
        """Take the body as it comes; stop reading at the limit."""
        async for piece in content.iter_any():
            room = self._limit - self.size
            self._write(piece[:room])
            if len(piece) > room:
                self.cut = "length"
                return

    def _write(self, piece: bytes) -> None:
        self.size += len(piece)
        self._hash.update(piece)
        if self._file is not None:
            try:
                self._file.write(piece)
            except OSError as error:
                # Not the host's fault: it must not look like a failed request.
                where = "temporary file" if self._folder is None else self._folder.path / _PARTS
                raise StorageError(f"{where}: {error.strerror}") from error

    def open(self) -> IO[bytes]:
        """What was taken, from its beginning."""
        if self._file is None:
            raise ValueError("this body was not stored")
        self._file.flush()
        self._file.seek(0)
        return self._file

    def keep(self, content_type: str) -> str | None:
        """Put it in its place, over an earlier body of the same URL; its name there."""
        if self._folder is None or self._file is None:
            return None
        name = name_for(self._url, content_type)
        host, _, last = name.partition("/")
        self._file.close()
        self._folder.move((_PARTS, self._part), (host, last))
        self._kept = True
        return name


def parts(folder: Path) -> Path:
    """Where bodies stand until they are whole."""
    return folder / _PARTS
