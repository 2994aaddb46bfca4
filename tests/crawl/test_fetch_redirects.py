"""Redirects of a crawl: each hop is decided and paced, no page is fetched twice or left out."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gatekeeper.crawl import engine
from tests.crawl.crawling import OPEN, ROBOTS, fetch, manifest, stored
from tests.internet import CloseSilently, FakeInternet, Hold, Page, redirect
from tests.waiting_support import until


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


async def test_a_redirect_within_one_host_waits_for_a_lease_of_its_own(
    net: FakeInternet, folder: Path
) -> None:
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
    assert "redirect loop" in manifest(folder)["http://a.test/1"]["error"]


async def test_a_long_chain_of_redirects_fails(internet: FakeInternet, folder: Path) -> None:
    site = internet.site("a.test").robots(OPEN)
    for number in range(20):
        site.on(f"/{number}", redirect(f"/{number + 1}"))
    await fetch(internet, "http://a.test/0", output=folder, redirects=3)
    assert site.paths == [ROBOTS, "/0", "/1", "/2", "/3"]
    assert manifest(folder)["http://a.test/0"]["error"] == "more than 3 redirects"


async def test_two_redirects_to_one_page_fetch_the_page_once(
    internet: FakeInternet, folder: Path
) -> None:
    site = internet.site("a.test").robots(OPEN).page("/end", "here")
    site.on("/1", redirect("/end")).on("/2", redirect("/end"))
    urls = ("http://a.test/1", "http://a.test/2", "http://a.test/end")
    assert await fetch(internet, *urls, output=folder, concurrency=1) == 0
    assert site.paths.count("/end") == 1
    ends = {entry.get("final_url", entry["url"]) for entry in manifest(folder).values()}
    assert ends == {"http://a.test/end"}


async def test_a_full_queue_takes_redirects_and_the_rest_of_the_list(
    internet: FakeInternet, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "MAX_QUEUED", 1)
    site = internet.site("a.test").robots("User-agent: *\nDisallow: /9\n")
    for number in range(9):
        site.on(f"/{number}", redirect(f"/to-{number}")).page(f"/to-{number}")
    urls = [f"http://a.test/{number}" for number in range(10)]
    await fetch(internet, *urls, output=folder, concurrency=2)
    outcomes = [entry["outcome"] for entry in manifest(folder).values()]
    assert sorted(outcomes) == ["denied", *["fetched"] * 9]


async def test_a_redirect_to_no_url_fails(internet: FakeInternet, folder: Path) -> None:
    internet.site("a.test").robots(OPEN).on("/1", redirect("mailto:ann@a.test"))
    assert await fetch(internet, "http://a.test/1", output=folder) == 1
    assert "redirected to an invalid URL" in manifest(folder)["http://a.test/1"]["error"]


# -- to a URL that is given too

A, B = "http://a.test/a", "http://a.test/b"


async def test_a_redirect_to_a_page_that_fails_fails_and_both_are_tried_by_the_next_run(
    internet: FakeInternet, folder: Path
) -> None:
    site = internet.site("a.test").robots(OPEN).on("/a", redirect("/b"))
    site.on("/b", CloseSilently(), Page("now it works"))
    assert await fetch(internet, A, B, output=folder, tries=1) == 1
    assert [manifest(folder)[url]["outcome"] for url in (A, B)] == ["failed", "failed"]
    assert await fetch(internet, A, B, output=folder, tries=1) == 0
    assert stored(folder, B) == b"now it works"
    assert manifest(folder)[A]["final_url"] == B


async def test_a_redirect_is_not_done_when_the_crawl_stops_before_its_page(
    net: FakeInternet, folder: Path
) -> None:
    net.site("a.test").robots(OPEN).on("/a", redirect("http://b.test/2"))
    slow = net.site("b.test").robots("User-agent: *\nCrawl-delay: 300\n").page("/1").page("/2")
    urls = ("http://b.test/1", "http://b.test/2", A)
    assert await net.drive(fetch(net, *urls, output=folder, max_wait=1.0)) == 1
    assert "/2" not in slow.paths
    assert await net.drive(fetch(net, *urls, output=folder)) == 0
    assert slow.paths.count("/2") == 1
    assert manifest(folder).keys() == set(urls)


async def test_a_redirect_waits_for_the_page_that_it_leads_to(
    internet: FakeInternet, folder: Path
) -> None:
    hold, page, c = Hold(Page("here")), "http://b.test/page", "http://a.test/c"
    slow = internet.site("b.test").robots(OPEN).on("/page", hold)
    site = internet.site("a.test").robots(OPEN).on("/a", redirect(page)).on("/c", redirect("/a"))
    run = asyncio.create_task(fetch(internet, page, A, c, output=folder))
    await hold.waiting.acquire()
    await until(lambda: {"/a", "/c"} <= set(site.paths))
    await internet.settle()
    assert manifest(folder) == {}
    hold.release()
    assert await run == 0
    assert list(manifest(folder)) == [page, A, c]
    assert manifest(folder)[c]["redirects"] == [[302, A], [302, page]]
    assert slow.paths.count("/page") == 1


async def test_two_urls_that_redirect_to_each_other_fail(
    internet: FakeInternet, folder: Path
) -> None:
    site = internet.site("a.test").robots(OPEN).on("/a", redirect("/b")).on("/b", redirect("/a"))
    assert await fetch(internet, A, B, output=folder) == 1
    assert sorted(site.paths) == ["/a", "/b", ROBOTS]
    for entry in manifest(folder).values():
        assert entry["outcome"] == "failed"
        assert "redirect loop" in entry["error"]


async def test_a_ring_of_redirects_fails_however_long_it_is(
    internet: FakeInternet, folder: Path
) -> None:
    site = internet.site("a.test").robots(OPEN)
    for number in range(30):
        site.on(f"/{number}", redirect(f"/{(number + 1) % 30}"))
    urls = [f"http://a.test/{number}" for number in range(30)]
    assert await fetch(internet, *urls, output=folder) == 1
    assert {entry["outcome"] for entry in manifest(folder).values()} == {"failed"}
    assert len(manifest(folder)) == 30
    assert len(site.paths) == 31


async def test_a_redirect_to_a_page_that_was_denied_is_denied(
    internet: FakeInternet, folder: Path
) -> None:
    site = internet.site("a.test").robots("User-agent: *\nDisallow: /b\n")
    site.on("/a", redirect("/b"))
    assert await fetch(internet, B, A, output=folder) == 1
    assert [manifest(folder)[url]["outcome"] for url in (A, B)] == ["denied", "denied"]
    assert manifest(folder)[A]["decision"]["rule"]["line"] == 2
    assert "/b" not in site.paths


async def test_a_redirect_to_a_page_that_an_earlier_run_was_denied_is_denied(
    internet: FakeInternet, folder: Path
) -> None:
    site = internet.site("a.test").robots("User-agent: *\nDisallow: /b\n")
    site.on("/a", redirect("/b"))
    await fetch(internet, B, output=folder)
    assert await fetch(internet, A, output=folder) == 1
    assert manifest(folder)[A]["outcome"] == "denied"


async def test_the_urls_on_the_way_to_a_page_are_done_when_the_page_is(
    internet: FakeInternet, folder: Path
) -> None:
    site = internet.site("a.test").robots(OPEN)
    site.on("/1", redirect("/2")).on("/2", redirect("/3")).page("/3")
    await fetch(internet, "http://a.test/1", output=folder)
    urls = [f"http://a.test/{number}" for number in (1, 2, 3)]
    assert await fetch(internet, *urls, output=folder) == 0
    assert site.paths == [ROBOTS, "/1", "/2", "/3"]
