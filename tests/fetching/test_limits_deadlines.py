"""The shared timer, and the deadline of a retrieval."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gatekeeper.clock import SharedTimer, Timer, VirtualClock
from gatekeeper.config import FetchConfig
from gatekeeper.fetching.limits import RetrievalDeadline


class One:
    def __init__(self, alarm: SharedTimer, again: float | None = None) -> None:
        self.alarm = alarm
        self.again = again
        self.ends = 0.0
        self.called: list[float] = []

    def due(self, now: float) -> None:
        self.called.append(now)
        if self.again is not None:
            self.alarm.set(self, now + self.again)


async def test_each_entry_of_a_shared_timer_is_called_at_its_time(clock: VirtualClock) -> None:
    alarm = SharedTimer(clock)
    ones = [One(alarm) for _ in range(3)]
    for one, moment in zip(ones, (5.0, 2.0, 9.0), strict=True):
        alarm.set(one, moment)
    await clock.elapse(20.0)
    assert [one.called for one in ones] == [[5.0], [2.0], [9.0]]
    assert clock.next_timer() is None


async def test_the_last_setting_of_an_entry_counts(clock: VirtualClock) -> None:
    alarm = SharedTimer(clock)
    later, sooner, off = (One(alarm) for _ in range(3))
    for one, then, now in ((later, 3.0, 8.0), (sooner, 8.0, 3.0)):
        alarm.set(one, then)
        alarm.set(one, now)
    alarm.set(off, 4.0)
    alarm.drop(off)
    await clock.elapse(20.0)
    assert (later.called, sooner.called, off.called) == ([8.0], [3.0], [])


async def test_an_entry_may_be_set_again_in_its_callback(clock: VirtualClock) -> None:
    alarm = SharedTimer(clock)
    one = One(alarm, again=4.0)
    alarm.set(one, 4.0)
    await clock.elapse(13.0)
    assert one.called == [4.0, 8.0, 12.0]


async def test_a_thousand_entries_share_one_timer(
    clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, call_at = list[float](), clock.call_at

    def counted(when: float, *rest: Any) -> Timer:
        made.append(when)
        return call_at(when, *rest)

    monkeypatch.setattr(clock, "call_at", counted)
    alarm = SharedTimer(clock)
    for number in range(1000):
        alarm.set(One(alarm), 10.0 + number)
    assert made == [10.0]


def watch_of(clock: VirtualClock, **fetch: float) -> RetrievalDeadline:
    config = FetchConfig(**fetch)  # type: ignore[arg-type]
    return RetrievalDeadline(SharedTimer(clock), config)


async def wait(watch: RetrievalDeadline, event: asyncio.Event, clock: VirtualClock) -> float:
    try:
        with watch:
            await event.wait()
    except TimeoutError:
        return clock.monotonic()
    return -1.0


async def test_an_exceeded_limit_is_a_timeout_and_no_cancellation(clock: VirtualClock) -> None:
    task = asyncio.create_task(wait(watch_of(clock, connect_timeout=3.0), asyncio.Event(), clock))
    await clock.elapse(10.0)
    assert await task == 3.0
    assert task.cancelling() == 0


async def test_each_phase_has_a_limit_of_its_own(clock: VirtualClock) -> None:
    watch = watch_of(clock, connect_timeout=3.0, first_byte_timeout=4.0, total_timeout=30.0)
    task = asyncio.create_task(wait(watch, asyncio.Event(), clock))
    await clock.elapse(2.0)
    watch.sending()
    await clock.elapse(10.0)
    assert await task == 6.0
    assert watch.used == 6.0


async def test_time_without_network_traffic_does_not_count(clock: VirtualClock) -> None:
    watch = watch_of(clock, connect_timeout=3.0, total_timeout=4.0)
    task = asyncio.create_task(wait(watch, asyncio.Event(), clock))
    await clock.elapse(2.0)
    watch.queued()
    await clock.elapse(100.0)
    watch.connecting()
    await clock.elapse(10.0)
    assert await task == 104.0
    assert watch.used == 4.0


async def test_a_cancellation_by_the_caller_is_passed_on(clock: VirtualClock) -> None:
    task = asyncio.create_task(wait(watch_of(clock), asyncio.Event(), clock))
    await clock.settle()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_cancellation_at_the_time_of_the_limit_is_passed_on(clock: VirtualClock) -> None:
    task = asyncio.create_task(wait(watch_of(clock, connect_timeout=3.0), asyncio.Event(), clock))
    await clock.settle()
    clock.advance(3.0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_block_that_ends_in_time_is_not_cancelled(clock: VirtualClock) -> None:
    event = asyncio.Event()
    watch = watch_of(clock, connect_timeout=3.0)
    task = asyncio.create_task(wait(watch, event, clock))
    await clock.elapse(2.0)
    event.set()
    assert await task == -1.0
    await clock.elapse(10.0)
    assert watch.used == 2.0
    assert clock.next_timer() is None
