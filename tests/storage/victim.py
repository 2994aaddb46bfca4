"""The victims of test_kill.py (see `tests/forking.py`): they put and promise without end.

    stdin     "<path> <seed> <clocks from>"
    stdout    one line for every call that has returned

Lines of a round: "promised <scope> <value>", "put <scope> <value>", "flushed <value>".
Everything put or promised before "flushed <value>" carries at most that value.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time

from gatekeeper.config import StorageConfig
from gatekeeper.storage import ClockRecord, SqliteStorage
from tests.forking import fork_for_each, say
from tests.storage.conftest import record_of

CONFIG = StorageConfig(flush_interval=0.02, journal_bytes=4000, history_versions=3)


async def work(path: str, rng: random.Random, value: int) -> None:
    async with SqliteStorage(path, config=CONFIG) as storage:
        while True:
            value += 1
            scope = f"{rng.randrange(20)}.example"
            if rng.random() < 0.6:
                storage.promise(ClockRecord(scope=scope, next_at=float(value)))
                say(f"promised {scope} {value}")
            elif rng.random() < 0.9:
                text = b"#%d" % (value // 3)
                storage.put_origin(record_of(f"https://{scope}", text, float(value)))
                say(f"put {scope} {value} {time.monotonic()}")
            else:
                await storage.flush()
                say(f"flushed {value}")


def live(line: str) -> None:
    path, seed, value = line.split()
    asyncio.run(work(path, random.Random(int(seed)), int(value)))


if __name__ == "__main__":
    fork_for_each(sys.stdin, live)
