"""Requests over the connections of the caller's session."""

from __future__ import annotations

import asyncio
import gc

import aiohttp
import pytest

from gatekeeper.fetching.outcomes import Outcome
from tests.fetching.conftest import fetcher_on
from tests.internet import FakeInternet, Page

RULES = "User-agent: *\nDisallow: /private\n"


async def test_a_place_in_the_connection_pool_is_waited_for_outside_of_network_time(
    net: FakeInternet,
) -> None:
    for name in ("a.test", "b.test"):
        net.site(name).robots(Page(RULES, delay=12.0))
    connector = aiohttp.TCPConnector(resolver=net.resolver, limit=1)
    async with aiohttp.ClientSession(connector=connector) as lent:
        fetcher = fetcher_on(lent, net.clock)
        both = asyncio.gather(fetcher.fetch("http://a.test"), fetcher.fetch("http://b.test"))
        first, second = await net.drive(both, limit=3600.0)
    # The second one waited for longer than a connection may take.
    assert (first.outcome, second.outcome) == (Outcome.RULES, Outcome.RULES)
    assert first.took == second.took == pytest.approx(12.0)
    assert net.clock.monotonic() == pytest.approx(24.0)


async def test_a_fetcher_leaves_no_session_behind_that_aiohttp_would_complain_of(
    net: FakeInternet,
) -> None:
    net.site("a.test").robots(RULES)
    connector = aiohttp.TCPConnector(resolver=net.resolver)
    # The connector outlives both: closing the caller's session does not close it.
    async with aiohttp.ClientSession(connector=connector, connector_owner=False) as lent:
        fetcher = fetcher_on(lent, net.clock)
        assert (await net.drive(fetcher.fetch("http://a.test"))).outcome is Outcome.RULES
        del fetcher
        gc.collect()
        assert not lent.closed
        assert not connector.closed
    await connector.close()


async def test_a_connection_is_used_again_from_one_retrieval_to_the_next(
    net: FakeInternet,
) -> None:
    net.site("a.test").robots(RULES)
    connector = aiohttp.TCPConnector(resolver=net.resolver, limit=0)
    async with aiohttp.ClientSession(connector=connector) as lent:
        fetcher = fetcher_on(lent, net.clock)
        for _ in range(3):
            got = await net.drive(fetcher.fetch("http://a.test"), limit=3600.0)
            assert got.outcome is Outcome.RULES
    assert len({request.connection for request in net.requests}) == 1
