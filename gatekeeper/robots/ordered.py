"""The readings that go by file order: 1994, 1996 (and 1.x of the 2.0 draft), and 2.0."""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gatekeeper import urls
from gatekeeper.errors import InvalidURL
from gatekeeper.robots import normal
from gatekeeper.robots.lines import Spans, octets, shown
from gatekeeper.robots.model import Dialect
from gatekeeper.robots.patterns import Places, ShellPattern, present, shell_keys
from gatekeeper.robots.pieces import COMPARED, Meter, PieceIndex, Text, TooDear
from gatekeeper.robots.rulesets import DENIED, ROBOTS_FILE, Numbered, lines_in

__all__ = ["PrefixesInOrder", "ShellRules"]


_MAX_ODD = 100
"""Origins in the rules of one set that are taken apart whole; beyond, an oddly written one is
taken for the one that is asked about, which is the stricter reading."""
_PLAIN_ORIGIN = re.compile(r"https?://[a-z0-9_-]+(?:\.[a-z0-9_-]+)*+(?::[0-9]+)?+\Z").match
_AUTHORITY_END = re.compile("[/?]").search


class _Prefixes(NamedTuple):
    """Prefixes in order, each with the place of the longest one that it begins with, and the
    code of the first rule among all that it begins with, itself included."""

    keys: tuple[str, ...]
    links: array[int]
    codes: array[int]

    def first(self, path: str) -> int:
        """The code of the first rule whose prefix begins the path, or -1."""
        place = bisect_right(self.keys, path) - 1
        while place >= 0 and not path.startswith(self.keys[place]):
            place = self.links[place]
        return self.codes[place] if place >= 0 else -1


class PrefixesInOrder:
    """1996: the first line whose path begins the URL's decides (R96-15, R96-18).

    With `disallow_only` it is 1994, where Allow is an unknown header (R94-08) and any
    Disallow that matches forbids (R94-15); a rule may be a whole URL there, and is one for that
    origin only (R94-26). No wildcards (R94-18, R96-21); an empty value does nothing (R94-17,
    R96-20); escapes by R96-17, which 1994 leaves open (R94-24).
    """

    __slots__ = ("_absolute", "_codes", "_known", "_only", "dialect", "spans")

    def __init__(self, text: str, spans: Spans, *, disallow_only: bool = False) -> None:
        self.dialect = Dialect.R1994 if disallow_only else Dialect.R1996
        self.spans = spans
        self._only = disallow_only
        codes: dict[str, int] = {}
        absolute: list[tuple[str, str, int]] = []
        for number, (dis, value) in enumerate(lines_in(text, spans)):
            if not value or (disallow_only and not dis):
                continue
            code = number * 2 + (not dis)
            if disallow_only and (found := _absolute(value)):
                absolute.append((*found, code))
            else:
                codes.setdefault(normal.decoded(value), code)
        self._absolute = tuple(absolute)
        self._codes = codes if absolute else {}
        self._known: tuple[str, _Prefixes] = ("", _linked(codes))
        """The last origin that was asked about, and the prefixes that hold there."""
        if absolute:
            self._known = ("", self._at(""))

    def allows(self, path: str, origin: str = "") -> bool:
        """The verdict alone; where the origin is unknown, a rule for any origin counts."""
        return self.decide(path, origin) & 1 == 1

    def decide(self, path: str, origin: str = "") -> int:
        """The code of the deciding rule, -1 or ROBOTS_FILE. `origin`: where it was asked for."""
        if normal.is_robots_txt(path):
            return ROBOTS_FILE
        known, prefixes = self._known
        if self._absolute and known != origin:
            prefixes = self._at(origin)
            self._known = (origin, prefixes)
        return prefixes.first(normal.decoded(octets(path)))

    def _at(self, origin: str) -> _Prefixes:
        """The prefixes that hold at an origin; the empty one stands for any."""
        codes = dict(self._codes)
        same = _SameOrigin(origin)
        for written, prefix, code in self._absolute:
            if same(written):
                codes[prefix] = min(code, codes.get(prefix, code))
        return _linked(codes)

    def matching(self, path: str, rules: list[Numbered], origin: str = "") -> list[tuple[int, int]]:
        """Number and length of every rule that matches, the deciding one first."""
        path = normal.decoded(octets(path))
        same = _SameOrigin(origin)
        found = []
        for number, rule in enumerate(rules):
            if not rule.value or (self._only and rule.allow):
                continue
            absolute = _absolute(rule.value) if self._only else None
            prefix = absolute[1] if absolute else normal.decoded(rule.value)
            if path.startswith(prefix) and (absolute is None or same(absolute[0])):
                found.append((number, len(prefix)))
        return found


def _linked(codes: dict[str, int]) -> _Prefixes:
    keys = sorted(codes)
    links: list[int] = []
    above: list[int] = []
    entries: list[int] = []
    for place, key in enumerate(keys):
        while above and not key.startswith(keys[above[-1]]):
            above.pop()
        up = above[-1] if above else -1
        entries.append(min(codes[key], entries[up]) if above else codes[key])
        links.append(up)
        above.append(place)
    return _Prefixes(tuple(keys), array("i", links), array("I", entries))


def _absolute(value: str) -> tuple[str, str] | None:
    """Origin as written, and path, of a value that is a whole URL (R94-26)."""
    if value[:7].lower() != "http://" and value[:8].lower() != "https://":
        return None
    found = _AUTHORITY_END(value, 8)
    end = found.start() if found else len(value)
    path = value[end:]
    return value[:end], normal.decoded(path if path[:1] == "/" else "/" + path)


class _SameOrigin:
    """Whether an origin as it is written in a rule is the one that is asked about."""

    def __init__(self, origin: str) -> None:
        self._origin = origin
        self._known: dict[str, bool] = {}
        self._odd = 0

    def __call__(self, written: str) -> bool:
        same = self._known.get(written)
        if same is None:
            same = self._known[written] = not self._origin or self._read(written)
        return same

    def _read(self, written: str) -> bool:
        if _PLAIN_ORIGIN(written):
            default = ":443" if written[:6] == "https:" else ":80"
            return written.removesuffix(default) == self._origin
        self._odd += 1
        if self._odd > _MAX_ODD:
            return True
        try:
            return urls.split(shown(written) + "/")[0] == self._origin
        except InvalidURL:
            return False


_RAW, _DECODED, _BOTH = range(3)
_LONGEST = 8_192
"""Octets of a path up to which patterns with a `?` or a class are tried; beyond, where one of
them might match, the answer is no. Servers refuse longer request lines, too."""
_MAX_PATTERNS = 10_000
"""Patterns that a set may hold; of one with more every path is denied. People write some dozens,
and making more of them ready takes longer than any answer may."""
_READ = 3
"""Steps as which reading an octet of such a pattern counts."""
_SPECIAL = re.compile(r"[*?\[\\]").search
_MORE_THAN_STARS = re.compile(r"[?\[\\]").search


class ShellRules:
    """2.0: explicit matches and shell patterns (V2-16, V2-17), by default in file order.

    With `precedence` it is the struck text (V2-21): an explicit Allow, then any Disallow, then
    the pattern Allows, which are a whitelist where there are any; Allows alone always are one
    (V2-22). A rule matches the path with or without its query (V2-35), as it came or decoded
    (V2-36). An empty value matches nothing (V2-23).

    A pattern is listed under a piece that it needs, and read only for a path that has it. What
    an answer costs is counted as in `pieces`, reading a pattern each time that it is needed,
    whether it was read before or not; past the bound the answer is DENIED. So it is for every path
    of a set of more than `_MAX_PATTERNS`.
    """

    __slots__ = (
        "_codes",
        "_explicit",
        "_indexes",
        "_precedence",
        "_read",
        "_refused",
        "_values",
        "_whitelist",
        "spans",
    )

    dialect = Dialect.V2
    spans: Spans

    def __init__(self, text: str, spans: Spans, *, precedence: bool = False) -> None:
        self.spans = spans
        self._precedence = precedence
        self._read: dict[int, ShellPattern] = {}
        rules = lines_in(text, spans, v2=True)
        self._whitelist = False
        self._indexes: list[tuple[int, list[int], PieceIndex]] = []
        self._explicit: dict[str, int] = {}
        self._codes: list[int] = []
        """Of the patterns that are no plain texts."""
        self._values: list[str] = []
        numbers: tuple[list[int], list[int], list[int]] = [], [], []
        # Of two equal rules the first decides, whichever the order.
        firsts = dict(zip(reversed(rules), range(len(rules) - 1, -1, -1), strict=True))
        given = [(value, number * 2 + (not dis)) for (dis, value), number in firsts.items()]
        patterns = [value for value, _ in given if precedence or _SPECIAL(value)]
        self._refused = len(patterns) > _MAX_PATTERNS
        if self._refused:
            return
        for which, values, codes in _readings_of(given):
            for value, code in zip(values, codes, strict=True):
                if not precedence and not _SPECIAL(value):
                    key = f"{which}{value}"
                    self._explicit[key] = min(code, self._explicit.get(key, code))
                else:
                    numbers[which].append(len(self._codes))
                    self._codes.append(code)
                    self._values.append(value)
        keys = shell_keys(self._values)
        self._indexes = [
            (which, listed, PieceIndex([keys[number] for number in listed]))
            for which, listed in enumerate(numbers)
            if listed
        ]
        self._whitelist = precedence and self._is_whitelist(rules)

    def _is_whitelist(self, rules: list[tuple[str, str]]) -> bool:
        said = [dis for dis, value in rules if value]
        if all(said):
            return False
        return not any(said) or any(
            self._pattern(index).explicit is None
            for index, code in enumerate(self._codes)
            if code & 1
        )

    def allows(self, path: str) -> bool:
        """The verdict alone."""
        return self.decide(path) & 1 == 1

    def decide(self, path: str) -> int:
        """The code of the deciding rule; -1, DENIED or ROBOTS_FILE: none decides."""
        if normal.is_robots_txt(path):
            return ROBOTS_FILE
        if self._refused:
            return DENIED
        try:
            return self._decide(_views(path, Meter()))
        except TooDear:
            return DENIED

    def _decide(self, views: _ThreeViews) -> int:
        if self._precedence:
            ranked = sorted(self._matched(views), key=_precedence)
            if ranked:
                return ranked[0][0]
            return DENIED if self._whitelist else -1
        equal = (self._explicit.get(key) for key in _explicit_keys(views))
        first = min((code for code in equal if code is not None), default=None)
        for code, _ in self._matched(views, first):
            return code
        return -1 if first is None else first

    def _matched(self, views: _ThreeViews, end: int | None = None) -> Iterator[tuple[int, bool]]:
        """Code, and whether it is explicit, of each listed pattern that matches, before `end`."""
        for index in self._matching(views, end):
            yield self._codes[index], self._read[index].explicit is not None

    def _matching(self, views: _ThreeViews, end: int | None = None) -> Iterator[int]:
        """The places in the list of those that match, in file order. Raises TooDear."""
        likely: list[tuple[int, int, int]] = []
        texts: dict[int, Text] = {}
        for which, listed, index in self._indexes:
            seen = views[which]
            text = texts.get(id(seen))
            if text is None:
                joined = "\n".join([place.text for place in seen])
                text = texts[id(seen)] = Text(joined, seen[0].meter)
            likely += [(self._codes[listed[n]], listed[n], which) for n in index.found(text)]
        if not likely:
            return
        whole = "".join([place.text for place in views[_BOTH]])
        here, spend = present(whole), views[_BOTH][0].meter.spend
        room = max([len(place.text) for place in views[_BOTH]])
        for code, number, which in sorted(likely):
            if end is not None and code > end:
                return
            spend(2)
            value = self._values[number]
            if _MORE_THAN_STARS(value):
                spend(_READ * len(value))
                if room > _LONGEST:
                    raise TooDear
            elif len(value) > 2 * room + 3:
                continue  # more octets than there are, even if every second one is a star
            spend((len(value) >> 3) + (len(whole) * len(value) >> COMPARED))
            pattern = self._pattern(number)
            if pattern.least > room or not pattern.may_match(here):
                continue
            if any(map(pattern.matches, views[which])):
                yield number

    def _pattern(self, number: int) -> ShellPattern:
        """The pattern, read the first time that it is asked for."""
        pattern = self._read.get(number)
        if pattern is None:
            pattern = self._read[number] = ShellPattern(self._values[number], _LONGEST)
        return pattern

    def matching(self, path: str, rules: list[Numbered]) -> list[tuple[int, int]]:
        """Number and length of every rule that matches, the deciding one first."""
        if self._refused:
            return []
        views = _views(path, Meter())
        hits = dict.fromkeys((k for k in _explicit_keys(views) if k in self._explicit), True)
        which_of = {number: which for which, listed, _ in self._indexes for number in listed}
        try:
            for number in self._matching(views):
                key = f"{which_of[number]}{self._values[number]}"
                hits[key] = self._read[number].explicit is not None
        except TooDear:
            return []
        found = []
        for number, rule in enumerate(rules):
            for which, (value,), _ in _readings_of([(rule.value, 0)]):
                explicit = hits.get(f"{which}{value}")
                if explicit is not None:
                    found.append((number * 2 + rule.allow, explicit))
                    break
        if self._precedence:
            found.sort(key=_precedence)
        return [(code >> 1, len(rules[code >> 1].value)) for code, _ in found]


_Views = tuple[Places, ...]
_ThreeViews = tuple[_Views, _Views, _Views]


def _precedence(matched: tuple[int, bool]) -> tuple[int, int]:
    """Explicit Allow, Disallow, pattern Allow (V2-21); within each the file's order."""
    code, explicit = matched
    return (0 if explicit else 2) if code & 1 else 1, code


def _views(path: str, meter: Meter) -> _ThreeViews:
    """The path as it came, decoded, and both; each with and without its query."""
    path = octets(path)
    bare, mark, query = path.partition("?")
    decoded = normal.decoded(bare)
    forms: tuple[str, ...] = (path,)
    plainer: tuple[str, ...] = (decoded,)
    if mark:  # no escape holds a `?`: nothing is decoded twice
        forms, plainer = (path, bare), (f"{decoded}?{normal.decoded(query)}", decoded)
    raw = tuple([Places(form, meter) for form in forms])
    plain = tuple([Places(form, meter) for form in plainer])
    if raw[0].text == plain[0].text:
        return raw, raw, raw
    return raw, plain, raw + plain


def _explicit_keys(views: _ThreeViews) -> Iterator[str]:
    """What a plain value has to be kept as for the path to be equal to it."""
    for which, seen in enumerate(views):
        for place in seen:
            yield f"{which}{place.text}"


def _readings_of(
    given: Sequence[tuple[str, int]],
) -> Iterator[tuple[int, Sequence[str], Sequence[int]]]:
    """How values, each with a code, are read: once for both views of a path, or once for each
    if they have escapes. Gives which view, the values, their codes."""
    if plain := [each for each in given if each[0] and "%" not in each[0]]:
        values, codes = zip(*plain, strict=True)
        yield _BOTH, values, codes
    if escaped := [each for each in given if "%" in each[0]]:
        values, codes = zip(*escaped, strict=True)
        yield _RAW, values, codes
        yield _DECODED, normal.decoded_patterns(values), codes
