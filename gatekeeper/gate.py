"""`Gatekeeper`: the directory of files and the scheduler of turns, behind a few methods."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack
from functools import partial
from types import TracebackType
from typing import Self

import aiohttp
from aiohttp import ClientMiddlewareType
from aiohttp.abc import AbstractResolver

from gatekeeper import urls
from gatekeeper.clock import Clock, SystemClock
from gatekeeper.config import Config, agent_named, as_config
from gatekeeper.deadlock import WaitGraph, WaitsForItself
from gatekeeper.deciding import ON_THE_WAY, Decider
from gatekeeper.decision import Decision
from gatekeeper.dialling import Dialling
from gatekeeper.errors import GateClosed
from gatekeeper.fetching.directory import Directory
from gatekeeper.fetching.faults import LocalFaults
from gatekeeper.fetching.fetcher import Fetcher
from gatekeeper.fetching.guard import Guard, Whereabouts
from gatekeeper.fetching.records import Record
from gatekeeper.immediate import Immediate
from gatekeeper.leasing import Lease, LeaseRequest, Lessor
from gatekeeper.many import Many
from gatekeeper.middleware import UNLIMITED, Passage, gate_passage
from gatekeeper.pacing.ledger import Ledger
from gatekeeper.pacing.queues import REFETCH, Offer
from gatekeeper.pacing.rules import HostRules
from gatekeeper.pacing.scheduler import Scheduler
from gatekeeper.pacing.scopes import NO_RATE
from gatekeeper.prepared import PreparedAnswers
from gatekeeper.robots.quick import QuickAnswer
from gatekeeper.storage.base import Storage
from gatekeeper.storage.sqlite import SqliteStorage
from gatekeeper.url_cache import UrlCache
from gatekeeper.urls import Target, not_text
from gatekeeper.wishes import Wishes

__all__ = ["Gatekeeper"]


class Gatekeeper(Immediate, Many, Dialling):
    """Asks every origin's robots.txt once, answers from it, and hands out turns.

    `user_agent` is the whole User-Agent header, or a product token; the token chooses the
    group in robots.txt. Without a `session` the gate makes one of its own, guarded at the
    socket; one that you hand in is used as it is (`stats().guarded` says so). A `ledger`
    shared with others books the turns; None: this process alone does. Open it with
    `async with`; it belongs to the event loop that opened it.

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
        self.config = as_config(config)
        self.user_agent = user_agent
        self._agent = agent_named(user_agent)
        self._session = session
        self._resolver = resolver
        self._clock = clock or SystemClock()
        self._monotonic = self._clock.monotonic
        self._rng = rng or random.Random()
        self._storage = storage or _storage_of(self.config, self._clock)
        self.guard = Guard(self.config) if session is None else None
        self._whereabouts = Whereabouts.of(self.config, self._clock, self.guard, resolver)
        self._overrides = HostRules(self.config.host)
        self._decider = Decider(
            self.config, clock=self._clock, guard=self.guard, overrides=self._overrides
        )
        if self.guard is not None:
            self.guard.next_id = self._decider.next_id
        self._scheduler = Scheduler(
            self.config, clock=self._clock, rng=self._rng, storage=self._storage, ledger=ledger
        )
        self._waits: WaitGraph[Lease] = WaitGraph(
            self._clock, self.config.pacing.own_wait, self._scheduler.needs
        )
        self._wishes = Wishes(
            self._scheduler,
            self._decider,
            self._clock,
            self._agent,
            self._waits,
            self._whereabouts,
        )
        self._faults = LocalFaults(self._rng, self._on_fault)
        self._directory: Directory | None = None
        self._fetcher: Fetcher | None = None
        self._warm: dict[str, Record] = {}
        self._answers = PreparedAnswers(
            self.config, self._clock, self._decider, self._agent, self._wishes.at_any_hour
        )
        self._lessor = Lessor(
            self,
            self._answers.at_once,
            self._answers.at_place,
            self._scheduler,
            self._clock,
            self._decider.serial,
            self._faults,
            self._waits,
            self._whereabouts,
        )
        self.url_cache = UrlCache()
        self._middleware = partial(self.passage(), UNLIMITED)
        self._own: aiohttp.ClientSession | None = None
        self._stack = AsyncExitStack()
        # The authority of the last question to `allowed`, with the slash behind it, where
        # that slash stands, and the record. At first one that no URL begins with.
        self._authority, self._cut = "\n", 0
        self._record: Record | _Nowhere = _Nowhere()
        self._warm_allowed = 0
        self._warm_denied = 0

    # -- life ------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        if self._directory is not None:
            raise GateClosed("this gate is open already; make another one")
        async with AsyncExitStack() as stack:
            if self._storage is not None:
                await self._storage.open()
                stack.push_async_callback(self._storage.close)
            if self._whereabouts is not None:
                stack.push_async_callback(self._whereabouts.close)
            await self._scheduler.open()
            stack.callback(self._waits.close)
            stack.push_async_callback(self._scheduler.close)
            self._lessor.loop = asyncio.get_running_loop()
            stack.callback(self._lessor.uplink.close)
            session = self._session
            if session is None:
                session = await stack.enter_async_context(self._own_session())
            fetcher = self._fetcher = Fetcher(
                session,
                user_agent=self.user_agent,
                config=self.config,
                clock=self._clock,
                rng=self._rng,
                take_turn=self._wishes.robots_turn,
                refuse=self._refuse_hop,
            )
            directory = Directory(
                fetcher,
                config=self.config,
                clock=self._clock,
                rng=self._rng,
                storage=self._storage,
                on_learnt=self._wishes.learnt,
                faults=self._faults,
            )
            self._wishes.look_up = directory.recall
            self._wishes.holder = directory.holder
            await directory.open()
            stack.push_async_callback(directory.close)
            self._directory = directory
            self._warm = self._answers.warm = directory.warm
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._directory, self._warm, self._answers.warm = None, {}, {}
        await self._stack.aclose()

    # -- questions -------------------------------------------------------------------

    async def allowed(self, url: str, *, user_agent: str | None = None) -> bool:
        """Whether the URL may be fetched now, by robots.txt and the operator.

        False means no *or not now*: `check` tells the two apart. Raises InvalidURL.
        """
        # The hot path builds no Decision, reads no clock and logs nothing (DESIGN 4.2). It
        # looks into one dictionary, and not even there if the authority is that of the
        # question before. What it can't answer at a glance is for `check`.
        if user_agent is None:
            try:
                if url.startswith(self._authority):
                    ready, text = self._record.ready, url[self._cut :]
                else:
                    ready, text = self._turn_to(url)
            except (AttributeError, TypeError):
                if isinstance(url, str):
                    raise
                raise not_text(url) from None
            if ready is not None:
                verdict = ready(text)
                if verdict:
                    self._warm_allowed += 1
                    return True
                if verdict is False:
                    self._warm_denied += 1
                    return False
        return bool(await self.check(url, user_agent=user_agent))

    async def check(self, url: str, *, user_agent: str | None = None) -> Decision:
        """Whether the URL may be fetched now, and why. Raises InvalidURL."""
        agent = self._token_of(user_agent)
        decision = self._answers.recall(url, agent)
        if decision is not None:
            return decision
        target = urls.parse(url)
        decision = self._decider.outright(url, target, agent)
        if decision is None:
            record = self._fresh(target.origin)
            if record is None:
                try:
                    record = await self._learn(target, asyncio.current_task(self._lessor.loop))
                except WaitsForItself as error:
                    return self._decider.held_back(url, target, agent, error.held, error.whose)
            decision = self._decide(url, target, record, agent)
        return decision

    def peek(self, url: str, *, user_agent: str | None = None) -> Decision | None:
        """The decision as far as it is known: never waits, never fetches. Raises InvalidURL.

        None: nothing usable is known of the origin.
        """
        agent = self._token_of(user_agent)
        decision = self._answers.recall(url, agent)
        if decision is not None:
            return decision
        target = urls.parse(url)
        decision = self._decider.outright(url, target, agent)
        if decision is None:
            record = self._open.peek(target.origin)
            if record is not None:
                decision = self._decide(url, target, record, agent)
        return decision

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
        it takes. Entering raises InvalidURL, Denied, Deferred, or LeaseTimeout.
        """
        return LeaseRequest(self._lessor, url, priority, timeout, user_agent)

    async def acquire(
        self,
        url: str,
        *,
        priority: int = 0,
        timeout: float | None = None,
        user_agent: str | None = None,
        owned: bool = True,
    ) -> Lease:
        """A lease that ends by `lease.end()`, for those to whom a block does not fit.

        `owned=False`: the lease outlives the task that asks for it (a server's handler),
        so a second one for the same host simply waits. Raises as `lease` does.
        """
        return await self._lessor.acquire(
            url, priority=priority, timeout=timeout, user_agent=user_agent, owned=owned
        )

    @property
    def middleware(self) -> ClientMiddlewareType:
        """For `aiohttp.ClientSession(middlewares=(gate.middleware,))`; put it last."""
        return self._middleware

    def passage(self) -> Passage:
        """`middleware`, for a session that gives each request a deadline of its own; it may
        read its URLs by `url_cache`.
        """
        lessor = self._lessor
        return gate_passage(self, lessor.wait, lessor.take, self.url_cache, lessor.uplink.unreached)

    # -- inside ----------------------------------------------------------------------

    def _fresh(self, origin: str) -> Record | None:
        """The record, if nothing about it is due to be asked again."""
        record = self._open.peek(origin)
        if record is not None and self._monotonic() < record.fresh_until:
            return record
        return None

    def _turn_to(self, url: str) -> tuple[QuickAnswer | None, str]:
        """Find the warm record of an authority that is spelt as its origin, and stay there."""
        cut = url.find("/", 8)  # behind `https://`
        record = self._warm.get(url[:cut])
        if record is None or cut < 0:
            return None, ""
        self._authority, self._cut, self._record = url[: cut + 1], cut, record
        return record.ready, url[cut:]

    def _decide(
        self, raw: str, target: Target, record: Record, agent: str, ahead: float = 0.0
    ) -> Decision:
        decision = self._decider.by_record(raw, target, record, agent, ahead)
        if record is self._warm.get(record.origin) and self._monotonic() < record.fresh_until:
            policy = record.policies.get(agent)
            # Visit-time is asked of the clock each time: never on the hot path.
            if record.ready is None and agent == self._agent and policy and not policy.timed:
                record.ready = policy.quick_answer(record.origin)
            self._answers.keep(decision, target.path, record, agent)
        return decision

    def offer(self, url: str, target: Target, user_agent: str | None) -> tuple[Decision, Offer]:
        """The decision at the moment of a grant and the pace the text asks for then.

        REFETCH where the file is hard-expired: the turn goes to it. Never waits.
        """
        agent = self._token_of(user_agent)
        found = self._answers.find(url, agent)
        if found is not None:
            pace = found[0].wish or self._wishes.of(self._warm[target.origin], agent)
            return self._answers.tell(url, found[1]), pace
        outright = self._decider.outright(url, target, agent)
        if outright is not None:
            return outright, NO_RATE
        record = self._open.peek(target.origin)
        if record is None:
            return self._decider.unknown(url, target, agent), REFETCH
        decision = self._decide(url, target, record, agent, ON_THE_WAY)
        return decision, self._wishes.of(record, agent)

    def unkept(self, url: str, target: Target, user_agent: str | None, why: str) -> Decision:
        """DEFER, since the clock of the turn can't be kept."""
        return self._decider.unkept(url, target, self._token_of(user_agent), why)

    async def learn(self, origin: str) -> None:
        """Ask the origin for its file if need be."""
        await self._open.get(origin)

    def note_page(self, origin: str, *, ok: bool) -> None:
        """A page of the origin answered: is the site generally up? (RFC-38, VND-05)."""
        if self._directory is not None:
            self._directory.note_page(origin, ok)

    def _on_fault(self, on: bool) -> None:
        """A fault of our own network began, or is over."""
        if on:
            self._scheduler.freeze(self._faults.unanswered)
        else:
            self._scheduler.thaw()

    def _refuse_hop(self, url: str) -> object | None:
        return None if self.guard is None else self.guard.refuses_url(url)


class _Nowhere:
    """The record of no origin: it has no answer ready."""

    ready: QuickAnswer | None = None


def _storage_of(config: Config, clock: Clock) -> Storage | None:
    if config.storage.path is None:
        return None
    return SqliteStorage(config.storage.path, config=config.storage, clock=clock)
