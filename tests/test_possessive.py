"""Regular expressions with possessive repeats of groups, rewritten for some Pythons."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gatekeeper.possessive import without_possessive_groups
from gatekeeper.robots import RobotsTxt
from gatekeeper.robots.patterns import rfc_path, rfc_pattern


def patterns_of(*imports: str) -> list[tuple[str, int]]:
    """Return the patterns of the package's modules with possessive repeats of groups, as a fresh
    process holds them that runs the lines of `imports` first."""
    code = (
        "import importlib, pkgutil, re, gatekeeper\n"
        "{}\n"
        "for module in pkgutil.walk_packages(gatekeeper.__path__, 'gatekeeper.'):\n"
        "    if not module.name.endswith('__main__') and '.integrations' not in module.name:\n"
        "        for value in vars(importlib.import_module(module.name)).values():\n"
        "            if isinstance(value, re.Pattern) and isinstance(value.pattern, str):\n"
        "                print(repr((value.pattern, value.flags)))\n"
    ).format("\n".join(imports))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    found = {ast.literal_eval(line) for line in done.stdout.splitlines()}
    return sorted(each for each in found if without_possessive_groups(each[0]) != each[0])


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


def test_every_possessive_pattern_is_rewritten_for_pythons_that_need_it() -> None:
    lines = "from gatekeeper import possessive", "possessive._MISPLACED = True"
    assert patterns_of(*lines) == []


if sys.version_info >= (3, 11, 5):  # before, the form as written matches wrongly

    @pytest.fixture(scope="module")
    def written() -> list[tuple[str, int]]:
        return patterns_of()

    def test_a_rewritten_pattern_matches_like_the_original(written: list[tuple[str, int]]) -> None:
        assert len(written) > 10

        @given(st.data())
        def match(data: st.DataObject) -> None:
            text, flags = data.draw(st.sampled_from(written))
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

        match()


def test_a_group_that_fails_within_is_left_where_it_began() -> None:
    """By a Python before 3.11.5 the long value took all memory."""
    assert rfc_path("/%2f%2g") == "/%2F%252g"
    assert rfc_path("/%C3%A9%C3%A") == "/%C3%A9%C3%25A"
    policy = RobotsTxt.parse("User-agent: *\nDisallow: /%2F%25\n").policy("a")
    assert not policy.allowed("https://example.org/%2f%")
    assert rfc_pattern("/" + "a" * 200_000) == "/" + "a" * 200_000
