"""Shortcuts have the same effects as the full way; `take` grants only hosts without waiters."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from gatekeeper.clock import VirtualClock
from gatekeeper.pacing.grants import Grant
from gatekeeper.pacing.scheduler import Scheduler
from gatekeeper.pacing.scopes import Scope
from gatekeeper.robots.timing import RobotsInterval
from tests.pacing_support import due_at, scope_of, scopes_of, stall

Make = Callable[..., Awaitable[Scheduler]]
URL, HOST = "https://a.example/", "a.example"
SECOND = RobotsInterval(1.0, "a second")


class Recorder:
    """A stand-in for `Promises` that records its calls."""

    def __init__(self) -> None:
        self.promises: list[tuple[str, float, float, int]] = []
        self.marked = True
        self.unwritten: set[str] = set()

    def mark(self) -> None:
        """True."""

    def is_unwritten(self, scope: Scope) -> bool:
        return False

    def remember(self, scope: Scope, now: float) -> None:
        self.promise(scope, now)

    def promise(self, scope: Scope, now: float) -> None:
        self.promises.append((scope.name, scope.basis, scope.interval, scope.unheaded))


async def known(scheduler: Scheduler, wish: RobotsInterval = SECOND) -> None:
    """Take a lease of the host, so that the next is due only after its interval."""
    grant = await scheduler.acquire(URL, HOST, admit=lambda: wish)
    grant.report(200)
    grant.release()


class Crawl:
    """One of two crawls with the same steps."""

    def __init__(self, scheduler: Scheduler, *, every_step: bool) -> None:
        self.scheduler = scheduler
        self.recorder = Recorder()
        self.engine = scheduler._engine
        self.engine.promises = self.recorder  # type: ignore[assignment]
        self.every_step = every_step
        # So that each report is evaluated, and each end of a lease looks for waiters.
        self.engine.learns_latency = every_step
        self.open: list[Grant] = []

    def step(self, kind: int, host: str, wish: RobotsInterval, pick: float, status: int) -> Any:
        if self.every_step:
            self.engine.overdue = True
            wish = RobotsInterval(wish.seconds, wish.source)  # never the same object
        if kind < 3:
            scope_of(self.scheduler, host)
            grant = self.scheduler.acquire_nowait(URL, host, wish)
            if grant is not None:
                self.open.append(grant)
            return grant is not None
        if not self.open:
            return None
        grant = self.open[int(pick * len(self.open))]
        if kind == 3:
            return grant.head()
        if kind < 6:
            return grant.report(status, 0.1)
        self.open.remove(grant)
        return grant.release() if kind < 8 else grant.give_back()

    def state(self) -> Any:
        return (
            [
                (
                    one.name,
                    one.basis,
                    one.interval,
                    one.in_flight,
                    one.unheaded,
                    one.history is None,
                )
                for one in scopes_of(self.scheduler).values()
            ],
            self.recorder.promises,
            self.scheduler.stats(),
            len(self.engine.leases),
        )


@pytest.mark.parametrize("limit", [1, 2])
@pytest.mark.parametrize("seed", range(4))
async def test_the_short_path_grants_the_same_leases_at_the_same_times(
    make: Make, clock: VirtualClock, seed: int, limit: int
) -> None:
    short = Crawl(await make(concurrency=limit, max_in_flight=4), every_step=False)
    long = Crawl(await make(concurrency=limit, max_in_flight=4), every_step=True)
    rng = random.Random(seed)
    wishes = [RobotsInterval(seconds, f"{seconds} s") for seconds in (0.0, 0.5, 0.5, 1.0, 3.0)]
    for _ in range(1500):
        hosts = ("a.example", "b.example", "c.example", "d.example", "e.example", "f.example")
        step = (
            rng.randrange(9),
            rng.choice(hosts),
            rng.choice(wishes),
            rng.random(),
            rng.choice((200, 200, 200, 304, 404, 429, 500)),
        )
        assert short.step(*step) == long.step(*step)
        assert short.state() == long.state()
        if rng.random() < 0.3:
            clock.advance(rng.choice((0.1, 0.5, 1.0, 100.0)))
    assert short.scheduler.stats().granted > 100


async def test_a_known_free_host_gives_a_lease_at_once(make: Make, clock: VirtualClock) -> None:
    scheduler = await make()
    await known(scheduler)
    assert scheduler.acquire_nowait(URL, HOST, SECOND) is None
    clock.advance(1.0)
    grant = scheduler.acquire_nowait(URL, HOST, SECOND)
    assert grant is not None
    assert grant.start_at == clock.monotonic() == 1001.0
    assert scheduler.acquire_nowait(URL, HOST, SECOND) is None


async def test_an_unknown_host_gives_no_lease_at_once(make: Make) -> None:
    assert (await make()).acquire_nowait(URL, HOST, SECOND) is None


async def test_a_text_that_asks_for_more_counts_from_the_last_request(
    make: Make, clock: VirtualClock
) -> None:
    scheduler = await make()
    await known(scheduler)
    clock.advance(2.0)
    slower = RobotsInterval(5.0, "five seconds")
    assert scheduler.acquire_nowait(URL, HOST, slower) is None
    clock.advance(3.0)
    assert scheduler.acquire_nowait(URL, HOST, slower) is not None


async def test_a_host_with_waiters_gives_no_lease_at_once(make: Make, clock: VirtualClock) -> None:
    scheduler = await make()
    await known(scheduler)
    scheduler.when_due(HOST, lambda: None)
    stall(clock, 1.0)  # the timer has not fired yet
    assert scheduler.acquire_nowait(URL, HOST, SECOND) is None


async def test_no_lease_is_given_at_once_at_max_in_flight(make: Make, clock: VirtualClock) -> None:
    scheduler = await make(max_in_flight=1)
    await known(scheduler)
    clock.advance(1.0)
    grant = await scheduler.acquire("https://b.example/", "b.example", admit=lambda: SECOND)
    assert scheduler.acquire_nowait(URL, HOST, SECOND) is None
    grant.release()
    assert scheduler.acquire_nowait(URL, HOST, SECOND) is not None


@pytest.mark.parametrize("what", ["frozen", "paused", "blocked", "closed"])
async def test_a_host_gives_no_lease_at_once_while_frozen_paused_blocked_or_closed(
    make: Make, clock: VirtualClock, what: str
) -> None:
    scheduler = await make()
    await known(scheduler)
    clock.advance(1.0)
    if what == "frozen":
        scheduler.freeze({HOST})
    elif what == "paused":
        scheduler.pause(HOST)
    elif what == "blocked":
        scheduler.block(HOST, clock.wall() + 60.0)
    else:
        await scheduler.close()
    assert scheduler.acquire_nowait(URL, HOST, SECOND) is None


async def test_a_host_gives_leases_at_once_again_after_a_thaw(
    make: Make, clock: VirtualClock
) -> None:
    scheduler = await make()
    await known(scheduler)
    clock.advance(1.0)
    scheduler.freeze({HOST})
    scheduler.thaw()
    assert scheduler.acquire_nowait(URL, HOST, SECOND) is not None


async def test_a_dry_run_gives_no_lease_at_once(make: Make, clock: VirtualClock) -> None:
    scheduler = await make(dry_run=True)
    await known(scheduler)
    clock.advance(1.0)
    assert scheduler.acquire_nowait(URL, HOST, SECOND) is None


async def test_jitter_is_drawn_for_each_lease(make: Make, clock: VirtualClock) -> None:
    scheduler = await make(jitter=0.5)
    intervals = set()
    for _ in range(5):
        await known(scheduler)
        intervals.add(scopes_of(scheduler)[HOST].interval)
        clock.advance(2.0)
    assert len(intervals) == 5


async def test_the_interval_counts_from_the_time_given_with_a_report(
    make: Make, clock: VirtualClock
) -> None:
    scheduler = await make()
    grant = await scheduler.acquire(URL, HOST, admit=lambda: SECOND)
    clock.advance(0.5)
    grant.report(200, 0.25, now=1000.25)
    assert grant.headed
    grant.release()
    assert due_at(scheduler, HOST) == 1001.25
