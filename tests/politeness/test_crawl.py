"""Crawls of up to two hundred hosts, judged by the hosts' own logs: no promise is broken.

Name resolution takes 0 to 300 ms at random, so requests arrive later than their leases were
granted. A clock that counts from the wrong moment is therefore detected.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any
from urllib.parse import urljoin

import aiohttp
import pytest

from gatekeeper import Gatekeeper, PoliteQueue
from gatekeeper.pacing.grants import Grant
from tests.effort import LONG
from tests.gate_support import open_config
from tests.internet import FakeInternet
from tests.politeness.crawling import Fetch, crawl, polite_fetch
from tests.politeness.world import AGENT, World

HOSTS = 200 if LONG else 85
"""85: each kind of robots.txt, of which there are 17, with each of five kinds of redirects."""


def plain_session(internet: FakeInternet) -> aiohttp.ClientSession:
    """A session without pacing, which resolves every name again."""
    connector = aiohttp.TCPConnector(
        resolver=internet.resolver, use_dns_cache=False, force_close=True, limit=0
    )
    return aiohttp.ClientSession(connector=connector)


@asynccontextmanager
async def gate_over(internet: FakeInternet) -> AsyncIterator[Gatekeeper]:
    """A gate that fetches robots.txt through such a session."""
    async with (
        plain_session(internet) as session,
        Gatekeeper(AGENT, config=open_config(), session=session, clock=internet.clock) as gate,
    ):
        yield gate


@asynccontextmanager
async def by_lease(internet: FakeInternet) -> AsyncIterator[Fetch]:
    """Take a lease for each hop, around a plain session."""
    async with plain_session(internet) as plain, gate_over(internet) as gate:

        async def fetch(url: str) -> int:
            for _ in range(10):
                async with (
                    gate.lease(url) as lease,
                    plain.get(url, allow_redirects=False) as response,
                ):
                    await response.read()
                    lease.report(
                        status=response.status, retry_after=response.headers.get("Retry-After")
                    )
                if not 300 <= response.status < 400:
                    return response.status
                url = urljoin(url, response.headers["Location"])
            raise AssertionError("a ring of redirects")

        yield fetch


def by_session(internet: FakeInternet) -> AbstractAsyncContextManager[Fetch]:
    """`polite_session` handles everything, including redirects."""
    return polite_fetch(internet.resolver, internet.clock)


Way = Callable[[FakeInternet], AbstractAsyncContextManager[Fetch]]


async def crawled(internet: FakeInternet, way: Way, hosts: int) -> World:
    """Crawl a world and return it."""
    world = World(internet, hosts)

    async def run() -> None:
        async with way(internet) as fetch:
            await crawl(fetch, world.seeds, internet.clock)

    await internet.drive(run())
    return world


@pytest.mark.parametrize("way", [by_session, by_lease])
async def test_a_crawl_violates_no_rule_of_a_site_and_fetches_every_page_once(
    internet: FakeInternet, way: Way
) -> None:
    world = await crawled(internet, way, HOSTS)
    assert [str(breach) for breach in world.breaches()] == []
    assert world.fetched() == sorted(world.welcome)


async def test_a_queue_with_the_urls_of_all_hosts_violates_no_rule_of_a_site(
    internet: FakeInternet,
) -> None:
    world = World(internet, HOSTS)

    async def work(queue: PoliteQueue, session: aiohttp.ClientSession) -> None:
        while True:
            async with (
                await queue.get() as lease,
                session.get(lease.url, allow_redirects=False) as response,
            ):
                await response.read()
                after = response.headers.get("Retry-After")
                lease.report(status=response.status, retry_after=after)
                if response.status in (429, 503):
                    await queue.put(lease.url)
                elif "Location" in response.headers:
                    await queue.put(urljoin(lease.url, response.headers["Location"]))

    async def run() -> None:
        async with (
            plain_session(internet) as session,
            gate_over(internet) as gate,
            PoliteQueue(gate) as queue,
        ):
            for url in world.seeds:
                await queue.put(url)
            workers = [asyncio.create_task(work(queue, session)) for _ in range(50)]
            await queue.join()
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    await internet.drive(run())
    assert [str(breach) for breach in world.breaches()] == []
    assert world.fetched() == sorted(world.welcome)


async def test_an_interval_counted_from_the_grant_is_found_by_the_judge(
    internet: FakeInternet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check is effective: it detects the defect that it is meant to detect."""
    honest = Grant.report

    def forgetful(grant: Grant, *said: Any, **more: Any) -> None:
        basis = grant.scope.basis
        honest(grant, *said, **more)
        grant.scope.basis = basis

    monkeypatch.setattr(Grant, "report", forgetful)
    world = await crawled(internet, by_session, 12)
    assert {breach.kind for breach in world.breaches()} == {"early"}
