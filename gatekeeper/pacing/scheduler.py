"""Whose turn it is, for asyncio: `Scheduler`, a thin shell over the books.

The books (books.py, turns.py) decide and never wait; here are the futures, the one timer,
the storage and the ledger beyond. No host has a task or an asyncio object of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gatekeeper.clock import deadline
from gatekeeper.errors import GateClosed, LeaseTimeout
from gatekeeper.pacing.accounts import DURABLE
from gatekeeper.pacing.control import Controls
from gatekeeper.pacing.explain import ClockView
from gatekeeper.pacing.intervals import LONGEST, NO_RATE, UNKNOWN, Wish
from gatekeeper.pacing.leases import Grant
from gatekeeper.pacing.ledger import INF, Scope
from gatekeeper.pacing.shell import PacingStats
from gatekeeper.pacing.tasks import Admit, Refetch, TaskWaiter, Watch
from gatekeeper.pacing.waiters import REFETCH, ROBOTS, Offer

__all__ = ["REFETCH", "ClockView", "Grant", "PacingStats", "Scheduler", "Wish"]

_MAX_REFETCHES = 5
_EARLIER = "the clock of an earlier run"


class Scheduler(Controls):
    """Grants turns, host by host. One event loop; open it before use, close it after.

    >>> import asyncio, random
    >>> from gatekeeper.clock import VirtualClock
    >>> from gatekeeper.config import Config
    >>> async def main():
    ...     scheduler = Scheduler(Config(), clock=VirtualClock(), rng=random.Random(1))
    ...     await scheduler.open()
    ...     grant = await scheduler.acquire("https://a.example/", "a.example", admit=Wish)
    ...     grant.report(status=200)
    ...     grant.release()
    ...     await scheduler.close()
    ...     return grant.start_at
    >>> asyncio.run(main())
    0.0
    """

    # --- turns --------------------------------------------------------------------------

    async def acquire(
        self,
        url: str,
        host: str,
        *,
        priority: float = 0,
        timeout: float | None = None,
        admit: Admit,
        refetch: Refetch | None = None,
        scopes: tuple[str, ...] = (),
        ttl: float | None = None,
    ) -> Grant:
        """Wait for a turn of `host`, and take it.

        `admit` is called at the moment of the grant, with no await between it and the
        books: it returns the text's Wish, or raises (the turn goes on to the next), or
        returns REFETCH: then `refetch` is awaited, which asks for the robots turn, while
        this waiter keeps its place. It may be called again if the turn can't be had then.

        A higher `priority` goes first, then who came first. `timeout` None waits for ever,
        0 not at all. `scopes` are clocks shared beside those of the configuration, such as
        "address:203.0.113.9". `ttl` is the lease's lifetime in seconds.

        Raises LeaseTimeout, GateClosed, or what `admit` or `refetch` raises.
        """
        books = self._books
        scope = books.scopes.get(host)
        if scope is None or scopes:
            scope = await self._memory.host(host, scopes)
        if self._pacing.dry_run:
            return await self._dry(scope, url, admit, refetch, ttl)
        now = self._clock.monotonic()
        if books.free_now(scope, now):
            # The common case: nobody waits, and the turn can be had at once.
            wish = admit()
            if isinstance(wish, Wish):
                grant = books.try_take(scope, wish, now, url, ttl)
                if grant is not None:
                    return grant
        waiter = TaskWaiter(scope, url, priority, ttl, admit)
        end = INF if timeout is None else now + timeout
        self._stand_in_line(waiter, now, end)
        # From here to the end of the wait there is one frame, and no more: many may wait.
        try:
            for _ in range(_MAX_REFETCHES):
                if waiter.grant is None and waiter.error is None and not waiter.away:
                    waiter.future = asyncio.get_running_loop().create_future()
                    await waiter.future
                if waiter.grant is not None:
                    return waiter.grant
                if waiter.error is not None:
                    raise waiter.error
                await self._go_and_fetch(waiter, end, refetch)
            raise LeaseTimeout(url, f"{url}: robots.txt can't be renewed")
        except BaseException as error:
            self._give_up(waiter, error)
            raise

    async def acquire_robots(
        self,
        url: str,
        host: str,
        *,
        timeout: float | None = None,
        wish: Wish | None = None,
        scopes: tuple[str, ...] = (),
        ttl: float | None = None,
    ) -> Grant:
        """A turn for robots.txt: before every page of the host, and paced like one.

        A page that waits for this fetch holds no turn, so the two can't lock each other
        out. `wish`: the pace the last known text asks for; None: what is in force.
        """
        scope = await self._memory.host(host, scopes)
        self._books.counters.robots += 1

        def admit() -> Offer:
            return _robots_wish(scope, wish)

        if self._pacing.dry_run:
            return await self._dry(scope, url, admit, None, ttl)
        now = self._clock.monotonic()
        if self._books.free_now(scope, now):
            grant = self._books.try_take(scope, _robots_wish(scope, wish), now, url, ttl)
            if grant is not None:
                return grant
        return await self.acquire(url, host, priority=ROBOTS, timeout=timeout, admit=admit, ttl=ttl)

    async def hold(
        self, url: str, host: str, seconds: float, *, scopes: tuple[str, ...] = ()
    ) -> Grant:
        """A lease that an earlier run granted and that is still out, open again for `seconds`.

        Its request may be under way: it holds its slots whatever the clocks and the bounds
        say, and until its head, report or end no other turn of the host is granted. With no
        second left it has ended: its report counts, and nothing else. Raises LeaseTimeout
        where there is no room for the host, and GateClosed.
        """
        scope = await self._memory.host(host, scopes)
        # No await from here on.
        if not self._open:
            raise GateClosed("the scheduler is not open")
        books, now = self._books, self._clock.monotonic()
        undone = tuple(other.basis for other in scope.shared)
        grant = Grant(books, scope, url, now, now + seconds, scope.basis, scope.shared, undone)
        if seconds <= 0:
            grant.open, grant.told = False, True
            return grant
        for one in (scope, *scope.shared):
            one.in_flight += 1
            one.unheaded += 1
        books.granted += 1
        books.leases.add_alone(grant)
        self._turns.arm(grant.expires_at)
        return grant

    def _stand_in_line(self, waiter: TaskWaiter, now: float, end: float) -> None:
        """Join those who wait for the host, until `end`. Raises where it would be in vain."""
        self._admit_waiter(waiter, end)
        turns = self._turns
        turns.join(waiter.scope, waiter, now)
        try:
            turns.run(now)
            if end < INF and waiter.grant is None and waiter.error is None:
                if end <= now:
                    raise self._late(waiter)
                self._deadlines.add(end, waiter, turns.waiting)
                turns.arm(end)
        except BaseException as error:
            self._give_up(waiter, error)
            raise

    def _admit_waiter(self, waiter: TaskWaiter, end: float) -> None:
        """Refuse at once whom waiting can't help."""
        if not self._open:
            raise GateClosed("the scheduler is not open")
        if self._turns.waiting >= self._pacing.max_waiters:
            raise LeaseTimeout(
                waiter.url,
                f"{waiter.url}: {self._turns.waiting} already wait (pacing.max_waiters)",
            )
        if waiter.scope.clock_at() > end:
            raise self._late(waiter)

    async def _go_and_fetch(self, waiter: TaskWaiter, end: float, refetch: Refetch | None) -> None:
        """The turn is robots.txt's; the place in line is kept."""
        if refetch is None:
            raise LeaseTimeout(waiter.url, f"{waiter.url}: its robots.txt expired")
        if end == INF:
            await refetch()
        else:
            try:
                async with deadline(self._clock, end - self._clock.monotonic()):
                    await refetch()
            except TimeoutError as error:
                if isinstance(error, LeaseTimeout):
                    raise
                raise self._late(waiter) from error
        now = self._clock.monotonic()
        self._turns.back(waiter.scope, waiter, now)
        self._turns.run(now)
        if end < INF and not waiter.gone:
            self._deadlines.add(end, waiter, self._turns.waiting)
            self._turns.arm(end)

    def _give_up(self, waiter: TaskWaiter, error: BaseException) -> None:
        """Leave no trace: a turn that was just handed over goes to the next."""
        if isinstance(error, asyncio.CancelledError):
            self._books.counters.cancelled += 1
        if waiter.grant is not None:
            waiter.grant.pass_on()
            return
        now = self._clock.monotonic()
        if self._turns.leave(waiter.scope, waiter, now):
            self._turns.run(now)

    async def _dry(
        self, scope: Scope, url: str, admit: Admit, refetch: Refetch | None, ttl: float | None
    ) -> Grant:
        """Dry run: decide and count, wait for nothing. The clock runs as if it had."""
        if not self._open:
            raise GateClosed("the scheduler is not open")
        wish = admit()
        for _ in range(_MAX_REFETCHES):
            if isinstance(wish, Wish):
                break
            if refetch is None:
                raise LeaseTimeout(url, f"{url}: its robots.txt expired")
            await refetch()
            wish = admit()
        if not isinstance(wish, Wish):
            raise LeaseTimeout(url, f"{url}: robots.txt can't be renewed")
        now = self._clock.monotonic()
        grant, wait = self._books.take_dry(scope, wish, now, url, ttl)
        if wait > 0:
            self._dry_waits += 1
            self._dry_seconds += wait
        return grant

    def when_due(
        self, host: str, callback: Callable[[], object], *, priority: float = 0
    ) -> Callable[[], None]:
        """Call back once, when a turn of `host` could be had; returns what undoes it.

        No turn is taken. The call comes from within the scheduler, perhaps before this
        returns: it must be short and must not raise. Raises LeaseTimeout where there is no
        room for the host (pacing.max_hosts), and StorageError where it can't be brought back.
        """
        self._memory.admit(host)
        scope = self._books.host(host)
        watch = Watch(callback, priority)
        now = self._clock.monotonic()
        if self._books.free_now(scope, now):
            watch.offer()  # nobody stands in line, and none is needed
            return _undone
        self._turns.join(scope, watch, now)
        self._turns.run(now)

        def cancel() -> None:
            now = self._clock.monotonic()
            if self._turns.leave(scope, watch, now):
                self._turns.run(now)

        return cancel


def _robots_wish(scope: Scope, wish: Wish | None) -> Wish:
    """The pace of a robots.txt. Where nothing is known of the text, that of an earlier run's
    clock: its text was read, and not on disk yet when the run was killed."""
    if wish is None or wish is NO_RATE or wish is UNKNOWN:
        if scope.wish.source == _EARLIER:
            return scope.wish
        if scope.interval is None and DURABLE < scope.gap < LONGEST:
            return Wish(scope.gap, _EARLIER)
    return scope.wish if wish is None else wish


def _undone() -> None:
    """There is nothing left to undo."""
