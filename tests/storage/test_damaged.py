"""A damaged file is refused, or its damage is met later: always by the one error that names the
file and the remedy."""

from __future__ import annotations

import contextlib
import logging
import random
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gatekeeper import PoliteQueue
from gatekeeper.errors import StorageError
from gatekeeper.storage import ClockRecord, SqliteStorage, schema
from gatekeeper.testing import ScriptedGate
from tests.effort import LONG

MANY = 2_000 if LONG else 60
PARTS = 20
"""Parts of a run, so that they are distributed over the workers."""
PAGE = 4_096


async def fill(path: Path, made: Callable[..., Any]) -> None:
    async with SqliteStorage(path) as storage:
        for n in range(40):
            text = b"Disallow: /%d\n" % n * (1 + n * 20)
            storage.put_origin(made(f"https://{n}.example", text, hops=(f"https://{n}.test/",)))
            storage.put_clock(ClockRecord(scope=f"{n}.example", next_at=5.0, block_reason="429"))
        await storage.flush()
        storage.put_origin(made("https://1.example", b"Disallow: /other\n"))


def damage(content: bytearray, rng: random.Random) -> None:
    """Damage a file: in its schema as often as in its rows, by octets, pages or its end."""
    kind = rng.randrange(6)
    end = PAGE if kind % 2 else len(content)
    at = rng.randrange(100, end)
    if kind < 3:
        content[at] = rng.choice([0, 0x7F, 0xBA, 0xFF, content[at] ^ 1 << rng.randrange(8)])
    elif kind < 5:
        for _ in range(20):
            content[rng.randrange(100, end)] = rng.randrange(256)
    elif rng.random() < 0.5:
        content[at : at + PAGE] = rng.randbytes(len(content[at : at + PAGE]))
    else:
        del content[at:]


async def use(path: Path, made: Callable[..., Any]) -> list[StorageError]:
    """Do everything with a file, whatever fails."""
    failed: list[StorageError] = []

    async def attempt(work: Any) -> Any:
        try:
            return await work
        except StorageError as error:
            failed.append(error)
            return []

    storage = SqliteStorage(path)
    try:
        await storage.open()
    except StorageError as error:
        return [error]
    await attempt(storage.load_clocks())
    for n in range(40):
        await attempt(storage.load_origin(f"https://{n}.example"))
        await attempt(storage.load_clock(f"{n}.example"))
        for entry in await attempt(storage.history(f"https://{n}.example")):
            await attempt(storage.body(entry.body_hash))
    for n in range(40, 50):
        storage.put_origin(made(f"https://{n}.example", b"Disallow: /%d\n" % n))
        storage.promise(ClockRecord(scope=f"{n}.example", next_at=6.0))
    await attempt(storage.flush())
    await attempt(storage.load_clock("45.example"))
    await storage.close()
    return failed


@pytest.mark.parametrize("checked", [True, False], ids=["checked at the start", "large"])
@pytest.mark.parametrize("part", range(PARTS))
async def test_every_damage_raises_storage_error(
    tmp_path: Path,
    made: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    part: int,
    checked: bool,
) -> None:
    good = tmp_path / "good.db"
    await fill(good, made)
    whole = good.read_bytes()
    if not checked:  # like a file that is too large to be checked on opening
        monkeypatch.setattr(schema, "MAX_CHECKED_BYTES", 0)
    for number in range(part, MANY // 2, PARTS):
        rng = random.Random(f"{number} {checked}")
        content = bytearray(whole)
        damage(content, rng)
        folder = tmp_path / str(number)
        folder.mkdir()
        path = folder / "state.db"
        path.write_bytes(content)
        for error in await use(path, made):
            assert str(error).startswith(f"{path}: "), number
            assert str(error).isprintable(), number
            assert any(remedy in str(error) for remedy in REMEDIES), (number, str(error))
    for one in caplog.records:
        assert not (one.exc_info and one.levelno >= logging.ERROR)
        if "retried later" in one.message:  # while the gate runs
            assert any(remedy in one.message for remedy in REMEDIES), one.message


REMEDIES = ("move it away", "move the file away", "give another path", "upgrade")


@pytest.mark.parametrize("value", ["'a text'", "x'00'", "9e999"])
@pytest.mark.parametrize("column", ["origins.fetched_at", "clocks.next_at"])
async def test_a_damaged_moment_does_not_end_the_writer(
    path: Path, made: Callable[..., Any], column: str, value: str
) -> None:
    await fill(path, made)
    table, name = column.split(".")
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(f"UPDATE {table} SET {name} = {value}")
    async with SqliteStorage(path) as storage:
        for n in range(2):  # old rows are deleted after the first
            storage.promise(ClockRecord(scope=f"{n}.test", next_at=5.0))
            await storage.flush()
        assert storage.failing is None


async def test_a_damaged_queue_file_raises_storage_error(tmp_path: Path) -> None:
    async with ScriptedGate() as gate:
        path = tmp_path / "queue.db"
        async with PoliteQueue(gate, keep=path) as queue:
            for n in range(40):
                await queue.put(f"https://{n}.test/{'x' * n}", data=[n, "text"])
        whole = path.read_bytes()
        errors = {}
        for number in range(MANY // 10):
            content = bytearray(whole)
            damage(content, random.Random(number))
            path = tmp_path / f"queue-{number}.db"
            path.write_bytes(content)
            try:
                async with PoliteQueue(gate, keep=path):
                    pass
            except StorageError as error:
                errors[path] = str(error)
        assert errors
        for path, error in errors.items():
            assert str(path) in error
            assert error.isprintable()
