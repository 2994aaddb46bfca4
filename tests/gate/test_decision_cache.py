"""Cached decisions: on a warm origin the second one equals the first but for URL and id."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest
from hypothesis import example, settings
from hypothesis import given as with_any
from hypothesis import strategies as st

from gatekeeper import Gatekeeper, HostRule, InvalidURL, Reason, Verdict, VirtualClock
from gatekeeper.client.wire import Decisions
from gatekeeper.config import CacheConfig, Config, GuardConfig
from gatekeeper.decision import Decision
from gatekeeper.fetching.records import Moment
from gatekeeper.gate import decision_cache
from gatekeeper.robots import RobotsTxt
from gatekeeper.robots.flat import FlatRules
from gatekeeper.sidecar.replica import GateAnswers
from tests.internet import FakeInternet

pytestmark = pytest.mark.usefixtures("speedups_on", "kept_at_once")

ROBOTS = "User-agent: *\nAllow: /private/open\nDisallow: /private\nDisallow: /*.pdf$\n"


@pytest.fixture
def kept_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cache decisions about an origin from the first one on."""
    monkeypatch.setattr(decision_cache, "_CACHE_AFTER", 1)


@pytest.fixture
async def gate(virtual_internet: FakeInternet) -> AsyncIterator[Gatekeeper]:
    net = virtual_internet
    net.site("a.test").robots(ROBOTS)
    config = Config(guard=GuardConfig(allow=("127.0.0.0/8", "*.test")), cache=CacheConfig())
    gate = Gatekeeper("testbot/1.0", config=config, clock=net.clock, resolver=net.resolver)
    async with gate:
        yield gate


async def asked(net: FakeInternet, gate: Gatekeeper, path: str, host: str = "a.test") -> Decision:
    decision: Decision = await net.drive(gate.check(f"http://{host}{path}"))
    return decision


def common(decision: Decision) -> dict[str, object]:
    fields = msgspec.structs.asdict(decision)
    return {name: value for name, value in fields.items() if name not in ("url", "id")}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("/a", "/b?x=y"),
        ("/private/x", "/private/y/z"),
        ("/private/open", "/private/open/more"),
        ("/x.pdf", "/deep/y.pdf"),
    ],
)
async def test_the_same_rule_gives_the_same_answer(
    virtual_internet: FakeInternet, gate: Gatekeeper, first: str, second: str
) -> None:
    built = await asked(virtual_internet, gate, first)
    recalled = GateAnswers(gate).recall(f"http://a.test{second}")

    assert recalled is not None
    assert common(recalled) == common(built)
    assert recalled.url == f"http://a.test{second}"
    assert recalled.id != built.id


@pytest.mark.parametrize("path", ["/private/x", "/private/open/x", "/x.pdf", "/robots.txt"])
async def test_a_rule_not_met_before_gives_the_decision_of_a_cold_origin(
    virtual_internet: FakeInternet, gate: Gatekeeper, path: str
) -> None:
    virtual_internet.site("b.test").robots(ROBOTS)
    cold = common(await asked(virtual_internet, gate, path, "b.test"))
    await asked(virtual_internet, gate, "/a")
    recalled = GateAnswers(gate).recall(f"http://a.test{path}")

    assert recalled is not None
    own = ("origin", "fetched_at", "expires_at")
    warm = common(recalled)
    assert {name: warm[name] for name in warm if name not in own} == {
        name: cold[name] for name in cold if name not in own
    }
    assert gate.stats().decisions[recalled.verdict, recalled.reason] == 2


@pytest.mark.parametrize(
    "url",
    [
        "http://user@a.test/a",
        "http://a.test/x/../private",
        "http://b.test/a",
        "nonsense",
        "",
    ],
)
async def test_anything_odd_is_left_to_check(
    virtual_internet: FakeInternet, gate: Gatekeeper, url: str
) -> None:
    await asked(virtual_internet, gate, "/a")

    assert GateAnswers(gate).recall(url) is None


async def test_an_expired_record_answers_nothing(
    virtual_internet: FakeInternet, gate: Gatekeeper
) -> None:
    await asked(virtual_internet, gate, "/a")
    clock = virtual_internet.clock
    assert isinstance(clock, VirtualClock)
    clock.advance(86_400.0)

    assert GateAnswers(gate).recall("http://a.test/a") is None


@pytest.mark.parametrize("often", [1, 1_000])
async def test_the_operators_word_outranks_what_was_prepared(
    virtual_internet: FakeInternet, gate: Gatekeeper, monkeypatch: pytest.MonkeyPatch, often: int
) -> None:
    monkeypatch.setattr(decision_cache, "_CACHE_AFTER", often)
    await asked(virtual_internet, gate, "/a")
    assert await gate.allowed("http://a.test/a")
    assert bool(kept_of(gate)) is (often == 1)
    gate.override(HostRule(match="a.test", robots="deny", reason="not ours"))

    assert not kept_of(gate)
    assert not await gate.allowed("http://a.test/a")
    assert (await asked(virtual_internet, gate, "/a")).verdict is Verdict.DENY
    gate.override(HostRule(match="a.test"))
    assert await gate.allowed("http://a.test/a")
    assert (await asked(virtual_internet, gate, "/a")).verdict is Verdict.ALLOW


async def test_agents_have_answers_of_their_own(
    virtual_internet: FakeInternet, gate: Gatekeeper
) -> None:
    virtual_internet.site("b.test").robots("User-agent: otherbot\nDisallow: /\n")
    await asked(virtual_internet, gate, "/a", "b.test")

    assert GateAnswers(gate).recall("http://b.test/a", user_agent="otherbot") is None
    decision = await gate.check("http://b.test/a", user_agent="otherbot")
    assert decision.verdict is Verdict.DENY
    assert GateAnswers(gate).recall("http://b.test/x", user_agent="otherbot/2.0") is not None


async def test_a_file_with_visit_times_is_asked_each_time(
    virtual_internet: FakeInternet, gate: Gatekeeper
) -> None:
    virtual_internet.site("b.test").robots("User-agent: *\nVisit-time: 0600-0845\n")
    await asked(virtual_internet, gate, "/a", "b.test")

    assert GateAnswers(gate).recall("http://b.test/b") is None


async def test_recalled_decisions_are_counted(
    virtual_internet: FakeInternet, gate: Gatekeeper
) -> None:
    for path in ("/private", "/private/a", "/private/b", "/c"):
        await asked(virtual_internet, gate, path)

    counts = gate.stats().decisions
    assert counts[Verdict.DENY, Reason.RULE] == 3
    assert counts[Verdict.ALLOW, Reason.NO_RULE] == 1


async def test_check_all_keeps_order_and_loses_nothing(
    virtual_internet: FakeInternet, gate: Gatekeeper
) -> None:
    virtual_internet.site("b.test").robots("User-agent: *\nDisallow: /\n")
    await asked(virtual_internet, gate, "/private")
    urls = [
        "http://a.test/private/1",
        "http://b.test/",
        "nonsense",
        "http://a.test/2",
        "http://10.0.0.1/",
    ]
    decisions = await virtual_internet.drive(gate.check_all(urls))

    assert [one.url for one in decisions] == urls
    assert [one.reason for one in decisions] == [
        Reason.RULE,
        Reason.RULE,
        Reason.INVALID_URL,
        Reason.NO_RULE,
        Reason.BLOCKED,
    ]


async def test_a_lease_had_at_once_has_the_decision_of_a_check(
    virtual_internet: FakeInternet, gate: Gatekeeper
) -> None:
    # The rule that decides /private/open decided no URL before: its decision is not cached.
    await asked(virtual_internet, gate, "/a")
    for path in ("/b?c", "/private/open/x"):
        url = f"http://a.test{path}"
        await virtual_internet.clock.elapse(1.0)
        lease = gate.parts.leases.take(url, None)
        assert lease is not None
        lease.give_back()
        decision = await asked(virtual_internet, gate, path)
        assert lease.decision.url == url
        assert lease.decision.id != decision.id
        assert common(lease.decision) == common(decision)


@pytest.mark.parametrize(
    "url",
    [
        "http://a.test/private",
        "http://a.test/x.pdf",
        "http://a.test/robots.txt",
        "HTTP://a.test/a",
        "http://a.test/a#b",
        "http://a.test/ü",
        "http://user@a.test/a",
        "http://a.test/x/../private",
        "http://a.test",
        "http://b.test/a",
        "nonsense",
    ],
)
async def test_what_is_not_plainly_welcome_is_not_leased_at_once(
    virtual_internet: FakeInternet, gate: Gatekeeper, url: str
) -> None:
    await asked(virtual_internet, gate, "/a")

    assert gate.parts.leases.take(url, None) is None
    assert gate.stats().pacing.in_flight == 0


async def test_a_turn_that_is_not_free_is_not_had_at_once(
    virtual_internet: FakeInternet, gate: Gatekeeper
) -> None:
    await asked(virtual_internet, gate, "/a")
    await virtual_internet.clock.elapse(1.0)
    held = gate.parts.leases.take("http://a.test/a", None)
    assert held is not None

    assert gate.parts.leases.take("http://a.test/b", None) is None
    held.end()


# -- written as JSON ------------------------------------------------------------------------

ODD_FILE = 'User-agent: *\nDisallow: /ß"\nDisallow: /*"id":"\nAllow: /b # "url":""\u2028\\\n'
_AUTHORITIES = ["http://a.test", "http://A.test", "http://a.test:80", "http://b.test", "http://"]
_URLS = st.builds(
    "{}{}".format,
    st.sampled_from([*_AUTHORITIES, "http://[::1]", 'http://a"b', "http://ä.test", "https:", ""]),
    st.text(alphabet=st.sampled_from('ab/.%2E?#&=\\ \t\x7f"<>^`{|}[]*$~éß\u2028\ud800'), max_size=9)
    | st.sampled_from(
        ['/"id":"', "/%C3%9F%22x", "/robots.txt", "/b", "/b/../robots.txt", "/" + "x" * 65_600]
    ),
)


@with_any(st.lists(_URLS, min_size=1, max_size=20))
@example(["http://a.test/b", "http://a.test/b"])
@example(['http://a.test/"', "http://a.test/b"])
@example(["http://a.testb", "http://a.test"])
@example(["http://a.test/%C3%9F%22", "http://a.test/%22id%22:%22"])
@settings(max_examples=60, deadline=None)
def test_what_is_written_are_the_octets_of_the_decision(raws: list[str]) -> None:
    async def main() -> None:
        async with FakeInternet() as net:
            for host in ("a.test", "b.test"):
                net.site(host).robots(ODD_FILE)
            config = Config(guard=GuardConfig(allow=("127.0.0.0/8", "*.test")))
            async with Gatekeeper("testbot/1.0", config=config, resolver=net.resolver) as gate:
                for path in ("/", "/b", '/ß"', '/"id":"'):
                    await gate.check(f"http://a.test{path}")
                both = ["http://a.test/%C3%9F%22", "http://a.test/b"]
                assert GateAnswers(gate).write_many(both).missing() == []
                written = GateAnswers(gate).write_many(raws)
                missing = written.missing()
                for place, raw in enumerate(raws):
                    if place not in missing:
                        told, text = GateAnswers(gate).recall(raw), written[place]
                        assert told is not None
                        told = msgspec.structs.replace(told, id=msgspec.json.decode(text)["id"])
                        assert text.encode() == msgspec.json.encode(told)
                written.add(await gate.check_all([raws[place] for place in missing]))
                body = b"".join(written.body())
                assert body == f'{{"decisions":[{",".join(written)}]}}'.encode()
                assert [one.url for one in msgspec.json.decode(body, type=Decisions).decisions] == [
                    one.url for one in await gate.check_all(raws)
                ]

    asyncio.run(main())


async def test_ordinary_urls_are_written_whatever_stands_beside_them(
    virtual_internet: FakeInternet, gate: Gatekeeper
) -> None:
    for path in ("/a", "/private"):
        await asked(virtual_internet, gate, path)
    ordinary = ["http://a.test/b", "http://a.test/private/%20"]
    odd = ["nonsense", "http://a.test/ä", "http://a.test/x/../private", "http://A.test/b"]
    late = ["http://c.test/", "http://a.test/robots.txt", "http://a.test/new.pdf", ""]

    assert GateAnswers(gate).write_many(ordinary).missing() == []
    written = GateAnswers(gate).write_many([*ordinary, *odd, *late])
    assert written.missing() == list(range(2, 10))


async def test_what_is_written_is_counted_told_and_numbered(
    virtual_internet: FakeInternet, gate: Gatekeeper
) -> None:
    for path in ("/a", "/private"):
        await asked(virtual_internet, gate, path)
    raws = ["http://a.test/b", "nonsense", "http://a.test/private/c"] * 2
    batch = GateAnswers(gate).write_many(raws)
    given, written = batch.written(), [batch[place] for place in (0, 2, 3, -1)]

    assert gate.stats().decisions[Verdict.DENY, Reason.RULE] == 1
    assert sorted(batch.tally().values()) == [2, 2]
    assert gate.stats().decisions[Verdict.DENY, Reason.RULE] == 1 + 2
    assert [one.decision for one in given] == [
        msgspec.json.decode(text, type=Decision) for text in written
    ]
    assert len({one.decision.id for one in given} | {(await gate.check(raws[0])).id}) == 5


async def test_nothing_is_written_of_an_expired_record(
    virtual_internet: FakeInternet, gate: Gatekeeper
) -> None:
    await asked(virtual_internet, gate, "/a")
    clock = virtual_internet.clock
    assert isinstance(clock, VirtualClock)
    clock.advance(86_400.0)

    assert GateAnswers(gate).write_many(["http://a.test/a"]).missing() == [0]


async def test_what_is_written_is_the_agents_own(
    virtual_internet: FakeInternet, gate: Gatekeeper
) -> None:
    await asked(virtual_internet, gate, "/private")
    await gate.check("http://a.test/private", user_agent="otherbot")
    [text] = GateAnswers(gate).write_many(["http://a.test/private/x"], user_agent="otherbot/1.0")

    assert msgspec.json.decode(text)["user_agent"] == "otherbot"


async def test_leases_of_a_file_with_two_readings_have_each_its_own_decision(
    virtual_internet: FakeInternet, gate: Gatekeeper
) -> None:
    """If two dialects decide, a rule's decision must not be used for another path."""
    virtual_internet.site("b.test").robots(
        "User-agent: *\nRobot-version: 2.0.0\nAllow: /a/*\nDisallow: /b/*\nAllow: /*\n"
    )
    net = virtual_internet

    async def decided(path: str) -> object:
        async with gate.lease(f"http://b.test{path}") as lease:
            lease.report(status=200)
            return lease.decision.rule

    for _ in range(2):
        for path in ("/a/x", "/c"):
            cold = await asked(net, gate, path, "b.test")
            assert await net.drive(decided(path)) == cold.rule
            assert not await asked(net, gate, "/b/x", "b.test")


# -- origins whose decisions are cached --------------------------------------------------------


def kept_of(gate: Gatekeeper) -> set[str]:
    return {origin for origin, record in gate.parts.decider.records.items() if record.cached}


async def test_decisions_are_kept_of_origins_that_are_asked_about_often(
    virtual_internet: FakeInternet, gate: Gatekeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decision_cache, "_CACHE_AFTER", 3)
    monkeypatch.setattr(decision_cache, "_QUESTIONS_PER_ERA", 1)
    gate.parts.decider._cache._left_in_era = 1
    hosts = [f"h{number}.test" for number in range(4)]
    for host in hosts:
        virtual_internet.site(host).robots(ROBOTS)
    for number in range(10):  # in turn: four questions lie between two about the same origin
        for host in hosts:
            assert (
                await asked(virtual_internet, gate, f"/{number}", host)
            ).verdict is Verdict.ALLOW
            assert not (await asked(virtual_internet, gate, "/private", host))
    assert not kept_of(gate)
    for number in range(4):
        assert await gate.allowed(f"http://h1.test/{number}")
    assert kept_of(gate) == {"http://h1.test"}


async def test_there_is_a_bound_on_the_origins_of_which_they_are_kept(
    virtual_internet: FakeInternet, gate: Gatekeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decision_cache, "_MAX_ORIGINS", 2)
    for number in range(5):
        virtual_internet.site(f"h{number}.test").robots(ROBOTS)
        await asked(virtual_internet, gate, "/a", f"h{number}.test")
    assert kept_of(gate) == {"http://h3.test", "http://h4.test"}
    assert not await gate.allowed("http://h0.test/private/x")
    assert await gate.allowed("http://h0.test/private/open")


PATHS = (
    *("/", "/a", "/private", "/private/open", "/private/open/x", "/x.pdf", "/x.pdf?", "/x.pdf#a"),
    *(
        "/a/../private",
        "/%70rivate",
        "/private%",
        "/privat\u00e9",
        "/robots.txt",
        "/a b",
        "/?/x.pdf",
    ),
    *(
        "/?/x.pdf",
        "/" + "x" * 9_000,
        "/" + "x" * 70_000,
        "",
        "x",
        "/.",
        "/a/%2e%2e/private",
        "//private",
    ),
)


async def test_every_way_gives_one_verdict(
    virtual_internet: FakeInternet, gate: Gatekeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    await asked(virtual_internet, gate, "/a")
    (record,) = gate.parts.decider.records.values()
    for path in PATHS:
        url = f"http://a.test{path}"

        async def verdict(url: str = url) -> bool | str:
            try:
                return await gate.allowed(url)
            except InvalidURL:
                return "invalid"

        record.ready, record.rules = 0, None  # the whole decision
        record.drop_cached()
        whole = await verdict()
        await gate.allowed("http://a.test/a")
        kept = await verdict()
        monkeypatch.setattr(decision_cache, "_CACHE_AFTER", 1_000)
        record.drop_cached()  # the policy alone
        assert record.ready
        plain = await verdict()
        assert record.text is not None
        record.text.rest()  # the rules of a packed text
        assert isinstance(record.text.ready, FlatRules)
        resting = await verdict()
        monkeypatch.setattr(decision_cache, "_CACHE_AFTER", 1)
        assert whole == kept == plain == resting, path


@pytest.mark.parametrize(
    "path", ["/a", "/private/x", "/private/open", "/x.pdf", "/robots.txt", "/%61"]
)
async def test_a_text_at_rest_gives_the_decision_that_it_gives_awake(
    virtual_internet: FakeInternet,
    gate: Gatekeeper,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
) -> None:
    monkeypatch.setattr(decision_cache, "_CACHE_AFTER", 1_000)
    virtual_internet.site("a.test").robots(ROBOTS + "Crawl-delay: 1\n")
    await asked(virtual_internet, gate, "/b")
    awake = await asked(virtual_internet, gate, path)
    (record,) = gate.parts.decider.records.values()
    assert record.text is not None
    for _ in range(2):
        record.text.rest()
        before = gate.stats().decisions[awake.verdict, awake.reason]
        assert common(await asked(virtual_internet, gate, path)) == common(awake)
        assert gate.stats().decisions[awake.verdict, awake.reason] == before + 1


async def test_a_text_at_rest_wakes_for_an_origin_that_is_asked_about_again(
    virtual_internet: FakeInternet, gate: Gatekeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decision_cache, "_CACHE_AFTER", 4)
    await asked(virtual_internet, gate, "/b")
    (record,) = gate.parts.decider.records.values()
    assert record.text is not None
    record.text.rest()
    record.drop_cached()
    record.questions = 0
    awake = []
    for number in range(4):
        assert not await asked(virtual_internet, gate, f"/private/{number}")
        awake.append(record.text.parsed is not None)
    assert awake == [False, False, False, True]


@pytest.mark.parametrize("rules", [1, 20_000])
async def test_what_a_text_at_rest_asks_for_is_known_without_reading_it_again(
    virtual_internet: FakeInternet,
    gate: Gatekeeper,
    monkeypatch: pytest.MonkeyPatch,
    rules: int,
) -> None:
    text = "User-agent: *\nCrawl-delay: 7\n" + "Disallow: /private\n" * rules
    virtual_internet.site("b.test").robots(text)
    await asked(virtual_internet, gate, "/a", "b.test")
    (record,) = gate.parts.decider.records.values()
    assert record.text is not None
    record.text.rest()

    def parse(*_: object, **__: object) -> None:
        raise AssertionError("read again")

    monkeypatch.setattr(RobotsTxt, "parse", parse)
    moment = Moment(gate.parts.clock.monotonic(), gate.parts.clock.wall())
    assert gate.parts.decider.interval(record, "testbot", moment).seconds == 7.0


async def test_the_first_check_spares_the_next_question_a_look_at_the_text(
    virtual_internet: FakeInternet, gate: Gatekeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decision_cache, "_CACHE_AFTER", 1_000)
    await asked(virtual_internet, gate, "/a")
    (record,) = gate.parts.decider.records.values()
    assert record.text is not None
    assert isinstance(record.rules, FlatRules)
    assert record.rules is record.text.ready
    record.text.used = False
    assert await gate.allowed("http://a.test/a")
    assert not record.text.used
