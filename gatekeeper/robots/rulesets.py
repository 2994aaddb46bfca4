"""Rule sets: the rules that one agent obeys, made ready to be asked, a class a reading.

No rule is an object here. Rules are numbered as they stand in the text, and a set keeps its
patterns and what it needs to choose among them. `decide` gives a *code*: the number of the
deciding rule times two, plus one if it allows; or -1, which allows, where no rule matches.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from typing import NamedTuple, Protocol

from gatekeeper.robots import normal
from gatekeeper.robots.lines import RULE, Spans, value_of
from gatekeeper.robots.model import Dialect
from gatekeeper.robots.patterns import WildTrie, key_piece, squeeze, wild_match

__all__ = ["ROBOTS_TXT", "LongestMatch", "Numbered", "RuleSet", "rules_in"]

ROBOTS_TXT = "/robots.txt"
"""May always be asked for (RFC-20, R96-16, V2-34); `allows` knows, `decide` does not."""

_FLAT_RULES = 96
_FLAT_OCTETS = 16_384
"""Up to here wildcard patterns are tried one by one, beyond they are put in a trie."""

class Numbered(NamedTuple):
    """An Allow or Disallow line of a set; its number is its place."""

    allow: bool
    value: str


class RuleSet(Protocol):
    """What a `Policy` asks. Paths begin with `/` and carry their query."""

    @property
    def dialect(self) -> Dialect:
        """The one that these rules are read by."""

    @property
    def spans(self) -> Spans:
        """Where the rules stand in the text."""

    def allows(self, path: str) -> bool:
        """The verdict alone."""

    def decide(self, path: str) -> int:
        """The code of the deciding rule, or -1."""

    def matching(self, path: str, rules: list[Numbered]) -> list[tuple[int, int]]:
        """Number and length of every rule that matches, the deciding one first.

        `rules` is what `rules_in` gives for the text that the set was made of.
        """


def rules_in(text: str, spans: Spans, *, v2: bool = False) -> list[Numbered]:
    """Each Allow and Disallow line of the spans."""
    if not v2 or "#" not in text:
        return [
            Numbered(not dis, value.rstrip(" \t"))
            for low, high in spans
            for dis, value in RULE.findall(text, low, high)
        ]
    rules = []
    for low, high in spans:
        for found in RULE.finditer(text, low, high):
            # RULE cuts comments the RFC's way; here a `#` may belong to the value (V2-03).
            end = text.find("\n", found.end(), high)
            rest = text[found.start(2) - 1 : end if end >= 0 else high].removeprefix(":")
            rules.append(Numbered(not found[1], value_of(rest, v2=True)))
    return rules


class LongestMatch:
    """RFC 9309: the longest match wins whatever the order, a tie allows (RFC-16 to RFC-19).

    A rule is one number, its *entry*: octets, whether it allows, and how far from the end of
    the set it stands, from the high bits to the low ones. So the greatest entry is the longest
    match, of equal ones an Allow (RFC-18), of these the first in the file.

    Plain prefixes lie sorted; the longest one that a path begins with is found by bisection,
    and from a neighbour that shares only a part, up the links to the keys that it begins with.
    The first key is empty, begins every path and allows (RFC-19). Wildcard patterns are tried
    only if their longest literal piece stands in the path, or, where they are many, in a trie.
    """

    __slots__ = (
        "_count",
        "_entries",
        "_escapes",
        "_exact",
        "_keys",
        "_links",
        "_literals",
        "_patterns",
        "_query",
        "_shift",
        "_sown",
        "_tries",
        "_twofold",
        "spans",
    )

    dialect = Dialect.RFC9309
    spans: Spans

    def __init__(self, text: str, spans: Spans) -> None:
        self.spans = spans
        low, high = spans[0] if spans else (0, 0)
        found: list[tuple[str, str]] = RULE.findall(text, low, high)
        for low, high in spans[1:]:
            found += RULE.findall(text, low, high)
        joined = "".join([value for _, value in found])
        self._escapes = self._twofold = False
        self._count = len(found)
        self._shift = shift = (len(found) + 1).bit_length()
        prefixes = {"": 1 << shift}
        exact: dict[str, int] = {}
        wild: dict[str, int] = {}
        special = "*" in joined or "$" in joined
        if special or "?" in joined or not normal.is_plain(joined):
            self._sort(found, prefixes, exact, wild)
        else:
            octet, allow, entry = 2 << shift, 1 << shift, len(found) + 1
            for dis, value in found:
                entry -= 1
                if value[:1] == "/":
                    score = len(value) * octet + entry
                    if not dis:
                        score += allow
                    if prefixes.get(value, 0) < score:
                        prefixes[value] = score
        self._exact = exact or None
        self._link(prefixes, inherit=special)
        self._sow(wild)

    def _sort(
        self,
        found: list[tuple[str, str]],
        prefixes: dict[str, int],
        exact: dict[str, int],
        wild: dict[str, int],
    ) -> None:
        """Rules of every shape to where they belong."""
        shift = self._shift
        place = len(found) + 1
        for dis, value in found:
            place -= 1
            value = value.rstrip(" \t")  # noqa: PLW2901
            if value[:1] != "/" and value[:1] != "*":
                continue  # an empty pattern has no effect (RFC-21), any other is none (RFC-32)
            pattern = self._normal(value)
            entry = (len(pattern) << 1 | (not dis)) << shift | place
            into = prefixes
            if "*" in pattern:
                pattern = squeeze(pattern)
                if "*" in pattern[:-1] or pattern[-1] == "$":
                    into = wild
                else:
                    pattern = pattern[:-1]
            elif pattern[-1] == "$":
                into, pattern = exact, pattern[:-1]
            if into.get(pattern, 0) < entry:
                into[pattern] = entry

    def _normal(self, value: str) -> str:
        value = normal.rfc_pattern(value)
        if "%" in value:
            self._escapes = True
        mark = value.find("?")
        if mark >= 0:
            query = value[mark:]
            if ":" in query or "/" in query or "%3A" in query or "%2F" in query:
                self._twofold = True
                return normal.query_form(value)
        return value

    def _link(self, prefixes: dict[str, int], *, inherit: bool) -> None:
        keys = sorted(prefixes)
        entries = list(map(prefixes.__getitem__, keys))
        allow = 1 << self._shift
        links = [1 if entries[0] & allow else 0]
        above = [("", 0)]  # the keys that the last one begins with, and itself
        for place in range(1, len(keys)):
            key = keys[place]
            while not key.startswith(above[-1][0]):
                above.pop()
            up = above[-1][1]
            # `/a*` is longer than its key: a key below may be the shorter rule.
            if inherit and entries[up] > entries[place]:
                entries[place] = entries[up]
            links.append(up << 1 | 1 if entries[place] & allow else up << 1)
            above.append((key, place))
        self._keys = tuple(keys)
        self._links = _packed(links)
        self._entries = _packed(entries)

    def _sow(self, wild: dict[str, int]) -> None:
        """Wildcard patterns: those without a `?` first, for most paths have no query."""
        self._tries: tuple[WildTrie, WildTrie] | None = None
        self._literals: tuple[str, ...] = ()
        self._query: tuple[str, ...] = ()
        self._patterns: tuple[str | None, ...] = ()
        self._sown: array[int] | None = None
        if not wild:
            return
        ranked = sorted(wild, key=wild.__getitem__, reverse=True)
        plain = [pattern for pattern in ranked if "?" not in pattern]
        query = [pattern for pattern in ranked if "?" in pattern]
        if len(wild) > _FLAT_RULES or sum(map(len, wild)) > _FLAT_OCTETS:
            self._tries = (
                WildTrie({pattern: wild[pattern] for pattern in plain}),
                WildTrie({pattern: wild[pattern] for pattern in query}),
            )
            self._literals = ("",)
            return
        self._literals = tuple(map(key_piece, plain))
        self._query = tuple(map(key_piece, query))
        self._sown = _packed([wild[pattern] for pattern in plain + query])
        # `/*piece` needs no more than its piece: every path begins with a slash.
        self._patterns = tuple(
            None if pattern == "/*" + literal else pattern
            for pattern, literal in zip(
                plain + query, self._literals + self._query, strict=True
            )
        )

    def allows(self, path: str) -> bool:
        """The verdict alone."""
        if "%" in path or self._escapes or (self._exact and path in self._exact):
            return self.decide(path) & 1 == 1 or path == ROBOTS_TXT
        for literal in self._literals:
            if literal in path:
                return self.decide(path) & 1 == 1 or path == ROBOTS_TXT
        if self._query and "?" in path:
            for literal in self._query:
                if literal in path:
                    return self.decide(path) & 1 == 1
        keys = self._keys
        place = bisect_right(keys, path) - 1
        while not path.startswith(keys[place]):
            place = self._links[place] >> 1
        return self._links[place] & 1 == 1 or path == ROBOTS_TXT

    def decide(self, path: str) -> int:
        """The code of the deciding rule, or -1."""
        entry = self._entry(path)
        place = entry & (1 << self._shift) - 1
        # The place counts down to 1; the entry of no rule has none.
        return (self._count - place) * 2 + (entry >> self._shift & 1) if place else -1

    def _entry(self, path: str) -> int:
        query = path
        if self._escapes or ("%" in path and not normal.unescaped(path)):
            path = query = normal.rfc_path(path)
        if self._twofold and "%" in path:
            # A rule with a `?` is compared after RFC-25, any other without.
            query = normal.query_form(normal.rfc_path(path))
        entry = self._prefix(path)
        if query != path:
            entry = max(entry, self._prefix(query))
        if self._exact:
            entry = max(entry, self._exact.get(path, 0), self._exact.get(query, 0))
        if self._tries:
            entry = self._tries[0].best(path, entry)
            return self._tries[1].best(query, entry) if "?" in query else entry
        if self._literals:
            entry = self._wild(self._literals, 0, path, entry)
        if self._query and "?" in query:
            entry = self._wild(self._query, len(self._literals), query, entry)
        return entry

    def _prefix(self, path: str) -> int:
        keys = self._keys
        place = bisect_right(keys, path) - 1
        while not path.startswith(keys[place]):
            place = self._links[place] >> 1
        return self._entries[place]

    def _wild(self, literals: tuple[str, ...], start: int, path: str, floor: int) -> int:
        """The entry of the first pattern that matches, if it beats `floor`, else `floor`."""
        for place, literal in enumerate(literals, start):
            if literal in path:
                entry = self._sown[place]
                if entry <= floor:
                    break
                pattern = self._patterns[place]
                if path.find(literal, 1) > 0 if pattern is None else wild_match(pattern, path):
                    return entry
        return floor

    def matching(self, path: str, rules: list[Numbered]) -> list[tuple[int, int]]:
        """Number and length of every rule that matches, the deciding one first."""
        plain = normal.rfc_path(path)
        query = normal.query_form(plain)
        found = []
        for number, rule in enumerate(rules):
            pattern = normal.rfc_pattern(rule.value)
            if pattern[:1] not in {"/", "*"}:
                continue
            seen = plain
            if "?" in pattern:
                pattern, seen = normal.query_form(pattern), query
            if wild_match(squeeze(pattern), seen):
                found.append((number, len(pattern)))
        found.sort(key=lambda each: (-each[1], not rules[each[0]].allow))
        return found


def _packed(numbers: list[int]) -> array[int]:
    most = max(numbers)
    return array("H" if most < 1 << 16 else "I" if most < 1 << 32 else "Q", numbers)
