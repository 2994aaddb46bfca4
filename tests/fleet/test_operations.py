"""An operator's actions on one member apply to all of them, and each member shows all holds."""

from __future__ import annotations

import asyncio
import time as clock
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from typing import Any

import aiohttp
import pytest

from gatekeeper import Deferred, Gatekeeper, LeaseTimeout, RemoteGatekeeper
from gatekeeper.config import HostRule
from gatekeeper.fleet import RedisLedger, redis_ledger
from tests.conformance.ways import AGENT, Sidecar, settings
from tests.fleet.conftest import FleetTime, Join, deafen
from tests.fleet.server import Server
from tests.internet import FakeInternet
from tests.waiting_support import seen_in_time, until

URL = "http://a.test/x"
TwoGates = tuple[Gatekeeper, Gatekeeper]


@pytest.fixture
def frequent_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members notice sooner what no message tells them."""
    monkeypatch.setattr(redis_ledger, "HEARTBEAT_SECONDS", 0.2)


@pytest.fixture
async def gates(internet: FakeInternet, join: Join) -> AsyncIterator[TwoGates]:
    """Two gates of one fleet, and one site."""
    internet.site("a.test").robots("").page("/x")
    async with AsyncExitStack() as stack:
        made = []
        for _ in range(2):
            ledger = await join()
            gate = Gatekeeper(
                *(AGENT,), config=settings(), resolver=internet.resolver, ledger=ledger
            )
            made.append(await stack.enter_async_context(gate))
            await until(lambda ledger=ledger: ledger.hearing)
        yield made[0], made[1]


async def asks(gate: Gatekeeper) -> None:
    async with gate.lease(URL, timeout=5) as lease:
        lease.report(status=200)


async def test_a_pause_and_a_resume_reach_the_other_members(gates: TwoGates) -> None:
    one, other = gates
    await asks(one)
    await asks(other)
    await one.pause("a.test")
    await until(lambda: paused(other))
    with pytest.raises(LeaseTimeout):
        await other.acquire(URL, timeout=0.2, owned=False)
    waiting = asyncio.create_task(asks(other))
    await other.resume("a.test")  # although the other member paused it
    await waiting
    await until(lambda: not_paused(one))
    await asks(one)


async def test_a_claim_that_the_store_lost_fetches_no_file_twice(
    gates: TwoGates, internet: FakeInternet, server: Server
) -> None:
    """Both members wait for the host's lease: the second one takes the first one's result, and the
    lease that it gives back delays nobody."""
    one, other = gates
    site = internet.site("a.test").robots("User-agent: *\nCrawl-delay: 0.1")
    await asks(one)
    await asks(other)
    before = len([1 for request in site.requests if request.path == "/robots.txt"])
    async with one.lease(URL, timeout=20) as lease:
        refreshing = [asyncio.create_task(one.refresh("http://a.test"))]
        claim = "{gatekeeper}:f:http://a.test"
        await until(lambda: server.ask("EXISTS", claim) == b":1\r\n")
        await until(lambda: one.stats().pacing.waiting == 1)
        server.ask("DEL", claim)
        refreshing.append(asyncio.create_task(other.refresh("http://a.test")))
        await until(lambda: other.stats().pacing.waiting == 1)
        lease.report(status=200)
    await asyncio.gather(*refreshing)
    after = len([1 for request in site.requests if request.path == "/robots.txt"])
    assert after == before + 1
    assert [gate.stats().pacing.in_flight for gate in gates] == [0, 0]
    await asks(one)


@pytest.mark.usefixtures("frequent_heartbeats")
async def test_a_file_that_one_member_has_is_not_fetched_again_after_a_loss(
    gates: TwoGates, internet: FakeInternet, server: Server
) -> None:
    """The other one needs it for the first time, while or after the members push what they know."""
    one, _ = gates
    site = internet.site("a.test").robots("User-agent: *\nDisallow: /x")
    assert not await one.allowed(URL)
    server.ask("FLUSHALL")
    assert [await gate.allowed(URL) for gate in gates] == [False, False]
    assert len([1 for request in site.requests if request.path == "/robots.txt"]) == 1


async def paused(gate: Gatekeeper) -> bool:
    return any(view.kind == "pause" for view in await gate.why("a.test"))


async def not_paused(gate: Gatekeeper) -> bool:
    return not await paused(gate)


async def blocked(gate: Gatekeeper) -> bool:
    return any(view.kind == "block" for view in await gate.why("a.test"))


async def not_blocked(gate: Gatekeeper) -> bool:
    return not await blocked(gate)


async def test_a_block_that_only_one_that_left_had_met_outlasts_a_loss(
    gates: TwoGates, server: Server
) -> None:
    """The other member did not know the host, and obeys the block all the same."""
    one, other = gates
    await one.block("a.test", clock.time() + 600, "429")
    await until(lambda: blocked(other))
    await one.__aexit__(None, None, None)
    server.ask("FLUSHALL")
    with pytest.raises(LeaseTimeout):
        await other.acquire(URL, timeout=0.3)
    assert await blocked(other)


async def test_a_block_and_its_end_reach_the_other_members(gates: TwoGates) -> None:
    one, other = gates
    await asks(one)
    await asks(other)
    await one.block("a.test", clock.time() + 600, "maintenance")
    await until(lambda: blocked(other))
    with pytest.raises(LeaseTimeout):
        await other.acquire(URL, timeout=0.1)
    await other.block("a.test", 0.0)
    await asks(other)
    await until(lambda: not_blocked(one))
    await asks(one)


async def test_a_pause_holds_for_a_member_that_missed_its_message(
    gates: TwoGates, join: Join, internet: FakeInternet
) -> None:
    """For a member that joins later and does not know the host."""
    await gates[0].pause("a.test")
    ledger = await join()
    late = Gatekeeper(AGENT, config=settings(), resolver=internet.resolver, ledger=ledger)
    async with late:
        with pytest.raises((LeaseTimeout, Deferred)):
            await late.acquire(URL, timeout=0.3)
        await late.resume("a.test")
        await asks(late)


async def test_a_refresh_fetches_once_and_every_member_has_the_new_file(
    gates: TwoGates, internet: FakeInternet
) -> None:
    one, other = gates
    assert await one.allowed(URL)
    assert await other.allowed(URL)
    fetched = sum(request.path == "/robots.txt" for request in internet.requests)
    assert fetched == 1
    internet.site("a.test").robots("User-agent: *\nDisallow: /x\n")
    await one.refresh("http://a.test")
    assert not await one.allowed(URL)
    await until(lambda: denied(other))
    assert sum(request.path == "/robots.txt" for request in internet.requests) == 2


async def denied(gate: Gatekeeper) -> bool:
    return not await gate.allowed(URL)


async def test_an_override_holds_for_all_members_and_for_later_ones(
    gates: TwoGates, join: Join, internet: FakeInternet, server: Server
) -> None:
    one, other = gates
    assert await other.allowed(URL)
    one.override(HostRule(match="a.test", robots="deny", reason="closed"))
    await until(lambda: denied(other))
    ledger = await join()
    late = Gatekeeper(AGENT, config=settings(), resolver=internet.resolver, ledger=ledger)
    async with late:
        await until(lambda: denied(late))
        # The latest override applies, whichever member set it ...
        late.override(HostRule(match="a.test", robots="obey", max_pages_per_day=2))
        await until(lambda: allowed(one))
        await until(lambda: allowed(other))
        await asks(one)
        await asks(other)
        with pytest.raises(Deferred) as caught:
            await late.acquire(URL, timeout=3)
        assert caught.value.decision.reason == "budget"
    # ... even if the store has lost it.
    assert int(server.ask("EXISTS", "{gatekeeper}:overrides")[1:2]) == 1


async def allowed(gate: Gatekeeper) -> bool:
    return await gate.allowed(URL)


def moment(seconds: float) -> datetime:
    return datetime.now(UTC) + timedelta(seconds=seconds)


async def note_of(gate: Gatekeeper) -> str | None:
    return (await gate.check(URL)).note


async def test_an_override_ends_on_all_members_and_then_the_one_below_it_is_in_force(
    gates: TwoGates, join: Join, internet: FakeInternet
) -> None:
    one, other = gates
    assert await other.allowed(URL)
    one.override(HostRule(match="a.test", robots="deny", reason="below"), seconds=3600)
    await until(lambda: denied(other))

    async def allow(seconds: float) -> None:
        rule = HostRule(match="a.test", robots="allow", by="Kim", until=moment(seconds))
        other.override(rule)

    await seen_in_time(allow, lambda: allowed(one))
    ledger = await join()
    late = Gatekeeper(AGENT, config=settings(), resolver=internet.resolver, ledger=ledger)
    async with late:
        await until(lambda: denied(late))  # it has both rules, and both end
        for gate in (one, other, late):
            await until(lambda gate=gate: denied(gate))
            assert (await note_of(gate) or "").startswith("below (until 20")
        late.override(HostRule(match="a.test"), seconds=0)
        for gate in (one, other, late):
            await until(lambda gate=gate: allowed(gate))
            assert await note_of(gate) is None


@pytest.mark.usefixtures("frequent_heartbeats")
async def test_an_override_that_has_ended_comes_back_neither_from_the_store_nor_after_a_loss(
    join: Join, server: Server, time: FleetTime, internet: FakeInternet
) -> None:
    ledger = await join()
    one = Gatekeeper(AGENT, config=settings(), resolver=internet.resolver, ledger=ledger)
    internet.site("a.test").robots("")
    texts = "HGETALL", "{gatekeeper}:overrides"
    async with one:

        async def deny(seconds: float) -> None:
            rule = HostRule(match="a.test", robots="deny", by="Kim", until=moment(seconds))
            one.override(rule)

        async def is_told() -> bool:
            return b"Kim, until" in server.ask(*texts)

        await seen_in_time(deny, is_told)
        await until(lambda: allowed(one))
        # Members of earlier versions, which know no end, are told what is in force again.
        await until(lambda: b"Kim" not in server.ask(*texts))
        for lost in (False, True):
            if lost:
                server.ask("FLUSHALL")
                await until(lambda: b"obey" in server.ask(*texts))
            heard: list[str] = []
            ledger = await join()
            ledger.overrides.follow(lambda match, _rules, heard=heard: heard.append(match))
            late = Gatekeeper(AGENT, config=settings(), resolver=internet.resolver, ledger=ledger)
            async with late:
                await until(lambda heard=heard: heard)
                assert await late.allowed(URL)
                assert await one.allowed(URL)
                assert not late.parts.scheduler.host_rules.entries()


async def test_overrides_outlive_the_stores_memory_and_lost_messages(
    join: Join, server: Server, time: FleetTime
) -> None:
    one, other = await join(), await join()
    heard: list[tuple[HostRule, ...]] = []
    other.overrides.follow(lambda _match, rules: heard.append(rules))
    rule = HostRule(match="a.test", interval=7.0, until=moment(3600.0))
    one.overrides.say("a.test", (rule,), rule)
    await until(lambda: heard == [(rule,)])
    server.ask("FLUSHALL")
    newcomer = RedisLedger(server.url, clock=time.clock)
    found: list[tuple[HostRule, ...]] = []
    newcomer.overrides.follow(lambda _match, rules: found.append(rules))
    async with newcomer:
        await until(lambda: found == [(rule,)])
    # The next heartbeat makes up for a lost message.
    await deafen(other)
    other_rule = HostRule(match="b.test", interval=8.0)
    one.overrides.say("b.test", (other_rule,), other_rule)
    await until(lambda: len(heard) == 2)


async def test_every_member_knows_which_member_holds_a_lease(
    gates: TwoGates, internet: FakeInternet, server: Server
) -> None:
    one, _ = gates
    sidecar = Sidecar(internet, settings(fleet={"url": server.url}), None)
    await sidecar.start()
    try:
        held = await one.acquire(URL, owned=False)
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{sidecar.where}/v1/hosts/a.test") as response,
        ):
            body = await response.json()
        (scope,) = body["fleet"]
        assert scope["scope"] == "a.test"
        assert body["state"] == "busy"
        (hold,) = scope["holds"]
        fleet = one.stats().fleet
        assert fleet is not None
        assert hold["member"].startswith(fleet.member + ".")
        assert hold["since"] < hold["until"]
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{sidecar.where}/ui/hosts/a.test") as response,
        ):
            page = await response.text()
        assert hold["member"] in page
        held.end()
    finally:
        await sidecar.stop()


@pytest.mark.parametrize("way", ["acquire", "a sidecar"])
async def test_a_question_that_waits_in_a_quarantine_is_told_of_the_fleet(
    internet: FakeInternet, join: Join, way: str
) -> None:
    """Like a request that waits for a lease: otherwise nothing would explain why a healthy site is
    not requested."""
    site = internet.site("a.test").robots("")
    ledger = await join(wait=False)
    async with AsyncExitStack() as stack:
        if way == "acquire":
            options = {"config": settings(), "resolver": internet.resolver, "ledger": ledger}
            gate: Any = Gatekeeper(AGENT, **options)
        else:
            sidecar = Sidecar(internet, settings(), None)
            sidecar.options["ledger"] = ledger
            await sidecar.start()
            stack.push_async_callback(sidecar.stop)
            gate = RemoteGatekeeper(sidecar.where, AGENT)
        await stack.enter_async_context(gate)
        waits = r"its robots\.txt was not fetched.*; a new or emptied store: waiting \d+ s"
        with pytest.raises(LeaseTimeout, match=waits):
            await gate.acquire(URL, timeout=0.2, owned=False)
    assert site.paths == []
