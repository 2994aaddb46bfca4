"""What a site wrote costs no more than its length, value by value (promise 6).

Every field of a robots.txt and every header of a response that is read is grown, with what may
be tried twice by whoever reads it: blanks, commas, digits, dots, quotes, brackets, escapes, at the
start, in the middle, and at the end. Time is processor time, the least of several, and compared
with itself only, so that a busy machine makes nothing of it fail.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from gatekeeper.fetching.outcomes import is_media
from gatekeeper.http_fields import parse_rate_limit, parse_retry_after, quota_rate
from gatekeeper.robots import RobotsTxt, page_signals
from tests.effort import LONG

SIZES = (1_000, 30_000, 500_000) if LONG else (1_000, 60_000)
FASTER = 1.3
"""How much faster than the text its cost may grow."""
FLOOR = 0.03
"""Seconds below which no time is measured: less for 500 kB is nothing to look into. A cost that
is quadratic has seconds there, and hundredths of them at 60 kB."""

VALUES = {
    "allow": "/a*b",
    "disallow": "/a*b$",
    "user-agent": "bot",
    "crawl-delay": "10.5",
    "request-rate": "1/10m 1300-1659",
    "visit-time": "0600-0845",
    "robot-version": "2.0",
    "comment": "hello",
    "content-usage": "/a* train-ai=n, search=y",
    "content-signal": "search=yes, ai-train=no",
    "sitemap": "https://a.example/s.xml",
    "license": "https://a.example/l.xml",
    "host": "a.example",
    "clean-param": "a&b /c",
    "noindex": "/x",
    "unknown": "x",
}
FILLINGS = [
    *(" ", "\t", ",", ", ", "0", "9", ".", '"', "'", "\\", '\\"', "[", "]", "[a", "(", ")", "()"),
    *("%", "%41", "%2f", "%zz", "*", "*a", "?", "?*", "$", "/", "/.", "/..", ":", ";", "; ", ";a"),
    *("=", "a=", ",a", ",a=y", ", a=(b", "<", "<>", "-", "@", "a", "A1b", "é", "#", " #", "&", "|"),
]
HEADERS = {
    "X-Robots-Tag": "bot: noindex, unavailable_after: Fri, 25 Jun 2027 15:00:00 GMT",
    "Robots-Tag": '*;nosnippet, bot;noindex;x="y"',
    "Content-Usage": "train-ai=n, search=y",
    "tdm-reservation": "1",
    "tdm-policy": "https://a.example/p",
    "WWW-Authenticate": 'Basic realm="x", License error="a", scope=b',
    "Crawler-Price": "USD 0.01",
    "Link": '<https://a.example/l.xml>; rel="license"; type="x"',
}
PLACES = ("start", "middle", "end")

pytestmark = pytest.mark.usefixtures("no_collector")


def grown(value: str, filling: str, place: str, size: int) -> str:
    many = filling * (size // len(filling.encode()))
    at = {"start": 0, "middle": len(value) // 2, "end": len(value)}[place]
    return value[:at] + many + value[at:] + ("x" if place == "end" else "")


def read_file(text: str) -> None:
    """All that is ever read of a file."""
    robots = RobotsTxt.parse(text)
    policy = robots.policy("bot")
    policy.match("https://a.example/a/b?c=d")
    policy.content_usage("/a")
    _ = policy.timed, policy.interval, policy.comments, policy.content_signal, robots.sitemaps
    _ = policy.crawl_delay, policy.request_rates
    _ = robots.licenses, robots.hosts, robots.clean_params, robots.extensions, robots.groups
    _ = robots.findings


def least(work: Callable[[], object], times: int = 3) -> float:
    best = float("inf")
    for _ in range(times):
        start = time.process_time()
        work()
        best = min(best, time.process_time() - start)
    return best


def grows_with_the_text(work: Callable[[str], object], make: Callable[[int], str]) -> bool:
    """From 1 kB to the greatest size, in steps: what is not linear is told before it takes
    minutes."""
    smaller, size = make(SIZES[0]), SIZES[0]
    for larger in SIZES[1:]:
        text = make(larger)
        if not _no_faster(work, smaller, text, larger / size * FASTER):
            return False
        smaller, size = text, larger
    return True


def _no_faster(work: Callable[[str], object], small: str, large: str, factor: float) -> bool:
    # Of pairs that are measured side by side, so that what else runs here slows both; what is
    # not linear is so in every pair.
    for _ in range(8):
        taken = least(lambda: work(large), 1)
        if taken <= FLOOR or taken <= factor * least(lambda: work(small), 2):
            return True
    return False


@pytest.mark.parametrize("field", VALUES)
def test_a_long_value_in_a_file_is_read_in_linear_time(field: str) -> None:
    """Grown at its start, in the middle and at its end: a line for each in the same file."""
    head = "" if field == "user-agent" else "user-agent: bot\n"
    version = "robot-version: 2.0\n" if field in {"allow", "disallow"} else ""

    def lines(filling: str, size: int) -> str:
        grow = (grown(VALUES[field], filling, place, size // len(PLACES)) for place in PLACES)
        return head + version + "".join(f"{field}: {value}\n" for value in grow) + "disallow: /x\n"

    slow = [
        filling
        for filling in FILLINGS
        if not grows_with_the_text(read_file, lambda size, filling=filling: lines(filling, size))
    ]
    assert slow == []


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_costs_no_more_than_its_length(name: str) -> None:
    def read(value: str) -> None:
        page_signals({name: value}, "bot", url="https://a.example/")

    slow = [
        (filling, place)
        for filling in FILLINGS
        for place in PLACES
        if not grows_with_the_text(
            read, lambda size, f=filling, p=place: grown(HEADERS[name], f, p, size)
        )
    ]
    assert slow == []


@pytest.mark.parametrize("name", HEADERS)
def test_many_different_rules_in_one_header_are_read_in_linear_time(name: str) -> None:
    """Each is new: what was said before must not be looked at again for each."""
    kinds: list[Callable[[int], str]] = [
        lambda n: f"a{n}",
        lambda n: f"a{n}=y",
        lambda n: f"bot;a{n}",
        lambda n: f"<https://a.example/{n}>;rel=license",
    ]

    def read(value: str) -> None:
        page_signals({name: value}, "bot")

    for kind in kinds:
        assert grows_with_the_text(read, lambda size, k=kind: ",".join(map(k, range(size // 8))))


@pytest.mark.parametrize(
    ("value", "read"),
    [
        ("text/html; charset=utf-8", is_media),
        ("120", lambda text: parse_retry_after(text, 1_700_000_000.0)),
        ("Wed, 21 Oct 2026 07:28:00 GMT", lambda text: parse_retry_after(text, 1_700_000_000.0)),
        ('"burst";q=100;w=60, "day";r=0;t=30', parse_rate_limit),
        ('"burst";q=100;w=60, "day";q=1000;w=86400', quota_rate),
    ],
)
def test_a_header_beside_the_text_costs_no_more_than_its_length(
    value: str, read: Callable[[str], object]
) -> None:
    slow = [
        (filling, place)
        for filling in FILLINGS
        for place in PLACES
        if not grows_with_the_text(read, lambda size, f=filling, p=place: grown(value, f, p, size))
    ]
    assert slow == []
