"""A crawl by several processes, judged by the log of the sites alone; what can break breaks.

python -m tests.fleet.crawl --seconds 60 --members 8 --hosts 60
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from tests.fleet.server import Server

INTERVAL = 0.4
"""Seconds that each site's robots.txt asks for."""
RETRY_AFTER = 2
TOLERANCE = 0.002
ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Visit:
    """One request, as the site saw it."""

    path: str
    arrived: float
    head: float = 0.0
    end: float = 0.0
    status: int = 0


@dataclass
class Sites:
    """Servers on loopback addresses, and their logs."""

    hosts: int
    rng: random.Random
    slowest: float = 0.8
    log: dict[str, list[Visit]] = field(default_factory=lambda: defaultdict(list))
    port: int = 0
    servers: list[asyncio.Server] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        return [f"127.0.{1 + n // 200}.{1 + n % 200}" for n in range(self.hosts)]

    async def open(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        for name in self.names:
            self.servers.append(
                await asyncio.start_server(
                    lambda r, w, name=name: self.serve(name, r, w), name, self.port
                )
            )

    async def serve(
        self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while line := await reader.readline():
                visit = Visit(line.split()[1].decode(), time.monotonic())
                self.log[name].append(visit)
                while (await reader.readline()).strip():
                    pass
                await self.answer(visit, writer)
        writer.close()

    async def answer(self, visit: Visit, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(self.rng.choice((0.0, 0.05, 0.3, self.slowest)))
        visit.status, more, body = 200, "", b"page"
        if visit.path == "/robots.txt":
            body = f"User-agent: *\nCrawl-delay: {INTERVAL}\n".encode()
        elif self.rng.random() < 0.02:
            visit.status, more = 429, f"Retry-After: {RETRY_AFTER}\r\n"
        visit.head = visit.end = time.monotonic()
        head = f"HTTP/1.1 {visit.status} x\r\nContent-Length: {len(body)}\r\n{more}\r\n"
        with contextlib.suppress(OSError):
            writer.write(head.encode())
            if self.rng.random() < 0.3:
                await asyncio.sleep(0.1)
            visit.end = time.monotonic()
            writer.write(body)
            await writer.drain()

    def close(self) -> None:
        for server in self.servers:
            server.close()

    @property
    def visits(self) -> int:
        return sum(map(len, self.log.values()))

    def violations(self) -> dict[str, list[str]]:
        """What the log says against the crawl."""
        found: dict[str, list[str]] = defaultdict(list)
        for name, log in self.log.items():
            visits = sorted(log, key=lambda one: one.arrived)
            for before, after in itertools.pairwise(visits):
                said = f"{name} {before} {after}"
                if before.end == 0.0 or after.arrived < before.end - TOLERANCE:
                    found["overlap"].append(said)
                elif after.arrived < before.head + INTERVAL - TOLERANCE:
                    # The first request to a site may only be that of its robots.txt, and what it
                    # says counts from there.
                    found["early"].append(said)
                if before.status == 429 and after.arrived < before.head + RETRY_AFTER - TOLERANCE:
                    found["in a block"].append(said)
        return dict(found)


class Fleet:
    """The members' processes, and their store."""

    def __init__(self, sites: Sites, *, hold: float, when_lost: str = "wait") -> None:
        self.sites = sites
        self.hold, self.when_lost = hold, when_lost
        self.store = Server("--appendonly", "no")
        self.members: list[subprocess.Popen[bytes]] = []
        # What the members log, for who looks into a failure.
        self.errors = Path(os.environ.get("FLEET_LOG", os.devnull)).open("ab")  # noqa: SIM115

    def join(self) -> None:
        hosts = [f"{name}:{self.sites.port}" for name in self.sites.names]
        self.members.append(
            subprocess.Popen(
                [
                    *(sys.executable, str(Path(__file__).with_name("member.py"))),
                    *(self.store.url, str(self.hold), self.when_lost, *hosts),
                ],
                cwd=ROOT,
                stderr=self.errors,
            )
        )

    def kill(self) -> None:
        member = self.members.pop(0)
        member.kill()
        member.wait()

    def close(self) -> None:
        for member in self.members:
            member.send_signal(signal.SIGCONT)
            member.kill()
            member.wait()
        self.errors.close()
        self.store.close()


async def crawl(
    *, seconds: float, members: int, hosts: int, seed: int, what: tuple[str, ...], when_lost: str
) -> tuple[Sites, Counter[str]]:
    """Crawl for so long, and break one thing after another."""
    rng = random.Random(seed)
    sites, hold = Sites(hosts, rng), 2.0
    await sites.open()
    fleet = Fleet(sites, hold=hold, when_lost=when_lost)
    done: Counter[str] = Counter()
    try:
        fleet.store.start()
        for _ in range(members):
            fleet.join()
        begun = time.monotonic()
        while not sites.visits and time.monotonic() < begun + 60.0:  # a busy machine starts slowly
            await asyncio.sleep(0.1)
        await asyncio.sleep(hold)
        end, turn = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            kind = what[turn % len(what)]
            turn += 1
            await breaks(fleet, kind, hold)
            before = sites.visits
            await asyncio.sleep(2.0 + 2 * hold)
            done[kind] += 1
            # It goes on: after each of them somebody is asked again.
            if sites.visits == before:
                done[f"stalled: {kind}"] += 1
    finally:
        fleet.close()
        await asyncio.sleep(1.0)
        sites.close()
    return sites, done


async def breaks(fleet: Fleet, kind: str, hold: float) -> None:
    if kind == "kill a member":
        fleet.kill()
        fleet.join()
    elif kind == "stop a member":
        stopped = fleet.members[0]
        stopped.send_signal(signal.SIGSTOP)
        await asyncio.sleep(1.5 * hold)
        stopped.send_signal(signal.SIGCONT)
    elif kind == "flushall":
        fleet.store.ask("FLUSHALL")
    elif kind == "script flush":
        fleet.store.ask("SCRIPT", "FLUSH")
    elif kind == "kill the store":
        fleet.store.kill()
        await asyncio.sleep(1.0)
        fleet.store.start()
    elif kind == "cut connections":
        fleet.store.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        fleet.store.ask("CLIENT", "KILL", "TYPE", "pubsub", "SKIPME", "yes")
    elif kind == "flushall and a newcomer":
        fleet.store.ask("FLUSHALL")
        fleet.join()


EVERYTHING = (
    *("kill a member", "flushall", "stop a member", "kill the store", "script flush"),
    *("cut connections", "flushall and a newcomer"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--members", type=int, default=3)
    parser.add_argument("--hosts", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--when-lost", default="wait")
    options = parser.parse_args()
    sites, done = asyncio.run(
        crawl(
            seconds=options.seconds,
            members=options.members,
            hosts=options.hosts,
            seed=options.seed,
            what=EVERYTHING,
            when_lost=options.when_lost,
        )
    )
    print(f"{sites.visits} requests, {dict(done)}")
    found = sites.violations()
    for kind, ones in found.items():
        print(f"{kind}: {len(ones)}", *ones[:5], sep="\n  ")
    robots = [sum(one.path == "/robots.txt" for one in log) for log in sites.log.values()]
    print("robots.txt per site:", dict(Counter(robots)))
    print("violations:", {kind: len(ones) for kind, ones in found.items()})


if __name__ == "__main__":
    main()
