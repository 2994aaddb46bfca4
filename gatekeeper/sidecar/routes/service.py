"""What the service tells of itself, and what its operator does to it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

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
from gatekeeper.sidecar.reload import Reloaded, reload
from gatekeeper.wire import Alive, ProblemDocument

if TYPE_CHECKING:
    from gatekeeper.sidecar.service import Service

__all__ = ["Health", "Index", "Link", "document"]


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
    """Everything that can be asked, one line each; a browser is led to the pages."""
    if "text/html" in call.request.headers.get("Accept", ""):
        return web.Response(status=303, headers={"Location": "ui/"})
    service.admission.admit(call.request, CHECK)
    routes = [route for route in service.router.routes if route.method != ANY]
    links = [Link(one.method, one.path, one.summary) for one in routes if not for_people(one)]
    return json_response(Index("gatekeeper", service.version, service.phase, links))


async def openapi_json(service: Service, call: Call) -> web.StreamResponse:
    """The contract for programs, from the same structs that answer."""
    return json_response(document(service.router.routes, version=service.version))


async def prometheus(service: Service, call: Call) -> web.StreamResponse:
    """For Prometheus."""
    return web.Response(body=await service.metrics_text(), headers={"Content-Type": CONTENT_TYPE})


_DOCS = (
    # It looks by itself who asks: a browser without a token is led to where it can sign in.
    Route("GET", "/", index, "This list.", answers={200: Index}, problems=(401, 403), probe=True),
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


# --- `/openapi.json`, from the table of routes and the structs that requests are read into.


_REF = "#/components/schemas/{name}"
_ALWAYS = (401, 403, 429, 500)
"""Credentials, the bounds of a client, and internal errors."""

_ROLES = (
    "A token of server.token_file, if there is one. It has roles: `check` asks about URLs; "
    "`crawl` takes leases and fetches pages, and `admin` sees and controls hosts and the service, "
    "and both may do what `check` may. Each operation names the roles of which one is needed."
)


def document(routes: Iterable[Route], *, version: str) -> dict[str, Any]:
    """An OpenAPI 3.1 document of every route that is neither a catch-all nor a page."""
    shown = [route for route in routes if route.method != ANY and not for_people(route)]
    kinds = sorted(_structs(shown), key=lambda kind: kind.__name__)
    schemas, components = msgspec.json.schema_components(kinds, ref_template=_REF)
    for kind in kinds:
        _say_times(msgspec.inspect.type_info(kind), components)
    names = dict(zip(kinds, schemas, strict=True))
    paths: dict[str, Any] = {}
    for route in shown:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, names)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "gatekeeper",
            "version": version,
            "description": "Ask first, then wait your turn.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "token": {"type": "http", "scheme": "bearer", "description": _ROLES}
            },
        },
    }


def for_people(route: Route) -> bool:
    """Is it one of the pages, which change as people need them?"""
    return route.path.startswith("/ui")


def _structs(routes: Iterable[Route]) -> set[type]:
    found: set[type] = {ProblemDocument}
    for route in routes:
        candidates = (route.query, route.body, *route.answers.values())
        found.update(kind for kind in candidates if isinstance(kind, type))
    return found


def _say_times(kind: msgspec.inspect.Type, components: dict[str, Any]) -> None:
    """Say `date-time` where msgspec, which reads times without a zone too, says `string`."""
    if isinstance(kind, msgspec.inspect.StructType):
        properties = components[kind.cls.__name__]["properties"]
        for field in kind.fields:
            schema = properties[field.encode_name]
            if isinstance(field.type, msgspec.inspect.DateTimeType):
                schema["format"] = "date-time"
            for one in schema.get("anyOf", ()):
                if one == {"type": "string"} and _may_be_time(field.type):
                    one["format"] = "date-time"
            _say_times(field.type, components)
    elif isinstance(kind, msgspec.inspect.UnionType):
        for one_type in kind.types:
            _say_times(one_type, components)
    elif isinstance(kind, msgspec.inspect.ListType | msgspec.inspect.VarTupleType):
        _say_times(kind.item_type, components)


def _may_be_time(kind: msgspec.inspect.Type) -> bool:
    return isinstance(kind, msgspec.inspect.UnionType) and any(
        isinstance(one, msgspec.inspect.DateTimeType) for one in kind.types
    )


def _operation(route: Route, names: dict[type, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": f"{route.method.lower()}{re.sub(r'[^a-zA-Z0-9]+', '_', route.path)}",
        "summary": route.summary,
        "parameters": [*_path_parameters(route), *_query_parameters(route.query)],
        "responses": _responses(route, names),
    }
    if not route.probe:
        # Where no tokens are set, none is asked for. One that is needs one of these roles.
        operation["security"] = [{}, *({"token": [role]} for role in sorted(route.needs))]
    if route.body is not None:
        operation["requestBody"] = {
            "required": route.body_required,
            "content": {"application/json": {"schema": names[route.body]}},
        }
    return operation


def _path_parameters(route: Route) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"\{(\w+)\}", route.path)
    ]


def _query_parameters(kind: type | None) -> list[dict[str, Any]]:
    if kind is None:
        return []
    _, components = msgspec.json.schema_components([kind], ref_template=_REF)
    schema = components[kind.__name__]
    required = schema.get("required", [])
    return [
        {"name": name, "in": "query", "required": name in required, "schema": _plain(inner)}
        for name, inner in schema["properties"].items()
    ]


def _plain(schema: dict[str, Any]) -> dict[str, Any]:
    """A parameter's schema without null: a query string has no way to say it."""
    choices = [one for one in schema.get("anyOf", ()) if one != {"type": "null"}]
    rest = {key: value for key, value in schema.items() if key not in ("anyOf", "default")}
    if len(choices) == 1:
        return {**rest, **choices[0]}
    return {**rest, "anyOf": choices} if choices else rest


def _responses(route: Route, names: dict[type, Any]) -> dict[str, Any]:
    responses: dict[str, Any] = {}
    for status, kind in route.answers.items():
        answer: dict[str, Any] = {"description": route.summary}
        if isinstance(kind, str):
            answer["content"] = {kind: {}}
        elif kind is not None:
            answer["content"] = {"application/json": {"schema": names[kind]}}
        responses[str(status)] = answer
    if route.relays:
        responses["default"] = {
            "description": "What the site answered, with the site's own status.",
            "content": {"*/*": {}},
        }
    for answer in responses.values():
        if route.headers:
            answer["headers"] = {name: {"schema": {"type": "string"}} for name in route.headers}
    problems = set(route.problems) if route.probe else {*route.problems, *_ALWAYS}
    if route.body is not None:
        problems.add(408)  # a body that is too long on its way
    for status in sorted(problems):
        responses[str(status)] = {
            "description": "A problem document (RFC 9457).",
            "content": {"application/problem+json": {"schema": names[ProblemDocument]}},
        }
    return responses
