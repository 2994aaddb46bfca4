"""kill -9 at any moment: each lease that was granted has its line, and the chain holds."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import aiohttp
import pytest

from tests.audit.conftest import chains_of
from tests.effort import LONG
from tests.forking import Victims
from tests.internet import FakeInternet
from tests.sidecar.conftest import Sidecar, Start, start
from tests.waiting_support import until

__all__ = ["start"]

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")

ROUNDS = 50 if LONG else 6


@pytest.fixture
def victim() -> Iterator[Victims]:
    with closing(Victims("tests.audit.victim")) as victims:
        yield victims


def test_no_lease_is_without_its_line_after_kill_9_at_any_moment(
    tmp_path: Path, victim: Victims
) -> None:
    rng = random.Random(9309)
    for number in range(ROUNDS):
        folder = tmp_path / str(number // 10)  # a start names the chains of earlier rounds
        before = chains_of(folder) if folder.exists() else {}
        victim.start(folder, number)
        granted = [victim.line()]
        time.sleep(rng.random() * 0.03)
        granted += victim.kill()
        chains = chains_of(folder)
        (lines,) = (one for name, one in chains.items() if name not in before)
        written = [line["url"] for line in lines if line["kind"] == "grant"]
        assert written[: len(granted)] == granted
        assert len(written) <= len(granted) + 1  # killed between the line and the lease
        assert {one["segment"].rsplit("-", 1)[0] for one in lines[0]["chains"]} == set(before)


async def test_no_lease_of_a_sidecar_is_without_its_line_after_kill_9(
    internet: FakeInternet, folder: Path, start: Start
) -> None:
    base = f"http://127.0.0.1:{internet.listener().port()}"
    internet.site(base.removeprefix("http://")).robots("User-agent: *\nDisallow: /private\n")
    rng = random.Random(9309)
    env = {
        "GATEKEEPER_AUDIT_FOLDER": str(folder),
        "GATEKEEPER_PACING_DEFAULT_INTERVAL": "0",
        "GATEKEEPER_PACING_CONCURRENCY": "1000",
    }
    granted: set[str] = set()
    for number in range(25 if LONG else 2):
        sidecar = await start("--storage", "memory", env=env)

        async def ask(part: int, sidecar: Sidecar = sidecar, number: int = number) -> None:
            with suppress(aiohttp.ClientError):
                for each in range(1000):
                    url = f"{base}/{number}/{part}/{each}"
                    status, said = await sidecar.post("/v1/leases", {"url": url, "wait": 60})
                    assert status == 201, said
                    granted.add(url)

        asking = [asyncio.create_task(ask(part)) for part in range(4)]
        goal = len(granted) + 20 + rng.randrange(20)
        await until(lambda goal=goal: len(granted) >= goal)
        sidecar.tell(signal.SIGKILL)
        await asyncio.gather(*asking)
        await sidecar.stopped()
    chains = chains_of(folder)
    written = [line["url"] for lines in chains.values() for line in lines if "robots" in line]
    assert granted <= set(written)
    assert max(len(lines[0]["chains"]) for lines in chains.values()) == len(chains) - 1
