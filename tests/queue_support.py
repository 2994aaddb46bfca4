"""A gate whose answers the test decides, over a real scheduler; and workers of a queue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gatekeeper import urls
from gatekeeper.clock import VirtualClock, utc
from gatekeeper.decision import Decision, Reason, Verdict
from gatekeeper.errors import Deferred, Denied
from gatekeeper.pacing.grants import Grant
from gatekeeper.pacing.scheduler import Scheduler
from gatekeeper.queue.polite import PoliteQueue
from gatekeeper.robots.timing import RobotsInterval

ALLOW, DENY, DEFER = Verdict.ALLOW, Verdict.DENY, Verdict.DEFER


class FakeLease:
    """Just enough of a lease."""

    def __init__(self, grant: Grant, clock: VirtualClock) -> None:
        self.grant = grant
        self.expires_at = utc(clock.wall() + grant.expires_at - clock.monotonic())

    def enter(self) -> None:
        pass

    def leave(self) -> None:
        self.grant.release()

    def give_back(self) -> None:
        self.grant.give_back()


class FakeGate:
    """Just enough of a gate: `said` holds the answers, `cold` the unknown origins."""

    def __init__(self, scheduler: Scheduler, clock: VirtualClock) -> None:
        self.scheduler = scheduler
        self.clock = clock
        self.held = scheduler.held
        self.said: dict[str, Verdict] = {}
        self.retry_at: float = 0.0
        self.cold: dict[str, float] = {}
        """Seconds that asking for the robots.txt of an origin takes."""
        self.interval = 1.0
        self.glances = False
        """Can leases be had at a glance?"""
        self.asking = self.most_asking = 0

    def peek(self, url: str, *, user_agent: str | None = None) -> Decision | None:
        target = urls.parse(url)
        if target.origin in self.cold:
            return None
        verdict = self.said.get(url, self.said.get(target.origin, ALLOW))
        if verdict is DEFER and self.clock.wall() >= self.retry_at:
            verdict = ALLOW
        return Decision(
            verdict=verdict,
            reason=Reason.RULE,
            url=url,
            origin=target.origin,
            user_agent="bot",
            retry_at=utc(self.retry_at) if verdict is DEFER else None,
        )

    async def check(self, url: str, *, user_agent: str | None = None) -> Decision:
        origin = urls.parse(url).origin
        if origin not in self.cold:
            return self.answer(url)
        self.asking += 1
        self.most_asking = max(self.asking, self.most_asking)
        await self.clock.sleep(self.cold[origin])
        self.asking -= 1
        del self.cold[origin]
        return self.answer(url)

    def answer(self, url: str) -> Decision:
        decision = self.peek(url)
        assert decision is not None
        return decision

    def acquire_nowait(self, url: str) -> FakeLease | None:
        if not self.glances or not self.peek(url):
            return None
        wish = RobotsInterval(self.interval, "x")
        grant = self.scheduler.acquire_nowait(url, urls.parse(url).host, wish)
        return None if grant is None else FakeLease(grant, self.clock)

    async def acquire(
        self,
        url: str,
        *,
        priority: int = 0,
        timeout: float | None = None,
        user_agent: str | None = None,
        owned: bool = True,
    ) -> FakeLease:
        decision = await self.check(url)
        if decision.verdict is not ALLOW:
            raise (Denied if decision.verdict is DENY else Deferred)(decision)
        grant = await self.scheduler.acquire(
            url,
            urls.parse(url).host,
            priority=priority,
            timeout=timeout,
            admit=lambda: RobotsInterval(self.interval, "x"),
        )
        return FakeLease(grant, self.clock)

    def when_due(
        self, host: str, callback: Callable[[], object], *, priority: float = 0
    ) -> Callable[[], None]:
        return self.scheduler.when_due(host, callback, priority=priority)


class Crawl:
    """Workers of one queue, and what they got when."""

    def __init__(self, queue: PoliteQueue, clock: VirtualClock) -> None:
        self.queue = queue
        self.clock = clock
        self.got: list[tuple[str, float]] = []
        self.workers: list[asyncio.Task[None]] = []

    def start(self, workers: int = 1, hold: float = 0.0) -> None:
        self.workers += [asyncio.create_task(self._work(hold)) for _ in range(workers)]

    async def _work(self, hold: float) -> None:
        while True:
            turn = await self.queue.get()
            async with turn:
                self.got.append((turn.url, round(self.clock.monotonic() - 1000.0, 6)))
                if hold:
                    await self.clock.sleep(hold)

    @property
    def urls(self) -> list[str]:
        return [url for url, _ in self.got]

    async def stop(self) -> None:
        for worker in self.workers:
            worker.cancel()
        await asyncio.gather(*self.workers, return_exceptions=True)


def page(host: str, name: object) -> str:
    return f"https://{host}.example/{name}"
