"""Interleaved, shuffled rounds, measured in processor time."""

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
    """The distribution over rounds: p10 (`low`), median, and p90 (`high`)."""

    low: float
    median: float
    high: float

    def shown(self, as_text: Callable[[float], str]) -> str:
        """Format the median, with p10 and p90 in brackets.

        >>> Spread(1.0, 1.25, 2.0).shown(str)
        '1.25 (1.0 to 2.0)'
        """
        return f"{as_text(self.median)} ({as_text(self.low)} to {as_text(self.high)})"


def spread(rounds: Sequence[float]) -> Spread:
    """Return p10, median and p90 of one value per round, never outside the measured range."""
    if len(rounds) == 1:
        return Spread(rounds[0], rounds[0], rounds[0])
    tenths = statistics.quantiles(rounds, n=10, method="inclusive")
    return Spread(tenths[0], statistics.median(rounds), tenths[-1])


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> Spread:
    """Return the spread of ratios within the same rounds. A temporary slowdown of the machine
    affects both values, and not the ratio."""
    return spread([one / other for one, other in zip(numerators, denominators, strict=True)])


@dataclass(frozen=True, slots=True)
class Contender:
    """A competitor that does its work once per round."""

    work: Callable[[int], int]
    """Called with the number of the round; returns the number of units done. Timed."""
    prepare: Callable[[int], object] | None = None
    """Called with the number of the round to prepare it. Not timed."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The times of one contender, one value per round, in the order of the rounds."""

    rounds: tuple[float, ...]
    work: int
    """Units per round: files, URLs or questions."""

    @property
    def median(self) -> float:
        """Median processor seconds of one round."""
        return statistics.median(self.rounds)

    @property
    def each(self) -> float:
        """Processor seconds for one unit of work."""
        return self.median / self.work

    @property
    def rate(self) -> float:
        """Units per second of processor time."""
        return self.work / self.median

    def faster_than(self, other: Sample) -> Spread:
        """Return how many times faster this sample is, as the spread of ratios within rounds."""
        each = [taken / self.work for taken in self.rounds]
        return ratios([taken / other.work for taken in other.rounds], each)


def compete(
    contenders: Mapping[str, Contender], *, rounds: int, seed: int = 1
) -> dict[str, Sample]:
    """Let each contender do its work once per round, in an order that is shuffled each round.

    Round 0 is a warm-up and not counted. The garbage collector is enabled, as in a crawler, but
    each turn starts with nothing to collect, and existing objects (the benchmark's inputs and those
    of other contenders) are exempt.
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
