"""The results of a benchmark: tables, printed as Markdown and written as JSON."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

__all__ = ["Table", "count", "environment", "seconds", "times"]


@dataclass(frozen=True, slots=True)
class Table:
    """One table: what was measured, how, and the goal."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    goal: str = ""
    notes: tuple[str, ...] = ()
    figures: dict[str, Any] = field(default_factory=dict)
    """The numbers of the rows, for machines."""

    def markdown(self) -> str:
        """Return the table as Markdown."""
        widths = [
            max(len(column), *(len(row[index]) for row in self.rows), 3)
            for index, column in enumerate(self.columns)
        ]
        lines = [f"## {self.title}", ""]
        if self.goal:
            lines += [f"Goal: {self.goal}", ""]
        lines.append(_line(self.columns, widths))
        lines.append("|" + "|".join("-" * (width + 2) for width in widths) + "|")
        lines += [_line(row, widths) for row in self.rows]
        lines += ["", *(f"- {note}" for note in self.notes)]
        return "\n".join(lines).rstrip() + "\n"

    def as_dict(self) -> dict[str, Any]:
        """Return the table for `--json`."""
        return asdict(self)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return (
        "| "
        + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        + " |"
    )


def seconds(value: float) -> str:
    """Format a duration with three significant digits.

    >>> seconds(0.0000123), seconds(0.25), seconds(12.0)
    ('12.3 µs', '250 ms', '12.0 s')
    """
    for limit, factor, unit in ((1e-6, 1e9, "ns"), (1e-3, 1e6, "µs"), (1.0, 1e3, "ms")):
        if value < limit:
            return f"{value * factor:.3g} {unit}"
    return f"{value:.1f} s"


def count(value: float) -> str:
    """Format a number or a rate, with k and M.

    >>> count(1_234_567), count(48_200), count(12)
    ('1.23 M', '48.2 k', '12')
    """
    if value >= 1e6:
        return f"{value / 1e6:.3g} M"
    if value >= 1e3:
        return f"{value / 1e3:.3g} k"
    return f"{value:.3g}"


def times(ratio: float) -> str:
    """Format a ratio.

    >>> times(6.04), times(1.078), times(0.5)
    ('6.0x', '1.08x', '0.5x')
    """
    if ratio < 1:
        return f"{ratio:.2g}x"
    return f"{ratio:.2f}x" if ratio < 2 else f"{ratio:.1f}x"


def version_of(distribution: str) -> str | None:
    """Return the installed version, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


_NAMED = (
    "robots-gatekeeper",
    "protego",
    "reppy",
    "robotspy",
    "robotexclusionrulesparser",
    "aiohttp",
    "uvloop",
    "scrapy",
    "crawlee",
    "msgspec",
    "yarl",
)


def environment() -> dict[str, str]:
    """Return versions, machine and date, which belong to every figure."""
    facts = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {_cpu()}",
        "load": " ".join(f"{value:.1f}" for value in os.getloadavg()) if _has_load() else "?",
        "gil": "on" if getattr(sys, "_is_gil_enabled", lambda: True)() else "off",
    }
    facts |= {name: version_of(name) or "not installed" for name in _NAMED}
    return facts


def _has_load() -> bool:
    return hasattr(os, "getloadavg")


def _cpu() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or "?"
    names = (line.split(":", 1)[1].strip() for line in text.splitlines() if "model name" in line)
    return next(names, "?")
