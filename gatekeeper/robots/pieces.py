"""Many patterns at once: which of their pieces stand in a path, and which pattern is the best.

What one answer may cost is bounded by counting: everything that is done with a path is counted
in *steps* of about 0.1 µs before it is done, at what it costs where text and pattern were made
for each other, and past a number of steps the answer is no. So a file of 500 KiB and a path of
64 KiB take some milliseconds at most, whatever they hold, and the count depends on file and
path alone: the same question has the same answer at all times.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from itertools import chain

__all__ = ["COMPARED", "MAX_STEPS", "Meter", "PatternIndex", "PieceIndex", "Text", "TooDear"]

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


class Text:
    """A text that pieces are searched for in, on a meter.

    To search for `aaa...ab` in `aaa...a` takes up to the product of both lengths, in C too;
    so much is counted, though a search rarely takes it.
    """

    __slots__ = ("_lasts", "_stretches", "meter", "text")

    def __init__(self, text: str, meter: Meter) -> None:
        self.text = text
        self.meter = meter
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

    def found(self, text: Text) -> list[int]:
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

    def best(self, text: Text, floor: int) -> int:
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
    cut = [pattern.split("*") for pattern in patterns]
    keys = [max(pieces, key=len) for pieces in cut]
    often = Counter(keys)
    if max(often.values(), default=0) > _SHARED:
        every = Counter(chain.from_iterable(cut))
        # The rarest piece, of these the longest; one that says nothing only if there is no other.
        rank = {piece: (count << 20) - len(piece) for piece, count in every.items()}
        rank |= dict.fromkeys(_NOTHING, len(patterns) << 30)
        keys = [
            min(pieces, key=rank.__getitem__) if often[key] > _SHARED else key
            for pieces, key in zip(cut, keys, strict=True)
        ]
    return [key[:-1] if key[-1:] == "$" else key for key in keys]


def _matches(pattern: str, within: Text) -> bool:
    """Whether a pattern whose key stands in the text matches it (RFC-28, RFC-29).

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
