"""Processes, a store that dies and forgets, a wire that drops: judged by the sites' logs.

The long form, with everything that breaks: `python -m benchmarks --only faults`.
"""

from __future__ import annotations

import random

import pytest

from tests.fleet.crawl import Sites, crawl
from tests.fleet.server import BINARY


@pytest.mark.timeout(180)
@pytest.mark.skipif(BINARY is None, reason="no redis-server here")
async def test_two_processes_keep_one_pace_whatever_happens_to_their_store() -> None:
    """And fetch each robots.txt once, before it is lost with the store."""
    sites = Sites(6, random.Random(3), delays=(0.0, 0.05, 0.3))
    faults = await crawl(
        sites,
        members=2,
        hold=1.0,
        settled=1.0,
        following=2.5,
        what=("SCRIPT FLUSH", "kill -9 of the store, no file"),
    )
    assert not sites.violations()
    assert len(sites.arrivals(faults[0].begun)) > 10
    assert sites.arrivals(faults[-1].back)  # it goes on
    first = faults[-1].begun
    files = {
        name: sum(one.path == "/robots.txt" and one.arrived < first for one in log)
        for name, log in sites.log.items()
    }
    assert files
    assert set(files.values()) == {1}
