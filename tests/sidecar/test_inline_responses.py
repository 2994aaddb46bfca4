"""Inline responses: equal to the usual ones, in order, within all limits."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from gatekeeper import library_internals
from gatekeeper.client.wire import Decisions
from gatekeeper.decision import Decision, Reason, Verdict
from gatekeeper.sidecar.listening import Server
from gatekeeper.sidecar.security import Tokens
from tests.conformance.ways import listen
from tests.internet import FakeInternet
from tests.sidecar.conftest import connected
from tests.sidecar.decision_log_support import LogOf
from tests.waiting_support import until

TOKEN = "a" * 40
_OWN = re.compile(
    rb"(?m)^(?:Date|X-Request-Id|Content-Length): .*\r\n|(?<=urn:gatekeeper:request:)[^\"]*"
    rb'|(?<="id":")[^"]*|(?<=not_before":")[^"]*|(?<=expires_at":")[^"]*'
)


def get(target: str, *fields: str) -> bytes:
    lines = [f"GET {target} HTTP/1.1", "Host: 127.0.0.1", *fields, "", ""]
    return "\r\n".join(lines).encode()


def post(target: str, body: object, *fields: str, kind: str = "application/json") -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = [f"POST {target} HTTP/1.1", "Host: 127.0.0.1", f"Content-Type: {kind}", *fields]
    return "\r\n".join([*head, f"Content-Length: {len(data)}", "", ""]).encode() + data


CHECK = get("/v1/check?url=http%3A%2F%2Fa.test%2Fpage")


@dataclass
class Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def ask(self, *requests: bytes) -> bytes:
        """Send the requests in one piece and return the first response."""
        self.writer.write(b"".join(requests))
        return await self.answer()

    async def answer(self) -> bytes:
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: (\d+)", head)
        return head + await self.reader.readexactly(int(length[1]) if length else 0)


class TwoServers:
    """One service behind two servers, one with inline responses and one without."""

    def __init__(self, running: Any) -> None:
        self.service = running.service
        self.inline: list[bytes | None] = []
        self.servers: list[Server] = []
        self.stack = AsyncExitStack()

    def _look(self, *question: Any) -> bytes | None:
        assert self.service.inline is not None
        self.inline.append(self.service.inline(*question))
        return self.inline[-1]

    async def connect(self, *, usual: bool = False) -> Connection:
        look = None if usual else self._look
        server = Server(self.service.handle, header=16_384, inline=look)
        self.servers.append(server)
        port = await listen(self.stack, server)
        connection = connected(f"http://127.0.0.1:{port}")
        return Connection(*await self.stack.enter_async_context(connection))


@pytest.fixture
async def two_servers(serve: Any, internet: FakeInternet) -> AsyncIterator[Any]:
    """`await two_servers(max_leases=3, ...)`; the record of a.test is cached."""
    opened = []

    async def begin(**settings: Any) -> TwoServers:
        internet.site("a.test").robots("User-agent: *\nDisallow: /private\nAllow: /é\n")
        internet.site("b.test").robots("")
        two_servers = TwoServers(await serve(pacing={"concurrency": 10}, **settings))
        opened.append(two_servers)
        for path in ("", "private", "é"):
            await two_servers.service.gate.check(f"http://a.test/{path}")
        return two_servers

    yield begin
    for two_servers in opened:
        await two_servers.stack.aclose()


def under_way(both: TwoServers) -> Any:
    """How many requests are being answered."""
    return both.service.clients.samples()["gatekeeper_requests_under_way"]


def alike(answer: bytes) -> tuple[list[bytes], bytes]:
    """Strip what differs between responses, and sort the header fields."""
    head, _, body = _OWN.sub(b"", answer).partition(b"\r\n\r\n")
    return sorted(head.splitlines()), body


@pytest.mark.parametrize(
    "request_",
    [
        CHECK,
        get("/v1/check?url=http://a.test/private/x?y=1"),
        get("/v1/check?url=http://a.test/%25C3%25A9"),
        get("/v1/check?url=http%3A%2F%2Fa.test%2F%22%5C"),
        get("/v1/check?url=http://a.test/page&user_agent=other"),
        get("/v1/check?url=nothing"),
        get("/v1/check?url=%ff"),
        get("/v1/check"),
        get("http://127.0.0.1/v1/check?url=http://a.test/page"),
        get("/v1/check?url=http://a.test/page", "Origin: http://evil.test"),
        get("/v1/check?url=http://a.test/page", "Sec-Fetch-Site: cross-site"),
        CHECK.replace(b"GET", b"PUT"),
        CHECK.replace(b"127.0.0.1", b"rebound.test"),
        post("/v1/leases", {"url": "http://a.test/page"}),
        post("/v1/leases", {"url": "http://a.test/page", "ttl": 3, "wait": 1, "priority": 2}),
        post("/v1/leases", {"url": "http://a.test/private"}),
        post("/v1/leases", {"url": "http://a.test/page", "wait": 10_000}),
        post("/v1/leases", {"url": "http://a.test/page", "more": 1}),
        post("/v1/leases", b"{"),
        post("/v1/leases", b'{"url": "\xff"}'),
        post("/v1/leases", {"url": "http://a.test/page"}, kind="text/plain"),
        post("/v1/leases/unknown/report", {"status": 200}),
        post("/v1/leases/%00/report", {"status": 200}),
    ],
)
async def test_an_inline_response_equals_that_of_the_usual_path(
    two_servers: Any, request_: bytes
) -> None:
    both = await two_servers()
    quick, usual = await both.connect(), await both.connect(usual=True)

    assert alike(await quick.ask(request_)) == alike(await usual.ask(request_))


async def test_a_warm_check_a_free_lease_and_a_report_are_answered_inline(two_servers: Any) -> None:
    both = await two_servers()
    connection = await both.connect()
    await connection.ask(CHECK)
    lease = json.loads(
        (await connection.ask(post("/v1/leases", {"url": "http://a.test/1"})))[-900:].partition(
            b"\r\n\r\n"
        )[2]
    )
    report = await connection.ask(post(f"/v1/leases/{lease['id']}/report", {"status": 200}))

    assert [answer is not None for answer in both.inline] == [True, True, True]
    assert report.startswith(b"HTTP/1.1 204 ")
    assert both.service.leases.ended["reported"] == 1


async def test_another_agent_is_answered_inline(two_servers: Any) -> None:
    both = await two_servers()
    connection = await both.connect()
    for number in range(5):
        target = f"/v1/check?url=http://a.test/private{number}&user_agent=other"
        assert b'"user_agent":"other"' in await connection.ask(get(target))

    assert all(both.inline)


async def test_answers_keep_the_order_of_their_requests(
    two_servers: Any, internet: FakeInternet
) -> None:
    both = await two_servers()
    connection = await both.connect()
    cold = get("/v1/check?url=http://b.test/first")

    assert b"b.test/first" in await connection.ask(cold, CHECK)
    assert b"a.test/page" in await connection.answer()
    # Again, with the second one read while the first is being answered.
    cold = get("/v1/check?url=http://b.test:81/first")
    connection.writer.write(cold)
    await until(lambda: under_way(both))
    assert b"b.test:81/first" in await connection.ask(CHECK)
    assert b"a.test/page" in await connection.answer()


async def test_a_client_that_does_not_read_gets_no_inline_response(two_servers: Any) -> None:
    both = await two_servers()
    connection = await both.connect()
    await connection.ask(CHECK)
    [protocol] = both.servers[0].connections
    protocol.pause_writing()  # as the transport does when the client reads too slowly
    await connection.ask(CHECK)
    connection.writer.write(CHECK)
    await until(lambda: protocol._messages)
    protocol.resume_writing()
    await connection.answer()

    assert len(both.inline) == 1


async def test_a_body_in_pieces_takes_the_usual_path(two_servers: Any) -> None:
    both = await two_servers()
    connection = await both.connect()
    whole = post("/v1/leases", {"url": "http://a.test/page"})
    connection.writer.write(whole[:-5])
    await until(lambda: under_way(both))

    assert (await connection.ask(whole[-5:])).startswith(b"HTTP/1.1 201 ")
    assert both.inline == []


@pytest.mark.parametrize("kept", [0, 1, 2])
async def test_known_header_lines_in_any_combination_are_read_alike(
    two_servers: Any, kept: int
) -> None:
    """Requests with known header lines, split and combined in several ways."""
    both = await two_servers()
    connection, usual = await both.connect(), await both.connect(usual=True)
    for _ in range(kept):
        await connection.ask(CHECK)
    lease = post("/v1/leases", {"url": "http://a.test/page", "wait": 9})
    target = "/v1/check?url=http://a.test/"
    for requests in (
        [CHECK],
        [get(target + "a b")],  # an unusual request line
        [CHECK],
        [get(target + "é")],
        [get(target + "x#y")],
        [CHECK.replace(b"HTTP/1.1", b"HTTP/1.0")],
    ):
        answers = []
        for one in (connection, usual):
            answers.append(alike(await one.ask(*requests)))
            if b"HTTP/1.1 200 OK" not in answers[-1][0]:  # the connection was closed
                fresh = await both.connect(usual=one is usual)
                connection, usual = (connection, fresh) if one is usual else (fresh, usual)
        assert answers[0] == answers[1]
    for _ in range(2):
        assert b" 201 " in await connection.ask(lease)
    # A body that is shorter, longer, or split; and two requests in one piece.
    short = lease[:-1]
    connection.writer.write(short)
    await until(lambda: under_way(both))
    assert b" 201 " in await connection.ask(lease[-1:])
    assert b" 201 " in await connection.ask(lease + CHECK)
    assert b"a.test/page" in await connection.answer()
    half = CHECK[:40]
    connection.writer.write(half)
    await asyncio.sleep(0)
    assert b"a.test/page" in await connection.ask(CHECK[40:])
    assert b"a.test/page" in await connection.ask(CHECK)


@pytest.mark.parametrize(
    "fields", [("Connection: close",), ("Upgrade: websocket", "Connection: upgrade")]
)
async def test_a_connection_that_ends_takes_the_usual_path(two_servers: Any, fields: Any) -> None:
    both = await two_servers()
    connection = await both.connect()
    await connection.ask(get("/v1/check?url=http://a.test/page", *fields))

    assert not any(both.inline)


@pytest.mark.parametrize(
    ("settings", "status"),
    [({"client_rate": 1.0}, b"429"), ({"client_concurrency": 1}, b"429")],
)
async def test_the_limits_of_a_client_hold_on_the_inline_path(
    two_servers: Any, settings: Any, status: bytes
) -> None:
    both = await two_servers(**settings)
    connection = await both.connect()
    await connection.ask(CHECK)
    if "client_concurrency" in settings:
        both.service.clients.enter("127.0.0.1")  # another request of the client is under way

    assert (await connection.ask(CHECK)).split()[1] == status


async def test_a_token_is_required_on_the_inline_path(two_servers: Any) -> None:
    both = await two_servers()
    both.service.apply_config(both.service.config, Tokens((TOKEN.encode(),)))
    connection = await both.connect()

    assert (await connection.ask(CHECK)).split()[1] == b"401"
    field = f"Authorization: Bearer {TOKEN}"
    assert (await connection.ask(get("/v1/check?url=http://a.test/1", field))).split()[1] == b"200"
    assert both.inline[0] is None
    assert both.inline[1] is not None


async def test_no_lease_is_granted_inline_beyond_the_limit_or_while_draining(
    two_servers: Any,
) -> None:
    both = await two_servers(max_leases=1)
    connection = await both.connect()
    lease = post("/v1/leases", {"url": "http://a.test/page"})
    await connection.ask(lease)
    assert (await connection.ask(lease)).split()[1] == b"503"
    both.service.leases.drain()
    assert (await connection.ask(lease)).split()[1] == b"503"


async def test_an_inline_response_is_counted_and_logged(two_servers: Any) -> None:
    both = await two_servers()
    log = LogOf(both.service)
    for usual in (False, True):
        connection = await both.connect(usual=usual)
        await connection.ask(CHECK)
        await connection.ask(post("/v1/leases", {"url": "http://a.test/1"}))
    told = log.lines()

    assert both.service.metrics.requests == {
        ("/v1/check", "GET", 200): 2,
        ("/v1/leases", "POST", 201): 2,
    }
    assert [one["url"] for one in told] == ["http://a.test/page", "http://a.test/1"] * 2
    assert len({one["id"] for one in told}) == len({one["request"] for one in told}) == 4
    assert both.service.gate.stats().decisions


@pytest.mark.parametrize("log", ["all", "refused"])
async def test_a_batch_is_answered_in_its_order_and_logged(two_servers: Any, log: str) -> None:
    both = await two_servers()
    kept = LogOf(both.service, log)
    connection = await both.connect()
    paths = ["page", "private/%20", "../private", "robots.txt", "private", "é", "b/"]
    urls = [*(f"http://a.test/{path}" for path in paths), "nonsense", "http://b.test/"]
    answer = await connection.ask(post("/v1/check", {"urls": urls}))
    told = msgspec.json.decode(answer.partition(b"\r\n\r\n")[2], type=Decisions).decisions
    logged = {one["id"]: one["url"] for one in kept.lines()}

    assert [one.url for one in told] == urls
    assert [bool(one) for one in told] == [True, False, False, True, False, True, True, False, True]
    wanted = [one for one in told if log == "all" or not one]
    assert logged == {one.id: one.url for one in wanted}
    assert len(logged) == len(kept.lines()) == len(wanted)


async def test_a_short_batch_is_answered_at_once_and_a_long_one_in_pieces(two_servers: Any) -> None:
    """Between the pieces the event loop does other work."""
    both = await two_servers()
    connection = await both.connect()
    for count, inline in ((128, True), (129, False)):
        urls = [f"http://a.test/{number}" for number in range(count)]
        answer = await connection.ask(post("/v1/check", {"urls": urls}))
        told = msgspec.json.decode(answer.partition(b"\r\n\r\n")[2], type=Decisions).decisions
        assert [one.url for one in told] == urls
        assert (both.inline[-1] is not None) is inline
    assert both.service.gate.stats().decisions[Verdict.ALLOW, Reason.NO_RULE] >= 257


async def test_an_internal_error_on_the_inline_path_is_logged(
    two_servers: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    both = await two_servers()
    monkeypatch.setattr(both.service.gate.parts.decider, "recall", lambda *_, **__: 1 / 0)
    connection = await both.connect()

    assert (await connection.ask(CHECK)).split()[1] == b"500"
    assert "not answered inline" in caplog.text


async def test_a_connection_in_use_is_not_taken_for_idle(two_servers: Any) -> None:
    both = await two_servers()
    connection = await both.connect()
    await connection.ask(CHECK)
    [protocol] = both.servers[0].connections
    protocol._next_keepalive_close_time = 0.0
    await connection.ask(CHECK)
    protocol._process_keepalive()  # as the timer does

    assert (await connection.ask(CHECK)).split()[1] == b"200"


async def test_a_first_request_answered_at_once_is_not_too_slow(two_servers: Any) -> None:
    both = await two_servers()
    connection = await both.connect()
    [protocol] = both.servers[0].connections
    timer = protocol._first_timer
    assert not timer.cancelled()
    await connection.ask(CHECK)

    assert timer.cancelled()
    assert both.inline[-1] is not None


async def test_an_idle_connection_is_closed_though_aiohttp_saw_no_request(two_servers: Any) -> None:
    both = await two_servers()
    connection = await both.connect()
    await connection.ask(CHECK)
    [protocol] = both.servers[0].connections
    await until(lambda: protocol._waiter is not None)
    protocol._next_keepalive_close_time = 0.0  # the latest response was long ago
    protocol._process_keepalive()  # as the timer does

    assert protocol.transport is None or protocol.transport.is_closing()


@pytest.mark.parametrize("missing", ["_waiter", "_next_keepalive_close_time"])
async def test_with_an_unknown_aiohttp_every_request_takes_the_usual_path(
    two_servers: Any, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    has = hasattr
    monkeypatch.setattr(
        library_internals, "hasattr", lambda one, name: name != missing and has(one, name), False
    )
    both = await two_servers()
    connection = await both.connect()

    assert (await connection.ask(CHECK)).split()[1] == b"200"
    assert both.inline == []


@pytest.mark.parametrize("odd", [False, True])
async def test_a_batch_has_the_decisions_of_single_questions(
    serve: Any, internet: FakeInternet, odd: bool
) -> None:
    rules = "User-agent: *\nDisallow: /private\nDisallow: /*.pdf$\nCrawl-delay: 2\n"
    internet.site("a.test").robots(f"{rules}\nUser-agent: other\nDisallow: /page\nAllow: /private")
    internet.site("b.test").robots("User-agent: *\nVisit-time: 0000-2400\nDisallow: /x?y\n")
    internet.site("c.test").robots("", status=503)
    internet.site("d.test").robots('Disallow: \\\\"/\nUser-agent: *\nDisallow: /\\\\" \n')
    internet.site("e.test").robots("", status=404)
    hosts = [{"match": "f.test", "robots": "deny", "reason": 'of "ours"'}]
    kinds = ["page", "page?q=1&r='", "private/1", "x.pdf", "x.pdf#y", "robots.txt", "%C3%A9", "é"]
    kinds += ["a/../private", 'quote"\\', "%", "x?y", "private/%20", "page~(1)", ""]
    urls = [
        f"http://{letter}.test/{kind}" for letter in ("abcdef" if odd else "abde") for kind in kinds
    ]
    urls += ["http://A.test/page", "http://a.test"]
    if odd:  # URLs without a record
        urls += [
            "http://u:p@a.test/",
            "nonsense",
            "",
            "http://10.0.0.1/",
            "http://a.test/line\nfeed",
        ]

    both, ids = TwoServers(await serve(host=hosts)), set()
    connection, gate = await both.connect(), both.service.gate
    for _ in range(2):
        for agent in (None, "other", "third/1.0"):
            body = {"urls": urls, **({"user_agent": agent} if agent else {})}
            answer = await connection.ask(post("/v1/check", body))
            told = msgspec.json.decode(answer.partition(b"\r\n\r\n")[2], type=Decisions).decisions
            feed = both.service.operators.feed.since(0, len(urls))
            assert [one.decision for one in feed] == told
            ids |= {one.id for one in told}
            for one, url in zip(told, urls, strict=True):
                [expected] = await gate.check_all([url], user_agent=agent)
                assert kept(one) == kept(expected)
    assert len(ids) == 6 * len(urls)
    await both.stack.aclose()


def kept(decision: Decision) -> Decision:
    """Return the decision without what differs between two moments."""
    return msgspec.structs.replace(decision, id="", fetched_at=None, expires_at=None, retry_at=None)
