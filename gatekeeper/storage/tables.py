"""Records to rows and back: the tables `origins`, `clocks` and `meta`.

All functions run in the thread that owns the connection, writes inside its transaction.
"""

# ruff: noqa: S608 - the statements are put together from constants of this package
from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping
from typing import Any

from gatekeeper.storage.base import ClockRecord, OriginRecord

__all__ = [
    "CLOCK_COLUMNS",
    "ORIGIN_COLUMNS",
    "get_meta",
    "read_clock",
    "read_clocks",
    "read_origin",
    "set_meta",
    "write_clocks",
    "write_origins",
]

ORIGIN_COLUMNS = tuple(name for name in OriginRecord.__struct_fields__ if name != "body")
CLOCK_COLUMNS = ClockRecord.__struct_fields__

_PUT_ORIGIN = (
    f"INSERT OR REPLACE INTO origins ({', '.join(ORIGIN_COLUMNS)})"
    f" VALUES ({', '.join('?' * len(ORIGIN_COLUMNS))})"
)
_GET_ORIGIN = (
    f"SELECT {', '.join('o.' + name for name in ORIGIN_COLUMNS)}, b.body"
    " FROM origins AS o LEFT JOIN blobs AS b ON b.hash = o.body_hash WHERE o.origin = ?"
)
_PUT_CLOCK = (
    f"INSERT OR REPLACE INTO clocks ({', '.join(CLOCK_COLUMNS)})"
    f" VALUES ({', '.join('?' * len(CLOCK_COLUMNS))})"
)
_GET_CLOCKS = f"SELECT {', '.join(CLOCK_COLUMNS)} FROM clocks"

Text = str | bytes


def _text(value: str) -> Text:
    """Text as SQLite can take it.

    A header may carry lone surrogates (bytes that were no UTF-8): those go as octets, so
    that one site's ETag can't spoil a batch, and comes back as it was.
    """
    if value.isascii():
        return value
    try:
        value.encode()
    except UnicodeEncodeError:
        return value.encode("utf-8", "surrogatepass")
    return value


def _str(value: Text) -> str:
    return value if isinstance(value, str) else value.decode("utf-8", "surrogatepass")


def _opt(value: str | None) -> Text | None:
    return None if value is None else _text(value)


def _opt_str(value: Text | None) -> str | None:
    return None if value is None else _str(value)


def _lines(value: Text) -> tuple[str, ...]:
    # A URL holds no line end: urls.py refuses controls.
    text = _str(value)
    return tuple(text.split("\n")) if text else ()


def _origin_row(r: OriginRecord) -> tuple[Any, ...]:
    return (
        _text(r.origin),
        _text(r.outcome),
        _text(r.state),
        r.status,
        r.fetched_at,
        r.soft_expires_at,
        r.expires_at,
        r.first_unreachable_at,
        r.ladder_step,
        _text("\n".join(r.hops)),
        _opt(r.etag),
        _opt(r.last_modified),
        _opt(r.good_outcome),
        r.good_status,
        r.good_fetched_at,
        _text("\n".join(r.good_hops)),
        r.body_hash,
        r.took,
        r.last_page_ok_at,
        r.made_at,
        r.boot_id,
        r.boot_at,
    )


def _origin(row: tuple[Any, ...]) -> OriginRecord:
    fields: dict[str, Any] = dict(zip(ORIGIN_COLUMNS, row, strict=False))
    for name in ("origin", "outcome", "state"):
        fields[name] = _str(fields[name])
    for name in ("etag", "last_modified", "good_outcome"):
        fields[name] = _opt_str(fields[name])
    for name in ("hops", "good_hops"):
        fields[name] = _lines(fields[name])
    return OriginRecord(**fields, body=row[-1])


def write_origins(connection: sqlite3.Connection, records: Iterable[OriginRecord]) -> None:
    """Put them, the bodies apart: those are history's."""
    connection.executemany(_PUT_ORIGIN, map(_origin_row, records))


def read_origin(connection: sqlite3.Connection, origin: str) -> OriginRecord | None:
    """One origin, its body joined."""
    row = connection.execute(_GET_ORIGIN, (_text(origin),)).fetchone()
    return None if row is None else _origin(row)


def _clock_row(r: ClockRecord) -> tuple[Any, ...]:
    return (
        _text(r.scope),
        r.next_at,
        r.blocked_until,
        _text(r.block_reason),
        r.failures,
        r.last_failure_at,
        r.safe_interval,
        r.paused,
        r.errors,
        r.latency,
        r.said_interval,
        r.said_until,
        r.made_at,
        r.boot_id,
        r.boot_at,
        r.refused_interval,
        r.refused_at,
        r.refused_status,
        r.retry_wait,
    )


def _clock(row: tuple[Any, ...]) -> ClockRecord:
    fields: dict[str, Any] = dict(zip(CLOCK_COLUMNS, row, strict=True))
    for name in ("scope", "block_reason"):
        fields[name] = _str(fields[name])
    fields["paused"] = bool(fields["paused"])
    return ClockRecord(**fields)


def write_clocks(connection: sqlite3.Connection, clocks: Mapping[str, ClockRecord | None]) -> None:
    """Put them; None forgets a scope."""
    connection.executemany(_PUT_CLOCK, (_clock_row(r) for r in clocks.values() if r is not None))
    connection.executemany(
        "DELETE FROM clocks WHERE scope = ?",
        ((_text(scope),) for scope, record in clocks.items() if record is None),
    )


def read_clock(connection: sqlite3.Connection, scope: str) -> ClockRecord | None:
    """One scope's clock."""
    row = connection.execute(f"{_GET_CLOCKS} WHERE scope = ?", (_text(scope),)).fetchone()
    return None if row is None else _clock(row)


def read_clocks(connection: sqlite3.Connection) -> list[ClockRecord]:
    """Every clock."""
    return [_clock(row) for row in connection.execute(_GET_CLOCKS)]


def get_meta(connection: sqlite3.Connection, name: str) -> int | None:
    """A number of the file's own bookkeeping."""
    row = connection.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
    return None if row is None else int(row[0])


def set_meta(connection: sqlite3.Connection, name: str, value: int) -> None:
    """Keep a number of the file's own bookkeeping."""
    connection.execute("INSERT OR REPLACE INTO meta (name, value) VALUES (?, ?)", (name, value))
