"""Where hosts live: the addresses whose clocks they share (`pacing.address_interval`).

A machine that bears many names feels the requests to all of them. So a host's addresses are
looked up before its first turn, robots.txt included, and a turn takes the clock of each: which
of them is dialled is the connector's affair, so the promise is kept to all. What is looked up
here and what the connector dials is one answer, remembered for as long as aiohttp would. That
holds for a look-up that failed, too: a turn that was had without the clock of an address must
not find an address when it dials. In a session of the caller's nobody can see to that, so there
all names that could not be looked up share one clock.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Iterable
from typing import Self

import cachetools
from aiohttp.abc import AbstractResolver, ResolveResult

from gatekeeper.clock import Clock, deadline
from gatekeeper.config import Config
from gatekeeper.errors import AddressRefused
from gatekeeper.fetching.guard import GuardedResolver
from gatekeeper.fetching.judging import Guard
from gatekeeper.fetching.resolving import system_resolver

__all__ = ["RememberingResolver", "Whereabouts"]

LASTING = 10.0
"""Seconds for which an answer is good: a host that moves is followed after that."""
_AGAIN = 1.0
"""Seconds after which a look-up that failed is tried again."""
_MOST = 20_000
"""Names remembered."""

_Key = tuple[str, int]

UNRESOLVED = "address:unresolved"
"""The clock of names without an address whose dial can't be held to that."""


class RememberingResolver(AbstractResolver):
    """Gives an answer again while it is good. `inner` None: the system's."""

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
                self._inner = system_resolver()
            answers = await self._inner.resolve(host, port, family)
            self._answers[key] = answers
        return answers

    async def close(self) -> None:
        """Release the inner resolver if it is ours."""
        self._answers.clear()
        if self._owned and self._inner is not None:
            inner, self._inner = self._inner, None
            await inner.close()


class HeldResolver(AbstractResolver):
    """For the connector: a name whose look-up before the turn failed can't be dialled either,
    until another one brings an answer.
    """

    def __init__(self, inner: AbstractResolver) -> None:
        self._inner = inner
        self._failed: cachetools.LRUCache[_Key, tuple[int, str]] = cachetools.LRUCache(_MOST)

    def fail(self, host: str, port: int, error: Exception) -> None:
        """The look-up before a turn failed: so does the dial of that turn, whenever it comes."""
        code = error.errno if isinstance(error, socket.gaierror) else None
        told = socket.EAI_AGAIN if code is None else code
        self._failed[host, port] = told, str(error) or type(error).__name__

    def let_go(self, host: str, port: int) -> None:
        """Another one brought an answer."""
        self._failed.pop((host, port), None)

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """What the inner resolver says. Raises gaierror for a name that is held."""
        failed = self._failed.get((host, port))
        if failed is not None:
            raise socket.gaierror(*failed)
        return await self._inner.resolve(host, port, family)

    async def close(self) -> None:
        """Release the inner resolver if that is its own."""
        self._failed.clear()
        await self._inner.close()


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
        """Without a `guard` nothing is vetted, and the connector is not ours; `patience`:
        seconds for one look-up.
        """
        self._clock = clock
        self._patience = patience
        answers = RememberingResolver(resolver, clock)
        self.resolver = HeldResolver(answers)
        """For the connectors: the answers that were looked up here are those they dial."""
        self._ours = guard is not None
        self._vetted: AbstractResolver = (
            answers if guard is None else GuardedResolver(guard, answers)
        )
        self._known: cachetools.TLRUCache[_Key, tuple[str, ...]] = cachetools.TLRUCache(
            _MOST,
            ttu=lambda _key, scopes, now: (
                now + (_AGAIN if not scopes or scopes == (UNRESOLVED,) else LASTING)
            ),
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

        None where the name can't be resolved: the connector is held to that, and says so. One
        for all such names where the connector is not ours.
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
            found = _scopes(answer["host"] for answer in answers)
        except AddressRefused:
            found = ()  # so will the dial be, by the guard
        except Exception as error:  # noqa: BLE001 - a resolver may raise anything
            if not self._ours:
                return (UNRESOLVED,)
            self.resolver.fail(host, port, error)
            return ()
        self.resolver.let_go(host, port)
        return found

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
