"""What a gate writes in its audit record."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp.abc import AbstractResolver, ResolveResult

from gatekeeper import Config, Denied, HostRule, guarded_connector
from gatekeeper.clock import VirtualClock
from gatekeeper.config import PacingConfig
from gatekeeper.testing import ScriptedGate, drive
from gatekeeper.testing.memory_ledger import MemoryLedger
from tests.audit.conftest import chains_of, config_of
from tests.memory_storage import MemoryStorage

Read = Callable[..., list[dict[str, Any]]]
A = "https://a.example"
FILE = "User-agent: *\nDisallow: /x\n"


async def test_a_request_is_written_with_what_allowed_it_and_what_became_of_it(
    folder: Path, read_record: Read
) -> None:
    async with ScriptedGate(config=config_of(folder)) as gate:
        gate.say(A, FILE)
        async with gate.lease(f"{A}/page") as lease:
            lease.report(status=503, retry_after="120", size=1234)
            (robots,) = read_record("robots")
            (grant,) = read_record("grant")
    (outcome,) = read_record("outcome")
    assert (robots["origin"], robots["source"], robots["outcome"]) == (A, "network", "rules")
    assert (robots["status"], robots["size"], robots["since"]) == (200, len(FILE), None)
    assert (grant["url"], grant["agent"], grant["robots"]) == (f"{A}/page", "testbot", False)
    assert (grant["reason"], grant["line"], grant["text"]) == ("no_rule", None, robots["text"])
    assert grant["decision"] == lease.decision.id
    assert [one["scope"] for one in grant["scopes"]] == ["a.example"]
    assert outcome["lease"] == grant["lease"]
    assert (outcome["status"], outcome["retry_after"], outcome["size"]) == (503, 120.0, 1234)
    assert grant["t"] <= outcome["head"] <= outcome["end"]
    assert (outcome["signed"], outcome["signals"]) == (False, {})
    assert read_record("block")[0]["by"] == "response"


@pytest.mark.parametrize(
    "report", [{"retry_after": 10**400}, {"size": 10**5000}, {"status": 10**5000}]
)
async def test_a_number_of_any_size_spoils_no_record(
    folder: Path, read_record: Read, report: dict[str, Any]
) -> None:
    """The first was written, and is no line. The others could not be written, nor any line since:
    Python writes no integer of so many digits."""
    async with ScriptedGate(config=config_of(folder)) as gate:
        gate.say(A, FILE)
        async with gate.lease(f"{A}/page") as lease:
            lease.report(**report)
    assert len(read_record("outcome")) == 1


async def test_each_way_to_a_lease_is_written_before_the_lease_is_there(
    folder: Path, read_record: Read
) -> None:
    async with ScriptedGate(config=config_of(folder)) as gate:
        gate.say(A, FILE)
        ways = [
            gate.acquire,  # waits for the file
            gate.acquire,  # warm
            lambda url: gate.acquire(url, user_agent="otherbot"),
            gate.try_acquire,
        ]
        for number, way in enumerate(ways, 1):
            lease = await way(f"{A}/{number}")
            assert lease
            assert len(read_record("grant")) == number
            lease.end()
        held = await gate.parts.leases.hold(f"{A}/held", 60.0, None)
        assert len(read_record("grant")) == len(ways) + 1
        held.end()
    assert len(read_record("outcome")) == len(ways) + 1


async def test_a_lease_that_is_given_back_was_never_sent(folder: Path, read_record: Read) -> None:
    async with ScriptedGate(config=config_of(folder)) as gate:
        lease = await gate.acquire(f"{A}/")
        lease.give_back()
    (outcome,) = read_record("outcome")
    assert (outcome["start"], outcome["status"]) == (None, None)


async def test_a_lease_that_expires_has_an_outcome(
    folder: Path, read_record: Read, clock: VirtualClock
) -> None:
    config = config_of(folder, pacing={"lease_ttl": 5.0})
    async with ScriptedGate(config=config, clock=clock) as gate:
        await gate.acquire(f"{A}/")
        clock.advance(6.0)
        await clock.settle()
        (outcome,) = read_record("outcome")
    assert (outcome["status"], outcome["head"]) == (None, None)


async def test_the_interval_in_force_and_the_time_since_the_last_request_are_written(
    folder: Path, read_record: Read, clock: VirtualClock
) -> None:
    config = config_of(folder, pacing={"default_interval": 2.0})
    async with ScriptedGate(config=config, clock=clock) as gate:
        gate.say(A, "User-agent: *\nCrawl-delay: 7\n")
        for _ in range(2):
            async with gate.lease(f"{A}/") as lease:
                lease.report(status=200)
            clock.advance(9.0)
    first, second = (line["scopes"][0] for line in read_record("grant"))
    assert (first["interval"], first["since"]) == (7.0, None)
    assert (second["interval"], second["since"]) == (7.0, 9.0)
    assert "line 2" in second["source"]


async def test_refusals_are_written_with_line_and_text(folder: Path, read_record: Read) -> None:
    rules = [{"match": "b.example", "robots": "deny", "reason": "they asked"}]
    async with ScriptedGate(config=config_of(folder, host=rules)) as gate:
        gate.say(A, FILE)
        gate.say("https://down.example", 500)
        for url in (f"{A}/x", "https://b.example/", "https://down.example/"):
            with pytest.raises(Denied):
                await gate.acquire(url)
    by_rule, by_operator, deferred = read_record("refused")
    assert (by_rule["verdict"], by_rule["line"]) == ("deny", 2)
    assert by_rule["text"] == read_record("robots")[0]["text"]
    assert (by_operator["reason"], by_operator["text"]) == ("operator", None)
    assert deferred["verdict"] == "defer"
    assert deferred["retry_at"] > deferred["t"]
    down = read_record("robots")[-1]
    assert (down["outcome"], down["text"]) == ("server_error", None)
    assert down["since"] is not None


class _Private(AbstractResolver):
    """Every name has a private address."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        return [
            ResolveResult(
                hostname=host, host="127.0.0.1", port=port, family=family, proto=0, flags=0
            )
        ]

    async def close(self) -> None: ...


async def test_a_request_that_the_guard_refuses_at_the_socket_has_a_refusal(
    folder: Path, read_record: Read
) -> None:
    async with (
        ScriptedGate(config=config_of(folder)) as gate,
        aiohttp.ClientSession(
            connector=guarded_connector(Config(), resolver=_Private()),
            middlewares=(gate.middleware,),
        ) as session,
    ):
        gate.say(A, FILE)
        with pytest.raises(Denied):
            await session.get(f"{A}/page")
    (refused,) = read_record("refused")
    assert (refused["url"], refused["reason"]) == (f"{A}/page", "blocked")
    (outcome,) = read_record("outcome")
    assert outcome["status"] is None


async def test_every_decision_is_written_if_asked_for_up_to_a_rate(
    folder: Path, read_record: Read, clock: VirtualClock
) -> None:
    config = config_of(folder, audit={"what": "decisions", "max_rate": 5})
    async with ScriptedGate(config=config, clock=clock) as gate:
        gate.say(A, FILE)
        for number in range(8):
            await gate.allowed(f"{A}/{number}")
        clock.advance(1.0)
        await gate.allowed(f"{A}/x")
    decisions = read_record("decision")
    assert [one["verdict"] for one in decisions] == ["allow"] * 5 + ["deny"]
    assert decisions[0]["text"] == read_record("robots")[0]["text"]
    (omitted,) = read_record("omitted")
    assert (omitted["count"], omitted["why"]) == (3, "audit.max_rate")


async def test_questions_alone_are_not_written_by_default(folder: Path, read_record: Read) -> None:
    async with ScriptedGate(config=config_of(folder)) as gate:
        gate.say(A, FILE)
        await gate.check(f"{A}/x")
        await gate.allowed(f"{A}/x")
    assert [line["kind"] for line in read_record()] == ["start", "robots", "end", "seal"]


async def test_a_file_from_the_state_is_written_before_its_first_use(
    folder: Path, read_record: Read
) -> None:
    storage = MemoryStorage()
    async with ScriptedGate(config=config_of(folder / "1"), storage=storage) as gate:
        gate.say(A, FILE)
        await gate.check(f"{A}/")
    async with ScriptedGate(config=config_of(folder / "2"), storage=storage) as gate:
        gate.say(A, FILE)
        (await gate.acquire(f"{A}/")).end()
        assert gate.robots_files.asked == []
    robots, grant = read_record("robots", "grant", folder=folder / "2")
    assert (robots["kind"], robots["source"]) == ("robots", "state")
    assert grant["text"] == robots["text"] is not None


async def test_blocks_and_pauses_of_an_earlier_process_are_written(
    folder: Path, read_record: Read
) -> None:
    storage, clock = MemoryStorage(), VirtualClock()
    async with ScriptedGate(config=config_of(folder / "1"), storage=storage, clock=clock) as gate:
        await gate.block("a.example", clock.wall() + 60.0, "too many mails")
        await gate.block("b.example", clock.wall() + 60.0)
        await gate.block("b.example", clock.wall())
        await gate.pause("c.example")
    async with ScriptedGate(config=config_of(folder / "2"), storage=storage, clock=clock):
        clock.advance(1.0)
    (first, *_) = read_record("block", folder=folder / "1")
    (block,) = read_record("block", folder=folder / "2")
    assert (block["scope"], block["by"], block["reason"]) == (
        *("a.example", "state", "too many mails"),
    )
    assert block["until"] == first["until"]
    (pause,) = read_record("pause", folder=folder / "2")
    assert (pause["scope"], pause["by"], pause["ended"]) == ("c.example", "state", False)


async def test_a_block_that_a_member_of_the_fleet_lifts_is_written(
    folder: Path, read_record: Read
) -> None:
    clock = VirtualClock()
    ledger = MemoryLedger(clock)
    async with (
        ScriptedGate(config=config_of(folder / "1"), ledger=ledger, clock=clock) as gate,
        ScriptedGate(config=config_of(folder / "2"), ledger=ledger, clock=clock),
    ):
        for seconds in (60.0, -1.0):
            await gate.block("a.example", clock.wall() + seconds)
            await drive(clock, asyncio.sleep(0))
    first, second = read_record("block", folder=folder / "2")
    assert first["by"] == second["by"] == "fleet"
    assert first["until"] > first["t"]
    assert second["until"] <= second["t"]


async def test_a_lease_that_is_open_as_the_gate_closes_has_an_outcome(
    folder: Path, read_record: Read
) -> None:
    async with ScriptedGate(config=config_of(folder)) as gate:
        leases = [await gate.acquire(f"https://{host}.example/") for host in "ab"]
        leases[1].answered(200)
    for lease in leases:
        lease.end()  # too late for another line
    first, second = [
        line for line in read_record("outcome") if not line["lease"].startswith("robots")
    ]
    assert (first["lease"], first["status"], first["head"]) == (leases[0].decision.id, None, None)
    assert first["start"] is not None
    assert second["status"] == 200


async def test_an_interval_that_grows_before_the_line_is_not_the_one_that_was_waited_for(
    folder: Path, read_record: Read, clock: VirtualClock
) -> None:
    """A report of another request comes between the grant and its line."""
    config = config_of(folder, pacing={"default_interval": 5.0})
    async with ScriptedGate(config=config, clock=clock) as gate:
        await gate.check(f"{A}/")
        clock.advance(60.0)
        granted = gate.parts.audit.granted  # type: ignore[union-attr]

        def late(*arguments: Any) -> bool:
            gate.override(HostRule(match="a.example", interval=60.0))
            return bool(granted(*arguments))

        gate.parts.audit.granted = late  # type: ignore[union-attr]
        (await gate.acquire(f"{A}/1")).end()
    grant = read_record("grant")[-1]
    assert grant["scopes"][0]["interval"] == 5.0


async def test_settings_of_a_reload_are_written(folder: Path, read_record: Read) -> None:
    async with ScriptedGate(config=config_of(folder)) as gate:
        gate.parts.scheduler.adjust(PacingConfig(max_interval=5.0))
    (line,) = read_record("settings")
    assert line["settings"]["pacing"]["max_interval"] == 5.0
    assert set(line["settings"]["pacing"]) == set(read_record("start")[0]["settings"]["pacing"])


async def test_blocks_pauses_and_overrides_are_written_with_who_set_them(
    folder: Path, read_record: Read
) -> None:
    rules = [{"match": "b.example", "robots": "deny", "reason": "they asked"}]
    async with ScriptedGate(config=config_of(folder, host=rules)) as gate:
        await gate.pause("a.example")
        await gate.resume("a.example")
        await gate.block("a.example", gate.parts.clock.wall() + 60.0, "too many mails")
        gate.override(HostRule(match="a.example", robots="allow", reason="ours"))
    first, second = read_record("override")
    assert (first["match"], first["source"], first["ended"]) == (
        "b.example",
        "configuration",
        False,
    )
    assert (second["match"], second["source"], second["reason"]) == ("a.example", "call", "ours")
    assert second["rule"]["robots"] == "allow"
    assert [one["ended"] for one in read_record("pause")] == [False, True]
    (block,) = read_record("block")
    assert (block["scope"], block["by"], block["reason"]) == (
        "a.example",
        "operator",
        "too many mails",
    )
    assert block["until"] > block["since"]


@pytest.mark.parametrize(
    ("urls", "written"),
    [("full", "https://a.example/p?q=secret"), ("path", "https://a.example/p"), ("digest", None)],
)
async def test_urls_are_written_as_the_setting_says(
    urls: str, written: str | None, folder: Path, read_record: Read
) -> None:
    async with ScriptedGate(config=config_of(folder, audit={"urls": urls})) as gate:
        (await gate.acquire("https://a.example/p?q=secret")).end()
    (grant,) = read_record("grant")
    (start,) = read_record("start")
    assert (start["urls"], "salt" in start) == (urls, urls == "digest")
    if written is None:
        assert len(grant["url"]) == 64
    else:
        assert grant["url"] == written


@pytest.mark.parametrize(
    "path", ["/@ann" + "x" * 300, "/?mail=ann@b.example&q=" + "x" * 300, "/@\u200b"]
)
async def test_a_url_with_an_at_sign_is_written_as_a_whole(
    path: str, folder: Path, read_record: Read
) -> None:
    async with ScriptedGate(config=config_of(folder)) as gate:
        lease = await gate.acquire(f"https://a.example{path}")
        lease.end()
    (grant,) = read_record("grant")
    assert grant["url"] == lease.url


async def test_no_fragment_is_written(folder: Path, read_record: Read) -> None:
    config = config_of(folder, audit={"what": "decisions"})
    async with ScriptedGate(config=config) as gate:
        for url in ("https://a.example/p#token=1", "https://ann:a#b@a.example/p#token=1"):
            async for _ in gate.check_many([url]):
                pass
    written = [line["url"] for line in read_record("decision")]
    assert written == ["https://a.example/p", "https://***@a.example/p"]


async def test_credentials_and_keys_are_never_written(folder: Path) -> None:
    config = config_of(folder, fleet={"namespace": "x"}, audit={"what": "decisions"})
    async with ScriptedGate(config=config) as gate:
        for url in ("https://user:geheim@a.example/", "https://a.example\udcff:geheim@/"):
            async for _ in gate.check_many([url]):
                pass
    assert "geheim" not in str(chains_of(folder))


async def test_two_gates_of_a_process_write_a_chain_each(folder: Path) -> None:
    clock = VirtualClock()  # the same moment for both
    async with (
        ScriptedGate(config=config_of(folder), clock=clock) as one,
        ScriptedGate(config=config_of(folder), clock=clock) as two,
    ):
        (await one.acquire(f"{A}/1")).end()
        (await two.acquire(f"{A}/2")).end()
    chains = chains_of(folder)
    assert len(chains) == 2
    for lines in chains.values():
        assert [line["kind"] for line in lines].count("grant") == 1


async def test_no_file_remains_of_a_gate_without_a_record(tmp_path: Path) -> None:
    async with ScriptedGate() as gate:
        assert gate.parts.audit is None
        (await gate.acquire(f"{A}/1")).end()
    await asyncio.sleep(0)
    assert list(tmp_path.iterdir()) == []
