"""20,000 pages of 200 loopback hosts with no delay, and how late a lease starts under load."""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys

from benchmarks.crawlers import BARE, CONCURRENCY, CRAWLERS, available
from benchmarks.lateness import lateness
from benchmarks.options import Options
from benchmarks.pages import HOSTS, serving
from benchmarks.report import Table, count, seconds, times, version_of
from benchmarks.timing import ratios

__all__ = ["run"]

_PATIENCE = 300.0
_SLOW = 2_000
"""Pages for crawlers that would take minutes for all of them."""


def run(options: Options) -> list[Table]:
    """Return the table of crawlers and the table of lease latencies."""
    return [_crawls(options), lateness(options)]


def _crawls(options: Options) -> Table:
    pages = 4_000 if options.quick else 20_000
    rounds = options.rounds(quick=3, full=7)
    names = available()
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    failed: dict[str, str] = {}
    rng = random.Random(3)
    with serving() as port:
        for _ in range(rounds):
            rng.shuffle(names)
            for name in names:
                if name in failed:
                    continue
                wanted = _SLOW if CRAWLERS[name].slow else pages
                try:
                    taken[name].append(_child(name, port, wanted))
                except (RuntimeError, subprocess.TimeoutExpired) as error:
                    failed[name] = f"{name}: not measured ({error})"
                    del taken[name]
    if BARE in failed:
        raise RuntimeError(failed[BARE])
    return _table(taken, pages, rounds, tuple(failed.values()))


def _child(name: str, port: int, pages: int) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.crawlers", name, str(port), str(pages)],
        capture_output=True,
        text=True,
        timeout=_PATIENCE,
        check=False,
    )
    if done.returncode:
        said = [line.strip(" |+") for line in done.stderr.splitlines() if "Error: " in line]
        raise RuntimeError(f"{said[-1] if said else done.stderr[-500:]}")
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    if figures["pages"] != pages:
        raise RuntimeError(f"{figures['pages']:,.0f} of {pages:,} pages came")
    return figures


def _table(
    taken: dict[str, list[dict[str, float]]], pages: int, rounds: int, failed: tuple[str, ...]
) -> Table:
    wall = {name: [one["wall"] / one["pages"] for one in runs] for name, runs in taken.items()}
    cpu = {name: [one["processor"] / one["pages"] for one in runs] for name, runs in taken.items()}
    rows, figures = [], {}
    for name in CRAWLERS:
        if name not in taken:
            continue
        rate = 1 / statistics.median(wall[name])
        against = CRAWLERS[name].beside
        beside = against if against in taken else BARE
        slower = ratios(wall[name], wall[beside])
        work = ratios(cpu[name], cpu[beside])
        version = version_of(CRAWLERS[name].distribution) or ""
        rows.append(
            (
                f"{name} {version}",
                f"{count(rate)}/s",
                slower.shown(times),
                seconds(statistics.median(cpu[name])),
                work.shown(times),
            )
        )
        figures[name] = {
            "pages_per_second": rate,
            "wall": slower.median,
            "processor": work.median,
            "processor_p10": work.low,
            "processor_p90": work.high,
        }
    notes = [f"{name}: not installed here" for name in CRAWLERS if name not in available()]
    return Table(
        f"{pages:,} pages of {HOSTS} hosts, no delay",
        ("", "pages", "time of the bare client's", "processor a page", "of the bare client's"),
        rows,
        "at most 1.10x the bare client's time; at least 15x Scrapy's pages",
        (
            *notes,
            *failed,
            "gatekeeper fetch is held against the bare client that writes the same files.",
            f"Loopback, the server in a process of its own; {CONCURRENCY} requests in flight; "
            f"{rounds} shuffled rounds, each crawler in a fresh process, medians (of ratios p10 to "
            "p90). Start-up and "
            "imports are not counted, nor is what they left to be collected; robots.txt is.",
            f"Crawlee and Scrapy were given {_SLOW:,} pages.",
        ),
        figures,
    )
