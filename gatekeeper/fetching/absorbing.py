"""From what a retrieval came to, to the record that is kept of it, and to the storage."""

from __future__ import annotations

import logging
import random
import zlib
from collections.abc import Callable
from typing import Final

from gatekeeper.clock import Clock
from gatekeeper.config import Config
from gatekeeper.errors import StorageError
from gatekeeper.fetching.faults import LocalFaults
from gatekeeper.fetching.freshness import Lifetime, fresh_for, soft_expiry
from gatekeeper.fetching.ladder import next_try
from gatekeeper.fetching.outcomes import Outcome
from gatekeeper.fetching.records import Answer, Record
from gatekeeper.fetching.retrieval import Retrieval
from gatekeeper.fetching.shelf import Shelf
from gatekeeper.fetching.storing import from_stored, to_stored, tombstone
from gatekeeper.robots import RobotsTxt
from gatekeeper.storage.base import OriginRecord, Storage

__all__ = ["Absorber", "answered"]

log: Final = logging.getLogger("gatekeeper.fetching")

_SOON: Final = 1.0
_PAGE_NOTED_EVERY: Final = 3_600.0

_NOT_RECORDED: Final = frozenset({Outcome.OURS, Outcome.OVERLOADED, Outcome.STORAGE})
_ANSWERED: Final = frozenset({Outcome.TLS, Outcome.INVALID_RESPONSE, Outcome.BAD_ENCODING})
"""Failures with which something came from the site, though it was no head."""


def answered(retrieval: Retrieval) -> bool:
    """Whether something came from the network that contradicts a fault of our own.

    Not a refused connection or a name that does not exist: they say nothing, either way.
    """
    outcome = retrieval.outcome
    if retrieval.hops:  # whoever redirected us answered, whatever came of it
        return True
    if outcome.row.local:
        return False  # 511 is the captive portal's answer
    return outcome.good or retrieval.status is not None or outcome in _ANSWERED


class Absorber:
    """Turns retrievals into records, keeps them, stores them, and tells of changes.

    No method awaits: what is checked still holds when it is acted upon.
    """

    def __init__(
        self,
        shelf: Shelf,
        faults: LocalFaults,
        *,
        config: Config,
        clock: Clock,
        rng: random.Random,
        storage: Storage | None,
        on_learnt: Callable[[Record], object],
    ) -> None:
        self._shelf = shelf
        self._faults = faults
        self._config = config
        self._clock = clock
        self._rng = rng
        self._storage = storage
        self._on_learnt = on_learnt
        self._callbacks: list[Callable[[str, RobotsTxt | None, RobotsTxt | None], object]] = []
        self.storage_errors = 0

    def absorb(self, origin: str, retrieval: Retrieval, *, began: float) -> Record:
        """Keep what a retrieval, begun at that monotonic moment, came to."""
        outcome = retrieval.outcome
        old = self._shelf.get(origin)
        if outcome is Outcome.NOT_MODIFIED and (old is None or old.good is None):
            outcome = Outcome.NOT_MODIFIED_NOTHING  # forgotten while it was being asked for
        now = self._clock.monotonic()
        if outcome in _NOT_RECORDED:
            return self._not_recorded(origin, old, outcome, now + _SOON)  # row 28
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
            record = self._good(origin, retrieval, outcome, old, now)
        else:
            record = self._failure(origin, retrieval, outcome, old, now)
        self._keep(record)
        self._fill_authority(origin, retrieval)
        self._tell(origin, old, record)
        return record

    def _good(
        self, origin: str, said: Retrieval, outcome: Outcome, old: Record | None, now: float
    ) -> Record:
        text = None
        wall = self._clock.wall()
        if outcome is Outcome.NOT_MODIFIED and old is not None and old.good is not None:
            # Row 9. RFC 9111 4.3.4: the stored answer stands, its metadata are renewed.
            text = old.text
            current = Answer(
                old.good.outcome,
                old.good.status,
                wall,
                said.hops,
                said.took,
                said.etag or old.good.etag,
                said.last_modified or old.good.last_modified,
            )
        else:
            if outcome.has_text and said.body is not None:
                text = self._shelf.texts.of(said.body)
            current = Answer(
                outcome, said.status, wall, said.hops, said.took, said.etag, said.last_modified
            )
        fresh = fresh_for(current.outcome.row.kept, said.lifetime, self._config.cache)
        return Record(
            origin,
            self._config,
            current=current,
            good=current,
            text=text,
            fresh_until=now + soft_expiry(fresh, self._rng),
            expires=now + fresh,
            page_ok=None if old is None else old.page_ok,
            uptime=self._faults.uptime,
        )

    def _failure(
        self, origin: str, said: Retrieval, outcome: Outcome, old: Record | None, now: float
    ) -> Record:
        again = old is not None and not old.reachable
        step = old.step + 1 if old is not None and again else 0
        pause = next_try(outcome.row.kept, step, self._rng, retry_after=said.retry_after)
        since = old.unreachable_since if old is not None and again else None
        return Record(
            origin,
            self._config,
            current=Answer(outcome, said.status, self._clock.wall(), said.hops, said.took),
            # A failure never overwrites the last good copy.
            good=None if old is None else old.good,
            text=None if old is None else old.text,
            fresh_until=now + pause,
            expires=now + pause,
            unreachable_since=self._faults.uptime(now) if since is None else since,
            step=step,
            page_ok=None if old is None else old.page_ok,
            uptime=self._faults.uptime,
        )

    def passing(self, origin: str, outcome: Outcome, seconds: float) -> Record:
        """A record for one answer, not kept: the failure is ours, not the site's."""
        until = self._clock.monotonic() + seconds
        return Record(
            origin,
            self._config,
            current=Answer(outcome, None, self._clock.wall()),
            fresh_until=until,
            expires=until,
        )

    def postponed(self, origin: str) -> Record:
        """The answer during a local fault: nothing recorded, ask again soon (section 6)."""
        now = self._clock.monotonic()
        retry_at = self._faults.retry_at(now)
        return self._not_recorded(origin, self._shelf.get(origin), Outcome.LOCAL_FAULT, retry_at)

    def _not_recorded(
        self, origin: str, old: Record | None, outcome: Outcome, retry_at: float
    ) -> Record:
        now = self._clock.monotonic()
        if old is not None and old.usable(now):
            # It may go on answering; it need not launch a flight with every question.
            old.fresh_until = min(max(old.fresh_until, retry_at), max(old.expires, now))
            return old
        return self.passing(origin, outcome, retry_at - now)

    def _keep(self, record: Record) -> None:
        self._on_learnt(record)  # it may lengthen the record's life
        self._shelf.put(record)
        self._store(record)

    def _restore(self, origin: str, old: Record | None) -> None:
        """Undo what was recorded of a failure that turned out to be ours."""
        if old is None:
            self._shelf.drop(origin)
            self.forget(origin)
        else:
            self._keep(old)

    def _fill_authority(self, origin: str, said: Retrieval) -> None:
        """A redirect that ended at another origin's own /robots.txt answered for it too.

        Only what that URL itself answered, and only a file or a definite absence: B's
        record is never made of a text that A chose to name (T14).
        """
        if not said.hops or said.outcome is Outcome.NOT_MODIFIED or not said.outcome.good:
            return
        other = _authority_of(said.url)
        if other is None or other == origin or said.outcome is Outcome.TOO_MANY_REDIRECTS:
            return
        now = self._clock.monotonic()
        old = self._shelf.get(other)
        if old is not None and now < old.fresh_until:
            return
        direct = Retrieval(
            outcome=said.outcome,
            status=said.status,
            body=said.body,
            etag=said.etag,
            last_modified=said.last_modified,
            lifetime=said.lifetime,
            took=said.took,
        )
        record = self._good(other, direct, said.outcome, old, now)
        self._keep(record)
        self._tell(other, old, record)

    def known(self, origin: str) -> Retrieval | None:
        """What is fresh about an origin, as if it had just been asked; else None."""
        record = self._shelf.get(origin)
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
            # Its ladder, and its Retry-After, hold for whoever is redirected there.
            retry_after=None if record.reachable else left,
        )

    def note_page(self, origin: str) -> None:
        """A page of the origin was had. Matters, and is stored, while its file can't be."""
        record = self._shelf.get(origin)
        if record is None or record.reachable:
            return
        now = self._clock.monotonic()
        noted = record.page_ok
        record.page_ok = now
        if noted is None or now - noted >= _PAGE_NOTED_EVERY:
            self._store(record)

    def subscribe(
        self, callback: Callable[[str, RobotsTxt | None, RobotsTxt | None], object]
    ) -> Callable[[], None]:
        """Add a callback; the result takes it away again."""
        self._callbacks.append(callback)

        def unsubscribe() -> None:
            if callback in self._callbacks:
                self._callbacks.remove(callback)

        return unsubscribe

    def _tell(self, origin: str, old: Record | None, new: Record) -> None:
        if not self._callbacks or not new.reachable or old is None or old.good is None:
            return
        before, after = old.text, new.text
        if before is after or (before and after and before.digest == after.digest):
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
        """Store that nothing is known of the origin."""
        if self._storage is not None:
            self._storage.put_origin(tombstone(origin))

    def restore(self, stored: OriginRecord) -> Record | None:
        """A record as it was stored, and kept from here on; None if it can't be used."""
        try:
            record = from_stored(
                stored,
                config=self._config,
                clock=self._clock,
                texts=self._shelf.texts,
                uptime=self._faults.uptime,
            )
        except (zlib.error, ValueError) as error:
            self.storage_errors += 1
            log.warning("the stored record of %s is damaged: %s", stored.origin, error)
            return None
        if record is not None:
            self._shelf.put(record)
        return record


def _authority_of(url: str) -> str | None:
    """The origin whose own /robots.txt the URL is, or None."""
    origin, sep, rest = url.rpartition("/robots.txt")
    return origin if sep and not rest and origin.count("/") == 2 else None
