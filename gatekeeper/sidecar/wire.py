"""What comes over the wire and what goes back: query strings, bodies, answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from email.utils import formatdate
from typing import Any, TypeVar, cast
from urllib.parse import unquote_plus

import msgspec
from aiohttp import HttpVersion11, web
from aiohttp.abc import AbstractStreamWriter

from gatekeeper.sidecar.problems import Problem
from gatekeeper.sidecar.routing import Glance

__all__ = [
    "JSON",
    "Nothing",
    "QuickAnswer",
    "decode",
    "encode",
    "json_response",
    "name_request",
    "quick_json",
    "quick_nothing",
    "read_at_once",
    "read_body",
    "read_query",
    "written",
]

JSON = "application/json"
BODY_TIMEOUT = 20.0
"""Seconds that a request's body may take (T9: slow-loris)."""
_JSON_HEADERS = {"Content-Type": JSON, "Server": "gatekeeper"}
_T = TypeVar("_T")
encode = msgspec.json.Encoder().encode


class Nothing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An empty object: a JSON body, even an empty one, keeps pages in a browser out (T4)."""


def json_response(value: Any, *, status: int = 200) -> web.Response:
    """A struct, or bytes that are JSON already, as an answer."""
    body = value if type(value) is bytes else encode(value)
    return web.Response(status=status, body=body, headers=_JSON_HEADERS)


def read_query(text: str, kind: type[_T]) -> _T:
    """A query string as a struct; raises Problem 400 for anything it doesn't know."""
    found: dict[str, str] = {}
    for pair in text.split("&"):
        if not pair:
            continue
        name, _, value = pair.partition("=")
        name, value = decode(name), decode(value)
        if name in found:
            # Two values for one name: two readers could take different ones.
            raise Problem(400, "bad-request", f"parameter {name[:40]!r} occurs twice")
        found[name] = value
    try:
        return msgspec.convert(found, kind, strict=False)
    except msgspec.ValidationError as error:
        raise Problem(400, "bad-request", f"query: {error}{_cut_off(found, kind)}") from None


def _cut_off(found: Mapping[str, str], kind: type) -> str:
    """The remedy, where parameters of ours may be what was cut off a URL at its own `&`."""
    known = {field.encode_name for field in msgspec.structs.fields(kind)}
    if "?" in found.get("url", "") and not found.keys() <= known:
        return "; if it belongs to the URL, percent-encode that: curl -G --data-urlencode url=..."
    return ""


def decode(text: str) -> str:
    """A name or value of a query string. Raises Problem 400 for what is no UTF-8."""
    if "%" in text:
        # The two that stand in every URL. What is left over is decoded as a whole: these
        # can't bring a new `%` about.
        text = text.replace("%3A", ":").replace("%2F", "/")
    if "%" not in text and "+" not in text:
        return text
    try:
        return unquote_plus(text, errors="strict")
    except UnicodeDecodeError:
        raise Problem(400, "bad-request", "query: not UTF-8") from None


class QuickAnswer:
    """An answer written in one piece, on a connection that stays open: JSON, or no body.

    A `web.Response` is made for every kind of answer; it and its headers cost more than a
    warm decision does. The head of this one is always the same but for a number and the
    date. It has what aiohttp's server asks of a response, and nothing else.
    """

    __slots__ = ("_body", "request_id", "status")

    keep_alive = True
    """The connection stays open: nobody asked otherwise (see `quick_json`)."""
    prepared = False

    def __init__(self, status: int, body: bytes) -> None:
        self.status = status
        self.request_id = ""
        """Of the request that it answers; set by who knows."""
        self._body = body

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter:
        """Write head and body at once."""
        writer = request.writer
        body = self._body
        await writer.write(written(self.status, body, self.request_id))
        # A client that asks on and does not read has to wait for itself.
        await writer.drain()
        return writer

    async def write_eof(self, data: bytes = b"") -> None:
        """Nothing is left to write."""


_JSON_HEAD = (
    b"\r\nServer: gatekeeper\r\nDate: %b\r\nX-Request-Id: %b\r\n"
    b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
)
_HEADS = {
    200: b"HTTP/1.1 200 OK" + _JSON_HEAD,
    201: b"HTTP/1.1 201 Created" + _JSON_HEAD,
}
# RFC 9110 section 8.6: no Content-Length with 204.
_NO_CONTENT = (
    b"HTTP/1.1 204 No Content\r\nServer: gatekeeper\r\nDate: %b\r\nX-Request-Id: %b\r\n\r\n"
)
_last_date: tuple[int, bytes] = (0, b"")


def _date() -> bytes:
    """The Date header, made once a second. Real time: it is what HTTP tells the client."""
    global _last_date  # noqa: PLW0603 - one clock, one text, for every connection
    now = int(time.time())
    if now != _last_date[0]:
        _last_date = (now, formatdate(now, usegmt=True).encode())
    return _last_date[1]


def written(status: int, body: bytes, request_id: str) -> bytes:
    """A whole answer, on a connection that stays open: JSON, or nothing with 204."""
    if status == 204:
        return _NO_CONTENT % (_date(), request_id.encode())
    return _HEADS[status] % (_date(), request_id.encode(), len(body)) + body


def name_request(response: web.StreamResponse | QuickAnswer, request_id: str) -> None:
    """Say in an answer that is not yet on its way which request it answers, and who does."""
    if isinstance(response, QuickAnswer):
        response.request_id = request_id
    elif not response.prepared:
        response.headers["X-Request-Id"] = request_id
        response.headers["Server"] = "gatekeeper"


def quick_json(request: web.BaseRequest, value: Any, *, status: int = 200) -> web.StreamResponse:
    """A struct, or bytes that are JSON already, as the answer to a request: by the short way
    where the request allows it."""
    body = value if type(value) is bytes else encode(value)
    if request.version == HttpVersion11 and request.keep_alive and request.method != "HEAD":
        return cast("web.StreamResponse", QuickAnswer(status, body))
    return json_response(body, status=status)


def quick_nothing(request: web.BaseRequest) -> web.StreamResponse:
    """204, by the short way where the request allows it."""
    if request.version == HttpVersion11 and request.keep_alive:
        return cast("web.StreamResponse", QuickAnswer(204, b""))
    return web.Response(status=204)


async def read_body(request: web.BaseRequest, kind: type[_T], *, limit: int) -> _T:
    """A JSON body as a struct. Raises Problem 413, 415 or 400.

    The content type must say JSON: a page in a browser can send anything else across
    origins without asking (T4). The size is bound while reading, not by what the
    Content-Length claims.
    """
    # As nearly everybody writes it; else the type is taken out of its parameters.
    if request.headers.get("Content-Type") != JSON and request.content_type != JSON:
        raise Problem(
            415,
            "media-type",
            f"the body must be {JSON}: send it with `Content-Type: {JSON}`, and {{}} where "
            "there is nothing to say",
        )
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise Problem(415, "media-type", "the body must be sent as it is, without an encoding")
    try:
        body = await _read(request, limit)
    except web.RequestPayloadError:
        raise Problem(400, "bad-request", "body: its framing is broken") from None
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Problem(400, "bad-request", f"body: {error}") from None


def read_at_once(glance: Glance, decoder: msgspec.json.Decoder[_T], *, limit: int) -> _T | None:
    """The same of a body that is all here; None for one that `read_body` must judge."""
    if glance.headers.get("Content-Type") != JSON or len(glance.body) > limit:
        return None
    try:
        return decoder.decode(glance.body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


async def _read(request: web.BaseRequest, limit: int) -> bytes:
    if (request.content_length or 0) > limit:
        raise _too_large(limit)
    if request.content.is_eof():  # the common case: it is all here
        body = request.content.read_nowait()
        if len(body) > limit:
            raise _too_large(limit)
        return body
    try:
        async with asyncio.timeout(BODY_TIMEOUT):
            return await _read_all(request, limit)
    except TimeoutError:
        raise Problem(408, "too-slow", f"the body took over {BODY_TIMEOUT:g} s") from None


async def _read_all(request: web.BaseRequest, limit: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    while part := await request.content.readany():
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        parts.append(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _too_large(limit: int) -> Problem:
    return Problem(413, "too-large", f"the body may have {limit} bytes at most")
