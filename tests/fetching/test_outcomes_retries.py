"""When to retry after failures, and what applies meanwhile."""

from __future__ import annotations

import random

import pytest

from gatekeeper.config import FetchConfig
from gatekeeper.fetching.outcomes import Holds, Kept, holds_meanwhile, next_try

HOUR = 3600.0
DAY = 86_400.0


class Middle(random.Random):
    """Jitter that is always in the middle."""

    def uniform(self, a: float, b: float) -> float:
        return (a + b) / 2


def test_the_ladder_grows_to_six_hours() -> None:
    minutes = [next_try(Kept.LADDER, step, Middle()) / 60 for step in range(12)]
    assert minutes == [1, 2, 4, 8, 15, 30, 60, 120, 240, 360, 360, 360]


def test_a_name_that_does_not_exist_is_asked_for_seldom() -> None:
    hours = [next_try(Kept.SLOW_LADDER, step, Middle()) / HOUR for step in range(7)]
    assert hours == [1, 2, 4, 8, 16, 24, 24]


def test_a_bad_certificate_is_tried_again_up_to_a_day_apart() -> None:
    assert next_try(Kept.LONG_LADDER, 99, Middle()) == DAY


def test_two_origins_never_stay_in_step() -> None:
    rng = random.Random(3)
    pauses = {next_try(Kept.LADDER, 4, rng) for _ in range(50)}
    assert len(pauses) == 50
    assert min(pauses) >= 0.8 * 900
    assert max(pauses) <= 1.2 * 900


@pytest.mark.parametrize(
    ("asked", "given"),
    [(600.0, 600.0), (10 * 365 * DAY, DAY), (DAY, DAY), (0.0, 60.0), (-1.0, 60.0)],
)
def test_retry_after_overrides_the_rung(asked: float, given: float) -> None:
    """Callers are told the moment that the site names, without jitter."""
    assert next_try(Kept.LADDER, 3, random.Random(5), retry_after=asked) == given


def meanwhile(
    hours: float,
    *,
    good: bool = True,
    page_ok_ago: float | None = None,
    config: FetchConfig = FetchConfig(),  # noqa: B008 - frozen
) -> Holds:
    return holds_meanwhile(
        config, unreachable_for=hours * HOUR, has_last_good=good, page_ok_ago=page_ok_ago
    )


STRICT = FetchConfig()
GOOGLE = FetchConfig(profile="google")
ARCHIVAL = FetchConfig(profile="archival")
AT_ONCE = FetchConfig(stale_if_unreachable=True)
UNSEEN = FetchConfig(unseen_unreachable="allow_after_12h")
MONTH = 30 * 24.0


@pytest.mark.parametrize(
    ("config", "hours", "good", "page_ok_ago", "holds"),
    [
        # With an old copy: 12 hours of nothing, then the copy.
        (STRICT, 0, True, None, Holds.NOTHING),
        (STRICT, 11.9, True, None, Holds.NOTHING),
        (STRICT, 12, True, None, Holds.LAST_GOOD),
        (STRICT, MONTH + 1, True, None, Holds.LAST_GOOD),
        (AT_ONCE, 0, True, None, Holds.LAST_GOOD),
        (ARCHIVAL, 0, True, None, Holds.LAST_GOOD),
        (GOOGLE, 11.9, True, None, Holds.NOTHING),
        (GOOGLE, 12, True, None, Holds.LAST_GOOD),
        (GOOGLE, MONTH, True, None, Holds.NOTHING),
        (GOOGLE, MONTH, True, 60.0, Holds.WELCOME),
        # Without one: nothing, until a month has passed and the site is generally up.
        (STRICT, 12, False, 60.0, Holds.NOTHING),
        (STRICT, MONTH - 0.1, False, 60.0, Holds.NOTHING),
        (STRICT, MONTH, False, None, Holds.NOTHING),
        (STRICT, MONTH, False, DAY + 1, Holds.NOTHING),
        (STRICT, MONTH, False, DAY, Holds.WELCOME),
        (GOOGLE, 12, False, None, Holds.NOTHING),
        (UNSEEN, 11.9, False, None, Holds.NOTHING),
        (UNSEEN, 12, False, None, Holds.WELCOME),
        (UNSEEN, 1, True, None, Holds.NOTHING),
    ],
)
def test_what_holds_during_an_outage(
    config: FetchConfig, hours: float, good: bool, page_ok_ago: float | None, holds: Holds
) -> None:
    assert meanwhile(hours, good=good, page_ok_ago=page_ok_ago, config=config) is holds
