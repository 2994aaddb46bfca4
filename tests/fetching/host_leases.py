"""Leases by host for a `Fetcher` without a gate and its scheduler."""

from __future__ import annotations

import asyncio
from collections import defaultdict
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


class HostLeases:
    """One request at a time per host, and an interval between the end and the next start."""

    def __init__(self, clock: Clock, interval: float) -> None:
        self._clock = clock
        self._interval = interval
        self._locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._next_at: dict[str, float] = {}

    @asynccontextmanager
    async def __call__(self, target: Target) -> AsyncIterator[HopLease]:
        """Acquire the host's lease for the block."""
        async with self._locks[target.host]:
            now = self._clock.monotonic()
            if (wait := self._next_at.get(target.host, now) - now) > 0:
                await self._clock.sleep(wait)
            try:
                yield _Silent()
            finally:
                self._next_at[target.host] = self._clock.monotonic() + self._interval
