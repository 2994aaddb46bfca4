"""Hosts at one address share its clock if `pacing.address_interval` is set."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections import Counter

import aiohttp
import pytest
from aiohttp.abc import AbstractResolver, ResolveResult

from gatekeeper import (
    Decision,
    Deferred,
    Gatekeeper,
    LeaseTimeout,
    PoliteQueue,
    Reason,
    Verdict,
    polite_session,
)
from gatekeeper.clock import VirtualClock
from gatekeeper.config import Config
from gatekeeper.fetching.guard import ANSWER_SECONDS, HostAddresses
from gatekeeper.session import session_gate
from tests.gate_support import open_config
from tests.internet import Fail, FakeInternet, Page
from tests.politeness.conftest import MakeGate
from tests.politeness.crawling import visit
from tests.politeness.world import AGENT

EPSILON = 1e-6
PACING = {"address_interval": 5.0, "default_interval": 0.0}


def starts(net: FakeInternet) -> list[float]:
    return [request.at for request in net.requests]


def gaps(net: FakeInternet) -> list[float]:
    at = starts(net)
    return [after - before for before, after in itertools.pairwise(at)]


async def test_two_hosts_of_one_address_share_its_interval_robots_txt_included(
    internet: FakeInternet, clock: VirtualClock
) -> None:
    for name in ("a.test", "b.test"):
        internet.site(name).robots("").otherwise("x")

    async def run() -> None:
        async with polite_session(
            user_agent=AGENT,
            config=open_config(pacing=PACING),
            resolver=internet.resolver,
            clock=clock,
        ) as session:
            for url in ("http://a.test/1", "http://b.test/1", "http://a.test/2", "http://b.test/2"):
                async with session.get(url) as response:
                    await response.read()

    await internet.drive(run())
    assert len(internet.requests) == 6
    assert all(gap >= 5.0 - EPSILON for gap in gaps(internet))


async def test_hosts_of_one_address_share_its_interval_and_other_hosts_go_ahead(
    internet: FakeInternet, make_gate: MakeGate
) -> None:
    for name in ("a.test", "b.test", "c.test"):
        internet.site(name).robots("").otherwise("x")
    internet.site("far.test", address=internet.address()).robots("").otherwise("x")
    log: list[tuple[str, float]] = []

    async def run() -> None:
        async with make_gate(pacing=PACING) as gate, asyncio.TaskGroup() as tasks:
            for name in ("a.test", "b.test", "c.test", "far.test"):
                tasks.create_task(visit(gate, f"http://{name}/", log))

    await internet.drive(run())
    near = sorted(
        [r.at for r in internet.requests if r.host != "far.test"]
        + [at for url, at in log if "far.test" not in url]
    )
    assert len(near) == 6
    assert all(b - a >= 5.0 - EPSILON for a, b in itertools.pairwise(near))
    assert dict(log)["http://far.test/"] < 10.0


async def test_a_literal_address_shares_the_clock_of_its_names_without_a_look_up(
    internet: FakeInternet, clock: VirtualClock, make_gate: MakeGate
) -> None:
    internet.site("a.test").robots("")

    host = [{"match": "127.0.0.1", "robots": "allow"}]

    async def run() -> None:
        async with make_gate(pacing=PACING, host=host) as gate:
            async with gate.lease("http://a.test/") as lease:
                lease.report(status=200)
            with pytest.raises(LeaseTimeout):
                await gate.acquire("http://127.0.0.1/", timeout=1.0)

    await internet.drive(run())
    assert {query.name for query in internet.resolver.queries} == {"a.test"}


async def test_a_lease_waits_for_the_clocks_of_all_addresses_of_its_host(
    internet: FakeInternet, make_gate: MakeGate
) -> None:
    first, second = internet.address(), internet.address()
    internet.site("one.test", address=first).robots("")
    internet.site("two.test", address=second).robots("")
    internet.site("both.test", address=[first, second]).robots("")

    async def run() -> set[str]:
        async with make_gate(pacing=PACING) as gate:
            async with gate.lease("http://both.test/") as lease:
                lease.report(status=200)
            for name in ("one.test", "two.test"):
                with pytest.raises(LeaseTimeout):
                    await gate.acquire(f"http://{name}/", timeout=1.0)
            return {view.scope for view in await gate.why("both.test")}

    scopes = await internet.drive(run())
    assert {f"address:{first}", f"address:{second}"} < scopes


async def test_a_connection_uses_the_address_looked_up_for_pacing(
    internet: FakeInternet, make_gate: MakeGate
) -> None:
    internet.site("a.test").robots("").otherwise("x")

    async def run() -> None:
        async with make_gate(pacing=PACING) as gate:
            await gate.check("http://a.test/")

    await internet.drive(run())
    assert Counter(query.name for query in internet.resolver.queries) == {"a.test": 1}


async def test_a_host_that_moved_shares_the_clock_of_its_new_address(
    internet: FakeInternet, clock: VirtualClock, make_gate: MakeGate
) -> None:
    old, new = internet.address(), internet.address()
    internet.site("a.test", address=old).robots("")
    internet.site("b.test", address=new).robots("")

    async def run() -> set[str]:
        async with make_gate(pacing=PACING) as gate:
            async with gate.lease("http://a.test/") as lease:
                lease.report(status=200)
            internet.dns("a.test", new)
            await clock.sleep(ANSWER_SECONDS + 1.0)
            async with gate.lease("http://a.test/") as lease:
                lease.report(status=200)
            with pytest.raises(LeaseTimeout):
                await gate.acquire("http://b.test/", timeout=1.0)
            return {view.scope for view in await gate.why("a.test")}

    scopes = await internet.drive(run())
    assert f"address:{new}" in scopes
    assert f"address:{old}" not in scopes


async def test_two_hosts_that_complain_block_their_address(
    internet: FakeInternet, clock: VirtualClock, make_gate: MakeGate
) -> None:
    for name in ("a.test", "b.test", "c.test"):
        internet.site(name).robots("")

    async def run() -> list[str]:
        async with make_gate(pacing={**PACING, "address_interval": 0.0}) as gate:
            for name in ("a.test", "b.test", "c.test"):
                await gate.check(f"http://{name}/")
            for name in ("a.test", "b.test"):
                async with gate.lease(f"http://{name}/") as lease:
                    lease.report(status=429, retry_after="120")
            with pytest.raises(LeaseTimeout):
                await gate.acquire("http://c.test/", timeout=60.0)
            return [str(view) for view in await gate.why("c.test")]

    views = await internet.drive(run())
    assert any("address:127.0.0.1: block: b.test: 429, Retry-After 120" in view for view in views)


@pytest.mark.parametrize("fail", [Fail.NXDOMAIN, Fail.SERVFAIL, Fail.NEVER])
async def test_a_name_without_an_address_is_reported_by_its_fetch(
    internet: FakeInternet, make_gate: MakeGate, fail: Fail
) -> None:
    internet.dns("a.test", fail)

    async def run() -> tuple[Verdict, Reason]:
        async with make_gate(pacing=PACING) as gate:
            decision = await gate.check("http://a.test/")
            return decision.verdict, decision.reason

    verdict, reason = await internet.drive(run())
    assert verdict is Verdict.DEFER
    assert reason in {
        Reason.DNS_NXDOMAIN,
        Reason.DNS_FAILURE,
        Reason.CONNECT_FAILED,
        Reason.TIMEOUT,
    }


async def test_a_callers_session_is_paced_by_the_given_resolver(
    internet: FakeInternet, clock: VirtualClock
) -> None:
    for name in ("a.test", "b.test"):
        internet.site(name).robots("")

    async def run() -> None:
        connector = aiohttp.TCPConnector(resolver=internet.resolver)
        async with (
            aiohttp.ClientSession(connector=connector) as session,
            Gatekeeper(
                AGENT,
                config=open_config(pacing=PACING),
                session=session,
                resolver=internet.resolver,
                clock=clock,
            ) as gate,
        ):
            await asyncio.gather(gate.check("http://a.test/"), gate.check("http://b.test/"))

    await internet.drive(run())
    assert gaps(internet)[0] >= 5.0 - EPSILON


async def test_a_task_does_not_wait_for_an_address_that_it_holds_itself(
    internet: FakeInternet, clock: VirtualClock, make_gate: MakeGate
) -> None:
    for name in ("a.test", "b.test"):
        internet.site(name).robots("")

    async def run() -> None:
        async with make_gate(pacing=PACING) as gate, gate.lease("http://a.test/x"):
            decision = await gate.check("http://b.test/")
            assert decision.reason is Reason.OWN_LEASE
            many = [each async for each in gate.check_many(["http://b.test/", "no url"])]
            assert [each.reason for each in many] == [Reason.OWN_LEASE, Reason.INVALID_URL]
            for ask in (gate.robots, gate.refresh, gate.acquire):
                with pytest.raises(LeaseTimeout, match=r"http://a\.test/x"):
                    await ask("http://b.test/")

    await internet.drive(run(), limit=60.0)


async def test_a_queue_keeps_to_the_interval_of_an_address(
    internet: FakeInternet, clock: VirtualClock, make_gate: MakeGate
) -> None:
    for name in ("a.test", "b.test"):
        internet.site(name).robots(Page(""))
    at: list[float] = []

    async def run() -> None:
        async with make_gate(pacing=PACING) as gate, PoliteQueue(gate) as queue:
            for number in range(3):
                for name in ("a.test", "b.test"):
                    await queue.put(f"http://{name}/{number}")
            for _ in range(6):
                async with await queue.get() as lease:
                    at.append(clock.monotonic())
                    lease.report(status=200)

    await internet.drive(run())
    assert all(b - a >= 5.0 - EPSILON for a, b in itertools.pairwise(at))


async def test_one_look_up_serves_all_callers_though_the_first_is_cancelled(
    internet: FakeInternet, clock: VirtualClock
) -> None:
    internet.site("a.test")
    places = HostAddresses(Config(), clock, None, internet.resolver)

    async def run() -> None:
        internet.resolver.delay = (1.0, 1.0)
        asked = [asyncio.create_task(places.scopes("a.test", 80)) for _ in range(20)]
        await clock.sleep(0.5)
        asked[0].cancel()
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert isinstance(found[0], asyncio.CancelledError)
        assert set(found[1:]) == {("address:127.0.0.1",)}
        await places.close()

    await internet.drive(run())
    assert len(internet.resolver.queries) == 2


async def test_a_mapped_address_shares_the_clock_of_the_ipv4_address_within(
    clock: VirtualClock,
) -> None:
    places = HostAddresses(Config(), clock, None, None)
    assert await places.scopes("::ffff:7f00:1", 80) == ("address:127.0.0.1",)
    assert await places.scopes("2001:db8::1", 80) == ("address:2001:db8::1",)


# -- look-ups that fail


class Flaky(AbstractResolver):
    """A resolver that fails the first lookups of each name, and then answers."""

    def __init__(self, inner: AbstractResolver, failures: int, error: Exception) -> None:
        self.inner = inner
        self.left: Counter[str] = Counter()
        self.failures = failures
        self.error = error

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        self.left[host] += 1
        if self.left[host] <= self.failures:
            raise self.error
        return await self.inner.resolve(host, port, family)

    async def close(self) -> None:
        """Nothing to close."""


TWELVE = [f"h{number}.test" for number in range(12)]
ERRORS = [
    socket.gaierror(socket.EAI_AGAIN, "try again"),
    socket.gaierror(socket.EAI_NONAME, "no such name"),
    TimeoutError(),
    OSError(5, "broken"),
    RuntimeError("not even an OSError"),
]


async def visit_anyhow(gate: Gatekeeper, host: str, session: aiohttp.ClientSession) -> None:
    """Fetch a page of each host, retrying until it succeeds."""
    while True:
        try:
            async with session.get(f"http://{host}/x") as response:
                await response.read()
                return
        except Deferred as refusal:
            at = refusal.retry_at
            assert at is not None
            await gate.parts.clock.sleep(max(0.5, at.timestamp() - gate.parts.clock.wall()))
        except aiohttp.ClientError:
            await gate.parts.clock.sleep(2.0)


@pytest.mark.parametrize("error", ERRORS, ids=repr)
@pytest.mark.parametrize("failures", [1, 2, 3])
async def test_a_name_that_resolves_only_at_the_connection_shares_the_clock_of_its_address(
    internet: FakeInternet, clock: VirtualClock, error: Exception, failures: int
) -> None:
    for name in TWELVE:
        internet.site(name).robots("").page("/x")

    async def run() -> None:
        async with polite_session(
            AGENT,
            config=open_config(pacing=PACING),
            resolver=Flaky(internet.resolver, failures, error),
            clock=clock,
        ) as session:
            gate = session_gate(session)
            async with asyncio.TaskGroup() as tasks:
                for name in TWELVE:
                    tasks.create_task(visit_anyhow(gate, name, session))

    await internet.drive(run(), limit=10 * 86_400.0)
    assert {request.path for request in internet.requests} == {"/robots.txt", "/x"}
    assert len(internet.requests) == 24
    assert min(gaps(internet)) >= 5.0 - EPSILON


async def test_names_that_only_the_callers_session_can_resolve_share_one_clock(
    internet: FakeInternet, clock: VirtualClock
) -> None:
    for name in TWELVE:
        internet.site(name).robots("")

    async def run() -> None:
        connector = aiohttp.TCPConnector(resolver=internet.resolver)
        async with (
            aiohttp.ClientSession(connector=connector) as session,
            Gatekeeper(
                AGENT,
                config=open_config(pacing=PACING),
                session=session,
                resolver=Flaky(internet.resolver, 10**9, ERRORS[0]),
                clock=clock,
            ) as gate,
        ):
            await asyncio.gather(*(gate.check(f"http://{name}/") for name in TWELVE))

    await internet.drive(run())
    assert len(internet.requests) == 12
    assert min(gaps(internet)) >= 5.0 - EPSILON


async def test_a_name_that_resolves_to_refused_addresses_is_refused_and_not_unresolved(
    internet: FakeInternet, make_gate: MakeGate
) -> None:
    internet.dns("a.test", "10.1.2.3")

    async def run() -> Decision:
        async with make_gate(pacing=PACING, guard={"allow": ["127.0.0.0/8"]}) as gate:
            return await gate.check("http://a.test/")

    decision = await internet.drive(run())
    assert decision.reason is Reason.BLOCKED
