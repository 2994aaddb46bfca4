"""What a response says about waiting, read as the standards say."""

from __future__ import annotations

import pytest

from gatekeeper.http_fields import QuotaRate, parse_http_date, parse_retry_after, quota_rate

NOON = 784_111_777.0  # Sun, 06 Nov 1994 08:49:37 GMT


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("120", 120.0),
        (" 0 ", 0.0),
        (30, 30.0),
        (2.5, 2.5),
        ("-1", None),
        ("1.5", None),
        ("soon", None),
        ("", None),
        (None, None),
        (-3.0, None),
        (float("nan"), None),
        (float("inf"), float(2**31)),
        (10**400, float(2**31)),  # no float is so large
        ("\u0661\u0662", None),  # digits, but not ASCII ones
        ("9" * 400, float(2**31)),
        ("Sun, 06 Nov 1994 08:50:37 GMT", 60.0),
        ("Sunday, 06-Nov-94 08:50:37 GMT", 60.0),
        ("Sun Nov  6 08:50:37 1994", 60.0),
        ("Sun, 06 Nov 1994 08:00:00 GMT", 0.0),  # in the past
        ("Sun, 06 Nov 1994 08:50:37 CET", None),
        ("Sun, 31 Feb 1994 08:50:37 GMT", None),
    ],
)
def test_each_retry_after_value_is_read_as_expected(
    value: str | float | None, seconds: float | None
) -> None:
    assert parse_retry_after(value, NOON) == seconds


def test_two_digits_more_than_fifty_years_ahead_are_in_the_past() -> None:
    y2026 = 1_790_000_000.0
    assert parse_http_date("Sunday, 06-Nov-94 08:49:37 GMT", y2026) == NOON
    near = parse_http_date("Friday, 06-Nov-60 08:49:37 GMT", y2026)
    assert near is not None
    assert near > y2026


@pytest.mark.parametrize(
    ("value", "rate"),
    [
        ('"burst";r=0;t=30', QuotaRate(30.0, 30.0)),
        ('"day";r=10;t=100', QuotaRate(10.0, 100.0)),
        ('"a";r=50;t=30, "b";r=1;t=60', QuotaRate(60.0, 60.0)),  # the slowest
        ('"a";r=50', None),
        ('"a";pk=:YWJj:;r=1;t=5', QuotaRate(5.0, 5.0)),
        ("limit=100, remaining=50", None),  # an older draft: raw only
        ('"a";r=x;t=1, "b"', None),
        ('"a";r=1;t=1,', None),  # malformed: ignored as a whole
        ('"a;r=1;t=1', None),
        ("", None),
        (None, None),
        ('"a";r=1;t=1' + " " * 3000, None),
    ],
)
def test_each_rate_limit_value_is_read_as_expected(
    value: str | None, rate: QuotaRate | None
) -> None:
    assert quota_rate(value) == rate
