"""`gatekeeper fetch --sitemap`: the pages that a site lists."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gatekeeper.cli import main
from tests.crawl.crawling import fetch, manifest, stored
from tests.internet import FakeInternet, Page, Site

SITEMAP = """<urlset><url><loc>/new</loc><lastmod>2026-11-20</lastmod></url>
<url><loc>/old</loc><lastmod>2020-01-01</lastmod></url></urlset>"""
NEW, OLD = "http://a.test/new", "http://a.test/old"


def listing(net: FakeInternet, *paths: str, rules: str = "") -> Site:
    lines = "".join(f"Sitemap: http://a.test{path}\n" for path in paths)
    site = net.site("a.test").robots(f"User-agent: *\nDisallow: /private\n{rules}{lines}")
    return site.page("/s.xml", SITEMAP).page("/new", "new").page("/old", "old")


async def test_listed_pages_are_fetched_after_the_given_ones(
    net: FakeInternet, folder: Path
) -> None:
    listing(net, "/s.xml").page("/given", "given")
    sitemaps = ("http://a.test",)
    work = fetch(net, "http://a.test/given", OLD, sitemaps=sitemaps, output=folder)
    assert await net.drive(work) == 0
    assert set(manifest(folder)) == {"http://a.test/given", OLD, NEW}
    assert stored(folder, NEW) == b"new"
    # A resumed crawl reads the list again, and no page.
    before = len(net.requests)
    assert await net.drive(fetch(net, sitemaps=sitemaps, output=folder)) == 0
    assert [one.target for one in net.requests[before:]] in (["/s.xml"], ["/robots.txt", "/s.xml"])


async def test_only_pages_that_changed_since_are_fetched(net: FakeInternet, folder: Path) -> None:
    site = listing(net, "/s.xml")
    since = datetime(2026, 11, 1, tzinfo=UTC)
    work = fetch(net, sitemaps=("http://a.test",), since=since, output=folder)
    assert await net.drive(work) == 0
    assert set(manifest(folder)) == {NEW}
    assert "/old" not in site.paths


async def test_a_sitemap_that_was_not_read_is_no_success(
    net: FakeInternet, capsys: pytest.CaptureFixture[str]
) -> None:
    listing(net, "/private/t.xml", "/gone.xml", "/s.xml")
    net.site("b.test").robots(Page("", status=503))
    net.site("c.test").robots("")
    origins = ("http://b.test", "http://10.0.0.1", "http://a.test", "http://c.test")
    assert await net.drive(fetch(net, sitemaps=origins)) == 1
    out = capsys.readouterr().out
    assert "fetched 2 (2 x 200)" in out
    assert "not read completely: 4 sitemaps" in out
    assert "http://a.test/gone.xml  status 404 instead of a sitemap" in out
    assert "http://c.test" not in out

    assert await net.drive(fetch(net, sitemaps=origins, as_json=True)) == 1
    end = json.loads(capsys.readouterr().err.splitlines()[-1])
    assert [(one["source"], one["code"]) for one in end["sitemap_findings"]] == [
        ("http://b.test", "deferred"),
        ("http://10.0.0.1", "denied"),
        ("http://a.test/private/t.xml", "denied"),
        ("http://a.test/gone.xml", "not-fetched"),
        ("http://c.test", "no-sitemap"),
    ]


async def test_sitemaps_that_are_not_read_within_max_wait_are_given_up(
    net: FakeInternet, capsys: pytest.CaptureFixture[str]
) -> None:
    site = listing(net, "/s.xml", rules="Crawl-delay: 5000\n")
    net.site("b.test").robots("Sitemap: http://b.test/t\n").page("/t", "http://b.test/x").page("/x")
    work = fetch(net, sitemaps=("http://a.test", "http://b.test"), max_wait=60.0)
    assert await net.drive(work) == 1
    out = capsys.readouterr().out
    assert "http://a.test  its sitemaps did not come within --max-wait 60 s" in out
    assert "fetched 1" in out
    assert site.paths == ["/robots.txt"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--since", "2026-11-01", "http://a.test"], "--sitemap"),
        (["--sitemap", "a.test"], "write it out with its scheme"),
        (["--sitemap", "http://a.test", "--since", "yesterday"], "2026-11-01"),
        ([], "--sitemap"),
    ],
)
def test_wrong_sitemap_options_are_named(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fetch", *arguments]) == 2
    assert told in capsys.readouterr().err
