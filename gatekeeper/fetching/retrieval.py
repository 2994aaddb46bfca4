"""What goes into one retrieval of a robots.txt and what comes out of it: plain values."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar
from typing import Final, Protocol

import msgspec

from gatekeeper.fetching.freshness import Lifetime
from gatekeeper.fetching.outcomes import Outcome

__all__ = [
    "ANSWERED",
    "FAILED",
    "STRANGER",
    "Hurry",
    "Known",
    "Refuse",
    "Retrieval",
    "RobotsSource",
    "TakeTurn",
    "Turn",
    "Validators",
    "hurried",
    "precedence",
]

ANSWERED: Final = 0
STRANGER: Final = 1
FAILED: Final = 2
precedence: ContextVar[int] = ContextVar("gatekeeper_precedence", default=STRANGER)
"""Who goes first where retrievals wait for a slot: origins that answered before, then those
never met, then those that failed."""


class Hurry(msgspec.Struct, frozen=True):
    """What is different about a retrieval that only finds out whether anybody answers."""

    seconds: float
    """How long it may take to connect, and then to the head, where that is less than usual."""
    on_request: Callable[[], object]
    """Called before each of its requests: it has waited for its turn and its slot then."""


hurried: ContextVar[Hurry | None] = ContextVar("gatekeeper_hurried", default=None)
"""Set where the retrievals of this context are in a hurry."""


class Validators(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What makes a request conditional (HTTP-01)."""

    url: str
    """The URL that gave them: only a request for that one carries them."""
    etag: str | None = None
    last_modified: str | None = None


class Retrieval(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What one retrieval came to."""

    outcome: Outcome
    status: int | None = None
    """Of the last answer; None where no answer came."""
    hops: tuple[str, ...] = ()
    """The URLs that it was redirected to, the last one answered."""
    url: str = ""
    """The last URL that was asked."""
    body: bytes | None = None
    """Decoded octets of a text, else None. One octet more than `fetch.max_body` where the
    text goes on: so the parser sees for itself that it was cut, and drops the last line."""
    etag: str | None = None
    last_modified: str | None = None
    lifetime: Lifetime = Lifetime()
    retry_after: float | None = None
    """Seconds that the site asks to wait, as it said it (not capped)."""
    took: float = 0.0
    """Seconds on the network, all hops; waiting for turns not counted."""
    truncated: bool = False
    received: int = 0
    """Octets of the body on the wire."""
    detail: str = ""
    """For the log: what was raised. Never shown to a client (T2)."""
    addresses: tuple[str, ...] = ()
    """Those that were dialled for the last hop, as far as our own connector saw it."""


class Turn(Protocol):
    """The right to send one request to a host."""

    def report(
        self,
        *,
        status: int | None = None,
        elapsed: float | None = None,
        retry_after: float | None = None,
    ) -> None:
        """What came of it: the status, None for none; seconds to the head; Retry-After."""


class RobotsSource(Protocol):
    """Where the directory gets its files: `Fetcher`, or a test's stand-in."""

    async def fetch(self, origin: str, validators: Validators | None = None) -> Retrieval:
        """Ask for the origin's robots.txt. A failure is an outcome, not an exception."""

    async def reach(self, origin: str) -> bool | None:
        """Whether a new connection to the origin comes about; nothing is requested over it.

        False: it failed as a lost uplink would make it fail. None: it can't be told.
        """


TakeTurn = Callable[[str], AbstractAsyncContextManager[Turn]]
"""Waits for the turn of a URL's host and gives it back on leaving."""

Refuse = Callable[[str], object | None]
"""The guard's word about a URL: None, or what is wrong with it."""

Known = Callable[[str], Retrieval | None]
"""What is known and fresh about an origin, as if it had just been asked."""
