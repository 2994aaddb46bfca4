"""Where the records of a WARC file end, so that what a killed process left can be told
from what is damaged: only the former may be cut off."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import IO

__all__ = ["Damaged", "is_compressed", "record_ends"]

_MAGIC = b"WARC/1."
_GZIP = b"\x1f\x8b"
_END = b"\r\n\r\n"
_BLOCK = 16 * 1024
"""Bytes read at once; what they unpack to is at most a thousand times as much."""
_LONGEST_HEADER = 1024 * 1024


class Damaged(ValueError):
    """What stands at `offset` is neither a record nor the beginning of one."""

    def __init__(self, offset: int) -> None:
        super().__init__(f"damaged at byte {offset:,}")
        self.offset = offset


def is_compressed(file: IO[bytes]) -> bool:
    """Whether every record of it is a gzip member."""
    file.seek(0)
    return file.read(len(_GZIP)) == _GZIP


def record_ends(file: IO[bytes], offset: int = 0) -> Iterator[int]:
    """The end of each whole record from `offset` on, where one must begin.

    What follows the last one, if anything, is the beginning of a record that the file is too
    short for. Raises Damaged where it is something else.
    """
    return (_member_ends if is_compressed(file) else _plain_ends)(file, offset)


def _member_ends(file: IO[bytes], offset: int) -> Iterator[int]:
    file.seek(offset)
    begin, member = offset, zlib.decompressobj(31)
    left = b""
    while block := left or file.read(_BLOCK):
        try:
            member.decompress(block)
        except zlib.error:
            raise Damaged(begin) from None
        left = member.unused_data
        if member.eof:
            begin, member = file.tell() - len(left), zlib.decompressobj(31)
            yield begin
            file.seek(begin + len(left))  # the caller may have read elsewhere


def _plain_ends(file: IO[bytes], offset: int) -> Iterator[int]:
    while (content := _content(file, offset)) is not None:
        file.seek(content)
        end = file.read(len(_END))
        if end != _END:
            if _END.startswith(end):
                return
            raise Damaged(offset)
        offset = content + len(_END)
        yield offset


def _content(file: IO[bytes], offset: int) -> int | None:
    """The end of the content of the record at `offset`; None where the file ends before."""
    file.seek(offset)
    line = file.readline(_LONGEST_HEADER)
    if not line.startswith(_MAGIC[: len(line)]):
        raise Damaged(offset)
    length = None
    while line.strip():
        if not line.endswith(b"\n"):
            return None
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length" and value.strip().isdigit():
            length = int(value)
        line = file.readline(_LONGEST_HEADER)
    if not line.endswith(b"\n"):
        return None
    if length is None:
        raise Damaged(offset)
    return file.tell() + length
