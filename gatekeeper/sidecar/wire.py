"""What comes over the wire and what goes back: query strings, bodies, answers."""

from __future__ import annotations

from typing import Any, TypeVar
from urllib.parse import unquote_plus

import msgspec
from aiohttp import web

from gatekeeper.sidecar.problems import Problem

__all__ = ["JSON", "Nothing", "json_response", "read_body", "read_query"]

JSON = "application/json"
_JSON_HEADERS = {"Content-Type": JSON, "X-Content-Type-Options": "nosniff"}
_T = TypeVar("_T")
_encoder = msgspec.json.Encoder()


class Nothing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An empty object: a JSON body, even an empty one, keeps pages in a browser out (T4)."""


def json_response(value: Any, *, status: int = 200) -> web.Response:
    """A struct, or bytes that are JSON already, as an answer."""
    body = value if type(value) is bytes else _encoder.encode(value)
    return web.Response(status=status, body=body, headers=_JSON_HEADERS)


def read_query(text: str, kind: type[_T]) -> _T:
    """A query string as a struct; raises Problem 400 for anything it doesn't know."""
    found: dict[str, str] = {}
    for pair in text.split("&"):
        if not pair:
            continue
        name, _, value = pair.partition("=")
        name, value = _decode(name), _decode(value)
        if name in found:
            # Two values for one name: two readers could take different ones.
            raise Problem(400, "bad-request", f"parameter {name[:40]!r} occurs twice")
        found[name] = value
    try:
        return msgspec.convert(found, kind, strict=False)
    except msgspec.ValidationError as error:
        raise Problem(400, "bad-request", f"query: {error}") from None


def _decode(text: str) -> str:
    if "%" not in text and "+" not in text:
        return text
    try:
        return unquote_plus(text, errors="strict")
    except UnicodeDecodeError:
        raise Problem(400, "bad-request", "query: not UTF-8") from None


async def read_body(request: web.BaseRequest, kind: type[_T], *, limit: int) -> _T:
    """A JSON body as a struct. Raises Problem 413, 415 or 400.

    The content type must say JSON: a page in a browser can send anything else across
    origins without asking (T4). The size is bound while reading, not by what the
    Content-Length claims.
    """
    if request.content_type != JSON:
        raise Problem(415, "media-type", f"the body must be {JSON}")
    body = await _read(request, limit)
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Problem(400, "bad-request", f"body: {error}") from None


async def _read(request: web.BaseRequest, limit: int) -> bytes:
    if (request.content_length or 0) > limit:
        raise _too_large(limit)
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
