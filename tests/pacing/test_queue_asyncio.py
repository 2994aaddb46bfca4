"""`PoliteQueue` behaves as users of asyncio.Queue expect."""

from __future__ import annotations

import asyncio
import contextlib
import gc

import pytest

from gatekeeper.clock import VirtualClock
from gatekeeper.decision import Decision
from gatekeeper.errors import GateClosed
from gatekeeper.queue.origin_queues import Backlog
from gatekeeper.queue.polite import PoliteQueue, Turn
from tests.queue_support import DEFER, DENY, FakeGate, page


async def soon(queue: PoliteQueue, clock: VirtualClock) -> Turn:
    """Call `get_nowait` repeatedly until it returns a lease."""
    for _ in range(20):
        try:
            return queue.get_nowait()
        except asyncio.QueueEmpty:
            await clock.elapse(0.5)
    raise AssertionError("no lease")


def test_maxsize_can_be_read(gate: FakeGate) -> None:
    assert PoliteQueue(gate, maxsize=7).maxsize == 7
    assert PoliteQueue(gate).maxsize == 0


async def test_get_nowait_of_an_empty_queue_raises(queue: PoliteQueue) -> None:
    with pytest.raises(asyncio.QueueEmpty):
        queue.get_nowait()


async def test_get_nowait_gives_a_lease_that_is_free_at_once(
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


async def test_get_nowait_gives_a_lease_that_needs_a_look_up_a_moment_later(
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


async def test_wait_due_returns_when_get_nowait_is_worth_a_call_and_takes_nothing(
    queue: PoliteQueue, clock: VirtualClock
) -> None:
    waiting = asyncio.create_task(queue.wait_due())
    await clock.elapse(1.0)
    assert not waiting.done()
    await queue.put(page("a", 0))
    turn = None
    while turn is None:
        await asyncio.wait_for(queue.wait_due(), 30.0)
        with contextlib.suppress(asyncio.QueueEmpty):
            turn = queue.get_nowait()
        await clock.elapse(0.5)
    await waiting
    assert (turn.url, queue.qsize()) == (page("a", 0), 0)
    turn.done()
    waiting = asyncio.create_task(queue.wait_due())
    await clock.elapse(1.0)
    await queue.close()
    with pytest.raises(GateClosed):
        await waiting


async def test_a_task_in_wait_due_keeps_no_url_from_a_task_in_get(
    queue: PoliteQueue, clock: VirtualClock
) -> None:
    first = asyncio.create_task(queue.wait_due())
    await clock.elapse(1.0)
    second = asyncio.create_task(queue.get())
    await clock.elapse(1.0)
    await queue.put(page("a", 0))
    await clock.elapse(1.0)
    assert first.done()  # and its caller may take its time, or never ask
    (await asyncio.wait_for(second, 30.0)).done()


async def test_get_nowait_calls_on_denied_for_denied_urls(
    gate: FakeGate, clock: VirtualClock
) -> None:
    told: list[str] = []
    async with PoliteQueue(gate, on_denied=lambda decision: told.append(decision.url)) as queue:
        gate.said = {page("a", number): DENY for number in range(3)}
        for number in range(4):
            await queue.put(page("a", number))
        turn = await soon(queue, clock)
        assert turn.url == page("a", 3)
        assert told == [page("a", number) for number in range(3)]


async def test_on_denied_is_called_though_it_is_an_object_that_is_false(
    gate: FakeGate, clock: VirtualClock
) -> None:
    class Told(list[Decision]):
        __call__ = list.append

    told = Told()
    async with PoliteQueue(gate, on_denied=told) as queue:
        gate.said = {page("a", 0): DENY}
        await queue.put(page("a", 0))
        await queue.put(page("a", 1))
        await soon(queue, clock)
    assert [one.url for one in told] == [page("a", 0)]


async def test_what_is_logged_of_a_turn_shows_no_payload(
    gate: FakeGate, clock: VirtualClock
) -> None:
    async with PoliteQueue(gate) as queue:
        await queue.put(page("a", 0), data={"password": "hunter2"})
        turn = await soon(queue, clock)
    assert "hunter2" not in repr(turn)


async def test_get_nowait_and_put_nowait_of_a_closed_queue_raise_gate_closed(
    queue: PoliteQueue,
) -> None:
    await queue.close()
    for call in (queue.get_nowait, lambda: queue.put_nowait(page("a", 0))):
        with pytest.raises(GateClosed):
            call()


async def test_task_done_may_be_called_once_per_lease(queue: PoliteQueue) -> None:
    await queue.put(page("a", 0))
    async with await queue.get():
        queue.task_done()
        assert queue.stats().unfinished == 1, "ending the lease is what counts"
    await queue.join()
    with pytest.raises(ValueError, match="task_done"):
        queue.task_done()


# --- join, while nobody is in `get` ----------------------------------------------------------


async def joined(queue: PoliteQueue, clock: VirtualClock, seconds: float = 60.0) -> bool:
    """Return True if `join` ends within this many seconds."""
    joining = asyncio.ensure_future(queue.join())
    await clock.elapse(seconds)
    ended = joining.done()
    joining.cancel()
    [failed] = await asyncio.gather(joining, return_exceptions=True)
    if failed is not None and not isinstance(failed, asyncio.CancelledError):
        raise failed
    return ended


@pytest.mark.parametrize("cold", [0.0, 2.0])
async def test_join_needs_no_get_for_denied_urls(
    gate: FakeGate, clock: VirtualClock, cold: float
) -> None:
    told: list[str] = []
    gate.said = {f"https://{host}.example": DENY for host in "abc"}
    gate.cold = {f"https://{host}.example": cold for host in "abc" if cold}
    given = [page(host, number) for host in "abc" for number in range(70)]
    async with PoliteQueue(gate, on_denied=lambda decision: told.append(decision.url)) as queue:
        for url in given:
            await queue.put(url)
        assert await joined(queue, clock)
        assert sorted(told) == sorted(given)
        assert (queue.qsize(), queue.stats().unfinished, queue.stats().denied) == (0, 0, 210)


async def test_a_url_put_during_a_join_is_decided_by_it(
    gate: FakeGate, queue: PoliteQueue, clock: VirtualClock
) -> None:
    gate.said = {"https://a.example": DENY, "https://b.example": DENY}
    gate.cold = {"https://a.example": 5.0}
    await queue.put(page("a", 0))
    joining = [asyncio.ensure_future(queue.join()) for _ in range(2)]
    await clock.elapse(1.0)
    await queue.put(page("b", 0))
    await clock.settle()
    assert queue.stats().denied == 1
    assert not any(one.done() for one in joining)
    await clock.elapse(10.0)
    assert all(one.done() for one in joining)


async def test_a_deferred_url_that_is_denied_later_ends_the_join(
    gate: FakeGate, queue: PoliteQueue, clock: VirtualClock
) -> None:
    gate.said, gate.retry_at = {page("a", 0): DEFER}, clock.wall() + 20.0
    await queue.put(page("a", 0))
    joining = asyncio.ensure_future(queue.join())
    await clock.elapse(10.0)
    assert not joining.done()
    gate.said = {page("a", 0): DENY}
    await clock.elapse(15.0)
    assert joining.done()


async def test_an_allowed_url_waits_for_a_get_during_a_join_without_polling(
    gate: FakeGate, queue: PoliteQueue, clock: VirtualClock
) -> None:
    gate.said = {page("a", 1): DENY, page("b", 0): DENY}
    for url in (page("a", 0), page("a", 1), page("b", 0)):
        await queue.put(url)
    peeks = 0
    peek = gate.peek

    def counting(url: str, **options: str | None) -> Decision | None:
        nonlocal peeks
        peeks += 1
        return peek(url, **options)

    gate.peek = counting  # type: ignore[method-assign]
    joining = asyncio.ensure_future(queue.join())
    await clock.elapse(600.0)
    assert not joining.done()
    assert peeks == 2, "each origin was looked at once"
    assert queue.stats().unfinished == 2
    async with await queue.get() as lease:
        assert lease.grant.url == page("a", 0)
    await clock.elapse(10.0)
    assert joining.done()
    assert queue.stats().denied == 2


async def test_a_join_decides_nothing_while_a_lease_is_open(
    gate: FakeGate, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task that has the lease calls `get` again, which handles denied URLs itself."""
    gate.said = {page("b", 0): DENY}
    looked: list[str] = []
    peek = gate.peek
    monkeypatch.setattr(
        gate, "peek", lambda url, **options: (looked.append(url), peek(url, **options))[1]
    )
    queue = PoliteQueue(gate)
    await queue.put(page("a", 0), priority=1)
    turn = await queue.get()
    joining = asyncio.ensure_future(queue.join())
    for host in "bcd":
        await queue.put(page(host, 0))
    looked.clear()
    await clock.elapse(60.0)
    assert looked == []
    await turn.give_back()
    await clock.settle()
    assert queue.stats().denied == 1
    assert sorted(set(looked)) == [page(host, 0) for host in "abcd"]
    for _ in "acd":
        (await queue.get()).done()
    await clock.settle()
    assert joining.done()
    await queue.close()


async def test_a_join_makes_room_for_a_put_while_a_lease_is_open(
    gate: FakeGate, clock: VirtualClock
) -> None:
    """The task that waits for room may be the one that holds the lease."""
    gate.said = {page("b", 0): DENY}
    async with PoliteQueue(gate, maxsize=1) as queue:
        await queue.put(page("a", 0))
        joining = asyncio.ensure_future(queue.join())
        async with await queue.get():
            await queue.put(page("b", 0))
            await clock.settle()
            assert queue.stats().denied == 0
            async with asyncio.timeout(60.0):
                await queue.put(page("c", 0))
            assert queue.stats().denied == 1
        (await queue.get()).done()
        await clock.settle()
        assert joining.done()


def origins_known() -> int:
    """Return how many origins are in memory."""
    return sum(type(one) is Backlog for one in gc.get_objects())


async def test_a_join_keeps_no_origin_that_is_empty(gate: FakeGate, clock: VirtualClock) -> None:
    """While leases are open `join` examines no origin, however many come and go."""
    gc.collect()
    before = origins_known()
    async with PoliteQueue(gate) as queue:
        await queue.put(page("a", 0))
        joining = asyncio.ensure_future(queue.join())
        await clock.settle()
        async with await queue.get():
            for number in range(50):
                await queue.put(page(f"b{number}", 0))
                (await queue.get()).done()
            await clock.settle()
            assert origins_known() - before <= 2
        await clock.settle()
        assert joining.done()


async def test_an_error_of_on_denied_ends_the_join_and_the_url_is_done(
    gate: FakeGate, clock: VirtualClock
) -> None:
    gate.said = {"https://a.example": DENY}

    def fail(decision: Decision) -> None:
        raise LookupError(decision.url)

    async with PoliteQueue(gate, on_denied=fail) as queue:
        await queue.put(page("a", 0))
        await queue.put(page("a", 1))
        for left in (1, 0):
            with pytest.raises(LookupError):
                await joined(queue, clock)
            assert queue.stats().unfinished == left
        assert await joined(queue, clock)


async def test_a_join_after_a_failed_join_decides_the_remaining_urls(
    gate: FakeGate, clock: VirtualClock
) -> None:
    errors = [LookupError("once")]

    def fail_once(decision: Decision) -> None:
        if errors:
            raise errors.pop()

    async with PoliteQueue(gate, on_denied=fail_once) as queue:
        for host in "abc":
            await queue.put(page(host, 0))
        waiting = asyncio.ensure_future(queue.join())
        await clock.settle()
        gate.said = {f"https://{host}.example": DENY for host in "abc"}
        with pytest.raises(LookupError):
            await queue.join()
        await clock.settle()
        assert waiting.done()


async def test_asynchronous_callbacks_are_waited_for_and_bounded(
    gate: FakeGate, clock: VirtualClock
) -> None:
    gate.said = {"https://a.example": DENY}
    running = most = 0

    async def slowly(decision: Decision) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await clock.sleep(3.0)
        running -= 1

    async with PoliteQueue(gate, on_denied=slowly) as queue:
        for number in range(250):
            await queue.put(page("a", number))
        assert await joined(queue, clock)
        assert (running, most) == (0, 100)


async def test_a_cancelled_join_leaves_every_url_to_a_get(
    gate: FakeGate, queue: PoliteQueue, clock: VirtualClock
) -> None:
    await queue.put(page("a", 0))
    assert not await joined(queue, clock, 1.0)
    async with await queue.get() as lease:
        assert lease.grant.url == page("a", 0)
    await queue.join()


async def test_closing_the_queue_ends_a_join(queue: PoliteQueue, clock: VirtualClock) -> None:
    await queue.put(page("a", 0))
    joining = asyncio.ensure_future(queue.join())
    await clock.settle()
    await queue.close()
    await joining
