"""The table of leases: every lease is reported, given back or expires, exactly once."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from gatekeeper.client.wire import LeaseReport, LeaseRequestBody
from gatekeeper.clock import VirtualClock
from gatekeeper.config import ServerConfig
from gatekeeper.decision import Reason, Verdict
from gatekeeper.sidecar.held_leases import LeaseTable
from gatekeeper.sidecar.routing import Problem
from tests.internet import FakeInternet

URL = "https://a.example/"


class ScriptedLease:
    def __init__(self) -> None:
        self.url = URL
        self.host = "a.example"
        self.told: list[dict[str, Any]] = []
        self.log: list[str] = []

    @property
    def reported(self) -> bool:
        return bool(self.told)

    def report(self, **told: Any) -> None:
        self.told.append(told)

    def renew(self, seconds: float) -> None:
        self.log.append(f"renew {seconds:g}")

    def end(self) -> None:
        self.log.append("end")

    def give_back(self) -> None:
        self.log.append("give back")


class ScriptedGate:
    def __init__(self) -> None:
        self.lease = ScriptedLease()
        self.due = asyncio.Event()
        self.due.set()
        self.left = 0

    def peek(self, url: str, **asked: Any) -> Any:
        return SimpleNamespace(verdict=Verdict.ALLOW, reason=Reason.NO_RULE)

    async def acquire(self, url: str, **wanted: Any) -> ScriptedLease:
        try:
            await self.due.wait()
        except asyncio.CancelledError:
            self.left += 1
            raise
        return self.lease


@pytest.fixture
def table(clock: VirtualClock) -> LeaseTable:
    return LeaseTable(ServerConfig(max_leases=3, max_waiting=2), clock)


@pytest.fixture
def gate() -> ScriptedGate:
    return ScriptedGate()


def wanted(**changes: Any) -> LeaseRequestBody:
    fields = {"url": URL, "wait": 0.0, "ttl": 60.0, "priority": 0, "user_agent": None} | changes
    return LeaseRequestBody(**fields)


async def held(
    table: LeaseTable, gate: Any, *, gone: bool = False, client: str = "client", **changes: Any
) -> str:
    return (await table.acquire(gate, wanted(**changes), client, lambda: gone)).id


def told(**given: Any) -> dict[str, Any]:
    """Return what the scheduler is passed for a report."""
    return msgspec.structs.asdict(LeaseReport(**given))


async def test_a_report_ends_the_lease_and_reaches_the_scheduler(
    table: LeaseTable, gate: ScriptedGate
) -> None:
    lease_id = await held(table, gate)
    table.report(lease_id, LeaseReport(status=200, elapsed=0.5))

    assert gate.lease.told == [told(status=200, elapsed=0.5)]
    assert gate.lease.log == ["renew 60", "end"]
    assert len(table) == 0


def given_back_unheard(table: LeaseTable, lease_id: str) -> None:
    with pytest.raises(Problem) as caught:
        table.give_back(lease_id)
    assert caught.value.status == 404


@pytest.mark.parametrize("waits", [False, True], ids=["before it is asked for", "while it waits"])
async def test_a_lease_id_given_back_before_its_grant_is_not_granted(
    table: LeaseTable, gate: ScriptedGate, waits: bool
) -> None:
    """The client hung up, and gave the id back on another connection, which was read first."""
    name = "made-up-by-a-client"
    if waits:
        gate.due.clear()
        asking = asyncio.ensure_future(held(table, gate, id=name, wait=9.0))
        await asyncio.sleep(0)
    given_back_unheard(table, name)
    if not waits:
        asking = asyncio.ensure_future(held(table, gate, id=name))
    gate.due.set()
    with pytest.raises(Problem) as caught:
        await asking
    assert caught.value.status == 410
    assert gate.lease.log == ["give back"]
    assert len(table) == 0


async def test_lease_ids_given_back_before_their_grant_are_bounded(
    clock: VirtualClock, gate: ScriptedGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gatekeeper.sidecar.held_leases.MAX_REMEMBERED", 3)
    table = LeaseTable(ServerConfig(), clock)
    for number in range(9):
        given_back_unheard(table, f"made-up-{number}")
    given_back_unheard(table, 65 * "x")
    for number in (6, 7, 8):
        with pytest.raises(Problem):
            await held(table, gate, id=f"made-up-{number}")
    for name in ("made-up-1", "made-up-5"):
        assert await held(table, gate, id=name) == name


async def test_a_repeated_report_is_no_error_and_ends_nothing_twice(
    table: LeaseTable, gate: ScriptedGate
) -> None:
    lease_id = await held(table, gate)
    table.report(lease_id, LeaseReport(status=200))
    table.report(lease_id, LeaseReport(status=200))

    assert gate.lease.log.count("end") == 1


@pytest.mark.parametrize("reported", [True, False])
async def test_the_ended_leases_whose_report_is_accepted_are_bounded(
    clock: VirtualClock, gate: ScriptedGate, monkeypatch: pytest.MonkeyPatch, reported: bool
) -> None:
    monkeypatch.setattr("gatekeeper.sidecar.held_leases.MAX_REMEMBERED", 3)
    table = LeaseTable(ServerConfig(), clock)
    ids = []
    for _ in range(9):
        ids.append(await held(table, gate))
        if reported:
            table.report(ids[-1], LeaseReport(status=200))
        clock.advance(61)
    assert len(table) == 0
    for lease_id in ids[6:]:
        table.report(lease_id, LeaseReport(status=200))
    for lease_id in ids[:6]:
        with pytest.raises(Problem) as caught:
            table.report(lease_id, LeaseReport(status=200))
        assert caught.value.status == 404


async def test_a_lease_whose_report_came_is_not_kept(table: LeaseTable, gate: ScriptedGate) -> None:
    lease_id = await held(table, gate)
    kept = weakref.ref(gate.lease)
    gate.lease = ScriptedLease()
    table.report(lease_id, LeaseReport(status=200))

    assert kept() is None


async def test_an_unreported_lease_ends_by_itself_and_counts_as_used(
    table: LeaseTable, gate: ScriptedGate, clock: VirtualClock
) -> None:
    await held(table, gate, ttl=60.0)
    clock.advance(59.9)
    assert len(table) == 1

    clock.advance(0.2)
    assert len(table) == 0
    assert gate.lease.log == ["renew 60", "end"]
    assert table.ended["expired"] == 1


async def test_a_report_after_the_expiry_still_reaches_the_scheduler(
    table: LeaseTable, gate: ScriptedGate, clock: VirtualClock
) -> None:
    lease_id = await held(table, gate)
    clock.advance(61)
    table.report(lease_id, LeaseReport(status=429, retry_after="120"))

    assert gate.lease.told == [told(status=429, retry_after="120")]


async def test_a_renewed_lease_lives_longer(
    table: LeaseTable, gate: ScriptedGate, clock: VirtualClock
) -> None:
    lease_id = await held(table, gate, ttl=60.0)
    clock.advance(50)
    renewed = table.renew(lease_id, None)
    clock.advance(50)

    assert len(table) == 1
    assert renewed.ttl == 60.0
    clock.advance(11)
    assert len(table) == 0


async def test_a_lease_given_back_is_not_counted_as_used(
    table: LeaseTable, gate: ScriptedGate
) -> None:
    table.give_back(await held(table, gate))

    assert gate.lease.log == ["renew 60", "give back"]
    assert {how: n for how, n in table.ended.items() if n} == {"given_back": 1}


async def test_a_client_that_hung_up_at_the_grant_has_no_lease(
    table: LeaseTable, gate: ScriptedGate
) -> None:
    with pytest.raises(ConnectionResetError):
        await held(table, gate, gone=True)

    assert gate.lease.log == ["give back"]
    assert len(table) == 0


async def test_a_client_that_hangs_up_gives_its_place_back(
    table: LeaseTable, gate: ScriptedGate
) -> None:
    gate.due.clear()
    waiter = asyncio.create_task(held(table, gate))
    await asyncio.sleep(0)
    waiter.cancel()
    await asyncio.wait([waiter])

    assert gate.left == 1
    gate.due.set()
    await held(table, gate)


@pytest.mark.parametrize(
    "act",
    [
        lambda table: table.renew("nobody's", None),
        lambda table: table.report("nobody's", LeaseReport()),
        lambda table: table.give_back("nobody's"),
    ],
    ids=["renew", "report", "give back"],
)
async def test_t20_an_unknown_id_is_404(
    table: LeaseTable, act: Callable[[LeaseTable], object]
) -> None:
    with pytest.raises(Problem) as caught:
        act(table)
    assert caught.value.status == 404


async def test_t8_leases_are_bounded(table: LeaseTable, gate: ScriptedGate) -> None:
    for client in ("client", "client", "other"):
        await held(table, gate, client=client)
    with pytest.raises(Problem) as caught:
        await held(table, gate)

    assert caught.value.status == 503
    assert caught.value.response().headers["Retry-After"] == "1"
    assert table.refused["leases"] == 1


@pytest.mark.parametrize(("most", "allowed"), [(None, 5), (2, 2), (10, 9)])
async def test_t15_one_client_may_hold_half_of_the_leases_unless_configured(
    clock: VirtualClock, gate: ScriptedGate, most: int | None, allowed: int
) -> None:
    table = LeaseTable(ServerConfig(max_leases=9, client_leases=most), clock)
    ids = [await held(table, gate) for _ in range(allowed)]
    with pytest.raises(Problem) as caught:
        await held(table, gate)
    full = allowed == 9
    assert caught.value.status == (503 if full else 429)
    assert caught.value.response().headers["Retry-After"] == "1"
    assert table.refused["client"] == (not full)
    if not full:
        assert caught.value.most == allowed
        await held(table, gate, client="another")
    for end in (table.give_back, lambda one: table.report(one, LeaseReport(status=200))):
        end(ids.pop())  # each kind of end makes room for another lease
        await held(table, gate)
    clock.advance(61.0)
    for _ in range(allowed):
        await held(table, gate)


async def test_t15_leases_granted_during_a_wait_count_for_the_client_limit(
    clock: VirtualClock, gate: ScriptedGate
) -> None:
    table = LeaseTable(ServerConfig(max_leases=9, client_leases=2), clock)
    gate.due.clear()
    waiting = [asyncio.create_task(held(table, gate, wait=9.0)) for _ in range(4)]
    for _ in range(10):
        await asyncio.sleep(0)
    gate.due.set()
    done = await asyncio.gather(*waiting, return_exceptions=True)
    refused = [one for one in done if isinstance(one, Problem)]

    assert [one.status for one in refused] == [429, 429]
    assert (len(table), gate.lease.log.count("give back")) == (2, 2)


async def test_t8_waiting_clients_are_bounded(table: LeaseTable, gate: ScriptedGate) -> None:
    gate.due.clear()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(2):
            tasks.create_task(held(table, gate))
        await asyncio.sleep(0)
        with pytest.raises(Problem):
            await held(table, gate)
        gate.due.set()
    assert table.waiters.refused == 1


async def test_t16_a_draining_lease_table_grants_nothing_and_still_takes_reports(
    table: LeaseTable, gate: ScriptedGate
) -> None:
    lease_id = await held(table, gate)
    table.drain()
    with pytest.raises(Problem):
        await held(table, gate)
    assert len(table) == 1

    table.report(lease_id, LeaseReport(status=200))
    assert len(table) == 0


async def test_closing_ends_what_is_still_held(table: LeaseTable, gate: ScriptedGate) -> None:
    await held(table, gate)
    table.close()

    assert gate.lease.log == ["renew 60", "end"]
    assert len(table) == 0


async def test_the_first_lease_waits_for_what_the_file_asks_for(
    serve: Any, internet: FakeInternet
) -> None:
    internet.site("a.test").robots("User-agent: *\nCrawl-delay: 0.1\n")
    service = await serve(pacing={"default_interval": 600.0})
    status, lease = await service.post("/v1/leases", {"url": "http://a.test/x", "wait": 30})
    assert status == 201, lease
