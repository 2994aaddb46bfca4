"""Storage of what outlives the process: policies, clocks and the history of robots.txt files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gatekeeper.late import LATE, lazily
from gatekeeper.storage.base import (
    ClockRecord as ClockRecord,
    HistoryEntry as HistoryEntry,
    OriginRecord as OriginRecord,
    Storage as Storage,
    pack_body as pack_body,
    unpack_body as unpack_body,
)
from gatekeeper.storage.sqlite import SqliteStorage as SqliteStorage

if TYPE_CHECKING:
    from gatekeeper.testing.memory_storage import MemoryStorage as MemoryStorage
else:
    __getattr__, __dir__, _ = lazily(__name__, LATE[__name__])
