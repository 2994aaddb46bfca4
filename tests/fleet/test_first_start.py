"""`gatekeeper fleet init`, and what a member says that waits because nobody called it."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from msgspec.structs import replace

from gatekeeper.cli import main
from gatekeeper.config import FleetConfig
from gatekeeper.errors import ConfigError, LeaseTimeout, LedgerLost
from gatekeeper.fleet import RedisLedger, ShardedLedger
from gatekeeper.fleet.first_start import FirstStart, begin_fleet
from gatekeeper.fleet.store import Store
from gatekeeper.gate import Gatekeeper, robots_pacing
from tests.conformance.ways import AGENT, settings
from tests.fleet.conftest import FleetTime, Join, lock_of
from tests.fleet.server import BINARY, Server
from tests.internet import FakeInternet, free_port
from tests.pacing.ledger_rules import granted
from tests.waiting_support import until

pytestmark = pytest.mark.skipif(BINARY is None, reason="no redis-server here")

Capture = pytest.CaptureFixture[str]
WAITS = (
    r"a new or emptied store: waiting (\d+) s for members that may still be under way; "
    r"`gatekeeper fleet init` if there are none"
)


async def begin(server: Server, *, force: bool = False, **settings: Any) -> FirstStart:
    return await begin_fleet(FleetConfig(url=server.url, **settings), force=force)


async def command(*words: str) -> int:
    """Run the command in a thread, since it has an event loop of its own."""
    return await asyncio.to_thread(main, ["fleet", "init", *words])


async def test_the_first_member_of_a_fleet_that_was_begun_starts_without_waiting(
    server: Server, join: Join, capsys: Capture
) -> None:
    assert await command(server.url) == 0
    said = capsys.readouterr().out
    assert said == f"{server.url}, gatekeeper: the epoch has begun: members start without waiting\n"
    ledger = await join(wait=False)
    assert (ledger.state, ledger.recovery, ledger.stats().epochs) == ("connected", "", 0)
    # No host counts as asked, not even for an interval longer than a quarantine.
    assert await granted(ledger, "a:1", "slow", interval=600.0)


async def test_a_store_whose_fleet_began_is_not_begun_anew_without_force(
    server: Server, capsys: Capture
) -> None:
    assert await command(server.url) == 0
    epoch = server.ask("HGET", "{gatekeeper}:epoch", "id")
    capsys.readouterr()
    assert await command(server.url) == 1
    assert re.fullmatch(
        rf"{re.escape(server.url)}, gatekeeper: nothing was written: an epoch began there at "
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ\. If no other process crawls, --force begins anew "
        r"without waiting\n",
        capsys.readouterr().out,
    )
    assert server.ask("HGET", "{gatekeeper}:epoch", "id") == epoch
    assert await command("--force", server.url) == 0
    assert server.ask("HGET", "{gatekeeper}:epoch", "id") != epoch


async def test_a_store_with_members_is_refused_and_they_are_named(
    server: Server, join: Join, capsys: Capture
) -> None:
    one, other = await join(wait=False), await join(wait=False)
    assert await command(server.url, "--json") == 1
    told = json.loads(capsys.readouterr().out)
    assert told["members"] == sorted([one.member, other.member])
    assert (told["begun"], told["alive"], told["namespace"]) == (False, 2, "gatekeeper")
    assert await command(server.url) == 1
    names = ", ".join(sorted([one.member, other.member]))
    assert f" and 2 members are alive ({names}). If no" in capsys.readouterr().out
    assert one.state == "recovering"


async def test_a_member_that_the_store_has_forgotten_is_found_by_its_listening(
    server: Server, join: Join
) -> None:
    """Between FLUSHALL and its next heartbeat the store has neither an epoch nor its name."""
    member = await join()
    assert await granted(member, "a:1", "h", interval=600.0)
    async with lock_of(member):  # no heartbeat meanwhile
        server.ask("FLUSHALL")
        found = await begin(server)
    assert (found.begun, found.since, found.members, found.alive) == (False, None, (), 1)


@pytest.mark.parametrize("force", [False, True])
async def test_a_member_that_begins_an_epoch_meanwhile_is_found(
    server: Server, monkeypatch: pytest.MonkeyPatch, force: bool
) -> None:
    """Nothing was written, without a reason or with that of an older epoch, even by force."""
    script = Store.script

    async def late(*given: Any) -> Any:
        monkeypatch.setattr(Store, "script", script)
        server.ask("HSET", "{gatekeeper}:epoch", "id", "theirs", "at", "1000000", "format", "1")
        return await script(*given)

    monkeypatch.setattr(Store, "script", late)
    found = await begin(server, force=force)
    assert (found.begun, found.since) == (force, datetime.fromtimestamp(1, UTC))
    assert (server.ask("HGET", "{gatekeeper}:epoch", "id") == b"$6\r\ntheirs\r\n") is not force


async def test_a_member_that_left_does_not_count(server: Server, time: FleetTime) -> None:
    async with RedisLedger(server.url, clock=time.clock):
        pass
    server.ask("DEL", "{gatekeeper}:epoch")
    assert (await begin(server)).begun


async def test_force_ends_the_wait_of_members_that_are_there(
    server: Server, internet: FakeInternet
) -> None:
    """As it does for who starts a member first, reads why it waits, and then knows of no other."""
    internet.site("a.test").robots("")
    config = replace(settings(), fleet=FleetConfig(url=server.url, hold=300.0))
    async with Gatekeeper(AGENT, config=config, resolver=internet.resolver) as gate:
        leasing = asyncio.create_task(gate.acquire("http://a.test/x", owned=False))
        await until(lambda: gate.stats().pacing.waiting)
        assert (await begin(server, force=True)).begun
        (await leasing).end()


async def test_force_keeps_the_clocks_that_the_store_has(
    server: Server, join: Join, time: FleetTime
) -> None:
    member = await join()
    assert await granted(member, "a:1", "h", interval=600.0)
    assert (await begin(server, force=True)).begun
    async with RedisLedger(server.url, clock=time.clock) as newcomer:
        assert not await granted(newcomer, "b:1", "h", interval=600.0)


async def test_a_namespace_and_shards_are_those_of_the_members(
    server: Server, time: FleetTime, capsys: Capture
) -> None:
    """On one server; each shard has an epoch of its own, and none waits."""
    assert await command(server.url, "--namespace", "other", "--sharded") == 0
    assert capsys.readouterr().out.startswith(f"{server.url}, other: the epoch has begun")
    async with ShardedLedger(server.url, namespace="other", clock=time.clock) as ledger:
        assert (ledger.state, ledger.recovery) == ("connected", "")
        for number in range(24):
            assert await granted(ledger, f"a:{number}", f"h{number}", interval=600.0)
    async with RedisLedger(server.url, namespace="other", clock=time.clock) as apart:
        assert apart.state == "recovering", "another fleet by the same name, not sharded"


async def test_a_shard_that_has_a_fleet_keeps_all_of_them_from_being_written(
    server: Server, time: FleetTime
) -> None:
    async with RedisLedger(server.url, namespace="gatekeeper.7", clock=time.clock):
        found = await begin(server, sharded=True)
    assert (found.begun, found.alive) == (False, 1)
    assert server.ask("EXISTS", *(f"{{gatekeeper.{n}}}:epoch" for n in range(16))) == b":1\r\n"


# --- what is wrong with the call ---------------------------------------------------------------


@pytest.fixture
def guarded() -> Iterator[Server]:
    server = Server("--requirepass", "s3cret", port=free_port())
    server.start()
    yield server
    server.close()


def refused(capsys: Capture, *words: str) -> str:
    assert main(["fleet", "init", *words]) == 2
    done = capsys.readouterr()
    assert (done.out, done.err.count("\n")) == ("", 1)
    return done.err


def test_a_wrong_password_is_told_in_words(guarded: Server, capsys: Capture) -> None:
    place = f"127.0.0.1:{guarded.port}/0"
    for url in (f"redis://{place}", f"redis://:wr0ng@{place}"):
        said = refused(capsys, url)
        assert f"fleet.url: redis://{place}: " in said
        assert "add a user and a password to it, with the rights that docs/fleet.md lists" in said
        assert "wr0ng" not in said
    assert main(["fleet", "init", f"redis://:s3cret@{place}"]) == 0
    assert "s3cret" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("redis://127.0.0.1:1/0", "connecting to 127.0.0.1:1.*: is the store running there?"),
        ("unix:///nowhere/s", "unix:///nowhere/s: .*: is the store running there?"),
        ("redis.example:6379", "must begin with one of redis://, rediss://"),
        ("redis://127.0.0.1:1/x", "'x' is not a database number"),
    ],
)
def test_a_url_that_leads_nowhere_is_told_in_words(capsys: Capture, url: str, told: str) -> None:
    assert re.search(told, refused(capsys, url))


async def test_a_replica_and_another_format_are_refused(server: Server) -> None:
    server.ask("HSET", "{gatekeeper}:epoch", "id", "x", "format", "99")
    for force in (False, True):
        with pytest.raises(ConfigError, match=r"have format 99.*choose another namespace"):
            await begin(server, force=force)
    server.ask("FLUSHALL")
    copy = Server("--replicaof", "127.0.0.1", "1", port=free_port())
    copy.start()
    try:
        with pytest.raises(LedgerLost, match="is a replica, which takes no writes"):
            await begin(copy)
    finally:
        copy.close()


async def test_without_a_store_url_the_error_names_the_setting() -> None:
    with pytest.raises(ConfigError, match=r"fleet\.url is not set: name the store"):
        await begin_fleet(FleetConfig())


# --- what a member says that waits -------------------------------------------------------------


async def test_every_place_says_why_the_first_member_waits_and_what_ends_it(
    server: Server,
    internet: FakeInternet,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.INFO, "gatekeeper.fleet")
    internet.site("a.test").robots("")
    monkeypatch.setattr(robots_pacing, "PATIENCE_SECONDS", 0.05)
    config = replace(settings(), fleet=FleetConfig(url=server.url))
    async with Gatekeeper(AGENT, config=config, resolver=internet.resolver) as gate:
        decision = await gate.check("http://a.test/x")
        (view,) = [one for one in await gate.why("a.test") if one.kind == "fleet"]
        stats = gate.stats().fleet
        assert stats is not None
        with pytest.raises(LeaseTimeout) as late:
            await gate.acquire("http://a.test/x", timeout=0.05, owned=False)
        told = [decision.note, view.source, stats.recovery, str(late.value), *caplog.messages]
    waits = [float(found[1]) for one in told if one and (found := re.search(WAITS, one))]
    assert len(waits) == 5, told
    assert all(20.0 < one <= 30.0 for one in waits), waits


async def test_a_member_that_waits_for_nobody_says_nothing(ledger: RedisLedger) -> None:
    assert (ledger.state, ledger.recovery, ledger.stats().recovery) == ("connected", "", "")
