"""Which files are opened and which are refused; refused files are not changed."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gatekeeper.errors import StorageError
from gatekeeper.storage import ClockRecord, SqliteStorage, schema
from tests.processes import PYTHON

ORIGIN = "https://a.example"


async def opened(path: Path) -> None:
    async with SqliteStorage(path):
        pass


async def refused(path: Path, match: str) -> None:
    """Check that a file is refused, in one line that names it, and is not changed."""
    before = path.read_bytes()
    with pytest.raises(StorageError, match=match) as caught:
        await opened(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert path.read_bytes() == before


async def fill(path: Path, made: Callable[..., Any], origins: int = 300) -> None:
    async with SqliteStorage(path) as storage:
        for n in range(origins):
            storage.put_origin(made(f"https://{n}.example", b"Disallow: /%d\n" % n))


def schema_3(path: Path) -> None:
    """Put a file there of the oldest schema which is still migrated; see `test_earlier.py`."""
    with tarfile.open(Path(__file__).with_name("data") / "schema-3.tar.gz") as archive:
        member = archive.extractfile("closed/state.db")
        assert member is not None
        path.write_bytes(member.read())


def test_the_columns_are_the_fields_of_the_records(path: Path) -> None:
    schema.prepare(path)
    connection = schema.connect(path)
    for table, fields in (("origins", schema.ORIGIN_COLUMNS), ("clocks", schema.CLOCK_COLUMNS)):
        found = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
        assert found == list(fields)
    connection.close()


async def test_an_empty_file_is_a_new_one(path: Path) -> None:
    path.touch()
    await opened(path)
    assert path.stat().st_size > 0


def test_a_migrated_file_has_the_schema_of_a_new_one(path: Path, tmp_path: Path) -> None:
    def columns(file: Path) -> dict[str, list[Any]]:
        connection = schema.connect(file)
        names = [r[0] for r in connection.execute("SELECT name FROM sqlite_master ORDER BY name")]
        tables = {n: connection.execute(f"PRAGMA table_info('{n}')").fetchall() for n in names}
        connection.close()
        # Without the defaults, which matter only when a column is added.
        return {n: [(*row[:4], row[5]) for row in rows] for n, rows in tables.items()}

    schema_3(path)
    new = tmp_path / "new.db"
    schema.prepare(new)
    assert columns(path) == columns(new)


async def test_a_migration_that_fails_changes_nothing(path: Path) -> None:
    schema_3(path)
    connection = sqlite3.connect(path)
    connection.execute("CREATE INDEX by_era ON clocks (era)")  # then it can't be dropped
    connection.commit()
    connection.close()
    with pytest.raises(StorageError, match="can't be migrated from schema 3"):
        await opened(path)
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA user_version").fetchone() == (3,)
    columns = [row[1] for row in connection.execute("PRAGMA table_info(clocks)")]
    assert "era" in columns
    assert "refused_at" not in columns
    connection.close()


async def test_a_schema_that_no_release_wrote_is_refused(path: Path) -> None:
    schema_3(path)
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 2")
    connection.close()
    await refused(path, "no schema in it that a release has written")


async def test_a_newer_schema_is_refused(path: Path) -> None:
    await opened(path)
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {schema.VERSION + 1}")
    connection.close()
    await refused(path, "written by a newer gatekeeper")


async def test_a_database_of_another_application_is_refused(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE theirs (x)")
    connection.commit()
    connection.close()
    await refused(path, "of another application")


async def test_another_application_s_unfinished_transaction_is_left_to_it(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("CREATE TABLE theirs (x)")
    connection.commit()
    log = path.with_name(path.name + "-wal")
    before = log.read_bytes()
    await refused(path, "of another application")
    assert log.read_bytes() == before
    connection.close()


@pytest.mark.parametrize("content", [b"x", b"User-agent: *\n" * 100, b"SQLite format 3\x00"])
async def test_a_file_that_is_no_database_is_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    await refused(path, "not a database")


async def test_a_damaged_page_is_found_at_the_start(path: Path, made: Any) -> None:
    await fill(path, made)
    content = bytearray(path.read_bytes())
    content[3 * 4096 : 5 * 4096] = b"\xff" * 8192
    path.write_bytes(content)
    await refused(path, "move it away")


async def test_a_file_cut_short_is_found_at_the_start(path: Path, made: Any) -> None:
    await fill(path, made)
    os.truncate(path, path.stat().st_size // 2 // 4096 * 4096)
    await refused(path, "move it away")


async def test_damage_met_later_is_an_error_that_names_the_file(
    path: Path, made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(path, made)
    content = bytearray(path.read_bytes())
    content[2 * 4096 :] = b"\xff" * (len(content) - 2 * 4096)
    path.write_bytes(content)
    # Like a file that is too large to be checked on opening.
    monkeypatch.setattr(schema, "MAX_CHECKED_BYTES", 0)
    async with SqliteStorage(path) as storage:
        with pytest.raises(StorageError, match=r"state\.db: .*move it away"):
            await storage.load_origin("https://5.example")
        storage.put_origin(made("https://new.example"))
        with pytest.raises(StorageError, match=r"state\.db"):
            await storage.flush()
        # Records in memory are still readable.
        assert await storage.load_origin("https://new.example") is not None


async def test_a_large_file_with_a_damaged_table_of_numbers_is_refused_at_the_start(
    path: Path, made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was an error of SQLite, which the command shows as a traceback."""
    await fill(path, made)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        found = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'meta'")
        page = int(found.fetchone()[0]) - 1
    content = bytearray(path.read_bytes())
    content[page * 4096 : (page + 1) * 4096] = b"\xff" * 4096
    path.write_bytes(content)
    monkeypatch.setattr(schema, "MAX_CHECKED_BYTES", 0)
    await refused(path, "move it away")


async def test_the_remedy_for_a_damaged_file_works_and_keeps_the_promises(path: Path) -> None:
    storage = SqliteStorage(path)
    await storage.open()
    storage.promise(ClockRecord(scope="a.example", next_at=5.0))
    journal = path.with_name("state.db.promises-1").read_bytes()
    await storage.close()
    path.rename(path.with_name("aside.db"))
    path.with_name("state.db.promises-1").write_bytes(journal)
    async with SqliteStorage(path) as again:
        assert [clock.next_at for clock in await again.load_clocks()] == [5.0]


async def test_a_directory_in_place_of_the_file_is_refused(path: Path) -> None:
    path.mkdir()
    with pytest.raises(StorageError, match="not a file"):
        await opened(path)


async def test_a_link_to_a_missing_file_is_refused_and_left_alone(path: Path) -> None:
    """A new file replaced the link, and the state on a disk that was mounted later was ignored."""
    path.symlink_to(path.with_name("unmounted") / "state.db")
    with pytest.raises(StorageError, match=r"state\.db: the file that it links to can't be read"):
        await opened(path)
    assert path.is_symlink()


async def test_a_file_where_the_directory_should_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "var").write_text("a file")
    with pytest.raises(StorageError, match="directory can't be created"):
        await opened(tmp_path / "var" / "state.db")


async def test_a_log_left_by_another_database_is_set_aside(path: Path) -> None:
    """If a damaged database is moved away without its log, the log must not be replayed."""
    other = sqlite3.connect(path)
    other.execute("PRAGMA journal_mode = WAL")
    other.execute("CREATE TABLE theirs (x)")
    other.commit()
    log = path.with_name("state.db-wal")
    content = log.read_bytes()
    other.close()
    path.unlink()
    log.write_bytes(content)
    await opened(path)
    assert path.with_name("state.db-wal.orphan").read_bytes() == content


async def test_a_file_whose_creation_was_killed_is_created_again(path: Path) -> None:
    path.with_name("state.db.new").write_bytes(b"half a page")
    path.with_name("state.db.new-journal").write_bytes(b"and its journal")
    await opened(path)
    assert not path.with_name("state.db.new").exists()


@pytest.fixture
def locked() -> Iterator[Path]:
    """A directory that may be read but not written to, except by root."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name) / "ro"
        directory.mkdir()
        Path(name).chmod(0o755)
        directory.chmod(0o555)
        yield directory
        directory.chmod(0o755)


OPEN_AS_NOBODY = """
import asyncio, os, sys
from gatekeeper.storage import SqliteStorage
from gatekeeper.errors import StorageError
if os.geteuid() == 0:
    os.setgid(65534); os.setuid(65534)
async def main():
    try:
        await SqliteStorage(sys.argv[1]).open()
    except StorageError as error:
        print(error)
asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform == "win32", reason="directories have no such mode there")
def test_a_directory_that_may_not_be_written_to_is_named(locked: Path) -> None:
    run = subprocess.run(
        [PYTHON, "-c", OPEN_AS_NOBODY, locked / "state.db"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stderr == ""
    assert str(locked / "state.db") in run.stdout
    assert "Permission denied" in run.stdout
    assert "in a directory that this user may write to" in run.stdout


@pytest.mark.skipif(sys.platform == "win32", reason="files have no such mode there")
def test_a_file_that_may_not_be_written_to_is_named(locked: Path) -> None:
    locked.chmod(0o777)
    schema.prepare(locked / "state.db")
    (locked / "state.db").chmod(0o444)
    run = subprocess.run(
        [PYTHON, "-c", OPEN_AS_NOBODY, locked / "state.db"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stderr == ""
    assert run.stdout.strip() == f"{locked / 'state.db'}: read-only; make it writable for this user"
