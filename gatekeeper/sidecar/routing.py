"""Routes, requests and responses: what every handler of the sidecar is built from.

Errors are problem documents (RFC 9457).
"""

from __future__ import annotations

import asyncio
import http
import inspect
import json
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Final, Generic, NamedTuple, TypeVar, get_args
from urllib.parse import unquote, unquote_plus

import msgspec
from aiohttp import HttpVersion11, StreamReader, web

from gatekeeper.client import wire
from gatekeeper.decision import Decision
from gatekeeper.sidecar.inline import InlineCall

_T = TypeVar("_T")
_S = TypeVar("_S")
"""The service that handlers get: it stands above this module."""


class Role(StrEnum):
    """What a token may be used for. Each route lists the roles of which it needs one."""

    CHECK = "check"
    """Ask about URLs: check, explain, robots, history."""
    CRAWL = "crawl"
    """Take leases and fetch pages; `check` as well."""
    ADMIN = "admin"
    """See and control every host, reload the configuration; `check` as well."""


ANY_ROLE: Final = frozenset(Role)


@dataclass(slots=True, eq=False)
class Call:
    """One request on its way through the service."""

    request: web.BaseRequest
    id: str
    client: str
    query: str
    """The raw query string."""
    params: Mapping[str, str]
    """The values of the `{...}` in the route's path, decoded."""
    max_body: int
    """Maximum octets of a JSON body."""
    where: str = "unmatched"
    """The path of the route, under which the request is counted."""
    _ask: Callable[[], str] | None = None
    refused: Problem | None = None
    """Why the client may not have the answer any more."""
    streams: bool = False
    """Whether the answer is a stream, for which `drain` waits."""
    goodbye: float = 0.0
    """Seconds that the handler has to end the answer by itself once `refused` is set."""

    def admit(self, ask: Callable[[], str]) -> None:
        """Set `client` to the name that `ask` returns.

        `ask` raises Problem if the client may not have the answer. `permitted` calls it again.
        """
        self.client, self._ask = ask(), ask

    def parameters(self, kind: type[_T]) -> _T:
        """Read the query string into a struct. Raises Problem 400."""
        return read_query(self.query, kind)

    async def body(self, kind: type[_T]) -> _T:
        """Read the JSON body into a struct. Raises Problem 400, 408, 413 or 415."""
        return await read_body(self.request, kind, limit=self.max_body)

    def permitted(self) -> bool:
        """Ask again during a long answer: a token, a role or a session may have ended.

        Set `refused` and return False if the client may not have the answer any more.
        """
        self.refused = None
        try:
            if self._ask is not None:
                self._ask()
        except Problem as problem:
            self.refused = problem
        return self.refused is None


METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"))
"""Methods that have their own label in metrics and traces: clients may invent others."""
FORWARD_AUTH = "/v1/forward-auth"
ANY = "*"
"""The method of a route that accepts every method."""

CHECK = frozenset({Role.CHECK})
"""Roles of a route that any token may use, since every role includes this one."""
CRAWL = frozenset({Role.CRAWL})
ADMIN = frozenset({Role.ADMIN})
CRAWL_OR_ADMIN = CRAWL | ADMIN

Handler = Callable[[_S, Call], Awaitable[web.StreamResponse]]
InlineHandler = Callable[[_S, InlineCall], bytes | None]
"""Returns the body of the successful response, or None if that would take waiting. If it raises, it
does so before it has any effect."""


@dataclass(frozen=True, slots=True)
class Route(Generic[_S]):
    """A method and a path, with its handler and its description for `/openapi.json`.

    `query` and `body` are the structs that requests are read into. `answers` maps each status
    that is not a problem document to its body (None: no body, a str: a media type), `events` maps
    each kind of server-sent event to its data.
    """

    method: str
    path: str
    handler: Handler[_S]
    query: type | None = None
    body: type | None = None
    answers: Mapping[int, Any] = field(default_factory=dict)
    events: Mapping[str, type] = field(default_factory=dict)
    problems: tuple[int, ...] = ()
    """Statuses of its problem documents, beyond those that every query or body may cause."""
    body_required: bool = True
    needs: frozenset[Role] = ADMIN
    """A token must have one of these roles."""
    probe: bool = False
    """Whether it is answered without a token and without a Host check: it reveals nothing."""
    inline: InlineHandler[_S] | None = None
    headers: tuple[str, ...] = ()
    """Headers of the successful response that `/openapi.json` lists."""
    relays: bool = False
    """Whether a successful response has the status that a site answered with."""

    operation: str = field(init=False)
    """Its `operationId` in `/openapi.json`, after which generated clients name the function that
    calls it: the name of the handler in camel case."""

    status: int = field(init=False)
    """Status of the successful response."""

    no_query: bool = field(init=False)
    """Whether a query string is refused: on the API's paths unknown parameters are mistakes."""

    def __post_init__(self) -> None:
        first, *others = getattr(self.handler, "__name__", "").split("_")
        object.__setattr__(self, "operation", first + "".join(map(str.capitalize, others)))
        object.__setattr__(self, "status", next(iter(self.answers), 200))
        in_api = self.path.startswith("/v1/") and self.method != ANY
        object.__setattr__(self, "no_query", in_api and self.query is None)

    @property
    def description(self) -> str:
        """What it does, for `/openapi.json`: the handler's docstring."""
        return inspect.getdoc(self.handler) or ""

    @property
    def summary(self) -> str:
        """The first sentence of the description."""
        return " ".join(self.description.split()).partition(". ")[0].removesuffix(".") + "."


class Routes(list[Route[_S]]):
    """The routes of one module, in their order: each stands above its handler."""

    def __init__(self, **common: Any) -> None:
        """`common`: what all of them have, unless they say otherwise; see `Route`."""
        super().__init__()
        self._common = common

    def add(self, method: str, path: str, **options: Any) -> Callable[[Handler[_S]], Handler[_S]]:
        """Decorate a handler, to make it a route; `options` are the other fields of `Route`."""

        def decorate(handler: Handler[_S]) -> Handler[_S]:
            self.append(Route(method, path, handler, **self._common | options))
            return handler

        return decorate


_NO_PARAMETERS: Mapping[str, str] = {}


_PARAMETER = re.compile(r"\\\{(\w+)(\\\*)?\\\}")
"""A `{name}` or `{name*}` in an escaped path."""


def _pattern(path: str) -> re.Pattern[str]:
    """Return the pattern of the paths that a route's path with parameters stands for."""
    return re.compile(
        _PARAMETER.sub(lambda one: f"(?P<{one[1]}>{'.*' if one[2] else '[^/]+'})", re.escape(path)),
        re.DOTALL,
    )


class Router(Generic[_S]):
    """Finds the route of a path: one look-up of the exact path, else a search of the patterns.

    A `{...}` matches one segment, a `{...*}` the rest of the path.
    """

    def __init__(
        self, routes: tuple[Route[_S], ...], *, hint: str = "/openapi.json lists all"
    ) -> None:
        """`hint`: what the answer to an unknown path says about the known ones."""
        self.routes = routes
        self._hint = hint
        self._exact: dict[str, dict[str, Route[_S]]] = {}
        self._patterns: dict[re.Pattern[str], dict[str, Route[_S]]] = {}
        for route in routes:
            if "{" in route.path:
                table = self._patterns.setdefault(_pattern(route.path), {})
            else:
                table = self._exact.setdefault(route.path, {})
            table[route.method] = route

    def find(self, method: str, path: str) -> tuple[Route[_S], Mapping[str, str]]:
        """Return the route and the path parameters of a raw path. Raises Problem 404 or 405."""
        methods = self._exact.get(path)
        params = _NO_PARAMETERS
        if methods is None:
            methods, params = self._by_pattern(path)
        route = methods.get(method) or methods.get("GET" if method == "HEAD" else ANY)
        route = route or methods.get(ANY)
        if route is None:
            allow = ", ".join(sorted({*methods, "HEAD"} if "GET" in methods else methods))
            detail = f"this path accepts only {allow}"
            raise Problem(405, "method", detail, headers={"Allow": allow})
        return route, params

    def _by_pattern(self, path: str) -> tuple[dict[str, Route[_S]], Mapping[str, str]]:
        for pattern, methods in self._patterns.items():
            if (found := pattern.fullmatch(path)) is not None:
                params = found.groupdict()
                return methods, {n: unquote(params[n]) for n in params} if "%" in path else params
        raise Problem(404, "not-found", f"there is nothing at this path; {self._hint}")


# --- Errors as problem documents (RFC 9457).


class Holder(NamedTuple):
    """The lease that occupies a host, as far as the waiting client may know about it."""

    since: datetime
    until: datetime
    client: str | None

    def __str__(self) -> str:
        owner = f" of {self.client}" if self.client is not None else ""
        return (
            f"; a lease{owner} holds the host since {self.since:%Y-%m-%dT%H:%M:%SZ}, "
            f"until {self.until:%Y-%m-%dT%H:%M:%SZ} at the latest"
        )


@dataclass(eq=False, repr=False)
class Problem(Exception):
    """An error that ends a request; `Service` answers with its problem document.

    `kind` identifies the problem for programs (the end of `type`), `detail` explains it to people.
    `wait` is in how many seconds it may be over, for Retry-After.
    """

    status: int
    kind: str
    detail: str
    _: KW_ONLY
    headers: Mapping[str, str] = field(default_factory=dict)
    wait: float | None = None
    decision: Decision | None = None
    most: float | None = None
    held: Holder | None = None
    why: str | None = None

    def document(self, request_id: str | None = None) -> wire.ProblemDocument:
        """Return the body of the response to the request with that id."""
        return wire.ProblemDocument(
            type=wire.PROBLEM_TYPE + self.kind,
            title=http.HTTPStatus(self.status).phrase,
            status=self.status,
            detail=self.detail,
            instance=f"urn:gatekeeper:request:{request_id}" if request_id else None,
            decision=self.decision,
            most=self.most,
            held_since=self.held and self.held.since,
            held_until=self.held and self.held.until,
            held_by=self.held and self.held.client,
            why=self.why,
        )

    def response(self, request_id: str | None = None) -> web.Response:
        """Return the response to the request with that id."""
        headers = {"Content-Type": wire.PROBLEM_JSON, "Server": "gatekeeper", **wire.SANDBOXED}
        headers |= self.headers
        if self.wait is not None:
            headers["Retry-After"] = wire.retry_after(self.wait)
        body = msgspec.json.encode(self.document(request_id))
        return web.Response(status=self.status, body=body, headers=headers)


# --- Reading query strings and bodies, and writing responses.


JSON = "application/json"
OCTETS = "application/octet-stream"
"""In `/openapi.json`: the body that a site sent, with the site's own Content-Type."""
BODY_TIMEOUT = 20.0
"""Seconds that reading a request's body may take (T9: slow-loris)."""
_JSON_HEADERS = {"Content-Type": JSON, "Server": "gatekeeper"}


class PageQuery(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """The query parameters that select a page of a list."""

    page: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 1
    per_page: Annotated[int, msgspec.Meta(ge=1, le=200)] = 50

    @property
    def first(self) -> int:
        """The index of the page's first item in the list, from 0."""
        return (self.page - 1) * self.per_page

    def pages(self, total: int) -> int:
        """Return the number of pages that `total` items fill, at least one."""
        return max(1, -(-total // self.per_page))


class EmptyObject(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An empty object. Requiring JSON, even empty, keeps out pages in a browser (T4)."""


def json_response(value: Any, *, status: int = 200) -> web.Response:
    """Return a response with a struct, or with bytes that are JSON already, as its body."""
    body = value if type(value) is bytes else wire.encode(value)
    return web.Response(status=status, body=body, headers=_JSON_HEADERS)


def read_query(text: str, kind: type[_T]) -> _T:
    """Read a query string into a struct. Raises Problem 400, also for unknown parameters."""
    fields: dict[str, str] = {}
    for pair in filter(None, text.split("&")):
        name, _, value = pair.partition("=")
        name, value = decode(name), decode(value)
        if name in fields:
            # Two values for one name: two readers could take different ones.
            raise Problem(400, "bad-request", f"parameter {name[:40]!r} occurs twice")
        fields[name] = value
    return convert(fields, kind, "query")


def convert(fields: Mapping[str, str], kind: type[_T], what: str) -> _T:
    """Convert the fields of a query or a form into a struct. Raises Problem 400."""
    try:
        return msgspec.convert(fields, kind, strict=False)
    except msgspec.ValidationError as error:
        remedy = _remedy(error, kind, fields.get("url", ""))
        raise Problem(400, "bad-request", f"{what}: {error}{remedy}") from None


def _remedy(error: msgspec.ValidationError, kind: type, url: str = "") -> str:
    """Return advice about an unknown name or value: those that `kind` knows.

    Unknown parameters of a query may be the rest of its `url`, if that was not quoted.
    """
    text = str(error)
    types = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
    if text.startswith("Object contains unknown field"):
        known = ", ".join(f"`{name}`" for name in types) or "none"
        quote = "if it belongs to the URL, percent-encode that: curl -G --data-urlencode url=..."
        return f"; known: {known}; {quote}" if "?" in url else f"; known: {known}"
    if text.startswith("Invalid enum value"):
        choices = _choices(types.get(text.rpartition("$.")[2].rstrip("`")))
        return f"; give one of {', '.join(choices)}" if choices else ""
    return ""


def _choices(kind: Any) -> list[str]:
    """Return the strings that a Literal, or a union of Literals, accepts."""
    return [kind] if isinstance(kind, str) else [s for arg in get_args(kind) for s in _choices(arg)]


def decode(text: str) -> str:
    """Decode a name or value of a query string. Raises Problem 400 if it is not UTF-8."""
    if "%" in text:
        # The two sequences of every URL first, since `replace` is fast. The rest is decoded
        # afterwards: replacing these can't produce a new `%`.
        text = text.replace("%3A", ":").replace("%2F", "/")
    if "%" not in text and "+" not in text:
        return text
    try:
        return unquote_plus(text, errors="strict")
    except UnicodeDecodeError:
        raise Problem(400, "bad-request", "query: not UTF-8") from None


_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")
"""Half of a surrogate pair, as JSON writes it. Also matches the first half of a whole pair."""


async def read_body(request: web.BaseRequest, kind: type[_T], *, limit: int) -> _T:
    """Read a JSON body into a struct. Raises Problem 400, 408, 413 or 415.

    The content type must be JSON: a page in a browser can send any other type across
    origins without asking (T4). The size is limited while reading, not by what the
    Content-Length claims.
    """
    # The usual spelling first; `content_type` parses the header.
    if request.headers.get("Content-Type") != JSON and request.content_type != JSON:
        detail = f"a body needs `Content-Type: {JSON}`, and {{}} where there is nothing to say"
        raise Problem(415, "media-type", detail)
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise Problem(415, "media-type", "the body must be sent as it is, without an encoding")
    body = await read_octets(request, limit)
    try:
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.DecodeError:
            if (fields := _decode_with_surrogates(body)) is None:
                raise
            return msgspec.convert(fields, type=kind)
    except msgspec.ValidationError as error:
        detail = f"{error}{_remedy(error, kind)}"
    except UnicodeDecodeError:
        detail = "not UTF-8"
    except msgspec.DecodeError as error:
        detail = str(error) if body else "it is empty; send {} if there is nothing to say"
    except Problem:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a decoder raises, the body is the cause
        detail = f"it can't be read ({error})"
    raise Problem(400, "bad-request", f"body: {detail}")


def _decode_with_surrogates(body: bytes) -> dict[str, object] | None:
    r"""Decode a body whose URLs hold a lone surrogate such as `\ud800`. Return None if none
    does, or if the body is not JSON.

    JSON can represent strings that are not valid Unicode (RFC 8259 section 8.2), and json.dumps
    and JSON.stringify write them for URLs of broken pages. Such a URL is refused by itself, not
    with its whole batch; in any other field it is an error, for which Problem 400 is raised.
    """
    if not _SURROGATE.search(body):
        return None
    name = ""
    try:
        fields = json.loads(body, parse_constant=int)  # `int` raises ValueError for NaN, Infinity
        if not isinstance(fields, dict):
            return None
        for name, value in fields.items():
            if name not in ("url", "urls"):
                json.dumps({name: value}, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        detail = f"body: half of a character (a lone surrogate) in {name[:40]!r}; write it whole"
        raise Problem(400, "bad-request", detail) from None
    except (ValueError, RecursionError):
        return None
    return fields


async def read_octets(request: web.BaseRequest, limit: int) -> bytes:
    """Read the body of a request. Raises Problem 400, 408 or 413."""
    if (request.content_length or 0) > limit:
        raise _too_large(limit)
    try:
        if request.content.is_eof():  # the common case: all of it has arrived
            body = request.content.read_nowait()
        else:
            async with asyncio.timeout(BODY_TIMEOUT):
                waits = request.headers.get("Expect", "").lower() == "100-continue"
                if waits and request.version == HttpVersion11:  # RFC 9110 section 10.1.1
                    # The client waits for it, and HTTP/1.0 does not know it. It begins no response.
                    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                    request.writer.output_size = 0
                body = await _read_all(request.content, limit)
    except TimeoutError:
        raise Problem(408, "too-slow", f"the body took over {BODY_TIMEOUT:g} s") from None
    except web.RequestPayloadError:
        raise Problem(400, "bad-request", "body: its framing is broken") from None
    if len(body) > limit:
        raise _too_large(limit)
    return body


async def _read_all(content: StreamReader, limit: int) -> bytes:
    """Return the whole body, or its beginning as soon as that exceeds `limit` octets."""
    parts: list[bytes] = []
    size = 0
    while size <= limit and (part := await content.readany()):
        size += len(part)
        parts.append(part)
    return b"".join(parts)


def _too_large(limit: int) -> Problem:
    return Problem(413, "too-large", f"the body may have {limit} bytes at most")
