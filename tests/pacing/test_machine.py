"""The scheduler as a state machine: random events in random order break no promise.

The events are cancellations, reports, blocks, pauses, expired policies, wall-clock jumps, crashes
and restarts. A judge that knows only the sites' side counts violations, and at the end every
remaining waiter must get a lease.
"""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gatekeeper.clock import VirtualClock
from gatekeeper.config import Config, GroupRule, HostRule, PacingConfig
from gatekeeper.errors import LeaseTimeout
from gatekeeper.pacing.grants import Grant
from gatekeeper.pacing.queues import REFETCH
from gatekeeper.robots.timing import RobotsInterval
from gatekeeper.testing.simulation import Account, Judge
from tests.pacing_support import FakeStorage, scheduler_on

HOSTS = ("a.example", "b.example", "c.example", "d.example")
GROUPED = ("b.example", "c.example")
CONFIG = Config(
    pacing=PacingConfig(max_in_flight=5, lease_ttl=40.0, backoff_jitter=0.0, backoff_max=60.0),
    host=(
        HostRule(match="a.example", concurrency=2),
        *(HostRule(match=host, group="g") for host in GROUPED),
        HostRule(match="d.example", interval=0.0, concurrency=2),
    ),
    group=(GroupRule(name="g", interval=1.5, concurrency=2),),
)
hosts = st.sampled_from(HOSTS)
delays = st.sampled_from((None, 0.0, 0.3, 1.0, 2.5, 10.0))
picks = st.integers(0, 1_000_000)


class Politeness(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.clock = VirtualClock(start=500.0)
        self.storage = FakeStorage()
        self.judge = Judge()
        self.wishes = dict.fromkeys(HOSTS, RobotsInterval())
        self.stale = dict.fromkeys(HOSTS, False)
        self.asking = dict.fromkeys(HOSTS, 0)
        """Robots requests that wait for a lease."""
        self.accounts = {host: Account(1.0) for host in HOSTS}
        self.accounts["a.example"].limit = 2
        self.accounts["d.example"] = Account(0.0, 2)
        self.accounts["g"] = Account(1.5, 2)
        self.tasks: list[asyncio.Task[None]] = []
        self.open: list[tuple[str, Grant]] = []
        self.loop.run_until_complete(self.start())

    async def start(self) -> None:
        self.scheduler = scheduler_on(self.clock, CONFIG, storage=self.storage)
        await self.scheduler.open()

    def settle(self) -> None:
        self.loop.run_until_complete(self.clock.settle())

    # --- the sites' side ----------------------------------------------------------------

    def books(self, host: str) -> list[Account]:
        return [self.accounts[name] for name in (host, "g") if name == host or host in GROUPED]

    def started(self, host: str, grant: Grant) -> None:
        for account in self.books(host):
            self.judge.start(account, self.clock.monotonic())
        self.open.append((host, grant))
        self.clock.call_at(grant.expires_at - 1e-7, self.expiring, host, grant)

    def ended(self, host: str, grant: Grant) -> None:
        for account in self.books(host):
            self.judge.end(account, self.clock.monotonic(), grant.headed)

    # --- what crawlers do ---------------------------------------------------------------

    async def visit(self, host: str, priority: int, patience: float | None) -> None:
        def admit() -> object:
            return REFETCH if self.stale[host] else self.wishes[host]

        async def refetch() -> None:
            self.asking[host] += 1
            try:
                grant = await self.scheduler.acquire_robots(
                    f"https://{host}/robots.txt", host, asked=self.wishes[host]
                )
            finally:
                self.asking[host] -= 1
            self.started(host, grant)
            try:
                await self.clock.sleep(0.7)
                self.stale[host] = False
            finally:
                if (host, grant) in self.open:
                    self.open.remove((host, grant))
                    if grant.open:
                        self.ended(host, grant)
                        grant.release()

        try:
            grant = await self.scheduler.acquire(
                f"https://{host}/",
                host,
                priority=priority,
                timeout=patience,
                admit=admit,
                refetch=refetch,  # type: ignore[arg-type]
            )
        except LeaseTimeout:
            return
        self.started(host, grant)

    @rule(host=hosts, priority=st.integers(0, 2), patience=st.sampled_from((None, None, 0.0, 3.0)))
    def ask(self, host: str, priority: int, patience: float | None) -> None:
        if sum(not task.done() for task in self.tasks) >= 10:
            return
        self.tasks.append(self.loop.create_task(self.visit(host, priority, patience)))
        self.settle()

    @rule(pick=picks, settle=st.booleans())
    def cancel(self, pick: int, settle: bool) -> None:
        alive = [task for task in self.tasks if not task.done()]
        if alive:
            alive[pick % len(alive)].cancel()
        if settle:
            self.settle()

    def pick(self, pick: int) -> tuple[str, Grant] | None:
        self.open = [(host, grant) for host, grant in self.open if grant.open]
        return self.open[pick % len(self.open)] if self.open else None

    @rule(pick=picks)
    def head(self, pick: int) -> None:
        if (found := self.pick(pick)) and not found[1].headed:
            for account in self.books(found[0]):
                self.judge.head(account, self.clock.monotonic())
            found[1].head()
            self.settle()

    @rule(
        pick=picks,
        status=st.sampled_from((None, 200, 200, 200, 404, 429, 500, 503)),
        wait=st.sampled_from((None, None, 5.0, 100.0)),
        hurry=st.booleans(),
    )
    def finish(self, pick: int, status: int | None, wait: float | None, hurry: bool) -> None:
        found = self.pick(pick)
        if found is None:
            return
        host, grant = found
        self.settle()
        if not grant.open:
            return
        self.ended(host, grant)
        now = self.clock.monotonic()
        if wait is not None and (status is None or status >= 300):
            self.judge.block(self.accounts[host], now + wait)
        elif status in (429, 503):
            self.judge.block(self.accounts[host], now + 60.0)
        if wait is not None or status is not None:
            grant.report(status, 0.1, wait)
        grant.release()
        self.open.remove(found)
        if not hurry:
            self.settle()

    @rule(pick=picks)
    def give_back(self, pick: int) -> None:
        found = self.pick(pick)
        if found is not None and not found[1].headed:
            for account in self.books(found[0]):
                self.judge.withdrawn(account)
            found[1].give_back()
            self.open.remove(found)
            self.settle()

    # --- what else happens --------------------------------------------------------------

    @rule(seconds=st.sampled_from((0.01, 0.5, 1.0, 1.5, 7.0, 30.0, 90.0)))
    def pass_time(self, seconds: float) -> None:
        self.loop.run_until_complete(self.clock.elapse(seconds))

    def expiring(self, host: str, grant: Grant) -> None:
        """A lease that is not ended is over when it expires, for the site as well."""
        if grant.open and (host, grant) in self.open:
            self.ended(host, grant)
            self.open.remove((host, grant))

    @rule(host=hosts, seconds=delays)
    def new_text(self, host: str, seconds: float | None) -> None:
        self.settle()  # The new text does not apply to leases already granted.
        self.wishes[host] = RobotsInterval(seconds, f"crawl-delay {seconds}")
        default = 0.0 if host == "d.example" else 1.0
        self.accounts[host].interval = default if seconds is None else seconds
        if self.asking[host]:
            # Its robots.txt request waits with the interval of the previous text.
            self.scheduler.robots_read(host, lambda: self.wishes[host])

    @rule(host=hosts)
    def text_expires(self, host: str) -> None:
        self.stale[host] = True

    @rule(host=hosts, on=st.booleans())
    def pause(self, host: str, on: bool) -> None:
        self.scheduler.pause(host, paused=on)
        self.settle()

    @rule(host=hosts, seconds=st.sampled_from((2.0, 50.0)))
    def block(self, host: str, seconds: float) -> None:
        self.settle()  # Nor does the block.
        self.judge.block(self.accounts[host], self.clock.monotonic() + seconds)
        self.scheduler.block(host, self.clock.wall() + seconds, "operator")

    @rule(on=st.booleans())
    def freeze(self, on: bool) -> None:
        if on:
            self.scheduler.freeze(set(HOSTS[::2]))  # The others continue.
        else:
            self.scheduler.thaw()
        self.settle()

    @rule(days=st.sampled_from((-1, 1)))
    def wall_jumps(self, days: int) -> None:
        self.clock.jump_wall(days * 86_400.0)
        # The wall clock is checked within half a minute.
        self.loop.run_until_complete(self.clock.elapse(31.0))

    @rule(clean=st.booleans(), down=st.sampled_from((0.0, 0.2, 5.0)))
    def restart(self, clean: bool, down: float) -> None:
        self.loop.run_until_complete(self.restarting(clean, down))

    async def restarting(self, clean: bool, down: float) -> None:
        for task in self.tasks:
            task.cancel()
        if not clean:
            self.storage = self.storage.crash()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.tasks.clear()
        for host, grant in self.open:
            if grant.open:
                self.ended(host, grant)
                if clean:
                    grant.release()
        self.open.clear()
        await self.scheduler.close()
        await self.clock.elapse(down)
        await self.start()

    def calm(self) -> None:
        self.scheduler.thaw()
        for host in HOSTS:
            self.scheduler.pause(host, paused=False)

    # --- what must hold -----------------------------------------------------------------

    @invariant()
    def nothing_is_broken(self) -> None:
        assert not self.judge.violations

    def teardown(self) -> None:
        try:
            self.loop.run_until_complete(self.everybody_is_served())
        finally:
            self.loop.close()

    async def everybody_is_served(self) -> None:
        self.calm()
        for host in HOSTS:
            # The back-off may have grown to a day by now, so the operator lifts it.
            self.scheduler.block(host, self.clock.wall() - 1.0)
            self.accounts[host].blocked_until = self.clock.monotonic()
        for _ in range(200):
            for found in [(h, g) for h, g in self.open if g.open]:
                self.ended(*found)
                found[1].report(200)
                found[1].release()
            self.open.clear()
            await self.clock.elapse(20.0)
            if all(task.done() for task in self.tasks) and not self.open:
                break
        assert not self.judge.violations
        assert all(task.done() for task in self.tasks)
        for task in self.tasks:
            if not task.cancelled():
                task.result()
        for _, grant in self.open:
            grant.release()
        assert self.scheduler.stats().in_flight == 0
        assert self.scheduler.stats().waiting == 0
        await self.scheduler.close()


Politeness.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestPoliteness = pytest.mark.timeout(120)(Politeness.TestCase)


# Relative frequency of each event in a long random run.
STEPS = {
    "ask": 10,
    "cancel": 2,
    "head": 4,
    "finish": 10,
    "give_back": 1,
    "pass_time": 8,
    "new_text": 2,
    "text_expires": 1,
    "pause": 1,
    "block": 0.3,
    "freeze": 0.3,
    "wall_jumps": 0.1,
    "restart": 0.4,
}


@pytest.mark.parametrize("seed", range(4))
def test_a_long_random_crawl_violates_no_interval(seed: int) -> None:
    rng = random.Random(seed)
    machine = Politeness()
    try:
        for _ in range(2500):
            (step,) = rng.choices(list(STEPS), list(STEPS.values()))
            getattr(machine, step)(**arguments(step, rng))
            machine.nothing_is_broken()
            if rng.random() < 0.02:  # End lasting conditions now and then.
                machine.calm()
    finally:
        machine.teardown()


def arguments(step: str, rng: random.Random) -> dict[str, object]:
    host, pick = rng.choice(HOSTS), rng.randrange(1000)
    return {
        "ask": lambda: {
            "host": host,
            "priority": rng.randrange(3),
            "patience": rng.choice((None, None, 0.0, 3.0)),
        },
        "cancel": lambda: {"pick": pick, "settle": rng.random() < 0.5},
        "head": lambda: {"pick": pick},
        "finish": lambda: {
            "pick": pick,
            "status": rng.choice((None, *(200,) * 30, 404, 500, 429, 503)),
            "wait": rng.choice((*(None,) * 20, 5.0, 100.0)),
            "hurry": rng.random() < 0.5,
        },
        "give_back": lambda: {"pick": pick},
        "pass_time": lambda: {"seconds": rng.choice((0.01, 0.5, 1.0, 1.0, 1.5, 7.0, 30.0))},
        "new_text": lambda: {
            "host": host,
            "seconds": rng.choice((None, 0.0, 0.3, 1.0, 2.5, 10.0)),
        },
        "text_expires": lambda: {"host": host},
        "pause": lambda: {"host": host, "on": rng.random() < 0.3},
        "block": lambda: {"host": host, "seconds": rng.choice((2.0, 50.0))},
        "freeze": lambda: {"on": rng.random() < 0.3},
        "wall_jumps": lambda: {"days": rng.choice((-1, 1))},
        "restart": lambda: {
            "clean": rng.random() < 0.5,
            "down": rng.choice((0.0, 0.2, 5.0)),
        },
    }[step]()
