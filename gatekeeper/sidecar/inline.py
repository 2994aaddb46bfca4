"""Inline responses: written as soon as their request is read, where nothing has to be waited for.

aiohttp makes a parser's payload, a task, a request and a writer for each request, which is two
thirds of the cost of a warm check. Here a *plain* request is read from the octets that a connection
received, and answered in the same call. All others, and every error, are left to aiohttp.
"""

from __future__ import annotations

import functools
import math
import re
import time
from collections.abc import Mapping
from email.utils import formatdate
from typing import Final, NamedTuple, TypeVar

import msgspec

from gatekeeper.library_internals import plain_head

_T = TypeVar("_T")
_END: Final = b"\r\n\r\n"
_JSON: Final = "application/json"
# RFC 9112 section 3, with a path and query as the target, and section 5. Lines end with CR LF
# alone, so that no lenient parser finds the end of a head elsewhere.
_REQUEST_LINE = re.compile(rb"(GET|HEAD|POST|PUT|DELETE) (/[!\"$-~]*) HTTP/1\.1").fullmatch
_FIELD_LINES = re.compile(rb"(?:\r\n[!#-'*+.^-z|~A-Z0-9-]+:[\t -~\x80-\xff]*)*").fullmatch
_MAX_FIELDS: Final = 4_096
"""Maximum octets of the field lines of a plain request."""


class NotPlainError(Exception):
    """Only aiohttp can read the request, or tell what is wrong with it."""


class Request(NamedTuple):
    """A plain request, or its beginning."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes
    """The body as far as it was received."""
    missing: int
    """Octets of the body that were not received."""


def read(data: bytes, max_line: int) -> Request | None:
    """Read the plain request that `data` begins with, and that nothing follows.

    Return None while its head is incomplete. Raises NotPlainError for any other request.
    `max_line`: maximum octets of a line.
    """
    start, end = data.find(b"\r\n"), data.find(_END)
    if end < 0 and len(data) <= max_line + _MAX_FIELDS:
        return None
    line, size = _REQUEST_LINE(data, 0, start), end - start
    if line is None or start > max_line or size < 0 or size > max_line or size > _MAX_FIELDS:
        raise NotPlainError
    known, body = read_fields(data[start:end]), data[end + 4 :]
    if known is None or (missing := known[1] - len(body)) < 0:
        raise NotPlainError
    method, target = line.groups()
    return Request(method.decode(), target.decode(), known[0], body, missing)


@functools.lru_cache(maxsize=512)
def read_fields(lines: bytes) -> tuple[Mapping[str, str], int] | None:
    """Return the header that aiohttp parses from field lines, and the length of the body.

    Clients send the same lines again and again: parsing them is a third of the cost of a check.
    """
    return plain_head(b"POST / HTTP/1.1" + lines + _END) if _FIELD_LINES(lines) else None


class RequestReader:
    """Knows where the requests of one connection begin, as long as all of them are plain."""

    def __init__(self, max_line: int) -> None:
        self._max_line = max_line
        self._head = b""
        """An incomplete head."""
        self._missing: float = 0
        """Octets that the current request lacks; infinite once a request was not plain."""

    def read(self, data: bytes) -> Request | None:
        """Take received data. Return the request if `data` is exactly one, else None."""
        if self._missing:
            self._missing = self._missing - len(data) if len(data) <= self._missing else math.inf
            return None
        try:
            request = read(self._head + data, self._max_line)
        except NotPlainError:
            self._head, self._missing = b"", math.inf
            return None
        if request is None:
            self._head += data
            return None
        whole = not self._head and not request.missing
        self._head, self._missing = b"", request.missing
        return request if whole else None


class InlineCall(msgspec.Struct, gc=False):
    """A request that may be answered inline; see `Call`."""

    request: Request
    query: str
    params: Mapping[str, str]
    client: str
    id: str


def read_inline_body(call: InlineCall, kind: type[_T], *, limit: int) -> _T:
    """Read a JSON body. Raises NotPlainError if `read_body` has to judge it."""
    headers, body = call.request.headers, call.request.body
    if headers.get("Content-Type") != _JSON or "Content-Encoding" in headers or len(body) > limit:
        raise NotPlainError
    try:
        return msgspec.json.decode(body, type=kind)
    except Exception as error:  # `read_body` tells the client what is wrong
        raise NotPlainError from error


_STATUS: Final = {200: "200 OK", 201: "201 Created", 204: "204 No Content"}


def response_octets(status: int, body: bytes, request_id: str) -> bytes:
    """Return a whole response on a connection that stays open; `body` is JSON."""
    head = f"{_head(status, int(time.time()))}{request_id}\r\n"  # real time: HTTP clients read it
    if status != 204:  # RFC 9110 section 8.6: no Content-Length with it
        head += f"Content-Type: {_JSON}\r\nContent-Length: {len(body)}\r\n"
    return f"{head}\r\n".encode() + body


@functools.lru_cache(maxsize=len(_STATUS))
def _head(status: int, now: int) -> str:
    date = formatdate(now, usegmt=True)
    return f"HTTP/1.1 {_STATUS[status]}\r\nServer: gatekeeper\r\nDate: {date}\r\nX-Request-Id: "
