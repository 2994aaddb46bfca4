"""The gate of a Scrapy crawl, and the middleware that sends each request under a lease."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

from msgspec.structs import replace
from scrapy import Request, Spider, signals
from scrapy.crawler import Crawler
from scrapy.exceptions import IgnoreRequest, StopDownload
from scrapy.http import Response
from scrapy.settings import BaseSettings
from twisted.internet.error import DNSLookupError

from gatekeeper import http_fields, urls
from gatekeeper.client.client import RemoteGatekeeper
from gatekeeper.config import Config, as_config
from gatekeeper.decision import Decision, Verdict
from gatekeeper.descriptors import is_shortage
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
from gatekeeper.gate import Gatekeeper
from gatekeeper.gate.lease_base import note_fields, other_agent, unnamed
from gatekeeper.gate.protocols import HeldLease
from gatekeeper.integrations.hops import GuardedNames, Hop, HopErrors, by_system, decide, hop_of
from gatekeeper.integrations.queue_refusals import MAX_WAIT, RefusedLease
from gatekeeper.library_internals import is_scrapy_closing, send_once_by_scrapy, wake_scrapy
from gatekeeper.page_rules import html_in, page_signals
from gatekeeper.queue.polite import Turn
from gatekeeper.robots import product_token

_log = logging.getLogger("gatekeeper.integrations.scrapy")

_MIN_RETRY_SECONDS: Final = 0.1
"""Minimum number of seconds after which a deferred download asks again."""
_LOOK_SECONDS: Final = 2.0
"""Seconds between two checks whether the crawl is being stopped, while a download waits."""
_NOT_ASYNCIO: Final = "gatekeeper needs asyncio: leave TWISTED_REACTOR at its default"
_LOOK_UP_SECONDS: Final = 5.0
"""Timeout in seconds for finding out why a name could not be resolved; expiry is a result too."""


_ERRORS = HopErrors("gatekeeper.integrations.scrapy", IgnoreRequest)
RequestDenied: type[Denied] = _ERRORS.denied
RequestDeferred: type[Deferred] = _ERRORS.deferred
RequestLeaseTimeout: type[LeaseTimeout] = _ERRORS.late
RequestInvalidURL: type[InvalidURL] = _ERRORS.invalid


class ScrapyCrawl:
    """The gate and the leases of one crawl, shared by the scheduler and the middleware."""

    def __init__(self, crawler: Crawler) -> None:
        self._crawler: Any = weakref.ref(crawler)  # which is there as long as the crawl runs
        self.stats: Any = crawler.stats
        self.settings: BaseSettings = crawler.settings
        self.turns: weakref.WeakKeyDictionary[Request, Turn] = weakref.WeakKeyDictionary()
        """The leases of requests that the scheduler has returned and that are in flight."""
        self.max_wait: float = self.settings.getfloat("GATEKEEPER_MAX_WAIT", MAX_WAIT)
        self.scheduled: weakref.WeakSet[Request] | None = None
        """Requests that the scheduler has returned; None if it is not a `PoliteScheduler`."""
        self.waiting: int = 0
        """Number of downloads that wait in the middleware without occupying the downloader."""
        self.gate: Gatekeeper | RemoteGatekeeper | None = None
        self._opening: asyncio.Future[Gatekeeper | RemoteGatekeeper] | None = None
        self._closed = False
        crawler.signals.connect(self.close, signal=signals.spider_closed)

    @classmethod
    def of(cls, crawler: Crawler) -> ScrapyCrawl:
        """Return the object of a crawler, created at the first call.

        It is kept in the crawler itself, which it leads back to: weak keys would never drop it.
        """
        kept, name = vars(crawler), cls.__qualname__
        if name not in kept:
            kept[name] = cls(crawler)
        return kept[name]

    async def open(self) -> Gatekeeper | RemoteGatekeeper:
        """Return the gate, opened at the first call. Raises GateClosed once the crawl is over, and
        ConfigError if it does not run in an asyncio event loop."""
        if self._closed:
            raise GateClosed("the crawl is over, and its gate closed")
        if self._opening is None:
            try:
                self._opening = asyncio.get_running_loop().create_task(self._open())
            except RuntimeError:
                raise ConfigError(_NOT_ASYNCIO) from None
        return await asyncio.shield(self._opening)

    async def _open(self) -> Gatekeeper | RemoteGatekeeper:
        crawler = self._crawler()
        agent = getattr(crawler.spider, "user_agent", None) or self.settings["USER_AGENT"]
        if (where := self.settings.get("GATEKEEPER_URL")) is not None:
            name = None if unnamed(agent) else agent
            gate: Gatekeeper | RemoteGatekeeper = RemoteGatekeeper(
                where,
                name,
                token=self.settings.get("GATEKEEPER_TOKEN"),
                config=self._config(),
                patience=min(10.0, self.max_wait),
            )
        else:
            if unnamed(agent):
                _log.warning("USER_AGENT is Scrapy's own: say who you are, so that sites can tell")
            gate = Gatekeeper(agent, config=self._config())
        self.gate = await gate.__aenter__()
        send_once_by_scrapy(crawler)
        if isinstance(gate, Gatekeeper):
            gate.parts.listeners.append(self._retrieved)
        return gate

    def _config(self) -> Config:
        given = self.settings.get("GATEKEEPER_CONFIG")
        if given is None or isinstance(given, Config):
            config = as_config(given)
        elif isinstance(given, str | Path):
            config = Config.load(given)
        else:  # Scrapy may have wrapped the dictionary
            wrapped = isinstance(given, BaseSettings)
            config = Config.from_dict(given.copy_to_dict() if wrapped else dict(given))
        jobdir = self.settings.get("JOBDIR")
        if jobdir and config.storage.path is None:
            # A resumed crawl continues with its clocks and blocks.
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
        """Close the gate, since the spider is closed."""
        self._closed = True
        opening, self._opening = self._opening, None
        if opening is not None:
            with suppress(Exception):
                await (await opening).__aexit__(None, None, None)
        self.gate = None

    # -- requests --------------------------------------------------------------------

    def agent_of(self, request: Request) -> str | None:
        """Return the request's own User-Agent if it differs from the gate's, else None."""
        own = None if self.gate is None else self.gate.user_agent
        return None if own is None else other_agent(_field(request, "User-Agent"), own)

    def lease_url(self, request: Request) -> str:
        """Return the URL for which to acquire a lease: the request's, or if the gate's own agent
        does not decide the request, that of the host's robots.txt, which is never denied. Raises
        InvalidURL."""
        origin = urls.split(request.url)[0]
        by_others = request.meta.get("dont_obey_robotstxt") or self.agent_of(request) is not None
        return f"{origin}/robots.txt" if by_others else request.url

    def refused(self, request: Request, decision: Decision | str) -> GatekeeperError:
        """Count a refused request in Scrapy's stats, and return the error to raise, which derives
        from IgnoreRequest as well."""
        if isinstance(decision, str):
            self.stats.inc_value("gatekeeper/defer/host_blocked")
            return _ERRORS.of(LeaseTimeout(request.url, decision), request)
        self.stats.inc_value(f"gatekeeper/{decision.verdict}/{decision.reason}")
        if decision.verdict is Verdict.DENY:
            self.stats.inc_value("robotstxt/forbidden")
            _log.debug("Forbidden by robots.txt: %s (%s)", request, decision.explain())
            return _ERRORS.of(Denied(decision), request)
        # Logged here, since file pipelines do not log an IgnoreRequest.
        _log.info("Not asked for: %s (%s)", request, decision.explain())
        return _ERRORS.of(Deferred(decision), request)

    @contextmanager
    def outside_the_downloader(self, request: Request) -> Iterator[None]:
        """Keep a waiting request from counting against CONCURRENT_REQUESTS, if it is a download
        that was requested directly from the engine. Requests from the scheduler do count, since the
        engine would otherwise fetch everything that the scheduler has."""
        if self.scheduled is None or request in self.scheduled:
            yield
            return
        engine = self._crawler().engine
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
        """Wait for a lease, but raise RequestLeaseTimeout if the crawl is being stopped: Scrapy
        would wait for the download."""
        task = asyncio.ensure_future(waiting)
        try:
            while not task.done():
                await asyncio.wait([task], timeout=_LOOK_SECONDS)
                if not task.done() and is_scrapy_closing(self._crawler()):
                    late = LeaseTimeout(request.url, f"{request.url}: the crawl is being stopped")
                    raise _ERRORS.of(late, request)
            return task.result()
        except BaseException:
            if not (task.cancel() or task.cancelled() or task.exception()):
                task.result().give_back()  # the lease was granted at the same moment
            raise

    def is_wanted(self, request: Request) -> bool:
        """Return True if the result of the download is still awaited."""
        return request in self._crawler().engine.downloader.active


def _end(lease: HeldLease) -> None:
    """End a lease without a report. Idempotent."""
    with suppress(GatekeeperError):
        lease.end()


class PoliteMiddleware:
    """A downloader middleware that sends each request under a lease and reports the result."""

    def __init__(self, crawler: Crawler) -> None:
        self._crawl = ScrapyCrawl.of(crawler)
        self._names = GuardedNames(as_config(None))
        self._under_way: weakref.WeakKeyDictionary[Request, Hop] = weakref.WeakKeyDictionary()
        self._delivered: weakref.WeakSet[Request] = weakref.WeakSet()
        """Requests that have left the downloader, so that their results are being delivered."""
        crawler.signals.connect(self._left_downloader, signal=signals.request_left_downloader)
        crawler.signals.connect(self._received, signal=signals.response_received)

    @classmethod
    def from_crawler(cls, crawler: Crawler) -> Self:
        """Create the middleware. Called by Scrapy."""
        return cls(crawler)

    async def process_request(self, request: Request, spider: Spider | None = None) -> None:
        """Acquire a lease unless the scheduler did. Raises IgnoreRequest if it is refused."""
        if not request.url.startswith(("http://", "https://")):
            return
        crawl = self._crawl
        gate = await crawl.open()
        turn = crawl.turns.get(request)
        # A request that was sent before, or whose lease has expired, needs a new lease.
        if turn is None or getattr(turn.lease, "ended", False):
            with crawl.outside_the_downloader(request):
                lease = await crawl.unless_stopped(request, self._acquire(gate, request))
        else:
            lease = turn.lease
            if isinstance(lease, RefusedLease):
                raise crawl.refused(request, lease.why)
            try:
                await self._judge(gate, request)
            except BaseException as error:
                lease.give_back()
                if isinstance(error, Denied):
                    raise crawl.refused(request, error.decision) from error
                raise
        crawl.stats.inc_value("gatekeeper/leases")
        request.meta.pop("download_latency", None)  # from an earlier attempt
        lease.claim(lease.url)  # from here on, a missing response counts against the host
        self._delivered.discard(request)  # it may have been sent before
        hop = self._under_way[request] = hop_of(gate, lease, _field(request, "User-Agent"))
        if (task := asyncio.current_task()) is not None:
            task.add_done_callback(lambda _: self._task_done(request))
        # Another middleware may drop the request without notice.
        end = weakref.finalize(request, hop.call_later, partial(_end, lease))
        end.atexit = False
        request.headers.update(hop.headers(request.method, request.url))

    async def _acquire(self, gate: Gatekeeper | RemoteGatekeeper, request: Request) -> Any:
        """Acquire a lease for a request that did not come from the scheduler, such as one of
        `engine.download_async()`. Like the scheduler, wait out deferrals of up to
        GATEKEEPER_MAX_WAIT seconds."""
        crawl = self._crawl
        clock = gate.parts.clock if isinstance(gate, Gatekeeper) else gate.clock
        end = clock.wall() + crawl.max_wait
        while True:
            left = max(0.0, end - clock.wall())
            try:
                await self._judge(gate, request)
                return await gate.acquire(crawl.lease_url(request), owned=False, timeout=left)
            except Denied as error:
                until = getattr(error, "retry_at", None)
                if until is None or until.timestamp() > end or left == 0.0:
                    raise crawl.refused(request, error.decision) from error
                await clock.sleep(max(_MIN_RETRY_SECONDS, until.timestamp() - clock.wall()))
            except (InvalidURL, LeaseTimeout) as error:
                raise _ERRORS.of(error, request) from error
            except ConfigError as error:
                raise IgnoreRequest(str(error)) from error

    async def _judge(self, gate: Gatekeeper | RemoteGatekeeper, request: Request) -> None:
        """Raise Denied if a request has a User-Agent of its own that may not send it."""
        agent = self._crawl.agent_of(request)
        if agent is not None and not request.meta.get("dont_obey_robotstxt"):
            await decide(gate, request.url, agent)

    def _left_downloader(self, request: Request) -> None:
        """Note that a request has left the downloader. If its caller was cancelled, Scrapy has
        completed the download all the same, and delivers the result to no one."""
        if request in self._under_way:
            self._delivered.add(request)
            if not self._crawl.is_wanted(request):
                _end(self._under_way.pop(request).lease)

    def _task_done(self, request: Request) -> None:
        """End the lease of a request whose task has ended without a report, by a cancellation."""
        if request in self._delivered and (hop := self._under_way.pop(request, None)) is not None:
            _end(hop.lease)

    def process_response(
        self, request: Request, response: Response, spider: Spider | None = None
    ) -> Response:
        """Report a response, which updates the host's clock, back-off and latency."""
        hop = self._under_way.pop(request, None)
        if hop is None:  # from a cache: nothing was sent
            self._give_back(request)
        else:
            self._answered(hop.lease, request, response)
        return response

    def _received(self, response: Response, request: Request) -> None:
        """Put what the header and the page say about themselves into the response's meta. It is
        decoded by now, which it is not yet in `process_response`."""
        gate = self._crawl.gate
        sent = _field(request, "User-Agent")
        named = sent or (gate.user_agent if gate is not None else None) or ""
        fields: Any = _Fields(response)
        request.meta["gatekeeper_signals"] = page_signals(
            fields,
            product_token(named) or "*",
            html_in(fields.get("Content-Type"), response.body),
            url=response.url,
            status=response.status,
        )

    def _answered(self, lease: HeldLease, request: Request, response: Response) -> None:
        fields: Any = _Fields(response)
        note_fields(lease, response.status, fields)
        with _logging_loss(lease.url):
            try:
                lease.report(
                    status=response.status,
                    elapsed=_latency(request),
                    retry_after=fields.get("Retry-After"),
                    size=len(response.body),
                    rate_limit=http_fields.rate_limit_of(fields),
                )
            finally:
                lease.end()

    async def process_exception(
        self, request: Request, exception: Exception, spider: Spider | None = None
    ) -> None:
        """Report a failure, or the response that a StopDownload carries."""
        hop = self._under_way.pop(request, None)
        if hop is None:
            self._give_back(request)
            return
        response = getattr(exception, "response", None)
        if isinstance(exception, StopDownload) and response is not None:
            self._answered(hop.lease, request, response)
            return
        headed = _latency(request) is not None  # after the head, an error is not the host's failure
        unanswered = not (headed or isinstance(exception, IgnoreRequest) or is_shortage(exception))
        why: BaseException | None = None
        try:
            if unanswered:
                why = await self._cause(request, exception)
        finally:
            with _logging_loss(request.url):
                hop.end(by_network=unanswered, unconnected=why)

    async def _cause(self, request: Request, exception: Exception) -> BaseException:
        """Return why a request failed. Twisted gives no details if it could not resolve the name:
        resolve it again, to see whether the name server responds."""
        gate = self._crawl.gate
        chain = exception, exception.__cause__
        about_its_name = any(isinstance(one, DNSLookupError) for one in chain)
        if about_its_name and by_system(exception) is None and isinstance(gate, Gatekeeper):
            try:
                async with asyncio.timeout(_LOOK_UP_SECONDS):
                    await self._names.addresses(gate, urls.parse(request.url).host, 0)
            except OSError as error:
                return error
        return exception

    def _give_back(self, request: Request) -> None:
        """Give back the lease, which was not used. The request itself is done when Scrapy has
        dropped it."""
        turn = self._crawl.turns.get(request)
        if turn is not None:
            with suppress(StorageError):
                turn.lease.give_back()


@contextmanager
def _logging_loss(url: str) -> Iterator[None]:
    """Log that a report could not be stored: Scrapy takes no error for it."""
    try:
        yield
    except StorageError as error:
        _log.error("what came of %s could not be kept: %s", url, error)


def _latency(request: Request) -> float | None:
    """Return the seconds until the response head, or None if it has not arrived."""
    latency = request.meta.get("download_latency")
    return latency if isinstance(latency, float) else None


class _Fields:
    """The header of a response, as a mapping of texts."""

    def __init__(self, response: Response) -> None:
        self._headers = response.headers
        self.get = partial(_field, response)

    def __iter__(self) -> Iterator[str]:
        return (name.decode("latin-1") for name in self._headers)

    def getall(self, name: str, default: object = ()) -> list[str]:
        """Return the value of each line of a field."""
        return [value.decode("latin-1") for value in self._headers.getlist(name)]


def _field(message: Request | Response, name: str) -> str | None:
    value = message.headers.get(name)
    return None if value is None else value.decode("latin-1")
