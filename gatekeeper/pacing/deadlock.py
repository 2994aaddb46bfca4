"""Waits of tasks that hold leases, and of tasks that were started under one.

A task that waits can't end the leases that it holds. If they hold all slots of a scope that its
wait needs, the wait is refused before it starts, since it would never end.

A task may also have been started by a task that holds a lease (`asyncio.create_task`, `gather`,
`wait_for` before Python 3.12), and several tasks may wait for what each other hold. Whether such a
wait can end is not examined. It starts; after 5 seconds a warning is logged, and the wait is
refused once the same lease has blocked it for `pacing.own_wait` seconds. Only a lease counts whose
task waits as well, or under which a waiting task was started: not one that is just being used.

A `get` of a `PoliteQueue` waits for any one of the hosts that have URLs there. It is blocked if all
of them are.

Only tasks that hold a lease, or were started under one, are examined. All others cost nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
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
_MAX_CHOICES = 1000
"""Most leases of one wait that are examined. A wait for any of more counts as not blocked."""
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

    @property
    def held(self) -> H | None:
        """A lease that its task holds or was started under, and that is still open, if any."""
        return next((one for one in (*self.own, *self.inherited) if not one.ended), None)

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
            self._note(wait, now)
            return wait
        holdings = self.holdings
        under = [one for one in open_leases if getattr(one, "holdings", None) is holdings]
        task = asyncio.current_task() if under or len(holdings) else None
        own = holdings.of(task)
        if task is None or not (own or under):
            return None
        limit = Deadline(self._clock, task)
        return self._begin(
            TurnWait(task, limit, "", "", (), tuple(own), tuple(under), now, several)
        )

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
        if wait.own or wait.several is not None:
            self._note(wait, wait.began)
        self._examine_later(wait, wait.began + min(_WARN_SECONDS, self._own_wait))
        return wait

    def current(self, task: Task | None) -> TurnWait[H] | None:
        """Return the wait that the task has begun, or None."""
        waits = None if task is None else self._waits.get(task)
        return next(iter(waits)) if waits else None

    def check(self, wait: TurnWait[H]) -> None:
        """Raise WaitsForItself if the wait could never end."""
        if wait.own and (lease := self._blocker(wait, own=True)) is not None:
            raise self._refusal(wait, lease)

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
        try:
            self.check(wait)  # The number of slots may have been reduced.
        except WaitsForItself as error:
            wait.refuse(error)
            return
        lease = self._note(wait, now)
        following = now + _WARN_SECONDS
        if lease is not None:
            waited = now - wait.blocked_since
            # Not `waited`, which by rounding may stay just below the limit for ever.
            if now >= wait.blocked_since + self._own_wait:
                wait.refuse(self._refusal(wait, lease, waited))
                return
            if waited >= _WARN_SECONDS and not wait.warned:
                wait.warned = True
                _log.warning("%s", self._message(wait, lease, "waits"))
            following = min(following, wait.blocked_since + self._own_wait)
        self._examine_later(wait, following)

    def _note(self, wait: TurnWait[H], now: float) -> H | None:
        """Note which lease blocks the wait, and since when."""
        lease = self._blocker(wait) if wait.held is not None else None
        if lease is not wait.blocking:
            # A lease that it was started under was open before the wait began. But a wait for
            # several leases may have been blocked only since another host became blocked.
            began = wait.blocking is None and wait.several is None and lease in wait.inherited
            wait.blocked_since = wait.began if began else now
            wait.blocking = lease
            wait.warned = False
        return lease

    # --- what blocks a wait -------------------------------------------------------------

    def _blocker(self, wait: TurnWait[H], *, own: bool = False) -> H | None:
        """Return the first lease that blocks the wait; None if one that it waits for may come.

        `own`: only leases of the task itself count.
        """
        first: H | None = None
        for number, choice in enumerate(wait.choices()):
            if choice is None or number >= _MAX_CHOICES:
                return None
            blocking = self._blocking(choice, wait.task if own else None)
            if not blocking:
                return None
            if first is None:
                mine = (one for one in blocking if one.owner is wait.task or one in wait.inherited)
                first = next(mine, blocking[0])
        return first

    def _blocking(self, choice: Choice, owner: Task | None) -> list[H]:
        """Return the leases that keep a choice from coming; with `owner`, only those of a task."""
        host, near = choice.host, choice.near
        if choice.origin is not None:
            found = self._files.get(choice.origin)
            if found is None:
                return []  # The file is being fetched, or is about to ask for its lease.
            host, near = found
        result: list[H] = []
        for scope, slots, paced in self._needs(host, near):
            leases = self._by_scope.get(scope)
            if leases is None or (len(leases) < slots and not paced):
                continue
            still = [one for one in leases if not one.ended and owner in (None, one.owner)]
            if len(still) >= slots:
                result += still
            elif paced:
                result += [one for one in still if not one.headed]
        return result

    # --- messages -----------------------------------------------------------------------

    def _refusal(self, wait: TurnWait[H], lease: H, waited: float | None = None) -> WaitsForItself:
        verb = "would wait" if waited is None else f"waited {waited:.0f} s (pacing.own_wait)"
        text = self._message(wait, lease, verb)
        return WaitsForItself(wait.url, text, lease.url, self._holder_text(wait, lease))

    def _message(self, wait: TurnWait[H], lease: H, verb: str) -> str:
        choices = [one for one in wait.choices() if one is not None]
        kept = (one for one in choices if lease in self._blocking(one, None))
        wanted = next(kept, choices[0])
        return (
            f"{mask(wanted.url)} {verb} for {lease.url}, {self._holder_text(wait, lease)}: "
            f"read or close that response first (host {wanted.host})"
        )

    def _holder_text(self, wait: TurnWait[H], lease: H) -> str:
        mine = lease if lease.owner is wait.task or lease in wait.inherited else wait.held or lease
        holder = "this task" if mine.owner is wait.task else "the task that started this one"
        if lease is mine:
            return f"which {holder} still holds"
        return f"whose task waits as well, while {holder} holds {mine.url}"


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
