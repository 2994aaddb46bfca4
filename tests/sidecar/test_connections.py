"""Connections of every listener: how many may be open, how long they may say nothing, and how they
end when the service stops."""

from __future__ import annotations

import asyncio
import socket
import ssl
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, closing, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import pytest

from gatekeeper.clock import SystemClock
from gatekeeper.sidecar import listening
from gatekeeper.sidecar import service as service_module
from gatekeeper.sidecar.listening import Acceptor, ConnectionLimits
from gatekeeper.sidecar.service import Service
from tests.internet import FakeInternet, Hold
from tests.internet.certs import client_context, issue_files
from tests.sidecar.conftest import as_served
from tests.waiting_support import until

LIMITS = ConnectionLimits(clients=16, backlog=64)
"""16 connections may be open; with a listener of health and metrics 12, and 4 to that."""


@dataclass
class Running:
    """The complete service in this process: a main listener, and perhaps another one."""

    service: Service
    place: Any
    """Address of the listener under test, or the path of its socket."""
    most: int
    """Connections that the listener may have open."""
    context: ssl.SSLContext | None
    """The client's, where the listener has TLS."""
    stack: AsyncExitStack

    async def stop(self) -> None:
        await self.stack.aclose()

    def connect(self) -> socket.socket:
        unix = isinstance(self.place, str)
        sock = socket.socket(socket.AF_UNIX if unix else socket.AF_INET)
        sock.settimeout(30)
        sock.connect(self.place)
        return sock


Run = Callable[..., Awaitable[Running]]


@pytest.fixture
async def run(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Run]:
    """`await run("unix tls", drain_grace=1.0, ...)`: the words are `unix`, `tls`,
    `diagnostics`, `workers`; the others are settings of [server]."""
    monkeypatch.setattr(listening, "raise_file_limit", lambda: LIMITS)
    async with AsyncExitStack() as cleanup:

        async def begin(words: str, **settings: Any) -> Running:
            folder = cleanup.enter_context(tempfile.TemporaryDirectory(prefix="gk"))
            given: dict[str, Any] = {}
            if "unix" in words:
                given["socket"] = f"{folder}/s"
            if "tls" in words:
                given |= dict(zip(("tls_cert", "tls_key"), issue_files(folder), strict=True))
            if "diagnostics" in words:
                given["diagnostics"] = "127.0.0.1:0"
            if "workers" in words:
                given["workers"] = 1
            stack = await cleanup.enter_async_context(AsyncExitStack())
            service, where = await stack.enter_async_context(as_served(**(given | settings)))
            place: Any = f"{folder}/s"
            if "unix" not in words:
                place = "127.0.0.1", int(where.rpartition(":")[2])
            most = LIMITS.clients
            if "diagnostics" in words:
                [place] = service.diagnostics
                most -= 12
            context = client_context() if "tls" in words else None
            return Running(service, place, most, context, stack)

        yield begin


LISTENERS = [
    *("tcp", "tls", "unix", "unix tls", "diagnostics", "diagnostics tls"),
    "workers",
]


async def ends(sock: socket.socket) -> bytes:
    """Return what comes before the connection is closed."""
    loop = asyncio.get_running_loop()
    sock.setblocking(False)
    got = b""
    try:
        while data := await loop.sock_recv(sock, 65_536):
            got += data
    except ConnectionError:
        pass
    return got


@pytest.mark.parametrize("words", LISTENERS)
async def test_t8_a_connection_counts_from_when_it_is_accepted(
    run: Run, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while its TLS is not set up, and before its first request."""
    monkeypatch.setattr(listening, "FIRST_REQUEST_SECONDS", 3600.0)
    running = await run(words)
    beginning = b"GET " if running.context is None else b"\x16\x03\x01\x02"
    further = 9
    async with AsyncExitStack() as stack, asyncio.timeout(60):
        crowd = []
        for _ in range(running.most + further):
            crowd.append(stack.enter_context(closing(running.connect())))
            crowd[-1].sendall(beginning)
        waiting = {asyncio.create_task(ends(one)) for one in crowd}
        told: list[bytes] = []
        while len(waiting) > running.most:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            told += [one.result() for one in done]
        # All that were accepted are counted, and none of those that are left is turned away.
        assert len(told) == further
        if running.context is None:
            assert all(one in (b"", listening.FULL_RESPONSE) for one in told)
            assert listening.FULL_RESPONSE in told
        else:
            assert set(told) == {b""}
        for one in crowd:
            one.close()
        for one in waiting:
            one.cancel()
        await asyncio.wait(waiting)
    await running.stop()


@pytest.mark.parametrize("words", [one for one in LISTENERS if one != "workers"])
async def test_t9_tls_and_the_first_request_come_in_time_or_the_connection_ends(
    run: Run, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that does not even answer the end of the connection keeps nothing open."""
    monkeypatch.setattr(listening, "FIRST_REQUEST_SECONDS", 0.2)
    running = await run(words)
    beginnings = [b"", b"GET "] if running.context is None else [b"", b"\x16\x03\x01\x02"]
    async with AsyncExitStack() as stack, asyncio.timeout(60):
        for beginning in beginnings:
            sock = stack.enter_context(closing(running.connect()))
            sock.sendall(beginning)
            assert await ends(sock) == b""
        if running.context is not None:  # its TLS is set up, and then it says nothing
            sock = stack.enter_context(closing(running.connect()))
            wrapped = await asyncio.to_thread(
                running.context.wrap_socket, sock, server_hostname="127.0.0.1"
            )
            stack.enter_context(closing(wrapped))
            raw = stack.enter_context(closing(socket.socket(fileno=wrapped.detach())))
            await ends(raw)
    await running.stop()


class BusyClient:
    """Sends request after request, on one connection as long as that is kept open."""

    def __init__(self, running: Running, target: str, version: bytes) -> None:
        self.running = running
        keep = b"Connection: keep-alive\r\n" if version == b"1.0" else b""
        line = b"GET %b HTTP/%b\r\nHost: 127.0.0.1:1\r\n" % (target.encode(), version)
        self.request = line + keep + b"\r\n"
        self.answers = 0
        self.kept_open = 0
        """Answers since `stopping`, after which the connection was to stay open."""
        self.stopping = False

    async def run(self) -> None:
        """Return when no connection is accepted any more; raise if a request has no answer."""
        running = self.running
        while True:
            options: dict[str, Any] = {}
            if running.context is not None:
                options = {"ssl": running.context, "server_hostname": "127.0.0.1"}
            try:
                if isinstance(running.place, str):
                    reader, writer = await asyncio.open_unix_connection(running.place, **options)
                else:
                    reader, writer = await asyncio.open_connection(*running.place, **options)
            except (ConnectionRefusedError, FileNotFoundError):
                return
            try:
                while await self.ask(reader, writer):
                    await asyncio.sleep(0)
            finally:
                writer.close()

    async def ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Send a request and read the answer. Return whether the connection stays open."""
        stopping = self.stopping
        writer.write(self.request)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.partition(b"content-length: ")[2].split()[0])
        await reader.readexactly(length)
        self.answers += 1
        if b"http/1.0" in self.request.lower():
            stays = b"connection: keep-alive" in head
        else:
            stays = b"connection: close" not in head
        self.kept_open += stopping and stays
        return stays


class GraceClock(SystemClock):
    """The system clock, but the grace of a stop ends when the test says so."""

    def __init__(self) -> None:
        self.over = asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        await self.over.wait()


@pytest.mark.parametrize("words", LISTENERS)
async def test_no_request_of_a_busy_client_is_lost_when_the_service_stops(
    run: Run, internet: FakeInternet, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RFC 9112 section 9.6: the last answer of a connection says that it is the last one."""
    monkeypatch.setattr(service_module, "NEW_SECONDS", 60.0)  # each new one brings a request
    internet.site("127.0.0.1").robots("")
    page = f"http://127.0.0.1:{internet.listener().port()}/"
    running = await run(words, drain_grace=60.0, allowed_hosts=("127.0.0.1:1",))
    running.service.clock = clock = GraceClock()
    # A probe, or a check that is answered inline.
    target = f"/v1/check?url={quote(page, safe='')}"
    if "diagnostics" in words:
        target = "/readyz"
    versions = [b"1.0", b"1.1"] if running.most == 4 else [b"1.0", b"1.1", b"1.1", b"1.1"]
    clients = [BusyClient(running, target, version) for version in versions]
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        for one in clients:
            group.create_task(one.run())
        await until(lambda: min(one.answers for one in clients) >= 5)
        stopped = group.create_task(running.stop())
        await until(lambda: running.service.phase != "serving")
        if "workers" in words:  # they answer until they have passed their connections back
            workers = running.service.workers
            assert workers is not None
            await until(lambda: not workers._workers)
        for one in clients:
            one.stopping, one.answers = True, 0
        await until(lambda: min(one.answers for one in clients) >= 2)
        clock.over.set()
        await stopped
    assert [one.kept_open for one in clients] == [0] * len(clients)


@pytest.mark.parametrize("grace", [0.0, 0.1])
async def test_requests_under_way_when_the_service_stops_are_answered(
    run: Run, internet: FakeInternet, grace: float
) -> None:
    """A question whose file has not come, and those that were sent behind it."""
    hold = Hold()
    internet.site("127.0.0.1").on("/robots.txt", hold)
    page = f"http://127.0.0.1:{internet.listener().port()}/"
    running = await run("tcp", drain_grace=grace)
    async with asyncio.timeout(60):
        reader, writer = await asyncio.open_connection(*running.place)
        host = f"127.0.0.1:{running.place[1]}"
        line = f"GET /v1/check?url={quote(page, safe='')} HTTP/1.1\r\nHost: {host}\r\n\r\n"
        writer.write(line.encode() * 3)
        await hold.waiting.acquire()
        stopped = asyncio.create_task(running.stop())
        with suppress(ConnectionRefusedError):
            while True:  # until the service listens no more
                (await asyncio.open_connection(*running.place))[1].close()
        assert not stopped.done()
        hold.release()
        text = await reader.read()
        writer.close()
        await stopped
    heads = [one.partition(b"\r\n\r\n")[0] for one in text.split(b"HTTP/1.1 ")[1:]]
    assert [one[:3] for one in heads] == [b"200"] * 3
    assert [b"Connection: close" in one for one in heads] == [False, False, True]


async def test_connections_that_wait_when_the_listener_closes_are_served() -> None:
    """Closing a listening socket resets the connections that were not accepted yet."""
    taken: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0), backlog=50) as sock:
        acceptor = Acceptor(sock, taken.append, backlog=50)
        await acceptor.start()
        clients = [socket.create_connection(sock.getsockname()) for _ in range(20)]
        await acceptor.stop()
    assert len(taken) == 20
    for one in (*clients, *taken):
        one.close()
