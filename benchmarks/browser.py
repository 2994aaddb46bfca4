"""The pages for operators in a browser: first paint, memory, and the cost of open pages per check.

Needs chromium and playwright. The memory of a Live page is watched for five minutes at 2,000
decisions a second and with 10,000 hosts (`--quick`: ten seconds).
"""

from __future__ import annotations

import random
import shutil
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

from benchmarks.options import Options
from benchmarks.report import Table, count, seconds
from benchmarks.sidecar import _get, _post, _Server, _server

__all__ = ["run"]

HOSTS = 10_000
RATE = 2_000
"""Decisions per second."""
BROWSERS = 5
_PAGES = ("", "hosts", "hosts?per_page=200", "explain", "live")
_PAINT = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? null"


def run(options: Options) -> list[Table]:
    """Return one table for each of the three measurements."""
    with _server("gatekeeper", "asyncio") as server, _chromium() as browser:
        _block(server, HOSTS // 20 if options.quick else HOSTS)
        return [
            _first_paint(server, browser, options.rounds(quick=5, full=10)),
            _beside_pages(server, browser, options.rounds(quick=5, full=15)),
            _memory(server, browser, 10.0 if options.quick else 300.0),
        ]


@contextmanager
def _chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    where = shutil.which("chromium") or shutil.which("chromium-browser")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=where, args=["--js-flags=--expose-gc"])
        yield browser
        browser.close()


def _block(server: _Server, hosts: int) -> None:
    """Make the sidecar know that many hosts, by blocking them."""
    body = {"seconds": 86_400}
    server.ask([_post(f"/v1/hosts/h{n}.test/block", body) for n in range(hosts)], hosts)


def _checks(server: _Server) -> list[bytes]:
    return [
        _get(f"/v1/check?url={quote(f'{origin}/page/{n}', safe='')}")
        for n, origin in enumerate(server.origins)
    ]


def _first_paint(server: _Server, browser: Any, rounds: int) -> Table:
    base, rows, figures = f"http://127.0.0.1:{server.port}", [], {}
    context = browser.new_context(viewport={"width": 1400, "height": 900})
    page = context.new_page()
    for path in _PAGES:
        taken = []
        for turn in range(rounds + 1):
            page.goto(f"{base}/ui/{path}", wait_until="load")
            while (painted := page.evaluate(_PAINT)) is None:
                page.wait_for_timeout(10)
            if turn:
                taken.append(painted / 1000)
        figures[path] = {"best": min(taken), "median": statistics.median(taken)}
        rows.append((f"/ui/{path}", seconds(min(taken)), seconds(statistics.median(taken))))
    context.close()
    return Table(
        "First paint of a page on loopback",
        ("", "best", "median"),
        rows,
        "under 100 ms",
        (f"{HOSTS:,} hosts; from the navigation to the first contentful paint, {rounds} loads.",),
        figures,
    )


def _beside_pages(server: _Server, browser: Any, rounds: int) -> Table:
    """Measure processor time per check, alternately with and without open Live pages."""
    base, checks = f"http://127.0.0.1:{server.port}", _checks(server)
    pages = [browser.new_context().new_page() for _ in range(BROWSERS)]
    taken: dict[bool, list[float]] = {True: [], False: []}
    rng = random.Random(8750)
    for turn in range(rounds + 1):
        for open_ in rng.sample((True, False), 2):
            for page in pages:
                page.goto(f"{base}/ui/live" if open_ else "about:blank")
            if open_:
                for page in pages:
                    page.wait_for_selector("#live-state:text-is('Live.')")
            spent = server.ask(checks, 4000)
            if turn:
                taken[open_].append(spent)
    for page in pages:
        page.context.close()
    each = {open_: statistics.median(values) for open_, values in taken.items()}
    pairs = zip(taken[True], taken[False], strict=True)
    ratio = statistics.median(with_ / without for with_, without in pairs)
    return Table(
        f"GET /v1/check with {BROWSERS} Live pages open",
        ("", "server time each", "each/s of one core"),
        [
            ("without pages", seconds(each[False]), f"{count(1 / each[False])}/s"),
            (f"with {BROWSERS} pages", seconds(each[True]), f"{count(1 / each[True])}/s"),
            ("ratio of pairs, median", f"{ratio:.3f}", ""),
        ],
        "at most 5 % slower",
        ("All processor time of the sidecar, that of telling the pages as well.",),
        {"without": each[False], "with": each[True], "ratio": ratio},
    )


def _memory(server: _Server, browser: Any, length: float) -> Table:
    """Measure a Live page at `RATE` decisions a second: rows, heap size, the sidecar's memory."""
    checks = _checks(server)
    context = browser.new_context()
    page = context.new_page()
    page.goto(f"http://127.0.0.1:{server.port}/ui/live")
    page.wait_for_selector("#live-state:text-is('Live.')")
    seen: list[tuple[float, int, float, int]] = []
    began, asked = time.monotonic(), 0
    looks = 10
    while (past := time.monotonic() - began) < length:
        due = int(past * RATE) - asked
        if due > 0:
            server.ask(checks, due)
            asked += due
        if past >= len(seen) * length / looks:
            page.evaluate("gc()")
            heap = page.evaluate("performance.memory.usedJSHeapSize")
            rows = page.locator("#decisions tr").count()
            seen.append((past, rows, heap, _resident(server)))
        else:
            page.wait_for_timeout(50)
    told = page.inner_text("#dropped")
    context.close()
    return Table(
        f"A Live page for {length:.0f} s at {asked / length:,.0f} decisions a second",
        ("after", "rows", "heap of the page", "resident memory of the sidecar"),
        [
            (f"{at:.0f} s", str(rows), f"{heap / 1e6:.2f} MB", f"{held / 1e6:.1f} MB")
            for at, rows, heap, held in seen
        ],
        "200 rows at most; flat",
        (f"{HOSTS:,} hosts. The page says: {told or 'nothing was dropped'}.",),
        {"looks": seen, "asked": asked},
    )


def _resident(server: _Server) -> int:
    with open(f"/proc/{server._pids[0]}/smaps_rollup", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Rss:"))
