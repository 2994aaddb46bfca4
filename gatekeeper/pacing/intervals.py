"""How long to wait between two requests of a scope, and why: pure functions.

Four voices are heard: the site's text (`Wish`), the operator (`Settings`), what the host
has shown and said (`History`), and nothing at all (the default). The largest wins; jitter
only adds. Every part keeps its source, so that `why()` can print it.
"""

from __future__ import annotations

import random

import msgspec

from gatekeeper.config import PacingConfig
from gatekeeper.pacing.blocks import History

__all__ = [
    "LONGEST",
    "NO_RATE",
    "REFUSED",
    "UNKNOWN",
    "Interval",
    "Settings",
    "Wish",
    "interval_for",
    "jittered",
]

LONGEST = 10 * 366 * 86_400.0
"""Ten years: no wish of a site is obeyed for longer than a datetime can say."""


class Wish(msgspec.Struct, frozen=True, gc=False):
    """What the site's text asks for at this moment.

    `seconds` is None where the text gives no rate; `source` is the whole sentence that
    `why()` prints, such as "crawl-delay 10 s from robots.txt line 7".
    """

    seconds: float | None = None
    source: str = "robots.txt gives no rate"


NO_RATE = Wish()
UNKNOWN = Wish(None, "robots.txt is not known yet")
"""Until it could be had nobody knows what the host asks for: the default is a guess."""
REFUSED = "after a refusal"
"""The source of the part that a `BackOff` brings; `why` says more of it."""


class Settings(msgspec.Struct, frozen=True, eq=False):
    """The operator's word about one kind of scope; shared by all scopes of the kind."""

    default: float = 1.0
    """Seconds where the text gives no rate."""
    default_source: str = "default"
    floor: float = 0.0
    cap: float | None = None
    own: float | None = None
    """Seconds set for these very hosts; takes the default's place, and is a floor."""
    own_source: str = ""
    limit: int = 1
    """Requests in flight at once."""


class Interval(msgspec.Struct, frozen=True):
    """The least time between two requests of a scope.

    >>> interval_for(Wish(10.0, "crawl-delay 10 s from robots.txt line 7"), Settings()).seconds
    10.0
    """

    seconds: float
    parts: tuple[tuple[float, str], ...] = ()
    """Every voice that was heard: its seconds and its source."""
    clamped: bool = False
    """The operator's cap made it shorter than the site asks."""
    usual: float = 0.0
    """Seconds without what refusals, errors and a RateLimit field add to it."""

    @property
    def source(self) -> str:
        """The part that decided."""
        return max(self.parts, key=lambda part: part[0])[1] if self.parts else ""


def interval_for(
    wish: Wish,
    settings: Settings,
    history: History | None = None,
    pacing: PacingConfig | None = None,
    now: float = 0.0,
) -> Interval:
    """The largest of what site, operator and history ask for; `now` is monotonic seconds."""
    parts: list[tuple[float, str]] = []
    clamped = False
    asked = wish.seconds
    if asked is not None and asked >= 0:  # a NaN is no wish
        asked = min(asked, LONGEST)
        if settings.cap is not None and asked > settings.cap:
            # Only by the operator's explicit setting, and flagged (fetching.md section 5).
            parts.append((settings.cap, f"{wish.source}, capped at {settings.cap:g} s"))
            clamped = True
        else:
            parts.append((asked, wish.source))
    elif settings.own is None:
        parts.append((settings.default, f"{settings.default_source} {settings.default:g} s"))
    if settings.own is not None:
        parts.append((settings.own, settings.own_source))
    if settings.floor > 0:
        parts.append((settings.floor, f"pacing.min_interval {settings.floor:g} s"))
    if history is None or pacing is None:
        usual = max(part[0] for part in parts)
        return Interval(usual, tuple(parts), clamped, usual)
    if pacing.latency_factor > 0 and history.latency is not None:
        slow = pacing.latency_factor * history.latency
        slow = max(pacing.latency_floor, min(slow, pacing.latency_cap))
        parts.append((slow, f"latency {history.latency:.3g} s x {pacing.latency_factor:g}"))
    usual = max(part[0] for part in parts)
    parts.extend(_for_now(history, usual, pacing, now))
    return Interval(max(part[0] for part in parts), tuple(parts), clamped, usual)


def _for_now(
    history: History, usual: float, pacing: PacingConfig, now: float
) -> list[tuple[float, str]]:
    """What the host's answers ask for until further notice: refusals, errors, RateLimit."""
    parts: list[tuple[float, str]] = []
    if history.back_off is not None:
        slowed = history.back_off.in_force(usual, now, pacing)
        if slowed > usual:
            parts.append((slowed, REFUSED))
    if (pause := history.error_pause()) > 0:
        parts.append((pause, f"{history.errors} errors in a row"))
    if history.said > 0 and now < history.said_until:
        parts.append((history.said, f"RateLimit field: one in {history.said:.3g} s"))
    return parts


def jittered(seconds: float, share: float, rng: random.Random) -> float:
    """`seconds` and up to that share more; never less than was promised."""
    return seconds * (1.0 + share * rng.random()) if share > 0 else seconds
