"""A crawler's queue waits at most `max_wait` in total for requests that are deferred repeatedly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from gatekeeper import PoliteQueue, Reason, SidecarError
from gatekeeper.clock import VirtualClock
from gatekeeper.config import Config
from gatekeeper.integrations.queue_refusals import RefusedLease, queue_gate
from gatekeeper.testing import ScriptedGate, drive
from tests.client.conftest import world
from tests.conformance.ways import AGENT, World, settings
from tests.gate_support import gate_on
from tests.internet import Page

__all__ = ["world"]

MAX_WAIT = 150.0
HOSTS = [f"{letter}{number}.test" for number in range(4) for letter in "ab"]
PAGES = [f"http://{host}/{page}" for host in HOSTS for page in range(3)]


class Taker:
    """A crawler that takes every lease immediately, and records what and when it was."""

    def __init__(self, world: World, gate: Any) -> None:
        self.world = world
        self.gate = gate
        self.queue = PoliteQueue(queue_gate(gate, MAX_WAIT))
        self.sent: dict[str, float] = {}
        self.refused: dict[str, float] = {}
        self.why: dict[str, Any] = {}

    async def take(self, *urls: str) -> float:
        """Take the leases of these URLs and of waiting ones. Return the seconds that it took."""
        began = self.world.clock.monotonic()
        for url in urls:
            self.queue.put_nowait(url)
        await self.world.drive(self._all(began), limit=100_000.0)
        return float(self.world.clock.monotonic()) - began

    async def _all(self, began: float) -> None:
        while not self.queue.empty():
            turn = await self.queue.get()
            now = self.world.clock.monotonic() - began
            if isinstance(turn.lease, RefusedLease):
                self.refused[turn.url], self.why[turn.url] = now, turn.lease.why
            else:
                self.sent[turn.url] = now
                turn.lease.report(status=200)
            turn.done()

    def at(self, seconds: float, work: Callable[[], Awaitable[None]]) -> None:
        """Call an action in a number of seconds from now."""
        clock = self.world.clock

        async def later() -> None:
            await clock.sleep(seconds)
            await work()

        self.world.stack.push_async_callback(asyncio.wait, [asyncio.create_task(later())])


@pytest.fixture
async def taker_on(world: World) -> AsyncIterator[Callable[[Any], Taker]]:
    async with AsyncExitStack() as stack:

        def begin(gate: Any) -> Taker:
            taker = Taker(world, gate)
            stack.push_async_callback(taker.queue.close)
            return taker

        yield begin


@pytest.fixture(params=["embedded", "sidecar"])
async def taker(request: pytest.FixtureRequest, world: World, taker_on: Any) -> Taker:
    """Return a taker with a working gate."""
    if request.param == "sidecar":
        return taker_on(await world.client((await world.sidecar()).where))
    net = world.internet
    gate = gate_on(net, settings(), agent=AGENT, clock=world.clock)
    return taker_on(await world.stack.enter_async_context(gate))


# --- a sidecar that is away ------------------------------------------------------------------


async def test_an_unreachable_sidecar_fails_every_request_after_max_wait(
    world: World, taker_on: Any
) -> None:
    taker = taker_on(await world.client(f"http://{world.internet.refusing('gone.test')}:1"))
    await taker.take(*PAGES)
    assert taker.refused.keys() == {*PAGES}
    assert max(taker.refused.values()) <= MAX_WAIT + 30.0
    assert min(taker.refused.values()) >= MAX_WAIT - 30.0
    assert {why.reason for why in taker.why.values()} == {Reason.GATE_UNREACHABLE}
    # A later request does not wait as long again, since it is the same outage.
    assert await taker.take("http://c.test/", "http://d.test/") < 1.0
    assert {"http://c.test/", "http://d.test/"} <= taker.refused.keys()


@pytest.mark.parametrize("away", [0.7 * MAX_WAIT, 1.5 * MAX_WAIT])
async def test_a_sidecar_that_returns_within_max_wait_loses_no_request(
    world: World, taker_on: Any, away: float
) -> None:
    """If it returns in time twice, each outage counts separately; if too late, only later requests
    are sent."""
    for host in HOSTS:
        world.internet.site(host).robots("")
    sidecar = await world.sidecar()
    taker = taker_on(await world.client(sidecar.where))
    await taker.take(*PAGES[::3])
    assert taker.sent.keys() == {*PAGES[::3]}
    in_time = away < MAX_WAIT
    for pages in (PAGES[1::3], PAGES[2::3]):
        await sidecar.stop()
        taker.at(away, sidecar.start)
        took = await taker.take(*pages)
        if in_time:
            assert took >= away
            assert {*pages} <= taker.sent.keys()
        else:
            assert {*pages} <= taker.refused.keys()
            await world.drive(world.clock.sleep(away))
    await taker.take("http://a0.test/after")
    assert "http://a0.test/after" in taker.sent
    assert bool(taker.refused) is not in_time


@pytest.mark.parametrize("status", [401, 502, 503])
async def test_a_sidecar_that_refuses_every_call_fails_requests_after_max_wait(
    world: World, taker_on: Any, status: int
) -> None:
    """It rejects the token; a proxy in front of it can't reach it; it never has capacity."""
    answer = Page("{}", status=status, headers={"Retry-After": "1"} if status == 503 else {})
    taker = taker_on(await world.client(world.scripted("/v1/leases", answer)))
    queue = taker.queue
    for url in PAGES:
        queue.put_nowait(url)
    began = world.clock.monotonic()
    while not queue.empty():
        try:
            await taker.take()
        except SidecarError:  # which a crawler logs
            assert status == 401
            await world.drive(world.clock.sleep(5.0))
    assert taker.sent == {}
    assert taker.refused.keys() == {*PAGES}
    assert MAX_WAIT - 30.0 <= world.clock.monotonic() - began <= MAX_WAIT + 60.0


# --- an origin that defers -------------------------------------------------------------------


async def test_an_origin_that_defers_beyond_max_wait_is_given_up_alone(
    world: World, taker: Taker
) -> None:
    late = Page("", status=503, headers={"Retry-After": "60"})
    down = world.internet.site("down.test").on("/robots.txt", *[late] * 6, Page(""))
    world.internet.site("up.test").robots("User-agent: *\nCrawl-delay: 20\n")
    mine = [f"http://down.test/{number}" for number in range(4)]
    others = [f"http://up.test/{number}" for number in range(10)]
    await taker.take(*mine, *others)
    assert taker.refused.keys() == {*mine}
    assert max(taker.refused.values()) <= MAX_WAIT + 1.0
    assert min(taker.refused.values()) >= MAX_WAIT - 60.0
    assert taker.sent.keys() == {*others}
    assert max(taker.sent.values()) >= 180.0  # time spent in the host's queue is not limited
    # Later requests ask again, and are sent once the origin responds.
    while len(down.paths) < 7:
        await world.drive(world.clock.sleep(60.0))
        await taker.take(mine[0])
    await taker.take(*mine)
    assert {*mine} <= taker.sent.keys()


async def test_an_origin_that_defers_and_answers_alternately_is_not_given_up(
    world: World, taker: Taker
) -> None:
    late = Page("", status=503, headers={"Retry-After": "100"})
    world.internet.site("a.test").on("/robots.txt", late, Page(""), late, Page(""), late, Page(""))
    for number in range(3):
        assert await taker.take(f"http://a.test/{number}") >= 100.0
        await world.drive(taker.gate.refresh("http://a.test"))
    assert len(taker.sent) == 3


@pytest.mark.parametrize("known", [True, False])
async def test_a_host_that_the_operator_paused_is_waited_for(
    world: World, taker: Taker, known: bool
) -> None:
    world.internet.site("a.test").robots("")
    if known:
        await taker.take("http://a.test/0")
    await taker.gate.pause("a.test")
    taker.at(5 * MAX_WAIT, lambda: taker.gate.resume("a.test"))
    assert await taker.take("http://a.test/1") >= 5 * MAX_WAIT
    assert "http://a.test/1" in taker.sent


async def test_remembered_deferrals_of_many_origins_are_bounded() -> None:
    clock = VirtualClock()
    async with ScriptedGate(clock=clock, config=Config()) as gate:
        shown: Any = queue_gate(gate, MAX_WAIT)
        for number in range(500):
            gate.say(f"http://h{number}.test", TimeoutError())
            await drive(clock, shown.check(f"http://h{number}.test/"))
        assert len(shown._deferring) == 500
        clock.advance(4 * MAX_WAIT)
        await drive(clock, shown.check("http://h0.test/"))
        assert len(shown._deferring) == 1
