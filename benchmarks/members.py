"""A fleet of up to 1,000 members under virtual time: `python -m benchmarks --only members`.

Every member is a real scheduler. The store is the ledger in memory, which does in Python what the
store's script does. The connections between them are slow and lose calls and replies. A judge that
knows only the sites checks every start.
"""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence

from benchmarks.options import Options
from benchmarks.report import Table, count
from gatekeeper.clock import VirtualClock
from gatekeeper.config import Config, PacingConfig
from gatekeeper.pacing.ledger import (
    End,
    Granted,
    LedgerListener,
    NotBefore,
    Report,
    TakeRequest,
)
from gatekeeper.pacing.scheduler import Scheduler
from gatekeeper.robots.timing import RobotsInterval
from gatekeeper.testing.memory_ledger import MemoryLedger
from gatekeeper.testing.simulation import Account, Judge

__all__ = ["Fleet", "run"]

INTERVAL = 1.0
WISH = RobotsInterval(INTERVAL, "Crawl-delay 1 s")
TRIPS = (0.005, 0.005, 0.01, 0.02)
"""Seconds one way: multiples of 5 ms, so that many events coincide in virtual time."""
ANSWERS = (0.05, 0.3, 1.5)
HOT = 0.05
"""The share of requests that go to one host in a thousand."""


class Wire:
    """One member's view of the store: delayed, and with a share of the calls lost."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.book = fleet.book

    async def _pass(self) -> None:
        fleet = self.fleet
        await fleet.clock.sleep(fleet.rng.choice(TRIPS))
        if fleet.rng.random() < fleet.losing:
            raise ConnectionError("lost")

    def listen(self, owner: str, listener: LedgerListener) -> None:
        """Register a listener for the owner's tokens and for common events."""
        self.book.listen(owner, listener)

    async def take(self, requests: Sequence[TakeRequest]) -> list[Granted | NotBefore]:
        """Grant each request, or say when to ask again."""
        self.fleet.flights += 1
        self.fleet.takes += len(requests)
        await self._pass()
        answers = self.book.take_nowait(requests)
        await self._pass()
        return answers

    async def head(self, tokens: Sequence[str]) -> None:
        """Report that the response heads of these tokens have arrived."""
        await self._pass()
        await self.book.head(tokens)
        await self._pass()

    async def end(self, ends: Sequence[End]) -> None:
        """End the tokens and free their slots."""
        await self._pass()
        await self.book.end(ends)
        await self._pass()

    async def renew(self, tokens: Sequence[str]) -> None:
        """Extend the holds of these tokens."""
        await self._pass()
        await self.book.renew(tokens)
        await self._pass()

    async def block(self, reports: Sequence[Report]) -> None:
        """Take reports into account."""
        await self._pass()
        await self.book.block(reports)
        await self._pass()

    async def pause(self, scopes: Sequence[str]) -> None:
        """Not used here."""

    async def resume(self, scopes: Sequence[str]) -> None:
        """Not used here."""


class Fleet:
    """The members, the hosts, and the judge."""

    def __init__(self, members: int, hosts: int, *, losing: float, seed: int = 1) -> None:
        """`losing` is the share of calls, and of replies, that are lost."""
        self.clock = VirtualClock(start=1000.0)
        self.rng = random.Random(seed)
        self.book = MemoryLedger(self.clock)
        self.losing = losing
        self.hosts = hosts
        self.judge = Judge()
        self.accounts: dict[int, Account] = {}
        self.flights = self.takes = self.leases = 0
        self.late: list[float] = []
        config = Config(pacing=PacingConfig(default_interval=INTERVAL))
        self.members = [
            Scheduler(config, clock=self.clock, rng=random.Random(n), ledger=Wire(self))
            for n in range(members)
        ]

    async def crawl(self, leases: int, workers: int) -> None:
        """Take that many leases, with that many tasks per member."""
        for member in self.members:
            await member.open()
        todo = iter(range(leases))
        tasks = [
            asyncio.create_task(self._work(member, todo))
            for member in self.members
            for _ in range(workers)
        ]
        waiting = asyncio.gather(*tasks)
        while not waiting.done():
            await self.clock.elapse(5.0, turns=8)
        await waiting
        self.losing = 0.0
        closing = asyncio.gather(*(member.close() for member in self.members))
        while not closing.done():
            await self.clock.elapse(1.0, turns=8)
        await closing

    def _host(self, number: int) -> int:
        rng, hot = self.rng, max(1, self.hosts // 1000)
        # Each host is asked once before any is asked again, except the hot ones.
        return rng.randrange(hot) if rng.random() < HOT else number % self.hosts

    async def _work(self, member: Scheduler, todo: Iterator[int]) -> None:
        clock, rng, judge = self.clock, self.rng, self.judge
        for number in todo:
            host = self._host(number)
            asked = clock.monotonic()
            grant = await member.acquire("u", f"h{host}.example", admit=lambda: WISH)
            account = self.accounts.get(host)
            if account is None:
                account = self.accounts[host] = Account(INTERVAL)
            now = clock.monotonic()
            self.late.append(now - max(asked, account.basis + INTERVAL))
            self.leases += 1
            judge.start(account, now)
            await clock.sleep(rng.choice(ANSWERS))
            now = clock.monotonic()
            judge.end(account, now, headed=False)
            if rng.random() < 0.005:
                judge.block(account, now + 30.0)
                grant.report(429, 0.1, 30.0)
            else:
                grant.report(200, 0.1)
            grant.release()


def run(options: Options) -> list[Table]:
    """Measure fleets of growing size, each with and without loss."""
    sizes: list[tuple[int, int, int, float]] = [
        (10, 10_000, 30_000, 0.0),
        (10, 10_000, 30_000, 0.02),
        (100, 50_000, 60_000, 0.02),
    ]
    if not options.quick:
        sizes += [(1000, 1_000_000, 1_100_000, 0.0), (1000, 1_000_000, 1_100_000, 0.02)]
    rows, figures = [], {}
    for members, hosts, leases, losing in sizes:
        fleet = Fleet(members, hosts, losing=losing)
        begun = time.process_time()
        gc.disable()
        asyncio.run(fleet.crawl(leases, workers=20))
        gc.enable()
        spent = time.process_time() - begun
        rows.append(_row(fleet, members, losing, spent))
        figures[f"{members} members, {hosts} hosts, loss {losing}"] = {
            "violations": dict(fleet.judge.violations),
            "takes per lease": fleet.takes / fleet.leases,
            "late p99": _at(fleet.late, 0.99),
        }
        del fleet
        gc.collect()
    return [
        Table(
            "A fleet under virtual time",
            (
                *("members", "hosts", "leases", "lost", "violations", "takes a lease"),
                *("calls a lease", "late p50", "p90", "p99", "processor"),
            ),
            rows,
            "0 violations",
            (
                "20 tasks a member; hosts ask for 1 s and answer in 0.05 to 1.5 s; one request in "
                "20 goes to one host in a thousand, one answer in 200 is a 429. The wire takes 5 "
                "to 20 ms each way. Lost: of the calls, and of the replies.",
                "Calls: flights that ask; in each travels whatever else there is to be told.",
                "Late: from the moment at which the host was free and somebody asked; for the hot "
                "hosts those that queue wait for each other as well.",
            ),
            figures,
        )
    ]


def _row(fleet: Fleet, members: int, losing: float, spent: float) -> tuple[str, ...]:
    found: Counter[str] = fleet.judge.violations
    return (
        f"{members:,}",
        f"{len(fleet.accounts):,}",
        f"{fleet.leases:,}",
        f"{losing:.0%}",
        ", ".join(f"{many} {kind}" for kind, many in found.items()) or "0",
        f"{fleet.takes / fleet.leases:.2f}",
        f"{fleet.flights / fleet.leases:.2f}",
        *(f"{_at(fleet.late, share) * 1e3:.0f} ms" for share in (0.5, 0.9, 0.99)),
        f"{count(fleet.leases / spent)} leases/s",
    )


def _at(values: list[float], share: float) -> float:
    ranked = sorted(values)
    return max(0.0, ranked[min(len(ranked) - 1, int(len(ranked) * share))])
