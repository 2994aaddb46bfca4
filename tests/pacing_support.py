"""For tests of pacing: a storage that can lose its last second, and views of a scheduler."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gatekeeper.clock import Clock, SystemClock, Timer, VirtualClock
from gatekeeper.config import Config, HostRule, PacingConfig, match_named
from gatekeeper.errors import StorageError
from gatekeeper.pacing.deadlock import WaitGraph
from gatekeeper.pacing.ledger import Granted, NotBefore, TakeRequest
from gatekeeper.pacing.scheduler import Scheduler
from gatekeeper.pacing.scopes import INF, Scope
from gatekeeper.storage.base import ClockRecord
from gatekeeper.testing.memory_ledger import MemoryLedger


class FakeStorage:
    """Promises are durable at once; the rest is lost in a crash before the next flush."""

    def __init__(self, durable: dict[str, ClockRecord] | None = None) -> None:
        self.durable = dict(durable or {})
        self.pending: dict[str, ClockRecord | None] = {}
        self.missed: dict[str, ClockRecord] = {}
        self.dead = False
        self.fails = False
        self.exhausted = False

    def promise(self, record: ClockRecord) -> None:
        if self.fails:
            self.missed[record.scope] = record
            raise StorageError("disk full")
        if not self.dead:
            self.pending.pop(record.scope, None)
            self.missed.pop(record.scope, None)
            self.durable[record.scope] = record

    owe = promise

    @property
    def failing(self) -> str | None:
        if self.fails:
            return "disk full"
        if not self.dead:
            self.durable.update(self.missed)
            self.missed.clear()
        return None

    def watch(self, callback: Callable[[], None]) -> None:
        """A test that sets `fails` tells nobody."""

    def put_clock(self, record: ClockRecord) -> None:
        self.pending[record.scope] = record

    def forget_clock(self, scope: str) -> None:
        self.pending[scope] = None

    async def load_clocks(self) -> list[ClockRecord]:
        return list(self.durable.values())

    async def load_clock(self, scope: str) -> ClockRecord | None:
        return self.load_clock_nowait(scope)

    def load_clock_nowait(self, scope: str) -> ClockRecord | None:
        return self.pending.get(scope, self.durable.get(scope))

    async def flush(self) -> None:
        if not self.dead:
            for scope, record in self.pending.items():
                if record is None:
                    self.durable.pop(scope, None)
                else:
                    self.durable[scope] = record
        self.pending.clear()

    def crash(self) -> FakeStorage:
        """What a new process finds."""
        self.dead = True
        return FakeStorage(self.durable)


def scheduler_on(
    clock: Clock,
    config: Config | None = None,
    *,
    seed: int = 1,
    storage: object = None,
    ledger: object = None,
    **pacing: object,
) -> Scheduler:
    """A scheduler, not open yet; other keywords are settings of [pacing]."""
    return Scheduler(
        config or Config(pacing=PacingConfig(**pacing)),  # type: ignore[arg-type]
        clock=clock,
        rng=random.Random(seed),
        storage=storage,  # type: ignore[arg-type]
        ledger=ledger,  # type: ignore[arg-type]
    )


class CountingLedger(MemoryLedger):
    """A ledger that others could take from as well; it notes what is asked of it and granted."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.asked: list[tuple[str, ...]] = []
        """The scopes of each request."""
        self.granted: set[str] = set()
        """The tokens."""

    async def take(self, requests: Sequence[TakeRequest]) -> list[Granted | NotBefore]:
        self.asked += [tuple(one.scope for one in request.scopes) for request in requests]
        answers = await super().take(requests)
        self.granted |= {one.token for one in answers if isinstance(one, Granted)}
        return answers


def add_rule(scheduler: Scheduler, rule: HostRule) -> None:
    """Set a rule over those of its match, as `Gatekeeper.override` does."""
    match = match_named(rule.match)
    scheduler.put_rules(match, (*scheduler.host_rules.set_for(match), rule))


def scope_of(scheduler: Scheduler, host: str) -> Scope:
    """The scope of a host, which is made if there is none."""
    return scheduler._memory.host(host)


def stall(clock: VirtualClock, seconds: float) -> None:
    """Time passes and no timer is called, as in a process that was stopped."""
    clock._now += seconds


class ShiftedClock(SystemClock):
    """The machine's clock plus `by` seconds."""

    def __init__(self) -> None:
        self.by = 0.0

    def monotonic(self) -> float:  # type: ignore[override]
        return SystemClock.monotonic() + self.by

    def wall(self) -> float:  # type: ignore[override]
        return SystemClock.wall() + self.by

    def call_at(self, when: float, callback: Callable[..., object], *args: Any) -> Timer:
        return super().call_at(when - self.by, callback, *args)


def is_paused(scheduler: Scheduler, host: str) -> bool:
    return scheduler.held(host) == (INF, "paused")


def due_at(scheduler: Scheduler, host: str) -> float:
    """The monotonic time before which no lease is granted; inf: not before an event."""
    scope = scheduler._memory.find(host)
    return max((one.due_at() for one in (scope, *scope.shared)) if scope else (-INF,))


def nobody_waits(waits: WaitGraph[Any]) -> bool:
    """Whether the graph has forgotten all waits, for leases and for files."""
    return not (len(waits) or waits._by_scope or waits._for_files or waits._files)


def scopes_of(scheduler: Scheduler) -> Mapping[str, Scope]:
    """All scopes in memory, by name."""
    return scheduler.watch()[0]


def hosts_of(scheduler: Scheduler) -> tuple[str, ...]:
    """The names of all scopes in memory."""
    return tuple(scopes_of(scheduler))
