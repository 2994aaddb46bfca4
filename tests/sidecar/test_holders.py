"""A refused lease names the lease that holds the host; who may know whose it is."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import gatekeeper.sidecar.service as service_module
from gatekeeper.sidecar.routing import Role
from gatekeeper.sidecar.security import Token, Tokens
from tests.internet import FakeInternet

NAMES = {"owner": {Role.CRAWL}, "other": {Role.CRAWL}, "boss": {Role.CRAWL, Role.ADMIN}}
WANT = {"url": "http://a.test:8080/page", "wait": 5, "ttl": 77}


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name:x<40}"}


@pytest.fixture
async def asked(serve: Any, internet: FakeInternet) -> Any:
    """A service with the tokens of three clients."""
    internet.site("a.test").robots("").page("/page", "x")
    sidecar = await serve()
    tokens = [Token(f"{n:x<40}".encode(), n, frozenset(roles)) for n, roles in NAMES.items()]
    sidecar.service.apply_config(sidecar.service.config, Tokens(tokens))
    return sidecar


@pytest.mark.parametrize(("who", "told"), [("owner", True), ("other", False), ("boss", True)])
async def test_a_lease_that_did_not_come_in_time_says_what_holds_the_host(
    asked: Any, who: str, told: bool
) -> None:
    status, lease = await asked.post("/v1/leases", WANT, headers=bearer("owner"))
    assert status == 201
    # Another port is the same host, and so has the same clock.
    late = {"url": "http://a.test/other", "wait": 0}
    await asked.get("/v1/check", params={"url": "http://a.test/"}, headers=bearer(who))
    status, problem = await asked.post("/v1/leases", late, headers=bearer(who))

    assert (status, problem["type"]) == (429, "urn:gatekeeper:problem:not-yet")
    assert problem["held_since"] == lease["not_before"]
    assert problem["held_until"] == lease["expires_at"]
    since, until = lease["not_before"][:19], lease["expires_at"][:19]
    whose = " of owner" if told else ""
    assert f"a lease{whose} holds the host since {since}Z, until {until}Z" in problem["detail"]
    assert problem.get("held_by") == ("owner" if told else None)
    assert ("owner" in str(problem)) is told


async def test_a_refusal_for_a_host_that_nobody_holds_names_no_holder(asked: Any) -> None:
    gate = asked.service.gate
    _, lease = await asked.post("/v1/leases", WANT, headers=bearer("owner"))
    await asked.post(f"/v1/leases/{lease['id']}/report", {}, headers=bearer("owner"))
    await gate.block("a.test", asked.service.clock.wall() + 60)
    status, problem = await asked.post("/v1/leases", WANT | {"wait": 0}, headers=bearer("boss"))

    assert (status, problem["type"]) == (429, "urn:gatekeeper:problem:not-yet")
    assert not {"held_since", "held_until", "held_by"} & problem.keys()


async def test_a_store_that_hangs_holds_up_no_refusal(
    asked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(type(asked.service.gate.parts.scheduler), "look", hang)
    monkeypatch.setattr(service_module, "LOOK_SECONDS", 0.0)
    await asked.service.gate.block("a.test", asked.service.clock.wall() + 60)
    async with asyncio.timeout(20.0):
        status, problem = await asked.post("/v1/leases", WANT | {"wait": 0}, headers=bearer("boss"))

    assert (status, problem["type"]) == (429, "urn:gatekeeper:problem:not-yet")


async def test_without_tokens_every_client_is_told_the_holder(
    serve: Any, internet: FakeInternet
) -> None:
    internet.site("a.test").robots("").page("/page", "x")
    sidecar = await serve()
    await sidecar.post("/v1/leases", WANT)
    _, problem = await sidecar.post("/v1/leases", WANT | {"wait": 0})

    assert problem["held_by"] == "127.0.0.1"


async def test_of_several_leases_the_one_that_ends_first_is_named(
    serve: Any, internet: FakeInternet
) -> None:
    internet.site("a.test").robots("").page("/page", "x")
    sidecar = await serve(pacing={"concurrency": 3})
    ends = {}
    for ttl in (60, 20, 40):
        _, lease = await sidecar.post("/v1/leases", WANT | {"ttl": ttl})
        ends[ttl] = lease
    _, problem = await sidecar.post("/v1/leases", WANT | {"wait": 0})
    assert problem["held_until"] == ends[20]["expires_at"]
    for ttl in (20, 40, 60):
        await sidecar.session.delete(f"{sidecar.base}/v1/leases/{ends[ttl]['id']}")
    leases = sidecar.service.leases
    assert leases._by_host == leases._by_client == {}
