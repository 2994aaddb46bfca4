"""The contract of the HTTP API, over a real gate and the fake internet."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import aiohttp
import pytest

from gatekeeper.sidecar import service as service_module
from tests.internet import Encoded, FakeInternet, Page, Truncated, redirect
from tests.sidecar.conftest import sent

ROBOTS = "User-agent: *\nAllow: /private/open\nDisallow: /private\nSitemap: http://a.test/s.xml\n"
STATES = ("idle", "waiting", "blocked", "paused")


@pytest.fixture
def site(internet: FakeInternet) -> Any:
    site = internet.site("a.test").robots(ROBOTS)
    site.page("/page", "the page")
    return site


# -- explain and robots ---------------------------------------------------------------------


async def test_explain_has_decision_file_candidates_and_fetch(serve: Any, site: Any) -> None:
    service = await serve()
    status, story = await service.get("/v1/explain", params={"url": "http://a.test/private/open"})

    assert status == 200
    assert story["decision"]["verdict"] == "allow"
    assert story["robots_txt"] == ROBOTS
    assert [one["line"] for one in story["candidates"]] == [2, 3]
    assert story["candidates"][0]["length"] > story["candidates"][1]["length"]
    assert story["fetch"]["status"] == 200
    assert story["fetch"]["size"] == len(ROBOTS)


async def test_explain_tells_an_ignored_content_encoding(
    serve: Any, internet: FakeInternet
) -> None:
    page = Page(ROBOTS, headers=[("Content-Encoding", "utf-8")])
    internet.site("a.test").robots(page)
    service = await serve()
    _, story = await service.get("/v1/explain", params={"url": "http://a.test/x"})
    assert story["fetch"]["ignored_coding"] == "utf-8"
    _, file = await service.get("/v1/robots", params={"origin": "http://a.test"})
    assert ["encoding", "warning"] in [[one["code"], one["severity"]] for one in file["findings"]]
    internet.site("a.test").robots(ROBOTS)
    await service.service.gate.refresh("http://a.test")
    _, story = await service.get("/v1/explain", params={"url": "http://a.test/x"})
    assert story["fetch"]["ignored_coding"] is None


async def test_t2_explain_of_a_refused_url_says_one_word_and_asks_nobody(
    serve: Any, internet: FakeInternet
) -> None:
    service = await serve()
    _, story = await service.get("/v1/explain", params={"url": "http://10.0.0.1/"})

    assert story["decision"]["reason"] == "blocked"
    assert (story["robots_txt"], story["fetch"], story["candidates"]) == (None, None, [])
    assert internet.requests == []


async def test_what_if_answers_for_a_text_and_stores_nothing(
    serve: Any, internet: FakeInternet
) -> None:
    service = await serve()
    body = {
        "robots_txt": "User-agent: otherbot\nDisallow: /x\n",
        "url": "http://a.test/x/y",
        "user_agent": "otherbot/2.0",
    }
    status, story = await service.post("/v1/explain", body)

    assert (status, story["decision"]["verdict"], story["decision"]["rule"]["line"]) == (
        200,
        "deny",
        2,
    )
    assert story["fetch"] is None
    assert internet.requests == []
    assert service.service.gate.stats().decisions == {}


async def test_robots_gives_the_parsed_file(serve: Any, site: Any) -> None:
    service = await serve()
    status, found = await service.get("/v1/robots", params={"origin": "http://a.test"})

    assert status == 200
    assert found["sitemaps"] == ["http://a.test/s.xml"]
    assert [rule["value"] for rule in found["groups"][0]["rules"]] == ["/private/open", "/private"]
    assert found["timing"] == {"crawl_delay": None, "request_rates": [], "visit_times": []}


async def test_robots_of_a_url_with_a_path_is_refused(serve: Any, site: Any) -> None:
    service = await serve()
    assert (await service.get("/v1/robots", params={"origin": "http://a.test/x"}))[0] == 400


# -- leases ---------------------------------------------------------------------------------


async def test_a_lease_is_granted_reported_and_gone(serve: Any, site: Any) -> None:
    service = await serve()
    status, lease = await service.post("/v1/leases", {"url": "http://a.test/page", "wait": 5})
    assert status == 201
    assert set(lease) == {"id", "url", "not_before", "expires_at", "decision"}
    assert lease["decision"]["verdict"] == "allow"

    report = f"/v1/leases/{lease['id']}/report"
    assert (await service.post(report, {"status": 200, "elapsed": 0.1, "size": 8}))[0] == 204
    assert len(service.service.leases) == 0


async def test_a_denied_lease_is_403_and_says_why(serve: Any, site: Any) -> None:
    service = await serve()
    status, problem = await service.post("/v1/leases", {"url": "http://a.test/private", "wait": 5})

    assert status == 403
    assert problem["decision"]["rule"]["line"] == 3


async def test_a_deferred_lease_is_429_with_retry_after(serve: Any, internet: FakeInternet) -> None:
    internet.site("a.test").on("/robots.txt", Page(status=503))
    service = await serve()
    async with service.session.post(
        service.base + "/v1/leases", json={"url": "http://a.test/", "wait": 5}
    ) as response:
        problem = await response.json(content_type="application/problem+json")

    assert response.status == 429
    assert int(response.headers["Retry-After"]) >= 1
    assert problem["decision"]["verdict"] == "defer"


async def test_a_reported_429_blocks_the_host(serve: Any, site: Any) -> None:
    service = await serve()
    _, lease = await service.post("/v1/leases", {"url": "http://a.test/page", "wait": 5})
    report = f"/v1/leases/{lease['id']}/report"
    await service.post(report, {"status": 429, "retry_after": "120"})

    async with service.session.post(
        service.base + "/v1/leases", json={"url": "http://a.test/page"}
    ) as response:
        assert response.status == 429
        assert 100 < int(response.headers["Retry-After"]) <= 120
    _, host = await service.get("/v1/hosts/a.test")
    assert host["state"] == "blocked"


async def test_a_client_that_hangs_up_gives_its_place_back(serve: Any, site: Any) -> None:
    service = await serve()
    _, lease = await service.post("/v1/leases", {"url": "http://a.test/page", "wait": 5})
    with pytest.raises(TimeoutError):
        await service.post(
            "/v1/leases",
            {"url": "http://a.test/page", "wait": 60},
            timeout=aiohttp.ClientTimeout(total=0.05),
        )
    waiting = asyncio.create_task(
        service.post("/v1/leases", {"url": "http://a.test/page", "wait": 60})
    )
    await service.post(f"/v1/leases/{lease['id']}/report", {"status": 200})

    status, _ = await waiting
    assert status == 201  # not granted to the client that left


async def test_a_lease_given_back_frees_its_slot(serve: Any, site: Any) -> None:
    service = await serve()
    _, lease = await service.post("/v1/leases", {"url": "http://a.test/page", "wait": 5})
    async with service.session.delete(f"{service.base}/v1/leases/{lease['id']}") as response:
        assert response.status == 204

    assert (await service.post("/v1/leases", {"url": "http://a.test/page", "wait": 5}))[0] == 201


@pytest.mark.parametrize("met", [False, True], ids=["new host", "met host"])
async def test_nothing_is_granted_under_an_id_that_was_given_back(
    serve: Any, site: Any, met: bool
) -> None:
    service = await serve()
    wanted = {"url": "http://a.test/page", "wait": 5}
    if met:  # the lease is granted inline, without a task
        _, lease = await service.post("/v1/leases", wanted)
        await service.post(f"/v1/leases/{lease['id']}/report", {"status": 200})
    name = "a_name-of-its-client"
    async with service.session.delete(f"{service.base}/v1/leases/{name}") as response:
        assert response.status == 404
    status, told = await service.post("/v1/leases", {**wanted, "id": name})
    assert (status, told["type"]) == (410, "urn:gatekeeper:problem:given-back")

    assert (await service.post("/v1/leases", wanted))[0] == 201


async def test_a_lease_is_renewed(serve: Any, site: Any) -> None:
    service = await serve()
    _, lease = await service.post("/v1/leases", {"url": "http://a.test/page", "wait": 5, "ttl": 10})
    status, renewed = await service.post(f"/v1/leases/{lease['id']}/renew", {"ttl": 600})

    assert status == 200
    assert renewed["id"] == lease["id"]
    assert renewed["expires_at"] > lease["expires_at"]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"url": "nope"},
        {"url": "http://a.test/", "ttl": 601},
        {"url": "http://a.test/", "ttl": 0},
        {"url": "http://a.test/", "wait": -1},
        {"url": "http://a.test/", "wait": 301},
        {"url": "http://a.test/", "prority": 1},
    ],
)
async def test_a_bad_request_for_a_lease_is_400(serve: Any, body: dict[str, object]) -> None:
    service = await serve()
    assert (await service.post("/v1/leases", body))[0] == 400


# -- fetch ----------------------------------------------------------------------------------


async def test_fetch_streams_the_page_with_the_decision_in_its_headers(
    serve: Any, site: Any
) -> None:
    service = await serve()
    async with service.session.get(
        service.base + "/v1/fetch", params={"url": "http://a.test/page"}
    ) as response:
        assert await response.text() == "the page"

    assert response.status == 200
    assert response.headers["X-Gatekeeper-Verdict"] == "allow"
    assert response.headers["X-Gatekeeper-Decision-Id"]
    assert response.headers["Content-Location"] == "http://a.test/page"


async def test_t12_a_fetched_page_is_sandboxed_in_a_browser(serve: Any, site: Any) -> None:
    service = await serve()
    async with service.session.get(
        service.base + "/v1/fetch", params={"url": "http://a.test/page"}
    ) as response:
        headers = response.headers

    assert headers["Content-Security-Policy"] == "sandbox; default-src 'none'"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Content-Disposition"] == "attachment"
    assert headers["Referrer-Policy"] == "no-referrer"


async def test_fetch_passes_conditions_and_status_on(serve: Any, site: Any) -> None:
    site.on("/old", Page(status=304, headers={"ETag": '"v1"'}))
    service = await serve()
    async with service.session.get(
        service.base + "/v1/fetch",
        params={"url": "http://a.test/old"},
        headers={"If-None-Match": '"v1"', "Range": "bytes=0-3", "Cookie": "secret=1"},
    ) as response:
        assert (response.status, response.headers["ETag"]) == (304, '"v1"')

    [asked] = [one for one in site.requests if one.path == "/old"]
    assert asked.headers["If-None-Match"] == '"v1"'
    assert asked.headers["Range"] == "bytes=0-3"
    assert "Cookie" not in asked.headers


async def test_fetch_passes_an_encoded_body_as_it_is(serve: Any, site: Any) -> None:
    site.on("/zipped", Encoded("the page", "gzip"))
    service = await serve()
    async with service.session.get(
        service.base + "/v1/fetch",
        params={"url": "http://a.test/zipped"},
        headers={"Accept-Encoding": "gzip"},
    ) as response:
        body = await response.read()

    assert response.headers["Content-Encoding"] == "gzip"
    assert body[:2] == b"\x1f\x8b"


async def test_fetch_of_a_denied_page_asks_the_site_nothing(serve: Any, site: Any) -> None:
    service = await serve()
    status, _ = await service.get("/v1/fetch", params={"url": "http://a.test/private"})

    assert status == 403
    assert site.paths == ["/robots.txt"]


async def test_t1_fetch_follows_no_redirect_to_a_private_address(serve: Any, site: Any) -> None:
    site.on("/go", redirect("http://10.0.0.1/secret"))
    service = await serve()
    status, problem = await service.get("/v1/fetch", params={"url": "http://a.test/go"})

    assert status == 403
    assert "private" not in problem["detail"]  # T2


async def test_fetch_is_bounded_in_size(serve: Any, site: Any) -> None:
    site.page("/big", "x" * 5000)
    service = await serve(fetch_max_body=4999)
    assert (await service.get("/v1/fetch", params={"url": "http://a.test/big"}))[0] == 502


async def test_fetch_of_a_page_that_breaks_off_breaks_off(serve: Any, site: Any) -> None:
    site.on("/cut", Truncated("x" * 5000, 1000))
    service = await serve()
    with pytest.raises(aiohttp.ClientError):
        async with service.session.get(
            service.base + "/v1/fetch", params={"url": "http://a.test/cut"}
        ) as response:
            await response.read()


# -- hosts ----------------------------------------------------------------------------------


async def test_hosts_are_listed_filtered_and_paged(serve: Any, internet: FakeInternet) -> None:
    for name in ("a.test", "b.test", "c.test"):
        internet.site(name).robots("")
    service = await serve()
    urls = [f"http://{name}.test/" for name in "abc"]
    await service.post("/v1/check", {"urls": urls})

    _, page = await service.get("/v1/hosts", params={"per_page": 2, "sort": "-host"})
    assert [one["host"] for one in page["hosts"]] == ["c.test", "b.test"]
    assert (page["total"], page["pages"]) == (3, 2)
    _, found = await service.get("/v1/hosts", params={"q": "B.T"})
    assert [one["host"] for one in found["hosts"]] == ["b.test"]


async def test_a_paused_host_grants_nothing_until_resumed(serve: Any, site: Any) -> None:
    service = await serve()
    assert (await service.post("/v1/hosts/A.TEST/pause", {}))[1]["state"] == "paused"
    _, page = await service.get("/v1/hosts", params={"state": "paused"})
    assert page["total"] == 1
    assert (await service.post("/v1/leases", {"url": "http://a.test/page", "wait": 1}))[0] == 429

    await service.post("/v1/hosts/a.test/resume", {})
    assert (await service.post("/v1/leases", {"url": "http://a.test/page", "wait": 5}))[0] == 201


async def test_a_blocked_host_waits_for_its_moment(serve: Any, site: Any) -> None:
    service = await serve()
    status, host = await service.post("/v1/hosts/a.test/block", {"seconds": 60, "reason": "x"})

    assert (status, host["state"]) == (200, "blocked")
    assert any(one["kind"] == "block" and one["source"] == "x" for one in host["clocks"])
    assert (await service.post("/v1/hosts/a.test/block", {}))[0] == 400


async def test_a_refresh_that_cannot_begin_says_so(
    serve: Any, site: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "MAX_BACKGROUND", 0)
    service = await serve()
    status, problem = await service.post("/v1/hosts/a.test/refresh", {})
    assert (status, problem["title"]) == (503, "Service Unavailable")


async def test_refresh_fetches_the_file_again(serve: Any, site: Any) -> None:
    service = await serve()
    await service.get("/v1/check", params={"url": "http://a.test/"})
    await service.post("/v1/hosts/a.test/refresh", {})

    assert site.paths.count("/robots.txt") == 2


async def test_t4_control_wants_a_json_body(serve: Any, site: Any) -> None:
    service = await serve()
    async with service.session.post(
        service.base + "/v1/hosts/a.test/pause", data="{}", headers={"Content-Type": "text/plain"}
    ) as response:
        assert response.status == 415


# -- the service itself ---------------------------------------------------------------------


async def test_the_index_lists_what_can_be_asked(serve: Any) -> None:
    service = await serve()
    status, index = await service.get("/")
    assert status == 200
    assert {"GET", "/v1/check"} <= set(index["links"][0].values())
    assert not [link for link in index["links"] if link["path"].startswith("/ui")]


async def test_the_links_of_every_page_can_be_followed(serve: Any) -> None:
    service = await serve()
    async with service.session.get(service.base + "/", headers={"Accept": "text/html"}) as page:
        assert page.content_type == "text/html"
        assert "default-src 'none'" in page.headers["Content-Security-Policy"]
        text = await page.text()
    links = re.findall('href="([^"#]+)"', text)
    assert {"./hosts", "./explain", "./live", "./config"} <= set(links)
    for link in links:
        async with service.session.get(f"{service.base}/ui/{link}") as answer:
            assert answer.status == 200, link


async def test_t10_metrics_carry_no_host_and_no_url(serve: Any, site: Any) -> None:
    service = await serve()
    await service.get("/v1/check", params={"url": "http://a.test/private"})
    await service.get("/a.test/nothing")
    async with service.session.get(service.base + "/metrics") as response:
        text = await response.text()

    assert 'gatekeeper_decisions_total{outcome="deny",reason="rule"} 1.0' in text
    assert 'route="unmatched"' in text
    assert "a.test" not in text


async def test_metrics_say_what_holds_hosts_up(serve: Any, site: Any) -> None:
    service = await serve()
    gate = service.service.gate
    for name in ("a.test", "b.test", "c.test"):
        await gate.block(name, 0)  # so that the host is known
    await gate.block("a.test", gate.parts.clock.wall() + 60)
    await gate.pause("b.test")
    async with service.session.get(service.base + "/metrics") as response:
        text = await response.text()

    found = {state: f'gatekeeper_hosts{{state="{state}"}} 1.0' in text for state in STATES}
    assert found == {"idle": True, "waiting": False, "blocked": True, "paused": True}
    assert 'gatekeeper_hosts{state="waiting"} 0.0' in text


@pytest.mark.parametrize(
    "data",
    [b"GET / HTTP/9\r\n\r\n", b"\x16\x03\x01\x02\x00", b"GET / HTTP/1.1\r\nBad Header: x\r\n\r\n"],
)
async def test_a_request_that_is_no_http_gets_a_problem_document(serve: Any, data: bytes) -> None:
    service = await serve()
    answer = await sent(service.base, data)
    assert answer.startswith(b"HTTP/1.1 400 ") or answer.startswith(b"HTTP/1.0 400 ")
    assert b"application/problem+json" in answer
