"""Recent history for operators: the latest decisions, and the metrics of the last hour.

`DecisionFeed` keeps the latest decisions in a ring buffer. Answering a request costs one append;
each reader of the ring (an open page) reads it ten times a second. `Series` samples the counters
every ten seconds and keeps the samples for an hour.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from heapq import merge
from itertools import islice, takewhile
from math import inf, isnan
from typing import Any, Final, NamedTuple

import msgspec
from cachetools import LRUCache

from gatekeeper.client.wire import Decisions, encode
from gatekeeper.clock import Clock, SingleTimer
from gatekeeper.decision import Decision, Verdict
from gatekeeper.fetching.outcomes import Outcome
from gatekeeper.gate import Gatekeeper, GateStats
from gatekeeper.sidecar.held_leases import LeaseTable
from gatekeeper.sidecar.metrics import Histogram
from gatekeeper.urls import host_of, make_room

_RING: Final = 4096
"""Single decisions to keep."""
_BATCHES: Final = 8
"""Batches to keep, of up to a thousand decisions each."""
HOSTS: Final = 50_000
"""Hosts whose totals and last statuses are kept at least; twice as many at most."""


class GivenDecision(NamedTuple):
    """One decision of the ring, with the request that it answered."""

    number: int
    """The position among all decisions of the process, counting from 1."""
    at: float
    """Wall time in seconds."""
    decision: Decision
    request: str
    client: str


class Counts(msgspec.Struct, eq=False):
    """The number of allowed, denied and deferred URLs of a host."""

    allow: int = 0
    deny: int = 0
    defer: int = 0
    origins: tuple[str, ...] = ()
    """Origins of the host that were asked about, `_MAX_ORIGINS` at most; one per port."""

    def add(self, verdict: Verdict, count: int = 1) -> None:
        """Count decisions with this verdict."""
        if verdict is Verdict.ALLOW:
            self.allow += count
        elif verdict is Verdict.DENY:
            self.deny += count
        else:
            self.defer += count


_MAX_ORIGINS: Final = 16
_NO_COUNTS: Final = Counts()
_ALLOW: Final = Verdict.ALLOW


class DecisionNote(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The decisions of one response, as they are kept and sent to another process."""

    at: float
    """Wall time in seconds."""
    request: str
    client: str
    count: int
    """Number of decisions."""
    body: bytes
    """The decisions as JSON (`Decisions`). It is decoded when it is read, as few are."""

    def decided(self) -> list[Decision]:
        """Return the decisions."""
        return list(_decisions(self.body).decisions)


_decisions = msgspec.json.Decoder(Decisions).decode


_Entry = GivenDecision | tuple[int, DecisionNote]
"""A decision of this process, or that of another one with its number."""


def _of_note(first: int, note: DecisionNote) -> list[GivenDecision]:
    decisions = enumerate(note.decided(), first)
    return [GivenDecision(n, note.at, one, note.request, note.client) for n, one in decisions]


def _decoded(entry: _Entry) -> GivenDecision:
    return entry if isinstance(entry, GivenDecision) else _of_note(*entry)[0]


class DecisionFeed:
    """The latest decisions, and the totals and the last reported status of each host.

    >>> from gatekeeper import VirtualClock
    >>> from gatekeeper.decision import Reason
    >>> feed = DecisionFeed(VirtualClock())
    >>> feed.add(Decision(verdict=Verdict.DENY, reason=Reason.RULE, url="https://a.example/x",
    ...                   origin="https://a.example", user_agent="bot", id="7"), "1", "local")
    >>> [one.decision.id for one in feed.since(0)], feed.counts("a.example").deny
    (['7'], 1)
    """

    def __init__(self, clock: Clock, *, ring: int = _RING, batches: int = _BATCHES) -> None:
        self.count: int = 0
        """Decisions since the start."""
        self._ring: deque[_Entry] = deque(maxlen=ring)
        self._append = self._ring.append
        self._batches: deque[tuple[int, DecisionNote]] = deque(maxlen=batches)
        """Each with the number of its first decision."""
        self._statuses: dict[str, tuple[int, float]] = {}
        self._hosts: LRUCache[str, Counts] = LRUCache(2 * HOSTS)
        self._origins: dict[str, Counts] = {}
        """The totals of the hosts by origin, so that the origin need not be parsed."""
        self._wall = clock.wall

    def add(self, decision: Decision, request: str, client: str) -> None:
        """Keep a decision in place of the oldest one, and count it for its host."""
        number = self.count + 1
        self.count = number
        self._append(GivenDecision(number, self._wall(), decision, request, client))
        counts = self._origins.get(decision.origin) or self.count_of(decision.origin)
        if decision.verdict is _ALLOW:  # the common case; a call would double the cost
            counts.allow += 1
        else:
            counts.add(decision.verdict)

    def count_of(self, origin: str) -> Counts:
        """Return the totals of the host of an origin, to be updated by the caller."""
        counts = self._origins.get(origin)
        if counts is None:
            if len(self._origins) >= HOSTS:
                self._origins.clear()  # so that the busy hosts are looked up, and stay
            counts = self._origins[origin] = self._hosts.setdefault(host_of(origin), Counts())
            if origin not in counts.origins and len(counts.origins) < _MAX_ORIGINS:
                counts.origins += (origin,)
        return counts

    def add_batch(self, body: bytes, count: int, request: str, client: str) -> None:
        """Keep the response to a batch of `count` decisions, see `merge`."""
        self.merge(DecisionNote(self._wall(), request, client, count, body))

    def merge(self, note: DecisionNote) -> None:
        """Keep the decisions of a response in place of the oldest ones. They are not counted for
        their hosts (see `count_of`)."""
        kept: deque[Any] = self._ring if note.count == 1 else self._batches
        kept.append((self.count + 1, note))
        self.count += note.count

    def reported(self, host: str, status: int) -> None:
        """Record the status of a page of the host, as a client reported it."""
        make_room(self._statuses, 2 * HOSTS)
        self._statuses[host] = (status, self._wall())

    # --- between processes --------------------------------------------------------------

    def take_counts(self) -> dict[str, Counts]:
        """Return the totals of each host by one of its origins, and reset them."""
        hosts = list(self._hosts.values())
        self._hosts.clear()
        self._origins.clear()
        return {counts.origins[0]: counts for counts in hosts if counts.origins}

    def take_latest(self, singles: int, batches: int = _BATCHES) -> list[DecisionNote]:
        """Remove all decisions, and return the latest: so many single ones, and so many batches."""
        notes = [
            DecisionNote(one.at, one.request, one.client, 1, encode(Decisions([one.decision])))
            if isinstance(one, GivenDecision)
            else one[1]
            for one in list(self._ring)[-singles:]
        ]
        notes += [batch for _, batch in self._batches][-batches:]
        self._ring.clear()
        self._batches.clear()
        return notes

    # --- reading ------------------------------------------------------------------------

    def counts(self, host: str) -> Counts:
        """Return the totals of a host since the start, or since they were dropped.

        The totals of the 50,000 hosts that were asked about last are never dropped.
        """
        return self._hosts.get(host, _NO_COUNTS)

    def last_status(self, host: str) -> tuple[int, float] | None:
        """Return the last reported status of a page of the host, and its wall time in seconds."""
        return self._statuses.get(host)

    def latest(self, after: int = 0, mark: bytes = b"") -> Iterator[GivenDecision]:
        """Yield the decisions after a number, the latest first; of the batches, those alone whose
        JSON contains `mark`. Decoding every batch takes 20 ms."""
        ring = takewhile(lambda entry: entry[0] > after, reversed(self._ring))
        batched = (
            one
            for first, batch in reversed(self._batches)
            if first + batch.count > after + 1 and mark in batch.body
            for one in reversed(_of_note(first, batch))
            if one.number > after
        )
        return merge(map(_decoded, ring), batched, key=lambda one: -one.number)

    def since(self, number: int, most: int | None = None) -> list[GivenDecision]:
        """Return the latest `most` decisions after a number, oldest first."""
        return list(islice(self.latest(number), most))[::-1]

    def find(self, decision_id: str) -> GivenDecision | None:
        """Return the decision with an id, or None if it is no longer kept."""
        kept = self.latest(mark=b'"id":%b' % encode(decision_id))
        return next((one for one in kept if one.decision.id == decision_id), None)

    def urls_of(self, origin: str, most: int) -> list[str]:
        """Return up to `most` different URLs of an origin, the most recently asked about first."""
        given = self.latest(mark=b'"origin":%b' % encode(origin))
        decisions = (one.decision for one in given)
        return list(dict.fromkeys(one.url for one in decisions if one.origin == origin))[:most]


# --- the last hour ---------------------------------------------------------------------------

STEP: Final = 10.0
"""Seconds between two points."""
POINTS: Final = 360


class SeriesBody(msgspec.Struct, frozen=True):
    """The samples of the last hour, oldest first; every list is as long as `times`."""

    step: float
    """Seconds between two points."""
    times: list[float]
    """The end of each step, in seconds since 1970."""
    values: dict[str, list[float | None]]
    """allow, deny, defer: decisions per second. robots_ok, robots_failed: robots.txt retrievals in
    the step. wait_p50, wait_p95: seconds of waiting for a lease, None if no lease was granted.
    waiting, leases: their numbers at the end of the step."""


_TOTALS: Final = ("allow", "deny", "defer", "robots_ok", "robots_failed")
NAMES: Final = (*_TOTALS, "wait_p50", "wait_p95", "waiting", "leases")


class Series:
    """Samples the counters every ten seconds, and keeps the samples for an hour."""

    def __init__(
        self,
        gate: Gatekeeper,
        leases: LeaseTable,
        queue_wait: Histogram,
        clock: Clock,
        on_sample: Callable[[], object],
    ) -> None:
        """`on_sample` is called after each sample."""
        self._gate = gate
        self._leases = leases
        self._queue_wait = queue_wait
        self._clock = clock
        self._on_sample = on_sample
        self.points: deque[tuple[float, dict[str, float | None]]] = deque(maxlen=POINTS)
        """The wall time in seconds and the values of each sample."""
        self._timer = SingleTimer(clock, self.sample)
        self._before: Counter[str] = Counter()
        self._waits: list[int] = []

    def start(self) -> None:
        """Take a sample every `STEP` seconds from now on. Idempotent."""
        if self._timer.when == inf:
            self._before, self._waits = totals_of(self._gate.stats()), self._queue_wait.counts()
            self._timer.set(self._clock.monotonic() + STEP)

    def close(self) -> None:
        """Stop sampling. Idempotent."""
        self._timer.cancel()

    def body(self) -> SeriesBody:
        """Return all samples."""
        points = self.points
        values = {name: [sample[name] for _, sample in points] for name in NAMES}
        return SeriesBody(STEP, [at for at, _ in points], values)

    def rates(self) -> dict[str, float | None]:
        """Return the values of the latest sample; all None before the first."""
        return self.points[-1][1] if self.points else dict.fromkeys(NAMES)

    def sample(self) -> None:
        """Add a point now, as every ten seconds."""
        self._timer.set(self._clock.monotonic() + STEP)
        totals, waits = totals_of(self._gate.stats()), self._queue_wait.counts()
        values: dict[str, float | None] = {}
        for name, total in totals.items():
            increase = float(total - self._before[name])
            values[name] = increase if name.startswith("robots") else increase / STEP
        increases = [new - old for new, old in zip(waits, self._waits, strict=True)]
        for name, share in (("wait_p50", 0.5), ("wait_p95", 0.95)):
            seconds = self._queue_wait.quantile(increases, share)
            values[name] = None if isnan(seconds) else seconds
        values["waiting"] = float(len(self._leases.waiters))
        values["leases"] = float(len(self._leases))
        self.points.append((self._clock.wall(), values))
        self._before, self._waits = totals, waits
        self._on_sample()


def totals_of(stats: GateStats) -> Counter[str]:
    """Return what was counted since the start.

    allow, deny, defer: decisions. robots_ok, robots_failed: robots.txt retrievals, those that gave
    a file or a definite absence, and the others.
    """
    totals = Counter(dict.fromkeys(_TOTALS, 0))
    for (verdict, _), count in stats.decisions.items():
        totals[verdict.value] += count
    for name, count in stats.directory.outcomes.items():
        good = Outcome.named(name).good or name == Outcome.NOT_MODIFIED.row.name
        totals["robots_ok" if good else "robots_failed"] += count
    return totals
