"""A full disk: nothing is written, nothing is lost, and reads go on."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gatekeeper.config import StorageConfig
from gatekeeper.errors import StorageError
from gatekeeper.storage import ClockRecord, SqliteStorage, schema

SLOW = StorageConfig(flush_interval=3600.0)


class _Disk:
    """The pages that every database of this test may have; None: as many as it likes."""

    pages: int | None = None


class _OnDisk(sqlite3.Connection):
    def execute(self, sql: str, *args: Any) -> sqlite3.Cursor:
        if sql.startswith("BEGIN"):
            super().execute(f"PRAGMA max_page_count = {_Disk.pages or 2**31}")
        return super().execute(sql, *args)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[_Disk]]:
    connect = sqlite3.connect
    monkeypatch.setattr(
        schema.sqlite3, "connect", lambda *a, **kw: connect(*a, factory=_OnDisk, **kw)
    )
    yield _Disk
    _Disk.pages = None


async def test_what_did_not_fit_is_written_when_there_is_space(
    path: Path, made: Any, disk: type[_Disk]
) -> None:
    async with SqliteStorage(path, config=SLOW) as storage:
        storage.put_origin(made("https://before.example"))
        await storage.flush()
        disk.pages = 1
        for n in range(300):
            storage.put_origin(made(f"https://{n}.example", b"#%d" % n))
        with pytest.raises(StorageError, match=r"state\.db: .*full.*make space"):
            await storage.flush()
        stats = storage.stats()
        assert (stats.failed_batches, stats.pending, stats.dropped) == (1, 300, 0)
        assert stats.last_error == "database or disk is full"
        assert await storage.load_origin("https://before.example") is not None
        assert await storage.load_origin("https://7.example") is not None
        disk.pages = None
        await storage.flush()
        assert storage.stats().pending == 0
        assert storage.stats().last_error is None
    async with SqliteStorage(path) as storage:
        assert await storage.load_origin("https://299.example") is not None


async def test_the_last_write_failing_leaves_the_promises_in_the_journal(
    path: Path, made: Any, disk: type[_Disk], caplog: pytest.LogCaptureFixture
) -> None:
    async with SqliteStorage(path, config=SLOW) as storage:
        disk.pages = 1
        for n in range(1000):
            storage.promise(ClockRecord(scope=f"{n}.example", next_at=float(n)))
    assert "nothing can be written" in caplog.text
    disk.pages = None
    async with SqliteStorage(path) as storage:
        assert storage.stats().replayed == 1000
        assert len(await storage.load_clocks()) == 1000


FILL = """
import asyncio, json, resource, signal, sys
from gatekeeper.config import StorageConfig
from gatekeeper.errors import StorageError
from gatekeeper.storage import ClockRecord, OriginRecord, SqliteStorage, pack_body

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

def allow(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

def record(n, at):
    body, digest = pack_body(b"#%d" % n * 100)
    return OriginRecord(origin=f"https://{n}.example", outcome="rule", state="parsed",
        fetched_at=at, soft_expires_at=0.0, expires_at=0.0, body=body, body_hash=digest)

async def main():
    seen = {}
    async with SqliteStorage(sys.argv[1], config=StorageConfig(flush_interval=3600.0)) as storage:
        storage.put_origin(record(0, 1.0))
        await storage.flush()
        allow(8192)
        for n in range(500):
            storage.put_origin(record(n, 2.0))
            storage.promise(ClockRecord(scope=f"{n}.example", next_at=float(n)))
        try:
            await storage.flush()
        except StorageError as error:
            seen["error"] = str(error)
        full = storage.stats()
        seen["failed"] = full.failed_batches
        seen["unjournaled"] = full.unjournaled
        seen["pending"] = full.pending
        seen["read"] = (await storage.load_origin("https://0.example")).fetched_at
        seen["clocks"] = len(await storage.load_clocks())
        allow(resource.RLIM_INFINITY)
        storage.promise(ClockRecord(scope="after.example", next_at=1.0))
        seen["unjournaled after"] = storage.stats().unjournaled
        await storage.flush()
        seen["pending after"] = storage.stats().pending
    print(json.dumps(seen))

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no resource limits there")
async def test_a_disk_that_refuses_every_write_is_survived(path: Path) -> None:
    """The kernel itself says no, to the database and to the journal."""
    run = subprocess.run(
        [sys.executable, "-c", FILL, path], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    seen = json.loads(run.stdout)
    assert "state.db" in seen["error"]
    assert seen["failed"] == 1
    assert 0 < seen["unjournaled"] < 500
    assert (seen["pending"], seen["read"], seen["clocks"]) == (1000, 2.0, 500)
    assert seen["unjournaled after"] == seen["unjournaled"]
    assert seen["pending after"] == 0
    async with SqliteStorage(path) as storage:
        assert len(await storage.load_clocks()) == 501
        assert await storage.load_origin("https://499.example") is not None
