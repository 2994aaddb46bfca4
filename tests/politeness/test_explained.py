"""Explanations of a gate's clocks for a real robots.txt: field, value, line and time."""

from __future__ import annotations

import re

import pytest

from gatekeeper import Decision, Gatekeeper
from gatekeeper.clock import VirtualClock
from tests.internet import FakeInternet
from tests.politeness.conftest import MakeGate

TEN = (
    "# ours\nUser-agent: *\nDisallow: /no\n\n"
    "Crawl-delay: 2\nSitemap: http://a.test/s\ncrawl-delay: 10\n"
)
BY_THE_HOUR = "User-agent: *\nRequest-rate: 1/2s\nRequest-rate: 1/100s 1415-1420\n"
"""The clock starts at 14:13:20."""


async def visit(
    gate: Gatekeeper, status: int | None = 200, retry_after: str | None = None
) -> Decision:
    async with gate.lease("http://a.test/x") as lease:
        if status is not None:
            lease.report(status=status, retry_after=retry_after)
    return lease.decision


async def sources(gate: Gatekeeper, kind: str = "interval") -> list[str]:
    return [view.source for view in await gate.why("a.test") if view.kind == kind]


@pytest.mark.parametrize(
    ("text", "source"),
    [
        (TEN, "crawl-delay 10 s from robots.txt line 7"),
        (
            "User-agent: *\nCrawl-delay: 1\nRequest-rate: 10/1m\n",
            "request-rate 10/60s, that is 6 s, from robots.txt line 3",
        ),
        ("User-agent: *\nDisallow:\n", "robots.txt gives no rate: pacing.default_interval 1 s"),
    ],
)
async def test_an_interval_names_the_line_that_is_in_force(
    internet: FakeInternet, make_gate: MakeGate, text: str, source: str
) -> None:
    internet.site("a.test").robots(text)

    async def run() -> None:
        async with make_gate() as gate:
            await visit(gate)
            assert await sources(gate) == [source]
            assert await sources(gate, "next") == [source]

    await internet.drive(run())


async def test_the_line_changes_with_the_hour(
    internet: FakeInternet, clock: VirtualClock, make_gate: MakeGate
) -> None:
    internet.site("a.test").robots(BY_THE_HOUR)

    async def run() -> list[str]:
        async with make_gate() as gate:
            await visit(gate)
            found = await sources(gate)
            await clock.sleep(120.0)
            await visit(gate)
            return found + await sources(gate)

    first, second = await internet.drive(run())
    assert first.endswith("that is 2 s, from robots.txt line 2")
    assert second == "request-rate 1/100s 1415-1420 UTC, that is 100 s, from robots.txt line 3"


async def test_a_block_names_the_answer_and_what_it_asked_for(
    internet: FakeInternet, make_gate: MakeGate
) -> None:
    internet.site("a.test").robots(TEN)

    async def run() -> list[str]:
        async with make_gate() as gate:
            await visit(gate, 429, retry_after="120")
            return [str(view) for view in await gate.why("a.test")]

    views = "\n".join(await internet.drive(run()))
    assert "crawl-delay 10 s from robots.txt line 7" in views
    assert re.search(r"block: 429 at 14:13, Retry-After 120 \(until 2026-09-21T14:15", views)


async def test_a_block_by_the_operator_is_explained_without_a_response(
    internet: FakeInternet, clock: VirtualClock, make_gate: MakeGate
) -> None:
    async def run() -> None:
        async with make_gate() as gate:
            await gate.block("b.test", clock.wall() + 3600.0, "on request")
            (view,) = [view for view in await gate.why("b.test") if view.kind == "block"]
            assert view.since is None
            assert "block: on request (until" in str(view)

    await internet.drive(run())


@pytest.mark.parametrize("status", [404, None])
async def test_an_answer_without_a_refusal_leaves_the_line_in_force(
    internet: FakeInternet, make_gate: MakeGate, status: int | None
) -> None:
    internet.site("a.test").robots(TEN)

    async def run() -> list[str]:
        async with make_gate() as gate:
            await visit(gate, status)
            return await sources(gate)

    assert await internet.drive(run()) == ["crawl-delay 10 s from robots.txt line 7"]


# -- the operator's cap


CUT = "crawl-delay 10 s from robots.txt line 7, capped at 5 s by pacing.max_interval"


async def test_every_decision_says_that_its_interval_is_capped(
    internet: FakeInternet, make_gate: MakeGate
) -> None:
    internet.site("a.test").robots(TEN)

    async def run() -> None:
        async with make_gate(pacing={"max_interval": 5.0}) as gate:
            urls = [f"http://a.test/{number}" for number in range(3)]
            found = [await gate.check(url) for url in urls]
            found += [await gate.check("http://a.test/no"), await visit(gate)]
            found += await gate.check_all(urls)
            peeked = gate.peek(urls[0])
            assert peeked is not None
            for decision in [*found, peeked]:
                assert (decision.clamped, decision.note) == (True, CUT)
                assert decision.crawl_delay == 10.0
            assert CUT in found[0].explain()
            (said,) = [view for view in await gate.why("a.test") if view.kind == "interval"]
            assert (said.clamped, said.seconds) == (True, 5.0)

    await internet.drive(run())


@pytest.mark.parametrize("cap", [None, 10.0])
async def test_a_cap_above_the_interval_is_not_mentioned(
    internet: FakeInternet, make_gate: MakeGate, cap: float | None
) -> None:
    internet.site("a.test").robots(TEN)

    async def run() -> None:
        async with make_gate(pacing={} if cap is None else {"max_interval": cap}) as gate:
            for _ in range(2):
                decision = await gate.check("http://a.test/x")
                assert (decision.clamped, decision.note) == (False, None)

    await internet.drive(run())


async def test_a_cap_is_mentioned_at_the_hours_whose_interval_it_lowers(
    internet: FakeInternet, clock: VirtualClock, make_gate: MakeGate
) -> None:
    internet.site("a.test").robots(BY_THE_HOUR)

    async def run() -> list[bool]:
        async with make_gate(pacing={"max_interval": 5.0}) as gate:
            found = []
            for _ in range(3):
                found.append((await gate.check("http://a.test/x")).clamped)
                await clock.sleep(240.0)
            return found

    assert await internet.drive(run()) == [False, True, False]
