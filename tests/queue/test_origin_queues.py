from __future__ import annotations

import itertools
import random
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gatekeeper.decision import Reason
from gatekeeper.errors import StorageError
from gatekeeper.queue.files import OverflowFile
from gatekeeper.queue.origin_queues import Backlog

ARRIVALS = itertools.count()


@pytest.fixture
def overflow() -> Iterator[OverflowFile]:
    made = OverflowFile()
    yield made
    made.close()


def drain(backlog: Backlog) -> list[str]:
    return [backlog.pop()[2] for _ in range(len(backlog))]


def test_urls_come_in_the_order_of_arrival_through_the_file(overflow: OverflowFile) -> None:
    backlog = Backlog(1, overflow, 4, ARRIVALS)
    urls = [f"u{number}" for number in range(2000)]
    for url in urls:
        backlog.put(url, 0)
    assert overflow.rows > 1900
    assert drain(backlog) == urls
    assert overflow.rows == 0


def test_backlogs_in_one_file_do_not_mix(overflow: OverflowFile) -> None:
    lanes = [Backlog(number, overflow, 2, ARRIVALS) for number in range(3)]
    for number in range(30):
        lanes[number % 3].put(f"u{number}", 0)
    assert drain(lanes[1]) == [f"u{number}" for number in range(1, 30, 3)]


@pytest.mark.parametrize("seed", range(5))
def test_urls_of_any_priorities_come_in_order(overflow: OverflowFile, seed: int) -> None:
    rng = random.Random(seed)
    backlog = Backlog(7, overflow, 3, ARRIVALS)
    waiting: list[tuple[float, int, str]] = []
    number = 0
    for _ in range(3000):
        if waiting and rng.random() < 0.48:
            expected = min(waiting)
            waiting.remove(expected)
            entry = backlog.pop()
            assert entry[2] == expected[2]
            if rng.random() < 0.2:
                backlog.put_back(entry)
                waiting.append(expected)
        else:
            number += 1
            priority = rng.choice((0, 0, 0, 1, 5))
            backlog.put(f"u{number}", priority)
            waiting.append((-priority, number, f"u{number}"))
        assert len(backlog) == len(waiting)
        assert backlog.rank() <= min(waiting, default=(0.0,))[0]


def test_the_overflow_file_is_made_at_its_path_and_removed_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "scratch.sqlite"
    overflow = OverflowFile(path)
    backlog = Backlog(1, overflow, 1, ARRIVALS)
    for number in range(1000):
        backlog.put(f"u{number}", 0)
    assert path.exists()
    overflow.close()
    overflow.close()
    assert not path.exists()


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[sqlite3.Connection]:
    """Those that are opened from now on."""
    made, connect = list[sqlite3.Connection](), sqlite3.connect

    def record(*how: Any, **options: Any) -> sqlite3.Connection:
        made.append(connect(*how, **options))
        return made[-1]

    monkeypatch.setattr(sqlite3, "connect", record)
    return made


def test_a_full_disk_loses_no_url_and_a_later_put_works(
    tmp_path: Path, connections: list[sqlite3.Connection]
) -> None:
    overflow = OverflowFile(tmp_path / "scratch.sqlite")
    backlog = Backlog(1, overflow, 2, ARRIVALS)
    urls = [f"https://a.example/{number}/" + "x" * 500 for number in range(3000)]
    for url in urls[:600]:
        backlog.put(url, 0)
    [connection] = connections
    pages = connection.execute("PRAGMA page_count").fetchone()[0]
    connection.execute(f"PRAGMA max_page_count = {pages + 20}")  # a disk that is nearly full
    kept = 600

    def fill() -> None:
        nonlocal kept
        for url in urls[kept:]:
            backlog.put(url, 0)
            kept += 1

    for _ in range(3):
        with pytest.raises(StorageError, match="full"):
            fill()
        assert len(backlog) == kept
        assert not connection.in_transaction
    connection.execute("PRAGMA max_page_count = 100000")
    fill()
    assert drain(backlog) == urls
    overflow.close()


def test_a_chunk_that_can_not_be_read_stays_where_it_is(
    tmp_path: Path, connections: list[sqlite3.Connection]
) -> None:
    overflow = OverflowFile(tmp_path / "scratch.sqlite")
    backlog = Backlog(1, overflow, 1, ARRIVALS)
    for number in range(600):
        backlog.put(f"u{number}", 0)
    [connection] = connections
    connection.execute("PRAGMA query_only = ON")  # the SELECT succeeds, the DELETE does not
    assert backlog.pop()[2] == "u0"
    for _ in range(2):
        with pytest.raises(StorageError):
            backlog.pop()
    assert len(backlog) == 599
    connection.execute("PRAGMA query_only = OFF")
    assert drain(backlog) == [f"u{number}" for number in range(1, 600)]
    overflow.close()


def test_an_entry_is_put_back_without_writing_to_the_file(tmp_path: Path) -> None:
    overflow = OverflowFile(tmp_path / "missing" / "scratch.sqlite")
    backlog = Backlog(1, overflow, 1, ARRIVALS)
    backlog.put("first", 0)
    backlog.put("second", 0)
    entry = backlog.pop()
    backlog.put_back(entry)
    assert backlog.pop() == entry
    overflow.close()


def test_pop_of_an_empty_backlog_raises_index_error(overflow: OverflowFile) -> None:
    with pytest.raises(IndexError):
        Backlog(1, overflow, 1, ARRIVALS).pop()


class Thing:
    """What nobody can write down."""


PLAIN = [None, True, 0, -(2**63), 2**64 - 1, 1.5, "é", b"\x00", [1, [2.0]], {"a": {"b": [None]}}]
OBJECTS = [
    (1, 2),
    2**70,
    {1: "x"},
    {"a": (1,)},
    "\ud800",
    Thing(),
    Thing,
    {1, 2},
    print,
    Reason.RULE,
]


def test_payloads_come_back_with_their_urls_and_types(tmp_path: Path) -> None:
    # The plain ones take no memory, so that there is room for the others.
    overflow = OverflowFile(tmp_path / "scratch.sqlite", max_objects=100 * len(OBJECTS))
    backlog = Backlog(1, overflow, 2, ARRIVALS)
    given = [*PLAIN, *OBJECTS] * 100
    for number, data in enumerate(given):
        backlog.put(f"u{number}", 0, data)
    assert overflow.rows > 1900
    for number, data in enumerate(given):
        entry = backlog.pop()
        assert entry[2] == f"u{number}"
        assert entry[3] == data
        assert type(entry[3]) is type(data)
        if number % 7 == 0:  # put back, it keeps its payload
            backlog.put_back(entry)
            assert backlog.pop()[3] == data
    for data in OBJECTS * 100:  # there is room again
        backlog.put("u", 0, data)
    overflow.close()


def test_a_payload_that_contains_itself_stays_in_memory(overflow: OverflowFile) -> None:
    backlog = Backlog(1, overflow, 1, ARRIVALS)
    endless: list[object] = []
    endless.append(endless)
    for _ in range(3):
        backlog.put("u", 0, endless)
    assert [backlog.pop()[3] is endless for _ in range(3)] == [True] * 3


def put_many(backlog: Backlog, count: int) -> None:
    for _ in range(count):
        backlog.put("u", 0, Thing())


def test_payloads_that_cannot_be_written_are_bounded(overflow: OverflowFile) -> None:
    few = OverflowFile(max_objects=10)
    backlog = Backlog(1, few, 2, ARRIVALS)
    with pytest.raises(StorageError, match=r"holds 10 payloads .* this Thing: use plain values"):
        put_many(backlog, 100)
    before = len(backlog)
    backlog.put("u", 0, {"plain": 1})
    assert len(backlog) == before + 1
    few.close()
