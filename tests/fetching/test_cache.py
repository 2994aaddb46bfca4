"""Which records are in memory, and which may be evicted."""

from __future__ import annotations

import random
import tracemalloc
from typing import NoReturn

import pytest

from gatekeeper.clock import VirtualClock
from gatekeeper.config import Config
from gatekeeper.decision import Verdict
from gatekeeper.fetching.cache import RecordCache
from gatekeeper.fetching.faults import Uptime
from gatekeeper.fetching.outcomes import GUARD_REFUSALS, Outcome, Retrieval
from gatekeeper.fetching.records import OriginAnswer, Record
from gatekeeper.split_dict import SplitDict
from tests.fetching.directories import DAY, OLD, House, file, house
from tests.memory_storage import MemoryStorage

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


async def test_an_old_copy_behind_a_failure_is_set_aside_with_it() -> None:
    async with house(cache={"hot_records": 1}) as it:
        await it.get(origin(0))
        it.source.answer = DOWN
        await it.clock.elapse(DAY)
        before = await it.get(origin(0))
        await it.get(origin(1))
        assert origin(0) not in it.directory.records
        after = await it.get(origin(0))
        assert after is before
        assert after.text is not None
        assert after.text.body() == OLD
        assert it.directory.stats().texts == 1
        assert after.standing(it.clock).verdict is Verdict.DEFER
        it.source.answer = DOWN
        assert await it.directory.refresh(origin(0)) is not before
        assert it.directory.stats().records == 2
        assert it.directory.stats().texts == 1


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


@pytest.mark.parametrize("reachable", [True, False])
def test_a_record_without_a_text_costs_what_is_reckoned(reachable: bool) -> None:
    """With key and dictionary. A benchmark measures the mean of real files."""
    config, clock, uptime = Config(), VirtualClock(start=1000.0), Uptime()
    cache = RecordCache(config, stored=False)
    outcome = Outcome.NO_FILE if reachable else Outcome.CONNECT_FAILED

    def put(number: int) -> None:
        now = clock.monotonic() + number
        answer = OriginAnswer(outcome, 404 if reachable else None, clock.wall() + number)
        cache.put(
            Record(
                origin(number),
                config.fetch,
                answer,
                now + DAY,
                now + 0.8 * DAY,
                good=answer if reachable else None,
                unreachable_since=None if reachable else now,
                uptime=uptime,
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
    assert (after - before) / 2000 == pytest.approx(cache.bytes / len(cache), rel=0.25)


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
            await it.get(origin(4))  # set aside
        it.clock.advance(1.0)
        it.clock.jump_wall(set_back)
        with monkeypatch.context() as patched:
            for name in ("__iter__", "items", "values", "keys", "oldest"):
                patched.setattr(SplitDict, name, listed)
            it.directory.void_refusals()
        assert it.source.asked == []
        it.source.answer = file(OLD)
        it.clock.advance(1.0)
        for number in (3, 4, 8):  # set aside, and hot
            assert it.allows(await it.get(origin(number)), "/new")
            assert it.allows(await it.get(origin(number)), "/new")
        assert len(it.source.asked) == 3
        it.source.answer = DOWN
        for number in (9, 9):
            await it.get(origin(number))
        assert len(it.source.asked) == 4  # only the guard's refusals were forgotten


async def test_a_record_that_is_asked_about_stays_in_use() -> None:
    async with house(cache={"hot_records": 20}) as it:
        await fill(it, 20)
        for number in range(20, 200):
            await it.get(origin(3))
            await it.get(origin(number))
            assert it.directory.stats().hot == 20
        await it.get(origin(3))
        await it.get(origin(1000))
        assert origin(3) in it.directory.records
        assert len(it.source.asked) == 201
