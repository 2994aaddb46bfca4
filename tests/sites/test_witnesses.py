"""`witnesses`: a URL that a rule decides, or the certainty that there is none."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gatekeeper.robots import RobotsTxt, witnesses
from gatekeeper.sites import witness
from gatekeeper.sites.witness import (
    ESCAPED,
    SINGLE,
    Budget,
    RankedRule,
    Readings,
    RuleTable,
    SearchGivenUp,
    decided_by,
    find_path,
)
from tests.effort import of_many

NAMES = ["bot", "bot2", "bot-x", "Bot/2.1", "*", "* x", "other bot", "é", ""]
FILES = st.lists(
    st.one_of(
        st.sampled_from(NAMES).map("User-agent: {}".format),
        st.sampled_from(["Disallow: /a", "Allow: /b", "Crawl-delay: 1", "", "Robot-version: 2.0"]),
    ),
    max_size=12,
).map("\n".join)


@settings(max_examples=of_many(1_000))
@given(FILES)
def test_the_readings_of_a_file_are_those_of_the_policies_of_its_agents(text: str) -> None:
    for dialect in ("auto", "rfc9309"):
        robots = RobotsTxt.parse(text, dialect=dialect)
        readings = Readings(robots)
        for agent in [*NAMES, "bot3"]:
            plain, reading = robots.policy(agent).plain, readings.of(agent)
            assert (plain and plain.spans) == (reading and reading.spans), agent


def found(rules: str, agent: str = "bot") -> list[tuple[str | None, bool]]:
    text = "User-agent: *\n" + rules
    return [(w.url, w.never) for w in witnesses(RobotsTxt.parse(text).policy(agent))]


def file_of(rules: list[tuple[bool, str]]) -> str:
    lines = [f"{'Allow' if allow else 'Disallow'}: {value}" for allow, value in rules]
    return "\n".join(["User-agent: *", *lines])


@pytest.mark.parametrize(
    ("rules", "witness"),
    [
        ("Disallow: /a", "/a"),
        ("Disallow: /", "/"),
        ("Disallow: *", "/"),
        ("Disallow: /$", "/"),
        ("Disallow: /*$", "/"),
        ("Allow: /*.html$", "/.html"),
        ("Disallow: /a*b*c", "/abc"),
        ("Disallow: /a b", "/a%20b"),
        ("Disallow: /ä", "/%C3%A4"),
        ("Disallow: /%2A%24", "/%2A%24"),
        ("Disallow: /robots.txt", "/robots.txtx"),
        ("Disallow: /x?a=%2F", "/x?a=%2F"),
    ],
)
def test_a_single_rule_has_a_witness(rules: str, witness: str) -> None:
    assert found(rules) == [(witness, False)]


@pytest.mark.parametrize(
    "rule",
    [
        "Disallow:",
        "Disallow: private",
        "Disallow: ?x",
        "Disallow: /robots.txt$",
        "Disallow: /a/./b",
        "Disallow: /a/../b$",
        "Disallow: /%2E%2E/",
        "Disallow: https://example.org/x",
        "Disallow: /" + "a" * 70_000,
    ],
)
def test_a_rule_that_no_url_can_match_has_no_witness(rule: str) -> None:
    assert found(rule) == [(None, True)]


@pytest.mark.parametrize(
    "rules",
    [
        # What beats the first one takes all that it matches: by length, by Allow, by its place.
        "Disallow: /a\nAllow: /a",
        "Disallow: /a\nDisallow: /a*",
        "Disallow: *b\nAllow: /*b",
        "Disallow: /ab\nAllow: *ab*\nAllow: /ab*",
        "Disallow: /a?b\nAllow: /a?b**",
    ],
)
def test_a_rule_that_others_always_override_has_no_witness(rules: str) -> None:
    assert found(rules)[0] == (None, True)


_TOKENS = [*SINGLE, *ESCAPED]
"""Everything that one more step of a path can be."""


def test_a_rule_covered_by_many_others_together_decides_nothing() -> None:
    rules = [(False, "/a"), (True, "/a$"), *((True, "/a" + token) for token in _TOKENS)]
    policy = RobotsTxt.parse(file_of(rules)).policy("bot")
    assert witnesses(policy)[0].never


@pytest.mark.parametrize("left", ["q", "?", "/", ".", "%2F", "%00", "%FF", "%25"])
def test_the_only_path_that_other_rules_leave_to_a_rule_is_found(left: str) -> None:
    others = [(True, "/a" + token) for token in _TOKENS if token != left]
    policy = RobotsTxt.parse(file_of([(False, "/a"), (True, "/a$"), *others])).policy("bot")
    assert witnesses(policy)[0].url == "/a" + left


def test_a_star_at_the_beginning_matches_the_first_slash() -> None:
    assert found("Disallow: */\nAllow: /*/") == [("/", False), ("//", False)]


def test_a_witness_avoids_a_longer_rule() -> None:
    rules = "Disallow: /*a\nAllow: /*a$\nAllow: /*ax\nAllow: /*a?\nAllow: /*a/"
    url, never = found(rules)[0]
    assert url is not None
    assert not never
    match = RobotsTxt.parse("User-agent: *\n" + rules).policy("bot").match(url)
    assert match.rule is not None
    assert match.rule.line == 2


def test_an_escape_in_a_query_is_tried_where_no_other_path_decides() -> None:
    # In a query `/` equals `%2F`, so that only the path part tells the two rules apart.
    assert found("Disallow: /*%2F$\nAllow: /*?*%2F$")[0] == ("/%2F", False)


_PIECES = st.sampled_from(["/", "a", "b", "ab", "*", "$", "?", "%2F", ":", ".", "/a", "*a", "?a"])
_VALUE = st.lists(_PIECES, max_size=5).map(lambda pieces: "/" + "".join(pieces))
_RULE = st.tuples(st.booleans(), _VALUE | _VALUE.map(lambda value: "*" + value[1:]))
_SHORT = [
    "/" + "".join(rest)
    for size in range(5)
    for rest in itertools.product(["/", "a", "b", "?", "%2F", "%3A"], repeat=size)
]


@settings(deadline=None)
@given(st.lists(_RULE, min_size=1, max_size=6))
def test_witnesses_are_exact(rules: list[tuple[bool, str]]) -> None:
    policy = RobotsTxt.parse(file_of(rules)).policy("bot")
    deciding = set()
    for path in _SHORT:
        rule = policy.match(path).rule
        deciding.add(rule.line if rule else 0)
    for each in witnesses(policy):
        if each.never:
            assert each.url is None
            assert each.rule.line not in deciding
        else:
            assert each.url is not None
            decided = policy.match(each.url).rule
            assert decided is not None
            assert decided.line == each.rule.line


@settings(deadline=None)
@given(st.lists(_RULE, min_size=1, max_size=4), st.lists(_RULE, min_size=1, max_size=4))
def test_a_search_for_a_pair_of_rules_finds_every_existing_url(
    mine: list[tuple[bool, str]], theirs: list[tuple[bool, str]]
) -> None:
    one = Readings(RobotsTxt.parse(file_of(mine))).of("bot")
    other = Readings(RobotsTxt.parse(file_of(theirs))).of("bot")
    assert one is not None
    assert other is not None
    met = set()
    policies = [RobotsTxt.parse(file_of(each)).policy("bot") for each in (mine, theirs)]
    for path in _SHORT[:500]:
        rules = [policy.match(path).rule for policy in policies]
        met.add(tuple(rule.line if rule else 0 for rule in rules))
    for rule in (None, *one.table.rules):
        for against in (None, *other.table.rules):
            lines = tuple(
                line.line if line else 0 for line in (one.line_of(rule), other.line_of(against))
            )
            path = decided_by([(one, rule), (other, against)], Budget())
            if path is None:
                assert lines not in met
            else:
                assert one.decides(path, rule)
                assert other.decides(path, against)


@settings(deadline=None)
@given(st.lists(_RULE, min_size=1, max_size=6))
def test_the_search_agrees_with_its_shortcuts(rules: list[tuple[bool, str]]) -> None:
    """`decided_by` tries likely paths, and sees plain covering, before it walks."""
    reading = Readings(RobotsTxt.parse(file_of(rules))).of("bot")
    assert reading is not None
    for rule in reading.table.rules:
        path = find_path([(reading.table, rule)], Budget())
        assert (path is None) == (decided_by([(reading, rule)], Budget()) is None)
        assert path is None or reading.decides(path, rule)


def test_a_search_ends_at_its_bound_and_says_so() -> None:
    rule = RankedRule(0, False, "/" + "a" * 500)
    budget = Budget(100)
    with pytest.raises(SearchGivenUp):
        find_path([(RuleTable([rule]), rule)], budget)
    assert budget.left <= 0
    with pytest.raises(SearchGivenUp):  # nothing is left for another one, however short
        find_path([(RuleTable([RankedRule(0, True, "/a")]), None)], budget)


def test_an_unfinished_search_does_not_report_never(monkeypatch: pytest.MonkeyPatch) -> None:
    others = [(True, "/a" + token) for token in _TOKENS]
    policy = RobotsTxt.parse(file_of([(False, "/a"), (True, "/a$"), *others])).policy("bot")
    monkeypatch.setattr(witness, "MAX_STEPS", 10)
    assert next((w.url, w.never) for w in witnesses(policy)) == (None, False)


@pytest.mark.parametrize("dialect", ["1994", "1996", "2.0"])
def test_other_dialects_give_witnesses_but_no_certainty(dialect: str) -> None:
    robots = RobotsTxt.parse("User-agent: *\nDisallow: /a\nDisallow: /a\n", dialect=dialect)
    assert [(w.url, w.never) for w in witnesses(robots.policy("bot"))] == [
        ("/a", False),
        (None, False),
    ]


def test_two_thousand_patterns_get_witnesses_within_the_bound() -> None:
    """The walk is begun only where a likely path does not show the rule at work."""
    rules = [(i % 2 == 0, f"/section{i}/*.html$") for i in range(2_000)]
    result = witnesses(RobotsTxt.parse(file_of([(False, "/"), *rules])).policy("bot"))
    assert all(each.url is not None for each in result)


def test_only_the_agents_own_rules_are_asked() -> None:
    robots = RobotsTxt.parse("User-agent: a\nDisallow: /x\n\nUser-agent: *\nDisallow: /y\n")
    assert [w.rule.line for w in witnesses(robots.policy("a"))] == [2]
    assert [w.rule.line for w in witnesses(robots.policy("other"))] == [5]
