"""Polite browsing with Playwright in one line: `await polite_route(context, gate)`.

Every request that Playwright passes to a route is decided, and each navigation needs a lease of its
host. Playwright does not pass redirect hops to routes: those are sent without a decision or a
lease. `gatekeeper proxy` decides every hop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

from gatekeeper import urls
from gatekeeper.client.client import RemoteGatekeeper
from gatekeeper.errors import (
    ConfigError,
    Deferred,
    Denied,
    GatekeeperError,
    InvalidURL,
    LeaseTimeout,
    needs_extra,
)
from gatekeeper.gate import Gatekeeper
from gatekeeper.gate.lease_base import adopt, other_agent
from gatekeeper.integrations.hops import (
    Hop,
    HopErrors,
    begin,
    decide,
    hand_out,
    take_back,
    unless_default,
    usual_names,
)

with needs_extra("playwright", __name__):
    from playwright.async_api import BrowserContext, Error, Page, Request, Response, Route

__all__ = ["PoliteRoutes", "polite_route"]
__all__ += ["RequestDeferred", "RequestDenied", "RequestInvalidURL", "RequestLeaseTimeout"]

_log = logging.getLogger(__name__)


class _Refused(Error):
    """Playwright's error class, with our message."""

    @property
    def message(self) -> str:
        """The message of the error."""
        return str(self)


_ERRORS = HopErrors(__name__, _Refused)
RequestDenied: type[Denied] = _ERRORS.denied
RequestDeferred: type[Deferred] = _ERRORS.deferred
RequestLeaseTimeout: type[LeaseTimeout] = _ERRORS.late
RequestInvalidURL: type[InvalidURL] = _ERRORS.invalid

# Icons are asked for past any route, unless the page names one that is here already.
_INIT_SCRIPT = """
if (window === window.top) addEventListener("DOMContentLoaded", () => {
  for (const link of document.querySelectorAll("link[rel~=icon i]")) link.remove();
  const none = Object.assign(document.createElement("link"), {rel: "icon", href: "data:,"});
  (document.head || document.documentElement).append(none);
});
if (navigator.serviceWorker) Object.defineProperty(ServiceWorkerContainer.prototype, "register", {
  value: () => Promise.reject(new DOMException("no service workers here", "SecurityError")),
});
"""
_ABORT_REASON = "blockedbyclient"
_CANCELLED = ("ERR_ABORTED", "NS_BINDING_ABORTED", "cancelled")
"""Parts of browsers' error messages for a request that its page has cancelled."""
_SHOWN_SECONDS = 1.0
"""Timeout in seconds for asking a page for its User-Agent. Playwright waits until the current
navigation of the page is over."""


async def polite_route(
    context: BrowserContext, gate: Gatekeeper | RemoteGatekeeper, *, exempt: Collection[str] = ()
) -> PoliteRoutes:
    """Decide every request of a browser context that Playwright reports, and pace its navigations.

    A refused request fails with ERR_BLOCKED_BY_CLIENT; `PoliteRoutes.goto` raises the reason.
    `exempt` lists types of subresources (Playwright's `resource_type`: "image", "font" ...) that
    are sent without a decision. WebSockets are closed unless it includes "websocket"; service
    workers can't be registered. Requests are sent with the gate's User-Agent, unless the context
    was created with a `user_agent` of its own, by which they are then decided. A second call for a
    context returns the same object.

    Raises ConfigError if the context already has service workers, or if `exempt` includes
    navigations.

    >>> async def main(browser, gate) -> None:
    ...     context = await browser.new_context(service_workers="block")
    ...     polite = await polite_route(context, gate)
    ...     await polite.goto(await context.new_page(), "https://example.org/")
    """
    # Kept in the context itself, which it leads back to: weak keys would never drop it.
    known: PoliteRoutes | None = vars(context).get(PoliteRoutes.__name__)
    if known is not None:
        return known
    if "document" in exempt:
        raise ConfigError("exempt: navigations are always decided; leave 'document' out")
    if context.service_workers:
        raise ConfigError('the context has service workers: make it with service_workers="block"')
    routes = vars(context)[PoliteRoutes.__name__] = PoliteRoutes(context, gate, exempt)
    await routes.begin()
    return routes


class PoliteRoutes:
    """A browser context whose requests are decided, created by `polite_route`."""

    def __init__(
        self,
        context: BrowserContext,
        gate: Gatekeeper | RemoteGatekeeper,
        exempt: Collection[str] = (),
    ) -> None:
        self._context = context
        self._gate: Any = gate
        self._exempt = frozenset(exempt)
        self._refusals: WeakKeyDictionary[Page, GatekeeperError] = WeakKeyDictionary()
        """The error of each page's latest refused navigation."""
        self._routed: dict[Request, Hop | None] = {}
        """Requests in flight that this route has handled; a navigation that was sent has a hop."""
        self.unseen: int = 0
        """Number of requests that were sent without passing this route: redirect hops, and requests
        that other routes sent by `route.continue_()` (`route.fallback()` leads here)."""

    async def begin(self) -> None:
        """Install the route and the listeners. Called by `polite_route`."""
        context: Any = self._context
        await context.add_init_script(_INIT_SCRIPT)
        if "websocket" not in self._exempt:
            await context.route_web_socket("**", lambda socket: socket.close())
        await context.route("**/*", self._route)
        context.on("response", self._answered)
        context.on("requestfinished", self._ended)
        context.on("requestfailed", self._ended)
        context.on("page", lambda page: page.on("close", self._closed))
        context.on("close", lambda *_: self._closed(None))
        for page in context.pages:
            page.on("close", self._closed)

    async def goto(self, page: Page, url: str, **options: Any) -> Response | None:
        """Call `page.goto` under a lease. Waiting for the lease does not count towards its timeout.

        Uses a lease that is open in this context (`contextvars`) for this URL. Raises Denied,
        Deferred, LeaseTimeout or InvalidURL if the navigation is refused, which are subclasses of
        Playwright's Error as well.
        """
        self._refusals.pop(page, None)
        try:
            lease: Any = adopt(url)
            if lease is None:
                agent = other_agent(await _agent_of(page), self._gate.user_agent)
                lease = await self._gate.acquire(url, user_agent=agent, owned=False)
        except GatekeeperError as error:
            raise _ERRORS.of(error, url) from error
        hand_out(self._gate, url, lease)
        try:
            return await page.goto(url, **options)
        except Error as error:
            refusal = self._refusals.pop(page, None)
            if refusal is None:
                raise
            raise _ERRORS.of(refusal, url) from error
        finally:
            if take_back(self._gate, lease):
                lease.give_back()

    # -- a request -----------------------------------------------------------------------

    async def _route(self, route: Route, request: Request) -> None:
        page = _page_of(request)
        if page is not None and page.is_closed():
            return  # closed before this task began: no event would free a lease
        self._routed[request] = None
        try:
            await self._decide(route, request)
        except GatekeeperError as error:
            _log.info("%s is refused: %s", urls.mask(request.url), error)
            if page is not None and request.is_navigation_request():
                self._refusals[page] = error
            with suppress(Error):  # the page may be closed
                await route.abort(_ABORT_REASON)
        except Error as error:
            _log.debug("%s was not sent: %s", urls.mask(request.url), error)
        except BaseException:
            with suppress(Error):
                await route.abort(_ABORT_REASON)
            raise

    async def _decide(self, route: Route, request: Request) -> None:
        """Send a request if it is allowed. Raises GatekeeperError otherwise."""
        url, name = request.url, unless_default(request.headers.get("user-agent"))
        if not url.startswith(("http:", "https:")):
            await route.continue_()
            return
        if not request.is_navigation_request():
            own = self._gate.user_agent
            if request.resource_type not in self._exempt:
                decision = await decide(self._gate, url, name)
                own = own or decision.user_agent
            await route.continue_(headers=_headers_with(request, own if name is None else None))
            return
        hop = await begin(self._gate, url, name)
        if request not in self._routed:  # Its page was closed meanwhile: no event will follow.
            hop.end(by_network=False)
            return
        self._routed[request] = hop
        try:
            await route.continue_(headers=_headers_with(request, hop.user_agent))
        except BaseException:
            self._finish(request, by_network=False)
            raise

    def _answered(self, response: Response) -> None:
        if response.request not in self._routed and response.url.startswith(("http:", "https:")):
            self.unseen += 1
        hop = self._routed.get(response.request)
        if hop is not None and hop.body is None:
            hop.answered(response.status, usual_names(response.headers))

    def _ended(self, request: Request) -> None:
        failure = request.failure or ""
        self._finish(request, by_network=not any(word in failure for word in _CANCELLED))

    def _closed(self, page: Page | None) -> None:
        """Clean up after a closed page, or with None after the context: no events will follow."""
        for request in list(self._routed):
            if page is None or _page_of(request) is page:
                self._finish(request, by_network=False)

    def _finish(self, request: Request, *, by_network: bool) -> None:
        if (hop := self._routed.pop(request, None)) is not None:
            hop.end(by_network=by_network)


async def _agent_of(page: Page) -> str | None:
    """Return the User-Agent that the page's context was created with, if the page shows one. The
    header that is actually sent is checked again later. A page whose host does not respond shows
    none."""
    with suppress(Error, TimeoutError):
        async with asyncio.timeout(_SHOWN_SECONDS):
            return unless_default(str(await page.evaluate("navigator.userAgent")))
    return None


def _headers_with(request: Request, name: str | None) -> dict[str, str] | None:
    """Return the headers with that User-Agent, or None to send them unchanged."""
    return None if name is None else {**request.headers, "user-agent": name}


def _page_of(request: Request) -> Page | None:
    with suppress(Error):  # the frame of a navigation may not exist yet
        return request.frame.page
    return None
