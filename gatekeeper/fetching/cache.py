"""The record cache, and the records of retrievals that are put into it.

Beyond `cache.hot_records`, or seven eighths of `cache.max_bytes`, the least recently used record is
evicted. The record of an unreachable origin is a promise not to ask again too soon: without a
storage that has it too, it is set aside instead. Such promises may take another `max_bytes`, which
is enough for a million dead origins; beyond that the oldest are evicted.
"""

from __future__ import annotations

import logging
import random
import zlib
from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec

from gatekeeper.clock import Clock
from gatekeeper.config import Config
from gatekeeper.errors import StorageError
from gatekeeper.fetching.faults import LocalFaults, Uptime
from gatekeeper.fetching.outcomes import (
    GUARD_REFUSALS,
    NO_METADATA,
    Lifetime,
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
    to_stored,
    tombstone,
)
from gatekeeper.robots import RobotsTxt
from gatekeeper.split_dict import SplitDict
from gatekeeper.storage.base import OriginRecord, Storage

_MAX_SKIPPED: Final = 8
"""Recently used records that are skipped in search of an unused one to evict."""
_RECORD_BYTES: Final = 500
_TEXT_BYTES: Final = 500
"""The estimate of a record is `_RECORD_BYTES`; with a text, `_TEXT_BYTES` more and one byte per
octet of the text, for the text and the rules of one agent. The cost of awake texts is counted
separately. Measured with real files."""


class RecordCache:
    """Holds every record in memory. The gate reads `records` directly."""

    def __init__(
        self,
        config: Config,
        *,
        stored: bool,
        records: SplitDict[str, Record] | None = None,
        uptime: Uptime | None = None,
        texts: FileTexts | None = None,
    ) -> None:
        """`records` and `texts` may be given by the caller, empty. `stored`: True if a storage has
        every record, so that any record may be evicted."""
        self.records: SplitDict[str, Record] = SplitDict() if records is None else records
        """In the order in which they were added, or last found in use by the search for an unused
        record."""
        self.texts: FileTexts = FileTexts(config) if texts is None else texts
        self.uptime: Uptime = Uptime() if uptime is None else uptime
        self.warm: int = 0
        """The number of `records` that answer by the policy of their text alone."""
        self.evicted: int = 0
        """Records evicted so far."""
        self._config = config
        self._max_bytes = config.cache.max_bytes * 7 // 8  # the texts that are awake have the rest
        self._stored = stored
        self._bytes = 0
        self._candidates: deque[str] = deque()
        """The next records to consider for eviction."""
        self._promises: SplitDict[str, Record] = SplitDict()
        """Records set aside, in the order in which that happened."""
        self._promise_bytes = 0
        self._voids = 0
        """How often the guard's refusals were voided: records of earlier ones are ignored."""

    def __len__(self) -> int:
        return len(self.records) + len(self._promises)

    @property
    def bytes(self) -> int:
        """An estimate of the records' memory in bytes."""
        return self._bytes + self.texts.awake_bytes + self._promise_bytes

    def get(self, origin: str) -> Record | None:
        """Return the record of an origin, or None, and mark it as used. May be called in another
        thread."""
        record = self.records.get(origin)
        if record is None and self._promises.size:
            record = self._promises.get(origin)
        if record is None:
            return None
        if record.voids < self._voids and record.current.outcome in GUARD_REFUSALS:
            return None
        record.used = True
        return record

    def put(self, record: Record) -> None:
        """Add a record, replacing that of the same origin."""
        records, text = self.records, record.text
        record.voids = self._voids
        if text is not None:
            self.texts.hold(text)  # before the old record releases it
        self._bytes += _bytes_of(record)
        self.warm += record.policy_only
        old = records.replace(record.origin, record)
        if old is not None:
            self._removed(old)
        else:
            self._drop_promise(record.origin)
        while records.size > self._config.cache.hot_records or (
            self._bytes > self._max_bytes and records.size > 1
        ):
            self._evict(self._unused_origin(record.origin))

    def drop(self, origin: str) -> None:
        """Remove the record of an origin."""
        record = self.records.discard(origin)
        if record is not None:
            self._removed(record)
        self._drop_promise(origin)

    def void_refusals(self) -> None:
        """Discard every record of a fetch that the guard refused, as its settings have changed.

        Each is ignored from now on: removing hundreds of thousands would block the loop.
        """
        self._voids += 1

    def _removed(self, record: Record) -> None:
        """Account for a record that left `records`."""
        self._bytes -= _bytes_of(record)
        self.warm -= record.policy_only
        if record.text is not None:
            self.texts.release(record.text)

    def _unused_origin(self, kept: str) -> str:
        """Return the origin of a record that was not used lately; not `kept`, if there is another
        one.

        A record that was used since it was last considered moves to the end. After `_MAX_SKIPPED`
        such records the next one is returned even if it is in use.
        """
        records, candidates = self.records, self._candidates
        chances = _MAX_SKIPPED
        while True:
            if not candidates:
                candidates.extend(records.oldest())
            origin = candidates.popleft()
            record = records.get(origin)
            if record is None or origin == kept:
                continue
            if not chances or not record.used:
                return origin
            chances -= 1
            record.used = False
            records.replace(origin, record)

    def _evict(self, origin: str) -> None:
        """Remove a record, or set it aside if it is a promise that no storage has."""
        record = self.records[origin]
        if self._stored or record.reachable:
            self.drop(origin)
            self.evicted += 1
            return
        if record.text is not None:
            self.texts.hold(record.text)
        self.drop(origin)
        self._promises[origin] = record
        self._promise_bytes += _bytes_of(record)
        while self._promise_bytes > self._config.cache.max_bytes:
            for oldest in self._promises.oldest():
                self._drop_promise(oldest)
                self.evicted += 1

    def _drop_promise(self, origin: str) -> None:
        record = self._promises.discard(origin)
        if record is not None:
            self._promise_bytes -= _bytes_of(record)
            if record.text is not None:
                self.texts.release(record.text)


def _bytes_of(record: Record) -> int:
    return _RECORD_BYTES + (0 if record.text is None else _TEXT_BYTES + record.text.size)


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
