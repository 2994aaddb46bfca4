"""Rules of RFC 9309 prepared for many questions: prefixes to bisect, wildcard patterns by piece.

`SortedRules` parts plain prefixes, exact paths and wildcard patterns. A set of prefixes alone is
found by bisection, any other one becomes `WildRules`.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from collections.abc import Collection, Sequence
from itertools import repeat
from sys import intern
from typing import NamedTuple, Protocol

from gatekeeper.robots.patterns import (
    PLAIN,
    ROBOTS_TXT,
    CountedText,
    Meter,
    PatternIndex,
    TooDear,
    is_plain,
    key_piece,
    query_form,
    rfc_path,
    rfc_patterns,
    squeeze,
    unescaped,
    wild_match,
)

__all__ = [
    "CHANGED",
    "DENIED",
    "FLAT_RULES",
    "LIKE_AN_ESCAPE",
    "PAIRS",
    "ROBOTS_FILE",
    "Compiled",
    "SortedRules",
    "WildRules",
    "ready_rules",
]

DENIED = -2
"""A code: denied, but by no line of the file."""
ROBOTS_FILE = -3
"""A code: the path is `/robots.txt`, which may always be asked for (RFC 9309 section 2.2.2,
RFC-20; the drafts of 1996 and 2.0, R96-16 and V2-34)."""
_PECULIAR = re.compile(rf"[^{re.escape(PLAIN)}\n]").search
"""What a value may hold that is more, or less, than a prefix in its normal form."""
LIKE_AN_ESCAPE = re.compile(r"\*[0-9A-F%]").search
"""A piece behind a star may be found from within an escape on; `%` may stand for a digit."""
_BEGINS_IN_ESCAPE = re.compile(r"\*[0-9A-F]").search
"""`LIKE_AN_ESCAPE` for values in their normal form."""
CHANGED = re.compile("%3A|%2F").search
"""A pattern with a `?` may have two forms: see `query_form`."""
_SPECIAL = re.compile("[*?]").search
_TWOFOLD = re.compile("[/:]|%3A|%2F").search
"""What RFC 9309 section 2.2.2 (RFC-25) speaks of."""


class SortedRules:
    """The rules of a set by shape, each pattern with its *entry*.

    An entry is one number: octets, whether the rule allows, and how far from the end of the
    set it stands, from the high bits to the low ones. So the greatest entry is the longest
    match, of equal ones an Allow (RFC 9309 section 2.2.2, RFC-18), of these the first in the file.
    """

    def __init__(self, found: list[tuple[str, str]], *, robots_file: bool) -> None:
        """`found`: of each rule whether it is a `dis`allow, and its value. With `robots_file`
        there is one more entry, for `/robots.txt` alone: its code is ROBOTS_FILE."""
        self.count: int = len(found)
        self.shift: int = (len(found) + 2).bit_length()
        """Bits of an entry that say where the rule stands; the next one up: it allows."""
        self.prefixes: dict[str, int] = {
            "": 1 << self.shift
        }  # no rule: allowed (RFC 9309 section 2.2.2, RFC-19)
        self.exact: dict[str, int] = {}
        """Of one path each, as where a `$` ends a value (RFC 9309 section 2.2.3, RFC-28)."""
        self.wild: dict[str, int] = {}
        self.escapes: bool = False
        """An escape stands in some pattern: no path may be compared as it comes."""
        self.twofold: bool = False
        """Some pattern with a `?` has a `:` or `/` that may meet the query of a path (RFC 9309
        section 2.2.2, RFC-25)."""
        self.inherit: bool = False
        """A prefix is longer than it looks: its stars at the end count (RFC 9309 section 2.2.2,
        RFC-17)."""
        values = [value for _, value in found]
        joined = "\n".join(values)
        self.like_escapes: bool = LIKE_AN_ESCAPE(joined) is not None
        """Some piece may be found from within an escape on: see `rfc_path`."""
        if _PECULIAR(joined) is None:
            self._take_prefixes(found)
        else:
            if " " in joined or "\t" in joined:
                joined = "\n".join([value.rstrip(" \t") for value in values])
            if not is_plain(joined.replace("\n", "")):
                joined = rfc_patterns(joined)
            self.escapes = "%" in joined
            self._take(found, joined)
        if robots_file:
            # It has more octets than any rule, and is the place from which `decide` counts.
            entry = (len(joined) + 1 << 1 | 1) << self.shift | self.count + 2
            self.exact[ROBOTS_TXT] = entry

    def _take_prefixes(self, found: list[tuple[str, str]]) -> None:
        """Take rules that are plain prefixes, all of them."""
        prefixes = self.prefixes
        octet, allow, place = 2 << self.shift, 1 << self.shift, self.count + 1
        for dis, value in found:
            place -= 1
            if value[:1] == "/":
                entry = len(value) * octet + place
                if not dis:
                    entry += allow
                if prefixes.get(value, 0) < entry:
                    prefixes[value] = entry

    def _take(self, found: list[tuple[str, str]], joined: str) -> None:
        """Take rules of any kind; their values in normal form, one a line."""
        prefixes, exact, wild = self.prefixes, self.exact, self.wild
        octet, allow, place = 2 << self.shift, 1 << self.shift, self.count + 1
        queries = "?" in joined
        values = joined.split("\n")
        # Several stars mean what one means, but each is an octet of the rule's length.
        keys = squeeze(joined).split("\n") if "**" in joined else values
        begins_in_escape = _BEGINS_IN_ESCAPE(joined) is not None
        for (dis, _), value, short in zip(found, values, keys, strict=True):
            place -= 1
            if value[:1] != "/" and value[:1] != "*":
                continue  # an empty pattern has no effect (RFC-21), any other is none (RFC-32)
            forms: tuple[str, ...] = (short,)
            length = len(value)
            if queries and "?" in value and (self.twofold or self._meets_query(value)):
                form = query_form(short)
                length = len(form) if short is value else len(query_form(value))
                if form != short:
                    # Whatever matches a path as it stands matches it in this form, too, unless
                    # what changes may be met by something that does not change.
                    head = short[: short.index("?")]
                    unsure = begins_in_escape or "%3A" in head or "%2F" in head
                    forms = (short, form) if unsure else (form,)
            entry = length * octet + place
            if not dis:
                entry += allow
            for key in forms:
                into = prefixes
                if "*" in key:
                    if key[-1] == "*":
                        key = key[:-1]  # noqa: PLW2901 - it says what every end says
                    if "*" in key:
                        into = wild
                    else:
                        self.inherit = True
                elif key[-1] == "$":
                    into, key = exact, key[:-1]  # noqa: PLW2901
                if into.get(key, 0) < entry:
                    into[key] = entry

    def _meets_query(self, value: str) -> bool:
        """The query of a path may meet what stands behind the first star or question mark."""
        found = _SPECIAL(value)
        if found is None or _TWOFOLD(value, found.start()) is None:
            return False
        self.twofold = True
        return True


class Compiled(Protocol):
    """Rules made ready. Takes any path that begins with `/`, in whatever form it comes."""

    def decide(self, path: str) -> int:
        """The code of the deciding rule, -1, DENIED or ROBOTS_FILE (see `rules`)."""


class _PrefixRules:
    """Any number of prefixes, and single paths: see `linked`."""

    __slots__ = ("_codes", "_keys", "_links")

    def __init__(self, keys: tuple[str, ...], links: Sequence[int], codes: Sequence[int]) -> None:
        """`codes` has the code of each key's rule less `ROBOTS_FILE`, so that none is negative."""
        self._keys = keys
        self._links = links
        self._codes = codes

    def decide(self, path: str) -> int:
        if "%" in path:
            path = _plainer(path)
        keys = self._keys
        place = bisect_right(keys, path) - 1
        while not path.startswith(keys[place]):
            place = self._links[place]
        return self._codes[place] + ROBOTS_FILE


def prefixes_only(rules: SortedRules) -> Compiled | None:
    """The set made ready, if it has no wildcard patterns and no escapes in its rules."""
    if rules.wild or rules.escapes or rules.twofold:
        return None
    keys, links, entries = linked(rules, ())
    count, shift = rules.count, rules.shift
    place = (1 << shift) - 1
    none = -1 - ROBOTS_FILE
    codes = packed(
        [
            (count - (entry & place)) * 2 + (entry >> shift & 1) - ROBOTS_FILE
            if entry & place
            else none
            for entry in entries
        ]
    )
    return _PrefixRules(keys, packed(links), codes)


def ready_rules(found: list[tuple[str, str]], *, robots_file: bool) -> Compiled:
    """Rules made ready: of each whether it forbids, and its value. With `robots_file` the path
    `/robots.txt` has a code of its own, and is allowed."""
    rules = SortedRules(found, robots_file=robots_file)
    return prefixes_only(rules) or WildRules(rules)


_END = "\0"
"""Behind a single path: sorts before every longer one, and stands in no pattern's normal form."""


class Linked(NamedTuple):
    """Prefixes and single paths in order, each with a link and its entry.

    The longest key that a path begins with is found by bisection, and from a neighbour that
    shares only a part, up the links to the keys that it begins with. The first key is empty,
    begins every path and allows (RFC 9309 section 2.2.2, RFC-19). A link is the place of the
    longest key that the key begins with.

    A single path has a key that no link leads to, so that only bisection finds it; the key that
    follows, with `_END`, is where all longer paths come out, and leads past it.
    """

    keys: tuple[str, ...]
    links: list[int]
    entries: list[int]


def linked(rules: SortedRules, heads: Collection[str]) -> Linked:
    """The keys of the rules; `heads` are keys too, though no rule need stand there."""
    prefixes, exact = rules.prefixes, rules.exact
    for head in heads:
        prefixes.setdefault(head, 0)
    inherit = rules.inherit or bool(heads)
    keys = sorted([*prefixes, *exact, *[intern(path + _END) for path in exact]])
    entries: list[int] = list(map(prefixes.get, keys, repeat(-1)))
    for path in exact:
        entries[bisect_right(keys, path) - 1] = -1  # behind a prefix that is the same
    links = [0]
    above: list[tuple[int, str]] = []
    up, top = 0, ""  # the last prefix, then those that it begins with, the longest first
    for place, key in enumerate(keys[1:], 1):
        while not key.startswith(top):
            up, top = above.pop()
        entry = entries[place]
        if entry < 0:  # a single path, or its end
            entry = entries[place] = max(exact.get(key, 0), entries[up])
            links.append(up)
            continue
        # `/a*` is longer than its key, and the head of a pattern is no rule at all.
        if inherit and entries[up] > entry:
            entry = entries[place] = entries[up]
        links.append(up)
        above.append((up, top))
        up, top = place, key
    return Linked(tuple(keys), links, entries)


def packed(numbers: Sequence[int]) -> Sequence[int]:
    """The numbers in as few bytes as hold them."""
    most = max(numbers, default=0)
    if most < 1 << 8:
        return bytes(numbers)
    return array("H" if most < 1 << 16 else "I" if most < 1 << 32 else "Q", numbers)


def _plainer(path: str) -> str:
    """The path in the only respect that matters to a set without escapes: `%61` is an `a`."""
    return path if unescaped(path) else rfc_path(path)


FLAT_RULES = 512
_FLAT_OCTETS = 16_384
"""Up to here wildcard patterns are tried one by one, beyond they are found by their pieces."""
PAIRS = 1 << 22
"""Octets of a path times those of the wildcard patterns up to which they are tried one by one:
in the worst case each octet of the one is compared with each of the other three times, which
takes some 2 ms. Beyond, the work is counted: see `patterns`."""


class WildRules:
    """Prefixes as in `prefixes`, and beside them patterns that cost more to try.

    A wildcard pattern is tried only if its longest literal piece stands in the path, and if
    it can turn the verdict of the longest prefix. The *headed* ones have a literal up to
    their first star, which is a key among the prefixes. The *loose* ones may match anywhere, those
    with a `?` only a path with a query.

    Trying patterns takes at most the product of path and patterns, in octets. Where that is
    large they are looked up in two `PatternIndex`es instead, and what one answer may cost is
    counted: the answer is exact up to `patterns.MAX_STEPS`, and no beyond, which is DENIED.
    """

    __slots__ = (
        "_best_wild",
        "_count",
        "_entries",
        "_headed",
        "_indexes",
        "_keys",
        "_links",
        "_loose",
        "_patterns",
        "_query",
        "_ranks",
        "_roomy",
        "_shift",
        "_strict",
        "_twofold",
    )

    def __init__(self, rules: SortedRules) -> None:
        self._count = rules.count
        self._shift = rules.shift
        self._best_wild = max(rules.wild.values(), default=0)
        self._twofold = rules.twofold
        self._strict = rules.escapes or (bool(rules.wild) and rules.like_escapes)
        """Some pattern may be found in what is escaped: none is compared with a path as it
        comes. Elsewhere what a path holds beside plain octets can make no difference, for no
        pattern holds it and none begins within an escape, but for escapes of plain octets."""
        self._roomy = PAIRS
        """Octets of a path up to which the patterns are tried one by one."""
        heads = self._take_wild(rules.wild)
        self._keys, links, entries = linked(rules, heads)
        self._links = packed(links)
        self._entries = packed(entries)

    def _take_wild(self, wild: dict[str, int]) -> dict[str, str]:
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
        if len(wild) > FLAT_RULES or octets > _FLAT_OCTETS:
            self._indexes = _indexes_of(wild)
            self._roomy = 0
            return {}
        self._roomy = PAIRS // octets
        ranked = sorted(wild, key=wild.__getitem__, reverse=True)
        query = [pattern for pattern in ranked if "?" in pattern]
        plain = [pattern for pattern in ranked if "?" not in pattern]
        loose = [pattern for pattern in plain if pattern.startswith(("*", "/*"))]
        headed = [pattern for pattern in plain if not pattern.startswith(("*", "/*"))]
        heads = {head: head for head in (pattern[: pattern.index("*")] for pattern in headed)}
        self._loose = tuple(map(key_piece, loose))
        # The head is a key by now: a piece behind the star tells more.
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

    def decide(self, path: str) -> int:
        """The code of the deciding rule, -1, DENIED or ROBOTS_FILE."""
        if "%" in path or (self._strict and ("*" in path or not is_plain(path))):
            path = rfc_path(path)
        # As `_prefix`, and the first look of `_best`: most paths need no call of either.
        keys = self._keys
        place = bisect_right(keys, path) - 1
        while not path.startswith(keys[place]):
            place = self._links[place]
        entry = self._entries[place]
        if "?" in path or "%" in path or len(path) > self._roomy:
            try:
                entry = self._whole(path, entry)
            except TooDear:
                return DENIED
        else:
            loose, headed = self._loose, self._headed
            for literal in loose:
                if literal in path:
                    entry = self._best(loose, 0, path, entry)
                    break
            for literal in headed:
                if literal in path:
                    entry = self._best(headed, len(loose), path, entry)
                    break
        place = entry & (1 << self._shift) - 1
        # The place counts down to 1; the entry of no rule has none.
        return (self._count - place) * 2 + (entry >> self._shift & 1) if place else -1

    def _whole(self, path: str, entry: int) -> int:
        """The entry of a path, of which `entry` is that of its prefixes. Raises TooDear."""
        # A rule with a `?` is compared with the path as it stands, and as RFC 9309 section 2.2.2
        # (RFC-25) reads it.
        query = query_form(path) if self._twofold and "%" in path else path
        if query != path:
            entry = max(entry, self._prefix(query))
        return self._wild(path, query, entry)

    def _prefix(self, path: str) -> int:
        keys = self._keys
        place = bisect_right(keys, path) - 1
        while not path.startswith(keys[place]):
            place = self._links[place]
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
        """`_wild` by looking pieces up. Raises TooDear."""
        if floor > self._best_wild:
            return floor
        indexes = self._indexes
        if indexes is None:
            indexes = self._indexes = _indexes_of(self._all())
        meter = Meter()
        text = CountedText(path, meter)
        floor = indexes[0].best(text, floor)
        if "?" in path:
            floor = indexes[1].best(text, floor)
            if query != path:
                floor = indexes[1].best(CountedText(query, meter), floor)
        return floor

    def _all(self) -> dict[str, int]:
        """The patterns again, with their entries."""
        literals = self._loose + self._headed + self._query
        kept = zip(self._patterns, literals, self._ranks, strict=True)
        return {_pattern_of(shape, literal): entry for shape, literal, entry in kept}

    def _best(self, literals: tuple[str, ...], start: int, path: str, floor: int) -> int:
        """The entry of the best pattern from `start` on, which have these literals, or `floor`."""
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
    asking = {pattern: entry for pattern, entry in wild.items() if "?" in pattern}
    plain = wild
    if len(asking) == len(wild):
        plain = {}
    elif asking:
        plain = {pattern: entry for pattern, entry in wild.items() if pattern not in asking}
    return PatternIndex(plain), PatternIndex(asking)


def _shape_matches(shape: str, literal: str, path: str) -> bool:
    """Whether the pattern kept as `shape` matches a path in which its literal stands."""
    if shape is _BEHIND:
        return path.find(literal, 1) > 0
    if shape is _LAST:
        return path.endswith(literal, 1)
    if "*" not in shape:
        return path.startswith(shape) and path.find(literal, len(shape)) >= 0
    return shape is _ANYWHERE or wild_match(shape, path)
