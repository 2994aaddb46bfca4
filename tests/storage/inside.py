"""What the tests look up inside a storage, or in its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gatekeeper.errors import StorageError
from gatekeeper.storage import ClockRecord, SqliteStorage
from gatekeeper.storage.journal import Journal, read_generation


def pending(storage: SqliteStorage) -> int:
    """Return the number of records that are not in the database yet."""
    return sum(map(len, storage._writer._unwritten))


def journal_of(storage: SqliteStorage) -> Journal:
    """Return the journal that the storage writes to."""
    return storage._writer._journal


def journal_error(storage: SqliteStorage) -> str | None:
    """Return why the journal takes no promises, even if they are not refused."""
    return storage._writer._journal_error


def history_bytes(storage: Any) -> int:
    """Return the bytes that the history of a storage counts for."""
    return int(getattr(storage, "_writer", storage)._committer.history_bytes)


def journaled(path: Path) -> list[ClockRecord]:
    """Return what would be found in the journal if the process were killed now."""
    found: list[ClockRecord] = []
    for file in sorted(path.parent.glob(f"{path.name}.promises-*")):
        try:
            found += [record for _, record in read_generation(file)]
        except StorageError:  # a generation that could not be begun is removed at once
            assert not file.exists()
    return found
