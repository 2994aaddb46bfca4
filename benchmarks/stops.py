"""How long a gate's event loop is blocked by robots.txt files of 500 KiB.

One task asks a warm origin one question after another, as other clients of a sidecar would. A
second task meets an origin with a large file, and then asks on behalf of an agent new to the gate.
The figure is the longest wall-clock time that the first task was delayed.
"""

from __future__ import annotations

import asyncio
import gc
import time
from typing import Any

from benchmarks.corpus import AGENT
from benchmarks.options import Options
from benchmarks.report import Table, seconds
from benchmarks.shapes import SHAPES

__all__ = ["run"]

_WARM = "https://warm.example/page"
_WHAT = ("met", "met, of its own", "asked", "asked, of its own")
_QUICK = ("20,000 plain rules", "20,000 rules, half with wildcards", "10,000 groups")


def run(options: Options) -> list[Table]:
    """Return one table with a row per shape of file."""
    rounds = options.rounds(quick=3, full=5)
    names = [name for name in SHAPES if not options.quick or name in _QUICK]
    figures = {name: asyncio.run(_stops(SHAPES[name]().body, rounds)) for name in names}
    worst = {what: max(each[what] for each in figures.values()) for what in _WHAT}
    rows = [
        (name, *(seconds(each[what]) for what in _WHAT))
        for name, each in [*figures.items(), ("**the worst**", worst)]
    ]
    return [
        Table(
            "The longest stop of the loop",
            ("500 KiB of", *_WHAT),
            rows,
            "at most 10 ms",
            (
                "met: while the origin is met. asked: while another agent asks about it first. of "
                "its own: processor time of the loop's thread alone; the wall has what the thread "
                "beside it keeps the interpreter for, too, and other processes.",
                "Time between two turns of a task that does nothing but ask about a warm origin; "
                f"the least of {rounds} rounds.",
            ),
            figures,
        )
    ]


async def _stops(body: bytes, rounds: int) -> dict[str, float]:
    from gatekeeper.clock import VirtualClock
    from gatekeeper.fetching.outcomes import Outcome, Retrieval
    from gatekeeper.testing import ScriptedGate

    class Files:
        number = 0

        async def fetch(self, origin: str, validators: object = None) -> Retrieval:
            self.number += 1
            text = b"User-agent: *\nDisallow: /private\n"
            if "large" in origin:
                text = body[:-16] + b"\n# %d\n" % self.number
            return Retrieval(outcome=Outcome.RULES, status=200, body=text)

        async def reach(self, origin: str) -> bool | None:
            return None

        def close(self) -> None:
            """Do nothing: there is no connection."""

    stops: dict[str, list[float]] = {what: [] for what in _WHAT}
    scripted: Any = ScriptedGate(AGENT, clock=VirtualClock())
    scripted.robots_files = Files()
    async with scripted as gate:
        await gate.check(_WARM)
        for number in range(rounds):
            url = f"https://large{number}.example/page"
            for what, agent in (("met", None), ("asked", "otherbot")):
                gc.collect()
                asked = asyncio.create_task(gate.check(url, user_agent=agent))
                longest = own = 0.0
                before, worked = time.perf_counter(), time.thread_time()
                while not asked.done():
                    await gate.allowed(_WARM)
                    await asyncio.sleep(0)
                    now, work = time.perf_counter(), time.thread_time()
                    longest, before = max(longest, now - before), now
                    own, worked = max(own, work - worked), work
                asked.result()
                stops[what].append(longest)
                stops[f"{what}, of its own"].append(own)
    return {what: min(each) for what, each in stops.items()}
