"""A crawler that only needs a function to fetch URLs, for example by a polite session."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager

import aiohttp
from aiohttp.abc import AbstractResolver

from gatekeeper import Deferred, Denied, Gatekeeper, polite_session
from gatekeeper.clock import Clock
from gatekeeper.storage.base import Storage
from tests.gate_support import open_config
from tests.politeness.world import AGENT

Fetch = Callable[[str], Awaitable[int]]
"""Fetches a URL, following redirects, and returns the status."""


@asynccontextmanager
async def polite_fetch(
    resolver: AbstractResolver, clock: Clock, storage: Storage | None = None
) -> AsyncIterator[Fetch]:
    """Fetch with `polite_session`, resolving each name again."""
    async with polite_session(
        user_agent=AGENT, config=open_config(), resolver=resolver, clock=clock, storage=storage
    ) as session:

        async def fetch(url: str) -> int:
            assert isinstance(session.connector, aiohttp.TCPConnector)
            session.connector.clear_dns_cache()  # Its entries expire by the loop's own clock.
            async with session.get(url) as response:
                await response.read()
                return response.status

        yield fetch


async def crawl(fetch: Fetch, urls: Iterable[str], clock: Clock) -> None:
    """Fetch every URL in a task of its own, until it is fetched or denied."""

    async def until_had(url: str) -> None:
        while True:
            try:
                if await fetch(url) not in (429, 503):
                    return
            except Deferred as refusal:
                at = refusal.retry_at
                # `retry_at` is rounded to a microsecond, so at that moment it may be too early.
                left = 1.0 if at is None else at.timestamp() - clock.wall()
                await clock.sleep(max(1e-6, left))
            except Denied:
                return

    async with asyncio.TaskGroup() as tasks:
        for url in urls:
            tasks.create_task(until_had(url))


async def visit(gate: Gatekeeper, url: str, log: list[tuple[str, float]]) -> None:
    """Take a lease, use it immediately and report success."""
    async with gate.lease(url) as lease:
        log.append((url, gate.parts.clock.monotonic()))
        lease.report(status=200)
