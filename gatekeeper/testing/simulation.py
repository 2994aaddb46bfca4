"""Simulation of the scheduler in virtual time, with simulated sites and an independent judge.

The engine of real crawls is driven here as fast as the machine allows, by sites that answer
slowly, refuse, fail, or never answer. The judge knows only the sites' side (when requests
started, when their responses started and ended, what the site asked for) and nothing of the
engine.
"""

from __future__ import annotations

import gc
import random
import time
from collections import Counter, deque
from typing import Any, TypeAlias

import msgspec

from gatekeeper.config import Config, GroupRule, HostRule, PacingConfig
from gatekeeper.pacing.engine import Engine
from gatekeeper.pacing.grants import Grant
from gatekeeper.pacing.host_settings import DAY, BudgetSpent, Rules
from gatekeeper.pacing.persistence import ScopeMemory
from gatekeeper.pacing.queues import Offer, Waiter
from gatekeeper.pacing.scopes import INF, NO_RATE, Scope
from gatekeeper.robots.timing import RobotsInterval
from gatekeeper.testing.virtual_clock import VirtualClock

TOLERANCE = 1e-6
"""Seconds allowed for rounding errors in sums of floats."""


Experience: TypeAlias = Any
"""What one scope sees of its visitor: an `Account`, or a simulated host, which is its own."""


class Account(msgspec.Struct, eq=False):
    """What one scope sees of its visitor, in monotonic seconds."""

    interval: float
    """Seconds that the scope asks for now."""
    limit: int = 1
    """Most requests in flight."""
    basis: float = -INF
    """Latest start, response head or failure."""
    blocked_until: float = -INF
    in_flight: int = 0
    unheaded: int = 0


class Judge(msgspec.Struct, eq=False):
    """Counts the requests that broke a promise, by kind.

    >>> judge, site = Judge(), Account(interval=10.0)
    >>> judge.start(site, 0.0); judge.head(site, 1.0); judge.end(site, 1.0)
    >>> judge.start(site, 10.5)
    >>> judge.violations
    Counter({'early': 1})
    """

    violations: Counter[str] = msgspec.field(default_factory=Counter)
    _days: dict[Experience, tuple[float, int]] = {}

    def start(self, account: Experience, now: float) -> None:
        """Note that a request starts."""
        if now < account.basis + account.interval - TOLERANCE:
            self.violations["early"] += 1
        if now < account.blocked_until - TOLERANCE:
            self.violations["blocked"] += 1
        account.basis = now
        if not account.in_flight:  # as for most hosts: the judge is a part of what is measured
            account.in_flight = account.unheaded = 1
            return
        if account.unheaded and account.interval > 0:
            self.violations["before_head"] += 1
        account.in_flight += 1
        account.unheaded += 1
        if account.in_flight > account.limit:
            self.violations["concurrency"] += 1

    def head(self, account: Experience, now: float) -> None:
        """Note that a response started, or that the request failed."""
        account.unheaded -= 1
        if now > account.basis:  # noqa: PLR1730 - no call here
            account.basis = now

    def end(self, account: Experience, now: float, headed: bool = True) -> None:
        """Note that a request ended. `headed`: `head` was called for it before."""
        account.in_flight -= 1
        if not headed:
            account.unheaded -= 1
            if now > account.basis:  # noqa: PLR1730 - no call here
                account.basis = now

    def withdrawn(self, account: Experience) -> None:
        """Note that a request was never sent: the slot is free, the clock stays."""
        account.in_flight -= 1
        account.unheaded -= 1
        if account in self._days:
            began, pages = self._days[account]
            self._days[account] = began, pages - 1

    def page(self, account: Experience, now: float, most: int) -> None:
        """Note that a page was requested from a scope that allows `most` pages a day."""
        began, pages = self._days.get(account, (-INF, 0))
        began, pages = (now, 1) if now >= began + DAY - TOLERANCE else (began, pages + 1)
        self._days[account] = began, pages
        if pages > most:
            self.violations["budget"] += 1

    def block(self, account: Experience, until: float) -> None:
        """Note that the scope allows no request before `until`."""
        account.blocked_until = max(account.blocked_until, until)


_ASKED = (
    NO_RATE,
    NO_RATE,
    NO_RATE,
    RobotsInterval(0.5, "crawl-delay 0.5 s from robots.txt line 2"),
    RobotsInterval(2.0, "crawl-delay 2 s from robots.txt line 2"),
    RobotsInterval(10.0, "request-rate 1/10 from robots.txt line 3"),
)
# Seconds until the head, and until the end. Sums of such fractions are exact, so that events at
# one instant of virtual time are not separated by rounding errors.
_SPEEDS = ((0.0625, 0.0625), (0.1875, 0.1875), (0.125, 0.625), (1.5, 1.5))
_TROUBLE = 0.02
"""Share of requests that do not simply succeed."""


class SimulationReport(msgspec.Struct, frozen=True):
    """Result of a simulation."""

    hosts: int
    leases: int
    violations: dict[str, int]
    """By kind; empty if every promise was kept."""
    virtual_seconds: float
    cpu_seconds: float
    expired: int
    blocks: int
    deferrals: int = 0
    """How often a host had to wait because its budget was spent."""

    @property
    def leases_per_second(self) -> float:
        """Leases granted per second of CPU time."""
        return self.leases / self.cpu_seconds if self.cpu_seconds else 0.0


class _Site(Waiter):
    """A simulated host: waits for its own leases, and is the account of its visitor."""

    __slots__ = (
        "asked",
        "basis",
        "blocked_until",
        "end_after",
        "ends",
        "head_after",
        "heads",
        "in_flight",
        "interval",
        "limit",
        "sim",
        "todo",
        "unheaded",
    )

    def __init__(
        self, sim: _Simulation, scope: Scope, asked: RobotsInterval, speed: int, todo: int
    ) -> None:
        # One object per host instead of two, since there are a million.
        super().__init__(scope.name)
        default = sim.engine.pacing.default_interval
        self.interval = default if asked.seconds is None else asked.seconds
        self.limit = scope.settings.limit
        self.basis = self.blocked_until = -INF
        self.in_flight = self.unheaded = 0
        self.sim = sim
        self.asked = asked
        self.heads = sim.heads[speed]
        self.ends = sim.ends[speed]
        self.head_after, self.end_after = _SPEEDS[speed]
        self.todo = todo
        """URLs left to fetch."""
        self.stays = todo > 1

    def offer(self) -> Offer:
        return self.asked

    def deliver(self, grant: Grant) -> None:
        """The judge looks at the start, and the request takes its course."""
        todo = self.todo = self.todo - 1
        if todo == 1:
            self.stays = False  # The next lease is the last.
        sim, start = self.sim, grant.start_at
        sim.judge.start(self, start)
        for other in grant.others:
            sim.judge.start(sim.accounts[other], start)
        if self.heads is not None:
            self.heads.append((start + self.head_after, grant, self))
        self.ends.append((start + self.end_after, grant, self))
        if grant.counts_as_page and (budget := grant.scope.settings.budget) is not None:
            sim.judge.page(self, start, budget.pages)

    def refuse(self, error: Exception) -> None:
        """Wait until the budget's day is over, then wait for a lease again."""
        if not isinstance(error, BudgetSpent):
            raise error
        self.sim.come_back(self, error.seconds)


_UnderWay = tuple[float, Grant, _Site]
"""A request in flight, with the time of its head or end."""


class _Simulation:
    """Sites, events and the judge around one engine."""

    def __init__(self, config: Config, seed: int) -> None:
        self.clock = VirtualClock()
        self.rng = random.Random(seed)
        self.memory = ScopeMemory(Rules(config), self.clock)
        self.engine = Engine(self.clock, self.memory, random.Random(seed + 1))
        self.engine.open()
        self.judge = Judge()
        self.accounts: dict[Scope, Experience] = {}
        """Accounts of the scopes that several hosts share."""
        # Requests of one speed start and end in the order of their starts, so queues suffice.
        self.heads: list[deque[_UnderWay] | None] = [
            deque() if head != end else None for head, end in _SPEEDS
        ]
        self.ends: list[deque[_UnderWay]] = [deque() for _ in _SPEEDS]
        self._queues = [*(heads for heads in self.heads if heads is not None), *self.ends]
        self.deferrals: int = 0

    def come_back(self, site: _Site, seconds: float) -> None:
        """Let the site wait for a lease again after this many seconds."""
        self.deferrals += 1
        self.clock.call_at(self.clock.monotonic() + seconds, self._come_back, site)

    def _come_back(self, site: _Site) -> None:
        site.gone = False
        self.engine.queues.join(self.memory.host(site.url), site, self.clock.monotonic())

    def add(self, name: str, todo: int) -> None:
        """Add a host with `todo` URLs to fetch."""
        scope = self.memory.host(name)
        for other in scope.shared:
            if other not in self.accounts:
                settings = other.settings
                self.accounts[other] = Account(settings.default, settings.limit)
        rng = self.rng
        asked = _ASKED[int(rng.random() * len(_ASKED))]
        site = _Site(self, scope, asked, int(rng.random() * len(_SPEEDS)), todo)
        self.engine.queues.join(scope, site, 0.0)

    def run(self) -> None:
        """Run until no URL is left and nothing is in flight."""
        engine, clock = self.engine, self.clock
        while True:
            engine.run(clock.monotonic())
            when = min(engine.next_due(), self._next_event())
            if when == INF:
                return
            clock.advance(max(0.0, when - clock.monotonic()))
            now = max(when, clock.monotonic())
            self._begin(now)
            self._finish(now)
            engine.expire(now)

    def _next_event(self) -> float:
        timer = self.clock.next_timer()
        when = INF if timer is None else timer
        for queue in self._queues:
            if queue and queue[0][0] < when:
                when = queue[0][0]
        return when

    def _begin(self, now: float) -> None:
        for queue in self.heads:
            while queue and queue[0][0] <= now:
                _, grant, site = queue.popleft()
                grant.head(now)
                self.judge.head(site, now)
                for other in grant.others:
                    self.judge.head(self.accounts[other], now)

    def _finish(self, now: float) -> None:
        random_share, judge, accounts = self.rng.random, self.judge, self.accounts
        for queue in self.ends:
            while queue and queue[0][0] <= now:
                _, grant, site = queue.popleft()
                headed = grant.head_reported
                # The judge is notified before the scheduler, whose call may grant a lease.
                if random_share() < _TROUBLE:
                    self._trouble(grant, site, now)
                    continue
                judge.end(site, now, headed)
                for other in grant.others:
                    judge.end(accounts[other], now, headed)
                grant.report(200, 0.1, None, None, now)
                grant.release(now)

    def _trouble(self, grant: Grant, site: _Site, now: float) -> None:
        """End a request other than with a page: by a refusal, a failure or a return of the lease,
        or not at all."""
        judge, headed = self.judge, grant.headed
        kind = self.rng.randrange(5)
        if kind == 4:
            # Never reported, so the lease will expire.
            self.clock.call_at(grant.expires_at, self._expired, grant, site)
            return
        accounts = (site, *(self.accounts[other] for other in grant.others))
        if kind == 3 and not headed:
            for account in accounts:
                judge.withdrawn(account)
            grant.give_back()
            return
        for account in accounts:
            judge.end(account, now, headed)
        if kind == 0:
            judge.block(site, now + 30.0)
            grant.report(429, 0.1, 30.0)
        elif kind == 1:
            judge.block(site, now + self.engine.pacing.backoff_initial)
            grant.report(503, 0.1)
        elif kind == 2:
            grant.report(None, 10.0)
        grant.release()

    def _expired(self, grant: Grant, site: _Site) -> None:
        for account in (site, *(self.accounts[other] for other in grant.others)):
            self.judge.end(account, self.clock.monotonic(), grant.headed)


def simulate(
    hosts: int = 1000,
    urls: int = 5000,
    *,
    seed: int = 0,
    groups: int = 0,
    config: Config | None = None,
) -> SimulationReport:
    """Crawl `urls` URLs of `hosts` simulated sites in virtual time and judge every request.

    `groups`: the number of named groups, each shared by some of the hosts.

    >>> simulate(50, 200).violations
    {}
    """
    sim = _Simulation(config or _configured(groups), seed)
    begun = time.process_time()
    collecting = gc.isenabled()
    gc.disable()  # Nothing that is built here is garbage, and there is much of it.
    share, rest = divmod(urls, hosts)
    for number in range(hosts):
        group = f".g{number % groups}" if groups and number % 3 == 0 else ""
        if (todo := share + (number < rest)) > 0:
            sim.add(f"h{number}{group}.example", todo)
    if collecting:
        gc.freeze()  # So the collector need not scan it at all.
        gc.enable()
    sim.run()
    gc.unfreeze()
    return SimulationReport(
        hosts=hosts,
        leases=sim.engine.granted,
        violations=dict(sim.judge.violations),
        virtual_seconds=sim.clock.monotonic(),
        cpu_seconds=time.process_time() - begun,
        expired=sim.engine.counters.expired,
        blocks=sim.engine.counters.blocks,
        deferrals=sim.deferrals,
    )


def _configured(groups: int) -> Config:
    return Config(
        pacing=PacingConfig(max_in_flight=2_000, lease_ttl=60.0),
        host=tuple(HostRule(match=f"*.g{n}.example", group=f"g{n}") for n in range(groups)),
        group=tuple(GroupRule(name=f"g{n}", interval=0.1 * (n % 5)) for n in range(groups)),
    )
