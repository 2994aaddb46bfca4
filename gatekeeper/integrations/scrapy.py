"""Polite crawls with Scrapy in one line: `ADDONS = {"gatekeeper.integrations.scrapy.Addon": 500}`.

* `Addon` installs the scheduler and the middleware, and sets ROBOTSTXT_OBEY = False.
* `PoliteScheduler` returns a request when its host is due, with its lease: no request waits in the
  downloader, where it would count against CONCURRENT_REQUESTS.
* `PoliteMiddleware` acquires a lease for requests that have none, rejects denied requests, and
  reports responses.
* `RobotParser` is the parser alone (for ROBOTSTXT_PARSER).

Settings: GATEKEEPER_CONFIG (a path, or a dict as for `Config.from_dict`), or GATEKEEPER_URL and
GATEKEEPER_TOKEN for a sidecar; GATEKEEPER_MAX_WAIT, the maximum number of seconds to wait for a
deferred request (600). The identity is USER_AGENT.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import pickle  # as Scrapy's own disk queues do, in the same folder: JOBDIR is the operator's
import re
import weakref
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Self, cast

from gatekeeper.errors import GatekeeperError, InvalidURL, StorageError, needs_extra
from gatekeeper.integrations.queue_refusals import queue_gate
from gatekeeper.library_internals import wake_scrapy
from gatekeeper.queue.files import Entry, KeptEntries
from gatekeeper.queue.polite import PoliteQueue, Turn
from gatekeeper.robots import Policy, RobotsTxt, product_token

with needs_extra("scrapy", __name__):
    from scrapy import Request, Spider
    from scrapy.core.scheduler import BaseScheduler
    from scrapy.crawler import Crawler
    from scrapy.downloadermiddlewares.httpcache import HttpCacheMiddleware
    from scrapy.robotstxt import RobotParser as BaseRobotParser
    from scrapy.settings import BaseSettings
    from scrapy.utils.defer import deferred_f_from_coro_f, maybe_deferred_to_future
    from scrapy.utils.misc import build_from_crawler, load_object
    from scrapy.utils.request import request_from_dict

    from gatekeeper.integrations.scrapy_requests import (
        PoliteMiddleware,
        RequestDeferred,
        RequestDenied,
        RequestInvalidURL,
        RequestLeaseTimeout,
        ScrapyCrawl,
    )

__all__ = ["Addon", "PoliteMiddleware", "PoliteScheduler", "RobotParser"]
__all__ += ["RequestDeferred", "RequestDenied", "RequestInvalidURL", "RequestLeaseTimeout"]

_log = logging.getLogger(__name__)

_ORDER: Final = 950
"""Closer to the downloader than Scrapy's own middlewares, so that it sees requests as sent."""


class Addon:
    """An add-on for Scrapy's ADDONS. Needs the asyncio reactor (Scrapy's default), or none."""

    def update_settings(self, settings: BaseSettings) -> None:
        """Install the scheduler and the middleware. Called by Scrapy.

        A SCHEDULER of your own is not replaced: requests then wait for leases in the middleware.
        """
        here = __name__
        settings.set("SCHEDULER", f"{here}.PoliteScheduler", priority="addon")
        settings["DOWNLOADER_MIDDLEWARES"][f"{here}.PoliteMiddleware"] = _ORDER
        # Override any other value: the gate decides, and each file is fetched once.
        priority = max(settings.getpriority("ROBOTSTXT_OBEY") or 0, 15)
        settings.set("ROBOTSTXT_OBEY", False, priority=priority)


@dataclass(eq=False)
class _DirectTurn:
    """Takes the place of a `Turn` for a request that needs no lease."""

    kept: KeptEntries | None
    """The file that it is in, until it is done."""
    entry: Entry
    url: str
    data: Any
    """The pickled request, or the number of a request in memory."""

    def done(self) -> None:
        """Remove the request from the file. Idempotent."""
        kept, self.kept = self.kept, None
        if kept is not None:
            kept.remove(self.entry)


class _DirectRequests:
    """A first-in, first-out queue of requests without leases: other schemes than http and https,
    malformed URLs, and requests that Scrapy's own cache answers."""

    def __init__(self, keep: Path | None) -> None:
        """`keep`: the file that stores the requests across restarts, if any."""
        self._kept = None if keep is None else KeptEntries(keep)
        found = [] if self._kept is None else self._kept.load(check=str)
        self._arrivals = itertools.count(found[-1][1] + 1 if found else 0)
        self._waiting: deque[Entry] = deque(found)
        self._given = weakref.WeakSet[_DirectTurn]()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, url: str, data: bytes | int) -> None:
        """Add a request: pickled, which is stored, or by its number, which is not."""
        entry = 0.0, next(self._arrivals), url, data
        if self._kept is not None and isinstance(data, bytes):
            self._kept.add(entry)
        self._waiting.append(entry)

    def pop(self) -> _DirectTurn | None:
        """Return the next request, or None if there is none."""
        if not self._waiting:
            return None
        entry = self._waiting.popleft()
        turn = _DirectTurn(self._kept, entry, *entry[2:])
        self._given.add(turn)
        return turn

    def close(self) -> None:
        """Finish requests in flight and close the file; waiting requests stay for the next run."""
        for turn in list(self._given):
            with suppress(StorageError):  # the request is then repeated in the next run
                turn.done()
        if self._kept is not None:
            self._kept.close()


class PoliteScheduler(BaseScheduler):
    """A scheduler that returns each request when its host is due, and stores the others in JOBDIR.

    A request that Scrapy's HTTP cache answers (HTTPCACHE_ENABLED) needs no lease.

    Requests of higher priority come first, within a host and among hosts that are due; equal ones
    in the order in which they were added. DUPEFILTER_CLASS, `dont_filter` and the `scheduler/*`
    stats work as with Scrapy's own scheduler.
    """

    def __init__(self, crawler: Crawler) -> None:
        self._crawler = crawler
        self._crawl = ScrapyCrawl.of(crawler)
        self._scheduled = self._crawl.scheduled = weakref.WeakSet[Request]()
        self._stats: Any = crawler.stats
        self._filter: Any = build_from_crawler(
            load_object(crawler.settings["DUPEFILTER_CLASS"]), crawler
        )
        self._queue: PoliteQueue | None = None
        self._keeps = bool(crawler.settings.get("JOBDIR"))
        self._spider: Spider | None = None
        self._direct = _DirectRequests(None)
        self._direct_first = False
        self._requests: dict[int, Request] = {}
        """Requests that are only in memory, by their number in the queue."""
        self._number = 0
        self._asked = asyncio.Event()
        self._feeder: asyncio.Task[None] | None = None

    @classmethod
    def from_crawler(cls, crawler: Crawler) -> Self:
        """Create the scheduler. Called by Scrapy."""
        return cls(crawler)

    # -- opening and closing ---------------------------------------------------------

    @deferred_f_from_coro_f
    async def open(self, spider: Spider) -> None:
        """Open the gate and the queue. Scrapy awaits the result."""
        self._spider = spider
        if (opening := self._filter.open()) is not None:
            await maybe_deferred_to_future(opening)
        gate = await self._crawl.open()
        shown: Any = queue_gate(gate, self._crawl.max_wait)
        keep = None
        if self._keeps:
            folder = Path(self._crawler.settings["JOBDIR"])
            folder.mkdir(parents=True, exist_ok=True)  # noqa: ASYNC240 - once, before the crawl
            keep = folder / "gatekeeper-queue.sqlite"
            self._direct = _DirectRequests(folder / "gatekeeper-direct.sqlite")
        self._loop = asyncio.get_running_loop()
        self._queue = PoliteQueue(shown, keep=keep)
        if len(self):
            _log.info("Resuming crawl (%d requests scheduled)", len(self))
        self._feeder = asyncio.create_task(self._feed(self._queue))

    @deferred_f_from_coro_f
    async def close(self, reason: str) -> None:
        """Close the queue. Waiting requests stay in JOBDIR for the next run."""
        if self._feeder is not None:
            self._feeder.cancel()
            await asyncio.wait([self._feeder])
        for turn in list(self._crawl.turns.values()):
            _end(turn)
        self._direct.close()
        if self._queue is not None:
            await self._queue.close()
        if (closing := self._filter.close(reason)) is not None:
            await maybe_deferred_to_future(closing)

    # -- requests --------------------------------------------------------------------

    def __len__(self) -> int:
        waiting = 0 if self._queue is None else self._queue.qsize()
        return waiting + len(self._direct)

    def has_pending_requests(self) -> bool:
        """Whether any request waits: in the queue, or for a lease in the middleware."""
        return len(self) > 0 or self._crawl.waiting > 0

    def enqueue_request(self, request: Request) -> bool:
        """Add a request, unless the dupefilter has seen it. Return whether it was added."""
        if not request.dont_filter and self._filter.request_seen(request):
            self._filter.log(request, self._spider)
            return False
        url = self._turn_of(request)
        data: Any = self._packed(request) if self._keeps else None
        kind = "disk"
        if data is None:
            kind = "memory"
            self._number -= 1  # negative, unlike numbers that an earlier run may have stored
            self._requests[data := self._number] = request
        if url is None:
            self._direct.put(request.url, data)
        else:
            cast("PoliteQueue", self._queue).put_nowait(url, request.priority, data)
        self._stats.inc_value(f"scheduler/enqueued/{kind}")
        self._stats.inc_value("scheduler/enqueued")
        return True

    def _turn_of(self, request: Request) -> str | None:
        """Return the URL for which to acquire a lease, or None if the request needs none."""
        if not request.url.startswith(("http://", "https://")) or self._is_cached(request):
            return None
        try:
            return self._crawl.lease_url(request)
        except InvalidURL:
            return None  # the middleware raises the error

    def _is_cached(self, request: Request) -> bool:
        """Return True if HttpCacheMiddleware would answer the request now. If it does not in the
        end, the request waits for a lease in the middleware."""
        cache = self._crawler.get_downloader_middleware(HttpCacheMiddleware)
        if cache is None or self._spider is None or request.meta.get("dont_cache"):
            return False
        asked = request.copy()  # a policy may add header fields for revalidation
        try:
            if not cache.policy.should_cache_request(asked):
                return False
            found = cache.storage.retrieve_response(self._spider, asked)
            if found is None:
                return bool(cache.ignore_missing)
            return bool(cache.policy.is_cached_response_fresh(found, asked))
        except Exception as error:  # noqa: BLE001 - a storage may raise anything
            _log.warning("The cache can't say whether it has %s: %r", request, error)
            return False

    def _packed(self, request: Request) -> bytes | None:
        try:
            return pickle.dumps(request.to_dict(spider=self._spider), protocol=4)
        except (pickle.PicklingError, AttributeError, TypeError, ValueError) as error:
            if self._crawler.settings.getbool("SCHEDULER_DEBUG"):
                _log.warning("%s can't be kept, so it is lost at a stop: %s", request, error)
            self._stats.inc_value("scheduler/unserializable")
            return None

    def next_request(self) -> Request | None:
        """Return a request whose host is due, with its lease, or None if there is none."""
        request: Request | None = None
        while request is None:
            # Alternate, so that neither kind of requests starves the other.
            self._direct_first = not self._direct_first
            turn: Turn | _DirectTurn | None = self._direct.pop() if self._direct_first else None
            turn = turn or self._next_turn() or self._direct.pop()
            if turn is None:
                return None
            request = self._unpacked(turn)
        self._stats.inc_value("scheduler/dequeued")
        return request

    def _next_turn(self) -> Turn | None:
        self._asked.set()
        try:
            return None if self._queue is None else self._queue.get_nowait()
        except asyncio.QueueEmpty:
            return None
        except GatekeeperError as error:
            _log.error("the next request can't be had: %s", error)
            return None

    def _unpacked(self, turn: Turn | _DirectTurn) -> Request | None:
        data, kind = turn.data, "disk"
        if isinstance(data, bytes):
            request = request_from_dict(pickle.loads(data), spider=self._spider)  # noqa: S301 - JOBDIR's own
        else:
            kind, found = "memory", self._requests.pop(data, None)
            if found is None:  # a request of an earlier run that could not be stored
                _end(turn)
                return None
            request = found
        self._scheduled.add(request)
        if isinstance(turn, Turn):
            self._crawl.turns[request] = turn
        # The request is done when it is garbage-collected: its callback has run, and the results
        # were scheduled or are in a pipeline. `_end_soon` defers to the loop, since a collection
        # can run at any point.
        dropped = weakref.finalize(request, _end_soon, self._loop, turn)
        dropped.atexit = False
        self._stats.inc_value(f"scheduler/dequeued/{kind}")
        return request

    async def _feed(self, queue: PoliteQueue) -> None:
        """Wake the engine whenever a host is due, until it asks for a request."""
        while True:
            await queue.wait_due()
            self._asked.clear()
            wake_scrapy(self._crawler.engine)
            await self._asked.wait()  # longer, if the engine is paused or full


def _end(turn: Turn | _DirectTurn) -> None:
    try:
        turn.done()
    except GatekeeperError as error:
        _log.error("%s is done, and could not be taken off the list: %s", turn.url, error)


def _end_soon(loop: asyncio.AbstractEventLoop, turn: Turn | _DirectTurn) -> None:
    with suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(_end, turn)


class RobotParser(BaseRobotParser):
    """gatekeeper's robots.txt parser, for `ROBOTSTXT_PARSER`.

    Scrapy then fetches the files itself and parses any response: it treats a 503 as an empty file,
    and does not pace requests. `Addon` avoids both.
    """

    def __init__(self, robotstxt_body: bytes) -> None:
        robots = RobotsTxt.parse(robotstxt_body)

        @lru_cache(maxsize=100)
        def policy(agent: str | bytes) -> Policy:
            # A product token has ASCII letters only (RFC 9309 section 2.2.1): in the name of an
            # agent, as in that of a group, it ends before the first other character.
            token = _ASCII.match(product_token(_text(agent)))
            return robots.policy((token and token[0]) or "*")

        self._policy = policy

    @classmethod
    def from_crawler(cls, crawler: Crawler, robotstxt_body: bytes) -> Self:
        """Create the parser. Called by Scrapy."""
        return cls(robotstxt_body)

    def allowed(self, url: str | bytes, user_agent: str | bytes) -> bool:
        """Return True if the agent may fetch the URL."""
        return self._policy(user_agent).allowed(_text(url))

    def crawl_delay(self, user_agent: str | bytes) -> float | None:
        """Return the agent's Crawl-delay in seconds, or None if there is none."""
        return self._policy(user_agent).crawl_delay


_ASCII = re.compile(r"[\x21-\x7e]+")


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", errors="replace") if isinstance(value, bytes) else value
