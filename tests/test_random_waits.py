"""Random programs of tasks, hosts and leases: every wait ends, and nothing of it is left."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import pytest

from gatekeeper import Config, Gatekeeper, Lease, LeaseTimeout
from gatekeeper.clock import VirtualClock
from gatekeeper.pacing.deadlock import WaitsForItself
from tests.gate_support import gate_on
from tests.internet import FakeInternet
from tests.pacing_support import nobody_waits, scopes_of

HOSTS = [f"{letter}.test" for letter in "abcdef"]
INTERVALS = {"a.test": 0.0, "b.test": 1.0, "c.test": 0.5, "d.test": 2.0, "e.test": 1.0}
"""Seconds; f.test has none of its own."""


def config(**pacing: Any) -> Config:
    hosts = [
        {"match": host, "robots": "allow", "interval": interval}
        for host, interval in INTERVALS.items()
    ]
    hosts[3]["group"] = hosts[4]["group"] = "g"
    hosts[0]["concurrency"] = 3
    return Config.from_dict(
        {
            "host": [*hosts, {"match": "*", "robots": "allow"}],
            "group": [{"name": "g", "interval": 0.7, "concurrency": 1}],
            "pacing": {"own_wait": 20.0, **pacing},
        }
    )


class Program:
    """Tasks that take leases in each other's way, and what they saw."""

    def __init__(self, gate: Gatekeeper, clock: Any, seed: int, *, ordered: bool) -> None:
        self.gate = gate
        self.clock = clock
        self.rng = random.Random(seed)
        self.ordered = ordered
        """Hosts are only asked for in the order of their names while another one is held, so that
        no circle can come about; nor does any task await one that it started under a lease."""
        self.seen: Counter[str] = Counter()
        self.starts: dict[str, list[tuple[float, float]]] = {}
        """Of each host: when a lease began, and when its head came or it ended."""
        self.tasks: list[asyncio.Task[None]] = []

    async def run(self, count: int) -> None:
        self.tasks = [asyncio.create_task(self.work(0, 0)) for _ in range(count)]
        meddler = asyncio.create_task(self.meddle())
        try:
            while pending := [task for task in self.tasks if not task.done()]:
                await asyncio.wait(pending)
        finally:
            for task in (meddler, *self.tasks):
                task.cancel()
        for task in self.tasks:
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error

    async def meddle(self) -> None:
        """Cancel somebody now and then."""
        while True:
            await self.clock.sleep(self.rng.random() * 4.0)
            self.rng.choice(self.tasks).cancel()

    async def work(self, depth: int, lowest: int) -> None:
        rng = self.rng
        for _ in range(rng.randint(1, 3)):
            number = rng.randrange(lowest, len(HOSTS))
            host = HOSTS[number]
            timeout = rng.choice([None, None, None, 0.0, 3.0])
            try:
                await rng.choice([self.in_block, self.by_hand])(host, timeout, depth, number)
            except WaitsForItself:
                self.seen["for itself"] += 1
            except LeaseTimeout:
                assert timeout is not None
                self.seen["late"] += 1

    async def in_block(self, host: str, timeout: float | None, depth: int, number: int) -> None:
        async with self.gate.lease(f"http://{host}/{depth}", timeout=timeout) as lease:
            await self.hold(lease, host, depth, number)

    async def by_hand(self, host: str, timeout: float | None, depth: int, number: int) -> None:
        lease = await self.gate.acquire(f"http://{host}/{depth}", timeout=timeout)
        try:
            await self.hold(lease, host, depth, number)
        finally:
            lease.end()

    async def hold(self, lease: Lease, host: str, depth: int, number: int) -> None:
        rng, clock = self.rng, self.clock
        began = clock.monotonic()
        try:
            await clock.sleep(rng.random())
            if rng.random() < 0.8:
                lease.report(status=200)
            told = clock.monotonic()
        except BaseException:
            self.noted(host, began)
            raise
        if lease.headed:
            self.starts.setdefault(host, []).append((began, told))
        try:
            await clock.sleep(rng.random())
            if depth < 3 and rng.random() < 0.7:
                await self.deeper(depth, number)
        finally:
            if not lease.headed:
                self.noted(host, began)

    def noted(self, host: str, began: float) -> None:
        self.starts.setdefault(host, []).append((began, self.clock.monotonic()))

    async def deeper(self, depth: int, number: int) -> None:
        """Ask for more, by itself or by tasks that are started under the lease."""
        rng = self.rng
        lowest = number + 1 if self.ordered else 0
        if self.ordered and HOSTS[number] == "d.test":
            lowest += 1  # e.test shares its only slot
        if lowest >= len(HOSTS):
            return
        how = rng.choice(["self", "self", "start"] if self.ordered else ["self", "start", "await"])
        self.seen[how] += 1
        if how == "self":
            await self.work(depth + 1, lowest)
        elif how == "start":
            self.tasks.append(asyncio.create_task(self.work(depth + 1, lowest)))
        else:
            children = [self.work(depth + 1, lowest) for _ in range(rng.randint(1, 3))]
            await asyncio.gather(*children)


def check_that_nothing_is_left(gate: Gatekeeper) -> None:
    stats = gate.stats().pacing
    assert (stats.in_flight, stats.waiting) == (0, 0)
    waits = gate.parts.waits
    assert nobody_waits(waits)
    assert len(waits.holdings) == 0
    for name, scope in scopes_of(gate.parts.scheduler).items():
        assert (name, scope.in_flight, scope.unheaded, scope.queue) == (name, 0, 0, None)


def check_intervals(program: Program) -> None:
    for host, interval in INTERVALS.items():
        times = sorted(program.starts.get(host, ()))
        for n in range(1, len(times)):
            if host != "a.test":  # three at once
                assert times[n][0] >= times[n - 1][1] + interval - 1e-6, (
                    host,
                    times[n - 1 : n + 1],
                )
    both = sorted([*program.starts.get("d.test", ()), *program.starts.get("e.test", ())])
    for n in range(1, len(both)):
        assert both[n][0] >= both[n - 1][1] + 0.7 - 1e-6, both[n - 1 : n + 1]


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("seed", range(8))
async def test_random_programs_of_leases_end_and_leave_no_lease(
    net: FakeInternet, seed: int, ordered: bool
) -> None:

    async def run() -> Counter[str]:
        async with gate_on(net, config(), agent="testbot", rng=random.Random(seed)) as gate:
            program = Program(gate, net.clock, seed, ordered=ordered)
            await program.run(12)
            await net.clock.sleep(1.0)
            check_that_nothing_is_left(gate)
            check_intervals(program)
            return program.seen

    seen = await net.drive(run(), limit=20_000.0)
    if ordered:  # nobody's wait could be without an end, and none was long enough for own_wait
        assert seen["for itself"] == 0


async def test_a_wait_is_refused_at_own_wait_whatever_the_moment_rounds_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`(since + 20.0) - since` may be a little less than 20: it is looked at once, not for ever."""
    began = next(n / 7 for n in range(1, 1000) if (n / 7 + 20.0) - n / 7 < 20.0)
    clock = VirtualClock()
    clock.advance(began)
    config = Config.from_dict(
        {"host": [{"match": "*", "robots": "allow"}], "pacing": {"own_wait": 20.0}}
    )
    async with Gatekeeper("testbot", config=config, clock=clock) as gate:

        async def child() -> None:
            with pytest.raises(WaitsForItself):
                await gate.acquire("http://a.test/2")

        async with gate.lease("http://a.test/1"):
            task = asyncio.create_task(child())
            await clock.settle()
            assert clock.monotonic() == began
            looks = 0
            waits = gate.parts.waits
            look_at = waits.examine

            def counted(wait: Any, now: float) -> None:
                nonlocal looks
                looks += 1
                assert looks < 50
                look_at(wait, now)

            monkeypatch.setattr(waits, "examine", counted)
            await clock.elapse(20.5)
            assert task.done()
            await task
