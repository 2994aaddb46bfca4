"""kill -9 at any moment: no promise is lost, and the file stays usable."""

from __future__ import annotations

import os
import random
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gatekeeper.storage import SqliteStorage
from tests.effort import LONG
from tests.forking import Victims

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")

ROUNDS = 100 if LONG else 25


@dataclass
class Told:
    """The calls that the victim reported, whose effects must be found afterwards."""

    promised: dict[str, int] = field(default_factory=dict)
    put: dict[str, int] = field(default_factory=dict)
    put_at: dict[str, tuple[int, float]] = field(default_factory=dict)
    flushed: dict[str, int] = field(default_factory=dict)
    latest: int = 0
    now: float = 0.0

    def hear(self, line: str) -> None:
        match line.split():
            case ["promised", scope, value]:
                self.promised[scope] = self.latest = int(value)
            case ["put", scope, value, now]:
                self.put[scope] = self.latest = int(value)
                self.now = float(now)
                self.put_at.setdefault(scope, (int(value), self.now))
            case ["flushed", value]:
                self.flushed |= self.put
                self.latest = int(value)

    def hear_last(self, lines: Iterable[str]) -> None:
        """Take the last reports of a process that was killed."""
        for line in lines:
            self.hear(line)
        # Records that were put but not flushed may be lost: a later flush does not cover them.
        self.put.clear()


@pytest.fixture
def victim() -> Iterator[Victims]:
    with closing(Victims("tests.storage.victim")) as victims:
        yield victims


async def check(path: Path, told: Told) -> None:
    async with SqliteStorage(path) as storage:
        clocks = {clock.scope: clock.next_at for clock in await storage.load_clocks()}
        for scope, value in told.promised.items():
            # There may be one more, whose report was cut off by the kill.
            assert value <= clocks[scope] <= told.latest + 1
        for scope, value in told.flushed.items():
            found = await storage.load_origin(f"https://{scope}")
            assert found is not None
            assert value <= found.fetched_at <= told.latest + 1
            assert found.body is not None
            entries = await storage.history(f"https://{scope}")
            assert entries[-1].body_hash == found.body_hash


async def test_no_promise_is_lost_by_kill_9(path: Path, victim: Victims) -> None:
    rng = random.Random(20261120)
    told = Told()
    for _ in range(ROUNDS):
        victim.start(path, rng.randrange(1 << 30), told.latest + 1)
        for _ in range(rng.randrange(150)):
            told.hear(victim.line())
        told.hear_last(victim.kill())
        await check(path, told)
    assert len(told.promised) == 20
    assert len(told.flushed) == 20
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    connection.close()


async def test_no_promise_is_lost_by_repeated_kills_shortly_after_the_start(
    path: Path, victim: Victims
) -> None:
    """The file is not opened in between, so the journals of many processes accumulate."""
    rng = random.Random(7)
    told = Told()
    for _ in range(15):
        victim.start(path, rng.randrange(1 << 30), told.latest + 1)
        for _ in range(rng.randrange(8)):
            told.hear(victim.line())
        told.hear_last(victim.kill())
    await check(path, told)


async def test_a_record_put_a_second_before_kill_9_is_not_lost(path: Path, victim: Victims) -> None:
    """Without a flush, the writer commits by itself. A slow machine gets three attempts."""
    lost = [await lost_after(1.0, path, victim)]
    while lost[-1] and len(lost) < 3:
        lost.append(await lost_after(1.0, path.with_name(f"{len(lost)}.db"), victim))
    assert lost[-1] == []


async def lost_after(seconds: float, path: Path, victim: Victims) -> list[str]:
    """Return the records that were put so long before the kill, and are missing."""
    told = Told()
    victim.start(path, 5, 0)
    while not told.put_at or told.now < min(at for _, at in told.put_at.values()) + seconds:
        told.hear(victim.line())
    victim.kill()  # its last reports are too recent to count
    lost = []
    async with SqliteStorage(path) as storage:
        for scope, (value, at) in told.put_at.items():
            if at < told.now - seconds:
                found = await storage.load_origin(f"https://{scope}")
                if found is None or found.fetched_at < value:
                    lost.append(scope)
    return lost
