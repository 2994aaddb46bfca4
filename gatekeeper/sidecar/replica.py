"""`Replica`: decides by the records of another process's gate, and contacts no site."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import msgspec

from gatekeeper.config import Config, FleetConfig, HostRule, IdentityConfig
from gatekeeper.decision import Decision, Reason, Verdict
from gatekeeper.fetching.cache import RecordCache, SoftExpiry
from gatekeeper.fetching.directory import Directory
from gatekeeper.fetching.records import Record
from gatekeeper.gate.gatekeeper import Gatekeeper
from gatekeeper.gate.internals import GateInternals


class Replica(GateInternals):
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
        self._expiry = SoftExpiry(self._gate._decider.records, self.clock)
        self._records = RecordCache(self._config, stored=True, expiry=self._expiry)
        self._counted: Counter[tuple[Verdict, Reason]] = Counter()

    @property
    def gate(self) -> Gatekeeper:
        """The replica's own gate, which is never opened."""
        return self._gate

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
        """Cache a record that `GateInternals.shared_record` encoded."""
        self._records.put_octets(origin, record)

    def forget(self, origins: Iterable[str]) -> None:
        """Drop the records of these origins."""
        for origin in origins:
            self._records.drop(origin)

    def follow_rules(self, rules: Iterable[HostRule]) -> None:
        """Replace all rules about hosts by these."""
        self._gate._overrides.replace(rules)
        self._decider.forget()

    def adjust(self, config: Config) -> None:
        """Apply another configuration, except its rules about hosts. Raises ConfigError."""
        config, old = _for_replica(config), self._config
        if self.guard is not None and config.guard != old.guard:
            self.guard.adjust(config.guard)
        self._config = config
        # Records stay valid: the settings that they depend on change only with a restart.
        self._gate._apply_config(config)

    def close(self) -> None:
        """Cancel its timer and drop its records. Idempotent."""
        self._expiry.close()

    # -- counters --------------------------------------------------------------------

    def drain_counts(self) -> tuple[Mapping[tuple[Verdict, Reason], int], Mapping[str, int]]:
        """Count the decisions and the guard's refusals since the last call, for
        `GateInternals.count`."""
        decisions = Counter(self._decider.counts())
        refused = Counter() if self.guard is None else Counter(self.guard.stats().refused)
        found = decisions - self._counted, refused - self._refusals
        self._counted, self._refusals = decisions, refused
        return found


def _for_replica(config: Config) -> Config:
    """Return the configuration without its state file, its fleet and its signing key, which a gate
    that is never opened does not use."""
    storage = msgspec.structs.replace(config.storage, path=None)
    return msgspec.structs.replace(
        config, storage=storage, fleet=FleetConfig(), identity=IdentityConfig()
    )
