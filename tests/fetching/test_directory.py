"""One record per origin, and one fetch for any number of concurrent callers."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import Callable

import pytest

from gatekeeper.clock import VirtualClock
from gatekeeper.decision import Reason, State, Verdict
from gatekeeper.errors import GateClosed
from gatekeeper.fetching.outcomes import Outcome, Retrieval
from gatekeeper.robots import Policy, RobotsTxt
from tests.fetching.directories import (
    DAY,
    HOUR,
    NEW,
    OLD,
    ORIGIN,
    Source,
    file,
    house,
    lasting,
)
from tests.memory_storage import MemoryStorage

DOWN = Retrieval(outcome=Outcome.SERVER_ERROR, status=503)
GONE = Retrieval(outcome=Outcome.NO_FILE, status=404)


def held(answer: Retrieval | None = None) -> Source:
    source = Source(answer)
    source.hold = asyncio.Event()
    return source


# Single flight


async def test_a_thousand_questions_are_one_fetch() -> None:
    source = held()
    async with house(source) as it:
        waiting = [asyncio.create_task(it.get()) for _ in range(1000)]
        await it.clock.settle()
        assert it.directory.stats().waiting == 1000
        assert source.hold is not None
        source.hold.set()
        records = await asyncio.gather(*waiting)
        assert source.asked == [ORIGIN]
        assert len(set(map(id, records))) == 1
        assert it.directory.stats().waiting == 0


async def test_a_cancelled_first_caller_does_not_end_the_fetch() -> None:
    source = held()
    async with house(source) as it:
        first, second = (asyncio.create_task(it.get()) for _ in range(2))
        await it.clock.settle()
        first.cancel()
        await it.clock.settle()
        assert first.cancelled()
        assert source.hold is not None
        source.hold.set()
        assert (await second).reachable
        assert source.asked == [ORIGIN]


async def test_a_fetch_that_all_callers_left_is_finished_and_kept() -> None:
    source = held()
    async with house(source) as it:
        tasks = [asyncio.create_task(it.get()) for _ in range(5)]
        await it.clock.settle()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert it.directory.stats().waiting == 0
        assert source.hold is not None
        source.hold.set()
        await it.clock.settle()
        assert it.directory.peek(ORIGIN) is not None
        assert it.directory.stats().in_flight == 0


async def test_a_slow_origin_delays_no_other() -> None:
    never = asyncio.Event()

    async def answer(origin: str) -> Retrieval:
        if origin == "https://slow.test":
            await never.wait()
        return file()

    async with house(answer) as it:
        slow = asyncio.create_task(it.get("https://slow.test"))
        for n in range(50):
            assert (await it.get(f"https://o{n}.test")).reachable
        assert not slow.done()
        slow.cancel()
        await asyncio.gather(slow, return_exceptions=True)


async def test_closing_ends_the_wait_of_every_caller() -> None:
    source = held()
    async with house(source) as it:
        waiting = asyncio.create_task(it.get())
        await it.clock.settle()
        await it.directory.close()
        with pytest.raises(GateClosed):
            await waiting
        assert source.running == 0
        with pytest.raises(GateClosed):
            await it.get()


async def test_closing_ends_the_wait_of_callers_whose_fetch_has_not_begun() -> None:
    source = held()
    async with house(source) as it:
        waiting = asyncio.create_task(it.get())
        await it.clock.settle(turns=1)
        assert source.asked == []
        await it.directory.close()
        with pytest.raises(GateClosed):
            await waiting
        assert it.directory.stats().in_flight == 0


async def test_a_question_beyond_max_waiters_is_deferred() -> None:
    source = held()
    async with house(source, cache={"max_waiters": 3}) as it:
        waiting = [asyncio.create_task(it.get()) for _ in range(3)]
        await it.clock.settle()
        standing = (await it.get()).standing(it.clock)
        assert (standing.verdict, standing.reason) == (Verdict.DEFER, Reason.OVERLOADED)
        assert it.directory.stats().overloaded == 1
        assert source.hold is not None
        source.hold.set()
        await asyncio.gather(*waiting)
        assert (await it.get()).reachable


# Lifetimes


async def test_soft_expiry_refreshes_in_the_background() -> None:
    async with house(lasting(HOUR, OLD)) as it:
        await it.get()
        it.source.answer = lasting(HOUR, NEW)
        await it.clock.elapse(0.96 * HOUR)
        before = await it.get()
        assert it.allows(before, "/old") is False, "no caller waits on a warm origin"
        await it.clock.settle()
        after = await it.get()
        assert it.allows(after, "/old") is True
        assert it.source.asked == [ORIGIN] * 2


async def test_many_questions_in_the_soft_time_are_one_refresh() -> None:
    async with house(lasting(HOUR)) as it:
        await it.get()
        it.source.hold = asyncio.Event()
        await it.clock.elapse(0.96 * HOUR)
        for _ in range(20):
            await it.get()
            await it.clock.settle()
        it.source.hold.set()
        await it.clock.settle()
        assert it.source.asked == [ORIGIN] * 2


async def test_a_question_after_hard_expiry_waits_for_the_new_file() -> None:
    async with house(lasting(HOUR, OLD)) as it:
        await it.get()
        it.source.answer = lasting(HOUR, NEW)
        await it.clock.elapse(HOUR)
        assert it.directory.peek(ORIGIN) is None
        assert it.allows(await it.get(), "/old") is True


async def test_origins_learnt_together_expire_at_different_times() -> None:
    async with house() as it:
        records = [await it.get(f"https://o{n}.test") for n in range(20)]
        assert len({record.fresh_until for record in records}) == 20


async def test_a_refresh_with_the_same_body_keeps_what_was_compiled() -> None:
    async with house(lasting(HOUR)) as it:
        before = await it.get()
        assert before.text is not None
        before.text.add_policy(before.text.robots.policy("bot"), 64)
        await it.directory.refresh(ORIGIN)
        after = await it.get()
        assert after is not before
        assert after.text is before.text


async def test_identical_bodies_are_kept_once() -> None:
    async with house() as it:
        records = [await it.get(f"https://o{n}.test") for n in range(50)]
        assert len({id(record.text) for record in records}) == 1
        assert it.directory.stats().texts == 1


async def test_policies_of_one_text_are_bounded() -> None:
    async with house() as it:
        record = await it.get()
        assert record.text is not None
        record.text.parsed = record.text.robots
        for n in range(10):
            record.text.add_policy(record.text.robots.policy(f"bot{n}"), 3)
            assert record.text.policy_for(f"bot{n}") is not None
        known = [n for n in range(10) if record.text.policy_for(f"bot{n}") is not None]
        assert known == [7, 8, 9]


async def test_a_forced_refresh_fetches_a_file_that_is_still_fresh() -> None:
    async with house(file(OLD)) as it:
        await it.get()
        it.source.answer = file(NEW)
        assert it.allows(await it.directory.refresh(ORIGIN), "/new") is False
        assert len(it.source.asked) == 2


async def test_a_forced_refresh_waits_for_the_fetch_in_flight() -> None:
    async with house(lasting(HOUR, OLD)) as it:
        await it.get()
        it.source.answer = file(NEW)
        it.source.hold = asyncio.Event()
        await it.clock.elapse(0.96 * HOUR)
        await it.get()  # answered immediately; the flight goes on in the background
        forced = asyncio.create_task(it.directory.refresh(ORIGIN))
        await it.clock.settle()
        assert not forced.done()
        it.source.hold.set()
        assert it.allows(await forced, "/new") is False


async def test_a_large_text_is_read_beside_the_loop_and_kept_once() -> None:
    large = b"User-agent: *\n" + b"Disallow: /x\n" * 20_000
    async with house(file(large)) as it:
        records = await asyncio.gather(*(it.get(f"https://o{n}.test") for n in range(3)))
        assert len({id(record.text) for record in records}) == 1
        assert it.allows(records[0], "/x") is False


async def test_after_closing_no_fetch_begins() -> None:
    async with house(lasting(HOUR)) as it:
        await it.get()
        await it.clock.elapse(0.96 * HOUR)
        await it.directory.close()
        await it.get()
        assert it.directory.stats().in_flight == 0


async def test_peek_asks_the_source_for_nothing() -> None:
    async with house() as it:
        assert it.directory.peek(ORIGIN) is None
        assert it.source.asked == []
        record = await it.get()
        assert it.directory.peek(ORIGIN) is record


# The ladder


async def test_an_unreachable_origin_is_asked_at_growing_intervals() -> None:
    async with house(DOWN) as it:
        asked_at = []
        for _ in range(8):
            record = await it.get()
            asked_at.append(it.clock.monotonic())
            standing = record.standing(it.clock)
            assert (standing.verdict, standing.state) == (Verdict.DEFER, State.UNREACHABLE)
            assert standing.retry_at == pytest.approx(
                it.clock.wall() + record.expires - asked_at[-1]
            )
            await it.clock.elapse(record.expires - it.clock.monotonic() - 0.1)
            assert await it.get() is record
            await it.clock.elapse(0.2)
        gaps = [b - a for a, b in itertools.pairwise(asked_at)]
        minutes = [1, 2, 4, 8, 15, 30, 60]
        assert gaps == [pytest.approx(60 * m, rel=0.21) for m in minutes]
        assert len(it.source.asked) == 8


@pytest.mark.parametrize(
    ("asked", "least", "most"),
    [(600.0, 600.0, 720.0), (0.0, 60.0, 72.0), (10 * 365 * DAY, DAY, DAY)],
)
async def test_retry_after_is_obeyed_within_bounds(asked: float, least: float, most: float) -> None:
    answer = Retrieval(outcome=Outcome.RATE_LIMITED, status=429, retry_after=asked)
    async with house(answer) as it:
        record = await it.get()
        assert least <= record.expires - it.clock.monotonic() <= most


async def test_an_answer_resets_the_retry_delays() -> None:
    async with house(DOWN) as it:
        await it.get()
        await it.clock.elapse(100)
        await it.get()
        it.source.answer = file()
        await it.clock.elapse(200)
        record = await it.get()
        assert record.reachable
        assert (record.step, record.unreachable_since) == (0, None)


async def test_an_outage_defers_for_twelve_hours_and_then_the_old_copy_holds() -> None:
    async with house(lasting(HOUR, OLD)) as it:
        await it.get()
        it.source.answer = DOWN
        await it.clock.elapse(HOUR)
        seen = []
        for _ in range(30):
            record = await it.get()
            seen.append((it.clock.monotonic() - 1000.0 - HOUR, it.allows(record, "/old")))
            await it.clock.elapse(HOUR / 2)
        assert all(answer is None for after, answer in seen if after < 12 * HOUR)
        assert all(answer is False for after, answer in seen if after >= 12 * HOUR)


async def test_a_site_unreachable_for_a_month_is_allowed_if_its_pages_answer() -> None:
    async with house(DOWN) as it:
        await it.get()
        await it.clock.elapse(30 * DAY + 1)
        record = await it.get()
        assert record.standing(it.clock).verdict is Verdict.DEFER
        it.directory.note_page(ORIGIN, True)
        standing = (await it.get()).standing(it.clock)
        assert (standing.verdict, standing.reason) == (Verdict.ALLOW, Reason.LONG_UNREACHABLE)


async def test_a_failed_page_does_not_count_as_a_site_that_is_up() -> None:
    async with house(DOWN) as it:
        await it.get()
        await it.clock.elapse(30 * DAY + 1)
        it.directory.note_page(ORIGIN, False)
        assert (await it.get()).standing(it.clock).verdict is Verdict.DEFER


async def test_an_unexpected_error_defers_and_is_counted_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.ERROR, "gatekeeper.fetching"):
        async with house(RuntimeError("nobody foresaw this")) as it:
            standing = (await it.get()).standing(it.clock)
            assert (standing.verdict, standing.reason) == (Verdict.DEFER, Reason.INTERNAL)
            assert it.directory.stats().internal_errors == 1
    assert "nobody foresaw this" in caplog.text


async def test_a_shortage_of_ours_is_logged_once_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    shortage = Retrieval(outcome=Outcome.OURS, detail="Too many open files")
    async with house(shortage) as it:
        for _ in range(3):
            await it.get()
            await it.clock.elapse(2.0)
        assert [record.getMessage() for record in caplog.records] == [
            f"robots.txt of {ORIGIN} can't be fetched: Too many open files"
        ]
        await it.clock.elapse(60.0)
        await it.get()
        assert len(caplog.records) == 2


# Clocks


@pytest.mark.parametrize("jump", [DAY, -DAY])
async def test_a_jump_of_the_wall_clock_changes_no_lifetime(jump: float) -> None:
    async with house() as it:
        record = await it.get()
        shown = record.standing(it.clock).expires_at
        it.clock.jump_wall(jump)
        assert await it.get() is record
        assert record.standing(it.clock).expires_at == shown + jump
        await it.clock.elapse(DAY)
        await it.get()
        assert len(it.source.asked) == 2


@pytest.mark.parametrize("jump", [DAY, -DAY])
async def test_a_jump_of_the_wall_clock_changes_no_retry_delay(jump: float) -> None:
    async with house(lasting(HOUR, OLD)) as it:
        await it.get()
        it.source.answer = DOWN
        await it.clock.elapse(HOUR)
        record = await it.get()
        it.clock.jump_wall(jump)
        assert await it.get() is record
        assert it.allows(record, "/old") is None, "the 12 hours have not passed"


# Changes, and other origins


async def test_a_change_of_rules_is_told_to_subscribers() -> None:
    told: list[tuple[str, RobotsTxt | None, RobotsTxt | None]] = []
    async with house(file(OLD)) as it:
        unsubscribe = it.directory.subscribe(lambda *change: told.append(change))
        await it.get()
        assert told == [], "nothing changed by asking for the first time"
        await it.directory.refresh(ORIGIN)
        assert told == []
        it.source.answer = DOWN
        await it.directory.refresh(ORIGIN)
        it.source.answer = file(NEW)
        record = await it.directory.refresh(ORIGIN)
        it.source.answer = GONE
        await it.directory.refresh(ORIGIN)
        unsubscribe()
        it.source.answer = file(OLD)
        await it.directory.refresh(ORIGIN)
    assert [(o, a and a.size, b and b.size) for o, a, b in told] == [
        (ORIGIN, len(OLD), len(NEW)),
        (ORIGIN, len(NEW), None),
    ]
    assert told[0][2] == record.text.robots


async def test_a_subscriber_that_raises_does_not_fail_a_refresh(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with house(file(OLD)) as it:
        it.directory.subscribe(lambda *_: 1 / 0)
        await it.get()
        it.source.answer = file(NEW)
        record = await it.directory.refresh(ORIGIN)
        assert it.allows(record, "/new") is False
    assert "ZeroDivisionError" in caplog.text


async def test_a_redirect_to_anothers_file_fills_its_record() -> None:
    url = "https://b.test/robots.txt"
    async with house(file(OLD, hops=(url,), url=url)) as it:
        assert (await it.get()).current.hops == (url,)
        other = it.directory.peek("https://b.test")
        assert other is not None
        assert other.current.hops == ()
        assert it.allows(other, "/old") is False
        fresh = it.directory.known("https://b.test")
        assert fresh is not None
        assert (fresh.outcome, fresh.body) == (Outcome.RULES, OLD)


@pytest.mark.parametrize(
    "url", ["https://b.test/other", "https://b.test/a/robots.txt", "https://b.test/robots.txt?x"]
)
async def test_a_redirect_to_another_path_fills_no_record_of_its_target(url: str) -> None:
    async with house(file(OLD, hops=(url,), url=url)) as it:
        await it.get()
        assert it.directory.peek("https://b.test") is None


async def test_a_fresh_record_is_not_overwritten_by_a_redirect_of_another_origin() -> None:
    url = "https://b.test/robots.txt"

    def answer(origin: str) -> Retrieval:
        return file(NEW) if origin == "https://b.test" else file(OLD, hops=(url,), url=url)

    async with house(answer) as it:
        before = await it.get("https://b.test")
        await it.get(ORIGIN)
        assert it.directory.peek("https://b.test") is before


async def test_a_redirect_respects_the_retry_delay_of_its_target() -> None:
    async with house(DOWN) as it:
        await it.get("https://b.test")
        fresh = it.directory.known("https://b.test")
        assert fresh is not None
        assert fresh.outcome is Outcome.SERVER_ERROR
        assert fresh.retry_after == pytest.approx(60, rel=0.21)


# Many concurrent callers


async def test_one_dead_origin_in_ten_thousand_delays_no_living_one() -> None:
    clock = VirtualClock(start=1000.0)
    answered: dict[str, float] = {}

    async def answer(origin: str) -> Retrieval:
        number = int(origin.removeprefix("https://o").removesuffix(".test"))
        if number % 10 == 0:
            await clock.sleep(10.0)
            return Retrieval(outcome=Outcome.CONNECT_TIMEOUT)
        await clock.sleep(0.05)
        return file(b"User-agent: *\nDisallow: /%d\n" % (number % 100))

    async def one(it: object, origin: str) -> bool:
        record = await directory.get(origin)
        answered[origin] = clock.monotonic() - 1000.0
        return record.reachable

    async with house(answer, clock=clock) as it:
        directory = it.directory
        tasks = [asyncio.create_task(one(it, f"https://o{n}.test")) for n in range(10_000)]
        await clock.elapse(11.0)
        living = await asyncio.gather(*tasks)
        stats = directory.stats()
    assert sum(living) == 9000
    assert all(answered[f"https://o{n}.test"] < 0.1 for n in range(10_000) if n % 10)
    assert stats.texts == 90
    assert (stats.in_flight, stats.waiting, stats.local_fault) == (0, 0, False)


def thread_of(called: list[str]) -> Callable[[RobotsTxt, str], Policy]:
    """Make the policy, and note the thread."""

    def choose(robots: RobotsTxt, agent: str) -> Policy:
        called.append(threading.current_thread().name)
        return robots.policy(agent)

    return choose


async def test_a_large_text_is_chosen_from_beside_the_loop_once() -> None:
    large = b"User-agent: *\n" + b"Disallow: /x\n" * 20_000
    called: list[str] = []
    async with house(file(large), choose=thread_of(called), agent="bot") as it:
        record = await it.get()
        assert it.directory.is_prepared(record, "bot")
        assert not it.directory.is_prepared(record, "other")
        tasks = [asyncio.create_task(it.directory.prepare(record, "other")) for _ in range(5)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        await asyncio.gather(*tasks[1:])
        assert it.directory.is_prepared(record, "other")
        assert record.text is not None
        assert not record.text.policy_for("other").allowed("/x")  # type: ignore[union-attr]
        await it.directory.prepare(record, "other")
        assert len(called) == 2
        assert threading.main_thread().name not in called
        # At rest, the thread is needed again.
        record.text.rest()
        assert not it.directory.is_prepared(await it.get(), "bot")
        await it.directory.prepare(record, "bot")
        assert record.text.parsed is not None
        assert threading.main_thread().name not in called


async def test_a_small_text_takes_no_thread() -> None:
    called: list[str] = []
    async with house(choose=thread_of(called), agent="bot") as it:
        record = await it.get()
        assert it.directory.is_prepared(record, "any")
        await it.directory.prepare(record, "any")
        assert not called


async def test_a_large_text_out_of_the_storage_is_read_beside_the_loop() -> None:
    large = b"User-agent: *\n" + b"Disallow: /x\n" * 20_000
    storage, called = MemoryStorage(), list[str]()
    async with house(file(large), storage=storage) as it:
        await it.get()
    async with house(DOWN, storage=storage, choose=thread_of(called), agent="bot") as it:
        record = await it.get()
        assert it.allows(record, "/x") is False
        assert it.directory.is_prepared(record, "bot")
        assert it.source.asked == []
        assert threading.main_thread().name not in called
