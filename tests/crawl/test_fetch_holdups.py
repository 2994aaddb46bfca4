"""`gatekeeper fetch` with hosts that can't be requested: messages, and a correct summary."""

from __future__ import annotations

import asyncio
import io
import json
import signal
from pathlib import Path
from typing import Any, cast

import pytest

from gatekeeper.clock import VirtualClock, utc
from gatekeeper.crawl.progress import INTERVAL, Holdup, HoldupReporter, Plain, WaitingHosts
from gatekeeper.crawl.runner import INTERRUPTED, crawl
from gatekeeper.crawl.sources import Job
from gatekeeper.decision import Reason
from gatekeeper.pacing.waiters import ClockView
from tests.crawl.crawling import CONFIG, OPEN, ROBOTS, fetch, manifest
from tests.internet import FakeInternet, Hold, Page

BUSY = Page(status=429, headers={"Retry-After": "5"})
SOME_TIME = utc(VirtualClock().wall())


async def said(net: FakeInternet, *urls: str, **job: Any) -> list[str]:
    """Return the messages of a run, without the lines with its counts."""
    stream = io.StringIO()
    made = Job(identity="examplebot/1.0", config=CONFIG, urls=urls, **job)
    await crawl(made, Plain(stream), clock=net.clock, resolver=net.resolver)
    return [line for line in stream.getvalue().splitlines() if not line.startswith("-- ")]


async def test_a_host_that_refuses_is_named_once_however_many_urls_wait_for_it(
    net: FakeInternet,
) -> None:
    net.refusing("a.test")
    lines = await net.drive(said(net, "http://a.test/1", "http://a.test/2", max_wait=3.0))
    assert len(lines) == 1
    assert lines[0].startswith("waiting for http://a.test: robots.txt: connect failed; again at 20")


async def test_a_lost_fleet_store_is_shown_as_what_holds_every_host_up(
    virtual_internet: FakeInternet,
) -> None:
    """Its return can't be foretold: the crawl waits for it, but not for longer than `max_wait`."""

    class Gate:
        async def why(self, host: str) -> tuple[ClockView, ...]:
            return (ClockView(host, "fleet", "the fleet's store can't be reached"),)

    waiting, gate = WaitingHosts(), cast("Any", Gate())
    waiting["http://a.test"] += 1
    due = await waiting.due("http://a.test", gate, virtual_internet.clock)
    assert due.holdup == Holdup(Reason.FLEET, "the fleet's store can't be reached", None)
    assert 0 < await waiting.soonest(gate, virtual_internet.clock, 0.0) < 5


async def test_a_host_held_up_by_a_429_is_shown_with_its_retry_after(
    net: FakeInternet,
) -> None:
    net.site("a.test").robots(OPEN).on("/x", BUSY)
    lines = await net.drive(said(net, "http://a.test/x"))
    assert lines[0].startswith("waiting for http://a.test: 429, Retry-After 5; again at 20")
    assert "; then 0.2 s instead of none since a 429 at " in lines[0]
    assert lines[1:] == ["failed http://a.test/x: answered 429, try 3 of 3"]


async def test_a_host_with_a_long_crawl_delay_is_not_shown_as_held_up(
    net: FakeInternet,
) -> None:
    net.site("a.test").robots("User-agent: *\nCrawl-delay: 60\n").page("/1").page("/2")
    lines = await net.drive(said(net, "http://a.test/1", "http://a.test/2"))
    assert [line.split()[0] for line in lines] == ["200", "200"]


async def test_the_summary_lists_a_page_answered_429_as_unfinished(
    net: FakeInternet, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    busy = Page(status=429, headers={"Retry-After": "3600"})
    net.site("a.test").robots(OPEN).on("/x", busy)
    assert await net.drive(fetch(net, "http://a.test/x", output=folder, max_wait=3.0)) == 1
    assert manifest(folder) == {}
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == (
        "stopped: 1 unfinished; no host is due within --max-wait 3 s; "
        "run the same command again to resume"
    )
    assert lines[2].startswith("       1  http://a.test  429, Retry-After 3600; again at 20")


async def test_a_crawl_delay_longer_than_max_wait_is_named_in_the_summary(
    net: FakeInternet, capsys: pytest.CaptureFixture[str]
) -> None:
    net.site("a.test").robots("User-agent: *\nCrawl-delay: 60\n").page("/1").page("/2")
    await net.drive(fetch(net, "http://a.test/1", "http://a.test/2", max_wait=3.0))
    out = capsys.readouterr().out
    assert "http://a.test  crawl-delay 60 s from robots.txt line 2; again at 20" in out
    assert "only -o DIR or --warc FILE stores what is done" in out


async def test_json_entries_go_to_stdout_and_the_summary_to_the_last_line_of_stderr(
    net: FakeInternet, capsys: pytest.CaptureFixture[str]
) -> None:
    net.refusing("a.test")
    net.site("b.test").robots(OPEN).page("/x", "hello")
    urls = ("http://a.test/1", "http://a.test/2", "http://b.test/x")
    assert await net.drive(fetch(net, *urls, as_json=True, max_wait=3.0)) == 1
    out, err = capsys.readouterr()
    assert [json.loads(line)["url"] for line in out.splitlines()] == ["http://b.test/x"]
    end = json.loads(err.splitlines()[-1])
    (held,) = end.pop("held_up")
    assert end == {
        "fetched": 1, "denied": 0, "failed": 0, "skipped": 0, "refused_before": 0, "bytes": 5,
        "unfinished": 2, "complete": True, "stopped": "max_wait", "sitemap_findings": [],
    }  # fmt: skip
    assert held.pop("retry_at").endswith("Z")
    assert held == {
        "origin": "http://a.test",
        "urls": 2,
        "reason": "connect_failed",
        "why": "robots.txt: connect failed",
    }


async def test_urls_left_by_ctrl_c_are_listed_as_unfinished_with_no_holdup(
    internet: FakeInternet, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hold = Hold(Page("slow"))
    internet.site("a.test").robots(OPEN).on("/slow", hold).page("/rest")
    urls = ("http://a.test/slow", "http://a.test/rest")
    run = asyncio.create_task(fetch(internet, *urls, output=folder, as_json=True))
    await hold.waiting.acquire()
    signal.raise_signal(signal.SIGINT)
    await internet.settle()
    hold.release()
    assert await run == INTERRUPTED
    end = json.loads(capsys.readouterr().err.splitlines()[-1])
    assert (end["stopped"], end["fetched"], end["unfinished"]) == ("interrupted", 1, 1)
    assert end["held_up"] == []


# -- one line each, and not too many


def told(*waits: tuple[str, Holdup], most: int = 10) -> list[str]:
    lines: list[str] = []
    made = HoldupReporter(lines.append, most=most)
    for origin, holdup in waits:
        made.report(origin, holdup)
    return lines


def test_a_host_is_shown_again_when_its_reason_to_wait_changes() -> None:
    refused = Holdup("connect_failed", "connect failed")
    failing = Holdup("server_error", "server error", SOME_TIME)
    assert told(*[("http://a.test", refused), ("http://a.test", failing)] * 2) == [
        "waiting for http://a.test: connect failed",
        f"waiting for http://a.test: server error; again at {SOME_TIME:%Y-%m-%d %H:%M:%S} UTC",
    ]


def test_a_wait_for_the_interval_of_a_host_is_not_shown() -> None:
    assert told(("http://a.test", Holdup(INTERVAL, "crawl-delay 5 s"))) == []


def test_a_thousand_hosts_are_not_named_one_by_one() -> None:
    lines = told(*((f"http://h{n}.test", Holdup("timeout", "timeout")) for n in range(1_000)))
    assert len(lines) == 11
    assert lines[-1] == "waiting for more hosts, which are not listed"


async def test_the_display_says_how_far_a_host_is_slowed(net: FakeInternet) -> None:
    site = net.site("a.test").robots("User-agent: *\nCrawl-delay: 4\n").on("/0", BUSY)
    urls = [f"http://a.test/{number}" for number in range(4)]
    for number in range(1, 4):
        site.page(f"/{number}")
    stream = io.StringIO()
    made = Job(identity="examplebot/1.0", config=CONFIG, urls=tuple(urls))
    await net.drive(crawl(made, Plain(stream), clock=net.clock, resolver=net.resolver))
    shown = [line for line in stream.getvalue().splitlines() if line.startswith("-- ")]
    assert any("waiting: twice the usual 4 s since a 429 at " in line for line in shown), shown


@pytest.mark.parametrize("seconds", [5, 60])
async def test_max_wait_ends_a_crawl_whose_host_always_answers_retry_after(
    virtual_internet: FakeInternet, seconds: int, capsys: pytest.CaptureFixture[str]
) -> None:
    net, began = virtual_internet, virtual_internet.clock.monotonic()
    later = Page(status=503, headers={"Retry-After": str(seconds)})
    net.site("a.test").on(ROBOTS, later)
    net.site("b.test").robots("User-agent: *\nCrawl-delay: 500\n").page("/1").page("/2")
    urls = ("http://a.test/1", "http://b.test/1", "http://b.test/2")
    assert await net.drive(fetch(net, *urls, max_wait=600.0)) == 1
    # 600 s after the last page of the healthy host, whose lease comes 1,000 s after its robots.txt.
    assert net.clock.monotonic() - began == pytest.approx(1_600.0, rel=0.2)
    assert "fetched 2" in (out := capsys.readouterr().out)
    assert "1 unfinished; no host is due within --max-wait 600 s" in out
