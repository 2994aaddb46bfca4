"""What a whole origin costs the gate: hot (ready to answer) and cold (packed away).

A fresh process opens the gate's directory over a stand-in that hands out the files, each a
different text, asks about each once, and reads how much resident memory grew. Half of the
origins are asked first, to fill every arena, and do not count.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import subprocess
import sys
from typing import Any

from benchmarks.corpus import AGENT
from benchmarks.options import Options
from benchmarks.report import Table, count
from benchmarks.resident import resident

__all__ = ["run"]

_HOT = 5_000
"""Origins that are kept ready where the cold ones are measured."""


def run(options: Options) -> list[Table]:
    """One table of two rows."""
    origins = 20_000 if options.quick else 100_000
    rows, figures = [], {}
    for name, wanted, hot in (("hot", origins // 4, origins), ("cold", origins, _HOT)):
        task = {"corpus": options.corpus, "origins": wanted, "hot": hot}
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.origins"],
            input=json.dumps(task),
            capture_output=True,
            text=True,
            check=True,
        )
        figures[name] = json.loads(done.stdout)["bytes"]
        rows.append((name, f"{figures[name]:,.0f} B", f"{count(1e9 / figures[name])}"))
    return [
        Table(
            "Memory of an origin in the gate",
            ("", "resident", "origins in 1 GB"),
            rows,
            "a cold one at most 600 bytes",
            (
                "hot: record, text, policy for one agent, asked about one URL. cold: what "
                "stays when it was not asked about for long; half of them were warm-up.",
            ),
            figures,
        )
    ]


async def _measure(task: dict[str, Any]) -> float:
    from gatekeeper.clock import VirtualClock
    from gatekeeper.config import CacheConfig, Config
    from gatekeeper.fetching.directory import Directory
    from gatekeeper.fetching.outcomes import Outcome, Retrieval

    sites = Options(task["corpus"]).sites()

    class Files:
        number = 0

        async def fetch(self, origin: str, validators: object = None) -> Retrieval:
            self.number += 1
            body = sites[self.number % len(sites)].body + f"\n# {self.number}\n".encode()
            return Retrieval(outcome=Outcome.RULES, status=200, body=body, took=0.25)

        async def reach(self, origin: str) -> bool | None:
            return None

    config = Config(cache=CacheConfig(hot_records=task["hot"], max_bytes=1 << 34))
    directory = Directory(Files(), config=config, clock=VirtualClock(), rng=random.Random(1))
    await directory.open()

    async def ask(first: int, last: int) -> None:
        for number in range(first, last):
            record = await directory.get(f"https://www.site{number}.example")
            robots = record.standing(VirtualClock(start=1.0)).robots
            if robots is not None:
                policy = robots.policy(AGENT)
                policy.allowed("/index.html")
                record.keep_policy(AGENT, policy)
        # What is not asked for again leaves the shelf of hot ones as others come.

    half = task["origins"]
    await ask(0, half)
    gc.collect()
    before = resident()
    await ask(half, 2 * half)
    gc.collect()
    after = resident()
    await directory.close()
    return float((after - before) / half)


if __name__ == "__main__":
    print(json.dumps({"bytes": asyncio.run(_measure(json.loads(sys.stdin.read())))}))
