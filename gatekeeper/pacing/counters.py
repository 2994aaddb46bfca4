"""What the books count, and who keeps what they promise."""

from __future__ import annotations

from typing import Protocol

from gatekeeper.pacing.ledger import Scope

__all__ = ["Counters", "Keeper"]


class Keeper(Protocol):
    """Where promises are made durable."""

    def promise(self, scope: Scope, now: float) -> None:
        """Keep this scope's clock before the grant or the report returns."""


class Counters:
    """What `stats()` counts since the start."""

    def __init__(self) -> None:
        self.robots = 0
        self.refused = 0
        self.refetches = 0
        self.cancelled = 0
        self.timeouts = 0
        self.expired = 0
        self.given_back = 0
        self.passed_on = 0
        self.blocks = 0
