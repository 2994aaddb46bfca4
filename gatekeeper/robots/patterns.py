"""Normal forms and wildcard patterns, each matched in time linear in the path.

Paths and values have a *normal form*, so that comparing octets is right. The functions take and
give *octets in a str* (see `model`), except that the URL's side may still be Unicode, which is
UTF-8 on the wire (RFC 9309 section 2.2.2, RFC-22).

A site's pattern never becomes a regular expression: a piece between two stars is searched for from
where the piece before it ended, and the leftmost find is always good enough, so that there is
nothing to come back to: RFC 9309 section 2.2.3 (RFC-29), 2.0 draft (V2-19).

Of many patterns the index finds those whose pieces stand in the path. What one answer may cost is
bounded by counting: everything that is done with a path is counted in *steps* of about 0.1 µs
before it is done, and past `MAX_STEPS` the answer is no. The count depends on file and path alone:
the same question has the same answer at all times.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain
from typing import Final, TypeGuard

from gatekeeper.robots.parser import octets
from gatekeeper.speedups import lazy_pattern

PLAIN = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~:/@!&'()+,;="
"""Octets that stand for themselves wherever they stand in a rule's value."""
_UNRESERVED = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~"
# Brackets are reserved too, but no path or query may hold them (RFC 3986 section 3.3): a URL
# that was sent always has them escaped, so a rule's `[` can only mean `%5B`.
_RESERVED = b":/?#@!$&'()*+,;="
# What a pattern may hold unchanged; `%` and `$` need a look.
_PLAIN = bytes(set(_UNRESERVED + _RESERVED) - set(b"$"))

# No pattern here tries anything twice, and what stands together is changed together: the time
# is linear in the text, whatever it is.
_LONE_PERCENT = lazy_pattern(r"%(?![0-9A-Fa-f]{2})")
_ESCAPES = lazy_pattern(r"((?:%[0-9A-Fa-f]{2})++)")
_CHANGING = (
    r"%(?:2[DE]|3[0-9]|4[1-9A-F]|5[0-9AF]|6[1-9A-F]|7[0-9AE]|[a-f][0-9A-Fa-f]|[0-9A-F][a-f])"
)
_CHANGING_ESCAPE = lazy_pattern(_CHANGING)
_CHANGING_ESCAPES = lazy_pattern(rf"({_CHANGING}(?:%[0-9A-Fa-f]{{2}})*+)")
_SPECIAL = lazy_pattern(r"[*?\[\]\\]")
_INNER_DOLLAR = lazy_pattern(r"\$(?!\n|\Z)")

_NO_OCTET = "\u0101"
_SLASH_ESCAPED = "\u0100"  # no octet: stands for %2F where everything else is decoded

COMPILED: Final = not __file__.endswith(".py")
"""These modules are compiled: a loop over the characters of a path is faster than any call."""
ROBOTS_TXT: Final = "/robots.txt"
"""May always be asked for (RFC 9309 section 2.2.2, RFC-20, the 1996 draft, R96-16, V2-34)."""
_LONGEST_ROBOTS_TXT = 3 * len(ROBOTS_TXT)


_IN_PATTERN = b"%" + _PLAIN
_IN_PATTERNS = b"%$\n" + _PLAIN
_IN_PATH = b"%" + _PLAIN.replace(b"*", b"")
"""Octets that stand for themselves where they came as they are (RFC 9309 section 2.2.2, RFC-22)."""
_FEW = 16


@cache
def _table(kept: bytes) -> list[str]:
    """What each octet is written as: itself where it is one of those, else its escape."""
    return [chr(octet) if octet in kept else f"%{octet:02X}" for octet in range(256)]


def _rfc(escapes: str) -> str:
    """What stands for octets that came escaped (RFC 9309 section 2.2.2, RFC-23)."""
    return "".join(map(_table(_UNRESERVED).__getitem__, _unescaped(escapes)))


def _old(escapes: str) -> str:
    return _unescaped(escapes).decode("latin-1").replace("/", _SLASH_ESCAPED)


def _literal(escapes: str) -> str:
    return _SPECIAL.sub(r"\\\g<0>", _old(escapes))


@cache
def _known(read: Callable[[str], str]) -> dict[str, str]:
    """Every escape as it is read: a text holds many, most of them alone."""
    digits = "0123456789abcdefABCDEF"
    return {escape: read(escape) for escape in [f"%{a}{b}" for a in digits for b in digits]}


def _replaced(text: str, runs: re.Pattern[str], read: Callable[[str], str]) -> str:
    """The text with every run of escapes replaced: by what is known of it, or as it is read.

    No call a run, unless it is one of several escapes: a text may hold 100,000.
    """
    parts = runs.split(text)
    if len(parts) == 1:
        return text
    found, known = parts[1::2], _known(read)
    read_once = {run: known.get(run) or read(run) for run in set(found)}  # most occur often
    parts[1::2] = map(read_once.__getitem__, found)
    return "".join(parts)


def _unescaped(escapes: str) -> bytes:
    return bytes.fromhex(escapes.replace("%", ""))


def _normal(text: str, kept: bytes) -> str:
    if "%" in text:
        text = _replaced(_LONE_PERCENT.sub("%25", text), _CHANGING_ESCAPES, _rfc)
    odd = set(text.encode("latin-1").translate(None, kept))
    if not odd:
        return text
    table = _table(kept)
    if len(odd) > _FEW:
        return text.translate(table)
    for octet in odd:  # to replace a few in turn is far quicker than to translate
        text = text.replace(chr(octet), table[octet])
    return text


def is_plain(text: str) -> bool:
    """The text holds no octet that a normal form changes, `*` apart."""
    return text.isascii() and not text.encode().translate(None, _PLAIN)


def as_written(path: str) -> bool:
    """No escape, blank, control, dot segment and nothing beside ASCII. Fast where it is compiled.

    >>> as_written("/a.b?c"), as_written("/.b"), as_written("/a%20"), as_written("/a b")
    (True, False, False, False)
    """
    before = 0
    for place in range(len(path)):
        octet = ord(path[place])
        if octet <= 32 or octet >= 127 or octet == 37 or (octet == 46 and before == 47):
            return False
        before = octet
    return True


def rfc_path(path: str) -> str:
    """A URL's path and query as RFC 9309 compares it.

    Octets that no URL may hold are escaped (RFC 9309 section 2.2.2, RFC-22), escaped unreserved
    ones decoded (RFC-23), the hex digits of the rest put in upper case (RFC-24), `*` and `$`
    escaped, so that only `%2A` and `%24` in a rule can mean them (RFC 9309 section 2.2.3, RFC-30).
    """
    return _normal(octets(path), _IN_PATH)


def rfc_pattern(value: str) -> str:
    """A rule's value as RFC 9309 compares it: `*` and a final `$` keep their meaning (RFC-28).

    A blank inside a value counts as `%20` (RFC 9309 section 3, RFC-42, R94-29).
    """
    if value.endswith("$"):
        return _normal(value[:-1], _IN_PATTERN) + "$"
    return _normal(value, _IN_PATTERN)


def rfc_patterns(values: str) -> str:
    """`rfc_pattern` of many values at once: one a line, and so is the result."""
    return _normal(_INNER_DOLLAR.sub("%24", values), _IN_PATTERNS)


def query_form(text: str) -> str:
    """After the first `?` a literal `:` or `/` equals its escape (RFC 9309 section 2.2.2, RFC-25,
    Figure 4 row 2).

    Takes and gives a normal form of `rfc_path` or `rfc_pattern`. A rule with a `?` matches
    where it does as it stands or in this form, of the rule and of the path.
    """
    path, mark, query = text.partition("?")
    return path + mark + query.replace("%3A", ":").replace("%2F", "/") if mark else text


def is_robots_txt(path: str) -> bool:
    """The path is `/robots.txt`, however its characters are escaped (RFC 9309 section 2.2.2,
    RFC-20, RFC-23).

    >>> is_robots_txt("/robots.txt"), is_robots_txt("/robots%2etxt"), is_robots_txt("/Robots.txt")
    (True, True, False)
    """
    if "%" in path and len(path) <= _LONGEST_ROBOTS_TXT:
        path = rfc_path(path)
    return path == ROBOTS_TXT


def unescaped(path: str) -> bool:
    """No escape in the path stands for an unreserved octet, nor has a digit in lower case, in which
    a rule's text might be found: its normal form changes none."""
    return _CHANGING_ESCAPE.search(path) is None


def decoded(text: str) -> str:
    """Octets as the 1996 draft compares them: all escapes decoded but that of `/` (R96-17)."""
    return _replaced(text, _ESCAPES, _old) if "%" in text else text


def decoded_patterns(values: Sequence[str]) -> list[str]:
    """`decoded` for shell patterns: what comes out of an escape is no special (V2-36)."""
    joined = _replaced(_NO_OCTET.join(values), _ESCAPES, _literal)
    return joined.split(_NO_OCTET) if values else []


_MAPPED = 300
"""Steps as which it counts to find out where a class fits, beside one for each octet."""
_SHIFTED = 12
"""A shift counts as a step more for every two to that power octets."""
_STARS = lazy_pattern(r"\*{2,}")


def squeeze(pattern: str) -> str:
    """Several stars in a row mean what one means."""
    return _STARS.sub("*", pattern) if "**" in pattern else pattern


def wild_match(pattern: str, path: str) -> bool:
    """An RFC 9309 pattern in normal form, squeezed, against a path in normal form (RFC-28, 29)."""
    head, star, rest = pattern.partition("*")
    if not star:
        return path == head[:-1] if head[-1:] == "$" else path.startswith(head)
    if head != "/" and not path.startswith(head):  # every path begins with a slash
        return False
    position, end = len(head), len(path)
    piece, star, more = rest.partition("*")
    if not more and (star or piece[-1:] != "$"):  # most have one piece
        return piece in path and path.find(piece, position) >= 0
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

    Without an unescaped special it is an explicit match, equal or nothing (the 2.0 draft, V2-16).

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
        self.segments: tuple[_Segment, ...] = segments
        self.explicit: str | None = (
            segments[0] if len(segments) == 1 and _is_plain(segments[0]) else None
        )
        """The one path that matches, of an explicit pattern."""
        self.least: int = sum(map(len, segments))
        """Characters that a matching path has at least."""
        self.key: str = max((s for s in segments if isinstance(s, str)), key=len, default="")
        """A plain piece that every matching path holds."""
        self.classes: frozenset[int] = frozenset(
            unit for s in segments if not isinstance(s, str) for unit in s if isinstance(unit, int)
        )
        """A bit an octet: of every one of them, each matching path has a member."""

    def may_match(self, here: int) -> bool:
        """Some member of each class stands in the path, whose characters are given as bits."""
        return all(bits & here for bits in self.classes)

    def matches(self, path: PathView) -> bool:
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

_SYMBOLS = 257  # and one for an escaped slash, see normal.decoded
_ALL = (1 << _SYMBOLS) - 1


class PathView:
    """A path, and for each class asked about the places where it fits: bit i for character i.

    What is done with it is counted on a meter, whose TooDear `at` and `search` raise.
    """

    __slots__ = ("_places", "meter", "text")

    def __init__(self, text: str, meter: Meter) -> None:
        self.text: str = text
        self.meter: Meter = meter
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
    """A class beginning behind its `[`, and where it ends; None for an unclosed one (the 2.0
    draft, V2-17)."""
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


MAX_STEPS = 24_000
"""Steps that one answer may take: 2 to 3 ms."""
COMPARED = 9
"""A search counts as a step for every two to that power pairs of octets that it may compare."""
_SIZES = (1, 2, 4, 16)
"""Lengths of the stretches of a path that are looked up at once."""
_SHARED = 32
"""Patterns with the same longest piece beyond which another piece is looked for."""
_NOTHING = ("", "$")
"""Pieces that say nothing about what stands in a path."""
_CUT = 3
"""Cutting up a pattern counts as a step for every two to that power octets."""


class TooDear(Exception):
    """A file was made so that one answer would take long: nobody writes such a one by hand."""


class Meter:
    """The steps that one answer may still take.

    Whoever meets a file made to be slow must not let a site stop all its work: past the bound
    the answer is no, which never does harm to the site.
    """

    __slots__ = ("_left",)

    def __init__(self, steps: int = MAX_STEPS) -> None:
        self._left = steps

    def spend(self, steps: int) -> None:
        """Take so many steps. Raises TooDear."""
        self._left -= steps
        if self._left < 0:
            raise TooDear


class CountedText:
    """A text that pieces are searched for in, on a meter.

    To search for `aaa...ab` in `aaa...a` takes up to the product of both lengths, in C too;
    so much is counted, though a search rarely takes it.
    """

    __slots__ = ("_lasts", "_stretches", "meter", "text")

    def __init__(self, text: str, meter: Meter) -> None:
        self.text: str = text
        self.meter: Meter = meter
        self._lasts: dict[str, int] = {}
        self._stretches: dict[int, set[str]] = {}

    def last(self, piece: str) -> int:
        """The last place where the piece stands, or -1. Raises TooDear."""
        place = self._lasts.get(piece)
        if place is None:
            self.meter.spend(3 + (len(self.text) * len(piece) >> COMPARED))
            place = self._lasts[piece] = self.text.rfind(piece)
        return place

    def find(self, piece: str, start: int) -> int:
        """The first place from `start` on, of a piece that stands there. Raises TooDear."""
        place = self.text.find(piece, start)
        self.meter.spend(1 + ((place - start) * len(piece) >> COMPARED))
        return place

    def stretches(self, size: int) -> set[str]:
        """Every stretch of that length. Raises TooDear."""
        found = self._stretches.get(size)
        if found is None:
            text = self.text
            self.meter.spend(len(text) + (len(text) >> 1))
            places = range(len(text) - size + 1)
            found = self._stretches[size] = {text[place : place + size] for place in places}
        return found


class PieceIndex:
    """Finds out which of many pieces stand in a text, at a cost that grows with the text.

    A piece lies under the stretch that it ends with, as long as one of a few lengths allows:
    so each stretch of the text is looked up once a length, and whatever is found there is
    looked at. An empty piece stands in every text.
    """

    __slots__ = ("_following", "_pieces", "_tables")

    def __init__(self, pieces: Sequence[str]) -> None:
        self._pieces = pieces
        tables: dict[int, dict[str, int]] = {size: {} for size in (0, *_SIZES)}
        longest = _SIZES[-1]
        sizes = [max(size for size in tables if size <= length) for length in range(longest)]
        by_length = [(size, tables[size]) for size in sizes]
        following: list[int] = []
        for number, piece in enumerate(pieces):
            length = len(piece)
            size, table = by_length[length] if length < longest else (longest, tables[longest])
            end = piece[length - size :]
            following.append(table.get(end, -1))
            table[end] = number
        self._tables = {size: table for size, table in tables.items() if table}
        self._following = array("i", following)
        """The piece before with the same end, or -1."""

    def found(self, text: CountedText) -> list[int]:
        """The number of each piece that stands in the text, in no order. Raises TooDear."""
        spend, pieces, following = text.meter.spend, self._pieces, self._following
        found: list[int] = []
        for size, table in self._tables.items():
            stretches = text.stretches(size) if size else {""}
            for end in (
                stretches.intersection(table)
                if len(table) < len(stretches)
                else [stretch for stretch in stretches if stretch in table]
            ):
                number = table[end]
                while number >= 0:
                    spend(2)
                    piece = pieces[number]
                    if piece[:size] in stretches and text.last(piece) >= 0:
                        found.append(number)
                    number = following[number]
        return found


class PatternIndex:
    """Many wildcard patterns: those with a literal piece that the path has are tried in turn.

    Takes squeezed patterns in normal form that hold a star, each with its entry; of two
    entries the greater one is the better match. They are looked up by their longest piece, or
    where many share that one by the piece that the fewest share.
    """

    __slots__ = ("_entries", "_index", "_patterns")

    def __init__(self, patterns: dict[str, int]) -> None:
        self._patterns = sorted(patterns, key=patterns.__getitem__, reverse=True)
        self._entries = [patterns[pattern] for pattern in self._patterns]
        self._index = PieceIndex(_keys_of(self._patterns))

    def best(self, text: CountedText, floor: int) -> int:
        """The entry of the best match if it beats `floor`, else `floor`. Raises TooDear."""
        entries, patterns = self._entries, self._patterns
        for number in sorted(self._index.found(text)):
            if entries[number] <= floor:
                break
            if _matches(patterns[number], text):
                return entries[number]
        return floor


def _keys_of(patterns: Sequence[str]) -> list[str]:
    """What each pattern is looked up by, without a final `$`: see `PatternIndex`."""
    keys = [*map(_longest_piece, patterns)]
    often = Counter(keys)
    if max(often.values(), default=0) > _SHARED:
        cut = [pattern.split("*") for pattern in patterns]
        every = Counter(chain.from_iterable(cut))
        # The rarest piece, of these the longest; an empty one or a lone `$` as a last resort.
        rank = {piece: (count << 20) - len(piece) for piece, count in every.items()}
        rank |= dict.fromkeys(_NOTHING, len(patterns) << 30)
        keys = [
            min(pieces, key=rank.__getitem__) if often[key] > _SHARED else key
            for pieces, key in zip(cut, keys, strict=True)
        ]
    if "$\n" not in "\n".join([*keys, ""]):
        return keys
    return [key[:-1] if key[-1:] == "$" else key for key in keys]


def _longest_piece(pattern: str) -> str:
    head, _, rest = pattern.partition("*")
    if "*" in rest:
        return max(pattern.split("*"), key=len)
    return rest if len(rest) > len(head) else head


def _matches(pattern: str, within: CountedText) -> bool:
    """Whether a pattern whose key stands in the text matches it (RFC 9309 section 2.2.3, RFC-28,
    RFC-29).

    Each piece between two stars is searched for from where the one before it ended, and the
    leftmost find is always good enough: nothing is ever come back to.
    """
    text = within.text
    size = len(text)
    if len(pattern) > 2 * size + 3:
        return False  # more octets than there are, even if every second one is a star
    within.meter.spend(3 + (len(pattern) >> _CUT))
    head, _, rest = pattern.partition("*")
    if not text.startswith(head):
        return False
    pieces = rest.split("*")
    end = size
    if rest[-1:] == "$":
        last = pieces.pop()[:-1]
        end = size - len(last)
        if not text.endswith(last):
            return False
    position = len(head)
    for piece in pieces:
        if position > within.last(piece):
            return False
        position = within.find(piece, position) + len(piece)
    return position <= end
