"""The open leases, in the order of their ends."""

from __future__ import annotations

import heapq

from gatekeeper.pacing.leases import Grant
from gatekeeper.pacing.ledger import INF

__all__ = ["OpenLeases"]


class OpenLeases:
    """Leases with the usual lifetime end in the order of their grants, and a dictionary
    keeps that; those with a lifetime of their own stand in a heap, swept of ended ones.
    """

    __slots__ = ("_alone", "_alone_open", "_hint", "_order", "usual")

    def __init__(self) -> None:
        self.usual: dict[Grant, None] = {}
        """Leases with the usual lifetime are put in here."""
        # No usual lease ends before this; inf: nobody has looked. It is looked for only when
        # it has come: the first key of a dictionary from whose head much was taken is slow to
        # find.
        self._hint = INF
        self._alone: list[tuple[float, int, Grant]] = []
        self._alone_open = 0
        self._order = 0

    def __len__(self) -> int:
        return len(self.usual) + self._alone_open

    def add_alone(self, grant: Grant) -> None:
        """A lease with a lifetime of its own."""
        self._order += 1
        self._alone_open += 1
        heapq.heappush(self._alone, (grant.expires_at, self._order, grant))
        if len(self._alone) > 2 * self._alone_open + 64:
            self._alone = [entry for entry in self._alone if self._counts(entry)]
            heapq.heapify(self._alone)

    def remove(self, grant: Grant) -> None:
        """It ended, or gets a new end."""
        try:
            del self.usual[grant]
        except KeyError:
            self._alone_open -= 1  # one with a lifetime of its own

    def over(self, now: float) -> list[Grant]:
        """Those whose time is over, each once: a lease that was renewed twice to the very same
        end stands in the heap twice."""
        found: dict[Grant, None] = {}
        if self.next() <= now:
            self._hint = INF
            for grant in self.usual:
                if grant.expires_at > now:
                    self._hint = grant.expires_at
                    break
                found[grant] = None
        while self._alone and (self._alone[0][0] <= now or not self._counts(self._alone[0])):
            entry = heapq.heappop(self._alone)
            if self._counts(entry):
                found[entry[2]] = None
        return list(found)

    def next(self) -> float:
        """No lease ends before that moment; inf if none is open."""
        if self._hint == INF and self.usual:
            self._hint = next(iter(self.usual)).expires_at
        return min(self._hint, self._alone[0][0]) if self._alone else self._hint

    @staticmethod
    def _counts(entry: tuple[float, int, Grant]) -> bool:
        return entry[2].open and entry[0] == entry[2].expires_at
