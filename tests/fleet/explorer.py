"""Fleets in virtual time over the store's real scripts, judged by the logs of the sites alone.

The members are real schedulers and ledgers. A simulated network connects them to a real server: the
seed determines how long each message takes or whether it is lost. Before or after any message the
store may die, lose its data, or come back with an earlier state. Nothing waits for the real clock,
and the same seed reproduces the same run.

`python -m tests.fleet.explorer 0 1999` runs those seeds and prints violations. With `--impatient`
there are no faults, but all waiters give up soon, and each hold must belong to a living member.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import selectors
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar
from unittest.mock import patch

import msgspec
import redis

from gatekeeper.clock import SystemClock, Timer
from gatekeeper.config import Config, FleetConfig, PacingConfig
from gatekeeper.errors import LedgerLost
from gatekeeper.fleet import RedisLedger
from gatekeeper.fleet import redis_ledger as ledger_module
from gatekeeper.fleet.scripts import FORMAT, OPERATIONS
from gatekeeper.fleet.store import CALL_DEADLINE, StoreDown
from gatekeeper.pacing.scheduler import Scheduler
from gatekeeper.robots.timing import RobotsInterval
from tests.pacing_support import scheduler_on

HOLD = 2.0
INTERVALS = (0.4, 0.4, 0.4, 3.0)
"""Intervals in seconds that sites may ask for."""
TOLERANCE = 1e-6
BEGIN = 1_000_000.0
_APART = 1e-6
"""Seconds between two messages of a wire, since timers of the same time fire in any order."""
_SETTLED = 3.0
"""Seconds after which a hold that its member has ended must be gone from the store."""
T = TypeVar("T")
SPEEDS = (
    *((0.001,), (0.001, 0.02), (0.001, 0.002, 0.02), (0.0005, 0.002, 0.01)),
    *((0.001, 0.01, 0.05), (0.005, 0.03, 0.1), (0.001, 0.05, 0.3)),
)
"""One-way delays of messages in seconds; each message has one of them."""
KINDS = ("die", "die", "die and keep", "forget", "cut")
_ACTING: ContextVar[str] = ContextVar("_ACTING", default="")
"""The member whose store is being created."""


# --- time ---------------------------------------------------------------------------------------


class _Selector(selectors.DefaultSelector):
    """A selector that advances the loop's time instead of waiting."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "everybody waits for ever"
        self.loop.now += max(1e-9, timeout)  # so that a timer early by rounding makes progress
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that never waits."""

    def __init__(self) -> None:
        selector = _Selector()
        selector.loop = self
        self.now = BEGIN
        super().__init__(selector)

    def time(self) -> float:
        return self.now


class LoopClock(SystemClock):
    """A clock that shows the loop's time."""

    __slots__ = ("loop",)

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop

    def monotonic(self) -> float:  # type: ignore[override]
        return self.loop.now

    wall = monotonic  # type: ignore[assignment]

    def call_at(self, when: float, callback: Callable[..., object], *args: Any) -> Timer:
        return self.loop.call_at(when, callback, *args)


# --- sites --------------------------------------------------------------------------------------


@dataclass
class Visit:
    """One request as seen by its site."""

    who: str
    arrived: float
    head: float = float("inf")
    end: float = float("inf")
    block: float = 0.0
    told: float = 0.0
    """When other members could first know of the block."""


def violations(log: dict[str, list[Visit]], intervals: dict[str, float]) -> list[str]:
    """Return the violations that the logs of the sites show."""
    found = []
    for name, visits in log.items():
        for number, after in enumerate(visits):
            for before in visits[:number]:
                if after.arrived < before.end - TOLERANCE:
                    kind = "overlap"
                elif after.arrived < before.head + intervals[name] - TOLERANCE:
                    kind = "early"
                elif before.told < after.arrived < before.head + before.block - TOLERANCE:
                    kind = "in a block"
                else:
                    continue
                found.append(f"{kind}: {name} {before} {after}")
    return found


# --- the store ----------------------------------------------------------------------------------


def _simulated(text: str) -> str:
    """Rewrite a script so that its time and its messages are simulated."""
    text = text.replace("redis.call('TIME')", "{0, tonumber(redis.call('GET', '{now}'))}")
    return text.replace("redis.call('PUBLISH',", "redis.call('RPUSH', '{published}',")


@dataclass
class World:
    """The store, the wires, and their faults."""

    loop: VirtualLoop
    client: Any
    rng: random.Random
    speeds: tuple[float, ...] = (0.001,)
    """One-way delays in seconds, one of which is chosen for each message."""
    losing: float = 0.0
    """The share of messages at which a wire goes dead."""
    faults: dict[int, tuple[str, float]] = field(default_factory=dict)
    """The faults by the number of the message, and for how long the store is then away."""
    generation: int = 0
    alive: bool = True
    messages: int = 0
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    wires: list[Wire] = field(default_factory=list)
    hearers: list[tuple[Wire, list[str], Callable[[str, bytes], None]]] = field(
        default_factory=list
    )
    told: list[str] = field(default_factory=list)
    heard: list[tuple[float, str]] = field(default_factory=list)
    """When the store received a block, and of which scope."""
    parted: dict[str, float] = field(default_factory=dict)
    """By member, until when no messages reach the store or the member."""
    origin: Callable[[], object] | None = None
    """Restores the initial state of the store."""

    @property
    def identity(self) -> str:
        return f"run{self.generation}:"

    def note(self, what: str) -> None:
        self.told.append(f"{self.loop.now - BEGIN:8.4f} {what}")

    def delay(self) -> float:
        return self.rng.choice(self.speeds)

    def passed(self) -> bool:
        """Count a message and trigger its fault. Return False if its wire goes dead."""
        self.messages += 1
        if (fault := self.faults.get(self.messages)) is not None:
            self.breaks(*fault)
        return self.rng.random() >= self.losing

    def breaks(self, kind: str, seconds: float) -> None:
        self.note(f"{kind} {seconds:g}")
        if kind == "forget":
            self._forget(0)
        elif kind == "cut":
            self._cut()
        elif kind == "part":
            who = self.rng.choice(sorted({wire.who for wire in self.wires if wire.open}) or [""])
            self.parted[who] = max(self.parted.get(who, 0.0), self.loop.now + seconds)
            self.note(f"{who} is parted")
        elif kind in ("die", "die and keep") and self.alive:
            self.generation += 1
            self.alive = False
            self._cut()
            kept = len(self.calls) - self.rng.randrange(30) if kind != "die" else 0
            self.loop.call_later(seconds, self._back, kept)

    def parts(self, who: str) -> bool:
        """Return True if that member is partitioned from the store."""
        return self.loop.now < self.parted.get(who, 0.0)

    def _back(self, kept: int) -> None:
        self._forget(max(0, kept))
        self.alive = True
        self.note("back")

    def _forget(self, kept: int) -> None:
        """Reset the store to its state after the first calls."""
        self.client.flushall()
        calls, self.calls = self.calls[:kept], []
        if kept and self.origin is not None:
            self.origin()
        for call in calls:
            self.execute(*call, replayed=True)

    def _cut(self) -> None:
        wires, self.wires = self.wires, []
        for wire in wires:
            self.loop.call_later(self.delay(), wire.broke)

    def execute(
        self,
        text: str,
        keys: Sequence[str],
        arguments: Sequence[Any],
        now: int,
        *,
        replayed: bool = False,
    ) -> Any:
        self.calls.append((text, keys, arguments, now))
        if text == OPERATIONS:
            told = msgspec.msgpack.decode(arguments[0])[5]
            self.heard += [(self.loop.now, keys[one[1]]) for one in told if one[0] in "bc"]
        pipeline = self.client.pipeline(transaction=False)
        pipeline.set("{now}", now)
        if text:
            pipeline.eval(_simulated(text), len(keys), *keys, *arguments)
        else:
            pipeline.execute_command(*arguments)
        pipeline.lrange("{published}", 0, -1)
        pipeline.delete("{published}")
        _, result, published, _ = pipeline.execute(raise_on_error=True)
        if not replayed:
            for channel, data in zip(published[::2], published[1::2], strict=True):
                self._publish(channel.decode(), data)
        return result

    def _publish(self, channel: str, data: bytes) -> None:
        for wire, channels, heard in self.hearers:
            if self.parts(wire.who):
                wire.deaf = wire.dumb = True
            elif channel in channels and wire.open and not wire.dumb and self.passed():
                moment = wire.down = max(wire.down, self.loop.now + self.delay())
                self.loop.call_at(moment, self._hear, wire, heard, channel, data)

    def _hear(
        self, wire: Wire, heard: Callable[[str, bytes], None], channel: str, data: bytes
    ) -> None:
        if wire.open:
            heard(channel, data)


class Wire:
    """A connection that delivers in order, in both directions."""

    def __init__(self, world: World, who: str) -> None:
        self.world = world
        self.who = who
        self.generation = world.generation
        self.up = self.down = 0.0
        """When the latest message arrives, for each direction."""
        self.deaf = self.dumb = False
        self.open = True
        self.waiting: set[asyncio.Future[Any]] = set()
        world.wires.append(self)

    def broke(self) -> None:
        self.open = False
        for one in self.waiting:
            if not one.done():
                one.set_exception(LedgerLost("the connection broke"))

    async def ask(self, act: Callable[[], Any]) -> Any:
        world, loop = self.world, self.world.loop
        if not self.open:
            raise LedgerLost("the connection is broken")
        answer: asyncio.Future[Any] = loop.create_future()
        self.waiting.add(answer)
        answer.add_done_callback(self.waiting.discard)

        def reply(result: Any) -> None:
            if self.open and not answer.done():
                answer.set_result(result)

        def arrive() -> None:
            if self.generation != world.generation or not world.alive:
                return
            result = act()
            self.dumb = self.dumb or world.parts(self.who) or not world.passed()
            if not self.dumb:
                self.down = max(self.down + _APART, loop.now + world.delay())
                loop.call_at(self.down, reply, result)

        self.deaf = self.deaf or world.parts(self.who) or not world.passed()
        if not self.deaf:
            self.up = max(self.up + _APART, loop.now + world.delay())
            loop.call_at(self.up, arrive)
        return await answer


class SimulatedStore:
    """`gatekeeper.fleet.store.Store` over a simulated wire."""

    world: World

    def __init__(self, url: str, config: FleetConfig, *, any_epoch: bool = False, tag: str = ""):
        self.where = url
        self.config = config
        self.identity = ""
        self._who = _ACTING.get()
        self._wire: Wire | None = None
        self._hears: Wire | None = None

    async def hang_up(self) -> None:
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.broke()

    async def close(self) -> None:
        await self.hang_up()
        if self._hears is not None:
            self._hears.broke()

    async def connect(self, *, starting: bool = False) -> str:
        await self.hang_up()
        await self._connected()
        wire = self._wire = Wire(self.world, self._who)
        self.identity = await self._ask(wire, lambda: self.world.identity)
        return self.identity

    async def _connected(self) -> None:
        await asyncio.sleep(2 * self.world.delay())
        if self.world.parts(self._who):
            await asyncio.sleep(CALL_DEADLINE)
            raise LedgerLost("no answer")
        if not self.world.alive:
            raise StoreDown("connection refused")

    async def _ask(self, wire: Wire | None, act: Callable[[], Any]) -> Any:
        if wire is None:
            raise LedgerLost("not connected")
        try:
            async with asyncio.timeout(CALL_DEADLINE):
                return await wire.ask(act)
        except TimeoutError as error:
            await self.hang_up()
            raise LedgerLost("no answer") from error
        except (LedgerLost, asyncio.CancelledError):
            await self.hang_up()
            raise

    def _now(self) -> int:
        return round(self.world.loop.now * 1e6)

    async def run(self, *command: Any, form: Any = Any) -> Any:
        return await self._ask(self._wire, lambda: self.world.execute("", (), command, self._now()))

    async def script(
        self, text: str, keys: Sequence[str], arguments: Sequence[Any], form: Any = Any
    ) -> Any:
        return (await self.scripts(text, [(list(keys), list(arguments))]))[0]

    async def scripts(
        self, text: str, calls: Sequence[tuple[list[str], list[Any]]], form: Any = Any
    ) -> list[Any]:
        def act() -> list[Any]:
            return [self.world.execute(text, keys, told, self._now()) for keys, told in calls]

        return list(await self._ask(self._wire, act))

    async def listen(
        self,
        channels: Callable[[], list[str]],
        heard: Callable[[str, bytes], None],
        subscribed: Callable[[int], None],
    ) -> None:
        await self._connected()
        wire = self._hears = Wire(self.world, self._who)
        await self._ask(wire, lambda: None)
        names: list[str] = []
        self.world.hearers.append((wire, names, heard))
        while wire.open:
            names[:] = channels()
            subscribed(len(names))
            await asyncio.sleep(0.25)
        self.world.hearers = [one for one in self.world.hearers if one[0] is not wire]
        raise LedgerLost("the connection broke")


async def _vanish(ledger: RedisLedger) -> None:
    """End immediately, without leaving the fleet."""
    tasks = [
        one for one in (ledger._heartbeat_task, ledger._listen_task, *ledger._flights.tasks) if one
    ]
    ledger._open = False
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await ledger._store.close()


# --- a run --------------------------------------------------------------------------------------


@dataclass
class Plan:
    """The parameters of a run."""

    seed: int
    members: int = 2
    seconds: float = 15.0
    faults: dict[int, tuple[str, float]] = field(default_factory=dict)
    """Faults by the number of the message, and for how long."""
    moments: tuple[tuple[float, str, float], ...] = ()
    """Faults by the number of seconds."""
    losing: float = 0.0
    newcomers: int = 0
    speeds: tuple[float, ...] = (0.001, 0.002, 0.02)
    hosts: int = 4
    leaving: int = 0
    hold: float = HOLD
    patience: float = math.inf
    """Maximum number of seconds after which a waiter gives up or a request is cancelled. If finite,
    there are no faults, so each hold in the store must belong to a living member."""


@dataclass
class Outcome:
    """The result of a run."""

    violations: list[str]
    messages: int
    visits: int
    told: list[str]


class _Run:
    def __init__(self, plan: Plan, client: Any, loop: VirtualLoop) -> None:
        self.plan = plan
        self.loop = loop
        self.rng = random.Random(plan.seed)
        self.world = World(loop, client, self.rng, plan.speeds, plan.losing, plan.faults)
        self.world.origin = self.long_since
        self.hosts = {f"h{n}": self.rng.choice(INTERVALS) for n in range(plan.hosts)}
        self.log: dict[str, list[Visit]] = {name: [] for name in self.hosts}
        self.clock = LoopClock(loop)
        self.ledgers: list[RedisLedger] = []
        self.orphans: dict[str, float] = {}
        """Holds that no member knows, and since when."""
        self.left: set[str] = set()
        """Such holds that were not removed in time."""

    def long_since(self) -> None:
        """Pretend that the epoch began long ago."""
        told = ("id", "old", "server", "run0:", "format", str(FORMAT))
        self.world.client.hset("{gatekeeper}:epoch", items=told)

    async def member(self, name: str, begin: float, seconds: float, killed: bool) -> None:
        await asyncio.sleep(begin)
        _ACTING.set(name)
        config = FleetConfig(hold=self.plan.hold)
        ledger = RedisLedger("redis://store", clock=self.clock, config=config, member=name)
        self.ledgers.append(ledger)
        pacing = PacingConfig(max_in_flight=1000, backoff_jitter=0.0)
        scheduler = scheduler_on(
            self.clock, Config(pacing=pacing), seed=self.plan.seed, ledger=ledger
        )
        self.world.note(f"{name} opens")
        await scheduler.open()
        self.world.note(f"{name} is open")
        work = self.work if self.plan.patience == math.inf else self.give_up
        workers = [self.loop.create_task(work(name, scheduler)) for _ in range(self.plan.hosts)]
        await asyncio.sleep(seconds)
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        if killed:
            await _vanish(ledger)
        else:
            await scheduler.close()
        self.world.note(f"{name} {'was killed' if killed else 'left'}")

    async def work(self, name: str, scheduler: Scheduler) -> None:
        rng = self.rng
        while True:
            host = rng.choice(list(self.hosts))
            asked = RobotsInterval(self.hosts[host], "Crawl-delay")
            try:
                grant = await scheduler.acquire("u", host, admit=lambda asked=asked: asked)
            except LedgerLost:
                await asyncio.sleep(0.05)
                continue
            try:
                await asyncio.sleep(rng.choice((0.0, 0.0, 0.01, 0.3)))  # connect
            except asyncio.CancelledError:
                grant.give_back()
                raise
            if grant.stale:
                grant.give_back()
                continue
            visit = Visit(name, self.loop.now)
            self.log[host].append(visit)
            self.world.note(f"{name} asks {host}")
            try:
                await asyncio.sleep(rng.choice((0.0, 0.01, 0.1, 0.7)))
                refused = rng.random() < 0.03
                visit.head = self.loop.now
                grant.head()
                await asyncio.sleep(rng.choice((0.0, 0.0, 0.2)))
                grant.report(*((429, 0.1, 2.0) if refused else (200, 0.1)))
                visit.block = 2.0 if refused else 0.0  # only a reported block has to be kept
            finally:
                visit.head = min(visit.head, self.loop.now)
                visit.end = self.loop.now
                grant.release()

    async def give_up(self, name: str, scheduler: Scheduler) -> None:
        """Work, but give up waiting soon."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.rng.random() * self.plan.patience):
                    await self.work(name, scheduler)

    async def watch_holds(self) -> None:
        """Without faults: note holds in the store that belong to no member."""
        client = self.world.client
        while True:
            await asyncio.sleep(0.1)
            known = set[str]().union(*(one._tokens for one in self.ledgers if one._open))
            texts = filter(None, map(client.get, client.scan_iter("{gatekeeper}:s:*")))
            holds = [hold for one in texts for hold in msgspec.msgpack.decode(one).get("h", ())]
            now = self.loop.now
            self.orphans = {
                token: self.orphans.get(token, now)
                for token, end, *_ in holds
                if token not in known and end / 1e6 > now
            }
            self.left |= {token for token, since in self.orphans.items() if now > since + _SETTLED}

    async def run(self) -> Outcome:
        plan, rng = self.plan, self.rng
        self.world.client.flushall()
        self.long_since()
        self.world.calls.clear()
        for moment, kind, away in plan.moments:
            self.loop.call_later(moment, self.world.breaks, kind, away)
        ways: list[Coroutine[Any, Any, None]] = []
        for number in range(plan.members + plan.newcomers):
            begin = rng.choice((0.0, 0.0, 0.001, 0.01, 0.05))
            if number >= plan.members:
                begin = rng.random() * plan.seconds * 0.7
            left = plan.seconds - begin
            if 0 < number <= plan.leaving:
                left *= rng.random()
            killed = 0 < number <= plan.leaving and rng.random() < 0.5
            ways.append(self.member(f"m{number}", begin, left, killed))
        watching = None
        if plan.patience < math.inf:
            watching = self.loop.create_task(self.watch_holds())
        await asyncio.gather(*ways)
        if watching is not None:
            await asyncio.sleep(2 * _SETTLED)
            watching.cancel()
        if plan.losing or self.world.parted:
            self.excuse()
        return Outcome(
            [
                *violations(self.log, self.hosts),
                *(f"left for nobody: {token}" for token in sorted(self.left)),
            ],
            self.world.messages,
            sum(map(len, self.log.values())),
            self.world.told,
        )

    def excuse(self) -> None:
        """After a wire went dead, count a block only from when the store's message arrives, since a
        hold that is not renewed expires meanwhile."""
        trip = max(self.world.speeds)
        for host, visits in self.log.items():
            told = [at for at, key in self.world.heard if key.endswith(f":s:{host}")]
            for visit in visits:
                visit.told = next((at + trip for at in told if at > visit.head), float("inf"))


def explore(plan: Plan, client: Any) -> Outcome:
    """Execute one run. `client`: a client of a server that nothing else uses."""
    loop = VirtualLoop()
    run = _Run(plan, client, loop)
    return _complete(loop, run.world, run.run())


def _complete(loop: VirtualLoop, world: World, whole: Coroutine[Any, Any, T]) -> T:
    store = type("Store", (SimulatedStore,), {"world": world})
    try:
        asyncio.set_event_loop(loop)
        with patch.object(ledger_module, "Store", store):
            return loop.run_until_complete(whole)
    finally:
        left = asyncio.all_tasks(loop)  # tasks of members that were killed
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        asyncio.set_event_loop(None)
        loop.close()


def told_after(client: Any, *, hosts: int, trip: float) -> tuple[list[float], list[float]]:
    """Return how many round trips of `trip` seconds it took until each head was sent to the store,
    and until each lease started after its host was due. One member requests each host once a
    second, and computing takes no time."""
    loop = VirtualLoop()
    world = World(loop, client, random.Random(1), (trip / 2,))
    run = _Run(Plan(1), client, loop)
    headed: dict[str, float] = {}
    told: list[float] = []
    late: list[float] = []

    class Ledger(RedisLedger):
        async def head(self, tokens: Sequence[str]) -> None:
            await super().head(tokens)
            told.extend((loop.now - headed.pop(token)) / trip for token in tokens)

    async def visit(scheduler: Scheduler, host: str, begin: float) -> None:
        await asyncio.sleep(begin)
        due = 0.0
        for _ in range(3):
            grant = await scheduler.acquire("u", host, admit=lambda: RobotsInterval(1.0, "1 s"))
            if due:
                late.append((loop.now - due) / trip)
            await asyncio.sleep(0.002)
            headed[grant.hold.token] = loop.now
            due = loop.now + 1.0
            grant.head()
            await asyncio.sleep(0.005)
            grant.report(200)
            grant.release()

    async def crawl() -> None:
        client.flushall()
        run.long_since()
        ledger = Ledger("redis://store", clock=run.clock, member="m")
        pacing = PacingConfig(max_in_flight=hosts)
        scheduler = scheduler_on(run.clock, Config(pacing=pacing), ledger=ledger)
        await scheduler.open()
        rng = random.Random(3)
        await asyncio.gather(*(visit(scheduler, f"h{n}", rng.random()) for n in range(hosts)))
        await scheduler.close()

    _complete(loop, world, crawl())
    return sorted(told), sorted(late)


def plan_of(seed: int) -> Plan:
    """Return a random plan: numbers of members and messages, delays and faults. Every other plan is
    short, with faults while members join; of the rest, every other one has outages that last longer
    than lists of members are valid."""
    rng = random.Random(f"plan {seed}")
    if seed % 4 == 2:
        return _outlasting(seed, rng)
    return _joining(seed, rng) if seed % 2 else _crawling(seed, rng)


def _joining(seed: int, rng: random.Random) -> Plan:
    first = rng.randrange(8, 90)
    faults = {first: (rng.choice(("die", "forget")), 0.0)}
    if rng.random() < 0.3:
        later = first + rng.randrange(1, 60)
        faults[later] = (rng.choice(("die", "forget", "cut")), 0.0)
    return Plan(
        seed,
        members=rng.choice((2, 2, 3)),
        seconds=3.0,
        faults=faults,
        losing=rng.choice((0.0, 0.0, 0.01)),
        newcomers=rng.choice((0, 0, 1)),
        speeds=rng.choice(SPEEDS),
    )


def _crawling(seed: int, rng: random.Random) -> Plan:
    faults = {}
    for _ in range(rng.choice((1, 1, 2, 2, 3))):
        begin = rng.choice((20, 60, 200, 600))
        away = rng.choice((0.0, 0.0, 0.05, 1.0, 5.0))
        faults[rng.randrange(begin, begin * 3)] = (rng.choice(KINDS), away)
        if rng.random() < 0.5:  # a second fault soon afterwards
            faults[rng.randrange(begin, begin * 3) + 20] = (rng.choice(KINDS), 0.0)
    return Plan(
        seed,
        members=rng.choice((2, 2, 3)),
        faults=faults,
        losing=rng.choice((0.0, 0.0, 0.002, 0.01)),
        newcomers=rng.choice((0, 0, 1)),
        speeds=rng.choice(SPEEDS),
        leaving=rng.choice((0, 0, 1)),
    )


def _outlasting(seed: int, rng: random.Random) -> Plan:
    kinds, long = ("die", "die", "die and keep", "part", "forget"), (3.0, 5.0, 6.0, 9.0, 12.0)
    first = rng.uniform(1.0, 8.0)
    away = rng.choice(long)
    moments = [(first, rng.choice(("die", "part", "part")), away)]
    for _ in range(rng.choice((1, 1, 2, 3))):
        soon, about = rng.uniform(0.0, 1.0), away - rng.uniform(0.0, 3.0)
        moment = first + rng.choice((soon, about, about, rng.uniform(4.0, 14.0)))
        moments += [(moment, rng.choice(kinds), rng.choice((0.0, 0.1, 1.0, *long)))]
        if rng.random() < 0.7:  # a member can't push what it knows
            moments += [(moment - rng.choice((0.0, 0.01, 0.1)), "part", rng.choice(long))]
    return Plan(
        seed,
        members=rng.choice((1, 1, 2, 3)),
        seconds=25.0,
        moments=tuple(moments),
        losing=rng.choice((0.0, 0.0, 0.002)),
        newcomers=rng.choice((1, 1, 2, 3)),
        speeds=rng.choice(SPEEDS),
        leaving=rng.choice((0, 1, 2)),
    )


def impatient(seed: int) -> Plan:
    """Return a plan without faults in which waiters give up soon and messages take long."""
    rng = random.Random(f"impatient {seed}")
    return Plan(
        seed,
        members=rng.choice((1, 2, 3)),
        seconds=12.0,
        speeds=rng.choice((*SPEEDS, (0.001, 0.1, 0.4), (0.05, 0.05, 0.2, 0.4))),
        leaving=0,
        hold=20.0,
        patience=rng.choice((0.02, 0.2, 1.0, 3.0)),
    )


def main() -> None:
    """Run the seeds of a range; the log of a single one is printed in full."""
    from tests.fleet.server import Server

    plan_for = impatient if "--impatient" in sys.argv else plan_of
    first, *rest = [int(one) for one in sys.argv[1:] if one.isdecimal()]
    last = rest[-1] if rest else first
    server = Server()
    server.start()
    client = redis.Redis(unix_socket_path=str(server.socket))
    messages = visits = broken = 0
    begun = time.process_time()
    try:
        for seed in range(first, last + 1):
            outcome = explore(plan_for(seed), client)
            messages += outcome.messages
            visits += outcome.visits
            broken += bool(outcome.violations)
            if outcome.violations or first == last:
                print(seed, plan_for(seed), *outcome.violations[:2], flush=True)
            if first == last:
                print("\n".join(outcome.told))
        print(
            f"{last + 1 - first} runs, {messages} messages, {visits} requests, {broken} runs broke "
            f"a promise; {time.process_time() - begun:.0f} s of the processor"
        )
    finally:
        client.close()
        server.close()


if __name__ == "__main__":
    main()
