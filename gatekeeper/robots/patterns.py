"""Normal forms of paths and values, and wildcard patterns that match in time linear in the path.

Paths and values are converted to a *normal form* in which comparing octets is correct. The
functions take and return *octets in a str* (see `parser`), except that a URL's path may still be
Unicode, which is UTF-8 on the wire (RFC 9309 section 2.2.2, RFC-22).

A site's pattern is never compiled to a regular expression. Each piece between two stars is searched
for from the end of the previous piece, and the leftmost match is always sufficient, so there is no
backtracking: RFC 9309 section 2.2.3 (RFC-29), 2.0 draft (V2-19).

An index selects those patterns whose pieces occur in the path. The cost of one answer is bounded by
counting: each operation on a path is counted in *steps* of about 0.1 µs before it is performed, and
beyond `MAX_STEPS` the answer is DENIED. The count depends only on the file and the path, so the
same question always has the same answer.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import chain, islice
from typing import Final

from gatekeeper.errors import InvalidURL
from gatekeeper.robots.parser import PIECE, to_octets
from gatekeeper.urls import ALWAYS_SENDABLE_LENGTH, path_of, split

PLAIN = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~:/@!&'()+,;="
"""Octets that stand for themselves anywhere in a rule's value."""
_PATH_OCTETS = PLAIN.encode() + b"?"
_VALUE_OCTETS = _PATH_OCTETS + b"*$\n"
"""Octets that the normal forms of a path, and of values on lines of their own, leave unchanged. A
`$` inside a value is an exception."""
NORMAL: Final = bytes([octet if octet in _PATH_OCTETS else 0x61 for octet in range(256)])
"""A table for `bytes.translate` that changes octets unless they are in normal form without
escapes. It is faster than deleting octets."""
_NORMAL_OR_ESCAPED: Final = NORMAL[:0x25] + b"%" + NORMAL[0x26:]
_UNRESERVED = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~"
# Brackets are reserved too, but a path or query must not contain them (RFC 3986 section 3.3): in a
# URL that was sent they are always escaped, so a rule's `[` can only mean `%5B`.
_RESERVED = b":/?#@!$&'()*+,;="
# Octets that a pattern may contain unchanged. `%` and `$` are handled separately.
_PLAIN = bytes(set(_UNRESERVED + _RESERVED) - set(b"$"))

# None of these expressions backtracks, so the time is linear in any text. This one cuts a text into
# pieces of at most PIECE octets, and no escape.
_HEX = "[0-9A-Fa-f]"
_PIECES = re.compile(rf"(?s:.{{1,{PIECE - 2}}})(?>(?:(?<=%){_HEX}{{2}}|(?<=%{_HEX}){_HEX})?)")
_CHANGES = re.compile(r"%(?:(?![0-9A-F]{2})|2[DE]|3[0-9]|4[1-9A-F]|5[0-9AF]|6[1-9A-F]|7[0-9AE])")
"""Matches a `%` that the normal form changes, or that begins an escape which it changes."""
QUERY_ESCAPE = re.compile("%3A|%2F")
"""Matches what `query_form` replaces."""
_INNER_DOLLAR = re.compile(r"\$(?!\n|\Z)")

_NO_OCTET = "\u0101"
_SLASH_ESCAPED = "\u0100"  # not an octet: stands for %2F where all other escapes are decoded

ROBOTS_TXT: Final = "/robots.txt"
"""The path that may always be fetched (RFC 9309 section 2.2.2, RFC-20; the 1996 draft, R96-16;
V2-34)."""
_LONGEST_ROBOTS_TXT = 3 * len(ROBOTS_TXT)


_IN_PATTERN = b"%$\n" + _PLAIN
_IN_PATH = b"%" + _PLAIN.replace(b"*", b"")
"""Octets that stand for themselves if they are not escaped (RFC 9309 section 2.2.2, RFC-22)."""
_MAX_REPLACED = 16


@cache
def _escape_table(unchanged: bytes) -> list[str]:
    """Return the normal form of each octet: itself if it is in `unchanged`, else its escape."""
    return [chr(octet) if octet in unchanged else f"%{octet:02X}" for octet in range(256)]


@cache
def _single_escapes(unchanged: bytes | None, quoted: str = "") -> dict[str, str]:
    """Return what replaces a `%` and the two digits after it, by these digits.

    That is the `_escape_table`; without `unchanged` the octet itself, but for the slash, with a
    backslash before each of the `quoted`.
    """
    if unchanged is None:
        octets = [f"\\{chr(octet)}" if chr(octet) in quoted else chr(octet) for octet in range(256)]
        octets[ord("/")] = _SLASH_ESCAPED
    else:
        octets = _escape_table(unchanged)
    digits = "0123456789abcdefABCDEF"
    return {high + low: octets[int(high + low, 16)] for high in digits for low in digits}


def _replace_escapes(text: str, replaced: Mapping[str, str], lone: str = "%") -> str:
    """Replace every escape in the text by `_single_escapes`, and any other `%` by `lone`.

    What is between two `%` is read once if it repeats: a text may contain 170,000 escapes.
    """
    if len(text) > PIECE:
        pieces = _PIECES.findall(text)
        return "".join([_replace_escapes(piece, replaced, lone) for piece in pieces])
    first, *parts = text.split("%")
    known = {part: replaced.get(part[:2], lone + part[:2]) + part[2:] for part in set(parts)}
    return first + "".join(map(known.__getitem__, parts))


def _normalise(text: str, unchanged: bytes) -> str:
    if len(text) > PIECE:
        return "".join([_normalise(piece, unchanged) for piece in _PIECES.findall(text)])
    if "%" in text and _CHANGES.search(text):
        # Unreserved octets are not escaped, and the hex digits are in upper case (RFC 9309 section
        # 2.2.2, RFC-23, RFC-24).
        text = _replace_escapes(text, _single_escapes(_UNRESERVED), "%25")
    special = set(text.encode("latin-1").translate(None, unchanged))
    if not special:
        return text
    table = _escape_table(unchanged)
    if len(special) > _MAX_REPLACED:
        return text.translate(table)
    for octet in special:  # replacing a few one by one is much faster than translate()
        text = text.replace(chr(octet), table[octet])
    return text


def is_normal_path(path: str) -> bool:
    """Return True if the path is in normal form as it is; False means that it may or may not be.

    >>> is_normal_path("/a?b=c"), is_normal_path("/%61"), is_normal_path("/a*")
    (True, False, False)
    """
    return path.isascii() and (octets := path.encode()).translate(NORMAL) == octets


def are_normal(values: str) -> bool:
    """Return True if the values, one per line, are in normal form as they are.

    False means that they may or may not be.
    """
    if values.encode("latin-1").translate(None, _VALUE_OCTETS):
        return False
    return "$" not in values or _INNER_DOLLAR.search(values) is None


def rfc_path(path: str) -> str:
    """Return the form of a URL's path and query that RFC 9309 compares.

    Octets that a URL must not contain are escaped (RFC 9309 section 2.2.2, RFC-22), escaped
    unreserved octets are decoded (RFC-23), the hex digits of the remaining escapes are converted to
    upper case (RFC-24). `*` and `$` are escaped, so that only `%2A` and `%24` in a rule match them
    (RFC 9309 section 2.2.3, RFC-30).
    """
    if path.isascii() and not _CHANGES.search(path):
        octets = path.encode()
        if octets.translate(_NORMAL_OR_ESCAPED) == octets:
            return path
    return _normalise(to_octets(path), _IN_PATH)


def rfc_pattern(values: str) -> str:
    """Return the form of a rule's value that RFC 9309 compares: `*` and a final `$` stay special
    (RFC-28).

    Takes one value, or many, one per line. A blank inside a value counts as `%20` (RFC 9309
    section 3, RFC-42, R94-29).
    """
    values = _normalise(values, _IN_PATTERN)
    if "$" in values and _INNER_DOLLAR.search(values):  # a `$` before a line end stays
        values = f"{values}\n".replace("$\n", f"{_NO_OCTET}\n")
        values = values.replace("$", "%24").replace(_NO_OCTET, "$")[:-1]
    return values


def split_url(url: str) -> tuple[str, str]:
    """Return the origin, or the empty string for a bare path, and the path with its query.

    A bare path is normalised like the path of a URL. Raises InvalidURL for text that is neither a
    URL nor a path, and for text that is too long to be sent.
    """
    if url[:1] != "/":
        try:
            return split(url)
        except InvalidURL:
            return "", path_of(url)  # only the host may be invalid
    if len(url) > ALWAYS_SENDABLE_LENGTH or "#" in url or "/." in url or "/%2" in url:
        return "", split("http://a" + url)[1]
    return "", url


def query_form(text: str) -> str:
    """Decode `%3A` and `%2F` after the first `?`, where RFC 9309 treats them as equal to `:` and
    `/` (section 2.2.2, RFC-25, Figure 4 row 2).

    Takes and returns a normal form of `rfc_path` or `rfc_pattern`. A rule with a `?` matches if
    either form of the rule matches either form of the path.
    """
    path, mark, query = text.partition("?")
    if "%" not in query:
        return text
    return path + mark + query.replace("%3A", ":").replace("%2F", "/")


def is_robots_txt(path: str) -> bool:
    """Return True if the path is `/robots.txt`, however it is escaped (RFC 9309 section 2.2.2,
    RFC-20, RFC-23).

    >>> is_robots_txt("/robots.txt"), is_robots_txt("/robots%2etxt"), is_robots_txt("/Robots.txt")
    (True, True, False)
    """
    if "%" in path and len(path) <= _LONGEST_ROBOTS_TXT:
        path = rfc_path(path)
    return path == ROBOTS_TXT


def decoded(text: str) -> str:
    """Return octets as the 1996 draft compares them: all escapes except that of `/` decoded
    (R96-17)."""
    return _replace_escapes(text, _single_escapes(None)) if "%" in text else text


def decoded_patterns(values: Sequence[str]) -> list[str]:
    """Apply `decoded` to shell patterns. An octet that was escaped is not special (V2-36)."""
    joined = _NO_OCTET.join(values)
    if "%" not in joined:
        return [*values]
    return _replace_escapes(joined, _single_escapes(None, "*?[]\\")).split(_NO_OCTET)


_CLASS_STEPS = 300
"""Steps counted for locating a character class in a path, in addition to one per octet."""
_SHIFT_BITS = 12
"""Binary logarithm of the number of octets whose shift counts as one more step."""
_STARS = re.compile(r"\*{2,}")


def squeeze(pattern: str) -> str:
    """Replace several consecutive stars by one, which is equivalent."""
    return _STARS.sub("*", pattern) if "**" in pattern else pattern


def wild_match(pattern: str, path: str) -> bool:
    """Match an RFC 9309 pattern in normal form, squeezed, against a path in normal form (RFC-28,
    RFC-29)."""
    head, star, rest = pattern.partition("*")
    if not star:
        return path == head[:-1] if head[-1:] == "$" else path.startswith(head)
    if head != "/" and not path.startswith(head):  # every path begins with `/`
        return False
    position, end = len(head), len(path)
    piece, star, more = rest.partition("*")
    if not more and (star or piece[-1:] != "$"):  # the common case: one piece
        return piece in path and path.find(piece, position) >= 0
    if rest[-1:] == "$":
        rest, _, last = rest[:-1].rpartition("*")
        end -= len(last)
        if end < position or not path.endswith(last):
            return False
        if not rest:
            return True
    if len(rest) - rest.count("*") > end - position:
        return False  # needs more octets than there are; avoids splitting a pattern of 500 KiB
    for piece in rest.split("*"):
        position = path.find(piece, position, end)
        if position < 0:
            return False
        position += len(piece)
    return True


def shell_keys(values: Sequence[str]) -> list[str]:
    """Return a literal piece of each shell pattern: a path without it cannot match.

    The patterns are parsed only roughly: everything between the first `[` and the last `]` counts
    as a class.
    """
    if not values:
        return []
    joined = _NO_OCTET.join(values)
    roughly = joined.replace("?", "*").replace("\\", "*").split(_NO_OCTET)
    cut = [value.partition("[") for value in roughly]
    rough = [f"{head}*{rest.rpartition(']')[2]}".replace("[", "*") for head, _, rest in cut]
    return _longest_pieces(rough)


def _longest_pieces(patterns: Iterable[str]) -> list[str]:
    """Return the longest piece of each pattern. This is faster than `max` with a key."""
    found: list[str] = []
    for pattern in patterns:
        longest = ""
        for piece in pattern.split("*"):
            if len(piece) > len(longest):
                longest = piece
        found.append(longest)
    return found


class ShellPattern:
    """A pattern of the 2.0 draft (V2-17): `*`, `?`, `[...]`, `[!...]`, `\\x`, anchored at both
    ends.

    A pattern without an unescaped special character is an explicit match: it matches only an equal
    path (the 2.0 draft, V2-16).

    Stars separate segments of fixed length. A segment of plain characters is searched for. Any
    other segment is tried at all positions of the path simultaneously, one bit per position, so
    that its cost is its own length, not its length times the path's.
    """

    __slots__ = ("classes", "explicit", "key", "min_length", "segments")

    def __init__(self, value: str, longest: int) -> None:
        """Parse a pattern. `longest` is the length in characters of the longest path that will be
        matched.

        A pattern that needs a longer path is parsed only far enough to know that.
        """
        segments = _segments(value, longest)
        self.segments: list[_Segment] = segments
        first, *others = segments
        self.explicit: str | None = first if isinstance(first, str) and not others else None
        """The only path that an explicit pattern matches; None for other patterns."""
        self.min_length: int = sum(map(len, segments))
        """Minimum number of characters of a matching path."""
        self.key: str = max((s for s in segments if isinstance(s, str)), key=len, default="")
        """A plain piece that every matching path contains."""
        self.classes: frozenset[int] = frozenset(
            unit for s in segments if not isinstance(s, str) for unit in s if isinstance(unit, int)
        )
        """The character classes, one bit per octet. A matching path contains a member of each
        class."""

    def matches(self, path: PathView) -> bool:
        """Return True if the whole path matches."""
        text = path.text
        if self.explicit is not None:
            return text == self.explicit
        if self.min_length > len(text) or self.key not in text:
            return False
        if len(self.segments) == 1:
            return len(text) == self.min_length and path.matches_at(self.segments[0], 0)
        first, *middle, last = self.segments
        end = len(text) - len(last)
        if not path.matches_at(first, 0) or not path.matches_at(last, end):
            return False
        position = len(first)
        for segment in middle:
            position = path.search(segment, position)
            if position < 0:
                return False
            position += len(segment)
        return position <= end


_Unit = str | int
"""One position of a segment: a character, or a class with one bit per octet."""
_Segment = str | tuple[_Unit, ...]

_SYMBOLS = 257  # one more for an escaped slash, see `decoded`
_ALL_BITS = (1 << _SYMBOLS) - 1
"""The class of a `?`."""


class PathView:
    """A path with, for each class used so far, the positions at which the class matches (bit i for
    character i).

    The work is charged to a budget; `matches_at` and `search` raise StepBudgetExceeded when it is
    used up.
    """

    __slots__ = ("_class_bits", "budget", "text")

    def __init__(self, text: str, budget: StepBudget) -> None:
        self.text: str = text
        self.budget: StepBudget = budget
        self._class_bits: dict[_Unit, int] = {}

    def matches_at(self, segment: _Segment, position: int) -> bool:
        """Return True if the segment matches at the position."""
        if isinstance(segment, str):
            return self.text.startswith(segment, position)
        self.budget.spend(len(segment))
        return all(
            _unit_matches(unit, self.text[place]) for place, unit in enumerate(segment, position)
        )

    def search(self, segment: _Segment, start: int) -> int:
        """Return the leftmost position from `start` on at which the segment matches, or -1."""
        if isinstance(segment, str):
            return self.text.find(segment, start)
        starts = len(self.text) - start - len(segment) + 1
        if starts <= 0:
            return -1
        self.budget.spend(len(segment) * (1 + (starts >> _SHIFT_BITS)))
        alive = (1 << starts) - 1  # bit i: the segment may still begin at start + i
        for offset, unit in enumerate(segment, start):
            if unit != _ALL_BITS:
                alive &= self._positions_of(unit) >> offset
                if not alive:
                    return -1
        return start + (alive & -alive).bit_length() - 1

    def _positions_of(self, unit: _Unit) -> int:
        bits = self._class_bits.get(unit)
        if bits is None:
            self.budget.spend(_CLASS_STEPS + len(self.text))
            fits = {ord(char): "01"[_unit_matches(unit, char)] for char in set(self.text)}
            bits = self._class_bits[unit] = int(self.text[::-1].translate(fits), 2)
        return bits


def _unit_matches(unit: _Unit, char: str) -> bool:
    return unit == char if isinstance(unit, str) else bool(unit >> ord(char) & 1)


def _segments(value: str, longest: int) -> list[_Segment]:
    """Split the pattern at its unescaped stars. A segment without special characters is a str.

    Parsing stops when the pattern needs more than `longest` characters, so that no path matches.
    """
    if "?" not in value and "[" not in value and "\\" not in value:
        return [*squeeze(value).split("*")]
    segments: list[list[_Unit]] = [[]]
    needed = 0
    closed = True  # False after an unclosed bracket: all later ones are unclosed too
    i = 0
    while i < len(value) and needed <= longest:
        char = value[i]
        i += 1
        needed += 1
        if char == "*":
            needed -= 1
            if segments[-1] or len(segments) == 1:  # several stars are equivalent to one
                segments.append([])
        elif char == "?":
            segments[-1].append(_ALL_BITS)
        elif char == "\\" and i < len(value):
            segments[-1].append(value[i])
            i += 1
        elif char == "[" and closed:
            unit, i = _bracket(value, i)
            closed = unit is not None
            segments[-1].append("[" if unit is None else unit)
        else:
            segments[-1].append(char)
    return [*map(_segment, segments)]


def _segment(units: list[_Unit]) -> _Segment:
    chars = [unit for unit in units if isinstance(unit, str)]
    return "".join(chars) if len(chars) == len(units) else tuple(units)


def _bracket(value: str, start: int) -> tuple[int | None, int]:
    """Parse a class after its `[`. Return its bits and end, or None and `start` if it is unclosed
    (the 2.0 draft, V2-17)."""
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
    return (_ALL_BITS ^ bits if negated else bits), i + 1


MAX_STEPS = 24_000
"""Maximum number of steps per answer: 2 to 3 ms."""
COMPARE_BITS = 9
"""Binary logarithm of the number of octet comparisons that count as one step of a search."""
_KEY_LENGTHS = (1, 2, 4, 16)
"""Lengths of the substrings of a path that are looked up in sets."""
MAX_SHARED = 32
"""Maximum number of patterns that are indexed by the same longest piece. If more share it, another
piece is chosen for them."""
_SPLIT_BITS = 3
"""Binary logarithm of the number of octets of a pattern whose splitting counts as one step."""


class StepBudgetExceeded(Exception):
    """Raised when an answer would take too long. Only a file constructed for that purpose causes
    it."""


class StepBudget:
    """The remaining steps of one answer.

    A file that is constructed to be slow must not stop the whole process. Beyond the limit the
    answer is DENIED, which never harms the site.
    """

    __slots__ = ("_remaining",)

    def __init__(self, steps: int = MAX_STEPS) -> None:
        self._remaining = steps

    def spend(self, steps: int) -> None:
        """Subtract the steps. Raises StepBudgetExceeded when none are left."""
        self._remaining -= steps
        if self._remaining < 0:
            raise StepBudgetExceeded


class CountedText:
    """A text in which pieces are searched for, with the cost charged to a budget.

    Searching for `aaa...ab` in `aaa...a` takes up to the product of both lengths, even in C. That
    product is counted, although a search rarely takes as long.
    """

    __slots__ = ("_lasts", "_substrings", "budget", "text")

    def __init__(self, text: str, budget: StepBudget) -> None:
        self.text: str = text
        self.budget: StepBudget = budget
        self._lasts: dict[str, int] = {}
        self._substrings: dict[int, set[str]] = {}

    def last(self, piece: str) -> int:
        """Return the last position of the piece, or -1. Raises StepBudgetExceeded."""
        place = self._lasts.get(piece)
        if place is None:
            self.budget.spend(3 + (len(self.text) * len(piece) >> COMPARE_BITS))
            place = self._lasts[piece] = self.text.rfind(piece)
        return place

    def substrings(self, size: int) -> set[str]:
        """Return the set of all substrings of that length. Raises StepBudgetExceeded."""
        found = self._substrings.get(size)
        if found is None:
            text = self.text
            self.budget.spend(len(text) + (len(text) >> 1))
            places = range(len(text) - size + 1)
            found = self._substrings[size] = {text[place : place + size] for place in places}
        return found


class PieceIndex:
    """Finds the pieces, out of many, that occur in a text, at a cost that grows with the text.

    A piece is stored under its ending, whose length is the greatest of `_KEY_LENGTHS` that fits.
    For each length every substring of the text is looked up once, and the pieces found under it are
    checked. An empty piece occurs in every text.
    """

    __slots__ = ("_pieces", "_previous", "_tables")

    def __init__(self, pieces: Sequence[str]) -> None:
        self._pieces = pieces
        tables: dict[int, dict[str, int]] = {size: {} for size in (0, *_KEY_LENGTHS)}
        longest = _KEY_LENGTHS[-1]
        sizes = [max(size for size in tables if size <= length) for length in range(longest)]
        by_length = [(size, tables[size]) for size in sizes]
        previous: list[int] = []
        for number, piece in enumerate(pieces):
            length = len(piece)
            size, table = by_length[length] if length < longest else (longest, tables[longest])
            end = piece[length - size :]
            previous.append(table.get(end, -1))
            table[end] = number
        self._tables = {size: table for size, table in tables.items() if table}
        self._previous = array("i", previous)
        """For each piece, the number of the previous piece with the same ending, or -1."""

    def find_in(self, text: CountedText) -> list[int]:
        """Return the numbers of the pieces that occur in the text, in no particular order. Raises
        StepBudgetExceeded."""
        spend, pieces, previous = text.budget.spend, self._pieces, self._previous
        found: list[int] = []
        for size, table in self._tables.items():
            substrings = text.substrings(size) if size else {""}
            for end in (
                substrings.intersection(table)
                if len(table) < len(substrings)
                else [substring for substring in substrings if substring in table]
            ):
                number = table[end]
                while number >= 0:
                    spend(2)
                    piece = pieces[number]
                    if piece[:size] in substrings and text.last(piece) >= 0:
                        found.append(number)
                    number = previous[number]
        return found


def _counted(parts: Iterable[Iterable[str]]) -> Counter[str]:
    """Count the texts in all parts, some at a time: a single `update` lets no other thread run."""
    counts, texts = Counter[str](), chain.from_iterable(parts)
    while some := [*islice(texts, 8_192)]:
        counts.update(some)
    return counts


def index_keys(patterns: Sequence[str]) -> list[str]:
    """Return a literal piece of each wildcard pattern, without a final `$`, by which to index it.

    It is the longest piece, or if many patterns share that one, the piece that the fewest share.
    """
    # Patterns are split again where that is needed: keeping the pieces of all takes longer.
    keys = _longest_pieces(patterns)
    counts = _counted([keys])
    if max(counts.values(), default=0) > MAX_SHARED:
        some = [patterns[start : start + 1_024] for start in range(0, len(patterns), 1_024)]
        piece_counts = _counted("*".join(each).split("*") for each in some)
        # The rarest piece, and of equally rare ones the longest. An empty piece or a lone `$` is
        # the last resort.
        rank = {piece: (count << 20) - len(piece) for piece, count in piece_counts.items()}
        rank |= dict.fromkeys(("", "$"), len(patterns) << 30)
        for number, pattern in enumerate(patterns):
            key = keys[number]
            if counts[key] > MAX_SHARED:
                for piece in pattern.split("*"):
                    if rank[piece] < rank[key]:
                        key = piece
                keys[number] = key
    return [key.removesuffix("$") for key in keys]


def counted_match(pattern: str, within: CountedText) -> bool:
    """Do what `wild_match` does, for a pattern with a star, and count the steps (RFC 9309 section
    2.2.3, RFC-28, RFC-29).

    Each piece between two stars is searched for from the end of the previous piece. The leftmost
    match is always sufficient, so there is no backtracking.
    """
    text = within.text
    size = len(text)
    if len(pattern) > 2 * size + 3:
        return False  # needs more octets than there are, even if every second one is a star
    within.budget.spend(3 + (len(pattern) >> _SPLIT_BITS))
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
        start, position = position, text.find(piece, position)
        within.budget.spend(1 + ((position - start) * len(piece) >> COMPARE_BITS))
        position += len(piece)
    return position <= end
