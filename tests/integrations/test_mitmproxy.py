"""mitmproxy with our add-on: real clients, and what the conformance suite does not ask."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from gatekeeper import Gatekeeper
from gatekeeper.session import guarded_connector
from tests.conformance.ways import AGENT, settings
from tests.documents.blocks import SITE
from tests.integrations.browsers import CHROMIUM, browser
from tests.integrations.rigs import MITMPROXY_TESTS, Mitmproxy
from tests.internet import FakeInternet, Hold, Page, Stall, certs, free_port, html, redirect
from tests.waiting_support import until

if not MITMPROXY_TESTS:  # .ci/run has an environment for them
    pytest.skip("needs Python 3.12, mitmproxy and MITMPROXY_TESTS=1", allow_module_level=True)

WGET2 = shutil.which("wget2")
ROBOTS = "User-agent: *\nDisallow: /private\n"
Open = Callable[..., Awaitable[Mitmproxy]]


class Trusting(Mitmproxy):
    """A gate that fetches the robots.txt of the fake internet over TLS."""

    def _gate(self) -> Gatekeeper:
        net = self.internet
        connector = guarded_connector(self.config, resolver=net.resolver, ssl=net.client_ssl)
        self.session = aiohttp.ClientSession(connector=connector)
        return Gatekeeper(AGENT, config=self.config, session=self.session)

    async def close_gate(self) -> None:
        await super().close_gate()
        await self.session.close()


@pytest.fixture
async def rig_of(internet: FakeInternet) -> AsyncIterator[Open]:
    async with AsyncExitStack() as stack:

        async def begin(tables: dict[str, Any] | None = None, **options: Any) -> Mitmproxy:
            rig = Trusting(internet, settings(**tables or {}), None)
            rig.max_wait = options.pop("max_wait", rig.max_wait)
            rig.options = options  # type: ignore[misc]
            await rig.start()
            stack.push_async_callback(rig.stop)
            return rig

        internet.listener().port(tls=True)
        yield begin


async def ran(*command: str, **environ: str) -> str:
    """Run a client and return what it prints."""
    process = await asyncio.create_subprocess_exec(
        *command,
        env=os.environ | environ,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    printed, _ = await process.communicate()
    return printed.decode(errors="replace")


async def curl(rig: Mitmproxy, *options: str) -> str:
    proxy = ("--proxy", rig.address, "--cacert", rig.certificate)
    return await ran("curl", "-sS", "--max-time", "60", *proxy, *options)


async def connected(
    rig: Mitmproxy, head: str, body: bytes = b""
) -> tuple[bytes, asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a request as octets; return the head of the response, and the connection."""
    host, _, port = rig.address.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(head.replace("\n", "\r\n").encode() + b"\r\n\r\n" + body)
    try:
        return await reader.readuntil(b"\r\n\r\n"), reader, writer
    except BaseException:
        writer.close()
        raise


async def idle(rig: Mitmproxy) -> None:
    """Wait until no lease is open; the test's own timeout is the limit."""
    while await rig.in_flight():
        await asyncio.sleep(0)


# --- real clients


@pytest.mark.parametrize("version", ["--http1.1", "--http2"])
async def test_curl_is_decided_hop_by_hop_over_https(
    internet: FakeInternet, rig_of: Open, version: str
) -> None:
    site = internet.site("a.test").robots(ROBOTS).page("/x", "hello")
    site.on("/there", redirect("https://b.test/private")).on("/kept", redirect("/x"))
    other = internet.site("b.test").robots(ROBOTS)
    down = internet.site("down.test").robots(Page("", status=503))
    rig = await rig_of()
    told = await curl(rig, version, "-i", "https://a.test/x")
    assert "hello" in told
    assert "x-gatekeeper-verdict: allow" in told.lower()
    assert site.requests[-1].headers["User-Agent"] == AGENT  # not curl's default
    assert site.requests[-1].headers["Via"].endswith(" gatekeeper")
    told = await curl(rig, version, "-i", "https://a.test/private")
    assert " 403" in told.splitlines()[1] + told
    assert "x-gatekeeper-decision-id: " in told.lower()
    assert "line 2" in told  # in words
    assert '"line 2' not in told
    assert "hello" in await curl(rig, version, "-L", "https://a.test/kept")
    assert "denied" in await curl(rig, version, "-L", "https://a.test/there")
    told = (await curl(rig, version, "-i", "https://down.test/x")).lower()
    assert " 429" in told
    assert "retry-after: " in told
    assert "/private" not in site.paths
    assert other.paths == ["/robots.txt"]
    assert set(down.paths) == {"/robots.txt"}
    await idle(rig)


async def test_two_clients_keep_one_pace(internet: FakeInternet, rig_of: Open) -> None:
    site = internet.site("a.test").robots("User-agent: *\nCrawl-delay: 0.2\n").page("/", "x")
    rig = await rig_of()
    await asyncio.gather(*(curl(rig, "https://a.test/") for _ in range(3)))
    assert len(site.paths) == 4
    assert min(site.gaps()) >= 0.2


async def test_an_upload_is_passed_on(internet: FakeInternet, rig_of: Open, tmp_path: Path) -> None:
    site = internet.site("a.test").robots(ROBOTS).page("/x", "thanks")
    rig = await rig_of()
    big = tmp_path / "big"
    big.write_bytes(os.urandom(3_000_000))
    post = ("--data-binary", f"@{big}")
    assert "thanks" in await curl(rig, *post, "https://a.test/x")
    assert site.requests[-1].body == big.read_bytes()
    # What is refused is not kept, to be answered when it has come as a whole.
    told = await curl(rig, *post, "https://a.test/private")
    assert "curl: (" in told
    assert "denied" in await curl(rig, "--data", "small", "https://a.test/private")
    await idle(rig)


NODE = """
const http = require("http"), tls = require("tls");
const [proxy, host, path] = process.argv.slice(1);
const { hostname, port } = new URL(proxy);
http.request({ hostname, port, method: "CONNECT", path: host + ":443" })
  .on("connect", (_, socket) => {
    const secure = tls.connect({ socket, servername: host });
    const head = [`GET ${path} HTTP/1.1`, `Host: ${host}`, "Connection: close", "User-Agent: node"];
    secure.on("secureConnect", () => secure.write(head.join("\\r\\n") + "\\r\\n\\r\\n"));
    secure.on("data", (data) => process.stdout.write(data));
    secure.on("error", (error) => console.log(String(error)));
  }).end();
"""


async def test_node_gets_only_allowed_pages_over_https(
    internet: FakeInternet, rig_of: Open
) -> None:
    site = internet.site("a.test").robots(ROBOTS).page("/x", "hello")
    rig = await rig_of()
    node = ("node", "-e", NODE, "--", rig.address, "a.test")
    assert "hello" in await ran(*node, "/x", NODE_EXTRA_CA_CERTS=rig.certificate)
    assert site.requests[-1].headers["User-Agent"] == AGENT
    assert " 403 " in await ran(*node, "/private", NODE_EXTRA_CA_CERTS=rig.certificate)
    assert "certificate" in await ran(*node, "/x")  # no client trusts it by itself
    assert site.paths == ["/robots.txt", "/x"]


async def test_requests_gets_only_allowed_pages_over_https(
    internet: FakeInternet, rig_of: Open
) -> None:
    site = internet.site("a.test").robots(ROBOTS).page("/x", "hello")
    rig = await rig_of()
    program = (
        "import requests, sys\n"
        "for url in sys.argv[1:]:\n"
        "    answer = requests.get(url)\n"
        "    print(answer.status_code, answer.text)\n"
    )
    told = await ran(
        *(sys.executable, "-c", program, "https://a.test/x", "https://a.test/private"),
        HTTPS_PROXY=rig.address,
        REQUESTS_CA_BUNDLE=rig.certificate,
    )
    assert "200 hello" in told
    assert "403 {" in told
    assert site.requests[-1].headers["User-Agent"] == AGENT


@pytest.mark.skipif(WGET2 is None, reason="needs Debian's wget2")
async def test_wget2_gets_pages_over_http_and_https(internet: FakeInternet, rig_of: Open) -> None:
    site = internet.site("a.test").robots(ROBOTS).page("/x", "hello")
    rig = await rig_of()
    quiet = ("-q", "-O", "-", f"--ca-certificate={rig.certificate}")
    proxy = (f"--https-proxy={rig.address}", f"--http-proxy={rig.address}")
    for scheme in ("http", "https"):
        assert "hello" in await ran(str(WGET2), *quiet, *proxy, f"{scheme}://a.test/x")
    assert site.paths.count("/x") == 2


# --- browsers


@pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium")
async def test_chromium_trusts_the_proxy_by_its_switch_alone(
    internet: FakeInternet, rig_of: Open, tmp_path: Path
) -> None:
    from gatekeeper.integrations.mitmproxy import key_hash

    internet.site("a.test").robots(ROBOTS).on("/x", html("<p>hello</p>"))
    rig = await rig_of()
    authority = rig.master.addons.get("tlsconfig").certstore.default_ca
    switches = (
        f"--proxy-server={rig.address}",
        f"--ignore-certificate-errors-spki-list={key_hash(authority)}",
        f"--user-data-dir={tmp_path}",
    )
    headless = (str(CHROMIUM), "--headless", "--no-sandbox", "--dump-dom")
    assert "<p>hello</p>" in await ran(*headless, *switches, "https://a.test/x")
    assert "hello" not in await ran(*headless, *switches[::2], "https://a.test/x")


@pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium")
async def test_a_browser_of_playwright_is_decided_hop_by_hop(
    internet: FakeInternet, rig_of: Open
) -> None:
    page = (
        '<link rel=icon href="data:,"><img src="/1.png"><img src="/2.png"><img src="/private.png">'
    )
    site = internet.site("a.test").robots(ROBOTS)
    site.on("/page", html(page)).page("/1.png").page("/2.png")
    moved = internet.site("b.test").robots(ROBOTS)
    moved.on("/old", redirect("/private")).on("/kept", redirect("/new")).page("/new", "there")
    rig = await rig_of(subresources=True)
    async with browser(proxy={"server": rig.address}) as opened:
        context = await opened.new_context(ignore_https_errors=True)
        tab = await context.new_page()
        for scheme in ("https", "http"):
            answer = await tab.goto(f"{scheme}://b.test/old")
            assert answer.status == 403  # the hop, which no route sees
            answer = await tab.goto(f"{scheme}://b.test/kept")
            assert (answer.status, await answer.text()) == (200, "there")
        for scheme in ("https", "http"):  # images take no lease, but they are decided
            before = rig.gate.stats().pacing.granted
            answer = await tab.goto(f"{scheme}://a.test/page", wait_until="networkidle")
            assert answer.status == 200
            stats = rig.gate.stats().pacing
            assert stats.granted - before == 2  # the page, and robots.txt
        assert await tab.evaluate("navigator.userAgent") != AGENT
    assert sorted(site.paths) == sorted(["/1.png", "/2.png", "/page", "/robots.txt"] * 2)
    assert {request.headers["User-Agent"] for request in site.requests} == {AGENT}
    assert "/private" not in moved.paths
    await idle(rig)


CRAWL4AI = """
import asyncio, sys
from crawl4ai import AsyncWebCrawler, BrowserConfig, CacheMode, CrawlerRunConfig

async def main():
    once = CrawlerRunConfig(cache_mode=CacheMode.BYPASS, verbose=False)
    async with AsyncWebCrawler(config=BrowserConfig(cdp_url=sys.argv[1], verbose=False)) as crawler:
        for url in sys.argv[2:]:
            found = await crawler.arun(url, config=once)
            print(found.status_code, found.html or found.error_message)

asyncio.run(main())
"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium")
@pytest.mark.skipif(importlib.util.find_spec("crawl4ai") is None, reason="needs crawl4ai")
async def test_crawl4ai_gets_no_denied_page(
    internet: FakeInternet, rig_of: Open, tmp_path: Path
) -> None:
    site = internet.site("a.test").robots(ROBOTS).on("/x", html("<p>hello to everybody</p>"))
    site.on("/old", redirect("/private"))
    rig = await rig_of(subresources=True)
    port = free_port()
    switches = (f"--remote-debugging-port={port}", "--ignore-certificate-errors")
    async with browser(proxy={"server": rig.address}, args=switches):
        urls = [f"https://a.test/{path}" for path in ("x", "old")]
        command = (sys.executable, "-c", CRAWL4AI, f"http://127.0.0.1:{port}")
        told = await ran(*command, *urls, HOME=str(tmp_path))
    assert "hello to everybody" in told
    assert "/private" not in site.paths
    assert "/old" in site.paths
    assert {request.headers["User-Agent"] for request in site.requests} == {AGENT}


# --- leases


async def test_a_client_that_hangs_up_ends_its_lease(internet: FakeInternet, rig_of: Open) -> None:
    hold = Hold(Page("late"))
    internet.site("a.test").robots("").on("/body", Stall("x" * 100)).on("/head", hold)
    internet.site("b.test").robots("User-agent: *\nCrawl-delay: 900\n").page("/")
    rig = await rig_of(max_wait=1_000.0)
    for path in ("/body", "/head"):
        asked = asyncio.create_task(rig.begin(f"http://a.test{path}"))
        if path == "/head":
            await hold.waiting.acquire()
            asked.cancel()
        else:
            (await asked).close()
        await asyncio.wait([asked])
        await idle(rig)
    hold.release()
    waiting = asyncio.create_task(rig.get("http://b.test/"))
    stats = rig.gate.stats
    await until(lambda: stats().pacing.waiting == 1)
    waiting.cancel()
    await until(lambda: stats().pacing.waiting == 0)


async def test_a_body_is_passed_on_as_it_comes(internet: FakeInternet, rig_of: Open) -> None:
    internet.site("a.test").robots("").on("/x", Stall("x" * 100)).page("/y", "second")
    rig = await rig_of(max_wait=0.2)
    response = await rig.begin("https://a.test/x")
    assert await response.content.readexactly(100) == b"x" * 100
    assert await rig.in_flight() == 1  # until the body is over
    late = await rig.client.get("https://a.test/y")
    assert late.status == 429
    response.close()
    await idle(rig)
    assert (await rig.get("https://a.test/y")).text == "second"


async def test_requests_of_one_host_are_bounded(
    internet: FakeInternet, rig_of: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gatekeeper.integrations.mitmproxy.MOST_OF_HOST", 2)
    for name in ("a.test", "b.test"):
        internet.site(name).robots("").on("/x", Stall("x" * 100)).page("/y")
    rig = await rig_of(max_wait=60.0)
    first = await rig.begin("http://a.test/x")
    waiting = asyncio.create_task(rig.get("http://a.test/y"))
    await until(lambda: rig.gate.stats().pacing.waiting == 1)
    assert (await rig.client.get("http://a.test/y")).status == 503
    assert (await rig.get("http://b.test/y")).status == 200
    first.close()
    assert (await waiting).status == 200


async def test_a_budget_of_bytes_counts_what_came(internet: FakeInternet, rig_of: Open) -> None:
    internet.site("a.test").robots("").page("/1", "x" * 1_000)
    rig = await rig_of({"host": [{"match": "a.test", "max_bytes_per_day": 1_500}]})
    answers = [await rig.client.get("https://a.test/1") for _ in range(3)]
    assert [answer.status for answer in answers] == [200, 200, 429]


# --- what else a client may send


async def test_only_what_was_decided_is_dialled(internet: FakeInternet, rig_of: Open) -> None:
    internet.site("a.test").robots("")
    rig = await rig_of()
    before = len(internet.connections)
    _, reader, writer = await connected(rig, "CONNECT a.test:443 HTTP/1.1\nHost: a.test:443")
    writer.write(b"SSH-2.0-OpenSSH_9.2\r\n\x00\x01\x02")
    assert await reader.read() == b""
    writer.close()
    assert len(internet.connections) == before


async def test_the_proxy_does_not_ask_itself(internet: FakeInternet, rig_of: Open) -> None:
    """T3: 127.0.0.0/8 is allowed here, and its own listener is not."""
    rig = await rig_of({"host": [{"match": "*", "robots": "allow"}]})
    told = await curl(rig, "-i", f"{rig.address}/")
    assert "403" in told
    assert "blocked" in told


async def test_a_request_whose_decision_fails_is_not_sent(
    internet: FakeInternet, rig_of: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = internet.site("a.test").robots("").page("/")
    rig = await rig_of()
    assert (await rig.get("http://a.test/")).status == 200  # its connection is kept

    def broken(*_: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(rig.proxy._names, "refuse_url", broken)
    with pytest.raises(aiohttp.ClientError):
        await rig.get("http://a.test/")
    assert site.paths == ["/robots.txt", "/"]
    rig.proxy._gate = None
    answer = await rig.client.get("http://a.test/")
    assert answer.status == 503


async def test_a_request_for_two_hosts_is_refused(internet: FakeInternet, rig_of: Open) -> None:
    site = internet.site("a.test").robots("").page("/")
    internet.site("b.test").robots("User-agent: *\nDisallow: /\n")
    rig = await rig_of()
    told = await curl(rig, "-i", "-H", "Host: b.test", "https://a.test/")
    assert "421" in told
    assert "b.test" in told
    assert "/" not in site.paths
    # A whole URL counts more than a Host (RFC 9112 section 3.2.2).
    told, _, writer = await connected(rig, "GET http://a.test/ HTTP/1.1\nHost: x\nHost: b.test")
    writer.close()
    assert b" 200 " in told
    assert site.requests[-1].headers["Host"] == "a.test"


def test_an_authority_and_a_host_of_http2_agree() -> None:
    """mitmproxy sends the Host to a site that speaks HTTP/1, and :authority to others."""
    from mitmproxy.http import Request

    from gatekeeper.integrations import mitmproxy as module

    request = Request.make("GET", "https://a.test/")
    request.http_version, request.authority = "HTTP/2.0", "a.test"
    request.headers["Host"] = "b.test"
    with pytest.raises(module._NotPassedOn):
        module._check(request, "https://a.test/")
    request.headers["Host"] = "A.test:443"
    module._check(request, "https://a.test/")


async def test_an_unknown_transfer_coding_is_not_passed_on(
    internet: FakeInternet, rig_of: Open
) -> None:
    """RFC 9112 section 6.1: 501."""
    site = internet.site("a.test").robots("").page("/")
    rig = await rig_of()
    for coding in ("gzip, chunked", "gzip,chunked", "compress, chunked"):
        head = f"POST http://a.test/ HTTP/1.1\nHost: a.test\nTransfer-Encoding: {coding}"
        told, _, writer = await connected(rig, head, b"1\r\nx\r\n0\r\n\r\n")
        assert b" 501 " in told
        writer.close()
    assert site.paths in ([], ["/robots.txt"])


async def test_secrets_for_the_proxy_are_not_passed_on(
    internet: FakeInternet, rig_of: Open
) -> None:
    answer = Page("x", headers={"X-Gatekeeper-Verdict": "deny", "X-Gatekeeper-Line": "7"})
    site = internet.site("a.test").robots("").on("/", answer)
    rig = await rig_of()
    told = await curl(
        rig, "-i", "-H", "Proxy-Authorization: Basic c2VjcmV0", "-H", "Proxy-X: 1", "http://a.test/"
    )
    assert not [name for name in site.requests[-1].headers if name.lower().startswith("proxy-")]
    assert "x-gatekeeper-verdict: allow" in told.lower()  # the gate's word, not the site's
    assert "x-gatekeeper-line" not in told.lower()


async def test_the_next_address_is_dialled_if_one_refuses(
    internet: FakeInternet, rig_of: Open
) -> None:
    address = internet.address()
    site = internet.site("a.test", address=address).robots("").page("/", "hello")
    rig = await rig_of()
    await rig.ask("check", "http://a.test/")
    internet.dns("a.test", [internet.address(), address])  # on the first one nothing listens
    assert (await rig.get("http://a.test/")).text == "hello"
    assert (await rig.get("http://a.test/")).text == "hello"
    assert len({request.connection for request in site.requests[1:]}) == 1  # it is kept


async def test_a_web_socket_is_decided_and_passed(internet: FakeInternet, rig_of: Open) -> None:
    async def echo(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for message in socket:
            await socket.send_str(message.data)
        return socket

    async def robots(_: web.Request) -> web.Response:
        return web.Response(text=ROBOTS)

    app = web.Application()
    app.router.add_get("/robots.txt", robots)
    app.router.add_get("/{any}", echo)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    base = f"http://127.0.0.1:{runner.addresses[0][1]}"
    rig = await rig_of()
    try:
        async with rig.client.ws_connect(f"{base}/x", proxy=rig.address) as socket:
            await idle(rig)  # the handshake alone needs a lease
            for number in range(20):
                await socket.send_str(str(number))
                assert await socket.receive_str() == str(number)
        with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
            await rig.client.ws_connect(f"{base}/private", proxy=rig.address)
        assert caught.value.status == 403
    finally:
        await runner.cleanup()


# --- TLS that is not opened


async def test_a_tunnel_is_decided_by_the_front_page(internet: FakeInternet, rig_of: Open) -> None:
    site = internet.site("pinned.test").robots("").on("/x", Stall("x" * 100)).page("/y", "inside")
    internet.site("denied.test").robots("User-agent: *\nDisallow: /\n")
    internet.site("c.test").robots("").page("/", "free")
    rig = await rig_of(passthrough=["pinned.test", "*.test"], max_wait=20.0)
    trusted = str(Path(rig.certificate).with_name("sites.pem"))  # the site's own certificate
    inside = ("--cacert", trusted)
    assert await curl(rig, *inside, "https://pinned.test/y") == "inside"
    assert "(56)" in (await curl(rig, *inside, "https://denied.test/y"))
    assert "curl" in await curl(rig, "https://pinned.test/y")  # by mitmproxy's it is another's
    assert "/y" in site.paths
    await idle(rig)


async def test_tunnels_that_wait_hold_up_no_other_host(
    internet: FakeInternet, rig_of: Open
) -> None:
    for name in ("a.test", "b.test"):
        internet.site(name).robots("").page("/")
    rig = await rig_of(passthrough=["a.test", "b.test"], max_wait=60.0)
    head = "CONNECT {0}:443 HTTP/1.1\nHost: {0}:443"
    first = await connected(rig, head.format("a.test"))
    # Its slot is taken as soon as mitmproxy dials, at the first octets of TLS.
    others = [asyncio.create_task(connected(rig, head.format("a.test"))) for _ in range(100)]
    await until(lambda: rig.gate.stats().pacing.waiting == 100)
    other = await connected(rig, head.format("b.test"))
    assert b" 200 " in other[0]
    for _, _, writer in (first, other):
        writer.close()
    for task in others:
        task.cancel()
    await asyncio.wait(others)


# --- the command, and the file for mitmdump


@asynccontextmanager
async def process(
    internet: FakeInternet, folder: Path, *command: str, **more: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that resolves the names of the fake internet."""
    (folder / "sitecustomize.py").write_text(SITE, "utf-8")
    authority = folder / "sites.pem"
    certs.authority().cert_pem.write_to_path(str(authority))
    ports = {"80": internet.port_of("127.0.0.1", 80), "443": internet.port_of("127.0.0.1", 443)}
    environ = {
        **os.environ,
        "HOME": str(folder),
        "PYTHONPATH": f"{folder}:{Path(__file__).parents[2]}",
        "FAKE_PORTS": json.dumps(ports),
        "FAKE_NAMES": json.dumps(list(internet.sites)),
        "GATEKEEPER_FETCH_CA_FILE": str(authority),
        **more,
    }
    started = await asyncio.create_subprocess_exec(
        *command, env=environ, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        yield started
    finally:
        if started.returncode is None:
            started.send_signal(signal.SIGTERM)
        await started.communicate()


async def test_the_command_says_how_clients_take_it(internet: FakeInternet, tmp_path: Path) -> None:
    site = internet.site("a.test").robots(ROBOTS).page("/x", "hello")
    options = ("--user-agent", AGENT, "--listen", "127.0.0.1:0", "--allow-address", "127.0.0.0/8")
    command = (sys.executable, "-m", "gatekeeper", "proxy", *options)
    async with process(internet, tmp_path, *command) as proxy:
        assert proxy.stdout is not None
        lines = [(await proxy.stdout.readline()).decode().strip() for _ in range(7)]
        assert lines[0].startswith(
            "gatekeeper: a proxy for any client listens on http://127.0.0.1:"
        )
        words = lines[2].split()  # curl, to the letter
        assert words[0] == "curl"
        assert "hello" in await ran(*words[:-1], "-sS", "https://a.test/x")
        assert '"denied' not in await ran(*words[:-1], "-sS", "https://a.test/x")
        assert "line 2" in await ran(*words[:-1], "-sS", "https://a.test/private")
        for client in ("NODE_EXTRA_CA_CERTS", "REQUESTS_CA_BUNDLE", "spki-list", "ignore_https"):
            assert any(client in line for line in lines)
        proxy.send_signal(signal.SIGTERM)
        assert await proxy.wait() == 0
    assert site.paths == ["/robots.txt", "/x", "/x"]


async def test_mitmdump_runs_the_script_that_the_command_names(
    internet: FakeInternet, tmp_path: Path
) -> None:
    site = internet.site("a.test").robots(ROBOTS).page("/x", "hello")
    (tmp_path / "gatekeeper.toml").write_text(
        f'user_agent = "{AGENT}"\n[guard]\nallow = ["127.0.0.0/8"]\n', "utf-8"
    )
    script = (await ran(sys.executable, "-m", "gatekeeper", "proxy", "--script")).strip()
    mitmdump = str(Path(sys.executable).with_name("mitmdump"))
    port = free_port()
    options = ("--listen-host", "127.0.0.1", "--listen-port", str(port))
    options = (*options, "--set", f"gatekeeper_config={tmp_path / 'gatekeeper.toml'}")
    options = (*options, "--set", f"ssl_verify_upstream_trusted_ca={tmp_path / 'sites.pem'}")
    trust = {"SSL_CERT_FILE": str(tmp_path / "sites.pem")}
    async with process(internet, tmp_path, mitmdump, "-s", script, *options, **trust) as proxy:
        assert proxy.stdout is not None
        while b"listening" not in (line := await proxy.stdout.readline()):
            assert line
        certificate = tmp_path / ".mitmproxy" / "mitmproxy-ca-cert.pem"
        client = ("curl", "-sS", "--proxy", f"http://127.0.0.1:{port}", "--cacert", certificate)
        assert "hello" in await ran(*map(str, client), "https://a.test/x")
        assert "line 2" in await ran(*map(str, client), "https://a.test/private")
    assert site.paths == ["/robots.txt", "/x"]
