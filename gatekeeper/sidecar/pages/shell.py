"""The common parts of the pages: visitors, head, navigation, response headers and static files.

Links are relative, by the depth of the page's own path, so a page works under any prefix that a
proxy adds. The URL of a static file contains a hash of all files, so its content never changes.

A visitor presents a token once, and then a cookie that is signed, short-lived and hidden from
scripts. The key of the signature is the token itself, so a cookie is valid after a restart, but no
longer than its token. Each form carries a secret that only our own pages know (T4), which each
process creates anew.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Final, NamedTuple

from aiohttp import web

from gatekeeper.clock import Clock
from gatekeeper.sidecar.pages.html import Child, Html, element, hidden, items, link, markup
from gatekeeper.sidecar.routing import ANY_ROLE, Problem, Role
from gatekeeper.sidecar.security import Admission, Token
from gatekeeper.urls import make_room

# --- visitors ---------------------------------------------------------------------------------

COOKIE: Final = "gatekeeper_session"
MAX_IDLE: Final = 900
"""Seconds without a request after which a session ends."""
MAX_SESSION: Final = 43_200
"""Seconds after the sign-in at which a session ends in any case."""


_TIME: Final = re.compile("[0-9]{1,12}")
"""A time in a cookie. Python may refuse to convert longer numbers."""
_TLS_PREFIX: Final = "tls-"
_MAX_ENDED: Final = 10_000
"""Sessions that were signed out and are remembered, of which each took a token."""


class Visitor(NamedTuple):
    """An authenticated visitor of the pages."""

    name: str
    """The name of the client in the log and for its limits."""
    roles: frozenset[Role]
    form: str
    """The secret that each form has to carry."""
    cookie: str | None = None
    """The renewed cookie of the session; None if there is no session."""
    secure: bool = False
    """True if the session started over TLS (maybe of a proxy): its cookie is sent over TLS only."""


class Sessions:
    """Authenticates visitors by their credentials. Only the sessions that were signed out are
    stored, in memory: a restart forgets them, and a copied cookie is valid until its end again."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._key = secrets.token_bytes(32)
        self._ended: dict[str, None] = {}
        """The nonces of the sessions that were signed out; the oldest are evicted."""

    def visitor(self, request: web.BaseRequest, admission: Admission) -> Visitor | None:
        """Return the visitor, or None if a sign-in is needed. Raises Problem 401 or 403."""
        admission.check_browser(request.headers)
        if "Authorization" in request.headers or not admission.tokens:
            name = admission.admit(request, ANY_ROLE)
            return Visitor(name, admission.roles(request.headers), self._form(name))
        text, _, signature = request.cookies.get(COOKIE, "").rpartition("|")
        name, began, until, nonce = [*text.split("|"), "", "", ""][:4]
        if not (_TIME.fullmatch(began) and _TIME.fullmatch(until)) or nonce in self._ended:
            return None
        if int(until) <= self._clock.wall():
            return None
        for token in admission.tokens.of(name):
            signed = _signature(token, text)
            if hmac.compare_digest(signed.encode(), signature.encode("utf-8", "replace")):
                cookie = self._cookie(token, int(began), nonce)
                secure = nonce.startswith(_TLS_PREFIX)
                return Visitor(token.name, token.roles, self._form(nonce), cookie, secure)
        return None

    def begin(self, token: Token, *, secure: bool = False) -> str:
        """Return the cookie of a new session; `secure`: it started over TLS."""
        nonce = (_TLS_PREFIX if secure else "") + secrets.token_hex(16)
        return self._cookie(token, int(self._clock.wall()), nonce)

    def end(self, visitor: Visitor) -> None:
        """End a visitor's session, which no copy of its cookie opens any more."""
        if visitor.cookie is not None:
            make_room(self._ended, _MAX_ENDED)
            self._ended[visitor.cookie.split("|")[3]] = None

    def check_form(self, visitor: Visitor, fields: Mapping[str, str]) -> None:
        """Raise Problem 403 for a form that does not come from our own pages."""
        given = fields.get("form", "").encode("utf-8", "replace")
        if not hmac.compare_digest(visitor.form.encode(), given):
            detail = "this form is too old, or not from our pages: load its page again"
            raise Problem(403, "form", detail)

    def _cookie(self, token: Token, began: int, nonce: str) -> str:
        until = min(int(self._clock.wall()) + MAX_IDLE, began + MAX_SESSION)
        text = f"{token.name}|{began}|{until}|{nonce}"
        return f"{text}|{_signature(token, text)}"

    def _form(self, session: str) -> str:
        return hmac.new(self._key, session.encode(), hashlib.sha256).hexdigest()


def _signature(token: Token, text: str) -> str:
    key = hashlib.blake2b(token.value, person=b"ui session").digest()
    return hmac.new(key, text.encode("utf-8", "replace"), hashlib.sha256).hexdigest()


def set_cookie(response: web.StreamResponse, value: str, *, secure: bool) -> None:
    """Set the cookie of a session; an empty value ends the session.

    The cookie has no path attribute, so it is sent for `/ui/` only, under any prefix of a proxy.
    """
    age = MAX_IDLE if value else 0
    response.set_cookie(
        COOKIE, value, max_age=age, path="", secure=secure, httponly=True, samesite="Strict"
    )


# --- pages ------------------------------------------------------------------------------------

HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; "
    "form-action 'self'",
    "X-Content-Type-Options": "nosniff",
    # With `no-referrer` a browser sends `Origin: null` with our own forms.
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
ASSETS: Final = {
    "app.css": "text/css",
    "app.js": "text/javascript",
    "charts.js": "text/javascript",
    "live.js": "text/javascript",
    "explain.js": "text/javascript",
    "icon.svg": "image/svg+xml",
    "vendor/uPlot.iife.min.js": "text/javascript",
    "vendor/uPlot.min.css": "text/css",
}
_PAGES: Final = ("", "hosts", "explain", "waiting", "live", "history", "audit", "config")
"""The paths of the pages of the navigation, below `/ui/`; the first one is the overview."""


@cache
def asset(name: str) -> bytes:
    """Return the content of a static file."""
    return files("gatekeeper.sidecar.pages").joinpath("static", *name.split("/")).read_bytes()


@cache
def assets_hash() -> str:
    """Return the hash in the URL of every static file; it changes if any file changes."""
    digest = hashlib.sha256()
    for name in ASSETS:
        digest.update(name.encode() + b"\0" + asset(name) + b"\0")
    return digest.hexdigest()[:16]


class Page(NamedTuple):
    """One page: its content and how to display it."""

    title: str
    body: Child
    refresh: float | None = None
    """Seconds after which the page reloads itself; None: never."""
    files: tuple[str, ...] = ()
    """The scripts and stylesheets that it has beside those of all pages."""
    status: int = 200


def root_of(path: str) -> str:
    """Return the relative URL of `/ui/` from a page; `path` is that of the page below `/ui/`."""
    return "../" * path.count("/") or "./"


def page_response(
    page: Page, path: str, visitor: Visitor | None, *, state: Html, audit: bool
) -> web.Response:
    """Return the response with a page; `path` is its path below `/ui/`, `state` the badge of the
    service. `audit`: it has an audit record."""
    root = root_of(path)
    static = f"{root}static/{assets_hash()}/"
    head = [markup('<link rel="icon" href="{}icon.svg">', static)]
    for one in ("app.css", "app.js", *page.files):
        if one.endswith(".css"):
            head.append(markup('<link rel="stylesheet" href="{}{}">', static, one))
        elif one.startswith("vendor"):
            head.append(element("script", src=static + one, defer=True))
        else:
            head.append(element("script", src=static + one, type="module"))
    body = markup(
        '<a href="#main" class="skip">Skip to the content</a>'
        '<header><span class="brand">gatekeeper</span>{}{}</header>'
        '<p id="stale" role="status" class="stale" hidden></p>'
        '<main id="main" tabindex="-1"><h1>{}</h1>{}</main>',
        state,
        visitor and _navigation(path, visitor, audit),
        page.title,
        page.body,
    )
    form = visitor.form if visitor else None
    whole = element("body", body, data_root=root, data_refresh=page.refresh, data_form=form)
    return web.Response(
        text=document(f"{page.title} - gatekeeper", head, whole),
        status=page.status,
        content_type="text/html",
        charset="utf-8",
        headers=HEADERS,
    )


def document(title: str, head: Child, body: Html) -> Html:
    """Return an HTML document; `body` is its element."""
    return markup(
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><title>{}</title>{}</head>{}</html>',
        title,
        head,
        body,
    )


def post_form(
    action: str, visitor: Visitor, button: Child, fields: Child = None, class_: str = "act"
) -> Html:
    """Return a form that changes something; it carries the secret of this visitor's pages."""
    inner = hidden("form", visitor.form), fields, element("button", button, class_=class_)
    return element("form", inner, method="post", action=action)


def _navigation(path: str, visitor: Visitor, audit: bool) -> Child:
    """Return the links to the pages, and the form to sign out."""
    root, here = root_of(path), path.partition("/")[0]
    links = [
        link(root + at, at.title() or "Overview", aria_current="page" if at == here else None)
        for at in _PAGES
        if audit or at != "audit"
    ]
    out = None
    if visitor.cookie is not None:
        out = post_form(f"{root}sign-out", visitor, f"Sign out {visitor.name}", class_="quiet")
    return [element("nav", items(links), aria_label="Pages"), out]
