"""Answers given where a request is read, without a task of their own.

A warm check, a turn that is free and a report never wait for anything. aiohttp makes a
future, a task, a writer and a request for each request, which is half of what such a one
costs. So a `InlineParser` stands before the queue that its parser fills: it takes out a request
that can be answered on the spot, and lets everything else go its usual way. So does
whatever is odd about a request: there is one place that explains a refusal, the usual one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from aiohttp import HttpVersion11, StreamReader, web
from aiohttp.http_exceptions import HttpProcessingError

from gatekeeper.sidecar.exchange import InlineCall, Problem, response_bytes

if TYPE_CHECKING:
    from gatekeeper.sidecar.service import Service

__all__ = ["InlineParser", "InlineResponses", "aiohttp_fits"]

_log = logging.getLogger(__name__)

_BEGINNING = 100
"""Octets kept of a request, which tell for whom it was."""
_NO_MESSAGES: tuple[tuple[()], bool, bytes] = ((), False, b"")


def aiohttp_fits() -> bool:
    """Whether this aiohttp is built as an `InlineParser` needs it; else nothing is inline."""
    inside = ("_parser", "_waiter", "_request_count", "_next_keepalive_close_time")
    return all(hasattr(web.RequestHandler, name) for name in inside) and hasattr(
        StreamReader, "_buffer"
    )


class InlineParser:
    """Stands in for the parser of one connection: what `answered` takes is not passed on."""

    __slots__ = ("_answered", "_begun", "_broken", "_feed", "_parser", "message_consumed", "unread")

    def __init__(
        self,
        parser: Any,
        answered: Callable[[Any, Any], bool],
        broken: Callable[[Exception], None],
    ) -> None:
        """`broken` is told of what is no HTTP: the parser alone leaves a body without an end."""
        self._broken = broken
        self._parser = parser
        self._feed = parser.feed_data
        self.message_consumed: Any = parser.message_consumed
        self._answered = answered
        self._begun = b""
        self.unread: tuple[bytes, ...] = ()
        """How a request may have begun that nobody could read: with the last data, or before."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)

    def feed_data(self, data: bytes) -> Any:
        """The requests that `data` completes, but for one that is answered already."""
        try:
            found = self._feed(data)
        except HttpProcessingError as error:
            self.unread = (data[:_BEGINNING], self._begun + data[:_BEGINNING])
            self._broken(error)
            raise
        messages, upgraded, _ = found
        if not messages:  # a head that comes in pieces, or a body
            if len(self._begun) < _BEGINNING:
                self._begun += data[:_BEGINNING]
        elif self._begun:
            self._begun = b""
        # Several at once are pipelined: their answers go out in their order, by the queue.
        if len(messages) == 1 and not upgraded and self._answered(*messages[0]):
            self.message_consumed()
            return _NO_MESSAGES
        return found


class InlineResponses:
    """What a service can answer without waiting."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def __call__(
        self, message: Any, payload: Any, remote: str | None, transport: Any
    ) -> bytes | None:
        """The answer as octets, to aiohttp's message and payload from that connection.

        None says nothing, and leaves nothing behind: the request goes the usual way.
        """
        if (
            message.should_close
            or message.version != HttpVersion11
            or message.upgrade
            or message.compression
            or not payload.is_eof()
        ):
            return None
        service = self._service
        path, _, query = message.path.partition("?")
        try:
            route, params = service.router.find(message.method, path)
            if route.inline is None or message.method != route.method:
                return None
            client = service.admission.admit_by(message.headers, remote, transport, route.needs)
            if not service.clients.passes(client):
                return None
            call = InlineCall(
                message.headers, _body(payload), query, params, client, service.new_id()
            )
            body = route.inline(service, call)
        except Problem:
            return None
        except Exception:  # noqa: BLE001 - it is logged
            _log.exception("a request was not answered at once")
            return None
        if body is None:
            return None
        status = route.status
        service.metrics.answered(route.path, route.method, status)
        return response_bytes(status, body, call.id)


def _body(payload: Any) -> bytes:
    """The whole body, left where it is: the usual way may have to read it yet."""
    if type(payload) is not StreamReader:
        return b""  # aiohttp's own sign for none
    parts = payload._buffer
    return parts[0] if len(parts) == 1 else b"".join(parts)
