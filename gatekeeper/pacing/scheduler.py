"""Scheduler."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import random
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Set
from math import isnan

import msgspec

from gatekeeper.clock import Clock, Timer, deadline, utc
from gatekeeper.config import Config, HostRule, PacingConfig, match_named
from gatekeeper.errors import ConfigError, GateClosed, LeaseTimeout, StorageError
from gatekeeper.pacing.engine import Engine, Need, needs
from gatekeeper.pacing.explain import ClockView, explain
from gatekeeper.pacing.ledger import Ledger, MemoryLedger, RemoteLedger
from gatekeeper.pacing.persistence import Memory, Promises
from gatekeeper.pacing.queues import PASSED, ROBOTS, Grant, Offer, Waiter
from gatekeeper.pacing.rules import Rules
from gatekeeper.pacing.scopes import DURABLE, INF, LONGEST, NO_RATE, UNKNOWN, RobotsInterval, Scope
from gatekeeper.storage.base import Storage

__all__ = [
    "SHARED",
    "Admit",
    "ClockView",
    "Controls",
    "Deadlines",
    "DueWatch",
    "Entrance",
    "PacingStats",
    "Refetch",
    "Scheduler",
    "Shell",
    "TaskWaiter",
    "check_moment",
]

_LET_IN = 250
"""Tasks let in during one turn of the loop."""


class Entrance:
    """Lets tasks in, first come first served, a bounded number in each turn of the loop.

    A hundred thousand tasks that begin in one turn would hold up everybody else for as long as
    it takes to look at each of them; here the loop goes round in between.
    """

    def __init__(self) -> None:
        self._let_in = 0
        """Of this turn."""
        self.outside: deque[asyncio.Future[None]] = deque()
        """Who comes now, and finds somebody here, has to `enter` behind them."""
        self._armed = False

    def enter(self) -> asyncio.Future[None] | None:
        """What to await before coming in; None, mostly: come in.

        Not a coroutine: each costs memory, and there may be many.
        """
        loop = asyncio.get_running_loop()
        if not self._armed:
            self._armed = True
            loop.call_soon(self._next_turn)
        if not self.outside and self._let_in < _LET_IN:
            self._let_in += 1
            return None
        future: asyncio.Future[None] = loop.create_future()
        self.outside.append(future)
        return future  # one that is cancelled stays in the line, done, and is passed over

    def _next_turn(self) -> None:
        self._let_in = 0
        outside = self.outside
        while outside and self._let_in < _LET_IN:
            future = outside.popleft()
            if not future.done():
                future.set_result(None)
                self._let_in += 1
        self._armed = bool(self._let_in)
        if self._armed:
            asyncio.get_running_loop().call_soon(self._next_turn)


class Departures:
    """Cancelled waiters who are taken out of their queues in later turns of the loop.

    Most are taken out at once. A hundred thousand who are cancelled in one turn hold it up for
    long enough as it is, so that the others wait here; a turn that one of them is given in the
    meantime is passed on when it is taken out.
    """

    def __init__(self, take_out: Callable[[TaskWaiter], object]) -> None:
        self._take_out = take_out
        self._at_once = 0
        """Taken out in this turn of the loop."""
        self._later: deque[TaskWaiter] = deque()
        self._armed = False

    def __len__(self) -> int:
        return len(self._later)

    def postpone(self, waiter: TaskWaiter) -> bool:
        """Take it out in a later turn of the loop; False: it is to be taken out now."""
        if not self._armed:
            self._armed = True
            asyncio.get_running_loop().call_soon(self._next_turn)
        if not self._later and self._at_once < _LET_IN:
            self._at_once += 1
            return False
        self._later.append(waiter)
        return True

    def _next_turn(self) -> None:
        self._at_once = 0
        self._armed = bool(self._later)
        if self._armed:
            asyncio.get_running_loop().call_soon(self._next_turn)
            self.take_out(_AT_ONCE)

    def take_out(self, most: int) -> None:
        """Take out so many, first come first served."""
        for _ in range(min(most, len(self._later))):
            self._take_out(self._later.popleft())


_log = logging.getLogger(__name__)

Admit = Callable[[], Offer]
"""Asked at the moment of the grant: a RobotsInterval to go ahead, REFETCH, or it raises."""
Refetch = Callable[[], Awaitable[object]]


class TaskWaiter(Waiter):
    """A task in `Scheduler.acquire`. What it learns is kept until the task runs again."""

    __slots__ = ("admit", "error", "future", "grant", "scope")

    def __init__(
        self, scope: Scope, url: str, priority: float, ttl: float | None, admit: Admit
    ) -> None:
        # `Waiter.__init__`, without a call: there may be many.
        self.url, self.priority, self.ttl = url, priority, ttl
        self.gone = self.away = self.stays = False
        self.scope = scope
        self.admit = admit
        self.grant: Grant | None = None
        self.error: Exception | None = None
        self.future: asyncio.Future[None] | None = None
        """What the task waits for."""

    def offer(self) -> Offer:
        """Ask the policy."""
        return self.admit()

    def deliver(self, grant: Grant) -> None:
        """Keep the turn; should the task be cancelled already, it passes it on."""
        self.grant = grant
        if (future := self.future) is not None and not future.done():
            future.set_result(None)

    def refuse(self, error: Exception) -> None:
        """Keep the error for the task."""
        self.error = error
        self._wake()

    def send_away(self) -> None:
        """Wake the task; it fetches and comes back."""
        self._wake()

    def _wake(self) -> None:
        if self.future is not None and not self.future.done():
            self.future.set_result(None)


class DueWatch(Waiter):
    """Somebody who wants to know when a host is due, and takes no turn."""

    __slots__ = ("callback",)

    def __init__(self, callback: Callable[[], object], priority: float = 0.0) -> None:
        super().__init__("", priority)
        self.callback = callback

    def offer(self) -> Offer:
        """Tell, and let the turn go on to the next."""
        self.callback()
        return PASSED

    def deliver(self, grant: Grant) -> None:  # pragma: no cover - it never takes a turn
        """Never called."""
        raise AssertionError(grant)

    def refuse(self, error: Exception) -> None:
        """The scheduler closes, or the callback failed although it has no right to."""
        if not isinstance(error, GateClosed):
            _log.error("a callback of when_due failed", exc_info=error)

    def send_away(self) -> None:  # pragma: no cover - it never asks for that
        """Never called."""
        raise AssertionError


class Deadlines:
    """Moments at which waiters give up: one heap, swept of those who left."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, TaskWaiter]] = []
        self._order = itertools.count()

    def add(self, when: float, waiter: TaskWaiter, alive: int) -> None:
        """Remember; `alive` is how many wait at all, against which the heap is bounded."""
        heapq.heappush(self._heap, (when, next(self._order), waiter))
        if len(self._heap) > 2 * alive + 256:
            self._heap = [entry for entry in self._heap if not entry[2].gone]
            heapq.heapify(self._heap)

    def over(self, now: float, most: int) -> list[TaskWaiter]:
        """Those whose time is over, earliest first; the rest of too many at the next look."""
        found: list[TaskWaiter] = []
        while self._heap and self._heap[0][0] <= now and len(found) < most:
            waiter = heapq.heappop(self._heap)[2]
            if not waiter.gone:
                found.append(waiter)
        return found

    def next(self) -> float:
        """The moment of the next, inf if there is none."""
        return self._heap[0][0] if self._heap else INF


HOUSEKEEPING = 30.0
"""Seconds between two looks at the wall clock, where promises are kept."""


_AT_ONCE = 1000
"""Waiters told in one turn of the loop that their time is over."""


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


class Shell:
    """Opens and closes the books, and wakes them when something is due."""

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
        self._rules = Rules(config)
        self._pacing = config.pacing
        book = ledger if isinstance(ledger, MemoryLedger) else MemoryLedger(clock, self._rules)
        book.rules = self._rules
        self._books = Engine(clock, self._rules, book, rng, rearm=self._rearm)
        self._turns = self._books.turns
        self._promises = Promises(storage, clock, self._books) if storage is not None else None
        self._memory = Memory(self._books, self._promises, storage)
        self._remote: RemoteLedger | None = None
        if ledger is not None and book is not ledger:
            self._remote = self._turns.remote = RemoteLedger(ledger, clock, self._books)
        self._turns.halted = True
        self._books.survey()
        self.take = self._books.take
        """`take(url, host, wish, now=None)`: the turn, if it can be had at once; see `Engine`."""
        self._deadlines = Deadlines()
        self._departures = Departures(self._take_out)
        self._timer: Timer | None = None
        self._open = False
        self._drained: asyncio.Event | None = None
        self._dry_waits = 0
        self._dry_seconds = 0.0

    # --- lifecycle ----------------------------------------------------------------------

    async def open(self) -> None:
        """Read the promises of earlier runs; turns are granted from now on."""
        if self._promises is not None:
            self._memory.left = await self._promises.load()
            self._books.keeper = self._promises
        self._books.away = self._memory
        self._open = True
        self._turns.halted = False
        self._books.survey()
        self._turns.armed = INF
        self._arm_housekeeping()

    async def close(self, drain: float = 0.0) -> None:
        """Grant nothing more, wait up to `drain` seconds for open leases, keep the clocks.

        Whoever waits gets GateClosed. Idempotent. Raises StorageError where the clocks can't
        be kept; it is closed all the same.
        """
        if not self._open:
            return
        self._open = False
        self._turns.halted = True
        self._books.survey()
        self._departures.take_out(len(self._departures))
        self._turns.refuse_all(lambda: GateClosed("the gate is closing"))
        try:
            if drain > 0 and self._books.in_flight:
                await self._drain(drain)
        finally:
            if self._remote is not None:
                await self._remote.close()
            try:
                if self._promises is not None:
                    await self._promises.close()
            finally:
                self._books.keeper = self._books.away = None
                self._books.survey()
                self._cancel_timer()
                self._turns.armed = -INF

    async def _drain(self, seconds: float) -> None:
        self._drained = asyncio.Event()
        self._books.on_idle = self._drained.set
        try:
            async with deadline(self._clock, seconds):
                await self._drained.wait()
        except TimeoutError:
            pass
        finally:
            self._books.on_idle = None

    def stats(self) -> PacingStats:
        """Counters and sizes."""
        books = self._books
        return PacingStats(
            **vars(books.counters),
            granted=books.granted,
            scopes=len(books.scopes),
            waiting=self._turns.waiting - len(self._departures),
            in_flight=books.in_flight,
            promises=self._promises.made if self._promises is not None else 0,
            evicted=self._memory.evicted,
            spilled=self._memory.spilled,
            ledger_failures=self._remote.failures if self._remote is not None else 0,
            dry_waits=self._dry_waits,
            dry_seconds=self._dry_seconds,
            frozen=books.frozen,
        )

    def _late(self, waiter: TaskWaiter) -> LeaseTimeout:
        """What is raised where its time was over, or can't be enough; it is counted."""
        self._books.counters.timeouts += 1
        now = self._clock.monotonic()
        due = waiter.scope.clock_at()
        known = now < due
        return LeaseTimeout(
            waiter.url,
            f"{waiter.url}: no turn of {waiter.scope.name} in time"
            + (f"; the next is due in {due - now:.1f} s" if known else ""),
            retry_at=utc(self._clock.wall() + due - now) if known else None,
        )

    def _take_out(self, waiter: TaskWaiter) -> None:
        """Take out of its queue who waits no more; a turn that it has goes to the next."""
        if waiter.grant is not None:
            waiter.grant.pass_on()
            return
        now = self._clock.monotonic()
        if self._turns.leave(waiter.scope, waiter, now):
            self._turns.run(now)

    # --- the one timer ------------------------------------------------------------------

    def _rearm(self, when: float) -> None:
        self._cancel_timer()
        self._timer = self._clock.call_at(when, self._fire)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fire(self) -> None:
        self._timer = None
        turns, books = self._turns, self._books
        turns.armed = -INF  # one timer is set below, not one for each line that moves
        try:
            now = self._clock.monotonic()
            books.expire(now)
            for waiter in self._deadlines.over(now, _AT_ONCE):
                if not waiter.away:  # those who fetch have a deadline of their own
                    turns.leave(waiter.scope, waiter, now)
                    waiter.refuse(self._late(waiter))
            turns.run(now)
            if self._promises is not None:
                self._promises.check_wall(now)
        finally:
            turns.armed = INF
            turns.arm(min(turns.next_due(), books.leases.next(), self._deadlines.next()))
            self._arm_housekeeping()

    def _arm_housekeeping(self) -> None:
        if self._promises is not None and self._open:
            self._turns.arm(self._clock.monotonic() + HOUSEKEEPING)


CONFIGURED = ("domain:", "group:")
"""How the names of scopes begin that hosts share by configuration ..."""
SHARED = (*CONFIGURED, "address:")
"""... and of all that are shared."""


def check_moment(host: str, until_wall: float) -> None:
    """Raise ConfigError if a block of the host can't end then."""
    if isnan(until_wall):
        raise ConfigError(f"block of {host}: until={until_wall!r} is no moment; give seconds")


class Controls(Shell):
    """Pause, block, override, freeze; why, due_at, blocked."""

    # --- the operator's hand ------------------------------------------------------------

    def pause(self, host: str) -> None:
        """No turn of the host until `resume`; outlives a restart. Raises StorageError where that
        can't be made sure of; it is in force all the same. So do `resume` and `block`."""
        self._change(host, paused=True)

    def resume(self, host: str) -> None:
        """Queues again."""
        self._change(host, paused=False)

    def _change(self, host: str, *, paused: bool) -> None:
        scope = self._books.host(host)
        scope.past().paused = paused
        self._changed(scope)

    def block(self, host: str, until_wall: float, reason: str = "operator") -> None:
        """No turn before `until_wall` (wall seconds); a moment in the past lifts any block.

        Raises ConfigError, and changes nothing, where it is no number.
        """
        check_moment(host, until_wall)
        scope = self._books.host(host)
        now = self._clock.monotonic()
        until = now + (until_wall - self._clock.wall())
        if until > now:
            scope.past().block(until, reason)
            if self._remote is not None:
                self._remote.push(scope, until, reason)
        elif scope.history is not None:
            scope.history.unblock()
        self._changed(scope)

    def say(self, rule: HostRule) -> None:
        """The operator's word about hosts from now on, as a `[[host]]` table says it.

        It replaces, whole, the one for the same match. Raises ConfigError, and changes
        nothing then.
        """
        self._rules.say(rule)
        self._reheard(match_named(rule.match))

    def unsay(self, match: str) -> None:
        """Take the word for that match back, the configured one too. Raises ConfigError."""
        self._rules.unsay(match)
        self._reheard(match_named(match))

    def replace_words(self, rules: tuple[HostRule, ...]) -> None:
        """Another configuration's `[[host]]` tables instead of all that was said before.

        At once: taken one by one, a turn could be granted between two of them, at a pace
        that neither the old tables nor the new ones allow. Raises ConfigError, and changes
        nothing then.
        """
        self._rules.replace(rules)
        self._reheard("*")

    def adjust(self, pacing: PacingConfig) -> None:
        """Pace by other settings from now on, what is under way and waits included.

        Those that make a scope, or none, and `lease_ttl` have to stay as they are.
        """
        self._pacing = pacing
        self._rules.adjust(pacing)
        self._books.adjust()
        self._memory.adjust()
        for scope in self._books.scopes.values():
            if scope.name.startswith(SHARED):
                scope.settings = self._rules.for_shared(scope.name)
        self._reheard("*")

    def _reheard(self, match: str) -> None:
        """Hosts in memory hear what was said; others do when they are begun."""
        scopes = self._books.scopes
        if "*" in match:
            concerned = [one for one in scopes.values() if not one.name.startswith(SHARED)]
        else:
            concerned = [scopes[match]] if match in scopes else []
        now = self._clock.monotonic()
        for scope in concerned:
            scope.settings = self._rules.for_host(scope.name)
            told = tuple(o.name for o in scope.shared if not o.name.startswith(CONFIGURED))
            self._books.share(scope, told)
            if scope.interval is not None:
                scope.interval = None
                self._books.interval(scope, scope.wish, now)
            self._turns.requeue(scope, now)
        self._turns.run(now)

    def _changed(self, scope: Scope) -> None:
        now = self._clock.monotonic()
        try:
            if self._promises is not None:
                self._promises.promise(scope, now)
        finally:
            self._turns.requeue(scope, now)
            self._turns.run(now)

    def freeze(self, unanswered: Set[str]) -> None:
        """The fault is ours: no failure is recorded against any host, and those in
        `unanswered`, whose last attempt failed, get no turn but that of a robots.txt, which
        finds out when it is over. The set may grow meanwhile.
        """
        self._books.frozen = True
        self._books.unanswered = unanswered
        self._books.survey()

    def thaw(self) -> None:
        """Go on."""
        self._books.frozen = False
        self._books.unanswered = frozenset()
        self._books.survey()
        now = self._clock.monotonic()
        self._turns.look_again(now)
        self._turns.run(now)

    def forgive(self, host: str) -> None:
        """Take back what one request without an answer was counted as: the fault was ours."""
        scope = self._books.known(host)
        history = None if scope is None else scope.history
        if scope is None or history is None or not history.errors:
            return
        pause, now = history.error_pause(), self._clock.monotonic()
        history.errors -= 1
        if history.latency is None and not history.owes(now, self._pacing):
            scope.history = scope.interval = None
        gap = self._books.interval(scope, scope.wish, now)
        if pause > gap:
            scope.gap = gap
            self._changed(scope)

    def told(self, host: str, wish: RobotsInterval) -> float:
        """The text of a host was just read: its pace holds from the last request on, and
        outlives the process, whether or not anybody waits for a turn.

        Returns the seconds after which the next turn can be had at the latest.
        """
        scope = self._books.known(host)
        if scope is None:
            return 0.0
        now = self._clock.monotonic()
        before = scope.gap
        gap = self._books.found(scope, wish, now)
        if scope.gap < before:
            self._turns.requeue(scope, now)
            self._turns.run(now)
        return gap * (1.0 + self._pacing.jitter)

    # --- looking ------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether any lease is open."""
        return self._books.in_flight > 0

    def why(self, host: str) -> tuple[ClockView, ...]:
        """Every clock of the host, each with where it came from; empty for an unknown one."""
        scope = self._books.known(host)
        return () if scope is None else explain(scope, self._clock, self._pacing)

    def due_at(self, host: str) -> float:
        """Monotonic moment before which no turn can be had; inf: not before an event."""
        scope = self._books.known(host)
        if scope is None:
            return -INF
        return max(scope.due_at(), *(other.due_at() for other in scope.shared), -INF)

    def needs(self, host: str, near: Iterable[str] = ()) -> list[Need]:
        """Of which scopes a turn of the host takes a slot; see `selfwait.needs`."""
        return needs(self._books, host, near)

    def blocked(self, host: str) -> tuple[float, str] | None:
        """Until when (wall seconds) and why a host is blocked; None if it is not."""
        scope = self._books.known(host)
        now = self._clock.monotonic()
        if scope is None or scope.history is None or scope.history.blocked_until <= now:
            return None
        history = scope.history
        return self._clock.wall() + history.blocked_until - now, history.reason

    def held(self, host: str) -> tuple[float, str] | None:
        """For how many seconds the host gets no turn whatever else happens, and why: by a
        block of its own or of a scope that it shares. inf, "paused": until the operator says.
        """
        scope = self._books.known(host)
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

    def refuse_unknown(self, host: str) -> None:
        """Raise StorageError while no clock can be kept: a host of whose pace nothing is known
        is not to be asked for it then, for its answer would start one.
        """
        if self._promises is not None and self._promises.exhausted:
            raise StorageError(f"the clock of {host} could not be kept: {self._promises.failing}")

    def unkept(self, host: str) -> str | None:
        """Why no turn of the host can be granted for the want of a place to keep its clock;
        None: that is not so, as far as can be told before the turn itself.
        """
        promises = self._promises
        if promises is None or (why := promises.failing) is None:
            return None
        if not promises.marked:
            return why
        scope = self._books.scopes.get(host)
        if scope is None:
            return None
        books = self._books
        kept = (
            one.gap > DURABLE or one.name in books.mixed or promises.unkept(one)
            for one in (scope, *scope.shared)
        )
        return why if any(kept) else None

    def paused(self, host: str) -> bool:
        """Did the operator pause the host?"""
        scope = self._books.known(host)
        return scope is not None and scope.history is not None and scope.history.paused

    def hosts(self) -> tuple[str, ...]:
        """Every scope held in memory, by name."""
        return tuple(self._books.scopes)

    def host_states(self) -> Counter[str]:
        """How many scopes are paused, blocked, waited for or idle. It looks at every one and
        changes nothing, so that it may be called from another thread.
        """
        now = self._clock.monotonic()
        return Counter(_state_of(scope, now) for scope in list(self._books.scopes.values()))


def _state_of(scope: Scope, now: float) -> str:
    history = scope.history
    if history is not None and history.paused:
        return "paused"
    if history is not None and history.blocked_until > now:
        return "blocked"
    return "idle" if scope.line is None else "waiting"


_MAX_REFETCHES = 5
_EARLIER = "the clock of an earlier run"


class Scheduler(Controls):
    """Grants turns, host by host. One event loop; open it before use, close it after.

    >>> import asyncio, random
    >>> from gatekeeper.clock import VirtualClock
    >>> from gatekeeper.config import Config
    >>> async def main():
    ...     scheduler = Scheduler(Config(), clock=VirtualClock(), rng=random.Random(1))
    ...     await scheduler.open()
    ...     grant = await scheduler.acquire("https://a.example/", "a.example", admit=RobotsInterval)
    ...     grant.report(status=200)
    ...     grant.release()
    ...     await scheduler.close()
    ...     return grant.start_at
    >>> asyncio.run(main())
    0.0
    """

    # --- turns --------------------------------------------------------------------------

    async def acquire(
        self,
        url: str,
        host: str,
        *,
        priority: float = 0,
        timeout: float | None = None,
        admit: Admit,
        refetch: Refetch | None = None,
        scopes: tuple[str, ...] = (),
        ttl: float | None = None,
    ) -> Grant:
        """Wait for a turn of `host`, and take it.

        `admit` is called at the moment of the grant, with no await between it and the
        books: it returns the text's RobotsInterval, or raises (the turn goes on to the next), or
        returns REFETCH: then `refetch` is awaited, which asks for the robots turn, while
        this waiter keeps its place. It may be called again if the turn can't be had then.

        A higher `priority` goes first, then who came first. `timeout` None waits for ever,
        0 not at all. `scopes` are clocks shared beside those of the configuration, such as
        "address:203.0.113.9". `ttl` is the lease's lifetime in seconds.

        Raises LeaseTimeout, GateClosed, or what `admit` or `refetch` raises.
        """
        books = self._books
        scope = books.scopes.get(host)
        if scope is None or scopes:
            scope = await self._memory.host(host, scopes)
        if self._pacing.dry_run:
            return await self._dry(scope, url, admit, refetch, ttl)
        now = self._clock.monotonic()
        if books.free_now(scope, now):
            # The common case: nobody waits, and the turn can be had at once.
            wish = admit()
            if isinstance(wish, RobotsInterval):
                grant = books.try_take(scope, wish, now, url, ttl)
                if grant is not None:
                    return grant
        waiter = TaskWaiter(scope, url, priority, ttl, admit)
        end = INF if timeout is None else now + timeout
        self._stand_in_line(waiter, now, end)
        # From here to the end of the wait there is one frame, and no more: many may wait.
        try:
            for _ in range(_MAX_REFETCHES):
                if waiter.grant is None and waiter.error is None and not waiter.away:
                    waiter.future = asyncio.get_running_loop().create_future()
                    await waiter.future
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
        timeout: float | None = None,
        wish: RobotsInterval | None = None,
        scopes: tuple[str, ...] = (),
        ttl: float | None = None,
    ) -> Grant:
        """A turn for robots.txt: before every page of the host, and paced like one.

        A page that waits for this fetch holds no turn, so the two can't lock each other
        out. `wish`: the pace the last known text asks for; None: what is in force.
        """
        scope = await self._memory.host(host, scopes)
        self._books.counters.robots += 1

        def admit() -> Offer:
            return _robots_wish(scope, wish)

        if self._pacing.dry_run:
            return await self._dry(scope, url, admit, None, ttl)
        now = self._clock.monotonic()
        if self._books.free_now(scope, now):
            grant = self._books.try_take(scope, _robots_wish(scope, wish), now, url, ttl)
            if grant is not None:
                return grant
        return await self.acquire(url, host, priority=ROBOTS, timeout=timeout, admit=admit, ttl=ttl)

    async def hold(
        self, url: str, host: str, seconds: float, *, scopes: tuple[str, ...] = ()
    ) -> Grant:
        """A lease that an earlier run granted and that is still out, open again for `seconds`.

        Its request may be under way: it holds its slots whatever the clocks and the bounds
        say, and until its head, report or end no other turn of the host is granted. With no
        second left it has ended: its report counts, and nothing else. Raises LeaseTimeout
        where there is no room for the host, and GateClosed.
        """
        scope = await self._memory.host(host, scopes)
        # No await from here on.
        if not self._open:
            raise GateClosed("the scheduler is not open")
        books, now = self._books, self._clock.monotonic()
        undone = tuple(other.basis for other in scope.shared)
        grant = Grant(books, scope, url, now, now + seconds, scope.basis, scope.shared, undone)
        if seconds <= 0:
            grant.open, grant.told = False, True
            return grant
        for one in (scope, *scope.shared):
            one.in_flight += 1
            one.unheaded += 1
        books.granted += 1
        books.leases.add_alone(grant)
        self._turns.arm(grant.expires_at)
        return grant

    def _stand_in_line(self, waiter: TaskWaiter, now: float, end: float) -> None:
        """Join those who wait for the host, until `end`. Raises where it would be in vain."""
        self._admit_waiter(waiter, end)
        turns = self._turns
        turns.join(waiter.scope, waiter, now)
        try:
            turns.run(now)
            if end < INF and waiter.grant is None and waiter.error is None:
                if end <= now:
                    raise self._late(waiter)
                self._deadlines.add(end, waiter, turns.waiting)
                turns.arm(end)
        except BaseException as error:
            self._give_up(waiter, error)
            raise

    def _admit_waiter(self, waiter: TaskWaiter, end: float) -> None:
        """Refuse at once whom waiting can't help."""
        if not self._open:
            raise GateClosed("the scheduler is not open")
        waiting = self._turns.waiting - len(self._departures)
        if waiting >= self._pacing.max_waiters:
            raise LeaseTimeout(
                waiter.url,
                f"{waiter.url}: {waiting} already wait (pacing.max_waiters)",
            )
        if waiter.scope.clock_at() > end:
            raise self._late(waiter)

    async def _go_and_fetch(self, waiter: TaskWaiter, end: float, refetch: Refetch | None) -> None:
        """The turn is robots.txt's; the place in line is kept."""
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
        now = self._clock.monotonic()
        self._turns.back(waiter.scope, waiter, now)
        self._turns.run(now)
        if end < INF and not waiter.gone:
            self._deadlines.add(end, waiter, self._turns.waiting)
            self._turns.arm(end)

    def _give_up(self, waiter: TaskWaiter, error: BaseException) -> None:
        """Leave no trace: a turn that was just handed over goes to the next."""
        if isinstance(error, asyncio.CancelledError):
            self._books.counters.cancelled += 1
            # The task keeps the error, the error its traceback, and that all that stood here.
            error.__traceback__ = None
            if waiter.grant is None and self._departures.postpone(waiter):
                return
        self._take_out(waiter)

    async def _dry(
        self, scope: Scope, url: str, admit: Admit, refetch: Refetch | None, ttl: float | None
    ) -> Grant:
        """Dry run: decide and count, wait for nothing. The clock runs as if it had."""
        if not self._open:
            raise GateClosed("the scheduler is not open")
        wish = admit()
        for _ in range(_MAX_REFETCHES):
            if isinstance(wish, RobotsInterval):
                break
            if refetch is None:
                raise LeaseTimeout(url, f"{url}: its robots.txt expired")
            await refetch()
            wish = admit()
        if not isinstance(wish, RobotsInterval):
            self.refuse_unknown(scope.name)  # the storage may be why
            raise LeaseTimeout(url, f"{url}: robots.txt can't be renewed")
        now = self._clock.monotonic()
        grant, wait = self._books.take_dry(scope, wish, now, url, ttl)
        if wait > 0:
            self._dry_waits += 1
            self._dry_seconds += wait
        return grant

    def when_due(
        self, host: str, callback: Callable[[], object], *, priority: float = 0
    ) -> Callable[[], None]:
        """Call back once, when a turn of `host` could be had; returns what undoes it.

        No turn is taken. The call comes from within the scheduler, perhaps before this
        returns: it must be short and must not raise. Raises LeaseTimeout where there is no
        room for the host (pacing.max_hosts), and StorageError where it can't be brought back.
        """
        self._memory.admit(host)
        scope = self._books.host(host)
        watch = DueWatch(callback, priority)
        now = self._clock.monotonic()
        if self._books.free_now(scope, now):
            watch.offer()  # nobody stands in line, and none is needed
            return _undone
        self._turns.join(scope, watch, now)
        self._turns.run(now)

        def cancel() -> None:
            now = self._clock.monotonic()
            if self._turns.leave(scope, watch, now):
                self._turns.run(now)

        return cancel


def _robots_wish(scope: Scope, wish: RobotsInterval | None) -> RobotsInterval:
    """The pace of a robots.txt. Where nothing is known of the text, that of an earlier run's
    clock: its text was read, and not on disk yet when the run was killed."""
    if wish is None or wish is NO_RATE or wish is UNKNOWN:
        if scope.wish.source == _EARLIER:
            return scope.wish
        if scope.interval is None and DURABLE < scope.gap < LONGEST:
            return RobotsInterval(scope.gap, _EARLIER)
    return scope.wish if wish is None else wish


def _undone() -> None:
    """There is nothing left to undo."""
