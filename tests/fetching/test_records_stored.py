"""Records that outlive the process, and those that a restart fetches again."""

from __future__ import annotations

import msgspec
import pytest

from gatekeeper.clock import VirtualClock
from gatekeeper.decision import Reason, State, Verdict
from gatekeeper.errors import StorageError
from gatekeeper.fetching.outcomes import Outcome, Retrieval
from gatekeeper.storage.base import OriginRecord
from tests.fetching.directories import DAY, HOUR, NEW, OLD, ORIGIN, Source, file, house, lasting
from tests.memory_storage import MemoryStorage

DOWN = Retrieval(outcome=Outcome.SERVER_ERROR, status=503)


def restarted(clock: VirtualClock, *, wall: float = 0.0) -> VirtualClock:
    """Return the clock of the next process, with another monotonic time."""
    return VirtualClock(start=7.0, wall=clock.wall() + wall)


async def test_after_a_restart_a_fresh_record_is_not_fetched_again() -> None:
    storage = MemoryStorage()
    async with house(storage=storage) as first:
        await first.get()
        await first.clock.elapse(HOUR)
    async with house(file(NEW), storage=storage, clock=restarted(first.clock)) as second:
        record = await second.get()
        assert second.allows(record, "/old") is False
        assert second.source.asked == []
        standing = record.standing(second.clock)
        assert standing.state is State.PARSED
        assert standing.fetched_at == second.clock.wall() - HOUR
        assert standing.took == 0.25
        # The hard limit of 24 hours counts from the fetch, not from the restart.
        await second.clock.elapse(23 * HOUR)
        assert second.allows(await second.get(), "/old") is True
        assert second.source.asked == [ORIGIN]


async def test_a_record_in_its_soft_time_answers_and_is_refreshed() -> None:
    storage = MemoryStorage()
    async with house(lasting(HOUR), storage=storage) as first:
        await first.get()
        await first.clock.elapse(0.96 * HOUR)
    async with house(file(NEW), storage=storage, clock=restarted(first.clock)) as second:
        assert second.allows(await second.get(), "/old") is False
        await second.clock.settle()
        assert second.allows(await second.get(), "/new") is False


async def test_an_expired_record_still_gives_its_validators() -> None:
    storage = MemoryStorage()
    async with house(file(OLD, etag='"7"'), storage=storage) as first:
        await first.get()
        await first.clock.elapse(2 * DAY)
    source = Source(Retrieval(outcome=Outcome.NOT_MODIFIED, status=304))
    async with house(source, storage=storage, clock=restarted(first.clock)) as second:
        record = await second.get()
        assert source.validators[0] is not None
        assert source.validators[0].etag == '"7"'
        assert second.allows(record, "/old") is False
        assert record.standing(second.clock).state is State.PARSED


async def test_retry_delays_and_the_start_of_an_outage_survive_a_restart() -> None:
    storage = MemoryStorage()
    async with house(lasting(HOUR), storage=storage) as first:
        await first.get()
        first.source.answer = DOWN
        await first.clock.elapse(HOUR)
        for _ in range(4):
            record = await first.get()
            await first.clock.elapse(record.expires - first.clock.monotonic())
        step = (await first.get()).step
    async with house(DOWN, storage=storage, clock=restarted(first.clock)) as second:
        record = await second.get()
        assert second.source.asked == [], "the rung has not passed"
        assert record.step == step
        assert record.standing(second.clock).verdict is Verdict.DEFER
        await second.clock.elapse(12 * HOUR)
        # 12 hours since the first failure, most of them in the other process.
        record = await second.get()
        assert record.standing(second.clock).state is State.STALE
        assert second.allows(record, "/old") is False


async def test_pages_reported_before_the_restart_count_after_a_month() -> None:
    storage = MemoryStorage()
    async with house(DOWN, storage=storage) as first:
        await first.get()
        await first.clock.elapse(30 * DAY)
        first.directory.note_page(ORIGIN, True)
    async with house(DOWN, storage=storage, clock=restarted(first.clock)) as second:
        standing = (await second.get()).standing(second.clock)
        assert standing.reason is Reason.LONG_UNREACHABLE


@pytest.mark.parametrize("jump", [DAY, -DAY])
async def test_a_jump_of_the_wall_clock_between_two_processes_expires_a_record(jump: float) -> None:
    storage = MemoryStorage()
    async with house(storage=storage) as first:
        await first.get()
    clock = restarted(first.clock, wall=jump)
    async with house(file(NEW), storage=storage, clock=clock) as second:
        # Forward: it seems a day old. Back: its age is unknown.
        assert second.allows(await second.get(), "/new") is False
        assert second.source.asked == [ORIGIN]


@pytest.mark.parametrize("jump", [-30 * DAY, -10 * HOUR, -2 * HOUR, 2 * HOUR, 30 * DAY])
async def test_a_clock_set_while_down_changes_no_lifetime_on_one_start_of_the_machine(
    jump: float,
) -> None:
    storage = MemoryStorage()
    async with house(storage=storage) as first:
        await first.get()
        await first.clock.elapse(HOUR)
    first.clock.jump_wall(jump)
    async with house(file(NEW), storage=storage, clock=first.clock) as second:
        assert second.allows(await second.get(), "/old") is False
        assert second.source.asked == []
        # The hard limit of 24 hours counts from the fetch, whatever the wall clock shows.
        await second.clock.elapse(23 * HOUR)
        assert second.allows(await second.get(), "/old") is True


@pytest.mark.parametrize("jump", [-30 * DAY, -2 * HOUR, 2 * HOUR, 30 * DAY])
async def test_a_clock_set_while_down_changes_no_retry_delay(jump: float) -> None:
    storage = MemoryStorage()
    async with house(DOWN, storage=storage) as first:
        left = (await first.get()).expires - first.clock.monotonic()
        await first.clock.elapse(left / 2)
    first.clock.jump_wall(jump)
    async with house(DOWN, storage=storage, clock=first.clock) as second:
        record = await second.get()
        assert second.source.asked == []
        assert record.expires - second.clock.monotonic() == pytest.approx(left / 2)
        assert record.unreachable_for(second.clock.monotonic()) == pytest.approx(left / 2)


async def test_a_clock_set_back_prolongs_no_retry_delay() -> None:
    storage = MemoryStorage()
    async with house(DOWN, storage=storage) as first:
        pause = (await first.get()).expires - first.clock.monotonic()
    async with house(DOWN, storage=storage, clock=restarted(first.clock, wall=-DAY)) as second:
        record = await second.get()
        assert second.source.asked == []
        assert record.expires - second.clock.monotonic() == pytest.approx(pause)


class Damaged(MemoryStorage):
    """A storage that loses the texts of its records."""

    async def load_origin(self, origin: str) -> OriginRecord | None:
        record = await super().load_origin(origin)
        return record and msgspec.structs.replace(record, body=None)


class Broken(MemoryStorage):
    async def load_origin(self, origin: str) -> OriginRecord | None:
        raise StorageError("the disk is gone")

    def put_origin(self, record: OriginRecord) -> None:
        raise StorageError("the disk is gone")


async def test_a_lost_text_is_never_taken_for_an_empty_one() -> None:
    storage = Damaged()
    async with house(storage=storage) as first:
        await first.get()
    async with house(storage=storage, clock=restarted(first.clock)) as second:
        assert second.allows(await second.get(), "/old") is False
        assert second.source.asked == [ORIGIN]
        assert second.directory.stats().storage_errors == 1


async def test_a_record_with_damaged_metadata_is_fetched_again() -> None:
    storage = MemoryStorage()
    async with house(storage=storage) as first:
        await first.get()
    stored = await storage.load_origin(ORIGIN)
    assert stored is not None
    for damaged in ("[", '{"brief": 1}', '["x"]'):
        storage.put_origin(msgspec.structs.replace(stored, metadata=damaged))
        async with house(storage=storage, clock=restarted(first.clock)) as second:
            assert second.allows(await second.get(), "/old") is False
            assert second.source.asked == [ORIGIN]
            assert second.directory.stats().storage_errors == 1


async def test_a_storage_that_fails_is_counted_and_the_gate_goes_on() -> None:
    async with house(storage=Broken()) as it:
        assert it.allows(await it.get(), "/old") is False
        assert it.directory.stats().storage_errors == 2


async def test_an_outcome_of_a_later_version_defers() -> None:
    storage = MemoryStorage()
    async with house(DOWN, storage=storage) as first:
        await first.get()
    stored = await storage.load_origin(ORIGIN)
    assert stored is not None
    storage.put_origin(msgspec.structs.replace(stored, outcome="invented_later"))
    async with house(storage=storage, clock=restarted(first.clock)) as second:
        assert (await second.get()).standing(second.clock).verdict is Verdict.DEFER


async def test_each_distinct_body_enters_the_history() -> None:
    storage = MemoryStorage()
    async with house(file(OLD), storage=storage) as it:
        await it.get()
        it.source.answer = file(NEW)
        await it.clock.elapse(DAY)
        await it.get()
        it.source.answer = DOWN
        await it.clock.elapse(DAY)
        await it.get()
    history = await storage.history(ORIGIN)
    assert [await storage.body(entry.body_hash) for entry in history] == [OLD, NEW]


@pytest.mark.parametrize("outcome", [Outcome.BLOCKED, Outcome.EGRESS_POLICY])
async def test_an_origin_refused_by_the_guard_is_judged_again_by_the_next_process(
    outcome: Outcome,
) -> None:
    """Otherwise it would be refused for a day, even if the next process may fetch it."""
    storage = MemoryStorage()
    async with house(Retrieval(outcome=outcome), storage=storage) as first:
        await first.get()
    async with house(file(NEW), storage=storage, clock=restarted(first.clock)) as second:
        assert second.allows(await second.get(), "/old") is True
