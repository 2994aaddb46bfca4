"""What the audit record costs: on the event loop, for a crawl, on disk and in memory."""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

from benchmarks.crawlers import AUDIT
from benchmarks.options import Options
from benchmarks.pages import HOSTS, serving
from benchmarks.report import Table, count, seconds, times
from benchmarks.timing import Spread, ratios

__all__ = ["run"]

_PIECE = 500
"""Requests that are measured together, without and with a record by turns."""
_CRAWLER = "gatekeeper fetch -o"
_FILE = "User-agent: *\nDisallow: /private\nCrawl-delay: 0\n"


def run(options: Options) -> list[Table]:
    """Return one table: the four bounds of the record."""
    requests = asyncio.run(_requests(20_000 if options.quick else 1_000_000))
    crawl = _crawl(4_000 if options.quick else 20_000, options.rounds(quick=3, full=7))
    lines = 2 * requests["requests"] / requests["seconds_with"]
    rows = [
        (
            "a request on the event loop, its two lines, processor time",
            f"{seconds(requests['each'])} (least of a piece: {seconds(requests['least'])})",
            "20 us",
        ),
        (f"a crawl of {HOSTS} loopback hosts, of the time without", crawl.shown(times), "1.05x"),
        ("lines a second, with the requests that they are about", f"{count(lines)}/s", "20,000/s"),
        ("disk, a request, closed segments", f"{requests['octets']:.0f} bytes", "200 bytes"),
        (
            f"memory over {requests['requests']:,.0f} requests",
            f"{requests['grown'] / 1024:+,.0f} KiB",
            "flat",
        ),
    ]
    return [
        Table(
            "the audit record",
            ("", "measured", "at most"),
            rows,
            notes=(
                f"Requests: a scripted gate, {HOSTS} hosts, `gate.lease` and its report; pieces of "
                f"{_PIECE} requests without and with a record by turns, the median difference.",
                "Crawl: `gatekeeper fetch -o` in a process of its own, by turns with and without a "
                "record; the ratio of processor times, p10 to p90 in brackets.",
            ),
            figures={**requests, "crawl": crawl.median},
        )
    ]


async def _requests(wanted: int) -> dict[str, float]:
    """Measure requests of two gates by turns, one of which has a record."""
    from gatekeeper import Config
    from gatekeeper.testing import ScriptedGate

    spent: tuple[list[float], list[float]] = ([], [])
    with tempfile.TemporaryDirectory() as folder:
        async with AsyncExitStack() as stack:
            gates = []
            for audit in ({}, {"folder": folder}):
                pacing = {"default_interval": 0.0, "concurrency": 10}
                config = Config.from_dict({"pacing": pacing, "audit": audit})
                gate = await stack.enter_async_context(ScriptedGate(config=config))
                gates.append(gate)
                for host in range(HOSTS):
                    gate.say(f"https://h{host}.example", _FILE)
            rng, before = random.Random(1), 0
            for piece in range(wanted // _PIECE):
                urls = [_url(rng, piece * _PIECE + number) for number in range(_PIECE)]
                for gate, found in zip(gates, spent, strict=True):
                    began = time.process_time()
                    for url in urls:
                        async with gate.lease(url) as lease:
                            lease.answered(200)
                    await asyncio.sleep(0)
                    found.append(time.process_time() - began)
                if piece == wanted // _PIECE // 10:
                    gc.collect()
                    before = _resident()
            gc.collect()
            grown = _resident() - before
        octets = sum(path.stat().st_size for path in Path(folder).glob("*.gz"))
        with gzip.open(next(Path(folder).glob("*.gz"))) as packed:
            json.loads(packed.readline())
    warm = len(spent[0]) // 10  # files are fetched, texts wake
    without, having = (found[warm:] for found in spent)
    each = statistics.median(b - a for a, b in zip(without, having, strict=True)) / _PIECE
    return {
        "requests": float(wanted),
        "each": each,
        "least": (min(having) - min(without)) / _PIECE,
        "seconds_with": statistics.median(having) * len(spent[1]),
        "octets": octets / wanted,
        "grown": float(grown),
    }


def _url(rng: random.Random, number: int) -> str:
    return f"https://h{rng.randrange(HOSTS)}.example/articles/{number}/page-{rng.random():.6f}.html"


def _resident() -> int:
    """Return the bytes of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def _crawl(pages: int, rounds: int) -> Spread:
    """Return the ratio of a crawl's processor time with a record to that without."""
    taken: dict[bool, list[float]] = {False: [], True: []}
    with serving() as port, tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            for audited in (False, True) if number % 2 else (True, False):
                done = subprocess.run(
                    [
                        *(sys.executable, "-m", "benchmarks.crawlers"),
                        _CRAWLER,
                        str(port),
                        str(pages),
                    ],
                    capture_output=True,
                    text=True,
                    timeout=300,
                    check=True,
                    env={**os.environ, **({AUDIT: folder} if audited else {})},
                )
                taken[audited].append(json.loads(done.stdout.splitlines()[-1])["processor"])
    return ratios(taken[True], taken[False])
