"""`gatekeeper serve --proxy PORT`: a forward proxy for plain http, mainly for browsers.

Each request is decided, waits until its host is due, and connects through the guard. Redirects
are passed back, so the browser sends the next hop through the proxy as well. The limits are those
of `/v1/fetch`. CONNECT is refused, since the paths inside a tunnel are hidden, and one connection
may carry any number of requests; `server.proxy_connect = "host"` allows it by host and port.
"""

from __future__ import annotations

import asyncio
import re
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from aiohttp import web

from gatekeeper import urls
from gatekeeper.client.wire import decision_headers
from gatekeeper.errors import AddressRefused
from gatekeeper.fetching.allowed_addresses import Guard
from gatekeeper.fetching.guard import GuardedResolver
from gatekeeper.library_internals import tunnel_reader
from gatekeeper.sidecar.routes.fetch import (
    hold_while_read,
    pass_page_on,
    refuse_unsendable,
    time_limit,
    with_lease,
)
from gatekeeper.sidecar.routing import METHODS, Call, Problem, read_octets

if TYPE_CHECKING:
    import aiohttp

    from gatekeeper.gate.lease import Lease
    from gatekeeper.sidecar.service import Service

_ROUTE_LABEL = "proxy"
"""Value of the label `route` in the metrics."""
_VIA = "1.1 gatekeeper"
_HOP_BY_HOP = frozenset(
    {"connection", "http2-settings", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"}
)
"""Header fields of one hop only (RFC 9110 section 7.6.1), apart from those with `proxy-`."""
_CONNECT_SECONDS: Final = 30.0
"""Seconds that connecting to a site may take."""
_PIECE_OCTETS: Final = 65_536
_AUTHORITY: Final = re.compile(r"[^/?#@\s\\]+:[0-9]{1,5}")
_SIGNATURE = {"signature", "signature-agent", "signature-input"}
_SET_BY_GATE = frozenset({"content-length", "expect", "host", "user-agent", *_SIGNATURE})
"""Header fields that the gate sets itself, since it is the sender of the request."""


class Proxy:
    """Handles proxy requests, with the gate, the limits and the log of `service`."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._tunnels = 0

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Handle one request; every error becomes a problem document."""
        return await self._service.answer_by(request, self._handle)

    async def _handle(self, call: Call) -> web.StreamResponse:
        service, request = self._service, call.request
        server = service.config.server
        call.where = _ROUTE_LABEL
        await service.wait_to_begin()
        call.admit(lambda: service.admission.admit_to_proxy(request))
        is_tunnel = request.method == "CONNECT" and server.proxy_connect == "host"
        url = _tunnel_url(request) if is_tunnel else _requested_url(request)
        service.clients.enter(call.client)
        try:
            if is_tunnel:
                return await self._tunnel(call, url)
            async with time_limit(service) as end:
                body = await read_octets(request, server.max_body)
                return await with_lease(
                    service, call, url, end, lambda lease: self._send(lease, call, url, body)
                )
        finally:
            service.clients.leave(call.client)

    async def _send(self, lease: Lease, call: Call, url: str, body: bytes) -> web.StreamResponse:
        """Send the request under its lease, and pass the site's response on."""
        service = self._service
        headers = end_to_end(call.request.headers, without=_SET_BY_GATE)
        _add_default(headers, "Accept-Encoding", "identity")
        async with service.session.request(
            call.request.method, url, headers=headers, data=body or None, allow_redirects=False
        ) as page:
            service.operators.feed.reported(lease.host, page.status)
            hold_while_read(lease, page)
            return await pass_page_on(service, call, page, lambda: _head(page, lease))

    # -- tunnels, if the operator allows them -----------------------------------------

    async def _tunnel(self, call: Call, url: str) -> web.StreamResponse:
        """Connect to the host under a lease, and relay octets until one side closes."""
        service = self._service
        tunnel: _Tunnel | None = None
        try:
            async with time_limit(service) as end:
                tunnel = await with_lease(
                    service, call, url, end, lambda lease: self._dial(lease, url)
                )
            with service.streams:
                return await self._relay(tunnel, call)
        finally:
            if tunnel is not None:
                tunnel.close()

    async def _dial(self, lease: Lease, url: str) -> _Tunnel:
        """Connect to the host of a URL through the guard. Raises Problem 403, 502 or 503.

        The lease holds its slot while the connection is open. A tunnel counts from here on: while
        it waits for its lease, it is a request that waits, like any other.
        """
        if self._tunnels >= self._service.config.server.proxy_tunnels:
            lease.give_back()
            raise Problem(503, "busy", "too many tunnels are open (server.proxy_tunnels)")
        self._tunnels += 1
        try:
            tunnel = await self._connect(lease, url)
        except BaseException:
            self._closed()
            raise
        tunnel.add_callback(self._closed)
        lease.ends_with(tunnel)
        return tunnel

    def _closed(self) -> None:
        self._tunnels -= 1

    async def _connect(self, lease: Lease, url: str) -> _Tunnel:
        parts, began = self._service.gate.parts, time.monotonic()
        guard = parts.guard or Guard(self._service.config)
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                resolver = GuardedResolver(guard, parts.resolver)
                return _Tunnel(*await _connect(guard, resolver, url), lease)
        except AddressRefused as error:
            lease.give_back()
            raise Problem(403, "blocked", "blocked") from error  # T2: this one word
        except OSError as error:
            parts.unreached(lease, error)
            lease.report(elapsed=time.monotonic() - began)
            raise Problem(502, "no-answer", "the site could not be reached") from error

    async def _relay(self, tunnel: _Tunnel, call: Call) -> web.StreamResponse:
        """Answer CONNECT and relay octets both ways, within the limits of the settings."""
        server, loop = self._service.config.server, asyncio.get_running_loop()
        response = web.StreamResponse(status=200, headers={"X-Request-Id": call.id})
        await response.prepare(call.request)
        response.force_close()  # no other request can follow on this connection
        from_client, size = tunnel_reader(call.request), 0

        async def relay(
            read: Callable[[int], Awaitable[bytes]],
            write: Callable[[bytes], Awaitable[None]],
            received: Callable[[int], object] | None,
        ) -> None:
            nonlocal size
            with suppress(OSError):
                while piece := await read(_PIECE_OCTETS):
                    size += len(piece)
                    if size > server.proxy_tunnel_bytes or limit.expired():  # in this iteration
                        return
                    if received is not None:
                        received(len(piece))
                    limit.reschedule(loop.time() + server.proxy_idle)
                    await write(piece)

        async with asyncio.TaskGroup() as group:
            directions = [
                group.create_task(relay(from_client.read, tunnel.write, None)),
                group.create_task(relay(tunnel.read, response.write, tunnel.received)),
            ]
            with suppress(TimeoutError):
                async with asyncio.timeout(server.proxy_idle) as limit:
                    await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
            for direction in directions:
                direction.cancel()
        return response


class _Tunnel:
    """A connection to a site, in the form that `Lease.ends_with` expects."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, lease: Lease
    ) -> None:
        self._writer = writer
        self._callbacks: list[Callable[[], None]] = []
        self.read = reader.read
        self.received = lease.received if lease.counts_bytes else None
        """Called with the number of octets the site sent. None if its host has no budget."""
        self.closed = False

    async def write(self, piece: bytes) -> None:
        """Send octets to the site."""
        self._writer.write(piece)
        await self._writer.drain()

    def add_callback(self, callback: Callable[[], None], /) -> None:
        """Call `callback` once the connection is closed."""
        self._callbacks.append(callback)

    def close(self) -> None:
        """Close the connection and call the callbacks."""
        self.closed = True
        self._writer.close()
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()


async def _connect(
    guard: Guard, resolver: GuardedResolver, url: str
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to the first address of the host that the guard allows and that accepts."""
    target = urls.parse(url)
    host = target.host.strip("[]")
    try:
        if _is_address(host):
            if guard.refuses_address(host, target.port) is not None:
                raise AddressRefused
            addresses = [(host, target.port)]
        else:
            answers = await resolver.resolve(host, target.port)
            addresses = [(one["host"], one["port"]) for one in answers]
    finally:
        await resolver.close()
    failure: OSError = socket.gaierror(socket.EAI_NONAME, "the name has no address")
    for address, port in addresses:
        guard.dialled()
        try:
            return await asyncio.open_connection(address, port)
        except OSError as error:
            failure = error
    raise failure


def _is_address(host: str) -> bool:
    try:
        socket.inet_pton(socket.AF_INET6 if ":" in host else socket.AF_INET, host)
    except OSError:
        return False
    return True


def _tunnel_url(request: web.BaseRequest) -> str:
    """Return the URL by which a tunnel is decided: the https front page. Raises Problem 400."""
    authority = request.raw_path
    if _AUTHORITY.fullmatch(authority) is None:
        raise Problem(400, "not-a-proxy-request", "CONNECT needs `HOST:PORT`")
    url = f"https://{authority}/"
    urls.parse(url)
    return url


def _requested_url(request: web.BaseRequest) -> str:
    """Return the URL of a proxy request, unchanged. Raises Problem 400, 403 or 501."""
    if request.method == "CONNECT":
        raise Problem(
            403,
            "connect",
            "this proxy refuses CONNECT, and so https: in a tunnel it would see no path "
            "(server.proxy_connect)",
        )
    if request.method not in METHODS:
        raise Problem(501, "method", "this proxy does not pass on this method")
    if request.headers.get("Transfer-Encoding", "chunked").strip().lower() != "chunked":
        # Its octets would be passed on as the content itself (RFC 9112 section 6.1).
        raise Problem(501, "transfer-coding", "this proxy knows the coding `chunked` alone")
    url = request.raw_path
    if not url.lower().startswith("http://"):
        raise Problem(
            400,
            "not-a-proxy-request",
            "this is a forward proxy for plain http: ask it for `GET http://HOST/PATH`",
        )
    urls.parse(url)
    return url


def end_to_end(headers: Mapping[str, str], *, without: Iterable[str] = ()) -> list[tuple[str, str]]:
    """Return the header fields that a proxy passes on, with its own entry in Via.

    Left out are the fields of one hop, those that Connection names (RFC 9110 section 7.6.1), those
    for a proxy, our own, and `without`. Via is added to (section 7.6.3).
    """
    dropped = {*_HOP_BY_HOP, *without, "via"}
    via = [value for name, value in headers.items() if name.lower() == "via"]
    for name, value in headers.items():
        if name.lower() == "connection":
            dropped.update(part.strip().lower() for part in value.split(","))
    found = [
        (name, value)
        for name, value in headers.items()
        if name.lower() not in dropped and not name.lower().startswith(("proxy-", "x-gatekeeper-"))
    ]
    return [*found, ("Via", ", ".join([*via, _VIA]))]


def _add_default(headers: list[tuple[str, str]], name: str, value: str) -> None:
    """Add a header field, unless there is one of that name."""
    if all(given.lower() != name.lower() for given, _ in headers):
        headers.append((name, value))


def _head(page: aiohttp.ClientResponse, lease: Lease) -> list[tuple[str, str]]:
    """Return the header fields of the response. Raises Problem 502 if one can't be passed on."""
    headers = end_to_end(page.headers, without=("content-length",))
    refuse_unsendable(headers)
    headers.extend(decision_headers(lease.decision).items())
    _add_default(headers, "Server", "gatekeeper")
    return headers
