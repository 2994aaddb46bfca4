"""kill -9 at any moment: each lease that was granted has its line, and the chain holds."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import aiohttp
import pytest

from tests.audit.conftest import chains_of
from tests.effort import LONG
from tests.internet import FakeInternet
from tests.processes import PYTHON
from tests.sidecar.conftest import Sidecar, Start, start
from tests.waiting_support import until

__all__ = ["start"]

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")

ROUNDS = 50 if LONG else 6


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[str]]:
    """A process that forks the processes to be killed, so that Python starts only once."""
    with subprocess.Popen(
        [PYTHON, Path(__file__).with_name("victim.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def test_no_lease_is_without_its_line_after_kill_9_at_any_moment(
    tmp_path: Path, victim: subprocess.Popen[str]
) -> None:
    assert victim.stdin is not None
    assert victim.stdout is not None
    rng = random.Random(9309)
    for number in range(ROUNDS):
        folder = tmp_path / str(number // 10)  # a start names the chains of earlier rounds
        before = chains_of(folder) if folder.exists() else {}
        victim.stdin.write(f"{folder} {number}\n")
        victim.stdin.flush()
        pid = int(victim.stdout.readline().split()[1])
        granted = [victim.stdout.readline().strip()]
        time.sleep(rng.random() * 0.03)
        os.kill(pid, signal.SIGKILL)
        while (line := victim.stdout.readline().strip()) != "dead":
            granted.append(line)
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
