"""Crawls that are stopped and resumed, and crawls that would share an output folder."""

from __future__ import annotations

import asyncio
import json
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from gatekeeper.config import Config, PacingConfig
from gatekeeper.crawl.engine import Crawl
from gatekeeper.crawl.progress import Progress
from gatekeeper.crawl.runner import INTERRUPTED, interruptible
from gatekeeper.errors import ConfigError, StorageError
from gatekeeper.storage import SqliteStorage
from tests.crawl.crawling import CONFIG, OPEN, ROBOTS, fetch, manifest
from tests.internet import FakeInternet, Hold, Page, Reset, Site


async def test_the_next_run_requests_no_page_that_is_done(
    internet: FakeInternet, folder: Path
) -> None:
    site = internet.site("a.test").robots("User-agent: *\nDisallow: /2\n").page("/1")
    urls = ("http://a.test/1", "http://a.test/2")
    await fetch(internet, *urls, output=folder)
    asked = len(site.requests)
    assert await fetch(internet, *urls, output=folder) == 1  # one of them is refused, still
    assert len(site.requests) == asked


async def test_with_denied_ok_a_denied_url_is_no_failure_in_any_run(
    internet: FakeInternet, folder: Path
) -> None:
    internet.site("a.test").robots("User-agent: *\nDisallow: /2\n").page("/1")
    urls = ("http://a.test/1", "http://a.test/2")
    options: dict[str, Any] = {"output": folder, "denied_ok": True}
    for _ in range(2):
        assert await fetch(internet, *urls, **options) == 0
        assert await fetch(internet, *urls, output=folder) == 1
        assert await fetch(internet, *urls, **options, retry_denied=True) == 0
    for _ in range(2):
        assert await fetch(internet, *urls, "http://", **options) == 1


async def test_denied_urls_are_checked_again_on_demand(
    internet: FakeInternet, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site = internet.site("a.test").robots("User-agent: *\nDisallow: /\n").page("/1")
    assert await fetch(internet, "http://a.test/1", output=folder) == 1
    capsys.readouterr()
    assert await fetch(internet, "http://a.test/1", output=folder) == 1
    assert "not fetched: 1 of the skipped URLs" in (out := capsys.readouterr().out)
    assert "--retry-denied" in out
    site.robots(OPEN)
    (folder / "gatekeeper.db").unlink()  # or the old file would speak for a day
    assert await fetch(internet, "http://a.test/1", output=folder, retry_denied=True) == 0
    assert await fetch(internet, "http://a.test/1", output=folder) == 0
    assert site.paths.count("/1") == 1


@pytest.mark.parametrize("host", ["a.test", "localhost"])  # by its address, by its name
async def test_a_url_refused_by_the_guard_is_fetched_once_its_address_is_allowed(
    internet: FakeInternet, folder: Path, host: str
) -> None:
    """It used to be final: no later run asked again, whatever --allow-address was."""
    site, url = internet.site(host).robots(OPEN).page("/1"), f"http://{host}/1"
    closed = Config(pacing=CONFIG.pacing)
    opened = Config.from_dict(
        {"guard": {"allow": ["127.0.0.0/8", "localhost"]}, "pacing": {"default_interval": 0}}
    )
    for _ in range(2):
        assert await fetch(internet, url, output=folder, config=closed) == 1
        assert manifest(folder)[url]["decision"]["reason"] == "blocked"
    assert site.paths == []
    assert await fetch(internet, url, output=folder, config=opened) == 0
    assert site.paths == [ROBOTS, "/1"]
    assert manifest(folder)[url]["outcome"] == "fetched"


async def test_a_url_denied_by_an_override_is_fetched_once_the_override_is_gone(
    internet: FakeInternet, folder: Path
) -> None:
    site = internet.site("a.test").robots(OPEN).page("/1")
    ours = Config.from_dict(
        {"guard": {"allow": ["127.0.0.0/8"]}, "host": [{"match": "a.test", "robots": "deny"}]}
    )
    assert await fetch(internet, "http://a.test/1", output=folder, config=ours) == 1
    assert await fetch(internet, "http://a.test/1", output=folder) == 0
    assert site.paths == [ROBOTS, "/1"]


async def test_a_url_whose_line_was_torn_is_fetched_again(
    internet: FakeInternet, folder: Path
) -> None:
    site = internet.site("a.test").robots(OPEN).page("/1").page("/2")
    urls = ("http://a.test/1", "http://a.test/2")
    await fetch(internet, *urls, output=folder, concurrency=1)
    path = folder / "manifest.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    await fetch(internet, *urls, output=folder)
    assert site.paths.count("/1") == 1
    assert site.paths.count("/2") == 2
    assert manifest(folder).keys() == set(urls)


async def test_the_interval_of_a_host_holds_across_two_runs(
    net: FakeInternet, folder: Path
) -> None:
    site = net.site("a.test").robots("User-agent: *\nCrawl-delay: 60\n").page("/1").page("/2")
    await net.drive(fetch(net, "http://a.test/1", output=folder))
    await net.drive(fetch(net, "http://a.test/2", output=folder))
    pages = [request.at for request in site.requests if request.target != ROBOTS]
    assert pages[1] - pages[0] >= 60


async def test_ctrl_c_lets_running_requests_end_and_the_next_run_goes_on(
    internet: FakeInternet, folder: Path
) -> None:
    hold = Hold(Page("slow"))
    site = internet.site("a.test").robots(OPEN).on("/slow", hold).page("/rest")
    urls = ("http://a.test/slow", "http://a.test/rest")
    run = asyncio.create_task(fetch(internet, *urls, output=folder))
    await hold.waiting.acquire()
    signal.raise_signal(signal.SIGINT)
    await internet.settle()
    hold.release()
    assert await run == INTERRUPTED
    assert manifest(folder).keys() == {"http://a.test/slow"}
    assert await fetch(internet, *urls, output=folder) == 0
    assert site.paths.count("/slow") == 1
    assert site.paths.count("/rest") == 1


async def test_requests_that_do_not_end_are_cancelled_after_the_grace_period(
    net: FakeInternet, folder: Path
) -> None:
    hold = Hold(Page("slow"))
    net.site("a.test").robots(OPEN).on("/slow", hold)
    started = asyncio.create_task(
        net.drive(
            fetch(net, "http://a.test/slow", output=folder, grace=3.0, timeout=1e6),
            limit=1e9,
        )
    )
    await hold.waiting.acquire()
    signal.raise_signal(signal.SIGINT)
    assert await started == INTERRUPTED
    assert manifest(folder) == {}
    assert not [path for path in folder.rglob("*") if path.parent.name == ".parts"]


async def test_ctrl_c_names_at_once_the_requests_it_waits_for(
    internet: FakeInternet, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hold = Hold(Page("slow"))
    internet.site("a.test").robots(OPEN).on("/slow", hold)
    run = asyncio.create_task(fetch(internet, "http://a.test/slow", output=folder))
    await hold.waiting.acquire()
    signal.raise_signal(signal.SIGINT)
    await internet.settle()
    assert capsys.readouterr().err == (
        "stopping: waiting at most 10 s for http://a.test/slow; a second Ctrl-C ends immediately\n"
    )
    hold.release()
    assert await run == INTERRUPTED


class Endless:
    """A crawl that goes on until it is cancelled."""

    in_flight = ()

    def stop(self) -> None: ...


def test_a_third_ctrl_c_during_the_clean_up_ends_like_the_second() -> None:
    """It was a traceback of CancelledError, with exit code 1."""

    async def crawl() -> None:
        try:
            async with interruptible(cast("Crawl", Endless()), Progress(), 10.0):
                for _ in range(2):
                    signal.raise_signal(signal.SIGINT)
                await asyncio.Event().wait()
        finally:
            signal.raise_signal(signal.SIGINT)
            await asyncio.Event().wait()  # closing a session and a state file takes a moment

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(crawl())


async def test_a_page_that_only_asks_to_wait_fails_and_is_tried_by_the_next_run(
    net: FakeInternet, folder: Path
) -> None:
    busy = Page("busy", status=503)
    site = net.site("a.test").robots(OPEN).on("/x", busy, busy, Page("here"))
    run = fetch(net, "http://a.test/x", output=folder, tries=2)
    assert await net.drive(run) == 1
    entry = manifest(folder)["http://a.test/x"]
    assert (entry["outcome"], entry["status"]) == ("failed", 503)
    assert entry["error"] == "answered 503, try 2 of 2"
    assert "file" not in entry
    assert await net.drive(fetch(net, "http://a.test/x", output=folder)) == 0
    assert site.paths.count("/x") == 3


@pytest.mark.parametrize("name", ["manifest.jsonl", "manifest.jsonl.lock", "gatekeeper.db"])
async def test_a_link_in_place_of_a_file_of_the_crawl_is_refused(
    internet: FakeInternet, tmp_path: Path, name: str
) -> None:
    internet.site("a.test").robots(OPEN).page("/x")
    folder, precious = tmp_path / "pages", tmp_path / "precious"
    folder.mkdir()
    precious.write_bytes(b"mine")
    (folder / name).symlink_to(precious)
    with pytest.raises(StorageError, match=f"{name}: is a symbolic link"):
        await fetch(internet, "http://a.test/x", output=folder)
    assert precious.read_bytes() == b"mine"
    assert internet.requests == []


# -- two at a time


async def test_a_second_run_for_one_folder_or_file_changes_nothing(
    internet: FakeInternet, tmp_path: Path
) -> None:
    hold = Hold(Page("slow"))
    internet.site("a.test").robots(OPEN).on("/slow", hold).page("/x")
    folder, warc, alias = tmp_path / "pages", tmp_path / "p.warc", tmp_path / "alias.warc"
    alias.symlink_to(warc)
    run = asyncio.create_task(fetch(internet, "http://a.test/slow", output=folder, warc=warc))
    await hold.waiting.acquire()
    torn = folder / "manifest.jsonl"
    torn.write_bytes(b'{"being": "wri')
    jobs: tuple[dict[str, Any], ...] = (
        {"output": folder},
        {"warc": warc},
        {"warc": alias, "output": tmp_path / "x"},
    )
    for job in jobs:
        with pytest.raises(StorageError, match=r"(manifest\.jsonl|\.warc): in use by another"):
            await fetch(internet, "http://a.test/x", **job)
    assert torn.read_bytes() == b'{"being": "wri'
    hold.release()
    await run


async def test_the_lock_is_released_at_the_end_of_the_run(
    internet: FakeInternet, tmp_path: Path
) -> None:
    internet.site("a.test").robots(OPEN).page("/x")
    for _ in range(2):
        assert await fetch(internet, "http://a.test/x", warc=tmp_path / "p.warc") == 0


async def test_a_folder_in_place_of_a_warc_file_is_one_error(
    internet: FakeInternet, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="is a directory"):
        await fetch(internet, "http://a.test/x", warc=tmp_path)
    assert not tmp_path.with_name(f"{tmp_path.name}.lock").exists()


# -- what failed comes last


def pages_of(site: Site) -> list[str]:
    return [path for path in site.paths if path != ROBOTS]


async def test_a_url_that_failed_is_tried_again_after_the_others_of_its_host(
    net: FakeInternet, folder: Path
) -> None:
    site = net.site("a.test").robots(OPEN).on("/bad", Reset()).on("/busy", Page(status=503))
    paths = ["/bad", "/busy", *(f"/{number}" for number in range(5))]
    for path in paths[2:]:
        site.page(path)
    urls = [f"http://a.test{path}" for path in paths]
    assert await net.drive(fetch(net, *urls, output=folder)) == 1
    assert pages_of(site)[: len(paths)] == paths
    assert sorted(pages_of(site)[len(paths) :]) == ["/bad", "/bad", "/busy", "/busy"]


async def test_urls_that_failed_in_an_earlier_run_come_after_untried_ones(
    virtual_internet: FakeInternet, folder: Path
) -> None:
    net, hold = virtual_internet, Hold(Page("slow"))
    site = net.site("a.test").robots(OPEN).on("/bad", Reset()).on("/slow", hold)
    urls = [f"http://a.test/{name}" for name in ("bad", "slow", "1", "2")]
    site.page("/1").page("/2")
    killed = asyncio.create_task(net.drive(fetch(net, *urls, output=folder, timeout=1e6)))
    await hold.waiting.acquire()
    killed.cancel()
    await asyncio.gather(killed, return_exceptions=True)
    assert pages_of(site) == ["/bad", "/slow"]
    assert manifest(folder) == {}
    hold.release()
    path = folder / "manifest.jsonl.tried"
    path.write_bytes(path.read_bytes() + b"torn")
    await net.drive(fetch(net, *urls, "http://a.test/2", output=folder))
    assert pages_of(site)[2:4] == ["/1", "/2"]
    assert set(pages_of(site)[4:]) == {"/bad", "/slow"}
    site.page("/3")
    before = len(pages_of(site))
    await net.drive(fetch(net, *urls, "http://a.test/3", output=folder))
    assert pages_of(site)[before] == "/3"
    assert set(pages_of(site)[before + 1 :]) == {"/bad"}


async def test_pages_that_always_fail_do_not_slow_their_host(
    net: FakeInternet, folder: Path
) -> None:
    """They slowed each other: the errors in a row of the last tries were stored."""
    site = net.site("a.test").robots(OPEN)
    bad, good = [f"/bad{n}" for n in range(3)], [f"/{n}" for n in range(6)]
    for path in bad:
        site.on(path, Reset())
    for path in good:
        site.page(path)
    urls = [f"http://a.test{path}" for path in (*bad, *good)]
    config = msgspec.structs.replace(CONFIG, pacing=PacingConfig(default_interval=0.5))
    run = fetch(net, *urls, output=folder, config=config, tries=5)
    assert await net.drive(run) == 1
    assert [manifest(folder)[url]["outcome"] for url in urls] == ["failed"] * 3 + ["fetched"] * 6
    assert sorted(pages_of(site)) == sorted(bad * 5 + good)
    starts = [one.at for one in site.requests if one.target in bad][3:]
    assert all(0.5 <= after - before < 1.0 for before, after in pairwise(starts))
    storage = SqliteStorage(folder / "gatekeeper.db")
    await storage.open()
    try:
        clock = await storage.load_clock("a.test")
    finally:
        await storage.close()
    assert clock is None or clock.errors <= 1


async def test_a_later_run_with_the_same_result_writes_no_second_line(
    net: FakeInternet, folder: Path
) -> None:
    busy, here = Page(status=503), Page("here")
    site = net.site("a.test").robots(OPEN).on("/bad", Reset()).on("/x", busy, busy, busy, here)
    urls = [
        "http://a.test/bad",
        "http://a.test/x",
        "http://a.test:1/",
        "nothing",
    ]  # that port is refused
    options: dict[str, Any] = {"output": folder, "tries": 1}

    async def run() -> list[tuple[str, str]]:
        assert await net.drive(fetch(net, *urls, **options)) == 1
        lines = (folder / "manifest.jsonl").read_text().splitlines()
        return sorted((one["url"], one["outcome"]) for one in map(json.loads, lines))

    first = await run()
    assert len(first) == 4
    assert await run() == first
    site.on("/bad", Page(status=503))
    assert await run() == sorted([*first, ("http://a.test/bad", "failed")])
    assert await run() == sorted(
        [*first, ("http://a.test/bad", "failed"), ("http://a.test/x", "fetched")]
    )
