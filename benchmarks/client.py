"""`RemoteGatekeeper` with a sidecar in another process: checks per second.

Every URL is asked about only once over all rounds, so the client's decision cache never hits. The
cache is enabled, as by default, so its cost is included in the figures.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from urllib.parse import quote

import aiohttp

from benchmarks.options import Options
from benchmarks.report import Table, count, seconds
from benchmarks.sidecar import _server

__all__ = ["run"]

AT_ONCE = 1000
"""Concurrent questions."""

Work = Callable[[list[str]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Spent:
    """Cost of one question in one round."""

    wall: float
    processor: float


def run(options: Options) -> list[Table]:
    """Return one table for each installed event loop, which client and server both use."""
    loops: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": asyncio.new_event_loop}
    try:
        import uvloop

        loops["uvloop"] = uvloop.new_event_loop
    except ImportError:
        pass
    tables = []
    for name, factory in loops.items():
        with ExitStack() as stack:
            server = stack.enter_context(_server("gatekeeper", name))
            with asyncio.Runner(loop_factory=factory) as runner:
                taken = runner.run(_measure(server.port, server.origins, options))
        tables.append(_table(name, taken))
    return tables


def _table(loop: str, taken: dict[str, list[Spent]]) -> Table:
    rows, figures = [], {}
    for name, rounds in taken.items():
        wall = statistics.median(spent.wall for spent in rounds)
        processor = statistics.median(spent.processor for spent in rounds)
        rows.append((name, f"{count(1 / wall)}/s", seconds(processor), f"{count(1 / processor)}/s"))
        figures[name] = {"seconds_each": wall, "client_processor_seconds_each": processor}
    return Table(
        f"The client of a sidecar ({loop})",
        ("", "checks, by the clock", "client's time each", "checks of one core"),
        rows,
        "RemoteGatekeeper from one process: at least 50,000 checks/s",
        (
            f"{AT_ONCE} questions at once over 100 warm origins, no URL twice; the sidecar "
            "runs beside it on the same machine.",
            "by hand: aiohttp asks GET /v1/check for each URL, over 32 connections.",
        ),
        figures,
    )


async def _measure(port: int, origins: list[str], options: Options) -> dict[str, list[Spent]]:
    from gatekeeper import RemoteGatekeeper

    where = f"http://127.0.0.1:{port}"
    size = 5 * AT_ONCE if options.quick else 20 * AT_ONCE
    urls = _urls(origins)
    connector = aiohttp.TCPConnector(limit=32)
    async with (
        RemoteGatekeeper(where) as gate,
        aiohttp.ClientSession(where, connector=connector) as session,
    ):
        await gate.check_all(f"{origin}/" for origin in origins)

        async def check(batch: list[str]) -> None:
            for start in range(0, len(batch), AT_ONCE):
                some = batch[start : start + AT_ONCE]
                assert all(await asyncio.gather(*map(gate.check, some)))

        async def check_many(batch: list[str]) -> None:
            async for decision in gate.check_many(batch):
                assert decision

        async def crawlers(batch: list[str]) -> None:
            rest = iter(batch)

            async def one() -> None:
                for url in rest:
                    assert await gate.allowed(url)

            await asyncio.gather(*(one() for _ in range(AT_ONCE)))

        async def by_hand(batch: list[str]) -> None:
            rest = iter(batch[: len(batch) // 10])

            async def one() -> None:
                for url in rest:
                    async with session.get(f"/v1/check?url={quote(url, safe='')}") as answer:
                        assert (await answer.json())["verdict"] == "allow"

            await asyncio.gather(*(one() for _ in range(32)))

        works: dict[str, tuple[Work, int]] = {
            "gather(gate.check(url), ...)": (check, 1),
            "gate.check_many(urls)": (check_many, 1),
            f"{AT_ONCE} crawlers, each gate.allowed(url)": (crawlers, 1),
            "by hand": (by_hand, 10),
        }
        return await _rounds(works, urls, size, options.rounds(quick=5, full=15))


def _urls(origins: list[str]) -> Iterator[str]:
    for number in itertools.count():
        yield f"{origins[number % len(origins)]}/page/{number}"


async def _rounds(
    works: dict[str, tuple[Work, int]], urls: Iterator[str], size: int, rounds: int
) -> dict[str, list[Spent]]:
    taken: dict[str, list[Spent]] = {name: [] for name in works}
    names = list(works)
    rng = random.Random(8750)
    for turn in range(rounds + 1):
        rng.shuffle(names)
        for name in names:
            work, share = works[name]
            batch = list(itertools.islice(urls, size))
            gc.collect()
            start, began = time.process_time(), time.perf_counter()
            await work(batch)
            done = size // share
            spent = Spent(
                (time.perf_counter() - began) / done, (time.process_time() - start) / done
            )
            if turn:
                taken[name].append(spent)
    return taken
