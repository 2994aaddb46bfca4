"""`/v1/leases`: clients acquire, renew, report and give back leases."""

from __future__ import annotations

from aiohttp import web

from gatekeeper import urls
from gatekeeper.client.wire import LeaseBody, LeaseReport, LeaseRequestBody, Renewal, encode
from gatekeeper.errors import Denied
from gatekeeper.http_fields import parse_retry_after
from gatekeeper.sidecar.held_leases import ClientLease
from gatekeeper.sidecar.inline import InlineCall, read_inline_body
from gatekeeper.sidecar.routing import CRAWL, Call, Problem, Routes, json_response
from gatekeeper.sidecar.service import Service

ROUTES: Routes[Service] = Routes(needs=CRAWL, problems=(404, 503))


def acquire_lease_inline(service: Service, call: InlineCall) -> bytes | None:
    """`acquire_lease`, if the host is due and nobody waits for it. Return None otherwise."""
    server = service.config.server
    body = read_inline_body(call, LeaseRequestBody, limit=server.max_body)
    if body.user_agent is not None or body.wait > server.max_wait:
        return None
    held = service.leases.acquire_nowait(service.gate, body.url, body.ttl, call.client, body.id)
    if held is None:
        return None
    service.waited(0.0)
    service.decided(held.lease.decision, call)
    return encode(_body(held))


@ROUTES.add(
    "POST",
    "/v1/leases",
    body=LeaseRequestBody,
    answers={201: LeaseBody},
    problems=(403, 410, 429, 503),
    inline=acquire_lease_inline,
)
async def acquire_lease(service: Service, call: Call) -> web.StreamResponse:
    """Acquire a lease once the host is due, or get 429 if it is not within `wait`."""
    most = service.config.server.max_wait
    body = await call.body(LeaseRequestBody)
    if body.wait > most:
        detail = f"body: `wait` may be {most:g} at most (server.max_wait) - at `$.wait`"
        raise Problem(400, "bad-request", detail, most=most)
    transport = call.request.transport
    started = service.clock.monotonic()
    try:
        held = await service.leases.acquire(
            service.gate, body, call.client, lambda: transport is None or transport.is_closing()
        )
    except Denied as error:
        service.decided(error.decision, call)
        raise
    service.waited(service.clock.monotonic() - started)
    service.decided(held.lease.decision, call)
    return json_response(_body(held), status=201)


@ROUTES.add(
    "POST", "/v1/leases/{id}/renew", body=Renewal, body_required=False, answers={200: LeaseBody}
)
async def renew_lease(service: Service, call: Call) -> web.StreamResponse:
    """Renew a lease: it ends `ttl` seconds from now."""
    wanted = await call.body(Renewal) if call.request.body_exists else Renewal()
    return json_response(_body(service.leases.renew(call.params["id"], wanted.ttl)))


def report_lease_inline(service: Service, call: InlineCall) -> bytes | None:
    """`report_lease`, if the lease is held. Return None otherwise."""
    lease_id, limit = call.params["id"], service.config.server.max_body
    if lease_id not in service.leases:
        return None
    service.leases.report(lease_id, read_inline_body(call, LeaseReport, limit=limit))
    return b""


@ROUTES.add(
    "POST",
    "/v1/leases/{id}/report",
    body=LeaseReport,
    body_required=False,
    answers={204: None},
    inline=report_lease_inline,
)
async def report_lease(service: Service, call: Call) -> web.StreamResponse:
    """Report how the site answered, which ends the lease. The first report is final."""
    reported = await call.body(LeaseReport) if call.request.body_exists else LeaseReport()
    left_over = service.leases.report(call.params["id"], reported)
    if left_over is not None:
        await _block(service, left_over.url, reported)
    return web.Response(status=204)


async def _block(service: Service, url: str, reported: LeaseReport) -> None:
    """Block the host as a report asks, for a lease that this process does not hold.

    The lease is one of an earlier process that could not be held again; the site's Retry-After
    counts nevertheless (RFC 9110 section 10.2.3, HTTP-08).
    """
    wall = service.clock.wall()
    seconds = parse_retry_after(reported.retry_after, wall)
    if seconds is None and reported.status in (429, 503):
        seconds = service.config.pacing.backoff_initial
    if seconds is not None and (reported.status is None or reported.status >= 300):
        await service.gate.block(urls.parse(url).host, wall + seconds, f"{reported.status}")


@ROUTES.add("DELETE", "/v1/leases/{id}", answers={204: None})
async def give_back_lease(service: Service, call: Call) -> web.StreamResponse:
    """Give a lease back unused: no request was sent."""
    service.leases.give_back(call.params["id"])
    return web.Response(status=204)


def _body(held: ClientLease) -> LeaseBody:
    lease = held.lease
    return LeaseBody(held.id, lease.url, held.granted_at, held.expires_at, lease.decision)
