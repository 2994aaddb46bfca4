"""The SQLite file: its schema and migrations, its rows, and the bounds of its tables.

The file's header is checked before SQLite opens it, so that a foreign or damaged file is never
written to. A new file is built under a temporary name and renamed when it is complete: a
process killed meanwhile leaves no partial database.

    origins     the latest `OriginRecord` of each origin, without its body
    clocks      the latest `ClockRecord` of each scope
    blobs       each text once, by its SHA-256
    history     spells: one body of an origin from its first to its last consecutive sighting
    meta        named integers about the file itself

A text is deleted with the last row of `history` that refers to it. The newest row of a stored
origin is exempt from the bounds, because `origins` takes its body from there. An origin is
deleted if it was not used for `forget_after`, or, least recently fetched first, if there are
more than `max_origins`; but never while something is owed to it: a place on the ladder of
failures, an outcome still in force, or a clock of its host that is in the future, blocked or
paused. Each pass deletes a limited number of rows: if the wall clock jumps years ahead, little
is lost before it is corrected.

All functions run in the thread that owns the connection; writes run inside its transaction.
"""

# ruff: noqa: S608 - the statements are built from constants of this module
from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from gatekeeper.errors import StorageError
from gatekeeper.storage.base import (
    NO_SPACE,
    ClockRecord,
    DiskFull,
    HistoryEntry,
    OriginRecord,
    from_earlier,
    unpack_body,
)
from gatekeeper.urls import host_of, printable

APPLICATION_ID = 0x67617465
"""`gate`, in the header of every file that gatekeeper creates."""
VERSION = 8

_MAGIC = b"SQLite format 3\x00"
MAX_CHECKED_BYTES = 8 * 1024 * 1024
"""A file up to this size is checked page by page when opened; it takes milliseconds."""

_REMEDIES = {
    sqlite3.SQLITE_FULL: "make space: what is pending is written then, or by the next start",
    sqlite3.SQLITE_IOERR: "look at the disk: what is pending is tried again",
    sqlite3.SQLITE_READONLY: "make it and its directory writable for this user",
    sqlite3.SQLITE_CANTOPEN: "make it and its directory readable and writable for this user",
    sqlite3.SQLITE_BUSY: "stop the other program that holds it",
}

FAULTS = (sqlite3.Error, UnicodeDecodeError, MemoryError, msgspec.MsgspecError)
"""What using a damaged file can raise. Python's module raises UnicodeDecodeError if SQLite's own
message quotes a damaged schema, and MemoryError for a damaged length; the rows are checked here."""
_MAX_TOLD = 200
"""Characters of SQLite's message that are shown."""

_COLUMN_TYPES: dict[Any, str] = {
    str: "TEXT NOT NULL",
    tuple[str, ...]: "TEXT NOT NULL",
    bool: "INTEGER NOT NULL",
    int: "INTEGER NOT NULL",
    float: "REAL NOT NULL",
    str | None: "TEXT",
    int | None: "INTEGER",
    float | None: "REAL",
    bytes | None: "BLOB",
}
"""The column of a record's field, by its type."""
_FROM_SQL = (str, str | None, bool, tuple[str, ...])
_ADDED_DEFAULTS = {"TEXT NOT NULL": "''", "INTEGER NOT NULL": "0", "REAL NOT NULL": "0"}
"""The value of a column that was added, in rows of an earlier version. New tables have no
defaults: INSERT OR REPLACE would store them in place of an invalid NULL."""


def _columns_of(record: type[msgspec.Struct]) -> dict[str, str]:
    """Return the column of each field by name. The first is the key; a body is in `blobs`."""
    columns = {name: _COLUMN_TYPES[kind] for name, kind in _TYPES[record].items() if name != "body"}
    return columns | {next(iter(columns)): "TEXT PRIMARY KEY"}


_TYPES: dict[type, dict[str, Any]] = {
    record: {one.name: one.type for one in msgspec.structs.fields(record)}
    for record in (OriginRecord, ClockRecord, HistoryEntry)
}
_RECORD_TABLES = {"origins": _columns_of(OriginRecord), "clocks": _columns_of(ClockRecord)}


def _definition(table: str) -> str:
    return ", ".join(f"{name} {kind}" for name, kind in _RECORD_TABLES[table].items())


_CREATE_TABLES = f"""
CREATE TABLE meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE origins ({_definition("origins")}) WITHOUT ROWID;
CREATE TABLE clocks ({_definition("clocks")}) WITHOUT ROWID;
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
_OLDEST_VERSION = 3
"""The oldest schema that is migrated: no release wrote an older one."""


def _create_tables(connection: sqlite3.Connection) -> None:
    # Not executescript, which commits first: the file is created in one transaction.
    for statement in _CREATE_TABLES.split(";"):
        connection.execute(statement)


def unusable(path: Path, error: Exception, *, opening: bool = False) -> StorageError:
    """Return the StorageError, with its remedy, for an error of SQLite or the system.

    `opening`: the error occurred while opening the file, so a full disk gives DiskFull.
    """
    if opening and _is_disk_full(path, error):
        return DiskFull(f"{path}: {told(error)}; make space there, or look at the disk, to start")
    if isinstance(error, OSError) and not opening:
        return StorageError(f"{path}: {error.strerror or error}")
    remedy = _REMEDIES.get(getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF)
    if remedy is not None:
        return StorageError(f"{path}: {told(error)}; {remedy}")
    return StorageError(
        f"{path}: damaged ({told(error)}); move it away, with {path.name}-wal if there is one, and "
        "start again (promises are taken over from the journal beside it), or restore a copy"
    )


@contextlib.contextmanager
def explained(path: Path, *, opening: bool = False) -> Iterator[None]:
    """Raise StorageError, with its remedy, for what using the file raises; see `unusable`."""
    try:
        yield
    except FAULTS as error:
        raise unusable(path, error, opening=opening) from error


def told(error: Exception) -> str:
    """Return an error's message in printable characters: SQLite's may quote a damaged file."""
    return printable(str(error) or type(error).__name__, _MAX_TOLD)


def _is_disk_full(path: Path, error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno in NO_SPACE
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
    if code == sqlite3.SQLITE_CANTOPEN:  # probably no space to create the -wal file
        return path.parent.is_dir() and os.access(path.parent, os.W_OK)
    return code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)


def prepare(path: Path) -> None:
    """Create the file if it does not exist, else verify that it is gatekeeper's.

    The caller holds the lock. Raises StorageError, and leaves a refused file untouched.
    """
    try:
        found = path.stat()
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not path.is_symlink():
            _create(path)
            return
        # A new file would replace the link, perhaps only because a disk is not mounted.
        what = "the file that it links to " if path.is_symlink() else ""
        raise StorageError(f"{path}: {what}can't be read ({error.strerror})") from error
    if not stat.S_ISREG(found.st_mode):
        raise StorageError(f"{path}: not a file; give the path of a file")
    if found.st_size == 0:
        _create(path)
        return
    _check_header(path)
    if not os.access(path, os.W_OK):
        raise StorageError(f"{path}: read-only; make it writable for this user")


def _check_header(path: Path) -> None:
    """Check the header without SQLite: just opening a database can change it (a hot journal)."""
    try:
        with path.open("rb") as file:
            header = file.read(100)
    except OSError as error:
        raise StorageError(f"{path}: can't be read ({error.strerror})") from error
    # By its versions (1 or 2) SQLite would take a damaged file for one that it may only read.
    if not header.startswith(_MAGIC) or len(header) < 100 or not {*header[18:20]} <= {1, 2}:
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
        _rename_old_wal(path)
        # Readable by the owner alone: it shows which sites were crawled. SQLite gives -wal and
        # -shm the mode of their database.
        os.close(os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        with contextlib.closing(sqlite3.connect(new, isolation_level=None)) as connection:
            connection.execute("BEGIN")
            _create_tables(connection)
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {VERSION}")
            connection.execute("COMMIT")
            connection.execute("PRAGMA journal_mode = WAL")
        new.replace(path)
    except (OSError, sqlite3.Error) as error:
        kind = DiskFull if _is_disk_full(path, error) else StorageError
        raise kind(
            f"{path}: can't be created ({error}); "
            "give a path in a directory that this user may write to, with space left"
        ) from error


def _rename_old_wal(path: Path) -> None:
    """Rename a -wal left by another database, which SQLite would replay into the new one."""
    log = path.with_name(path.name + "-wal")
    if log.exists():
        log.replace(path.with_name(path.name + "-wal.orphan"))
    path.with_name(path.name + "-shm").unlink(missing_ok=True)


def connect(path: Path) -> sqlite3.Connection:
    """Return a connection for the writer and migrate the schema. Raises StorageError."""
    with explained(path, opening=True), contextlib.ExitStack() as on_error:
        connection = sqlite3.connect(path, isolation_level=None, timeout=5.0)
        on_error.callback(connection.close)
        version = _checked_version(connection, path)
        connection.execute("PRAGMA journal_mode = WAL")
        # FULL: a commit is on the disk when it returns, so the journal may be deleted after it.
        # With one commit a second the cost is negligible.
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA journal_size_limit = 67108864")
        connection.execute("PRAGMA cache_size = -16384")
        _migrate(connection, path, version)
        # The pages of a large file are not checked, and the writer starts with these numbers.
        for name in ("absorbed", "history_bytes"):
            get_meta(connection, name)
        on_error.pop_all()
    return connection


def connect_in_memory() -> sqlite3.Connection:
    """Return a connection to an empty database in memory, for use by any one thread at a time."""
    connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    _create_tables(connection)
    return connection


def open_to_read(path: Path) -> sqlite3.Connection:
    """Check the file, then `connect_readonly`. Only for a process that does not have it open.

    Raises StorageError also if the file is missing or foreign.
    """
    remedy = "give the path of the gate's storage"
    if not path.is_file():
        raise StorageError(f"{path}: {'not a' if path.exists() else 'no such'} file; {remedy}")
    _check_header(path)
    return connect_readonly(path)


def connect_readonly(path: Path) -> sqlite3.Connection:
    """Return a connection for reading, usable while another one writes. Raises StorageError."""
    # The header is not checked: closing that descriptor would drop the locks that the writer's
    # connection in this process holds on the file.
    with explained(path), contextlib.ExitStack() as on_error:
        uri = f"{path.absolute().as_uri()}?mode=ro"
        connection = sqlite3.connect(
            uri, uri=True, isolation_level=None, timeout=5.0, check_same_thread=False
        )
        on_error.callback(connection.close)
        if (version := _version(connection)) != VERSION:
            raise StorageError(
                f"{path}: schema version {version}, this gatekeeper reads {VERSION}; "
                "start the gatekeeper that belongs to it, which brings an older file up to date"
            )
        on_error.pop_all()
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
    if version < _OLDEST_VERSION:
        raise StorageError(
            f"{path}: no schema in it that a release has written; move it away and start again"
        )
    pages = connection.execute("PRAGMA page_count").fetchone()[0]
    size = pages * connection.execute("PRAGMA page_size").fetchone()[0]
    if size <= MAX_CHECKED_BYTES:
        verdict = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if verdict != "ok":
            # quick_check may report several lines; error messages have one.
            raise sqlite3.DatabaseError(" ".join(str(verdict).split()))
    return version


def _migrate(connection: sqlite3.Connection, path: Path, version: int) -> None:
    """Add the columns that the file's version lacks, and fill those of the clocks, in one
    transaction: a process that is killed meanwhile leaves the old schema."""
    if version == VERSION:
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        with connection:  # commits or rolls back
            for table, columns in _RECORD_TABLES.items():
                present = {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}
                for name, kind in columns.items():
                    if name not in present:
                        default = _ADDED_DEFAULTS.get(kind, "NULL")
                        column = f"{name} {kind} DEFAULT {default}"
                        connection.execute(f"ALTER TABLE {table} ADD COLUMN {column}")
            if version == _OLDEST_VERSION:
                connection.execute("ALTER TABLE clocks DROP COLUMN era")
            clocks = map(from_earlier, read_clocks(connection))
            write_clocks(connection, {one.scope: one for one in clocks})
            connection.execute(f"PRAGMA user_version = {VERSION}")
    except FAULTS as error:
        raise StorageError(
            f"{path}: can't be migrated from schema {version} to {VERSION} ({told(error)}); "
            "nothing was changed: make space, or move it away and start again"
        ) from error


# --- rows ------------------------------------------------------------------------------------

ORIGIN_COLUMNS = tuple(_RECORD_TABLES["origins"])
CLOCK_COLUMNS = tuple(_RECORD_TABLES["clocks"])

_GET_ORIGIN = (
    f"SELECT {', '.join('o.' + name for name in ORIGIN_COLUMNS)}, b.body"
    " FROM origins AS o LEFT JOIN blobs AS b ON b.hash = o.body_hash WHERE o.origin = ?"
)
_GET_CLOCKS = f"SELECT {', '.join(CLOCK_COLUMNS)} FROM clocks"

_Record = TypeVar("_Record")

_CONVERTED = {
    record: {name: kind for name, kind in types.items() if kind in _FROM_SQL}
    for record, types in _TYPES.items()
}
"""Fields that SQLite does not return as they are, by record."""


def _to_sql(value: str | tuple[str, ...]) -> str | bytes:
    """Return a value as SQLite can store it: a list of URLs one per line, and bytes for a text with
    lone surrogates.

    A header may contain lone surrogates (from bytes that are not UTF-8). As bytes, one site's
    ETag can't break a batch, and is read back unchanged.
    """
    if isinstance(value, tuple):
        # URLs contain no line ends, because `urls` refuses control characters.
        value = "\n".join(value)
    if value.isascii():
        return value
    try:
        value.encode()
    except UnicodeEncodeError:
        return value.encode("utf-8", "surrogatepass")
    return value


def _from_sql(kind: Any, value: Any) -> Any:
    """Return the value of a field of that type."""
    if kind is bool:
        return bool(value)
    if isinstance(value, bytes):
        value = value.decode("utf-8", "surrogatepass")
    if kind == tuple[str, ...]:
        return str(value).split("\n") if value else ()
    return value


def _record_of(kind: type[_Record], names: Sequence[str], row: Sequence[Any]) -> _Record:
    """Return the record of a row. Raises msgspec.ValidationError for a damaged one: in any column
    SQLite may return values of any type."""
    fields = dict(zip(names, row, strict=True))
    for name, field in _CONVERTED[kind].items():
        fields[name] = _from_sql(field, fields[name])
    return msgspec.convert(fields, kind, builtin_types=(bytes,))


def _put(
    connection: sqlite3.Connection,
    table: str,
    columns: Sequence[str],
    records: Iterable[msgspec.Struct],
) -> None:
    read = attrgetter(*columns)
    connection.executemany(
        f"INSERT OR REPLACE INTO {table} ({', '.join(columns)})"
        f" VALUES ({', '.join('?' * len(columns))})",
        (
            [_to_sql(one) if type(one) in (str, tuple) else one for one in read(record)]
            for record in records
        ),
    )


def write_origins(connection: sqlite3.Connection, records: Iterable[OriginRecord]) -> None:
    """Insert or replace records without their bodies, which belong to the history."""
    _put(connection, "origins", ORIGIN_COLUMNS, records)


def read_origin(connection: sqlite3.Connection, origin: str) -> OriginRecord | None:
    """Return the record of an origin with its body, or None."""
    row = connection.execute(_GET_ORIGIN, (_to_sql(origin),)).fetchone()
    return None if row is None else _record_of(OriginRecord, (*ORIGIN_COLUMNS, "body"), row)


def write_clocks(connection: sqlite3.Connection, clocks: Mapping[str, ClockRecord | None]) -> None:
    """Insert or replace clocks; a value of None deletes the scope's clock."""
    _put(connection, "clocks", CLOCK_COLUMNS, filter(None, clocks.values()))
    connection.executemany(
        "DELETE FROM clocks WHERE scope = ?",
        ((_to_sql(scope),) for scope, record in clocks.items() if record is None),
    )


def read_clock(connection: sqlite3.Connection, scope: str) -> ClockRecord | None:
    """Return the clock of a scope, or None."""
    row = connection.execute(f"{_GET_CLOCKS} WHERE scope = ?", (_to_sql(scope),)).fetchone()
    return None if row is None else _record_of(ClockRecord, CLOCK_COLUMNS, row)


def read_clocks(connection: sqlite3.Connection) -> list[ClockRecord]:
    """Return every clock."""
    rows = connection.execute(_GET_CLOCKS)
    return [_record_of(ClockRecord, CLOCK_COLUMNS, row) for row in rows]


def get_meta(connection: sqlite3.Connection, name: str) -> int | None:
    """Return a number from the table `meta`, or None."""
    row = connection.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
    return None if row is None else msgspec.convert(row[0], int)


def set_meta(connection: sqlite3.Connection, name: str, value: int) -> None:
    """Store a number in the table `meta`."""
    connection.execute("INSERT OR REPLACE INTO meta (name, value) VALUES (?, ?)", (name, value))


# --- history ---------------------------------------------------------------------------------

HISTORY_ROW_BYTES = 200
"""Bytes that a row of the history counts for, apart from its text: about its size with indexes."""

_EXTEND_SPELL = (
    "UPDATE history SET last_seen = max(last_seen, ?)"
    " WHERE id = (SELECT max(id) FROM history WHERE origin = ?) AND body_hash = ?"
)
_INSERT_SPELL = (
    "INSERT INTO history (origin, body_hash, first_seen, last_seen, outcome, status, size)"
    " VALUES (?, ?, ?, ?, ?, ?, ?)"
)
_EXCESS_SPELLS = (
    "SELECT id, body_hash FROM history WHERE origin = ? ORDER BY id DESC LIMIT -1 OFFSET ?"
)
_OLDEST_SPELLS = (
    "SELECT id, body_hash FROM history AS h"
    " WHERE id < (SELECT max(id) FROM history WHERE origin = h.origin)"
    " OR NOT EXISTS (SELECT 1 FROM origins WHERE origin = h.origin)"
    " ORDER BY last_seen, id LIMIT ?"
)
_SELECT_SPELLS = (
    f"SELECT {', '.join(HistoryEntry.__struct_fields__)} FROM history WHERE origin = ? ORDER BY id"
)


def record_history(
    connection: sqlite3.Connection, records: Iterable[OriginRecord], *, versions: int
) -> int:
    """Add the last good slots of records to the history, oldest first. Return by how many bytes it
    grew."""
    grown = 0
    for one in records:
        if one.body_hash is None and one.good_outcome is None:
            continue
        seen = one.fetched_at if one.good_fetched_at is None else one.good_fetched_at
        again = connection.execute(_EXTEND_SPELL, (seen, one.origin, one.body_hash or b""))
        if again.rowcount == 0:
            grown += _insert_spell(connection, one, seen)
            for row in connection.execute(_EXCESS_SPELLS, (one.origin, versions)).fetchall():
                grown -= _delete_spell(connection, *row)
    return grown


def _insert_spell(connection: sqlite3.Connection, one: OriginRecord, seen: float) -> int:
    size, grown = 0, HISTORY_ROW_BYTES
    if one.body_hash:
        known = connection.execute("SELECT size FROM blobs WHERE hash = ?", (one.body_hash,))
        row = known.fetchone()
        if row is not None:
            size = row[0]
        elif one.body is None:
            # Only the hash of a text that was dropped long ago: nothing can be recorded.
            return 0
        else:
            size = len(unpack_body(one.body))
            connection.execute(
                "INSERT INTO blobs (hash, size, body) VALUES (?, ?, ?)",
                (one.body_hash, size, one.body),
            )
            grown += len(one.body)
    outcome, status = one.good_outcome, one.good_status
    if outcome is None:
        outcome, status = one.outcome, one.status
    spell = (one.origin, one.body_hash or b"", seen, seen, outcome, status, size)
    connection.execute(_INSERT_SPELL, spell)
    return grown


def _delete_spell(connection: sqlite3.Connection, spell: int, body_hash: bytes) -> int:
    """Delete a spell, and its text if no other spell refers to it. Return the bytes freed."""
    connection.execute("DELETE FROM history WHERE id = ?", (spell,))
    freed = connection.execute(
        "DELETE FROM blobs WHERE hash = ?"
        " AND NOT EXISTS (SELECT 1 FROM history WHERE body_hash = blobs.hash)"
        " RETURNING coalesce(length(body), 0)",
        (body_hash,),
    ).fetchall()
    return HISTORY_ROW_BYTES + sum(int(row[0]) for row in freed)


def shrink_history(connection: sqlite3.Connection, *, excess: int, max_spells: int = 2000) -> int:
    """Delete the spells that ended longest ago. Return the bytes freed.

    Stops once `excess` bytes are freed, after `max_spells` spells, or when only the newest spells
    of stored origins are left.
    """
    freed = 0
    for row in connection.execute(_OLDEST_SPELLS, (max_spells,)).fetchall():
        if freed >= excess:
            break
        freed += _delete_spell(connection, *row)
    return freed


def history_of(connection: sqlite3.Connection, origin: str) -> list[HistoryEntry]:
    """Return an origin's spells in chronological order."""
    names = HistoryEntry.__struct_fields__
    rows = connection.execute(_SELECT_SPELLS, (origin,))
    return [_record_of(HistoryEntry, names, row) for row in rows]


def text_of(connection: sqlite3.Connection, body_hash: bytes) -> bytes | None:
    """Return the text with that hash, or None. Raises sqlite3.Error, also for a damaged text."""
    row = connection.execute("SELECT body FROM blobs WHERE hash = ?", (body_hash,)).fetchone()
    if row is None:
        return None
    try:
        return unpack_body(msgspec.convert(row[0], bytes, builtin_types=(bytes,)))
    except zlib.error as error:
        raise sqlite3.DatabaseError(f"the text {body_hash.hex()}: {error}") from error


# --- deletion of old rows --------------------------------------------------------------------

MAX_DELETED = 1000
"""Old rows that one pass deletes from a table of up to 50,000 rows. From a larger table it deletes
one row in fifty: with a fixed limit, a table to which many hosts are added would grow for ever."""

# A damaged value may be a text, which is more than every number.
_NEWEST = (
    "SELECT min(:now, max(coalesce((SELECT max(fetched_at) FROM origins), 0),"
    " coalesce((SELECT max(next_at) FROM clocks), 0)))"
)
_IS_OWED = (
    "EXISTS (SELECT 1 FROM clocks WHERE scope = host_of(origin)"
    " AND (next_at > :now OR blocked_until > :now OR paused))"
)
_DELETE_STALE_ORIGINS = (
    "DELETE FROM origins WHERE origin IN (SELECT origin FROM origins"
    " WHERE max(fetched_at, coalesce(last_page_ok_at, 0)) < :horizon AND expires_at <= :now"
    f" AND NOT {_IS_OWED} LIMIT max(:max_deleted, (SELECT count(*) / 50 FROM origins)))"
)
_DELETE_EXCESS_ORIGINS = (
    "DELETE FROM origins WHERE origin IN (SELECT origin FROM origins"
    " WHERE first_unreachable_at IS NULL"
    f" AND NOT {_IS_OWED} ORDER BY fetched_at LIMIT :max_deleted)"
)
_DELETE_STALE_CLOCKS = (
    "DELETE FROM clocks WHERE scope IN (SELECT scope FROM clocks"
    " WHERE max(next_at, blocked_until, last_failure_at, said_until, day_at + 86400) < :horizon"
    " AND NOT paused"
    " LIMIT max(:max_deleted, (SELECT count(*) / 50 FROM clocks)))"
)


def delete_old(
    connection: sqlite3.Connection, *, now: float, forget_after: float, max_origins: int
) -> None:
    """Delete old origins and clocks to which nothing is owed.

    Must be called inside a transaction. Age is relative to the newest record: a wall clock set
    years ahead, with nothing fetched since, makes nothing old.
    """
    now = connection.execute(_NEWEST, {"now": now}).fetchone()[0]
    connection.create_function("host_of", 1, host_of, deterministic=True)
    terms = {"now": now, "horizon": now - forget_after, "max_deleted": MAX_DELETED}
    connection.execute(_DELETE_STALE_CLOCKS, terms)
    connection.execute(_DELETE_STALE_ORIGINS, terms)
    kept = int(connection.execute("SELECT count(*) FROM origins").fetchone()[0])
    if kept > max_origins:
        # Go 5 % below the bound, so that not every batch has to search for the oldest.
        terms["max_deleted"] = kept - max_origins + max_origins // 20
        connection.execute(_DELETE_EXCESS_ORIGINS, terms)
