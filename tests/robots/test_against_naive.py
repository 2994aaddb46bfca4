"""The fast matchers against naive, obviously right ones, on generated rules and paths."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gatekeeper.robots import RobotsTxt, trie, wilds

UNRESERVED = set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")
RESERVED = set(":/?#@!$&'()*+,;=")  # brackets have no place in a path: always escaped

# Few letters, so that rules and paths meet; and everything that has a meaning somewhere.
PIECES = st.sampled_from(
    [
        "a",
        "b",
        "/",
        "*",
        "$",
        "?",
        ":",
        "%61",
        "%2F",
        "%2f",
        "%3A",
        "%2A",
        "%24",
        "%",
        "é",
        " ",
        ".",
    ]
)
VALUES = st.builds("".join, st.lists(PIECES, max_size=8)).map(str.strip)
ROOTED = st.one_of(VALUES, VALUES.map("/{}".format))
PATHS = st.lists(PIECES, max_size=8).map("".join).map("/{}".format)
RULES = st.lists(st.tuples(st.sampled_from(["Allow", "Disallow"]), ROOTED), max_size=8)

Tokens = list[str]


def tokens(text: str, keep: str) -> Tokens:
    """The RFC's normal form, a list item an octet or escape; `keep`: reserved ones left alone."""
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
    return found


def by_rfc_25(found: Tokens) -> Tokens:
    if "?" not in found:
        return found
    mark = found.index("?")
    same = {"%3A": ":", "%2F": "/"}
    return found[:mark] + [same.get(token, token) for token in found[mark:]]


def wild(pattern: Tokens, path: Tokens, anchored: bool) -> bool:
    @cache
    def matches(i: int, j: int) -> bool:
        if i == len(pattern):
            return not anchored or j == len(path)
        if pattern[i] == "*":
            return any(matches(i + 1, k) for k in range(j, len(path) + 1))
        return j < len(path) and pattern[i] == path[j] and matches(i + 1, j + 1)

    return matches(0, 0)


def naive_rfc(rules: list[tuple[str, str]], path: str) -> bool:
    plain = tokens(path, keep="".join(RESERVED - set("*$")))
    best = (0, True)
    for field, written in rules:
        value = written.partition("#")[0].strip(" \t")
        if value[:1] not in {"/", "*"}:
            continue
        anchored = value.endswith("$")
        pattern = tokens(value.removesuffix("$") if anchored else value, "".join(RESERVED - {"$"}))
        seen = plain
        if "?" in pattern:
            pattern, seen = by_rfc_25(pattern), by_rfc_25(plain)
        if wild(pattern, seen, anchored):
            length = sum(map(len, pattern)) + anchored
            best = max(best, (length, field == "Allow"))
    return path == "/robots.txt" or best[1]


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
            return path == "/robots.txt" or field == "Allow"
    return True


def naive_1994(rules: list[tuple[str, str]], path: str) -> bool:
    return naive_1996([rule for rule in rules if rule[0] == "Disallow"], path)


def text_of(rules: list[tuple[str, str]]) -> str:
    return "User-agent: *\n" + "".join(f"{field}: {value}\n" for field, value in rules)


@pytest.fixture(params=["flat", "trie", "branching trie", "indexed trie"], scope="module")
def layout(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every way to hold wildcard patterns: the one for few, and those for many."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param != "flat":
            patch.setattr(wilds, "_FLAT_RULES", 0)
        if request.param in {"branching trie", "indexed trie"}:
            patch.setattr(trie, "_BUCKET", 0)
        if request.param == "indexed trie":
            patch.setattr(trie, "_MANY", 1)
            patch.setattr(trie, "_HARD", 0)
        yield


@given(rules=RULES, path=PATHS)
def test_rfc9309(layout: None, rules: list[tuple[str, str]], path: str) -> None:
    policy = RobotsTxt.parse(text_of(rules), dialect="rfc9309").policy("bot")
    expected = naive_rfc(rules, path)

    assert policy.allows_path(path) is expected, "read off the text"
    assert policy.allows_path(path) is expected, "made ready"
    assert policy.match_path(path).allowed is expected, "explained"


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


@given(text=st.text("ab", max_size=40), pieces=st.lists(st.text("ab", min_size=1, max_size=9)))
def test_last_places(text: str, pieces: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trie, "_HARD", 0)
        last = trie.LastPlaces(text)
        assert [last[piece] for piece in pieces] == [text.rfind(piece) for piece in pieces]


@pytest.mark.parametrize(("dialect", "naive"), [("1996", naive_1996), ("1994", naive_1994)])
@given(rules=RULES, path=PATHS)
def test_older_dialects(dialect: str, naive, rules: list[tuple[str, str]], path: str) -> None:
    policy = RobotsTxt.parse(text_of(rules), dialect=dialect).policy("bot")
    assert policy.allows_path(path) is naive(rules, path)
    assert policy.match_path(path).allowed is naive(rules, path)


TEXTS = st.text("ab/:~.-_,;=@+!*$'()", max_size=10).map("/{}".format)
PLAIN = TEXTS.filter(lambda path: "/." not in path)


@given(rules=RULES, path=PLAIN, dialect=st.sampled_from(["rfc9309", "2.0", "1996", "1994"]))
def test_the_quick_roads_lead_where_the_long_one_does(
    rules: list[tuple[str, str]], path: str, dialect: str
) -> None:
    policy = RobotsTxt.parse(text_of(rules), dialect=dialect).policy("bot")
    expected = policy.match_path(path).allowed
    assert policy.plain_answer()(path) is expected
    assert policy.quick_answer()(path) in (expected, None)


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
def test_shell_patterns(value: str, path: str) -> None:
    text = f"User-agent: *\nRobot-version: 2.0\nDisallow: {value}\n"
    policy = RobotsTxt.parse(text, dialect="2.0").policy("bot")
    assert policy.allows_path(path) is not (bool(value) and naive_shell(value, path))
