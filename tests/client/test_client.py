"""`RemoteGatekeeper` apart from its answers, which tests/conformance covers."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gatekeeper import (
    ConfigError,
    Deferred,
    Denied,
    GateClosed,
    GatekeeperError,
    InvalidURL,
    Reason,
    RemoteGatekeeper,
    SidecarError,
    Verdict,
)
from gatekeeper.client.connection import SidecarConnection, SidecarResponse, problem
from gatekeeper.sidecar.security import Tokens
from tests.conformance.ways import World
from tests.gate_support import decided
from tests.internet import FakeInternet, Hold, NeverAnswer, Page, Raw, redirect
from tests.waiting_support import until

NOON = datetime(2026, 11, 20, 12, tzinfo=UTC)
TOKEN = "s3cr3t" * 8


def told(status: int, kind: str, **fields: Any) -> SidecarResponse:
    document = {
        "type": f"urn:gatekeeper:problem:{kind}",
        "title": "A Title",
        "status": status,
        "detail": "so it is",
    } | fields
    return SidecarResponse(status, msgspec.json.encode(document), None)


async def test_an_answer_may_have_a_long_head(internet: FakeInternet) -> None:
    """A proxy before the sidecar may add a Content-Security-Policy, for example."""
    fields = b"Content-Security-Policy: " + b"x" * 60_000 + b"\r\n" + b"X: y\r\n" * 300
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n" + fields + b"\r\nok"
    internet.site("127.0.0.1").on("/healthz", Raw(head))
    connection = SidecarConnection(
        f"http://127.0.0.1:{internet.listener().port()}",
        token=None,
        ssl=None,
        patience=0.0,
        connect_timeout=2.0,
        timeout=30.0,
        clock=internet.clock,
        rng=random.Random(1),
    )
    await connection.open()
    try:
        answer = await connection.request("GET", "/healthz")
    finally:
        await connection.close()
    assert (answer.status, answer.body) == (200, b"ok")
    with pytest.raises(GateClosed):  # as a call that waited to ask again finds it
        await connection.request("GET", "/healthz")
    with pytest.raises(GateClosed):
        await anext(connection.lines("/healthz", "http://a.test/"))


async def test_an_unreachable_sidecar_defers_every_question(world: World) -> None:
    where = f"http://{world.internet.refusing('gone.test')}:{1}"
    gate = await world.client(where)
    decision = await world.drive(gate.check("http://a.test/x"))
    assert (decision.verdict, decision.reason) == (Verdict.DEFER, Reason.GATE_UNREACHABLE)
    assert decision.retry_at is not None
    assert decision.note is not None
    assert "can't be asked" in decision.note
    assert not await world.drive(gate.allowed("http://a.test/x"))
    assert not gate.ready


async def test_an_unreachable_sidecar_allows_where_fail_is_open(world: World) -> None:
    gate = await world.client("http://127.0.0.1:1", fail="open", patience=0.0)
    decision = await world.drive(gate.check("http://a.test/x"))
    assert (decision.verdict, decision.reason) == (Verdict.ALLOW, Reason.GATE_UNREACHABLE)
    assert gate.peek("http://a.test/x") is None


@pytest.mark.parametrize("fail", ["closed", "open"])
async def test_an_unreachable_sidecar_gives_no_lease_in_either_fail_mode(
    world: World, fail: str
) -> None:
    gate = await world.client("http://127.0.0.1:1", fail=fail)
    with pytest.raises(Deferred) as caught:
        await world.drive(gate.acquire("http://a.test/x"))
    assert caught.value.decision.reason is Reason.GATE_UNREACHABLE
    assert caught.value.retry_at is not None


async def test_an_operator_call_without_a_sidecar_raises_sidecar_error(world: World) -> None:
    gate = await world.client("http://127.0.0.1:1", patience=0.0)
    with pytest.raises(SidecarError, match="unreachable"):
        await world.drive(gate.pause("a.test"))


async def test_a_refresh_that_is_answered_202_is_no_error(world: World) -> None:
    body = '{"host":"a.test","state":"busy","next_at":null,"interval":null,"clocks":[]}'
    where = world.scripted("/v1/hosts/a.test/refresh", Page(body, status=202))
    gate = await world.client(where)
    await world.drive(gate.refresh("http://a.test"))


async def test_a_question_waits_for_a_sidecar_that_restarts(world: World) -> None:
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


async def test_patience_is_spent_once_and_later_questions_fail_at_once(world: World) -> None:
    world.internet.site("a.test").robots("")
    sidecar = await world.sidecar()
    gate = await world.client(sidecar.where, patience=10.0)
    await gate.check("http://a.test/0")
    await sidecar.stop()
    began = world.clock.monotonic()
    await world.drive(gate.check("http://a.test/1"))
    assert 5.0 < world.clock.monotonic() - began <= 10.0
    before = gate.stats().requests
    await world.drive(gate.check("http://a.test/2"))
    assert gate.stats().requests == before + 1


@pytest.mark.parametrize("ask", ["check", "acquire", "pause"])
async def test_a_sidecar_that_never_answered_is_given_up_after_the_connect_timeout(
    world: World, ask: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A wrong address took ten seconds to show."""
    told = "no connection to http://127.0.0.1:1: Connection refused; is `gatekeeper serve` running"
    gate = await world.client("http://127.0.0.1:1", rng=random.Random(1))
    calls: dict[str, Callable[[], Awaitable[Any]]] = {
        "check": lambda: gate.check("http://a.test/1"),
        "acquire": lambda: gate.acquire("http://a.test/1"),
        "pause": lambda: gate.pause("a.test"),
    }
    assert told in str(await world.drive(tolerant(calls[ask]())))
    assert 0.5 < world.clock.monotonic() <= 2.0
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert told in caplog.text


async def tolerant(work: Awaitable[Any]) -> object:
    try:
        return await work
    except GatekeeperError as error:
        return error


async def test_a_first_response_that_says_busy_is_no_wrong_address(world: World) -> None:
    """A sidecar that is starting, behind a proxy for example, has the whole patience."""
    busy = Page("{}", status=503, headers={"Retry-After": "3"})
    good = Page(msgspec.json.encode({"decisions": [decided(Verdict.ALLOW)]}))
    gate = await world.client(world.scripted("/v1/check", busy, busy, good))
    assert await world.drive(gate.check("https://a.example/x"))
    assert world.clock.monotonic() == 6.0


@pytest.mark.parametrize("seconds", [0, -1.0, math.nan])
def test_a_connect_timeout_that_is_no_time_is_refused(seconds: float) -> None:
    with pytest.raises(ConfigError, match=r"connect_timeout=.*: give seconds above 0"):
        RemoteGatekeeper("http://127.0.0.1:1", connect_timeout=seconds)


async def test_an_answer_that_never_comes_is_given_up_at_the_timeout(world: World) -> None:
    where = world.scripted("/v1/check", NeverAnswer())
    gate = await world.client(where, timeout=30.0)
    decision = await world.drive(gate.check("http://a.test/1"))
    assert decision.reason is Reason.GATE_UNREACHABLE
    assert "within 30 s" in (decision.note or "")
    assert world.clock.monotonic() == 30.0


async def test_a_busy_sidecar_is_asked_again_after_its_retry_after(world: World) -> None:
    good = msgspec.json.encode({"decisions": [decided(Verdict.ALLOW)]})
    busy = Page("{}", status=503, headers={"Retry-After": "7"})
    where = world.scripted("/v1/check", busy, Page(good))
    gate = await world.client(where)
    assert await world.drive(gate.check("https://a.example/x"))
    assert world.clock.monotonic() == 7.0


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (told(403, "denied", decision=decided(Verdict.DENY)), Denied),
        (told(429, "deferred", decision=decided(Verdict.DEFER, retry_at=NOON)), Deferred),
        (told(400, "invalid-url"), InvalidURL),
        (told(401, "unauthorized"), SidecarError),
        (told(404, "no-lease"), SidecarError),
        (told(500, "internal"), SidecarError),
        (SidecarResponse(502, b"<html>bad gateway</html>", None), SidecarError),
    ],
    ids=lambda value: "" if isinstance(value, type) else str(value.status),
)
def test_problem_documents_become_the_errors_of_the_gate(
    answer: SidecarResponse, kind: type[Exception]
) -> None:
    error = problem(answer, "http://a.test/")
    assert type(error) is kind
    assert str(error)


@pytest.mark.parametrize("scheme", ["http", "unix"])
async def test_a_sidecar_that_is_not_there_is_named_with_the_remedy(
    world: World, tmp_path: Path, scheme: str
) -> None:
    where, why = {
        "http": (f"http://{world.internet.refusing('gone.test')}:1", "Connection refused"),
        "unix": (f"{tmp_path}/none.sock", "No such file or directory"),
    }[scheme]
    gate = await world.client(where, patience=0.0)
    with pytest.raises(Deferred) as caught:
        await world.drive(gate.acquire("http://a.test/x"))
    asked = f"no connection to {where}: {why}; is `gatekeeper serve` running there?"
    assert str(caught.value).startswith(
        f"defer http://a.test/x: gate_unreachable (the sidecar can't be asked: {asked})"
    )


async def test_a_missing_token_is_an_error_that_says_where_it_is_set(world: World) -> None:
    sidecar = await world.sidecar(tokens=Tokens((b"t" * 40,)))
    gate = await world.client(sidecar.where)
    with pytest.raises(SidecarError, match="a bearer token is needed; give RemoteGatekeeper its"):
        await gate.check("http://a.test/")


async def test_a_wrong_token_is_an_error_that_does_not_show_it(world: World) -> None:
    sidecar = await world.sidecar(tokens=Tokens((b"t" * 40,)))
    gate = await world.client(sidecar.where, token=TOKEN)
    for ask in (gate.check, gate.robots, gate.acquire):
        with pytest.raises(SidecarError) as caught:
            await ask("http://a.test/")  # type: ignore[operator]
        assert (caught.value.status, caught.value.kind) == (401, "unauthorized")
        assert "the sidecar does not accept this token (the bearer" in str(caught.value)
        assert TOKEN not in repr(caught.value)
    assert TOKEN not in repr(gate)


async def test_the_right_token_is_accepted(world: World) -> None:
    world.internet.site("a.test").robots("")
    sidecar = await world.sidecar(tokens=Tokens((TOKEN.encode(),)))
    gate = await world.client(sidecar.where, token=TOKEN)
    assert await gate.allowed("http://a.test/")
    lease = await gate.acquire("http://a.test/")
    lease.end()


async def test_each_caller_gets_an_error_object_of_its_own(world: World) -> None:
    sidecar = await world.sidecar(tokens=Tokens((b"t" * 40,)))
    gate = await world.client(sidecar.where)
    asked = [gate.check(f"http://a.test/{n}") for n in range(3)]
    errors = await asyncio.gather(*asked, return_exceptions=True)
    assert len({id(error) for error in errors}) == 3


async def test_a_redirect_does_not_carry_the_token_elsewhere(world: World) -> None:
    other = world.internet.site("other.test")
    where = world.scripted("/v1/check", redirect("http://other.test/v1/check", 307))
    gate = await world.client(where, token=TOKEN)
    with pytest.raises(SidecarError):
        await world.drive(gate.check("http://a.test/"))
    assert other.paths == []


@pytest.mark.parametrize(
    "body",
    [
        b"<html>welcome</html>",
        b'{"decisions":[]}',
        b'{"decisions":[{"verdict":"perhaps"}]}',
        b'{"x":' * 100_000,
    ],
    ids=["html", "none", "unknown", "deep"],
)
@pytest.mark.parametrize("status", [200, 404])
async def test_an_answer_that_is_not_a_sidecars_raises_sidecar_error(
    world: World, body: bytes, status: int
) -> None:
    gate = await world.client(world.scripted("/v1/check", Page(body, status=status)))
    with pytest.raises(SidecarError, match="unreadable"):
        await world.drive(gate.check("http://a.test/"))


@pytest.mark.parametrize(
    "where",
    ["", "127.0.0.1:8750", "ftp://a.test", "http://", "unix:", f"http://me:{TOKEN}@a.test"],
)
def test_a_malformed_sidecar_address_is_refused(where: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RemoteGatekeeper(where)
    assert TOKEN not in str(caught.value)
    assert "unix:/run/gatekeeper/gatekeeper.sock" in str(caught.value)


@pytest.mark.parametrize(
    "where",
    ["unix:/run/g.sock", "unix:///run/g.sock", "/run/g.sock", Path("/run/g.sock")],
)
def test_a_socket_may_be_written_in_several_ways(where: Any) -> None:
    assert "<SidecarConnection to /run/g.sock>" in repr(RemoteGatekeeper(where))


@pytest.mark.parametrize("token", ["", f"{TOKEN}\r\nX: y", f"{TOKEN} b", f"{TOKEN}é"])
def test_a_token_that_no_header_may_have_is_refused_unseen(token: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RemoteGatekeeper("http://127.0.0.1:8750", token=token)
    assert TOKEN not in str(caught.value)


def test_an_unknown_fail_mode_is_refused() -> None:
    with pytest.raises(ConfigError, match="closed"):
        RemoteGatekeeper("http://127.0.0.1:8750", fail="soft")  # type: ignore[arg-type]


async def test_a_gate_that_is_not_open_answers_nothing() -> None:
    gate = RemoteGatekeeper("http://127.0.0.1:1")
    for ask in (gate.check, gate.acquire, gate.robots, gate.why):
        with pytest.raises(GateClosed):
            await ask("http://a.test/")  # type: ignore[operator]


@pytest.mark.parametrize(
    "name",
    ["check", "allowed", "check_all", "acquire", "try_acquire", "acquire_if_due", "robots", "why"],
)
async def test_a_gate_of_another_event_loop_answers_nothing(name: str) -> None:
    async with RemoteGatekeeper("http://127.0.0.1:1") as gate:
        ask = getattr(gate, name)
        url = "http://a.test/"
        work = ask([url] if name == "check_all" else url)
        with pytest.raises(GateClosed, match="belongs to another event loop"):
            await asyncio.to_thread(asyncio.run, work)


async def test_a_gate_cannot_be_opened_twice(world: World) -> None:
    gate = RemoteGatekeeper("http://127.0.0.1:1")
    async with gate:
        with pytest.raises(GateClosed):
            await gate.__aenter__()
    with pytest.raises(GateClosed):
        await gate.__aenter__()


async def test_closing_a_client_ends_every_waiting_call_with_an_error(world: World) -> None:
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


class Text(str):
    """A subclass of str, such as lxml's results."""

    __slots__ = ()


async def test_a_subclass_of_str_is_accepted_by_both_gates(world: World) -> None:
    world.internet.site("a.test").robots("User-agent: *\nDisallow: /no")
    sidecar = await world.sidecar()
    near, far = sidecar.service.gate, await world.client(sidecar.where)
    agent = Text("otherbot/2.0")
    for gate in (near, far):
        for path, allowed in (("", True), ("no", False)):
            url = Text(f"http://a.test/{path}")
            assert await world.drive(gate.allowed(url)) is allowed
            decision = await world.drive(gate.check(url, user_agent=agent))
            assert (bool(decision), decision.user_agent) == (allowed, "otherbot")
        assert await world.drive(gate.why(Text("a.test")))
        lease = await world.drive(gate.acquire(Text("http://a.test/x"), user_agent=agent))
        lease.end()
        await until(lambda: not len(sidecar.service.leases))
