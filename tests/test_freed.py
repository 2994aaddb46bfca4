"""What is closed is freed: each public thing is opened, used and closed many times, and neither an
object of the package nor memory is left of it."""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, suppress
from datetime import datetime
from enum import Enum
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from types import FrameType, FunctionType, ModuleType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints
from weakref import WeakKeyDictionary, WeakValueDictionary

import aiohttp
import msgspec
import pytest

import gatekeeper
from gatekeeper import (
    Config,
    ConfigError,
    Denied,
    Gatekeeper,
    LeaseTimeout,
    PoliteQueue,
    RemoteGatekeeper,
    SyncGatekeeper,
)
from gatekeeper.session import plain_session, polite_session, session_gate
from gatekeeper.sidecar import inline
from gatekeeper.testing import ScriptedGate
from tests.conformance.ways import AGENT, Sidecar, settings
from tests.conftest import exempt_all
from tests.effort import LONG
from tests.integrations.rigs import RIGS, Rig, Scrapy
from tests.internet import FakeInternet, Page, Reset

ROUNDS = 50 if LONG else 4
FIRST = 5 if LONG else 1
"""Rounds that fill what is filled once."""
BLOCKS = 100 if LONG else 400
"""Blocks of memory per round that caches of libraries may take; a closed gate has a thousand."""
MOST_FORGETS = 20
"""On a busy machine a thread that was told to end may take a moment longer."""
ROBOTS = "User-agent: *\nDisallow: /private\nSitemap: http://a.test/s.txt\n"
A, B, DEAD = "http://a.test", "http://b.test", "http://dead.test"


class World:
    """What lasts longer than what is opened and closed."""

    def __init__(self, net: FakeInternet, folder: Path, session: aiohttp.ClientSession) -> None:
        self.net = net
        self.config = settings()
        self.stored = settings(storage={"path": str(folder / "state.sqlite")})
        self.folder = folder
        self.session = session
        self.forever = asyncio.Event()
        self.tasks: list[asyncio.Task[Any]] = []

    def gate(self, config: Config | None = None, **options: Any) -> Gatekeeper:
        if "session" not in options:
            options["resolver"] = self.net.resolver
        return Gatekeeper(AGENT, config=config or self.config, **options)

    def remain(self) -> None:
        """Start a task that remains: it keeps the context in which it was started."""
        self.tasks.append(asyncio.create_task(self.forever.wait()))


@pytest.fixture(scope="module", autouse=True)
def everything_is_imported() -> None:
    """The collector would walk all of it for each thing that is closed."""
    modules()
    exempt_all()


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with FakeInternet() as net:
        for name in ("a.test", "b.test"):
            site = net.site(name).robots(ROBOTS).page("/a", body=b"page")
            site.redirect("/moved", f"{B}/a").on("/broken", Reset())
            site.page("/s.txt", f"{A}/a\n{B}/a\n")
        net.site("dead.test").on("/robots.txt", Page(status=503))
        connector = aiohttp.TCPConnector(resolver=net.resolver)
        async with aiohttp.ClientSession(connector=connector) as session:
            world = World(net, tmp_path, session)
            yield world
            world.forever.set()
            await asyncio.gather(*world.tasks)


async def ask(gate: Any) -> None:
    """Ask a gate for everything: allowed, denied and unreachable URLs, leases, batches."""
    for url in (f"{A}/a", f"{A}/private", f"{B}/a", f"{DEAD}/a"):
        for _ in range(5):  # from some question on, decisions are cached
            await gate.allowed(url)
            await gate.check(url, user_agent="other/1.0")
        with suppress(Denied):
            async with gate.lease(url) as lease:
                lease.report(status=200, elapsed=0.1)
    lease = await gate.acquire(f"{A}/a")
    with pytest.raises(LeaseTimeout):
        async with gate.lease(f"{A}/again", timeout=0):
            pass
    lease.end()
    assert len([one async for one in gate.check_many([f"{A}/a", f"{A}/private"])]) == 2
    tried = await gate.try_acquire(f"{A}/try")
    assert tried
    tried.end()
    await gate.robots(A)
    await gate.policy(f"{A}/a")
    await gate.why("a.test")
    await gate.block("b.test", time.time() + 60.0)
    await gate.pause("a.test")
    waiting = [asyncio.ensure_future(gate.acquire(f"{A}/{n}")) for n in range(3)]
    await asyncio.sleep(0)
    for one in waiting:
        one.cancel()
    await asyncio.wait(waiting)
    await gate.resume("a.test")
    await gate.block("b.test", 0)
    await gate.refresh(A)
    gate.stats()


async def read_sitemaps(gate: Any) -> None:
    """Read the sitemaps to their end, and a part of them."""
    assert len([entry async for entry in gate.sitemaps(A)]) == 2
    found = gate.sitemaps(A)
    await anext(found)
    await found.aclose()
    await anext(gate.sitemaps(A))  # abandoned


async def gate(world: World) -> None:
    async with world.gate() as gate:
        await ask(gate)
        await read_sitemaps(gate)


async def gate_with_a_file(world: World) -> None:
    async with world.gate(world.stored) as gate:
        await ask(gate)


async def gate_of_a_session_that_lasts(world: World) -> None:
    async with world.gate(session=world.session) as gate:
        await ask(gate)
        await read_sitemaps(gate)
        async with gate.lease(f"{A}/a") as lease, world.session.get(lease.url) as response:
            await response.read()


async def gate_closed_in_the_middle(world: World) -> None:
    async with world.gate() as gate:
        lease = await gate.acquire(f"{A}/a")
        waiting = [asyncio.ensure_future(gate.acquire(f"{A}/{n}")) for n in range(3)]
        waiting.append(asyncio.ensure_future(gate.check("http://other.test/")))
        await asyncio.sleep(0)
    await asyncio.gather(*waiting, return_exceptions=True)
    lease.end()


async def context_that_lasts(world: World) -> None:
    async with world.gate() as gate:
        async with gate.lease(f"{A}/a"):
            world.remain()
        lease = await gate.acquire(f"{A}/a")
        world.remain()
        lease.end()


async def scripted_gate(world: World) -> None:
    async with ScriptedGate(AGENT, config=world.config) as gate:
        gate.say(A, ROBOTS)
        gate.say(DEAD, 503)
        await ask(gate)


async def session(world: World) -> None:
    async with polite_session(AGENT, config=world.config, resolver=world.net.resolver) as session:
        gate = session_gate(session)
        gate.subscribe(lambda *_: session)
        for path in ("/a", "/moved", "/private", "/broken"):
            with suppress(aiohttp.ClientError):
                async with session.get(A + path) as response:
                    await response.read()
        async with (
            plain_session(AGENT, gate=gate) as plain,
            gate.lease(f"{A}/a") as lease,
            plain.get(lease.url) as response,
        ):
            await response.read()


async def queue(world: World) -> None:
    async with world.gate() as gate:
        async with PoliteQueue(gate, keep=world.folder / "queue.sqlite") as queue:
            for url in (f"{A}/a", f"{A}/private", f"{B}/a"):
                await queue.put(url)
            for _ in range(2):
                async with await queue.get() as lease:
                    lease.report(status=200)
            await queue.put_sitemap(A)
        async with PoliteQueue(gate) as queue:
            for path in ("/a", "/b"):
                await queue.put(A + path, data=queue)
            async with await queue.get():
                waiting = asyncio.ensure_future(queue.get())
                await asyncio.sleep(0)
                waiting.cancel()


async def sync(world: World) -> None:
    def work() -> None:
        with SyncGatekeeper(AGENT, config=world.config, resolver=world.net.resolver) as gate:
            for path in ("/a", "/private"):
                gate.allowed(A + path)
                gate.check(A + path)
            list(gate.check_many([f"{A}/a", f"{B}/a"]))
            list(gate.sitemaps(A))
            next(gate.sitemaps(A))
            with gate.lease(f"{A}/a") as lease:
                lease.report(status=200)

    await asyncio.to_thread(work)


async def sidecar_and_client(world: World) -> None:
    async with AsyncExitStack() as stack:
        sidecar = Sidecar(world.net, world.config, None)
        await sidecar.start()
        stack.push_async_callback(sidecar.stop)
        async with RemoteGatekeeper(sidecar.where, AGENT, config=world.config) as gate:
            await ask(gate)
            await read_sitemaps(gate)
            async with PoliteQueue(gate) as queue:
                await queue.put(f"{A}/a")
                async with await queue.get() as lease:
                    lease.report(status=200)


def adapter(kind: Callable[..., Rig]) -> Callable[[World], Awaitable[None]]:
    async def use(world: World) -> None:
        rig = kind(world.net, world.config, None)
        await rig.start()
        for path in ("/a", "/moved", "/private", "/broken"):
            with suppress(Exception):
                await rig.get(A + path)
        if rig.streams:
            await rig.finish(await rig.begin(f"{A}/a"))
        await rig.stop()

    use.__name__ = kind.__name__
    return use


USES = [
    *(gate, gate_with_a_file, gate_of_a_session_that_lasts, gate_closed_in_the_middle),
    *(context_that_lasts, scripted_gate, session, queue, sync, sidecar_and_client),
    *(adapter(kind) for kind in RIGS if not (isinstance(kind, type) and issubclass(kind, Scrapy))),
]


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
async def test_no_object_of_a_closed_gate_is_left(
    use: Callable[[World], Awaitable[None]], world: World
) -> None:
    for _ in range(FIRST):
        await use(world)
    await forget(world)
    before, blocks = ours(), sys.getallocatedblocks()
    for _ in range(ROUNDS):
        await use(world)
    for _ in range(MOST_FORGETS):
        await forget(world)
        more = sys.getallocatedblocks() - blocks
        left = {name: count for name, count in (ours() - before).items() if count >= ROUNDS}
        if not left and more < BLOCKS * ROUNDS:
            break
    assert not left
    assert more < BLOCKS * ROUNDS


async def forget(world: World) -> None:
    """Free what nothing needs: of the fake internet, of the loop, and in cycles."""
    net = world.net
    for seen in (net, *net.sites.values()):
        seen.requests.clear()
    net.connections.clear()
    net.resolver.queries.clear()
    inline.read_fields.cache_clear()  # of heads that clients sent, bounded
    loop = asyncio.get_running_loop()
    for _ in range(1_000):  # a loop drops its cancelled timers when they are many
        loop.call_later(3_600, int).cancel()
    for _ in range(5):
        await asyncio.sleep(0)
        gc.collect()


def ours() -> Counter[str]:
    """Count the objects of the package that the garbage collector knows."""
    kinds = [kind for kind in map(type, gc.get_objects()) if is_ours(kind)]
    return Counter(kind.__qualname__ for kind in kinds)


def is_ours(kind: type) -> bool:
    return str(kind.__module__).startswith("gatekeeper")


# --- what the garbage collector does not track ---------------------------------------------

VALUES = (str, int, float, bool, bytes, type(None), datetime, Enum, msgspec.Raw)
"""Classes whose objects hold no others, or only such as they do."""
CONTAINERS = (tuple, dict, Mapping, Union, UnionType)
SEEN_IN_USE = {
    *("RobotsTxt", "Policy", "LongestMatch", "ScopeRequest", "FetchConfig", "Window", "Any"),
    "Request",
}
"""Classes of what untracked structs hold besides: `test_structs_without_gc_are_in_no_cycle`
looks at their objects."""


def untracked(kind: type[msgspec.Struct] = msgspec.Struct) -> Iterator[type[msgspec.Struct]]:
    for one in kind.__subclasses__():
        if is_ours(one) and not one.__struct_config__.gc:
            yield one
        yield from untracked(one)


def parts(hint: Any) -> Iterator[Any]:
    """Yield the classes that an annotation is made of."""
    if (of := get_origin(hint)) is None:
        yield hint
        return
    if of is Literal:
        return  # strings and numbers
    yield of
    for one in get_args(hint):
        yield from parts(one)


def test_a_struct_without_gc_holds_only_values() -> None:
    modules()
    kinds = list(dict.fromkeys(untracked()))
    assert len(kinds) > 20
    for kind in kinds:
        hints = get_type_hints(kind)
        for name in kind.__struct_fields__:
            for part in parts(hints[name]):
                if part not in kinds and not is_value(part):
                    told = f"{kind.__name__}.{name}: a cycle through it would never be freed"
                    assert getattr(part, "__name__", str(part)) in SEEN_IN_USE, told


def test_no_cache_of_a_module_holds_objects_of_a_gate() -> None:
    for module in modules():
        places = [module, *(one for one in vars(module).values() if isinstance(one, type))]
        for place in places:
            for name, one in vars(place).items():
                told = f"{place.__name__}.{name}: what it holds outlives what is closed"
                # A value that leads to its key keeps it; a set of weak references holds nothing.
                assert not isinstance(one, WeakKeyDictionary | WeakValueDictionary), told
                if hasattr(one, "cache_info") and one.__module__ == module.__name__:
                    given = get_type_hints(one.__wrapped__)
                    given.pop("return")
                    for part in (part for hint in given.values() for part in parts(hint)):
                        assert is_value(part) or name in BY_FUNCTIONS, told


BY_FUNCTIONS = {"_single_escapes"}
"""Caches whose keys are functions of their own module."""


def modules() -> list[ModuleType]:
    """Import every module of the package whose extras are installed."""
    found = []
    for module in walk_packages(gatekeeper.__path__, "gatekeeper."):
        if not module.name.endswith("__main__"):
            with suppress(ConfigError):
                found.append(import_module(module.name))
    return found


def is_value(part: Any) -> bool:
    return (
        part is Ellipsis
        or part in CONTAINERS
        or (isinstance(part, type) and issubclass(part, VALUES))
    )


def reached(root: object) -> Iterator[object]:
    """Yield what an object leads to, not through modules and frames."""
    seen, open_ = {id(root)}, [root]
    while open_:
        one = open_.pop()
        if isinstance(one, FunctionType):
            found: list[Any] = [one.__closure__, one.__defaults__, one.__kwdefaults__]
        elif isinstance(one, msgspec.Struct):  # the collector sees nothing in an untracked one
            found = [getattr(one, name) for name in one.__struct_fields__]
        else:
            found = gc.get_referents(one)
        for other in found:
            if other is root:
                yield root
            if id(other) in seen or isinstance(other, type | ModuleType | FrameType):
                continue
            seen.add(id(other))
            yield other
            open_.append(other)


async def test_structs_without_gc_are_in_no_cycle(world: World) -> None:
    kinds = tuple(untracked())
    met: Counter[str] = Counter()
    async with world.gate(world.stored) as gate:
        await ask(gate)
        lease = await gate.acquire(f"{A}/a")
        roots = (gate, lease, asyncio.get_running_loop())
        for one in list(reached([*roots])):
            if isinstance(one, kinds):
                met[type(one).__name__] += 1
                for other in reached(one):
                    assert other is not one, one
                    assert not isinstance(other, (Gatekeeper, asyncio.AbstractEventLoop)), one
        lease.end()
    assert met["Record"] >= 3
    assert met["FileText"]
