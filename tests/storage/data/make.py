"""How the state files beside this were made: run by the gatekeeper whose format they have.

    python tests/storage/data/make.py DIRECTORY

Run with the gatekeeper of commit 8c6832e (schema 3), whose `LeaseBook` was told the time, and of
f654cde (schema 7), the last one that wrote a clock's interval as the start of its reason.
Leaves `closed` (ended as it should be) and `killed` (ended by kill -9: a log, a journal and
open leases beside the database), each with the state file, the journals and the leases.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from pathlib import Path

from gatekeeper.clock import VirtualClock
from gatekeeper.config import Config, StorageConfig
from gatekeeper.pacing.scheduler import Scheduler
from gatekeeper.robots.timing import RobotsInterval
from gatekeeper.storage import OriginRecord, SqliteStorage, pack_body

WALL = 1_790_000_000.0
TEXT = b"User-agent: *\nDisallow: /private\nCrawl-delay: 8\n"


def record(origin: str, **fields: object) -> OriginRecord:
    body, digest = pack_body(TEXT)
    values = {
        "origin": origin,
        "outcome": "rules",
        "state": "parsed",
        "status": 200,
        "fetched_at": WALL,
        "soft_expires_at": WALL + 70_000.0,
        "expires_at": WALL + 86_400.0,
        "good_outcome": "rules",
        "good_status": 200,
        "good_fetched_at": WALL,
        "body": body,
        "body_hash": digest,
        "took": 0.1,
    }
    return OriginRecord(**(values | fields))  # type: ignore[arg-type]


async def make(path: Path, *, killed: bool) -> None:
    clock = VirtualClock(wall=WALL)
    storage = SqliteStorage(path, config=StorageConfig(flush_interval=0.05), clock=clock)
    await storage.open()
    scheduler = Scheduler(Config(), clock=clock, rng=random.Random(1), storage=storage)
    await scheduler.open()

    async def ask(host: str, seconds: float, status: int, **said: float) -> None:
        grant = await scheduler.acquire(
            "u", host, admit=lambda: RobotsInterval(seconds, "crawl-delay")
        )
        grant.report(status, **said)
        grant.release()

    storage.put_origin(record("http://slow.test"))
    storage.put_origin(
        record(
            "http://down.test",
            outcome="server_error",
            state="unreachable",
            status=500,
            soft_expires_at=WALL + 240.0,
            expires_at=WALL + 240.0,
            first_unreachable_at=WALL - 60.0,
            ladder_step=2,
            good_fetched_at=WALL - 1000.0,
        )
    )
    await ask("slow.test", 8.0, 200)
    await ask("blocked.test", 2.0, 429, retry_after=600.0)
    scheduler.pause("paused.test")
    await storage.flush()
    await ask("late.test", 20.0, 200)
    journal = Path(f"{path}-leases")
    from gatekeeper.sidecar import leases

    if hasattr(leases, "LeaseBook"):  # the name of the journal's class in schema 3
        book = leases.LeaseBook(journal, now=WALL)
    else:
        book = leases.LeaseJournal(journal, clock=clock)
    book.granted(leases.OpenLease("open-lease", WALL + 60.0, "http://slow.test/a", "Other/1.0"))
    book.granted(leases.OpenLease("ended-lease", WALL + 60.0, "http://slow.test/b"))
    book.ended("ended-lease")
    if killed:
        os.kill(os.getpid(), signal.SIGKILL)
    await scheduler.close()
    await storage.close()
    book.close()


def main() -> None:
    directory = Path(sys.argv[1])
    for name in ("closed", "killed"):
        (directory / name).mkdir(parents=True)
        child = os.fork()
        if child == 0:
            asyncio.run(make(directory / name / "state.db", killed=name == "killed"))
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
