"""What each origin's robots.txt said, and when: the tables `history` and `blobs`.

A row of `history` is a spell: one body from its first to its last sighting in a row. A
text is kept once over all origins and goes with the last row that names it. The newest
row of an origin that is still kept stays whatever the bounds say, because `origins` lends
its body from there.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Sequence

from gatekeeper.storage.base import HistoryEntry, unpack_body
from gatekeeper.storage.pending import Sighting

__all__ = ["ROW_COST", "entries", "entry_at", "record", "shrink", "text_of"]

ROW_COST = 200
"""Bytes that a row is counted as, beside its text: about what it takes with its indexes."""

_SEEN_AGAIN = (
    "UPDATE history SET last_seen = max(last_seen, ?)"
    " WHERE id = (SELECT max(id) FROM history WHERE origin = ?) AND body_hash = ?"
)
_BEGIN_SPELL = (
    "INSERT INTO history (origin, body_hash, first_seen, last_seen, outcome, status, size)"
    " VALUES (?, ?, ?, ?, ?, ?, ?)"
)
_BEYOND = "SELECT id, body_hash FROM history WHERE origin = ? ORDER BY id DESC LIMIT -1 OFFSET ?"
_OLDEST = (
    "SELECT id, body_hash FROM history AS h"
    " WHERE id < (SELECT max(id) FROM history WHERE origin = h.origin)"
    " OR NOT EXISTS (SELECT 1 FROM origins WHERE origin = h.origin)"
    " ORDER BY last_seen, id LIMIT ?"
)
_ENTRIES = (
    "SELECT body_hash, first_seen, last_seen, outcome, status, size"
    " FROM history WHERE origin = ? ORDER BY id"
)


def record(
    connection: sqlite3.Connection, origin: str, seen: Sequence[Sighting], *, versions: int
) -> int:
    """Note what was seen, oldest first; returns by how many bytes the history grew."""
    grown = 0
    for one in seen:
        again = connection.execute(_SEEN_AGAIN, (one.last_seen, origin, one.body_hash))
        if again.rowcount == 0:
            grown += _begin_spell(connection, origin, one)
            for row in connection.execute(_BEYOND, (origin, versions)).fetchall():
                grown -= _drop(connection, *row)
    return grown


def _begin_spell(connection: sqlite3.Connection, origin: str, one: Sighting) -> int:
    size, grown = 0, ROW_COST
    if one.body_hash:
        known = connection.execute("SELECT size FROM blobs WHERE hash = ?", (one.body_hash,))
        row = known.fetchone()
        if row is not None:
            size = row[0]
        elif one.body is None:
            # A hash alone, of a text that was dropped long since: nothing can be proven.
            return 0
        else:
            size = len(unpack_body(one.body))
            connection.execute(
                "INSERT INTO blobs (hash, size, body) VALUES (?, ?, ?)",
                (one.body_hash, size, one.body),
            )
            grown += len(one.body)
    spell = (
        origin,
        one.body_hash,
        one.first_seen,
        one.last_seen,
        one.outcome,
        one.status,
        size,
    )
    connection.execute(_BEGIN_SPELL, spell)
    return grown


def _drop(connection: sqlite3.Connection, spell: int, body_hash: bytes) -> int:
    """Forget one spell, and the text if it was the last to name it; the bytes set free."""
    connection.execute("DELETE FROM history WHERE id = ?", (spell,))
    freed = connection.execute(
        "DELETE FROM blobs WHERE hash = ?"
        " AND NOT EXISTS (SELECT 1 FROM history WHERE body_hash = blobs.hash)"
        " RETURNING length(body)",
        (body_hash,),
    ).fetchall()
    return ROW_COST + sum(int(row[0]) for row in freed)


def shrink(connection: sqlite3.Connection, *, excess: int, at_most: int = 2000) -> int:
    """Forget the spells that ended longest ago; returns the bytes set free.

    Stops when `excess` bytes are free, after `at_most` spells, or when only the newest
    spells of kept origins are left.
    """
    freed = 0
    for row in connection.execute(_OLDEST, (at_most,)).fetchall():
        if freed >= excess:
            break
        freed += _drop(connection, *row)
    return freed


def entries(connection: sqlite3.Connection, origin: str) -> list[HistoryEntry]:
    """An origin's spells, in the order they were observed."""
    return [
        HistoryEntry(
            origin=origin,
            body_hash=body_hash,
            first_seen=first_seen,
            last_seen=last_seen,
            outcome=outcome,
            status=status,
            size=size,
        )
        for body_hash, first_seen, last_seen, outcome, status, size in connection.execute(
            _ENTRIES, (origin,)
        )
    ]


def text_of(connection: sqlite3.Connection, body_hash: bytes) -> bytes | None:
    """The text behind a hash; None if there is none. Raises sqlite3.Error, damage included."""
    row = connection.execute("SELECT body FROM blobs WHERE hash = ?", (body_hash,)).fetchone()
    if row is None:
        return None
    try:
        return unpack_body(row[0])
    except zlib.error as error:
        raise sqlite3.DatabaseError(f"the text {body_hash.hex()} is damaged") from error


def entry_at(spells: Sequence[HistoryEntry], wall: float) -> HistoryEntry | None:
    """The spell last begun at or before that moment; None before the first.

    Within `first_seen` and `last_seen` it is proven; after `last_seen` it is what was last
    known, until the next spell's first sighting.
    """
    begun = [spell for spell in spells if spell.first_seen <= wall]
    return begun[-1] if begun else None
