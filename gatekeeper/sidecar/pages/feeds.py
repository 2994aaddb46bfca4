"""What operators are shown of the past: the latest decisions, and the last hour in numbers.

`DecisionFeed` keeps the latest decisions in a ring of fixed size. On the way of an answer stands
one append; whoever reads the ring (an open page) does so ten times a second, at his own cost.
`Series` keeps what was counted each ten seconds, for an hour.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from heapq import merge
from itertools import islice
from math import inf, isnan
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
from msgspec.structs import replace

from gatekeeper.clock import Clock, SingleTimer, SystemClock
from gatekeeper.decision import Decision, Verdict
from gatekeeper.fetching.outcomes import Outcome
from gatekeeper.gate.decision_cache import CachedDecision, WrittenDecision
from gatekeeper.urls import host_of

if TYPE_CHECKING:
    from gatekeeper.gate import GateStats
    from gatekeeper.sidecar.service import Service

_RING: Final = 4096
"""Decisions given one at a time that are kept."""
_BATCHES: Final = 8
"""Batches that are kept, of a thousand decisions each."""
_HOSTS: Final = 50_000
"""Hosts whose last status and totals are kept, twice over: in use, and from before."""


class GivenDecision(NamedTuple):
    """One decision of the ring."""

    number: int
    """Counts the decisions of the process, from 1: later is greater."""
    at: float
    """Wall seconds."""
    decision: Decision
    request: str
    client: str


class Counts:
    """How often the URLs of a host were allowed, denied and deferred."""

    __slots__ = ("allow", "defer", "deny", "origins")

    def __init__(self) -> None:
        self.allow: int = 0
        self.deny: int = 0
        self.defer: int = 0
        self.origins: tuple[str, ...] = ()
        """Origins that were asked about, `_MOST_ORIGINS` at most: a host has one for each port."""

    def add(self, verdict: Verdict, count: int = 1) -> None:
        """So many more."""
        if verdict is Verdict.ALLOW:
            self.allow += count
        elif verdict is Verdict.DENY:
            self.deny += count
        else:
            self.defer += count


_MOST_ORIGINS: Final = 16
_NONE: Final = Counts()
_ALLOW: Final = Verdict.ALLOW


class DecisionNote(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A decision that was given in an answer of its own, as another process tells of it."""

    at: float
    """Wall seconds."""
    request: str
    client: str
    base: int
    """The place among those told with it of one that differs from it in URL and id alone."""
    url: str
    id: str


class _NotedDecision(msgspec.Struct, frozen=True, gc=False):
    """A decision of another process; it is read when somebody looks."""

    base: msgspec.Raw
    """One that differs from it in URL and id alone, in MessagePack."""
    url: str
    id: str

    @property
    def decision(self) -> Decision:
        """What was given, read anew each time."""
        return replace(_packed_decision.decode(self.base), url=self.url, id=self.id)


_Entry = tuple[int, float, Decision | WrittenDecision | _NotedDecision, str, str]
"""The fields of a `GivenDecision`: a plain tuple costs a third of one with names."""
_Batch = tuple[int, float, Sequence[str], str, str]
_decision = msgspec.json.Decoder(Decision)
_pack = msgspec.msgpack.Encoder().encode
_packed_decision = msgspec.msgpack.Decoder(Decision)


def _given(entry: _Entry) -> GivenDecision:
    number, at, decision, request, client = entry
    if not isinstance(decision, Decision):
        decision = decision.decision
    return GivenDecision(number, at, decision, request, client)


class DecisionFeed:
    """The latest decisions, the totals of each host, and what its pages answered last.

    >>> from gatekeeper.clock import VirtualClock
    >>> from gatekeeper.decision import Reason
    >>> feed = DecisionFeed(VirtualClock())
    >>> feed.add(Decision(verdict=Verdict.DENY, reason=Reason.RULE, url="https://a.example/x",
    ...                   origin="https://a.example", user_agent="bot", id="7"), "1", "local")
    >>> [one.decision.id for one in feed.since(0)], feed.counts("a.example").deny
    (['7'], 1)
    """

    def __init__(self, clock: Clock, *, ring: int = _RING, batches: int = _BATCHES) -> None:
        self.count: int = 0
        """Decisions given since the start."""
        self._ring: deque[_Entry] = deque(maxlen=ring)
        self._append = self._ring.append
        self._batches: deque[_Batch] = deque(maxlen=batches)
        self._statuses: dict[str, tuple[int, float]] = {}
        self._earlier_statuses: dict[str, tuple[int, float]] = {}
        self._hosts: dict[str, Counts] = {}
        self._earlier_hosts: dict[str, Counts] = {}
        self._origins: dict[str, Counts] = {}
        """Those of the hosts, found by an origin without reading it."""
        self._wall = time.time if type(clock) is SystemClock else clock.wall

    def add(
        self,
        decision: Decision,
        request: str,
        client: str,
        written: WrittenDecision | None = None,
    ) -> None:
        """Keep one, in the place of the oldest. `written`: what was given, where `decision` only is
        like it."""
        number = self.count + 1
        self.count = number
        self._append((number, self._wall(), written or decision, request, client))
        counts = self._origins.get(decision.origin)
        if counts is None:
            counts = self.count_of(decision.origin)
        if decision.verdict is _ALLOW:  # most are, and a call costs as much as all the rest
            counts.allow += 1
        else:
            counts.add(decision.verdict)

    def count_of(self, origin: str) -> Counts:
        """The totals of the origin's host, to add to."""
        counts = self._origins.get(origin)
        if counts is None:
            host = host_of(origin)
            counts = self._hosts.get(host)
            if counts is None:
                if len(self._hosts) >= _HOSTS:
                    self._earlier_hosts, self._hosts, self._origins = self._hosts, {}, {}
                earlier = self._earlier_hosts.pop(host) if host in self._earlier_hosts else None
                counts = self._hosts[host] = earlier or Counts()
            if len(self._origins) >= 2 * _HOSTS:
                self._origins.clear()
            self._origins[origin] = counts
            if origin not in counts.origins and len(counts.origins) < _MOST_ORIGINS:
                counts.origins += (origin,)
        return counts

    def add_batch(
        self, decisions: Sequence[str], request: str, client: str, *, at: float | None = None
    ) -> None:
        """Keep those of a batch, as the JSON that was given: nobody looks at most of them. They
        are not counted here (see `count_of`). `at`: wall seconds, unless it is now."""
        at = self._wall() if at is None else at
        self._batches.append((self.count + 1, at, decisions, request, client))
        self.count += len(decisions)

    def reported(self, host: str, status: int) -> None:
        """A client said what a page of the host answered."""
        if len(self._statuses) >= _HOSTS and host not in self._statuses:
            self._earlier_statuses, self._statuses = self._statuses, {}
        self._statuses[host] = (status, self._wall())

    # --- between processes --------------------------------------------------------------

    def take_counts(self) -> dict[str, Counts]:
        """The totals by one origin of each host, which begin anew."""
        hosts = [*self._hosts.values(), *self._earlier_hosts.values()]
        self._hosts, self._earlier_hosts, self._origins = {}, {}, {}
        return {counts.origins[0]: counts for counts in hosts if counts.origins}

    def take_latest(self, most: int) -> tuple[list[DecisionNote], list[msgspec.Raw], list[_Batch]]:
        """The latest decisions that were given one at a time, `most` of them, with those that they
        are like, in MessagePack; and the latest batches. None is kept here any more."""
        places: dict[CachedDecision, int] = {}
        bases: list[msgspec.Raw] = []
        notes: list[DecisionNote] = []
        for _, at, given, request, client in list(self._ring)[-most:]:
            # What is the same for all that a rule decides is told once.
            cached = given.cached if isinstance(given, WrittenDecision) else None
            place = None if cached is None else places.get(cached)
            if place is None:
                place = len(bases)
                bases.append(msgspec.Raw(_pack(given if cached is None else cached.decision)))
                if cached is not None:
                    places[cached] = place
            notes.append(DecisionNote(at, request, client, place, given.url, given.id))
        batches = list(self._batches)
        self._ring.clear()
        self._batches.clear()
        return notes, bases, batches

    def merge(self, note: DecisionNote, base: msgspec.Raw) -> None:
        """Keep what another process gave; it is not counted here."""
        self.count += 1
        noted = _NotedDecision(base, note.url, note.id)
        self._append((self.count, note.at, noted, note.request, note.client))

    # --- reading ------------------------------------------------------------------------

    def counts(self, host: str) -> Counts:
        """What was decided about the URLs of a host since the start, or since its totals were
        forgotten: those of the 50,000 hosts asked about last are kept at least."""
        return self._hosts.get(host) or self._earlier_hosts.get(host) or _NONE

    def last_status(self, host: str) -> tuple[int, float] | None:
        """The status that was last reported of a page of the host, and when (wall seconds)."""
        return self._statuses.get(host) or self._earlier_statuses.get(host)

    @property
    def oldest(self) -> int:
        """The number of the oldest decision that is kept; one more than `count` if none is."""
        first = [self._ring[0][0]] if self._ring else []
        batch = [self._batches[0][0]] if self._batches else []
        return min((*first, *batch), default=self.count + 1)

    def since(self, number: int, most: int | None = None) -> list[GivenDecision]:
        """The latest `most` of those that came after that number, oldest first."""
        most = _RING + _BATCHES * 1000 if most is None else most
        singles: list[GivenDecision] = []
        for one in reversed(self._ring):
            if one[0] <= number or len(singles) >= most:
                break
            singles.append(_given(one))
        batched: list[GivenDecision] = []
        for first, at, texts, request, client in reversed(self._batches):
            if first + len(texts) - 1 <= number or len(batched) >= most:
                break
            low = max(0, number + 1 - first, len(texts) - (most - len(batched)))
            for n in range(len(texts) - 1, low - 1, -1):
                decision = _decision.decode(texts[n])
                batched.append(GivenDecision(first + n, at, decision, request, client))
        together = merge(singles, batched, key=lambda one: -one.number)
        return list(islice(together, most))[::-1]

    def find(self, decision_id: str) -> GivenDecision | None:
        """The decision of that id, if it is still kept."""
        for one in map(_given, reversed(self._ring)):
            if one.decision.id == decision_id:
                return one
        end = f'"id":{msgspec.json.encode(decision_id).decode()}}}'
        for first, at, texts, request, client in reversed(self._batches):
            for n, text in enumerate(texts):
                if text.endswith(end):
                    decision = _decision.decode(text)
                    return GivenDecision(first + n, at, decision, request, client)
        return None

    def urls_of(self, origin: str, most: int) -> list[str]:
        """URLs of an origin that were asked about lately, the latest first, each once."""
        found: dict[str, None] = {}
        for one in map(_given, reversed(self._ring)):
            if one.decision.origin == origin:
                found[one.decision.url] = None
        mark = f'"origin":{msgspec.json.encode(origin).decode()}'
        for _, _, texts, _, _ in reversed(self._batches):
            for text in texts:
                if len(found) >= most:
                    break
                if mark in text:
                    found[_decision.decode(text).url] = None
        return list(islice(found, most))


# --- The last hour.

STEP: Final = 10.0
"""Seconds between two points."""
POINTS: Final = 360


class SeriesBody(msgspec.Struct, frozen=True):
    """The last hour, oldest first; every list is as long as `times`."""

    step: float
    """Seconds between two points."""
    times: list[float]
    """Seconds since 1970, of the end of each step."""
    values: dict[str, list[float | None]]
    """allow, deny, defer: decisions a second. robots_ok, robots_failed: retrievals of robots.txt
    in the step. wait_p50, wait_p95: seconds that leases were waited for, None where none was
    granted. waiting, leases: how many there were."""


NAMES: Final = (
    *("allow", "deny", "defer", "robots_ok", "robots_failed"),
    *("wait_p50", "wait_p95", "waiting", "leases"),
)


class Series:
    """Looks at the counters every ten seconds, and keeps what it saw for an hour."""

    def __init__(self, service: Service, clock: Clock, follow: Callable[[], object]) -> None:
        """`follow` is called with each look."""
        self._service = service
        self._clock = clock
        self._follow = follow
        self._points: deque[tuple[float, dict[str, float | None]]] = deque(maxlen=POINTS)
        """When it looked (wall seconds), and what it saw."""
        self._timer = SingleTimer(clock, self._look)
        self._due = 0.0
        self._before: Mapping[str, float] = {}
        self._waits: list[int] = []

    def start(self) -> None:
        """Look every `STEP` seconds from now on. Idempotent."""
        if self._timer.when == inf:
            self._before, self._waits = self._totals(), self._service.metrics.queue_wait.counts()
            self._due = self._clock.monotonic() + STEP
            self._timer.set(self._due)

    def close(self) -> None:
        """Look no more. Idempotent."""
        self._timer.cancel()

    def body(self) -> SeriesBody:
        """What was seen."""
        points = self._points
        values = {name: [seen[name] for _, seen in points] for name in NAMES}
        return SeriesBody(STEP, [at for at, _ in points], values)

    def rates(self) -> dict[str, float | None]:
        """The latest point."""
        return self._points[-1][1] if self._points else dict.fromkeys(NAMES)

    def _look(self) -> None:
        self._due = max(self._due, self._clock.monotonic() - STEP) + STEP
        self._timer.set(self._due)
        service = self._service
        if service.phase == "closed":
            return
        now, waits = self._totals(), service.metrics.queue_wait.counts()
        seen: dict[str, float | None] = {}
        for name, total in now.items():
            grown = float(total - self._before.get(name, 0.0))
            seen[name] = grown if name.startswith("robots") else grown / STEP
        grown_by = [new - old for new, old in zip(waits, self._waits, strict=True)]
        for name, share in (("wait_p50", 0.5), ("wait_p95", 0.95)):
            seconds = service.metrics.queue_wait.quantile(grown_by, share)
            seen[name] = None if isnan(seconds) else seconds
        seen["waiting"] = float(len(service.leases.waiters))
        seen["leases"] = float(len(service.leases))
        self._points.append((self._clock.wall(), seen))
        self._before, self._waits = now, waits
        self._follow()

    def _totals(self) -> dict[str, float]:
        stats = self._service.gate.stats()
        totals = dict.fromkeys(("allow", "deny", "defer"), 0.0)
        for (verdict, _), count in stats.decisions.items():
            totals[verdict.value] += count
        ok, failed = retrievals(stats)
        return {**totals, "robots_ok": ok, "robots_failed": failed}


def retrievals(stats: GateStats) -> tuple[int, int]:
    """Retrievals of robots.txt that brought a file or a definite absence, and the others."""
    good = failed = 0
    for name, count in stats.directory.outcomes.items():
        if Outcome.named(name).good or name == Outcome.NOT_MODIFIED.row.name:
            good += count
        else:
            failed += count
    return good, failed
