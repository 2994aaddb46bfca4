"""How a chain is written: segments, seals, failures of the disk, forks."""

from __future__ import annotations

import asyncio
import gzip
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gatekeeper import Deferred, StorageError
from gatekeeper.audit import chain
from gatekeeper.audit.lines import SealLine, read_line
from gatekeeper.clock import VirtualClock
from gatekeeper.signing import new_key
from gatekeeper.testing import ScriptedGate
from tests.audit.conftest import chains_of, config_of, full_disk
from tests.waiting_support import until

Read = Callable[..., list[dict[str, Any]]]
A = "https://a.example"


async def a_request(folder: Path) -> None:
    async with ScriptedGate(config=config_of(folder)) as gate:
        await requests(gate, 1)


async def requests(gate: ScriptedGate, count: int) -> None:
    for number in range(count):
        (await gate.acquire(f"{A}/{number}")).end()


async def test_a_full_segment_is_sealed_and_compressed_and_the_next_one_goes_on(
    folder: Path, read_record: Read
) -> None:
    async with ScriptedGate(config=config_of(folder, audit={"rotate": 8192})) as gate:
        await requests(gate, 60)
    lines = read_record()
    seals = [line for line in lines if line["kind"] == "seal"]
    assert len(seals) == len(list(folder.glob("*.jsonl.gz"))) > 3
    assert [seal["reason"] for seal in seals] == ["size"] * (len(seals) - 1) + ["end"]
    first = 1
    for seal in seals:
        assert (seal["first"], seal["lines"]) == (first, seal["n"] - 1)
        assert (seal["key"], seal["signature"]) == (None, None)
        first = seal["n"] + 1
    assert not list(folder.glob("*.jsonl"))
    assert not list(folder.glob(".*"))


async def test_a_segment_is_closed_after_a_day(
    folder: Path, read_record: Read, virtual_clock: VirtualClock
) -> None:
    async with ScriptedGate(config=config_of(folder), clock=virtual_clock) as gate:
        await requests(gate, 1)
        virtual_clock.advance(86_401.0)
        await requests(gate, 1)
    assert [seal["reason"] for seal in read_record("seal")] == ["age", "end"]


async def test_seals_are_signed_with_the_key_of_the_identity(
    folder: Path, read_record: Read, tmp_path: Path
) -> None:
    key = new_key(tmp_path / "bot.pem")
    identity = {"key": str(tmp_path / "bot.pem"), "directory": "https://bot.example"}
    async with ScriptedGate(config=config_of(folder, identity=identity)) as gate:
        await requests(gate, 1)
    (seal,) = read_record("seal")
    ((name, _),) = chains_of(folder).items()
    assert seal["key"] == key.public.keyid
    assert chain.is_signed(key.public, name, seal["n"], seal["prev"], seal["signature"])


async def test_folders_and_files_are_readable_by_their_owner_alone(folder: Path) -> None:
    async with ScriptedGate(config=config_of(folder)) as gate:
        gate.say(A, "User-agent: *\nDisallow: /x\n")
        await requests(gate, 1)
        paths = [folder, *folder.rglob("*")]
        assert len(paths) == 5
        for path in paths:
            assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600)


async def test_a_start_names_the_last_whole_line_of_each_unsealed_chain(
    folder: Path, read_record: Read
) -> None:
    async with ScriptedGate(config=config_of(folder)):
        pass  # a sealed chain, which is not named
    folder.joinpath("notes.txt").write_text("not ours")
    (sealed,) = folder.glob("*.gz")
    whole = gzip.decompress(sealed.read_bytes()).splitlines()[0]  # its start
    chain_of, _, rest = sealed.name.partition("Z-")
    # The other chain began a microsecond before or after.
    torn = folder / f"{chain_of[:-1]}{int(chain_of[-1]) ^ 1}Z-{rest.removesuffix('.gz')}"
    torn.write_bytes(whole + b'\n{"v":1,"n":2')
    empty = folder / "old-2-20260101T000000000000Z-000001.jsonl"
    empty.write_bytes(b"")
    for path in (torn, empty):
        path.chmod(0o600)
    async with ScriptedGate(config=config_of(folder)):
        pass
    starts = [
        one for lines in chains_of(folder).values() for one in lines if one["kind"] == "start"
    ]
    named = max(starts, key=lambda line: line["t"])["chains"]
    assert named == [{"segment": torn.name, "n": 1, "digest": chain.digest_of(whole)}]
    assert torn.read_bytes() == whole + b'\n{"v":1,"n":2'


@pytest.mark.parametrize("octets", [0, 1, 100])
async def test_on_a_full_disk_leases_are_deferred_until_the_record_can_be_written(
    octets: int,
    folder: Path,
    read_record: Read,
    virtual_clock: VirtualClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with ScriptedGate(config=config_of(folder), clock=virtual_clock) as gate:
        await requests(gate, 2)
        before = read_record()
        with full_disk(monkeypatch, octets):
            for _ in range(3):
                with pytest.raises(Deferred, match=r"storage.*No space left") as caught:
                    await gate.acquire(f"{A}/3")
                assert caught.value.decision.reason == "storage"
            assert not gate.ready
            assert "No space left" in (gate.parts.storage_failing or "")
            assert any(view.kind == "storage" for view in await gate.why("a.example"))
            virtual_clock.advance(1.5)
            assert not gate.ready
        assert read_record() == before
        virtual_clock.advance(4.0)
        assert gate.ready
        await requests(gate, 2)
    lines = read_record()
    assert [line["kind"] for line in lines].count("grant") == 4
    (omitted,) = read_record("omitted")
    assert omitted["count"] >= 3
    assert "No space left" in omitted["why"]


async def test_on_a_full_disk_requests_go_on_if_asked_for_and_the_gap_is_written(
    folder: Path, read_record: Read, virtual_clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(folder, audit={"on_failure": "continue"})
    async with ScriptedGate(config=config, clock=virtual_clock) as gate:
        open_lease = await gate.acquire(f"{A}/open")
        open_lease.report(status=200)
        open_lease.end()
        with full_disk(monkeypatch, 50):
            await requests(gate, 5)
            late = await gate.acquire("http://b.example/late")
            assert gate.ready
        virtual_clock.advance(2.0)
        late.end()
        await requests(gate, 1)
    assert len(read_record("grant")) == len(read_record("outcome")) == 2
    # Five grants with their outcomes, and one whose outcome came when lines were written again.
    assert [line["count"] for line in read_record("omitted")] == [11, 1]


async def test_a_text_that_cant_be_stored_defers_the_leases_that_it_would_decide(
    folder: Path, read_record: Read, virtual_clock: VirtualClock
) -> None:
    async with ScriptedGate(config=config_of(folder), clock=virtual_clock) as gate:
        gate.say(A, "User-agent: *\nDisallow: /x\n")
        (folder / "texts").write_text("in the way")
        with pytest.raises(Deferred, match="storage"):
            await gate.acquire(f"{A}/")
        (folder / "texts").unlink()
        virtual_clock.advance(2.0)
        (await gate.acquire(f"{A}/")).end()
    assert len(read_record("grant")) == 1


async def test_a_folder_that_cant_be_used_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"audit\.folder: .*file: can't be used .*give a folder"):
        async with ScriptedGate(config=config_of(tmp_path / "file")):
            pass


async def test_a_gate_that_starts_on_a_full_disk_begins_its_chain_later(
    folder: Path, read_record: Read, virtual_clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    with full_disk(monkeypatch, 10):
        gate = ScriptedGate(config=config_of(folder), clock=virtual_clock)
        await gate.__aenter__()
        assert not gate.ready
    virtual_clock.advance(2.0)
    await requests(gate, 1)
    await gate.__aexit__()
    assert len(read_record("grant")) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
async def test_a_forked_child_writes_a_chain_of_its_own(folder: Path) -> None:
    async with ScriptedGate(config=config_of(folder)) as gate:
        await requests(gate, 1)
        parent = await gate.acquire(f"{A}/parent")
        if (child := os.fork()) == 0:
            code = 1
            try:  # what waits in the parent is not written here
                gate.parts.scheduler.block("a.example", gate.parts.clock.wall() + 60.0)
                asyncio.run(a_request(folder))
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        parent.end()
    chains = chains_of(folder)
    of_parent = next(lines for name, lines in chains.items() if f"-{os.getpid()}-" in name)
    assert [line["url"] for line in of_parent if line["kind"] == "grant"] == [
        f"{A}/0",
        f"{A}/parent",
    ]
    assert len(chains) == 2
    for name, lines in chains.items():
        assert lines[0]["pid"] == int(name.split("-")[-2])
        assert not [line for line in lines if line["kind"] == "block"]


async def test_lines_of_a_closed_gate_begin_no_chain(folder: Path, read_record: Read) -> None:
    async with ScriptedGate(config=config_of(folder)) as gate:
        lease = await gate.acquire(f"{A}/")
    lease.end()
    assert read_record()[-1]["kind"] == "seal"


async def test_half_characters_do_not_stop_the_record(folder: Path, read_record: Read) -> None:
    async with ScriptedGate(config=config_of(folder)) as gate:
        await gate.block("a.example", gate.parts.clock.wall() + 60.0, "half \ud800")
    assert read_record("block")[0]["reason"] == r"half \ud800"


def test_a_large_text_is_stored_whole(tmp_path: Path) -> None:
    from gatekeeper.audit.files import TextStore

    for body in (b"", b"User-agent: *\n", b"Disallow: /x\n" * 40_000):
        digest = TextStore(tmp_path).keep(body)
        assert gzip.decompress((tmp_path / chain.text_path(digest)).read_bytes()) == body
        assert TextStore(tmp_path).keep(body) == digest


async def test_old_segments_leave_their_seals_and_take_texts_that_nothing_names_with_them(
    folder: Path, virtual_clock: VirtualClock
) -> None:
    def texts() -> set[str]:
        return {path.name for path in folder.glob("texts/*/*.gz")}

    config = config_of(folder, audit={"keep": 86_400.0 * 2})
    async with ScriptedGate(config=config, clock=virtual_clock) as gate:
        gate.say(A, "User-agent: *\nDisallow: /old\n")
        gate.say("https://b.example", "User-agent: *\nDisallow: /stays\n")
        await requests(gate, 2)
        (await gate.acquire("https://b.example/")).end()
        old = texts()
        for _ in range(5):
            virtual_clock.advance(86_401.0)
            gate.say(A, "User-agent: *\nDisallow: /new\n")
            await requests(gate, 1)
            (await gate.acquire("https://b.example/")).end()
            await until(lambda: len(list(folder.glob("*.jsonl"))) == 1)
    names = sorted(path.name.split("-", 3)[3] for path in folder.iterdir() if path.is_file())
    assert len(old - texts()) == 1
    assert len(texts()) == 2
    ends = [name.partition(".")[2] for name in names]
    assert ends == [*["seal.json"] * 3, *["ids", "jsonl.gz"] * 3]
    assert isinstance(read_line(next(folder.glob("*.seal.json")).read_bytes()), SealLine)


async def test_a_lease_of_an_earlier_process_is_held_though_its_line_cant_be_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its request may be in flight."""
    config = config_of(folder, pacing={"default_interval": 1.0})
    async with ScriptedGate(config=config) as gate:
        with full_disk(monkeypatch):
            lease = await gate.parts.leases.hold(f"{A}/", 60.0, None)
            assert not lease.ended
            assert gate.stats().pacing.in_flight == 1
            lease.end()
