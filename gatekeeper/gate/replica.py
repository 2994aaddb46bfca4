"""A gate that decides by what another process knows, and asks no site."""

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
    """Decides by records that the gate of another process of this machine hands it, for as long as
    they are fresh; of what it does not know it says None.

    Its gate is never opened: it has no session, no storage and no turns. What decides, and the
    cache in front of that, are those of any gate.
    """

    def __init__(self, identity: str, config: Config, *, wanted: Callable[[str], object]) -> None:
        """`wanted(origin)` is called where a decision needs a record. Raises ConfigError."""
        self._config = _own(config)
        self._refused: Counter[str] = Counter()
        super().__init__(Gatekeeper(identity, config=self._config))
        self._wanted = wanted
        self._expiry = SoftExpiry(self._gate._decider.records, self.clock)
        self._records = RecordCache(self._config, stored=True, expiry=self._expiry)
        self._told: Counter[tuple[Verdict, Reason]] = Counter()

    @property
    def gate(self) -> Gatekeeper:
        """The gate that is never opened."""
        return self._gate

    # -- questions -------------------------------------------------------------------

    def recall(self, url: str, *, user_agent: str | None = None) -> Decision | None:
        """The decision of `check`, where the record is here; else None. Raises InvalidURL."""
        return self.decide(url, user_agent=user_agent)

    def _fresh(self, origin: str, agent: str) -> Record | None:
        record = self._records.get(origin)
        if record is not None and self._monotonic() < record.fresh_until:
            if Directory.is_prepared(record, agent):
                return record
            return None
        self._wanted(origin)
        return None

    # -- what is handed to it --------------------------------------------------------

    def take_in(self, origin: str, record: bytes) -> None:
        """Decide by this record from now on; see `GateInternals.shared_record`."""
        self._records.put_octets(origin, record)

    def forget(self, origins: Iterable[str]) -> None:
        """Decide by what is known of these origins no more."""
        for origin in origins:
            self._records.drop(origin)

    def follow_rules(self, rules: Iterable[HostRule]) -> None:
        """Put these rules about hosts in the place of all."""
        self._gate._overrides.replace(rules)
        self._decider.forget()

    def adjust(self, config: Config) -> None:
        """Put another configuration in force, but for its rules about hosts. Raises ConfigError."""
        config, old = _own(config), self._config
        if self.guard is not None and config.guard != old.guard:
            self.guard.adjust(config.guard)
        self._config = config
        # Its records stay: what they are made by needs a restart.
        self._gate._adjusted(config)

    def close(self) -> None:
        """End its timer, and know nothing. Idempotent."""
        self._expiry.close()

    # -- what it counted -------------------------------------------------------------

    def drain_counts(self) -> tuple[Mapping[tuple[Verdict, Reason], int], Mapping[str, int]]:
        """What was decided, and refused by the guard, since the call before; see
        `GateInternals.count`."""
        decisions = Counter(self._decider.counts())
        refused = Counter() if self.guard is None else Counter(self.guard.stats().refused)
        found = decisions - self._told, refused - self._refused
        self._told, self._refused = decisions, refused
        return found


def _own(config: Config) -> Config:
    """The configuration without what a gate that is never opened has no use for: its state file,
    its fleet, its key."""
    storage = msgspec.structs.replace(config.storage, path=None)
    return msgspec.structs.replace(
        config, storage=storage, fleet=FleetConfig(), identity=IdentityConfig()
    )
