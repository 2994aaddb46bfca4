"""Polite transports for httpx.

httpx.AsyncClient(transport=PoliteTransport(gate))            a Gatekeeper or RemoteGatekeeper
httpx.Client(transport=SyncPoliteTransport(sync_gate))        a SyncGatekeeper
"""

from __future__ import annotations

import httpcore
import httpx

from gatekeeper.errors import Deferred, Denied, InvalidURL, LeaseTimeout
from gatekeeper.integrations.hops import HopErrors
from gatekeeper.integrations.transports import AsyncHopTransport, HopTransport

__all__ = [
    "PoliteTransport",
    "RequestDeferred",
    "RequestDenied",
    "RequestInvalidURL",
    "RequestLeaseTimeout",
    "SyncPoliteTransport",
]

_ERRORS = HopErrors(__name__, httpx.RequestError)
RequestDenied: type[Denied] = _ERRORS.denied
RequestDeferred: type[Deferred] = _ERRORS.deferred
RequestLeaseTimeout: type[LeaseTimeout] = _ERRORS.late
RequestInvalidURL: type[InvalidURL] = _ERRORS.invalid


class PoliteTransport(
    AsyncHopTransport, httpx.AsyncBaseTransport, httpx=httpx, httpcore=httpcore, errors=_ERRORS
):
    """For `httpx.AsyncClient(transport=...)`: each hop is decided, paced and reported.

    `gate` is a `Gatekeeper` or `RemoteGatekeeper`; close it after the client. The lease is held
    until the response is closed or dropped. Timeouts do not count the waiting. A request that has
    no User-Agent of its own is sent with the gate's.

    Requests go over connections of its own, each address judged where it is dialled (`guarded`):
    `verify` and `cert` as of httpx, and what httpcore's AsyncConnectionPool takes (`http2`,
    `local_address`, `uds` apart), are its options. A `transport` of yours in their place judges
    no address: that raises ConfigError unless you say `guarded=False`. `resolver` looks names up;
    None: as the gate does.

    Raises `gatekeeper.Denied`, `Deferred`, `LeaseTimeout` and `InvalidURL`, which are
    `httpx.RequestError` as well.

    >>> async def main(gate) -> None:
    ...     async with httpx.AsyncClient(transport=PoliteTransport(gate)) as client:
    ...         response = await client.get("https://example.org/", follow_redirects=True)
    """


class SyncPoliteTransport(
    HopTransport, httpx.BaseTransport, httpx=httpx, httpcore=httpcore, errors=_ERRORS
):
    """For `httpx.Client(transport=...)`: `PoliteTransport` over a `SyncGatekeeper`.

    >>> def main(gate) -> None:
    ...     with httpx.Client(transport=SyncPoliteTransport(gate)) as client:
    ...         response = client.get("https://example.org/", follow_redirects=True)
    """
