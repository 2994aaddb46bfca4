"""Files removed while in use: nothing is promised that could never be read."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gatekeeper.config import StorageConfig
from gatekeeper.errors import StorageError
from gatekeeper.storage import ClockRecord, SqliteStorage, writer
from tests.storage.inside import journaled
from tests.waiting_support import until

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="open files can't be deleted")

SLOW = StorageConfig(flush_interval=3600.0)
REMOVED = "it was removed while it was in use: put it back, or start again"


def clock(scope: str) -> ClockRecord:
    return ClockRecord(scope=scope, next_at=1.0)


def promised(path: Path) -> set[str]:
    """Return what a process started after a kill would find in the journal."""
    return {record.scope for record in journaled(path)}


async def test_a_database_that_is_removed_takes_no_promise_until_it_is_back(path: Path) -> None:
    aside = path.with_name("aside")
    async with SqliteStorage(path) as storage:
        storage.promise(clock("before.example"))
        await storage.flush()
        path.rename(aside)
        storage.put_clock(clock("meanwhile.example"))
        with pytest.raises(StorageError, match=REMOVED):
            await storage.flush()
        assert storage.failing == REMOVED
        with pytest.raises(StorageError, match=REMOVED):
            storage.promise(clock("after.example"))
        aside.rename(path)
        await storage.flush()
        assert storage.failing is None
        storage.promise(clock("back.example"))
    async with SqliteStorage(path) as storage:
        names = {record.scope for record in await storage.load_clocks()}
    assert names == {f"{when}.example" for when in ("before", "meanwhile", "after", "back")}


async def test_a_deleted_database_is_an_error_and_its_journal_is_kept(path: Path) -> None:
    storage = SqliteStorage(path)
    await storage.open()
    path.unlink()
    storage.promise(clock("a.example"))
    with pytest.raises(StorageError, match=REMOVED):
        await storage.flush()
    await storage.close()
    assert promised(path) == {"a.example"}
    async with SqliteStorage(path) as storage:  # a restart creates another one
        assert [record.scope for record in await storage.load_clocks()] == ["a.example"]


async def test_a_journal_that_was_deleted_is_written_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "SYNC_SECONDS", 0.01)
    monkeypatch.setattr(writer, "REPAIR_SECONDS", 0.01)
    async with SqliteStorage(path, config=SLOW) as storage:
        (generation,) = path.parent.glob(f"{path.name}.promises-*")
        generation.unlink()
        storage.promise(clock("a.example"))
        await until(lambda: promised(path) == {"a.example"})
        await until(lambda: storage.failing is None)
        storage.promise(clock("b.example"))
        assert promised(path) == {"a.example", "b.example"}
