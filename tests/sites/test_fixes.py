"""Where findings stand in their lines, and the changes that mend them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.corpus import Site, generate
from gatekeeper.robots import Dialect, RobotsTxt
from gatekeeper.robots.parser import LIMIT
from gatekeeper.sites.composition import diff, named_agents
from gatekeeper.sites.fixes import FIXABLE, repaired
from gatekeeper.sites.lint import CODES, MAX_FINDINGS

GROUP = "User-agent: *\n"


def spans(text: str | bytes) -> dict[str, str | None]:
    """What each finding points at, by its code."""
    robots = RobotsTxt.parse(text)
    lines = robots.text.split("\n")
    return {
        f.code: lines[f.line - 1][f.column - 1 : f.end_column - 1] if f.column else None
        for f in robots.findings
    }


@pytest.mark.parametrize(
    ("line", "code", "pointed"),
    [
        ("  Dissallow : /x # why", "misspelt-field", "Dissallow"),
        ("Novelty: 1", "unknown-field", "Novelty"),
        ("Disallow /x # why", "no-colon", "Disallow /x # why"),
        ("Allow: /x Disallow: /y", "several-records", "Disallow:"),
        ("Disallow: /a#b", "hash-in-path", "#"),
        ("Disallow: /a b", "blank-in-value", " "),
        ("Disallow: /grün/x", "unescaped-non-ascii", "ü"),
        ("Disallow: /100%/%41", "bad-escape", "%"),
        ("Disallow: /a.*b", "regular-expression", ".*"),
        ("Disallow: /a$b$", "dollar-inside", "$"),
        ("Disallow: private # x", "unmatchable-rule", "private"),
        ("Disallow: /robots.txt", "robots-txt-rule", "/robots.txt"),
        ("Crawl-delay: soon", "bad-crawl-delay", "soon"),
        ("Sitemap:   sitemap.xml  ", "bad-sitemap", "sitemap.xml"),
        ("Sitemap: # none", "bad-sitemap", "Sitemap:"),
        ("Allow:\x01/x", "control", "\x01"),
    ],
)
def test_a_finding_has_the_columns_of_its_text(line: str, code: str, pointed: str) -> None:
    assert spans(f"{GROUP}{line}\nDisallow: /z\n")[code] == pointed


def test_columns_count_characters() -> None:
    (finding,) = RobotsTxt.parse(f"{GROUP}# ä\nDisallow: /x %y\n".replace(" %", "%")).findings
    assert (finding.line, finding.column, finding.end_column) == (3, 13, 14)


def test_a_finding_about_the_whole_file_has_no_column() -> None:
    assert spans("") == {"empty": None}
    assert spans("User-agent: *\n\nDisallow: /x\n")["blank-inside-group"] == ""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("User agent: *\nDissallow: /x\n", "User-agent: *\nDisallow: /x\n"),
        (GROUP + "Disallow /x # why\n", GROUP + "Disallow: /x # why\n"),
        (GROUP + "Disallow = /x\nAllow: /y\n", GROUP + "Disallow: /x\nAllow: /y\n"),
        (GROUP + "\u00a0- Disallow: /x\n", GROUP + "Disallow: /x\n"),
        ("User-agent: a|b\nDisallow: /\n", "User-agent: a\nUser-agent: b\nDisallow: /\n"),
        (GROUP + "disallow\t/x\n", GROUP + "disallow: /x\n"),
        ("User-agent: a, b;c\nDisallow: /\n", "User-agent: a\nUser-agent: b\nUser-agent: c\n"
         "Disallow: /\n"),
        ("User-agent: bot\u00a0\nDisallow: /\n", "User-agent: bot\nDisallow: /\n"),
        (GROUP + "Disallow: /grün 1\n", GROUP + "Disallow: /gr%C3%BCn 1\n"),
        (GROUP + "Disallow: /100%\n", GROUP + "Disallow: /100%25\n"),
        (GROUP + "Disallow: /~a\nDisallow: /%7Ea\n", GROUP + "Disallow: /~a\n"),
        (GROUP + "Disallow: /x\nUser-agent: a\nDisallow: /y\n",
         GROUP + "Disallow: /x\n\nUser-agent: a\nDisallow: /y\n"),
        (GROUP + "Disallow: /x\nSite map: https://a.test/s\n",
         GROUP + "Disallow: /x\nSitemap: https://a.test/s\n"),
        (GROUP + "Disallow /x\r\nAllow: /ä\r\n", GROUP + "Disallow: /x\r\nAllow: /%C3%A4\r\n"),
        ("\ufeff" + GROUP + "Disallow: /\r", GROUP + "Disallow: /\r"),
        ("User-agent: a,b", "User-agent: a\nUser-agent: b"),
        # A second mark is no mark, but a part of the first field.
        ("\ufeff\ufeff" + GROUP + "Disallow: /\n", GROUP + "Disallow: /\n"),
    ],
)  # fmt: skip
def test_certain_faults_are_fixed(before: str, after: str) -> None:
    assert repaired(before.encode()).decode() == after


@pytest.mark.parametrize(
    "text",
    [
        # Whether the words behind the blank belong to the path only its author knows.
        GROUP + "Disallow: /x the cart\n",
        GROUP + "Dissallow: cart\n",  # a field mended would be a rule that matches nothing
        GROUP + "Site map: /sitemap.xml\n",
        GROUP + "Disallow me from here\n",
        "User-agent: a, the others\nDisallow: /\n",
        GROUP + "Disallow: /a\nDisallow: /a**\n",  # longer: it beats what the first one does not
        GROUP + "Disallow: /a\nAllow: /a\n",
        "User-agent: *\nRobot-version: 2.0\nDisallow: /100%\nDisallow: /100%\n",
        GROUP + "Crawl-delay: 3s\nDisallow: /\n",
        # A robot of 1994 begins another record after the blank line, and knows no Allow.
        GROUP + "\nDisallow: /x\n",
        GROUP + "Sitemap: https://a.test/s\n\nUser-agent: b\nDisallow: /\n",
        GROUP + "Allow: /x\nUser-agent: b\nDisallow: /\n",
        GROUP + "Disallow: *\u00a0\n",  # without the character it would deny everything
        GROUP + "Disallow: http://a%zz.test/x\n",
        # Without the first mark the second one would be read as one, or the half of a letter.
        "\ufeff\ufeff# c\n" + GROUP,
        "\ufeff\uff01\n" + GROUP,
        # Without the blank line the version would count, and `Allow: /b` as an exact path.
        GROUP + "\nRobot-version: 2.0\nDisallow: *\nAllow: /b\n",
    ],
)
def test_uncertain_faults_are_not_fixed(text: str) -> None:
    assert repaired(text.encode()).decode() == text


def test_a_restored_user_agent_line_stays_in_the_group_below_it() -> None:
    text = "User-agent: a\nDisallow: /x\nUseragent: b\nUser-agent: c\nDisallow: /\n"
    mended = "User-agent: a\nDisallow: /x\n\nUser-agent: b\nUser-agent: c\nDisallow: /\n"
    assert repaired(text.encode()).decode() == mended


def test_more_lines_than_reported_findings_are_fixed_at_once() -> None:
    many = [f"/{number}" for number in range(2 * MAX_FINDINGS)]
    text = GROUP + "".join(f"nonsense\nDissallow: {path}\n" for path in many)
    assert repaired(text.encode()) == text.replace("Diss", "Dis").encode()


def test_a_fixed_file_does_not_grow_beyond_the_limit() -> None:
    body = (GROUP + "Disallow: /" + "\u4e2d" * 100 + "\n").encode()
    assert len(repaired(body)) > len(body)
    long = body + b"# " + b"x" * (LIMIT - len(body) - 3) + b"\n"
    assert repaired(long) == long
    wide = ("\ufeff" + GROUP + "#" + "\u4e2d" * 200_000 + "\nDisallow: /x\n").encode("utf-16-le")
    assert repaired(wide) == wide


def test_octets_of_other_lines_stay_what_they_are() -> None:
    body = b"# caf\xe9\r\nUser-agent: *\rDisallow /x\nDisallow: /\xe9\n\n"
    assert repaired(body) == body.replace(b"Disallow /x", b"Disallow: /x")


def test_utf_16_becomes_utf_8() -> None:
    body = ("\ufeff" + GROUP + "Disallow: /x\n").encode("utf-16-le")
    assert repaired(body) == (GROUP + "Disallow: /x\n").encode()


def test_ignored_codes_are_not_mended_and_a_cut_file_is_left_alone() -> None:
    body = b"User agent: *\nDisallow /x\n"
    assert repaired(body, ignore={"no-colon"}) == b"User-agent: *\nDisallow /x\n"
    long = body + b"#" * 600_000 + b"\n"
    assert repaired(long) == long


@pytest.mark.parametrize("coding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize("mark", ["\ufeff", "\ufeff\ufeff"])
def test_a_file_that_stays_in_another_encoding_is_left_alone(coding: str, mark: str) -> None:
    """A blank line of one octet would shift all others."""
    text = mark + GROUP + "Disallow: /a\nUser-agent: b\nDisallow: /b\nDisallow: /b\n"
    body = text.encode(coding)
    assert repaired(body, ignore={"encoding"}) == body
    if mark == "\ufeff\ufeff":
        assert repaired(body) == body


def test_a_mark_is_restored_as_part_of_a_field_or_kept() -> None:
    body = ("\ufeff\ufeff" + GROUP + "Disallow: /\n").encode()
    assert repaired(body, ignore=_RESTORING) == body


def test_every_fixable_code_is_a_code() -> None:
    assert set(CODES) >= FIXABLE


_LINES = st.sampled_from(
    [
        *("User-agent: *", "User-agent: a", "User-agent: b", "", "Allow: /y", "Allow: /~a"),
        *("User-agent: *", "User agent: a", "User-agent: b, c", "User-agent: d\u00a0", ""),
        *("Disallow: /x", "Disallow: /x", "Dissallow: /y", "Disallow /z", "Allow: /ä", "# c"),
        *("Disallow: /100%", "Disallow: /a b", "Sitemap: x", "Crawl-delay 3", "Disallow:"),
        *("Disallow: /%7Ea", "Disallow: /~a", "Allow: /x*", "  \t", "\x01 Disallow: /"),
    ]
)
_FILES = st.lists(_LINES, max_size=12).map("\n".join)
_RESTORING = {"misspelt-field", "no-colon", "odd-blank", "agent-list"}


@settings(deadline=None)
@given(_FILES)
def test_fixing_twice_changes_nothing_more(text: str) -> None:
    once = repaired(text.encode())
    assert repaired(once) == once


_DIALECTS = ("auto", *Dialect)


def verdicts(text: str | bytes, agents: list[str], paths: list[str]) -> dict[object, bool]:
    """What every dialect says to the agents about the paths."""
    return {
        (dialect, agent, path): policy.allowed(path)
        for dialect in _DIALECTS
        for robots in [RobotsTxt.parse(text, dialect=dialect)]
        for agent in agents
        for policy in [robots.policy(agent)]
        for path in paths
    }


@settings(deadline=None)
@given(_FILES)
def test_where_no_lost_line_is_restored_no_verdict_of_any_dialect_changes(text: str) -> None:
    mended = repaired(text.encode(), ignore=_RESTORING)
    found = diff(RobotsTxt.parse(text), RobotsTxt.parse(mended))
    assert found.complete
    assert found.changes == ()
    paths = ["/", "/x", "/y", "/z", "/%C3%A4", "/100%25", "/~a", "/a%20b"]
    agents = ["other", *"abcd"]
    assert verdicts(mended, agents, paths) == verdicts(text, agents, paths)


@pytest.mark.parametrize("site", generate(20), ids=range(20))
def test_mending_a_file_of_the_usual_shape_changes_no_verdict_of_any_dialect(site: Site) -> None:
    """Without the blank lines that set its groups apart, and with another one in each group."""
    lines = [line for line in site.body.decode().splitlines() if line]
    for position in (0, 1, 2):
        text = "\n".join(
            line + "\n" * (number % 7 == position) for number, line in enumerate(lines)
        )
        mended = repaired(text.encode())
        assert mended == repaired(text.encode(), ignore=_RESTORING)
        agents = [*named_agents(RobotsTxt.parse(text)), "other"][:6]
        assert verdicts(mended, agents, list(site.urls)) == verdicts(text, agents, list(site.urls))
        assert repaired(mended) == mended


@settings(deadline=None)
@given(_FILES)
def test_a_mended_finding_is_gone(text: str) -> None:
    before = [f.code for f in RobotsTxt.parse(text).findings]
    for code in _RESTORING:
        once = repaired(text.encode(), ignore=FIXABLE - {code})
        left = [f.code for f in RobotsTxt.parse(once).findings]
        assert once == text.encode() or left.count(code) < before.count(code)


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_octets_can_be_mended(body: bytes) -> None:
    for finding in RobotsTxt.parse(repaired(body)).findings:
        assert 0 <= finding.column <= finding.end_column
