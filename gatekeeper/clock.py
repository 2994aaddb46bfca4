"""Time as a parameter: `Clock`, the system's one, and a virtual one.

Two times are kept apart everywhere. *Monotonic* seconds measure waiting and lifetimes
within a process; they never jump. *Wall* seconds (POSIX, UTC) are what is written to
disk, shown to people and compared with a site's Visit-time; they may jump.

What has to be told from one process to the next is stamped with a third one: seconds since
the machine started, and which start that was. While the machine runs, a `Stamp` says how long
ago it was made whatever the wall clock was set to.
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
import time
from collections.abc import AsyncIterator, Callable
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from gatekeeper.errors import ConfigError
from gatekeeper.http_fields import utc

__all__ = [
    "Boot",
    "Clock",
    "Deadline",
    "SharedTimer",
    "SingleTimer",
    "Stamp",
    "SystemClock",
    "Timed",
    "Timer",
    "VirtualClock",
    "boot_of",
    "deadline",
    "moment_named",
    "number",
    "stamp",
    "utc",
]


class Timer(Protocol):
    """What `Clock.call_at` returns: something to cancel."""

    def cancel(self) -> None:
        """Forget the call; does nothing if it was made already."""


class Clock(Protocol):
    """Where the whole package reads the time.

    A clock may have a method `boot() -> Boot` as well; see `boot_of`.
    """

    def monotonic(self) -> float:
        """Seconds that never jump, from an arbitrary start."""

    def wall(self) -> float:
        """Seconds since 1970-01-01 UTC; may jump either way."""

    async def sleep(self, seconds: float) -> None:
        """Return after that many monotonic seconds."""

    def call_at(self, when: float, callback: Callable[..., object], *args: Any) -> Timer:
        """Call back in the running loop at that monotonic moment (at once if past)."""


class Boot(NamedTuple):
    """A moment as the machine counts it."""

    id: str
    """Which start of the machine is meant; unlike that of any other start or machine."""
    seconds: float
    """Since that start, times asleep included; never goes back."""


@functools.cache
def _boot_id() -> str:
    """The system's name for this start of the machine. Where it has none, one that holds for
    this process: its moments can't be compared with those of another one then.
    """
    with contextlib.suppress(OSError, UnicodeDecodeError):
        text = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        if len(found := text.strip().replace("-", "")) == 32 and found.isalnum():
            return found[:16]
    return secrets.token_hex(8)


_BOOT_TIME = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", None))
_ROUNDING = 1e-3
"""Seconds by which two moments may seem to be the wrong way round: sums of floats."""
_PROCESS = secrets.token_hex(6)


def _own_boot(clock: Clock) -> Boot:
    # Not that of a process that was forked from this one, whose clock goes another way.
    return Boot(f"{_PROCESS}-{os.getpid()}-{id(clock):x}", clock.monotonic())


def boot_of(clock: Clock) -> Boot:
    """What `clock.boot()` says, or for a clock without it, its own monotonic time."""
    boot: Callable[[], Boot] | None = getattr(clock, "boot", None)
    return boot() if boot is not None else _own_boot(clock)


class Stamp(NamedTuple):
    """When something was written, for whoever reads it in another process.

    >>> clock = VirtualClock()
    >>> written = stamp(clock)
    >>> clock.advance(10.0)
    >>> clock.jump_wall(7200.0)
    >>> written.age(clock), written.moved(clock)
    (10.0, 7200.0)
    >>> clock.reboot()
    >>> written.age(clock), written.moved(clock)
    (7210.0, None)
    """

    wall: float
    boot_id: str = ""
    """Empty where it was not written."""
    boot_at: float = 0.0

    def counted(self, clock: Clock) -> bool:
        """Does the machine's own count reach back to it?"""
        boot = boot_of(clock)
        # A count that went back is another one, whatever it calls itself.
        return boot.id == self.boot_id and boot.seconds >= self.boot_at - _ROUNDING

    def age(self, clock: Clock) -> float:
        """Seconds since: by the machine's own count where that reaches back so far, else by
        the wall clock, and 0 where that was set back to before."""
        if self.counted(clock):
            return max(0.0, boot_of(clock).seconds - self.boot_at)
        return max(0.0, clock.wall() - self.wall)

    def moved(self, clock: Clock) -> float | None:
        """Seconds by which the wall clock was set forward since (negative: back); None where
        that can't be known: the machine was started anew, and the wall clock is not behind.
        """
        by_wall = clock.wall() - self.wall
        if self.counted(clock):
            return by_wall - self.age(clock)
        return by_wall if by_wall < 0 else None


def number(seconds: float) -> str:
    """A number of seconds for people: three digits, or whole seconds; never with an exponent.

    >>> number(0.0512345), number(2.0), number(3600.0)
    ('0.0512', '2', '3600')
    """
    return f"{seconds:.3g}" if seconds < 1000 else f"{seconds:.0f}"


def stamp(clock: Clock) -> Stamp:
    """This moment."""
    return Stamp(clock.wall(), *boot_of(clock))


class SystemClock:
    """The machine's time and the running loop's timers."""

    __slots__ = ()

    monotonic: Final = staticmethod(time.monotonic)
    wall: Final = staticmethod(time.time)

    def boot(self) -> Boot:
        """Linux names each start of the machine, and counts the seconds since."""
        if _BOOT_TIME is None:
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


class _VirtualTimer:
    __slots__ = ("args", "callback", "clock", "live")

    def __init__(
        self, clock: VirtualClock, callback: Callable[..., object], args: tuple[Any, ...]
    ) -> None:
        self.clock = clock
        self.callback = callback
        self.args = args
        self.live = True
        """Neither made nor cancelled."""

    def cancel(self) -> None:
        if self.live:
            self.live = False
            self.args = ()
            self.clock._cancelled_one()


class VirtualClock:
    """Time that moves only when told to: for tests and simulations.

    >>> clock = VirtualClock()
    >>> _ = clock.call_at(5.0, print, "five seconds later")
    >>> clock.advance(10.0)
    five seconds later
    >>> clock.monotonic()
    10.0
    """

    def __init__(
        self, *, start: float = 0.0, wall: float = 1_790_000_000.0, boot: Boot | None = None
    ) -> None:
        """`boot`: what the machine counts at `start`; None: it was started just for this."""
        self._now = start
        self._wall_offset = wall - start
        boot = boot or Boot(f"virtual-{secrets.token_hex(4)}", start)
        self._boot_id, self._boot_offset = boot.id, boot.seconds - start
        self._timers: list[tuple[float, int, _VirtualTimer]] = []
        self._dead = 0
        """Cancelled timers that still lie in the heap."""
        self._order = itertools.count()

    def monotonic(self) -> float:
        """Seconds since `start`."""
        return self._now

    def wall(self) -> float:
        """Wall seconds: they move with monotonic time, and by `jump_wall`."""
        return self._now + self._wall_offset

    def jump_wall(self, seconds: float) -> None:
        """Set the wall clock forward or back, as an operator or NTP would."""
        self._wall_offset += seconds

    def boot(self) -> Boot:
        """What the machine counts."""
        return Boot(self._boot_id, self._now + self._boot_offset)

    def reboot(self) -> None:
        """Start the machine anew, as far as `boot` says."""
        self._boot_id = f"virtual-{secrets.token_hex(4)}"

    def call_at(self, when: float, callback: Callable[..., object], *args: Any) -> Timer:
        """Call back when time reaches `when`; in the next turn of a running loop if past."""
        timer = _VirtualTimer(self, callback, args)
        heapq.heappush(self._timers, (when, next(self._order), timer))
        if when <= self._now:
            with contextlib.suppress(RuntimeError):  # without a loop, when time moves next
                asyncio.get_running_loop().call_soon(self.advance, 0.0)
        return timer

    def _cancelled_one(self) -> None:
        self._dead += 1
        # A deadline is nearly always cancelled long before its time: sweep in bulk.
        if self._dead > 1000 and self._dead * 2 > len(self._timers):
            self._timers = [entry for entry in self._timers if entry[2].live]
            heapq.heapify(self._timers)
            self._dead = 0

    async def sleep(self, seconds: float) -> None:
        """Return once time was advanced by that much."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        timer = self.call_at(self._now + seconds, _set_done, done)
        try:
            await done
        finally:
            timer.cancel()

    def next_timer(self) -> float | None:
        """The moment of the next live timer, or None."""
        while self._timers and not self._timers[0][2].live:
            heapq.heappop(self._timers)
            self._dead -= 1
        return self._timers[0][0] if self._timers else None

    def advance(self, seconds: float) -> None:
        """Move time on, making each due call at its own moment, in order.

        Raises ValueError for a negative number: monotonic time never goes back.
        """
        if not seconds >= 0:
            raise ValueError(f"time can't be advanced by {seconds}")
        self._advance_to(self._now + seconds)

    def _advance_to(self, end: float) -> None:
        while (when := self.next_timer()) is not None and when <= end:
            _, _, timer = heapq.heappop(self._timers)
            timer.live = False
            self._now = max(self._now, when)
            timer.callback(*timer.args)
        # Not back, should a callback have advanced time itself.
        self._now = max(self._now, end)

    async def elapse(self, seconds: float, *, turns: int = 20) -> None:
        """Advance timer by timer, letting the loop run `turns` times at each.

        Tasks woken by one timer get to run, and to set the next, before time goes on.
        """
        if not seconds >= 0:
            raise ValueError(f"time can't be advanced by {seconds}")
        end = self._now + seconds
        await self.settle(turns)
        while (when := self.next_timer()) is not None and when <= end:
            self._advance_to(when)
            await self.settle(turns)
        self._advance_to(end)
        await self.settle(turns)

    @staticmethod
    async def settle(turns: int = 20) -> None:
        """Let the loop run a number of times, so that woken tasks come to rest."""
        for _ in range(turns):
            await asyncio.sleep(0)


def _set_done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class SingleTimer:
    """At most one pending call of one callback, which may be moved.

    A pending call that is cancelled or replaced is not made. The callback takes no arguments,
    and may set the timer again.

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
        """Monotonic moment of the pending call; inf where none is pending. Read it only."""

    def set(self, when: float) -> None:
        """Call back at that monotonic moment and at no other; inf: not at all."""
        if self._timer is not None:
            self._timer.cancel()
        self.when = when
        self._timer = None if when == math.inf else self._clock.call_at(when, self._fire)

    def set_no_later(self, when: float) -> None:
        """Call back at that monotonic moment, unless an earlier call is pending."""
        if when < self.when:
            self.set(when)

    def cancel(self) -> None:
        """Make no call until it is set again."""
        self.set(math.inf)

    def hold(self) -> None:
        """Make no call until it is `set` again, whatever `set_no_later` says meanwhile."""
        self.cancel()
        self.when = -math.inf

    def _fire(self) -> None:
        self._timer = None
        self.when = math.inf
        self._callback()


class Timed(Protocol):
    """What a `SharedTimer` looks after; hashed by what it is."""

    ends: float
    """The monotonic moment at which `due` is to be called; the timer's to write."""

    def due(self, now: float) -> None:
        """The moment has come. Whoever wants another one says so to the timer."""


class SharedTimer:
    """One timer for many moments, most of which are called off before they come."""

    __slots__ = ("_timer", "clock", "running")

    def __init__(self, clock: Clock) -> None:
        self.clock: Clock = clock
        self.running: dict[Timed, None] = {}
        """What is looked after."""
        self._timer = SingleTimer(clock, self._look)  # no later than the first of them

    def set(self, one: Timed, moment: float) -> None:
        """Call its `due` at that moment, and not at the one before."""
        one.ends = moment
        self.running[one] = None
        if moment < self._timer.when:
            self._timer.set(moment)

    def drop(self, one: Timed) -> bool:
        """Don't call it; whether that was still to come."""
        # The timer stays, though it may find nothing: the next one is about to come.
        return self.running.pop(one, self) is None

    def cancel(self) -> None:
        """Call nobody before something is set again."""
        self._timer.cancel()

    def _look(self) -> None:
        now = self.clock.monotonic()
        for one in [one for one in self.running if one.ends <= now]:
            del self.running[one]
            one.due(now)
        if self.running:
            self._timer.set_no_later(min(one.ends for one in self.running))


class Deadline:
    """The limit that `deadline` sets; it may be moved while it is in force."""

    __slots__ = ("_clock", "_ended", "_task", "_timer", "fired")

    def __init__(self, clock: Clock, task: asyncio.Task[Any]) -> None:
        self._clock = clock
        self._task = task
        self._timer: Timer | None = None
        self._ended = False
        self.fired: bool = False

    def move(self, seconds: float | None) -> None:
        """Let it end so long from now instead; None: not before it is moved again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if seconds is not None and not (self.fired or self._ended):
            self._timer = self._clock.call_at(self._clock.monotonic() + seconds, self.fire)

    def end(self) -> None:
        """In force no more, and not to be moved: the task goes on to other things."""
        self.move(None)
        self._ended = True

    def fire(self) -> None:
        """The time is over: cancel the task, which finds `fired` set."""
        if self._ended:
            return
        loop = self._task.get_loop()
        if asyncio.current_task(loop) is self._task:
            # The body moved a virtual clock itself. Cancelled while it runs, a task meets
            # the cancellation at its next await, which may be long after this deadline.
            self._timer = loop.call_soon(self.fire)
            return
        self.fired = True
        self._task.cancel()


@contextlib.asynccontextmanager
async def deadline(clock: Clock, seconds: float | None) -> AsyncIterator[Deadline]:
    """`asyncio.timeout` by an injected clock: raises TimeoutError after that long.

    The task is cancelled from the timer; a cancellation that came from elsewhere in the
    same moment is not swallowed (Task.uncancel tells the two apart). None: no limit until
    one is set with `move`.
    """
    task = asyncio.current_task()
    if task is None:  # pragma: no cover - `async with` always runs inside a task
        raise RuntimeError("deadline() needs a running task")
    limit = Deadline(clock, task)
    before = task.cancelling()
    limit.move(seconds)
    try:
        yield limit
    except asyncio.CancelledError:
        if limit.fired and task.uncancel() <= before:
            raise TimeoutError from None
        raise
    except BaseException:
        # The body made something else of our cancellation: it is over, take it back.
        if limit.fired:
            task.uncancel()
        raise
    else:
        # The body caught our cancellation and went on: it is over, take it back.
        if limit.fired:
            task.uncancel()
    finally:
        limit.end()


def moment_named(host: str, until: datetime | float) -> float:
    """When a block of the host ends, in wall seconds. Raises ConfigError for what is no moment.

    A datetime without a time zone is none: read as local time and meant as UTC it would end the
    block hours early.
    """
    wall = until.timestamp() if isinstance(until, datetime) else until
    known = isinstance(wall, int | float) and not math.isnan(wall)
    if not known or (isinstance(until, datetime) and until.utcoffset() is None):
        remedy = "give wall seconds, or a datetime with its time zone"
        raise ConfigError(f"block of {host}: until={until} is no moment; {remedy}")
    return wall
