"""`Scheduler`: the asyncio shell around the engine. It grants leases of hosts to waiting tasks.

The engine decides and never waits. This module has the futures, the one timer, the storage, the
ledger outside this process, and what operators do and ask. No host has a task or an asyncio
object of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import partial

import msgspec

from gatekeeper.clock import (
    Clock,
    SingleTimer,
    block_end,
    deadline,
    refuse_unless_open,
    utc,
)
from gatekeeper.config import Config, HostRule, PacingConfig
from gatekeeper.errors import GateClosed, LeaseTimeout, LedgerLost, StorageError
from gatekeeper.pacing.engine import Engine, report_of
from gatekeeper.pacing.grants import Grant, PacingAudit
from gatekeeper.pacing.host_settings import CONFIG_PREFIXES, SHARED_PREFIXES, Rules
from gatekeeper.pacing.ledger import (
    Hold,
    Ledger,
    LedgerCallbacks,
    LedgerCalls,
    Report,
    ScopeClock,
    ScopeView,
)
from gatekeeper.pacing.persistence import ScopeMemory
from gatekeeper.pacing.queues import ROBOTS, Counters, ScopeQueue, Waiter
from gatekeeper.pacing.scopes import INF, UNDERIVED, Scope
from gatekeeper.pacing.waiters import (
    MAX_PER_ITERATION,
    Admit,
    ClockView,
    DueWatch,
    HostHoldup,
    HostHoldups,
    Refetch,
    TaskWaiter,
)
from gatekeeper.robots.timing import RobotsInterval
from gatekeeper.split_dict import MASK
from gatekeeper.storage.base import Storage

HOUSEKEEPING = 30.0
"""Seconds between two checks of the wall clock, if clocks outlive the process."""
ROUND_TRIP = 2.0  # Seconds that a ledger may take to answer a caller that does not wait.
_MAX_REFETCHES = 5


async def _no_file() -> None:
    """In place of a retrieval: `admit` does not ask for one, or gets nothing new."""


class PacingStats(Counters, kw_only=True):
    """Sizes of a scheduler now, and counters since its start."""

    scopes: int
    waiting: int
    in_flight: int
    granted: int
    promises: int
    evicted: int
    spilled: int
    ledger_failures: int
    frozen: bool


class Scheduler:
    """Grants leases of hosts, in one event loop. Open it before use and close it afterwards.

    >>> import asyncio, random
    >>> from gatekeeper import VirtualClock
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
        files: Callable[[str], Sequence[HostHoldup]] = lambda _host: (),
        audit: PacingAudit | None = None,
        on_rules: Callable[[Sequence[str]], object] = lambda _ended: None,
    ) -> None:
        """`files(host)` returns which robots.txt files keep the host from being asked. It may be
        called in another thread, and must not change anything. `audit`: see `PacingAudit`.
        `on_rules(ended)` is called when rules have changed, before a lease is granted by them, with
        the matches of those that ended, or with none if the operator changed them."""
        self._audit = audit
        self._clock = clock
        self.host_rules: Rules = Rules(config, clock.wall)
        """The operator's rules in force about hosts, including those added at run time."""
        self._rules_timer = SingleTimer(clock, self._end_rules)
        self._on_rules = on_rules
        self._memory = ScopeMemory(self.host_rules, clock, storage, audit)
        calls = None if ledger is None else LedgerCalls(ledger, clock, self._callbacks())
        self._remote = calls
        self._timer = SingleTimer(clock, self._tick)
        self._drained = asyncio.Event()
        self._engine = Engine(
            clock, self._memory, rng, self._timer, remote=calls, on_idle=self._drained.set
        )
        self._queues = self._engine.queues
        self.acquire_nowait: Callable[..., Grant | None] = self._engine.acquire_nowait
        """`acquire_nowait(url, host, asked)` grants a lease without waiting, or returns None; see
        `Engine.acquire_nowait`."""
        self.freeze: Callable[[Set[str]], None] = self._engine.freeze
        self.thaw: Callable[[], None] = self._engine.thaw
        self._loop: asyncio.AbstractEventLoop
        self.holdups: HostHoldups = HostHoldups(self._memory, self._engine, files)
        """What keeps each host from being asked."""
        self.why: Callable[..., tuple[ClockView, ...]] = self.holdups.why
        self.held: Callable[[str], tuple[float, str] | None] = self.holdups.held
        self._open = False

    # --- lifecycle ----------------------------------------------------------------------

    async def open(self) -> None:
        """Read the clocks of earlier runs, and start granting leases."""
        await self._memory.open()
        if self._remote is not None:
            await self._remote.open()
        self._loop = asyncio.get_running_loop()  # A system call before Python 3.12.
        self._open = True
        self._engine.open()
        self._timer.set(self._engine.next_due())
        self._set_housekeeping()
        self._end_rules()

    async def close(self, drain: float = 0.0) -> None:
        """Stop granting, wait up to `drain` seconds for open leases, and store the clocks.

        Waiters get GateClosed. Idempotent. Raises StorageError if the clocks can't be stored; the
        scheduler is closed all the same.
        """
        if not self._open:
            return
        self._open = False
        self._rules_timer.cancel()
        self._engine.halt()
        self._queues.refuse_all(lambda: GateClosed("the gate is closing"))
        try:
            if drain > 0 and self._engine.leases:
                self._drained.clear()
                with contextlib.suppress(TimeoutError):
                    async with deadline(self._clock, drain):
                        await self._drained.wait()
        finally:
            if self._remote is not None:
                await self._remote.close()
            try:
                await self._memory.close()
            finally:
                self._engine.close()
                self._timer.hold()

    def stats(self) -> PacingStats:
        """Return counters and sizes."""
        engine, memory = self._engine, self._memory
        return PacingStats(
            **msgspec.structs.asdict(engine.counters),
            granted=engine.granted,
            scopes=len(memory.scopes),
            waiting=self._queues.waiting,
            in_flight=len(engine.leases),
            promises=memory.promises.made if memory.promises is not None else 0,
            evicted=memory.evicted,
            spilled=memory.spilled,
            ledger_failures=self._remote.failures if self._remote is not None else 0,
            frozen=engine.frozen,
        )

    def _tick(self) -> None:
        """Handle what is due: expired leases, waiters that time out, queues."""
        engine = self._engine
        self._timer.hold()  # It is set once below, not for each queue that moves.
        try:
            now = self._clock.monotonic()
            engine.expire(now)
            for waiter in self._queues.deadlines.pop(now, MAX_PER_ITERATION):
                if isinstance(waiter, TaskWaiter):
                    self._refuse_late(waiter, now)
                elif isinstance(waiter, DueWatch):
                    self._queues.leave(waiter.scope, waiter, now)
                    waiter.offer()
            engine.run(now)
            if self._memory.promises is not None:
                self._memory.promises.check_wall(now)
        finally:
            self._timer.set(min(engine.next_due(), self._queues.deadlines.next()))
            self._set_housekeeping()

    def _set_housekeeping(self) -> None:
        if self._memory.promises is not None and self._open:
            self._timer.set_no_later(self._clock.monotonic() + HOUSEKEEPING)

    # --- notifications by the ledger ----------------------------------------------------

    def _callbacks(self) -> LedgerCallbacks:
        return LedgerCallbacks(
            deliver=self._deliver,
            run=lambda: self._engine.run(self._clock.monotonic()),
            told=self._memory.count_from,
            heard=self._clock_heard,
            reported=self._report_heard,
            paused=self._pause_heard,
            clocks=lambda: self._memory.clocks(self._clock.monotonic()),
            lost=self._ledger_lost,
        )

    def _deliver(self, queue: ScopeQueue, hold: Hold | None, ask_at: float) -> None:
        now, waiter, spent = self._clock.monotonic(), queue.first(), None
        if hold is None and waiter is not None and waiter.priority != ROBOTS:
            spent = self.holdups.budget_spent(queue.scope.name)
        if spent is not None:
            ask_at = now  # The waiter is refused when the host is due.
        if not self._queues.answered(queue, hold, ask_at, now) or hold is not None:
            return
        if self.holdups.served_elsewhere(queue.scope.name) is not None:
            self._refuse_served_elsewhere(queue.waiters(), now)
        if isinstance(waiter, TaskWaiter) and waiter.no_wait:
            self._refuse_late(waiter, now, spent)

    def _clock_heard(self, clock: ScopeClock) -> None:
        if (scope := self._memory.apply_clock(clock)) is not None:
            self._queues.blocked(scope, self._clock.monotonic())
            if self._audit is not None and clock.blocked > 0:
                self._audit.blocked(scope, "fleet")

    def _report_heard(self, report: Report) -> None:
        """Apply another process's report about a scope that was refused or blocked."""
        now = self._clock.monotonic()
        if (scope := self._memory.apply_report(report, now)) is None:
            return
        self._queues.blocked(scope, now)
        if self._audit is not None and (report.seconds > 0 or not report.interval):
            self._audit.blocked(scope, "fleet")
        self._engine.reconsider_all(now)

    def _pause_heard(self, name: str, paused: bool) -> None:
        scope = self._memory.find(name) if not paused else self._memory.host(name)
        if scope is not None and (scope.history is not None or paused):
            scope.ensure_history().paused = paused
            if self._audit is not None:
                self._audit.paused(name, "fleet", not paused)
            with contextlib.suppress(StorageError):
                self._changed(scope)
        if not paused:
            self._engine.reconsider_all(self._clock.monotonic())

    def _ledger_lost(self, lost: bool) -> None:
        """Refuse the waiters when the ledger is out of reach; ask it again when it is back."""
        now = self._clock.monotonic()
        if not lost:
            self._engine.reconsider_all(now)
        error = LedgerLost(self.holdups.unavailable) if lost else None
        self._refuse_served_elsewhere(self._queues.waiters(), now, error)

    def _refuse_served_elsewhere(
        self, waiters: Iterable[Waiter], now: float, error: LedgerLost | None = None
    ) -> None:
        """Refuse the waiters for hosts that another member serves; with `error`: all of them."""
        errors: dict[str, LedgerLost | None] = {}
        # Due watches, and waiters that are fetching a robots.txt, continue to wait.
        for waiter in waiters:
            if isinstance(waiter, TaskWaiter) and not (waiter.fetching or waiter.gone):
                if (host := waiter.scope.name) not in errors:
                    errors[host] = error or self.holdups.served_elsewhere(host)
                if (why := errors[host]) is not None:
                    self._queues.leave(waiter.scope, waiter, now)
                    waiter.refuse(LedgerLost(*why.args))  # an error of its own, for its traceback

    # --- leases -------------------------------------------------------------------------

    async def acquire(
        self,
        url: str,
        host: str,
        admit: Admit,
        priority: float = 0,
        timeout: float | None = None,
        refetch: Refetch = _no_file,
        scopes: tuple[str, ...] = (),
    ) -> Grant:
        """Wait until `host` is due, and take a lease of it.

        `admit` is called at the moment of the grant, with no await in between. It returns what
        robots.txt asks for, or raises (then the lease is offered to the next waiter), or returns
        REFETCH: then `refetch` is awaited, which takes the robots lease, while this waiter keeps
        its place. `admit` may be called again if the lease can't be granted after all.

        A higher `priority` goes first, then first come, first served. `timeout` is in seconds:
        None waits for ever, 0 not at all. `scopes` are shared in addition to those of the
        configuration, such as "address:203.0.113.9".

        Raises LeaseTimeout, GateClosed, or what `admit` or `refetch` raises.
        """
        self._check_open()
        engine = self._engine
        scope = engine.scopes[hash(host) & MASK].get(host)
        if scope is None or scopes:
            scope = self._memory.admitted(host, scopes)
        now = engine.now()
        grant = engine.acquire_nowait(url, host, None, now, admit, scope)
        if grant is not None:
            return grant  # The usual case: no other waiters, and the host is due.
        if self._engine.pacing.dry_run:
            return await self._dry_run(scope, url, admit, refetch)
        waiter = TaskWaiter(scope, url, priority, admit)
        end = INF if timeout is None else now + timeout
        self._join(waiter, now, end)
        # The wait happens in this very frame, not in a nested coroutine: many tasks may wait.
        try:
            for _ in range(_MAX_REFETCHES):
                if waiter.grant is None and waiter.error is None and not waiter.fetching:
                    waiter.future = asyncio.Future(loop=self._loop)
                    await waiter.future
                    waiter.future = None
                if waiter.grant is not None:
                    return waiter.grant
                if waiter.error is not None:
                    raise waiter.error
                await self._fetch_robots(waiter, end, refetch)
            raise self._never_renewed(url, host)
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
        """Take a lease for robots.txt, before every page of the host and paced like a page.

        A page that waits for this fetch holds no lease, so the two can't deadlock. `asked` is
        what the last known text asks for; None: the interval in force.
        """
        scope = self._memory.admitted(host, scopes)
        self._engine.counters.robots += 1
        admit = partial(scope.robots_interval, asked)
        grant = await self.acquire(url, host, priority=ROBOTS, admit=admit)
        self._engine.release_unproven(grant, grant.start_at)  # Retrievals have limits of their own.
        return grant

    async def hold(
        self, url: str, host: str, seconds: float, *, scopes: tuple[str, ...] = ()
    ) -> Grant:
        """Reopen for `seconds` a lease that an earlier run granted and that has not ended.

        It takes its slots whatever clocks and limits say, since its request may be in flight. If
        `seconds` is not above zero it has ended: only its report counts. Raises LeaseTimeout if
        there is no room for the host, and GateClosed.
        """
        scope = self._memory.admitted(host, scopes)
        self._check_open()
        return self._engine.reopen(scope, url, self._clock.monotonic(), seconds)

    def when_due(
        self,
        host: str,
        callback: Callable[[], object],
        *,
        priority: float = 0,
        longest: float = INF,
    ) -> Callable[[], None]:
        """Call back once when a lease of `host` could be granted, when a block of it lasts for more
        than `longest` seconds, or when the scheduler is closed. Returns a function that cancels the
        watch.

        No lease is taken. The callback runs inside the scheduler, possibly before this returns: it
        must be short and not raise. Raises StorageError, GateClosed, or LeaseTimeout if there is no
        room.
        """
        self._check_open()
        scope = self._memory.admitted(host)
        watch = DueWatch(scope, callback, priority, longest)
        now = self._clock.monotonic()
        if (held := self.held(host)) and longest < held[0] < INF:
            watch.offer()
        else:
            self._queues.join(scope, watch, now)
            self._engine.run(now)

        def cancel() -> None:
            now = self._clock.monotonic()
            self._queues.leave(scope, watch, now)
            self._engine.run(now)

        return cancel

    def _check_open(self) -> None:
        refuse_unless_open(self._loop if self._open else None)

    def _join(self, waiter: TaskWaiter, now: float, end: float) -> None:
        """Add a waiter for its host until `end`. Raises if waiting would be in vain."""
        self._check_open()
        self.holdups.refuse_lost(waiter.scope.name)
        queues = self._queues
        if queues.waiting >= self._engine.pacing.max_waiters:
            raise LeaseTimeout(
                waiter.url,
                f"{waiter.url}: {queues.waiting} requests already wait (pacing.max_waiters)",
            )
        if end < INF and waiter.scope.due_at(events=False) > end:
            raise self._timeout_error(waiter)
        queues.join(waiter.scope, waiter, now)
        try:
            self._engine.run(now)
            if end < INF and waiter.grant is None and waiter.error is None:
                if end <= now:
                    queue: ScopeQueue | None = waiter.scope.queue
                    if queue is None or not queue.asking or queue.first() is not waiter:
                        raise self._timeout_error(waiter)
                    waiter.no_wait, end = True, now + ROUND_TRIP
                self._set_deadline(waiter, end)
        except BaseException as error:
            self._give_up(waiter, error)
            raise

    def _set_deadline(self, waiter: TaskWaiter, end: float) -> None:
        waiter.end = end
        self._queues.deadlines.add(end, waiter)
        self._timer.set_no_later(end)

    async def _fetch_robots(self, waiter: TaskWaiter, end: float, refetch: Refetch) -> None:
        """Fetch robots.txt first; the waiter keeps its place."""
        try:
            left = None if end == INF else end - self._clock.monotonic()
            async with deadline(self._clock, left):
                await refetch()
        except TimeoutError as error:
            if isinstance(error, LeaseTimeout):
                raise
            raise self._timeout_error(waiter) from error
        if waiter.scope.due_at(events=False) > end:  # The response may have blocked the host.
            raise self._timeout_error(waiter)
        now = self._clock.monotonic()
        self._queues.end_fetching(waiter.scope, waiter, now)
        self._engine.run(now)
        if end < INF and not waiter.gone:
            self._set_deadline(waiter, end)

    def _give_up(self, waiter: TaskWaiter, error: BaseException) -> None:
        """Remove a waiter; a lease that was just delivered to it goes to the next one."""
        waiter.future = None
        if isinstance(error, asyncio.CancelledError):
            self._engine.counters.cancelled += 1
            # The task keeps the error, the error its traceback, and that the local variables.
            error.__traceback__ = None
        if waiter.grant is not None:
            waiter.grant.pass_on()
            return
        now = self._clock.monotonic()
        self._queues.leave(waiter.scope, waiter, now)
        if self._queues.ready:  # seldom, and very many waiters may leave together
            self._engine.run(now)

    def _refuse_late(self, waiter: TaskWaiter, now: float, error: Exception | None = None) -> None:
        if not (waiter.gone or waiter.fetching):  # A fetching waiter has its own deadline.
            self._queues.leave(waiter.scope, waiter, now)
            waiter.refuse(error or self._timeout_error(waiter))

    def _timeout_error(self, waiter: TaskWaiter) -> LeaseTimeout:
        """Count a timeout, and return the error for a wait that was or would be too long."""
        self._engine.counters.timeouts += 1
        host = waiter.scope.name
        return self.timeout_error(waiter.url, host, f"no lease of {host} in time")

    def timeout_error(self, url: str, host: str, text: str) -> LeaseTimeout:
        """Return an error that says what holds the host up, and when it may be asked next."""
        left, why = self.holdups.late(host)
        return LeaseTimeout(
            url,
            f"{url}: {text}{why}",
            retry_at=utc(self._clock.wall() + left) if left > 0 else None,
            why=self.held_up(host)[0],
        )

    def _never_renewed(self, url: str, host: str) -> LeaseTimeout:
        self.holdups.refuse_unknown(host)  # A failing storage may be the cause.
        return LeaseTimeout(url, f"{url}: robots.txt can't be renewed")

    async def _dry_run(self, scope: Scope, url: str, admit: Admit, refetch: Refetch) -> Grant:
        """Grant a lease in a dry run: decide, count, and move the clocks, but wait for nothing."""
        self._check_open()
        for _ in range(_MAX_REFETCHES):
            if isinstance(asked := admit(), RobotsInterval):
                break
            await refetch()
        else:
            raise self._never_renewed(url, scope.name)
        engine, now = self._engine, self._clock.monotonic()
        seconds = engine.derive(scope, asked, now)
        start = max(now, scope.due_at(events=False), scope.clock_at(seconds))
        start = max([start, *(other.due_at(events=False) for other in scope.shared)])
        scope.interval = seconds
        grant = engine.grant_at_any_time(scope, now, url)
        for one in (scope, *scope.shared):
            one.basis = start
        grant.start_at = start
        if (wait := start - now) > 0:
            engine.counters.dry_waits += 1
            engine.counters.dry_seconds += wait
        return grant

    # --- operators' actions -------------------------------------------------------------

    def pause(self, host: str, *, paused: bool = True) -> None:
        """Grant no lease of the host until it is called with False, also after a restart. `pause`
        and `block` raise StorageError if the change can't be stored; it is in force all the same.
        """
        self._memory.host(host).ensure_history().paused = paused
        if self._remote is not None:
            self._remote.pause(host, paused)
        if self._audit is not None:
            self._audit.paused(host, "operator", not paused)
        self._changed(self._memory.host(host))

    def block(
        self, host: str, until_wall: float, reason: str = "operator", by: str = "operator"
    ) -> None:
        """Grant no lease before `until_wall` (wall seconds). A time in the past ends any block.

        Raises ConfigError, and changes nothing, if `until_wall` is not a number.
        """
        block_end(host, until_wall)
        scope = self._memory.host(host)
        now = self._clock.monotonic()
        until = now + (until_wall - self._clock.wall())
        if until > now:
            scope.ensure_history().block(until, reason)
            self._queues.blocked(scope, now)
        elif scope.history is not None:
            scope.history.unblock()
        if self._remote is not None:
            block = report_of(scope, now) if until > now else Report(host)
            self._remote.report(block)
        if self._audit is not None:
            self._audit.blocked(scope, by)
        self._changed(scope)

    def _changed(self, scope: Scope) -> None:
        now = self._clock.monotonic()
        try:
            if self._memory.promises is not None:
                self._memory.promises.promise(scope, now)
        finally:
            self._engine.changed(scope, now)

    def put_rules(self, match: str, rules: tuple[HostRule, ...], source: str = "call") -> None:
        """Replace the rules that are set at run time for a match, the one in force last. Each is
        like a `[[host]]` table of the configuration. If it raises ConfigError, nothing has changed.
        `source` is for the audit record.
        """
        self.host_rules.put(match, rules)
        self._rules_changed(source, match)

    def replace_rules(self, rules: tuple[HostRule, ...]) -> None:
        """Replace the configuration's rules by another one's `[[host]]` tables, in one step.

        If the rules changed one by one, a lease could be granted between two of them, at an
        interval that neither the old nor the new tables allow. If it raises ConfigError, nothing
        has changed.
        """
        self.host_rules.replace(rules)
        self._rules_changed("configuration", "*")

    def adjust(self, pacing: PacingConfig) -> None:
        """Apply changed settings from now on, also to open leases and waiters.

        Settings that determine which scopes exist, and `lease_ttl`, must not change.
        """
        self.host_rules.adjust(pacing)
        self._engine.adjust()
        for scope in self._memory.scopes.values():
            if scope.name.startswith(SHARED_PREFIXES):
                scope.settings = self.host_rules.for_shared(scope.name)
        self._rules_changed("configuration", "*")

    def _rules_changed(self, source: str, *matches: str, ended: bool = False) -> None:
        """Apply changed rules to the hosts in memory; they apply to others on creation."""
        self._on_rules(matches if ended else ())
        if self._audit is not None and self._open:
            self._audit.overrides_changed(source)
        self._engine.follow_budgets()
        scopes = self._memory.scopes
        if any("*" in match for match in matches):
            concerned = [one for one in scopes.values() if not one.name.startswith(SHARED_PREFIXES)]
        else:
            concerned = [scopes[match] for match in matches if match in scopes]
        now = self._clock.monotonic()
        for scope in concerned:
            scope.settings = self.host_rules.for_host(scope.name)
            told = tuple(o.name for o in scope.shared if not o.name.startswith(CONFIG_PREFIXES))
            self._memory.share(scope, told)
            if scope.derived is not UNDERIVED:
                scope.derived = UNDERIVED
                self._engine.derive(scope, scope.asked, now)
            self._queues.reposition(scope, now)
        self._engine.run(now)
        self._end_rules()

    def _end_rules(self) -> None:
        """End the rules whose time has come, and set the timer for the next one. It looks every
        half minute, since the wall clock may be set, and goes on while the machine sleeps."""
        if due := self.host_rules.end_due():
            self._rules_changed("configuration", *due, ended=True)
        elif self._open:
            self.host_rules.log_ended()
            left = self.host_rules.next_end() - self._clock.wall()
            left = INF if left == INF else min(left, HOUSEKEEPING)
            self._rules_timer.set(self._clock.monotonic() + left)

    # --- findings of other parts --------------------------------------------------------

    def forgive(self, host: str, url: str) -> None:
        """Undo the effect of one request without a response, since the fault was local."""
        scope = self._memory.find(host)
        history = None if scope is None else scope.history
        if scope is None or history is None or not history.errors:
            return
        pause, now = history.error_pause(), self._clock.monotonic()
        history.forgive(hash(url))
        self._engine.forget_if_clear(scope, now)
        seconds = self._engine.derive(scope, scope.asked, now)
        if pause > seconds:
            scope.interval = seconds
            self._changed(scope)

    def robots_read(self, host: str, asked: Callable[[], RobotsInterval]) -> float:
        """Note that a host's robots.txt was just read. What it asks for counts from the last
        request on, durably, whether or not there are waiters. `asked` returns that, and is called
        only if the host is known.

        Returns the seconds after which the next lease can be granted at the latest.
        """
        scope = self._memory.find(host)
        if scope is None:
            return 0.0
        now = self._clock.monotonic()
        seconds = self._engine.robots_read(scope, asked(), now)
        return seconds * (1.0 + self._engine.pacing.jitter)

    # --- questions ----------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """True if any lease is open."""
        return bool(self._engine.leases)

    async def look(self, host: str) -> list[ScopeView]:
        """Return what the ledger knows of the host's scopes; empty without a ledger, or while it is
        lost. May raise any other error of the ledger."""
        try:
            if self._remote is None:
                return []
            return await self._remote.look(self._memory.names(host, self._memory.find(host)))
        except LedgerLost:
            return []

    def blocked(self, host: str) -> tuple[float, str] | None:
        """Return until when (wall seconds) and why a host is blocked; None if it is not."""
        scope = self._memory.find(host)
        history = None if scope is None else scope.history
        if history is None or history.blocked_until <= (now := self._clock.monotonic()):
            return None
        return self._clock.wall() + history.blocked_until - now, history.reason

    def held_up(self, host: str) -> tuple[str, float | None]:
        """Return the `why` of a `NotYet` about the host, and until when (wall seconds) if known."""
        held = self.held(host)
        if held is None:
            return "turn" if self.holdups.source(host, "fleet") is None else "fleet", None
        if held[0] == INF:
            return "host_paused", None
        return "host_blocked", self._clock.wall() + held[0]

    def watch(self) -> tuple[Mapping[str, Scope], list[Scope]]:
        """Return the scopes in memory, read-only, and a list to which scopes that are added or
        removed from now on are appended. The caller has to empty the list."""
        if self._memory.changes is None:
            self._memory.changes = []
        return self._memory.scopes, self._memory.changes
