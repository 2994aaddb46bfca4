"""Testing a new connection to an origin, without a request."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from gatekeeper.config import Config
from gatekeeper.fetching.fetcher import Fetcher
from tests.fetching.conftest import fetcher_on
from tests.internet import Fail, FakeInternet
from tests.politeness.dead import Dials


@asynccontextmanager
async def fetching(
    net: FakeInternet, **session: Any
) -> AsyncIterator[tuple[Fetcher, aiohttp.ClientSession]]:
    async with net.session(**session) as lent:
        yield fetcher_on(lent, net.clock), lent


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_a_probe_connects_and_sends_no_request(net: FakeInternet, scheme: str) -> None:
    net.site("a.test", tls="good")
    async with fetching(net) as (fetcher, _):
        assert await net.drive(fetcher.reach(f"{scheme}://a.test")) is True
    await net.settle()
    assert len(net.connections) == 1
    assert not net.requests


async def test_a_probe_does_not_count_a_kept_alive_connection(
    net: FakeInternet, dials: Dials
) -> None:
    net.site("a.test").otherwise("page")
    async with fetching(net) as (fetcher, lent):

        async def run() -> None:
            async with lent.get("http://a.test/") as response:
                await response.read()
            dials.lose("no route")
            assert await fetcher.reach("http://a.test") is False

        await net.drive(run())


async def test_a_probe_closes_a_kept_alive_connection_and_opens_a_new_one(
    net: FakeInternet,
) -> None:
    net.site("a.test").otherwise("page")
    async with fetching(net) as (fetcher, lent):

        async def run() -> None:
            async with lent.get("http://a.test/") as response:
                await response.read()
            assert await fetcher.reach("http://a.test") is True

        await net.drive(run())
    assert len(net.connections) == 2


async def test_a_probe_of_a_silent_network_ends_at_the_connect_timeout(
    net: FakeInternet, dials: Dials
) -> None:
    net.site("a.test")
    dials.lose("silent")
    async with fetching(net) as (fetcher, _):
        assert await net.drive(fetcher.reach("http://a.test")) is False
    assert net.clock.monotonic() <= Config().fetch.connect_timeout + 1.0


async def test_a_probe_that_meets_a_refusal_or_a_missing_name_is_undecided(
    net: FakeInternet,
) -> None:
    net.refusing("refusing.test")
    net.dns("missing.test", Fail.NXDOMAIN)
    async with fetching(net) as (fetcher, _):
        assert await net.drive(fetcher.reach("http://refusing.test")) is None
        assert await net.drive(fetcher.reach("http://missing.test")) is None


async def test_a_probe_behind_a_proxy_is_undecided(net: FakeInternet) -> None:
    net.site("a.test")
    async with fetching(net, proxy="http://a.test") as (fetcher, _):
        assert await net.drive(fetcher.reach("http://a.test")) is None
    assert not net.connections


async def test_a_probe_over_a_closed_session_is_undecided(net: FakeInternet) -> None:
    async with fetching(net) as (fetcher, lent):
        await lent.close()
        assert await fetcher.reach("http://a.test") is None
