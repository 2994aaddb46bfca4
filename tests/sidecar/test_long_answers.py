"""Long answers ask again what their beginning asked: a token, role or session may have ended."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from gatekeeper.sidecar.reload import Reloaded
from gatekeeper.sidecar.routing import Role
from gatekeeper.sidecar.security import Token, Tokens
from tests.internet import Drip, FakeInternet, Hold, Page
from tests.waiting_support import until

ROBOTS = "User-agent: *\nDisallow: /private\n"


def token(letter: str, *roles: Role, name: str = "olga") -> Token:
    return Token(letter.encode() * 32, name, frozenset({Role.CHECK, *roles}))


FIRST = token("a", Role.CRAWL, Role.ADMIN)
OTHER = token("b", Role.CRAWL, Role.ADMIN, name="carl")
AFTERWARDS = {
    "removed": ((OTHER,), 401),
    "rotated": ((token("n", Role.CRAWL, Role.ADMIN), OTHER), 401),
    "another role": ((token("a"), OTHER), 403),
}
"""The tokens after the reload, and the status of what is asked by the first one then."""


def bearer(one: Token) -> dict[str, str]:
    return {"Authorization": "Bearer " + one.value.decode()}


@pytest.fixture(params=AFTERWARDS)
def afterwards(request: Any) -> Any:
    return AFTERWARDS[request.param]


def put(service: Any, *tokens: Token) -> None:
    """Reload with these tokens."""
    service.service.apply_config(service.service.config, Tokens(tokens))


async def test_t17_a_reload_that_removes_a_token_refuses_its_waiting_lease_and_page(
    serve: Any, internet: FakeInternet, afterwards: Any
) -> None:
    """Its place in the queue is free then, and the waiter of another client keeps its own."""
    tokens, status = afterwards
    internet.site("a.test").robots(ROBOTS).page("/x", "the page")
    service = await serve()
    put(service, FIRST, OTHER)
    wanted, waiters = {"url": "http://a.test/x", "wait": 60}, service.service.leases.waiters
    held, lease = await service.post("/v1/leases", wanted, headers=bearer(OTHER))
    assert held == 201
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        polls = [
            group.create_task(service.post("/v1/leases", wanted, headers=bearer(one)))
            for one in (FIRST, OTHER)
        ]
        params = {"url": wanted["url"]}
        fetch = group.create_task(service.get("/v1/fetch", params=params, headers=bearer(FIRST)))
        await until(lambda: len(waiters) == 3)
        put(service, *tokens)
        assert (await polls[0])[0] == status
        assert (await fetch)[0] == status
        assert len(waiters) == 1
        path = f"/v1/leases/{lease['id']}/report"
        assert (await service.post(path, {"status": 200}, headers=bearer(OTHER)))[0] == 204
        assert (await polls[1])[0] == 201


async def test_t17_a_reload_that_removes_a_token_refuses_its_waiting_check(
    serve: Any, internet: FakeInternet
) -> None:
    hold = Hold(Page(ROBOTS))
    internet.site("a.test").on("/robots.txt", hold)
    service = await serve()
    put(service, FIRST, OTHER)
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        params = {"url": "http://a.test/x"}
        first, other = (
            group.create_task(service.get("/v1/check", params=params, headers=bearer(one)))
            for one in (FIRST, OTHER)
        )
        await hold.waiting.acquire()
        samples = service.service.clients.samples
        await until(lambda: samples()["gatekeeper_requests_under_way"] == 2)
        put(service, OTHER)
        assert (await first)[0] == 401
        hold.release()
        assert (await other)[1]["verdict"] == "allow"


async def test_t17_a_reload_that_removes_a_token_cuts_its_page_off(
    serve: Any, internet: FakeInternet, afterwards: Any
) -> None:
    tokens, _ = afterwards
    more = asyncio.Semaphore(1)
    internet.site("a.test").robots(ROBOTS).on("/long", Drip("ab", every=more))
    service = await serve()
    put(service, FIRST, OTHER)
    params = {"url": "http://a.test/long"}
    async with (
        asyncio.timeout(60),
        service.session.get(
            service.base + "/v1/fetch", params=params, headers=bearer(FIRST)
        ) as page,
    ):
        assert await page.content.readexactly(1) == b"a"
        put(service, *tokens)
        with pytest.raises(aiohttp.ClientError):
            await page.content.read()
    assert service.service.gate.stats().pacing.in_flight == 0


async def test_t17_a_reload_that_keeps_a_token_ends_none_of_its_requests(
    serve: Any, internet: FakeInternet
) -> None:
    more = asyncio.Semaphore(1)
    internet.site("a.test").robots(ROBOTS).on("/long", Drip("ab", every=more))
    service = await serve()
    put(service, FIRST, OTHER)
    params = {"url": "http://a.test/long"}
    async with service.session.get(
        service.base + "/v1/fetch", params=params, headers=bearer(FIRST)
    ) as page:
        assert await page.content.readexactly(1) == b"a"
        put(service, FIRST)
        await asyncio.gather(*service.service._tasks._tasks.values())
        more.release()
        assert await page.content.read() == b"b"


async def test_t17_the_client_that_reloads_gets_the_result(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the reload has removed its token."""
    service = await serve()
    put(service, FIRST)

    async def reload(_: object) -> Reloaded:
        put(service, OTHER)
        for _ in range(20):  # as it waits for the workers
            await asyncio.sleep(0)
        return Reloaded(applied=[], needs_restart=[])

    monkeypatch.setattr("gatekeeper.sidecar.routes.health.reload", reload)
    assert (await service.post("/v1/admin/reload", {}, headers=bearer(FIRST)))[0] == 200
    assert (await service.post("/v1/admin/reload", {}, headers=bearer(FIRST)))[0] == 401
