"""A great many who wait: what each costs does not grow with their number, and the loop goes on."""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import sys
import time
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from types import FrameType
from typing import Any

import pytest

from gatekeeper import Config, GateClosed, Gatekeeper, LeaseTimeout, PoliteQueue
from gatekeeper.clock import VirtualClock
from gatekeeper.config import GroupRule, HostRule
from gatekeeper.pacing.grants import Grant
from gatekeeper.pacing.scheduler import Scheduler
from gatekeeper.pacing.waiters import TaskWaiter
from gatekeeper.queue.origin_queues import WaitingTasks
from gatekeeper.robots.timing import RobotsInterval
from tests.gate_support import gate_on
from tests.internet import FakeInternet
from tests.pacing_support import scheduler_on, scopes_of, stall
from tests.waiting_support import until

FEW, MANY = 500, 2_000


@pytest.fixture
async def gate(net: FakeInternet) -> AsyncIterator[Gatekeeper]:
    config = Config.from_dict({"host": [{"match": "*", "robots": "allow", "interval": 1000.0}]})
    async with gate_on(net, config) as gate:
        yield gate


def steps_of(work: Callable[[], object]) -> int:
    """Calls, of Python and of C, that the work takes."""
    count = 0

    def profile(_frame: FrameType, event: str, _: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


async def lease(gate: Gatekeeper, url: str) -> None:
    async with gate.lease(url):
        pass


async def patient_lease(gate: Gatekeeper, url: str) -> None:
    async with gate.lease(url, timeout=900_000.0):
        pass


async def acquire(gate: Gatekeeper, url: str) -> None:
    (await gate.acquire(url)).end()


async def acquire_unowned(gate: Gatekeeper, url: str) -> None:
    (await gate.acquire(url, owned=False)).end()


Wait = Callable[[Gatekeeper, str], Coroutine[Any, Any, None]]


async def waiters(gate: Gatekeeper, count: int, wait: Wait = lease) -> list[asyncio.Task[None]]:
    tasks = [asyncio.create_task(wait(gate, f"http://a.test/{n}")) for n in range(count)]
    for _ in range(count):  # far fewer turns of the loop will do; none is waited for in vain
        if gate.stats().pacing.waiting == count:
            return tasks
        await asyncio.sleep(0)
    raise AssertionError(f"only {gate.stats().pacing.waiting} of {count} wait")


@pytest.mark.parametrize("wait", [lease, patient_lease, acquire, acquire_unowned])
async def test_tasks_that_start_to_wait_in_one_iteration_of_the_loop_let_others_run(
    gate: Gatekeeper, wait: Wait
) -> None:
    async with gate.lease("http://a.test/"):
        joined = [0]
        tasks = asyncio.create_task(waiters(gate, 3_000, wait))
        while not tasks.done():
            await asyncio.sleep(0)
            joined.append(gate.stats().pacing.waiting)
        most = max(after - before for before, after in itertools.pairwise(joined))
        assert most <= 250
        for task in await tasks:
            task.cancel()
        await asyncio.wait(await tasks)
        assert gate.stats().pacing.waiting == 0


@pytest.mark.parametrize("wait", [lease, patient_lease, acquire, acquire_unowned])
async def test_the_first_step_of_a_waiting_task_takes_few_calls(
    gate: Gatekeeper, wait: Wait
) -> None:
    """All of them take it in one iteration of the loop, which nobody can cut in pieces."""
    loop, count, calls = asyncio.get_running_loop(), 2_000, 0

    def profile(_frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    async with gate.lease("http://a.test/"):
        first = [asyncio.create_task(wait(gate, f"http://a.test/{n}")) for n in range(100)]
        gc.collect()  # what ends with the tasks of other tests is no call of these
        gc.disable()
        loop.call_soon(sys.setprofile, profile)
        tasks = [asyncio.create_task(wait(gate, f"http://a.test/{n}")) for n in range(count)]
        loop.call_soon(sys.setprofile, None)
        await asyncio.sleep(0)
        gc.enable()
        assert calls <= 15 * count
        for task in (*first, *tasks):
            task.cancel()
        await asyncio.gather(*first, *tasks, return_exceptions=True)


@pytest.mark.parametrize("wait", [lease, patient_lease, acquire, acquire_unowned])
async def test_the_last_step_of_each_of_many_that_are_cancelled_is_a_few_calls(
    gate: Gatekeeper, wait: Wait
) -> None:
    """All of them take it in one iteration of the loop: 100,000 take half a second."""
    count, calls = 2_000, 0

    def profile(_frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    async with gate.lease("http://a.test/"):
        tasks = await waiters(gate, count, wait)
        for task in tasks:
            task.cancel()
        gc.collect()
        gc.disable()
        sys.setprofile(profile)
        await asyncio.sleep(0)
        sys.setprofile(None)
        gc.enable()
        assert all(task.cancelled() for task in tasks)
        assert gate.stats().pacing.waiting == 0
        assert calls <= 30 * count


async def test_a_waiter_that_arrives_while_many_are_admitted_comes_after_them(
    virtual_internet: FakeInternet,
) -> None:
    net, loop = virtual_internet, asyncio.get_running_loop()
    config = Config.from_dict({"host": [{"match": "*", "robots": "allow", "interval": 0.0}]})
    got: list[int] = []
    numbers = itertools.count()

    async def run() -> None:
        async with gate_on(net, config) as gate:

            async def visit(number: int) -> None:
                taken = gate.acquire if number % 3 else partial(gate.acquire, timeout=1e6)
                lease = await taken(f"http://a.test/{number}")
                got.append(number)
                lease.end()

            def come() -> None:
                group.create_task(visit(next(numbers)))
                if len(got) < 400:  # in each iteration, after those were let in, and before
                    loop.call_soon(come)

            async with asyncio.TaskGroup() as group, gate.lease("http://a.test/"):
                loop.call_soon(come)
                for _ in range(170):
                    group.create_task(visit(next(numbers)))
                await asyncio.sleep(0)
                loop.call_soon(come)
                await asyncio.sleep(0)

    await net.drive(run())
    assert got == list(range(len(got)))


async def test_a_waiter_outside_the_entrance_can_be_cancelled(gate: Gatekeeper) -> None:
    async with gate.lease("http://a.test/"):
        crowd = [asyncio.create_task(lease(gate, f"http://a.test/{n}")) for n in range(200)]
        await asyncio.sleep(0)
        never, early, outside, inside = (
            asyncio.create_task(gate.acquire("http://a.test/x")) for _ in range(4)
        )
        never.cancel()
        await asyncio.sleep(0)
        early.cancel()
        await until(lambda: gate.stats().pacing.waiting >= 150)
        outside.cancel()
        await asyncio.gather(never, early, outside, return_exceptions=True)
        assert all(task.cancelled() for task in (never, early, outside))
        await until(lambda: gate.stats().pacing.waiting >= 201)
        inside.cancel()
        for task in crowd:
            task.cancel()
        await asyncio.gather(inside, *crowd, return_exceptions=True)
        assert inside.cancelled()
        gate.acquire("http://a.test/x").close()  # as if nobody had asked
        assert gate.stats().pacing.waiting == 0


async def test_a_cancelled_waiter_that_was_admitted_keeps_nobody_outside(gate: Gatekeeper) -> None:
    async with gate.lease("http://a.test/"):
        crowd = [asyncio.create_task(lease(gate, f"http://a.test/{n}")) for n in range(100)]
        entrance = gate.parts.leases.entrance
        await asyncio.sleep(0)
        assert entrance.crowded
        await until(lambda: not entrance._waiting)  # the last were let in, and have not come in
        for task in crowd:
            task.cancel()
        await asyncio.gather(*crowd, return_exceptions=True)
        await asyncio.sleep(0)
        assert not entrance.crowded
        assert gate.stats().pacing.waiting == 0


async def test_a_lease_request_entered_twice_gives_two_leases(gate: Gatekeeper) -> None:
    request = gate.lease("http://b.test/")
    async with request as first:
        assert not first.ended
    crowd = [asyncio.create_task(lease(gate, f"http://a.test/{n}")) for n in range(100)]
    await asyncio.sleep(0)
    again = gate.lease("http://c.test/")
    async with again as second:
        assert (second.ended, second.url) == (False, "http://c.test/")
    assert second.ended
    for task in crowd:
        task.cancel()
    await asyncio.gather(*crowd, return_exceptions=True)


@pytest.mark.parametrize("block", [True, False])
async def test_the_time_to_wait_counts_from_the_call(
    gate: Gatekeeper, virtual_internet: FakeInternet, block: bool
) -> None:
    """Not from when those who came first were let in: the lease is due in 1,000 s."""
    clock = virtual_internet.clock
    assert isinstance(clock, VirtualClock)

    async def late() -> None:
        if block:
            async with gate.lease("http://b.test/late", timeout=900.0):
                pass
        else:
            await gate.acquire("http://b.test/late", timeout=900.0)

    (await gate.acquire("http://b.test/first")).end()
    tasks = [asyncio.create_task(gate.acquire(f"http://a.test/{n}")) for n in range(FEW)]
    waiting = asyncio.create_task(late())
    await asyncio.sleep(0)
    clock.advance(600.0)
    with pytest.raises(LeaseTimeout):
        await waiting
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_many_waiters_get_leases_in_order_of_arrival(
    net: FakeInternet,
) -> None:
    config = Config.from_dict({"host": [{"match": "*", "robots": "allow", "interval": 0.0}]})
    got: list[int] = []

    async def run() -> None:
        async with gate_on(net, config) as gate:

            async def visit(number: int) -> None:
                if number % 3:
                    async with gate.lease(f"http://a.test/{number}"):
                        got.append(number)
                else:
                    lease = await gate.acquire(f"http://a.test/{number}")
                    got.append(number)
                    lease.end()

            async with asyncio.TaskGroup() as group, gate.lease("http://a.test/"):
                for number in range(1_000):
                    group.create_task(visit(number))
                await asyncio.sleep(0)
                for number in range(1_000, 1_200):  # while the others are let in
                    group.create_task(visit(number))
                await asyncio.sleep(0)

    await net.drive(run())
    assert got == list(range(1_200))


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("order", ["first", "last", "any"])
async def test_the_cost_of_cancelling_does_not_grow_with_those_who_stay(order: str) -> None:
    async def cost(count: int) -> float:
        scheduler = scheduler_on(VirtualClock(), default_interval=1000.0)
        await scheduler.open()
        await scheduler.acquire("https://a.example/", "a.example", admit=RobotsInterval)
        tasks = [
            asyncio.create_task(
                scheduler.acquire("https://a.example/", "a.example", admit=RobotsInterval)
            )
            for _ in range(count)
        ]
        await asyncio.sleep(0)
        assert scheduler.stats().waiting == count
        leaving = list(tasks)
        if order == "last":
            leaving.reverse()
        elif order == "any":
            random.Random(2).shuffle(leaving)
        for task in leaving:
            task.cancel()
        began = time.process_time()
        await asyncio.wait(tasks)
        assert scheduler.stats().waiting == 0
        took = time.process_time() - began
        assert scopes_of(scheduler)["a.example"].queue is None
        await scheduler.close()
        return took

    few = min([await cost(FEW) for _ in range(3)])
    many = min([await cost(MANY) for _ in range(3)])
    assert many < 3.0 * few * MANY / FEW  # a quadratic part would make it 4 times that


async def test_a_cancelled_waiter_frees_its_memory_at_once() -> None:
    """Nobody's place lies about until the host's lease, which may be days off."""
    scheduler = scheduler_on(VirtualClock(), default_interval=1000.0)
    await scheduler.open()
    await scheduler.acquire("https://a.example/", "a.example", admit=RobotsInterval)
    ask = lambda: scheduler.acquire("https://a.example/", "a.example", admit=RobotsInterval)  # noqa: E731
    stays = asyncio.create_task(ask())
    for _ in range(20):
        tasks = [asyncio.create_task(ask()) for _ in range(100)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    queue = scopes_of(scheduler)["a.example"].queue
    assert queue is not None
    assert len(queue.heap or ()) < 200
    stays.cancel()
    await asyncio.wait([stays])
    await scheduler.close()


@pytest.mark.parametrize("again", [False, True])
async def test_cancelled_waiters_of_a_group_cost_the_same_each(again: bool) -> None:
    """Many hosts of one group: those whose waiters left don't stand in the others' way."""
    clock = VirtualClock()
    scheduler = Scheduler(
        Config(
            group=(GroupRule(name="g", interval=1.0, concurrency=1),),
            host=(HostRule(match="*.example", group="g", interval=0.0),),
        ),
        clock=clock,
        rng=random.Random(1),
    )
    await scheduler.open()
    first = await scheduler.acquire("https://a.example/", "a.example", admit=RobotsInterval)

    def ask(number: int) -> asyncio.Task[Any]:
        host = f"h{number}.example"
        return asyncio.create_task(
            scheduler.acquire(f"https://{host}/", host, admit=RobotsInterval)
        )

    tasks = [ask(number) for number in range(2_000)]
    await asyncio.sleep(0)
    theirs = scopes_of(scheduler)["group:g"].queue
    assert theirs is not None
    for task in tasks[:-2]:
        task.cancel()
    await asyncio.sleep(0)
    if again:  # some come back to places that are empty
        tasks[:50] = [ask(number) for number in range(50)]
    await asyncio.sleep(0)
    assert len(theirs.parked or ()) < 250
    first.report(200)
    first.release()
    served = []
    waiting = {task for task in tasks if not task.done()}
    while waiting:
        steps = steps_of(lambda: clock.advance(1.0))
        assert steps < 3_000
        await asyncio.sleep(0)
        done, waiting = (
            {one for one in waiting if one.done()},
            {one for one in waiting if not one.done()},
        )
        assert len(done) <= 1  # one clock for all
        for task in done:
            grant = task.result()
            served.append(grant.scope.name)
            grant.report(200)
            grant.release()
    assert len(served) == (52 if again else 2)
    assert scheduler.stats().waiting == 0
    await scheduler.close()


async def test_many_timeouts_at_once_are_raised_a_few_at_a_time(
    gate: Gatekeeper, virtual_internet: FakeInternet
) -> None:
    clock = virtual_internet.clock
    assert isinstance(clock, VirtualClock)
    scheduler = gate.parts.scheduler
    async with gate.lease("http://a.test/"):

        async def wait() -> None:
            with pytest.raises(LeaseTimeout):
                await scheduler.acquire(
                    "http://a.test/x", "a.test", timeout=5000, admit=RobotsInterval
                )

        tasks = [asyncio.create_task(wait()) for _ in range(2_500)]
        await asyncio.sleep(0)
        stall(clock, 5_000.5)  # a timer comes late, and finds them all
        left = [scheduler.stats().waiting]
        while left[-1]:
            scheduler._tick()  # each time in a turn of its own: a virtual clock knows none
            left.append(scheduler.stats().waiting)
        assert [before - after for before, after in itertools.pairwise(left)] == [1000, 1000, 500]
        await asyncio.gather(*tasks)


@pytest.mark.usefixtures("no_collector")
async def test_cancelling_a_waiting_task_costs_the_same_however_many_wait() -> None:
    async def cost(count: int) -> float:
        waiting = WaitingTasks(lambda: False)
        tasks = [asyncio.create_task(waiting.wait()) for _ in range(count)]
        await asyncio.sleep(0)
        for task in reversed(tasks):
            task.cancel()
        began = time.process_time()
        await asyncio.wait(tasks)
        took = time.process_time() - began
        assert not waiting.futures
        return took

    few = min([await cost(FEW) for _ in range(3)])
    many = min([await cost(4 * MANY) for _ in range(2)])
    assert many < 4.0 * few * 4 * MANY / FEW  # searched through, it would be sixteen times


class Crowd:
    """Tasks that wait for one host behind an open lease."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.scheduler = scheduler_on(self.clock, default_interval=10.0)

    def ask(self) -> asyncio.Task[Grant]:
        return asyncio.create_task(
            self.scheduler.acquire("https://a.example/", "a.example", admit=RobotsInterval)
        )

    async def gather(self, count: int) -> tuple[Grant, list[asyncio.Task[Grant]]]:
        await self.scheduler.open()
        first = await self.ask()
        tasks = [self.ask() for _ in range(count)]
        await asyncio.sleep(0)
        assert self.scheduler.stats().waiting == count
        return first, tasks


async def test_closing_tells_each_waiter_with_an_error_of_its_own() -> None:
    """One error that many tasks raise has a traceback that all of them add to."""
    crowd = Crowd()
    _, tasks = await crowd.gather(300)
    await crowd.scheduler.close()
    await asyncio.wait(tasks)
    errors = [task.exception() for task in tasks]
    assert len({id(error) for error in errors}) == 300
    for error in errors:
        assert isinstance(error, GateClosed)
        assert len(traceback.extract_tb(error.__traceback__)) < 5


async def test_a_cancelled_wait_keeps_no_reference_to_its_waiter(gate: Gatekeeper) -> None:
    """Its task keeps the CancelledError, which keeps by its traceback all that was in the way."""

    before = {id(one) for one in gc.get_objects() if type(one) is TaskWaiter}

    async def acquire() -> None:
        (await gate.acquire("http://a.test/x")).end()

    async with gate.lease("http://a.test/"):
        tasks = [*(await waiters(gate, 5)), *(asyncio.create_task(acquire()) for _ in range(5))]
        await asyncio.sleep(0)
        assert gate.stats().pacing.waiting == 10
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for _ in range(3):
            await asyncio.sleep(0)
        gc.collect()
        assert {id(one) for one in gc.get_objects() if type(one) is TaskWaiter} <= before


def outside(queue: PoliteQueue) -> int:
    """How many getters wait for a lease."""
    return len(queue._getters.futures)


async def getters(queue: PoliteQueue, got: list[int], count: int) -> list[asyncio.Task[None]]:
    """So many tasks that wait for a URL of the queue, all of them inside."""

    async def get(number: int) -> None:
        async with await queue.get():
            got.append(number)

    tasks = [asyncio.create_task(get(number)) for number in range(count)]
    inside = [0]
    while outside(queue) < count:
        await asyncio.sleep(0)
        inside.append(outside(queue))
        assert inside[-1] - inside[-2] <= 2_000
        assert len(inside) < 100
    return tasks


@pytest.mark.parametrize("order", ["first", "last", "any"])
async def test_a_url_goes_to_the_getter_that_stays_whatever_order_the_others_leave_in(
    gate: Gatekeeper, order: str
) -> None:
    got: list[int] = []
    async with PoliteQueue(gate) as queue:
        leave = await getters(queue, got, 4_000)
        if order == "any":
            random.Random(3).shuffle(leave)
        stay = leave.pop(0 if order == "first" else -1)
        for task in leave:
            task.cancel()
        await asyncio.sleep(0)
        await queue.put("http://a.test/")  # it goes to the one who is not about to leave
        await asyncio.wait([stay, *leave])
        assert all(task.cancelled() for task in leave)
        assert len(got) == 1
        assert outside(queue) == 0


async def test_many_queue_getters_get_leases_in_order_of_arrival(
    net: FakeInternet,
) -> None:
    config = Config.from_dict({"host": [{"match": "*", "robots": "allow", "interval": 0.0}]})
    got: list[int] = []

    async def run() -> None:
        async with (
            gate_on(net, config) as gate,
            PoliteQueue(gate) as queue,
        ):

            async def get(number: int) -> None:
                async with await queue.get():
                    got.append(number)

            async with asyncio.TaskGroup() as group:
                for number in range(2_500):
                    group.create_task(get(number))
                await asyncio.sleep(0)
                assert outside(queue) < 2_500
                for number in range(2_500):
                    await queue.put(f"http://a.test/{number}")

    await net.drive(run())
    assert got == list(range(2_500))


async def test_a_closed_queue_ends_the_wait_of_getters_outside_the_entrance(
    gate: Gatekeeper,
) -> None:
    queue = PoliteQueue(gate)
    tasks = [asyncio.create_task(queue.get()) for _ in range(2_500)]
    await asyncio.sleep(0)
    tasks[-1].cancel()  # it never was inside
    assert outside(queue) < len(tasks)
    await queue.close()
    *told, left = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(one) for one in told} == {GateClosed}
    assert isinstance(left, asyncio.CancelledError)


async def test_a_task_that_takes_lease_after_lease_keeps_itself_waiting_seldom(
    net: FakeInternet,
) -> None:
    config = Config.from_dict({"host": [{"match": "*", "robots": "allow", "interval": 0.0}]})
    async with gate_on(net, config) as gate:
        loop, turns = asyncio.get_running_loop(), 0

        def beat() -> None:
            nonlocal turns
            turns += 1
            loop.call_soon(beat)

        beat()
        for number in range(1_000):
            async with gate.lease(f"http://a.test/{number}"):
                pass
        assert turns < 100
