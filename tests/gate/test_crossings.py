"""A warm question makes few calls and passes through few modules, so that its way can be read."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from types import FrameType
from typing import NamedTuple

from gatekeeper import polite_session
from tests.gate_support import QUICK, gate_on, open_config
from tests.internet import FakeInternet

ROBOTS = "User-agent: *\nDisallow: /private\nDisallow: /*.pdf$\nAllow: /private/open\n"
CONFIG = open_config(pacing=QUICK)


class Way(NamedTuple):
    """The calls of one question, each as caller and called function."""

    calls: list[str]
    crossings: list[str]
    """Calls from a module of the package to a function of another one."""

    def is_within(self, calls: int, crossings: int) -> bool:
        """Print the way, for a test that fails."""
        assert self.calls
        print("\n".join(self.calls))
        print(len(self.calls), "calls;", len(self.crossings), "crossings")
        return len(self.calls) <= calls and len(self.crossings) <= crossings


def module_of(frame: FrameType | None) -> str:
    name = "" if frame is None else str(frame.f_globals.get("__name__", ""))
    return name if name.startswith("gatekeeper") else ""


async def way_of(ask: Callable[[], Awaitable[object]]) -> Way:
    """Record the calls of the package's functions while a question is answered."""
    way = Way([], [])
    seen: set[int] = set()

    def note(frame: FrameType, event: str, _argument: object) -> None:
        # A coroutine that goes on is another "call" of the same frame.
        if event != "call" or (frame.f_lasti > 0 and id(frame) in seen):
            return
        seen.add(id(frame))
        caller, called = module_of(frame.f_back), module_of(frame)
        if called:
            text = f"{caller or '-'} -> {called}.{frame.f_code.co_name}"
            way.calls.append(text)
            if caller and caller != called:
                way.crossings.append(text)

    sys.setprofile(note)
    try:
        await ask()
    finally:
        sys.setprofile(None)
    return way


async def test_a_check_of_a_known_origin_makes_few_calls(internet: FakeInternet) -> None:
    internet.site("a.test").robots(ROBOTS)
    async with gate_on(internet, CONFIG) as gate:
        for _ in range(3):
            assert await gate.check("http://a.test/")
        for path in ("/private/x", "/x.pdf", "/private/open"):
            new = await way_of(lambda path=path: gate.check(f"http://a.test{path}"))  # type: ignore[misc]
            assert new.is_within(27, 14), path
            await gate.check(f"http://a.test{path}/x")  # the second one prepares the rules
            hot = await way_of(lambda path=path: gate.check(f"http://a.test{path}/y"))  # type: ignore[misc]
            assert hot.is_within(12, 6) or path == "/x.pdf"


async def test_a_lease_of_a_free_host_makes_few_calls(internet: FakeInternet) -> None:
    internet.site("a.test").robots(ROBOTS)
    async with gate_on(internet, CONFIG) as gate:

        async def lease() -> None:
            async with gate.lease("http://a.test/x") as held:
                held.report(status=200)

        for _ in range(3):
            await lease()
        assert (await way_of(lease)).is_within(20, 10)


async def test_a_page_of_a_polite_session_makes_few_calls(internet: FakeInternet) -> None:
    internet.site("a.test").robots(ROBOTS).page("/x").page("/y").page("/z")
    made = polite_session("testbot/1.0", config=CONFIG, resolver=internet.resolver)
    async with made as session:

        async def page(path: str) -> None:
            async with session.get(f"http://a.test{path}") as response:
                await response.read()

        await page("/x")
        await page("/y")
        assert (await way_of(lambda: page("/z"))).is_within(34, 21)
