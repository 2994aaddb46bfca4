"""Telling our own uplink's failure from the sites' (fetching.md section 6).

One lost uplink must not write "unreachable" on every origin and start thousands of
30-day timers. So a failure that our own side could have caused is a *suspect* until
something contradicts it: any answer from the network that came while, or after, the
failed attempt was under way. When the suspects of ten seconds are many enough, the fault
is ours: nothing is recorded, what was recorded of the suspects is undone, and a single
probe at a time, with back-off, finds out when it is over.
"""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Final

__all__ = ["LocalFaults"]

WINDOW: Final = 10.0
"""Seconds over which origins are counted."""
LEAST: Final = 20
"""Distinct origins that must have been tried."""
SHARE: Final = 0.30
"""Share of them that must have failed."""
_FIRST_PROBE: Final = 1.0
_LAST_PROBE: Final = 60.0
_MOST: Final = 10_000
"""Origins remembered for the window."""


class LocalFaults:
    """Counts who failed lately; says when it is us. Times are monotonic seconds."""

    def __init__(
        self, rng: random.Random, on_change: Callable[[bool], object] = lambda _on: None
    ) -> None:
        """`on_change` is told when a fault begins (True) and when it is over."""
        self._rng = rng
        self._on_change = on_change
        self._tried: OrderedDict[str, float] = OrderedDict()
        """Origin -> when its last attempt ended, oldest first."""
        self._suspects: dict[str, Callable[[], object]] = {}
        """Origin -> how to undo what was recorded of its failure."""
        self._probes: deque[str] = deque(maxlen=LEAST)
        """Suspects of the running fault, to be asked by turns."""
        self._last_answer = float("-inf")
        self._probe_at = 0.0
        self._pause = _FIRST_PROBE
        self._began = 0.0
        self._lasted = 0.0
        self.active = False
        """A local fault is on: nothing may be held against any origin."""
        self.count = 0
        """Faults so far."""

    def answered(self, origin: str, now: float) -> None:
        """Something came from the network: all suspicion is contradicted."""
        self._last_answer = now
        self._suspects.clear()
        self._note(origin, now)
        if self.active:
            self.active = False
            self._lasted += now - self._began
            self._on_change(False)
        self._pause = _FIRST_PROBE

    def failed(self, origin: str, *, began: float, now: float, undo: Callable[[], object]) -> bool:
        """An attempt failed as a lost uplink would make it fail.

        Returns whether the fault is ours. If that turns out now or later, `undo` of
        every suspect but those of a running fault is called.
        """
        self._note(origin, now)
        if self.active:
            self._pause = min(self._pause * 2, _LAST_PROBE)
            self._set_probe(now)
            return True
        if self._last_answer >= began:
            return False
        self._suspects[origin] = undo
        tried = len(self._tried)
        if tried < LEAST or len(self._suspects) < SHARE * tried:
            return False
        self.active = True
        self._began = now
        self.count += 1
        self._set_probe(now)
        suspects, self._suspects = self._suspects, {}
        self._probes.extend(suspects)
        for undo_one in suspects.values():
            undo_one()
        self._on_change(True)
        return True

    def uptime(self, now: float) -> float:
        """Monotonic seconds without those of local faults: what an outage is measured in.

        While nothing can be asked nobody's 12 hours or 30 days go by.
        """
        return (self._began if self.active else now) - self._lasted

    def may_ask(self, now: float) -> bool:
        """Whether a retrieval may start: during a fault, one probe at a time."""
        if not self.active:
            return True
        if now < self._probe_at:
            return False
        # Taken at once: between here and the probe's end nobody else gets through.
        self._set_probe(now)
        return True

    def retry_at(self, now: float) -> float:
        """When to ask again during a fault."""
        return max(self._probe_at, now + _FIRST_PROBE)

    def next_suspect(self) -> str | None:
        """An origin to probe with; each in its turn."""
        if not self._probes:
            return None
        self._probes.rotate(-1)
        return self._probes[-1]

    def _set_probe(self, now: float) -> None:
        self._probe_at = now + self._pause * self._rng.uniform(0.8, 1.2)

    def _note(self, origin: str, now: float) -> None:
        self._tried[origin] = now
        self._tried.move_to_end(origin)
        while self._tried:
            oldest = next(iter(self._tried))
            if now - self._tried[oldest] <= WINDOW and len(self._tried) <= _MOST:
                break
            del self._tried[oldest]
            self._suspects.pop(oldest, None)
