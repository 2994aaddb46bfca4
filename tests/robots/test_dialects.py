"""Auto: every rule set in the dialect that it declares, and by the RFC as well (DIA)."""

from __future__ import annotations

import pytest

from gatekeeper.robots import Dialect, Match, RobotsTxt


def ask(text: str, path: str, agent: str = "X", **choices: str) -> Match:
    return RobotsTxt.parse(text).policy(agent, **choices).match(path)


EXPLICIT = "User-agent: X\nRobot-version: 2.0\nDisallow: /pics\n"


def test_unversioned_set_is_read_by_the_rfc() -> None:
    """DIA-01, DIA-02"""
    match = ask("User-agent: X\nDisallow: /a\nAllow: /a/b\n", "/a/b")
    assert (match.allowed, match.dialect, match.conflict) == (True, Dialect.RFC9309, False)


def test_stricter_reading_wins_and_is_named() -> None:
    """DIA-03: 2.0 reads a literal as one path, the RFC as a prefix."""
    match = ask(EXPLICIT, "/pics/y")
    assert (match.allowed, match.dialect, match.conflict) == (False, Dialect.V2, True)
    assert match.rule.line == 3
    assert [candidate.line for candidate in match.candidates] == [3]


def test_the_declared_dialect_alone_can_be_chosen() -> None:
    """DIA-03: that the RFC reads it otherwise is still told."""
    match = ask(EXPLICIT, "/pics/y", conflicts="declared")
    assert (match.allowed, match.dialect, match.conflict) == (True, Dialect.V2, True)
    assert (match.rule, match.candidates) == (None, ())
    assert not ask(EXPLICIT, "/pics", conflicts="declared").conflict


def test_readings_that_agree_are_no_conflict() -> None:
    match = ask(EXPLICIT, "/pics")
    assert (match.allowed, match.conflict) == (False, False)


def test_the_declared_reading_decides_where_it_is_the_stricter_one() -> None:
    """First match denies, longest match allows."""
    text = "User-agent: X\nRobot-version: 2.0\nDisallow: /a*\nAllow: /a/b*\n"
    match = ask(text, "/a/b")
    assert (match.allowed, match.conflict, match.rule.line) == (False, True, 3)


def test_version_1_is_read_as_1996() -> None:
    """DIA-05"""
    match = ask("User-agent: X\nRobot-version: 1.0\nDisallow: /\nAllow: /a\n", "/a")
    assert (match.allowed, match.dialect, match.conflict) == (False, Dialect.R1996, True)


def test_blank_line_ends_a_versioned_set_but_not_for_the_rfc() -> None:
    """DIA-04"""
    text = "User-agent: X\nRobot-version: 2.0\n\nDisallow: /a\n"
    assert not ask(text, "/a").allowed
    assert ask(text, "/a", conflicts="declared").allowed


@pytest.mark.parametrize(
    "head",
    [
        "User-agent: X\n\nRobot-version: 2.0\n",
        "User-agent: X\nDisallow: /other\nRobot-version: 2.0\n",
        "Robot-version: 2.0\nUser-agent: X\n",
        "User-agent: Y\nRobot-version: 2.0\nUser-agent: X\n",
        "User-agent: X\nRobot-version: 2.0\nUser-agent: Y\n",
        "User-agent: X\nRobot-version: two\n",
        "User-agent: X\nRobot-version: 0.2\n",
    ],
)
def test_a_misplaced_or_unreadable_version_is_ignored(head: str) -> None:
    """V2-06, V2-08, DIA-07"""
    match = ask(head + "Disallow: /pics\n", "/pics/y")
    assert (match.allowed, match.dialect) == (False, Dialect.RFC9309)


def test_the_version_behind_the_last_agent_is_the_group_s() -> None:
    """V2-06: the one between two user-agent lines is no version, nor the first of two (V2-07)."""
    text = "User-agent: Y\nRobot-version: 2.0\nUser-agent: X\nRobot-version: 1.0\nDisallow: /a\n"
    assert [(g.version, g.dialect) for g in RobotsTxt.parse(text).groups] == [("1.0", "1996")]
    for agent in "XY":
        assert not RobotsTxt.parse(text, dialect="2.0").policy(agent).allowed("/ab")
        assert RobotsTxt.parse(text, dialect="2.0").policy(agent).match("/ab").dialect == "1996"


def test_comment_lines_do_not_part_version_and_agent() -> None:
    """V2-06, R94-06"""
    text = "User-agent: X\n# about\n  # this\nRobot-version: 2.0 # draft\nDisallow: /pics\n"
    assert ask(text, "/pics/y").dialect is Dialect.V2


@pytest.mark.parametrize("version", ["2.0", "2.0.0", "2.2", "3.0", "4.2.1"])
def test_higher_even_versions_are_read_as_2_0(version: str) -> None:
    """V2-10, V2-12"""
    match = ask(f"User-agent: X\nRobot-version: {version}\nDisallow: *.gif\n", "/a.gif")
    assert (match.allowed, match.dialect) == (False, Dialect.V2)


def test_experimental_set_is_skipped_for_the_default_one() -> None:
    """DIA-06: strictly, what the RFC reads in it still denies."""
    text = "User-agent: X\nRobot-version: 2.1\nDisallow: /x*\n\nUser-agent: *\nDisallow: /y\n"
    assert not ask(text, "/y1").allowed
    assert (ask(text, "/x1").allowed, ask(text, "/x1").conflict) == (False, True)
    assert ask(text, "/x1", conflicts="declared").allowed


def test_exact_name_comes_before_part_of_a_name() -> None:
    """DIA-09"""
    text = (
        "User-agent: chives\nRobot-version: 2.0\nDisallow: /a*\n\n"
        "User-agent: newchives\nDisallow: /b\n"
    )
    assert ask(text, "/a1", "newchives").allowed
    assert not ask(text, "/b1", "newchives").allowed


def test_part_of_a_name_selects_versioned_sets_only() -> None:
    """DIA-09"""
    text = (
        "User-agent: chives\nRobot-version: 2.0\nDisallow: /a*\n\nUser-agent: onion\nDisallow: /\n"
    )
    assert not ask(text, "/a1", "newchives").allowed
    assert ask(text, "/a1", "redonion").allowed


def test_same_name_with_and_without_version_is_not_merged() -> None:
    """DIA-10: the highest version understood, and no denial from the other set."""
    text = (
        "User-agent: *\nDisallow: /data/\n\n"
        "User-agent: *\nRobot-version: 2.0\nAllow: */index.html\nDisallow: *.shtml\n"
    )
    assert not ask(text, "/a.shtml").allowed
    assert not ask(text, "/data/x").allowed
    assert ask(text, "/data/x", conflicts="declared").allowed
    assert ask(text, "/data/x", conflicts="declared").conflict
    assert ask(text, "/data/index.html", conflicts="declared").allowed


def test_the_version_of_another_rule_set_does_not_change_a_set() -> None:
    """V2-14"""
    text = "User-agent: Y\nRobot-version: 2.0\nDisallow: *\n\nUser-agent: X\nDisallow: /a\n"
    match = ask(text, "/a/b")
    assert (match.allowed, match.dialect) == (False, Dialect.RFC9309)


def test_a_comment_sign_is_read_by_the_dialect_of_its_rule_set() -> None:
    """DIA-11: in a 2.0 set `#` needs a blank before it, elsewhere it does not."""
    text = "User-agent: X\nRobot-version: 2.0\nDisallow: /a#b\n"
    assert RobotsTxt.parse(text, dialect="2.0").policy("X").allowed("/a")
    assert not RobotsTxt.parse(text, dialect="rfc9309").policy("X").allowed("/a")


def test_an_escaped_octet_in_a_rule_changes_no_other_rule() -> None:
    """V2-36: the patterns of a set are prepared together."""
    for octet in range(256):
        rules = ["Disallow: /%3Fa*", f"Disallow: *x%{octet:02X}y", "Disallow: /%3Fb*"]
        text = "\n".join(["User-agent: X", "Robot-version: 2.0", *rules])
        policy = RobotsTxt.parse(text, dialect="2.0").policy("X")
        for path in ("/%3fac", f"/x%{octet:02x}y", "/%3fbc"):
            assert not policy.allowed(path), (rules, path)


def test_the_precedence_rule_struck_from_the_2_0_draft_can_be_chosen() -> None:
    """V2-21"""
    text = "User-agent: X\nRobot-version: 2.0\nAllow: /foo*\nDisallow: *shtml\n"
    policy = RobotsTxt.parse(text, dialect="2.0").policy("X", v2_semantics="precedence")
    assert policy.match("/foo.shtml").rule.line == 4
    assert not policy.match("/bar.html").allowed
    assert policy.match("/bar.html").rule is None


def test_robots_txt_may_always_be_fetched() -> None:
    """RFC-20, R96-16, V2-34"""
    for dialect in ("auto", *Dialect):
        text = "User-agent: *\nRobot-version: 2.0\nDisallow: *\nDisallow: /\n"
        match = RobotsTxt.parse(text, dialect=dialect).policy("X").match("/robots.txt")
        assert (match.allowed, match.rule) == (True, None)


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        ("http://example.com/abs/x", False),
        ("http://other.example/abs/x", True),
        ("http://example.com/mail", True),
    ],
)
def test_1994_resolves_whole_urls_of_its_own_origin(url: str, allowed: bool) -> None:
    """R94-26"""
    text = "User-agent: *\nDisallow: http://example.com/abs/\nDisallow: mailto:x\n"
    policy = RobotsTxt.parse(text, dialect="1994").policy("X")
    assert policy.allowed(url) is allowed
    assert policy.match(url).allowed is allowed


@pytest.mark.parametrize("choice", [{"conflicts": "lenient"}, {"v2_semantics": "random"}])
def test_unknown_choices_are_refused(choice: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="not '"):
        RobotsTxt.parse("").policy("X", **choice)


@pytest.mark.parametrize("line", ["user-agent", "User-agent Y", "disallow", "Robot-version"])
@pytest.mark.parametrize("dialect", ["auto", "rfc9309", "1994", "1996", "2.0"])
def test_a_line_without_a_colon_is_no_record(dialect: str, line: str) -> None:
    """R94-04: it neither begins a record nor gives one a rule, so no rule after it is lost."""
    for text in (
        f"User-agent: X\nDisallow: /other\n{line}\nDisallow: /a\n",
        f"User-agent: X\n{line}\nUser-agent: Y\nDisallow: /a\n",
    ):
        robots = RobotsTxt.parse(text, dialect=dialect)
        assert not robots.policy("X").allowed("/a")
        assert len(robots.groups) == 1
