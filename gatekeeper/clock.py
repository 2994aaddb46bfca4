"""Time as a parameter: the `Clock` protocol, the system clock, and timers; and the background tasks
of one owner.

Two kinds of time are never mixed. *Monotonic* seconds measure waiting and lifetimes within a
process; they never jump. *Wall* seconds (POSIX, UTC) are written to disk, shown to people and
compared with a site's Visit-time; they may jump.

Data that outlives a process is stamped with a third kind: seconds since the machine's boot, and
an id of that boot. Until the next boot, the age of a `Stamp` is known even if the wall clock was
set meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import heapq
import itertools
import math
import os
import secrets
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextvars import Context
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, Protocol, TypeVar

from gatekeeper.errors import ConfigError, GateClosed
from gatekeeper.http_fields import UtcTime as UtcTime  # noqa: PLC0414 - for importers
from gatekeeper.http_fields import utc as utc  # noqa: PLC0414
from gatekeeper.late import LATE, lazily

if TYPE_CHECKING:
    from gatekeeper.testing.virtual_clock import VirtualClock as VirtualClock  # noqa: PLC0414
else:
    __getattr__, __dir__, _ = lazily(__name__, LATE[__name__])

_T = TypeVar("_T")


class Timer(Protocol):
    """The handle of a pending call, returned by `Clock.call_at`."""

    def cancel(self) -> None:
        """Cancel the call; does nothing if it was made already."""


class Clock(Protocol):
    """The source of time for the whole package.

    A clock may also have a method `boot() -> Boot`; see `boot_of`.
    """

    def monotonic(self) -> float:
        """Return seconds since an arbitrary start; they never jump."""

    def wall(self) -> float:
        """Return seconds since 1970-01-01 UTC; they may jump either way."""

    async def sleep(self, seconds: float) -> None:
        """Return after that many monotonic seconds."""

    def call_at(self, when: float, callback: Callable[..., object], *args: Any) -> Timer:
        """Call back in the running loop at that monotonic moment (immediately if past)."""


class Boot(NamedTuple):
    """A moment measured from the machine's boot."""

    id: str
    """Identifies the boot; unique over all boots and machines."""
    seconds: float
    """Seconds since the boot, including time asleep; never goes back."""


@functools.cache
def _boot_id() -> str:
    """Return the system's id of this boot. A system without one gets a random id for this
    process, whose moments then can't be compared with another process's."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        text = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        if len(found := text.strip().replace("-", "")) == 32 and found.isalnum():
            return found[:16]
    return secrets.token_hex(8)


_BOOT_TIME = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", None))
_ROUNDING_SECONDS = 1e-3
"""Seconds by which two moments may appear in the wrong order, as they are sums of floats."""
_PROCESS_ID = secrets.token_hex(6)


def boot_of(clock: Clock) -> Boot:
    """Return `clock.boot()`, or the clock's monotonic time if it has no such method."""
    boot: Callable[[], Boot] | None = getattr(clock, "boot", None)
    if boot is not None:
        return boot()
    # The process id tells a forked process apart: its clock runs independently.
    return Boot(f"{_PROCESS_ID}-{os.getpid()}-{id(clock):x}", clock.monotonic())


class Stamp(NamedTuple):
    """The time at which something was written, readable in another process.

    >>> from gatekeeper import VirtualClock
    >>> clock = VirtualClock()
    >>> written = stamp(clock)
    >>> clock.advance(10.0)
    >>> clock.jump_wall(7200.0)
    >>> written.age(clock), written.wall_shift(clock)
    (10.0, 7200.0)
    >>> clock.reboot()
    >>> written.age(clock), written.wall_shift(clock)
    (7210.0, None)
    """

    wall: float
    boot_id: str = ""
    """Empty if the writer did not record it."""
    boot_at: float = 0.0

    def is_of_this_boot(self, clock: Clock) -> bool:
        """Return True if the stamp was made since the current boot."""
        boot = boot_of(clock)
        # A smaller count belongs to another boot, even if the id is the same.
        return boot.id == self.boot_id and boot.seconds >= self.boot_at - _ROUNDING_SECONDS

    def age(self, clock: Clock) -> float:
        """Return the seconds since the stamp: by the boot's count if the stamp is of this boot,
        else by the wall clock, and 0 if the wall clock is now before the stamp."""
        if self.is_of_this_boot(clock):
            return max(0.0, boot_of(clock).seconds - self.boot_at)
        return max(0.0, clock.wall() - self.wall)

    def wall_shift(self, clock: Clock) -> float | None:
        """Return the seconds by which the wall clock was set forward since (negative: back).

        Return None if that can't be known: the machine has rebooted, and the wall clock is not
        behind the stamp.
        """
        by_wall = clock.wall() - self.wall
        if self.is_of_this_boot(clock):
            return by_wall - self.age(clock)
        return by_wall if by_wall < 0 else None


def number(seconds: float) -> str:
    """Format seconds for people: three digits, or whole seconds; never with an exponent.

    >>> number(0.0512345), number(2.0), number(3600.0)
    ('0.0512', '2', '3600')
    """
    return f"{seconds:.3g}" if seconds < 1000 else f"{seconds:.0f}"


NEVER = 1 << 53
"""Microseconds later than any other time, and still exact as a double in Lua."""


def micros(seconds: float) -> int:
    """Convert seconds to whole microseconds, so that sums are exact and results can be compared
    with those of a fleet's script. Rounds up, since a longer wait is safe.

    >>> micros(1.0000001)
    1000001
    """
    return math.ceil(min(NEVER, seconds * 1e6))


def stamp(clock: Clock) -> Stamp:
    """Return the stamp of this moment."""
    return Stamp(clock.wall(), *boot_of(clock))


class SystemClock:
    """The machine's time and the running loop's timers."""

    __slots__ = ()

    monotonic: Final = staticmethod(time.monotonic)
    wall: Final = staticmethod(time.time)

    def boot(self) -> Boot:
        """Return the seconds since the machine's boot, and its id (which Linux provides)."""
        if sys.platform == "win32" or _BOOT_TIME is None:
            return Boot(_boot_id(), time.monotonic())
        return Boot(_boot_id(), time.clock_gettime(_BOOT_TIME))

    async def sleep(self, seconds: float) -> None:
        """Return after that many seconds."""
        await asyncio.sleep(seconds)

    def call_at(self, when: float, callback: Callable[..., object], *args: Any) -> Timer:
        """Call back at that monotonic moment."""
        # call_later, not call_at: a loop's own time() need not be time.monotonic().
        delay = max(0.0, when - time.monotonic())
        return asyncio.get_running_loop().call_later(delay, callback, *args)


class SingleTimer:
    """A timer with one callback and at most one pending call, which can be rescheduled.

    A pending call that is cancelled or replaced is not made. The callback takes no arguments,
    and may set the timer again.

    >>> from gatekeeper import VirtualClock
    >>> clock = VirtualClock()
    >>> timer = SingleTimer(clock, lambda: print("called at", clock.monotonic()))
    >>> timer.set(5.0)
    >>> timer.set_no_later(3.0)
    >>> timer.when
    3.0
    >>> clock.advance(10.0)
    called at 3.0
    >>> timer.when
    inf
    """

    __slots__ = ("_callback", "_clock", "_timer", "when")

    def __init__(self, clock: Clock, callback: Callable[[], object]) -> None:
        self._clock = clock
        self._callback = callback
        self._timer: Timer | None = None
        self.when: float = math.inf
        """Monotonic moment of the pending call; inf if none is pending. Read-only."""

    def set(self, when: float) -> None:
        """Schedule the call at that monotonic moment, replacing a pending one; inf: cancel."""
        if self._timer is not None:
            self._timer.cancel()
        self.when = when
        self._timer = None if when == math.inf else self._clock.call_at(when, self._fire)

    def set_no_later(self, when: float) -> None:
        """Schedule the call at that monotonic moment, unless an earlier one is pending."""
        if when < self.when:
            self.set(when)

    def cancel(self) -> None:
        """Cancel the pending call, if there is one."""
        self.set(math.inf)

    def hold(self) -> None:
        """Cancel the pending call, and ignore `set_no_later` until the next `set`."""
        self.cancel()
        self.when = -math.inf

    def _fire(self) -> None:
        self._timer = None
        self.when = math.inf
        self._callback()


class Timed(Protocol):
    """An entry of a `SharedTimer`; hashed by identity."""

    ends: float
    """The monotonic moment at which `due` is called; written by the timer alone."""

    def due(self, now: float) -> None:
        """Called once the moment has come. To be called again, set the timer again."""


_MAX_DUE = 1_000
"""Maximum number of entries that a `SharedTimer` calls in one iteration of the loop."""


class SharedTimer:
    """One clock timer for many entries, most of which are dropped before they are due."""

    __slots__ = ("_timer", "clock", "running")

    def __init__(self, clock: Clock) -> None:
        self.clock: Clock = clock
        self.running: dict[Timed, None] = {}
        """The pending entries, as the keys."""
        self._timer = SingleTimer(clock, self._look)  # set no later than the earliest entry

    def set(self, one: Timed, moment: float) -> None:
        """Call the entry's `due` at that moment, replacing its pending call."""
        one.ends = moment
        self.running[one] = None
        if moment < self._timer.when:
            self._timer.set(moment)

    def drop(self, one: Timed) -> bool:
        """Remove an entry. Return True if its call was pending."""
        # The timer stays set, though it may find nothing due: a new entry usually follows.
        return self.running.pop(one, self) is None

    def cancel(self) -> None:
        """Make no calls until an entry is set again."""
        self._timer.cancel()

    def _look(self) -> None:
        now = self.clock.monotonic()
        for one in [one for one in self.running if one.ends <= now][:_MAX_DUE]:
            if self.drop(one):
                one.due(now)
        if self.running:
            self._timer.set_no_later(min(one.ends for one in self.running))


_SPARE_ENTRIES = 256
"""Ended items that a heap keeps, besides as many as have not ended."""
_MAX_SKIPPED = 64
"""Maximum number of ended items that one call of `DueHeap.next` removes."""


class DueHeap(Generic[_T]):
    """Items by the moment at which they fall due. Items that end earlier are dropped in bulk.

    `alive(when, item)` returns False once an item is not due at that moment any more, because it
    ended or was added again with another moment. Such items are skipped. `count()` returns how many
    items have not ended, which bounds the memory.
    """

    __slots__ = ("_alive", "_count", "_heap", "_kept", "_order")

    def __init__(self, alive: Callable[[float, _T], bool], count: Callable[[], int]) -> None:
        self._alive = alive
        self._count = count
        self._heap: list[tuple[float, int, _T]] = []
        self._kept = 0  # by the last drop: an item may be due at several moments
        self._order = itertools.count()

    def add(self, when: float, item: _T) -> None:
        """Add an item that falls due at that moment."""
        heapq.heappush(self._heap, (when, next(self._order), item))
        if len(self._heap) > 2 * max(self._count(), self._kept) + _SPARE_ENTRIES:
            self._heap = [entry for entry in self._heap if self._alive(entry[0], entry[2])]
            self._kept = len(self._heap)
            heapq.heapify(self._heap)

    def pop(self, now: float, most: int = sys.maxsize) -> list[_T]:
        """Remove and return the items that are due, earliest first, each once: at most `most`."""
        heap = self._heap
        if not heap or heap[0][0] > now:
            return []  # The usual case: the scheduler asks at each of its timers.
        found: dict[_T, None] = {}
        while heap and heap[0][0] <= now and len(found) < most:
            when, _, item = heapq.heappop(heap)
            if self._alive(when, item):
                found[item] = None
        return list(found)

    def next(self) -> float:
        """Return a moment before which no item falls due; inf if there is none.

        Only so many ended items are skipped: when 100,000 end together, skipping all of them would
        stop the loop for longer than the timers that fire for nothing."""
        heap, skipped = self._heap, 0
        while heap and skipped < _MAX_SKIPPED and not self._alive(heap[0][0], heap[0][2]):
            heapq.heappop(heap)
            skipped += 1
        return heap[0][0] if heap else math.inf


class Deadline:
    """Cancels a task when its time is over; `end` withdraws the cancellation.

    Make it before the work that it limits begins: a cancellation from elsewhere since then is not
    swallowed (Task.uncancel tells the two apart). Or make it later, with what `task.cancelling()`
    returned `before`.
    """

    __slots__ = ("_cancelling_before", "_clock", "_ended", "_task", "_timer", "fired")

    def __init__(
        self, clock: Clock, task: asyncio.Task[Any] | None, before: int | None = None
    ) -> None:
        """Raises RuntimeError without a task."""
        if task is None:
            raise RuntimeError("a deadline needs a running task")
        self._clock = clock
        self._task = task
        self._cancelling_before = task.cancelling() if before is None else before
        self._timer: Timer | None = None
        self._ended = False
        self.fired: bool = False

    def move(self, seconds: float | None) -> None:
        """Set the deadline to so many seconds from now; None: no limit until moved again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if seconds is not None and not (self.fired or self._ended):
            self._timer = self._clock.call_at(self._clock.monotonic() + seconds, self.fire)

    def end(self) -> bool:
        """End the deadline for good, and withdraw its cancellation. Idempotent.

        Return True if the task was cancelled by this deadline alone. The cancellation is withdrawn
        even if the task turned it into another exception, or caught it and went on.
        """
        self.move(None)
        before, self._ended = self._ended, True
        return self.fired and not before and self._task.uncancel() <= self._cancelling_before

    def fire(self) -> None:
        """Set `fired` and cancel the task: its time is over. Idempotent."""
        if self._ended or self.fired:
            return
        loop = self._task.get_loop()
        if asyncio.current_task(loop) is self._task:
            # The body advanced a virtual clock itself. A running task that is cancelled gets
            # the cancellation at its next await, which may be long after this deadline.
            self._timer = loop.call_soon(self.fire)
            return
        self.fired = True
        self._task.cancel()


@contextlib.asynccontextmanager
async def deadline(clock: Clock, seconds: float | None) -> AsyncIterator[Deadline]:
    """Raise TimeoutError after so many seconds of an injected clock, as `asyncio.timeout` does.

    The timer cancels the task; a cancellation from elsewhere at the same moment is not
    swallowed. None: no limit until `move` sets one.
    """
    limit = Deadline(clock, asyncio.current_task())
    limit.move(seconds)
    try:
        yield limit
    except asyncio.CancelledError:
        if limit.end():
            raise TimeoutError from None
        raise
    finally:
        limit.end()


def refuse_unless_open(loop: asyncio.AbstractEventLoop | None) -> None:
    """Raise GateClosed unless `loop`, which opened a gate, is the running one. None: not open."""
    if loop is None:
        raise GateClosed("the gate is not open; use it inside `async with`")
    if asyncio.get_running_loop() is not loop:
        raise GateClosed(
            "the gate belongs to another event loop; open one in each, or share a sidecar"
        )


class OwnedTasks:
    """Background tasks with one owner, whose `close` ends all of them.

    The key of a task says what it is about: `find` returns the task that is under way for a key.
    """

    def __init__(self) -> None:
        self._tasks: dict[object, asyncio.Task[Any]] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def find(self, key: object) -> asyncio.Task[Any] | None:
        """Return the task with that key, or None if there is none."""
        return self._tasks.get(key)

    def start(
        self, work: Coroutine[Any, Any, _T], key: object = None, context: Context | None = None
    ) -> asyncio.Task[_T]:
        """Start a task, which is removed when it is done. `context` is that of `create_task`."""
        task = asyncio.get_running_loop().create_task(work, context=context)
        key = task if key is None else key
        self._tasks[key] = task
        # A callback, since a task that is cancelled before its first step runs no `finally`.
        task.add_done_callback(lambda _: self._tasks.pop(key, None))
        return task

    async def finish(self, clock: Clock, seconds: float) -> None:
        """Wait until all tasks are done, for at most that many seconds."""
        with contextlib.suppress(TimeoutError):
            async with deadline(clock, seconds):
                while self._tasks:
                    await asyncio.wait(list(self._tasks.values()))

    async def close(self) -> None:
        """Cancel the remaining tasks, and wait until they have ended. Idempotent."""
        while self._tasks:
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            # From Python 3.12 on, `gather` of finished tasks does not yield to the event loop,
            # which runs their callbacks.
            await asyncio.sleep(0)


_FIRST_WALL_SECOND = 100_000_000
"""Of the year 1973. Smaller times of a block are durations that were taken for times."""


def block_end(host: str, until: datetime | float) -> float:
    """Return the end of a host's block in wall seconds.

    Raises ConfigError for NaN, another type, or a datetime without a time zone: meant as UTC
    but read as local time, that would end the block hours early. Raises it too for a number that
    can only be meant as a duration: as a time in the past it would lift the block.
    """
    wall = until.timestamp() if isinstance(until, datetime) else until
    # `math.isnan` raises an error for an integer that is no float.
    known = isinstance(wall, int | float) and (
        abs(wall) <= sys.float_info.max or abs(wall) == math.inf
    )
    if not known or (isinstance(until, datetime) and until.utcoffset() is None):
        remedy = "give wall seconds, or a datetime with its time zone"
        raise ConfigError(f"block of {host}: until={until} is not a moment; {remedy}")
    if 0 < wall < _FIRST_WALL_SECOND and not isinstance(until, datetime):
        remedy = f"for {until:g} seconds from now give time.time() + {until:g}; 0 lifts the block"
        raise ConfigError(f"block of {host}: until={until} is a moment of long ago; {remedy}")
    return wall
