"""Leases of one process, compared with another checkout: `python -m benchmarks.seam OTHER`.

This checkout and the one in the folder OTHER take and end leases in a real event loop, alternately
and each in its own process. Processor time is compared.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import subprocess
import sys
import time

LEASES = 60_000
ROUNDS = 9


async def _leases() -> float:
    """Return the processor seconds for `LEASES` leases of the gatekeeper on the path."""
    from gatekeeper.clock import SystemClock
    from gatekeeper.config import Config, PacingConfig
    from gatekeeper.pacing.scheduler import Scheduler
    from gatekeeper.robots.timing import RobotsInterval

    scheduler = Scheduler(
        Config(pacing=PacingConfig(default_interval=0.0)),
        clock=SystemClock(),
        rng=random.Random(1),
    )
    await scheduler.open()
    none = RobotsInterval(0.0, "none")
    names = [f"www.site-{number}.example" for number in range(2_000)]

    async def work(number: int, many: int) -> None:
        for turn in range(many):
            host = names[(number + 64 * turn) % len(names)]
            grant = await scheduler.acquire("https://x/", host, admit=lambda: none)
            grant.head()
            grant.report(200)
            grant.release()
            if turn % 8 == 0:
                await asyncio.sleep(0)

    await asyncio.gather(*(work(number, 100) for number in range(64)))  # warm
    begun = time.process_time()
    await asyncio.gather(*(work(number, LEASES // 64) for number in range(64)))
    spent = time.process_time() - begun
    await scheduler.close()
    return spent


def main(arguments: list[str]) -> None:
    """Print the ratio of the medians, and of the best."""
    if not arguments:
        print(asyncio.run(_leases()))
        return
    found: dict[str, list[float]] = {".": [], arguments[0]: []}
    for _ in range(ROUNDS):
        for path, spent in found.items():
            environment = {**os.environ, "PYTHONPATH": os.path.abspath(path)}
            command = [sys.executable, os.path.abspath(__file__)]
            answer = subprocess.run(
                command, env=environment, capture_output=True, check=True, text=True, cwd="/"
            )
            spent.append(float(answer.stdout))
    ours, other = found.values()
    for name, of in (("median", statistics.median), ("best", min)):
        print(f"{name}: {of(ours):.3f} s against {of(other):.3f} s: {of(ours) / of(other):.3f}")


if __name__ == "__main__":
    main(sys.argv[1:])
