from __future__ import annotations

import random

import pytest

from gatekeeper.config import PacingConfig
from gatekeeper.pacing.host_settings import ScopeSettings
from gatekeeper.pacing.scopes import LONGEST, RequestReport, ScopeHistory, interval_for, jittered
from gatekeeper.robots.timing import RobotsInterval

TEXT = "crawl-delay 10 s from robots.txt line 7"
PACING = PacingConfig(latency_factor=5.0, latency_cap=20.0, latency_floor=0.2)


@pytest.mark.parametrize(
    ("wish", "settings", "seconds"),
    [
        (RobotsInterval(None), ScopeSettings(), 1.0),  # no rate given: the default
        (
            RobotsInterval(0.5, "x"),
            ScopeSettings(),
            0.5,
        ),  # the file's own rate, though it is shorter
        (RobotsInterval(0.0, "x"), ScopeSettings(), 0.0),
        (RobotsInterval(10.0, TEXT), ScopeSettings(), 10.0),
        (RobotsInterval(0.5, "x"), ScopeSettings(floor=2.0), 2.0),  # the operator's floor
        (RobotsInterval(None), ScopeSettings(own=0.1), 0.1),  # replaces the default
        (
            RobotsInterval(10.0, TEXT),
            ScopeSettings(own=0.1),
            10.0,
        ),  # never shorter than the site asks
        (RobotsInterval(1.0, "x"), ScopeSettings(own=3.0), 3.0),
        (
            RobotsInterval(7200.0, "x"),
            ScopeSettings(),
            7200.0,
        ),  # Any delay is honoured.
        (RobotsInterval(float("inf"), "x"), ScopeSettings(), LONGEST),
        (RobotsInterval(float("nan"), "x"), ScopeSettings(), 1.0),
    ],
)
def test_the_longest_interval_of_all_sources_holds(
    wish: RobotsInterval, settings: ScopeSettings, seconds: float
) -> None:
    assert interval_for(wish, settings).seconds == seconds


def test_a_capped_interval_says_so() -> None:
    found = interval_for(RobotsInterval(7200.0, "crawl-delay 7200 s"), ScopeSettings(cap=3600.0))
    assert found.seconds == 3600.0
    assert found.clamped
    assert found.source == "crawl-delay 7200 s, capped at 3600 s"


def test_every_part_of_an_interval_names_its_source() -> None:
    found = interval_for(RobotsInterval(10.0, TEXT), ScopeSettings(floor=2.0))
    assert found.parts == ((10.0, TEXT), (2.0, "pacing.min_interval 2 s"))
    assert found.source == TEXT


def test_jitter_lengthens_an_interval_and_never_shortens_it() -> None:
    rng = random.Random(3)
    drawn = [jittered(2.0, 0.5, rng) for _ in range(200)]
    assert min(drawn) >= 2.0
    assert max(drawn) <= 3.0
    assert jittered(2.0, 0.0, rng) == 2.0


def seen(*reports: RequestReport) -> ScopeHistory:
    history = ScopeHistory()
    for report in reports:
        history.observe(report, 0.0, 1.0, PACING, random.Random(1))
    return history


def seconds(history: ScopeHistory, now: float = 0.0) -> float:
    return interval_for(RobotsInterval(0.0, "x"), ScopeSettings(), history, PACING, now).seconds


def test_latency_slows_within_its_floor_and_cap() -> None:
    assert seconds(seen(RequestReport(200, 2.0))) == 10.0
    assert seconds(seen(RequestReport(200, 0.001))) == 0.2
    assert seconds(seen(RequestReport(200, 60.0))) == 20.0


@pytest.mark.parametrize("elapsed", [float("inf"), 1e300, float("nan"), -1.0])
def test_a_time_that_no_response_takes_spoils_no_average(elapsed: float) -> None:
    normal = [RequestReport(200, 2.0)] * 100
    assert seconds(seen(RequestReport(200, elapsed), *normal)) == pytest.approx(10.0, abs=0.001)
    assert seconds(seen(*normal, RequestReport(200, elapsed), *normal)) == pytest.approx(
        10.0, abs=0.001
    )


def test_only_a_success_may_lower_the_latency() -> None:
    slow = RequestReport(200, 2.0)
    assert seconds(seen(slow, RequestReport(404, 0.01))) == 10.0
    assert seconds(seen(slow, RequestReport(200, 0.01))) < 10.0
    assert seconds(seen(slow, RequestReport(500, 4.0))) > 10.0


def test_errors_in_a_row_slow_a_host_and_one_success_resets_them() -> None:
    errors = [RequestReport(500)] * 5
    assert seconds(seen(*errors)) == 4.0
    assert seconds(seen(*errors[:2])) == 0.0
    assert seconds(seen(*errors, RequestReport(200))) == 0.0


OK = RequestReport(200)


def lost(*urls: int) -> list[RequestReport]:
    return [RequestReport(None, 1.0, url_hash=url) for url in urls]


def test_a_page_that_keeps_failing_while_its_host_answers_does_not_slow_it() -> None:
    pages = lost(1, 2, 3)
    for answer in (OK, RequestReport(200, url_hash=4), RequestReport(404, url_hash=4)):
        before = seen(*pages, answer)
        assert seen(*pages, answer, *pages * 20).errors == before.errors
    assert seen(*pages, OK, *lost(4, 5, 1, 2, 3)).errors == 2  # a first failure counts


@pytest.mark.parametrize(
    "answers",
    [
        [],  # it never answered
        [OK],  # it answered before the first failure
        [*lost(1), RequestReport(200, url_hash=1)],  # the page itself came since
        [*lost(1), RequestReport(500, url_hash=4)],  # a server's error shows no health
        [*lost(1), RequestReport(503, url_hash=4)],
        [*lost(1), RequestReport(429, url_hash=4)],
        [*lost(1), RequestReport()],  # nothing is known
    ],
)
@pytest.mark.parametrize("urls", [[1] * 12, [1, 2, 3] * 4])
def test_a_host_that_stopped_answering_backs_off_whatever_is_requested(
    answers: list[RequestReport], urls: list[int]
) -> None:
    assert seen(*answers, *lost(*urls)).error_pause() >= 60.0


def test_for_half_an_hour_after_an_answer_a_failing_page_does_not_slow_its_host() -> None:
    history = seen(*lost(1), OK)
    for now, errors in ((1799.0, 0), (1801.0, 1), (1802.0, 2), (1803.0, 3)):
        assert history.matters(now, PACING) is (now < 1800.0 or errors > 1)
        history.observe(lost(1)[0], now, 1.0, PACING, random.Random(1))
        assert history.errors == errors


def test_few_failed_urls_are_remembered_and_server_errors_of_a_page_count() -> None:
    history = seen(*lost(*range(1000)))
    assert len(history.failed_urls or ()) == 64
    assert history.errors == 1000
    assert seen(*lost(1), OK, *[RequestReport(500, url_hash=1)] * 5).errors == 5
    assert seen(OK, RequestReport(500)).failed_urls is None


def test_a_rate_limit_field_slows_while_it_lasts() -> None:
    history = seen(RequestReport(200, spread=5.0, spread_for=30.0))
    assert seconds(history, now=29.0) == 5.0
    assert seconds(history, now=31.0) == 0.0
