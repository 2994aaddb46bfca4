"""How much is tried: everything with `GATEKEEPER_LONG_TESTS=1`, as `.ci/run` does, else a part.

And what it takes of the processor, measured so that a busy machine makes no difference.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable

__all__ = ["LONG", "of_many", "processor_time"]

LONG = os.environ.get("GATEKEEPER_LONG_TESTS", "0") not in ("", "0")


def of_many(examples: int) -> int:
    """So many examples, or a quarter of them.

    For `settings(max_examples=of_many(1_000))`: of a property over random texts, the first
    hundreds find what there is nearly always; what they don't, the long form does in the end.
    """
    return examples if LONG else examples // 4


def processor_time(work: Callable[[], object], goal: float) -> float:
    """Seconds of the processor: the least of eight runs, or of those up to one within the goal.

    A neighbour in the caches doubles a single run, and a collection of garbage that falls into one
    walks through all that other tests left.
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
