"""Leases and the middleware, judged by the origins' logs."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta
from http import HTTPStatus
from typing import Any

import aiohttp
import pytest

from gatekeeper import ConfigError, Deferred, Denied, LeaseTimeout
from gatekeeper.clock import utc
from tests.conformance.ways import session_on
from tests.internet import FakeInternet, Hold, Page, Reset, redirect

DENYING = "User-agent: *\nDisallow: /private\n"
PACED = {"pacing": {"default_interval": 2.0}}


async def test_a_lease_has_its_url_and_its_decision(internet: FakeInternet, open_gate: Any) -> None:
    internet.site("a.test").robots(DENYING)
    gate = await open_gate(internet)
    async with gate.lease("http://A.test/x#top", timeout=10) as lease:
        assert (lease.url, lease.host) == ("http://a.test/x", "a.test")
        assert lease.decision
        assert lease.expires_at > utc(internet.clock.wall())
        assert not lease.ended
        lease.report(status=200, elapsed=0.1, size=2)
    assert lease.ended


async def test_a_lease_of_acquire_is_a_context_manager(
    internet: FakeInternet, open_gate: Any
) -> None:
    """Inside it a request adopts the lease; leaving it, if by an exception, ends the lease."""
    site = internet.site("a.test").robots(DENYING).page("/x")
    gate = await open_gate(internet)
    async with (
        await gate.acquire("http://a.test/x", timeout=10) as lease,
        session_on(internet, gate) as session,
        session.get(lease.url) as response,
    ):
        await response.read()
    assert lease.ended
    assert [one.path for one in site.requests] == ["/robots.txt", "/x"]
    with pytest.raises(ValueError, match="mine"):
        async with await gate.acquire("http://a.test/x", timeout=10) as lease:
            raise ValueError("mine")
    assert lease.ended
    found = await gate.try_acquire("http://a.test/x")
    assert found or found.why == "interval"


async def test_a_denied_url_gets_no_lease(internet: FakeInternet, open_gate: Any) -> None:
    internet.site("a.test").robots(DENYING)
    gate = await open_gate(internet)
    with pytest.raises(Denied) as caught:
        async with gate.lease("http://a.test/private"):
            pass
    assert not isinstance(caught.value, Deferred)
    assert caught.value.decision.rule is not None
    assert caught.value.decision.rule.line == 2


async def test_an_unreachable_file_defers_a_lease(internet: FakeInternet, open_gate: Any) -> None:
    internet.site("a.test").robots(Page("", status=503))
    gate = await open_gate(internet)
    with pytest.raises(Deferred) as caught:
        await gate.acquire("http://a.test/x")
    assert caught.value.retry_at is not None


async def test_a_lease_that_does_not_come_in_time_raises_lease_timeout(
    internet: FakeInternet, open_gate: Any
) -> None:
    internet.site("a.test").robots("")
    gate = await open_gate(internet)
    held = await gate.acquire("http://a.test/1", owned=False)
    with pytest.raises(LeaseTimeout) as caught:
        await gate.acquire("http://a.test/2", timeout=0, owned=False)
    assert caught.value.url == "http://a.test/2"
    held.end()


async def test_a_task_that_would_wait_for_its_own_lease_is_refused_at_once(
    internet: FakeInternet, open_gate: Any
) -> None:
    internet.site("a.test").robots("")
    gate = await open_gate(internet)
    async with gate.lease("http://a.test/one"):
        with pytest.raises(LeaseTimeout) as caught:
            await gate.acquire("http://a.test/two")
    assert "http://a.test/one" in str(caught.value)
    assert "http://a.test/two" in str(caught.value)


async def test_a_lease_ends_once_and_frees_the_slot(internet: FakeInternet, open_gate: Any) -> None:
    internet.site("a.test").robots("")
    gate = await open_gate(internet)
    for _ in range(3):
        lease = await gate.acquire("http://a.test/x", timeout=10, owned=False)
        lease.end()
        lease.end()
        lease.report(status=500)
    assert lease.ended


async def test_an_error_in_the_block_frees_the_slot(internet: FakeInternet, open_gate: Any) -> None:
    internet.site("a.test").robots("")
    gate = await open_gate(internet)
    with pytest.raises(RuntimeError, match="mine"):
        async with gate.lease("http://a.test/1"):
            raise RuntimeError("mine")
    async with gate.lease("http://a.test/2", timeout=10):
        pass


async def test_a_lease_given_back_unused_is_granted_to_the_next(
    internet: FakeInternet, open_gate: Any
) -> None:
    internet.site("a.test").robots("")
    gate = await open_gate(internet)
    lease = await gate.acquire("http://a.test/1", owned=False)
    lease.give_back()
    second = await gate.acquire("http://a.test/2", timeout=10, owned=False)
    second.end()


async def test_a_cancelled_waiter_does_not_delay_the_next(
    internet: FakeInternet, open_gate: Any
) -> None:
    internet.site("a.test").robots("")
    gate = await open_gate(internet)
    held = await gate.acquire("http://a.test/1", owned=False)
    waiter = asyncio.create_task(gate.acquire("http://a.test/2", owned=False))
    await internet.settle()
    waiter.cancel()
    await asyncio.wait([waiter])
    assert waiter.cancelled()
    held.end()
    third = await gate.acquire("http://a.test/3", timeout=10, owned=False)
    third.end()


async def test_leases_are_paced(virtual_internet: FakeInternet, open_gate: Any) -> None:
    site = virtual_internet.site("a.test").robots("User-agent: *\nCrawl-delay: 10\n").page("/")
    gate = await open_gate(virtual_internet)

    async def crawl(session: aiohttp.ClientSession) -> None:
        async with gate.lease("http://a.test/") as lease, session.get("http://a.test/") as page:
            lease.report(status=page.status)

    async with virtual_internet.session() as session:
        await virtual_internet.drive(asyncio.gather(*(crawl(session) for _ in range(6))))
    assert site.paths == ["/robots.txt", *["/"] * 6]
    assert min(site.gaps()[1:]) >= 10.0
    assert max(site.gaps()[1:]) < 11.0


async def test_hosts_do_not_delay_each_other(
    virtual_internet: FakeInternet, open_gate: Any
) -> None:
    for name in ("a", "b", "c"):
        virtual_internet.site(f"{name}.test").robots("User-agent: *\nCrawl-delay: 10\n")
    gate = await open_gate(virtual_internet)

    async def crawl(name: str) -> None:
        for _ in range(3):
            async with gate.lease(f"http://{name}.test/"):
                pass

    start = virtual_internet.clock.monotonic()
    await virtual_internet.drive(asyncio.gather(*map(crawl, "abc")))
    assert virtual_internet.clock.monotonic() - start < 35.0


async def test_retry_after_is_obeyed(virtual_internet: FakeInternet, open_gate: Any) -> None:
    site = virtual_internet.site("a.test").robots("")
    site.on("/x", Page("", status=429, headers={"Retry-After": "120"}), "ok")
    gate = await open_gate(virtual_internet)

    async def crawl() -> list[int]:
        statuses = []
        async with session_on(virtual_internet, gate) as session:
            for _ in range(2):
                async with session.get(
                    "http://a.test/x", timeout=aiohttp.ClientTimeout(total=None)
                ) as page:
                    statuses.append(page.status)
        return statuses

    assert await virtual_internet.drive(crawl()) == [429, 200]
    assert site.gaps()[-1] >= 120.0


async def test_a_lease_due_after_the_timeout_is_refused_at_once(
    virtual_internet: FakeInternet, open_gate: Any
) -> None:
    virtual_internet.site("a.test").robots("")
    gate = await open_gate(virtual_internet)
    clock = virtual_internet.clock
    drive = virtual_internet.drive
    await drive(gate.check("http://a.test/x"))
    await drive(gate.block("a.test", clock.wall() + 1000))
    before = clock.monotonic()
    with pytest.raises((LeaseTimeout, Deferred)):
        await drive(gate.acquire("http://a.test/x", timeout=500, owned=False))
    assert clock.monotonic() - before < 2.0


@pytest.mark.parametrize("name", ["*", "*bot/1.0"])
async def test_a_lease_for_the_user_agent_star_is_refused(
    internet: FakeInternet, open_gate: Any, name: str
) -> None:
    """A question may be about `*`; a lease is for a request, which has a name."""
    internet.site("a.test").robots("User-agent: *\nDisallow: /x\n")
    gate = await open_gate(internet)
    url = "http://a.test/page"
    assert await gate.check(url, user_agent=name)
    with pytest.raises(ConfigError, match="means everybody"):
        await gate.acquire(url, user_agent=name)
    with pytest.raises(ConfigError, match="means everybody"):
        await gate.try_acquire(url, user_agent=name)
    with pytest.raises(ConfigError, match="means everybody"):
        async with gate.lease(url, user_agent=name):
            raise AssertionError("a request could be sent as everybody")


@pytest.mark.parametrize("until", [float("nan"), datetime(2030, 1, 1)])
async def test_a_block_until_a_time_without_a_zone_is_refused(
    internet: FakeInternet, open_gate: Any, until: float | datetime
) -> None:
    """A time without a time zone could end the block hours early."""
    gate = await open_gate(internet)
    await gate.block("a.test", utc(internet.clock.wall() + 1000))
    with pytest.raises(ConfigError, match=r"block of a\.test: until=.+ is not a moment"):
        await gate.block("a.test", until)
    assert any(clock.kind == "block" for clock in await gate.why("a.test"))


async def test_a_lease_waits_for_the_end_of_a_block(
    virtual_internet: FakeInternet, open_gate: Any
) -> None:
    virtual_internet.site("a.test").robots("")
    gate = await open_gate(virtual_internet)
    clock = virtual_internet.clock
    drive = virtual_internet.drive
    await drive(gate.check("http://a.test/x"))
    until_ = clock.wall() + 1000
    await drive(gate.block("a.test", utc(until_)))
    lease = await drive(gate.acquire("http://a.test/x", owned=False))
    assert 0.0 <= clock.wall() - until_ < 2.0
    lease.end()


async def test_the_middleware_decides_every_hop(internet: FakeInternet, open_gate: Any) -> None:
    internet.site("a.test").robots("").on("/x", redirect("http://b.test/private"))
    other = internet.site("b.test").robots(DENYING)
    gate = await open_gate(internet)
    async with session_on(internet, gate) as session:
        with pytest.raises(Denied) as caught:
            await session.get("http://a.test/x")
    assert caught.value.decision.origin == "http://b.test"
    assert other.paths == ["/robots.txt"]


async def test_the_middleware_paces_every_hop(
    virtual_internet: FakeInternet, open_gate: Any
) -> None:
    site = virtual_internet.site("a.test").robots("")
    site.on("/1", redirect("/2")).on("/2", redirect("/3")).page("/3", "there")
    gate = await open_gate(virtual_internet, **PACED)

    async def crawl() -> str:
        async with (
            session_on(virtual_internet, gate) as session,
            session.get("http://a.test/1", timeout=aiohttp.ClientTimeout(total=None)) as page,
        ):
            return await page.text()

    assert await virtual_internet.drive(crawl()) == "there"
    assert site.paths == ["/robots.txt", "/1", "/2", "/3"]
    assert min(site.gaps()) >= 2.0


async def test_one_request_at_a_time_until_the_body_is_read(
    internet: FakeInternet, open_gate: Any
) -> None:
    hold = Hold(Page("slow"))
    site = internet.site("a.test").robots("").on("/slow", hold).page("/", "quick")
    gate = await open_gate(internet)

    async with session_on(internet, gate) as session:

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


async def test_an_open_lease_is_adopted(internet: FakeInternet, open_gate: Any) -> None:
    site = internet.site("a.test").robots("").page("/x", "mine")
    gate = await open_gate(internet)
    async with session_on(internet, gate) as session, gate.lease("http://a.test/x") as lease:
        async with session.get("http://a.test/x") as response:
            assert await response.text() == "mine"
        assert not lease.ended
    assert lease.ended
    assert site.paths == ["/robots.txt", "/x"]


async def test_a_failed_request_frees_the_slot(internet: FakeInternet, open_gate: Any) -> None:
    internet.site("a.test").robots("").on("/broken", Reset()).page("/", "ok")
    gate = await open_gate(internet)
    async with session_on(internet, gate) as session:
        with pytest.raises(aiohttp.ClientError):
            await session.get("http://a.test/broken")
        async with session.get("http://a.test/") as response:
            assert response.status == 200


async def test_a_denied_request_sends_no_byte(internet: FakeInternet, open_gate: Any) -> None:
    site = internet.site("a.test").robots(DENYING)
    gate = await open_gate(internet)
    async with session_on(internet, gate) as session:
        with pytest.raises(Denied):
            await session.get("http://a.test/private")
    assert site.paths == ["/robots.txt"]


@pytest.mark.parametrize(
    ("report", "told"),
    [
        ({"status": "200"}, r"status must be an int such as 200, not the str '200': give int\(sta"),
        ({"status": True}, "status must be an int such as 200, not the bool True"),
        ({"status": 200.0}, r"status must be an int such as 200, not the float 200\.0"),
        ({"status": 200, "elapsed": "0.1"}, "elapsed must be seconds .*: give float"),
        (
            {"status": 200, "elapsed": timedelta(1)},
            "elapsed must be seconds such as",
        ),
        ({"status": 200, "size": "10"}, "size must be bytes such as 1024"),
        ({"status": 200, "size": b"page"}, "size must be bytes such as 1024"),
        ({"status": 429, "retry_after": timedelta(1)}, "retry_after must be seconds such as 120"),
        ({"status": 429, "retry_after": [120]}, "retry_after must be seconds such"),
    ],
)
async def test_a_report_of_the_wrong_type_is_refused_and_changes_nothing(
    internet: FakeInternet, open_gate: Any, report: dict[str, Any], told: str
) -> None:
    internet.site("a.test").robots("")
    gate = await open_gate(internet)
    async with gate.lease("http://a.test/") as lease:
        with pytest.raises(TypeError, match=told):
            lease.report(**report)
        lease.report(status=HTTPStatus.OK, elapsed=1, size=10, retry_after="120")
