"""Polite crawls with Crawlee in one line: `polite_crawler(BeautifulSoupCrawler, gate, ...)`.

* `polite_crawler` creates a crawler with the two below (for PlaywrightCrawler, its browser is
  polite as well).
* `PoliteRequestManager` returns a request when its host is due, with its lease: no request waits in
  a worker of the crawler.
* `PoliteHttpClient` decides each redirect hop, acquires a lease for requests that have none, and
  reports responses.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, Final, TypeVar

from gatekeeper import urls
from gatekeeper.client.client import RemoteGatekeeper
from gatekeeper.clock import OwnedTasks
from gatekeeper.errors import (
    ConfigError,
    GateClosed,
    GatekeeperError,
    InvalidURL,
    StorageError,
    needs_extra,
)
from gatekeeper.gate import Gatekeeper
from gatekeeper.gate.lease_base import other_agent
from gatekeeper.integrations.hops import hand_out, take_back
from gatekeeper.integrations.queue_refusals import MAX_WAIT, RefusedLease, queue_gate
from gatekeeper.queue.polite import PoliteQueue, Turn

with needs_extra("crawlee", __name__):
    from crawlee import Request, RequestState
    from crawlee.request_loaders import RequestManager
    from crawlee.storages import RequestQueue

    from gatekeeper.integrations.crawlee_http import (
        OnSkipped,
        PoliteHttpClient,
        RequestDeferred,
        RequestDenied,
        RequestInvalidURL,
        RequestLeaseTimeout,
    )

__all__ = ["PoliteHttpClient", "PoliteRequestManager", "polite_crawler"]
__all__ += ["RequestDeferred", "RequestDenied", "RequestInvalidURL", "RequestLeaseTimeout"]

_log = logging.getLogger(__name__)

MOST_HELD: Final = 10_000
"""Maximum number of requests that are taken from the inner manager and wait for their leases."""
_MAX_REFILL: Final = 100
"""Maximum number of requests that are taken from the inner manager at a time."""
_LOOK_SECONDS: Final = 0.5
"""Seconds for which `is_empty` waits for a lease: the crawler does not call it more often."""
_UNUSED_SECONDS: Final = 5.0
"""Seconds after which a lease is given back that no worker uses: the crawler is paused or full."""
_RETRY_SECONDS: Final = 60.0
"""Seconds until a request that is deferred for its own User-Agent is queued again."""


# --- requests -------------------------------------------------------------------------------


class PoliteRequestManager(RequestManager):
    """A crawler's `request_manager` that returns each request when its host is due.

    `inner` stores the requests (default: crawlee's default request queue); up to `most_held` of
    them wait here for their hosts. `fetch_next_request` returns None instead of waiting, and
    `is_finished` returns False while requests wait. A denied request is passed to
    `on_skipped_request(url, "robots_txt")` and marked as handled. So is a request that would wait
    for more than `max_wait` seconds, because its robots.txt is unreachable or its host is blocked.

    A returned request has its lease, which `PoliteHttpClient` or `polite_route` uses. The lease
    ends when the request is marked as handled or reclaimed.
    """

    def __init__(
        self,
        gate: Gatekeeper | RemoteGatekeeper,
        inner: RequestManager | None = None,
        *,
        on_skipped_request: OnSkipped | None = None,
        max_wait: float = MAX_WAIT,
        most_held: int = MOST_HELD,
    ) -> None:
        self._gate = gate
        self._inner = inner
        self._on_skipped = on_skipped_request
        self._max_wait = max_wait
        self._max_held = most_held
        self._shown: Any = None
        self._queue: PoliteQueue | None = None
        self._held: dict[int, Request] = {}
        """Requests that wait, by their `id()`, in the order in which they were added."""
        self._prefetched: deque[Turn] = deque()
        """Leases that `is_empty` acquired, for the next calls of `fetch_next_request`."""
        self._turns: dict[str, Turn] = {}
        """Leases of the requests that were returned, by their unique keys."""
        self._first: set[str] = set()
        """Unique keys of requests that were added to the forefront."""
        self._later = OwnedTasks()

    async def inner(self) -> RequestManager:
        """Return the manager that stores the requests."""
        if self._inner is None:
            self._inner = await RequestQueue.open()
        return self._inner

    def tell(self, skipped: OnSkipped) -> None:
        """Set the callback for each request that is skipped."""
        self._on_skipped = skipped

    # -- adding and finishing requests --------------------------------------------------

    async def add_request(self, request: str | Request, *, forefront: bool = False) -> Any:
        """Add a request."""
        found = self._transform_request(request)
        self._note_first(forefront, found)
        added = await (await self.inner()).add_request(found, forefront=forefront)
        await self._refill()
        return added

    async def add_requests(
        self, requests: Sequence[str | Request], *, forefront: bool = False, **options: Any
    ) -> None:
        """Add requests. `options` are those of the inner manager."""
        found = self._transform_requests(requests)
        self._note_first(forefront, *found)
        await (await self.inner()).add_requests(found, forefront=forefront, **options)
        await self._refill()

    async def mark_request_as_handled(self, request: Request) -> Any:
        """Mark a request as handled and end its lease."""
        self._done(request)
        return await (await self.inner()).mark_request_as_handled(request)

    async def reclaim_request(self, request: Request, *, forefront: bool = False) -> Any:
        """End the lease of a request that failed, and queue it for another attempt."""
        self._done(request)
        self._note_first(forefront, request)
        back = await (await self.inner()).reclaim_request(request, forefront=forefront)
        await self._refill()
        return back

    def _note_first(self, forefront: bool, *requests: Request) -> None:
        if forefront:
            self._first.update(one.unique_key for one in requests)

    def _done(self, request: Request) -> None:
        if (turn := self._turns.pop(request.unique_key, None)) is not None:
            take_back(self._gate, turn.lease)
            self._end(turn)

    def _end(self, turn: Turn) -> None:
        try:
            turn.done()
        except StorageError as error:
            _log.error("what came of %s could not be kept: %s", turn.url, error)

    # -- fetching requests --------------------------------------------------------------

    async def get_handled_count(self) -> int:
        """Return the number of handled requests."""
        return await (await self.inner()).get_handled_count()

    async def get_total_count(self) -> int:
        """Return the number of all requests."""
        return await (await self.inner()).get_total_count()

    async def is_finished(self) -> bool:
        """Return True if no request is waiting, in flight or stored."""
        if self._held or self._turns:
            return False
        return await (await self.inner()).is_finished()

    async def is_empty(self) -> bool:
        """Return True if no host becomes due within half a second (the crawler does not call it
        more often). Each False has acquired another lease, so that every worker finds a request."""
        await self._refill()
        turn = await self._next(_LOOK_SECONDS)
        if turn is None:
            return True
        self._prefetched.append(turn)
        self._later.start(self._give_back(turn))
        return False

    async def fetch_next_request(self) -> Request | None:
        """Return a request whose host is due, with its lease, or None if there is none now."""
        await self._refill()
        while True:
            turn = self._prefetched.popleft() if self._prefetched else await self._next(0)
            if turn is None:
                return None
            request: Request = turn.data
            self._held.pop(id(request), None)
            if not await self._is_allowed(request, turn):
                continue
            self._turns[request.unique_key] = turn
            hand_out(self._gate, request.url, turn.lease)
            return request

    async def drop(self) -> None:
        """Discard all requests and drop the inner manager."""
        await self._forget()
        await (await self.inner()).drop()

    async def purge(self) -> None:
        """Discard all requests, except those of a named queue, which crawlee never purges."""
        await self._forget()
        inner = await self.inner()
        if not (isinstance(inner, RequestQueue) and inner.name is not None):
            await inner.purge()

    async def close(self) -> None:
        """Return waiting requests to the inner manager. This manager can be used again."""
        held = await self._forget()
        inner = await self.inner()
        for request in reversed(held):
            await inner.reclaim_request(request, forefront=True)

    async def _forget(self) -> list[Request]:
        await self._later.close()
        held, self._held = list(self._held.values()), {}
        at_hand, self._prefetched = self._prefetched, deque()
        for turn in at_hand:
            await turn.give_back()
        queue, self._queue = self._queue, None
        if queue is not None:
            await queue.close()
        self._first.clear()
        return held

    # -- waiting -------------------------------------------------------------------------

    async def _refill(self) -> None:
        """Take requests from the inner manager, up to the limits, and queue them by host."""
        inner = await self.inner()
        for _ in range(min(_MAX_REFILL, self._max_held - len(self._held))):
            request = await inner.fetch_next_request()
            if request is None:
                return
            await self._put(request)

    async def _put(self, request: Request) -> None:
        if self._queue is None:
            self._shown = queue_gate(self._gate, self._max_wait)
            self._queue = PoliteQueue(self._shown)
        first = request.unique_key in self._first
        self._first.discard(request.unique_key)
        try:
            url = request.url
            if self._agent(request) is not None:  # `_is_allowed` decides it by its own User-Agent
                url = f"{urls.parse(url).origin}/robots.txt"
            self._queue.put_nowait(url, int(first), request)
        except InvalidURL as error:
            await self._skip(request, str(error))
            return
        self._held[id(request)] = request

    async def _next(self, seconds: float) -> Turn | None:
        """Return a URL with its lease, or None if there is none within `seconds`. Refused requests
        are skipped meanwhile."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while self._queue is not None and len(self._held) > len(self._prefetched):
            try:
                try:
                    turn = self._queue.get_nowait()
                except asyncio.QueueEmpty:
                    if loop.time() >= end:
                        return None
                    async with asyncio.timeout_at(end):
                        turn = await self._queue.get()
            except TimeoutError:
                return None
            except GateClosed:
                raise
            except GatekeeperError as error:
                _log.error("the next request can't be had: %s", error)
                return None
            if not isinstance(turn.lease, RefusedLease):
                return turn
            request, why = turn.data, turn.lease.why
            self._end(turn)
            self._held.pop(id(request), None)
            await self._skip(request, why if isinstance(why, str) else why.explain())
        return None

    async def _is_allowed(self, request: Request, turn: Turn) -> bool:
        """Return True if a request may be sent with its own User-Agent, if it has one; the queue
        decided it for the gate's. Otherwise skip the request or queue it again later."""
        agent = self._agent(request)
        if agent is None or (decision := await self._gate.check(request.url, user_agent=agent)):
            return True
        turn.lease.give_back()
        self._end(turn)
        if self._shown.refusal(decision) is not None:
            await self._skip(request, decision.explain())
        else:
            self._held[id(request)] = request
            self._later.start(self._put_again(request))
        return False

    def _agent(self, request: Request) -> str | None:
        """Return the request's own User-Agent if it differs from the gate's, else None."""
        return other_agent(request.headers.get("user-agent"), self._gate.user_agent)

    async def _skip(self, request: Request, why: str) -> None:
        _log.info("%s is skipped: %s", request.url, why)
        request.state = RequestState.SKIPPED
        await (await self.inner()).mark_request_as_handled(request)
        if self._on_skipped is not None:
            await self._on_skipped(request.url, "robots_txt")

    async def _put_again(self, request: Request) -> None:
        """Queue a deferred request again, after a while."""
        await asyncio.sleep(_RETRY_SECONDS)
        await self._put(request)

    async def _give_back(self, turn: Turn) -> None:
        """Give a lease back if no worker uses it soon, so that others can use it."""
        await asyncio.sleep(_UNUSED_SECONDS)
        if turn in self._prefetched:
            self._prefetched.remove(turn)
            await turn.give_back()


# --- crawlers -------------------------------------------------------------------------------

_Crawler = TypeVar("_Crawler")


def polite_crawler(
    kind: Callable[..., _Crawler],
    gate: Gatekeeper | RemoteGatekeeper,
    *,
    request_manager: RequestManager | None = None,
    http_client: PoliteHttpClient | None = None,
    max_wait: float = MAX_WAIT,
    **options: Any,
) -> _Crawler:
    """Create a crawler of a class (HttpCrawler, BeautifulSoupCrawler, PlaywrightCrawler ...) whose
    requests are decided and paced by the gate.

    `request_manager` stores the requests; `max_wait` is that of `PoliteRequestManager`. Further
    `options` are passed to the crawler. A PlaywrightCrawler has its pages routed through the gate,
    sends the gate's User-Agent, blocks service workers, and generates no fingerprints.

    Raises ConfigError for `respect_robots_txt_file=True`: the gate decides, and crawlee would fetch
    each robots.txt a second time, without a lease.

    >>> async def main(gate) -> None:
    ...     crawler = polite_crawler(HttpCrawler, gate, max_requests_per_crawl=100)
    ...     await crawler.run(["https://example.org/"])
    """
    if options.setdefault("respect_robots_txt_file", False):
        raise ConfigError("respect_robots_txt_file: leave it out, since the gate decides")
    manager = request_manager
    if not isinstance(manager, PoliteRequestManager):
        manager = PoliteRequestManager(gate, manager, max_wait=max_wait)
    client = http_client or PoliteHttpClient(gate)
    client.tell(cleanup=manager.close)
    in_browser = any(one.__name__ == "PlaywrightCrawler" for one in getattr(kind, "__mro__", ()))
    if in_browser:
        _prepare_browser(gate, options)
    crawler: Any = kind(request_manager=manager, http_client=client, **options)
    register = crawler.on_skipped_request

    def on_skipped_request(callback: OnSkipped) -> OnSkipped:
        manager.tell(callback)
        client.tell(skipped=callback)
        return register(callback)

    crawler.on_skipped_request = on_skipped_request
    if in_browser:
        _route_pages(crawler, gate)
    _drop_warning(crawler)
    return crawler


_IN_POLITE_CRAWL: ContextVar[bool] = ContextVar("_IN_POLITE_CRAWL", default=False)


def _is_true(record: logging.LogRecord) -> bool:
    """Return False for crawlee's warning that a 429 has no effect, from within a polite crawl."""
    told = "is not using `ThrottlingRequestManager`" in record.getMessage()
    return not (told and _IN_POLITE_CRAWL.get())


def _drop_warning(crawler: Any) -> None:
    """Drop crawlee's warning that Retry-After and back-off are not honored: the gate honors them.
    Crawlers share loggers, so the run tells its tasks, and thereby the filter, whose it is."""
    run = crawler.run

    async def polite_run(*given: Any, **options: Any) -> Any:
        token = _IN_POLITE_CRAWL.set(True)
        try:
            return await run(*given, **options)
        finally:
            _IN_POLITE_CRAWL.reset(token)

    crawler.log.addFilter(_is_true)
    vars(crawler)["run"] = polite_run


def _prepare_browser(gate: Gatekeeper | RemoteGatekeeper, options: dict[str, Any]) -> None:
    """Set options of a PlaywrightCrawler: no service workers, no generated fingerprints."""
    if "browser_pool" in options:
        return  # its contexts are created elsewhere; `polite_route` handles both
    options.setdefault("fingerprint_generator", None)
    options.setdefault("use_incognito_pages", True)  # a profile fetches icons, bypassing routes
    context = {"service_workers": "block", **(options.get("browser_new_context_options") or {})}
    if gate.user_agent is not None:
        context.setdefault("user_agent", gate.user_agent)
    options["browser_new_context_options"] = context


def _route_pages(crawler: Any, gate: Gatekeeper | RemoteGatekeeper) -> None:
    from gatekeeper.integrations.playwright import polite_route  # noqa: PLC0415 - an extra

    async def before(context: Any) -> None:
        await polite_route(context.page.context, gate)

    crawler.pre_navigation_hook(before)
