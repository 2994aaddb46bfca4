"""What `gatekeeper.robots` rests on: text alone, and patterns that every Python reads alike."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from pathlib import Path
from re import _constants, _parser  # type: ignore[attr-defined]

import pytest

import gatekeeper
from gatekeeper import robots

FORBIDDEN = {
    *("asyncio", "time", "socket", "threading.Timer", "os", "io", "pathlib", "random", "aiohttp"),
    *("http", "urllib", "subprocess", "selectors", "logging"),
}
BELOW = {"urls", "errors", "http_fields", "late", "robots"}
LATE = {"page_rules", "sites"}
"""Named for type checkers, and imported late: `gatekeeper.robots` hands out names of theirs."""
SOURCES = sorted(Path(robots.__file__).parent.glob("*.py"))


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_nothing_is_imported_that_waits_or_reads_a_clock(source: Path) -> None:
    imported = set()
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported |= {f"{node.module}.{alias.name}" for alias in node.names}
    assert not {name for name in imported if name.split(".")[0] in FORBIDDEN}
    own = {name.split(".")[1] for name in imported if name.startswith("gatekeeper.")}
    assert own <= (BELOW | LATE if source.stem == "__init__" else BELOW)


def captures_in_possessive_repeats(pattern: str) -> bool:
    """Python 3.11 can lose the bounds of such a capture."""

    def look(items: object, inside: bool) -> bool:
        if isinstance(items, _parser.SubPattern):
            return any(look(item, inside) for item in items)
        if not isinstance(items, tuple | list):
            return False
        if len(items) == 2 and items[0] is _constants.SUBPATTERN:
            return (inside and items[1][0] is not None) or look(items[1][-1], inside)
        if len(items) == 2 and items[0] in {_constants.POSSESSIVE_REPEAT, _constants.ATOMIC_GROUP}:
            return look(items[1], inside=True)
        return any(look(item, inside) for item in items)

    return look(_parser.parse(pattern), inside=False)


def patterns_of_the_package() -> set[str]:
    """Every pattern that a module holds, by itself or as one of its methods."""
    found = set()
    for module in pkgutil.walk_packages(gatekeeper.__path__, "gatekeeper."):
        if not module.name.endswith("__main__") and ".integrations" not in module.name:
            for value in vars(importlib.import_module(module.name)).values():
                owner = getattr(value, "__self__", value)
                if isinstance(owner, re.Pattern) and isinstance(owner.pattern, str):
                    found.add(owner.pattern)
    return found


def test_no_pattern_captures_inside_a_possessive_repeat() -> None:
    assert captures_in_possessive_repeats(r"x(dis)?+allow")
    assert captures_in_possessive_repeats(r"(?>a(b))")
    assert not captures_in_possessive_repeats(r"(a?+)(?:b)*+")
    found = patterns_of_the_package()
    assert len(found) > 100
    assert not {pattern for pattern in found if captures_in_possessive_repeats(pattern)}
