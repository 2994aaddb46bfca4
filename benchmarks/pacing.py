"""The scheduler: `python -m benchmarks.pacing [--quick]`.

Under virtual time the scheduler's engine serves simulated sites, checked by a judge. In a real
event loop two thousand workers acquire and release leases. The memory of an idle host is measured
in a separate process.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from benchmarks.options import Options
from benchmarks.report import Table, count, seconds
from benchmarks.resident import resident
from benchmarks.timing import Spread, spread
from gatekeeper.clock import SystemClock, VirtualClock
from gatekeeper.config import Config, PacingConfig
from gatekeeper.pacing.scheduler import Scheduler
from gatekeeper.robots.timing import RobotsInterval
from gatekeeper.testing.simulation import SimulationReport, simulate

__all__ = ["main", "run"]

WORKERS = 2_000
HOSTS = 20_000
INTERVAL = 0.02
"""Seconds between two requests of a host; short enough that workers seldom wait."""
_ASKED = 2_000
"""Hosts that a worker asks in turn, if every worker asks any host."""
_PARTS = 5
"""Parts of a run in a real loop, measured separately."""


def run(options: Options) -> list[Table]:
    """Measure all figures of the scheduler."""
    return [_simulated(options), _looped(options)]


# --- virtual time --------------------------------------------------------------------------


def _simulated(options: Options) -> Table:
    hosts, urls = (50_000, 250_000) if options.quick else (1_000_000, 5_000_000)
    report = simulate(hosts, urls)
    shared = simulate(hosts // 10, urls // 10, groups=100, seed=1)
    idle = _idle_host(100_000 if options.quick else 1_000_000)
    return Table(
        "The scheduler under virtual time",
        ("", "hosts", "leases", "leases/s", "violations", "virtual time", "blocks", "expired"),
        [_row("each host its own clock", report), _row("a third in 100 groups", shared)],
        "at least 150 k leases/s, 0 violations, at most 300 bytes an idle host",
        (
            f"An idle host costs {idle:.0f} bytes (resident), its name included.",
            "Sites ask for 0.5, 1, 2 or 10 s, answer in 0.05 to 1.5 s, and in one case of "
            "fifty refuse (429, 503), fail, never answer, or are not asked after all. The time "
            "is processor time and holds the making of the hosts, the sites and the judge.",
        ),
        {
            "leases_per_second": report.leases_per_second,
            "violations": sum(report.violations.values()) + sum(shared.violations.values()),
            "bytes_an_idle_host": idle,
        },
    )


def _row(name: str, report: SimulationReport) -> tuple[str, ...]:
    return (
        name,
        f"{report.hosts:,}",
        f"{report.leases:,}",
        count(report.leases_per_second),
        str(sum(report.violations.values())),
        seconds(report.virtual_seconds),
        f"{report.blocks:,}",
        f"{report.expired:,}",
    )


def _idle_host(hosts: int) -> float:
    """Measure the bytes of a host after one request, in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.pacing", "--idle", str(hosts)]
    return float(subprocess.run(command, capture_output=True, check=True, text=True).stdout)


async def _weigh(hosts: int) -> float:
    scheduler = Scheduler(
        Config(pacing=PacingConfig(max_hosts=hosts + 1)), clock=VirtualClock(), rng=random.Random(1)
    )
    await scheduler.open()
    wish = RobotsInterval()
    gc.collect()
    before = resident()
    for number in range(hosts):
        host = f"www.site-{number}.example"
        grant = await scheduler.acquire("https://x/", host, admit=lambda: wish)
        grant.report(200)
        grant.release()
    gc.collect()
    weight = (resident() - before) / hosts
    await scheduler.close()
    return weight


# --- a real loop ---------------------------------------------------------------------------


def _looped(options: Options) -> Table:
    length = 2.0 if options.quick else 10.0
    rows: dict[str, tuple[Spread, float]] = {}
    for loop, run in _runners():
        rows[f"each worker its own hosts, {loop}"] = run(_loop(length, shared=False))
        rows[f"any worker any host, {loop}"] = waiting = run(_loop(length, shared=True))
        share = waiting[1]
        rows[f"no scheduler, as many bare futures awaited, {loop}"] = run(_bare(length, share))
    return Table(
        "Turns in a real loop",
        ("", "acquire and release/s", "waited"),
        [(name, rate.shown(count), f"{waited:.0%}") for name, (rate, waited) in rows.items()],
        "at least 300 k/s with 20,000 hosts and 2,000 workers, 180 k/s where one in five waits",
        (
            f"{HOSTS:,} hosts that want {INTERVAL} s between two requests; each worker yields "
            "once while it holds its lease, reports and releases it. Seconds of processor time; "
            f"the loop is never idle. The median (p10 to p90) of {_PARTS} parts of "
            f"{length / _PARTS:.1f} s.",
        ),
        {name: rate._asdict() for name, (rate, _) in rows.items()},
    )


def _runners() -> list[tuple[str, Callable[[Coroutine[Any, Any, Any]], Any]]]:
    try:
        import uvloop
    except ImportError:
        return [("asyncio", asyncio.run)]
    return [("asyncio", asyncio.run), ("uvloop", uvloop.run)]


class _Count:
    """Counts the work of the workers, and tells them when to stop."""

    def __init__(self) -> None:
        self.done = self.waited = 0
        self.stop = False

    async def measure(
        self, length: float, workers: Iterable[Coroutine[Any, Any, None]]
    ) -> tuple[Spread, float]:
        """Return leases per second of processor time, and the share that waited."""
        tasks = [asyncio.create_task(worker) for worker in workers]
        await asyncio.sleep(0)  # each worker has its own hosts
        gc.collect()
        await asyncio.sleep(max(1.0, length / 4))  # every host is known
        first, first_waited, rates = self.done, self.waited, list[float]()
        for _ in range(_PARTS):
            begun, before = time.process_time(), self.done
            await asyncio.sleep(length / _PARTS)
            rates.append((self.done - before) / (time.process_time() - begun))
        many, late = self.done - first, self.waited - first_waited
        self.stop = True
        await asyncio.gather(*tasks)
        return spread(rates), late / max(1, many)


async def _loop(length: float, *, shared: bool) -> tuple[Spread, float]:
    scheduler = Scheduler(
        Config(pacing=PacingConfig(default_interval=INTERVAL)),
        clock=SystemClock(),
        rng=random.Random(1),
    )
    await scheduler.open()
    wish = RobotsInterval()
    names = [f"www.site-{number}.example" for number in range(HOSTS)]
    did = _Count()

    async def work(number: int) -> None:
        # A tuple of str, which the cycle collector skips: scanning forty million list entries
        # is not a cost of a lease.
        own = names[number::WORKERS]
        mine = tuple(random.Random(number).sample(names, _ASKED) if shared else own)
        while not did.stop:
            for host in mine:
                if did.stop:
                    return
                before = time.monotonic()
                grant = await scheduler.acquire("https://x/", host, admit=lambda: wish)
                did.waited += time.monotonic() - before > INTERVAL / 10
                await asyncio.sleep(0)
                grant.report(200)
                grant.release()
                did.done += 1

    found = await did.measure(length, map(work, range(WORKERS)))
    await scheduler.close()
    return found


async def _bare(length: float, share: float) -> tuple[Spread, float]:
    """Measure asyncio's own share: the same workers wait half an interval for a future and one
    timer, without a scheduler."""
    loop = asyncio.get_running_loop()
    waiting: deque[tuple[float, asyncio.Future[None]]] = deque()
    did = _Count()

    def wake() -> None:
        while waiting and waiting[0][0] <= loop.time():
            waiting.popleft()[1].set_result(None)
        if waiting:
            loop.call_at(waiting[0][0], wake)

    async def work(number: int) -> None:
        chance = random.Random(number).random
        while not did.stop:
            if chance() < share:
                did.waited += 1
                future = loop.create_future()
                waiting.append((loop.time() + INTERVAL / 2, future))
                if len(waiting) == 1:
                    loop.call_at(waiting[0][0], wake)
                await future
            await asyncio.sleep(0)
            did.done += 1

    return await did.measure(length, map(work, range(WORKERS)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pacing", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer hosts, shorter loops")
    parser.add_argument(
        "--idle", type=int, metavar="N", help="only measure the memory of N idle hosts"
    )
    given = parser.parse_args(arguments)
    if given.idle is not None:
        print(asyncio.run(_weigh(given.idle)))
        return 0
    for table in run(Options(quick=given.quick)):
        print(f"\n{table.markdown()}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
