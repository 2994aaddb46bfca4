"""An origin that was never asked is dialled before a request is built, invisibly for one that
answers."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import aiohttp
import pytest

from gatekeeper import Gatekeeper, Reason, Verdict
from gatekeeper.config import Config, FetchConfig, GuardConfig, PacingConfig
from gatekeeper.fetching import guard as guarding
from tests.internet import Fail, FakeInternet

RULES = "User-agent: *\nDisallow: /private\n"


def gate_on(net: FakeInternet, *allow: str) -> Gatekeeper:
    config = Config(
        guard=GuardConfig(allow=allow or ("127.0.0.0/8", "*.test")),
        pacing=PacingConfig(default_interval=0.0),
        fetch=FetchConfig(tls_errors="accept"),
    )
    return Gatekeeper("testbot/1.0", config=config, clock=net.clock, resolver=net.resolver)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the hosts for which aiohttp built a request."""
    hosts: list[str] = []
    update = aiohttp.ClientRequest.update_host

    def noted(request: aiohttp.ClientRequest, url: aiohttp.client.URL) -> None:
        hosts.append(url.host or "")
        update(request, url)

    monkeypatch.setattr(aiohttp.ClientRequest, "update_host", noted)
    return hosts


@pytest.fixture
def sockets(monkeypatch: pytest.MonkeyPatch) -> list[socket.socket]:
    """Return the sockets that were created for a connection before a request."""
    opened: list[socket.socket] = []

    class Noted(guarding._Socket):
        __slots__ = ()

        def __init__(self, *args: int) -> None:
            super().__init__(*args)
            opened.append(self)

    monkeypatch.setattr(guarding, "_Socket", Noted)
    return opened


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_a_living_host_sees_one_connection_and_one_look_up(
    virtual_internet: FakeInternet, sockets: list[socket.socket], scheme: str
) -> None:
    net = virtual_internet
    net.site("a.test").robots(RULES)
    async with gate_on(net) as gate:
        decision = await net.drive(gate.check(f"{scheme}://a.test/private"))
    assert decision.verdict is Verdict.DENY
    assert decision.reason is Reason.RULE
    assert len(sockets) == 1
    assert len(net.connections) == 1
    assert len(net.requests) == 1
    assert [query.name for query in net.resolver.queries] == ["a.test"]


def test_a_connection_made_before_the_request_is_used_on_uvloop() -> None:
    uvloop = pytest.importorskip("uvloop")

    async def run() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            heads.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            writer.close()

        heads: list[bytes] = []
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        net = FakeInternet()
        net.dns("a.test", "127.0.0.1")
        port = server.sockets[0].getsockname()[1]
        async with server, gate_on(net) as gate:
            assert await gate.allowed(f"http://a.test:{port}/")
        assert len(heads) == 1

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


def refused(net: FakeInternet) -> None:
    net.refusing("a.test")


def unknown(net: FakeInternet) -> None:
    net.dns("a.test", Fail.NXDOMAIN)


def nameless(net: FakeInternet) -> None:
    net.dns("a.test", Fail.SERVFAIL)


def lost(net: FakeInternet) -> None:
    net.blackhole("a.test")


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize(
    ("dies", "reason"),
    [
        (refused, Reason.CONNECT_FAILED),
        (unknown, Reason.DNS_NXDOMAIN),
        (nameless, Reason.DNS_FAILURE),
        (lost, Reason.TIMEOUT),
    ],
)
async def test_a_dead_host_gets_no_request_and_the_usual_reason(
    virtual_internet: FakeInternet,
    built: list[str],
    sockets: list[socket.socket],
    dies: Callable[[FakeInternet], None],
    reason: Reason,
    ahead: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net = virtual_internet
    dies(net)
    if not ahead:
        monkeypatch.setattr(guarding, "start_connection", lambda: None)
    async with gate_on(net) as gate:
        decision = await net.drive(gate.check("http://a.test/"))
        assert decision.reason is reason
        assert len(net.resolver.queries) == 1
        assert built == ([] if ahead else ["a.test"])
        assert all(sock.fileno() == -1 for sock in sockets)


async def test_the_address_that_answers_is_used_where_others_of_the_name_do_not(
    virtual_internet: FakeInternet, sockets: list[socket.socket]
) -> None:
    net = virtual_internet
    net.site("a.test").robots(RULES)
    dead = net.refusing("dead.test")
    net.dns("a.test", [dead, "127.0.0.1"])
    async with gate_on(net) as gate:
        decision = await net.drive(gate.check("http://a.test/private"))
    assert decision.reason is Reason.RULE
    assert len(sockets) == 2
    assert len(net.connections) == 1


async def test_an_address_refused_by_the_guard_is_not_dialled(
    virtual_internet: FakeInternet, sockets: list[socket.socket]
) -> None:
    net = virtual_internet
    net.site("a.test").robots(RULES)
    async with gate_on(net, "10.0.0.0/8") as gate:
        decision = await net.drive(gate.check("http://a.test/private"))
    assert decision.reason is Reason.BLOCKED
    assert sockets == []
    assert net.connections == []


async def test_a_connection_that_no_request_takes_is_closed(
    virtual_internet: FakeInternet, sockets: list[socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    net = virtual_internet
    net.site("a.test").robots(RULES)

    async def fail(*_: object, **__: object) -> None:
        raise aiohttp.ClientConnectionError("no connection after all")

    monkeypatch.setattr(guarding, "_connect", fail)
    async with gate_on(net) as gate:
        decision = await net.drive(gate.check("http://a.test/"))
        assert decision.verdict is Verdict.DEFER
        assert [sock.fileno() for sock in sockets] == [-1]


async def test_a_host_that_answered_before_is_not_dialled_ahead(
    virtual_internet: FakeInternet, sockets: list[socket.socket]
) -> None:
    net = virtual_internet
    net.site("a.test").robots(RULES)
    async with gate_on(net) as gate:
        assert await net.drive(gate.allowed("http://a.test/"))
        await net.drive(gate.refresh("http://a.test/"))
    assert len(net.requests) == 2
    assert len(sockets) == 1
