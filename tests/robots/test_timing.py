"""Crawl-delay, Request-rate and Visit-time: what is read, and what it asks for when."""

from __future__ import annotations

import math
from datetime import UTC, datetime, time, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gatekeeper.client.wire import Timing
from gatekeeper.robots import RobotsTxt
from gatekeeper.robots.timing import (
    MAX_SECONDS,
    RequestRate,
    Window,
    effective_interval,
    may_visit,
    next_visit,
    parse_crawl_delay,
    parse_request_rate,
    parse_visit_time,
)

EARLY = Window(time(6), time(8, 45))
NIGHT = Window(time(22), time(1, 59))
NOON = Window(time(12), time(12, 29))


def at(clock: str, *, day: int = 10) -> datetime:
    return datetime.fromisoformat(f"2026-03-{day:02}T{clock}+00:00")


# --- reading ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("5", 5.0),
        ("2.5", 2.5),
        (".5", 0.5),
        ("5.", 5.0),
        ("0", 0.0),
        ("007", 7.0),
        (" 5\t", 5.0),
        ("9" * 500, MAX_SECONDS),
        ("31536001", MAX_SECONDS),
    ],
)
def test_crawl_delay_is_a_plain_decimal(value: str, seconds: float) -> None:
    assert parse_crawl_delay(value) == seconds


@pytest.mark.parametrize(
    "value",
    [
        "",
        ".",
        "-3",
        "+3",
        "nan",
        "inf",
        "1e3",
        "0x10",
        "1_000",
        "2,5",
        "5 s",
        "5s",
        "5 6",
        "٥",
        "５",
    ],
)
def test_an_invalid_crawl_delay_is_ignored(value: str) -> None:
    assert parse_crawl_delay(value) is None


@pytest.mark.parametrize(
    ("value", "window"),
    [
        ("0600-0845", EARLY),
        ("06:00-08:45", EARLY),
        ("0600-08:45", EARLY),
        ("0600 - 0845", EARLY),
        (" 0600\t-\t0845 ", EARLY),
        ("2200-0159", NIGHT),
        ("0000-2359", Window(time(0), time(23, 59))),
        ("0600-2400", Window(time(6), time(23, 59))),
        ("06:00 - 24:00", Window(time(6), time(23, 59))),
    ],
)
def test_visit_time_is_two_times_of_day(value: str, window: Window) -> None:
    assert parse_visit_time(value) == window


@pytest.mark.parametrize(
    "value",
    [
        *("", "-", "0600", "0600-", "-0845", "2500-0100", "2400-0100", "0060-0100", "600-845"),
        *("0600-2401", "0600-2500", "0600-24000"),
        *("6:00-8:45", "0600 0845", "0600-0845 GMT", "0600-0845-0900", "0600–0845", "٠٦٠٠-٠٨٤٥"),
    ],
)
def test_an_invalid_visit_time_is_ignored(value: str) -> None:
    assert parse_visit_time(value) is None


@pytest.mark.parametrize(
    ("value", "documents", "seconds", "window"),
    [
        ("10/60", 10, 60, None),
        ("10/60s", 10, 60, None),
        ("10/10m", 10, 600, None),
        ("20/1h", 20, 3600, None),
        ("1/1d", 1, 86400, None),
        ("1/30M", 1, 1800, None),
        ("1 / 5", 1, 5, None),
        ("1/10m 0600-0845", 1, 600, EARLY),
        ("1/10 06:00 - 08:45", 1, 10, EARLY),
    ],
)
def test_request_rate_is_documents_over_time(
    value: str, documents: int, seconds: int, window: Window | None
) -> None:
    assert parse_request_rate(value) == RequestRate(documents, seconds, window)


@pytest.mark.parametrize(
    "value",
    [
        *(
            "",
            "/",
            "1",
            "1/",
            "/5",
            "0/60",
            "1/0",
            "-1/5",
            "1/-5",
            "1/5x",
            "1/5w",
            "1.5/5",
            "1/5 x",
        ),
        *("1/5 2500-0100", "1/5 0600", "1/5 0600-0845 x", "٣/٥", "1//5", "1/5ſ"),
    ],
)
def test_an_invalid_request_rate_is_ignored(value: str) -> None:
    assert parse_request_rate(value) is None


@given(st.text(max_size=60))
def test_nothing_a_site_writes_raises_or_gets_out_of_bounds(value: str) -> None:
    delay = parse_crawl_delay(value)
    assert delay is None or 0 <= delay <= MAX_SECONDS
    parse_visit_time(value)
    rate = parse_request_rate(value)
    assert rate is None or 0 < rate.interval <= MAX_SECONDS


def test_an_absurd_rate_is_capped_at_a_year() -> None:
    rate = parse_request_rate("1/999999999999999d")
    assert rate is not None
    assert rate.interval == MAX_SECONDS


# --- windows ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("clock", "inside"),
    [
        ("05:59:59.999999", False),
        ("06:00", True),
        ("08:45", True),
        ("08:45:59.999999", True),
        ("08:46", False),
    ],
)
def test_the_end_minute_belongs_to_a_window(clock: str, inside: bool) -> None:
    assert may_visit([EARLY], at(clock)) is inside


@pytest.mark.parametrize(
    ("clock", "inside"),
    [("21:59", False), ("22:00", True), ("00:00", True), ("01:59:59", True), ("02:00", False)],
)
def test_a_window_may_go_past_midnight(clock: str, inside: bool) -> None:
    assert may_visit([NIGHT], at(clock)) is inside


def test_a_window_of_one_minute_ends_with_that_minute() -> None:
    window = Window(time(7), time(7))
    assert may_visit([window], at("07:00:30"))
    assert not may_visit([window], at("07:01"))


def test_the_windows_of_the_drafts_example_cover_the_day_once() -> None:
    windows = [parse_visit_time(text) for text in ("1300-1659", "1700-0459", "0500-1259")]
    for minute in range(24 * 60):
        moment = at("00:00") + timedelta(minutes=minute, seconds=30)
        assert sum(may_visit([window], moment) for window in windows if window) == 1


def test_several_windows_are_a_union() -> None:
    assert may_visit([NIGHT, NOON], at("23:30"))
    assert may_visit([NIGHT, NOON], at("12:15"))
    assert not may_visit([NIGHT, NOON], at("13:00"))


def test_without_windows_any_time_is_allowed() -> None:
    assert may_visit([], at("03:00"))
    assert next_visit([], at("03:00")) == at("03:00")


@pytest.mark.parametrize(
    ("clock", "opens"),
    [
        ("13:00", at("22:00")),
        ("02:00", at("12:00")),
        ("23:30", at("23:30")),
        ("12:30:00.5", at("22:00")),
    ],
)
def test_next_visit_is_the_first_opening(clock: str, opens: datetime) -> None:
    assert next_visit([NIGHT, NOON], at(clock)) == opens


def test_next_visit_may_be_tomorrow() -> None:
    assert next_visit([EARLY], at("08:46", day=10)) == at("06:00", day=11)


@given(
    st.lists(st.builds(Window, st.times(), st.times()), min_size=1, max_size=4),
    st.datetimes(min_value=datetime(2000, 1, 1), max_value=datetime(2100, 1, 1)),
)
def test_no_time_before_next_visit_is_inside_a_window(
    windows: list[Window], naive: datetime
) -> None:
    windows = [
        Window(w.start.replace(second=0, microsecond=0), w.end.replace(second=0, microsecond=0))
        for w in windows
    ]
    now = naive.replace(tzinfo=UTC)
    opens = next_visit(windows, now)
    assert now <= opens < now + timedelta(days=1)
    assert may_visit(windows, opens)
    if opens > now:
        assert not may_visit(windows, now)
        assert not may_visit(windows, opens - timedelta(microseconds=1))


def test_moments_of_any_zone_are_read_as_utc() -> None:
    tokyo = timezone(timedelta(hours=9))
    moment = datetime(2026, 3, 10, 15, 30, tzinfo=tokyo)  # 06:30 UTC
    assert may_visit([EARLY], moment)
    assert next_visit([EARLY], moment).tzinfo is UTC


def test_a_moment_without_a_zone_is_refused() -> None:
    naive = datetime(2026, 3, 10, 6)
    for ask in (
        lambda: may_visit([], naive),
        lambda: next_visit([], naive),
        lambda: effective_interval(None, [], rule_of_thumb=False, at=naive),
    ):
        with pytest.raises(ValueError, match="time zone"):
            ask()


# --- the interval ----------------------------------------------------------------------

NOW = at("03:00")
_MINUTELY = RequestRate(1, 60)
_SLOW_MORNING = RequestRate(1, 600, Window(time(0), time(5, 59)))
_FAST_MORNING = RequestRate(1, 10, Window(time(0), time(5, 59)))


@pytest.mark.parametrize(
    ("rates", "clock", "seconds"),
    [
        ([RequestRate(10, 60), RequestRate(1, 300), RequestRate(100, 3600)], "03:00", 300.0),
        ([_MINUTELY, _FAST_MORNING], "03:00", 10.0),
        ([_MINUTELY, _FAST_MORNING], "12:00", 60.0),
        ([_FAST_MORNING, _SLOW_MORNING], "03:00", 600.0),
        ([_FAST_MORNING], "12:00", None),
        ([], "12:00", None),
    ],
)
def test_the_rate_in_force_is_the_slowest_of_its_kind(
    rates: list[RequestRate], clock: str, seconds: float | None
) -> None:
    assert effective_interval(None, rates, rule_of_thumb=False, at=at(clock)) == seconds


@pytest.mark.parametrize(("delay", "seconds"), [(5.0, 60.0), (90.0, 90.0), (0.0, 60.0)])
def test_of_a_rate_and_a_delay_the_slower_counts(delay: float, seconds: float) -> None:
    assert effective_interval(delay, [_MINUTELY], rule_of_thumb=True, at=NOW) == seconds


@pytest.mark.parametrize(("took", "seconds"), [(None, 10.0), (1.0, 10.0), (7.5, 15.0)])
def test_the_rule_of_thumb_holds_where_the_file_has_no_timing(
    took: float | None, seconds: float
) -> None:
    assert effective_interval(None, [], rule_of_thumb=True, at=NOW, took=took) == seconds


def test_the_rule_of_thumb_is_ignored_where_the_file_has_timing() -> None:
    assert effective_interval(1.0, [], rule_of_thumb=True, at=NOW, took=60.0) == 1.0


def test_windows_and_rates_print_as_written_and_hash_by_value() -> None:
    assert str(NIGHT) == "2200-0159"
    assert str(RequestRate(1, 600, NOON)) == "1/600s 1200-1229 UTC"
    assert math.isclose(RequestRate(3, 2).interval, 2 / 3)
    assert hash(RequestRate(1, 2, NOON)) == hash(RequestRate(1, 2, Window(time(12), time(12, 29))))


# --- more of them than anybody writes -----------------------------------------------------


def test_of_too_many_windows_the_first_count() -> None:
    lines = [f"Visit-time: {n // 60:02}{n % 60:02}-{n // 60:02}{n % 60:02}" for n in range(200)]
    policy = RobotsTxt.parse("\n".join(["User-agent: *", *lines])).policy("bot")
    assert [str(window) for window in policy.visit_times] == [line[12:] for line in lines[:100]]
    assert policy.next_visit(at("12:00")) == at("00:00", day=11)


def test_of_too_many_rates_the_slowest_holds_at_all_hours() -> None:
    lines = [f"Request-rate: 1/{n + 1} 0100-0159" for n in range(200)]
    policy = RobotsTxt.parse("\n".join(["User-agent: *", *lines])).policy("bot")
    assert policy.request_rates == (RequestRate(1, 200),)
    assert policy.interval(at("12:00")) == 200.0
    assert policy.interval_source(at("12:00")) == (
        "request-rate 1/200s, that is 200 s, from robots.txt"
    )


def test_equal_values_are_listed_once() -> None:
    lines = ["Request-rate: 1/10", "Visit-time: 0600-0845"] * 200
    policy = RobotsTxt.parse("\n".join(["User-agent: *", *lines])).policy("bot")
    assert policy.request_rates == (RequestRate(1, 10),)
    assert policy.visit_times == (EARLY,)


def test_timing_on_the_wire_has_the_hours_of_a_rate() -> None:
    text = "User-agent: *\nRequest-rate: 1/10m 1200-1229\nRequest-rate: 10/60\n"
    timing = Timing.of(RobotsTxt.parse(text).policy("bot"))
    assert timing.request_rates == ["1/600s 1200-1229 UTC", "10/60s"]
