"""Many URLs, few workers: the queue hands out each URL when its host is due.

python examples/polite_queue.py https://example.org/ https://example.net/
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys

import aiohttp

from gatekeeper import Config, Decision, Gatekeeper, PoliteQueue
from gatekeeper.session import plain_session

USER_AGENT = "examplebot/1.0 (+https://example.org/bot)"
WORKERS = 4


async def work(queue: PoliteQueue, session: aiohttp.ClientSession) -> None:
    """Fetch the next URL whose host is due, until cancelled."""
    while True:
        async with await queue.get() as lease:  # leaving the block is task_done
            try:
                async with session.get(lease.url, allow_redirects=False) as response:
                    lease.report(
                        status=response.status, retry_after=response.headers.get("Retry-After")
                    )
                    print(lease.url, response.status)
            except aiohttp.ClientError as error:
                lease.report()  # the request may have been sent, but there is no response
                print(lease.url, type(error).__name__)


def denied(decision: Decision) -> None:
    """Report a URL that robots.txt or the guard refuses; the queue is done with it."""
    print(decision.url, decision.verdict, decision.reason)


async def main(urls: list[str]) -> None:
    """Put all URLs into the queue, and wait until each is done."""
    path = os.environ.get("GATEKEEPER_CONFIG")
    config = Config.load(path) if path else Config()
    async with (
        Gatekeeper(USER_AGENT, config=config) as gate,
        PoliteQueue(gate, on_denied=denied) as queue,
        plain_session(USER_AGENT, gate=gate) as session,
    ):
        for url in urls:
            await queue.put(url)
        workers = [asyncio.create_task(work(queue, session)) for _ in range(WORKERS)]
        await queue.join()
        for worker in workers:
            worker.cancel()
        for worker in workers:
            with contextlib.suppress(asyncio.CancelledError):
                await worker


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
