"""A sidecar to show: with hosts of a fake internet in every state, waiters and decisions."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from gatekeeper import Gatekeeper
from gatekeeper.config import Config, GuardConfig, PacingConfig, ServerConfig, StorageConfig
from gatekeeper.sidecar.listening import Server
from gatekeeper.sidecar.routes.table import ROUTES
from gatekeeper.sidecar.security import Tokens
from gatekeeper.sidecar.service import Service
from tests.conformance.ways import listen
from tests.gate_support import gate_on
from tests.internet import FakeInternet
from tests.pacing_support import ShiftedClock

ROBOTS = """# Shop rules, kept by hand
User-agent: *
Allow: /products/
Disallow: /products/private
Disallow: /cart
Disallow: /search
Allow: /search/about
Crawl-delay: 2

User-agent: badbot
Disallow: /

Sitemap: https://shop.test/sitemap.xml
"""


@dataclass
class Demo:
    """A service that listens in this process."""

    service: Service
    gate: Gatekeeper
    internet: FakeInternet
    port: int
    session: aiohttp.ClientSession
    clock: ShiftedClock

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def post(self, path: str, body: Any) -> int:
        async with self.session.post(self.base + path, json=body) as response:
            return response.status


@asynccontextmanager
async def demo(
    internet: FakeInternet,
    *,
    tokens: Tokens | None = None,
    port: int = 0,
    storage: str | None = None,
    middleware: Any = None,
) -> AsyncIterator[Demo]:
    async with AsyncExitStack() as stack:
        config = Config(
            guard=GuardConfig(allow=("127.0.0.0/8", "*.test")),
            pacing=PacingConfig(default_interval=1.0),
            server=ServerConfig(log_decisions="none", port=port or 8750),
            storage=StorageConfig(path=storage),
        )
        clock = ShiftedClock()
        gate = await stack.enter_async_context(
            gate_on(internet, config, agent="demobot/1.0 (+https://demo.test/bot)", clock=clock)
        )
        service = Service(
            gate, config, ROUTES, addresses=[("0.0.0.0", 0)], version="0.1.0", tokens=tokens
        )
        service.serve()
        stack.push_async_callback(service.close)
        handler = service.handle if middleware is None else middleware(service.handle)
        server = Server(handler, header=16_384, inline=None if middleware else service.inline)
        listens = await listen(stack, server, port=port)
        session = await stack.enter_async_context(aiohttp.ClientSession())
        yield Demo(service, gate, internet, listens, session, clock)


async def furnish(demo: Demo, rounds: int = 40) -> None:
    """Run a service with hosts in every state, a lease, a waiter, and an hour of series."""
    internet, gate, service = demo.internet, demo.gate, demo.service
    internet.site("https://shop.test").robots(ROBOTS)
    internet.site("http://shop.test").robots(ROBOTS)
    for name in ("news", "blog", "docs", "forum", "wiki", "images", "archive"):
        internet.site(f"http://{name}.test").robots("User-agent: *\nDisallow: /admin\n")
    internet.site("http://down.test").robots("busy", status=503)
    for n in range(rounds):
        for path in ("products/1", "cart", "search?q=x", "products/private/2"):
            await gate.check(f"http://shop.test/{path}")
        async with demo.session.get(
            demo.base + "/v1/check",
            params={"url": f"http://{('news', 'blog', 'docs', 'wiki')[n % 4]}.test/a/{n}"},
        ) as response:
            await response.read()
        if n % 4 == 0:
            for path in ("products/7", "cart/3"):
                async with demo.session.get(
                    demo.base + "/v1/check", params={"url": f"http://shop.test/{path}?n={n}"}
                ) as response:
                    await response.read()
    await gate.check("http://down.test/")
    await gate.block("images.test", service.clock.wall() + 900, "429, Retry-After 900")
    await gate.pause("archive.test")
    demo.clock.by += 2.0  # the crawl-delay since its robots.txt was fetched
    await demo.post("/v1/leases", {"url": "http://shop.test/products/1", "wait": 20, "ttl": 600})
    rng = random.Random(4)
    series = service.operators.series
    for n in range(360):
        series.sample()
        _, seen = series.points.pop()
        wave = 1 + 0.5 * rng.random() + (0.8 if 120 < n < 200 else 0)
        for key, size in (("allow", 40), ("deny", 9), ("defer", 2)):
            seen[key] = size * wave * rng.uniform(0.85, 1.15)
        seen["wait_p50"] = 0.4 * wave * rng.uniform(0.7, 1.3)
        seen["wait_p95"] = 1.9 * wave * rng.uniform(0.7, 1.3)
        seen["robots_ok"] = float(rng.randrange(3, 9))
        seen["robots_failed"] = float(rng.random() < 0.1)
        series.points.append((service.clock.wall() - 3600 + n * 10, seen))


def waiter(demo: Demo, path: str = "products/2", wait: float = 60) -> asyncio.Task[int]:
    """Wait for the host whose lease is held."""
    return asyncio.create_task(
        demo.post("/v1/leases", {"url": f"http://shop.test/{path}", "wait": wait})
    )
