"""`GateParts`: what a product needs of a gate beyond its public methods, as a few named parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import aiohttp
import msgspec
from aiohttp.abc import AbstractResolver

from gatekeeper.clock import Clock
from gatekeeper.config import Config, IdentityConfig
from gatekeeper.decision import Decision
from gatekeeper.errors import GateClosed
from gatekeeper.fetching.allowed_addresses import Guard
from gatekeeper.fetching.directory import Directory, OnRetrieval
from gatekeeper.fetching.fetcher import Fetcher
from gatekeeper.fetching.outcomes import RequestSigner
from gatekeeper.fetching.records import Record
from gatekeeper.gate.decider import Decider
from gatekeeper.gate.lease import Lease, LeaseManager
from gatekeeper.gate.protocols import DeadlineMiddleware, HeldLease
from gatekeeper.gate.questions import GateQuestions
from gatekeeper.gate.robots_pacing import RobotsLease
from gatekeeper.late import late
from gatekeeper.pacing.deadlock import WaitGraph
from gatekeeper.pacing.grants import PacingAudit
from gatekeeper.pacing.scheduler import Scheduler
from gatekeeper.storage.base import Storage
from gatekeeper.urls import UrlCache


class GateFollower(Protocol):
    """Listener for changes of what a gate knows, which other processes need too.

    Its methods must be short and must not raise.
    """

    def learnt(self, record: Record) -> object:
        """Called with a new record, just before it is cached."""

    def rules_changed(self) -> None:
        """Called after the operator's rules about hosts changed at run time."""


class FoundLine(NamedTuple):
    """A line of the audit record."""

    chain: str
    segment: str
    line: dict[str, Any]


class AuditStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the audit record."""

    folder: str
    chain: str
    """The name of the chain that this gate writes."""
    lines: int
    """Lines of that chain."""
    failing: str | None
    """Why nothing can be written at the moment; None: lines are written."""
    refuses: bool
    """Whether leases are refused while nothing can be written."""
    segments: int
    """Segments in the folder, of all chains."""
    size: int
    """Their octets."""
    sealed_at: str | None
    """When the chain was last sealed; None: never."""
    sealed_line: int | None
    signed: bool
    """Whether its seals are signed."""


class GateAudit(PacingAudit, Protocol):
    """The audit record of a gate (`audit.folder`).

    Its classes stand in for those of the same interface, and write lines. A gate without an audit
    record has none of it in its way.
    """

    decider: Callable[..., Decider]
    leases: Callable[..., LeaseManager]
    robots_lease: Callable[..., RobotsLease]
    every_decision: bool
    """Decisions are written as well, not requests and refusals alone."""

    def answered(self, lease: HeldLease, status: int, headers: Mapping[str, str]) -> None:
        """Note what the head of a response says about use."""

    def place_of(self, lease: Lease) -> tuple[str, int] | None:
        """Return the chain and the number of the line of a lease; None if it has none."""

    async def status(self) -> AuditStatus:
        """Return the state of the record. Raises OSError."""

    async def find(self, decision: str) -> FoundLine | None:
        """Find a line about a decision in the open and the last closed segment. Raises OSError."""

    def refused(self, decision: Decision) -> None:
        """Note that a page was refused without asking for a lease."""

    def decided_elsewhere(self, decisions: Sequence[Decision], count: int) -> None:
        """Note decisions of another process by this gate's records, and how many more it made."""

    async def open(self, parts: GateParts) -> None:
        """Begin a chain. Raises StorageError."""

    async def close(self) -> None:
        """End the chain."""


@dataclass(frozen=True, slots=True)
class OpenParts:
    """The parts that a gate has only while it is open."""

    session: aiohttp.ClientSession | None
    """The gate's own session; None if the caller passed one."""
    requests: aiohttp.ClientSession
    """The gate's own session, or the caller's: robots.txt is fetched over its connections."""
    fetcher: Fetcher
    directory: Directory
    questions: GateQuestions
    leases: LeaseManager


@dataclass(frozen=True, slots=True, kw_only=True)
class GateParts:
    """The parts of a gate, for the products of this package: it may change in any version."""

    clock: Clock
    decider: Decider
    scheduler: Scheduler
    waits: WaitGraph[Lease]
    """Which tasks hold which leases and wait for which hosts."""
    storage: Storage | None
    guard: Guard | None
    """None if the caller passed a session to the gate."""
    resolver: AbstractResolver | None
    """The resolver of its connector; None: the system's."""
    url_cache: UrlCache
    """Cache of parsed URLs, which the gate's own connector recognises."""
    signer: RequestSigner | None
    """Signs requests; None: they are not signed."""
    audit: GateAudit | None
    """Records what the gate does; None: nobody does."""
    middleware: DeadlineMiddleware
    """`Gatekeeper.middleware` for a session that passes a deadline with each request, or None,
    and may parse its URLs with `url_cache`."""
    make_connector: Callable[[], aiohttp.TCPConnector]
    """Make a connector that connects through this gate's guard; its session closes it."""
    opened: Callable[[], OpenParts]
    """Return the parts of the open gate. Raises GateClosed."""
    followers: list[GateFollower] = field(default_factory=list)
    """They are told of new records and of rules that change at run time."""
    listeners: list[OnRetrieval] = field(default_factory=list)
    """Each is called as `listener(origin, retrieval, seconds)` after each robots.txt fetch.

    `seconds` include the wait for leases; `retrieval.took` is the network time alone. A listener
    must be short and must not raise. It runs in the context of the first asker."""

    @property
    def directory(self) -> Directory:
        """The records of origins. Raises GateClosed, as the next two do."""
        return self.opened().directory

    @property
    def questions(self) -> GateQuestions:
        """Decides about URLs, after fetching the files that they need."""
        return self.opened().questions

    @property
    def leases(self) -> LeaseManager:
        """Grants leases."""
        return self.opened().leases

    @property
    def connector(self) -> aiohttp.BaseConnector:
        """The connector that fetches robots.txt, for another session on the same connections
        (`connector_owner=False`); the gate closes it. Raises GateClosed.
        """
        own = self.opened().session
        connector = None if own is None else own.connector
        if connector is None:
            raise GateClosed("the gate has no session of its own, or is not open")
        return connector

    @property
    def storage_failing(self) -> str | None:
        """Why the state file or the audit record can't be written, so that leases are deferred with
        reason `storage`.

        None if they can, if there is none, or if their `on_failure` is "continue".
        """
        why: str | None = getattr(self.storage, "failing", None)
        return self.audit.failing if why is None and self.audit is not None else why

    def unreached(self, lease: object, error: BaseException) -> None:
        """Note that a request under the lease could not connect or resolve its host's name.

        `error` is what the system raised, or a TimeoutError; it counts if it looks like a lost
        uplink. Report the lease after that.
        """
        try:
            uplink = self.leases.uplink
        except GateClosed:
            return
        uplink.unreached(lease, error, connected=False)


def configured_signer(config: IdentityConfig, clock: Clock) -> RequestSigner | None:
    """Return the signer for `config`, or None if `identity.key` is not set. Raises ConfigError."""
    if config.key is None:
        return None
    signer: RequestSigner | None = late("gatekeeper.gate", "Signer").of(config, clock)
    return signer


def configured_audit(config: Config, user_agent: str, clock: Clock) -> GateAudit | None:
    """Return the audit record for `config`, or None if `audit.folder` is not set. Raises
    ConfigError."""
    if config.audit.folder is None:
        return None
    audit: GateAudit = late("gatekeeper.gate", "AuditRecord")(config, user_agent, clock)
    return audit
