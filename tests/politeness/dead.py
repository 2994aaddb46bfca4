"""Hosts that are dead, each kind in its own way, and a network that lets some dials vanish."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp.connector

from gatekeeper.clock import VirtualClock, deadline
from gatekeeper.fetching import guard
from tests.internet import Fail, FakeInternet, Page

__all__ = ["KINDS", "Dials", "dead_hosts", "dying_hosts"]

KINDS = ("refused", "nxdomain", "silent", "reset", "servfail", "dns silent")
_VANISHES = "127.99."
"""Dials to addresses that begin so are lost, as a kernel's SYNs are: nothing comes back."""
_DIES = "127.98."
"""The first dial to each such address finds the server at 127.0.0.1, and the others are lost."""


class Dials:
    """Every dial goes through here. `cut` says how all of them fail; None: as they would."""

    def __init__(self, clock: VirtualClock, connect: Callable[..., Any]) -> None:
        self.clock = clock
        self._connect = connect
        self.cut: str | None = None
        self.lost_at = self.back_at = 0.0
        self.port = 0
        """Of the server that hosts answer from before they die."""
        self._dead: set[str] = set()
        self._mended = asyncio.Event()

    @classmethod
    @contextmanager
    def caught(cls, clock: VirtualClock) -> Iterator[Dials]:
        """Have all dials of aiohttp go through it, for the block."""
        eyeballs = aiohttp.connector.aiohappyeyeballs
        connect = eyeballs.start_connection
        dials = cls(clock, connect)
        eyeballs.start_connection = dials._dial
        try:
            yield dials
        finally:
            eyeballs.start_connection = connect

    def lose(self, how: str) -> None:
        """From now on: "no route" or "silent"."""
        self.cut, self.lost_at = how, self.clock.monotonic()
        self._mended.clear()

    def mend(self) -> None:
        """The uplink is back; what was dialled meanwhile gets through."""
        self.cut, self.back_at = None, self.clock.monotonic()
        self._mended.set()

    async def _dial(self, addr_infos: Any, **options: Any) -> Any:
        ahead = guard._first_dial.get()
        if ahead is not None and ahead.sock is not None:
            sock, ahead.sock = ahead.sock, None
            return sock  # it was dialled before there was a request for it
        # Of a dial that is cut no address is noted: here all hosts that live share one.
        if self.cut == "no route":
            raise OSError(errno.ENETUNREACH, "Network is unreachable")
        where = addr_infos[0][4][0]
        if where.startswith(_DIES) and where not in self._dead:
            self._dead.add(where)
            options["socket_factory"](addr_infos[0]).close()
            addr_infos = [(*addr_infos[0][:4], ("127.0.0.1", self.port))]
        vanishes = all(info[4][0].startswith((_VANISHES, _DIES)) for info in addr_infos)
        for info in addr_infos if vanishes else ():
            options["socket_factory"](info).close()  # the guard sees who is dialled
        if vanishes or self.cut == "silent":
            try:
                async with deadline(self.clock, 30.0):
                    await (asyncio.Event() if vanishes else self._mended).wait()
            except TimeoutError:
                raise OSError(errno.ETIMEDOUT, "Connection timed out") from None
        return await self._connect(addr_infos, **options)


def dead_hosts(internet: FakeInternet, kind: str, count: int, *, sites: str = "many") -> list[str]:
    """Names of so many dead hosts: each of a domain and machine of its own, or all of one."""
    one = sites == "one"
    word = kind.replace(" ", "")
    names = [f"n{i}.{word}.test" if one else f"{word}{i}.test" for i in range(count)]
    if kind == "nxdomain":
        return names
    address = ""
    if kind == "refused":
        address = internet.refusing(names[0])
    elif kind == "reset":
        address = internet.rude(names[0])
    for number, name in enumerate(names):
        if kind == "servfail":
            internet.dns(name, Fail.SERVFAIL)
        elif kind == "dns silent":
            internet.dns(name, Fail.NEVER)
        elif kind == "silent":
            internet.dns(name, f"127.99.{0 if one else number // 250}.{1 if one else number % 250}")
        else:
            internet.dns(name, address)
    return names


def dying_hosts(internet: FakeInternet, dials: Dials, count: int) -> list[str]:
    """Names of so many hosts that give their robots.txt, and are silent ever after."""
    dials.port = internet.listener().port()
    names = [f"dying{number}.test" for number in range(count)]
    for number, name in enumerate(names):
        internet.site(name).on("/robots.txt", Page("", close=True))
        internet.dns(name, f"127.98.{number // 250}.{number % 250}")
    return names
