"""gatekeeper by each of its ways in, with default settings and a file for its state.

`python -m benchmarks.manners_doors NAME FOLDER`, as in `manners_peers`. The addresses of the crawl
are allowed, because loopback is refused otherwise. A page that is answered 429 or 503 is asked for
three times at most, as by `gatekeeper fetch`; a URL that is deferred is given up after `PATIENCE`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
from collections import defaultdict
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.manners_peers import AGENT, Peer, crawlee_options, main
from benchmarks.manners_site import PUBLIC

__all__ = ["DOORS"]

TRIES = 3
PATIENCE = 8.0
"""Seconds; longer than any Crawl-delay and Retry-After of the undisturbed crawl."""
REFUSED = (429, 503)


def settings(folder: Path) -> dict[str, Any]:
    """Return the settings of every door."""
    return {
        "guard": {"allow": [PUBLIC]},
        "storage": {"path": str(folder / "state.sqlite")},
    }


def config(folder: Path) -> Any:
    """Return the same as a `Config`."""
    from gatekeeper import Config

    return Config.from_dict(settings(folder))


async def _each(urls: list[str], get: Callable[[str], Awaitable[int]]) -> None:
    """Ask for every URL, all at the same time: the gate decides who waits."""
    from gatekeeper import Denied, LeaseTimeout

    async def one(url: str) -> None:
        for _ in range(TRIES):
            try:
                if await get(url) not in REFUSED:
                    return
            except (Denied, LeaseTimeout) as error:
                print(url, error)
                return

    results = await asyncio.gather(*map(one, urls), return_exceptions=True)
    print(*(error for error in results if error is not None), sep="\n")


async def session(urls: list[str], folder: Path) -> None:
    """`polite_session`, used like any session."""
    from gatekeeper.session import polite_session

    async with polite_session(user_agent=AGENT, config=config(folder)) as client:

        async def get(url: str) -> int:
            async with client.get(url) as response:
                await response.read()
                return int(response.status)

        await _each(urls, get)


async def _leased(gate: Any, urls: list[str], folder: Path) -> None:
    from gatekeeper.session import plain_session

    async with plain_session(AGENT, config=config(folder)) as client:

        async def get(url: str) -> int:
            async with gate.lease(url) as lease:
                return await _send(client, lease)

        await _each(urls, get)


async def _send(client: Any, lease: Any) -> int:
    async with client.get(lease.url, allow_redirects=False) as response:
        lease.report(status=response.status, retry_after=response.headers.get("Retry-After"))
        await response.read()
        return int(response.status)


async def leases(urls: list[str], folder: Path) -> None:
    """`gate.lease`, one for each request."""
    from gatekeeper import Gatekeeper

    async with Gatekeeper(AGENT, config=config(folder)) as gate:
        await _leased(gate, urls, folder)


async def queue(urls: list[str], folder: Path) -> None:
    """`PoliteQueue` with a file, drained by twenty workers."""
    from gatekeeper import Gatekeeper, PoliteQueue
    from gatekeeper.session import plain_session

    file = folder / "queue.sqlite"
    seen = set((folder / "put.txt").read_text("utf-8").split()) if file.exists() else set()
    async with (
        Gatekeeper(AGENT, config=config(folder)) as gate,
        PoliteQueue(gate, keep=file) as frontier,
        plain_session(AGENT, gate=gate) as client,
    ):

        async def work() -> None:
            while True:
                async with await frontier.get() as lease:
                    if await _send(client, lease) in REFUSED and lease.data > 1:
                        await frontier.put(lease.url, data=lease.data - 1)

        for url in urls:
            if url not in seen:  # which URLs it has put is for the crawler to remember
                await frontier.put(url, data=TRIES)
        (folder / "put.txt").write_text("\n".join(urls), "utf-8")
        workers = [asyncio.create_task(work()) for _ in range(20)]
        with contextlib.suppress(TimeoutError):  # the deferred URLs stay in the file
            await asyncio.wait_for(frontier.join(), PATIENCE + 4.0)
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


def fetch(_urls: list[str], folder: Path) -> None:
    """`gatekeeper fetch -i FILE -o DIR`."""
    words = ["fetch", "-i", str(folder / "urls.txt"), "-o", str(folder / "pages")]
    command = [sys.executable, "-m", "gatekeeper", *words, "--user-agent", AGENT]
    options = ["--allow-address", PUBLIC, "--max-wait", str(PATIENCE)]
    os.execv(sys.executable, [*command, *options])  # the command itself is measured


def scrapy(urls: list[str], folder: Path) -> None:
    """Scrapy with the add-on."""
    from benchmarks.manners_peers import scrapy as crawl

    crawl(
        urls,
        folder,
        ADDONS={"gatekeeper.integrations.scrapy.Addon": 500},
        GATEKEEPER_CONFIG=settings(folder),
        GATEKEEPER_MAX_WAIT=PATIENCE,
    )


async def crawlee(urls: list[str], folder: Path) -> None:
    """Crawlee with the adapter."""
    from crawlee.crawlers import HttpCrawler

    from gatekeeper import Gatekeeper
    from gatekeeper.integrations.crawlee import polite_crawler

    async with Gatekeeper(AGENT, config=config(folder)) as gate:
        options = crawlee_options(folder)
        crawler = polite_crawler(HttpCrawler, gate, max_wait=PATIENCE, **options)

        @crawler.router.default_handler  # type: ignore[untyped-decorator]
        async def handle(context: Any) -> None:
            await context.http_response.read()

        await crawler.run(urls)


async def httpx(urls: list[str], folder: Path, library: str = "httpx") -> None:
    """httpx or httpx2 with `PoliteTransport`."""
    from importlib import import_module

    from gatekeeper import Gatekeeper

    module = import_module(f"gatekeeper.integrations.{library}")
    async with Gatekeeper(AGENT, config=config(folder)) as gate:
        transport = module.PoliteTransport(gate)
        client = import_module(library).AsyncClient(transport=transport, follow_redirects=True)
        async with client:

            async def get(url: str) -> int:
                return int((await client.get(url)).status_code)

            await _each(urls, get)


async def httpx2(urls: list[str], folder: Path) -> None:
    """httpx2 with `PoliteTransport`."""
    await httpx(urls, folder, "httpx2")


def requests(urls: list[str], folder: Path) -> None:
    """requests with `PoliteAdapter`, in a thread for each URL that waits."""
    import requests as library

    from gatekeeper import SyncGatekeeper
    from gatekeeper.integrations.requests import PoliteAdapter

    with SyncGatekeeper(AGENT, config=config(folder)) as gate, library.Session() as client:
        client.trust_env = False
        for scheme in ("https://", "http://"):
            client.mount(scheme, PoliteAdapter(gate))

        def one(url: str) -> None:
            for _ in range(TRIES):
                try:
                    if client.get(url).status_code not in REFUSED:
                        return
                except library.RequestException as error:
                    print(url, error)
                    return

        with ThreadPoolExecutor(len(urls)) as threads:
            list(threads.map(one, urls))


async def sidecar(urls: list[str], folder: Path) -> None:
    """`RemoteGatekeeper`, with `gatekeeper serve` in a process that is killed and started, too."""
    from gatekeeper import RemoteGatekeeper

    at = folder / "gatekeeper.sock"
    state = ["--socket", str(at), "--storage", str(folder / "state.sqlite")]
    command = [sys.executable, "-m", "gatekeeper", "serve", "--allow-address", PUBLIC, *state]
    serving = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert serving.stdout is not None
    await serving.stdout.readline()
    try:
        async with RemoteGatekeeper(f"unix:{at}", AGENT, config=config(folder)) as gate:
            await _leased(gate, urls, folder)
    finally:
        serving.terminate()
        await serving.wait()


async def playwright(urls: list[str], folder: Path) -> None:
    """Playwright with `polite_route`, in one page for each host."""
    from playwright.async_api import Error, async_playwright

    from gatekeeper import Gatekeeper
    from gatekeeper.integrations.playwright import polite_route

    async with (
        async_playwright() as library,
        Gatekeeper(AGENT, config=config(folder)) as gate,
    ):
        path = shutil.which("chromium")
        browser = await library.chromium.launch(executable_path=path, args=["--no-sandbox"])
        context = await browser.new_context(user_agent=gate.user_agent, service_workers="block")
        polite = await polite_route(context, gate)

        pages: dict[str, Any] = {}
        rooms: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

        async def get(url: str) -> int:
            host = str(urlsplit(url).hostname)
            async with rooms[host]:
                if host not in pages:
                    pages[host] = await context.new_page()
                try:
                    response = await polite.goto(pages[host], url)
                except Error as error:
                    print(url, error)
                    return 0
                return 0 if response is None else int(response.status)

        await _each(urls, get)
        await browser.close()


async def mcp(urls: list[str], folder: Path) -> None:
    """The tool `fetch` of the MCP server."""
    from mcp import Client

    from gatekeeper.integrations.mcp import build
    from gatekeeper.session import polite_session

    async with (
        polite_session(user_agent=AGENT, config=config(folder)) as session,
        Client(build(session)) as client,
    ):
        room = asyncio.Semaphore(60)  # the tool refuses more than 64 calls at once

        async def get(url: str) -> int:
            async with room:
                found = await client.call_tool("fetch", {"url": url})
            if found.is_error:
                print(url, found.content)
                return 0
            return int(found.structured_content["status"])

        await _each(urls, get)


_OURS = "robots-gatekeeper"
DOORS = {
    "gate.lease": Peer(leases, (_OURS,)),
    "polite_session": Peer(session, (_OURS,)),
    "PoliteQueue": Peer(queue, (_OURS,)),
    "gatekeeper fetch": Peer(fetch, (_OURS,)),
    "sidecar, RemoteGatekeeper": Peer(sidecar, (_OURS,)),
    "Scrapy, our add-on": Peer(scrapy, (_OURS, "scrapy")),
    "Crawlee, our adapter": Peer(crawlee, (_OURS, "crawlee")),
    "httpx, PoliteTransport": Peer(httpx, (_OURS, "httpx")),
    "httpx2, PoliteTransport": Peer(httpx2, (_OURS, "httpx2")),
    "requests, PoliteAdapter": Peer(requests, (_OURS, "requests")),
    "Playwright, polite_route": Peer(playwright, (_OURS, "playwright")),
    "MCP, fetch": Peer(mcp, (_OURS, "mcp")),
}


if __name__ == "__main__":
    main(DOORS, sys.argv[1], Path(sys.argv[2]))
