"""Several processes with a store that dies and loses data: judged by the logs of the sites.

The long form, with all faults: `python -m benchmarks --only faults`.
"""

from __future__ import annotations

import random
import time

import pytest

from tests.fleet.crawl import Sites, crawling
from tests.fleet.server import BINARY


@pytest.mark.timeout(180)
@pytest.mark.skipif(BINARY is None, reason="no redis-server here")
async def test_two_processes_keep_one_pace_whatever_happens_to_their_store() -> None:
    """They also fetch each robots.txt once, until it is lost with the store."""
    sites = Sites(6, random.Random(3), delays=(0.0, 0.05, 0.3), hasty=True)

    def pages(since: float) -> int:
        return sum(one.path != "/robots.txt" for one in sites.since(since))

    async with crawling(sites, members=2, hold=1.0, long_since=True) as fleet:
        await sites.until(lambda: len(sites.log) == 6 and pages(0.0) > 6)
        back = await fleet.breaks("SCRIPT FLUSH")
        await sites.until(lambda: pages(back) > 6)
        died = time.monotonic()
        back = await fleet.breaks("kill -9 of the store, back at once")
        await sites.until(lambda: pages(back) > 6)  # the crawl continues
    assert not sites.violations()
    files = {
        name: sum(one.path == "/robots.txt" and one.arrived < died for one in log)
        for name, log in sites.log.items()
    }
    assert len(files) == 6
    assert set(files.values()) == {1}
