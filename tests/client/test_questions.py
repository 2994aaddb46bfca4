"""How questions are sent in batches, and for how long decisions are cached."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from gatekeeper import (
    Decision,
    State,
    Verdict,
)
from gatekeeper.client.questions import lifetime
from tests.conformance.ways import World
from tests.gate_support import decided
from tests.internet import Hold, Page

NOON = datetime(2026, 11, 20, 12, 0, 15, tzinfo=UTC)  # 45 seconds of its minute are left
DENYING = "User-agent: *\nDisallow: /no\n"


async def test_questions_of_one_loop_iteration_are_sent_in_batches(world: World) -> None:
    world.internet.site("a.test").robots(DENYING)
    sidecar = await world.sidecar()
    gate = await world.client(sidecar.where)
    await gate.check("http://a.test/")
    asked = [gate.check(f"http://a.test/{n}") for n in range(2500)]
    decisions = await asyncio.gather(*asked)
    assert [d.url for d in decisions] == [f"http://a.test/{n}" for n in range(2500)]
    assert sidecar.count("/v1/check") == 1 + 3  # a thousand URLs each at most
    assert gate.stats().urls == 2501


async def test_questions_are_spread_over_the_batches_that_may_be_in_flight(
    world: World,
) -> None:
    world.internet.site("a.test").robots(DENYING)
    sidecar = await world.sidecar()
    gate = await world.client(sidecar.where)
    await gate.check("http://a.test/")
    assert all(await asyncio.gather(*(gate.check(f"http://a.test/{n}") for n in range(1000))))
    assert sidecar.count("/v1/check") == 1 + 4
    assert all(await asyncio.gather(*(gate.check(f"http://a.test/?{n}") for n in range(250))))
    assert sidecar.count("/v1/check") == 1 + 4 + 1


async def test_the_questions_of_an_unknown_origin_are_not_spread(world: World) -> None:
    world.internet.site("a.test").robots(DENYING)
    sidecar = await world.sidecar()
    gate = await world.client(sidecar.where)
    assert all(await asyncio.gather(*(gate.check(f"http://a.test/{n}") for n in range(1000))))
    assert sidecar.count("/v1/check") == 1


async def test_one_url_is_asked_about_once_at_a_time(world: World) -> None:
    world.internet.site("a.test").robots(DENYING)
    sidecar = await world.sidecar()
    gate = await world.client(sidecar.where)
    first, *others = await asyncio.gather(*(gate.check("http://a.test/x") for _ in range(50)))
    assert all(other is first for other in others)
    assert gate.stats().urls == 1


async def test_a_batch_is_no_longer_than_the_limit_of_the_sidecar(world: World) -> None:
    world.internet.site("a.test").robots("")
    sidecar = await world.sidecar()
    gate = await world.client(sidecar.where)
    urls = [f"http://a.test/{n}?{'x' * 8000}" for n in range(300)]  # 2.4 MB
    assert all(await gate.check_all(urls))
    assert sidecar.count("/v1/check") > 10


@pytest.mark.parametrize(
    "bound", [{"max_batch": 100}, {"max_body": 4000}], ids=["max_batch", "max_body"]
)
async def test_a_batch_refused_as_too_long_is_sent_in_smaller_ones(
    world: World, bound: dict[str, int]
) -> None:
    world.internet.site("a.test").robots(DENYING)
    sidecar = await world.sidecar(server={"log_decisions": "none"} | bound)
    gate = await world.client(sidecar.where)
    urls = [f"http://a.test/{n}" for n in range(950)]
    decisions = await gate.check_all(urls)
    assert [decision.url for decision in decisions] == urls


async def test_the_length_of_a_batch_is_learnt_once(world: World) -> None:
    world.internet.site("a.test").robots(DENYING)
    sidecar = await world.sidecar(server={"log_decisions": "none", "max_batch": 100})
    gate = await world.client(sidecar.where)
    await gate.check_all(f"http://a.test/{n}" for n in range(250))
    assert sidecar.count("/v1/check") == 1 + 3
    await gate.check_all(f"http://a.test/?{n}" for n in range(250))
    assert sidecar.count("/v1/check") == 1 + 3 + 3


async def test_a_known_origin_does_not_wait_for_an_unknown_one(world: World) -> None:
    hold = Hold(Page(""))
    world.internet.site("slow.test").robots(hold)
    world.internet.site("b.test").robots("")
    sidecar = await world.sidecar()
    gate = await world.client(sidecar.where)
    await gate.check("http://b.test/")
    slow = asyncio.create_task(gate.check("http://slow.test/"))
    assert all(await asyncio.gather(*(gate.allowed(f"http://b.test/{n}") for n in range(10))))
    assert not slow.done()
    await hold.waiting.acquire()
    hold.release()
    assert await slow


async def test_a_slow_origin_takes_one_batch_however_often_it_is_asked_about(world: World) -> None:
    hold = Hold(Page(""))
    world.internet.site("slow.test").robots(hold)
    sidecar = await world.sidecar()
    gate = await world.client(sidecar.where)
    asked = []
    for n in range(20):
        asked.append(asyncio.create_task(gate.check(f"http://slow.test/{n}")))
        await world.clock.settle()
    assert sidecar.count("/v1/check") == 1
    hold.release()
    assert all(await asyncio.gather(*asked))
    assert sidecar.count("/v1/check") == 2


async def test_check_many_left_early_cancels_its_remaining_questions(world: World) -> None:
    world.internet.site("slow.test").robots(Hold(Page("")))
    world.internet.site("b.test").robots("")
    sidecar = await world.sidecar()
    gate = await world.client(sidecar.where)
    answers = gate.check_many(["http://b.test/", "http://slow.test/", "http://b.test/2"])
    assert await anext(answers)
    await answers.aclose()


def ends(verdict: Verdict, seconds: float) -> Decision:
    return decided(verdict, expires_at=NOON + timedelta(seconds=seconds))


@pytest.mark.parametrize(
    ("decision", "seconds"),
    [
        pytest.param(ends(Verdict.DENY, 9000), 60.0, id="denied: the cap"),
        pytest.param(ends(Verdict.DENY, 20), 20.0, id="denied: the file's end"),
        pytest.param(ends(Verdict.DENY, -20), -20.0, id="denied: past its end"),
        pytest.param(decided(Verdict.DENY), 0.0, id="denied: no end known"),
        pytest.param(ends(Verdict.ALLOW, 9000), 45.0, id="allowed: the minute's end"),
        pytest.param(ends(Verdict.ALLOW, 20), 20.0, id="allowed: the file's end"),
        pytest.param(
            decided(Verdict.DEFER, retry_at=NOON + timedelta(hours=2)), 7200.0, id="deferred"
        ),
        pytest.param(decided(Verdict.DEFER), 0.0, id="deferred: no retry_at"),
        pytest.param(decided(Verdict.ALLOW, state=State.OVERRIDE), 5.0, id="by the operator"),
        pytest.param(
            decided(Verdict.DENY, state=State.OVERRIDE, expires_at=NOON + timedelta(seconds=2)),
            2.0,
            id="by the operator until soon",
        ),
        pytest.param(decided(Verdict.DENY, state=None), 5.0, id="by the guard"),
    ],
)
def test_a_decision_has_the_lifetime_of_its_reason(decision: Decision, seconds: float) -> None:
    assert lifetime(decision, NOON.timestamp(), 60.0) == seconds


async def test_a_decision_is_repeated_without_asking(world: World) -> None:
    world.internet.site("a.test").robots(DENYING)
    sidecar = await world.sidecar()
    gate = await world.client(sidecar.where)
    first = await gate.check("http://a.test/no")
    assert await gate.check("http://a.test/no") is first
    world.clock.advance(61.0)
    assert await gate.check("http://a.test/no") is not first
    assert sidecar.count("/v1/check") == 2
    assert gate.stats().remembered == 1


async def test_a_deferral_is_repeated_until_it_says_to_ask_again(world: World) -> None:
    site = world.internet.site("a.test").robots(Page("", status=500))
    sidecar = await world.sidecar()
    gate = await world.client(sidecar.where)
    decision = await world.drive(gate.check("http://a.test/x"))
    assert decision.retry_at is not None
    left = decision.retry_at.timestamp() - world.clock.wall()
    site.robots("")
    world.clock.advance(left - 1.0)
    assert await gate.check("http://a.test/x") is decision
    world.clock.advance(1.5)
    assert await world.drive(gate.allowed("http://a.test/x"))


async def test_remembered_decisions_are_bounded(world: World) -> None:
    world.internet.site("a.test").robots("")
    sidecar = await world.sidecar()
    gate = await world.client(sidecar.where, remember_most=10)
    await gate.check_all(f"http://a.test/{n}" for n in range(100))
    assert gate.stats().kept == 10


async def test_remembering_decisions_can_be_switched_off(world: World) -> None:
    world.internet.site("a.test").robots("")
    sidecar = await world.sidecar()
    gate = await world.client(sidecar.where, remember_most=0)
    await gate.check("http://a.test/x")
    await gate.check("http://a.test/x")
    assert sidecar.count("/v1/check") == 2
