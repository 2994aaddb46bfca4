"""Texts of robots.txt files, each distinct one kept once, however many origins serve it."""

from __future__ import annotations

import hashlib
import weakref
import zlib

from gatekeeper.config import Config
from gatekeeper.fetching.content import readable
from gatekeeper.fetching.primer import PRIMER
from gatekeeper.robots import Policy, RobotsTxt

__all__ = ["Text", "Texts", "deflate", "digest_of", "inflate"]


def deflate(body: bytes) -> bytes:
    """A body as it is kept in memory while nobody asks: a fifth smaller than by plain zlib."""
    packer = zlib.compressobj(6, zlib.DEFLATED, -15, 8, zlib.Z_DEFAULT_STRATEGY, PRIMER)
    return packer.compress(body) + packer.flush()


def inflate(packed: bytes) -> bytes:
    """The body again."""
    unpacker = zlib.decompressobj(-15, PRIMER)
    return unpacker.decompress(packed) + unpacker.flush()


def digest_of(body: bytes) -> bytes:
    """What a body is known by in memory; the storage has a hash of its own."""
    return hashlib.blake2b(body, digest_size=32).digest()


class Text:
    """One distinct text: parsed, and with the policies compiled so far.

    The octets as they were fetched are not kept where the parsed text gives them back, which
    is all but always: the file is in memory once.
    """

    __slots__ = ("__weakref__", "_crlf", "_packed", "digest", "policies", "robots", "size")

    def __init__(
        self, digest: bytes, body: bytes, robots: RobotsTxt, packed: bytes | None = None
    ) -> None:
        self.digest = digest
        self.size = len(body)
        self.robots = robots
        self.policies: dict[str, Policy] = {}
        self._crlf = b"\r" in body
        self._packed = packed
        if packed is None and self._restored() != body:
            self._packed = deflate(body)  # a mark, tags, or the end of it went in parsing

    def packed(self) -> bytes:
        """The body as it is kept while nobody asks; packed once."""
        if self._packed is None:
            self._packed = deflate(self._restored())
        return self._packed

    def body(self) -> bytes:
        """The octets as they were fetched."""
        return self._restored() if self._packed is None else inflate(self._packed)

    def _restored(self) -> bytes:
        octets = self.robots.octets.encode("latin-1")
        return octets.replace(b"\n", b"\r\n") if self._crlf else octets


class Texts:
    """Every text in use, by its digest. One lives as long as some record holds it."""

    def __init__(self, config: Config) -> None:
        self._dialect = config.robots.dialect
        self._limit = config.fetch.max_body
        self._texts: weakref.WeakValueDictionary[bytes, Text] = weakref.WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._texts)

    def of(self, body: bytes, packed: bytes | None = None) -> Text:
        """The text with that body, parsed now unless it is in use already."""
        digest = digest_of(body)
        text = self._texts.get(digest)
        return self.add(self._read(digest, body, packed)) if text is None else text

    def read(self, body: bytes) -> Text:
        """Parse a body; touches nothing shared, so it may run in a thread."""
        return self._read(digest_of(body), body, None)

    def _read(self, digest: bytes, body: bytes, packed: bytes | None) -> Text:
        robots = RobotsTxt.parse(readable(body), dialect=self._dialect, limit=self._limit)
        return Text(digest, body, robots, packed)

    def add(self, text: Text) -> Text:
        """The one text with that body: this one, unless it is in use already."""
        return self._texts.setdefault(text.digest, text)
