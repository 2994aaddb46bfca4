"""The forward proxy: what it passes on and refuses, and authentication."""

from __future__ import annotations

import asyncio
import base64
import gzip
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gatekeeper.sidecar.listening import Server
from gatekeeper.sidecar.proxy import Proxy
from gatekeeper.sidecar.routing import Role
from gatekeeper.sidecar.security import Token, Tokens
from gatekeeper.signing import new_key
from tests.conformance.ways import listen
from tests.internet import FakeInternet, Hold, NeverAnswer, Page, Reset, redirect
from tests.test_signing import as_sent, verify
from tests.waiting_support import until

ROBOTS = "User-agent: *\nDisallow: /private\n"


class Client:
    """Sends requests to the proxy, with aiohttp or as raw octets."""

    def __init__(self, service: Any, port: int, session: aiohttp.ClientSession) -> None:
        self.service = service
        self.port = port
        self.session = session
        self.base = f"http://127.0.0.1:{port}"
        self.open: list[asyncio.StreamWriter] = []

    async def get(self, url: str, **options: Any) -> tuple[int, Any, str]:
        options.setdefault("allow_redirects", False)
        method = options.pop("method", "GET")
        async with self.session.request(method, url, proxy=self.base, **options) as answer:
            return answer.status, answer.headers, await answer.text()

    async def connect(
        self, authority: str, early: bytes = b""
    ) -> tuple[bytes, asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a tunnel; return the head of the response and the streams.

        `early` is sent without waiting for the response.
        """
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.open.append(writer)
        head = f"CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n\r\n"
        writer.write(head.encode() + early)
        return await reader.readuntil(b"\r\n\r\n"), reader, writer

    async def raw(self, head: str, body: bytes = b"") -> bytes:
        """Send a request and return all that comes back until the connection is closed."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        lines = head.replace("\n", "\r\n")
        writer.write(f"{lines}\r\nConnection: close\r\n\r\n".encode() + body)
        try:
            return await reader.read()
        finally:
            writer.close()


@pytest.fixture
async def proxy(internet: FakeInternet, serve: Any) -> AsyncIterator[Callable[..., Awaitable[Any]]]:
    async with AsyncExitStack() as stack:

        async def begin(*, tokens: Tokens | None = None, **settings: Any) -> Client:
            service = (await serve(**settings)).service
            if tokens is not None:
                service.apply_config(service.config, tokens)
            port = await listen(stack, Server(Proxy(service).handle, header=16_384))
            session = await stack.enter_async_context(aiohttp.ClientSession())
            clients.append(Client(service, port, session))
            return clients[-1]

        clients: list[Client] = []
        yield begin
        for writer in [writer for client in clients for writer in client.open]:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()


async def test_a_page_is_decided_and_passed_on(internet: FakeInternet, proxy: Any) -> None:
    site = internet.site("a.test").robots(ROBOTS).page("/x", "hello", headers={"X-Site": "yes"})
    client = await proxy()
    status, headers, text = await client.get("http://a.test/x?q=1", headers={"X-Mine": "yes"})
    assert (status, text, headers["X-Site"]) == (200, "hello", "yes")
    assert headers["Via"] == "1.1 gatekeeper"
    assert headers["X-Gatekeeper-Verdict"] == "allow"
    sent = site.requests[-1]
    assert (sent.target, sent.headers["X-Mine"]) == ("/x?q=1", "yes")
    assert sent.headers["User-Agent"] == "testbot/1.0"  # not the name that the client sent
    assert sent.headers["Via"] == "1.1 gatekeeper"

    status, headers, text = await client.get("http://a.test/private")
    assert status == 403
    assert headers["Content-Type"] == "application/problem+json"
    assert "line 2" in text
    assert site.paths == ["/robots.txt", "/x?q=1"]


async def test_hop_by_hop_fields_are_not_passed_on(internet: FakeInternet, proxy: Any) -> None:
    lines = (
        "Connection: X-One\r\nX-One: 1\r\nKeep-Alive: timeout=5\r\nProxy-Authenticate: Basic\r\n"
    )
    lines += (
        "Set-Cookie: a=1\r\nSet-Cookie: b=2\r\nX-Gatekeeper-Verdict: deny\r\nVia: 1.0 other\r\n"
    )
    from tests.internet import Raw

    answer = f"HTTP/1.1 200 OK\r\n{lines}Content-Length: 2\r\n\r\nok".encode()
    site = internet.site("a.test").robots("").on("/x", Raw(answer))
    client = await proxy()
    got = await client.raw(
        "GET http://a.test/x HTTP/1.1\nHost: other.test\nConnection: X-Secret, Cookie2\n"
        "X-Secret: 1\nCookie2: 1\nProxy-Authorization: Basic c2VjcmV0\nProxy-Connection: close\n"
        "Upgrade: websocket\nTE: trailers\nSignature: forged\nCookie: k=v"
    )
    head, _, body = got.partition(b"\r\n\r\n")
    assert body == b"ok"
    assert head.count(b"Set-Cookie: ") == 2
    assert b"Via: 1.0 other, 1.1 gatekeeper" in head
    assert b"X-Gatekeeper-Verdict: allow" in head
    for gone in (b"X-One", b"Keep-Alive", b"Proxy-Authenticate", b": deny"):
        assert gone not in head
    sent = site.requests[-1].headers
    assert (sent["Host"], sent["Cookie"]) == ("a.test", "k=v")
    gone_names = "X-Secret Cookie2 Proxy-Authorization Proxy-Connection Upgrade TE Signature"
    assert not [name for name in gone_names.split() if name in sent]


async def test_each_redirect_hop_is_the_client_s_to_ask_for(
    internet: FakeInternet, proxy: Any
) -> None:
    site = internet.site("a.test").robots(ROBOTS).on("/x", redirect("/private"))
    client = await proxy()
    status, headers, _ = await client.get("http://a.test/x")
    assert (status, headers["Location"]) == (302, "/private")
    assert (await client.get("http://a.test/x", allow_redirects=True))[0] == 403
    assert site.paths == ["/robots.txt", "/x", "/x"]


async def test_requests_are_paced_and_bodies_are_passed_on(
    internet: FakeInternet, proxy: Any
) -> None:
    site = internet.site("a.test").robots("User-agent: *\nCrawl-delay: 0.1\n").page("/x")
    client = await proxy()
    asked = [client.get("http://a.test/x", method="POST", data=b"some") for _ in range(3)]
    assert [status for status, _, _ in await asyncio.gather(*asked)] == [200] * 3
    assert [one.body for one in site.requests[1:]] == [b"some"] * 3
    assert site.requests[-1].method == "POST"
    assert min(site.gaps()) >= 0.1
    assert (await client.get("http://a.test/x", method="HEAD"))[::2] == (200, "")


async def test_an_encoded_body_is_passed_on_as_it_is(internet: FakeInternet, proxy: Any) -> None:
    site = internet.site("a.test").robots("").page("/x", "done")
    client = await proxy()
    packed = gzip.compress(b"text", mtime=0)
    for body in (packed, b"not gzip at all"):
        headers = {"Content-Encoding": "gzip"}
        status, _, _ = await client.get(
            "http://a.test/x", method="POST", data=body, headers=headers
        )
        assert (status, site.requests[-1].body) == (200, body)
        assert site.requests[-1].headers["Content-Encoding"] == "gzip"


async def test_a_429_blocks_the_host(internet: FakeInternet, proxy: Any) -> None:
    busy = Page("busy", status=429, headers={"Retry-After": "300"})
    site = internet.site("a.test").robots("").on("/x", busy)
    client = await proxy()
    assert (await client.get("http://a.test/x"))[::2] == (429, "busy")
    status, headers, _ = await client.get("http://a.test/x")
    assert status == 429
    assert int(headers["Retry-After"]) > 200
    assert site.paths == ["/robots.txt", "/x"]


@pytest.mark.parametrize(
    "url",
    [
        "http://10.1.2.3/",
        "http://169.254.169.254/latest",
        "http://in.example/",
        "http://u:p@a.test/",
    ],
)
async def test_the_guard_refuses_private_addresses(
    internet: FakeInternet, proxy: Any, url: str
) -> None:
    internet.site("a.test").robots("")
    internet.dns("in.example", "10.1.2.3")
    client = await proxy()
    got = await client.raw(f"GET {url} HTTP/1.1\nHost: x")
    assert got.startswith(b"HTTP/1.1 403") or (b" 429 " in got[:20] and "example" in url)
    assert not internet.dialled("10.1.2.3")


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("CONNECT a.test:443 HTTP/1.1", 403),
        ("GET /x HTTP/1.1", 400),
        ("GET https://a.test/x HTTP/1.1", 400),
        ("GET ftp://a.test/x HTTP/1.1", 400),
        ("OPTIONS * HTTP/1.1", 400),
        ("TRACE http://a.test/x HTTP/1.1", 501),
        ("GET http://a%zz.test/ HTTP/1.1", 400),
    ],
)
async def test_a_request_that_is_not_plain_http_is_refused(
    internet: FakeInternet, proxy: Any, line: str, status: int
) -> None:
    site = internet.site("a.test").robots("").page("/x")
    client = await proxy()
    got = await client.raw(f"{line}\nHost: a.test")
    assert got.startswith(f"HTTP/1.1 {status}".encode())
    assert site.paths == []


@pytest.mark.parametrize(
    ("credentials", "status"),
    [
        ("", 407),
        ("Basic !!!", 407),
        ("Basic " + base64.b64encode(b"any:" + b"x" * 40).decode(), 407),
        ("Basic " + base64.b64encode(b"any:" + b"c" * 40).decode(), 403),
        ("Basic " + base64.b64encode(b"any:" + b"t" * 40).decode(), 200),
        ("Bearer " + "t" * 40, 200),
    ],
)
async def test_with_tokens_the_proxy_needs_one_with_the_role_crawl(
    internet: FakeInternet, proxy: Any, credentials: str, status: int
) -> None:
    site = internet.site("a.test").robots("").page("/x")
    tokens = Tokens(
        [
            Token(b"t" * 40, "crawler", frozenset({Role.CRAWL, Role.CHECK})),
            Token(b"c" * 40, "asker", frozenset({Role.CHECK})),
        ]
    )
    client = await proxy(tokens=tokens)
    field = f"\nProxy-Authorization: {credentials}" if credentials else ""
    got = await client.raw(f"GET http://a.test/x HTTP/1.1\nHost: a.test{field}")
    assert got.startswith(f"HTTP/1.1 {status}".encode())
    assert (b"Proxy-Authenticate: Basic" in got) is (status == 407)
    assert ("/x" in site.paths) is (status == 200)


async def test_a_page_too_large_or_without_an_answer_is_502_or_504(
    internet: FakeInternet, proxy: Any
) -> None:
    site = internet.site("a.test").robots("").page("/x", "x" * 101)
    site.on("/r", Reset()).on("/n", NeverAnswer())
    client = await proxy(fetch_max_body=100, max_body=1024, fetch_timeout=1.0)
    assert (await client.get("http://a.test/x"))[0] == 502
    assert (await client.get("http://a.test/r"))[0] == 502
    assert (await client.get("http://a.test/n"))[0] == 504
    big = await client.get("http://a.test/x", method="POST", data=b"x" * 2000)
    assert big[0] == 413
    assert client.service.gate.stats().pacing.in_flight == 0


async def test_a_client_that_hangs_up_frees_the_lease(internet: FakeInternet, proxy: Any) -> None:
    hold = Hold(Page("late"))
    internet.site("a.test").robots("").on("/1", hold).page("/2", "second")
    client = await proxy()
    first = asyncio.create_task(client.get("http://a.test/1"))
    await hold.waiting.acquire()
    first.cancel()
    await asyncio.wait([first])
    assert (await client.get("http://a.test/2"))[::2] == (200, "second")


async def test_each_hop_is_signed(internet: FakeInternet, proxy: Any, tmp_path: Path) -> None:
    path = tmp_path / "bot.pem"
    public = new_key(path).public
    site = internet.site("a.test").robots("").on("/x", redirect("/y")).page("/y")
    client = await proxy(identity={"key": str(path), "directory": "https://bot.example"})
    assert (await client.get("http://a.test/x", allow_redirects=True))[0] == 200
    assert site.paths == ["/robots.txt", "/x", "/y"]
    for one in site.requests:
        assert len(one.headers.getall("Signature")) == 1
        verify(as_sent(one), public)


# --- tunnels, with server.proxy_connect = "host"


class Echo(asyncio.Protocol):
    """A site that echoes what it receives."""

    def __init__(self, made: list[Echo]) -> None:
        made.append(self)
        self.gone = asyncio.Event()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)

    def connection_lost(self, error: Exception | None) -> None:
        self.gone.set()


@pytest.fixture
async def echo(internet: FakeInternet) -> AsyncIterator[tuple[list[Echo], str]]:
    """Yields the connections of an echoing site, and its authority."""
    made: list[Echo] = []
    address = internet.address()
    internet.dns("a.test", address)
    internet.dns("b.test", address)
    internet.dns("c.test", address)
    loop = asyncio.get_running_loop()
    async with await loop.create_server(lambda: Echo(made), address, 0) as server:
        yield made, str(server.sockets[0].getsockname()[1])
        for one in made:
            one.transport.abort()


WELCOME: dict[str, Any] = {
    "proxy_connect": "host",
    "host": [{"match": "*", "robots": "allow"}],
}


async def test_a_tunnel_carries_https_under_one_lease(internet: FakeInternet, proxy: Any) -> None:
    site = internet.site("a.test").page("/x", "hello").page("/y", "more")
    client = await proxy(**WELCOME)
    pacing = client.service.gate.stats
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(ssl=internet.client_ssl)
    ) as session:
        for path, text in (("/x", "hello"), ("/y", "more")):
            async with session.get(f"https://a.test{path}", proxy=client.base) as page:
                assert await page.text() == text
        assert pacing().pacing.in_flight == 1  # the end of a page inside a tunnel is hidden
        assert pacing().pacing.granted == 1
    await until(lambda: pacing().pacing.in_flight == 0)
    assert site.paths == ["/x", "/y"]
    assert {request.connection for request in site.requests} == {site.requests[0].connection}


async def test_octets_go_both_ways_until_one_side_ends(
    echo: tuple[list[Echo], str], proxy: Any
) -> None:
    made, port = echo
    client = await proxy(**WELCOME)
    head, reader, writer = await client.connect(f"a.test:{port}", early=b"early")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"chunked" not in head.lower()
    assert b"content-length" not in head.lower()
    assert await reader.readexactly(5) == b"early"
    writer.write(b"x" * 300_000)
    assert await reader.readexactly(300_000) == b"x" * 300_000
    writer.close()
    await made[0].gone.wait()
    _, reader, writer = await client.connect(f"a.test:{port}")
    made[1].transport.close()
    assert await reader.read() == b""
    writer.close()
    await until(lambda: client.service.gate.stats().pacing.in_flight == 0)


async def test_t17_a_tunnel_ends_with_the_token_that_opened_it(
    echo: tuple[list[Echo], str], proxy: Any
) -> None:
    made, port = echo
    one = Token(b"a" * 32, "olga", frozenset({Role.CRAWL}))
    new = Token(b"n" * 32, "olga", frozenset({Role.CRAWL}))
    client = await proxy(tokens=Tokens((one,)), **WELCOME)
    password = base64.b64encode(b":" + one.value).decode()
    reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
    host = f"a.test:{port}"
    head = f"CONNECT {host} HTTP/1.1\r\nHost: {host}\r\nProxy-Authorization: Basic {password}"
    writer.write(f"{head}\r\n\r\nearly".encode())
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
    assert await reader.readexactly(5) == b"early"
    client.service.apply_config(client.service.config, Tokens((new,)))
    with suppress(ConnectionError):
        assert await reader.read() == b""
    writer.close()
    await made[0].gone.wait()
    await until(lambda: client.service.gate.stats().pacing.in_flight == 0)


async def test_open_tunnels_are_limited_to_one_per_host_and_a_total(
    echo: tuple[list[Echo], str], proxy: Any
) -> None:
    """A tunnel that waits for its host is not open: it must not take the place of another's."""
    made, port = echo
    client = await proxy(proxy_tunnels=2, **WELCOME)
    _, _, first = await client.connect(f"a.test:{port}")
    waiting = asyncio.create_task(client.connect(f"a.test:{port}"))
    await until(lambda: client.service.gate.stats().pacing.waiting == 1)
    second, _, writer = await client.connect(f"b.test:{port}")
    assert second.startswith(b"HTTP/1.1 200 ")
    third, reader, _ = await client.connect(f"c.test:{port}")
    assert third.startswith(b"HTTP/1.1 503 ")
    await reader.readuntil(b"server.proxy_tunnels")
    assert len(made) == 2
    writer.close()
    first.close()
    assert (await waiting)[0].startswith(b"HTTP/1.1 200 ")
    assert len(made) == 3


@pytest.mark.parametrize(("coding", "status"), [("gzip, chunked", b"501"), ("Chunked", b"200")])
async def test_a_transfer_coding_that_the_proxy_does_not_know_is_refused(
    coding: str, status: bytes, internet: FakeInternet, proxy: Any
) -> None:
    """Its octets would reach the site as if they were the content itself."""
    site = internet.site("a.test").page("/x", "hello")
    client = await proxy()
    head = f"POST http://a.test/x HTTP/1.1\nHost: a.test\nTransfer-Encoding: {coding}"
    answer = await client.raw(head, b"0\r\n\r\n")
    assert answer.split()[1] == status
    assert site.paths == ["/robots.txt", "/x"][: 2 if status == b"200" else 0]


@pytest.mark.parametrize("late", [b"", b"late"])
async def test_an_idle_tunnel_is_closed_though_octets_arrive_at_the_same_time(
    echo: tuple[list[Echo], str],
    proxy: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    late: bytes,
) -> None:
    made, port = echo
    client = await proxy(proxy_idle=30.0, **WELCOME)
    _, reader, writer = await client.connect(f"a.test:{port}")
    writer.write(b"x" * 5)
    assert await reader.readexactly(5) == b"x" * 5
    writer.write(late)  # read in the same iteration of the loop in which the time is over
    loop = asyncio.get_running_loop()
    now = loop.time
    monkeypatch.setattr(loop, "time", lambda: now() + 31.0)
    assert await reader.read() in (b"", late)
    writer.close()
    await made[0].gone.wait()
    await until(lambda: client.service.gate.stats().pacing.in_flight == 0)
    assert [one.message for one in caplog.records if one.levelname == "ERROR"] == []


async def test_a_tunnel_that_carries_too_many_octets_is_closed(
    echo: tuple[list[Echo], str], proxy: Any
) -> None:
    made, port = echo
    client = await proxy(proxy_tunnel_bytes=1024, **WELCOME)
    _, reader, writer = await client.connect(f"a.test:{port}")
    writer.write(b"x" * 3000)
    assert len(await reader.read()) in range(1025)
    writer.close()
    await made[0].gone.wait()
    await until(lambda: client.service.gate.stats().pacing.in_flight == 0)


async def test_the_octets_of_a_tunnel_count_for_a_budget(
    echo: tuple[list[Echo], str], proxy: Any
) -> None:
    _, port = echo
    rule = {"match": "*", "robots": "allow", "max_bytes_per_day": 10}
    client = await proxy(**(WELCOME | {"host": [rule]}))
    _, reader, writer = await client.connect(f"a.test:{port}")
    writer.write(b"x" * 20)
    await reader.readexactly(20)
    writer.close()
    await until(lambda: client.service.gate.stats().pacing.in_flight == 0)
    head, reader, _ = await client.connect(f"a.test:{port}")
    assert head.startswith(b"HTTP/1.1 429 ")
    assert b'"budget"' in await reader.readuntil(b'budget"')


@pytest.mark.parametrize(
    ("authority", "status"),
    [
        ("denied.test:443", 403),
        ("unread.test:443", 429),  # its robots.txt is unreachable
        ("refusing.test:443", 502),
        ("10.1.2.3:443", 403),
        ("[::ffff:10.1.2.3]:443", 403),
        ("in.example:443", 403),
        ("a.test:25", 403),
        ("u:p@a.test:443", 400),
        ("a.test", 400),
        ("a.test:443/private", 400),
    ],
)
async def test_a_tunnel_is_decided_by_host_and_port_and_guarded(
    internet: FakeInternet, proxy: Any, authority: str, status: int
) -> None:
    internet.site("a.test")
    internet.refusing("refusing.test")
    unread = internet.site("unread.test", tls="wrong-name")
    internet.dns("in.example", "10.1.2.3")
    rules = [
        {"match": "denied.test", "robots": "deny"},
        *({"match": name, "robots": "allow"} for name in ("a.test", "refusing.test", "*.example")),
    ]
    client = await proxy(proxy_connect="host", host=rules)
    head, _, _ = await client.connect(authority)
    assert head.split()[1] == str(status).encode()
    assert unread.paths == []
    assert not internet.dialled("10.1.2.3")
    assert client.service.gate.stats().pacing.in_flight == 0


async def test_a_client_that_hangs_up_while_it_waits_frees_its_place(
    echo: tuple[list[Echo], str], proxy: Any
) -> None:
    _, port = echo
    client = await proxy(**WELCOME)
    _, _, first = await client.connect(f"a.test:{port}")
    second = asyncio.create_task(client.connect(f"a.test:{port}"))
    pacing = client.service.gate.stats
    await until(lambda: pacing().pacing.waiting == 1)
    second.cancel()
    await asyncio.wait([second])
    client.open[-1].close()
    await until(lambda: pacing().pacing.waiting == 0)
    first.close()
    await until(lambda: pacing().pacing.in_flight == 0 and pacing().pacing.waiting == 0)
