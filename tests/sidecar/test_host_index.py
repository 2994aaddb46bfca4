"""`HostIndex`: pages of very many hosts, without examining hosts needlessly."""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gatekeeper.clock import VirtualClock
from gatekeeper.pacing.host_settings import SHARED_PREFIXES, ScopeSettings
from gatekeeper.pacing.scopes import Scope
from gatekeeper.pacing.waiters import HostState, clock_holdups, state_by
from gatekeeper.sidecar.pages.host_index import DEEPEST, HostIndex, HostOrder, SortedHosts
from tests.internet import FakeInternet
from tests.waiting_support import until


def state_of(scope: Scope, now: float) -> HostState:
    return state_by(clock_holdups(scope, now))


NEXT = HostOrder("next", lambda scope, now: max(0.0, scope.due_at(events=False) - now))


def scope_named(name: str) -> Scope:
    return Scope(name, ScopeSettings())


@given(st.lists(st.tuples(st.booleans(), st.text("abc", max_size=3))), st.integers(0, 5))
@settings(deadline=None)
def test_names_stay_sorted_whatever_comes_and_goes(
    moves: list[tuple[bool, str]], first: int
) -> None:
    hosts, model = SortedHosts(), set()
    for comes, name in moves:
        if comes:
            hosts.put(name, scope_named(name))
            model.add(name)
        else:
            hosts.put(name, None)
            model.discard(name)
    assert len(hosts) == len(model)
    assert hosts.names(first, 4) == sorted(model)[first : first + 4]
    assert hosts.names(first, 4, descending=True) == sorted(model, reverse=True)[first : first + 4]


def test_many_names_are_split_into_short_lists() -> None:
    hosts, model = SortedHosts(), [f"h{n:05d}" for n in range(20_000)]
    for name in random.Random(1).sample(model, len(model)):
        hosts.put(name, scope_named(name))
    assert max(map(len, hosts.chunks())) <= 512
    assert hosts.names(19_990, 50) == model[19_990:]
    for name in model[:15_000]:
        hosts.put(name, None)
    assert hosts.names(0, 2) == model[15_000:15_002]
    assert [one.name for chunk in hosts.chunks() for one in chunk] == model[15_000:]


def test_names_that_come_and_go_during_a_scan_hide_no_other() -> None:
    """Lists are split and emptied meanwhile."""
    hosts, staying = SortedHosts(), [f"h{n:05d}" for n in range(0, 9_000, 3)]
    for name in staying + [f"h{n:05d}" for n in range(1, 9_000, 3)]:
        hosts.put(name, scope_named(name))
    seen: list[str] = []
    for part in hosts.chunks():
        seen += [one.name for one in part]
        first = len(seen)
        for n in range(first, first + 1_500):
            hosts.put(f"h{n:05d}x", scope_named(f"h{n:05d}x"))
        for n in range(1, 9_000, 6):
            hosts.put(f"h{n:05d}", None)
    assert len(seen) == len(set(seen))
    assert set(staying) <= set(seen)


@asynccontextmanager
async def index_of(count: int, clock: VirtualClock) -> AsyncIterator[tuple[Any, dict, list]]:
    scopes: dict[str, Scope] = {}
    changes: list[Scope] = []
    plain = ScopeSettings()
    for n in range(count):
        scope = scopes[f"h{n:07d}.test"] = Scope(f"h{n:07d}.test", plain)
        scope.basis, scope.interval = -100.0, 1.0
    scopes["group:x"] = Scope("group:x", plain)
    index = HostIndex(scopes, changes, clock, state_of, shared=SHARED_PREFIXES)
    try:
        yield index, scopes, changes
    finally:
        await index.close()


async def test_hosts_are_paged_by_state_name_and_key() -> None:
    clock = VirtualClock()
    async with index_of(100, clock) as (index, scopes, _):
        scopes["h0000007.test"].ensure_history().paused = True
        scopes["h0000009.test"].ensure_history().block(600.0, "429")
        scopes["h0000011.test"].in_flight = 1
        scopes["h0000013.test"].basis = 10.0
        for state, number in (("paused", 7), ("blocked", 9), ("busy", 11), ("waiting", 13)):
            assert await index.page(state=state) == ([f"h{number:07d}.test"], 1, True)
        assert (await index.page(state="free")).total == 96
        found = await index.page(order=NEXT, descending=True, count=3)
        assert found.hosts == ["h0000009.test", "h0000013.test", "h0000000.test"]
        assert (await index.page(q="0009", order=NEXT)).hosts[-1] == "h0000009.test"
        assert (await index.page(q="00099")).hosts == ["h0000099.test"]
        assert (await index.page(descending=True, first=98, count=5)).hosts == [
            "h0000001.test",
            "h0000000.test",
        ]
        expected = {"waiting": 1, "busy": 1, "deferred": 0, "blocked": 1, "paused": 1}
        held_up = {"blocked": ["h0000009.test"], "paused": ["h0000007.test"], "deferred": []}
        assert await index.states() == (expected, held_up, True)
        with pytest.raises(ValueError, match="narrow the filter"):
            await index.page(order=NEXT, first=DEEPEST)


async def test_of_many_hosts_held_up_those_with_the_least_key_are_named() -> None:
    async with index_of(20_000, VirtualClock()) as (index, scopes, _):
        for n in range(0, 20_000, 2):
            scopes[f"h{n:07d}.test"].ensure_history().block(600.0, "429")
        keys = dict.fromkeys(scopes, 0.0) | {"h0019998.test": -2.0, "h0000500.test": -1.0}
        while not (found := await index.states(lambda scope: keys[scope.name])).complete:
            pass
        assert found.counts["blocked"] == 10_000
        assert found.held_up == {
            "blocked": ["h0019998.test", "h0000500.test"] + [f"h{n:07d}.test" for n in (0, 2, 4)],
            "paused": [],
            "deferred": [],
        }


async def test_hosts_that_come_and_go_are_followed() -> None:
    clock = VirtualClock()
    async with index_of(3000, clock) as (index, scopes, changes):
        assert (await index.page()).total == 3000
        for n in range(2500):
            changes.append(scopes.pop(f"h{n:07d}.test"))
        again = scopes["h0000001.test"] = Scope("h0000001.test", ScopeSettings())
        again.ensure_history().paused = True
        changes.append(again)
        found = await index.page(count=2)
        assert found == (["h0000001.test", "h0002500.test"], 501, True)
        assert await index.page(state="paused") == (["h0000001.test"], 1, True)
        assert (await index.page(order=NEXT)).total == 501


async def test_a_page_that_is_given_up_breaks_off_no_other() -> None:
    async with index_of(9_000, VirtualClock()) as (index, _, _):
        given_up, other = (asyncio.ensure_future(index.page()) for _ in range(2))
        await asyncio.sleep(0)
        given_up.cancel()
        assert (await other).total == 9_000


async def least_time(work: Callable[[], Awaitable[None]]) -> float:
    """Return the least CPU seconds of a few runs; see `tests.effort.processor_time`."""
    took = []
    for _ in range(5):
        gc.disable()
        try:
            began = time.process_time()
            await work()
            took.append(time.process_time() - began)
        finally:
            gc.enable()
    return min(took)


async def test_a_page_of_very_many_hosts_neither_waits_nor_holds_up_the_loop() -> None:
    """Measured in iterations of the loop and CPU time, not by the wall clock."""
    async with index_of(200_000, VirtualClock()) as (index, scopes, _):
        scopes["h0100000.test"].ensure_history().paused = True
        index.follow()
        while index.pending:
            await asyncio.sleep(0)

        async def deep() -> None:
            found = await index.page(first=150_000)
            assert (found.hosts[0], found.total, found.complete) == ("h0150000.test", 200_000, True)

        assert await least_time(deep) < 0.01
        found = await index.page(order=NEXT, descending=True)
        while not found.complete:
            await asyncio.sleep(0)
            found = await index.page(order=NEXT, descending=True)

        async def sorted_page() -> None:
            assert (await index.page(order=NEXT, descending=True, first=5000)).total == 200_000

        assert await least_time(sorted_page) < 0.05


async def test_the_last_scan_answers_while_the_next_is_under_way() -> None:
    clock = VirtualClock()
    async with index_of(20_000, clock) as (index, scopes, _):
        index.follow()
        while index.pending:
            await asyncio.sleep(0)
        while not (await index.page(state="paused")).complete:
            pass
        scopes["h0000007.test"].ensure_history().paused = True
        assert await index.page(state="paused") == ([], 0, True)
        clock.advance(5.0)
        assert await index.page(state="paused") == ([], 0, True)
        while not (found := await index.page(state="paused")).hosts:
            assert found.complete
            await asyncio.sleep(0)
        assert found == (["h0000007.test"], 1, True)
        clock.advance(100.0)
        scopes["h0000008.test"].ensure_history().paused = True
        while not (found := await index.page(state="paused")).complete:
            pass
        assert found.total == 2


async def test_a_page_is_complete_only_after_a_scan_of_every_host() -> None:
    """A page is not complete if it began while thousands of hosts were not sorted yet."""
    async with index_of(30_000, VirtualClock()) as (index, _, _):
        found = await index.page(order=NEXT)
        assert not found.complete
        assert found.total < 30_000
        for _ in range(1_000):
            if (found := await index.page(order=NEXT)).complete:
                break
            await asyncio.sleep(0)
        assert (found.total, found.complete) == (30_000, True)


async def test_a_scan_of_all_hosts_lets_other_tasks_run() -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with index_of(100_000, VirtualClock()) as (index, _, _):
        index.follow()
        while index.pending:
            await asyncio.sleep(0)
        other = asyncio.create_task(count())
        while not (await index.page(order=NEXT)).complete:
            pass
        other.cancel()
    assert turns >= 90


def test_the_state_of_a_host_includes_that_of_its_shared_clocks() -> None:
    shared = Scope("group:g", ScopeSettings())
    scope = Scope("a.test", ScopeSettings(), (shared,))
    assert state_of(scope, 0.0) == "free"
    shared.basis = 5.0
    assert state_of(scope, 0.0) == "waiting"
    shared.in_flight = 1
    assert state_of(scope, 0.0) == "busy"
    shared.ensure_history().block(9.0, "429")
    assert state_of(scope, 0.0) == "blocked"
    scope.ensure_history().paused = True
    assert state_of(scope, 0.0) == "paused"


async def test_the_list_of_hosts_tells_of_their_files_and_counts(
    serve: Any, internet: FakeInternet
) -> None:
    internet.site("a.test").robots("User-agent: *\nDisallow: /no\nCrawl-delay: 0.07\n")
    service = await serve()
    _, lease = await service.post("/v1/leases", {"url": "http://a.test/x", "wait": 5})
    await service.post(f"/v1/leases/{lease['id']}/report", {"status": 404})
    for path in ("x", "y", "no"):
        await service.get(f"/v1/check?url=http://a.test/{path}")
    for sort in ("host", "-next", "-interval", "-waiting", "-allowed", "denied", "-status"):
        _, page = await service.get(f"/v1/hosts?sort={sort}")
        (host,) = page["hosts"]
        assert (host["interval"], host["interval_source"]) == (
            0.07,
            "crawl-delay 0.07 s from robots.txt line 3",
        )
        assert (host["robots"], host["robots_status"], host["last_status"]) == ("parsed", 200, 404)
        assert (host["allowed"], host["denied"], page["complete"]) == (3, 1, True)
    assert (await service.get("/v1/hosts?sort=next&page=300"))[0] == 400


async def test_hosts_that_are_held_up_are_sorted_first_and_then_those_that_are_waited_for(
    serve: Any, internet: FakeInternet
) -> None:
    """`gatekeeper top` and the overview show the first of them."""
    for name in ("idle", "waited"):
        internet.site(f"http://{name}.test").robots("")
    service = await serve()
    await service.get("/v1/check?url=http://idle.test/")
    for n in range(7):
        await service.post(f"/v1/hosts/blocked{n}.test/block", {"seconds": 600})
    await service.post("/v1/hosts/paused.test/pause", {})
    internet.site("http://down.test").robots("", status=404)
    internet.site("http://down.test").robots("busy", status=500)
    await service.get("/v1/check?url=http://down.test/")
    await service.post("/v1/hosts/down.test/block", {"seconds": 0})
    await service.post("/v1/leases", {"url": "http://waited.test/", "wait": 5, "ttl": 60})
    waiting = asyncio.create_task(
        service.post("/v1/leases", {"url": "http://waited.test/", "wait": 30})
    )
    await until(lambda: len(service.service.leases.waiters))
    _, page = await service.get("/v1/hosts?sort=-held_up")
    blocked = [f"blocked{n}.test" for n in range(7)]
    others = ["paused.test", "down.test", "waited.test", "idle.test"]
    assert [host["host"] for host in page["hosts"]] == blocked + others
    _, seen = await service.get("/v1/overview")
    assert [(one["host"], one["state"]) for one in seen["held_up"]] == [
        *((name, "blocked") for name in blocked[:3]),
        ("paused.test", "paused"),
        ("down.test", "deferred"),
    ]
    assert seen["oldest_wait_host"] == "waited.test"
    waiting.cancel()
    await asyncio.wait([waiting])


async def test_a_host_at_another_port_is_listed_with_its_file(
    serve: Any, internet: FakeInternet
) -> None:
    internet.site("http://a.test:8080").robots("User-agent: *\nDisallow: /no\n")
    service = await serve()
    await service.get("/v1/check?url=http://a.test:8080/x")
    _, host = await service.get("/v1/hosts/a.test")
    assert (host["robots"], host["robots_status"]) == ("parsed", 200)
