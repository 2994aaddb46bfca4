"""`ShardedLedger`: the rules of every ledger, and a real cluster of three servers."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time as wall
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from redis.crc import key_slot

from gatekeeper.config import CacheConfig, Config, FleetConfig, GroupRule, HostRule
from gatekeeper.errors import ConfigError, LedgerLost
from gatekeeper.fetching.outcomes import Outcome, Retrieval
from gatekeeper.fleet import RedisLedger, ShardedLedger, redis_ledger
from gatekeeper.fleet.first_start import begin_fleet
from gatekeeper.pacing.ledger import End, Ledger, Report, ScopeRequest
from gatekeeper.pacing.scheduler import Scheduler
from gatekeeper.robots.timing import RobotsInterval
from tests.fleet.conftest import FleetTime, end_quarantine, heartbeat
from tests.fleet.server import BINARY, Server
from tests.internet import free_port
from tests.pacing.ledger_rules import (
    PATIENCE,
    LedgerRules,
    Listener,
    Time,
    granted,
    listen,
    near,
    wait_of,
)
from tests.pacing_support import scheduler_on
from tests.waiting_support import until


async def joined(url: str, time: FleetTime, shards: int = 3) -> ShardedLedger:
    ledger = ShardedLedger(url, clock=time.clock, shards=shards)
    await ledger.open()
    await time.tick(100_000)
    await heartbeat(*ledger.shards)
    return ledger


class TestShardedLedger(LedgerRules):
    """The rules, on a server that is not a cluster: `h`, `k` and `g` are in three shards."""

    @pytest.fixture
    async def ledger(self, server: Server, time: FleetTime) -> AsyncIterator[ShardedLedger]:
        ledger = await joined(server.url, time)
        yield ledger
        await ledger.close()

    async def test_a_ticket_reserves_no_scope_while_another_scope_is_closed(
        self, ledger: Ledger, time: Time, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Here it does for a moment, since the host's shard does not know the group's."""
        moment = 100.0  # of the server's time: on a busy machine a tenth of a second has passed
        monkeypatch.setattr(redis_ledger, "LAPSE", moment)
        assert await granted(ledger, "a:1", "h", interval=1.0)
        await ledger.end([End("a:1")])
        assert await granted(ledger, "a:2", "g", interval=100.0)
        await ledger.end([End("a:2")])
        both = (ScopeRequest("h", 1.0), ScopeRequest("g", 100.0))
        assert not await granted(ledger, "b:1", *both)
        await time.tick(1.01)
        assert await wait_of(ledger, "c:1", "h") <= moment
        await time.tick(moment)
        assert await granted(ledger, "c:1", "h")

    async def test_a_scope_that_was_taken_is_returned_when_the_next_scope_is_closed(
        self, ledger: ShardedLedger, time: Time
    ) -> None:
        assert len({ledger.shard_of(scope) for scope in "hkg"}) > 1
        assert await granted(ledger, "a:1", "g", interval=9.0)
        for _ in range(3):
            assert not await granted(ledger, "b:1", "h", "g")
            assert (await ledger.look(["h"]))[0].holds == ()
        assert await granted(ledger, "c:1", "h", interval=500.0)  # its clock is unchanged

    async def test_a_lost_shard_makes_the_whole_ledger_lost(
        self, ledger: ShardedLedger, time: Time
    ) -> None:
        listener = Listener()
        ledger.listen("z", listener)
        one, other, _ = ledger.shards
        one._set_lost(ConnectionError("gone"))
        other._set_lost(ConnectionError("gone"))
        assert listener.losses == [True, True]
        assert (ledger.ready, ledger.stats().state) == (False, "lost")
        one._set_reached()
        assert listener.losses == [True, True]
        other._set_reached()
        assert listener.losses == [True, True, False]
        assert ledger.ready


async def test_two_members_share_the_clock_of_a_group(server: Server, time: FleetTime) -> None:
    """Hosts and group are in different shards: no request starts too early, and all are granted."""
    config = Config(
        host=(HostRule(match="*.example", group="all", interval=0.0),),
        group=(GroupRule(name="all", interval=0.05),),
    )
    ledgers = [await joined(server.url, time)]
    ledgers.append(ShardedLedger(server.url, clock=time.clock, shards=3))
    members = [scheduler_on(time.clock, config, ledger=ledger) for ledger in ledgers]
    starts: list[float] = []

    async def ask(member: Scheduler, host: str) -> None:
        grant = await member.acquire("u", host, admit=lambda: RobotsInterval(0.0))
        starts.append(time.clock.monotonic())
        grant.report(200)
        grant.release()

    async with asyncio.timeout(30.0), AsyncExitStack() as stack:
        for member in members:
            await member.open()
            stack.push_async_callback(member.close)
        await asyncio.gather(
            *(ask(member, f"h{number % 6}.example") for member in members for number in range(12))
        )
    assert len(starts) == 24
    gaps = [later - start for start, later in itertools.pairwise(sorted(starts))]
    assert min(gaps) > 0.04, gaps  # measured here, while the store's clock counts from the heads


@pytest.fixture(scope="module")
def cluster() -> Iterator[list[Server]]:
    """Three masters that share the slots."""
    if BINARY is None:
        pytest.skip("no redis-server here")
    servers = [  # each talks to the others on a second port, 10,000 higher
        Server("--cluster-enabled", "yes", "--cluster-node-timeout", "20000", port=free_port())
        for _ in range(3)
    ]
    try:
        for number, server in enumerate(servers):
            server.start()
            first, last = number * 16384 // 3, (number + 1) * 16384 // 3 - 1
            slots = [str(slot) for slot in range(first, last + 1)]
            assert server.ask("CLUSTER", "ADDSLOTS", *slots).startswith(b"+OK")
            for earlier in servers[:number]:
                server.ask("CLUSTER", "MEET", "127.0.0.1", str(earlier.port))
        end = wall.monotonic() + 60.0
        while not all(b"cluster_state:ok" in server.ask("CLUSTER", "INFO") for server in servers):
            assert wall.monotonic() < end
            wall.sleep(0.05)
        while not all(b"known_nodes:3" in server.ask("CLUSTER", "INFO") for server in servers):
            assert wall.monotonic() < end
            wall.sleep(0.05)
        yield servers
    finally:
        for server in servers:
            server.close()


@pytest.fixture
async def member(cluster: list[Server]) -> AsyncIterator[ShardedLedger]:
    config = FleetConfig(hold=1.0)
    ledger = ShardedLedger(f"redis://127.0.0.1:{cluster[1].port}/0", config=config, shards=6)
    await ledger.open()
    for shard in ledger.shards:
        await end_quarantine(shard)
    yield ledger
    await ledger.close()


class Nowhere:
    """A source that fetches nothing."""

    async def fetch(self, origin: str, validators: Any = None) -> Retrieval:
        return Retrieval(outcome=Outcome.RULES, status=200, body=origin.encode())

    async def reach(self, origin: str) -> bool | None:
        return None


async def test_a_lease_files_messages_and_pauses_work_on_a_real_cluster(
    cluster: list[Server], member: ShardedLedger
) -> None:
    """Scopes on all three servers in one lease; also files, messages and pauses."""
    listener = Listener()
    await listen(member, "b", listener)
    hosts = [f"h{number}" for number in range(24)]
    places = {
        key_slot(f"gatekeeper.{member.shard_of(host)}".encode()) * 3 // 16384 for host in hosts
    }
    assert places == {0, 1, 2}
    for number in range(0, 24, 3):
        assert await granted(member, f"a:{number}", *hosts[number : number + 3], interval=5.0)
    for number in range(1, 24, 3):
        assert not await granted(member, f"b:{number}", hosts[number])
    await member.end([End("a:0", "sent", (Report("h0", 60.0, "429"),))])
    assert near(await wait_of(member, "b:0", "h0"), 60.0, 1.0)
    await member.pause(hosts[6:9])
    await until(lambda: len(listener.pauses) >= 3 and listener.reports)
    views = await member.look(hosts)
    assert [view.clock.paused for view in views].count(True) == 3
    assert sum(len(view.holds) for view in views) == 21
    site = member.sharing(Nowhere(), CacheConfig(), lambda: None)
    for host in hosts[:6]:
        assert (await site.fetch(f"https://{host}")).body == f"https://{host}".encode()


async def test_a_fleet_begins_on_every_server_of_a_cluster(cluster: list[Server]) -> None:
    url = f"redis://127.0.0.1:{cluster[1].port}/0"
    config = FleetConfig(url=url, sharded=True, namespace="new")
    assert (await begin_fleet(config)).begun
    assert not (await begin_fleet(config)).begun
    async with ShardedLedger(url, namespace="new", config=config) as ledger:
        assert ledger.state == "connected"
        for number in range(12):
            assert await granted(ledger, f"a:{number}", f"h{number}", interval=600.0)


async def test_a_cluster_without_sharding_says_what_to_set(cluster: list[Server]) -> None:
    """On any server but the one that has the keys; a member would wait for ever."""
    told = r"fleet\.sharded: redis://127.*: the server 127\S+ of this cluster has the keys: set"
    for server in cluster:
        config = FleetConfig(url=f"redis://127.0.0.1:{server.port}/0")
        if _has(server, key_slot(b"gatekeeper")):
            continue
        with pytest.raises(ConfigError, match=told):
            await begin_fleet(config)
        assert config.url is not None
        with pytest.raises(ConfigError, match=told):
            await RedisLedger(config.url).open()


async def test_a_shard_whose_slot_moves_begins_a_new_epoch_on_the_new_server(
    cluster: list[Server], member: ShardedLedger
) -> None:
    """The shard is found on the new server, and is in quarantine there."""
    assert await granted(member, "a:1", "moving", interval=5.0)
    before, slot = (
        member.stats().epochs,
        key_slot(f"gatekeeper.{member.shard_of('moving')}".encode()),
    )
    old = next(server for server in cluster if _has(server, slot))
    new = next(server for server in cluster if server is not old)
    identity = new.ask("CLUSTER", "MYID").split(b"\r\n")[1].decode()
    found = old.ask("CLUSTER", "GETKEYSINSLOT", str(slot), "100").split(b"\r\n")
    for key in found[2::2]:
        old.ask("DEL", key.decode())
    for server in (new, old, *cluster):
        answer = server.ask("CLUSTER", "SETSLOT", str(slot), "NODE", identity)
        assert answer.startswith(b"+OK"), answer
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                assert not await granted(member, "a:2", "moving")
                break
            except LedgerLost:
                await asyncio.sleep(0.02)
    assert member.stats().epochs > before


def _has(server: Server, slot: int) -> bool:
    return not server.ask("GET", _key_in(slot)).startswith(b"-MOVED")


def _key_in(slot: int) -> str:
    return next(key for number in range(200_000) if key_slot((key := str(number)).encode()) == slot)


async def test_an_event_of_all_shards_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A loss, a return and the member's name, rather than once for each of the sixteen shards."""
    monkeypatch.setattr("gatekeeper.fleet.redis_ledger.LOST_AFTER", 0.1)
    monkeypatch.setattr("gatekeeper.fleet.redis_ledger.HEARTBEAT_SECONDS", 0.05)
    caplog.set_level(logging.INFO, "gatekeeper.fleet")
    store = Server()
    store.start()

    async def until(*, lost: bool) -> None:
        async with asyncio.timeout(PATIENCE):
            while {shard.state == "lost" for shard in ledger.shards} != {lost}:
                await asyncio.sleep(0.01)

    def times(words: str) -> int:
        return sum(words in message for message in caplog.messages)

    try:
        ledger = ShardedLedger(store.url, config=FleetConfig(hold=1.0), shards=4)
        async with ledger:
            store.kill()
            await until(lost=True)
            store.start()
            await until(lost=False)
    finally:
        store.close()
    assert times("can't be reached") == times("is back after") == times(" of the fleet at ") == 1
    assert times("no leases are granted until") == 1
