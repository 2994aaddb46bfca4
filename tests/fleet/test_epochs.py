"""Stores that lost their data, had their clock set, or were replaced: quarantine and pushes."""

from __future__ import annotations

import contextlib
import logging

import pytest

from gatekeeper.errors import LedgerLost
from gatekeeper.fleet import RedisLedger
from gatekeeper.fleet.members import ALL, NOT_ALL, MemberList
from gatekeeper.pacing.ledger import End, Granted, Report, ScopeClock
from gatekeeper.testing.virtual_clock import VirtualClock
from tests.fleet.conftest import (
    FleetTime,
    Join,
    again,
    cut_off,
    forget_epoch,
    heartbeat,
    silence,
    store_of,
)
from tests.fleet.server import Server
from tests.pacing.ledger_rules import Listener, granted, near, take, wait_of
from tests.waiting_support import until

HOLD = 20.0


class Knowing(Listener):
    """A listener that knows some clocks."""

    def __init__(self, *clocks: ScopeClock) -> None:
        super().__init__()
        self.known = list(clocks)

    def clocks(self) -> list[ScopeClock]:
        return self.known


async def test_a_member_that_starts_on_an_empty_store_waits(join: Join, time: FleetTime) -> None:
    ledger = await join(wait=False)
    assert near(await wait_of(ledger, "a:1", "h"), 1.5 * HOLD, 1.0)
    assert ledger.state == "recovering"
    await time.tick(1.5 * HOLD)
    assert await granted(ledger, "a:1", "h")
    assert ledger.state == "connected"
    # An interval longer than the quarantine counts from when the last hold of earlier members, if
    # there were any, expired.
    assert near(await wait_of(ledger, "a:2", "slow", interval=60.0), 50.0, 1.0)


@pytest.mark.parametrize(("hold", "quarantine"), [(1.0, 4.0), (2.0, 4.0), (3.0, 4.5), (20.0, 30.0)])
async def test_a_quarantine_is_not_over_before_lists_of_members_count_no_more(
    join: Join, hold: float, quarantine: float
) -> None:
    """Otherwise a member with an older list could end the next quarantine without members that
    joined in this epoch."""
    ledger = await join(wait=False, hold=hold)
    assert near(await wait_of(ledger, "a:1", "h"), quarantine, 0.9)
    members = MemberList("a", clock := VirtualClock(), hold)
    now = clock.monotonic()
    members.update("old", now, now, (b"old", 0, 10**6, [b"a", b"1"], 0, [], 0, -1))
    assert members.completeness("new", lived=True) == ALL
    clock.advance(quarantine + 0.001)
    assert members.completeness("new", lived=True) == NOT_ALL


async def test_a_member_that_joins_a_running_fleet_does_not_wait(
    join: Join, time: FleetTime
) -> None:
    await join()
    other = await join()
    assert await granted(other, "b:1", "h")
    assert other.stats().members == 2


async def test_a_gate_that_joins_pushes_the_clocks_of_its_state_file(
    join: Join, server: Server, time: FleetTime
) -> None:
    """Otherwise the other members would ask a host again before its interval is over. Pauses stay
    its own, since an operator may have resumed the host meanwhile."""
    one = await join()
    newcomer = RedisLedger(server.url, clock=time.clock)
    clocks = (
        ScopeClock("known", 10.0, 60.0),
        ScopeClock("blocked", None, 0.0, 90.0, "429"),
        ScopeClock("paused", 10.0, 60.0, paused=True),
    )
    newcomer.listen("n", Knowing(*clocks))
    async with newcomer:
        assert near(await wait_of(one, "a:1", "known"), 50.0, 1.0)
        assert near(await wait_of(one, "a:2", "blocked"), 90.0, 1.0)
        assert near(await wait_of(one, "a:3", "paused"), 50.0, 1.0)
        assert await granted(one, "a:4", "other")


async def test_flushall_with_all_members_present_ends_the_quarantine_early(
    join: Join, server: Server
) -> None:
    """The quarantine ends as soon as each member has pushed its clocks, blocks and holds."""
    one, other = await join(), await join()
    one.listen("a", Knowing(ScopeClock("known", 10.0, 60.0)))
    other.listen("b", Knowing(ScopeClock("blocked", None, 0.0, 90.0, "429")))
    assert await granted(other, "b:1", "held")
    server.ask("FLUSHALL")
    assert (await again(one, "a:1", "free")).seconds > 1.0  # the other has not pushed yet
    await again(other, "b:2", "held")
    assert await granted(one, "a:1", "free")
    assert not await granted(one, "a:2", "held")
    assert near(await wait_of(one, "a:3", "known", interval=1.0), 50.0, 1.0)
    assert near(await wait_of(one, "a:4", "blocked"), 90.0, 1.0)
    assert one.state == "connected"


async def test_a_newcomer_after_flushall_waits_for_the_longest_hold(
    join: Join, server: Server, time: FleetTime
) -> None:
    """It knows no other member, so it must wait for as long as a hold could last."""
    one = await join()
    assert await granted(one, "a:1", "h")
    server.ask("FLUSHALL")
    await time.tick(0.0)
    newcomer = RedisLedger(server.url, clock=time.clock)
    async with newcomer:
        assert near(await wait_of(newcomer, "n:1", "x"), 1.5 * HOLD, 3.0)
        # Then an earlier member returns that knows no other one: its push ends the quarantine.
        await again(one, "a:2", "h")
        assert await granted(newcomer, "n:1", "x")
        assert not await granted(newcomer, "n:2", "h")


async def test_a_member_that_does_not_come_back_is_waited_for(
    join: Join, server: Server, time: FleetTime
) -> None:
    """A member stopped with an unsent grant over a FLUSHALL."""
    one, stopped = await join(), await join()
    assert await granted(stopped, "s:1", "h")
    sent = time.clock.monotonic()
    await heartbeat(one)  # a heartbeat, so that it knows the other member
    await silence(stopped)
    server.ask("FLUSHALL")
    left = (await again(one, "a:1", "h")).seconds
    assert left > 1.5 * HOLD - 2.0
    await time.tick(left)
    answer = await take(one, "a:1", "h")
    # Longer than the hold of the stopped member, which then discards its grant.
    assert time.clock.monotonic() - sent > HOLD
    assert isinstance(answer, Granted)


async def test_clocks_that_a_member_moved_to_its_storage_hold_after_a_loss(
    join: Join, server: Server, time: FleetTime
) -> None:
    """A member moved some clocks to its storage, so every scope counts as requested now."""
    one = await join()
    one.listen("a", Knowing(ScopeClock(""), ScopeClock("known", 5.0, 60.0)))
    await heartbeat(one)
    server.ask("FLUSHALL")
    assert near((await again(one, "a:1", "other", 300.0)).seconds, 300.0, 2.0)
    assert not await granted(one, "a:2", "known")
    await time.tick(1.0)
    assert await granted(one, "a:3", "quick")


async def test_an_unused_hold_pushed_first_does_not_undo_the_clock_of_another_member(
    join: Join, server: Server
) -> None:
    """B was granted a start with the interval that it knew; A knows a longer one. The store loses
    its data, B pushes its hold, A its clock, and B gives the hold back."""
    one, other = await join(), await join()
    one.listen("a", Knowing(ScopeClock("h", 5.0, 60.0)))
    await heartbeat(one)
    assert await granted(other, "b:1", "h")
    server.ask("FLUSHALL")
    await again(other, "b:2", "x")
    with contextlib.suppress(LedgerLost):
        await take(one, "a:1", "x")
    await one.head([])
    assert await granted(one, "a:2", "y")
    await other.end([End("b:1", "undone")])
    assert near(await wait_of(one, "a:3", "h"), 55.0, 2.0)


async def test_the_long_interval_of_a_dead_member_holds_after_a_loss(
    join: Join, server: Server, time: FleetTime
) -> None:
    """No remaining member has its clock, but each of them knows the site's interval."""
    one, dead = await join(), await join()
    assert await granted(dead, "d:1", "slow", interval=120.0)
    await dead.head(["d:1"])
    await heartbeat(one)
    await silence(dead)
    server.ask("FLUSHALL")
    left = (await again(one, "a:1", "slow", 120.0)).seconds
    await time.tick(left)
    assert near(await wait_of(one, "a:1", "slow", interval=120.0), 110.0, 2.0)


async def test_a_dead_members_long_interval_outlasts_a_second_loss(
    join: Join, server: Server, time: FleetTime
) -> None:
    """The remaining members remember that a member has left."""
    one, dead = await join(), await join()
    assert await granted(dead, "d:1", "slow", interval=120.0)
    await heartbeat(one)
    await cut_off(dead)
    server.ask("FLUSHALL")
    await time.tick((await again(one, "a:1", "slow", 120.0)).seconds)
    await heartbeat(one)
    server.ask("FLUSHALL")
    assert near((await again(one, "a:1", "slow", 120.0)).seconds, 110.0, 2.0)
    assert await granted(one, "a:2", "quick")


@pytest.mark.parametrize("how", ["signs off", "dies, and is forgotten"])
async def test_clocks_of_a_member_that_left_hold_after_the_store_is_lost(
    join: Join, server: Server, time: FleetTime, how: str
) -> None:
    """Only the store had them, so every scope counts as requested when the member left."""
    one, other = await join(), await join()
    assert await granted(other, "b:1", "slow", interval=300.0)
    await other.end([End("b:1")])
    if how == "signs off":
        await other.close()
    else:
        await cut_off(other)
        await time.tick(100.0)
    await heartbeat(one)
    assert one.stats().members == 1
    server.ask("FLUSHALL")
    assert near((await again(one, "a:1", "slow", 300.0)).seconds, 300.0, 2.0)
    await time.tick(1.0)
    assert await granted(one, "a:2", "quick")


async def test_a_clock_of_the_server_that_is_set_begins_a_new_epoch(
    join: Join, server: Server, time: FleetTime, caplog: pytest.LogCaptureFixture
) -> None:
    """If set forward, holds would expire early; if set back, clocks would lie far in the future."""
    caplog.set_level(logging.WARNING)
    for by in (3600.0, -3600.0):
        ledger = await join() if by > 0 else ledger  # noqa: F821
        token = f"a:{by}"
        assert await granted(ledger, token, f"h{by}")
        epochs = ledger.stats().epochs
        time.server_alone(by)
        with pytest.raises(LedgerLost, match="clock was set"):
            await take(ledger, f"b:{by}", f"h{by}")
        # The only member was there before: it pushes immediately, and its hold is known.
        assert not await granted(ledger, f"b:{by}", f"h{by}")
        assert await granted(ledger, f"c:{by}", f"other{by}")
        await ledger.end([End(token), End(f"c:{by}")])
        assert near(await wait_of(ledger, f"b:{by}", f"h{by}"), 1.0)
        assert ledger.stats().epochs == epochs + 1
    assert "clock was set" in caplog.text


async def test_a_block_outlasts_a_clock_set_back_by_its_own_length_at_most(
    join: Join, time: FleetTime
) -> None:
    ledger = await join()
    await ledger.block([Report("h", 30.0, "429")])
    time.server_alone(-3600.0)
    with pytest.raises(LedgerLost):
        await take(ledger, "a:1", "h")
    assert 29.0 < (await again(ledger, "a:1", "h")).seconds <= 30.0


async def test_script_flush_loses_nothing(join: Join, server: Server) -> None:
    ledger = await join()
    assert await granted(ledger, "a:1", "h")
    server.ask("SCRIPT", "FLUSH")
    assert not await granted(ledger, "a:2", "h")
    assert ledger.stats().failures == 0


async def test_a_cut_connection_begins_no_new_epoch(join: Join, server: Server) -> None:
    ledger = await join()
    assert await granted(ledger, "a:1", "h")
    epochs = ledger.stats().epochs
    server.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    with pytest.raises(LedgerLost):
        await take(ledger, "a:2", "x")
    assert await granted(ledger, "a:2", "x")
    assert not await granted(ledger, "a:3", "h")
    assert ledger.stats().epochs == epochs


async def test_a_store_that_comes_back_empty_gets_what_its_members_know(time: FleetTime) -> None:
    """SIGKILL without persistence: every earlier member pushes, then the quarantine ends."""
    server = Server()
    server.start()
    try:
        listener = Knowing(ScopeClock("known", 1.0, 60.0))
        ledger = RedisLedger(server.url, clock=time.clock)
        ledger.listen("a", listener)
        await ledger.open()
        server.ask("SET", "{shift}", "0")
        time.server = server
        await time.tick(1000.0)
        await heartbeat(ledger)
        assert await granted(ledger, "a:1", "h")
        server.kill()
        with pytest.raises(LedgerLost):
            await take(ledger, "a:2", "x")
        time.clock.by += 1.1
        with pytest.raises(LedgerLost):
            await take(ledger, "a:2", "x")
        assert ledger.state == "lost"
        assert not ledger.ready
        assert listener.losses == [True]
        server.start()
        server.ask("SET", "{shift}", str(round(time.clock.by * 1e6)))
        await until(lambda: listener.losses == [True, False])
        assert ledger.state == "connected"
        assert await granted(ledger, "a:2", "x")
        assert not await granted(ledger, "a:3", "h")
        assert not await granted(ledger, "a:4", "known")
        await ledger.close()
    finally:
        server.close()


async def test_without_the_store_each_goes_on_with_hosts_of_its_own(
    time: FleetTime,
) -> None:
    """when_lost = "divide": each host is requested by exactly one member, after two heartbeats."""
    from gatekeeper.config import FleetConfig

    server = Server()
    server.start()
    try:
        made = []
        for owner in "ab":
            ledger = RedisLedger(
                server.url, clock=time.clock, config=FleetConfig(when_lost="divide")
            )
            ledger.listen(owner, Listener())
            await ledger.open()
            made.append(ledger)
        await heartbeat(made[0])
        server.kill()
        for ledger in made:
            for _ in range(3):
                time.clock.by += 1.0
                try:
                    await take(ledger, "x:1", "x")
                except LedgerLost:
                    continue
            assert ledger.stats().dividing
            assert ledger.ready
        hosts = [f"h{number}" for number in range(40)]
        for owner, ledger in zip("ab", made, strict=True):
            for host in hosts:
                assert not await granted(ledger, f"{owner}:{host}", host)
        time.clock.by += 6.0
        owners = {
            host: [
                owner
                for owner, ledger in zip("ab", made, strict=True)
                if await granted(ledger, f"{owner}:{host}", host)
            ]
            for host in hosts
        }
        assert all(len(found) == 1 for found in owners.values())
        assert {found[0] for found in owners.values()} == {"a", "b"}
        for ledger in made:
            await ledger.close()
    finally:
        server.close()


async def test_a_member_that_was_cut_off_does_not_end_a_quarantine_for_unknown_members(
    join: Join, server: Server, time: FleetTime
) -> None:
    """A was alone, and is cut off. C joins, does not wait for a member that is silent for so long,
    is granted a start and stops. The store is emptied. A is the first to return, and knows only
    itself."""
    a = await join()
    await heartbeat(a)
    assert await granted(a, "a:1", "other")
    await cut_off(a)
    await time.tick(1.5 * HOLD)
    c = await join()
    assert await granted(c, "c:1", "h")
    await cut_off(c)
    server.ask("FLUSHALL")
    left = (await again(a, "a:2", "h")).seconds
    assert left > HOLD
    await time.tick(left)
    assert await granted(a, "a:2", "h", interval=0.0)  # the grant of C has expired


async def test_a_newcomer_is_granted_nothing_while_a_member_may_end_a_quarantine_without_it(
    join: Join, server: Server, time: FleetTime
) -> None:
    """A is cut off for a shorter time, so its list is valid, and C, which it lacks, must wait."""
    a = await join()
    await heartbeat(a)
    await cut_off(a)
    await time.tick(0.5 * HOLD)
    c = await join()
    assert c.state == "recovering"
    assert not await granted(c, "c:1", "h")
    await cut_off(c)
    server.ask("FLUSHALL")
    with contextlib.suppress(LedgerLost):
        await take(a, "a:1", "h")
    assert await granted(a, "a:1", "h")  # immediately, since A knows only itself


async def test_a_newcomer_waits_until_each_member_has_read_a_list_with_it(
    join: Join, server: Server
) -> None:
    """A later heartbeat of the other member is not enough, since the response may get lost."""
    one = await join()
    await silence(one)
    newcomer = await join()
    assert newcomer.state == "recovering"
    await heartbeat(one)
    await heartbeat(newcomer)
    assert newcomer.state == "recovering"
    await heartbeat(one)  # this heartbeat shows that it has read the last list
    await heartbeat(newcomer)
    assert newcomer.state == "connected"
    assert await granted(newcomer, "n:1", "h")


async def test_a_newcomer_need_not_wait_for_one_that_is_silent_beside_one_that_lives(
    join: Join, server: Server
) -> None:
    """A is cut off, and its list is valid. B is alive, and A knows B; so if the store loses its
    data, A waits for B, and the push of B names C."""
    a, b = await join(), await join()
    await heartbeat(a)
    await cut_off(a)
    c = await join()
    for _ in range(2):  # B reads a list with C, and then shows that it did
        await heartbeat(b)
    await heartbeat(c)
    assert await granted(c, "c:1", "h")
    await cut_off(c)
    server.ask("FLUSHALL")
    assert (await again(a, "a:1", "x")).seconds > HOLD
    assert (await again(b, "b:1", "x")).seconds > HOLD
    for _ in range(2):  # the first call finds out that there is no connection
        with contextlib.suppress(LedgerLost):
            await take(c, "c:2", "z")
    assert await granted(a, "a:2", "y")
    assert not await granted(a, "a:3", "h")


async def test_a_newcomer_does_not_count_another_newcomer_that_no_member_knows(join: Join) -> None:
    """A is cut off. B and C join, and read lists with each other: A would wait for neither."""
    a = await join()
    await cut_off(a)
    b, c = await join(), await join()
    for _ in range(3):
        await heartbeat(b, c)
    assert b.state == c.state == "recovering"


async def test_the_member_list_of_a_store_without_an_epoch_is_not_used(
    join: Join, server: Server
) -> None:
    """If it has lost the epoch, and the member knows that, its list of members is not used."""
    one, _ = await join(), await join()
    await heartbeat(one)
    await silence(one)
    server.ask("FLUSHALL")
    forget_epoch(one)
    with pytest.raises(LedgerLost):
        await heartbeat(one)
    assert one.stats().members == 2


@pytest.mark.parametrize("away", [0.5 * HOLD, 3 * HOLD])
async def test_the_member_list_of_a_member_cut_off_for_long_is_not_used(
    join: Join, server: Server, time: FleetTime, away: float
) -> None:
    """Neither member read a list for longer than newcomers wait, so others may have joined and
    left. After a shorter time it is enough that the earlier members return."""
    one, other = await join(), await join()
    await heartbeat(one, other)
    for ledger in (one, other):
        await cut_off(ledger)
    await time.tick(away)
    server.ask("FLUSHALL")
    assert (
        await again(one, "a:1", "h")
    ).seconds > HOLD  # the other member is known, and has not returned
    if away > HOLD:
        assert (await again(other, "b:1", "h")).seconds > HOLD
    else:
        with contextlib.suppress(LedgerLost):
            await take(other, "b:1", "h")
        assert await granted(other, "b:1", "h")


@pytest.mark.parametrize("every", [0.75 * HOLD, 1.5 * HOLD])
async def test_a_store_outage_ends_once_all_members_are_back_however_long_it_was(
    time: FleetTime, every: float
) -> None:
    """Each member sees that the store itself is down, so no member joined meanwhile. A member that
    does not see this for longer than a hold can't know whether it was down all the time."""
    server = Server()
    server.start()
    members = [RedisLedger(server.url, clock=time.clock) for _ in range(2)]
    one, other = members
    time.server = server
    try:
        server.ask("SET", "{shift}", "0")
        await one.open()
        await time.tick(1000.0)
        await heartbeat(one)
        await other.open()
        await heartbeat(one, other)
        assert await granted(other, "b:0", "h")
        for ledger in (one, other):
            await cut_off(ledger)
        server.kill()
        for passed in (0.0, *[every] * 5):
            time.clock.by += passed
            for ledger in members:
                with pytest.raises(LedgerLost):
                    await take(ledger, f"{ledger.member}:1", "h")
        server.start()
        server.ask("SET", "{shift}", str(round(time.clock.by * 1e6)))
        assert (
            await again(one, "a:1", "h")
        ).seconds > HOLD  # the other member is known, and has not returned
        if every > HOLD:
            assert (await again(other, "b:1", "x")).seconds > HOLD
        else:
            assert await granted(other, "b:1", "x")
            assert not await granted(one, "a:1", "h")  # held by the other member, which pushed it
            assert await granted(one, "a:2", "y")
    finally:
        for ledger in members:
            await ledger.close()
        server.close()


async def test_a_member_that_has_spoken_in_an_epoch_must_read_its_list_before_the_next(
    join: Join, server: Server
) -> None:
    """A pushed what it knows, which ended the quarantine, and has read no list since: a newcomer
    that had joined by then may have been granted something."""
    one = await join()
    await silence(one)
    server.ask("FLUSHALL")
    await store_of(one).connect()
    await one._push_all(await one._determine_epoch())
    server.ask("FLUSHALL")
    forget_epoch(one)
    assert (await again(one, "a:1", "h")).seconds > HOLD


async def test_a_heartbeat_goes_on_after_an_unexpected_error(
    join: Join, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("gatekeeper.fleet.redis_ledger.HEARTBEAT_SECONDS", 0.02)
    ledger = await join()
    broken = 0

    async def breaks(*_: object) -> object:
        nonlocal broken
        broken += 1
        raise AttributeError("in a library")

    with monkeypatch.context() as patch:
        patch.setattr(store_of(ledger), "script", breaks)
        await until(lambda: broken)
    await until(lambda: ledger.state == "connected")
    assert await granted(ledger, "a:1", "h")
    assert "a heartbeat failed" in caplog.text


async def test_an_answer_that_cannot_be_read_is_a_store_that_is_lost(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = await join()

    async def strange(*_: object) -> list[bytes]:
        return [b"\xc1"]

    monkeypatch.setattr(store_of(ledger), "scripts", strange)
    with pytest.raises(LedgerLost, match="can't be read"):
        await take(ledger, "a:1", "h")


async def test_a_store_lost_twice_waits_for_the_members_from_before_the_first_loss(
    join: Join, server: Server
) -> None:
    """After the first loss, the store's list names only the members that returned in between."""
    one, other = await join(), await join()
    assert await granted(other, "b:1", "held")
    await silence(other)  # so that it does not notice
    server.ask("FLUSHALL")
    assert (await again(one, "a:1", "held")).seconds > 1.0
    await heartbeat(one)  # a heartbeat
    server.ask("FLUSHALL")
    assert (await again(one, "a:1", "held")).seconds > 1.0
    await again(other, "b:2", "held")
    assert not await granted(one, "a:1", "held")
    assert await granted(one, "a:2", "free")
