"""`try_acquire`: a lease now, or the time to ask again; it never waits."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gatekeeper import Denied, InvalidURL, LeaseTimeout, NotYet
from gatekeeper.clock import VirtualClock, utc
from tests.internet import FakeInternet, Hold, Page
from tests.waiting_support import until

DENYING = "User-agent: *\nDisallow: /private\n"


async def acquired(gate: Any, url: str, internet: FakeInternet, **options: Any) -> Any:
    """Ask until a lease is granted, as a crawler does that has other work meanwhile."""
    while not (found := await gate.try_acquire(url, **options)):
        assert isinstance(found, NotYet)
        wait = found.due_at.timestamp() - internet.clock.wall()
        await internet.clock.sleep(max(0.01, wait))
    return found


async def test_the_file_of_an_unknown_origin_is_fetched_in_the_background(
    internet: FakeInternet, open_gate: Any
) -> None:
    file = Hold(Page(DENYING))
    site = internet.site("a.test").robots(file)
    gate = await open_gate(internet)
    first = await gate.try_acquire("http://a.test/x")
    assert isinstance(first, NotYet)
    assert not first
    assert first.due_at > utc(internet.clock.wall() - 1)
    await file.waiting.acquire()
    assert not await gate.try_acquire("http://a.test/x")
    file.release()
    lease = None
    while not lease:
        lease = await gate.try_acquire("http://a.test/x")
        await asyncio.sleep(0)
    lease.report(status=200)
    lease.end()
    assert site.paths == ["/robots.txt"]
    with pytest.raises(Denied) as caught:
        await gate.try_acquire("http://a.test/private")
    assert caught.value.decision.rule.line == 2


async def test_a_second_lease_is_not_yet_and_tells_when_it_is_due(
    net: FakeInternet, open_gate: Any
) -> None:
    net.site("a.test").robots("User-agent: *\nCrawl-delay: 10\n")
    gate = await open_gate(net)

    async def run() -> tuple[float, NotYet]:
        first = await acquired(gate, "http://a.test/1", net)
        first.report(status=200)
        first.end()
        await net.clock.sleep(0.5)  # a report travels
        second = await gate.try_acquire("http://a.test/2")
        assert isinstance(second, NotYet)
        return net.clock.wall(), second

    now, second = await net.drive(run())
    assert second.why == "turn"
    assert 8.0 < second.due_at.timestamp() - now < 12.0


@pytest.mark.parametrize("agent", [None, "otherbot/2.0"])
async def test_a_second_lease_of_a_host_in_use_is_not_yet_and_no_deadlock(
    internet: FakeInternet, open_gate: Any, agent: str | None
) -> None:
    internet.site("a.test").robots("")
    gate = await open_gate(internet)
    await gate.check("http://a.test/")
    held = await acquired(gate, "http://a.test/1", internet, user_agent=agent)
    assert held.user_agent == agent or agent is None
    second = await gate.try_acquire("http://a.test/2", user_agent=agent)
    assert isinstance(second, NotYet)
    assert second.why == "turn"
    # The task owns the lease, so that waiting for another one could never end.
    with pytest.raises(LeaseTimeout):
        await gate.acquire("http://a.test/3")
    held.end()
    third = await acquired(gate, "http://a.test/4", internet, owned=False)
    third.give_back()


async def test_a_deferral_is_a_value_with_its_decision_and_its_end(
    internet: FakeInternet, open_gate: Any
) -> None:
    internet.site("a.test").robots(Page("", status=503, headers={"Retry-After": "300"}))
    gate = await open_gate(internet)
    await gate.check("http://a.test/x")
    found = await gate.try_acquire("http://a.test/x")
    assert isinstance(found, NotYet)
    assert found.decision is not None
    assert found.why == found.decision.reason
    assert found.due_at.timestamp() - internet.clock.wall() > 250.0


async def test_a_blocked_and_a_paused_host_are_not_yet_with_their_reason(
    internet: FakeInternet, open_gate: Any
) -> None:
    internet.site("a.test").robots("")
    gate = await open_gate(internet)
    await gate.check("http://a.test/x")
    await gate.block("a.test", internet.clock.wall() + 500)
    found = await gate.try_acquire("http://a.test/x")
    assert isinstance(found, NotYet)
    assert 450.0 < found.due_at.timestamp() - internet.clock.wall() <= 501.0
    assert (found.why, found.decision) == ("host_blocked", None)
    await gate.block("a.test", internet.clock.wall() - 1)
    await gate.pause("a.test")
    found = await gate.try_acquire("http://a.test/x")
    assert isinstance(found, NotYet)
    assert found.why == "host_paused"
    assert 30.0 < found.due_at.timestamp() - internet.clock.wall() <= 61.0
    await gate.resume("a.test")
    (await acquired(gate, "http://a.test/x", internet)).end()


async def test_a_blocked_host_is_not_yet_for_an_origin_never_asked_about(
    internet: FakeInternet, open_gate: Any
) -> None:
    """An unknown file can't be fetched before the block ends, so `due_at` is its end."""
    internet.site("a.test").robots("")
    gate = await open_gate(internet)
    await gate.block("a.test", internet.clock.wall() + 500)
    found = await gate.try_acquire("http://a.test/x")
    assert isinstance(found, NotYet)
    assert found.why == "host_blocked"
    assert 450.0 < found.due_at.timestamp() - internet.clock.wall() <= 501.0


async def test_text_that_is_no_url_raises_invalid_url(
    internet: FakeInternet, open_gate: Any
) -> None:
    gate = await open_gate(internet)
    with pytest.raises(InvalidURL):
        await gate.try_acquire("mailto:a@b.test")


async def test_closing_ends_the_fetches_in_the_background(
    internet: FakeInternet, open_gate: Any
) -> None:
    """No task is left behind: a closing event loop would warn about it."""
    hold = Hold(Page(""))
    internet.site("a.test").robots(hold)
    gate = await open_gate(internet)
    assert not await gate.try_acquire("http://a.test/x")
    await until(lambda: internet.sites["a.test"].requests)


async def test_an_unknown_address_is_looked_up_in_the_background(
    net: FakeInternet, open_gate: Any
) -> None:
    """With clocks per address a lease needs the host's address; the caller does not wait for it."""
    assert isinstance(net.clock, VirtualClock)
    net.site("a.test").robots("")
    net.site("b.test").robots("")
    gate = await open_gate(net, pacing={"address_interval": 3.0, "default_interval": 0.0})

    async def run() -> tuple[float, float]:
        one = await acquired(gate, "http://a.test/", net)
        one.report(status=200)
        one.end()
        began = net.clock.monotonic()
        two = await acquired(gate, "http://b.test/", net)
        two.end()
        return began, net.clock.monotonic()

    began, ended = await net.drive(run())
    assert ended - began >= 2.9
