"""`/v1/forward-auth`: 200 or 403 for the subrequests of nginx, Envoy, Traefik and Caddy.

The URL comes from headers that a proxy sets and a client could forge (T7). So the route is off by
default, answers only trusted peers, and refuses a request whose URL is ambiguous (see
`asked_url`). It answers from cached records, so well within the 200 ms that Envoy waits; and
without a body, since nginx takes four times as long for a response that has one.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping

from aiohttp import web

from gatekeeper import urls
from gatekeeper.client.wire import decision_headers, retry_after
from gatekeeper.config import token_of
from gatekeeper.decision import Decision, State
from gatekeeper.errors import InvalidURL
from gatekeeper.robots import product_token
from gatekeeper.sidecar.routing import ANY, FORWARD_AUTH, Call, Problem, Routes
from gatekeeper.sidecar.service import Service

_log = logging.getLogger(__name__)
ROUTES: Routes[Service] = Routes(probe=True)

_ANY_AGENT = "*"
"""The agent of a visitor without a User-Agent; never this gate's own."""


@ROUTES.add(ANY, FORWARD_AUTH + "/{rest*}")
@ROUTES.add(ANY, FORWARD_AUTH, answers={200: None}, problems=(403, 404))
async def forward_auth(service: Service, call: Call) -> web.StreamResponse:
    """Answer 200 if the visitor may pass, 403 if not: nginx answers other statuses with a 500."""
    if not service.config.server.forward_auth:
        if call.request.method not in ("GET", "HEAD"):  # as for any path: the contract lists GET
            allow = {"Allow": "GET, HEAD"}
            raise Problem(405, "method", "this path accepts only GET, HEAD", headers=allow)
        raise Problem(404, "not-found", "server.forward_auth is off")
    peer = call.request.remote
    if peer and peer not in service.trusted_peers:
        raise Problem(403, "peer", "only server.trusted_peers may ask this")
    _check_host(service, call)
    call.client = peer or "local"  # the proxy, since nothing identifies its visitor reliably
    try:
        service.clients.enter(call.client)
    except Problem as problem:  # nginx would answer its 429 with a 500
        raise Problem(403, problem.kind, problem.detail, wait=problem.wait) from None
    try:
        decision = await _decide(service, call)
    except Problem:
        raise
    except InvalidURL as error:
        raise Problem(403, "invalid-url", str(error)) from error
    except Exception as error:
        _log.exception("forward-auth %s failed", call.id)
        raise Problem(403, "internal", f"an internal error; the log names it {call.id}") from error
    finally:
        service.clients.leave(call.client)
    service.decided(decision, call)
    headers = decision_headers(decision)
    if decision.retry_at is not None and not decision:
        headers["Retry-After"] = retry_after(service.seconds_until(decision.retry_at))
    return web.Response(status=200 if decision else 403, headers=headers)


def _check_host(service: Service, call: Call) -> None:
    """Raise Problem 403 for a Host header that `server.forward_auth_hosts` does not list (T4, T7).

    nginx, Traefik and Caddy name us in Host, so a request that names another host came from
    elsewhere. Envoy sends its visitor's Host, so it is only judged where names are listed.
    """
    hosts = service.forward_auth_hosts
    if hosts:
        host = call.request.headers.get("Host", "").lower()
        name = host if host.endswith("]") or ":" not in host else host.rpartition(":")[0]
        if host not in hosts and name not in hosts:
            raise Problem(403, "host", "server.forward_auth_hosts does not list this Host header")


async def _decide(service: Service, call: Call) -> Decision:
    """Decide from cached records; missing and ageing ones are fetched in the background."""
    url = asked_url(call.request)
    target = urls.parse(url)
    sent = call.request.headers.get("User-Agent", "")[:512]
    agent = sent if product_token(sent) else _ANY_AGENT
    parts, token = service.gate.parts, token_of(agent)
    if (robots_file := parts.decider.robots_file(url, target, token)) is not None:
        # Also for an origin without a record: our own request for its robots.txt may come
        # through this proxy, and a 403 would make it look as if there were no file.
        return robots_file
    decision = service.gate.peek(url, user_agent=agent)
    if decision is None:
        task = service.learner.learn(target.origin)
        seconds = service.config.server.forward_auth_wait
        if task is not None and seconds > 0:
            # The task goes on for later questions, whatever the outcome of this one.
            await asyncio.wait({task}, timeout=seconds)
            decision = service.gate.peek(url, user_agent=agent)
    elif decision.state not in (None, State.OVERRIDE):
        # Decided by the file: this makes the gate refresh it in time.
        service.learner.learn(target.origin)
    if decision is None:
        decision = parts.decider.unknown(url, target, token, parts.questions.moment())
    return decision


# --- The URL that a proxy's subrequest asks about, from its headers, which must be unambiguous.


_URI_FIELDS = ("X-Original-URI", "X-Forwarded-Uri")  # nginx; Traefik and Caddy
_FIELDS_READ = (
    *_URI_FIELDS,
    "X-Original-URL",
    "X-Original-Method",
    "X-Forwarded-Host",
    "X-Forwarded-Proto",
    "X-Forwarded-Method",
    "Host",
    "User-Agent",
)
_HOST = r"(?:[A-Za-z0-9_][A-Za-z0-9_.\-]*|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?"
_WHOLE_URL = re.compile(rf"(https?)://({_HOST})(/[^#]*)", re.DOTALL)
"""No request target holds a `#` (RFC 9112, 3.2): some readers would end the path there."""


def asked_url(request: web.BaseRequest) -> str:
    """Return the URL that a proxy asks about, from any of the known styles of headers.

    Envoy puts the visitor's path after our own. Raises Problem 403 if the headers do not determine
    the URL.
    """
    headers, rest = request.headers, request.raw_path.removeprefix(FORWARD_AUTH)
    for name in _FIELDS_READ:
        if len(headers.getall(name, ())) > 1:
            raise Problem(403, "duplicate-header", f"{name} occurs twice")
    schemes = _values(headers, "X-Forwarded-Proto")
    hosts = {host.lower() for host in _values(headers, "X-Forwarded-Host")}
    paths = _values(headers, *_URI_FIELDS)
    if rest.startswith("/"):
        paths.add(rest)
        hosts |= {host.lower() for host in _values(headers, "Host")}  # Envoy sends the visitor's
    for given in _values(headers, "X-Original-URL"):  # ingress-nginx
        parts = _WHOLE_URL.fullmatch(given)
        if parts is None:
            raise Problem(403, "no-target", "X-Original-URL is not the absolute URL of a page")
        schemes.add(parts[1])
        hosts.add(parts[2].lower())
        paths.add(parts[3])
    scheme, path = _single(schemes, "X-Forwarded-Proto"), _single(paths, "the URI")
    host = _single(hosts or _values(headers, "Host"), "X-Forwarded-Host")
    url = f"{scheme}://{host}{path}"
    whole = _WHOLE_URL.fullmatch(url)
    if whole is None or whole.groups() != (scheme, host, path):
        detail = "the scheme has to be http or https, the host name or name:port, the URI a path"
        raise Problem(403, "no-target", detail)
    return url


def _values(headers: Mapping[str, str], *names: str) -> set[str]:
    return {headers[name] for name in names if name in headers}


def _single(values: set[str], part: str) -> str:
    if len(values) > 1:
        raise Problem(403, "headers-disagree", f"two headers disagree about {part}")
    if not values:
        detail = "X-Forwarded-Proto, -Host and -Uri (or X-Original-URI) are needed"
        raise Problem(403, "no-target", detail)
    return next(iter(values))
