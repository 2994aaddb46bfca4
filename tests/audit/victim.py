"""The victim of test_kill.py: forks a process per round, whose gate grants leases without end.

stdin     one line per round: "<folder> <seed>"
stdout    "pid <n>", then the URL of each lease that was granted, until "dead"
"""

from __future__ import annotations

import asyncio
import os
import random
import sys

from gatekeeper import Config
from gatekeeper.testing import ScriptedGate


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())


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


def main() -> None:
    for line in sys.stdin:
        folder, seed = line.split()
        if (pid := os.fork()) == 0:
            asyncio.run(work(folder, random.Random(seed)))
            os._exit(1)
        say(f"pid {pid}")
        os.waitpid(pid, 0)
        say("dead")


if __name__ == "__main__":
    main()
