"""`/v1/hosts`: lists hosts and their clocks; pauses, resumes, blocks and refreshes them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from aiohttp import web

from gatekeeper import urls
from gatekeeper.client.wire import BlockBody, HostBody, OverrideBody, RefreshBody
from gatekeeper.config import host_named, match_named
from gatekeeper.errors import LeaseTimeout
from gatekeeper.pacing.waiters import HostState
from gatekeeper.sidecar import routing
from gatekeeper.sidecar.pages.state import host_body
from gatekeeper.sidecar.routing import Call, EmptyObject, PageQuery, Problem, Routes, json_response
from gatekeeper.sidecar.service import Service

ROUTES: Routes[Service] = Routes()
_REFRESH_SECONDS = 2.0
"""Seconds that the response waits for a refresh, which goes on afterwards."""


_Clocks = Literal["next", "-next", "state", "-state", "interval", "-interval"]
_Requests = Literal["in_flight", "-in_flight", "waiting", "-waiting", "status", "-status"]
_Totals = Literal["allowed", "-allowed", "denied", "-denied", "held_up", "-held_up"]
HostSort = Literal["host", "-host", _Clocks, _Requests, _Totals]
"""The column to sort by; a leading `-` sorts in descending order. `-held_up`: first the hosts that
are blocked, then those paused, deferred, and the others, each by its number of waiting requests."""


class HostQuery(PageQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The query of `GET /v1/hosts`."""

    q: Annotated[str, msgspec.Meta(max_length=253)] = ""
    """Part of the host's name."""
    state: HostState | Literal["any"] = "any"
    sort: HostSort = "host"


class HostList(msgspec.Struct, frozen=True, kw_only=True):
    """A page of hosts."""

    hosts: list[HostBody]
    total: int
    """Number of hosts that match the filter."""
    page: int
    pages: int
    complete: bool = True
    """Whether every host was examined. If False, there are so many that this goes on: ask again."""


@ROUTES.add("GET", "/v1/hosts", query=HostQuery, answers={200: HostList})
async def list_hosts(service: Service, call: Call) -> web.StreamResponse:
    """List a page of the hosts in memory, filtered and sorted by the service."""
    return json_response(await host_list(service, call.parameters(HostQuery)))


async def host_list(service: Service, query: HostQuery) -> HostList:
    """Build a page of the hosts. Raises Problem 400 if its number is too high."""
    state = service.operators
    try:
        found = await state.hosts.page(
            q=query.q.lower(),
            state=query.state,
            order=state.order(query.sort.lstrip("-")),
            descending=query.sort.startswith("-"),
            first=query.first,
            count=query.per_page,
        )
    except ValueError as error:
        raise Problem(400, "bad-request", f"query: {error} - at `$.page`") from None
    waiting = state.waiting_by_host()
    return HostList(
        hosts=[host_body(state, host, waiting=waiting[host]) for host in found.hosts],
        total=found.total,
        page=query.page,
        pages=query.pages(found.total),
        complete=found.complete,
    )


_HOST = "/v1/hosts/{host}"


@ROUTES.add("GET", _HOST, needs=routing.CRAWL_OR_ADMIN, answers={200: HostBody}, problems=(400,))
async def get_host(service: Service, call: Call) -> web.StreamResponse:
    """Show every clock of a host, and where each came from."""
    return json_response(await host_of(service, _host_in_path(call)))


@ROUTES.add("POST", _HOST + "/pause", body=EmptyObject, answers={200: HostBody})
async def pause_host(service: Service, call: Call) -> web.StreamResponse:
    """Grant no leases at the host until `resume`."""
    await call.body(EmptyObject)
    await service.gate.pause(_host_in_path(call))
    return await get_host(service, call)


@ROUTES.add("POST", _HOST + "/resume", body=EmptyObject, answers={200: HostBody})
async def resume_host(service: Service, call: Call) -> web.StreamResponse:
    """Grant leases at the host again."""
    await call.body(EmptyObject)
    await service.gate.resume(_host_in_path(call))
    return await get_host(service, call)


@ROUTES.add(
    "POST",
    _HOST + "/refresh",
    body=RefreshBody,
    answers={200: HostBody, 202: HostBody},
    problems=(503,),
)
async def refresh_host(service: Service, call: Call) -> web.StreamResponse:
    """Fetch robots.txt again: of `origin`, or of all known origins of the host."""
    request = await call.body(RefreshBody)
    host, origins = _host_in_path(call), []
    if request.origin is not None:
        target = urls.parse(request.origin)
        if target.host != host:
            raise Problem(400, "bad-request", "body: `origin` belongs to another host")
        origins = [target.origin]
    later = await refresh(service, host, origins)
    await service.settle()
    return json_response(await host_of(service, host), status=202 if later else 200)


async def refresh(service: Service, host: str, origins: Sequence[str] = ()) -> bool:
    """Fetch the robots.txt of these origins again, or else of all known origins of the host.

    Return whether that goes on in the background. Raises what a refresh raises, and Problem 503.
    """
    wanted = origins or service.operators.origins(host) or urls.usual_origins(host)[:1]
    started = [service.background(service.gate.refresh(origin)) for origin in wanted]
    tasks = {task for task in started if task is not None}
    if not tasks:
        raise Problem(503, "full", "too many refreshes are running already", wait=5)
    # The fetch waits for a lease of the host, which a pause or a block can delay for long.
    done, going_on = await asyncio.wait(tasks, timeout=_REFRESH_SECONDS)
    errors = [error for task in done if (error := task.exception()) is not None]
    for error in errors:
        if not isinstance(error, LeaseTimeout):
            raise error
    return bool(going_on or errors)


@ROUTES.add("POST", _HOST + "/block", body=BlockBody, answers={200: HostBody})
async def block_host(service: Service, call: Call) -> web.StreamResponse:
    """Send no request to the host before a given moment."""
    request = await call.body(BlockBody)
    await block(service, _host_in_path(call), request)
    return await get_host(service, call)


async def block(service: Service, host: str, wanted: BlockBody) -> None:
    """Block the host, or lift its block. Raises Problem 400."""
    if (wanted.seconds is None) == (wanted.until is None):
        raise Problem(400, "bad-request", "body: one of `seconds` and `until` is needed")
    until = service.clock.wall() + (wanted.seconds or 0.0)
    if wanted.until is not None:
        until = wanted.until.timestamp()
    await service.gate.block(host, until, wanted.reason)


@ROUTES.add("POST", _HOST + "/override", body=OverrideBody, answers={200: HostBody})
async def override_host(service: Service, call: Call) -> web.StreamResponse:
    """Set a rule for a host, for `*.` and a domain, or for `*`, over that of the configuration."""
    request = await call.body(OverrideBody)
    match = match_named(call.params["host"])
    service.gate.override(request.rule(match), seconds=request.seconds)
    await service.settle()
    return json_response(await host_of(service, match))


def _host_in_path(call: Call) -> str:
    """Return the host in the path, normalized. Raises ConfigError, which becomes a 400."""
    return host_named(call.params["host"])


async def host_of(service: Service, host: str) -> HostBody:
    """Describe one host, including what the fleet's store knows. Raises ConfigError."""
    state, views = service.operators, await service.gate.parts.scheduler.look(host)
    return host_body(state, host, waiting=state.waiting_by_host()[host], fleet=views)
