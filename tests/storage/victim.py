"""The victim of test_kill.py: forks a process per round, which puts and promises without end.

    stdin     one line per round: "<path> <seed> <clocks from>"
    stdout    "pid <n>", then one line for every call that has returned, until the end

Lines of a round: "promised <scope> <value>", "put <scope> <value>", "flushed <value>".
Everything put or promised before "flushed <value>" carries at most that value.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time

from gatekeeper.config import StorageConfig
from gatekeeper.storage import ClockRecord, OriginRecord, SqliteStorage, pack_body

CONFIG = StorageConfig(flush_interval=0.02, journal_bytes=4000, history_versions=3)


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())


def record(scope: str, value: int) -> OriginRecord:
    body, digest = pack_body(b"#%d" % (value // 3))
    return OriginRecord(
        origin=f"https://{scope}",
        outcome="rule",
        state="parsed",
        fetched_at=float(value),
        soft_expires_at=0.0,
        expires_at=0.0,
        body=body,
        body_hash=digest,
    )


async def work(path: str, rng: random.Random, value: int) -> None:
    async with SqliteStorage(path, config=CONFIG) as storage:
        while True:
            value += 1
            scope = f"{rng.randrange(20)}.example"
            if rng.random() < 0.6:
                storage.promise(ClockRecord(scope=scope, next_at=float(value)))
                say(f"promised {scope} {value}")
            elif rng.random() < 0.9:
                storage.put_origin(record(scope, value))
                say(f"put {scope} {value} {time.monotonic()}")
            else:
                await storage.flush()
                say(f"flushed {value}")


def main() -> None:
    for line in sys.stdin:
        path, seed, value = line.split()
        child = os.fork()
        if child == 0:
            say(f"pid {os.getpid()}")
            asyncio.run(work(path, random.Random(int(seed)), int(value)))
        os.waitpid(child, 0)
        say("dead")


if __name__ == "__main__":
    main()
