"""The crawl: URLs in, each asked for in its host's turn, an entry out for every one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
from aiohttp import hdrs
from yarl import URL

from gatekeeper import urls
from gatekeeper.cli.crawl.bodies import Body
from gatekeeper.cli.crawl.hosts import Hosts
from gatekeeper.cli.crawl.limits import Limits
from gatekeeper.cli.crawl.manifest import Entry, Manifest, digest
from gatekeeper.cli.crawl.story import Answer, Story
from gatekeeper.cli.crawl.tally import Tally
from gatekeeper.cli.crawl.warc import Warc, WarcHead
from gatekeeper.clock import Clock, deadline, utc
from gatekeeper.decision import Decision
from gatekeeper.errors import Denied, InvalidURL
from gatekeeper.middleware import signals
from gatekeeper.robots.headers import from_headers

if TYPE_CHECKING:
    from gatekeeper.leasing import Lease
    from gatekeeper.pacing.queue import PoliteQueue, Turn

__all__ = ["Crawl", "Place"]

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_ASKED_TO_WAIT = frozenset({429, 503})
_ACCEPT = "text/html, application/xhtml+xml, */*;q=0.8"


@dataclass(frozen=True, slots=True)
class Place:
    """Where results are put; any part may be missing."""

    manifest: Manifest | None = None
    folder: Path | None = None
    warc: Warc | None = None


class Crawl:
    """One crawl over one polite session.

    Redirects are followed as requests of their own: each hop is decided by the file of the
    host that it leads to, and takes that host's turn. No page is asked for twice.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        make_queue: Callable[[Callable[[Decision], object]], PoliteQueue],
        *,
        clock: Clock,
        limits: Limits,
        place: Place,
        on_entry: Callable[[Entry], object],
    ) -> None:
        self.tally = Tally()
        self.hosts = Hosts()
        self.queue = make_queue(self._on_denied)
        self._session = session
        self._clock = clock
        self._limits = limits
        self._place = place
        self._on_entry = on_entry
        self._seen: set[bytes] = set()
        # Only URLs that were redirected or failed once; the others are what they are called.
        self._stories: dict[str, list[Story]] = {}
        self._again: deque[str] = deque()
        self._more = asyncio.Event()
        self._calm = asyncio.Event()
        self._calm.set()
        self._stop = asyncio.Event()
        self._busy: set[asyncio.Task[Any] | None] = set()
        self._writing = asyncio.Lock()

    def stop(self) -> None:
        """Take no more turns; let what runs come to its end. Idempotent."""
        self._stop.set()

    async def run(self, source: AsyncIterator[str]) -> None:
        """Return when every URL has its entry, or soon after `stop`."""
        async with self.queue, asyncio.TaskGroup() as group:
            feeders = [group.create_task(self._feed(source)), group.create_task(self._feed_again())]
            workers = [group.create_task(self._work()) for _ in range(self._limits.concurrency)]
            await self._stop.wait()
            for feeder in feeders:
                feeder.cancel()
            for worker in workers:
                if worker not in self._busy:
                    worker.cancel()
            await self._wind_up(workers)

    async def _wind_up(self, workers: list[asyncio.Task[None]]) -> None:
        try:
            async with deadline(self._clock, self._limits.grace):
                await asyncio.wait(workers)
        except TimeoutError:
            for worker in workers:
                worker.cancel()

    # -- taking URLs in

    async def _feed(self, source: AsyncIterator[str]) -> None:
        async for raw in source:
            url = self._take(raw)
            if url is not None:
                # What is under way goes first, so that it never piles up.
                await self._calm.wait()
                self.hosts.add(url)
                await self.queue.put(url)
        self.tally.complete = True
        self._stop_if_done()

    async def _feed_again(self) -> None:
        """Redirects and second tries; workers that put would wait for themselves."""
        while True:
            await self._more.wait()
            while self._again:
                url = self._again.popleft()
                self.hosts.add(url)
                await self.queue.put(url, priority=1)
            self._more.clear()
            self._calm.set()

    def _stop_if_done(self) -> None:
        if self.tally.complete and self.tally.done == self.tally.total:
            self.stop()

    def _take(self, raw: str) -> str | None:
        """The URL to put into the queue, counted; None for one that needs no asking."""
        try:
            target = urls.parse(raw)
        except InvalidURL as error:
            self.tally.total += 1
            self._fail(Story(error.url), f"no URL to fetch: {error.problem}")
            return None
        if self._known(target.url):
            self.tally.skipped += 1
            return None
        self._seen.add(digest(target.url))
        self.tally.total += 1
        if target.userinfo or "@" in target.path:
            # The guard has to see the credentials, and a decision shows them masked.
            self._stories.setdefault(_shown(raw), []).append(Story(target.url))
            return raw
        return target.url

    def _known(self, url: str) -> bool:
        """Whether it was taken in already, by this run or, to its end, by an earlier one."""
        manifest = self._place.manifest
        return digest(url) in self._seen or (manifest is not None and manifest.done(url))

    def _go_on(self, url: str, story: Story) -> None:
        self._stories.setdefault(_shown(url), []).append(story)
        self._again.append(url)
        self._calm.clear()
        self._more.set()

    def _story(self, shown: str) -> Story:
        """The story so far of a URL that comes out of the queue."""
        stories = self._stories.get(shown)
        if stories is None:
            return Story(shown)
        story = stories.pop(0)
        if not stories:
            del self._stories[shown]
        return story

    # -- asking

    async def _work(self) -> None:
        task = asyncio.current_task()
        while not self._stop.is_set():
            turn = await self.queue.get()
            # No await since the turn was had, so nobody cancels this task as an idle one.
            self._busy.add(task)
            self.tally.in_flight += 1
            try:
                await self._ask(turn)
            finally:
                self.tally.in_flight -= 1
                self._busy.discard(task)

    async def _ask(self, turn: Turn) -> None:
        """One request, in its turn, and what follows from it."""
        url = turn.url
        self.hosts.drop(url)
        story = self._story(_shown(url))
        spool = self._place.warc is not None
        limit = self._limits.max_body
        with Body(story.last, self._place.folder, limit=limit, spool=spool) as body:
            try:
                async with turn as lease:
                    answer = await self._exchange(lease, body)
                    decision = lease.decision
            except Denied as error:  # the file changed between the turn and the request
                self._finish(story.denied(error.decision, self._now()))
            except (aiohttp.ClientError, OSError) as error:
                self._settle_failure(url, story, error)
            else:
                await self._settle(url, story, answer, decision, body)

    async def _settle(
        self, url: str, story: Story, answer: Answer, decision: Decision, body: Body
    ) -> None:
        """Follow it, ask again, or store it."""
        if answer.location is not None:
            self._follow(url, story, answer, decision)
        elif answer.status in _ASKED_TO_WAIT and story.tries < self._limits.tries:
            self._go_on(url, story.tried_again())  # in a turn after the block
        else:
            self._finish(await self._store(story, answer, decision, body))

    async def _exchange(self, lease: Lease, body: Body) -> Answer:
        """Send, take the head, and take the body if it will be stored."""
        headers = {hdrs.ACCEPT: _ACCEPT}
        if self._place.warc is not None:
            headers[hdrs.ACCEPT_ENCODING] = "identity"
        started, at = self._clock.monotonic(), utc(self._clock.wall())
        request = self._session.get(
            URL(lease.url, encoded=True),
            headers=headers,
            allow_redirects=False,
            middlewares=(_Once(),),
        )
        async with request as response:
            elapsed = self._clock.monotonic() - started
            location = response.headers.get(hdrs.LOCATION)
            if response.status not in _REDIRECTS:
                location = None
            head = WarcHead(response, at) if self._place.warc is not None else None
            if location is None:
                await body.receive(response.content)
            if location is not None or body.truncated:
                response.close()  # the rest is not wanted
            return Answer(
                status=response.status,
                headers=response.headers,
                at=at,
                elapsed=elapsed,
                took=self._clock.monotonic() - started,
                location=location,
                signals=_said(response),
                warc=head,
            )

    def _follow(self, url: str, story: Story, answer: Answer, decision: Decision) -> None:
        """Put where the redirect leads into the queue, or say why not."""
        if len(story.redirects) >= self._limits.redirects:
            self._fail(story, f"more than {self._limits.redirects} redirects")
            return
        try:
            target = urls.join(urls.parse(url), answer.location or "").url
        except InvalidURL as error:
            self._fail(story, f"redirected to no URL: {error.problem}")
            return
        if story.passed(target):
            self._fail(story, f"redirected in a circle, back to {target}")
            return
        story = story.redirected(answer.status, target)
        if self._known(target):
            # The end of another URL too: that one's entry has the page, or will have it.
            self._finish(story.fetched(answer, decision))
            return
        self._seen.add(digest(target))
        self._go_on(target, story)

    def _settle_failure(self, url: str, story: Story, error: Exception) -> None:
        """Try again in a later turn, or give up."""
        if story.tries < self._limits.tries:
            self._go_on(url, story.tried_again())
        else:
            self._fail(story, f"{type(error).__name__}: {error}".rstrip(": "))

    async def _store(self, story: Story, answer: Answer, decision: Decision, body: Body) -> Entry:
        """WARC first, then the file, then the line that vouches for both."""
        place = None
        if self._place.warc is not None and answer.warc is not None:
            async with self._writing:
                place = await asyncio.to_thread(
                    self._place.warc.write,
                    answer.warc,
                    body.open(),
                    size=body.size,
                    truncated=body.truncated,
                )
        kind = answer.headers.get(hdrs.CONTENT_TYPE, "").partition(";")[0].strip().lower()
        encoding = answer.headers.get(hdrs.CONTENT_ENCODING) if self._place.warc else None
        return story.fetched(
            answer,
            decision,
            size=body.size,
            sha256=body.sha256,
            truncated=body.truncated,
            content_type=kind or None,
            content_encoding=encoding,
            file=body.keep(kind),
            warc=place,
        )

    # -- entries

    def _on_denied(self, decision: Decision) -> None:
        story = self._story(decision.url)
        self.hosts.drop(story.last)
        self._finish(story.denied(decision, self._now()))

    def _fail(self, story: Story, error: str) -> None:
        self._finish(story.failed(error, self._now()))

    def _now(self) -> datetime:
        return utc(self._clock.wall())

    def _finish(self, entry: Entry) -> None:
        if self._place.manifest is not None:
            self._place.manifest.write(entry)
        self.tally.add(entry)
        self._on_entry(entry)
        self._stop_if_done()


_SILENT = from_headers({}, "")


def _said(response: aiohttp.ClientResponse) -> dict[str, Any] | None:
    """What its header says about the use of the page; None where it says nothing."""
    found = signals(response)
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


def _shown(url: str) -> str:
    """The URL as a decision about it shows it."""
    return urls.mask(url) if "@" in url else url
