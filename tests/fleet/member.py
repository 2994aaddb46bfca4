"""A member of a fleet as a process: `python member.py STORE HOLD WHEN_LOST HOST:PORT ...`"""

from __future__ import annotations

import asyncio
import logging
import random
import sys

import aiohttp

from gatekeeper import Config, GatekeeperError, polite_session

WORKERS = 6


async def visit(session: aiohttp.ClientSession, hosts: list[str], rng: random.Random) -> None:
    while True:
        try:
            async with session.get(f"http://{rng.choice(hosts)}/{rng.random()}") as response:
                await response.read()
        except (GatekeeperError, aiohttp.ClientError, TimeoutError, OSError):
            await asyncio.sleep(0.05)


async def main() -> None:
    store, hold, when_lost, *hosts = sys.argv[1:]
    config = Config.from_dict(
        {
            "guard": {"allow": ["127.0.0.0/8"]},
            "pacing": {"backoff_quiet": 1.0, "backoff_retry": 1.0},
            "fleet": {"url": store, "hold": float(hold), "when_lost": when_lost},
        }
    )
    rng = random.Random()
    async with polite_session(user_agent="fleetbot", config=config) as session:
        await asyncio.gather(*(visit(session, hosts, rng) for _ in range(WORKERS)))


if __name__ == "__main__":
    logging.basicConfig(format="%(asctime)s %(process)d %(name)s %(message)s", level=logging.INFO)
    asyncio.run(main())
