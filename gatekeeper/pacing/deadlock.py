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
from collections.abc import Callable, Collection, Iterable
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import msgspec

from gatekeeper.clock import Clock, Deadline, SharedTimer
from gatekeeper.errors import LeaseTimeout
from gatekeeper.pacing.waiters import Need
from gatekeeper.urls import mask

_log = logging.getLogger(__name__)

_SWEEP_SLACK = 64
_WARN_SECONDS = 5.0
"""Seconds for which an inherited lease blocks a wait before a warning is logged; also the time
between two examinations of a wait."""
_MAX_CHOICES = 1000
"""Most leases of one wait that are examined. A wait for any of more counts as not blocked."""

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


ANY_FILE = ""
"""In place of an origin: the wait may be for the robots.txt of any."""


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
        self._by_task: dict[Task | None, dict[H, None]] = {}
        self._count = 0
        self._sweep_above = _SWEEP_SLACK

    def __len__(self) -> int:
        return self._count

    def everybody(self) -> list[H]:
        """Return all recorded leases. Some may have ended."""
        return [lease for leases in self._by_task.values() for lease in leases]

    def add(self, lease: H) -> None:
        """Record a lease, if it has an owner."""
        if lease.owner is not None:
            self._by_task.setdefault(lease.owner, {})[lease] = None
            self._count += 1

    def drop(self, lease: H) -> None:
        """Remove a lease of its owner. Unknown leases are ignored."""
        leases = self._by_task.get(lease.owner)
        if leases is not None and lease in leases:
            self._count -= 1
            del leases[lease]
            if not leases:
                del self._by_task[lease.owner]

    def own(self, lease: H, task: Task | None) -> None:
        """Make the task the owner of a lease."""
        if lease.owner is not task:
            self.drop(lease)
            lease.owner = task
            self.add(lease)

    def of(self, task: Task | None) -> list[H]:
        """Return the open leases of a task."""
        if self._count > self._sweep_above:  # there may be many expired ones
            for lease in self.everybody():
                if lease.ended:
                    self.drop(lease)
            self._sweep_above = 2 * self._count + _SWEEP_SLACK
        return [lease for lease in self._by_task.get(task, ()) if not lease.ended]


class TaskWait(msgspec.Struct, Generic[H], eq=False):
    """One task's wait: for a lease of a host, for a robots.txt that needs one, or for any of
    several leases."""

    graph: WaitGraph[H]
    task: Task
    _limit: Deadline
    """Cancels the task that waits in code. For a batch that is a task of the batch, not the one
    that awaits the batch."""
    choices: Choices
    own: list[H]
    """Open leases of the task."""
    inherited: list[H]
    """Leases of other tasks that were open when this task was started."""
    files: str | None
    """See `WaitGraph.begin`."""
    began: float
    blocking: H | None = None
    """The lease that blocked it at the last examination."""
    blocked_since: float = 0.0
    """Since when that lease has blocked it."""
    warned: bool = False
    over: bool = False
    refusal: WaitsForItself | None = None
    ends: float = 0.0
    """When it is examined next."""

    def due(self, now: float) -> None:
        """Called by the timer of its graph."""
        self.graph.examine(self, now)

    @property
    def held(self) -> H | None:
        """A lease that its task holds or was started under, and that is still open, if any."""
        return next((one for one in (*self.own, *self.inherited) if not one.ended), None)

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
        self._by_scope: dict[str, dict[H, int]] = {}
        """The leases that tasks of waits hold or were started under, by the scopes of which they
        hold a slot, with the number of those waits."""
        self._for_files: dict[str | None, dict[TaskWait[H], None]] = {}
        """Waits of tasks that hold leases, by `files`."""
        self._files: dict[str, tuple[str, tuple[str, ...]]] = {}
        """For origins whose robots.txt waits for a lease: the host, and further shared scopes."""
        self._timer = SharedTimer(clock)
        """When the waits are examined."""

    def adjust(self, own_wait: float) -> None:
        """Apply a changed `pacing.own_wait` to future waits."""
        self._own_wait = own_wait

    def __len__(self) -> int:
        """Return the number of waits that are examined."""
        return len(self._timer.running)

    def close(self) -> None:
        """Stop examining waits."""
        self._timer.cancel()
        self._timer.running.clear()

    # --- begin and end ------------------------------------------------------------------

    def begin(
        self, task: Task, choices: Choices, under: Iterable[Any], files: str | None = None
    ) -> TaskWait[H] | None:
        """Record that the task is about to wait for one of these leases; `end` must follow.

        `under`: open leases of other tasks, under which this one was started; those of another gate
        are ignored. `files`: the origin whose robots.txt the wait is for, `ANY_FILE` if it may be
        that of any origin. Return None if the task holds no lease and was not started under one, so
        that it blocks no other task. Raises WaitsForItself if the wait could never end.
        """
        own = self.holdings.of(task)
        inherited = [one for one in under if getattr(one, "holdings", None) is self.holdings]
        if not own and not inherited:
            return None
        limit = Deadline(self._clock, asyncio.current_task() or task)
        now = self._clock.monotonic()
        wait: TaskWait[H] = TaskWait(self, task, limit, choices, own, inherited, files, now)
        self.check(wait)
        self._count(wait, 1)
        if own:
            self._for_files.setdefault(files, {})[wait] = None
        self.examine(wait, now)
        return wait

    def check(self, wait: TaskWait[H]) -> None:
        """Raise WaitsForItself if the wait could never end: its own task holds what it needs."""
        if wait.own and (lease := self._blocker(wait, wait.own)) is not None:
            raise self._refusal(wait, lease)

    def end(self, wait: TaskWait[H]) -> None:
        """Remove a wait that is over. Idempotent."""
        if wait.over:
            return
        wait.over = True
        wait._limit.end()  # The task may have caught our cancellation and continued.
        self._timer.drop(wait)
        self._count(wait, -1)
        if wait.own:
            del self._for_files[wait.files][wait]
            if not self._for_files[wait.files]:
                del self._for_files[wait.files]

    def _count(self, wait: TaskWait[H], by: int) -> None:
        """Add a wait to the counts of its leases, or remove it from them."""
        for lease in (*wait.own, *wait.inherited):
            for scope in lease.scopes:
                waits = self._by_scope.setdefault(scope, {})
                waits[lease] = waits.get(lease, 0) + by
                if not waits[lease]:
                    del waits[lease]
                if not waits:
                    del self._by_scope[scope]

    # --- robots.txt ---------------------------------------------------------------------

    def file_waits(self, origin: str, host: str, near: tuple[str, ...] = ()) -> None:
        """Note that fetching the robots.txt of an origin waits for a lease of `host`."""
        self._files[origin] = host, near
        for files in (origin, ANY_FILE):
            for wait in self._for_files.get(files, ()):
                try:
                    self.check(wait)
                except WaitsForItself as error:
                    wait.refuse(error)

    def file_goes_on(self, origin: str) -> None:
        """Note that fetching the robots.txt got its lease, or no longer needs one."""
        self._files.pop(origin, None)

    # --- periodic examination -----------------------------------------------------------

    def examine(self, wait: TaskWait[H], now: float) -> None:
        """Note which lease blocks the wait, and since when. Log a warning, or refuse the wait, if
        it is the same for long enough."""
        if wait.held is None or wait.refusal is not None:
            return  # It blocks no other task any more.
        following = now + _WARN_SECONDS
        lease = self._blocker(wait)
        if lease is not wait.blocking:
            # A lease that it was started under was open before the wait began. But a wait for
            # several leases may have been blocked only since another host became blocked.
            began = wait.blocking is None and wait.files != ANY_FILE and lease in wait.inherited
            wait.blocked_since = wait.began if began else now
            wait.blocking, wait.warned = lease, False
        if lease is not None:
            # Not the difference, which by rounding may stay just below the limit for ever.
            refused_at = wait.blocked_since + self._own_wait
            if now >= refused_at:
                wait.refuse(self._refusal(wait, lease, now - wait.blocked_since))
                return
            if now >= wait.blocked_since + _WARN_SECONDS and not wait.warned:
                wait.warned = True
                _log.warning("%s", self._message(wait, lease, "waits")[1])
            following = min(following, refused_at)
        self._timer.set(wait, following)

    # --- what blocks a wait -------------------------------------------------------------

    def _blocker(self, wait: TaskWait[H], own: Iterable[H] | None = None) -> H | None:
        """Return the first lease that blocks the wait; None if one that it waits for may come.

        `own`: only these leases count.
        """
        first: H | None = None
        for number, choice in enumerate(wait.choices()):
            if choice is None or number >= _MAX_CHOICES:
                return None
            blocking = self._blocking(choice, own)
            if not blocking:
                return None
            if first is None:
                mine = (one for one in blocking if one.owner is wait.task or one in wait.inherited)
                first = next(mine, blocking[0])
        return first

    def _blocking(self, choice: Choice, own: Iterable[H] | None) -> list[H]:
        """Return the leases that keep a choice from coming, of all or of `own`."""
        host, near = choice.host, choice.near
        if choice.origin is not None:
            found = self._files.get(choice.origin)
            if found is None:
                return []  # The file is being fetched, or is about to ask for its lease.
            host, near = found
        result: list[H] = []
        for scope, slots, paced in self._needs(host, near):
            leases: Collection[H] = self._by_scope.get(scope, ())
            if own is not None:
                leases = [one for one in own if scope in one.scopes]
            if len(leases) < slots and not (paced and leases):
                continue
            still = [one for one in leases if not one.ended]
            if len(still) >= slots:
                result += still
            elif paced:
                result += [one for one in still if not one.headed]
        return result

    # --- messages -----------------------------------------------------------------------

    def _refusal(self, wait: TaskWait[H], lease: H, waited: float | None = None) -> WaitsForItself:
        verb = "would wait" if waited is None else f"waited {waited:.0f} s (pacing.own_wait)"
        url, text = self._message(wait, lease, verb)
        return WaitsForItself(url, text, lease.url, self._holder_text(wait, lease))

    def _message(self, wait: TaskWait[H], lease: H, verb: str) -> tuple[str, str]:
        """Return the URL that the blocked wait is for, or the first one, and a text about it."""
        wanted = next(one for one in wait.choices() if one is not None)
        text = (
            f"{mask(wanted.url)} {verb} for {lease.url}, {self._holder_text(wait, lease)}: "
            f"read or close that response first (host {wanted.host})"
        )
        return wanted.url, text

    def _holder_text(self, wait: TaskWait[H], lease: H) -> str:
        mine = lease if lease.owner is wait.task or lease in wait.inherited else wait.held or lease
        holder = "this task" if mine.owner is wait.task else "the task that started this one"
        if lease is mine:
            return f"which {holder} still holds"
        return f"whose task waits as well, while {holder} holds {mine.url}"
