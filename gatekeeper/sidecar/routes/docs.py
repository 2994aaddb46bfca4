"""What tells about the service itself: `/`, `/openapi.json`, `/metrics`."""

from __future__ import annotations

import asyncio
from html import escape
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from gatekeeper.sidecar import metrics, openapi
from gatekeeper.sidecar.routing import ANY, CHECK, Call, Route
from gatekeeper.sidecar.wire import json_response

if TYPE_CHECKING:
    from gatekeeper.sidecar.app import Service

__all__ = ["ROUTES", "Index", "Link"]

# T12: pages for people come with nothing a script could use.
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; "
    "form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Link(msgspec.Struct, frozen=True):
    """One line of the list at `/`."""

    method: str
    path: str
    summary: str


class Index(msgspec.Struct, frozen=True):
    """The list at `/`."""

    service: str
    version: str
    phase: str
    links: list[Link]


async def index(service: Service, call: Call) -> web.StreamResponse:
    """Everything that can be asked, one line each; JSON where that is wanted."""
    routes = [route for route in service.router.routes if route.method != ANY]
    links = [Link(route.method, route.path, route.summary) for route in routes]
    if "text/html" not in call.request.headers.get("Accept", ""):
        return json_response(Index("gatekeeper", service.version, service.phase, links))
    rows = "".join(
        f"<tr><td>{escape(one.method)}<td>{_shown(one)}<td>{escape(one.summary)}" for one in routes
    )
    page = (
        "<!doctype html><html lang=en><meta charset=utf-8><title>gatekeeper</title>"
        f"<h1>gatekeeper {escape(service.version)}</h1><p>{escape(service.phase)}</p>"
        f"<table><tr><th>method<th>path<th>what{rows}</table>"
    )
    return web.Response(text=page, content_type="text/html", headers=_PAGE_HEADERS)


def _shown(route: Route) -> str:
    """The path; a link where it can be followed as it stands, else with what it has to be told."""
    path = escape(route.path)
    fields = msgspec.structs.fields(route.query) if route.query is not None else ()
    needed = [escape(one.encode_name) for one in fields if one.required]
    if needed:
        return f"{path}?{'&amp;'.join(f'{name}=' for name in needed)}"
    plain = route.method == "GET" and "{" not in path
    return f'<a href="{path}">{path}</a>' if plain else path


async def openapi_json(service: Service, call: Call) -> web.StreamResponse:
    """The contract for programs, from the same structs that answer."""
    return json_response(openapi.document(service.router.routes, version=service.version))


async def prometheus(service: Service, call: Call) -> web.StreamResponse:
    """For Prometheus."""
    # Every host is looked at: on a thread, since there may be a million of them.
    service.host_states = await asyncio.to_thread(service.gate.host_states)
    return web.Response(
        body=service.metrics.render(), headers={"Content-Type": metrics.CONTENT_TYPE}
    )


ROUTES = (
    Route("GET", "/", index, "This list.", answers={200: Index}, needs=CHECK),
    Route("GET", "/openapi.json", openapi_json, "The contract.", answers={200: dict}, needs=CHECK),
    Route(
        "GET", "/metrics", prometheus, "For Prometheus.", answers={200: "text/plain"}, needs=CHECK
    ),
)
