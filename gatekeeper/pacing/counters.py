"""What the books count, and who keeps what they promise."""

from __future__ import annotations

from typing import Protocol

from gatekeeper.pacing.ledger import Scope

__all__ = ["Away", "Counters", "Keeper"]


class Keeper(Protocol):
    """Where promises are made durable."""

    @property
    def marked(self) -> bool:
        """Would the next run know of a crash? If not, nothing may be granted."""

    def mark(self) -> None:
        """Let it know. Raises StorageError."""

    def promise(self, scope: Scope, now: float) -> None:
        """Keep this scope's clock before the grant returns. Raises StorageError: then there is
        to be none."""

    def remember(self, scope: Scope, now: float) -> None:
        """Keep what came of an answer, now or as soon as can be: it is in force already."""

    def unkept(self, scope: Scope) -> bool:
        """Is something in force that could not be kept yet?"""


class Away(Protocol):
    """What is not in memory: asked before any scope is begun, so that none is begun anew
    that was sent away."""

    def back(self, name: str) -> Scope | None:
        """The scope of that name, back in the books if it was sent away; None if it was not."""

    def make_room(self) -> bool:
        """Have others forgotten or sent away; False: there is no room for a host more."""


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
