"""What a client remembers: decisions while they hold, and which origins answer at once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from datetime import datetime
from typing import Protocol

from gatekeeper.clock import Clock, utc
from gatekeeper.decision import Decision, State, Verdict

__all__ = ["Answers", "Key", "Lifetimes"]

_SHORT = 5.0
"""Seconds that a word of the operator or of the guard is kept: it can change at any time,
and nobody tells the clients."""
_MINUTE = 60.0
_ORIGINS = 65_536
Key = tuple[str, str | None]
"""URL and agent."""


class Answered(Protocol):
    """The question that a decision answers."""

    key: Key
    origin: str


class Lifetimes:
    """For how many seconds decisions of this moment may be repeated without asking.

    Never beyond their own end: DEFER until `retry_at`. ALLOW and DENY by the file until
    `expires_at`, and `cap` seconds at most, as the file may be asked for again before that;
    ALLOW to the end of the minute at most: a decision does not say whether the file has a
    Visit-time, whose windows end with a minute (V2-24). An operator's or the guard's word
    for a few seconds.
    """

    __slots__ = ("_cap", "_minute", "_short", "_soon", "_wall")

    def __init__(self, wall: float, cap: float) -> None:
        self._wall = wall
        self._cap = cap
        self._soon = utc(wall + cap)  # two moments are compared faster than subtracted
        self._minute = min(cap, _MINUTE - wall % _MINUTE)
        self._short = min(cap, _SHORT)

    def of(self, decision: Decision) -> float:
        """Seconds; none, or fewer, where it may not be repeated."""
        verdict, end = decision.verdict, decision.expires_at
        if verdict is Verdict.DEFER:
            return self.left(decision.retry_at)
        if decision.state is None or decision.state is State.OVERRIDE:
            return self._short
        seconds = self._minute if verdict is Verdict.ALLOW else self._cap
        if end is not None and end > self._soon:
            return seconds
        return min(seconds, self.left(end))

    def left(self, end: datetime | None) -> float:
        """Seconds until then."""
        return 0.0 if end is None else end.timestamp() - self._wall


class Answers:
    """Decisions by URL and agent, at most `size` of them; 0 keeps none."""

    def __init__(self, clock: Clock, *, size: int, cap: float) -> None:
        self._clock = clock
        self._cap = cap
        self._size = size
        # The one not asked about for longest first. An LRUCache takes five calls where this
        # one takes none, on the way of every question.
        self._kept: OrderedDict[Key, tuple[float, Decision]] = OrderedDict()
        self.prompt: dict[str, float] = {}
        """Origins that the sidecar knows, as far as is known here, until a monotonic moment.
        Emptied when full, which costs a batch of its own an origin; to move each origin to
        the end of a row would cost every question a write."""
        self._monotonic = clock.monotonic

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, key: Key) -> Decision | None:
        """The decision, if it still holds."""
        found = self._kept.get(key)
        if found is None:
            return None
        if self._monotonic() < found[0]:
            self._kept.move_to_end(key)
            return found[1]
        del self._kept[key]
        return None

    def keep(self, answered: Iterable[tuple[Answered, Decision]]) -> None:
        """Remember each for as long as it holds, and that its origin answers at once.

        All are of this moment.
        """
        lifetimes, now = Lifetimes(self._clock.wall(), self._cap), self._monotonic()
        kept, prompt = self._kept if self._size else None, self.prompt
        for question, decision in answered:
            seconds = lifetimes.of(decision)
            if seconds <= 0:
                continue
            if kept is not None:
                kept[question.key] = (now + seconds, decision)
            origin = question.origin
            if now >= prompt.get(origin, 0.0):
                if decision.verdict is not Verdict.DEFER:
                    # Longer than the answer itself: the sidecar keeps the whole file.
                    seconds = max(seconds, lifetimes.left(decision.expires_at))
                if len(prompt) >= _ORIGINS:
                    prompt.clear()
                prompt[origin] = now + seconds
        while len(self._kept) > self._size:
            self._kept.popitem(last=False)

    def forget(self) -> None:
        """Forget everything: somebody changed something."""
        self._kept.clear()
        self.prompt.clear()
