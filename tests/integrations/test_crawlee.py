"""Whole crawls with Crawlee for Python against the fake internet, judged by its log."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import pytest

from gatekeeper import ConfigError, Denied, Gatekeeper, RemoteGatekeeper
from gatekeeper.config import IdentityConfig
from gatekeeper.sidecar.security import Tokens
from gatekeeper.signing import new_key
from tests.conformance.conftest import sidecar_on
from tests.conformance.ways import AGENT, settings
from tests.internet import FakeInternet, Page, Reset, html, redirect
from tests.test_signing import as_sent, verify

pytest.importorskip("crawlee")

from crawlee import ConcurrencySettings, Request
from crawlee.crawlers import BasicCrawler, BeautifulSoupCrawler, HttpCrawler
from crawlee.http_clients import ImpitHttpClient
from crawlee.sessions import SessionPool
from crawlee.storage_clients import MemoryStorageClient
from crawlee.storages import RequestQueue

from gatekeeper.integrations.crawlee import (
    PoliteHttpClient,
    PoliteRequestManager,
    RequestDenied,
    polite_crawler,
)

__all__ = ["sidecar_on"]


@pytest.fixture(params=["embedded", "sidecar"])
async def gate(
    request: pytest.FixtureRequest, internet: FakeInternet, sidecar_on: Any
) -> AsyncIterator[Any]:
    if request.param == "embedded":
        opened: Any = Gatekeeper(AGENT, config=settings(), resolver=internet.resolver)
    else:
        sidecar = await sidecar_on(internet)
        opened = RemoteGatekeeper(sidecar.where, AGENT, config=settings(), patience=0.2)
    async with opened as entered:
        yield entered


@pytest.fixture
async def near(internet: FakeInternet) -> AsyncIterator[Gatekeeper]:
    async with Gatekeeper(AGENT, config=settings(), resolver=internet.resolver) as entered:
        yield entered


class Crawl:
    """A crawler and its results."""

    def __init__(self) -> None:
        self.crawler: Any = None
        self.got: list[str] = []
        self.skipped: list[str] = []
        self.failed: dict[str, Exception] = {}


async def queue() -> RequestQueue:
    """Open a new request queue."""
    return await RequestQueue.open(
        alias=uuid4().hex,
        storage_client=MemoryStorageClient(),
    )


async def crawl_of(
    internet: FakeInternet,
    gate: Any,
    kind: Any = HttpCrawler,
    *,
    links: bool = False,
    **options: Any,
) -> Crawl:
    crawl = Crawl()

    async def handle(context: Any) -> None:
        crawl.got.append(context.request.url)
        if links:
            await context.enqueue_links(strategy="all")

    manager = options.pop("request_manager", None)
    crawl.crawler = polite_crawler(
        kind,
        gate,
        request_manager=manager or await queue(),
        http_client=options.pop("http_client", None)
        or PoliteHttpClient(gate, resolver=internet.resolver),
        request_handler=options.pop("request_handler", handle),
        storage_client=MemoryStorageClient(),
        configure_logging=False,
        concurrency_settings=ConcurrencySettings(
            min_concurrency=4, desired_concurrency=4, max_concurrency=4
        ),
        **options,
    )

    @crawl.crawler.on_skipped_request
    async def skipped(url: str, reason: str) -> None:
        assert reason == "robots_txt"
        crawl.skipped.append(url)

    @crawl.crawler.failed_request_handler
    async def failed(context: Any, error: Exception) -> None:
        crawl.failed[context.request.url] = error

    return crawl


async def test_a_crawl_is_decided_paced_and_reported(internet: FakeInternet, gate: Any) -> None:
    site = internet.site("a.test").robots("User-agent: *\nCrawl-delay: 0.1\nDisallow: /private\n")
    links = "".join(f'<a href="{path}">x</a>' for path in ("/1", "/2", "/private/x", "/to-b"))
    site.on("/", html(links)).page("/1").page("/2").redirect("/to-b", "http://b.test/x")
    other = internet.site("b.test").robots("User-agent: *\nDisallow: /x\n").page("/").page("/x")
    crawl = await crawl_of(internet, gate, BeautifulSoupCrawler, links=True)
    await crawl.crawler.run(["http://a.test/", "http://b.test/"])
    assert sorted(crawl.got) == [
        *("http://a.test/", "http://a.test/1", "http://a.test/2", "http://b.test/")
    ]
    assert sorted(crawl.skipped) == ["http://a.test/private/x", "http://a.test/to-b"]
    assert crawl.failed == {}
    assert site.paths[:2] == ["/robots.txt", "/"]
    assert sorted(site.paths[2:]) == ["/1", "/2", "/to-b"]
    assert sorted(other.paths) == ["/", "/robots.txt"]
    assert min(site.gaps()) >= 0.1
    assert {one.headers["User-Agent"] for one in internet.requests} == {AGENT}


async def test_the_signals_of_a_page_are_in_its_user_data(
    internet: FakeInternet, gate: Any
) -> None:
    tags = [("X-Robots-Tag", "noarchive"), ("X-Robots-Tag", "otherbot: nosnippet")]
    page = '<meta name="examplebot" content="noai"><meta name="robots" content="max-snippet:5">'
    site = internet.site("a.test").robots("")
    site.on("/", html(page, headers=tags)).page("/plain", page).redirect("/to", "/plain")
    found: dict[str, Any] = {}

    async def handle(context: Any) -> None:
        signals = context.request.user_data["gatekeeper_signals"]
        assert json.loads(json.dumps(signals)) == signals
        rules = signals["rules"]
        found[context.request.url] = sorted(rules["names"]), rules["max_snippet"]

    crawl = await crawl_of(internet, gate, request_handler=handle)
    await crawl.crawler.run(["http://a.test/", "http://a.test/to"])
    assert found == {
        "http://a.test/": (["noai", "noarchive"], 5),
        "http://a.test/to": ([], None),
    }


async def test_a_free_host_does_not_wait_for_slow_hosts(internet: FakeInternet, gate: Any) -> None:
    """There are as many slow hosts as workers, which waiting requests would occupy."""
    for number in range(4):
        slow = internet.site(f"slow{number}.test")
        slow.robots("User-agent: *\nCrawl-delay: 1\n").page("/")
    free = internet.site("free.test").robots("")
    for number in range(12):
        free.page(f"/{number}")
    urls = [f"http://slow{n}.test/" for n in range(4)]
    crawl = await crawl_of(internet, gate)
    await crawl.crawler.run([*urls, *(f"http://free.test/{n}" for n in range(12))])
    assert len(crawl.got) == 16
    pages = [one.host for one in internet.requests if one.target != "/robots.txt"]
    # Not all twelve: a busy machine may need longer for them than the slow hosts ask for.
    assert pages[:4] == ["free.test"] * 4
    for number in range(4):
        assert min(internet.sites[f"slow{number}.test"].gaps()) >= 1.0


async def test_a_429_blocks_only_its_host_and_is_tried_again(
    internet: FakeInternet, gate: Any, caplog: pytest.LogCaptureFixture
) -> None:
    busy = Page("", status=429, headers={"Retry-After": "1"})
    site = internet.site("a.test").robots("").on("/1", busy, Page("here"))
    internet.site("b.test").robots("").page("/1").page("/2")
    crawl = await crawl_of(internet, gate)
    await crawl.crawler.run(["http://a.test/1", "http://b.test/1", "http://b.test/2"])
    assert crawl.got[-1] == "http://a.test/1"
    assert len(crawl.got) == 3
    assert "ThrottlingRequestManager" not in caplog.text
    assert site.paths == ["/robots.txt", "/1", "/1"]
    assert site.gaps()[-1] >= 1.0


async def test_a_url_deferred_for_longer_than_max_wait_is_skipped(
    internet: FakeInternet, gate: Any
) -> None:
    down = internet.site("down.test").robots(Page("", status=503, headers={"Retry-After": "7200"}))
    internet.site("a.test").robots("").page("/")
    crawl = await crawl_of(internet, gate)
    await crawl.crawler.run(["http://down.test/", "http://a.test/"])
    assert crawl.got == ["http://a.test/"]
    assert crawl.skipped == ["http://down.test/"]
    assert set(down.paths) == {"/robots.txt"}


async def test_a_crawl_whose_sidecar_is_gone_comes_to_an_end(internet: FakeInternet) -> None:
    """Each deferral is of five seconds, and they must not be waited for one by one."""
    where = f"http://{internet.refusing('gone.test')}:1"
    asked = [f"http://{host}.test/{number}" for host in "ab" for number in range(4)]
    async with RemoteGatekeeper(where, AGENT, config=settings(), patience=0.2) as gate:
        crawl = await crawl_of(internet, gate, max_wait=6.0)
        async with asyncio.timeout(60):
            await crawl.crawler.run(asked)
    assert sorted(crawl.skipped) == asked
    assert crawl.got == []
    assert internet.requests == []


async def test_a_crawl_whose_sidecar_refuses_its_token_comes_to_an_end(
    internet: FakeInternet, sidecar_on: Any
) -> None:
    """The error of each lease is logged, since the token may be corrected; it does not end the
    crawl."""
    sidecar = await sidecar_on(internet, tokens=Tokens((b"t" * 40,)))
    asked = [f"http://{host}.test/" for host in "ab"]
    wrong = {"token": "wrong" * 8, "config": settings(), "patience": 0.2}
    async with RemoteGatekeeper(sidecar.where, AGENT, **wrong) as gate:
        crawl = await crawl_of(internet, gate, max_wait=1.0)
        async with asyncio.timeout(60):
            await crawl.crawler.run(asked)
    assert sorted(crawl.skipped) == asked
    assert internet.requests == []


async def test_a_failed_request_is_tried_again_with_another_lease(
    internet: FakeInternet, gate: Any
) -> None:
    site = internet.site("a.test").robots("User-agent: *\nCrawl-delay: 0.1\n")
    site.on("/", Page("", status=500), Page("here"))
    crawl = await crawl_of(internet, gate)
    await crawl.crawler.run(["http://a.test/"])
    assert crawl.got == ["http://a.test/"]
    assert site.paths == ["/robots.txt", "/", "/"]
    assert min(site.gaps()) >= 0.1


async def test_a_request_whose_connection_breaks_is_repeated_with_another_lease(
    internet: FakeInternet, gate: Any
) -> None:
    """aiohttp by itself repeats it within a millisecond."""
    site = internet.site("a.test").robots("User-agent: *\nCrawl-delay: 0.1\n")
    site.on("/", Reset(), Page("here"))
    crawl = await crawl_of(internet, gate)
    await crawl.crawler.run(["http://a.test/"])
    assert crawl.got == ["http://a.test/"]
    assert site.paths == ["/robots.txt", "/", "/"]
    assert min(site.gaps()) >= 0.1


@pytest.mark.parametrize("path", ["/x", "/private"])
async def test_a_request_under_its_own_name_is_judged_by_that(
    internet: FakeInternet, gate: Any, path: str
) -> None:
    text = "User-agent: otherbot\nDisallow: /private\n\nUser-agent: examplebot\nDisallow: /x\n"
    site = internet.site("a.test").robots(text).page("/x").page("/private")
    crawl = await crawl_of(internet, gate)
    url = f"http://a.test{path}"
    await crawl.crawler.run([Request.from_url(url, headers={"User-Agent": "otherbot/2.0"})])
    if path == "/x":
        assert crawl.got == [url]
        assert site.requests[-1].headers["User-Agent"] == "otherbot/2.0"
    else:
        assert crawl.skipped == [url]
        assert site.paths == ["/robots.txt"]


async def test_requests_sent_in_a_handler_take_leases(internet: FakeInternet, gate: Any) -> None:
    text = "User-agent: *\nCrawl-delay: 0.1\nDisallow: /private\n"
    site = internet.site("a.test").robots(text).page("/x").page("/y").page("/private")
    errors: list[Exception] = []

    async def handle(context: Any) -> None:
        await context.send_request("http://a.test/y")
        try:
            await context.send_request("http://a.test/private")
        except Denied as error:
            errors.append(error)

    crawl = await crawl_of(internet, gate, request_handler=handle)
    await crawl.crawler.run(["http://a.test/x"])
    assert site.paths == ["/robots.txt", "/x", "/y"]
    assert min(site.gaps()) >= 0.1
    assert isinstance(errors[0], RequestDenied)


async def test_a_basic_crawlers_request_uses_its_lease(
    internet: FakeInternet, near: Gatekeeper
) -> None:
    site = internet.site("a.test").robots("").page("/x", "hello")
    found: list[bytes] = []

    async def handle(context: Any) -> None:
        found.append(await (await context.send_request(context.request.url)).read())

    crawl = await crawl_of(internet, near, BasicCrawler, request_handler=handle)
    await crawl.crawler.run(["http://a.test/x"])
    assert found == [b"hello"]
    assert near.stats().pacing.in_flight == 0
    assert site.paths == ["/robots.txt", "/x"]


async def test_a_lease_that_no_http_request_used_ends_with_its_crawlee_request(
    internet: FakeInternet, near: Gatekeeper
) -> None:
    internet.site("a.test").robots("").page("/x")

    async def handle(context: Any) -> None:
        assert near.stats().pacing.in_flight == 1

    crawl = await crawl_of(internet, near, BasicCrawler, request_handler=handle)
    await crawl.crawler.run(["http://a.test/x", "http://a.test/y"])
    assert crawl.failed == {}
    assert near.stats().pacing.in_flight == 0


async def test_the_next_run_fetches_what_a_stopped_crawl_left(
    internet: FakeInternet, near: Gatekeeper
) -> None:
    site = internet.site("a.test").robots("User-agent: *\nCrawl-delay: 0.2\n")
    for number in range(4):
        site.page(f"/{number}")
    inner = await queue()
    got: list[str] = []

    async def handle(context: Any) -> None:
        got.append(context.request.url)
        if len(got) == 1:
            crawl.crawler.stop()

    crawl = await crawl_of(internet, near, request_handler=handle, request_manager=inner)
    await crawl.crawler.run([f"http://a.test/{n}" for n in range(4)])
    assert len(got) < 4  # one more may have been returned meanwhile
    assert not await inner.is_empty()
    again = await crawl_of(internet, near, request_handler=handle, request_manager=inner)
    await again.crawler.run()
    assert got == [f"http://a.test/{n}" for n in range(4)]  # in order


async def test_a_request_added_with_forefront_comes_first(
    internet: FakeInternet, near: Gatekeeper
) -> None:
    internet.site("a.test").robots("").page("/1").page("/2").page("/3")
    manager = PoliteRequestManager(near, await queue())
    await manager.add_requests(["http://a.test/1", "http://a.test/2"])
    await manager.add_request("http://a.test/3", forefront=True)
    order = []
    while not await manager.is_finished():
        if await manager.is_empty():
            continue
        request = await manager.fetch_next_request()
        assert request is not None
        assert await manager.fetch_next_request() is None  # its host is in use
        order.append(request.url)
        await manager.mark_request_as_handled(request)
    assert order == ["http://a.test/3", "http://a.test/1", "http://a.test/2"]
    assert await manager.get_handled_count() == await manager.get_total_count() == 3
    await manager.close()


async def test_the_option_respect_robots_txt_file_is_refused(near: Gatekeeper) -> None:
    with pytest.raises(ConfigError, match="respect_robots_txt_file"):
        polite_crawler(HttpCrawler, near, respect_robots_txt_file=True)


async def test_a_client_that_would_follow_redirects_is_refused(near: Gatekeeper) -> None:
    with pytest.raises(ConfigError, match="guarded=False"):
        PoliteHttpClient(near, ImpitHttpClient(follow_redirects=False))
    with pytest.raises(ConfigError, match="follow_redirects=False"):
        PoliteHttpClient(near, ImpitHttpClient(), guarded=False)


async def test_a_client_of_crawlee_s_own_is_decided_hop_by_hop(internet: FakeInternet) -> None:
    """It resolves names by itself, so the site has no name."""
    address = internet.listener().address
    port = internet.listener().port()
    base = f"http://{address}:{port}"
    site = internet.site(address).robots("User-agent: *\nDisallow: /private\n")
    site.on("/x", redirect("/y")).page("/y", "there").on("/z", redirect("/private"))
    config = settings(host=[{"match": address, "interval": 0.1}])
    async with Gatekeeper(AGENT, config=config, resolver=internet.resolver) as gate:
        own = ImpitHttpClient(follow_redirects=False)
        client = PoliteHttpClient(gate, own, guarded=False)
        assert not client.guarded
        assert await (await client.send_request(f"{base}/x")).read() == b"there"
        with pytest.raises(RequestDenied):
            await client.send_request(f"{base}/z")
        async with client.stream(f"{base}/y") as response:
            assert b"".join([part async for part in response.read_stream()]) == b"there"
        await client.cleanup()
        assert gate.stats().pacing.in_flight == 0
    assert site.paths == ["/robots.txt", "/x", "/y", "/z", "/y"]
    assert {one.headers["User-Agent"] for one in site.requests} == {AGENT}


async def test_sessions_keep_their_cookies_to_their_hosts(
    internet: FakeInternet, near: Gatekeeper
) -> None:
    site = internet.site("a.test").robots("")
    site.on("/", Page("", status=302, headers={"Set-Cookie": "k=v", "Location": "/y"}))
    site.on("/y", redirect("http://b.test/"))
    other = internet.site("b.test").robots("").page("/")
    client = PoliteHttpClient(near, resolver=internet.resolver)
    async with SessionPool(persistence_enabled=False) as pool:
        session = await pool.get_session()
        headers = {"Authorization": "Bearer secret"}
        await client.send_request("http://a.test/", session=session, headers=headers)
    await client.cleanup()
    assert site.requests[-1].headers["Cookie"] == "k=v"
    assert site.requests[-1].headers["Authorization"] == "Bearer secret"
    assert "Cookie" not in other.requests[-1].headers
    assert "Authorization" not in other.requests[-1].headers


@pytest.mark.parametrize("streamed", [False, True])
async def test_bytes_received_by_crawlee_count_for_the_budget(
    internet: FakeInternet, streamed: bool
) -> None:
    internet.site("a.test").robots("").page("/", "x" * 1000)
    config = settings(host=[{"match": "a.test", "max_bytes_per_day": 1000}])
    async with Gatekeeper(AGENT, config=config, resolver=internet.resolver) as gate:
        client = PoliteHttpClient(gate, resolver=internet.resolver)
        if streamed:
            async with client.stream("http://a.test/") as response:
                assert response.status_code == 200
                assert len(b"".join([part async for part in response.read_stream()])) == 1000
        else:
            await client.send_request("http://a.test/")
        with pytest.raises(Denied, match="budget"):
            await client.send_request("http://a.test/")
        await client.cleanup()


async def test_the_stream_of_an_empty_body_is_empty(
    internet: FakeInternet, near: Gatekeeper
) -> None:
    internet.site("a.test").robots("").page("/", "").page("/x", "text")
    client = PoliteHttpClient(near, resolver=internet.resolver)
    for path, body in (("/", b""), ("/x", b"text")):
        async with client.stream(f"http://a.test{path}") as response:
            assert b"".join([part async for part in response.read_stream()]) == body
            with pytest.raises(RuntimeError):
                await anext(response.read_stream())
    await client.cleanup()


async def test_each_hop_is_signed(internet: FakeInternet, tmp_path: Path) -> None:
    path = tmp_path / "bot.pem"
    public = new_key(path).public
    identity = IdentityConfig(key=str(path), directory="https://bot.example")
    config = msgspec.structs.replace(settings(), identity=identity)
    site = internet.site("a.test").robots("").redirect("/x", "/y").page("/y", "there")
    async with Gatekeeper(AGENT, config=config, resolver=internet.resolver) as gate:
        client = PoliteHttpClient(gate, resolver=internet.resolver)
        await client.send_request("http://a.test/x")
        await client.cleanup()
    for one in site.requests:
        verify(as_sent(one), public)


async def test_a_proxy_is_refused_unless_told(internet: FakeInternet, near: Gatekeeper) -> None:
    client = PoliteHttpClient(near)
    with pytest.raises(ConfigError, match="a proxy"):
        await client.send_request("http://a.test/", proxy_info=object())
    await client.cleanup()
