"""`FlatRules` answer as the policy does that they are made of."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gatekeeper.robots import RobotsTxt
from gatekeeper.robots.patterns import is_robots_txt

_VALUES = st.text(alphabet="/ab.*$?:%2A-\t é", max_size=7)
_RULES = st.lists(
    st.tuples(st.sampled_from(["Allow", "Disallow"]), _VALUES.map("/{}".format) | _VALUES),
    max_size=8,
)
_PATHS = st.text(alphabet="/ab.*$?:%2A-[#", max_size=9).map("/{}".format)


@given(_RULES, st.lists(_PATHS, min_size=1, max_size=8))
@example([("Disallow", "/"), ("Allow", "/$")], ["/", "/a"])
@example([("Disallow", "/a*"), ("Allow", "/a$")], ["/a", "/ab", "/"])
@example([("Disallow", "/*2A")], ["/%2A", "/*", "/2A"])
@example([("Disallow", "/*$"), ("Allow", "*a")], ["/", "/a", "/b"])
@example([("Disallow", "/a**b"), ("Allow", "/a*b")], ["/acb"])
@example([("Disallow", "/*?a:"), ("Allow", "/a")], ["/?a:", "/?a%3A", "/a"])
@example([("Allow", "/b\t"), ("Disallow", "/")], ["/b"])
def test_flat_rules_give_the_verdict_of_the_policy(
    rules: list[tuple[str, str]], paths: list[str]
) -> None:
    text = "User-agent: *\n" + "".join(f"{field}: {value}\n" for field, value in rules)
    policy = RobotsTxt.parse(text).policy("bot")
    flat = policy.flat()
    if flat is None:
        return
    for path in paths:
        score = None if is_robots_txt(path) else flat.score(path)
        if score is not None:
            match = policy.match_path(path)
            assert bool(score & 1) is match.allowed, path
            assert (score == 1) is (match.rule is None), path


@pytest.mark.parametrize(
    "text",
    [
        "User-agent: *\nDisallow: /b%2Fa\nDisallow: /caf?a%2Fb\n",
        "User-agent: *\nDisallow: /a\nVisit-time: 0600-0845\n",
        "User-agent: *\nRobot-version: 2.0\nDisallow: /a\n",
        "User-agent: *\n" + "".join(f"Disallow: /a{number}\n" for number in range(3000)),
    ],
)
def test_rules_that_cannot_be_flat_have_no_flat_form(text: str) -> None:
    assert RobotsTxt.parse(text).policy("bot").flat() is None


@pytest.mark.parametrize("pieces", [1, 4, 60])
@pytest.mark.parametrize("count", [60, 200])
def test_flat_rules_with_expensive_patterns_give_the_verdict_of_the_policy(
    pieces: int, count: int
) -> None:
    values = [f"/*{'a*' * (pieces + n % 3)}{'b' * (n % 5)}c{n}" for n in range(count)]
    policy = RobotsTxt.parse("User-agent: *\nDisallow: " + "\nDisallow: ".join(values)).policy("b")
    flat = policy.flat()
    if flat is None:
        return
    for path in ("/" + "a" * 2_000, "/" + "ab" * 1_000, "/" + "ab" * 1_000 + "c7", "/c3"):
        score, match = flat.score(path), policy.match_path(path)
        if score is not None:
            assert (bool(score & 1), score == 1) == (match.allowed, match.rule is None), path


def test_a_long_path_is_left_to_the_policy() -> None:
    flat = RobotsTxt.parse("User-agent: *\nDisallow: /a\nCrawl-delay: 3\n").policy("bot").flat()
    assert flat is not None
    assert flat.crawl_delay == 3.0
    assert flat.score("/a" + "x" * 100) == 4
    assert flat.score("/a" + "x" * 3_000) is None


@pytest.mark.parametrize("value", ["/a{}*x", "/a*{}x", "*{}/a", "/*a{}$"])
def test_many_patterns_that_may_match_are_left_to_the_policy(value: str) -> None:
    text = "User-agent: *\n" + "".join(
        f"Disallow: {value.format('a' * (n % 20))}\n" for n in range(300)
    )
    flat = RobotsTxt.parse(text).policy("bot").flat()
    assert flat is not None
    assert flat.score("/" + "a" * 30 + "/a") is None
    assert flat.score("/b") == 1


@pytest.mark.parametrize("count", [10, 17, 300])
def test_rules_that_begin_alike_are_told_apart(count: int) -> None:
    rules = [f"Disallow: /a{number}/\n" for number in range(count)]
    flat = RobotsTxt.parse("User-agent: *\n" + "".join(rules)).policy("bot").flat()
    assert flat is not None
    assert [flat.score(path) for path in ("/a", "/a9/", f"/a{count}/")] == [1, 8, 1]
    assert flat.score(f"/a{count - 1}/x") == 2 * len(f"/a{count - 1}/")


def test_a_file_at_rest_takes_no_more_than_its_lines() -> None:
    rules = [f"Disallow: /{number}*/private\n" for number in range(100)]
    flat = RobotsTxt.parse("User-agent: *\n" + "".join(rules)).policy("bot").flat()
    assert flat is not None
    kept = flat.rules, flat.patterns, flat.pieces
    assert sum(map(len, kept)) <= sum(map(len, rules))
