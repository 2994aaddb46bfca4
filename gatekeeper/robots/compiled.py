"""Rules of RFC 9309 compiled for many questions: sorted prefixes, and wildcard patterns by piece.

`SortedRules` separates plain prefixes, exact paths and wildcard patterns; `CompiledRules` answers.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right

from gatekeeper.robots.patterns import (
    ROBOTS_TXT,
    CountedText,
    PatternIndex,
    StepBudget,
    StepBudgetExceeded,
    are_normal,
    is_normal_path,
    longest_piece,
    query_form,
    rfc_path,
    rfc_patterns,
    squeeze,
    wild_match,
)

DENIED = -2
"""Code for a path that is denied, but not by a line of the file."""
ROBOTS_FILE = -3
"""Code for the path `/robots.txt`, which may always be fetched (RFC 9309 section 2.2.2, RFC-20; the
drafts of 1996 and 2.0, R96-16 and V2-34)."""
LIKE_AN_ESCAPE = re.compile(r"\*[0-9A-F%]")
"""Matches a piece after a star that may match from within an escape on; `%` may begin the escape of
a hexadecimal digit."""
_BEGINS_IN_ESCAPE = re.compile(r"\*[0-9A-F]")
"""`LIKE_AN_ESCAPE` for values in normal form."""
QUERY_ESCAPE = re.compile("%3A|%2F")
"""Matches what `query_form` replaces: a pattern with a `?` may have two forms."""
_SPECIAL = re.compile("[*?]")
_COLON_OR_SLASH = re.compile("[/:]|%3A|%2F")
"""Matches the characters and escapes to which RFC 9309 section 2.2.2 (RFC-25) applies."""


class SortedRules:
    """The rules of a set by shape, each pattern with its *entry*.

    An entry is a single number. From the high bits to the low ones it contains the length in
    octets, whether the rule allows, and its distance from the end of the set. So the greatest entry
    belongs to the longest match; of equally long ones to an Allow (RFC 9309 section 2.2.2, RFC-18);
    and of these to the first in the file.
    """

    def __init__(self, rules: list[tuple[str, str]], *, robots_file: bool) -> None:
        """Sort the rules. `rules` contains for each rule a non-empty string if it is a Disallow,
        and its value.

        With `robots_file` an entry for `/robots.txt` is added, whose code is ROBOTS_FILE.
        """
        self.count: int = len(rules)
        self.shift: int = (len(rules) + 2).bit_length()
        """Number of low bits of an entry that contain the rule's position. The next bit is set if
        it allows."""
        # Without a matching rule a path is allowed (RFC 9309 section 2.2.2, RFC-19).
        self.prefixes: dict[str, int] = {"": 1 << self.shift}
        self.exact: dict[str, int] = {}
        """Entries of values that match a single path, because they end with a `$` (RFC 9309 section
        2.2.3, RFC-28)."""
        self.wild: dict[str, int] = {}
        self.has_two_forms: bool = False
        """Whether a pattern with a `?` has a `:` or `/` that may match within the query of a path
        (RFC 9309 section 2.2.2, RFC-25)."""
        joined = "\n".join([value for _, value in rules])
        self.like_escapes: bool = LIKE_AN_ESCAPE.search(joined) is not None
        """Whether a piece may match from within an escape on; see `rfc_path`."""
        if not are_normal(joined):
            joined = rfc_patterns(joined)
        self.has_escapes: bool = "%" in joined
        """Whether a pattern contains an escape, so that no path may be compared as received."""
        if rules:
            self._add_rules(rules, joined)
        if robots_file:
            # The entry is greater than that of any rule, and its position gives ROBOTS_FILE in
            # `decide`.
            entry = (len(joined) + 1 << 1 | 1) << self.shift | self.count + 2
            self.exact[ROBOTS_TXT] = entry

    def _add_rules(self, rules: list[tuple[str, str]], joined: str) -> None:
        """Add rules of any kind. `joined` contains their values in normal form, one per line."""
        prefixes, exact, wild = self.prefixes, self.exact, self.wild
        octet, allow, place = 2 << self.shift, 1 << self.shift, self.count + 1
        queries = "?" in joined
        values = joined.split("\n")
        # Several stars are equivalent to one, but each counts for the length of the rule.
        keys = squeeze(joined).split("\n") if "**" in joined else values
        begins_in_escape = _BEGINS_IN_ESCAPE.search(joined) is not None
        for (dis, _), value, key in zip(rules, values, keys, strict=True):
            place -= 1
            if value[:1] != "/" and value[:1] != "*":
                continue  # an empty pattern has no effect (RFC-21), others are invalid (RFC-32)
            forms: tuple[str, ...] = (key,)
            length = len(value)
            if queries and "?" in value and (self.has_two_forms or self._meets_query(value)):
                query = query_form(key)
                length = len(query) if key is value else len(query_form(value))
                if query != key:
                    # A pattern that matches a path as written also matches it in the query form,
                    # unless an octet that changes can be matched by one that does not.
                    head = key[: key.index("?")]
                    ambiguous = begins_in_escape or "%3A" in head or "%2F" in head
                    forms = (key, query) if ambiguous else (query,)
            entry = length * octet + place
            if not dis:
                entry += allow
            for form in forms:
                entries = prefixes
                if "*" in form:
                    if form[-1] == "*":
                        form = form[:-1]  # noqa: PLW2901 - a final star has no effect
                    entries = wild if "*" in form else prefixes
                elif form[-1] == "$":
                    entries, form = exact, form[:-1]  # noqa: PLW2901
                if entries.get(form, 0) < entry:
                    entries[form] = entry

    def _meets_query(self, value: str) -> bool:
        """Return True if the part after the first star or question mark may match within the query
        of a path."""
        special = _SPECIAL.search(value)
        if special is None or _COLON_OR_SLASH.search(value, special.start()) is None:
            return False
        self.has_two_forms = True
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


MAX_LINEAR_PATTERNS = 512
_MAX_LINEAR_OCTETS = 16_384
"""Up to these numbers of wildcard patterns and octets the patterns are tried one by one; beyond,
they are looked up by their pieces."""
MAX_LINEAR_PAIRS = 1 << 22
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
        "_best_wild",
        "_count",
        "_exact",
        "_has_two_forms",
        "_indexes",
        "_max_linear_path",
        "_normalises",
        "_patterns",
        "_pieces",
        "_prefixes",
        "_shift",
        "_wild",
    )

    def __init__(self, rules: list[tuple[str, str]], *, robots_file: bool) -> None:
        """Compile the rules. `rules` contains for each rule a non-empty string if it is a Disallow,
        and its value.

        With `robots_file` the path `/robots.txt` has a code of its own and is allowed.
        """
        sorted_rules = SortedRules(rules, robots_file=robots_file)
        wild = sorted_rules.wild
        self._count = sorted_rules.count
        self._shift = sorted_rules.shift
        self._wild = wild
        self._best_wild = max(wild.values(), default=0)
        self._has_two_forms = sorted_rules.has_two_forms
        self._normalises = sorted_rules.has_escapes or (bool(wild) and sorted_rules.like_escapes)
        """Whether a pattern may match within an escape, so that no path is compared as received.
        Otherwise only escapes of plain octets make a difference: no pattern contains any other
        octet, and none begins within an escape."""
        self._patterns: list[str] = []
        """The wildcard patterns that are tried one by one, the best first."""
        self._indexes: tuple[PatternIndex, PatternIndex] | None = None
        octets = sum(map(len, wild))
        self._max_linear_path = MAX_LINEAR_PAIRS // max(octets, 1)
        """Maximum number of octets of a path for which patterns are tried one by one."""
        if len(wild) > MAX_LINEAR_PATTERNS or octets > _MAX_LINEAR_OCTETS:
            self._indexes = _build_indexes(wild)
            self._max_linear_path = 0
        else:
            self._patterns = sorted(wild, key=wild.__getitem__, reverse=True)
        self._pieces = [longest_piece(value.removesuffix("$")) for value in self._patterns]
        self._exact = sorted_rules.exact
        self._prefixes = PrefixTable(sorted_rules.prefixes)

    def decide(self, path: str) -> int:
        """Return the code of the deciding rule, -1, DENIED or ROBOTS_FILE (see `rules`).

        The path begins with `/` and need not be in normal form.
        """
        if "%" in path or (self._normalises and not is_normal_path(path)):
            path = rfc_path(path)
        entry = self._prefixes.best(path)
        if path in self._exact:
            entry = max(entry, self._exact[path])
        if self._wild or self._has_two_forms:
            try:
                entry = self._best_entry(path, entry)
            except StepBudgetExceeded:
                return DENIED
        place = entry & (1 << self._shift) - 1
        # Positions count down to 1. The entry for no rule has position 0.
        return (self._count - place) * 2 + (entry >> self._shift & 1) if place else -1

    def _best_entry(self, path: str, entry: int) -> int:
        """Return the entry of a path, given the entry of its prefixes. Raises
        StepBudgetExceeded."""
        # A rule with a `?` is compared with the path as written, and in the form of RFC 9309
        # section 2.2.2 (RFC-25).
        query = query_form(path) if self._has_two_forms and "%" in path else path
        if query != path:
            entry = max(entry, self._prefixes.best(query), self._exact.get(query, 0))
        if len(path) > self._max_linear_path:
            return self._best_indexed_entry(path, query, entry)
        for place, piece in enumerate(self._pieces):
            if piece in path and wild_match(self._patterns[place], path):
                entry = max(entry, self._wild[self._patterns[place]])
                break
        if query != path:
            for pattern in self._patterns:
                if "?" in pattern and wild_match(pattern, query):
                    return max(entry, self._wild[pattern])
        return entry

    def _best_indexed_entry(self, path: str, query: str, floor: int) -> int:
        """Implement `_best_entry` by looking up pieces. `floor` is the greatest entry so far.
        Raises StepBudgetExceeded."""
        if floor > self._best_wild:
            return floor
        indexes = self._indexes
        if indexes is None:
            indexes = self._indexes = _build_indexes(self._wild)
        budget = StepBudget()
        text = CountedText(path, budget)
        floor = indexes[0].best(text, floor)
        if "?" in path:
            floor = indexes[1].best(text, floor)
            if query != path:
                floor = indexes[1].best(CountedText(query, budget), floor)
        return floor


def _build_indexes(wild: dict[str, int]) -> tuple[PatternIndex, PatternIndex]:
    """Return the indexes of the patterns without a `?` and of those with one."""
    with_query = {pattern: entry for pattern, entry in wild.items() if "?" in pattern}
    without_query = {pattern: entry for pattern, entry in wild.items() if "?" not in pattern}
    return PatternIndex(without_query), PatternIndex(with_query)
