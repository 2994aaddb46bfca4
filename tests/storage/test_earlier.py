"""State files of earlier versions: every clock, block, lease and text is found.

Gatekeepers of commits 8c6832e (schema 3) and f654cde (schema 7, the last one that wrote a clock's
interval as the start of its reason) made them, closed in order and ended by kill -9. The program,
`tests/storage/data/make.py`, is in the history.
"""

from __future__ import annotations

import random
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gatekeeper.clock import VirtualClock
from gatekeeper.config import Config
from gatekeeper.fetching.cache import RecordCache
from gatekeeper.fetching.faults import LocalFaults
from gatekeeper.fetching.records import Record, from_stored
from gatekeeper.sidecar.held_leases import LeaseJournal
from gatekeeper.storage import SqliteStorage
from tests.pacing_support import due_at, is_paused, scheduler_on

DATA = Path(__file__).with_name("data")
WALL = 1_790_000_000.0
TEXT = b"User-agent: *\nDisallow: /private\nCrawl-delay: 8\n"


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(start=77.0, wall=WALL + 5.0)


@pytest.fixture(params=["closed", "killed"])
def ended(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[3, 7])
def state(request: pytest.FixtureRequest, ended: str, tmp_path: Path) -> Path:
    path = tmp_path / ended / "state.db"
    path.parent.mkdir()
    with tarfile.open(DATA / f"schema-{request.param}.tar.gz") as archive:
        # Not extractall: its filter came with Python 3.11.4, and later versions warn without it.
        for member in archive:
            content = archive.extractfile(member)
            if content is not None and Path(member.name).parent.name == ended:
                (path.parent / Path(member.name).name).write_bytes(content.read())
    assert path.exists()
    return path


@pytest.fixture
async def storage(state: Path, clock: VirtualClock) -> AsyncIterator[SqliteStorage]:
    async with SqliteStorage(state, clock=clock) as opened:
        yield opened


async def test_every_clock_and_block_is_found(
    storage: SqliteStorage, clock: VirtualClock, state: Path
) -> None:
    scheduler = scheduler_on(clock, storage=storage)
    await scheduler.open()
    now = clock.monotonic()
    names = ("slow.test", "late.test", "blocked.test")
    due = {name: due_at(scheduler, name) - now for name in names}
    assert due == pytest.approx({"slow.test": 3.0, "late.test": 15.0, "blocked.test": 595.0})
    blocked = scheduler.blocked("blocked.test")
    assert blocked is not None
    assert blocked[1] == "429, Retry-After 600"
    assert is_paused(scheduler, "paused.test")
    await scheduler.close()


async def test_every_text_and_pause_is_found(storage: SqliteStorage, clock: VirtualClock) -> None:
    config = Config()
    cache = RecordCache(config, stored=True)
    faults = LocalFaults(random.Random(1), lambda _on: None)

    async def record(origin: str) -> Record:
        stored = await storage.load_origin(origin)
        assert stored is not None
        found = from_stored(
            stored, config=config, clock=clock, texts=cache.texts, uptime=faults.uptime
        )
        assert found is not None
        return found

    slow = await record("http://slow.test")
    assert slow.text is not None
    assert slow.text.body() == TEXT
    assert slow.expires - clock.monotonic() == pytest.approx(86_395.0)
    down = await record("http://down.test")
    assert (down.reachable, down.step) == (False, 2)
    assert down.expires - clock.monotonic() == pytest.approx(235.0)
    assert down.text is not None
    entries = await storage.history("http://slow.test")
    assert await storage.body(entries[0].body_hash) == TEXT


def test_every_open_lease_is_found(state: Path, clock: VirtualClock) -> None:
    book = LeaseJournal(Path(f"{state}-leases"), clock=clock)
    book.close()
    ((lease),) = book.left_over
    assert (lease.id, lease.url, lease.agent) == ("open-lease", "http://slow.test/a", "Other/1.0")
    assert lease.remaining(clock) == pytest.approx(55.0)
