"""The fake internet's name service: an aiohttp resolver whose answers are scripted."""

from __future__ import annotations

import asyncio
import ipaddress
import random
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from aiohttp.abc import AbstractResolver, ResolveResult

from gatekeeper.clock import Clock


class Fail(StrEnum):
    """A look-up that brings no address."""

    NXDOMAIN = "nxdomain"
    SERVFAIL = "servfail"
    TIMEOUT = "timeout"
    """Fails after `Names.timeout` seconds of the clock."""
    NEVER = "never"
    EMPTY = "empty"
    """An answer without addresses."""


@dataclass(frozen=True, slots=True)
class Query:
    """One look-up as the name service saw it."""

    at: float
    name: str
    port: int
    family: int


Step = Fail | str | Iterable[str]


class Names(AbstractResolver):
    """Maps names to loopback addresses, and the URL's port to the server's real one.

    `script(name, *steps)` says what successive look-ups bring (the last step repeats): an
    address, several of them, or a `Fail`. `delay` is a range of seconds, drawn by `rng` and
    slept by the clock before each answer. A name that nobody registered does not exist.
    """

    def __init__(
        self,
        clock: Clock,
        port_of: Callable[[str, int], int],
        *,
        rng: random.Random | None = None,
        delay: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        self._clock = clock
        self._port_of = port_of
        self._rng = rng or random.Random(7)
        self.scripts: dict[str, list[Step]] = {}
        """What the next look-ups of each name bring."""
        self.delay = delay
        self.timeout = 5.0
        self.queries: list[Query] = []

    def script(self, name: str, *steps: Step) -> None:
        """Answer successive look-ups of the name with these steps; the last one repeats."""
        if not steps:
            raise ValueError("a script needs at least one step")
        self.scripts[name.lower().rstrip(".")] = list(steps)

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Answer as the script says; OSError as the system's resolver raises it."""
        self.queries.append(Query(self._clock.monotonic(), host, port, family))
        if self.delay[1] > 0:
            await self._clock.sleep(self._rng.uniform(*self.delay))
        steps = self.scripts.get(host.lower().rstrip("."))
        step: Step = Fail.NXDOMAIN if steps is None else steps[0]
        if steps is not None and len(steps) > 1:
            del steps[0]
        if isinstance(step, Fail):
            return await self._fail(step)
        addresses = [step] if isinstance(step, str) else list(step)
        answers = [self._answer(host, address, port) for address in addresses]
        return [a for a in answers if family in (socket.AF_UNSPEC, a["family"])]

    async def _fail(self, step: Fail) -> list[ResolveResult]:
        if step is Fail.EMPTY:
            return []
        if step is Fail.NXDOMAIN:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        if step is Fail.NEVER:
            await asyncio.get_running_loop().create_future()
        if step is Fail.TIMEOUT:
            await self._clock.sleep(self.timeout)
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    def _answer(self, host: str, address: str, port: int) -> ResolveResult:
        version = ipaddress.ip_address(address).version
        return ResolveResult(
            hostname=host,
            host=address,
            port=self._port_of(address, port),
            family=socket.AF_INET if version == 4 else socket.AF_INET6,
            proto=0,
            flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
        )

    async def close(self) -> None:
        """Nothing to release."""
