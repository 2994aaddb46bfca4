"""The rules of RFC 9309 by shape: plain prefixes, exact paths, wildcard patterns."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache

from gatekeeper.robots import normal
from gatekeeper.robots.patterns import squeeze, wild_match

__all__ = [
    "PECULIAR",
    "SortedRules",
    "last_piece",
    "likely",
    "octets_of",
    "shape_matches",
    "shape_of",
]

_PLAIN = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~:/@!&'()+,;="
PECULIAR = re.compile(rf"[^{re.escape(_PLAIN)}]")
"""What a value may hold that is more, or less, than a prefix in its normal form."""


class SortedRules:
    """The rules of a set by shape, each with its entry (see `LongestMatch`)."""

    def __init__(self, shift: int, *, odd: bool) -> None:
        self.prefixes = {"": 1 << shift}  # no rule: allowed (RFC-19)
        self.exact: dict[str, int] = {}
        """Paths that a `$` ends (RFC-28)."""
        self.wild: dict[str, int] = {}
        self.escapes = False
        """An escape stands in some pattern: no path may be compared as it comes."""
        self.twofold = False
        """A `:` or `/` stands in some pattern's query (RFC-25)."""
        self.inherit = False
        """A prefix is longer than it looks: its stars at the end count (RFC-17)."""
        self._shift = shift
        self._odd = odd

    def add(self, value: str, allow: bool, place: int) -> None:
        """Take a rule that may be more than a plain prefix."""
        if value[-1] in " \t":
            value = value.rstrip(" \t")
        if value[:1] != "/" and value[:1] != "*":
            return  # an empty pattern has no effect (RFC-21), any other is none (RFC-32)
        if self._odd or "$" in value[:-1]:
            value = normal.rfc_pattern(value)
            self.escapes = self.escapes or "%" in value
        if "?" in value:
            value = self._query(value)
        entry = (len(value) << 1 | allow) << self._shift | place
        into = self.prefixes
        if "*" in value:
            value = squeeze(value).removesuffix("*")  # which says what every end says
            if "*" in value:
                into = self.wild
            else:
                self.inherit = True
        elif value[-1] == "$":
            into, value = self.exact, value[:-1]
        if into.get(value, 0) < entry:
            into[value] = entry

    def _query(self, value: str) -> str:
        query = value[value.index("?") :]
        if ":" in query or "/" in query or "%3A" in query or "%2F" in query:
            self.twofold = True
            return normal.query_form(value)
        return value


@lru_cache(maxsize=128)
def likely(second: str) -> Callable[[str, int, int], list[tuple[str, str]]]:
    """Finds the rules that a path with this second octet may match, plain or not."""
    other = _PLAIN.replace(second, "") if second else _PLAIN
    return re.compile(
        rf"^[ \t]*+(?i:(dis)?+allow)[ \t]*+:[ \t]*+"  # the value keeps its case
        rf"(\*[^#\n]*+|/(?:[^{re.escape(other)}#\n][^#\n]*+|(?![^#\n])))",
        re.MULTILINE | re.ASCII,
    ).findall


def octets_of(value: str, path: str, query: str) -> int:
    """How long a rule's pattern is if it matches, else 0. `query`: the path by RFC-25."""
    value = value.rstrip(" \t")
    if value[:1] != "/" and value[:1] != "*":
        return 0
    pattern = normal.rfc_pattern(value)
    if "?" in pattern:
        pattern, path = normal.query_form(pattern), query
    return len(pattern) if wild_match(squeeze(pattern), path) else 0


def last_piece(value: str) -> str:
    """The end of a plain wildcard pattern, which stands in each path that it matches."""
    piece = value[value.rfind("*") + 1 :].rstrip("$ \t")
    return piece if normal.is_plain(piece) else ""


# What is kept of the commonest patterns: every path begins with a slash, so that their
# literal says the rest.
_ANYWHERE, _BEHIND, _LAST = "*", "/*", "/*$"


def shape_of(pattern: str, literal: str) -> str:
    """What to keep of a pattern beside its literal: one of three, or the pattern itself."""
    for shape in (_ANYWHERE, _BEHIND, _LAST):
        if pattern == shape.replace("*", "*" + literal):
            return shape
    return pattern


def shape_matches(shape: str, literal: str, path: str) -> bool:
    """Whether the pattern kept as `shape` matches a path in which its literal stands."""
    if shape is _BEHIND:
        return path.find(literal, 1) > 0
    if shape is _LAST:
        return path.endswith(literal, 1)
    return shape is _ANYWHERE or wild_match(shape, path)
