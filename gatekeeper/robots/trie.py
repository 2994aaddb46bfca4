"""Many patterns at once: an index of pieces, and a trie of wildcard patterns."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

__all__ = ["LastPlaces", "Meter", "PieceIndex", "TooDear", "WildTrie"]

_HARD = 4_096
"""Octets searched for in one text beyond which its stretches are worth sorting."""
_MANY = 64
"""Pieces beyond which it pays to know their lengths."""
_BEHIND_ALL = chr(0x10FFFF)
_STEPS = 24_576
"""Pieces of wildcard patterns that are searched for in one path: some 3 ms."""
_STRIDE = 6
"""A search counts as a step more for every two to that power octets that it goes over."""
_SEARCH = 16
"""Steps as which it counts to find the last place of a piece."""
_BUCKET = 64
"""Patterns under one node that are tried one by one."""
_MANY_CHILDREN = 1_024
"""Pieces behind one node as which any greater number counts: an index finds them."""


class TooDear(Exception):
    """A file was made so that one answer would take long: nobody writes such a one by hand."""


class Meter:
    """The steps that one answer may still take.

    A quarter of a million pieces find room in a file, and a path can be made for which most
    of them have to be searched for. Whoever meets such a file must not let a site stop all
    its work: past the bound the answer is no, which never does harm to the site.
    """

    __slots__ = ("_left",)

    def __init__(self, steps: int) -> None:
        self._left = steps

    def spend(self, steps: int) -> None:
        """Take so many steps. Raises TooDear."""
        self._left -= steps
        if self._left < 0:
            raise TooDear


class LastPlaces(dict[str, int]):
    """From a piece to the last place where it stands in a text, or -1.

    To search for `aaa...ab` in `aaa...a` takes the product of both lengths, in C too. One
    such search does no harm; where there are many the text's stretches are sorted, and those
    that begin with a piece found by bisection.
    """

    __slots__ = ("_places", "_spent", "_stretches", "_text", "_width")

    def __init__(self, text: str) -> None:
        self._text = text
        self._spent = 0
        self._stretches: list[str] = []
        self._places: list[int] = []
        """Where each of the stretches begins."""
        # From there on the search itself is linear for pieces longer than that.
        self._width = len(text) if len(text) < 2_500 else 128

    def __missing__(self, piece: str) -> int:
        self._spent += len(piece)
        if self._spent > _HARD and len(piece) > 4:
            place = self._among_stretches(piece)
        else:
            place = self._text.rfind(piece)
        self[piece] = place
        return place

    def _among_stretches(self, piece: str) -> int:
        if not self._stretches:
            text, width = self._text, self._width
            stretches = [text[place : place + width] for place in range(len(text))]
            self._places = sorted(range(len(text)), key=stretches.__getitem__)
            self._stretches = [stretches[place] for place in self._places]
        begin = piece[: self._width]
        low = bisect_left(self._stretches, begin)
        high = bisect_left(self._stretches, begin + _BEHIND_ALL, low)
        if low == high:
            return -1
        return self._text.rfind(piece) if begin != piece else max(self._places[low:high])


class PieceIndex:
    """Finds out which of many pieces stand in a text, at a cost that grows with the text.

    Either every piece is searched for, or every stretch of the text that is as long as some
    piece is looked up, whichever is less work.
    """

    __slots__ = ("_lengths", "_pieces")

    def __init__(self, pieces: Iterable[str]) -> None:
        self._pieces = frozenset(pieces)
        self._lengths = tuple({len(piece) for piece in self._pieces})

    def found(self, text: str, last: LastPlaces, start: int = 0) -> Iterable[str]:
        """Each piece that stands in the text from `start` on. `last`: the places in that text."""
        pieces = self._pieces
        room = len(text) - start
        # A search costs some 60 ns and a quarter of one an octet, a look-up twice that.
        if len(pieces) * (room + 256) <= len(self._lengths) * room * 512:
            return [piece for piece in pieces if last[piece] >= start]
        found: set[str] = set()
        for length in self._lengths:
            places = range(start, len(text) - length + 1)
            found.update(pieces.intersection([text[i : i + length] for i in places]))
        return found


class WildTrie:
    """Many wildcard patterns at once: what they share from the left is searched for once.

    Takes squeezed patterns in normal form, each with its entry; of two entries the greater
    one is the better match. What a pattern ends with, if a `$` anchors it there (RFC-28), is
    looked at before anything else; then its head, which stands before its first star.
    """

    __slots__ = ("_ends", "_grown")

    def __init__(self, patterns: dict[str, int]) -> None:
        self._ends: dict[str | None, list[tuple[str, int]]] = {}
        """From an end to what stands before it, with the entry; None: no end is anchored."""
        self._grown: dict[str | None, _Heads] = {}
        """Of the ends that some path has had."""
        for pattern, entry in patterns.items():
            end: str | None = None
            rest = pattern
            if pattern[-1] == "$":
                rest, _, end = pattern[:-1].rpartition("*")
            self._ends.setdefault(end, []).append((rest, entry))

    def best(self, path: str, floor: int) -> int:
        """The entry of the best match if it beats `floor`, else `floor`. Raises TooDear."""
        meter = Meter(_STEPS)
        for end in self._ends_of(path):
            heads = self._grown.get(end)
            if heads is None:
                heads = self._grown[end] = _Heads(self._ends[end])
            text = path[: len(path) - len(end)] if end else path
            last = LastPlaces(text)
            for length, node in heads.found(text):
                floor = node.best(text, last, meter, length, floor)
        return floor

    def _ends_of(self, path: str) -> Iterable[str | None]:
        ends = self._ends
        if len(ends) <= len(path):
            return [end for end in ends if end is None or path.endswith(end)]
        found: list[str | None] = [None] if None in ends else []
        return found + [end for i in range(len(path) + 1) if (end := path[i:]) in ends]


class _Heads:
    """Trees by what stands before the first star."""

    __slots__ = ("_lengths", "_nodes")

    def __init__(self, patterns: Iterable[tuple[str, int]]) -> None:
        self._nodes: dict[str, _Node] = {}
        for pattern, entry in patterns:
            head, _, tail = pattern.partition("*")
            node = self._nodes.get(head)
            if node is None:
                node = self._nodes[head] = _Node()
            node.add(tail, entry)
        self._lengths = tuple({len(head) for head in self._nodes})

    def found(self, text: str) -> list[tuple[int, _Node]]:
        """The trees whose head the text begins with, with its length."""
        nodes = self._nodes
        if len(self._lengths) < len(nodes):
            heads = (text[:length] for length in self._lengths if length <= len(text))
            return [(len(head), nodes[head]) for head in heads if head in nodes]
        return [(len(head), node) for head, node in nodes.items() if text.startswith(head)]


class _Node:
    """What may follow a piece that was found: tails, the rests of patterns, with their entries.

    Where there are too many tails to try one by one, the first path that comes here sorts them
    by their next piece; a file may hold a quarter of a million pieces, of which few are ever
    come to.
    """

    __slots__ = ("_chain", "_children", "_index", "_split", "_tails", "entry", "top")

    def __init__(self) -> None:
        self.entry = 0
        """Of the pattern that ends here."""
        self.top = 0
        """The greatest entry here and below."""
        self._tails: list[tuple[int, str]] = []
        self._split: list[tuple[int, list[str]]] | None = None
        self._chain: list[str] = []
        """Pieces that all the tails begin with, and that stand in none of them any more."""
        self._children: dict[str, _Node] | None = None
        self._index: PieceIndex | None = None

    def add(self, tail: str, entry: int) -> None:
        """Take the rest of a pattern; nothing is left of one that ends here."""
        self.top = max(self.top, entry)
        if tail:
            self._tails.append((entry, tail))
        elif entry > self.entry:
            self.entry = entry

    def best(self, text: str, last: LastPlaces, meter: Meter, start: int, floor: int) -> int:
        """The greatest entry of what matches the text from `start` on, if it beats `floor`."""
        find = text.find
        stack = [(self, start, "")]  # a node, and the piece before it, from where on it stands
        while stack:
            node, begin, piece = stack.pop()
            if node.top <= floor:
                continue
            floor = max(floor, node.entry)
            position = find(piece, begin) + len(piece)
            meter.spend(1 + (position - begin >> _STRIDE))
            if len(node._tails) <= _BUCKET:
                floor = node._best_tail(text, last, meter, position, floor)
                continue
            children = node._children or node._branch()
            meter.spend(min(len(children), _MANY_CHILDREN))
            for piece in node._chain:
                position = find(piece, position)
                if position < 0:
                    break
                position += len(piece)
            else:
                nearby = node._next(children, text, last, position)
                stack += [(children[piece], position, piece) for piece in nearby]
        return floor

    def _best_tail(self, text: str, last: LastPlaces, meter: Meter, start: int, floor: int) -> int:
        """The same of the tails, which are tried from the best one on."""
        tails = self._split
        if tails is None:
            ranked = sorted(self._tails, reverse=True)
            tails = self._split = [(entry, tail.split("*")) for entry, tail in ranked]
        find, known = text.find, len(last)
        for entry, pieces in tails:
            if entry <= floor:
                break
            position, step = start, 0
            for step, piece in enumerate(pieces, 1):  # noqa: B007 - wanted behind the loop
                # The search for a piece that does not follow is the dear one: done once.
                if position > last[piece]:
                    break
                position = find(piece, position) + len(piece)
            else:
                return entry
            meter.spend(step + (position - start >> _STRIDE) + (len(last) - known) * _SEARCH)
            known = len(last)
        return floor

    def _next(
        self, children: dict[str, _Node], text: str, last: LastPlaces, start: int
    ) -> list[str]:
        """The pieces that stand in the text from `start` on, the most promising one last."""
        if len(children) < _MANY:
            found: Iterable[str] = [piece for piece in children if last[piece] >= start]
        else:
            if self._index is None:
                self._index = PieceIndex(children)
            found = self._index.found(text, last, start)
        return sorted(found, key=lambda piece: children[piece].top)

    def _branch(self) -> dict[str, _Node]:
        """Sort the tails by their next piece."""
        tails = [tail for _, tail in self._tails]
        low, high = min(tails), max(tails)
        shared = next(
            (i for i, (one, other) in enumerate(zip(low, high, strict=False)) if one != other),
            len(low),
        )
        cut = low.rfind("*", 0, shared)
        if cut > 0:
            self._chain = low[:cut].split("*")
        children: dict[str, _Node] = {}
        for entry, tail in self._tails:
            piece, _, rest = tail[cut + 1 :].partition("*")
            node = children.get(piece)
            if node is None:
                node = children[piece] = _Node()
            node.add(rest, entry)
        self._children = children  # last of all: another thread may be reading
        return children
