"""What users of asyncio.Queue expect of the queue."""

from __future__ import annotations

import asyncio

import pytest

from gatekeeper.clock import VirtualClock
from gatekeeper.errors import GateClosed
from gatekeeper.queue import PoliteQueue, Turn
from tests.queue_support import DENY, FakeGate, page


async def soon(queue: PoliteQueue, clock: VirtualClock) -> Turn:
    """What `get_nowait` gives when it is asked now and then."""
    for _ in range(20):
        try:
            return queue.get_nowait()
        except asyncio.QueueEmpty:
            await clock.elapse(0.5)
    raise AssertionError("no turn")


def test_the_bound_can_be_read(gate: FakeGate) -> None:
    assert PoliteQueue(gate, maxsize=7).maxsize == 7
    assert PoliteQueue(gate).maxsize == 0


async def test_get_nowait_of_an_empty_queue_raises(queue: PoliteQueue) -> None:
    with pytest.raises(asyncio.QueueEmpty):
        queue.get_nowait()


async def test_get_nowait_gives_a_turn_that_a_glance_can_give(
    gate: FakeGate, queue: PoliteQueue
) -> None:
    gate.glances = True
    gate.scheduler.when_due("a.example", lambda: None)
    await queue.put(page("a", 0))
    turn = queue.get_nowait()
    assert turn.url == page("a", 0)
    async with turn:
        pass
    await queue.join()


async def test_get_nowait_raises_while_no_host_is_due(
    queue: PoliteQueue, clock: VirtualClock
) -> None:
    await queue.put(page("a", 0))
    await queue.put(page("a", 1))
    async with await queue.get():
        pass
    with pytest.raises(asyncio.QueueEmpty):
        queue.get_nowait()
    assert queue.qsize() == 1


async def test_what_a_glance_does_not_tell_get_nowait_has_a_moment_later(
    gate: FakeGate, queue: PoliteQueue, clock: VirtualClock
) -> None:
    gate.cold = {"https://b.example": 2.0}
    for host in ("a", "b"):
        await queue.put(page(host, 0))
    got = set()
    for _ in range(2):
        turn = await soon(queue, clock)
        got.add(turn.url)
        async with turn:
            pass
    assert got == {page("a", 0), page("b", 0)}
    await queue.join()


async def test_get_nowait_tells_of_denied_urls_too(gate: FakeGate, clock: VirtualClock) -> None:
    told: list[str] = []
    async with PoliteQueue(gate, on_denied=lambda decision: told.append(decision.url)) as queue:
        gate.said = {page("a", number): DENY for number in range(3)}
        for number in range(4):
            await queue.put(page("a", number))
        turn = await soon(queue, clock)
        assert turn.url == page("a", 3)
        assert told == [page("a", number) for number in range(3)]


async def test_nothing_is_had_from_a_closed_queue(queue: PoliteQueue) -> None:
    await queue.close()
    for call in (queue.get_nowait, lambda: queue.put_nowait(page("a", 0))):
        with pytest.raises(GateClosed):
            call()


async def test_task_done_may_be_called_once_a_turn(queue: PoliteQueue) -> None:
    await queue.put(page("a", 0))
    async with await queue.get():
        queue.task_done()
        assert queue.stats().unfinished == 1, "leaving the turn is what counts"
    await queue.join()
    with pytest.raises(ValueError, match="task_done"):
        queue.task_done()
