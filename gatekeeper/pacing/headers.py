"""What a response says about pace: the Retry-After and RateLimit fields, as seconds."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import NamedTuple

__all__ = ["NO_SPREAD", "Spread", "http_date", "rate_limit", "retry_after"]

_DIGITS = re.compile(r"[0-9]+\Z")
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_IMF = re.compile(
    r"[a-z]{3}, (\d\d) ([a-z]{3}) (\d{4}) (\d\d):(\d\d):(\d\d) gmt\Z", re.IGNORECASE | re.ASCII
)
_RFC850 = re.compile(
    r"[a-z]{6,9}, (\d\d)-([a-z]{3})-(\d\d) (\d\d):(\d\d):(\d\d) gmt\Z", re.IGNORECASE | re.ASCII
)
_ASCTIME = re.compile(
    r"[a-z]{3} ([a-z]{3}) ([ \d]\d) (\d\d):(\d\d):(\d\d) (\d{4})\Z", re.IGNORECASE | re.ASCII
)
LONGEST = 10 * 366 * 86_400.0


def retry_after(value: str | float | None, wall: float) -> float | None:
    """Seconds that a Retry-After field asks for; None if it says nothing (HTTP-08).

    `wall` is now: a date is a moment. A date in the past is 0 (HTTP-09).

    >>> retry_after("120", 0.0), retry_after("soon", 0.0)
    (120.0, None)
    """
    if value is None:
        return None
    if not isinstance(value, str):
        return min(float(value), LONGEST) if value >= 0 else None
    text = value.strip(" \t")
    if _DIGITS.match(text):
        # A number of any length is a number; a float would overflow.
        return LONGEST if len(text.lstrip("0")) > 9 else min(float(text), LONGEST)
    moment = http_date(text, wall)
    return None if moment is None else min(max(0.0, moment - wall), LONGEST)


def http_date(text: str, wall: float) -> float | None:
    """An HTTP-date in any of its three forms as wall seconds; None if it is none."""
    if (match := _IMF.match(text)) is not None:
        day, month, year, hour, minute, second = match.groups()
    elif (match := _RFC850.match(text)) is not None:
        day, month, short, hour, minute, second = match.groups()
        # Two digits that seem more than 50 years ahead are in the past (RFC 9110 §5.6.7).
        this_year = datetime.fromtimestamp(wall, UTC).year
        full = this_year - this_year % 100 + int(short)
        year = str(full - 100 if full > this_year + 50 else full)
    elif (match := _ASCTIME.match(text)) is not None:
        month, day, hour, minute, second, year = match.groups()
    else:
        return None
    if month.lower() not in _MONTHS:
        return None
    try:
        # A leap second is written as 60.
        return datetime(
            int(year),
            _MONTHS.index(month.lower()) + 1,
            int(day),
            int(hour),
            int(minute),
            min(int(second), 59),
            tzinfo=UTC,
        ).timestamp()
    except ValueError:
        return None


class Spread(NamedTuple):
    """What a RateLimit field allows: one request in `seconds`, for the next `lasting` s."""

    seconds: float
    lasting: float


NO_SPREAD = Spread(0.0, 0.0)

_ITEM = re.compile(
    r'[ \t]*"(?:[\x20\x21\x23-\x5b\x5d-\x7e]|\\["\\])*"'
    r'((?:;[ ]*[a-z*][a-z0-9_\-.*]*(?:=(?:-?[0-9]{1,15}|"(?:[\x20\x21\x23-\x5b\x5d-\x7e]|\\["\\])*"'
    r"|:[A-Za-z0-9+/=]*:|[A-Za-z*][A-Za-z0-9!#$%&'*+.^_`|~:/-]*|\?[01]|-?[0-9]{1,12}\.[0-9]{1,3}"
    r"))?)*)[ \t]*(,|\Z)"
)
_PARAMETER = re.compile(r";[ ]*(r|t)=([0-9]{1,15})(?=;|\Z)")
_MAX_FIELD = 2000


def rate_limit(value: str | None) -> Spread | None:
    """The slowest rate that a RateLimit field allows; None if malformed or silent (HTTP-11).

    >>> rate_limit('"burst";r=0;t=30')
    Spread(seconds=30.0, lasting=30.0)
    >>> rate_limit('"day";r=10;t=100')
    Spread(seconds=10.0, lasting=100.0)
    """
    if value is None or len(value) > _MAX_FIELD:
        return None
    found: Spread | None = None
    at = 0
    while True:
        match = _ITEM.match(value, at)
        if match is None:
            return None  # a malformed field must be ignored as a whole
        parameters = dict(_PARAMETER.findall(match[1]))
        if "r" in parameters and "t" in parameters:
            remaining = int(parameters["r"])
            lasting = min(float(parameters["t"]), LONGEST)
            spread = Spread(lasting / max(1, remaining), lasting)
            if found is None or spread.seconds > found.seconds:
                found = spread
        if not match[2]:
            return found
        at = match.end()
