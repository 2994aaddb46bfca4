"""`/v1/fetch` where the way to the page is long, or breaks off under way."""

from __future__ import annotations

import asyncio
import io
import json
from typing import Any

import aiohttp
import pytest

from gatekeeper.clock import VirtualClock
from gatekeeper.config import ServerConfig
from gatekeeper.sidecar.decisionlog import DecisionLog
from tests.internet import FakeInternet, NeverAnswer, Page, Raw, redirect

OPEN = "User-agent: *\nDisallow: /private\n"


@pytest.fixture
def site(internet: FakeInternet) -> Any:
    return internet.site("a.test").robots(OPEN).page("/page", "the page")


def logged(service: Any) -> list[dict[str, Any]]:
    """The decision log of a door, as a function would read it."""
    log, stream = service.service.log, service.service.log._stream
    log.write()
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def with_log(service: Any) -> Any:
    server = ServerConfig(log_decisions="all", log_format="json")
    service.service.log = DecisionLog(server, service.service.clock, stream=io.StringIO())
    return service


async def everything(service: Any, url: str) -> tuple[bytes, BaseException | None]:
    """Whatever a plain reader gets of a fetch on a connection that may stay open."""
    host, _, port = service.base.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"GET /v1/fetch?url={url} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
    got, error = b"", None
    try:
        while piece := await reader.read(65_536):
            got += piece
            service.arrived.set()
    except ConnectionError as broken:
        error = broken
    writer.close()
    return got, error


BEGUN = {
    "a length": b"Content-Length: 2000\r\n\r\nxxxx",
    "chunks": b"Transfer-Encoding: chunked\r\n\r\n4\r\nxxxx\r\n",
}


@pytest.mark.parametrize("begun", BEGUN)
async def test_a_page_that_takes_too_long_breaks_off_and_holds_nothing_of_ours(
    door: Any, site: Any, begun: str
) -> None:
    site.on("/slow", Raw(b"HTTP/1.1 200 OK\r\n" + BEGUN[begun], "keep"))
    service = await door(fetch_timeout=3.0)
    clock = service.service.clock = VirtualClock()
    service.arrived = asyncio.Event()
    reading = asyncio.create_task(everything(service, "http://a.test/slow"))
    await service.arrived.wait()
    await clock.elapse(3.0)
    got, error = await reading

    head, _, body = got.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert b"urn:" not in body
    assert b"HTTP/1.1" not in body
    assert isinstance(error, ConnectionResetError)  # no clean end


async def test_a_page_that_takes_too_long_to_begin_is_504(door: Any, site: Any) -> None:
    site.on("/slow", NeverAnswer())
    service = await door(fetch_timeout=3.0)
    await service.get("/v1/check", params={"url": "http://a.test/"})
    clock = service.service.clock = VirtualClock()
    asking = asyncio.create_task(service.get("/v1/fetch", params={"url": "http://a.test/slow"}))
    while "/slow" not in site.paths:
        await asyncio.sleep(0)
    await clock.elapse(3.0)

    assert (await asking)[0] == 504


async def test_fetch_follows_redirects_to_the_page(door: Any, site: Any) -> None:
    site.on("/go", redirect("/here")).on("/here", redirect("//a.test/page", 307))
    service = await door()
    async with service.session.get(
        service.base + "/v1/fetch", params={"url": "http://a.test/go"}
    ) as response:
        assert (response.status, await response.text()) == (200, "the page")

    assert response.headers["Content-Location"] == "http://a.test/page"
    assert site.paths == ["/robots.txt", "/go", "/here", "/page"]


async def test_t9_fetch_follows_five_redirects_and_no_sixth(door: Any, site: Any) -> None:
    for n in range(6):
        site.on(f"/{n}", redirect(f"/{n + 1}"))
    site.page("/6", "the page")
    service = await door()

    assert (await service.get("/v1/fetch", params={"url": "http://a.test/0"}))[0] == 502
    assert site.paths == ["/robots.txt", *(f"/{n}" for n in range(6))]
    async with service.session.get(
        service.base + "/v1/fetch", params={"url": "http://a.test/1"}
    ) as response:
        assert (response.status, await response.text()) == (200, "the page")


@pytest.mark.parametrize("location", ["http://u:p@a.test/page", "//u:p@a.test/page"])
async def test_t1_fetch_takes_no_credentials_from_a_redirect(
    door: Any, site: Any, location: str
) -> None:
    site.on("/go", redirect(location))
    service = await door()
    status, problem = await service.get("/v1/fetch", params={"url": "http://a.test/go"})

    assert (status, problem["decision"]["reason"]) == (403, "blocked")
    assert site.paths == ["/robots.txt", "/go"]


@pytest.mark.parametrize("location", ["ftp://a.test/page", "http:page", "http://[/"])
async def test_a_redirect_to_what_is_no_url_is_502(door: Any, site: Any, location: str) -> None:
    site.on("/go", redirect(location))
    service = await door()
    assert (await service.get("/v1/fetch", params={"url": "http://a.test/go"}))[0] == 502


async def test_a_redirect_without_location_is_passed_on(door: Any, site: Any) -> None:
    site.on("/go", Page("nowhere", status=302))
    service = await door()
    async with service.session.get(
        service.base + "/v1/fetch", params={"url": "http://a.test/go"}
    ) as response:
        assert (response.status, await response.text()) == (302, "nowhere")


async def test_t20_each_hop_has_a_decision_in_the_log(door: Any, site: Any) -> None:
    site.on("/go", redirect("/private"))
    service = with_log(await door())
    _, problem = await service.get("/v1/fetch", params={"url": "http://a.test/go"})

    told = problem["decision"]
    lines = [(one["url"], one["verdict"], one["user_agent"]) for one in logged(service)]
    assert lines == [
        ("http://a.test/go", "allow", "testbot"),
        ("http://a.test/private", "deny", "testbot"),
    ]
    assert told["id"] == logged(service)[1]["id"]


async def test_t20_a_denial_at_the_socket_has_an_id_a_name_and_a_line(
    door: Any, internet: FakeInternet
) -> None:
    internet.site("rebound.example").robots(OPEN).page("/page", "the page")
    internet.dns("rebound.example", "127.0.0.1", "10.0.0.1")
    service = with_log(await door())
    asked = {"url": "http://rebound.example/page"}
    status, problem = await service.get("/v1/fetch", params=asked)

    told = problem["decision"]
    assert (status, told["reason"], told["user_agent"]) == (403, "blocked", "testbot")
    assert told["id"]
    assert [one["id"] for one in logged(service)][-1] == told["id"]


async def test_fetch_passes_on_how_long_the_site_wants_to_be_left_alone(
    door: Any, site: Any
) -> None:
    site.on("/busy", Page("later", status=503, headers={"Retry-After": "120"}))
    service = await door()
    async with service.session.get(
        service.base + "/v1/fetch", params={"url": "http://a.test/busy"}
    ) as response:
        assert (response.status, response.headers["Retry-After"]) == (503, "120")


async def test_the_wait_for_a_page_counts_as_a_wait_for_a_turn(door: Any, site: Any) -> None:
    service = await door()
    async with service.session.get(
        service.base + "/v1/fetch", params={"url": "http://a.test/page"}
    ) as response:
        await response.read()

    metrics = service.service.metrics.render().decode()
    assert "gatekeeper_queue_wait_seconds_count 1.0" in metrics


async def test_a_page_that_breaks_off_resets_the_connection_of_its_reader(
    door: Any, site: Any
) -> None:
    site.on("/big", Raw(b"HTTP/1.1 200 OK\r\n" + BEGUN["chunks"] + b"1\r\nx\r\n", "keep"))
    service = await door(fetch_max_body=4)
    with pytest.raises(aiohttp.ClientError):
        async with service.session.get(
            service.base + "/v1/fetch", params={"url": "http://a.test/big"}
        ) as response:
            await response.read()
