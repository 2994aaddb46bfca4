"""One request of a crawl, and its answer."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
from aiohttp import hdrs
from yarl import URL

from gatekeeper.cli.crawl.bodies import Body
from gatekeeper.cli.crawl.story import Answer
from gatekeeper.cli.crawl.warc import WarcHead
from gatekeeper.clock import Clock, utc
from gatekeeper.middleware import signals
from gatekeeper.robots.signals import page_signals
from gatekeeper.urls import mask

if TYPE_CHECKING:
    from gatekeeper.gate.leases import Lease

__all__ = ["exchange"]

_log = logging.getLogger(__name__)

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_ACCEPT = "text/html, application/xhtml+xml, */*;q=0.8"


async def exchange(
    session: aiohttp.ClientSession, lease: Lease, body: Body, *, clock: Clock, record: bool
) -> Answer:
    """Send, take the head, and take the body: a redirect's only if all is to be recorded.

    Raises what aiohttp raises where no answer came, or not the whole of a page.
    """
    headers = {hdrs.ACCEPT: _ACCEPT}
    if record:
        headers[hdrs.ACCEPT_ENCODING] = "identity"
    started, at = clock.monotonic(), utc(clock.wall())
    request = session.get(
        URL(lease.url, encoded=True),
        headers=headers,
        allow_redirects=False,
        middlewares=(_Once(),),
    )
    async with request as response:
        elapsed = clock.monotonic() - started
        location = response.headers.get(hdrs.LOCATION)
        if response.status not in _REDIRECTS:
            location = None
        head = WarcHead(response, at) if record else None
        if location is None:
            await body.receive(response.content)
        elif record:
            await _receive_spare(body, response.content)
        if body.cut or (location is not None and not record):
            response.close()  # the rest is not wanted
        return Answer(
            status=response.status,
            headers=response.headers,
            at=at,
            elapsed=elapsed,
            took=clock.monotonic() - started,
            location=location,
            signals=_said(response),
            warc=head,
        )


async def _receive_spare(body: Body, content: aiohttp.StreamReader) -> None:
    """The body of a redirect, as far as it comes: nothing but the record depends on it."""
    try:
        await body.receive(content)
    except TimeoutError:
        body.cut = "time"
    except aiohttp.ClientError:
        body.cut = "disconnect"


_SILENT = page_signals({}, "")


def _said(response: aiohttp.ClientResponse) -> dict[str, Any] | None:
    """What its header says about the use of the page; None where it says nothing."""
    try:
        found = signals(response)
    except Exception:  # noqa: BLE001 - one URL's error is its own
        # A field that can't be read is not the end of its page.
        _log.exception("%s: its header fields can't be read", mask(str(response.url), query=False))
        return None
    if found == _SILENT:
        return None
    plain: dict[str, Any] = msgspec.to_builtins(found)
    return plain


class _Once:
    """Middleware for one request: aiohttp sends a GET again by itself when the connection
    breaks, in a turn of its own. Here tries are counted, and the times of one are written
    down: the second time, the first error stands, and the queue brings the URL back.
    """

    def __init__(self) -> None:
        self._error: aiohttp.ClientError | None = None

    async def __call__(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        if self._error is not None:
            raise self._error
        try:
            return await handler(request)
        except aiohttp.ClientError as error:
            self._error = error
            raise
