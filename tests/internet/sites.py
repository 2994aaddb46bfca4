"""`Site`: what one host of the fake internet does, and what it saw."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from typing import Any

from tests.internet.behaviours import Behaviour, Custom, Page, redirect
from tests.internet.certs import TLS
from tests.internet.wire import Exchange, Request

Act = Behaviour | bytes | str | Callable[[Exchange], Awaitable[None]]

NOT_FOUND = Page(b"nothing here", 404)


class Site:
    """What one host does: a behaviour, or a succession of them, for each path.

    `requests` is what the server saw of it, in order of arrival.
    """

    def __init__(self, name: str, addresses: list[str], tls: TLS) -> None:
        self.name = name
        self.addresses = addresses
        self.tls: TLS = tls
        self.requests: list[Request] = []
        self.in_flight = 0
        self.most_concurrent = 0
        """The largest number of requests that were in flight at once."""
        self.default: Behaviour = NOT_FOUND
        self._paths: dict[str, list[Behaviour]] = {}

    @property
    def url(self) -> str:
        """`http://name`, without a slash at the end."""
        return self.name if "://" in self.name else f"http://{self.name}"

    def on(self, path: str, *acts: Act) -> Site:
        """Successive requests of the path (or path and query) get these; the last repeats."""
        if not acts:
            raise ValueError("a path needs at least one behaviour")
        self._paths[path] = [_behaviour(act) for act in acts]
        return self

    def robots(self, text: Act, **page: Any) -> Site:
        """The site's /robots.txt: text, or a behaviour."""
        act = Page(text, **page) if isinstance(text, bytes | str) else text
        return self.on("/robots.txt", act)

    def page(self, path: str, body: bytes | str = b"ok", **page: Any) -> Site:
        """An ordinary page; keywords as for `Page`."""
        return self.on(path, Page(body, **page))

    def redirect(self, path: str, location: str, status: int = 302) -> Site:
        """The path leads elsewhere."""
        return self.on(path, redirect(location, status))

    def otherwise(self, act: Act) -> Site:
        """What every path without a behaviour of its own does (404 unless set)."""
        self.default = _behaviour(act)
        return self

    @property
    def paths(self) -> list[str]:
        """The targets asked for, in order."""
        return [request.target for request in self.requests]

    def gaps(self) -> list[float]:
        """Seconds between each arrival and the one before it."""
        times = [request.at for request in self.requests]
        return [b - a for a, b in itertools.pairwise(times)]

    def choose(self, request: Request) -> Behaviour:
        """The behaviour for a request; a succession moves on."""
        acts = self._paths.get(request.target)
        if acts is None:
            acts = self._paths.get(request.path)
            if acts is None:
                return self.default
        return acts[0] if len(acts) == 1 else acts.pop(0)


def _behaviour(act: Act) -> Behaviour:
    if isinstance(act, Behaviour):
        return act
    if isinstance(act, bytes | str):
        return Page(act)
    return Custom(act=act)
