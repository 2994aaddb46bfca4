"""What the headers of an answer say about time: lifetimes and waiting. Pure functions.

Rule numbers HTTP-nn are those of standards.md section 7. All times are seconds; "now" is
wall time, because that is what sites write into their headers.
"""

from __future__ import annotations

import random
import re
from calendar import timegm
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final

import msgspec

from gatekeeper.config import CacheConfig
from gatekeeper.fetching.outcomes import Kept

__all__ = [
    "Lifetime",
    "fresh_for",
    "lifetime",
    "parse_http_date",
    "parse_rate_limit",
    "parse_retry_after",
    "soft_expiry",
    "wait_of",
]

SIX_HOURS: Final = 21_600.0
_MOST: Final = float(2**31)  # HTTP-06: delta-seconds that overflow


class Lifetime(msgspec.Struct, frozen=True):
    """What an answer says about its own lifetime."""

    seconds: float | None = None
    """Remaining at the moment of the answer, age subtracted; None: it says nothing."""
    brief: bool = False
    """no-store, private or no-cache: hold it no longer than the floor (HTTP-05)."""


def lifetime(headers: Mapping[str, str], now: float) -> Lifetime:
    """Read Cache-Control, Expires and Age (HTTP-02 to HTTP-06).

    `headers` maps case-insensitively, or in the usual capitals.

    >>> lifetime({"Cache-Control": "max-age=600", "Age": "500"}, 0.0).seconds
    100.0
    """
    directives = _directives(headers.get("Cache-Control", ""))
    brief = not directives.keys().isdisjoint({"no-store", "private", "no-cache"})
    for name in ("s-maxage", "max-age"):  # HTTP-02: a gate serves many, so it is shared
        if name in directives:
            seconds = _delta_seconds(directives[name])
            # HTTP-06: an unreadable value is a stale one. HTTP-04: less the age. The Date
            # header is left out of the age: our own clock may be the wrong one of the two.
            remaining = 0.0 if seconds is None else seconds - _age(headers)
            return Lifetime(max(0.0, remaining), brief)
    expires = headers.get("Expires")
    if expires is None:
        return Lifetime(None, brief)
    until = parse_http_date(expires, now)
    if until is None:
        return Lifetime(0.0, brief)  # `Expires: 0` means: expired
    date = parse_http_date(headers.get("Date", ""), now)
    return Lifetime(max(0.0, until - (now if date is None else date) - _age(headers)), brief)


def fresh_for(kept: Kept, said: Lifetime, cache: CacheConfig) -> float:
    """How long an answer may be used: within the floor and RFC-40's 24 hours.

    A definite absence has its own time (row 14), which the site may shorten.
    """
    base = SIX_HOURS if kept is Kept.SIX_HOURS else cache.default_ttl
    seconds = base if said.seconds is None else said.seconds
    if kept is not Kept.FRESH:
        seconds = min(seconds, base)
    if said.brief:
        seconds = 0.0
    return min(max(seconds, cache.min_ttl), cache.max_ttl)


def soft_expiry(fresh: float, rng: random.Random) -> float:
    """When to refresh in the background: early, and never two origins in step."""
    return fresh * rng.uniform(0.75, 0.95)


def parse_retry_after(value: str, now: float) -> float | None:
    """Seconds that a Retry-After asks for, or None for what isn't one (HTTP-08, HTTP-09).

    Not capped: whoever uses it caps it.

    >>> parse_retry_after("120", 0.0), parse_retry_after("-5", 0.0)
    (120.0, None)
    """
    value = value.strip(" \t")
    seconds = _delta_seconds(value)
    if seconds is not None:
        return seconds
    at = parse_http_date(value, now)
    return None if at is None else max(0.0, at - now)


def wait_of(headers: Mapping[str, str], now: float) -> float | None:
    """Seconds to wait before the next request, by Retry-After, else by RateLimit (HTTP-11)."""
    value = headers.get("Retry-After")
    if value is not None and (seconds := parse_retry_after(value, now)) is not None:
        return seconds
    value = headers.get("RateLimit")
    return None if value is None else parse_rate_limit(value)


_WORD = r"[A-Za-z*][!#$%&'*+.^_`|~:/0-9A-Za-z-]*"
_BARE = rf'-?[0-9]{{1,15}}(?:\.[0-9]{{1,3}})?|"[ !#-\[\]-~]*"|\?[01]|:[A-Za-z0-9+/=]*:|{_WORD}'
_PARAMETER = re.compile(rf"; *(?P<key>[a-z*][a-z0-9_.*-]*)(?:=(?P<value>{_BARE}))?")
_POLICY = re.compile(r'[ \t]*"[ !#-\[\]-~]*"')
_COMMA = re.compile(r"[ \t]*,")


def parse_rate_limit(value: str) -> float | None:
    """Seconds until a RateLimit field's spent quota comes back; None if none is spent.

    A Structured Field list of strings (draft-ietf-httpapi-ratelimit-headers); anything
    else, older dictionary forms included, is malformed and ignored (HTTP-11).

    >>> parse_rate_limit('"default";r=0;t=30')
    30.0
    """
    waits = [0.0]
    at = 0
    while True:
        policy = _POLICY.match(value, at)
        if policy is None:
            return None
        at = policy.end()
        parameters: dict[str, str | None] = {}
        while parameter := _PARAMETER.match(value, at):
            parameters[parameter["key"]] = parameter["value"]
            at = parameter.end()
        seconds = _delta_seconds(parameters.get("t") or "")
        if parameters.get("r") == "0" and seconds is not None:
            waits.append(seconds)
        comma = _COMMA.match(value, at)
        if comma is None:
            break
        at = comma.end()
    if value[at:].strip(" \t"):
        return None
    return max(waits) or None


def _directives(value: str) -> dict[str, str]:
    """Cache-Control as a dictionary; of duplicates the first one counts (HTTP-06)."""
    found: dict[str, str] = {}
    for part in value.split(","):
        name, _, argument = part.partition("=")
        found.setdefault(name.strip(" \t").lower(), argument.strip(' \t"'))
    return found


def _delta_seconds(value: str) -> float | None:
    if not (value.isascii() and value.isdigit()):
        return None
    return _MOST if len(value) > 10 else min(float(value), _MOST)


def _age(headers: Mapping[str, str]) -> float:
    value = headers.get("Age", "").partition(",")[0].strip(" \t")
    return _delta_seconds(value) or 0.0


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
    """An HTTP-date in any of its three forms as wall seconds, or None (HTTP-09).

    `now` settles the century of a two-digit year: one that would lie more than fifty
    years ahead is in the past.
    """
    value = value.strip(" \t")
    for pattern in _DATES:
        if match := pattern.fullmatch(value):
            break
    else:
        return None
    month = _MONTHS.get(match["month"].lower())
    year = int(match["year"])
    if len(match["year"]) == 2:
        this_year = datetime.fromtimestamp(min(max(now, 0.0), 253402300799.0), UTC).year
        year += this_year - this_year % 100
        if year > this_year + 50:
            year -= 100
    try:
        # A leap second (:60) is the second before it, as datetime has none.
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
