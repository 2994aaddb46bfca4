"""Which scopes are held in memory: bounded, and nobody is forgotten who is owed something.

A scope may be forgotten when nobody waits for it, nothing is in flight, its clock is past
and nothing is held against it. If all are owed something, the least recently begun are
spilled to the storage, and come back from there before their host's next turn: whoever
asks the books for a scope gets the one that was spilled (`Books.away`).
"""

from __future__ import annotations

from collections import Counter

from gatekeeper.errors import LeaseTimeout
from gatekeeper.pacing.books import Books
from gatekeeper.pacing.ledger import INF, Scope
from gatekeeper.pacing.promises import Promises
from gatekeeper.storage.base import ClockRecord, Storage

__all__ = ["Memory"]

_SHARE = 16
"""When the bound is met, one in so many scopes has to go, so that it is not met each time."""
_REST = 1e-5
"""Seconds a scope, of all that there are, before those are gone through again in vain."""


class Memory:
    """Finds and begins scopes; makes room when there are too many."""

    def __init__(self, books: Books, promises: Promises | None, storage: Storage | None) -> None:
        self._books = books
        self._promises = promises
        self._storage = storage
        self._max = books.pacing.max_hosts
        self._loading: Counter[str] = Counter()
        """Scopes whose records are on the way from the storage: they are not spilled
        meanwhile, so that no record is older than the scope."""
        self._in_vain_until = -INF
        self.left = 0
        """Clocks of earlier runs for which there was no room at the start."""
        self.evicted = 0
        self.spilled = 0

    async def host(self, name: str, extra: tuple[str, ...]) -> Scope:
        """The scope of a host, loaded if it was spilled, with its shared ones.

        Raises LeaseTimeout where there is no room for one more.
        """
        books = self._books
        if name not in books.scopes:
            found = await self._load((name, *extra, *books.rules.shared_names(name)))
            # No await from here on.
            found = [record for record in found if record.scope not in books.scopes]
            self.admit(name)
            if self._promises is not None:
                now = books.clock.monotonic()
                for record in found:
                    self._promises.restore(record, now)
            if name not in books.scopes:
                books.begin(name)
        return books.host(name, extra)

    def adjust(self) -> None:
        """Follow other settings of the books."""
        self._max = self._books.pacing.max_hosts

    def admit(self, name: str) -> None:
        """Raises LeaseTimeout where there is no room for this host."""
        if name not in self._books.scopes and not self.make_room():
            raise LeaseTimeout(
                name,
                f"{name}: {len(self._books.scopes)} hosts are owed something already "
                "(pacing.max_hosts)",
            )

    # --- those elsewhere ----------------------------------------------------------------

    async def _load(self, names: tuple[str, ...]) -> list[ClockRecord]:
        """The records of those that may have been spilled, without holding up the loop."""
        if self._storage is None or not (self.spilled or self.left):
            return []
        self._loading.update(names)
        try:
            found = [
                await self._storage.load_clock(name)
                for name in names
                if name not in self._books.scopes
            ]
        finally:
            self._loading.subtract(names)
            for name in names:
                if not self._loading[name]:
                    del self._loading[name]
        return [record for record in found if record is not None]

    def back(self, name: str) -> Scope | None:
        """A spilled scope, back in the books, for those who can't wait; None: it was not
        spilled. Raises StorageError.
        """
        if self._storage is None or self._promises is None or not (self.spilled or self.left):
            return None
        record = self._storage.load_clock_nowait(name)
        if record is None:
            return None
        return self._promises.restore(record, self._books.clock.monotonic())

    # --- room ---------------------------------------------------------------------------

    def make_room(self) -> bool:
        """Forget or spill where there are too many; False: there is no room for one more."""
        scopes = self._books.scopes
        if len(scopes) < self._max:
            return True
        now = self._books.clock.monotonic()
        if now < self._in_vain_until:
            return False
        goal = self._max - max(1, self._max // _SHARE)
        shared = {other for scope in scopes.values() for other in scope.shared}
        idle = [
            scope
            for scope in scopes.values()
            if scope.line is None
            and not scope.in_flight
            and scope not in shared
            and scope.name not in self._loading
        ]
        owed = []
        for scope in idle:
            if self._owed(scope, now):
                owed.append(scope)
            else:
                self._drop(scope)
                self.evicted += 1
        if self._promises is not None:
            for scope in owed[: max(0, len(scopes) - goal)]:
                self._promises.keep(scope, now)
                self._drop(scope)
                self.spilled += 1
        if len(scopes) > goal:
            self._in_vain_until = now + len(scopes) * _REST
        return len(scopes) < self._max

    def _drop(self, scope: Scope) -> None:
        del self._books.scopes[scope.name]
        self._books.mixed.pop(scope.name, None)

    def _owed(self, scope: Scope, now: float) -> bool:
        if scope.clock_at() > now or self._books.rules.overridden(scope.name):
            return True
        if scope.basis + self._books.mixed.get(scope.name, 0.0) > now:
            return True
        return scope.history is not None and scope.history.owes(now, self._books.pacing)
