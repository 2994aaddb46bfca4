"""Forgetting: what keeps the tables bounded, and what it may never touch.

An origin goes when nobody used it for `forget_after`, or when there are more than
`max_origins`, the least recently asked first. Never one to which something is owed: a
place on the ladder of failures, an answer still in force, or a clock of its host that
lies in the future, blocks it or holds it paused. A few at a time: should the wall clock
jump years ahead, little is lost before somebody sets it right.
"""

# ruff: noqa: S608 - the statements are put together from constants of this package
from __future__ import annotations

import sqlite3

from gatekeeper.urls import host_of

__all__ = ["forget"]

AT_ONCE = 1000

_OWED = (
    "EXISTS (SELECT 1 FROM clocks WHERE scope = host_of(origin)"
    " AND (next_at > :now OR blocked_until > :now OR paused))"
)
_STALE_ORIGINS = (
    "DELETE FROM origins WHERE origin IN (SELECT origin FROM origins"
    " WHERE max(fetched_at, coalesce(last_page_ok_at, 0)) < :horizon AND expires_at <= :now"
    f" AND NOT {_OWED} LIMIT :at_once)"
)
_EXCESS_ORIGINS = (
    "DELETE FROM origins WHERE origin IN (SELECT origin FROM origins"
    " WHERE first_unreachable_at IS NULL"
    f" AND NOT {_OWED} ORDER BY fetched_at LIMIT :at_once)"
)
_STALE_CLOCKS = (
    "DELETE FROM clocks WHERE scope IN (SELECT scope FROM clocks"
    " WHERE max(next_at, blocked_until, last_failure_at, said_until) < :horizon AND NOT paused"
    " LIMIT :at_once)"
)


def forget(
    connection: sqlite3.Connection, *, now: float, forget_after: float, max_origins: int
) -> int:
    """Drop what nobody needs; returns how many rows went. Call it in a transaction."""
    connection.create_function("host_of", 1, host_of, deterministic=True)
    terms = {"now": now, "horizon": now - forget_after, "at_once": AT_ONCE}
    gone = connection.execute(_STALE_CLOCKS, terms).rowcount
    gone += connection.execute(_STALE_ORIGINS, terms).rowcount
    kept = int(connection.execute("SELECT count(*) FROM origins").fetchone()[0])
    if kept > max_origins:
        # A little under the bound, so that not every batch has to look for the oldest.
        terms["at_once"] = kept - max_origins + max_origins // 20
        gone += connection.execute(_EXCESS_ORIGINS, terms).rowcount
    return gone
