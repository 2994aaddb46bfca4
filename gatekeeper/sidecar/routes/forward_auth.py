"""`/v1/forward-auth`: 200 or 403 for the subrequests of nginx, Envoy, Traefik and Caddy.

The URL that is judged comes from headers that a proxy sets and a client could forge (T7):
the route is off by default, answers trusted peers alone, and a header that occurs twice
is a refusal. It is answered from what is known, so well under the 200 ms that Envoy waits;
without a body, since nginx spends four times as long on an answer that has one.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiohttp import web

from gatekeeper.decision import Decision
from gatekeeper.errors import InvalidURL
from gatekeeper.robots import product_token
from gatekeeper.sidecar.problems import Problem, retry_after
from gatekeeper.sidecar.routes.fetch import decision_headers
from gatekeeper.sidecar.routing import ANY, Call, Route

if TYPE_CHECKING:
    from gatekeeper.sidecar.app import Service

__all__ = ["PATH", "ROUTES"]

PATH = "/v1/forward-auth"
_KNOWN = 0.1
"""Seconds that an origin may take about which something is known already."""
_READ = (
    "X-Original-URL",
    "X-Original-URI",
    "X-Original-Method",
    "X-Forwarded-Uri",
    "X-Forwarded-Host",
    "X-Forwarded-Proto",
    "X-Forwarded-Method",
    "Host",
    "User-Agent",
)


async def forward_auth(service: Service, call: Call) -> web.StreamResponse:
    """200: pass the request on. 403: don't. Nothing else, since nginx makes a 500 of it."""
    server = service.config.server
    if not server.forward_auth:
        raise Problem(404, "not-found", "server.forward_auth is off")
    peer = call.request.remote
    if peer and peer not in service.trusted_peers:
        raise Problem(403, "peer", "only server.trusted_peers may ask this")
    try:
        url = _target(call)
        found = call.request.headers.get("User-Agent", "")[:512]
        agent = found if product_token(found) else None
        decision = service.gate.peek(url, user_agent=agent)
        # A known origin is asked anew in passing, so that its file is refreshed in time.
        patience = server.forward_auth_wait if decision is None else _KNOWN
        decision = await _learn(service, url, agent, patience) or decision
    except InvalidURL as error:
        raise Problem(403, "invalid-url", str(error)) from error
    if decision is None:
        return web.Response(status=403, headers={"Retry-After": "1"})
    service.decided(decision, call)
    return _answer(service, decision)


def _answer(service: Service, decision: Decision) -> web.Response:
    headers = decision_headers(decision)
    if decision:
        return web.Response(status=200, headers=headers)
    if decision.retry_at is not None:
        left = decision.retry_at.timestamp() - service.clock.wall()
        headers["Retry-After"] = retry_after(left)
    return web.Response(status=403, headers=headers)


async def _learn(service: Service, url: str, agent: str | None, patience: float) -> Decision | None:
    """Ask, and start the fetch where one is needed; the decision if it comes in time."""
    task = service.background(service.gate.check(url, user_agent=agent))
    if task is None or patience <= 0:
        return None
    # The fetch goes on for the next question, whatever becomes of this one.
    done, _ = await asyncio.wait({task}, timeout=patience)
    return task.result() if done and task.exception() is None else None


def _target(call: Call) -> str:
    """The URL that a proxy asks about, from either style of headers, or the path's rest.

    Raises Problem 403 where it can't be told for certain.
    """
    headers = call.request.headers
    for name in _READ:
        if len(headers.getall(name, ())) > 1:
            raise Problem(403, "duplicate-header", f"{name} occurs twice")
    whole = headers.get("X-Original-URL")  # ingress-nginx
    if whole is not None:
        return whole
    host = headers.get("X-Forwarded-Host") or headers.get("Host")
    scheme = headers.get("X-Forwarded-Proto")
    path = headers.get("X-Original-URI") or headers.get("X-Forwarded-Uri")
    if path is None:
        # Envoy: the original path stands behind ours.
        path = call.request.raw_path.removeprefix(PATH)
    if not host or scheme not in ("http", "https") or not path.startswith("/") or "," in host:
        raise Problem(
            403, "no-target", "X-Forwarded-Proto, -Host and -Uri (or X-Original-URI) are needed"
        )
    return f"{scheme}://{host}{path}"


ROUTES = (
    Route(
        ANY,
        PATH,
        forward_auth,
        "For auth_request, ext_authz and forward auth: 200 or 403.",
        answers={200: None},
        problems=(403, 404),
        probe=True,
    ),
    Route(ANY, PATH + "/{rest*}", forward_auth, "The same, as Envoy asks.", probe=True),
)
