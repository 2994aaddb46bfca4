"""Playwright: the cases of the conformance suite, and those of browsers alone."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio

from gatekeeper import ConfigError, Gatekeeper
from tests.conformance.ways import AGENT, Sidecar, settings
from tests.effort import LONG, some_of
from tests.integrations import test_conformance as suite
from tests.integrations.browsers import CHROMIUM, browser, context_of
from tests.integrations.rigs import Answer, Rig
from tests.internet import FakeInternet, Hold, Page, Reset, html

pytest.importorskip("playwright")

from gatekeeper.integrations.playwright import polite_route
from tests.waiting_support import until

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium"),
    pytest.mark.asyncio(loop_scope="module"),  # one browser for all of them
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def opened() -> AsyncIterator[Any]:
    async with browser(args=["--unsafely-treat-insecure-origin-as-secure=http://a.test"]) as one:
        yield one


@pytest_asyncio.fixture(loop_scope="module")
async def internet() -> AsyncIterator[FakeInternet]:
    async with FakeInternet() as net:
        yield net


@pytest_asyncio.fixture(loop_scope="module")
async def gate(internet: FakeInternet) -> AsyncIterator[Gatekeeper]:
    async with Gatekeeper(AGENT, config=settings(), resolver=internet.resolver) as entered:
        yield entered


class Playwright(Rig):
    """A page of a browser that is already open."""

    library = "playwright"
    error = "playwright.async_api.Error"
    guarded = False

    opened: Any
    """The browser."""

    async def start(self) -> None:
        self.gate = await self._gate().__aenter__()
        self.context = await context_of(self.opened, self.internet)
        self.routes = await polite_route(self.context, self.gate)
        self.idle: list[Any] = []

    async def close(self) -> None:
        await self.context.close()

    async def get(self, url: str, **headers: str) -> Answer:
        if headers:  # a browser's User-Agent is set on its context
            await self.context.close()
            name = headers["User_Agent"]
            self.context = await context_of(self.opened, self.internet, user_agent=name)
            self.routes, self.idle = await polite_route(self.context, self.gate), []
        page = self.idle.pop() if self.idle else await self.context.new_page()
        try:
            response = await self.routes.goto(page, url)
        except BaseException:
            await page.close()  # otherwise it may still send requests
            raise
        assert response is not None
        self.idle.append(page)
        return Answer(response.status, await response.text())


PROMISES: list[Callable[..., Awaitable[None]]] = [
    suite.test_a_denied_url_never_reaches_the_server,
    suite.test_an_unreachable_file_defers,
    suite.test_crawl_delay_is_kept_between_any_two,
    suite.test_a_retry_after_blocks_only_its_host,
    suite.test_a_slow_host_delays_no_other_host,
    suite.test_a_cancelled_request_frees_the_lease,
    suite.test_a_failed_request_is_the_library_s_error_and_frees_the_lease,
    suite.test_while_the_gate_is_down_nothing_is_sent,
]


@pytest.mark.parametrize(
    ("promise", "where"),
    [
        *((promise, "embedded") for promise in PROMISES),
        # What differs is the gate, which the suite itself tries with each client.
        *some_of(((promise, "sidecar") for promise in PROMISES), 4),
    ],
    ids=lambda one: getattr(one, "__name__", one),
)
async def test_every_promise_to_sites_holds_in_a_browser(
    internet: FakeInternet, opened: Any, promise: Callable[..., Awaitable[None]], where: str
) -> None:
    async with rigs(opened, where) as rig_on:
        await promise(internet, rig_on)


@pytest.mark.parametrize("sent", ["otherbot/2.0", "nicebot/1.0"])
async def test_the_identity_sent_is_the_one_judged(
    internet: FakeInternet, opened: Any, sent: str
) -> None:
    async with rigs(opened, "embedded") as rig_on:
        await suite.test_the_identity_sent_is_the_one_judged(internet, rig_on, sent)


@asynccontextmanager
async def rigs(opened: Any, where: str) -> AsyncIterator[Callable[..., Awaitable[Rig]]]:
    async with AsyncExitStack() as stack:

        async def begin(internet: FakeInternet, *, max_wait: float = 0.0, **tables: Any) -> Rig:
            del max_wait  # a page does not wait for deferrals
            sidecar = None
            if where == "sidecar":
                sidecar = Sidecar(internet, settings(**tables), None)
                await sidecar.start()
                stack.push_async_callback(sidecar.stop)
            rig = Playwright(internet, settings(**tables), sidecar)
            rig.opened = opened
            await rig.start()
            stack.push_async_callback(rig.stop)
            return rig

        yield begin


async def test_redirect_hops_in_a_browser_are_not_decided_and_take_no_lease(
    internet: FakeInternet, opened: Any, gate: Gatekeeper
) -> None:
    """The documented limit: redirect hops are not decided, and need no lease."""
    site = internet.site("a.test").robots("User-agent: *\nCrawl-delay: 1\nDisallow: /private\n")
    site.redirect("/x", "/private").page("/private", "there")
    context = await context_of(opened, internet)
    polite = await polite_route(context, gate)
    assert await polite_route(context, gate) is polite
    page = await context.new_page()
    response = await page.goto("http://a.test/x")
    assert await response.text() == "there"
    assert polite.unseen == 1
    assert site.paths == ["/robots.txt", "/x", "/private"]
    assert site.gaps()[-1] < 1
    assert {one.headers["User-Agent"] for one in site.requests} == {AGENT}
    # Another route that sends a request by itself is counted as well.
    await page.route("**/y", lambda route: route.continue_())
    await page.goto("http://a.test/y")
    assert polite.unseen == 2
    with pytest.raises(ConfigError, match="document"):
        await polite_route(await opened.new_context(), gate, exempt=["document"])


async def test_what_a_page_loads_is_decided_and_takes_no_leases(
    internet: FakeInternet, opened: Any, gate: Gatekeeper
) -> None:
    site = internet.site("a.test").robots("User-agent: *\nCrawl-delay: 1\nDisallow: /private\n")
    parts = "".join(f"<img src=/{n}.png>" for n in range(5))
    scripts = "<script src=/private/s.js></script><script src=http://b.test/private.js></script>"
    site.on("/", html(f"{parts}<img src=/private/i.png>{scripts}<p>done</p>"))
    for number in range(5):
        site.page(f"/{number}.png", headers={"Content-Type": "image/png"})
    other = internet.site("b.test").robots("User-agent: *\nDisallow: /\n")
    context = await context_of(opened, internet)
    await polite_route(context, gate)
    page = await context.new_page()
    await page.goto("http://a.test/")
    images = [f"/{number}.png" for number in range(5)]
    assert sorted(site.paths) == sorted(["/robots.txt", "/", *images])
    assert other.paths == ["/robots.txt"]
    assert gate.stats().pacing.in_flight == 0

    exempt = await context_of(opened, internet)
    await polite_route(exempt, gate, exempt=["image"])
    again = await exempt.new_page()
    await again.set_content("<img src=http://a.test/private/i.png>")
    await again.wait_for_load_state("networkidle")
    assert site.paths[-1] == "/private/i.png"
    assert site.requests[-1].headers["User-Agent"] == AGENT


async def test_service_workers_and_websockets_do_not_bypass_the_gate(
    internet: FakeInternet, opened: Any, gate: Gatekeeper
) -> None:
    site = internet.site("a.test").robots("").on("/", html("<p>hello"))
    site.page("/w.js", headers={"Content-Type": "text/javascript"})
    context = await context_of(opened, internet, service_workers="allow")
    await polite_route(context, gate)
    page = await context.new_page()
    await page.goto("http://a.test/")
    said = "navigator.serviceWorker.register('/w.js').then(() => 'yes', error => error.name)"
    assert await page.evaluate(said) == "SecurityError"
    closed = "new Promise(r => { new WebSocket('ws://a.test/ws').onclose = () => r('closed') })"
    assert await page.evaluate(closed) == "closed"
    assert site.paths == ["/robots.txt", "/"]


async def test_a_page_that_is_closed_frees_its_lease(
    internet: FakeInternet, opened: Any, gate: Gatekeeper
) -> None:
    hold = Hold(Page("late"))
    site = internet.site("a.test").robots("").on("/1", hold).page("/2", "second").on("/3", Reset())
    context = await context_of(opened, internet)
    polite = await polite_route(context, gate)
    page = await context.new_page()
    going = asyncio.create_task(page.goto("http://a.test/1"))
    await hold.waiting.acquire()
    waiting = await context.new_page()
    queued = asyncio.create_task(waiting.goto("http://a.test/2"))
    await internet.settle()
    await waiting.close()
    await page.close()
    results = await asyncio.gather(going, queued, return_exceptions=True)
    assert all(isinstance(result, Exception) for result in results)
    await until(lambda: not gate.stats().pacing.in_flight)
    again = await context.new_page()
    async with gate.lease("http://a.test/2"):  # the caller's open lease is used
        response = await polite.goto(again, "http://a.test/2")
    assert response is not None
    assert "/1" in site.paths
    assert polite.unseen == 0


async def test_a_request_that_is_passed_on_after_its_page_was_closed_keeps_no_lease(
    internet: FakeInternet, opened: Any, gate: Gatekeeper
) -> None:
    """Playwright starts each handler in a task, and sends nothing for a closed page in silence."""
    site = internet.site("a.test").robots("").page("/")
    context = await context_of(opened, internet)
    polite = await polite_route(context, gate)
    page = await context.new_page()
    begun, closed, done = asyncio.Event(), asyncio.Event(), asyncio.Event()
    page.on("close", lambda _: closed.set())

    async def late(route: Any, request: Any) -> None:
        begun.set()
        await closed.wait()
        await polite._route(route, request)
        done.set()

    await page.route("**/*", late)
    going = asyncio.create_task(page.goto("http://a.test/"))
    await begun.wait()
    await page.close()
    await asyncio.wait([going])
    await done.wait()
    assert isinstance(going.exception(), Exception)
    assert gate.stats().pacing.in_flight == 0
    assert "/" not in site.paths


async def test_a_page_that_waits_for_a_host_can_navigate_elsewhere(
    internet: FakeInternet, opened: Any, gate: Gatekeeper
) -> None:
    hold = Hold(Page("late"))
    internet.site("a.test").robots("").on("/", hold)
    internet.site("b.test").robots("").page("/", "there")
    context = await context_of(opened, internet)
    polite = await polite_route(context, gate)
    page = await context.new_page()
    first = asyncio.create_task(polite.goto(page, "http://a.test/"))
    await hold.waiting.acquire()
    first.cancel()
    await asyncio.wait([first])
    response = await polite.goto(page, "http://b.test/")
    assert response is not None
    assert await response.text() == "there"
    await until(lambda: not gate.stats().pacing.in_flight)
    await context.close()


async def test_a_playwright_crawler_takes_leases(internet: FakeInternet) -> None:
    pytest.importorskip("crawlee")
    from crawlee.crawlers import PlaywrightCrawler

    from tests.integrations.test_crawlee import crawl_of

    text = "User-agent: *\nCrawl-delay: 0.2\nDisallow: /private\n"
    site = internet.site("a.test").robots(text)
    site.on("/", html("<a href=/1>1</a><a href=/private>2</a>")).page("/1", "one")
    site.page("/private")
    internet.site("b.test").robots("").page("/", "free")
    listener = internet.listener()
    proxy = {"server": f"http://{listener.address}:{listener.port()}"}
    async with Gatekeeper(AGENT, config=settings(), resolver=internet.resolver) as gate:
        crawl = await crawl_of(
            internet,
            gate,
            PlaywrightCrawler,
            links=True,
            browser_launch_options={"executable_path": CHROMIUM, "chromium_sandbox": False},
            browser_new_context_options={"proxy": proxy},
        )
        await crawl.crawler.run(["http://a.test/", "http://b.test/"])
        assert gate.stats().pacing.in_flight == 0
    assert crawl.failed == {}
    assert sorted(crawl.got) == ["http://a.test/", "http://a.test/1", "http://b.test/"]
    assert crawl.skipped == ["http://a.test/private"]
    assert site.paths == ["/robots.txt", "/", "/1"]
    assert min(site.gaps()) >= 0.2
    assert {one.headers["User-Agent"] for one in internet.requests} == {AGENT}


async def test_a_closed_context_is_freed_and_so_is_its_gate(
    opened: Any, internet: FakeInternet
) -> None:
    internet.site("a.test").robots("").on("/", html("page"))
    closed: list[Any] = []

    async def use() -> None:
        async with Gatekeeper(AGENT, config=settings(), resolver=internet.resolver) as gate:
            context = await context_of(opened, internet)
            routes = await polite_route(context, gate)
            assert await polite_route(context, gate) is routes
            await routes.goto(await context.new_page(), "http://a.test/")
            await context.close()
            closed.extend(map(weakref.ref, (gate, context, routes)))

    for _ in range(50 if LONG else 3):
        await asyncio.create_task(use())
    gc.collect()
    assert [one() for one in closed if one() is not None] == []
