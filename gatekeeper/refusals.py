"""The errors that stop a request: aiohttp's as well, so that its users' handlers catch them.

Apart from the others, which cost no import of aiohttp; `gatekeeper.errors` has them all.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Any

import aiohttp

from gatekeeper.errors import GatekeeperError

if TYPE_CHECKING:
    from gatekeeper.decision import Decision

__all__ = ["Deferred", "Denied", "LeaseTimeout"]


class Denied(GatekeeperError, aiohttp.ClientError):
    """This request may not be sent. `decision` says why."""

    def __init__(self, decision: Decision) -> None:
        super().__init__(decision)
        self.decision = decision

    def __str__(self) -> str:
        return self.decision.explain()


class Deferred(Denied):
    """Not now: ask again at `retry_at` (an aware UTC datetime)."""

    @property
    def retry_at(self) -> datetime | None:
        """The earliest moment at which asking again can help."""
        return self.decision.retry_at


class LeaseTimeout(GatekeeperError, aiohttp.ClientError, TimeoutError):
    """No turn came in time, or waiting for one could never end.

    `url` is the request that waited; `retry_at` is the moment (aware, UTC) from which
    a turn can be had as far as is known, or None.
    """

    def __init__(self, url: str, message: str, *, retry_at: datetime | None = None) -> None:
        super().__init__(message)
        self.url = url
        self.retry_at = retry_at

    def __reduce__(self) -> tuple[Callable[..., LeaseTimeout], tuple[Any, ...]]:
        # As told by `args` alone it could not be made again, in another process for one.
        return _lease_timeout, (self.url, str(self), self.retry_at)


def _lease_timeout(url: str, message: str, retry_at: datetime | None) -> LeaseTimeout:
    return LeaseTimeout(url, message, retry_at=retry_at)


for _error in (Denied, Deferred, LeaseTimeout):  # where they are documented, and looked for
    _error.__module__ = "gatekeeper.errors"
