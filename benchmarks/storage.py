"""Speed of the journal and the state file: `python -m benchmarks.storage [--quick]`.

Measures the append that a grant waits for (`promise`), a batch, and a start. The state file is in a
temporary directory: set TMPDIR to measure another disk.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.options import Options
from benchmarks.report import Table
from gatekeeper.config import StorageConfig
from gatekeeper.storage import ClockRecord, OriginRecord, SqliteStorage, pack_body

__all__ = ["main", "measure", "run"]

CONFIG = StorageConfig()
AT = 1_790_000_000.0


def record(n: int, text: bytes, at: float = AT) -> OriginRecord:
    """Return a record with a file of 1.6 kB, the mean size of real files."""
    body, digest = pack_body(text)
    return OriginRecord(
        origin=f"https://www.site-{n}.example",
        outcome="rule",
        state="parsed",
        status=200,
        fetched_at=at,
        soft_expires_at=at + 80_000,
        expires_at=at + 86_400,
        hops=(f"https://www.site-{n}.example/robots.txt",),
        etag=f'"{n:x}"',
        good_outcome="rule",
        good_status=200,
        good_fetched_at=at,
        good_hops=(f"https://www.site-{n}.example/robots.txt",),
        body=body,
        body_hash=digest,
        took=0.1,
    )


def records(count: int) -> list[OriginRecord]:
    """Return records. Two thirds have a unique text, the others one of ten shared texts."""
    rules = b"".join(b"Disallow: /private/%d/\n" % n for n in range(65))
    return [
        record(n, b"User-agent: *\n%sAllow: /%d\n" % (rules, n if n % 3 else n % 10))
        for n in range(count)
    ]


async def _writes(path: Path, made: Sequence[OriginRecord]) -> dict[str, float]:
    async with SqliteStorage(path, config=CONFIG) as storage:
        start = time.perf_counter()
        for one in made:
            storage.put_origin(one)
        put = time.perf_counter() - start
        await storage.flush()
        first = time.perf_counter() - start
        start = time.perf_counter()
        for one in made:
            storage.put_origin(one)
        await storage.flush()
        again = time.perf_counter() - start
        start = time.perf_counter()
        for n in range(len(made)):
            storage.put_clock(ClockRecord(scope=f"www.site-{n}.example", next_at=AT + n))
        await storage.flush()
        clocks = time.perf_counter() - start
    count = len(made)
    return {
        "put_origin, in the loop (µs)": put / count * 1e6,
        "new records with bodies (1/s)": count / first,
        "records refreshed (1/s)": count / again,
        "clocks (1/s)": count / clocks,
    }


async def _start(path: Path, count: int) -> dict[str, float]:
    start = time.perf_counter()
    storage = SqliteStorage(path, config=CONFIG)
    await storage.open()
    opened = time.perf_counter() - start
    clocks = await storage.load_clocks()
    loaded = time.perf_counter() - start
    assert len(clocks) == count
    sample = range(0, count, max(count // 2000, 1))
    start = time.perf_counter()
    for n in sample:
        assert await storage.load_origin(f"https://www.site-{n}.example") is not None
    read = (time.perf_counter() - start) / len(sample)
    await storage.close()
    return {
        f"open, {count:,} records (ms)": opened * 1e3,
        "... and every clock loaded (ms)": loaded * 1e3,
        "one origin loaded from the file (µs)": read * 1e6,
    }


async def _promises(path: Path, count: int) -> dict[str, float]:
    """Append promises one by one, as grants do, while the writer absorbs them."""
    clocks = [
        ClockRecord(scope=f"www.site-{n % 5000}.example", next_at=AT + n) for n in range(count)
    ]
    took: list[float] = []
    async with SqliteStorage(path, config=CONFIG) as storage:
        for n, clock in enumerate(clocks):
            start = time.perf_counter()
            storage.promise(clock)
            took.append(time.perf_counter() - start)
            if n % 1000 == 0:
                await asyncio.sleep(0)
        assert storage.failing is None
    took.sort()
    return {
        "promise, median (µs)": statistics.median(took) * 1e6,
        "promise, mean (µs)": statistics.fmean(took) * 1e6,
        "promise, 99th of 100 (µs)": took[len(took) * 99 // 100] * 1e6,
        "promise, worst (ms)": took[-1] * 1e3,
    }


async def _measure(directory: Path, count: int) -> dict[str, float]:
    figures = await _promises(directory / "promises.db", count * 2)
    gc.collect()
    figures |= await _writes(directory / "state.db", records(count))
    gc.collect()
    return figures | await _start(directory / "state.db", count)


def measure(count: int) -> Table:
    """Measure everything. Return one table."""
    with tempfile.TemporaryDirectory(prefix="gatekeeper-storage-") as name:
        figures = asyncio.run(_measure(Path(name), count))
        size = (Path(name) / "state.db").stat().st_size
    figures[f"state file, {count:,} records (MB)"] = size / 1e6
    return Table(
        title="Storage",
        columns=("what", "figure"),
        rows=[
            (what, f"{value:,.0f}" if value >= 100 else f"{value:,.2f}")
            for what, value in figures.items()
        ],
        goal="at least 20,000 record writes a second in batches; "
        "start with 100,000 records in under 2 s; a promise in under 10 µs",
        notes=(
            "Every commit is flushed to the disk (synchronous=FULL); a promise is one write(2).",
        ),
        figures=figures,
    )


def run(options: Options) -> list[Table]:
    """Run the suite for `python -m benchmarks`."""
    return [measure(options.rounds(quick=10_000, full=100_000))]


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.storage", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the records")
    options = parser.parse_args(arguments)
    print(measure(10_000 if options.quick else 100_000).markdown())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
