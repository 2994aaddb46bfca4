"""How fast a crawl goes, and how long it will still take."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gatekeeper.cli.crawl.tally import Tally

if TYPE_CHECKING:
    from gatekeeper.cli.crawl.progress import NextTurn

__all__ = ["Speed", "Speedometer"]

_WINDOW = 60.0
"""Seconds over which a rate is taken: long enough for hosts that answer once in a while."""


_LEAST = 1.0
"""Seconds before which a rate says nothing."""


@dataclass(frozen=True, slots=True)
class Speed:
    """The rates of the last minute, and the time that is left at them."""

    urls: float
    """URLs that came to their end, a second."""
    size: float
    """Bytes of bodies, a second."""
    left: float | None
    """Seconds; None where it can't be told: the total or the rate is not known."""


class Speedometer:
    """Reads the counts of a crawl again and again. Memory: the samples of one minute."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int, int]] = deque()

    def read(self, now: float, tally: Tally, turns: Sequence[NextTurn]) -> Speed | None:
        """How fast it goes, `now` being seconds of any one clock; None at the beginning.

        No crawl ends before its slowest host: what is left is at least the time that a host
        of `turns` needs for those that wait for it, each an interval after the last one.
        """
        samples = self._samples
        samples.append((now, tally.done, tally.size))
        while len(samples) > 1 and samples[1][0] <= now - _WINDOW:
            samples.popleft()
        since, done, size = samples[0]
        if now - since < _LEAST:
            return None
        urls, octets = (tally.done - done) / (now - since), (tally.size - size) / (now - since)
        return Speed(urls, octets, _left(tally, urls, turns))


def _left(tally: Tally, rate: float, turns: Sequence[NextTurn]) -> float | None:
    rest = tally.total - tally.done
    if not tally.complete or not rest:
        return None
    longest = max((turn.seconds + turn.interval * (turn.waiting - 1) for turn in turns), default=0)
    left = max(rest / rate if rate else 0.0, longest)
    return left if 0 < left < math.inf else None
