"""Many patterns at once: an index of pieces, and a trie of wildcard patterns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

__all__ = ["PieceIndex", "WildTrie"]

_MANY = 64
"""Pieces beyond which it pays to know their lengths."""


class PieceIndex:
    """Finds out which of many pieces stand in a text, at a cost that grows with the text.

    Either every piece is searched for, or every stretch of the text that is as long as some
    piece is looked up, whichever is less work.
    """

    __slots__ = ("_lengths", "_pieces")

    def __init__(self, pieces: Iterable[str]) -> None:
        self._pieces = frozenset(pieces)
        self._lengths = tuple({len(piece) for piece in self._pieces})

    def found(self, text: str, start: int = 0) -> Iterator[tuple[str, int]]:
        """Each piece that stands in the text from `start` on, with its leftmost place."""
        pieces = self._pieces
        room = len(text) - start
        # A search costs some 60 ns and a quarter of one an octet, a look-up twice that.
        if len(pieces) * (room + 256) <= len(self._lengths) * room * 512:
            for piece in pieces:
                place = text.find(piece, start)
                if place >= 0:
                    yield piece, place
            return
        seen: set[str] = set()
        for length in self._lengths:
            for place in range(start, len(text) - length + 1):
                piece = text[place : place + length]
                if piece in pieces and piece not in seen:
                    seen.add(piece)
                    yield piece, place


_Node = dict[str, Any]
"""From a piece to the node behind it. Under two keys that are no piece of a pattern stand
the patterns that end here, from their last piece to their entry."""
_PIECES = "*"
"""The last piece may stand anywhere behind."""
_SUFFIXES = "*$"
"""It ends the path (RFC-28)."""


class WildTrie:
    """Many wildcard patterns at once: what they share from the left is searched for once.

    Takes squeezed patterns in normal form, each with its entry; of two entries the greater
    one is the better match.
    """

    __slots__ = ("_indexes", "_root")

    def __init__(self, patterns: dict[str, int]) -> None:
        self._root: _Node = {}
        self._indexes: dict[int, PieceIndex] = {}  # by the id of a dictionary in the trie
        big: list[_Node] = []
        for pattern, entry in patterns.items():
            anchored = pattern.endswith("$")
            *pieces, last = (pattern[:-1] if anchored else pattern).split("*")
            node = self._root
            for piece in pieces:
                child = node.get(piece)
                if child is None:
                    child = node[piece] = {}
                    if len(node) == _MANY:
                        big.append(node)
                node = child
            ends = node.setdefault(_SUFFIXES if anchored else _PIECES, {})
            ends[last] = entry
            if len(ends) == _MANY:
                big.append(ends)
        for node in big:
            self._indexes[id(node)] = PieceIndex(
                piece for piece in node if piece not in {_PIECES, _SUFFIXES}
            )

    def best(self, path: str, floor: int) -> int:
        """The entry of the best match if it beats `floor`, else `floor`."""
        best = floor
        stack = [(node, len(piece)) for piece, node in self._root.items() if path.startswith(piece)]
        while stack:
            node, position = stack.pop()
            if suffixes := node.get(_SUFFIXES):
                best = max(best, _ending(suffixes, path, position))
            if pieces := node.get(_PIECES):
                for piece, _ in self._found(pieces, path, position):
                    best = max(best, pieces[piece])
            for piece, found in self._found(node, path, position):
                stack.append((node[piece], found + len(piece)))
        return best

    def _found(self, node: _Node, path: str, start: int) -> Iterable[tuple[str, int]]:
        if len(node) >= _MANY and (index := self._indexes.get(id(node))):
            return index.found(path, start)
        return [
            (piece, found)
            for piece in node
            if (found := path.find(piece, start)) >= 0 and piece not in {_PIECES, _SUFFIXES}
        ]


def _ending(suffixes: dict[str, int], path: str, start: int) -> int:
    """The greatest entry of a suffix that the path has from `start` on, or 0."""
    if len(suffixes) > len(path) - start:
        ends = (path[place:] for place in range(start, len(path) + 1))
        return max((suffixes.get(end, 0) for end in ends), default=0)
    return max(
        (
            entry
            for suffix, entry in suffixes.items()
            if path.endswith(suffix) and len(path) - len(suffix) >= start
        ),
        default=0,
    )
