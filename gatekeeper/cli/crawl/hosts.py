"""The hosts that a crawl waits for, and when the turn of each comes."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from datetime import datetime
from typing import Protocol

from gatekeeper import urls
from gatekeeper.cli.crawl.progress import NextTurn
from gatekeeper.clock import Clock
from gatekeeper.decision import Decision, Verdict

__all__ = ["Explains", "Hosts"]

_NEVER = float("inf")
_HELD = frozenset({"pause"})
"""Kinds of clock that no time ends, but somebody."""


class Clockwork(Protocol):
    """One clock of a host, as the gate explains it."""

    @property
    def kind(self) -> str:
        """What sort of clock it is."""

    @property
    def until(self) -> datetime | None:
        """When it ends; None where an event ends it."""


class Explains(Protocol):
    """What of a gate is asked here: nothing that waits for a site."""

    async def why(self, host: str) -> Iterable[Clockwork]:
        """Every clock of the host."""

    def peek(self, url: str) -> Decision | None:
        """What is known about the URL already."""


class Hosts:
    """How many URLs wait for each host. Memory: an entry a host that is waited for."""

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[int, str]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, url: str) -> None:
        """One more URL waits for its host."""
        host = urls.parse(url).host
        count, _ = self._waiting.get(host, (0, url))
        self._waiting[host] = (count + 1, url)

    def drop(self, url: str) -> None:
        """One of them waits no longer."""
        host = urls.parse(url).host
        count, some = self._waiting.get(host, (0, url))
        if count > 1:
            self._waiting[host] = (count - 1, some)
        else:
            self._waiting.pop(host, None)

    async def busiest(self, gate: Explains, clock: Clock, most: int) -> list[NextTurn]:
        """The hosts that most URLs wait for, the one whose turn comes first in front."""
        names = heapq.nlargest(most, self._waiting, key=lambda host: self._waiting[host][0])
        turns = [await self._turn(host, gate, clock) for host in names]
        return sorted(turns, key=lambda turn: (turn.seconds, turn.host))

    async def soonest(self, gate: Explains, clock: Clock, enough: float) -> float:
        """Seconds until the first turn of any; one within `enough` ends the search."""
        best = _NEVER
        for host in tuple(self._waiting):
            best = min(best, (await self._turn(host, gate, clock)).seconds)
            if best <= enough:
                break
        return best

    async def _turn(self, host: str, gate: Explains, clock: Clock) -> NextTurn:
        count, url = self._waiting.get(host, (0, ""))
        wall = clock.wall()
        seconds = 0.0
        for view in await gate.why(host):
            if view.until is not None:
                seconds = max(seconds, view.until.timestamp() - wall)
            elif view.kind in _HELD:
                seconds = _NEVER
        decision = gate.peek(url) if url else None
        if decision is not None and decision.verdict is Verdict.DEFER:
            retry_at = decision.retry_at
            until = retry_at.timestamp() - wall if retry_at is not None else _NEVER
            seconds = max(seconds, until)
        return NextTurn(host, seconds, count)
