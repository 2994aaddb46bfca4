"""A `Replica` gives the answers of the gate whose records it has, and no others."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from gatekeeper import Gatekeeper
from gatekeeper.config import Config, GuardConfig, HostRule, ServerConfig
from gatekeeper.decision import Decision, Verdict
from gatekeeper.sidecar.channel import Configure
from gatekeeper.sidecar.replica import Replica, shared_record
from tests.gate_support import gate_on, open_config
from tests.internet import FakeInternet

CONFIG = open_config()
TEXT = (
    "User-agent: *\nDisallow: /private\nAllow: /private/é$\nCrawl-delay: 0.3\n\n"
    "User-agent: other\nDisallow: /\n"
)
URLS = (
    "http://a.test/",
    "http://a.test/private/x?y=1",
    "http://a.test/private/%C3%A9",
    "http://A.test:80/private/é",
    "http://a.test/robots.txt",
    "http://a.test/a/../private",
    "http://10.0.0.1/",
)


@pytest.fixture
async def gate(internet: FakeInternet) -> AsyncIterator[Gatekeeper]:
    internet.site("a.test").robots(TEXT)
    internet.site("none.test")
    internet.site("large.test").robots("User-agent: *\n" + "Disallow: /x\n" * 6_000)
    internet.site("down.test").page("/robots.txt", status=503)
    async with gate_on(internet, CONFIG) as gate:
        yield gate


def replica(wanted: list[str]) -> Replica:
    return Replica("testbot/1.0", CONFIG, wanted=wanted.append)


def same(one: Decision | None, other: Decision | None) -> bool:
    """All fields but the id; times to a hundredth, as a record is sent in whole milliseconds."""
    assert one is not None
    assert other is not None
    if one.expires_at is None or other.expires_at is None:
        assert one.expires_at is other.expires_at
    else:
        assert abs((one.expires_at - other.expires_at).total_seconds()) < 0.01
    fixed = {"id": "", "expires_at": None}
    return msgspec.structs.replace(one, **fixed) == msgspec.structs.replace(other, **fixed)


@pytest.mark.parametrize("agent", [None, "other/2.0"])
async def test_a_replica_decides_like_the_gate_whose_records_it_has(
    gate: Gatekeeper, agent: str | None
) -> None:
    wanted: list[str] = []
    other = replica(wanted)
    assert other.decide(URLS[0], user_agent=agent) is None
    assert wanted == ["http://a.test"]
    await gate.check(URLS[0])
    record = shared_record(gate, "http://a.test")
    assert record is not None
    other.take_in(record)
    for _ in range(6):  # from the text, and from its rules
        for url in URLS:
            mine = other.decide(url, user_agent=agent)
            assert same(mine, await gate.check(url, user_agent=agent))
    told, refused = other.drain_counts()
    assert sum(told.values()) == 6 * len(URLS)
    assert sum(refused.values()) > 0
    assert not any(other.drain_counts())


async def test_a_replica_decides_a_batch_as_a_whole_or_not_at_all(gate: Gatekeeper) -> None:
    other, urls = replica([]), [f"http://a.test/{number}" for number in range(3)]
    await gate.check(urls[0])
    record = shared_record(gate, "http://a.test")
    assert record is not None
    other.take_in(record)
    for url in ("http://cold.test/", "nonsense"):
        assert other.decide_all([*urls, url]) is None
        assert not any(other.drain_counts())
    decided = other.decide_all(urls)
    assert decided is not None
    assert all(map(same, decided, await gate.check_all(urls)))
    assert sum(other.drain_counts()[0].values()) == 3


async def test_only_records_that_need_nothing_but_their_text_are_shared(gate: Gatekeeper) -> None:
    for name, shared in (("none", True), ("large", False), ("down", False)):
        await gate.check(f"http://{name}.test/")
        assert (shared_record(gate, f"http://{name}.test") is not None) is shared
    assert shared_record(gate, "http://unheard.test") is None


async def test_a_replica_follows_a_forgotten_record_and_a_new_rule_at_once(
    gate: Gatekeeper,
) -> None:
    other, url = replica([]), "http://a.test/x"
    await gate.check(url)
    record = shared_record(gate, "http://a.test")
    assert record is not None

    def verdict() -> Verdict | None:
        decision = other.decide(url)
        return None if decision is None else decision.verdict

    for _ in range(6):
        other.take_in(record)
        assert verdict() is Verdict.ALLOW
        other.follow_rules([HostRule(match="a.test", robots="deny")])
        assert verdict() is Verdict.DENY
        other.follow_rules([])
        assert verdict() is Verdict.ALLOW
        other.forget("http://a.test")
        assert verdict() is None
        other.take_in(record)
        other.adjust(Config(guard=GuardConfig(allow=("127.0.0.0/8",), deny=("a.test",))))
        assert verdict() is Verdict.DENY
        other.adjust(CONFIG)
        assert verdict() is Verdict.ALLOW  # the record stays


async def test_a_replica_is_told_of_each_record_and_each_rule(gate: Gatekeeper) -> None:
    heard: list[str] = []

    class Follower:
        def learnt(self, record: Any) -> None:
            heard.append(record.origin)

        def rules_changed(self) -> None:
            heard.append("rules")

    gate.parts.followers.append(Follower())
    await gate.check("http://a.test/")
    await gate.refresh("http://a.test")
    gate.override(HostRule(match="a.test", robots="deny"))

    assert heard == ["http://a.test", "http://a.test", "rules"]
    assert [rule.match for rule in gate.parts.scheduler.host_rules.entries()] == ["a.test"]


def test_a_configuration_goes_from_process_to_process_as_it_is() -> None:
    config = Config(
        user_agent="a/1",
        host=(HostRule(match="a.test", interval=2.0, reason="é"),),
        server=ServerConfig(workers=3, allowed_hosts=("x",)),
        guard=GuardConfig(allow=("10.0.0.0/8",)),
    )
    sent = Configure(config, (), list(config.host), "a", [("127.0.0.1", 80)])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=Configure) == sent
