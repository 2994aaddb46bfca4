"""A gate that is used in an event loop that did not open it says so, and goes on in its own."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

from gatekeeper import Config, GateClosed, Gatekeeper, PoliteQueue
from gatekeeper.testing import ScriptedGate

Use = Callable[[Gatekeeper, str], Coroutine[Any, Any, Any]]


async def _lease(gate: Gatekeeper, url: str) -> None:
    async with gate.lease(url):
        pass


async def _get(gate: Gatekeeper, url: str) -> None:
    async with PoliteQueue(gate) as queue:
        await queue.put(url)
        await queue.get()


USES: dict[str, Use] = {
    "allowed": lambda gate, url: gate.allowed(url),
    "check_all": lambda gate, url: gate.check_all([url]),
    "policy": lambda gate, url: gate.policy(url),
    "refresh": lambda gate, url: gate.refresh(url),
    "lease": _lease,
    "acquire": lambda gate, url: gate.acquire(url),
    "try_acquire": lambda gate, url: gate.try_acquire(url),
    "PoliteQueue": _get,
}


@pytest.fixture
def url() -> Iterator[str]:
    """A URL whose port refuses connections."""
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{unheard.getsockname()[1]}/"


@pytest.fixture
def elsewhere() -> Iterator[tuple[Gatekeeper, asyncio.AbstractEventLoop]]:
    """A gate that is open in the loop of another thread, and that loop."""
    loop = asyncio.new_event_loop()
    loop.set_debug(True)  # then it refuses calls from other threads by itself
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    config = Config.from_dict(
        {
            "guard": {"allow": ["127.0.0.0/8"]},
            "host": [{"match": "known.test", "robots": "allow", "interval": 1000.0}],
        }
    )
    gate = Gatekeeper("testbot/1.0", config=config)
    asyncio.run_coroutine_threadsafe(gate.__aenter__(), loop).result()
    yield gate, loop
    asyncio.run_coroutine_threadsafe(gate.__aexit__(None, None, None), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_call_from_another_event_loop_is_refused_and_leaves_nothing_behind(
    elsewhere: tuple[Gatekeeper, asyncio.AbstractEventLoop], url: str, use: Use
) -> None:
    gate, loop = elsewhere

    async def other() -> None:
        async with asyncio.timeout(20.0):
            await use(gate, url)

    with pytest.raises(GateClosed, match="belongs to another event loop; open one in each"):
        asyncio.run(other())
    asked = asyncio.run_coroutine_threadsafe(gate.check(url), loop).result(20.0)
    assert asked.reason == "connect_failed"


@pytest.mark.parametrize("use", ["lease", "acquire", "PoliteQueue"])
def test_a_lease_that_would_wait_on_another_event_loop_is_refused(
    elsewhere: tuple[Gatekeeper, asyncio.AbstractEventLoop], use: str
) -> None:
    gate, loop = elsewhere
    url = "http://known.test/"
    lease = asyncio.run_coroutine_threadsafe(gate.acquire(url, owned=False), loop).result(20.0)

    async def other() -> None:
        async with asyncio.timeout(20.0):
            await USES[use](gate, url)

    with pytest.raises(GateClosed, match="belongs to another event loop; open one in each"):
        asyncio.run(other())
    loop.call_soon_threadsafe(lease.end)


async def _lease_of_another_agent(gate: Gatekeeper, url: str) -> None:
    async with gate.lease(url, user_agent="otherbot"):
        pass


AT_ONCE = ["lease", "acquire", "try_acquire", "PoliteQueue"]


@pytest.mark.parametrize(
    "use",
    [*map(USES.get, AT_ONCE), _lease_of_another_agent],
    ids=[*AT_ONCE, "another agent"],
)
def test_a_lease_free_at_once_is_refused_on_another_event_loop(
    elsewhere: tuple[Gatekeeper, asyncio.AbstractEventLoop], use: Use
) -> None:
    gate, loop = elsewhere

    async def other() -> None:
        await use(gate, "http://known.test/")

    with pytest.raises(GateClosed, match="belongs to another event loop; open one in each"):
        asyncio.run(other())
    assert asyncio.run_coroutine_threadsafe(_granted(gate), loop).result(20.0) == 0


async def _granted(gate: Gatekeeper) -> int:
    return gate.stats().pacing.granted


# --- questions whose answer is in memory --------------------------------------------------------

PAGE = "http://a.test/x"
WARM: dict[str, Use] = {
    "allowed": lambda gate, url: gate.allowed(url),
    "a denied one": lambda gate, url: gate.allowed(f"{url}/no"),
    "an unusual one": lambda gate, url: gate.allowed(f"{url}/../%61"),
    "check": lambda gate, url: gate.check(url),
    "check_all": lambda gate, url: gate.check_all([url]),
    "policy": lambda gate, url: gate.policy(url),
    "robots": lambda gate, url: gate.robots(url),
    "lease": _lease,
    "acquire": lambda gate, url: gate.acquire(url),
    "try_acquire": lambda gate, url: gate.try_acquire(url),
    "block": lambda gate, url: gate.block("a.test", 0.0),
    "pause": lambda gate, url: gate.pause("a.test"),
    "resume": lambda gate, url: gate.resume("a.test"),
}


def loops() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    found: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": asyncio.new_event_loop}
    with suppress(ImportError):
        import uvloop

        found["uvloop"] = uvloop.new_event_loop
    return found


def in_this_thread(work: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop) -> Any:
    return loop.run_until_complete(work)


def in_a_thread_of_its_own(work: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop) -> Any:
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(loop.run_until_complete, work).result(20.0)


@pytest.mark.parametrize("use", WARM.values(), ids=WARM)
@pytest.mark.parametrize("run", [in_this_thread, in_a_thread_of_its_own])
@pytest.mark.parametrize("make", loops().values(), ids=loops())
def test_a_warm_question_is_refused_on_another_event_loop_as_a_cold_one_is(
    use: Use, run: Callable[..., Any], make: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """In the thread of the gate's own loop, which is stopped then, and in another thread."""
    own, other = make(), make()
    gate = ScriptedGate()
    gate.say("http://a.test", "User-agent: *\nDisallow: /x/no\n")
    try:
        own.run_until_complete(gate.__aenter__())
        assert own.run_until_complete(gate.allowed(PAGE))
        counts = gate.stats()
        for _ in range(2):
            with pytest.raises(GateClosed, match="belongs to another event loop; open one in each"):
                run(use(gate, PAGE), other)
        assert gate.stats() == counts
        assert own.run_until_complete(gate.allowed(PAGE))
        assert own.run_until_complete(_while_another_runs(gate, use, other))
        own.run_until_complete(gate.__aexit__(None, None, None))
    finally:
        own.close()
        other.close()


async def _while_another_runs(gate: Gatekeeper, use: Use, other: asyncio.AbstractEventLoop) -> bool:
    """Use the gate in the other loop while its own runs. Return whether it still answers."""
    with pytest.raises(GateClosed, match="belongs to another event loop; open one in each"):
        await asyncio.to_thread(other.run_until_complete, use(gate, PAGE))
    return await gate.allowed(PAGE)


async def test_a_gate_that_was_closed_answers_nothing_warm() -> None:
    gate = ScriptedGate()
    gate.say("http://a.test", "")
    for use in (WARM["allowed"], WARM["check"]):
        with pytest.raises(GateClosed, match="is not open"):
            await use(gate, PAGE)
    async with gate:
        assert await gate.allowed(PAGE)
    for use in (WARM["allowed"], WARM["check"]):
        with pytest.raises(GateClosed, match="is not open"):
            await use(gate, PAGE)
