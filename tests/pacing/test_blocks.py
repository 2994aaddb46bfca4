from __future__ import annotations

import random

import pytest

from gatekeeper.config import PacingConfig
from gatekeeper.pacing.scopes import RequestReport, ScopeHistory

PACING = PacingConfig(backoff_jitter=0.0)


def tell(
    history: ScopeHistory,
    status: int | None,
    now: float = 0.0,
    *,
    retry_after: float | None = None,
    sent_before_refusal: bool = False,
) -> bool:
    report = RequestReport(status, 0.1, retry_after, sent_before_refusal=sent_before_refusal)
    return history.observe(report, now, 1.0, PACING, random.Random(5))


@pytest.mark.parametrize("status", [429, 503])
def test_a_refusal_blocks_for_a_minute(status: int) -> None:
    history = ScopeHistory()
    assert tell(history, status, 100.0)
    assert history.blocked_until == 160.0


def test_retry_after_is_obeyed_as_it_stands() -> None:
    history = ScopeHistory()
    tell(history, 429, 100.0, retry_after=120.0)
    assert history.blocked_until == 220.0
    assert history.reason == "429, Retry-After 120"


@pytest.mark.parametrize(
    ("status", "blocks"), [(301, True), (413, True), (None, True), (200, False)]
)
def test_retry_after_means_something_with_refusals_only(status: int | None, blocks: bool) -> None:
    assert tell(ScopeHistory(), status, retry_after=30.0) is blocks


def test_back_off_doubles_up_to_a_day() -> None:
    history, now, waits = ScopeHistory(), 0.0, []
    for _ in range(13):
        tell(history, 503, now)
        waits.append(history.blocked_until - now)
        now = history.blocked_until
    assert waits[:4] == [60.0, 120.0, 240.0, 480.0]
    assert waits[-1] == 86_400.0


def test_jitter_never_shortens_a_back_off() -> None:
    pacing = PacingConfig(backoff_jitter=0.2)
    for seed in range(50):
        history = ScopeHistory()
        history.observe(RequestReport(503), 0.0, 1.0, pacing, random.Random(seed))
        assert 60.0 <= history.blocked_until <= 72.0


def test_thirty_minutes_without_an_error_after_a_block_reset_the_back_off() -> None:
    history = ScopeHistory()
    for _ in range(3):
        tell(history, 503, max(0.0, history.blocked_until))
    end = history.blocked_until
    tell(history, 503, end + 1799.0)
    assert history.failures == 4
    tell(history, 503, history.blocked_until + 1800.0)
    assert history.failures == 1


def test_an_earlier_end_never_shortens_a_block() -> None:
    history = ScopeHistory()
    tell(history, 429, 0.0, retry_after=500.0)
    tell(history, 429, 1.0, retry_after=5.0)
    assert history.blocked_until == 500.0
    assert history.reason == "429, Retry-After 500"


def test_a_host_is_probed_after_a_block_until_a_success() -> None:
    history = ScopeHistory()
    tell(history, 503)
    tell(history, 404, 100.0)
    assert history.probing
    tell(history, 200, 101.0)
    assert not history.probing


def test_an_answer_that_was_under_way_does_not_end_the_probe() -> None:
    history = ScopeHistory()
    tell(history, 503)
    tell(history, 200, 1.0, sent_before_refusal=True)
    assert history.probing


def test_refusals_that_were_under_way_together_are_one_failure() -> None:
    history = ScopeHistory()
    tell(history, 503)
    for _ in range(9):
        tell(history, 503, 1.0, sent_before_refusal=True)
    assert (history.failures, history.refusals) == (1, 1)
    assert history.blocked_until == 61.0


def test_a_success_alone_leaves_nothing_to_store() -> None:
    history = ScopeHistory()
    tell(history, 200)
    assert not history.matters(0.0, PACING)


def test_an_address_is_blocked_when_two_of_its_hosts_refuse() -> None:
    history = ScopeHistory()
    assert not history.is_second_refused("a")
    assert not history.is_second_refused("a")
    assert history.is_second_refused("b")
