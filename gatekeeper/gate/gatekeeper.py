"""`Gatekeeper`: the files, the decisions and the turns of all hosts, behind a few methods.

What the sidecar, the session and the queue need of a gate beyond that is in `internals`.
"""

from __future__ import annotations

import asyncio
import logging
import operator
import random
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, Protocol, Self

import aiohttp
from aiohttp import ClientMiddlewareType
from aiohttp.abc import AbstractResolver

from gatekeeper import urls
from gatekeeper.clock import Clock, SystemClock, moment_named
from gatekeeper.config import Config, HostRule, agent_named, as_config, host_named, token_of
from gatekeeper.deadlock import WaitGraph
from gatekeeper.decision import Decision, NotYet
from gatekeeper.errors import GateClosed, StorageError
from gatekeeper.fetching.directory import Directory, HeldUp, OnRetrieval
from gatekeeper.fetching.faults import LocalFaults
from gatekeeper.fetching.fetcher import Fetcher
from gatekeeper.fetching.guard import GuardedConnector, HostAddresses
from gatekeeper.fetching.guard_policy import Guard
from gatekeeper.fetching.outcomes import Retrieval, RobotsSource
from gatekeeper.fetching.records import Record
from gatekeeper.fleet import FleetLedger, configured_ledger
from gatekeeper.gate.decider import Decider, DecisionIds
from gatekeeper.gate.decision_cache import CachedOrigin
from gatekeeper.gate.leases import Lease, LeaseManager, LeaseRequest
from gatekeeper.gate.questions import GateQuestions, GateStats
from gatekeeper.gate.robots_pacing import RobotsPacing, RobotsTurn
from gatekeeper.identity import Signer
from gatekeeper.middleware import UNLIMITED, HeldLease, gate_middleware_with
from gatekeeper.pacing.ledger import Ledger
from gatekeeper.pacing.scheduler import Scheduler
from gatekeeper.pacing.waiting import ClockView
from gatekeeper.robots import Policy, RobotsTxt
from gatekeeper.robots.longest import QuickAnswer
from gatekeeper.split_dict import MASK
from gatekeeper.storage.base import HistoryEntry, Storage
from gatekeeper.storage.sqlite import SqliteStorage
from gatekeeper.urls import UrlCache, not_text

_log = logging.getLogger(__name__)


class GateFollower(Protocol):
    """Follows what a gate knows, to tell others. Its methods must be short, and must not raise."""

    def learnt(self, record: Record) -> None:
        """A record was learnt; it is kept as soon as this returns."""

    def rules_changed(self) -> None:
        """The operator said something about hosts at run time."""


@dataclass(frozen=True, slots=True)
class _Opened:
    """What a gate has while it is open."""

    session: aiohttp.ClientSession | None
    """The gate's own; None where one was handed in."""
    fetcher: Fetcher
    directory: Directory
    questions: GateQuestions
    leases: LeaseManager


class Gatekeeper:
    """Asks every origin's robots.txt once, answers from it, and gives out leases.

    `user_agent` is the whole User-Agent header, or a product token; the token chooses the
    group in robots.txt. Without a `session` the gate makes one of its own, guarded at the
    socket; one that you hand in is used as it is (`stats().guarded` says so). A `ledger`
    shared with others grants the turns; None: `config.fleet` says, or this process alone does.
    `clock`, `rng` and `resolver` are for tests. Open it with `async with`; it belongs to the
    event loop that opened it. Raises ConfigError for a setting or a name that can't be used.

    >>> async def main() -> None:
    ...     async with Gatekeeper("examplebot/1.0 (+https://example.org/bot)") as gate:
    ...         if await gate.allowed("https://example.org/page"):
    ...             async with gate.lease("https://example.org/page") as lease:
    ...                 ...  # fetch it now
    ...                 lease.report(status=200)
    """

    def __init__(
        self,
        user_agent: str,
        *,
        config: Config | None = None,
        session: aiohttp.ClientSession | None = None,
        storage: Storage | None = None,
        clock: Clock | None = None,
        rng: random.Random | None = None,
        resolver: AbstractResolver | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        config = as_config(config)
        self.config: Config = config
        self.user_agent = user_agent
        self._agent = agent_named(user_agent)
        self._session = session
        self._resolver = resolver
        self._clock = clock or SystemClock()
        self._rng = rng or random.Random()
        self._storage = storage or SqliteStorage.configured(config.storage, self._clock)
        ids = DecisionIds()
        self._guard = Guard(config) if session is None else None
        self._dns = HostAddresses.of(config, self._clock, self._guard, resolver)
        self._ledger = ledger or configured_ledger(config.fleet, self._clock)
        self._signer = Signer.of(config.identity, self._clock)
        self._scheduler = Scheduler(
            config, clock=self._clock, rng=self._rng, storage=self._storage, ledger=self._ledger
        )
        self._overrides = self._scheduler.host_rules
        self._decider = Decider(
            config,
            agent=self._agent,
            ids=ids,
            guard=self._guard,
            overrides=self._overrides,
        )
        self._waits: WaitGraph[Lease] = WaitGraph(
            self._clock, config.pacing.own_wait, self._scheduler.needs
        )
        self._pacing = self._robots_pacing()
        self._faults = LocalFaults(self._rng, self._on_fault, self._on_answer, self._on_doubt)
        self._url_cache = UrlCache()
        means = self._wait, self._take, self._url_cache, self._unreached, *self._checks()
        self._middleware = partial(gate_middleware_with(self, *means), UNLIMITED)
        self._opened: _Opened | None = None
        self._listeners: list[OnRetrieval] = []
        self._followers: list[GateFollower] = []
        self._stack = AsyncExitStack()
        # Of the last question to `allowed`: its authority and slash, where that is, what is kept.
        self._authority, self._cut = "\n", 0
        self._origin: CachedOrigin | _NoOrigin = _NoOrigin()
        self._warm_allowed = self._warm_denied = 0
        self._few, self._many = self._decider.records.first, self._decider.records.table

    def _robots_pacing(self) -> RobotsPacing:
        return RobotsPacing(
            self._scheduler,
            self._decider,
            self._clock,
            agent=self._agent,
            waits=self._waits,
            dns=self._dns,
            recall=self._known_of,
            holder=self._holder,
        )

    def _checks(self) -> tuple[Callable[[HeldLease], bool] | None, Signer | None]:
        """What a middleware asks before a request leaves: has its hold lapsed; and who signs it."""
        lapsed = None if self._ledger is None else operator.methodcaller("lapsed")
        return lapsed, self._signer

    # -- life ------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        if self._opened is not None:
            raise GateClosed("this gate is open already; make another one")
        async with AsyncExitStack() as stack:
            if self._storage is not None:
                await self._storage.open()
                stack.push_async_callback(self._storage.close)
            if self._dns is not None:
                stack.push_async_callback(self._dns.close)
            if isinstance(self._ledger, FleetLedger):
                self._ledger.overrides.follow(self._follow)
            await self._scheduler.open()
            stack.callback(self._waits.close)
            stack.push_async_callback(self._scheduler.close)
            own, session = None, self._session
            if session is None:
                session = own = await stack.enter_async_context(self._own_session())
            fetcher = self._source(session)
            directory = Directory(
                self._shared(fetcher),
                config=self.config,
                clock=self._clock,
                rng=self._rng,
                storage=self._storage,
                on_learnt=self._on_learnt,
                on_retrieval=self._on_retrieval,
                faults=self._faults,
                records=self._decider.records,
                texts=self._decider.texts,
                choose=self._decider.policy_of,
                agent=self._agent,
            )
            questions = GateQuestions(
                self._decider,
                directory,
                self._clock,
                agent=self._agent,
                waits=self._waits,
                dns=self._dns,
            )
            leases = LeaseManager(
                questions,
                self._decider,
                self._scheduler,
                self._clock,
                faults=self._faults,
                waits=self._waits,
                dns=self._dns,
            )
            stack.push_async_callback(leases.close)
            self._opened = _Opened(own, fetcher, directory, questions, leases)
            stack.push_async_callback(self._shut)
            await directory.open()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, kind: object = None, *error: object) -> None:
        try:
            await self._stack.aclose()
        except StorageError as unkept:
            if kind is None:
                raise
            _log.error("%s", unkept)  # why the block was left says more

    def _source(self, session: aiohttp.ClientSession) -> Fetcher:
        """What brings the files; a test's gate has another one."""
        return Fetcher(
            session,
            user_agent=self.user_agent,
            config=self.config,
            clock=self._clock,
            rng=self._rng,
            take_turn=partial(RobotsTurn, self._pacing),
            refuse=None if self._guard is None else self._guard.refuses_url,
            known=self._fresh_of,
            signer=self._signer,
        )

    async def _shut(self) -> None:
        """Answer nothing any more, the first of all that closing does."""
        opened, self._opened = self._opened, None
        if opened is not None:
            await opened.directory.close()
            self._decider.records.clear()  # whoever opens it again begins with none

    # -- questions -------------------------------------------------------------------

    async def allowed(self, url: str, *, user_agent: str | None = None) -> bool:
        """Whether the URL may be fetched now, by robots.txt and the operator.

        False means no *or not now*: `check` tells the two apart. Raises InvalidURL.
        """
        # The fast way builds no Decision, reads no clock and logs nothing. It looks into one
        # dictionary, and not even there if the authority is that of the question before. What
        # it can't answer is for `check`.
        if user_agent is None:
            try:
                if url.startswith(self._authority):
                    ready = self._origin.first_match
                    verdict = None if ready is None else ready(url[self._cut :])
                else:
                    verdict = self._elsewhere(url)
            except (AttributeError, TypeError):
                if isinstance(url, str):
                    raise
                raise not_text(url) from None
            if verdict:
                self._warm_allowed += 1
                return True
            if verdict is False:
                self._warm_denied += 1
                return False
        return bool(await self.check(url, user_agent=user_agent))

    def _elsewhere(self, url: str) -> bool | None:
        """The verdict where the authority is not that of the question before; None: `check` it. An
        origin of which the cache has something is stayed with."""
        cut = url.find("/", 8)  # behind `https://`
        origin = url[:cut]
        record = self._few.get(origin) or self._many[hash(origin) & MASK].get(origin)
        if cut < 0 or record is None:
            return None
        cached = record.cached
        known: CachedOrigin | None = None if cached is None else cached.get(self._agent)
        if known is None:
            return self._decider.verdict(record, url[cut:])
        self._authority, self._cut, self._origin = url[: cut + 1], cut, known
        ready = known.first_match
        return None if ready is None else ready(url[cut:])

    async def check(self, url: str, *, user_agent: str | None = None) -> Decision:
        """Whether the URL may be fetched now, and why. Raises InvalidURL."""
        agent = self._agent if user_agent is None else token_of(user_agent)
        decision = self._decider.recall(url, agent, self._clock)
        if decision is not None:
            return decision
        return await self._open.questions.check(url, urls.parse(url), agent)

    def check_many(
        self, urls: Iterable[str], *, user_agent: str | None = None
    ) -> AsyncGenerator[Decision, None]:
        """Decisions in the order of the URLs; unknown origins are asked in parallel.

        Text that is no URL gives DENY with reason invalid_url, so that nothing is lost.
        """
        agent = self._agent if user_agent is None else token_of(user_agent)
        return self._open.questions.check_many(urls, agent)

    async def check_all(
        self, urls: Iterable[str], *, user_agent: str | None = None
    ) -> list[Decision]:
        """What `check_many` gives, as a list."""
        agent = self._agent if user_agent is None else token_of(user_agent)
        return await self._open.questions.check_all(urls, agent)

    def peek(self, url: str, *, user_agent: str | None = None) -> Decision | None:
        """The decision as far as it is known: never waits, never fetches. Raises InvalidURL.

        None: nothing usable is known of the origin.
        """
        agent = self._agent if user_agent is None else token_of(user_agent)
        decision = self._decider.recall(url, agent, self._clock)
        if decision is not None:
            return decision
        return self._open.questions.peek(url, urls.parse(url), agent)

    async def robots(self, url: str) -> RobotsTxt | None:
        """The robots.txt that speaks for the URL's origin; None where there is none to read.

        Raises InvalidURL, and LeaseTimeout as `refresh` does.
        """
        return await self._open.questions.robots(url)

    async def policy(self, url: str, *, user_agent: str | None = None) -> Policy:
        """The file as it reads for the agent. Raises InvalidURL, and LeaseTimeout as `refresh`.

        Where there is no file it allows everything, and where the file can't be had it allows
        nothing (RFC 9309 sections 2.3.1.3 and 2.3.1.4; RFC-36, RFC-37).
        """
        agent = self._agent if user_agent is None else token_of(user_agent)
        return await self._open.questions.policy(url, agent)

    async def history(self, origin: str) -> list[HistoryEntry]:
        """Versions of the origin's robots.txt, oldest first; none without a storage.

        Raises InvalidURL.
        """
        origin = urls.parse(origin).origin
        return [] if self._storage is None else await self._storage.history(origin)

    # -- turns -----------------------------------------------------------------------

    def lease(
        self,
        url: str,
        *,
        priority: int = 0,
        timeout: float | None = None,
        user_agent: str | None = None,
    ) -> LeaseRequest:
        """The right to send one request, once the host's turn has come.

        `async with gate.lease(url) as lease:`. Higher priority goes first within a host;
        `timeout` is seconds for the file and the turn together, None waits for as long as
        it takes. Entering raises InvalidURL, Denied, Deferred, or LeaseTimeout; ConfigError for a
        `user_agent` under which no request can be sent, such as `*`.
        """
        opened = self._opened or self._open  # it raises
        return LeaseRequest(opened.leases, url, priority, timeout, user_agent)

    def acquire(
        self,
        url: str,
        *,
        priority: int = 0,
        timeout: float | None = None,
        user_agent: str | None = None,
        owned: bool = True,
    ) -> Coroutine[Any, Any, Lease]:
        """A lease that ends by `lease.end()`, for those to whom a block does not fit: await it.

        `owned=False`: the lease outlives the task that asks for it (a server's handler),
        so a second one for the same host simply waits. Raises as `lease` does.
        """
        leases = self._open.leases
        return LeaseRequest(leases, url, priority, timeout, user_agent, owned).__aenter__()

    async def try_acquire(
        self,
        url: str,
        *,
        priority: int = 0,
        user_agent: str | None = None,
        owned: bool = True,
    ) -> Lease | NotYet:
        """The lease if it can be had now, without waiting; else `NotYet`, which says when to ask.

        At most one round trip to a store. An origin whose robots.txt is not known is asked for
        it in the background. End the lease by `lease.end()`; `owned` as of `acquire`.
        Raises InvalidURL, and Denied for a URL that may not be fetched; never Deferred.
        """
        return await self._open.leases.attempt(
            url, priority=priority, user_agent=user_agent, owned=owned
        )

    @property
    def middleware(self) -> ClientMiddlewareType:
        """For `aiohttp.ClientSession(middlewares=(gate.middleware,))`; put it last."""
        return self._middleware

    # -- operating -------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Open, our own network seems to be up, clocks can be kept, and a fleet's store answers."""
        opened, failing = self._opened, getattr(self._storage, "failing", None)
        if opened is None or not opened.directory.ready or failing is not None:
            return False
        return bool(getattr(self._ledger, "ready", True))

    async def why(self, host: str) -> tuple[ClockView, ...]:
        """Every clock of the host, each with where it came from.

        `host` is a name, an address or a URL, here and below. Raises ConfigError for others.
        """
        return self._scheduler.why(host_named(host))

    async def refresh(self, origin: str) -> None:
        """Ask the origin (or the origin of that URL) again now. Raises InvalidURL, and
        LeaseTimeout where it would have to wait for a lease of the asking task, or for the
        end of a host's block or pause: the origin is asked then.
        """
        await self._open.questions.refresh(origin)

    async def block(self, host: str, until: datetime | float, reason: str = "operator") -> None:
        """No request to the host before `until` (aware datetime, or wall seconds).

        Raises ConfigError for what names no host or no moment, and changes nothing then.
        """
        host = host_named(host)
        wall = moment_named(host, until)
        self._pacing.unpark(host)
        self._scheduler.block(host, wall, reason)

    async def pause(self, host: str) -> None:
        """No turns for the host until `resume`; survives a restart. Raises ConfigError."""
        self._scheduler.pause(host_named(host))

    async def resume(self, host: str) -> None:
        """Turns again; lifts a pause, not a block. Raises ConfigError."""
        self._scheduler.resume(host_named(host))

    def override(self, rule: HostRule) -> None:
        """Say a `[[host]]` word at run time: it replaces an earlier one for that match, and
        what it leaves out is as if nobody had said it. `group` must be one of the
        configuration's. Every member of a fleet follows it, for as long as one of them lives.
        Raises ConfigError, and changes nothing then.
        """
        if not isinstance(rule, HostRule):
            remedy = "write HostRule(match=HOST, ...)"
            raise TypeError(f"rule must be a HostRule, not {type(rule).__name__}; {remedy}")
        self._follow(rule)
        if isinstance(self._ledger, FleetLedger):
            self._ledger.overrides.say(rule)

    def _follow(self, rule: HostRule) -> None:
        self._scheduler.say(rule)
        self._decider.forget()
        for follower in self._followers:
            follower.rules_changed()

    def subscribe(
        self, callback: Callable[[str, RobotsTxt | None, RobotsTxt | None], None]
    ) -> Callable[[], None]:
        """Call `callback(origin, old, new)` when an origin's rules change; returns undo.

        Raises GateClosed.
        """
        return self._open.directory.subscribe(callback)

    def stats(self) -> GateStats:
        """Counters and gauges of every part, at this moment. Raises GateClosed."""
        return GateStats(
            guarded=self._guard is not None,
            warm_allowed=self._warm_allowed,
            warm_denied=self._warm_denied,
            decisions=self._decider.counts(),
            directory=self._open.directory.stats(),
            pacing=self._scheduler.stats(),
            guard=None if self._guard is None else self._guard.stats(),
            fleet=self._ledger.stats() if isinstance(self._ledger, FleetLedger) else None,
        )

    # -- inside ----------------------------------------------------------------------

    @property
    def _open(self) -> _Opened:
        if self._opened is None:
            raise GateClosed("open the gate first: async with Gatekeeper(...) as gate")
        return self._opened

    def _take(self, url: str, owner: asyncio.Task[object] | None) -> Lease | None:
        return self._open.leases.take(url, owner)

    def _wait(
        self, url: str, owner: asyncio.Task[object] | None, *, user_agent: str | None = None
    ) -> Coroutine[Any, Any, Lease]:
        return self._open.leases.wait(url, owner, user_agent=user_agent)

    def _unreached(self, lease: object, error: BaseException) -> None:
        if self._opened is not None:
            self._opened.leases.uplink.unreached(lease, error)

    def _known_of(self, origin: str) -> Record | None:
        return self._open.directory.recall(origin)

    def _holder(self) -> Callable[[HeldUp | None], None]:
        return self._open.directory.holder()

    def _adjusted(self, config: Config) -> None:
        """`config` is in force from now on."""
        self.config = config
        self._decider.adjust(config)

    def _on_fault(self, on: bool) -> None:
        """A fault of our own network began, or is over."""
        if on:
            self._scheduler.freeze(self._faults.unanswered)
        else:
            self._scheduler.thaw()

    def _on_answer(self) -> None:
        if self._opened is not None:
            self._opened.leases.uplink.wake()

    def _on_doubt(self) -> None:
        if self._opened is not None:
            self._opened.directory.plan_probes()

    def _on_learnt(self, record: Record) -> None:
        self._pacing.learnt(record)  # it may lengthen the record's life
        for follower in self._followers:
            follower.learnt(record)

    def _on_retrieval(self, origin: str, retrieval: Retrieval, seconds: float) -> None:
        for listener in self._listeners:
            listener(origin, retrieval, seconds)

    def _fresh_of(self, origin: str) -> Retrieval | None:
        """What is fresh about the origin of another /robots.txt to which a redirect leads."""
        return self._open.directory.known(origin)

    def _shared(self, fetcher: Fetcher) -> RobotsSource:
        """What brings the files: with a fleet, whichever member asks first."""
        if not isinstance(self._ledger, FleetLedger):
            return fetcher
        return self._ledger.sharing(fetcher, self.config.cache, self._renew)

    def _renew(self, origin: str) -> None:
        """Another member of the fleet has a newer file than we, if we have one."""
        if self._opened is not None:
            self._opened.directory.renew(origin)

    def _connector(self) -> aiohttp.TCPConnector:
        return GuardedConnector(
            self._guard or Guard(self.config),
            self._resolver if self._dns is None else self._dns.resolver,
            deny=self._decider.refused,
            url_cache=self._url_cache,
            # No limit of its own: the turns and the fetch slots are the bound, and waiting in
            # a connection pool would be waiting that no clock knows of.
            limit=0,
            # Two memories would let the addresses that are dialled and those whose clocks
            # were taken drift apart.
            use_dns_cache=self._dns is None,
        )

    def _own_session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=self._connector(),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,  # T19: a proxy from the environment would lead round the guard
        )


class _NoOrigin:
    """What the cache has of no origin."""

    first_match: QuickAnswer | None = None
