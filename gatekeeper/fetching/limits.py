"""Limits on retrievals: how long each may take, how many run concurrently, and which goes next.

Nearly every time limit is cancelled long before it is reached, so none has its own timer: all of
them use a `SharedTimer`.
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
"""The deadline of the request that this context sends."""


class RetrievalDeadline:
    """Limits the network time of one retrieval; use `with` around each of its requests.

    Waiting for turns, for slots and for a place in the connection pool is not network time and
    does not count. When the time is over, the task is cancelled and the block raises TimeoutError.
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
        """Start of the current phase; None: no network time is counted."""
        self._limit = _NEVER
        """End of the current phase."""
        self.ends: float = _NEVER
        """The timer's moment: `_limit`, or the end of a window of the body before that."""
        self._octets = 0
        """Octets of the body received in the current window."""
        self._asked_at = 0.0
        self._task: asyncio.Task[object] | None = None
        self._before = 0
        self._deadline: Deadline | None = None
        self.connected: bool = False

    def __deepcopy__(self, _: object) -> Self:
        """Return self: mocks of aiohttp deep-copy their arguments, and a task can't be copied."""
        return self

    @property
    def used(self) -> float:
        """Network seconds used so far."""
        return self._config.total_timeout - self._left

    def __enter__(self) -> None:
        """Begin a request of the current task, with the phase of connecting."""
        task = asyncio.current_task(self._loop)
        if task is None:  # pragma: no cover - awaiting a response requires a task
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
        """End the request. Raises TimeoutError in place of this deadline's own cancellation."""
        self.queued()
        task, self._task = self._task, None
        deadline, self._deadline = self._deadline, None
        if deadline is None or task is None:
            return
        deadline.end()
        # The cancellation request is withdrawn even if the block turned it into another error.
        ours = deadline.fired and task.uncancel() <= self._before
        if ours and isinstance(error, asyncio.CancelledError):
            raise TimeoutError from None

    def connecting(self) -> None:
        """Begin the phase of name resolution, TCP and TLS."""
        self._phase(self._config.connect_timeout)

    def queued(self) -> None:
        """Stop counting, as the request waits within this process (for the pool, for example)."""
        self._begin(self._alarm.clock.monotonic(), 0.0)
        self._since = None
        self._alarm.drop(self)

    def sending(self) -> None:
        """Begin the phase up to the first octet of the response head."""
        self.connected = True
        self._asked_at = self._phase(self._config.first_byte_timeout)

    def reading(self) -> float | None:
        """Begin the phase of the body. Return the seconds from sending to the response head, or
        None if `sending` was not called."""
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
        """Count octets of the body that have arrived."""
        self._octets += octets

    def _phase(self, seconds: float) -> float:
        now = self._alarm.clock.monotonic()
        self._begin(now, seconds)
        self._alarm.set(self, self._limit)
        return now

    def _begin(self, now: float, seconds: float) -> None:
        """Begin a phase of at most so many seconds, and count the time of the previous one."""
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
        """Called at the end of the phase, or of a window in which the body was read."""
        config = self._config
        # A dripping body must not occupy a slot: sock_read never fires on it.
        if now < self._limit and self._octets >= config.min_rate * config.min_rate_window:
            self._alarm.set(self, self._limit)
            self._next_window(now)
        elif self._task is not None and self._deadline is None:
            self._deadline = Deadline(self._alarm.clock, self._task)
            self._deadline.fire()


_PATIENCE: Final = 0.25
_FEWEST, _MOST = 4, 24
"""Retrievals that may start, and get a slot, per iteration of the loop: from `_FEWEST` if they fail
to `_MOST` (the initial value) if they are answered. Those of origins that answered before do not
count."""
SLOW_FACTOR: Final = 19
"""Places in the slow lane per slot."""


class PlaceQueue:
    """A semaphore with priorities.

    Origins that answered before go before unknown ones, and these before those that failed
    (`precedence`). Of the unknown ones alternately the latest and the first is next, because
    many dead ones may be queued before one that answers.

    Per iteration of the event loop only `per_iteration` places are given to the latter two
    groups, so that other tasks run in between.
    """

    def __init__(self, most: int, *, per_iteration: int = sys.maxsize) -> None:
        self.free: int = most
        self.per_iteration: int = per_iteration
        self._went_in = 0
        """Places given during this iteration that count for `per_iteration`."""
        self._waiting: tuple[deque[asyncio.Future[None]], ...] = (deque(), deque(), deque())
        """The waiters of each rank of `precedence`."""
        self._latest = False
        """True if the latest unknown origin was served last, so that the first is next."""

    def take_nowait(self) -> bool:
        """Take a place and return True, if one is free and no waiter has precedence."""
        rank = precedence.get()
        if self.free > 0 and not any(self._waiting[: rank + 1]) and self._may(rank):
            self.free -= 1
            return True
        return False

    async def take(self) -> None:
        """Wait for a place and take it, after `take_nowait` returned False."""
        waiting = self._waiting[precedence.get()]
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting.append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place.cancelled():
                with suppress(ValueError):  # `_hand_out` may have removed it already
                    waiting.remove(place)
            else:  # the place was given just before the cancellation
                self.give()
            raise

    def give(self) -> None:
        """Release a place, to the next waiter if there is one."""
        self.free += 1
        if any(self._waiting):
            self._hand_out()

    def _may(self, rank: int) -> bool:
        """Return True, and count it, if a place may be given to that rank in this iteration."""
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
    """Bounds concurrent retrievals such that dead hosts do not delay living ones.

    A retrieval that is not finished within a quarter of a second gives its slot to another and
    goes on in a slow lane, which has nineteen times as many places; it keeps its slot only if
    that is full too. Otherwise two hundred silent hosts would delay all others by ten seconds.
    Only a few retrievals start per iteration of the event loop: thousands that fail immediately
    would leave it no time for the pages.

    A retrieval has its host's turn before it waits for a slot. Of the requests that may be in
    flight (`pacing.max_in_flight`), retrievals on the network hold half at most, and those that
    wait for a slot a quarter: one quarter remains for pages.
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
        """Retrievals on the network now, in slots and in the slow lane."""

    def ended(self, *, answered: bool) -> None:
        """Adapt the number of starts per iteration to the end of a request.

        After an answer more may start, because the waiters for those files also hold up pages
        of known hosts; after a failure fewer, because those cost as much and yield nothing.
        """
        each = self.per_iteration
        each = min(_MOST, each + 1) if answered else max(_FEWEST, each // 2)
        self.per_iteration = self._entries.per_iteration = each

    def with_turn(self, turn: AbstractAsyncContextManager[HostTurn]) -> TurnAndSlot:
        """Return a context manager that acquires the turn, then a slot, and holds both."""
        return TurnAndSlot(self, self._entries, turn)

    def adjust(self, max_in_flight: int) -> None:
        """Apply a changed `max_in_flight`; places in use are kept."""
        before, self._in_flight = self._in_flight, max_in_flight
        self.free += min(self._most, _half(max_in_flight)) - min(self._most, _half(before))
        self.slow_free += self._slow(max_in_flight) - self._slow(before)
        self._entries.free += _quarter(max_in_flight) - _quarter(before)

    def _slow(self, max_in_flight: int) -> int:
        most = self._most
        room = _half(max_in_flight) - min(most, _half(max_in_flight))
        return min(within_files(most * (1 + SLOW_FACTOR)) - most, room)


class TurnAndSlot:
    """The context manager of a retrieval's turn and slot, for one `async with`.

    Until it has a slot it holds one of the entry places, which are for retrievals with a turn or
    about to get one. If its turn does not come soon, it gives that place to another.
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
        alarm.drop(self)  # from here on it keeps its entry place until it has a slot
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
        """Release the entry place, if it is still held."""
        if self._entered:
            self._entered = False
            self._entries.give()

    def due(self, now: float) -> None:
        """Called when the turn, or with a slot the end of the retrieval, is late.

        Release the entry place; or move to the slow lane if it has room, else check again later.
        """
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
    """Return the wanted number of retrievals, or fewer to use at most half of the limit of open
    files."""
    try:
        import resource  # noqa: PLC0415 - not on every system
    except ImportError:
        return wanted
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return wanted
    return min(wanted, max(wanted // (1 + SLOW_FACTOR), files // 2))
