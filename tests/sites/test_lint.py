"""What the linter tells the author of a file."""

from __future__ import annotations

import re
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gatekeeper.robots import RobotsTxt, Severity
from gatekeeper.sites.fixes import repaired
from gatekeeper.sites.lint import CODES, MAX_FINDINGS, findings
from tests.effort import of_many, processor_time

GROUP = "User-agent: *\n"


def told(text: str | bytes, dialect: str = "auto") -> list[tuple[int, str]]:
    robots = RobotsTxt.parse(text, dialect=dialect)  # type: ignore[arg-type]
    return [(finding.line, finding.code) for finding in robots.findings]


# One file a code: where it is told, and that nothing else is.
CASES: list[tuple[str | bytes, list[tuple[int, str]]]] = [
    # The file as a whole.
    ("", [(0, "empty")]),
    ("# only a comment\n", [(0, "empty")]),
    (b"\xef\xbb\xbfUser-agent: *\nDisallow: /a\n", [(1, "bom")]),
    ("\ufeffUser-agent: *\nDisallow: /a\n".encode("utf-16-le"), [(1, "encoding")]),
    ("<!DOCTYPE html>\n<title>Not: found</title>\n", [(1, "html")]),
    ("Novelty: 1\n", [(0, "no-group"), (1, "unknown-field")]),
    # Lines.
    (GROUP + "Disallow: /a\nDisallow: /\0b\n", [(3, "control")]),
    (b"User-agent: *\nDisallow: /a\n# caf\xe9\n", [(3, "not-utf8")]),
    (GROUP + "Disallow /a\nDisallow: /b\n", [(2, "no-colon")]),
    (GROUP + "Novelty: 1\nDisallow: /b\n", [(2, "unknown-field")]),
    (GROUP + "Dissallow: /a\nDisallow: /b\n", [(2, "misspelt-field")]),
    ("User agent: x\n" + GROUP + "Disallow: /b\n", [(1, "misspelt-field")]),
    (GROUP + "Noindex: /a\nDisallow: /b\n", [(2, "unknown-field")]),
    ("Disallow: /a\n\n" + GROUP + "Disallow: /b\n", [(1, "rule-outside-group")]),
    ("Crawl-delay: 5\n\n" + GROUP + "Disallow: /b\n", [(1, "record-outside-group")]),
    # User-agent lines.
    ("User-agent:\n" + GROUP + "Disallow: /b\n", [(1, "empty-agent")]),
    ("User-agent: FooBot/2.1\nDisallow: /b\n", [(1, "odd-agent")]),
    ("User-agent: Foo Bot\nDisallow: /b\n", [(1, "odd-agent")]),
    ("User-agent: a\nDisallow: /b\n\nUser-agent: A\nDisallow: /c\n", [(4, "repeated-agent")]),
    (GROUP + "Disallow: /b\n\n" + GROUP + "Disallow: /c\n", [(4, "repeated-agent")]),
    (GROUP + "Disallow: /b\n\nUser-agent: a\n", [(4, "group-without-rules")]),
    (GROUP + "Disallow: /b\nUser-agent: a\nDisallow: /b\n", [(3, "missing-blank-line")]),
    (GROUP + "Disallow: /b\n\nUser-agent: a\nDisallow: /c\n", [(4, "named-group-exempts")]),
    (GROUP + "# note\n\nDisallow: /b\n", [(3, "blank-inside-group")]),
    (GROUP + "Crawl-delay: 5\nUser-agent: b\nDisallow: /b\n", [(2, "joined-groups")]),
    # Rules.
    (GROUP + "Disallow: / cyberworld / map /\n", [(2, "blank-in-value")]),
    (GROUP + "Disallow: /ü\n", [(2, "unescaped-non-ascii")]),
    (GROUP + "Disallow: /100%\n", [(2, "bad-escape")]),
    (GROUP + "Disallow: /a$b\n", [(2, "dollar-inside")]),
    (GROUP + "Disallow: private\n", [(2, "unmatchable-rule")]),
    (GROUP + "Disallow: http://example.com/a\n", [(2, "unmatchable-rule")]),
    (GROUP + "Disallow: /a/../b\n", [(2, "unmatchable-rule")]),
    (GROUP + "Disallow: $\n", [(2, "unmatchable-rule")]),
    (GROUP + "Disallow: /a\nAllow: /a\n", [(2, "unreachable-rule")]),
    (GROUP + "Allow: /a\nDisallow: /a\n", [(3, "unreachable-rule")]),
    (GROUP + "Allow: /a\nDisallow: /a*\n", [(2, "unreachable-rule")]),
    (GROUP + "Disallow: /%7Ea\nDisallow: /~a\n", [(3, "duplicate-rule")]),
    (GROUP + "Disallow: /a\nDisallow: /a**\n", [(3, "duplicate-rule")]),
    (GROUP + "Allow: /a*\nDisallow: /a**\n", [(2, "unreachable-rule")]),
    (GROUP + "Disallow: /robots.txt\n", [(2, "robots-txt-rule")]),
    (GROUP + "Allow: /public/\n", [(2, "lone-allow")]),
    # Robot-version.
    (GROUP + "Disallow: /a\nRobot-version: 2.0\n", [(3, "misplaced-version")]),
    (
        GROUP + "\nRobot-version: 2.0\nDisallow: /a\n",
        [(2, "blank-inside-group"), (3, "misplaced-version")],
    ),
    (
        GROUP + "Robot-version: 2.0\nUser-agent: b\nRobot-version: 1.0\nDisallow: /a\n",
        [(2, "joined-groups"), (2, "misplaced-version")],
    ),
    (GROUP + "Robot-version: two\nDisallow: /a\n", [(2, "bad-version")]),
    (GROUP + "Robot-version: 2.0\nRobot-version: 1.0\nDisallow: *\n", [(3, "repeated-version")]),
    (GROUP + "Robot-version: 2.1\nDisallow: *\n", [(2, "experimental-version")]),
    (GROUP + "Robot-version: 4.0\nDisallow: *\n", [(2, "newer-version")]),
    # Timing and the rest.
    (GROUP + "Crawl-delay: soon\nDisallow: /a\n", [(2, "bad-crawl-delay")]),
    (GROUP + "Request-rate: 0/1\nDisallow: /a\n", [(2, "bad-request-rate")]),
    (GROUP + "Visit-time: 2500-0100\nDisallow: /a\n", [(2, "bad-visit-time")]),
    (GROUP + "Disallow: /a\nSitemap: /s.xml\n", [(3, "bad-sitemap")]),
    (GROUP + "Disallow: /a\nLicense: l.xml\n", [(3, "bad-license")]),
    (GROUP + "Disallow: /a\nHost: a b\n", [(3, "bad-host")]),
    (GROUP + "Disallow: /a\nClean-param: &\n", [(3, "bad-clean-param")]),
    (GROUP + "Disallow: /a\nContent-Usage: Train-AI=n\n", [(3, "bad-content-usage")]),
    (GROUP + "Disallow: /a\nContent-Signal: yes\n", [(3, "bad-content-signal")]),
    (
        GROUP + "Disallow: /a\nContent-Usage: all=n, search=y\n",
        [(3, "unknown-usage-label")],
    ),
    (GROUP + "Disallow: /a\nContent-Usage: train-genai=n\n", [(3, "unknown-usage-label")]),
    # A rule is lost.
    ("User-agent: bot\u00a0\nDisallow: /a\n", [(1, "odd-blank")]),
    ("User-agent:\u00a0bot\nDisallow: /a\n", [(1, "odd-blank")]),
    (b"User-agent: bot\xa0\nDisallow: /a\n", [(1, "not-utf8"), (1, "odd-blank")]),
    (
        "User-agent\u00a0: bot\nDisallow: /a\n",
        [(0, "no-group"), (1, "misspelt-field"), (2, "rule-outside-group")],
    ),
    (
        GROUP + "Disallow:\u00a0/a\nDisallow: /b\n",
        [(2, "unescaped-non-ascii"), (2, "unmatchable-rule")],
    ),
    ("User-agent: a, b\nDisallow: /a\n", [(1, "agent-list")]),
    (GROUP + "Disallow /x\nDisallow: /a\n", [(2, "no-colon")]),
    (GROUP + "Disallow /x: y # no\nDisallow: /a\n", [(2, "no-colon")]),
    (GROUP + "Disallow: /a\nSitemap https://a.example/s.xml\n", [(3, "no-colon")]),
    (GROUP + "Allow me to explain\nDisallow: /a\n", [(2, "no-colon")]),
    (GROUP + "Disallowed: /x\nDisallow: /a\n", [(2, "misspelt-field")]),
    (GROUP + "\u00a0\u00a0Disallow: /x\nDisallow: /a\n", [(2, "misspelt-field")]),
    (GROUP + "- Disallow: /x\nDisallow: /a\n", [(2, "misspelt-field")]),
    (GROUP + "Disallow: /x\u200b\nDisallow: /a\n", [(2, "odd-blank")]),
    ("User-agent: a|b\nDisallow: /a\n", [(1, "agent-list")]),
    ('User-agent: "bot"\nDisallow: /a\n', [(1, "odd-agent")]),
    ("User-agent: * Disallow: /x\nDisallow: /a\n", [(1, "several-records")]),
    (GROUP + "Disallow: /x Allow: /y\n", [(2, "several-records")]),
    (GROUP + "Disallow: /xDisallow: /y\n", [(2, "several-records")]),
    (
        GROUP + "Disallow: /a\nSitemap: https://a.example/s User-agent: b\n",
        [(3, "several-records")],
    ),
    (GROUP + "Disallow: /#!x\n", [(2, "hash-in-path")]),
    (GROUP + "Disallow: /a#\n", [(2, "hash-in-path")]),
    # A preference is lost.
    (GROUP + "Disallow: /a\nContent-Usage: train-ai=no, search=y\n", [(3, "bad-content-usage")]),
    (
        GROUP + "Disallow: /a\nContent-Signal: search=yes, ai-train=never\n",
        [(3, "bad-content-signal")],
    ),
    # Habits of regular expressions.
    (GROUP + "Disallow: /a.*\n", [(2, "regular-expression")]),
    (GROUP + "Disallow: /.*.html\n", [(2, "regular-expression")]),
    (GROUP + "Disallow: /a\\.html\n", [(2, "regular-expression")]),
    (GROUP + "Disallow: /(a|b)\n", [(2, "regular-expression")]),
    (GROUP + "Disallow: /[a-z]/\n", [(2, "regular-expression")]),
]
LOST = {"odd-blank", "agent-list", "misspelt-field", "several-records", "unmatchable-rule"}


@pytest.mark.parametrize(
    ("line", "severity"),
    [
        ("Disallow /x", Severity.ERROR),
        ("Disallow /x: y", Severity.ERROR),
        ("User-agent bot", Severity.ERROR),
        ("Sitemap https://a.example/s.xml", Severity.ERROR),
        ("Disallow = /x", Severity.ERROR),
        ("Disallow=/x", Severity.ERROR),
        ("Disallow; /x", Severity.ERROR),
        ("Disallow\uff1a /x", Severity.ERROR),
        ("Sitemap = https://a.example/s.xml", Severity.ERROR),
        ("/x", Severity.ERROR),
        ("// all robots", Severity.WARNING),
        ("/* all robots */", Severity.WARNING),
        ("Allow me to explain", Severity.WARNING),
        ("hello", Severity.WARNING),
    ],
)
def test_a_missing_colon_behind_a_field_is_an_error(line: str, severity: Severity) -> None:
    found = RobotsTxt.parse(f"User-agent: *\n{line}\nDisallow: /a\n").findings
    assert [(each.line, each.code, each.severity) for each in found] == [(2, "no-colon", severity)]


def test_codes_of_lost_rules_are_errors_and_a_regular_expression_is_a_warning() -> None:
    assert {code: CODES[code].severity for code in LOST} == dict.fromkeys(LOST, Severity.ERROR)
    assert CODES["regular-expression"].severity is Severity.WARNING


@pytest.mark.parametrize(
    ("agent", "severity"),
    [
        ("FooBot/2.1", Severity.INFO),
        ("360Spider", Severity.INFO),
        ("* all", Severity.INFO),
        ("*bot", Severity.ERROR),
        ("\u201cbot\u201d", Severity.ERROR),
        (".*", Severity.ERROR),
    ],
)
def test_a_name_that_no_robot_has_is_an_error(agent: str, severity: Severity) -> None:
    found = RobotsTxt.parse(f"User-agent: {agent}\nDisallow: /a\n").findings
    assert [(each.code, each.severity) for each in found] == [("odd-agent", severity)]


def test_a_group_that_exempts_a_robot_from_the_star_rules_is_a_warning() -> None:
    named = "User-agent: bot\nCrawl-delay: 5\n"
    for rest, severity in (
        (GROUP + "Disallow: /a\n\n", "warning"),
        (GROUP + "Disallow:\n\n", "info"),
    ):
        (found,) = RobotsTxt.parse(rest + named).findings
        assert (found.line, found.code, found.severity) == (4, "group-without-rules", severity)


def test_a_group_of_allow_rules_says_that_its_robots_do_not_obey_the_rules_for_all() -> None:
    named = "User-agent: bot\nAllow: /b\n"
    (found,) = RobotsTxt.parse(GROUP + "Disallow: /a\n\n" + named).findings
    assert (found.line, found.code) == (5, "lone-allow")
    assert found.message.endswith(" Its robots do not obey the rules for `*` in line 1 either.")
    (found,) = RobotsTxt.parse(named + "\n" + GROUP + "Disallow:\n").findings
    assert found.message == CODES["lone-allow"].meaning


@pytest.mark.parametrize(
    "line",
    [
        "Sitemap: https://a.example/s.xml",
        "Host: a.example",
        "License: https://a.example/l.xml",
        "Clean-param: ref /shop/",
    ],
)
def test_records_outside_groups_are_no_finding(line: str) -> None:
    assert told(f"{line}\n") == []


@pytest.mark.parametrize(
    "text",
    [
        "User-agent: a\nCrawl-delay: 5\nDisallow: /a\n\nUser-agent: b\nDisallow: /b\n",
        "User-agent: a\nDisallow: /a\nCrawl-delay: 5\n\nUser-agent: b\nDisallow: /b\n",
        "User-agent: a\nUser-agent: b\nCrawl-delay: 5\nDisallow: /b\n",
    ],
)
def test_a_crawl_delay_beside_a_rule_of_its_group_is_no_fault(text: str) -> None:
    assert told(text) == []


_RECORDS = [
    "Content-Signal: ai-train=no",
    "Content-Usage: train-ai=n",
    "Crawl-delay: 5",
    "Request-rate: 1/5",
    "Comment: hello",
    "Sitemap: https://a.example/s.xml",
    "Host: a.example",
    "Noindex: /a",
    "Novelty: 1",
    "Dissallow: /a",
    "Disallow /a",
    "Disallow: /\0",
]


@pytest.mark.parametrize("blanks", [("", ""), ("\n", ""), ("", "\n"), ("# c\n", "\n# c\n")])
@pytest.mark.parametrize("record", _RECORDS)
def test_a_record_between_two_agent_lines_is_told_with_who_obeys_it(
    record: str, blanks: tuple[str, str]
) -> None:
    text = f"{GROUP}{blanks[0]}{record}\n{blanks[1]}User-agent: GPTBot\n\nDisallow: /\n"
    robots = RobotsTxt.parse(text)
    assert not robots.policy("other").allowed("/x")
    (found,) = (each for each in robots.findings if each.code == "joined-groups")
    assert found.severity == "warning"
    assert found.line == text[: text.index(record)].count("\n") + 1
    line = text.count("\n")
    assert found.message.endswith(f"'*' and 'GPTBot' obey 'Disallow: /' in line {line}.")


def test_a_blank_line_between_two_agents_is_told_and_comments_are_not() -> None:
    between = GROUP + "# all\n\nUser-agent: a\n# not these\nUser-agent: b\nDisallow: /\n"
    assert told(between) == [(3, "joined-groups")]
    assert told(between, "1994") == [(1, "group-without-rules")]  # there a blank line is an end


def test_each_line_that_joins_groups_is_told_with_all_agents_above_it() -> None:
    bots = "".join(f"User-agent: bot{name}\nCrawl-delay: 4\n\n" for name in "abcd")
    found = RobotsTxt.parse(bots + GROUP + "Disallow: /p\n").findings
    assert [(each.line, each.code) for each in found] == [
        (line, "joined-groups") for line in (2, 5, 8, 11)
    ]
    wanted = "'bota', 'botb', 'botc', 1 more and '*' obey 'Disallow: /p' in line 14."
    assert found[-1].message.endswith(wanted)
    (found,) = RobotsTxt.parse("User-agent: a\nCrawl-delay: 5\nUser-agent: b\n").findings[1:]
    assert found.message.endswith("'a' and 'b' obey the same records.")


def exempt(star: str, named: str) -> list[str]:
    """What is told about the group of a named robot that does not repeat the rules for all."""
    findings = RobotsTxt.parse(f"{GROUP}{star}\n\nUser-agent: Bot\n{named}\n").findings
    found = [each for each in findings if each.code == "named-group-exempts"]
    assert {(each.severity, each.line) for each in found} <= {("info", 3 + star.count("\n") + 1)}
    return [each.message.partition("). ")[2] for each in found]


def test_a_group_for_one_robot_is_told_with_the_rules_that_it_does_not_repeat() -> None:
    assert exempt("Disallow: /cart\nAllow: /b\nDisallow: /pay", "Disallow: /pay*") == [
        "Not obeyed by 'Bot': 'Disallow: /cart' in line 2."
    ]
    assert exempt("Disallow: /a\nDisallow: /b", "Disallow:") == [
        "Not obeyed by 'Bot': 'Disallow: /a' in line 2, 'Disallow: /b' in line 3."
    ]
    assert len(exempt("Disallow: /a", "Allow:")) == 1
    (many,) = exempt("\n".join(f"Disallow: /{name}" for name in "abcdef"), "Allow: /")
    assert many.endswith("'Disallow: /c' in line 4, 3 more.")


@pytest.mark.parametrize(
    ("star", "named"),
    [
        ("Disallow: /a", "Disallow: /"),
        ("Disallow: /a", "Disallow: *\nAllow: /a/b"),
        ("Disallow: /a/b*c\nDisallow: /%7Eb", "Disallow: /a/\nDisallow: /~b"),
        ("Disallow: *a\nDisallow: */b\nDisallow: *?c=*", "Disallow: /"),
        ("Disallow: /*.pdf$\nDisallow: *?c=1", "Disallow: *.pdf\nDisallow: /*?c="),
        ("Disallow: /", "Disallow: /a"),  # on purpose: the others are shut out
        ("Disallow:\nAllow: /a", "Disallow: /b"),
        ("Disallow: a", "Disallow: /b"),  # matches nothing
    ],
)
def test_a_group_that_denies_what_the_rules_for_all_deny_is_no_exception(
    star: str, named: str
) -> None:
    assert exempt(star, named) == []


def test_the_groups_of_one_robot_count_together() -> None:
    named = "Disallow: /a\n\nUser-agent: other\nDisallow: /\n\nUser-agent: bot\nDisallow: /b"
    assert exempt("Disallow: /a\nDisallow: /b", named) == []
    # Another version of its name, and groups that it shares with others.
    text = (
        f"{GROUP}Disallow: /a\nDisallow: /b\n\nUser-agent: bot\nDisallow: /a\n\n"
        "User-agent: other\nUser-agent: Bot/2.1\nDisallow: /b\n"
    )
    found = [each for each in RobotsTxt.parse(text).findings if each.code == "named-group-exempts"]
    assert [(each.line, each.message.partition("). ")[2]) for each in found] == [
        (8, "Not obeyed by 'other': 'Disallow: /a' in line 2.")
    ]


def test_patterns_that_match_the_same_paths_are_compared() -> None:
    assert told(GROUP + "Disallow: *a\nAllow: /*a*\n") == [(2, "unreachable-rule")]
    assert told(GROUP + "Disallow: */a\nAllow: /*/a\n") == []  # `/a` matches the first alone


def test_a_field_that_search_engines_no_longer_read_is_a_warning_with_the_remedy() -> None:
    for field, severity in (("Noindex", "warning"), ("NoFollow", "warning"), ("Novelty", "info")):
        (found,) = RobotsTxt.parse(GROUP + f"Disallow: /a\n{field}: /b\n").findings
        assert (found.code, found.severity) == ("unknown-field", severity)
        assert ("X-Robots-Tag" in found.message) == (severity == "warning")


@pytest.mark.parametrize("dialect", ["rfc9309", "1996"])
def test_the_remedy_for_a_rule_without_a_slash_is_one_of_its_dialect(dialect: str) -> None:
    robots = RobotsTxt.parse(GROUP + "Disallow: ?sid=\n", dialect=dialect)
    (found,) = robots.findings
    assert found.code == "unmatchable-rule"
    assert ("`/*` before it" in found.message) == (dialect == "rfc9309")
    remedied = RobotsTxt.parse(GROUP + "Disallow: /*?sid=\n", dialect=dialect)
    assert remedied.policy("a").allowed("/a?sid=1") == (dialect != "rfc9309")


def test_a_control_character_is_an_error_where_a_record_is_lost() -> None:
    for line, severity in (("Disallow: /\0b", "error"), ("# \0", "warning")):
        (found,) = RobotsTxt.parse(GROUP + f"Disallow: /a\n{line}\n").findings
        assert (found.code, found.severity) == ("control", severity)


@pytest.mark.parametrize("line", ["Disallow: /a # note", "Disallow: /a ## note", "Disallow: # /a"])
def test_a_comment_after_a_blank_is_no_fault(line: str) -> None:
    assert told(GROUP + f"{line}\nDisallow: /b\n") == []


@pytest.mark.parametrize("sign", [";", "//", "/", "!", "'", "<!-- "])
def test_a_line_that_was_meant_as_a_comment_is_not_restored(sign: str) -> None:
    text = GROUP + f"{sign}Disallow: /x\nDisallow: /a\n"
    assert told(text) == [(2, "unknown-field")]
    assert repaired(text.encode()) == text.encode()


def test_other_records_before_a_group_need_no_blank_line() -> None:
    assert told("Sitemap: https://a.example/s.xml\n" + GROUP + "Disallow: /a\n") == []


def test_messages_cite_the_standards_and_no_numbers_of_our_own() -> None:
    ours = re.compile(r"\b(R94|R96|V2|RFC|VND|SIG|HTTP|URL|DIA|GK)-[0-9]")
    assert [code for code in CODES if ours.search(CODES[code].meaning)] == []
    assert sum("RFC 9309 section" in entry.meaning for entry in CODES.values()) > 15


@pytest.mark.parametrize("value", ["/*.*", "/a*.html$", "/a(b)c", "/a+b", "/x.y", "/*.js.*.gzip"])
def test_values_that_only_look_like_regular_expressions_are_no_finding(value: str) -> None:
    assert told(GROUP + f"Disallow: {value}\n") == []


@pytest.mark.parametrize(
    ("text", "expected"), CASES, ids=[f"{case[1][0][1]}: {case[0]!a}"[:90] for case in CASES]
)
def test_each_fault_is_reported_once_at_its_line(
    text: str | bytes, expected: list[tuple[int, str]]
) -> None:
    assert told(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (GROUP + "Disallow: /a\n\n" + GROUP + "Disallow: /b\n", [(4, "several-star-groups")]),
        (GROUP + "Disallow: /a*\n", [(2, "literal-star")]),
        (GROUP + "Disallow: /a\nDisallow: /ab\n", [(3, "unreachable-rule")]),
        (GROUP + "Disallow: /a\nAllow: /a/b\n", [(3, "unreachable-rule")]),
    ],
)
def test_older_dialects_have_faults_of_their_own(
    text: str, expected: list[tuple[int, str]]
) -> None:
    assert told(text, "1996") == expected


def test_a_blank_line_ends_a_record_in_the_1994_dialect() -> None:
    assert (3, "rule-outside-group") in told("User-agent: a\n\nDisallow: /b\n", "1994")


def test_in_a_2_0_rule_set_what_follows_a_catch_all_is_dead() -> None:
    text = GROUP + "Robot-version: 2.0\nAllow: *index.html\nDisallow: *\nDisallow: *.shtml\n"
    assert told(text) == [(5, "unreachable-rule")]


def test_a_file_cut_at_the_limit_has_the_finding_truncated() -> None:
    robots = RobotsTxt.parse(GROUP + "Disallow: /a\n" + "#" * 200, limit=100)
    assert [finding.code for finding in robots.findings] == ["truncated"]


@pytest.mark.parametrize(
    "text",
    [
        "User-agent: *\nDisallow:\n",
        "User-agent: *\nDisallow: /\n",
        "User-agent: *\nAllow: /\n",
        "# hello\nUser-agent: a\nUser-agent: b-c_d\n# note\nDisallow: /x/*.gif$\nAllow: /x/y\n\n"
        "User-agent: *\nDisallow: /x/*.gif$\nCrawl-delay: 2.5\nRequest-rate: 1/10m 1300-1659\n"
        "Visit-time: 0600-0845\nComment: hello\nContent-Usage: /a train-ai=n\n"
        "Content-Signal: search=yes, ai-train=no\n\nSitemap: https://example.com/s.xml\n"
        "License: https://example.com/l.xml\nHost: example.com\nClean-param: a&b /c\n",
    ],
)
def test_a_sound_file_has_no_findings(text: str) -> None:
    assert told(text) == []


def test_every_code_is_tested_and_documented() -> None:
    tested = {code for _, expected in CASES for _, code in expected}
    elsewhere = {"several-star-groups", "literal-star", "truncated", "too-many"}
    assert tested | elsewhere == set(CODES)
    for entry in CODES.values():
        assert entry.meaning.endswith(".")
        assert isinstance(entry.severity, Severity)


def test_messages_are_printable_and_short() -> None:
    text = GROUP + "Disallow: x\u202e" + "y" * 10_000 + "\nX\u2028Y: 1\nDisallow: /b\n"
    findings = RobotsTxt.parse(text).findings
    assert {finding.line for finding in findings} >= {2, 3}
    for finding in findings:
        assert finding.message.isprintable()
        assert len(finding.message) < 300


def test_the_number_of_findings_is_bounded() -> None:
    found = RobotsTxt.parse(GROUP + "nonsense\n" * 5_000).findings
    assert len(found) == MAX_FINDINGS + 1
    assert found[-1].code == "too-many"


HOSTILE = {
    "rules": GROUP + "".join(f"Disallow: /{number}\n" for number in range(35_000)),
    "one rule again": GROUP + "Disallow: /a\n" * 38_000,
    "versioned rules": GROUP
    + "Robot-version: 1.0\n"
    + "".join(f"Disallow: /{'a' * (number % 900)}{number}\n" for number in range(1_000)),
    "groups": "".join(f"User-agent: a{number}\nAllow: /\n" for number in range(18_000)),
    "exceptions": GROUP
    + "".join(f"Disallow: /{number}\n" for number in range(13_000))
    + "".join(f"\nUser-agent: a{number}\nDisallow: /{number % 9}\n" for number in range(7_000)),
    "joined groups": "".join(f"User-agent: a{number}\n\n" for number in range(24_000)),
    "agents": "".join(f"User-agent: a{number}\n" for number in range(25_000)) + "Allow: /\n",
    "fields": "".join(f"f{number}{'x' * 8}: 1\n" for number in range(30_000)),
    "no line end": GROUP + "Disallow: /" + "a*" * 250_000,
    "one field": "a" * 250_000 + ":" + "b" * 250_000,
    "blanks": " " * 500_000 + ":",
    "dots": GROUP + "Disallow: " + "/." * 250_000,
    "escapes": GROUP + "Disallow: /" + "%" * 500_000,
    "dictionary": GROUP + "Content-Usage: " + "a=y," * 120_000 + "a=y",
    "colons": ":" * 500_000,
    "odd blanks in a field": GROUP + "a" + "\u00a0" * 120_000 + "b: 1",
    "odd blanks in a name": "User-agent: a" + "\u00a0" * 120_000 + "b",
    "fields in a value": GROUP + "Disallow: /" + "disallow " * 50_000,
    "number signs": GROUP + "Disallow: /a" + " #" * 200_000,
}


def test_the_cost_of_comparing_short_and_long_rules_is_bounded() -> None:
    """In the 1996 draft a rule is covered by a prefix of it, of which there are many lengths."""
    long = "".join(f"Allow: /{'a' * length}b\n" for length in range(10, 700))
    short = "".join(f"Allow: /{number:x}z\n" for number in range(14_000))
    after, before = (
        RobotsTxt.parse(GROUP + text, dialect="1996") for text in (long + short, short + long)
    )
    enough = 2.0 * processor_time(lambda: findings(before), 0.0)
    assert processor_time(lambda: findings(after), enough) < enough


def test_robots_that_share_a_large_group_are_compared_within_a_bound() -> None:
    """Each obeys 9,000 rules, and a group of its own. (As `--fix` reads: without a limit.)"""
    names = [f"User-agent: {''.join('abcdefghij'[int(n)] for n in str(k))}\n" for k in range(4_000)]
    rules = "".join(f"Disallow: /{number}\n" for number in range(9_000))
    text = GROUP + "Disallow: /x\n" + "".join(names) + rules
    text += "".join(f"{name}Disallow: /q\n" for name in names)
    robots = RobotsTxt.parse(text)
    assert processor_time(lambda: findings(robots, limit=sys.maxsize), 1.0) < 1.0


@pytest.mark.parametrize("name", HOSTILE)
def test_linting_is_linear(name: str) -> None:
    assert processor_time(lambda: findings(RobotsTxt.parse(HOSTILE[name])), 1.0) < 1.0


@given(
    st.lists(
        st.sampled_from(
            ["user-agent", "disallow", "allow", "robot-version", "sitemap", "x", ""]
        ).flatmap(lambda field: st.text(max_size=8).map(lambda value: f"{field}: {value}\n"))
        | st.sampled_from(["\n", "# c\n", "x\n"]),
        max_size=12,
    ).map("".join),
    st.sampled_from(["auto", "1994", "1996", "2.0", "rfc9309"]),
)
@settings(max_examples=of_many(300), deadline=None)
def test_every_finding_is_in_the_table_and_in_the_file(text: str, dialect: str) -> None:
    robots = RobotsTxt.parse(text, dialect=dialect)  # type: ignore[arg-type]
    lines = text.count("\n") + text.count("\r") + 1
    found = robots.findings
    assert list(found) == sorted(found, key=lambda finding: (finding.line, finding.code))
    for finding in found:
        assert finding.code in CODES
        assert 0 <= finding.line <= lines


@pytest.mark.parametrize("dialect", ["1994", "1996", "2.0"])
def test_a_stretch_without_a_record_is_no_group(dialect: str) -> None:
    assert RobotsTxt.parse("User-agent\n\nnonsense\n", dialect=dialect).groups == ()
    assert told("User-agent\n", dialect) == [(0, "empty"), (1, "no-colon")]


def test_findings_about_the_agents_of_a_group_are_in_the_order_of_the_file() -> None:
    group = "".join(f"User-agent: bot{letter}\n" for letter in "hgfedcba") + "Disallow: /\n"
    messages = [one.message for one in RobotsTxt.parse(f"{group}\n{group}").findings]
    repeated = re.findall(r"'bot(.)' in line 1", "".join(messages))
    assert repeated == list("hgfedcba")
