"""A dictionary that grows in small steps: no insertion moves all that is in it."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, ValuesView
from itertools import chain, islice
from typing import Any, Final, TypeVar, overload

K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T")

MOST: Final = 2_500
"""Entries of a part beyond which it becomes two: a little less than a `dict` of 4,096 places
holds."""
MASK: Final = 1_023
"""Bits of a key's hash that find its part. Beyond two million entries parts grow larger."""


class _Values(ValuesView[V]):
    _mapping: SplitDict[Any, V]

    def __iter__(self) -> Iterator[V]:
        parts = self._mapping.parts
        return chain.from_iterable([tuple(part.values()) for part in tuple(parts)])


class SplitDict(MutableMapping[K, V]):
    """A dictionary for what grows with the number of origins or hosts.

    A `dict` that is full is built anew within one insertion, and looks at the hash of every key,
    which no processor cache holds: at 175,000 keys it stops the loop for 8 ms. This one has parts,
    found by the key's hash, and a full part becomes two (extendible hashing: R. Fagin and others,
    ACM Transactions on Database Systems 4:3, 1979). Until then, up to `MOST` entries, it is one
    `dict`, in the order in which keys came; later each part is in that order.

    >>> numbers: SplitDict[str, int] = SplitDict()
    >>> numbers["one"] = 1
    >>> numbers.get("one"), numbers.get("two"), len(numbers)
    (1, None, 1)
    """

    __slots__ = ("_next", "first", "parts", "size", "table")

    def __init__(self) -> None:
        self.first: dict[K, V] = {}
        """All there is, until that is more than `MOST`; empty from then on. A hot path, which only
        reads, looks here and then into `table[hash(key) & MASK]`: of few it never does so."""
        self.parts: list[dict[K, V]] = [self.first]
        """Each part once. Whoever goes through them while some become two may come to a part twice,
        and misses none."""
        self.table: list[dict[K, V]] = self.parts * (MASK + 1)
        """The part of a key is `table[hash(key) & MASK]`."""
        self.size: int = 0
        """How many entries there are."""
        self._next = 0

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
        """The value of the key, or the default."""
        return self.table[hash(key) & MASK].get(key, default)

    def __setitem__(self, key: K, value: V) -> None:
        part = self.table[hash(key) & MASK]
        before = len(part)
        part[key] = value
        if len(part) > before:
            self.size += 1
            if before >= MOST:
                self._split(part, hash(key) & MASK)

    def __delitem__(self, key: K) -> None:
        del self.table[hash(key) & MASK][key]
        self.size -= 1

    def values(self) -> ValuesView[V]:
        """The values; who goes through them meets those that are there as that begins. That may
        be in another thread."""
        return _Values(self)

    def replace(self, key: K, value: V) -> V | None:
        """Put in an entry as the latest of its part, and give the value that the key had; None
        where it had none."""
        part = self.table[hash(key) & MASK]
        old = part.pop(key, None)
        part[key] = value
        if old is None:
            self.size += 1
            if len(part) > MOST:
                self._split(part, hash(key) & MASK)
        return old

    def take(self, key: K) -> V | None:
        """Take out the entry of the key, and give its value; None where there is none. Nobody who
        takes out what is not there has an error made and caught, as `pop` does."""
        part = self.table[hash(key) & MASK]
        if key not in part:
            return None
        self.size -= 1
        return part.pop(key)

    def clear(self) -> None:
        """Take out everything: the parts stay, empty. (One by one, as a mapping does by itself, it
        would cost the square.)"""
        for part in self.parts:
            part.clear()
        self.size = 0

    def make_room(self, most: int) -> None:
        """Take out some of the oldest where there are so many."""
        if self.size >= most:
            for key in self.oldest():
                del self[key]

    def oldest(self) -> list[K]:
        """A 64th of the keys of one part, two at least, those that came first; of another part the
        next time.

        Some at once: finding the first key of a dictionary passes over all that were taken out
        before it, which one by one would cost the square.
        """
        parts, size = self.parts, len(self.parts)
        found: list[K] = []
        for _ in range(size if self.size else 0):
            part, self._next = parts[self._next], (self._next + 1) % size
            if part:
                found = [*islice(part, len(part) // 64 + 2)]
                break
        return found

    def _split(self, part: dict[K, V], place: int) -> None:
        """Give half of the part's entries, and of its places in the table, to a new one."""
        table, bit = self.table, 1
        while bit <= MASK and table[place ^ bit] is not part:
            bit <<= 1
        if bit > MASK:
            return  # a place of its own is all that a part can have
        both: tuple[dict[K, V], dict[K, V]] = {}, {}
        for key, value in part.items():
            both[bool(hash(key) & bit)][key] = value
        for each in range(place & (bit - 1), MASK + 1, bit):
            table[each] = both[bool(each & bit)]
        index = next(n for n, each in enumerate(self.parts) if each is part)
        self.parts[index : index + 1] = both  # in one step, for who lists them in another thread
        if part is self.first:
            part.clear()
