"""One table of routes: for dispatch, for `/openapi.json` and for the list at `/`."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from aiohttp import web

from gatekeeper.sidecar.problems import Problem

if TYPE_CHECKING:
    from gatekeeper.sidecar.app import Service

__all__ = ["ANY", "METHODS", "Call", "Handler", "Route", "Router"]


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


METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"))
"""Those that are told apart in counters and traces: a client may invent others."""
ANY = "*"
"""As a route's method: whatever comes."""

Handler = Callable[["Service", Call], Awaitable[web.StreamResponse]]


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
    probe: bool = False
    """Answered to anybody, without token or Host check: it reveals nothing."""


_NOTHING: Mapping[str, str] = {}


class Router:
    """Exact paths by one dictionary look-up, the few with `{...}` by pattern."""

    def __init__(self, routes: tuple[Route, ...]) -> None:
        self.routes = routes
        self._exact: dict[str, dict[str, Route]] = {}
        patterns: dict[str, dict[str, Route]] = {}
        for route in routes:
            table = patterns if "{" in route.path else self._exact
            table.setdefault(route.path, {})[route.method] = route
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
        for pattern, methods in self._patterns:
            if match := pattern.fullmatch(path):
                return methods, {name: unquote(text) for name, text in match.groupdict().items()}
        raise Problem(404, "not-found", "there is nothing at this path; /openapi.json lists all")


def _compile(path: str) -> re.Pattern[str]:
    # Our own paths: one segment a parameter, `{name*}` the rest; nothing can backtrack.
    pattern = re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", path)
    return re.compile(re.sub(r"\{(\w+)\*\}", r"(?P<\1>.*)", pattern), re.DOTALL)
