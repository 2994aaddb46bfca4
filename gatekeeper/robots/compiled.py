"""Rules of RFC 9309 prepared for many questions: prefixes to bisect, wildcard patterns by piece.

`SortedRules` parts plain prefixes, exact paths and wildcard patterns; `CompiledRules` answers.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right

from gatekeeper.robots.patterns import (
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
    wild_match,
)
from gatekeeper.speedups import lazy_pattern

DENIED = -2
"""A code: denied, but by no line of the file."""
ROBOTS_FILE = -3
"""A code: the path is `/robots.txt`, which may always be asked for (RFC 9309 section 2.2.2,
RFC-20; the drafts of 1996 and 2.0, R96-16 and V2-34)."""
LIKE_AN_ESCAPE = lazy_pattern(r"\*[0-9A-F%]")
"""A piece behind a star may be found from within an escape on; `%` may stand for a digit."""
_BEGINS_IN_ESCAPE = lazy_pattern(r"\*[0-9A-F]")
"""`LIKE_AN_ESCAPE` for values in their normal form."""
CHANGED = lazy_pattern("%3A|%2F")
"""A pattern with a `?` may have two forms: see `query_form`."""
_SPECIAL = lazy_pattern("[*?]")
_TWOFOLD = lazy_pattern("[/:]|%3A|%2F")
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
        # No rule: allowed (RFC 9309 section 2.2.2, RFC-19).
        self.prefixes: dict[str, int] = {"": 1 << self.shift}
        self.exact: dict[str, int] = {}
        """Of one path each, as where a `$` ends a value (RFC 9309 section 2.2.3, RFC-28)."""
        self.wild: dict[str, int] = {}
        self.escapes: bool = False
        """An escape stands in some pattern: no path may be compared as it comes."""
        self.twofold: bool = False
        """Some pattern with a `?` has a `:` or `/` that may meet the query of a path (RFC 9309
        section 2.2.2, RFC-25)."""
        values = [value for _, value in found]
        joined = "\n".join(values)
        self.like_escapes: bool = LIKE_AN_ESCAPE.search(joined) is not None
        """Some piece may be found from within an escape on: see `rfc_path`."""
        if " " in joined or "\t" in joined:
            joined = "\n".join([value.rstrip(" \t") for value in values])
        if not is_plain(joined.replace("\n", "")):
            joined = rfc_patterns(joined)
        self.escapes = "%" in joined
        if found:
            self._take(found, joined)
        if robots_file:
            # It has more octets than any rule, and is the place from which `decide` counts.
            entry = (len(joined) + 1 << 1 | 1) << self.shift | self.count + 2
            self.exact[ROBOTS_TXT] = entry

    def _take(self, found: list[tuple[str, str]], joined: str) -> None:
        """Take rules of any kind; their values in normal form, one a line."""
        prefixes, exact, wild = self.prefixes, self.exact, self.wild
        octet, allow, place = 2 << self.shift, 1 << self.shift, self.count + 1
        queries = "?" in joined
        values = joined.split("\n")
        # Several stars mean what one means, but each is an octet of the rule's length.
        keys = squeeze(joined).split("\n") if "**" in joined else values
        begins_in_escape = _BEGINS_IN_ESCAPE.search(joined) is not None
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
                    into = wild if "*" in key else prefixes
                elif key[-1] == "$":
                    into, key = exact, key[:-1]  # noqa: PLW2901
                if into.get(key, 0) < entry:
                    into[key] = entry

    def _meets_query(self, value: str) -> bool:
        """The query of a path may meet what stands behind the first star or question mark."""
        found = _SPECIAL.search(value)
        if found is None or _TWOFOLD.search(value, found.start()) is None:
            return False
        self.twofold = True
        return True


class PrefixTable:
    """Prefixes, each with an entry: finds the greatest one of those that a path begins with.

    The longest prefix that a path begins with is found by bisection, and from a neighbour that
    shares only a part, up the links: each is the place of the longest one that a prefix begins
    with.
    """

    __slots__ = ("_entries", "_keys", "_links")

    def __init__(self, entries: dict[str, int]) -> None:
        """One of them is of the empty prefix, which begins every path."""
        keys = sorted(entries)
        best = [entries[""]]
        links = [0]
        above: list[tuple[int, str]] = []
        up, top = 0, ""  # the last prefix, then those that it begins with, the longest first
        for place, key in enumerate(keys[1:], 1):
            while not key.startswith(top):
                up, top = above.pop()
            best.append(max(entries[key], best[up]))
            links.append(up)
            above.append((up, top))
            up, top = place, key
        self._keys = tuple(keys)
        self._links = array("I", links)
        self._entries = array("q", best)

    def best(self, path: str) -> int:
        """The greatest entry of a prefix of the path."""
        keys = self._keys
        place = bisect_right(keys, path) - 1
        while not path.startswith(keys[place]):
            place = self._links[place]
        return self._entries[place]


FLAT_RULES = 512
_FLAT_OCTETS = 16_384
"""Up to here wildcard patterns are tried one by one, beyond they are found by their pieces."""
PAIRS = 1 << 22
"""Octets of a path times those of the wildcard patterns up to which they are tried one by one:
in the worst case each octet of the one is compared with each of the other three times, which
takes some 2 ms. Beyond, the work is counted: see `patterns`."""


class CompiledRules:
    """Rules made ready for any path: prefixes to bisect, and wildcard patterns.

    The longest pattern is tried first, and only if its longest literal piece stands in the path:
    the first that matches is the best. Trying patterns takes at most the product of path and
    patterns, in octets. Where that is large they are looked up in two `PatternIndex`es instead,
    and what one answer may cost is counted: the answer is exact up to `patterns.MAX_STEPS`, and
    no beyond, which is DENIED.
    """

    __slots__ = (
        *("_best_wild", "_count", "_exact", "_indexes", "_patterns", "_pieces", "_prefixes"),
        *("_roomy", "_shift", "_strict", "_twofold", "_wild"),
    )

    def __init__(self, found: list[tuple[str, str]], *, robots_file: bool) -> None:
        """`found`: of each rule whether it is a `dis`allow, and its value. With `robots_file` the
        path `/robots.txt` has a code of its own, and is allowed."""
        rules = SortedRules(found, robots_file=robots_file)
        wild = rules.wild
        self._count = rules.count
        self._shift = rules.shift
        self._wild = wild
        self._best_wild = max(wild.values(), default=0)
        self._twofold = rules.twofold
        self._strict = rules.escapes or (bool(wild) and rules.like_escapes)
        """Some pattern may be found in what is escaped: none is compared with a path as it
        comes. Elsewhere what a path holds beside plain octets can make no difference, for no
        pattern holds it and none begins within an escape, but for escapes of plain octets."""
        self._patterns: list[str] = []
        """The wildcard patterns that are tried one by one, the best one first."""
        self._indexes: tuple[PatternIndex, PatternIndex] | None = None
        octets = sum(map(len, wild))
        self._roomy = PAIRS // max(octets, 1)
        """Octets of a path up to which they are."""
        if len(wild) > FLAT_RULES or octets > _FLAT_OCTETS:
            self._indexes = _indexes_of(wild)
            self._roomy = 0
        else:
            self._patterns = sorted(wild, key=wild.__getitem__, reverse=True)
        self._pieces = [*map(key_piece, self._patterns)]
        self._exact = rules.exact
        self._prefixes = PrefixTable(rules.prefixes)

    def decide(self, path: str) -> int:
        """The code of the deciding rule, -1, DENIED or ROBOTS_FILE (see `rules`), about a path that
        begins with `/`, in whatever form it comes."""
        if "%" in path or (self._strict and ("*" in path or not is_plain(path))):
            path = rfc_path(path)
        entry = self._prefixes.best(path)
        if path in self._exact:
            entry = max(entry, self._exact[path])
        if self._wild or self._twofold:
            try:
                entry = self._whole(path, entry)
            except TooDear:
                return DENIED
        place = entry & (1 << self._shift) - 1
        # The place counts down to 1; the entry of no rule has none.
        return (self._count - place) * 2 + (entry >> self._shift & 1) if place else -1

    def _whole(self, path: str, entry: int) -> int:
        """The entry of a path, of which `entry` is that of its prefixes. Raises TooDear."""
        # A rule with a `?` is compared with the path as it stands, and as RFC 9309 section 2.2.2
        # (RFC-25) reads it.
        query = query_form(path) if self._twofold and "%" in path else path
        if query != path:
            entry = max(entry, self._prefixes.best(query), self._exact.get(query, 0))
        if len(path) > self._roomy:
            return self._counted(path, query, entry)
        for place, piece in enumerate(self._pieces):
            if piece in path and wild_match(self._patterns[place], path):
                entry = max(entry, self._wild[self._patterns[place]])
                break
        if query != path:
            for pattern in self._patterns:
                if "?" in pattern and wild_match(pattern, query):
                    return max(entry, self._wild[pattern])
        return entry

    def _counted(self, path: str, query: str, floor: int) -> int:
        """`_whole` by looking pieces up, where `floor` is the entry so far. Raises TooDear."""
        if floor > self._best_wild:
            return floor
        indexes = self._indexes
        if indexes is None:
            indexes = self._indexes = _indexes_of(self._wild)
        meter = Meter()
        text = CountedText(path, meter)
        floor = indexes[0].best(text, floor)
        if "?" in path:
            floor = indexes[1].best(text, floor)
            if query != path:
                floor = indexes[1].best(CountedText(query, meter), floor)
        return floor


def _indexes_of(wild: dict[str, int]) -> tuple[PatternIndex, PatternIndex]:
    """Of the patterns without a `?`, and of those with one."""
    asking = {pattern: entry for pattern, entry in wild.items() if "?" in pattern}
    plain = wild
    if len(asking) == len(wild):
        plain = {}
    elif asking:
        plain = {pattern: entry for pattern, entry in wild.items() if pattern not in asking}
    return PatternIndex(plain), PatternIndex(asking)
