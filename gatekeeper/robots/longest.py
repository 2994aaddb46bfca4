"""RFC 9309 rule sets: of the rules that match a path the longest one decides.

Everything is compared in normal form (`patterns`): values are converted when a set is created, a
path when it is asked about, unless it is in normal form as written, which most are.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from itertools import compress, product, starmap
from operator import not_

from gatekeeper.robots.flat import NO_RULE, FlatRules, flat_rules
from gatekeeper.robots.model import DENIED, ROBOTS_FILE
from gatekeeper.robots.parser import Dialect, Spans, rule_columns
from gatekeeper.robots.patterns import (
    COMPARE_BITS,
    NORMAL,
    QUERY_ESCAPE,
    ROBOTS_TXT,
    CountedText,
    PieceIndex,
    StepBudget,
    StepBudgetExceeded,
    are_normal,
    counted_match,
    index_keys,
    is_normal_path,
    query_form,
    rfc_path,
    rfc_pattern,
    split_url,
    squeeze,
    wild_match,
)
from gatekeeper.urls import ALWAYS_SENDABLE_LENGTH, is_known_authority, is_sent_as_written

_NO_EFFECT = " "  # as a value: no path in normal form contains a blank
_TWO_FORMS = re.compile(r"\*[0-9A-F]|\A[^?]*%(?:3A|2F)")
"""Matches a pattern with a `?` that may match a path as written and not in its query form: an octet
that changes can be matched by one that does not."""
LARGE = 16_384
"""Sets with more octets of values are prepared completely before the first question."""
MAX_LINEAR_PATTERNS = 512
"""If there are more patterns, or more than `LARGE` octets, they are looked up by their pieces."""
MAX_LINEAR_PAIRS = 1 << 21
"""Maximum product of the octets of a path and of the patterns that are tried one by one. It may be
used up twice for an answer, which takes some 2 ms. Beyond, the work is counted, see `patterns`."""
_NOT_MADE = -2  # instead of a number of octets: what depends on it is not made yet
_MAX_MATCHING_STEPS = 500_000
"""Maximum number of steps for listing all rules that match a path, besides looking at each."""

# An *entry* of a rule holds, from the high bits to the low ones, its length in octets, whether it
# allows, and the complement of its number in the set. So the greatest belongs to the longest match;
# of equally long ones to an Allow (RFC 9309 section 2.2.2, RFC-18); then to the first in the file.
_LAST = (1 << 32) - 1
_ALLOWS = 1 << 32
_OCTET = 1 << 33

_Pattern = tuple[int, str, str]
"""Entry, a literal piece of every path that matches, and the squeezed pattern."""
_Prepared = tuple[dict[str, int], list[int], list[_Pattern], int]
"""Entries without lengths by plain value, the distinct lengths of these values, the longest first;
the patterns, the greatest entry first; and the maximum number of octets of a path for which the
patterns are tried one by one."""


class LongestMatch:
    """Rules of RFC 9309: the longest match decides in any order, and Allow wins a tie (RFC-16 to
    RFC-19).

    Most paths start with no Disallow prefix and contain no piece that a Disallow pattern requires:
    they are allowed without looking at single rules, and most others are denied so. For the
    remaining paths, and for the deciding rule, all rules are prepared when the first comes.

    The time of an answer is bounded: if a path is long and there are many patterns, the work is
    counted, and the answer is exact up to `patterns.MAX_STEPS` steps, and DENIED beyond.
    """

    dialect = Dialect.RFC9309
    spans: Spans

    def __init__(self, text: str, spans: Spans) -> None:
        self.spans = spans
        disallows, values = rule_columns(text, spans)
        joined = "\n".join(values)
        if not are_normal(joined):
            joined = rfc_pattern(joined)
            values = joined.split("\n")
        if "" in values:  # an empty pattern has no effect (RFC 9309 section 2.2.2, RFC-21)
            values = [value or _NO_EFFECT for value in values]
        self._queries = "?" in joined
        """Whether a rule contains a `?`: a path with escapes is compared in two forms (RFC-25)."""
        wildcards = joined.count("*") + joined.count("$")
        self._wild = wildcards > 0
        self._written: list[str] = []
        """Values before `query_form`, if that makes a difference."""
        if self._queries and QUERY_ESCAPE.search(joined):
            self._written, values = values, [*map(query_form, values)]
        self._values = values
        """Values in normal form, in file order."""
        self._disallows = disallows
        """For each value a non-empty string if the rule is a Disallow. Empty if all rules are."""
        many = wildcards > MAX_LINEAR_PATTERNS
        self._max_linear = -1 if many else MAX_LINEAR_PAIRS // (len(joined) or 1)
        """Maximum octets of a path that is compared with the patterns one by one."""
        self._max_compared = self._max_linear
        """The same; -1 after a path was compared with all rules so, and once they are prepared."""
        self._flat: FlatRules | None = None
        """The rules in flat form, once they were asked for: it gives the first answer then."""
        self._prepared: _Prepared | None = None
        self._index: PieceIndex | None = None
        self._denied: tuple[str, ...] = ()
        """A path that starts with one of these is matched by a Disallow."""
        self._quick: list[tuple[str, str]] = []
        """For each other Disallow a literal piece of every path that it matches, and its value;
        empty if it matches every path that contains the piece."""
        self._allow_heads: tuple[str, ...] = ()
        """A path that an Allow matches starts with one of these."""
        self._deciding_heads: tuple[str, ...] = (ROBOTS_TXT,)
        """Prefixes of all paths that are matched by a Disallow and yet allowed."""
        self._max_quick = _NOT_MADE
        """Maximum octets of a path for which the four fields above are used; -1 if for none."""
        if len(joined) > LARGE:
            self._max_quick = -1
            self._prepare()

    def _make_quick(self) -> None:
        """Make the fields that answer for most paths without looking at single rules."""
        values, disallows = self._values, self._disallows
        denied = values
        if disallows:
            denied = [*compress(values, disallows)]
            allows = [*compress(values, map(not_, disallows))]
            heads = [value.partition("*")[0].removesuffix("$") for value in allows]
            self._allow_heads = tuple(heads)
            # Where a Disallow matches, an Allow shorter than each of them does not decide.
            least = min(map(len, denied), default=0)
            deciding = [len(value) >= least for value in allows]
            self._deciding_heads = (*compress(heads, deciding), ROBOTS_TXT)
        most = ALWAYS_SENDABLE_LENGTH
        if self._wild:
            most = min(most, self._max_linear)
            denied, self._quick = _split_off_patterns(denied)
        self._denied = tuple(denied)
        self._max_quick = most  # last, as another thread may use them from now on

    def allows_url(self, url: str) -> bool:
        """Return the verdict for a URL or a path. Raises InvalidURL for text that is neither."""
        cut = url.find("/", 8)  # after `https://`
        verdict = None
        if is_known_authority(url[: cut + 1]):
            verdict = self.allows_plain(url[cut:])
        elif url[:1] == "/":
            verdict = self.allows_plain(url)
        return self.decide(split_url(url)[1]) & 1 == 1 if verdict is None else verdict

    def allows_plain(self, path: str) -> bool | None:
        """Return the verdict about the text after the authority in a URL, if it is sent as written
        (`urls.is_sent_as_written`) and short; else None: the URL has to be parsed.

        The text begins with `/`. `/robots.txt` is allowed (RFC 9309 section 2.2.2, RFC-20).
        """
        # This is `is_normal_path`, without the call.
        if (
            not path.isascii()
            or "/." in path
            or (octets := path.encode()).translate(NORMAL) != octets
        ):
            if len(path) > ALWAYS_SENDABLE_LENGTH or not is_sent_as_written(path):
                return None
            path = rfc_path(path)
            if self._queries and "?" in path and ("%2F" in path or "%3A" in path):
                return self.longest(path) & 1 == 1
        if len(path) > self._max_quick:
            if self._max_quick == _NOT_MADE:
                self._make_quick()
                return self.allows_plain(path)
            return None if len(path) > ALWAYS_SENDABLE_LENGTH else self.decide(path) & 1 == 1
        if not path.startswith(self._denied) and not (self._quick and self._meets_pattern(path)):
            return True
        self._max_compared = -1  # who asks for no rule asks often: the rules are prepared
        return path.startswith(self._deciding_heads) and self.decide(path) & 1 == 1

    def _meets_pattern(self, path: str) -> bool:
        """Return True if one of `_quick` matches a path of at most `_max_quick` octets."""
        for piece, pattern in self._quick:
            if piece in path and (not pattern or wild_match(pattern, path)):
                return True
        return False

    def decide(self, path: str, origin: str = "") -> int:
        """Return the code of the deciding rule, -1 if no rule matches, DENIED or ROBOTS_FILE (see
        `rules`)."""
        if not is_normal_path(path):
            path = rfc_path(path)
        if path == ROBOTS_TXT:
            return ROBOTS_FILE
        if len(path) <= self._max_compared and "%" not in path:
            self._max_compared = -1
            return self._first_answer(path)
        if self._max_quick == _NOT_MADE:
            self._make_quick()
        if len(path) <= self._max_quick and "%" not in path:
            free = not path.startswith(self._denied) and not path.startswith(self._allow_heads)
            if free and not (self._quick and self._meets_pattern(path)):
                return -1  # as for most paths
        return self.longest(path)

    def flat(self, crawl_delay: float | None) -> FlatRules | None:
        """Return the rules in flat form. None if a rule has two forms (RFC-25), or if searching
        them would be slow."""
        if not self._written or self._written == self._values:
            denied, allowed = self._values, list[str]()
            if marks := self._disallows:
                denied = [*compress(self._values, marks)]
                allowed = [*compress(self._values, map(not_, marks))]
            self._flat = flat_rules(denied, allowed, crawl_delay)
        return self._flat

    def _first_answer(self, path: str) -> int:
        """Do what `longest` does without preparing the rules: for one path that is quicker."""
        score = None if self._flat is None else self._flat.score(path)
        if score == NO_RULE:
            return -1
        found = self._matching(path, None if score is None else score >> 1)
        return found[0][0] * 2 + (not found[0][2]) if found else -1

    def longest(self, path: str) -> int:
        """Return the code of the longest rule that matches a path in normal form, -1 or DENIED."""
        table, lengths, patterns, max_linear = self._prepared or self._prepare()
        views = [path]
        # A rule with a `?` is compared with the path as written, and in the form of RFC 9309
        # section 2.2.2 (RFC-25).
        if self._queries and "%" in path and (query := query_form(path)) != path:
            views.append(query)
        best, linear = 0, len(path) <= max_linear
        for place, view in enumerate(views):
            for length in lengths:
                if (prefix := view[:length]) in table:
                    entry = len(prefix) * _OCTET + table[prefix]
                    best = max(best, entry) if place else entry
                    break
            if (exact := view + "$") in table:
                best = max(best, len(exact) * _OCTET + table[exact])
            if linear:
                for entry, piece, pattern in patterns:
                    if entry <= best:
                        break
                    # The query form of a path concerns only rules with a `?`.
                    if (
                        piece in view
                        and (not place or "?" in pattern)
                        and wild_match(pattern, view)
                    ):
                        best = entry
                        break
        if not linear and patterns and patterns[0][0] > best:
            try:
                best = self._best_pattern(views, best, patterns)
            except StepBudgetExceeded:
                return DENIED
        # Without a matching rule a path is allowed (RFC 9309 section 2.2.2, RFC-19).
        return (_LAST - (best & _LAST)) * 2 + (best >> 32 & 1) if best else -1

    def _best_pattern(self, views: list[str], floor: int, patterns: list[_Pattern]) -> int:
        """Return the greatest entry of a pattern that matches, if it is greater than `floor`, else
        `floor`, counting the work. Raises StepBudgetExceeded."""
        if self._index is None:
            self._index = PieceIndex(index_keys([pattern for _, _, pattern in patterns]))
        index, budget = self._index, StepBudget()
        for place, view in enumerate(views):
            text = CountedText(view, budget)
            for number in sorted(index.find_in(text)):
                entry, _, pattern = patterns[number]
                if entry <= floor:
                    break
                if (not place or "?" in pattern) and counted_match(pattern, text):
                    floor = entry
                    break
        return floor

    def _prepare(self) -> _Prepared:
        """Prepare the rules for any path."""
        self._max_compared = -1
        # Of two equal rules an Allow, and of these the first in the file, is stored last.
        values = self._values[::-1]
        denied = self._disallows[::-1] or values
        low = _LAST - len(values) + 1
        table: dict[str, int] = {}
        for marks, allows in ((denied, 0), ([*map(not_, denied)], _ALLOWS)):
            entries = range(low + allows, _LAST + allows + 1)
            coded = zip(compress(values, marks), compress(entries, marks), strict=True)
            for value, entry in coded:
                table[value] = entry  # noqa: PERF403 - a single `update` takes 5 ms, without a break
        found = [
            (len(value) * _OCTET + entry, value) for value, entry in table.items() if "*" in value
        ]
        if found:
            table = {value: entry for value, entry in table.items() if "*" not in value}
        for number, written in enumerate(self._written):
            value = self._values[number]
            if "*" in value and written != value and _TWO_FORMS.search(written):
                allows = 0 if not self._disallows or self._disallows[number] else _ALLOWS
                found.append((len(value) * _OCTET + _LAST - number + allows, written))
        found.sort(reverse=True)
        # Several stars are equivalent to one, but each counts for the length of the rule.
        wild: dict[str, int] = {}
        for entry, value in found:
            wild.setdefault(squeeze(value), entry)
        best_first, octets = [*wild], sum(map(len, wild))
        max_linear, pieces = MAX_LINEAR_PAIRS // max(octets, 1), best_first
        if len(wild) > MAX_LINEAR_PATTERNS or octets > LARGE:
            max_linear = 0
            self._index = PieceIndex(index_keys(best_first))
        else:
            pieces = [pattern.rstrip("*$").rpartition("*")[2] for pattern in best_first]
        patterns = [*zip(wild.values(), pieces, best_first, strict=True)]
        prepared = table, sorted({*map(len, table)}, reverse=True), patterns, max_linear
        self._prepared = prepared
        return prepared

    def matching(self, path: str, origin: str = "") -> list[tuple[int, int]]:
        """Return number and length of every rule that matches, the deciding one first. In a file
        constructed to make this slow, only rules up to some position in it are considered."""
        return [(number, length) for number, length, _ in self._matching(rfc_path(path))]

    def _matching(self, path: str, length: int | None = None) -> list[tuple[int, int, bool]]:
        """Return `matching`, perhaps of the rules of one length alone, and whether each denies."""
        values, marks = self._values, self._disallows or self._values
        numbers: Sequence[int] = range(len(values))
        if length is not None:
            numbers = [number for number, each in enumerate(values) if len(each) == length]
        views = {path, query_form(path)} if "%" in path else {path}
        two_forms = "%" in path or bool(self._written)
        budget = StepBudget(_MAX_MATCHING_STEPS)
        found: list[tuple[int, int, bool]] = []
        with suppress(StepBudgetExceeded):
            for number in numbers:
                value = values[number]
                if "*" in value:
                    budget.spend(len(path) * len(value) >> COMPARE_BITS)
                elif "?" not in value and value[-1] != "$":
                    if path.startswith(value):
                        found.append((number, len(value), bool(marks[number])))
                    continue
                pattern = squeeze(value)
                matches = wild_match(pattern, path)
                if not matches and two_forms and "?" in value:
                    written = squeeze(self._written[number]) if self._written else pattern
                    matches = any(starmap(wild_match, product({pattern, written}, views)))
                if matches:
                    found.append((number, len(value), bool(marks[number])))
        if len(found) > 1:
            found.sort(key=lambda each: (-each[1], each[2]))
        return found


def _split_off_patterns(values: list[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the plain prefixes of Disallow rules, and a literal piece of each other value with the
    value; see `LongestMatch`."""
    prefixes: list[str] = []
    patterns: list[tuple[str, str]] = []
    for value in values:
        if "*" not in value and value[-1] != "$":
            prefixes.append(value)
            continue
        head, star, rest = value.partition("*")
        rest = rest.rstrip("*")
        if star and not rest:
            prefixes.append(head or "/")
            continue
        anywhere = False
        if len(head) < 2:
            head = rest.removesuffix("$").rpartition("*")[2]
            anywhere = head == rest and (value[0] == "*" or (value[0] == "/" != head[:1]))
        patterns.append((head if star else head[:-1], "" if anywhere else value))
    return prefixes, patterns
