"""How long one retrieval may take: a limit for each phase on the network, and one in all.

Nearly every limit is over long before its time, so none has a timer of its own: an `Alarm`
has one for all, set for the earliest, and looks at them when it goes off.
"""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from types import TracebackType
from typing import Final, Protocol, Self

from gatekeeper.clock import Clock, Deadline, Timer
from gatekeeper.config import FetchConfig

__all__ = ["Alarm", "Timed", "Watch", "watching"]

_NEVER: Final = float("inf")


class Timed(Protocol):
    """What an `Alarm` looks after; hashed by what it is."""

    ends: float
    """The monotonic moment at which `due` is to be called; the alarm's to write."""

    def due(self, now: float) -> None:
        """The moment has come. Whoever wants another one says so to the alarm."""


class Alarm:
    """One timer for many moments, most of which are called off before they come."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._running: dict[Timed, None] = {}
        self._timer: Timer | None = None
        self._armed = _NEVER
        """The timer goes off then, no later than the first of them."""

    def set(self, one: Timed, moment: float) -> None:
        """Call its `due` at that moment, and not at the one before."""
        one.ends = moment
        self._running[one] = None
        if moment < self._armed:
            self._arm(moment)

    def drop(self, one: Timed) -> None:
        """Don't call it."""
        # The timer stays, though it may find nothing: the next one is about to come.
        self._running.pop(one, None)

    def _arm(self, moment: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._armed = moment
        self._timer = self.clock.call_at(moment, self._look)

    def _look(self) -> None:
        self._timer, self._armed = None, _NEVER
        now = self.clock.monotonic()
        for one in [one for one in self._running if one.ends <= now]:
            del self._running[one]
            one.due(now)
        if self._running:
            first = min(one.ends for one in self._running)
            if first < self._armed:
                self._arm(first)


watching: ContextVar[Watch | None] = ContextVar("gatekeeper_watching", default=None)
"""The watch over the request that this context sends."""


class Watch:
    """The network time of one retrieval; `with watch:` around each of its requests.

    Waiting for turns, for slots and for a place in the connection pool is not network time
    and is not counted. When the time is over, the task is cancelled and the block raises
    TimeoutError.
    """

    __slots__ = (
        "_alarm",
        "_asked_at",
        "_before",
        "_config",
        "_deadline",
        "_left",
        "_limit",
        "_loop",
        "_octets",
        "_since",
        "_task",
        "connected",
        "ends",
    )

    def __init__(self, alarm: Alarm, config: FetchConfig, loop: asyncio.AbstractEventLoop) -> None:
        self._alarm = alarm
        self._config = config
        self._loop = loop
        self._left = config.total_timeout
        self._since: float | None = None
        """Network time runs since that moment."""
        self._limit = self.ends = _NEVER
        """The phase is over then; `ends` may be the end of a window before that."""
        self._octets = 0
        """Of the body, in this window."""
        self._asked_at = 0.0
        self._task: asyncio.Task[object] | None = None
        self._before = 0
        self._deadline: Deadline | None = None
        self.connected = False

    def __deepcopy__(self, _: object) -> Self:
        """Itself: stand-ins for aiohttp copy what they are given, and a task can't be copied."""
        return self

    @property
    def used(self) -> float:
        """Network seconds so far."""
        return self._config.total_timeout - self._left

    def __enter__(self) -> None:
        """A request goes out from this task."""
        task = asyncio.current_task(self._loop)
        if task is None:  # pragma: no cover - whoever awaits an answer runs inside a task
            raise RuntimeError("a Watch needs a running task")
        self._task, self._before = task, task.cancelling()
        self.connected = False
        self.connecting()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """It is over. Raises TimeoutError in place of our own cancellation, and no other."""
        self.queued()
        task, self._task = self._task, None
        deadline, self._deadline = self._deadline, None
        if deadline is None or task is None:
            return
        deadline.end()
        # Taken back whatever the block made of it: the time of this request is over.
        ours = deadline.fired and task.uncancel() <= self._before
        if ours and isinstance(error, asyncio.CancelledError):
            raise TimeoutError from None

    def connecting(self) -> None:
        """Name service, TCP and TLS."""
        self._phase(self._config.connect_timeout)

    def queued(self) -> None:
        """Nothing of ours is on the network: our own pool is full, say."""
        self._count(self._alarm.clock.monotonic())
        self._since = None
        self._alarm.drop(self)

    def sending(self) -> None:
        """Connected: now for the first octet of the head."""
        self.connected = True
        self._asked_at = self._phase(self._config.first_byte_timeout)

    def reading(self) -> float | None:
        """The head has come; the seconds it took, None where the sending was not seen."""
        now = self._phase(self._config.total_timeout)
        took = now - self._asked_at if self.connected else None
        self.connected = True
        self._next_window(now)
        return took

    def received(self, octets: int) -> None:
        """So many octets of the body have come."""
        self._octets += octets

    def _phase(self, seconds: float) -> float:
        now = self._alarm.clock.monotonic()
        self._count(now)
        self._since = now
        self._limit = now + min(seconds, self._left)
        self._alarm.set(self, self._limit)
        return now

    def _count(self, now: float) -> None:
        if self._since is not None:
            self._left = max(0.0, self._left - (now - self._since))

    def _next_window(self, now: float) -> None:
        self._octets = 0
        window = now + self._config.min_rate_window
        if window < self._limit:
            self._alarm.set(self, window)

    def due(self, now: float) -> None:
        """The end of the phase, or of a window in which the body was read."""
        config = self._config
        # A drip must not hold a slot: sock_read alone never fires on one (fetching.md 2.4).
        if now < self._limit and self._octets >= config.min_rate * config.min_rate_window:
            self._alarm.set(self, self._limit)
            self._next_window(now)
        elif self._task is not None and self._deadline is None:
            self._deadline = Deadline(self._alarm.clock, self._task)
            self._deadline.fire()
