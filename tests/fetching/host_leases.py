"""Leases by host for a `Fetcher` without a gate and its scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext

from gatekeeper.clock import Clock
from gatekeeper.fetching.outcomes import HopLease
from gatekeeper.urls import Target


class _Silent:
    """A lease that ignores reports."""

    def report(
        self,
        *,
        status: int | None = None,
        elapsed: float | None = None,
        retry_after: float | None = None,
    ) -> None:
        """Ignore the report."""


AT_ONCE = nullcontext(_Silent())
"""A lease that nobody waits for."""


class _Host:
    __slots__ = ("lock", "next_at", "users")

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.next_at = 0.0
        self.users = 0


class HostLeases:
    """One request at a time per host, and an interval between the end and the next start."""

    def __init__(self, clock: Clock, interval: float) -> None:
        self._clock = clock
        self._interval = interval
        self._hosts: dict[str, _Host] = {}

    @asynccontextmanager
    async def __call__(self, target: Target) -> AsyncIterator[HopLease]:
        """Acquire the host's lease for the block."""
        name = target.host
        host = self._hosts.get(name)
        if host is None:
            host = self._hosts[name] = _Host()
        host.users += 1
        try:
            async with host.lock:
                wait = host.next_at - self._clock.monotonic()
                if wait > 0:
                    await self._clock.sleep(wait)
                try:
                    yield _Silent()
                finally:
                    host.next_at = self._clock.monotonic() + self._interval
        finally:
            host.users -= 1
