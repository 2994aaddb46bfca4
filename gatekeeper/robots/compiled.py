"""Rules of RFC 9309 compiled for many questions: sorted prefixes, and wildcard patterns by piece.

`SortedRules` separates plain prefixes, exact paths and wildcard patterns; `CompiledRules` answers.
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
"""Code for a path that is denied, but not by a line of the file."""
ROBOTS_FILE = -3
"""Code for the path `/robots.txt`, which may always be fetched (RFC 9309 section 2.2.2, RFC-20; the
drafts of 1996 and 2.0, R96-16 and V2-34)."""
LIKE_AN_ESCAPE = lazy_pattern(r"\*[0-9A-F%]")
"""Matches a piece after a star that may match from within an escape on; `%` may begin the escape of
a hexadecimal digit."""
_BEGINS_IN_ESCAPE = lazy_pattern(r"\*[0-9A-F]")
"""`LIKE_AN_ESCAPE` for values in normal form."""
CHANGED = lazy_pattern("%3A|%2F")
"""Matches what `query_form` replaces: a pattern with a `?` may have two forms."""
_SPECIAL = lazy_pattern("[*?]")
_TWOFOLD = lazy_pattern("[/:]|%3A|%2F")
"""Matches the characters and escapes to which RFC 9309 section 2.2.2 (RFC-25) applies."""


class SortedRules:
    """The rules of a set by shape, each pattern with its *entry*.

    An entry is a single number. From the high bits to the low ones it contains the length in
    octets, whether the rule allows, and its distance from the end of the set. So the greatest entry
    belongs to the longest match; of equally long ones to an Allow (RFC 9309 section 2.2.2, RFC-18);
    and of these to the first in the file.
    """

    def __init__(self, found: list[tuple[str, str]], *, robots_file: bool) -> None:
        """Sort the rules. `found` contains for each rule a non-empty string if it is a Disallow,
        and its value.

        With `robots_file` an entry for `/robots.txt` is added, whose code is ROBOTS_FILE.
        """
        self.count: int = len(found)
        self.shift: int = (len(found) + 2).bit_length()
        """Number of low bits of an entry that contain the rule's position. The next bit is set if
        it allows."""
        # Without a matching rule a path is allowed (RFC 9309 section 2.2.2, RFC-19).
        self.prefixes: dict[str, int] = {"": 1 << self.shift}
        self.exact: dict[str, int] = {}
        """Entries of values that match a single path, because they end with a `$` (RFC 9309 section
        2.2.3, RFC-28)."""
        self.wild: dict[str, int] = {}
        self.escapes: bool = False
        """Whether a pattern contains an escape, so that no path may be compared as received."""
        self.twofold: bool = False
        """Whether a pattern with a `?` has a `:` or `/` that may match within the query of a path
        (RFC 9309 section 2.2.2, RFC-25)."""
        values = [value for _, value in found]
        joined = "\n".join(values)
        self.like_escapes: bool = LIKE_AN_ESCAPE.search(joined) is not None
        """Whether a piece may match from within an escape on; see `rfc_path`."""
        if " " in joined or "\t" in joined:
            joined = "\n".join([value.rstrip(" \t") for value in values])
        if not is_plain(joined.replace("\n", "")):
            joined = rfc_patterns(joined)
        self.escapes = "%" in joined
        if found:
            self._take(found, joined)
        if robots_file:
            # The entry is greater than that of any rule, and its position gives ROBOTS_FILE in
            # `decide`.
            entry = (len(joined) + 1 << 1 | 1) << self.shift | self.count + 2
            self.exact[ROBOTS_TXT] = entry

    def _take(self, found: list[tuple[str, str]], joined: str) -> None:
        """Add rules of any kind. `joined` contains their values in normal form, one per line."""
        prefixes, exact, wild = self.prefixes, self.exact, self.wild
        octet, allow, place = 2 << self.shift, 1 << self.shift, self.count + 1
        queries = "?" in joined
        values = joined.split("\n")
        # Several stars are equivalent to one, but each counts for the length of the rule.
        keys = squeeze(joined).split("\n") if "**" in joined else values
        begins_in_escape = _BEGINS_IN_ESCAPE.search(joined) is not None
        for (dis, _), value, short in zip(found, values, keys, strict=True):
            place -= 1
            if value[:1] != "/" and value[:1] != "*":
                continue  # an empty pattern has no effect (RFC-21), others are invalid (RFC-32)
            forms: tuple[str, ...] = (short,)
            length = len(value)
            if queries and "?" in value and (self.twofold or self._meets_query(value)):
                form = query_form(short)
                length = len(form) if short is value else len(query_form(value))
                if form != short:
                    # A pattern that matches a path as written also matches it in the query form,
                    # unless an octet that changes can be matched by one that does not.
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
                        key = key[:-1]  # noqa: PLW2901 - a final star has no effect
                    into = wild if "*" in key else prefixes
                elif key[-1] == "$":
                    into, key = exact, key[:-1]  # noqa: PLW2901
                if into.get(key, 0) < entry:
                    into[key] = entry

    def _meets_query(self, value: str) -> bool:
        """Return True if the part after the first star or question mark may match within the query
        of a path."""
        found = _SPECIAL.search(value)
        if found is None or _TWOFOLD.search(value, found.start()) is None:
            return False
        self.twofold = True
        return True


class PrefixTable:
    """Prefixes with entries: finds the greatest entry among the prefixes of a path.

    The longest prefix of the path is found by bisection. If the neighbour found shares only a part
    with the path, links lead from each prefix to the longest other prefix with which it begins.
    """

    __slots__ = ("_entries", "_keys", "_links")

    def __init__(self, entries: dict[str, int]) -> None:
        """Build the table. `entries` must contain the empty prefix, with which every path
        begins."""
        keys = sorted(entries)
        best = [entries[""]]
        links = [0]
        above: list[tuple[int, str]] = []
        up, top = 0, ""  # the previous prefix, then its own prefixes, the longest first
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
        """Return the greatest entry of a prefix of the path."""
        keys = self._keys
        place = bisect_right(keys, path) - 1
        while not path.startswith(keys[place]):
            place = self._links[place]
        return self._entries[place]


FLAT_RULES = 512
_FLAT_OCTETS = 16_384
"""Up to these numbers of wildcard patterns and octets the patterns are tried one by one; beyond,
they are looked up by their pieces."""
PAIRS = 1 << 22
"""Maximum product of the octets of a path and of the wildcard patterns for which the patterns are
tried one by one. In the worst case each pair of octets is compared three times, which takes some 2
ms. Beyond that the work is counted, see `patterns`."""


class CompiledRules:
    """Rules prepared for any path: a prefix table, and wildcard patterns.

    Patterns are tried from the longest on, and only if their longest literal piece occurs in the
    path. The first that matches is the best. The cost is at most the product of the octets of path
    and patterns. If that is large, patterns are looked up in two `PatternIndex`es instead and the
    cost of an answer is counted: the answer is exact up to `patterns.MAX_STEPS` steps, and DENIED
    beyond.
    """

    __slots__ = (
        *("_best_wild", "_count", "_exact", "_indexes", "_patterns", "_pieces", "_prefixes"),
        *("_roomy", "_shift", "_strict", "_twofold", "_wild"),
    )

    def __init__(self, found: list[tuple[str, str]], *, robots_file: bool) -> None:
        """Compile the rules. `found` contains for each rule a non-empty string if it is a Disallow,
        and its value.

        With `robots_file` the path `/robots.txt` has a code of its own and is allowed.
        """
        rules = SortedRules(found, robots_file=robots_file)
        wild = rules.wild
        self._count = rules.count
        self._shift = rules.shift
        self._wild = wild
        self._best_wild = max(wild.values(), default=0)
        self._twofold = rules.twofold
        self._strict = rules.escapes or (bool(wild) and rules.like_escapes)
        """Whether a pattern may match within an escape, so that no path is compared as received.
        Otherwise only escapes of plain octets make a difference: no pattern contains any other
        octet, and none begins within an escape."""
        self._patterns: list[str] = []
        """The wildcard patterns that are tried one by one, the best first."""
        self._indexes: tuple[PatternIndex, PatternIndex] | None = None
        octets = sum(map(len, wild))
        self._roomy = PAIRS // max(octets, 1)
        """Maximum number of octets of a path for which patterns are tried one by one."""
        if len(wild) > FLAT_RULES or octets > _FLAT_OCTETS:
            self._indexes = _indexes_of(wild)
            self._roomy = 0
        else:
            self._patterns = sorted(wild, key=wild.__getitem__, reverse=True)
        self._pieces = [*map(key_piece, self._patterns)]
        self._exact = rules.exact
        self._prefixes = PrefixTable(rules.prefixes)

    def decide(self, path: str) -> int:
        """Return the code of the deciding rule, -1, DENIED or ROBOTS_FILE (see `rules`).

        The path begins with `/` and need not be in normal form.
        """
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
        # Positions count down to 1. The entry for no rule has position 0.
        return (self._count - place) * 2 + (entry >> self._shift & 1) if place else -1

    def _whole(self, path: str, entry: int) -> int:
        """Return the entry of a path, given the entry of its prefixes. Raises TooDear."""
        # A rule with a `?` is compared with the path as written, and in the form of RFC 9309
        # section 2.2.2 (RFC-25).
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
        """Implement `_whole` by looking up pieces. `floor` is the greatest entry so far. Raises
        TooDear."""
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
    """Return the indexes of the patterns without a `?` and of those with one."""
    asking = {pattern: entry for pattern, entry in wild.items() if "?" in pattern}
    plain = wild
    if len(asking) == len(wild):
        plain = {}
    elif asking:
        plain = {pattern: entry for pattern, entry in wild.items() if pattern not in asking}
    return PatternIndex(plain), PatternIndex(asking)
