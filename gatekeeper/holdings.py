"""Which open leases belong to which task, so that none waits for itself."""

from __future__ import annotations

import asyncio
from typing import Generic, Protocol, TypeVar

from gatekeeper import urls
from gatekeeper.errors import LeaseTimeout

__all__ = ["Holdings"]


class Held(Protocol):
    """An open lease."""

    @property
    def url(self) -> str:
        """The URL it was granted for."""

    @property
    def host(self) -> str:
        """Whose turn it is."""

    @property
    def owner(self) -> asyncio.Task[object] | None:
        """The task that would wait for itself if it asked for another one."""


H = TypeVar("H", bound=Held)


class Holdings(Generic[H]):
    """The open leases by host, and through their owners by task."""

    def __init__(self) -> None:
        # Most hosts have one lease at a time: it stands in `first`, and others behind it.
        self.first: dict[str, H] = {}
        self._more: dict[str, list[H]] = {}

    def add(self, lease: H) -> None:
        """Remember a lease that has an owner."""
        if self.first.setdefault(lease.host, lease) is not lease:
            self._more.setdefault(lease.host, []).append(lease)

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

    def refuse_waiting_for_itself(
        self, host: str, url: str, task: asyncio.Task[object] | None, limit: int
    ) -> None:
        """Raise LeaseTimeout if the task holds every slot of the host."""
        first = self.first.get(host)
        if first is None:
            return
        held = (first, *self._more.get(host, ()))
        mine = [lease for lease in held if lease.owner is task]
        if len(mine) >= limit:
            raise LeaseTimeout(
                url,
                f"{urls.mask(url)} would wait for {mine[0].url}, which this task still "
                f"holds: read or close that response first (host {host}, {limit} at a time)",
            )
