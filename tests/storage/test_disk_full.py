"""A full or failing disk: promises are refused, nothing is lost, reads continue."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import errno
import itertools
import json
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gatekeeper.config import StorageConfig
from gatekeeper.errors import StorageError
from gatekeeper.storage import ClockRecord, SqliteStorage, journal, schema, writer
from gatekeeper.storage.base import DiskFull
from tests.processes import PYTHON
from tests.storage.inside import journal_error, journal_of, journaled, pending

SLOW = StorageConfig(flush_interval=3600.0)


class _Disk:
    """The maximum number of pages of every database of the test; None: unlimited."""

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


async def test_records_refused_by_a_full_disk_are_written_when_there_is_space(
    path: Path, made: Any, disk: type[_Disk], caplog: pytest.LogCaptureFixture
) -> None:
    async with SqliteStorage(path, config=SLOW) as storage:
        storage.put_origin(made("https://before.example"))
        await storage.flush()
        disk.pages = 1
        for n in range(300):
            storage.put_origin(made(f"https://{n}.example", b"#%d" % n))
        with pytest.raises(StorageError, match=r"state\.db: .*full.*make space"):
            await storage.flush()
        assert pending(storage) == 300
        assert caplog.text.count("nothing can be written, retried later") == 1
        assert await storage.load_origin("https://before.example") is not None
        assert await storage.load_origin("https://7.example") is not None
        disk.pages = None
        await storage.flush()
        assert "state.db: it can be written again" in caplog.text
        assert pending(storage) == 0
    async with SqliteStorage(path) as storage:
        assert await storage.load_origin("https://299.example") is not None


async def test_a_failed_last_write_leaves_the_promises_in_the_journal(
    path: Path, made: Any, disk: type[_Disk], caplog: pytest.LogCaptureFixture
) -> None:
    async with SqliteStorage(path, config=SLOW) as storage:
        disk.pages = 1
        for n in range(1000):
            storage.promise(ClockRecord(scope=f"{n}.example", next_at=float(n)))
    assert "nothing can be written" in caplog.text
    disk.pages = None
    async with SqliteStorage(path) as storage:
        assert len(await storage.load_clocks()) == 1000


FILL = """
import asyncio, json, resource, signal, sys
from pathlib import Path
from gatekeeper.config import StorageConfig
from gatekeeper.errors import StorageError
from gatekeeper.storage import ClockRecord, OriginRecord, SqliteStorage, pack_body
from tests.storage.inside import journal_error, journaled, pending

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

def allow(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

def record(n, at):
    body, digest = pack_body(b"#%d" % n * 100)
    return OriginRecord(origin=f"https://{n}.example", outcome="rule", state="parsed",
        fetched_at=at, soft_expires_at=0.0, expires_at=0.0, body=body, body_hash=digest)

async def main():
    seen = {}
    config = StorageConfig(flush_interval=3600.0, on_failure=sys.argv[2])
    async with SqliteStorage(sys.argv[1], config=config) as storage:
        storage.put_origin(record(0, 1.0))
        await storage.flush()
        allow(8192)
        refused = 0
        for n in range(500):
            storage.put_origin(record(n, 2.0))
            try:
                storage.promise(ClockRecord(scope=f"{n}.example", next_at=float(n)))
            except StorageError:
                refused += 1
        seen["refused"] = refused
        seen["failing"] = storage.failing
        try:
            await storage.flush()
        except StorageError as error:
            seen["error"] = str(error)
        seen["unjournaled"] = 500 - len(journaled(Path(sys.argv[1])))
        seen["pending"] = pending(storage)
        seen["read"] = (await storage.load_origin("https://0.example")).fetched_at
        seen["clocks"] = len(await storage.load_clocks())
        allow(resource.RLIM_INFINITY)
        storage.promise(ClockRecord(scope="after.example", next_at=1.0))
        seen["after"] = "after.example" in {one.scope for one in journaled(Path(sys.argv[1]))}
        await storage.flush()
        seen["failing after"] = journal_error(storage)
        seen["pending after"] = pending(storage)
    print(json.dumps(seen))

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no resource limits there")
@pytest.mark.parametrize("on_failure", ["refuse", "continue"])
async def test_a_disk_that_refuses_every_write_is_survived(path: Path, on_failure: str) -> None:
    """The kernel refuses the writes of the database and of the journal."""
    run = subprocess.run(
        [PYTHON, "-c", FILL, path, on_failure], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    seen = json.loads(run.stdout)
    assert "state.db" in seen["error"]
    assert 0 < seen["unjournaled"] < 500
    refuses = on_failure == "refuse"
    assert seen["refused"] == (seen["unjournaled"] if refuses else 0)
    assert (seen["failing"] is not None) is refuses
    assert seen["failing after"] is None
    assert (seen["pending"], seen["read"], seen["clocks"]) == (1000, 2.0, 500)
    assert seen["after"]
    assert seen["pending after"] == 0
    async with SqliteStorage(path) as storage:
        assert len(await storage.load_clocks()) == 501
        assert await storage.load_origin("https://499.example") is not None


OPEN = """
import asyncio, resource, signal, sys
from gatekeeper.config import StorageConfig
from gatekeeper.errors import StorageError
from gatekeeper.storage import SqliteStorage

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

async def main():
    async with SqliteStorage(sys.argv[1]):
        pass
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    try:
        await SqliteStorage(sys.argv[1], config=StorageConfig(on_failure="continue")).open()
    except StorageError as error:
        print(error)

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no resource limits there")
def test_a_start_on_a_full_disk_ends_with_one_line(path: Path) -> None:
    run = subprocess.run([PYTHON, "-c", OPEN, path], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith(f"{path}: ")
    assert run.stdout.endswith("; make space there, or look at the disk, to start\n")
    assert run.stdout.count("\n") == 1


BEGIN = """
import asyncio, resource, sys
from gatekeeper.errors import StorageError
from gatekeeper.storage import ClockRecord, SqliteStorage, writer

writer.REPAIR_SECONDS = 0.02

async def refused(of, *what):
    try:
        found = of(*what)
        await found if asyncio.iscoroutine(found) else None
    except StorageError as error:
        return str(error)

async def main():
    path, earlier = sys.argv[1], sys.argv[2] == "True"
    if earlier:
        async with SqliteStorage(path) as storage:
            storage.put_clock(ClockRecord(scope="kept.example", next_at=5.0))
            storage.promise(ClockRecord(scope="both.example", next_at=5.0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    async with SqliteStorage(path) as storage:
        assert path in storage.failing
        assert path in await refused(storage.load_clocks)
        assert path in await refused(storage.load_clock_nowait, "kept.example")
        assert await refused(storage.flush)
        assert await refused(storage.promise, ClockRecord(scope="both.example", next_at=6.0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        async with asyncio.timeout(30.0):
            while storage.failing:
                await asyncio.sleep(0.01)
        storage.promise(ClockRecord(scope="later.example", next_at=7.0))
        print({record.scope: record.next_at for record in await storage.load_clocks()})
    async with SqliteStorage(path) as storage:
        print({record.scope: record.next_at for record in await storage.load_clocks()})

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no resource limits there")
@pytest.mark.parametrize("earlier", [True, False])
def test_a_start_on_a_full_disk_refuses_until_there_is_room(path: Path, earlier: bool) -> None:
    run = subprocess.run(
        [PYTHON, "-c", BEGIN, path, str(earlier)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    expected = {"both.example": 6.0, "later.example": 7.0}
    if earlier:
        expected["kept.example"] = 5.0
    assert [ast.literal_eval(line) for line in run.stdout.splitlines()] == [expected] * 2


@pytest.mark.parametrize("refuses", [True, False])
async def test_a_start_where_no_journal_can_begin_waits_for_room(
    path: Path, refuses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill -9 on a full disk leaves this state: a database without a transaction to roll back."""
    config = StorageConfig(on_failure="refuse" if refuses else "continue")
    monkeypatch.setattr(writer, "REPAIR_SECONDS", 0.02)
    async with SqliteStorage(path) as storage:
        storage.promise(promised("before.example"))
    with monkeypatch.context() as patch:
        patch.setattr(journal, "preallocate", broken(errno.ENOSPC))
        storage = SqliteStorage(path, config=config)
        await storage.open()
        assert ("No space" in (storage.failing or "")) is refuses
        assert [record.scope for record in await storage.load_clocks()] == ["before.example"]
        if refuses:
            with pytest.raises(StorageError, match="No space"):
                storage.promise(promised("meanwhile.example"))
        else:
            storage.promise(promised("meanwhile.example"))
    async with asyncio.timeout(30.0):
        while storage.failing:
            await storage.flush()
    storage.promise(promised("after.example"))
    await storage.close()
    async with SqliteStorage(path) as storage:
        kept = {record.scope for record in await storage.load_clocks()}
    assert {"before.example", "after.example"} | set(
        () if refuses else ["meanwhile.example"]
    ) <= kept


async def test_a_flush_cancelled_during_a_start_on_a_full_disk_keeps_the_writer(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended the writing thread: the storage stayed unusable when there was room again."""
    prepare, attempts = schema.prepare, itertools.count()
    trying, cancelled = threading.Event(), threading.Event()

    def full_twice(path: Path) -> None:
        attempt = next(attempts)
        if attempt == 1:
            trying.set()
            cancelled.wait(30.0)
        if attempt < 2:
            raise DiskFull(f"{path}: full")
        prepare(path)

    monkeypatch.setattr(schema, "prepare", full_twice)
    monkeypatch.setattr(writer, "REPAIR_SECONDS", 0.02)
    async with SqliteStorage(path) as storage:
        await asyncio.to_thread(trying.wait, 30.0)
        flush = asyncio.create_task(storage.flush())
        await asyncio.sleep(0)
        flush.cancel()
        with pytest.raises(asyncio.CancelledError):
            await flush
        cancelled.set()
        async with asyncio.timeout(30.0):
            while storage.failing:
                with contextlib.suppress(StorageError):
                    await storage.flush()
        storage.promise(promised("later.example"))


# --- the journal ----------------------------------------------------------------------------


def broken(what: int) -> Callable[..., int]:
    def refuse(*_: object) -> int:
        raise OSError(what, os.strerror(what))

    return refuse


Break = Callable[[pytest.MonkeyPatch, SqliteStorage], None]
BREAK: dict[str, Break] = {
    **{
        name: lambda patch, _, code=code: patch.setattr(os, "pwrite", broken(code))  # type: ignore[misc]
        for name, code in {
            "full": errno.ENOSPC,
            "quota": errno.EDQUOT,
            "read-only": errno.EROFS,
            "input/output": errno.EIO,
        }.items()
    },
    "torn": lambda patch, _: patch.setattr(os, "pwrite", lambda _fd, _data, _at: 3),
    "closed": lambda _, storage: os.close(journal_of(storage)._fd),
    "fsync": lambda patch, _: patch.setattr(os, "fsync", broken(errno.EIO)),
}
JOURNAL_ONLY = StorageConfig(flush_interval=3600.0)


def promised(host: str) -> ClockRecord:
    return ClockRecord(scope=host, next_at=5.0)


async def until(done: Callable[[], bool]) -> None:
    """Wait until the condition holds, checking it after each step of the writer's thread."""
    async with asyncio.timeout(30.0):
        while True:
            Looks.step.clear()
            if done():
                return
            await Looks.step.wait()


class Looks:
    """`step` is set whenever the writer's thread has finished a task and looks for the next."""

    step: asyncio.Event


@pytest.fixture
async def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "REPAIR_SECONDS", 0.02)
    monkeypatch.setattr(writer, "SYNC_SECONDS", 0.02)
    Looks.step = asyncio.Event()
    loop, look = asyncio.get_running_loop(), writer.Writer.await_task

    def looked(self: writer.Writer) -> object:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(Looks.step.set)
        return look(self)

    monkeypatch.setattr(writer.Writer, "await_task", looked)


async def in_trouble(storage: SqliteStorage) -> None:
    """Wait until the failure is noticed: a write's immediately, an fsync's by the thread."""
    with contextlib.suppress(StorageError):
        storage.promise(promised("a.example"))
    await until(lambda: journal_error(storage) is not None)


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("how", [name for name in BREAK if name != "closed"])
async def test_while_the_journal_fails_promises_are_refused_and_accepted_afterwards(
    path: Path, how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with SqliteStorage(path, config=JOURNAL_ONLY) as storage:
        storage.promise(promised("before.example"))
        with monkeypatch.context() as disk:
            BREAK[how](disk, storage)
            await in_trouble(storage)
            for name in ("b.example", "c.example"):
                with pytest.raises(StorageError, match=r"state\.db: .*on_failure"):
                    storage.owe(promised(name))
            assert storage.failing is not None
        await until(lambda: storage.failing is None)
        storage.promise(promised("after.example"))
        assert caplog.text.count("promises can't be kept") == 1
        assert caplog.text.count("promises can be kept again") == 1
        kept = {record.scope for record in journaled(path)}
        assert kept == {f"{n}.example" for n in ("before", "a", "b", "c", "after")}


@pytest.mark.usefixtures("soon")
async def test_a_journal_is_synced_before_another_replaces_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "SYNC_SECONDS", 3600.0)
    async with SqliteStorage(path, config=JOURNAL_ONLY) as storage:
        storage.promise(promised("before.example"))
        synced: set[int] = set()
        fsync = os.fsync

        def noted(fd: int) -> None:
            fsync(fd)
            synced.add(os.fstat(fd).st_ino)

        monkeypatch.setattr(os, "fsync", noted)
        with monkeypatch.context() as disk:
            BREAK["full"](disk, storage)
            await in_trouble(storage)
        await until(lambda: storage.failing is None)
        files = list(path.parent.glob(f"{path.name}.promises-*"))
        assert len(files) == 2
        assert {file.stat().st_ino for file in files} <= synced


@pytest.mark.usefixtures("soon")
async def test_a_journal_whose_descriptor_was_closed_is_opened_again(path: Path) -> None:
    async with SqliteStorage(path, config=JOURNAL_ONLY) as storage:
        storage.promise(promised("before.example"))
        BREAK["closed"](pytest.MonkeyPatch(), storage)
        with pytest.raises(StorageError, match="descriptor"):
            storage.promise(promised("a.example"))
        await until(lambda: storage.failing is None)
        storage.promise(promised("after.example"))
        kept = {record.scope for record in journaled(path)}
        assert kept == {"before.example", "a.example", "after.example"}


@pytest.mark.usefixtures("soon")
async def test_a_journal_that_fails_for_long_leaves_few_files(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with SqliteStorage(path, config=JOURNAL_ONLY) as storage:
        with monkeypatch.context() as disk:
            begun = 0

            def fsync(_fd: int) -> None:
                nonlocal begun
                begun += 1
                raise OSError(errno.EIO, "sick")

            disk.setattr(os, "fsync", fsync)
            await in_trouble(storage)
            journal = journal_of(storage)
            await until(lambda: len(journal.retired()) >= 16)
            tried = storage._writer._tend_at
            await until(lambda: storage._writer._tend_at > tried + 0.1)
            assert len(list(path.parent.glob("*.promises-*"))) <= 17
        await storage.flush()
        assert storage.failing is None
        assert len(list(path.parent.glob("*.promises-*"))) == 1


@pytest.mark.usefixtures("soon")
async def test_with_on_failure_continue_a_full_disk_only_warns(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = StorageConfig(flush_interval=3600.0, on_failure="continue")
    async with SqliteStorage(path, config=config) as storage:
        with monkeypatch.context() as disk:
            BREAK["full"](disk, storage)
            for n in range(3):
                storage.promise(promised(f"{n}.example"))
            assert storage.failing is None
            assert journal_error(storage) is not None
            assert caplog.text.count('going on without (storage.on_failure = "continue")') == 1
        await until(lambda: journal_error(storage) is None)
        assert len(journaled(path)) == 3


async def test_while_the_database_takes_nothing_the_journal_keeps_promises_up_to_its_bound(
    path: Path, made: Any, disk: type[_Disk]
) -> None:
    config = StorageConfig(flush_interval=3600.0, journal_bytes=4000)
    async with SqliteStorage(path, config=config) as storage:
        disk.pages = 1
        for n in range(300):
            storage.put_origin(made(f"https://{n}.example", b"#%d" % n))
        storage.promise(promised("a.example"))
        with pytest.raises(StorageError, match="full"):
            await storage.flush()
        assert storage.failing is None
        with pytest.raises(StorageError, match="promises can't be kept"):
            promise_many(storage)
        assert storage.failing is not None
        disk.pages = None
        await storage.flush()
        assert storage.failing is None
        storage.promise(promised("b.example"))


def promise_many(storage: SqliteStorage) -> None:
    for n in range(1000):
        storage.promise(promised(f"{n}.example"))
