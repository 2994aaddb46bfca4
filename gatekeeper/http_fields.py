"""HTTP-date, structured fields, and what asks a client to wait: Retry-After and RateLimit.

Pure functions. All times are in seconds. "now" is wall clock time, because that is what sites
write.
"""

from __future__ import annotations

import re
from calendar import timegm
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from typing import Annotated, Final, NamedTuple

import msgspec

UtcTime = Annotated[datetime, msgspec.Meta(tz=True)]
"""An aware time in a struct; in JSON an RFC 3339 date-time."""
REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})  # RFC 9110 section 15.4 (HTTP-13)
_MAX_DELTA: Final = float(2**31)  # RFC 9111 section 4.2.1 (HTTP-06): delta-seconds that overflow
_MAX_FIELD = 2_000
"""Maximum length in characters of a RateLimit field; a longer one is ignored, because no real site
needs it."""


def delta_seconds(value: str) -> float | None:
    """Return a non-negative decimal integer, capped to the maximum of delta-seconds, or None (RFC
    9111 section 4.2.1, HTTP-06)."""
    if not (value.isascii() and value.isdigit()):
        return None
    return _MAX_DELTA if len(value.lstrip("0")) > 10 else min(float(value), _MAX_DELTA)


def parse_retry_after(value: str | float | None, now: float) -> float | None:
    """Return the seconds that a Retry-After asks for, or None if it is invalid (RFC 9110 section
    10.2.3, HTTP-08, HTTP-09).

    Takes the value of the field, or a number of seconds. A date in the past gives 0. The caller has
    to cap the result.

    >>> parse_retry_after("120", 0.0), parse_retry_after("-5", 0.0)
    (120.0, None)
    """
    if value is None:
        return None
    if not isinstance(value, str):
        return float(min(value, _MAX_DELTA)) if value >= 0 else None
    value = value.strip(" \t")
    seconds = delta_seconds(value)
    if seconds is not None:
        return seconds
    at = parse_http_date(value, now)
    return None if at is None else max(0.0, at - now)


def wait_of(headers: Mapping[str, str], now: float) -> float | None:
    """Return the seconds to wait before the next request, by Retry-After or else by RateLimit
    (HTTP-11)."""
    seconds = parse_retry_after(headers.get("Retry-After"), now)
    return parse_rate_limit(rate_limit_of(headers)) if seconds is None else seconds


def rate_limit_of(headers: Mapping[str, str | None], name: str = "RateLimit") -> str | None:
    """Return the RateLimit field, or None if the response comes from a cache (it has an Age, RFC
    9111 section 5.1): the remaining quota then belongs to another request (HTTP-11)."""
    field = headers.get(name)
    return field if field is None or headers.get("Age") is None else None


class QuotaRate(NamedTuple):
    """The rate that a RateLimit field allows: one request per `seconds`, for the next `lasting`
    seconds."""

    seconds: float
    lasting: float


NO_QUOTA_RATE = QuotaRate(0.0, 0.0)

# The grammar of structured fields (RFC 9651). Every repetition is possessive or
# atomic, so the time is linear.
KEY = r"[a-z*][a-z0-9_\-.*]*+"
_TAIL = "%[89ab][0-9a-f]"
BARE = (
    r"(?:[A-Za-z*][!#$%&'*+\-.^_`|~0-9A-Za-z:/]*+"
    r"|-?(?:[0-9]{1,12}\.[0-9]{1,3}|[0-9]{1,15})(?![0-9.])"
    r'|"(?>(?:[ !#-\[\]-~]|\\["\\])*)"'
    r"|\?[01]"
    r"|@-?[0-9]{1,15}(?![0-9.])"
    r"|:[A-Za-z0-9+/=]*+:"
    # A display string is UTF-8.
    rf'|%"(?>(?:[ !#$&-~]|%[0-7][0-9a-f]|%(?:c[2-9a-f]|d[0-9a-f]){_TAIL}'
    rf"|%(?:e0%[ab][0-9a-f]|e[1-9abcef]{_TAIL}|ed%[89][0-9a-f]){_TAIL}"
    rf'|%(?:f0%[9ab][0-9a-f]|f[123]{_TAIL}|f4%8[0-9a-f]){_TAIL}{_TAIL})*)")'
)
PARAMS = rf"(?>(?:; *+{KEY}(?>(?:={BARE})?))*)"
ITEMS = rf"\( *+(?>(?:{BARE}{PARAMS}(?>(?: ++{BARE}{PARAMS})*) *+)?)\){PARAMS}"
NEXT = r"[ \t]*+(?:,[ \t]*+(?!\Z)|\Z)"
LIST_MEMBER = rf"(?:({BARE})({PARAMS})|{ITEMS}){NEXT}"
"""Member of a List: its value and its parameters; two empty texts for an inner list."""
PARAM = rf"; *+({KEY})(?:=({BARE}))?"
"""Name and value of a parameter."""


@cache
def _members_of(member: str) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return an expression that matches a whole field of such members, and one for each of them."""
    # Without groups: Python 3.11 loses groups inside a possessive repetition.
    unmarked = re.sub(r"(?<!\\)\((?!\?)", "(?:", member)
    return re.compile(rf" *+(?>(?:{unmarked})*)\Z"), re.compile(member)


def members(member: str, text: str) -> list[tuple[str, str]] | None:
    """Return the two groups of each member of a structured field, or None if the text is none."""
    whole, each = _members_of(member)
    return each.findall(text) if whole.match(text) else None


def parse_rate_limit(value: str | None) -> float | None:
    """Return the seconds until the exhausted quota of a RateLimit field is reset, or None if none
    is exhausted.

    >>> parse_rate_limit('"default";r=0;t=30')
    30.0
    """
    waits = [reset for remaining, reset in _quotas(value) if remaining == 0]
    return max(waits, default=0.0) or None


def quota_rate(value: str | None) -> QuotaRate | None:
    """Return the slowest rate that a RateLimit field allows, or None if it is malformed or missing
    (HTTP-11).

    >>> quota_rate('"burst";r=0;t=30'), quota_rate('"day";r=10;t=100')
    (QuotaRate(seconds=30.0, lasting=30.0), QuotaRate(seconds=10.0, lasting=100.0))
    """
    rates = [QuotaRate(reset / max(1.0, remaining), reset) for remaining, reset in _quotas(value)]
    return max(rates, key=lambda rate: rate.seconds, default=None)


def _quotas(value: str | None) -> list[tuple[float, float]]:
    """Return the remaining quota and the seconds to its reset, for each policy of a RateLimit
    field.

    The field is a Structured Field list of strings (draft-ietf-httpapi-ratelimit-headers). Anything
    else, including the older dictionary forms, is malformed and ignored completely (HTTP-11).
    """
    quotas: list[tuple[float, float]] = []
    if not value or len(value) > _MAX_FIELD:  # most responses have no such field
        return quotas
    for policy, written in members(LIST_MEMBER, value) or ():
        if not policy.startswith('"'):
            return []
        parameters = dict(members(PARAM, written) or ())
        remaining = delta_seconds(parameters.get("r", ""))
        reset = delta_seconds(parameters.get("t", ""))
        if remaining is not None and reset is not None:
            quotas.append((remaining, reset))
    return quotas


_MONTHS = {
    name: number
    for number, name in enumerate(
        ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"), 1
    )
}
_TIME = r"(?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d)"
_DATES = tuple(
    re.compile(pattern, re.ASCII | re.IGNORECASE)
    for pattern in (
        rf"[a-z]{{3}}, (?P<day>\d\d) (?P<month>[a-z]{{3}}) (?P<year>\d{{4}}) {_TIME} (?:GMT|UTC)",
        rf"[a-z]{{6,9}}, (?P<day>\d\d)-(?P<month>[a-z]{{3}})-(?P<year>\d\d) {_TIME} (?:GMT|UTC)",
        rf"[a-z]{{3}} (?P<month>[a-z]{{3}}) (?P<day>[ \d]\d) {_TIME} (?P<year>\d{{4}})",
    )
)


def parse_http_date(value: str, now: float) -> float | None:
    """Parse an HTTP-date in any of its three forms (RFC 9110 section 5.6.7, HTTP-09).

    Return wall clock seconds, or None if it is invalid. `now` determines the century of a two-digit
    year: a year more than fifty years in the future is taken to be in the past.
    """
    value = value.strip(" \t")
    match = next(filter(None, [pattern.fullmatch(value) for pattern in _DATES]), None)
    if match is None:
        return None
    month = _MONTHS.get(match["month"].lower())
    year = int(match["year"])
    if len(match["year"]) == 2:
        this_year = datetime.fromtimestamp(min(max(now, 0.0), 253402300799.0), UTC).year
        year += this_year - this_year % 100
        if year > this_year + 50:
            year -= 100
    try:
        # A leap second (:60) becomes the second before it, because datetime has none.
        when = datetime(
            year,
            month or 0,
            int(match["day"]),
            int(match["hour"]),
            int(match["minute"]),
            min(int(match["second"]), 59) if match["second"] == "60" else int(match["second"]),
            tzinfo=UTC,
        )
    except ValueError:
        return None
    return float(timegm(when.timetuple()))


_MIN_WALL: Final = -62135596800.0
_MAX_WALL: Final = 253402300799.0
"""Wall clock seconds of the first and last second that datetime can represent: years 1 and 9999."""


def utc(wall: float) -> datetime:
    """Convert wall clock seconds to an aware datetime, clamped to the years that datetime can
    represent.

    >>> utc(0.0).isoformat()
    '1970-01-01T00:00:00+00:00'
    """
    if not _MIN_WALL <= wall <= _MAX_WALL:
        wall = min(max(wall, _MIN_WALL), _MAX_WALL)
    return datetime.fromtimestamp(wall, UTC)


def unreadable(message: str) -> str:
    """Describe a response that aiohttp cannot parse by the message of its error, without the octets
    quoted in it.

    >>> unreadable("Duplicate Content-Length:\\n\\n  b'Content-Length: 20'\\n   ^")
    "the site's answer can't be read: Duplicate Content-Length"
    """
    problem = message.partition("\n")[0].partition(": b'")[0].rstrip(" :.")
    return "the site's answer can't be read" + (f": {problem}" if problem else "")
