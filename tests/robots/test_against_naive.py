"""The fast matchers against naive, obviously right ones, on generated rules and paths."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.corpus import generate
from gatekeeper.robots import RobotsTxt, longest, patterns
from gatekeeper.robots.parser import PIECE
from gatekeeper.urls import split

UNRESERVED = set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")
RESERVED = set(":/?#@!$&'()*+,;=")  # brackets have no place in a path: always escaped

# Few letters, so that rules and paths meet; and everything that has a meaning somewhere. What
# an escape holds may be what a rule looks for: `F`, `A5`, `ad`, `2`.
PIECES = st.sampled_from(
    [
        *("a", "b", "F", "A5", "ad", "2", "/", "*", "$", "?", ":", " ", ".", "[", "é", "你"),
        *("%61", "%2F", "%2f", "%3A", "%3a", "%2A", "%24", "%", "%c3%ad", "%C3%AD", "%a5", "%A5"),
    ]
)
VALUES = st.builds("".join, st.lists(PIECES, max_size=8)).map(str.strip)
ROOTED = st.one_of(VALUES, VALUES.map("/{}".format), VALUES.map("/*{}".format))
PATHS = st.lists(PIECES, max_size=8).map("".join).map("/{}".format)
RULES = st.lists(st.tuples(st.sampled_from(["Allow", "Disallow"]), ROOTED), max_size=8)

Tokens = list[str]


def normal_form(text: str, keep: set[str]) -> str:
    """RFC-22 to RFC-24, an octet or escape at a time; `keep`: reserved ones left alone."""
    found: Tokens = []
    data = text.encode()
    i = 0
    while i < len(data):
        char = chr(data[i])
        if re.fullmatch(rb"%[0-9A-Fa-f]{2}", data[i : i + 3]):
            octet = int(data[i + 1 : i + 3], 16)
            found.append(chr(octet) if chr(octet) in UNRESERVED else f"%{octet:02X}")
            i += 3
            continue
        found.append(char if char in UNRESERVED or char in keep else f"%{data[i]:02X}")
        i += 1
    return "".join(found)


def by_rfc_25(text: str) -> str:
    path, mark, query = text.partition("?")
    return path + mark + query.replace("%3A", ":").replace("%2F", "/")


def wild(pattern: str, path: str, anchored: bool) -> bool:
    """Octet by octet, trying everything."""

    @cache
    def matches(i: int, j: int) -> bool:
        if i == len(pattern):
            return not anchored or j == len(path)
        if pattern[i] == "*":
            return any(matches(i + 1, k) for k in range(j, len(path) + 1))
        return j < len(path) and pattern[i] == path[j] and matches(i + 1, j + 1)

    return matches(0, 0)


def naive_rfc(rules: list[tuple[str, str]], path: str) -> bool:
    seen = normal_form(path, RESERVED - set("*$"))
    best = (0, True)
    for field, written in rules:
        value = written.partition("#")[0].strip(" \t")
        if value[:1] not in {"/", "*"}:
            continue
        anchored = value.endswith("$")
        pattern = normal_form(value.removesuffix("$") if anchored else value, RESERVED - {"$"})
        # As they stand, or as RFC-25 reads them, which says something of rules with a `?` only.
        forms = {pattern, by_rfc_25(pattern)}
        views = {seen, by_rfc_25(seen)} if "?" in pattern else {seen}
        if any(wild(form, view, anchored) for form in forms for view in views):
            length = len(by_rfc_25(pattern)) + anchored
            best = max(best, (length, field == "Allow"))
    return seen == "/robots.txt" or best[1]


@pytest.mark.parametrize("before", range(PIECE - 9, PIECE + 1))
def test_an_escape_where_a_long_text_is_cut_is_read_as_anywhere_else(before: int) -> None:
    """A lone `%`, too; and a mark between values that are read together."""
    long, rest = "/" + "a" * before, "%4%%41%2f%c3%aD%2a%$%" * 2
    decoded = long + "".join(old_tokens(rest)).replace("escaped /", "\u0100")

    assert patterns.rfc_path(long + rest) == long + normal_form(rest, RESERVED - set("*$"))
    assert patterns.rfc_pattern(long + rest) == long + normal_form(rest, RESERVED - {"$"})
    assert patterns.decoded(long + rest) == decoded
    values = [long + rest, rest, "", "a"]
    assert patterns.decoded_patterns(values)[0] == decoded.replace("*", "\\*")
    assert patterns.decoded_patterns(values)[2:] == ["", "a"]


def old_tokens(text: str) -> Tokens:
    """As 1996 compares: every escape decoded but that of the slash."""
    found: Tokens = []
    data = text.encode()
    i = 0
    while i < len(data):
        if re.fullmatch(rb"%[0-9A-Fa-f]{2}", data[i : i + 3]):
            octet = int(data[i + 1 : i + 3], 16)
            found.append("escaped /" if octet == 0x2F else chr(octet))
            i += 3
        else:
            found.append(chr(data[i]))
            i += 1
    return found


def naive_1996(rules: list[tuple[str, str]], path: str) -> bool:
    seen = old_tokens(path)
    for field, value in rules:
        prefix = old_tokens(value)
        if prefix and seen[: len(prefix)] == prefix:
            return seen == list("/robots.txt") or field == "Allow"
    return True


def naive_1994(rules: list[tuple[str, str]], path: str) -> bool:
    return naive_1996([rule for rule in rules if rule[0] == "Disallow"], path)


def text_of(rules: list[tuple[str, str]]) -> str:
    return "User-agent: *\n" + "".join(f"{field}: {value}\n" for field, value in rules)


@pytest.fixture(params=["one by one", "at once", "short paths", "counted"], scope="module")
def layout(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every way to look for the longest rule: prepared when needed or at once, with the patterns
    tried one by one or looked up by their pieces."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "at once":
            patch.setattr(longest, "LARGE", -1)
        if request.param == "short paths":
            patch.setattr(longest, "MAX_LINEAR_PAIRS", 60)
        if request.param == "counted":
            patch.setattr(longest, "MAX_LINEAR_PATTERNS", 0)
            patch.setattr(patterns, "MAX_SHARED", 1)
        yield


@given(rules=RULES, path=PATHS)
def test_rfc9309_verdicts_equal_a_naive_reader(
    layout: None, rules: list[tuple[str, str]], path: str
) -> None:
    policy = RobotsTxt.parse(text_of(rules), dialect="rfc9309").policy("bot")
    expected = naive_rfc(rules, path)

    for _ in range(3):
        assert policy.allows(path, "") is expected
    for form in (policy.plain, policy.flat()):
        assert form is None or form.allows_plain(path) in (expected, None)
    match = policy.match_path(path)
    assert match.allowed is expected
    # The rule is the longest one, of equal ones an Allow, of these the first.
    candidates = match.candidates
    best = [one for one in candidates if one.length == candidates[0].length]
    named = min(best, key=lambda one: (one.field != "Allow", one.line), default=None)
    if match.rule is not None or path != "/robots.txt":
        assert (match.rule and match.rule.line) == (named and named.line)


def test_verdicts_on_realistic_files_equal_a_naive_reader(layout: None) -> None:
    asked = 0
    for site in generate(60, urls=6, seed=1)[::2]:  # every second one is asked for a named robot
        robots = RobotsTxt.parse(site.body)
        policy = robots.policy(site.agent)
        groups = [group for group in robots.groups if "*" in group.agents]
        rules = [(rule.field, rule.value) for group in groups for rule in group.rules]
        for url in site.urls:
            origin, path = split(url)
            expected = naive_rfc(rules, path)
            asked += expected is False
            assert policy.allowed(url) is policy.match_path(path, origin).allowed is expected
            for form in (policy.plain, policy.flat()):
                assert form is None or form.allows_plain(path) in (expected, None)
    assert asked > 20


NEAR = st.sampled_from(
    [
        *("/robots.txt", "/robots%2Etxt", "/robots.txt.gz", "/robots.txt?a", "/robots.tx", "/"),
        *("/robots.txt0", "/robots.txt/", "/robots", "/robots.txt%00", "/s", "/robotsAtxt"),
    ]
)
NEAR_RULES = st.lists(
    st.tuples(
        st.sampled_from(["Allow", "Disallow"]),
        st.builds("{}{}".format, NEAR, st.sampled_from(["", "$", "*", "**", "*a", "/", "*$"])),
    ),
    max_size=6,
)


@given(rules=NEAR_RULES, path=NEAR)
def test_only_the_exact_path_of_robots_txt_is_always_allowed(
    layout: None, rules: list[tuple[str, str]], path: str
) -> None:
    policy = RobotsTxt.parse(text_of(rules), dialect="rfc9309").policy("bot")
    expected = naive_rfc(rules, path)

    for _ in range(3):
        assert policy.allows(path, "") is expected
    match = policy.match_path(path)
    assert match.allowed is expected
    if path in {"/robots.txt", "/robots%2Etxt"}:
        assert match.rule is None


@given(rules=RULES, path=PATHS)
def test_rfc9309_candidates_are_the_rules_that_match(
    layout: None, rules: list[tuple[str, str]], path: str
) -> None:
    match = RobotsTxt.parse(text_of(rules), dialect="rfc9309").policy("bot").match_path(path)

    matching = {
        number + 2
        for number, rule in enumerate(rules)
        if naive_rfc([("Disallow", rule[1])], path) is False
    }
    assert {candidate.line for candidate in match.candidates} == matching
    lengths = [candidate.length for candidate in match.candidates]
    assert lengths == sorted(lengths, reverse=True)
    if match.rule is not None:
        assert match.candidates[0].line == match.rule.line


@given(text=st.text("ab", max_size=40), parts=st.lists(st.text("ab", max_size=20), max_size=20))
def test_the_piece_index_finds_every_piece_in_a_text(text: str, parts: list[str]) -> None:
    found = patterns.PieceIndex(parts).find_in(patterns.CountedText(text, patterns.StepBudget()))
    assert sorted(found) == [number for number, part in enumerate(parts) if part in text]


@pytest.mark.parametrize(("dialect", "naive"), [("1996", naive_1996), ("1994", naive_1994)])
@given(rules=RULES, path=PATHS)
def test_verdicts_of_older_dialects_equal_a_naive_reader(
    dialect: str, naive, rules: list[tuple[str, str]], path: str
) -> None:
    policy = RobotsTxt.parse(text_of(rules), dialect=dialect).policy("bot")
    assert policy.allows(path, "") is naive(rules, path)
    assert policy.match_path(path).allowed is naive(rules, path)


URLS = st.lists(st.one_of(PIECES, st.sampled_from(["#", "..", "/.", "%2e", "%2E/"])), max_size=8)


@given(rules=RULES, urls=st.lists(URLS.map("".join).map("http://a.example/{}".format), max_size=8))
def test_whole_urls_are_judged_like_their_paths(
    layout: None, rules: list[tuple[str, str]], urls: list[str]
) -> None:
    policy = RobotsTxt.parse(text_of(rules), dialect="rfc9309").policy("bot")
    for url in map(str.strip, urls):
        path = split(url)[1]
        assert policy.allowed(url) is naive_rfc(rules, path)
        assert policy.match(url).path == path


TEXTS = st.text("ab/:~.-_,;=@+!*$'()", max_size=10).map("/{}".format)
PLAIN = TEXTS.filter(lambda path: "/." not in path)


@given(rules=RULES, path=PLAIN, dialect=st.sampled_from(["rfc9309", "2.0", "1996", "1994"]))
def test_the_fast_paths_give_the_verdict_of_the_full_match(
    layout: None, rules: list[tuple[str, str]], path: str, dialect: str
) -> None:
    policy = RobotsTxt.parse(text_of(rules), dialect=dialect).policy("bot")
    expected = policy.match_path(path).allowed
    for rules in (policy.plain, policy.flat()):
        assert rules is None or rules.allows_plain(path) in (expected, None)


SHELL = st.lists(
    st.sampled_from(["a", "b", "/", "*", "?", "[ab]", "[!a]", "[a-b]", "[", "]", "\\*", "\\"]),
    max_size=8,
).map("".join)
PLAIN_PATHS = st.text("ab/*[]\\-", max_size=8).map("/{}".format)


def naive_shell(pattern: str, path: str) -> bool:
    """A shell pattern, a character at a time, trying everything."""
    if not pattern:
        return not path
    head, rest = pattern[0], pattern[1:]
    if head == "*":
        return any(naive_shell(rest, path[i:]) for i in range(len(path) + 1))
    if head == "[":
        end = rest.find("]", 2 if rest[:1] in {"!", "^"} else 1)
        found = re.match(r"\[[!^]?(?:\]|\\.|[^\]\\])(?:\\.|[^\]\\])*\]", pattern)
        if found and end >= 0:
            inner = found[0][1:-1]
            negated = inner[:1] in {"!", "^"}
            members = set(re.sub(r"\\(.)", r"\1", inner.removeprefix("!").removeprefix("^")))
            if "a-b" in inner:
                members -= {"-"}
            return (
                bool(path)
                and (path[0] in members) is not negated
                and naive_shell(pattern[found.end() :], path[1:])
            )
    if head == "\\" and rest:
        head, rest = rest[0], rest[1:]
    elif head == "?":
        return bool(path) and naive_shell(rest, path[1:])
    return path[:1] == head and naive_shell(rest, path[1:])


@given(value=SHELL, path=PLAIN_PATHS)
def test_shell_patterns_of_2_0_equal_a_naive_matcher(value: str, path: str) -> None:
    text = f"User-agent: *\nRobot-version: 2.0\nDisallow: {value}\n"
    policy = RobotsTxt.parse(text, dialect="2.0").policy("bot")
    assert policy.allows(path, "") is not (bool(value) and naive_shell(value, path))
