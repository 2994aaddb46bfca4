"""`gatekeeper fetch`, judged by the servers of a fake internet and by what is on disk."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import signal
from pathlib import Path
from typing import Any

import pytest
from warcio.archiveiterator import ArchiveIterator

from gatekeeper.cli.crawl.limits import Limits
from gatekeeper.cli.crawl.progress import Plain, Silent
from gatekeeper.cli.crawl.runner import INTERRUPTED, Job, crawl
from gatekeeper.config import Config, GuardConfig, PacingConfig
from tests.internet import CloseSilently, Encoded, FakeInternet, Hold, Page, Truncated, redirect

CONFIG = Config(
    guard=GuardConfig(allow=("127.0.0.0/8",)), pacing=PacingConfig(default_interval=0.0)
)
OPEN = "User-agent: *\nAllow: /\n"
ROBOTS = "/robots.txt"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "pages"


async def fetch(net: FakeInternet, *urls: str, config: Config = CONFIG, **job: Any) -> int:
    """One run of the command, on the fake internet and its clock."""
    made = Job(identity="examplebot/1.0", config=config, urls=urls, **job)
    return await crawl(made, Silent(), clock=net.clock, resolver=net.resolver, trace_configs=[])


def manifest(folder: Path) -> dict[str, dict[str, Any]]:
    """The last entry of every URL."""
    lines = (folder / "manifest.jsonl").read_text().splitlines()
    return {entry["url"]: entry for entry in map(json.loads, lines)}


def stored(folder: Path, url: str) -> bytes:
    return (folder / manifest(folder)[url]["file"]).read_bytes()


async def test_a_page_is_stored_and_noted(internet: FakeInternet, folder: Path) -> None:
    site = internet.site("a.test").robots(OPEN).page("/x", "hello", content_type="text/plain")
    assert await fetch(internet, "http://a.test/x", output=folder) == 0
    assert site.paths == [ROBOTS, "/x"]
    entry = manifest(folder)["http://a.test/x"]
    assert stored(folder, "http://a.test/x") == b"hello"
    assert entry["outcome"] == "fetched"
    assert entry["status"] == 200
    assert entry["size"] == 5
    assert entry["sha256"] == hashlib.sha256(b"hello").hexdigest()
    assert entry["decision"]["verdict"] == "allow"
    assert entry["content_type"] == "text/plain"
    assert 0 <= entry["elapsed"] <= entry["took"]


async def test_an_error_page_is_a_page(internet: FakeInternet, folder: Path) -> None:
    internet.site("a.test").robots(OPEN)
    assert await fetch(internet, "http://a.test/missing", output=folder) == 0
    assert manifest(folder)["http://a.test/missing"]["status"] == 404


async def test_a_denied_page_is_never_asked_for(internet: FakeInternet, folder: Path) -> None:
    site = internet.site("a.test").robots("User-agent: *\nDisallow: /private\n").page("/x")
    code = await fetch(internet, "http://a.test/private/1", "http://a.test/x", output=folder)
    assert code == 1
    assert site.paths == [ROBOTS, "/x"]
    entry = manifest(folder)["http://a.test/private/1"]
    assert entry["outcome"] == "denied"
    assert entry["decision"]["rule"]["line"] == 2


async def test_the_summary_names_the_deciding_line(
    internet: FakeInternet, capsys: pytest.CaptureFixture[str]
) -> None:
    internet.site("a.test").robots("User-agent: *\nDisallow: /private\n")
    await fetch(internet, "http://a.test/private/1", "http://a.test/private/2")
    assert "       2  a.test  line 2: Disallow: /private" in capsys.readouterr().out


async def test_json_is_one_entry_a_line(
    internet: FakeInternet, capsys: pytest.CaptureFixture[str]
) -> None:
    internet.site("a.test").robots("User-agent: *\nDisallow: /private\n").page("/x")
    await fetch(internet, "http://a.test/private", "http://a.test/x", as_json=True)
    entries = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {entry["outcome"] for entry in entries} == {"denied", "fetched"}


async def test_signals_of_the_response_are_noted(internet: FakeInternet, folder: Path) -> None:
    headers = {"X-Robots-Tag": "noarchive", "Content-Usage": "train-ai=n"}
    internet.site("a.test").robots(OPEN).page("/x", headers=headers)
    await fetch(internet, "http://a.test/x", output=folder)
    signals = manifest(folder)["http://a.test/x"]["signals"]
    assert signals["content_usage"] == {"train-ai": "n"}
    assert signals["rules"]["names"] == ["noarchive"]


async def test_a_page_given_twice_is_asked_for_once(internet: FakeInternet, folder: Path) -> None:
    site = internet.site("a.test").robots(OPEN).page("/x")
    await fetch(internet, "http://a.test/x", "http://A.test:80/x#top", output=folder)
    assert site.paths == [ROBOTS, "/x"]


async def test_what_is_no_url_fails_alone(internet: FakeInternet, folder: Path) -> None:
    internet.site("a.test").robots(OPEN).page("/x")
    code = await fetch(internet, "ftp://a.test/", "http://a.test/x", output=folder)
    assert code == 1
    assert manifest(folder)["http://a.test/x"]["outcome"] == "fetched"
    assert "not an http or https URL" in manifest(folder)["ftp://a.test/"]["error"]


async def test_credentials_are_refused_and_never_written(
    internet: FakeInternet, folder: Path
) -> None:
    site = internet.site("a.test").robots(OPEN)
    await fetch(internet, "http://ann:secret@a.test/x", output=folder)
    assert "/x" not in site.paths
    text = (folder / "manifest.jsonl").read_text()
    assert "secret" not in text
    assert '"outcome":"denied"' in text


async def test_a_private_address_is_refused(internet: FakeInternet, folder: Path) -> None:
    internet.site("a.test").robots(OPEN).page("/x")
    code = await fetch(
        internet,
        "http://a.test/x",
        output=folder,
        config=Config(pacing=CONFIG.pacing),
        max_wait=0.0,
    )
    assert code == 1
    assert internet.connections == []


# -- redirects


async def test_a_redirect_is_followed_and_the_page_noted_once(
    internet: FakeInternet, folder: Path
) -> None:
    internet.site("a.test").robots(OPEN).on("/old", redirect("http://b.test/new"))
    other = internet.site("b.test").robots(OPEN).page("/new", "here")
    assert await fetch(internet, "http://a.test/old", output=folder) == 0
    assert other.paths == [ROBOTS, "/new"]
    entry = manifest(folder)["http://a.test/old"]
    assert entry["final_url"] == "http://b.test/new"
    assert entry["redirects"] == [[302, "http://b.test/new"]]
    assert stored(folder, "http://a.test/old") == b"here"


async def test_a_redirect_within_one_host_waits_for_a_turn_of_its_own(
    virtual_internet: FakeInternet, folder: Path
) -> None:
    net = virtual_internet
    site = net.site("a.test").robots("User-agent: *\nCrawl-delay: 10\n")
    site.on("/old", redirect("/new")).page("/new")
    await net.drive(fetch(net, "http://a.test/old", output=folder))
    assert site.paths == [ROBOTS, "/old", "/new"]
    assert min(site.gaps()) >= 10


async def test_a_redirect_to_a_denied_page_ends_there(internet: FakeInternet, folder: Path) -> None:
    internet.site("a.test").robots(OPEN).on("/old", redirect("http://b.test/new"))
    other = internet.site("b.test").robots("User-agent: *\nDisallow: /\n").page("/new")
    assert await fetch(internet, "http://a.test/old", output=folder) == 1
    assert other.paths == [ROBOTS]
    entry = manifest(folder)["http://a.test/old"]
    assert entry["outcome"] == "denied"
    assert entry["decision"]["url"] == "http://b.test/new"


async def test_a_circle_of_redirects_fails(internet: FakeInternet, folder: Path) -> None:
    site = internet.site("a.test").robots(OPEN)
    site.on("/1", redirect("/2")).on("/2", redirect("/1"))
    assert await fetch(internet, "http://a.test/1", output=folder) == 1
    assert site.paths == [ROBOTS, "/1", "/2"]
    assert "in a circle" in manifest(folder)["http://a.test/1"]["error"]


async def test_a_long_chain_of_redirects_fails(internet: FakeInternet, folder: Path) -> None:
    site = internet.site("a.test").robots(OPEN)
    for number in range(20):
        site.on(f"/{number}", redirect(f"/{number + 1}"))
    await fetch(internet, "http://a.test/0", output=folder, limits=Limits(redirects=3))
    assert site.paths == [ROBOTS, "/0", "/1", "/2", "/3"]
    assert manifest(folder)["http://a.test/0"]["error"] == "more than 3 redirects"


async def test_two_ways_to_one_page_fetch_it_once(internet: FakeInternet, folder: Path) -> None:
    site = internet.site("a.test").robots(OPEN).page("/end", "here")
    site.on("/1", redirect("/end")).on("/2", redirect("/end"))
    urls = ("http://a.test/1", "http://a.test/2", "http://a.test/end")
    assert await fetch(internet, *urls, output=folder, limits=Limits(concurrency=1)) == 0
    assert site.paths.count("/end") == 1
    ends = {entry.get("final_url", entry["url"]) for entry in manifest(folder).values()}
    assert ends == {"http://a.test/end"}


async def test_a_redirect_to_no_url_fails(internet: FakeInternet, folder: Path) -> None:
    internet.site("a.test").robots(OPEN).on("/1", redirect("mailto:ann@a.test"))
    assert await fetch(internet, "http://a.test/1", output=folder) == 1
    assert "redirected to no URL" in manifest(folder)["http://a.test/1"]["error"]


# -- failures and second tries


async def test_a_request_that_fails_is_tried_again_in_its_turn(
    internet: FakeInternet, folder: Path
) -> None:
    site = internet.site("a.test").robots(OPEN)
    site.on("/x", CloseSilently(), Truncated(b"half", 10), Page("whole"))
    assert await fetch(internet, "http://a.test/x", output=folder) == 0
    assert stored(folder, "http://a.test/x") == b"whole"
    assert manifest(folder)["http://a.test/x"]["tries"] == 3


async def test_a_request_that_goes_on_failing_is_given_up_and_tried_by_the_next_run(
    internet: FakeInternet, folder: Path
) -> None:
    site = internet.site("a.test").robots(OPEN).on("/x", CloseSilently())
    assert await fetch(internet, "http://a.test/x", output=folder) == 1
    assert manifest(folder)["http://a.test/x"]["outcome"] == "failed"
    assert not list(folder.rglob("*x-*"))
    site.page("/x", "now it works")
    assert await fetch(internet, "http://a.test/x", output=folder) == 0
    assert stored(folder, "http://a.test/x") == b"now it works"


async def test_a_host_that_asks_to_wait_is_asked_again_after_that_time(
    virtual_internet: FakeInternet, folder: Path
) -> None:
    net = virtual_internet
    busy = Page(status=429, headers={"Retry-After": "120"})
    site = net.site("a.test").robots(OPEN).on("/x", busy, Page("here"))
    assert await net.drive(fetch(net, "http://a.test/x", output=folder)) == 0
    assert site.gaps()[-1] >= 120
    assert manifest(folder)["http://a.test/x"]["tries"] == 2


async def test_an_unreachable_file_is_waited_for_no_longer_than_asked(
    virtual_internet: FakeInternet, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    net = virtual_internet
    net.site("a.test").robots(Page(status=500)).page("/x")
    net.site("b.test").robots(OPEN).page("/y")
    run = fetch(net, "http://a.test/x", "http://b.test/y", output=folder, max_wait=600.0)
    assert await net.drive(run) == 1
    assert manifest(folder).keys() == {"http://b.test/y"}
    assert "stopped: 1 not asked for yet" in capsys.readouterr().out


async def test_an_unreachable_file_that_comes_back_in_time_is_used(
    virtual_internet: FakeInternet, folder: Path
) -> None:
    net = virtual_internet
    site = net.site("a.test").on(ROBOTS, Page(status=500), Page(OPEN)).page("/x")
    assert await net.drive(fetch(net, "http://a.test/x", output=folder)) == 0
    assert site.paths == [ROBOTS, ROBOTS, "/x"]


# -- bodies


async def test_an_encoded_body_is_stored_decoded(internet: FakeInternet, folder: Path) -> None:
    internet.site("a.test").robots(OPEN).on("/x", Encoded(b"hello" * 100, "gzip"))
    await fetch(internet, "http://a.test/x", output=folder)
    assert stored(folder, "http://a.test/x") == b"hello" * 100


async def test_reading_stops_at_the_limit(internet: FakeInternet, folder: Path) -> None:
    internet.site("a.test").robots(OPEN).page("/x", b"x" * 5_000)
    await fetch(internet, "http://a.test/x", output=folder, limits=Limits(max_body=1_000))
    assert stored(folder, "http://a.test/x") == b"x" * 1_000
    assert manifest(folder)["http://a.test/x"]["truncated"] is True


async def test_a_warc_file_holds_what_was_sent(internet: FakeInternet, tmp_path: Path) -> None:
    site = internet.site("a.test").robots(OPEN).page("/x", "hello")
    path = tmp_path / "pages.warc.gz"
    assert await fetch(internet, "http://a.test/x", warc=path) == 0
    assert site.requests[-1].headers["Accept-Encoding"] == "identity"
    with path.open("rb") as file:
        found = [
            (record.rec_type, record.rec_headers.get_header("WARC-Target-URI"),
             record.rec_headers.get_header("WARC-IP-Address"), record.content_stream().read())
            for record in ArchiveIterator(file, check_digests="raise")
        ]  # fmt: skip
    assert found[1] == ("response", "http://a.test/x", "127.0.0.1", b"hello")
    assert found[2][0] == "request"


async def test_a_warc_file_goes_on_where_it_stopped(internet: FakeInternet, tmp_path: Path) -> None:
    site = internet.site("a.test").robots(OPEN).page("/1", "one").page("/2", "two")
    path = tmp_path / "pages.warc"
    await fetch(internet, "http://a.test/1", warc=path)
    await fetch(internet, "http://a.test/1", "http://a.test/2", warc=path)
    assert [path for path in site.paths if path != ROBOTS] == ["/1", "/2"]
    with path.open("rb") as file:
        bodies = [
            record.content_stream().read()
            for record in ArchiveIterator(file)
            if record.rec_type == "response"
        ]
    assert bodies == [b"one", b"two"]


# -- stopping and going on


async def test_the_next_run_asks_for_nothing_that_is_done(
    internet: FakeInternet, folder: Path
) -> None:
    site = internet.site("a.test").robots("User-agent: *\nDisallow: /2\n").page("/1")
    urls = ("http://a.test/1", "http://a.test/2")
    await fetch(internet, *urls, output=folder)
    asked = len(site.requests)
    assert await fetch(internet, *urls, output=folder) == 0
    assert len(site.requests) == asked


async def test_a_url_whose_line_was_torn_is_fetched_again(
    internet: FakeInternet, folder: Path
) -> None:
    site = internet.site("a.test").robots(OPEN).page("/1").page("/2")
    urls = ("http://a.test/1", "http://a.test/2")
    await fetch(internet, *urls, output=folder, limits=Limits(concurrency=1))
    path = folder / "manifest.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    await fetch(internet, *urls, output=folder)
    assert site.paths.count("/1") == 1
    assert site.paths.count("/2") == 2
    assert manifest(folder).keys() == set(urls)


async def test_a_hosts_clock_outlives_the_run(virtual_internet: FakeInternet, folder: Path) -> None:
    net = virtual_internet
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


async def test_requests_that_do_not_end_are_cut_off_after_the_grace(
    virtual_internet: FakeInternet, folder: Path
) -> None:
    net = virtual_internet
    hold = Hold(Page("slow"))
    net.site("a.test").robots(OPEN).on("/slow", hold)
    started = asyncio.create_task(
        net.drive(
            fetch(net, "http://a.test/slow", output=folder, limits=Limits(grace=3.0), timeout=1e6),
            limit=1e9,
        )
    )
    await hold.waiting.acquire()
    signal.raise_signal(signal.SIGINT)
    assert await started == INTERRUPTED
    assert manifest(folder) == {}
    assert not [path for path in folder.rglob("*") if path.parent.name == ".parts"]


async def test_one_slow_host_delays_no_other(internet: FakeInternet, folder: Path) -> None:
    hold = Hold(Page("slow"))
    internet.site("slow.test").robots(OPEN).on("/", hold)
    for number in range(20):
        internet.site(f"h{number}.test").robots(OPEN).page("/")
    urls = ["http://slow.test/", *(f"http://h{number}.test/" for number in range(20))]
    run = asyncio.create_task(fetch(internet, *urls, output=folder, limits=Limits(concurrency=4)))
    path = folder / "manifest.jsonl"
    while not path.exists() or path.read_text().count("\n") < 20:
        await asyncio.sleep(0)
    hold.release()
    assert await run == 0


async def test_an_input_file_that_is_not_there_is_one_error(
    internet: FakeInternet, folder: Path
) -> None:
    with pytest.raises(FileNotFoundError):
        await fetch(internet, input="nowhere.txt", output=folder)


async def test_progress_is_shown_while_it_runs(internet: FakeInternet) -> None:
    internet.site("a.test").robots(OPEN).page("/x")
    stream = io.StringIO()
    job = Job(identity="examplebot", config=CONFIG, urls=("http://a.test/x",))
    await crawl(job, Plain(stream), clock=internet.clock, resolver=internet.resolver)
    assert "200 http://a.test/x" in stream.getvalue()
    assert "-- 0/" in stream.getvalue()
