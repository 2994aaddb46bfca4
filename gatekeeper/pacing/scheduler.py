"""`Scheduler`: the engine for asyncio. It grants leases, host by host, to tasks that wait.

The engine decides and never waits; here are the futures, the one timer, the storage and the
ledger beyond this process, and what operators do and ask. No host has a task or an asyncio
object of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from functools import partial

import msgspec

from gatekeeper.clock import Clock, SingleTimer, deadline, moment_named, utc
from gatekeeper.config import Config, HostRule, PacingConfig, match_named
from gatekeeper.errors import GateClosed, LeaseTimeout, LedgerLost, StorageError
from gatekeeper.pacing.engine import Engine
from gatekeeper.pacing.grants import Grant
from gatekeeper.pacing.ledger import Ledger, Report, ScopeClock, ScopeView
from gatekeeper.pacing.ledger_calls import Hold, LedgerAnswers, LedgerCalls
from gatekeeper.pacing.persistence import ScopeMemory
from gatekeeper.pacing.queues import ROBOTS, ScopeQueue
from gatekeeper.pacing.rules import CONFIGURED, SHARED, BudgetSpent, HostRules, Rules
from gatekeeper.pacing.scopes import INF, UNDERIVED, Scope, learn, report_of
from gatekeeper.pacing.waiting import (
    AT_ONCE,
    Admit,
    ClockView,
    CrowdFuture,
    Deadlines,
    Departures,
    DueWatch,
    Need,
    Refetch,
    TaskWaiter,
    asked_for_robots,
    explain,
    hold_again,
    late,
    needs,
    state_of,
    take_robots,
)
from gatekeeper.robots.timing import RobotsInterval
from gatekeeper.split_dict import MASK
from gatekeeper.storage.base import Storage

HOUSEKEEPING = 30.0
"""Seconds between two looks at the wall clock, where clocks outlive the process."""
ROUND_TRIP = 2.0  # seconds that a ledger may take to answer one who does not wait
_MAX_REFETCHES = 5


class PacingStats(msgspec.Struct, frozen=True):
    """What a scheduler holds now, and what it did since its start."""

    scopes: int
    waiting: int
    in_flight: int
    granted: int
    robots: int
    refused: int
    refetches: int
    cancelled: int
    timeouts: int
    expired: int
    given_back: int
    passed_on: int
    blocks: int
    promises: int
    evicted: int
    spilled: int
    ledger_failures: int
    dry_waits: int
    """Dry run: leases that would have waited ..."""
    dry_seconds: float
    """... and for how long, in all."""
    frozen: bool


class Scheduler:
    """Grants leases, host by host. One event loop; open it before use, close it after.

    >>> import asyncio, random
    >>> from gatekeeper.clock import VirtualClock
    >>> from gatekeeper.config import Config
    >>> async def main():
    ...     scheduler = Scheduler(Config(), clock=VirtualClock(), rng=random.Random(1))
    ...     await scheduler.open()
    ...     grant = await scheduler.acquire(
    ...         "https://a.example/", "a.example", admit=RobotsInterval
    ...     )
    ...     grant.report(status=200)
    ...     grant.release()
    ...     await scheduler.close()
    ...     return grant.start_at
    >>> asyncio.run(main())
    0.0
    """

    def __init__(
        self,
        config: Config,
        *,
        clock: Clock,
        rng: random.Random,
        storage: Storage | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        self._clock = clock
        self._pacing = config.pacing
        self._rules = Rules(config)
        self.host_rules: HostRules = self._rules.hosts
        """The operator's rules about hosts that are in force, those said at run time too."""
        self._memory = ScopeMemory(self._rules, clock, storage)
        self._remote: LedgerCalls | None = None
        if ledger is not None:
            self._remote = LedgerCalls(ledger, clock, self._answers())
        self._timer = SingleTimer(clock, self._tick)
        self._drained = asyncio.Event()
        self._engine = Engine(
            clock, self._memory, rng, self._timer, remote=self._remote, on_idle=self._drained.set
        )
        self._queues = self._engine.queues
        self.take: Callable[..., Grant | None] = self._engine.take
        """`take(url, host, asked)`: the lease, if it can be had now; see `Engine`. With None for
        what is asked, `admit` says it."""
        self.take_robots: Callable[[str, str, RobotsInterval], Grant | None] = partial(
            take_robots, self._engine, self._memory
        )
        """The same of a lease for robots.txt; see `waiting.take_robots`."""
        self._deadlines = Deadlines()
        self._departures = Departures(self._engine.counters)
        self._loop: asyncio.AbstractEventLoop
        self._open = False
        self._dry_waits = 0
        self._dry_seconds = 0.0

    # --- lifecycle ----------------------------------------------------------------------

    async def open(self) -> None:
        """Read the clocks of earlier runs; leases are granted from now on."""
        await self._memory.open()
        if self._remote is not None:
            await self._remote.open()
        self._loop = asyncio.get_running_loop()  # to ask for it is a system call before 3.12
        self._open = True
        self._engine.open()
        self._timer.cancel()
        self._set_housekeeping()

    async def close(self, drain: float = 0.0) -> None:
        """Grant nothing more, wait up to `drain` seconds for open leases, keep the clocks.

        Whoever waits gets GateClosed. Idempotent. Raises StorageError where the clocks can't
        be kept; it is closed all the same.
        """
        if not self._open:
            return
        self._open = False
        self._engine.halt()
        self._departures.cancel(self._departures.count)
        self._queues.refuse_all(lambda: GateClosed("the gate is closing"))
        try:
            if drain > 0 and self._engine.in_flight:
                self._drained.clear()
                async with deadline(self._clock, drain):
                    await self._drained.wait()
        except TimeoutError:
            pass
        finally:
            if self._remote is not None:
                await self._remote.close()
            try:
                await self._memory.close()
            finally:
                self._engine.close()
                self._timer.hold()

    def stats(self) -> PacingStats:
        """Counters and sizes."""
        engine, memory = self._engine, self._memory
        return PacingStats(
            **msgspec.structs.asdict(engine.counters),
            granted=engine.granted,
            scopes=len(memory.scopes),
            waiting=self._waiting,
            in_flight=engine.in_flight,
            promises=memory.promises.made if memory.promises is not None else 0,
            evicted=memory.evicted,
            spilled=memory.spilled,
            ledger_failures=self._remote.failures if self._remote is not None else 0,
            dry_waits=self._dry_waits,
            dry_seconds=self._dry_seconds,
            frozen=engine.frozen,
        )

    @property
    def _waiting(self) -> int:
        return self._queues.waiting - self._departures.count

    def _tick(self) -> None:
        """Something is due: leases that end, waiters whose time is over, queues."""
        engine = self._engine
        self._timer.hold()  # it is set once below, not for each queue that moves
        try:
            now = self._clock.monotonic()
            engine.expire(now)
            for waiter in self._deadlines.over(now, AT_ONCE):
                self._refuse_late(waiter, now)
            for outlasted in self._queues.pop_outlasted(AT_ONCE):
                if isinstance(outlasted, TaskWaiter):
                    self._refuse_late(outlasted, now)
                elif isinstance(outlasted, DueWatch) and not outlasted.gone:
                    self._queues.leave(outlasted.scope, outlasted, now)
                    outlasted.offer()
            engine.run(now)
            if self._memory.promises is not None:
                self._memory.promises.check_wall(now)
        finally:
            moments = engine.next_due(), engine.leases.next(), self._deadlines.next()
            self._timer.set(now if self._queues.any_outlasted else min(moments))
            self._set_housekeeping()

    def _set_housekeeping(self) -> None:
        if self._memory.promises is not None and self._open:
            self._timer.set_no_later(self._clock.monotonic() + HOUSEKEEPING)

    # --- what others did, by the ledger -------------------------------------------------

    def _answers(self) -> LedgerAnswers:
        return LedgerAnswers(
            deliver=self._deliver,
            run=lambda: self._engine.run(self._clock.monotonic()),
            told=self._memory.told,
            heard=self._heard,
            reported=self._reported,
            paused=self._was_paused,
            clocks=lambda: self._memory.clocks(self._clock.monotonic()),
            lost=self._lost,
        )

    def _deliver(self, queue: ScopeQueue, hold: Hold | None, ask_at: float) -> None:
        now = self._clock.monotonic()
        spent = self.budget_spent(queue.scope.name) if hold is None else None
        if spent is not None:
            ask_at = now  # who waits learns it when the host is due
        if not self._queues.answered(queue, hold, ask_at, now) or hold is not None:
            return
        waiter = queue.first()
        if isinstance(waiter, TaskWaiter) and waiter.at_once:
            self._refuse_late(waiter, now, spent)

    def _heard(self, clock: ScopeClock) -> None:
        if (scope := self._memory.heard(clock)) is not None:
            self._queues.blocked(scope, self._clock.monotonic())

    def _reported(self, report: Report) -> None:
        """Somebody was turned away."""
        if (scope := self._memory.heard_of(report.scope, blocked=report.seconds > 0)) is None:
            return
        learn(scope, report, now := self._clock.monotonic(), self._pacing)
        self._queues.blocked(scope, now)
        if self._memory.promises is not None:
            self._memory.promises.remember(scope, now)
        self._queues.look_again(scope, now)
        self._ask_again(now)

    def _was_paused(self, name: str, paused: bool) -> None:
        scope = self._memory.known(name) if not paused else self._memory.host(name)
        if scope is not None and (scope.history is not None or paused):
            scope.past().paused = paused
            with contextlib.suppress(StorageError):
                self._changed(scope)
        if not paused:
            self._ask_again(self._clock.monotonic())

    def _ask_again(self, now: float) -> None:
        self._queues.ask_again(now)
        self._engine.run(now)

    def _lost(self, lost: bool) -> None:
        """The ledger is out of reach, so who waits is told; or it is back."""
        now = self._clock.monotonic()
        if not lost:
            self._ask_again(now)
        # Who only wants to know when a host is due, and who is off for a robots.txt, waits on.
        for waiter in self._queues.everybody() if lost else ():
            if isinstance(waiter, TaskWaiter) and not waiter.away:
                self._queues.leave(waiter.scope, waiter, now)
                waiter.refuse(LedgerLost("the ledger can't be reached"))

    # --- leases -------------------------------------------------------------------------

    async def acquire(
        self,
        url: str,
        host: str,
        admit: Admit,
        priority: float = 0,
        timeout: float | None = None,
        refetch: Refetch | None = None,
        scopes: tuple[str, ...] = (),
        ttl: float | None = None,
    ) -> Grant:
        """Wait until `host` is due, and take a lease of it.

        `admit` is called at the moment of the grant, with no await in between: it returns what
        the text asks for, or raises (the next waiter is offered the lease then), or returns
        REFETCH: then `refetch` is awaited, which asks for the robots lease, while this waiter
        keeps its place. It may be called again if the lease can't be had then.

        A higher `priority` goes first, then who came first. `timeout` None waits for ever,
        0 not at all. `scopes` are shared beside those of the configuration, such as
        "address:203.0.113.9". `ttl` is the lease's lifetime in seconds.

        Raises LeaseTimeout, GateClosed, or what `admit` or `refetch` raises.
        """
        engine = self._engine
        scope = engine.scopes[hash(host) & MASK].get(host)
        if scope is None or scopes:
            scope = await self._memory.load_host(host, scopes)
        now = engine.now()
        grant = engine.take(url, host, None, now, ttl, admit, scope)
        if grant is not None:
            return grant  # the common case: nobody waits, and the lease can be had at once
        if self._pacing.dry_run:
            return await self._dry(scope, url, admit, refetch, ttl)
        waiter = TaskWaiter(scope, url, priority, ttl, admit)
        end = INF if timeout is None else now + timeout
        self._join(waiter, now, end)
        # From here to the end of the wait there is one frame, and no more: many may wait.
        try:
            for _ in range(_MAX_REFETCHES):
                if waiter.grant is None and waiter.error is None and not waiter.away:
                    if self._queues.waiting <= AT_ONCE:
                        waiter.future = asyncio.Future(loop=self._loop)
                    else:
                        waiter.future = CrowdFuture(self._loop, waiter, self._departures)
                    await waiter.future
                    waiter.future = None
                if waiter.grant is not None:
                    return waiter.grant
                if waiter.error is not None:
                    raise waiter.error
                await self._go_and_fetch(waiter, end, refetch)
            self.refuse_unknown(host)  # the storage may be why
            raise LeaseTimeout(url, f"{url}: robots.txt can't be renewed")
        except BaseException as error:
            self._give_up(waiter, error)
            raise

    async def acquire_robots(
        self,
        url: str,
        host: str,
        *,
        asked: RobotsInterval | None = None,
        scopes: tuple[str, ...] = (),
    ) -> Grant:
        """A lease for robots.txt: before every page of the host, and paced like one.

        A page that waits for this fetch holds no lease, so the two can't lock each other
        out. `asked`: what the last known text asks for; None: the interval in force.
        """
        scope = await self._memory.load_host(host, scopes)
        self._engine.counters.robots += 1
        admit = partial(asked_for_robots, scope, asked)
        grant = await self.acquire(url, host, priority=ROBOTS, admit=admit)
        self._engine.count_out(grant, grant.start_at)  # retrievals have bounds of their own
        return grant

    async def hold(
        self, url: str, host: str, seconds: float, *, scopes: tuple[str, ...] = ()
    ) -> Grant:
        """A lease that an earlier run granted and that is still out, open again for `seconds`.

        It holds its slots whatever the clocks and the bounds say: its request may be under way.
        With no second left it has ended: its report counts, and nothing else. Raises LeaseTimeout
        where there is no room for the host, and GateClosed.
        """
        scope = await self._memory.load_host(host, scopes)
        # No await from here on.
        self._check_open()
        return hold_again(self._engine, scope, url, self._clock.monotonic(), seconds)

    def when_due(
        self,
        host: str,
        callback: Callable[[], object],
        *,
        priority: float = 0,
        longest: float = INF,
    ) -> Callable[[], None]:
        """Call back once, when a lease of `host` could be had, or a block of it lasts for more
        than `longest` seconds; returns what undoes it.

        No lease is taken. The call comes from within the scheduler, perhaps before this returns:
        it must be short and must not raise. Raises LeaseTimeout for want of room, StorageError.
        """
        self._memory.admit(host)
        scope = self._memory.host(host)
        watch = DueWatch(scope, callback, priority, longest)
        now = self._clock.monotonic()
        self._engine.take(
            "", host, None, now, admit=watch.offer
        )  # nobody waits: no queue is needed
        if not watch.told and (held := self.held(host)) and longest < held[0] < INF:
            watch.offer()
        if not watch.told and self._queues.join(scope, watch, now):
            self._engine.run(now)

        def cancel() -> None:
            if self._queues.leave(scope, watch, self._clock.monotonic()):
                self._engine.run(self._clock.monotonic())

        return cancel

    def _check_open(self) -> None:
        if not self._open:
            raise GateClosed("the scheduler is not open")

    def _join(self, waiter: TaskWaiter, now: float, end: float) -> None:
        """Wait for the host, until `end`. Raises where it would be in vain."""
        if not self._open:
            self._check_open()
        if self._remote is not None and self._remote.away:
            raise LedgerLost("the ledger can't be reached")
        queues = self._queues
        if queues.waiting - self._departures.count >= self._pacing.max_waiters:
            raise LeaseTimeout(
                waiter.url,
                f"{waiter.url}: {self._waiting} already wait (pacing.max_waiters)",
            )
        if end < INF and waiter.scope.promised_at() > end:
            raise self._late(waiter)
        ready = queues.join(waiter.scope, waiter, now)
        try:
            if ready:
                self._engine.run(now)
            if end < INF and waiter.grant is None and waiter.error is None:
                if end <= now:
                    queue: ScopeQueue | None = waiter.scope.queue
                    if queue is None or not queue.asking or queue.first() is not waiter:
                        raise self._late(waiter)
                    waiter.at_once, end = True, now + ROUND_TRIP
                self._set_deadline(waiter, end)
        except BaseException as error:
            self._give_up(waiter, error)
            raise

    def _set_deadline(self, waiter: TaskWaiter, end: float) -> None:
        waiter.end = end
        self._deadlines.add(end, waiter, self._queues.waiting)
        self._timer.set_no_later(end)

    async def _go_and_fetch(self, waiter: TaskWaiter, end: float, refetch: Refetch | None) -> None:
        """Robots.txt goes first; the waiter's place is kept."""
        if refetch is None:
            raise LeaseTimeout(waiter.url, f"{waiter.url}: its robots.txt expired")
        if end == INF:
            await refetch()
        else:
            try:
                async with deadline(self._clock, end - self._clock.monotonic()):
                    await refetch()
            except TimeoutError as error:
                if isinstance(error, LeaseTimeout):
                    raise
                raise self._late(waiter) from error
        if waiter.scope.promised_at() > end:  # the file's answer may have blocked the host
            raise self._late(waiter)
        now = self._clock.monotonic()
        self._queues.back(waiter.scope, waiter, now)
        self._engine.run(now)
        if end < INF and not waiter.gone:
            self._set_deadline(waiter, end)

    def _give_up(self, waiter: TaskWaiter, error: BaseException) -> None:
        """Leave no trace: a lease that was just handed over goes to the next."""
        waiter.future = None
        self._departures.count -= waiter.leaving
        if isinstance(error, asyncio.CancelledError):
            self._engine.counters.cancelled += not waiter.leaving
            # The task keeps the error, the error its traceback, and that all that stood here.
            error.__traceback__ = None
        if waiter.grant is not None:
            waiter.grant.pass_on()
            return
        now = self._clock.monotonic()
        if self._queues.leave(waiter.scope, waiter, now):
            self._engine.run(now)

    def _refuse_late(self, waiter: TaskWaiter, now: float, error: Exception | None = None) -> None:
        if not (waiter.gone or waiter.away):  # those who fetch have a deadline of their own
            self._queues.leave(waiter.scope, waiter, now)
            waiter.refuse(error or self._late(waiter))

    def _late(self, waiter: TaskWaiter) -> LeaseTimeout:
        """What is raised where its time was over, or can't be enough; it is counted."""
        self._engine.counters.timeouts += 1
        left, why = self.lateness(waiter.scope.name)
        return LeaseTimeout(
            waiter.url,
            f"{waiter.url}: no turn of {waiter.scope.name} in time{why}",
            retry_at=utc(self._clock.wall() + left) if left > 0 else None,
            why=self.held_up(waiter.scope.name)[0],
        )

    def lateness(self, host: str) -> tuple[float, str]:
        """For how long at least the host gets no turn, and how an error about that ends."""
        recovers = self._remote is not None and self._remote.recovers
        scope = self._memory.known(host)
        return (0.0, "") if scope is None else late(scope, self._clock.monotonic(), recovers)

    async def _dry(
        self, scope: Scope, url: str, admit: Admit, refetch: Refetch | None, ttl: float | None
    ) -> Grant:
        """Dry run: decide and count, wait for nothing. The clock runs as if it had."""
        self._check_open()
        asked = admit()
        for _ in range(_MAX_REFETCHES):
            if isinstance(asked, RobotsInterval):
                break
            if refetch is None:
                raise LeaseTimeout(url, f"{url}: its robots.txt expired")
            await refetch()
            asked = admit()
        if not isinstance(asked, RobotsInterval):
            self.refuse_unknown(scope.name)  # the storage may be why
            raise LeaseTimeout(url, f"{url}: robots.txt can't be renewed")
        engine, now = self._engine, self._clock.monotonic()
        seconds = engine.derive(scope, asked, now)
        start = max(now, scope.promised_at(), scope.clock_at(seconds))
        start = max([start, *(other.promised_at() for other in scope.shared)])
        scope.interval = seconds
        grant = engine.grant_at_any_time(scope, now, url, ttl)
        for one in (scope, *scope.shared):
            one.basis = start
        grant.start_at = start
        if (wait := start - now) > 0:
            self._dry_waits += 1
            self._dry_seconds += wait
        return grant

    # --- what operators do --------------------------------------------------------------

    def pause(self, host: str) -> None:
        """No lease of the host until `resume`; outlives a restart. Raises StorageError where that
        can't be made sure of; it is in force all the same. So do `resume` and `block`."""
        self._pause(host, True)

    def resume(self, host: str) -> None:
        """Leases again."""
        self._pause(host, False)

    def _pause(self, host: str, paused: bool) -> None:
        self._memory.host(host).past().paused = paused
        if self._remote is not None:
            self._remote.pause(host, paused)
        self._changed(self._memory.host(host))

    def block(self, host: str, until_wall: float, reason: str = "operator") -> None:
        """No lease before `until_wall` (wall seconds); a moment in the past lifts any block.

        Raises ConfigError, and changes nothing, where it is no number.
        """
        moment_named(host, until_wall)
        scope = self._memory.host(host)
        now = self._clock.monotonic()
        until = now + (until_wall - self._clock.wall())
        if until > now:
            scope.past().block(until, reason)
            self._queues.blocked(scope, now)
        elif scope.history is not None:
            scope.history.unblock()
        if self._remote is not None:
            block = report_of(scope, now) if until > now else Report(host)
            self._remote.report(block)
        self._changed(scope)

    def _changed(self, scope: Scope) -> None:
        now = self._clock.monotonic()
        try:
            if self._memory.promises is not None:
                self._memory.promises.promise(scope, now)
        finally:
            self._engine.changed(scope, now)

    def say(self, rule: HostRule) -> None:
        """Follow a rule about hosts from now on, as a `[[host]]` table says it.

        It replaces the one for the same match. Raises ConfigError, and changes nothing then.
        """
        self._rules.say(rule)
        self._rules_changed(match_named(rule.match))

    def replace_words(self, rules: tuple[HostRule, ...]) -> None:
        """Put another configuration's `[[host]]` tables in the place of all rules.

        At once: taken one by one, a lease could be granted between two of them, at an interval
        that neither the old tables nor the new ones allow. Raises ConfigError, and changes
        nothing then.
        """
        self._rules.replace(rules)
        self._rules_changed("*")

    def adjust(self, pacing: PacingConfig) -> None:
        """Follow other settings from now on, also for what is under way and waits.

        Those that make a scope, or none, and `lease_ttl` have to stay as they are.
        """
        self._pacing = pacing
        self._rules.adjust(pacing)
        self._engine.adjust()
        for scope in self._memory.scopes.values():
            if scope.name.startswith(SHARED):
                scope.settings = self._rules.for_shared(scope.name)
        self._rules_changed("*")

    def _rules_changed(self, match: str) -> None:
        """Apply the rules to hosts in memory; others follow them when they are made."""
        self._engine.follow_budgets()
        scopes = self._memory.scopes
        if "*" in match:
            concerned = [one for one in scopes.values() if not one.name.startswith(SHARED)]
        else:
            concerned = [scopes[match]] if match in scopes else []
        now = self._clock.monotonic()
        for scope in concerned:
            scope.settings = self._rules.for_host(scope.name)
            told = tuple(o.name for o in scope.shared if not o.name.startswith(CONFIGURED))
            self._memory.share(scope, told)
            if scope.derived is not UNDERIVED:
                scope.derived = UNDERIVED
                self._engine.derive(scope, scope.asked, now)
            self._queues.look_again(scope, now)
        self._engine.run(now)

    # --- what others found out ----------------------------------------------------------

    def freeze(self, unanswered: Set[str]) -> None:
        """The fault is ours: no failure is recorded against any host, and those in
        `unanswered`, whose last attempt failed, get no lease but that of a robots.txt, which
        finds out when it is over. The set may grow meanwhile.
        """
        self._engine.freeze(unanswered)

    def thaw(self) -> None:
        """Go on."""
        self._engine.thaw()

    def forgive(self, host: str) -> None:
        """Take back what one request without an answer was counted as: the fault was ours."""
        scope = self._memory.known(host)
        history = None if scope is None else scope.history
        if scope is None or history is None or not history.errors:
            return
        pause, now = history.error_pause(), self._clock.monotonic()
        history.errors -= 1
        self._engine.forget_if_clear(scope, now)
        seconds = self._engine.derive(scope, scope.asked, now)
        if pause > seconds:
            scope.interval = seconds
            self._changed(scope)

    def told(self, host: str, asked: Callable[[], RobotsInterval]) -> float:
        """The text of a host was just read: what it asks for holds from the last request on, and
        outlives the process, whether or not anybody waits for a lease. `asked` says what that is,
        and is called where there was a request.

        Returns the seconds after which the next lease can be had at the latest.
        """
        scope = self._memory.known(host)
        if scope is None:
            return 0.0
        now = self._clock.monotonic()
        before = scope.interval
        seconds = self._engine.robots_read(scope, asked(), now)
        if scope.interval < before:
            self._engine.changed(scope, now)
        return seconds * (1.0 + self._pacing.jitter)

    # --- what others ask ----------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether any lease is open."""
        return self._engine.in_flight > 0

    def why(self, host: str) -> tuple[ClockView, ...]:
        """Every clock of the host, each with where it came from; empty for an unknown one."""
        scope = self._memory.known(host)
        return () if scope is None else explain(scope, self._clock, self._pacing)

    async def look(self, host: str) -> list[ScopeView]:
        """What the ledger knows of the host's scopes; empty without one. May raise anything."""
        return [] if self._remote is None else await self._remote.look(self._memory.names(host))

    def due_at(self, host: str) -> float:
        """Monotonic moment before which no lease can be had; inf: not before an event."""
        scope = self._memory.known(host)
        return max((one.due_at() for one in (scope, *scope.shared)) if scope else (-INF,))

    def needs(self, host: str, near: Iterable[str] = ()) -> list[Need]:
        """Of which scopes a lease of the host takes a slot; see `explain.needs`."""
        return needs(self._memory, host, near)

    def blocked(self, host: str) -> tuple[float, str] | None:
        """Until when (wall seconds) and why a host is blocked; None if it is not."""
        scope = self._memory.known(host)
        history = None if scope is None else scope.history
        if history is None or history.blocked_until <= (now := self._clock.monotonic()):
            return None
        return self._clock.wall() + history.blocked_until - now, history.reason

    def held(self, host: str) -> tuple[float, str] | None:
        """For how many seconds the host gets no lease whatever else happens, and why: by a
        block of its own or of a scope that it shares. inf, "paused": until the operator says.
        """
        scope = self._memory.known(host)
        if scope is None:
            return None
        now, longest = self._clock.monotonic(), None
        for one in (scope, *scope.shared):
            history = one.history
            if history is None:
                continue
            if history.paused:
                return INF, "paused"
            left = history.blocked_until - now
            if left > 0 and (longest is None or left > longest[0]):
                longest = left, history.reason
        return longest

    def held_up(self, host: str) -> tuple[str, float | None]:
        """The `why` of a `NotYet` about the host, and until when (wall seconds), if known."""
        held = self.held(host)
        if held is None or held[0] == INF:
            return "turn" if held is None else "host_paused", None
        return "host_blocked", self._clock.wall() + held[0]

    def budget_spent(self, host: str) -> BudgetSpent | None:
        """Why the host gets no lease for a page today, as far as is known here."""
        return self._memory.budget_spent(host) if self._engine.budgeted else None

    def refuse_unknown(self, host: str) -> None:
        """Raise StorageError while no clock can be kept: a host of which no interval is known
        is not to be asked for it then, for its answer would start one.
        """
        promises = self._memory.promises
        if promises is not None and promises.exhausted:
            raise StorageError(f"the clock of {host} could not be kept: {promises.failing}")

    def unkept(self, host: str) -> str | None:
        """Why no lease of the host can be granted for the want of a place to keep its clock;
        None: that is not so, as far as can be told before the grant itself.
        """
        promises = self._memory.promises
        if promises is None or (why := promises.failing) is None:
            return None
        if not promises.marked:
            return why
        scope = self._memory.scopes.get(host)
        if scope is None:
            return None
        return why if any(map(self._memory.must_keep, (scope, *scope.shared))) else None

    def paused(self, host: str) -> bool:
        """Did the operator pause the host?"""
        scope = self._memory.known(host)
        return scope is not None and scope.history is not None and scope.history.paused

    def watch(self) -> tuple[Mapping[str, Scope], list[Scope]]:
        """The scopes in memory, to be read only, and a list that takes those that come
        or go from now on; whoever asks has to empty it."""
        if self._memory.changes is None:
            self._memory.changes = []
        return self._memory.scopes, self._memory.changes

    def hosts(self) -> tuple[str, ...]:
        """Every scope held in memory, by name."""
        return tuple(self._memory.scopes)

    def host_states(self) -> Counter[str]:
        """How many scopes are paused, blocked, waited for or idle. It looks at every one and
        changes nothing, so that it may be called from another thread."""
        now = self._clock.monotonic()
        return Counter(state_of(scope, now) for scope in list(self._memory.scopes.values()))
