"""Regular expressions that are compiled on first use, and rewritten for some Pythons."""

from __future__ import annotations

import importlib
import pkgutil
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gatekeeper
from gatekeeper import speedups
from gatekeeper.robots import RobotsTxt
from gatekeeper.robots.patterns import rfc_path, rfc_pattern
from gatekeeper.speedups import CompiledPattern, lazy_pattern, without_possessive_groups


def module_values(kind: type) -> dict[str, object]:
    """Return the module attributes of the package that are of a kind."""
    found = {}
    for module in pkgutil.walk_packages(gatekeeper.__path__, "gatekeeper."):
        if module.name != "gatekeeper.__main__":
            values = vars(importlib.import_module(module.name))
            found |= {f"{module.name}.{k}": v for k, v in values.items() if isinstance(v, kind)}
    return found


LAZY = {
    name: pattern._arguments  # type: ignore[attr-defined]
    for name, pattern in module_values(CompiledPattern).items()
}
REWRITTEN = [name for name, (text, _) in LAZY.items() if without_possessive_groups(text) != text]


@pytest.mark.parametrize(
    ("text", "rewritten"),
    [
        ("(?:ab)*+", "(?>(?:ab)*)"),
        ("x((?:a(b)?+)++)", "x((?>(?:a(?>(b)?))+))"),
        (r"[()]*+\)?+[^])]++a*+", r"[()]*+\)?+[^])]++a*+"),
        ("(?i:a\n)?+", "(?>(?i:a\n)?)"),
    ],
)
def test_possessive_groups_become_atomic(text: str, rewritten: str) -> None:
    assert without_possessive_groups(text) == rewritten


def test_they_stand_only_where_they_are_rewritten() -> None:
    assert len(REWRITTEN) > 10
    others = module_values(re.Pattern)
    texts = {name: one.pattern for name, one in others.items()}  # type: ignore[attr-defined]
    groups = re.compile(r"\)[*+?]\+")
    assert [name for name, text in texts.items() if groups.search(str(text))] == []


if sys.version_info >= (3, 11, 5):  # before, the form as written matches wrongly

    @given(st.data())
    def test_what_is_rewritten_matches_the_same(data: st.DataObject) -> None:
        text, flags = LAZY[data.draw(st.sampled_from(REWRITTEN))]
        tried = data.draw(
            st.one_of(
                st.from_regex(re.compile(text, flags)),
                st.text('%2fFaz.:/,;="\\ \t<>?-_*yn1@', max_size=30),
            )
        )
        cut = tried[: data.draw(st.integers(0, len(tried)))]
        for one in (tried, cut):
            found, expected = (
                [(match.span(), match.groups()) for match in re.finditer(form, one, flags)]
                for form in (without_possessive_groups(text), text)
            )
            assert found == expected


def test_they_are_rewritten_for_pythons_that_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speedups, "_MISPLACED", True)
    assert lazy_pattern(r"((?:%[0-9]{2})++)").split("a%10%2x") == ["a", "%10", "%2x"]
    assert lazy_pattern("a").pattern == "a"


def test_a_group_that_fails_within_is_left_where_it_began() -> None:
    """By a Python before 3.11.5 the long value took all memory."""
    assert rfc_path("/%2f%2g") == "/%2F%252g"
    assert rfc_path("/%C3%A9%C3%A") == "/%C3%A9%C3%25A"
    policy = RobotsTxt.parse("User-agent: *\nDisallow: /%2F%25\n").policy("a")
    assert not policy.allowed("https://example.org/%2f%")
    assert rfc_pattern("/" + "a" * 200_000) == "/" + "a" * 200_000
