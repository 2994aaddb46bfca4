"""`GateInternals`: access to a gate for the sidecar, the session and the queue."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

import aiohttp
from aiohttp.abc import AbstractResolver

from gatekeeper import urls
from gatekeeper.clock import Clock
from gatekeeper.config import Config, HostRule, token_of
from gatekeeper.decision import Decision, Reason, Verdict
from gatekeeper.errors import GateClosed, InvalidURL, LedgerLost
from gatekeeper.fetching.cache import record_octets
from gatekeeper.fetching.directory import OnRetrieval
from gatekeeper.fetching.guard_policy import Guard
from gatekeeper.fetching.outcomes import OutcomeRow
from gatekeeper.fetching.records import LARGE, Moment, Record
from gatekeeper.gate.decider import TurnError
from gatekeeper.gate.decision_cache import DecisionBatch, WrittenDecision
from gatekeeper.gate.gatekeeper import GateFollower, Gatekeeper
from gatekeeper.gate.leases import Lease
from gatekeeper.gate.protocols import DeadlineMiddleware
from gatekeeper.pacing.deadlock import WaitGraph
from gatekeeper.pacing.ledger import ScopeView
from gatekeeper.robots import Policy, RobotsTxt
from gatekeeper.signing import Signer
from gatekeeper.urls import Target, UrlCache

_log = logging.getLogger(__name__)


class GateInternals:
    """What the sidecar, the session and the queue need of a gate beyond its public methods.

    Not public: it may change in any version. Get one from `internals`.
    """

    def __init__(self, gate: Gatekeeper) -> None:
        self._gate = gate
        self.clock: Final[Clock] = gate._clock
        self.guard: Final[Guard | None] = gate._guard
        """None if the caller passed a session to the gate."""
        self.url_cache: Final[UrlCache] = gate._url_cache
        """Cache of parsed URLs, which the gate's own connector recognises."""
        self.deadline_middleware: Final[DeadlineMiddleware] = gate._deadline_middleware
        """`Gatekeeper.middleware` for a session that passes a deadline with each request, or None,
        and may parse its URLs with `url_cache`."""
        self.signer: Final[Signer | None] = gate._signer
        """Signs requests; None: they are not signed."""
        self._monotonic = gate._clock.monotonic
        self._decider = gate._decider
        # Methods of the scheduler, the decider and the gate, unchanged.
        self.held: Final = gate._scheduler.held
        self.held_up: Final = gate._scheduler.held_up
        self.holdups: Final = gate._scheduler.holdups
        self.timeout_error: Final = gate._scheduler.timeout_error
        self.when_due: Final = gate._scheduler.when_due
        self.watch_hosts: Final = gate._scheduler.watch
        self.refused: Final = gate._decider.refused
        self.peek: Final = gate.peek
        self.check: Final = gate.check
        self.acquire: Final = gate.acquire
        self._scheduler = gate._scheduler
        self._take = gate._scheduler.take

    def _token(self, user_agent: str | None) -> str:
        return self._gate._agent if user_agent is None else token_of(user_agent)

    # -- questions that never wait ---------------------------------------------------

    def recall(self, url: str, *, user_agent: str | None = None) -> Decision | None:
        """Return the decision of `check` if the decision cache has it; else None."""
        return self._decider.recall(url, self._token(user_agent), self.clock)

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
        decision = self._decider.recall(url, agent, self.clock)
        if decision is not None:
            return decision
        target, moment = urls.parse(url), Moment(self._monotonic(), self.clock.wall())
        return self._decider.decide(url, target, agent, self._fresh(target.origin, agent), moment)

    def _fresh(self, origin: str, agent: str) -> Record | None:
        return self._gate._open.questions.fresh(origin, agent)

    def robots_file(self, url: str, *, user_agent: str | None = None) -> Decision | None:
        """Return ALLOW for the URL of any /robots.txt, whatever is known of its origin; else None.

        Raises InvalidURL.
        """
        return self._decider.robots_file(url, urls.parse(url), self._token(user_agent))

    def unknown(self, url: str, *, user_agent: str | None = None) -> Decision:
        """Return DEFER: the file is not cached, and the caller does not wait for it.

        Raises InvalidURL.
        """
        moment = self._gate._open.questions.moment()
        return self._decider.unknown(url, urls.parse(url), self._token(user_agent), moment)

    def no_turn(
        self, url: str, target: Target, user_agent: str | None, why: str | TurnError
    ) -> Decision:
        """Return DEFER, as the host grants no turn; see `Decider.no_turn`."""
        return self._gate._open.questions.no_turn(url, target, user_agent, why)

    def what_if(
        self, url: str, robots: RobotsTxt, row: OutcomeRow, *, user_agent: str
    ) -> tuple[Decision, Policy]:
        """Decide by a hypothetical file, fetched with the outcome of `row`; return also its policy
        for the agent. Nothing is counted. Raises InvalidURL, ConfigError.
        """
        target, agent = urls.parse(url), token_of(user_agent)
        policy = self._decider.policy_of(robots, agent)
        wall = self.clock.wall()
        return self._decider.what_if(url, target, agent, policy, row, wall), policy

    # -- questions of a queue --------------------------------------------------------

    @property
    def waits(self) -> WaitGraph[Lease]:
        """Which tasks hold which leases and wait for which hosts."""
        return self._gate._waits

    def take(self, url: str) -> Lease | None:
        """Grant the lease of `acquire(owned=False)` if that needs no waiting; else return None."""
        opened = self._gate._opened or self._gate._open
        return opened.leases.take(url, None)

    def is_due(self, host: str) -> bool:
        """Return True if `when_due` would call back immediately, as far as local data can tell."""
        # `admit` is called only if a lease could be granted; that it returns None refuses it.
        offered: list[None] = []
        self._take("", host, None, admit=partial(offered.append, None))
        return bool(offered)

    # -- for other processes that answer questions -----------------------------------

    def follow(self, follower: GateFollower) -> None:
        """Notify the follower of new records and of rules that change at run time."""
        self._gate._followers.append(follower)

    def shared_record(self, origin: str) -> bytes | None:
        """Encode the record of an origin for a `Replica` in another process of this machine.

        None if the text alone does not decide the next questions, or if it is a large one.
        """
        record = self._gate._record_of(origin)
        if record is None or not record.policy_only or self._monotonic() >= record.fresh_until:
            return None
        if record.text is not None and record.text.size >= LARGE:
            return None
        return record_octets(record)

    def rules(self) -> list[HostRule]:
        """Return the operator's rules about hosts, including those added at run time."""
        return self._gate._overrides.entries()

    def count(
        self, decisions: Mapping[tuple[Verdict, Reason], int], refused: Mapping[str, int]
    ) -> None:
        """Add the decisions and the guard's refusals that replicas of this gate counted."""
        self._decider.count(decisions)
        if self.guard is not None:
            self.guard.count(refused)

    # -- files and leases ------------------------------------------------------------

    async def source(self, url: str) -> bytes | None:
        """Return the bytes that `Gatekeeper.robots` parses; None if there is no text."""
        return await self._gate._open.questions.source(url)

    def coding(self, origin: str) -> str:
        """Return `Metadata.coding` of the text of an origin in memory; empty without one."""
        record = self.record(origin)
        return "" if record is None or record.good is None else record.good.metadata.coding

    async def learn(self, origin: str) -> None:
        """Fetch the origin's file unless it is cached."""
        await self._gate._open.questions.learn(origin)

    def on_retrieval(self, callback: OnRetrieval) -> None:
        """Call `callback(origin, retrieval, seconds)` after each robots.txt fetch.

        `seconds` include the wait for turns; `retrieval.took` is the network time alone. The
        callback must be short and must not raise. It runs in the context of the first asker.
        """
        self._gate._listeners.append(callback)

    async def hold(self, url: str, seconds: float, *, user_agent: str | None = None) -> Lease:
        """Restore a lease that an earlier process granted and that is still open for `seconds`.

        It takes its host's slot immediately, without a turn. If `seconds` is not positive, the
        lease has ended, but its report counts. Raises InvalidURL, LeaseTimeout.
        """
        return await self._gate._open.leases.hold(url, seconds, user_agent)

    # -- connections -----------------------------------------------------------------

    def guarded_connector(self) -> aiohttp.TCPConnector:
        """Make a connector that connects through this gate's guard; its session closes it."""
        return self._gate._connector()

    @property
    def connector(self) -> aiohttp.BaseConnector:
        """The connector that fetches robots.txt, for another session on the same connections
        (`connector_owner=False`); the gate closes it. Raises GateClosed.
        """
        opened = self._gate._opened
        own = None if opened is None else opened.session
        connector = None if own is None else own.connector
        if connector is None:
            raise GateClosed("the gate has no session of its own, or is not open")
        return connector

    @property
    def resolver(self) -> AbstractResolver | None:
        """The resolver of its connector; None: the system's."""
        gate = self._gate
        return gate._dns or gate._resolver

    def unreached(self, lease: object, error: BaseException) -> None:
        """Note that a request under the lease could not connect or resolve its host's name.

        `error` is what the system raised, or a TimeoutError; it counts if it looks like a lost
        uplink. Report the lease after that.
        """
        if self._gate._opened is not None:
            self._gate._opened.leases.uplink.unreached(lease, error, connected=False)

    # -- the operator ----------------------------------------------------------------

    async def look(self, host: str) -> list[ScopeView]:
        """Return the state of the host in the fleet's store; empty without one, or while it can't
        be reached."""
        try:
            return await self._scheduler.look(host)
        except LedgerLost:
            return []

    def record(self, origin: str) -> Record | None:
        """Return the record of an origin in memory, however old. Raises GateClosed."""
        return self._gate._record_of(origin)

    async def text_of(self, digest: bytes) -> bytes | None:
        """Return the text with that hash in `Gatekeeper.history`; None if it is not stored."""
        return await storage.body(digest) if (storage := self._gate._storage) else None

    def adjust(self, config: Config) -> None:
        """Apply the `[guard]`, `[pacing]` and `[[host]]` tables of another configuration together.

        Its other settings must equal this gate's, and so must `pacing.lease_ttl`,
        `address_interval` and `domain_interval`. Raises ConfigError, and changes nothing, for an
        invalid setting.
        """
        gate, guard = self._gate, self.guard
        old, opened = gate.config, gate._open
        if guard is not None and config.guard != old.guard:
            Guard(config)  # validates, so that nothing below can raise
        if config.host != old.host:
            self._scheduler.replace_rules(config.host)
        if config.pacing != old.pacing:
            self._scheduler.adjust(config.pacing)
            gate._waits.adjust(config.pacing.own_wait)
            opened.fetcher.adjust(config.pacing)
        if guard is not None and config.guard != old.guard:
            guard.adjust(config.guard)
            opened.directory.void_refusals()
        gate._apply_config(config)

    @property
    def storage_failing(self) -> str | None:
        """Why the state file can't be written, so that leases are deferred with reason `storage`.

        None if it can, if there is none, or if storage.on_failure is "continue".
        """
        return getattr(self._gate._storage, "failing", None)


def internals(gate: Gatekeeper) -> GateInternals:
    """Return the internals of a gate, for other parts of this package only."""
    return GateInternals(gate)
