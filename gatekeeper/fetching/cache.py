"""The record cache: hot records ready to answer, cold records packed into octets.

A record that is asked for becomes hot. Beyond `cache.hot_records`, or five eighths of
`cache.max_bytes`, the least recently used one goes cold: its moments and its text are packed
into one string of octets. Cold records are evicted, least recently used first, beyond the
remaining bytes. The record of an unreachable origin is a promise not to ask again too soon, so
it is evicted only if a storage has it. Without a storage such promises may take another
`max_bytes`, which is enough for a million dead origins; beyond that the oldest are evicted.

A record is `warm` until its soft expiry. One timer ends that, so that readers of `warm` need no
clock: cheaper than a heap for a flag that is read a million times a second and expires once a
day. The timer is late by about a second, or more with very many records: soft expiry is long
before hard expiry, which `Directory.get` checks exactly.
"""

from __future__ import annotations

import itertools
import logging
import math
import random
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from gatekeeper.clock import Clock, SingleTimer
from gatekeeper.config import Config
from gatekeeper.errors import StorageError
from gatekeeper.fetching.faults import LocalFaults, Uptime
from gatekeeper.fetching.outcomes import (
    GUARD_REFUSALS,
    NO_METADATA,
    Lifetime,
    Metadata,
    Outcome,
    Retrieval,
    fresh_for,
    next_try,
    soft_expiry,
)
from gatekeeper.fetching.records import (
    FileText,
    FileTexts,
    OriginAnswer,
    Record,
    from_stored,
    inflate,
    to_stored,
    tombstone,
)
from gatekeeper.robots import RobotsTxt
from gatekeeper.split_dict import SplitDict
from gatekeeper.storage.base import OriginRecord, Storage

_MIN_SWEEP_SECONDS: Final = 1.0
"""The least seconds between two sweeps over all records."""
_RECORDS_PER_STEP: Final = 1_000
"""Records that are checked in one step of the loop, which takes half a millisecond."""
_RECORDS_PER_EXTRA_SECOND: Final = 10_000
"""Every so many records add one second between two sweeps."""
_STEP_SECONDS: Final = 0.02
"""Seconds between two steps of a sweep."""


class SoftExpiry:
    """Marks records as warm, and ends that by a timer when they are no longer fresh."""

    def __init__(self, records: SplitDict[str, Record], clock: Clock) -> None:
        self.records = records
        self.warm: int = 0
        """The number of warm records."""
        self._clock = clock
        self._timer = SingleTimer(clock, self._sweep)
        self._remaining: Iterator[str] = iter(())
        """The origins that the current sweep has still to check. Each part of the records is
        listed when the sweep reaches it, as a tuple, which the garbage collector ignores."""
        self._sweeping = False
        self._next_expiry = math.inf
        """The earliest soft expiry of the warm records checked by this sweep or added since."""

    def mark_warm(self, record: Record) -> None:
        """Mark a record as warm until its soft expiry."""
        self.warm += not record.warm
        record.warm = True
        moment = record.fresh_until
        self._next_expiry = min(self._next_expiry, moment)
        if moment < self._timer.when - _MIN_SWEEP_SECONDS:
            self._timer.set(max(moment, self._clock.monotonic() + _MIN_SWEEP_SECONDS))

    def retire(self, record: Record) -> None:
        """Mark a record as no longer warm."""
        self.warm -= record.warm
        record.retire()

    def close(self) -> None:
        """Mark every record as no longer warm and cancel the timer."""
        for record in self.records.values():
            record.retire()
        self.warm = 0
        self._remaining, self._sweeping = iter(()), False
        self._timer.cancel()

    def _sweep(self) -> None:
        records, now = self.records, self._clock.monotonic()
        if not self._sweeping:
            self._remaining = (origin for part in records.parts for origin in tuple(part))
            self._next_expiry = math.inf
        earliest = self._next_expiry
        step = [*itertools.islice(self._remaining, _RECORDS_PER_STEP)]
        for origin in step:
            record = records.get(origin)
            if record is None or not record.warm:
                continue
            if (until := record.fresh_until) <= now:
                self.retire(record)
            elif until < earliest:
                earliest = until
        self._next_expiry = earliest
        self._sweeping = len(step) == _RECORDS_PER_STEP
        if self._sweeping:
            self._timer.set(now + _STEP_SECONDS)
        elif self.warm:
            pause = _MIN_SWEEP_SECONDS * (1 + len(records) // _RECORDS_PER_EXTRA_SECOND)
            self._timer.set(max(earliest, now + pause))


_OUTCOMES: Final = tuple(Outcome)
_MAX_SKIPPED: Final = 8
"""Recently used records that are skipped in search of an unused one to evict."""
_OUTCOME_CODES: Final = {outcome: code for code, outcome in enumerate(_OUTCOMES)}
_COLD_RECORD_BYTES: Final = 160
"""Bytes of overhead of a cold record: its key and its entry in a dictionary."""
_HOT_RECORD_BYTES: Final = 700
_HOT_TEXT_BYTES: Final = 300
"""The estimate of a hot record is `_HOT_RECORD_BYTES`; with a text, `_HOT_TEXT_BYTES` more and one
byte per octet of the text, for the packed text and the rules of one agent. The cost of awake texts
is counted separately. Measured with real files."""
_MIN_SHARED_OCTETS: Final = 512
"""From this packed size on, identical texts of cold records are shared. For shorter ones a copy
inside the record is smaller than the reference counting of a shared one."""


_PackedAnswer = tuple[
    int, int | None, float, tuple[str, ...], int, str | None, str | None, Metadata | None
]
"""The fields of an `OriginAnswer`, in their order: the outcome as its index in the enum, the
duration in milliseconds, and None for no metadata."""


def _pack_answer(answer: OriginAnswer) -> _PackedAnswer:
    outcome, status, wall, hops, took, etag, modified, metadata = msgspec.structs.astuple(answer)
    code, milliseconds = _OUTCOME_CODES[outcome], round(took * 1000)
    said = None if metadata == NO_METADATA else metadata
    return code, status, wall, hops, milliseconds, etag, modified, said


def _unpack_answer(packed: _PackedAnswer) -> OriginAnswer:
    code, status, wall, hops, milliseconds, etag, modified, said = packed
    outcome, took = _OUTCOMES[code], milliseconds / 1000
    return OriginAnswer(
        outcome, status, wall, hops, took, etag, modified, NO_METADATA if said is None else said
    )


class _Packed(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The packed form of a record.

    Monotonic moments and durations are integers of milliseconds: half the octets of a float.
    """

    current: _PackedAnswer
    fresh_until: int
    expires: int
    text: bytes | None
    unreachable_since: int | None = None
    step: int = 0
    page_ok: int | None = None
    good: _PackedAnswer | None = None
    """None: the current answer is the good one, or there is no good one."""
    voids: int = 0


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(_Packed)

_Octets = bytes
_Cold = bytes | tuple[bytes, bytes]
"""A packed record with its text inside, or beside it if the text may be shared."""


class RecordCache:
    """Holds every record in memory. The gate reads the hot records directly."""

    def __init__(
        self,
        config: Config,
        *,
        stored: bool,
        expiry: SoftExpiry,
        uptime: Uptime | None = None,
        texts: FileTexts | None = None,
    ) -> None:
        """`expiry`: its dictionary of records, still empty, becomes that of the hot records.
        `stored`: True if a storage has every record, so that any record may be evicted."""
        self._expiry = expiry
        self.texts: FileTexts = FileTexts(config) if texts is None else texts
        self.evicted: int = 0
        """Cold records evicted so far."""
        self._config = config
        self._max_hot_bytes = max(1, config.cache.max_bytes * 5 // 8)
        self._stored = stored
        self._uptime = Uptime() if uptime is None else uptime
        self._hot: SplitDict[str, Record] = expiry.records
        """In the order in which they were added, or last found in use by the search for an unused
        record."""
        self._hot_bytes = 0
        self._candidates: deque[str] = deque()
        """The next records to consider for going cold."""
        self._cold: SplitDict[str, _Cold] = SplitDict()
        """In the order in which they went cold, which is the order of last use, because using a
        cold record makes it hot."""
        self._promises: SplitDict[str, _Cold] = SplitDict()
        """Cold records of unreachable origins, if there is no storage that has them."""
        self._shared: SplitDict[bytes, tuple[bytes, int]] = SplitDict()
        """Packed text -> (that same object, the number of cold records that hold it)."""
        self._voids = 0
        """How often the guard's refusals were voided: records of earlier ones are ignored."""
        self._cold_bytes = 0
        self._promise_bytes = 0

    def __len__(self) -> int:
        return len(self._hot) + len(self._cold) + len(self._promises)

    @property
    def hot(self) -> int:
        """The number of hot records."""
        return len(self._hot)

    @property
    def bytes(self) -> int:
        """An estimate of the records' memory in bytes."""
        return self._hot_bytes + self.texts.awake_bytes + self._cold_bytes + self._promise_bytes

    def get(self, origin: str) -> Record | None:
        """Return the record of an origin, made hot, or None if there is none."""
        record = self._hot.get(origin)
        if record is not None:
            if record.voids < self._voids and record.current.outcome in GUARD_REFUSALS:
                self.drop(origin)
                return None
            record.questions += 1
        elif self._cold_bytes or self._promise_bytes:
            record = self._restore_cold(origin)
            if record is not None:
                self.put(record)
        return record

    def look(self, origin: str) -> Record | None:
        """Return the record of an origin, a cold one without its text, or None. It changes nothing,
        so it may be called in another thread."""
        record, cold = self._hot.get(origin), self._cold.get(origin) or self._promises.get(origin)
        if record is None and cold is not None:
            packed = _DECODER.decode(cold if isinstance(cold, bytes) else cold[0])
            record = self._from_packed(origin, msgspec.structs.replace(packed, text=None))
            record.voids = packed.voids
        refused = record is not None and record.current.outcome in GUARD_REFUSALS
        return None if refused and record and record.voids < self._voids else record

    def put(self, record: Record) -> None:
        """Add a record, replacing that of the same origin."""
        origin, hot = record.origin, self._hot
        record.voids = self._voids
        if self._cold_bytes or self._promise_bytes:
            self._remove_cold(origin)
        if record.text is not None:
            self.texts.hold(record.text)  # before the old record releases it
        old = hot.replace(origin, record)
        if old is not None:
            self._account_removed(old, still=old is record)
        if record.policy_only:
            self._expiry.mark_warm(record)
        self._hot_bytes += _hot_bytes_of(record)
        while hot.size > self._config.cache.hot_records or (
            self._hot_bytes > self._max_hot_bytes and hot.size > 1
        ):
            self._make_cold(self._unused_origin(origin))

    def _remove_hot(self, origin: str) -> None:
        """Remove the record of an origin from the hot ones."""
        record = self._hot.take(origin)
        if record is not None:
            self._account_removed(record)

    def _account_removed(self, record: Record, *, still: bool = False) -> None:
        """Account for a record that left the hot ones; `still`: it was put in again."""
        if not still:
            self._expiry.retire(record)
        self._hot_bytes -= _hot_bytes_of(record)
        if record.text is not None:
            self.texts.release(record.text)

    def _unused_origin(self, kept: str) -> str:
        """Return the origin of a hot record that was not used lately; not `kept`, if there is
        another one.

        A record that was used since it was last considered moves to the end. After `_MAX_SKIPPED`
        such records the next one is returned even if it is in use.
        """
        hot, candidates = self._hot, self._candidates
        chances = _MAX_SKIPPED
        while True:
            if not candidates:
                candidates.extend(hot.oldest())
            origin = candidates.popleft()
            record = hot.get(origin)
            if record is None or origin == kept:
                continue
            if not chances or not record.questions:
                return origin
            chances -= 1
            record.questions = 0
            hot.replace(origin, record)

    def drop(self, origin: str) -> None:
        """Remove the record of an origin."""
        self._remove_hot(origin)
        self._remove_cold(origin)

    def void_refusals(self) -> None:
        """Discard every record of a fetch that the guard refused, as its settings have changed.

        Each is discarded when it is next asked for: checking hundreds of thousands now would
        block the loop. None of them is warm.
        """
        self._voids += 1

    def _make_cold(self, origin: str) -> None:
        """Pack a hot record and move it to the cold ones, or to the promises."""
        record = self._hot[origin]
        packed = self._pack(record)
        self._remove_hot(origin)
        if record.reachable or self._stored:
            self._cold[record.origin] = packed
            self._cold_bytes += _cold_bytes_of(packed)
        else:
            self._promises[record.origin] = packed
            self._promise_bytes += _cold_bytes_of(packed)
        bound = self._config.cache.max_bytes
        while self._cold_bytes > bound // 4 and self._cold:
            self._evict_oldest(self._cold)
        while self._promise_bytes > bound and self._promises:
            self._evict_oldest(self._promises)

    def _evict_oldest(self, tier: SplitDict[str, _Cold]) -> None:
        for origin in tier.oldest():
            self._remove_cold(origin)
            self.evicted += 1

    def _remove_cold(self, origin: str) -> _Packed | None:
        packed = self._cold.take(origin)
        if packed is not None:
            self._cold_bytes -= _cold_bytes_of(packed)
        elif (packed := self._promises.take(origin)) is not None:
            self._promise_bytes -= _cold_bytes_of(packed)
        else:
            return None
        if isinstance(packed, bytes):
            return _DECODER.decode(packed)
        head, text = packed
        held, count = self._shared[text]
        if count > 1:
            self._shared[text] = (held, count - 1)
        else:
            del self._shared[text]
            self._cold_bytes -= len(text)
        return msgspec.structs.replace(_DECODER.decode(head), text=text)

    def _pack(self, record: Record) -> _Cold:
        text = None if record.text is None else record.text.packed()
        if text is None or len(text) < _MIN_SHARED_OCTETS:
            return _encode(_to_packed(record, text))
        held, count = self._shared.get(text, (text, 0))
        if not count:
            self._cold_bytes += len(text)
        self._shared[held] = (held, count + 1)
        return _encode(_to_packed(record, None)), held

    def _restore_cold(self, origin: str) -> Record | None:
        packed = self._remove_cold(origin)
        if packed is None:
            return None
        if packed.voids < self._voids and _OUTCOMES[packed.current[0]] in GUARD_REFUSALS:
            return None
        return self._from_packed(origin, packed)

    def put_octets(self, origin: str, octets: _Octets) -> None:
        """Add a record from `record_octets`, made by another process of this machine."""
        self.put(self._from_packed(origin, _DECODER.decode(octets)))

    def _from_packed(self, origin: str, packed: _Packed) -> Record:
        text: FileText | None = None
        if packed.text is not None:
            text = self.texts.of(inflate(packed.text), packed.text)
        current = _unpack_answer(packed.current)
        good: OriginAnswer | None = current if current.outcome.good else None
        if packed.good is not None:
            good = _unpack_answer(packed.good)
        return Record(
            origin,
            self._config.fetch,
            current=current,
            good=good,
            text=text,
            fresh_until=packed.fresh_until / 1000,
            expires=packed.expires / 1000,
            unreachable_since=_seconds(packed.unreachable_since),
            step=packed.step,
            page_ok=_seconds(packed.page_ok),
            uptime=self._uptime,
        )


def record_octets(record: Record) -> bytes:
    """Return a record with its text as octets. Its monotonic moments are valid for this boot."""
    return _encode(_to_packed(record, None if record.text is None else record.text.packed()))


def _to_packed(record: Record, text: bytes | None) -> _Packed:
    current, good = record.current, record.good
    return _Packed(
        current=_pack_answer(current),
        fresh_until=int(record.fresh_until * 1000),
        expires=int(record.expires * 1000),
        text=text,
        unreachable_since=_milliseconds(record.unreachable_since),
        step=record.step,
        page_ok=_milliseconds(record.page_ok),
        good=None if good is None or good is current else _pack_answer(good),
        voids=record.voids,
    )


def _encode(packed: _Packed) -> bytes:
    # The encoder's result keeps its buffer, which is half as large again as needed.
    return bytes(memoryview(_ENCODER.encode(packed)))


def _milliseconds(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds * 1000)


def _seconds(milliseconds: int | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


def _hot_bytes_of(record: Record) -> int:
    return _HOT_RECORD_BYTES + (0 if record.text is None else _HOT_TEXT_BYTES + record.text.size)


def _cold_bytes_of(packed: _Cold) -> int:
    """Return the bytes of a cold record, without a shared text."""
    return _COLD_RECORD_BYTES + len(packed if isinstance(packed, bytes) else packed[0])


log: Final = logging.getLogger("gatekeeper.fetching")

_RETRY_SECONDS: Final = 1.0
_PAGE_STORE_SECONDS: Final = 3_600.0

_NOT_RECORDED: Final = frozenset(
    {
        Outcome.OURS,
        Outcome.OVERLOADED,
        Outcome.NO_DESCRIPTORS,
        Outcome.STORAGE,
        Outcome.FLEET,
    }
)
_NOT_OF_TARGET: Final = frozenset({Outcome.NOT_MODIFIED, Outcome.TOO_MANY_REDIRECTS})
"""Good outcomes of a redirect that say nothing about the origin it ended at."""
_SITE_ANSWERED: Final = frozenset({Outcome.TLS, Outcome.INVALID_RESPONSE, Outcome.BAD_ENCODING})
"""Failures in which the site sent something, although not a response head."""


def answered(retrieval: Retrieval) -> bool:
    """Return True if a retrieval proves that our own network works.

    A refused connection or a name that does not exist is no evidence either way.
    """
    outcome = retrieval.outcome
    if retrieval.hops:  # the redirecting site has answered
        return True
    if outcome.row.local:
        return False  # a 511 comes from a captive portal
    return outcome.good or retrieval.status is not None or outcome in _SITE_ANSWERED


class RecordUpdates:
    """Makes records of retrievals, caches and stores them, and notifies subscribers of changes.

    No method awaits, so a condition that was checked still holds when it is acted upon.
    """

    def __init__(
        self,
        cache: RecordCache,
        faults: LocalFaults,
        *,
        config: Config,
        clock: Clock,
        rng: random.Random,
        storage: Storage | None,
        on_learnt: Callable[[Record], object],
    ) -> None:
        self._cache = cache
        self._faults = faults
        self._uptime = faults.uptime
        self._config = config
        self._clock = clock
        self._rng = rng
        self._storage = storage
        self._on_learnt = on_learnt
        self._callbacks: list[Callable[[str, RobotsTxt | None, RobotsTxt | None], object]] = []
        self.storage_errors: int = 0

    def apply(
        self, origin: str, retrieval: Retrieval, *, began: float, text: FileText | None = None
    ) -> Record:
        """Record a retrieval that began at that monotonic moment and return the origin's record.

        `text`: the retrieval's body, if it was parsed already.
        """
        outcome = retrieval.outcome
        old = self._cache.get(origin)
        if outcome is Outcome.NOT_MODIFIED and (old is None or old.good is None):
            # The record was dropped during the retrieval.
            outcome = Outcome.NOT_MODIFIED_NOTHING
            retrieval = msgspec.structs.replace(retrieval, outcome=outcome)
        now = self._clock.monotonic()
        if not outcome.good and outcome in _NOT_RECORDED:
            return self._not_recorded(origin, old, outcome, now + _RETRY_SECONDS)  # row 28
        if answered(retrieval):
            self._faults.answered(origin, now)
        if outcome.row.local and self._faults.failed(
            origin,
            began=began,
            now=now,
            undo=lambda: self._restore(origin, old),
            addresses=retrieval.addresses,
        ):
            return self.postponed(origin)
        if outcome.good:
            record = self._good_record(origin, retrieval, old, text)
        else:
            record = self._failed_record(origin, retrieval, old)
        self._save(record)
        self._record_target(origin, retrieval, record.text)
        self._notify(origin, old, record)
        return record

    def _good_record(
        self, origin: str, retrieval: Retrieval, old: Record | None, read: FileText | None
    ) -> Record:
        outcome, text = retrieval.outcome, None
        status, hops, took = retrieval.status, retrieval.hops, retrieval.took
        etag, last_modified = retrieval.etag, retrieval.last_modified
        if outcome is Outcome.NOT_MODIFIED and old is not None and old.good is not None:
            # Row 9. RFC 9111 4.3.4: the stored response stays valid, its metadata are updated.
            text = old.text
            outcome, status = old.good.outcome, old.good.status
            etag = etag or old.good.etag
            last_modified = last_modified or old.good.last_modified
        elif outcome.has_text and retrieval.body is not None:
            texts = self._cache.texts
            text = texts.find(retrieval.body) or read or texts.read(retrieval.body)
        now, wall = self._clock.monotonic(), self._clock.wall()
        metadata = retrieval.metadata
        current = OriginAnswer(outcome, status, wall, hops, took, etag, last_modified, metadata)
        fresh = fresh_for(outcome.row.cache_time, retrieval.lifetime, self._config.cache)
        return Record(
            origin,
            self._config.fetch,
            current=current,
            good=current,
            text=text,
            fresh_until=now + soft_expiry(fresh, self._rng),
            expires=now + fresh,
            page_ok=None if old is None else old.page_ok,
            uptime=self._uptime,
        )

    def _failed_record(self, origin: str, retrieval: Retrieval, old: Record | None) -> Record:
        step, since, outcome = 0, None, retrieval.outcome
        if old is not None and not old.reachable:
            step, since = old.step + 1, old.unreachable_since
        pause = next_try(outcome.row.cache_time, step, self._rng, retry_after=retrieval.retry_after)
        now, wall = self._clock.monotonic(), self._clock.wall()
        return Record(
            origin,
            self._config.fetch,
            current=OriginAnswer(
                outcome,
                retrieval.status,
                wall,
                retrieval.hops,
                retrieval.took,
                metadata=retrieval.metadata if outcome is Outcome.TLS else NO_METADATA,
            ),
            # A failure never overwrites the last good copy.
            good=None if old is None else old.good,
            text=None if old is None else old.text,
            fresh_until=now + pause,
            expires=now + pause,
            unreachable_since=self._faults.uptime(now) if since is None else since,
            step=step,
            page_ok=None if old is None else old.page_ok,
            uptime=self._uptime,
        )

    def temporary(self, origin: str, outcome: Outcome, seconds: float) -> Record:
        """Return a record for one answer, which is not cached: the failure is ours, not the
        site's."""
        until = self._clock.monotonic() + seconds
        return Record(
            origin,
            self._config.fetch,
            current=OriginAnswer(outcome, None, self._clock.wall()),
            fresh_until=until,
            expires=until,
        )

    def postponed(self, origin: str) -> Record:
        """Return the record to answer by during a local fault; nothing is cached."""
        now = self._clock.monotonic()
        retry_at = self._faults.retry_at(now)
        return self._not_recorded(origin, self._cache.get(origin), Outcome.LOCAL_FAULT, retry_at)

    def _not_recorded(
        self, origin: str, old: Record | None, outcome: Outcome, retry_at: float
    ) -> Record:
        now = self._clock.monotonic()
        if old is not None and old.usable(now):
            # The record may still answer, but should not start a flight with every question.
            old.fresh_until = min(max(old.fresh_until, retry_at), max(old.expires, now))
            return old
        return self.temporary(origin, outcome, retry_at - now)

    def _save(self, record: Record) -> None:
        self._on_learnt(record)  # the callback may extend the record's life
        self._cache.put(record)
        self._store(record)

    def _restore(self, origin: str, old: Record | None) -> None:
        """Undo a recorded failure that turned out to be ours, not the site's."""
        if old is None:
            self._cache.drop(origin)
            self.forget(origin)
        else:
            self._save(old)

    def _record_target(self, origin: str, retrieval: Retrieval, text: FileText | None) -> None:
        """After a redirect that ended at another origin's /robots.txt, record that origin too.

        Only if that URL itself answered with a file or a definite absence: B's record is never
        made from a text that A chose (T14).
        """
        outcome = retrieval.outcome
        if not retrieval.hops or not outcome.good or outcome in _NOT_OF_TARGET:
            return
        other = _robots_txt_origin(retrieval.url)
        if other is None or other == origin:
            return
        old = self._cache.get(other)
        if old is not None and self._clock.monotonic() < old.fresh_until:
            return
        direct = msgspec.structs.replace(retrieval, hops=())
        record = self._good_record(other, direct, old, text)
        self._save(record)
        self._notify(other, old, record)

    def known(self, origin: str) -> Retrieval | None:
        """Return a fresh record as the retrieval that would have given it, or None."""
        record = self._cache.get(origin)
        now = self._clock.monotonic()
        if record is None or now >= record.fresh_until:
            return None
        current = record.current
        left = record.expires - now
        return Retrieval(
            outcome=current.outcome,
            status=current.status,
            hops=current.hops,
            body=None if record.text is None or not record.reachable else record.text.body(),
            etag=current.etag,
            last_modified=current.last_modified,
            lifetime=Lifetime(left),
            metadata=current.metadata,
            # Its ladder, and its Retry-After, apply to an origin that redirects there.
            retry_after=None if record.reachable else left,
        )

    def note_page(self, origin: str) -> None:
        """Note that a page of the origin was fetched; stored only while its file is unreachable."""
        record = self._cache.get(origin)
        if record is None or record.reachable:
            return
        now = self._clock.monotonic()
        noted = record.page_ok
        record.page_ok = now
        if noted is None or now - noted >= _PAGE_STORE_SECONDS:
            self._store(record)

    def subscribe(
        self, callback: Callable[[str, RobotsTxt | None, RobotsTxt | None], object]
    ) -> Callable[[], None]:
        """Add a callback for changes of an origin's text. Return a function that removes it."""
        self._callbacks.append(callback)

        def unsubscribe() -> None:
            if callback in self._callbacks:
                self._callbacks.remove(callback)

        return unsubscribe

    def _notify(self, origin: str, old: Record | None, new: Record) -> None:
        if not self._callbacks or not new.reachable or old is None or old.good is None:
            return
        before, after = old.text, new.text
        if before is after or (before and after and after.same_as(before.body())):
            return
        for callback in tuple(self._callbacks):
            try:
                callback(
                    origin,
                    None if before is None else before.robots,
                    None if after is None else after.robots,
                )
            except Exception:
                log.exception("a subscriber failed on the change of %s", origin)

    def _store(self, record: Record) -> None:
        if self._storage is None:
            return
        try:
            self._storage.put_origin(to_stored(record, self._clock))
        except StorageError as error:
            self.storage_errors += 1
            log.warning("the record of %s can't be stored: %s", record.origin, error)

    def forget(self, origin: str) -> None:
        """Overwrite the stored record of an origin with a tombstone."""
        if self._storage is not None:
            self._storage.put_origin(tombstone(origin))

    def restore(self, stored: OriginRecord, text: FileText | None = None) -> Record | None:
        """Add a stored record to the cache and return it, or None if it can't be used.

        `text`: that of its body, if it was parsed already.
        """
        try:
            record = from_stored(
                stored,
                config=self._config,
                clock=self._clock,
                texts=self._cache.texts,
                read=text,
                uptime=self._uptime,
            )
        except (zlib.error, ValueError) as error:
            self.storage_errors += 1
            log.warning("the stored record of %s is damaged: %s", stored.origin, error)
            return None
        if record is not None:
            self._cache.put(record)
        return record


def _robots_txt_origin(url: str) -> str | None:
    """Return the origin whose /robots.txt the URL is, or None if it is another URL."""
    origin, sep, rest = url.rpartition("/robots.txt")
    return origin if sep and not rest and origin.count("/") == 2 else None
