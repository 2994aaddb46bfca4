"""What to do while a file can't be had: when to ask again, and what holds meanwhile.

Pure functions. The ladder is that of fetching.md section 1 ("RLAD"); the rules of 12 hours
and 30 days are those of RFC-38, RFC-40 and VND-05 as DESIGN.md section 8 settles them.
"""

from __future__ import annotations

import random
from enum import Enum, auto
from typing import Final

from gatekeeper.config import FetchConfig
from gatekeeper.fetching.outcomes import Kept

__all__ = ["Holds", "holds_meanwhile", "next_try"]

DAY: Final = 86_400.0
HALF_DAY: Final = 43_200.0
MONTH: Final = 30 * DAY

_MINUTES: Final = (1, 2, 4, 8, 15, 30, 60, 120, 240, 360)
_RUNGS: Final = {
    Kept.LADDER: tuple(60.0 * minutes for minutes in _MINUTES),
    Kept.LONG_LADDER: tuple(60.0 * minutes for minutes in (*_MINUTES, 720, 1440)),
    Kept.SLOW_LADDER: tuple(3600.0 * hours for hours in (1, 2, 4, 8, 16, 24)),
    Kept.DAY: (DAY,),
    Kept.SIX_HOURS: (HALF_DAY / 2,),
}
_JITTER: Final = 0.2


def next_try(
    kept: Kept, step: int, rng: random.Random, *, retry_after: float | None = None
) -> float:
    """Seconds until the next attempt; `step` counts the failures in a row, from 0.

    Jittered by 20 % so that two origins never stay in step. A Retry-After replaces the
    rung, up to 24 hours; being a minimum (HTTP-08) it is only ever jittered upwards, and
    it is no shorter than the first rung: an error never speeds us up.
    """
    rungs = _RUNGS[kept]
    if retry_after is not None:
        asked = min(max(retry_after, rungs[0]), DAY)
        return min(asked * rng.uniform(1.0, 1.0 + _JITTER), DAY)
    rung = rungs[min(step, len(rungs) - 1)]
    return rung * rng.uniform(1.0 - _JITTER, 1.0 + _JITTER)


class Holds(Enum):
    """What answers while the file can't be had."""

    NOTHING = auto()
    """Complete disallow (RFC-37), as a deferral."""
    LAST_GOOD = auto()
    """The old copy (RFC-40)."""
    WELCOME = auto()
    """As if there were no file (RFC-38)."""


def holds_meanwhile(
    config: FetchConfig,
    *,
    unreachable_for: float,
    has_last_good: bool,
    page_ok_ago: float | None,
) -> Holds:
    """What answers, after so many seconds without the file.

    `page_ok_ago`: seconds since a page of the origin was last reported 2xx or 3xx, None if
    never. With an old copy: 12 hours of nothing, then the copy (at once with
    `stale_if_unreachable` or the archival profile). Google's profile drops the copy after
    30 days (VND-05), the others keep it. Without one: nothing; after 30 days welcome if the
    site is generally up, and with `unseen_unreachable` as after 12 hours.
    """
    generally_up = page_ok_ago is not None and page_ok_ago <= DAY
    long_gone = unreachable_for >= MONTH
    if has_last_good and not (long_gone and config.profile == "google"):
        at_once = config.stale_if_unreachable or config.profile == "archival"
        return Holds.LAST_GOOD if at_once or unreachable_for >= HALF_DAY else Holds.NOTHING
    if long_gone and generally_up:
        return Holds.WELCOME
    if (
        not has_last_good
        and config.unseen_unreachable == "allow_after_12h"
        and unreachable_for >= HALF_DAY
    ):
        return Holds.WELCOME
    return Holds.NOTHING
