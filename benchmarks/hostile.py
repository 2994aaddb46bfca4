"""The worst 500 KiB files that we can construct: the cost of parsing and asking each.

Each parser runs in its own process with a memory limit. A parser that exceeds the time limit for
one file is stopped and continues with the next.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.corpus import AGENT
from benchmarks.options import Options
from benchmarks.peers import BASELINE, OURS, installed
from benchmarks.report import Table, seconds
from benchmarks.shapes import SHAPES

__all__ = ["run"]

_MEMORY = 3 << 30
"""Limit of a parser's address space, in bytes."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Processor time for one file, in seconds."""

    parse: float
    first: float
    """The first answer, including the choice of the agent."""
    worst: float
    """The slowest URL afterwards: the median of several questions."""


def run(options: Options) -> list[Table]:
    """Return a table with one row per shape, three columns per parser, and the worst of each."""
    patience = 5.0 if options.quick else 20.0
    names = [peer.name for peer in installed((OURS, BASELINE, "reppy (C++)"))]
    costs = {name: _all_shapes(name, patience) for name in names}
    rows = [
        (shape, *(cell for name in names for cell in _cells(costs[name][shape])))
        for shape in SHAPES
    ]
    worst = [cell for name in names for cell in _worst(list(costs[name].values()))]
    rows.append(("**worst of the column**", *worst))
    columns = ("500 KiB of", *(f"{name}: {what}" for name in names for what in _WHAT))
    return [
        Table(
            "The worst files",
            columns,
            rows,
            "parse under 100 ms, an answer under 5 ms, whatever the file",
            (
                "parse: median of three. first: the first answer, the choice of the agent "
                "included. then: the slowest of the URLs made for the shape (up to 2,000 "
                "octets), median of five.",
                "Who puts work off until the first answer is to be judged by parse and first "
                "together.",
                f"A parser that needs more than {patience:.0f} s or 3 GiB for one file is stopped.",
            ),
            {name: {shape: _plain(cost) for shape, cost in costs[name].items()} for name in names},
        )
    ]


_WHAT = ("parse", "first", "then")


def _plain(cost: Cost | str) -> Any:
    return cost if isinstance(cost, str) else [cost.parse, cost.first, cost.worst]


def _cells(cost: Cost | str) -> tuple[str, str, str]:
    if isinstance(cost, str):
        return cost, "", ""
    return seconds(cost.parse), seconds(cost.first), seconds(cost.worst)


def _worst(costs: list[Cost | str]) -> tuple[str, str, str]:
    done = [cost for cost in costs if isinstance(cost, Cost)]
    stopped = len(costs) - len(done)
    cells = (
        seconds(max(cost.parse for cost in done)),
        seconds(max(cost.first for cost in done)),
        seconds(max(cost.worst for cost in done)),
    )
    return (f"{cells[0]}, {stopped} stopped", *cells[1:]) if stopped else cells


def _all_shapes(name: str, patience: float) -> dict[str, Cost | str]:
    context = multiprocessing.get_context("spawn")
    costs: dict[str, Cost | str] = {}
    worker: _Worker | None = None
    for shape in SHAPES:
        worker = worker or _Worker(context, name)
        answer = worker.ask(shape, patience)
        costs[shape] = answer
        if isinstance(answer, str):
            worker.stop()
            worker = None
    if worker is not None:
        worker.stop()
    return costs


class _Worker:
    """A process that measures one parser, shape by shape."""

    def __init__(self, context: Any, name: str) -> None:
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, name), daemon=True)
        self._process.start()
        theirs.close()
        self._pipe.recv()

    def ask(self, shape: str, patience: float) -> Cost | str:
        """Return the cost of the shape, or a text that says why there is none."""
        self._pipe.send(shape)
        # Parsing three times and asking some URLs takes less than a second if the goals are met.
        if not self._pipe.poll(patience):
            return f"> {patience:.0f} s"
        try:
            cost: Cost | str = self._pipe.recv()
            return cost
        except EOFError:
            return "died"

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _serve(pipe: Connection, name: str) -> None:
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    except ImportError:
        pass
    # Some parsers print what they could not read, which may be half of the file.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    (peer,) = installed((name,))
    pipe.send("ready")
    while True:
        shape = SHAPES[pipe.recv()]()
        try:
            pipe.send(_cost(peer.parse, peer.ready, shape.body, shape.urls))
        except MemoryError:
            pipe.send("> 3 GiB")
        except Exception as error:  # noqa: BLE001 - any error is the result
            pipe.send(type(error).__name__)


def _cost(
    parse: Callable[[bytes], Any],
    ready: Callable[[Any, str], Callable[[str], bool]],
    body: bytes,
    urls: tuple[str, ...],
) -> Cost:
    firsts: list[float] = []
    parses: list[float] = []
    # Three files and three first answers; a slow one is measured only once.
    while len(parses) < 3 and sum(parses) + sum(firsts) < 1.0:
        start = time.process_time()
        parsed = parse(body)
        middle = time.process_time()
        ask = ready(parsed, AGENT)
        ask(urls[0])
        end = time.process_time()
        parses.append(middle - start)
        firsts.append(end - middle)
    worst = max(_asking(ask, url) for url in urls)
    return Cost(statistics.median(parses), statistics.median(firsts), worst)


def _asking(ask: Callable[[str], bool], url: str) -> float:
    taken: list[float] = []
    while len(taken) < 5 and sum(taken) < 0.5:
        # A different URL of the same length each time, so that no cache of answers helps.
        fresh = f"{url}?{len(taken)}"
        start = time.process_time()
        ask(fresh)
        taken.append(time.process_time() - start)
    return statistics.median(taken)
