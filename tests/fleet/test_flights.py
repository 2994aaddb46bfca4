"""Several flights on one connection: none waits for the answer to another."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import msgspec
import pytest

from gatekeeper.errors import LedgerLost
from gatekeeper.fleet import RedisLedger, redis_ledger
from gatekeeper.fleet import store as store_module
from gatekeeper.fleet.redis_ledger import MAX_FLIGHTS
from gatekeeper.fleet.store import Flights
from gatekeeper.pacing.ledger import End, Granted, ScopeClock
from tests.fleet.conftest import (
    FleetTime,
    Join,
    flights_of,
    forget_epoch,
    lock_of,
    store_of,
    unsent,
)
from tests.fleet.proxy import Proxy
from tests.fleet.server import Server
from tests.pacing.ledger_rules import PATIENCE, Listener, granted, listen, take, wait_of
from tests.waiting_support import until


class FarMember:
    """A member behind a wire with a delay, and the state of its store."""

    def __init__(self, ledger: RedisLedger, wire: Proxy, server: Server) -> None:
        self.ledger, self.wire, self.server = ledger, wire, server

    @property
    def flights(self) -> int:
        """How many are under way."""
        return len(flights_of(self.ledger))

    def knows(self, host: str) -> bool:
        return self.server.ask("EXISTS", f"{{gatekeeper}}:s:{host}") == b":1\r\n"


@pytest.fixture
async def far(join: Join, time: FleetTime) -> AsyncIterator[FarMember]:
    await join()
    wire = Proxy(str(time.server.socket))
    await wire.open()
    ledger = RedisLedger(wire.url, clock=time.clock)
    await ledger.open()
    assert await granted(ledger, "a:0", "x")  # the script is known there
    yield FarMember(ledger, wire, time.server)
    await ledger.close()
    await wire.close()


async def test_a_call_is_sent_while_another_awaits_its_answer(far: FarMember) -> None:
    """The answers to both are lost; asking again with the same tokens returns the same ones."""
    far.wire.how = "swallow replies"
    first = asyncio.create_task(take(far.ledger, "a:1", "h"))
    await until(lambda: far.knows("h"))
    second = asyncio.create_task(take(far.ledger, "a:2", "k"))
    await until(lambda: far.knows("k"))
    assert not first.done()
    far.wire.how = "pass"
    far.wire.cut()
    for task in (first, second):
        with pytest.raises(LedgerLost):
            await task
    assert await granted(far.ledger, "a:1", "h")
    assert await granted(far.ledger, "a:2", "k")
    assert not await granted(far.ledger, "a:3", "h")
    assert far.ledger.stats().epochs == 0


async def test_flights_take_effect_in_the_order_in_which_they_left(far: FarMember) -> None:
    """Each is sent in its own turn of the loop, and all of them before the first answer."""
    far.wire.how = "hold"
    tasks = []
    for number in range(6):
        for call in (
            take(far.ledger, f"a:{number + 1}", "h", interval=0.0),
            far.ledger.end([End(f"a:{number + 1}")]),
        ):
            tasks.append(asyncio.create_task(call))
            for _ in range(3):
                await asyncio.sleep(0)
    assert not any(task.done() for task in tasks)
    assert far.flights == 12
    far.wire.how = "pass"
    far.wire.released.set()
    answers = (await asyncio.gather(*tasks))[::2]
    assert all(isinstance(answer, Granted) for answer in answers)  # each scope was free by then
    (view,) = await far.ledger.look(["h"])
    assert not view.holds


async def overtaken(far: FarMember, call: Awaitable[Any], end: End) -> Any:
    """Return the result of `call` if it arrives too late, so that the store rejects it, and is sent
    again after an end, which had a later deadline because more calls were in flight."""
    far.wire.how, far.wire.delay = "delay", 0.2
    calls: list[Awaitable[Any]] = [call, *(far.ledger.look(["other"]) for _ in range(4))]
    tasks = []
    for one in (*calls, far.ledger.end([end])):
        tasks.append(asyncio.ensure_future(one))
        for _ in range(3):  # a flight of its own
            await asyncio.sleep(0)
    assert far.flights == len(tasks)
    answers = await asyncio.gather(*tasks)
    far.wire.how = "pass"
    return answers[0]


async def test_an_end_that_overtakes_its_grant_leaves_no_hold(far: FarMember) -> None:
    """As for a lease that is cancelled immediately."""
    await overtaken(far, take(far.ledger, "a:1", "h", "all"), End("a:1", "undone"))
    for view in await far.ledger.look(["h", "all"]):
        assert (view.holds, view.waiting) == ((), 0)


async def test_an_end_that_overtakes_a_question_leaves_no_ticket(far: FarMember) -> None:
    assert await granted(far.ledger, "a:1", "h")
    answer = await overtaken(far, take(far.ledger, "a:2", "h"), End("a:2", "undone"))
    assert not isinstance(answer, Granted)
    (view,) = await far.ledger.look(["h"])
    assert (len(view.holds), view.waiting) == (1, 0)


async def test_an_end_that_overtakes_a_renewal_leaves_no_hold(far: FarMember) -> None:
    assert await granted(far.ledger, "a:1", "h")
    await overtaken(far, far.ledger.renew(["a:1"]), End("a:1"))
    (view,) = await far.ledger.look(["h"])
    assert not view.holds


@pytest.mark.parametrize("what", ["take", "renewal"])
async def test_an_end_in_the_same_flight_leaves_no_hold(far: FarMember, what: str) -> None:
    """Ends precede takes and renewals in a flight, so that slots are free for the takes."""
    if what == "renewal":
        assert await granted(far.ledger, "a:1", "h")
        calls = [far.ledger.renew(["a:1"]), far.ledger.end([End("a:1")])]
    else:
        calls = [take(far.ledger, "a:1", "h"), far.ledger.end([End("a:1", "undone")])]
    before = far.ledger.stats().calls
    await asyncio.gather(*calls)
    assert far.ledger.stats().calls - before <= 3  # including a possible heartbeat
    (view,) = await far.ledger.look(["h"])
    assert not view.holds


async def test_flights_are_bounded_and_what_comes_meanwhile_travels_together(
    far: FarMember,
) -> None:
    calls = far.ledger.stats().calls
    far.wire.how = "hold"  # however long the questions take to be asked
    tasks = []
    for number in range(4 * MAX_FLIGHTS):
        tasks.append(asyncio.create_task(take(far.ledger, f"a:n{number}", f"n{number}")))
        for _ in range(3):
            await asyncio.sleep(0)
    assert far.flights == MAX_FLIGHTS
    far.wire.how = "pass"
    far.wire.released.set()
    assert all(isinstance(answer, Granted) for answer in await asyncio.gather(*tasks))
    assert far.ledger.stats().calls - calls <= MAX_FLIGHTS + 3  # including a possible heartbeat


async def test_a_heartbeat_in_flight_delays_no_lease(join: Join) -> None:
    ledger = await join()
    async with lock_of(ledger):  # like a heartbeat that awaits its answer
        async with asyncio.timeout(PATIENCE):
            assert await granted(ledger, "a:1", "h")


async def test_grants_in_flight_are_discarded_when_a_new_epoch_begins(
    join: Join, time: FleetTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its grants were made in an earlier epoch."""
    ledger = await join()
    store, held = store_of(ledger), asyncio.Event()
    send = store.scripts

    async def late(*arguments: object) -> list[object]:
        found: list[object] = await send(*arguments)  # type: ignore[arg-type]
        await held.wait()
        return found

    monkeypatch.setattr(store, "scripts", late)
    first = asyncio.create_task(take(ledger, "a:1", "h"))
    await until(lambda: time.server.ask("EXISTS", "{gatekeeper}:s:h") == b":1\r\n")
    monkeypatch.setattr(store, "scripts", send)
    time.server_alone(3600.0)
    with pytest.raises(LedgerLost, match="clock was set"):
        await take(ledger, "a:2", "k")
    held.set()
    with pytest.raises(LedgerLost):
        await first
    (view,) = await ledger.look(["h"])
    assert not view.holds
    assert await granted(ledger, "a:1", "h")


async def test_a_member_that_recovers_waits_for_its_calls_in_flight(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer of the old connection must not be mistaken for one of the new."""
    monkeypatch.setattr(redis_ledger, "HEARTBEAT_SECONDS", 0.2)  # which notices the lost epoch
    ledger = await join()
    store, held = store_of(ledger), asyncio.Event()
    send = store.scripts

    async def late(*arguments: object) -> list[object]:
        await held.wait()
        return await send(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(store, "scripts", late)
    first = asyncio.create_task(take(ledger, "a:1", "h"))
    await until(lambda: ledger._flights.unanswered == 1)
    monkeypatch.setattr(store, "scripts", send)
    connect, connects = store.connect, list[bool]()

    async def connected(**how: bool) -> object:
        connects.append(True)
        return await connect(**how)

    monkeypatch.setattr(store, "connect", connected)
    forget_epoch(ledger)
    second = asyncio.create_task(take(ledger, "a:2", "k"))
    await until(lock_of(ledger).locked)  # the recovery has started
    for _ in range(50):
        await asyncio.sleep(0)
    assert not connects
    assert not second.done()
    held.set()
    with pytest.raises(LedgerLost):
        await first
    assert isinstance(await second, Granted)
    assert await granted(ledger, "a:1", "h")


async def test_a_hold_whose_end_is_on_its_way_is_not_renewed(join: Join) -> None:
    """A renewal that is sent again and overtaken by the end would create a hold of no one."""
    ledger = await join()
    assert await granted(ledger, "a:1", "h")
    assert ledger._renewals(["a:1"])
    ending = asyncio.create_task(ledger.end([End("a:1")]))
    await asyncio.sleep(0)
    assert not ledger._renewals(["a:1"])
    await ending


@pytest.fixture
def never_forgotten(far: FarMember, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the store knew the clock of `h`, after each script call of the member."""
    store, known = store_of(far.ledger), list[bool]()
    send = store.scripts

    async def spied(*arguments: Any) -> list[Any]:
        found = await send(*arguments)
        known.append(far.knows("h"))
        return found

    monkeypatch.setattr(store, "scripts", spied)
    return known


async def test_a_renewal_sent_before_the_end_of_its_hold_keeps_the_clock(
    far: FarMember, never_forgotten: list[bool]
) -> None:
    """The flight with the renewal waits for a recovery, meanwhile the request ends."""
    ledger = far.ledger
    assert await granted(ledger, "a:1", "h")
    await until(lambda: not far.flights)
    async with lock_of(ledger):
        forget_epoch(ledger)
        renewing = asyncio.create_task(ledger.renew(["a:1"]))
        await until(lambda: bool(far.flights) and not unsent(ledger))
        ending = asyncio.create_task(ledger.end([End("a:1")]))
        await until(lambda: unsent(ledger))
    await asyncio.gather(renewing, ending)
    assert len(never_forgotten) >= 3
    assert all(never_forgotten)


async def test_a_hold_that_ends_while_it_is_pushed_keeps_its_clock(
    far: FarMember, monkeypatch: pytest.MonkeyPatch, never_forgotten: list[bool]
) -> None:
    """After the store lost its data. Its clock did not lie ahead, so the hold alone tells of it."""
    ledger, ending = far.ledger, list[asyncio.Task[None]]()
    monkeypatch.setattr("gatekeeper.fleet.redis_ledger.PUSH_BATCH", 1)
    listen_to, execute = Listener(), ledger._execute
    monkeypatch.setattr(listen_to, "clocks", lambda: [ScopeClock("known", 5.0, 60.0)])
    ledger.listen("a", listen_to)
    await ledger.end([End("a:0")])
    assert await granted(ledger, "a:1", "h")

    async def pushed(operations: list[Any], epoch: str = "") -> list[Any]:
        found = await execute(operations, epoch)
        if operations and operations[0][0] == "c":
            ending.append(asyncio.create_task(ledger.end([End("a:1")])))
            await until(lambda: unsent(ledger))
            never_forgotten.clear()
        return found

    monkeypatch.setattr(ledger, "_execute", pushed)
    far.server.ask("FLUSHALL")
    with contextlib.suppress(LedgerLost):
        await take(ledger, "a:2", "k")
    await take(ledger, "a:2", "k")
    await asyncio.gather(*ending)
    assert ending
    assert all(never_forgotten)


def test_a_call_is_sent_earlier_by_the_shortest_round_trip() -> None:
    air = Flights()
    assert air.send_delay(2.0) == 2.0
    air.shortest_trips = [0.5, 4.0]  # the shortest one errs on the slow side
    assert air.send_delay(2.0) == 1.5
    assert air.send_delay(0.2) == 0.0


async def test_a_waiting_member_asks_a_round_trip_before_the_scope_is_due(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the question arrives at the time that the store returned."""
    one, other = await join(), await join()
    listener = Listener()
    await listen(other, "b", listener)
    assert await granted(one, "a:1", "h", interval=30.0)
    await one.end([End("a:1")])
    monkeypatch.setattr(other._flights, "send_delay", lambda seconds: seconds / 2)
    assert 14.0 < await wait_of(other, "b:1", "h", interval=30.0) <= 15.0
    other._receive("{gatekeeper}:m:b", msgspec.msgpack.encode(("b:1", 2_000_000)))
    assert listener.opened_for == [("b:1", 1.0)]


async def test_a_refused_command_does_not_fail_the_others_of_its_flight(join: Join) -> None:
    """And a connection that was closed returns no answers."""
    ledger = await join()
    store = store_of(ledger)
    line = store._connection
    assert line is not None
    good, bad, more = await line.ask([("ECHO", "1"), ("NONSENSE",), ("ECHO", "2")])
    assert (good, more) == (b"1", b"2")
    assert "unknown command" in str(bad)
    calls = [asyncio.create_task(store.run("ECHO", str(n))) for n in range(3)]
    await asyncio.sleep(0)
    await store.hang_up()
    for call in calls:
        with pytest.raises(LedgerLost):
            await call
    with pytest.raises(LedgerLost, match="not connected"):
        await store.run("ECHO", "4")


async def test_a_member_that_closes_during_a_heartbeat_leaves_the_fleet(
    join: Join, time: FleetTime
) -> None:
    """It leaves the fleet all the same: a cancellation that redis-py's deadlines swallow would keep
    the heartbeat running for ever, and one that closes the connection would prevent leaving."""
    for turns in range(12):
        ledger = await join(wait=False)
        ledger._heartbeat_now.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        async with asyncio.timeout(PATIENCE):
            await ledger.close()
        assert time.server.ask("ZCARD", "{gatekeeper}:members") == b":0\r\n"


@pytest.mark.parametrize(
    "refusal",
    [
        "OOM command not allowed when used memory > 'maxmemory'.",
        "BUSY Redis is busy running a script.",
        "LOADING Redis is loading the dataset in memory",
        "READONLY You can't write against a read only replica.",
        "MISCONF Redis is configured to save RDB snapshots, but it can't.",
        "NOREPLICAS Not enough good replicas to write.",
        "CLUSTERDOWN The cluster is down",
        "MOVED 3999 127.0.0.1:1",
        "NOAUTH Authentication required.",
    ],
)
async def test_a_store_that_refuses_is_lost_and_comes_back_by_itself(
    far: FarMember,
    time: FleetTime,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    refusal: str,
) -> None:
    """Whatever the error: one line in the log with the reason, and one when the store is back."""
    monkeypatch.setattr(store_module, "POLL_SECONDS", 5.0)  # no ping, which would be refused
    caplog.set_level(logging.WARNING, "gatekeeper.fleet")
    listener = Listener()
    await listen(far.ledger, "a", listener)
    far.wire.refusal = refusal
    for _ in range(4):
        with pytest.raises(LedgerLost):
            await take(far.ledger, "a:1", "h")
        await time.tick(0.6)
    assert far.ledger.state == "lost"
    assert not far.ledger.ready
    assert listener.losses == [True]
    far.wire.refusal = ""
    assert await granted(far.ledger, "a:1", "h")
    assert far.ledger.state == "connected"
    assert listener.losses == [True, False]
    lost, back = (record.getMessage() for record in caplog.records)
    assert "no leases are granted" in lost
    assert refusal.rsplit(maxsplit=1)[-1].strip(".") in lost or "No connection" in lost, lost
    assert "is back after" in back
