"""The shell round the books: lifecycle, the one timer, counters."""

from __future__ import annotations

import asyncio
import random

import msgspec

from gatekeeper.clock import Clock, Timer, deadline, utc
from gatekeeper.config import Config
from gatekeeper.errors import GateClosed, LeaseTimeout
from gatekeeper.pacing.books import Books
from gatekeeper.pacing.ledger import INF, Ledger, MemoryLedger
from gatekeeper.pacing.memory import Memory
from gatekeeper.pacing.promises import Promises
from gatekeeper.pacing.remote import RemoteLedger
from gatekeeper.pacing.rules import Rules
from gatekeeper.pacing.tasks import Deadlines, TaskWaiter
from gatekeeper.storage.base import Storage

__all__ = ["PacingStats", "Shell"]

HOUSEKEEPING = 30.0
"""Seconds between two looks at the wall clock, where promises are kept."""


_AT_ONCE = 1000
"""Waiters told in one turn of the loop that their time is over."""


class PacingStats(msgspec.Struct, frozen=True):
    """What a scheduler holds now, and what it did since its start."""

    scopes: int
    waiting: int
    in_flight: int
    granted: int
    robots: int
    refused: int
    refetches: int
    cancelled: int
    timeouts: int
    expired: int
    given_back: int
    passed_on: int
    blocks: int
    promises: int
    evicted: int
    spilled: int
    ledger_failures: int
    dry_waits: int
    """Dry run: leases that would have waited ..."""
    dry_seconds: float
    """... and for how long, in all."""
    frozen: bool


class Shell:
    """Opens and closes the books, and wakes them when something is due."""

    def __init__(
        self,
        config: Config,
        *,
        clock: Clock,
        rng: random.Random,
        storage: Storage | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        self._clock = clock
        self._rules = Rules(config)
        self._pacing = config.pacing
        book = ledger if isinstance(ledger, MemoryLedger) else MemoryLedger(clock, self._rules)
        book.rules = self._rules
        self._books = Books(clock, self._rules, book, rng, rearm=self._rearm)
        self._turns = self._books.turns
        self._promises = Promises(storage, clock, self._books) if storage is not None else None
        self._memory = Memory(self._books, self._promises, storage)
        self._remote: RemoteLedger | None = None
        if ledger is not None and book is not ledger:
            self._remote = self._turns.remote = RemoteLedger(ledger, clock, self._books)
        self._turns.halted = True
        self._books.survey()
        self.take = self._books.take
        """`take(url, host, wish, now=None)`: the turn, if it can be had at once; see `Books`."""
        self._deadlines = Deadlines()
        self._timer: Timer | None = None
        self._open = False
        self._drained: asyncio.Event | None = None
        self._dry_waits = 0
        self._dry_seconds = 0.0

    # --- lifecycle ----------------------------------------------------------------------

    async def open(self) -> None:
        """Read the promises of earlier runs; turns are granted from now on."""
        if self._promises is not None:
            self._memory.left = await self._promises.load()
            self._books.keeper = self._promises
        self._books.away = self._memory
        self._open = True
        self._turns.halted = False
        self._books.survey()
        self._turns.armed = INF
        self._arm_housekeeping()

    async def close(self, drain: float = 0.0) -> None:
        """Grant nothing more, wait up to `drain` seconds for open leases, keep the clocks.

        Whoever waits gets GateClosed. Idempotent. Raises StorageError where the clocks can't
        be kept; it is closed all the same.
        """
        if not self._open:
            return
        self._open = False
        self._turns.halted = True
        self._books.survey()
        self._turns.refuse_all(GateClosed("the gate is closing"))
        try:
            if drain > 0 and self._books.in_flight:
                await self._drain(drain)
        finally:
            if self._remote is not None:
                await self._remote.close()
            try:
                if self._promises is not None:
                    await self._promises.close()
            finally:
                self._books.keeper = self._books.away = None
                self._books.survey()
                self._cancel_timer()
                self._turns.armed = -INF

    async def _drain(self, seconds: float) -> None:
        self._drained = asyncio.Event()
        self._books.on_idle = self._drained.set
        try:
            async with deadline(self._clock, seconds):
                await self._drained.wait()
        except TimeoutError:
            pass
        finally:
            self._books.on_idle = None

    def stats(self) -> PacingStats:
        """Counters and sizes."""
        books = self._books
        return PacingStats(
            **vars(books.counters),
            granted=books.granted,
            scopes=len(books.scopes),
            waiting=self._turns.waiting,
            in_flight=books.in_flight,
            promises=self._promises.made if self._promises is not None else 0,
            evicted=self._memory.evicted,
            spilled=self._memory.spilled,
            ledger_failures=self._remote.failures if self._remote is not None else 0,
            dry_waits=self._dry_waits,
            dry_seconds=self._dry_seconds,
            frozen=books.frozen,
        )

    def _late(self, waiter: TaskWaiter) -> LeaseTimeout:
        """What is raised where its time was over, or can't be enough; it is counted."""
        self._books.counters.timeouts += 1
        now = self._clock.monotonic()
        due = waiter.scope.clock_at()
        known = now < due
        return LeaseTimeout(
            waiter.url,
            f"{waiter.url}: no turn of {waiter.scope.name} in time"
            + (f"; the next is due in {due - now:.1f} s" if known else ""),
            retry_at=utc(self._clock.wall() + due - now) if known else None,
        )

    # --- the one timer ------------------------------------------------------------------

    def _rearm(self, when: float) -> None:
        self._cancel_timer()
        self._timer = self._clock.call_at(when, self._fire)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fire(self) -> None:
        self._timer = None
        turns, books = self._turns, self._books
        turns.armed = -INF  # one timer is set below, not one for each line that moves
        try:
            now = self._clock.monotonic()
            books.expire(now)
            for waiter in self._deadlines.over(now, _AT_ONCE):
                if not waiter.away:  # those who fetch have a deadline of their own
                    turns.leave(waiter.scope, waiter, now)
                    waiter.refuse(self._late(waiter))
            turns.run(now)
            if self._promises is not None:
                self._promises.check_wall(now)
        finally:
            turns.armed = INF
            turns.arm(min(turns.next_due(), books.leases.next(), self._deadlines.next()))
            self._arm_housekeeping()

    def _arm_housekeeping(self) -> None:
        if self._promises is not None and self._open:
            self._turns.arm(self._clock.monotonic() + HOUSEKEEPING)
