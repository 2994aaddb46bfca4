"""Connections of every listener: how many may be open, how long they may say nothing, and how they
end when the service stops."""

from __future__ import annotations

import asyncio
import socket
import ssl
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass
from typing import Any

import pytest

from gatekeeper.config import Config, GuardConfig, PacingConfig, ServerConfig, StorageConfig
from gatekeeper.sidecar import listening, process
from gatekeeper.sidecar.listening import ConnectionLimits
from gatekeeper.sidecar.service import Service

LIMITS = ConnectionLimits(clients=16, backlog=64)
"""Without a forward proxy 16 connections may be open; with one 12, and 4 to the proxy."""


@dataclass
class Running:
    """The complete service in this process: a main listener, and perhaps a proxy's."""

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


@pytest.fixture(scope="module")
def certificate() -> Iterator[tuple[str, str, ssl.SSLContext]]:
    """Files with a certificate and its key, and a client's context that accepts it."""
    import trustme

    authority = trustme.CA()
    ours = authority.issue_cert("127.0.0.1", "localhost")
    context = ssl.create_default_context()
    authority.configure_trust(context)
    with tempfile.TemporaryDirectory(prefix="gk") as folder:
        paths = f"{folder}/crt", f"{folder}/key"
        ours.cert_chain_pems[0].write_to_path(paths[0])
        ours.private_key_pem.write_to_path(paths[1])
        yield (*paths, context)


@pytest.fixture
async def run(
    certificate: tuple[str, str, ssl.SSLContext], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Run]:
    """`await run("unix tls", drain_grace=1.0, ...)`: the words are `unix`, `tls`, `proxy`,
    `workers`; the others are settings of [server]."""
    monkeypatch.setattr(process, "raise_file_limit", lambda: LIMITS)
    async with AsyncExitStack() as cleanup:

        async def begin(words: str, **settings: Any) -> Running:
            folder = cleanup.enter_context(tempfile.TemporaryDirectory(prefix="gk"))
            given: dict[str, Any] = {"port": 0, "log_decisions": "none", "drain_grace": 0.0}
            if "unix" in words:
                given["socket"] = f"{folder}/s"
            if "tls" in words:
                given |= {"tls_cert": certificate[0], "tls_key": certificate[1]}
            if "proxy" in words:
                given["proxy_port"] = 0
            if "workers" in words:
                given["workers"] = 2
            config = Config(
                guard=GuardConfig(allow=("127.0.0.0/8",)),
                pacing=PacingConfig(default_interval=0.0),
                storage=StorageConfig(path="memory"),
                server=ServerConfig(**(given | settings)),
            )
            heard: list[str] = []
            options = process.ServeOptions(
                identity="testbot/1.0",
                config=config,
                reread=lambda: config,
                announce=lambda where, _curl, proxy: heard.append(proxy or where),
            )
            stack = await cleanup.enter_async_context(AsyncExitStack())
            service = await stack.enter_async_context(process.running(options))
            if (workers := service.workers) is not None:
                await workers._until(lambda: len(workers._accepting()) == 2)
            where, _, port = heard[0].rpartition(":")
            place = where.removeprefix("unix:") if "unix" in words else ("127.0.0.1", int(port))
            if "unix" in words:
                place = f"{folder}/s"
            most = LIMITS.clients - (0 if "proxy" not in words else 12)
            context = certificate[2] if "tls" in words else None
            return Running(service, place, most, context, stack)

        yield begin


LISTENERS = ["tcp", "tls", "unix", "unix tls", "proxy", "proxy tls", "workers"]


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
async def test_t8_a_connection_counts_from_the_moment_at_which_it_is_accepted(
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
            assert all(one in (b"", listening._FULL_RESPONSE) for one in told)
            assert listening._FULL_RESPONSE in told
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
