"""How late leases start in an event loop that also does other work."""

from __future__ import annotations

import asyncio
import random
import time

from benchmarks.options import Options
from benchmarks.report import Table, count, seconds

__all__ = ["lateness"]

_HOSTS = 400
_WAITERS = 3
"""Tasks per host, each of which asks again after every turn."""
_INTERVAL = 0.25
_WORK = 2e-4
"""Processor time for one page in the same event loop, in seconds."""


def lateness(options: Options) -> Table:
    """Return the distribution of start times relative to the time when each turn was due."""
    length = 3.0 if options.quick else 15.0
    leases, timers, early, busy = asyncio.run(_measure(length))
    shares = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("largest", 1.0))
    figures = {name: (_at(leases, share), _at(timers, share)) for name, share in shares}
    rows = [(name, seconds(own), seconds(bare)) for name, (own, bare) in figures.items()]
    rows += [("too early", f"{early:,}", ""), ("how many", count(len(leases)), count(len(timers)))]
    return Table(
        "How late a lease starts",
        ("", "a lease", "a bare timer of the same loop"),
        rows,
        "p99 under 5 ms, none early",
        (
            f"{_HOSTS} hosts, one turn every {_INTERVAL} s each, {_WAITERS} tasks in line at "
            f"every host; {seconds(_WORK)} of other work in the same loop after each lease; the "
            f"loop was busy {busy:.0%} of the time.",
            "The bare timer is what loop.call_at manages meanwhile: whatever holds up the "
            "loop, or the process, holds up both.",
        ),
        {"late": figures, "early": early},
    )


def _at(values: list[float], share: float) -> float:
    """Return a quantile. A lease within the clock's own error counts as punctual."""
    ranked = sorted(values)
    return max(0.0, ranked[min(len(ranked) - 1, int(len(ranked) * share))])


async def _measure(length: float) -> tuple[list[float], list[float], int, float]:
    from gatekeeper import Config, Gatekeeper
    from gatekeeper.config import HostRule, PacingConfig

    # An operator's override replaces the files, so that no network is needed.
    config = Config(
        host=(HostRule(match="*", robots="allow", interval=_INTERVAL),),
        pacing=PacingConfig(default_interval=_INTERVAL),
    )
    rng = random.Random(5)
    late: list[float] = []
    early = 0
    end = time.monotonic() + length
    # Before and after the last head of each host: the clock was read in between.
    heads: dict[str, tuple[float, float]] = {}
    async with Gatekeeper("examplebot", config=config) as gate:

        async def visit(host: str, begin: float) -> None:
            nonlocal early
            await asyncio.sleep(begin)
            while time.monotonic() < end:
                async with gate.lease(f"http://{host}/") as lease:
                    now = time.monotonic()
                    if host in heads:
                        before, after = heads[host]
                        early += now < before + _INTERVAL
                        late.append(now - after - _INTERVAL)
                    before = time.monotonic()
                    lease.head()
                    heads[host] = (before, time.monotonic())
                    lease.report(status=200)
                _spin(_WORK)

        processor = time.process_time()
        loop = asyncio.get_running_loop()
        timers: list[float] = []

        def tick(due: float) -> None:
            now = loop.time()
            timers.append(now - due)
            if time.monotonic() < end:
                due = now + rng.random() * 0.004
                loop.call_at(due, tick, due)

        tick(loop.time())
        async with asyncio.TaskGroup() as group:
            for number in range(_HOSTS):
                # Staggered: all at the same time would measure the other work instead.
                begin = rng.random() * _INTERVAL
                for _ in range(_WAITERS):
                    group.create_task(visit(f"h{number}.example", begin))
        busy = (time.process_time() - processor) / length
    return late, timers, early, busy


def _spin(duration: float) -> None:
    end = time.perf_counter() + duration
    while time.perf_counter() < end:
        pass
