"""`/v1/fetch`: redirects, slow and broken responses."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from gatekeeper.clock import VirtualClock
from tests.internet import FakeInternet, Interim, NeverAnswer, Page, Raw, redirect
from tests.sidecar.conftest import connected
from tests.sidecar.decision_log_support import LogOf
from tests.waiting_support import until

OPEN = "User-agent: *\nDisallow: /private\n"


@pytest.fixture
def site(internet: FakeInternet) -> Any:
    return internet.site("a.test").robots(OPEN).page("/page", "the page")


async def everything(service: Any, url: str) -> tuple[bytes, BaseException | None]:
    """Return what a plain reader gets from a fetch, and the error that ended it, if any."""
    got = b""
    async with connected(service.base) as (reader, writer):
        writer.write(f"GET /v1/fetch?url={url} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
        try:
            while piece := await reader.read(65_536):
                got += piece
                service.arrived.set()
        except ConnectionError as broken:
            return got, broken
    return got, None


BEGUN = {
    "a length": b"Content-Length: 2000\r\n\r\nxxxx",
    "chunks": b"Transfer-Encoding: chunked\r\n\r\n4\r\nxxxx\r\n",
}


@pytest.mark.parametrize("begun", BEGUN)
async def test_a_page_that_takes_too_long_is_cut_off_and_frees_its_lease(
    serve: Any, site: Any, begun: str
) -> None:
    site.on("/slow", Raw(b"HTTP/1.1 200 OK\r\n" + BEGUN[begun], "keep"))
    service = await serve(fetch_timeout=3.0)
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
    assert isinstance(error, ConnectionResetError)  # not the regular end of a body


async def test_a_page_that_takes_too_long_to_begin_is_504(serve: Any, site: Any) -> None:
    site.on("/slow", NeverAnswer())
    service = await serve(fetch_timeout=3.0)
    await service.get("/v1/check", params={"url": "http://a.test/"})
    clock = service.service.clock = VirtualClock()
    asking = asyncio.create_task(service.get("/v1/fetch", params={"url": "http://a.test/slow"}))
    await until(lambda: "/slow" in site.paths)
    await clock.elapse(3.0)

    assert (await asking)[0] == 504


async def test_fetch_follows_redirects_to_the_page(serve: Any, site: Any) -> None:
    site.on("/go", redirect("/here")).on("/here", redirect("//a.test/page", 307))
    service = await serve()
    async with service.session.get(
        service.base + "/v1/fetch", params={"url": "http://a.test/go"}
    ) as response:
        assert (response.status, await response.text()) == (200, "the page")

    assert response.headers["Content-Location"] == "http://a.test/page"
    assert site.paths == ["/robots.txt", "/go", "/here", "/page"]


async def test_t9_fetch_follows_five_redirects_and_no_sixth(serve: Any, site: Any) -> None:
    for n in range(6):
        site.on(f"/{n}", redirect(f"/{n + 1}"))
    site.page("/6", "the page")
    service = await serve()

    assert (await service.get("/v1/fetch", params={"url": "http://a.test/0"}))[0] == 502
    assert site.paths == ["/robots.txt", *(f"/{n}" for n in range(6))]
    async with service.session.get(
        service.base + "/v1/fetch", params={"url": "http://a.test/1"}
    ) as response:
        assert (response.status, await response.text()) == (200, "the page")


@pytest.mark.parametrize("location", ["http://u:p@a.test/page", "//u:p@a.test/page"])
async def test_t1_fetch_takes_no_credentials_from_a_redirect(
    serve: Any, site: Any, location: str
) -> None:
    site.on("/go", redirect(location))
    service = await serve()
    status, problem = await service.get("/v1/fetch", params={"url": "http://a.test/go"})

    assert (status, problem["decision"]["reason"]) == (403, "blocked")
    assert site.paths == ["/robots.txt", "/go"]


@pytest.mark.parametrize("location", ["ftp://a.test/page", "http:page", "http://[/"])
async def test_a_redirect_to_what_is_no_url_is_502(serve: Any, site: Any, location: str) -> None:
    site.on("/go", redirect(location))
    service = await serve()
    assert (await service.get("/v1/fetch", params={"url": "http://a.test/go"}))[0] == 502


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (
            b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
            "the site's answer can't be read: ",  # followed by aiohttp's message
        ),
        (b"\x00\xff no HTTP\r\n\r\n", "the site's answer can't be read: "),
        (b"", "the site broke the connection off"),
    ],
    ids=["two lengths", "no HTTP", "nothing"],
)
async def test_a_broken_response_of_a_page_is_502_with_the_reason(
    serve: Any, site: Any, data: bytes, why: str
) -> None:
    site.on("/odd", Raw(data))
    service = await serve()
    status, problem = await service.get("/v1/fetch", params={"url": "http://a.test/odd"})
    assert (status, problem["detail"][: len(why)]) == (502, why)
    assert "Error" not in problem["detail"]
    assert "b'" not in problem["detail"]


async def test_a_redirect_without_location_is_passed_on(serve: Any, site: Any) -> None:
    site.on("/go", Page("nowhere", status=302))
    service = await serve()
    async with service.session.get(
        service.base + "/v1/fetch", params={"url": "http://a.test/go"}
    ) as response:
        assert (response.status, await response.text()) == (302, "nowhere")


async def test_t20_each_hop_has_a_decision_in_the_log(serve: Any, site: Any) -> None:
    site.on("/go", redirect("/private"))
    service = await serve()
    log = LogOf(service.service)
    _, problem = await service.get("/v1/fetch", params={"url": "http://a.test/go"})

    told = problem["decision"]
    lines = [(one["url"], one["verdict"], one["user_agent"]) for one in log.lines()]
    assert lines == [
        ("http://a.test/go", "allow", "testbot"),
        ("http://a.test/private", "deny", "testbot"),
    ]
    assert told["id"] == log.lines()[1]["id"]


async def test_t20_a_denial_at_the_socket_has_an_id_a_name_and_a_line(
    serve: Any, internet: FakeInternet
) -> None:
    internet.site("rebound.example").robots(OPEN).page("/page", "the page")
    internet.dns("rebound.example", "127.0.0.1", "10.0.0.1")
    service = await serve()
    log = LogOf(service.service)
    asked = {"url": "http://rebound.example/page"}
    status, problem = await service.get("/v1/fetch", params=asked)

    told = problem["decision"]
    assert (status, told["reason"], told["user_agent"]) == (403, "blocked", "testbot")
    assert told["id"]
    assert [one["id"] for one in log.lines()][-1] == told["id"]


async def test_fetch_passes_on_how_long_the_site_wants_to_be_left_alone(
    serve: Any, site: Any
) -> None:
    site.on("/busy", Page("later", status=503, headers={"Retry-After": "120"}))
    service = await serve()
    async with service.session.get(
        service.base + "/v1/fetch", params={"url": "http://a.test/busy"}
    ) as response:
        assert (response.status, response.headers["Retry-After"]) == (503, "120")


async def test_the_wait_for_a_page_counts_as_a_wait_for_a_lease(serve: Any, site: Any) -> None:
    service = await serve()
    async with service.session.get(
        service.base + "/v1/fetch", params={"url": "http://a.test/page"}
    ) as response:
        await response.read()

    metrics = service.service.metrics.render()[0].decode()
    assert "gatekeeper_queue_wait_seconds_count 1.0" in metrics


async def test_a_page_that_breaks_off_resets_the_connection_of_its_reader(
    serve: Any, site: Any
) -> None:
    site.on("/big", Raw(b"HTTP/1.1 200 OK\r\n" + BEGUN["chunks"] + b"1\r\nx\r\n", "keep"))
    service = await serve(fetch_max_body=4)
    with pytest.raises(aiohttp.ClientError):
        async with service.session.get(
            service.base + "/v1/fetch", params={"url": "http://a.test/big"}
        ) as response:
            await response.read()


@pytest.mark.parametrize("status", [101, 199, 600, 700, 999])
async def test_a_status_outside_http_is_502(serve: Any, site: Any, status: int) -> None:
    site.on("/odd", Raw(b"HTTP/1.1 %d Odd\r\nContent-Length: 0\r\n\r\n" % status, "close"))
    service = await serve()
    asked = {"url": "http://a.test/odd"}
    async with service.session.get(service.base + "/v1/fetch", params=asked) as response:
        assert response.status == 502
        assert response.content_type == "application/problem+json"
    assert service.service.metrics.requests["/v1/fetch", "GET", 502] == 1


@pytest.mark.parametrize("status", [200, 204, 205, 299, 304, 400, 599])
async def test_any_other_status_is_passed_on(serve: Any, site: Any, status: int) -> None:
    site.on("/page", Page("" if status in (204, 205, 304) else "text", status=status))
    service = await serve()
    asked = {"url": "http://a.test/page"}
    async with service.session.get(service.base + "/v1/fetch", params=asked) as response:
        assert response.status == status
        await response.read()


@pytest.mark.parametrize("name", ["ETag", "Content-Type", "Retry-After", "X-Robots-Tag"])
@pytest.mark.parametrize("value", [b"caf\xe9", b"\xff\xfe", b"a\x7fb", b"\xed\xa0\x80"])
async def test_a_header_that_cannot_be_sent_is_502(
    serve: Any, site: Any, name: str, value: bytes
) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n" + name.encode() + b": " + value
    site.on("/odd", Raw(head + b"\r\n\r\n", "close"))
    service = await serve()
    assert (await service.get("/v1/fetch", params={"url": "http://a.test/odd"}))[0] == 502


async def test_a_page_with_a_long_head_is_passed_on_without_what_clients_refuse(
    serve: Any, site: Any
) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Security-Policy: " + b"x" * 60_000
    head += b"\r\nVary: " + b"y" * 9_000 + b"\r\nETag: short\r\n"
    site.on("/long", Raw(head + b"X: z\r\n" * 500 + b"\r\nok"))
    service = await serve()
    asked = {"url": "http://a.test/long"}
    async with service.session.get(service.base + "/v1/fetch", params=asked) as response:
        assert (response.status, await response.read()) == (200, b"ok")
        assert response.headers["ETag"] == "short"
        assert "Vary" not in response.headers


async def test_a_header_in_utf_8_is_passed_on(serve: Any, site: Any) -> None:
    head = 'HTTP/1.1 200 OK\r\nContent-Length: 0\r\nETag: "café"\r\n\r\n'
    site.on("/page", Raw(head.encode(), "close"))
    service = await serve()
    asked = {"url": "http://a.test/page"}
    async with service.session.get(service.base + "/v1/fetch", params=asked) as response:
        assert (response.status, response.headers["ETag"]) == (200, '"café"')


async def test_t12_a_fetched_response_sets_no_cookie_and_runs_no_script(
    serve: Any, site: Any
) -> None:
    cookies = [("Set-Cookie", "a=1"), ("Set-Cookie2", "b=2"), ("Content-Type", "text/html")]
    headers = [*cookies, ("Content-Security-Policy", "script-src *")]
    site.on("/page", Page("<script>", headers=headers)).on("/busy", Page("x", status=700))
    service = await serve()
    for path, status in (("/page", 200), ("/busy", 502), ("/private", 403)):
        asked = {"url": "http://a.test" + path}
        async with service.session.get(service.base + "/v1/fetch", params=asked) as response:
            assert response.status == status
            [policy] = response.headers.getall("Content-Security-Policy")
            assert policy.split(";")[0] == "sandbox"
            assert response.headers.getall("X-Content-Type-Options") == ["nosniff"]
            assert not [name for name in response.headers if name.lower().startswith("set-")]


async def test_a_flood_of_interim_responses_does_not_delay_other_requests(
    serve: Any, site: Any, internet: FakeInternet
) -> None:
    """Endless interim responses, for a page and for robots.txt: both end; probes are answered."""
    site.on("/flood", Interim(100))
    internet.site("b.test").on("/robots.txt", Interim(103))
    service = await serve()
    async with asyncio.timeout(30.0):  # a response that is read on and on would never end
        page = asyncio.create_task(service.get("/v1/fetch", params={"url": "http://a.test/flood"}))
        check = asyncio.create_task(service.get("/v1/check", params={"url": "http://b.test/"}))
        answered = 0
        while not (page.done() and check.done()):
            assert (await service.get("/healthz"))[0] == 200
            answered += 1
        assert (await page)[0] == 502
        assert (await check)[1]["verdict"] == "defer"
    assert answered


async def test_the_last_status_of_a_page_is_shown_with_its_host(
    serve: Any, site: Any, internet: FakeInternet
) -> None:
    site.on("/moved", redirect("http://b.test/page"))
    internet.site("b.test").robots(OPEN).page("/page", "{}")
    service = await serve()
    assert (await service.get("/v1/fetch?url=http://a.test/moved"))[0] == 200
    told = [(await service.get(f"/v1/hosts/{host}"))[1] for host in ("a.test", "b.test")]
    assert [host["last_status"] for host in told] == [302, 200]
