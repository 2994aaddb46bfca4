"""Deadlock detection: which tasks hold which leases, and which hosts they wait for.

A task that waits can't end the leases that it holds. So a host's next lease may be out of reach:
all slots of one of its scopes are held by the waiting task itself, or by tasks that wait for what
this one holds. Such a wait is refused before it starts, since it would never end.

A task may also have been started by a task that holds a lease (`asyncio.create_task`, `gather`,
`wait_for` before Python 3.12). Whether the parent waits for its child can't be known: a crawler
may start tasks for a page's links while it continues to read the page. So the child waits; a
warning is logged, and the wait is refused once the same lease has blocked it for
`pacing.own_wait` seconds.

A `get` of a `PoliteQueue` waits for any one of the hosts that have URLs there. It is stuck if all
of them are out of reach.

Only tasks that hold a lease, or were started under one, are examined. All others cost nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import msgspec

from gatekeeper.clock import Clock, Deadline, DueHeap, SingleTimer
from gatekeeper.errors import LeaseTimeout
from gatekeeper.pacing.waiting import Need
from gatekeeper.urls import mask

_log = logging.getLogger(__name__)

_SWEEP_SLACK = 64
_WARN_SECONDS = 5.0
"""Seconds for which an inherited lease blocks a wait before a warning is logged; also the time
between two examinations of a wait."""
_MAX_FOLLOWED = 1000
"""Most waits that one search follows. Beyond that the wait counts as not stuck until the next
examination."""
_MAX_CHILDREN = 8
"""Most waiting tasks examined of those that were started under one lease."""
_MAX_PER_ITERATION = 500
"""Most waits examined in one iteration of the loop."""

Task = asyncio.Task[object]


class GraphLease(Protocol):
    """An open lease."""

    owner: Task | None
    """The task that would wait for itself if it asked for another lease."""

    @property
    def url(self) -> str:
        """The URL that it was granted for."""

    @property
    def ended(self) -> bool:
        """True if it has ended or expired; there is no notification of an expiry."""

    @property
    def scopes(self) -> tuple[str, ...]:
        """Names of the scopes of which it holds a slot."""

    @property
    def headed(self) -> bool:
        """True if its response head has arrived: no interval waits for it."""


H = TypeVar("H", bound=GraphLease)


class Choice(NamedTuple):
    """One of the leases that would end a wait."""

    url: str
    host: str
    near: tuple[str, ...] = ()
    """Scopes that the host shares in addition to those known."""
    origin: str | None = None
    """The origin whose robots.txt has to be fetched first, if any."""


Choices = Callable[[], Iterable[Choice | None]]
"""Returns the leases that would end a wait at this moment; None: one that nothing is known to
block."""


class WaitsForItself(LeaseTimeout):
    """The lease can't come before another ends that the waiting task, or its parent, still holds.

    `held` is the URL of that lease, `whose` says in words which task holds it.
    """

    def __init__(self, url: str, message: str, held: str, whose: str) -> None:
        super().__init__(url, message)
        self.held = held
        self.whose = whose


class Holdings(Generic[H]):
    """The open leases by the task that owns them."""

    def __init__(self) -> None:
        self._by_task: dict[Task, dict[H, None]] = {}
        self._count = 0
        self._sweep_above = _SWEEP_SLACK

    def __len__(self) -> int:
        return self._count

    def everybody(self) -> list[H]:
        """Return all recorded leases. Some may have ended."""
        return [lease for leases in self._by_task.values() for lease in leases]

    def add(self, lease: H) -> None:
        """Record a lease, if it has an owner."""
        owner = lease.owner
        if owner is not None:
            self._by_task.setdefault(owner, {})[lease] = None
            self._count += 1

    def drop(self, lease: H) -> None:
        """Remove a lease of its owner. Unknown leases are ignored."""
        owner = lease.owner
        leases = None if owner is None else self._by_task.get(owner)
        if owner is not None and leases is not None and lease in leases:
            self._count -= 1
            if len(leases) == 1:
                del self._by_task[owner]
            else:
                del leases[lease]

    def own(self, lease: H, task: Task | None) -> None:
        """Make the task the owner of a lease."""
        if lease.owner is not task:
            self.drop(lease)
            lease.owner = task
            self.add(lease)

    def of(self, task: Task | None) -> list[H]:
        """Return the open leases of a task."""
        self._sweep()
        leases = () if task is None else self._by_task.get(task, ())
        return [lease for lease in leases if not lease.ended]

    def _sweep(self) -> None:
        """Remove expired leases, once there may be many."""
        if self._count > self._sweep_above:
            everybody = self.everybody()
            self._by_task.clear()
            self._count = 0
            for lease in everybody:
                if not lease.ended:
                    self.add(lease)
            self._sweep_above = 2 * self._count + _SWEEP_SLACK


Obstacles = list[tuple[int, list[H]]]
"""Lists of leases that may keep a wait from its end, each with how many of them have to be open to
do so."""


class TurnWait(msgspec.Struct, Generic[H], eq=False):
    """One task's wait: for a lease of a host, for a robots.txt that needs one, or, with
    `several`, for any of several leases."""

    task: Task
    _limit: Deadline
    """Cancels the task that waits in code. For a batch that is a task of the batch, not the one
    that awaits the batch."""
    url: str
    host: str
    near: tuple[str, ...]
    """Scopes that the host shares in addition to those known."""
    own: tuple[H, ...]
    """Open leases of the task."""
    inherited: tuple[H, ...]
    """Leases of other tasks that were open when this task was started."""
    began: float
    several: Choices | None = None
    origin: str | None = None
    """The origin for whose robots.txt it waits now, if any."""
    blocking: H | None = None
    """The lease that blocked it at the last examination."""
    blocked_since: float = 0.0
    """Since when that lease has blocked it."""
    warned: bool = False
    over: bool = False
    refusal: WaitsForItself | None = None

    def choices(self) -> Iterable[Choice | None]:
        """Return the leases of which any one would end the wait."""
        if self.several is not None:
            return self.several()
        return (Choice(self.url, self.host, self.near, self.origin),)

    def refuse(self, error: WaitsForItself) -> None:
        """End the wait: cancel its task. `cancelled` then raises the error instead."""
        if self.refusal is None and not self.over:
            self.refusal = error
            self._limit.fire()

    def cancelled(self) -> None:
        """Handle a cancellation of the wait. If `refuse` caused it, undo it and raise the refusal.
        A cancellation from elsewhere at the same moment remains in effect.
        """
        if self._limit.end() and self.refusal is not None:
            raise self.refusal from None


class WaitGraph(Generic[H]):
    """The waits of tasks that hold leases, or were started under one.

    `needs(host, near)` returns the scopes of which a lease of the host takes a slot, with the
    number of slots of each. `own_wait` is `pacing.own_wait`, in seconds.
    """

    def __init__(
        self,
        clock: Clock,
        own_wait: float,
        needs: Callable[[str, tuple[str, ...]], Iterable[Need]],
    ) -> None:
        self._clock = clock
        self._own_wait = own_wait
        self._needs = needs
        self.holdings: Holdings[H] = Holdings()
        self._waits: dict[Task, dict[TurnWait[H], None]] = {}
        self._by_lease: dict[H, dict[TurnWait[H], None]] = {}
        """For each lease, the waits of tasks that hold it or were started under it."""
        self._by_scope: dict[str, dict[H, None]] = {}
        """The leases of `_by_lease`, by the scopes of which they hold a slot."""
        self._by_origin: dict[str, dict[TurnWait[H], None]] = {}
        """Waits for the robots.txt of each origin."""
        self._for_several: dict[TurnWait[H], None] = {}
        """Waits for any of several leases."""
        self._files: dict[str, tuple[str, tuple[str, ...]]] = {}
        """For origins whose robots.txt waits for a lease: the host, and further shared scopes."""
        self._alive = 0
        self._examinations = DueHeap[TurnWait[H]](
            lambda _, wait: not wait.over, lambda: self._alive
        )
        self._timer = SingleTimer(clock, self._examine_due)

    def adjust(self, own_wait: float) -> None:
        """Apply a changed `pacing.own_wait` to future waits."""
        self._own_wait = own_wait

    def __len__(self) -> int:
        return self._alive

    def close(self) -> None:
        """Stop examining waits."""
        self._timer.cancel()
        self._examinations.clear()

    # --- begin and end ------------------------------------------------------------------

    def begin(
        self,
        task: Task,
        url: str,
        host: str,
        near: tuple[str, ...] = (),
        inherited: Iterable[H] = (),
    ) -> TurnWait[H] | None:
        """Record that the task is about to wait for a lease of the host; `end` must follow.

        Return None if the task holds no lease and was not started under one, so that it blocks no
        other task. Raises WaitsForItself if the wait could never end.
        """
        own = self.holdings.of(task)
        if not own and not inherited:
            return None
        limit = Deadline(self._clock, asyncio.current_task() or task)
        now = self._clock.monotonic()
        return self._begin(
            TurnWait(task, limit, url, host, near, tuple(own), tuple(inherited), now)
        )

    def begin_any(
        self, wait: TurnWait[H] | None, open_leases: Iterable[Any], several: Choices
    ) -> TurnWait[H] | None:
        """Record that the current task is about to wait for any of several leases, or, with `wait`,
        that it continues to wait after a change; `end` must follow.

        `open_leases`: leases of other tasks, under which this one was started; those of another
        gate are ignored. Returns None and raises WaitsForItself like `begin`.
        """
        now = self._clock.monotonic()
        if wait is not None:
            self.check(wait)
        else:
            holdings = self.holdings
            under = [one for one in open_leases if getattr(one, "holdings", None) is holdings]
            task = asyncio.current_task() if under or len(holdings) else None
            own = holdings.of(task)
            if task is None or not (own or under):
                return None
            limit = Deadline(self._clock, task)
            wait = self._begin(
                TurnWait(task, limit, "", "", (), tuple(own), tuple(under), now, several)
            )
        self._note(wait, now)
        return wait

    def _begin(self, wait: TurnWait[H]) -> TurnWait[H]:
        task = wait.task
        self._alive += 1
        if wait.several is not None:
            self._for_several[wait] = None
        self._waits.setdefault(task, {})[wait] = None
        for lease in (*wait.own, *wait.inherited):
            self._by_lease.setdefault(lease, {})[wait] = None
            for scope in lease.scopes:
                self._by_scope.setdefault(scope, {})[lease] = None
        try:
            self.check(wait)
        except WaitsForItself:
            self.end(wait)
            raise
        self._examine_later(wait, self._clock.monotonic() + min(_WARN_SECONDS, self._own_wait))
        return wait

    def current(self, task: Task | None) -> TurnWait[H] | None:
        """Return the wait that the task has begun, or None."""
        waits = None if task is None else self._waits.get(task)
        return next(iter(waits)) if waits else None

    def check(self, wait: TurnWait[H]) -> None:
        """Raise WaitsForItself if the wait could never end."""
        if wait.own and (found := self._find_blocker(wait, soft=False)) is not None:
            raise self._refusal(wait, *found)

    def for_file(self, wait: TurnWait[H], origin: str) -> None:
        """Note that it now waits for an origin's robots.txt. Raises WaitsForItself like `check`."""
        wait.origin = origin
        self._by_origin.setdefault(origin, {})[wait] = None
        self.check(wait)

    def for_turn(self, wait: TurnWait[H]) -> None:
        """Note that it waits for its host again."""
        origin, wait.origin = wait.origin, None
        if origin is not None:
            _discard(self._by_origin, origin, wait)

    def end(self, wait: TurnWait[H]) -> None:
        """Remove a wait that is over. Idempotent."""
        if wait.over:
            return
        wait.over = True
        wait._limit.end()  # The task may have caught our cancellation and continued.
        self._alive -= 1
        self.for_turn(wait)
        self._for_several.pop(wait, None)
        _discard(self._waits, wait.task, wait)
        for lease in (*wait.own, *wait.inherited):
            if _discard(self._by_lease, lease, wait):
                for scope in lease.scopes:
                    _discard(self._by_scope, scope, lease)

    # --- robots.txt ---------------------------------------------------------------------

    def file_waits(self, origin: str, host: str, near: tuple[str, ...] = ()) -> None:
        """Note that fetching the robots.txt of an origin waits for a lease of `host`."""
        self._files[origin] = host, near
        asking = self._by_origin.get(origin, ())
        for wait in [one for one in (*asking, *self._for_several) if one.own]:
            try:
                self.check(wait)
            except WaitsForItself as error:
                wait.refuse(error)

    def file_goes_on(self, origin: str) -> None:
        """Note that fetching the robots.txt got its lease, or no longer needs one."""
        self._files.pop(origin, None)

    # --- periodic examination -----------------------------------------------------------

    def _examine_later(self, wait: TurnWait[H], moment: float) -> None:
        self._examinations.add(moment, wait)
        self._timer.set_no_later(moment)

    def _examine_due(self) -> None:
        now = self._clock.monotonic()
        for wait in self._examinations.pop(now, _MAX_PER_ITERATION):
            if not wait.over and wait.refusal is None:
                self._examine(wait, now)
        self._timer.set_no_later(self._examinations.next())

    def _examine(self, wait: TurnWait[H], now: float) -> None:
        """Log a warning, or refuse the wait, if the same lease has blocked it for long enough."""
        found = self._find_blocker(wait, soft=False) if wait.own else None
        if found is not None:  # Stuck without a new wait: the number of slots was reduced.
            wait.refuse(self._refusal(wait, *found))
            return
        found = self._note(wait, now)
        following = now + _WARN_SECONDS
        if found is not None:
            waited = now - wait.blocked_since
            # Not `waited`, which by rounding may stay just below the limit for ever.
            if now >= wait.blocked_since + self._own_wait:
                wait.refuse(self._refusal(wait, *found, waited))
                return
            if waited >= _WARN_SECONDS and not wait.warned:
                wait.warned = True
                _log.warning("%s", self._message(wait, *found, "waits"))
            following = min(following, wait.blocked_since + self._own_wait)
        self._examine_later(wait, following)

    def _note(self, wait: TurnWait[H], now: float) -> tuple[H, H] | None:
        """Note which lease blocks the wait, in the soft sense, and since when."""
        found = self._find_blocker(wait, soft=True)
        lease = None if found is None else found[0]
        if lease is not wait.blocking:
            # A lease that it was started under was open before the wait began. But a wait for
            # several leases may have been blocked only since another host became blocked.
            began = wait.blocking is None and wait.several is None and lease in wait.inherited
            wait.blocked_since = wait.began if began else now
            wait.blocking = lease
            wait.warned = False
        return found

    # --- obstacles ----------------------------------------------------------------------

    def _find_blocker(self, start: TurnWait[H], *, soft: bool) -> tuple[H, H] | None:
        """Return the lease that blocks the wait for good, and the own lease for whose end that
        lease waits; None if the wait can end. With `soft`, leases that the task was started under
        count like own ones."""
        obstacles = self.obstacles(start)
        return _Search(self, start, obstacles, soft=soft).run() if obstacles else None

    def waits_of(self, lease: H) -> Collection[TurnWait[H]]:
        """Return the waits of the task that owns a lease."""
        owner = lease.owner
        return () if owner is None else tuple(self._waits.get(owner, ()))

    def waits_under(self, lease: H) -> Iterator[TurnWait[H]]:
        """Yield waits of other tasks that were started under a lease: at most `_MAX_CHILDREN`."""
        children = itertools.islice(self._by_lease.get(lease, ()), _MAX_CHILDREN)
        return (wait for wait in children if wait.task is not lease.owner)

    def obstacles(self, wait: TurnWait[H]) -> list[Obstacles[H]]:
        """Return the obstacles to each of the leases that would end the wait; empty if nothing is
        known to block one of them."""
        result = list[Obstacles[H]]()
        for choice in wait.choices():
            found = None if choice is None else self._obstacles_of(choice)
            if not found or len(result) >= _MAX_FOLLOWED:
                return []
            result.append(found)
        return result

    def _obstacles_of(self, choice: Choice) -> Obstacles[H]:
        host, near = choice.host, choice.near
        if choice.origin is not None:
            found = self._files.get(choice.origin)
            if found is None:
                return []  # The file is being fetched, or is about to ask for its lease.
            host, near = found
        result: Obstacles[H] = []
        for scope, slots, paced in self._needs(host, near):
            leases = self._by_scope.get(scope)
            if leases is None:
                continue
            if len(leases) >= slots:
                still = [lease for lease in leases if not lease.ended]
                if len(still) >= slots:
                    result.append((slots, still))
            if paced:
                result += ((1, [one]) for one in leases if not one.headed and not one.ended)
        return result

    # --- messages -----------------------------------------------------------------------

    def _refusal(
        self, wait: TurnWait[H], lease: H, mine: H, waited: float | None = None
    ) -> WaitsForItself:
        verb = "would wait" if waited is None else f"waited {waited:.0f} s (pacing.own_wait)"
        text = self._message(wait, lease, mine, verb)
        return WaitsForItself(wait.url, text, lease.url, self._holder_text(wait, lease, mine))

    def _message(self, wait: TurnWait[H], lease: H, mine: H, verb: str) -> str:
        turns = [one for one in wait.choices() if one is not None]
        kept = (one for one in turns if any(lease in got for _, got in self._obstacles_of(one)))
        wanted = next(kept, turns[0])
        return (
            f"{mask(wanted.url)} {verb} for {lease.url}, {self._holder_text(wait, lease, mine)}: "
            f"read or close that response first (host {wanted.host})"
        )

    def _holder_text(self, wait: TurnWait[H], lease: H, mine: H) -> str:
        holder = "this task" if mine.owner is wait.task else "the task that started this one"
        if lease is mine:
            return f"which {holder} still holds"
        return f"whose task itself waits for {mine.url}, which {holder} still holds"


class _Search(Generic[H]):
    """Search for the leases that keep one wait from ending.

    A wait is stuck while all slots of one of its scopes are held by leases that can't end. A lease
    can't end while its task is stuck. In the soft sense, a lease can't end either while a task
    that was started under it is stuck. The search looks for the largest set of waits that are
    stuck because of each other.
    """

    def __init__(
        self, graph: WaitGraph[H], start: TurnWait[H], obstacles: list[Obstacles[H]], *, soft: bool
    ) -> None:
        self._graph = graph
        self._start = start
        self._soft = soft
        self._obstacles = {start: obstacles}
        """The obstacles of each wait that was reached, in the order of reaching them."""
        self._dependents: dict[TurnWait[H], list[TurnWait[H]]] = {}
        """For each wait, the waits that may end once that one can."""
        self._stuck: set[TurnWait[H]] = set()

    def run(self) -> tuple[H, H] | None:
        """See `WaitGraph._find_blocker`."""
        if not self._reach_all():
            return None
        self._stuck = set(self._obstacles)
        again = deque(reversed(self._obstacles))
        while again:
            wait = again.popleft()
            if wait in self._stuck and not self._is_stuck(wait):
                self._stuck.discard(wait)
                again.extend(self._dependents.get(wait, ()))
        return self._find_cycle() if self._start in self._stuck else None

    def _reach_all(self) -> bool:
        """Reach every wait on which the first one may depend; return False if they are too many."""
        known = self._obstacles
        order = [self._start]
        for wait in order:  # It grows meanwhile.
            for _, leases in itertools.chain.from_iterable(known[wait]):
                for other in self._waiting_with(leases):
                    self._dependents.setdefault(other, []).append(wait)
                    if other not in known:
                        if len(order) >= _MAX_FOLLOWED:
                            return False
                        known[other] = self._graph.obstacles(other)
                        order.append(other)
        return True

    def _is_fixed(self, lease: H) -> bool:
        """Return True if the lease can't end while the first wait lasts."""
        return lease.owner is self._start.task or (self._soft and lease in self._start.inherited)

    def _waiting_with(self, leases: Iterable[H]) -> Iterator[TurnWait[H]]:
        """Yield the waits that keep those leases open which could end during the first wait."""
        for lease in leases:
            if not self._is_fixed(lease):
                yield from self._graph.waits_of(lease)
                if self._soft:
                    yield from self._graph.waits_under(lease)

    def _is_stuck(self, wait: TurnWait[H]) -> bool:
        turns = self._obstacles[wait]
        return bool(turns) and all(
            any(sum(map(self._cannot_end, leases)) >= slots for slots, leases in obstacles)
            for obstacles in turns
        )

    def _cannot_end(self, lease: H) -> bool:
        """Return True if the lease can't end while the stuck waits last."""
        if self._is_fixed(lease):
            return True
        waits = self._graph.waits_of(lease)
        if waits and all(wait in self._stuck for wait in waits):
            return True
        return self._soft and any(wait in self._stuck for wait in self._graph.waits_under(lease))

    def _find_cycle(self) -> tuple[H, H] | None:
        """Return the first lease that blocks the wait, and the own lease at the end of the chain.
        Return None if the wait is stuck only because of a cycle of others, which they have to end.
        """
        seen = {self._start}
        order: deque[tuple[TurnWait[H], H | None]] = deque([(self._start, None)])
        while order:
            wait, first = order.popleft()
            for slots, leases in itertools.chain.from_iterable(self._obstacles[wait]):
                lasting = [one for one in leases if self._cannot_end(one)]
                if len(lasting) < slots:
                    continue
                for lease in lasting:
                    if self._is_fixed(lease):
                        return first or lease, lease
                for lease in lasting:
                    for other in self._waiting_with((lease,)):
                        if other in self._stuck and other not in seen:
                            seen.add(other)
                            order.append((other, first or lease))
        return None


K = TypeVar("K")
V = TypeVar("V")


def _discard(index: dict[K, dict[V, None]], key: K, value: V) -> bool:
    """Remove a value from the values of a key. Return True if it was the last one."""
    values = index.get(key)
    if values is None:
        return False
    values.pop(value, None)
    if values:
        return False
    del index[key]
    return True
