"""Records as the storage keeps them. It speaks wall seconds, the records monotonic ones.

How old a stored record is says its stamp: on the same start of the machine no wall clock that
was set meanwhile makes it older or younger.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from gatekeeper.clock import Clock, Stamp, stamp
from gatekeeper.config import Config
from gatekeeper.decision import State
from gatekeeper.fetching.ladder import DAY
from gatekeeper.fetching.outcomes import OURS, Outcome
from gatekeeper.fetching.records import Answer, Record
from gatekeeper.fetching.texts import Text, Texts
from gatekeeper.storage.base import OriginRecord, pack_body, unpack_body

__all__ = ["from_stored", "to_stored", "tombstone"]

_FORGOTTEN: Final = "forgotten"
_SKEW: Final = 60.0
"""Seconds that a stored moment may lie in the future before the clock is doubted."""


def tombstone(origin: str) -> OriginRecord:
    """What is stored of an origin of which nothing is to be known any more."""
    return OriginRecord(
        origin=origin,
        outcome=_FORGOTTEN,
        state=State.UNREACHABLE,
        fetched_at=0.0,
        soft_expires_at=0.0,
        expires_at=0.0,
    )


def to_stored(record: Record, clock: Clock) -> OriginRecord:
    """The record with its moments in wall seconds, as the clock stands now."""
    made = stamp(clock)
    offset = made.wall - clock.monotonic()
    current, good = record.current, record.good
    down_for = record.unreachable_for(clock.monotonic())
    body, body_hash = (None, None) if record.text is None else pack_body(record.text.body())
    return OriginRecord(
        origin=record.origin,
        outcome=current.outcome.row.name,
        state=current.outcome.row.state,
        status=current.status,
        fetched_at=current.wall,
        soft_expires_at=record.fresh_until + offset,
        expires_at=record.expires + offset,
        first_unreachable_at=None if record.reachable else made.wall - down_for,
        ladder_step=record.step,
        hops=current.hops,
        etag=None if good is None else good.etag,
        last_modified=None if good is None else good.last_modified,
        good_outcome=None if good is None else good.outcome.row.name,
        good_status=None if good is None else good.status,
        good_fetched_at=None if good is None else good.wall,
        good_hops=() if good is None else good.hops,
        body=body,
        body_hash=body_hash,
        took=None if good is None else good.took,
        last_page_ok_at=None if record.page_ok is None else record.page_ok + offset,
        made_at=made.wall,
        boot_id=made.boot_id,
        boot_at=made.boot_at,
    )


def from_stored(
    stored: OriginRecord,
    *,
    config: Config,
    clock: Clock,
    texts: Texts,
    uptime: Callable[[float], float],
) -> Record | None:
    """The record again; None for a tombstone.

    Raises ValueError or zlib.error for one that is damaged: a text that is lost must not
    be taken for an empty one, which would be a welcome.
    """
    if stored.outcome == _FORGOTTEN:
        return None
    now = clock.monotonic()
    then, doubtful = _wall_of(stored, clock)
    soft, hard = stored.soft_expires_at - then, stored.expires_at - then
    current = Answer(
        Outcome.named(stored.outcome),
        stored.status,
        stored.fetched_at,
        stored.hops,
        stored.took or 0.0,
        stored.etag,
        stored.last_modified,
    )
    good = _good_of(stored, current)
    if current.outcome.good and doubtful:
        soft = hard = 0.0
    if current.outcome in OURS:
        # The guard's verdict, not the site's word: this process may have another guard.allow.
        soft = hard = 0.0
    cap = config.cache.max_ttl if current.outcome.good else DAY
    return Record(
        stored.origin,
        config,
        current=current,
        good=good,
        text=_text_of(stored, good, texts),
        fresh_until=now + min(soft, cap),
        expires=now + min(hard, cap),
        unreachable_since=_ago(stored.first_unreachable_at, then, uptime(now)),
        step=stored.ladder_step,
        page_ok=_ago(stored.last_page_ok_at, then, now),
        uptime=uptime,
    )


def _wall_of(stored: OriginRecord, clock: Clock) -> tuple[float, bool]:
    """What a wall clock that nobody had set since would show now; and whether that is a guess.

    A guess it is where the wall clock decides and stands before the record: it was set back.
    How old the record is nobody knows then, so a good one has expired, and a pause on the
    ladder begins anew.
    """
    wall = clock.wall()
    if stored.made_at is None:
        doubtful = stored.fetched_at > wall + _SKEW
        return (stored.fetched_at if doubtful else wall), doubtful
    made = Stamp(stored.made_at, stored.boot_id, stored.boot_at)
    doubtful = not made.counted(clock) and made.wall > wall + _SKEW
    return made.wall + made.age(clock), doubtful


def _good_of(stored: OriginRecord, current: Answer) -> Answer | None:
    if current.outcome.good:
        return current
    if stored.good_outcome is None or stored.good_fetched_at is None:
        return None
    outcome = Outcome.named(stored.good_outcome)
    if not outcome.good:
        return None
    return Answer(
        outcome,
        stored.good_status,
        stored.good_fetched_at,
        stored.good_hops,
        stored.took or 0.0,
        stored.etag,
        stored.last_modified,
    )


def _text_of(stored: OriginRecord, good: Answer | None, texts: Texts) -> Text | None:
    if good is None or not good.outcome.has_text:
        return None
    if stored.body is None:
        if good.outcome is Outcome.EMPTY:  # 204: there was no body
            return None
        raise ValueError("the text is missing")
    return texts.of(unpack_body(stored.body))


def _ago(then: float | None, wall: float, now: float) -> float | None:
    """A wall moment as a monotonic one; a moment in the future counts as now."""
    return None if then is None else now - max(0.0, wall - then)
