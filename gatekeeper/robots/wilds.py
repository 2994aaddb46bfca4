"""Sets of RFC 9309 with wildcard patterns, exact paths or escapes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from gatekeeper.robots import normal
from gatekeeper.robots.normal import ROBOTS_TXT
from gatekeeper.robots.patterns import key_piece, wild_match
from gatekeeper.robots.pieces import Meter, PatternIndex, Text, TooDear
from gatekeeper.robots.prefixes import HEAD, Suspects, linked, packed
from gatekeeper.robots.rulesets import DENIED, ROBOTS_FILE
from gatekeeper.robots.shapes import SortedRules

__all__ = ["WildRules"]

_FLAT_RULES = 512
_FLAT_OCTETS = 16_384
"""Up to here wildcard patterns are tried one by one, beyond they are found by their pieces."""
_PAIRS = 1 << 22
"""Octets of a path times those of the wildcard patterns up to which they are tried one by one:
in the worst case each octet of the one is compared with each of the other three times, which
takes some 2 ms. Beyond, the work is counted: see `pieces`."""
_QUICK_OCTETS = _PAIRS // 8_192
"""Octets of pieces that may be looked for in any path of the lengths that `quick` answers about."""


class WildRules:
    """Prefixes as in `prefixes`, and beside them patterns that cost more to try.

    A wildcard pattern is tried only if its longest literal piece stands in the path, and if
    it can turn the verdict of the longest prefix. The *headed* ones have a literal up to
    their first star: it is a key among the prefixes, and where the path's key has no HEAD bit
    none of them matches. The *loose* ones may match anywhere, those with a `?` only a path
    with a query.

    Trying patterns takes at most the product of path and patterns, in octets. Where that is
    large they are looked up in two `PatternIndex`es instead, and what one answer may cost is
    counted: the answer is exact up to `pieces.MAX_STEPS`, and no beyond, which is DENIED.
    """

    __slots__ = (
        "_count",
        "_entries",
        "_exact",
        "_headed",
        "_indexes",
        "_keys",
        "_links",
        "_loose",
        "_odd",
        "_patterns",
        "_query",
        "_ranks",
        "_roomy",
        "_shift",
        "_strict",
        "_turns",
        "_twofold",
    )

    def __init__(self, rules: SortedRules) -> None:
        self._count = rules.count
        self._shift = rules.shift
        self._twofold = rules.twofold
        self._strict = rules.escapes or (bool(rules.wild) and rules.like_escapes)
        """Some pattern may be found in what is escaped: none is compared with a path as it
        comes. Elsewhere what a path holds beside plain octets can make no difference, for no
        pattern holds it and none begins within an escape, but for escapes of plain octets."""
        self._exact = rules.exact or None
        self._odd = self._strict or bool(rules.exact)
        # Whether a wildcard pattern can turn an Allow (1), a Disallow (2).
        verdicts = {entry >> rules.shift & 1 for entry in rules.wild.values()}
        self._turns = (0 in verdicts) | (1 in verdicts) << 1
        self._roomy = _PAIRS
        """Octets of a path up to which the patterns are tried one by one."""
        heads = self._sow(rules.wild)
        self._keys, links, entries = linked(rules, heads)
        self._links = packed(links)
        self._entries = packed(entries)

    def _sow(self, wild: dict[str, int]) -> dict[str, str]:
        """Takes the wildcard patterns in; gives the heads of those that begin with one."""
        self._indexes: tuple[PatternIndex, PatternIndex] | None = None
        self._loose: tuple[str, ...] = ()
        self._headed: tuple[str, ...] = ()
        self._query: tuple[str, ...] = ()
        self._patterns: tuple[str, ...] = ()
        self._ranks: Sequence[int] = b""
        if not wild:
            return {}
        octets = sum(map(len, wild))
        if len(wild) > _FLAT_RULES or octets > _FLAT_OCTETS:
            self._indexes = _indexes_of(wild)
            self._roomy = 0
            return {}
        self._roomy = _PAIRS // octets
        ranked = sorted(wild, key=wild.__getitem__, reverse=True)
        query = [pattern for pattern in ranked if "?" in pattern]
        plain = [pattern for pattern in ranked if "?" not in pattern]
        loose = [pattern for pattern in plain if pattern.startswith(("*", "/*"))]
        headed = [pattern for pattern in plain if not pattern.startswith(("*", "/*"))]
        heads = {head: head for head in (pattern[: pattern.index("*")] for pattern in headed)}
        self._loose = tuple(map(key_piece, loose))
        # The head says nothing where it stands already.
        self._headed = tuple(key_piece(pattern[pattern.index("*") :]) for pattern in headed)
        self._query = tuple(map(key_piece, query))
        ordered = loose + headed + query
        self._ranks = packed([wild[pattern] for pattern in ordered])
        literals = self._loose + self._headed + self._query
        self._patterns = tuple(
            _shape_of(pattern, literal, heads)
            for pattern, literal in zip(ordered, literals, strict=True)
        )
        return heads

    def allows(self, path: str) -> bool:
        """The verdict alone."""
        if "%" in path or (self._odd and self._is_odd(path)):
            return self.decide(path) & 1 == 1
        keys = self._keys
        place = bisect_right(keys, path) - 1
        while not path.startswith(keys[place]):
            place = self._links[place] >> 2
        link = self._links[place]
        if self._turns & (2 - (link & 1)) and (link & HEAD or self._may_be_wild(path)):
            try:
                entry = self._wild(path, path, self._entries[place])
            except TooDear:
                return path == ROBOTS_TXT
            return entry >> self._shift & 1 == 1 or path == ROBOTS_TXT
        return link & 1 == 1 or path == ROBOTS_TXT

    def _is_odd(self, path: str) -> bool:
        """Not to be answered in the quick way."""
        if self._exact and path in self._exact:
            return True
        return self._strict and ("*" in path or not normal.is_plain(path))

    def _may_be_wild(self, path: str) -> bool:
        """A piece of some wildcard pattern without a head stands in the path."""
        if len(path) > self._roomy:
            return True
        for literal in self._loose:
            if literal in path:
                return True
        return "?" in path and any(literal in path for literal in self._query)

    def suspects(self) -> Suspects | None:
        """What to look for before asking; None: ask."""
        pieces = self._loose + self._query
        if self._strict or not self._roomy or sum(map(len, pieces)) > _QUICK_OCTETS:
            return None
        # Not those that allow, unless a wildcard pattern begins with them.
        keys = zip(self._keys, self._links, strict=True)
        prefixes = [key for key, link in keys if link & (HEAD | 1) != 1]
        return (*prefixes, *(self._exact or ())), pieces

    def decide(self, path: str) -> int:
        """The code of the deciding rule, -1, DENIED or ROBOTS_FILE."""
        if "%" in path or (self._strict and ("*" in path or not normal.is_plain(path))):
            path = normal.rfc_path(path)
        if path == ROBOTS_TXT:
            return ROBOTS_FILE
        try:
            entry = self._entry(path)
        except TooDear:
            return DENIED
        place = entry & (1 << self._shift) - 1
        # The place counts down to 1; the entry of no rule has none.
        return (self._count - place) * 2 + (entry >> self._shift & 1) if place else -1

    def _entry(self, path: str) -> int:
        # A rule with a `?` is compared with the path as it stands, and as RFC-25 reads it.
        query = normal.query_form(path) if self._twofold and "%" in path else path
        entry = self._prefix(path)
        if query != path:
            entry = max(entry, self._prefix(query))
        if self._exact:
            entry = max(entry, self._exact.get(path, 0), self._exact.get(query, 0))
        return self._wild(path, query, entry)

    def _prefix(self, path: str) -> int:
        keys = self._keys
        place = bisect_right(keys, path) - 1
        while not path.startswith(keys[place]):
            place = self._links[place] >> 2
        return self._entries[place]

    def _wild(self, path: str, query: str, floor: int) -> int:
        """The entry of the best wildcard pattern that matches, if it beats `floor`, else that.

        Raises TooDear.
        """
        if len(path) > self._roomy:
            return self._counted(path, query, floor)
        loose, headed = self._loose, self._headed
        if loose:
            floor = self._best(loose, 0, path, floor)
        if headed:
            floor = self._best(headed, len(loose), path, floor)
        if self._query and "?" in query:
            start = len(loose) + len(headed)
            floor = self._best(self._query, start, path, floor)
            if query != path:
                floor = self._best(self._query, start, query, floor)
        return floor

    def _counted(self, path: str, query: str, floor: int) -> int:
        """The same by looking pieces up. Raises TooDear."""
        indexes = self._indexes
        if indexes is None:
            indexes = self._indexes = _indexes_of(self._all())
        meter = Meter()
        text = Text(path, meter)
        floor = indexes[0].best(text, floor)
        if "?" in path:
            floor = indexes[1].best(text, floor)
            if query != path:
                floor = indexes[1].best(Text(query, meter), floor)
        return floor

    def _all(self) -> dict[str, int]:
        """The patterns again, with their entries."""
        literals = self._loose + self._headed + self._query
        kept = zip(self._patterns, literals, self._ranks, strict=True)
        return {_pattern_of(shape, literal): entry for shape, literal, entry in kept}

    def _best(self, literals: tuple[str, ...], start: int, path: str, floor: int) -> int:
        """The same for the patterns from `start` on, which have these literals."""
        for index, literal in enumerate(literals, start):
            if literal in path:
                entry = self._ranks[index]
                if entry <= floor:
                    break
                if _shape_matches(self._patterns[index], literal, path):
                    return entry
        return floor


# What is kept of the commonest patterns beside their literal. Every path begins with a
# slash, so that of a pattern before whose star stands nothing else the literal says the rest.
_ANYWHERE, _BEHIND, _LAST = "*", "/*", "/*$"


def _shape_of(pattern: str, literal: str, heads: dict[str, str]) -> str:
    """What to keep of a pattern beside its literal: one of three, its head, or all of it.

    The head is kept as the very string in `heads`, and stands for `head*literal`.
    """
    for shape in (_ANYWHERE, _BEHIND, _LAST):
        if pattern == shape.replace("*", "*" + literal):
            return shape
    head, _, rest = pattern.partition("*")
    return heads[head] if rest == literal and head in heads else pattern


def _pattern_of(shape: str, literal: str) -> str:
    """The pattern that was kept as `shape` beside its literal."""
    if "*" not in shape:
        return f"{shape}*{literal}"
    common = shape is _ANYWHERE or shape is _BEHIND or shape is _LAST
    return shape.replace("*", "*" + literal) if common else shape


def _indexes_of(wild: dict[str, int]) -> tuple[PatternIndex, PatternIndex]:
    """Of the patterns without a `?`, and of those with one."""
    return (
        PatternIndex({pattern: wild[pattern] for pattern in wild if "?" not in pattern}),
        PatternIndex({pattern: wild[pattern] for pattern in wild if "?" in pattern}),
    )


def _shape_matches(shape: str, literal: str, path: str) -> bool:
    """Whether the pattern kept as `shape` matches a path in which its literal stands."""
    if shape is _BEHIND:
        return path.find(literal, 1) > 0
    if shape is _LAST:
        return path.endswith(literal, 1)
    if "*" not in shape:
        return path.startswith(shape) and path.find(literal, len(shape)) >= 0
    return shape is _ANYWHERE or wild_match(shape, path)
