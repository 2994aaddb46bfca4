"""The effort of tests: full with `LONG_TESTS=1`, else reduced.

Also measures processor time in a way that a busy machine hardly affects.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterable
from itertools import islice
from typing import TypeVar

T = TypeVar("T")

LONG = os.environ.get("LONG_TESTS", "0") not in ("", "0")


def of_many(examples: int) -> int:
    """Return the number of examples, or a quarter of it in a quick run.

    For `settings(max_examples=of_many(1_000))`. For a property over random texts the first
    hundreds nearly always find a failure; the full run finds the others in the end.
    """
    return examples if LONG else examples // 4


def some_of(cases: Iterable[T], every: int) -> list[T]:
    """Return all cases, or each `every`th one, with the first, in a quick run.

    For `parametrize`, where the cases differ in their numbers and not in what they prove.
    """
    return list(islice(cases, 0, None, 1 if LONG else every))


def processor_time(work: Callable[[], object], goal: float) -> float:
    """Return the least processor time of up to eight runs, stopping at the first within the goal.

    Other processes sharing the caches can double the time of a single run, and a garbage collection
    would scan the objects of all earlier tests.
    """
    best = float("inf")
    for _ in range(8):
        gc.disable()
        try:
            began = time.process_time()
            work()
            best = min(best, time.process_time() - began)
        finally:
            gc.enable()
        if best < goal:
            break
    return best
