"""Memory of one cached policy.

The method is the same for every parser. A fresh process first parses and keeps every file once, so
that all modules and caches are loaded and no free memory is left. Then it parses every file several
times, each time as a different text (with a numbered comment at the end, so that nothing can be
shared), chooses the agent, asks about all URLs of the site, and keeps the parsed file and the
chosen agent. The figure is the growth of the process's resident memory divided by the number of
policies, which counts Python and C++ objects alike. `tracemalloc` runs in a second process for
comparison; it sees only Python's allocations.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
import tracemalloc
from typing import Any

from benchmarks.corpus import Site
from benchmarks.options import Options
from benchmarks.peers import BASELINE, OURS, installed, missing
from benchmarks.report import Table, count, seconds, times
from benchmarks.resident import resident as resident_bytes

__all__ = ["run"]


def run(options: Options) -> list[Table]:
    """Return one table: resident bytes, traced bytes, and the cost of a full garbage collection."""
    copies = 6 if options.quick else 12
    rows, figures = [], {}
    for peer in installed():
        resident = _child(peer.name, options, copies, "resident")
        traced = _child(peer.name, options, 2, "traced")
        figures[peer.name] = {
            "resident_bytes": resident["bytes"],
            "traced_bytes": traced["bytes"],
            "full_collection_seconds": resident["collection"],
            "policies": resident["policies"],
        }
    base = figures[BASELINE]["resident_bytes"]
    for name, figure in figures.items():
        each = figure["full_collection_seconds"] / figure["policies"] * 10_000
        rows.append(
            (
                name,
                f"{figure['resident_bytes']:,.0f} B",
                times(figure["resident_bytes"] / base),
                f"{figure['traced_bytes']:,.0f} B",
                seconds(each),
            )
        )
    ours = figures.get(OURS, figures[BASELINE])
    mean = sum(len(site.body) for site in options.sites()) // len(options.sites())
    return [
        Table(
            "Memory of one kept policy",
            ("", "resident", "of Protego's", "traced", "full collection, 10,000 kept"),
            rows,
            "at most 4 kB, at most a quarter of Protego's",
            (
                *(f"{name}: not installed here" for name in missing()),
                f"Mean text: {mean:,} B; {count(ours['policies'])} policies a process.",
                "resident: growth of the process; the same method for all, C++ included. "
                "traced: what tracemalloc saw; it does not see C++.",
                "Parsed file and chosen agent are kept, and were asked about every URL of "
                "the site.",
            ),
            figures,
        )
    ]


def _child(name: str, options: Options, copies: int, method: str) -> dict[str, Any]:
    task = {
        "peer": name,
        "corpus": options.corpus,
        "quick": options.quick,
        "copies": copies,
        "method": method,
    }
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.memory"],
        input=json.dumps(task),
        capture_output=True,
        text=True,
        check=True,
    )
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def _measure(task: dict[str, Any]) -> dict[str, float]:
    (peer,) = installed((task["peer"],))
    sites = Options(task["corpus"], task["quick"]).sites()
    kept: list[Any] = []

    def keep(site: Site, tail: str) -> None:
        robots = peer.parse(site.body + f"\n# {tail}\n".encode())
        ask = peer.ready(robots, site.agent)
        for url in site.urls:
            ask(url)
        # The object chosen for the agent, if there is one; not the benchmark's closures.
        kept.append((robots, getattr(ask, "__self__", None)))

    # Keep a first copy of everything, so that all caches are filled and no arena is free.
    for site in sites:
        keep(site, "first")
    first = len(kept)
    kept.extend([None] * (first * task["copies"]))
    del kept[first:]
    gc.collect()
    resident = task["method"] == "resident"
    if not resident:
        tracemalloc.start()
    before = resident_bytes() if resident else tracemalloc.get_traced_memory()[0]
    for copy in range(task["copies"]):
        for site in sites:
            keep(site, str(copy))
    start = time.process_time()
    gc.collect()
    collection = time.process_time() - start
    after = resident_bytes() if resident else tracemalloc.get_traced_memory()[0]
    # The pair and its place in the list belong to the benchmark.
    measured = len(kept) - first
    own = measured * (sys.getsizeof(kept[0]) + 8)
    return {
        "bytes": (after - before - own) / measured,
        "collection": collection,
        "policies": len(kept),
    }


if __name__ == "__main__":
    print(json.dumps(_measure(json.loads(sys.stdin.read()))))
