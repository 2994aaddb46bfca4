"""`gatekeeper serve --proxy PORT`: a forward proxy for plain http, for browsers above all.

Each request is decided, waits for its host's turn, and is dialled through the guard; redirects
are passed back, so that the browser asks for the next hop here as well. Bounds are those of
`/v1/fetch`. CONNECT is refused: inside a tunnel nobody sees a path, and one connection may carry
any number of requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from aiohttp import web

from gatekeeper import urls
from gatekeeper.sidecar.exchange import METHODS, Call, Problem, read_octets
from gatekeeper.sidecar.routes.fetch import (
    decision_headers,
    hold_while_read,
    in_time,
    in_turn,
    pass_on,
    refuse_unsendable,
)

if TYPE_CHECKING:
    import aiohttp

    from gatekeeper.gate.leases import Lease
    from gatekeeper.sidecar.service import Service

__all__ = ["Proxy", "end_to_end"]

_WHERE = "proxy"
"""Its name among the paths of the metrics."""
_VIA = "1.1 gatekeeper"
_OF_ONE_HOP = frozenset(
    {"connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding"}
) | {"upgrade", "http2-settings"}
"""Fields for the next recipient alone: RFC 9110 section 7.6.1."""
_OURS = frozenset({"host", "user-agent", "content-length", "expect"}) | {
    "signature",
    "signature-input",
    "signature-agent",
}
"""What a request gets anew: who sends it is the gate."""


class Proxy:
    """Answers what clients ask a proxy. `service`: whose gate, bounds and log it uses."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request; every error becomes a problem document."""
        return await self._service.answer_by(request, _WHERE, self._act)

    async def _act(self, call: Call) -> web.StreamResponse:
        service, request = self._service, call.request
        call.client = service.admission.admit_to_proxy(request)
        url = _wanted(request)
        service.clients.enter(call.client)
        try:
            async with in_time(service) as end:
                body = await read_octets(request, service.config.server.max_body)
                return await in_turn(
                    service, call, url, end, lambda lease: self._send(lease, call, url, body)
                )
        finally:
            service.clients.leave(call.client)

    async def _send(self, lease: Lease, call: Call, url: str, body: bytes) -> web.StreamResponse:
        """Ask for it under its lease, and pass the answer on, whatever it is."""
        service = self._service
        headers = end_to_end(call.request.headers, without=_OURS)
        _add(headers, "Accept-Encoding", "identity")
        async with service.session.request(
            call.request.method, url, headers=headers, data=body or None, allow_redirects=False
        ) as page:
            service.operators.feed.reported(lease.host, page.status)
            hold_while_read(lease, page)
            return await pass_on(service, call, page, lambda: _head(page, lease))


def _wanted(request: web.BaseRequest) -> str:
    """The URL that is asked for, as it came. Raises Problem 400, 403 or 501."""
    if request.method == "CONNECT":
        raise Problem(
            403,
            "connect",
            "this proxy refuses CONNECT, and so https: in a tunnel it would see no path",
        )
    if request.method not in METHODS:
        raise Problem(501, "method", "this proxy passes on no such method")
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
    """The fields that a proxy passes on (RFC 9110 section 7.6.1), with its own in Via (section
    7.6.3): neither those of one hop nor what Connection names, nor any that are meant for a proxy
    or say what ours say."""
    dropped = {*_OF_ONE_HOP, *without, "via"}
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


def _add(headers: list[tuple[str, str]], name: str, value: str) -> None:
    """A field, unless there is one of that name."""
    if all(given.lower() != name.lower() for given, _ in headers):
        headers.append((name, value))


def _head(page: aiohttp.ClientResponse, lease: Lease) -> list[tuple[str, str]]:
    """Raises Problem 502 for a field of the site that can't be passed on."""
    headers = end_to_end(page.headers, without=("content-length",))
    refuse_unsendable(headers)
    headers.extend(decision_headers(lease.decision).items())
    _add(headers, "Server", "gatekeeper")
    return headers
