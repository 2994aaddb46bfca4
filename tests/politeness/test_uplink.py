"""A lost uplink is noticed soon, is not counted against any host, and ends immediately."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest

from gatekeeper import Deferred, Gatekeeper, polite_session
from gatekeeper.clock import VirtualClock
from gatekeeper.decision import Verdict
from gatekeeper.session import session_gate
from tests.effort import some_of
from tests.gate_support import open_config
from tests.internet import Behaviour, Custom, FakeInternet, NeverAnswer, Page, Request
from tests.memory_storage import MemoryStorage
from tests.pacing_support import scopes_of
from tests.politeness.dead import Dials
from tests.politeness.world import AGENT


class Crawl:
    """Tasks that ask for pages of hosts that answer, and one that asks for new origins."""

    def __init__(self, session: aiohttp.ClientSession, clock: VirtualClock) -> None:
        self.session = session
        self.gate: Gatekeeper = session_gate(session)
        self.clock = clock
        self.pages: list[tuple[float, str]] = []
        self.verdicts: set[Verdict] = set()
        self.changes: list[tuple[float, bool]] = []

    async def watch(self) -> None:
        told = False
        while True:
            now = self.gate.stats().directory.local_fault
            if now is not told:
                told = now
                self.changes.append((self.clock.monotonic(), told))
            await self.clock.sleep(0.1)

    async def read(self, host: str) -> None:
        number = 0
        while True:
            number += 1
            try:
                async with self.session.get(f"http://{host}/{number}") as response:
                    await response.read()
                self.pages.append((self.clock.monotonic(), host))
            except Deferred:
                await self.clock.sleep(1.0)
            except (aiohttp.ClientError, OSError):
                await self.clock.sleep(0.5)

    async def ask(self, every: float, name: str = "new") -> None:
        number = 0
        async with asyncio.TaskGroup() as tasks:
            while True:
                number += 1
                tasks.create_task(self._ask(f"http://{name}{number}.test/"))
                await self.clock.sleep(every)

    async def _ask(self, url: str) -> None:
        self.verdicts.add((await self.gate.check(url)).verdict)


@pytest.fixture
async def storage() -> MemoryStorage:
    return MemoryStorage()


@asynccontextmanager
async def crawling(
    internet: FakeInternet, clock: VirtualClock, storage: MemoryStorage
) -> AsyncIterator[Crawl]:
    async with polite_session(
        user_agent=AGENT,
        config=open_config(),
        resolver=internet.resolver,
        clock=clock,
        storage=storage,
    ) as session:
        yield Crawl(session, clock)


def living(internet: FakeInternet, *names: str) -> None:
    """Make sites that close the connection after each response, so that each request connects."""
    for name in names:
        site = internet.site(name)
        site.on("/robots.txt", Page("", close=True))
        site.otherwise(Page("page", close=True))


KINDS = {"interval", "in_flight", "next"}
"""Kinds of clocks of a host against which no failure is recorded."""
HOSTS = [f"warm{n}.test" for n in range(5)]


@pytest.mark.parametrize("how", ["no route", "silent"])
@pytest.mark.parametrize(("hosts", "every"), some_of([(3, None), (5, None), (0, 0.2), (5, 0.4)], 2))
async def test_a_lost_uplink_is_found_soon_counts_against_no_host_and_ends_at_once(
    internet: FakeInternet,
    clock: VirtualClock,
    dials: Dials,
    storage: MemoryStorage,
    how: str,
    hosts: int,
    every: float | None,
) -> None:
    living(internet, *HOSTS[:hosts], *(f"new{n}.test" for n in range(700)))

    async def run() -> None:
        async with crawling(internet, clock, storage) as crawl:
            jobs = [crawl.watch(), *map(crawl.read, HOSTS[:hosts])]
            if every is not None:
                jobs.append(crawl.ask(every))
            tasks = [asyncio.create_task(job) for job in jobs]
            await clock.sleep(20.0)
            assert not crawl.changes
            before = len(crawl.pages)
            assert before >= hosts * 15
            dials.lose(how)
            await clock.sleep(60.0)
            assert [told for _, told in crawl.changes] == [True]
            assert crawl.changes[0][0] - dials.lost_at <= 15.0
            assert not crawl.gate.ready
            assert len(crawl.pages) - before <= hosts, "those that were under way"
            gate = crawl.gate
            for host in HOSTS[:hosts]:
                assert {view.kind for view in await gate.why(host)} <= KINDS
                scope = scopes_of(gate.parts.scheduler).get(host)
                assert scope is not None
                assert scope.history is None or not scope.history.errors
            stored = [await storage.load_origin(f"http://new{n}.test") for n in range(700)]
            assert all(one is None or one.first_unreachable_at is None for one in stored)
            dials.mend()
            await clock.sleep(5.0)
            assert [told for _, told in crawl.changes] == [True, False]
            assert gate.ready
            await clock.sleep(30.0)
            after = [host for at, host in crawl.pages if at > dials.back_at]
            assert len(after) >= hosts * 20
            assert set(after) == set(HOSTS[:hosts])
            assert crawl.verdicts <= {Verdict.ALLOW, Verdict.DEFER}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    await internet.drive(run())


@pytest.mark.parametrize("how", ["no route", "silent"])
@pytest.mark.parametrize("hosts", [3, 5])
async def test_a_local_fault_ends_though_hanging_requests_hold_every_lease(
    internet: FakeInternet,
    clock: VirtualClock,
    dials: Dials,
    storage: MemoryStorage,
    how: str,
    hosts: int,
) -> None:
    """Kept-alive connections go silent for good when the uplink is lost."""

    def answer(_: Request) -> Behaviour:
        return NeverAnswer() if dials.cut else Page("page")

    sites = [internet.site(name).otherwise(Custom(choose=answer)) for name in HOSTS[:hosts]]
    internet.site("new.test").robots("").otherwise("page")

    async def run() -> None:
        async with crawling(internet, clock, storage) as crawl:
            jobs = [crawl.watch(), *map(crawl.read, HOSTS[:hosts])]
            tasks = [asyncio.create_task(job) for job in jobs]
            await clock.sleep(20.0)
            dials.lose(how)
            await clock.sleep(60.0)
            assert [told for _, told in crawl.changes] == [True]
            assert crawl.changes[0][0] - dials.lost_at <= 15.0
            pages = len(crawl.pages)
            dials.mend()
            await clock.sleep(5.0)
            assert [told for _, told in crawl.changes] == [True, False]
            assert crawl.gate.ready
            assert await crawl.gate.allowed("http://new.test/")
            assert len(crawl.pages) == pages, "each lease is held by a request that hangs"
            assert all(site.most_concurrent == 1 for site in sites), "a probe is no request"
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    await internet.drive(run())
