"""A warm question passes through few modules, so that its path can be read."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from types import FrameType

import pytest

from gatekeeper import Gatekeeper
from gatekeeper.clock import SystemClock
from tests.internet import FakeInternet

pytestmark = pytest.mark.usefixtures("speedups_on")

ROBOTS = "User-agent: *\nDisallow: /private\nDisallow: /*.pdf$\nAllow: /private/open\n"
CONFIG = {"guard": {"allow": ["127.0.0.0/8", "*.test"]}, "pacing": {"default_interval": 0.0}}
MOST_OF_A_CHECK = 12
MOST_OF_A_LEASE = 10


def module_of(frame: FrameType | None) -> str:
    name = "" if frame is None else str(frame.f_globals.get("__name__", ""))
    return name if name.startswith("gatekeeper") else ""


async def crossings(ask: Callable[[], Awaitable[object]]) -> list[str]:
    """Record each call from a module of the package to a function of another module."""
    found: list[str] = []

    def note(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            caller, called = module_of(frame.f_back), module_of(frame)
            if caller and called and caller != called:
                found.append(f"{caller} -> {called}.{frame.f_code.co_name}")

    sys.setprofile(note)
    try:
        await ask()
    finally:
        sys.setprofile(None)
    return found


def gate_on(net: FakeInternet) -> Gatekeeper:
    from gatekeeper import Config

    config = Config.from_dict(CONFIG)
    return Gatekeeper("testbot/1.0", config=config, clock=SystemClock(), resolver=net.resolver)


async def test_a_warm_check_whose_rule_is_new(internet: FakeInternet) -> None:
    internet.site("a.test").robots(ROBOTS)
    async with gate_on(internet) as gate:
        for _ in range(5):  # decisions are cached for origins that are asked about often
            assert await gate.check("http://a.test/")
        for path in ("/private/x", "/x.pdf", "/private/open"):
            found = await crossings(lambda path=path: gate.check(f"http://a.test{path}"))  # type: ignore[misc]
            assert found
            assert len(found) <= MOST_OF_A_CHECK, "\n".join(found)


async def test_a_warm_lease(internet: FakeInternet) -> None:
    internet.site("a.test").robots(ROBOTS)

    async with gate_on(internet) as gate:

        async def lease() -> None:
            async with gate.lease("http://a.test/x") as held:
                held.report(status=200)

        for _ in range(5):
            await gate.allowed("http://a.test/")
        await lease()
        found = await crossings(lease)
        assert found
        assert len(found) <= MOST_OF_A_LEASE, "\n".join(found)
