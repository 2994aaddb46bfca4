"""How much memory this process has."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["resident"]


def resident() -> int:
    """Bytes of this process in memory (Linux), or the most it ever had (elsewhere)."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
