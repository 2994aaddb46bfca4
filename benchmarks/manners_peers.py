"""Other crawlers, each as its documentation recommends for a polite crawl.

`python -m benchmarks.manners_peers NAME FOLDER` fetches the URLs of FOLDER/urls.txt, and keeps in
FOLDER whatever it keeps for a restart. This module imports nothing of gatekeeper, so that it also
runs in an environment with one of the peers alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

__all__ = ["AGENT", "PEERS", "Peer"]

AGENT = "examplebot/1.0 (+https://www.example.org/bot)"
PROJECT = {
    "CONCURRENT_REQUESTS_PER_DOMAIN": 1,
    "DOWNLOAD_DELAY": 1,
    "CONCURRENT_REQUESTS": 100,  # "Broad Crawls" in its documentation
}
"""What `scrapy startproject` writes, and a limit for many hosts."""


def scrapy(urls: list[str], folder: Path, **settings: Any) -> None:
    """Scrapy with ROBOTSTXT_OBEY, and the settings given."""
    import scrapy as package
    from scrapy.crawler import CrawlerProcess

    class Spider(package.Spider):  # type: ignore[misc]
        name = "manners"

        async def start(self) -> Any:
            for url in urls:  # with the filter of duplicates, which JOBDIR keeps
                yield package.Request(url)

        def parse(self, response: Any) -> None:
            assert response.body

    process = CrawlerProcess(
        settings={
            "USER_AGENT": AGENT,
            "ROBOTSTXT_OBEY": True,
            "JOBDIR": str(folder / "job"),
            "TELNETCONSOLE_ENABLED": False,
            **settings,
        }
    )
    process.crawl(Spider)
    process.start()


def scrapy_project(urls: list[str], folder: Path) -> None:
    """Scrapy with the settings that `scrapy startproject` writes."""
    scrapy(urls, folder, **PROJECT)


def scrapy_throttled(urls: list[str], folder: Path) -> None:
    """The same with AutoThrottle, which the file of settings offers in a comment."""
    scrapy(urls, folder, **PROJECT, AUTOTHROTTLE_ENABLED=True)


async def crawlee(urls: list[str], folder: Path, *, throttled: bool = False) -> None:
    """Crawlee's HttpCrawler with respect_robots_txt_file."""
    from crawlee.crawlers import HttpCrawler
    from crawlee.request_loaders import ThrottlingRequestManager
    from crawlee.storages import RequestQueue

    options = crawlee_options(folder)
    if throttled:
        options["request_manager"] = ThrottlingRequestManager(
            await RequestQueue.open(),
            domains=sorted({str(urlsplit(url).hostname) for url in urls}),
            request_manager_opener=RequestQueue.open,
        )
    crawler = HttpCrawler(respect_robots_txt_file=True, **options)

    @crawler.router.default_handler  # type: ignore[untyped-decorator]
    async def handle(context: Any) -> None:
        await context.http_response.read()

    await crawler.run(urls)


def crawlee_options(folder: Path) -> dict[str, Any]:
    """Keep storages in a folder for the next run, and return options of a crawler.

    The number of requests in flight is Crawlee's own at the start; it does not follow the load of
    the machine here, because other crawlers run beside it.
    """
    from crawlee import ConcurrencySettings, service_locator
    from crawlee.configuration import Configuration

    kept = Configuration(storage_dir=str(folder / "storage"), purge_on_start=False)
    service_locator.set_configuration(kept)
    fixed = ConcurrencySettings(min_concurrency=10, desired_concurrency=10, max_concurrency=10)
    return {"concurrency_settings": fixed}


async def crawlee_throttled(urls: list[str], folder: Path) -> None:
    """Crawlee, with its ThrottlingRequestManager for all hosts."""
    await crawlee(urls, folder, throttled=True)


async def by_hand(urls: list[str], _folder: Path) -> None:
    """aiohttp, Protego and aiolimiter: what the three do without more code than to join them."""
    import aiohttp
    from aiolimiter import AsyncLimiter
    from protego import Protego

    files: dict[str, asyncio.Task[Any]] = {}
    limiters: dict[str, AsyncLimiter] = {}

    async with aiohttp.ClientSession(headers={"User-Agent": AGENT}) as session:

        async def robots(origin: str) -> Any:
            async with session.get(f"{origin}/robots.txt") as response:
                return Protego.parse(await response.text() if response.status == 200 else "")

        async def fetch(url: str) -> None:
            parts = urlsplit(url)
            origin = f"{parts.scheme}://{parts.netloc}"
            if origin not in files:
                files[origin] = asyncio.create_task(robots(origin))
            file = await files[origin]
            if not file.can_fetch(url, AGENT):
                return
            if origin not in limiters:
                limiters[origin] = AsyncLimiter(1, file.crawl_delay(AGENT) or 1.0)
            async with limiters[origin], session.get(url) as response:
                await response.read()

        await asyncio.gather(*map(fetch, urls), return_exceptions=True)


async def crawl4ai(urls: list[str], _folder: Path) -> None:
    """crawl4ai in Chromium with check_robots_txt, and its default dispatcher."""
    from crawl4ai import AsyncWebCrawler, BrowserConfig, CacheMode, CrawlerRunConfig
    from playwright.async_api import async_playwright

    # Its cache of pages, which outlives the process, is off unless asked for.
    settings = CrawlerRunConfig(check_robots_txt=True, cache_mode=CacheMode.ENABLED, verbose=False)
    port = _free_port()
    async with async_playwright() as playwright:
        # The system's browser: a build of its own can't be downloaded everywhere.
        browser = await playwright.chromium.launch(
            executable_path=shutil.which("chromium"),
            args=[f"--remote-debugging-port={port}", "--no-sandbox"],
        )
        shown = BrowserConfig(
            cdp_url=f"http://127.0.0.1:{port}",
            create_isolated_context=True,  # "essential for concurrent crawls on the same browser"
            user_agent=AGENT,
            verbose=False,
        )
        async with AsyncWebCrawler(config=shown) as crawler:
            for result in await crawler.arun_many(urls, config=settings):
                print(result.url, result.status_code, result.error_message)
        await browser.close()


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


class Peer(NamedTuple):
    """One crawler."""

    crawl: Callable[[list[str], Path], Any]
    distributions: tuple[str, ...]
    """What must be installed. The first gives the version."""


PEERS = {
    "Scrapy, ROBOTSTXT_OBEY": Peer(scrapy, ("scrapy",)),
    "Scrapy, as startproject": Peer(scrapy_project, ("scrapy",)),
    "Scrapy, AutoThrottle": Peer(scrapy_throttled, ("scrapy",)),
    "Crawlee": Peer(crawlee, ("crawlee",)),
    "Crawlee, throttling": Peer(crawlee_throttled, ("crawlee",)),
    "aiohttp, Protego, aiolimiter": Peer(by_hand, ("aiohttp", "protego", "aiolimiter")),
    "crawl4ai": Peer(crawl4ai, ("crawl4ai",)),
}


def main(crawlers: dict[str, Peer], name: str, folder: Path) -> None:
    """Run one crawler over the URLs of the folder."""
    urls = (folder / "urls.txt").read_text("utf-8").split()
    crawling = crawlers[name].crawl(urls, folder)
    if asyncio.iscoroutine(crawling):
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(crawling)


if __name__ == "__main__":
    main(PEERS, sys.argv[1], Path(sys.argv[2]))
