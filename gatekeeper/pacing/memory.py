"""Which scopes are held in memory: bounded, and nobody is forgotten who is owed something.

A scope may be forgotten when nobody waits for it, nothing is in flight, its clock is past
and nothing is held against it. If all are owed something, the least recently begun are
spilled to the storage, and come back from there before their host's next turn.
"""

from __future__ import annotations

from gatekeeper.errors import LeaseTimeout
from gatekeeper.pacing.books import Books
from gatekeeper.pacing.ledger import Scope
from gatekeeper.pacing.promises import Promises
from gatekeeper.storage.base import Storage

__all__ = ["Memory"]

_SHARE = 16
"""When the bound is met, one in so many scopes has to go, so that it is not met each time."""


class Memory:
    """Finds and begins scopes; makes room when there are too many."""

    def __init__(self, books: Books, promises: Promises | None, storage: Storage | None) -> None:
        self._books = books
        self._promises = promises
        self._storage = storage
        self._max = books.pacing.max_hosts
        self.evicted = 0
        self.spilled = 0

    async def host(self, name: str, extra: tuple[str, ...]) -> Scope:
        """The scope of a host, loaded if it was spilled, with its shared ones."""
        scopes = self._books.scopes
        if name not in scopes:
            wanted = (name, *extra)
            if self.spilled:
                for one in (*wanted, *self._books.rules.shared_names(name)):
                    await self._load(one)
            if name not in scopes and len(scopes) >= self._max:
                self._make_room(name)
        return self._books.host(name, extra)

    async def _load(self, name: str) -> None:
        """Bring a spilled scope back. Two may load it at once: the first to end wins."""
        if self._storage is None or self._promises is None or name in self._books.scopes:
            return
        record = await self._storage.load_clock(name)
        if record is not None and name not in self._books.scopes:
            self._promises.restore(record, self._books.clock.monotonic())

    def _make_room(self, asker: str) -> None:
        now = self._books.clock.monotonic()
        scopes = self._books.scopes
        goal = self._max - max(1, self._max // _SHARE)
        shared = {other for scope in scopes.values() for other in scope.shared}
        for scope in list(scopes.values()):
            if scope not in shared and self._idle(scope) and not self._owed(scope, now):
                del scopes[scope.name]
                self._books.mixed.pop(scope.name, None)
                self.evicted += 1
        if len(scopes) <= goal:
            return
        if self._promises is not None:
            for scope in list(scopes.values()):
                if len(scopes) <= goal:
                    return
                if scope not in shared and self._idle(scope):
                    self._promises.keep(scope, now)
                    del scopes[scope.name]
                    self._books.mixed.pop(scope.name, None)
                    self.spilled += 1
        if len(scopes) >= self._max:
            raise LeaseTimeout(
                asker,
                f"{asker}: {len(scopes)} hosts are owed something already (pacing.max_hosts)",
            )

    def _idle(self, scope: Scope) -> bool:
        return scope.line is None and not scope.in_flight

    def _owed(self, scope: Scope, now: float) -> bool:
        if scope.clock_at() > now or self._books.rules.overridden(scope.name):
            return True
        if scope.basis + self._books.mixed.get(scope.name, 0.0) > now:
            return True
        return scope.history is not None and scope.history.owes(now, self._books.pacing)
