"""The `Storage` protocol, the records that it stores, and the buffer of pending writes.

Moments are wall-clock seconds, because monotonic time has no meaning after a restart. As the
wall clock may be set meanwhile, each record also has the time at which it was written, by the
wall clock and by the machine's boot (`clock.Stamp`): its moments are interpreted by those two.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from gatekeeper.errors import StorageError

MAX_TEXT = 64 * 1024 * 1024
"""No body is decompressed beyond this many bytes, even if the file was tampered with."""


NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
"""System errors that resolve once there is space, or the disk works again."""


class DiskFull(StorageError):
    """The file can't be opened because the disk is full or failing: retry later."""


class OriginRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What is known about one origin's robots.txt: two slots, and the ladder of failures.

    *current* is the outcome of the latest attempt; *last good* is the latest response that
    was a file or a definite absence. A failure never overwrites the last good copy.
    """

    origin: str
    outcome: str
    """The latest attempt's outcome, by its name in the table of outcomes."""
    state: str
    """The `State` value of the latest attempt."""
    status: int | None = None
    fetched_at: float
    """Wall seconds of the latest attempt."""
    soft_expires_at: float
    expires_at: float
    """Hard expiry of the latest attempt, or the time of the next rung of the ladder."""
    first_unreachable_at: float | None = None
    """Wall seconds of the first failure in a row; None: not on the ladder."""
    ladder_step: int = 0
    hops: tuple[str, ...] = ()
    etag: str | None = None
    last_modified: str | None = None
    good_outcome: str | None = None
    good_status: int | None = None
    good_fetched_at: float | None = None
    good_hops: tuple[str, ...] = ()
    body: bytes | None = None
    """The last good text, compressed with zlib (decoded, cut at the limit); None: no file."""
    body_hash: bytes | None = None
    """SHA-256 of that text. It is computed if it is not given with a body."""
    took: float | None = None
    """Seconds that the last successful retrieval took."""
    last_page_ok_at: float | None = None
    """Wall seconds at which a page of this origin was last reported with 2xx or 3xx."""
    made_at: float | None = None
    """Wall seconds at which the record was written; None: an earlier version did not store it."""
    boot_id: str = ""
    """The machine's boot during which it was written; see `clock.Stamp`."""
    boot_at: float = 0.0
    """Seconds from that boot to the writing."""
    metadata: str = ""
    """The `Metadata` of the last good response, as JSON; empty: none."""

    def __post_init__(self) -> None:
        if self.body is not None and self.body_hash is None:
            digest = hashlib.sha256(unpack_body(self.body)).digest()
            msgspec.structs.force_setattr(self, "body_hash", digest)


class ClockRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The promises made to a scope: its clock, block, back-off and budget."""

    scope: str
    next_at: float
    """Wall seconds before which no request may start."""
    blocked_until: float = 0.0
    block_reason: str = ""
    failures: int = 0
    """Blocks in a row, for the doubling back-off."""
    last_failure_at: float = 0.0
    safe_interval: float = 0.0
    """Seconds of the interval in force after a 429 or 503; 0: the usual interval."""
    paused: bool = False
    errors: int = 0
    """Failures in a row that caused no block; they slow the scope down."""
    latency: float | None = None
    """Smoothed seconds until a response begins; None: not measured."""
    said_interval: float = 0.0
    """Seconds between requests that a RateLimit field asked for; 0: none did."""
    said_until: float = 0.0
    """Wall seconds until which that interval holds."""
    made_at: float | None = None
    """Wall seconds at which the record was written; None: an earlier version did not store it."""
    boot_id: str = ""
    """The machine's boot during which it was written; see `clock.Stamp`."""
    boot_at: float = 0.0
    """Seconds from that boot to the writing."""
    refused_interval: float = 0.0
    """The interval that drew the 429 or 503; 0: not stored by an earlier version."""
    refused_at: float = 0.0
    """Wall seconds at which that response arrived; 0: not stored by an earlier version."""
    refused_status: int = 0
    """The status of that response; 0: not stored by an earlier version."""
    retry_wait: float = 0.0
    """Seconds until the refused interval is tried again; 0: not stored by an earlier version."""
    day_at: float = 0.0
    """Wall seconds of the first page of the budget's day; 0: the scope has no budget."""
    day_pages: int = 0
    """Pages since `day_at`."""
    day_bytes: int = 0
    """Bytes of those pages."""
    interval: float | None = None
    """Seconds in force after the last request, which `next_at` includes; None: not known."""
    in_flight: bool = False
    """A lease was open whose response had not begun."""


_EARLIER_REASON = re.compile(
    r"(in flight, )?interval (\d+(?:\.\d+)?(?:e[+-]?\d+)?)(?:; (.*))?\Z", re.DOTALL | re.ASCII
)


def from_earlier(record: ClockRecord) -> ClockRecord:
    """Return the record of an earlier version, up to schema 7, with its interval in its field: it
    was the start of the reason. A present record is returned as it is.

    >>> found = from_earlier(ClockRecord(scope="a", next_at=1.0, block_reason="interval 2.0; 429"))
    >>> found.interval, found.block_reason
    (2.0, '429')
    """
    found = _EARLIER_REASON.match(record.block_reason) if record.interval is None else None
    if found is None:
        return record
    return msgspec.structs.replace(
        record, interval=float(found[2]), in_flight=bool(found[1]), block_reason=found[3] or ""
    )


class HistoryEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One body of an origin, and from when to when it was seen.

    A body that returns after another one gets a new entry, so that each moment has one
    answer. A definite absence (4xx) is an entry too, with an empty `body_hash`.
    """

    origin: str
    body_hash: bytes
    first_seen: float
    last_seen: float
    outcome: str
    status: int | None
    size: int
    """The text's size in bytes."""


def pack_body(text: bytes) -> tuple[bytes, bytes]:
    """Return a text's `(body, body_hash)` for an `OriginRecord`: compressed text and SHA-256.

    >>> body, digest = pack_body(b"User-agent: *")
    >>> unpack_body(body), len(digest)
    (b'User-agent: *', 32)
    """
    return zlib.compress(text), hashlib.sha256(text).digest()


def unpack_body(body: bytes) -> bytes:
    """Return the text of a packed body, cut at 64 MiB. Raises zlib.error if it is damaged."""
    unpacker = zlib.decompressobj()
    text = unpacker.decompress(body, MAX_TEXT)
    if not unpacker.eof and len(text) < MAX_TEXT:
        # A truncated file has only some of the rules: it must not pass for the whole file.
        raise zlib.error("the body ends too soon")
    return text


class Storage(Protocol):
    """Stores promises and policies beyond the life of the process.

    Loading is asynchronous (it reads a file). Saving is not: `put_*` return immediately, and
    the storage writes batches with the latest record of each origin and scope. Only
    `promise` is durable against kill -9 when it returns: it appends to the journal before a
    grant or a report is answered. All calls come from the thread of the loop that opened the
    storage.
    """

    async def open(self) -> None:
        """Open or create the file. Raises StorageError if it can't or must not be used."""

    async def close(self) -> None:
        """Write what is pending and close. Idempotent; a failed last write is logged."""

    async def load_origin(self, origin: str) -> OriginRecord | None:
        """Return the latest record of an origin, pending writes included, or None.

        Raises StorageError if the file can't be read.
        """

    def put_origin(self, record: OriginRecord) -> None:
        """Store a record with the next batch. Its body is added to the origin's history."""

    async def load_clocks(self) -> list[ClockRecord]:
        """Return every stored clock, the journal's included; called once at the start."""

    async def load_clock(self, scope: str) -> ClockRecord | None:
        """Return the clock of a scope, pending writes included, or None."""

    def load_clock_nowait(self, scope: str) -> ClockRecord | None:
        """`load_clock` for callers that can't await: reads one row of the file at most.

        Raises StorageError if the file can't be read.
        """

    def put_clock(self, record: ClockRecord) -> None:
        """Store a clock with the next batch."""

    def promise(self, record: ClockRecord) -> None:
        """Store a clock, durable against kill -9 before this returns.

        Raises StorageError if that is impossible (a full disk, for example). The record then
        stays in memory and is made durable as soon as possible, and a caller that can still
        refuse the request must do so. With `storage.on_failure = "continue"` it is only logged.
        """

    def owe(self, record: ClockRecord) -> None:
        """`promise` for a clock that follows from a response and is in force in any case.

        Space is reserved for such promises on a disk that fills up. Raises StorageError.
        """

    @property
    def failing(self) -> str | None:
        """Why promises can't be made durable now; None if they can, or need not be."""

    @property
    def exhausted(self) -> bool:
        """True if `owe` fails as well as `promise`."""

    def watch(self, callback: Callable[[], None]) -> None:
        """Set the callback that is called, in the currently running loop, whenever `failing`
        changes from None to a reason. It replaces an earlier one."""

    def forget_clock(self, scope: str) -> None:
        """Delete the clock of a scope, to which nothing is owed any more."""

    async def history(self, origin: str) -> list[HistoryEntry]:
        """Return the history of an origin, oldest first. Pending entries are included, unless they
        can't be written."""

    async def body(self, body_hash: bytes) -> bytes | None:
        """Return the decompressed text with a hash from `history`, or None if it was dropped."""

    async def flush(self) -> None:
        """Return when everything put so far is written. Raises StorageError if that fails."""


# --- records that are not yet in the file ----------------------------------------------------

_MAX_LADDER_SKIPS = 16


@dataclass(slots=True)
class WriteBatch:
    """The records of one transaction."""

    origins: dict[str, list[OriginRecord]] = field(default_factory=dict)
    """The latest record of each origin, after earlier ones that its history needs."""
    clocks: dict[str, ClockRecord | None] = field(default_factory=dict)
    """The latest clock of each scope; None deletes it."""
    sequence: int = 0
    """Number of the latest change of a clock in this or an earlier batch; see `put_clock`."""

    def __len__(self) -> int:
        return len(self.origins) + len(self.clocks)


@dataclass(slots=True, kw_only=True)
class Pending(WriteBatch):
    """The records that are not yet in the file: the latest of each key.

    The number of distinct keys bounds it. Beyond `max_origins` records or `max_bytes` of
    bodies, while nothing can be written, the oldest origins are dropped (they can be fetched
    again). Clocks are never dropped; the ledger bounds their number.
    Not thread-safe: the owner holds a lock around every call.
    """

    max_origins: int
    max_bytes: int
    versions: int
    """Bodies of one origin that its history keeps."""
    _bytes: int = 0

    def put_origin(self, record: OriginRecord) -> None:
        """Add a record, the latest of its origin."""
        # Popped first, so that an origin that is put again becomes the newest.
        records = self.origins.pop(record.origin, [])
        self._bytes -= _body_bytes(records)
        # Of records with the same body in a row, the first and the latest tell when it was seen.
        if [one.body_hash for one in records[-2:]] == [record.body_hash] * 2:
            del records[-1]
        records.append(record)
        del records[: -2 * self.versions]
        self.origins[record.origin] = records
        self._bytes += _body_bytes(records)
        while len(self.origins) > self.max_origins or self._bytes > self.max_bytes:
            if len(self.origins) <= 1:
                break
            self._drop_oldest()

    def put_clock(self, scope: str, record: ClockRecord | None) -> int:
        """Set or delete (None) a scope's clock. Return the number of this change among all
        changes of clocks."""
        self.clocks[scope] = record
        sequence = self.sequence + 1
        self.sequence: int = sequence
        return sequence

    def drain(self) -> WriteBatch:
        """Remove all records and return them as a batch."""
        batch = WriteBatch(self.origins, self.clocks, self.sequence)
        self.origins: dict[str, list[OriginRecord]] = {}
        self.clocks: dict[str, ClockRecord | None] = {}
        self._bytes = 0
        return batch

    def put_back(self, batch: WriteBatch) -> None:
        """Put back a batch that could not be written; records put since then take precedence."""
        for each in (batch, self.drain()):
            for record in itertools.chain.from_iterable(each.origins.values()):
                self.put_origin(record)
            self.clocks.update(each.clocks)

    def _drop_oldest(self) -> None:
        """Drop the oldest origin that is not on the ladder of failures, or after a short search
        just the oldest one."""
        first = [*itertools.islice(self.origins.items(), _MAX_LADDER_SKIPS)]
        reachable = (name for name, records in first if records[-1].first_unreachable_at is None)
        self._bytes -= _body_bytes(self.origins.pop(next(reachable, first[0][0])))


def _body_bytes(records: list[OriginRecord]) -> int:
    return sum(len(one.body) for one in records if one.body is not None)
