"""Waits of tasks that hold leases: for their own, for each other's, and for their parents'."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gatekeeper import (
    Gatekeeper,
    LeaseTimeout,
    PoliteQueue,
    Reason,
    Verdict,
    polite_session,
    session_gate,
)
from gatekeeper.clock import VirtualClock
from gatekeeper.pacing.deadlock import Choice, WaitGraph, WaitsForItself
from gatekeeper.pacing.waiters import Need
from tests.gate_support import QUICK, gate_on, open_config
from tests.internet import Drip, FakeInternet, Stall, redirect
from tests.pacing_support import nobody_waits


@pytest.fixture
async def net() -> AsyncIterator[FakeInternet]:
    async with FakeInternet(clock=VirtualClock()) as made:
        for name in ("a.test", "b.test", "c.test", "d.test", "e.test"):
            made.site(name).robots("").otherwise("x")
        yield made


async def crossing(gate: Gatekeeper, names: list[str]) -> list[str | None]:
    """Let each task hold one host and then ask for the next; return the error of each."""
    everybody_holds = asyncio.Barrier(len(names))

    async def one(number: int) -> str | None:
        following = names[(number + 1) % len(names)]
        async with gate.lease(f"http://{names[number]}/held"):
            await everybody_holds.wait()
            try:
                async with gate.lease(f"http://{following}/wanted"):
                    return None
            except LeaseTimeout as error:
                return str(error)

    return await asyncio.gather(*(one(number) for number in range(len(names))))


@pytest.mark.parametrize("names", [["a.test", "b.test"], [f"{n}.test" for n in "abcde"]])
async def test_tasks_that_wait_in_a_circle_end_by_own_wait_and_are_told_what_each_holds(
    net: FakeInternet, names: list[str]
) -> None:
    async def run() -> list[str | None]:
        async with gate_on(net, open_config(pacing=QUICK)) as gate:
            return await crossing(gate, names)

    refused = [text for text in await net.drive(run()) if text is not None]
    assert len(refused) == 1
    assert "/wanted waited 30 s (pacing.own_wait) for http://" in refused[0]
    assert refused[0].count("/held") == 2  # the lease it waits for, and its own
    assert net.clock.monotonic() == pytest.approx(30.0, abs=1.0)


async def test_a_circle_of_waits_needs_every_slot_of_a_host(net: FakeInternet) -> None:
    """With two slots there is a cycle only if both are held by waiting tasks."""
    hosts = [{"match": "a.test", "concurrency": 2}]

    async def run(goes_on: bool) -> list[str | None]:
        refused: list[str | None] = []

        async def other(stays: asyncio.Event) -> None:
            """Hold the second slot of a, and wait for b or continue."""
            async with gate.lease("http://a.test/second"):
                await stays.wait()
                if not goes_on:
                    await want("http://b.test/other")

        async def want(url: str) -> None:
            try:
                async with gate.lease(url):
                    refused.append(None)
            except LeaseTimeout as error:
                refused.append(str(error))

        async def holds_a() -> None:
            async with gate.lease("http://a.test/first"):
                await want("http://b.test/x")

        async def holds_b(stays: asyncio.Event) -> None:
            async with gate.lease("http://b.test/held"):
                tasks = [asyncio.create_task(other(stays)), asyncio.create_task(holds_a())]
                await net.clock.sleep(1.0)
                if goes_on:
                    net.clock.call_at(net.clock.monotonic() + 2.0, stays.set)
                else:
                    stays.set()
                    await net.clock.sleep(1.0)
                await want("http://a.test/y")
            await asyncio.gather(*tasks)

        async with gate_on(net, open_config(pacing=QUICK, host=hosts)) as gate:
            # Not a child of the waiting task: each task is started by one that holds no lease.
            await asyncio.create_task(holds_b(asyncio.Event()))
        return refused

    assert await net.drive(run(True)) == [None, None]
    net.clock.advance(100.0)
    refused = await net.drive(run(False))
    assert [text is None for text in refused].count(False) == 1


async def test_hosts_of_a_group_make_a_circle_of_waits(net: FakeInternet) -> None:
    tables = {
        "group": [{"name": "g", "interval": 0.0, "concurrency": 1}],
        "host": [{"match": "a.test", "group": "g"}, {"match": "c.test", "group": "g"}],
    }
    holds, refused = asyncio.Event(), []

    async def one(gate: Gatekeeper, held: str, wanted: str) -> None:
        async with gate.lease(held):
            await net.clock.sleep(1.0)
            try:
                async with gate.lease(wanted):
                    pass
            except LeaseTimeout as error:
                refused.append(str(error))
        holds.set()

    async def run() -> None:
        async with gate_on(net, open_config(pacing=QUICK, **tables)) as gate:
            await asyncio.gather(
                one(gate, "http://a.test/1", "http://b.test/2"),
                one(gate, "http://b.test/3", "http://c.test/4"),  # c shares its slot with a
            )

    await net.drive(run())
    assert len(refused) == 1
    assert net.clock.monotonic() == pytest.approx(30.0, abs=3.0)


async def test_max_in_flight_makes_a_circle_of_waits(net: FakeInternet) -> None:
    async def run() -> list[str | None]:
        async with gate_on(net, open_config(pacing={**QUICK, "max_in_flight": 2})) as gate:
            for name in ("c.test", "d.test"):
                await gate.check(f"http://{name}/")
            holding = asyncio.Barrier(2)

            async def one(held: str, wanted: str) -> str | None:
                async with gate.lease(f"http://{held}/held"):
                    await holding.wait()
                    try:
                        async with gate.lease(f"http://{wanted}/wanted"):
                            return None
                    except LeaseTimeout as error:
                        return str(error)

            return await asyncio.gather(one("a.test", "c.test"), one("b.test", "d.test"))

    refused = await net.drive(run())
    assert [text is None for text in refused].count(False) == 1
    assert net.clock.monotonic() == pytest.approx(30.0, abs=3.0)


async def test_open_responses_make_a_circle_of_waits(net: FakeInternet) -> None:
    for name in ("a.test", "b.test"):
        net.site(name).on("/open", Stall("half"))
    refused: list[str] = []

    async def run() -> None:
        async with polite_session(
            "testbot/1.0",
            config=open_config(pacing=QUICK),
            resolver=net.resolver,
            clock=net.clock,
        ) as session:

            async def one(mine: str, others: str) -> None:
                async with session.get(f"http://{mine}/open"):
                    await net.clock.sleep(1.0)
                    try:
                        async with session.get(f"http://{others}/next") as response:
                            await response.read()
                    except LeaseTimeout as error:
                        refused.append(str(error))

            await asyncio.gather(one("a.test", "b.test"), one("b.test", "a.test"))

    await net.drive(run())
    assert len(refused) == 1
    assert "http://a.test/" in refused[0]
    assert "http://b.test/" in refused[0]
    assert net.clock.monotonic() == pytest.approx(30.0, abs=3.0)


async def test_leases_of_a_queue_make_a_circle_of_waits(net: FakeInternet) -> None:
    refused: list[str] = []

    async def run() -> None:
        async with gate_on(net, open_config(pacing=QUICK)) as gate, PoliteQueue(gate) as queue:
            await queue.put("http://a.test/held")
            await queue.put("http://b.test/held")

            async def one() -> None:
                async with await queue.get() as lease:
                    await net.clock.sleep(1.0)
                    other = "b" if lease.url.startswith("http://a") else "a"
                    try:
                        async with gate.lease(f"http://{other}.test/wanted"):
                            pass
                    except LeaseTimeout as error:
                        refused.append(str(error))

            await asyncio.gather(one(), one())

    await net.drive(run())
    assert len(refused) == 1
    assert refused[0].count("/held") == 2


async def test_a_get_from_a_queue_is_part_of_a_circle_of_waits(net: FakeInternet) -> None:
    """One task holds a and is in `get` with only URLs of b; the other holds b and asks for a."""
    refused: list[str] = []

    async def run() -> None:
        async with gate_on(net, open_config(pacing=QUICK)) as gate, PoliteQueue(gate) as queue:

            async def getting() -> None:
                async with gate.lease("http://a.test/held"):
                    await net.clock.sleep(1.0)
                    async with await queue.get():
                        pass

            async def asking() -> None:
                async with gate.lease("http://b.test/held"):
                    await queue.put("http://b.test/queued")
                    await net.clock.sleep(2.0)
                    try:
                        async with gate.lease("http://a.test/wanted"):
                            pass
                    except LeaseTimeout as error:
                        refused.append(str(error))

            await asyncio.gather(getting(), asking())

    await net.drive(run(), limit=40.0)
    (text,) = refused
    assert text.startswith(
        "http://a.test/wanted waited 30 s (pacing.own_wait) for http://a.test/held"
    )
    assert "http://b.test/held" in text


async def test_a_get_with_another_host_in_the_queue_is_not_refused(net: FakeInternet) -> None:
    net.site("b.test").robots("User-agent: *\nCrawl-delay: 60\n")

    async def run() -> str:
        async with gate_on(net, open_config(pacing=QUICK)) as gate, PoliteQueue(gate) as queue:
            async with gate.lease("http://b.test/1") as lease:
                lease.report(status=200)
            async with gate.lease("http://a.test/held"):
                for host in "ab":
                    await queue.put(f"http://{host}.test/queued")
                async with await queue.get() as lease:
                    return str(lease.url)

    assert await net.drive(run(), limit=200.0) == "http://b.test/queued"


async def test_a_get_is_refused_as_soon_as_only_its_own_host_is_in_the_queue(
    net: FakeInternet,
) -> None:
    """The queue is empty at first, so any URL may come; then one of the held host is put."""

    async def run() -> tuple[float, str]:
        async with gate_on(net, open_config(pacing=QUICK)) as gate, PoliteQueue(gate) as queue:

            async def putting() -> None:
                await net.clock.sleep(100.0)
                await queue.put("http://a.test/queued")

            async def getting() -> str:
                async with gate.lease("http://a.test/held"):
                    with pytest.raises(LeaseTimeout) as caught:
                        await queue.get()
                return str(caught.value)

            before = net.clock.monotonic()
            text, _ = await asyncio.gather(getting(), putting())
            after = net.clock.monotonic() - before
            async with await queue.get() as lease:  # The URL was kept.
                assert lease.url == "http://a.test/queued"
            return after, text

    after, text = await net.drive(run(), limit=120.0)
    assert after == pytest.approx(100.0)
    assert "http://a.test/queued would wait for http://a.test/held" in text


@pytest.mark.parametrize("let_go", [None, 12.0])
async def test_a_child_in_get_whose_parent_holds_the_host_waits_for_a_while(
    net: FakeInternet, caplog: pytest.LogCaptureFixture, let_go: float | None
) -> None:
    """Whether the parent awaits the child can't be known: first a warning, then a refusal."""

    async def run() -> tuple[str, float]:
        async with gate_on(net, open_config(pacing=QUICK)) as gate, PoliteQueue(gate) as queue:
            await queue.put("http://a.test/queued")

            async def child() -> str:
                try:
                    async with await queue.get() as lease:
                        return str(lease.url)
                except LeaseTimeout as error:
                    return str(error)

            before = net.clock.monotonic()
            async with gate.lease("http://a.test/held"):
                task = asyncio.create_task(child())
                if let_go is None:
                    await task
                else:
                    await net.clock.sleep(let_go)
            return await task, net.clock.monotonic() - before

    with caplog.at_level(logging.WARNING, logger="gatekeeper.pacing.deadlock"):
        text, after = await net.drive(run(), limit=60.0)
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith("http://a.test/queued waits for http://a.test/held")
    if let_go is None:
        assert after == pytest.approx(30.0, abs=0.1)
        assert text.startswith("http://a.test/queued waited 30 s (pacing.own_wait) for http://a")
    else:
        assert (text, after) == ("http://a.test/queued", pytest.approx(let_go, abs=0.1))


async def test_a_task_that_releases_its_lease_before_the_next_ends_the_circle(
    net: FakeInternet,
) -> None:
    """A holds a and waits for b. B holds b, and asks for a only after releasing b."""

    async def run() -> None:
        async with gate_on(net, open_config(pacing=QUICK)) as gate:

            async def first() -> None:
                async with gate.lease("http://a.test/1"):
                    await net.clock.sleep(1.0)
                    async with gate.lease("http://b.test/1"):
                        pass

            async def second() -> None:
                async with gate.lease("http://b.test/2"):
                    await net.clock.sleep(3.0)
                async with gate.lease("http://a.test/2"):
                    pass

            await asyncio.gather(first(), second())

    await net.drive(run())


# --- children -------------------------------------------------------------------------------


async def by_wait_for(work: Awaitable[None]) -> None:
    await asyncio.wait_for(asyncio.ensure_future(work), 500.0)  # in a task, also since Python 3.12


async def by_gather(work: Awaitable[None]) -> None:
    await asyncio.gather(work)


async def by_task_group(work: Any) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(work)


async def by_create_task(work: Any) -> None:
    await asyncio.create_task(work)


@pytest.mark.parametrize("start", [by_wait_for, by_gather, by_task_group, by_create_task])
@pytest.mark.parametrize("own_wait", [30.0, 7.0, 3.0])
async def test_a_child_of_a_task_that_holds_the_host_is_warned_and_then_refused(
    net: FakeInternet,
    caplog: pytest.LogCaptureFixture,
    start: Callable[[Awaitable[None]], Awaitable[None]],
    own_wait: float,
) -> None:
    took: list[float] = []

    async def child(gate: Gatekeeper) -> None:
        began = net.clock.monotonic()
        with pytest.raises(LeaseTimeout, match=r"(?s)/child .*/parent") as caught:
            async with gate.lease("http://a.test/child"):
                pass
        assert caught.value.url == "http://a.test/child"
        task = asyncio.current_task()
        assert task is not None
        assert not task.cancelling()
        took.append(net.clock.monotonic() - began)

    async def run() -> None:
        pacing = {**QUICK, "own_wait": own_wait}
        async with (
            gate_on(net, open_config(pacing=pacing)) as gate,
            gate.lease("http://a.test/parent"),
        ):
            await start(child(gate))

    with caplog.at_level(logging.WARNING, "gatekeeper"):
        await net.drive(run())
    assert took == [pytest.approx(own_wait, abs=0.1)]
    warned = [text for text in caplog.messages if "/child" in text and "/parent" in text]
    assert len(warned) == (1 if own_wait > 5.0 else 0)


async def test_a_child_of_a_task_that_reads_a_response_is_refused_after_own_wait(
    net: FakeInternet,
) -> None:
    net.site("a.test").on("/open", Stall("half")).page("/next", "x")

    async def run() -> float:
        async with polite_session(
            "testbot/1.0",
            config=open_config(pacing=QUICK),
            resolver=net.resolver,
            clock=net.clock,
        ) as session:

            async def child() -> None:
                async with session.get("http://a.test/next"):
                    pass

            async with session.get("http://a.test/open"):
                began = net.clock.monotonic()
                with pytest.raises(LeaseTimeout, match=r"(?s)/next .*/open"):
                    await asyncio.create_task(child())
                return net.clock.monotonic() - began

    assert await net.drive(run()) == pytest.approx(30.0, abs=0.1)


async def test_a_crawler_starts_tasks_for_links_while_it_reads_the_page(
    net: FakeInternet, caplog: pytest.LogCaptureFixture
) -> None:
    """The page takes twenty seconds, and no wait is refused."""
    site = net.site("a.test").on("/page", Drip("x" * 20, size=1, every=1.0))

    async def run() -> None:
        async with polite_session(
            "testbot/1.0",
            config=open_config(pacing=QUICK),
            resolver=net.resolver,
            clock=net.clock,
        ) as session:

            async def visit(url: str) -> None:
                async with session.get(url) as response:
                    await response.read()

            async with session.get("http://a.test/page") as response:
                links = [f"http://{name}.test/{n}" for n in range(5) for name in "ab"]
                tasks = [asyncio.create_task(visit(url)) for url in links]
                await response.read()
            await asyncio.gather(*tasks)

    await net.drive(run())
    assert len(site.paths) == 7
    assert len([text for text in caplog.messages if "/page" in text]) == 5  # one per child


async def test_own_wait_counts_only_while_the_same_lease_is_in_the_way(net: FakeInternet) -> None:
    """The parent's lease ends after 20 s; then another lease blocks, which is not a parent's."""

    async def run() -> float:
        async with gate_on(net, open_config(pacing=QUICK)) as gate:

            async def child() -> None:
                async with gate.lease("http://a.test/child"):
                    pass

            async def stranger() -> None:
                await net.clock.sleep(1.0)
                async with gate.lease("http://a.test/stranger", priority=5):
                    await net.clock.sleep(40.0)

            apart = asyncio.create_task(stranger())  # not started under a lease
            async with gate.lease("http://a.test/parent"):
                mine = asyncio.create_task(child())
                await net.clock.sleep(20.0)
            await asyncio.gather(apart, mine)
            return net.clock.monotonic()

    assert await net.drive(run()) >= 60.0


async def test_children_that_wait_for_the_hosts_of_each_others_parents_are_refused(
    net: FakeInternet,
) -> None:
    """Like tasks of `asyncio.wait_for` before Python 3.12: neither parent waits itself."""
    refused: list[str] = []

    async def run() -> None:
        async with gate_on(net, open_config(pacing=QUICK)) as gate:

            async def child(url: str) -> None:
                async with gate.lease(url):
                    pass

            async def parent(mine: str, others: str) -> None:
                async with gate.lease(f"http://{mine}/held"):
                    await net.clock.sleep(1.0)
                    try:
                        await asyncio.create_task(child(f"http://{others}/wanted"))
                    except LeaseTimeout as error:
                        refused.append(str(error))

            await asyncio.gather(parent("a.test", "b.test"), parent("b.test", "a.test"))

    await net.drive(run())
    assert len(refused) in (1, 2)
    assert "/wanted waited 30 s" in refused[0]
    assert net.clock.monotonic() < 40.0


async def test_a_task_outside_a_circle_of_waits_is_not_refused(net: FakeInternet) -> None:
    """P's child waits for P's host a. A stranger that was started under another lease waits for a
    as well. When P's child is refused and P continues, the stranger gets its lease."""
    got: list[str] = []

    async def run() -> None:
        async with gate_on(net, open_config(pacing=QUICK)) as gate:

            async def want(name: str) -> None:
                try:
                    async with gate.lease(f"http://a.test/{name}"):
                        got.append(name)
                except LeaseTimeout:
                    got.append(f"{name} refused")

            async def parent() -> None:
                async with gate.lease("http://a.test/held"):
                    await net.clock.sleep(1.0)
                    await asyncio.create_task(want("child"))

            async def strangers_parent() -> None:
                async with gate.lease("http://b.test/held"):
                    await asyncio.create_task(want("stranger"))

            family = asyncio.create_task(parent())
            await net.clock.sleep(0.5)
            await strangers_parent()
            await family

    await net.drive(run())
    assert got == ["child refused", "stranger"]


async def test_a_cancelled_child_is_cancelled_and_not_refused(net: FakeInternet) -> None:
    async def run() -> None:
        async with (
            gate_on(net, open_config(pacing=QUICK)) as gate,
            gate.lease("http://a.test/parent"),
        ):

            async def child() -> None:
                async with gate.lease("http://a.test/child"):
                    pass

            task = asyncio.create_task(child())
            net.clock.call_at(net.clock.monotonic() + 30.0, task.cancel)
            with pytest.raises(asyncio.CancelledError):
                await task
            assert len(gate.parts.waits) == 0

    await net.drive(run())


# --- robots.txt that needs the lease of a host that is held -----------------------------------


@pytest.fixture
def redirected_file(net: FakeInternet) -> FakeInternet:
    """The robots.txt of c.test redirects to a.test."""
    net.site("c.test").on("/robots.txt", redirect("http://a.test/for-c"))
    net.site("a.test").page("/for-c", "User-agent: *\nDisallow: /no\n")
    return net


def is_own_lease(decision: Any, *urls: str) -> None:
    assert (decision.verdict, decision.reason) == (Verdict.DEFER, Reason.OWN_LEASE)
    assert decision.retry_at is not None
    for url in urls:
        assert url in (decision.note or "")


async def test_a_file_redirected_to_a_host_the_asker_holds_defers_with_own_lease(
    redirected_file: FakeInternet,
) -> None:
    net = redirected_file

    async def run() -> None:
        async with gate_on(net, open_config(pacing=QUICK)) as gate:
            async with gate.lease("http://a.test/x"):
                is_own_lease(await gate.check("http://c.test/y"), "http://a.test/x")
                # The retrieval continues to wait, so a task that joins it is refused too.
                is_own_lease(await gate.check("http://c.test/z"), "http://a.test/x")
                several = ["http://c.test/y", "http://b.test/", "http://c.test/z"]
                answers = [one async for one in gate.check_many(several)]
                assert [one.verdict for one in answers] == ["defer", "allow", "defer"]
                is_own_lease(answers[0], "http://a.test/x")
                for method in ("robots", "policy", "source", "refresh"):
                    with pytest.raises(LeaseTimeout, match=r"http://a\.test/x"):
                        await getattr(gate.parts.questions if method == "source" else gate, method)(
                            "http://c.test/y"
                        )
                with pytest.raises(LeaseTimeout, match=r"http://a\.test/x"):
                    async with gate.lease("http://c.test/y"):
                        pass
            assert (await gate.check("http://c.test/y")).verdict is Verdict.ALLOW

    await net.drive(run())
    assert net.clock.monotonic() < 5.0


async def test_a_task_without_a_lease_waits_for_a_file_redirected_to_a_held_host(
    redirected_file: FakeInternet,
) -> None:
    net = redirected_file

    async def run() -> None:
        async with gate_on(net, open_config(pacing=QUICK)) as gate:

            async def ask() -> Any:
                return await gate.check("http://c.test/y")

            elsewhere = asyncio.create_task(ask())
            async with gate.lease("http://a.test/x"):
                is_own_lease(await gate.check("http://c.test/y"), "http://a.test/x")
                await net.clock.sleep(60.0)
            assert (await elsewhere).verdict is Verdict.ALLOW

    await net.drive(run())


async def test_a_child_that_waits_for_a_file_redirected_to_a_held_host_is_refused(
    redirected_file: FakeInternet,
) -> None:
    net = redirected_file

    async def run() -> float:
        async with gate_on(net, open_config(pacing=QUICK)) as gate, gate.lease("http://a.test/x"):
            began = net.clock.monotonic()
            decision = await asyncio.create_task(gate.check("http://c.test/y"))
            is_own_lease(decision, "http://a.test/x")
            return net.clock.monotonic() - began

    assert await net.drive(run()) == pytest.approx(30.0, abs=0.1)


async def test_a_circle_of_waits_through_a_robots_txt_ends(redirected_file: FakeInternet) -> None:
    """A holds b and asks about c, whose file redirects to a; B holds a and waits for b."""
    net = redirected_file

    async def run() -> None:
        async with gate_on(net, open_config(pacing=QUICK)) as gate:

            async def first() -> Any:
                async with gate.lease("http://b.test/held"):
                    await net.clock.sleep(1.0)
                    return await gate.check("http://c.test/y")

            async def second() -> str | None:
                async with gate.lease("http://a.test/held"):
                    await net.clock.sleep(2.0)
                    try:
                        async with gate.lease("http://b.test/wanted"):
                            return None
                    except LeaseTimeout as error:
                        return str(error)

            decision, refused = await asyncio.gather(first(), second())
            assert decision.verdict is Verdict.ALLOW
            assert "http://b.test/held" in (refused or "")

    await net.drive(run())
    assert net.clock.monotonic() == pytest.approx(30.0, abs=3.0)


# --- the graph by itself ----------------------------------------------------------------------


class Leased:
    """A lease of the model."""

    def __init__(self, owner: Any, host: int) -> None:
        self.owner, self.url, self.scopes = owner, f"http://{host}/", (str(host),)
        self.ended, self.headed = False, True


class Somebody:
    """A stand-in for a task."""

    def cancelling(self) -> int:
        return 0


@given(
    slots=st.integers(1, 3),
    own=st.integers(0, 3),
    others=st.integers(0, 3),
    they_wait=st.booleans(),
)
async def test_only_a_task_that_holds_every_slot_itself_is_refused_at_once(
    slots: int, own: int, others: int, they_wait: bool
) -> None:
    def needs(host: str, _near: tuple[str, ...]) -> list[Need]:
        return [Need(host, slots if host == "0" else 1, False)]

    graph: WaitGraph[Any] = WaitGraph(VirtualClock(), 1e9, needs)
    me: Any = Somebody()
    graph.holdings.add(Leased(me, 1))
    for _ in range(own):
        graph.holdings.add(Leased(me, 0))
    for _ in range(others):
        other: Any = Somebody()
        graph.holdings.add(Leased(other, 0))
        if they_wait:
            graph.begin(other, lambda: [Choice("http://1/wanted", "1")], ())
    try:
        graph.begin(me, lambda: [Choice("http://0/wanted", "0")], ())
    except WaitsForItself:
        assert own >= slots
    else:
        assert own < slots
    graph.close()


async def test_a_long_download_of_another_task_refuses_nobody(net: FakeInternet) -> None:
    """Only a lease counts whose task waits: this one is in use, and ends."""

    async def run() -> float:
        async with gate_on(net, open_config(pacing=QUICK)) as gate:

            async def other() -> None:
                async with gate.lease("http://b.test/long"):
                    await net.clock.sleep(300.0)

            task = asyncio.create_task(other())
            await net.clock.sleep(1.0)
            async with gate.lease("http://a.test/held"), gate.lease("http://b.test/wanted"):
                pass
            await task
            return net.clock.monotonic()

    assert await net.drive(run()) >= 300.0


async def test_the_cost_of_a_waiting_child_does_not_grow_with_their_number(
    net: FakeInternet,
) -> None:
    """The work per child, counted instead of timed, does not grow with their number."""

    async def run(count: int) -> float:
        async with (
            gate_on(net, open_config(pacing=QUICK)) as gate,
            gate.lease("http://a.test/parent"),
        ):
            needs, asked = gate.parts.waits._needs, 0

            def counted(host: str, near: tuple[str, ...]) -> Any:
                nonlocal asked
                asked += 1
                return needs(host, near)

            gate.parts.waits._needs = counted

            async def child(number: int) -> None:
                with pytest.raises(LeaseTimeout):
                    async with gate.lease(f"http://a.test/{number}"):
                        pass

            await asyncio.gather(*(child(number) for number in range(count)))
            assert nobody_waits(gate.parts.waits)
            return asked / count

    few = await net.drive(run(20))
    many = await net.drive(run(600))
    assert many <= 1.5 * few


async def test_a_session_forgets_the_leases_of_its_requests(net: FakeInternet) -> None:
    async def run() -> None:
        async with polite_session(
            "testbot/1.0",
            config=open_config(pacing=QUICK),
            resolver=net.resolver,
            clock=net.clock,
        ) as session:
            for number in range(100):
                async with session.get(f"http://a.test/{number}") as response:
                    await response.read()
            assert len(session_gate(session).parts.waits.holdings) == 0

    await net.drive(run())
