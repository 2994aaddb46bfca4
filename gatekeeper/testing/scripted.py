"""Tools for testing crawlers that use gatekeeper: a gate without a network, virtual time, a judge.

    ScriptedGate     a `Gatekeeper` whose robots.txt files are set by the test
    drive            awaits something while a VirtualClock advances by itself: hours take no time
    virtual_clock    the clock as a pytest fixture, `scripted_gate` the gate: import them into your
                     conftest.py
    judge            lists the requests of a server's log that break the rules of its sites

The judge shares no code with the rest of the package: no parser, no clock, no scheduler. A site
declares its `Manners`; the log has when each request arrived, when and how it was answered, and
when it ended. `judge` lists every breach:

    early    less than the interval after the start or the response head of an earlier request
    crowd    while the host had its limit of requests in flight
    block    before the end of the block that a 429 or 503 began
    window   outside the hours in which the site accepts visitors
    denied   for a path that robots.txt disallows
    unasked  before the robots.txt of its origin was answered, by a file or by its absence
    hop      one of the last three, by a request that a redirect led to

A request counts from its arrival, which is what a site sees: the visitor's time for name
resolution and connecting is not judged.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol, TypeVar
from urllib.parse import urljoin, urlsplit

import aiohttp
import msgspec

from gatekeeper import urls
from gatekeeper.config import FetchConfig
from gatekeeper.errors import needs_extra
from gatekeeper.fetching.outcomes import (
    Outcome,
    Retrieval,
    Validators,
    classify_body,
    classify_error,
    classify_head,
)
from gatekeeper.gate import Gatekeeper
from gatekeeper.testing.virtual_clock import VirtualClock

with needs_extra("testing", "gatekeeper.testing"):
    import pytest

__all__ = ["Breach", "Manners", "ScriptedGate", "ScriptedRobots", "Seen", "answers", "drive"]
__all__ += ["judge", "scripted_gate", "virtual_clock"]

_T = TypeVar("_T")


class ScriptedRobots(msgspec.Struct, eq=False):
    """The robots.txt files of a `ScriptedGate`, which uses no network."""

    asked: list[str] = []
    """Origins whose robots.txt was fetched, in order."""
    _said: dict[str, str | bytes | int | BaseException] = {}

    def say(self, url: str, robots: str | bytes | int | BaseException) -> None:
        """Set the robots.txt of the URL's origin: a text, the status that it is answered with, or
        the error that fetching it meets, such as TimeoutError()."""
        self._said[urls.parse(url).origin] = robots

    async def fetch(self, origin: str, validators: Validators | None = None) -> Retrieval:
        """Return what was set for the origin; without that there is no file (404)."""
        self.asked.append(origin)
        said = self._said.get(origin, 404)
        if isinstance(said, BaseException):
            return Retrieval(outcome=classify_error(said))
        if isinstance(said, int):
            outcome = classify_head(said, config=FetchConfig())
            if outcome is Outcome.REDIRECT:
                outcome = Outcome.BAD_REDIRECT  # there is no Location
            return Retrieval(outcome=outcome, status=said)
        body = said.encode() if isinstance(said, str) else said
        outcome = classify_body(Outcome.RULES, body, truncated=False)
        return Retrieval(outcome=outcome, status=200, body=body)

    async def reach(self, origin: str) -> bool | None:
        """Return None: it is unknown whether the origin can be reached."""
        return None

    def adjust(self, pacing: object) -> None:
        """Do nothing: there are no settings."""

    def close(self) -> None:
        """Do nothing: there are no timers."""


class ScriptedGate(Gatekeeper):
    """A gate for tests: a real `Gatekeeper` whose robots.txt files are set by the test.

    Decisions, leases and clocks are real; with a VirtualClock nothing takes real time. `say` sets a
    file, or how fetching it fails. A file that was fetched is cached for as long as a real one;
    `await gate.refresh(origin)` fetches it again.

    >>> async def main() -> bool:
    ...     async with ScriptedGate() as gate:
    ...         gate.say("https://example.org", "User-agent: *\\nDisallow: /private\\n")
    ...         return await gate.allowed("https://example.org/private")
    >>> asyncio.run(main())
    False
    """

    def __init__(self, user_agent: str = "testbot/1.0", **options: Any) -> None:
        """`options` are those of `Gatekeeper`, such as `config` and `clock`."""
        super().__init__(user_agent, **options)
        self.robots_files: ScriptedRobots = ScriptedRobots()
        """The files that were set, and the origins that were fetched."""

    def say(self, url: str, robots: str | bytes | int | BaseException) -> None:
        """Set the robots.txt of the URL's origin: a text, the status that it is answered with, or
        the error that fetching it meets, such as TimeoutError()."""
        self.robots_files.say(url, robots)

    def _make_fetcher(self, session: aiohttp.ClientSession) -> Any:
        return self.robots_files


async def drive(clock: VirtualClock, work: Awaitable[_T], *, limit: float = 86_400.0) -> _T:
    """Await `work` while the clock advances by itself, timer by timer, whenever all tasks wait.

    For work that uses no network and no thread. Raises AssertionError if it is not done within
    `limit` virtual seconds, or if it waits and no timer is set.

    >>> async def main() -> float:
    ...     clock = VirtualClock()
    ...     await drive(clock, clock.sleep(3600.0))
    ...     return clock.monotonic()
    >>> asyncio.run(main())
    3600.0
    """
    task = asyncio.ensure_future(work)
    end = clock.monotonic() + limit
    try:
        while True:
            await clock.settle()
            if task.done():
                return task.result()
            when = clock.next_timer()
            if when is None:
                raise AssertionError("it waits for nothing that time brings")
            if when > end:
                raise AssertionError(f"not done within {limit:g} virtual seconds")
            clock.advance(max(0.0, when - clock.monotonic()))
    finally:
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@pytest.fixture(name="virtual_clock")
def virtual_clock() -> VirtualClock:
    """A fresh VirtualClock, as a pytest fixture."""
    return VirtualClock()


@pytest.fixture(name="scripted_gate")
async def scripted_gate(virtual_clock: VirtualClock) -> AsyncIterator[ScriptedGate]:
    """An open ScriptedGate on `virtual_clock`, as a pytest fixture (pytest-asyncio, auto mode)."""
    async with ScriptedGate(clock=virtual_clock) as gate:
        yield gate


# --- the judge ------------------------------------------------------------------------------

_FILE = frozenset({"/robots.txt"})
EPSILON = 1e-6
"""Tolerance in seconds, for rounding errors of sums of floats."""
NO_FILE = frozenset(range(400, 500)) - {408, 421, 425, 429}
"""Statuses that mean: there is no robots.txt."""
UNSAID = 60.0
"""Seconds of the block that a 429 or 503 without Retry-After begins."""

Hours = tuple[str, str]
"""From "HHMM" to the end of the minute "HHMM", UTC."""


@dataclass(frozen=True, slots=True)
class Manners:
    """The rules of one origin for its visitors, which its robots.txt declares."""

    delay: float | None = None
    """Crawl-delay in seconds."""
    rates: tuple[tuple[int, int, Hours | None], ...] = ()
    """Request-rates: documents, seconds, and the hours in which the rate is in force (None: outside
    the hours of all others)."""
    visits: tuple[Hours, ...] = ()
    """Visit-times; empty: at any time."""
    denied: tuple[str, ...] = ()
    """Prefixes of disallowed paths."""
    default: float = 1.0
    """Seconds between requests if the file has no rate, or was not read yet."""
    limit: int = 1
    """The most requests in flight at the same time."""

    def text(self) -> str:
        """Return the robots.txt that declares these rules."""
        lines = ["User-agent: *"]
        lines += [] if self.delay is None else [f"Crawl-delay: {self.delay:g}"]
        for documents, seconds, hours in self.rates:
            lines.append(f"Request-rate: {documents}/{seconds}s" + (_hours(hours) if hours else ""))
        lines += [f"Visit-time:{_hours(hours)}" for hours in self.visits]
        lines += [f"Disallow: {path}" for path in self.denied]
        return "\n".join((*lines, "Allow: /")) + "\n"

    def interval(self, wall: float) -> float:
        """Return the interval in seconds that the file asks for at that wall time."""
        held = [s / n for n, s, hours in self.rates if hours and _within(hours, wall)]
        wishes = held or [s / n for n, s, hours in self.rates if hours is None]
        wishes += [] if self.delay is None else [self.delay]
        return max(wishes, default=self.default)

    def open(self, wall: float) -> bool:
        """Return True if visitors are accepted at that wall time."""
        return not self.visits or any(_within(hours, wall) for hours in self.visits)


class Seen(Protocol):
    """A request in a server's log; times are seconds of one clock."""

    at: float
    """When it arrived."""
    scheme: str
    host: str
    """The Host field: with the port, unless that is the scheme's default."""
    target: str
    """Path and query."""
    answered: float | None
    """When the head of the response was sent; None if there was none."""
    ended: float | None
    """When the last byte was sent; None if it did not end."""

    @property
    def status(self) -> int | None:
        """The status of the response; None if there was none."""

    def answer_header(self, name: str) -> str | None:
        """Return a header field of the response; None if it has no such field."""


@dataclass(frozen=True, slots=True)
class Breach:
    """One rule broken by one request."""

    kind: str
    """early, crowd, block, window, denied, unasked or hop; see the module's docstring."""
    url: str
    """The URL that was requested."""
    at: float
    """When, in seconds of the log."""
    detail: str
    """What happened, in words."""

    def __str__(self) -> str:
        return f"{self.at:.3f} {self.kind}: {self.url}: {self.detail}"


def judge(log: Iterable[Seen], manners: Mapping[str, Manners], *, wall: float) -> list[Breach]:
    """Return every breach in the log, in its order.

    `manners` are by origin, such as "http://a.test"; `wall` is the wall time at the log's second 0.
    """
    requests = sorted(log, key=lambda request: request.at)
    answered = answers(requests)
    files, led = _redirects(requests)
    # URLs with a redirect in any response: the response of the judged request may be lost.
    elsewhere = {_url(request) for request in requests if 300 <= (request.status or 0) < 400}
    breaches: list[Breach] = []
    hosts: defaultdict[str, list[Seen]] = defaultdict(list)
    for request in requests:
        origin = _origin(request)
        asked = manners.get(origin, Manners())
        moment = answered.get(origin, float("inf"))
        of_robots = _url(request) in files
        # The request that fetches the file can't know its content.
        known = moment < request.at or (moment == request.at and not of_robots)
        before = hosts[request.host.partition(":")[0]]
        # The log can't show whether an earlier fetch of a redirected file had been completed.
        paced = known and not (of_robots and _url(request) in elsewhere)
        found = [*_pace(request, before, asked, paced, wall)]
        if not of_robots:
            found += _rules(request, asked, known, led.get(_url(request)), wall)
        breaches += [Breach(kind, _url(request), request.at, detail) for kind, detail in found]
        before.append(request)
    return breaches


def _pace(
    request: Seen, before: list[Seen], asked: Manners, known: bool, wall: float
) -> Iterable[tuple[str, str]]:
    """Yield the breaches that concern the host: its clock, its slots, its blocks."""
    interval = asked.interval(wall + request.at) if known else asked.default
    flying = 0
    for other in before:
        since = max(other.at, other.answered or other.at)
        gap = request.at - since
        if interval > 0 and gap < interval - EPSILON:
            yield "early", f"{gap:.3f} s after {other.target}, {interval:g} s were asked for"
        flying += other.ended is None or other.ended > request.at + EPSILON
        until = _blocked_until(other, wall)
        if request.at < until - EPSILON:
            early = until - request.at
            yield "block", f"{early:.3f} s too soon, by the {other.status} at {since:.3f}"
    if flying >= asked.limit:
        yield "crowd", f"{flying} others in flight, {asked.limit} in all are borne"


def _rules(
    request: Seen, asked: Manners, known: bool, leader: str | None, wall: float
) -> Iterable[tuple[str, str]]:
    """Yield the breaches that concern the page: its hours, and its robots.txt."""
    found = []
    if not known:
        found.append(("unasked", "its robots.txt had not been answered"))
    if any(request.target.startswith(path) for path in asked.denied):
        found.append(("denied", f"by {[p for p in asked.denied if request.target.startswith(p)]}"))
    if not asked.open(wall + request.at):
        now = datetime.fromtimestamp(wall + request.at, UTC)
        found.append(("window", f"at {now:%H:%M:%S.%f}, open {asked.visits}"))
    for kind, detail in found:
        yield (kind, detail) if leader is None else ("hop", f"from {leader}: {kind}: {detail}")


def _blocked_until(request: Seen, wall: float) -> float:
    if request.status not in (429, 503) or request.answered is None:
        return float("-inf")
    said = request.answer_header("Retry-After")
    if said is None:
        return request.answered + UNSAID
    if said.isdigit():
        return request.answered + int(said)
    moment = datetime.strptime(said, "%a, %d %b %Y %H:%M:%S GMT").replace(tzinfo=UTC)
    return moment.timestamp() - wall


def answers(requests: Iterable[Seen]) -> dict[str, float]:
    """Return when each origin's robots.txt was first answered, by a file or by its absence."""
    first: dict[str, tuple[float, str | None]] = {}
    for request in requests:
        status = request.status
        if request.answered is None or status is None:
            continue
        if 300 <= status < 400 and (location := request.answer_header("Location")) is not None:
            first.setdefault(_url(request), (request.answered, urljoin(_url(request), location)))
        elif 200 <= status < 300 or status in NO_FILE:
            first.setdefault(_url(request), (request.answered, None))
    return {
        url.removesuffix("/robots.txt"): moment
        for url in first
        if urlsplit(url).path in _FILE and (moment := _chase(url, first)) is not None
    }


def _chase(url: str, first: Mapping[str, tuple[float, str | None]]) -> float | None:
    moment = 0.0
    for _ in range(7):
        if url not in first:
            return None
        answered, location = first[url]
        moment = max(moment, answered)
        if location is None:
            return moment
        url = location
    return None


def _redirects(requests: list[Seen]) -> tuple[set[str], dict[str, str]]:
    """Return the URLs of robots.txt files, and those that their redirects lead to; and the URLs
    that redirects of pages led to, with the URL of the redirect."""
    files = {_url(request) for request in requests if request.target in _FILE}
    led: dict[str, str] = {}
    for request in requests:
        if (location := request.answer_header("Location")) is not None:
            url = _url(request)
            if url in files:
                files.add(urljoin(url, location))
            else:
                led.setdefault(urljoin(url, location), url)
    return files, led


def _origin(request: Seen) -> str:
    return f"{request.scheme}://{request.host}"


def _url(request: Seen) -> str:
    return _origin(request) + request.target


def _hours(hours: Hours) -> str:
    return f" {hours[0]}-{hours[1]}"


def _within(hours: Hours, wall: float) -> bool:
    now = f"{datetime.fromtimestamp(wall, UTC):%H%M}"
    start, end = hours
    return start <= now <= end if start <= end else now >= start or now <= end
