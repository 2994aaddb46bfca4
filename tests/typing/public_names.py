"""What type checkers see of the public names: checked by mypy and pyright, never run.

mypy --strict tests/typing
pyright tests/typing
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from datetime import date, datetime, time
from typing import assert_type

import aiohttp

from gatekeeper import (
    ClockView,
    Config,
    Decision,
    Deferred,
    Denied,
    Gate,
    Gatekeeper,
    Guard,
    Lease,
    Match,
    Policy,
    PoliteQueue,
    Reason,
    Refusal,
    RemoteGatekeeper,
    RobotsTxt,
    Rule,
    SitemapEntry,
    SitemapFinding,
    Sitemaps,
    Verdict,
    Window,
    guarded_connector,
    polite_session,
    session_gate,
)


def the_text() -> None:
    robots = RobotsTxt.parse(b"", dialect="auto", limit=512_000)
    assert_type(robots, RobotsTxt)
    policy = robots.policy("examplebot", conflicts="strict", v2_semantics="order")
    assert_type(policy, Policy)
    assert_type(policy.allowed("/x"), bool)
    match = policy.match("/x")
    assert_type(match, Match)
    assert_type(match.allowed, bool)
    assert_type(match.rule, Rule | None)
    assert_type(policy.crawl_delay, float | None)
    assert_type(policy.visit_times, tuple[Window, ...])
    assert_type(policy.visit_times[0].start, time)
    assert_type(policy.may_visit(datetime.now()), bool)
    assert_type(policy.next_visit(datetime.now()), datetime)
    assert_type(policy.interval(datetime.now(), took=1.0), float | None)
    assert_type(robots.truncated, bool)
    assert_type(robots.findings[0].line, int)


async def the_gate() -> None:
    async with Gatekeeper("examplebot/1.0", config=Config()) as gate:
        assert_type(gate, Gatekeeper)
        assert_type(await gate.allowed("https://example.org/"), bool)
        decision = await gate.check("https://example.org/", user_agent="otherbot")
        assert_type(decision, Decision)
        assert_type(decision.verdict, Verdict)
        assert_type(decision.reason, Reason)
        assert_type(decision.rule, Rule | None)
        assert_type(decision.retry_at, datetime | None)
        assert_type(bool(decision), bool)
        async for one in gate.check_many(["https://example.org/"]):
            assert_type(one, Decision)
        found = gate.sitemaps("https://example.org", since=date(2026, 11, 1), guess=True)
        assert_type(found, Sitemaps)
        assert_type(aiter(found), Sitemaps)
        async for entry in found:
            assert_type(entry, SitemapEntry)
            assert_type(entry.lastmod, datetime | None)
        assert_type(found.findings, list[SitemapFinding])
        assert_type(gate.peek("https://example.org/"), Decision | None)
        assert_type(await gate.robots("https://example.org/"), RobotsTxt | None)
        assert_type(await gate.policy("https://example.org/"), Policy)
        async with gate.lease("https://example.org/", priority=1, timeout=3.0) as lease:
            assert_type(lease, Lease)
            lease.report(status=200, elapsed=0.1, retry_after="3", size=10)
        taken = await gate.acquire("https://example.org/")
        taken.end()
        assert_type(await gate.why("example.org"), tuple[ClockView, ...])


async def errors(gate: Gatekeeper) -> None:
    try:
        await gate.acquire("https://example.org/")
    except Deferred as error:
        assert_type(error.retry_at, datetime | None)
        assert_type(error.decision, Decision)
    except Denied as error:
        assert_type(error.decision, Decision)
        refused: aiohttp.ClientError = error
        del refused


async def the_queue(gate: Gatekeeper) -> None:
    queue = PoliteQueue(gate, maxsize=10, on_denied=print)
    await queue.put("https://example.org/", priority=1, data={"depth": 0})
    assert_type(await queue.put_sitemap("https://example.org"), Sitemaps)
    async with await queue.get() as lease:
        print(lease.data)
    await queue.join()


async def the_session() -> None:
    async with polite_session(user_agent="examplebot/1.0") as session:
        assert_type(session, aiohttp.ClientSession)
        assert_type(session_gate(session), Gatekeeper)
    assert_type(Guard(Config()).refuses_url("http://10.0.0.1/"), Refusal | None)
    assert_type(Guard(Config()).refuses_address("10.0.0.1", 80), Refusal | None)
    connector: aiohttp.TCPConnector = guarded_connector()
    del connector


async def both(gate: Gate) -> None:
    assert_type(await gate.allowed("https://example.org/"), bool)
    many: AsyncIterator[Decision] = gate.check_many(["https://example.org/"])
    del many
    request: AbstractAsyncContextManager[object] = gate.lease("https://example.org/")
    del request


async def either() -> None:
    async with Gatekeeper("a/1") as here, RemoteGatekeeper("http://127.0.0.1:8750", "a/1") as there:
        await both(here)
        await both(there)
