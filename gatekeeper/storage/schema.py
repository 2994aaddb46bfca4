"""The SQLite file: how it is told from others, created, and brought up to date.

A file is looked at before SQLite is let near it, so that a foreign or damaged one is
never written to. A new one is built under another name and renamed when it is whole:
a process killed meanwhile leaves nothing that a later one would have to doubt.
"""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Callable
from pathlib import Path

from gatekeeper.errors import StorageError
from gatekeeper.storage.base import unpack_body

__all__ = [
    "APPLICATION_ID",
    "VERSION",
    "connect",
    "connect_readonly",
    "open_to_read",
    "prepare",
    "unusable",
]

APPLICATION_ID = 0x67617465
"""`gate`: in the header of every file that is ours."""
VERSION = 5

_MAGIC = b"SQLite format 3\x00"
_QUICK_CHECK_BELOW = 8 * 1024 * 1024
"""A file up to this size is checked page by page at the start; it takes milliseconds."""

_REMEDIES = {
    sqlite3.SQLITE_FULL: "make space: what is pending is kept in memory and written then",
    sqlite3.SQLITE_IOERR: "look at the disk: what is pending is kept in memory and tried again",
    sqlite3.SQLITE_READONLY: "make it and its directory writable for this user",
    sqlite3.SQLITE_CANTOPEN: "make it and its directory readable and writable for this user",
    sqlite3.SQLITE_BUSY: "stop the other program that holds it",
}

# 1: origins with their body inline, clocks.
_CREATE = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE origins (
    origin TEXT PRIMARY KEY,
    outcome TEXT NOT NULL,
    state TEXT NOT NULL,
    status INTEGER,
    fetched_at REAL NOT NULL,
    soft_expires_at REAL NOT NULL,
    expires_at REAL NOT NULL,
    first_unreachable_at REAL,
    ladder_step INTEGER NOT NULL,
    hops TEXT NOT NULL,
    etag TEXT,
    last_modified TEXT,
    good_outcome TEXT,
    good_status INTEGER,
    good_fetched_at REAL,
    good_hops TEXT NOT NULL,
    body_hash BLOB,
    took REAL,
    last_page_ok_at REAL,
    made_at REAL,
    boot_id TEXT NOT NULL DEFAULT '',
    boot_at REAL NOT NULL DEFAULT 0
) WITHOUT ROWID;
CREATE TABLE clocks (
    scope TEXT PRIMARY KEY,
    next_at REAL NOT NULL,
    blocked_until REAL NOT NULL,
    block_reason TEXT NOT NULL,
    failures INTEGER NOT NULL,
    last_failure_at REAL NOT NULL,
    safe_interval REAL NOT NULL,
    paused INTEGER NOT NULL DEFAULT 0,
    errors INTEGER NOT NULL DEFAULT 0,
    latency REAL,
    said_interval REAL NOT NULL DEFAULT 0,
    said_until REAL NOT NULL DEFAULT 0,
    made_at REAL,
    boot_id TEXT NOT NULL DEFAULT '',
    boot_at REAL NOT NULL DEFAULT 0,
    refused_interval REAL NOT NULL DEFAULT 0,
    refused_at REAL NOT NULL DEFAULT 0,
    refused_status INTEGER NOT NULL DEFAULT 0,
    retry_wait REAL NOT NULL DEFAULT 0
) WITHOUT ROWID;
"""

# 2: every text once, by its hash, and what was seen when.
_HISTORY = """
CREATE TABLE blobs (hash BLOB PRIMARY KEY, size INTEGER NOT NULL, body BLOB NOT NULL);
CREATE TABLE history (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    origin TEXT NOT NULL,
    body_hash BLOB NOT NULL,
    first_seen REAL NOT NULL,
    last_seen REAL NOT NULL,
    outcome TEXT NOT NULL,
    status INTEGER,
    size INTEGER NOT NULL
);
CREATE INDEX history_by_origin ON history (origin);
CREATE INDEX history_by_hash ON history (body_hash);
"""


def _script(connection: sqlite3.Connection, script: str) -> None:
    # Not executescript: it commits first, and a migration must be one transaction.
    for statement in script.split(";"):
        if statement.strip():
            connection.execute(statement)


def _to_2(connection: sqlite3.Connection) -> None:
    """Bodies leave their rows: identical ones are kept once, and history begins."""
    _script(connection, _HISTORY)
    connection.execute("ALTER TABLE clocks ADD COLUMN paused INTEGER NOT NULL DEFAULT 0")
    connection.execute(
        "INSERT OR IGNORE INTO blobs (hash, size, body)"
        " SELECT body_hash, text_size(body), body FROM origins"
        " WHERE body IS NOT NULL AND body_hash IS NOT NULL"
    )
    connection.execute(
        "INSERT INTO history (origin, body_hash, first_seen, last_seen, outcome, status, size)"
        " SELECT o.origin, o.body_hash, coalesce(o.good_fetched_at, o.fetched_at),"
        " coalesce(o.good_fetched_at, o.fetched_at), coalesce(o.good_outcome, o.outcome),"
        " o.good_status, b.size FROM origins AS o JOIN blobs AS b ON b.hash = o.body_hash"
    )
    connection.execute("UPDATE origins SET body_hash = NULL WHERE body IS NULL")
    connection.execute("ALTER TABLE origins DROP COLUMN body")


def _to_3(connection: sqlite3.Connection) -> None:
    """Clocks learn what else slows a host: errors, latency, and its RateLimit field."""
    connection.execute("ALTER TABLE clocks ADD COLUMN errors INTEGER NOT NULL DEFAULT 0")
    connection.execute("ALTER TABLE clocks ADD COLUMN latency REAL")
    connection.execute("ALTER TABLE clocks ADD COLUMN said_interval REAL NOT NULL DEFAULT 0")
    connection.execute("ALTER TABLE clocks ADD COLUMN said_until REAL NOT NULL DEFAULT 0")
    connection.execute("ALTER TABLE clocks ADD COLUMN era REAL")


def _to_4(connection: sqlite3.Connection) -> None:
    """Records say when they were written, so that a wall clock that was set misleads nobody."""
    connection.execute("ALTER TABLE clocks DROP COLUMN era")
    for table in ("origins", "clocks"):
        connection.execute(f"ALTER TABLE {table} ADD COLUMN made_at REAL")
        connection.execute(f"ALTER TABLE {table} ADD COLUMN boot_id TEXT NOT NULL DEFAULT ''")
        connection.execute(f"ALTER TABLE {table} ADD COLUMN boot_at REAL NOT NULL DEFAULT 0")


def _to_5(connection: sqlite3.Connection) -> None:
    """Clocks learn which interval was refused, when, how, and when it is tried again."""
    connection.execute("ALTER TABLE clocks ADD COLUMN refused_interval REAL NOT NULL DEFAULT 0")
    connection.execute("ALTER TABLE clocks ADD COLUMN refused_at REAL NOT NULL DEFAULT 0")
    connection.execute("ALTER TABLE clocks ADD COLUMN refused_status INTEGER NOT NULL DEFAULT 0")
    connection.execute("ALTER TABLE clocks ADD COLUMN retry_wait REAL NOT NULL DEFAULT 0")


_MIGRATIONS: dict[int, Callable[[sqlite3.Connection], None]] = {
    1: _to_2,
    2: _to_3,
    3: _to_4,
    4: _to_5,
}
"""From a version to the next."""


def unusable(path: Path, error: Exception) -> StorageError:
    """What to tell people when SQLite gives up on a file."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
    remedy = _REMEDIES.get(
        code,
        f"move it away, with {path.name}-wal if there is one, and start again "
        "(promises are taken over from the journal beside it), or restore a copy",
    )
    return StorageError(f"{path}: {error}; {remedy}")


def prepare(path: Path) -> None:
    """Create the file if there is none, else make sure that it is ours.

    The caller holds the lock. Raises StorageError, and leaves what it refuses untouched.
    """
    try:
        found = path.stat()
    except FileNotFoundError:
        _create(path)
        return
    except OSError as error:
        raise StorageError(f"{path}: can't be read ({error.strerror})") from error
    if not stat.S_ISREG(found.st_mode):
        raise StorageError(f"{path}: not a file; give the path of one")
    if found.st_size == 0:
        _create(path)
        return
    _inspect(path)
    if not os.access(path, os.W_OK):
        raise StorageError(f"{path}: read-only; make it writable for this user")


def _inspect(path: Path) -> None:
    """Read the header by hand: opening a database can already change it (a hot journal)."""
    try:
        with path.open("rb") as file:
            header = file.read(100)
    except OSError as error:
        raise StorageError(f"{path}: can't be read ({error.strerror})") from error
    if not header.startswith(_MAGIC) or len(header) < 100:
        raise StorageError(
            f"{path}: not a database of gatekeeper, or a damaged one; "
            "give another path, or move the file away and start again"
        )
    if int.from_bytes(header[68:72], "big") != APPLICATION_ID:
        raise StorageError(f"{path}: an SQLite file of another application; give another path")


def _create(path: Path) -> None:
    new = path.with_name(path.name + ".new")
    try:
        for suffix in ("", "-journal", "-wal", "-shm"):
            new.with_name(new.name + suffix).unlink(missing_ok=True)
        _set_aside(path)
        # The owner's alone: it tells which sites were asked. SQLite gives -wal and -shm the
        # mode of the file they belong to.
        os.close(os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        connection = sqlite3.connect(new, isolation_level=None)
        try:
            connection.execute("BEGIN")
            _script(connection, _CREATE + _HISTORY)
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {VERSION}")
            connection.execute("COMMIT")
            connection.execute("PRAGMA journal_mode = WAL")
        finally:
            connection.close()
        new.replace(path)
    except (OSError, sqlite3.Error) as error:
        raise StorageError(
            f"{path}: can't be created ({error}); "
            "give a path in a directory that this user may write to, with space left"
        ) from error


def _set_aside(path: Path) -> None:
    """SQLite would play a log left behind by another database into the new one."""
    log = path.with_name(path.name + "-wal")
    if log.exists():
        log.replace(path.with_name(path.name + "-wal.orphan"))
    path.with_name(path.name + "-shm").unlink(missing_ok=True)


def connect(path: Path) -> sqlite3.Connection:
    """The writer's connection, the schema brought up to date. Raises StorageError."""
    try:
        connection = sqlite3.connect(path, isolation_level=None, timeout=5.0)
    except sqlite3.Error as error:
        raise unusable(path, error) from error
    try:
        version = _checked_version(connection, path)
        connection.execute("PRAGMA journal_mode = WAL")
        # FULL: a commit is on the disk when it returns. One a second costs nothing, and
        # the journal may be deleted after it.
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA journal_size_limit = 67108864")
        connection.execute("PRAGMA cache_size = -16384")
        _migrate(connection, path, version)
    except sqlite3.Error as error:
        connection.close()
        raise unusable(path, error) from error
    except StorageError:
        connection.close()
        raise
    return connection


def open_to_read(path: Path) -> sqlite3.Connection:
    """What `connect_readonly` gives, for a process that has the file open nowhere else.

    Raises StorageError also where there is no file, or a foreign one.
    """
    if not path.exists():
        raise StorageError(f"{path}: no such file; give the path of the gate's storage")
    _inspect(path)
    return connect_readonly(path)


def connect_readonly(path: Path) -> sqlite3.Connection:
    """A connection for reading, also while another one writes. Raises StorageError."""
    # No look at the header here: closing that descriptor would drop the locks that the
    # writer's connection in this same process holds on the file.
    connection: sqlite3.Connection | None = None
    try:
        uri = f"{path.absolute().as_uri()}?mode=ro"
        connection = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=5.0)
        version = _version(connection)
    except sqlite3.Error as error:
        if connection is not None:
            connection.close()
        raise unusable(path, error) from error
    if version != VERSION:
        connection.close()
        raise StorageError(
            f"{path}: schema version {version}, this gatekeeper reads {VERSION}; "
            "start the gatekeeper that belongs to it, which brings an older file up to date"
        )
    return connection


def _version(connection: sqlite3.Connection) -> int:
    row = connection.execute("PRAGMA user_version").fetchone()
    return int(row[0])


def _checked_version(connection: sqlite3.Connection, path: Path) -> int:
    version = _version(connection)
    if version > VERSION:
        raise StorageError(
            f"{path}: written by a newer gatekeeper (schema {version}, this one knows {VERSION}); "
            "upgrade, or give another path"
        )
    if version < 1:
        raise StorageError(f"{path}: no schema in it; move it away and start again")
    pages = connection.execute("PRAGMA page_count").fetchone()[0]
    size = pages * connection.execute("PRAGMA page_size").fetchone()[0]
    if size <= _QUICK_CHECK_BELOW:
        verdict = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if verdict != "ok":
            # quick_check reports over several lines; errors here are of one.
            raise sqlite3.DatabaseError(" ".join(str(verdict).split()))
    return version


def _migrate(connection: sqlite3.Connection, path: Path, version: int) -> None:
    """All the steps in one transaction: a process killed on the way finds the old schema."""
    if version == VERSION:
        return
    connection.create_function("text_size", 1, _text_size, deterministic=True)
    connection.execute("BEGIN IMMEDIATE")
    try:
        for step in range(version, VERSION):
            _MIGRATIONS[step](connection)
        connection.execute(f"PRAGMA user_version = {VERSION}")
        connection.execute("COMMIT")
    except sqlite3.Error as error:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise StorageError(
            f"{path}: can't be brought from schema {version} to {VERSION} ({error}); "
            "nothing was changed: make space, or move it away and start again"
        ) from error


def _text_size(body: bytes) -> int:
    return len(unpack_body(body))
