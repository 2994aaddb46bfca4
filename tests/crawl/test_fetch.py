"""`gatekeeper fetch`, checked by the servers of a fake internet and by the files on disk."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import io
import json
from pathlib import Path

import pytest

from gatekeeper.config import Config
from gatekeeper.crawl.progress import Plain
from gatekeeper.crawl.runner import crawl
from gatekeeper.crawl.sources import Job
from gatekeeper.errors import ConfigError
from gatekeeper.sidecar.listening import rare_collections
from tests.crawl.crawling import CONFIG, OPEN, ROBOTS, fetch, manifest, stored
from tests.internet import CloseSilently, Encoded, FakeInternet, Hold, Page, Truncated
from tests.waiting_support import until


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


async def test_json_output_is_one_entry_per_line(
    internet: FakeInternet, capsys: pytest.CaptureFixture[str]
) -> None:
    internet.site("a.test").robots("User-agent: *\nDisallow: /private\n").page("/x")
    await fetch(internet, "http://a.test/private", "http://a.test/x", as_json=True)
    entries = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {entry["outcome"] for entry in entries} == {"denied", "fetched"}


@pytest.mark.parametrize(
    ("kind", "names"),
    [("text/html", ["noai", "noarchive"]), ("text/plain", ["noarchive"]), (None, ["noarchive"])],
)
async def test_signals_of_the_page_are_noted(
    internet: FakeInternet, folder: Path, kind: str | None, names: list[str]
) -> None:
    body = '<meta name="robots" content="noai">' + "x" * 200_000
    headers = {"X-Robots-Tag": "noarchive"}
    internet.site("a.test").robots(OPEN).page("/x", body, content_type=kind, headers=headers)
    assert await fetch(internet, "http://a.test/x", output=folder) == 0
    assert sorted(manifest(folder)["http://a.test/x"]["signals"]["rules"]["names"]) == names


async def test_a_page_without_signals_has_none(internet: FakeInternet, folder: Path) -> None:
    internet.site("a.test").robots(OPEN).page("/x", "<p>robots", content_type="text/html")
    assert await fetch(internet, "http://a.test/x", output=folder) == 0
    assert manifest(folder)["http://a.test/x"].get("signals") is None


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


async def test_text_that_is_no_url_fails_and_the_other_urls_are_fetched(
    internet: FakeInternet, folder: Path
) -> None:
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


# -- failures and second tries


async def test_a_request_that_fails_is_tried_again_up_to_three_times(
    internet: FakeInternet, folder: Path
) -> None:
    site = internet.site("a.test").robots(OPEN)
    site.on("/x", CloseSilently(), Truncated(b"half", 10), Page("whole"))
    assert await fetch(internet, "http://a.test/x", output=folder) == 0
    assert stored(folder, "http://a.test/x") == b"whole"
    assert manifest(folder)["http://a.test/x"]["tries"] == 3


async def test_a_url_that_failed_every_try_is_tried_again_by_the_next_run(
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
    net: FakeInternet, folder: Path
) -> None:
    busy = Page(status=429, headers={"Retry-After": "120"})
    site = net.site("a.test").robots(OPEN).on("/x", busy, Page("here"))
    assert await net.drive(fetch(net, "http://a.test/x", output=folder)) == 0
    assert site.gaps()[-1] >= 120
    assert manifest(folder)["http://a.test/x"]["tries"] == 2


async def test_an_unreachable_file_is_waited_for_no_longer_than_asked(
    net: FakeInternet, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    net.site("a.test").robots(Page(status=500)).page("/x")
    net.site("b.test").robots(OPEN).page("/y")
    run = fetch(net, "http://a.test/x", "http://b.test/y", output=folder, max_wait=600.0)
    assert await net.drive(run) == 1
    assert manifest(folder).keys() == {"http://b.test/y"}
    out = capsys.readouterr().out
    assert "stopped: 1 unfinished; no host is due within --max-wait 600 s; run the" in out
    assert "       1  http://a.test  robots.txt: server error (500); again at 20" in out


async def test_an_unreachable_file_that_comes_back_in_time_is_used(
    net: FakeInternet, folder: Path
) -> None:
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
    await fetch(internet, "http://a.test/x", output=folder, max_body=1_000)
    assert stored(folder, "http://a.test/x") == b"x" * 1_000
    assert manifest(folder)["http://a.test/x"]["truncated"] is True


async def test_one_slow_host_delays_no_other(internet: FakeInternet, folder: Path) -> None:
    hold = Hold(Page("slow"))
    internet.site("slow.test").robots(OPEN).on("/", hold)
    for number in range(20):
        internet.site(f"h{number}.test").robots(OPEN).page("/")
    urls = ["http://slow.test/", *(f"http://h{number}.test/" for number in range(20))]
    run = asyncio.create_task(fetch(internet, *urls, output=folder, concurrency=4))
    path = folder / "manifest.jsonl"
    await until(lambda: path.exists() and path.read_text().count("\n") >= 20)
    hold.release()
    assert await run == 0


async def test_an_input_file_that_is_not_there_is_one_error(
    internet: FakeInternet, folder: Path
) -> None:
    with pytest.raises(ConfigError, match=r"-i nowhere\.txt: No such file"):
        await fetch(internet, input="nowhere.txt", output=folder)
    assert not folder.exists()


async def test_progress_is_shown_while_it_runs(internet: FakeInternet) -> None:
    internet.site("a.test").robots(OPEN).page("/x")
    stream = io.StringIO()
    job = Job(identity="examplebot", config=CONFIG, urls=("http://a.test/x",))
    await crawl(job, Plain(stream), clock=internet.clock, resolver=internet.resolver)
    assert "200 http://a.test/x" in stream.getvalue()
    assert "-- 1/1 done" in stream.getvalue()
    assert "-- 0/0" not in stream.getvalue()


def test_the_settings_of_the_garbage_collector_are_restored_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = gc.get_threshold()
    frozen = [False]
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(True))
    monkeypatch.setattr(gc, "unfreeze", lambda: frozen.append(False))

    def fail() -> None:
        with rare_collections():
            assert gc.get_threshold()[0] > before[0]
            assert frozen[-1]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert gc.get_threshold() == before
    assert frozen == [False, True, False]
