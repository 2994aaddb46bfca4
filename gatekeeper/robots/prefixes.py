"""Sets of RFC 9309 whose rules are plain prefixes, or that have none: most of them."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

from gatekeeper.robots import normal
from gatekeeper.robots.normal import ROBOTS_TXT
from gatekeeper.robots.rulesets import ROBOTS_FILE
from gatekeeper.robots.shapes import SortedRules

__all__ = ["HEAD", "Compiled", "Linked", "Suspects", "linked", "packed", "prefixes_only"]

_FEW = 24
"""Forbidden prefixes up to which trying each, in one call, is faster than bisection."""
HEAD = 2
"""A bit of a link: the key, or one that it begins with, is the head of a wildcard pattern."""


Suspects = tuple[tuple[str, ...], tuple[str, ...]]
"""Prefixes and pieces: a path in its normal form that begins with none of the former and holds
none of the latter is allowed."""


class Compiled(Protocol):
    """Rules made ready. Takes any path that begins with `/`, in whatever form it comes."""

    def allows(self, path: str) -> bool:
        """The verdict alone."""

    def decide(self, path: str) -> int:
        """The code of the deciding rule, -1, DENIED or ROBOTS_FILE (see `rulesets`)."""

    def suspects(self) -> Suspects | None:
        """What to look for before asking; None: ask."""


class _NoRules:
    """Everything is allowed."""

    __slots__ = ()

    @staticmethod
    def allows(path: str) -> bool:
        return True

    @staticmethod
    def decide(path: str) -> int:
        if path == ROBOTS_TXT or ("%" in path and normal.is_robots_txt(path)):
            return ROBOTS_FILE
        return -1

    @staticmethod
    def suspects() -> Suspects:
        return (), ()


_NO_RULES = _NoRules()


class _FewForbidden:
    """Some prefixes, all of them forbidden. Keys are sorted; each has the code of its rule."""

    __slots__ = ("_codes", "_keys")

    def __init__(self, keys: tuple[str, ...], codes: Sequence[int]) -> None:
        self._keys = keys
        self._codes = codes

    def allows(self, path: str) -> bool:
        if "%" in path:
            path = _plainer(path)
        return not path.startswith(self._keys) or path == ROBOTS_TXT

    def decide(self, path: str) -> int:
        if "%" in path:
            path = _plainer(path)
        if path == ROBOTS_TXT:
            return ROBOTS_FILE
        keys = self._keys
        if not path.startswith(keys):
            return -1
        # Keys that the path begins with stand before it, the longest one last.
        place = bisect_right(keys, path) - 1
        while not path.startswith(keys[place]):
            place -= 1
        return self._codes[place] - 1

    def suspects(self) -> Suspects:
        return self._keys, ()


class _Prefixes:
    """Any number of prefixes: see `linked`. A code is kept plus one, so that none is 0."""

    __slots__ = ("_codes", "_keys", "_links")

    def __init__(self, keys: tuple[str, ...], links: Sequence[int], codes: Sequence[int]) -> None:
        self._keys = keys
        self._links = links
        self._codes = codes

    def allows(self, path: str) -> bool:
        if "%" in path:
            path = _plainer(path)
        keys = self._keys
        place = bisect_right(keys, path) - 1
        while not path.startswith(keys[place]):
            place = self._links[place] >> 2
        return self._links[place] & 1 == 1 or path == ROBOTS_TXT

    def decide(self, path: str) -> int:
        if "%" in path:
            path = _plainer(path)
        if path == ROBOTS_TXT:
            return ROBOTS_FILE
        keys = self._keys
        place = bisect_right(keys, path) - 1
        while not path.startswith(keys[place]):
            place = self._links[place] >> 2
        return self._codes[place] - 1

    def suspects(self) -> Suspects:
        forbid = zip(self._keys, self._links, strict=True)
        return tuple(key for key, link in forbid if not link & 1), ()


def prefixes_only(rules: SortedRules) -> Compiled | None:
    """The set made ready, if it has no other rules and no escapes in them."""
    if rules.wild or rules.exact or rules.escapes or rules.twofold:
        return None
    mask = (1 << rules.shift) - 1
    ruled = rules.prefixes[""] & mask  # by a lone `*`, which matches what the empty key does
    if len(rules.prefixes) == 1 and not ruled:
        return _NO_RULES
    keys, links, entries = linked(rules, ())
    codes = packed(
        [
            (rules.count - (entry & mask)) * 2 + (entry >> rules.shift & 1) + 1
            if entry & mask
            else 0
            for entry in entries
        ]
    )
    if len(keys) - 1 <= _FEW and not ruled and not any(link & 1 for link in links[1:]):
        return _FewForbidden(keys[1:], codes[1:])
    return _Prefixes(keys, packed(links), codes)


class Linked(NamedTuple):
    """Prefixes in order, each with a link and its entry.

    The longest key that a path begins with is found by bisection, and from a neighbour that
    shares only a part, up the links to the keys that it begins with. The first key is empty,
    begins every path and allows (RFC-19). A link is the place of the longest key that the key
    begins with, and two bits: HEAD, and whether the key's rule allows.
    """

    keys: tuple[str, ...]
    links: list[int]
    entries: list[int]


def linked(rules: SortedRules, heads: Collection[str]) -> Linked:
    """The prefixes of the rules; `heads` are keys too, though no rule need stand there."""
    prefixes = rules.prefixes
    for head in heads:
        prefixes.setdefault(head, 0)
    inherit = rules.inherit or bool(heads)
    keys = sorted(prefixes)
    entries = [prefixes[key] for key in keys]
    links = [entries[0] >> rules.shift & 1]
    above: list[tuple[int, str]] = []
    up, top = 0, ""  # the last key, then the keys that it begins with, the longest first
    for place, key in enumerate(keys):
        if not place:
            continue
        while not key.startswith(top):
            up, top = above.pop()
        # `/a*` is longer than its key, and the head of a pattern is no rule at all.
        if inherit and entries[up] > entries[place]:
            entries[place] = entries[up]
        links.append(up << 2 | links[up] & HEAD | entries[place] >> rules.shift & 1)
        if heads and key in heads:
            links[place] |= HEAD
        above.append((up, top))
        up, top = place, key
    return Linked(tuple(keys), links, entries)


def packed(numbers: Sequence[int]) -> Sequence[int]:
    """The numbers in as few bytes as hold them."""
    most = max(numbers, default=0)
    if most < 1 << 8:
        return bytes(numbers)
    return array("H" if most < 1 << 16 else "I" if most < 1 << 32 else "Q", numbers)


def _plainer(path: str) -> str:
    """The path in the only respect that matters to a set without escapes: `%61` is an `a`."""
    return path if normal.unescaped(path) else normal.rfc_path(path)
