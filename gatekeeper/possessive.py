"""`possessive` regular expressions.

A possessive repeat keeps the time of a search linear; some versions of Python read one of a group
wrongly.
"""

from __future__ import annotations

import re
import sys

_MISPLACED = sys.version_info < (3, 11, 5)
"""Whether `re` goes on in the wrong place after a possessive repeat of a group: past the start of
the last attempt, which failed (CPython gh-106052)."""


def without_possessive_groups(text: str) -> str:
    """Rewrite possessive repeats of groups as atomic groups, which mean the same.

    >>> without_possessive_groups("a(?:b[)]|c)*+")
    'a(?>(?:b[)]|c)*)'
    """
    parts: list[str] = []
    opened: list[int] = []
    for part in re.findall(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\)[*+?]\+|(?s:.)", text):
        start = opened.pop() if part[0] == ")" else len(parts)
        if part == "(":
            opened.append(start)
        if len(part) == 3 and part[0] == ")":
            parts[start] = f"(?>{parts[start]}"
            parts.append(f"{part[:2]})")
        else:
            parts.append(part)
    return "".join(parts)


def possessive(text: str, flags: int = 0) -> re.Pattern[str]:
    """Compile a regular expression with possessive repeats of groups, as this Python reads them
    right.

    >>> possessive("(?:ab)*+a").match("ababa").span()
    (0, 5)
    """
    return re.compile(without_possessive_groups(text) if _MISPLACED else text, flags)
