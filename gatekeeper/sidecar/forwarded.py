"""The URL that a proxy's subrequest asks about, told from its headers for certain or not at all.

A proxy passes on what its visitor sent, so of two headers that say different things either
may be the visitor's (T7). None outranks another: all that speak of one part of the URL must
say the same, each must occur once, and a host must be a host, not the beginning of a path.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

from gatekeeper.sidecar.problems import Problem

__all__ = ["asked_url"]

_URIS = ("X-Original-URI", "X-Forwarded-Uri")  # nginx; Traefik and Caddy
_READ = (
    *_URIS,
    "X-Original-URL",
    "X-Original-Method",
    "X-Forwarded-Host",
    "X-Forwarded-Proto",
    "X-Forwarded-Method",
    "Host",
    "User-Agent",
)
_HOST = r"(?:[A-Za-z0-9_][A-Za-z0-9_.\-]*|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?"
_IS_HOST = re.compile(_HOST)
_IS_PATH = re.compile(r"/[^#]*", re.DOTALL)
"""No request target holds a `#` (RFC 9112, 3.2): one reader would end the path there."""
_WHOLE = re.compile(rf"(https?)://({_HOST})(/.*)", re.DOTALL)


class Headers(Protocol):
    """Those of a request."""

    def __contains__(self, name: object) -> bool:
        """Whether there is one of that name, in whatever case."""

    def __getitem__(self, name: str) -> str:
        """The first of that name."""

    def getall(self, name: str, default: tuple[str, ...]) -> Sequence[str]:
        """All of that name."""


def asked_url(headers: Headers, behind: str) -> str:
    """The URL, from either style of headers or the path `behind` ours, as Envoy asks.

    Raises Problem 403 where it can't be told for certain.
    """
    for name in _READ:
        if len(headers.getall(name, ())) > 1:
            raise Problem(403, "duplicate-header", f"{name} occurs twice")
    schemes = _all(headers, "X-Forwarded-Proto")
    hosts = {host.lower() for host in _all(headers, "X-Forwarded-Host")}
    paths = _all(headers, *_URIS)
    if behind.startswith("/"):
        paths.add(behind)
        hosts |= {host.lower() for host in _all(headers, "Host")}  # Envoy keeps the visitor's
    for whole in _all(headers, "X-Original-URL"):  # ingress-nginx
        parts = _WHOLE.fullmatch(whole)
        if parts is None:
            raise Problem(403, "no-target", "X-Original-URL is no whole URL of a host")
        schemes.add(parts[1])
        hosts.add(parts[2].lower())
        paths.add(parts[3])
    scheme, path = _one(schemes, "X-Forwarded-Proto"), _one(paths, "the URI")
    host = _one(hosts or _all(headers, "Host"), "X-Forwarded-Host")
    if scheme not in ("http", "https"):
        raise Problem(403, "no-target", "X-Forwarded-Proto is neither http nor https")
    if not _IS_HOST.fullmatch(host):
        raise Problem(403, "no-target", "the host is not of the form name or name:port")
    if not _IS_PATH.fullmatch(path):
        raise Problem(403, "no-target", "the URI is no path with a query")
    return f"{scheme}://{host}{path}"


def _all(headers: Headers, *names: str) -> set[str]:
    return {headers[name] for name in names if name in headers}


def _one(said: set[str], part: str) -> str:
    if len(said) > 1:
        raise Problem(403, "headers-disagree", f"two headers say different things of {part}")
    if not said:
        raise Problem(
            403, "no-target", "X-Forwarded-Proto, -Host and -Uri (or X-Original-URI) are needed"
        )
    return next(iter(said))
