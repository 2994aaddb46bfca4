"""An upgrade loses no promise: the version before the core was set apart and this one share a state
file, one after the other, and a fleet, at the same time.
"""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from gatekeeper import NotYet, RemoteGatekeeper
from gatekeeper.urls import host_of
from tests.conformance.test_process import Process
from tests.fleet.server import Server
from tests.internet import FakeInternet
from tests.sidecar.conftest import Start, start
from tests.upgrade.conftest import MakeMember, Member
from tests.waiting_support import seen_in_time

__all__ = ["start"]

HOSTS = tuple(f"127.0.0.{number}" for number in range(21, 27))
TEXT = "User-agent: *\nDisallow: /private/\n"
SLOW = TEXT + "Crawl-delay: 3600\n"


def sites(internet: FakeInternet) -> list[str]:
    """The origins of the hosts. The second one has a Crawl-delay of an hour."""
    origins = []
    for number, host in enumerate(HOSTS):
        internet.site(host).robots(SLOW if number == 1 else TEXT).page("/page")
        origins.append(f"http://{host}:{internet.listener(host).port()}")
    return origins


def fetches(internet: FakeInternet) -> list[int]:
    return [internet.sites[host].paths.count("/robots.txt") for host in HOSTS]


async def make_promises(member: Member, origins: list[str]) -> None:
    """A clock of an hour; a block by Retry-After; an operator's block; a pause; a text alone."""
    clocked, refused, blocked, paused, read = origins
    assert await member("text", clocked) == SLOW
    assert await member("text", read) == TEXT
    await member("acquire", f"{refused}/page")
    await member("report", f"{refused}/page", 429, 7200.0)
    for origin in (blocked, paused):
        assert await member("allowed", f"{origin}/page")
    await member("block", host_of(blocked), 7200.0)
    await member("pause", host_of(paused))


async def seconds_left(member: Member, url: str, least: float) -> float:
    """Return when the host is due, once the last message of the other member has arrived."""
    async with asyncio.timeout(60):
        while (left := await member("seconds", url)) <= least:
            assert left > 0  # no lease is granted meanwhile
    return float(left)


async def find_promises(member: Member, origins: list[str]) -> None:
    clocked, refused, blocked, paused, read = origins
    assert await member("text", clocked) == SLOW
    assert await member("text", read) == TEXT
    for origin in origins:
        assert not await member("allowed", f"{origin}/private/")
    assert 3000 < await seconds_left(member, f"{clocked}/page", 3000) <= 3600
    assert 6600 < await seconds_left(member, f"{refused}/page", 6600) <= 7200
    assert 6600 < await seconds_left(member, f"{blocked}/page", 6600) <= 7200
    await member("seconds", f"{paused}/page")  # not now
    kinds = {clocked: "next", refused: "block", blocked: "block", paused: "pause"}
    for origin, kind in kinds.items():
        assert kind in await member("clocks", host_of(origin)), origin


async def test_a_state_file_of_the_earlier_version_keeps_every_clock_and_block(
    internet: FakeInternet, member: MakeMember, tmp_path: Path
) -> None:
    origins, settings = sites(internet)[1:], {"storage": {"path": str(tmp_path / "state.db")}}
    async with member("earlier", settings) as one:
        await make_promises(one, origins)
    asked = fetches(internet)
    async with member("this", settings) as one:
        await find_promises(one, origins)
    assert fetches(internet) == asked == [0] + [1] * 5


async def test_a_lease_of_the_earlier_sidecar_is_still_held_and_reported(
    internet: FakeInternet, packages: dict[str, Path], start: Start, socket_folder: Path
) -> None:
    url = f"{sites(internet)[0]}/page"
    process = Process(start, "--socket", str(socket_folder / "gate.sock"))
    process.package = packages["earlier"]
    await process.start()
    async with RemoteGatekeeper(process.where, patience=30.0) as gate:
        lease = await gate.acquire(url, owned=False)
        await process.end(signal.SIGKILL)
        process.package = packages["this"]
        await process.start()
        assert isinstance(await gate.try_acquire(url), NotYet)
        lease.report(status=200)
        lease.end()
    assert (gate.stats().told, gate.stats().dropped) == (1, 0)


@pytest.mark.parametrize(("first", "second"), [("earlier", "this"), ("this", "earlier")])
async def test_members_of_both_versions_keep_each_others_intervals(
    internet: FakeInternet, member: MakeMember, server: Server, first: str, second: str
) -> None:
    origins = sites(internet)
    namespace = f"from-{first}"
    server.begin_long_ago(namespace)
    settings = {"fleet": {"url": server.url, "namespace": namespace}}
    async with member(first, settings) as one, member(second, settings) as other:
        await one("acquire", f"{origins[0]}/page")
        await other("seconds", f"{origins[0]}/page")  # not now: one lease of the host is open
        await one("report", f"{origins[0]}/page", 503, 3600.0)
        await make_promises(one, origins[1:])
        await find_promises(other, origins[1:])
        await find_promises(one, origins[1:])
        assert await other("seconds", f"{origins[0]}/page") > 3000
    assert fetches(internet) == [1] * 6


async def told(member: Member, url: str, wanted: list[str | None]) -> None:
    """Wait until a member says this: a message arrives later, and a new store grants nothing."""
    async with asyncio.timeout(60):
        while await member("note", url) != wanted:
            await asyncio.sleep(0.02)


async def brief(
    one: Member, rule: dict[str, str], url: str, other: Member, note: str
) -> list[str | None]:
    """Set a rule for a short time, and return what the other member says once its note is so."""
    found: list[str | None] = []

    async def begin(seconds: float) -> None:
        await one("override", rule, seconds)

    async def holds() -> bool:
        found[:] = await other("note", url)
        return (found[1] or "").startswith(note) and (bool(note) or found[1] is None)

    await seen_in_time(begin, holds)
    return found


async def test_members_of_the_earlier_version_obey_a_rule_that_ends_and_never_bring_it_back(
    internet: FakeInternet, member: MakeMember, server: Server
) -> None:
    url, host = f"{sites(internet)[0]}/page", HOSTS[0]
    server.begin_long_ago("rules")
    settings = {"fleet": {"url": server.url, "namespace": "rules"}}
    complaint = {"match": host, "robots": "deny", "reason": "a complaint"}
    async with member("earlier", settings) as old, member("this", settings) as new:
        for one in (old, new):
            await told(one, url, ["allow", None])
        # A rule of the earlier version, and one with an end over it.
        await old("override", complaint)
        await told(new, url, ["deny", "a complaint"])
        permission = {"match": host, "robots": "allow", "by": "Kim"}
        found = await brief(new, permission, url, new, "by Kim, until 20")
        assert found[0] == "allow"
        # The earlier version would never end a permission: it obeys the file meanwhile.
        await brief(new, permission, url, old, "")
        async with member("this", settings) as late:
            for one in (old, new, late):
                await told(one, url, ["deny", "a complaint"])
        # A refusal with an end, over nothing that denies.
        await new("override", {"match": host}, 0)
        for one in (new, old):
            await told(one, url, ["allow", None])
        found = await brief(new, complaint, url, old, "a complaint (until 20")
        assert found[0] == "deny"
        await told(new, url, ["allow", None])
        await told(old, url, ["allow", None])
        # Neither the store's loss nor another member brings it back.
        server.ask("FLUSHALL")
        async with member("this", settings) as late, member("earlier", settings) as old_late:
            for one in (late, old_late, old, new):
                await told(one, url, ["allow", None])
        # The earlier version has the last word if it speaks last.
        await old("override", complaint)
        await told(new, url, ["deny", "a complaint"])


async def test_a_rule_whose_members_have_gone_stays_a_refusal_for_the_earlier_version_alone(
    internet: FakeInternet, member: MakeMember, server: Server
) -> None:
    url, host = f"{sites(internet)[0]}/page", HOSTS[0]
    server.begin_long_ago("gone")
    settings = {"fleet": {"url": server.url, "namespace": "gone"}}
    async with member("earlier", settings) as old:
        async with member("this", settings) as new:
            refusal = {"match": host, "robots": "deny"}
            assert (await brief(new, refusal, url, old, "until 20"))[0] == "deny"
        # Nobody is left who knows the end: the earlier version goes on refusing.
        async with member("this", settings) as new:
            await told(new, url, ["allow", None])
            await told(old, url, ["allow", None])
