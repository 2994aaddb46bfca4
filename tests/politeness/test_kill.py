"""Repeated kill -9 in the middle of a crawl: promises outlive the process."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import random
import signal
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from gatekeeper.clock import VirtualClock
from gatekeeper.testing import Breach
from tests.effort import LONG, some_of
from tests.internet import FakeInternet, Page
from tests.politeness.victim import Job
from tests.politeness.world import WALL, World
from tests.processes import PYTHON

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")

HOSTS = 24
KILLS = 8 if LONG else 4
SEEDS = [1, 7] if LONG else [7]
RESOLVING = 0.3
"""Most seconds that a lookup takes, and so a request from its lease to its site."""
ROOT = Path(__file__).parents[2]


class Crawler:
    """A crawler in a process of its own, which shares only the time with us."""

    def __init__(self, process: Process, internet: FakeInternet, path: Path) -> None:
        self._process = process
        self._internet = internet
        self._path = path
        self._pid = 0
        assert isinstance(internet.clock, VirtualClock)
        self._clock = internet.clock

    async def _line(self) -> str:
        assert self._process.stdout is not None
        line = (await self._process.stdout.readline()).decode().strip()
        assert line, "the crawler died by itself"
        return line

    def _write(self, line: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + b"\n")

    async def _tell(self, command: str) -> str:
        self._write(command.encode())
        return await self._line()

    async def start(self, urls: list[str], seed: int, *, jump: float | None = None) -> None:
        """Start the process. `jump`: without a reboot, and with the wall clock set forward by this
        many seconds; None: after a reboot, with a correct wall clock."""
        names = [name for name in self._internet.sites if ":" not in name]
        port = self._internet.listener().port()
        wall = self._clock.wall() + (jump or 0.0)
        boot = None if jump is None else ("this start", self._clock.monotonic())
        job = Job(str(self._path), wall, port, names, urls, seed, boot)
        self._write(msgspec.json.encode(job))
        self._pid = int((await self._line()).split()[1])

    async def _quiet(self) -> str:
        """Return the crawler's answer once nothing happens any more in either process."""
        said, seen, still = "", -1, 0
        while still < 3:
            await self._internet.settle()
            now = await self._tell("look")
            same = (now, self._internet.activity) == (said, seen)
            still = still + 1 if same else 0
            said, seen = now, self._internet.activity
        return said

    async def step(self) -> bool:
        """Advance the time to the next event. Return False once the crawl is done."""
        patience = time.monotonic() + 45.0
        while time.monotonic() < patience:
            said = await self._quiet()
            if said == "done":
                return False
            waits = [] if said == "-" else [float(said)]
            if (when := self._clock.next_timer()) is not None:
                waits.append(when - self._clock.monotonic())
            if waits:
                seconds = max(0.0, min(waits))
                # The crawler stops until it receives "go": no message may pass between the
                # processes while their clocks differ.
                await self._tell(f"advance {seconds!r}")
                self._clock.advance(seconds)
                self._write(b"go")
                return True
            await self._tell("wait")  # Its storage is working in a thread.
        raise AssertionError("it waits for nothing")

    async def flush(self) -> None:
        """Let it write everything to disk."""
        await self._quiet()
        assert await self._tell("flush") == "ok"

    async def limit(self, octets: int) -> None:
        """Limit the size of its files."""
        await self._quiet()
        assert await self._tell(f"limit {octets}") == "ok"

    async def end(self, *, kill: bool) -> None:
        """End it, by SIGKILL or cleanly, when no message is in flight."""
        if kill:
            await self._quiet()
            os.kill(self._pid, signal.SIGKILL)
        else:
            self._write(b"rest")
        while await self._line() != "dead":
            pass
        await self._internet.settle()


@pytest.fixture
async def internet() -> AsyncIterator[FakeInternet]:
    async with FakeInternet(clock=VirtualClock(wall=WALL)) as net:
        yield net


@pytest.fixture
async def crawler(internet: FakeInternet, tmp_path: Path) -> AsyncIterator[Crawler]:
    process = await asyncio.create_subprocess_exec(
        PYTHON, "-m", "tests.politeness.victim", stdin=PIPE, stdout=PIPE, cwd=ROOT
    )
    yield Crawler(process, internet, tmp_path / "state.db")
    assert process.stdin is not None
    process.stdin.close()
    await process.wait()


@pytest.mark.parametrize("seed", SEEDS)
async def test_a_crawl_killed_and_restarted_violates_no_rule_of_a_site(
    internet: FakeInternet, crawler: Crawler, seed: int
) -> None:
    rng = random.Random(seed)
    clock = internet.clock
    assert isinstance(clock, VirtualClock)
    world = World(internet, HOSTS)
    known: set[str] = set()
    kills = 0
    going_on = True
    while going_on:
        had = set(world.fetched())
        await crawler.start([url for url in world.seeds if url not in had], rng.randrange(1 << 30))
        begun = len(internet.requests)
        steps = rng.randrange(5, 90) if kills < KILLS else 100_000
        while going_on and steps:
            going_on = await crawler.step()
            steps -= 1
        if going_on:
            await crawler.flush()
        asked = {request.url for request in internet.requests[begun:]}
        assert not known & asked, "the file is known, and on disk"
        known = world.known()
        await crawler.end(kill=going_on)
        kills += going_on
        await clock.elapse(rng.choice((0.0, 0.3, 2.0)))
        assert [str(breach) for breach in world.breaches()] == []
    assert kills == KILLS
    assert set(world.fetched()) == world.welcome


def is_excused(world: World, breach: Breach, starts: list[float], lost: set[int]) -> bool:
    """Return True for a breach by a robots.txt request in another hour than the host's last
    request, for which the file has another rate, if the interval of that last hour was observed.

    The file is not on disk, so a new process can't know what it asks for now. What has to be
    observed is the clock that the last request started, which was written before its response
    counted. A robots.txt request without a recorded answer, of a process that recorded no other
    answer of the host, was sent without knowing the file as well: it counts with the default
    interval. `starts` are the times at which processes started.
    """
    manners = world.manners.get(breach.url.removesuffix("/robots.txt"))
    if breach.kind != "early" or manners is None or len(manners.rates) < 2:
        return False
    host = breach.url.split("/")[2].partition(":")[0]
    earlier = [
        one for one in world.log(lost) if one.host.partition(":")[0] == host and one.at < breach.at
    ]
    earlier.sort(key=lambda one: one.at)
    for last in reversed(earlier):
        gap = breach.at - max(last.at, last.answered or last.at)
        start = max(one for one in starts if one <= last.at)
        of_its_process = [one for one in earlier if start <= one.at <= last.at]
        if last.path != "/robots.txt" or any(one.answered for one in of_its_process):
            return gap >= manners.interval(WALL + last.at) - 1e-6
        if gap < manners.default - 1e-6:
            return False
    return True


@pytest.mark.parametrize("room", [131_072, 0])
@pytest.mark.parametrize("seed", SEEDS)
async def test_a_crawl_killed_on_a_full_disk_violates_no_rule_of_a_site(
    internet: FakeInternet, crawler: Crawler, seed: int, room: int
) -> None:
    """No space is left except what the journal had reserved, or not even that."""
    rng = random.Random(seed)
    clock = internet.clock
    assert isinstance(clock, VirtualClock)
    world = World(internet, HOSTS)
    lives, going_on = 0, True
    lost: set[int] = set()
    died = math.inf
    starts: list[float] = []
    while going_on:
        had = set(world.fetched())
        starts.append(clock.monotonic())
        await crawler.start([url for url in world.seeds if url not in had], rng.randrange(1 << 30))
        last = lives == KILLS
        for _ in range(100_000 if last else rng.randrange(5, 60)):
            if not (going_on := await crawler.step()):
                break
        if going_on:
            await crawler.limit(room)
            died = clock.monotonic()
            for _ in range(rng.randrange(5, 60)):
                if not (going_on := await crawler.step()):
                    break
        await crawler.end(kill=True)
        lives += 1
        if room == 0:
            # Nothing is granted any more; requests in flight are answered all the same.
            lost |= {
                n
                for n, one in enumerate(internet.requests)
                if one.at <= died + RESOLVING and (one.answered or math.inf) > died
            }
        await clock.elapse(rng.choice((0.0, 0.3, 2.0)))
        assert [
            str(one) for one in world.breaches(lost) if not is_excused(world, one, starts, lost)
        ] == []
    assert lives > 3
    assert set(world.fetched()) == world.welcome


SLOW = {"slow.test": 8.0, "slower.test": 20.0, "plain.test": 1.0}


@pytest.mark.parametrize("jump", some_of([-7200.0, 7200.0, 30 * 86_400.0, -86_400.0], 2))
async def test_a_crawl_killed_while_the_wall_clock_is_set_violates_no_rule_of_a_site(
    internet: FakeInternet, crawler: Crawler, jump: float
) -> None:
    clock = internet.clock
    assert isinstance(clock, VirtualClock)
    seeds = []
    for name, seconds in SLOW.items():
        site = internet.site(name).robots(f"User-agent: *\nCrawl-delay: {seconds}\n")
        for n in range(6):
            site.page(f"/{n}", "a page")
            seeds.append(f"http://{name}/{n}")
    internet.site("tired.test").robots("User-agent: *\nCrawl-delay: 1\n").on(
        "/", Page("", 429, [("Retry-After", "100")])
    )
    rng = random.Random(3)
    for life in range(4):
        await crawler.start([*seeds, "http://tired.test/"], 7, jump=life * jump)
        for _ in range(rng.randrange(20, 60)):
            await crawler.step()
        await crawler.end(kill=True)
        await clock.elapse(1.0)
    asked = internet.requests
    for name, seconds in SLOW.items():
        of_host = [request.at for request in asked if request.host.partition(":")[0] == name]
        assert len(of_host) > 2
        assert min(b - a for a, b in itertools.pairwise(of_host)) >= seconds - 1e-6
    tired = [request.at for request in asked if request.url.endswith("tired.test/")]
    assert tired
    assert all(b - a >= 100.0 - 1e-6 for a, b in itertools.pairwise(tired))
