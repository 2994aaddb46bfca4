"""Polite transports for httpx.

`httpx.AsyncClient(transport=PoliteTransport(gate))` takes a `Gatekeeper` or a `RemoteGatekeeper`,
`httpx.Client(transport=SyncPoliteTransport(gate))` a `SyncGatekeeper`.
"""

from __future__ import annotations

from typing import ClassVar

from gatekeeper.errors import Deferred, Denied, InvalidURL, LeaseTimeout, needs_extra
from gatekeeper.integrations.hops import HopErrors
from gatekeeper.integrations.transports import AsyncHopTransport, HopTransport, Library

with needs_extra("httpx", __name__):
    import httpcore
    import httpx

__all__ = ["PoliteTransport", "SyncPoliteTransport"]
__all__ += ["RequestDeferred", "RequestDenied", "RequestInvalidURL", "RequestLeaseTimeout"]

_ERRORS = HopErrors(
    __name__, httpx.RequestError, invalid=(httpx.UnsupportedProtocol, httpx.InvalidURL)
)
RequestDenied: type[Denied] = _ERRORS.denied
RequestDeferred: type[Deferred] = _ERRORS.deferred
RequestLeaseTimeout: type[LeaseTimeout] = _ERRORS.late
RequestInvalidURL: type[InvalidURL] = _ERRORS.invalid


class PoliteTransport(AsyncHopTransport, httpx.AsyncBaseTransport):
    """A transport for `httpx.AsyncClient` that decides, paces and reports each request, redirects
    included.

    `gate` is a `Gatekeeper` or `RemoteGatekeeper`; close it after the client. A lease is held until
    its response is closed or dropped. Time spent waiting for a lease does not count towards httpx's
    timeouts; it raises LeaseTimeout after `max_wait` seconds (None: no limit). A request without a
    User-Agent of its own is sent with the gate's.

    By default the transport has its own connection pool, and the guard checks each address that it
    connects to (`guarded` is True). Its `options` are `verify` and `cert` as in httpx, and those of
    httpcore's AsyncConnectionPool such as `http2` and `local_address`. `resolver` resolves names;
    by default that of the gate is used. With a `transport` of your own, or the options `proxy`,
    `uds` or `network_backend`, no addresses are checked: that raises ConfigError unless you pass
    `guarded=False`, or guard.mode is "url-only".

    Requests raise `gatekeeper.Denied`, `Deferred`, `LeaseTimeout` and `InvalidURL`, which are
    subclasses of `httpx.RequestError` as well.

    >>> async def main(gate) -> None:
    ...     async with httpx.AsyncClient(transport=PoliteTransport(gate)) as client:
    ...         response = await client.get("https://example.org/", follow_redirects=True)
    """

    _library: ClassVar[Library] = httpx, httpcore, _ERRORS


class SyncPoliteTransport(HopTransport, httpx.BaseTransport):
    """A transport for `httpx.Client`: like `PoliteTransport`, with a `SyncGatekeeper`.

    >>> def main(gate) -> None:
    ...     with httpx.Client(transport=SyncPoliteTransport(gate)) as client:
    ...         response = client.get("https://example.org/", follow_redirects=True)
    """

    _library: ClassVar[Library] = httpx, httpcore, _ERRORS
