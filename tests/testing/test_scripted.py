"""`gatekeeper.testing`, as a user's tests would use it."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from gatekeeper import Deferred, Denied, PoliteQueue, Reason, Verdict
from gatekeeper.clock import VirtualClock
from gatekeeper.testing import ScriptedGate, drive, scripted_gate, virtual_clock

__all__ = ["scripted_gate", "virtual_clock"]


async def test_say_sets_the_file_or_the_error_of_an_origin(scripted_gate: ScriptedGate) -> None:
    gate = scripted_gate
    gate.say("https://a.example", "User-agent: *\nDisallow: /private\n")
    gate.say("https://b.example/any/page", 503)
    gate.say("https://c.example", TimeoutError())
    gate.say("https://d.example", "")
    found = {
        url: await gate.check(f"https://{url}")
        for url in ("a.example/x", "a.example/private", "b.example/", "c.example/", "d.example/")
    }
    assert [str(one.verdict) for one in found.values()] == [
        "allow",
        "deny",
        "defer",
        "defer",
        "allow",
    ]
    assert found["a.example/private"].rule is not None
    assert found["b.example/"].reason is Reason.SERVER_ERROR
    assert found["d.example/"].reason is Reason.EMPTY_FILE
    assert (await gate.check("https://e.example/")).reason is Reason.NO_FILE
    assert gate.robots_files.asked == [f"https://{name}.example" for name in "abcde"]
    with pytest.raises(Denied):
        await gate.acquire("https://a.example/private")
    with pytest.raises(Deferred):
        await gate.acquire("https://b.example/")


async def test_a_scripted_gate_keeps_intervals_in_virtual_time(
    scripted_gate: ScriptedGate, virtual_clock: VirtualClock
) -> None:
    scripted_gate.say("https://a.example", "User-agent: *\nCrawl-delay: 30\n")
    started: list[float] = []

    async def visit() -> None:
        async with scripted_gate.lease("https://a.example/") as lease:
            started.append(virtual_clock.monotonic())
            lease.report(status=429 if len(started) == 3 else 200, retry_after=600)

    await drive(virtual_clock, asyncio.gather(*(visit() for _ in range(5))))
    gaps = [round(b - a) for a, b in itertools.pairwise(started)]
    assert [gap >= 30 for gap in gaps] == [True] * 4
    assert max(gaps) >= 600


async def test_a_status_that_redirects_leads_nowhere(scripted_gate: ScriptedGate) -> None:
    for status in (301, 302, 307):
        scripted_gate.say(f"https://s{status}.example", status)
        decision = await scripted_gate.check(f"https://s{status}.example/")
        assert (decision.verdict, decision.reason) == (Verdict.DEFER, Reason.BAD_REDIRECT)


async def test_another_say_changes_the_file_of_an_origin(scripted_gate: ScriptedGate) -> None:
    gate = scripted_gate
    gate.say("https://a.example", 503)
    assert (await gate.check("https://a.example/")).verdict is Verdict.DEFER
    gate.say("https://a.example", "User-agent: *\nDisallow:\n")
    await gate.refresh("https://a.example")
    assert await gate.allowed("https://a.example/")


async def test_a_queue_works_over_a_scripted_gate(
    scripted_gate: ScriptedGate, virtual_clock: VirtualClock
) -> None:
    denied: list[Any] = []
    scripted_gate.say("https://a.example", "User-agent: *\nDisallow: /no\nCrawl-delay: 5\n")

    async def crawl() -> list[str]:
        got = []
        async with PoliteQueue(scripted_gate, on_denied=denied.append) as queue:
            for path in ("1", "no", "2", "3"):
                await queue.put(f"https://a.example/{path}")
            while not queue.empty():
                async with await queue.get() as lease:
                    got.append(lease.url.rpartition("/")[2])
                    lease.report(status=200)
        return got

    assert await drive(virtual_clock, crawl()) == ["1", "2", "3"]
    assert [one.url for one in denied] == ["https://a.example/no"]
    assert virtual_clock.monotonic() >= 10


async def test_drive_raises_for_what_never_ends() -> None:
    clock = VirtualClock()
    with pytest.raises(AssertionError, match="nothing that time brings"):
        await drive(clock, asyncio.get_running_loop().create_future())
    with pytest.raises(AssertionError, match="10 virtual seconds"):
        await drive(clock, clock.sleep(11.0), limit=10.0)
