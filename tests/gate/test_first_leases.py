"""The first leases of an origin have the decision that `check` gives."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
import pytest

from gatekeeper import Config, Decision, Denied, Gatekeeper, HostRule, LeaseTimeout, Reason, Verdict
from tests.gate_support import QUICK, common, gate_on, open_config
from tests.internet import FakeInternet

ROBOTS = "User-agent: *\nAllow: /private/open\nDisallow: /private\nDisallow: /*.pdf$\n"
PATHS = ("/a", "/private/open/x", "/b?q=1", "/robots.txt", "/c", "/d")


def config(*hosts: HostRule) -> Config:
    return msgspec.structs.replace(open_config(pacing=QUICK), host=hosts)


@pytest.fixture
async def gate(net: FakeInternet) -> AsyncIterator[Gatekeeper]:
    net.site("a.test").robots(ROBOTS)
    net.site("absent.test")
    async with gate_on(net, config()) as gate:
        yield gate


async def leased(gate: Gatekeeper, url: str) -> Decision:
    async with gate.lease(url) as lease:
        lease.report(status=200)
        return lease.decision


@pytest.mark.parametrize("host", ["a.test", "absent.test"])
async def test_each_of_the_first_leases_has_the_decision_of_a_check(
    net: FakeInternet, gate: Gatekeeper, host: str
) -> None:
    for path in PATHS:
        url = f"http://{host}{path}"
        had = await net.drive(leased(gate, url))
        assert common(had) == common(await net.drive(gate.check(url)))


async def test_a_denied_url_gets_no_first_lease(
    virtual_internet: FakeInternet, gate: Gatekeeper
) -> None:
    for path in ("/private", "/x.pdf", "/private/y", "/a", "/y.pdf", "/private/z"):
        if path == "/a":
            await virtual_internet.drive(leased(gate, "http://a.test/a"))
            continue
        with pytest.raises(Denied):
            await virtual_internet.drive(leased(gate, f"http://a.test{path}"))
    assert gate.stats().decisions[Verdict.DENY, Reason.RULE] == 5


@pytest.mark.parametrize("before", [0, 3])
async def test_the_decision_of_a_lease_is_that_of_its_grant_after_a_refresh(
    net: FakeInternet, gate: Gatekeeper, before: int
) -> None:
    """Of a warm origin it is made when it is read: by the rules that granted the lease."""

    async def hold() -> Decision:
        for _ in range(before):
            await leased(gate, "http://a.test/a")
        async with gate.lease("http://a.test/private/open/x") as lease:
            net.site("a.test").robots("User-agent: *\nDisallow: /\n")
            lease.report(status=200)
            lease.end()
            await gate.refresh("http://a.test")
            return lease.decision

    decision = await net.drive(hold())

    assert decision.rule is not None
    assert decision.rule.value == "/private/open"
    with pytest.raises(Denied):
        await net.drive(leased(gate, "http://a.test/private/open/x"))


async def test_the_decision_of_a_lease_of_a_warm_origin_is_made_and_counted_once_if_it_is_read(
    net: FakeInternet, gate: Gatekeeper
) -> None:
    def counted() -> int:
        return sum(gate.stats().decisions.values())

    async def hold() -> None:
        for _ in range(3):
            await leased(gate, "http://a.test/a")
        before = counted()
        async with gate.lease("http://a.test/b") as lease:
            lease.report(status=200)
            assert counted() == before
            decision = lease.decision
            assert lease.decision is decision
            assert counted() == before + 1

    await net.drive(hold())


@pytest.mark.parametrize("answered_before", [False, True])
async def test_a_rule_of_the_operator_and_the_guard_decide_before_the_first_lease(
    net: FakeInternet, answered_before: bool
) -> None:
    net.site("a.test").robots(ROBOTS)
    closed = config(HostRule(match="a.test", robots="deny"))
    gate = gate_on(net, closed)
    async with gate:
        if answered_before:  # its robots.txt may always be fetched
            await net.drive(gate.robots("http://a.test/"))
        for url in ("http://a.test/a", "http://10.0.0.1/a", "http://me:secret@b.test/"):
            with pytest.raises(Denied):
                await net.drive(leased(gate, url))


async def test_a_decision_that_is_interrupted_as_it_is_read_is_made_at_the_next_reading(
    net: FakeInternet, gate: Gatekeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hold() -> Decision:
        for _ in range(3):
            await leased(gate, "http://a.test/a")
        async with gate.lease("http://a.test/b") as lease:
            lease.report(status=200)
            with monkeypatch.context() as patch:
                patch.setattr(gate.parts.decider, "tell_by", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    _ = lease.decision
            return lease.decision

    def interrupted(*_: object) -> Decision:
        raise KeyboardInterrupt

    decision = await net.drive(hold())
    assert decision.url == "http://a.test/b"
    assert decision.id


@pytest.mark.parametrize(("octets", "kept"), [(100, True), (40_000, False)])
async def test_a_lease_keeps_no_large_text_for_its_decision(
    net: FakeInternet, gate: Gatekeeper, octets: int, kept: bool
) -> None:
    net.site("large.test").robots(ROBOTS + "Disallow: /x\n" * (octets // 13))

    async def hold() -> int:
        for _ in range(3):
            await leased(gate, "http://large.test/a")
        before = sum(gate.stats().decisions.values())
        async with gate.lease("http://large.test/b") as lease:
            lease.report(status=200)
            return sum(gate.stats().decisions.values()) - before

    assert await net.drive(hold()) == (0 if kept else 1)


async def test_a_file_of_another_dialect_grants_the_leases_of_a_warm_origin_at_once(
    net: FakeInternet, gate: Gatekeeper
) -> None:
    net.site("old.test").robots("User-agent: *\nRobot-version: 1.0\nDisallow: /x\n")

    async def hold() -> None:
        for _ in range(3):
            await leased(gate, "http://old.test/a")
        leases = gate.parts.leases
        assert leases.acquire_nowait("http://old.test/x1", None) is None
        assert leases.acquire_nowait("http://old.test/a%", None) is None  # not sent so
        found = leases.acquire_nowait("http://old.test/b", None)
        assert found is not None
        found.give_back()

    await net.drive(hold())


async def test_the_interval_of_a_file_holds_from_the_first_lease_on(
    net: FakeInternet, gate: Gatekeeper
) -> None:
    net.site("slow.test").robots("User-agent: *\nCrawl-delay: 5\n")

    async def crawl() -> list[float]:
        starts = []
        for number in range(3):
            async with gate.lease(f"http://slow.test/{number}") as lease:
                lease.report(status=200)
                starts.append(net.clock.monotonic())
        return starts

    began = net.clock.monotonic()
    starts = await net.drive(crawl())

    assert [round(start - began) for start in starts] == [5, 10, 15]


async def test_a_lease_that_waits_for_a_waiting_robots_txt_says_when_to_ask_again(
    net: FakeInternet, gate: Gatekeeper
) -> None:
    """Two origins of a host have a file each, and one clock."""
    net.site("slow.test").robots("User-agent: *\nCrawl-delay: 50\n").page("/", "a page")
    net.site("slow.test:8080").robots(ROBOTS)
    await net.drive(leased(gate, "http://slow.test/"))
    due = net.clock.wall() + 50.0
    with pytest.raises(LeaseTimeout, match=r"robots\.txt was not fetched within 2 s") as late:
        await net.drive(gate.acquire("http://slow.test:8080/a", timeout=2.0))
    assert late.value.retry_at is not None
    assert late.value.retry_at.timestamp() == pytest.approx(due, abs=1.0)
