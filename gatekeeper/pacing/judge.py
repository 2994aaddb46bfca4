"""An independent judge: what each site was promised, and whether it was kept.

The judge knows the site's side alone (when requests started, when their responses began
and ended, what the site asked for) and none of the scheduler's books.
"""

from __future__ import annotations

from collections import Counter
from typing import Protocol

__all__ = ["Account", "Experience", "Judge"]

INF = float("inf")

TOLERANCE = 1e-6
"""Seconds: sums of floats, not politeness."""


class Experience(Protocol):
    """One scope as it experiences its visitor. Monotonic seconds."""

    interval: float
    """Seconds the scope asks for now."""
    limit: int
    basis: float
    """Latest start, response head or failure."""
    blocked_until: float
    in_flight: int
    unheaded: int


class Account:
    """The plain `Experience`."""

    __slots__ = ("basis", "blocked_until", "in_flight", "interval", "limit", "unheaded")

    def __init__(self, interval: float, limit: int = 1) -> None:
        self.interval = interval
        self.limit = limit
        self.basis = -INF
        self.blocked_until = -INF
        self.in_flight = 0
        self.unheaded = 0


class Judge:
    """Counts every request that broke a promise, by kind.

    >>> judge, site = Judge(), Account(interval=10.0)
    >>> judge.start(site, 0.0); judge.head(site, 1.0); judge.end(site, 1.0)
    >>> judge.start(site, 10.5)
    >>> judge.violations
    Counter({'early': 1})
    """

    def __init__(self) -> None:
        self.violations: Counter[str] = Counter()

    def start(self, account: Experience, now: float) -> None:
        """A request starts."""
        if now < account.basis + account.interval - TOLERANCE:
            self.violations["early"] += 1
        if now < account.blocked_until - TOLERANCE:
            self.violations["blocked"] += 1
        account.basis = now
        if account.in_flight:
            if account.unheaded and account.interval > 0:
                self.violations["before_head"] += 1
            account.in_flight += 1
            account.unheaded += 1
            if account.in_flight > account.limit:
                self.violations["concurrency"] += 1
        else:
            account.in_flight = account.unheaded = 1

    def head(self, account: Experience, now: float) -> None:
        """Its response began, or it failed."""
        account.unheaded -= 1
        if now > account.basis:  # noqa: PLR1730 - no call here
            account.basis = now

    def end(self, account: Experience, now: float, headed: bool = True) -> None:
        """It ended; `headed`: its head was told of before."""
        account.in_flight -= 1
        if not headed:
            account.unheaded -= 1
            if now > account.basis:  # noqa: PLR1730 - no call here
                account.basis = now

    def withdrawn(self, account: Experience) -> None:
        """It was never sent: the slot is free, the clock stays."""
        account.in_flight -= 1
        account.unheaded -= 1

    def block(self, account: Experience, until: float) -> None:
        """The scope said: not before that moment."""
        account.blocked_until = max(account.blocked_until, until)
