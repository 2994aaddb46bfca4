"""The readings that go by file order: 1994, 1996 (and 1.x of the 2.0 draft), and 2.0."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator

from gatekeeper import urls
from gatekeeper.errors import InvalidURL
from gatekeeper.robots import normal
from gatekeeper.robots.lines import Spans, octets
from gatekeeper.robots.model import Dialect
from gatekeeper.robots.patterns import Places, ShellPattern, present
from gatekeeper.robots.rulesets import DENIED, ROBOTS_TXT, Numbered, rules_in
from gatekeeper.robots.trie import LastPlaces, PieceIndex

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


class ShellRules:
    """2.0: explicit matches and shell patterns (V2-16, V2-17), by default in file order.

    With `precedence` it is the struck text (V2-21): an explicit Allow, then any Disallow, then
    the pattern Allows, which are a whitelist where there are any; Allows alone always are one
    (V2-22). A rule matches the path with or without its query (V2-35), as it came or decoded
    (V2-36). An empty value matches nothing (V2-23).
    """

    __slots__ = ("_by_key", "_explicit", "_keys", "_patterns", "_precedence", "_whitelist", "spans")

    dialect = Dialect.V2
    spans: Spans

    def __init__(self, text: str, spans: Spans, *, precedence: bool = False) -> None:
        self.spans = spans
        self._precedence = precedence
        rules = rules_in(text, spans, v2=True)
        self._explicit: dict[str, int] = {}
        patterns: list[tuple[int, ShellPattern, int]] = []
        for number, rule in enumerate(rules):
            for which, pattern in _patterns(rule.value):
                code = number * 2 + rule.allow
                if pattern.explicit is None or precedence:
                    patterns.append((code, pattern, which))
                else:
                    self._explicit.setdefault(f"{which}{pattern.explicit}", code)
        self._file(patterns)
        allows = [rule.value for rule in rules if rule.allow and rule.value]
        self._whitelist = bool(allows) and (
            any(each[1].explicit is None for each in patterns if each[0] & 1)
            or all(rule.allow or not rule.value for rule in rules)
        )

    def _file(self, patterns: list[tuple[int, ShellPattern, int]]) -> None:
        """Patterns under the piece that they need; each with the rarest class that it needs."""
        common = Counter(bits for _, pattern, _ in patterns for bits in pattern.classes)
        self._patterns = tuple(
            (code, min(pattern.classes, key=common.__getitem__, default=-1), pattern, which)
            for code, pattern, which in patterns
        )
        self._by_key: dict[tuple[int, str], list[int]] = {}
        for index, (_, pattern, which) in enumerate(patterns):
            self._by_key.setdefault((which, pattern.key), []).append(index)
        self._keys = tuple(
            PieceIndex(key for view, key in self._by_key if view == which)
            for which in (_RAW, _DECODED, _BOTH)
        )

    def allows(self, path: str) -> bool:
        """The verdict alone."""
        return self.decide(path) & 1 == 1 or path == ROBOTS_TXT

    def decide(self, path: str) -> int:
        """The code of the deciding rule; -1 or -2: allowed or denied by none."""
        views = _views(path)
        if self._precedence:
            ranked = sorted(self._matched(views), key=_precedence)
            if ranked:
                return ranked[0][0]
            return DENIED if self._whitelist else -1
        first = None
        for which, seen in enumerate(views):
            for place in seen:
                code = self._explicit.get(f"{which}{place.text}")
                if code is not None and (first is None or code < first):
                    first = code
        for code, _ in self._matched(views, first):
            return code
        return -1 if first is None else first

    def _matched(
        self, views: tuple[_Views, _Views, _Views], end: int | None = None
    ) -> Iterator[tuple[int, bool]]:
        """Code, and whether it is explicit, of each listed pattern that matches, before `end`."""
        texts = ["\n".join(place.text for place in seen) for seen in views]
        here = present("".join(texts))
        likely: list[int] = []
        for which, text in enumerate(texts):
            for key in self._keys[which].found(text, LastPlaces(text)):
                likely += self._by_key[which, key]
        for index in sorted(likely):
            code, rarest, pattern, which = self._patterns[index]
            if end is not None and code > end:
                return
            if rarest & here and any(map(pattern.matches, views[which])):
                yield code, pattern.explicit is not None

    def matching(self, path: str, rules: list[Numbered]) -> list[tuple[int, int]]:
        """Number and length of every rule that matches, the deciding one first."""
        views = _views(path)
        found = []
        for number, rule in enumerate(rules):
            for which, pattern in _patterns(rule.value):
                if any(map(pattern.matches, views[which])):
                    code = number * 2 + rule.allow
                    found.append((code, pattern.explicit is not None))
                    break
        if self._precedence:
            found.sort(key=_precedence)
        return [(code >> 1, len(rules[code >> 1].value)) for code, _ in found]


_Views = tuple[Places, ...]


def _precedence(matched: tuple[int, bool]) -> tuple[int, int]:
    """Explicit Allow, Disallow, pattern Allow (V2-21); within each the file's order."""
    code, explicit = matched
    return (0 if explicit else 2) if code & 1 else 1, code


def _views(path: str) -> tuple[_Views, _Views, _Views]:
    """The path as it came, decoded, and both; each with and without its query."""
    bare, mark, _ = path.partition("?")
    forms = (path, bare) if mark else (path,)
    raw = tuple(Places(octets(form)) for form in forms)
    plain = tuple(Places(normal.decoded(octets(form))) for form in forms)
    if raw[0].text == plain[0].text:
        return raw, raw, raw
    return raw, plain, raw + plain


def _patterns(value: str) -> Iterator[tuple[int, ShellPattern]]:
    """How a value is read: once for both views of a path, or once for each if it has escapes."""
    if not value:
        return
    if "%" not in value:
        yield _BOTH, ShellPattern(value)
    else:
        yield _RAW, ShellPattern(value)
        yield _DECODED, ShellPattern(normal.decoded_pattern(value))
