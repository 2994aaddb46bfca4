"""A dictionary that grows in small steps: no insertion moves all of its entries."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, ValuesView
from itertools import chain, islice
from typing import Any, Final, TypeVar, overload

K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T")

PART_LIMIT: Final = 2_500
"""A part with more entries is split in two: a little less than a `dict` of 4,096 slots holds."""
MASK: Final = 1_023
"""The bits of a key's hash that select its part. Beyond two million entries parts grow larger."""


class _Values(ValuesView[V]):
    _mapping: SplitDict[Any, V]

    def __iter__(self) -> Iterator[V]:
        parts = self._mapping.parts
        return chain.from_iterable([tuple(part.values()) for part in tuple(parts)])


class SplitDict(MutableMapping[K, V]):
    """A dictionary for data that grows with the number of origins or hosts.

    A full `dict` is rebuilt within one insertion, which reads the hash of every key, and those
    exceed every processor cache: at 175,000 keys it stops the loop for 8 ms. This dictionary has
    parts, selected by the key's hash, and a full part is split in two (extendible hashing: R. Fagin
    and others, ACM Transactions on Database Systems 4:3, 1979). Up to `PART_LIMIT` entries it
    is one `dict` in insertion order; after that each part is in insertion order.

    >>> numbers: SplitDict[str, int] = SplitDict()
    >>> numbers["one"] = 1
    >>> numbers.get("one"), numbers.get("two"), len(numbers)
    (1, None, 1)
    """

    __slots__ = ("_next_part", "first", "parts", "size", "table")

    def __init__(self) -> None:
        self.first: dict[K, V] = {}
        """Every entry, up to `PART_LIMIT`; empty from then on. A hot path that only reads
        looks here first, then in `table[hash(key) & MASK]`; with few entries this is enough."""
        self.parts: list[dict[K, V]] = [self.first]
        """Each part once. An iteration while parts are split may visit some entries twice, but
        misses none."""
        self.table: list[dict[K, V]] = self.parts * (MASK + 1)
        """Maps hash bits to parts: a key's part is `table[hash(key) & MASK]`."""
        self.size: int = 0
        """The number of entries."""
        self._next_part = 0

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[K]:
        return chain.from_iterable(self.parts)

    def __contains__(self, key: object) -> bool:
        return key in self.table[hash(key) & MASK]

    def __getitem__(self, key: K) -> V:
        return self.table[hash(key) & MASK][key]

    @overload
    def get(self, key: K, default: None = None) -> V | None: ...
    @overload
    def get(self, key: K, default: V | T) -> V | T: ...
    def get(self, key: K, default: Any = None) -> Any:
        """Return the value of the key, or the default."""
        return self.table[hash(key) & MASK].get(key, default)

    def __setitem__(self, key: K, value: V) -> None:
        part = self.table[hash(key) & MASK]
        before = len(part)
        part[key] = value
        if len(part) > before:
            self.size += 1
            if before >= PART_LIMIT:
                self._split(part, hash(key) & MASK)

    def __delitem__(self, key: K) -> None:
        del self.table[hash(key) & MASK][key]
        self.size -= 1

    def values(self) -> ValuesView[V]:
        """Return a view of the values. An iteration sees the values present when it starts, and
        may run in another thread."""
        return _Values(self)

    def replace(self, key: K, value: V) -> V | None:
        """Insert an entry as the newest of its part. Return the key's previous value, or None."""
        old = self.discard(key)
        self[key] = value
        return old

    def discard(self, key: K) -> V | None:
        """Remove the key's entry and return its value, or None if there is no entry.

        Unlike `pop`, which raises and catches a KeyError inside, it is cheap for a missing key.
        """
        part = self.table[hash(key) & MASK]
        if key not in part:
            return None
        self.size -= 1
        return part.pop(key)

    def clear(self) -> None:
        """Remove every entry; the parts stay, empty. `MutableMapping.clear` would remove entries
        one by one, at quadratic cost."""
        for part in self.parts:
            part.clear()
        self.size = 0

    def make_room(self, most: int) -> None:
        """Remove some of the oldest entries if there are `most` or more."""
        if self.size >= most:
            for key in self.oldest():
                del self[key]

    def oldest(self) -> list[K]:
        """Return the oldest 64th of the keys of one part, two at least; the next call takes
        another part.

        Several keys at a time, because finding the first key of a dictionary skips the slots of
        all keys removed before it: one by one, that has quadratic cost.
        """
        while self.size:
            part = self.parts[self._next_part % len(self.parts)]
            self._next_part += 1
            if part:
                return [*islice(part, len(part) // 64 + 2)]
        return []

    def _split(self, part: dict[K, V], place: int) -> None:
        """Replace a full part, found at `place` of the table, by two halves."""
        table, bit = self.table, 1
        while bit <= MASK and table[place ^ bit] is not part:
            bit <<= 1
        if bit > MASK:
            return  # the part has a single place in the table: it can't be split further
        halves: tuple[dict[K, V], dict[K, V]] = {}, {}
        for key, value in part.items():
            halves[bool(hash(key) & bit)][key] = value
        for slot in range(place & (bit - 1), MASK + 1, bit):
            table[slot] = halves[bool(slot & bit)]
        index = next(n for n, each in enumerate(self.parts) if each is part)
        self.parts[index : index + 1] = halves  # in one step: another thread may be iterating
        if part is self.first:
            part.clear()
