"""Dead hosts of several kinds, and a network that loses some connection attempts."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp.connector

from gatekeeper.clock import VirtualClock, deadline
from tests.internet import Fail, FakeInternet, Page

KINDS = ("refused", "nxdomain", "silent", "reset", "servfail", "dns silent")
_VANISHES = "127.99."
"""Connection attempts to addresses with this prefix are lost, like SYNs: nothing comes back."""
_DIES = "127.98."
"""The first connection to each address with this prefix reaches the server at 127.0.0.1, and
further ones are lost."""


class Dials:
    """Handles every connection attempt. `cut` is how all of them fail; None: they don't."""

    def __init__(self, clock: VirtualClock, connect: Callable[..., Any]) -> None:
        self.clock = clock
        self._connect = connect
        self.cut: str | None = None
        self.lost_at = self.back_at = 0.0
        self.port = 0
        """Port of the server of those hosts that die later."""
        self._dead: set[str] = set()
        self._mended = asyncio.Event()

    @classmethod
    @contextmanager
    def caught(cls, clock: VirtualClock) -> Iterator[Dials]:
        """Handle all connection attempts of aiohttp during the block."""
        eyeballs = aiohttp.connector.aiohappyeyeballs
        connect = eyeballs.start_connection
        dials = cls(clock, connect)
        eyeballs.start_connection = dials._dial
        try:
            yield dials
        finally:
            eyeballs.start_connection = connect

    def lose(self, how: str) -> None:
        """Let all connection attempts fail from now on: "no route" or "silent"."""
        self.cut, self.lost_at = how, self.clock.monotonic()
        self._mended.clear()

    def mend(self) -> None:
        """Restore the uplink; connection attempts that hang get through."""
        self.cut, self.back_at = None, self.clock.monotonic()
        self._mended.set()

    async def _dial(self, addr_infos: Any, **options: Any) -> Any:
        # A cut attempt records no address, since all hosts that live share one here.
        if self.cut == "no route":
            raise OSError(errno.ENETUNREACH, "Network is unreachable")
        where = addr_infos[0][4][0]
        if where.startswith(_DIES) and where not in self._dead:
            self._dead.add(where)
            options["socket_factory"](addr_infos[0]).close()
            addr_infos = [(*addr_infos[0][:4], ("127.0.0.1", self.port))]
        vanishes = all(info[4][0].startswith((_VANISHES, _DIES)) for info in addr_infos)
        for info in addr_infos if vanishes else ():
            options["socket_factory"](info).close()  # The guard sees the address.
        if vanishes or self.cut == "silent":
            try:
                async with deadline(self.clock, 30.0):
                    await (asyncio.Event() if vanishes else self._mended).wait()
            except TimeoutError:
                raise OSError(errno.ETIMEDOUT, "Connection timed out") from None
        return await self._connect(addr_infos, **options)


def dead_hosts(internet: FakeInternet, kind: str, count: int, *, sites: str = "many") -> list[str]:
    """Return names of dead hosts: each with its own domain and machine, or all with one."""
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
    """Return names of hosts that serve their robots.txt, and never answer again."""
    dials.port = internet.listener().port()
    names = [f"dying{number}.test" for number in range(count)]
    for number, name in enumerate(names):
        internet.site(name).on("/robots.txt", Page("", close=True))
        internet.dns(name, f"127.98.{number // 250}.{number % 250}")
    return names
