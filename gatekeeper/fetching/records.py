"""The record of one origin, the text of its file, and their conversion to and from storage.

A `Record` has two slots: `current`, the latest attempt, and `good`, the last answer that was a
file or a definite absence. A failure never overwrites the good one. Each distinct text exists
once for all origins that serve it; unused ones are not kept in parsed form, and compressed unless
they are short.

Records are confined to the event loop. Their lifetimes are monotonic seconds; wall seconds are
kept beside them for display and storage. A stored record's age is computed from its stamp:
during the same boot, setting the wall clock makes it neither older nor younger.
"""

from __future__ import annotations

import zlib
from collections import deque
from typing import Final, Protocol

import msgspec
from msgspec.structs import replace

from gatekeeper.clock import Clock, Stamp, stamp
from gatekeeper.config import Config, FetchConfig
from gatekeeper.decision import Decision, Reason, State, Verdict
from gatekeeper.fetching.faults import Uptime
from gatekeeper.fetching.outcomes import (
    DAY,
    GUARD_REFUSALS,
    NO_METADATA,
    Fallback,
    Metadata,
    Outcome,
    fallback_while_unreachable,
    parser_input,
)
from gatekeeper.robots import Policy, RobotsTxt
from gatekeeper.robots.flat import FlatRules
from gatekeeper.robots.longest import LongestMatch
from gatekeeper.robots.timing import RobotsInterval, Window
from gatekeeper.split_dict import SplitDict
from gatekeeper.storage.base import OriginRecord, pack_body, unpack_body

MAX_AWAKE: Final = 1_000
"""The maximum number of awake texts; each is about ten objects that the garbage collector
traverses."""
_AWAKE_BYTES: Final = 1_500
_AWAKE_BYTES_PER_OCTET: Final = 4
"""The additional cost of an awake text is `_AWAKE_BYTES` bytes, and so many bytes per octet."""
_MAX_SKIPPED: Final = 8
"""Recently used texts that are skipped in search of one to put to rest."""
LARGE: Final = 65_536
"""Texts of so many octets are parsed, compressed and turned into policies in a thread."""
_KEY_MASK: Final = (1 << 60) - 1
"""Mask of a text's key: integers up to this take the least memory per bit."""
_WINDOW_BITS: Final = 12
_MEMORY_LEVEL: Final = 5
"""How far back zlib looks for repetitions, and how much it remembers of them: to clear more memory
takes longer than compressing most files."""
_MAX_PLAIN_OCTETS: Final = 4_096
"""A body of up to so many octets is not compressed at rest: that would take too long."""


class FileText(msgspec.Struct, gc=False, eq=False):
    """One distinct robots.txt text. Created by `FileTexts`.

    It is *at rest*: its body, compressed unless it is short, and from the first question on the
    rules of the gate's own agent in flat form; or once it is asked about again, *awake*: parsed,
    with the policies made so far. The garbage collector does not track it, nor anything that it
    holds at rest. While awake it keeps the body, because the parsed text does not preserve all
    octets.
    """

    size: int
    """Octets of the body."""
    options: tuple[str, int, str]
    """How to read it: the dialect, the number of octets to read, and the gate's own agent."""
    kept: bytes
    """The body, or the compressed body."""
    compressed: bool = False
    """`kept` is compressed; after the first question that is so for all bodies but short ones."""
    parsed: RobotsTxt | None = None
    """None while it is at rest."""
    own: Policy | None = None
    """The policy of the gate's own agent; None at rest."""
    policies: dict[str, Policy] | None = None
    """The policies of other agents, by product token; None at rest."""
    flat: FlatRules | None = None
    """The rules of the gate's own agent in the form at rest, made for the first question at rest,
    or when the text is put to rest; None if they have no such form."""
    rules: LongestMatch | FlatRules | None = None
    """The rules of the gate's own agent, in the form that answers at the moment. None before its
    first policy was made, or if they do not decide alone."""
    interval: RobotsInterval | None = None
    """The interval for the gate's own agent, if it is the same at any time of day."""
    windows: tuple[Window, ...] = ()
    """The Visit-time for the gate's own agent, once that has asked for its interval or a URL."""
    used: bool = False
    """It was used since it was last considered for rest."""
    key: int = 0
    """Its key among the texts in use."""
    users: int = 0
    """The number of records in memory that hold it."""

    @property
    def robots(self) -> RobotsTxt:
        """The parsed text. A text at rest is parsed for each access."""
        if self.parsed is not None:
            return self.parsed
        dialect, limit, _ = self.options
        return RobotsTxt.parse(parser_input(self.body()), dialect=dialect, limit=limit)

    def rest(self) -> None:
        """Put the text to rest: keep only the body, compressed unless it is short, and the rules
        of the gate's own agent in flat form."""
        if self.own is not None:
            self.flatten(self.own)
        self.parsed = self.own = self.policies = None
        self.rules = self.flat
        if self.size > _MAX_PLAIN_OCTETS:
            self.compress()

    def compress(self) -> None:
        """Compress the body, once."""
        if not self.compressed:
            packer = zlib.compressobj(1, zlib.DEFLATED, _WINDOW_BITS, _MEMORY_LEVEL)
            self.kept, self.compressed = packer.compress(self.kept) + packer.flush(), True

    def body(self) -> bytes:
        """Return the octets as they were fetched."""
        return zlib.decompress(self.kept) if self.compressed else self.kept

    def same_as(self, body: bytes) -> bool:
        """Return True if the text has that body."""
        return len(body) == self.size and self.body() == body

    def policy_for(self, agent: str) -> Policy | None:
        """Return the policy made for a product token, or None. Marks the text as used."""
        self.used = True
        if agent == self.options[2]:
            return self.own
        return None if self.policies is None else self.policies.get(agent)

    def flatten(self, policy: Policy) -> bool:
        """Make the form at rest of the gate's own policy, once. Return False if it has none."""
        if self.flat is None and self.size < LARGE:
            self.flat = policy.flat()
        return self.flat is not None

    def add_policy(self, policy: Policy, max_policies: int) -> None:
        """Keep a policy while the text is awake; beyond `max_policies` the oldest is evicted."""
        own = policy.agent == self.options[2]
        if self.parsed is None:
            self.rest()
        elif own:
            # With a Visit-time no verdict holds without the hour.
            self.own, self.rules = policy, None if policy.timed else policy.plain
        else:
            self.policies = self.policies or {}
            self.policies[policy.agent] = policy
            while len(self.policies) > max_policies:
                del self.policies[next(iter(self.policies))]


class FileTexts:
    """Every text in use, found by its body: one object for all origins that serve it.

    A text is in use from the first `hold` to the last `release`. The most recently used ones are
    awake: at most `MAX_AWAKE`, and an eighth of `cache.max_bytes` by an estimate.
    """

    def __init__(self, config: Config, agent: str = "") -> None:
        """`agent`: the gate's own, whose rules a text at rest keeps."""
        self._options = config.robots.dialect, config.fetch.max_body, agent
        self._texts: SplitDict[int, FileText] = SplitDict()
        self._awake: deque[FileText] = deque()
        self._max_awake_bytes = config.cache.max_bytes // 8
        self.awake_bytes: int = 0
        """An estimate of the additional memory of the awake texts, in bytes."""
        self._released = 0
        """Texts released since unused texts were last removed from `_awake`."""

    def __len__(self) -> int:
        return len(self._texts)

    def clear(self) -> None:
        """Forget every text, as nothing holds them any more."""
        self._texts.clear()
        self._awake.clear()
        self.awake_bytes = 0

    def of(self, body: bytes) -> FileText:
        """Return the text with a body: the one in use if there is one, else a new one."""
        return self.find(body) or self.read(body)

    def find(self, body: bytes) -> FileText | None:
        """Return the text in use with that body, or None."""
        text = self._texts.get(hash(body) & _KEY_MASK)
        # If two bodies have the same key, only the first is ever found.
        return text if text is not None and text.same_as(body) else None

    def read(self, body: bytes) -> FileText:
        """Return a new text with a body, at rest. It changes no shared state, so it may run in a
        thread."""
        text = FileText(len(body), self._options, body, key=hash(body) & _KEY_MASK)
        if len(body) >= LARGE:
            text.compress()  # this may be a thread; later it would delay the loop
        return text

    def hold(self, text: FileText) -> None:
        """Count one more record that holds the text."""
        text.users += 1
        if text.users == 1:
            if text.key not in self._texts:
                self._texts[text.key] = text
            if text.parsed is not None:
                self._add_awake(text)

    def release(self, text: FileText) -> None:
        """Count one record less that holds the text."""
        text.users -= 1
        if text.users > 0:
            return
        if self._texts.get(text.key) is text:
            del self._texts[text.key]
        self._released += 1
        if self._released > len(self._awake) // 2:  # in bulk, as removing one is a linear search
            self._awake = deque([each for each in self._awake if each.users > 0])
            self.awake_bytes = sum(map(_awake_bytes_of, self._awake))
            self._released = 0

    def wake(self, text: FileText, robots: RobotsTxt) -> None:
        """Wake a text; `robots` is its parsed form."""
        if text.parsed is None:
            text.parsed = robots
            if text.users:
                self._add_awake(text)

    def _add_awake(self, text: FileText) -> None:
        """Add a text to the awake ones, and put others to rest if there are too many."""
        awake = self._awake
        awake.append(text)
        self.awake_bytes += _awake_bytes_of(text)
        skips = _MAX_SKIPPED
        max_bytes = self._max_awake_bytes
        while len(awake) > MAX_AWAKE or (self.awake_bytes > max_bytes and len(awake) > 1):
            oldest = awake.popleft()
            if oldest.users and oldest.used and skips:
                skips -= 1
                oldest.used = False
                awake.append(oldest)
                continue
            self.awake_bytes -= _awake_bytes_of(oldest)
            if oldest.users:
                oldest.rest()


def _awake_bytes_of(text: FileText) -> int:
    return _AWAKE_BYTES + _AWAKE_BYTES_PER_OCTET * text.size


NO_TEXT: Final = RobotsTxt.parse(b"")
"""The text of an origin without a file: empty, so everything is allowed."""


class TwoClocks(Protocol):
    """A source of monotonic and wall time: a `Clock`, or a `Moment`."""

    def monotonic(self) -> float:
        """Return monotonic seconds."""

    def wall(self) -> float:
        """Return seconds since 1970-01-01 UTC."""


class Moment(msgspec.Struct, frozen=True, gc=False):
    """A fixed moment of both clocks, in seconds, usable in place of a clock."""

    now: float
    """Monotonic seconds."""
    wall_time: float
    """Seconds since 1970-01-01 UTC."""
    transit: float = 0.0
    """Seconds that a request of this moment may take to arrive."""

    def monotonic(self) -> float:
        """Return `now`."""
        return self.now

    def wall(self) -> float:
        """Return `wall_time`."""
        return self.wall_time


class OriginAnswer(msgspec.Struct, frozen=True, gc=False):
    """One answer of an origin, or a failed attempt."""

    outcome: Outcome
    status: int | None
    wall: float
    """Wall seconds at which it arrived, or was last revalidated."""
    hops: tuple[str, ...] = ()
    took: float = 0.0
    etag: str | None = None
    last_modified: str | None = None
    metadata: Metadata = NO_METADATA


class Standing(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """How a record reads at one moment."""

    verdict: Verdict | None
    """None: the policy of `robots` decides."""
    applies: bool
    """A text applies, or the definite absence of one; False if the file is unreachable."""
    text: FileText | None = None
    """The text that applies; None if there is none."""
    state: State
    reason: Reason
    """If the policy decides, the reason to give if no rule matches."""
    status: int | None
    """HTTP status of the latest attempt."""
    fetched_at: float
    """Wall seconds at which the applicable answer was fetched or revalidated."""
    expires_at: float
    """Wall seconds until which this holds."""
    retry_at: float | None
    """Wall seconds of the next attempt; only with DEFER."""
    hops: tuple[str, ...] = ()
    took: float | None = None
    """Seconds that the last successful retrieval took."""

    @property
    def robots(self) -> RobotsTxt | None:
        """The text that applies, an empty one if there is no file, or None if the file is
        unreachable."""
        if not self.applies:
            return None
        return NO_TEXT if self.text is None else self.text.robots


class Frame(msgspec.Struct, frozen=True, gc=False):
    """What the decisions about one origin have in common, for the gate's own agent, while nothing
    but the path makes a difference."""

    decision: Decision
    """The decision about a path that no rule matches. `url` and `id` are empty."""
    host: str
    interval: RobotsInterval | None
    """The file's interval; None if it changes with the hour."""


class Record(msgspec.Struct, gc=False, eq=False):
    """What is known about one origin. Do not hold it across an await: it may be replaced.

    The garbage collector does not track it: nothing that it holds refers back to it. The fields
    that each question reads come first, adjacent in memory: with hundreds of thousands of origins
    the records exceed every processor cache.
    """

    origin: str
    config: FetchConfig
    current: OriginAnswer
    expires: float
    """Monotonic moment of a good answer's hard expiry, or after a failure of the next attempt."""
    fresh_until: float
    """Monotonic moment of soft expiry, before which the file is not fetched again."""
    ready: int = 0
    """If it equals the number of the operator's latest change (`Decider.forget`), the text alone
    decides for the gate's own agent until `fresh_until`: neither the guard nor an operator's rule
    applies to the origin, and the text has no Visit-time."""
    used: bool = False
    """It was used since it was last considered for eviction."""
    text: FileText | None = None
    """The text of `good`; None if `good` has no text."""
    frame: Frame | None = None
    """Belongs to `ready`. None if the text was at rest, or if a decision depends on the hour."""
    asked: int = 0
    """The number of the last question that `Decider` counted for the record; 0: none yet."""
    good: OriginAnswer | None = None
    unreachable_since: float | None = None
    """Time of the first failure in a row, in seconds of `uptime`; None: reachable."""
    step: int = 0
    """The number of further failures in a row: the rung on the ladder."""
    page_ok: float | None = None
    """Monotonic moment at which a page was last reported with 2xx or 3xx."""
    uptime: Uptime = msgspec.field(default_factory=Uptime)
    witness: str | None = None
    """The digest of the text in the audit record, empty without a text; None: this record has no
    line there yet."""
    voids: int = 0
    """The number of calls of `RecordCache.void_refusals` before the record was added."""

    @property
    def reachable(self) -> bool:
        """True if the latest attempt gave a file or a definite absence."""
        return self.current.outcome.good

    @property
    def policy_only(self) -> bool:
        """True if the policy of the text alone gives the answer until `fresh_until`."""
        outcome = self.current.outcome
        return outcome.good and outcome.row.verdict is not Verdict.DENY

    def outlive(self, moment: float) -> None:
        """Extend the record's life to that monotonic moment at least, without a new fetch."""
        self.fresh_until = max(self.fresh_until, moment)
        self.expires = max(self.expires, moment)

    def unreachable_for(self, now: float) -> float:
        """Return the seconds since the first failure in a row, or 0 if the file is reachable."""
        since = self.unreachable_since
        return 0.0 if since is None else max(0.0, self.uptime(now) - since)

    def fallback(self, now: float) -> Fallback:
        """Return what applies at a monotonic moment if the latest attempt was a failure."""
        if not self.current.outcome.row.lapses:
            return Fallback.NOTHING
        return fallback_while_unreachable(
            self.config,
            unreachable_for=self.unreachable_for(now),
            has_last_good=self.good is not None,
            page_ok_ago=None if self.page_ok is None else now - self.page_ok,
        )

    def usable(self, now: float) -> bool:
        """Return True if the record can answer at a monotonic moment without a fetch."""
        if now < self.expires:
            return True
        return not self.reachable and self.fallback(now) is not Fallback.NOTHING

    def standing(self, clock: TwoClocks) -> Standing:
        """Return how the record reads at the time of `clock`."""
        now = clock.monotonic()
        offset = clock.wall() - now
        if self.current.outcome.good:
            return self._standing_of(self.current, offset, stale=False)
        fallback = self.fallback(now)
        if fallback is Fallback.LAST_GOOD and self.good is not None:
            return self._standing_of(self.good, offset, stale=True)
        row = self.current.outcome.row
        allow_all = fallback is Fallback.ALLOW_ALL
        retry_at = self.expires + offset
        return Standing(
            verdict=Verdict.ALLOW if allow_all else row.verdict,
            applies=allow_all,
            state=State.UNREACHABLE,
            reason=Reason.LONG_UNREACHABLE if allow_all else row.reason,
            status=self.current.status,
            fetched_at=self.current.wall,
            expires_at=retry_at,
            retry_at=None if allow_all or row.verdict is not Verdict.DEFER else retry_at,
            hops=self.current.hops,
            took=None if self.good is None else self.good.took,
        )

    def _standing_of(self, answer: OriginAnswer, offset: float, *, stale: bool) -> Standing:
        row = answer.outcome.row
        return Standing(
            verdict=row.verdict,
            applies=True,
            text=self.text,
            state=State.STALE if stale else row.state,
            reason=row.reason,
            status=self.current.status,
            fetched_at=answer.wall,
            expires_at=self.expires + offset,
            retry_at=None,
            hops=answer.hops,
            took=answer.took,
        )

    def __repr__(self) -> str:
        return f"Record({self.origin!r}, {self.current.outcome.row.name}, step={self.step})"


_FORGOTTEN: Final = "forgotten"
_MAX_CLOCK_SKEW: Final = 60.0
"""A stored moment further in the future than so many seconds means that the wall clock was set
back."""


def tombstone(origin: str) -> OriginRecord:
    """Return the record that marks an origin as forgotten in the storage."""
    return OriginRecord(
        origin=origin,
        outcome=_FORGOTTEN,
        state=State.UNREACHABLE,
        fetched_at=0.0,
        soft_expires_at=0.0,
        expires_at=0.0,
    )


def to_stored(record: Record, clock: Clock) -> OriginRecord:
    """Return the record for the storage, with its moments converted to wall seconds."""
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
        metadata="" if good is None else _metadata_text(good.metadata),
    )


def from_stored(
    stored: OriginRecord,
    *,
    config: Config,
    clock: Clock,
    texts: FileTexts,
    uptime: Uptime,
    read: FileText | None = None,
) -> Record | None:
    """Return the record that was stored, or None for a tombstone.

    `read`: its text, if that was parsed already. Raises ValueError or zlib.error if the stored
    record is damaged: a lost text must not read as an empty one, which allows everything.
    """
    if stored.outcome == _FORGOTTEN:
        return None
    now = clock.monotonic()
    then, uncertain = _unchanged_wall(stored, clock)
    soft, hard = stored.soft_expires_at - then, stored.expires_at - then
    current = OriginAnswer(
        Outcome.named(stored.outcome),
        stored.status,
        stored.fetched_at,
        stored.hops,
        stored.took or 0.0,
        stored.etag,
        stored.last_modified,
        _metadata_from(stored.metadata),
    )
    good = current if current.outcome.good else _earlier_good(stored, current)
    if current.outcome.good and uncertain:
        soft = hard = 0.0
    if current.outcome in GUARD_REFUSALS or current.outcome is Outcome.TLS:
        # Our own verdict: this process may have another `guard.allow`, or trust more authorities.
        soft = hard = 0.0
    cap = config.cache.max_ttl if current.outcome.good else DAY
    return Record(
        stored.origin,
        config.fetch,
        current=current,
        good=good,
        text=_text_of(stored, good, texts, read),
        fresh_until=now + min(soft, cap),
        expires=now + min(hard, cap),
        unreachable_since=_to_monotonic(stored.first_unreachable_at, then, uptime(now)),
        step=stored.ladder_step,
        page_ok=_to_monotonic(stored.last_page_ok_at, then, now),
        uptime=uptime,
    )


def _unchanged_wall(stored: OriginRecord, clock: Clock) -> tuple[float, bool]:
    """Return what an unchanged wall clock would show now, and whether that is a guess.

    It is a guess if only the wall clock is available and is before the record, so that it was
    set back. The record's age is then unknown: a good record counts as expired, and a pause on
    the ladder starts again.
    """
    wall = clock.wall()
    if stored.made_at is None:
        uncertain = stored.fetched_at > wall + _MAX_CLOCK_SKEW
        return (stored.fetched_at if uncertain else wall), uncertain
    made = Stamp(stored.made_at, stored.boot_id, stored.boot_at)
    uncertain = not made.is_of_this_boot(clock) and made.wall > wall + _MAX_CLOCK_SKEW
    return made.wall + made.age(clock), uncertain


def _earlier_good(stored: OriginRecord, current: OriginAnswer) -> OriginAnswer | None:
    """Return the good answer behind a stored failure, if there is one."""
    if stored.good_outcome is None or stored.good_fetched_at is None:
        return None
    outcome, wall = Outcome.named(stored.good_outcome), stored.good_fetched_at
    status, hops = stored.good_status, stored.good_hops
    good = replace(current, outcome=outcome, status=status, wall=wall, hops=hops)
    return good if outcome.good else None


def _metadata_text(metadata: Metadata) -> str:
    return "" if metadata == NO_METADATA else msgspec.json.encode(metadata).decode()


def _metadata_from(text: str) -> Metadata:
    try:
        return msgspec.json.decode(text, type=Metadata) if text else NO_METADATA
    except msgspec.MsgspecError as error:
        raise ValueError(f"its metadata: {error}") from error


def _text_of(
    stored: OriginRecord, good: OriginAnswer | None, texts: FileTexts, read: FileText | None
) -> FileText | None:
    if good is None or not good.outcome.has_text:
        return None
    if stored.body is None:
        if good.outcome is Outcome.EMPTY:  # 204: there was no body
            return None
        raise ValueError("the text is missing")
    return read or texts.of(unpack_body(stored.body))


def _to_monotonic(then: float | None, wall: float, now: float) -> float | None:
    """Convert a wall moment to a monotonic one; a future moment counts as now."""
    return None if then is None else now - max(0.0, wall - then)
