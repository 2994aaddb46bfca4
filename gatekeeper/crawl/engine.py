"""The crawl: request each given URL when its host is due, and produce one entry for each."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from contextvars import Context
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import aiohttp
import msgspec
from aiohttp import hdrs
from msgspec.structs import replace
from yarl import URL

from gatekeeper import urls
from gatekeeper.clock import Clock, SingleTimer, deadline, utc
from gatekeeper.crawl.manifest import Entry, Folder, Manifest, RedirectChains, Result, WarcPlace
from gatekeeper.crawl.output import (
    DESCRIPTOR_PAUSE,
    DESCRIPTOR_WAIT,
    Body,
    RobotsTexts,
    Warc,
    about_page,
    patiently,
    tell_shortage,
)
from gatekeeper.crawl.progress import (
    Holdup,
    HoldupReporter,
    Progress,
    Speedometer,
    Tally,
    WaitingHosts,
)
from gatekeeper.crawl.sources import GivenURL, Job
from gatekeeper.decision import Decision
from gatekeeper.descriptors import describe_shortage, is_shortage
from gatekeeper.errors import Deferred, Denied, GatekeeperError, InvalidURL, StorageError
from gatekeeper.fetching.fetcher import send_once
from gatekeeper.fetching.guard import connecting
from gatekeeper.fetching.limits import within_open_files
from gatekeeper.http_fields import REDIRECTS, unreadable
from gatekeeper.page_rules import PAGE_FIELDS, html_in, page_signals
from gatekeeper.queue.polite import PoliteQueue, Turn
from gatekeeper.session.middleware import signals
from gatekeeper.session.polite import session_gate
from gatekeeper.terminal import json_text

if TYPE_CHECKING:
    from gatekeeper.gate.lease import Lease


# --- one URL and its response ----------------------------------------------------------------


class Answer(msgspec.Struct, frozen=True):
    """A response, and the details to store with its body."""

    response: aiohttp.ClientResponse
    decision: Decision
    """The decision of the lease that the request was sent under."""
    at: datetime
    location: str | None
    told: dict[str, Any]
    """What the entry of a fetched URL says about the response."""
    audit: tuple[str, int] | None = None
    """The chain and the number of the lease's line in the audit record."""


class Attempt(msgspec.Struct, frozen=True):
    """A given URL with its redirects and the number of tries."""

    url: str
    redirects: tuple[tuple[int, str], ...] = ()
    tries: int = 1

    @property
    def last(self) -> str:
        """The URL to request now."""
        return self.redirects[-1][1] if self.redirects else self.url

    def passed(self, url: str) -> bool:
        """Return True if the URL is already part of this redirect chain."""
        return url in (self.url, *(hop for _, hop in self.redirects))

    def fetched(self, answer: Answer, **stored: Any) -> Entry:
        """Return the entry of a fetched URL; `stored` describes its body."""
        return self.entry(Result.FETCHED, answer.at, **answer.told, **stored)

    def entry(self, outcome: Result, at: datetime, **more: Any) -> Entry:
        """Return the entry of the given URL with this outcome."""
        return Entry(
            url=self.url,
            outcome=outcome,
            at=at,
            final_url=self.last if self.redirects else None,
            redirects=self.redirects,
            tries=self.tries,
            **more,
        )


# --- one request -----------------------------------------------------------------------------


_log = logging.getLogger(__name__)

_NO_SIGNALS = page_signals({}, "")


def _signals_of(response: aiohttp.ClientResponse, start: bytes) -> dict[str, Any] | None:
    """Return what header and page say about the use of the page; None if nothing."""
    headers = response.headers
    html = b"" if response.status in REDIRECTS else html_in(headers.get(hdrs.CONTENT_TYPE), start)
    silent = response.status != 402 and PAGE_FIELDS.isdisjoint(map(str.lower, headers))
    if silent and not html:
        return None
    try:
        page = signals(response, html=html)
    except Exception:  # noqa: BLE001 - an error of one URL must not end the crawl
        # The page is stored even if its signals can't be read.
        _log.exception("%s: its signals can't be read", urls.mask(str(response.url), query=False))
        return None
    if page == _NO_SIGNALS:
        return None
    plain: dict[str, Any] = msgspec.to_builtins(page)
    return plain


# --- the crawl -------------------------------------------------------------------------------


_RETRY_STATUSES = frozenset({429, 503})
MAX_QUEUED = 1_000_000
"""URLs that wait in the queue at most, apart from redirects and retries of those in flight."""
_BEFORE_OTHERS = 1
"""Priority of a redirect's target, whose URL has had a lease."""
_AFTER_OTHERS = -1
"""Priority of a URL that failed, or was tried by an earlier run: it may well fail again, and what
holds its host up must not keep the URLs from coming that were never tried."""
_SLOW_CONNECT = 0.25
"""Seconds of connecting after which another worker is started in place of the one that waits."""
_SPARES_EACH = 19
"""Maximum of such additional workers for each regular one."""


class Outputs(NamedTuple):
    """Where results are stored; any part may be None."""

    manifest: Manifest | None = None
    folder: Folder | None = None
    warc: Warc | None = None


class Crawl:
    """One crawl over one polite session.

    Redirects are followed as separate requests: each hop is decided by the robots.txt of the host
    that it leads to, and is paced with that host. No page is requested twice.
    """

    def __init__(
        self,
        job: Job,
        session: aiohttp.ClientSession,
        outputs: Outputs,
        clock: Clock,
        progress: Progress,
    ) -> None:
        gate = session_gate(session)
        self._job, self._progress = job, progress
        self._holdups, self._speed = HoldupReporter(progress.say), Speedometer()
        self.tally: Tally = Tally()
        self.hosts: WaitingHosts = WaitingHosts()
        self.queue: PoliteQueue = PoliteQueue(
            gate, on_denied=self._on_denied, on_deferred=self._on_deferred
        )
        self._session = session
        self._gate = gate
        self._clock = clock
        self._manifest, self._folder, self._warc = outputs
        self.stopped_by: str | None = None
        """Why the crawl ended early: the word that was passed to `stop`."""
        self._chains = RedirectChains(job.redirects)
        # Only URLs that were redirected or tried before; the attempt of any other URL is the URL.
        self._attempts: dict[str, list[Attempt]] = {}
        self._queue_shrunk = asyncio.Event()
        self._stop = asyncio.Event()
        # The URL that each busy worker is fetching.
        self._in_progress: dict[asyncio.Task[Any] | None, str] = {}
        # Hosts that do not accept connections must not occupy the workers of those that answer, so
        # additional workers are started while requests connect slowly.
        self._workers: set[asyncio.Task[Any]] = set()
        self._slow: set[asyncio.Task[Any]] = set()
        """Workers whose requests are slow to connect."""
        self._most = within_open_files(job.concurrency * (1 + _SPARES_EACH))
        """Workers at most, the additional ones included."""
        self._warc_lock = asyncio.Lock()
        self._parts = gate.parts
        self._robots = RobotsTexts(self._on_many_robots)
        self._short_since: float | None = None
        """Since when requests have failed for want of a file descriptor, and none succeeded."""

    @property
    def in_flight(self) -> list[str]:
        """The URLs that are being fetched now."""
        return list(self._in_progress.values())

    def stop(self, reason: str | None = None) -> None:
        """Start no more requests; let running ones finish. Idempotent: the first call counts."""
        if not self._stop.is_set():
            self.stopped_by = reason
            self._stop.set()

    async def run(self, source: AsyncIterator[GivenURL]) -> None:
        """Crawl until every URL has its entry, or until shortly after `stop`."""
        if self._warc is not None:
            self._parts.followers.append(self._robots)
        async with self.queue, asyncio.TaskGroup() as self._group:
            feeder = self._group.create_task(self._feed(source))
            self._adjust_workers()
            await self._stop.wait()
            feeder.cancel()
            for worker in self._idle:
                worker.cancel()
            if self._workers:
                with suppress(TimeoutError):
                    async with deadline(self._clock, self._job.grace):
                        await asyncio.wait(self._workers)
            for worker in self._workers:
                worker.cancel()
        await self._write_robots()

    @property
    def _idle(self) -> set[asyncio.Task[Any]]:
        """The workers that wait for a lease."""
        return self._workers - self._in_progress.keys()

    @property
    def _too_many(self) -> int:
        """How many workers there are too many; below 0: too few."""
        return len(self._workers) - min(self._job.concurrency + len(self._slow), self._most)

    def _adjust_workers(self) -> None:
        """Start or end workers after a connection became slow or was made. One that has a request
        ends after it."""
        while self._too_many < 0 and not self._stop.is_set():
            # An empty context: an additional worker must not look like a child of the worker that
            # started it, which would seem to wait for its parent's lease.
            worker = self._group.create_task(self._work(), context=Context())
            self._workers.add(worker)
            worker.add_done_callback(self._workers.discard)
        if self._too_many > 0 and (idle := self._idle):
            worker = idle.pop()
            self._workers.discard(worker)
            worker.cancel()

    def _watch_connecting(self, worker: asyncio.Task[Any]) -> Callable[[bool], None]:
        """Return what the guarded connector calls at the start and the end of a worker's
        connecting: while that takes long, another worker is started in place of this one."""

        def is_slow() -> None:
            self._slow.add(worker)
            self._adjust_workers()

        timer = SingleTimer(self._clock, is_slow)

        def changed(starts: bool) -> None:
            timer.set(self._clock.monotonic() + _SLOW_CONNECT if starts else math.inf)
            if not starts and worker in self._slow:
                self._slow.discard(worker)
                self._adjust_workers()

        return changed

    # -- reading URLs

    async def _feed(self, source: AsyncIterator[GivenURL]) -> None:
        async for given in source:
            if (accepted := self._accept(given)) is not None:
                # Redirects and retries do not wait: a worker that waited would make no room.
                while self.queue.qsize() >= MAX_QUEUED:
                    self._queue_shrunk.clear()
                    await self._queue_shrunk.wait()
                url, origin = accepted
                self.hosts[origin] += 1
                tried = self._manifest is not None and self._manifest.tried(url)
                self.queue.put_nowait(url, priority=_AFTER_OTHERS if tried else 0)
        self.tally.complete = True
        self._stop_if_done()

    def _stop_if_done(self) -> None:
        if self.tally.complete and self.tally.done == self.tally.total:
            self.stop()

    def _accept(self, given: GivenURL) -> tuple[str, str] | None:
        """Count a URL, and return it with its origin for the queue; None: no need to fetch it."""
        raw = given.text
        try:
            target = urls.parse(raw)
        except Exception as error:  # noqa: BLE001 - an error of one URL must not end the crawl
            self._refuse(_invalid(raw, error), given.where)
            return None
        url = target.url
        if self._skip(url):
            return None
        self._chains.begin(url)
        self.tally.total += 1
        if target.userinfo or "@" in target.path:
            # The guard has to see the credentials, and decisions show them masked.
            self._attempts.setdefault(_masked(raw), []).append(Attempt(url))
            url = raw
        return url, target.origin

    def _refuse(self, error: InvalidURL, where: str | None) -> None:
        """Record a text that is not a URL. It is reported once, and not again by later runs."""
        if not self._skip(error.url, is_url=False):
            self._chains.begin(error.url)
            self.tally.total += 1
            self._fail(Attempt(error.url, tries=0), f"invalid URL: {error.problem}", where=where)

    def _skip(self, url: str, *, is_url: bool = True) -> bool:
        """Count a URL as skipped, and return True, if this or an earlier run has dealt with it."""
        unarchived = refused = False
        if url not in self._chains:
            if self._manifest is None or not self._manifest.done(url):
                return False
            unarchived = self._manifest.unarchived(url)
            refused = not self._manifest.fetched(url)
        self.tally.skip(unarchived=unarchived, refused=refused, is_url=is_url)
        return True

    def _requeue(self, url: str, attempt: Attempt, priority: int) -> None:
        self._attempts.setdefault(_masked(url), []).append(attempt)
        self.hosts[urls.split(url)[0]] += 1
        self.queue.put_nowait(url, priority=priority)

    async def _retry(self, url: str, attempt: Attempt) -> None:
        self._requeue(url, replace(attempt, tries=attempt.tries + 1), _AFTER_OTHERS)
        # Say which host the crawl waits for, and for how long.
        due = await self.hosts.due(urls.split(url)[0], self._gate, self._clock)
        if due.holdup is not None:
            self._holdups.report(due.origin, due.holdup, due.slowed)

    def _take_attempt(self, shown: str) -> Attempt:
        """Take the attempt so far of a URL that comes out of the queue."""
        attempts = self._attempts.get(shown)
        if attempts is None:
            return Attempt(shown)
        attempt = attempts.pop(0)
        if not attempts:
            del self._attempts[shown]
        return attempt

    # -- requests

    async def _work(self) -> None:
        task: Any = asyncio.current_task()
        connecting.set(self._watch_connecting(task))
        while not self._stop.is_set() and self._too_many <= 0:
            turn = await self.queue.get()
            self._queue_shrunk.set()
            # There is no await after the lease was taken, so this task is not cancelled as idle.
            self._in_progress[task] = turn.url
            self.tally.begun += 1
            self.tally.in_flight += 1
            try:
                await self._fetch(turn)
            finally:
                self.tally.in_flight -= 1
                del self._in_progress[task]
        self._workers.discard(task)

    async def _fetch(self, turn: Turn) -> None:
        """Send the request of one lease, and handle its outcome."""
        url = turn.url
        self.hosts.drop(turn.origin)
        attempt = self._take_attempt(_masked(url))
        if self._manifest is not None and attempt.tries == 1 and not attempt.redirects:
            self._manifest.begin(attempt.url)
        spool, limit = self._warc is not None, self._job.max_body
        # `attempt.last` is the URL that came out of the queue, without credentials.
        folder, clock = self._folder, self._clock
        with Body(attempt.last, folder, limit=limit, spool=spool, clock=clock) as body:
            try:
                async with turn as lease:
                    answer = await self.exchange(lease, body)
            except Deferred as error:  # temporary: the URL must not be recorded as denied
                await self._handle_failure(url, attempt, error)
            except Denied as error:  # robots.txt changed between the grant and the request
                self._deny(attempt, error.decision)
            except InvalidURL as error:
                self._fail(attempt, str(error))
            except (aiohttp.ClientError, OSError) as error:
                await self._handle_failure(url, attempt, error)
            except GatekeeperError:
                raise  # not caused by this URL, but by a full disk, for example
            except Exception as error:  # noqa: BLE001 - an error of one URL must not end the crawl
                self._fail(attempt, _invalid(url, error).problem)
            else:
                await self._handle_response(url, attempt, answer, body)

    async def exchange(self, lease: Lease, body: Body) -> Answer:
        """Send a request and receive the response. A redirect's body is read only for a WARC file.

        Raises aiohttp's errors if no response arrives or if the body of a page is incomplete.
        """
        clock, record, audit = self._clock, self._warc is not None, self._parts.audit
        started, at = clock.monotonic(), utc(clock.wall())
        # It is sent only once: the crawl counts and times each try, and retries by its queue.
        url = URL(lease.url, encoded=True)
        request = self._session.get(url, allow_redirects=False, middlewares=(send_once,))
        async with request as response:
            elapsed = clock.monotonic() - started
            redirects = response.status in REDIRECTS
            location = response.headers.get(hdrs.LOCATION) if redirects else None
            if location is None or record:
                try:
                    await body.receive(response.content)
                except (TimeoutError, aiohttp.ClientError) as error:
                    if location is None:
                        raise
                    # The body of a redirect is recorded as far as it arrives.
                    body.cut = "time" if isinstance(error, TimeoutError) else "disconnect"
            if body.cut or (location is not None and not record):
                response.close()  # the rest of the body is not needed
            told = {
                "status": response.status,
                "decision": lease.decision,
                "elapsed": round(elapsed, 6),
                "took": round(clock.monotonic() - started, 6),
                "signals": _signals_of(response, bytes(body.start)),
            }
            place = None if audit is None else audit.place_of(lease)
            return Answer(response, lease.decision, at, location, told, place)

    async def _handle_response(
        self, url: str, attempt: Attempt, answer: Answer, body: Body
    ) -> None:
        """Follow a redirect, retry, or store the page. The WARC file gets every response."""
        self._short_since, status = None, answer.response.status
        warc = await patiently(self._clock, partial(self._write_warc, answer, body))
        if answer.location is not None:
            self._follow(url, attempt, answer)
        elif status not in _RETRY_STATUSES:
            self._finish(await self._stored_entry(attempt, answer, body, warc))
        elif attempt.tries < self._job.tries:
            await self._retry(url, attempt)
        else:
            error = f"answered {status}, try {attempt.tries} of {self._job.tries}"
            self._fail(attempt, error, answer.at, status=status, warc=warc)

    def _follow(self, url: str, attempt: Attempt, answer: Answer) -> None:
        """Queue the target of a redirect, or finish the URL if it can't be followed."""
        if len(attempt.redirects) >= self._job.redirects:
            self._fail(attempt, f"more than {self._job.redirects} redirects")
            return
        try:
            destination = urls.join(urls.parse(url), answer.location or "")
        except Exception as error:  # noqa: BLE001 - an error of one URL must not end the crawl
            invalid = _invalid(answer.location or "", error)
            self._fail(attempt, f"redirected to an invalid URL: {invalid.problem}")
            return
        if destination.userinfo:  # credentials in URLs are refused everywhere, and never sent (T1)
            self._fail(attempt, f"redirected to {destination.origin} with credentials in the URL")
            return
        target = destination.url
        if attempt.passed(target):
            self._fail(attempt, f"redirect loop, back to {target}")
            return
        start, hop = attempt, (answer.response.status, target)
        attempt = replace(start, redirects=(*start.redirects, hop))
        outcome = self._chains.outcome(target)
        known = self._manifest is not None and self._manifest.fetched(target)
        if outcome is Result.FETCHED or known:
            self._finish(attempt.fetched(answer))
        elif outcome is Result.FAILED:
            self._fail(attempt, "failed before")
        elif outcome is None and target in self._chains:
            problem = self._chains.follow(attempt.fetched(answer))
            if problem is not None:
                self._fail(start, problem)
        else:  # new, or denied before: then robots.txt decides again, in this URL's name
            self._chains.extend(attempt.url, target)
            self._requeue(target, attempt, _BEFORE_OTHERS)

    async def _handle_failure(self, url: str, attempt: Attempt, error: Exception) -> None:
        """Retry under a later lease, or give up."""
        if is_shortage(error):  # nothing was sent
            await self._pause_for_descriptors()
            self._requeue(url, attempt, _BEFORE_OTHERS)
        elif attempt.tries < self._job.tries:
            await self._retry(url, attempt)
        elif isinstance(error, aiohttp.ClientResponseError):  # its status is aiohttp's invention
            self._fail(attempt, unreadable(error.message))
        else:
            self._fail(attempt, f"{type(error).__name__}: {error}".rstrip(": "))

    async def _pause_for_descriptors(self) -> None:
        """Raises StorageError once no request had a file descriptor for long."""
        now = self._clock.monotonic()
        self._short_since = now if self._short_since is None else self._short_since
        if now == self._short_since:
            tell_shortage()
        if now - self._short_since >= DESCRIPTOR_WAIT:
            raise StorageError(describe_shortage())
        await self._clock.sleep(DESCRIPTOR_PAUSE)

    async def _write_warc(self, answer: Answer, body: Body) -> WarcPlace | None:
        """Append the response to the WARC file, if there is one."""
        if (warc := self._warc) is None:
            return None
        record = self._parts.directory.recall(answer.decision.origin)
        digest = None if record is None else self._robots.learnt(record)
        about = about_page(answer.decision, digest, answer.audit)
        write = partial(warc.write, answer.response, answer.at, body, about)
        place: WarcPlace = await self._in_archive(write)
        await self._write_robots()
        return place

    def _on_many_robots(self) -> None:
        """Write them now: no page may follow, if all are refused."""
        if not self._stop.is_set():
            self._group.create_task(self._write_robots())

    async def _write_robots(self) -> None:
        """Append the robots.txt files that have come to the WARC file."""
        if self._warc is not None and (texts := self._robots.take()):
            await self._in_archive(partial(self._warc.write_robots, texts))

    async def _in_archive(self, write: Callable[[], Any]) -> Any:
        """Call a method of the WARC file in a thread, one at a time."""
        async with self._warc_lock:
            writing = asyncio.ensure_future(asyncio.to_thread(write))
            cancelled = None
            while not writing.done():
                try:
                    await asyncio.wait([writing])
                except asyncio.CancelledError as error:
                    # The thread goes on: neither the file nor the body may be closed until it ends.
                    cancelled = error
            if cancelled is not None:
                raise cancelled
            return writing.result()

    async def _stored_entry(
        self, attempt: Attempt, answer: Answer, body: Body, warc: WarcPlace | None
    ) -> Entry:
        """Store the body, then return its entry; the WARC file has the response already."""
        headers = answer.response.headers
        kind = headers.get(hdrs.CONTENT_TYPE, "").partition(";")[0].strip().lower()
        encoding = headers.get(hdrs.CONTENT_ENCODING) if self._warc else None
        return attempt.fetched(
            answer,
            size=body.size,
            sha256=body.sha256,
            truncated=body.cut is not None,
            content_type=kind or None,
            content_encoding=encoding,
            file=await patiently(self._clock, partial(body.keep, kind)),
            warc=warc,
        )

    # -- entries

    def _on_deferred(self, decision: Decision) -> None:
        self._holdups.report(decision.origin, Holdup.of(decision))

    def _on_denied(self, decision: Decision) -> None:
        self._queue_shrunk.set()
        attempt = self._take_attempt(decision.url)
        self.hosts.drop(urls.split(attempt.last)[0])
        self._deny(attempt, decision)

    def _deny(self, attempt: Attempt, decision: Decision) -> None:
        at = utc(self._clock.wall())
        self._finish(attempt.entry(Result.DENIED, at, decision=decision))

    def _fail(self, attempt: Attempt, error: str, at: datetime | None = None, **more: Any) -> None:
        at = at or utc(self._clock.wall())
        self._finish(attempt.entry(Result.FAILED, at, error=error, **more))

    def _finish(self, entry: Entry) -> None:
        """Record an entry, then the entries that waited for it.

        In this order, since a crawl that is killed in between would otherwise resume as if the
        page had been fetched.
        """
        ended = [entry]
        for each in ended:  # the list grows during the loop
            if self._manifest is not None:
                self._manifest.write(each)
            self.tally.add(each)
            if self._job.as_json:
                print(json_text(each), flush=True)
            self._progress.entry(each)
            ended += self._chains.end(each)
        self._stop_if_done()


def _invalid(url: str, error: Exception) -> InvalidURL:
    """Return an error as one of its URL, so that the crawl goes on. Log an unexpected one."""
    if isinstance(error, InvalidURL):
        return error
    _log.error("%s: internal error", urls.mask(url, query=False), exc_info=error)
    return InvalidURL(urls.mask(url), f"internal error of gatekeeper ({type(error).__name__})")


def _masked(url: str) -> str:
    """Return the URL as a decision shows it."""
    return urls.without_userinfo(url) if "@" in url else url
