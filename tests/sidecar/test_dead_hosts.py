"""Clients that ask about dead hosts do not slow down those that fetch from living ones."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest

from gatekeeper.clock import VirtualClock
from gatekeeper.config import Config, GuardConfig, PacingConfig, ServerConfig
from tests.conformance.ways import Sidecar
from tests.effort import LONG, some_of
from tests.internet import FakeInternet
from tests.politeness.dead import KINDS, Dials, dead_hosts

WARM = [f"warm{n}.test" for n in range(3)]
SPAN = 15.0


class Clients:
    """Clients that want leases and pages of living hosts, and clients that ask about dead ones."""

    def __init__(self, base: str, session: aiohttp.ClientSession, clock: VirtualClock) -> None:
        self.base = base
        self.session = session
        self.clock = clock
        self.done = 0
        self.statuses: set[int] = set()
        self.tasks: list[asyncio.Task[None]] = []

    async def lease(self, host: str) -> None:
        number = 0
        while True:
            number += 1
            body = {"url": f"http://{host}/{number}", "wait": 30}
            async with self.session.post(f"{self.base}/v1/leases", json=body) as answer:
                lease = await answer.json()
                self.statuses.add(answer.status)
            report = f"{self.base}/v1/leases/{lease['id']}/report"
            async with self.session.post(report, json={"status": 200}) as answer:
                self.statuses.add(answer.status)
            self.done += 1

    async def fetch(self, host: str) -> None:
        number = 0
        while True:
            number += 1
            query = {"url": f"http://{host}/{number}"}
            async with self.session.get(f"{self.base}/v1/fetch", params=query) as answer:
                await answer.read()
                self.statuses.add(answer.status)
            self.done += 1

    async def check(self, hosts: list[str]) -> None:
        while True:
            body = {"urls": [f"http://{host}/" for host in hosts]}
            async with self.session.post(f"{self.base}/v1/check", json=body) as answer:
                await answer.read()
                assert answer.status == 200
            await self.clock.sleep(1.0)

    async def ready(self) -> None:
        while True:
            async with self.session.get(f"{self.base}/readyz") as answer:
                self.statuses.add(answer.status)
            await self.clock.sleep(0.25)

    async def count(self, seconds: float = SPAN) -> int:
        before = self.done
        await self.clock.sleep(seconds)
        return self.done - before


@asynccontextmanager
async def served(net: FakeInternet, clock: VirtualClock) -> AsyncIterator[Clients]:
    config = Config(
        guard=GuardConfig(allow=("127.0.0.0/8", "*.test")),
        pacing=PacingConfig(default_interval=0.2),
        server=ServerConfig(log_decisions="none"),
    )
    for name in WARM:
        net.site(name).robots("").otherwise("page")
    sidecar = Sidecar(net, config, None)
    await sidecar.start()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        clients = Clients(sidecar.where, session, clock)
        try:
            yield clients
        finally:
            for task in clients.tasks:
                task.cancel()
            await asyncio.gather(*clients.tasks, return_exceptions=True)
            await sidecar.stop()


async def keeps_its_pace(net: FakeInternet, clock: VirtualClock, hosts: list[str]) -> None:
    async with served(net, clock) as clients:
        works = [*map(clients.lease, WARM[:2]), *map(clients.fetch, WARM[2:]), clients.ready()]
        clients.tasks += [asyncio.create_task(work) for work in works]
        await clock.sleep(2.0)
        usual = 3 * await clients.count(SPAN / 3)
        assert usual >= 0.9 * len(WARM) * SPAN / 0.2
        dead = [clients.check(hosts), *(clients.check([host]) for host in hosts[:20])]
        clients.tasks += [asyncio.create_task(work) for work in dead]
        assert await clients.count() >= 0.95 * usual
        assert clients.statuses <= {200, 201, 204}, "ready all the time, and nobody sent away"


@pytest.mark.parametrize(("kind", "sites"), some_of(itertools.product(KINDS, ["one", "many"]), 5))
async def test_twenty_five_dead_hosts_do_not_slow_a_living_host(
    net: FakeInternet, clock: VirtualClock, dials: Dials, kind: str, sites: str
) -> None:
    hosts = dead_hosts(net, kind, 25, sites=sites)
    await net.drive(keeps_its_pace(net, clock, hosts))


@pytest.mark.parametrize("kind", [*(KINDS if LONG else ()), "all"])
async def test_two_thousand_dead_hosts_do_not_slow_a_living_host(
    net: FakeInternet,
    clock: VirtualClock,
    dials: Dials,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Ignore this machine's limit of open files: connections to silent hosts open none here.
    monkeypatch.setattr("gatekeeper.fetching.limits.within_open_files", lambda wanted: wanted)
    kinds = KINDS if kind == "all" else (kind,)
    hosts = [name for one in kinds for name in dead_hosts(net, one, 2000 // len(kinds))]
    await net.drive(keeps_its_pace(net, clock, hosts))
