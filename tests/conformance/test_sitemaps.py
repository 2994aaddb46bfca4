"""Sitemaps over every kind of gate: the same entries, findings and errors."""

from __future__ import annotations

import asyncio
from datetime import UTC, date, datetime
from typing import Any

import pytest

from gatekeeper import (
    ConfigError,
    Deferred,
    Denied,
    GateClosed,
    InvalidURL,
    PoliteQueue,
    RemoteGatekeeper,
    SidecarError,
    SitemapEntry,
)
from tests.conformance.ways import AGENT
from tests.internet import FakeInternet, Hold, Page
from tests.waiting_support import until

SITEMAP = """<urlset><url><loc>http://a.test/p?x=\u00fc</loc><lastmod>2026-11-20</lastmod></url>
<url><loc>http://a.test/old</loc><lastmod>2020-01-01T10:00:00+02:00</lastmod></url>
<url><loc>http://a.test/q</loc></url></urlset>"""


@pytest.fixture
def world(internet: FakeInternet) -> FakeInternet:
    site = internet.site("a.test").robots(
        "User-agent: *\nDisallow: /private\n"
        "Sitemap: http://a.test/s.xml\nSitemap: http://a.test/private/t.xml\n"
    )
    site.page("/s.xml", SITEMAP).page("/sitemap.xml", "http://a.test/guessed")
    internet.site("down.test").robots(Page("", status=503))
    return internet


async def test_every_entry_point_gives_the_same_entries_and_findings(
    world: FakeInternet, open_gate: Any
) -> None:
    gate = await open_gate(world)
    found = gate.sitemaps("http://a.test")
    assert [entry async for entry in found] == [
        SitemapEntry(
            "http://a.test/p?x=\u00fc", datetime(2026, 11, 20, tzinfo=UTC), "http://a.test/s.xml"
        ),
        SitemapEntry(
            "http://a.test/old", datetime(2020, 1, 1, 8, tzinfo=UTC), "http://a.test/s.xml"
        ),
        SitemapEntry("http://a.test/q", None, "http://a.test/s.xml"),
    ]
    (finding,) = found.findings
    assert (finding.source, finding.code) == ("http://a.test/private/t.xml", "denied")
    assert not found.complete
    assert world.sites["a.test"].requests[-1].headers["User-Agent"] == AGENT


async def test_every_entry_point_passes_the_arguments_of_sitemaps_on(
    world: FakeInternet, open_gate: Any
) -> None:
    gate = await open_gate(world)

    async def urls(**given: Any) -> list[str]:
        return [entry.url[14:] async for entry in gate.sitemaps("http://a.test/x", **given)]

    assert await urls(since=date(2026, 11, 1)) == ["p?x=\u00fc", "q"]
    assert await urls(since=datetime(2026, 11, 30, tzinfo=UTC)) == ["q"]
    assert await urls(guess=True) == ["p?x=\u00fc", "old", "q", "guessed"]
    assert await urls(max_entries=2) == ["p?x=\u00fc", "old"]
    assert await urls(max_entries=0) == []


async def test_every_entry_point_raises_the_same_errors_for_sitemaps(
    world: FakeInternet, open_gate: Any
) -> None:
    gate = await open_gate(world)
    with pytest.raises(Deferred) as deferred:
        await anext(gate.sitemaps("http://down.test"))
    assert deferred.value.retry_at is not None
    with pytest.raises(Denied):
        await anext(gate.sitemaps("http://10.0.0.1/"))
    with pytest.raises(InvalidURL):
        gate.sitemaps("mailto:a@a.test")
    with pytest.raises(ConfigError, match="since"):
        gate.sitemaps("http://a.test", since="2026")
    with pytest.raises(ConfigError, match="max_entries"):
        gate.sitemaps("http://a.test", max_entries=-1)
    await gate.__aexit__(None, None, None)
    with pytest.raises(GateClosed):
        await anext(gate.sitemaps("http://a.test"))


async def test_a_queue_takes_the_pages_of_a_sitemap(world: FakeInternet, open_gate: Any) -> None:
    gate = await open_gate(world)
    denied: list[str] = []
    async with PoliteQueue(gate, maxsize=1, on_denied=lambda one: denied.append(one.url)) as queue:

        async def work() -> list[Any]:
            got = []
            for _ in range(2):
                async with await queue.get() as lease:
                    got.append((lease.url[14:], lease.data))
                    lease.report(status=200)
            return got

        worker = asyncio.create_task(work())
        found = await queue.put_sitemap("http://a.test", since=date(2026, 11, 1), data=[1])
        assert [finding.code for finding in found.findings] == ["denied"]
        assert await worker == [("p?x=%C3%BC", [1]), ("q", [1])]
        await queue.put_sitemap("http://a.test", guess=True, max_entries=0)
        await asyncio.wait_for(queue.join(), 60)


async def test_a_closed_queue_ends_the_reading_of_a_sitemap(
    world: FakeInternet, open_gate: Any
) -> None:
    queue = PoliteQueue(await open_gate(world), maxsize=1)
    putting = asyncio.create_task(queue.put_sitemap("http://a.test"))
    await until(queue.full)
    await queue.close()
    with pytest.raises(GateClosed):
        await putting


async def test_a_sidecar_that_stops_ends_the_entries_with_an_error(
    world: FakeInternet, sidecar_on: Any
) -> None:
    hold = Hold(Page(SITEMAP))
    world.sites["a.test"].robots("Sitemap: http://a.test/s.xml\nSitemap: http://a.test/held.xml\n")
    world.sites["a.test"].on("/held.xml", hold)
    sidecar = await sidecar_on(world)
    async with RemoteGatekeeper(sidecar.where) as gate:
        found = gate.sitemaps("http://a.test")
        assert (await anext(found)).url
        await hold.waiting.acquire()
        await sidecar.stop()
        with pytest.raises(SidecarError):
            async for _ in found:
                pass
