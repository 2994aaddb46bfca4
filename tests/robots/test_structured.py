"""Structured fields: read whole or not at all."""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gatekeeper.robots.signals import (
    FieldError,
    Item,
    StructuredToken,
    parse_dictionary,
    parse_list,
)
from tests.effort import processor_time


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5", 5),
        ("-17", -17),
        ("4.5", 4.5),
        ("999999999999999", 999999999999999),
        ('"a \\"b\\" \\\\"', 'a "b" \\'),
        ("tok/en:x", "tok/en:x"),
        ("*", "*"),
        (":aGk=:", b"hi"),
        (":aGk:", b"hi"),
        ("?1", True),
        ("?0", False),
        ("@1659578233", datetime(2022, 8, 4, 1, 57, 13, tzinfo=UTC)),
        ('%"f%c3%bc"', "fü"),
    ],
)
def test_an_item_has_a_type(text: str, value: object) -> None:
    (item,) = parse_list(text)
    assert item == Item(value, {})  # type: ignore[arg-type]
    assert type(item.value) is StructuredToken if text[0].isalpha() or text == "*" else True


def test_members_have_parameters_and_lists_inside() -> None:
    assert parse_list('a;x;y=2, ("b" c;z);w') == [
        Item(StructuredToken("a"), {"x": True, "y": 2}),
        Item((Item("b", {}), Item(StructuredToken("c"), {"z": True})), {"w": True}),
    ]


def test_a_dictionary_keeps_the_last_of_a_key() -> None:
    assert parse_dictionary("a=1, b, a=2 ,\tc;p=x") == {
        "a": Item(2, {}),
        "b": Item(True, {}),
        "c": Item(True, {"p": StructuredToken("x")}),
    }


@pytest.mark.parametrize("text", ["", "  "])
def test_an_empty_field_is_an_empty_list_or_dictionary(text: str) -> None:
    assert parse_list(text) == []
    assert parse_dictionary(text) == {}


@pytest.mark.parametrize(
    "text",
    [
        *(
            "a,",
            ",a",
            "a b",
            "a;",
            "a;X",
            "(a",
            "(a b",
            "(a;b",
            '("a""b")',
            '"a',
            '"\\a"',
            '"\x7f"',
        ),
        *(
            "1.",
            "1.2345",
            "1.2.3",
            "-",
            "--1",
            "1000000000000000",
            "?2",
            "?",
            "@1.5",
            "@a",
            ":a",
            ":*:",
        ),
        *('%"%C3%BC"', '%"%ff"', '%"', "ü", "a\nb", "a=", "\ta"),
    ],
)
def test_a_broken_list_is_an_error(text: str) -> None:
    with pytest.raises(FieldError):
        parse_list(text)


@pytest.mark.parametrize("text", ["A=1", "1=a", "a==b", "a=b=c", "a;x=1=n, b", "a=b c", "a=,b"])
def test_a_broken_dictionary_is_an_error(text: str) -> None:
    with pytest.raises(FieldError):
        parse_dictionary(text)


@given(st.text(alphabet='aB*1-.;=,"\\:?@%() \tü', max_size=40))
def test_nothing_but_field_error_comes_of_any_text(text: str) -> None:
    for read in (parse_list, parse_dictionary):
        with contextlib.suppress(FieldError):
            read(text)


@pytest.mark.parametrize(
    "text",
    [
        "a," * 50_000,
        "(" * 100_000,
        "(" + "a " * 50_000,
        ";a" * 50_000,
        '"' + "\\" * 99_999,
        "9" * 100_000,
    ],
    ids=["members", "brackets", "inner", "params", "quotes", "digits"],
)
def test_the_cost_of_reading_a_field_is_linear(text: str) -> None:
    def read() -> None:
        with contextlib.suppress(FieldError):
            parse_list(text)

    assert processor_time(read, 1.0) < 1.0
