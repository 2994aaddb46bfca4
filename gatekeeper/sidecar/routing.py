"""One table of routes: for dispatch, for `/openapi.json` and for the list at `/`."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import msgspec
from aiohttp import web

from gatekeeper.sidecar.auth import Role
from gatekeeper.sidecar.problems import Problem

if TYPE_CHECKING:
    from gatekeeper.sidecar.app import Service

__all__ = [
    "ANY",
    "CHECK",
    "CRAWL",
    "CRAWL_OR_ADMIN",
    "METHODS",
    "Call",
    "Glance",
    "Handler",
    "Route",
    "Router",
]


@dataclass(slots=True)
class Call:
    """One request on its way through the service."""

    request: web.BaseRequest
    id: str
    client: str
    query: str
    """The raw query string."""
    params: Mapping[str, str]
    """What stood in the `{...}` of the path, decoded."""


class Glance(msgspec.Struct, gc=False):
    """What is looked at to answer a request at once; see `Call`."""

    headers: Mapping[str, str]
    body: bytes
    query: str
    params: Mapping[str, str]
    client: str
    id: str


METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"))
"""Those that are told apart in counters and traces: a client may invent others."""
ANY = "*"
"""As a route's method: whatever comes."""

CHECK = frozenset({Role.CHECK})
"""Needs of a route that tells what may be asked of anybody: every role includes this one."""
CRAWL = frozenset({Role.CRAWL})
CRAWL_OR_ADMIN = frozenset({Role.CRAWL, Role.ADMIN})

Handler = Callable[["Service", Call], Awaitable[web.StreamResponse]]
AtOnce = Callable[["Service", Glance], bytes | None]
"""The body of the good answer, where it can be given without waiting; None says nothing. It
raises, if at all, before it has done anything."""


@dataclass(frozen=True, slots=True)
class Route:
    """A method and a path with all that is known of it.

    `query` and `body` are the structs that requests are read into, `answers` the body
    of each status that is not a problem document (None: no body, a str: a media type).
    """

    method: str
    path: str
    handler: Handler
    summary: str
    query: type | None = None
    body: type | None = None
    answers: Mapping[int, Any] = field(default_factory=dict)
    problems: tuple[int, ...] = ()
    body_required: bool = True
    needs: frozenset[Role] = frozenset({Role.ADMIN})
    """A token must have one of these roles."""
    probe: bool = False
    """Answered to anybody, without token or Host check: it reveals nothing."""
    at_once: AtOnce | None = None
    headers: tuple[str, ...] = ()
    """Those of the good answer that are worth naming."""
    relays: bool = False
    """The good answer has whatever status somebody else gave it."""

    status: int = field(init=False)
    """Of the good answer."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "status", next(iter(self.answers), 200))


_NOTHING: Mapping[str, str] = {}


_SEGMENT = 3
"""The `{...}` that is one segment of a path: the fourth, behind `/v1/hosts/`."""


class Router:
    """One dictionary look-up for a path, exact or around its `{...}`; `{...*}` by pattern."""

    def __init__(self, routes: tuple[Route, ...]) -> None:
        self.routes = routes
        self._exact: dict[str, dict[str, Route]] = {}
        self._around: dict[str, tuple[str, dict[str, Route]]] = {}
        patterns: dict[str, dict[str, Route]] = {}
        for route in routes:
            parts = route.path.split("/")
            if "*}" in route.path:
                table = patterns.setdefault(route.path, {})
            elif "{" in route.path:
                name, parts[_SEGMENT] = parts[_SEGMENT].strip("{}"), ""
                _, table = self._around.setdefault("/".join(parts), (name, {}))
            else:
                table = self._exact.setdefault(route.path, {})
            table[route.method] = route
        self._patterns = [(_compile(path), methods) for path, methods in patterns.items()]

    def find(self, method: str, path: str) -> tuple[Route, Mapping[str, str]]:
        """The route for a raw path; raises Problem 404 or 405."""
        methods = self._exact.get(path)
        params = _NOTHING
        if methods is None:
            methods, params = self._by_pattern(path)
        route = methods.get(method) or methods.get("GET" if method == "HEAD" else ANY)
        route = route or methods.get(ANY)
        if route is None:
            allow = ", ".join(sorted(methods))
            raise Problem(405, "method", f"this path takes {allow} alone", headers={"Allow": allow})
        return route, params

    def _by_pattern(self, path: str) -> tuple[dict[str, Route], Mapping[str, str]]:
        parts = path.split("/")
        if len(parts) > _SEGMENT and (text := parts[_SEGMENT]):
            parts[_SEGMENT] = ""
            found = self._around.get("/".join(parts))
            if found is not None:
                return found[1], {found[0]: unquote(text) if "%" in text else text}
        for pattern, methods in self._patterns:
            if match := pattern.fullmatch(path):
                return methods, {name: unquote(text) for name, text in match.groupdict().items()}
        raise Problem(404, "not-found", "there is nothing at this path; /openapi.json lists all")


def _compile(path: str) -> re.Pattern[str]:
    # Our own paths: `{name*}` is all the rest; nothing can backtrack.
    return re.compile(re.sub(r"\{(\w+)\*\}", r"(?P<\1>.*)", path), re.DOTALL)
