"""The last check, after connecting and TLS and right before a request is written: a grant whose
hold has expired, or that a block has revoked, is discarded, and nothing reaches the site."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import aiohttp
import pytest

from gatekeeper import Config, Gatekeeper
from gatekeeper.pacing.ledger import Report
from gatekeeper.session import guarded_connector
from tests.fleet.conftest import ShiftedClock
from tests.fleet.proxy import Proxy
from tests.internet.certs import client_context, server_context
from tests.pacing_support import CountingLedger

HOST = "127.0.0.1"


class SlowTLS:
    """A site behind a proxy that can delay a handshake: `wire.first`."""

    def __init__(self, clock: ShiftedClock) -> None:
        self.clock = clock
        self.requests: list[tuple[str, float]] = []

    async def open(self) -> None:
        context = server_context(HOST, "good")
        self._server = await asyncio.start_server(self.serve, HOST, 0, ssl=context)
        self.wire = Proxy(self._server.sockets[0].getsockname()[1])
        await self.wire.open()

    async def close(self) -> None:
        await self.wire.close()
        self._server.close()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while line := await reader.readline():
                self.requests.append((line.split()[1].decode(), self.clock.monotonic()))
                while (await reader.readline()).strip():
                    pass
                body = b"User-agent: *\nCrawl-delay: 0.1\n"
                writer.write(b"HTTP/1.1 200 x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        writer.close()

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.requests]


@pytest.fixture
def clock() -> ShiftedClock:
    return ShiftedClock()


@pytest.fixture
def ledger(clock: ShiftedClock) -> CountingLedger:
    return CountingLedger(clock)


@pytest.fixture
async def site(clock: ShiftedClock) -> AsyncIterator[tuple[SlowTLS, str]]:
    made = SlowTLS(clock)
    await made.open()
    yield made, f"https://{HOST}:{made.wire.port}"
    await made.close()


@pytest.fixture
async def session(
    clock: ShiftedClock, ledger: CountingLedger
) -> AsyncIterator[aiohttp.ClientSession]:
    config = Config.from_dict({"guard": {"allow": ["127.0.0.0/8"]}})
    connector = guarded_connector(config, ssl=client_context())
    plain = aiohttp.ClientSession(connector=connector, connector_owner=False)
    async with (
        plain,
        Gatekeeper("bot", config=config, session=plain, clock=clock, ledger=ledger) as gate,
        aiohttp.ClientSession(connector=connector, middlewares=(gate.middleware,)) as gated,
    ):
        yield gated


async def warm(
    session: aiohttp.ClientSession, site: SlowTLS, base: str, clock: ShiftedClock
) -> None:
    async with session.get(f"{base}/first") as response:
        await response.read()
    assert site.paths == ["/robots.txt", "/first"]
    site.wire.cut()  # so that the next request needs a new connection
    clock.by += 10.0


async def test_a_page_whose_grant_outlived_its_hold_takes_another_lease(
    session: aiohttp.ClientSession,
    site: tuple[SlowTLS, str],
    clock: ShiftedClock,
    ledger: CountingLedger,
) -> None:
    server, base = site
    await warm(session, server, base, clock)
    before = len(ledger.granted)
    seen: list[list[str]] = []

    async def stopped() -> None:
        clock.by += 25.0  # no timer runs meanwhile, so nothing is renewed
        seen.append(server.paths)

    server.wire.first.append(stopped)
    async with session.get(f"{base}/page") as response:
        assert response.status == 200
    assert seen == [["/robots.txt", "/first"]]
    assert server.paths == ["/robots.txt", "/first", "/page"]
    assert len(ledger.granted) == before + 2


async def test_a_page_whose_host_is_blocked_meanwhile_waits_for_the_end_of_the_block(
    session: aiohttp.ClientSession,
    site: tuple[SlowTLS, str],
    clock: ShiftedClock,
    ledger: CountingLedger,
) -> None:
    server, base = site
    await warm(session, server, base, clock)
    blocked: list[float] = []

    async def refused_elsewhere() -> None:
        blocked.append(clock.monotonic())
        await ledger.block([Report(HOST, 0.3, "429")])
        await asyncio.sleep(0)  # the notification comes in the next turn of the loop

    server.wire.first.append(refused_elsewhere)
    async with session.get(f"{base}/page") as response:
        assert response.status == 200
    assert server.paths == ["/robots.txt", "/first", "/page"]
    assert server.requests[-1][1] >= blocked[0] + 0.3


async def test_a_robots_txt_request_whose_grant_outlived_its_hold_takes_another_lease(
    session: aiohttp.ClientSession,
    site: tuple[SlowTLS, str],
    clock: ShiftedClock,
    ledger: CountingLedger,
) -> None:
    server, base = site

    async def stopped() -> None:
        clock.by += 25.0

    server.wire.first.append(stopped)
    async with session.get(f"{base}/page") as response:
        assert response.status == 200
    assert server.paths == ["/robots.txt", "/page"]
    assert len(ledger.granted) == 3  # one of them was discarded
