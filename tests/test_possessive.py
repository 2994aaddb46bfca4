"""No regular expression has a possessive repeat of a group, which some Pythons read wrongly.

Before 3.11.5, `re` goes on in the wrong place after one whose last attempt failed (CPython
gh-106052). An atomic group, `(?>(?:ab)*)`, means the same.
"""

from __future__ import annotations

import importlib
import pkgutil
import re

import pytest

import gatekeeper
from gatekeeper.robots import RobotsTxt
from gatekeeper.robots.patterns import rfc_path, rfc_pattern


def repeats_a_group_possessively(text: str) -> bool:
    """Return True if a group is followed by a possessive repeat, outside of escapes and sets."""
    parts = re.findall(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\)[*+?]\+|(?s:.)", text)
    return any(len(part) == 3 and part[0] == ")" for part in parts)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("(?:ab)*+", True),
        ("x((?:a(b)?+)+)", True),
        ("(?i:a\n)++", True),
        (r"[()]*+\)?+[^])]++a*+", False),
        ("(?>(?:ab)*)(?:ab)*", False),
    ],
)
def test_a_possessive_repeat_of_a_group_is_found(text: str, found: bool) -> None:
    assert repeats_a_group_possessively(text) is found


def test_no_pattern_of_a_module_repeats_a_group_possessively() -> None:
    patterns = {
        value.pattern
        for module in pkgutil.walk_packages(gatekeeper.__path__, "gatekeeper.")
        if not module.name.endswith("__main__") and ".integrations" not in module.name
        for value in vars(importlib.import_module(module.name)).values()
        if isinstance(value, re.Pattern) and isinstance(value.pattern, str)
    }
    assert len(patterns) > 100
    assert not [text for text in patterns if repeats_a_group_possessively(text)]


def test_a_group_that_fails_within_is_left_where_it_began() -> None:
    """By a Python before 3.11.5 the long value took all memory."""
    assert rfc_path("/%2f%2g") == "/%2F%252g"
    assert rfc_path("/%C3%A9%C3%A") == "/%C3%A9%C3%25A"
    policy = RobotsTxt.parse("User-agent: *\nDisallow: /%2F%25\n").policy("a")
    assert not policy.allowed("https://example.org/%2f%")
    assert rfc_pattern("/" + "a" * 200_000) == "/" + "a" * 200_000
