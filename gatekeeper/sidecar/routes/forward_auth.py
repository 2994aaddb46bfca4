"""`/v1/forward-auth`: 200 or 403 for the subrequests of nginx, Envoy, Traefik and Caddy.

The URL that is judged comes from headers that a proxy sets and a client could forge (T7):
the route is off by default, answers trusted peers alone, and what can't be told for certain
is refused (see `forwarded`). It is answered from what is known, so well under the 200 ms that
Envoy waits; without a body, since nginx spends four times as long on an answer that has one.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from aiohttp import web

from gatekeeper import urls
from gatekeeper.clock import utc
from gatekeeper.decision import Decision, Reason, State, Verdict
from gatekeeper.errors import InvalidURL
from gatekeeper.robots import product_token
from gatekeeper.robots.normal import is_robots_txt
from gatekeeper.sidecar.forwarded import asked_url
from gatekeeper.sidecar.problems import Problem
from gatekeeper.sidecar.routes.fetch import decision_headers
from gatekeeper.sidecar.routing import ANY, Call, Route

if TYPE_CHECKING:
    from gatekeeper.sidecar.app import Service

__all__ = ["PATH", "ROUTES"]

logger = logging.getLogger(__name__)

PATH = "/v1/forward-auth"
_SOON = 1.0
"""Seconds after which asking again about an origin that was unknown can help."""
_ANYBODY = "*"
"""Whom the file calls so is judged that says no name, never our own robot."""


async def forward_auth(service: Service, call: Call) -> web.StreamResponse:
    """200: pass the request on. 403: don't. Nothing else, since nginx makes a 500 of it."""
    if not service.config.server.forward_auth:
        if call.request.method not in ("GET", "HEAD"):  # as of any path: the contract lists GET
            raise Problem(405, "method", "this path takes GET alone", headers={"Allow": "GET"})
        raise Problem(404, "not-found", "server.forward_auth is off")
    peer = call.request.remote
    if peer and peer not in service.trusted_peers:
        raise Problem(403, "peer", "only server.trusted_peers may ask this")
    _judge_host(service, call)
    call.client = peer or "local"  # the proxy: of its visitor nothing is certain
    try:
        service.clients.enter(call.client)
    except Problem as many:  # nginx would make a 500 of its 429
        raise Problem(403, many.kind, many.detail, headers=many.headers) from None
    try:
        return await _answered(service, call)
    finally:
        service.clients.leave(call.client)


def _judge_host(service: Service, call: Call) -> None:
    """T4, T7: nginx, Traefik and Caddy name us in Host, so a request that names another came
    from elsewhere. Envoy sends its visitor's Host on: judged only where names are listed."""
    wanted = service.forward_auth_hosts
    if wanted:
        host = call.request.headers.get("Host", "").lower()
        name = host if host.endswith("]") or ":" not in host else host.rpartition(":")[0]
        if host not in wanted and name not in wanted:
            raise Problem(403, "host", "server.forward_auth_hosts does not list this Host header")


async def _answered(service: Service, call: Call) -> web.StreamResponse:
    """200 or 403 by the decision, once the request was let in."""
    try:
        decision = await _decide(service, call)
    except Problem:
        raise
    except InvalidURL as error:
        raise Problem(403, "invalid-url", str(error)) from error
    except Exception as error:
        logger.exception("forward-auth %s failed", call.id)
        raise Problem(403, "internal", f"an error of ours; the log names it {call.id}") from error
    service.decided(decision, call)
    headers = decision_headers(decision)
    if decision:
        return web.Response(status=200, headers=headers)
    if decision.retry_at is not None:
        headers["Retry-After"] = service.seconds_until(decision.retry_at)
    return web.Response(status=403, headers=headers)


async def _decide(service: Service, call: Call) -> Decision:
    """One decision, from what is known; what is not, or not for long, is learnt beside it."""
    url = asked_url(call.request.headers, call.request.raw_path.removeprefix(PATH))
    target = urls.parse(url)
    named = call.request.headers.get("User-Agent", "")[:512]
    agent = named if product_token(named) else _ANYBODY
    if is_robots_txt(target.path):
        # RFC-20. Also of an unknown origin: our own question may come through the very proxy
        # that asks here, and a 403 to it would read as "there is no file".
        return _told(call, target, agent, Verdict.ALLOW, Reason.ROBOTS_FILE)
    decision = service.gate.peek(url, user_agent=agent)
    if decision is None:
        task = service.learning.begin(target.origin)
        patience = service.config.server.forward_auth_wait
        if task is not None and patience > 0:
            # It goes on for the next question, whatever becomes of this one.
            await asyncio.wait({task}, timeout=patience)
            decision = service.gate.peek(url, user_agent=agent)
    elif decision.state not in (None, State.OVERRIDE):
        # Told from the file: asked anew in passing, so that it is refreshed in time.
        service.learning.begin(target.origin)
    if decision is None:
        soon = service.clock.wall() + _SOON
        decision = _told(call, target, agent, Verdict.DEFER, Reason.UNKNOWN, retry_at=soon)
    return decision


def _told(
    call: Call,
    target: urls.Target,
    agent: str,
    verdict: Verdict,
    reason: Reason,
    *,
    retry_at: float | None = None,
) -> Decision:
    """What needs no look at the file. The request's id, which nobody else has, is its own."""
    return Decision(
        verdict=verdict,
        reason=reason,
        url=target.url,
        origin=target.origin,
        user_agent=product_token(agent),
        retry_at=None if retry_at is None else utc(retry_at),
        id=call.id,
    )


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
