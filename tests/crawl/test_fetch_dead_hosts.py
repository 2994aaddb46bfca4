"""`gatekeeper fetch`: dead hosts at the start of a list do not slow down the living ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextvars import copy_context
from pathlib import Path
from typing import Any

import pytest

from gatekeeper.clock import Timer, VirtualClock
from gatekeeper.config import Config, GuardConfig, PacingConfig
from tests.crawl.crawling import ROBOTS, fetch, manifest
from tests.internet import FakeInternet
from tests.politeness.dead import KINDS, Dials, dead_hosts, dying_hosts

PACED = Config(
    guard=GuardConfig(allow=("127.0.0.0/8", "*.test")), pacing=PacingConfig(default_interval=0.2)
)


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(wall=1_790_000_000.0)


@pytest.fixture
async def internet(clock: VirtualClock) -> AsyncIterator[FakeInternet]:
    async with FakeInternet(clock=clock) as net:
        yield net


def living(internet: FakeInternet, count: int, pages: int) -> list[str]:
    """Return URLs of hosts that answer, alternating between the hosts."""
    for number in range(count):
        internet.site(f"up{number}.test").robots("").otherwise("page")
    return [f"http://up{host}.test/{page}" for page in range(pages) for host in range(count)]


async def pages_within(
    internet: FakeInternet,
    folder: Path,
    urls: list[str],
    wanted: int,
    seconds: float,
    *,
    concurrency: int = 100,
) -> float:
    """Return the seconds until that many pages were fetched; then the crawl is cancelled."""
    began = internet.clock.monotonic()
    folder.mkdir()
    listed = folder / "urls"
    listed.write_text("\n".join(urls))
    crawl = fetch(internet, config=PACED, input=str(listed), concurrency=concurrency, grace=0.1)
    run = asyncio.create_task(crawl)
    try:
        while internet.clock.monotonic() - began < seconds:
            pages = sum(request.path != ROBOTS for request in internet.requests)
            if pages >= wanted:
                break
            await internet.clock.sleep(0.1)
    finally:
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)
    return internet.clock.monotonic() - began


@pytest.mark.parametrize("sites", ["one", "many"])
@pytest.mark.parametrize("kind", KINDS)
async def test_forty_dead_hosts_at_the_front_do_not_delay_eighty_living_ones(
    internet: FakeInternet, dials: Dials, tmp_path: Path, kind: str, sites: str
) -> None:
    up = living(internet, 80, 1)
    down = [f"http://{name}/" for name in dead_hosts(internet, kind, 40, sites=sites)]
    took = await internet.drive(pages_within(internet, tmp_path / "out", down + up, 80, 60.0))
    assert took <= 3.0
    assert {request.url for request in internet.requests} >= set(up)


@pytest.mark.parametrize("kind", ["refused", "silent", "dns silent"])
async def test_a_host_that_answers_keeps_its_pace_among_two_thousand_dead_ones(
    internet: FakeInternet,
    dials: Dials,
    tmp_path: Path,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gatekeeper.fetching.limits.within_open_files", lambda wanted: wanted)
    up = living(internet, 3, 60)
    alone = await internet.drive(pages_within(internet, tmp_path / "a", up, 180, 60.0))
    assert alone <= 13.0
    internet.requests.clear()
    down = [f"http://{name}/" for name in dead_hosts(internet, kind, 2000)]
    beside = await internet.drive(pages_within(internet, tmp_path / "b", down + up, 180, 60.0))
    assert beside <= alone / 0.95 + 3.0, "3 s: the living ones are met behind all the dead"


async def test_hosts_that_die_after_their_robots_txt_do_not_slow_living_hosts(
    internet: FakeInternet, dials: Dials, tmp_path: Path
) -> None:
    up = living(internet, 5, 60)
    run = pages_within(internet, tmp_path / "a", up, 300, 60.0, concurrency=20)
    alone = await internet.drive(run)
    internet.requests.clear()
    down = [f"http://{name}/" for name in dying_hosts(internet, dials, 200)]
    run = pages_within(internet, tmp_path / "b", down + up, 300, 60.0, concurrency=20)
    beside = await internet.drive(run)
    assert sum(request.path == ROBOTS for request in internet.requests) == 205
    assert beside <= alone / 0.95 + 3.0, "3 s: the living ones are met behind all the dead"


async def test_an_additional_worker_does_not_inherit_the_lease_of_another(
    internet: FakeInternet,
    clock: VirtualClock,
    dials: Dials,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The additional worker is started while another's request connects under a lease."""
    call_at = clock.call_at

    def in_context(when: float, callback: Callable[..., object], *args: Any) -> Timer:
        return call_at(when, copy_context().run, callback, *args)  # as a loop's own timers do

    monkeypatch.setattr(clock, "call_at", in_context)
    (name,) = dying_hosts(internet, dials, 1)
    pacing = PacingConfig(default_interval=0.2, own_wait=1.0)
    config = Config(guard=PACED.guard, pacing=pacing)
    urls = [f"http://{name}/{page}" for page in range(3)]
    output = tmp_path / "out"
    run = fetch(internet, *urls, config=config, output=output, concurrency=1, tries=1)
    assert await internet.drive(run) == 1
    assert {entry["outcome"] for entry in manifest(tmp_path / "out").values()} == {"failed"}
    assert manifest(tmp_path / "out").keys() == set(urls)
