"""What the sidecar, the session and the queue need of a gate beyond its public methods."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

import aiohttp
from aiohttp.abc import AbstractResolver

from gatekeeper import urls
from gatekeeper.clock import Clock
from gatekeeper.config import Config, HostRule, token_of
from gatekeeper.deadlock import WaitGraph
from gatekeeper.decision import Decision, Reason, Verdict
from gatekeeper.errors import GateClosed, InvalidURL, LedgerLost
from gatekeeper.fetching.cache import record_octets
from gatekeeper.fetching.directory import OnRetrieval
from gatekeeper.fetching.guard_policy import Guard
from gatekeeper.fetching.outcomes import OutcomeRow
from gatekeeper.fetching.records import LARGE, Moment, Record
from gatekeeper.gate.decision_cache import DecisionBatch, WrittenDecision
from gatekeeper.gate.gatekeeper import GateFollower, Gatekeeper
from gatekeeper.gate.leases import Lease
from gatekeeper.identity import Signer
from gatekeeper.middleware import DeadlineMiddleware, gate_middleware_with
from gatekeeper.pacing.ledger import ScopeView
from gatekeeper.robots import Policy, RobotsTxt
from gatekeeper.urls import Target, UrlCache

_log = logging.getLogger(__name__)


class GateInternals:
    """What the sidecar, the session and the queue need of a gate beyond its public methods.

    Not public: it may change in any version. Made by `internals`.
    """

    def __init__(self, gate: Gatekeeper) -> None:
        self._gate = gate
        self.clock: Final[Clock] = gate._clock
        self.guard: Final[Guard | None] = gate._guard
        """None where a session was handed in."""
        self.url_cache: Final[UrlCache] = gate._url_cache
        """What the gate's own connector knows the URLs by that it read."""
        self.signer: Final[Signer | None] = gate._signer
        """What signs requests; None: they are not signed."""
        self._monotonic = gate._clock.monotonic
        self._decider = gate._decider
        # Of the scheduler, the decider and the gate as they stand there.
        self.held: Final = gate._scheduler.held
        self.held_up: Final = gate._scheduler.held_up
        self.lateness: Final = gate._scheduler.lateness
        self.when_due: Final = gate._scheduler.when_due
        self.watch_hosts: Final = gate._scheduler.watch
        self.refused: Final = gate._decider.refused
        self.peek: Final = gate.peek
        self.check: Final = gate.check
        self.acquire: Final = gate.acquire
        self._scheduler = gate._scheduler
        self._take = gate._scheduler.take

    # -- questions that wait for nothing ---------------------------------------------

    def recall(self, url: str, *, user_agent: str | None = None) -> Decision | None:
        """The decision of `check`, where the decision cache has it."""
        agent = self._gate._agent if user_agent is None else token_of(user_agent)
        return self._decider.recall(url, agent, self.clock)

    def write(self, url: str, *, user_agent: str | None = None) -> WrittenDecision | None:
        """`recall`, to be told as JSON, where it is kept."""
        agent = self._gate._agent if user_agent is None else token_of(user_agent)
        return self._decider.write(url, agent, self._monotonic())

    def write_many(self, urls: Sequence[str], *, user_agent: str | None = None) -> DecisionBatch:
        """`recall` for many URLs, to be told as JSON and counted when it is.

        One is missing also where its deciding rule was not met before.
        """
        agent = self._gate._agent if user_agent is None else token_of(user_agent)
        try:
            return self._decider.write_many(urls, agent, self._monotonic())
        except Exception:  # noqa: BLE001 - one URL's error is its own
            # The error of one URL is not that of its batch: each is looked at by itself then.
            _log.exception("many URLs can't be answered at once")
            return DecisionBatch([None] * len(urls), [b""] * len(urls), 0)

    def knows(self, url: str, *, user_agent: str | None = None) -> bool:
        """Whether `decide` answers: the file of the URL's origin is here, and fresh."""
        agent = self._gate._agent if user_agent is None else token_of(user_agent)
        try:
            return self._fresh(urls.parse(url).origin, agent) is not None
        except InvalidURL:
            return False

    def decide(self, url: str, *, user_agent: str | None = None) -> Decision | None:
        """The decision of `check`, where it waits for nothing; else None. Raises InvalidURL."""
        agent = self._gate._agent if user_agent is None else token_of(user_agent)
        decision = self._decider.recall(url, agent, self.clock)
        if decision is not None:
            return decision
        target, moment = urls.parse(url), Moment(self._monotonic(), self.clock.wall())
        return self._decider.decide(url, target, agent, self._fresh(target.origin, agent), moment)

    def _fresh(self, origin: str, agent: str) -> Record | None:
        return self._gate._open.questions.fresh(origin, agent)

    def robots_file(self, url: str, *, user_agent: str | None = None) -> Decision | None:
        """ALLOW for the URL of any /robots.txt, whatever is known of its origin; else None.

        Raises InvalidURL.
        """
        agent = self._gate._agent if user_agent is None else token_of(user_agent)
        return self._decider.robots_file(url, urls.parse(url), agent)

    def unknown(self, url: str, *, user_agent: str | None = None) -> Decision:
        """DEFER: the file is needed first, and nobody waits for it. Raises InvalidURL."""
        agent = self._gate._agent if user_agent is None else token_of(user_agent)
        moment = self._gate._open.questions.moment()
        return self._decider.unknown(url, urls.parse(url), agent, moment)

    def unkept(self, url: str, target: Target, user_agent: str | None, why: str) -> Decision:
        """DEFER, since the clock of the turn can't be written to the state file."""
        return self._gate._open.questions.no_turn(url, target, user_agent, why)

    def what_if(
        self, url: str, robots: RobotsTxt, row: OutcomeRow, *, user_agent: str
    ) -> tuple[Decision, Policy]:
        """The decision that a text would give which was fetched with the outcome of `row`, and
        the text as it reads for the agent. Nothing is counted. Raises InvalidURL, ConfigError.
        """
        target, agent = urls.parse(url), token_of(user_agent)
        policy = self._decider.policy_of(robots, agent)
        wall = self.clock.wall()
        return self._decider.what_if(url, target, agent, policy, row, wall), policy

    # -- questions of a queue --------------------------------------------------------

    @property
    def waits(self) -> WaitGraph[Lease]:
        """Who waits and holds what."""
        return self._gate._waits

    def take(self, url: str) -> Lease | None:
        """The lease that `acquire` gives with `owned=False`, if its turn is free; else None."""
        opened = self._gate._opened or self._gate._open
        return opened.leases.take(url, None)

    def is_due(self, host: str) -> bool:
        """Would `when_due` call back at once, as far as that can be seen at a glance?"""
        offered: list[None] = []  # it is asked what the text says only where a lease can be had
        self._take("", host, None, admit=partial(offered.append, None))
        return bool(offered)

    # -- what other processes that answer questions follow --------------------------

    def follow(self, follower: GateFollower) -> None:
        """Tell that from now on what is learnt, and what the operator says at run time."""
        self._gate._followers.append(follower)

    def shared_record(self, origin: str) -> bytes | None:
        """What is known of an origin, for a `Replica` in another process of this machine; None
        where the text alone does not decide about the next questions, or is a large one."""
        record = self._gate._known_of(origin)
        if record is None or not record.policy_only or self._monotonic() >= record.fresh_until:
            return None
        if record.text is not None and record.text.size >= LARGE:
            return None
        return record_octets(record)

    def rules(self) -> list[HostRule]:
        """The operator's rules about hosts that are in force, those said at run time too."""
        return self._gate._overrides.everyone()

    def count(
        self, decisions: Mapping[tuple[Verdict, Reason], int], refused: Mapping[str, int]
    ) -> None:
        """Count what others decided by what they were told here, and what their guard refused."""
        self._decider.count(decisions)
        if self.guard is not None:
            self.guard.count(refused)

    # -- files and leases ------------------------------------------------------------

    async def source(self, url: str) -> bytes | None:
        """The octets of the robots.txt that `Gatekeeper.robots` is parsed from, or None."""
        return await self._gate._open.questions.source(url)

    async def learn(self, origin: str) -> None:
        """Ask the origin for its file if need be."""
        await self._gate._open.questions.learn(origin)

    def on_retrieval(self, callback: OnRetrieval) -> None:
        """Have `callback(origin, retrieval, seconds)` called after each robots.txt fetch.

        `seconds` include the wait for turns, `retrieval.took` is the network alone. It must be
        short and must not raise. It is called in the context of whoever was the first to ask.
        """
        self._gate._listeners.append(callback)

    async def hold(self, url: str, seconds: float, *, user_agent: str | None = None) -> Lease:
        """A lease that an earlier process gave out and that is still out, open for `seconds`.

        It takes its host's slot at once, without a turn; with no second left it is one that
        has ended, whose report counts. Raises InvalidURL, LeaseTimeout.
        """
        return await self._gate._open.leases.hold(url, seconds, user_agent)

    # -- connections -----------------------------------------------------------------

    def guarded_connector(self) -> aiohttp.TCPConnector:
        """A connector that dials through this gate's guard; close it with its session."""
        return self._gate._connector()

    @property
    def connector(self) -> aiohttp.BaseConnector:
        """That of the session which fetches robots.txt, for another session on the same
        connections (`connector_owner=False`); the gate closes it. Raises GateClosed.
        """
        opened = self._gate._opened
        own = None if opened is None else opened.session
        connector = None if own is None else own.connector
        if connector is None:
            raise GateClosed("the gate has no session of its own, or is not open")
        return connector

    @property
    def resolver(self) -> AbstractResolver | None:
        """What its connector looks names up by; None: the system."""
        gate = self._gate
        return gate._resolver if gate._dns is None else gate._dns.resolver

    def deadline_middleware(self) -> DeadlineMiddleware:
        """`Gatekeeper.middleware`, for a session that gives each request a deadline of its own
        and may read its URLs by `url_cache`. Raises GateClosed.
        """
        leases = self._gate._open.leases
        return gate_middleware_with(
            *(self._gate, leases.wait, leases.take, self.url_cache, leases.uplink.unreached),
            *self._gate._checks(),
        )

    def unreached(self, lease: object, error: BaseException) -> None:
        """A request under that lease could not be connected, or its host's name not looked up:
        `error` is what the system raised, or a TimeoutError. It counts where it looks like a lost
        uplink; report the lease after that."""
        if self._gate._opened is not None:
            self._gate._opened.leases.uplink.unreached(lease, error, connected=False)

    # -- the operator ----------------------------------------------------------------

    async def look(self, host: str) -> list[ScopeView]:
        """What the fleet's store knows of the host; empty without one, and while it is away."""
        try:
            return await self._scheduler.look(host)
        except LedgerLost:
            return []

    def record(self, origin: str) -> Record | None:
        """What is in memory of an origin, however old. Raises GateClosed."""
        return self._gate._known_of(origin)

    async def text_of(self, digest: bytes) -> bytes | None:
        """The octets behind a hash of `Gatekeeper.history`; None: not kept."""
        return await storage.body(digest) if (storage := self._gate._storage) else None

    def host_states(self) -> Counter[str]:
        """How many hosts and shared clocks in memory are "paused", "blocked", "waiting"
        (somebody waits for their turn) or "idle". It looks at each of them, which takes a
        tenth of a second for a million: with many, call it from another thread.
        """
        return self._scheduler.host_states()

    def adjust(self, config: Config) -> None:
        """Put the `[guard]`, the `[pacing]` and the `[[host]]` tables of another configuration in
        force, all at once; its other settings have to be those of this gate's own, and so have
        `pacing.lease_ttl`, `address_interval` and `domain_interval`.

        Raises ConfigError, and changes nothing then.
        """
        gate, guard = self._gate, self.guard
        old, opened = gate.config, gate._open
        if guard is not None and config.guard != old.guard:
            Guard(config)  # raises, if anything does
        if config.host != old.host:
            self._scheduler.replace_words(config.host)
        if config.pacing != old.pacing:
            self._scheduler.adjust(config.pacing)
            gate._waits.adjust(config.pacing.own_wait)
            opened.fetcher.adjust(config.pacing)
        if guard is not None and config.guard != old.guard:
            guard.adjust(config.guard)
            opened.directory.void_refusals()
        gate._adjusted(config)

    @property
    def storage_failing(self) -> str | None:
        """Why the state file takes no clocks now, so that leases are deferred with the reason
        `storage`; None: it does, or there is none, or storage.on_failure is "continue"."""
        return getattr(self._gate._storage, "failing", None)


def internals(gate: Gatekeeper) -> GateInternals:
    """What other parts of this package need of a gate; nobody else should call this."""
    return GateInternals(gate)
