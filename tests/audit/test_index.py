"""How a decision is found in a segment, by its index and without."""

from __future__ import annotations

import os
import subprocess
import zlib
from array import array
from pathlib import Path
from typing import SupportsIndex

import pytest

from gatekeeper import NotYet
from gatekeeper.audit import files, index
from gatekeeper.audit.erase import erase
from gatekeeper.audit.index import DecisionIndex
from gatekeeper.clock import VirtualClock
from gatekeeper.gate.parts import FoundLine
from gatekeeper.testing import ScriptedGate
from tests.audit.conftest import config_of, full_disk
from tests.processes import PYTHON
from tests.waiting_support import until

A, B = "https://a.example", "https://b.example"


def gate_of(folder: Path, rotate: int = 1_000_000) -> ScriptedGate:
    return ScriptedGate(config=config_of(folder, audit={"rotate": rotate}))


async def asked(gate: ScriptedGate, *urls: str) -> list[str]:
    """Return the ids of the decisions about some URLs."""
    found = []
    for url in urls:
        lease = await gate.acquire(url)
        found.append(lease.decision.id)
        lease.end()
    return found


async def find(gate: ScriptedGate, decision: str) -> FoundLine | None:
    assert gate.parts.audit is not None
    return await gate.parts.audit.find(decision)


async def places(gate: ScriptedGate, ids: list[str], *numbers: int) -> set[str]:
    """Find the decisions about the pages with some numbers, and return the segments."""
    segments = set()
    for number in numbers:
        found = await find(gate, ids[number])
        assert found is not None
        assert found.line["url"] == f"{A}/{number}"
        segments.add(found.segment)
    return segments


def urls_of(count: int, origin: str = A) -> list[str]:
    return [f"{origin}/{number}" for number in range(count)]


async def test_a_decision_is_found_in_the_open_and_the_last_closed_segment(folder: Path) -> None:
    async with gate_of(folder, rotate=8192) as gate:
        ids = await asked(gate, *urls_of(40))
        found = [await find(gate, one) for one in ids]
    numbers = [line and int(line.segment.partition(".jsonl")[0][-6:]) for line in found]
    last = numbers[-1] or 0
    assert last > 2
    assert set(numbers) == {None, last - 1, last}  # older segments are not searched
    for number, line in enumerate(found):
        assert line is None or line.line["url"] == f"{A}/{number}"


async def test_the_index_of_a_closed_segment_leads_to_the_part_with_the_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MEMBER", 2048)
    async with gate_of(folder) as gate:
        ids = await asked(gate, *urls_of(40))
    (segment,) = folder.glob("*.jsonl.gz")
    octets = segment.read_bytes()
    segment.write_bytes(bytes(len(octets) // 2) + octets[len(octets) // 2 :])
    async with gate_of(folder) as gate:
        assert await find(gate, ids[0]) is None  # in the part that is no more
        assert await places(gate, ids, 30, 39) == {segment.name}
        assert await find(gate, "ffffff-ffffff") is None


@pytest.mark.parametrize("left", [None, 0, 7, 100])
async def test_without_a_whole_index_the_segment_is_read(folder: Path, left: int | None) -> None:
    async with gate_of(folder) as gate:
        ids = await asked(gate, *urls_of(20))
    (ids_path,) = folder.glob("*.ids")
    assert ids_path.stat().st_mode & 0o777 == 0o600
    assert ids_path.stat().st_size == 20 * 12
    octets = ids_path.read_bytes()
    ids_path.unlink()
    if left is not None:
        ids_path.write_bytes(octets[:left])
    async with gate_of(folder) as gate:
        assert (await find(gate, ids[7])) is not None


@pytest.mark.parametrize(
    "places",
    [[2**64 - 1] * 3, [1, 2, 3], list(range(5_000))],
    ids=["behind the end", "in a part", "very many"],
)
async def test_a_wrong_index_ends_in_an_answer(folder: Path, places: list[int]) -> None:
    """It may say that there is no such line: it is a hint of who can write to the folder."""
    async with gate_of(folder) as gate:
        ids = await asked(gate, *urls_of(20))
    (ids_path,) = folder.glob("*.ids")
    keys = array("I", [zlib.crc32(ids[7].encode())] * len(places))
    ids_path.write_bytes(keys.tobytes() + array("Q", places).tobytes())
    async with gate_of(folder) as gate:
        assert (await find(gate, ids[7]) is not None) is (len(places) > 100)
        assert await find(gate, "ffffff-ffffff") is None
        ids_path.unlink()
        os.mkfifo(ids_path)
        assert await find(gate, ids[7]) is not None


@pytest.mark.parametrize(
    "line",
    [b"[%s]", b'{"a":[%s' + b"[" * 100_000, b'{"v":1,%s}', b"x" * 5_000_000 + b"%s", b"{%s}"],
    ids=range(5),
)
async def test_what_is_no_line_is_no_decision(folder: Path, line: bytes) -> None:
    folder.mkdir()
    octets = line.replace(b"%s", b'"decision":"aa-1"') + b"\n"
    (folder / "web-1-20260131T120000000000Z-000001.jsonl").write_bytes(octets)
    async with gate_of(folder) as gate:
        assert await find(gate, "aa-1") is None


async def test_the_index_of_a_busy_segment_is_bounded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "MAX_IDS", 5)
    async with gate_of(folder) as gate:
        ids = await asked(gate, *urls_of(20))
        assert (await find(gate, ids[19])) is not None
    assert not list(folder.glob("*.ids"))
    async with gate_of(folder) as gate:
        assert (await find(gate, ids[19])) is not None


async def test_two_ids_with_one_key_are_told_apart(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index.zlib, "crc32", lambda _octets: 7)
    async with gate_of(folder) as gate:
        ids = await asked(gate, *urls_of(5))
        await places(gate, ids, *range(5))


async def test_a_line_that_could_not_be_written_leaves_no_place(
    folder: Path, monkeypatch: pytest.MonkeyPatch, clock: VirtualClock
) -> None:
    async with ScriptedGate(config=config_of(folder), clock=clock) as gate:
        await asked(gate, f"{A}/before")
        with full_disk(monkeypatch, 10):
            assert isinstance(await gate.try_acquire(f"{A}/lost"), NotYet)
        clock.advance(61.0)
        await clock.settle()
        ids = await asked(gate, *urls_of(3))
    async with gate_of(folder) as gate:
        await places(gate, ids, *range(3))


def test_an_index_is_searched_while_lines_are_added_and_cut() -> None:
    found = DecisionIndex()
    seen: list[list[int]] = []

    class Looked(array):  # type: ignore[type-arg]  # another thread looks between two steps
        def append(self, value: int) -> None:
            array.append(self, value)
            seen.append(list(found.find("d")))

        def __delitem__(self, key: SupportsIndex | slice) -> None:
            array.__delitem__(self, key)
            seen.append(list(found.find("d")))

    found.keys, found.places = Looked("I"), Looked("Q")
    found.add("d", 5)
    found.add("d", 9)
    looking = found.find("d")
    assert next(looking) == 5
    found.cut(9)
    assert list(looking) == []
    assert seen == [[], [5], [5], [5, 9], [5], [5]]


_KILLED = """
import asyncio, os, sys
from gatekeeper.testing import ScriptedGate
from gatekeeper import Config

async def main():
    config = {"pacing": {"default_interval": 0.0}, "audit": {"folder": sys.argv[1]}}
    async with ScriptedGate(config=Config.from_dict(config)) as gate:
        print((await gate.acquire("https://a.example/x")).decision.id, flush=True)
        os.kill(os.getpid(), 9)

asyncio.run(main())
"""


async def test_a_decision_of_a_process_that_was_killed_is_found(folder: Path) -> None:
    done = subprocess.run(
        [PYTHON, "-c", _KILLED, str(folder)], capture_output=True, text=True, check=False
    )
    decision = done.stdout.strip()
    async with gate_of(folder) as other, gate_of(folder, rotate=8192) as gate:
        (running,) = await asked(other, f"{A}/running")
        found = await find(gate, decision)
        assert found is not None
        assert found.line["url"] == f"{A}/x"
        assert await find(gate, running) is None  # of a process that writes its own segments
        await asked(gate, *urls_of(30))
        assert await find(gate, decision) is None  # a segment of its own was closed since


async def test_an_erased_decision_is_in_no_index(folder: Path) -> None:
    async with gate_of(folder, rotate=8192) as gate:
        ids = await asked(gate, *urls_of(3), *urls_of(3, B))
        others = await asked(gate, *urls_of(10, "https://c.example"))
        await until(lambda: not list(folder.glob("*-000001.jsonl")))
        done = erase(folder, "a.example", by="Ann", reason="asked to")
        assert (done.segments, list(folder.glob("*.ids"))) == (1, [])
        assert [await find(gate, one) is not None for one in ids] == [False] * 3 + [True] * 3
        assert (await find(gate, others[-1])) is not None
