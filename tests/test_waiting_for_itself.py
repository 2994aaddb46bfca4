"""No task waits for what it holds itself: neither for a slot, nor for a file behind one."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from gatekeeper import LeaseTimeout, Reason, Verdict, polite_session
from tests.gate_support import gate_on, open_config
from tests.internet import FakeInternet, Page, Stall


async def test_a_question_about_another_origin_of_a_held_host_is_deferred(
    net: FakeInternet,
) -> None:
    net.site("a.test").robots("")

    async def ask() -> None:
        async with gate_on(net) as gate, gate.lease("http://a.test/x"):
            decision = await gate.check("http://a.test:8080/y")
            assert (decision.verdict, decision.reason) == (Verdict.DEFER, Reason.OWN_LEASE)
            assert decision.retry_at is not None
            assert "http://a.test/x" in (decision.note or "")
            assert not await gate.allowed("http://a.test:8080/y")
            several = ["http://a.test:8080/y", "http://a.test/z"]
            verdicts = [one.verdict async for one in gate.check_many(several)]
            assert verdicts == [Verdict.DEFER, Verdict.ALLOW]

    await net.drive(ask())
    assert net.clock.monotonic() < 5.0


@pytest.mark.parametrize("method", ["refresh", "robots", "policy", "source"])
async def test_a_call_that_must_fetch_raises_lease_timeout_at_once(
    net: FakeInternet, method: str
) -> None:
    net.site("a.test").robots("")

    async def ask() -> None:
        async with gate_on(net) as gate, gate.lease("http://a.test/x"):
            with pytest.raises(LeaseTimeout, match=r"http://a\.test/x"):
                await getattr(gate.parts.questions if method == "source" else gate, method)(
                    "http://a.test:8080/y"
                )

    await net.drive(ask())


async def test_a_second_slot_that_waits_for_the_own_response_head_is_refused(
    net: FakeInternet,
) -> None:
    net.site("a.test").robots("")
    pacing = {"concurrency": 2, "default_interval": 1.0}

    async def ask() -> None:
        async with (
            gate_on(net, open_config(pacing=pacing)) as gate,
            gate.lease("http://a.test/x") as lease,
        ):
            with pytest.raises(LeaseTimeout, match=r"http://a\.test/x"):
                async with gate.lease("http://a.test/y"):
                    pass
            lease.head()  # it went out: from now on the clock alone decides
            async with gate.lease("http://a.test/y"):
                pass

    await net.drive(ask())
    assert net.clock.monotonic() < 10.0


@pytest.mark.parametrize("known", [True, False])
async def test_a_lease_of_a_group_with_one_slot_refuses_its_other_hosts(
    net: FakeInternet, known: bool
) -> None:
    for name in ("a.test", "b.test"):
        net.site(name).robots("")
    tables = {
        "group": [{"name": "g", "interval": 0.0, "concurrency": 1}],
        "host": [{"match": "*.test", "group": "g"}],
    }

    async def ask() -> None:
        async with gate_on(net, open_config(**tables)) as gate:
            if known:
                await gate.check("http://b.test/")
            async with gate.lease("http://a.test/x"):
                with pytest.raises(LeaseTimeout, match=r"http://a\.test/x"):
                    async with gate.lease("http://b.test/y"):
                        pass

    await net.drive(ask())


async def test_an_expired_lease_refuses_nobody(net: FakeInternet) -> None:
    net.site("a.test").robots("").page("/x", "x").page("/y", "y")

    async def ask() -> None:
        async with gate_on(net) as gate:
            lease = await gate.acquire("http://a.test/x")
            await net.clock.sleep(601.0)
            assert lease.ended
            assert not lease.claim("http://a.test/x")
            (await gate.acquire("http://a.test/y")).end()

    await net.drive(ask())


async def test_leases_that_expired_are_forgotten(net: FakeInternet) -> None:
    names = [net.site(f"{number}.test").robots("").name for number in range(400)]

    async def ask() -> int:
        async with gate_on(net) as gate:
            for begin in range(0, len(names), 50):
                for name in names[begin : begin + 50]:
                    await gate.acquire(f"http://{name}/x")
                await net.clock.sleep(601.0)
            return len(gate.parts.waits.holdings)

    assert await net.drive(ask()) < 200


async def test_a_new_attempt_lets_go_of_an_answer_that_nobody_reads(
    net: FakeInternet,
) -> None:
    """As aiohttp's own DigestAuthMiddleware does, where the 401 has a body."""
    site = net.site("a.test").robots("").on("/x", Stall("please log in", status=401))

    async def again(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> Any:
        response = await handler(request)
        if response.status == 401:
            site.on("/x", Page("welcome"))
            response = await handler(request)
        return response

    async def ask() -> str:
        config = open_config()
        async with (
            polite_session(
                "testbot/1.0",
                config=config,
                resolver=net.resolver,
                clock=net.clock,
                middlewares=(again,),
            ) as session,
            session.get("http://a.test/x") as response,
        ):
            return await response.text()

    assert await net.drive(ask()) == "welcome"
    assert site.most_concurrent == 1
