"""Many tasks waiting for one host: `python -m benchmarks.waiters [--quick]`.

Many tasks begin to wait in one iteration of the event loop, and are cancelled in one iteration. A
heartbeat in the same loop measures how long others are delayed meanwhile. Tasks that each wait for
a plain future show asyncio's own share. Each case runs in its own process.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from typing import Any

from benchmarks.options import Options
from benchmarks.report import Table, seconds
from benchmarks.resident import resident

__all__ = ["main", "run"]

WAITERS = 100_000
BARE = "bare tasks"
_HOST = "http://a.example/"


def run(options: Options) -> list[Table]:
    """Return one table without the cycle collector, and one with it."""
    count = 10_000 if options.quick else WAITERS
    rounds = options.rounds(quick=1, full=5)
    return [
        _table(count, rounds, collect=False),
        _table(count, rounds, collect=True),
    ]


def _table(count: int, rounds: int, *, collect: bool) -> Table:
    figures: dict[str, dict[str, float]] = {}
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in _CASES}
    for _ in range(rounds):  # interleaved, so that a temporary slowdown affects all
        for name in _CASES:
            taken[name].append(_apart(name, count, collect=collect))
    for name, rows in taken.items():
        figures[name] = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    bare = figures[BARE]
    return Table(
        f"{count:,} waiters of one host, {'with' if collect else 'without'} the cycle collector",
        (
            "",
            "join: longest stall",
            "over bare",
            "leave: longest stall",
            "over bare",
            "CPU",
            "each",
        ),
        [
            (
                name,
                seconds(row["join"]),
                "" if name == BARE else f"{(row['join'] - bare['join']) * 1e3:+.0f} ms",
                seconds(row["leave"]),
                "" if name == BARE else f"{(row['leave'] - bare['leave']) * 1e3:+.0f} ms",
                seconds(row["processor"]),
                f"{row['bytes']:.0f} bytes",
            )
            for name, row in figures.items()
        ],
        "at most 1 s",
        (
            "A stall is processor time between two heartbeats of the loop, in which nobody else "
            "had a turn; the creation of tasks and URLs and the calls of `cancel` are not counted. "
            f"Median of {rounds}, each in a process of its own.",
        ),
        figures,
    )


def _apart(name: str, count: int, *, collect: bool) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.waiters", "--case", name, "--count", str(count)]
    if collect:
        command.append("--collect")
    done = subprocess.run(command, capture_output=True, check=True, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


class _Heartbeat:
    """Records the longest time between two iterations of the event loop, in processor time."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._last = time.process_time()
        self.longest = 0.0
        self._loop.call_soon(self._beat)

    def _beat(self) -> None:
        now = time.process_time()
        self.longest = max(self.longest, now - self._last)
        self._last = now
        self._loop.call_soon(self._beat)

    def reset(self) -> None:
        """Start measuring anew."""
        self._last, self.longest = time.process_time(), 0.0


Wait = Callable[[int, str], Coroutine[Any, Any, object]]
"""Called with a number and a URL, as each task of a crawler has its own."""
Waiting = Callable[[], int]


async def _bare(stack: AsyncExitStack) -> tuple[Wait, Waiting]:
    futures: list[asyncio.Future[None]] = []

    async def wait(_number: int, _url: str) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        futures.append(future)
        await future

    return wait, lambda: sum(not future.done() for future in futures)


async def _gate(stack: AsyncExitStack) -> Any:
    from gatekeeper import Config, Gatekeeper

    # An operator's override replaces the files, so that no network is needed.
    config = Config.from_dict(
        {
            "host": [{"match": "*", "robots": "allow", "interval": 1000.0}],
            "pacing": {"max_waiters": 1_000_000},
            "server": {"max_waiting": 1_000_000, "max_leases": 1_000_000},
        }
    )
    gate = await stack.enter_async_context(Gatekeeper("examplebot", config=config))
    (await gate.acquire(_HOST, owned=False)).end()
    return gate


async def _lease(stack: AsyncExitStack) -> tuple[Wait, Waiting]:
    gate = await _gate(stack)

    async def wait(_number: int, url: str) -> None:
        async with gate.lease(url):
            pass

    return wait, lambda: gate.stats().pacing.waiting


async def _acquire(stack: AsyncExitStack) -> tuple[Wait, Waiting]:
    gate = await _gate(stack)

    async def wait(_number: int, url: str) -> None:
        (await gate.acquire(url)).end()

    return wait, lambda: gate.stats().pacing.waiting


async def _queue(stack: AsyncExitStack) -> tuple[Wait, Waiting]:
    from gatekeeper import PoliteQueue

    gate = await _gate(stack)
    queue = await stack.enter_async_context(PoliteQueue(gate))
    await queue.put(_HOST)

    async def wait(_number: int, _url: str) -> None:
        async with await queue.get():
            pass

    return wait, lambda: len(queue._getters.futures)


def _polls(clients: int) -> Callable[[AsyncExitStack], Awaitable[tuple[Wait, Waiting]]]:
    async def polls(stack: AsyncExitStack) -> tuple[Wait, Waiting]:
        from gatekeeper.client.wire import LeaseRequestBody
        from gatekeeper.sidecar.lease_requests import LeaseWaiters

        gate = await _gate(stack)
        room = LeaseWaiters(gate.config.server, gate._clock)

        async def wait(number: int, url: str) -> None:
            wanted = LeaseRequestBody(url=url, wait=5000.0)
            (await room.acquire(gate, wanted, f"client {number % clients}")).end()

        return wait, lambda: len(room)

    return polls


_CASES: dict[str, Callable[[AsyncExitStack], Awaitable[tuple[Wait, Waiting]]]] = {
    BARE: _bare,
    "gate.lease": _lease,
    "gate.acquire": _acquire,
    "PoliteQueue.get": _queue,
    "sidecar, of one client": _polls(1),
    "sidecar, of as many clients": _polls(1 << 40),
}


async def _measure(name: str, count: int) -> dict[str, float]:
    async with AsyncExitStack() as stack:
        wait, waiting = await _CASES[name](stack)
        urls = [f"{_HOST}{number}" for number in range(count)]
        gc.collect()
        heart = _Heartbeat()
        before, begun = resident(), time.process_time()
        tasks = [asyncio.create_task(wait(number, url)) for number, url in enumerate(urls)]
        heart.reset()
        await asyncio.sleep(0.01)
        while waiting() < count:
            await asyncio.sleep(0.01)
        join, each = heart.longest, (resident() - before) / count
        for task in tasks:
            task.cancel()
        heart.reset()
        done = 0
        while done < count:  # not `asyncio.wait`, which adds a callback to each task
            await asyncio.sleep(0.01)
            while done < count and tasks[done].done():
                done += 1
        await asyncio.sleep(0.01)
        leave = heart.longest
        processor = time.process_time() - begun
        if not all(task.cancelled() for task in tasks):
            raise RuntimeError(f"{name}: somebody did not wait")
        del tasks
    return {"join": join, "leave": leave, "processor": processor, "bytes": each}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.waiters", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer waiters, one round")
    parser.add_argument("--case", metavar="NAME", choices=_CASES, help="measure only this case")
    parser.add_argument("--count", type=int, default=WAITERS, metavar="N", help="number of waiters")
    parser.add_argument("--collect", action="store_true", help="with the cycle collector")
    given = parser.parse_args(arguments)
    if given.case is not None:
        if not given.collect:
            gc.disable()
        print(json.dumps(asyncio.run(_measure(given.case, given.count))))
        return 0
    for table in run(Options(quick=given.quick)):
        print(f"\n{table.markdown()}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
