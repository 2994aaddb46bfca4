"""Warm origins: the short road gives the decisions of the long one, but for the id."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
import pytest

from gatekeeper import Gatekeeper, HostRule, InvalidURL, Reason, Verdict, VirtualClock
from gatekeeper.decision import Decision
from gatekeeper.fetching.records import Moment
from gatekeeper.gate import decider
from gatekeeper.robots import RobotsTxt
from gatekeeper.robots.flat import FlatRules
from gatekeeper.robots.longest import LongestMatch
from tests.gate_support import common, gate_on, open_config
from tests.internet import FakeInternet

ROBOTS = "User-agent: *\nAllow: /private/open\nDisallow: /private\nDisallow: /*.pdf$\n"


@pytest.fixture
async def gate(net: FakeInternet) -> AsyncIterator[Gatekeeper]:
    net.site("a.test").robots(ROBOTS)
    async with gate_on(net) as gate:
        yield gate


async def asked(net: FakeInternet, gate: Gatekeeper, path: str, host: str = "a.test") -> Decision:
    decision: Decision = await net.drive(gate.check(f"http://{host}{path}"))
    return decision


async def warmed(net: FakeInternet, gate: Gatekeeper, path: str = "/a") -> Decision:
    """Ask twice: the first question leaves the form at rest, the second one a frame."""
    await asked(net, gate, path)
    return await asked(net, gate, path)


def recalled(gate: Gatekeeper, url: str, agent: str = "testbot") -> Decision | None:
    return gate.parts.decider.recall(url, agent, gate.parts.clock)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("/a", "/b?x=y"),
        ("/private/x", "/private/y/z"),
        ("/private/open", "/private/open/more"),
        ("/x.pdf", "/deep/y.pdf"),
    ],
)
async def test_urls_decided_by_one_rule_have_equal_decisions(
    virtual_internet: FakeInternet, gate: Gatekeeper, first: str, second: str
) -> None:
    built = await warmed(virtual_internet, gate, first)
    again = recalled(gate, f"http://a.test{second}")

    assert again is not None
    assert common(again, "url") == common(built, "url")
    assert again.url == f"http://a.test{second}"
    assert again.id != built.id


@pytest.mark.parametrize("path", ["/private/x", "/private/open/x", "/x.pdf", "/robots.txt"])
async def test_a_rule_not_met_before_gives_the_decision_of_a_cold_origin(
    virtual_internet: FakeInternet, gate: Gatekeeper, path: str
) -> None:
    virtual_internet.site("b.test").robots(ROBOTS)
    cold = common(await asked(virtual_internet, gate, path, "b.test"), "url")
    await warmed(virtual_internet, gate)
    again = recalled(gate, f"http://a.test{path}")

    assert again is not None
    own = ("origin", "fetched_at", "expires_at")
    warm = common(again, "url")
    assert {name: warm[name] for name in warm if name not in own} == {
        name: cold[name] for name in cold if name not in own
    }
    assert gate.stats().decisions[again.verdict, again.reason] == 2


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
async def test_an_unusual_url_is_left_to_check(
    virtual_internet: FakeInternet, gate: Gatekeeper, url: str
) -> None:
    await warmed(virtual_internet, gate)

    assert recalled(gate, url) is None


async def test_an_expired_record_answers_nothing(
    virtual_internet: FakeInternet, gate: Gatekeeper
) -> None:
    await warmed(virtual_internet, gate)
    clock, decider = virtual_internet.clock, gate.parts.decider
    assert isinstance(clock, VirtualClock)
    clock.advance(decider.records["http://a.test"].fresh_until - clock.monotonic() - 0.5)
    assert recalled(gate, "http://a.test/a") is not None
    assert decider.find("http://a.test/a", clock.monotonic())
    clock.advance(0.5)

    assert recalled(gate, "http://a.test/a") is None
    assert decider.find("http://a.test/a", clock.monotonic()) is None


async def test_a_rule_of_the_operator_outranks_prepared_decisions(
    virtual_internet: FakeInternet, gate: Gatekeeper
) -> None:
    await warmed(virtual_internet, gate)
    assert await gate.allowed("http://a.test/a")
    assert recalled(gate, "http://a.test/a") is not None
    gate.override(HostRule(match="a.test", robots="deny", reason="not ours"))

    assert recalled(gate, "http://a.test/a") is None
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

    assert recalled(gate, "http://b.test/a", "otherbot") is None
    decision = await gate.check("http://b.test/a", user_agent="otherbot/2.0")
    assert (decision.verdict, decision.user_agent) == (Verdict.DENY, "otherbot")
    assert await gate.check("http://b.test/a")


async def test_no_decision_is_recalled_of_a_file_with_visit_times(
    virtual_internet: FakeInternet, gate: Gatekeeper
) -> None:
    virtual_internet.site("b.test").robots("User-agent: *\nVisit-time: 0600-0845\n")
    await asked(virtual_internet, gate, "/a", "b.test")

    assert recalled(gate, "http://b.test/b") is None


async def test_recalled_decisions_are_counted(
    virtual_internet: FakeInternet, gate: Gatekeeper
) -> None:
    for path in ("/private", "/private/a", "/private/b", "/c"):
        await asked(virtual_internet, gate, path)

    counts = gate.stats().decisions
    assert counts[Verdict.DENY, Reason.RULE] == 3
    assert counts[Verdict.ALLOW, Reason.NO_RULE] == 1


async def test_check_all_keeps_the_order_and_answers_every_url(
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


async def test_a_lease_granted_at_once_has_the_decision_of_a_check(
    virtual_internet: FakeInternet, gate: Gatekeeper
) -> None:
    # The rule that decides /private/open decided no URL before: its decision is not cached.
    await warmed(virtual_internet, gate)
    for path in ("/b?c", "/private/open/x"):
        url = f"http://a.test{path}"
        await virtual_internet.clock.elapse(1.0)
        lease = gate.parts.leases.acquire_nowait(url, None)
        assert lease is not None
        lease.give_back()
        decision = await asked(virtual_internet, gate, path)
        assert lease.decision.url == url
        assert lease.decision.id != decision.id
        assert common(lease.decision, "url") == common(decision, "url")


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
async def test_a_url_that_is_not_plainly_allowed_gets_no_lease_at_once(
    virtual_internet: FakeInternet, gate: Gatekeeper, url: str
) -> None:
    await warmed(virtual_internet, gate)

    assert gate.parts.leases.acquire_nowait(url, None) is None
    assert gate.stats().pacing.in_flight == 0


async def test_a_host_in_use_gives_no_lease_at_once(
    virtual_internet: FakeInternet, gate: Gatekeeper
) -> None:
    await warmed(virtual_internet, gate)
    await virtual_internet.clock.elapse(1.0)
    held = gate.parts.leases.acquire_nowait("http://a.test/a", None)
    assert held is not None

    assert gate.parts.leases.acquire_nowait("http://a.test/b", None) is None
    held.end()


async def test_leases_of_a_file_with_two_readings_have_each_its_own_decision(
    net: FakeInternet, gate: Gatekeeper
) -> None:
    """If two dialects decide, a rule's decision must not be used for another path."""
    net.site("b.test").robots(
        "User-agent: *\nRobot-version: 2.0.0\nAllow: /a/*\nDisallow: /b/*\nAllow: /*\n"
    )

    async def decided(path: str) -> object:
        async with gate.lease(f"http://b.test{path}") as lease:
            lease.report(status=200)
            return lease.decision.rule

    for _ in range(2):
        for path in ("/a/x", "/c"):
            cold = await asked(net, gate, path, "b.test")
            assert await net.drive(decided(path)) == cold.rule
            assert not await asked(net, gate, "/b/x", "b.test")


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


async def test_every_method_gives_one_verdict_for_a_known_origin(
    virtual_internet: FakeInternet, gate: Gatekeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    await asked(virtual_internet, gate, "/a")
    (record,) = gate.parts.decider.records.values()
    text = record.text
    assert text is not None
    for path in PATHS:
        url = f"http://a.test{path}"

        async def verdict(url: str = url) -> bool | str:
            try:
                return await gate.allowed(url)
            except InvalidURL:
                return "invalid"

        record.ready, record.frame = 0, None  # the long road
        whole = await verdict()
        await warmed(virtual_internet, gate)
        assert record.ready
        assert isinstance(text.rules, LongestMatch)
        awake = await verdict()
        text.rest()
        with monkeypatch.context() as patch:
            patch.setattr(decider, "LATELY", 0)  # nothing wakes it
            resting = await verdict()
            assert isinstance(text.rules, FlatRules)
            flat = await verdict()
            assert isinstance(text.rules, FlatRules)
        assert whole == awake == resting == flat, path
        await asked(virtual_internet, gate, "/private")  # wakes the text: asked about lately
        await asked(virtual_internet, gate, "/private")


@pytest.mark.parametrize(
    "path", ["/a", "/private/x", "/private/open", "/x.pdf", "/robots.txt", "/%61"]
)
async def test_a_text_at_rest_gives_the_decision_of_a_parsed_one(
    virtual_internet: FakeInternet, gate: Gatekeeper, path: str
) -> None:
    virtual_internet.site("a.test").robots(ROBOTS + "Crawl-delay: 1\n")
    await asked(virtual_internet, gate, "/b")
    awake = await asked(virtual_internet, gate, path)
    (record,) = gate.parts.decider.records.values()
    assert record.text is not None
    for _ in range(2):
        record.text.rest()
        record.asked = 0
        before = gate.stats().decisions[awake.verdict, awake.reason]
        assert common(await asked(virtual_internet, gate, path), "url") == common(awake, "url")
        assert record.text.parsed is None
        assert gate.stats().decisions[awake.verdict, awake.reason] == before + 1


@pytest.mark.parametrize(("others", "wakes"), [(0, True), (3, True), (9, False)])
async def test_a_text_at_rest_is_parsed_for_an_origin_asked_about_lately(
    virtual_internet: FakeInternet,
    gate: Gatekeeper,
    monkeypatch: pytest.MonkeyPatch,
    others: int,
    wakes: bool,
) -> None:
    monkeypatch.setattr(decider, "LATELY", 5)
    await asked(virtual_internet, gate, "/b")
    (record,) = gate.parts.decider.records.values()
    assert record.text is not None
    record.text.rest()
    record.asked = 0
    assert not await asked(virtual_internet, gate, "/private/1")
    assert record.text.parsed is None
    for number in range(others):
        host = f"other{number}.test"
        virtual_internet.site(host).robots(f"User-agent: *\nDisallow: /{number}\n")
        await asked(virtual_internet, gate, "/", host)
    assert not await asked(virtual_internet, gate, "/private/2")
    assert (record.text.parsed is not None) is wakes


@pytest.mark.parametrize("rules", [1, 20_000])
async def test_the_crawl_delay_of_a_text_at_rest_is_known_without_parsing(
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


async def test_a_text_out_of_the_storage_is_read_once_for_the_questions_of_allowed(
    virtual_internet: FakeInternet, gate: Gatekeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    await asked(virtual_internet, gate, "/a")
    (record,) = gate.parts.decider.records.values()
    assert record.text is not None
    record.text.rest()
    record.text.rules = record.text.flat = None
    record.ready = record.asked = 0
    assert not await gate.allowed("http://a.test/private")
    assert isinstance(record.text.rules, FlatRules)

    def parse(*_: object, **__: object) -> None:
        raise AssertionError("read again")

    with monkeypatch.context() as patch:
        patch.setattr(RobotsTxt, "parse", parse)
        patch.setattr(decider, "LATELY", 0)  # nothing wakes it
        assert not await gate.allowed("http://a.test/private")
        assert await gate.allowed("http://a.test/b")
        assert record.text.parsed is None


@pytest.mark.parametrize(("rules", "form"), [(3, FlatRules), (300, LongestMatch)])
async def test_allowed_alone_wakes_a_text_whose_search_may_be_slow(
    virtual_internet: FakeInternet, gate: Gatekeeper, rules: int, form: type
) -> None:
    lines = [f"Disallow: /shared/{number}/\n" for number in range(rules)]
    virtual_internet.site("b.test").robots("User-agent: *\n" + "".join(lines))
    assert await virtual_internet.drive(gate.allowed("http://b.test/shared/a"))
    (record,) = gate.parts.decider.records.values()
    assert record.text is not None
    record.text.rest()
    assert isinstance(record.text.rules, FlatRules)
    for _ in range(3):
        assert await virtual_internet.drive(gate.allowed("http://b.test/shared/a"))
    assert isinstance(record.text.rules, form)


async def test_a_visit_time_holds_however_its_text_came_to_memory(
    virtual_internet: FakeInternet, gate: Gatekeeper
) -> None:
    # The virtual clock begins outside of these hours.
    hour = gate.parts.clock.wall() // 3_600 % 24
    window = f"{(hour + 2) % 24:02.0f}00-{(hour + 3) % 24:02.0f}00"
    virtual_internet.site("b.test").robots(f"User-agent: *\nDisallow: /x\nVisit-time: {window}\n")
    assert not await virtual_internet.drive(gate.allowed("http://b.test/a"))
    (record,) = gate.parts.decider.records.values()
    text = record.text
    assert text is not None
    text.rest()
    text.windows = ()  # as it comes out of the storage: nothing is known of it
    record.asked = 0
    for _ in range(4):  # at rest, then awake
        assert (await asked(virtual_internet, gate, "/a", "b.test")).verdict is Verdict.DEFER
        assert not await gate.allowed("http://b.test/a")
        assert text.windows
    assert text.parsed is not None


async def test_a_changed_setting_is_in_the_next_decision_also_about_a_host_not_asked_lately(
    virtual_internet: FakeInternet, gate: Gatekeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    virtual_internet.site("b.test").robots("User-agent: *\nCrawl-delay: 50\n")
    for _ in range(3):
        assert not (await asked(virtual_internet, gate, "/a", "b.test")).clamped
    monkeypatch.setattr(decider, "LATELY", 0)
    settings = msgspec.structs.replace(gate.config.pacing, max_interval=5.0)
    gate.parts.decider.adjust(msgspec.structs.replace(gate.config, pacing=settings))
    for _ in range(3):
        assert (await asked(virtual_internet, gate, "/a", "b.test")).clamped


@pytest.mark.parametrize("question", ["allowed", "check"])
async def test_an_origin_that_is_asked_about_stays_ready_to_answer(
    net: FakeInternet, question: str
) -> None:
    async with gate_on(net, open_config(cache={"hot_records": 6})) as gate:
        ask = getattr(gate, question)
        records = gate.parts.decider.records
        seen: list[object] = []
        for number in range(30):
            net.site(f"h{number}.test").robots(f"User-agent: *\nDisallow: /{number}\n")
            await net.drive(gate.check(f"http://h{number}.test/a"))
            assert await net.drive(ask("http://h0.test/a"))
            seen.append(records.get("http://h0.test"))
        assert len(records) == 6
        # The first search for an unused record may meet none; from then on others go.
        assert all(one is seen[-1] for one in seen[12:])


async def test_texts_that_are_woken_and_texts_that_are_fetched_share_one_bound(
    virtual_internet: FakeInternet, gate: Gatekeeper
) -> None:
    await warmed(virtual_internet, gate)
    texts = gate.parts.decider.texts
    assert len(texts) == gate.stats().directory.texts == 1
    assert texts.awake_bytes > 0
