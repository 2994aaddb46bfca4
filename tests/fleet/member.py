"""A member of a fleet as a process: `python member.py '{"store": URL, "hosts": [...], ...}'`."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import sys
from typing import Any

import aiohttp

from gatekeeper import Config, GatekeeperError, polite_session


async def visit(session: aiohttp.ClientSession, hosts: list[str], rng: random.Random) -> None:
    while True:
        path = f"never/{rng.random()}" if rng.random() < 0.02 else str(rng.random())
        try:
            async with session.get(f"http://{rng.choice(hosts)}/{path}") as response:
                await response.read()
        except (GatekeeperError, aiohttp.ClientError, TimeoutError, OSError):
            await asyncio.sleep(0.05)


async def main() -> None:
    said: dict[str, Any] = json.loads(sys.argv[1])
    config = Config.from_dict(
        {
            "guard": {"allow": ["127.0.0.0/8"]},
            "pacing": {"backoff_quiet": 1.0, "backoff_retry": 1.0, "max_in_flight": 1000},
            "cache": {"min_ttl": said["min_ttl"]},
            "fleet": said["fleet"],
            "audit": said["audit"],
        }
    )
    rng = random.Random()
    async with polite_session(user_agent="fleetbot", config=config) as session:
        workers = (visit(session, said["hosts"], rng) for _ in range(said["workers"]))
        await asyncio.gather(*workers)


if __name__ == "__main__":
    logging.basicConfig(format="%(asctime)s %(process)d %(name)s %(message)s", level=logging.INFO)
    asyncio.run(main())
