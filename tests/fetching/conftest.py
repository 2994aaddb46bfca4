"""Fixtures shared by the tests of this folder."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from gatekeeper.clock import Clock
from gatekeeper.config import Config
from gatekeeper.fetching.allowed_addresses import Guard
from gatekeeper.fetching.fetcher import Fetcher
from gatekeeper.fetching.outcomes import Retrieval, Validators
from gatekeeper.session import guarded_connector
from gatekeeper.urls import Target
from tests.fetching.host_leases import HostLeases
from tests.internet import FakeInternet


def fetcher_on(
    session: aiohttp.ClientSession, clock: Clock, config: Config | None = None, **more: Any
) -> Fetcher:
    """A fetcher over a session, which may ask a host once a second."""
    return Fetcher(
        session,
        user_agent="testbot/1.0",
        config=config or Config(),
        clock=clock,
        **{"acquire": HostLeases(clock, 1.0)} | more,
    )


class Asker:
    """Fetches from the fake internet under virtual time, with a guard that allows it."""

    def __init__(self, net: FakeInternet) -> None:
        self.net = net
        self.leases: list[tuple[str, str]] = []
        """("take" | "give", url), in order."""
        self.reports: list[tuple[str, int | None, float | None]] = []
        self.known: Callable[[str], Retrieval | None] | None = None

    @asynccontextmanager
    async def acquire(self, target: Target) -> AsyncIterator[Any]:
        url = target.url
        self.leases.append(("take", url))
        asker = self

        class Lease:
            def report(
                self,
                *,
                status: int | None = None,
                elapsed: float | None = None,
                retry_after: float | None = None,
            ) -> None:
                asker.reports.append((url, status, retry_after))

        try:
            yield Lease()
        finally:
            self.leases.append(("give", url))

    async def __call__(
        self,
        origin: str,
        validators: Validators | None = None,
        *,
        session: dict[str, Any] | None = None,
        limit: float = 86_400.0,
        **fetch: Any,
    ) -> Retrieval:
        config = Config.from_dict({"fetch": fetch, "guard": {"allow": ["127.0.0.0/8", "::1/128"]}})
        guard = Guard(config)
        connector = guarded_connector(
            config, resolver=self.net.resolver, guard=guard, ssl=self.net.client_ssl, limit=0
        )
        async with aiohttp.ClientSession(connector=connector, **session or {}) as lent:
            fetcher = Fetcher(
                lent,
                user_agent="testbot/1.0 (+https://bot.test/)",
                config=config,
                clock=self.net.clock,
                acquire=self.acquire,
                refuse=guard.refuses_url,
                known=self.known,
            )
            return await self.net.drive(fetcher.fetch(origin, validators), limit=limit)


@pytest.fixture
def ask(virtual_internet: FakeInternet) -> Asker:
    """`await ask(origin)` makes one retrieval on the virtual internet."""
    return Asker(virtual_internet)
