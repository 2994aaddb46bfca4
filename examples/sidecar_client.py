"""The crawler of `embedded.py`, with the gate in another process: `gatekeeper serve`.

python examples/sidecar_client.py https://example.org/ https://example.org/about
"""

from __future__ import annotations

import asyncio
import os
import sys
import time

import aiohttp

from gatekeeper import Config, Denied, LeaseTimeout, RemoteGatekeeper
from gatekeeper.session import plain_session

USER_AGENT = "examplebot/1.0 (+https://example.org/bot)"


async def fetch(gate: RemoteGatekeeper, session: aiohttp.ClientSession, url: str) -> str:
    """Fetch one URL and describe the outcome."""
    try:
        async with gate.lease(url, timeout=30) as lease:
            began = time.monotonic()
            async with session.get(url, allow_redirects=False) as response:
                lease.report(
                    status=response.status,
                    elapsed=time.monotonic() - began,
                    retry_after=response.headers.get("Retry-After"),
                )
                body = await response.read()
                return f"{response.status}, {len(body)} bytes"
    except Denied as error:  # or Deferred, a subclass: retry at error.retry_at
        return f"{error.decision.verdict} ({error.decision.reason})"
    except LeaseTimeout:
        return "no lease within 30 s"


async def main(urls: list[str]) -> None:
    """Fetch all URLs concurrently. All clients of the sidecar share each host's pace."""
    sidecar = os.environ.get("GATEKEEPER_URL", "http://127.0.0.1:8750")
    path = os.environ.get("GATEKEEPER_CONFIG")
    config = Config.load(path) if path else Config()
    async with (
        RemoteGatekeeper(sidecar, USER_AGENT, token=os.environ.get("GATEKEEPER_TOKEN")) as gate,
        plain_session(USER_AGENT, config=config) as session,
    ):
        outcomes = await asyncio.gather(*(fetch(gate, session, url) for url in urls))
    for url, outcome in zip(urls, outcomes, strict=True):
        print(url, outcome)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
