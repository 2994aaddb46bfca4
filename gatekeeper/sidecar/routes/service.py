"""What the service tells of itself, and what its operator does to it."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from gatekeeper.errors import ConfigError
from gatekeeper.sidecar.exchange import (
    ANY,
    CHECK,
    Call,
    Nothing,
    Problem,
    Route,
    json_response,
    read_body,
)
from gatekeeper.sidecar.metrics import CONTENT_TYPE
from gatekeeper.sidecar.openapi import document
from gatekeeper.sidecar.reload import Reloaded, reload
from gatekeeper.wire import Alive

if TYPE_CHECKING:
    from gatekeeper.sidecar.service import Service

__all__ = ["Health", "Index", "Link"]


class Health(msgspec.Struct, frozen=True):
    """The body of `/readyz`."""

    status: str


async def healthz(service: Service, call: Call) -> web.StreamResponse:
    """The process answers: 200, whatever it is doing; and says who it is."""
    return json_response(Alive("alive", getattr(service.gate, "user_agent", None)))


async def readyz(service: Service, call: Call) -> web.StreamResponse:
    """New questions are taken: 200, or 503 while starting, draining, without a network, or
    while promises can't be kept."""
    if not service.ready:
        raise Problem(503, "not-ready", service.unready, headers={"Retry-After": "1"})
    return json_response(Health("ready"))


_HEALTH = (
    Route(
        "GET",
        "/healthz",
        healthz,
        "Is the process alive, and who is it?",
        answers={200: Alive},
        probe=True,
    ),
    Route(
        "GET",
        "/readyz",
        readyz,
        "Does it take questions?",
        answers={200: Health},
        problems=(503,),
        probe=True,
    ),
)


# --- What tells about the service itself: `/`, `/openapi.json`, `/metrics`.


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
    return json_response(document(service.router.routes, version=service.version))


async def prometheus(service: Service, call: Call) -> web.StreamResponse:
    """For Prometheus."""
    return web.Response(body=await service.metrics_text(), headers={"Content-Type": CONTENT_TYPE})


_DOCS = (
    Route("GET", "/", index, "This list.", answers={200: Index}, needs=CHECK),
    Route("GET", "/openapi.json", openapi_json, "The contract.", answers={200: dict}, needs=CHECK),
    Route(
        "GET", "/metrics", prometheus, "For Prometheus.", answers={200: "text/plain"}, needs=CHECK
    ),
)


# --- `/v1/admin`: what the operator does to the service itself.


async def reload_config(service: Service, call: Call) -> web.StreamResponse:
    """Read the configuration again; a bad one changes nothing."""
    await read_body(call.request, Nothing, limit=service.config.server.max_body)
    try:
        return json_response(reload(service))
    except ConfigError as error:
        raise Problem(409, "config", str(error)) from error


_ADMIN = (
    Route(
        "POST",
        "/v1/admin/reload",
        reload_config,
        "Read the configuration again.",
        body=Nothing,
        answers={200: Reloaded},
        problems=(400, 409, 413, 415),
    ),
)

ROUTES = (*_ADMIN, *_HEALTH, *_DOCS)
