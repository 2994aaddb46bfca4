"""Grants and leases that write lines in the audit record, and otherwise are those of any gate.

`audit` is the `AuditRecord` that makes them, whose module imports this one.
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar
from weakref import ref

from gatekeeper.config import Config
from gatekeeper.decision import Decision, Deferred, Denied
from gatekeeper.errors import StorageError
from gatekeeper.fetching.faults import LocalFaults
from gatekeeper.fetching.records import Record
from gatekeeper.gate.decider import Decider, PathRuling
from gatekeeper.gate.lease import Lease, LeaseManager
from gatekeeper.gate.questions import GateQuestions
from gatekeeper.gate.robots_pacing import RobotsLease
from gatekeeper.pacing.grants import Grant
from gatekeeper.pacing.host_settings import ScopeSettings
from gatekeeper.pacing.ledger import Outcome
from gatekeeper.pacing.scheduler import Scheduler
from gatekeeper.pacing.scopes import UNDERIVED, Interval
from gatekeeper.urls import Target


class AuditedGrant(Grant, eq=False):
    """A grant that remembers its outcome until its end, and then has it written.

    It has a line of its end if it has one of its begin: `audit` is set then.
    """

    counts_bytes: ClassVar[bool] = True
    audit: Any = None
    lease_id: str = ""
    place: tuple[str, int] | None = None
    """The chain and the number of its line."""
    lease: ref[Lease] | None = None
    """Its lease, if requests are signed; None for a robots.txt."""
    head_at: float | None = None
    status: int | None = None
    retry_after: float | str | None = None
    size: int | None = None
    sent: bool = True
    """False if it was given back: no request was sent."""
    signals: dict[str, Any] | None = None
    """What the response said about use."""
    derived: Interval = UNDERIVED
    """The interval that it waited for, with its sources."""
    shared: tuple[ScopeSettings, ...] = ()
    """The settings by which it waited for each of `others`."""

    def __post_init__(self) -> None:
        """Note what it waited for: a report or new settings may come before its line is written."""
        self.derived = self.scope.derived
        if self.others:
            self.shared = tuple(other.settings for other in self.others)

    def is_ours(self) -> bool:
        """Return True if the gate itself sent the request, and not code of its user."""
        lease = None if self.lease is None else self.lease()
        return self.lease is None or (lease is not None and lease.is_ours)

    def received(self, size: int) -> None:
        """Note bytes of the response."""
        self.size = (self.size or 0) + max(0, size)
        Grant.received(self, size)

    def head(self, now: float | None = None) -> None:
        """Note the head of the response."""
        if self.head_at is None and self.open:
            self.head_at = now = self.engine.now() if now is None else now
        Grant.head(self, now)

    def report(
        self,
        status: int | None = None,
        elapsed: float | None = None,
        retry_after: float | str | None = None,
        rate_limit: str | None = None,
        now: float | None = None,
    ) -> None:
        """Note how the request went."""
        if not self.reported:
            self.status, self.retry_after = status, retry_after
            if status is not None and self.head_at is None:
                self.head_at = now = self.engine.now() if now is None else now
        Grant.report(self, status, elapsed, retry_after, rate_limit, now)

    def release(self, now: float | None = None) -> None:
        """Write the outcome, and end the grant."""
        if self.open and self.audit is not None:
            self.audit.ended(self)
        Grant.release(self, now)

    def _withdraw(self, outcome: Outcome) -> None:
        self.sent = False
        Grant._withdraw(self, outcome)


class AuditedLeases(LeaseManager):
    """Grants a lease once its line is written."""

    def __init__(
        self, audit: Any, questions: GateQuestions, scheduler: Scheduler, faults: LocalFaults
    ) -> None:
        super().__init__(questions, scheduler, faults)
        self._audit = audit

    def acquire_nowait(self, url: str, owner: asyncio.Task[object] | None) -> Lease | None:
        """Grant a lease without waiting; see `LeaseManager`."""
        lease = LeaseManager.acquire_nowait(self, url, owner)
        if lease is not None:
            record = self.decider.records.get(lease.decision.origin)
            if self._written(lease, record):
                return lease
        return None

    async def acquire(self, url: str, owner: asyncio.Task[object] | None, **options: Any) -> Lease:
        """Wait for a lease; see `LeaseManager`."""
        try:
            return await LeaseManager.acquire(self, url, owner, **options)
        except Denied as error:
            self._audit.refused(error.decision)
            raise

    def _lease(
        self,
        grant: Grant,
        target: Target,
        owner: asyncio.Task[object] | None,
        decision: Decision,
        record: Record | None,
        agent: str | None = None,
        *,
        restored: bool = False,
    ) -> Lease:
        lease = LeaseManager._lease(self, grant, target, owner, decision, record, agent)
        # The request of a restored lease may be in flight, whether or not its line can be written.
        if not self._written(lease, record, restored=restored):
            why = self._audit.failing or "the audit record can't be written"
            raise Deferred(self.questions.no_lease(target.url, target, agent, why))
        return lease

    def _written(self, lease: Lease, record: Record | None, *, restored: bool = False) -> bool:
        """Write the line of a lease. If that fails, undo its grant and return False."""
        grant = lease.grant
        if self._audit.granted(grant, lease.url, lease.decision, record):
            if self._audit.signs and isinstance(grant, AuditedGrant):
                grant.lease = ref(lease)
            return True
        if restored:
            return True
        grant.undo()
        lease.end()
        return False


class AuditedRobotsLease(RobotsLease, eq=False):
    """The lease of a robots.txt request, granted once its line is written."""

    audit: Any = None

    async def __aenter__(self) -> Grant:
        grant, audit = await RobotsLease.__aenter__(self), self.audit
        if audit is not None and not audit.robots_granted(grant, self._target):
            grant.undo()
            await self.__aexit__(None, None, None)
            raise StorageError(f"{self._target.host} can't be asked: {audit.failing}")
        return grant


class AuditedDecider(Decider):
    """Tells of each decision."""

    def __init__(self, audit: Any, config: Config, **options: Any) -> None:
        super().__init__(config, **options)
        self._audit = audit

    def tell(self, frame: Decision, ruling: PathRuling, url: str) -> Decision:
        """Return the decision about a URL, and write it."""
        decision = Decider.tell(self, frame, ruling, url)
        self._audit.decided(decision)
        return decision
