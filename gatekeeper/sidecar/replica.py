"""`GateAnswers`: decisions that need no waiting. `Replica`: those by another process's records."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from gatekeeper import urls
from gatekeeper.config import Config, FleetConfig, HostRule, IdentityConfig
from gatekeeper.decision import Decision, Reason, Verdict
from gatekeeper.errors import InvalidURL
from gatekeeper.fetching.cache import RecordCache, SoftExpiry, record_octets
from gatekeeper.fetching.directory import Directory
from gatekeeper.fetching.records import LARGE, Moment, Record
from gatekeeper.gate import Gatekeeper
from gatekeeper.gate.decision_cache import DecisionBatch, WrittenDecision

_log = logging.getLogger(__name__)


class GateAnswers:
    """Decides by the records that a gate has."""

    def __init__(self, gate: Gatekeeper) -> None:
        self.gate: Gatekeeper = gate
        self._parts = gate.parts
        self._clock = gate.parts.clock
        self._monotonic = gate.parts.clock.monotonic
        self._decider = gate.parts.decider
        self._token = gate.parts.decider.token

    def recall(self, url: str, *, user_agent: str | None = None) -> Decision | None:
        """Return the decision of `check` if the decision cache has it; else None."""
        return self._decider.recall(url, self._token(user_agent), self._clock)

    def write(self, url: str, *, user_agent: str | None = None) -> WrittenDecision | None:
        """Recall a decision to be sent as JSON. None if the decision cache does not have it."""
        return self._decider.write(url, self._token(user_agent), self._monotonic())

    def write_many(self, urls: Sequence[str], *, user_agent: str | None = None) -> DecisionBatch:
        """Recall decisions about many URLs, to be sent as JSON. `DecisionBatch.tally` counts them.

        A decision is also missing if its rule decided no URL before.
        """
        agent = self._token(user_agent)
        try:
            return self._decider.write_many(urls, agent, self._monotonic())
        except Exception:  # noqa: BLE001 - one URL's error is its own
            # The error of one URL must not fail its batch: all are decided one by one instead.
            _log.exception("a batch of URLs can't be answered together")
            return DecisionBatch([None] * len(urls), [b""] * len(urls), 0)

    def knows(self, url: str, *, user_agent: str | None = None) -> bool:
        """Return True if `decide` answers: the file of the URL's origin is cached and fresh."""
        agent = self._token(user_agent)
        try:
            return self._fresh(urls.parse(url).origin, agent) is not None
        except InvalidURL:
            return False

    def decide(self, url: str, *, user_agent: str | None = None) -> Decision | None:
        """Return the decision of `check` if that needs no waiting; else None. Raises InvalidURL."""
        agent = self._token(user_agent)
        decision = self._decider.recall(url, agent, self._clock)
        if decision is not None:
            return decision
        target, moment = urls.parse(url), Moment(self._monotonic(), self._clock.wall())
        return self._decider.decide(url, target, agent, self._fresh(target.origin, agent), moment)

    def _fresh(self, origin: str, agent: str) -> Record | None:
        return self._parts.questions.fresh(origin, agent)


class Replica(GateAnswers):
    """Decides by records from the gate of another process of this machine, while they are fresh.

    It returns None for an origin without a fresh record. Its own gate is never opened: it has no
    session, no storage and no turns. Decider and decision cache are those of any gate.
    """

    def __init__(self, identity: str, config: Config, *, wanted: Callable[[str], object]) -> None:
        """`wanted(origin)` is called when a decision needs a record. Raises ConfigError."""
        self._config = _for_replica(config)
        self._refusals: Counter[str] = Counter()
        super().__init__(Gatekeeper(identity, config=self._config))
        self._wanted = wanted
        self._expiry = SoftExpiry(self._decider.records, self._clock)
        self._records = RecordCache(self._config, stored=True, expiry=self._expiry)
        self._counted: Counter[tuple[Verdict, Reason]] = Counter()

    # -- questions -------------------------------------------------------------------

    def recall(self, url: str, *, user_agent: str | None = None) -> Decision | None:
        """Return the decision of `check` if the record is here; else None. Raises InvalidURL."""
        return self.decide(url, user_agent=user_agent)

    def _fresh(self, origin: str, agent: str) -> Record | None:
        record = self._records.get(origin)
        if record is not None and self._monotonic() < record.fresh_until:
            if Directory.is_prepared(record, agent):
                return record
            return None
        self._wanted(origin)
        return None

    # -- updates from the other process ----------------------------------------------

    def take_in(self, origin: str, record: bytes) -> None:
        """Cache a record that `shared_record` encoded."""
        self._records.put_octets(origin, record)

    def forget(self, origins: Iterable[str]) -> None:
        """Drop the records of these origins."""
        for origin in origins:
            self._records.drop(origin)

    def follow_rules(self, rules: Iterable[HostRule]) -> None:
        """Replace all rules about hosts by these."""
        self._parts.scheduler.host_rules.replace(rules)
        self._decider.forget()

    def adjust(self, config: Config) -> None:
        """Apply another configuration, except its rules about hosts. Raises ConfigError."""
        config, old = _for_replica(config), self._config
        guard = self._parts.guard
        if guard is not None and config.guard != old.guard:
            guard.adjust(config.guard)
        self._config = config
        # Records stay valid: the settings that they depend on change only with a restart.
        self.gate.config = config
        self._decider.adjust(config)

    def close(self) -> None:
        """Cancel its timer and drop its records. Idempotent."""
        self._expiry.close()

    # -- counters --------------------------------------------------------------------

    def drain_counts(self) -> tuple[Mapping[tuple[Verdict, Reason], int], Mapping[str, int]]:
        """Count the decisions and the guard's refusals since the last call."""
        decisions = Counter(self._decider.counts())
        guard = self._parts.guard
        refused = Counter() if guard is None else Counter(guard.stats().refused)
        found = decisions - self._counted, refused - self._refusals
        self._counted, self._refusals = decisions, refused
        return found


def shared_record(gate: Gatekeeper, origin: str) -> bytes | None:
    """Encode the record of an origin for a `Replica` in another process of this machine.

    None if the text alone does not decide the next questions, or if it is a large one.
    """
    parts = gate.parts
    record = parts.directory.recall(origin)
    if record is None or not record.policy_only or parts.clock.monotonic() >= record.fresh_until:
        return None
    if record.text is not None and record.text.size >= LARGE:
        return None
    return record_octets(record)


def _for_replica(config: Config) -> Config:
    """Return the configuration without its state file, its fleet and its signing key, which a gate
    that is never opened does not use."""
    storage = msgspec.structs.replace(config.storage, path=None)
    return msgspec.structs.replace(
        config, storage=storage, fleet=FleetConfig(), identity=IdentityConfig()
    )
