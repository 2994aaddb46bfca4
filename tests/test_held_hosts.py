"""Questions about hosts that may not be asked: answered at once, with a moment to ask again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from datetime import timedelta
from typing import Any

import pytest

from gatekeeper import (
    Decision,
    Deferred,
    Gatekeeper,
    LeaseTimeout,
    MemoryLedger,
    Reason,
    State,
    Verdict,
)
from gatekeeper.clock import VirtualClock, utc
from gatekeeper.pacing.ledger import Granted, NotBefore, TakeRequest
from tests.gate_support import QUICK, gate_on, open_config
from tests.internet import FakeInternet, Page, redirect

CONFIG = open_config(pacing=QUICK)


@pytest.fixture
async def gate(internet: FakeInternet, clock: VirtualClock) -> AsyncIterator[Gatekeeper]:
    for name in ("a.test", "b.test"):
        internet.site(name).robots("User-agent: *\nDisallow: /private\n")
    async with gate_on(internet, CONFIG, clock=clock) as gate:
        yield gate


async def block(gate: Gatekeeper, clock: VirtualClock, seconds: float = 300.0) -> None:
    await gate.block("a.test", clock.wall() + seconds)


def deferred(decision: Decision, clock: VirtualClock, reason: Reason, seconds: float) -> None:
    assert (decision.verdict, decision.reason) == (Verdict.DEFER, reason)
    assert decision.state is State.UNREACHABLE
    assert decision.retry_at is not None
    assert abs(decision.retry_at - utc(clock.wall() + seconds)) < timedelta(seconds=1)


async def test_a_blocked_host_defers_to_the_end_of_its_block(
    gate: Gatekeeper, clock: VirtualClock
) -> None:
    await block(gate, clock)
    deferred(await gate.check("http://a.test/x"), clock, Reason.HOST_BLOCKED, 300)
    deferred(await gate.check("http://a.test/y"), clock, Reason.HOST_BLOCKED, 300)
    assert not await gate.allowed("http://a.test/x")


async def test_a_question_about_a_paused_host_is_deferred_with_a_retry_at(
    gate: Gatekeeper, clock: VirtualClock
) -> None:
    await gate.pause("a.test")
    deferred(await gate.check("http://a.test/x"), clock, Reason.HOST_PAUSED, 60)


async def test_a_known_origin_of_a_blocked_host_is_answered(
    gate: Gatekeeper, clock: VirtualClock
) -> None:
    assert await gate.allowed("http://a.test/x")
    await block(gate, clock)
    assert await gate.allowed("http://a.test/y")
    assert not await gate.allowed("http://a.test/private")


async def test_a_batch_waits_for_no_blocked_host(gate: Gatekeeper, clock: VirtualClock) -> None:
    await block(gate, clock)
    urls = ["http://a.test/x", "http://b.test/x", "http://a.test/y"]
    verdicts = [one.verdict async for one in gate.check_many(urls)]
    assert verdicts == [Verdict.DEFER, Verdict.ALLOW, Verdict.DEFER]


async def test_a_file_redirected_to_a_blocked_host_defers_at_once(
    gate: Gatekeeper, internet: FakeInternet, clock: VirtualClock
) -> None:
    internet.site("c.test").on("/robots.txt", redirect("http://a.test/for-c"))
    await block(gate, clock)
    deferred(await gate.check("http://c.test/x"), clock, Reason.HOST_BLOCKED, 300)


async def test_a_question_that_waits_when_a_pause_begins_is_deferred_within_seconds(
    gate: Gatekeeper, internet: FakeInternet, clock: VirtualClock
) -> None:
    await block(gate, clock, 4.0)  # short enough to be waited for
    asking = asyncio.create_task(gate.check("http://a.test/x"))
    await internet.settle()
    assert not asking.done()
    await gate.pause("a.test")
    await clock.elapse(5.0)
    deferred(await asking, clock, Reason.HOST_PAUSED, 60)


async def test_the_file_is_asked_for_when_the_block_ends(
    gate: Gatekeeper, internet: FakeInternet, clock: VirtualClock
) -> None:
    await block(gate, clock)
    await gate.check("http://a.test/x")
    await clock.elapse(300.0)
    assert await gate.allowed("http://a.test/x")
    assert internet.sites["a.test"].paths == ["/robots.txt"]


async def test_a_question_after_a_pause_is_answered(gate: Gatekeeper, clock: VirtualClock) -> None:
    await gate.pause("a.test")
    await gate.check("http://a.test/x")
    await gate.resume("a.test")
    assert await gate.allowed("http://a.test/x")


@pytest.mark.parametrize("question", ["robots", "policy", "source", "refresh"])
async def test_the_file_of_a_blocked_host_is_not_waited_for(
    gate: Gatekeeper, clock: VirtualClock, question: str
) -> None:
    await block(gate, clock)
    with pytest.raises(LeaseTimeout, match="is blocked; ask again at") as caught:
        await getattr(gate.parts.questions if question == "source" else gate, question)(
            "http://a.test/x"
        )
    assert caught.value.retry_at == utc(clock.wall() + 300)


async def test_a_lease_waits_for_the_end_of_the_block(
    gate: Gatekeeper, internet: FakeInternet, clock: VirtualClock
) -> None:
    await block(gate, clock)

    async def visit() -> Verdict:
        async with gate.lease("http://a.test/x") as lease:
            return lease.decision.verdict

    visiting = asyncio.create_task(visit())
    await internet.settle()
    assert not visiting.done()
    await clock.elapse(301.0)
    assert await visiting is Verdict.ALLOW
    assert internet.sites["a.test"].paths == ["/robots.txt"]


async def test_a_lease_that_can_not_come_in_time_is_refused_at_once(
    gate: Gatekeeper, clock: VirtualClock
) -> None:
    await block(gate, clock)
    with pytest.raises(LeaseTimeout) as caught:
        async with gate.lease("http://a.test/x", timeout=10):
            pass
    assert caught.value.retry_at == utc(clock.wall() + 300)


async def test_a_lease_whose_file_is_held_up_elsewhere_is_deferred(
    gate: Gatekeeper, internet: FakeInternet, clock: VirtualClock
) -> None:
    internet.site("c.test").on("/robots.txt", redirect("http://a.test/for-c"))
    await block(gate, clock)
    with pytest.raises(Deferred):
        async with gate.lease("http://c.test/x"):
            pass


async def test_a_site_that_refuses_defers_its_other_origins(
    gate: Gatekeeper, internet: FakeInternet, clock: VirtualClock
) -> None:
    busy = Page("", status=503, headers={"Retry-After": "300"})
    internet.site("http://d.test").robots("").on("/x", busy)
    internet.site("http://d.test:8080").robots("")
    async with gate.lease("http://d.test/x") as lease:
        lease.report(status=503, retry_after=300)
    decision: Any = await gate.check("http://d.test:8080/x")
    deferred(decision, clock, Reason.HOST_BLOCKED, 300)


class Recovering(MemoryLedger):
    """A fleet's ledger whose store has lost its data: it grants nothing for some seconds."""

    def __init__(self, clock: VirtualClock, seconds: float) -> None:
        super().__init__(clock)
        self.clock, self.until = clock, clock.monotonic() + seconds

    @property
    def state(self) -> str:
        return "recovering" if self.clock.monotonic() < self.until else "connected"

    def take_nowait(self, requests: Sequence[TakeRequest]) -> list[Granted | NotBefore]:
        left = self.until - self.clock.monotonic()
        return [NotBefore(left)] * len(requests) if left > 0 else super().take_nowait(requests)


@pytest.mark.parametrize("seconds", [4.0, 30.0])
async def test_a_question_is_deferred_if_the_fleets_store_is_not_back_within_seconds(
    internet: FakeInternet, clock: VirtualClock, seconds: float
) -> None:
    internet.site("a.test").robots("")
    ledger = Recovering(clock, seconds)
    async with gate_on(internet, CONFIG, clock=clock, ledger=ledger) as gate:
        asking = asyncio.create_task(gate.check("http://a.test/x"))
        leasing = asyncio.create_task(gate.acquire("http://a.test/x", owned=False))
        await internet.settle()
        await clock.elapse(4.0)
        assert asking.done() == (seconds == 4.0)
        if not asking.done():
            await clock.elapse(1.0)
            deferred(await asking, clock, Reason.FLEET, 2)
            deferred(await gate.check("http://a.test/x"), clock, Reason.FLEET, 2)
            assert not leasing.done()  # a lease is there to be waited for
            await clock.elapse(25.0)
        await internet.settle()
        assert await gate.check("http://a.test/x")
        (await leasing).end()
