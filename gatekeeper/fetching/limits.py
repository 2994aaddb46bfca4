"""Limits on retrievals: how long each may take, how many run concurrently, and which goes next.

Nearly every time limit is cancelled long before it is reached, so none has its own timer: all of
them use a `SharedTimer`.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from contextvars import ContextVar
from types import TracebackType
from typing import Final, Self

from gatekeeper import descriptors
from gatekeeper.clock import Clock, Deadline, SharedTimer
from gatekeeper.config import FetchConfig, PacingConfig
from gatekeeper.fetching.outcomes import ANSWERED, UNKNOWN_ORIGIN, HopLease, precedence

_NEVER: Final = float("inf")


current_deadline: ContextVar[RetrievalDeadline | None] = ContextVar(
    "gatekeeper_watching", default=None
)
"""The deadline of the request that this context sends."""


class RetrievalDeadline:
    """Limits the network time of one retrieval; use `with` around each of its requests.

    Waiting for leases, for slots and for a place in the connection pool is not network time and
    does not count. When the time is over, the task is cancelled and the block raises TimeoutError.
    """

    def __init__(self, timer: SharedTimer, config: FetchConfig) -> None:
        self._timer = timer
        self._config = config
        self._remaining = config.total_timeout
        """Network seconds left before the current phase."""
        self._phase_start: float | None = None
        """Start of the current phase; None: no network time is counted."""
        self._phase_end = _NEVER
        """End of the current phase."""
        self.ends: float = _NEVER
        """The timer's moment: `_phase_end`, or the end of a window of the body before that."""
        self._window_octets = 0
        """Octets of the body received in the current window."""
        self._sent_at = 0.0
        self._deadline: Deadline | None = None
        """Cancels the request under way."""
        self.connected: bool = False
        """True once the request under way has its connection."""
        self.connect_only: bool = False
        """Set by the caller if no request is to be sent."""
        self.most: float = _NEVER
        """Set by the caller: seconds for connecting, and again until the head, if less than
        configured."""
        self.addresses: list[str] = []
        """The addresses dialled for the request under way, by a guarded connector."""

    def __deepcopy__(self, _: object) -> Self:
        """Return self: mocks of aiohttp deep-copy their arguments, and a task can't be copied."""
        return self

    @property
    def used(self) -> float:
        """Network seconds used so far."""
        return self._config.total_timeout - self._remaining

    def __enter__(self) -> None:
        """Begin a request of the current task, with the phase of connecting."""
        self._deadline = Deadline(self._timer.clock, asyncio.current_task())
        self.connected = False
        self.addresses = []
        self.connecting()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the request. Raises TimeoutError in place of this deadline's own cancellation."""
        self.queued()
        deadline, self._deadline = self._deadline, None
        ours = deadline is not None and deadline.end()
        if ours and isinstance(error, asyncio.CancelledError):
            raise TimeoutError from None

    def connecting(self) -> None:
        """Begin the phase of name resolution, TCP and TLS."""
        self._start_phase(min(self._config.connect_timeout, self.most))

    def queued(self) -> None:
        """Stop counting, as the request waits within this process (for the pool, for example)."""
        self._start_phase(0.0)
        self._phase_start = None
        self._timer.drop(self)

    def sending(self) -> None:
        """Begin the phase up to the first octet of the response head."""
        self.connected = True
        self._sent_at = self._start_phase(min(self._config.first_byte_timeout, self.most))

    def reading(self) -> float | None:
        """Begin the phase of the body. Return the seconds from sending to the response head, or
        None if `sending` was not called."""
        now = self._start_phase(self._config.total_timeout)
        self._start_window(now)
        took = now - self._sent_at if self.connected else None
        self.connected = True
        return took

    def received(self, octets: int) -> None:
        """Count octets of the body that have arrived."""
        self._window_octets += octets

    def _start_phase(self, seconds: float) -> float:
        """Begin a phase of at most so many seconds, and count the time of the previous one. Return
        the monotonic moment."""
        now = self._timer.clock.monotonic()
        if self._phase_start is not None:
            self._remaining = max(0.0, self._remaining - (now - self._phase_start))
        self._phase_start = now
        self._phase_end = now + min(self._remaining, seconds)
        self._timer.set(self, self._phase_end)
        return now

    def _start_window(self, now: float) -> None:
        """Begin a window in which `min_rate` applies to the body."""
        self._window_octets = 0
        self._timer.set(self, min(now + self._config.min_rate_window, self._phase_end))

    def due(self, now: float) -> None:
        """Called at the end of the phase, or of a window in which the body was read."""
        config = self._config
        # A dripping body must not occupy a slot: sock_read never fires on it.
        enough = self._window_octets >= config.min_rate * config.min_rate_window
        if enough and now < self._phase_end:
            self._start_window(now)
        elif self._deadline is not None:
            self._deadline.fire()


_SLOT_SECONDS: Final = 0.25
"""Seconds after which a retrieval goes to the slow lane."""
_MIN_STARTS: Final = 4
_MAX_STARTS: Final = 24
"""Retrievals that may start, and get a slot, per iteration of the loop: down to the minimum if they
fail, up to the maximum (the initial value) if they are answered. Those of origins that answered
before do not count."""
SLOW_FACTOR: Final = 19
"""Places in the slow lane per slot."""


class PrioritySemaphore:
    """A semaphore with priorities.

    Origins that answered before go before unknown ones, and these before those that failed
    (`precedence`). Of the unknown ones alternately the latest and the first is next, because
    many dead ones may be queued before one that answers.

    Per iteration of the event loop only `per_iteration` places are given to the latter two
    groups, so that other tasks run in between.
    """

    def __init__(self, places: int, *, per_iteration: int = sys.maxsize) -> None:
        self.free: int = places
        self.per_iteration: int = per_iteration
        self._given_now = 0
        """Places given during this iteration that count for `per_iteration`."""
        self._waiting: tuple[deque[asyncio.Future[None]], ...] = (deque(), deque(), deque())
        """The waiters of each rank of `precedence`."""
        self._served_latest = False
        """True if the latest unknown origin was served last, so that the first is next."""

    def acquire_nowait(self) -> bool:
        """Take a place and return True, if one is free and no waiter has precedence."""
        rank = precedence.get()
        if self.free > 0 and not any(self._waiting[: rank + 1]) and self._may_give(rank):
            self.free -= 1
            return True
        return False

    async def acquire(self) -> None:
        """Take a place, waiting for one if necessary."""
        if self.acquire_nowait():
            return
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
                self.release()
            raise

    def release(self) -> None:
        """Release a place, to the next waiter if there is one."""
        self.free += 1
        if any(self._waiting):
            self._hand_out()

    def _may_give(self, rank: int) -> bool:
        """Return True, and count it, if a place may be given to that rank in this iteration."""
        if rank == ANSWERED or self.per_iteration == sys.maxsize:
            return True
        if self._given_now >= self.per_iteration:
            return False
        self._given_now += 1
        if self._given_now == 1:
            asyncio.get_running_loop().call_soon(self._next_iteration)
        return True

    def _next_iteration(self) -> None:
        self._given_now = 0
        self._hand_out()

    def _hand_out(self) -> None:
        for rank, waiting in enumerate(self._waiting):
            while waiting and self.free > 0 and (waiting[0].done() or self._may_give(rank)):
                if rank == UNKNOWN_ORIGIN:
                    self._served_latest = not self._served_latest
                place = (
                    waiting.pop()
                    if rank == UNKNOWN_ORIGIN and self._served_latest
                    else waiting.popleft()
                )
                if not place.done():
                    self.free -= 1
                    place.set_result(None)


class Slots(PrioritySemaphore):
    """Bounds concurrent retrievals such that dead hosts do not delay living ones.

    A retrieval that is not finished within a quarter of a second gives its slot to another and
    goes on in a slow lane, which has nineteen times as many places; it keeps its slot only if
    that is full too. Otherwise two hundred silent hosts would delay all others by ten seconds.
    Only a few retrievals start per iteration of the event loop: thousands that fail immediately
    would leave it no time for the pages.

    A retrieval has a lease of its host before it waits for a slot. Of the requests that may be in
    flight (`pacing.max_in_flight`), retrievals on the network hold half at most, and those that
    wait for a slot a quarter: one quarter remains for pages.
    """

    def __init__(
        self,
        clock: Clock,
        max_slots: int,
        *,
        slot_seconds: float = _SLOT_SECONDS,
        max_in_flight: int = PacingConfig().max_in_flight,
    ) -> None:
        self._max_slots = max_slots
        self._shares = self._shares_of(max_in_flight)
        slots, slow, entries = self._shares
        super().__init__(slots, per_iteration=_MAX_STARTS)
        self.free: int
        self.slow_free: int = slow
        self.entry_places: PrioritySemaphore = PrioritySemaphore(entries, per_iteration=_MAX_STARTS)
        self.timer: SharedTimer = SharedTimer(clock)
        self.slot_seconds = slot_seconds
        self.taken: int = 0
        """Retrievals on the network now, in slots and in the slow lane."""

    def ended(self, *, answered: bool) -> None:
        """Adapt the number of starts per iteration to the end of a request.

        After an answer more may start, because the waiters for those files also hold up pages
        of known hosts; after a failure fewer, because those cost as much and yield nothing.
        """
        each = self.per_iteration
        each = min(_MAX_STARTS, each + 1) if answered else max(_MIN_STARTS, each // 2)
        self.per_iteration = self.entry_places.per_iteration = each

    @asynccontextmanager
    async def with_lease(
        self, lease: AbstractAsyncContextManager[HopLease]
    ) -> AsyncIterator[HopLease]:
        """Acquire the lease, then a slot, and hold both during the block.

        Until it has a slot it holds one of the entry places, which are for retrievals with a lease
        or about to get one. If its lease does not come soon, it gives that place to another.
        """
        place, timer = _Place(self), self.timer
        await self.entry_places.acquire()
        place.has_entry = True
        try:
            timer.set(place, timer.clock.monotonic() + self.slot_seconds)
            async with lease as taken:
                timer.drop(place)  # from here on it keeps its entry place until it has a slot
                await self.acquire()
                place.leave_entry()
                self.taken += 1
                timer.set(place, timer.clock.monotonic() + self.slot_seconds)
                try:
                    yield taken
                finally:
                    self.taken -= 1
                    place.leave_slot()
        finally:
            timer.drop(place)
            place.leave_entry()

    def adjust(self, max_in_flight: int) -> None:
        """Apply a changed `max_in_flight`; places in use are kept."""
        before, self._shares = self._shares, self._shares_of(max_in_flight)
        slots, slow, entries = (new - old for new, old in zip(self._shares, before, strict=True))
        self.free += slots
        self.slow_free += slow
        self.entry_places.free += entries

    def _shares_of(self, max_in_flight: int) -> tuple[int, int, int]:
        """Return the numbers of slots, of places in the slow lane, and of entry places."""
        half = max(1, max_in_flight // 2)
        slots = min(self._max_slots, half)
        all_places = within_open_files(self._max_slots * (1 + SLOW_FACTOR))
        slow = min(all_places - self._max_slots, half - slots)
        return slots, slow, max(1, max_in_flight // 4)


class _Place:
    """The place of one retrieval: at first an entry place; then a slot, or one in the slow lane."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self.has_entry = False
        self._slow = False
        self.ends: float = 0.0

    def leave_entry(self) -> None:
        """Release the entry place, if it is still held."""
        if self.has_entry:
            self.has_entry = False
            self._slots.entry_places.release()

    def leave_slot(self) -> None:
        """Release the slot, or the place in the slow lane."""
        self._slots.timer.drop(self)
        if self._slow:
            self._slots.slow_free += 1
        else:
            self._slots.release()

    def due(self, now: float) -> None:
        """Called when the lease, or with a slot the end of the retrieval, is late.

        Release the entry place; or move to the slow lane if it has room, else check again later.
        """
        slots = self._slots
        if self.has_entry:
            self.leave_entry()
        elif slots.slow_free > 0:
            slots.slow_free -= 1
            self._slow = True
            slots.release()
        else:
            slots.timer.set(self, now + slots.slot_seconds)


def within_open_files(wanted: int) -> int:
    """Return the wanted number of retrievals, or fewer to use at most half of the limit of open
    files."""
    files = descriptors.open_files_limit()
    if files is None:
        return wanted
    return min(wanted, max(wanted // (1 + SLOW_FACTOR), files // 2))
