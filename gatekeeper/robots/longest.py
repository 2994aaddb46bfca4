"""RFC 9309 rule sets: of the rules that match a path the longest one decides.

`LongestMatch.answer` is for hot paths: it takes the text after the authority of a URL and returns
the verdict, or None if the whole URL has to be parsed first.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable
from contextlib import suppress
from itertools import compress, repeat
from operator import not_

from gatekeeper import speedups
from gatekeeper.robots import compiled
from gatekeeper.robots.compiled import LIKE_AN_ESCAPE, QUERY_ESCAPE, ROBOTS_FILE, CompiledRules
from gatekeeper.robots.parser import ALLOW, DISALLOWED, Dialect, Spans, in_pieces
from gatekeeper.robots.patterns import (
    COMPARE_BITS,
    COMPILED,
    ROBOTS_TXT,
    StepBudget,
    StepBudgetExceeded,
    are_normal,
    has_normal_escapes,
    is_normal_path,
    is_ordinary_path,
    is_robots_txt,
    query_form,
    rfc_path,
    rfc_patterns,
    wild_match,
)
from gatekeeper.robots.rules import (
    DOT_SEGMENT,
    RuleLines,
    TextSource,
    match_length,
    rules_in,
    split_url,
)
from gatekeeper.urls import ALWAYS_SENDABLE_LENGTH

QuickAnswer = Callable[[str], bool | None]
"""A function of the text after the authority in a URL, as written, beginning with `/`. Returns the
verdict, or None if the whole URL has to be parsed, which may fail."""

_MAX_LENGTH = ALWAYS_SENDABLE_LENGTH - 1
"""Maximum length in characters of a text that is answered without parsing the URL; the URL parser
checks the limit for longer ones."""
# Finds the same lines as `parser.RULE`, faster, because comments are cut later.
_RULE_LINES = re.compile(r"\n[ \t]*+(dis|)allow[ \t]*+:[ \t]*+(.*+)", re.IGNORECASE | re.ASCII)
_NO_EFFECT = " "
"""Value of a rule without effect: no text that reaches the rules contains a blank."""
_ALL_PATHS: tuple[str, ...] = ("",)
"""Placeholder for `_allow_heads`: every path starts with the empty string."""
_NO_AUTHORITY = "\n"
"""Sentinel: no URL starts with this string."""
_MAX_LINEAR_RULES = 256
"""Sets with more rules are compiled instead of searched from the longest rule down."""
_COMPILE_AFTER = 8
"""Number of questions about the deciding rule that cost about as much as compiling the rules."""
_EAGER_OCTETS = 16_384
"""Rule sets with more text are compiled before the first question."""
_MAX_MATCHING_STEPS = 500_000
"""Maximum number of steps for listing all rules that match a path, in addition to looking at
each."""


class LongestMatch:
    """Rules of RFC 9309: the longest match decides in any order, and Allow wins a tie (RFC-16 to
    RFC-19).

    The rules are read from the text when the first question comes, and stored in file order in a
    few tuples of strings, so answering a few questions about a file costs little more than scanning
    its text. Most paths start with no Disallow prefix and contain no piece that a Disallow with a
    leading star requires: they are allowed without looking at single rules, and most other paths
    are denied without doing so. For the remaining paths the rules are sorted by length, and the
    first that matches decides. Rules of a large text are compiled immediately.
    """

    __slots__ = (
        "_allow_heads",
        "_clues",
        "_compiled",
        "_decides_left",
        "_disallows",
        "_has_queries",
        "_last_authority",
        "_longer_prefixes",
        "_max_inline_length",
        "_max_length",
        "_normalises",
        "_patterns",
        "_prefixes",
        "_sorted_pieces",
        "_sorted_prefixes",
        "_sorted_rules",
        "_source",
        "_values",
        "spans",
    )

    dialect = Dialect.RFC9309
    spans: Spans

    def __init__(self, source: TextSource, spans: Spans) -> None:
        self.spans = spans
        self._source: TextSource | None = source
        """The file from which the rules are read; None once they are read."""
        self._last_authority = _NO_AUTHORITY
        """Authority of the last URL that had to be parsed. It is stripped from the next URL to get
        its path."""
        self._max_length = -1
        """Maximum length in characters of a text that `answer` handles; -1 before the rules are
        read."""
        self._max_inline_length = -1
        """Maximum length in characters of a text that `allows_url` handles itself."""
        self._decides_left = _COMPILE_AFTER
        """Number of questions about the deciding rule until the rules are compiled."""
        self._compiled: CompiledRules | None = None
        # Until the rules are read, every path is left to the compiled rules.
        self._prefixes: tuple[str, ...] = ("/",)
        """A path that starts with one of these is matched by a Disallow."""
        self._clues: tuple[str, ...] = ()
        """For each other Disallow a literal piece of every path that it matches ..."""
        self._patterns: tuple[str, ...] = ()
        """... and its value; empty if it matches every path that contains the piece."""
        self._values: tuple[str, ...] = ()
        """Values in normal form, in file order."""
        self._disallows: tuple[str, ...] = ()
        """For each value a non-empty string if the rule is a Disallow. The tuple is empty if all
        rules are."""
        self._allow_heads = _ALL_PATHS
        """Prefixes of all paths that are matched by a Disallow and yet allowed."""
        self._sorted_prefixes: tuple[str, ...] = ()
        """Disallows that are plain prefixes, the longest first."""
        self._sorted_rules: tuple[str, ...] = ()
        """All other rules, the longest first; empty until they are sorted ..."""
        self._sorted_pieces: tuple[str, ...] = ()
        """... a literal piece of every path that each of them matches ..."""
        self._longer_prefixes: tuple[int, ...] = ()
        """... and for an Allow the number of prefixes in `_sorted_prefixes` that are longer, for a
        Disallow -1."""
        self._has_queries = False
        """Whether a rule contains a `?`: a path with escapes may have to be compared in two forms
        (RFC-25)."""
        self._normalises = True
        """Whether a pattern may match within an escape, so that paths must be compared in normal
        form."""
        eager = source.size > _EAGER_OCTETS and sum([b - a + 64 for a, b in spans]) > _EAGER_OCTETS
        if eager or not speedups.ON:
            self._compiled = CompiledRules(rules_in(source.lines, spans), robots_file=True)
            self._source = None
            if speedups.ON:
                self._max_length = _MAX_LENGTH

    def _read_rules(self, source: TextSource) -> None:
        """Read the rules from the text."""
        # Another thread may do the same, and use the rules as soon as it is done: every attribute
        # is only ever set to its final value.
        disallows, values = _columns(source.lines, self.spans)
        joined = "\n".join(values)
        max_length, normalises = _MAX_LENGTH, False
        if not are_normal(joined):
            joined = rfc_patterns(joined)
            values = joined.split("\n")
            normalises = "%" in joined
        if "" in values:  # an empty pattern has no effect (RFC 9309 section 2.2.2, RFC-21)
            values = [value or _NO_EFFECT for value in values]
        self._values, self._disallows = tuple(values), tuple(disallows)
        self._has_queries = "?" in joined
        if normalises and self._has_queries and QUERY_ESCAPE.search(joined):
            self._compile()  # some rule has two forms
        else:
            disallowed = self._values
            if disallows:
                disallowed = tuple(compress(values, disallows))
            else:
                self._allow_heads = (ROBOTS_TXT,)
            if "*" in joined or "$" in joined:
                if joined.count("*") + joined.count("$") > compiled.MAX_LINEAR_PATTERNS:
                    max_length = 0
                max_length = min(max_length, compiled.MAX_LINEAR_PAIRS // len(joined))
                normalises = normalises or LIKE_AN_ESCAPE.search(joined) is not None
                disallowed = self._split_off_patterns(disallowed)
            self._prefixes = disallowed
        self._normalises, self._max_length = normalises, max_length
        self._max_inline_length = -1 if normalises else max_length
        self._source = None

    def _split_off_patterns(self, values: tuple[str, ...]) -> tuple[str, ...]:
        """Store the wildcard patterns of Disallow rules and return the remaining plain prefixes."""
        prefixes: list[str] = []
        patterns: list[str] = []
        clues: list[str] = []
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
            patterns.append("" if anywhere else value)
            clues.append(head if star else head[:-1])
        self._patterns, self._clues = tuple(patterns), tuple(clues)
        return tuple(prefixes)

    def allows_url(self, url: str) -> bool:
        """Return the verdict for a URL or a path. Raises InvalidURL for text that is neither."""
        path = url.removeprefix(self._last_authority)
        # Same result as `answer`, inlined, because most URLs need nothing more.
        if len(path) <= self._max_inline_length and (
            is_ordinary_path(path)
            if COMPILED
            else " " not in path and "%" not in path and "/." not in path and path.isprintable()
        ):
            if path.startswith(self._prefixes):
                if path[0] == "/" and "#" not in path:
                    return path.startswith(self._allow_heads) and self._longest_allows(path)
            elif path and path[0] == "/":
                for clue in self._clues:
                    if clue in path:
                        break
                else:
                    return True
                if "#" not in path:
                    return self._check_clues(path, clue)
        if path[:1] != "/":
            origin, path = split_url(url)
            if origin and url.startswith(origin + "/"):
                self._last_authority = origin
            return self.allows(path)
        verdict = self.answer(path)
        return self.allows(split_url(url)[1]) if verdict is None else verdict

    @property
    def quick_answer(self) -> QuickAnswer | None:
        """The function for `Policy.quick_answer`, or None."""
        if self._source is not None:
            self._read_rules(self._source)
        return self.answer if self._max_length >= 0 else None

    def answer(self, path: str) -> bool | None:
        """Return the verdict about the text after the authority in a URL, as written, beginning
        with `/`.

        Return None if the whole URL has to be parsed first.
        """
        # Prefixes and pieces contain plain octets only, so neither a fragment nor a character that
        # would be escaped can make a path match one that it does not match as written.
        if (
            " " in path
            or not path.isprintable()
            or ("/." in path and DOT_SEGMENT.search(path))
            or len(path) > self._max_length
        ):
            return None
        if "%" in path:
            if "/%2" in path or "/." in path:
                return None
            # If no rule contains an escape, only an escape of a plain octet can make a difference.
            if self._normalises or not has_normal_escapes(path):
                path = rfc_path(path)
            if self._has_queries and "?" in path and "%" in path:
                return None
        elif self._normalises and not is_normal_path(path):
            path = rfc_path(path)
        if path.startswith(self._prefixes):
            if "#" in path:
                return None  # the match may be in the fragment
            return path.startswith(self._allow_heads) and self._longest_allows(path)
        for clue in self._clues:
            if clue in path:
                return None if "#" in path else self._check_clues(path, clue)
        return True

    def _check_clues(self, path: str, first: str) -> bool:
        """Return `answer` for a path without a fragment. `first` is the first clue in the path."""
        clues = self._clues
        for place in range(clues.index(first), len(clues)):
            if clues[place] in path:
                pattern = self._patterns[place]
                if not pattern or wild_match(pattern, path):
                    return path.startswith(self._allow_heads) and self._longest_allows(path)
        return True

    def _longest_allows(self, path: str) -> bool:
        """Return the verdict about a path that a Disallow matches, and possibly an Allow too.

        The path is in normal form, or in a form for which normalisation makes no difference.
        """
        compiled_rules = self._compiled
        if compiled_rules is not None:
            return compiled_rules.decide(path) & 1 == 1
        if path == ROBOTS_TXT:
            return True
        if not self._sorted_rules and self._disallows:
            # Where a Disallow matches, an Allow shorter than each of them does not decide.
            least = min(map(len, compress(self._values, self._disallows)), default=0)
            every_allow = compress(self._values, map(not_, self._disallows))
            allows = [value for value in every_allow if len(value) >= least]
            if self._allow_heads is _ALL_PATHS:
                heads = [value.partition("*")[0].removesuffix("$") for value in allows]
                self._allow_heads = (*dict.fromkeys(heads), ROBOTS_TXT)
                if not path.startswith(self._allow_heads):
                    return False
            if len(self._values) > _MAX_LINEAR_RULES:
                return self._compile().decide(path) & 1 == 1
            self._sort_rules(allows)
        for place, piece in enumerate(self._sorted_pieces):
            if piece in path:
                rule = self._sorted_rules[place]
                if path.startswith(rule) if rule is piece else wild_match(rule, path):
                    count = self._longer_prefixes[place]
                    return count >= 0 and not path.startswith(self._sorted_prefixes[:count])
        return False

    def _sort_rules(self, allows: list[str]) -> None:
        """Sort the Allows, and the Disallows that are not prefixes, by length, an Allow before a
        Disallow of equal length (RFC 9309 section 2.2.2, RFC-17, RFC-18).

        For each Allow also count the prefixes that are longer.
        """
        denied = sorted(compress(self._values, self._disallows), key=len, reverse=True)
        others = {v: None for v in denied if "*" in v.rstrip("*") or v[-1] == "$"}
        plain = [value for value in denied if value not in others]
        lengths = [-len(value) for value in plain]
        longer = {value: bisect_left(lengths, -len(value)) for value in allows}
        ordered = sorted([*allows, *others], key=len, reverse=True)
        # A prefix is its own piece.
        self._sorted_pieces = tuple([value.rstrip("*$").rpartition("*")[2] for value in ordered])
        self._longer_prefixes = tuple([longer.get(value, -1) for value in ordered])
        self._sorted_prefixes = tuple([value.rstrip("*") for value in plain])
        self._sorted_rules = tuple(ordered)  # set last, for other threads

    def _compile(self) -> CompiledRules:
        rules = [*zip(self._disallows or repeat("s"), self._values, strict=False)]
        self._compiled = compiled_rules = CompiledRules(rules, robots_file=True)
        return compiled_rules

    def allows(self, path: str) -> bool:
        """Return the verdict about a path with its query, as from `split_url`."""
        if self._source is not None:
            self._read_rules(self._source)
        verdict = self.answer(path)
        return self.decide(path) & 1 == 1 if verdict is None else verdict

    def decide(self, path: str, origin: str = "") -> int:
        """Return the code of the deciding rule (see `rules`), or -1 if no rule matches."""
        if self._source is not None:
            self._read_rules(self._source)
        compiled_rules = self._compiled
        if compiled_rules is not None:
            return compiled_rules.decide(path)
        if "%" in path or self._normalises:
            path = rfc_path(path)
        # A rule with a `?` is compared with two forms of the path (RFC 9309 section 2.2.2, RFC-25).
        two_forms = self._has_queries and "%" in path and query_form(path) != path
        self._decides_left -= 1
        if len(path) > self._max_length or two_forms or self._decides_left < 0:
            return self._compile().decide(path)
        if path.startswith(ROBOTS_TXT) and is_robots_txt(path):
            return ROBOTS_FILE
        longest, code = 0, -1
        for place, value in enumerate(self._values):
            # Of equally long rules an Allow, and of these the first, decides.
            allows = bool(self._disallows) and not self._disallows[place]
            rank = len(value) * 2 + allows
            is_pattern = "*" in value or value[-1] == "$"
            if rank > longest and (
                wild_match(value, path) if is_pattern else path.startswith(value)
            ):
                longest, code = rank, place * 2 + allows
        return code

    def matching(self, path: str, rules: RuleLines, origin: str = "") -> list[tuple[int, int]]:
        """Return number and length of every rule that matches, the deciding one first.

        In a file constructed to make this slow, only rules up to some position in the file are
        considered.
        """
        path = rfc_path(path)
        query = query_form(path)
        budget = StepBudget(_MAX_MATCHING_STEPS)
        lengths: dict[str, int] = {}
        found: list[tuple[int, int]] = []
        patterns = rfc_patterns("\n".join([value for _, value in rules])).split("\n")
        with suppress(StepBudgetExceeded):
            for number, pattern in enumerate(patterns):
                if pattern not in lengths:
                    if "*" in pattern:
                        budget.spend(len(path) * len(pattern) >> COMPARE_BITS)
                    lengths[pattern] = match_length(pattern, path, query)
                if lengths[pattern]:
                    found.append((number, lengths[pattern]))
        found.sort(key=lambda each: (-each[1], bool(rules[each[0]][0])))
        return found


def _columns(text: str, spans: Spans) -> tuple[list[str], list[str]]:
    """Return two columns for the rules in the spans: a non-empty string for each Disallow, and the
    values.

    The first column is empty if all rules are Disallows, a case that takes half of the time.
    """
    disallows: list[str] = []
    values: list[str] = []
    for low, high in in_pieces(text, spans):
        if disallows or ALLOW.search(text, low, high):
            found = _RULE_LINES.findall(text, low, high)
            disallows += ["s"] * (len(values) - len(disallows))
            disallows += ["s" if dis else "" for dis, _ in found]
            values += [value for _, value in found]
        else:
            values += DISALLOWED.findall(text, low, high)
    joined = "\n".join(values)
    if "#" in joined:
        values = [value.partition("#")[0] for value in values]
    if " " in joined or "\t" in joined:
        values = [value.rstrip(" \t") for value in values]
    return disallows, values
