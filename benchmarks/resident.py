"""The memory of a process."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["resident"]


def resident(pid: int | None = None) -> int:
    """Return the resident bytes of the process, or of this one (Linux). On other systems, return
    this process's peak."""
    statm = Path(f"/proc/{pid or 'self'}/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
