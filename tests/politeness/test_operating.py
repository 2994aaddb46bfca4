"""Operators' actions, local faults, and what is learnt about hosts, with a whole gate."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
from aiohttp import TCPConnector

from gatekeeper import (
    ConfigError,
    Denied,
    Gatekeeper,
    GateStats,
    LeaseTimeout,
    Reason,
    Verdict,
)
from gatekeeper.clock import VirtualClock
from gatekeeper.gate.robots_pacing import PARKED
from tests.internet import CloseSilently, Fail, FakeInternet, Hold, Page
from tests.memory_storage import MemoryStorage
from tests.politeness.conftest import MakeGate
from tests.politeness.crawling import visit

EPSILON = 1e-6
A = "http://a.test"


# -- operators' actions


async def test_dry_run_decides_and_counts_and_waits_for_nothing(
    internet: FakeInternet, clock: VirtualClock, make_gate: MakeGate
) -> None:
    internet.site("a.test").robots("User-agent: *\nCrawl-delay: 50\nDisallow: /no\n")
    log: list[tuple[str, float]] = []

    async def run() -> GateStats:
        async with make_gate(pacing={"dry_run": True}) as gate:
            await gate.check(f"{A}/")
            began = clock.monotonic()
            for number in range(3):
                await visit(gate, f"{A}/{number}", log)
            with pytest.raises(Denied):
                await visit(gate, f"{A}/no", log)
            assert clock.monotonic() == began
            return gate.stats()

    stats = await internet.drive(run())
    assert stats.pacing.dry_waits == 3
    assert stats.pacing.dry_seconds == pytest.approx(50 + 100 + 150, abs=1)


async def test_a_pause_and_a_block_hold_and_survive_the_gate(
    internet: FakeInternet, clock: VirtualClock, make_gate: MakeGate
) -> None:
    for name in ("paused", "blocked", "free"):
        internet.site(f"{name}.test").robots("")
    storage = MemoryStorage()
    log: list[tuple[str, float]] = []
    until = clock.wall() + 1000

    async def before() -> None:
        async with make_gate(storage=storage) as gate:
            for name in ("paused", "blocked", "free"):
                await gate.check(f"http://{name}.test/")
            await gate.pause("paused.test")
            await gate.block("blocked.test", until)

    async def after() -> None:
        async with make_gate(storage=storage) as gate, asyncio.TaskGroup() as tasks:
            for name in ("paused", "blocked", "free"):
                tasks.create_task(visit(gate, f"http://{name}.test/", log))
            await clock.sleep(2000)
            assert [url for url, _ in log] == ["http://free.test/", "http://blocked.test/"]
            assert clock.wall() - clock.monotonic() + log[1][1] >= until
            await gate.resume("paused.test")

    await internet.drive(before())
    await internet.drive(after())
    assert log[-1][0] == "http://paused.test/"
    assert log[-1][1] >= 2000
    assert len([r for r in internet.requests if r.path == "/robots.txt"]) == 3


# -- local faults


async def cut_off(gate: Gatekeeper, *, but: str) -> None:
    """Cause a local fault; a request to the host, which answered before, fails meanwhile."""
    asked = [gate.check(f"http://o{number}.test/") for number in range(40)]
    reasons = {decision.reason for decision in await asyncio.gather(*asked)}
    assert Reason.LOCAL_FAULT in reasons
    async with gate.lease(f"http://{but}/gone") as lease:
        lease.report(elapsed=1.0)
    stats = gate.stats()
    assert not gate.ready
    assert stats.pacing.frozen
    assert stats.directory.local_fault


async def test_hosts_that_failed_wait_while_our_own_network_is_down_and_probes_go_on(
    internet: FakeInternet, clock: VirtualClock, make_gate: MakeGate
) -> None:
    site = internet.site("known.test").on("/robots.txt", Page("", close=True))
    for number in range(40):
        internet.dns(f"o{number}.test", Fail.SERVFAIL)
    log: list[tuple[str, float]] = []

    async def run() -> None:
        async with make_gate() as gate:
            await gate.check("http://known.test/")
            await clock.sleep(1.0)
            assert gate.ready
            internet.dns("known.test", Fail.SERVFAIL)
            assert isinstance(gate.parts.connector, aiohttp.TCPConnector)
            gate.parts.connector.clear_dns_cache()
            await cut_off(gate, but="known.test")
            waiting = asyncio.create_task(visit(gate, "http://known.test/x", log))
            queries = len(internet.resolver.queries)
            await clock.sleep(300.0)
            assert log == []
            assert len(internet.resolver.queries) > queries + 100, "somebody finds out"
            for number in range(40):
                internet.site(f"o{number}.test").robots("")
            back = clock.monotonic()
            internet.dns("known.test", "127.0.0.1")
            await waiting
            assert clock.monotonic() - back <= 5.0
            stats = gate.stats()
            assert gate.ready
            assert not stats.pacing.frozen
            assert not stats.directory.local_fault
            assert await gate.allowed("http://o0.test/")

    await internet.drive(run())
    assert set(site.paths) == {"/robots.txt"}
    assert log


async def test_a_host_that_answers_goes_on_and_ends_a_local_fault(
    internet: FakeInternet, clock: VirtualClock, make_gate: MakeGate
) -> None:
    internet.site("known.test").robots("")
    for number in range(40):
        internet.dns(f"o{number}.test", Fail.SERVFAIL)
    log: list[tuple[str, float]] = []

    async def run() -> None:
        async with make_gate() as gate:
            await gate.check("http://known.test/")
            await clock.sleep(1.0)
            await asyncio.gather(*(gate.check(f"http://o{n}.test/") for n in range(40)))
            assert gate.stats().pacing.frozen
            began = clock.monotonic()
            assert await gate.allowed("http://known.test/x")
            await visit(gate, "http://known.test/x", log)
            assert clock.monotonic() - began <= 0.1
            assert gate.ready
            assert not gate.stats().pacing.frozen

    await internet.drive(run())
    assert len(log) == 1


async def test_waiters_can_be_cancelled_and_closed_during_a_local_fault(
    internet: FakeInternet, clock: VirtualClock, make_gate: MakeGate
) -> None:
    internet.site("known.test").on("/robots.txt", "", CloseSilently())
    for number in range(40):
        internet.dns(f"o{number}.test", Fail.SERVFAIL)

    async def run() -> None:
        async with make_gate() as gate:
            await gate.check("http://known.test/")
            await clock.sleep(1.0)
            # A probe that connects would end the fault.
            internet.dns("known.test", Fail.SERVFAIL)
            connector = gate.parts.connector
            assert isinstance(connector, TCPConnector)
            connector.clear_dns_cache()
            await cut_off(gate, but="known.test")
            with pytest.raises(LeaseTimeout):
                async with gate.lease("http://known.test/x", timeout=20.0):
                    pass
            gone = asyncio.create_task(visit(gate, "http://known.test/x", []))
            await clock.sleep(1.0)
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)
            assert gate.stats().pacing.waiting <= 1, "a probe that waits for its lease, at most"

    await internet.drive(run())


# -- what is learnt applies


async def test_an_interval_counts_from_the_robots_txt_request_that_brought_it(
    internet: FakeInternet, clock: VirtualClock, make_gate: MakeGate
) -> None:
    site = internet.site("a.test").robots("User-agent: *\nCrawl-delay: 3600\n")
    storage = MemoryStorage()
    log: list[tuple[str, float]] = []

    async def ask() -> None:
        async with make_gate(storage=storage) as gate:
            await gate.check(f"{A}/x")

    async def fetch() -> None:
        async with make_gate(storage=storage) as gate:
            await visit(gate, f"{A}/x", log)

    await internet.drive(ask())
    await internet.drive(fetch())
    assert site.paths == ["/robots.txt"]
    assert log[0][1] >= site.requests[0].at + 3600 - EPSILON


async def test_robots_txt_is_fetched_again_at_the_interval_it_asks_for(
    internet: FakeInternet, clock: VirtualClock, make_gate: MakeGate
) -> None:
    site = internet.site("a.test").robots("User-agent: *\nCrawl-delay: 30\n")

    async def run() -> None:
        async with make_gate() as gate:
            for _ in range(3):
                await gate.refresh(A)

    await internet.drive(run())
    assert all(gap >= 30.0 - EPSILON for gap in site.gaps())


async def test_a_host_that_does_not_answer_delays_no_other_host(
    internet: FakeInternet, clock: VirtualClock, make_gate: MakeGate
) -> None:
    hold = Hold()
    internet.site("slow.test").robots(hold)
    internet.site("a.test").robots("")
    log: list[tuple[str, float]] = []

    async def run() -> None:
        async with make_gate() as gate:
            slow = asyncio.create_task(visit(gate, "http://slow.test/", log))
            await hold.waiting.acquire()
            await visit(gate, f"{A}/", log)
            slow.cancel()
            await asyncio.gather(slow, return_exceptions=True)
            hold.release()

    await internet.drive(run(), limit=20.0)
    assert [url for url, _ in log] == [f"{A}/"]


@pytest.mark.parametrize("seed", range(5))
async def test_an_overloaded_site_is_asked_again_at_retry_at(
    internet: FakeInternet, clock: VirtualClock, make_gate: MakeGate, seed: int
) -> None:
    """Its block lasts a little longer than the file's own wait, by a random amount."""
    site = internet.site("a.test").robots("busy", status=503)

    async def run() -> tuple[Verdict, Verdict]:
        async with make_gate(seed=seed) as gate:
            first = await gate.check(f"{A}/")
            assert first.retry_at is not None
            site.robots("")
            # A datetime is rounded to a microsecond.
            await clock.sleep(first.retry_at.timestamp() - clock.wall() + 1e-6)
            return first.verdict, (await gate.check(f"{A}/")).verdict

    assert await internet.drive(run()) == (Verdict.DEFER, Verdict.ALLOW)


async def test_a_block_until_a_time_that_is_no_number_lifts_no_block(
    clock: VirtualClock, make_gate: MakeGate
) -> None:
    async with make_gate() as gate:
        gate.parts.scheduler.block("a.test", clock.wall() + 60, PARKED)
        with pytest.raises(ConfigError, match="is not a moment"):
            await gate.block("a.test", float("nan"))
        assert gate.parts.scheduler.blocked("a.test") is not None
