"""Rule sets: the rules that one agent obeys, made ready to be asked, a class a reading.

No rule is an object here. Rules are numbered as they stand in the text, and a set keeps its
patterns and what it needs to choose among them. `decide` gives a *code*: the number of the
deciding rule times two, plus one if it allows; or -1, which allows, where no rule matches.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple, Protocol

from gatekeeper import urls
from gatekeeper.errors import InvalidURL
from gatekeeper.robots import normal
from gatekeeper.robots.lines import RULE, Spans, value_of
from gatekeeper.robots.model import Dialect
from gatekeeper.robots.patterns import key_piece, squeeze, wild_match
from gatekeeper.robots.trie import WildTrie

__all__ = ["ROBOTS_TXT", "LongestMatch", "Numbered", "RuleSet", "rules_in", "split_url"]

ROBOTS_TXT = "/robots.txt"
"""May always be asked for (RFC-20, R96-16, V2-34); `allows` knows, `decide` does not."""

_FLAT_RULES = 512
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


_PLAIN = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~:/@!&'()+,;="
_PECULIAR = re.compile(rf"[^{re.escape(_PLAIN)}]")
"""What a value may hold that is more, or less, than a prefix in its normal form."""
_DOT_SEGMENT = re.compile(r"/\.\.?(?:[/?]|\Z)").search
_NONE: array[int] = array("H")
_HEAD = 2
"""A bit of a link: the key, or one that it begins with, is the head of a wildcard pattern."""
_EAGER_OCTETS = 16_384
"""Text beyond which a set is made ready before its first question."""


def split_url(url: str) -> tuple[str, str]:
    """Origin, if there is one, and path with query. A path alone is read as in a URL."""
    if url[:1] != "/":
        try:
            return urls.split(url)
        except InvalidURL:
            return "", urls.path_of(url)  # the host alone may be what is wrong with it
    if "#" in url or "/." in url or "/%2" in url:
        return "", urls.split("http://localhost" + url)[1]
    return "", url


class _Sorted:
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
        self._text = text
        self._keys: tuple[str, ...] = ()
        self._authority = ""
        self._careful = True
        self._escapes = self._asked = False
        self._literals: tuple[str, ...] = ()
        self._headed: tuple[str, ...] = ()
        self._query: tuple[str, ...] = ()
        self._exact: dict[str, int] | None = None
        if len(spans) > 8 or sum([high - low for low, high in spans]) > _EAGER_OCTETS:
            self._build()

    def _first(self, path: str) -> bool:
        """The verdict, read off the text: of most rules two octets say that they don't match."""
        self._asked = True
        path = normal.rfc_path(path)
        escapes = "%" in path
        query = normal.query_form(path) if escapes else path
        search = _likely(path[1:2])
        best = 1
        for low, high in self.spans:
            for dis, value in search(self._text, low, high):
                if not _PECULIAR.search(value):
                    octets = len(value) if path.startswith(value) else 0
                elif escapes or _last_piece(value) in path:
                    octets = _octets(value, path, query)
                else:
                    continue
                score = octets << 1 if dis else octets << 1 | 1
                if octets and score > best:
                    best = score
        return best & 1 == 1

    def _build(self) -> None:
        found: list[tuple[str, str]] = []
        for low, high in self.spans:
            found += RULE.findall(self._text, low, high)
        joined = "".join([value for _, value in found])
        self._count = len(found)
        self._shift = shift = (len(found) + 1).bit_length()
        octet, allow, place = 2 << shift, 1 << shift, len(found) + 1
        sorted_out = _Sorted(shift, odd=not normal.is_plain(joined.replace("$", "")))
        prefixes = sorted_out.prefixes
        peculiar = _PECULIAR.search if _PECULIAR.search(joined) else None
        for dis, value in found:
            place -= 1
            if peculiar and peculiar(value):
                sorted_out.add(value, not dis, place)
            elif value[:1] == "/":
                entry = len(value) * octet + place
                if not dis:
                    entry += allow
                if prefixes.get(value, 0) < entry:
                    prefixes[value] = entry
        self._escapes, self._twofold = sorted_out.escapes, sorted_out.twofold
        self._exact = sorted_out.exact or None
        self._careful = self._escapes or self._exact is not None
        self._text = ""
        heads = self._sow(sorted_out.wild)
        # Whether a wildcard pattern can turn an Allow (1), a Disallow (2).
        verdicts = {entry >> shift & 1 for entry in sorted_out.wild.values()}
        self._turns = (0 in verdicts) | (1 in verdicts) << 1
        self._link(prefixes, heads, inherit=sorted_out.inherit or bool(heads))

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
        self._keys = tuple(keys)
        self._links = _packed(links)
        self._entries = _packed(entries)

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
            map(_shape, loose + headed + query, self._literals + self._headed + self._query)
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
            if self._asked or self._keys:
                return self.decide(path) & 1 == 1 or path == ROBOTS_TXT
            return self._first(path) or path == ROBOTS_TXT
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

    def _may_be_wild(self, path: str) -> bool:
        """A piece of some wildcard pattern stands in the path."""
        for literal in self._literals:
            if literal in path:
                return True
        return "?" in path and any(literal in path for literal in self._query)

    def _odd(self, path: str) -> bool:
        """Not to be answered in the quick way."""
        if not self._keys or (self._exact and path in self._exact):
            return True
        return self._escapes and ("*" in path or not normal.is_plain(path))

    def _wildly(self, path: str, place: int) -> bool:
        """The verdict where a wildcard pattern may have a say."""
        entry = self._wild(path, path, self._entries[place])
        return entry >> self._shift & 1 == 1 or path == ROBOTS_TXT

    def decide(self, path: str) -> int:
        """The code of the deciding rule, or -1."""
        if not self._keys:
            self._build()
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
                if _matches(self._patterns[index], literal, path):
                    return entry
        return floor

    def matching(self, path: str, rules: list[Numbered]) -> list[tuple[int, int]]:
        """Number and length of every rule that matches, the deciding one first."""
        plain = normal.rfc_path(path)
        query = normal.query_form(plain)
        found = []
        for number, rule in enumerate(rules):
            octets = _octets(rule.value, plain, query)
            if octets:
                found.append((number, octets))
        found.sort(key=lambda each: (-each[1], not rules[each[0]].allow))
        return found


@lru_cache(maxsize=128)
def _likely(second: str) -> Callable[[str, int, int], list[tuple[str, str]]]:
    """Finds the rules that a path with this second octet may match, plain or not."""
    other = _PLAIN.replace(second, "") if second else _PLAIN
    return re.compile(
        rf"^[ \t]*+(?i:(dis)?+allow)[ \t]*+:[ \t]*+"  # the value keeps its case
        rf"(\*[^#\n]*+|/(?:[^{re.escape(other)}#\n][^#\n]*+|(?![^#\n])))",
        re.MULTILINE | re.ASCII,
    ).findall


def _octets(value: str, path: str, query: str) -> int:
    """How long a rule's pattern is if it matches, else 0. `query`: the path by RFC-25."""
    value = value.rstrip(" \t")
    if value[:1] != "/" and value[:1] != "*":
        return 0
    pattern = normal.rfc_pattern(value)
    if "?" in pattern:
        pattern, path = normal.query_form(pattern), query
    return len(pattern) if wild_match(squeeze(pattern), path) else 0


def _last_piece(value: str) -> str:
    """The end of a plain wildcard pattern, which stands in each path that it matches."""
    piece = value[value.rfind("*") + 1 :].rstrip("$ \t")
    return piece if normal.is_plain(piece) else ""


# What is kept of the commonest patterns: every path begins with a slash, so that their
# literal says the rest.
_ANYWHERE, _BEHIND, _LAST = "*", "/*", "/*$"


def _shape(pattern: str, literal: str) -> str:
    for shape in (_ANYWHERE, _BEHIND, _LAST):
        if pattern == shape.replace("*", "*" + literal):
            return shape
    return pattern


def _matches(shape: str, literal: str, path: str) -> bool:
    """Whether the pattern kept as `shape` matches a path in which its literal stands."""
    if shape is _BEHIND:
        return path.find(literal, 1) > 0
    if shape is _LAST:
        return path.endswith(literal, 1)
    return shape is _ANYWHERE or wild_match(shape, path)


def _packed(numbers: list[int]) -> array[int]:
    most = max(numbers)
    return array("H" if most < 1 << 16 else "I" if most < 1 << 32 else "Q", numbers)
