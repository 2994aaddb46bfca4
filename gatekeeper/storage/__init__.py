"""Storage of what outlives the process: policies, clocks and the history of robots.txt files."""

from __future__ import annotations

from gatekeeper.storage.base import (
    ClockRecord as ClockRecord,
    HistoryEntry as HistoryEntry,
    OriginRecord as OriginRecord,
    Storage as Storage,
    pack_body as pack_body,
    unpack_body as unpack_body,
)
from gatekeeper.storage.sqlite import SqliteStorage as SqliteStorage
