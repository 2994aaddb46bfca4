"""Which open leases belong to which task, so that none waits for itself."""

from __future__ import annotations

import asyncio
from typing import Generic, Protocol, TypeVar

__all__ = ["Holdings"]

_FEW = 64


class Held(Protocol):
    """An open lease."""

    @property
    def host(self) -> str:
        """Whose turn it is."""

    @property
    def owner(self) -> asyncio.Task[object] | None:
        """The task that would wait for itself if it asked for another one."""

    @property
    def ended(self) -> bool:
        """The slot is free again; nobody tells us where a lease's time ran out."""


H = TypeVar("H", bound=Held)


class Holdings(Generic[H]):
    """The open leases by host, and through their owners by task."""

    def __init__(self) -> None:
        self.first: dict[str, H] = {}
        """Most hosts have one lease at a time: it stands here, and others in `_more`."""
        self._more: dict[str, list[H]] = {}
        self._crowded = _FEW

    def __len__(self) -> int:
        return len(self.first) + sum(map(len, self._more.values()))

    def everybody(self) -> list[H]:
        """Every lease that is remembered; some may have ended."""
        return [*self.first.values(), *(one for more in self._more.values() for one in more)]

    def add(self, lease: H) -> None:
        """Remember a lease that has an owner."""
        first = self.first.setdefault(lease.host, lease)
        if first is lease:
            return
        if first.ended:
            self.first[lease.host] = lease
        else:
            others = self._more.setdefault(lease.host, [])
            others[:] = [other for other in others if not other.ended]
            others.append(lease)

    def drop(self, lease: H) -> None:
        """Forget an ended lease; unknown ones are no error."""
        host = lease.host
        first = self.first.get(host)
        if first is lease and host not in self._more:
            del self.first[host]
        elif (more := self._more.get(host)) is not None:
            if first is lease:
                self.first[host] = more.pop(0)
            elif lease in more:
                more.remove(lease)
            if not more:
                del self._more[host]

    def of(self, task: asyncio.Task[object] | None, host: str | None = None) -> list[H]:
        """The open leases of a task, of that host or of all."""
        self._sweep()
        if host is not None:
            first = self.first.get(host)
            held = [] if first is None else [first, *self._more.get(host, ())]
        else:
            held = self.everybody()
        return [lease for lease in held if lease.owner is task and not lease.ended]

    def _sweep(self) -> None:
        """Forget leases that ended by themselves, in bulk now and then."""
        if len(self.first) <= self._crowded:
            return
        everybody = self.everybody()
        self.first.clear()
        self._more.clear()
        for lease in everybody:
            if not lease.ended:
                self.add(lease)
        self._crowded = 2 * len(self.first) + _FEW
