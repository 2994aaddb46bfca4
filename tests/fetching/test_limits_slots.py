"""Leases by host, and slots in which dead hosts do not delay living ones."""

from __future__ import annotations

import asyncio

from gatekeeper.clock import VirtualClock
from gatekeeper.fetching.limits import SLOW_FACTOR, Slots
from gatekeeper.fetching.outcomes import ANSWERED, FAILED, UNKNOWN_ORIGIN, precedence
from gatekeeper.urls import parse
from tests.fetching.host_leases import AT_ONCE, HostLeases


async def _hold(slots: Slots, until: asyncio.Event) -> None:
    async with slots.with_lease(AT_ONCE):
        await until.wait()


async def test_no_more_slots_are_taken_than_there_are() -> None:
    clock = VirtualClock()
    slots = Slots(clock, 2)
    done = asyncio.Event()
    tasks = [asyncio.create_task(_hold(slots, done)) for _ in range(5)]
    await clock.settle()
    assert slots.taken == 2
    done.set()
    await asyncio.gather(*tasks)
    assert slots.taken == 0


async def test_a_slow_retrieval_leaves_its_slot_after_a_quarter_of_a_second() -> None:
    clock = VirtualClock()
    slots = Slots(clock, 2)
    never, soon = asyncio.Event(), asyncio.Event()
    soon.set()
    dead = [asyncio.create_task(_hold(slots, never)) for _ in range(2)]
    await clock.settle()
    living = asyncio.create_task(_hold(slots, soon))
    await clock.elapse(0.2)
    assert not living.done()
    await clock.elapse(0.1)
    assert living.done()
    never.set()
    await asyncio.gather(*dead, living)


async def test_the_number_of_slow_retrievals_is_bounded() -> None:
    clock = VirtualClock()
    slots = Slots(clock, 2)
    never = asyncio.Event()
    dead = [asyncio.create_task(_hold(slots, never)) for _ in range(100)]
    await clock.elapse(60.0)
    assert slots.taken == 2 + 2 * SLOW_FACTOR
    never.set()
    await asyncio.gather(*dead)
    assert slots.taken == 0
    await clock.elapse(1.0)
    assert clock.next_timer() is None, "a timer that finds nobody is not set again"


async def test_origins_that_answered_get_slots_first_and_failed_ones_last() -> None:
    clock = VirtualClock()
    slots = Slots(clock, 1, slot_seconds=1000.0)
    order: list[str] = []

    async def one(name: str, rank: int) -> None:
        precedence.set(rank)
        async with slots.with_lease(AT_ONCE):
            order.append(name)
            await clock.sleep(1.0)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(one("first", UNKNOWN_ORIGIN))
        await clock.settle()
        tasks.create_task(one("failed", FAILED))
        for number in range(6):
            tasks.create_task(one(f"new{number}", UNKNOWN_ORIGIN))
        tasks.create_task(one("answered", ANSWERED))
        await clock.elapse(20.0)
    strangers = ["new5", "new0", "new4", "new1", "new3", "new2"]
    assert order == ["first", "answered", *strangers, "failed"]


async def test_a_cancelled_waiter_for_a_slot_leaves_no_trace() -> None:
    clock = VirtualClock()
    slots = Slots(clock, 1, slot_seconds=1000.0)
    never = asyncio.Event()
    holder = asyncio.create_task(_hold(slots, never))
    await clock.settle()
    waiting = [asyncio.create_task(_hold(slots, never)) for _ in range(3)]
    await clock.settle()
    waiting[1].cancel()
    await clock.settle()
    holder.cancel()
    waiting[0].cancel()
    await clock.settle()
    waiting[2].cancel()  # it, or the one before, was just given the place
    await asyncio.gather(*waiting, holder, return_exceptions=True)
    assert (slots.taken, slots.free) == (0, 1)


async def test_a_cancelled_holder_gives_its_slot_back() -> None:
    clock = VirtualClock()
    slots = Slots(clock, 1)
    never = asyncio.Event()
    for wait in (0.0, 5.0):
        task = asyncio.create_task(_hold(slots, never))
        await clock.elapse(wait)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    async with slots.with_lease(AT_ONCE):
        assert slots.taken == 1


async def test_new_settings_change_the_bounds_and_revoke_no_slot(clock: VirtualClock) -> None:
    slots = Slots(clock, 4, max_in_flight=80)
    assert (slots.free, slots.slow_free) == (4, 36)
    async with slots.with_lease(AT_ONCE):
        slots.adjust(4)
        assert (slots.free, slots.slow_free) == (1, 0)
    assert slots.free == 2
    slots.adjust(80)
    assert (slots.free, slots.slow_free) == (4, 36)


async def test_few_unknown_origins_begin_in_one_iteration_of_the_loop() -> None:
    clock = VirtualClock()
    slots = Slots(clock, 200)
    for _ in range(3):
        slots.ended(answered=False)
    leases = HostLeases(clock, 0.0)
    began: list[int] = []
    done = asyncio.Event()

    async def one(number: int, rank: int) -> None:
        precedence.set(rank)
        async with slots.with_lease(leases(parse(f"http://h{number}.test/"))):
            began.append(rank)
            await done.wait()

    ranks = [UNKNOWN_ORIGIN] * 60 + [FAILED] * 60 + [ANSWERED] * 10
    tasks = [asyncio.create_task(one(number, rank)) for number, rank in enumerate(ranks)]
    most = before = iterations = 0
    while len(began) < len(ranks):
        await asyncio.sleep(0)
        iterations += 1
        few = sum(rank != ANSWERED for rank in began)
        most, before = max(most, few - before), few
        if iterations == 5:
            assert began.count(ANSWERED) == 10, "they wait for nobody"
    assert most <= 4
    assert began[-60:] == [FAILED] * 60, "who failed goes last"
    done.set()
    await asyncio.gather(*tasks)


async def test_more_retrievals_begin_at_once_while_answers_come() -> None:
    slots = Slots(VirtualClock(), 200)

    async def most_at_once() -> int:
        most = 0
        for _ in range(5):
            before = slots.taken
            tasks = [asyncio.create_task(_hold(slots, done)) for _ in range(20)]
            await asyncio.sleep(0)
            most = max(most, slots.taken - before)
            done.set()
            await asyncio.gather(*tasks)
            done.clear()
        return most

    done = asyncio.Event()
    first = await most_at_once()
    for _ in range(3):
        slots.ended(answered=False)
    few = await most_at_once()
    for _ in range(100):
        slots.ended(answered=True)
    many = await most_at_once()
    for _ in range(5):  # half of the origins are dead: at most one more starts
        slots.ended(answered=False)
        slots.ended(answered=True)
    again = await most_at_once()

    assert few < many == first <= 6 * few
    assert few <= again <= few + 1
