"""Cost of an origin in a gate: first contact, answers among 300,000 origins, and memory.

Complete gates with a stand-in for fetching, so that no network is measured. The files are those of
the corpus, in its mix of sizes, each with a unique comment; one origin in seven has no file.
Settings are the defaults. Every table is measured in a fresh process.
"""

from __future__ import annotations

import asyncio
import gc
import json
import math
import random
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.corpus import AGENT, Site
from benchmarks.options import Options
from benchmarks.report import Table, count, seconds
from benchmarks.resident import resident
from benchmarks.timing import spread

__all__ = ["run"]

_MISSING = 7
"""One in this many origins has no robots.txt."""
_MET = 2_000
"""New origins per round."""


def run(options: Options) -> list[Table]:
    """Return three tables."""
    return [_meeting(options), _even(options), _memory(options)]


def _child(options: Options, **task: Any) -> dict[str, Any]:
    task |= {"corpus": options.corpus, "quick": options.quick}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.origins"],
        input=json.dumps(task),
        capture_output=True,
        text=True,
        check=True,
    )
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def _meeting(options: Options) -> Table:
    rounds = options.rounds(quick=3, full=15)
    figures = _child(options, what="meeting", rounds=rounds)
    rows = [(name, spread(values).shown(seconds)) for name, values in figures.items()]
    return Table(
        "Meeting an origin",
        ("", "a question, and p10 to p90 of the rounds"),
        rows,
        "the first check at most 120 µs",
        (
            f"Processor time of the whole process, {_MET:,} origins a round, {rounds} rounds; each "
            "origin is new to its round, and its file to the process.",
        ),
        figures,
    )


def _even(options: Options) -> Table:
    origins = 30_000 if options.quick else 300_000
    asked = 100_000 if options.quick else 200_000
    figures = _child(options, what="even", origins=origins, asked=asked)
    rows = [
        ("`allowed`, a question", seconds(figures["allowed"]["mean"])),
        ("its p50", seconds(figures["allowed"]["p50"])),
        ("its p99", seconds(figures["allowed"]["p99"])),
        ("the longest", seconds(figures["allowed"]["longest"])),
        ("`check`, a question", seconds(figures["check"]["mean"])),
        ("its p99", seconds(figures["check"]["p99"])),
        ("the longest stop of the loop while they are met", seconds(figures["stop_meeting"])),
        ("the longest in the day after, as all of them expire", seconds(figures["stop_day"])),
        ("a full garbage collection", seconds(figures["collection"])),
        ("memory of an origin, met", f"{figures['bytes_met']:,.0f} B"),
        ("and asked about", f"{figures['bytes_asked']:,.0f} B"),
    ]
    return Table(
        f"{count(origins)} origins, asked about evenly",
        ("", ""),
        rows,
        "6 µs a question, p99 under 50 µs, no stop over 20 ms, 3 kB an origin that answers, a full "
        "collection under 50 ms",
        (
            f"{asked:,} questions of `allowed`, then as many of `check`, each about an origin "
            "drawn at random: URLs of its site, half of them aimed at its rules.",
            "Times of single questions are processor time of the loop's thread, less what reading "
            "that clock takes; the mean is of the whole process. A stop is one step of the loop "
            "with one question in it, timers and garbage collections included, which leave out "
            "what there was before the first origin (gc.freeze), as a sidecar's do. The full "
            "collection at the end leaves nothing out.",
            "memory: what the process grew by, resident, for each origin.",
        ),
        figures,
    )


def _memory(options: Options) -> Table:
    each = _child(options, what="memory", origins=5_000 if options.quick else 25_000)["bytes"]
    return Table(
        "Memory of an origin in the gate",
        ("resident", "origins in 1 GB"),
        [(f"{each:,.0f} B", f"{count(1e9 / each)}")],
        "2.5 kB",
        (
            "Record, text, policy for one agent, asked about one URL; half of the origins were "
            "warm-up.",
        ),
        {"hot": each},
    )


# --- in another process ----------------------------------------------------------------


class _Files:
    """The stand-in from which the gate gets its robots.txt files."""

    def __init__(self, sites: list[Site]) -> None:
        self._sites = sites
        self.ready: dict[str, bytes] = {}
        """Files made in advance, by origin."""

    def site(self, number: int) -> Site:
        return self._sites[number % len(self._sites)]

    def body(self, number: int) -> bytes:
        """Return the file of the origin; empty if it has none."""
        if number % _MISSING == 0:
            return b""
        body = self.site(number).body
        end = b"\r\n" if body.endswith(b"\r\n") else b"\n"
        return body + (b"" if body.endswith(b"\n") else end) + b"# %d" % number + end

    async def fetch(self, origin: str, validators: object = None) -> Any:
        from gatekeeper.fetching.outcomes import Outcome, Retrieval, classify_body

        body = self.ready.get(origin)
        if body is None:
            body = self.body(int(origin.rpartition("site")[2].partition(".")[0]))
        if not body:
            return Retrieval(outcome=Outcome.NO_FILE, status=404, took=0.25)
        outcome = classify_body(Outcome.RULES, body, truncated=False)
        return Retrieval(outcome=outcome, status=200, body=body, took=0.25)

    async def reach(self, origin: str) -> bool | None:
        return None

    def close(self) -> None:
        """Do nothing: there is no connection."""


def _gate(files: _Files, **settings: Any) -> Any:
    from gatekeeper import Config
    from gatekeeper.clock import VirtualClock
    from gatekeeper.config import CacheConfig
    from gatekeeper.testing import ScriptedGate

    config = Config(cache=CacheConfig(**settings))
    gate: Any = ScriptedGate(AGENT, config=config, clock=VirtualClock())
    gate.robots_files = files
    return gate


def _url(number: int, files: _Files, rng: random.Random) -> str:
    """Return a URL of the origin: one of its site's, with a unique suffix."""
    url = rng.choice(files.site(number).urls)
    path = "/" + url.split("/", 3)[3] if url.count("/") > 2 else "/"
    return f"https://www.site{number}.example{path}{rng.randrange(10**6)}"


async def _meet(files: _Files, task: dict[str, Any]) -> dict[str, list[float]]:
    rng = random.Random(5)
    taken: dict[str, list[float]] = {}
    async with _gate(files) as gate:
        for turn in range(task["rounds"] + 1):
            numbers = range(1 + turn * _MET, 1 + (turn + 1) * _MET)
            await asyncio.sleep(0)
            files.ready = {f"https://www.site{n}.example": files.body(n) for n in numbers}
            gc.collect()
            gc.freeze()
            for name, ask in (
                ("the first `check`", gate.check),
                ("the second", gate.check),
                ("the third", gate.check),
                ("the fourth, `allowed`", gate.allowed),
            ):
                urls = [_url(number, files, rng) for number in numbers]
                start = time.process_time()
                for url in urls:
                    await ask(url)
                spent = time.process_time() - start
                if turn:
                    taken.setdefault(name, []).append(spent / _MET)
            gc.unfreeze()
    return taken


class _Steps:
    """Records the longest step of the event loop, in processor time of its thread."""

    def __init__(self) -> None:
        self.longest = 0.0
        self._last = time.thread_time()

    async def end(self) -> None:
        """End a step and begin the next one."""
        self.longest = max(self.longest, time.thread_time() - self._last)
        await asyncio.sleep(0)  # here the loop calls the timers that are due
        now = time.thread_time()
        self.longest, self._last = max(self.longest, now - self._last), now


async def _wait(clock: Any, seconds: float, steps: _Steps) -> None:
    """Advance virtual time timer by timer: timers due at different times are separate steps."""
    end = clock.monotonic() + seconds
    while (due := clock.next_timer()) is not None and due <= end:
        clock.advance(max(0.0, math.nextafter(due, math.inf) - clock.monotonic()))
        await steps.end()
    clock.advance(max(0.0, end - clock.monotonic()))


async def _ask(ask: Callable[[str], Any], urls: list[str]) -> dict[str, float]:
    clock = time.thread_time_ns
    for url in urls[: len(urls) // 10]:
        await ask(url)
    half = urls[: len(urls) // 2]
    start = time.process_time()
    for url in half:
        await ask(url)
    mean = (time.process_time() - start) / len(half)
    least = min(-clock() + clock() for _ in range(1000))
    single: list[int] = []
    for url in urls[len(urls) // 2 :]:
        start_ns = clock()
        await ask(url)
        single.append(clock() - start_ns - least)
    single.sort()
    return {
        "mean": mean,
        "p50": single[len(single) // 2] / 1e9,
        "p99": single[len(single) * 99 // 100] / 1e9,
        "longest": single[-1] / 1e9,
    }


async def _evenly(files: _Files, task: dict[str, Any]) -> dict[str, Any]:
    rng = random.Random(6)
    origins, asked = task["origins"], task["asked"]
    figures: dict[str, Any] = {}
    async with _gate(files) as gate:
        for number in range(500):  # objects made once, independent of the origins
            await gate.check(_url(10**7 + number, files, rng))
        gc.collect()
        gc.freeze()  # as docs/python.md recommends
        before = resident()
        steps = _Steps()
        for number in range(origins):
            await gate.check(_url(number, files, rng))
            await steps.end()
        figures["stop_meeting"] = steps.longest
        gc.collect()
        figures["bytes_met"] = (resident() - before) / origins
        for name, ask in (("allowed", gate.allowed), ("check", gate.check)):
            urls = [_url(rng.randrange(origins), files, rng) for _ in range(asked)]
            figures[name] = await _ask(ask, urls)
            del urls
        steps = _Steps()
        for _ in range(origins):  # one day later every record expires, and is fetched again
            await _wait(gate._clock, 86_400.0 / origins, steps)
            await gate.check(_url(rng.randrange(origins), files, rng))
            await steps.end()
        figures["stop_day"] = steps.longest
        gc.unfreeze()
        start = time.process_time()
        gc.collect()
        figures["collection"] = time.process_time() - start
        figures["bytes_asked"] = (resident() - before) / origins
    return figures


async def _hold(files: _Files, task: dict[str, Any]) -> dict[str, float]:
    rng = random.Random(7)
    half = task["origins"]
    async with _gate(files, max_bytes=1 << 34) as gate:

        async def ask(first: int, last: int) -> None:
            for number in range(first, last):
                await gate.check(_url(number, files, rng))

        await ask(0, half)
        gc.collect()
        before = resident()
        await ask(half, 2 * half)
        gc.collect()
        return {"bytes": (resident() - before) / half}


def main() -> None:
    """Run the measurement that is requested on standard input."""
    task = json.loads(sys.stdin.read())
    files = _Files(Options(task["corpus"], task["quick"]).sites())
    work = {"meeting": _meet, "even": _evenly, "memory": _hold}[task["what"]]
    print(json.dumps(asyncio.run(work(files, task))))


if __name__ == "__main__":
    main()
