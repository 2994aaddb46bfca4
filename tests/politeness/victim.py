"""The process that test_kill.py kills: a crawler with storage, whose time comes through a pipe.

Forks a process for each round, so that Python and its packages are loaded once:

    stdin     a Job in JSON starts a round; then one command per line
    stdout    "pid <n>", then one answer per command; "dead" once the process is gone

    look          let the loop run; "<seconds to its next timer>", "-" for none, or "done"
    advance <dt>  advance the time by so many seconds; "ok", and then nothing happens before "go"
    wait          until the storage's thread has done something, a second at most; "ok"
    flush         write everything that was put; "ok"
    limit <n>     limit files to so many octets, and let a write meet the limit; "ok"
    rest          end cleanly
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
from typing import Any

import msgspec

from gatekeeper.clock import Boot, VirtualClock
from gatekeeper.errors import StorageError
from gatekeeper.storage import ClockRecord, SqliteStorage
from gatekeeper.storage.writer import Writer
from tests.forking import fork_for_each, say
from tests.internet.names import Names
from tests.politeness.crawling import crawl, polite_fetch


class Job(msgspec.Struct):
    """The parameters of one round."""

    path: str
    wall: float
    port: int
    names: list[str]
    urls: list[str]
    seed: int
    boot: tuple[str, float] | None = None
    """Boot id and seconds since boot; None: after a reboot."""


def read_line() -> bytes:
    """Read one line of stdin and not an octet more: the rest is for the forked process."""
    line = b""
    while not line.endswith(b"\n"):
        octet = os.read(0, 1)
        if not octet:
            return b""
        line += octet
    return line


async def live(job: Job) -> None:
    """Crawl while the commands advance the time."""
    rng = random.Random(job.seed)
    boot = None if job.boot is None else Boot(*job.boot)
    clock = VirtualClock(start=rng.uniform(0.0, 1e6), wall=job.wall, boot=boot)
    names = Names(clock, lambda _address, _port: job.port, rng=rng, delay=(0.0, 0.3))
    for name in job.names:
        names.script(name, "127.0.0.1")
    storage = SqliteStorage(job.path, clock=clock)

    async def work() -> None:
        with contextlib.suppress(StorageError):  # The disk may be full when it closes.
            async with polite_fetch(names, clock, storage) as fetch:
                await crawl(fetch, job.urls, clock)

    # While a thread is working for the crawl, its time stands still.
    loop, in_threads = asyncio.get_running_loop(), set[asyncio.Future[Any]]()
    run = loop.run_in_executor

    def counted(executor: Any, work: Any, *args: Any) -> asyncio.Future[Any]:
        future = run(executor, work, *args)
        in_threads.add(future)
        future.add_done_callback(in_threads.discard)
        return future

    loop.run_in_executor = counted  # type: ignore[method-assign]
    wrote, look = asyncio.Event(), Writer.await_task

    def looks(writer: Writer) -> Any:
        with contextlib.suppress(RuntimeError):  # The loop may be closed.
            loop.call_soon_threadsafe(wrote.set)
        return look(writer)

    Writer.await_task = looks  # type: ignore[method-assign]
    crawling = asyncio.create_task(work())
    commands: asyncio.Queue[list[str]] = asyncio.Queue()
    loop.add_reader(0, lambda: commands.put_nowait(read_line().decode().split()))
    while True:
        match await commands.get():
            case ["look"]:
                await clock.settle()
                while in_threads:
                    await asyncio.wait(tuple(in_threads))
                    await clock.settle()
                if crawling.done():
                    crawling.result()
                    say("done")
                else:
                    when = clock.next_timer()
                    say("-" if when is None else repr(when - clock.monotonic()))
            case ["advance", seconds]:
                clock.advance(float(seconds))
                say("ok")
                assert read_line() == b"go\n"
            case ["limit", size]:
                resource.setrlimit(resource.RLIMIT_FSIZE, (int(size), resource.RLIM_INFINITY))
                record = ClockRecord(scope="probe.test", next_at=0.0)
                with contextlib.suppress(StorageError):
                    storage.owe(record)
                say("ok")
            case ["wait"]:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(1.0):
                        await wrote.wait()
                wrote.clear()
                say("ok")
            case ["flush"]:
                await storage.flush()
                say("ok")
            case _:
                return


if __name__ == "__main__":
    fork_for_each(
        iter(read_line, b""), lambda line: asyncio.run(live(msgspec.json.decode(line, type=Job)))
    )
