"""A program that runs out of file descriptors while it uses each of our pools of connections.

python -m tests.descriptors_program PORT: prints one JSON object. Its origins are 127.0.7.N:PORT.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import resource
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp
import httpx
import requests

from gatekeeper import Config, Gatekeeper, SyncGatekeeper, guarded_connector, polite_session
from gatekeeper.integrations.crawlee_http import PoliteHttpClient
from gatekeeper.integrations.httpx import PoliteTransport, SyncPoliteTransport
from gatekeeper.integrations.requests import PoliteAdapter

LIMIT, BEFORE, AFTER = 160, 40, 20
PORT = sys.argv[-1]
AGENT = "examplebot/1.0"
LOOSE: dict[str, Any] = {
    "guard": {"allow": ["127.0.0.0/8", "localhost"]},
    "pacing": {"default_interval": 0},
    "fetch": {"max_idle_connections": 1000},
}
"""Settings with idle connections that take every descriptor."""


def url(number: int) -> str:
    return f"http://127.0.7.{number}:{PORT}/page"


@contextmanager
def no_descriptor() -> Iterator[None]:
    """Open files until no more can be opened."""
    files: list[int] = []
    try:
        while True:
            files.append(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
    try:
        yield
    finally:
        for file in files:
            os.close(file)


async def crowded(get: Callable[[str], Awaitable[int]]) -> list[int]:
    """Return the statuses from new origins when idle connections and files take everything."""
    for number in range(1, BEFORE + 1):
        await get(url(number))
    with no_descriptor():
        return [await get(url(BEFORE + number)) for number in range(1, AFTER + 1)]


def crowded_sync(get: Callable[[str], int]) -> list[int]:
    """`crowded` for blocking code."""
    for number in range(1, BEFORE + 1):
        get(url(number))
    with no_descriptor():
        return [get(url(BEFORE + number)) for number in range(1, AFTER + 1)]


async def by_gate(config: Config) -> list[int]:
    async with Gatekeeper(AGENT, config=config) as gate:

        async def get(url: str) -> int:
            return 200 if await gate.allowed(url) else 0

        return await crowded(get)


async def by_session(config: Config) -> list[int]:
    async with polite_session(user_agent=AGENT, config=config) as session:
        return await crowded(lambda url: status(session, url))


async def by_connector(config: Config) -> list[int]:
    connector = guarded_connector(config)
    async with aiohttp.ClientSession(connector=connector) as session:
        return await crowded(lambda url: status(session, url))


async def status(session: aiohttp.ClientSession, url: str) -> int:
    async with session.get(url) as response:
        await response.read()
        return response.status


async def by_httpx(config: Config) -> list[int]:
    async with (
        Gatekeeper(AGENT, config=config) as gate,
        httpx.AsyncClient(transport=PoliteTransport(gate)) as client,
    ):

        async def get(url: str) -> int:
            return (await client.get(url)).status_code

        return await crowded(get)


async def by_crawlee(config: Config) -> list[int]:
    async with Gatekeeper(AGENT, config=config) as gate, PoliteHttpClient(gate) as client:

        async def get(url: str) -> int:
            return (await client.send_request(url)).status_code

        return await crowded(get)


def by_httpx_sync(config: Config) -> list[int]:
    with (
        SyncGatekeeper(AGENT, config=config) as gate,
        httpx.Client(transport=SyncPoliteTransport(gate)) as client,
    ):
        return crowded_sync(lambda url: client.get(url).status_code)


def by_requests(config: Config) -> list[int]:
    with SyncGatekeeper(AGENT, config=config) as gate, requests.Session() as session:
        session.mount("http://", PoliteAdapter(gate, pool_connections=1000))
        return crowded_sync(lambda url: session.get(url).status_code)


async def without_idle(config: Config) -> list[Any]:
    """Return decisions while nothing can be closed, and after that."""
    async with Gatekeeper(AGENT, config=config) as gate:
        with no_descriptor():
            short = await gate.check(url(1))
            by_name = await gate.check(f"http://localhost:{PORT}/page")
        await asyncio.sleep(max(0.0, short.retry_at.timestamp() - time.time() + 0.01))  # type: ignore[union-attr]
        return [
            (one.verdict, one.reason, one.note)
            for one in (short, by_name, await gate.check(url(1)))
        ]


async def bounded(config: Config) -> int:
    """Return the number of sockets after questions about all origins."""
    async with Gatekeeper(AGENT, config=config) as gate:
        await gate.check_all([url(number) for number in range(1, BEFORE + AFTER + 1)])
        files = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
        return sum(
            os.readlink(file).startswith("socket:") for file in files if os.path.islink(file)
        )


def main() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, hard))
    loose = Config.from_dict(LOOSE)
    tight = Config.from_dict({key: LOOSE[key] for key in ("guard", "pacing")})
    found: dict[str, Any] = {}
    for way in (by_gate, by_session, by_connector, by_httpx, by_crawlee):
        found[way.__name__] = asyncio.run(way(loose))
    for blocking in (by_httpx_sync, by_requests):
        found[blocking.__name__] = blocking(loose)
    found["without_idle"] = asyncio.run(without_idle(loose))
    found["bounded"] = asyncio.run(bounded(tight))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
