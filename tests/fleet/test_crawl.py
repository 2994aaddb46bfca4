"""Processes, a store that dies and forgets, a member that is killed: judged by the sites' logs.

The long form, with everything that breaks: `python -m tests.fleet.crawl --seconds 60 --members 8`.
"""

from __future__ import annotations

import pytest

from tests.fleet.crawl import crawl
from tests.fleet.server import BINARY


@pytest.mark.timeout(180)
@pytest.mark.skipif(BINARY is None, reason="no redis-server here")
async def test_two_processes_keep_one_pace_whatever_happens_to_their_store() -> None:
    sites, _ = await crawl(
        seconds=10.0,
        members=2,
        hosts=6,
        seed=3,
        what=("kill the store", "flushall"),
        when_lost="wait",
    )
    assert not sites.violations()
    assert sites.visits > 0


@pytest.mark.timeout(180)
@pytest.mark.skipif(BINARY is None, reason="no redis-server here")
async def test_each_robots_txt_is_fetched_once_by_all_together() -> None:
    sites, _ = await crawl(
        seconds=3.0, members=3, hosts=6, seed=4, what=("script flush",), when_lost="wait"
    )
    assert not sites.violations()
    files = {
        name: sum(visit.path == "/robots.txt" for visit in log) for name, log in sites.log.items()
    }
    assert files
    assert set(files.values()) == {1}
