"""What a client remembers: decisions while they hold, and which origins answer at once."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from cachetools import LRUCache

from gatekeeper.clock import Clock
from gatekeeper.decision import Decision, State, Verdict

__all__ = ["Answers", "Key", "lifetime"]

_SHORT = 5.0
"""Seconds that a word of the operator or of the guard is kept: it can change at any time,
and nobody tells the clients."""
_MINUTE = 60.0
_ORIGINS = 65_536
Key = tuple[str, str | None]
"""URL and agent."""


def lifetime(decision: Decision, wall: float, cap: float) -> float:
    """Seconds that a decision may be repeated without asking; never beyond its own end.

    DEFER until `retry_at`. ALLOW and DENY by the file until `expires_at`, and `cap` seconds
    at most, as the file may be asked for again before that; ALLOW to the end of the minute
    at most: a decision does not say whether the file has a Visit-time, whose windows end
    with a minute (V2-24). An operator's or the guard's word for a few seconds.
    """
    if decision.verdict is Verdict.DEFER:
        return _left(decision.retry_at, wall)
    if decision.state is None or decision.state is State.OVERRIDE:
        return min(cap, _SHORT)
    seconds = min(cap, _left(decision.expires_at, wall))
    if decision.verdict is Verdict.ALLOW:
        return min(seconds, _MINUTE - wall % _MINUTE)
    return seconds


def _left(end: datetime | None, wall: float) -> float:
    return 0.0 if end is None else end.timestamp() - wall


class Answers:
    """Decisions by URL and agent, at most `size` of them; 0 keeps none."""

    def __init__(self, clock: Clock, *, size: int, cap: float) -> None:
        self._clock = clock
        self._cap = cap
        self._size = size
        self._kept: LRUCache[Key, tuple[float, Decision]] = LRUCache(max(1, size))
        # Emptied when full, which costs a batch of its own an origin; to move each origin
        # to the end of a row would cost every question a write.
        self._prompt: dict[str, float] = {}
        self._monotonic = clock.monotonic

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, key: Key) -> Decision | None:
        """The decision, if it still holds."""
        found = self._kept.get(key)
        if found is None:
            return None
        if self._monotonic() < found[0]:
            return found[1]
        del self._kept[key]
        return None

    def keep(self, answered: Iterable[tuple[Key, str, Decision]]) -> None:
        """Remember each for as long as it holds, and that its origin answers at once.

        `answered`: key, origin and decision, all of this moment.
        """
        wall, now, cap = self._clock.wall(), self._monotonic(), self._cap
        kept, prompt = self._kept if self._size else None, self._prompt
        for key, origin, decision in answered:
            seconds = lifetime(decision, wall, cap)
            if seconds <= 0:
                continue
            if kept is not None:
                kept[key] = (now + seconds, decision)
            if now >= prompt.get(origin, 0.0):
                if decision.verdict is not Verdict.DEFER:
                    # Longer than the answer itself: the sidecar keeps the whole file.
                    seconds = max(seconds, _left(decision.expires_at, wall))
                if len(prompt) >= _ORIGINS:
                    prompt.clear()
                prompt[origin] = now + seconds

    def is_prompt(self, origin: str) -> bool:
        """Whether the sidecar knows the origin, as far as is known here."""
        return self._monotonic() < self._prompt.get(origin, 0.0)

    def forget(self) -> None:
        """Forget everything: somebody changed something."""
        self._kept.clear()
        self._prompt.clear()
