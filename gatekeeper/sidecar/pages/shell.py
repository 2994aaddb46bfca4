"""What every page has: its head, its navigation, its headers, and the files that it loads.

Links are relative, by the depth of the page's own path: a page works under any prefix that a
proxy puts in front of it. The files' addresses hold a hash of their contents, and never change.
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files
from typing import Final, NamedTuple

from aiohttp import web

from gatekeeper.sidecar.pages.html import Child, Html, tag
from gatekeeper.sidecar.pages.sign_in import COOKIE, IDLE, Visitor

__all__ = [
    "ASSETS",
    "HEADERS",
    "Page",
    "asset",
    "assets_hash",
    "badge",
    "page_response",
    "set_cookie",
]

HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; "
    "form-action 'self'",
    "X-Content-Type-Options": "nosniff",
    # With `no-referrer` a browser calls the origin of our own forms `null`.
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
_PAGES: Final = (
    ("Overview", ""),
    ("Hosts", "hosts"),
    ("Explain", "explain"),
    ("Waiting", "waiting"),
    ("Live", "live"),
    ("History", "history"),
    ("Config", "config"),
)


@cache
def asset(name: str) -> bytes:
    """The octets of a file of the pages."""
    return files("gatekeeper.sidecar.pages").joinpath("static", *name.split("/")).read_bytes()


@cache
def assets_hash() -> str:
    """Stands in the address of every file: another one for other contents of any."""
    digest = hashlib.sha256()
    for name in ASSETS:
        digest.update(name.encode() + b"\0" + asset(name) + b"\0")
    return digest.hexdigest()[:16]


class Page(NamedTuple):
    """What one page is."""

    title: str
    path: str
    """Below `/ui/`, such as "hosts/a.example"."""
    body: Child
    refresh: float | None = None
    """Seconds after which it is loaded again; None: it is as it was asked for."""
    scripts: tuple[str, ...] = ()
    styles: tuple[str, ...] = ()
    status: int = 200

    @property
    def root(self) -> str:
        """How `/ui/` is reached from here."""
        return "../" * self.path.count("/") or "./"


def page_response(page: Page, visitor: Visitor | None, *, state: str, ready: bool) -> web.Response:
    """The whole answer; `state` is that of the service."""
    return web.Response(
        text="<!doctype html>" + _document(page, visitor, state, ready),
        status=page.status,
        content_type="text/html",
        charset="utf-8",
        headers=HEADERS,
    )


def set_cookie(response: web.StreamResponse, value: str, *, secure: bool) -> None:
    """Give the session's cookie; an empty one ends it. Without a path it is for `/ui/` alone,
    wherever a proxy puts that."""
    age = IDLE if value else 0
    parts = [f"{COOKIE}={value}", f"Max-Age={age}", "HttpOnly", "SameSite=Strict"]
    response.headers.add("Set-Cookie", "; ".join([*parts, *(["Secure"] if secure else [])]))


def _document(page: Page, visitor: Visitor | None, state: str, ready: bool) -> Html:
    root = page.root
    static = f"{root}static/{assets_hash()}/"
    names = ("app.js", *page.scripts)
    return tag(
        "html",
        tag(
            "head",
            tag("meta", charset="utf-8"),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("meta", name="color-scheme", content="light dark"),
            tag("title", f"{page.title} - gatekeeper"),
            tag("link", rel="icon", href=f"{static}icon.svg"),
            [tag("link", rel="stylesheet", href=static + one) for one in ("app.css", *page.styles)],
            [
                tag(
                    "script",
                    src=static + one,
                    type=None if one.startswith("vendor") else "module",
                    defer=one.startswith("vendor"),
                )
                for one in names
            ],
        ),
        tag(
            "body",
            tag("a", "Skip to the content", href="#main", class_="skip"),
            _header(page, visitor, state, ready),
            tag("p", id="stale", role="status", class_="stale", hidden=True),
            tag("main", tag("h1", page.title), page.body, id="main", tabindex=-1),
            data_root=root,
            data_refresh=page.refresh,
            data_form=visitor.form if visitor is not None else None,
        ),
        lang="en",
    )


def _header(page: Page, visitor: Visitor | None, state: str, ready: bool) -> Html:
    root, here = page.root, page.path.partition("/")[0].partition("?")[0]
    links = [
        tag("li", tag("a", text, href=root + path, aria_current="page" if path == here else None))
        for text, path in _PAGES
    ]
    out = None
    if visitor is not None and visitor.cookie is not None:
        out = tag(
            "form",
            tag("input", type="hidden", name="form", value=visitor.form),
            tag("button", f"Sign out {visitor.name}", class_="quiet"),
            method="post",
            action=f"{root}sign-out",
        )
    return tag(
        "header",
        tag("span", "gatekeeper", class_="brand"),
        badge("ok" if ready else "bad", state, id_="state"),
        tag("nav", tag("ul", links), aria_label="Pages") if visitor is not None else None,
        out,
    )


_ICONS: Final = {"ok": "●", "warn": "▲", "bad": "■", "idle": "○"}


def badge(kind: str, text: str, *, id_: str | None = None) -> Html:
    """A state as a word with a sign, so that it is not told by its colour alone."""
    return tag(
        "span",
        tag("span", _ICONS[kind], aria_hidden="true"),
        " ",
        text,
        class_=f"badge {kind}",
        id=id_,
    )
