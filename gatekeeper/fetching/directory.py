"""`Directory`: one record per origin, asked once however many want to know.

Each origin that has to be asked about has one *flight*: a task that the directory owns and
futures, one for each who awaits it. So a cancelled caller cancels nobody, a slow origin holds up
only those who asked about it, and closing leaves no task behind. Between awaits nothing is
held: every check and the update that follows it stand in one step of the loop.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import zlib
from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Final

import msgspec

from gatekeeper.clock import Clock, SingleTimer, deadline
from gatekeeper.config import Config
from gatekeeper.errors import GateClosed, StorageError
from gatekeeper.fetching.cache import RecordCache, RecordUpdates, SoftExpiry, answered
from gatekeeper.fetching.faults import PATIENCE, LocalFaults
from gatekeeper.fetching.outcomes import (
    ANSWERED,
    FAILED,
    Hurry,
    Outcome,
    Retrieval,
    RobotsSource,
    Validators,
    hurried,
    precedence,
)
from gatekeeper.fetching.records import LARGE, FileText, FileTexts, Record
from gatekeeper.robots import Policy, RobotsTxt
from gatekeeper.split_dict import SplitDict
from gatekeeper.storage.base import Storage, unpack_body

HeldUp = Callable[[], tuple[Outcome, float] | None]
"""What keeps a flight from its turn for long, and for how many seconds; None: nothing now."""


class Flight(msgspec.Struct, eq=False):
    """One origin being asked about, and everybody who waits for it."""

    origin: str
    force: bool
    task: asyncio.Task[None] | None = None
    waiters: dict[asyncio.Future[Record | None], None] = {}
    """Each has a future of its own, so that a cancelled one cancels nobody. It gets the
    record, or None when the directory closes; never an exception."""
    asked: bool = False
    """It came to asking the origin (or would have, but for a local fault), and not only
    to looking it up in the storage."""
    held_up: HeldUp | None = None
    """Set while it waits for a turn that may be far off."""

    def answer(self, record: Record | None) -> None:
        """Wake everybody who waits; who comes from now on gets what is learnt after it."""
        waiters, self.waiters = self.waiters, {}
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(record)


flying: ContextVar[Flight | None] = ContextVar("gatekeeper_flying", default=None)
"""The flight that this task belongs to."""


log: Final = logging.getLogger("gatekeeper.fetching")

OnChange = Callable[[str, RobotsTxt | None, RobotsTxt | None], object]
"""Called with the origin, the old text and the new one; None where there is no file."""
OnRetrieval = Callable[[str, Retrieval, float], object]

_PACKS: Final = 1_000
"""How many times smaller than its text a packed body may be."""
_TURN: Final = 0.5
"""Seconds that a probe waits for the turn of its host before it only connects."""
_RENEWED: Final = 1_000
"""Flights under way beyond which none is begun for a file that others have renewed."""
_SOON: Final = 1.0
"""Seconds after which to ask again where nothing could be recorded."""


class DirectoryStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since the start, and the state of things now."""

    records: int
    """Origins in memory; `hot` of them ready to answer, `warm` of them by a look."""
    hot: int
    warm: int
    texts: int
    """Distinct texts among the hot ones."""
    bytes: int
    """Estimate of what they cost."""
    in_flight: int
    waiting: int
    """Questions that wait for a flight."""
    fetches: int
    outcomes: dict[str, int]
    """Retrievals by row name."""
    revalidated: int
    internal_errors: int
    overloaded: int
    evicted: int
    storage_errors: int
    local_fault: bool
    local_faults: int


class Directory:
    """What is known of every origin's robots.txt.

    `records` is a dictionary of those that are ready to answer. Whoever wants speed looks there
    first, for what is `Record.warm`, and calls `get` for the rest.
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
        """`on_learnt` is called with each record that a retrieval came to, `on_retrieval` after
        each one with the origin, what it came to, and its seconds with the wait for turns. They
        must be short and must not raise. `faults` hears from others, too, who answers, and has
        `plan_probes` called when in doubt; None: it is the directory's own. `records` and `texts`
        may be the caller's, and empty. `choose` gives a text as it reads for an agent, called in a
        thread; `agent` is the one that most questions are for."""
        self._fetcher = fetcher
        self._config = config
        self._clock = clock
        self._storage = storage
        self._faults = faults or LocalFaults(rng, on_doubt=self.plan_probes)
        self.records: SplitDict[str, Record] = SplitDict() if records is None else records
        self._soft_expiry = SoftExpiry(self.records, clock)
        self._cache = RecordCache(
            config,
            stored=storage is not None,
            expiry=self._soft_expiry,
            texts=texts,
            uptime=self._faults.uptime,
        )
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
        self._probes: dict[str, asyncio.Task[None]] = {}
        self._next_probe = SingleTimer(clock, self._send_probes)
        self._choose, self._agent = choose, agent
        self._choosing: dict[tuple[int, str], asyncio.Task[None]] = {}
        self._aside = asyncio.Semaphore(1)
        """One large text at a time: every thread that works takes from the loop's."""
        self._waiting = 0
        self._counts: Counter[str] = Counter()
        self._fetches = self._internal = self._overloaded = self._storage_errors = 0
        self._open = False
        self._on_retrieval = on_retrieval

    async def open(self) -> None:
        """Begin to answer, in this loop. The storage, if any, is opened by its owner."""
        self._loop = asyncio.get_running_loop()  # kept: to ask for it is a system call
        self._open = True

    async def close(self) -> None:
        """End every flight; those who wait get GateClosed. Idempotent."""
        self._open = False
        self._soft_expiry.close()
        tasks = [flight.task for flight in self._flights.values() if flight.task is not None]
        tasks.extend((*self._probes.values(), *self._choosing.values()))
        self._faults.close()
        self._next_probe.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # Those whose task had not begun: cancelled before its first step, it does nothing.
        flights, self._flights = self._flights, {}
        for flight in flights.values():
            flight.answer(None)

    @property
    def local_fault(self) -> bool:
        """Our own uplink seems to be down: nothing is recorded against any origin."""
        return self._faults.active

    @property
    def ready(self) -> bool:
        """Open, and with a network."""
        return self._open and not self._faults.active

    async def get(self, origin: str) -> Record:
        """The record, asked for if need be.

        Answers at once within the soft life; beyond it too, while the origin is asked in
        the background; beyond the hard one it waits. Never fails because of the origin:
        what can't be had reads as DEFER. Raises GateClosed.
        """
        record = self.at_hand(origin)
        return await self.meet(origin) if record is None else record

    async def meet(self, origin: str) -> Record:
        """The record as the origin is asked for it, or is being asked: what `get` gives where
        nothing is `at_hand`. Raises GateClosed."""
        return (await self._wait_for(origin, force=False))[0]

    def at_hand(self, origin: str) -> Record | None:
        """The record, if `get` gives one without waiting; it is asked for anew beyond its soft
        life."""
        record = self._cache.get(origin)
        if record is not None:
            now = self._clock.monotonic()
            if now < record.fresh_until:
                return record
            if record.usable(now):
                if self._open:
                    self._launch(origin)
                return record
        return None

    def peek(self, origin: str) -> Record | None:
        """What is in memory and may still answer; never waits, asks or loads."""
        record = self._cache.get(origin)
        if record is None or not record.usable(self._clock.monotonic()):
            return None
        return record

    def recall(self, origin: str) -> Record | None:
        """What is in memory of the origin, however old."""
        return self._cache.get(origin)

    async def refresh(self, origin: str) -> Record:
        """Ask the origin now, whatever is known. Raises GateClosed."""
        while True:
            record, asked = await self._wait_for(origin, force=True)
            if asked:
                return record

    def renew(self, origin: str) -> None:
        """Have the file fetched again in the background, if there is a record of it: there is a
        newer one than ours. With many under way it waits until it expires."""
        if self._open and len(self._flights) < _RENEWED and self._cache.get(origin) is not None:
            self._launch(origin, force=True)

    def void_refusals(self) -> None:
        """The guard has other settings: what it refused to fetch may be asked for again."""
        self._cache.void_refusals()

    def note_page(self, origin: str, ok: bool) -> None:
        """A page of the origin was fetched; `ok` is 2xx or 3xx: for the 30 days of RFC 9309
        section 2.3.1.4 (RFC-38)."""
        record = self.records.get(origin)
        if ok and (record is None or not record.warm):
            self._updates.note_page(origin)

    def subscribe(self, callback: OnChange) -> Callable[[], None]:
        """Be told when an origin's rules change; call the result to be told no more.

        Not called when an origin is asked for the first time.
        """
        return self._updates.subscribe(callback)

    def known(self, origin: str) -> Retrieval | None:
        """What is fresh about an origin, as if it had just been asked; else None."""
        return self._updates.known(origin)

    def holder(self) -> Callable[[HeldUp | None], None]:
        """For who takes a flight's turns, called from within it: tell it why it has to wait.

        Nobody waits with it as long as that holds: a block or a pause may last for days, and
        DEFER always has a `retry_at` (promise 1). The flight itself goes on. None: it may go.
        """
        return partial(self._hold_up, flying.get())

    def _hold_up(self, flight: Flight | None, held_up: HeldUp | None) -> None:
        if flight is not None:
            flight.held_up = held_up
            if (record := self._meanwhile(flight)) is not None:
                flight.answer(record)

    def _meanwhile(self, flight: Flight) -> Record | None:
        """What to answer while a flight is held up; None where it is not."""
        found = None if flight.held_up is None else flight.held_up()
        return None if found is None else self._updates.passing(flight.origin, *found)

    def stats(self) -> DirectoryStats:
        """Counters and sizes."""
        return DirectoryStats(
            records=len(self._cache),
            hot=self._cache.hot,
            warm=self._soft_expiry.warm,
            texts=len(self._cache.texts),
            bytes=self._cache.bytes,
            in_flight=len(self._flights),
            waiting=self._waiting,
            fetches=self._fetches,
            outcomes=dict(self._counts),
            revalidated=self._counts[Outcome.NOT_MODIFIED.row.name],
            internal_errors=self._internal,
            overloaded=self._overloaded,
            evicted=self._cache.evicted,
            storage_errors=self._storage_errors + self._updates.storage_errors,
            local_fault=self._faults.active,
            local_faults=self._faults.count,
        )

    async def _wait_for(self, origin: str, *, force: bool) -> tuple[Record, bool]:
        """The record that the flight brings, and whether it came to asking the origin."""
        if not self._open:
            raise GateClosed("the directory is not open: use `async with Gatekeeper(...)`")
        flight = self._flights.get(origin)
        if self._waiting >= self._config.cache.max_waiters or (
            flight is None and len(self._flights) >= self._config.cache.max_waiters
        ):
            self._overloaded += 1
            return self._updates.passing(origin, Outcome.OVERLOADED, _SOON), True
        if flight is None:
            flight = self._launch(origin, force=force)
        elif force:
            flight.force = True
        if (meanwhile := self._meanwhile(flight)) is not None:
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

    def _launch(self, origin: str, *, force: bool = False) -> Flight:
        """The flight of the origin, begun now if there is none: no await in between."""
        flight = self._flights.get(origin)
        if flight is None:
            flight = self._flights[origin] = Flight(origin, force=force)
            flight.task = self._loop.create_task(self._fly(origin, flight))
        return flight

    async def _fly(self, origin: str, flight: Flight) -> None:
        flying.set(flight)
        record: Record | None = None
        try:
            record = await self._learn(origin, flight)
        except Exception as error:  # whatever it was, it defers
            self._internal += 1
            log.exception("robots.txt of %s: unexpected %s", origin, type(error).__name__)
            record = self._after_surprise(origin)
        finally:
            # Also on cancellation: no waiter may be left behind.
            self._flights.pop(origin, None)
            flight.task = None  # whose context holds the flight: else only the collector frees both
            flight.answer(record)

    def _after_surprise(self, origin: str) -> Record:
        try:
            return self._updates.apply(
                origin, Retrieval(outcome=Outcome.INTERNAL), began=self._clock.monotonic()
            )
        except Exception:
            log.exception("robots.txt of %s: the failure could not be recorded", origin)
            return self._updates.passing(origin, Outcome.INTERNAL, _SOON)

    async def _learn(self, origin: str, flight: Flight) -> Record:
        record = self._cache.get(origin)
        if record is None and self._storage is not None:
            record = await self._load(origin, self._storage)
        now = self._clock.monotonic()
        if record is not None:
            if now < record.fresh_until and not flight.force:
                return record
            if record.usable(now) and not flight.force:
                flight.answer(record)  # the rest of this flight is in the background
        flight.asked = True
        if not self._faults.may_ask(origin, now):
            return self._updates.postponed(origin)
        self._fetches += 1
        if record is not None:
            precedence.set(ANSWERED if record.reachable else FAILED)
        retrieval = await self._fetcher.fetch(origin, self._validators(record, origin))
        return await self._take_in(origin, retrieval, now)

    async def _take_in(self, origin: str, retrieval: Retrieval, now: float) -> Record:
        """Make a record of a retrieval that began at `now`."""
        self._counts[retrieval.outcome.row.name] += 1
        self._on_retrieval(origin, retrieval, self._clock.monotonic() - now)
        log.debug("robots.txt of %s: %s %s", origin, retrieval.outcome.row.name, retrieval.detail)
        body = retrieval.body
        text = None if body is None or len(body) < LARGE else await self._read_ahead(body)
        return self._updates.apply(origin, retrieval, began=now, text=text)

    async def _read_ahead(self, body: bytes) -> FileText:
        """Parse a large text in a thread, so that it holds up nobody else's answer."""
        texts = self._cache.texts
        if (known := texts.find(body)) is not None:
            return known

        def read() -> FileText:
            text = texts.read(body)
            if self._agent:
                text.keep_policy(self._chosen(text.robots, self._agent), 1)
            return text

        async with self._aside:
            known = texts.find(body)
            return await asyncio.to_thread(read) if known is None else known

    @staticmethod
    def is_prepared(record: Record, agent: str) -> bool:
        """A decision about the record for the agent holds nobody up: its text is no large one, or
        was `prepare`d."""
        text = record.text
        return text is None or text.size < LARGE or text.policy_for(agent) is not None

    async def prepare(self, record: Record, agent: str) -> None:
        """Choose from a large text for the agent in a thread; once for however many ask."""
        text = record.text
        if text is None or self.is_prepared(record, agent):
            return
        key = text.key, agent
        task = self._choosing.get(key)
        if task is None:
            task = self._choosing[key] = self._loop.create_task(self._prepare(text, agent))
        await asyncio.shield(task)  # who is cancelled cancels nobody else's

    async def _prepare(self, text: FileText, agent: str) -> None:
        def read() -> tuple[RobotsTxt, Policy]:
            robots = text.robots
            return robots, self._chosen(robots, agent)

        try:
            async with self._aside:
                robots, policy = await asyncio.to_thread(read)
        finally:
            del self._choosing[text.key, agent]
        self._cache.texts.wake(text, robots)
        text.keep_policy(policy, self._config.cache.max_agents)

    def _chosen(self, robots: RobotsTxt, agent: str) -> Policy:
        """The text as it reads for the agent, with all that a first question takes done: from here
        on the text itself is needed but to explain."""
        policy = self._choose(robots, agent)
        if not policy.timed:
            policy.allows("/", "")
        robots.pack()
        return policy

    async def _load(self, origin: str, storage: Storage) -> Record | None:
        try:
            stored = await storage.load_origin(origin)
        except StorageError as error:
            self._storage_errors += 1
            log.warning("the stored record of %s can't be read: %s", origin, error)
            return None
        if stored is None:
            return None
        if stored.body is None or len(stored.body) < LARGE // _PACKS:
            return self._updates.restore(stored)
        try:
            body = unpack_body(stored.body)
        except (zlib.error, ValueError):
            return self._updates.restore(stored)  # which says what is wrong
        text = await self._read_ahead(body) if len(body) >= LARGE else None
        return self._updates.restore(stored, text)

    def _validators(self, record: Record | None, origin: str) -> Validators | None:
        if record is None or record.good is None or not self._config.fetch.conditional:
            return None
        good = record.good
        if good.etag is None and good.last_modified is None:
            return None
        url = good.hops[-1] if good.hops else f"{origin}/robots.txt"
        return Validators(url=url, etag=good.etag, last_modified=good.last_modified)

    # -- is it us?

    def plan_probes(self) -> None:
        """Probe somebody at the moment that `faults` name, if they name one."""
        now = self._clock.monotonic()
        pause = self._faults.pause(now)
        self._next_probe.set(math.inf if pause is None or not self._open else now + pause)

    def _send_probes(self) -> None:
        """Ask some for their robots.txt to find out whether we can reach anybody.

        Nobody waits for a probe: one that gets no answer must not put off the next one.
        """
        now = self._clock.monotonic()
        for origin in self._faults.to_ask(now):
            if origin in self._probes:
                continue
            if origin in self._flights:
                self._faults.given_up(origin, now)  # what comes of that is heard of anyway
                continue
            task = self._probes[origin] = self._loop.create_task(self._probe(origin))
            task.add_done_callback(partial(self._probed, origin))
        self.plan_probes()

    def _probed(self, origin: str, _task: asyncio.Task[None]) -> None:
        del self._probes[origin]

    async def _probe(self, origin: str) -> None:
        """Ask one, in its host's turn like any request, and wait no longer than a probe may.

        The turn may be held by requests that were under way when the uplink was lost, and of
        which nothing will be heard for long. A connection is no request: one is tried then.
        Of a failure nothing is recorded: it was our own curiosity, and in a hurry.
        """
        precedence.set(ANSWERED)
        clock, record = self._clock, self._cache.get(origin)
        began = clock.monotonic()
        try:
            try:
                async with deadline(clock, _TURN) as limit:
                    hurried.set(Hurry(PATIENCE, partial(limit.move, PATIENCE + _SOON)))
                    validators = self._validators(record, origin)
                    retrieval = await self._fetcher.fetch(origin, validators)
            except TimeoutError:
                await self._probe_connection(origin, began)
                return
        except Exception as error:
            self._internal += 1
            log.exception("probe of %s: unexpected %s", origin, type(error).__name__)
            self._faults.given_up(origin, clock.monotonic())
            return
        self._fetches += 1
        if answered(retrieval):
            await self._take_in(origin, retrieval, began)
        elif retrieval.outcome.row.local or retrieval.outcome is Outcome.TIMEOUT:
            self._faults.failed(origin, began=began, now=clock.monotonic())
        else:
            self._faults.given_up(origin, clock.monotonic())

    async def _probe_connection(self, origin: str, began: float) -> None:
        """Its turn did not come: find out whether a connection to it does."""
        reached = await self._fetcher.reach(origin)
        now = self._clock.monotonic()
        if reached:
            self._faults.answered(origin, now)
        elif reached is False:
            self._faults.failed(origin, began=began, now=now)
        else:
            self._faults.given_up(origin, now)
