"""`Directory`: one record per origin, and one fetch for any number of concurrent callers.

Each origin that has to be fetched has one *flight*: a task that the directory owns, and one
future per caller that waits for it. So a cancelled caller does not cancel the fetch, a slow
origin delays only its own callers, and closing leaves no task behind. There are no locks:
every check and the update that depends on it run without an await in between.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from typing import Final

import msgspec

from gatekeeper.clock import Clock, OwnedTasks, SingleTimer, deadline, refuse_unless_open
from gatekeeper.config import Config
from gatekeeper.errors import GateClosed, StorageError
from gatekeeper.fetching.cache import RecordCache, RecordUpdates, answered
from gatekeeper.fetching.faults import PROBE_SECONDS, LocalFaults
from gatekeeper.fetching.outcomes import (
    ANSWERED,
    FAILED,
    Outcome,
    ProbeLimits,
    Retrieval,
    RobotsSource,
    Validators,
    precedence,
    probe_limits,
)
from gatekeeper.fetching.records import LARGE, FileText, FileTexts, Record
from gatekeeper.robots import Policy, RobotsTxt
from gatekeeper.split_dict import SplitDict
from gatekeeper.storage.base import Storage, unpack_body

DelayReason = Callable[[], tuple[Outcome, float] | None]
"""Returns why a flight has to wait long for its lease, and for how many seconds; None: it need
not."""


class Flight(msgspec.Struct, eq=False):
    """The lookup of one origin that is in progress, and the callers that wait for it."""

    origin: str
    force: bool
    task: asyncio.Task[None] | None = None
    waiters: dict[asyncio.Future[Record | None], None] = {}
    """One future per waiting caller, so that cancelling one affects no other. The result is the
    record, or None when the directory closes; never an exception."""
    asked: bool = False
    """True once the origin itself is asked (or would be, but for a local fault), instead of
    only the storage."""
    delay_reason: DelayReason | None = None
    """Set while the flight waits for a lease that may be far off."""

    def answer(self, record: Record | None) -> None:
        """Answer the current waiters; later ones get the next answer."""
        waiters, self.waiters = self.waiters, {}
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(record)


current_flight: ContextVar[Flight | None] = ContextVar("gatekeeper_flight", default=None)
"""The flight that the current task belongs to."""


log: Final = logging.getLogger("gatekeeper.fetching")

OnChange = Callable[[str, RobotsTxt | None, RobotsTxt | None], object]
"""Called with the origin, the old text and the new one; None for an origin without a file."""
OnRetrieval = Callable[[str, Retrieval, float], object]
"""Called with the origin, the retrieval, and its seconds."""

_MAX_COMPRESSION: Final = 1_000
"""The highest compression ratio of a body, for an upper bound of its text's size."""
_PROBE_LEASE_SECONDS: Final = 0.5
"""Seconds that a probe waits for its host before it only tests the connection."""
_MAX_RENEWING_FLIGHTS: Final = 1_000
"""With so many flights in progress none is started for a file that others have renewed."""
_RETRY_SECONDS: Final = 1.0
"""Seconds until the next attempt if nothing could be recorded."""
_LOG_SECONDS: Final = 60.0
"""Seconds between two log lines about a shortage of our own, such as of file descriptors."""


class DirectoryStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since the start, and gauges of the current state."""

    records: int
    """Records in memory. `hot` of them were used lately, or may be evicted; the others are of
    unreachable origins. `warm` of the hot ones answer by the policy of their text alone."""
    hot: int
    warm: int
    texts: int
    """Distinct texts of the hot records."""
    bytes: int
    """An estimate of the memory that the records take."""
    in_flight: int
    waiting: int
    """Callers that wait for a flight."""
    fetches: int
    outcomes: dict[str, int]
    """Retrievals by the name of their outcome's row."""
    revalidated: int
    internal_errors: int
    overloaded: int
    evicted: int
    storage_errors: int
    local_fault: bool
    local_faults: int


class Directory:
    """What is known about every origin's robots.txt.

    A hot path looks into the dictionary of records first, and calls `get` otherwise.
    """

    def __init__(
        self,
        fetcher: RobotsSource,
        *,
        config: Config,
        clock: Clock,
        rng: random.Random,
        storage: Storage | None = None,
        on_learnt: Callable[[Record], object] = lambda _record: None,
        on_retrieval: OnRetrieval = lambda _origin, _retrieval, _seconds: None,
        faults: LocalFaults | None = None,
        records: SplitDict[str, Record] | None = None,
        texts: FileTexts | None = None,
        choose: Callable[[RobotsTxt, str], Policy] = RobotsTxt.policy,
        agent: str = "",
    ) -> None:
        """`on_learnt` is called with each record made from a retrieval; `on_retrieval` after each
        retrieval with the origin, the retrieval, and its seconds including the wait for leases.
        They must be short and must not raise. `faults` may be shared with others that report
        answers; its `on_doubt` must call `plan_probes`. None: the directory has its own. `records`
        and `texts` may be given by the caller, empty. `choose` returns the policy of a text for an
        agent, and is called in a thread; `agent` is the agent of most questions."""
        self._fetcher = fetcher
        self._config = config
        self._clock = clock
        self._storage = storage
        self._faults = faults or LocalFaults(rng, on_doubt=self.plan_probes)
        self._cache = RecordCache(
            config,
            stored=storage is not None,
            records=records,
            texts=FileTexts(config, agent) if texts is None else texts,
            uptime=self._faults.uptime,
        )
        self.records: SplitDict[str, Record] = self._cache.records
        self._updates = RecordUpdates(
            self._cache,
            self._faults,
            config=config,
            clock=clock,
            rng=rng,
            storage=storage,
            on_learnt=on_learnt,
        )
        self._flights: dict[str, Flight] = {}
        self._probes = OwnedTasks()  # by origin
        self._next_probe = SingleTimer(clock, self._send_probes)
        self._choose = choose
        self._agent = agent
        self._preparing = OwnedTasks()  # by text and agent
        self._parsing = asyncio.Semaphore(1)
        """Allows one large text at a time, as every busy thread slows the loop's thread down."""
        self._waiting = 0
        self._counts: Counter[str] = Counter()
        self._fetches = self._internal_errors = 0
        self._log_shortage_at = -math.inf
        self._overloaded = 0
        self._open = False
        self._on_retrieval = on_retrieval

    async def open(self) -> None:
        """Start answering, in the running loop. The storage, if any, is opened by its owner."""
        self._loop = asyncio.get_running_loop()  # cached, as this makes a system call
        self._open = True

    async def close(self) -> None:
        """Cancel every flight; waiting callers get GateClosed. Idempotent."""
        self._open = False
        tasks = [flight.task for flight in self._flights.values() if flight.task is not None]
        self._next_probe.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._probes.close()
        await self._preparing.close()
        # A task that is cancelled before its first step never runs its `finally`.
        flights, self._flights = self._flights, {}
        for flight in flights.values():
            flight.answer(None)

    @property
    def ready(self) -> bool:
        """True if the directory is open and the network works."""
        return self._open and not self._faults.active

    async def get(self, origin: str) -> Record:
        """Return the record of an origin, fetching its file if necessary.

        Until soft expiry the cached record is returned; after it too, while the file is fetched
        in the background; after hard expiry the call waits for the fetch. It never fails because
        of the origin: an unreachable file reads as DEFER. Raises GateClosed.
        """
        record = self.get_nowait(origin)
        return await self.await_flight(origin) if record is None else record

    async def await_flight(self, origin: str) -> Record:
        """Wait for a flight and return its record, as `get` does if nothing is `get_nowait`. Raises
        GateClosed."""
        return (await self._wait_for(origin, force=False))[0]

    def get_nowait(self, origin: str) -> Record | None:
        """Return the record that `get` would return without waiting, or None. After soft expiry,
        start a refresh in the background."""
        record = self._cache.get(origin)
        if record is not None:
            now = self._clock.monotonic()
            if now < record.fresh_until:
                return record
            if record.usable(now):
                if self._open:
                    self._get_flight(origin)
                return record
        return None

    def peek(self, origin: str) -> Record | None:
        """Return a record in memory that may still answer, or None. Never waits, fetches or reads
        the storage."""
        record = self._cache.get(origin)
        if record is None or not record.usable(self._clock.monotonic()):
            return None
        return record

    def recall(self, origin: str) -> Record | None:
        """Return the record in memory, even an expired one, or None. May be called in another
        thread."""
        return self._cache.get(origin)

    def coding(self, origin: str) -> str:
        """Return `Metadata.coding` of the text of an origin in memory; empty without one."""
        record = self.recall(origin)
        return "" if record is None or record.good is None else record.good.metadata.coding

    async def refresh(self, origin: str) -> Record:
        """Fetch the file now, even if a fresh record exists. Raises GateClosed."""
        while True:
            record, asked = await self._wait_for(origin, force=True)
            if asked:
                return record

    def renew(self, origin: str) -> None:
        """Fetch a file again in the background, because a newer version of it exists.

        Does nothing if there is no record of the origin, or if many flights are in progress: then
        the record is refreshed when it expires.
        """
        may_start = self._open and len(self._flights) < _MAX_RENEWING_FLIGHTS
        if may_start and self._cache.get(origin) is not None:
            self._get_flight(origin, force=True)

    def void_refusals(self) -> None:
        """Discard the records of fetches that the guard refused, as its settings have changed."""
        self._cache.void_refusals()

    def note_page(self, origin: str, ok: bool) -> None:
        """Note that a page of the origin was fetched; `ok`: with 2xx or 3xx. It counts for the
        30 days of RFC 9309 section 2.3.1.4 (RFC-38)."""
        if ok:
            self._updates.note_page(origin)

    def subscribe(self, callback: OnChange) -> Callable[[], None]:
        """Add a callback for changes of an origin's rules. Return a function that removes it.

        It is not called when an origin is fetched for the first time.
        """
        return self._updates.subscribe(callback)

    def fresh(self) -> Iterator[tuple[str, float]]:
        """Yield the origins of the fresh hot records, and for how many seconds each is `known`."""
        for part in tuple(self.records.parts):
            for origin in tuple(part):
                record, now = self.records.get(origin), self._clock.monotonic()
                if record is not None and record.fresh_until > now:
                    yield origin, record.fresh_until - now

    def known(self, origin: str) -> Retrieval | None:
        """Return a fresh record as the retrieval that would have given it, or None."""
        return self._updates.known(origin)

    def delay_setter(self) -> Callable[[DelayReason | None], None]:
        """Return a function that reports why the current flight has to wait for its lease.

        Called inside the flight by the code that takes its leases. While the reason holds, callers
        do not wait with the flight but get a DEFER with a `retry_at`: a block or a pause may last
        for days. The flight itself goes on. Reporting None ends the reason.
        """
        return partial(self._set_delay_reason, current_flight.get())

    def _set_delay_reason(self, flight: Flight | None, delay_reason: DelayReason | None) -> None:
        if flight is not None:
            flight.delay_reason = delay_reason
            if (record := self._delayed_record(flight)) is not None:
                flight.answer(record)

    def _delayed_record(self, flight: Flight) -> Record | None:
        """Return the record to answer by while a flight is held up, or None if it is not."""
        found = None if flight.delay_reason is None else flight.delay_reason()
        return None if found is None else self._updates.temporary(flight.origin, *found)

    def stats(self) -> DirectoryStats:
        """Return counters and sizes."""
        return DirectoryStats(
            records=len(self._cache),
            hot=len(self.records),
            warm=self._cache.warm,
            texts=len(self._cache.texts),
            bytes=self._cache.bytes,
            in_flight=len(self._flights),
            waiting=self._waiting,
            fetches=self._fetches,
            outcomes=dict(self._counts),
            revalidated=self._counts[Outcome.NOT_MODIFIED.row.name],
            internal_errors=self._internal_errors,
            overloaded=self._overloaded,
            evicted=self._cache.evicted,
            storage_errors=self._updates.storage_errors,
            local_fault=self._faults.active,
            local_faults=self._faults.count,
        )

    async def _wait_for(self, origin: str, *, force: bool) -> tuple[Record, bool]:
        """Wait for the origin's flight. Return its record, and whether the origin was asked."""
        refuse_unless_open(self._loop if self._open else None)
        flight = self._flights.get(origin)
        if self._waiting >= self._config.cache.max_waiters or (
            flight is None and len(self._flights) >= self._config.cache.max_waiters
        ):
            self._overloaded += 1
            return self._updates.temporary(origin, Outcome.OVERLOADED, _RETRY_SECONDS), True
        if flight is None:
            flight = self._get_flight(origin, force=force)
        elif force:
            flight.force = True
        if (meanwhile := self._delayed_record(flight)) is not None:
            return meanwhile, True
        waiter: asyncio.Future[Record | None] = self._loop.create_future()
        flight.waiters[waiter] = None
        self._waiting += 1
        try:
            record = await waiter
        finally:
            self._waiting -= 1
            flight.waiters.pop(waiter, None)
        if record is None:
            raise GateClosed("the gate was closed while robots.txt was being fetched")
        return record, flight.asked

    def _get_flight(self, origin: str, *, force: bool = False) -> Flight:
        """Return the flight of an origin, starting one if there is none. Does not await."""
        flight = self._flights.get(origin)
        if flight is None:
            refuse_unless_open(self._loop if self._open else None)
            flight = self._flights[origin] = Flight(origin, force=force)
            flight.task = self._loop.create_task(self._run_flight(origin, flight))
        return flight

    async def _run_flight(self, origin: str, flight: Flight) -> None:
        current_flight.set(flight)
        record: Record | None = None
        try:
            record = await self._fetch_record(origin, flight)
        except Exception as error:  # any internal error defers
            self._internal_errors += 1
            log.exception("robots.txt of %s: unexpected %s", origin, type(error).__name__)
            record = self._record_internal_error(origin)
        finally:
            # Also on cancellation: no waiter may be left waiting.
            self._flights.pop(origin, None)
            flight.task = None  # the task's context refers to the flight: break the cycle
            flight.answer(record)

    def _record_internal_error(self, origin: str) -> Record:
        try:
            return self._updates.apply(
                origin, Retrieval(outcome=Outcome.INTERNAL), began=self._clock.monotonic()
            )
        except Exception:
            log.exception("robots.txt of %s: the failure could not be recorded", origin)
            return self._updates.temporary(origin, Outcome.INTERNAL, _RETRY_SECONDS)

    async def _fetch_record(self, origin: str, flight: Flight) -> Record:
        record = self._cache.get(origin)
        if record is None and self._storage is not None:
            record = await self._load(origin, self._storage)
        now = self._clock.monotonic()
        if record is not None:
            if now < record.fresh_until and not flight.force:
                return record
            if record.usable(now) and not flight.force:
                flight.answer(record)  # the fetch goes on in the background
        flight.asked = True
        if not self._faults.may_ask(origin, now):
            return self._updates.postponed(origin)
        self._fetches += 1
        if record is not None:
            precedence.set(ANSWERED if record.reachable else FAILED)
        retrieval = await self._fetcher.fetch(origin, self._validators(record, origin))
        return await self._record_retrieval(origin, retrieval, now)

    async def _record_retrieval(self, origin: str, retrieval: Retrieval, now: float) -> Record:
        """Count a retrieval that began at `now`, and make its record."""
        self._counts[retrieval.outcome.row.name] += 1
        self._on_retrieval(origin, retrieval, self._clock.monotonic() - now)
        log.debug("robots.txt of %s: %s %s", origin, retrieval.outcome.row.name, retrieval.detail)
        ours = retrieval.outcome in (Outcome.OURS, Outcome.NO_DESCRIPTORS)
        if ours and self._open and now >= self._log_shortage_at:
            self._log_shortage_at = now + _LOG_SECONDS
            log.error("robots.txt of %s can't be fetched: %s", origin, retrieval.detail)
        body = retrieval.body
        text = None if body is None or len(body) < LARGE else await self._parse_in_thread(body)
        return self._updates.apply(origin, retrieval, began=now, text=text)

    async def _parse_in_thread(self, body: bytes) -> FileText:
        """Read and parse a large text in a thread, so that it delays no other answer."""
        texts = self._cache.texts
        async with self._parsing:
            if (known := texts.find(body)) is not None:
                return known
            text = await asyncio.to_thread(texts.read, body)
        if self._agent:
            await self._prepare(text, self._agent)
        return text

    @staticmethod
    def is_prepared(record: Record, agent: str) -> bool:
        """Return True if a decision by the record is quick: its text is not large, or was
        `prepare`d for the agent."""
        text = record.text
        return text is None or text.size < LARGE or text.policy_for(agent) is not None

    async def prepare(self, record: Record, agent: str) -> None:
        """Make the policy of a large text for an agent in a thread, once for concurrent calls."""
        text = record.text
        if text is None or self.is_prepared(record, agent):
            return
        key = text.key, agent
        task = self._preparing.find(key) or self._preparing.start(self._prepare(text, agent), key)
        await asyncio.shield(task)  # a cancelled caller must not cancel it for the others

    async def _prepare(self, text: FileText, agent: str) -> None:
        def read() -> tuple[RobotsTxt, Policy]:
            robots = text.robots
            return robots, self._policy_of(robots, agent)

        async with self._parsing:
            robots, policy = await asyncio.to_thread(read)
        self._cache.texts.wake(text, robots)
        text.add_policy(policy, self._config.cache.max_agents)

    def _policy_of(self, robots: RobotsTxt, agent: str) -> Policy:
        """Return the text's policy for an agent, with the work of a first question done."""
        policy = self._choose(robots, agent)
        if not policy.timed:
            policy.allows("/", "")
        return policy

    async def _load(self, origin: str, storage: Storage) -> Record | None:
        try:
            stored = await storage.load_origin(origin)
        except StorageError as error:
            self._updates.storage_errors += 1
            log.warning("the stored record of %s can't be read: %s", origin, error)
            return None
        if stored is None:
            return None
        body = b""
        if stored.body is not None and len(stored.body) >= LARGE // _MAX_COMPRESSION:
            with suppress(zlib.error, ValueError):  # `restore` logs what is wrong
                body = unpack_body(stored.body)
        text = await self._parse_in_thread(body) if len(body) >= LARGE else None
        return self._updates.restore(stored, text)

    def _validators(self, record: Record | None, origin: str) -> Validators | None:
        if record is None or record.good is None or not self._config.fetch.conditional:
            return None
        good = record.good
        if good.etag is None and good.last_modified is None:
            return None
        if good.status is not None and not 200 <= good.status <= 299:
            # Validators of an error page say nothing about a file that may exist by now.
            return None
        url = good.hops[-1] if good.hops else f"{origin}/robots.txt"
        return Validators(
            url=url, etag=good.etag, last_modified=good.last_modified, metadata=good.metadata
        )

    # -- probes during a suspected fault of our own network

    def plan_probes(self) -> None:
        """Set the timer to the moment of the next probe according to `faults`, if any."""
        now = self._clock.monotonic()
        pause = self._faults.pause(now)
        self._next_probe.set(math.inf if pause is None or not self._open else now + pause)

    def _send_probes(self) -> None:
        """Fetch some robots.txt files to find out whether our network works.

        Nothing waits for a probe: one without an answer must not delay the next one.
        """
        now = self._clock.monotonic()
        for origin in self._faults.next_probes(now):
            if self._probes.find(origin) is not None:
                continue
            if origin in self._flights:
                # The flight reports its outcome by itself.
                self._faults.probe_inconclusive(origin, now)
                continue
            self._probes.start(self._probe(origin), origin)
        self.plan_probes()

    async def _probe(self, origin: str) -> None:
        """Fetch one robots.txt under a lease of its host, with the short deadlines of a probe.

        The host may be held by requests that were in flight when the uplink was lost and will
        not end for long. A connection is not a request: if the lease does not come, only a
        connection is tried. A failure is not recorded against the origin.
        """
        precedence.set(ANSWERED)
        clock, record = self._clock, self._cache.get(origin)
        began = clock.monotonic()
        try:
            try:
                async with deadline(clock, _PROBE_LEASE_SECONDS) as limit:
                    extend = partial(limit.move, PROBE_SECONDS + 1.0)
                    probe_limits.set(ProbeLimits(PROBE_SECONDS, extend))
                    validators = self._validators(record, origin)
                    retrieval = await self._fetcher.fetch(origin, validators)
            except TimeoutError:
                await self._probe_connection(origin, began)
                return
        except Exception as error:
            self._internal_errors += 1
            log.exception("probe of %s: unexpected %s", origin, type(error).__name__)
            self._faults.probe_inconclusive(origin, clock.monotonic())
            return
        self._fetches += 1
        if answered(retrieval):
            await self._record_retrieval(origin, retrieval, began)
        elif retrieval.outcome.row.local or retrieval.outcome is Outcome.TIMEOUT:
            self._faults.failed(origin, began=began, now=clock.monotonic())
        else:
            self._faults.probe_inconclusive(origin, clock.monotonic())

    async def _probe_connection(self, origin: str, began: float) -> None:
        """Test whether the origin accepts a connection, as its lease did not come."""
        reached = await self._fetcher.reach(origin)
        now = self._clock.monotonic()
        if reached:
            self._faults.answered(origin, now)
        elif reached is False:
            self._faults.failed(origin, began=began, now=now)
        else:
            self._faults.probe_inconclusive(origin, now)
