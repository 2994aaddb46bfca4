"""Limits on retrievals: how long each may take, how many run at once, and whose turn is next.

Nearly every limit on time is over long before its moment, so none has a timer of its own: a
`SharedTimer` looks after all of them.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from contextlib import AbstractAsyncContextManager, suppress
from contextvars import ContextVar
from types import TracebackType
from typing import Final, Self

from gatekeeper.clock import Clock, Deadline, SharedTimer
from gatekeeper.config import FetchConfig, PacingConfig
from gatekeeper.fetching.outcomes import ANSWERED, UNKNOWN_ORIGIN, HostTurn, precedence

_NEVER: Final = float("inf")


watching: ContextVar[RetrievalDeadline | None] = ContextVar("gatekeeper_watching", default=None)
"""The watch over the request that this context sends."""


class RetrievalDeadline:
    """The network time of one retrieval; `with watch:` around each of its requests.

    Waiting for turns, for slots and for a place in the connection pool is not network time
    and is not counted. When the time is over, the task is cancelled and the block raises
    TimeoutError.
    """

    __slots__ = (
        *("_alarm", "_asked_at", "_before", "_config", "_deadline", "_left", "_limit"),
        *("_loop", "_octets", "_since", "_task", "connected", "ends"),
    )

    def __init__(
        self, alarm: SharedTimer, config: FetchConfig, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._alarm = alarm
        self._config = config
        self._loop = loop
        self._left = config.total_timeout
        self._since: float | None = None
        """Network time runs since that moment."""
        self._limit = _NEVER
        self.ends: float = _NEVER
        """The phase is over then; `ends` may be the end of a window before that."""
        self._octets = 0
        """Of the body, in this window."""
        self._asked_at = 0.0
        self._task: asyncio.Task[object] | None = None
        self._before = 0
        self._deadline: Deadline | None = None
        self.connected: bool = False

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
        self._begin(self._alarm.clock.monotonic(), 0.0)
        self._since = None
        self._alarm.drop(self)

    def sending(self) -> None:
        """Connected: now for the first octet of the head."""
        self.connected = True
        self._asked_at = self._phase(self._config.first_byte_timeout)

    def reading(self) -> float | None:
        """The head has come; the seconds it took, None where the sending was not seen."""
        config = self._config
        now = self._alarm.clock.monotonic()
        self._begin(now, config.total_timeout)
        self._octets = 0
        window = now + config.min_rate_window
        self._alarm.set(self, min(window, self._limit))
        took = now - self._asked_at if self.connected else None
        self.connected = True
        return took

    def received(self, octets: int) -> None:
        """So many octets of the body have come."""
        self._octets += octets

    def _phase(self, seconds: float) -> float:
        now = self._alarm.clock.monotonic()
        self._begin(now, seconds)
        self._alarm.set(self, self._limit)
        return now

    def _begin(self, now: float, seconds: float) -> None:
        """A phase of so many seconds; those of the one before are counted."""
        since, left = self._since, self._left
        if since is not None:
            left -= now - since
            self._left = left = max(0.0, left)
        self._since = now
        self._limit = now + (min(left, seconds))

    def _next_window(self, now: float) -> None:
        self._octets = 0
        window = now + self._config.min_rate_window
        if window < self._limit:
            self._alarm.set(self, window)

    def due(self, now: float) -> None:
        """The end of the phase, or of a window in which the body was read."""
        config = self._config
        # A drip must not hold a slot: sock_read alone never fires on one.
        if now < self._limit and self._octets >= config.min_rate * config.min_rate_window:
            self._alarm.set(self, self._limit)
            self._next_window(now)
        elif self._task is not None and self._deadline is None:
            self._deadline = Deadline(self._alarm.clock, self._task)
            self._deadline.fire()


_PATIENCE: Final = 0.25
_FEWEST, _MOST = 4, 24
"""Retrievals that begin, and that go on the network, during one iteration of the loop, where they
fail and where they are answered, which is hoped at first; those of origins that answered before
are not counted."""
SLOW_FACTOR: Final = 19
"""Places in the slow lane for each in the fast one."""


class PlaceQueue:
    """A bound on what is done at once, and who goes next.

    Origins that answered before go before unknown ones, and these before those that failed
    (`precedence`); of the unknown by turns the latest and the first, since many dead ones may have
    come before one that answers.

    Only `per_iteration` of the latter two go in during one iteration of the event loop, and
    everybody else has the loop in between.
    """

    def __init__(self, most: int, *, per_iteration: int = sys.maxsize) -> None:
        self.free: int = most
        self.per_iteration: int = per_iteration
        self._went_in = 0
        """During this iteration."""
        self._waiting: tuple[deque[asyncio.Future[None]], ...] = (deque(), deque(), deque())
        self._latest = False
        """Whether the latest unknown one goes next."""

    def take_nowait(self) -> bool:
        """Take a place if one is free and nobody goes before."""
        rank = precedence.get()
        if self.free > 0 and not any(self._waiting[: rank + 1]) and self._may(rank):
            self.free -= 1
            return True
        return False

    async def take(self) -> None:
        """Wait for a place, where `take_nowait` found none."""
        waiting = self._waiting[precedence.get()]
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting.append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place.cancelled():
                with suppress(ValueError):  # `give` may have met it already
                    waiting.remove(place)
            else:  # it was given in the very moment
                self.give()
            raise

    def give(self) -> None:
        """A place is free: to the next who waits."""
        self.free += 1
        if any(self._waiting):
            self._hand_out()

    def _may(self, rank: int) -> bool:
        """Whether one of that rank may be given a place now; it is given if so."""
        if rank == ANSWERED or self.per_iteration == sys.maxsize:
            return True
        if self._went_in >= self.per_iteration:
            return False
        self._went_in += 1
        if self._went_in == 1:
            asyncio.get_running_loop().call_soon(self._next_iteration)
        return True

    def _next_iteration(self) -> None:
        self._went_in = 0
        self._hand_out()

    def _hand_out(self) -> None:
        for rank, waiting in enumerate(self._waiting):
            while waiting and self.free > 0 and (waiting[0].done() or self._may(rank)):
                if rank == UNKNOWN_ORIGIN:
                    self._latest = not self._latest
                place = (
                    waiting.pop() if rank == UNKNOWN_ORIGIN and self._latest else waiting.popleft()
                )
                if not place.done():
                    self.free -= 1
                    place.set_result(None)


class Slots(PlaceQueue):
    """A bound on retrievals at once, in which the dead don't crowd out the living.

    A retrieval that has not come to its end within a quarter of a second leaves its slot to
    another and goes on in a slow lane, which has nineteen times as many places; only when that
    is full too does it keep its slot. Otherwise two hundred silent hosts would be a wall of ten
    seconds before everybody else. And a few begin during one iteration of the event loop: a list
    of thousands, each of which fails at once, would leave it no time for the pages.

    A retrieval has its host's turn before it waits for a slot. Of the requests that may be in
    flight at once (`pacing.max_in_flight`) those on the network hold half at most, and those
    that wait for a slot a quarter: so one quarter is left to pages.
    """

    def __init__(
        self,
        clock: Clock,
        most: int,
        *,
        patience: float = _PATIENCE,
        max_in_flight: int = PacingConfig().max_in_flight,
    ) -> None:
        self._most = most
        self._in_flight = max_in_flight
        super().__init__(min(most, _half(max_in_flight)), per_iteration=_MOST)
        self.free: int
        self.slow_free: int = self._slow(max_in_flight)
        self._entries = PlaceQueue(_quarter(max_in_flight), per_iteration=_MOST)
        self.alarm: SharedTimer = SharedTimer(clock)
        self.patience = patience
        self.taken = 0
        """Retrievals on the network now, in both lanes."""

    def ended(self, *, answered: bool) -> None:
        """A request came to its end: more may begin at once where they are answered, since who
        waits for those files takes the connections of hosts that are known; fewer where they fail,
        which costs as much and is good for nothing."""
        each = self.per_iteration
        each = min(_MOST, each + 1) if answered else max(_FEWEST, each // 2)
        self.per_iteration = self._entries.per_iteration = each

    def with_turn(self, turn: AbstractAsyncContextManager[HostTurn]) -> TurnAndSlot:
        """Wait for the turn and then for a slot; hold both for the block."""
        return TurnAndSlot(self, self._entries, turn)

    def adjust(self, max_in_flight: int) -> None:
        """Follow another setting; what holds a place keeps it."""
        before, self._in_flight = self._in_flight, max_in_flight
        self.free += min(self._most, _half(max_in_flight)) - min(self._most, _half(before))
        self.slow_free += self._slow(max_in_flight) - self._slow(before)
        self._entries.free += _quarter(max_in_flight) - _quarter(before)

    def _slow(self, max_in_flight: int) -> int:
        most = self._most
        room = _half(max_in_flight) - min(most, _half(max_in_flight))
        return min(within_files(most * (1 + SLOW_FACTOR)) - most, room)


class TurnAndSlot:
    """The turn and then the slot of a retrieval, for one `async with`.

    Before it has a slot it holds a place among those that have a turn, or are about to. One whose
    turn does not come soon gives that place to another: it holds nothing yet.
    """

    __slots__ = ("_entered", "_entries", "_slots", "_slow", "_turn", "ends")

    def __init__(
        self, slots: Slots, entries: PlaceQueue, turn: AbstractAsyncContextManager[HostTurn]
    ) -> None:
        self._slots = slots
        self._entries = entries
        self._turn = turn
        self._entered = self._slow = False
        self.ends: float = 0.0

    async def __aenter__(self) -> HostTurn:
        slots = self._slots
        alarm = slots.alarm
        if not self._entries.take_nowait():
            await self._entries.take()
        self._entered = True
        try:
            alarm.set(self, alarm.clock.monotonic() + slots.patience)
            taken = await self._turn.__aenter__()
        except BaseException:
            alarm.drop(self)
            self._leave()
            raise
        alarm.drop(self)  # it keeps its place until it has a slot
        try:
            if not slots.take_nowait():
                await slots.take()
        except BaseException as error:
            await self._turn.__aexit__(type(error), error, error.__traceback__)
            raise
        finally:
            self._leave()
        slots.taken += 1
        alarm.set(self, alarm.clock.monotonic() + slots.patience)
        return taken

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        slots = self._slots
        slots.taken -= 1
        slots.alarm.drop(self)
        if self._slow:
            slots.slow_free += 1
        else:
            slots.give()
        await self._turn.__aexit__(kind, error, trace)

    def _leave(self) -> None:
        """Give the place to another, once."""
        if self._entered:
            self._entered = False
            self._entries.give()

    def due(self, now: float) -> None:
        """Its turn has not come; or it goes on: step aside if there is room, else look again."""
        slots = self._slots
        if self._entered:
            self._leave()
        elif slots.slow_free > 0:
            slots.slow_free -= 1
            self._slow = True
            slots.give()
        else:
            slots.alarm.set(self, now + slots.patience)


def _half(count: int) -> int:
    return max(1, count // 2)


def _quarter(count: int) -> int:
    return max(1, count // 4)


def within_files(wanted: int) -> int:
    """So many retrievals at once, or as many as half of the open files that we may have."""
    try:
        import resource  # noqa: PLC0415 - not on every system
    except ImportError:
        return wanted
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return wanted
    return min(wanted, max(wanted // (1 + SLOW_FACTOR), files // 2))
