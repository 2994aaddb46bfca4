"""Answers for a hot path: from the text behind a URL's authority straight to the verdict.

A path as it stands in a URL is not always what a rule is compared with: it may hold escapes,
dot segments, a fragment, or characters that no URL may hold. Most paths hold none of these,
and most files hold few rules; so what has to be looked at, and how, is settled once a policy.
The answer is None where the text needs the long road.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from gatekeeper.urls import SURELY_SHORT

__all__ = ["PlainAnswer", "QuickAnswer", "Suspects", "plainly", "quickly"]

QuickAnswer = Callable[[str], bool | None]
"""Takes what follows the authority in a URL, as written, beginning with `/`. True, False, or
None: ask again with the whole URL, which may be no URL at all."""

PlainAnswer = Callable[[str], bool]
"""The verdict about a path that is known to be plain: ASCII, without blanks, escapes, dot
segments, query or fragment."""

Suspects = tuple[tuple[str, ...], tuple[str, ...]]
"""What a denied path has to begin with, and else to hold; None stands for too much to say."""

_FEW = 24
"""Prefixes or pieces up to which trying each in turn is faster than looking them up."""
_LONG = SURELY_SHORT
"""Characters that are answered about; the reader of URLs knows their bound."""
_dot_segment = re.compile(r"/\.\.?(?:[/?#]|\Z)").search


def welcome(path: str) -> bool | None:
    """No rule speaks to the agent: only what is no URL has to be told from the rest."""
    if path.isprintable() and " " not in path and len(path) < _LONG:
        return True
    return None


def at_a_glance(
    prefixes: tuple[str, ...], pieces: tuple[str, ...], allows: Callable[[str], bool]
) -> QuickAnswer:
    """Only what begins with one of a few prefixes, or holds one of a few pieces, can be denied.

    Both are plain octets without escapes, and hold no `#`: so neither a fragment nor a
    character that would be escaped can make a path match one of them that it does not match
    as it stands, and these need no look. `allows` answers about those that do match.
    """

    def answer(path: str) -> bool | None:
        if (
            "%" in path
            or " " in path
            or not path.isprintable()
            or ("/." in path and _dot_segment(path))
            or len(path) >= _LONG
        ):
            return None
        if path.startswith(prefixes):
            return allows(path) if path.isascii() and "#" not in path else None
        for piece in pieces:
            if piece in path:
                return allows(path) if path.isascii() and "#" not in path else None
        return True

    return answer


def quickly(suspects: Suspects | None, allows: Callable[[str], bool]) -> QuickAnswer:
    """The answer for such a policy, whose long road is `allows`."""
    if suspects is None or max(map(len, suspects)) > _FEW:
        return in_general(allows)
    return at_a_glance(*suspects, allows) if any(suspects) else welcome


def plainly(suspects: Suspects | None, allows: Callable[[str], bool]) -> PlainAnswer:
    """The same for plain paths, which need no look of their own.

    >>> answer = plainly((("/x",), ()), lambda path: path == "/x/y")
    >>> answer("/a"), answer("/x/y"), answer("/xyz")
    (True, True, False)
    """
    if suspects is None or max(map(len, suspects)) > _FEW:
        return allows
    prefixes, pieces = suspects

    def answer(path: str) -> bool:
        if path.startswith(prefixes):
            return allows(path)
        for piece in pieces:
            if piece in path:
                return allows(path)
        return True

    return answer


def in_general(allows: Callable[[str], bool]) -> QuickAnswer:
    """Any other policy: `allows` takes a path and query in which nothing is escaped."""

    def answer(path: str) -> bool | None:
        if (
            path.isascii()
            and path.isprintable()
            and "%" not in path
            and "#" not in path
            and " " not in path
            and ("/." not in path or not _dot_segment(path))
            and len(path) < _LONG
        ):
            return allows(path)
        return None

    return answer
