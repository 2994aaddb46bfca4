"""Hot and cold records, and which may be evicted."""

from __future__ import annotations

import itertools
import random
import tracemalloc
from typing import NoReturn

import pytest

from gatekeeper import split_dict
from gatekeeper.clock import VirtualClock
from gatekeeper.config import Config
from gatekeeper.decision import Verdict
from gatekeeper.fetching import cache as cache_module
from gatekeeper.fetching.cache import RecordCache, SoftExpiry
from gatekeeper.fetching.outcomes import GUARD_REFUSALS, Outcome, Retrieval
from gatekeeper.fetching.records import OriginAnswer, Record, deflate, inflate
from gatekeeper.split_dict import SplitDict
from gatekeeper.storage.memory import MemoryStorage
from tests.fetching.directories import DAY, OLD, House, file, house

DOWN = Retrieval(outcome=Outcome.SERVER_ERROR, status=503)


def origin(number: int) -> str:
    return f"https://www.site-number-{number}.test"


def body(number: int, lines: int = 5) -> bytes:
    paths = random.Random(number)
    rules = "".join(f"Disallow: /{paths.randbytes(6).hex()}/\n" for _ in range(lines))
    return f"User-agent: *\n{rules}".encode()


async def fill(it: House, count: int, lines: int = 5) -> None:
    it.source.answer = lambda name: file(body(int(name.split("-")[-1][:-5]), lines), etag='"x"')
    for number in range(count):
        await it.get(origin(number))


async def test_a_record_at_rest_is_read_back_unchanged() -> None:
    async with house(cache={"hot_records": 1}) as it:
        it.source.answer = file(OLD, etag='"1"', last_modified="x", hops=("http://a/",), url="?")
        before = await it.get(origin(0))
        shown = before.standing(it.clock)
        it.source.answer = DOWN
        await it.get(origin(1))
        assert origin(0) not in it.directory.records
        assert not before.warm
        after = await it.get(origin(0))
        assert after is not before
        assert after.current == before.current
        assert after.fresh_until == pytest.approx(before.fresh_until, abs=0.001)
        assert after.expires == pytest.approx(before.expires, abs=0.001)
        again = after.standing(it.clock)
        assert (again.verdict, again.hops, again.took) == (shown.verdict, shown.hops, shown.took)
        assert it.allows(after, "/old") is False
        assert after.warm
        assert it.directory.records[origin(0)] is after
        assert len(it.source.asked) == 2


async def test_a_record_at_rest_keeps_the_old_copy_behind_a_failure() -> None:
    async with house(cache={"hot_records": 1}) as it:
        await it.get(origin(0))
        it.source.answer = DOWN
        await it.clock.elapse(DAY)
        before = await it.get(origin(0))
        await it.get(origin(1))
        after = await it.get(origin(0))
        assert after is not before
        assert after.good == before.good
        assert after.step == before.step
        assert after.unreachable_since == pytest.approx(before.unreachable_since, abs=0.001)
        assert after.text is not None
        assert after.text.body() == OLD
        assert after.standing(it.clock).verdict is Verdict.DEFER


async def test_memory_is_bounded_by_bytes() -> None:
    async with house(cache={"hot_records": 10, "max_bytes": 100_000}) as it:
        await fill(it, 500)
        stats = it.directory.stats()
        assert stats.bytes <= 100_000
        assert stats.hot == 10
        assert stats.evicted > 0
        assert stats.records == 500 - stats.evicted
        # The latest one is in memory, the first one is not.
        assert it.directory.peek(origin(499)) is not None
        assert it.directory.peek(origin(0)) is None


async def test_one_text_larger_than_the_bound_is_no_error() -> None:
    async with house(cache={"max_bytes": 2_000}) as it:
        await fill(it, 3, lines=500)
        assert (await it.get(origin(2))).reachable


async def test_a_record_that_says_when_to_retry_is_not_dropped_without_storage() -> None:
    async with house(DOWN, cache={"hot_records": 1, "max_bytes": 10_000}) as it:
        for number in range(20):
            await it.get(origin(number))
        it.source.answer = file(body(1, 50))
        for number in range(20, 200):
            await it.get(origin(number))
        asked = len(it.source.asked)
        for number in range(20):
            assert (await it.get(origin(number))).current.outcome is Outcome.SERVER_ERROR
        assert len(it.source.asked) == asked


async def test_a_dropped_record_is_read_from_the_storage() -> None:
    storage = MemoryStorage()
    async with house(DOWN, storage=storage, cache={"hot_records": 1, "max_bytes": 4_000}) as it:
        for number in range(100):
            await it.get(origin(number))
        assert it.directory.stats().evicted > 0
        assert (await it.get(origin(0))).current.outcome is Outcome.SERVER_ERROR
        assert len(it.source.asked) == 100


async def test_cold_records_share_a_large_text() -> None:
    text = body(1, 200)
    async with house(file(text), cache={"hot_records": 1}) as it:
        for number in range(51):
            await it.get(origin(number))
        alone = len(deflate(text))
        # One text, and the moments of 50 records; not 50 texts.
        assert it.directory.stats().bytes < 20_000 + alone + 50 * 300
        for number in range(50):
            record = await it.get(origin(number))
            assert record.text is not None
            assert record.text.body() == text


def test_a_text_is_the_same_after_packing() -> None:
    for text in (b"", OLD, body(3, 2000), bytes(range(256)) * 100):
        assert inflate(deflate(text)) == text


def test_a_cold_record_costs_little() -> None:
    """With key, dictionary, moments and text. A benchmark measures the mean of real files."""
    config = Config.from_dict({"cache": {"hot_records": 1}})
    clock = VirtualClock(start=1000.0)
    cache = RecordCache(config, stored=True, expiry=SoftExpiry(SplitDict(), clock))

    def put(number: int) -> None:
        answer = OriginAnswer(
            Outcome.RULES, 200, clock.wall(), (), 0.213, f'"{number:x}-5f3a"', None
        )
        text = cache.texts.of(body(number, 3))
        cache.put(
            Record(
                origin(number),
                config.fetch,
                current=answer,
                good=answer,
                text=text,
                fresh_until=clock.monotonic() + 0.8 * DAY,
                expires=clock.monotonic() + DAY,
            )
        )

    for number in range(100):
        put(number)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for number in range(100, 2100):
        put(number)
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    packed = len(deflate(body(1, 3)))
    assert (after - before) / 2000 < 350 + packed


def lasting_until(moment: float, number: int) -> Record:
    answer = OriginAnswer(Outcome.NO_FILE, 404, 0.0)
    return Record(
        origin(number), Config().fetch, current=answer, good=answer, fresh_until=moment, expires=DAY
    )


@pytest.mark.parametrize("set_back", [0.0, -3_600.0])
async def test_refusals_of_the_guard_are_forgotten_without_a_look_at_every_record(
    monkeypatch: pytest.MonkeyPatch, set_back: float
) -> None:
    """With 300,000 hot records, checking each would block the loop for a tenth of a second."""

    def listed(_self: object) -> NoReturn:
        raise AssertionError("every record is looked at")

    async with house(cache={"hot_records": 5}) as it:
        await fill(it, 3)
        for number in range(3, 9):
            it.source.answer = Retrieval(outcome=list(GUARD_REFUSALS)[number % 2])
            await it.get(origin(number))
        it.source.asked.clear()
        for _ in range(2):
            await it.get(origin(4))  # from the cold, and hot
        it.clock.advance(1.0)
        it.clock.jump_wall(set_back)
        with monkeypatch.context() as patched:
            for name in ("__iter__", "items", "values", "keys", "oldest"):
                patched.setattr(SplitDict, name, listed)
            it.directory.void_refusals()
        assert it.source.asked == []
        it.source.answer = file(OLD)
        it.clock.advance(1.0)
        for number in (3, 4, 8):  # cold, made hot, and hot
            assert it.allows(await it.get(origin(number)), "/new")
            assert it.allows(await it.get(origin(number)), "/new")
        assert len(it.source.asked) == 3
        await it.get(origin(0))
        assert len(it.source.asked) == 3  # only the guard's refusals were forgotten


@pytest.mark.parametrize("most", [50, split_dict.PART_LIMIT])
async def test_expired_records_leave_in_steps_and_at_their_time(
    monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """With one part, and with many, some of which are split during a sweep."""
    monkeypatch.setattr(cache_module, "_RECORDS_PER_STEP", 100)
    monkeypatch.setattr(split_dict, "PART_LIMIT", most)
    clock = VirtualClock(start=1000.0)
    records: SplitDict[str, Record] = SplitDict()
    expiry = SoftExpiry(records, clock)
    for number in range(1000):
        record = records[origin(number)] = lasting_until(1050.0 + 50.0 * (number % 2), number)
        expiry.mark_warm(record)
    left = [expiry.warm]
    for _ in range(2000):  # in steps of 10 ms
        clock.advance(0.01)
        if clock.monotonic() < 1050.0:
            assert expiry.warm == 1000
        left.append(expiry.warm)
    clock.advance(28.0)
    for _ in range(500):
        clock.advance(0.01)
        left.append(expiry.warm)
    assert max(before - after for before, after in itertools.pairwise(left)) <= 100
    warm = {name for name, record in records.items() if record.warm}
    assert warm == {origin(number) for number in range(1, 1000, 2)}
    # A record that is added during a sweep is not missed.
    clock.advance(49.0)
    late = records[origin(5000)] = lasting_until(clock.monotonic() + 5.0, 5000)
    expiry.mark_warm(late)
    for _ in range(3000):
        clock.advance(0.01)
    assert not expiry.warm
    assert not any(record.warm for record in records.values())
    expiry.close()


async def test_a_record_that_is_asked_about_stays_in_use() -> None:
    async with house(cache={"hot_records": 20}) as it:
        await fill(it, 20)
        for number in range(20, 200):
            await it.get(origin(3))
            await it.get(origin(number))
            assert it.directory.stats().hot == 20
        await it.get(origin(3))
        await it.get(origin(1000))
        assert origin(3) in it.directory._cache._hot
        assert len(it.source.asked) == 201
