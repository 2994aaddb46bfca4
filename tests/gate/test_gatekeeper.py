"""The public methods of an embedded gate."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from datetime import UTC, datetime
from pathlib import Path

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gatekeeper import (
    Config,
    ConfigError,
    Denied,
    GateClosed,
    Gatekeeper,
    HostRule,
    InvalidURL,
    Reason,
    State,
    Verdict,
)
from gatekeeper.clock import VirtualClock
from gatekeeper.decision import BLOCKED_NOTE
from gatekeeper.fetching.allowed_addresses import (
    ADDRESS_NOTE,
    NAME_NOTE,
    NO_NAME_NOTE,
    NO_PORT_NOTE,
    PORT_NOTE,
    USERINFO_NOTE,
)
from gatekeeper.testing import ScriptedGate
from tests.gate_support import QUICK, gate_on, open_config
from tests.internet import FakeInternet, Page

AGENT = "examplebot/1.0 (+https://example.org/bot)"
AUTHORITIES = ["http://a.test/", "http://a.test", "HTTP://A.test:80/", "http://u@a.test/", "/"]
FILES = [
    "",
    "User-agent: *\nDisallow: /a\nDisallow: /b/\nDisallow: /~\n",
    "User-agent: *\nDisallow: /\n",
    "User-agent: *\nDisallow: /a\nAllow: /a/b\nDisallow: /*%2E\nDisallow: /b*[\n"
    "Disallow: /*?a\nDisallow: /ab$\nDisallow: /a%20b\nDisallow: /\\\n",
    "User-agent: *\nRobot-version: 2.0\nDisallow: /a*\n",
]
OPEN = open_config()


@pytest.fixture
async def gate(internet: FakeInternet) -> AsyncIterator[Gatekeeper]:
    async with gate_on(internet, agent=AGENT) as gate:
        yield gate


async def test_the_storage_path_memory_creates_no_file(
    internet: FakeInternet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the sidecar: "memory" is not a file of that name in the current directory."""
    monkeypatch.chdir(tmp_path)
    internet.site("a.test").robots("")
    async with gate_on(internet, open_config(storage={"path": "memory"}), agent=AGENT) as gate:
        assert await gate.allowed("http://a.test/")
    assert not any(tmp_path.iterdir())


async def test_a_rule_decides_and_is_named(internet: FakeInternet, gate: Gatekeeper) -> None:
    internet.site("a.test").robots("User-agent: *\nDisallow: /private\n")
    decision = await gate.check("http://a.test/private/x")
    assert decision.verdict is Verdict.DENY
    assert decision.reason is Reason.RULE
    assert decision.rule is not None
    assert (decision.rule.line, decision.rule.text) == (2, "Disallow: /private")
    assert decision.state is State.PARSED
    assert decision.robots_status == 200
    assert decision.origin == "http://a.test"
    assert decision.user_agent == "examplebot"
    assert not decision


async def test_a_missing_file_allows(internet: FakeInternet, gate: Gatekeeper) -> None:
    internet.site("a.test")
    decision = await gate.check("http://a.test/x")
    assert (decision.verdict, decision.reason, decision.state) == (
        Verdict.ALLOW,
        Reason.NO_FILE,
        State.UNAVAILABLE,
    )


async def test_an_empty_file_allows(internet: FakeInternet, gate: Gatekeeper) -> None:
    internet.site("a.test").robots("")
    decision = await gate.check("http://a.test/x")
    assert (decision.verdict, decision.reason) == (Verdict.ALLOW, Reason.EMPTY_FILE)


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_an_unreachable_file_defers(
    internet: FakeInternet, gate: Gatekeeper, status: int
) -> None:
    internet.site("a.test").robots(Page("User-agent: *\nDisallow:\n", status=status))
    decision = await gate.check("http://a.test/x")
    assert decision.verdict is Verdict.DEFER
    assert decision.state is State.UNREACHABLE
    assert decision.retry_at is not None
    assert decision.retry_at > datetime.now(UTC)
    assert not await gate.allowed("http://a.test/x")


async def test_an_unknown_name_defers(gate: Gatekeeper) -> None:
    decision = await gate.check("http://nowhere.test/")
    assert (decision.verdict, decision.reason) == (Verdict.DEFER, Reason.DNS_NXDOMAIN)


async def test_the_warm_path_counts_and_builds_no_decision(
    internet: FakeInternet, gate: Gatekeeper
) -> None:
    internet.site("a.test").robots("User-agent: *\nDisallow: /no\n")
    await gate.allowed("http://a.test/")
    before = gate.stats()
    assert await gate.allowed("http://a.test/yes")
    assert not await gate.allowed("http://a.test/no")
    after = gate.stats()
    assert (after.warm_allowed, after.warm_denied) == (
        before.warm_allowed + 1,
        before.warm_denied + 1,
    )
    assert after.decisions == before.decisions


async def test_files_are_shared_and_policies_are_per_agent(
    internet: FakeInternet, gate: Gatekeeper
) -> None:
    site = internet.site("a.test").robots(
        "User-agent: examplebot\nDisallow: /a\n\nUser-agent: other\nDisallow: /b\n"
    )
    assert not await gate.allowed("http://a.test/a")
    assert await gate.allowed("http://a.test/a", user_agent="other/2.0")
    assert not await gate.allowed("http://a.test/b", user_agent="other/2.0")
    assert await gate.allowed("http://a.test/b")
    assert site.paths == ["/robots.txt"]


async def test_check_many_of_warm_origins_lets_others_work() -> None:
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with ScriptedGate() as gate:
        await gate.check("https://a.example/")
        task = asyncio.create_task(other())
        await gate.check_all([f"https://a.example/{n}" for n in range(10_000)])
        task.cancel()
    assert turns > 50


async def test_without_a_file_robots_gives_none_and_policy_allows_or_denies_all(
    internet: FakeInternet, gate: Gatekeeper
) -> None:
    internet.site("a.test").robots("User-agent: *\nCrawl-delay: 3\nDisallow: /no\n")
    internet.site("none.test")
    internet.site("down.test").robots(Page("", status=500))
    robots = await gate.robots("http://a.test/x")
    assert robots is not None
    assert len(robots.groups) == 1
    assert (await gate.policy("http://a.test/")).crawl_delay == 3.0
    assert await gate.robots("http://none.test/") is None
    assert (await gate.policy("http://none.test/")).allowed("/x")
    assert await gate.robots("http://down.test/") is None
    assert not (await gate.policy("http://down.test/")).allowed("/x")


async def test_robots_txt_itself_is_always_allowed(
    internet: FakeInternet, gate: Gatekeeper
) -> None:
    internet.site("a.test").robots("User-agent: *\nDisallow: /\n")
    decision = await gate.check("http://a.test/robots.txt")
    assert (decision.verdict, decision.reason) == (Verdict.ALLOW, Reason.ROBOTS_FILE)


@pytest.mark.parametrize("raw", ["mailto:a@b", "http://", "http://a..b/", "http://127.1/", "x"])
async def test_malformed_text_is_refused_by_name(gate: Gatekeeper, raw: str) -> None:
    for question in (gate.allowed(raw), gate.check(raw), gate.acquire(raw)):
        with pytest.raises(InvalidURL):
            await question


@pytest.mark.parametrize(
    "raw", ["http://u:secret@a.test/", "http://10.0.0.1/", "http://a.test:22/", "http://localhost/"]
)
async def test_every_refusal_by_the_guard_has_the_reason_blocked(
    gate: Gatekeeper, raw: str
) -> None:
    decision = await gate.check(raw)
    assert (decision.verdict, decision.reason) == (Verdict.DENY, Reason.BLOCKED)
    assert "secret" not in repr(decision)
    assert not await gate.allowed(raw)


@pytest.mark.parametrize(
    ("raw", "note"),
    [
        ("http://10.0.0.1/", ADDRESS_NOTE),
        ("http://[fd00::1]/", ADDRESS_NOTE),
        ("http://127.0.0.1:8750/", ADDRESS_NOTE),
        ("http://192.0.2.7/", ADDRESS_NOTE),
        ("http://8.8.8.8/", ADDRESS_NOTE),  # on the deny list
        ("http://a.test:22/", PORT_NOTE.format(22)),
        ("http://10.0.0.1:22/", PORT_NOTE.format(22)),
        ("http://u@a.test/", USERINFO_NOTE),
        ("http://u:secret@10.0.0.1/", USERINFO_NOTE),
        ("http://localhost/", NAME_NOTE),
        ("http://db.internal/", NAME_NOTE),
        ("http://denied.internal/", NAME_NOTE),  # on the deny list
        ("http://intranet/", NAME_NOTE),
        (f"http://{'a' * 64}.test/", NO_NAME_NOTE),
        ("http://a.test:0/", NO_PORT_NOTE.format(0)),
        ("http://in.test/", BLOCKED_NOTE),
        ("http://denied.test/", BLOCKED_NOTE),
        ("http://b.test/", BLOCKED_NOTE),
        ("http://c.test/", BLOCKED_NOTE),
    ],
)
async def test_the_note_of_a_refusal_names_what_the_url_itself_shows(
    internet: FakeInternet, raw: str, note: str
) -> None:
    internet.dns("in.test", "10.0.0.1")
    internet.site("b.test").redirect("/robots.txt", "http://10.0.0.1/robots.txt")
    internet.site("c.test").redirect("/robots.txt", "http://u:p@localhost:22/robots.txt")
    lists = {"allow": ["127.0.0.1/32"], "deny": ["8.8.8.8", "denied.test", "denied.internal"]}
    config = Config.from_dict({"guard": lists})
    async with Gatekeeper(AGENT, config=config, resolver=internet.resolver) as gate:
        assert gate.parts.guard is not None
        gate.parts.guard.listens_on("127.0.0.1", 8750)
        decision = await gate.check(raw)
        with pytest.raises(Denied) as caught:
            await gate.acquire(raw)
    assert (decision.reason, decision.note) == (Reason.BLOCKED, note)
    assert caught.value.decision.note == note
    assert "blocked (the guard refuses" in str(caught.value)
    assert ("guard.allow (--allow-address)" in note) == (note not in _NO_REMEDY_IN_ALLOW)


_NO_REMEDY_IN_ALLOW = (
    USERINFO_NOTE,
    PORT_NOTE.format(22),
    NO_PORT_NOTE.format(0),
    NO_NAME_NOTE,
)


@pytest.mark.parametrize(
    "answers",
    [
        ("10.0.0.1",),
        ("127.0.0.1",),
        ("127.0.0.1", "10.0.0.1", "::1"),
        ("169.254.169.254",),
        ("224.0.0.1",),
        ("8.8.8.8",),
        ("fd00::1",),
        ("::ffff:10.0.0.1",),
        ("64:ff9b::a00:1",),
        ("0.0.0.0",),
    ],
)
async def test_t2_the_address_of_a_name_changes_no_word_of_a_refusal(
    internet: FakeInternet, answers: tuple[str, ...]
) -> None:
    """Whatever the address is: another network, this machine, its own listener, the deny list."""
    internet.dns("in.test", *answers)
    config = Config.from_dict({"guard": {"deny": ["8.8.8.8"]}})
    async with Gatekeeper(AGENT, config=config, resolver=internet.resolver) as gate:
        assert gate.parts.guard is not None
        gate.parts.guard.listens_on("127.0.0.1", 80)
        decision = await gate.check("http://in.test/")
        with pytest.raises(Denied) as caught:
            await gate.acquire("http://in.test/")
    told = decision.verdict, decision.reason, decision.note, decision.state, decision.hops
    assert told == (Verdict.DENY, Reason.BLOCKED, BLOCKED_NOTE, State.UNREACHABLE, ())
    assert decision.robots_status is None
    assert str(caught.value).count("10.0.0.1") == 0


async def test_a_decision_has_the_whole_url_though_there_is_an_at_sign_in_it(
    internet: FakeInternet, gate: Gatekeeper
) -> None:
    internet.site("a.test").robots("User-agent: *\nDisallow: /*end$\n")
    url = "http://a.test/@ann" + "x" * 300 + "end"
    for _ in ("cold", "warm"):
        decision = await gate.check(url)
        assert (decision.verdict, decision.url) == (Verdict.DENY, url)


async def test_credentials_in_a_warm_origin_do_not_slip_past_the_guard(
    internet: FakeInternet, gate: Gatekeeper
) -> None:
    internet.site("a.test").robots("")
    assert await gate.allowed("http://a.test/")
    assert not await gate.allowed("http://u:p@a.test/")


async def test_a_rule_of_the_operator_allows_what_the_file_denies(internet: FakeInternet) -> None:
    site = internet.site("a.test").robots("User-agent: *\nDisallow: /\n")
    host = [{"match": "a.test", "robots": "allow", "reason": "our own site"}]
    async with gate_on(internet, open_config(host=host), agent=AGENT) as gate:
        decision = await gate.check("http://a.test/x")
        assert (decision.verdict, decision.state, decision.reason) == (
            Verdict.ALLOW,
            State.OVERRIDE,
            Reason.OPERATOR,
        )
        assert decision.note == "our own site"
        assert site.paths == []


async def test_an_override_at_run_time_reaches_the_warm_path(
    internet: FakeInternet, gate: Gatekeeper
) -> None:
    internet.site("a.test").robots("")
    assert await gate.allowed("http://a.test/x")
    assert await gate.allowed("http://a.test/x")
    gate.override(HostRule(match="*.test", robots="deny", reason="asked to stop"))
    assert not await gate.allowed("http://a.test/x")
    gate.override(HostRule(match="*.test"))
    assert await gate.allowed("http://a.test/x")


async def test_visit_time_defers_until_the_window_opens(internet: FakeInternet) -> None:
    internet.site("a.test").robots("User-agent: *\nVisit-time: 0600-0845\nDisallow:\n")
    start = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)
    clock = VirtualClock(wall=start.timestamp())
    async with gate_on(internet, agent=AGENT, clock=clock) as gate:
        decision = await gate.check("http://a.test/x")
        assert (decision.verdict, decision.reason) == (Verdict.DEFER, Reason.OUTSIDE_VISIT_TIME)
        assert decision.retry_at == datetime(2026, 11, 21, 6, 0, tzinfo=UTC)
        assert not await gate.allowed("http://a.test/x")
        clock.advance(18 * 3600 + 60)
        assert await gate.allowed("http://a.test/x")
        clock.advance(3 * 3600)
        assert not await gate.allowed("http://a.test/x")


async def test_a_change_of_rules_is_told_to_subscribers(
    internet: FakeInternet, gate: Gatekeeper
) -> None:
    internet.site("a.test").on(
        "/robots.txt", "User-agent: *\nDisallow:\n", "User-agent: *\nDisallow: /\n"
    )
    seen: list[str] = []
    gate.subscribe(lambda origin, old, new: seen.append(origin))
    assert await gate.allowed("http://a.test/x")
    await gate.refresh("http://a.test")
    assert not await gate.allowed("http://a.test/x")
    assert seen == ["http://a.test"]


async def test_decision_ids_are_unique(internet: FakeInternet, gate: Gatekeeper) -> None:
    internet.site("a.test").robots("")
    ids = {(await gate.check("http://a.test/")).id for _ in range(100)}
    assert len(ids) == 100


async def test_a_gate_asked_before_it_is_open_says_so() -> None:
    with pytest.raises(GateClosed, match="async with"):
        await Gatekeeper(AGENT).check("http://a.test/")


async def test_a_user_agent_without_a_token_is_refused() -> None:
    with pytest.raises(ConfigError, match="product token"):
        Gatekeeper("(+https://example.org)")


async def test_a_session_passed_in_is_used_unguarded_and_not_closed(internet: FakeInternet) -> None:
    internet.site("localhost").robots("User-agent: *\nDisallow: /no\n")
    async with internet.session() as session, Gatekeeper(AGENT, session=session) as gate:
        assert not gate.stats().guarded
        assert not await gate.allowed("http://localhost/no")
        assert not session.closed
    async with aiohttp.ClientSession() as untouched:
        assert not untouched.closed


ODD_PATHS = st.text(
    alphabet=st.sampled_from('ab/.%2E?#&=\\ \t\x7f"<>^`{|}[]*$~éß\u2028\ud800'), max_size=20
)


@given(
    paths=st.lists(ODD_PATHS, min_size=1, max_size=30),
    authority=st.sampled_from(AUTHORITIES),
    robots=st.sampled_from(FILES),
)
@settings(max_examples=100, deadline=None)
def test_every_spelling_of_a_url_has_one_answer_on_the_fast_path(
    paths: list[str], authority: str, robots: str
) -> None:
    """No spelling of a URL may get another answer from the fast path."""

    async def main() -> None:
        async with FakeInternet() as internet:
            internet.site("a.test").robots(robots)
            async with gate_on(internet, agent=AGENT) as gate:
                await gate.check("http://a.test/")
                for path in paths:
                    url = f"{authority}{path}"
                    assert await outcome(gate.allowed(url)) == await outcome(gate.check(url)), url

    asyncio.run(main())


async def outcome(question: Awaitable[object]) -> object:
    try:
        return bool(await question)
    except InvalidURL as error:
        return str(error)


async def test_a_soft_expired_record_leaves_the_hot_path(internet: FakeInternet) -> None:
    site = internet.site("a.test").on("/robots.txt", "User-agent: *\nDisallow: /x\n", "")
    clock = VirtualClock()
    async with gate_on(internet, agent=AGENT, clock=clock) as gate:
        assert not await gate.allowed("http://a.test/x")
        assert not await gate.allowed("http://a.test/x")
        clock.advance(23.9 * 3600)
        assert not await gate.allowed(
            "http://a.test/x"
        )  # immediately, by the stale copy; fetched again
        while len(site.paths) < 2 or not await gate.allowed("http://a.test/x"):
            await asyncio.sleep(0)
        assert site.paths == ["/robots.txt"] * 2


@pytest.mark.parametrize(
    ("page", "reason"),
    [
        (Page("pay", 402), Reason.PAYMENT_REQUIRED),
        (Page("no", 401, headers={"WWW-Authenticate": "License"}), Reason.LICENSE_REQUIRED),
        (Page("no", 401, headers={"WWW-Authenticate": 'Basic realm="a"'}), Reason.NO_FILE),
    ],
)
async def test_a_demand_to_pay_or_license_allows_and_is_the_reason(
    internet: FakeInternet, gate: Gatekeeper, page: Page, reason: Reason
) -> None:
    internet.site("a.test").on("/robots.txt", page)
    decision = await gate.check("http://a.test/x")
    assert (decision.verdict, decision.reason) == (Verdict.ALLOW, reason)
    assert (decision.state, decision.robots_status) == (State.UNAVAILABLE, page.status)


async def test_a_lease_without_a_session_does_not_await_a_response(
    internet: FakeInternet,
) -> None:
    """Its holder may not have sent the request yet: a missing response proves nothing."""
    url = "http://a.test/x"
    internet.site("a.test").robots("")
    async with gate_on(internet, open_config(pacing=QUICK), agent=AGENT) as gate:
        async with gate.lease(url) as waited_for:
            assert not waited_for.awaits_head
        async with gate.lease(url) as at_once:
            assert not at_once.awaits_head
        acquired = await gate.acquire(url)
        assert not acquired.awaits_head
        assert acquired.claim(url)
        assert acquired.awaits_head
        acquired.end()
