"""The system's name service, asked so that names which get no answer stand before nobody.

`getaddrinfo` holds a thread until the name service answers or gives up, which may take half a
minute, and the event loop's own threads are few (six on two cores) and have other work: one
list of dead names would stop every connection that needs a look-up, and the storage as well.
So look-ups have threads of their own, and those of names that were found before have some that
no stranger gets. Who waits for a thread is in nobody's time: see `watching`.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import Any, Final, cast

import aiohttp
import cachetools
from aiohttp.abc import AbstractResolver, ResolveResult

from gatekeeper.fetching.turns import Places
from gatekeeper.fetching.watching import watching

__all__ = ["SystemResolver", "system_resolver"]

_THREADS: Final = 64
_FOR_KNOWN: Final = 8
"""Threads kept for names that were found before."""
_KNOWN: Final = 20_000


def system_resolver() -> AbstractResolver:
    """aiohttp's own where it needs no threads (aiodns is installed), else ours.

    Needs a running loop, as every resolver does.
    """
    if aiohttp.DefaultResolver is aiohttp.ThreadedResolver:
        return SystemResolver()
    return aiohttp.DefaultResolver()


class _Threads:
    """What aiohttp's resolver asks of a loop, done by threads of our own."""

    def __init__(self, count: int, name: str) -> None:
        self.places = Places(count)
        self._executor: Executor = ThreadPoolExecutor(count, thread_name_prefix=name)
        self._loop = asyncio.get_running_loop()
        # It takes any loop, and asks nothing but these two of it.
        self.resolver = aiohttp.ThreadedResolver(cast("asyncio.AbstractEventLoop", self))

    async def getaddrinfo(self, host: str, port: int, **options: Any) -> Any:
        return await self._do(partial(socket.getaddrinfo, host, port, **options))

    async def getnameinfo(self, address: Any, flags: int = 0) -> Any:
        return await self._do(partial(socket.getnameinfo, address, flags))

    async def _do(self, work: Callable[[], Any]) -> Any:
        try:
            looking = self._loop.run_in_executor(self._executor, work)
        except RuntimeError as error:
            raise OSError(f"names are looked up no more: {error}") from error
        return await looking

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)


class SystemResolver(AbstractResolver):
    """`aiohttp.ThreadedResolver`, with threads of its own. Close it with its connector."""

    def __init__(self, *, threads: int = _THREADS, for_known: int = _FOR_KNOWN) -> None:
        self._strangers = _Threads(threads, "gatekeeper-names")
        self._familiar = _Threads(for_known, "gatekeeper-known-names")
        self._known: cachetools.LRUCache[str, None] = cachetools.LRUCache(_KNOWN)

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """The name's addresses. Raises OSError as the system does."""
        threads = self._strangers
        if host in self._known and self._familiar.places.free:
            threads = self._familiar
        await self._enter(threads.places)
        looking = asyncio.ensure_future(threads.resolver.resolve(host, port, family))
        # The thread is taken until the name service gives up, whoever has left meanwhile.
        looking.add_done_callback(partial(self._looked, threads.places, host))
        return await asyncio.shield(looking)

    @staticmethod
    async def _enter(places: Places) -> None:
        if places.take_nowait():
            return
        watch = watching.get()
        if watch is not None:
            watch.queued()
        await places.take()
        if watch is not None:
            watch.connecting()

    def _looked(self, places: Places, host: str, looking: asyncio.Future[Any]) -> None:
        places.give()
        if not looking.cancelled() and looking.exception() is None:
            self._known[host] = None
        else:
            self._known.pop(host, None)

    async def close(self) -> None:
        """Let the threads go; those that are at work end by themselves."""
        self._strangers.close()
        self._familiar.close()
