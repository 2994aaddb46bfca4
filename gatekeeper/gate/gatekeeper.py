"""`Gatekeeper`: robots.txt files, decisions and leases of all hosts, behind a few methods.

What a product needs of a gate beyond its public methods are its `parts`.
"""

from __future__ import annotations

import asyncio
import logging
import operator
import random
import warnings
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack, aclosing
from datetime import date, datetime
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakMethod

import aiohttp
from aiohttp import ClientMiddlewareType
from aiohttp.abc import AbstractResolver

from gatekeeper import urls
from gatekeeper.clock import Clock, SystemClock, block_end, refuse_unless_open
from gatekeeper.config import (
    Config,
    HostRule,
    agent_named,
    as_config,
    host_named,
    match_named,
    token_of,
)
from gatekeeper.decision import Decision, NotYet
from gatekeeper.errors import GateClosed, StorageError, refusing
from gatekeeper.fetching.allowed_addresses import Guard
from gatekeeper.fetching.directory import Directory
from gatekeeper.fetching.faults import LocalFaults
from gatekeeper.fetching.fetcher import Fetcher
from gatekeeper.fetching.guard import GuardedConnector, HostAddresses
from gatekeeper.fetching.outcomes import Retrieval, RobotsSource
from gatekeeper.fetching.records import Record
from gatekeeper.fetching.tls import trusted_by
from gatekeeper.gate.decider import Decider
from gatekeeper.gate.lease import Lease, LeaseManager, LeaseRequest
from gatekeeper.gate.parts import GateParts, OpenParts, configured_audit, configured_signer
from gatekeeper.gate.protocols import DeadlineMiddleware, SharingLedger
from gatekeeper.gate.questions import GateQuestions, GateStats
from gatekeeper.gate.robots_pacing import RobotsLease, RobotsPacing
from gatekeeper.late import late
from gatekeeper.library_internals import THREAD, loop_state
from gatekeeper.pacing.deadlock import WaitGraph
from gatekeeper.pacing.host_settings import described, lasting
from gatekeeper.pacing.ledger import Ledger
from gatekeeper.pacing.scheduler import Scheduler
from gatekeeper.pacing.waiters import ClockView, HostHoldup
from gatekeeper.robots import Policy, RobotsTxt
from gatekeeper.robots.flat import FlatRules
from gatekeeper.robots.parser import token_warning
from gatekeeper.storage.base import HistoryEntry, Storage
from gatekeeper.storage.sqlite import SqliteStorage
from gatekeeper.urls import UrlCache

if TYPE_CHECKING:
    from gatekeeper.sitemaps import Sitemaps

_log = logging.getLogger(__name__)


class Gatekeeper:
    """The gate: fetches each origin's robots.txt once, answers questions from it, grants leases.

    Open it with `async with`; it belongs to the event loop that opened it. `allowed` and `check`
    answer whether a URL may be fetched; `lease` also waits until its host may be asked again.

    `user_agent` is the whole User-Agent header, or a product token; the token selects the group in
    robots.txt. `config` has every setting; the default is `Config()`. Without a `session` the gate
    makes one, guarded at the socket; one that you pass is used as it is, without the guard
    (`stats().guarded` is False). `storage` keeps clocks and files across restarts; the default
    follows `config.storage`. A `ledger` shared with other processes grants the leases; the default
    follows `config.fleet`, without which this process paces alone. `clock`, `rng` and `resolver`
    are for tests.

    Raises ConfigError for an invalid setting or name, and StorageError on opening if the state
    file can't be used.

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
        if (warning := token_warning(user_agent)) is not None:
            warnings.warn(warning, stacklevel=2)
        self._session = session
        self._resolver = resolver
        self._clock = clock or SystemClock()
        self._monotonic = self._clock.monotonic
        self._rng = rng or random.Random()
        self._storage = storage or SqliteStorage.configured(config.storage, self._clock)
        self._guard = Guard(config) if session is None else None
        self._trusted = trusted_by(config.fetch)
        self._dns: HostAddresses | None = None
        if config.pacing.address_interval is not None:
            self._dns = HostAddresses(config, self._clock, self._guard, resolver)
        if ledger is None and config.fleet.url is not None:
            ledger = late("gatekeeper.gate", "configured_ledger")(config.fleet, self._clock)
        self._ledger = ledger
        self._signer = configured_signer(config.identity, self._clock)
        self._audit = audit = configured_audit(config, user_agent, self._clock)
        self._scheduler = Scheduler(
            config,
            clock=self._clock,
            rng=self._rng,
            storage=self._storage,
            ledger=self._ledger,
            files=self._file_holdups,
            audit=audit,
            on_rules=self._on_rules,
        )
        self._decider = self._make_decider()
        self._waits: WaitGraph[Lease] = WaitGraph(
            self._clock, config.pacing.own_wait, self._scheduler.holdups.needs
        )
        self._pacing = self._make_pacing()
        self._faults = LocalFaults(self._rng, self._on_fault, self._on_answer, self._on_doubt)
        self._url_cache = UrlCache()
        self._deadline_middleware = self._make_middleware()
        self._middleware = partial(self._deadline_middleware, None)
        self._opened: OpenParts | None = None
        self._loop_state: dict[str, Any] = {THREAD: None}
        self._short_road = self._loop_state
        """The state of the loop, unless each decision is to be recorded."""
        self.parts: GateParts = self._make_parts()
        self._stack = AsyncExitStack()
        self._warm_allowed = self._warm_denied = 0

    def _make_decider(self) -> Decider:
        # A strong reference would close a cycle that the garbage collector can't see as a whole.
        source = WeakMethod(self._scheduler.holdups.source)
        make = Decider if self._audit is None else self._audit.decider
        return make(
            self.config,
            agent=self._agent,
            guard=self._guard,
            overrides=self._scheduler.host_rules,
            cause=lambda host, kind: None if (find := source()) is None else find(host, kind),
        )

    def _make_pacing(self) -> RobotsPacing:
        return RobotsPacing(
            self._scheduler,
            self._decider,
            self._clock,
            waits=self._waits,
            dns=self._dns,
            files=lambda: self._open.directory,
        )

    def _make_middleware(self) -> DeadlineMiddleware:
        # With a ledger, the hold of a lease may lapse before its request is sent.
        lapsed = None if self._ledger is None else operator.methodcaller("lapsed")
        made: DeadlineMiddleware = late("gatekeeper.gate", "gate_middleware_with")(
            self,
            self._acquire,
            self._acquire_nowait,
            self._url_cache,
            self._unreached,
            lapsed,
            self._signer,
            None if self._audit is None else self._audit.answered,
        )
        return made

    def _make_parts(self) -> GateParts:
        """Name the parts for the products of this package. Not public."""
        return GateParts(
            clock=self._clock,
            decider=self._decider,
            scheduler=self._scheduler,
            waits=self._waits,
            storage=self._storage,
            guard=self._guard,
            resolver=self._dns or self._resolver,
            url_cache=self._url_cache,
            signer=self._signer,
            audit=self._audit,
            middleware=self._deadline_middleware,
            make_connector=self._connector,
            opened=lambda: self._opened or self._open,
        )

    # -- life ------------------------------------------------------------------------

    if not TYPE_CHECKING:
        __enter__ = __exit__ = __await__ = refusing("a Gatekeeper is opened by `async with`")

    async def __aenter__(self) -> Self:
        if self._opened is not None:
            raise GateClosed("this gate is already open; make another one")
        async with AsyncExitStack() as stack:
            if self._storage is not None:
                await self._storage.open()
                stack.push_async_callback(self._storage.close)
            if self._audit is not None:
                await self._audit.open(self.parts)
                stack.push_async_callback(self._audit.close)
            if self._dns is not None:
                stack.push_async_callback(self._dns.close)
            if isinstance(self._ledger, SharingLedger):
                self._ledger.overrides.follow(self._follow_fleet)
            await self._scheduler.open()
            stack.callback(self._waits.close)
            stack.push_async_callback(self._scheduler.close)
            own, session = None, self._session
            if session is None:
                session = own = await stack.enter_async_context(self._own_session())
            fetcher = self._make_fetcher(session)
            directory = Directory(
                self._robots_source(fetcher),
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
                self._decider, directory, self._clock, waits=self._waits, dns=self._dns
            )
            manager = LeaseManager if self._audit is None else self._audit.leases
            leases = manager(questions, self._scheduler, self._faults)
            stack.push_async_callback(leases.close)
            self._opened = OpenParts(own, session, fetcher, directory, questions, leases)
            self._loop_state = loop_state(leases.loop)
            if self._audit is None or not self._audit.every_decision:
                self._short_road = self._loop_state
            stack.push_async_callback(self._stop_answering)
            await directory.open()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, kind: object = None, *error: object) -> None:
        try:
            await self._stack.aclose()
        except StorageError as failure:
            if kind is None:
                raise
            _log.error("%s", failure)  # logged, so that the block's own exception is raised

    def _make_fetcher(self, session: aiohttp.ClientSession) -> Fetcher:
        """Make the object that fetches the files. `ScriptedGate` overrides this."""
        lease = RobotsLease if self._audit is None else self._audit.robots_lease
        return Fetcher(
            session,
            user_agent=self.user_agent,
            config=self.config,
            clock=self._clock,
            acquire=partial(lease, self._pacing),
            refuse=None if self._guard is None else self._guard.refuses_url,
            known=self._fresh_retrieval,
            signer=self._signer,
        )

    async def _stop_answering(self) -> None:
        """Stop answering; the first step of closing."""
        opened, self._opened = self._opened, None
        if opened is not None:
            self._decider.clear()
            await opened.directory.close()
            opened.fetcher.close()
            self._pacing.close()

    # -- questions -------------------------------------------------------------------

    async def allowed(self, url: str, *, user_agent: str | None = None) -> bool:
        """Return True if the URL may be fetched now, by robots.txt and the operator's rules.

        It waits for the origin's robots.txt if that is not cached. False means no *or not now*:
        `check` tells the two apart. `user_agent` is another name than the gate's own to ask for.
        Raises InvalidURL for a malformed URL.
        """
        # The short road makes no Decision and logs nothing. Each call on it would cost 5 %.
        if user_agent is None and self._short_road[THREAD] == get_ident():
            record = (decider := self._decider).find(url, self._monotonic())
            rules = None if record is None else (record.text or decider.no_text).rules
            if (
                record is not None
                and rules is not None
                and not (
                    isinstance(rules, FlatRules) and decider.asked_lately(record) and rules.long
                )
            ):
                verdict = rules.allows_plain(url[len(record.origin) :])
                if verdict:
                    self._warm_allowed += 1
                    return True
                if verdict is False:
                    self._warm_denied += 1
                    return False
        return bool(await self.check(url, user_agent=user_agent))

    async def check(self, url: str, *, user_agent: str | None = None) -> Decision:
        """Decide whether the URL may be fetched now, and why.

        It waits for the origin's robots.txt if that is not cached, but for no lease of the host.
        Raises InvalidURL for a malformed URL.

        >>> async def main(gate) -> None:
        ...     decision = await gate.check("https://example.org/page")
        ...     if decision.verdict is Verdict.DEFER:
        ...         ...  # ask again at decision.retry_at
        """
        agent = self._agent if user_agent is None else token_of(user_agent)
        if self._loop_state[THREAD] != get_ident():
            self._refuse_elsewhere()
        decision = self._decider.recall(url, agent, self._clock)
        if decision is not None:
            return decision
        return await self._open.questions.check(url, urls.parse(url), agent)

    def check_many(
        self, urls: Iterable[str], *, user_agent: str | None = None
    ) -> AsyncGenerator[Decision, None]:
        """Yield a decision about each URL, in order; robots.txt files are fetched in parallel.

        A malformed URL yields DENY with reason `invalid_url`, so there is one decision per input.
        """
        agent = self._agent if user_agent is None else token_of(user_agent)
        return self._open.questions.check_many(urls, agent)

    async def check_all(
        self, urls: Iterable[str], *, user_agent: str | None = None
    ) -> list[Decision]:
        """Return the decisions of `check_many` as a list."""
        async with aclosing(self.check_many(urls, user_agent=user_agent)) as decisions:
            return [decision async for decision in decisions]

    def peek(self, url: str, *, user_agent: str | None = None) -> Decision | None:
        """Decide from cached data: never waits, never fetches.

        Return None if nothing usable is cached about the origin. Raises InvalidURL.
        """
        agent = self._agent if user_agent is None else token_of(user_agent)
        decision = self._decider.recall(url, agent, self._clock)
        if decision is not None:
            return decision
        return self._open.questions.peek(url, urls.parse(url), agent)

    async def robots(self, url: str) -> RobotsTxt | None:
        """Return the robots.txt of the URL's origin, fetched if need be; None if there is no text.

        Raises InvalidURL, and LeaseTimeout as `refresh` does.
        """
        self._refuse_elsewhere()
        return await self._open.questions.robots(url)

    async def policy(self, url: str, *, user_agent: str | None = None) -> Policy:
        """Return the rules of the URL's origin for the agent, fetched if need be.

        Without a file the policy allows everything; if the file can't be fetched it allows nothing
        (RFC 9309 sections 2.3.1.3 and 2.3.1.4; RFC-36, RFC-37). Raises InvalidURL, and LeaseTimeout
        as `refresh` does.
        """
        agent = self._agent if user_agent is None else token_of(user_agent)
        self._refuse_elsewhere()
        return await self._open.questions.policy(url, agent)

    def sitemaps(
        self,
        origin: str,
        *,
        since: datetime | date | None = None,
        guess: bool = False,
        max_entries: int | None = None,
    ) -> Sitemaps:
        """Iterate over the pages that the origin's sitemaps list: `.url`, `.lastmod`, `.source`.

        The files are those that its robots.txt names, with `guess` also /sitemap.xml, and the files
        that these name (sitemaps.org). Each takes a lease of its host, if its own robots.txt
        allows it; the `findings` of the result say which could not be read, and why. With `since`,
        an aware datetime or a date, pages and files that were certainly not modified since are
        left out. `origin` may be any URL of it.

        Iterating raises Denied, or Deferred if robots.txt can't be fetched now. Raises InvalidURL,
        and ConfigError for another argument that is invalid.

        >>> async def main(gate) -> None:
        ...     async for entry in gate.sitemaps("https://example.org", since=date(2026, 11, 1)):
        ...         print(entry.url, entry.lastmod)
        """
        found: Sitemaps = late("gatekeeper.gate.gatekeeper", "sitemaps_of")(
            self, origin, since=since, guess=guess, max_entries=max_entries
        )
        return found

    async def history(self, origin: str) -> list[HistoryEntry]:
        """Return the versions of the origin's robots.txt, oldest first; empty without a storage.

        Raises InvalidURL.
        """
        origin = urls.parse(origin).origin
        return [] if self._storage is None else await self._storage.history(origin)

    # -- leases ----------------------------------------------------------------------

    def lease(
        self,
        url: str,
        *,
        priority: int = 0,
        timeout: float | None = None,
        user_agent: str | None = None,
    ) -> LeaseRequest:
        """Wait until the host is due; the lease is the right to send one request to the URL.

        Use it as `async with gate.lease(url) as lease:`, send the request inside the block, and
        call `lease.report`. Within a host, a higher `priority` goes first. `timeout` is in seconds,
        for the robots.txt and the lease together; None waits as long as it takes.

        Entering raises Denied if the URL may not be fetched, Deferred (a Denied, with `retry_at`)
        if it may not be fetched now, LeaseTimeout if no lease came in time, InvalidURL for a
        malformed URL, and ConfigError for a `user_agent` that no request can be sent under, such
        as `*`.

        >>> async def main(gate, session) -> None:
        ...     url = "https://example.org/page"
        ...     async with gate.lease(url, timeout=60) as lease, session.get(url) as response:
        ...         lease.report(status=response.status)
        """
        opened = self._opened or self._open  # `_open` raises GateClosed
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
        """Wait for a lease that is not bound to a block: await it, and call `lease.end()` yourself.

        `owned=False`: the lease outlives the task that asks for it, a server's handler for example,
        so another lease of the task for the same host waits instead of raising LeaseTimeout.
        Raises as entering `lease` does.
        """
        opened = self._opened or self._open  # `_open` raises GateClosed
        request = LeaseRequest(opened.leases, url, priority, timeout, user_agent, owned, False)
        return request.__aenter__()

    async def try_acquire(
        self, url: str, *, priority: int = 0, user_agent: str | None = None, owned: bool = True
    ) -> Lease | NotYet:
        """Grant a lease if the host is due now; else return `NotYet` with the time to ask again.

        It never waits, and takes at most one round trip to a fleet's store. A robots.txt
        that is not cached is fetched in the background. End the lease with `lease.end()`; `owned`
        is that of `acquire`. Raises InvalidURL, and Denied for a URL that may not be fetched;
        never Deferred.
        """
        return await self._open.leases.try_acquire(
            url, priority=priority, user_agent=user_agent, owned=owned
        )

    @property
    def middleware(self) -> ClientMiddlewareType:
        """Client middleware that decides, paces and reports every request and redirect hop.

        Pass it last: `aiohttp.ClientSession(middlewares=(..., gate.middleware))`.
        """
        return self._middleware

    # -- operating -------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether leases can be granted: the gate is open, its own network seems to be up, the
        state file and the audit record can be written, and the fleet's store, if any, answers."""
        opened = self._opened
        if opened is None or not opened.directory.ready or self.parts.storage_failing is not None:
            return False
        return bool(getattr(self._ledger, "ready", True))

    async def why(self, host: str) -> tuple[ClockView, ...]:
        """Return every clock of the host and whatever else keeps it from being asked, such as a
        robots.txt that could not be fetched, each with its source.

        `host` is a name, an address or a URL, here and below. Raises ConfigError for anything else.
        """
        return self._scheduler.why(host_named(host))

    async def refresh(self, origin: str) -> None:
        """Fetch the robots.txt of an origin, or of a URL's origin, again now.

        Raises InvalidURL, and LeaseTimeout if the fetch would have to wait for a lease of the
        calling task, or for the end of a host's block or pause: the file is fetched after that.
        """
        await self._open.questions.refresh(origin)

    async def block(self, host: str, until: datetime | float, reason: str = "operator") -> None:
        """Send no request to the host before `until`, an aware datetime or POSIX seconds.

        Raises ConfigError, and changes nothing, if `host` or `until` is invalid.
        """
        host = host_named(host)
        wall = block_end(host, until)
        self._refuse_elsewhere()
        self._pacing.unpark(host)
        self._scheduler.block(host, wall, reason)

    async def pause(self, host: str) -> None:
        """Grant no lease for the host until `resume`, also after a restart. Raises ConfigError."""
        host = host_named(host)
        self._refuse_elsewhere()
        self._scheduler.pause(host)

    async def resume(self, host: str) -> None:
        """Grant leases for the host again. It lifts a pause, not a block. Raises ConfigError."""
        host = host_named(host)
        self._refuse_elsewhere()
        self._scheduler.pause(host, paused=False)

    def override(self, rule: HostRule, *, seconds: float | None = None) -> None:
        """Set a `[[host]]` rule at run time. It replaces the whole rule with the same `match`.

        After `rule.until`, or after so many `seconds` from now, the rule that it replaced is in
        force again; 0 seconds end everything that was set for the match. A reload of the
        configuration leaves it in force. Settings that it leaves out are unset. `group` must be one
        of the configuration's. Every member of a fleet applies the rule, for as long as one of them
        runs. Raises ConfigError, and changes nothing, for an invalid rule.
        """
        if not isinstance(rule, HostRule):
            remedy = "write HostRule(match=HOST, ...)"
            raise TypeError(f"rule must be a HostRule, not {type(rule).__name__}; {remedy}")
        match = match_named(rule.match)
        rule = lasting(rule, seconds, self._clock.wall())
        rules = self._scheduler.host_rules
        put = () if seconds == 0 else (*rules.set_for(match), rule)
        self._scheduler.put_rules(match, put)
        _log.info("the override for %s is now: %s", match, described(rules.in_force(match)))
        if isinstance(self._ledger, SharingLedger):
            self._ledger.overrides.say(match, rules.set_for(match), rules.in_force(match))

    def subscribe(
        self, callback: Callable[[str, RobotsTxt | None, RobotsTxt | None], None]
    ) -> Callable[[], None]:
        """Call `callback(origin, old, new)` when the rules of an origin change.

        It is not called for the first fetch of an origin; `old` and `new` are None if there is no
        file. Return a function that ends the subscription. Raises GateClosed.
        """
        return self._open.directory.subscribe(callback)

    def stats(self) -> GateStats:
        """Return the current counters and gauges of every part. Raises GateClosed."""
        return GateStats(
            guarded=self._guard is not None,
            warm_allowed=self._warm_allowed,
            warm_denied=self._warm_denied,
            decisions=self._decider.counts(),
            directory=self._open.directory.stats(),
            pacing=self._scheduler.stats(),
            guard=None if self._guard is None else self._guard.stats(),
            fleet=self._ledger.stats() if isinstance(self._ledger, SharingLedger) else None,
        )

    # -- inside ----------------------------------------------------------------------

    def _refuse_elsewhere(self) -> None:
        """Raise GateClosed in another event loop than the gate's, and if it is not open."""
        refuse_unless_open(self._open.leases.loop)

    @property
    def _open(self) -> OpenParts:
        if self._opened is None:
            raise GateClosed("the gate is not open; use it inside `async with Gatekeeper(...)`")
        return self._opened

    def _acquire_nowait(self, url: str, owner: asyncio.Task[object] | None) -> Lease | None:
        return (self._opened or self._open).leases.acquire_nowait(url, owner)

    def _acquire(
        self, url: str, owner: asyncio.Task[object] | None, *, user_agent: str | None = None
    ) -> Coroutine[Any, Any, Lease]:
        return self._open.leases.acquire(url, owner, user_agent=user_agent)

    def _unreached(self, lease: object, error: BaseException) -> None:
        if self._opened is not None:
            self._opened.leases.uplink.unreached(lease, error)

    def _follow_fleet(self, match: str, rules: tuple[HostRule, ...]) -> None:
        """Apply the rules for a match that another member of the fleet set."""
        self._scheduler.put_rules(match, rules, "fleet")
        known = self._scheduler.host_rules
        told = "the override for %s is now, by another member of the fleet: %s"
        _log.info(told, match, described(known.in_force(match)))
        if len(known.set_for(match)) < len(rules):  # some have ended already
            self._on_rules([match])

    def _on_rules(self, ended: Sequence[str]) -> None:
        """Handle a change of the operator's rules; `ended`: the matches of those that ended."""
        self._decider.forget()
        for follower in self.parts.followers:
            follower.rules_changed()
        if isinstance(self._ledger, SharingLedger):
            for match in ended:
                self._ledger.overrides.ended(match, self._scheduler.host_rules.in_force(match))

    def _file_holdups(self, host: str) -> Sequence[HostHoldup]:
        noted, opened = self._decider.noted.get(host), self._opened
        if noted is None or opened is None:
            return ()
        return self._decider.file_holdups(host, opened.directory.recall, self._clock)

    def _on_fault(self, on: bool) -> None:
        """Handle the beginning (`on`) or the end of a fault of our own network."""
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
        self._pacing.learnt(record)  # first, as it may extend the record's lifetime
        for follower in self.parts.followers:
            follower.learnt(record)

    def _on_retrieval(self, origin: str, retrieval: Retrieval, seconds: float) -> None:
        for listener in self.parts.listeners:
            listener(origin, retrieval, seconds)

    def _fresh_retrieval(self, origin: str) -> Retrieval | None:
        """Return the fresh retrieval of an origin whose /robots.txt a redirect leads to, if any."""
        return self._open.directory.known(origin)

    def _robots_source(self, fetcher: Fetcher) -> RobotsSource:
        """Wrap the fetcher so that a fleet fetches each file once; alone, return it as it is."""
        if not isinstance(self._ledger, SharingLedger):
            return fetcher
        return self._ledger.sharing(
            fetcher,
            self.config.cache,
            lambda: None if self._opened is None else self._opened.directory,
        )

    def _connector(self) -> aiohttp.TCPConnector:
        return GuardedConnector(
            self._guard or Guard(self.config),
            self._dns or self._resolver,
            deny=self._decider.refused,
            url_cache=self._url_cache,
            max_idle=self.config.fetch.max_idle_connections,
            ssl=self._trusted,
            # No limit of its own: leases and fetch slots bound the connections, and the scheduler
            # could not account for time spent waiting in a connection pool.
            limit=0,
            # With two DNS caches, the addresses that are connected to and those whose clocks are
            # used could differ.
            use_dns_cache=self._dns is None,
        )

    def _own_session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=self._connector(),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,  # T19: a proxy from the environment would bypass the guard
        )
