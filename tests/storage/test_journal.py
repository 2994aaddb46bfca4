"""The journal alone: what was appended is replayed, even from a torn file."""

from __future__ import annotations

import errno
import os
import struct
import sys
import zlib
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest

from gatekeeper.errors import StorageError
from gatekeeper.storage import ClockRecord, SqliteStorage
from gatekeeper.storage.journal import HEADER, Journal, read_generation
from tests.storage.inside import journal_of


def clock(n: int) -> ClockRecord:
    return ClockRecord(scope=f"{n}.example", next_at=float(n))


def written(path: Path, count: int, limit: int = 1 << 20) -> Path:
    journal = Journal(path, limit=limit)
    journal.begin()
    for n in range(1, count + 1):
        journal.append(n, clock(n))
    journal.abandon()
    return path.with_name(path.name + ".promises-1")


def appended(journal: Journal, numbers: Iterable[int], *, use_reserved: bool = False) -> None:
    for n in numbers:
        journal.append(n, clock(n), use_reserved=use_reserved)


def test_appended_frames_are_replayed_in_order(path: Path) -> None:
    written(path, 3)
    assert list(Journal(path, limit=100).replay(0)) == [(n, clock(n)) for n in (1, 2, 3)]


def test_the_journal_is_written_on_a_platform_without_pwrite(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(path, limit=1 << 20)
    journal.begin()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", "win32")
        patch.delattr(os, "pwrite")
        appended(journal, (1, 2, 3))
    journal.abandon()
    assert list(Journal(path, limit=100).replay(0)) == [(n, clock(n)) for n in (1, 2, 3)]


def test_frames_absorbed_by_the_database_are_not_replayed(path: Path) -> None:
    written(path, 3)
    assert [sequence for sequence, _ in Journal(path, limit=100).replay(2)] == [3]


def test_an_endless_block_survives(path: Path) -> None:
    journal = Journal(path, limit=1000)
    journal.begin()
    endless = ClockRecord(scope="a.example", next_at=0.0, blocked_until=float("inf"))
    journal.append(1, endless)
    journal.abandon()
    assert list(Journal(path, limit=100).replay(0)) == [(1, endless)]


def test_a_promise_that_an_earlier_version_gave_is_read(path: Path) -> None:
    # A frame from before clocks had errors, latency, RateLimit and interval fields.
    payload = msgspec.msgpack.encode(
        (
            7,
            {
                "scope": "a.example",
                "next_at": 9.0,
                "blocked_until": 8.0,
                "block_reason": "in flight, interval 1.0; 429",
                "failures": 1,
                "last_failure_at": 2.0,
                "safe_interval": 0.5,
                "paused": True,
            },
        )
    )
    head = struct.pack("<4sII", b"\xa5\x9c\xc3\x0a", len(payload), zlib.crc32(payload))
    path.with_name(path.name + ".promises-1").write_bytes(
        b"gatekeeper promises 1\n" + head + payload
    )
    ((sequence, found),) = Journal(path, limit=100).replay(0)
    assert sequence == 7
    assert found == ClockRecord(
        scope="a.example",
        next_at=9.0,
        blocked_until=8.0,
        block_reason="429",
        interval=1.0,
        in_flight=True,
        failures=1,
        last_failure_at=2.0,
        safe_interval=0.5,
        paused=True,
    )


def test_a_tail_torn_at_any_byte_costs_its_own_frame_only(path: Path) -> None:
    file = written(path, 3)
    whole = file.read_bytes()
    frames = read_generation(file)
    ends = [len(HEADER) + (len(whole) - len(HEADER)) * n // 3 for n in (1, 2, 3)]
    for cut in range(len(whole)):
        file.write_bytes(whole[:cut])
        found = read_generation(file)
        complete = sum(end <= cut for end in ends)
        assert found == frames[:complete], cut


def test_a_byte_changed_anywhere_costs_one_frame_at_most(path: Path) -> None:
    file = written(path, 3)
    whole = bytearray(file.read_bytes())
    frames = read_generation(file)
    for position in range(len(HEADER), len(whole)):
        changed = whole.copy()
        changed[position] ^= 0x55
        file.write_bytes(changed)
        found = read_generation(file)
        assert len(found) == 2, position
        assert [frame for frame in frames if frame in found] == found


def test_a_file_that_is_no_journal_is_refused(path: Path) -> None:
    path.with_name("state.db.promises-7").write_bytes(b"notes of somebody else\n")
    with pytest.raises(StorageError, match=r"state\.db\.promises-7.*move it away"):
        list(Journal(path, limit=100).replay(0))


def test_files_of_other_names_are_not_touched(path: Path) -> None:
    for name in ("state.db.promises-x", "other.db.promises-1", "state.db.promises-"):
        path.with_name(name).write_bytes(b"theirs")
    journal = Journal(path, limit=100)
    assert list(journal.replay(0)) == []
    journal.begin()
    journal.discard_all()
    assert sorted(p.name for p in path.parent.iterdir()) == [
        "other.db.promises-1",
        "state.db.promises-",
        "state.db.promises-x",
    ]


def test_a_new_generation_keeps_the_one_before_until_it_is_absorbed(path: Path) -> None:
    journal = Journal(path, limit=10)
    journal.begin()
    journal.append(1, clock(1))
    assert journal.is_full
    journal.begin()
    assert not journal.is_full
    journal.append(2, clock(2))
    assert [sequence for sequence, _ in Journal(path, limit=10).replay(0)] == [1, 2]
    journal.discard(journal.retired())
    assert [sequence for sequence, _ in Journal(path, limit=10).replay(0)] == [2]
    journal.abandon()


def test_empty_generations_do_not_wait_to_be_absorbed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(path, limit=1 << 20)
    journal.begin()
    journal.append(1, clock(1))

    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for _ in range(100):  # as a full disk with space for a header only would have it
        journal.begin()
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", refuse)
            with pytest.raises(OSError, match="No space"):
                journal.append(2, clock(2))
    assert len(journal.retired()) == 1
    journal.append(2, clock(2))
    journal.abandon()
    assert [sequence for sequence, _ in Journal(path, limit=100).replay(0)] == [1, 2]


def test_the_journal_stops_growing_while_the_database_refuses_it(path: Path) -> None:
    journal = Journal(path, limit=100)
    journal.begin()
    journal.growth_bounded = True
    journal.append(0, clock(0))
    with pytest.raises(OSError, match="the journal is full"):
        appended(journal, range(1, 100))
    assert journal.size < 4 * 100 + 200
    journal.growth_bounded = False
    journal.append(100, clock(100))
    journal.abandon()


def test_a_write_cut_short_leaves_no_torn_frame(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(path, limit=10_000)
    journal.begin()
    journal.append(1, clock(1))
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: write(fd, data[:7], at))
    with pytest.raises(OSError, match="No space"):
        journal.append(2, clock(2))
    monkeypatch.undo()
    journal.append(3, clock(3))
    journal.abandon()
    frames = read_generation(path.with_name("state.db.promises-1"))
    assert [sequence for sequence, _ in frames] == [1, 3]


class Disk:
    """A disk with so many octets left, simulated by `posix_fallocate` and `pwrite`."""

    def __init__(self, patch: pytest.MonkeyPatch, path: Path, left: int) -> None:
        self.left, self.path = left, path
        self.taken: dict[int, int] = {}
        self._write, self._truncate = os.pwrite, os.ftruncate
        patch.setattr(os, "posix_fallocate", self.fallocate)
        patch.setattr(os, "pwrite", self.pwrite)
        patch.setattr(os, "ftruncate", self.ftruncate)

    def fallocate(self, fd: int, offset: int, length: int) -> None:
        self._grow(fd, offset + length)
        self._truncate(fd, max(offset + length, os.fstat(fd).st_size))

    def pwrite(self, fd: int, data: bytes, offset: int) -> int:
        self._grow(fd, offset + len(data))
        return self._write(fd, data, offset)

    def ftruncate(self, fd: int, length: int) -> None:
        self.left += self.taken.pop(fd, 0) - length
        self._truncate(fd, length)

    def _grow(self, fd: int, end: int) -> None:
        more = max(0, end - self.taken.get(fd, 0))
        if more > self.left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.left -= more
        self.taken[fd] = self.taken.get(fd, 0) + more


needs_room_ahead = pytest.mark.skipif(
    not hasattr(os, "posix_fallocate"), reason="no room can be taken ahead on this system"
)


@needs_room_ahead
def test_a_full_disk_has_reserved_room_for_records_that_can_not_be_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch, path, 200_000)  # space is preallocated once, not twice
    journal = Journal(path, limit=1 << 20)
    journal.begin()
    with pytest.raises(OSError, match="No space"):
        appended(journal, range(1, 100_000))
    refusable = len(read_generation(path.with_name("state.db.promises-1")))
    appended(journal, range(refusable + 1, refusable + 101), use_reserved=True)
    with pytest.raises(OSError, match="No space"):
        journal.append(0, clock(0))
    with pytest.raises(OSError, match="No space"):
        appended(journal, range(20_000, 21_000), use_reserved=True)
    disk.left = 10**6
    journal.append(9999, clock(9))
    journal.abandon()
    found = [sequence for sequence, _ in Journal(path, limit=100).replay(0)]
    assert found[: refusable + 100] == list(range(1, refusable + 101))
    assert found[-1] == 9999


def test_the_journal_works_on_a_file_system_without_preallocation(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*_: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fallocate", unknown, raising=False)
    written(path, 3)
    assert [sequence for sequence, _ in Journal(path, limit=100).replay(0)] == [1, 2, 3]


async def test_a_promise_given_before_a_put_does_not_come_back_over_it(path: Path) -> None:
    """The sequence in the database, not the order of files, determines which is newer."""
    storage = SqliteStorage(path)
    await storage.open()
    storage.promise(ClockRecord(scope="a.example", next_at=9.0))
    storage.put_clock(ClockRecord(scope="a.example", next_at=1.0))
    await storage.flush()
    kept = path.with_name("state.db.promises-1").read_bytes()
    await storage.close()
    # As if the process had been killed before deleting the journal.
    path.with_name("state.db.promises-1").write_bytes(kept)
    async with SqliteStorage(path) as again:
        assert [c.next_at for c in await again.load_clocks()] == [1.0]


async def test_promises_count_on_after_a_restart(path: Path) -> None:
    """Otherwise new promises would count as absorbed already."""
    async with SqliteStorage(path) as storage:
        for n in range(10):
            storage.promise(clock(n))
    storage = SqliteStorage(path)
    await storage.open()
    storage.promise(ClockRecord(scope="new.example", next_at=5.0))
    kept = path.with_name("state.db.promises-1").read_bytes()
    await storage.close()
    frames = [frame for frame in kept.split(b"new.example") if frame]
    assert len(frames) == 2
    path.with_name("state.db.promises-9").write_bytes(kept)
    assert [sequence for sequence, _ in Journal(path, limit=10).replay(10)] == [11]


async def test_the_journal_is_begun_anew_when_it_is_full(path: Path) -> None:
    from gatekeeper.config import StorageConfig

    config = StorageConfig(journal_bytes=500, flush_interval=3600.0)
    async with SqliteStorage(path, config=config) as storage:
        journal = journal_of(storage)
        for n in range(12):
            storage.promise(clock(n))
        assert journal.size > 500
        await storage.flush()
        assert journal.size == len(HEADER)
        names = [p.name for p in path.parent.iterdir() if ".promises-" in p.name]
        assert names == ["state.db.promises-2"]
        assert len(await storage.load_clocks()) == 12
        assert storage.failing is None
