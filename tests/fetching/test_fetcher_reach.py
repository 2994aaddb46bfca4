"""Testing a new connection to an origin, without a request."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from gatekeeper.clock import VirtualClock
from gatekeeper.config import Config
from gatekeeper.fetching.fetcher import Fetcher
from tests.fetching.turns import HostTurns
from tests.internet import Fail, FakeInternet
from tests.politeness.dead import Dials


@pytest.fixture
def net(virtual_internet: FakeInternet) -> FakeInternet:
    return virtual_internet


@pytest.fixture
def dials(net: FakeInternet) -> Iterator[Dials]:
    clock = net.clock
    assert isinstance(clock, VirtualClock)
    with Dials.caught(clock) as dials:
        yield dials


@asynccontextmanager
async def fetching(
    net: FakeInternet, **session: Any
) -> AsyncIterator[tuple[Fetcher, aiohttp.ClientSession]]:
    async with net.session(**session) as lent:
        yield (
            Fetcher(
                lent,
                user_agent="testbot/1.0",
                config=Config(),
                clock=net.clock,
                acquire=HostTurns(net.clock, 1.0),
            ),
            lent,
        )


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_a_connection_is_made_and_nothing_is_asked_over_it(
    net: FakeInternet, scheme: str
) -> None:
    net.site("a.test", tls="good")
    async with fetching(net) as (fetcher, _):
        assert await net.drive(fetcher.reach(f"{scheme}://a.test")) is True
    await net.settle()
    assert len(net.connections) == 1
    assert not net.requests


async def test_connections_that_are_kept_alive_prove_nothing(
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


async def test_one_that_is_kept_alive_is_given_up_for_a_new_one(net: FakeInternet) -> None:
    net.site("a.test").otherwise("page")
    async with fetching(net) as (fetcher, lent):

        async def run() -> None:
            async with lent.get("http://a.test/") as response:
                await response.read()
            assert await fetcher.reach("http://a.test") is True

        await net.drive(run())
    assert len(net.connections) == 2


async def test_a_silent_network_is_told_within_the_time_to_connect(
    net: FakeInternet, dials: Dials
) -> None:
    net.site("a.test")
    dials.lose("silent")
    async with fetching(net) as (fetcher, _):
        assert await net.drive(fetcher.reach("http://a.test")) is False
    assert net.clock.monotonic() <= Config().fetch.connect_timeout + 1.0


async def test_a_refusal_and_a_missing_name_tell_nothing(net: FakeInternet) -> None:
    net.refusing("refusing.test")
    net.dns("missing.test", Fail.NXDOMAIN)
    async with fetching(net) as (fetcher, _):
        assert await net.drive(fetcher.reach("http://refusing.test")) is None
        assert await net.drive(fetcher.reach("http://missing.test")) is None


async def test_behind_a_proxy_it_can_not_be_told(net: FakeInternet) -> None:
    net.site("a.test")
    async with fetching(net, proxy="http://a.test") as (fetcher, _):
        assert await net.drive(fetcher.reach("http://a.test")) is None
    assert not net.connections


async def test_nor_over_a_session_that_is_closed(net: FakeInternet) -> None:
    async with fetching(net) as (fetcher, lent):
        await lent.close()
        assert await fetcher.reach("http://a.test") is None
