"""Crawlee for Python, polite in one line: `polite_crawler(BeautifulSoupCrawler, gate, ...)`.

polite_crawler        a crawler with the two below (and a polite browser, for PlaywrightCrawler)
PoliteRequestManager  gives out a request when its host is due, with its lease: no request waits
                      in a worker of the crawler's
PoliteHttpClient      decides each redirect hop, takes a lease for requests that come without
                      one, and reports what came back
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from crawlee import Request, RequestState
from crawlee.request_loaders import RequestManager
from crawlee.storages import RequestQueue

from gatekeeper import urls
from gatekeeper.decision import Verdict
from gatekeeper.errors import ConfigError, GateClosed, GatekeeperError, InvalidURL, StorageError
from gatekeeper.gate import Gatekeeper
from gatekeeper.integrations.crawlee_http import (
    OnSkipped,
    PoliteHttpClient,
    RequestDeferred,
    RequestDenied,
    RequestInvalidURL,
    RequestLeaseTimeout,
)
from gatekeeper.integrations.hops import hand_out, take_back
from gatekeeper.integrations.queue_gate import MAX_WAIT, RefusedTurn, queue_gate
from gatekeeper.middleware import other_agent
from gatekeeper.queue import PoliteQueue, Turn
from gatekeeper.remote.client import RemoteGatekeeper

__all__ = [
    "PoliteHttpClient",
    "PoliteRequestManager",
    "RequestDeferred",
    "RequestDenied",
    "RequestInvalidURL",
    "RequestLeaseTimeout",
    "polite_crawler",
]

_log = logging.getLogger(__name__)

MOST_HELD: Final = 10_000
"""Requests taken out of the crawler's own queue that may wait for their turns."""
_AT_ONCE: Final = 100
"""Of these, so many are taken out before anybody else has a go."""
_LOOK: Final = 0.5
"""Seconds for which `is_empty` waits for a turn: the crawler would not look again before."""
_UNUSED: Final = 5.0
"""Seconds for which a turn is kept that no worker takes: the crawler is paused, or full."""
_RETRY: Final = 60.0


# --- requests -------------------------------------------------------------------------------


class PoliteRequestManager(RequestManager):
    """For a crawler's `request_manager`: gives each request out when its host is due.

    `inner` keeps the requests (None: crawlee's default request queue); up to `most_held` of them
    wait here for the turns of their hosts. `fetch_next_request` gives None instead of waiting, and
    `is_finished` stays false while something waits. A request that is denied goes to
    `on_skipped_request(url, "robots_txt")` and is done, as is one that would wait for more than
    `max_wait` seconds: its robots.txt can't be had, or its host is blocked for longer.

    The request has its lease when it is given out, and `PoliteHttpClient` or `polite_route` use it;
    what is reclaimed or failed has ended it.
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
        self._most = most_held
        self._shown: Any = None
        self._queue: PoliteQueue | None = None
        self._held: dict[int, Request] = {}
        """Those that wait, by their identity, in the order in which they came."""
        self._at_hand: deque[Turn] = deque()
        """Turns that were had while looking, for the workers that come for them."""
        self._turns: dict[str, Turn] = {}
        """Of the requests that were given out, by their unique keys."""
        self._first: set[str] = set()
        """Unique keys of those that are to be given out before others."""
        self._later: set[asyncio.Handle] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def inner(self) -> RequestManager:
        """What keeps the requests."""
        if self._inner is None:
            self._inner = await RequestQueue.open()
        return self._inner

    def tell(self, skipped: OnSkipped) -> None:
        """Have that called with each request that is not sent."""
        self._on_skipped = skipped

    # -- what the crawler adds, and what became of it ----------------------------------

    async def add_request(self, request: str | Request, *, forefront: bool = False) -> Any:
        """Add a request."""
        found = self._transform_request(request)
        if forefront:
            self._first.add(found.unique_key)
        added = await (await self.inner()).add_request(found, forefront=forefront)
        await self._refill()
        return added

    async def add_requests(
        self, requests: Sequence[str | Request], *, forefront: bool = False, **options: Any
    ) -> None:
        """Add requests; the options are the inner manager's."""
        found = self._transform_requests(requests)
        if forefront:
            self._first.update(one.unique_key for one in found)
        await (await self.inner()).add_requests(found, forefront=forefront, **options)
        await self._refill()

    async def mark_request_as_handled(self, request: Request) -> Any:
        """It is done; its lease ends."""
        self._done(request)
        return await (await self.inner()).mark_request_as_handled(request)

    async def reclaim_request(self, request: Request, *, forefront: bool = False) -> Any:
        """It failed and is tried again, in another turn; its lease ends."""
        self._done(request)
        if forefront:
            self._first.add(request.unique_key)
        back = await (await self.inner()).reclaim_request(request, forefront=forefront)
        await self._refill()
        return back

    def _done(self, request: Request) -> None:
        turn = self._turns.pop(request.unique_key, None)
        if turn is None:
            return
        take_back(self._gate, request.url, turn.lease)
        self._end(turn)

    def _end(self, turn: Turn) -> None:
        try:
            turn.done()
        except StorageError as error:
            _log.error("what came of %s could not be kept: %s", turn.url, error)

    # -- what the crawler asks ----------------------------------------------------------

    async def get_handled_count(self) -> int:
        """Requests that are done."""
        return await (await self.inner()).get_handled_count()

    async def get_total_count(self) -> int:
        """Requests that are done or not."""
        return await (await self.inner()).get_total_count()

    async def is_finished(self) -> bool:
        """Is nothing left to do? What waits for its turn is."""
        if self._held or self._turns:
            return False
        return await (await self.inner()).is_finished()

    async def is_empty(self) -> bool:
        """Can no request be given out now? Looks for half a second, as the crawler does not look
        again sooner. Each False has found a turn more, so that no worker comes in vain."""
        await self._refill()
        turn = await self._next(_LOOK)
        if turn is None:
            return True
        self._at_hand.append(turn)
        self._call_later(_UNUSED, self._give_back, turn)
        return False

    async def fetch_next_request(self) -> Request | None:
        """One whose host is due, with its lease; None: there is none now."""
        await self._refill()
        while True:
            turn = self._at_hand.popleft() if self._at_hand else await self._next(0)
            if turn is None:
                return None
            request: Request = turn.data
            self._held.pop(id(request), None)
            if not await self._welcome(request, turn):
                continue
            self._turns[request.unique_key] = turn
            hand_out(self._gate, request.url, turn.lease)
            return request

    async def drop(self) -> None:
        """Forget everything, and remove what keeps it."""
        await self._forget()
        await (await self.inner()).drop()

    async def purge(self) -> None:
        """Forget every request, but those of a named queue: crawlee never purges one by itself."""
        await self._forget()
        inner = await self.inner()
        if not (isinstance(inner, RequestQueue) and inner.name is not None):
            await inner.purge()

    async def close(self) -> None:
        """Give what waits back to the inner manager. It may be used again."""
        held = await self._forget()
        inner = await self.inner()
        for request in reversed(held):
            await inner.reclaim_request(request, forefront=True)

    async def _forget(self) -> list[Request]:
        for handle in self._later:
            handle.cancel()
        self._later.clear()
        held, self._held = list(self._held.values()), {}
        at_hand, self._at_hand = self._at_hand, deque()
        for turn in at_hand:
            await turn.give_back()
        queue, self._queue = self._queue, None
        if queue is not None:
            await queue.close()
        self._first.clear()
        return held

    # -- waiting -------------------------------------------------------------------------

    async def _refill(self) -> None:
        """Have what may wait wait for its turns."""
        inner = await self.inner()
        for _ in range(min(_AT_ONCE, self._most - len(self._held))):
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
            if self._agent(request) is not None:  # others ask by what anybody may ask for
                url = f"{urls.parse(url).origin}/robots.txt"
            self._queue.put_nowait(url, int(first), request)
        except InvalidURL as error:
            await self._skip(request, str(error))
            return
        self._held[id(request)] = request

    async def _next(self, seconds: float) -> Turn | None:
        """A turn with its lease, if one comes in time. Refused requests are skipped meanwhile."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while self._queue is not None and len(self._held) > len(self._at_hand):
            try:
                turn = self._queue.get_nowait()
            except asyncio.QueueEmpty:
                if loop.time() >= end:
                    return None
                try:
                    async with asyncio.timeout(end - loop.time()):
                        turn = await self._queue.get()
                except TimeoutError:
                    return None
            except GateClosed:
                raise
            except GatekeeperError as error:
                _log.error("the next request can't be had: %s", error)
                return None
            if not isinstance(turn.lease, RefusedTurn):
                return turn
            request, why = turn.data, turn.lease.why
            self._end(turn)
            self._held.pop(id(request), None)
            await self._skip(request, why if isinstance(why, str) else why.explain())
        return None

    async def _welcome(self, request: Request, turn: Turn) -> bool:
        """Whether a request under a name of its own may be sent; the queue asked for the gate's."""
        agent = self._agent(request)
        if agent is None:
            return True
        decision = await self._gate.check(request.url, user_agent=agent)
        if decision.verdict is Verdict.ALLOW:
            return True
        turn.lease.give_back()
        self._end(turn)
        if self._shown.refusal(decision) is not None:
            await self._skip(request, decision.explain())
        else:
            self._held[id(request)] = request
            self._call_later(_RETRY, self._put, request)
        return False

    def _agent(self, request: Request) -> str | None:
        """The request's own User-Agent, if that is another one than the gate's."""
        return other_agent(request.headers.get("user-agent"), self._gate.user_agent)

    async def _skip(self, request: Request, why: str) -> None:
        _log.info("%s is skipped: %s", request.url, why)
        request.state = RequestState.SKIPPED
        await (await self.inner()).mark_request_as_handled(request)
        if self._on_skipped is not None:
            await self._on_skipped(request.url, "robots_txt")

    async def _give_back(self, turn: Turn) -> None:
        """No worker came for it: others may have the turn."""
        if turn in self._at_hand:
            self._at_hand.remove(turn)
            await turn.give_back()

    def _call_later(
        self, seconds: float, what: Callable[[Any], Any], argument: Turn | Request
    ) -> None:
        def call() -> None:
            self._later.discard(handle)
            task = loop.create_task(what(argument))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        loop = asyncio.get_running_loop()
        handle = loop.call_later(seconds, call)
        self._later.add(handle)


# --- both at once ---------------------------------------------------------------------------

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
    """A crawler of that class (HttpCrawler, BeautifulSoupCrawler, PlaywrightCrawler ...) whose
    requests take turns.

    `request_manager` keeps the requests; `max_wait` is `PoliteRequestManager`'s. The further
    `options` are the crawler's own. A PlaywrightCrawler has its pages routed through the gate,
    names itself as the gate does, and blocks service workers; it makes up no fingerprints.

    Raises ConfigError for `respect_robots_txt_file=True`: the gate decides, and crawlee would ask
    for each file a second time, in no turn.

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
        found: OnSkipped = register(callback)
        return found

    crawler.on_skipped_request = on_skipped_request
    if in_browser:
        _route_pages(crawler, gate)
    polite: _Crawler = crawler
    return polite


def _prepare_browser(gate: Gatekeeper | RemoteGatekeeper, options: dict[str, Any]) -> None:
    """Options of a PlaywrightCrawler: no service workers, no made-up names."""
    if "browser_pool" in options:
        return  # its contexts are made elsewhere; the routes see to both
    options.setdefault("fingerprint_generator", None)
    options.setdefault("use_incognito_pages", True)  # a profile would fetch icons, past any route
    context = {"service_workers": "block", **(options.get("browser_new_context_options") or {})}
    if gate.user_agent is not None:
        context.setdefault("user_agent", gate.user_agent)
    options["browser_new_context_options"] = context


def _route_pages(crawler: Any, gate: Gatekeeper | RemoteGatekeeper) -> None:
    from gatekeeper.integrations.playwright import polite_route  # noqa: PLC0415 - an extra

    async def before(context: Any) -> None:
        await polite_route(context.page.context, gate)

    crawler.pre_navigation_hook(before)
