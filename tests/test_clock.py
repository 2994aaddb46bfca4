"""Time as a parameter: the virtual clock, and deadlines by whatever clock."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from typing import Any

import pytest

from gatekeeper.clock import (
    NEVER,
    Clock,
    Deadline,
    DueHeap,
    OwnedTasks,
    SingleTimer,
    SystemClock,
    VirtualClock,
    deadline,
    micros,
    utc,
)

# --- wall time


def test_wall_seconds_read_as_aware_utc() -> None:
    assert utc(1_790_000_000.5) == datetime(2026, 9, 21, 14, 13, 20, 500_000, tzinfo=UTC)


@pytest.mark.parametrize(
    ("wall", "year"), [(float("inf"), 9999), (float("-inf"), 1), (1e300, 9999)]
)
def test_wall_seconds_beyond_what_datetime_says_are_held(wall: float, year: int) -> None:
    assert utc(wall).year == year


def test_a_block_without_an_end_has_a_time_in_a_fleet() -> None:
    """`block(host, math.inf)` raised OverflowError there, and was told to no other member."""
    assert micros(float("inf")) == micros(1e300) == NEVER


def test_a_wall_jump_leaves_monotonic_time_alone(clock: VirtualClock) -> None:
    clock.advance(5.0)
    clock.jump_wall(-86_400.0)
    assert clock.monotonic() == 5.0
    assert clock.wall() == 1_790_000_000.0 + 5.0 - 86_400.0


# --- the virtual clock


def test_calls_are_made_in_order_and_at_their_own_moment(clock: VirtualClock) -> None:
    made: list[tuple[str, float]] = []

    def note(name: str) -> None:
        made.append((name, clock.monotonic()))

    clock.call_at(3.0, note, "c")
    clock.call_at(1.0, note, "a")
    clock.call_at(1.0, note, "b")
    clock.call_at(9.0, note, "later")
    clock.advance(5.0)
    assert made == [("a", 1.0), ("b", 1.0), ("c", 3.0)]
    assert (clock.monotonic(), clock.next_timer()) == (5.0, 9.0)


def test_a_call_set_by_a_call_is_made_on_the_way(clock: VirtualClock) -> None:
    made: list[float] = []
    clock.call_at(1.0, lambda: clock.call_at(2.0, lambda: made.append(clock.monotonic())))
    clock.advance(5.0)
    assert made == [2.0]


def test_a_cancelled_call_is_not_made(clock: VirtualClock) -> None:
    made: list[int] = []
    timer = clock.call_at(1.0, made.append, 1)
    timer.cancel()
    timer.cancel()
    clock.advance(5.0)
    assert made == []
    assert clock.next_timer() is None


def test_cancelling_after_the_call_does_nothing(clock: VirtualClock) -> None:
    timer = clock.call_at(1.0, lambda: None)
    clock.advance(1.0)
    timer.cancel()
    clock.call_at(2.0, lambda: None)
    assert clock.next_timer() == 2.0


def test_cancelled_calls_do_not_pile_up(clock: VirtualClock) -> None:
    kept = clock.call_at(500.0, lambda: None)
    for n in range(10_000):
        clock.call_at(1000.0 + n, lambda: None).cancel()
    assert len(clock._timers) < 2500
    assert clock.next_timer() == 500.0
    kept.cancel()
    assert clock.next_timer() is None


@pytest.mark.parametrize("seconds", [-1.0, float("nan")])
async def test_time_never_goes_back(clock: VirtualClock, seconds: float) -> None:
    with pytest.raises(ValueError, match="can't be advanced"):
        clock.advance(seconds)
    with pytest.raises(ValueError, match="can't be advanced"):
        await clock.elapse(seconds)


def test_time_never_goes_back_though_a_call_advances_it(clock: VirtualClock) -> None:
    clock.call_at(1.0, clock.advance, 100.0)
    clock.advance(2.0)
    assert clock.monotonic() == 101.0


async def test_a_call_for_the_past_is_made_at_once(clock: VirtualClock) -> None:
    made: list[int] = []
    clock.advance(10.0)
    clock.call_at(3.0, made.append, 1)
    clock.call_at(10.0, made.append, 2)
    assert made == []
    await asyncio.sleep(0)
    assert made == [1, 2]
    assert clock.monotonic() == 10.0


async def test_a_call_for_the_past_may_be_cancelled(clock: VirtualClock) -> None:
    made: list[int] = []
    clock.call_at(-1.0, made.append, 1).cancel()
    await asyncio.sleep(0)
    assert made == []


async def test_sleepers_wake_at_their_own_moment(clock: VirtualClock) -> None:
    woken: list[float] = []

    async def sleeper(*naps: float) -> None:
        for nap in naps:
            await clock.sleep(nap)
            woken.append(clock.monotonic())

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(sleeper(1.0, 1.0, 1.0))
        tasks.create_task(sleeper(2.5))
        await clock.elapse(10.0)
    assert woken == [1.0, 2.0, 2.5, 3.0]
    assert clock.monotonic() == 10.0


async def test_elapsing_ends_where_it_was_told_to(clock: VirtualClock) -> None:
    """Not a rounding error beside it, whatever the timers on the way."""
    for n in range(1, 50):
        clock.call_at(n * 0.1, lambda: None)
    await clock.elapse(4.7)
    assert clock.monotonic() == 4.7


async def test_a_cancelled_sleeper_leaves_no_timer(clock: VirtualClock) -> None:
    sleeper = asyncio.create_task(clock.sleep(5.0))
    await clock.settle()
    sleeper.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sleeper
    assert clock.next_timer() is None


# --- the system's clock


async def test_the_system_clock_has_the_time_of_the_machine() -> None:
    clock = SystemClock()
    before = time.monotonic()
    assert before <= clock.monotonic() <= time.monotonic()
    assert abs(clock.wall() - time.time()) < 1.0


async def test_the_system_clock_calls_at_once_if_the_moment_is_past() -> None:
    called = asyncio.Event()
    clock = SystemClock()
    clock.call_at(clock.monotonic() - 5.0, called.set)
    await called.wait()


async def test_a_call_of_the_system_clock_can_be_cancelled() -> None:
    clock = SystemClock()
    called: list[int] = []
    clock.call_at(clock.monotonic(), called.append, 1).cancel()
    await clock.sleep(0)
    await asyncio.sleep(0)
    assert called == []


# --- deadlines


async def wait_forever() -> None:
    await asyncio.get_running_loop().create_future()


async def test_a_deadline_ends_what_takes_too_long(clock: VirtualClock) -> None:
    async def work() -> float:
        try:
            async with deadline(clock, 5.0):
                await wait_forever()
        except TimeoutError:
            return clock.monotonic()
        return -1.0

    task = asyncio.create_task(work())
    await clock.elapse(10.0)
    assert await task == 5.0
    assert task.cancelling() == 0


async def test_a_deadline_that_is_met_leaves_no_timer(clock: VirtualClock) -> None:
    async with deadline(clock, 5.0) as limit:
        await asyncio.sleep(0)
    assert not limit.fired
    assert clock.next_timer() is None


@pytest.mark.parametrize("make", [VirtualClock, SystemClock])
async def test_a_deadline_already_past_ends_the_first_wait(make: type[Clock]) -> None:
    with pytest.raises(TimeoutError):
        async with deadline(make(), -1.0):
            await wait_forever()


async def test_a_body_that_never_waits_is_not_ended(clock: VirtualClock) -> None:
    async with deadline(clock, 1.0):
        clock.advance(5.0)
    # Nor is what comes after it.
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    current = asyncio.current_task()
    assert current is not None
    assert current.cancelling() == 0


async def test_a_body_that_moves_the_clock_is_ended_at_its_next_wait(clock: VirtualClock) -> None:
    async def work() -> None:
        async with deadline(clock, 1.0):
            clock.advance(5.0)
            await wait_forever()

    with pytest.raises(TimeoutError):
        await work()


async def test_a_cancellation_from_elsewhere_is_not_taken_for_the_deadline(
    clock: VirtualClock,
) -> None:
    async def work() -> None:
        async with deadline(clock, 5.0):
            await wait_forever()

    task = asyncio.create_task(work())
    await clock.settle()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert clock.next_timer() is None


@pytest.mark.parametrize("first", ["deadline", "cancel"])
async def test_a_cancellation_at_the_time_of_the_deadline_is_not_lost(
    clock: VirtualClock, first: str
) -> None:
    async def work() -> None:
        async with deadline(clock, 5.0):
            await wait_forever()

    task = asyncio.create_task(work())
    await clock.settle()
    if first == "deadline":
        clock.advance(5.0)
        task.cancel()
    else:
        task.cancel()
        clock.advance(5.0)
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_of_two_deadlines_the_nearer_one_is_met(clock: VirtualClock) -> None:
    ended: list[str] = []

    async def work() -> None:
        async with deadline(clock, 10.0):
            try:
                async with deadline(clock, 3.0):
                    await wait_forever()
            except TimeoutError:
                ended.append("inner")
            await clock.sleep(2.0)
            ended.append("went on")

    task = asyncio.create_task(work())
    await clock.elapse(20.0)
    await task
    assert ended == ["inner", "went on"]


async def test_the_outer_deadline_passes_through_the_inner_one(clock: VirtualClock) -> None:
    async def work() -> str:
        try:
            async with deadline(clock, 3.0):
                try:
                    async with deadline(clock, 10.0):
                        await wait_forever()
                except TimeoutError:
                    return "inner"
        except TimeoutError:
            return "outer"
        return "none"

    task = asyncio.create_task(work())
    await clock.elapse(20.0)
    assert await task == "outer"


async def test_an_error_of_the_body_wins_and_takes_the_cancellation_back(
    clock: VirtualClock,
) -> None:
    async def leave_badly() -> None:
        async with deadline(clock, 1.0):
            try:
                await wait_forever()
            finally:
                raise OSError("while leaving")

    async def work() -> int:
        with pytest.raises(OSError, match="while leaving"):
            await leave_badly()
        current = asyncio.current_task()
        assert current is not None
        return current.cancelling()

    task = asyncio.create_task(work())
    await clock.elapse(2.0)
    assert await task == 0


async def test_a_body_that_catches_the_cancellation_is_not_cancelled_again(
    clock: VirtualClock,
) -> None:
    async def work() -> int:
        async with deadline(clock, 1.0):
            try:
                await wait_forever()
            except asyncio.CancelledError:
                await asyncio.sleep(0)
        await asyncio.sleep(0)
        current = asyncio.current_task()
        assert current is not None
        return current.cancelling()

    task = asyncio.create_task(work())
    await clock.elapse(2.0)
    assert await task == 0


async def test_a_deadline_may_be_set_late_and_moved(clock: VirtualClock) -> None:
    async def work() -> float:
        try:
            async with deadline(clock, None) as limit:
                await clock.sleep(100.0)
                limit.move(5.0)
                await clock.sleep(4.0)
                limit.move(5.0)
                await wait_forever()
        except TimeoutError:
            return clock.monotonic()
        return -1.0

    task = asyncio.create_task(work())
    await clock.elapse(200.0)
    assert await task == 109.0


async def test_a_deadline_that_is_over_can_not_be_moved(clock: VirtualClock) -> None:
    limits: list[Deadline] = []
    async with deadline(clock, 5.0) as limit:
        limits.append(limit)
    limits[0].move(1.0)
    await clock.elapse(10.0)
    assert not limits[0].fired


# --- one timer


def test_a_single_timer_calls_once_at_its_latest_setting(clock: VirtualClock) -> None:
    calls: list[float] = []
    timer = SingleTimer(clock, lambda: calls.append(clock.monotonic()))
    timer.set(5.0)
    timer.set(8.0)
    clock.advance(20.0)
    assert calls == [8.0]
    assert timer.when == float("inf")


def test_a_single_timer_keeps_the_earlier_call(clock: VirtualClock) -> None:
    calls: list[float] = []
    timer = SingleTimer(clock, lambda: calls.append(clock.monotonic()))
    timer.set_no_later(5.0)
    timer.set_no_later(7.0)
    timer.set_no_later(3.0)
    clock.advance(20.0)
    assert calls == [3.0]


@pytest.mark.parametrize("how", ["cancel", "inf"])
def test_a_cancelled_single_timer_makes_no_call(clock: VirtualClock, how: str) -> None:
    calls: list[float] = []
    timer = SingleTimer(clock, lambda: calls.append(clock.monotonic()))
    timer.set(5.0)
    timer.cancel() if how == "cancel" else timer.set(float("inf"))
    assert timer.when == float("inf")
    clock.advance(20.0)
    assert calls == []
    timer.set_no_later(30.0)  # and can be set again
    clock.advance(20.0)
    assert calls == [30.0]


def test_a_single_timer_may_be_set_from_its_callback(clock: VirtualClock) -> None:
    calls: list[float] = []

    def again() -> None:
        calls.append(clock.monotonic())
        if len(calls) < 3:
            timer.set_no_later(clock.monotonic() + 2.0)

    timer = SingleTimer(clock, again)
    timer.set(1.0)
    clock.advance(20.0)
    assert calls == [1.0, 3.0, 5.0]
    assert clock.next_timer() is None


def test_a_held_single_timer_waits_to_be_set(clock: VirtualClock) -> None:
    calls: list[float] = []
    timer = SingleTimer(clock, lambda: calls.append(clock.monotonic()))
    timer.set(5.0)
    timer.hold()
    timer.set_no_later(3.0)
    clock.advance(10.0)
    assert calls == []
    timer.set(12.0)
    clock.advance(10.0)
    assert calls == [12.0]


def test_a_due_heap_gives_each_item_once_at_its_latest_moment() -> None:
    moments = {"a": 1.0, "b": 2.0, "c": 3.0}
    heap = DueHeap[str](lambda when, item: moments.get(item) == when, moments.__len__)
    for item, moment in moments.items():
        heap.add(moment, item)
        heap.add(moment, item)
    moments["a"] = 4.0
    heap.add(4.0, "a")
    assert heap.next() == 2.0
    assert heap.pop(3.5, most=1) == ["b"]
    del moments["b"], moments["c"]
    assert heap.pop(3.5) == []
    assert heap.next() == 4.0
    assert heap.pop(4.0) == ["a"]
    assert heap.next() == float("inf")


def test_a_due_heap_forgets_what_ended_early() -> None:
    alive: set[int] = set()
    heap = DueHeap[int](lambda _, item: item in alive, lambda: len(alive))
    for item in range(10_000):
        alive = {item - 1, item}
        heap.add(float(item), item)
    assert len(heap._heap) < 1000
    assert heap.pop(1e9) == [9998, 9999]


def test_items_that_are_due_at_several_moments_are_looked_at_a_few_times_each() -> None:
    """As waiters are whom several blocks outlast: none of their entries can be dropped."""
    looks = 0

    def alive(when: float, item: int) -> bool:
        nonlocal looks
        looks += 1
        return True

    heap = DueHeap[int](alive, lambda: 1_000)
    for moment in range(10):
        for item in range(1_000):
            heap.add(float(moment), item)
    assert looks < 20_000


def test_a_due_heap_drops_many_ended_items_behind_the_first() -> None:
    """The first item stays, so that the ended ones are not met at the front."""
    alive = set(range(100_000))
    heap = DueHeap[int](lambda _, item: item in alive, lambda: len(alive))
    for item in range(100_000):
        heap.add(float(item), item)
    alive = {0, 100_000}
    heap.add(5.0, 100_000)
    assert len(heap._heap) == 2
    assert heap.pop(1e9) == [0, 100_000]


def test_a_due_heap_skips_only_so_many_at_a_time() -> None:
    """A hundred thousand waiters may be cancelled at the same moment."""
    asked, cancelled = 0, False

    def alive(_moment: float, _item: int) -> bool:
        nonlocal asked
        asked += cancelled
        return not cancelled

    heap = DueHeap[int](alive, lambda: 100_000)
    for item in range(100_000):
        heap.add(float(item), item)
    cancelled = True
    assert 0.0 < heap.next() <= 1000.0
    assert asked <= 1000
    assert heap.pop(1e9) == []
    assert heap.next() == float("inf")


async def test_owned_tasks_end_with_their_owner() -> None:
    tasks, never = OwnedTasks(), asyncio.Event()
    begun = tasks.start(never.wait(), "key")
    assert tasks.find("key") is begun
    await asyncio.sleep(0)
    unbegun = tasks.start(never.wait())  # it is cancelled before its first step
    assert len(tasks) == 2
    await tasks.close()
    assert begun.cancelled()
    assert unbegun.cancelled()
    assert tasks.find("key") is None
    assert len(tasks) == 0
    await tasks.close()


async def test_owned_tasks_that_are_finished_end_without_a_step_of_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As `asyncio.gather` works from Python 3.12 on: with finished tasks alone, it does not yield.
    gathered = 0
    gather = asyncio.gather

    def gather_as_later_pythons(*tasks: asyncio.Task[None], **options: Any) -> Any:
        nonlocal gathered
        gathered += 1
        assert gathered < 10, "close() never ends"
        if not all(task.done() for task in tasks):
            return gather(*tasks, **options)
        done = asyncio.get_running_loop().create_future()
        done.set_result([])
        return done

    monkeypatch.setattr(asyncio, "gather", gather_as_later_pythons)

    async def work() -> None:
        return

    tasks = OwnedTasks()
    begun = tasks.start(work(), "key")
    await asyncio.sleep(0)
    assert begun.done()
    assert tasks.find("key") is begun  # its callback comes with the next iteration of the loop
    await tasks.close()
    assert len(tasks) == 0
