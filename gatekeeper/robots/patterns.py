"""Path patterns, each matched in time linear in the path for every piece of the pattern.

A site's pattern never becomes a regular expression: a piece between two stars is searched
for from where the piece before it ended, and the leftmost find is always good enough, so
there is nothing to come back to (RFC-29, V2-19).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeGuard

from gatekeeper.robots.pieces import Meter

__all__ = [
    "Places",
    "ShellPattern",
    "key_piece",
    "present",
    "shell_keys",
    "squeeze",
    "wild_match",
]

_MAPPED = 300
"""Steps as which it counts to find out where a class fits, beside one for each octet."""
_SHIFTED = 12
"""A shift counts as a step more for every two to that power octets."""
_STARS = re.compile(r"\*{2,}")


def squeeze(pattern: str) -> str:
    """Several stars in a row mean what one means."""
    return _STARS.sub("*", pattern) if "**" in pattern else pattern


def wild_match(pattern: str, path: str) -> bool:
    """An RFC 9309 pattern in normal form, squeezed, against a path in normal form (RFC-28, 29)."""
    head, star, rest = pattern.partition("*")
    if not star:
        return path == head[:-1] if head[-1:] == "$" else path.startswith(head)
    if not path.startswith(head):
        return False
    position, end = len(head), len(path)
    if rest[-1:] == "$":
        rest, _, last = rest[:-1].rpartition("*")
        end -= len(last)
        if end < position or not path.endswith(last):
            return False
        if not rest:
            return True
    if len(rest) - rest.count("*") > end - position:
        return False  # more octets than there are: spares cutting up a pattern of 500 KiB
    for piece in rest.split("*"):
        position = path.find(piece, position, end)
        if position < 0:
            return False
        position += len(piece)
    return True


def key_piece(pattern: str) -> str:
    """The longest literal piece of a wildcard pattern: a path without it can't match."""
    return max(pattern.removesuffix("$").split("*"), key=len)


def shell_keys(values: Sequence[str]) -> list[str]:
    """A literal piece of each shell pattern: a path without it can't match. Reads them roughly.

    Between the first `[` and the last `]` may stand a class, outside of them none.
    """
    if not values:
        return []
    roughly = "\x00".join(values).replace("?", "*").replace("\\", "*").split("\x00")
    return [
        max((_without_classes(value) if "[" in value else value).split("*"), key=len)
        for value in roughly
    ]


def _without_classes(value: str) -> str:
    start = value.find("[")
    return (value[:start] + "*" + value[max(value.rfind("]"), start) + 1 :]).replace("[", "*")


class ShellPattern:
    """A pattern of the 2.0 draft (V2-17): `*`, `?`, `[...]`, `[!...]`, `\\x`, both ends anchored.

    Without an unescaped special it is an explicit match, equal or nothing (V2-16).

    Between two stars stands a segment of fixed length. A segment of plain characters is
    searched for; any other one is tried at all places of the path at once, a bit a place, so
    that its cost is its length and never its length times the path's.
    """

    __slots__ = ("classes", "explicit", "key", "least", "segments")

    def __init__(self, value: str, longest: int) -> None:
        """`longest`: characters of the longest path that will be asked about.

        A pattern that needs more is read no further than to see that.
        """
        segments = _segments(value, longest)
        self.segments = segments
        self.explicit = segments[0] if len(segments) == 1 and _is_plain(segments[0]) else None
        """The one path that matches, of an explicit pattern."""
        self.least = sum(map(len, segments))
        """Characters that a matching path has at least."""
        self.key = max((s for s in segments if isinstance(s, str)), key=len, default="")
        """A plain piece that every matching path holds."""
        self.classes = frozenset(
            unit for s in segments if not isinstance(s, str) for unit in s if isinstance(unit, int)
        )
        """A bit an octet: of every one of them, each matching path has a member."""

    def may_match(self, here: int) -> bool:
        """Some member of each class stands in the path, whose characters are given as bits."""
        return all(bits & here for bits in self.classes)

    def matches(self, path: Places) -> bool:
        """Whether the whole path matches."""
        text = path.text
        if self.explicit is not None:
            return text == self.explicit
        if self.least > len(text) or self.key not in text:
            return False
        if len(self.segments) == 1:
            return len(text) == self.least and path.at(self.segments[0], 0)
        first, *middle, last = self.segments
        end = len(text) - len(last)
        if not path.at(first, 0) or not path.at(last, end):
            return False
        position = len(first)
        for segment in middle:
            position = path.search(segment, position)
            if position < 0:
                return False
            position += len(segment)
        return position <= end


_Unit = str | int | None
"""One character of a segment: itself; None for any (`?`); or a class, a bit an octet."""
_Segment = str | tuple[_Unit, ...]

_OCTETS = 257  # and one for an escaped slash, see normal.decoded
_ALL = (1 << _OCTETS) - 1


class Places:
    """A path, and for each class asked about the places where it fits: bit i for character i.

    What is done with it is counted on a meter, whose TooDear `at` and `search` raise.
    """

    __slots__ = ("_places", "meter", "text")

    def __init__(self, text: str, meter: Meter) -> None:
        self.text = text
        self.meter = meter
        self._places: dict[_Unit, int] = {}

    def at(self, segment: _Segment, position: int) -> bool:
        """Whether the segment fits at the position."""
        if isinstance(segment, str):
            return self.text.startswith(segment, position)
        self.meter.spend(len(segment))
        return all(_fits(unit, self.text[place]) for place, unit in enumerate(segment, position))

    def search(self, segment: _Segment, start: int) -> int:
        """The leftmost place from `start` on where the segment fits, or -1."""
        if isinstance(segment, str):
            return self.text.find(segment, start)
        room = len(self.text) - start - len(segment) + 1
        if room <= 0:
            return -1
        self.meter.spend(len(segment) * (1 + (room >> _SHIFTED)))
        alive = (1 << room) - 1  # bit i: it may still begin at start + i
        for offset, unit in enumerate(segment, start):
            if unit is not None:
                alive &= self._where(unit) >> offset
                if not alive:
                    return -1
        return start + (alive & -alive).bit_length() - 1

    def _where(self, unit: _Unit) -> int:
        bits = self._places.get(unit)
        if bits is None:
            self.meter.spend(_MAPPED + len(self.text))
            fits = {ord(char): "01"[_fits(unit, char)] for char in set(self.text)}
            bits = self._places[unit] = int(self.text[::-1].translate(fits), 2)
        return bits


def present(text: str) -> int:
    """The characters that stand in a text, a bit each."""
    bits = 0
    for char in set(text):
        bits |= 1 << ord(char)
    return bits


def _fits(unit: _Unit, char: str) -> bool:
    if unit is None:
        return True
    return unit == char if isinstance(unit, str) else bool(unit >> ord(char) & 1)


def _is_plain(segment: _Segment) -> TypeGuard[str]:
    return isinstance(segment, str)


def _segments(value: str, longest: int) -> tuple[_Segment, ...]:
    """The pattern cut at its unescaped stars; a segment without specials is a str.

    Reading stops where so many characters are needed that no path matches.
    """
    if "?" not in value and "[" not in value and "\\" not in value:
        return tuple(squeeze(value).split("*"))
    segments: list[list[_Unit]] = [[]]
    needed = 0
    closed = True  # false once a bracket was found open to the end: so are all behind it
    i = 0
    while i < len(value) and needed <= longest:
        char = value[i]
        i += 1
        needed += 1
        if char == "*":
            needed -= 1
            segments.append([])
        elif char == "?":
            segments[-1].append(None)
        elif char == "\\" and i < len(value):
            segments[-1].append(value[i])
            i += 1
        elif char == "[" and closed:
            unit, i = _bracket(value, i)
            closed = unit is not None
            segments[-1].append("[" if unit is None else unit)
        else:
            segments[-1].append(char)
    first, *middle, last = segments if len(segments) > 1 else (segments[0], [])
    kept = [first, *(segment for segment in middle if segment), last]
    return tuple(map(_segment, kept if len(segments) > 1 else kept[:1]))


def _segment(units: list[_Unit]) -> _Segment:
    chars = [unit for unit in units if isinstance(unit, str)]
    return "".join(chars) if len(chars) == len(units) else tuple(units)


def _bracket(value: str, start: int) -> tuple[int | None, int]:
    """A class beginning behind its `[`, and where it ends; None for an unclosed one (V2-17)."""
    if value.find("]", start) < 0:
        return None, start
    i = start
    negated = value[i : i + 1] in {"!", "^"}
    i += negated
    first = i
    ranges: set[tuple[str, str]] = set()
    while i < len(value) and (value[i] != "]" or i == first):
        if value[i] == "\\" and i + 1 < len(value):
            i += 1
        low = high = value[i]
        if value[i + 1 : i + 2] == "-" and value[i + 2 : i + 3] not in {"", "]"}:
            high = value[i + 2]
            i += 2
        ranges.add((low, high))
        i += 1
    if i >= len(value):
        return None, start
    bits = 0
    for low, high in ranges:
        if low <= high:
            bits |= (2 << ord(high)) - (1 << ord(low))
    return (_ALL ^ bits if negated else bits), i + 1
