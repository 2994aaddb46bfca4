"""The hosts of the benchmark of manners, and the log of what they were asked.

Every host is an address of 127.0.1.0/24 with a port that all share. A `World` has the hosts, the
URLs that a crawler is given, and the server. The log is the only evidence: `manners_judge` reads
nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from enum import StrEnum
from typing import NamedTuple

from aiohttp import web

__all__ = [
    "BY_REDIRECT",
    "PRIVATE",
    "PUBLIC",
    "WAYS",
    "Host",
    "Kind",
    "Seen",
    "World",
    "crawl",
    "in_thread",
    "interrupted",
]

PUBLIC = "127.0.1.0/24"
"""The hosts of the crawl. Crawlers that refuse private addresses are told to allow these."""
PRIVATE = "127.0.9.1"
"""An address that stands for an internal service: it is not in `PUBLIC`."""
WAYS = {"/by-redirect.html", "/by-link.html", "/by-robots.txt"}
"""The ways to it: a page that redirects, a link on a page, a robots.txt that redirects."""
BY_REDIRECT = "/private/by-redirect"
"""The path of a disallowed page that no list has: only redirects lead to it."""
_RULES = "User-agent: *\nDisallow: /private/\n"
_WORDS = "<p>Some words that nobody reads, so that the page does not look like an error.</p>" * 40
_SLOW_SECONDS = 20.0
"""How long a page of a slow host takes, at most: until the world is released."""


class Kind(StrEnum):
    """What a host does."""

    RULES = "rules"
    REDIRECT = "a page that redirects to a disallowed page"
    DELAY = "Crawl-delay"
    LIMITED = "429 with Retry-After"
    DOWN = "503 with Retry-After"
    ROBOTS_503 = "robots.txt answers 503"
    TO_PRIVATE = "a page that redirects to a private address"
    ROBOTS_PRIVATE = "a robots.txt that redirects to a private address"
    NO_FILE = "no robots.txt"
    SLOW = "a page that takes long"
    NEW = "only the list after a restart has it"


class Host(NamedTuple):
    """One host."""

    address: str
    kind: Kind
    paths: tuple[str, ...]
    """The pages that the crawler is given, in this order."""
    seconds: float = 0.0
    """Of its Crawl-delay or Retry-After."""

    def robots(self) -> str:
        """Return the text of its robots.txt."""
        delay = f"Crawl-delay: {self.seconds:g}\n" if self.kind is Kind.DELAY else ""
        return _RULES + delay


class Seen(NamedTuple):
    """One request in the log. Times are seconds of one clock."""

    at: float
    """When its head had been read."""
    address: str
    path: str
    status: int
    retry_after: float | None = None
    """Seconds that the response asked to wait."""


class World:
    """The hosts, their server and its log."""

    def __init__(
        self,
        hosts: tuple[Host, ...],
        links: tuple[str, ...] = (),
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.hosts = {host.address: host for host in hosts}
        self.links = links
        """More URLs for the crawler, as paths of `PRIVATE`."""
        self.now = now
        self.log: list[Seen] = []
        self.port = 0
        self._refused_until: dict[str, float] = {}
        self._released = asyncio.Event()

    def urls(self) -> list[str]:
        """Return what the crawler is given, host by host."""
        listed = [self._url(one.address, path) for one in self.hosts.values() for path in one.paths]
        return listed + [self._url(PRIVATE, path) for path in self.links]

    def later_urls(self) -> list[str]:
        """Return what it is given after a restart as well: a page of a new host, which shows in the
        log when it was under way again, and of each host that has told it to wait."""
        last = sorted(self.hosts.values(), key=lambda one: one.kind is not Kind.NEW)
        later = [one.address for one in last if one.kind is Kind.NEW or one.seconds]
        return [self._url(address, "/later.html") for address in later]

    def _url(self, address: str, path: str) -> str:
        return f"http://{address}:{self.port}{path}"

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Serve all hosts on one port until the block is left."""
        loop = asyncio.get_running_loop()
        server = web.Server(self._answer, access_log=None)
        first, *rest = [PRIVATE, *self.hosts]
        with contextlib.ExitStack() as stack:
            listening = await loop.create_server(server, first, 0, backlog=1024)
            self.port = listening.sockets[0].getsockname()[1]
            stack.callback(listening.close)
            for address in rest:
                one = await loop.create_server(server, address, self.port, backlog=1024)
                stack.callback(one.close)
            try:
                yield
            finally:
                self._released.set()
                await server.shutdown(1.0)

    def release(self) -> None:
        """Let slow pages be answered. Call it in the server's loop."""
        self._released.set()

    def forget(self, host: Host) -> None:
        """Let a host refuse its next page as if it were the first."""
        self._refused_until.pop(host.address, None)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        at = self.now()
        assert request.transport is not None
        address = request.transport.get_extra_info("sockname")[0]
        path = request.raw_path
        host = self.hosts.get(address)
        response = self._response(host, path, at)
        wait = response.headers.get("Retry-After")
        self.log.append(Seen(at, address, path, response.status, float(wait) if wait else None))
        if host is not None and host.kind is Kind.SLOW and path.startswith("/slow"):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._released.wait(), _SLOW_SECONDS)
        return response

    def _response(self, host: Host | None, path: str, at: float) -> web.Response:
        if host is None:  # the private address: whatever asks, it answers
            return _text(_RULES) if path.endswith("robots.txt") else _page(path)
        if path == "/robots.txt":
            return self._robots(host)
        if host.kind in (Kind.LIMITED, Kind.DOWN):
            until = self._refused_until.setdefault(host.address, at + host.seconds)
            if at < until:
                status = 429 if host.kind is Kind.LIMITED else 503
                wait = str(math.ceil(until - at))
                return _page("later", status, {"Retry-After": wait})
        if path.startswith("/to/"):
            return self._redirect(host, path)
        return _page(path)

    def _robots(self, host: Host) -> web.Response:
        match host.kind:
            case Kind.ROBOTS_503:
                return web.Response(status=503, text="the file can't be read now")
            case Kind.NO_FILE:
                return web.Response(status=404, text="no file")
            case Kind.ROBOTS_PRIVATE:
                return _moved(self._url(PRIVATE, "/by-robots.txt"))
        return _text(host.robots())

    def _redirect(self, host: Host, path: str) -> web.Response:
        match path:
            case "/to/here":
                return _moved(BY_REDIRECT)
            case "/to/there":
                other = next(one for one in self.hosts.values() if one.kind is Kind.RULES)
                return _moved(self._url(other.address, f"{BY_REDIRECT}-of-{host.address}"))
        return _moved(self._url(PRIVATE, "/by-redirect.html"))


def _page(title: str, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    # With an icon inside, for which no browser asks.
    body = f'<!doctype html><title>{title}</title><link rel="icon" href="data:,">{_WORDS}'
    return web.Response(text=body, content_type="text/html", status=status, headers=headers)


def _text(body: str) -> web.Response:
    return web.Response(text=body, content_type="text/plain")


def _moved(to: str) -> web.Response:
    return web.Response(status=302, headers={"Location": to})


def _addresses(first: int = 1) -> Iterator[str]:
    return (f"127.0.1.{number}" for number in range(first, 255))


def crawl(now: Callable[[], float] = time.monotonic) -> World:
    """Return the 30 hosts of the undisturbed crawl."""
    delay, wait = 1.0, 2.0  # seconds
    pages = tuple(f"/{number}.html" for number in range(1, 5))
    address = _addresses()
    hosts = []
    for number in range(8):  # the disallowed page is the first, second, third or fourth of its host
        listed = list(pages)
        listed[number % 4] = f"/private{pages[number % 4]}"
        hosts.append(Host(next(address), Kind.RULES, tuple(listed)))
    hosts += [
        Host(next(address), Kind.REDIRECT, ("/to/here", "/to/there", "/1.html")) for _ in range(3)
    ]
    hosts += [Host(next(address), Kind.DELAY, pages, delay) for _ in range(5)]
    hosts += [Host(next(address), Kind.LIMITED, pages[:3], wait) for _ in range(3)]
    hosts += [Host(next(address), Kind.DOWN, pages[:3], wait) for _ in range(3)]
    hosts += [Host(next(address), Kind.ROBOTS_503, pages[:3]) for _ in range(3)]
    hosts.append(Host(next(address), Kind.TO_PRIVATE, ("/to/private", "/1.html")))
    hosts.append(Host(next(address), Kind.ROBOTS_PRIVATE, ("/1.html",)))
    hosts += [Host(next(address), Kind.NO_FILE, pages[:3]) for _ in range(3)]
    return World(tuple(hosts), links=("/by-link.html",), now=now)


def interrupted(now: Callable[[], float] = time.monotonic) -> World:
    """Return the ten hosts of the crawl that is killed and started again."""
    delay, wait = 4.0, 60.0  # seconds
    address = _addresses(101)
    hosts = [Host(next(address), Kind.DELAY, ("/1.html",), delay) for _ in range(2)]
    hosts.append(Host(next(address), Kind.LIMITED, ("/1.html",), wait))
    hosts.append(Host(next(address), Kind.DOWN, ("/1.html",), wait))
    hosts += [Host(next(address), Kind.RULES, ("/1.html", "/2.html")) for _ in range(4)]
    hosts.append(Host(next(address), Kind.SLOW, ("/slow.html",)))
    hosts.append(Host(next(address), Kind.NEW, ()))
    return World(tuple(hosts), now=now)


@contextmanager
def in_thread(world: World) -> Iterator[asyncio.AbstractEventLoop]:
    """Serve a world from a thread of this process until the block is left. Yield its loop."""
    up: list[asyncio.AbstractEventLoop] = []
    ready, over = threading.Event(), asyncio.Event()

    async def serve() -> None:
        async with world.serving():
            up.append(asyncio.get_running_loop())
            ready.set()
            await over.wait()

    def work() -> None:
        try:
            asyncio.run(serve())
        finally:
            ready.set()

    thread = threading.Thread(target=work, name="sites")
    thread.start()
    ready.wait()
    if not up:
        raise OSError("the sites could not be served")
    try:
        yield up[0]
    finally:
        up[0].call_soon_threadsafe(over.set)
        thread.join()
