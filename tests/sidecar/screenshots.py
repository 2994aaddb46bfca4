"""The screenshots of docs/operating.md: `python -m tests.sidecar.screenshots`."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from tests.internet import FakeInternet
from tests.sidecar.demo import demo, furnish, waiter

PLACE = Path(__file__).parents[2] / "docs" / "pages"
PAGES = {
    "overview": "",
    "host": "hosts/shop.test",
    "explain": "explain?url=http://shop.test/products/private/2",
}


async def main() -> None:
    from playwright.async_api import async_playwright

    with tempfile.TemporaryDirectory() as state:
        async with (
            FakeInternet() as internet,
            demo(internet, storage=f"{state}/state") as shop,
            async_playwright() as playwright,
        ):
            await furnish(shop)
            waiting = [waiter(shop), waiter(shop, "products/3")]
            browser = await playwright.chromium.launch(executable_path="/usr/bin/chromium")
            page = await browser.new_page(viewport={"width": 1280, "height": 800})
            for name, path in PAGES.items():
                await page.goto(f"{shop.base}/ui/{path}")
                if not path:
                    await page.wait_for_selector(".uplot canvas")
                await page.screenshot(path=PLACE / f"{name}.png", full_page=True)
            await browser.close()
            for one in waiting:
                one.cancel()
            await asyncio.wait(waiting)


if __name__ == "__main__":
    PLACE.mkdir(exist_ok=True)
    asyncio.run(main())
