"""`VirtualClock`: time that moves only when it is advanced."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import secrets
from collections.abc import Callable
from typing import Any

import msgspec

from gatekeeper.clock import Boot, Timer


class _VirtualTimer(msgspec.Struct, eq=False):
    clock: VirtualClock
    callback: Callable[..., object]
    args: tuple[Any, ...]
    live: bool = True
    """The call was neither made nor cancelled."""

    def cancel(self) -> None:
        if self.live:
            self.live = False
            self.args = ()
            self.clock._note_cancelled()


class VirtualClock:
    """A clock that moves only when it is advanced: for tests and simulations.

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
        """`boot`: the machine's boot as of `start`; None: it booted at `start`."""
        self._now = start
        self._wall_offset = wall - start
        boot = boot or Boot(f"virtual-{secrets.token_hex(4)}", start)
        self._boot_id, self._boot_offset = boot.id, boot.seconds - start
        self._timers: list[tuple[float, int, _VirtualTimer]] = []
        self._cancelled = 0
        """The number of cancelled timers that are still in the heap."""
        self._sequence = itertools.count()

    def monotonic(self) -> float:
        """Return monotonic seconds, which begin with `start`."""
        return self._now

    def wall(self) -> float:
        """Return wall seconds: they move with monotonic time, and by `jump_wall`."""
        return self._now + self._wall_offset

    def jump_wall(self, seconds: float) -> None:
        """Set the wall clock forward or back, as an operator or NTP would."""
        self._wall_offset += seconds

    def boot(self) -> Boot:
        """Return the boot's id and the seconds since."""
        return Boot(self._boot_id, self._now + self._boot_offset)

    def reboot(self) -> None:
        """Simulate a reboot: `boot` has another id from now on."""
        self._boot_id = f"virtual-{secrets.token_hex(4)}"

    def call_at(self, when: float, callback: Callable[..., object], *args: Any) -> Timer:
        """Call back when time reaches `when`; in a running loop's next iteration if past."""
        timer = _VirtualTimer(self, callback, args)
        heapq.heappush(self._timers, (when, next(self._sequence), timer))
        if when <= self._now:
            with contextlib.suppress(RuntimeError):  # no loop: called when time next moves
                asyncio.get_running_loop().call_soon(self.advance, 0.0)
        return timer

    def _note_cancelled(self) -> None:
        self._cancelled += 1
        # Most timers are cancelled long before they are due: remove them in bulk.
        if self._cancelled > 1000 and self._cancelled * 2 > len(self._timers):
            self._timers = [entry for entry in self._timers if entry[2].live]
            heapq.heapify(self._timers)
            self._cancelled = 0

    async def sleep(self, seconds: float) -> None:
        """Return once time has been advanced by that much."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        done = asyncio.Event()
        timer = self.call_at(self._now + seconds, done.set)
        try:
            await done.wait()
        finally:
            timer.cancel()

    def next_timer(self) -> float | None:
        """Return the moment of the next live timer, or None if there is none."""
        while self._timers and not self._timers[0][2].live:
            heapq.heappop(self._timers)
            self._cancelled -= 1
        return self._timers[0][0] if self._timers else None

    def advance(self, seconds: float) -> None:
        """Advance time, making each due call at its own moment, in order.

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
        # A callback may have advanced time beyond `end` itself.
        self._now = max(self._now, end)

    async def elapse(self, seconds: float, *, turns: int = 20) -> None:
        """Advance timer by timer, running the loop `turns` times at each.

        Tasks woken by one timer can run, and set the next timer, before time goes on.
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
        """Run the loop a number of times, so that woken tasks finish or wait again."""
        for _ in range(turns):
            await asyncio.sleep(0)
