"""What keeps a crawl waiting: said once for each origin and reason, and summed up at the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from gatekeeper.clock import Clock
from gatekeeper.decision import Decision, State, Verdict
from gatekeeper.errors import Deferred

if TYPE_CHECKING:
    from gatekeeper.origin_queues import QueueGate, QueueLease

__all__ = ["TURN", "Holdup", "ListeningGate", "Told"]

TURN = "turn"
"""The reason of a host that nothing holds up: its next turn comes, that is all."""
_MOST_TOLD = 50


@dataclass(frozen=True, slots=True)
class Holdup:
    """Why an origin is not asked now, and from when on it may be."""

    reason: str
    """One word for machines: a decision's reason, or TURN."""
    text: str
    """The same for people."""
    until: datetime | None = None
    """None: until somebody ends it."""

    @classmethod
    def of(cls, decision: Decision) -> Holdup:
        """What a deferral says. Its file is asked for again only at that moment."""
        text = decision.reason.replace("_", " ")
        if decision.state is State.UNREACHABLE:
            text = f"robots.txt: {text}"
            if decision.robots_status is not None:
                text += f" ({decision.robots_status})"
        return cls(decision.reason, text, decision.retry_at)

    def __str__(self) -> str:
        if self.until is None:
            return self.text
        return f"{self.text}; again at {self.until:%Y-%m-%d %H:%M:%S} UTC"


class Told:
    """Says of an origin that it is waited for: once for each reason, and not of too many."""

    def __init__(self, say: Callable[[str], object], *, most: int = _MOST_TOLD) -> None:
        self._say = say
        self._most = most
        self._told: set[tuple[str, str]] = set()

    def tell(self, origin: str, holdup: Holdup, slowed: str = "") -> None:
        """Say it, unless it was said, or it is but the next turn; and how slow it is after."""
        key = origin, holdup.reason
        if holdup.reason == TURN or key in self._told or len(self._told) > self._most:
            return
        self._told.add(key)
        if len(self._told) > self._most:
            self._say("waiting for still more hosts, which are not named one by one")
        else:
            self._say(f"waiting {origin}: {holdup}" + (f"; then {slowed}" if slowed else ""))


class ListeningGate:
    """The gate that a queue asks, with an ear for deferrals.

    The queue brings a deferred origin back by itself and tells nobody: here nothing is asked
    that it does not ask anyway.
    """

    def __init__(self, gate: QueueGate, on_deferred: Callable[[Decision], object]) -> None:
        self._gate = gate
        self._on_deferred = on_deferred

    @property
    def clock(self) -> Clock:
        """Where the gate reads the time."""
        return self._gate.clock

    def _heard(self, decision: Decision | None) -> Decision | None:
        if decision is not None and decision.verdict is Verdict.DEFER:
            self._on_deferred(decision)
        return decision

    def peek(self, url: str, *, user_agent: str | None = None) -> Decision | None:
        """As the gate says it."""
        return self._heard(self._gate.peek(url, user_agent=user_agent))

    async def check(self, url: str, *, user_agent: str | None = None) -> Decision:
        """As the gate says it."""
        decision = await self._gate.check(url, user_agent=user_agent)
        self._heard(decision)
        return decision

    def take(self, url: str) -> QueueLease | None:
        """As the gate gives it."""
        return self._gate.take(url)

    async def acquire(
        self,
        url: str,
        *,
        priority: int = 0,
        timeout: float | None = None,
        user_agent: str | None = None,
        owned: bool = True,
    ) -> QueueLease:
        """As the gate gives it, or what it raises."""
        try:
            return await self._gate.acquire(
                url, priority=priority, timeout=timeout, user_agent=user_agent, owned=owned
            )
        except Deferred as error:
            self._on_deferred(error.decision)
            raise

    def when_due(
        self, host: str, callback: Callable[[], object], *, priority: float = 0
    ) -> Callable[[], None]:
        """As the gate does it."""
        return self._gate.when_due(host, callback, priority=priority)
