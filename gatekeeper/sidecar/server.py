"""aiohttp's low-level server, with our answer to what is no HTTP."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from gatekeeper.sidecar.problems import Problem

__all__ = ["Server"]


class Server(web.Server):
    """`web.Server` bounded in its headers, cancelling the handler of a client that left.

    `handler_cancellation` matters: without it a client that hangs up would keep its place
    in the queue, and be granted a lease that nobody uses.
    """

    def __init__(self, handler: Any, *, header: int) -> None:
        super().__init__(
            handler,
            handler_cancellation=True,
            access_log=None,
            max_line_size=header,
            max_field_size=header,
            keepalive_timeout=75.0,
        )

    def __call__(self) -> web.RequestHandler:
        """One connection's protocol."""
        return _Protocol(self, loop=self._loop, **self._kwargs)


class _Protocol(web.RequestHandler):
    """A connection: malformed requests get a problem document too."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if request.writer.output_size > 0:
            raise ConnectionError("the answer is under way already")
        if status >= 500:
            problem = Problem(500, "internal", "an error of ours")
            self.log_exception("a request failed", exc_info=exc)
        else:
            problem = Problem(400, "bad-request", "this is no HTTP request that can be read")
        response = problem.response()
        response.force_close()
        return response
