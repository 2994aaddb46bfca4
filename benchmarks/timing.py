"""Interleaved, shuffled rounds of processor time."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Contender", "Sample", "Spread", "compete", "ratios", "spread"]


class Spread(NamedTuple):
    """What rounds gave: a tenth of them lies below `low`, a tenth above `high`."""

    low: float
    median: float
    high: float

    def shown(self, as_text: Callable[[float], str]) -> str:
        """The median, and the other two in brackets.

        >>> Spread(1.0, 1.25, 2.0).shown(str)
        '1.25 (1.0 to 2.0)'
        """
        return f"{as_text(self.median)} ({as_text(self.low)} to {as_text(self.high)})"


def spread(rounds: Sequence[float]) -> Spread:
    """p10, median and p90 of one value a round; where there are few, no value that never was."""
    if len(rounds) == 1:
        return Spread(rounds[0], rounds[0], rounds[0])
    tenths = statistics.quantiles(rounds, n=10, method="inclusive")
    return Spread(tenths[0], statistics.median(rounds), tenths[-1])


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> Spread:
    """Of values of the same rounds: what slows the machine for a while slows both, and leaves the
    ratio alone."""
    return spread([one / other for one, other in zip(numerators, denominators, strict=True)])


@dataclass(frozen=True, slots=True)
class Contender:
    """Somebody who does a piece of work once a round."""

    work: Callable[[int], int]
    """Takes the number of the round, returns how many units it did; timed."""
    prepare: Callable[[int], object] | None = None
    """Takes the number of the round, makes ready what it needs; not timed."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What one contender took, a value a round, all in the same order of rounds."""

    rounds: tuple[float, ...]
    work: int
    """How many units one round holds: files, URLs, questions."""

    @property
    def median(self) -> float:
        """Seconds of processor time for one round."""
        return statistics.median(self.rounds)

    @property
    def each(self) -> float:
        """Seconds of processor time for one unit of work."""
        return self.median / self.work

    @property
    def rate(self) -> float:
        """Units a second of processor time."""
        return self.work / self.median

    def faster_than(self, other: Sample) -> Spread:
        """How many times faster, over the ratios within a round."""
        each = [taken / self.work for taken in self.rounds]
        return ratios([taken / other.work for taken in other.rounds], each)


def compete(
    contenders: Mapping[str, Contender], *, rounds: int, seed: int = 1
) -> dict[str, Sample]:
    """Let each contender do its work once a round, in an order shuffled every round.

    Round 0 warms up and is not counted. The garbage collector stays on, as in a crawler,
    but starts each turn with nothing to collect, and does not look at what was there before
    (the benchmark's own inputs, and what the others hold).
    """
    rng = random.Random(seed)
    names = list(contenders)
    taken: dict[str, list[float]] = {name: [] for name in names}
    done: dict[str, int] = {}
    for turn in range(rounds + 1):
        rng.shuffle(names)
        for name in names:
            contender = contenders[name]
            if contender.prepare is not None:
                contender.prepare(turn)
            gc.collect()
            gc.freeze()
            start = time.process_time()
            done[name] = contender.work(turn)
            spent = time.process_time() - start
            gc.unfreeze()
            if turn:
                taken[name].append(max(spent, 1e-9))
    return {name: Sample(tuple(taken[name]), done[name]) for name in contenders}
