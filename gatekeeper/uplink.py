"""What the pages' answers, failures and silence say about our own network.

A page's head is as good an answer as a robots.txt: it ends a fault of our own, and shows whom
to ask when one is suspected. A request that gets none is a hint; one that can't be connected,
or of which nothing is heard for long while nobody else answers either, is evidence. What it is
worth is for `LocalFaults` to say.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import aiohttp

from gatekeeper.clock import Clock, Timer
from gatekeeper.config import FetchConfig
from gatekeeper.deadlock import Holdings
from gatekeeper.fetching.faults import LocalFaults
from gatekeeper.fetching.outcomes import classify
from gatekeeper.pacing.scheduler import Scheduler

if TYPE_CHECKING:
    from gatekeeper.lease import Lease
else:
    Lease = Any

__all__ = ["Uplink"]

SILENCE: Final = 8.0
"""Seconds without any answer after which requests under way are looked at."""
_IDLE: Final = 60.0
"""Seconds without an answer, nor anything that waits for one, after which nobody looks."""
_USUAL: Final = FetchConfig()


class Uplink:
    """Hears what leases hear, and passes it on; the fault itself is in `faults`."""

    def __init__(
        self, faults: LocalFaults, scheduler: Scheduler, clock: Clock, holdings: Holdings[Lease]
    ) -> None:
        self.faults = faults
        self._scheduler = scheduler
        self._clock = clock
        self._holdings = holdings
        self._timer: Timer | None = None
        self._closed = False
        faults.on_answer = self.wake

    def wake(self) -> None:
        """Something was sent, or answered: look after the open leases for as long as there are
        any, and a while longer."""
        if self._timer is None and not self._closed:
            self._look_at(self._clock.monotonic() + SILENCE)

    def close(self) -> None:
        """Look no more."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def unanswered(self, lease: Lease) -> None:
        """A request ended without an answer, and was counted as an error of its host."""
        host = lease.host
        self.faults.unanswered_by(
            lease.origin,
            began=lease.started_at,
            now=self._clock.monotonic(),
            undo=lambda: self._scheduler.forgive(host),
        )

    def unreached(self, lease: object, error: BaseException) -> None:
        """A request of ours failed with that error: as a lost uplink would make it fail?"""
        origin = getattr(lease, "origin", None)
        if origin is None:
            return  # not a lease of ours
        connected = not isinstance(error, aiohttp.ConnectionTimeoutError)
        if classify(error=error, config=_USUAL, connected=connected).row.local:
            began: float = getattr(lease, "started_at", 0.0)
            self.faults.failed(origin, began=began, now=self._clock.monotonic())

    def _look_at(self, moment: float) -> None:
        self._timer = self._clock.call_at(moment, self._look)

    def _look(self) -> None:
        """Has anybody answered? If not, each request that went out long ago is evidence."""
        self._timer = None
        faults, now = self.faults, self._clock.monotonic()
        if not self._scheduler.busy and now - faults.last_answer >= _IDLE:
            faults.rest()
            return
        faults.sweep_if_many(now)
        moment = faults.last_answer + SILENCE
        if moment <= now:
            moment = now + SILENCE
            for lease in self._holdings.everybody():
                if not lease.awaits_head:
                    continue
                due = lease.started_at + SILENCE
                if due <= now:
                    faults.failed(lease.origin, began=lease.started_at, now=now)
                else:
                    moment = min(moment, due)
        self._look_at(moment)
