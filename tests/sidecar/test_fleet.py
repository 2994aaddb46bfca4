"""Sidecars that share a store: one pace, and a 503 with the reason while the store is gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from gatekeeper.fleet import redis_ledger
from gatekeeper.gate import robots_pacing
from gatekeeper.sidecar.routing import Role
from gatekeeper.sidecar.security import Token, Tokens
from tests.fleet.server import BINARY, Server
from tests.internet import FakeInternet, free_port
from tests.waiting_support import until

pytestmark = pytest.mark.skipif(BINARY is None, reason="no redis-server here")


@pytest.fixture(autouse=True)
def frequent_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member notices sooner that its store is gone."""
    monkeypatch.setattr(redis_ledger, "HEARTBEAT_SECONDS", 0.2)


@pytest.fixture
def empty_store() -> Iterator[Server]:
    """The store of a new fleet, which grants nothing for some seconds."""
    server = Server()
    server.start()
    yield server
    server.close()


@pytest.fixture
def store(empty_store: Server) -> Server:
    """The store of a fleet that began long ago."""
    empty_store.begin_long_ago("gatekeeper")
    return empty_store


@pytest.fixture
async def page(internet: FakeInternet) -> str:
    site = internet.site("127.0.0.1").robots("User-agent: *\nCrawl-delay: 0.2\n")
    site.page("/page", "the page")
    return f"http://127.0.0.1:{internet.listener().port()}/page"


Open = Callable[..., Awaitable[Any]]


async def until_201(sidecar: Any, page: str) -> str:
    """Acquire a lease, once the quarantine of an empty store is over. Return its id."""
    for _ in range(200):
        status, said = await sidecar.post("/v1/leases", {"url": page, "wait": 0})
        if status == 201:
            return str(said["id"])
        assert status in (429, 503), said
        await asyncio.sleep(0.05)
    raise AssertionError("no lease")


async def until_unready(sidecar: Any) -> Any:
    """Return the answer of `/readyz` once the service has noticed that its store is gone."""
    async with asyncio.timeout(60.0):
        while (answer := await sidecar.get("/readyz"))[0] != 503:
            pass
    return answer[1]


async def test_two_sidecars_share_a_host_and_say_when_their_store_is_away(
    serve: Open, store: Server, page: str
) -> None:
    fleet = {"url": store.url, "hold": 1.0}
    one, other = await serve(fleet=fleet), await serve(fleet=fleet)
    lease = await until_201(one, page)
    # One request at a time in the whole fleet, also without waiting for a lease.
    status, said = await other.post("/v1/leases", {"url": page, "wait": 0})
    assert (status, said["type"].rpartition(":")[2]) == (429, "not-yet")
    await a_refusal_names_the_member(other, page, one.service.gate.stats().fleet.member)
    status, _ = await one.post(f"/v1/leases/{lease}/report", {"status": 200})
    assert status == 204
    lease = await until_201(other, page)
    await other.post(f"/v1/leases/{lease}/report", {"status": 200})
    async with one.session.get(one.base + "/metrics") as response:
        metrics = await response.text()
    assert 'gatekeeper_fleet_state{state="connected"} 1.0' in metrics
    assert "gatekeeper_fleet_members 2.0" in metrics

    store.kill()
    said = await until_unready(one)
    assert "fleet" in said["detail"]
    status, said = await one.post("/v1/leases", {"url": page, "wait": 0})
    assert status == 503
    assert said["type"].endswith(":fleet")
    assert said["decision"]["reason"] == "fleet"
    status, said = await one.post("/v1/leases", {"url": "http://127.0.0.9:8080/", "wait": 0})
    assert (status, said["decision"]["reason"]) == (503, "fleet")  # of an unknown host as well
    assert said["decision"]["note"] == "the fleet's store can't be reached"
    status, said = await one.get(f"/v1/check?url={page}")
    assert (status, said["verdict"]) == (200, "allow")  # cached records still answer
    assert "the fleet's store can't be reached" in await fleet_clocks(one)

    store.start()
    await until_201(one, page)
    assert await fleet_clocks(one) == []
    assert (await one.get("/readyz"))[0] == 200


async def fleet_clocks(serve: Any) -> list[str]:
    """Return why the fleet's store grants nothing, as shown with the clocks of a host."""
    _, body = await serve.get("/v1/hosts/127.0.0.1")
    return [one["source"] for one in body["clocks"] if one["kind"] == "fleet"]


async def a_refusal_names_the_member(serve: Any, page: str, member: str) -> None:
    """A lease that does not come in time is refused with what holds the host; admins see whose."""
    names = {"crawler": {Role.CRAWL}, "boss": {Role.CRAWL, Role.ADMIN}}
    tokens = Tokens([Token(f"{n:x<40}".encode(), n, frozenset(r)) for n, r in names.items()])
    serve.service.apply_config(serve.service.config, tokens)
    for name in names:
        headers = {"Authorization": f"Bearer {name:x<40}"}
        want = {"url": page, "wait": 0}
        status, said = await serve.post("/v1/leases", want, headers=headers)
        assert status == 429
        assert said["held_since"] < said["held_until"]
        assert " holds the host since " in said["detail"]
        if name == "boss":
            assert said["held_by"].startswith(f"{member}.")
        else:
            assert member not in str(said)
    serve.service.apply_config(serve.service.config, Tokens([]))


async def test_no_response_shows_the_password_of_the_store(
    serve: Open, page: str, caplog: pytest.LogCaptureFixture
) -> None:
    """In no log line, response or page, whether the store is connected or lost."""
    caplog.set_level(logging.DEBUG)
    server = Server(port=free_port())
    server.start()
    try:
        server.ask("ACL", "SETUSER", "crawler", "on", ">s3cr3t", "~*", "&*", "+@all")
        url = f"redis://crawler:s3cr3t@127.0.0.1:{server.port}/0"
        one = await serve(fleet={"url": url, "hold": 1.0})
        shown = [await everything(one)]
        server.kill()
        said = await until_unready(one)
        assert "fleet" in said["detail"]
        shown += [str(said), str(await one.post("/v1/leases", {"url": page, "wait": 0}))]
        shown += [await everything(one), caplog.text]
    finally:
        server.close()
    assert f"127.0.0.1:{server.port}" in shown[0]  # the configuration page is among them
    for text in shown:
        assert "s3cr3t" not in text


async def everything(serve: Any) -> str:
    texts = []
    for path in ("/readyz", "/v1/config", "/ui/config", "/ui/", "/metrics", "/v1/overview"):
        async with serve.session.get(serve.base + path) as response:
            texts.append(await response.text())
    return "\n".join(texts)


async def test_the_response_to_an_operator_shows_the_new_state(
    serve: Open, store: Server, page: str
) -> None:
    """The response never shows the state before the call, on any member, however often repeated."""
    fleet = {"url": store.url, "hold": 1.0}
    one, other = await serve(fleet=fleet), await serve(fleet=fleet)
    await one.post(f"/v1/leases/{await until_201(one, page)}/report", {"status": 200})
    told = []
    for asked, what, body in (
        (one, "pause", {}),
        (other, "resume", {}),
        (other, "block", {"seconds": 60.0}),
        (one, "block", {"seconds": 0.0}),
        (one, "pause", {}),
        (one, "resume", {}),
    ):
        status, said = await asked.post(f"/v1/hosts/127.0.0.1/{what}", body)
        assert status == 200, said
        (scope,) = said["fleet"]
        held_up = said["state"] if said["state"] in ("paused", "blocked") else None
        told.append((held_up, scope["paused"], scope["blocked_until"] is not None))
    paused, free = ("paused", True, False), (None, False, False)
    assert told == [paused, free, ("blocked", False, True), free, paused, free]


async def test_readiness_tells_the_state_of_the_fleet_and_its_members(
    serve: Open, empty_store: Server, page: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gatekeeper.fleet")
    fleet = {"url": empty_store.url, "hold": 1.0}
    one = await serve(fleet=fleet)
    status, said = await one.get("/readyz")
    assert (status, said) == (
        200,
        {"status": "ready", "fleet": {"state": "recovering", "members": 1}},
    )
    async with one.session.get(one.base + "/ui/") as response:
        assert "`gatekeeper fleet init` if there are none" in await response.text()
    await until_201(one, page)
    status, said = await one.get("/readyz")
    assert (status, said["fleet"]) == (200, {"state": "connected", "members": 1})
    # The log tells why there were no leases for a while, and that they are granted again.
    await until(lambda: any("leases are granted again" in one for one in caplog.messages))
    waits = [one for one in caplog.messages if "no leases are granted until" in one]
    assert len(waits) == 1
    assert empty_store.url in waits[0]


async def test_a_lease_waits_until_the_store_is_restored_and_a_check_does_not(
    serve: Open, empty_store: Server, page: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(robots_pacing, "PATIENCE_SECONDS", 0.1)
    one = await serve(fleet={"url": empty_store.url, "hold": 1.0})
    leasing = asyncio.create_task(one.post("/v1/leases", {"url": page, "wait": 30}))
    _, said = await one.get("/v1/check", params={"url": page})
    assert (said["verdict"], said["reason"]) == ("defer", "fleet")
    assert said["retry_at"] is not None
    assert not leasing.done()
    assert (await leasing)[0] == 201


async def test_a_lease_of_a_host_that_another_member_serves_is_deferred_with_its_name(
    serve: Open, store: Server
) -> None:
    """when_lost = "divide": 429 with Retry-After and the reason, and the same in every view."""
    fleet = {"url": store.url, "hold": 1.0, "when_lost": "divide"}
    one, other = await serve(fleet=fleet), await serve(fleet=fleet)
    member = other.service.gate.stats().fleet.member
    async with asyncio.timeout(60.0):
        await until(lambda: one.service.gate.stats().fleet.members >= 2)
        store.kill()
        await until(lambda: one.service.gate.stats().fleet.dividing)
    refused = 0
    for number in range(1, 13):
        host = f"127.77.0.{number}"
        want = {"url": f"http://{host}:8080/x", "wait": 0}
        async with one.session.post(one.base + "/v1/leases", json=want) as response:
            said, headers = await response.json(), response.headers
        if "decision" not in said:
            continue  # this member serves the host
        refused += 1
        assert (response.status, said["decision"]["reason"]) == (429, "fleet")
        assert member in said["decision"]["note"]
        assert int(headers["Retry-After"]) >= 1
        _, body = await one.get(f"/v1/hosts/{host}")
        assert body["state"] == "deferred"
        (clock,) = [clock for clock in body["clocks"] if clock["kind"] == "fleet"]
        assert clock["decides"]
        assert member in clock["source"]
        async with one.session.get(f"{one.base}/ui/hosts/{host}") as response:
            assert "gets no lease from this member of the fleet" in await response.text()
    assert refused
