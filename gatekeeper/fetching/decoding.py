"""Undoing a Content-Encoding with a bound on what comes out (T9, HTTP-14).

The body is decoded here and not by the HTTP client, because the cap stands on decoded
octets, and a bomb is known by what it grew to for what it cost.
"""

from __future__ import annotations

import zlib
from typing import Final

__all__ = ["BadEncoding", "Decoder"]

_BOMB_FROM: Final = 65_536
_BOMB_RATIO: Final = 100
_GZIP_MAGIC: Final = 0x1F
_FIRST_STEP: Final = 64
"""Octets of a further member that zlib is given at first; an empty one has 20."""
_KNOWN: Final = frozenset({"", "identity", "gzip", "x-gzip", "deflate"})


class BadEncoding(Exception):
    """The body is not what its Content-Encoding says, or is a bomb (row 27)."""


class Decoder:
    """Decodes one body piece by piece; `identity`, `gzip` and `deflate`.

    >>> decoder = Decoder("identity")
    >>> decoder.feed(b"User-agent: *", 4)
    b'User'
    """

    __slots__ = (
        "_consumed",
        "_ended",
        "_gzip",
        "_padding",
        "_plain",
        "_produced",
        "_step",
        "_unpacker",
    )

    def __init__(self, encoding: str) -> None:
        """Raises BadEncoding for an encoding that we never asked for."""
        name = encoding.strip().lower()
        if name not in _KNOWN:
            raise BadEncoding(f"unknown Content-Encoding {encoding[:40]!r}")
        self._gzip = name.endswith("gzip")
        self._plain = not name or name == "identity"
        self._unpacker: zlib._Decompress | None = None
        self._ended = False
        self._padding = False
        self._step = _FIRST_STEP
        self._consumed = 0
        self._produced = 0

    def feed(self, data: bytes, room: int) -> bytes:
        """The next octets decoded, no more than `room` of them (at least 1).

        Beyond `room` nothing is kept: the caller stops there. Raises BadEncoding.
        """
        if self._plain:
            return data[:room]
        out = []
        view = memoryview(data)
        at, size = 0, len(data)
        while at < size and room > 0 and not self._padding:
            step = size - at if not self._ended else min(size - at, self._step)
            piece, taken = self._unpack(view[at : at + step], room)
            out.append(piece)
            room -= len(piece)
            at += taken
        return b"".join(out)

    def _unpack(self, data: memoryview, room: int) -> tuple[bytes, int]:
        """The octets that come of the beginning of `data`, and how much of it that was.

        zlib copies what it does not use, so of a further member it is given little at first,
        and twice as much each time that was not its end: many small members cost no more than
        one that is as long as all of them.
        """
        if self._unpacker is None:
            # gzip may go on with another member; what else follows an end is padding.
            if self._ended and not (self._gzip and data[0] == _GZIP_MAGIC):
                self._padding = True
                return b"", len(data)
            self._unpacker = zlib.decompressobj(self._window(data))
        unpacker = self._unpacker
        try:
            piece = unpacker.decompress(data, room)
        except zlib.error as error:
            raise BadEncoding(str(error)) from error
        rest = unpacker.unused_data if unpacker.eof else unpacker.unconsumed_tail
        taken = len(data) - len(rest)
        self._consumed += taken
        self._produced += len(piece)
        if self._produced > _BOMB_FROM and self._produced > _BOMB_RATIO * self._consumed:
            raise BadEncoding(f"{self._produced} octets out of {self._consumed}: a bomb")
        if unpacker.eof:
            self._unpacker = None
            self._ended = True
            self._step = _FIRST_STEP
        else:
            self._step *= 2
        return piece, taken

    def _window(self, data: memoryview) -> int:
        if self._gzip:
            return 16 + zlib.MAX_WBITS
        # "deflate" is zlib's format by the text and a bare stream by old custom.
        return zlib.MAX_WBITS if data[0] & 0x0F == 8 else -zlib.MAX_WBITS

    def finish(self) -> None:
        """The body has ended. Raises BadEncoding if the encoding had not."""
        if self._unpacker is not None:
            raise BadEncoding("the encoded stream ends in the middle")
