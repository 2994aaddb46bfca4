"""Where hosts live: the addresses whose clocks they share (`pacing.address_interval`).

A machine that bears many names feels the requests to all of them. So a host's addresses are
looked up before its first turn, robots.txt included, and a turn takes the clock of each: which
of them is dialled is the connector's affair, so the promise is kept to all. What is looked up
here and what the connector dials is one answer, remembered for as long as aiohttp would.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Iterable
from typing import Self

import aiohttp
import cachetools
from aiohttp.abc import AbstractResolver, ResolveResult

from gatekeeper.clock import Clock, deadline
from gatekeeper.config import Config
from gatekeeper.fetching.guard import GuardedResolver
from gatekeeper.fetching.judging import Guard

__all__ = ["RememberingResolver", "Whereabouts"]

LASTING = 10.0
"""Seconds for which an answer is good: a host that moves is followed after that."""
_AGAIN = 1.0
"""Seconds after which a look-up that failed is tried again."""
_MOST = 20_000
"""Names remembered."""

_Key = tuple[str, int]


class RememberingResolver(AbstractResolver):
    """Gives an answer again while it is good. `inner` None: aiohttp's default resolver."""

    def __init__(self, inner: AbstractResolver | None, clock: Clock) -> None:
        self._inner = inner
        self._owned = inner is None
        self._answers: cachetools.TTLCache[tuple[str, int, int], list[ResolveResult]] = (
            cachetools.TTLCache(_MOST, ttl=LASTING, timer=clock.monotonic)
        )

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """What the inner resolver says. A failure is not remembered."""
        key = (host, port, int(family))
        answers = self._answers.get(key)
        if answers is None:
            if self._inner is None:  # made here, for it needs a running loop
                self._inner = aiohttp.DefaultResolver()
            answers = await self._inner.resolve(host, port, family)
            self._answers[key] = answers
        return answers

    async def close(self) -> None:
        """Release the inner resolver if it is ours."""
        self._answers.clear()
        if self._owned and self._inner is not None:
            inner, self._inner = self._inner, None
            await inner.close()


class Whereabouts:
    """The scopes of hosts' addresses, such as "address:203.0.113.9"."""

    def __init__(
        self,
        clock: Clock,
        *,
        guard: Guard | None,
        resolver: AbstractResolver | None,
        patience: float,
    ) -> None:
        """Without a `guard` nothing is vetted; `patience`: seconds for one look-up."""
        self._clock = clock
        self._patience = patience
        self.resolver = RememberingResolver(resolver, clock)
        """For the connectors: the answers that were looked up here are those they dial."""
        self._vetted: AbstractResolver = (
            self.resolver if guard is None else GuardedResolver(guard, self.resolver)
        )
        self._known: cachetools.TLRUCache[_Key, tuple[str, ...]] = cachetools.TLRUCache(
            _MOST,
            ttu=lambda _key, scopes, now: now + (LASTING if scopes else _AGAIN),
            timer=clock.monotonic,
        )
        self._asking: dict[_Key, asyncio.Event] = {}

    @classmethod
    def of(
        cls, config: Config, clock: Clock, guard: Guard | None, resolver: AbstractResolver | None
    ) -> Self | None:
        """None where no clock belongs to an address: then nothing is looked up."""
        if config.pacing.address_interval is None:
            return None
        patience = config.fetch.connect_timeout
        return cls(clock, guard=guard, resolver=resolver, patience=patience)

    async def scopes(self, host: str, port: int) -> tuple[str, ...]:
        """One for each address of the host that may be dialled; never raises.

        None where the name can't be resolved: whoever fetches finds that out, and says so.
        """
        try:
            return _scopes((host,))  # a literal address is its own answer
        except ValueError:
            pass
        key = (host, port)
        while (known := self._known.get(key)) is None:
            if (asking := self._asking.get(key)) is not None:
                await asking.wait()
                continue  # the one who asked may have been cancelled: then another one asks
            done = self._asking[key] = asyncio.Event()
            try:
                known = self._known[key] = await self._look_up(host, port)
                break
            finally:
                del self._asking[key]
                done.set()
        return known

    async def _look_up(self, host: str, port: int) -> tuple[str, ...]:
        try:
            async with deadline(self._clock, self._patience):
                answers = await self._vetted.resolve(host, port)
            return _scopes(answer["host"] for answer in answers)
        except Exception:  # noqa: BLE001 - a resolver may raise anything; the fetch reports it
            return ()

    async def close(self) -> None:
        """Release the resolver if it is ours."""
        self._known.clear()
        await self.resolver.close()


def _scopes(addresses: Iterable[str]) -> tuple[str, ...]:
    """Sorted: answers come in any order, and name the same clocks. Raises ValueError."""
    names = set()
    for text in addresses:
        address = ipaddress.ip_address(text.partition("%")[0])
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        names.add(f"address:{address.compressed}")
    return tuple(sorted(names))
