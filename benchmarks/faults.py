"""A fleet's crawl under faults: `python -m benchmarks --only faults`.

Processes crawl sites on loopback while members, their store and the connections between them fail
one after another. Only the sites' own log is judged. It takes twelve minutes, fewer with `--quick`.
`FLEET_LOG=FILE` keeps the log of the members.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Sequence

from benchmarks.options import Options
from benchmarks.report import Table
from gatekeeper.config import FleetConfig
from tests.fleet.crawl import EVERYTHING, Fault, Sites, crawl, crawling

__all__ = ["run"]

HOLD = 3.0
"""Seconds; longer than the slowest response, whose member may be killed."""
DELAYS = (0.0, 0.05, 0.3, 0.8, 2.0)
WORKERS = 240
"""Worker tasks of all members together."""
ALIVE = frozenset(EVERYTHING) - {
    "kill -9 of a member, and a new one",
    "SIGSTOP of a member for 1.5 holds",
    "FLUSHALL, then a new member",
    "half of the members cut off for 8 s",
    "kill -9 of the store, 8 s away, behind a proxy",
}
LONG = "kill -9 of the store, 30 s away"
DIVIDED = (
    *("kill -9 of a member, and a new one", "kill -9 of the store, no file"),
    *("kill -9 of the store, 8 s away", "FLUSHALL", "a replica promoted"),
    *("the wire drops everything for 5 s", "half of the members cut off for 8 s"),
    "SIGSTOP of a member for 1.5 holds",
)


def run(options: Options) -> list[Table]:
    """Return tables of the faults, of the pace, and of the cost of "divide"."""
    hosts = 60 if options.quick else 200
    sizes = (3,) if options.quick else (3, 8)
    tables = [_broken(hosts, members) for members in sizes]
    tables.append(_outlasting(hosts, 3))
    tables.append(_paces(hosts, 6.0 if options.quick else 15.0, sizes))
    tables.append(_divided(hosts, 3, DIVIDED[1:6] if options.quick else DIVIDED))
    return tables


def _sites(hosts: int) -> Sites:
    return Sites(hosts, random.Random(7), delays=DELAYS, changing=True)


def _outlasting(hosts: int, members: int) -> Table:
    """Run an outage longer than `fleet.hold`, with that setting at its default."""
    return _broken(hosts, members, (LONG,), FleetConfig().hold, following=10.0)


def _broken(
    hosts: int,
    members: int,
    what: tuple[str, ...] = EVERYTHING,
    hold: float = HOLD,
    following: float | None = None,
) -> Table:
    sites = _sites(hosts)
    each = WORKERS // members
    faults = asyncio.run(
        crawl(sites, members=members, what=what, hold=hold, workers=each, following=following)
    )
    rows = [_row(sites, fault) for fault in faults]
    found = {kind: len(ones) for kind, ones in sites.violations().items()}
    robots = sum(one.path == "/robots.txt" for log in sites.log.values() for one in log)
    return Table(
        f"{members} processes, {hosts} sites, a hold of {hold:g} s, and what breaks",
        ("what breaks", "requests", "violations", "back after", "longest silence"),
        rows,
        "no violation; back after 5 s where all members live, else after the quarantine "
        f"({1.5 * hold:g} s)",
        (
            f"{sites.visits} requests, {robots} of them for a robots.txt; violations: "
            f"{found or 'none'}.",
            f"Load of the machine: {os.getloadavg()[0]:.1f}.",
        ),
        {
            "violations": found,
            "requests": sites.visits,
            "back": {fault.kind: fault.pause(sites) for fault in faults},
        },
    )


def _row(sites: Sites, fault: Fault) -> tuple[str, ...]:
    found = sites.violations(fault.begun, fault.over)
    late = "" if fault.kind in (*ALIVE, LONG) else " (quarantine)"
    return (
        fault.kind + late,
        str(len(sites.arrivals(fault.begun, fault.over))),
        ", ".join(f"{len(ones)} {kind}" for kind, ones in found.items()) or "0",
        f"{fault.pause(sites):.1f} s",
        f"{fault.silence(sites):.1f} s",
    )


def _paces(hosts: int, seconds: float, sizes: Sequence[int]) -> Table:
    """Measure the pace of one process without a fleet, and of several with one."""
    paces = {1: asyncio.run(_pace(hosts, seconds, 1, alone=True))}
    paces |= {members: asyncio.run(_pace(hosts, seconds, members)) for members in sizes}
    rows = [
        (
            str(members) + (" (no fleet)" if members == 1 else ""),
            f"{pace:.0f}",
            f"{pace / paces[1]:.0%}",
        )
        for members, pace in paces.items()
    ]
    return Table(
        f"Pace: {WORKERS} workers in one process, and shared among several",
        ("processes", "requests/s", "of one process"),
        rows,
        "at least 80 %",
        (f"Load of the machine: {os.getloadavg()[0]:.1f}.",),
        {"requests/s": paces},
    )


async def _pace(hosts: int, seconds: float, members: int, *, alone: bool = False) -> float:
    sites = _sites(hosts)
    async with crawling(
        sites, members=0 if alone else members, hold=HOLD, workers=WORKERS // members
    ) as fleet:
        if alone:
            fleet.join(alone=True)
        await sites.until(lambda: sites.visits >= hosts)
        await asyncio.sleep(4.0)
        before = sites.visits
        await asyncio.sleep(seconds)
        return (sites.visits - before) / seconds


def _divided(hosts: int, members: int, kinds: Sequence[str]) -> Table:
    rows, figures = [], {}
    for kind in kinds:
        sites = _sites(hosts)
        asyncio.run(
            crawl(
                sites,
                members=members,
                what=(kind, "nothing"),
                when_lost="divide",
                hold=HOLD,
                workers=WORKERS // members,
                following=5.0,
            )
        )
        found = Counter({name: len(ones) for name, ones in sites.violations().items()})
        wrong = found["early"] + found["overlap"] + found["in a block"]
        figures[kind] = {"requests": sites.visits, **found}
        rows.append(
            (
                kind,
                str(sites.visits),
                *(str(found[name]) for name in ("early", "overlap", "in a block")),
                str(found["robots.txt again"]),
                f"{wrong / max(1, sites.visits):.2%}",
            )
        )
    return Table(
        f'when_lost = "divide": {members} processes, {hosts} sites',
        (
            *("what breaks", "requests", "early", "overlapping", "in a block"),
            *("robots.txt again", "of all"),
        ),
        rows,
        "",
        (f"Load of the machine: {os.getloadavg()[0]:.1f}.",),
        figures,
    )
