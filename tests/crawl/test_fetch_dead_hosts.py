"""`gatekeeper fetch`: dead hosts at the start of a list do not slow down the living ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
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


def living(net: FakeInternet, count: int, pages: int) -> list[str]:
    """Return URLs of hosts that answer, alternating between the hosts."""
    for number in range(count):
        net.site(f"up{number}.test").robots("").otherwise("page")
    return [f"http://up{host}.test/{page}" for page in range(pages) for host in range(count)]


async def pages_within(
    net: FakeInternet,
    folder: Path,
    urls: list[str],
    wanted: int,
    seconds: float,
    *,
    concurrency: int = 100,
) -> float:
    """Return the seconds until that many pages were fetched; then the crawl is cancelled."""
    began = net.clock.monotonic()
    folder.mkdir()
    listed = folder / "urls"
    listed.write_text("\n".join(urls))
    crawl = fetch(net, config=PACED, input=str(listed), concurrency=concurrency, grace=0.1)
    run = asyncio.create_task(crawl)
    try:
        while net.clock.monotonic() - began < seconds:
            pages = sum(request.path != ROBOTS for request in net.requests)
            if pages >= wanted:
                break
            await net.clock.sleep(0.1)
    finally:
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)
    return net.clock.monotonic() - began


@pytest.mark.parametrize("sites", ["one", "many"])
@pytest.mark.parametrize("kind", KINDS)
async def test_forty_dead_hosts_at_the_front_do_not_delay_eighty_living_ones(
    net: FakeInternet, dials: Dials, tmp_path: Path, kind: str, sites: str
) -> None:
    up = living(net, 80, 1)
    down = [f"http://{name}/" for name in dead_hosts(net, kind, 40, sites=sites)]
    took = await net.drive(pages_within(net, tmp_path / "out", down + up, 80, 60.0))
    assert took <= 3.0
    assert {request.url for request in net.requests} >= set(up)


@pytest.mark.parametrize("kind", ["refused", "silent", "dns silent"])
async def test_a_host_that_answers_keeps_its_pace_among_two_thousand_dead_ones(
    net: FakeInternet,
    dials: Dials,
    tmp_path: Path,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gatekeeper.fetching.limits.within_open_files", lambda wanted: wanted)
    up = living(net, 3, 60)
    alone = await net.drive(pages_within(net, tmp_path / "a", up, 180, 60.0))
    assert alone <= 13.0
    net.requests.clear()
    down = [f"http://{name}/" for name in dead_hosts(net, kind, 2000)]
    beside = await net.drive(pages_within(net, tmp_path / "b", down + up, 180, 60.0))
    assert beside <= alone / 0.95 + 3.0, "3 s: the living ones are met behind all the dead"


async def test_hosts_that_die_after_their_robots_txt_do_not_slow_living_hosts(
    net: FakeInternet, dials: Dials, tmp_path: Path
) -> None:
    up = living(net, 5, 60)
    run = pages_within(net, tmp_path / "a", up, 300, 60.0, concurrency=20)
    alone = await net.drive(run)
    net.requests.clear()
    down = [f"http://{name}/" for name in dying_hosts(net, dials, 200)]
    run = pages_within(net, tmp_path / "b", down + up, 300, 60.0, concurrency=20)
    beside = await net.drive(run)
    assert sum(request.path == ROBOTS for request in net.requests) == 205
    assert beside <= alone / 0.95 + 3.0, "3 s: the living ones are met behind all the dead"


async def test_an_additional_worker_does_not_inherit_the_lease_of_another(
    net: FakeInternet,
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
    (name,) = dying_hosts(net, dials, 1)
    pacing = PacingConfig(default_interval=0.2, own_wait=1.0)
    config = Config(guard=PACED.guard, pacing=pacing)
    urls = [f"http://{name}/{page}" for page in range(3)]
    output = tmp_path / "out"
    run = fetch(net, *urls, config=config, output=output, concurrency=1, tries=1)
    assert await net.drive(run) == 1
    assert {entry["outcome"] for entry in manifest(tmp_path / "out").values()} == {"failed"}
    assert manifest(tmp_path / "out").keys() == set(urls)
