"""A crawl by several processes with injected faults, judged by the logs of the sites alone.

`python -m benchmarks --only faults` is the long form, in which faults and observations last for a
number of seconds. Tests wait for events in the log instead: `Sites.until`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tests.fleet.proxy import How, Proxy
from tests.fleet.server import QUICK, Server
from tests.internet import free_port
from tests.processes import PYTHON

INTERVALS = (0.4, 0.6)
"""Intervals in seconds that the sites' robots.txt files ask for; each site alternates."""
CHANGES = 15.0
LIFETIME, MIN_TTL = 24.0, 4.0
"""Seconds for which a robots.txt is fresh, and the minimum for which a member caches one."""
GOES_BY = 100.0
"""Maximum number of seconds for which a member may use a file: a new one is not requested before a
minute's worth of leases went to pages, and the file may come from another member."""
RETRY_AFTER = 2
TOLERANCE = 0.002
ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Visit:
    """One request as seen by the site."""

    path: str
    arrived: float
    head: float = 0.0
    end: float = 0.0
    status: int = 0
    interval: float = 0.0
    """The interval that the served robots.txt asks for, if this was a request for it."""


@dataclass
class Sites:
    """Servers on loopback addresses, and their logs."""

    hosts: int
    rng: random.Random
    delays: tuple[float, ...] = (0.0, 0.05, 0.3, 0.8)
    """Delays of the response head in seconds, chosen at random."""
    changing: bool = False
    hasty: bool = False
    """Whether a late response is sent early once another request has arrived at any site."""
    log: dict[str, list[Visit]] = field(default_factory=lambda: defaultdict(list))
    forgotten: list[float] = field(default_factory=list)
    """When a member died or lost the store."""
    silenced: list[tuple[float, float, float]] = field(default_factory=list)
    """From when to when members were stopped, or cut off from the store alone, and the time to live
    of their holds."""
    port: int = 0
    servers: list[asyncio.Server] = field(default_factory=list)
    serving: set[asyncio.Task[None]] = field(default_factory=set)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def names(self) -> list[str]:
        return [f"127.0.{1 + n // 200}.{1 + n % 200}" for n in range(self.hosts)]

    async def open(self) -> None:
        self.port = free_port()
        for name in self.names:
            self.servers.append(
                await asyncio.start_server(partial(self.serve, name), name, self.port)
            )

    async def serve(
        self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.serving.add(task)
        task.add_done_callback(self.serving.discard)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while line := await reader.readline():
                visit = Visit(line.split()[1].decode(), time.monotonic())
                self.log[name].append(visit)
                self.arrived.set()
                self.arrived = asyncio.Event()
                while (await reader.readline()).strip():
                    pass
                await self.answer(visit, reader, writer)
        writer.close()

    async def answer(
        self, visit: Visit, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await self.linger(self.rng.choice(self.delays))
        visit.status, more, body = 200, "", b"page"
        if visit.path == "/robots.txt":
            phase = int(time.monotonic() / CHANGES) % 2 if self.changing else 0
            visit.interval = INTERVALS[phase]
            more = f"Cache-Control: max-age={LIFETIME:.0f}\r\n"
            body = f"User-agent: *\nDisallow: /never/\nCrawl-delay: {visit.interval}\n".encode()
        elif (dice := self.rng.random()) < 0.02:
            visit.status, more = 429, f"Retry-After: {RETRY_AFTER}\r\n"
        elif dice < 0.10 and not visit.path.startswith("/hop"):
            visit.status = 302
            there = f"//{self.rng.choice(self.names)}:{self.port}" if dice < 0.05 else ""
            more = f"Location: {there}/hop/{self.rng.random()}\r\n"
        if reader.at_eof():  # the client was killed, so it never gets the response
            visit.status = 0
        visit.head = visit.end = time.monotonic()
        head = f"HTTP/1.1 {visit.status} x\r\nContent-Length: {len(body)}\r\n{more}\r\n"
        with contextlib.suppress(OSError):
            writer.write(head.encode())
            if self.rng.random() < 0.3:
                await self.linger(0.1)
            visit.end = time.monotonic()
            writer.write(body)
            await writer.drain()

    async def linger(self, seconds: float) -> None:
        """Delay all responses by `seconds`."""
        wait = self.arrived.wait() if self.hasty else asyncio.Event().wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await wait

    async def until(self, enough: Callable[[], bool], seconds: float = 60.0) -> None:
        """Wait until a condition on the log is true."""
        async with asyncio.timeout(seconds):
            while not enough():
                await self.arrived.wait()

    async def close(self) -> None:
        """Close the servers after the crawl, once requests in flight have ended."""
        for server in self.servers:
            server.close()
        if self.serving:
            await asyncio.wait(self.serving, timeout=10.0)

    @property
    def visits(self) -> int:
        return sum(map(len, self.log.values()))

    def since(self, moment: float, to: float = float("inf")) -> list[Visit]:
        """Return the requests that arrived at any site within that time."""
        every = (one for log in self.log.values() for one in log)
        return [one for one in every if moment <= one.arrived < to]

    def arrivals(self, since: float, to: float = float("inf")) -> list[float]:
        """Return when requests arrived."""
        return sorted(one.arrived for one in self.since(since, to))

    def violations(self, since: float = 0.0, to: float = float("inf")) -> dict[str, list[str]]:
        """Return the violations that the log shows."""
        found: dict[str, list[str]] = defaultdict(list)
        for name, log in self.log.items():
            visits = sorted(log, key=lambda one: one.arrived)
            for before, after in itertools.pairwise(visits):
                if since <= after.arrived < to:
                    self._judge(found, name, visits, before, after)
            robots = [one for one in visits if one.path == "/robots.txt"]
            for before, after in itertools.pairwise(robots):
                if since <= after.arrived < to and self._again(before, after):
                    found["robots.txt again"].append(f"{name} {before} {after}")
            denied = (one for one in visits if one.path.startswith("/never"))
            found["denied"] += [f"{name} {one}" for one in denied if since <= one.arrived < to]
        return {kind: ones for kind, ones in found.items() if ones}

    def _judge(
        self,
        found: dict[str, list[str]],
        name: str,
        visits: list[Visit],
        before: Visit,
        after: Visit,
    ) -> None:
        said = f"{name} {before} {after}"
        # The first request to a site must be for its robots.txt, and its interval applies from
        # there on. After a change of the file, any version that may still be in use is accepted.
        files = [one for one in visits if one.interval and one.head <= after.arrived]
        recent = [one for one in files if one.head > after.arrived - GOES_BY]
        interval = min((one.interval for one in recent or files[-1:]), default=INTERVALS[0])
        if before.end == 0.0 or after.arrived < before.end - TOLERANCE:
            found["overlap"].append(said)
        elif after.arrived < before.head + interval - TOLERANCE:
            found["early"].append(said)
        blocked = before.status == 429 and after.arrived < before.head + RETRY_AFTER - TOLERANCE
        if blocked and not self._unheard(before, after):
            found["in a block"].append(said)

    def _unheard(self, before: Visit, after: Visit) -> bool:
        """Return True if the response went to a member that was stopped or cut off, whose hold had
        expired, so that it could not report the response (docs/fleet.md: what is not promised)."""
        return any(
            begun <= before.head <= end and before.arrived + hold < after.arrived < end + 1.0
            for begun, end, hold in self.silenced
        )

    def _again(self, before: Visit, after: Visit) -> bool:
        """Return True if a file was fetched twice within its lifetime (less the margin for early
        refreshes). Files that a member fetched and took along when it died, and those that it
        fetched without the store, may be fetched again. Files that only the store lost may not."""
        if any(
            before.arrived < lost + 2 * MIN_TTL and lost < after.arrived + 1.0
            for lost in self.forgotten
        ):
            return False
        return after.arrived < before.head + 0.75 * (LIFETIME - MIN_TTL) - 2.0


class Fleet:
    """The members' processes, their store, and the proxies in front of it."""

    def __init__(
        self, sites: Sites, *, hold: float, when_lost: str, workers: int, audit: Path | None = None
    ) -> None:
        """`audit`: the folder of the members' audit records, if they write some."""
        self.sites = sites
        self.audit = audit
        self.hold, self.when_lost, self.workers = hold, when_lost, workers
        self.store = Server(*QUICK, "--appendonly", "no", port=free_port())
        self.wires = [Proxy(str(self.store.socket)) for _ in range(2)]
        """The proxy of every other member, to partition the network."""
        self.members: list[subprocess.Popen[bytes]] = []
        self._joined = itertools.count()
        # The members' logs, to investigate failures.
        self.errors = Path(os.environ.get("FLEET_LOG", os.devnull)).open("ab")  # noqa: SIM115

    async def open(self, members: int, *, long_since: bool = False) -> None:
        """`long_since`: pretend that the store's epoch began long ago, so that there is no
        quarantine."""
        self.store.start()
        if long_since:
            self.store.begin_long_ago("gatekeeper")
        for wire in self.wires:
            await wire.open()
        for _ in range(members):
            self.join()

    def join(self, *, alone: bool = False) -> None:
        fleet = {
            "url": self.wires[next(self._joined) % 2].url,
            "hold": self.hold,
            "when_lost": self.when_lost,
            "allow_lost_writes": True,
        }
        said = {
            "fleet": {} if alone else fleet,
            "workers": self.workers,
            "min_ttl": MIN_TTL,
            "audit": {} if self.audit is None else {"folder": str(self.audit)},
            "hosts": [f"{name}:{self.sites.port}" for name in self.sites.names],
        }
        command = [PYTHON, str(Path(__file__).with_name("member.py")), json.dumps(said)]
        self.members.append(subprocess.Popen(command, cwd=ROOT, stderr=self.errors))

    def kill(self) -> None:
        member = self.members.pop(0)
        member.kill()
        member.wait()

    async def breaks(self, kind: str) -> float:
        """Inject a fault. Return when everything works again."""
        await _KINDS[kind](self)
        return time.monotonic()

    def lost(self) -> None:
        self.sites.forgotten.append(time.monotonic())

    async def close(self) -> None:
        for member in self.members:
            member.send_signal(signal.SIGCONT)
            member.kill()
        for member in self.members:
            member.wait()
        self.errors.close()
        for wire in self.wires:
            await wire.close()
        self.store.close()


# --- faults -----------------------------------------------------------------------------------


async def _kill_member(fleet: Fleet) -> None:
    fleet.lost()  # the member may have been fetching files
    fleet.kill()
    fleet.join()


async def _newcomer(fleet: Fleet) -> None:
    fleet.join()
    if len(fleet.members) > 8:
        fleet.lost()
        fleet.kill()


async def _stop_member(fleet: Fleet) -> None:
    fleet.lost()
    stopped, begun = fleet.members[0], time.monotonic()
    stopped.send_signal(signal.SIGSTOP)
    await asyncio.sleep(1.5 * fleet.hold)
    stopped.send_signal(signal.SIGCONT)
    fleet.sites.silenced.append((begun, time.monotonic(), fleet.hold))


async def _flushall(fleet: Fleet) -> None:
    fleet.store.ask("FLUSHALL")


async def _flushall_and_newcomer(fleet: Fleet) -> None:
    await _flushall(fleet)
    fleet.join()


async def _script_flush(fleet: Fleet) -> None:
    fleet.store.ask("SCRIPT", "FLUSH")


async def _kill_store(fleet: Fleet, away: float = 1.0, *, proxied: bool = False) -> None:
    """Kill the store. `proxied`: its proxy accepts connections meanwhile, and closes them."""
    fleet.store.kill()
    if not proxied:
        for wire in fleet.wires:
            wire.refuse()
    if away:
        await asyncio.sleep(away)
    await asyncio.to_thread(fleet.store.start)
    if not proxied:
        for wire in fleet.wires:
            await wire.open()


async def _kill_store_with_file(fleet: Fleet) -> None:
    store = fleet.store
    store.ask("CONFIG", "SET", "appendonly", "yes")
    await asyncio.to_thread(store.said, "AOF rewrite finished successfully")
    before = store.options
    store.options = (*QUICK, "--appendonly", "yes")
    await _kill_store(fleet)
    store.ask("CONFIG", "SET", "appendonly", "no")
    store.options = before


async def _promote(fleet: Fleet) -> None:
    """Kill the master after the replica received no writes for a moment, which are then lost."""
    master = fleet.store
    options = (*QUICK, "--appendonly", "no", "--replicaof", "127.0.0.1", str(master.port))
    replica = Server(*options, port=free_port())
    await asyncio.to_thread(replica.start)
    await asyncio.to_thread(replica.said, "sync: Finished with success")
    replica.ask("REPLICAOF", "NO", "ONE")
    await asyncio.sleep(0.3)
    master.close()
    replica.options = (*QUICK, "--appendonly", "no")
    fleet.store = replica
    for wire in fleet.wires:
        wire.target = str(replica.socket)
        wire.cut()


async def _cut(fleet: Fleet) -> None:
    for wire in fleet.wires:
        wire.cut()


async def _drop(fleet: Fleet, wires: int = 2, seconds: float = 5.0) -> None:
    """Drop all data without closing connections."""
    fleet.lost()
    for wire in fleet.wires[:wires]:
        wire.how = "drop"
    await asyncio.sleep(seconds)
    fleet.lost()
    for wire in fleet.wires[:wires]:
        wire.how = "pass"
        wire.cut()


async def _drop_half(fleet: Fleet) -> None:
    """Cut half of the members off from the store."""
    begun = time.monotonic()
    await _drop(fleet, wires=1, seconds=8.0)
    fleet.sites.silenced.append((begun, time.monotonic(), fleet.hold))


async def _bend(fleet: Fleet, how: How, seconds: float) -> None:
    """Treat all data in that way for some seconds."""
    for wire in fleet.wires:
        wire.how = how
    await asyncio.sleep(seconds)
    for wire in fleet.wires:
        wire.how = "pass"


async def _nothing(fleet: Fleet) -> None:
    return


_KINDS = {
    "nothing": _nothing,
    "kill -9 of a member, and a new one": _kill_member,
    "a new member": _newcomer,
    "SIGSTOP of a member for 1.5 holds": _stop_member,
    "FLUSHALL": _flushall,
    "FLUSHALL, then a new member": _flushall_and_newcomer,
    "SCRIPT FLUSH": _script_flush,
    "kill -9 of the store, no file": _kill_store,
    "kill -9 of the store, back at once": partial(_kill_store, away=0.0),
    "kill -9 of the store, 8 s away": partial(_kill_store, away=8.0),
    "kill -9 of the store, 8 s away, behind a proxy": partial(_kill_store, away=8.0, proxied=True),
    "kill -9 of the store, 30 s away": partial(_kill_store, away=30.0),
    "kill -9 of the store, AOF": _kill_store_with_file,
    "a replica promoted": _promote,
    "connections cut": _cut,
    "the wire drops everything for 5 s": _drop,
    "half of the members cut off for 8 s": _drop_half,
    "the wire delays by 0.2 s": partial(_bend, how="delay", seconds=4.0),
    "the wire half-closes": partial(_bend, how="half-close", seconds=2.0),
}

_APART = ("nothing", "kill -9 of the store, back at once", "kill -9 of the store, 30 s away")
EVERYTHING = tuple(kind for kind in _KINDS if kind not in _APART)


@dataclass
class Fault:
    """A fault and its consequences."""

    kind: str
    begun: float
    back: float
    over: float = 0.0

    def pause(self, sites: Sites) -> float:
        """Seconds from the end of the fault until a request arrived."""
        arrivals = sites.arrivals(self.back, self.over)
        return arrivals[0] - self.back if arrivals else float("inf")

    def silence(self, sites: Sites) -> float:
        """The longest time without any request after the start of the fault, in seconds."""
        moments = [self.begun, *sites.arrivals(self.begun, self.over), self.over]
        return max(after - before for before, after in itertools.pairwise(moments))


@contextlib.asynccontextmanager
async def crawling(
    sites: Sites,
    *,
    members: int,
    hold: float,
    workers: int = 6,
    when_lost: str = "wait",
    long_since: bool = False,
    audit: Path | None = None,
) -> AsyncIterator[Fleet]:
    """Crawl the sites with a number of processes. On exit the log is complete. `long_since`: see
    `Fleet.open`; `audit`: see `Fleet`."""
    await sites.open()
    fleet = Fleet(sites, hold=hold, when_lost=when_lost, workers=workers, audit=audit)
    try:
        await fleet.open(members, long_since=long_since)
        yield fleet
    finally:
        await fleet.close()
        await sites.close()


async def crawl(
    sites: Sites,
    *,
    members: int,
    what: tuple[str, ...],
    when_lost: str = "wait",
    hold: float,
    workers: int,
    following: float | None = None,
) -> list[Fault]:
    """Crawl and inject one fault after another. `following`: seconds to crawl after each one."""
    faults = []
    async with crawling(
        sites, members=members, hold=hold, workers=workers, when_lost=when_lost
    ) as fleet:
        await sites.until(lambda: sites.visits > 0)
        await asyncio.sleep(hold)
        for kind in what:
            fault = Fault(kind, time.monotonic(), await fleet.breaks(kind))
            await asyncio.sleep(2.0 + 2 * hold if following is None else following)
            fault.over = time.monotonic()
            faults.append(fault)
    return faults
