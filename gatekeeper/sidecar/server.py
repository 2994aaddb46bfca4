"""aiohttp's low-level server, with bounds on connections and our answer to what is no HTTP."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from typing import Any, cast

import msgspec
from aiohttp import web

from gatekeeper.sidecar.atonce import AtOnce, Sieve, sieve_fits
from gatekeeper.sidecar.problems import Problem
from gatekeeper.sidecar.routes import forward_auth

__all__ = ["FIRST_REQUEST", "Server"]

logger = logging.getLogger(__name__)

FIRST_REQUEST = 20.0
"""Seconds that a new connection has for its first request's head (T9: slow-loris)."""
_IDLE = 75.0
"""Seconds that a connection may idle, or take for a further request's head."""
_FOR_A_PROXY = re.compile(rb"\s*[A-Z]+ " + re.escape(forward_auth.PATH.encode()) + rb"[ /?]")


def _nothing() -> None:
    """Nobody wants to know."""


class Server(web.Server):
    """`web.Server` bounded in headers and connections.

    `handler_cancellation` matters: without it a client that hangs up would keep its place
    in the queue, and be granted a lease that nobody uses.
    """

    def __init__(
        self,
        handler: Any,
        *,
        header: int,
        connections: int = 100_000,
        at_once: AtOnce | None = None,
        on_lost: Callable[[], object] = _nothing,
    ) -> None:
        """`at_once` answers what it can where it is read, `handler` everything else; `on_lost`
        is called for each connection that is gone."""
        super().__init__(
            handler,
            handler_cancellation=True,
            access_log=None,
            max_line_size=header,
            max_field_size=header,
            keepalive_timeout=_IDLE,
        )
        self.sieve = sieve_fits()
        self.at_once = at_once
        self.on_lost = on_lost
        self.most = connections
        self.full = 0
        """Connections turned away."""

    def __call__(self) -> web.RequestHandler:
        """One connection's protocol."""
        return _Protocol(self, loop=self._loop, **self._kwargs)


class _Protocol(web.RequestHandler):
    """A connection: bounded in number and patience, with problem documents for errors."""

    __slots__ = ("_at_once", "_first", "_remote")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection, or turn it away with 503 when there are too many."""
        super().connection_made(transport)
        server = cast("Server", self._manager)
        self._at_once = server.at_once
        self._remote = _address(transport)
        if server.sieve:
            self._parser = cast("Any", Sieve(self._parser, self._answered, self._broken))
        self._first = asyncio.get_running_loop().call_later(FIRST_REQUEST, self._too_slow)
        if len(server.connections) > server.most:
            if not server.full:
                logger.error("%d connections are open; further ones get 503", server.most)
            server.full += 1
            cast("asyncio.Transport", transport).write(_FULL)
            self.force_close()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Forget the connection and its timer."""
        self._first.cancel()
        on_lost = cast("Server", self._manager).on_lost
        super().connection_lost(exc)
        on_lost()

    def _broken(self, error: Exception) -> None:
        """What came is no HTTP: who reads the body before it learns that, instead of waiting."""
        request = self._current_request
        if request is not None and not request.content.is_eof():
            request.content.set_exception(web.RequestPayloadError(str(error)))

    def log_exception(self, *args: Any, **options: Any) -> None:
        """Log an error of ours; what a client's body is made of is none."""
        if not isinstance(options.get("exc_info"), web.RequestPayloadError):
            super().log_exception(*args, **options)

    def _answered(self, message: Any, payload: Any) -> bool:
        """Answer it here, if nothing stands before it and the client reads its answers."""
        waiter, transport, at_once = self._waiter, self.transport, self._at_once
        if at_once is None or waiter is None or waiter.done() or self._paused:
            return False
        if transport is None or transport.is_closing():
            return False
        answer = at_once(message, payload, self._remote, transport)
        if answer is None:
            return False
        transport.write(answer)
        # The rest is what aiohttp's own loop does after an answer.
        self._request_count += 1
        self._next_keepalive_close_time = self._loop.time() + _IDLE
        return True

    def _too_slow(self) -> None:
        # aiohttp's own timer runs from the first answer of its own on; before it nothing does.
        if self._request_count == 0:
            self.force_close()
        elif self._keepalive_handle is None:
            now = self._loop.time()
            end, waiter = self._next_keepalive_close_time, self._waiter
            if waiter is not None and not waiter.done() and now >= end:
                self.force_close()  # all was answered at once, and nothing came since
            else:
                self._first = self._loop.call_at(max(end, now + 1.0), self._too_slow)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """A problem document for what never reached the handler."""
        if request.writer.output_size > 0:
            raise ConnectionError("the answer is under way already")
        if status >= 500:
            problem = Problem(500, "internal", "an error of ours")
            self.log_exception("a request failed", exc_info=exc)
        else:
            # T7: what a visitor can make unreadable is a refusal; of a 400 nginx makes a 500.
            beginnings = getattr(self._parser, "unread", ())
            status = 403 if any(map(_FOR_A_PROXY.match, beginnings)) else 400
            detail = "this is no HTTP request that can be read"
            problem = Problem(status, "bad-request", detail)
        response = problem.response()
        response.force_close()
        return response


def _address(transport: asyncio.BaseTransport) -> str | None:
    """Where a connection comes from, as aiohttp's `request.remote` has it."""
    peer = transport.get_extra_info("peername")
    return str(peer[0] if isinstance(peer, list | tuple) else peer) if peer is not None else None


def _raw(problem: Problem) -> bytes:
    body = msgspec.json.encode(problem.document())
    return (
        b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/problem+json\r\n"
        b"Retry-After: 1\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    )


_FULL = _raw(Problem(503, "full", "too many connections are open"))
