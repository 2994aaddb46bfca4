"""The records of a fleet's members, compared with the sites' own logs."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from tests.audit.conftest import chains_of
from tests.fleet.crawl import Sites, crawling
from tests.fleet.server import BINARY


@pytest.mark.timeout(180)
@pytest.mark.skipif(BINARY is None, reason="no redis-server here")
async def test_what_three_members_write_agrees_with_the_sites_request_by_request(
    folder: Path,
) -> None:
    """One of them is killed, and another one takes its place."""
    sites = Sites(6, random.Random(3), delays=(0.0, 0.05, 0.3), hasty=True)
    async with crawling(sites, members=3, hold=1.0, long_since=True, audit=folder) as fleet:
        for chains, fault in ((3, "kill -9 of a member, and a new one"), (4, "SCRIPT FLUSH")):
            since = sites.visits
            await sites.until(lambda chains=chains: len(list(folder.glob("*.jsonl"))) == chains)
            await sites.until(lambda since=since: sites.visits > since + 12)
            await fleet.breaks(fault)
        since = sites.visits
        await sites.until(lambda: sites.visits > since + 12)
    written = chains_of(folder)
    assert len(written) == 4
    lines = [line for chain in written.values() for line in chain]
    logs = [(f"http://{name}:{sites.port}", log) for name, log in sites.log.items()]
    seen = Counter(base + visit.path for base, log in logs for visit in log)
    granted = Counter(line["url"] for line in lines if line["kind"] == "grant")
    assert not seen - granted
    # The members were killed: a request that was granted last may not have been sent.
    whole: Counter[str] = Counter()
    for chain in written.values():
        answered = {line["lease"] for line in chain if line["kind"] == "outcome" and line["status"]}
        grants = [line for line in chain if line["kind"] == "grant"]
        whole.update(line["url"] for line in grants if line["lease"] in answered)
    assert not whole - seen
    assert {line["source"] for line in lines if line["kind"] == "robots"} == {"network", "fleet"}
