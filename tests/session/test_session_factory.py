"""`polite_session` with the sessions of other libraries: a cache, a retrying client."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from gatekeeper import ConfigError, Denied, polite_session, session_gate
from tests.gate_support import open_config
from tests.internet import FakeInternet, Page
from tests.politeness.world import AGENT

cached = pytest.importorskip("aiohttp_client_cache")
retry = pytest.importorskip("aiohttp_retry")


async def test_a_response_from_a_cache_takes_no_lease(net: FakeInternet) -> None:
    site = net.site("a.test").robots("User-agent: *\nCrawl-delay: 10\nDisallow: /private\n")
    site.page("/", "hello")

    def make(**arguments: Any) -> aiohttp.ClientSession:
        return cached.CachedSession(cache=cached.CacheBackend(), **arguments)

    async def run() -> list[str]:
        async with polite_session(
            AGENT,
            config=open_config(),
            resolver=net.resolver,
            clock=net.clock,
            session_factory=make,
        ) as session:
            assert isinstance(session, cached.CachedSession)
            texts = []
            for _ in range(3):
                async with session.get("http://a.test/") as response:
                    texts.append(await response.text())
            began = net.clock.monotonic()
            with pytest.raises(Denied):
                await session.get("http://a.test/private")
            assert session_gate(session).stats().pacing.granted == 2
            assert net.clock.monotonic() == began
            return texts

    assert await net.drive(run()) == ["hello"] * 3
    assert site.paths == ["/robots.txt", "/"]


async def test_each_retry_of_a_retrying_client_takes_a_lease(
    net: FakeInternet,
) -> None:
    site = net.site("a.test").robots("User-agent: *\nCrawl-delay: 10\n")
    site.on("/", Page("", status=500), Page("", status=502), Page("there"))

    async def run() -> str:
        async with polite_session(
            AGENT, config=open_config(), resolver=net.resolver, clock=net.clock
        ) as session:
            options = retry.ListRetry(timeouts=[0.0, 0.0, 0.0])
            client = retry.RetryClient(client_session=session, retry_options=options)
            async with client.get("http://a.test/") as response:
                return str(await response.text())

    assert await net.drive(run()) == "there"
    assert site.paths == ["/robots.txt", "/", "/", "/"]
    assert min(site.gaps()) >= 10.0


async def test_a_session_factory_that_makes_no_client_session_is_refused(
    internet: FakeInternet,
) -> None:
    with pytest.raises(ConfigError, match="not a ClientSession"):
        async with polite_session(
            AGENT, config=open_config(), session_factory=lambda **_: object()
        ):  # type: ignore[arg-type,return-value]
            pass
