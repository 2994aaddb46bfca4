"""Crawl-delay, Request-rate and Visit-time: values, intervals, and the lines that they stand on."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, time, timedelta
from typing import NamedTuple

import msgspec

from gatekeeper.robots import signals
from gatekeeper.robots.parser import Spans, shown
from gatekeeper.speedups import lazy_pattern

MAX_SECONDS = 31_536_000.0
"""A year. A site that asks for more, `1e400` written out say, gets that: an absurd wish must
not overflow into none at all, because an error never speeds us up."""

_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}  # `d`: not Conner's, but seen (V2-27)

# re.ASCII and [0-9]: no other script's digits. Every pattern is anchored and every repetition
# possessive: what was read is never read again another way, so the time is linear.
_DELAY = lazy_pattern(r"(?:[0-9]++(?:\.[0-9]*+)?+|\.[0-9]++)\Z")
_TIME = r"([01][0-9]|2[0-3]):?([0-5][0-9])"  # V2-26: HHMM in the examples, HH:MM in the prose
_WINDOW = lazy_pattern(rf"{_TIME}[ \t]*+-[ \t]*+{_TIME}\Z")
_RATE = lazy_pattern(
    r"([0-9]{1,15})[ \t]*+/[ \t]*+([0-9]{1,15})(?:[ \t]*+([smhd]))?(?:[ \t]++([0-9].*+))?\Z",
    re.IGNORECASE | re.ASCII,
)

_DAY = timedelta(days=1)

# the 2.0 draft (V2-31): without a rate, the slower of ten seconds and twice the time the retrieval
# took.
_THUMB_SECONDS = 10.0
_THUMB_FACTOR = 2.0


class Window(msgspec.Struct, frozen=True):
    """A part of every day, in UTC. The minute of `end` belongs to it (the 2.0 draft, V2-25).

    A window whose end is before its start goes on past midnight.
    """

    start: time
    end: time

    def __str__(self) -> str:
        return f"{self.start:%H%M}-{self.end:%H%M}"


class RequestRate(msgspec.Struct, frozen=True):
    """So many documents in so many seconds, all day or in a window (the 2.0 draft, V2-27).

    >>> RequestRate(documents=10, seconds=60).interval
    6.0
    """

    documents: int
    seconds: int
    window: Window | None = None

    @property
    def interval(self) -> float:
        """Seconds from one document to the next (the 2.0 draft, V2-30)."""
        return min(self.seconds / self.documents, MAX_SECONDS)


def parse_crawl_delay(value: str) -> float | None:
    """Seconds, or None for anything but a plain non-negative decimal (VND-01).

    >>> parse_crawl_delay("2.5"), parse_crawl_delay("-3"), parse_crawl_delay("5 s")
    (2.5, None, None)
    """
    value = value.strip(" \t")
    return min(float(value), MAX_SECONDS) if _DELAY.match(value) else None


def parse_visit_time(value: str) -> Window | None:
    """A window such as `0600-0845`, `06:00-08:45` or `0100 - 0800`, or None (the 2.0 draft, V2-24,
    V2-26).

    >>> print(parse_visit_time("2200 - 01:59"))
    2200-0159
    """
    found = _WINDOW.match(value.strip(" \t"))
    if found is None:
        return None
    start_hour, start_minute, end_hour, end_minute = map(int, found.groups())
    return Window(time(start_hour, start_minute), time(end_hour, end_minute))


def parse_request_rate(value: str) -> RequestRate | None:
    """A rate such as `10/60`, `20/1h` or `1/10m 1300-1659`, or None (the 2.0 draft, V2-27, V2-33).

    >>> parse_request_rate("100/24h").interval
    864.0
    """
    found = _RATE.match(value.strip(" \t"))
    if found is None:
        return None
    documents = int(found[1])
    seconds = int(found[2]) * _UNITS[(found[3] or "").lower()]
    window = parse_visit_time(found[4]) if found[4] else None
    if not documents or not seconds or (found[4] and window is None):
        return None  # zero is no rate; a rate in no window we can tell holds never
    return RequestRate(documents, seconds, window)


def may_visit(windows: Sequence[Window], at: datetime) -> bool:
    """Whether a visit is welcome then: no window at all means any time (the 2.0 draft, V2-24).

    Raises ValueError for a naive datetime.
    """
    moment = _utc(at).time()
    return not windows or any(_holds(window, moment) for window in windows)


def next_visit(windows: Sequence[Window], at: datetime) -> datetime:
    """The first moment from `at` on at which a visit is welcome, in UTC.

    Raises ValueError for a naive datetime.
    """
    moment = _utc(at)
    if may_visit(windows, moment):
        return moment
    return min(_next(window.start, moment) for window in windows)


def rate_in_force(rates: Iterable[RequestRate], at: datetime) -> RequestRate | None:
    """The slowest of those for a window that holds then, or else of those without (the 2.0 draft,
    V2-28, V2-29).

    Raises ValueError for a naive datetime.
    """
    moment = _utc(at).time()
    timed: list[RequestRate] = []
    always: list[RequestRate] = []
    for rate in rates:
        if rate.window is None:
            always.append(rate)
        elif _holds(rate.window, moment):
            timed.append(rate)
    return max(timed or always, key=lambda rate: rate.interval, default=None)


def effective_interval(
    crawl_delay: float | None,
    rates: Iterable[RequestRate],
    *,
    rule_of_thumb: bool,
    at: datetime,
    took: float | None = None,
) -> float | None:
    """Seconds between two requests that the text asks for at that moment, or None.

    Of the rate in force and a Crawl-delay, the slower. Where the text gives neither,
    `rule_of_thumb` says whether the 2.0 draft (V2-31) speaks, which looks at the seconds that the
    last retrieval `took`. Raises ValueError for a naive datetime.
    """
    rate = rate_in_force(rates, at)
    wishes = [] if rate is None else [rate.interval]
    if crawl_delay is not None:
        wishes.append(crawl_delay)
    if wishes:
        return max(wishes)
    if rule_of_thumb:
        return max(_THUMB_SECONDS, _THUMB_FACTOR * (took or 0.0))
    return None


FIELDS = (
    "crawl-delay",
    "request-rate",
    "visit-time",
    "comment",
    "content-signal",
    "content-usage",
)


class Directives(NamedTuple):
    """What came of the values; those that can't be read are left out."""

    crawl_delay: float | None
    """Seconds; of several the largest (VND-01)."""
    request_rates: tuple[RequestRate, ...]
    visit_times: tuple[Window, ...]
    comments: tuple[str, ...]
    signal: dict[str, str]
    """What the Content-Signal lines say together (SIG-12)."""
    usage: Sequence[str]
    """Content-Usage lines, which speak of paths."""


def read_directives(said: Mapping[str, Sequence[str]]) -> Directives:
    """Read the values, as octets, of each of the `FIELDS`."""
    delays = map(parse_crawl_delay, said["crawl-delay"])
    rates = map(parse_request_rate, said["request-rate"])
    windows = map(parse_visit_time, said["visit-time"])
    return Directives(
        crawl_delay=max((delay for delay in delays if delay is not None), default=None),
        request_rates=tuple(rate for rate in rates if rate),
        visit_times=tuple(window for window in windows if window),
        comments=tuple(map(shown, said["comment"])),
        signal=signals.combine_signals(map(signals.parse_content_signal, said["content-signal"])),
        usage=said["content-usage"],
    )


NOTHING_SAID = read_directives(dict.fromkeys(FIELDS, ()))
"""Of a text with no such line."""


def _holds(window: Window, moment: time) -> bool:
    # To the minute: the end's seconds 00 to 59.999 all belong to it (the 2.0 draft, V2-25).
    minute = moment.replace(second=0, microsecond=0)
    if window.start <= window.end:
        return window.start <= minute <= window.end
    return minute >= window.start or minute <= window.end


def _next(of_day: time, moment: datetime) -> datetime:
    """The first moment after that one at which the clocks show that time."""
    today = datetime.combine(moment.date(), of_day, UTC)
    return today if today > moment else today + _DAY


def _utc(at: datetime) -> datetime:
    if at.utcoffset() is None:
        raise ValueError("a moment needs a time zone: datetime.now(timezone.utc), not utcnow()")
    return at.astimezone(UTC)


class RobotsInterval(msgspec.Struct, frozen=True, gc=False):
    """What the site's text asks for at this moment.

    `seconds` is None where the text gives no rate; `source` is the whole sentence that
    `why()` prints, such as "crawl-delay 10 s from robots.txt line 7".
    """

    seconds: float | None = None
    source: str = "robots.txt gives no rate"


def by_crawl_delay(text: str, spans: Spans, seconds: float) -> str:
    """The first Crawl-delay line of the spans that asks for so much.

    >>> by_crawl_delay("user-agent: *\\ncrawl-delay: 10", ((0, 29),), 10.0)
    'crawl-delay 10 s from robots.txt line 2'
    """
    line = _line(text, spans, "crawl-delay", lambda value: parse_crawl_delay(value) == seconds)
    return f"crawl-delay {seconds:.10g} s from robots.txt{line}"


def by_request_rate(text: str, spans: Spans, rate: RequestRate) -> str:
    """The first Request-rate line of the spans that says so."""
    line = _line(text, spans, "request-rate", lambda value: parse_request_rate(value) == rate)
    hours = "" if rate.window is None else f" {rate.window} UTC"
    said = f"{rate.documents}/{rate.seconds}s{hours}"
    return f"request-rate {said}, that is {rate.interval:.10g} s, from robots.txt{line}"


def by_rule_of_thumb(seconds: float) -> str:
    """No line: what the 2.0 draft asks for where the text gives no rate (V2-31)."""
    return f"rule of thumb {seconds:.10g} s: robots.txt of the 2.0 draft gives no rate"


def _line(text: str, spans: Spans, field: str, wanted: Callable[[str], bool]) -> str:
    for low, high in spans:
        at = low
        for line in text[low:high].split("\n"):
            head, colon, rest = line.partition("#")[0].partition(":")
            if colon and head.strip(" \t").lower() == field and wanted(rest.strip(" \t")):
                return f" line {text.count(chr(10), 0, at) + 1}"
            at += len(line) + 1
    return ""
