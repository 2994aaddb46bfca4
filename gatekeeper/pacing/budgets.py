"""How many pages, and how many bytes, a host is asked for in a day.

A day is 24 hours that begin with a page: the first lease for one, and then the first after the
day before was over. So it depends on nobody's wall clock, and the hosts of a crawl don't all
begin theirs at midnight. Pages are leases granted for them; one that was given back unused does
not count, robots.txt never does. Bytes are known when the answer is here, so requests under way
may exceed them, and nothing else may.
"""

from __future__ import annotations

from typing import NamedTuple

from gatekeeper.errors import GatekeeperError

__all__ = ["DAY", "BudgetSpent", "DailyBudget", "Usage"]

DAY = 86_400.0
"""Seconds."""


class DailyBudget(NamedTuple):
    """What a host may be asked for in a day; 0: as much as its pace allows."""

    pages: int = 0
    bytes: int = 0

    def spent(self, pages: int, size: int) -> bool:
        """Is nothing left of it?

        >>> DailyBudget(pages=10).spent(9, 1 << 40), DailyBudget(10, 500).spent(9, 500)
        (False, True)
        """
        return 0 < self.pages <= pages or 0 < self.bytes <= size

    def sentence(self, usage: Usage) -> str:
        """What was used of it, for people.

        >>> usage = Usage(); usage.count(0.0, pages=3)
        >>> DailyBudget(pages=10).sentence(usage)
        '3 of 10 pages in 24 hours'
        """
        parts = [f"{usage.pages} of {self.pages} pages"] if self.pages else []
        if self.bytes:
            parts.append(f"{usage.bytes} of {self.bytes} bytes")
        return ", ".join(parts) + " in 24 hours"


class BudgetSpent(GatekeeperError):
    """No lease for a page of the host in the next `seconds`; a gate makes a Deferred of it."""

    def __init__(self, host: str, budget: DailyBudget, usage: Usage, seconds: float) -> None:
        super().__init__(f"the budget of {host} is spent: {budget.sentence(usage)}")
        self.host: str = host
        self.seconds: float = seconds


class Usage:
    """What one host was asked for in its day. Moments are monotonic seconds."""

    __slots__ = ("began", "bytes", "pages")

    def __init__(self, began: float = float("-inf"), pages: int = 0, size: int = 0) -> None:
        self.began: float = began
        """The moment of the day's first page."""
        self.pages: int = pages
        self.bytes: int = size

    def count(self, start: float, pages: int = 0, size: int = 0) -> None:
        """So many more of the lease that started then. The first page after the end of a day
        begins the next one; what is told of a lease of an earlier day does not count any more.

        >>> usage = Usage()
        >>> usage.count(5.0, pages=1); usage.count(DAY + 6.0, pages=1); usage.count(5.0, size=900)
        >>> usage.began - DAY, usage.pages, usage.bytes
        (6.0, 1, 0)
        """
        if start < self.began:
            return
        if start >= self.began + DAY:
            self.began, self.pages, self.bytes = start, 0, 0
        self.pages += pages
        self.bytes += size

    def check(self, host: str, budget: DailyBudget, now: float) -> None:
        """Raise BudgetSpent where no page may be asked for before the end of the day."""
        left = self.began + DAY - now
        if left > 0 and budget.spent(self.pages, self.bytes):
            raise BudgetSpent(host, budget, self, left)
