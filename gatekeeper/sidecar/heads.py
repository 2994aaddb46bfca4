"""Heads of requests that were parsed before. Optional speed: see `speedups`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from aiohttp import HttpVersion11


class _ParsedHead(NamedTuple):
    """What aiohttp parsed from header lines, for requests with exactly the same lines."""

    headers: Mapping[str, str]
    length: int
    """Length of the body in octets."""


class HeadCache:
    """Reads requests whose header lines were parsed before, on any connection.

    A client sends the same header lines again and again, and parsing them is a third of the cost
    of a warm check. Optional speed: see `speedups`.

    aiohttp's parser reads the lines the first time. Here only a request line of the usual form is
    read, and only a body of the length that the lines state.
    """

    def __init__(self, *, max_line: int) -> None:
        """`max_line`: the maximum length of a request line, in octets."""
        self._max_line = max_line
        self._known: dict[bytes, _ParsedHead] = {}

    def learn(self, data: bytes, message: Any, length: int) -> None:
        """Remember what aiohttp parsed from `data`; see `InlineReader.learn`."""
        start, end = data.find(b"\r\n"), data.find(_END)
        if not 0 < end - start <= _MAX_HEAD_OCTETS or not is_plain(message):
            return
        if _REQUEST_LINE(data, 0, start) is None:
            return
        if len(self._known) >= _MAX_HEADS:
            self._known.clear()
        self._known[data[start:end]] = _ParsedHead(message.headers, length)

    def read(self, data: bytes) -> tuple[str, str, Mapping[str, str], bytes] | None:
        """Return method, target, headers and body of the request in `data`.

        Return None if aiohttp has to parse it.
        """
        start, end = data.find(b"\r\n"), data.find(_END)
        known = self._known.get(data[start:end])
        if known is None or len(data) != end + 4 + known.length or start > self._max_line:
            return None
        request_line = _REQUEST_LINE(data, 0, start)
        if request_line is None:
            return None
        method, target = request_line.groups()
        return method.decode(), target.decode(), known.headers, data[end + 4 :]


_END = b"\r\n\r\n"
_REQUEST_LINE = re.compile(rb"(GET|POST) (/[!\"$-~]*) HTTP/1\.1").fullmatch
"""The usual request line: RFC 9112 section 3, with a path and query as its target."""
_MAX_HEADS = 1024
_MAX_HEAD_OCTETS = 2048


def is_plain(message: Any) -> bool:
    """Return whether a parsed request keeps its connection open and has a plain body."""
    return not (
        message.should_close
        or message.version != HttpVersion11
        or message.upgrade
        or message.compression
        or message.chunked
    )
