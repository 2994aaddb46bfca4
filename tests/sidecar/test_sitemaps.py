"""`/v1/sitemaps`: what a site lists, as JSON lines."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import aiohttp
import pytest

from tests.internet import FakeInternet, Hold, Page
from tests.waiting_support import until


@pytest.fixture
def site(internet: FakeInternet) -> Any:
    lines = "".join(f"Sitemap: http://a.test/{name}\n" for name in ("s", "private/t", "u"))
    site = internet.site("a.test").robots(f"User-agent: *\nDisallow: /private\n{lines}")
    return site.page("/s", "http://a.test/1\nhttp://a.test/2\n").page("/u", "http://a.test/3")


async def lines(service: Any, query: str) -> tuple[int, list[dict[str, Any]]]:
    async with service.session.get(f"{service.base}/v1/sitemaps?{query}") as response:
        if response.status == 200:
            assert response.headers["Content-Type"] == "text/plain; charset=utf-8"
        return response.status, [json.loads(line) async for line in response.content]


async def test_entries_and_findings_are_lines(serve: Any, site: Any) -> None:
    status, found = await lines(await serve(), "origin=http://a.test/page")
    assert status == 200
    assert [one for one in found if "url" in one] == [
        {"url": "http://a.test/1", "lastmod": None, "source": "http://a.test/s"},
        {"url": "http://a.test/2", "lastmod": None, "source": "http://a.test/s"},
        {"url": "http://a.test/3", "lastmod": None, "source": "http://a.test/u"},
    ]
    (finding,) = [one["finding"] for one in found if "finding" in one]
    assert (finding["code"], finding["severity"]) == ("denied", "error")
    assert finding["source"] == "http://a.test/private/t"


async def test_lines_come_while_the_next_file_is_waited_for(serve: Any, site: Any) -> None:
    hold = Hold(Page("http://a.test/3"))
    site.on("/u", hold)
    service = await serve()
    async with service.session.get(f"{service.base}/v1/sitemaps?origin=http://a.test") as response:
        assert b"/1" in await response.content.readline()
        assert b"/2" in await response.content.readline()
        await hold.waiting.acquire()
        hold.release()
        assert b"denied" in await response.content.read()


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("origin=http://down.test", 429),
        ("origin=http://10.0.0.1", 403),
        ("origin=nothing", 400),
        ("", 400),
        ("origin=http://a.test&since=yesterday", 400),
        ("origin=http://a.test&since=2026-11-01T00:00:00", 200),
        ("origin=http://a.test&max_entries=-1", 400),
        ("origin=http://a.test&max_entries=2&guess=true&since=2026-11-01", 200),
    ],
)
async def test_an_error_before_the_first_line_has_its_status(
    serve: Any, site: Any, internet: FakeInternet, query: str, status: int
) -> None:
    internet.site("down.test").robots(Page("", status=503))
    assert (await lines(await serve(), query))[0] == status


async def test_a_draining_service_cuts_a_sitemap_response_off(serve: Any, site: Any) -> None:
    hold = Hold(Page("http://a.test/3"))
    site.on("/u", hold)
    service = await serve()
    async with service.session.get(f"{service.base}/v1/sitemaps?origin=http://a.test") as response:
        await response.content.readline()
        await hold.waiting.acquire()
        service.service.phase = "draining"
        hold.release()
        with pytest.raises(aiohttp.ClientError):
            await response.content.read()
    assert (await lines(service, "origin=http://a.test"))[0] == 503
    await until(lambda: not service.service.streams)


async def test_sitemap_requests_count_as_streams(serve: Any, site: Any) -> None:
    hold = Hold(Page("http://a.test/1"))
    site.on("/s", hold)
    service = await serve(max_streams=3)
    waiting = [asyncio.create_task(lines(service, "origin=http://a.test")) for _ in range(2)]
    await until(lambda: service.service.operators.streams.total() >= 2)
    assert (await lines(service, "origin=http://a.test"))[0] == 429
    hold.release()
    assert [status for status, _ in await asyncio.gather(*waiting)] == [200, 200]


async def test_a_client_that_goes_ends_the_reading(serve: Any, site: Any) -> None:
    hold = Hold(Page("http://a.test/3"))
    site.on("/u", hold)
    service = await serve()
    async with service.session.get(f"{service.base}/v1/sitemaps?origin=http://a.test") as response:
        await response.content.readline()
        await hold.waiting.acquire()
    await until(lambda: not service.service.streams)


async def test_decisions_about_sitemap_files_are_in_the_feed(serve: Any, site: Any) -> None:
    service = await serve()
    await lines(service, "origin=http://a.test")
    shown = [
        (str(one.decision.verdict), one.decision.url)
        for one in service.service.operators.feed.since(0)
    ]
    assert sorted(shown) == [
        ("allow", "http://a.test/s"),
        ("allow", "http://a.test/u"),
        ("deny", "http://a.test/private/t"),
    ]


async def test_a_sitemap_of_a_blocked_host_is_a_finding_at_once(serve: Any, site: Any) -> None:
    service = await serve()
    await service.service.gate.check("http://a.test/")
    await service.service.gate.block("a.test", time.time() + 3600)
    status, found = await lines(service, "origin=http://a.test")
    assert status == 200
    codes = {one["finding"]["source"]: one["finding"]["code"] for one in found}
    assert codes == {
        "http://a.test/s": "deferred",
        "http://a.test/private/t": "denied",
        "http://a.test/u": "deferred",
    }
    assert found[0]["finding"]["retry_at"] is not None


async def test_a_sitemap_request_waits_as_a_request_of_its_client(serve: Any, site: Any) -> None:
    service = await serve(pacing={"default_interval": 1000.0})
    waiting = asyncio.create_task(lines(service, "origin=http://a.test"))
    await until(lambda: service.service.leases.waiters)
    assert [one.client for one in service.service.leases.waiters] == ["127.0.0.1"]
    service.service.leases.drain()
    assert (await waiting)[0] == 503
