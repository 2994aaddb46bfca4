"""Whole answers of warm records, made once for each rule that decides.

On a warm origin nearly all of a decision is the same from one URL to the next: two URLs
decided by the same rule differ in `url` and `id` alone. So the first one is kept as the
pattern of those that follow, and neither guard, operator nor file is asked again as long as
the record is fresh: what they say depends on the origin alone, and a new word of the
operator or a new file clears what was prepared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from msgspec.structs import replace

from gatekeeper import urls
from gatekeeper.clock import Clock
from gatekeeper.config import Config
from gatekeeper.deciding import Decider
from gatekeeper.decision import Decision, Reason, Verdict
from gatekeeper.fetching.records import Record

__all__ = ["PreparedAnswers"]

_ROBOTS_TXT = "/robots.txt"
_MAX_PATTERNS = 256
"""Rules of one file whose answer is kept; a file's URLs meet few of its rules."""


class _Prepared:
    """The answers of one record for one agent, by the number of the rule that decides."""

    __slots__ = ("decide", "patterns")

    def __init__(self, decide: Callable[[str], int]) -> None:
        self.decide = decide
        self.patterns: dict[int, tuple[Decision, tuple[Verdict, Reason]]] = {}


class PreparedAnswers:
    """What `check` has answered and may answer again. `warm` is the directory's own dict."""

    def __init__(self, config: Config, clock: Clock, decider: Decider) -> None:
        self.warm: dict[str, Record] = {}
        self._monotonic = clock.monotonic
        self._counts = decider.counts
        self._next_id = decider.next_id
        self._max_agents = config.cache.max_agents

    def recall(self, url: str, agent: str) -> Decision | None:
        """The decision about the URL, if everything about it is ordinary and was met before."""
        return self._recall(url, agent, self._monotonic())

    def recall_all(self, raws: Iterable[str], agent: str) -> list[Decision | None]:
        """The same for many, at one moment."""
        now = self._monotonic()
        recall = self._recall
        return [recall(url, agent, now) for url in raws]

    def _recall(self, url: str, agent: str, now: float) -> Decision | None:
        found = urls.split_ordinary(url)
        if found is None:
            return None
        record = self.warm.get(found[0])
        if record is None or record.prepared is None or now >= record.fresh_until:
            return None
        prepared: _Prepared | None = record.prepared.get(agent)
        if prepared is None:
            return None
        path = found[1]
        pattern = prepared.patterns.get(prepared.decide(path))
        if pattern is None or path == _ROBOTS_TXT:
            return None
        decision, key = pattern
        self._counts[key] += 1
        return replace(decision, url=url, id=self._next_id())

    def keep(self, decision: Decision, path: str, record: Record, agent: str) -> None:
        """Let the next URL that the same rule decides have its answer from this one.

        `record` answers by the policy of its text alone until `fresh_until`.
        """
        prepared = self._prepared(record, agent)
        if prepared is None or path == _ROBOTS_TXT or len(prepared.patterns) >= _MAX_PATTERNS:
            return
        key = (decision.verdict, decision.reason)
        prepared.patterns[prepared.decide(path)] = (decision, key)

    def _prepared(self, record: Record, agent: str) -> _Prepared | None:
        if record.prepared is None:
            record.prepared = {}
        prepared: _Prepared | None = record.prepared.get(agent)
        if prepared is None and len(record.prepared) < self._max_agents:
            policy = record.policies.get(agent)
            decide = None if policy is None else policy.decides_path
            # Visit-time is asked of the clock each time: it has no answer to keep.
            if policy is not None and decide is not None and not policy.timed:
                prepared = record.prepared[agent] = _Prepared(decide)
        return prepared
