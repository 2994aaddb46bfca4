"""What the headers of an answer say about time: lifetimes and waiting. Pure functions.

Rule numbers HTTP-nn are those of standards.md section 7. All times are seconds; "now" is
wall time, because that is what sites write into their headers.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Final

import msgspec

from gatekeeper.config import CacheConfig
from gatekeeper.fetching.outcomes import Kept
from gatekeeper.http_fields import delta_seconds, parse_http_date

__all__ = [
    "Lifetime",
    "fresh_for",
    "lifetime",
    "soft_expiry",
]

SIX_HOURS: Final = 21_600.0
_MOST: Final = float(2**31)  # HTTP-06: delta-seconds that overflow


class Lifetime(msgspec.Struct, frozen=True, gc=False):
    """What an answer says about its own lifetime."""

    seconds: float | None = None
    """Remaining at the moment of the answer, age subtracted; None: it says nothing."""
    brief: bool = False
    """no-store, private or no-cache: hold it no longer than the floor (HTTP-05)."""


_SILENT: Final = Lifetime()


def lifetime(headers: Mapping[str, str], now: float) -> Lifetime:
    """Read Cache-Control, Expires and Age (HTTP-02 to HTTP-06).

    `headers` maps case-insensitively, or in the usual capitals.

    >>> lifetime({"Cache-Control": "max-age=600", "Age": "500"}, 0.0).seconds
    100.0
    """
    control = headers.get("Cache-Control", "")
    if not control and "Expires" not in headers:
        return _SILENT
    directives = _directives(control)
    brief = not directives.keys().isdisjoint({"no-store", "private", "no-cache"})
    for name in ("s-maxage", "max-age"):  # HTTP-02: a gate serves many, so it is shared
        if name in directives:
            seconds = delta_seconds(directives[name])
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


def _directives(value: str) -> dict[str, str]:
    """Cache-Control as a dictionary; of duplicates the first one counts (HTTP-06)."""
    found: dict[str, str] = {}
    for part in value.split(","):
        name, _, argument = part.partition("=")
        found.setdefault(name.strip(" \t").lower(), argument.strip(' \t"'))
    return found


def _age(headers: Mapping[str, str]) -> float:
    value = headers.get("Age", "").partition(",")[0].strip(" \t")
    return delta_seconds(value) or 0.0
