"""`await gate.allowed(url)` on warm origins, with a new URL each time."""

from __future__ import annotations

import asyncio
import gc
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from itertools import islice
from urllib.parse import urlsplit

from aiohttp import web

from benchmarks.corpus import AGENT, Site
from benchmarks.options import Options
from benchmarks.report import Table, count, seconds, version_of
from benchmarks.timing import ratios

__all__ = ["run"]

LoopFactory = Callable[[], asyncio.AbstractEventLoop]


def run(options: Options) -> list[Table]:
    """Return one table for each installed event loop."""
    loops: dict[str, LoopFactory] = {"asyncio": asyncio.new_event_loop}
    try:
        import uvloop

        loops[f"uvloop {version_of('uvloop')}"] = uvloop.new_event_loop
    except ImportError:
        pass
    return [_table(name, factory, options) for name, factory in loops.items()]


def _table(name: str, factory: LoopFactory, options: Options) -> Table:
    with asyncio.Runner(loop_factory=factory) as runner:
        taken = runner.run(_measure(options))
    empty = taken["await an empty coroutine"]
    rows, figures = [], {}
    for contender, rounds in taken.items():
        each = statistics.median(rounds)
        share = ratios(empty, rounds)
        shown = share.shown("{:.3f}".format)
        rows.append((contender, seconds(each), f"{count(1 / each)}/s", shown))
        figures[contender] = {
            "seconds_each": each,
            "share_of_empty_rate": share.median,
            "p10": share.low,
            "p90": share.high,
        }
    return Table(
        f"A question to the gate ({name})",
        ("", "a question", "questions", "share of the empty coroutine's rate (p10 to p90)"),
        rows,
        "allowed(): 2 µs",
        (
            "Warm origins on loopback with real files; every URL is asked about once, over "
            "all rounds, in random order of origins: a file, a policy and a memory line that "
            "no question before has touched.",
            "one median origin: the file of the median site (seven plain prefixes), asked about "
            "one fresh page of it after another, as a crawler sifts the links of a page.",
            "by hand: urlsplit, a dictionary of origins, Protego; no lifetime, no await.",
        ),
        figures,
    )


class _Origins:
    """Loopback origins, each with a robots.txt of the corpus."""

    def __init__(self, sites: list[Site]) -> None:
        self.sites = sites
        self._bodies: dict[str, bytes] = {}

    async def serve(self, stack: AsyncExitStack) -> list[str]:
        """Start the server. Return the base URL of every origin."""
        app = web.Application()
        app.router.add_get("/robots.txt", self._answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        site = web.TCPSite(runner, "0.0.0.0", 0)
        await site.start()
        port = runner.addresses[0][1]
        bases = []
        for index, made in enumerate(self.sites):
            address = f"127.0.{1 + index // 250}.{1 + index % 250}"
            self._bodies[address] = made.body
            bases.append(f"http://{address}:{port}")
        return bases

    async def _answer(self, request: web.Request) -> web.Response:
        return web.Response(body=self._bodies[request.url.host or ""], content_type="text/plain")


def _urls(bases: list[str], sites: list[Site], rng: random.Random) -> Iterator[str]:
    """Yield endless distinct URLs: those of the corpus with a number appended."""
    paths = [[_path(url) for url in site.urls] for site in sites]
    number = 0
    while True:
        index = rng.randrange(len(bases))
        path = rng.choice(paths[index])
        yield f"{bases[index]}{path}{'&' if '?' in path else '?'}n={number}"
        number += 1


def _path(url: str) -> str:
    return "/" + url.split("/", 3)[3] if url.count("/") > 2 else "/"


async def _empty(url: str) -> bool:
    return True


async def _measure(options: Options) -> dict[str, list[float]]:
    from gatekeeper import Config, Gatekeeper
    from gatekeeper.config import GuardConfig, PacingConfig

    rng = random.Random(7)
    size = 20_000 if options.quick else 100_000
    sites = [site for site in options.sites() if site.urls][:100]
    # Leases are not measured here: warming up fetches the robots.txt of all origins concurrently.
    config = Config(
        guard=GuardConfig(allow=("127.0.0.0/8",)), pacing=PacingConfig(default_interval=0.0)
    )
    async with AsyncExitStack() as stack:
        bases = await _Origins([*sites, _MEDIAN]).serve(stack)
        gate = await stack.enter_async_context(Gatekeeper(AGENT, config=config))
        warm = [decision async for decision in gate.check_many(f"{base}/" for base in bases)]
        assert all(str(decision.state) == "parsed" for decision in warm), warm
        mixed = _urls(bases[:-1], sites, rng)
        contenders = {
            name: (work, mixed) for name, work in _contenders(gate, bases[:-1], sites).items()
        }
        one = contenders["await gate.allowed(url)"][0]
        contenders["await gate.allowed(url), one median origin"] = (one, _pages(bases[-1]))
        return await _rounds(contenders, size, options.rounds(quick=5, full=15), rng)


Work = Callable[[list[str]], Awaitable[None]]

# Seven plain prefixes: half of all files have no more for an unnamed robot.
_MEDIAN = Site(
    b"User-agent: *\n"
    + b"".join(
        b"Disallow: /%b/\n" % name
        for name in (b"admin", b"cgi-bin", b"search", b"login", b"tmp", b"private", b"cart")
    ),
    (),
)


def _pages(base: str) -> Iterator[str]:
    """Yield distinct pages of one site."""
    number = 0
    while True:
        yield f"{base}/articles/{number % 97}/page-{number}.html"
        number += 1


def _contenders(gate: object, bases: list[str], sites: list[Site]) -> dict[str, Work]:
    async def empty(urls: list[str]) -> None:
        for url in urls:
            await _empty(url)

    async def allowed(urls: list[str]) -> None:
        ask = gate.allowed  # type: ignore[attr-defined]
        for url in urls:
            await ask(url)

    async def check(urls: list[str]) -> None:
        ask = gate.check  # type: ignore[attr-defined]
        for url in urls:
            await ask(url)

    async def check_many(urls: list[str]) -> None:
        async for _ in gate.check_many(urls):  # type: ignore[attr-defined]
            pass

    async def peek(urls: list[str]) -> None:
        ask = gate.peek  # type: ignore[attr-defined]
        for url in urls:
            ask(url)

    work = {
        "await an empty coroutine": empty,
        "await gate.allowed(url)": allowed,
        "await gate.check(url)": check,
        "gate.check_many(urls)": check_many,
        "gate.peek(url)": peek,
    }
    return work | _by_hand(bases, sites)


def _by_hand(bases: list[str], sites: list[Site]) -> dict[str, Work]:
    try:
        from protego import Protego
    except ImportError:
        return {}
    known = {
        base.removeprefix("http://"): Protego.parse(site.body.decode("utf-8", "replace"))
        for base, site in zip(bases, sites, strict=True)
    }

    async def by_hand(urls: list[str]) -> None:
        for url in urls:
            known[urlsplit(url).netloc].can_fetch(url, AGENT)

    return {"by hand: urlsplit and Protego": by_hand}


async def _rounds(
    contenders: dict[str, tuple[Work, Iterator[str]]], size: int, rounds: int, rng: random.Random
) -> dict[str, list[float]]:
    names = list(contenders)
    taken: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds + 1):
        rng.shuffle(names)
        for name in names:
            work, urls = contenders[name]
            batch = list(islice(urls, size))
            await asyncio.sleep(0)
            gc.collect()
            gc.freeze()
            start = time.process_time()
            await work(batch)
            spent = time.process_time() - start
            gc.unfreeze()
            if turn:
                taken[name].append(spent / size)
    return taken
