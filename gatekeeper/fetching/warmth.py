"""Taking records out of `warm` when their soft life is over, so that no reader needs a clock.

One timer for all of them, and a look at all of them when it fires: cheaper than a heap for
what is read a million times a second and expires once a day. It fires late by a second, or
by a little more where there are many: soft expiry comes long before the hard one, which
`Directory.get` keeps to the moment.
"""

from __future__ import annotations

from gatekeeper.clock import Clock, Timer
from gatekeeper.fetching.records import Record

__all__ = ["Sweeper"]

_LEAST = 1.0
"""Seconds between two looks."""
_AT_ONCE = 10_000
"""Records whose look costs about half a millisecond: a second more between two for each."""


class Sweeper:
    """Empties a dictionary of what is no longer fresh."""

    def __init__(self, warm: dict[str, Record], clock: Clock) -> None:
        self._warm = warm
        self._clock = clock
        self._timer: Timer | None = None
        self._at = 0.0

    def expect(self, moment: float) -> None:
        """Something is no longer fresh at that monotonic moment."""
        if self._timer is not None:
            if moment >= self._at - _LEAST:
                return
            self._timer.cancel()
        self._at = max(moment, self._clock.monotonic() + _LEAST)
        self._timer = self._clock.call_at(self._at, self._sweep)

    def close(self) -> None:
        """Forget everything, and the timer."""
        while self._warm:
            self._warm.popitem()[1].retire()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _sweep(self) -> None:
        self._timer = None
        now = self._clock.monotonic()
        for origin in [o for o, record in self._warm.items() if record.fresh_until <= now]:
            self._warm.pop(origin).retire()
        if self._warm:
            earliest = min(record.fresh_until for record in self._warm.values())
            self.expect(max(earliest, now + _LEAST * (1 + len(self._warm) // _AT_ONCE)))
