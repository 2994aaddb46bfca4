"""The pages for operators in a real browser: Debian's chromium, driven by Playwright."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web

from gatekeeper.clock import utc
from gatekeeper.decision import Decision, Reason, Verdict
from gatekeeper.pacing.host_settings import ScopeSettings
from gatekeeper.pacing.scopes import Scope
from gatekeeper.sidecar.routes import operators
from gatekeeper.sidecar.routing import Role
from gatekeeper.sidecar.security import Token, Tokens
from tests.effort import LONG
from tests.integrations.browsers import CHROMIUM
from tests.internet import FakeInternet
from tests.pacing_support import is_paused
from tests.sidecar.demo import Demo, demo, furnish, waiter
from tests.waiting_support import until

AXE = Path(__file__).parent / "vendor" / "axe.min.js"
PAGES = (
    "",
    "hosts",
    "hosts/shop.test",
    "explain?url=http://shop.test/products/private/2",
    "waiting",
    "live",
    "history?origin=http://shop.test",
    "audit",
    "config",
    "sign-in",
)

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium"),
    pytest.mark.asyncio(loop_scope="module"),  # one browser for all of them
]
REFRESH = 3_100
"""Milliseconds after which a page has refreshed itself."""
MANY = 10_000 if LONG else 2_000
Browse = Callable[..., AbstractAsyncContextManager[Any]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chromium() -> AsyncIterator[Any]:
    """The browser, started once; each test has its own context in it."""
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--js-flags=--expose-gc"]
        )
        yield browser
        await browser.close()


@pytest.fixture
def browsing(chromium: Any) -> Browse:
    """`async with browsing(...) as page`: errors in its console fail the test."""

    @asynccontextmanager
    async def browse(**options: Any) -> AsyncIterator[Any]:
        context = await chromium.new_context(**options)
        try:
            page = await context.new_page()
            page.set_default_timeout(30_000)
            page.complaints = []
            page.on("pageerror", lambda error: page.complaints.append(str(error)))
            page.on(
                "console",
                lambda told: page.complaints.append(told.text) if told.type == "error" else None,
            )
            yield page
        finally:
            await context.close()

    return browse


@pytest_asyncio.fixture(loop_scope="module")
async def internet() -> AsyncIterator[FakeInternet]:
    async with FakeInternet() as net:
        yield net


@asynccontextmanager
async def furnished(internet: FakeInternet, **options: Any) -> AsyncIterator[Demo]:
    async with demo(internet, **options) as shop:
        await furnish(shop, rounds=8)
        task = waiter(shop)
        await until(lambda: len(shop.service.leases.waiters))
        try:
            yield shop
        finally:
            task.cancel()
            await asyncio.wait([task])


FITS = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
AXE_RUN = "options => axe.run(document, { resultTypes: ['violations'], ...options })"
LOOKS: list[tuple[int, str, dict[str, list[str]]]] = [
    (1400, "light", {}),
    (1400, "dark", {"runOnly": ["color-contrast"]}),
    (360, "light", {}),
    *([(360, "dark", {"runOnly": ["color-contrast"]})] if LONG else []),
]
"""Widths, colour schemes and rules of axe. The dark scheme differs only in its colours, and the
narrow window only in its layout."""


async def test_every_page_passes_axe_and_is_not_cut_off(
    internet: FakeInternet, browsing: Browse, tmp_path: Path
) -> None:
    """axe finds no violation, the console shows no error (the policy holds), nothing is cut off."""
    async with (
        furnished(internet, storage=str(tmp_path / "state")) as shop,
        browsing(bypass_csp=True, reduced_motion="reduce") as page,  # colours change at once
    ):
        for path in PAGES:
            await page.set_viewport_size({"width": 1400, "height": 800})
            await page.goto(f"{shop.base}/ui/{path}")
            for one in await page.query_selector_all("details"):
                await one.evaluate("one => { one.open = true; }")
            if path == "":
                await page.wait_for_selector(".uplot canvas")
            await page.add_script_tag(path=str(AXE))
            for width, scheme, rules in LOOKS:
                await page.set_viewport_size({"width": width, "height": 800})
                await page.emulate_media(color_scheme=scheme)
                found = await page.evaluate(AXE_RUN, rules)
                wrong = [(one["id"], one["nodes"][0]["html"][:200]) for one in found["violations"]]
                assert wrong == [], (path, width, scheme)
                # A chart is redrawn a moment after the window changed.
                await page.wait_for_function(FITS)
        assert page.complaints == []


async def test_the_charts_share_a_cursor_and_a_legend(
    internet: FakeInternet, browsing: Browse
) -> None:
    """The pointer, or an arrow key, at one of them shows the moment on all three."""
    async with furnished(internet) as shop, browsing(timezone_id="Asia/Tokyo") as page:
        series = shop.service.operators.series.body()
        await page.goto(f"{shop.base}/ui/")
        await page.wait_for_selector("#moment:has-text('(latest)')")
        for n in range(3):
            box = await page.locator(".u-over").nth(n).bounding_box()
            await page.mouse.move(box["x"] + box["width"] / 4, box["y"] + 10)
            await page.wait_for_selector("#moment:not(:has-text('latest'))")
            places = await page.evaluate(CURSORS)
            assert max(places) - min(places) < 0.02
            assert abs(places[0] - 0.25) < 0.02
        at = await page.get_attribute("#moment", "datetime")
        index = min(range(360), key=lambda n: abs(series.times[n] - moment_of(at)))
        assert abs(series.times[index] - moment_of(at)) < 1
        assert f"At {utc(series.times[index]):%H:%M:%S} UTC" == await page.inner_text("#moment")
        for name in ("allow", "wait_p95", "robots_ok"):
            shown = float(await page.inner_text(f"[data-value={name}]"))
            assert shown == pytest.approx(series.values[name][index], rel=0.01)
        await page.mouse.move(1, 1)
        await page.wait_for_selector("#moment:has-text('(latest)')")
        await page.focus(".chart >> nth=1")
        await page.keyboard.press("ArrowLeft")
        await page.keyboard.press("ArrowLeft")
        assert f"At {utc(series.times[-2]):%H:%M:%S} UTC" == await page.inner_text("#moment")
        assert page.complaints == []


CURSORS = """() => [...document.querySelectorAll(".u-over")].map((over) => {
    const line = over.querySelector(".u-cursor-x").getBoundingClientRect();
    const box = over.getBoundingClientRect();
    return (line.left - box.left) / box.width;
})"""
"""Where the cursor of each chart is, as a share of its width."""


def moment_of(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


TILES = """() => [...document.querySelectorAll(".card .value")].map((one) => {
    const range = document.createRange();
    range.selectNodeContents(one);
    const text = range.getBoundingClientRect();
    const card = one.closest(".card").getBoundingClientRect();
    return [range.getClientRects().length, text.left - card.left, card.right - text.right];
})"""
"""Of each number on a tile: its lines, and its distances from the edges of the tile."""


@pytest.mark.parametrize("width", [360, 700, 1400])
async def test_no_number_wraps_or_touches_its_edge_and_the_links_are_one_row(
    internet: FakeInternet, browsing: Browse, width: int
) -> None:
    size = {"width": width, "height": 800}
    async with furnished(internet) as shop, browsing(viewport=size) as page:
        point = shop.service.operators.series.rates()
        point |= {"allow": 1234567.8, "deny": 98765432.1, "defer": 1e12}
        shop.service.leases.ended["expired"] = 10**9
        await page.goto(f"{shop.base}/ui/")
        for lines, left, right in await page.evaluate(TILES):
            assert lines == 1
            assert min(left, right) >= 12
        for path in ("", "config"):
            await page.goto(f"{shop.base}/ui/{path}")
            links = page.locator("header li a")
            boxes = [await one.bounding_box() for one in await links.all()]
            assert len({box["y"] for box in boxes}) == 1
            here = await page.locator("header [aria-current]").bounding_box()
            assert (here["x"] >= 0, here["x"] + here["width"] <= width) == (True, True)
            assert await page.evaluate(FITS)


async def test_a_table_shows_at_which_edge_it_goes_on(
    internet: FakeInternet, browsing: Browse
) -> None:
    """By the shadow there, which a cover hides at the end of the table."""

    async def shaded(page: Any) -> tuple[bool, bool]:
        """Whether the left and the right edge look other than the middle, above the texts."""
        box = await page.locator(".scroll").bounding_box()
        left, middle, right = [
            await page.screenshot(clip={"x": x, "y": box["y"] + 8, "width": 2, "height": 2})
            for x in (box["x"] + 5, box["x"] + box["width"] // 2, box["x"] + box["width"] - 7)
        ]
        return left != middle, right != middle

    size = {"width": 360, "height": 800}
    async with furnished(internet) as shop, browsing(viewport=size) as page:
        await page.goto(f"{shop.base}/ui/hosts")
        assert await shaded(page) == (False, True)
        await page.evaluate("document.querySelector('.scroll').scrollLeft = 1e6")
        assert await shaded(page) == (True, False)
        await page.set_viewport_size({"width": 1400, "height": 800})
        assert await shaded(page) == (False, False)


async def test_no_page_violates_its_content_security_policy(
    internet: FakeInternet, browsing: Browse
) -> None:
    """No script, style or request is refused, without the exemption that axe needs."""
    async with furnished(internet) as shop, browsing() as page:
        for path in PAGES:
            await page.goto(f"{shop.base}/ui/{path}")
            if path == "":
                await page.wait_for_selector(".uplot canvas")
            if path == "live":
                await page.wait_for_selector("#live-state:text-is('Live.')")
        assert page.complaints == []


async def test_the_pages_show_their_data_without_javascript(
    internet: FakeInternet, browsing: Browse
) -> None:
    async with furnished(internet) as shop, browsing(java_script_enabled=False) as page:
        await page.goto(f"{shop.base}/")
        assert page.url == f"{shop.base}/ui/"
        assert "2 blocked" in await page.inner_text("main")
        assert "429, Retry-After 900" in await page.inner_text(".look li:has-text('images.test')")
        assert await page.is_hidden("#charts")
        await page.click("text=down.test")
        assert "has refused requests before" in await page.inner_text("main")
        await page.goto(f"{shop.base}/ui/hosts")
        await page.click("text=shop.test")
        assert "crawl-delay 2 s" in await page.inner_text("main")
        await page.click("summary:has-text('Pause')")
        await page.click("text=Pause now")
        assert "paused until it is resumed: operator" in await page.inner_text("main .lead")


async def test_every_control_can_be_reached_by_the_keyboard(
    internet: FakeInternet, browsing: Browse
) -> None:
    async with furnished(internet) as shop, browsing() as page:
        await page.goto(f"{shop.base}/ui/hosts/shop.test")
        await page.keyboard.press("Tab")
        assert await page.evaluate("document.activeElement.className") == "skip"
        await page.keyboard.press("Enter")
        wanted = "document.activeElement.closest('#action-pause summary') !== null"
        for _ in range(40):
            await page.keyboard.press("Tab")
            outline = await page.evaluate("getComputedStyle(document.activeElement).outlineWidth")
            assert outline == "3px"
            if await page.evaluate(wanted):
                break
        assert await page.evaluate(wanted)
        await page.keyboard.press("Enter")
        await page.keyboard.press("Tab")
        await page.keyboard.press("Enter")
        await page.wait_for_selector("#main .badge:has-text('paused')")
        assert is_paused(shop.service.gate.parts.scheduler, "shop.test")


async def test_a_page_updates_itself_and_keeps_open_forms(
    internet: FakeInternet, browsing: Browse
) -> None:
    async with furnished(internet) as shop, browsing() as page:
        await page.clock.install()
        await page.goto(f"{shop.base}/ui/hosts/shop.test")
        await page.click("summary:has-text('Block')")
        await page.fill("#action-block input[name=seconds]", "77")
        (lease,) = shop.service.leases
        shop.service.leases.drop(lease.id)
        await page.clock.fast_forward(REFRESH)
        await page.wait_for_selector(f"#lease-{lease.id}", state="detached")
        assert await page.input_value("#action-block input[name=seconds]") == "77"
        assert await page.evaluate("document.getElementById('action-block').open")
        assert page.complaints == []


async def test_what_if_answers_as_you_type_and_stores_nothing(
    internet: FakeInternet, browsing: Browse
) -> None:
    async with furnished(internet) as shop, browsing() as page:
        await page.goto(f"{shop.base}/ui/explain?url=http://shop.test/cart")
        await page.click("text=Try another text")
        await page.fill("#what-if", "User-agent: *\nAllow: /cart\n")
        await page.wait_for_selector("#story .lead .badge.ok")
        assert await page.input_value("#what-if") == "User-agent: *\nAllow: /cart\n"
        assert not await shop.gate.allowed("http://shop.test/cart")


async def test_many_hosts_and_many_events_cost_a_browser_little(
    internet: FakeInternet, browsing: Browse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of hosts and of decisions: 200 rows, and constant memory.

    `python -m benchmarks browser` does the same for five minutes.
    """
    monkeypatch.setattr(operators, "TICK", 0.02)
    async with furnished(internet) as shop, browsing() as page:
        scopes, changes = shop.service.gate.parts.scheduler.watch()
        plain = ScopeSettings()
        for n in range(MANY):
            scopes[f"h{n:05d}.test"] = Scope(f"h{n:05d}.test", plain)  # type: ignore[index]
            changes.append(scopes[f"h{n:05d}.test"])
        while shop.service.operators.hosts.pending:  # else a page would only show them after 3 s
            shop.service.operators.hosts.follow()
            await asyncio.sleep(0)
        await page.goto(f"{shop.base}/ui/hosts?per_page=200&sort=-next")
        await page.wait_for_selector(f"text={MANY + 8:,} hosts")
        assert await page.locator("tbody tr").count() == 200

        await page.goto(f"{shop.base}/ui/live")
        await page.wait_for_selector("#live-state:text-is('Live.')")
        feed, number = shop.service.operators.feed, 0

        async def flood(count: int) -> float:
            """Add decisions as fast as the stream looks for them. Return the page's memory."""
            nonlocal number
            for _ in range(count // 200):
                for _ in range(200):
                    number += 1
                    url = f"https://a.test/{number}/{'x' * 100}"
                    feed.add(
                        Decision(
                            verdict=Verdict.ALLOW,
                            reason=Reason.RULE,
                            url=url,
                            origin="https://a.test",
                            user_agent="bot",
                        ),
                        "r",
                        "local",
                    )
                told = shop.service.operators.events_sent + shop.service.operators.streams.total()
                await until(lambda told=told: shop.service.operators.events_sent >= told)
            await page.wait_for_selector(f"#decisions tr:first-child:has-text('/{number}/')")
            await page.evaluate("gc()")
            used: float = await page.evaluate("performance.memory.usedJSHeapSize")
            return used

        before = await flood(2_000)
        after = await flood(8_000 if LONG else 4_000)
        assert await page.locator("#decisions tr").count() <= 200
        assert after < before + 1_000_000
        assert page.complaints == []


async def test_a_page_reconnects_after_a_restart_of_the_sidecar(
    internet: FakeInternet, browsing: Browse
) -> None:
    async with browsing() as page:
        async with furnished(internet) as shop:
            port = shop.port
            await page.clock.install()
            await page.goto(f"{shop.base}/ui/hosts")
        await page.clock.fast_forward(REFRESH)
        await page.wait_for_selector("#stale:not([hidden])")
        assert "stale" in await page.inner_text("#stale")
        async with demo(internet, port=port):
            await page.clock.fast_forward(REFRESH)
            await page.wait_for_selector("#stale", state="hidden")
            await page.wait_for_selector("text=No hosts yet.")


async def test_the_live_stream_reconnects_after_a_restart_of_the_sidecar(
    internet: FakeInternet, browsing: Browse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operators, "RETRY", 0.2)
    async with browsing() as page:
        async with furnished(internet) as shop:
            port = shop.port
            await page.goto(f"{shop.base}/ui/live")
            await page.wait_for_selector("#live-state:text-is('Live.')")
        await page.wait_for_selector("#stale:not([hidden])")
        async with demo(internet, port=port) as again:
            await page.wait_for_selector("#stale", state="hidden")
            internet.site("http://b.test").robots("")
            async with again.session.get(again.base + "/v1/check?url=http://b.test/x") as answer:
                await answer.read()
            await page.wait_for_selector("#decisions >> text=http://b.test/x")


async def test_a_page_that_may_have_no_stream_says_why(
    internet: FakeInternet, browsing: Browse
) -> None:
    async with furnished(internet) as shop, browsing() as page:
        shop.service.operators.streams["127.0.0.1"] = 32
        await page.clock.install()
        await page.goto(f"{shop.base}/ui/live")
        await page.wait_for_selector("#stale:has-text('32 streams are open')")
        shop.service.operators.streams.clear()
        await page.clock.fast_forward(5_100)
        await page.wait_for_selector("#live-state:text-is('Live.')")
        await page.wait_for_selector("#stale", state="hidden")


async def test_a_paused_stream_goes_on_where_it_was(
    internet: FakeInternet, browsing: Browse
) -> None:
    async with furnished(internet) as shop, browsing() as page:
        await page.goto(f"{shop.base}/ui/live")
        await page.wait_for_selector("#live-state:text-is('Live.')")
        await page.click("#pause")
        async with shop.session.get(
            shop.base + "/v1/check?url=http://shop.test/cart/meanwhile"
        ) as answer:
            await answer.read()
        await page.click("#pause")
        row = page.locator("#decisions tr", has_text="/cart/meanwhile").first
        await row.wait_for()
        await row.locator("a").click()
        await page.wait_for_selector("#story .badge.bad:has-text('deny')")


async def test_pages_work_under_the_prefix_of_a_proxy(
    internet: FakeInternet, browsing: Browse
) -> None:
    tokens = Tokens((Token(b"a" * 32, "olga", frozenset({Role.ADMIN, Role.CHECK})),))
    async with (
        furnished_with_tokens(internet, tokens) as shop,
        proxy(shop, "/tools/gate") as base,
        browsing() as page,
    ):
        await page.goto(f"{base}/tools/gate/")
        await page.wait_for_url(f"{base}/tools/gate/ui/sign-in?next=")
        await page.fill("input[name=token]", "a" * 32)
        await page.click("button:has-text('Sign in')")
        await page.wait_for_url(f"{base}/tools/gate/ui/")
        await page.wait_for_selector(".uplot canvas")
        await page.click("nav >> text=Hosts")
        await page.click("text=shop.test")
        assert page.url == f"{base}/tools/gate/ui/hosts/shop.test"
        await page.click("summary:has-text('Pause')")
        await page.click("text=Pause now")
        await page.wait_for_selector("#main .badge:has-text('paused')")
        await page.click("nav >> text=Live")
        await page.wait_for_selector("#live-state:text-is('Live.')")
        await page.click("text=Sign out")
        await page.wait_for_url(f"{base}/tools/gate/ui/sign-in")
        assert page.complaints == []


@asynccontextmanager
async def furnished_with_tokens(internet: FakeInternet, tokens: Tokens) -> AsyncIterator[Demo]:
    async with demo(internet, tokens=tokens) as shop:
        internet.site("http://shop.test").robots("")
        await shop.gate.check("http://shop.test/")
        await shop.gate.resume("shop.test")
        yield shop


@asynccontextmanager
async def proxy(shop: Demo, prefix: str) -> AsyncIterator[str]:
    """Run a proxy that strips a prefix, as an operator's would."""

    async def forward(request: web.BaseRequest) -> web.StreamResponse:
        path = request.raw_path.removeprefix(prefix)
        async with shop.session.request(
            request.method,
            shop.base + path,
            data=await request.read(),
            headers={**request.headers},
            allow_redirects=False,
        ) as answer:
            response = web.StreamResponse(status=answer.status)
            for name, value in answer.headers.items():
                if name not in ("Transfer-Encoding", "Content-Length"):
                    response.headers.add(name, value)
            await response.prepare(request)
            try:
                async for part in answer.content.iter_any():
                    await response.write(part)
            except (ConnectionError, aiohttp.ClientError):
                pass
            return response

    runner = web.ServerRunner(web.Server(forward), shutdown_timeout=0.2)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
