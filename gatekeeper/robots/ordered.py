"""The readings that go by file order: 1994, 1996 (and 1.x of the 2.0 draft), and 2.0."""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

from gatekeeper import urls
from gatekeeper.errors import InvalidURL
from gatekeeper.robots import normal
from gatekeeper.robots.lines import Spans, octets
from gatekeeper.robots.model import Dialect
from gatekeeper.robots.patterns import Places, ShellPattern, present, shell_key
from gatekeeper.robots.rulesets import DENIED, ROBOTS_TXT, Numbered, rules_in
from gatekeeper.robots.trie import LastPlaces, Meter, PieceIndex, TooDear
from gatekeeper.urls import MAX_URL

__all__ = ["PrefixesInOrder", "ShellRules"]


class PrefixesInOrder:
    """1996: the first line whose path begins the URL's decides (R96-15, R96-18).

    With `disallow_only` it is 1994, where Allow is an unknown header (R94-08) and any
    Disallow that matches forbids (R94-15). No wildcards (R94-18, R96-21); an empty value does
    nothing (R94-17, R96-20); escapes by R96-17, which 1994 leaves open (R94-24).

    The prefixes lie sorted as in `LongestMatch`; an entry is the first rule among its key and
    the keys that the key begins with.
    """

    __slots__ = ("_absolute", "_entries", "_keys", "_links", "_only", "dialect", "spans")

    def __init__(self, text: str, spans: Spans, *, disallow_only: bool = False) -> None:
        self.dialect = Dialect.R1994 if disallow_only else Dialect.R1996
        self.spans = spans
        self._only = disallow_only
        rules = rules_in(text, spans)
        codes: dict[str, int] = {}
        absolute: list[tuple[str, str, int]] = []
        for number, rule in enumerate(rules):
            if not rule.value or (disallow_only and rule.allow):
                continue
            code = number * 2 + rule.allow
            if disallow_only and (found := _absolute(rule.value)):
                absolute.append((*found, code))
            else:
                codes.setdefault(normal.decoded(rule.value), code)
        self._absolute = tuple(absolute)
        self._link(codes)

    def _link(self, codes: dict[str, int]) -> None:
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
        self._keys = tuple(keys)
        self._links = array("i", links)
        self._entries = array("I", entries)

    def allows(self, path: str) -> bool:
        """The verdict alone; where the origin is unknown, a rule for any origin counts."""
        return self.decide(path) & 1 == 1 or path == ROBOTS_TXT

    def decide(self, path: str, origin: str = "") -> int:
        """The code of the deciding rule, or -1. `origin`: where the path was asked for."""
        path = normal.decoded(octets(path))
        place = bisect_right(self._keys, path) - 1
        while place >= 0 and not path.startswith(self._keys[place]):
            place = self._links[place]
        code = self._entries[place] if place >= 0 else -1
        for where, prefix, other in self._absolute:
            if path.startswith(prefix) and (not origin or where == origin):
                return other if code < 0 else min(code, other)
        return code

    def matching(self, path: str, rules: list[Numbered], origin: str = "") -> list[tuple[int, int]]:
        """Number and length of every rule that matches, the deciding one first."""
        path = normal.decoded(octets(path))
        found = []
        for number, rule in enumerate(rules):
            if not rule.value or (self._only and rule.allow):
                continue
            absolute = _absolute(rule.value) if self._only else None
            if absolute:
                prefix = None if origin and absolute[0] != origin else absolute[1]
            else:
                prefix = normal.decoded(rule.value)
            if prefix is not None and path.startswith(prefix):
                found.append((number, len(prefix)))
        return found


def _absolute(value: str) -> tuple[str, str] | None:
    """Origin and path of a value that is a whole URL (R94-26)."""
    if "://" not in value:
        return None
    try:
        origin, path = urls.split(value)
    except InvalidURL:
        return None
    return origin, normal.decoded(path)


_RAW, _DECODED, _BOTH = range(3)
_STEPS = 2_048
"""Patterns that are looked at for one path; past that the answer is no."""
_TRY = 2
"""As how many more a pattern counts that is tried, however short."""
_LONG = 4
"""And one more for every two to that power characters that it needs."""
_SPECIAL = re.compile(r"[*?\[\\]").search


class _Listed(NamedTuple):
    """A pattern of a set, as it is kept until a path comes that it may match."""

    code: int
    value: str
    which: int
    """The view of a path that it is compared with."""


class ShellRules:
    """2.0: explicit matches and shell patterns (V2-16, V2-17), by default in file order.

    With `precedence` it is the struck text (V2-21): an explicit Allow, then any Disallow, then
    the pattern Allows, which are a whitelist where there are any; Allows alone always are one
    (V2-22). A rule matches the path with or without its query (V2-35), as it came or decoded
    (V2-36). An empty value matches nothing (V2-23).

    A pattern is listed under a piece that it needs, and read only for a path that has it.
    """

    __slots__ = (
        "_by_key",
        "_explicit",
        "_keys",
        "_listed",
        "_precedence",
        "_read",
        "_whitelist",
        "spans",
    )

    dialect = Dialect.V2
    spans: Spans

    def __init__(self, text: str, spans: Spans, *, precedence: bool = False) -> None:
        self.spans = spans
        self._precedence = precedence
        self._read: dict[int, ShellPattern] = {}
        rules = rules_in(text, spans, v2=True)
        # Of two equal rules the first decides, whichever the order.
        firsts: dict[Numbered, int] = {}
        for number, rule in enumerate(rules):
            firsts.setdefault(rule, number)
        self._explicit: dict[str, int] = {}
        self._listed: list[_Listed] = []
        for rule, number in firsts.items():
            code = number * 2 + rule.allow
            for which, value in _readings_of(rule.value):
                if not precedence and not _SPECIAL(value):
                    self._explicit.setdefault(f"{which}{value}", code)
                else:
                    self._listed.append(_Listed(code, value, which))
        self._by_key: dict[tuple[int, str], list[int]] = {}
        for index, listed in enumerate(self._listed):
            key = listed.which, shell_key(listed.value)
            self._by_key.setdefault(key, []).append(index)
        self._keys = tuple(
            PieceIndex(key for view, key in self._by_key if view == which)
            for which in (_RAW, _DECODED, _BOTH)
        )
        self._whitelist = precedence and self._is_whitelist(rules)

    def _is_whitelist(self, rules: list[Numbered]) -> bool:
        said = [rule for rule in rules if rule.value]
        if not any(rule.allow for rule in said):
            return False
        return all(rule.allow for rule in said) or any(
            self._pattern(index, 0).explicit is None
            for index, listed in enumerate(self._listed)
            if listed.code & 1
        )

    def allows(self, path: str) -> bool:
        """The verdict alone."""
        return self.decide(path) & 1 == 1 or path == ROBOTS_TXT

    def decide(self, path: str) -> int:
        """The code of the deciding rule; -1 or DENIED: allowed or denied by none."""
        try:
            return self._decide(_views(path))
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
            yield self._listed[index].code, self._read[index].explicit is not None

    def _matching(self, views: _ThreeViews, end: int | None = None) -> Iterator[int]:
        """The places in the list of those that match, in file order. Raises TooDear."""
        texts = ["\n".join(place.text for place in seen) for seen in views]
        here = present("".join(texts))
        room = max(map(len, texts))
        likely: list[int] = []
        for which, text in enumerate(texts):
            for key in self._keys[which].found(text, LastPlaces(text)):
                likely += self._by_key[which, key]
        meter = Meter(_STEPS)
        for index in sorted(likely):
            code, _, which = self._listed[index]
            if end is not None and code > end:
                return
            pattern = self._pattern(index, room)
            meter.spend(1)
            if pattern.least > room or not pattern.may_match(here):
                continue
            meter.spend(_TRY + (pattern.least >> _LONG))
            if any(map(pattern.matches, views[which])):
                yield index

    def _pattern(self, index: int, room: int) -> ShellPattern:
        """The pattern, read the first time that it is asked for, for paths of that length."""
        pattern = self._read.get(index)
        if pattern is None or MAX_URL < pattern.least <= room:
            longest = max(room, MAX_URL)
            pattern = self._read[index] = ShellPattern(self._listed[index].value, longest)
        return pattern

    def matching(self, path: str, rules: list[Numbered]) -> list[tuple[int, int]]:
        """Number and length of every rule that matches, the deciding one first."""
        views = _views(path)
        hits = dict.fromkeys((k for k in _explicit_keys(views) if k in self._explicit), True)
        try:
            for index in self._matching(views):
                _, value, which = self._listed[index]
                hits[f"{which}{value}"] = self._read[index].explicit is not None
        except TooDear:
            return []
        found = []
        for number, rule in enumerate(rules):
            for which, value in _readings_of(rule.value):
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


def _views(path: str) -> _ThreeViews:
    """The path as it came, decoded, and both; each with and without its query."""
    bare, mark, _ = path.partition("?")
    forms = (path, bare) if mark else (path,)
    raw = tuple(Places(octets(form)) for form in forms)
    plain = tuple(Places(normal.decoded(octets(form))) for form in forms)
    if raw[0].text == plain[0].text:
        return raw, raw, raw
    return raw, plain, raw + plain


def _explicit_keys(views: _ThreeViews) -> Iterator[str]:
    """What a plain value has to be kept as for the path to be equal to it."""
    for which, seen in enumerate(views):
        for place in seen:
            yield f"{which}{place.text}"


def _readings_of(value: str) -> Iterator[tuple[int, str]]:
    """How a value is read: once for both views of a path, or once for each if it has escapes."""
    if not value:
        return
    if "%" not in value:
        yield _BOTH, value
    else:
        yield _RAW, value
        yield _DECODED, normal.decoded_pattern(value)
