"""The middleware and `polite_session`, against real servers that log every request."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from gatekeeper import (
    ConfigError,
    Deferred,
    Denied,
    GateClosed,
    Gatekeeper,
    LeaseTimeout,
    Reason,
    guarded_connector,
    polite_session,
    session_gate,
    signals,
)
from gatekeeper.clock import VirtualClock
from gatekeeper.session import plain_session
from tests.gate_support import QUICK, open_config
from tests.internet import Drip, FakeInternet, Hold, Page, Reset, Stall, Truncated, redirect

AGENT = "examplebot/1.0 (+https://example.org/bot)"


@pytest.fixture
async def session(internet: FakeInternet) -> AsyncIterator[aiohttp.ClientSession]:
    async with polite_session(
        user_agent=AGENT, config=open_config(pacing=QUICK), resolver=internet.resolver
    ) as session:
        yield session


async def test_a_polite_session_is_an_aiohttp_client_session(
    internet: FakeInternet, session: aiohttp.ClientSession
) -> None:
    site = internet.site("a.test").robots("User-agent: *\nDisallow: /no\n").page("/", "hello")
    async with session.get("http://a.test/") as response:
        assert await response.text() == "hello"
    assert type(session) is aiohttp.ClientSession
    assert site.paths == ["/robots.txt", "/"]
    assert {request.headers["User-Agent"] for request in site.requests} == {AGENT}
    assert isinstance(session_gate(session), Gatekeeper)


async def test_a_denied_request_sends_no_byte(
    internet: FakeInternet, session: aiohttp.ClientSession
) -> None:
    site = internet.site("a.test").robots("User-agent: *\nDisallow: /no\n")
    with pytest.raises(Denied) as caught:
        await session.get("http://a.test/no")
    assert isinstance(caught.value, aiohttp.ClientError)
    assert caught.value.decision.rule is not None
    assert caught.value.decision.rule.line == 2
    assert site.paths == ["/robots.txt"]


async def test_an_unreachable_file_raises_deferred(
    internet: FakeInternet, session: aiohttp.ClientSession
) -> None:
    internet.site("a.test").robots(Page("", status=503))
    with pytest.raises(Deferred) as caught:
        await session.get("http://a.test/x")
    assert caught.value.retry_at is not None


async def test_every_hop_is_decided_by_its_own_host(
    internet: FakeInternet, session: aiohttp.ClientSession
) -> None:
    internet.site("a.test").robots("").on("/x", redirect("http://b.test/private"))
    other = internet.site("b.test").robots("User-agent: *\nDisallow: /private\n")
    with pytest.raises(Denied) as caught:
        await session.get("http://a.test/x")
    assert caught.value.decision.origin == "http://b.test"
    assert other.paths == ["/robots.txt"]


async def test_a_redirect_within_one_host_takes_a_lease_for_each_hop(
    internet: FakeInternet, session: aiohttp.ClientSession
) -> None:
    site = internet.site("a.test").robots("").on("/x", redirect("/y")).page("/y", "there")
    async with session.get("http://a.test/x") as response:
        assert await response.text() == "there"
    assert site.paths == ["/robots.txt", "/x", "/y"]
    assert session_gate(session).stats().pacing.in_flight == 0


async def test_one_request_at_a_time_until_the_body_is_read(
    internet: FakeInternet, session: aiohttp.ClientSession
) -> None:
    hold = Hold(Page("slow"))
    site = internet.site("a.test").robots("").on("/slow", hold).page("/", "quick")

    async def get(path: str) -> str:
        async with session.get(f"http://a.test{path}") as response:
            return await response.text()

    first = asyncio.create_task(get("/slow"))
    await hold.waiting.acquire()
    second = asyncio.create_task(get("/"))
    await internet.settle()
    assert "/" not in site.paths
    hold.release()
    assert await asyncio.gather(first, second) == ["slow", "quick"]
    assert site.most_concurrent == 1


async def test_a_task_that_would_wait_for_its_own_lease_is_refused_at_once(
    internet: FakeInternet, session: aiohttp.ClientSession
) -> None:
    internet.site("a.test").robots("").on("/one", Stall("begun")).page("/two", "x")
    async with session.get("http://a.test/one"):
        with pytest.raises(LeaseTimeout) as caught:
            await session.get("http://a.test/two")
        assert "http://a.test/one" in str(caught.value)
        assert "http://a.test/two" in str(caught.value)
    async with session.get("http://a.test/two") as response:
        assert await response.text() == "x"


async def test_an_open_lease_is_adopted(
    internet: FakeInternet, session: aiohttp.ClientSession
) -> None:
    internet.site("a.test").robots("").page("/x", "mine")
    gate = session_gate(session)
    async with gate.lease("http://a.test/x") as lease:
        async with session.get("http://a.test/x") as response:
            assert await response.text() == "mine"
        assert not lease.ended
    assert lease.ended
    assert gate.stats().pacing.granted == 2  # robots.txt and the page


@pytest.mark.parametrize(
    "url", ["http://a.test/x%2Cy?q=a%26b", "http://A.test:80/%7Eann/é", "http://a.test/x#part"]
)
async def test_an_open_lease_is_adopted_however_the_url_is_spelt(
    internet: FakeInternet, session: aiohttp.ClientSession, url: str
) -> None:
    site = internet.site("a.test").robots("").otherwise("x")
    async with session_gate(session).lease(url), session.get(url) as response:
        await response.read()
    assert len(site.paths) == 2  # robots.txt and the page


async def test_an_error_frees_the_slot(
    internet: FakeInternet, session: aiohttp.ClientSession
) -> None:
    internet.site("a.test").robots("").page("/x", "fine")
    internet.refusing("dead.test")
    gate = session_gate(session)
    with pytest.raises(aiohttp.ClientError):
        await session.get("http://dead.test/")
    hold = Hold(Page("never"))
    internet.site("slow.test").robots("").on("/", hold)
    task = asyncio.create_task(session.get("http://slow.test/"))
    await hold.waiting.acquire()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert gate.stats().pacing.in_flight == 0
    hold.release()


async def test_a_429_blocks_the_host_by_itself(
    internet: FakeInternet, session: aiohttp.ClientSession
) -> None:
    internet.site("a.test").robots("").on(
        "/", Page("slow down", status=429, headers={"Retry-After": "120"})
    )
    async with session.get("http://a.test/") as response:
        assert response.status == 429
    gate = session_gate(session)
    with pytest.raises(LeaseTimeout) as caught:
        async with gate.lease("http://a.test/", timeout=0):
            pass
    assert caught.value.retry_at is not None
    assert any("429" in str(view) for view in await gate.why("a.test"))


async def test_the_guard_denies_the_target_of_a_redirect(
    internet: FakeInternet, session: aiohttp.ClientSession
) -> None:
    internet.site("a.test").robots("").on("/x", redirect("http://169.254.169.254/latest"))
    with pytest.raises(Denied) as caught:
        await session.get("http://a.test/x")
    assert caught.value.decision.reason is Reason.BLOCKED


async def test_an_address_that_passed_the_guard_is_judged_again_after_its_rules_change(
    internet: FakeInternet, session: aiohttp.ClientSession
) -> None:
    internet.site("127.0.0.1").robots("").page("/x").page("/y")
    port = internet.listener().port()
    for name in "xyx":
        async with session.get(f"http://127.0.0.1:{port}/{name}") as response:
            await response.read()
    guard = session_gate(session).parts.guard
    assert guard is not None
    guard.listens_on("127.0.0.1", port)
    with pytest.raises(Denied):
        await session.get(f"http://127.0.0.1:{port}/x")


async def test_waiting_for_a_lease_is_not_network_time(virtual_internet: FakeInternet) -> None:
    internet = virtual_internet
    internet.site("a.test").robots("User-agent: *\nCrawl-delay: 50\n").page("/", "x")
    clock = internet.clock
    assert isinstance(clock, VirtualClock)

    async def crawl() -> list[int]:
        async with polite_session(
            user_agent=AGENT,
            config=open_config(pacing=QUICK),
            resolver=internet.resolver,
            clock=clock,
        ) as session:
            statuses = []
            for _ in range(3):
                async with session.get(
                    "http://a.test/", timeout=aiohttp.ClientTimeout(total=5)
                ) as response:
                    await response.read()
                    statuses.append(response.status)
            return statuses

    assert await internet.drive(crawl()) == [200, 200, 200]
    assert clock.monotonic() >= 150


async def test_the_body_counts_as_network_time(virtual_internet: FakeInternet) -> None:
    internet = virtual_internet
    internet.site("a.test").robots("").on("/", Stall("half"))
    clock = internet.clock

    async def crawl() -> None:
        async with (
            polite_session(
                user_agent=AGENT,
                config=open_config(pacing=QUICK),
                resolver=internet.resolver,
                clock=clock,
            ) as session,
            session.get("http://a.test/", timeout=aiohttp.ClientTimeout(total=5)) as response,
        ):
            await response.read()

    with pytest.raises(TimeoutError):
        await internet.drive(crawl())


async def test_a_requests_own_middlewares_do_not_replace_the_gate(
    internet: FakeInternet, session: aiohttp.ClientSession
) -> None:
    internet.site("a.test").robots("User-agent: *\nDisallow: /no\n")
    seen: list[str] = []

    async def watch(
        request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        seen.append(str(request.url))
        return await handler(request)

    with pytest.raises(Denied):
        await session.get("http://a.test/no", middlewares=(watch,))
    assert seen == ["http://a.test/no"]


@pytest.mark.parametrize(
    ("argument", "value"),
    [("connector", None), ("trust_env", True), ("proxy", "http://127.0.0.1:3128")],
)
async def test_arguments_that_bypass_the_guard_are_refused(argument: str, value: object) -> None:
    with pytest.raises(ConfigError):
        async with polite_session(user_agent=AGENT, **{argument: value}):
            pass


async def test_a_proxy_of_one_request_is_refused(session: aiohttp.ClientSession) -> None:
    with pytest.raises(ConfigError, match="url-only"):
        await session.get("http://a.test/", proxy="http://127.0.0.1:3128")


async def test_the_middleware_makes_a_plain_session_obey(internet: FakeInternet) -> None:
    site = internet.site("a.test").robots("User-agent: *\nDisallow: /no\n").page("/", "x")
    async with (
        internet.session() as robots_session,
        Gatekeeper(AGENT, config=open_config(pacing=QUICK), session=robots_session) as gate,
        aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(resolver=internet.resolver),
            middlewares=(gate.middleware,),
        ) as session,
    ):
        async with session.get("http://a.test/") as response:
            assert await response.text() == "x"
        with pytest.raises(Denied):
            await session.get("http://a.test/no")
    assert site.paths == ["/robots.txt", "/"]


async def test_session_gate_of_a_foreign_session_raises_lookup_error() -> None:
    async with aiohttp.ClientSession() as session:
        with pytest.raises(LookupError):
            session_gate(session)


async def test_the_signals_of_a_response_are_those_for_the_sessions_agent(
    internet: FakeInternet, session: aiohttp.ClientSession
) -> None:
    headers = {
        "X-Robots-Tag": "otherbot: noindex, examplebot: nofollow",
        "Content-Usage": "train-ai=n",
    }
    internet.site("a.test").robots("").on("/", Page("x", headers=headers))
    async with session.get("http://a.test/") as response:
        found = signals(response)
    assert found.content_usage == {"train-ai": "n"}
    assert found.rules.index
    assert not found.rules.follow


async def test_a_spent_quota_slows_the_next_request(
    internet: FakeInternet, session: aiohttp.ClientSession
) -> None:
    internet.site("a.test").robots("").on(
        "/", Page("x", headers={"RateLimit": '"default";r=0;t=30'})
    )
    async with session.get("http://a.test/") as response:
        await response.read()
    with pytest.raises(LeaseTimeout):
        async with session_gate(session).lease("http://a.test/", timeout=0):
            pass


async def test_a_request_that_aiohttp_repeats_takes_a_lease_of_its_own(
    internet: FakeInternet, session: aiohttp.ClientSession
) -> None:
    site = internet.site("a.test").robots("").on("/", Reset(), Page("the second time"))
    gate = session_gate(session)
    async with gate.lease("http://a.test/") as lease, session.get("http://a.test/") as response:
        assert await response.text() == "the second time"
        assert lease.ended
    assert site.paths == ["/robots.txt", "/", "/"]
    assert gate.stats().pacing.granted == 3


async def test_the_connection_that_brought_robots_txt_brings_the_page(
    internet: FakeInternet, session: aiohttp.ClientSession
) -> None:
    internet.site("a.test").robots("User-agent: *\nDisallow: /no\n").page("/", "x")
    async with session.get("http://a.test/") as response:
        await response.read()
    assert len(internet.connections) == 1


async def test_a_body_longer_than_a_lease_keeps_its_slot(net: FakeInternet) -> None:
    """The slot is held until the connection is released."""
    site = net.site("a.test").robots("").on("/long", Drip("x" * 70, size=1, every=10.0))
    site.page("/next", "next")

    async def crawl() -> None:
        config = open_config()
        async with polite_session(
            user_agent="testbot/1.0",
            config=config,
            resolver=net.resolver,
            clock=net.clock,
            timeout=aiohttp.ClientTimeout(total=None),
        ) as polite:

            async def read(path: str) -> None:
                async with polite.get(f"http://a.test{path}") as response:
                    await response.read()

            async with asyncio.TaskGroup() as group:
                group.create_task(read("/long"))
                await net.clock.sleep(5.0)
                group.create_task(read("/next"))
            assert session_gate(polite).stats().pacing.expired == 0

    await net.drive(crawl())
    assert site.most_concurrent == 1
    assert net.clock.monotonic() >= 700.0


@pytest.mark.parametrize(
    "headers", [{"user-agent": AGENT, "X-Crawl": "7"}, [("X-Crawl", "7")], {"x-crawl": "7"}]
)
async def test_a_request_has_one_user_agent_field(internet: FakeInternet, headers: Any) -> None:
    site = internet.site("a.test").robots("").page("/", "")
    async with polite_session(
        AGENT, config=open_config(pacing=QUICK), resolver=internet.resolver, headers=headers
    ) as session:
        await session.get("http://a.test/")
    lines = site.requests[-1].head.lower().split(b"\r\n")
    assert [line for line in lines if line.startswith(b"user-agent:")] == [
        f"user-agent: {AGENT}".lower().encode()
    ]
    assert b"x-crawl: 7" in lines


async def test_a_user_agent_given_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="say it once"):
        async with polite_session(AGENT, headers={"user-agent": "Mozilla/5.0"}):
            pass


@pytest.mark.parametrize("total", [None, 300])
async def test_a_response_dropped_without_closing_frees_the_slot_of_its_host(
    internet: FakeInternet, total: int | None
) -> None:
    site = internet.site("a.test").robots("").page("/y", "there")
    site.on("/cut", Truncated("half"))
    limit = aiohttp.ClientTimeout(total=total)
    async with polite_session(
        AGENT, config=open_config(pacing=QUICK), resolver=internet.resolver, timeout=limit
    ) as session:

        async def drop() -> None:
            await session.get("http://a.test/cut")

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # the response is dropped on purpose
            await asyncio.create_task(drop())
            while session_gate(session).stats().pacing.in_flight:
                await asyncio.sleep(0)  # until the server has closed it
                gc.collect()
        async with session.get("http://a.test/y") as response:
            assert await response.text() == "there"


@pytest.mark.parametrize("status", [200, 302])
async def test_the_total_holds_for_a_body_that_outlives_its_lease(
    virtual_internet: FakeInternet, status: int
) -> None:
    internet = virtual_internet
    internet.site("a.test").robots("").on("/slow", Stall("half", status=status))

    async def crawl() -> None:
        async with polite_session(
            AGENT,
            config=open_config(pacing=QUICK),
            resolver=internet.resolver,
            clock=internet.clock,
            timeout=aiohttp.ClientTimeout(total=5),
        ) as session:
            async with session_gate(session).lease("http://a.test/slow"):
                response = await session.get("http://a.test/slow", allow_redirects=False)
            began = internet.clock.monotonic()
            with pytest.raises(TimeoutError):
                await response.read()
            assert internet.clock.monotonic() - began == pytest.approx(5, abs=0.1)

    await internet.drive(crawl())


async def test_an_adopted_lease_outlives_its_block_while_the_body_comes(
    internet: FakeInternet, session: aiohttp.ClientSession
) -> None:
    hold = Hold(Page("next"))
    site = internet.site("a.test").robots("").on("/slow", Stall("half")).on("/next", hold)
    gate = session_gate(session)
    async with gate.lease("http://a.test/slow") as lease:
        response = await session.get("http://a.test/slow")
    assert not lease.ended

    async def get_next() -> str:
        async with session.get("http://a.test/next") as other:
            return await other.text()

    following = asyncio.create_task(get_next())
    await internet.settle()
    assert "/next" not in site.paths
    with pytest.raises(LeaseTimeout, match=r"http://a\.test/slow"):
        await session.get("http://a.test/next")  # the response still belongs to this task
    response.close()
    assert lease.ended
    hold.release()
    assert await following == "next"
    assert site.most_concurrent == 1


async def test_an_adopted_lease_whose_body_came_ends_with_its_block(
    internet: FakeInternet, session: aiohttp.ClientSession
) -> None:
    internet.site("a.test").robots("").page("/x", "whole")
    gate = session_gate(session)
    async with gate.lease("http://a.test/x") as lease:
        async with session.get("http://a.test/x") as response:
            await response.read()
        assert not lease.ended
    assert lease.ended
    assert gate.stats().pacing.in_flight == 0


def repeated(internet: FakeInternet) -> Any:
    """A site that resets the reused connection when the second request arrives."""
    return internet.site("a.test").robots("").on("/x", Page("first"), Reset(), Page("again"))


async def visit_twice(gate: Gatekeeper, session: aiohttp.ClientSession) -> None:
    for _ in range(2):
        async with gate.lease("http://a.test/x"), session.get("http://a.test/x") as response:
            await response.read()


async def test_an_aiohttp_session_with_the_middleware_repeats_without_a_lease(
    internet: FakeInternet,
) -> None:
    """The reason for `plain_session`; if aiohttp changes this, the README has to change."""
    site = repeated(internet)
    connector = guarded_connector(open_config(pacing=QUICK), resolver=internet.resolver)
    async with (
        Gatekeeper(AGENT, config=open_config(pacing=QUICK), resolver=internet.resolver) as gate,
        aiohttp.ClientSession(connector=connector) as session,
    ):
        await visit_twice(gate, session)
        assert gate.stats().pacing.granted == 3
    assert site.paths == ["/robots.txt", "/x", "/x", "/x"]


class OwnResponse(aiohttp.ClientResponse):
    """A response class of the caller's own."""


async def passed_on(
    request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
) -> aiohttp.ClientResponse:
    return await handler(request)


async def test_a_plain_session_does_not_repeat_a_request_with_its_own_middlewares(
    internet: FakeInternet,
) -> None:
    site = repeated(internet)
    async with plain_session(
        AGENT, config=open_config(pacing=QUICK), resolver=internet.resolver
    ) as session:
        async with session.get("http://a.test/x") as response:
            await response.read()
        with pytest.raises(aiohttp.ClientConnectionError):
            await session.get("http://a.test/x", middlewares=(passed_on,))
    assert site.paths == ["/x", "/x"]


@pytest.mark.parametrize("mode", ["full", "url-only"])
@pytest.mark.parametrize("own", [{}, {"response_class": OwnResponse}])
async def test_a_plain_session_sends_each_request_once(
    internet: FakeInternet, own: dict[str, Any], mode: str
) -> None:
    site = repeated(internet)
    settings = open_config(pacing=QUICK, guard={"allow": ["127.0.0.0/8", "*.test"], "mode": mode})
    async with (
        Gatekeeper(AGENT, config=open_config(pacing=QUICK), resolver=internet.resolver) as gate,
        plain_session(AGENT, config=settings, resolver=internet.resolver, **own) as session,
    ):
        with pytest.raises(aiohttp.ClientConnectionError) as caught:
            await visit_twice(gate, session)
        assert isinstance(caught.value.__cause__, aiohttp.ClientOSError)
        assert site.paths == ["/robots.txt", "/x", "/x"]
        kept = [one for one in internet.connections if len(one.requests) > 1]
        assert kept  # the broken connection was a reused one
        async with session.get("http://a.test/x") as response:
            assert await response.text() == "again"
    assert f"user-agent: {AGENT}".encode() in site.requests[-1].head.lower()


async def test_a_plain_session_uses_the_guarded_connections_of_its_gate(
    internet: FakeInternet,
) -> None:
    """The connection that fetched robots.txt fetches the page, guarded; the gate still owns it."""
    internet.site("a.test").robots("").page("/x", "x")
    gate = Gatekeeper(AGENT, config=open_config(pacing=QUICK), resolver=internet.resolver)
    with pytest.raises(GateClosed):
        plain_session(AGENT, gate=gate)
    async with gate:
        for _ in range(2):
            async with plain_session(AGENT, gate=gate) as session:
                async with gate.lease("http://a.test/x") as lease, session.get(lease.url) as page:
                    lease.report(status=page.status)
                    assert await page.text() == "x"
                with pytest.raises(Denied):
                    await session.get("http://169.254.169.254/")
        with pytest.raises(ConfigError, match="the gate"):
            plain_session(AGENT, gate=gate, resolver=internet.resolver)
    assert len(internet.connections) == 1


async def test_a_plain_session_is_guarded_and_keeps_its_own_middlewares(
    internet: FakeInternet,
) -> None:
    internet.site("a.test").robots("").page("/", "x")
    seen: list[str] = []

    async def note(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> Any:
        seen.append(str(request.url))
        return await handler(request)

    async with plain_session(AGENT, resolver=internet.resolver, middlewares=(note,)) as session:
        with pytest.raises(aiohttp.ClientError):
            await session.get("http://a.test/")
    assert seen == ["http://a.test/"]
    with pytest.raises(ConfigError):
        plain_session(AGENT, trust_env=True)
