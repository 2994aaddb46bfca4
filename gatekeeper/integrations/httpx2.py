"""Polite transports for httpx2.

`httpx2.AsyncClient(transport=PoliteTransport(gate))` takes a `Gatekeeper` or a `RemoteGatekeeper`,
`httpx2.Client(transport=SyncPoliteTransport(gate))` a `SyncGatekeeper`.
"""

from __future__ import annotations

from typing import ClassVar

from gatekeeper.errors import Deferred, Denied, InvalidURL, LeaseTimeout, needs_extra
from gatekeeper.integrations.hops import HopErrors
from gatekeeper.integrations.transports import AsyncHopTransport, HopTransport, Library

with needs_extra("httpx2", __name__):
    import httpcore2
    import httpx2

__all__ = ["PoliteTransport", "SyncPoliteTransport"]
__all__ += ["RequestDeferred", "RequestDenied", "RequestInvalidURL", "RequestLeaseTimeout"]

_ERRORS = HopErrors(
    __name__, httpx2.RequestError, invalid=(httpx2.UnsupportedProtocol, httpx2.InvalidURL)
)
RequestDenied: type[Denied] = _ERRORS.denied
RequestDeferred: type[Deferred] = _ERRORS.deferred
RequestLeaseTimeout: type[LeaseTimeout] = _ERRORS.late
RequestInvalidURL: type[InvalidURL] = _ERRORS.invalid


class PoliteTransport2(AsyncHopTransport, httpx2.AsyncBaseTransport):
    """A transport for `httpx2.AsyncClient`. See `gatekeeper.integrations.httpx.PoliteTransport`,
    which it equals but for the names of httpx2 and httpcore2.

    >>> async def main(gate) -> None:
    ...     async with httpx2.AsyncClient(transport=PoliteTransport(gate)) as client:
    ...         response = await client.get("https://example.org/", follow_redirects=True)
    """

    _library: ClassVar[Library] = httpx2, httpcore2, _ERRORS


class SyncPoliteTransport2(HopTransport, httpx2.BaseTransport):
    """A transport for `httpx2.Client`: like `PoliteTransport`, with a `SyncGatekeeper`.

    >>> def main(gate) -> None:
    ...     with httpx2.Client(transport=SyncPoliteTransport(gate)) as client:
    ...         response = client.get("https://example.org/", follow_redirects=True)
    """

    _library: ClassVar[Library] = httpx2, httpcore2, _ERRORS


PoliteTransport = PoliteTransport2
SyncPoliteTransport = SyncPoliteTransport2
