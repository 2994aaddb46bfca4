"""The hosts that a crawl waits for, and the times at which they are due."""

from __future__ import annotations

from datetime import datetime
from types import SimpleNamespace
from typing import Any

import pytest

from gatekeeper import urls
from gatekeeper.clock import VirtualClock, utc
from gatekeeper.config import Config, PacingConfig
from gatekeeper.crawl.progress import Holdup, WaitingHosts
from gatekeeper.pacing.waiters import ClockView
from gatekeeper.robots.timing import RobotsInterval
from tests.pacing_support import scheduler_on


class Gate:
    """A gate that returns prepared answers for each host."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.clocks: dict[str, list[Any]] = {}

    def due_in(self, host: str, seconds: float | None, kind: str = "next") -> None:
        until = None if seconds is None else utc(self.clock.wall() + seconds)
        self.clocks.setdefault(host, []).append(
            SimpleNamespace(
                kind=kind,
                until=until,
                since=None,
                source=f"source of {kind}",
                decides=False,
                seconds=None,
            )
        )

    def defer(self, origin: str, until: datetime) -> None:
        """Every URL of the origin is deferred: its robots.txt can't be fetched."""
        view = ClockView(origin, "file", "server_error (503)", until=until)
        self.clocks.setdefault(urls.host_of(origin), []).append(view)

    async def why(self, host: str) -> list[Any]:
        return self.clocks.get(host, [])


def waiting(*given: str) -> WaitingHosts:
    return WaitingHosts(urls.split(url)[0] for url in given)


async def seconds(hosts: WaitingHosts, gate: Gate) -> dict[str, float]:
    return {one.host: one.seconds for one in await hosts.busiest(gate, gate.clock, 10)}


async def test_the_host_that_is_due_first_is_listed_first() -> None:
    gate = Gate(VirtualClock())
    gate.due_in("a.test", 30)
    gate.due_in("b.test", 5)
    hosts = waiting("http://a.test/1", "http://b.test/1", "http://c.test/1")
    due = await hosts.busiest(gate, gate.clock, 10)
    assert [(one.host, one.seconds) for one in due] == [
        ("c.test", 0),
        ("b.test", 5),
        ("a.test", 30),
    ]


async def test_the_latest_clock_of_a_host_counts() -> None:
    gate = Gate(VirtualClock())
    gate.due_in("a.test", 5)
    gate.due_in("a.test", 60, "block")
    gate.due_in("a.test", None, "interval")
    assert await seconds(waiting("http://a.test/1"), gate) == {"a.test": 60}


async def test_a_paused_host_is_never_due() -> None:
    gate = Gate(VirtualClock())
    gate.due_in("a.test", None, "pause")
    assert await seconds(waiting("http://a.test/1"), gate) == {"a.test": float("inf")}


async def test_a_deferred_url_waits_until_it_may_be_asked_about_again() -> None:
    gate = Gate(VirtualClock())
    gate.defer("http://a.test", utc(gate.clock.wall() + 600))
    assert await seconds(waiting("http://a.test/1"), gate) == {"a.test": 600}


async def test_only_the_hosts_that_most_urls_wait_for_are_shown() -> None:
    gate = Gate(VirtualClock())
    hosts = waiting("http://a.test/1", "http://b.test/1", "http://b.test/2")
    due = await hosts.busiest(gate, gate.clock, 1)
    assert [(one.host, one.waiting) for one in due] == [("b.test", 2)]


async def test_a_host_without_waiting_urls_is_forgotten() -> None:
    hosts = waiting("http://a.test/1", "http://a.test/2")
    hosts.drop("http://a.test")
    assert len(hosts) == 1
    hosts.drop("http://a.test")
    hosts.drop("http://a.test")
    assert len(hosts) == 0


async def test_the_soonest_time_is_that_of_the_host_due_first() -> None:
    gate = Gate(VirtualClock())
    gate.due_in("a.test", 30)
    gate.due_in("b.test", 5)
    hosts = waiting("http://a.test/1", "http://b.test/1")
    assert await hosts.soonest(gate, gate.clock, 1.0) == 5


async def test_a_deferred_origin_does_not_defer_another_origin_of_its_host() -> None:
    gate = Gate(VirtualClock())
    gate.defer("http://a.test", utc(gate.clock.wall() + 600))
    hosts = waiting("https://a.test/1", "http://a.test/1", "http://a.test:8080/1")
    assert await hosts.soonest(gate, gate.clock, 1.0) == 0
    assert await seconds(hosts, gate) == {"a.test": 600, "a.test:8080": 0}


async def test_a_budget_that_is_spent_holds_a_host_up_and_one_that_is_not_does_nothing() -> None:
    clock = VirtualClock()
    config = Config(pacing=PacingConfig(max_pages_per_day=2, default_interval=0.0))
    scheduler = scheduler_on(clock, config)
    await scheduler.open()
    gate = Gate(clock)
    for left in (0.0, 86_400.0):
        grant = await scheduler.acquire("u", "a.test", admit=lambda: RobotsInterval(0.0))
        grant.report(200)
        grant.release()
        gate.clocks["a.test"] = list(scheduler.why("a.test"))
        due = await waiting().due("http://a.test", gate, clock)
        assert (due.seconds, due.interval) == (pytest.approx(left), 0.0)
    assert due.holdup is not None
    assert due.holdup.reason == "budget"
    await scheduler.close()


async def test_the_clock_that_ends_last_is_named_as_what_holds_a_host_up() -> None:
    gate = Gate(VirtualClock())
    gate.due_in("a.test", 5)
    gate.due_in("a.test", 60, "block")
    until = utc(gate.clock.wall() + 60)
    assert (await waiting().due("http://a.test", gate, gate.clock)).holdup == Holdup(
        "host_blocked", "source of block", until
    )
    gate.defer("http://a.test", later := utc(gate.clock.wall() + 600))
    (due,) = await waiting("http://a.test/1").busiest(gate, gate.clock, 1)
    assert due.holdup == Holdup("server_error", "robots.txt: server error (503)", later)


async def test_the_interval_of_a_host_is_that_of_the_deciding_clock() -> None:
    gate = Gate(VirtualClock())
    gate.clocks["a.test"] = [
        SimpleNamespace(
            kind="interval", until=None, since=None, source="", decides=decides, seconds=seconds
        )
        for decides, seconds in ((False, 9.0), (True, 3.0))
    ]
    assert (await waiting().due("http://a.test", gate, gate.clock)).interval == 3.0
