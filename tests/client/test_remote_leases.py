"""Leases held through a sidecar: renewed, reported, given back, reported after an outage."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import msgspec
import pytest

from gatekeeper import (
    Deferred,
    LeaseTimeout,
    PoliteQueue,
    Reason,
    RemoteGatekeeper,
    SidecarError,
    Verdict,
)
from gatekeeper.client.remote_leases import RemoteLease
from tests.conformance.ways import World
from tests.gate_support import decided
from tests.internet import Hold, NeverAnswer, Page, Stall
from tests.waiting_support import until

TOKEN = "s3cr3t" * 8


async def test_a_held_lease_is_renewed_in_time(world: World) -> None:
    world.internet.site("a.test").robots("")
    sidecar = await world.sidecar()
    gate = await world.client(sidecar.where)
    lease = await gate.acquire("http://a.test/x")
    await world.clock.elapse(300.0, turns=60)
    assert len(sidecar.service.leases) == 1
    assert sidecar.count("/renew") == 10
    lease.end()
    await until(lambda: not len(sidecar.service.leases))
    ended = sidecar.service.leases.ended
    assert ended == {"reported": 1, "given_back": 0, "expired": 0, "dropped": 0}


async def test_a_lease_that_nobody_ends_is_not_renewed_for_ever(world: World) -> None:
    world.internet.site("a.test").robots("")
    sidecar = await world.sidecar()
    gate = await world.client(sidecar.where)
    lease = await gate.acquire("http://a.test/x")
    await world.clock.elapse(601.0, turns=60)
    assert sidecar.service.leases.ended["expired"] == 1
    assert gate.stats().held == 0
    lease.end()


async def test_its_owner_can_renew_a_lease(world: World) -> None:
    world.internet.site("a.test").robots("")
    sidecar = await world.sidecar()
    gate = await world.client(sidecar.where)
    lease = await gate.acquire("http://a.test/x")
    lease.renew(1000.0)
    await world.clock.elapse(900.0, turns=60)
    assert len(sidecar.service.leases) == 1
    lease.renew(10.0)
    await world.clock.elapse(11.0, turns=60)
    assert len(sidecar.service.leases) == 0


async def test_held_leases_need_no_task_each(world: World) -> None:
    for n in range(30):
        world.internet.site(f"h{n}.test").robots("")
    sidecar = await world.sidecar()
    gate = await world.client(sidecar.where)
    before = len(asyncio.all_tasks())
    leases = [await gate.acquire(f"http://h{n}.test/x") for n in range(30)]
    await world.clock.settle()
    # Each client connection is a task of the server; the client itself has no task.
    assert not [t for t in asyncio.all_tasks() if "gatekeeper/remote" in str(t.get_coro())]
    assert len(asyncio.all_tasks()) <= before + 8
    for lease in leases:
        lease.end()


async def test_a_reported_429_blocks_the_host_in_the_sidecar(world: World) -> None:
    world.internet.site("a.test").robots("")
    sidecar = await world.sidecar()
    gate = await world.client(sidecar.where)
    lease = await gate.acquire("http://a.test/x")
    lease.report(status=429, retry_after="300", size=12)
    # A 429 or 503 is reported before the body is read: the host is blocked from now on.
    await until(lambda: gate.stats().told)
    views = await gate.why("a.test")
    assert any(view.kind == "block" and 290 < (view.seconds or 0) <= 301 for view in views)
    lease.end()
    await world.clock.settle()
    assert sidecar.count("/report") == 1


async def test_a_report_waits_for_the_end_of_the_lease(world: World) -> None:
    world.internet.site("a.test").robots("")
    sidecar = await world.sidecar()
    gate = await world.client(sidecar.where)
    lease = await gate.acquire("http://a.test/x")
    lease.head()
    lease.report(status=200)
    lease.report(status=500)
    await world.clock.settle()
    assert len(sidecar.service.leases) == 1
    lease.end()
    await until(lambda: not len(sidecar.service.leases))


async def test_a_report_with_impossible_measurements_is_still_sent(world: World) -> None:
    world.internet.site("a.test").robots("")
    sidecar = await world.sidecar()
    gate = await world.client(sidecar.where)
    lease = await gate.acquire("http://a.test/x")
    lease.report(
        status=7, elapsed=float("nan"), retry_after="x" * 300, size=-1, rate_limit="y" * 300
    )
    lease.end()
    await until(lambda: gate.stats().told)
    assert sidecar.service.leases.ended["reported"] == 1


async def test_a_retry_after_without_an_end_blocks_the_host(world: World) -> None:
    world.internet.site("a.test").robots("")
    sidecar = await world.sidecar()
    gate = await world.client(sidecar.where)
    lease = await gate.acquire("http://a.test/x")
    lease.report(status=429, retry_after=float("inf"))
    lease.end()
    await until(lambda: gate.stats().told)
    assert (await gate.try_acquire("http://a.test/x")).why == "host_blocked"
    await world.clock.elapse(86_400.0)
    assert (await gate.try_acquire("http://a.test/x")).why == "host_blocked"


async def test_closing_a_client_sends_its_last_reports(world: World) -> None:
    world.internet.site("a.test").robots("")
    sidecar = await world.sidecar()
    async with RemoteGatekeeper(sidecar.where, clock=world.clock) as gate:
        await gate.acquire("http://a.test/x")  # held when the gate closes: it counts as used
    assert sidecar.service.leases.ended["reported"] == 1
    assert gate.stats().dropped == 0


async def test_a_report_outlives_the_sidecar_s_absence(world: World) -> None:
    world.internet.site("a.test").robots("")
    sidecar = await world.sidecar()
    gate = await world.client(sidecar.where)
    lease = await gate.acquire("http://a.test/x")
    await sidecar.stop()
    lease.end()
    await world.clock.elapse(120.0)
    assert gate.stats().untold == 1
    await sidecar.start()
    await world.clock.elapse(5.0, turns=60)
    assert (gate.stats().untold, gate.stats().dropped, gate.stats().told) == (0, 0, 1)


async def test_a_report_that_the_sidecar_does_not_accept_is_given_up(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.internet.site("a.test").robots("")
    sidecar = await world.sidecar()
    gate = await world.client(sidecar.where, token=TOKEN)
    lease = await gate.acquire("http://a.test/x")
    await sidecar.stop()
    lease.end()
    await world.clock.elapse(700.0)
    assert (gate.stats().untold, gate.stats().dropped) == (0, 1)
    assert "given up" in caplog.text
    assert TOKEN not in caplog.text


async def test_a_caller_cancelled_in_a_long_poll_keeps_the_connection_usable(world: World) -> None:
    world.internet.site("a.test").robots("")
    sidecar = await world.sidecar()
    gate = await world.client(sidecar.where)
    held = await gate.acquire("http://a.test/1", owned=False)
    waiter = asyncio.create_task(gate.acquire("http://a.test/2", owned=False))
    await until(lambda: sidecar.gate.stats().pacing.waiting)
    waiter.cancel()
    await until(lambda: not sidecar.gate.stats().pacing.waiting)
    assert waiter.cancelled()
    held.end()


async def test_a_lease_that_arrives_with_the_cancellation_is_given_back(world: World) -> None:
    given = {
        "id": "abc",
        "url": "http://a.test/x",
        "not_before": "2026-11-22T12:00:00Z",
        "expires_at": "2026-11-22T12:01:00Z",
        "decision": decided(Verdict.ALLOW),
    }
    hold = Hold(Page(msgspec.json.encode(given), status=201))
    where = world.scripted("/v1/leases", hold)
    gate = await world.client(where)
    waiter = asyncio.create_task(gate.acquire("http://a.test/x"))
    await hold.waiting.acquire()
    polls = list(gate._tasks._tasks)
    hold.release()
    # The response was read, and the waiter, which has not run since, is cancelled now.
    polls[0].add_done_callback(lambda _: waiter.cancel())
    await asyncio.wait([waiter])
    assert waiter.cancelled()
    site = world.internet.sites["127.0.0.1"]
    await until(lambda: "/v1/leases/abc" in site.paths)
    assert site.requests[-1].method == "DELETE"


async def test_no_lease_stays_with_the_sidecar_whenever_its_client_is_cancelled(
    world: World,
) -> None:
    """Also if the response was on its way, when the host would wait a minute for the lease."""
    world.internet.site("a.test").robots("User-agent: *\nCrawl-delay: 0\n")
    sidecar = await world.sidecar()
    gate = await world.client(sidecar.where)
    (await world.drive(gate.acquire("http://a.test/", owned=False))).give_back()
    leases, answered = sidecar.service.leases, 0
    for turns in range(400):
        waiter = asyncio.create_task(gate.acquire("http://a.test/x", owned=False))
        for _ in range(turns):
            await asyncio.sleep(0)
        waiter.cancel()
        (lease,) = await asyncio.gather(waiter, return_exceptions=True)
        if isinstance(lease, RemoteLease):
            lease.give_back()
            answered += 1
        await until(lambda: not len(leases) and not gate.stats().untold and not gate._tasks)
        if answered == 3:
            break
    assert answered == 3, "no cancellation was late enough"
    assert sidecar.gate.stats().pacing.in_flight == 0


async def test_long_polls_of_one_client_are_bounded(world: World) -> None:
    world.internet.site("a.test").robots("")
    sidecar = await world.sidecar()
    gate = await world.client(sidecar.where, most_polls=1)
    held = await gate.acquire("http://a.test/1", owned=False)
    first = asyncio.create_task(gate.acquire("http://a.test/2", owned=False))
    await until(lambda: sidecar.gate.stats().pacing.waiting)
    with pytest.raises(LeaseTimeout, match="others of this client"):
        await world.drive(gate.acquire("http://a.test/3", timeout=1.0, owned=False))
    held.end()
    (await first).end()


async def test_a_poll_that_ends_without_a_lease_is_repeated(world: World) -> None:
    world.internet.site("a.test").robots("")
    sidecar = await world.sidecar()
    gate = await world.client(sidecar.where, poll=50.0)
    held = await gate.acquire("http://a.test/1", owned=False)
    waiter = asyncio.create_task(gate.acquire("http://a.test/2", owned=False))
    await world.clock.elapse(220.0, turns=60)
    assert sidecar.count("/v1/leases") == 6
    held.end()
    (await world.drive(waiter)).end()


async def test_a_lease_is_asked_for_again_after_the_sidecar_restarts(world: World) -> None:
    world.internet.site("a.test").robots("")
    sidecar = await world.sidecar()
    gate = await world.client(sidecar.where)
    held = await gate.acquire("http://a.test/1", owned=False)
    waiter = asyncio.create_task(gate.acquire("http://a.test/2", owned=False))
    await until(lambda: sidecar.gate.stats().pacing.waiting)
    await sidecar.stop()
    await until(lambda: gate.stats().failures)
    await sidecar.start()
    (await world.drive(waiter)).end()
    held.end()


async def test_two_clients_share_the_pace_of_a_host(world: World) -> None:
    site = world.internet.site("a.test").robots("User-agent: *\nCrawl-delay: 5\n").page("/")
    sidecar = await world.sidecar()
    gates = [await world.client(sidecar.where) for _ in range(2)]

    async def crawl(gate: RemoteGatekeeper) -> None:
        async with world.internet.session() as session:
            for _ in range(4):
                request = gate.lease("http://a.test/")
                async with request as lease, session.get("http://a.test/") as page:
                    lease.report(status=page.status)

    await world.drive(asyncio.gather(*map(crawl, gates)))
    assert len(site.gaps()) == 8
    assert min(site.gaps()) >= 5.0


async def test_the_timeout_of_a_lease_holds_though_the_sidecar_is_silent(world: World) -> None:
    where = world.scripted("/v1/leases", NeverAnswer())
    gate = await world.client(where)
    began = world.clock.monotonic()
    with pytest.raises(Deferred) as refusal:
        await world.drive(gate.acquire("http://a.test/x", timeout=1.0))
    assert refusal.value.decision.reason is Reason.GATE_UNREACHABLE
    assert world.clock.monotonic() - began <= 2.0


async def test_polls_are_as_short_as_the_sidecars_max_wait(world: World) -> None:
    world.internet.site("a.test").robots("")
    sidecar = await world.sidecar(server={"log_decisions": "none", "max_wait": 20.0})
    gate = await world.client(sidecar.where)
    held = await gate.acquire("http://a.test/1", owned=False)
    waiter = asyncio.create_task(gate.acquire("http://a.test/2", owned=False))
    await until(lambda: sidecar.gate.stats().pacing.waiting)
    await world.clock.elapse(25.0, turns=60)
    held.end()
    (await waiter).end()
    # The refusal, which names the limit, and three polls at most.
    assert 3 <= sidecar.count("/v1/leases") <= 5


def test_a_queue_over_something_that_is_no_gate_is_refused() -> None:
    with pytest.raises(TypeError, match=r"needs a Gatekeeper or a RemoteGatekeeper: str has no"):
        PoliteQueue("http://127.0.0.1:1")  # type: ignore[arg-type]


def test_a_queue_over_half_a_gate_is_told_what_is_missing() -> None:
    class Half:
        clock = peek = None

    with pytest.raises(TypeError, match="Half has no acquire, check, acquire_nowait, when_due"):
        PoliteQueue(Half())  # type: ignore[arg-type]


async def test_a_join_ends_though_nobody_gets_the_denied_urls(world: World) -> None:
    world.internet.site("no.test").robots("User-agent: *\nDisallow: /")
    world.internet.site("yes.test").robots("User-agent: *\nDisallow: /no")
    gate = await world.client((await world.sidecar()).where)
    told: list[str] = []
    async with PoliteQueue(gate, on_denied=lambda decision: told.append(decision.url)) as queue:
        for url in ("http://no.test/a", "http://no.test/b", "http://yes.test/no"):
            await queue.put(url)
        await world.drive(queue.join())
        assert sorted(told) == ["http://no.test/a", "http://no.test/b", "http://yes.test/no"]
        await queue.put("http://yes.test/a")
        joining = asyncio.ensure_future(queue.join())
        await world.clock.elapse(60.0)
        assert not joining.done(), "somebody has to get what may be fetched"
        async with await world.drive(queue.get()):
            pass
        await joining


async def test_the_body_of_a_poll_has_the_arguments_of_the_lease(world: World) -> None:
    where = world.scripted("/v1/leases", Page("{}", status=400))
    gate = await world.client(where, user_agent="mybot/1.0")
    with pytest.raises(SidecarError):
        await world.drive(gate.acquire("http://a.test/x", priority=5000, timeout=7.0))
    body = json.loads(world.internet.requests[-1].body)
    assert len(body.pop("id")) == 16
    assert body == {
        "url": "http://a.test/x",
        "wait": 7.0,
        "ttl": 60.0,
        "priority": 1000,
        "user_agent": "mybot/1.0",
    }


async def test_an_adopted_lease_outlives_its_block_while_the_body_comes(world: World) -> None:
    world.internet.site("a.test").robots("").on("/slow", Stall("half"))
    sidecar = await world.sidecar()
    gate = await world.client(sidecar.where)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(resolver=world.internet.resolver),
        middlewares=(gate.middleware,),
    ) as session:
        async with gate.lease("http://a.test/slow"):
            response = await session.get("http://a.test/slow")
        await world.clock.settle()
        assert len(sidecar.service.leases) == 1
        response.close()
        await until(lambda: not len(sidecar.service.leases))
    ended = sidecar.service.leases.ended
    assert ended == {"reported": 1, "given_back": 0, "expired": 0, "dropped": 0}


@pytest.mark.parametrize("path", ["/%7Eme", "/x;list=1%2C2"])
async def test_a_request_that_aiohttp_unescapes_adopts_its_lease(world: World, path: str) -> None:
    world.internet.site("a.test").robots("")
    sidecar = await world.sidecar()
    gate = await world.client(sidecar.where)
    async with (
        aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(resolver=world.internet.resolver),
            middlewares=(gate.middleware,),
        ) as session,
        gate.lease(f"http://a.test{path}") as lease,
        session.get(lease.url) as response,
    ):
        assert response.status == 404
    assert gate.stats().granted == 1


async def test_two_tasks_that_wait_for_each_others_leases_end_by_own_wait(world: World) -> None:
    for name in ("a.test", "b.test"):
        world.internet.site(name).robots("")
    sidecar = await world.sidecar()
    gate = await world.client(sidecar.where)
    holding = asyncio.Barrier(2)

    async def one(mine: str, others: str) -> str | None:
        async with gate.lease(f"http://{mine}/held"):
            await holding.wait()
            try:
                async with gate.lease(f"http://{others}/wanted"):
                    return None
            except LeaseTimeout as error:
                return str(error)

    tasks = [
        asyncio.create_task(one("a.test", "b.test")),
        asyncio.create_task(one("b.test", "a.test")),
    ]
    await world.clock.elapse(60.0, turns=60)
    refused = [text for text in await asyncio.gather(*tasks) if text is not None]
    assert len(refused) == 1  # the other one then gets its lease
    assert refused[0].count("/held") == 2
    assert "/wanted waited 30 s (pacing.own_wait) for http://" in refused[0]


async def test_a_child_of_a_task_that_holds_the_host_is_refused_after_own_wait(
    world: World,
) -> None:
    world.internet.site("a.test").robots("")
    sidecar = await world.sidecar()
    gate = await world.client(sidecar.where)
    took = []

    async def child() -> None:
        began = world.clock.monotonic()
        with pytest.raises(LeaseTimeout, match=r"(?s)/child waited 30 s .*/parent"):
            async with gate.lease("http://a.test/child"):
                pass
        took.append(world.clock.monotonic() - began)

    async def parent() -> None:
        async with gate.lease("http://a.test/parent"):
            await asyncio.create_task(child())

    task = asyncio.create_task(parent())
    await world.clock.elapse(60.0, turns=60)
    await task
    assert took == [pytest.approx(30.0, abs=0.5)]
    assert len(gate.waits) == 0


async def test_a_lease_of_one_gate_does_not_refuse_a_lease_of_another_gate(world: World) -> None:
    world.internet.site("a.test").robots("")
    first = await world.client((await world.sidecar()).where)
    second = await world.client((await world.sidecar()).where)

    async def child() -> None:
        async with second.lease("http://a.test/y"):
            pass

    async with first.lease("http://a.test/x"), second.lease("http://a.test/z"):
        pass
    async with first.lease("http://a.test/x"):
        await asyncio.create_task(child())
