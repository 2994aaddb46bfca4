"""Every use that the package makes of private names of aiohttp and yarl.

Neither library promises these names. Each function says what it does where the name is missing,
or where `speedups` are off: what is left then is the public way, which gives the same answers.
Two things have no public way and are no matter of speed, so the switch does not concern them:
the bound on interim answers, and the wrapper round every request of a polite session.

========================  =====================================  ===================================
function                  private names                          without them
========================  =====================================  ===================================
parts_of_authority        `yarl.URL._cache`                      yarl works out host and port for
keep_authority_parts                                             each URL
close_pooled              `BaseConnector._conns`, `._acquired`   pooled connections stay for as long
                                                                 as they are kept alive (15 s)
default_proxy             `ClientSession._default_proxy`,        no proxy: the requests fail where
                          `._default_proxy_auth`                 one is needed
wrap_requests             `ClientSession._request`               ConfigError: use the middleware
limit_interim             `ResponseHandler._parser`,             no bound on interim answers
                          `._exception`
========================  =====================================  ===================================
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.http_exceptions import HttpProcessingError
from yarl import URL

from gatekeeper import speedups
from gatekeeper.errors import ConfigError

__all__ = [
    "MOST_INTERIM",
    "MOST_OCTETS",
    "close_pooled",
    "default_proxy",
    "keep_authority_parts",
    "limit_interim",
    "parts_of_authority",
    "wrap_requests",
]

# --- yarl -----------------------------------------------------------------------------------

# What yarl works out of scheme and authority, once for each URL object.
_OF_AUTHORITY = (
    *("absolute", "raw_authority", "raw_user", "user", "raw_password", "password"),
    *("raw_host", "host", "host_subcomponent", "host_port_subcomponent", "explicit_port", "port"),
)


def parts_of_authority(url: URL) -> dict[str, Any]:
    """What yarl has worked out of the URL's scheme and authority, by the name of the property.

    Empty where this yarl remembers such things in another way, or `speedups` are off.
    """
    memory = getattr(url, "_cache", None)
    if not speedups.ON or not isinstance(memory, dict):
        return {}
    try:
        found = {name: getattr(url, name) for name in _OF_AUTHORITY}
    except (AttributeError, ValueError):  # another yarl; a host that says to be IDNA and is not
        return {}
    if all(name in memory and memory[name] is value for name, value in found.items()):
        return found
    return {}


def keep_authority_parts(url: URL, parts: dict[str, Any]) -> None:
    """Have a URL of the same scheme and authority remember these `parts_of_authority`."""
    url._cache.update(parts)  # type: ignore[typeddict-item]


# --- aiohttp's client -----------------------------------------------------------------------

_Request = Callable[..., Any]


def wrap_requests(session: aiohttp.ClientSession, wrap: Callable[[_Request], _Request]) -> None:
    """Put `wrap(request)` in the place of the coroutine function behind all of a session's
    methods; its class stays aiohttp's.

    aiohttp has no public way to see each request's own `timeout` and `middlewares`: it starts
    the total timeout before the middlewares run, and a request's own replace the session's.
    Raises ConfigError where this aiohttp is built otherwise.
    """
    request = getattr(session, "_request", None)
    if request is None:
        raise ConfigError(
            f"polite_session does not fit aiohttp {aiohttp.__version__}: use "
            "aiohttp.ClientSession(middlewares=(gate.middleware,))"
        )
    # object's own: in asyncio's debug mode ClientSession warns of foreign attributes.
    object.__setattr__(session, "_request", wrap(request))


def default_proxy(session: aiohttp.ClientSession) -> dict[str, Any]:
    """The proxy that a session was made with, as arguments for another `ClientSession`."""
    return {
        "proxy": getattr(session, "_default_proxy", None),
        "proxy_auth": getattr(session, "_default_proxy_auth", None),
    }


def close_pooled(connector: aiohttp.BaseConnector) -> None:
    """Close a connector's idle connections at once, and those in use after their response."""
    for idle in getattr(connector, "_conns", {}).values():
        for protocol, _ in idle:
            protocol.close()
    for busy in getattr(connector, "_acquired", ()):
        busy.force_close()


# --- interim answers ------------------------------------------------------------------------
#
# A server may send any number of answers with a status of 1xx before the final one, and a client
# has to read them all (RFC 9110 section 15.2). aiohttp reads whatever came in one go and puts
# each on a queue without a bound, so a server that sends nothing else (`HTTP/1.1 100 Continue`,
# again and again) would have the event loop for itself. aiohttp has no setting for it.

MOST_INTERIM: Final = 16
"""Interim answers to one request."""
MOST_OCTETS: Final = 65_536
"""Octets that may come before the final head, where interim answers are among them."""
_PIECE: Final = 4_096
"""Octets that are read in one go while a head is awaited: at most some 250 heads."""
_SWITCHING: Final = 101  # final for this protocol: what follows is another one
_received: Final = ResponseHandler.data_received


def limit_interim(protocol: object) -> None:
    """Have a connection's protocol keep to the bounds, from here on. Idempotent.

    One that is not aiohttp's own stays as it is. A connection that goes beyond is closed, and
    its request fails as with any answer that is no HTTP (aiohttp.ClientResponseError).
    """
    if type(protocol) is not ResponseHandler:
        return
    protocol.__class__ = _Limited
    protocol._await_head()  # type: ignore[attr-defined] # it is one now
    transport = protocol.transport
    if transport is not None:
        transport.set_protocol(protocol)  # uvloop keeps the bound method of the class before


class _Limited(ResponseHandler):
    """aiohttp's protocol of a connection, with the bounds. Made by `limit_interim` alone."""

    _answered: bool
    """The final head of the request under way, or of the last one, is here."""
    _interim: int
    _octets: int
    """Read since the request was sent, as long as the final head is not here."""

    def set_response_params(self, **params: Any) -> None:
        """A request is about to be sent on the connection."""
        self._await_head()
        super().set_response_params(**params)

    def _await_head(self) -> None:
        self._answered, self._interim, self._octets = False, 0, 0

    def data_received(self, data: bytes) -> None:
        """Read what came; in small pieces until the final head is among it."""
        if self._answered or self._parser is None or not data:
            _received(self, data)
            return
        for start in range(0, len(data), _PIECE):
            if self._answered:
                _received(self, data[start:])
                return
            if self._interim and self._octets >= MOST_OCTETS:
                self._refuse(f"more than {MOST_OCTETS} octets before the final answer")
            if self._exception is not None:
                return  # refused, or no HTTP: the connection is closed already
            piece = data[start : start + _PIECE]
            self._octets += len(piece)
            _received(self, piece)

    def feed_data(self, data: Any, size: int = 0) -> None:
        """A head was read: count it before it is put on the queue."""
        if self._exception is not None:
            return
        code = data[0].code
        if self._answered:
            self._refuse("another answer than the one that was asked for")
            return
        if 100 <= code < 200 and code != _SWITCHING:
            self._interim += 1
            if self._interim > MOST_INTERIM:
                self._refuse(f"more than {MOST_INTERIM} interim answers")
                return
        else:
            self._answered = True
        super().feed_data(data, size)

    def _refuse(self, why: str) -> None:
        if self.transport is not None:
            self.transport.close()
        if self._exception is None:
            self.set_exception(HttpProcessingError(code=400, message=why))
