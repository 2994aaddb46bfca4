"""Orders of events for which there is a rule, each with a real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from gatekeeper.config import FleetConfig
from gatekeeper.errors import LedgerLost
from gatekeeper.fleet import RedisLedger
from gatekeeper.pacing.ledger import End, Granted, NotBefore, Report, ScopeClock, ScopeRequest
from tests.fleet.conftest import FleetTime, Join, again, again_or_granted, heartbeat, silence
from tests.fleet.proxy import Proxy
from tests.fleet.server import Replicated
from tests.fleet.test_epochs import HOLD, Knowing
from tests.pacing.ledger_rules import (
    Listener,
    asks,
    granted,
    listen,
    near,
    take,
    wait_of,
)
from tests.waiting_support import until


class Failover:
    """Two members behind a proxy that leads to the master, and to its replica once that is lost."""

    def __init__(self, pair: Replicated, wire: Proxy, time: FleetTime) -> None:
        self.pair, self.wire, self.time = pair, wire, time
        self.members: list[RedisLedger] = []

    async def join(self, listener: Listener) -> RedisLedger:
        config = FleetConfig(allow_lost_writes=True)
        ledger = RedisLedger(self.wire.url, clock=self.time.clock, config=config)
        ledger.listen("ab"[len(self.members)], listener)
        self.members.append(ledger)
        await ledger.open()
        return ledger

    def cut_off(self) -> None:
        """Cut the replica off from further writes."""
        self.pair.replica.ask("REPLICAOF", "NO", "ONE")

    def promote(self) -> None:
        self.pair.master.kill()
        self.time.server = self.pair.replica
        self.wire.target = str(self.pair.replica.socket)
        self.wire.cut()


@pytest.fixture
async def failover(time: FleetTime) -> AsyncIterator[Failover]:
    pair = Replicated(sentinels=0)
    pair.start()
    wire = Proxy(str(pair.master.socket))
    await wire.open()
    made = Failover(pair, wire, FleetTime(pair.master, time.clock))
    yield made
    for member in made.members:
        await member.close()
    await wire.close()
    pair.close()


async def replicated(failover: Failover) -> None:
    """Wait until the replica has all writes so far."""
    await until(lambda: failover.pair.master.ask("WAIT", "1", "1000") == b":1\r\n")


async def hears(ledger: RedisLedger) -> None:
    """Wait until notifications arrive; before that, waiters poll once a second."""
    await until(lambda: ledger.hearing)


async def test_a_promoted_replica_without_the_last_write_begins_a_new_epoch(
    failover: Failover,
) -> None:
    """By the key alone, nothing would seem to have happened."""
    one = await failover.join(Knowing(ScopeClock("known", 5.0, 60.0)))
    other = await failover.join(Knowing())
    await failover.time.tick(2.0 * HOLD)
    await heartbeat(one, other, one, other)
    assert await granted(one, "a:1", "before")
    await replicated(failover)
    epoch = failover.pair.replica.ask("HGET", "{gatekeeper}:epoch", "id")
    failover.cut_off()
    assert await granted(one, "a:2", "h")  # the last write
    failover.promote()
    assert failover.pair.replica.ask("HGET", "{gatekeeper}:epoch", "id") == epoch
    # The member that does not know of it returns first, and has to wait for the other.
    assert (await again(other, "b:1", "h")).seconds > 1.0
    assert failover.pair.replica.ask("HGET", "{gatekeeper}:epoch", "id") != epoch
    await again(one, "a:3", "h")
    assert await granted(other, "b:2", "free")
    for host in ("h", "before"):
        assert not await granted(other, f"b:{host}", host)
    await hears(other)
    assert near(await wait_of(other, "b:4", "known"), 55.0, 2.0)


async def test_a_promoted_replica_waits_for_the_hold_of_a_member_that_is_gone(
    failover: Failover,
) -> None:
    one, other = await failover.join(Knowing()), await failover.join(Knowing())
    for _ in range(2):  # the quarantine, which is longer than the interval
        await failover.time.tick(2.0 * HOLD)
        await heartbeat(one, other)
    await replicated(failover)
    failover.cut_off()
    assert await granted(one, "a:1", "h", interval=60.0)
    await silence(one)
    failover.promote()
    left = (await again(other, "b:1", "h", 60.0)).seconds
    assert left > 1.5 * HOLD - 2.0
    await failover.time.tick(left)
    await hears(other)
    # Its hold has expired, and the site's interval counts from its end.
    assert near(await wait_of(other, "b:1", "h", interval=60.0), 50.0, 2.0)
    assert await granted(other, "b:2", "x", interval=0.0)


async def test_a_grant_older_than_its_hold_is_discarded_after_flushall(
    join: Join, time: FleetTime
) -> None:
    """It discards a grant that it has not used before the others may start."""
    one, stopped = await join(), await join()
    sent = time.clock.monotonic()
    answer = await take(stopped, "s:1", "h")
    assert isinstance(answer, Granted)
    expires_at = sent + answer.seconds
    await heartbeat(one)
    await silence(stopped)
    time.server.ask("FLUSHALL")
    for _ in range(20):  # by the time another request is granted, that grant is stale
        found = await again_or_granted(one, "a:1", "h")
        if isinstance(found, Granted):
            break
        await time.tick(min(found.seconds, 2.0))
    else:
        raise AssertionError("nobody is ever let in")
    assert time.clock.monotonic() >= expires_at
    # The member continues. Its old token has no privileges: it asks like every other member.
    with pytest.raises(LedgerLost):
        await heartbeat(stopped)
    await again(stopped, "s:2", "h")


@pytest.mark.parametrize("left", [0.5, 5.0, 19.0])
async def test_an_interval_counts_from_the_end_of_a_hold_without_a_head(
    join: Join, time: FleetTime, left: float
) -> None:
    """Its request may have been sent at its very end, from which the interval counts, as do a
    longer interval of a later request and one that was learned meanwhile."""
    ledger = await join()
    assert await granted(ledger, "a:1", "h", interval=1.0)
    await time.tick(HOLD - left)
    assert near(await wait_of(ledger, "b:1", "h", interval=60.0), max(left, 60.0 - HOLD + left), 1)
    await ledger.block([Report("h", 0.0, "slow down", 90.0, 600.0)])
    await time.tick(left + 0.01)
    assert near(await wait_of(ledger, "b:1", "h", interval=60.0), 90.0, 1.0)
    await ledger.end([End("b:1", "undone")])
    await time.tick(88.0)
    assert not await granted(ledger, "c:1", "h", interval=1.0)
    await time.tick(2.5)
    assert await granted(ledger, "c:1", "h", interval=1.0)


@pytest.mark.parametrize("block_first", [True, False])
async def test_a_429_and_an_end_sent_together_in_either_order_let_no_request_start(
    join: Join, block_first: bool
) -> None:
    """If both are sent in one turn of the loop, no request starts between the two."""
    one, other = await join(), await join()
    listener = Listener()
    await listen(other, "b", listener)
    assert await granted(one, "a:1", "h", interval=0.0)
    assert not await granted(other, "b:1", "h", interval=0.0)
    calls = [one.block([Report("h", 30.0, "429")]), one.end([End("a:1")])]
    asking = other.take([asks("b:1", "h", interval=0.0)])
    answers = await asyncio.gather(*(calls if block_first else reversed(calls)), asking)
    (answer,) = answers[-1]
    assert isinstance(answer, NotBefore)
    await listener.heard()
    # The waiter is notified of the end of the block, not of a free slot before that.
    assert all(seconds > 29.0 for _, seconds in listener.opened_for)
    assert near(await wait_of(other, "b:1", "h", interval=0.0), 30.0, 1.0)


async def test_a_block_between_grant_and_send_reaches_the_holder_of_a_second_slot(
    join: Join,
) -> None:
    """The second request is notified before an answer could show the block."""
    one, other = await join(), await join()
    two = ScopeRequest("h", 0.0, 2)
    first, second = Listener(), Listener()
    await listen(one, "a", first)
    await listen(other, "b", second)
    assert await granted(one, "a:1", two)
    assert await granted(other, "b:1", two)
    await one.end([End("a:1", "sent", (Report("h", 30.0, "429"),))])
    await until(lambda: second.reports)
    assert second.reports == [Report("h", 30.0, "429")]
    # The request was not sent and is undone: the slot is free, and the block applies.
    await other.end([End("b:1", "undone")])
    assert near(await wait_of(other, "b:2", two), 30.0, 1.0)


async def test_a_reply_lost_on_the_way_is_asked_for_again_and_is_the_same_grant(
    time: FleetTime, join: Join
) -> None:
    """The grant was made: asking again with the same token returns it, and a second member is not
    granted anything."""
    other = await join()
    wire = Proxy(str(time.server.socket))
    await wire.open()
    ledger = RedisLedger(wire.url, clock=time.clock)
    await ledger.open()
    try:
        assert await granted(ledger, "a:0", "x")  # the script is known there
        wire.how = "swallow replies"
        call = asyncio.create_task(take(ledger, "a:1", "h"))
        await until(lambda: time.server.ask("EXISTS", "{gatekeeper}:s:h") != b":0\r\n")
        wire.how = "pass"
        wire.cut()
        with pytest.raises(LedgerLost):
            await call
        assert not await granted(other, "b:1", "h")
        assert await granted(ledger, "a:1", "h")
        await ledger.end([End("a:1", "undone")])
        assert await granted(other, "b:1", "h")
    finally:
        await ledger.close()
        await wire.close()
