"""The agent whose rules apply, whose name is sent, and which a decision shows is the same one,
in every way to the gate.

The file denies one agent and allows another, so that confusing them shows (promise 14).
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest
from aiohttp.http import SERVER_SOFTWARE

from gatekeeper import ConfigError, Denied, Gatekeeper, PoliteQueue, RemoteGatekeeper
from gatekeeper.crawl.progress import Progress
from gatekeeper.crawl.runner import crawl
from gatekeeper.crawl.sources import Job
from gatekeeper.session import polite_session
from gatekeeper.session.middleware import gate_middleware
from tests.conformance.ways import AGENT, AnyGate, Sidecar, settings
from tests.internet import FakeInternet, Stall, redirect

OTHER = "other/1.0 (+https://other.example/bot)"
ROBOTS = """\
User-agent: examplebot
Disallow: /not-examplebot

User-agent: other
Disallow: /not-other

User-agent: *
Disallow: /
"""
HOST = "http://a.test"


@pytest.fixture
def world(internet: FakeInternet) -> FakeInternet:
    site = internet.site("a.test").robots(ROBOTS).page("/not-other").page("/not-examplebot")
    site.page("/both").on("/to-not-other", redirect("/not-other"))
    return internet


Named = Callable[..., Awaitable[AnyGate]]


@pytest.fixture(params=["embedded", "remote named", "remote unnamed"])
async def gate_of(
    request: pytest.FixtureRequest, sidecar_on: Callable[..., Awaitable[Sidecar]]
) -> AsyncIterator[Named]:
    """`await gate_of(internet, name)`: a gate under that name, in the way under test."""
    async with AsyncExitStack() as stack:

        async def begin(internet: FakeInternet, name: str) -> AnyGate:
            if request.param == "embedded":
                gate: AnyGate = Gatekeeper(name, config=settings(), resolver=internet.resolver)
            elif request.param == "remote named":
                sidecar = await sidecar_on(internet, agent=AGENT)
                gate = RemoteGatekeeper(sidecar.where, name)
            else:
                sidecar = await sidecar_on(internet, agent=name)
                gate = RemoteGatekeeper(sidecar.where)
            return await stack.enter_async_context(gate)

        yield begin


NAMES = pytest.mark.parametrize(
    ("name", "token", "welcome", "refused"),
    [
        (AGENT, "examplebot", "/not-other", "/not-examplebot"),
        (OTHER, "other", "/not-examplebot", "/not-other"),
        ("other", "other", "/not-examplebot", "/not-other"),
    ],
)


@NAMES
async def test_questions_are_judged_by_the_name_of_the_gate(
    world: FakeInternet, gate_of: Named, name: str, token: str, welcome: str, refused: str
) -> None:
    gate = await gate_of(world, name)
    assert gate.user_agent == name
    for _ in range(2):  # cold and warm
        assert await gate.allowed(HOST + welcome)
        assert not await gate.allowed(HOST + refused)
        given = [HOST + welcome, HOST + refused, "no url", f"{HOST}/robots.txt"]
        for decisions in (
            [await gate.check(HOST + welcome), await gate.check(HOST + refused)],
            await gate.check_all(given),
            [decision async for decision in gate.check_many(given)],
        ):
            assert [bool(decision) for decision in decisions[:2]] == [True, False]
            assert {decision.user_agent for decision in decisions} == {token}
        peeked = gate.peek(HOST + refused)
        assert peeked is not None
        assert (bool(peeked), peeked.user_agent) == (False, token)
    policy = await gate.policy(f"{HOST}/")
    assert policy.allowed(welcome)
    assert not policy.allowed(refused)


@NAMES
async def test_leases_are_judged_by_the_name_of_the_gate(
    world: FakeInternet, gate_of: Named, name: str, token: str, welcome: str, refused: str
) -> None:
    gate = await gate_of(world, name)
    for _ in range(2):
        async with gate.lease(HOST + welcome) as lease:
            assert lease.decision.user_agent == token
            lease.report(status=200)
        lease = await gate.acquire(HOST + welcome)
        assert lease.decision.user_agent == token
        lease.end()
        for asked in (gate.lease(HOST + refused).__aenter__, lambda: gate.acquire(HOST + refused)):
            with pytest.raises(Denied) as caught:
                await asked()
            assert caught.value.decision.user_agent == token


@NAMES
async def test_a_user_agent_given_with_a_question_holds_for_that_question(
    world: FakeInternet, gate_of: Named, name: str, token: str, welcome: str, refused: str
) -> None:
    gate = await gate_of(world, name)
    theirs = OTHER if token == "examplebot" else AGENT
    for _ in range(2):
        assert not await gate.allowed(HOST + welcome, user_agent=theirs)
        assert await gate.allowed(HOST + refused, user_agent=theirs)
        assert (await gate.check_all([HOST + refused], user_agent=theirs))[0]
        async with gate.lease(HOST + refused, user_agent=theirs) as lease:
            assert lease.decision.user_agent != token
        with pytest.raises(Denied):
            await gate.acquire(HOST + welcome, user_agent=theirs)


@NAMES
async def test_a_queue_is_judged_by_the_name_of_the_gate(
    world: FakeInternet, gate_of: Named, name: str, token: str, welcome: str, refused: str
) -> None:
    gate = await gate_of(world, name)
    denied = []
    async with PoliteQueue(gate, on_denied=denied.append) as queue:
        await queue.put(HOST + refused)
        await queue.put(HOST + welcome)
        async with await queue.get() as lease:
            assert lease.url == HOST + welcome
            assert lease.decision.user_agent == token
            lease.report(status=200)
        await queue.join()
    assert [(decision.url, decision.user_agent) for decision in denied] == [(HOST + refused, token)]


# --- what is sent -----------------------------------------------------------------------


def session_of(internet: FakeInternet, gate: AnyGate, **arguments: Any) -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(resolver=internet.resolver)
    middleware = gate.middleware if isinstance(gate, Gatekeeper) else gate_middleware(gate)
    return aiohttp.ClientSession(connector=connector, middlewares=(middleware,), **arguments)


UNNAMED: list[dict[str, Any]] = [
    {},
    {"skip_auto_headers": ["User-Agent"]},
    {"headers": {"User-Agent": SERVER_SOFTWARE}},
    {"headers": {"User-Agent": "Python/3.13 aiohttp/3.99.0a1"}},
]


@pytest.mark.parametrize("arguments", UNNAMED, ids=str)
@NAMES
async def test_a_request_without_a_user_agent_is_sent_with_that_of_the_gate(
    world: FakeInternet,
    gate_of: Named,
    name: str,
    token: str,
    welcome: str,
    refused: str,
    arguments: dict[str, Any],
) -> None:
    gate = await gate_of(world, name)
    site = world.sites["a.test"]
    async with session_of(world, gate, **arguments) as session:
        for _ in range(2):
            async with session.get(HOST + welcome) as response:
                assert response.status == 200
            assert site.requests[-1].headers.getall("User-Agent") == [name]
            with pytest.raises(Denied) as caught:
                await session.get(HOST + refused)
            assert caught.value.decision.user_agent == token
        async with gate.lease(HOST + welcome), session.get(HOST + welcome) as response:
            assert response.status == 200
        assert site.requests[-1].headers.getall("User-Agent") == [name]
    assert refused not in site.paths


@NAMES
async def test_a_request_with_a_name_is_judged_by_it(
    world: FakeInternet, gate_of: Named, name: str, token: str, welcome: str, refused: str
) -> None:
    gate = await gate_of(world, name)
    site = world.sites["a.test"]
    theirs = "other/2.7" if token == "examplebot" else "examplebot/2.7"
    async with session_of(world, gate, headers={"User-Agent": theirs}) as session:
        for _ in range(2):
            async with session.get(HOST + refused) as response:
                assert response.status == 200
            assert site.requests[-1].headers.getall("User-Agent") == [theirs]
            with pytest.raises(Denied) as caught:
                await session.get(HOST + welcome)
            assert caught.value.decision.user_agent == theirs.partition("/")[0]
        # Another version of the same product is the same agent; its name is sent unchanged.
        mine = f"{token.title()}/9"
        async with session.get(HOST + welcome, headers={"User-Agent": mine}) as response:
            assert response.status == 200
        assert site.requests[-1].headers.getall("User-Agent") == [mine]
        with pytest.raises(ConfigError):
            await session.get(HOST + welcome, headers={"User-Agent": "()"})
    assert welcome in site.paths


async def test_each_hop_is_judged_by_the_name_that_is_sent(
    world: FakeInternet, gate_of: Named
) -> None:
    gate = await gate_of(world, AGENT)
    async with session_of(world, gate) as session:
        async with session.get(f"{HOST}/to-not-other") as response:
            assert response.status == 200
        with pytest.raises(Denied):
            await session.get(f"{HOST}/to-not-other", headers={"User-Agent": OTHER})
    assert world.sites["a.test"].paths.count("/not-other") == 1


async def test_a_lease_under_another_name_is_used_under_it_alone(
    world: FakeInternet, gate_of: Named
) -> None:
    gate = await gate_of(world, AGENT)
    site = world.sites["a.test"]
    async with session_of(world, gate) as session:
        # A request without a name of its own is sent with the lease's.
        async with (
            gate.lease(f"{HOST}/not-examplebot", user_agent=OTHER),
            session.get(f"{HOST}/not-examplebot") as response,
        ):
            assert response.status == 200
        assert site.requests[-1].headers.getall("User-Agent") == [OTHER]
        # A request with a denied name is refused, even under a lease.
        for headers in ({"User-Agent": AGENT}, {"User-Agent": "examplebot"}):
            async with gate.lease(f"{HOST}/not-examplebot", user_agent=OTHER):
                with pytest.raises(Denied):
                    await session.get(f"{HOST}/not-examplebot", headers=headers)
        async with gate.lease(f"{HOST}/not-other"):
            with pytest.raises(Denied):
                await session.get(f"{HOST}/not-other", headers={"User-Agent": OTHER})
        # A request with another allowed name uses the lease.
        async with (
            gate.lease(f"{HOST}/both", user_agent=OTHER),
            session.get(f"{HOST}/both", headers={"User-Agent": AGENT}) as response,
        ):
            assert response.status == 200
        assert site.requests[-1].headers.getall("User-Agent") == [AGENT]
    assert site.paths.count("/not-examplebot") == 1


@NAMES
async def test_a_polite_session_is_judged_by_its_user_agent(
    world: FakeInternet, name: str, token: str, welcome: str, refused: str
) -> None:
    site = world.sites["a.test"]
    theirs = OTHER if token == "examplebot" else AGENT
    async with polite_session(name, config=settings(), resolver=world.resolver) as session:
        for _ in range(2):
            async with session.get(HOST + welcome) as response:
                assert response.status == 200
            with pytest.raises(Denied):
                await session.get(HOST + refused)
        assert {request.headers["User-Agent"] for request in site.requests} == {name}
        async with session.get(HOST + refused, headers={"User-Agent": theirs}) as response:
            assert response.status == 200
        assert site.requests[-1].headers.getall("User-Agent") == [theirs]
        with pytest.raises(Denied):
            await session.get(HOST + welcome, headers={"User-Agent": theirs})


@NAMES
async def test_fetch_is_judged_by_its_user_agent(
    world: FakeInternet, name: str, token: str, welcome: str, refused: str
) -> None:
    job = Job(identity=name, config=settings(), urls=(HOST + welcome, HOST + refused))
    assert await crawl(job, Progress(), resolver=world.resolver) == 1
    site = world.sites["a.test"]
    assert site.paths == ["/robots.txt", welcome]
    assert {request.headers["User-Agent"] for request in site.requests} == {name}


# --- the sidecar's own name -------------------------------------------------------------


async def test_a_sidecar_tells_its_user_agent_without_a_token(
    world: FakeInternet, sidecar_on: Callable[..., Awaitable[Sidecar]]
) -> None:
    sidecar = await sidecar_on(world, agent=OTHER)
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{sidecar.where}/healthz") as response:
            assert await response.json() == {"status": "alive", "user_agent": OTHER}
        async with session.get(f"{sidecar.where}/openapi.json") as response:
            document = await response.text()
    assert "user_agent" in document
    assert "It is not a secret: every site sees it." in document


async def test_a_client_opens_though_the_sidecar_does_not_tell_its_user_agent(
    world: FakeInternet,
) -> None:
    world.site("127.0.0.1").on("/healthz", "no JSON").on("/v1/check", Stall())
    where = f"http://127.0.0.1:{world.listener().port()}"
    for address in (where, "unix:/nonexistent/gatekeeper.sock"):
        async with RemoteGatekeeper(address) as gate:
            assert gate.user_agent is None
        async with RemoteGatekeeper(address, OTHER) as gate:
            assert gate.user_agent == OTHER
    with contextlib.suppress(ConfigError):
        RemoteGatekeeper(where, "()")
        pytest.fail("a name without a product token was taken")
