"""RFC 9309's own reading of a rule set: the longest match wins."""

from __future__ import annotations

import re
import threading
from array import array
from bisect import bisect_right

from gatekeeper.robots import normal
from gatekeeper.robots.lines import RULE, Spans
from gatekeeper.robots.model import Dialect
from gatekeeper.robots.patterns import key_piece
from gatekeeper.robots.rulesets import ROBOTS_TXT, Numbered, split_url
from gatekeeper.robots.shapes import (
    PECULIAR,
    SortedRules,
    last_piece,
    likely,
    octets_of,
    shape_matches,
    shape_of,
)
from gatekeeper.robots.trie import WildTrie

__all__ = ["LongestMatch"]

_FLAT_RULES = 512
_FLAT_OCTETS = 16_384
"""Up to here wildcard patterns are tried one by one, beyond they are put in a trie."""
_DOT_SEGMENT = re.compile(r"/\.\.?(?:[/?]|\Z)").search
_NONE: array[int] = array("H")
_MAKING_READY = threading.Lock()
"""One for all sets: it is held for microseconds, and once for each."""
_HEAD = 2
"""A bit of a link: the key, or one that it begins with, is the head of a wildcard pattern."""
_EAGER_OCTETS = 16_384
"""Text beyond which a set is made ready before its first question."""


class LongestMatch:
    """RFC 9309: the longest match wins whatever the order, a tie allows (RFC-16 to RFC-19).

    A rule is one number, its *entry*: octets, whether it allows, and how far from the end of
    the set it stands, from the high bits to the low ones. So the greatest entry is the longest
    match, of equal ones an Allow (RFC-18), of these the first in the file.

    Plain prefixes lie sorted; the longest one that a path begins with is found by bisection,
    and from a neighbour that shares only a part, up the links to the keys that it begins with.
    The first key is empty, begins every path and allows (RFC-19). Wildcard patterns are tried
    only if their longest literal piece stands in the path, or, where they are many, in a trie.

    A small set waits with all that for its second question: many a host is asked about one
    page only, and one answer can be read off the text.
    """

    __slots__ = (
        "_asked",
        "_authority",
        "_careful",
        "_count",
        "_entries",
        "_escapes",
        "_exact",
        "_headed",
        "_keys",
        "_links",
        "_literals",
        "_patterns",
        "_query",
        "_shift",
        "_text",
        "_tries",
        "_turns",
        "_twofold",
        "_wilds",
        "spans",
    )

    dialect = Dialect.RFC9309
    spans: Spans

    def __init__(self, text: str, spans: Spans) -> None:
        self.spans = spans
        self._text: str | None = text
        self._keys: tuple[str, ...] = ()
        self._authority = ""
        self._careful = True
        self._escapes = self._asked = False
        self._literals: tuple[str, ...] = ()
        self._headed: tuple[str, ...] = ()
        self._query: tuple[str, ...] = ()
        self._exact: dict[str, int] | None = None
        if len(text) > _EAGER_OCTETS and sum([hi - lo + 64 for lo, hi in spans]) > _EAGER_OCTETS:
            self._build(text)

    def _first(self, text: str, path: str) -> bool:
        """The verdict, read off the text: of most rules two octets say that they don't match."""
        self._asked = True
        path = normal.rfc_path(path)
        escapes = "%" in path
        query = normal.query_form(path) if escapes else path
        search = likely(path[1:2])
        best = 1
        for low, high in self.spans:
            for dis, value in search(text, low, high):
                if not PECULIAR.search(value):
                    octets = len(value) if path.startswith(value) else 0
                elif escapes or last_piece(value) in path:
                    octets = octets_of(value, path, query)
                else:
                    continue
                score = octets << 1 if dis else octets << 1 | 1
                if octets and score > best:
                    best = score
        return best & 1 == 1

    def _ready(self) -> None:
        """Make the set ready, once, whoever else is asking."""
        with _MAKING_READY:
            if self._text is not None:
                self._build(self._text)

    def _build(self, text: str) -> None:
        found: list[tuple[str, str]] = []
        for low, high in self.spans:
            found += RULE.findall(text, low, high)
        joined = "".join([value for _, value in found])
        self._count = len(found)
        self._shift = shift = (len(found) + 1).bit_length()
        octet, allow, place = 2 << shift, 1 << shift, len(found) + 1
        rules = SortedRules(shift, odd=not normal.is_plain(joined.replace("$", "")))
        prefixes = rules.prefixes
        peculiar = PECULIAR.search if PECULIAR.search(joined) else None
        for dis, value in found:
            place -= 1
            if peculiar and peculiar(value):
                rules.add(value, not dis, place)
            elif value[:1] == "/":
                entry = len(value) * octet + place
                if not dis:
                    entry += allow
                if prefixes.get(value, 0) < entry:
                    prefixes[value] = entry
        self._escapes, self._twofold = rules.escapes, rules.twofold
        self._exact = rules.exact or None
        # Whether a wildcard pattern can turn an Allow (1), a Disallow (2).
        verdicts = {entry >> shift & 1 for entry in rules.wild.values()}
        self._turns = (0 in verdicts) | (1 in verdicts) << 1
        heads = self._sow(rules.wild)
        self._link(prefixes, heads, inherit=rules.inherit or bool(heads))
        # Last of all what tells other threads that the rest may be used.
        self._careful = self._escapes or self._exact is not None
        self._text = None

    def _link(self, prefixes: dict[str, int], heads: set[str], *, inherit: bool) -> None:
        for head in heads:
            prefixes.setdefault(head, 0)
        keys = sorted(prefixes)
        entries = [prefixes[key] for key in keys]
        shift = self._shift
        links = [entries[0] >> shift & 1]
        above: list[tuple[int, str]] = []
        up, top = 0, ""  # the last key, then the keys that it begins with, the longest first
        for place, key in enumerate(keys):
            if not place:
                continue
            while not key.startswith(top):
                up, top = above.pop()
            # `/a*` is longer than its key, and the head of a pattern is no rule at all.
            if inherit and entries[up] > entries[place]:
                entries[place] = entries[up]
            links.append(up << 2 | links[up] & _HEAD | entries[place] >> shift & 1)
            if heads and key in heads:
                links[place] |= _HEAD
            above.append((up, top))
            up, top = place, key
        self._links = _packed(links)
        self._entries = _packed(entries)
        self._keys = tuple(keys)  # behind all that goes with them: another thread may be reading

    def _sow(self, wild: dict[str, int]) -> set[str]:
        """Takes the wildcard patterns in; gives the heads of those that begin with one."""
        self._tries: tuple[WildTrie, WildTrie] | None = None
        self._patterns: tuple[str, ...] = ()
        self._wilds: array[int] = _NONE
        if not wild:
            return set()
        ranked = sorted(wild, key=wild.__getitem__, reverse=True)
        query = [pattern for pattern in ranked if "?" in pattern]
        if len(wild) > _FLAT_RULES or sum(map(len, wild)) > _FLAT_OCTETS:
            self._tries = (
                WildTrie({pattern: wild[pattern] for pattern in ranked if "?" not in pattern}),
                WildTrie({pattern: wild[pattern] for pattern in query}),
            )
            self._literals = ("",)
            return set()
        plain = [pattern for pattern in ranked if "?" not in pattern]
        loose = [pattern for pattern in plain if pattern.startswith(("*", "/*"))]
        headed = [pattern for pattern in plain if not pattern.startswith(("*", "/*"))]
        self._literals = tuple(map(key_piece, loose))
        # The head says nothing where it stands already.
        self._headed = tuple(key_piece(pattern[pattern.index("*") :]) for pattern in headed)
        self._query = tuple(map(key_piece, query))
        self._wilds = _packed([wild[pattern] for pattern in loose + headed + query])
        self._patterns = tuple(
            map(shape_of, loose + headed + query, self._literals + self._headed + self._query)
        )
        return {pattern[: pattern.index("*")] for pattern in headed}

    def allows_url(self, url: str) -> bool:
        """The verdict for a URL, or a path. Raises InvalidURL for text that is neither.

        Written out like `allows`, for a call costs as much as half the answer.
        """
        # The authority of the question before was read already: what is left is the path.
        path = url.removeprefix(self._authority)
        if (
            path[:1] != "/"
            or "%" in path
            or "#" in path
            or " " in path
            or ("." in path and "/." in path and _DOT_SEGMENT(path))
            or not path.isprintable()
        ):
            origin, path = split_url(url)
            if origin and url.startswith(origin + "/"):
                self._authority = origin
            return self.allows(path)
        if self._careful:
            return self.allows(path)
        keys = self._keys
        place = bisect_right(keys, path) - 1
        while not path.startswith(keys[place]):
            place = self._links[place] >> 2
        link = self._links[place]
        if (
            self._turns
            and self._turns & (2 - (link & 1))
            and (link & _HEAD or self._may_be_wild(path))
        ):
            return self._wildly(path, place)
        return link & 1 == 1 or path == ROBOTS_TXT

    def allows(self, path: str) -> bool:
        """The verdict alone."""
        if "%" in path or (self._careful and self._odd(path)):
            text = self._text
            if text is None or self._asked:
                return self.decide(path) & 1 == 1 or path == ROBOTS_TXT
            return self._first(text, path) or path == ROBOTS_TXT
        keys = self._keys
        place = bisect_right(keys, path) - 1
        while not path.startswith(keys[place]):
            place = self._links[place] >> 2
        link = self._links[place]
        if (
            self._turns
            and self._turns & (2 - (link & 1))
            and (link & _HEAD or self._may_be_wild(path))
        ):
            return self._wildly(path, place)
        return link & 1 == 1 or path == ROBOTS_TXT

    def suspects(self) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
        """Prefixes and pieces: a path that begins with none of the former and holds none of
        the latter is allowed. Its octets have to be in their normal form. None: no telling.
        """
        if self._text is not None:
            self._ready()
        if self._escapes or self._tries:
            return None
        # Not those that allow, unless a wildcard pattern begins with them.
        prefixes = [key for key, link in zip(self._keys, self._links, strict=True) if link & 3 != 1]
        return (*prefixes, *(self._exact or ())), self._literals + self._query

    def _may_be_wild(self, path: str) -> bool:
        """A piece of some wildcard pattern stands in the path."""
        for literal in self._literals:
            if literal in path:
                return True
        return "?" in path and any(literal in path for literal in self._query)

    def _odd(self, path: str) -> bool:
        """Not to be answered in the quick way."""
        if self._text is not None or (self._exact and path in self._exact):
            return True
        return self._escapes and ("*" in path or not normal.is_plain(path))

    def _wildly(self, path: str, place: int) -> bool:
        """The verdict where a wildcard pattern may have a say."""
        entry = self._wild(path, path, self._entries[place])
        return entry >> self._shift & 1 == 1 or path == ROBOTS_TXT

    def decide(self, path: str) -> int:
        """The code of the deciding rule, or -1."""
        if self._text is not None:
            self._ready()
        entry = self._entry(path)
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
        loose, headed = self._literals, self._headed
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
                entry = self._wilds[index]
                if entry <= floor:
                    break
                if shape_matches(self._patterns[index], literal, path):
                    return entry
        return floor

    def matching(self, path: str, rules: list[Numbered]) -> list[tuple[int, int]]:
        """Number and length of every rule that matches, the deciding one first."""
        plain = normal.rfc_path(path)
        query = normal.query_form(plain)
        found = []
        for number, rule in enumerate(rules):
            octets = octets_of(rule.value, plain, query)
            if octets:
                found.append((number, octets))
        found.sort(key=lambda each: (-each[1], not rules[each[0]].allow))
        return found


def _packed(numbers: list[int]) -> array[int]:
    most = max(numbers)
    return array("H" if most < 1 << 16 else "I" if most < 1 << 32 else "Q", numbers)
