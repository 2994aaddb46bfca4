"""Rule sets: the rules that one agent obeys, as each dialect interprets them.

`PrefixesInOrder` implements the 1994 standard and the 1996 draft, `ShellRules` the 2.0 draft; in
both the first matching line decides. `longest.LongestMatch` implements RFC 9309.

No rule is stored as an object. Rules are numbered in the order of the text, and `decide` returns a
*code*: twice the number of the deciding rule, plus one if it allows; -1, which allows, if no rule
matches; DENIED; or ROBOTS_FILE, which allows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

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
    char_bits,
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
        for path, text in map(split_content_usage, values):
            preferences = known.get(text)
            if preferences is None:
                preferences = known[text] = parse_preferences(text)
            if not path:
                everywhere.append(preferences)
                continue
            form = query_form(rfc_pattern(path))
            if form in by_path:
                preferences = combine([by_path[form], preferences], "n")
            by_path[form] = preferences
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

    __slots__ = ("_absolute", "_cached_table", "_codes", "_disallow_only", "dialect", "spans")

    def __init__(self, text: str, spans: Spans, *, disallow_only: bool = False) -> None:
        self.dialect = Dialect.R1994 if disallow_only else Dialect.R1996
        self.spans: Spans = spans
        self._disallow_only = disallow_only
        codes: dict[str, int] = {}
        absolute: list[tuple[str, str, int]] = []
        for number, (dis, value) in enumerate(rules_in(text, spans)):
            if not value or (disallow_only and not dis):
                continue
            code = number * 2 + (not dis)
            if disallow_only and (found := _whole_url(value)):
                absolute.append((*found, code))
            else:
                codes.setdefault(decoded(value), code)
        self._absolute = tuple(absolute)
        self._codes = codes if absolute else {}
        self._cached_table: tuple[str, _Prefixes] = ("", _prefixes(codes))
        """The origin of the last question, and the prefixes that apply to it."""
        if absolute:
            self._cached_table = ("", self._table_for(""))

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
        codes = dict(self._codes)
        same = _SameOrigin(origin)
        for written, prefix, code in self._absolute:
            if same(written):
                codes[prefix] = min(code, codes.get(prefix, code))
        return _prefixes(codes)

    def matching(self, path: str, rules: RuleLines, origin: str = "") -> list[tuple[int, int]]:
        """Return number and length of every rule that matches, the deciding one first."""
        path = decoded(to_octets(path))
        same = _SameOrigin(origin)
        found = []
        for number, (dis, value) in enumerate(rules):
            if not value or (self._disallow_only and not dis):
                continue
            absolute = _whole_url(value) if self._disallow_only else None
            prefix = absolute[1] if absolute else decoded(value)
            if path.startswith(prefix) and (absolute is None or same(absolute[0])):
                found.append((number, len(prefix)))
        return found


def _prefixes(codes: dict[str, int]) -> _Prefixes:
    return codes, [*{*map(len, codes)}]


def _whole_url(value: str) -> tuple[str, str] | None:
    """Return the origin as written and the path, if the value is a whole URL; else None
    (R94-26)."""
    if value[:7].lower() != "http://" and value[:8].lower() != "https://":
        return None
    found = _AUTHORITY_END.search(value, 8)
    end = found.start() if found else len(value)
    path = value[end:]
    return value[:end], decoded(path if path[:1] == "/" else "/" + path)


class _SameOrigin:
    """Predicate: does an origin as written in a rule equal the origin in question?"""

    def __init__(self, origin: str) -> None:
        self._origin = origin
        self._results: dict[str, bool] = {}
        self._parsed_count = 0

    def __call__(self, written: str) -> bool:
        result = self._results.get(written)
        if result is None:
            result = self._results[written] = not self._origin or self._compare(written)
        return result

    def _compare(self, written: str) -> bool:
        if _PLAIN_ORIGIN.match(written):
            default = ":443" if written[:6] == "https:" else ":80"
            return written.removesuffix(default) == self._origin
        self._parsed_count += 1
        if self._parsed_count > _MAX_PARSED_ORIGINS:
            return True
        try:
            return split(to_unicode(written) + "/")[0] == self._origin
        except InvalidURL:
            return False


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

    __slots__ = (
        "_codes",
        "_explicit",
        "_indexes",
        "_parsed",
        "_precedence",
        "_too_many_patterns",
        "_values",
        "_whitelist",
        "spans",
    )

    dialect = Dialect.V2
    spans: Spans

    def __init__(self, text: str, spans: Spans, *, precedence: bool = False) -> None:
        self.spans = spans
        self._precedence = precedence
        self._parsed: dict[int, ShellPattern] = {}
        rules = rules_in(text, spans, v2=True)
        self._whitelist = False
        self._indexes: list[tuple[int, list[int], PieceIndex]] = []
        self._explicit: dict[str, int] = {}
        self._codes: list[int] = []
        """Codes of the values that are patterns."""
        self._values: list[str] = []
        indexes: tuple[list[int], list[int], list[int]] = [], [], []
        # Of two equal rules the first in the file decides, in either order.
        firsts = dict(zip(reversed(rules), range(len(rules) - 1, -1, -1), strict=True))
        coded = [(value, index * 2 + (not dis)) for (dis, value), index in firsts.items()]
        patterns = [value for value, _ in coded if precedence or _SPECIAL.search(value)]
        self._too_many_patterns = len(patterns) > _MAX_PATTERNS
        if self._too_many_patterns:
            return
        for view, values, codes in _by_view(coded):
            for value, code in zip(values, codes, strict=True):
                if not precedence and not _SPECIAL.search(value):
                    key = f"{view}{value}"
                    self._explicit[key] = min(code, self._explicit.get(key, code))
                else:
                    indexes[view].append(len(self._codes))
                    self._codes.append(code)
                    self._values.append(value)
        keys = shell_keys(self._values)
        self._indexes = [
            (view, chosen, PieceIndex([keys[index] for index in chosen]))
            for view, chosen in enumerate(indexes)
            if chosen
        ]
        self._whitelist = precedence and self._is_whitelist(rules)

    def _is_whitelist(self, rules: RuleLines) -> bool:
        disallows = [dis for dis, value in rules if value]
        if all(disallows):
            return False
        return not any(disallows) or any(
            self._pattern(index).explicit is None
            for index, code in enumerate(self._codes)
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
            ranked = sorted(self._match_codes(views), key=_precedence_key)
            if ranked:
                return ranked[0][0]
            return DENIED if self._whitelist else -1
        equal = (self._explicit.get(key) for key in _explicit_keys(views))
        first = min((code for code in equal if code is not None), default=None)
        for code, _ in self._match_codes(views, first):
            return code
        return -1 if first is None else first

    def _match_codes(
        self, views: _ThreeViews, end: int | None = None
    ) -> Iterator[tuple[int, bool]]:
        """Yield the code of each indexed pattern before `end` that matches, and whether it is
        explicit."""
        for index in self._match_indexes(views, end):
            yield self._codes[index], self._parsed[index].explicit is not None

    def _match_indexes(self, views: _ThreeViews, end: int | None = None) -> Iterator[int]:
        """Yield the indexes of the patterns that match, in file order. Raises
        StepBudgetExceeded."""
        candidates: list[tuple[int, int, int]] = []
        joined_texts: dict[int, CountedText] = {}
        for view, listed, index in self._indexes:
            paths = views[view]
            text = joined_texts.get(id(paths))
            if text is None:
                joined = "\n".join([path.text for path in paths])
                text = joined_texts[id(paths)] = CountedText(joined, paths[0].budget)
            candidates += [(self._codes[listed[n]], listed[n], view) for n in index.find_in(text)]
        if not candidates:
            return
        whole = "".join([path.text for path in views[_BOTH]])
        path_bits, spend = char_bits(whole), views[_BOTH][0].budget.spend
        longest = max([len(path.text) for path in views[_BOTH]])
        for code, number, view in sorted(candidates):
            if end is not None and code > end:
                return
            spend(2)
            value = self._values[number]
            if _MORE_THAN_STARS.search(value):
                spend(_PARSE_STEPS * len(value))
                if longest > _MAX_PATTERN_PATH:
                    raise StepBudgetExceeded
            elif len(value) > 2 * longest + 3:
                continue  # needs more octets than there are, even if every second one is a star
            spend((len(value) >> 3) + (len(whole) * len(value) >> COMPARE_BITS))
            pattern = self._pattern(number)
            if pattern.min_length > longest or not pattern.may_match(path_bits):
                continue
            if any(map(pattern.matches, views[view])):
                yield number

    def _pattern(self, number: int) -> ShellPattern:
        """Return the parsed pattern, parsing it on first use."""
        pattern = self._parsed.get(number)
        if pattern is None:
            pattern = self._parsed[number] = ShellPattern(self._values[number], _MAX_PATTERN_PATH)
        return pattern

    def matching(self, path: str, rules: RuleLines, origin: str = "") -> list[tuple[int, int]]:
        """Return number and length of every rule that matches, the deciding one first."""
        if self._too_many_patterns:
            return []
        views = _path_views(path, StepBudget())
        hits = dict.fromkeys((k for k in _explicit_keys(views) if k in self._explicit), True)
        view_of = {number: view for view, listed, _ in self._indexes for number in listed}
        try:
            for number in self._match_indexes(views):
                key = f"{view_of[number]}{self._values[number]}"
                hits[key] = self._parsed[number].explicit is not None
        except StepBudgetExceeded:
            return []
        found = []
        for number, (dis, written) in enumerate(rules):
            for view, (value,), _ in _by_view([(written, 0)]):
                explicit = hits.get(f"{view}{value}")
                if explicit is not None:
                    found.append((number * 2 + (not dis), explicit))
                    break
        if self._precedence:
            found.sort(key=_precedence_key)
        return [(code >> 1, len(rules[code >> 1][1])) for code, _ in found]


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
    bare_decoded = decoded(bare)
    raw_forms: tuple[str, ...] = (path,)
    decoded_forms: tuple[str, ...] = (bare_decoded,)
    if mark:  # path and query are decoded separately, so nothing is decoded twice
        raw_forms, decoded_forms = (path, bare), (f"{bare_decoded}?{decoded(query)}", bare_decoded)
    raw_views = tuple([PathView(text, budget) for text in raw_forms])
    decoded_views = tuple([PathView(text, budget) for text in decoded_forms])
    if raw_views[0].text == decoded_views[0].text:
        return raw_views, raw_views, raw_views
    return raw_views, decoded_views, raw_views + decoded_views


def _explicit_keys(views: _ThreeViews) -> Iterator[str]:
    """Yield the keys under which plain values equal to the path are stored."""
    for view, paths in enumerate(views):
        for path in paths:
            yield f"{view}{path.text}"


def _by_view(
    coded: Sequence[tuple[str, int]],
) -> Iterator[tuple[int, Sequence[str], Sequence[int]]]:
    """Group values with their codes by the views of a path with which they are compared.

    A value without escapes is compared with both views; a value with escapes is compared as written
    with the raw view and decoded with the decoded one. Yield the view, the values and their codes.
    """
    if unescaped := [each for each in coded if each[0] and "%" not in each[0]]:
        values, codes = zip(*unescaped, strict=True)
        yield _BOTH, values, codes
    if escaped := [each for each in coded if "%" in each[0]]:
        values, codes = zip(*escaped, strict=True)
        yield _RAW, values, codes
        yield _DECODED, decoded_patterns(values), codes
