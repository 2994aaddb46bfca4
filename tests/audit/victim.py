"""The victims of test_kill.py (see `tests/forking.py`): gates that grant leases without end.

stdin     "<folder> <seed>"
stdout    the URL of each lease that was granted
"""

from __future__ import annotations

import asyncio
import random
import sys

from gatekeeper import Config
from gatekeeper.testing import ScriptedGate
from tests.forking import fork_for_each, say


async def work(folder: str, rng: random.Random) -> None:
    audit = {"folder": folder, "rotate": 16_384}
    config = Config.from_dict({"audit": audit, "pacing": {"default_interval": 0.0}})
    async with ScriptedGate(config=config) as gate:
        held = []
        for number in range(1_000_000):
            origin = f"https://{rng.randrange(40)}.example"
            gate.say(origin, f"User-agent: *\nDisallow: /{rng.randrange(1000)}\n")
            held.append(await gate.acquire(f"{origin}/page?{number}", owned=False))
            say(held[-1].url)
            if rng.random() < 0.9:
                lease = held.pop()
                lease.report(status=rng.choice([200, 200, 404, 500]), size=100)
                lease.end()
            if len(held) > 20:
                held.pop(0).end()


def live(line: str) -> None:
    folder, seed = line.split()
    asyncio.run(work(folder, random.Random(seed)))


if __name__ == "__main__":
    fork_for_each(sys.stdin, live)
