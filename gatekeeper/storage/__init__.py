"""Storage of what outlives the process: policies, clocks and the history of robots.txt files."""

from __future__ import annotations

from gatekeeper.storage.base import (
    ClockRecord,
    HistoryEntry,
    OriginRecord,
    Storage,
    StorageStats,
    pack_body,
    unpack_body,
)
from gatekeeper.storage.memory import MemoryStorage
from gatekeeper.storage.sqlite import SqliteStorage

__all__ = [
    "ClockRecord",
    "HistoryEntry",
    "MemoryStorage",
    "OriginRecord",
    "SqliteStorage",
    "Storage",
    "StorageStats",
    "pack_body",
    "unpack_body",
]
