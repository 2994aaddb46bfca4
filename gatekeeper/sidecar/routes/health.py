"""Health, metrics, the list of endpoints, the OpenAPI document, and the reload."""

from __future__ import annotations

import http
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
from aiohttp import web

from gatekeeper.client.wire import PROBLEM_JSON, Alive, ProblemDocument
from gatekeeper.errors import ConfigError
from gatekeeper.sidecar import routing
from gatekeeper.sidecar.reload import Reloaded, reload
from gatekeeper.sidecar.routing import Call, EmptyObject, Problem, Route, Routes, json_response
from gatekeeper.sidecar.service import Service

ROUTES: Routes[Service] = Routes()

# --- `/v1/admin`: the operator controls the service.


_REPLY_SECONDS = 60.0
"""Seconds in which the result is told also to a client whose token the reload has removed."""


@ROUTES.add("POST", "/v1/admin/reload", body=EmptyObject, answers={200: Reloaded}, problems=(409,))
async def reload_configuration(service: Service, call: Call) -> web.StreamResponse:
    """Read the configuration again. A bad one changes nothing."""
    await call.body(EmptyObject)
    call.goodbye = _REPLY_SECONDS
    try:
        done = await reload(service)
    except ConfigError as error:
        raise Problem(409, "config", str(error)) from error
    await service.settle()
    return json_response(done)


# --- The health of the service.


class FleetHealth(msgspec.Struct, frozen=True):
    """The fleet in `/readyz`."""

    state: str
    """`connected`, `lost`, or `recovering`: no leases until the members reported what they know."""
    members: int


class Health(msgspec.Struct, frozen=True, omit_defaults=True):
    """The body of `/readyz`."""

    status: str
    fleet: FleetHealth | None = None
    """None if this gate belongs to no fleet."""


@ROUTES.add("GET", "/healthz", answers={200: Alive}, probe=True)
async def is_alive(service: Service, call: Call) -> web.StreamResponse:
    """Answer 200 as long as the process answers at all, and name its User-Agent."""
    return json_response(Alive("alive", getattr(service.gate, "user_agent", None)))


@ROUTES.add("GET", "/readyz", answers={200: Health}, problems=(503,), probe=True)
async def is_ready(service: Service, call: Call) -> web.StreamResponse:
    """Answer 200 if new questions are accepted.

    503 while starting or draining, without a network, or while state can't be stored.
    """
    if not service.ready:
        raise Problem(503, "not-ready", service.unready, wait=1)
    fleet = service.gate.stats().fleet
    shared = None if fleet is None else FleetHealth(fleet.state, fleet.members)
    return json_response(Health("ready", shared))


# --- About the service itself: `/`, `/openapi.json`, `/metrics`.


class Link(msgspec.Struct, frozen=True):
    """One endpoint in the list at `/`."""

    method: str
    path: str
    summary: str


class Index(msgspec.Struct, frozen=True):
    """The body of `/`."""

    service: str
    version: str
    phase: str
    links: list[Link]


# `probe`, since the handler admits: a browser without a token is redirected to sign in.
@ROUTES.add("GET", "/", answers={200: Index}, problems=(401, 403), probe=True)
async def list_endpoints(service: Service, call: Call) -> web.StreamResponse:
    """List every endpoint. A browser is redirected to the pages."""
    if "text/html" in call.request.headers.get("Accept", ""):
        return web.Response(status=303, headers={"Location": "ui/"})
    service.admission.admit(call.request, routing.CHECK)
    listed = _listed(service.router.routes)
    links = [Link(one.method, one.path, one.summary) for one in listed]
    return json_response(Index("gatekeeper", service.version, service.phase, links))


@ROUTES.add("GET", "/openapi.json", needs=routing.CHECK, answers={200: dict[str, Any]})
async def get_contract(service: Service, call: Call) -> web.StreamResponse:
    """Return the OpenAPI document, which is made from the structs of the handlers."""
    tokens = bool(service.admission.tokens)
    return json_response(document(service.router.routes, version=service.version, tokens=tokens))


class MetricsQuery(msgspec.Struct, frozen=True):
    """What `/metrics` may be asked for; other parameters are ignored."""

    exemplars: bool = False
    """OpenMetrics alone: with the trace of a request for each bucket of a histogram."""


@ROUTES.add("GET", "/metrics", needs=routing.CHECK, query=MetricsQuery, answers={200: "text/plain"})
async def get_metrics(service: Service, call: Call) -> web.StreamResponse:
    """Return the metrics, in OpenMetrics if Accept names it, else in Prometheus' text format."""
    asked = call.parameters(MetricsQuery)
    accept = ",".join(call.request.headers.getall("Accept", ()))
    body, content_type = await service.metrics_text(accept, exemplars=asked.exemplars)
    return web.Response(body=body, headers={"Content-Type": content_type, "Vary": "Accept"})


# --- `/openapi.json`, generated from the table of routes and the structs of the requests.


_REF = "#/components/schemas/{name}"
_COMMON_PROBLEMS = (401, 403, 429, 500)
"""Missing credentials, limits of a client, and internal errors."""
_BODY_PROBLEMS = frozenset({400, 408, 413, 415})
"""The body is malformed, too slow, too large, or of another type."""
_SECONDS = {"type": "integer", "minimum": 1}
_RETRY_AFTER = {"Retry-After": {"description": "Whole seconds, at least 1.", "schema": _SECONDS}}
_SITES_OWN = {routing.OCTETS: {"schema": {"type": "string", "format": "binary"}}}
"""The content of a response that a site sent, as generators of clients expect it."""

_ROLES = (
    "A token of server.token_file, if there is one. It has roles: `check` asks about URLs; "
    "`crawl` takes leases and fetches pages, and `admin` sees and controls hosts and the service, "
    "and both may do what `check` may. Each operation names the roles of which one is needed."
)
_TAGS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "questions": (
        "May a URL be fetched, and why?",
        ("/v1/check", "/v1/explain", "/v1/robots", "/v1/history"),
    ),
    "leases": ("The right to send one request to a host.", ("/v1/leases",)),
    "pages": ("Pages fetched by the service itself.", ("/v1/fetch",)),
    "hosts": ("When each host is due, and operations that hold it back.", ("/v1/hosts",)),
    "operators": (
        "What happens now, and what happened recently.",
        ("/v1/overview", "/v1/decisions", "/v1/events", "/v1/series", "/v1/config", "/v1/admin"),
    ),
    "service": ("The service itself.", ("/",)),
}
"""For each tag its description, and the prefixes of its paths."""
_PARAMETERS = {
    "host": "The name of a host, or its address.",
    "id": "The id from an earlier response.",
}


def _link(operation: str, parameter: str, place: str, text: str) -> dict[str, Any]:
    """Return the link to an operation, whose parameter is at that place of the response."""
    parameters = {parameter: f"$response.body#/{place}"}
    return {operation: {"operationId": operation, "parameters": parameters, "description": text}}


_LEASE_LINKS = {
    **_link("renewLease", "id", "id", "Renew the lease."),
    **_link("reportLease", "id", "id", "Report how the site answered; that ends the lease."),
    **_link("giveBackLease", "id", "id", "Give the lease back unused."),
}
_LINKS: Mapping[str, Mapping[str, Any]] = {
    "acquireLease": _LEASE_LINKS,
    "renewLease": _LEASE_LINKS,
    "listLeases": _link("dropLease", "id", "leases/0/id", "Drop the first of these leases."),
    "listHosts": _link(
        "getHost", "host", "hosts/0/host", "Every clock of the first of these hosts."
    ),
    "checkUrl": _link("getDecision", "id", "id", "Who asked for it, and when."),
}
"""The links of the successful response of each operation: what may be asked next."""


def document(
    routes: Iterable[Route[Service]], *, version: str, tokens: bool = False
) -> dict[str, Any]:
    """Return an OpenAPI 3.1 document of every route that is neither a catch-all nor a page.

    `tokens`: whether the service requires tokens. If not, no operation mentions them.
    """
    listed = _listed(routes)
    kinds = sorted(_structs(listed), key=lambda kind: kind.__name__)
    _, components = msgspec.json.schema_components(kinds, ref_template=_REF)
    bodies = {route.body for route in listed if route.body is not None}
    _complete_schemas(components, kinds, bodies)
    paths: dict[str, Any] = {}
    for route in listed:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, tokens)
    schemes = {"token": {"type": "http", "scheme": "bearer", "description": _ROLES}}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "gatekeeper",
            "version": version,
            "description": "Ask first, then wait until the host is due.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [
            {"url": "/", "description": "The server of this document."},
            {"url": "http://127.0.0.1:8750", "description": "Where `gatekeeper serve` listens."},
        ],
        "tags": [{"name": name, "description": text} for name, (text, _) in _TAGS.items()],
        "paths": paths,
        "components": {"schemas": components} | ({"securitySchemes": schemes} if tokens else {}),
    }


def _listed(routes: Iterable[Route[Service]]) -> list[Route[Service]]:
    """Return the routes of the contract: neither catch-alls nor pages for people."""
    return [one for one in routes if one.method != routing.ANY and not one.path.startswith("/ui")]


def _structs(routes: Iterable[Route[Service]]) -> set[type[msgspec.Struct]]:
    """Return the structs of all bodies; queries become parameters instead."""
    bodies = [
        kind for one in routes for kind in (one.body, *one.answers.values(), *one.events.values())
    ]
    return {ProblemDocument, *(kind for kind in bodies if isinstance(kind, type))}


def _tag(route: Route[Service]) -> str:
    return next(name for name, (_, begins) in _TAGS.items() if route.path.startswith(begins))


def _complete_schemas(
    components: dict[str, Any], kinds: Iterable[type[msgspec.Struct]], bodies: set[type]
) -> None:
    """Complete the schemas of structs: which fields are required, and what defaults there are.

    A `default` is removed: generators treat a field that has one as always present. That is wrong
    for a request, where the description states the default instead. In a response every field is
    written, so all are required, unless the struct omits defaults.
    """
    requests = {kind.__name__ for kind in bodies}
    partial = {kind.__name__ for kind in kinds if kind.__struct_config__.omit_defaults}
    for name, schema in components.items():
        fields = schema.get("properties", {})
        for field in fields.values():
            default = field.pop("default", None)
            if name in requests and default not in (None, ""):
                field["description"] = f"{default} unless given."
        if fields and name not in requests | partial:
            schema["required"] = list(fields)


def _json(kind: Any) -> dict[str, Any]:
    """Return the content of a JSON body of that kind."""
    name = kind.__name__ if isinstance(kind, type) else None
    schema = {"$ref": _REF.format(name=name)} if name else {"type": "object"}
    return {routing.JSON: {"schema": schema}}


def _operation(route: Route[Service], tokens: bool) -> dict[str, Any]:
    events = "".join(
        f"\n\nThe data of an event `{event}` is a `{kind.__name__}` in JSON."
        for event, kind in route.events.items()
    )
    operation: dict[str, Any] = {
        "operationId": route.operation,
        "tags": [_tag(route)],
        "summary": route.summary,
        "description": route.description + events,
        "parameters": list(_parameters(route)),
        "responses": _responses(route),
    }
    if tokens and not route.probe:
        operation["security"] = [{"token": [role]} for role in sorted(route.needs)]
    if route.body is not None:
        content = _json(route.body)
        operation["requestBody"] = {"required": route.body_required, "content": content}
    return operation


def _parameters(route: Route[Service]) -> Iterator[dict[str, Any]]:
    for name in re.findall(r"\{(\w+)\}", route.path):
        said, schema = _PARAMETERS[name], {"type": "string"}
        yield {"name": name, "in": "path", "required": True, "description": said, "schema": schema}
    if route.query is not None:
        _, components = msgspec.json.schema_components([route.query], ref_template=_REF)
        query = components[route.query.__name__]
        for name, told in query["properties"].items():
            required, schema = name in query.get("required", ()), _without_null(told)
            yield {"name": name, "in": "query", "required": required, "schema": schema}


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter's schema without null, which a query string can't express.

    Several enums become one.
    """
    choices = [one for one in schema.get("anyOf", ()) if one != {"type": "null"}]
    rest = {key: value for key, value in schema.items() if key != "anyOf"}
    if rest.get("default", "") is None:
        del rest["default"]
    if choices and all(one.keys() == {"enum"} for one in choices):
        choices = [{"enum": sorted(word for one in choices for word in one["enum"])}]
    if len(choices) == 1:
        return {**rest, **choices[0]}
    return {**rest, "anyOf": choices} if choices else rest


def _responses(route: Route[Service]) -> dict[str, Any]:
    responses: dict[str, Any] = {}
    for status, kind in route.answers.items():
        answer: dict[str, Any] = {"description": route.summary}
        if kind == routing.OCTETS:
            answer["content"] = _SITES_OWN
        elif isinstance(kind, str):
            answer["content"] = {kind: {"schema": {"type": "string"}}}
        elif kind is not None:
            answer["content"] = _json(kind)
        if status == route.status and (links := _LINKS.get(route.operation)):
            answer["links"] = links
        responses[str(status)] = answer
    if route.relays:
        said = "The response of the site, with its own status and Content-Type."
        responses["default"] = {"description": said, "content": _SITES_OWN}
    if route.headers:
        headers = {name: {"schema": {"type": "string"}} for name in route.headers}
        responses = {status: answer | {"headers": headers} for status, answer in responses.items()}
    problems = {*route.problems, *(() if route.probe else _COMMON_PROBLEMS)}
    if route.query is not None:
        problems.add(400)
    if route.body is not None:
        problems |= _BODY_PROBLEMS
    for status in sorted(problems):
        # The site may have answered with this status: then the body is the site's.
        site = _SITES_OWN if route.relays else {}
        phrase = http.HTTPStatus(status).phrase
        content = {**site, PROBLEM_JSON: _json(ProblemDocument)[routing.JSON]}
        said = f"{phrase}: a problem document (RFC 9457)."
        responses[str(status)] = {"description": said, "content": content}
        if status in (429, 503):
            responses[str(status)]["headers"] = _RETRY_AFTER
    return responses
