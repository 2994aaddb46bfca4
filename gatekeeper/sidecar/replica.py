"""`GateAnswers`: decisions that need no waiting. `Replica`: those by another process's records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

import msgspec

from gatekeeper import urls
from gatekeeper.config import AuditConfig, Config, FleetConfig, HostRule, IdentityConfig
from gatekeeper.decision import Decision, Reason, Verdict
from gatekeeper.fetching.cache import RecordCache
from gatekeeper.fetching.directory import Directory
from gatekeeper.fetching.outcomes import Outcome
from gatekeeper.fetching.records import LARGE, Moment, OriginAnswer, Record
from gatekeeper.gate import Gatekeeper


class GateAnswers:
    """Decides by the records that a gate has."""

    def __init__(self, gate: Gatekeeper) -> None:
        self.gate: Gatekeeper = gate
        self._parts = gate.parts
        self._clock = gate.parts.clock
        self._monotonic = gate.parts.clock.monotonic
        self._decider = gate.parts.decider
        self._token = gate.parts.decider.token

    max_batch: int = 128
    """The most URLs for `decide_all`. `Gatekeeper.check_all` decides about longer batches, and lets
    the event loop do other work in between."""

    def decide_all(
        self, urls: Sequence[str], *, user_agent: str | None = None
    ) -> list[Decision] | None:
        """Return the decisions of `check_all`, or None, without any effect, if one has to wait."""
        decisions: list[Decision] = []
        with suppress(Exception):  # one URL's error is its own: `check_all` decides about each
            for url in urls:
                if (decision := self.decide(url, user_agent=user_agent)) is None:
                    break
                decisions.append(decision)
            else:
                return decisions
        for decision in decisions:
            self._decider.count({(decision.verdict, decision.reason): -1})
        return None

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
    session, no storage and no scheduler. The decider is that of any gate.
    """

    max_batch = 1000  # for other batches the connection is passed on to the owner

    def __init__(self, identity: str, config: Config, *, wanted: Callable[[str], object]) -> None:
        """`wanted(origin)` is called when a decision needs a record. Raises ConfigError."""
        config = _for_replica(config)
        self._refusals: Counter[str] = Counter()
        super().__init__(Gatekeeper(identity, config=config))
        self._wanted = wanted
        self._records = RecordCache(
            config, stored=True, records=self._decider.records, texts=self._decider.texts
        )
        self._counted: Counter[tuple[Verdict, Reason]] = Counter()

    # -- questions -------------------------------------------------------------------

    def _fresh(self, origin: str, agent: str) -> Record | None:
        record = self._records.get(origin)
        if record is not None and self._monotonic() < record.fresh_until:
            return record if Directory.is_prepared(record, agent) else None
        self._wanted(origin)
        return None

    # -- updates from the other process ----------------------------------------------

    def take_in(self, sent: SharedRecord) -> None:
        """Cache a record of the other process."""
        fetch = self.gate.config.fetch
        answer = OriginAnswer(Outcome.named(sent.outcome), *sent.about)
        text = None if sent.body is None else self._decider.texts.of(sent.body)
        until = sent.expires, sent.fresh_until
        self._records.put(Record(sent.origin, fetch, answer, *until, text=text, good=answer))

    def forget(self, origin: str) -> None:
        """Drop the record of an origin, if there is one."""
        self._records.drop(origin)

    def follow_rules(self, rules: Iterable[HostRule]) -> None:
        """Replace all rules about hosts by these."""
        self._parts.scheduler.host_rules.replace(rules)
        self._decider.forget()

    def adjust(self, config: Config) -> None:
        """Apply another configuration, except its rules about hosts. Raises ConfigError."""
        config, old = _for_replica(config), self.gate.config
        guard = self._parts.guard
        if guard is not None and config.guard != old.guard:
            guard.adjust(config.guard)
        # Records stay valid: the settings that they depend on change only with a restart.
        self.gate.config = config
        self._decider.adjust(config)

    # -- counters --------------------------------------------------------------------

    def drain_counts(self) -> tuple[Mapping[tuple[Verdict, Reason], int], Mapping[str, int]]:
        """Count the decisions and the guard's refusals since the last call."""
        decisions = Counter(self._decider.counts())
        guard = self._parts.guard
        refused = Counter() if guard is None else Counter(guard.stats().refused)
        found = decisions - self._counted, refused - self._refusals
        self._counted, self._refusals = decisions, refused
        return found


class SharedRecord(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """A fresh record that a text alone decides, for a `Replica` in another process. Its monotonic
    moments are valid on this machine until the next boot."""

    origin: str
    outcome: str
    about: tuple[int | None, float, tuple[str, ...], float]
    """The fields of its `OriginAnswer` that follow the outcome."""
    expires: float
    fresh_until: float
    body: bytes | None


def shared_record(gate: Gatekeeper, origin: str) -> SharedRecord | None:
    """Return the record of an origin for a `Replica` in another process of this machine.

    None if the text alone does not decide the next questions, or if it is a large one.
    """
    parts = gate.parts
    record = parts.directory.recall(origin)
    if record is None or not record.policy_only or parts.clock.monotonic() >= record.fresh_until:
        return None
    if record.text is not None and record.text.size >= LARGE:
        return None
    answer = record.current
    about = answer.status, answer.wall, answer.hops, answer.took
    body = None if record.text is None else record.text.body()
    until = record.expires, record.fresh_until
    return SharedRecord(origin, answer.outcome.row.name, about, *until, body)


def _for_replica(config: Config) -> Config:
    """Return the configuration without its state file, its fleet, its signing key and its audit
    record, which a gate that is never opened does not use."""
    storage = msgspec.structs.replace(config.storage, path=None)
    without = {"fleet": FleetConfig(), "identity": IdentityConfig(), "audit": AuditConfig()}
    return msgspec.structs.replace(config, storage=storage, **without)
