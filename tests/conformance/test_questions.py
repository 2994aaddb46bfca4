"""The same questions get the same answers in every way to the gate."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from typing import Any

import pytest

from gatekeeper import ConfigError, Denied, InvalidURL, Reason, State, Verdict
from gatekeeper.clock import VirtualClock
from gatekeeper.fetching.allowed_addresses import ADDRESS_NOTE, NAME_NOTE, PORT_NOTE, USERINFO_NOTE
from tests.internet import FakeInternet, Hold, Page
from tests.waiting_support import until

ROBOTS = """\
User-agent: *
Crawl-delay: 3
Disallow: /private
Allow: /private/open

User-agent: other
Disallow: /others
"""
QUESTIONS = [
    "http://a.test/",
    "http://a.test/private/x?q=1",
    "http://a.test/private/open",
    "http://a.test/robots.txt",
    "http://ann:secret@a.test/x",
    "http://none.test/page",
    "http://down.test/page",
    "http://nowhere.test/",
    "http://10.0.0.1/",
    "http://a.test:22/",
]


@pytest.fixture
def world(internet: FakeInternet) -> FakeInternet:
    internet.site("a.test").robots(ROBOTS)
    internet.site("none.test")
    internet.site("down.test").robots(Page("", status=503))
    return internet


async def test_every_decision_says_what_the_embedded_gate_says(
    world: FakeInternet, open_gate: Any
) -> None:
    gate = await open_gate(world)
    told = [
        (
            d.verdict,
            d.reason,
            d.url,
            d.origin,
            d.user_agent,
            d.state,
            d.robots_status,
            d.crawl_delay,
        )
        for d in [await gate.check(url) for url in QUESTIONS]
    ]
    down = Verdict.DEFER, State.UNREACHABLE
    bot = "examplebot"
    page, home = "http://a.test/private/x?q=1", "http://a.test"
    assert told == [
        ("allow", "no_rule", "http://a.test/", home, bot, "parsed", 200, 3.0),
        ("deny", "rule", page, home, bot, "parsed", 200, 3.0),
        ("allow", "rule", "http://a.test/private/open", home, bot, "parsed", 200, 3.0),
        ("allow", "robots_file", "http://a.test/robots.txt", home, bot, "parsed", 200, None),
        ("deny", "blocked", "http://***@a.test/x", home, bot, None, None, None),
        *(
            ("allow", "no_file", f"{o}/page", o, bot, "unavailable", 404, None)
            for o in ["http://none.test"]
        ),
        (
            down[0],
            "server_error",
            "http://down.test/page",
            "http://down.test",
            bot,
            down[1],
            503,
            None,
        ),
        (
            down[0],
            "dns_nxdomain",
            "http://nowhere.test/",
            "http://nowhere.test",
            bot,
            down[1],
            None,
            None,
        ),
        ("deny", "blocked", "http://10.0.0.1/", "http://10.0.0.1", bot, None, None, None),
        ("deny", "blocked", "http://a.test:22/", "http://a.test:22", bot, None, None, None),
    ]


async def test_a_refusal_by_the_guard_names_its_remedy(world: FakeInternet, open_gate: Any) -> None:
    gate = await open_gate(world)
    for url, note in (
        ("http://10.0.0.1/", ADDRESS_NOTE),
        ("http://localhost/", NAME_NOTE),
        ("http://a.test:22/", PORT_NOTE.format(22)),
        ("http://x@a.test/", USERINFO_NOTE),
    ):
        assert (await gate.check(url)).note == note
        with pytest.raises(Denied, match=re.escape(note)):
            await gate.acquire(url)


async def test_the_line_that_decided_is_named(world: FakeInternet, open_gate: Any) -> None:
    gate = await open_gate(world)
    decision = await gate.check("http://a.test/private/x")
    assert decision.rule is not None
    assert (decision.rule.line, decision.rule.text) == (3, "Disallow: /private")
    assert decision.fetched_at is not None
    assert decision.expires_at > decision.fetched_at
    assert decision.id


async def test_a_deferral_says_when_to_ask_again(world: FakeInternet, open_gate: Any) -> None:
    gate = await open_gate(world)
    decision = await gate.check("http://down.test/")
    assert decision.retry_at is not None
    assert not await gate.allowed("http://down.test/")


async def test_a_question_may_name_another_user_agent(world: FakeInternet, open_gate: Any) -> None:
    gate = await open_gate(world)
    assert not await gate.allowed("http://a.test/others", user_agent="other/2.0")
    assert await gate.allowed("http://a.test/others")
    assert (await gate.check("http://a.test/", user_agent="other/2.0")).user_agent == "other"


async def test_an_agent_without_a_name_is_refused(world: FakeInternet, open_gate: Any) -> None:
    gate = await open_gate(world)
    with pytest.raises(ConfigError):
        await gate.check("http://a.test/", user_agent="()")


@pytest.mark.parametrize("url", ["mailto:a@b", "http://a b/", "", "http://%61/", "http://1.2/"])
async def test_text_that_is_no_url_raises_invalid_url(
    world: FakeInternet, open_gate: Any, url: str
) -> None:
    gate = await open_gate(world)
    for ask in (gate.check, gate.allowed):
        with pytest.raises(InvalidURL) as caught:
            await ask(url)
        assert caught.value.problem
    with pytest.raises(InvalidURL):
        gate.peek(url)
    with pytest.raises(InvalidURL):
        async with gate.lease(url):
            pass


async def test_check_many_keeps_the_order_and_answers_every_url(
    internet: FakeInternet, open_gate: Any
) -> None:
    hold = Hold(Page("User-agent: *\nDisallow: /\n"))
    internet.site("slow.test").robots(hold)
    other = internet.site("b.test").robots("User-agent: *\nDisallow: /x\n")
    gate = await open_gate(internet)
    urls = ["http://slow.test/1", "http://b.test/x", "mailto:a@b", "http://b.test/y"]

    async def release() -> None:
        await until(lambda: other.requests)  # asked while slow.test is held
        hold.release()

    releasing = asyncio.create_task(release())
    decisions = [decision async for decision in gate.check_many(urls)]
    await releasing
    assert [d.verdict for d in decisions] == ["deny", "deny", "deny", "allow"]
    assert (decisions[2].reason, decisions[2].origin) == (Reason.INVALID_URL, "")
    assert decisions[2].note
    assert [d.url for d in decisions] == [urls[0], urls[1], "***@b", urls[3]]


async def test_check_all_is_check_many_as_a_list(world: FakeInternet, open_gate: Any) -> None:
    gate = await open_gate(world)
    urls = [f"http://a.test/{'private/' if n % 2 else ''}{n}" for n in range(1500)]
    decisions = await gate.check_all(urls)
    assert [d.url for d in decisions] == urls
    assert [bool(d) for d in decisions] == [n % 2 == 0 for n in range(1500)]


async def test_a_slow_origin_delays_no_other(internet: FakeInternet, open_gate: Any) -> None:
    hold = Hold(Page(""))
    internet.site("slow.test").robots(hold)
    internet.site("b.test").robots("")
    gate = await open_gate(internet)
    slow = asyncio.create_task(gate.allowed("http://slow.test/"))
    assert await gate.allowed("http://b.test/")
    assert not slow.done()
    await hold.waiting.acquire()
    hold.release()
    assert await slow


async def test_a_thousand_questions_cost_one_fetch(internet: FakeInternet, open_gate: Any) -> None:
    hold = Hold(Page("User-agent: *\nDisallow: /no\n"))
    site = internet.site("a.test").robots(hold)
    gate = await open_gate(internet)
    questions = [asyncio.create_task(gate.allowed(f"http://a.test/{i}")) for i in range(1000)]
    await hold.waiting.acquire()
    hold.release()
    assert all(await asyncio.gather(*questions))
    assert site.paths == ["/robots.txt"]


async def test_a_cancelled_question_does_not_cancel_another_about_the_same_origin(
    internet: FakeInternet, open_gate: Any
) -> None:
    hold = Hold(Page(""))
    internet.site("a.test").robots(hold)
    gate = await open_gate(internet)
    first, second = (asyncio.create_task(gate.allowed("http://a.test/x")) for _ in range(2))
    await hold.waiting.acquire()
    first.cancel()
    hold.release()
    assert await second
    assert first.cancelled()


async def test_peek_never_fetches(world: FakeInternet, open_gate: Any) -> None:
    gate = await open_gate(world)
    assert gate.peek("http://a.test/private/x") is None
    assert world.sites["a.test"].paths == []
    await gate.check("http://a.test/private/x")
    peeked = gate.peek("http://a.test/private/x")
    assert peeked is not None
    assert peeked.verdict is Verdict.DENY


async def test_robots_and_policy_give_the_file_and_the_rules_of_an_agent(
    world: FakeInternet, open_gate: Any
) -> None:
    gate = await open_gate(world)
    robots = await gate.robots("http://a.test/x")
    assert robots is not None
    assert len(robots.groups) == 2
    assert (await gate.policy("http://a.test/")).crawl_delay == 3.0
    assert not (await gate.policy("http://a.test/", user_agent="other")).allowed("/others")
    assert await gate.robots("http://none.test/") is None
    assert (await gate.policy("http://none.test/")).allowed("/x")
    assert await gate.robots("http://down.test/robots.txt") is None
    assert not (await gate.policy("http://down.test/robots.txt")).allowed("/x")


async def test_a_conflict_of_readings_is_told_where_the_declared_one_decides(
    internet: FakeInternet, open_gate: Any
) -> None:
    """DIA-03: by the 2.0 draft the rule is one path, by RFC 9309 a prefix."""
    internet.site("a.test").robots("User-agent: *\nRobot-version: 2.0\nDisallow: /a\n")
    gate = await open_gate(internet, robots={"conflicts": "declared"})
    told = [(bool(d), d.conflict) for d in [await gate.check(f"http://a.test/{p}") for p in "abaa"]]
    inside = await gate.check("http://a.test/a/b")
    assert told == [(False, False), (True, False), (False, False), (False, False)]
    assert (bool(inside), inside.conflict, inside.rule) == (True, True, None)
    assert await gate.allowed("http://a.test/a/b")


async def test_a_rule_of_the_operator_decides_before_the_file(
    world: FakeInternet, open_gate: Any
) -> None:
    rules = [{"match": "a.test", "robots": "deny", "reason": "asked by mail"}]
    gate = await open_gate(world, host=rules)
    decision = await gate.check("http://a.test/")
    assert (decision.verdict, decision.reason, decision.state, decision.note) == (
        "deny",
        "operator",
        "override",
        "asked by mail",
    )


async def test_refresh_fetches_the_file_again(internet: FakeInternet, open_gate: Any) -> None:
    internet.site("a.test").robots("").on("/robots.txt", "", "User-agent: *\nDisallow: /\n")
    gate = await open_gate(internet)
    assert await gate.allowed("http://a.test/x")
    await gate.refresh("http://a.test")
    assert not await gate.allowed("http://a.test/x")


async def test_refresh_fetches_the_file_of_the_given_port(
    internet: FakeInternet, open_gate: Any
) -> None:
    internet.site("a.test:8080").on("/robots.txt", "", "User-agent: *\nDisallow: /\n")
    gate = await open_gate(internet)
    assert await gate.allowed("http://a.test:8080/x")
    await gate.refresh("http://a.test:8080/whatever")
    assert not await gate.allowed("http://a.test:8080/x")


async def test_why_names_every_clock(world: FakeInternet, open_gate: Any) -> None:
    gate = await open_gate(world)
    await gate.pause("a.test")
    assert [view.kind for view in await gate.why("a.test")] == ["pause"]
    await gate.resume("a.test")
    assert await gate.why("a.test") == ()


async def test_a_visit_time_holds_to_the_end_of_its_last_minute(
    virtual_internet: FakeInternet, open_gate: Any
) -> None:
    clock = virtual_internet.clock
    assert isinstance(clock, VirtualClock)
    clock.jump_wall(-(clock.wall() % 86_400))  # midnight
    virtual_internet.site("a.test").robots("User-agent: *\nVisit-time: 0000-0001\nDisallow:\n")
    gate = await open_gate(virtual_internet)
    drive = virtual_internet.drive
    assert await drive(gate.allowed("http://a.test/x"))
    clock.advance(119.0 - clock.monotonic())
    assert await drive(gate.allowed("http://a.test/x"))
    clock.advance(1.0)
    decision = await drive(gate.check("http://a.test/x"))
    assert (decision.verdict, decision.reason) == ("defer", "outside_visit_time")


async def test_the_fields_of_stats_cannot_be_set(world: FakeInternet, open_gate: Any) -> None:
    gate = await open_gate(world)
    await gate.check("http://a.test/")
    stats = gate.stats()
    first = dataclasses.fields(stats)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(stats, first, 1)
