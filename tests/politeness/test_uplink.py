"""The uplink is lost and comes back: told soon, held against nobody, over at once."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import aiohttp.connector
import pytest

from gatekeeper import Deferred, Gatekeeper, polite_session
from gatekeeper.clock import VirtualClock, deadline
from gatekeeper.decision import Verdict
from gatekeeper.session import session_gate
from gatekeeper.storage.memory import MemoryStorage
from tests.internet import FakeInternet, Page
from tests.politeness.world import AGENT, config


class Cable:
    """What every dial goes through; `cut` says how dials fail, None: not at all."""

    def __init__(self, clock: VirtualClock, connect: Callable[..., Any]) -> None:
        self.clock = clock
        self._connect = connect
        self.cut: str | None = None
        self.lost_at = self.back_at = 0.0
        self.mended = asyncio.Event()

    def lose(self, how: str) -> None:
        self.cut, self.lost_at = how, self.clock.monotonic()
        self.mended.clear()

    def mend(self) -> None:
        self.cut, self.back_at = None, self.clock.monotonic()
        self.mended.set()

    async def dial(self, *args: Any, **options: Any) -> Any:
        if self.cut == "no route":
            raise OSError(errno.ENETUNREACH, "Network is unreachable")
        if self.cut == "silent":
            # As a kernel's SYNs: lost until somebody gives up, or one gets through.
            try:
                async with deadline(self.clock, 30.0):
                    await self.mended.wait()
            except TimeoutError:
                raise OSError(errno.ETIMEDOUT, "Connection timed out") from None
        return await self._connect(*args, **options)


@pytest.fixture
def cable(clock: VirtualClock, monkeypatch: pytest.MonkeyPatch) -> Cable:
    eyeballs = aiohttp.connector.aiohappyeyeballs
    cable = Cable(clock, eyeballs.start_connection)
    monkeypatch.setattr(eyeballs, "start_connection", cable.dial)
    return cable


class Crawl:
    """Some who ask for pages of hosts that answer, and one who asks for ever new origins."""

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
        config=config(),
        resolver=internet.resolver,
        clock=clock,
        storage=storage,
    ) as session:
        yield Crawl(session, clock)


def living(internet: FakeInternet, *names: str) -> None:
    """Sites whose connections are closed after each answer, so that each request dials."""
    for name in names:
        site = internet.site(name)
        site.on("/robots.txt", Page("", close=True))
        site.otherwise(Page("page", close=True))


KINDS = {"interval", "in_flight", "next"}
"""Of the clocks that a host has against which nothing is held."""
HOSTS = [f"warm{n}.test" for n in range(5)]


@pytest.mark.parametrize("how", ["no route", "silent"])
@pytest.mark.parametrize(("hosts", "every"), [(3, None), (5, None), (5, 0.4), (0, 0.2)])
async def test_a_lost_uplink_is_told_soon_held_against_nobody_and_over_at_once(
    internet: FakeInternet,
    clock: VirtualClock,
    cable: Cable,
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
            cable.lose(how)
            await clock.sleep(60.0)
            assert [told for _, told in crawl.changes] == [True]
            assert crawl.changes[0][0] - cable.lost_at <= 15.0
            assert not crawl.gate.ready
            assert len(crawl.pages) - before <= hosts, "those that were under way"
            gate = crawl.gate
            for host in HOSTS[:hosts]:
                assert {view.kind for view in await gate.why(host)} <= KINDS
                scope = gate._scheduler._books.known(host)
                assert scope is not None
                assert scope.history is None or not scope.history.errors
            stored = [await storage.load_origin(f"http://new{n}.test") for n in range(700)]
            assert all(one is None or one.first_unreachable_at is None for one in stored)
            cable.mend()
            await clock.sleep(5.0)
            assert [told for _, told in crawl.changes] == [True, False]
            assert gate.ready
            await clock.sleep(30.0)
            after = [host for at, host in crawl.pages if at > cable.back_at]
            assert len(after) >= hosts * 20
            assert set(after) == set(HOSTS[:hosts])
            assert crawl.verdicts <= {Verdict.ALLOW, Verdict.DEFER}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    await internet.drive(run())
