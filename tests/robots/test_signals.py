"""What a site says beside Allow and Disallow: in a line, a response's header, or a page."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict, CIMultiDictProxy

from gatekeeper.page_rules import (
    PAGE_FIELDS,
    PageRules,
    PageSignals,
    page_signals,
    parse_license_links,
    parse_tdm_reservation,
)
from gatekeeper.robots.signals import (
    CleanParam,
    absolute_url,
    combine,
    parse_clean_param,
    parse_content_signal,
    parse_host,
    parse_preferences,
    split_content_usage,
)


def signals_of(name: str, values: list[str], agent: str = "bot") -> PageSignals:
    """The signals of a response with this header field, a line for each value."""
    return page_signals(CIMultiDict([(name, value) for value in values]), agent)


# --- Content-Usage ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "path", "preferences"),
    [
        ("train-ai=n", "", {"train-ai": "n"}),
        ("/open/ train-ai=y", "/open/", {"train-ai": "y"}),
        ("/p%20q\ttrain-ai=n", "/p%20q", {"train-ai": "n"}),
        ("/a  search=y, train-ai=n", "/a", {"search": "y", "train-ai": "n"}),
        ("/a", "/a", {}),
        ("", "", {}),
        ("open/ train-ai=y", "", {}),
    ],
)
def test_content_usage_has_an_optional_path(
    value: str, path: str, preferences: dict[str, str]
) -> None:
    written, text = split_content_usage(value)
    assert (written, parse_preferences(text)) == (path, preferences)


@pytest.mark.parametrize(
    ("text", "preferences"),
    [
        ("train-ai=n;why=x", {"train-ai": "n"}),
        ("train-genai=n", {}),
        ("train-genai=n, search=y, all=n", {"search": "y"}),
        ("train-ai=y, train-ai=n", {"train-ai": "n"}),
        ("train-ai=y, train-ai", {}),
        ('train-ai="n"', {}),
        ("train-ai=N", {}),
        ("train-ai=?0", {}),
        ("train-ai=n, search", {"train-ai": "n"}),
        ("train-ai;x=1=n, search;p=n", {}),
        ("Train-AI=n", {}),
        ("train-ai=n,", {}),
    ],
)
def test_a_preference_is_y_or_n_and_nothing_else(text: str, preferences: dict[str, str]) -> None:
    assert parse_preferences(text) == preferences


def test_of_several_sources_disallow_beats_allow_beats_unknown() -> None:
    views = [{"search": "y", "train-ai": "n"}, {"train-ai": "y"}, {"search": "n", "tdm": "y"}]
    assert combine(views, "n") == {"search": "n", "train-ai": "n", "tdm": "y"}


def test_several_header_fields_are_one_dictionary() -> None:
    assert signals_of("Content-Usage", ["train-ai=y", "search=n, train-ai=n"]).content_usage == {
        "train-ai": "n",
        "search": "n",
    }
    assert signals_of("Content-Usage", ["train-ai=n", "Search=y"]).content_usage == {}


# --- Content-Signal --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "signal"),
    [
        ("search=yes, ai-train=no", {"search": "yes", "ai-train": "no"}),
        (
            "search=yes,ai-train=no,use=reference",
            {"search": "yes", "ai-train": "no", "use": "reference"},
        ),
        ("Search = YES", {"search": "yes"}),
        ("search=maybe, ai-input=no", {"ai-input": "no"}),
        ("search=no, search=yes", {"search": "no"}),
        ("novel=thing", {"novel": "thing"}),
        ("search, =no, a=b=c, ,", {}),
        ("", {}),
    ],
)
def test_content_signal_is_pairs(value: str, signal: dict[str, str]) -> None:
    assert parse_content_signal(value) == signal


def test_of_several_signals_no_wins() -> None:
    views = [{"search": "yes", "use": "full"}, {"search": "no", "use": "x"}]
    assert combine(views, "no") == {"search": "no", "use": "full"}


# --- the site's own data ---------------------------------------------------------------


@pytest.mark.parametrize("value", ["https://example.com/a.xml", "http://b.example/s?x=1"])
def test_a_sitemap_or_licence_is_an_absolute_url(value: str) -> None:
    assert absolute_url(value) == value


@pytest.mark.parametrize(
    "value", ["", "/a.xml", "a.xml", "//example.com/a", "ftp://a/b", "https://"]
)
def test_a_sitemap_or_licence_that_is_no_absolute_url_is_ignored(value: str) -> None:
    assert absolute_url(value) is None


@pytest.mark.parametrize(
    ("value", "host"),
    [
        ("www.example.com", "www.example.com"),
        ("https://www.example.com", "https://www.example.com"),
        ("example.com:8080", "example.com:8080"),
        ("", None),
        ("a b", None),
        ("exa%6dple.com", None),
    ],
)
def test_host_names_a_host(value: str, host: str | None) -> None:
    assert parse_host(value) == host


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("ref /some/page", CleanParam(("ref",), "/some/page")),
        ("Sid&ref", CleanParam(("Sid", "ref"), "")),
        ("a&&b", CleanParam(("a", "b"), "")),
        ("", None),
        ("&", None),
        ("a /b c", None),
        ("a" * 501, None),
    ],
)
def test_clean_param_is_names_and_a_prefix(value: str, expected: CleanParam | None) -> None:
    assert parse_clean_param(value) == expected


# --- X-Robots-Tag ----------------------------------------------------------------------

JUNE = datetime(2027, 6, 25, 15, tzinfo=UTC)


@pytest.mark.parametrize(
    ("values", "rules"),
    [
        (["noindex"], PageRules(names=frozenset({"noindex"}))),
        (["NoIndex, NOFOLLOW"], PageRules(names=frozenset({"noindex", "nofollow"}))),
        (["none"], PageRules(names=frozenset({"noindex", "nofollow"}))),
        (["all"], PageRules()),
        (["all", "noindex"], PageRules(names=frozenset({"noindex"}))),
        (["noai, noimageai"], PageRules(names=frozenset({"noai", "noimageai"}))),
        (["bot: noindex"], PageRules(names=frozenset({"noindex"}))),
        (["BOT: noindex"], PageRules(names=frozenset({"noindex"}))),
        (["otherbot: noindex"], PageRules()),
        (["otherbot: noindex, nofollow"], PageRules()),
        (["otherbot: noindex", "nofollow"], PageRules(names=frozenset({"nofollow"}))),
        (["bot: nofollow, otherbot: noindex"], PageRules(names=frozenset({"nofollow"}))),
        (["not an agent: noindex"], PageRules()),
        (["max-snippet: 20, max-snippet:5"], PageRules(max_snippet=5)),
        (["max-snippet:-1"], PageRules(max_snippet=-1)),
        (["max-snippet:-1, max-snippet:9"], PageRules(max_snippet=9)),
        (["max-snippet:x"], PageRules()),
        (
            ["max-image-preview:large, max-image-preview:Standard"],
            PageRules(max_image_preview="standard"),
        ),
        (["max-image-preview:huge"], PageRules()),
        (["max-video-preview:0"], PageRules(max_video_preview=0)),
        (["bot: max-snippet:3"], PageRules(max_snippet=3)),
        (["unavailable_after: 25 Jun 2027 15:00:00 GMT"], PageRules(unavailable_after=JUNE)),
        (["unavailable_after: Fri, 25 Jun 2027 15:00:00 GMT"], PageRules(unavailable_after=JUNE)),
        (["unavailable_after: Friday, 25-Jun-27 15:00:00 UTC"], PageRules(unavailable_after=JUNE)),
        (["unavailable_after: 2027-06-25T17:00:00+02:00"], PageRules(unavailable_after=JUNE)),
        (["unavailable_after: 2027-06-25 15:00"], PageRules(unavailable_after=JUNE)),
        (["unavailable_after: never"], PageRules()),
        (["otherbot: unavailable_after: 25 Jun 2027 15:00:00 GMT"], PageRules()),
        (
            ["bot: unavailable_after: Fri, 25 Jun 2027 15:00:00 GMT, noindex"],
            PageRules(unavailable_after=JUNE, names=frozenset({"noindex"})),
        ),
        (["", ",", ":", "noindex: yes"], PageRules()),
    ],
)
def test_x_robots_tag_values_give_the_rules_for_the_agent(
    values: list[str], rules: PageRules
) -> None:
    assert signals_of("X-Robots-Tag", values).rules == rules


def test_of_two_unavailable_after_dates_the_earlier_counts() -> None:
    values = ["unavailable_after: 2028-01-01", "unavailable_after: 2027-06-25T15:00:00Z"]
    assert signals_of("X-Robots-Tag", values).rules.unavailable_after == JUNE


def test_unavailable_after_is_in_utc() -> None:
    rules = signals_of("X-Robots-Tag", ["unavailable_after: 2027-06-25T17:00:00+02:00"]).rules
    assert rules.unavailable_after is not None
    assert rules.unavailable_after.tzinfo is UTC
    assert rules.unavailable_after == datetime(2027, 6, 25, 17, tzinfo=timezone(timedelta(hours=2)))


@pytest.mark.parametrize(
    ("values", "names"),
    [
        (["*;nosnippet, ExampleBot;noindex"], {"nosnippet", "noindex"}),
        (["*;nosnippet", "examplebot;noindex"], {"nosnippet", "noindex"}),
        (["otherbot;noindex"], set()),
        (["*;noindex=?0"], set()),
        (["*;noindex, "], set()),
        (['"*";noindex'], set()),
        (["noindex"], set()),
    ],
)
def test_an_x_robots_tag_unites_rules_for_all_and_for_the_agent(
    values: list[str], names: set[str]
) -> None:
    assert signals_of("Robots-Tag", values, "ExampleBot").rules.names == names


def test_rules_answer_the_two_common_questions() -> None:
    rules = signals_of("X-Robots-Tag", ["none"]).rules
    assert (rules.index, rules.follow) == (False, False)
    assert (PageRules().index, PageRules().follow) == (True, True)


# --- the page --------------------------------------------------------------------------


def names_in(html: bytes | str) -> set[str]:
    return set(page_signals({}, "ExampleBot", html).rules.names)


@pytest.mark.parametrize(
    ("html", "names"),
    [
        ('<meta name="robots" content="noindex, nofollow">', {"noindex", "nofollow"}),
        ("<META NAME=ROBOTS CONTENT=NOINDEX />", {"noindex"}),
        (
            "<meta content='NoArchive,noai , noimageai' name=' Robots '>",
            {"noarchive", "noai", "noimageai"},
        ),
        ('<meta name="robots" content="none">', {"noindex", "nofollow"}),
        ('<meta name="robots" content="noindex nofollow">', {"noindex", "nofollow"}),
        ('<meta name="robots" content="all, index, follow, ,">', {"index", "follow"}),
        ('<meta name="examplebot" content="noindex">', {"noindex"}),
        ('<meta name="otherbot" content="noindex">', set()),
        ('<meta name="googlebot" content="noindex"><meta name=robots content=noai>', {"noai"}),
        ('<meta name="robots" content="no&#105;ndex">', {"noindex"}),
        ('<meta name="robots" content="noindex" content="all">', {"noindex"}),
        ('<meta name="robots" content="otherbot: noindex">', set()),
        ('<meta name="robots">', set()),
        ('<meta property="robots" content="noindex">', set()),
        ("<p>robots, content noindex</p>", set()),
        ('<!-- <meta name="robots" content="noindex"> -->', set()),
        ('<script>"<meta name=robots content=noindex>"</script>', set()),
        ('<style></style><!--x--><meta name="robots" content="noindex">', {"noindex"}),
        ('<![if IE]><![endif]><![foo[><meta name="robots" content="noindex">', {"noindex"}),
        ('<!doctype html><?x?><a href="x>y"><meta name="robots" content="noindex">', {"noindex"}),
        ('<p title=\'"\'>&<<meta name="robots" content="noindex">', {"noindex"}),
    ],
)
def test_meta_robots_elements_give_the_rules_for_the_agent(html: str, names: set[str]) -> None:
    assert names_in(html) == names
    assert names_in(html.encode()) == names
    assert names_in(html.encode("utf-16")) == names


def test_rules_in_meta_robots_may_have_values() -> None:
    html = (
        '<meta name="robots" content="max-snippet:50, max-image-preview: Large">'
        '<meta name="bot" content="max-snippet:20, max-video-preview:-1">'
        '<meta name="robots" content="unavailable_after: Fri, 25 Jun 2027 15:00:00 GMT, noai">'
    )
    assert page_signals({}, "bot", html).rules == PageRules(
        names=frozenset({"noai"}),
        max_snippet=20,
        max_image_preview="large",
        max_video_preview=-1,
        unavailable_after=JUNE,
    )


def test_of_header_and_page_the_stricter_wins() -> None:
    html = b'<meta name="robots" content="noindex, max-snippet:50">'
    rules = page_signals({"X-Robots-Tag": "noarchive, max-snippet:9"}, "bot", html).rules
    assert rules == PageRules(names=frozenset({"noindex", "noarchive"}), max_snippet=9)
    assert page_signals({"X-Robots-Tag": "max-snippet:-1"}, "bot", html).rules.max_snippet == 50


def test_only_the_beginning_of_a_page_is_read() -> None:
    meta = b'<meta name="robots" content="noindex">'
    assert names_in(b"<p>".ljust(65_536 - len(meta)) + meta) == {"noindex"}
    assert names_in(b"<p>".ljust(65_536) + meta) == set()
    assert names_in(b"<p>".ljust(65_530) + meta) == set()
    assert names_in(meta + b"<p>" * 50_000) == {"noindex"}


_BROKEN = ["<", "<!--", "<![", "<!", "</", "<a ", "<a x='", '<a x="y" ', "<?", "<script>", "&"]
_BROKEN += [
    "-->",
    "<meta name=robots ",
    "<textarea>",
    "]]>",
    "<a =",
    "<a/",
    "<meta name='",
    "robots",
]


@pytest.mark.parametrize("piece", _BROKEN)
@pytest.mark.parametrize("other", ["", *_BROKEN[:6]])
def test_the_cost_of_a_page_is_linear(piece: str, other: str) -> None:
    """The worst pieces take a tenth of a second; in quadratic time 64 KiB would take minutes."""
    body = ((piece + other) * 65_536)[:65_500]
    began = time.process_time()
    page_signals({}, "bot", body + "<meta name=robots>")
    assert time.process_time() - began < 5


@given(st.lists(st.sampled_from([*_BROKEN, '<meta name="robots" content="none">'])), st.text())
def test_no_page_makes_its_reader_raise(pieces: list[str], text: str) -> None:
    broken = "".join(pieces)
    for html in (broken, text, broken.encode() + b"\xff\x00", text.encode("utf-16", "replace")):
        page_signals({}, "bot", html)


# --- the whole header ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "reserved"),
    [
        (["1"], True),
        (["0"], False),
        ([" 1 "], True),
        (["0", "1"], True),
        (["1, 1"], True),
        (["0,1"], True),
        (["yes"], None),
        ([], None),
    ],
)
def test_a_tdm_reservation_is_1_or_0_and_anything_else_unknown(
    values: list[str], reserved: bool | None
) -> None:
    assert parse_tdm_reservation(values) is reserved


@pytest.mark.parametrize(
    ("value", "links"),
    [
        (
            '<https://a.example/l>; rel="license"; type="application/rsl+xml"',
            ("https://a.example/l",),
        ),
        ("<https://a.example/l>;rel=license", ("https://a.example/l",)),
        ('<https://a.example/l>; rel="next License"', ("https://a.example/l",)),
        ("<https://a.example/l>; rel=next; rel=license", ()),
        ('<https://a.example/l>; title="a, <b>; rel=license"', ()),
        (
            '<https://a.example/1>; rel=license, <https://a.example/2>; rel="license"',
            ("https://a.example/1", "https://a.example/2"),
        ),
        ("</l>; rel=license", ("https://example.com/l",)),
        ("<mailto:a@b>; rel=license", ()),
        ("<", ()),
    ],
)
def test_links_to_a_license_become_absolute_urls(value: str, links: tuple[str, ...]) -> None:
    assert parse_license_links([value], url="https://example.com/a/b") == links


def test_a_relative_licence_needs_the_page() -> None:
    assert parse_license_links(["</l>; rel=license"]) == ()


def test_the_signals_of_a_header_with_every_field_are_found() -> None:
    headers = CIMultiDictProxy(
        CIMultiDict(
            [
                ("content-usage", "train-ai=n"),
                ("X-Robots-Tag", "otherbot: noindex"),
                ("X-Robots-Tag", "nofollow"),
                ("Robots-Tag", "bot;nosnippet"),
                ("TDM-Reservation", "1"),
                ("tdm-policy", "https://example.com/policy.json"),
                ("Link", '</license.xml>; rel="license"'),
            ]
        )
    )
    signals = page_signals(headers, "bot", url="https://example.com/a")
    assert signals.content_usage == {"train-ai": "n"}
    assert signals.rules.names == {"nofollow", "nosnippet"}
    assert signals.tdm_reserved is True
    assert signals.tdm_policy == "https://example.com/policy.json"
    assert signals.licenses == ("https://example.com/license.xml",)


def test_a_header_without_signals_has_none() -> None:
    signals = page_signals({}, "bot")
    assert signals.rules == PageRules()
    assert (signals.content_usage, signals.tdm_reserved, signals.tdm_policy) == ({}, None, None)


_FIELDS = [
    "WWW-Authenticate",
    "crawler-price",
    "Content-Usage",
    "X-Robots-Tag",
    "Robots-Tag",
    "Link",
    "tdm-reservation",
    "tdm-policy",
]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(_FIELDS),
            st.text('abn*:;,=<>"\\ -019/', max_size=40)
            | st.text(max_size=20)
            | st.text(max_size=20).map("unavailable_after: {}".format),
        ),
        max_size=5,
    )
)
def test_no_header_value_raises(fields: list[tuple[str, str]]) -> None:
    page_signals(CIMultiDict(fields), "bot", url="https://example.com/")


@given(st.text(max_size=60))
def test_no_line_about_usage_makes_its_reader_raise(value: str) -> None:
    parse_preferences(split_content_usage(value)[1])
    parse_content_signal(value)
    parse_clean_param(value)
    parse_host(value)
    absolute_url(value)


@pytest.mark.parametrize(
    ("value", "challenges"),
    [
        ("", []),
        ('Basic realm="License, Payment"', []),
        ("Bearer abc==", []),
        ("License", [("license", {})]),
        (
            'License error="invalid_request", error_description="a \\"b\\", c", Basic realm="x"',
            [("license", {"error": "invalid_request", "error_description": 'a "b", c'})],
        ),
        (
            'Payment id="1",realm = a , method="tempo" ,Realm="b", LICENSE scope=all',
            [
                ("payment", {"id": "1", "realm": "a", "method": "tempo"}),
                ("license", {"scope": "all"}),
            ],
        ),
        (
            'L402 macaroon="AGI=", invoice="lnbc1"',
            [("l402", {"macaroon": "AGI=", "invoice": "lnbc1"})],
        ),
    ],
)
def test_challenges_to_pay_or_to_license_are_read(
    value: str, challenges: list[tuple[str, dict[str, str]]]
) -> None:
    found = page_signals({"WWW-Authenticate": value} if value else {}, "bot")
    assert [(each.scheme, each.params) for each in found.challenges] == challenges
    assert found.license_required == any(scheme == "license" for scheme, _ in challenges)
    assert found.payment_required == any(scheme != "license" for scheme, _ in challenges)


def test_challenges_may_stand_in_several_fields_and_have_a_bound() -> None:
    fields = CIMultiDict([("WWW-Authenticate", "Basic"), ("WWW-Authenticate", "License")])
    assert page_signals(fields, "bot").license_required
    many = page_signals({"WWW-Authenticate": "License a=b, " * 1_000}, "bot")
    assert len(many.challenges) == 20
    wide = page_signals(
        {"WWW-Authenticate": "License " + ",".join(f'a{n}="{"x" * 5_000}"' for n in range(13))},
        "bot",
    )
    assert all(len(value) <= 4_096 for value in wide.challenges[0].params.values())


def test_a_payment_is_asked_for_by_status_or_field() -> None:
    assert page_signals({}, "bot", status=402).payment_required
    assert not page_signals({}, "bot", status=403).payment_required
    priced = page_signals({"crawler-price": " USD 0.01 "}, "bot", status=402)
    assert (priced.payment_required, priced.price) == (True, "USD 0.01")
    assert page_signals({"payment-required": "e30="}, "bot").payment_required
    assert page_signals({"crawler-price": "x" * 500}, "bot").price == "x" * 100


def test_each_signal_has_its_row_in_the_documents() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reasons.md").read_text("utf-8")
    rows = re.findall(r'^\| `([a-z_]+)`<a id="signal-([a-z_]+)"></a> \|', page, re.MULTILINE)
    assert all(anchor == name for anchor, name in rows)
    assert {name for _, name in rows} == {f.name for f in msgspec.structs.fields(PageSignals)}


class Asked(dict[str, str]):
    """Header fields that note which of them were asked for."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name.lower())
        return default


def test_a_page_without_one_of_the_fields_says_nothing() -> None:
    asked = Asked()
    assert page_signals(asked, "examplebot", status=200) == page_signals({}, "")
    assert asked.names == PAGE_FIELDS
