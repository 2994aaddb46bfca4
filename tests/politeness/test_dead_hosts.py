"""Hosts that answer keep their pace, however many others are dead, and for whatever reason."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from gatekeeper import Deferred, Denied, Gatekeeper, polite_session
from gatekeeper.clock import VirtualClock
from gatekeeper.session import session_gate
from tests.effort import LONG, some_of
from tests.gate_support import open_config
from tests.internet import FakeInternet
from tests.politeness.dead import KINDS, Dials, dead_hosts, dying_hosts
from tests.politeness.world import AGENT

WARM = [f"warm{n}.test" for n in range(3 if LONG else 2)]
SPAN = 20.0
"""Virtual seconds over which pages are counted: longer than any dead host takes to fail."""
MANY = 2_000 if LONG else 600
"""Number of dead hosts: at least three times as many as are asked at the same time."""


class Crawl:
    """Fetches pages of hosts that answer as fast as they allow, and asks about dead hosts."""

    def __init__(self, session: aiohttp.ClientSession, clock: VirtualClock) -> None:
        self.session = session
        self.gate: Gatekeeper = session_gate(session)
        self.clock = clock
        self.pages = 0
        self.tasks: list[asyncio.Task[None]] = []

    async def read(self, host: str) -> None:
        number = 0
        while True:
            number += 1
            async with self.session.get(f"http://{host}/{number}") as response:
                await response.read()
            self.pages += 1

    async def insist(self, host: str) -> None:
        """Ask for a page of a dead host, and retry whenever that may help."""
        while True:
            try:
                async with self.session.get(f"http://{host}/") as response:
                    await response.read()
            except Deferred as error:
                at = error.retry_at
                left = 0.0 if at is None else at.timestamp() - self.clock.wall()
                await self.clock.sleep(max(0.01, left))
            except (Denied, aiohttp.ClientError, OSError):
                await self.clock.sleep(1.0)

    async def count(self, seconds: float = SPAN) -> int:
        before = self.pages
        await self.clock.sleep(seconds)
        return self.pages - before

    async def usual(self) -> int:
        """Return the pages per `SPAN` while no host is dead, extrapolated from a part of it."""
        return 4 * await self.count(SPAN / 4)


@asynccontextmanager
async def crawling(
    internet: FakeInternet, clock: VirtualClock, **sections: Any
) -> AsyncIterator[Crawl]:
    for name in WARM:
        internet.site(name).robots("").otherwise("page")
    settings = open_config(**{"pacing": {"default_interval": 0.2}, **sections})
    async with polite_session(
        user_agent=AGENT, config=settings, resolver=internet.resolver, clock=clock
    ) as session:
        crawl = Crawl(session, clock)
        crawl.tasks += [asyncio.create_task(crawl.read(host)) for host in WARM]
        try:
            await clock.sleep(2.0)
            yield crawl
        finally:
            for task in crawl.tasks:
                task.cancel()
            await asyncio.gather(*crawl.tasks, return_exceptions=True)


def insist(crawl: Crawl, hosts: list[str]) -> None:
    crawl.tasks += [asyncio.create_task(crawl.insist(host)) for host in hosts]


async def keeps_its_pace(internet: FakeInternet, clock: VirtualClock, hosts: list[str]) -> None:
    async with crawling(internet, clock) as crawl:
        usual = await crawl.usual()
        assert usual >= 0.95 * len(WARM) * SPAN / 0.2
        insist(crawl, hosts)
        counting = asyncio.create_task(crawl.count())
        for number in range(4):
            await clock.sleep(1.0)
            # A new host that comes after all of them is hardly delayed.
            internet.site(f"newcomer{number}.test").robots("").otherwise("page")
            began = clock.monotonic()
            assert await crawl.gate.allowed(f"http://newcomer{number}.test/")
            assert clock.monotonic() - began <= 3.0
        assert await counting >= 0.95 * usual
        assert crawl.gate.stats().directory.local_faults == 0
        assert crawl.gate.ready


@pytest.mark.parametrize(
    ("count", "sites"),
    some_of([(200, "one"), (10, "one"), (25, "many"), (10, "many"), (25, "one")], 2),
)
@pytest.mark.parametrize("kind", KINDS)
async def test_dead_hosts_do_not_slow_a_living_host(
    internet: FakeInternet, clock: VirtualClock, dials: Dials, kind: str, count: int, sites: str
) -> None:
    hosts = dead_hosts(internet, kind, count, sites=sites)
    await internet.drive(keeps_its_pace(internet, clock, hosts))


@pytest.mark.parametrize("kind", [*(KINDS if LONG else ()), "all"])
async def test_thousands_of_dead_hosts_do_not_slow_a_living_host(
    internet: FakeInternet,
    clock: VirtualClock,
    dials: Dials,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Independent of this machine's limit of open files: these connections open none.
    monkeypatch.setattr("gatekeeper.fetching.limits.within_open_files", lambda wanted: wanted)
    kinds = KINDS if kind == "all" else (kind,)
    hosts = [name for one in kinds for name in dead_hosts(internet, one, MANY // len(kinds))]
    await internet.drive(keeps_its_pace(internet, clock, hosts))


async def test_retrievals_that_wait_for_a_slot_leave_leases_to_hosts_that_answer(
    internet: FakeInternet, clock: VirtualClock, dials: Dials
) -> None:
    hosts = dead_hosts(internet, "silent", 400)

    async def run() -> None:
        limits = {"default_interval": 0.2, "max_in_flight": 40}
        async with crawling(internet, clock, pacing=limits, fetch={"max_concurrent": 4}) as crawl:
            usual = await crawl.usual()
            insist(crawl, hosts)
            assert await crawl.count() >= 0.95 * usual

    await internet.drive(run())


async def test_pages_of_hosts_whose_file_is_known_leave_leases_to_hosts_that_answer(
    internet: FakeInternet, clock: VirtualClock, dials: Dials
) -> None:
    # They served their robots.txt and died, so they look like hosts that answer slowly.
    hosts = dying_hosts(internet, dials, 300)

    async def run() -> None:
        limits = {"default_interval": 0.2, "max_in_flight": 100}
        async with crawling(internet, clock, pacing=limits) as crawl:
            usual = await crawl.usual()
            known = [decision async for decision in crawl.gate.check_many(map(page_of, hosts))]
            assert all(known)
            insist(crawl, hosts)
            await clock.sleep(1.0)
            internet.site("newcomer.test").robots("").otherwise("page")
            assert await crawl.count() >= 0.95 * usual
            assert await crawl.gate.allowed("http://newcomer.test/")
            assert crawl.gate.stats().pacing.in_flight >= 50, "the dead hold their share"

    await internet.drive(run())


def page_of(host: str) -> str:
    return f"http://{host}/"
