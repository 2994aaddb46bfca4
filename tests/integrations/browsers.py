"""Debian's chromium for the tests, connected to the fake internet."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.internet import FakeInternet

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@asynccontextmanager
async def browser(**options: Any) -> AsyncIterator[Any]:
    """A browser. Starting it takes most of a test's time, so each test does much with it."""
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        opened = await playwright.chromium.launch(executable_path=CHROMIUM, **options)
        try:
            yield opened
        finally:
            await opened.close()


async def context_of(opened: Any, internet: FakeInternet, **options: Any) -> Any:
    """A context of the browser whose plain http requests go to the fake internet for every name."""
    listener = internet.listener()
    proxy = {"server": f"http://{listener.address}:{listener.port()}"}
    return await opened.new_context(**{"proxy": proxy, "service_workers": "block", **options})
