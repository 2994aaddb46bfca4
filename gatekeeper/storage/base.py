"""What outlives the process: the `Storage` protocol and the records it keeps.

Everything here is wall-clock seconds and plain values: monotonic time means nothing
after a restart.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

__all__ = ["ClockRecord", "HistoryEntry", "OriginRecord", "Storage"]


class OriginRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one origin's robots.txt: two slots and the ladder.

    *current* is what the latest attempt came to; *last good* is the last answer that
    was a file or a definite absence. A failure never overwrites the last good copy.
    """

    origin: str
    outcome: str
    """Reason value of the latest attempt."""
    state: str
    """State value of the latest attempt."""
    status: int | None = None
    fetched_at: float
    """Wall seconds of the latest attempt."""
    soft_expires_at: float
    expires_at: float
    """Hard expiry of the latest attempt, or the next rung of the ladder."""
    first_unreachable_at: float | None = None
    ladder_step: int = 0
    hops: tuple[str, ...] = ()
    etag: str | None = None
    last_modified: str | None = None
    good_outcome: str | None = None
    good_status: int | None = None
    good_fetched_at: float | None = None
    good_hops: tuple[str, ...] = ()
    body: bytes | None = None
    """zlib of the last good text (decoded octets, cut at the limit); None: no file."""
    body_hash: bytes | None = None
    took: float | None = None
    """Seconds the last successful retrieval took."""
    last_page_ok_at: float | None = None
    """When a page of this origin was last reported 2xx or 3xx."""


class ClockRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A promise to a scope: its clock, block and back-off."""

    scope: str
    next_at: float
    """Wall seconds before which no request may start."""
    blocked_until: float = 0.0
    block_reason: str = ""
    failures: int = 0
    """Blocks in a row, for the doubling back-off."""
    last_failure_at: float = 0.0
    safe_interval: float = 0.0
    """The interval remembered from the rate that drew a 429; 0: none."""
    paused: bool = False


class HistoryEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One distinct body of an origin and when it was seen."""

    origin: str
    body_hash: bytes
    first_seen: float
    last_seen: float
    outcome: str
    status: int | None
    size: int


class Storage(Protocol):
    """Where promises and policies are kept.

    Loading is asynchronous (a file is read); saving is not: `put_*` return at once and
    the storage writes in batches. `promise` alone is durable against kill -9 when it
    returns: it is appended to the journal before a grant or a report is answered.
    """

    async def open(self) -> None:
        """Open or create. Raises StorageError for a corrupt or foreign file."""

    async def close(self) -> None:
        """Write what is pending and close. Idempotent."""

    async def load_origin(self, origin: str) -> OriginRecord | None:
        """What was last put for that origin, pending writes included."""

    def put_origin(self, record: OriginRecord) -> None:
        """Keep it, in the next batch. A body joins the origin's history."""

    async def load_clocks(self) -> list[ClockRecord]:
        """Every clock kept, journal included; read once at the start."""

    async def load_clock(self, scope: str) -> ClockRecord | None:
        """One scope's clock, pending writes included."""

    def put_clock(self, record: ClockRecord) -> None:
        """Keep it, in the next batch."""

    def promise(self, record: ClockRecord) -> None:
        """Keep it, durable against kill -9 before this returns."""

    def forget_clock(self, scope: str) -> None:
        """Nothing is owed to that scope any more."""

    async def history(self, origin: str) -> list[HistoryEntry]:
        """Distinct bodies of an origin, oldest first."""

    async def body(self, body_hash: bytes) -> bytes | None:
        """The text behind a hash, decompressed; None if it was dropped."""

    async def flush(self) -> None:
        """Return when everything put so far is written."""
