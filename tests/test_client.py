"""What `RemoteGatekeeper` promises beside the answers: tests/conformance has those."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gatekeeper import (
    ConfigError,
    Decision,
    Deferred,
    Denied,
    GateClosed,
    InvalidURL,
    LeaseTimeout,
    Reason,
    RemoteGatekeeper,
    SidecarError,
    State,
    Verdict,
)
from gatekeeper.remote.answers import lifetime
from gatekeeper.remote.line import Answer
from gatekeeper.remote.wire import problem
from gatekeeper.sidecar.auth import Tokens
from tests.conformance.ways import Sidecar, settings, until
from tests.internet import FakeInternet, Hold, NeverAnswer, Page, redirect

NOON = datetime(2026, 11, 20, 12, tzinfo=UTC)
DENYING = "User-agent: *\nDisallow: /no\n"
TOKEN = "s3cr3t" * 8


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


class World:
    """A fake internet in virtual time, a sidecar on it, and clients of the sidecar."""

    def __init__(self, internet: FakeInternet, stack: AsyncExitStack) -> None:
        self.internet = internet
        self.stack = stack
        self.clock: Any = internet.clock
        self.drive = internet.drive

    async def sidecar(self, *, tokens: Tokens | None = None, **tables: Any) -> Sidecar:
        sidecar = Sidecar(self.internet, settings(**tables), None)
        sidecar.tokens = tokens or Tokens()
        await sidecar.start()
        self.stack.push_async_callback(sidecar.stop)
        return sidecar

    async def client(self, where: str, **options: Any) -> RemoteGatekeeper:
        gate = RemoteGatekeeper(where, clock=self.clock, **options)
        return await self.stack.enter_async_context(gate)

    def scripted(self, path: str, *acts: Any) -> str:
        """A server that is no sidecar but answers one path as told."""
        self.internet.site("127.0.0.1").on(path, *acts)
        return f"http://127.0.0.1:{self.internet.listener().port()}"


@pytest.fixture
def world(virtual_internet: FakeInternet, stack: AsyncExitStack) -> World:
    return World(virtual_internet, stack)


def told(status: int, kind: str, **fields: Any) -> Answer:
    document = {"type": f"urn:gatekeeper:problem:{kind}", "detail": "so it is"} | fields
    return Answer(status, msgspec.json.encode(document), None)


def decided(verdict: Verdict, **fields: Any) -> Decision:
    values: dict[str, Any] = {
        "verdict": verdict,
        "reason": Reason.RULE,
        "url": "https://a.example/x",
        "origin": "https://a.example",
        "user_agent": "bot",
        "state": State.PARSED,
    }
    return Decision(**(values | fields))


# -- batches -----------------------------------------------------------------------------


async def test_what_is_asked_in_one_turn_travels_together(world: World) -> None:
    world.internet.site("a.test").robots(DENYING)
    sidecar = await world.sidecar()
    gate = await world.client(sidecar.where)
    await gate.check("http://a.test/")
    asked = [gate.check(f"http://a.test/{n}") for n in range(2500)]
    decisions = await asyncio.gather(*asked)
    assert [d.url for d in decisions] == [f"http://a.test/{n}" for n in range(2500)]
    assert sidecar.count("/v1/check") == 1 + 3  # a thousand URLs each at most
    assert gate.stats().urls == 2501


async def test_one_url_is_asked_about_once_at_a_time(world: World) -> None:
    world.internet.site("a.test").robots(DENYING)
    sidecar = await world.sidecar()
    gate = await world.client(sidecar.where)
    first, *others = await asyncio.gather(*(gate.check("http://a.test/x") for _ in range(50)))
    assert all(other is first for other in others)
    assert gate.stats().urls == 1


async def test_a_batch_is_no_longer_than_the_sidecar_takes(world: World) -> None:
    world.internet.site("a.test").robots("")
    sidecar = await world.sidecar()
    gate = await world.client(sidecar.where)
    urls = [f"http://a.test/{n}?{'x' * 8000}" for n in range(300)]  # 2.4 MB
    assert all(await gate.check_all(urls))
    assert sidecar.count("/v1/check") > 10


async def test_what_is_known_does_not_wait_for_what_is_not(world: World) -> None:
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


async def test_a_slow_origin_takes_one_place_however_often_it_is_asked(world: World) -> None:
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


async def test_a_consumer_that_stops_early_leaves_nothing_behind(world: World) -> None:
    world.internet.site("slow.test").robots(Hold(Page("")))
    world.internet.site("b.test").robots("")
    sidecar = await world.sidecar()
    gate = await world.client(sidecar.where)
    answers = gate.check_many(["http://b.test/", "http://slow.test/", "http://b.test/2"])
    assert await anext(answers)
    await answers.aclose()


# -- memory ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("decision", "seconds"),
    [
        (decided(Verdict.DENY, expires_at=NOON + timedelta(hours=3)), 60.0),
        (decided(Verdict.DENY, expires_at=NOON + timedelta(seconds=20)), 20.0),
        (decided(Verdict.DENY, expires_at=NOON - timedelta(seconds=20)), -20.0),
        (decided(Verdict.DENY), 0.0),
        (decided(Verdict.ALLOW, expires_at=NOON + timedelta(hours=3)), 45.0),
        (decided(Verdict.ALLOW, expires_at=NOON + timedelta(seconds=20)), 20.0),
        (decided(Verdict.DEFER, retry_at=NOON + timedelta(hours=2)), 7200.0),
        (decided(Verdict.DEFER), 0.0),
        (decided(Verdict.ALLOW, state=State.OVERRIDE), 5.0),
        (decided(Verdict.DENY, state=None), 5.0),
    ],
    ids=[
        "denied: the cap",
        "denied: the file's end",
        "denied: past its end",
        "denied: no end known",
        "allowed: the minute's end",
        "allowed: the file's end",
        "deferred: retry_at",
        "deferred: unknown",
        "override",
        "guard",
    ],
)
def test_how_long_a_decision_is_repeated(decision: Decision, seconds: float) -> None:
    quarter_past = NOON.timestamp() + 15.0 if decision.verdict is Verdict.ALLOW else None
    wall = NOON.timestamp() if quarter_past is None else quarter_past
    shift = wall - NOON.timestamp()
    expected = seconds - shift if seconds == 20.0 and shift else seconds
    assert lifetime(decision, wall, 60.0) == expected


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
    site = world.internet.site("a.test").robots(Page("", status=503))
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


async def test_memory_is_bounded(world: World) -> None:
    world.internet.site("a.test").robots("")
    sidecar = await world.sidecar()
    gate = await world.client(sidecar.where, remember_most=10)
    await gate.check_all(f"http://a.test/{n}" for n in range(100))
    assert gate.stats().kept == 10


async def test_memory_can_be_switched_off(world: World) -> None:
    world.internet.site("a.test").robots("")
    sidecar = await world.sidecar()
    gate = await world.client(sidecar.where, remember_most=0)
    await gate.check("http://a.test/x")
    await gate.check("http://a.test/x")
    assert sidecar.count("/v1/check") == 2


# -- a sidecar that can't be asked -------------------------------------------------------


async def test_it_fails_closed(world: World) -> None:
    where = f"http://{world.internet.refusing('gone.test')}:{1}"
    gate = await world.client(where)
    decision = await world.drive(gate.check("http://a.test/x"))
    assert (decision.verdict, decision.reason) == (Verdict.DEFER, Reason.GATE_UNREACHABLE)
    assert decision.retry_at is not None
    assert decision.note is not None
    assert "can't be asked" in decision.note
    assert not await world.drive(gate.allowed("http://a.test/x"))
    assert not gate.ready


async def test_it_fails_open_where_told_to(world: World) -> None:
    gate = await world.client("http://127.0.0.1:1", fail="open", patience=0.0)
    decision = await world.drive(gate.check("http://a.test/x"))
    assert (decision.verdict, decision.reason) == (Verdict.ALLOW, Reason.GATE_UNREACHABLE)
    assert gate.peek("http://a.test/x") is None


@pytest.mark.parametrize("fail", ["closed", "open"])
async def test_nobody_invents_a_turn(world: World, fail: str) -> None:
    gate = await world.client("http://127.0.0.1:1", fail=fail)
    with pytest.raises(Deferred) as caught:
        await world.drive(gate.acquire("http://a.test/x"))
    assert caught.value.decision.reason is Reason.GATE_UNREACHABLE
    assert caught.value.retry_at is not None


async def test_operators_are_told_plainly(world: World) -> None:
    gate = await world.client("http://127.0.0.1:1", patience=0.0)
    with pytest.raises(SidecarError, match="unreachable"):
        await world.drive(gate.pause("a.test"))


async def test_it_waits_for_a_sidecar_that_starts_again(world: World) -> None:
    world.internet.site("a.test").robots("")
    sidecar = await world.sidecar()
    gate = await world.client(sidecar.where)
    await gate.check("http://a.test/1")
    await sidecar.stop()
    asking = asyncio.create_task(gate.check("http://a.test/2"))
    await until(lambda: gate.stats().failures)
    await sidecar.start()
    assert await world.drive(asking)
    assert gate.stats().repeated >= 1
    assert gate.ready


async def test_patience_ends_and_is_not_spent_twice(world: World) -> None:
    gate = await world.client("http://127.0.0.1:1", patience=10.0)
    await world.drive(gate.check("http://a.test/1"))
    assert 5.0 < world.clock.monotonic() <= 10.0
    before = gate.stats().requests
    await world.drive(gate.check("http://a.test/2"))
    assert gate.stats().requests == before + 1


async def test_an_answer_that_never_comes_is_not_waited_for(world: World) -> None:
    where = world.scripted("/v1/check", NeverAnswer())
    gate = await world.client(where, timeout=30.0)
    decision = await world.drive(gate.check("http://a.test/1"))
    assert decision.reason is Reason.GATE_UNREACHABLE
    assert "within 30 s" in (decision.note or "")
    assert world.clock.monotonic() == 30.0


async def test_a_busy_sidecar_is_asked_again_when_it_says_so(world: World) -> None:
    good = msgspec.json.encode({"decisions": [decided(Verdict.ALLOW)]})
    busy = Page("{}", status=503, headers={"Retry-After": "7"})
    where = world.scripted("/v1/check", busy, Page(good))
    gate = await world.client(where)
    assert await world.drive(gate.check("https://a.example/x"))
    assert world.clock.monotonic() == 7.0


# -- a sidecar that refuses --------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (told(403, "denied", decision=decided(Verdict.DENY)), Denied),
        (told(429, "deferred", decision=decided(Verdict.DEFER, retry_at=NOON)), Deferred),
        (told(400, "invalid-url"), InvalidURL),
        (told(401, "unauthorized"), SidecarError),
        (told(404, "no-lease"), SidecarError),
        (told(500, "internal"), SidecarError),
        (Answer(502, b"<html>bad gateway</html>", None), SidecarError),
    ],
    ids=lambda value: "" if isinstance(value, type) else str(value.status),
)
def test_problems_become_the_gate_s_own_errors(answer: Answer, kind: type[Exception]) -> None:
    error = problem(answer, "http://a.test/")
    assert type(error) is kind
    assert str(error)


async def test_a_wrong_token_is_told_plainly_and_never_shown(world: World) -> None:
    sidecar = await world.sidecar(tokens=Tokens((b"t" * 40,)))
    gate = await world.client(sidecar.where, token=TOKEN)
    for ask in (gate.check, gate.robots, gate.acquire):
        with pytest.raises(SidecarError) as caught:
            await ask("http://a.test/")  # type: ignore[operator]
        assert (caught.value.status, caught.value.kind) == (401, "unauthorized")
        assert TOKEN not in repr(caught.value)
    assert TOKEN not in repr(gate)


async def test_the_right_token_opens(world: World) -> None:
    world.internet.site("a.test").robots("")
    sidecar = await world.sidecar(tokens=Tokens((TOKEN.encode(),)))
    gate = await world.client(sidecar.where, token=TOKEN)
    assert await gate.allowed("http://a.test/")
    lease = await gate.acquire("http://a.test/")
    lease.end()


async def test_each_asker_has_an_error_of_its_own(world: World) -> None:
    sidecar = await world.sidecar(tokens=Tokens((b"t" * 40,)))
    gate = await world.client(sidecar.where)
    asked = [gate.check(f"http://a.test/{n}") for n in range(3)]
    errors = await asyncio.gather(*asked, return_exceptions=True)
    assert len({id(error) for error in errors}) == 3


async def test_a_redirect_takes_the_token_nowhere(world: World) -> None:
    other = world.internet.site("other.test")
    where = world.scripted("/v1/check", redirect("http://other.test/v1/check", 307))
    gate = await world.client(where, token=TOKEN)
    with pytest.raises(SidecarError):
        await world.drive(gate.check("http://a.test/"))
    assert other.paths == []


@pytest.mark.parametrize(
    "body",
    [b"<html>welcome</html>", b'{"decisions":[]}', b'{"decisions":[{"verdict":"perhaps"}]}'],
)
async def test_what_is_no_sidecar_is_not_believed(world: World, body: bytes) -> None:
    gate = await world.client(world.scripted("/v1/check", Page(body)))
    with pytest.raises(SidecarError, match="unreadable"):
        await world.drive(gate.check("http://a.test/"))


@pytest.mark.parametrize(
    "where",
    ["", "127.0.0.1:8750", "ftp://a.test", "http://", "unix:", f"http://me:{TOKEN}@a.test"],
)
def test_an_address_that_is_none_is_refused(where: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RemoteGatekeeper(where)
    assert TOKEN not in str(caught.value)
    assert "unix:/run/gatekeeper.sock" in str(caught.value)


@pytest.mark.parametrize(
    "where",
    ["unix:/run/g.sock", "unix:///run/g.sock", "/run/g.sock", Path("/run/g.sock")],
)
def test_a_socket_may_be_written_in_several_ways(where: Any) -> None:
    assert "<Line to /run/g.sock>" in repr(RemoteGatekeeper(where))


@pytest.mark.parametrize("token", ["", f"{TOKEN}\r\nX: y", f"{TOKEN} b", f"{TOKEN}é"])
def test_a_token_that_no_header_may_have_is_refused_unseen(token: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RemoteGatekeeper("http://127.0.0.1:8750", token=token)
    assert TOKEN not in str(caught.value)


def test_there_are_two_fail_modes() -> None:
    with pytest.raises(ConfigError, match="closed"):
        RemoteGatekeeper("http://127.0.0.1:8750", fail="soft")  # type: ignore[arg-type]


# -- life --------------------------------------------------------------------------------


async def test_a_gate_that_is_not_open_answers_nothing() -> None:
    gate = RemoteGatekeeper("http://127.0.0.1:1")
    for ask in (gate.check, gate.acquire, gate.robots, gate.why):
        with pytest.raises(GateClosed):
            await ask("http://a.test/")  # type: ignore[operator]


async def test_a_gate_is_opened_once(world: World) -> None:
    gate = RemoteGatekeeper("http://127.0.0.1:1")
    async with gate:
        with pytest.raises(GateClosed):
            await gate.__aenter__()
    with pytest.raises(GateClosed):
        await gate.__aenter__()


async def test_closing_tells_everybody_who_waits(world: World) -> None:
    world.internet.site("slow.test").robots(Hold(Page("")))
    sidecar = await world.sidecar()
    gate = RemoteGatekeeper(sidecar.where, clock=world.clock)
    async with gate:
        waiting = [
            asyncio.create_task(gate.check("http://slow.test/")),
            asyncio.create_task(gate.acquire("http://slow.test/2")),
        ]
        await until(lambda: sidecar.count("/v1/check") and sidecar.count("/v1/leases"))
        waiting.append(asyncio.create_task(gate.check("http://slow.test/3")))
        await asyncio.sleep(0)
    for task in waiting:
        with pytest.raises(GateClosed):
            await task


# -- leases ------------------------------------------------------------------------------


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
    assert sidecar.service.leases.ended == {"reported": 1, "given_back": 0, "expired": 0}


async def test_a_forgotten_lease_is_not_renewed_for_ever(world: World) -> None:
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
    # Each client connection is a task of the server's; the client has none.
    assert not [t for t in asyncio.all_tasks() if "gatekeeper/remote" in str(t.get_coro())]
    assert len(asyncio.all_tasks()) <= before + 8
    for lease in leases:
        lease.end()


async def test_what_came_of_it_reaches_the_scheduler(world: World) -> None:
    world.internet.site("a.test").robots("")
    sidecar = await world.sidecar()
    gate = await world.client(sidecar.where)
    lease = await gate.acquire("http://a.test/x")
    lease.report(status=429, retry_after="300", size=12)
    # A complaint does not wait for the body: the host is blocked from now on.
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


async def test_measurements_that_are_none_do_not_cost_the_report(world: World) -> None:
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


async def test_leaving_tells_the_last_reports(world: World) -> None:
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


async def test_a_report_nobody_can_take_is_given_up(
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


async def test_who_is_cancelled_in_a_long_poll_leaves_the_line(world: World) -> None:
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
    given = {"id": "abc", "url": "http://a.test/x", "decision": decided(Verdict.ALLOW)}
    hold = Hold(Page(msgspec.json.encode(given), status=201))
    where = world.scripted("/v1/leases", hold)
    gate = await world.client(where)
    waiter = asyncio.create_task(gate.acquire("http://a.test/x"))
    await hold.waiting.acquire()
    polls = list(gate._tasks._tasks)
    hold.release()
    # The answer has been read, and the waiter has not run since: now it is cancelled.
    polls[0].add_done_callback(lambda _: waiter.cancel())
    await asyncio.wait([waiter])
    assert waiter.cancelled()
    site = world.internet.sites["127.0.0.1"]
    await until(lambda: "/v1/leases/abc" in site.paths)
    assert site.requests[-1].method == "DELETE"


async def test_long_polls_are_bounded_here_too(world: World) -> None:
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


async def test_a_poll_that_ends_is_put_again(world: World) -> None:
    world.internet.site("a.test").robots("")
    sidecar = await world.sidecar()
    gate = await world.client(sidecar.where, poll=50.0)
    held = await gate.acquire("http://a.test/1", owned=False)
    waiter = asyncio.create_task(gate.acquire("http://a.test/2", owned=False))
    await world.clock.elapse(220.0, turns=60)
    assert sidecar.count("/v1/leases") == 6
    held.end()
    (await world.drive(waiter)).end()


async def test_a_lease_is_asked_for_again_when_the_sidecar_starts_again(world: World) -> None:
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


async def test_two_clients_share_the_host_s_turns(world: World) -> None:
    site = world.internet.site("a.test").robots("User-agent: *\nCrawl-delay: 5\n").page("/")
    sidecar = await world.sidecar()
    gates = [await world.client(sidecar.where) for _ in range(2)]

    async def crawl(gate: RemoteGatekeeper) -> None:
        async with world.internet.session() as session:
            for _ in range(4):
                turn = gate.lease("http://a.test/")
                async with turn as lease, session.get("http://a.test/") as page:
                    lease.report(status=page.status)

    await world.drive(asyncio.gather(*map(crawl, gates)))
    assert len(site.gaps()) == 8
    assert min(site.gaps()) >= 5.0


async def test_the_body_of_a_poll_says_what_was_asked(world: World) -> None:
    where = world.scripted("/v1/leases", Page("{}", status=400))
    gate = await world.client(where, user_agent="mybot/1.0")
    with pytest.raises(SidecarError):
        await world.drive(gate.acquire("http://a.test/x", priority=5000, timeout=7.0))
    body = json.loads(world.internet.requests[-1].body)
    assert body == {
        "url": "http://a.test/x",
        "wait": 7.0,
        "ttl": 60.0,
        "priority": 1000,
        "user_agent": "mybot/1.0",
    }
