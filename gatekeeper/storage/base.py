"""What outlives the process: the `Storage` protocol and the records it keeps.

Moments are wall-clock seconds, since monotonic time means nothing after a restart. As the
wall clock may be set meanwhile, each record says as well when it was written, by the wall and
by the machine's own count (`clock.Stamp`): from those two its moments are read.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import msgspec

from gatekeeper.errors import StorageError

MAX_TEXT = 64 * 1024 * 1024
"""No body is inflated beyond this many bytes, whatever a tampered file holds."""


NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
"""System errors that end by themselves once there is space, or the disk is well."""


class DiskFull(StorageError):
    """The state can't be opened for the want of space, or since its disk fails: try again."""


class OriginRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one origin's robots.txt: two slots and the ladder.

    *current* is what the latest attempt came to; *last good* is the last answer that
    was a file or a definite absence. A failure never overwrites the last good copy.
    """

    origin: str
    outcome: str
    """Row of the latest attempt, by its name in the table of outcomes."""
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
    """SHA-256 of that text. A storage fills it in where a body comes without."""
    took: float | None = None
    """Seconds the last successful retrieval took."""
    last_page_ok_at: float | None = None
    """When a page of this origin was last reported 2xx or 3xx."""
    made_at: float | None = None
    """Wall seconds at which this was written; None: by a version that did not say."""
    boot_id: str = ""
    """Which start of the machine that was in, and ..."""
    boot_at: float = 0.0
    """... how many seconds after it. See `clock.Stamp`."""


class ClockRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
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
    """The interval in force after a 429 or 503; 0: the usual one."""
    paused: bool = False
    errors: int = 0
    """Failures in a row that were no blocks: what slows us after them."""
    latency: float | None = None
    """Seconds until answers begin, smoothed; None: not measured."""
    said_interval: float = 0.0
    """Seconds between requests that a RateLimit field asked for ..."""
    said_until: float = 0.0
    """... and the wall seconds until which it did."""
    made_at: float | None = None
    """Wall seconds at which this was written; None: by a version that did not say."""
    boot_id: str = ""
    """Which start of the machine that was in, and ..."""
    boot_at: float = 0.0
    """... how many seconds after it. See `clock.Stamp`."""
    refused_interval: float = 0.0
    """The interval that drew it; 0: an earlier version did not keep it ..."""
    refused_at: float = 0.0
    """... nor the wall seconds at which it came ..."""
    refused_status: int = 0
    """... nor its status ..."""
    retry_wait: float = 0.0
    """... nor the seconds after which that interval is tried again."""
    day_at: float = 0.0
    """Wall seconds of the first page of the day; 0: the scope has no budget ..."""
    day_pages: int = 0
    """... and the pages since then ..."""
    day_bytes: int = 0
    """... and their bytes."""


class HistoryEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One body of an origin and when it was seen.

    A body that comes back after another one is an entry of its own, so that a moment has
    one answer. A definite absence (4xx) is an entry too, with an empty `body_hash`.
    """

    origin: str
    body_hash: bytes
    first_seen: float
    last_seen: float
    outcome: str
    status: int | None
    size: int
    """Bytes of the text."""


class StorageStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since `open`, and what is pending now."""

    pending: int = 0
    """Records put and not yet written."""
    written: int = 0
    """Records written, in `batches` transactions."""
    batches: int = 0
    failed_batches: int = 0
    """Transactions that failed and are tried again (a full disk, for one)."""
    last_error: str | None = None
    """Why the last transaction failed; None while all is well."""
    dropped: int = 0
    """Records given up because too many were pending while nothing could be written."""
    rejected: int = 0
    """Records that the database refused by themselves."""
    promises: int = 0
    unjournaled: int = 0
    """Promises that could not be appended to the journal: kept in memory and in the next
    batch, but not safe from kill -9 until then."""
    failing: str | None = None
    """Why the journal takes no promises now."""
    journal_bytes: int = 0
    replayed: int = 0
    """Promises taken over from the journal of an earlier process."""
    damaged: int = 0
    """Journal bytes skipped at the start: the torn tail of a process that was killed."""
    history_bytes: int = 0


def pack_body(text: bytes) -> tuple[bytes, bytes]:
    """A text as `OriginRecord` wants it: `(body, body_hash)`.

    >>> body, digest = pack_body(b"User-agent: *")
    >>> unpack_body(body), len(digest)
    (b'User-agent: *', 32)
    """
    return zlib.compress(text), hashlib.sha256(text).digest()


def unpack_body(body: bytes) -> bytes:
    """The text of a packed body, cut at 64 MiB. Raises zlib.error if it is damaged."""
    unpacker = zlib.decompressobj()
    text = unpacker.decompress(body, MAX_TEXT)
    if not unpacker.eof and len(text) < MAX_TEXT:
        # Half a file holds half the rules: it must not pass for the whole (promise 2).
        raise zlib.error("the body ends too soon")
    return text


class Storage(Protocol):
    """Where promises and policies are kept.

    Loading is asynchronous (a file is read); saving is not: `put_*` return at once and
    the storage writes in batches, the latest record of an origin or scope winning.
    `promise` alone is durable against kill -9 when it returns: it is appended to the
    journal before a grant or a report is answered. All calls come from the thread of the
    loop that opened it.
    """

    async def open(self) -> None:
        """Open or create. Raises StorageError for a file that can't or must not be used."""

    async def close(self) -> None:
        """Write what is pending and close. Idempotent; a failed last write is logged."""

    async def load_origin(self, origin: str) -> OriginRecord | None:
        """What was last put for that origin, pending writes included.

        Raises StorageError when the file can't be read.
        """

    def put_origin(self, record: OriginRecord) -> None:
        """Keep it, in the next batch. A body joins the origin's history."""

    async def load_clocks(self) -> list[ClockRecord]:
        """Every clock kept, journal included; read once at the start."""

    async def load_clock(self, scope: str) -> ClockRecord | None:
        """One scope's clock, pending writes included."""

    def load_clock_nowait(self, scope: str) -> ClockRecord | None:
        """`load_clock` for callers that can't wait: one look into the file at most.

        Raises StorageError when the file can't be read.
        """

    def put_clock(self, record: ClockRecord) -> None:
        """Keep it, in the next batch."""

    def promise(self, record: ClockRecord) -> None:
        """Keep it, durable against kill -9 before this returns.

        Raises StorageError where that can't be (a full disk, for one): it is kept in memory
        then, and made durable as soon as that is possible. Whoever may still refuse what it
        was about has to. With `storage.on_failure = "continue"` it is only counted, as
        `unjournaled`.
        """

    def owe(self, record: ClockRecord) -> None:
        """`promise` what came of an answer, and is in force whatever happens: room is held back
        for it on a disk that fills up. Raises StorageError."""

    @property
    def failing(self) -> str | None:
        """Why promises can't be made durable now; None: they can, or need not be."""

    @property
    def exhausted(self) -> bool:
        """Whether that is so for `owe` as well."""

    def watch(self, told: Callable[[], None]) -> None:
        """Have `told` called, in the loop that runs now, whenever `failing` begins to hold a
        reason; the latest `told` alone."""

    def forget_clock(self, scope: str) -> None:
        """Nothing is owed to that scope any more."""

    async def history(self, origin: str) -> list[HistoryEntry]:
        """The bodies of an origin, oldest first, pending ones included."""

    async def body(self, body_hash: bytes) -> bytes | None:
        """The text behind a hash, decompressed; None if it was dropped."""

    async def flush(self) -> None:
        """Return when everything put so far is written. Raises StorageError if it can't be."""

    def stats(self) -> StorageStats:
        """What was written, what is pending, what failed."""


# --- records that are not yet in the file ----------------------------------------------------

_LADDER_TRIES = 16


class Sighting(NamedTuple):
    """A body (or a definite absence) as it stood at an origin for a while."""

    body_hash: bytes
    """Empty: there was no file."""
    body: bytes | None
    first_seen: float
    last_seen: float
    outcome: str
    status: int | None

    def entry(self, origin: str) -> HistoryEntry:
        """As the history tells it."""
        return HistoryEntry(
            origin=origin,
            body_hash=self.body_hash,
            first_seen=self.first_seen,
            last_seen=self.last_seen,
            outcome=self.outcome,
            status=self.status,
            size=0 if self.body is None else len(unpack_body(self.body)),
        )


def sighting(record: OriginRecord) -> Sighting | None:
    """What a record adds to the history: its last good slot, if there ever was one."""
    if record.body is None and record.body_hash is None and record.good_outcome is None:
        return None
    seen = record.fetched_at if record.good_fetched_at is None else record.good_fetched_at
    return Sighting(
        record.body_hash or b"",
        record.body,
        seen,
        seen,
        record.good_outcome or record.outcome,
        record.good_status if record.good_outcome is not None else record.status,
    )


def with_hash(record: OriginRecord) -> OriginRecord:
    """The record with its body's hash; a body without one gets it."""
    if record.body is None or record.body_hash is not None:
        return record
    digest = hashlib.sha256(unpack_body(record.body)).digest()
    return msgspec.structs.replace(record, body_hash=digest)


def merge(earlier: list[Sighting], later: Iterable[Sighting], limit: int) -> list[Sighting]:
    """One after the other, equal neighbours joined, the newest `limit` kept."""
    merged = list(earlier)
    for seen in later:
        if merged and merged[-1].body_hash == seen.body_hash:
            last = max(merged[-1].last_seen, seen.last_seen)
            merged[-1] = merged[-1]._replace(last_seen=last)
        else:
            merged.append(seen)
    return merged[-limit:]


def overlay(entries: list[HistoryEntry], origin: str, seen: list[Sighting]) -> list[HistoryEntry]:
    """The history with sightings that are not yet in the file."""
    entries = list(entries)
    for one in seen:
        if entries and entries[-1].body_hash == one.body_hash:
            last = max(entries[-1].last_seen, one.last_seen)
            entries[-1] = msgspec.structs.replace(entries[-1], last_seen=last)
        else:
            entries.append(one.entry(origin))
    return entries


@dataclass(slots=True)
class WriteBatch:
    """One transaction's worth."""

    origins: dict[str, OriginRecord] = field(default_factory=dict)
    sightings: dict[str, list[Sighting]] = field(default_factory=dict)
    clocks: dict[str, ClockRecord | None] = field(default_factory=dict)
    """None: the scope is forgotten."""
    sequence: int = 0
    """Everything said of clocks up to here is in this batch, or was before it."""

    def __len__(self) -> int:
        return len(self.origins) + len(self.clocks)

    def body(self, body_hash: bytes) -> bytes | None:
        """A packed body in it; a search, for people's questions only."""
        every = itertools.chain.from_iterable(self.sightings.values())
        return next((one.body for one in every if one.body_hash == body_hash), None)


class Pending(WriteBatch):
    """What was put and is not yet in the file: the latest record of each key.

    That bounds it by the number of distinct keys. Beyond `max_origins` records or `max_bytes`
    of bodies, while nothing can be written, the oldest origins are given up (they can be
    fetched again) and counted in `dropped`. Clocks never are, and the ledger bounds their
    number. Not thread-safe: its owner holds a lock around every call.
    """

    # Said once more, as pyright wants it of a class that assigns to what it inherits.
    origins: dict[str, OriginRecord]
    sightings: dict[str, list[Sighting]]
    clocks: dict[str, ClockRecord | None]
    sequence: int

    def __init__(self, *, max_origins: int, max_bytes: int, versions: int) -> None:
        super().__init__()
        self._max_origins = max_origins
        self._max_bytes = max_bytes
        self._versions = versions
        self._bytes = 0
        self.dropped: int = 0

    def put_origin(self, record: OriginRecord) -> None:
        """Keep the latest; its body joins those already waiting for this origin."""
        origin = record.origin
        # Popped first: an origin put again is the youngest.
        self.origins.pop(origin, None)
        self.origins[origin] = record
        seen = sighting(record)
        if seen is not None:
            self._see(origin, [seen])
        while len(self.origins) > self._max_origins or self._bytes > self._max_bytes:
            if len(self.origins) <= 1:
                break
            self._give_up_one()

    def put_clock(self, scope: str, record: ClockRecord | None) -> int:
        """Keep the latest; returns its number in the order of all that is said of clocks."""
        self.clocks[scope] = record
        self.sequence += 1
        return self.sequence

    def take(self) -> WriteBatch:
        """Everything, leaving nothing."""
        batch = WriteBatch(self.origins, self.sightings, self.clocks, self.sequence)
        self.origins, self.sightings, self.clocks, self._bytes = {}, {}, {}, 0
        return batch

    def give_back(self, batch: WriteBatch) -> None:
        """A batch that could not be written; what was put since wins over it."""
        newer = self.take()
        self.origins = batch.origins
        self.clocks = batch.clocks
        for origin, seen in batch.sightings.items():
            self._see(origin, seen)
        self.put_later(newer)

    def put_later(self, newer: WriteBatch) -> None:
        """What was put after all that is here: it wins."""
        for origin, seen in newer.sightings.items():
            self._see(origin, seen)
        for record in newer.origins.values():
            self.put_origin(record)
        self.clocks.update(newer.clocks)

    def _see(self, origin: str, seen: list[Sighting]) -> None:
        before = self.sightings.get(origin, [])
        after = merge(before, seen, self._versions)
        self.sightings[origin] = after
        self._bytes += _weight(after) - _weight(before)

    def _give_up_one(self) -> None:
        """The oldest; one that is off the ladder of failures, where that is soon found."""
        oldest = next(iter(self.origins))
        for tries, (origin, record) in enumerate(self.origins.items()):
            if record.first_unreachable_at is None:
                oldest = origin
                break
            if tries >= _LADDER_TRIES:
                break
        del self.origins[oldest]
        self._bytes -= _weight(self.sightings.pop(oldest, []))
        self.dropped += 1


def _weight(seen: list[Sighting]) -> int:
    return sum(len(one.body) for one in seen if one.body is not None)
