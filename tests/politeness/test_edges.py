"""Promises of gate and session, each tested with a whole gate."""

from __future__ import annotations

import asyncio
import itertools
from datetime import UTC, datetime

import aiohttp
import pytest

from gatekeeper import (
    Decision,
    Deferred,
    Denied,
    Gatekeeper,
    GateStats,
    Lease,
    LeaseTimeout,
    Reason,
    Verdict,
)
from gatekeeper.clock import VirtualClock
from tests.internet import Fail, FakeInternet, Page, redirect
from tests.politeness.conftest import MakeGate
from tests.politeness.crawling import visit
from tests.politeness.world import WALL

DAY = 86_400.0
EPSILON = 1e-6
A = "http://a.test"


# -- the policy is read again at the grant


async def test_a_path_that_is_denied_by_the_time_of_its_grant_is_not_requested(
    internet: FakeInternet, clock: VirtualClock, make_gate: MakeGate
) -> None:
    open_, shut = "User-agent: *\nCrawl-delay: 100\n", "User-agent: *\nDisallow: /x\n"
    internet.site("a.test").on("/robots.txt", Page(open_), Page(shut))

    async def run() -> Decision:
        async with make_gate() as gate:
            waiting = asyncio.create_task(visit(gate, f"{A}/x", []))
            await clock.sleep(5.0)
            asked = asyncio.create_task(gate.refresh(A))  # Its lease comes before the page's.
            with pytest.raises(Denied) as refusal:
                await waiting
            await asked
            stats = gate.stats().pacing
            assert (stats.waiting, stats.in_flight) == (0, 0)
            return refusal.value.decision

    decision = await internet.drive(run())
    assert decision.rule is not None
    assert decision.rule.text == "Disallow: /x"


async def test_an_expired_robots_txt_is_fetched_first_and_waiters_keep_their_places(
    internet: FakeInternet, clock: VirtualClock, make_gate: MakeGate
) -> None:
    headers = {"Cache-Control": "max-age=600"}
    site = internet.site("a.test").robots("User-agent: *\nCrawl-delay: 400\n", headers=headers)
    log: list[tuple[str, float]] = []

    async def run() -> None:
        async with make_gate() as gate:
            async with asyncio.TaskGroup() as tasks:
                for number in range(4):
                    tasks.create_task(visit(gate, f"{A}/{number}", log))
                    await clock.sleep(1.0)
            assert gate.stats().pacing.refetches == 3

    await internet.drive(run())
    assert [url for url, _ in log] == [f"{A}/{number}" for number in range(4)]
    times = sorted([request.at for request in site.requests] + [at for _, at in log])
    assert len(times) == 4 + 4, "a robots.txt before each page but the first, which had it"
    assert all(b - a >= 400 - EPSILON for a, b in itertools.pairwise(times))


@pytest.mark.parametrize("delay", [900, 2 * DAY])
async def test_an_interval_longer_than_the_files_lifetime_leaves_leases_to_pages(
    internet: FakeInternet, clock: VirtualClock, make_gate: MakeGate, delay: float
) -> None:
    headers = {"Cache-Control": "max-age=600"}
    text = f"User-agent: *\nCrawl-delay: {delay:.0f}\n"
    site = internet.site("a.test").robots(text, headers=headers)
    log: list[tuple[str, float]] = []

    async def run() -> None:
        async with make_gate() as gate:
            for number in range(3):
                await visit(gate, f"{A}/{number}", log)

    await internet.drive(run(), limit=30 * DAY)
    assert len(site.requests) == 3
    times = sorted([request.at for request in site.requests] + [at for _, at in log])
    assert all(b - a >= delay - EPSILON for a, b in itertools.pairwise(times))


# -- robots.txt and pages


async def test_robots_txt_and_pages_of_a_host_do_not_block_each_other(
    internet: FakeInternet, make_gate: MakeGate
) -> None:
    for port in ("", ":8080", ":8081"):
        internet.site(f"a.test{port}").robots(Page("User-agent: *\n", delay=2.0))
    log: list[tuple[str, float]] = []

    async def run() -> None:
        async with make_gate() as gate, asyncio.TaskGroup() as tasks:
            for number in range(5):
                for port in ("", ":8080", ":8081"):
                    tasks.create_task(visit(gate, f"{A}{port}/{number}", log))

    await internet.drive(run(), limit=60.0)
    assert len(log) == 15


async def test_a_redirected_robots_txt_ends_its_lease_before_the_next(
    internet: FakeInternet, clock: VirtualClock, make_gate: MakeGate
) -> None:
    site = internet.site("a.test")
    site.on("/robots.txt", redirect("/r1")).on("/r1", redirect("/r2")).page("/r2", "")

    async def run() -> GateStats:
        async with make_gate() as gate:
            assert await gate.allowed(f"{A}/x")
            return gate.stats()

    stats = await internet.drive(run(), limit=30.0)
    assert site.paths == ["/robots.txt", "/r1", "/r2"]
    assert all(gap >= 1.0 - EPSILON for gap in site.gaps())
    assert stats.pacing.in_flight == 0


async def test_a_429_for_robots_txt_blocks_the_pages_of_the_host(
    internet: FakeInternet, clock: VirtualClock, make_gate: MakeGate
) -> None:
    # The whole host, including its other origins.
    internet.site("a.test").robots("")
    refusal = Page("slow down", 429, {"Retry-After": "500"})
    internet.site("a.test:8080").robots(refusal)
    log: list[tuple[str, float]] = []

    async def run() -> None:
        async with make_gate() as gate:
            await gate.check(f"{A}/x")
            with pytest.raises(Deferred) as caught:
                await visit(gate, f"{A}:8080/x", log)
            assert caught.value.decision.reason is Reason.RATE_LIMITED
            with pytest.raises(LeaseTimeout) as late:
                async with gate.lease(f"{A}/x", timeout=0):
                    pass
            assert late.value.retry_at is not None
            assert any("429" in str(view) for view in await gate.why("a.test"))
            answered = internet.requests[-1].answered
            await visit(gate, f"{A}/x", log)
            assert answered is not None
            assert log[-1][1] >= answered + 500

    await internet.drive(run())


async def test_a_name_that_does_not_exist_defers_its_host_until_the_next_try(
    internet: FakeInternet, clock: VirtualClock, make_gate: MakeGate
) -> None:
    internet.site("a.test").robots("")
    internet.dns("a.test", "127.0.0.1", Fail.NXDOMAIN, "127.0.0.1")
    log: list[tuple[str, float]] = []

    async def run() -> None:
        async with make_gate() as gate:
            await gate.check(f"{A}/x")
            gone = await gate.check(f"{A}:8080/x")
            assert gone.reason is Reason.DNS_NXDOMAIN
            assert any("no such name" in str(view) for view in await gate.why("a.test"))
            with pytest.raises(LeaseTimeout):
                async with gate.lease(f"{A}/x", timeout=60):
                    pass
            # Another origin may be asked: that shows when the uplink is back.
            internet.site("a.test:8080").robots("")
            await gate.refresh(f"{A}:8080")
            assert (await gate.check(f"{A}:8080/x")).verdict is Verdict.ALLOW
            began = clock.monotonic()
            await visit(gate, f"{A}/x", log)
            assert clock.monotonic() - began < 5

    await internet.drive(run())


async def test_a_block_of_the_operator_holds_for_a_host_that_does_not_exist(
    internet: FakeInternet, clock: VirtualClock, make_gate: MakeGate
) -> None:
    internet.dns("a.test", Fail.NXDOMAIN)

    async def run() -> None:
        async with make_gate() as gate:
            await gate.check(f"{A}/x")
            await gate.block("a.test", clock.wall() + 600, "asked to wait")
            with pytest.raises(LeaseTimeout):  # It is refused, and continues when the block ends.
                await gate.refresh(A)
            await clock.sleep(590)
            assert len(internet.resolver.queries) == 1
            await clock.sleep(11)
            assert len(internet.resolver.queries) == 2

    await internet.drive(run())


async def test_too_many_waiters_are_not_held_against_the_origin(
    internet: FakeInternet, clock: VirtualClock, make_gate: MakeGate
) -> None:
    # Nothing is recorded about requests that we could not send.
    internet.site("a.test").robots("User-agent: *\nCrawl-delay: 30\n")
    internet.site("http://a.test:8080").robots("")
    log: list[tuple[str, float]] = []

    async def run() -> None:
        async with make_gate(pacing={"max_waiters": 1}) as gate:
            await gate.check(f"{A}/1")
            waiting = asyncio.create_task(visit(gate, f"{A}/1", log))
            await clock.sleep(1.0)
            assert gate.stats().pacing.waiting == 1
            decision = await gate.check("http://a.test:8080/x")
            assert (decision.verdict, decision.reason) == (Verdict.DEFER, Reason.OVERLOADED)
            assert gate.stats().directory.internal_errors == 0
            await waiting
            assert await gate.allowed("http://a.test:8080/x")

    await internet.drive(run())


# -- visiting hours


async def test_no_request_is_sent_that_would_arrive_after_the_visit_time(
    internet: FakeInternet, clock: VirtualClock, make_gate: MakeGate
) -> None:
    internet.site("a.test").robots("User-agent: *\nVisit-time: 1400-1414\n")
    closing = datetime(2026, 9, 21, 14, 15, tzinfo=UTC).timestamp()

    async def run() -> None:
        async with make_gate() as gate:
            await gate.check(f"{A}/x")
            await clock.sleep(closing - 0.2 - clock.wall())
            assert await gate.allowed(f"{A}/x"), "as far as the text goes"
            with pytest.raises(Deferred) as caught:
                await visit(gate, f"{A}/x", [])
            assert caught.value.retry_at == datetime(2026, 9, 22, 14, 0, tzinfo=UTC)

    await internet.drive(run())


async def test_a_request_that_arrives_in_slower_hours_is_paced_by_them(
    internet: FakeInternet, clock: VirtualClock, make_gate: MakeGate
) -> None:
    internet.site("a.test").robots(
        "User-agent: *\nRequest-rate: 1/2s\nRequest-rate: 1/60s 1415-1415\n"
    )
    slow = datetime(2026, 9, 21, 14, 15, tzinfo=UTC).timestamp() - WALL
    log: list[tuple[str, float]] = []

    async def run() -> None:
        async with make_gate() as gate:
            await gate.check(f"{A}/x")
            await clock.sleep(slow - 2.3 - clock.monotonic())
            await visit(gate, f"{A}/1", log)
            await visit(gate, f"{A}/2", log)

    await internet.drive(run())
    assert log[1][1] - log[0][1] >= 60.0 - EPSILON


# -- leases


async def test_a_lease_that_is_never_reported_ends_by_itself(
    internet: FakeInternet, clock: VirtualClock, make_gate: MakeGate
) -> None:
    internet.site("a.test").robots("")
    log: list[tuple[str, float]] = []

    async def run() -> Lease:
        async with make_gate(pacing={"lease_ttl": 30.0}) as gate:
            lease = await gate.acquire(f"{A}/1", owned=False)
            at = clock.monotonic()
            await visit(gate, f"{A}/2", log)
            assert log[0][1] == at + 30.0 + 1.0, "its end counts as its use"
            assert gate.stats().pacing.expired == 1
            return lease

    lease = await internet.drive(run())
    lease.report(status=200)  # too late, but harmless
    lease.end()


async def test_an_adopted_lease_ends_with_a_redirect(
    internet: FakeInternet, make_gate: MakeGate
) -> None:
    # The redirects of two tasks cross: leases held any longer would make each wait for the other.
    for here, there in (("a", "b"), ("b", "a")):
        site = internet.site(f"{here}.test").robots("").page("/end", here)
        site.on("/go", redirect(f"http://{there}.test/end")).on("/near", redirect("/end"))

    async def get(gate: Gatekeeper, session: aiohttp.ClientSession, url: str) -> str:
        async with gate.lease(url), session.get(url) as response:
            return await response.text()

    async def run() -> list[str]:
        async with (
            make_gate() as gate,
            aiohttp.ClientSession(
                connector=gate.parts.make_connector(), middlewares=(gate.middleware,)
            ) as session,
        ):
            crossing = (get(gate, session, f"http://{host}.test/go") for host in "ab")
            found = await asyncio.gather(*crossing)
            return [*found, await get(gate, session, "http://a.test/near")]

    assert await internet.drive(run(), limit=60.0) == ["b", "a", "a"]


async def test_hosts_that_break_connections_are_asked_less_often(
    internet: FakeInternet, clock: VirtualClock, make_gate: MakeGate
) -> None:
    internet.site("a.test").robots("")

    async def run() -> None:
        async with (
            make_gate() as gate,
            aiohttp.ClientSession(
                connector=gate.parts.make_connector(), middlewares=(gate.middleware,)
            ) as session,
        ):
            await gate.check(f"{A}/")
            internet.refusing("a.test")
            assert isinstance(session.connector, aiohttp.TCPConnector)
            for _ in range(6):
                session.connector.clear_dns_cache()
                with pytest.raises(aiohttp.ClientConnectorError):
                    await session.get(f"{A}/")
            assert any("errors in a row" in str(view) for view in await gate.why("a.test"))

    await internet.drive(run())
