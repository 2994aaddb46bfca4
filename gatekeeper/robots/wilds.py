"""Sets of RFC 9309 with wildcard patterns, exact paths or escapes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from gatekeeper.robots import normal
from gatekeeper.robots.patterns import key_piece, wild_match
from gatekeeper.robots.prefixes import HEAD, Suspects, linked, packed
from gatekeeper.robots.rulesets import DENIED, ROBOTS_TXT
from gatekeeper.robots.shapes import SortedRules
from gatekeeper.robots.trie import TooDear, WildTrie

__all__ = ["WildRules"]

_FLAT_RULES = 512
_FLAT_OCTETS = 16_384
"""Up to here wildcard patterns are tried one by one, beyond they are put in a trie."""


class WildRules:
    """Prefixes as in `prefixes`, and beside them patterns that cost more to try.

    A wildcard pattern is tried only if its longest literal piece stands in the path, and if
    it can turn the verdict of the longest prefix. The *headed* ones have a literal up to
    their first star: it is a key among the prefixes, and where the path's key has no HEAD bit
    none of them matches. The *loose* ones may match anywhere, those with a `?` only a path
    with a query. Many patterns go into a trie instead.
    """

    __slots__ = (
        "_count",
        "_entries",
        "_escapes",
        "_exact",
        "_headed",
        "_keys",
        "_links",
        "_loose",
        "_odd",
        "_patterns",
        "_query",
        "_ranks",
        "_shift",
        "_tries",
        "_turns",
        "_twofold",
    )

    def __init__(self, rules: SortedRules) -> None:
        self._count = rules.count
        self._shift = rules.shift
        self._escapes, self._twofold = rules.escapes, rules.twofold
        self._exact = rules.exact or None
        self._odd = rules.escapes or bool(rules.exact)
        # Whether a wildcard pattern can turn an Allow (1), a Disallow (2).
        verdicts = {entry >> rules.shift & 1 for entry in rules.wild.values()}
        self._turns = (0 in verdicts) | (1 in verdicts) << 1
        heads = self._sow(rules.wild)
        self._keys, links, entries = linked(rules, heads)
        self._links = packed(links)
        self._entries = packed(entries)

    def _sow(self, wild: dict[str, int]) -> dict[str, str]:
        """Takes the wildcard patterns in; gives the heads of those that begin with one."""
        self._tries: tuple[WildTrie, WildTrie] | None = None
        self._loose: tuple[str, ...] = ()
        self._headed: tuple[str, ...] = ()
        self._query: tuple[str, ...] = ()
        self._patterns: tuple[str, ...] = ()
        self._ranks: Sequence[int] = b""
        if not wild:
            return {}
        ranked = sorted(wild, key=wild.__getitem__, reverse=True)
        query = [pattern for pattern in ranked if "?" in pattern]
        plain = [pattern for pattern in ranked if "?" not in pattern]
        if len(wild) > _FLAT_RULES or sum(map(len, wild)) > _FLAT_OCTETS:
            self._tries = (
                WildTrie({pattern: wild[pattern] for pattern in plain}),
                WildTrie({pattern: wild[pattern] for pattern in query}),
            )
            self._loose = ("",)
            return {}
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
            return self.decide(path) & 1 == 1 or path == ROBOTS_TXT
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
        return self._escapes and ("*" in path or not normal.is_plain(path))

    def _may_be_wild(self, path: str) -> bool:
        """A piece of some wildcard pattern without a head stands in the path."""
        for literal in self._loose:
            if literal in path:
                return True
        return "?" in path and any(literal in path for literal in self._query)

    def suspects(self) -> Suspects | None:
        """What to look for before asking; None: ask."""
        if self._escapes or self._tries:
            return None
        # Not those that allow, unless a wildcard pattern begins with them.
        keys = zip(self._keys, self._links, strict=True)
        prefixes = [key for key, link in keys if link & (HEAD | 1) != 1]
        return (*prefixes, *(self._exact or ())), self._loose + self._query

    def decide(self, path: str) -> int:
        """The code of the deciding rule, -1 or DENIED."""
        try:
            entry = self._entry(path)
        except TooDear:
            return DENIED
        place = entry & (1 << self._shift) - 1
        # The place counts down to 1; the entry of no rule has none.
        return (self._count - place) * 2 + (entry >> self._shift & 1) if place else -1

    def _entry(self, path: str) -> int:
        query = path
        if "%" in path:
            if self._escapes or not normal.unescaped(path):
                path = query = normal.rfc_path(path)
        elif self._escapes and ("*" in path or not normal.is_plain(path)):
            path = query = normal.rfc_path(path)
        if self._twofold and "%" in path:
            # A rule with a `?` is compared after RFC-25, any other without.
            query = normal.query_form(normal.rfc_path(path))
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
        """The entry of the best wildcard pattern that matches, if it beats `floor`, else that."""
        if self._tries:
            floor = self._tries[0].best(path, floor)
            return self._tries[1].best(query, floor) if "?" in query else floor
        loose, headed = self._loose, self._headed
        if loose:
            floor = self._best(loose, 0, path, floor)
        if headed:
            floor = self._best(headed, len(loose), path, floor)
        if self._query and "?" in query:
            floor = self._best(self._query, len(loose) + len(headed), query, floor)
        return floor

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


def _shape_matches(shape: str, literal: str, path: str) -> bool:
    """Whether the pattern kept as `shape` matches a path in which its literal stands."""
    if shape is _BEHIND:
        return path.find(literal, 1) > 0
    if shape is _LAST:
        return path.endswith(literal, 1)
    if "*" not in shape:
        return path.startswith(shape) and path.find(literal, len(shape)) >= 0
    return shape is _ANYWHERE or wild_match(shape, path)
