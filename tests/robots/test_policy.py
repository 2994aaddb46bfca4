"""What a policy answers, and how it explains itself."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import pytest

from gatekeeper.errors import InvalidURL
from gatekeeper.robots import Policy, RobotsTxt

TEXT = """\
User-agent: *
Disallow: /shop/      # all of it
  ALLOW : /shop/open
Disallow: /*.gif$
"""
NOON = datetime(2026, 1, 5, 12, tzinfo=UTC)


@pytest.fixture
def policy() -> Policy:
    return RobotsTxt.parse(TEXT).policy("bot")


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        ("https://example.com/shop/x", False),
        ("https://EXAMPLE.com:443/shop/x", False),
        ("https://example.com/a/../shop/x", False),
        ("https://example.com/a/%2e%2e/shop/x", False),
        ("https://example.com/.well-known/x", True),
        ("https://example.com/x.gif#top", False),
        ("https://example.com/x.gif?y", True),
        ("https://example.com", True),
        ("https://example.com?/shop/", True),
        ("/shop/x", False),
        ("/a/../shop/x", False),
        ("/x.gif#top", False),
        ("/sh%6Fp/x", False),
        ("/", True),
    ],
)
def test_whole_urls_and_paths_have_one_answer_however_often_asked(
    policy: Policy, url: str, allowed: bool
) -> None:
    for _ in range(3):  # the first from the text, the second made ready, the third by memory
        assert policy.allowed(url) is allowed
    assert policy.match(url).allowed is allowed


def test_memory_of_one_host_does_not_leak_into_another(policy: Policy) -> None:
    for _ in range(2):
        assert not policy.allowed("https://example.com/shop/x")
        assert not policy.allowed("https://example.com.evil.example/shop/x")
        assert policy.allowed("https://example.com.evil.example/x")
        assert not policy.allowed("/shop/x")


def test_text_that_is_no_url_is_refused_every_time(policy: Policy) -> None:
    assert policy.allowed("https://example.com/a")
    for url in ("https://example.com/a\nb", "nonsense", ""):
        with pytest.raises(InvalidURL):
            policy.allowed(url)


def test_rule_is_quoted_as_it_stands(policy: Policy) -> None:
    rule = policy.match("/shop/open/now").rule
    assert (rule.line, rule.field, rule.value) == (3, "ALLOW", "/shop/open")
    assert rule.text == "  ALLOW : /shop/open"


def test_candidates_stand_by_length(policy: Policy) -> None:
    match = policy.match("/shop/open/a.gif")
    assert [(each.line, each.length) for each in match.candidates] == [(3, 10), (4, 7), (2, 6)]
    assert match.candidates[0] == match.rule
    assert match.candidates.index(match.rule) == 0
    assert {match.rule: "decides"}[match.candidates[0]] == "decides"
    assert match.candidates[1] != match.rule
    assert match.rule != match.rule.text


def test_no_more_than_a_thousand_candidates_are_named() -> None:
    text = "User-agent: *\n" + "Allow: /a\n" * 1_500 + "Disallow: /ab\n"
    candidates = RobotsTxt.parse(text).policy("bot").match("/abc").candidates
    assert [each.line for each in candidates[:3]] == [1_502, 2, 3]
    assert len(candidates) == 1_000


def test_equal_rules_of_the_2_0_draft_are_all_candidates() -> None:
    text = "User-agent: *\nRobot-version: 2.0\nAllow: /a\nDisallow: /a\nDisallow: /?\nAllow: /a\n"
    match = RobotsTxt.parse(text, dialect="2.0").policy("bot").match("/a")
    assert [each.line for each in match.candidates] == [3, 4, 5, 6]


def test_a_path_without_a_rule_has_no_candidates(policy: Policy) -> None:
    match = policy.match("/elsewhere")
    assert (match.allowed, match.rule, match.candidates) == (True, None, ())


@pytest.mark.parametrize(
    ("pattern", "shorter"),
    [("/a*", "/a"), ("/a**", "/a*"), ("/*b", "/a"), ("/a$", "/a"), ("/aé", "/a")],
)
def test_length_counts_every_octet_of_the_normal_form(pattern: str, shorter: str) -> None:
    """RFC-17"""
    policy = RobotsTxt.parse(f"User-agent: *\nAllow: {shorter}\nDisallow: {pattern}\n").policy("b")
    path = {"/*b": "/ab", "/aé": "/a%C3%A9"}.get(pattern, "/a")
    assert policy.match(path).rule.line == 3
    assert not policy.allowed(path)


@pytest.mark.parametrize("length", ["/ab", "/a*"])
def test_an_allow_rule_wins_a_tie(length: str) -> None:
    """RFC-18"""
    policy = RobotsTxt.parse(f"User-agent: *\nDisallow: {length}\nAllow: /*b\n").policy("bot")
    assert policy.match("/ab").rule.line == 3


def test_of_equal_rules_the_first_is_named() -> None:
    policy = RobotsTxt.parse("User-agent: *\nDisallow: /a\nDisallow: /a\n").policy("bot")
    assert policy.match("/a").rule.line == 2


def test_the_timing_of_a_group_is_its_own() -> None:
    text = (
        "User-agent: *\nCrawl-delay: 9\nDisallow: /x\n"
        "User-agent: bot\nCrawl-delay: 2\nCrawl-delay: 5\nVisit-time: 0600-0845\n"
        "Request-rate: 1/10\nComment: hello\n"
    )
    policy = RobotsTxt.parse(text).policy("bot")
    assert (policy.crawl_delay, policy.timed, policy.comments) == (5.0, True, ("hello",))
    assert policy.interval(NOON) == 10.0
    assert policy.interval_source(NOON) == (
        "request-rate 1/10s, that is 10 s, from robots.txt line 8"
    )
    assert not policy.may_visit(NOON)
    assert policy.next_visit(NOON) == datetime(2026, 1, 6, 6, tzinfo=UTC)


def test_the_crawl_delay_of_the_star_group_is_inherited_on_request_only() -> None:
    """VND-09"""
    robots = RobotsTxt.parse("User-agent: *\nCrawl-delay: 9\nAllow: /\nUser-agent: bot\n")
    assert robots.policy("bot").crawl_delay is None
    assert robots.policy("bot", inherit_crawl_delay=True).crawl_delay == 9.0


def test_a_file_without_timing_asks_for_no_interval() -> None:
    policy = RobotsTxt.parse("User-agent: *\nDisallow: /x\n").policy("bot")
    assert (policy.interval(NOON), policy.interval_source(NOON), policy.timed) == (None, "", False)


def test_rule_of_thumb_belongs_to_the_2_0_draft() -> None:
    """V2-31"""
    policy = RobotsTxt.parse("User-agent: *\nRobot-version: 2.0\nDisallow: /x\n").policy("bot")
    assert policy.interval(NOON, took=7.0) == 14.0
    assert policy.interval_source(NOON, took=7.0).startswith("rule of thumb 14 s: ")


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("Crawl-delay: 10\n", "crawl-delay 10 s from robots.txt line 3"),
        ("Crawl-delay: 2\n crawl-DELAY :5 # slow\n", "crawl-delay 5 s from robots.txt line 4"),
        ("Crawl-delay: x\nCrawl-delay: 0.5\n", "crawl-delay 0.5 s from robots.txt line 4"),
        ("Crawl-delay: 9\nRequest-rate: 1/4\n", "crawl-delay 9 s from robots.txt line 3"),
        (
            "Request-rate: 1/4\nRequest-rate: 1/1m 1100-1300\n",
            "request-rate 1/60s 1100-1300 UTC, that is 60 s, from robots.txt line 4",
        ),
        (
            "Request-rate: 1/1m 1300-1400\nRequest-rate: 1/4\n",
            "request-rate 1/4s, that is 4 s, from robots.txt line 4",
        ),
        ("Disallow: /\nUser-agent: other\nUser-agent: *\nCrawl-delay: 7\n", ""),
        (
            "Disallow: /\nUser-agent: x\nCrawl-delay: 1\nUser-agent: bot\nCrawl-delay: 7\n",
            "crawl-delay 7 s from robots.txt line 7",
        ),
    ],
)
def test_the_source_of_a_pace_is_the_line_in_force(text: str, source: str) -> None:
    policy = RobotsTxt.parse(f"# ours\nUser-agent: bot\n{text}").policy("bot")
    assert policy.interval_source(NOON) == source
    assert policy.interval_source(NOON) == source  # remembered


def test_an_inherited_delay_names_the_line_of_the_star_group() -> None:
    """VND-09"""
    robots = RobotsTxt.parse("User-agent: *\nCrawl-delay: 9\nAllow: /\nUser-agent: bot\n")
    policy = robots.policy("bot", inherit_crawl_delay=True)
    assert policy.interval_source(NOON) == "crawl-delay 9 s from robots.txt line 2"


def test_usage_speaks_only_of_what_may_be_fetched() -> None:
    """SIG-05, SIG-06"""
    text = "User-agent: *\nDisallow: /x\nContent-Usage: train-ai=n\nContent-Usage: /a search=y\n"
    policy = RobotsTxt.parse(text).policy("bot")
    assert policy.content_usage("/b") == {"train-ai": "n"}
    assert policy.content_usage("/a/b") == {"search": "y"}
    assert policy.content_usage("/x") is None


@pytest.mark.parametrize("dialect", ["auto", "1994", "1996", "2.0"])
@pytest.mark.parametrize("head", ["", "# ours\n\n", "Sitemap: https://a.example/s\n"])
def test_a_signal_before_any_group_concerns_every_robot(head: str, dialect: str) -> None:
    """SIG-12; a key that the robot's own group has is read from that group."""
    groups = "User-agent: bot\nContent-Signal: search=yes\nDisallow: /a\n\nUser-agent: *\nAllow: /"
    for signal in ("search=no, ai-train=no", "search=yes, ai-train=no\ncontent-SIGNAL : search=no"):
        text = f"{head}Content-Signal: {signal}\n"
        robots = RobotsTxt.parse(f"{text}\n{groups}", dialect=dialect)
        assert robots.policy("other").content_signal == {"search": "no", "ai-train": "no"}
        assert robots.policy("bot").content_signal == {"search": "yes", "ai-train": "no"}
        assert robots.policy("other").allowed("/a")
        assert [finding.code for finding in robots.findings if "outside" in finding.code] == []
        alone = RobotsTxt.parse(text, dialect=dialect)
        assert alone.policy("bot").content_signal == {"search": "no", "ai-train": "no"}
        assert alone.findings == ()


def test_a_signal_in_a_group_concerns_no_other_robot() -> None:
    robots = RobotsTxt.parse(
        "User-agent: bot\nDisallow: /a\nContent-Signal: search=no\n\nUser-agent: *\nAllow: /\n"
    )
    assert robots.policy("other").content_signal == {}
    old = RobotsTxt.parse(
        "User-agent: bot\nDisallow: /a\n\nContent-Signal: search=no\n", dialect="1994"
    )
    assert old.policy("bot").content_signal == {}
    assert [(each.line, each.code) for each in old.findings] == [(4, "record-outside-group")]


def test_threads_may_share_a_policy() -> None:
    body = "User-agent: *\n" + "".join(f"Disallow: /{n}/\nAllow: /{n}/*a\n" for n in range(200))

    def ask(policy: Policy) -> list[bool]:
        return [policy.allowed(f"/{n}/b") or policy.match(f"/{n}/a").allowed for n in range(200)]

    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            policy = RobotsTxt.parse(body).policy("bot")
            assert all(all(answers) for answers in pool.map(ask, [policy] * 4))


@pytest.mark.parametrize(
    ("pattern", "path"),
    [
        ("/a?u=%3A%2F", "/a?u=:/"),
        ("/a?u=:/", "/a?u=%3a%2f"),
        ("/a*?*%2F", "/ab?c=/"),
        ("/*%3A?x=/", "/y%3a?x=%2F"),
    ],
)
def test_the_query_of_a_usage_path_is_compared_as_that_of_a_rule(pattern: str, path: str) -> None:
    """RFC 9309 section 2.2.2, Figure 4 (RFC-25), for Content-Usage as for Disallow."""
    policy = RobotsTxt.parse(f"User-agent: *\nContent-Usage: {pattern} train-ai=n").policy("bot")
    assert policy.content_usage(path) == {"train-ai": "n"}
    assert not RobotsTxt.parse(f"User-agent: *\nDisallow: {pattern}").policy("bot").allowed(path)
    before_the_query = path.replace("?", "!")
    assert policy.content_usage(before_the_query) == {}


def test_a_rule_that_decided_before_is_not_read_again() -> None:
    rules = "".join(f"Disallow: /{n}/\n" for n in range(300))
    policy = RobotsTxt.parse("User-agent: *\n" + rules).policy("bot")
    first = policy.match("/0/x").rule
    assert policy.match("/0/y").rule is first
    for _ in range(2):
        for n in range(300):
            assert policy.match(f"/{n}/x").rule.line == n + 2
    assert policy.match("/299/y").rule is policy.match("/299/x").rule
    assert policy.match("/0/y").rule is not first  # the memory is bounded


@pytest.mark.parametrize("value", ["h", "https", "https://a.example/x", "-", "x/", " ", "xyz"])
def test_a_value_that_is_no_path_decides_about_no_url(value: str) -> None:
    policy = RobotsTxt.parse(f"User-agent: *\nDisallow: {value}\nDisallow: /p").policy("bot")
    for _ in range(2):
        for url in ("https://a.example/x", "https://a.example-/x", "https://a.examplex/y", "/x"):
            assert policy.allowed(url)
        assert not policy.allowed("https://b.example/p")
        assert not policy.allowed("https://a.example/p")
