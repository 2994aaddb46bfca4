"""The switch for code that exists for speed alone, and lazy regular expressions.

The switch controls the decision cache, the compiled rules and first-match shortcuts of a policy,
the URL cache of a polite session, and the responses that the sidecar writes inline. Each has a
plain implementation beside it that gives the same answers; the whole test suite passes with the
switch off.

`lazy_pattern` serves modules with many regular expressions, so that an import costs only what is
used.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # as typing's: see gatekeeper/__init__.py
if TYPE_CHECKING:
    from re import Pattern
    from typing import Any

VARIABLE = "GATEKEEPER_NO_SPEEDUPS"
"""The environment variable that turns speed-ups off: any value but "" and "0"."""

ON: bool = os.environ.get(VARIABLE, "") in ("", "0")
"""Whether speed-ups are used. Classes read it on construction, as `speedups.ON`, so that a test can
set it; existing objects keep the value that they read."""

ALWAYS_SENDABLE_LENGTH = 5_460
"""A text of at most so many characters can't exceed the limit of a URL by percent-encoding: a
twelfth of `urls.MAX_PATH`. It is defined here so that rules need not import `urls`."""

_COPIED = ("findall", "finditer", "fullmatch", "match", "pattern", "search", "split", "sub")
"""The attributes of a regular expression that a `LazyPattern` provides."""


class CompiledPattern:
    """A `LazyPattern` after its first use."""

    __slots__ = ("_arguments", *_COPIED)


class LazyPattern(CompiledPattern):
    """A regular expression that is compiled on first use: see `lazy_pattern`."""

    __slots__ = ()

    def __init__(self, text: str, flags: int) -> None:
        self._arguments = text, flags

    def __getattr__(self, name: str) -> Any:  # called only for attributes that are not set yet
        from re import compile as compiled  # noqa: PLC0415

        text, flags = self._arguments
        pattern = compiled(without_possessive_groups(text) if _MISPLACED else text, flags)
        for attribute in _COPIED:
            setattr(self, attribute, getattr(pattern, attribute))
        # In a class with `__getattr__`, each attribute access takes 0.1 µs more.
        self.__class__ = CompiledPattern  # type: ignore[assignment]
        return getattr(pattern, name)


_MISPLACED = sys.version_info < (3, 11, 5)
"""Whether `re` goes on in the wrong place after a possessive repeat of a group: past the start of
the last attempt, which failed (CPython gh-106052)."""


def without_possessive_groups(text: str) -> str:
    """Rewrite possessive repeats of groups as atomic groups, which mean the same.

    >>> without_possessive_groups("a(?:b[)]|c)*+")
    'a(?>(?:b[)]|c)*)'
    """
    from re import findall  # noqa: PLC0415

    parts: list[str] = []
    opened: list[int] = []
    for part in findall(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\)[*+?]\+|(?s:.)", text):
        start = opened.pop() if part[0] == ")" else len(parts)
        if part == "(":
            opened.append(start)
        if len(part) == 3 and part[0] == ")":
            parts[start] = f"(?>{parts[start]}"
            parts.append(f"{part[:2]})")
        else:
            parts.append(part)
    return "".join(parts)


def lazy_pattern(text: str, flags: int = 0) -> Pattern[str]:
    """Return a stand-in for `re.compile(text, flags)` that compiles on first use.

    It has the pattern's methods and `pattern`, and after the first use it costs nothing extra.
    Compiling takes about 0.2 ms, and most files never need most expressions.

    >>> blanks = lazy_pattern(" +")
    >>> blanks.sub("_", "a  b"), blanks.split("a b"), blanks.pattern
    ('a_b', ['a', 'b'], ' +')
    """
    return LazyPattern(text, flags)  # type: ignore[return-value]
