"""`SplitDict` is a dictionary, and no step of it moves more than one part."""

from __future__ import annotations

import sys

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gatekeeper import split_dict
from gatekeeper.split_dict import MASK, PART_LIMIT, SplitDict

KEYS = st.integers(0, 60).map(lambda number: f"https://site{number}.example")


class AsADict(RuleBasedStateMachine):
    """Beside a `dict`, with parts of three entries."""

    @initialize()
    def begin(self) -> None:
        self.whole: dict[str, int] = {}
        self.split: SplitDict[str, int] = SplitDict()

    @rule(key=KEYS, value=st.integers())
    def put(self, key: str, value: int) -> None:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(split_dict, "PART_LIMIT", 3)
            self.whole[key] = self.split[key] = value

    @rule(key=KEYS, value=st.integers())
    def put_as_the_latest(self, key: str, value: int) -> None:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(split_dict, "PART_LIMIT", 3)
            assert self.split.replace(key, value) == self.whole.pop(key, None)
        self.whole[key] = value
        assert [*self.split.table[hash(key) & MASK]][-1] == key

    @rule(key=KEYS)
    def pop(self, key: str) -> None:
        assert self.split.pop(key, None) == self.whole.pop(key, None)

    @rule(key=KEYS)
    def take_if_there(self, key: str) -> None:
        assert self.split.discard(key) == self.whole.pop(key, None)

    @rule(key=KEYS)
    def look(self, key: str) -> None:
        assert self.split.get(key) == self.whole.get(key)
        assert self.split.table[hash(key) & MASK].get(key) == self.whole.get(key)
        assert key not in self.split.first or len(self.split.parts) == 1
        assert (key in self.split) is (key in self.whole)

    @rule()
    def find_the_oldest(self) -> None:
        found = self.split.oldest()
        assert bool(found) is bool(self.whole)
        assert set(found) <= set(self.whole)

    @rule()
    def empty(self) -> None:
        self.whole.clear()
        self.split.clear()

    @invariant()
    def is_the_same(self) -> None:
        if hasattr(self, "split"):
            assert dict(self.split) == self.whole
            assert len(self.split) == len(self.whole) == sum(map(len, self.split.parts))
            assert {*map(id, self.split.table)} == {*map(id, self.split.parts)}


TestAsADict = AsADict.TestCase


def test_no_part_is_larger_than_what_may_be_moved_at_once() -> None:
    """A dictionary of 40,000 keys takes a megabyte or two, and moves all of it when it grows."""
    split: SplitDict[str, int] = SplitDict()
    largest = 0
    for number in range(40_000):
        split[f"https://site{number}.example"] = number
        part = split.table[hash(f"https://site{number}.example") & MASK]
        largest = max(largest, len(part))
    assert len(split) == 40_000
    assert largest <= PART_LIMIT
    assert max(map(sys.getsizeof, split.parts)) < 60_000
    assert sum(map(sys.getsizeof, split.parts)) < 40_000 * 40


def test_a_small_split_dict_keeps_the_order_of_insertion() -> None:
    split = SplitDict[int, None]()
    for number in range(PART_LIMIT, 0, -1):
        split[number] = None
    assert list(split) == [*range(PART_LIMIT, 0, -1)]
    assert split.oldest() == [*range(PART_LIMIT, PART_LIMIT - PART_LIMIT // 64 - 2, -1)]


def test_repeated_oldest_reaches_every_part() -> None:
    split = SplitDict[int, None]()
    for number in range(4 * PART_LIMIT):
        split[number] = None
    taken = 0
    while split:
        taken += 1
        found = split.oldest()
        assert 0 < len(found) <= PART_LIMIT // 64 + 2
        for number in found:
            del split[number]
    assert taken < 4 * 64 * len(split.parts)
    assert split.oldest() == []


def test_keys_of_one_hash_are_kept_in_one_part() -> None:
    """Nothing is gained by another part then, and it does not look for one without an end."""

    class Same(int):
        def __hash__(self) -> int:
            return 7

    split = SplitDict[Same, int]()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(split_dict, "PART_LIMIT", 3)
        for number in range(50):
            split[Same(number)] = number
    assert len(split) == 50
    assert split[Same(49)] == 49
    assert len(split.parts) <= 11


def test_clearing_a_split_dict_hashes_no_key() -> None:
    """A reload of the guard does so in the loop, with 50,000 verdicts in it."""

    class Key(str):
        __slots__ = ()
        looks = 0

        def __hash__(self) -> int:
            Key.looks += 1
            return str.__hash__(self)

    many: SplitDict[str, int] = SplitDict()
    for number in range(3 * PART_LIMIT):
        many[Key(f"http://{number}.test")] = number
    assert len(many.parts) > 1
    Key.looks = 0
    many.clear()
    assert Key.looks == 0
    assert (len(many), list(many), many.get("http://1.test")) == (0, [], None)
    many["http://1.test"] = 1
    assert (len(many), many["http://1.test"]) == (1, 1)
