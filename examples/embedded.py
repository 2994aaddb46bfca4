"""A crawler with a gate: take a lease (which waits until the host is due), fetch, report.

python examples/embedded.py https://example.org/ https://example.org/about
"""

from __future__ import annotations

import asyncio
import os
import sys
import time

import aiohttp

from gatekeeper import Config, Deferred, Denied, Gatekeeper, Lease, LeaseTimeout
from gatekeeper.session import plain_session

USER_AGENT = "examplebot/1.0 (+https://example.org/bot)"
PATIENCE = 60.0
"""Seconds after which a deferred URL is given up."""


async def fetch(gate: Gatekeeper, session: aiohttp.ClientSession, url: str) -> str:
    """Fetch one URL and describe the outcome. A deferred URL is retried at its `retry_at`."""
    give_up = time.monotonic() + PATIENCE
    while True:
        try:
            async with gate.lease(url, timeout=PATIENCE) as lease:
                return await get(session, url, lease)
        except Deferred as error:  # before Denied, its base class
            retry_at = error.retry_at.timestamp() if error.retry_at else time.time() + 1
            pause = max(0.1, retry_at - time.time())
            if time.monotonic() + pause > give_up:
                return f"deferred ({error.decision.reason})"
            await asyncio.sleep(pause)
        except Denied as error:
            return f"denied ({error.decision.reason})"
        except LeaseTimeout as error:
            return f"no lease ({error})"


async def get(session: aiohttp.ClientSession, url: str, lease: Lease) -> str:
    """Send one request under its lease. Redirects are not followed: each needs its own lease."""
    began = time.monotonic()
    async with session.get(url, allow_redirects=False) as response:
        lease.report(  # the host's pace follows the result
            status=response.status,
            elapsed=time.monotonic() - began,
            retry_after=response.headers.get("Retry-After"),
        )
        body = await response.read()
        return f"{response.status}, {len(body)} bytes"


async def main(urls: list[str]) -> None:
    """Fetch all URLs concurrently, each host at its own pace."""
    path = os.environ.get("GATEKEEPER_CONFIG")
    config = Config.load(path) if path else Config()
    async with (
        Gatekeeper(USER_AGENT, config=config) as gate,
        plain_session(USER_AGENT, gate=gate) as session,
    ):
        outcomes = await asyncio.gather(*(fetch(gate, session, url) for url in urls))
    for url, outcome in zip(urls, outcomes, strict=True):
        print(url, outcome)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
