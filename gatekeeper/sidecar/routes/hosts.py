"""`/v1/hosts`: whose turn it is when, and the operator's hand on it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from aiohttp import web

from gatekeeper import urls
from gatekeeper.config import host_named
from gatekeeper.errors import LeaseTimeout
from gatekeeper.sidecar.exchange import (
    CRAWL_OR_ADMIN,
    Call,
    Handler,
    Nothing,
    Problem,
    Route,
    json_response,
    read_body,
    read_query,
)
from gatekeeper.wire import BlockBody, HostBody, HostState, RefreshBody

if TYPE_CHECKING:
    from gatekeeper.sidecar.service import Service

__all__ = ["ROUTES", "HostList", "HostQuery"]

_REFRESH = 2.0
"""Seconds that the answer waits for a refresh; it goes on without."""
_SLICE = 2000
"""Hosts looked at before the loop gets a turn: a million of them must not stop answers."""


class HostQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `GET /v1/hosts` asks."""

    q: Annotated[str, msgspec.Meta(max_length=253)] = ""
    """Part of the name."""
    state: HostState | Literal["any"] = "any"
    sort: Literal["host", "-host", "next", "-next"] = "host"
    page: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 1
    per_page: Annotated[int, msgspec.Meta(ge=1, le=200)] = 50


class HostList(msgspec.Struct, frozen=True, kw_only=True):
    """A page of hosts."""

    hosts: list[HostBody]
    total: int
    """How many the filter leaves."""
    page: int
    pages: int


async def list_hosts(service: Service, call: Call) -> web.StreamResponse:
    """A page of the hosts in memory, filtered and sorted here, not in the client."""
    query = read_query(call.query, HostQuery)
    found = [body async for body in _looked_at(service, query)]
    descending = query.sort.startswith("-")
    if query.sort.endswith("next"):
        found.sort(key=_by_next, reverse=descending)
    else:
        found.sort(key=lambda body: body.host, reverse=descending)
    first = (query.page - 1) * query.per_page
    return json_response(
        HostList(
            hosts=found[first : first + query.per_page],
            total=len(found),
            page=query.page,
            pages=max(1, -(-len(found) // query.per_page)),
        )
    )


async def _looked_at(service: Service, query: HostQuery) -> AsyncIterator[HostBody]:
    wanted = query.q.lower()
    for number, host in enumerate(service.internals.hosts(), 1):
        if number % _SLICE == 0:
            await asyncio.sleep(0)
        if wanted in host:
            body = await _body(service, host)
            if query.state in ("any", body.state):
                yield body


def _by_next(body: HostBody) -> float:
    return body.next_at.timestamp() if body.next_at is not None else 0.0


async def one_host(service: Service, call: Call) -> web.StreamResponse:
    """Every clock of a host, each with where it came from."""
    return json_response(await _body(service, _host(call)))


async def pause(service: Service, call: Call) -> web.StreamResponse:
    """No turns for the host until `resume`."""
    await _empty(service, call)
    await service.gate.pause(_host(call))
    return json_response(await _body(service, _host(call)))


async def resume(service: Service, call: Call) -> web.StreamResponse:
    """Turns again."""
    await _empty(service, call)
    await service.gate.resume(_host(call))
    return json_response(await _body(service, _host(call)))


async def refresh(service: Service, call: Call) -> web.StreamResponse:
    """Ask for the robots.txt again: of one origin, or of both schemes as far as known."""
    asked = await read_body(call.request, RefreshBody, limit=service.config.server.max_body)
    host = _host(call)
    if asked.origin is not None:
        target = urls.parse(asked.origin)
        if target.host != host:
            raise Problem(400, "bad-request", "body: `origin` is of another host")
        wanted = [target.origin]
    else:
        name = f"[{host}]" if ":" in host else host
        schemes = (f"https://{name}", f"http://{name}")
        known = [o for o in schemes if service.gate.peek(o + "/") is not None]
        wanted = known or [f"https://{name}"]
    started = [service.background(service.gate.refresh(origin)) for origin in wanted]
    tasks = {task for task in started if task is not None}
    if not tasks:
        raise Problem(
            503, "full", "too much is being refreshed already", headers={"Retry-After": "5"}
        )
    # The fetch waits for the host's turn, which a pause or block can put off for long.
    done, going_on = await asyncio.wait(tasks, timeout=_REFRESH)
    later = going_on or any(isinstance(task.exception(), LeaseTimeout) for task in done)
    return json_response(await _body(service, host), status=202 if later else 200)


async def block(service: Service, call: Call) -> web.StreamResponse:
    """No request to the host before a moment."""
    asked = await read_body(call.request, BlockBody, limit=service.config.server.max_body)
    if (asked.seconds is None) == (asked.until is None):
        raise Problem(400, "bad-request", "body: one of `seconds` and `until` is needed")
    until = (
        asked.until.timestamp()
        if asked.until is not None
        else service.clock.wall() + (asked.seconds or 0.0)
    )
    await service.gate.block(_host(call), until, asked.reason)
    return json_response(await _body(service, _host(call)))


async def _empty(service: Service, call: Call) -> None:
    await read_body(call.request, Nothing, limit=service.config.server.max_body)


def _host(call: Call) -> str:
    """The host of the path in its one spelling; ConfigError becomes a 400."""
    return host_named(call.params["host"])


async def _body(service: Service, host: str) -> HostBody:
    clocks = await service.gate.why(host)
    now = service.clock.wall()
    kinds = {clock.kind for clock in clocks}
    ends = [c.until for c in clocks if c.until is not None and c.until.timestamp() > now]
    intervals = [c.seconds for c in clocks if c.kind == "interval" and c.decides]
    state: HostState = "free"
    if "pause" in kinds:
        state = "paused"
    elif "block" in kinds:
        state = "blocked"
    elif "in_flight" in kinds:
        state = "busy"
    elif ends:
        state = "waiting"
    return HostBody(
        host=host,
        state=state,
        next_at=max(ends) if ends else None,
        interval=max((i for i in intervals if i is not None), default=None),
        clocks=clocks,
    )


def _control(action: str, handler: Handler, summary: str, body: type, *statuses: int) -> Route:
    return Route(
        "POST",
        f"/v1/hosts/{{host}}/{action}",
        handler,
        summary,
        body=body,
        answers=dict.fromkeys((200, *statuses), HostBody),
        problems=(400, 413, 415, 503) if 202 in statuses else (400, 413, 415),
    )


ROUTES = (
    Route(
        "GET",
        "/v1/hosts",
        list_hosts,
        "Every host that has a clock.",
        query=HostQuery,
        answers={200: HostList},
        problems=(400,),
    ),
    Route(
        "GET",
        "/v1/hosts/{host}",
        one_host,
        "Every clock of a host.",
        needs=CRAWL_OR_ADMIN,
        answers={200: HostBody},
        problems=(400,),
    ),
    _control("pause", pause, "No turns until resumed.", Nothing),
    _control("resume", resume, "Turns again.", Nothing),
    _control("refresh", refresh, "Ask for its robots.txt again.", RefreshBody, 202),
    _control("block", block, "No request before a moment.", BlockBody),
)
