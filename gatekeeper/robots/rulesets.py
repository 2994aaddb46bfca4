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
from gatekeeper.robots.lines import RULE, value_of
from gatekeeper.robots.patterns import WildTrie, key_piece, squeeze, wild_match

__all__ = ["ROBOTS_TXT", "LongestMatch", "Numbered", "RuleSet", "Spans", "rules_in"]

ROBOTS_TXT = "/robots.txt"
"""May always be asked for (RFC-20, R96-16, V2-34); `allows` knows, `decide` does not."""

Spans = tuple[tuple[int, int], ...]
"""The stretches of the text whose rules form one set."""

_FLAT_RULES = 96
_FLAT_OCTETS = 16_384
"""Up to here wildcard patterns are tried one by one, beyond they are put in a trie."""

_ALLOW = 1 << 32
_NUMBER = _ALLOW - 1
"""A packed entry: octets << 33 | allow << 32 | _NUMBER - number, so that the greatest entry is
the longest match, of equal ones an Allow (RFC-17, RFC-18), of these the first in the file."""
_NO_RULE = _ALLOW


class Numbered(NamedTuple):
    """An Allow or Disallow line of a set; its number is its place."""

    allow: bool
    value: str


class RuleSet(Protocol):
    """What a `Policy` asks. Paths begin with `/` and carry their query."""

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

    Plain prefixes lie sorted; the longest one that a path begins with is found by bisection,
    and from a neighbour that shares only a part, up the links to its own prefixes. The first
    key is empty, begins every path and allows (RFC-19). An entry is that of the best rule
    among its key and the keys that the key begins with. Wildcard patterns are tried only if
    their longest literal piece stands in the path.
    """

    __slots__ = (
        "_entries",
        "_escapes",
        "_exact",
        "_keys",
        "_links",
        "_literals",
        "_query_literals",
        "_twofold",
        "_wild",
        "_wild_query",
    )

    def __init__(self, text: str, spans: Spans) -> None:
        found: list[tuple[str, str]] = []
        for low, high in spans:
            found += RULE.findall(text, low, high)
        values = [value.rstrip(" \t") for _, value in found]
        joined = "".join(values)
        odd = not normal.is_plain(joined)
        special, query = "*" in joined or "$" in joined, "?" in joined
        self._escapes = self._twofold = False
        prefixes: dict[str, int] = {"": _NO_RULE}
        exact: dict[str, int] = {}
        wild: dict[str, int] = {}
        for number, ((dis, _), value) in enumerate(zip(found, values, strict=True)):
            if odd or (query and "?" in value):
                value = self._normal(value, odd=odd)  # noqa: PLW2901
            if value[:1] != "/" and value[:1] != "*":
                continue  # an empty pattern has no effect (RFC-21), any other is none (RFC-32)
            entry = len(value) << 33 | _NUMBER - number
            if not dis:
                entry |= _ALLOW
            into = prefixes
            if special:
                if "*" in value:
                    value = squeeze(value)  # noqa: PLW2901
                    if "*" in value[:-1] or value[-1] == "$":
                        into = wild
                    else:
                        value = value[:-1]  # noqa: PLW2901
                elif value[-1] == "$":
                    into, value = exact, value[:-1]  # noqa: PLW2901
            if into.get(value, 0) < entry:
                into[value] = entry
        self._exact = exact or None
        self._link(prefixes)
        self._sow(wild)

    def _normal(self, value: str, *, odd: bool) -> str:
        if odd:
            value = normal.rfc_pattern(value)
            if "%" in value:
                self._escapes = True
        mark = value.find("?")
        if mark >= 0 and any(piece in value[mark:] for piece in (":", "/", "%3A", "%2F")):
            self._twofold = True
            return normal.query_form(value)
        return value

    def _link(self, prefixes: dict[str, int]) -> None:
        keys = sorted(prefixes)
        links: list[int] = []
        entries: list[int] = []
        above: list[int] = []  # the keys that the last one begins with, and itself
        for place, key in enumerate(keys):
            entry = prefixes[key]
            while above and not key.startswith(keys[above[-1]]):
                above.pop()
            up = above[-1] if above else 0
            if place:
                entry = max(entry, entries[up])
            links.append(up)
            entries.append(entry)
            above.append(place)
        self._keys = tuple(keys)
        self._links = array("H" if len(keys) < 65_536 else "I", links)
        self._entries = array("Q", entries)

    def _sow(self, wild: dict[str, int]) -> None:
        query = {pattern: wild.pop(pattern) for pattern in tuple(wild) if "?" in pattern}
        self._wild = _Wildcards.of(wild) if wild else None
        self._wild_query = _Wildcards.of(query) if query else None
        self._literals = self._wild.literals if self._wild else ()
        self._query_literals = self._wild_query.literals if self._wild_query else ()

    def allows(self, path: str) -> bool:
        if self._escapes or "%" in path:
            return self.decide(path) & 1 == 1 or path == ROBOTS_TXT
        for literal in self._literals:
            if literal in path:
                return self.decide(path) & 1 == 1 or path == ROBOTS_TXT
        if "?" in path:
            for literal in self._query_literals:
                if literal in path:
                    return self.decide(path) & 1 == 1
        if self._exact and path in self._exact:
            return self.decide(path) & 1 == 1 or path == ROBOTS_TXT
        keys = self._keys
        place = bisect_right(keys, path) - 1
        while not path.startswith(keys[place]):
            place = self._links[place]
        return self._entries[place] & _ALLOW != 0 or path == ROBOTS_TXT

    def decide(self, path: str) -> int:
        entry = self._entry(path)
        number = entry & _NUMBER
        return (_NUMBER - number) * 2 + (entry >> 32 & 1) if number else -1

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
        if self._wild:
            entry = self._wild.best(path, entry)
        if self._wild_query and "?" in query:
            entry = self._wild_query.best(query, entry)
        return entry

    def _prefix(self, path: str) -> int:
        keys = self._keys
        place = bisect_right(keys, path) - 1
        while not path.startswith(keys[place]):
            place = self._links[place]
        return self._entries[place]

    def matching(self, path: str, rules: list[Numbered]) -> list[tuple[int, int]]:
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


class _Wildcards:
    """The wildcard patterns of a set, the longest first, an Allow before a Disallow."""

    __slots__ = ("_entries", "_patterns", "_trie", "literals")

    literals: tuple[str, ...]
    """A path in which none of these stands is matched by no pattern here."""

    @classmethod
    def of(cls, wild: dict[str, int]) -> _Wildcards:
        """From patterns in normal form, squeezed, and their entries."""
        self = cls()
        self._trie: WildTrie | None = None
        self._entries = array("Q")
        self._patterns: tuple[str | None, ...] = ()
        if len(wild) > _FLAT_RULES or sum(map(len, wild)) > _FLAT_OCTETS:
            self._trie = WildTrie(wild)
            self.literals = ("",)
            return self
        ranked = sorted(wild, key=wild.__getitem__, reverse=True)
        self.literals = tuple(map(key_piece, ranked))
        self._entries.extend(map(wild.__getitem__, ranked))
        # `/*piece` needs no more than its piece: every path begins with a slash.
        self._patterns = tuple(
            None if pattern == "/*" + literal else pattern
            for pattern, literal in zip(ranked, self.literals, strict=True)
        )
        return self

    def best(self, path: str, floor: int) -> int:
        """The entry of the best match if it beats `floor`, else `floor`."""
        if self._trie:
            return self._trie.best(path, floor)
        for place, literal in enumerate(self.literals):
            if literal in path:
                entry = self._entries[place]
                if entry <= floor:
                    break
                pattern = self._patterns[place]
                if path.find(literal, 1) > 0 if pattern is None else wild_match(pattern, path):
                    return entry
        return floor
