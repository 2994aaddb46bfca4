"""The routes of `/ui/`: the operators' pages, their forms, their static files and the sign-in."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final
from urllib.parse import parse_qsl, quote, unquote

from aiohttp import web

from gatekeeper.client.wire import BlockBody
from gatekeeper.config import host_named
from gatekeeper.errors import GatekeeperError
from gatekeeper.sidecar import routing
from gatekeeper.sidecar.pages import decision_pages, shell, status_pages
from gatekeeper.sidecar.pages.html import badge, element, field, hidden, link, paragraph
from gatekeeper.sidecar.pages.shell import HEADERS, Page, Visitor
from gatekeeper.sidecar.routes import check, operators
from gatekeeper.sidecar.routes import hosts as host_routes
from gatekeeper.sidecar.routing import ADMIN, CHECK, CRAWL_OR_ADMIN, Call, Handler, Problem, Route
from gatekeeper.sidecar.service import Service

_MAX_FORM: Final = 16_384
_SIGN_IN: Final = "sign-in"
"""The kind of the problem that a visitor has to sign in."""

Build = Callable[[Service, Call, Visitor], Awaitable[Page]]
Answer = Callable[[Service, Call, Visitor], Awaitable[web.StreamResponse]]
Act = Callable[[Service, Call, Visitor, dict[str, str]], Awaitable[None]]


# --- access -----------------------------------------------------------------------------------


def _visitor(service: Service, call: Call, needs: frozenset[routing.Role]) -> Visitor:
    """Return the visitor, who has one of the roles. Raises Problem 401 or 403."""
    visitor = service.sessions.visitor(call.request, service.admission)
    if visitor is None:
        raise Problem(401, _SIGN_IN, "sign in first")
    if visitor.roles.isdisjoint(needs):
        roles = " or ".join(sorted(needs))
        raise Problem(403, "role", f"{visitor.name} may not see this page: it needs {roles}")
    return visitor


def _for_visitors(answer: Answer, needs: frozenset[routing.Role]) -> Handler[Service]:
    """Return a handler for visitors with one of the roles."""

    async def handle(service: Service, call: Call) -> web.StreamResponse:
        visitor = _visitor(service, call, needs)
        call.admit(lambda: _visitor(service, call, needs).name)
        service.clients.enter(visitor.name)
        try:
            return await answer(service, call, visitor)
        finally:
            service.clients.leave(visitor.name)

    return handle


def _with_problem_pages(handler: Handler[Service]) -> Handler[Service]:
    """Return the handler with a page for people in place of a problem document; those who are not
    signed in are sent to the sign-in page."""

    async def handle(service: Service, call: Call) -> web.StreamResponse:
        try:
            return await handler(service, call)
        except Problem as raised:
            problem = raised
        except GatekeeperError as error:
            problem = Problem(400, "bad-request", str(error))
        if problem.kind == _SIGN_IN:
            return _to_sign_in(call)
        return _respond(service, call, _problem_page(call, problem), None)

    return handle


def _page(build: Build, needs: frozenset[routing.Role]) -> Handler[Service]:
    """Return the handler of a page."""

    async def show(service: Service, call: Call, visitor: Visitor) -> web.Response:
        return _respond(service, call, await build(service, call, visitor), visitor)

    return _with_problem_pages(_for_visitors(show, needs))


def _form(act: Act, needs: frozenset[routing.Role], then: str = "../{host}") -> Handler[Service]:
    """Return the handler of a form; afterwards the browser is redirected to the relative `then`."""

    async def do(service: Service, call: Call, visitor: Visitor) -> web.Response:
        fields = await _read_form(call.request)
        service.sessions.check_form(visitor, fields)
        await act(service, call, visitor, fields)
        where = then.format(host=quote(call.params.get("host", ""), safe=""))
        return web.Response(status=303, headers={**HEADERS, "Location": where})

    return _with_problem_pages(_for_visitors(do, needs))


def _path(call: Call) -> str:
    """Return the path of the request below `/ui/`, as it was sent."""
    return call.request.raw_path.partition("?")[0].removeprefix("/ui").removeprefix("/")


def _to_sign_in(call: Call) -> web.Response:
    wanted = call.request.raw_path.removeprefix("/ui/") if call.request.method == "GET" else ""
    where = f"{shell.root_of(_path(call))}sign-in?next={quote(wanted, safe='')}"
    return web.Response(status=303, headers={**HEADERS, "Location": where})


def _respond(service: Service, call: Call, page: Page, visitor: Visitor | None) -> web.Response:
    path = _path(call)
    state = service.phase if service.ready or service.phase != "serving" else "not ready"
    shown = badge("ok" if service.ready else "bad", state, id_="state")
    audit = service.gate.parts.audit is not None
    response = shell.page_response(page, path, visitor, state=shown, audit=audit)
    # A cookie without a path is valid for the folder of the page that sets it. Cookies of deeper
    # pages would exist in addition to the session's own, and outlive the sign-out.
    if visitor is not None and visitor.cookie is not None and "/" not in path:
        shell.set_cookie(response, visitor.cookie, secure=visitor.secure or call.request.secure)
    return response


def _problem_page(call: Call, problem: Problem) -> Page:
    """Return the page for an error."""
    body = [
        paragraph(badge("bad", f"{problem.status}"), " ", problem.detail, class_="lead"),
        element("p", link(shell.root_of(_path(call)), "To the overview")),
    ]
    return Page("The request failed", body, status=problem.status)


async def _read_form(request: web.BaseRequest) -> dict[str, str]:
    """Read the fields of a form. Raises Problem 400, 408, 413 or 415."""
    if request.content_type != "application/x-www-form-urlencoded":
        raise Problem(415, "media-type", "a form is expected")
    # T9: nobody is authenticated at the sign-in.
    body = await routing.read_octets(request, _MAX_FORM)
    return dict(parse_qsl(body.decode("utf-8", "replace"), keep_blank_values=True))


async def sign_in_page(service: Service, call: Call) -> web.StreamResponse:
    """The sign-in page, on which a visitor enters a token once."""
    service.admission.check_browser(call.request.headers)
    query = dict(parse_qsl(call.query, keep_blank_values=True))
    return _respond(service, call, _sign_in(query.get("next", ""), None), None)


def _sign_in(wanted: str, wrong: str | None) -> Page:
    alert = paragraph(badge("bad", wrong), class_="lead", role="alert") if wrong else None
    said = "A token of server.token_file. You enter it once; the session ends 15 minutes after the "
    token = field("Token", "token", "", type="password", required=True, autocomplete="off")
    inner = hidden("next", wanted), token, element("button", "Sign in")
    form = element("form", inner, method="post", action="sign-in")
    body = [alert, form, paragraph(said, "last page.")]
    return Page("Sign in", body, status=401 if wrong else 200)


async def sign_in(service: Service, call: Call) -> web.StreamResponse:
    """Exchange a token for a session."""
    # The check of the Origin suffices: there is no session yet that a forged form could use.
    service.admission.check_browser(call.request.headers)
    fields = await _read_form(call.request)
    token = service.admission.tokens.match("Bearer " + fields.get("token", ""))
    wanted = fields.get("next", "")
    if token is None:
        return _respond(service, call, _sign_in(wanted, "Unknown token."), None)
    response = web.Response(status=303, headers={**HEADERS, "Location": safe_path(wanted)})
    # If a proxy terminates TLS, the browser's Origin shows it.
    origin = call.request.headers.get("Origin", "")
    secure = call.request.secure or origin.lower().startswith("https://")
    shell.set_cookie(response, service.sessions.begin(token, secure=secure), secure=secure)
    return response


def safe_path(wanted: str) -> str:
    """Return the wanted path relative to `/ui/`, or `./` if it leads anywhere else."""
    path = wanted.partition("?")[0]
    plain = unquote(path)
    outside = ":" in plain or "\\" in plain or ".." in plain or plain.startswith("/")
    return "./" + ("" if outside or not wanted.isprintable() or not wanted.isascii() else wanted)


async def _sign_out(service: Service, call: Call, visitor: Visitor, fields: dict[str, str]) -> None:
    """End the visitor's session."""
    service.sessions.end(visitor)


async def sign_out(service: Service, call: Call) -> web.StreamResponse:
    """End the session."""
    response = await _form(_sign_out, CHECK, "sign-in")(service, call)
    if response.status == 303:
        shell.set_cookie(response, "", secure=call.request.secure)
    return response


# --- requests of the pages' scripts -----------------------------------------------------------


def _feed(handler: Handler[Service], needs: frozenset[routing.Role]) -> Handler[Service]:
    """Return an API handler for visitors who are signed in."""
    return _for_visitors(lambda service, call, _visitor: handler(service, call), needs)


async def what_if(service: Service, call: Call) -> web.StreamResponse:
    """The explanation for an edited text, as a fragment of a page."""
    asked = await call.body(check.WhatIf)
    explained = await asyncio.to_thread(check.what_if_explanation, service, asked)
    text = await asyncio.to_thread(decision_pages.decision_section, service, explained)
    return web.Response(text=text, content_type="text/html", charset="utf-8", headers=HEADERS)


# --- actions of forms -------------------------------------------------------------------------


async def _pause(service: Service, call: Call, visitor: Visitor, fields: dict[str, str]) -> None:
    await service.gate.pause(host_named(call.params["host"]))


async def _resume(service: Service, call: Call, visitor: Visitor, fields: dict[str, str]) -> None:
    await service.gate.resume(host_named(call.params["host"]))


async def _block(service: Service, call: Call, visitor: Visitor, fields: dict[str, str]) -> None:
    reason = fields.get("reason", "")[:200] or f"operator {visitor.name}"
    asked = {"seconds": fields.get("seconds", ""), "reason": reason}
    block = routing.convert(asked, BlockBody, "form")
    await host_routes.block(service, host_named(call.params["host"]), block)


async def _refresh(service: Service, call: Call, visitor: Visitor, fields: dict[str, str]) -> None:
    await host_routes.refresh(service, host_named(call.params["host"]))


async def _drop(service: Service, call: Call, visitor: Visitor, fields: dict[str, str]) -> None:
    service.leases.drop(call.params["id"])


# --- files and routes -------------------------------------------------------------------------


async def static_file(service: Service, call: Call) -> web.StreamResponse:
    """A script, a stylesheet or an image, below the hash of all of them."""
    digest, _, name = call.params["rest"].partition("/")
    if digest != shell.assets_hash() or name not in shell.ASSETS:
        raise Problem(404, "not-found", "there is no such file, or it has another URL now")
    headers = {**HEADERS, "Cache-Control": "public, max-age=31536000, immutable"}
    body, kind = shell.asset(name), shell.ASSETS[name]
    return web.Response(body=body, content_type=kind, charset="utf-8", headers=headers)


async def add_slash(service: Service, call: Call) -> web.StreamResponse:
    """`/ui`: redirect to `/ui/`, which relative links need."""
    return web.Response(status=308, headers={**HEADERS, "Location": "ui/"})


def _public(method: str, path: str, handler: Handler[Service]) -> Route[Service]:
    """Return a route whose handler authenticates the visitor itself."""
    return Route(method, path, handler, answers={200: "text/html"}, probe=True)


ROUTES = (
    _public("GET", "/ui", add_slash),
    _public("GET", "/ui/", _page(status_pages.overview, ADMIN)),
    _public("GET", "/ui/hosts", _page(status_pages.hosts_page, ADMIN)),
    _public("GET", "/ui/hosts/{host}", _page(status_pages.host_page, CRAWL_OR_ADMIN)),
    _public("GET", "/ui/explain", _page(decision_pages.explain_page, CHECK)),
    _public("GET", "/ui/waiting", _page(status_pages.waiting_page, ADMIN)),
    _public("GET", "/ui/live", _page(decision_pages.live_page, ADMIN)),
    _public("GET", "/ui/history", _page(decision_pages.history_page, CHECK)),
    _public("GET", "/ui/audit", _page(status_pages.audit_page, ADMIN)),
    _public("GET", "/ui/config", _page(status_pages.config_page, ADMIN)),
    _public("GET", "/ui/sign-in", _with_problem_pages(sign_in_page)),
    _public("POST", "/ui/sign-in", _with_problem_pages(sign_in)),
    _public("POST", "/ui/sign-out", sign_out),
    _public("GET", "/ui/series", _feed(operators.get_series, ADMIN)),
    _public("GET", "/ui/events", _feed(operators.stream_decisions, ADMIN)),
    _public("POST", "/ui/what-if", _feed(what_if, CHECK)),
    _public("POST", "/ui/hosts/{host}/pause", _form(_pause, ADMIN)),
    _public("POST", "/ui/hosts/{host}/resume", _form(_resume, ADMIN)),
    _public("POST", "/ui/hosts/{host}/block", _form(_block, ADMIN)),
    _public("POST", "/ui/hosts/{host}/refresh", _form(_refresh, ADMIN)),
    _public("POST", "/ui/leases/{id}/drop", _form(_drop, ADMIN, "../../waiting?state=held")),
    _public("GET", "/ui/static/{rest*}", static_file),
)
