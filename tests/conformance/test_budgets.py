"""Daily budgets through every entry point, judged by the host's own log."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from gatekeeper import Deferred, NotYet
from gatekeeper.clock import utc
from tests.conformance.ways import session_on
from tests.internet import FakeInternet, redirect

TWO = {"pacing": {"max_pages_per_day": 2, "default_interval": 0.0}}
BYTES = {"pacing": {"default_interval": 0.0, "max_bytes_per_day": 100_000}}


async def test_a_spent_budget_defers_a_lease_and_no_question(
    internet: FakeInternet, open_gate: Any
) -> None:
    internet.site("a.test").robots("")
    gate = await open_gate(internet, **TWO)
    for number in range(2):
        async with gate.lease(f"http://a.test/{number}", timeout=10) as lease:
            lease.report(status=200)
    with pytest.raises(Deferred) as caught:
        await gate.acquire("http://a.test/3")
    decision = caught.value.decision
    assert decision.reason == "budget"
    assert "2 of 2 pages" in (decision.note or "")
    assert decision.retry_at is not None
    left = decision.retry_at - utc(internet.clock.wall())
    assert timedelta(hours=23.9) < left <= timedelta(hours=24, seconds=2)
    not_yet = await gate.try_acquire("http://a.test/3")
    assert isinstance(not_yet, NotYet)
    assert not_yet.why == "budget"
    # Questions concern robots.txt only: budgets, like blocks and pauses, apply to leases.
    assert await gate.allowed("http://a.test/3")
    assert await gate.check("http://a.test/3")


async def test_each_hop_of_a_redirect_is_a_page(internet: FakeInternet, open_gate: Any) -> None:
    site = internet.site("a.test").robots("")
    site.on("/from", redirect("/to"))
    site.page("/to")
    gate = await open_gate(internet, **TWO)
    async with session_on(internet, gate) as session:
        async with session.get("http://a.test/from") as response:
            await response.read()
        with pytest.raises(Deferred):
            await session.get("http://a.test/to")
    assert [one.path for one in internet.requests if one.path != "/robots.txt"] == ["/from", "/to"]


async def test_a_session_counts_the_bytes(internet: FakeInternet, open_gate: Any) -> None:
    site = internet.site("a.test").robots("")
    site.page("/", "x" * 60_000)
    gate = await open_gate(internet, **BYTES)
    async with session_on(internet, gate) as session:
        for _ in range(2):
            async with session.get("http://a.test/") as response:
                assert len(await response.read()) == 60_000
        with pytest.raises(Deferred) as caught:
            await session.get("http://a.test/")
    assert "120000 of 100000 bytes" in (caught.value.decision.note or "")


async def test_a_report_counts_the_bytes(internet: FakeInternet, open_gate: Any) -> None:
    internet.site("a.test").robots("")
    gate = await open_gate(internet, **BYTES)
    async with gate.lease("http://a.test/", timeout=10) as lease:
        lease.report(status=200, size=100_000)
        lease.report(status=200, size=100_000)
    with pytest.raises(Deferred) as caught:
        await gate.acquire("http://a.test/", timeout=10)
    assert "100000 of 100000 bytes" in (caught.value.decision.note or "")
