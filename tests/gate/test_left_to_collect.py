"""The objects of an origin, a page and a connection are freed by reference counting, not by the
garbage collector, which would stop a crawl of a hundred thousand origins again and again."""

from __future__ import annotations

import gc
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
from aiohttp import ClientSession

from gatekeeper import Denied, PoliteQueue
from gatekeeper.session import polite_session, session_gate
from tests.gate_support import QUICK, open_config
from tests.internet import FakeInternet, Page

MANY = 12
ROBOTS = "User-agent: *\nDisallow: /private\n"


def answers(net: FakeInternet, name: str) -> None:
    net.site(name).robots(ROBOTS).page("/a", close=True)


def moved(net: FakeInternet, name: str) -> None:
    net.site(name).redirect("/robots.txt", "http://other.test/robots.txt").page("/a")


def fails(net: FakeInternet, name: str) -> None:
    net.site(name).on("/robots.txt", Page(status=503))


def refuses(net: FakeInternet, name: str) -> None:
    net.refusing(name)


@pytest.mark.parametrize("kind", [answers, moved, fails, refuses])
async def test_an_origin_leaves_no_reference_cycles_behind(
    net: FakeInternet, kind: Callable[[FakeInternet, str], None]
) -> None:
    net.site("other.test").robots(ROBOTS)
    names = [f"h{number}.test" for number in range(2 * MANY)]
    for name in names:
        kind(net, name)
    config = open_config(pacing=QUICK)

    async def crawl(session: ClientSession, names: list[str]) -> None:
        for name in names:
            with suppress(Denied):
                async with session.get(f"http://{name}/a") as response:
                    await response.read()
        if kind in (fails, refuses):
            return
        async with PoliteQueue(session_gate(session)) as queue:
            for name in names:
                await queue.put(f"http://{name}/a?again")
            for _ in names:
                async with await queue.get() as lease, session.get(lease.url) as response:
                    await response.read()

    async with polite_session(
        "testbot/1.0", config=config, clock=net.clock, resolver=net.resolver
    ) as session:
        await net.drive(crawl(session, names[:MANY]))  # creates what is created only once
        with kept_garbage() as garbage:
            await net.drive(crawl(session, names[MANY:]))

    left = Counter(type(one).__qualname__ for one in garbage if _is_ours(one))
    assert not {name: count for name, count in left.items() if count >= MANY}


@contextmanager
def kept_garbage() -> Iterator[list[object]]:
    """Collect the objects made in the block that only the garbage collector can free."""
    found: list[object] = []
    gc.collect()
    gc.disable()
    before = set(map(id, gc.get_objects()))  # objects of earlier tests, some of which may be freed
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found += [one for one in gc.garbage if id(one) not in before]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def _is_ours(one: object) -> bool:
    # asyncio's transports are in reference cycles, with a socket each.
    return type(one).__module__.startswith("gatekeeper") and not isinstance(one, socket.socket)
