"""The file: its contents after a restart, and its lock while it is open."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sqlite3
import stat
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from gatekeeper.clock import SystemClock, VirtualClock
from gatekeeper.config import StorageConfig
from gatekeeper.errors import StorageError
from gatekeeper.storage import ClockRecord, SqliteStorage, schema
from gatekeeper.storage.base import Pending
from gatekeeper.storage.schema import HISTORY_ROW_BYTES
from gatekeeper.storage.writer import Writer
from tests.processes import PYTHON
from tests.storage.inside import history_bytes, pending
from tests.waiting_support import until

ORIGIN = "https://a.example"
SLOW = StorageConfig(flush_interval=3600.0)


def _threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("gatekeeper-storage")]


async def test_every_record_is_there_after_a_restart(path: Path, made: Any) -> None:
    async with SqliteStorage(path, config=SLOW) as storage:
        storage.put_origin(made())
        storage.put_clock(ClockRecord(scope="a.example", next_at=1.0))
        storage.promise(ClockRecord(scope="b.example", next_at=2.0))
    async with SqliteStorage(path) as storage:
        assert await storage.load_origin(ORIGIN) == made()
        clocks = {clock.scope: clock.next_at for clock in await storage.load_clocks()}
        assert clocks == {"a.example": 1.0, "b.example": 2.0}
        (entry,) = await storage.history(ORIGIN)
        assert await storage.body(entry.body_hash) == b"User-agent: *\nDisallow: /x\n"


async def test_closing_leaves_the_database_and_its_lock_file_alone(path: Path, made: Any) -> None:
    async with SqliteStorage(path) as storage:
        storage.put_origin(made())
        storage.promise(ClockRecord(scope="b.example", next_at=2.0))
        await storage.flush()
        assert storage.load_clock_nowait("b.example") is not None
    assert sorted(p.name for p in path.parent.iterdir()) == ["state.db", "state.db.lock"]
    assert _threads() == []


async def test_the_files_of_the_storage_are_for_their_owner_alone(path: Path, made: Any) -> None:
    before = os.umask(0o022)
    try:
        async with SqliteStorage(path) as storage:
            storage.put_origin(made())
            storage.promise(ClockRecord(scope="b.example", next_at=2.0))
            await storage.flush()
            modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in path.parent.iterdir()}
    finally:
        os.umask(before)

    assert {"state.db", "state.db-wal", "state.db-shm"} < set(modes)
    assert set(modes.values()) == {0o600}


async def test_the_directory_of_the_storage_is_created(tmp_path: Path) -> None:
    async with SqliteStorage(tmp_path / "var" / "gate" / "state.db"):
        assert (tmp_path / "var" / "gate" / "state.db").exists()


async def test_a_put_is_written_without_a_flush(path: Path, made: Any) -> None:
    async with SqliteStorage(path, config=StorageConfig(flush_interval=0.01)) as storage:
        storage.put_origin(made())
        await until(lambda: pending(storage) == 0)
        with contextlib.closing(schema.connect_readonly(path)) as connection:
            assert schema.read_origin(connection, ORIGIN) is not None


async def test_a_second_storage_of_the_same_process_is_refused(path: Path) -> None:
    async with SqliteStorage(path):
        with pytest.raises(StorageError, match=r"state\.db: in use by another gatekeeper"):
            await SqliteStorage(path).open()
    async with SqliteStorage(path):
        pass


async def test_a_second_process_is_refused_and_told_whose_it_is(path: Path, made: Any) -> None:
    code = (
        "import asyncio, sys\n"
        "from gatekeeper.storage import SqliteStorage\n"
        "asyncio.run(SqliteStorage(sys.argv[1]).open())\n"
    )
    async with SqliteStorage(path) as storage:
        storage.put_origin(made())
        second = await asyncio.to_thread(
            subprocess.run, [PYTHON, "-c", code, path], capture_output=True, text=True
        )
        assert second.returncode == 1
        assert f"in use by another gatekeeper (process {os.getpid()})" in second.stderr
        await storage.flush()
        assert await storage.load_origin(ORIGIN) is not None


async def test_a_storage_can_be_opened_after_a_failed_open(path: Path) -> None:
    path.write_bytes(b"something else, and long enough to be looked at\n" * 10)
    storage = SqliteStorage(path)
    with pytest.raises(StorageError):
        await storage.open()
    assert _threads() == []
    path.unlink()
    await storage.open()
    await storage.close()


async def test_closing_twice_or_without_opening_raises_nothing(path: Path) -> None:
    storage = SqliteStorage(path)
    await storage.close()
    await storage.open()
    await asyncio.gather(storage.close(), storage.close())
    await storage.close()


async def test_a_put_before_open_or_after_close_is_refused(path: Path, made: Any) -> None:
    storage = SqliteStorage(path)
    with pytest.raises(StorageError, match="not open"):
        storage.put_origin(made())
    await storage.open()
    await storage.close()
    with pytest.raises(StorageError, match="not open"):
        storage.promise(ClockRecord(scope="a.example", next_at=1.0))
    with pytest.raises(StorageError, match="not open"):
        await storage.load_origin(ORIGIN)
    with pytest.raises(StorageError, match="not open"):
        await storage.flush()


async def test_a_cancelled_open_leaves_nothing_behind(path: Path) -> None:
    opening = asyncio.create_task(SqliteStorage(path).open())
    await asyncio.sleep(0)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert _threads() == []
    async with SqliteStorage(path):
        pass


async def test_a_cancelled_close_closes_all_the_same(path: Path, made: Any) -> None:
    storage = SqliteStorage(path, config=SLOW)
    await storage.open()
    storage.put_origin(made())
    closing = asyncio.create_task(storage.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await storage.close()
    assert _threads() == []
    async with SqliteStorage(path) as again:
        assert await again.load_origin(ORIGIN) is not None


def test_the_end_of_the_writing_thread_can_not_be_cancelled(path: Path, made: Any) -> None:
    """A loop that is closed meanwhile tried to, and the thread ended with a traceback."""
    writer = Writer(path, SLOW, SystemClock())
    writer.start().result()
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")  # holds up the last commit
        writer.put_origin(made())
        ended = writer.stop()
        assert not ended.cancel()
        other.execute("ROLLBACK")
    writer.join()
    assert ended.done()


async def test_a_cancelled_flush_does_not_cancel_other_flushes(path: Path, made: Any) -> None:
    async with SqliteStorage(path, config=SLOW) as storage:
        storage.put_origin(made())
        flush = asyncio.create_task(storage.flush())
        await asyncio.sleep(0)
        flush.cancel()
        await storage.flush()
        assert pending(storage) == 0


async def test_many_questions_at_once_are_answered(path: Path, made: Any) -> None:
    async with SqliteStorage(path) as storage:
        for n in range(200):
            storage.put_origin(made(f"https://{n}.example"))
        await storage.flush()
        found = await asyncio.gather(
            *(storage.load_origin(f"https://{n}.example") for n in range(400))
        )
        assert [record is not None for record in found] == [True] * 200 + [False] * 200


async def test_a_record_that_can_not_be_written_does_not_affect_others(
    path: Path, made: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with SqliteStorage(path, config=SLOW) as storage:
        storage.put_origin(made("https://good.example"))
        storage.put_origin(made("https://bad.example", expires_at=float("nan")))
        storage.put_origin(made("https://huge.example", status=2**70))
        storage.put_clock(ClockRecord(scope="good.example", next_at=1.0))
        storage.put_clock(ClockRecord(scope="bad.example", next_at=float("nan")))
        await storage.flush()
        assert await storage.load_origin("https://good.example") is not None
        assert await storage.load_origin("https://bad.example") is None
        assert [c.scope for c in await storage.load_clocks()] == ["good.example"]
        assert pending(storage) == 0
        assert caplog.text.count("a record was refused by the database") == 3


async def test_a_promise_with_a_reason_that_is_no_text_is_kept(path: Path) -> None:
    async with SqliteStorage(path, config=SLOW) as storage:
        storage.promise(ClockRecord(scope="a.example", next_at=1.0, block_reason="\udcff"))
        assert storage.failing is None
        await storage.flush()
        found = await storage.load_clock("a.example")
        assert found is not None
        assert found.block_reason == "\udcff"


async def test_pending_records_are_bounded_while_nothing_is_written(made: Any) -> None:
    pending = Pending(max_origins=10, max_bytes=10_000, versions=3)
    pending.put_origin(made("https://ladder.example", first_unreachable_at=1.0))
    for n in range(30):
        pending.put_origin(made(f"https://{n}.example"))
    assert len(pending) == 10
    assert "https://ladder.example" in pending.origins
    assert "https://29.example" in pending.origins


async def test_pending_records_are_bounded_in_bytes(made: Any) -> None:
    pending = Pending(max_origins=1000, max_bytes=10_000, versions=3)
    rng = random.Random(1)
    for n in range(30):
        pending.put_origin(made(f"https://{n}.example", rng.randbytes(1000)))
    assert len(pending) == 9


async def test_a_later_put_wins_over_a_batch_given_back(made: Any) -> None:
    pending = Pending(max_origins=10, max_bytes=10_000, versions=3)
    pending.put_origin(made(at=1.0, text=b"A"))
    pending.put_clock("a.example", ClockRecord(scope="a.example", next_at=1.0))
    pending.put_clock("b.example", ClockRecord(scope="b.example", next_at=1.0))
    batch = pending.drain()
    pending.put_origin(made(at=2.0, text=b"B"))
    pending.put_clock("a.example", None)
    pending.put_back(batch)
    again = pending.drain()
    assert [record.fetched_at for record in again.origins[ORIGIN]] == [1.0, 2.0]
    assert again.clocks["a.example"] is None
    assert again.clocks["b.example"] is not None


async def test_old_origins_are_forgotten_unless_a_promise_holds(path: Path, made: Any) -> None:
    day = 86_400.0
    clock = VirtualClock(wall=1000 * day)
    config = StorageConfig(flush_interval=3600.0, forget_after=90 * day)
    old, young = 900 * day, 990 * day
    async with SqliteStorage(path, config=config, clock=clock) as storage:
        storage.put_origin(made("https://old.example", at=old))
        storage.put_origin(made("https://young.example", at=young))
        storage.put_origin(made("https://used.example", at=old, last_page_ok_at=young))
        storage.put_origin(made("https://ladder.example", at=old, expires_at=1001 * day))
        storage.put_origin(made("https://clock.example:8443", at=old))
        storage.put_origin(made("http://[::1]", at=old))
        storage.put_clock(ClockRecord(scope="clock.example", next_at=1001 * day))
        storage.put_clock(ClockRecord(scope="::1", next_at=0.0, paused=True))
        storage.put_clock(ClockRecord(scope="gone.example", next_at=old))
        await storage.flush()
    async with SqliteStorage(path, config=config, clock=clock) as storage:
        storage.put_clock(ClockRecord(scope="new.example", next_at=1000 * day))
        await storage.flush()
    async with SqliteStorage(path, config=config, clock=clock) as storage:
        kept = {c.scope for c in await storage.load_clocks()}
        assert kept == {"clock.example", "::1", "new.example"}
        names = ("https://young.example", "https://used.example", "https://ladder.example")
        for origin in (*names, "https://clock.example:8443", "http://[::1]"):
            assert await storage.load_origin(origin) is not None, origin
        assert await storage.load_origin("https://old.example") is None


async def test_deletion_keeps_up_with_a_crawl_of_ever_new_hosts(
    path: Path, made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a fixed number of deleted rows an hour, the file grew for ever."""
    monkeypatch.setattr(schema, "MAX_DELETED", 10)
    hour, new_hosts = 3600.0, 50
    config = StorageConfig(flush_interval=hour, forget_after=20 * hour)
    clock = VirtualClock(wall=1e9)
    async with SqliteStorage(path, config=config, clock=clock) as storage:
        for _ in range(200):
            now = clock.wall()
            for n in range(new_hosts):
                host = f"{now:.0f}-{n}.example"
                storage.put_clock(ClockRecord(scope=host, next_at=now))
                storage.put_origin(made(f"http://{host}", at=now, expires_at=now + hour))
            await storage.flush()
            clock.advance(hour)
        with contextlib.closing(sqlite3.connect(path)) as connection:
            for table in ("clocks", "origins"):
                (rows,) = connection.execute(f"SELECT count(*) FROM {table}").fetchone()
                assert rows <= 60 * new_hosts, table


async def test_a_clock_set_years_ahead_makes_nothing_old(path: Path, made: Any) -> None:
    async with SqliteStorage(path, clock=VirtualClock(wall=4e9)) as storage:
        storage.put_origin(made(at=1e9))
    async with SqliteStorage(path) as storage:
        assert await storage.load_origin(ORIGIN) is not None


async def test_the_number_of_origins_is_bounded(path: Path, made: Any) -> None:
    config = StorageConfig(flush_interval=3600.0, max_origins=100)
    async with SqliteStorage(path, config=config, clock=VirtualClock(wall=1e6)) as storage:
        storage.put_origin(made("https://ladder.example", at=0.0, first_unreachable_at=0.0))
        for n in range(150):
            storage.put_origin(made(f"https://{n}.example", at=float(n)))
        await storage.flush()
    async with SqliteStorage(path) as storage:
        assert await storage.load_origin("https://ladder.example") is not None
        assert await storage.load_origin("https://0.example") is None
        assert await storage.load_origin("https://149.example") is not None


@pytest.mark.parametrize("seed", range(5))
async def test_every_text_of_the_history_is_referred_to_and_every_reference_has_its_text(
    path: Path, made: Any, seed: int
) -> None:
    """After any puts and deletions, every text is referred to, and every reference has its text."""
    rng = random.Random(seed)
    config = StorageConfig(flush_interval=3600.0, history_versions=3, history_bytes=6000)
    async with SqliteStorage(path, config=config, clock=VirtualClock(wall=1e6)) as storage:
        for at in range(300):
            text = rng.choice([None, b"shared %d" % rng.randrange(5), b"own %d" % at])
            storage.put_origin(made(f"https://{rng.randrange(12)}.example", text, float(at)))
            if rng.random() < 0.1:
                await storage.flush()
        await storage.flush()
        told = history_bytes(storage)
    connection = sqlite3.connect(path)

    def ask(question: str) -> Any:
        return connection.execute(question).fetchone()[0]

    held = ask("SELECT sum(length(body)) FROM blobs") + HISTORY_ROW_BYTES * ask(
        "SELECT count(*) FROM history"
    )
    assert told == held == ask("SELECT value FROM meta WHERE name = 'history_bytes'")
    assert told <= 6000
    unnamed = "SELECT count(*) FROM blobs WHERE hash NOT IN (SELECT body_hash FROM history)"
    assert ask(unnamed) == 0
    hashes = "(SELECT hash FROM blobs)"
    assert (
        ask(f"SELECT count(*) FROM history WHERE body_hash NOT IN {hashes} AND body_hash != x''")
        == 0
    )
    assert ask(f"SELECT count(*) FROM origins WHERE body_hash NOT IN {hashes}") == 0
    connection.close()


async def test_a_damaged_text_is_an_error_that_names_the_file(path: Path, made: Any) -> None:
    async with SqliteStorage(path) as storage:
        storage.put_origin(made())
    connection = sqlite3.connect(path)
    connection.execute("UPDATE blobs SET body = x'00'")
    connection.commit()
    connection.close()
    async with SqliteStorage(path) as storage:
        (entry,) = await storage.history(ORIGIN)
        with pytest.raises(StorageError, match=r"state\.db: damaged \(the text"):
            await storage.body(entry.body_hash)
