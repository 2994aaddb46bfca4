"""Interim answers (status 1xx), before the final one: few, small, and read in small pieces.

A server may send any number of them, and a client has to read them all (RFC 9110 section
15.2). aiohttp reads whatever came in one go and puts each on a queue without a bound, so a
server that sends nothing else (`HTTP/1.1 100 Continue`, again and again) would have the event
loop for itself. Here a connection is closed beyond `MOST_INTERIM` of them or `MOST_OCTETS`
before the final head, and where more comes after the final answer than that answer.

aiohttp has no setting for it. All that is used of its inside stands in this module: the class
of a connection's protocol, and that it puts each head on its queue with `feed_data`.
"""

from __future__ import annotations

from typing import Any, Final

from aiohttp.client_proto import ResponseHandler
from aiohttp.http_exceptions import HttpProcessingError

__all__ = ["MOST_INTERIM", "MOST_OCTETS", "limit_interim"]

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
