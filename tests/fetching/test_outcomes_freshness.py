"""Lifetimes from response headers."""

from __future__ import annotations

import random
from collections.abc import Mapping
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict

from gatekeeper.config import CacheConfig
from gatekeeper.fetching.outcomes import (
    CacheTime,
    Lifetime,
    age_of,
    fresh_for,
    metadata_of,
    soft_expiry,
)
from gatekeeper.http_fields import parse_http_date, parse_rate_limit, parse_retry_after, wait_of

NOW = datetime(2026, 11, 20, 10, 0, 0, tzinfo=UTC).timestamp()
CACHE = CacheConfig()


def lifetime(headers: Mapping[str, str], now: float) -> Lifetime:
    """Read the lifetime of an answer that is not a 304."""
    return metadata_of(headers, now).lifetime(age_of(headers))


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"Cache-Control": "max-age=60"}, 60),
        ({"Cache-Control": "max-age=60, s-maxage=90"}, 90),
        ({"Cache-Control": 'max-age="60"'}, 60),
        ({"Cache-Control": "MAX-AGE=60"}, 60),
        ({"Cache-Control": "max-age=60, max-age=600"}, 60),
        ({"Cache-Control": "max-age=soon"}, 0),
        ({"Cache-Control": "max-age=-1"}, 0),
        ({"Cache-Control": "max-age=99999999999999999999"}, 2**31),
        ({"Cache-Control": "max-age=600", "Age": "500"}, 100),
        ({"Cache-Control": "max-age=600", "Age": "700"}, 0),
        ({"Cache-Control": "max-age=600", "Age": "old"}, 600),
        ({"Cache-Control": "public"}, None),
        ({"Expires": "Fri, 20 Nov 2026 11:00:00 GMT"}, 3600),
        (
            {
                "Expires": "Fri, 20 Nov 2026 11:00:00 GMT",
                "Date": "Fri, 20 Nov 2026 10:30:00 GMT",
            },
            1800,
        ),
        ({"Expires": "0"}, 0),
        ({"Expires": "Thu, 01 Jan 1970 00:00:00 GMT"}, 0),
        ({"Expires": "Fri, 20 Nov 2026 11:00:00 GMT", "Cache-Control": "max-age=5"}, 5),
    ],
)
def test_a_lifetime_is_read_from_the_headers(
    headers: dict[str, str], seconds: float | None
) -> None:
    assert lifetime(headers, NOW).seconds == seconds


@pytest.mark.parametrize("directive", ["no-store", "private", "no-cache", "max-age=60, No-Store"])
def test_a_file_with_no_store_is_fresh_for_the_minimum_only(directive: str) -> None:
    said = lifetime({"Cache-Control": directive}, NOW)
    assert fresh_for(CacheTime.FRESH, said, CACHE) == 600.0


def test_the_lines_of_a_field_are_one_list() -> None:
    """RFC 9110 section 5.2."""
    headers = CIMultiDict([("Cache-Control", "public"), ("Cache-Control", "no-cache, max-age=60")])
    assert lifetime(headers, NOW) == Lifetime(60.0, brief=True)


@pytest.mark.parametrize(
    ("cache_time", "said", "fresh"),
    [
        (CacheTime.FRESH, None, 86_400),
        (CacheTime.FRESH, 604_800, 86_400),
        (CacheTime.FRESH, 3_600, 3_600),
        (CacheTime.FRESH, 0, 600),
        (CacheTime.DAY, None, 86_400),
        (CacheTime.DAY, 3_600, 3_600),
        (CacheTime.SIX_HOURS, None, 21_600),
        (CacheTime.SIX_HOURS, 86_400, 21_600),
        (CacheTime.SIX_HOURS, 1, 600),
    ],
)
def test_a_lifetime_stays_within_floor_and_cap(
    cache_time: CacheTime, said: float | None, fresh: float
) -> None:
    assert fresh_for(cache_time, Lifetime(said), CACHE) == fresh


def test_soft_expiry_is_before_expiry_and_differs_by_record() -> None:
    rng = random.Random(1)
    moments = {soft_expiry(1000.0, rng) for _ in range(100)}
    assert len(moments) == 100
    assert min(moments) >= 750.0
    assert max(moments) <= 950.0


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("0", 0),
        ("120", 120),
        (" 120\t", 120),
        ("Fri, 20 Nov 2026 10:05:00 GMT", 300),
        ("Friday, 20-Nov-26 10:05:00 GMT", 300),
        ("Fri Nov 20 10:05:00 2026", 300),
        ("Sat Nov  7 10:05:00 2026", 0),
        ("Fri, 20 Nov 2026 09:00:00 GMT", 0),
        ("Mon, 20 Nov 2036 10:00:00 GMT", 315_619_200),
        ("99999999999999999999999", 2**31),
        ("-5", None),
        ("1.5", None),
        ("soon", None),
        ("", None),
        ("１２", None),
        ("Fri, 31 Feb 2026 10:05:00 GMT", None),
        ("Fri, 20 Foo 2026 10:05:00 GMT", None),
        ("Fri, 20 Nov 2026 25:05:00 GMT", None),
        ("2026-11-20T10:05:00Z", None),
    ],
)
def test_each_retry_after_value_is_read_as_expected(value: str, seconds: float | None) -> None:
    assert parse_retry_after(value, NOW) == seconds


def test_a_two_digit_year_far_ahead_lies_in_the_past() -> None:
    assert parse_http_date("Sunday, 06-Nov-94 08:49:37 GMT", NOW) == 784111777.0
    at = parse_http_date("Sunday, 06-Nov-60 08:49:37 GMT", NOW)
    assert at is not None
    assert datetime.fromtimestamp(at, UTC).year == 2060


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ('"default";r=0;t=30', 30),
        ('"default";r=5;t=30', None),
        ('"a";r=0;t=30, "b";r=0;t=90', 90),
        ('"a";r=0;t=30;pk=:Zm9v:', 30),
        ('"a"; r=0; t=30', 30),
        ('"a";t=30', None),
        ("limit=10, remaining=0, reset=30", None),
        ('"a";r=0;t=30,', None),
        ('"a";r=0;t=30 x', None),
        ('"a;r=0;t=30', None),
        ("", None),
    ],
)
def test_a_spent_quota_asks_for_a_wait(value: str, seconds: float | None) -> None:
    assert parse_rate_limit(value) == seconds


def test_retry_after_takes_precedence_over_rate_limit() -> None:
    spent = {"RateLimit": '"default";r=0;t=30'}
    assert wait_of(spent, NOW) == 30
    assert wait_of({**spent, "Retry-After": "90"}, NOW) == 90
    assert wait_of({**spent, "Retry-After": "soon"}, NOW) == 30


def test_a_spent_quota_in_a_cached_answer_is_ignored() -> None:
    """HTTP-11"""
    cached = {"RateLimit": '"default";r=0;t=30', "Age": "0"}
    assert wait_of(cached, NOW) is None
    assert wait_of({**cached, "Retry-After": "90"}, NOW) == 90


@given(st.text(max_size=200))
def test_no_header_value_is_an_error(value: str) -> None:
    parse_retry_after(value, NOW)
    parse_rate_limit(value)
    lifetime({"Cache-Control": value, "Age": value, "Expires": value}, NOW)
