"""Instructions per additional page of a crawl, which do not depend on the load of the machine.

Each crawler runs twice under valgrind, with few and with more pages per host, in its own process.
The difference excludes start-up, the first contact with a host, and robots.txt. Needs valgrind.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

from benchmarks.crawlers import BARE, CRAWLERS, available
from benchmarks.options import Options
from benchmarks.pages import HOSTS, serving
from benchmarks.report import Table, count, times

__all__ = ["run"]

_MEASURED = (
    *("bare aiohttp", "polite_session", "gate.lease", "gate.lease, bare aiohttp"),
    *("PoliteQueue", "bare aiohttp, to files", "gatekeeper fetch -o"),
)
_FEW, _MORE = 10, 25
"""Pages per host."""


def run(options: Options) -> list[Table]:
    """Return the table. Raises RuntimeError if valgrind is not installed."""
    if shutil.which("valgrind") is None:
        raise RuntimeError("it needs valgrind")
    names = [name for name in _MEASURED if name in available()]
    names = names[:3] if options.quick else names
    cost: dict[str, float] = {}
    with serving() as port:
        for name in names:
            few, more = (_instructions(name, port, HOSTS * each) for each in (_FEW, _MORE))
            cost[name] = (more - few) / (HOSTS * (_MORE - _FEW))
    rows = []
    for name in names:
        beside = CRAWLERS[name].beside or BARE
        rows.append((name, count(cost[name]), times(cost[name] / cost[beside]), beside))
    return [
        Table(
            f"A page more, {_FEW} to {_MORE} of each of {HOSTS} hosts",
            ("", "instructions", "of", "client"),
            rows,
            "1.12x for polite_session and gate.lease, 1.2x for PoliteQueue, 1.67x for fetch",
            ("Instructions of the process alone, by valgrind: nothing of what the system does.",),
            cost,
        )
    ]


def _instructions(name: str, port: int, pages: int) -> int:
    tool = ("valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null")
    done = subprocess.run(
        [*tool, sys.executable, "-m", "benchmarks.crawlers", name, str(port), str(pages)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONHASHSEED": "0"},
        check=True,
    )
    found = re.search(r"I\s+refs:\s+([\d,]+)", done.stderr)
    if found is None:
        raise RuntimeError(done.stderr[-500:])
    return int(found[1].replace(",", ""))
