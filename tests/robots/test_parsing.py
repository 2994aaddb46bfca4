"""From octets to lines and groups, whatever the octets are."""

from __future__ import annotations

import gc
import pickle
import sys
from types import FunctionType, ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gatekeeper.robots import Dialect, RobotsTxt, patterns
from gatekeeper.robots.parser import to_octets

RULES = "User-agent: *\nDisallow: /b\n"

JUNK = st.lists(
    st.sampled_from(
        b"User-agent,Disallow,Allow,Robot-version,Sitemap,Crawl-delay,:, ,\t,\n,\r,#,*,$,/,[,2.0,"
        b"1/2s,\0,\xff,\xc3\xa9,\xef\xbb\xbf,\xff\xfe,%41,a".split(b",")
    )
).map(b"".join)


def denies(body: bytes | str, path: str = "/b", agent: str = "bot") -> bool:
    return not RobotsTxt.parse(body).policy(agent).allowed(path)


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n"])
def test_line_ends_at_cr_lf_or_both(end: str) -> None:
    """RFC-04, R94-02"""
    assert denies(f"User-agent: *{end}Disallow: /a{end}Disallow: /b{end}")


@pytest.mark.parametrize("end", ["\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\u2029"])
def test_only_carriage_return_and_line_feed_end_a_line(end: str) -> None:
    """RFC-04: Python's own idea of line ends is wider."""
    assert not denies(f"User-agent: *\nDisallow: /a{end}Disallow: /b\n")


def test_carriage_return_and_line_feed_are_one_end() -> None:
    assert RobotsTxt.parse("\r\n\r\nUser-agent: *\r\n").groups[0].line == 3


@pytest.mark.parametrize("mark", [b"\xef\xbb\xbf", b"\xef\xbb", b"\xef"])
def test_byte_order_mark_is_skipped(mark: bytes) -> None:
    """RFC-39; a mark that was cut short too."""
    robots = RobotsTxt.parse(mark + RULES.encode())
    assert robots.bom == "utf-8"
    assert robots.policy("bot").match("/b").rule.text == "Disallow: /b"


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
def test_wider_encodings_are_known_by_their_mark(encoding: str) -> None:
    """RFC-44"""
    body = ("\ufeff" + RULES + "Disallow: /é\n").encode(encoding)
    robots = RobotsTxt.parse(body)
    assert robots.bom == encoding
    assert not robots.policy("bot").allowed("/%C3%A9")


def test_a_utf_16_file_is_cut_at_a_whole_line() -> None:
    body = ("\ufeffUser-agent: *\nDisallow: /b\n" + "Disallow: /c\n" * 10).encode("utf-16-le")
    robots = RobotsTxt.parse(body, limit=len(body) - 3)
    assert robots.truncated
    assert robots.text.endswith("Disallow: /c\n")


@pytest.mark.parametrize("octet", sorted(set(range(0x20)) - set(b"\t\n\r")))
def test_a_control_octet_makes_only_its_own_line_unreadable(octet: int) -> None:
    """RFC-42"""
    body = b"User-agent: *\nDisallow: /a" + bytes([octet]) + b"\nDisallow: /b\n"
    assert denies(body, "/b")
    assert not denies(body, "/a")


def test_a_line_with_a_control_octet_stays_in_the_text() -> None:
    robots = RobotsTxt.parse(b"User-agent: *\nDisallow: /\0\nDisallow: /b\n")
    assert robots.text == "User-agent: *\nDisallow: /\0\nDisallow: /b\n"
    assert robots.policy("bot").match("/b").rule.line == 3


def test_latin_1_is_compared_octet_by_octet_and_shown_as_unreadable() -> None:
    """HTTP-16: octets that are no UTF-8 harm nothing but the look of their line."""
    robots = RobotsTxt.parse(b"User-agent: *\nDisallow: /caf\xe9\nDisallow: /b\n")
    match = robots.policy("bot").match("/caf%E9/x")
    assert not match.allowed
    assert match.rule.value == "/caf\ufffd"
    assert not robots.policy("bot").allowed("/b")


def test_lone_surrogates_in_a_str_cause_no_error() -> None:
    robots = RobotsTxt.parse("User-agent: *\nDisallow: /\ud800\nDisallow: /b\n")
    robots.text.encode()
    assert not robots.policy("bot").allowed("/b")


@pytest.mark.parametrize("size", [512_000, 512_002])
def test_up_to_500_kib_are_read(size: int) -> None:
    """RFC-41"""
    head = "User-agent: *\n"
    tail = "Disallow: /b\n"
    body = head + "#" * (size - len(head) - len(tail) - 1) + "\n" + tail
    robots = RobotsTxt.parse(body)
    assert robots.size == size
    assert robots.truncated is (size > 512_000)
    assert robots.policy("bot").allowed("/b") is (size > 512_000)


def test_cut_keeps_a_line_that_ends_just_at_the_limit() -> None:
    body = "User-agent: *\nDisallow: /b\nDisallow: /longer\n"
    robots = RobotsTxt.parse(body, limit=len("User-agent: *\nDisallow: /b"))
    assert robots.truncated
    assert robots.text == "User-agent: *\nDisallow: /b"


def test_cut_never_shortens_a_value() -> None:
    """RFC-41: half of `/private` would be `/p`."""
    robots = RobotsTxt.parse("User-agent: *\nDisallow: /private\n", limit=25)
    assert robots.policy("bot").allowed("/page")


def test_page_of_html_holds_no_rules() -> None:
    """R96-26"""
    robots = RobotsTxt.parse("<html><body>\n<a href='/x'>Disallow</a>: /\n</body></html>")
    assert robots.groups == ()
    assert robots.policy("bot").allowed("/x")


def test_groups_show_the_file_as_the_rfc_cuts_it() -> None:
    robots = RobotsTxt.parse(
        "Disallow: /orphan\n"
        "User-agent: a\n"
        "\n"
        "Crawl-delay: 3 # slowly\n"
        "User-Agent: B/2.0\n"
        "Disallow: /x\n"
        "Sitemap: https://example.com/s.xml\n"
        "Allow: /x/y\n"
        "User-agent: c\n"
    )
    first, second = robots.groups
    assert (first.line, first.agents, second.line, second.agents) == (2, ("a", "B/2.0"), 9, ("c",))
    assert [(rule.line, rule.field, rule.value) for rule in first.rules] == [
        (6, "Disallow", "/x"),
        (8, "Allow", "/x/y"),
    ]
    assert [(rule.field, rule.value) for rule in first.records] == [
        ("Crawl-delay", "3"),
        ("Sitemap", "https://example.com/s.xml"),
    ]
    assert second.rules == ()


def test_groups_of_a_forced_dialect_end_at_blank_lines() -> None:
    """R94-03"""
    robots = RobotsTxt.parse("User-agent: a\n\nUser-agent: b\nDisallow: /\n", dialect="1994")
    assert [group.agents for group in robots.groups] == [("a",), ("b",)]
    assert {group.dialect for group in robots.groups} == {Dialect.R1994}


def test_group_tells_the_version_that_it_declares() -> None:
    robots = RobotsTxt.parse("User-agent: a\nRobot-version: 2.0.0\nDisallow: /\n")
    assert [(group.version, group.dialect) for group in robots.groups] == [("2.0.0", Dialect.V2)]


def test_records_for_the_whole_site_are_kept_by_their_kind() -> None:
    """VND-12, VND-13, SIG-15"""
    robots = RobotsTxt.parse(
        "Sitemap: https://example.com/s.xml\n"
        "Sitemap: /relative.xml\n"
        "User-agent: *\n"
        "Host: example.com\n"
        "Clean-param: sid /shop/\n"
        "License: https://example.com/l.xml\n"
        "Noindex: /private\n"
        "X-Colour: blue # why not\n"
    )
    assert robots.sitemaps == ("https://example.com/s.xml",)
    assert robots.hosts == ("example.com",)
    assert robots.licenses == ("https://example.com/l.xml",)
    assert [(param.params, param.path) for param in robots.clean_params] == [(("sid",), "/shop/")]
    assert [(rule.line, rule.field, rule.value) for rule in robots.extensions] == [
        (7, "Noindex", "/private"),
        (8, "X-Colour", "blue"),
    ]


def test_unknown_dialect_is_refused() -> None:
    with pytest.raises(ValueError, match="1997"):
        RobotsTxt.parse("", dialect="1997")


def test_equal_files_are_equal_and_hash_alike() -> None:
    one, other = RobotsTxt.parse(RULES), RobotsTxt.parse(RULES.encode())
    assert one == other
    assert hash(one) == hash(other)
    assert one != RobotsTxt.parse(RULES, dialect="1994")
    assert one.policy("bot") == other.policy("bot/2.0")
    assert hash(one.policy("bot")) == hash(other.policy("bot"))
    assert one.policy("bot") != one.policy("bot", conflicts="declared")


def test_a_policy_survives_pickling() -> None:
    policy = RobotsTxt.parse(b"\xef\xbb\xbfUser-agent: *\nDisallow: /\xe9\0\nDisallow: /b").policy(
        "b"
    )
    again = pickle.loads(pickle.dumps(policy))
    assert again == policy
    assert again.robots.bom == "utf-8"
    assert again.match("/b") == policy.match("/b")


@given(body=st.one_of(st.binary(), JUNK), dialect=st.sampled_from(["auto", *Dialect]))
def test_no_octets_make_anything_raise(body: bytes, dialect: str) -> None:
    robots = RobotsTxt.parse(body, dialect=dialect)
    policy = robots.policy("bot")
    for path in ("/", "/a", "/robots.txt", "/%41?b=[/"):
        match = policy.match(path)
        assert match.allowed is policy.allowed(path)
        assert all(candidate.line > 0 for candidate in match.candidates)
    assert policy.crawl_delay is None or policy.crawl_delay >= 0
    assert isinstance(policy.content_usage("/"), dict | None)
    found = (policy.visit_times, policy.request_rates, policy.comments, policy.content_signal)
    site = (robots.groups, robots.sitemaps, robots.licenses, robots.hosts, robots.clean_params)
    repr((found, site, robots.extensions, robots.findings, robots, policy)).encode()


def rendered(robots: RobotsTxt) -> str:
    """A plain file with the same groups."""
    return "".join(
        "".join(f"User-agent: {agent}\n" for agent in group.agents)
        + "".join(f"{rule.field}: {rule.value}\n" for rule in group.rules)
        for group in robots.groups
    )


LINES = st.sampled_from(
    [
        "User-agent: *",
        "user-agent : a # b",
        "User-agent: b/2",
        "Disallow: /",
        "allow:/x",
        "\r",
        "Disallow:",
        "junk",
        "Disallow: /*y$ #",
        "# Disallow: /",
        "Crawl-delay: 2",
        "",
        "  ",
    ]
)


@given(text=st.lists(LINES, max_size=12).map("\n".join))
def test_rendered_file_keeps_every_verdict(text: str) -> None:
    robots = RobotsTxt.parse(text)
    again = RobotsTxt.parse(rendered(robots))
    for agent in ("a", "b", "c"):
        for path in ("/", "/x", "/xy", "/z"):
            assert again.policy(agent).allowed(path) is robots.policy(agent).allowed(path)


def test_a_policy_takes_less_than_4000_bytes() -> None:
    """Four times smaller than what the peers keep of an ordinary file."""
    body = "".join(["User-agent: *\n", *(f"Disallow: /some/path-{n}/\n" for n in range(20))])
    policy = RobotsTxt.parse(body).policy("bot")
    for path in ("/a", "/b"):
        policy.allowed(path)
    assert deep_size(policy) < 4_000


def deep_size(thing: object, seen: set[int] | None = None) -> int:
    seen = set() if seen is None else seen
    if id(thing) in seen or isinstance(thing, type) or thing is None:
        return 0
    seen.add(id(thing))
    size = sys.getsizeof(thing)
    if isinstance(thing, str | bytes | int | float | Dialect):
        return size
    if isinstance(thing, dict):
        return size + sum(deep_size(x, seen) for pair in thing.items() for x in pair)
    if isinstance(thing, tuple | list | set | frozenset):
        return size + sum(deep_size(each, seen) for each in thing)
    # What a compiled class holds is in no `__slots__`.
    held = [x for x in gc.get_referents(thing) if not isinstance(x, ModuleType | FunctionType)]
    return size + sum(deep_size(each, seen) for each in held)


def test_questions_leave_the_size_of_a_file_as_it_is() -> None:
    robots = RobotsTxt.parse(b"User-agent: *\n" + b"Disallow: /b # again\n" * 50)
    policy = robots.policy("bot")
    before = deep_size(robots)
    assert [policy.allowed(path) for path in ("/a", "/b", "/c")] == [True, False, True]
    assert deep_size(robots) == before
    for number in range(100):  # what may be a rule's takes a look at each
        assert policy.match(f"/b{number}").allowed is False
    assert deep_size(robots) == before
    assert policy.match("/b").rule.line == 2
    assert robots.policy("other").allowed("/b") is False


@pytest.mark.parametrize(
    ("body", "options", "error", "told"),
    [
        ("", {"dialect": "3"}, ValueError, "auto, rfc9309"),
        ("", {"limit": 0}, ValueError, "1 or more"),
        (5, {}, TypeError, "int"),
        (None, {}, TypeError, "None"),
    ],
)
def test_wrong_arguments_of_parse_are_refused(
    body: Any, options: dict[str, Any], error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        RobotsTxt.parse(body, **options)


def test_every_bytes_like_object_is_read() -> None:
    for kind in (bytes, bytearray, memoryview):
        assert RobotsTxt.parse(kind(b"User-agent: *\nDisallow: /\n")).groups


@pytest.mark.parametrize("length", [65_533, 65_534, 65_535, 65_536, 65_537, 131_071])
@pytest.mark.parametrize("value", ["%", "$", "%2F", "%2f", "%%7e", "a", "\xe9"])
def test_a_value_of_any_length_is_read_octet_by_octet(length: int, value: str) -> None:
    """Long texts are normalised in pieces."""
    for before in ("", "a", "ab"):
        written = f"/{before}{value * (length // len(value))}%7Ez"
        form = {"%": "%25", "$": "%24", "%2f": "%2F", "%%7e": "%25~", "\xe9": "%C3%A9"}
        normal = f"/{before}{form.get(value, value) * (length // len(value))}~z"
        assert patterns.rfc_pattern(to_octets(written)) == normal
        assert patterns.rfc_pattern(to_octets(f"{written}\n{written}$")) == f"{normal}\n{normal}$"


@pytest.mark.parametrize("length", [65_535, 65_536, 65_537])
def test_a_control_character_anywhere_makes_its_line_unreadable(length: int) -> None:
    """RFC-42: long files are read in pieces."""
    for spoilt in ("Disallow: /b\1", f"Disallow: /{'b' * length}\1", f"\1Disallow: /b{'b' * 9}"):
        text = f"User-agent: *\n# {'x' * (length - 40)}\nDisallow: /a\n{spoilt}\nDisallow: /c"
        policy = RobotsTxt.parse(text).policy("bot")
        assert [policy.allowed(path) for path in ("/a", "/bb", "/c")] == [False, True, False]


@pytest.mark.parametrize(
    ("dialect", "blank"),
    [("2.0", ""), ("2.0", "# more\n"), ("rfc9309", ""), ("rfc9309", "\n\n \n")],
)
def test_a_long_text_is_read_in_pieces_that_lose_and_repeat_no_line(
    dialect: Dialect, blank: str
) -> None:
    lines = [f"{field}: /{n}" for n in range(4_000) for field in ("Disallow", "Comment", "Allow")]
    version = "Robot-version: 2.0\n" if dialect == "2.0" else ""
    text = "User-agent: *\n" + version + "".join(f"{blank}{line}\n" for line in lines)
    robots = RobotsTxt.parse(text, dialect=dialect)
    policy = robots.policy("bot")
    assert policy.comments == tuple(f"/{n}" for n in range(4_000))
    rules = [rule.text for rule in robots.groups[0].rules]
    assert rules == [line for line in lines if not line.startswith("Comment")]
    for n in (0, 1, 2_000, 3_999):
        match = policy.match(f"/{n}")
        assert match.rule is not None
        assert match.rule.text in (f"Disallow: /{n}", f"Allow: /{n}")
