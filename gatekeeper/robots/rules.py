"""Rule sets: the rules that one agent obeys, as each dialect interprets them.

`PrefixesInOrder` implements the 1994 standard and the 1996 draft, `ShellRules` the 2.0 draft; in
both the first matching line decides. `longest.LongestMatch` implements RFC 9309.

No rule is stored as an object. Rules are numbered in the order of the text, and `decide` returns a
*code*: twice the number of the deciding rule, plus one if it allows; -1, which allows, if no rule
matches; DENIED; or ROBOTS_FILE, which allows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache

from gatekeeper.errors import InvalidURL
from gatekeeper.robots.longest import LongestMatch
from gatekeeper.robots.model import DENIED, ROBOTS_FILE
from gatekeeper.robots.parser import Dialect, RuleLines, Spans, rules_in, to_octets, to_unicode
from gatekeeper.robots.patterns import (
    COMPARE_BITS,
    CountedText,
    PathView,
    PieceIndex,
    ShellPattern,
    StepBudget,
    StepBudgetExceeded,
    decoded,
    decoded_patterns,
    is_robots_txt,
    query_form,
    rfc_path,
    rfc_pattern,
    shell_keys,
)
from gatekeeper.robots.signals import combine, parse_preferences, split_content_usage
from gatekeeper.urls import split


class UsageRules:
    """The Content-Usage lines of a rule set, by the paths to which they apply.

    Paths are matched like those of Allow and Disallow, and the longest one applies (SIG-05).
    Preferences that are given twice for the same path are combined (SIG-07). If finding the longest
    path exceeds the step limit of `patterns`, everything that any line forbids is forbidden.
    """

    __slots__ = ("_everywhere", "_paths", "_preferences", "_strictest")

    def __init__(self, values: Sequence[str]) -> None:
        by_path: dict[str, dict[str, str]] = {}
        known: dict[str, dict[str, str]] = {}
        everywhere: list[dict[str, str]] = []
        split_values = [*map(split_content_usage, values)]
        paths = rfc_pattern("\n".join([path for path, _ in split_values])).split("\n")
        for path, (_, text) in zip(map(query_form, paths), split_values, strict=False):
            preferences = known.get(text)
            if preferences is None:
                preferences = known[text] = parse_preferences(text)
            if not path:
                everywhere.append(preferences)
                continue
            if path in by_path:
                preferences = combine([by_path[path], preferences], "n")
            by_path[path] = preferences
        self._everywhere = combine(everywhere, "n")
        self._preferences = list(by_path.values())
        combined = combine([self._everywhere, *known.values()], "n")
        self._strictest = {label: answer for label, answer in combined.items() if answer == "n"}
        text = "".join([f"\nDisallow: {path}" for path in by_path])
        self._paths = LongestMatch(text, ((0, len(text)),))

    def of(self, path: str) -> dict[str, str]:
        """Return the preferences for a path with its query."""
        code = self._paths.longest(rfc_path(path))
        if code == DENIED:
            return dict(self._strictest)
        return dict(self._everywhere if code < 0 else self._preferences[code >> 1])


_MAX_PARSED_ORIGINS = 100
"""Maximum number of non-canonical origins in the rules of one set that are parsed completely. Any
further one is treated as the origin in question, which is the stricter interpretation."""
_PLAIN_ORIGIN = re.compile(r"https?://[a-z0-9_-]+(?>(?:\.[a-z0-9_-]+)*)(?>(?::[0-9]+)?)\Z")
_AUTHORITY_END = re.compile("[/?]")
_Prefixes = tuple[dict[str, int], list[int]]
"""Codes by prefix, and the distinct lengths of the prefixes."""


class PrefixesInOrder:
    """Rules of the 1996 draft: the first line whose path is a prefix of the URL's decides (R96-15,
    R96-18).

    With `disallow_only` it implements the 1994 standard: Allow is an unknown header (R94-08), any
    matching Disallow denies (R94-15), and a rule may be a whole URL, which then applies to that
    origin only (R94-26). There are no wildcards (R94-18; the 1996 draft, R96-21). An empty value
    has no effect (R94-17, R96-20). Escapes are compared by R96-17, which the 1994 standard leaves
    open (R94-24).
    """

    __slots__ = ("_absolute", "_cached_table", "_rules", "dialect", "spans")

    def __init__(self, text: str, spans: Spans, *, disallow_only: bool = False) -> None:
        self.dialect = Dialect.R1994 if disallow_only else Dialect.R1996
        self.spans: Spans = spans
        self._rules: list[tuple[int, str, str]] = []
        """Code and prefix of each rule, and the origin of a rule that is a whole URL."""
        for number, (dis, value) in enumerate(rules_in(text, spans)):
            if value and (dis or not disallow_only):
                origin, path = _parts_of(value) if disallow_only else ("", value)
                self._rules.append((number * 2 + (not dis), decoded(path), origin))
        self._absolute = any(origin for _, _, origin in self._rules)
        self._cached_table: tuple[str, _Prefixes] = ("", self._table_for(""))
        """The origin of the last question, and the prefixes that apply to it."""

    def decide(self, path: str, origin: str = "") -> int:
        """Return the code of the deciding rule, or -1 if no rule matches.

        If `origin` is empty, rules for any origin apply.
        """
        if is_robots_txt(path):
            return ROBOTS_FILE
        cached_origin, prefixes = self._cached_table
        if self._absolute and cached_origin != origin:
            prefixes = self._table_for(origin)
            self._cached_table = (origin, prefixes)
        path = decoded(to_octets(path))
        found, lengths = prefixes
        starts = [start for length in lengths if (start := path[:length]) in found]
        return min(map(found.__getitem__, starts), default=-1)

    def _table_for(self, origin: str) -> _Prefixes:
        """Return the prefixes that apply to an origin. The empty string stands for any origin."""
        codes: dict[str, int] = {}
        applies = _applies_to(origin)
        for code, prefix, written in self._rules:
            if applies(written):
                codes.setdefault(prefix, code)
        return codes, [*{*map(len, codes)}]

    def matching(self, path: str, origin: str = "") -> list[tuple[int, int]]:
        """Return number and length of every rule that matches, the deciding one first."""
        path = decoded(to_octets(path))
        applies = _applies_to(origin)
        return [
            (code >> 1, len(prefix))
            for code, prefix, written in self._rules
            if path.startswith(prefix) and applies(written)
        ]


def _parts_of(value: str) -> tuple[str, str]:
    """Return the origin as written and the path, if the value is a whole URL (R94-26); else the
    empty string and the value."""
    if value[:7].lower() != "http://" and value[:8].lower() != "https://":
        return "", value
    found = _AUTHORITY_END.search(value, 8)
    end = found.start() if found else len(value)
    path = value[end:]
    return value[:end], path if path[:1] == "/" else "/" + path


def _applies_to(origin: str) -> Callable[[str], bool]:
    """Return a predicate: does a rule apply to this origin that was written for another one? The
    empty string stands for any origin."""
    left = _MAX_PARSED_ORIGINS

    @cache
    def applies(written: str) -> bool:
        nonlocal left
        if not written or not origin:
            return True
        if _PLAIN_ORIGIN.match(written):
            default = ":443" if written[:6] == "https:" else ":80"
            return written.removesuffix(default) == origin
        left -= 1
        try:
            return left < 0 or split(to_unicode(written) + "/")[0] == origin
        except InvalidURL:
            return False

    return applies


_RAW, _DECODED, _BOTH = range(3)
_MAX_PATTERN_PATH = 8_192
"""Maximum length in octets of a path for which patterns with a `?` or a class are evaluated. For a
longer path that such a pattern might match the answer is DENIED. Servers refuse longer request
lines, too."""
_MAX_PATTERNS = 10_000
"""Maximum number of patterns in a set; a set with more denies every path. People write a few dozen,
and preparing more of them would take longer than an answer may."""
_PARSE_STEPS = 3
"""Steps counted for parsing one octet of such a pattern."""
_SPECIAL = re.compile(r"[*?\[\\]")
_MORE_THAN_STARS = re.compile(r"[?\[\\]")


class ShellRules:
    """Rules of the 2.0 draft: explicit matches and shell patterns (V2-16, V2-17), by default in
    file order.

    With `precedence` the struck text applies (the 2.0 draft, V2-21): an explicit Allow, then any
    Disallow, then pattern Allows. Pattern Allows form a whitelist if there are any; a set with
    Allows alone always is one (V2-22). A rule matches the path with or without its query (V2-35),
    as received or decoded (V2-36). An empty value matches nothing (V2-23).

    A pattern is indexed by a literal piece that it needs, and parsed only for a path that contains
    the piece. The cost of an answer is counted in the steps of `patterns`; parsing a pattern is
    counted each time it is needed, whether it was parsed before or not, and beyond the limit the
    answer is DENIED. A set with more than `_MAX_PATTERNS` patterns denies every path.
    """

    dialect = Dialect.V2
    spans: Spans

    def __init__(self, text: str, spans: Spans, *, precedence: bool = False) -> None:
        self.spans = spans
        self._precedence = precedence
        self._parsed: dict[int, ShellPattern] = {}
        self._rules: RuleLines = rules_in(text, spans, v2=True)
        self._explicit: dict[_Form, int] = {}
        self._patterns: list[tuple[int, _Form]] = []
        """Code and form of each value that is a pattern, in file order."""
        patterns = {rule for rule in self._rules if precedence or _SPECIAL.search(rule[1])}
        self._too_many_patterns = len(patterns) > _MAX_PATTERNS
        # Of two equal rules the first in the file decides.
        rules = [] if self._too_many_patterns else [*enumerate(self._rules)]
        numbers = sorted({rule: number for number, rule in reversed(rules)}.values())
        every = _forms([self._rules[number][1] for number in numbers])
        for number, forms in zip(numbers, every, strict=True):
            code = number * 2 + (not self._rules[number][0])
            for form in forms:
                if precedence or _SPECIAL.search(form[1]):
                    self._patterns.append((code, form))
                else:
                    self._explicit.setdefault(form, code)
        self._index = PieceIndex(shell_keys([value for _, (_, value) in self._patterns]))
        self._whitelist = precedence and self._is_whitelist()

    def _is_whitelist(self) -> bool:
        disallows = [dis for dis, value in self._rules if value]
        if all(disallows):
            return False
        return not any(disallows) or any(
            self._pattern(number).explicit is None
            for number, (code, _) in enumerate(self._patterns)
            if code & 1
        )

    def decide(self, path: str, origin: str = "") -> int:
        """Return the code of the deciding rule, or -1 or DENIED if no rule decides."""
        if is_robots_txt(path):
            return ROBOTS_FILE
        if self._too_many_patterns:
            return DENIED
        try:
            return self._decide(_path_views(path, StepBudget()))
        except StepBudgetExceeded:
            return DENIED

    def _decide(self, views: _ThreeViews) -> int:
        if self._precedence:
            found = [(code, explicit) for code, _, explicit in self._patterns_that_match(views)]
            if found:
                return min(found, key=_precedence_key)[0]
            return DENIED if self._whitelist else -1
        equal = (self._explicit.get(key) for key in _explicit_forms(views))
        first = min((code for code in equal if code is not None), default=None)
        for code, _, _ in self._patterns_that_match(views, first):
            return code
        return -1 if first is None else first

    def _patterns_that_match(
        self, views: _ThreeViews, end: int | None = None
    ) -> Iterator[tuple[int, _Form, bool]]:
        """Yield the code and the form of each pattern before `end` that matches, and whether it is
        explicit, in file order. Raises StepBudgetExceeded."""
        texts, budget = [path.text for path in views[_BOTH]], views[_BOTH][0].budget
        candidates = self._index.find_in(CountedText("\n".join(texts), budget))
        if not candidates:
            return
        whole, spend = "".join(texts), budget.spend
        path_bits, longest = sum(1 << ord(char) for char in set(whole)), max(map(len, texts))
        for number in sorted(candidates):
            code, (view, value) = self._patterns[number]
            if end is not None and code > end:
                return
            spend(2)
            if _MORE_THAN_STARS.search(value):
                spend(_PARSE_STEPS * len(value))
                if longest > _MAX_PATTERN_PATH:
                    raise StepBudgetExceeded
            elif len(value) > 2 * longest + 3:
                continue  # needs more octets than there are, even if every second one is a star
            spend((len(value) >> 3) + (len(whole) * len(value) >> COMPARE_BITS))
            pattern = self._pattern(number)
            if pattern.min_length > longest or not all(map(path_bits.__and__, pattern.classes)):
                continue
            if any(map(pattern.matches, views[view])):
                yield code, (view, value), pattern.explicit is not None

    def _pattern(self, number: int) -> ShellPattern:
        """Return the parsed pattern, parsing it on first use."""
        pattern = self._parsed.get(number)
        if pattern is None:
            value = self._patterns[number][1][1]
            pattern = self._parsed[number] = ShellPattern(value, _MAX_PATTERN_PATH)
        return pattern

    def matching(self, path: str, origin: str = "") -> list[tuple[int, int]]:
        """Return number and length of every rule that matches, the deciding one first."""
        if self._too_many_patterns:
            return []
        views = _path_views(path, StepBudget())
        hits = {form: True for form in _explicit_forms(views) if form in self._explicit}
        try:
            hits |= {form: explicit for _, form, explicit in self._patterns_that_match(views)}
        except StepBudgetExceeded:
            return []
        found = []
        every = _forms([value for _, value in self._rules])
        for number, ((dis, _), forms) in enumerate(zip(self._rules, every, strict=True)):
            explicit = [hits[form] for form in forms if form in hits]
            if explicit:
                found.append((number * 2 + (not dis), explicit[0]))
        if self._precedence:
            found.sort(key=_precedence_key)
        return [(code >> 1, len(self._rules[code >> 1][1])) for code, _ in found]


_Form = tuple[int, str]
"""A view, and a value as it is compared with that view."""
_PathViews = tuple[PathView, ...]
_ThreeViews = tuple[_PathViews, _PathViews, _PathViews]


def _precedence_key(matched: tuple[int, bool]) -> tuple[int, int]:
    """Sort key: explicit Allow, Disallow, pattern Allow (the 2.0 draft, V2-21); within each, file
    order."""
    code, explicit = matched
    return (0 if explicit else 2) if code & 1 else 1, code


def _path_views(path: str, budget: StepBudget) -> _ThreeViews:
    """Return the path as received, decoded, and both; each with and without its query."""
    path = to_octets(path)
    bare, mark, query = path.partition("?")
    raw, clean = [path], [decoded(bare)]
    if mark:  # path and query are decoded separately, so nothing is decoded twice
        raw.append(bare)
        clean.insert(0, f"{clean[0]}?{decoded(query)}")
    raw_views = tuple([PathView(text, budget) for text in raw])
    decoded_views = tuple([PathView(text, budget) for text in clean])
    if raw_views[0].text == decoded_views[0].text:
        return raw_views, raw_views, raw_views
    return raw_views, decoded_views, raw_views + decoded_views


def _explicit_forms(views: _ThreeViews) -> Iterator[_Form]:
    """Yield the forms of plain values that are equal to the path."""
    for view, paths in enumerate(views):
        for path in paths:
            yield view, path.text


def _forms(values: Sequence[str]) -> list[tuple[_Form, ...]]:
    """Return the forms of each value.

    A value without escapes is compared with both views; a value with escapes is compared as written
    with the raw view and decoded with the decoded one.
    """
    return [
        ((_RAW, value), (_DECODED, clean)) if "%" in value else ((_BOTH, value),) if value else ()
        for value, clean in zip(values, decoded_patterns(values), strict=True)
    ]
