"""How much is tried: everything with `GATEKEEPER_LONG_TESTS=1`, as `.ci/run` does, else a part."""

from __future__ import annotations

import os

__all__ = ["LONG", "of_many"]

LONG = os.environ.get("GATEKEEPER_LONG_TESTS", "0") not in ("", "0")


def of_many(examples: int) -> int:
    """So many examples, or a quarter of them.

    For `settings(max_examples=of_many(1_000))`: of a property over random texts, the first
    hundreds find what there is nearly always; what they don't, the long form does in the end.
    """
    return examples if LONG else examples // 4
