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
    """What a body is known by, in memory and in storage."""
    return hashlib.sha256(body).digest()


class Text:
    """One distinct text: compressed, parsed, and with the policies compiled so far."""

    __slots__ = ("__weakref__", "digest", "packed", "policies", "robots", "size")

    def __init__(self, digest: bytes, body: bytes, packed: bytes, robots: RobotsTxt) -> None:
        self.digest = digest
        self.size = len(body)
        self.packed = packed
        self.robots = robots
        self.policies: dict[str, Policy] = {}

    def body(self) -> bytes:
        """The octets as they were fetched."""
        return inflate(self.packed)


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
        text = self._texts.get(digest_of(body))
        return self.add(self.read(body, packed)) if text is None else text

    def read(self, body: bytes, packed: bytes | None = None) -> Text:
        """Parse a body; touches nothing shared, so it may run in a thread."""
        robots = RobotsTxt.parse(readable(body), dialect=self._dialect, limit=self._limit)
        return Text(digest_of(body), body, deflate(body) if packed is None else packed, robots)

    def add(self, text: Text) -> Text:
        """The one text with that body: this one, unless it is in use already."""
        return self._texts.setdefault(text.digest, text)
