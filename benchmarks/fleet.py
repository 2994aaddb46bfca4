"""Throughput and memory of a fleet's store: `python -m benchmarks --only fleet`.

A real server on a unix socket, one process that takes and ends leases, and the memory of a host in
the store. Other load on the machine affects the figures by wall clock, but not those by processor
time.
"""

from __future__ import annotations

import asyncio
import gc
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis

from benchmarks.options import Options
from benchmarks.report import Table, count
from gatekeeper.clock import SystemClock
from gatekeeper.config import Config, FleetConfig, PacingConfig
from gatekeeper.fleet import RedisLedger
from gatekeeper.pacing.ledger import End
from gatekeeper.pacing.scheduler import Scheduler
from gatekeeper.robots.timing import RobotsInterval
from gatekeeper.sidecar.listening import rare_collections

__all__ = ["run"]

HOSTS = 4_000
NONE = RobotsInterval(0.0, "none")


@contextmanager
def store() -> Iterator[str]:
    """Run a server. Yield the path of its socket."""
    binary = shutil.which("valkey-server") or shutil.which("redis-server")
    if binary is None:
        raise RuntimeError("no valkey-server or redis-server is installed")
    folder = tempfile.mkdtemp(prefix="gk-", dir="/tmp")
    path = f"{folder}/s"
    command = [binary, "--port", "0", "--unixsocket", path, "--save", "", "--dir", folder]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        try:
            while not Path(path).exists():
                time.sleep(0.01)
            yield path
        finally:
            server.terminate()
            server.wait()
            shutil.rmtree(folder, ignore_errors=True)


def run(options: Options) -> list[Table]:
    """Measure leases per second, calls per lease, and memory per host."""
    leases = 10_000 if options.quick else 100_000
    rows, figures = [], {}
    for workers in (32, 256, 1024):
        for scopes in (1, 3):
            with store() as path:
                wall, cpu, served, calls = asyncio.run(_leases(path, leases, scopes, workers))
            rows.append(
                (
                    str(scopes),
                    str(workers),
                    count(leases / wall),
                    count(leases / cpu),
                    f"{served / leases * 1e6:.0f} us",
                    f"{calls / leases:.3f}",
                )
            )
            figures[f"{scopes} scopes, {workers} workers: leases/s of a processor"] = leases / cpu
    with store() as path:
        weight = asyncio.run(_memory(path, 5_000 if options.quick else 100_000))
    figures["bytes a host"] = weight
    return [
        _far(options),
        Table(
            "A fleet's ledger: one process, a store on the same machine",
            (
                *("scopes", "in flight", "leases/s", "leases/s of its processor"),
                *("of the store's", "calls a lease"),
            ),
            rows,
            "at least 20,000 leases/s with one scope, 8,000 with three; 400 bytes a host",
            (
                "A lease is taken and ended: two requests; a head that is not reported together "
                "with the end would be a third. "
                "One server carries about as many leases a second as its share of a lease goes "
                "into a second, whatever the number of members.",
                f"A host whose clock lies ahead weighs {weight:.0f} bytes in the store, its name "
                "included.",
            ),
            figures,
        ),
    ]


# --- over a slow connection ---------------------------------------------------------------------

_ONE_WAY = 0.01
"""Seconds; long enough that this machine's own delays matter little."""


class FarLedger(RedisLedger):
    """A ledger over a slow connection, which records the duration of calls and head reports."""

    def __init__(self, url: str) -> None:
        super().__init__(url, config=FleetConfig(), clock=SystemClock())
        self.trips: list[float] = []
        self.headed: dict[str, float] = {}
        self.told: list[float] = []
        store: Any = self._store
        near = store.scripts

        async def far(*arguments: Any) -> Any:
            begun = time.monotonic()
            await asyncio.sleep(_ONE_WAY)
            found = await near(*arguments)
            await asyncio.sleep(_ONE_WAY)
            self.trips.append(time.monotonic() - begun)
            return found

        store.scripts = far

    async def head(self, tokens: Sequence[str]) -> None:
        await super().head(tokens)
        self._note(tokens)

    async def end(self, ends: Sequence[End]) -> None:
        await super().end(ends)
        self._note([end.token for end in ends])

    def _note(self, tokens: Sequence[str]) -> None:
        now = time.monotonic()
        self.told += [now - self.headed.pop(token) for token in tokens if token in self.headed]


class _Collections:
    """Records full garbage collections while entered: they stop everything."""

    def __enter__(self) -> _Collections:
        self.pauses: list[float] = []
        self._begun = 0.0
        gc.callbacks.append(self._noted)
        return self

    def __exit__(self, *error: object) -> None:
        gc.callbacks.remove(self._noted)

    def _noted(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._begun = time.monotonic()
        elif info["generation"] == 2:
            self.pauses.append(time.monotonic() - self._begun)

    @property
    def said(self) -> str:
        """Describe how many there were, and the longest."""
        return f"{len(self.pauses)} of at most {max(self.pauses, default=0.0) * 1e3:.0f} ms"


def _far(options: Options) -> Table:
    length = 4.0 if options.quick else 15.0
    gc.collect()
    with rare_collections():  # as the sidecar and `gatekeeper fetch` have them
        with store() as path:
            late, trip, _ = asyncio.run(_distance(path, 200, 0.5, length))
        with store() as path, _Collections() as collections:
            _, long_trip, told = asyncio.run(_distance(path, 5_000, 1.0, length))
    shares = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))
    rows, figures = [], {}
    for name, share in shares:
        figures[name] = (_at(late, share) / trip, _at(told, share) / long_trip)
        rows.append((name, *(f"{one:.1f}" for one in figures[name])))
    return Table(
        f"A store {2 * _ONE_WAY * 1e3:.0f} ms away, in round trips",
        ("", "a lease after its local due time", "a head until it is told"),
        rows,
        "at p99: 3, and 2",
        (
            f"Left: 200 hosts at one request each 0.5 s, {len(late):,} leases; a round trip took "
            f"{trip * 1e3:.0f} ms. Right: 5,000 hosts at one each second, {len(told):,} heads; "
            f"{long_trip * 1e3:.0f} ms, under load, the store's own work included. A head counts "
            "as told when the store's answer is back. Full collections of garbage meanwhile: "
            f"{collections.said}. In virtual time, where nothing computes, it is 1.2 at p99 and "
            "1.8 at most (tests/fleet/test_explored.py).",
        ),
        figures,
    )


def _at(values: list[float], share: float) -> float:
    ranked = sorted(values)
    return max(0.0, ranked[min(len(ranked) - 1, int(len(ranked) * share))])


async def _distance(
    path: str, hosts: int, interval: float, length: float
) -> tuple[list[float], float, list[float]]:
    """Measure how late each lease started, the round trip, and the delay of each head report."""
    ledger = FarLedger(f"unix://{path}")
    scheduler, _ = await _scheduler(path, ledger)
    asked = RobotsInterval(interval, f"Crawl-delay {interval:g} s")
    late: list[float] = []
    rng = random.Random(3)
    end = time.monotonic() + length

    async def visit(host: str) -> None:
        await asyncio.sleep(rng.random() * interval)
        due = 0.0
        while time.monotonic() < end:
            grant = await scheduler.acquire("u", host, admit=lambda: asked)
            if due:
                late.append(time.monotonic() - due)
            await asyncio.sleep(0.002)
            now = ledger.headed[grant.hold.token] = time.monotonic()
            grant.head(now)
            due = now + interval
            await asyncio.sleep(0.005)
            grant.report(200)
            grant.release()

    await asyncio.gather(*(visit(f"h{number}") for number in range(hosts)))
    await scheduler.close()
    return late, sorted(ledger.trips)[len(ledger.trips) // 2], ledger.told


async def _scheduler(path: str, ledger: RedisLedger | None = None) -> tuple[Scheduler, RedisLedger]:
    ledger = ledger or RedisLedger(f"unix://{path}", config=FleetConfig(), clock=SystemClock())
    pacing = PacingConfig(max_in_flight=100_000)
    scheduler = Scheduler(
        Config(pacing=pacing), clock=SystemClock(), rng=random.Random(1), ledger=ledger
    )
    await scheduler.open()
    client = redis.Redis(unix_socket_path=path)
    client.hdel("{gatekeeper}:epoch", "until", "floor")  # the quarantine of a new store
    client.close()
    return scheduler, ledger


async def _leases(
    path: str, leases: int, scopes: int, workers: int
) -> tuple[float, float, float, int]:
    """Return wall and processor seconds, the store's processor seconds, and script calls."""
    scheduler, ledger = await _scheduler(path)
    left = leases

    async def work(number: int) -> None:
        nonlocal left
        shared = tuple(f"address:{number}.{one}" for one in range(scopes - 1))
        turn = number
        while left > 0:
            left -= 1
            turn = (turn + workers) % HOSTS
            grant = await scheduler.acquire("u", f"h{turn}", admit=lambda: NONE, scopes=shared)
            grant.report(200)
            grant.release()

    client: Any = redis.Redis(unix_socket_path=path)
    before, calls = _processor(client), ledger.stats().calls
    begun, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(work(number) for number in range(workers)))
    wall, cpu = time.perf_counter() - begun, time.process_time() - cpu
    served, calls = _processor(client) - before, ledger.stats().calls - calls
    client.close()
    await scheduler.close()
    return wall, cpu, served, calls


def _processor(client: Any) -> float:
    info = client.info("cpu")
    return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])


async def _memory(path: str, hosts: int) -> float:
    """Measure the bytes of a host whose clock lies ahead."""
    scheduler, _ = await _scheduler(path)
    client: Any = redis.Redis(unix_socket_path=path)
    before = client.info("memory")["used_memory"]
    asked = RobotsInterval(600.0, "Crawl-delay 600 s")

    async def one(host: str) -> None:
        grant = await scheduler.acquire("u", host, admit=lambda: asked)
        grant.release()

    for first in range(0, hosts, 1000):
        await asyncio.gather(*(one(f"www.host-{n}.example") for n in range(first, first + 1000)))
    await asyncio.sleep(0.5)
    after = client.info("memory")["used_memory"]
    client.close()
    await scheduler.close()
    return float(after - before) / hosts
