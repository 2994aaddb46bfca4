"""The crawlers that are compared, each run in its own process.

`python -m benchmarks.crawlers NAME PORT PAGES` fetches the pages and prints the time taken. All
have at most a hundred requests in flight, ten per host, no delay, and read every body. All except
the bare client fetch and obey each host's robots.txt.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import importlib
import io
import json
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from benchmarks.pages import urls
from benchmarks.report import version_of

__all__ = ["BARE", "CONCURRENCY", "CRAWLERS", "available"]

CONCURRENCY = 100
PER_HOST = 10
AUDIT = "BENCHMARK_AUDIT"
"""The environment variable with the folder of an audit record, if there is one."""
AGENT = "examplebot/1.0 (+https://www.example.org/bot)"

Fetch = Callable[[str], Awaitable[None]]


async def _pool(fetch: Fetch, pages: list[str]) -> int:
    """Fetch all pages with a hundred workers. Return the number of pages."""
    rest = iter(pages)
    done = 0

    async def work() -> None:
        nonlocal done
        for url in rest:
            await fetch(url)
            done += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(CONCURRENCY):
            group.create_task(work())
    return done


def _client() -> Any:
    import aiohttp

    # The same limits as a polite session: counting the pool's connections costs instructions, too.
    connector = aiohttp.TCPConnector(limit=0)
    return aiohttp.ClientSession(connector=connector, headers={"User-Agent": AGENT})


def _config() -> Any:
    from gatekeeper import Config
    from gatekeeper.config import AuditConfig, GuardConfig, PacingConfig

    return Config(
        guard=GuardConfig(allow=("127.0.0.0/8",)),
        pacing=PacingConfig(default_interval=0.0, concurrency=PER_HOST),
        audit=AuditConfig(folder=os.environ.get(AUDIT)),
    )


async def bare(pages: list[str]) -> int:
    """Plain aiohttp, without robots.txt."""
    async with _client() as session:

        async def fetch(url: str) -> None:
            async with session.get(url) as response:
                await response.read()

        return await _pool(fetch, pages)


def _folder() -> Path:
    """Return a folder for pages. It is removed at exit, which is not measured."""
    folder = tempfile.mkdtemp(prefix="gatekeeper-bench-")
    atexit.register(shutil.rmtree, folder)
    return Path(folder)


async def bare_files(pages: list[str]) -> int:
    """Plain aiohttp, without robots.txt; writes each page to a file in its host's folder."""
    made: set[str] = set()
    folder = _folder()
    async with _client() as session:

        async def fetch(url: str) -> None:
            async with session.get(url) as response:
                body = await response.read()
            host, _, name = url.partition("://")[2].partition("/")
            if host not in made:
                (folder / host).mkdir()
                made.add(host)
            with open(f"{folder}/{host}/{name.replace('/', '-')}", "wb") as file:
                file.write(body)

        return await _pool(fetch, pages)


async def fetch_files(pages: list[str]) -> int:
    """`gatekeeper fetch -i FILE -o DIR`, without its process start."""
    from gatekeeper.crawl.progress import watcher
    from gatekeeper.crawl.runner import crawl
    from gatekeeper.crawl.sources import Job
    from gatekeeper.sidecar.listening import rare_collections

    listed = _folder() / "urls.txt"
    listed.write_text("\n".join(pages), encoding="utf-8")
    output = listed.with_name("pages")
    job = Job(AGENT, _config(), input=str(listed), output=output, concurrency=CONCURRENCY)
    with rare_collections(), redirect_stdout(io.StringIO()):
        status = await crawl(job, watcher(quiet=True))
    return 0 if status else sum(len(os.listdir(host)) for host in output.glob("127.*"))


async def by_hand(pages: list[str]) -> int:
    """A typical hand-written crawler: a dictionary of parsers, one fetch per origin, no pacing."""
    from protego import Protego

    known: dict[str, asyncio.Task[Any]] = {}
    async with _client() as session:

        async def robots(base: str) -> Any:
            async with session.get(f"{base}/robots.txt") as response:
                return Protego.parse(await response.text())

        async def fetch(url: str) -> None:
            parts = urlsplit(url)
            base = f"{parts.scheme}://{parts.netloc}"
            if base not in known:
                known[base] = asyncio.create_task(robots(base))
            if not (await known[base]).can_fetch(url, AGENT):
                return
            async with session.get(url) as response:
                await response.read()

        return await _pool(fetch, pages)


async def polite(pages: list[str]) -> int:
    """`polite_session`, used like any session."""
    from gatekeeper.session import polite_session

    async with polite_session(user_agent=AGENT, config=_config()) as session:

        async def fetch(url: str) -> None:
            async with session.get(url) as response:
                await response.read()

        return await _pool(fetch, pages)


async def leases(pages: list[str]) -> int:
    """`gate.lease` by hand, as in `examples/embedded.py`: on the gate's connections."""
    from gatekeeper import Gatekeeper
    from gatekeeper.session import plain_session

    async with (
        Gatekeeper(AGENT, config=_config()) as gate,
        plain_session(AGENT, gate=gate) as session,
    ):
        return await _leased(gate, session, pages)


async def leases_over_a_client(pages: list[str]) -> int:
    """`gate.lease` by hand, with a plain client: robots.txt uses a separate connection."""
    from gatekeeper import Gatekeeper

    async with Gatekeeper(AGENT, config=_config()) as gate, _client() as session:
        return await _leased(gate, session, pages)


async def _leased(gate: Any, session: Any, pages: list[str]) -> int:
    async def fetch(url: str) -> None:
        async with gate.lease(url) as lease:
            await _one(session, lease)

    return await _pool(fetch, pages)


async def _one(session: Any, lease: Any) -> None:
    """Send the request of one lease."""
    async with session.get(lease.url, allow_redirects=False) as response:
        lease.report(status=response.status, retry_after=response.headers.get("Retry-After"))
        await response.read()


async def queue(pages: list[str]) -> int:
    """`PoliteQueue`, drained by a hundred workers, as in `examples/polite_queue.py`."""
    from gatekeeper import Gatekeeper, PoliteQueue
    from gatekeeper.session import plain_session

    async with (
        Gatekeeper(AGENT, config=_config()) as gate,
        PoliteQueue(gate, maxsize=len(pages)) as frontier,
        plain_session(AGENT, gate=gate) as session,
    ):
        return await _drained(frontier, pages, partial(_one, session))


async def queue_and_session(pages: list[str]) -> int:
    """`PoliteQueue`, drained through a polite session that adopts the leases."""
    from gatekeeper import PoliteQueue
    from gatekeeper.session import polite_session, session_gate

    async with polite_session(user_agent=AGENT, config=_config()) as session:

        async def fetch(lease: Any) -> None:
            async with session.get(lease.url) as response:
                await response.read()

        return await _drained(PoliteQueue(session_gate(session), maxsize=len(pages)), pages, fetch)


async def _drained(frontier: Any, pages: list[str], fetch: Callable[[Any], Awaitable[None]]) -> int:
    done = 0

    async def work() -> None:
        nonlocal done
        while True:
            async with await frontier.get() as lease:
                await fetch(lease)
                done += 1

    workers = [asyncio.create_task(work()) for _ in range(CONCURRENCY)]
    for url in pages:
        await frontier.put(url)
    await frontier.join()
    for worker in workers:
        worker.cancel()
    await asyncio.gather(*workers, return_exceptions=True)
    return done


async def crawlee(pages: list[str]) -> int:
    """Crawlee's HttpCrawler, configured to respect robots.txt."""
    from crawlee import ConcurrencySettings
    from crawlee.configuration import Configuration
    from crawlee.crawlers import HttpCrawler
    from crawlee.storage_clients import MemoryStorageClient

    done = 0
    crawler = HttpCrawler(
        configuration=Configuration(purge_on_start=False),
        storage_client=MemoryStorageClient(),
        respect_robots_txt_file=True,
        configure_logging=False,
        concurrency_settings=ConcurrencySettings(
            min_concurrency=CONCURRENCY,
            max_concurrency=CONCURRENCY,
            desired_concurrency=CONCURRENCY,
        ),
    )

    @crawler.router.default_handler  # type: ignore[untyped-decorator]
    async def handle(context: Any) -> None:
        nonlocal done
        await context.http_response.read()
        done += 1

    await crawler.run(pages)
    return done


def scrapy(pages: list[str], **settings: Any) -> int:
    """Scrapy with its defaults, except for delay, limits and the robots.txt setting."""
    import scrapy as package
    from scrapy.crawler import CrawlerProcess

    class Spider(package.Spider):  # type: ignore[misc]
        name = "bench"
        start_urls = pages
        done = 0

        def parse(self, response: Any) -> None:
            assert response.body
            Spider.done += 1

    process = CrawlerProcess(
        settings={
            "USER_AGENT": AGENT,
            "ROBOTSTXT_OBEY": True,
            "CONCURRENT_REQUESTS": CONCURRENCY,
            "CONCURRENT_REQUESTS_PER_DOMAIN": PER_HOST,
            "DOWNLOAD_DELAY": 0,
            "LOG_ENABLED": False,
            "TELNETCONSOLE_ENABLED": False,
            **settings,
        }
    )
    process.crawl(Spider)
    process.start()
    return Spider.done


def scrapy_one_by_one(pages: list[str]) -> int:
    """Scrapy with one request per host at a time, as in a polite crawl."""
    return scrapy(pages, CONCURRENT_REQUESTS_PER_DOMAIN=1)


def scrapy_polite(pages: list[str]) -> int:
    """Scrapy with gatekeeper's add-on, and one request per host at a time."""
    config = {
        "guard": {"allow": ["127.0.0.0/8"]},
        "pacing": {"default_interval": 0.0, "concurrency": 1},
    }
    return scrapy(
        pages,
        ADDONS={"gatekeeper.integrations.scrapy.Addon": 500},
        CONCURRENT_REQUESTS_PER_DOMAIN=1,
        GATEKEEPER_CONFIG=config,
    )


class Crawler(NamedTuple):
    """One way to crawl."""

    crawl: Callable[[list[str]], Any]
    distribution: str
    """The distribution that must be installed."""
    modules: tuple[str, ...]
    """Modules imported before the clock starts."""
    slow: bool = False
    """Whether it fetches fewer pages than the others."""
    beside: str | None = None
    """The crawler it is compared with; None: the bare client."""


BARE = "bare aiohttp"
_OURS = ("aiohttp", "gatekeeper", "gatekeeper.session")

CRAWLERS = {
    BARE: Crawler(bare, "aiohttp", ("aiohttp",)),
    "polite_session": Crawler(polite, "robots-gatekeeper", _OURS),
    "gate.lease": Crawler(leases, "robots-gatekeeper", _OURS),
    "gate.lease, bare aiohttp": Crawler(leases_over_a_client, "robots-gatekeeper", _OURS),
    "PoliteQueue": Crawler(queue, "robots-gatekeeper", (*_OURS, "gatekeeper.queue")),
    "PoliteQueue, polite_session": Crawler(
        queue_and_session, "robots-gatekeeper", (*_OURS, "gatekeeper.queue")
    ),
    "bare aiohttp, to files": Crawler(bare_files, "aiohttp", ("aiohttp",)),
    "gatekeeper fetch -o": Crawler(
        fetch_files,
        "robots-gatekeeper",
        (*_OURS, "gatekeeper.crawl.runner"),
        beside="bare aiohttp, to files",
    ),
    "aiohttp and Protego": Crawler(by_hand, "protego", ("aiohttp", "protego")),
    "Crawlee": Crawler(crawlee, "crawlee", ("crawlee.crawlers", "crawlee.storage_clients"), True),
    "Scrapy": Crawler(scrapy, "scrapy", ("scrapy.crawler",), True),
    "Scrapy, one request a host": Crawler(scrapy_one_by_one, "scrapy", ("scrapy.crawler",), True),
    "Scrapy with our add-on": Crawler(
        scrapy_polite, "scrapy", ("scrapy.crawler", "gatekeeper.integrations.scrapy"), True
    ),
}


def available() -> list[str]:
    """Return the crawlers whose distribution is installed."""
    return [name for name, one in CRAWLERS.items() if version_of(one.distribution)]


def _run(name: str, port: int, pages: int) -> dict[str, float]:
    # Some log every request, which is not needed here.
    logging.disable(logging.CRITICAL)
    crawl, work = CRAWLERS[name].crawl, urls(port, pages)
    for module in CRAWLERS[name].modules:
        importlib.import_module(module)
    # Garbage of the imports is not part of the crawl, and whether the next collection
    # falls into the crawl would be chance.
    gc.collect()
    wall, processor = time.perf_counter(), time.process_time()
    done = _in_loop(crawl(work)) if asyncio.iscoroutinefunction(crawl) else crawl(work)
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    return {"wall": wall, "processor": processor, "pages": done}


def _in_loop(work: Any) -> int:
    try:
        import uvloop
    except ImportError:
        return int(asyncio.run(work))
    return int(uvloop.run(work))


if __name__ == "__main__":
    print(json.dumps(_run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
