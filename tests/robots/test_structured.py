"""Structured fields: read whole or not at all."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gatekeeper.page_rules import PageRules, page_signals
from gatekeeper.robots.signals import usage_labels
from tests.effort import processor_time

NOINDEX = PageRules(names=frozenset({"noindex"}))


def rules_of(robots_tag: str) -> PageRules:
    return page_signals({"Robots-Tag": robots_tag}, "bot").rules


@pytest.mark.parametrize(
    "value",
    [
        *("5", "-17", "4.5", "999999999999999", '"a \\"b\\" \\\\"', "tok/en:x", "*", "no"),
        *(":aGk=:", ":aGk:", "?1", "?0", "@1659578233", '%"f%c3%bc"', '%"%e2%82%ac %f0%9f%98%80"'),
        *('("b" c;z);w', "()", "y;a=1;b"),
    ],
)
def test_a_value_of_any_type_is_read(value: str) -> None:
    answer = "y" if value[0] == "y" else ""
    assert usage_labels(f"a={value}, b=n") == {"a": answer, "b": "n"}
    assert rules_of(f"{value}, *;noindex") == NOINDEX


def test_a_dictionary_keeps_the_last_of_a_key() -> None:
    assert usage_labels("a=y, b, a=n ,\tc;p=x, b=y;q") == {"a": "n", "b": "y", "c": ""}


@pytest.mark.parametrize(
    ("params", "rules"),
    [
        ("noindex;nofollow=?1", PageRules(names=frozenset({"noindex", "nofollow"}))),
        ("noindex;nofollow=?0", NOINDEX),
        ("max-snippet=5;max-snippet=9", PageRules(max_snippet=9)),
        ('max-image-preview="standard"', PageRules(max_image_preview="standard")),
        ('max-image-preview="st\\"d"', PageRules()),
        (
            "unavailable_after=@1659578233",
            PageRules(unavailable_after=datetime(2022, 8, 4, 1, 57, 13, tzinfo=UTC)),
        ),
        ("unavailable_after=@999999999999999", PageRules()),
    ],
)
def test_a_robots_tag_has_rules_as_parameters(params: str, rules: PageRules) -> None:
    assert rules_of(f"bot; {params}") == rules


@pytest.mark.parametrize("text", ["", "  "])
def test_an_empty_field_is_an_empty_list_or_dictionary(text: str) -> None:
    assert usage_labels(text) == {}
    assert rules_of(text) == PageRules()


@pytest.mark.parametrize(
    "text",
    [
        *("a,", ",a", "a b", "a;", "a;X", "(a", "(a b", "(a;b", '("a""b")', '"a', '"\\a"'),
        *('"\x7f"', "1.", "1.2345", "1.2.3", "-", "--1", "1000000000000000", "?2", "?", "@1.5"),
        *("@a", ":a", ":*:", '%"%C3%BC"', '%"%ff"', '%"%c3"', '%"%ed%a0%80"', '%"%e0%80%80"'),
        *('%"', "ü", "a\nb", "a="),
    ],
)
def test_a_broken_member_breaks_the_whole_field(text: str) -> None:
    assert usage_labels(f"b=n, a={text}") is None
    assert rules_of(f"*;noindex, {text}") == PageRules()


@pytest.mark.parametrize(
    "text", ["A=1", "1=a", "a==b", "a=b=c", "a;x=1=n, b", "a=b c", "a=,b", "\ta"]
)
def test_a_broken_dictionary_is_none(text: str) -> None:
    assert usage_labels(text) is None


@given(st.text(alphabet='aB*1-.;=,"\\:?@%() \tü', max_size=40))
def test_no_structured_field_makes_its_reader_raise(text: str) -> None:
    usage_labels(text)
    rules_of(f"{text};noindex")


@pytest.mark.parametrize(
    "text",
    [
        "a," * 50_000,
        "(" * 100_000,
        "(" + "a " * 50_000,
        ";a" * 50_000,
        '"' + "\\" * 99_999,
        "9" * 100_000,
        "a" * 100_000 + "=",
        '%"' + "%c3" * 30_000,
    ],
    ids=["members", "brackets", "inner", "params", "quotes", "digits", "key", "display"],
)
def test_the_cost_of_reading_a_field_is_linear(text: str) -> None:
    def read() -> None:
        usage_labels(text)
        usage_labels(f"a={text}")
        rules_of(text[:60_000])

    assert processor_time(read, 1.0) < 1.0
