"""The origins that a crawl waits for, when the turn of each comes, and what holds it up."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from datetime import datetime
from typing import Protocol

from gatekeeper import urls
from gatekeeper.cli.crawl.progress import TURN, Holdup, NextTurn
from gatekeeper.clock import Clock
from gatekeeper.decision import Decision, Reason, Verdict

__all__ = ["Explains", "Hosts"]

_NEVER = float("inf")
_REASONS = {"block": Reason.HOST_BLOCKED, "pause": Reason.HOST_PAUSED}
_HELD = frozenset({"pause"})
"""Kinds of clock that no time ends, but somebody."""


class Clockwork(Protocol):
    """One clock of a host, as the gate explains it."""

    @property
    def kind(self) -> str:
        """What sort of clock it is."""

    @property
    def source(self) -> str:
        """Where it comes from."""

    @property
    def seconds(self) -> float | None:
        """Of an interval: its length."""

    @property
    def decides(self) -> bool:
        """Among the intervals: the one in force."""

    @property
    def until(self) -> datetime | None:
        """When it ends; None where an event ends it."""

    @property
    def since(self) -> datetime | None:
        """When the answer came that drew it; None where none did."""


class Explains(Protocol):
    """What of a gate is asked here: nothing that waits for a site."""

    async def why(self, host: str) -> Iterable[Clockwork]:
        """Every clock of the host."""

    def peek(self, url: str) -> Decision | None:
        """What is known about the URL already."""


class Hosts:
    """How many URLs wait for each origin: two of one host have files of their own, and one
    that is deferred says nothing of the other. Memory: an entry an origin that is waited for.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[int, str]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, url: str) -> None:
        """One more URL waits for its origin."""
        origin = urls.parse(url).origin
        count, _ = self._waiting.get(origin, (0, url))
        self._waiting[origin] = (count + 1, url)

    def drop(self, url: str) -> None:
        """One of them waits no longer."""
        origin = urls.parse(url).origin
        count, some = self._waiting.get(origin, (0, url))
        if count > 1:
            self._waiting[origin] = (count - 1, some)
        else:
            self._waiting.pop(origin, None)

    async def busiest(self, gate: Explains, clock: Clock, most: int) -> list[NextTurn]:
        """The origins that most URLs wait for, the one whose turn comes first in front."""
        names = heapq.nlargest(most, self._waiting, key=lambda name: self._waiting[name][0])
        turns = [await self._turn(name, gate, clock) for name in names]
        return sorted(turns, key=lambda turn: (turn.seconds, turn.host))

    async def soonest(self, gate: Explains, clock: Clock, enough: float) -> float:
        """Seconds until the first turn of any; one within `enough` ends the search."""
        best = _NEVER
        for origin in tuple(self._waiting):
            best = min(best, (await self._turn(origin, gate, clock)).seconds)
            if best <= enough:
                break
        return best

    async def turn(self, url: str, gate: Explains, clock: Clock) -> NextTurn:
        """When the turn of that URL's origin comes, whether or not it waits for it already."""
        return await self._turn(urls.parse(url).origin, gate, clock)

    async def _turn(self, origin: str, gate: Explains, clock: Clock) -> NextTurn:
        count, url = self._waiting.get(origin, (0, ""))
        wall, seconds, holdup, interval = clock.wall(), 0.0, None, 0.0
        slowed = ""
        for view in await gate.why(urls.parse(origin).host):
            if view.decides:
                interval = max(interval, view.seconds or 0.0)
            if view.kind == "interval" and view.since is not None:
                slowed = view.source
            if view.until is None:
                left = _NEVER if view.kind in _HELD else 0.0
            else:
                left = view.until.timestamp() - wall
            if left > seconds:
                reason = _REASONS.get(view.kind, TURN)
                seconds, holdup = left, Holdup(reason, view.source, view.until)
        decision = gate.peek(url) if url else None
        if decision is not None and decision.verdict is Verdict.DEFER:
            until = decision.retry_at
            left = until.timestamp() - wall if until is not None else _NEVER
            if left > seconds:
                seconds, holdup = left, Holdup.of(decision)
        host = origin.partition("://")[2]
        return NextTurn(
            host,
            seconds,
            count,
            origin=origin,
            holdup=holdup,
            interval=interval,
            slowed=slowed,
        )
