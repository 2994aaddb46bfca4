"""Shutdown and crash of the service: no lease is lost, and no site gets requests too often."""

from __future__ import annotations

import asyncio
import itertools
import signal
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest

from tests.internet import Drip, FakeInternet
from tests.waiting_support import until

ROBOTS = "User-agent: *\nDisallow: /private\n"
INTERVAL = 0.25
LEAST = INTERVAL - 0.05  # allows for the delay of a request
NO_DEFAULT = {"GATEKEEPER_PACING_DEFAULT_INTERVAL": "0"}
PACED = {"GATEKEEPER_PACING_DEFAULT_INTERVAL": str(INTERVAL)}


async def call(sidecar: Any, method: str, path: str, body: object = None) -> tuple[int, Any]:
    async with sidecar.session.request(method, sidecar.base + path, json=body) as response:
        text = await response.read()
        return response.status, await response.json(content_type=None) if text else None


async def held(sidecar: Any) -> float:
    async with sidecar.session.get(sidecar.base + "/metrics") as response:
        text = await response.text()
    [line] = [one for one in text.splitlines() if one.startswith('gatekeeper_leases{state="held"}')]
    return float(line.split()[1])


@dataclass
class Crawl:
    """Crawlers of some hosts, with the outcome of each of their leases."""

    sidecar: Any
    granted: set[str] = field(default_factory=set)
    reported: set[str] = field(default_factory=set)
    unsure: set[str] = field(default_factory=set)
    """Leases whose report was in flight when the process died."""
    refused: list[str] = field(default_factory=list)
    """Reasons given to the waiters that were refused."""
    stopping: bool = False

    async def take(self, url: str, **wanted: Any) -> str | None:
        body = {"url": url, **wanted}
        status, answer = await call(self.sidecar, "POST", "/v1/leases", body)
        if status != 201:
            self.refused.append(answer["type"].rpartition(":")[2])
            return None
        self.granted.add(answer["id"])
        return str(answer["id"])

    async def report(self, lease_id: str) -> None:
        self.unsure.add(lease_id)
        path = f"/v1/leases/{lease_id}/report"
        status, _ = await call(self.sidecar, "POST", path, {"status": 200})
        assert status == 204
        self.reported.add(lease_id)
        self.unsure.discard(lease_id)

    async def visit(self, url: str) -> None:
        async with aiohttp.ClientSession() as site:
            while not self.stopping:
                lease_id = await self.take(url, wait=60)
                if lease_id is None:
                    return
                async with site.get(url) as page:
                    await page.read()
                await self.report(lease_id)


@pytest.fixture
def hosts(internet: FakeInternet) -> list[str]:
    """URLs of three hosts, each with its own address."""
    found = []
    for _ in range(3):
        address = internet.address()
        internet.site(address, address=address).robots(ROBOTS).page("/page", "the page")
        found.append(f"http://{address}:{internet.listener(address).port()}/page")
    return found


def closest(internet: FakeInternet, url: str) -> float:
    """Return the shortest time between two requests to the host, by its own log."""
    host = url.split("/")[2].partition(":")[0]
    times = sorted(one.at for one in internet.requests if host in one.url)
    return min(later - earlier for earlier, later in itertools.pairwise(times))


def pages(internet: FakeInternet) -> int:
    return sum(one.path == "/page" for one in internet.requests)


async def test_t16_sigterm_under_load_loses_no_lease_and_violates_no_interval(
    start: Any, internet: FakeInternet, hosts: list[str]
) -> None:
    more = asyncio.Semaphore(0)
    streaming = internet.address()
    internet.site(streaming, address=streaming).robots(ROBOTS).on("/long", Drip("ab", every=more))
    long = f"http://{streaming}:{internet.listener(streaming).port()}/long"
    # Nothing is stored: leases not reported to this process are lost.
    crawl = Crawl(await start("--storage", "memory", env=PACED))
    sidecar = crawl.sidecar
    *busy, still = hosts
    opened = await crawl.take(still, wait=30)
    assert opened is not None
    fetch = {"url": long}
    async with sidecar.session.get(sidecar.base + "/v1/fetch", params=fetch) as stream:
        async with asyncio.TaskGroup() as crawlers:
            for url in busy:
                for _ in range(4):
                    crawlers.create_task(crawl.visit(url))
            for _ in range(3):
                crawlers.create_task(crawl.take(still, wait=60))
            await asyncio.wait_for(_until(lambda: pages(internet) >= 6), 40)
            crawl.stopping = True
            sidecar.tell(signal.SIGTERM)
        # Every poll is answered, though a lease and a stream are still open.
        assert len(crawl.refused) >= 3
        assert set(crawl.refused) == {"draining"}
        status, problem = await call(sidecar, "GET", f"/v1/fetch?url={still}")
        assert (status, problem["type"]) == (503, "urn:gatekeeper:problem:draining")
        await crawl.report(opened)
        more.release()
        more.release()
        assert await stream.read() == b"ab"

    assert await sidecar.stopped() == 0
    assert crawl.granted == crawl.reported
    assert pages(internet) == len(crawl.granted) - 1  # no page of `still` was requested
    assert min(closest(internet, url) for url in busy) > LEAST


async def test_t16_kill_9_under_load_loses_no_lease_and_violates_no_interval(
    start: Any, internet: FakeInternet, hosts: list[str]
) -> None:
    crawl = Crawl(await start(env=PACED))
    *busy, still = hosts
    opened = await crawl.take(still, wait=30, ttl=600)
    polls = [crawl.take(still, wait=60) for _ in range(3)]
    visits = [crawl.visit(url) for url in busy for _ in range(4)]
    tasks = [asyncio.create_task(one) for one in (*polls, *visits)]
    await asyncio.wait_for(_until(lambda: pages(internet) >= 6), 40)
    crawl.sidecar.process.kill()
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(one, aiohttp.ClientError) for one in ends)

    second = crawl.sidecar = await start(env=PACED)
    out = crawl.granted - crawl.reported - crawl.unsure
    assert opened in out
    assert await held(second) >= len(out)
    assert await crawl.take(still) is None  # its only slot is still taken
    for lease_id in out:
        await crawl.report(lease_id)
    for lease_id in crawl.unsure:  # accepted by the process that died, or by this one
        path = f"/v1/leases/{lease_id}/report"
        assert (await call(second, "POST", path, {"status": 200}))[0] in (204, 404)
    again = Crawl(second)
    async with asyncio.TaskGroup() as crawlers:
        visits = [crawlers.create_task(again.visit(url)) for url in hosts]
        before = pages(internet)
        await asyncio.wait_for(_until(lambda: pages(internet) >= before + 5), 40)
        again.stopping = True
    assert min(closest(internet, url) for url in hosts) > LEAST


@pytest.mark.parametrize("env", [NO_DEFAULT, {}], ids=["no interval", "the default"])
async def test_an_open_lease_keeps_its_host_busy_across_kill_9(
    start: Any, hosts: list[str], env: dict[str, str]
) -> None:
    crawl = Crawl(await start(env=env))
    wanted = {"wait": 5, "ttl": 600, "user_agent": "otherbot/2.0 (+http://b.test/)"}
    lease_id = await crawl.take(hosts[0], **wanted)
    crawl.sidecar.process.kill()
    await crawl.sidecar.stopped()

    second = crawl.sidecar = await start(env=env)
    name = hosts[0].split("/")[2].partition(":")[0]
    assert (await call(second, "GET", f"/v1/hosts/{name}"))[1]["state"] == "busy"
    assert await held(second) == 1
    waiting = asyncio.create_task(crawl.take(hosts[0], wait=60))
    status, renewed = await call(second, "POST", f"/v1/leases/{lease_id}/renew", {"ttl": 500})
    assert (status, renewed["id"]) == (200, lease_id)
    assert renewed["decision"]["user_agent"] == "otherbot"
    assert not waiting.done()
    await crawl.report(str(lease_id))
    assert await waiting is not None
    assert (await call(second, "POST", f"/v1/leases/{lease_id}/renew", {}))[0] == 404


async def test_t16_a_stream_is_given_its_time_to_end(serve: Any, internet: FakeInternet) -> None:
    more = asyncio.Semaphore(1)
    internet.site("a.test").robots(ROBOTS).on("/long", Drip("ab", every=more))
    service = await serve(drain_grace=0.0)
    params = {"url": "http://a.test/long"}
    async with service.session.get(service.base + "/v1/fetch", params=params) as stream:
        assert await stream.content.readexactly(1) == b"a"
        draining = asyncio.create_task(service.service.drain([]))
        await until(lambda: service.service.phase == "draining")
        status, problem = await service.get("/v1/fetch", params=params)
        assert (status, problem["type"]) == (503, "urn:gatekeeper:problem:draining")
        assert not draining.done()
        more.release()
        assert await stream.read() == b"b"
    await draining


async def test_fetch_of_a_blocked_host_has_a_retry_after(
    serve: Any, internet: FakeInternet
) -> None:
    internet.site("a.test").robots(ROBOTS).page("/page", "the page")
    service = await serve()
    await service.service.gate.check("http://a.test/")
    await service.post("/v1/hosts/a.test/block", {"seconds": 90, "reason": "they asked"})
    url = service.base + "/v1/fetch"
    async with service.session.get(url, params={"url": "http://a.test/page"}) as answer:
        told = await answer.json(content_type=None)

    assert answer.status == 429
    assert 85 <= int(answer.headers["Retry-After"]) <= 90
    assert "they asked" in told["detail"]
    refused = {"url": "http://a.test/private"}  # a denial, not a deferral
    assert (await service.get("/v1/fetch", params=refused))[0] == 403


async def test_t8_waiting_fetches_count_as_waiting_clients(
    serve: Any, internet: FakeInternet
) -> None:
    internet.site("a.test").robots(ROBOTS).page("/page", "the page")
    service = await serve(max_waiting=1)
    url = "http://a.test/page"
    status, lease = await service.post("/v1/leases", {"url": url, "wait": 30})
    assert status == 201
    waiting = asyncio.create_task(service.get("/v1/fetch", params={"url": url}))
    await until(lambda: len(service.service.leases.waiters))
    status, problem = await service.get("/v1/fetch", params={"url": url})
    assert (status, problem["type"]) == (503, "urn:gatekeeper:problem:full")
    waiting.cancel()
    await asyncio.wait([waiting])
    await service.post(f"/v1/leases/{lease['id']}/report", {"status": 200})


async def _until(happened: Any) -> None:
    await until(happened)
