"""A crawler with aiohttp: `polite_session` decides, waits and reports on every redirect hop.

python examples/session.py https://example.org/ https://example.org/about
"""

from __future__ import annotations

import asyncio
import os
import sys

import aiohttp

from gatekeeper import Config, Denied
from gatekeeper.session import polite_session


async def fetch(session: aiohttp.ClientSession, url: str) -> str:
    """Fetch one URL and describe the outcome. Each redirect hop is decided and paced."""
    try:
        async with session.get(url) as response:
            body = await response.read()
            return f"{response.status}, {len(body)} bytes"
    except Denied as error:
        return f"{error.decision.verdict} ({error.decision.reason})"
    except aiohttp.ClientError as error:
        return f"failed ({type(error).__name__})"


async def main(urls: list[str]) -> None:
    """Fetch all URLs concurrently, each host at its own pace."""
    path = os.environ.get("GATEKEEPER_CONFIG")
    config = Config.load(path) if path else Config()
    async with polite_session(
        "examplebot/1.0 (+https://example.org/bot)", config=config
    ) as session:
        outcomes = await asyncio.gather(*(fetch(session, url) for url in urls))
    for url, outcome in zip(urls, outcomes, strict=True):
        print(url, outcome)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
