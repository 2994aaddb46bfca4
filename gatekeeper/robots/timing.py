"""Crawl-delay, Request-rate and Visit-time: their values, and the resulting interval."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, time, timedelta
from typing import NamedTuple, TypeVar

import msgspec

from gatekeeper.robots import signals
from gatekeeper.robots.parser import FieldLine, to_unicode

MAX_SECONDS = 31_536_000.0
"""Upper bound of any requested interval: a year. A larger value, such as a very long number, is
reduced to it and must not overflow into no interval, because an error must never speed us up."""

_MAX_VALUES = 100
"""Maximum number of different rates, and of different windows, that count: each answer looks at
all of them. People write fewer than ten; a site could write 30,000. Of more rates only the slowest
counts, at all hours, and of more windows the first ones: both are the stricter reading."""
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}  # `d`: used, not in the draft (V2-27)

# re.ASCII and [0-9] exclude the digits of other scripts. Every pattern is anchored and every
# repetition possessive, so there is no backtracking and the time is linear.
_DELAY = re.compile(r"(?:[0-9]++(?>(?:\.[0-9]*+)?)|\.[0-9]++)\Z")
_TIME = r"([01][0-9]|2[0-3]):?([0-5][0-9])"  # V2-26: HHMM in the examples, HH:MM in the prose
_WINDOW = re.compile(rf"{_TIME}[ \t]*+-[ \t]*+(?:{_TIME}|24:?00)\Z")
_RATE = re.compile(
    r"([0-9]{1,15})[ \t]*+/[ \t]*+([0-9]{1,15})(?:[ \t]*+([smhd]))?(?:[ \t]++([0-9].*+))?\Z",
    re.IGNORECASE | re.ASCII,
)

_DAY = timedelta(days=1)
_Parsed = TypeVar("_Parsed")

# The 2.0 draft (V2-31): without a rate, the slower of ten seconds and twice the duration of the
# retrieval.
_THUMB_SECONDS = 10.0
_THUMB_FACTOR = 2.0


class Window(msgspec.Struct, frozen=True):
    """A part of every day, in UTC. The minute of `end` is included (the 2.0 draft, V2-25).

    A window whose end is before its start continues past midnight.
    """

    start: time
    """The first minute, in UTC."""
    end: time
    """The last minute, in UTC."""

    def __str__(self) -> str:
        return f"{self.start:%H%M}-{self.end:%H%M}"


class RequestRate(msgspec.Struct, frozen=True):
    """A number of documents per number of seconds, at any time or in a window (the 2.0 draft,
    V2-27).

    >>> RequestRate(documents=10, seconds=60).interval
    6.0
    """

    documents: int
    """How many documents."""
    seconds: int
    """In how many seconds."""
    window: Window | None = None
    """When the rate applies; None for always."""

    @property
    def interval(self) -> float:
        """Seconds between two documents (the 2.0 draft, V2-30)."""
        return min(self.seconds / self.documents, MAX_SECONDS)

    def __str__(self) -> str:
        hours = "" if self.window is None else f" {self.window} UTC"
        return f"{self.documents}/{self.seconds}s{hours}"


def parse_crawl_delay(value: str) -> float | None:
    """Return the seconds, or None for anything but a plain non-negative decimal number (VND-01).

    >>> parse_crawl_delay("2.5"), parse_crawl_delay("-3"), parse_crawl_delay("5 s")
    (2.5, None, None)
    """
    value = value.strip(" \t")
    return min(float(value), MAX_SECONDS) if _DELAY.match(value) else None


def parse_visit_time(value: str) -> Window | None:
    """Parse a window such as `0600-0845`, `06:00-08:45` or `0100 - 0800` (the 2.0 draft, V2-24,
    V2-26). An end of `2400` is the last minute of the day: without the window the site would be
    open at all hours. Return None for anything else.

    >>> print(parse_visit_time("2200 - 01:59"))
    2200-0159
    """
    found = _WINDOW.match(value.strip(" \t"))
    if found is None:
        return None
    start_hour, start_minute, end_hour, end_minute = found.groups()
    end = time(23, 59) if end_hour is None else time(int(end_hour), int(end_minute))
    return Window(time(int(start_hour), int(start_minute)), end)


def parse_request_rate(value: str) -> RequestRate | None:
    """Parse a rate such as `10/60`, `20/1h` or `1/10m 1300-1659` (the 2.0 draft, V2-27, V2-33).

    Return None for anything else.

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
        return None  # zero is not a rate, and a rate in an invalid window never applies
    return RequestRate(documents, seconds, window)


def may_visit(windows: Sequence[Window], at: datetime) -> bool:
    """Return True if a visit is welcome at that moment. No window means any time (the 2.0 draft,
    V2-24).

    Raises ValueError for a naive datetime.
    """
    moment = _utc(at).time()
    return not windows or any(_includes(window, moment) for window in windows)


def next_visit(windows: Sequence[Window], at: datetime) -> datetime:
    """Return the first moment from `at` on at which a visit is welcome, in UTC.

    Raises ValueError for a naive datetime.
    """
    moment = _utc(at)
    if may_visit(windows, moment):
        return moment
    starts = [datetime.combine(moment.date(), window.start, UTC) for window in windows]
    return min(start if start > moment else start + _DAY for start in starts)


def rate_in_force(rates: Sequence[RequestRate], at: datetime) -> RequestRate | None:
    """Return the slowest rate whose window includes the moment, or else the slowest one without a
    window (the 2.0 draft, V2-28, V2-29).

    Return None if no rate applies. Raises ValueError for a naive datetime.
    """
    moment = _utc(at).time()
    timed = [rate for rate in rates if rate.window and _includes(rate.window, moment)]
    always = [rate for rate in rates if rate.window is None]
    return max(timed or always, key=lambda rate: rate.interval, default=None)


def effective_interval(
    crawl_delay: float | None,
    rates: Sequence[RequestRate],
    *,
    rule_of_thumb: bool,
    at: datetime,
    took: float | None = None,
) -> float | None:
    """Return the seconds between two requests that the text asks for at that moment, or None.

    The slower of the rate in force and the Crawl-delay applies. If there is neither,
    `rule_of_thumb` specifies whether the rule of the 2.0 draft applies (V2-31), which depends on
    `took`, the duration of the last retrieval in seconds. Raises ValueError for a naive datetime.
    """
    rate = rate_in_force(rates, at)
    intervals = [] if rate is None else [rate.interval]
    if crawl_delay is not None:
        intervals.append(crawl_delay)
    if intervals:
        return max(intervals)
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
    """The parsed values of the `FIELDS`, without those that cannot be parsed."""

    crawl_delay: float | None
    """Seconds, the largest of several (VND-01), or None."""
    request_rates: tuple[RequestRate, ...]
    visit_times: tuple[Window, ...]
    comments: tuple[str, ...]
    signal: dict[str, str]
    """All Content-Signal lines combined (SIG-12)."""
    usage: Sequence[str]
    """Values of the Content-Usage lines, which apply to paths."""
    offsets: dict[float | RequestRate, int]
    """The offset in the text of the first line that has the Crawl-delay, and of that of each
    rate."""


def read_directives(lines: Mapping[str, Sequence[FieldLine]]) -> Directives:
    """Parse the lines of the `FIELDS`."""
    delays = _first_lines(parse_crawl_delay, lines.get("crawl-delay", ()))
    rates = _first_lines(parse_request_rate, lines.get("request-rate", ()))
    windows = _first_lines(parse_visit_time, lines.get("visit-time", ()))
    signal, usage = lines.get("content-signal", ()), lines.get("content-usage", ())
    crawl_delay, request_rates = max(delays, default=None), tuple(rates)
    if len(rates) > _MAX_VALUES:
        slowest = max(rates, key=lambda rate: rate.interval)
        request_rates = (RequestRate(slowest.documents, slowest.seconds),)
    offsets: dict[float | RequestRate, int] = {}
    if crawl_delay is not None:
        offsets[crawl_delay] = delays[crawl_delay]
    return Directives(
        crawl_delay=crawl_delay,
        request_rates=request_rates,
        visit_times=tuple(windows)[:_MAX_VALUES],
        comments=tuple([to_unicode(value) for value, _ in lines.get("comment", ())]),
        signal=signals.combine([signals.parse_content_signal(value) for value, _ in signal], "no"),
        usage=[value for value, _ in usage],
        offsets=offsets | {rate: rates[rate] for rate in request_rates if rate in rates},
    )


def _first_lines(
    parse: Callable[[str], _Parsed | None], lines: Sequence[FieldLine]
) -> dict[_Parsed, int]:
    """Return each result of parsing a value, with the offset of the first line that has it."""
    firsts: dict[str, int] = {}
    for value, offset in lines:  # a file may hold 30,000 equal ones
        firsts.setdefault(value, offset)
    found: dict[_Parsed, int] = {}
    for value, offset in firsts.items():
        if (parsed := parse(value)) is not None:
            found.setdefault(parsed, offset)
    return found


NO_DIRECTIVES = read_directives({})
"""The directives of a text without such lines."""


def _includes(window: Window, moment: time) -> bool:
    # Compared by the minute: the seconds 00 to 59.999 of the end all belong to the window (the 2.0
    # draft, V2-25).
    minute = moment.replace(second=0, microsecond=0)
    if window.start <= window.end:
        return window.start <= minute <= window.end
    return minute >= window.start or minute <= window.end


def _utc(at: datetime) -> datetime:
    if at.utcoffset() is None:
        raise ValueError("a moment needs a time zone: datetime.now(timezone.utc), not utcnow()")
    return at.astimezone(UTC)


class RobotsInterval(msgspec.Struct, frozen=True, gc=False):
    """The interval that the site's text asks for at this moment.

    `seconds` is None if the text gives no rate. `source` is the complete phrase that `why()` shows,
    such as "crawl-delay 10 s from robots.txt line 7".
    """

    seconds: float | None = None
    source: str = "robots.txt gives no rate"
