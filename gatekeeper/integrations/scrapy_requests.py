"""What every request of a Scrapy crawl goes through: its gate, and the middleware that lets each
one through with a lease alone."""

from __future__ import annotations

import asyncio
import logging
import time
import weakref
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar, Final, Self

from msgspec.structs import replace
from scrapy import Request, Spider, signals
from scrapy.crawler import Crawler
from scrapy.exceptions import IgnoreRequest, StopDownload
from scrapy.http import Response
from scrapy.settings import BaseSettings
from twisted.internet.error import DNSLookupError

from gatekeeper import http_fields, urls
from gatekeeper.config import Config, as_config
from gatekeeper.decision import Decision, Verdict, refuse
from gatekeeper.errors import (
    ConfigError,
    Deferred,
    Denied,
    GateClosed,
    GatekeeperError,
    InvalidURL,
    LeaseTimeout,
    StorageError,
)
from gatekeeper.fetching.outcomes import Retrieval
from gatekeeper.gate import Gatekeeper, internals
from gatekeeper.integrations.hops import (
    GuardedNames,
    HopErrors,
    by_system,
    name_to_send,
)
from gatekeeper.integrations.queue_gate import MAX_WAIT, RefusedTurn
from gatekeeper.library_internals import scrapy_stops, wake_scrapy
from gatekeeper.middleware import other_agent, unnamed
from gatekeeper.queue import Turn
from gatekeeper.remote.client import RemoteGatekeeper

_log = logging.getLogger("gatekeeper.integrations.scrapy")

_AGAIN: Final = 0.1
"""Seconds after which a deferred download asks again, at the soonest."""
_LOOK: Final = 2.0
"""Seconds between two looks whether the crawl is being stopped, while a download waits."""
_LOOK_UP: Final = 5.0
"""Seconds for which it is asked why a name has no address: no answer is one as well."""


_ERRORS = HopErrors("gatekeeper.integrations.scrapy", IgnoreRequest)
RequestDenied: type[Denied] = _ERRORS.denied
RequestDeferred: type[Deferred] = _ERRORS.deferred
RequestLeaseTimeout: type[LeaseTimeout] = _ERRORS.late
RequestInvalidURL: type[InvalidURL] = _ERRORS.invalid


class ScrapyCrawl:
    """The gate of one crawl, and the turns that its requests have; shared by both components."""

    _all: ClassVar[weakref.WeakKeyDictionary[Crawler, ScrapyCrawl]] = weakref.WeakKeyDictionary()

    def __init__(self, crawler: Crawler) -> None:
        self._crawler = weakref.ref(crawler)
        self.stats: Any = crawler.stats
        self.settings: BaseSettings = crawler.settings
        self.turns: weakref.WeakKeyDictionary[Request, Turn] = weakref.WeakKeyDictionary()
        """Of requests that were given out and are under way."""
        self.max_wait: float = self.settings.getfloat("GATEKEEPER_MAX_WAIT", MAX_WAIT)
        self.scheduled: weakref.WeakSet[Request] | None = None
        """What the scheduler gave out, where that is ours."""
        self.waiting: int = 0
        """Downloads that wait for their turns in the middleware, in nobody's way."""
        self.gate: Gatekeeper | RemoteGatekeeper | None = None
        self._opening: asyncio.Future[Gatekeeper | RemoteGatekeeper] | None = None
        self._closed = False
        crawler.signals.connect(self.close, signal=signals.spider_closed)

    @classmethod
    def of(cls, crawler: Crawler) -> ScrapyCrawl:
        """The one of that crawler."""
        found = cls._all.get(crawler)
        if found is None:
            found = cls._all[crawler] = cls(crawler)
        return found

    async def open(self) -> Gatekeeper | RemoteGatekeeper:
        """The gate, opened at the first call. Raises GateClosed once the crawl is over."""
        if self._closed:
            raise GateClosed("the crawl is over, and its gate closed")
        if self._opening is None:
            self._opening = asyncio.ensure_future(self._open())
        return await asyncio.shield(self._opening)

    async def _open(self) -> Gatekeeper | RemoteGatekeeper:
        crawler = self._crawler()
        spider = None if crawler is None else crawler.spider
        agent = getattr(spider, "user_agent", None) or self.settings["USER_AGENT"]
        if (where := self.settings.get("GATEKEEPER_URL")) is not None:
            name = None if unnamed(agent) else agent
            token, config = self.settings.get("GATEKEEPER_TOKEN"), self._config()
            gate: Gatekeeper | RemoteGatekeeper = RemoteGatekeeper(
                *(where, name), token=token, config=config, patience=min(10.0, self.max_wait)
            )
        else:
            if unnamed(agent):
                _log.warning("USER_AGENT is Scrapy's own: say who you are, so that sites can tell")
            gate = Gatekeeper(agent, config=self._config())
        self.gate = await gate.__aenter__()
        if isinstance(gate, Gatekeeper):
            internals(gate).on_retrieval(self._retrieved)
        return gate

    def _config(self) -> Config:
        given = self.settings.get("GATEKEEPER_CONFIG")
        if given is None:
            config = as_config(None)
        elif isinstance(given, str | Path):
            config = Config.load(given)
        elif isinstance(given, Config):
            config = given
        else:
            config = Config.from_dict(_plain(given))
        jobdir = self.settings.get("JOBDIR")
        if jobdir and config.storage.path is None:
            # What is resumed goes on with the clocks and blocks that it had.
            path = str(Path(jobdir) / "gatekeeper.sqlite")
            config = replace(config, storage=replace(config.storage, path=path))
        return config

    def _retrieved(self, origin: str, retrieval: Retrieval, seconds: float) -> None:
        self.stats.inc_value("robotstxt/request_count")
        if retrieval.status is not None:
            self.stats.inc_value("robotstxt/response_count")
            self.stats.inc_value(f"robotstxt/response_status_count/{retrieval.status}")
        else:
            self.stats.inc_value(f"robotstxt/exception_count/{retrieval.outcome.row.name}")

    async def close(self) -> None:
        """The spider is closed."""
        self._closed = True
        opening, self._opening = self._opening, None
        if opening is not None:
            with suppress(Exception):
                await (await opening).__aexit__(None, None, None)
        self.gate = None

    # -- requests --------------------------------------------------------------------

    @staticmethod
    def sent_by(request: Request) -> str | None:
        """Its User-Agent, as it is sent."""
        return _field(request, "User-Agent")

    def agent_of(self, request: Request) -> str | None:
        """The request's own User-Agent, if that is another one than the gate's."""
        own = None if self.gate is None else self.gate.user_agent
        return None if own is None else other_agent(self.sent_by(request), own)

    def asked_as(self, request: Request) -> str:
        """The URL to ask the queue for a turn by: that of the host's robots.txt, which anybody may
        ask for, where it is not for the gate's own name to say whether the request may be sent.
        """
        if request.meta.get("dont_obey_robotstxt") or self.agent_of(request) is not None:
            return f"{urls.parse(request.url).origin}/robots.txt"
        return request.url

    def refused(self, request: Request, decision: Decision | str) -> GatekeeperError:
        """Count it as Scrapy does; what to raise, an IgnoreRequest as well."""
        if isinstance(decision, str):
            self.stats.inc_value("gatekeeper/defer/host_blocked")
            return _ERRORS.of(LeaseTimeout(request.url, decision), request)
        self.stats.inc_value(f"gatekeeper/{decision.verdict}/{decision.reason}")
        if decision.verdict is Verdict.DENY:
            self.stats.inc_value("robotstxt/forbidden")
            _log.debug("Forbidden by robots.txt: %s (%s)", request, decision.explain())
            return _ERRORS.of(Denied(decision), request)
        # Pipelines of files say nothing of an IgnoreRequest.
        _log.info("Not asked for: %s (%s)", request, decision.explain())
        return _ERRORS.of(Deferred(decision), request)

    def give_back(self, turn: Turn) -> None:
        """Nothing was sent in it; the request itself is done when Scrapy has dropped it."""
        with suppress(StorageError):
            turn.lease.give_back()

    @contextmanager
    def out_of_the_way(self, request: Request) -> Iterator[None]:
        """While it waits, the request holds none of CONCURRENT_REQUESTS places, if it is a download
        that somebody asked the engine for. What a scheduler gave out keeps its place: the scheduler
        would give out all that it has."""
        crawler = self._crawler()
        if crawler is None or self.scheduled is None or request in self.scheduled:
            yield
            return
        engine: Any = crawler.engine
        active = engine.downloader.active
        active.discard(request)
        self.waiting += 1
        wake_scrapy(engine)
        try:
            yield
        finally:
            self.waiting -= 1
            active.add(request)

    async def unless_stopped(self, request: Request, waiting: Coroutine[Any, Any, Any]) -> Any:
        """The lease that is waited for. A crawl that is stopped waits for none: Scrapy would wait
        for the download."""
        task = asyncio.ensure_future(waiting)
        try:
            while not task.done():
                await asyncio.wait([task], timeout=_LOOK)
                crawler = self._crawler()
                if not task.done() and crawler is not None and scrapy_stops(crawler):
                    late = LeaseTimeout(request.url, f"{request.url}: the crawl is being stopped")
                    raise _ERRORS.of(late, request)
            return task.result()
        except BaseException:
            if not (task.cancel() or task.cancelled() or task.exception()):
                task.result().give_back()  # it came in this very moment
            raise

    def is_wanted(self, request: Request) -> bool:
        """Does anybody wait for what becomes of it, once Scrapy has downloaded it?"""
        crawler = self._crawler()
        engine = None if crawler is None else crawler.engine
        return engine is None or request in engine.downloader.active


def _plain(given: Any) -> Any:
    """A setting of dicts as Scrapy keeps it, as plain ones."""
    if isinstance(given, BaseSettings):
        return given.copy_to_dict()
    return dict(given)


def call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
    """Have that called in the loop, from any thread; not at all where the loop is closed."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(callback)


class _Sending:
    """A request that was let through."""

    __slots__ = ("began", "lease", "left")

    def __init__(self, lease: Any) -> None:
        self.lease = lease
        self.began = time.monotonic()
        self.left = False
        """Its connection is free: whoever waits hears of it now."""

    def end(self) -> None:
        """Nothing more is known of it. Idempotent."""
        with suppress(GatekeeperError):
            self.lease.end()


class PoliteMiddleware:
    """Lets a request through with a lease alone, and reports what came of it."""

    def __init__(self, crawler: Crawler) -> None:
        self._crawl = ScrapyCrawl.of(crawler)
        self._names = GuardedNames(as_config(None))
        self._under_way: weakref.WeakKeyDictionary[Request, _Sending] = weakref.WeakKeyDictionary()
        crawler.signals.connect(self._left, signal=signals.request_left_downloader)

    @classmethod
    def from_crawler(cls, crawler: Crawler) -> Self:
        """Scrapy makes it so."""
        return cls(crawler)

    async def process_request(self, request: Request, spider: Spider | None = None) -> None:
        """Refuse, or let through with a lease. Raises IgnoreRequest."""
        if not request.url.startswith(("http://", "https://")):
            return
        crawl = self._crawl
        gate = await crawl.open()
        turn = crawl.turns.get(request)
        # One that was sent before, or whose lease has ended since it was given out, takes another.
        if turn is None or getattr(turn.lease, "ended", False):
            with crawl.out_of_the_way(request):
                lease = await crawl.unless_stopped(request, self._acquire(gate, request))
        else:
            lease = turn.lease
            if isinstance(lease, RefusedTurn):
                raise crawl.refused(request, lease.why)
            try:
                await self._judge(gate, request)
            except BaseException as error:
                lease.give_back()
                if isinstance(error, Denied):
                    raise crawl.refused(request, error.decision) from error
                raise
        crawl.stats.inc_value("gatekeeper/leases")
        request.meta.pop("download_latency", None)  # of an earlier try
        lease.claim(lease.url)  # it is sent now: that nothing is heard of it then says something
        sending = self._under_way[request] = _Sending(lease)
        if (task := asyncio.current_task()) is not None:
            task.add_done_callback(lambda _: self._over(request))
        # A middleware of somebody's may drop it without a word.
        end = weakref.finalize(request, call_soon, asyncio.get_running_loop(), sending.end)
        end.atexit = False
        name = name_to_send(lease, gate.user_agent, crawl.sent_by(request))
        if name is not None:  # Scrapy's own counts as none
            request.headers["User-Agent"] = name
        if isinstance(gate, Gatekeeper) and (signer := internals(gate).signer) is not None:
            request.headers.update(signer.headers(request.method, request.url))

    async def _acquire(self, gate: Gatekeeper | RemoteGatekeeper, request: Request) -> Any:
        """For what did not come from the scheduler: `engine.download_async()`, say. What is
        deferred for no longer than GATEKEEPER_MAX_WAIT is waited for, as the scheduler does."""
        crawl = self._crawl
        clock = internals(gate).clock if isinstance(gate, Gatekeeper) else gate.clock
        end = clock.wall() + crawl.max_wait
        while True:
            left = max(0.0, end - clock.wall())
            try:
                await self._judge(gate, request)
                return await gate.acquire(crawl.asked_as(request), owned=False, timeout=left)
            except Denied as error:
                until = getattr(error, "retry_at", None)
                if until is None or until.timestamp() > end or left == 0.0:
                    raise crawl.refused(request, error.decision) from error
                await clock.sleep(max(_AGAIN, until.timestamp() - clock.wall()))
            except (InvalidURL, LeaseTimeout) as error:
                raise _ERRORS.of(error, request) from error
            except ConfigError as error:
                raise IgnoreRequest(str(error)) from error

    async def _judge(self, gate: Gatekeeper | RemoteGatekeeper, request: Request) -> None:
        """Of a request under a name of its own, whether that one may send it."""
        agent = self._crawl.agent_of(request)
        if agent is None or request.meta.get("dont_obey_robotstxt"):
            return
        refuse(await gate.check(request.url, user_agent=agent))

    def _left(self, request: Request) -> None:
        """Its connection is free. Who asked for it may have been cancelled: Scrapy downloads it to
        its end all the same, and nobody hears of it then."""
        sending = self._under_way.get(request)
        if sending is not None:
            sending.left = True
            if not self._crawl.is_wanted(request):
                self._under_way.pop(request).end()

    def _over(self, request: Request) -> None:
        """What waited for its answer has ended: by a cancellation, if nothing was reported."""
        sending = self._under_way.get(request)
        if sending is not None and sending.left:
            self._under_way.pop(request).end()

    def process_response(
        self, request: Request, response: Response, spider: Spider | None = None
    ) -> Response:
        """Report it: the host's clock, its back-off and its latency go by that."""
        sending = self._under_way.pop(request, None)
        if sending is None:  # out of a cache: nothing was sent
            self._give_back(request)
        else:
            self._answered(sending, request, response)
        return response

    def _answered(self, sending: _Sending, request: Request, response: Response) -> None:
        self._tell(
            sending,
            status=response.status,
            elapsed=_latency(request),
            retry_after=_field(response, "Retry-After"),
            size=len(response.body),
            rate_limit=http_fields.rate_limit_of({x: _field(response, x) for x in _LIMITS}),
        )

    async def process_exception(
        self, request: Request, exception: Exception, spider: Spider | None = None
    ) -> None:
        """Report that no answer came, or what of it came."""
        sending = self._under_way.pop(request, None)
        if sending is None:
            self._give_back(request)
            return
        response = getattr(exception, "response", None)
        if isinstance(exception, StopDownload) and response is not None:
            self._answered(sending, request, response)
            return
        headed = _latency(request) is not None  # what ended it then is no failure of the host
        unanswered = not (headed or isinstance(exception, IgnoreRequest))
        try:
            if unanswered:
                await self._unreached(sending.lease, request, exception)
        finally:
            since = time.monotonic() - sending.began
            self._tell(sending, elapsed=since if unanswered else None)

    async def _unreached(self, lease: Any, request: Request, exception: Exception) -> None:
        """Tell the gate why it could not be connected: it may be our own uplink."""
        gate = self._crawl.gate
        if not isinstance(gate, Gatekeeper):
            return  # a sidecar has an uplink of its own
        why = by_system(exception)
        if why is None and _is_about_its_name(exception):
            # Twisted says no more than that; whether the name server answered, the gate finds out.
            target = urls.parse(request.url)
            try:
                async with asyncio.timeout(_LOOK_UP):
                    await self._names.addresses(gate, target.host, 0)
            except OSError as error:
                why = error
        if why is not None:
            internals(gate).unreached(lease, why)

    def _tell(self, sending: _Sending, **told: Any) -> None:
        lease = sending.lease
        try:
            lease.report(**told)
        except StorageError as error:
            _log.error("what came of %s could not be kept: %s", lease.url, error)
        finally:
            lease.end()

    def _give_back(self, request: Request) -> None:
        turn = self._crawl.turns.get(request)
        if turn is not None:
            self._crawl.give_back(turn)


def _latency(request: Request) -> float | None:
    """Seconds to the head of its answer, once that has come."""
    latency = request.meta.get("download_latency")
    return latency if isinstance(latency, float) else None


def _is_about_its_name(error: BaseException) -> bool:
    """Has its host's name no address, as far as Twisted says?"""
    return isinstance(error, DNSLookupError) or isinstance(error.__cause__, DNSLookupError)


_LIMITS = ("RateLimit", "Age")


def _field(message: Request | Response, name: str) -> str | None:
    value = message.headers.get(name)
    return None if value is None else value.decode("latin-1")
