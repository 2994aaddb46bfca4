"""An operator's rule applies however the host is spelt, and ends when it is removed."""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime
from typing import Any

import pytest

from gatekeeper import ConfigError, Denied, Gatekeeper, HostRule, LeaseTimeout, Reason, Verdict
from gatekeeper.clock import VirtualClock
from tests.internet import FakeInternet
from tests.politeness.conftest import MakeGate

EPSILON = 1e-6
SPELLINGS = ["A.test", "a.test.", "a.test:8080", "http://a.test/", "HTTPS://A.TEST/x"]


async def held(gate: Gatekeeper) -> bool:
    try:
        async with gate.lease("http://a.test/x", timeout=5.0) as lease:
            lease.report(status=200)
    except LeaseTimeout:
        return True
    return False


async def pace(gate: Gatekeeper, clock: VirtualClock, url: str = "http://a.test/x") -> float:
    """Return the seconds between two leases."""
    at: list[float] = []
    for _ in range(2):
        async with gate.lease(url) as lease:
            at.append(clock.monotonic())
            lease.report(status=200)
    return at[1] - at[0]


@pytest.mark.parametrize("spelling", SPELLINGS)
async def test_a_pause_and_a_block_hold_under_any_spelling_of_the_host(
    internet: FakeInternet, clock: VirtualClock, make_gate: MakeGate, spelling: str
) -> None:
    internet.site("a.test").robots("")

    async def run() -> None:
        async with make_gate() as gate:
            await gate.pause(spelling)
            assert await held(gate)
            await gate.resume(spelling)
            assert not await held(gate)
            await gate.block(spelling, clock.wall() + 100.0)
            assert await held(gate)
            assert list(gate.parts.scheduler.watch()[0]) == ["a.test"]
            assert await gate.why(spelling) == await gate.why("a.test") != ()

    await internet.drive(run())


async def test_text_that_names_no_host_is_refused(
    make_gate: MakeGate, internet: FakeInternet
) -> None:
    async def run() -> None:
        async with make_gate() as gate:
            for method in (gate.pause, gate.resume, gate.why):
                with pytest.raises(ConfigError, match=r"'a\.test/x' is not a host"):
                    await method("a.test/x")
            with pytest.raises(ConfigError, match="is not a host"):
                await gate.block("*", 0.0)
            with pytest.raises(ConfigError, match="is not a host"):
                gate.override(HostRule(match="a b"))

    await internet.drive(run())


@pytest.mark.parametrize("match", [*SPELLINGS, "*.test", "*"])
async def test_an_interval_set_at_run_time_holds_until_the_next_rule(
    internet: FakeInternet, clock: VirtualClock, make_gate: MakeGate, match: str
) -> None:
    internet.site("a.test").robots("")

    async def run() -> list[float]:
        async with make_gate() as gate:
            found = [await pace(gate, clock)]
            gate.override(HostRule(match=match, interval=50.0))
            found.append(await pace(gate, clock))
            gate.override(HostRule(match=match))
            return [*found, await pace(gate, clock)]

    assert await internet.drive(run()) == pytest.approx([1.0, 50.0, 1.0])


async def test_a_rule_set_at_run_time_replaces_the_configured_one(
    internet: FakeInternet, clock: VirtualClock, make_gate: MakeGate
) -> None:
    internet.site("a.test").robots("")

    async def run() -> list[float]:
        host = [{"match": "A.test", "interval": 7.0}]
        async with make_gate(host=host) as gate:
            before = await pace(gate, clock)
            gate.override(HostRule(match="a.test"))
            return [before, await pace(gate, clock)]

    assert await internet.drive(run()) == pytest.approx([7.0, 1.0])


async def test_a_new_rule_replaces_the_earlier_one_whole(
    internet: FakeInternet, clock: VirtualClock, make_gate: MakeGate
) -> None:
    internet.site("a.test").robots("User-agent: *\nDisallow: /x\n")

    async def run() -> tuple[Verdict, float]:
        async with make_gate() as gate:
            gate.override(HostRule(match="a.test", interval=30.0, robots="allow"))
            await pace(gate, clock)
            gate.override(HostRule(match="a.test", robots="obey"))
            denied = (await gate.check("http://a.test/x")).verdict
            return denied, await pace(gate, clock, "http://a.test/y")

    verdict, seconds = await internet.drive(run())
    assert verdict is Verdict.DENY
    assert seconds == pytest.approx(1.0)


async def test_hosts_that_are_put_into_a_group_share_its_clock(
    internet: FakeInternet, clock: VirtualClock, make_gate: MakeGate
) -> None:
    for name in ("a.test", "b.test"):
        internet.site(name).robots("")
    group = [{"name": "g", "interval": 9.0}]

    async def visit(gate: Gatekeeper, name: str) -> float:
        async with gate.lease(f"http://{name}/") as lease:
            lease.report(status=200)
            return clock.monotonic()

    async def run() -> tuple[float, float]:
        async with make_gate(group=group) as gate:
            for name in ("a.test", "b.test"):
                await visit(gate, name)
            for name in ("a.test", "b.test"):
                gate.override(HostRule(match=name, group="g"))
            together = -await visit(gate, "a.test") + await visit(gate, "b.test")
            for name in ("a.test", "b.test"):
                gate.override(HostRule(match=name))
            return together, -await visit(gate, "a.test") + await visit(gate, "b.test")

    together, apart = await internet.drive(run())
    assert together >= 9.0 - EPSILON
    assert apart < 9.0


async def test_an_unknown_group_is_refused_and_changes_nothing(
    internet: FakeInternet, make_gate: MakeGate
) -> None:
    internet.site("a.test").robots("")

    async def run() -> Verdict:
        async with make_gate() as gate:
            with pytest.raises(ConfigError, match="named 'g'"):
                gate.override(HostRule(match="a.test", robots="deny", group="g"))
            return (await gate.check("http://a.test/")).verdict

    assert await internet.drive(run()) is Verdict.ALLOW


@pytest.mark.parametrize(
    ("match", "url"),
    [
        ("münchen.test", "http://münchen.test/x"),
        ("*.MÜNCHEN.test", "http://www.xn--mnchen-3ya.test/x"),
        ("[2001:db8::1]", "http://[2001:DB8::1]/x"),
        ("https://a.test/", "http://a.test/x"),
    ],
)
async def test_a_configured_rule_holds_for_every_spelling_of_its_host(
    internet: FakeInternet, make_gate: MakeGate, match: str, url: str
) -> None:
    host: list[dict[str, Any]] = [{"match": match, "robots": "deny", "reason": "asked to"}]
    guard = {"allow": ["127.0.0.0/8", "2001:db8::/32", "*.test"]}

    async def run() -> str | None:
        async with make_gate(host=host, guard=guard) as gate:
            return (await gate.check(url)).note

    assert await internet.drive(run()) == "asked to"


def moment(clock: VirtualClock, seconds: float) -> datetime:
    return datetime.fromtimestamp(clock.wall() + seconds, UTC)


async def test_an_interval_set_for_a_time_is_gone_after_it_and_the_earlier_one_is_back(
    internet: FakeInternet, clock: VirtualClock, make_gate: MakeGate
) -> None:
    internet.site("a.test").robots("")

    async def run() -> list[float]:
        async with make_gate(host=[{"match": "a.test", "interval": 7.0}]) as gate:
            gate.override(HostRule(match="*.test", interval=90.0))  # less specific
            gate.override(HostRule(match="A.test"), seconds=600.0)
            found = [await pace(gate, clock)]
            gate.override(HostRule(match="a.test.", interval=50.0), seconds=120.0)
            found.append(await pace(gate, clock))
            await clock.elapse(120.0)
            found.append(await pace(gate, clock))
            await clock.elapse(600.0)
            return [*found, await pace(gate, clock)]

    assert await internet.drive(run()) == pytest.approx([1.0, 50.0, 1.0, 7.0])


async def test_0_seconds_end_all_that_was_set_for_a_match(
    internet: FakeInternet, clock: VirtualClock, make_gate: MakeGate
) -> None:
    internet.site("a.test").robots("")

    async def run() -> list[float]:
        async with make_gate(host=[{"match": "a.test", "interval": 7.0}]) as gate:
            gate.override(HostRule(match="a.test", interval=30.0))
            gate.override(HostRule(match="a.test", interval=20.0), seconds=600.0)
            gate.override(HostRule(match="a.test"), seconds=0)
            return [await pace(gate, clock)]

    assert await internet.drive(run()) == pytest.approx([7.0])


@pytest.mark.parametrize("asked", ["before and meanwhile", "meanwhile", "neither"])
async def test_no_answer_given_under_a_rule_outlives_it(
    internet: FakeInternet, clock: VirtualClock, make_gate: MakeGate, asked: str
) -> None:
    """The short road keeps answers of warm origins, so a rule that ends has to reach it."""
    internet.site("a.test").robots("User-agent: *\nDisallow: /x\n")
    urls = ["http://a.test/x", "http://a.test/y"]

    async def verdicts(gate: Gatekeeper) -> list[Verdict]:
        found = []
        for url in urls * 3:
            found.append((await gate.check(url)).verdict)
            assert await gate.allowed(url) is (found[-1] is Verdict.ALLOW)
        return list(dict.fromkeys(found))

    async def run() -> None:
        async with make_gate(host=[{"match": "a.test", "robots": "deny"}]) as gate:
            for rule in (
                HostRule(match="a.test", until=moment(clock, 200.0)),
                HostRule(match="a.test", until=moment(clock, 100.0), robots="allow"),
                HostRule(match="a.test", until=moment(clock, 50.0), robots="deny"),
            ):
                gate.override(rule)
                if asked == "before and meanwhile":
                    await verdicts(gate)
            expected = [
                [Verdict.DENY],
                [Verdict.ALLOW],
                [Verdict.DENY, Verdict.ALLOW],
                [Verdict.DENY],
            ]
            for seconds, found in zip((50.0, 50.0, 100.0, 0.0), expected, strict=True):
                if asked != "neither" or found is expected[-1]:
                    assert await verdicts(gate) == found
                await clock.elapse(seconds)

    await internet.drive(run())


async def test_a_waiter_gets_no_lease_by_a_rule_that_has_ended(
    internet: FakeInternet, clock: VirtualClock, make_gate: MakeGate
) -> None:
    """The pace of the rule below is faster: the waiter is due as soon as the rule ends."""
    internet.site("a.test").robots("User-agent: *\nDisallow: /z\n")

    async def run() -> None:
        async with make_gate(host=[{"match": "a.test", "robots": "deny"}]) as gate:
            until = moment(clock, 300.0)
            gate.override(HostRule(match="a.test", interval=500.0, until=until))
            for _ in range(5):
                assert await gate.check("http://a.test/x")
            with pytest.raises(Denied) as refused:
                await gate.acquire("http://a.test/x", owned=False)
            assert refused.value.decision.reason is Reason.OPERATOR
            assert clock.wall() == pytest.approx(until.timestamp())

    await internet.drive(run())


async def test_a_reload_lets_no_waiter_go_by_the_rules_before_it(
    internet: FakeInternet, clock: VirtualClock, make_gate: MakeGate
) -> None:
    internet.site("a.test").robots("User-agent: *\nDisallow: /z\n")

    async def run() -> None:
        async with make_gate(host=[{"match": "a.test", "interval": 500.0}]) as gate:
            for _ in range(5):
                assert await gate.check("http://a.test/x")
            waiter = asyncio.create_task(gate.acquire("http://a.test/x", owned=False))
            await clock.elapse(100.0)
            gate.parts.scheduler.replace_rules((HostRule(match="a.test", robots="deny"),))
            with pytest.raises(Denied):
                await waiter

    await internet.drive(run())


async def test_decision_clocks_and_log_say_who_set_a_rule_and_until_when(
    internet: FakeInternet,
    clock: VirtualClock,
    make_gate: MakeGate,
    caplog: pytest.LogCaptureFixture,
) -> None:
    internet.site("a.test").robots("")
    caplog.set_level(logging.INFO, logger="gatekeeper")

    async def run() -> None:
        async with make_gate() as gate:
            until = moment(clock, 3600.0)
            rule = HostRule(
                match="a.test", robots="deny", reason="a complaint", by="Kim", until=until
            )
            gate.override(rule)
            shown = f"{until:%Y-%m-%dT%H:%M:%SZ}"
            decision = await gate.check("http://a.test/x")
            assert decision.note == f"a complaint (by Kim, until {shown})"
            assert decision.expires_at == until
            (view,) = await gate.why("a.test")
            assert (view.kind, view.until, view.scope) == ("override", until, "a.test")
            assert str(view) == (
                f"a.test: override: robots deny: a complaint (by Kim) (until {shown})"
            )
            assert [record.getMessage() for record in caplog.records] == [
                f"the override for a.test is now: robots deny: a complaint (by Kim, until {shown})"
            ]
            caplog.clear()
            await clock.elapse(3600.0)
            assert await gate.why("a.test") == ()
            assert (await gate.check("http://a.test/x")).note is None
            assert [record.getMessage() for record in caplog.records] == [
                "the override for a.test has ended: robots deny: "
                f"a complaint (by Kim, until {shown})"
            ]

    await internet.drive(run())


async def test_an_end_is_noticed_within_half_a_minute_when_the_wall_clock_is_set(
    internet: FakeInternet, clock: VirtualClock, make_gate: MakeGate
) -> None:
    internet.site("a.test").robots("")

    async def run() -> None:
        async with make_gate() as gate:
            gate.override(HostRule(match="a.test", robots="deny"), seconds=86_400.0)
            clock.jump_wall(80_000.0)
            await clock.elapse(30.0)
            assert not await gate.allowed("http://a.test/x")
            clock.jump_wall(6_500.0)
            await clock.elapse(30.0)
            assert await gate.allowed("http://a.test/x")
            clock.jump_wall(-86_400.0)
            await clock.elapse(30.0)
            assert await gate.allowed("http://a.test/x")

    await internet.drive(run())


async def test_a_configured_rule_ends_before_and_while_the_gate_is_open(
    internet: FakeInternet, clock: VirtualClock, make_gate: MakeGate
) -> None:
    for name in ("a.test", "b.test"):
        internet.site(name).robots("")

    async def run() -> None:
        host = [
            {"match": "a.test", "robots": "deny", "until": moment(clock, 10.0)},
            {"match": "b.test", "robots": "deny", "until": moment(clock, 100.0)},
        ]
        gate = make_gate(host=host)
        clock.advance(10.0)
        async with gate:
            assert await gate.allowed("http://a.test/")
            assert not await gate.allowed("http://b.test/")
            await clock.elapse(90.0)
            assert await gate.allowed("http://b.test/")

    await internet.drive(run())


async def test_the_interval_of_a_rule_says_who_set_it_and_until_when(
    internet: FakeInternet, clock: VirtualClock, make_gate: MakeGate
) -> None:
    internet.site("a.test").robots("")

    async def run() -> None:
        async with make_gate() as gate:
            until = moment(clock, 3600.0)
            gate.override(HostRule(match="*.test", interval=50.0, by="Kim", until=until))
            assert await pace(gate, clock) == pytest.approx(50.0)
            shown = f"(by Kim, until {until:%Y-%m-%dT%H:%M:%SZ})"
            views = {view.source: view for view in await gate.why("a.test")}
            assert views[f"operator: 50 s for *.test {shown}"].kind == "interval"
            assert views["robots obey, interval 50.0: by Kim"].until == until

    await internet.drive(run())
