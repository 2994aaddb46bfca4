"""When to retry after failures, and what applies meanwhile."""

from __future__ import annotations

import random

import pytest

from gatekeeper.config import FetchConfig
from gatekeeper.fetching.outcomes import CacheTime, Fallback, fallback_while_unreachable, next_try

HOUR = 3600.0
DAY = 86_400.0


class Middle(random.Random):
    """Jitter that is always in the middle."""

    def uniform(self, a: float, b: float) -> float:
        return (a + b) / 2


def test_retry_delays_grow_to_six_hours() -> None:
    minutes = [next_try(CacheTime.LADDER, step, Middle()) / 60 for step in range(12)]
    assert minutes == [1, 2, 4, 8, 15, 30, 60, 120, 240, 360, 360, 360]


def test_a_name_that_does_not_exist_is_asked_for_seldom() -> None:
    hours = [next_try(CacheTime.SLOW_LADDER, step, Middle()) / HOUR for step in range(7)]
    assert hours == [1, 2, 4, 8, 16, 24, 24]


def test_retries_after_a_bad_certificate_are_up_to_a_day_apart() -> None:
    assert next_try(CacheTime.LONG_LADDER, 99, Middle()) == DAY


def test_retry_delays_have_jitter() -> None:
    rng = random.Random(3)
    pauses = {next_try(CacheTime.LADDER, 4, rng) for _ in range(50)}
    assert len(pauses) == 50
    assert min(pauses) >= 0.8 * 900
    assert max(pauses) <= 1.2 * 900


@pytest.mark.parametrize(
    ("asked", "given"),
    [(600.0, 600.0), (10 * 365 * DAY, DAY), (DAY, DAY), (0.0, 60.0), (-1.0, 60.0)],
)
def test_retry_after_replaces_the_retry_delay(asked: float, given: float) -> None:
    """Callers are told the moment that the site names, without jitter."""
    assert next_try(CacheTime.LADDER, 3, random.Random(5), retry_after=asked) == given


def meanwhile(
    hours: float,
    *,
    good: bool = True,
    page_ok_ago: float | None = None,
    config: FetchConfig = FetchConfig(),  # noqa: B008 - frozen
) -> Fallback:
    return fallback_while_unreachable(
        config, unreachable_for=hours * HOUR, has_last_good=good, page_ok_ago=page_ok_ago
    )


STRICT = FetchConfig()
GOOGLE = FetchConfig(profile="google")
ARCHIVAL = FetchConfig(profile="archival")
AT_ONCE = FetchConfig(stale_if_unreachable=True)
UNSEEN = FetchConfig(unseen_unreachable="allow_after_12h")
MONTH = 30 * 24.0


@pytest.mark.parametrize(
    ("config", "hours", "good", "page_ok_ago", "fallback"),
    [
        # With an old copy: 12 hours of nothing, then the copy.
        (STRICT, 0, True, None, Fallback.NOTHING),
        (STRICT, 11.9, True, None, Fallback.NOTHING),
        (STRICT, 12, True, None, Fallback.LAST_GOOD),
        (STRICT, MONTH + 1, True, None, Fallback.LAST_GOOD),
        (AT_ONCE, 0, True, None, Fallback.LAST_GOOD),
        (ARCHIVAL, 0, True, None, Fallback.LAST_GOOD),
        (GOOGLE, 11.9, True, None, Fallback.NOTHING),
        (GOOGLE, 12, True, None, Fallback.LAST_GOOD),
        (GOOGLE, MONTH, True, None, Fallback.NOTHING),
        (GOOGLE, MONTH, True, 60.0, Fallback.ALLOW_ALL),
        # Without one: nothing, until a month has passed and the site is generally up.
        (STRICT, 12, False, 60.0, Fallback.NOTHING),
        (STRICT, MONTH - 0.1, False, 60.0, Fallback.NOTHING),
        (STRICT, MONTH, False, None, Fallback.NOTHING),
        (STRICT, MONTH, False, DAY + 1, Fallback.NOTHING),
        (STRICT, MONTH, False, DAY, Fallback.ALLOW_ALL),
        (GOOGLE, 12, False, None, Fallback.NOTHING),
        (UNSEEN, 11.9, False, None, Fallback.NOTHING),
        (UNSEEN, 12, False, None, Fallback.ALLOW_ALL),
        (UNSEEN, 1, True, None, Fallback.NOTHING),
    ],
)
def test_during_an_outage_the_copy_or_the_policy_holds_by_age(
    config: FetchConfig, hours: float, good: bool, page_ok_ago: float | None, fallback: Fallback
) -> None:
    assert meanwhile(hours, good=good, page_ok_ago=page_ok_ago, config=config) is fallback
