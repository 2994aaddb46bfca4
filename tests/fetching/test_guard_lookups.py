"""Names without an answer delay no other name, and waiting for a thread costs no network time."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest

from gatekeeper.clock import VirtualClock
from gatekeeper.config import Config, FetchConfig
from gatekeeper.fetching.guard import SystemResolver, system_resolver
from gatekeeper.fetching.outcomes import Outcome, Retrieval
from tests.fetching.conftest import fetcher_on

ANSWER = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 80))]


class NameService:
    """The system's resolver, whose look-ups of some names block until the end of the test."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.silent: set[str] = set()
        self.asked: list[str] = []
        self.step = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait in real time, as threads do not follow virtual time."""
        async with asyncio.timeout(20.0):
            while not condition():
                self.step.clear()
                await self.step.wait()

    def getaddrinfo(self, host: str, *_: Any, **__: Any) -> Any:
        self.asked.append(host)
        with contextlib.suppress(RuntimeError):  # the loop is closed after the test
            self._loop.call_soon_threadsafe(self.step.set)
        if host in self.silent:
            self.over.wait(60.0)
        if host.startswith(("gone", "silent")):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return ANSWER


@pytest.fixture
async def names(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[NameService]:
    service = NameService()
    monkeypatch.setattr(socket, "getaddrinfo", service.getaddrinfo)
    yield service
    service.over.set()


async def test_a_name_is_looked_up_and_one_that_is_not_there_says_so(names: NameService) -> None:
    resolver = SystemResolver()
    found = await resolver.resolve("up.test", 80)
    assert [one["host"] for one in found] == ["127.0.0.1"]
    with pytest.raises(socket.gaierror):
        await resolver.resolve("gone.test", 80)
    await resolver.close()
    with pytest.raises(OSError, match="the resolver is closed"):
        await resolver.resolve("up.test", 80)


async def test_look_ups_take_no_thread_of_the_loops_executor(names: NameService) -> None:
    names.silent = {f"silent{n}.test" for n in range(60)}
    resolver = SystemResolver()
    waiting = [asyncio.create_task(resolver.resolve(name, 80)) for name in sorted(names.silent)]
    await names.until(lambda: len(names.asked) == 60)
    assert await asyncio.wait_for(asyncio.to_thread(lambda: "done"), 60.0) == "done"
    names.over.set()
    await asyncio.gather(*waiting, return_exceptions=True)
    await resolver.close()


async def test_names_found_before_do_not_wait_for_silent_ones(
    names: NameService,
) -> None:
    names.silent = {f"silent{n}.test" for n in range(10)}
    resolver = SystemResolver(threads=2, reserved=1)
    await resolver.resolve("known.test", 80)
    waiting = [asyncio.create_task(resolver.resolve(name, 80)) for name in sorted(names.silent)]
    await names.until(lambda: len(names.asked) == 3)
    for _ in range(5):
        assert await asyncio.wait_for(resolver.resolve("known.test", 80), 60.0)
    stranger = asyncio.create_task(resolver.resolve("new.test", 80))
    await asyncio.sleep(0)
    assert not stranger.done()
    names.over.set()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert await stranger
    await resolver.close()


async def test_a_thread_counts_as_taken_until_the_name_service_is_done(names: NameService) -> None:
    names.silent = {"silent0.test"}
    resolver = SystemResolver(threads=1, reserved=1)
    gone = asyncio.create_task(resolver.resolve("silent0.test", 80))
    await names.until(lambda: names.asked)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    later = asyncio.create_task(resolver.resolve("up.test", 80))
    for _ in range(10):
        await asyncio.sleep(0)
    assert names.asked == ["silent0.test"]
    names.over.set()
    assert await asyncio.wait_for(later, 60.0)
    await resolver.close()


async def test_the_wait_for_a_look_up_thread_is_not_connect_time(names: NameService) -> None:
    # Otherwise a living site would be recorded as dead, and as evidence of a lost uplink.
    names.silent = {"silent0.test"}
    clock = VirtualClock()
    resolver = SystemResolver(threads=1, reserved=1)
    connector = aiohttp.TCPConnector(resolver=resolver)
    async with aiohttp.ClientSession(connector=connector) as session:
        fetcher = fetcher_on(session, clock, Config(fetch=FetchConfig(connect_timeout=10.0)))
        silent = asyncio.create_task(fetcher.fetch("http://silent0.test"))
        await names.until(lambda: names.asked)
        waiting = asyncio.create_task(fetcher.fetch("http://gone.test"))
        for _ in range(20):
            await asyncio.sleep(0)
        await clock.elapse(25.0)
        assert (await silent).outcome is Outcome.CONNECT_TIMEOUT
        assert not waiting.done()
        names.over.set()
        found: Retrieval = await asyncio.wait_for(waiting, 60.0)
        assert found.outcome is Outcome.DNS_NXDOMAIN
    await resolver.close()


async def test_the_resolver_of_aiohttp_is_used_where_it_needs_no_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = object()
    monkeypatch.setattr(aiohttp, "DefaultResolver", lambda: other)
    assert system_resolver() is other
