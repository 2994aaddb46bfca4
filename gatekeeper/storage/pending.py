"""What was put and is not yet in the file: the latest record of each key.

Coalescing bounds it by the number of distinct keys; beyond that, while nothing can be
written, the oldest origins are given up (they can be fetched again) and counted. Clocks
never are: a promise outlives everything, and the ledger bounds their number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from gatekeeper.storage.base import ClockRecord, HistoryEntry, OriginRecord, unpack_body

__all__ = ["Batch", "Pending", "Sighting", "overlay", "sighting", "with_hash"]

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

    def joined(self, later: Sighting) -> Sighting:
        """The two as one: nothing else was seen between them."""
        return self._replace(last_seen=max(self.last_seen, later.last_seen))

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
            merged[-1] = merged[-1].joined(seen)
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


@dataclass(frozen=True, slots=True)
class Batch:
    """One transaction's worth."""

    origins: dict[str, OriginRecord]
    sightings: dict[str, list[Sighting]]
    clocks: dict[str, ClockRecord | None]
    """None: the scope is forgotten."""
    sequence: int
    """Everything said of clocks up to here is in this batch, or was before it."""

    def __len__(self) -> int:
        return len(self.origins) + len(self.clocks)

    def body(self, body_hash: bytes) -> bytes | None:
        """A packed body in it; a search, for people's questions only."""
        return _find_body(self.sightings, body_hash)


class Pending:
    """The coalescing buffer. Not thread-safe: its owner holds a lock around every call."""

    def __init__(self, *, max_origins: int, max_bytes: int, versions: int) -> None:
        self._max_origins = max_origins
        self._max_bytes = max_bytes
        self._versions = versions
        self._origins: dict[str, OriginRecord] = {}
        self._sightings: dict[str, list[Sighting]] = {}
        self._clocks: dict[str, ClockRecord | None] = {}
        self._bytes = 0
        self.sequence = 0
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._origins) + len(self._clocks)

    def put_origin(self, record: OriginRecord) -> None:
        """Keep the latest; its body joins those already waiting for this origin."""
        origin = record.origin
        # Popped first: an origin put again is the youngest.
        self._origins.pop(origin, None)
        self._origins[origin] = record
        seen = sighting(record)
        if seen is not None:
            self._see(origin, [seen])
        while len(self._origins) > self._max_origins or self._bytes > self._max_bytes:
            if len(self._origins) <= 1:
                break
            self._give_up_one()

    def put_clock(self, scope: str, record: ClockRecord | None) -> int:
        """Keep the latest; returns its number in the order of all that is said of clocks."""
        self._clocks[scope] = record
        self.sequence += 1
        return self.sequence

    def take(self) -> Batch:
        """Everything, leaving nothing."""
        batch = Batch(self._origins, self._sightings, self._clocks, self.sequence)
        self._origins, self._sightings, self._clocks, self._bytes = {}, {}, {}, 0
        return batch

    def give_back(self, batch: Batch) -> None:
        """A batch that could not be written; what was put since wins over it."""
        newer = self.take()
        self._origins = batch.origins
        self._clocks = batch.clocks
        for origin, seen in batch.sightings.items():
            self._see(origin, seen)
        for origin, seen in newer.sightings.items():
            self._see(origin, seen)
        for record in newer.origins.values():
            self.put_origin(record)
        self._clocks.update(newer.clocks)

    def origin(self, origin: str) -> OriginRecord | None:
        """What is pending for it."""
        return self._origins.get(origin)

    def sightings(self, origin: str) -> list[Sighting]:
        """Bodies pending for it, oldest first."""
        return self._sightings.get(origin, [])

    @property
    def clocks(self) -> dict[str, ClockRecord | None]:
        """What is pending, by scope."""
        return self._clocks

    def body(self, body_hash: bytes) -> bytes | None:
        """A packed body that is pending; a search, for people's questions only."""
        return _find_body(self._sightings, body_hash)

    def _see(self, origin: str, seen: list[Sighting]) -> None:
        before = self._sightings.get(origin, [])
        after = merge(before, seen, self._versions)
        self._sightings[origin] = after
        self._bytes += _weight(after) - _weight(before)

    def _give_up_one(self) -> None:
        """The oldest; one that is off the ladder of failures, where that is soon found."""
        oldest = next(iter(self._origins))
        for tries, (origin, record) in enumerate(self._origins.items()):
            if record.first_unreachable_at is None:
                oldest = origin
                break
            if tries >= _LADDER_TRIES:
                break
        del self._origins[oldest]
        self._bytes -= _weight(self._sightings.pop(oldest, []))
        self.dropped += 1


def _weight(seen: list[Sighting]) -> int:
    return sum(len(one.body) for one in seen if one.body is not None)


def _find_body(sightings: dict[str, list[Sighting]], body_hash: bytes) -> bytes | None:
    for seen in sightings.values():
        for one in seen:
            if one.body_hash == body_hash:
                return one.body
    return None
